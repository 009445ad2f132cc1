"""Find changes of what an optimizer owns outside of its steps, and of gradients that it has seen.

torch counts most changes of a tensor. It does not count those through ``.data``, by numpy, and by some fused kernels.
For these, some words of each tensor in host memory are compared: every change of a whole tensor is found, and that of a
few elements may be missed. Then a replay gives other bytes, which its checksums show. On devices, and in tensors with
gaps, only counted changes are found.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ckstore.codec.kernels import copy_units
from ckstore.format.wire import xxh3_64

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ADDRESS_OF, _VERSION_OF = torch.Tensor.data_ptr, attrgetter("_version")

WORD_NBYTES = 8

_KINDS = (torch.Tensor, torch.nn.Parameter)
"""Tensors whose address is that of their elements."""

_WORDS_MAX = 2048
"""Words of all tensors together. Reading them takes less than a millisecond, also from cold memory."""

_NBYTES_PER_WORD = 8192
"""Bytes of gradients for each word of them that is read for its row: copying so many bytes takes far longer."""

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


class Sample(NamedTuple):
    """What shows changes of tensors: their version counters, and a checksum of some of their words.

    Args:
        tensors: The tensors, which it keeps alive.
        addresses: Address of each.
        versions: Version counter of each.
        table: The words.
        checksum: xxh3-64 of the words.
    """

    tensors: Sequence[Any]
    addresses: list[int]
    versions: list[int]
    table: NDArray[np.uint64]
    checksum: int

    @property
    def is_unchanged(self) -> bool:
        """Whether the tensors are as they were, as far as that shows. Memory that was released is not read."""
        return self.is_of(self.tensors) and _checksum_of(self.table) == self.checksum

    def is_of(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors are in the same memory, without a change that torch has counted."""
        addresses, versions = list(map(_ADDRESS_OF, tensors)), list(map(_VERSION_OF, tensors))
        return addresses == self.addresses and versions == self.versions


class Sampler:
    """Samples the gradients of one optimizer: some words of each tensor, and one of each row if there are not too many.

    Gradients are usually in other memory at each step, and as large as before. So offsets are computed once.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._counts: list[int] = []
        self._offsets: NDArray[np.uint64] = np.empty((0, 3), np.uint64)

    def sample(self, tensors: Sequence[Any]) -> Sample:
        """Return a sample of tensors."""
        addresses, versions = list(map(_ADDRESS_OF, tensors)), list(map(_VERSION_OF, tensors))
        sizes = [tensor.nbytes if _is_readable(tensor) else 0 for tensor in tensors]
        if sizes != self._sizes:
            self._sizes = sizes
            self._counts, self._offsets = _offsets_of(tensors, sizes)
        table = self._offsets.copy()
        table[:, 0] += np.repeat(np.array(addresses, np.uint64), self._counts)
        return Sample(tensors, addresses, versions, table, _checksum_of(table))


def _offsets_of(tensors: Sequence[Any], sizes: Sequence[int]) -> tuple[list[int], NDArray[np.uint64]]:
    """Return how many words of each tensor are compared, and for each word its offset, index and length."""
    row_counts = [
        len(tensor) if nbytes and tensor.dim() > 1 else 0 for tensor, nbytes in zip(tensors, sizes, strict=True)
    ]
    share = min(1.0, max(_WORDS_MAX, sum(sizes) // _NBYTES_PER_WORD) / max(1, sum(row_counts)))
    each = max(1, _WORDS_MAX // max(1, sum(map(bool, sizes))))
    rows = [
        _rows_of(0, nbytes, max(each, int(row_count * share))) if nbytes else np.empty((0, 3), np.uint64)
        for nbytes, row_count in zip(sizes, row_counts, strict=True)
    ]
    return list(map(len, rows)), _numbered(rows)


def _checksum_of(table: NDArray[np.uint64]) -> int:
    return xxh3_64(_words_at(table).data)


def _table_of(tensors: Sequence[Any]) -> NDArray[np.uint64]:
    """Return address, index and length of each word to compare."""
    dense = [tensor for tensor in tensors if _is_readable(tensor)]
    each = max(1, _WORDS_MAX // max(1, len(dense)))
    return _numbered([_rows_of(tensor.data_ptr(), tensor.nbytes, each) for tensor in dense])


def _numbered(rows: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
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
    if type(tensor) not in _KINDS or not tensor.is_cpu or not tensor.nbytes or not tensor.data_ptr():
        return False
    return bool(tensor.is_contiguous()) or tensor.stride() == strides_like(tensor.shape, tensor.stride())


@functools.lru_cache(maxsize=1024)
def strides_like(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a new tensor that is like one with these: the same if it is dense, in any order."""
    made: tuple[int, ...] = torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
    return made


def _words_at(table: NDArray[np.uint64]) -> NDArray[np.uint8]:
    found = np.zeros((len(table), WORD_NBYTES), np.uint8)
    if len(table):
        rows = table.copy()
        rows[:, 1] = table[:, 1] * np.uint64(WORD_NBYTES) + np.uint64(found.ctypes.data)
        firsts, mark, turn = np.array([0, len(rows)], np.uint64), np.zeros(1, np.uint8), np.zeros(1, np.uint64)
        copy_units(rows.data, firsts.data, mark.data, turn.data, -1)
    return found
