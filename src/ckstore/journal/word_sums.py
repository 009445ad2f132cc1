"""The word sum of bytes: a checksum that a device computes where its memory is, and the same in numpy.

Each word is mixed with its position by the finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014), and all are added. Mixing is one-to-one, so a single changed word always changes
the sum; for other changes the sum is as good as a random one of 64 bits. docs/FORMAT.md section 14 has the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)

_WORD_NBYTES = 8
_PIECE_COUNT = 1 << 20
"""Words that are mixed in one pass: bounds the memory that is needed besides."""


def word_sum(content: memoryview | NDArray[np.uint8]) -> int:
    """Return the word sum of bytes in host memory."""
    plain = np.frombuffer(content, np.uint8)
    count, rest = divmod(plain.size, _WORD_NBYTES)
    total = plain.size
    for begin in range(0, count, _PIECE_COUNT):
        end = min(count, begin + _PIECE_COUNT)
        words = plain[begin * _WORD_NBYTES : end * _WORD_NBYTES].view(np.dtype("<u8"))
        total += int(_mixed(words, begin).sum(dtype=np.uint64))
    if rest:
        last = np.zeros(_WORD_NBYTES, np.uint8)
        last[:rest] = plain[count * _WORD_NBYTES :]
        total += int(_mixed(last.view(np.dtype("<u8")), count).sum(dtype=np.uint64))
    return total % (1 << 64)


def _mixed(words: NDArray[np.uint64], begin: int) -> NDArray[np.uint64]:
    mixed: NDArray[np.uint64] = np.arange(begin + 1, begin + 1 + words.size, dtype=np.uint64) * np.uint64(GAMMA)
    mixed += words
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        mixed ^= mixed >> np.uint64(shift)
        if multiplier is not None:
            mixed *= np.uint64(multiplier)
    return mixed


def word_sum_of_tensor(plain: torch.Tensor) -> torch.Tensor:
    """Return the word sum of a tensor of bytes, computed on its device, as the same 64 bits of an int64.

    Args:
        plain: uint8, one-dimensional, contiguous.

    Returns:
        A scalar on the device of ``plain``. Nothing has waited for it.
    """
    import torch

    count, rest = divmod(plain.numel(), _WORD_NBYTES)
    total = torch.full((), plain.numel(), dtype=torch.int64, device=plain.device)
    for begin in range(0, count, _PIECE_COUNT):
        end = min(count, begin + _PIECE_COUNT)
        # A copy: mixing is in place, and views of words need aligned memory.
        piece = plain[begin * _WORD_NBYTES : end * _WORD_NBYTES].clone()
        total += _mixed_tensor(piece.view(torch.int64), begin).sum()
    if rest:
        last = torch.zeros(_WORD_NBYTES, dtype=torch.uint8, device=plain.device)
        last[:rest] = plain[count * _WORD_NBYTES :]
        total += _mixed_tensor(last.view(torch.int64), count).sum()
    return total


def word_sums_of_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the word sums of tensors of bytes. From each device, one copy brings all."""
    found = [0] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    for indices in by_device.values():
        import torch

        sums = torch.stack([word_sum_of_tensor(tensors[index]) for index in indices])
        for index, number in zip(indices, sums.tolist(), strict=True):
            found[index] = number % (1 << 64)
    return found


def _mixed_tensor(words: torch.Tensor, begin: int) -> torch.Tensor:
    """Mix words in place, and return them. torch's integers are signed: products wrap, and shifts copy the sign."""
    import torch

    words += torch.arange(begin + 1, begin + 1 + words.numel(), device=words.device) * _signed(GAMMA)
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        words ^= (words >> shift) & ((1 << (64 - shift)) - 1)
        if multiplier is not None:
            words *= _signed(multiplier)
    return words


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
