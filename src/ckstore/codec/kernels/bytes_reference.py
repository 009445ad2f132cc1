"""Numpy reference of loops over bytes: differences, roundings, sparse planes, samples, and copies of a state.

All but the copies specify the native implementation bit for bit; docs/FORMAT.md has the layouts.

- Differences and roundings: arrays contain unsigned words, and arithmetic wraps.
- Sparse planes: a bitmap of the bytes that differ from the most common one, and these bytes, each coded by the plane
  coder.
- Samples: a whole short chunk, or one run in each sixteenth of it. The positions depend only on length and width, so
  samples of two equally long chunks contain the same elements. Estimates use integers only, so every machine gets the
  same.
- Copies into a staging area, unit by unit, on as many threads as call. They take addresses, because a state has
  hundreds of storages and a copying thread must not need the interpreter between two of them.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ckstore.codec.kernels import rans_reference
from ckstore.codec.kernels.rans_reference import Bytes, Ints, bits_with, count_sample, model_of
from ckstore.state.memory import view_of_memory, writable_view_of

if TYPE_CHECKING:
    from typing_extensions import Buffer


Words = NDArray[Any]

BF16, FP16 = 1, 2


def residual(words: Words, base: Words, ordered: bool) -> Words:
    """Return the zigzag-coded differences, of floats in the order of numbers; small if the words are close."""
    bits = 8 * words.dtype.itemsize
    if ordered:
        words, base = _in_order(words, bits), _in_order(base, bits)
    difference: Words = words - base
    signs: Words = 0 - (difference >> (bits - 1))
    return (difference << 1) ^ signs


def restored(residuals: Words, base: Words, ordered: bool) -> Words:
    """Return the words that ``residual`` was computed from."""
    bits = 8 * residuals.dtype.itemsize
    signs: Words = 0 - (residuals & 1)
    difference: Words = (residuals >> 1) ^ signs
    if not ordered:
        return difference + base
    return _out_of_order(difference + _in_order(base, bits), bits)


def rounded(words: Words, kind: int) -> Words:
    """Return fp32 words rounded to bf16 or fp16, to nearest, ties to even."""
    return (_to_bf16(words) if kind == BF16 else _to_fp16(words)).astype("<u2")


def _in_order(words: Words, bits: int) -> Words:
    """Map the words of floats so that unsigned words have the order of the numbers."""
    flipped: Words = (0 - (words >> (bits - 1))) | words.dtype.type(1 << (bits - 1))
    return flipped ^ words


def _out_of_order(words: Words, bits: int) -> Words:
    flipped: Words = ((words >> (bits - 1)) - 1) | words.dtype.type(1 << (bits - 1))
    return flipped ^ words


def _to_bf16(words: Words) -> Words:
    nearest: Words = (words + (0x7FFF + ((words >> 16) & 1))) >> 16
    return np.where((words & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FC0), nearest)


def _to_fp16(words: Words) -> Words:
    magnitude = words & 0x7FFFFFFF
    normal = (magnitude - 0x38000000 + (0xFFF + ((magnitude >> 13) & 1))) >> 13
    # Near 0.5 the unit in the last place is that of fp16 subnormals, so the addition rounds to it.
    small = np.minimum(magnitude, np.uint32(0x38800000)).view(np.float32)
    subnormal = (small + np.float32(0.5)).view(np.uint32) - 0x3F000000
    nearest = np.where(magnitude < 0x38800000, subnormal, normal)
    nearest = np.where(magnitude >= 0x477FF000, np.uint32(0x7C00), nearest)
    nan = 0x7E00 | ((magnitude >> 13) & 0x3FF)
    unsigned: Words = np.where(magnitude > 0x7F800000, nan, nearest)
    signs: Words = (words >> 16) & 0x8000
    return unsigned | signs


SPARSE_FROM = 64 * 1024
"""Shorter planes are left to the plane coder."""

_HEADER = struct.Struct("<BII")
# At most one byte in four differs. One run in 64 shows which byte is the most common.
_OTHERS_PART = 4
_SPACING = 6


def encode(plane: Bytes, out: Bytes) -> int:
    """Code a plane into ``out``. Return its coded length, or 0 if the plane is not sparse or too short."""
    if plane.size < SPARSE_FROM:
        return 0
    counts = count_sample(plane, _SPACING)
    total, common = int(counts.sum()), int(counts.argmax())
    if total - int(counts[common]) > total // _OTHERS_PART:
        return 0
    is_other = plane != common
    others = plane[is_other]
    if not 0 < others.size <= plane.size // _OTHERS_PART:
        return 0
    coded = rans_reference.encode(np.packbits(is_other, bitorder="little"), out[_HEADER.size :])
    _HEADER.pack_into(out.data, 0, common, others.size, coded)
    end = _HEADER.size + coded
    return end + rans_reference.encode(others, out[end:])


def decode(payload: Bytes, plane: Bytes) -> bool:
    """Decode exactly ``plane``. Return False if the payload is malformed."""
    if payload.size < _HEADER.size:
        return False
    common, count, coded = _HEADER.unpack_from(payload.tobytes())
    end = _HEADER.size + coded
    if not 0 < count <= plane.size or end > payload.size:
        return False
    bitmap, others = np.empty(-(-plane.size // 8), np.uint8), np.empty(count, np.uint8)
    if not rans_reference.decode(payload[_HEADER.size : end], bitmap):
        return False
    if not rans_reference.decode(payload[end:], others):
        return False
    bits = np.unpackbits(bitmap, bitorder="little").astype(bool)
    if bits[plane.size :].any() or int(bits.sum()) != count:
        return False
    plane[:] = common
    plane[bits[: plane.size]] = others
    return True


SAMPLE_NBYTES = 16 * 1024
RUN_COUNT = 16

_RUN_NBYTES = SAMPLE_NBYTES // RUN_COUNT
# Knuth's multiplicative hash spreads the runs within their sixteenths.
_SPREAD = 2654435761
# One run in four is estimated first. With fewer bytes than this, noise cannot be recognized.
_FIRST_RUNS = 4
_FIRST_COUNT = 1024
# 2**7.9: two bytes of noise are equal less than once in this many pairs.
_NOISE_PAIRS = 238


def run_of(index: int, count: int, width: int) -> tuple[int, int]:
    """Return the start and the length of one run of the sample of ``count`` elements."""
    part, length = count // RUN_COUNT, _RUN_NBYTES // width
    if count <= RUN_COUNT * length:
        return index * part, count - index * part if index == RUN_COUNT - 1 else part
    return index * part + ((index + 1) * _SPREAD) % (part - length + 1), length


def bits_of_planes(count: int, width: int, split: Callable[[int, int], Bytes]) -> list[float]:
    """Return the coded bits per byte of each plane: 0 if all bytes are equal, 8 if they are noise.

    Args:
        count: Number of elements.
        width: Bytes of each element.
        split: Returns the planes, as rows, of a range of elements that is given by its start and its length.
    """
    runs = [split(*run_of(index, count, width)) for index in range(RUN_COUNT)]
    first, whole = np.concatenate(runs[::_FIRST_RUNS], axis=1), np.concatenate(runs, axis=1)
    return [8.0 if _is_noise(begin) else _bits_of(plane) for begin, plane in zip(first, whole, strict=True)]


def _is_noise(plane: Bytes) -> bool:
    counts = _counted(plane)
    pairs, total = int((counts * counts).sum()) - plane.size, plane.size
    return total >= _FIRST_COUNT and pairs * _NOISE_PAIRS < total * (total - 1)


def _bits_of(plane: Bytes) -> float:
    counts = _counted(plane)
    if counts.max() == plane.size:
        return 0.0
    return bits_with(model_of(counts, plane.size), counts) / (256.0 * plane.size)


def _counted(plane: Bytes) -> Ints:
    return np.bincount(plane, minlength=256)


_WORD = np.dtype(np.uint64)
_ONE = np.ones(1, _WORD).tobytes()
_taking = threading.Lock()
_Launch = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
)


def copy_units(table: Buffer, firsts: Buffer, marks: Buffer, turn: Buffer, bell: int) -> int:
    """Copy units that no other thread has taken. Mark each after its bytes were copied. Return the number of units.

    Args:
        table: Rows of three 64-bit words: source address, destination address, length. The caller keeps both sides
            alive.
        firsts: The first row of each unit, followed by the number of rows.
        marks: One byte for each unit, set to 1 after its bytes were copied.
        turn: One word that all threads of a staging share: the next unit to take. Setting it to the number of units or
            higher ends the staging.
        bell: An eventfd to add 1 to after each mark; -1 for none.
    """
    rows, starts, taken = _words(table), _words(firsts), _words(turn)
    done = np.asarray(memoryview(marks).cast("B"))
    if starts.size != done.size + 1 or taken.size != 1 or rows.size != 3 * int(starts[-1]):
        raise ValueError("lengths differ")
    if done.flags.writeable is False or taken.flags.writeable is False:
        raise ValueError("not a writable contiguous buffer")
    if (starts[:-1] > starts[1:]).any():
        raise ValueError("units overlap")
    rows = rows.reshape(-1, 3)
    copied = 0
    while (unit := _take(taken, done.size)) is not None:
        for row in range(int(starts[unit]), int(starts[unit + 1])):
            source, destination, nbytes = (int(word) for word in rows[row])
            target = np.asarray(writable_view_of(destination, nbytes, None))
            np.copyto(target, np.asarray(view_of_memory(source, nbytes, None)))
        done[unit] = 1
        if bell >= 0:
            os.write(bell, _ONE)
        copied += 1
    return copied


def launch_copies(function: int, table: Buffer, kind: int, stream: int) -> int:
    """Start the copy of each row by a function of a device runtime. The native version does not need the interpreter.

    Args:
        function: The address of ``cudaMemcpyAsync`` or an equivalent: destination, source, length, kind, stream; it
            returns 0 after starting the copy.
        table: Rows of three 64-bit words: source address, destination address, length. The caller keeps both sides
            alive until the copies are done.
        kind: Direction of the copy, passed on.
        stream: Handle of the runtime, passed on.

    Returns:
        0, or the result of the first call that failed; later copies were not started.
    """
    rows = _words(table)
    if rows.size % 3:
        raise ValueError("lengths differ")
    if not function:
        raise ValueError("there is no function at address 0")
    launch = _Launch(function)
    for source, destination, nbytes in rows.reshape(-1, 3).tolist():
        if problem := launch(destination, source, nbytes, kind, stream):
            return int(problem)
    return 0


def _words(buffer: Buffer) -> NDArray[np.uint64]:
    view = memoryview(buffer)
    # An empty buffer cannot be viewed as words.
    return np.frombuffer(view, _WORD) if view.nbytes else np.empty(0, _WORD)


def _take(turn: NDArray[np.uint64], count: int) -> int | None:
    with _taking:
        unit = int(turn[0])
        if unit >= count:
            return None
        turn[0] = unit + 1
        return unit
