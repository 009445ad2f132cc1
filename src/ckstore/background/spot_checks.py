"""Which words of guarded memory are compared: enough to find every row that was changed, as long as rows are few.

What is changed through ``data`` is counted by nobody. Codebooks restart entries that way, a row of a matrix at a time;
so one word of each row is noted before training goes on, and compared with the copy. Another column in each row: what
changes a column is found, too, unless the matrix is small. Pure: no byte is read.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ckstore.format.tensors import byte_strides_of
from ckstore.state.capture import Captured

WORD_NBYTES = 8

SPOTS_MAX = 1 << 15
"""Of all guarded memory. A word that no cache has takes up to 50 ns, and a call behind a guard waits for them."""

_PITCH_NBYTES = 4096
"""Between two words of what has no rows."""

_PITCH_NBYTES_MIN = 64
_SPREAD = 40503
"""Odd, and far from a small part of any length of a row (Knuth's multiplicative hashing, 16 bits)."""


def pitches_of(captured: Captured) -> list[int]:
    """Return for each storage how long a row of the tensors in it is, in bytes: of the slowest of their dimensions."""
    pitches: list[int] = [0] * len(captured.storages)
    for spec in captured.tensors:
        if len(spec.shape) >= 2:
            width = captured.storages[spec.storage].element_width
            pitch = max(byte_strides_of(spec.library, spec.strides, width))
            if pitch > 0:
                pitches[spec.storage] = min(pitch, pitches[spec.storage] or pitch)
    return [max(pitch, _PITCH_NBYTES_MIN) if pitch else _PITCH_NBYTES for pitch in pitches]


def spots_of(rows: Mapping[int, tuple[int, int]]) -> NDArray[np.int64]:
    """Return storage and offset of the words to compare.

    Args:
        rows: Length and pitch of each storage. Those with few rows have all of them compared, and larger ones share
            what is left of ``SPOTS_MAX``.
    """
    counts = {index: -(-nbytes // pitch) for index, (nbytes, pitch) in rows.items() if nbytes >= WORD_NBYTES}
    spots: list[NDArray[np.int64]] = [np.empty((0, 2), np.int64)]
    left = SPOTS_MAX
    for number, (index, count) in enumerate(sorted(counts.items(), key=lambda item: item[1])):
        taken = min(count, left // (len(counts) - number))
        if taken:
            left -= taken
            spots.append(_spots_in(index, *rows[index], chosen=(np.arange(taken, dtype=np.int64) * count) // taken))
    return np.concatenate(spots)


def _spots_in(index: int, nbytes: int, pitch: int, *, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    columns = chosen * _SPREAD % max(1, pitch // WORD_NBYTES) * WORD_NBYTES
    offsets = np.minimum(chosen * pitch + columns, nbytes - WORD_NBYTES)
    return np.stack((np.full_like(offsets, index), offsets), axis=1)
