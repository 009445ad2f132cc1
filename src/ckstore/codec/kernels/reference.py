"""The hot loops in numpy. They specify what every implementation must do.

Invariants:
- Arguments are contiguous buffers (anything with the buffer protocol). Results are written to the caller's buffers.
  Source and destination do not overlap, except for the base of ``merge_delta``.
- Elements are ``width`` bytes (1, 2, 4 or 8), little-endian. Plane j contains byte j of every element; the top plane
  is the last. With ``rotate`` each element is first rotated left by one bit: then the exponent of fp32 and bf16 fills
  the top plane, and the sign is the lowest bit.
- A wrong length, width or buffer raises ValueError before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ckstore.codec.kernels import bytes_reference, rans_reference
from ckstore.codec.kernels.bytes_reference import copy_units as copy_units
from ckstore.codec.kernels.bytes_reference import launch_copies as launch_copies
from ckstore.codec.kernels.lowrank_reference import finish_outer as finish_outer
from ckstore.codec.kernels.lowrank_reference import inverse_root as inverse_root
from ckstore.codec.kernels.lowrank_reference import missed_squares as missed_squares
from ckstore.codec.kernels.lowrank_reference import multiply_floats as multiply_floats
from ckstore.codec.kernels.lowrank_reference import multiply_words as multiply_words
from ckstore.codec.kernels.lowrank_reference import products_of_rows as products_of_rows
from ckstore.codec.kernels.lowrank_reference import round_vectors as round_vectors
from ckstore.codec.kernels.lowrank_reference import split_zigzag as split_zigzag
from ckstore.codec.kernels.lowrank_reference import subtract_ones as subtract_ones
from ckstore.codec.kernels.lowrank_reference import symmetric_eigen as symmetric_eigen
from ckstore.codec.kernels.lowrank_reference import take_roots as take_roots
from ckstore.codec.kernels.quantize_reference import bin_values as bin_values
from ckstore.codec.kernels.quantize_reference import class_counts as class_counts
from ckstore.codec.kernels.quantize_reference import finish_values as finish_values
from ckstore.codec.kernels.quantize_reference import float_changes as float_changes
from ckstore.codec.kernels.quantize_reference import float_quotients as float_quotients
from ckstore.codec.kernels.quantize_reference import float_values as float_values
from ckstore.codec.kernels.quantize_reference import measure_values as measure_values
from ckstore.codec.kernels.quantize_reference import merge_streams as merge_streams
from ckstore.codec.kernels.quantize_reference import pack_symbols as pack_symbols
from ckstore.codec.kernels.quantize_reference import quantize_values as quantize_values
from ckstore.codec.kernels.quantize_reference import split_streams as split_streams
from ckstore.codec.kernels.quantize_reference import stream_sizes as stream_sizes
from ckstore.codec.kernels.quantize_reference import sums_of_levels as sums_of_levels
from ckstore.codec.kernels.quantize_reference import sums_of_values as sums_of_values
from ckstore.codec.kernels.quantize_reference import unpack_symbols as unpack_symbols

if TYPE_CHECKING:
    from typing_extensions import Buffer


Bytes = NDArray[np.uint8]

WORDS: dict[int, np.dtype[Any]] = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
BLOCK_NBYTES = 1 << 16
"""Temporary arrays are at most this long, so that they stay in the cache."""


def split_planes(source: Buffer, planes_out: Buffer, width: int, rotate: bool) -> None:
    """Write the byte planes of ``source`` one after another into ``planes_out``."""
    plain, planes = _readable(source), _writable(planes_out)
    count = _checked_count(plain.size, width)
    _require_equal(planes.size, plain.size)
    target = planes.reshape(width, count)
    for start, stop in _blocks(count, width):
        words = plain[start * width : stop * width].view(WORDS[width])
        if rotate:
            words = (words << 1) | (words >> (8 * width - 1))
        target[:, start:stop] = words.view(np.uint8).reshape(-1, width).T


def merge_planes(planes: Sequence[Buffer], destination: Buffer, width: int, rotate: bool) -> None:
    """Write the elements from their byte planes; the inverse of ``split_planes``."""
    plain = _writable(destination)
    count = _checked_count(plain.size, width)
    sources = _checked_planes(planes, count, width)
    for start, stop in _blocks(count, width):
        plain[start * width : stop * width] = _merged(sources, start, stop, rotate)


def split_delta(source: Buffer, base: Buffer, planes_out: Buffer, width: int, ordered: bool) -> None:
    """Write the byte planes of the zigzag-coded differences of ``source`` and ``base``."""
    plain, reference, planes = _readable(source), _readable(base), _writable(planes_out)
    count = _checked_count(plain.size, width)
    _require_equal(reference.size, plain.size)
    _require_equal(planes.size, plain.size)
    target = planes.reshape(width, count)
    for start, stop in _blocks(count, width):
        words, other = (side[start * width : stop * width].view(WORDS[width]) for side in (plain, reference))
        residuals = bytes_reference.residual(words, other, ordered)
        target[:, start:stop] = residuals.view(np.uint8).reshape(-1, width).T


def merge_delta(planes: Sequence[Buffer], base: Buffer, destination: Buffer, width: int, ordered: bool) -> None:
    """Write the source of ``split_delta`` from its planes; ``base`` and ``destination`` may be the same memory."""
    reference, plain = _readable(base), _writable(destination)
    count = _checked_count(plain.size, width)
    _require_equal(reference.size, plain.size)
    sources = _checked_planes(planes, count, width)
    for start, stop in _blocks(count, width):
        residuals = _merged(sources, start, stop, False).view(WORDS[width])
        other = reference[start * width : stop * width].view(WORDS[width])
        plain[start * width : stop * width] = bytes_reference.restored(residuals, other, ordered).view(np.uint8)


def round_floats(source: Buffer, destination: Buffer, kind: int) -> None:
    """Write fp32 elements rounded to bf16 (kind 1) or fp16 (kind 2), to nearest, ties to even."""
    plain, target = _readable(source), _writable(destination)
    count = _checked_roundings(plain.size, target.size, kind)
    for start, stop in _blocks(count, 4):
        words = plain[4 * start : 4 * stop].view(WORDS[4])
        target[2 * start : 2 * stop] = bytes_reference.rounded(words, kind).view(np.uint8)


def is_rounding(source: Buffer, rounded: Buffer, kind: int) -> bool:
    """Return True if ``rounded`` is what ``round_floats`` makes of ``source``. A difference is found early."""
    plain, target = _readable(source), _readable(rounded)
    count = _checked_roundings(plain.size, target.size, kind)
    return all(
        np.array_equal(
            bytes_reference.rounded(plain[4 * start : 4 * stop].view(WORDS[4]), kind).view(np.uint8),
            target[2 * start : 2 * stop],
        )
        for start, stop in _blocks(count, 4)
    )


def plane_bits(source: Buffer, width: int, rotate: bool) -> list[float]:
    """Estimate from a sample the coded bits per byte of each plane; 8 for noise."""
    plain = _readable(source)
    count = _checked_sample(plain.size, width)

    def split(start: int, length: int) -> Bytes:
        planes = np.empty((width, length), np.uint8)
        split_planes(plain[start * width : (start + length) * width].data, planes.data, width, rotate)
        return planes

    return bytes_reference.bits_of_planes(count, width, split)


def delta_bits(source: Buffer, base: Buffer, width: int, ordered: bool) -> list[float]:
    """Estimate the same as ``plane_bits`` for the planes that ``split_delta`` makes."""
    plain, reference = _readable(source), _readable(base)
    count = _checked_sample(plain.size, width)
    _require_equal(reference.size, plain.size)

    def split(start: int, length: int) -> Bytes:
        planes = np.empty((width, length), np.uint8)
        begin, end = start * width, (start + length) * width
        split_delta(plain[begin:end].data, reference[begin:end].data, planes.data, width, ordered)
        return planes

    return bytes_reference.bits_of_planes(count, width, split)


def copy_bytes(source: Buffer, destination: Buffer) -> None:
    """Copy all bytes."""
    plain, target = _readable(source), _writable(destination)
    _require_equal(target.size, plain.size)
    np.copyto(target, plain)


def equal_bytes(a: Buffer, b: Buffer) -> bool:
    """Return True if both contain the same bytes; False if their lengths differ."""
    one, other = _readable(a), _readable(b)
    return one.size == other.size and all(
        np.array_equal(one[start:stop], other[start:stop]) for start, stop in _blocks(one.size, 1)
    )


def is_constant(source: Buffer) -> bool:
    """Return True if every byte equals the first, or if there are none."""
    plain = _readable(source)
    return all(bool((plain[start:stop] == plain[0]).all()) for start, stop in _blocks(plain.size, 1))


def histogram(source: Buffer, counts_out: Buffer) -> None:
    """Write the number of occurrences of each byte value to 256 aligned uint32 in native byte order, modulo 2**32."""
    plain, counts = _readable(source), _writable(counts_out)
    _require_equal(counts.size, 256 * 4)
    if counts.ctypes.data % 4:
        raise ValueError("counts are not aligned")
    total = np.zeros(256, np.int64)
    # In blocks, because np.bincount converts each byte to an integer of eight bytes.
    for start, stop in _blocks(plain.size, 8):
        total += np.bincount(plain[start:stop], minlength=256)
    counts.view(np.uint32)[:] = total.astype(np.uint32)


def plane_bound(nbytes: int) -> int:
    """Return the length of the output buffer that ``encode_plane`` needs for a plane of ``nbytes`` bytes."""
    return rans_reference.bound(nbytes)


def encode_plane(plane: Buffer, out: Buffer) -> int:
    """Code a plane into ``out``, which has ``plane_bound`` bytes. Return the coded length."""
    symbols, target = _readable(plane), _writable(out)
    if target.size < plane_bound(symbols.size):
        raise ValueError("room has less than the length that plane_bound asks for")
    return rans_reference.encode(symbols, target)


def decode_plane(payload: Buffer, plane: Buffer) -> bool:
    """Decode exactly ``plane``. Return False if the payload is malformed; nothing else is written in any case."""
    return rans_reference.decode(_readable(payload), _writable(plane))


def encode_sparse(plane: Buffer, out: Buffer) -> int:
    """Code a plane in which most bytes are equal, as ``encode_plane`` does; return 0 for other planes."""
    symbols, target = _readable(plane), _writable(out)
    if target.size < plane_bound(symbols.size):
        raise ValueError("room has less than the length that plane_bound asks for")
    return bytes_reference.encode(symbols, target)


def decode_sparse(payload: Buffer, plane: Buffer, bitmap: Buffer) -> bool:
    """Decode the output of ``encode_sparse``, as ``decode_plane`` does; ``bitmap`` is an eighth of the plane."""
    symbols, room = _writable(plane), _writable(bitmap)
    if room.size < -(-symbols.size // 8):
        raise ValueError("bitmap has less than an eighth of the length of the plane")
    return bytes_reference.decode(_readable(payload), symbols)


def _merged(planes: list[Bytes], start: int, stop: int, rotate: bool) -> Bytes:
    width = len(planes)
    merged = np.empty((stop - start, width), np.uint8)
    for index, plane in enumerate(planes):
        merged[:, index] = plane[start:stop]
    flat = merged.reshape(-1)
    if rotate:
        words = flat.view(WORDS[width])
        flat = ((words >> 1) | (words << (8 * width - 1))).view(np.uint8)
    return flat


def _blocks(count: int, width: int) -> list[tuple[int, int]]:
    step = BLOCK_NBYTES // width
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def _checked_count(nbytes: int, width: int) -> int:
    if width not in WORDS:
        raise ValueError("width must be 1, 2, 4 or 8")
    if nbytes % width:
        raise ValueError("length is no multiple of the width")
    return nbytes // width


def _checked_sample(nbytes: int, width: int) -> int:
    count = _checked_count(nbytes, width)
    if count == 0:
        raise ValueError("a sample has no length of zero")
    return count


def _checked_roundings(nbytes: int, rounded_nbytes: int, kind: int) -> int:
    if kind not in (bytes_reference.BF16, bytes_reference.FP16):
        raise ValueError("kind must be 1 or 2, for a width of 2 bytes")
    count = _checked_count(nbytes, 4)
    _require_equal(2 * rounded_nbytes, nbytes)
    return count


def _checked_planes(planes: Sequence[Buffer], count: int, width: int) -> list[Bytes]:
    if len(planes) != width:
        raise ValueError("as many planes are needed as an element has bytes")
    sources = [_readable(plane) for plane in planes]
    for source in sources:
        _require_equal(source.size, count)
    return sources


def _require_equal(a: int, b: int) -> None:
    if a != b:
        raise ValueError("lengths differ")


def _readable(buffer: Buffer) -> Bytes:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("not a contiguous buffer")
    # A view with a dimension of length 0 cannot be cast.
    return np.frombuffer(view.cast("B"), np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _writable(buffer: Buffer) -> Bytes:
    if memoryview(buffer).readonly:
        raise ValueError("not a writable contiguous buffer")
    return _readable(buffer)
