"""Split elements into byte planes and code each plane; sample a chunk to estimate the result beforehand.

The codec ``planes`` (id 2). Config: one byte, 1 if the elements were rotated left by one bit, else 0. Payload: for
each plane, lowest byte first, its mode (u8) and stored length (u32); then the planes in the same order.

``sample_of`` takes at most 16 KiB of a chunk, at the same places in every chunk of one length.

``encode_section`` and ``decode_section`` code short runs of bytes inside other payloads in the same modes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from ckstore.codec import kernels
from ckstore.codec.byte_codecs import Encoded, EncodeParams, Scratch, require_elements
from ckstore.codec.kernels.bytes_reference import RUN_COUNT, SAMPLE_NBYTES, run_of
from ckstore.errors import MalformedError, UnsupportedError
from ckstore.format.zstd import Setting

NOISE_BITS = 7.8
"""Estimated bits per byte above which a plane counts as noise and is stored raw."""

# Overhead of a block of the plane coder, in bits per byte: its table and its states.
_BLOCK_LOSS = 0.02


class Sliceable(Protocol):
    """Bytes that are read by slicing: a memoryview, or memory of a device."""

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        ...

    def __getitem__(self, part: slice, /) -> memoryview:
        """Return a part of the bytes."""
        ...


def sample_of(plain: Sliceable, width: int, out: memoryview) -> int:
    """Copy the sample of a chunk into ``out`` and return its length. The sample of a short chunk is all of it.

    Samples of two chunks of one length contain the same elements.
    """
    if plain.nbytes <= SAMPLE_NBYTES:
        out[: plain.nbytes] = plain[0 : plain.nbytes]
        return plain.nbytes
    # A chunk that is not a multiple of the width is sampled as single bytes.
    places, nbytes = _places(plain.nbytes, 1 if plain.nbytes % width else width)
    for source, target in places:
        out[target] = plain[source]
    return nbytes


@lru_cache(maxsize=64)
def _places(nbytes: int, width: int) -> tuple[tuple[tuple[slice, slice], ...], int]:
    """Return each run's range in the chunk and in the sample, and the length of the sample."""
    places, at = [], 0
    for index in range(RUN_COUNT):
        start, count = run_of(index, nbytes // width, width)
        places.append((slice(start * width, (start + count) * width), slice(at, at + count * width)))
        at += count * width
    return tuple(places), at


def take_sample(plain: memoryview, width: int, scratch: Scratch) -> memoryview:
    """Return the sample of a chunk; for a short chunk, the chunk itself."""
    if plain.nbytes <= SAMPLE_NBYTES:
        return plain
    sample = scratch.sample(SAMPLE_NBYTES)
    return sample[: sample_of(plain, width, sample)]


def coded_bits(plane_bits: Sequence[float]) -> float:
    """Return the bits per element of coded planes, from the estimated bits per byte of each plane."""
    return sum(8.0 if bits > NOISE_BITS else bits + _BLOCK_LOSS for bits in plane_bits if bits)


RAW, CONST, ZSTD, RANS, SPARSE = 0, 1, 2, 3, 4
_ROW = struct.Struct("<BI")

PLAIN_WORDS = b"\x00"
"""Config of planes whose elements were not rotated."""

# Below this length the 64 states of the plane coder cost more than it saves over a Huffman code.
_RANS_NBYTES_MIN = 1 << 14
# A plane in which most bytes are equal is coded as a bitmap and the other bytes, which is several times as fast. With
# three equal bytes in four, a plane is estimated below this many bits per byte.
_SPARSE_BITS = 3.0
# zstd with matches takes several times as long, so it must be this much smaller.
_MATCHES_SHARE = 0.97


class PlanesCodec:
    """Splits elements into byte planes and codes the planes that become smaller."""

    name = "planes"
    codec_id = 2

    def encode(self, plain: memoryview, params: EncodeParams, scratch: Scratch) -> Encoded | None:
        """Split the elements and code each plane that is not noise; None if all planes are noise."""
        if min(params.plane_bits) > NOISE_BITS:
            return None
        split = scratch.planes(plain.nbytes)
        kernels.split_planes(plain, split, params.width, params.rotate)
        return self.encode_planes(split, params, scratch)

    def encode_planes(self, split: memoryview, params: EncodeParams, scratch: Scratch) -> Encoded:
        """Code each plane of ``split`` that is not noise; the planes are one after another."""
        width = params.width
        planes = _cut(split, [split.nbytes // width] * width)
        # A coded plane is kept only if it is shorter than the plane, so the room suffices for all.
        room = scratch.coded(kernels.plane_bound(split.nbytes))
        rows = []
        for plane, bits in zip(planes, params.plane_bits, strict=True):
            mode, stored = _encode_plane(plane, bits, params, room, scratch)
            rows.append((mode, stored))
            if mode in (RANS, SPARSE):
                room = room[stored.nbytes :]
        table = b"".join(_ROW.pack(mode, stored.nbytes) for mode, stored in rows)
        config = bytes([params.rotate])
        return Encoded(((self.codec_id, config),), [memoryview(table), *(stored for _, stored in rows)], width)

    def decode(
        self, payload: memoryview, config: bytes, *, width: int, destination: memoryview, scratch: Scratch
    ) -> None:
        """Decode the planes and merge them into ``destination``."""
        # Checks the config before any work is done.
        is_rotated = _is_rotated(config)
        planes = self.decode_planes(payload, width=width, nbytes=destination.nbytes, scratch=scratch)
        kernels.merge_planes(planes, destination, width, is_rotated)

    def decode_planes(self, payload: memoryview, *, width: int, nbytes: int, scratch: Scratch) -> list[memoryview]:
        """Return the planes of ``nbytes`` bytes of elements, as parts of the payload and of the scratch.

        Raises:
            CorruptError: The payload does not contain them.
        """
        count = require_elements(nbytes, width)
        modes, sizes = _read_table(payload[: width * _ROW.size], width)
        if payload.nbytes != width * _ROW.size + sum(sizes):
            raise MalformedError("the planes of a chunk do not have the lengths in their table")
        return _decode_planes(modes, _cut(payload[width * _ROW.size :], sizes), count, scratch)


def _encode_plane(
    plane: memoryview, bits: float, params: EncodeParams, room: memoryview, scratch: Scratch
) -> tuple[int, memoryview]:
    if bits > NOISE_BITS:
        return RAW, plane
    if kernels.is_constant(plane):
        return CONST, plane[:1]
    setting = _zstd_setting(plane, params, room, scratch)
    if setting is None:
        nbytes = kernels.encode_sparse(plane, room) if bits < _SPARSE_BITS else 0
        if nbytes:
            return SPARSE, room[:nbytes]
        mode, coded = RANS, room[: kernels.encode_plane(plane, room)]
    else:
        mode, coded = ZSTD, memoryview(scratch.zstd.compress(plane, setting))
    # A plane that shrinks by less than 2 % costs more to decode than it saves.
    return (mode, coded) if coded.nbytes < plane.nbytes - plane.nbytes // 50 else (RAW, plane)


def _zstd_setting(plane: memoryview, params: EncodeParams, room: memoryview, scratch: Scratch) -> Setting | None:
    """Return how zstd should code the plane, or None for the plane coder."""
    if params.compression == "best":
        start = max(0, (plane.nbytes - SAMPLE_NBYTES) // 2)
        piece = plane[start : start + SAMPLE_NBYTES]
        if len(scratch.zstd.compress(piece, "matches")) < _MATCHES_SHARE * kernels.encode_plane(piece, room):
            return "matches"
    # The numpy implementation of the plane coder is too slow for encoding.
    is_slow = kernels.IMPLEMENTATION["encode_plane"] == "numpy"
    return "entropy" if is_slow or plane.nbytes < _RANS_NBYTES_MIN else None


def _decode_planes(
    modes: Sequence[int], stored: Sequence[memoryview], count: int, scratch: Scratch
) -> list[memoryview]:
    room = scratch.decoded(count * len(modes)) if {CONST, RANS, SPARSE} & {*modes} else memoryview(b"")
    planes = []
    for index, (mode, part) in enumerate(zip(modes, stored, strict=True)):
        plane = room[index * count : (index + 1) * count]
        if mode == RANS:
            if not kernels.decode_plane(part, plane):
                raise MalformedError(f"coded plane {index} does not decode to {count} bytes")
            planes.append(plane)
        elif mode == SPARSE:
            if not kernels.decode_sparse(part, plane, scratch.bitmap(count)):
                raise MalformedError(f"sparse plane {index} does not decode to {count} bytes")
            planes.append(plane)
        elif mode == ZSTD:
            planes.append(memoryview(scratch.zstd.decompress(part, count)))
        elif mode == RAW and part.nbytes == count:
            planes.append(part)
        elif mode == CONST and part.nbytes == 1:
            np.frombuffer(plane, np.uint8).fill(part[0])
            planes.append(plane)
        else:
            raise MalformedError(f"plane {index} of {count} bytes has mode {mode} and {part.nbytes} stored bytes")
    return planes


def _is_rotated(config: bytes) -> bool:
    if len(config) != 1 or config[0] > 1:
        raise UnsupportedError("unknown config of codec planes", where=config.hex(), todo="upgrade ckstore")
    return config[0] == 1


def _read_table(table: memoryview, width: int) -> tuple[list[int], list[int]]:
    if table.nbytes != width * _ROW.size:
        raise MalformedError("the table of planes is truncated")
    rows = list(_ROW.iter_unpack(table))
    return [mode for mode, _ in rows], [nbytes for _, nbytes in rows]


def _cut(joined: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    pieces, start = [], 0
    for nbytes in sizes:
        pieces.append(joined[start : start + nbytes])
        start += nbytes
    return pieces


# Up to this length zstd is tried too: the 64 states of the plane coder may cost more than it saves.
_SECTION_ZSTD_NBYTES_MAX = 1 << 14
# Shorter sections are stored raw.
_SECTION_CODED_NBYTES_MIN = 32


def encode_section(plain: memoryview, room: memoryview, scratch: Scratch) -> tuple[int, memoryview]:
    """Return the mode and the stored bytes of a section, which may be part of ``room`` or ``plain``.

    Args:
        plain: The bytes.
        room: Memory for ``kernels.plane_bound`` of their length.
        scratch: Memory of this thread.
    """
    if plain.nbytes and kernels.is_constant(plain):
        return CONST, plain[:1]
    mode, stored = RAW, plain
    if plain.nbytes >= _SECTION_CODED_NBYTES_MIN:
        coded = room[: kernels.encode_plane(plain, room)]
        if coded.nbytes < stored.nbytes:
            mode, stored = RANS, coded
        if plain.nbytes <= _SECTION_ZSTD_NBYTES_MAX:
            frame = memoryview(scratch.zstd.compress(plain, "entropy"))
            if frame.nbytes < stored.nbytes:
                mode, stored = ZSTD, frame
    return mode, stored


def decode_section(mode: int, stored: memoryview, destination: memoryview, scratch: Scratch) -> None:
    """Write exactly the bytes of a section. Allocates at most as many bytes as the destination has.

    Raises:
        MalformedError: The section does not decode to the expected number of bytes.
    """
    count = destination.nbytes
    if mode == RAW and stored.nbytes == count:
        kernels.copy_bytes(stored, destination)
    elif mode == CONST and stored.nbytes == 1 and count:
        np.frombuffer(destination, np.uint8).fill(stored[0])
    elif mode == ZSTD and count:
        kernels.copy_bytes(scratch.zstd.decompress(stored, count), destination)
    elif mode != RANS or not count or not kernels.decode_plane(stored, destination):
        raise MalformedError(f"a section of {count} bytes has mode {mode} and {stored.nbytes} stored bytes")
