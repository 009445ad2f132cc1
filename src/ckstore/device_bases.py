"""Reconstructions that lie on devices, for the next commit to quantize against: copies of bases, and never the bases.

Invariants:
- What is lost here is brought from the host again: any entry may go at any time.
- Of a base that a commit was given nothing is kept: what takes its place takes its memory.
"""

from __future__ import annotations

import threading
from typing import Any

from ckstore.ids import ChunkId


class DeviceBases:
    """What one handle keeps on devices from one commit to the next; thread-safe."""

    def __init__(self) -> None:
        self._held: dict[ChunkId, Any] = {}
        self._drafts: dict[ChunkId, Any] = {}
        self._nbytes = 0
        self._nbytes_max: int | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._nbytes

    def begin(self, nbytes_max: int | None) -> None:
        """Begin a commit while which, and after which, no more than these bytes are kept; None: no bound."""
        with self._lock:
            self._nbytes_max = nbytes_max
            for chunk_id in list(self._held) if nbytes_max is not None else ():
                if self._nbytes <= (nbytes_max or 0):
                    break
                self._nbytes -= self._held.pop(chunk_id).nbytes

    def take(self, chunk_id: ChunkId) -> Any:
        """Return what is kept of a chunk, and keep it no longer; None: nothing."""
        with self._lock:
            found = self._held.pop(chunk_id, None)
            self._nbytes -= 0 if found is None else found.nbytes
            return found

    def keep(self, chunk_id: ChunkId, tensor: Any) -> None:
        """Keep what a chunk became, as a tensor on its device, if there is room."""
        with self._lock:
            is_new = chunk_id not in self._drafts
            if is_new and (self._nbytes_max is None or self._nbytes + tensor.nbytes <= self._nbytes_max):
                self._drafts[chunk_id] = tensor
                self._nbytes += tensor.nbytes

    def follow(self, wanted: set[ChunkId]) -> None:
        """Keep only what the next commit may be told in, and what this one has made of it."""
        with self._lock:
            both = {**self._held, **self._drafts}
            self._held = {chunk_id: tensor for chunk_id, tensor in both.items() if chunk_id in wanted}
            self._drafts = {}
            self._nbytes = sum(tensor.nbytes for tensor in self._held.values())

    def forget_drafts(self) -> None:
        """Let go of what a commit that failed, or is tried again, has made."""
        with self._lock:
            self._nbytes -= sum(tensor.nbytes for tensor in self._drafts.values())
            self._drafts = {}

    def forget(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._held, self._drafts, self._nbytes = {}, {}, 0
