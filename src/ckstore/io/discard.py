"""A backend that is read as it is, and to which packs are written without being kept: to find out what they would take.

Invariants:
- Nothing of the backend behind it is changed by what a commit does before it publishes.
"""

from __future__ import annotations

from typing import Any

from ckstore.io.backend import Backend, PackSink
from ckstore.io.buffers import AlignedBuffer


class _Sink:
    """Takes a pack, and forgets it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, buffer: AlignedBuffer, nbytes: int, offset: int) -> None:
        buffer.release()

    def drain(self) -> None: ...

    def finish(self, nbytes: int) -> None: ...

    def close(self) -> None: ...


class Nowhere:
    """Reads what another backend has; what is written goes nowhere.

    Args:
        backend: What is read.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def create_pack(self, name: str, *, nbytes_expected: int) -> PackSink:
        """Begin a pack that is not kept."""
        return _Sink(name)

    def make_folder(self, name: str) -> bool:
        """Make no folder."""
        return False

    def sync_folder(self, name: str) -> None:
        """Make nothing durable."""

    def unlink(self, name: str) -> None:
        """Remove nothing."""
