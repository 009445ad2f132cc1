"""Find changes of what an optimizer owns outside of its steps.

torch counts most changes of a tensor. It does not count those through ``.data``, by numpy, and by some fused kernels.
For these, some words of each tensor in host memory are compared: every change of a whole tensor is found, and that of a
few elements may be missed. Then a replay gives other bytes, which its checksums show. On devices only counted changes
are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckstore.codec.kernels import copy_units

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORD_NBYTES = 8

_KINDS = (torch.Tensor, torch.nn.Parameter)
"""Tensors whose address is that of their elements."""

_WORDS_MAX = 2048
"""Words of all tensors together. Reading them takes less than a millisecond, also from cold memory."""

_SPREAD = 0.6180339887498949
"""Fractional part of the golden ratio. Its multiples, modulo 1, are spread evenly, so columns differ between rows."""


class OwnedMemory:
    """What one optimizer owns, as it was when it was noted last. It keeps no tensor alive."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []
        self._versions: list[int] | None = None
        self._table: NDArray[np.uint64] = np.empty((0, 3), np.uint64)
        self._words: NDArray[np.uint8] = np.empty((0, WORD_NBYTES), np.uint8)

    @property
    def tensor_count(self) -> int:
        """How many tensors there were."""
        return len(self._places)

    def note(self, tensors: Sequence[Any]) -> bool:
        """Note what tensors contain now. Return whether that differs from the last note; False for the first one.

        Args:
            tensors: All tensors of the optimizer, in a fixed order.
        """
        places = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        versions, words = [tensor._version for tensor in tensors], self._words
        is_first = self._versions is None
        has_changed = not is_first and (places != self._places or versions != self._versions)
        if is_first or places != self._places:
            self._places, self._table = places, _table_of(tensors)
        self._versions, self._words = versions, _words_at(self._table)
        return has_changed or (not is_first and not np.array_equal(words, self._words))


def _table_of(tensors: Sequence[Any]) -> NDArray[np.uint64]:
    """Return address, index and length of each word to compare."""
    dense = [tensor for tensor in tensors if _is_readable(tensor)]
    each = max(1, _WORDS_MAX // max(1, len(dense)))
    rows = [_rows_of(tensor.data_ptr(), tensor.nbytes, each) for tensor in dense]
    table = np.concatenate(rows) if rows else np.empty((0, 3), np.uint64)
    table[:, 1] = np.arange(len(table), dtype=np.uint64)
    return table


def _rows_of(address: int, nbytes: int, count_max: int) -> NDArray[np.uint64]:
    width = min(nbytes, WORD_NBYTES)
    count = nbytes // width
    chosen = min(count, count_max)
    numbers, step = np.arange(chosen), count / chosen
    # Less than a step is added, so no word is chosen twice.
    places = np.floor(numbers * step) + np.floor(numbers * _SPREAD % 1 * np.floor(step))
    rows = np.zeros((chosen, 3), np.uint64)
    rows[:, 0] = np.minimum(places.astype(np.int64), count - 1) * width + address
    rows[:, 2] = width
    return rows


def _is_readable(tensor: Any) -> bool:
    if type(tensor) not in _KINDS or tensor.device.type != "cpu" or not tensor.nbytes or not tensor.data_ptr():
        return False
    return bool(tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last))


def _words_at(table: NDArray[np.uint64]) -> NDArray[np.uint8]:
    found = np.zeros((len(table), WORD_NBYTES), np.uint8)
    if len(table):
        rows = table.copy()
        rows[:, 1] = table[:, 1] * np.uint64(WORD_NBYTES) + np.uint64(found.ctypes.data)
        firsts, mark, turn = np.array([0, len(rows)], np.uint64), np.zeros(1, np.uint8), np.zeros(1, np.uint64)
        copy_units(rows.data, firsts.data, mark.data, turn.data, -1)
    return found
