"""Which rank of a host reads which chunk from the store for all of them. Pure: equal input gives equal answers.

A chunk that several ranks need is read by one of them. Chunks that are next to each other in a pack, and that the same
ranks need, are assigned together, so that they are still fetched with long reads. So are a chunk and its base. The rank
with the fewest bytes so far is chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ckstore.config import MIB
from ckstore.format.manifest import Manifest
from ckstore.hashing import ChunkId

if TYPE_CHECKING:
    from numpy.typing import NDArray

GAIN_MIN = 1 / 32
"""Sharing costs memory and copies. Below this part of the bytes that the ranks need, each reads alone."""

RUN_NBYTES_MAX = 8 * MIB
"""Bytes of the chunks that are assigned together."""

_RUNS_PER_RANK = 16
"""Small checkpoints have shorter runs, because otherwise a few of them would go to few ranks."""

ALONE = -1
"""Every rank that needs the chunk reads it."""


def readers_of(manifest: Manifest, needs: NDArray[np.bool_]) -> NDArray[np.int16] | None:
    """Return the reader of each chunk, or ALONE; None: sharing is not worth it.

    Args:
        manifest: The checkpoint.
        needs: Which rank of the host needs which chunk, (ranks, chunks).
    """
    count = needs.sum(axis=0)
    plain = np.fromiter((chunk.nbytes for chunk in manifest.chunks), np.int64, len(manifest.chunks))
    if not (np.maximum(count - 1, 0) * plain).sum() > GAIN_MIN * (count * plain).sum():
        return None
    shared = np.flatnonzero(count > 1)
    keys, stored = _places_of(manifest, shared.tolist())
    order = np.lexsort((shared, *keys[::-1]))
    shared, stored, roots = shared[order], stored[order], keys[0][order] * (1 << 48) + keys[1][order]
    _, patterns = np.unique(np.packbits(needs[:, shared], axis=0), axis=1, return_inverse=True)
    patterns = patterns.reshape(-1)

    loads = (needs & (count == 1)) @ plain
    loads = (loads * (stored.sum() / max(1, plain[shared].sum()))).astype(np.int64)
    run_max = min(RUN_NBYTES_MAX, int(stored.sum()) // (_RUNS_PER_RANK * len(needs)))
    readers = np.full(len(plain), ALONE, np.int16)
    begin = 0
    for end in _run_ends(patterns, roots, stored, run_max):
        able = np.flatnonzero(needs[:, shared[begin]])
        reader = able[np.argmin(loads[able])]
        readers[shared[begin:end]] = reader
        loads[reader] += stored[begin:end].sum()
        begin = end
    return readers


def _run_ends(
    patterns: NDArray[np.int64], roots: NDArray[np.int64], stored: NDArray[np.int64], run_max: int
) -> list[int]:
    """Return where runs of chunks end that the same ranks need; chunks with one root stay together."""
    ends: list[int] = []
    nbytes = 0
    last = len(patterns) - 1
    is_cut = (patterns[1:] != patterns[:-1]).tolist()
    is_same_root = (roots[1:] == roots[:-1]).tolist()
    for index, each in enumerate(stored.tolist()):
        nbytes += each
        if index == last or is_cut[index] or (nbytes >= run_max and not is_same_root[index]):
            ends.append(index + 1)
            nbytes = 0
    return ends


def _places_of(manifest: Manifest, chunks: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return pack and offset of each chunk's last base, (2, n), and the stored bytes of its whole chain, (n,)."""
    frame_of = {frame.chunk_id: index for index, frame in enumerate(manifest.frames)}
    rows: list[tuple[int, int, int]] = []
    for chunk in chunks:
        frame = manifest.frames[frame_of[ChunkId(manifest.chunks[chunk].chunk_id)]]
        nbytes = frame.frame_nbytes
        while frame.base >= 0:
            frame = manifest.frames[frame.base]
            nbytes += frame.frame_nbytes
        rows.append((frame.pack, frame.offset, nbytes))
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[:, :2].T, table[:, 2]
