"""Elements into byte planes, each of them constant, raw or entropy-coded.

Config: one byte, 1 if the words were rotated left by one bit, else 0. Payload: for each plane, lowest byte
first, its mode (u8) and stored length (u32); then the planes in the same order.

Estimate from a small sample what coding would save; see kernels.sample_on_numpy for what the sample is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from ckstore.codec import kernels
from ckstore.codec.base import Brief, Encoded, require_elements
from ckstore.codec.byte_codecs import Scratch, Setting
from ckstore.codec.kernels.bytes_reference import RUN_COUNT, SAMPLE_NBYTES, run_of
from ckstore.errors import MalformedError, UnsupportedError

NOISE_BITS = 7.8
"""Bits per byte above which a plane is taken for noise: no coder would code it either."""

# What a block of the plane coder takes besides: a table and states, in bits per byte.
_BLOCK_LOSS = 0.02


class Sliceable(Protocol):
    """Bytes that are read where they are asked for: a memoryview, or what lies in another memory."""

    @property
    def nbytes(self) -> int:
        """How many they are."""
        ...

    def __getitem__(self, part: slice, /) -> memoryview:
        """Return some of them."""
        ...


def sample_of(plain: Sliceable, width: int, out: memoryview) -> int:
    """Copy the sample of a chunk into ``out``, all of a short one; return how many bytes.

    The samples of two chunks of one length hold the same elements.
    """
    if plain.nbytes <= SAMPLE_NBYTES:
        out[: plain.nbytes] = plain[0 : plain.nbytes]
        return plain.nbytes
    # A chunk that holds no whole elements is never coded by elements.
    places, nbytes = _places(plain.nbytes, 1 if plain.nbytes % width else width)
    for source, target in places:
        out[target] = plain[source]
    return nbytes


@lru_cache(maxsize=64)
def _places(nbytes: int, width: int) -> tuple[tuple[tuple[slice, slice], ...], int]:
    """Return where each run lies in the chunk and in the sample, and how many bytes the sample has."""
    places, at = [], 0
    for index in range(RUN_COUNT):
        start, count = run_of(index, nbytes // width, width)
        places.append((slice(start * width, (start + count) * width), slice(at, at + count * width)))
        at += count * width
    return tuple(places), at


def take_sample(plain: memoryview, width: int, scratch: Scratch) -> memoryview:
    """Return the sample of a chunk, which is the chunk itself if it is short."""
    if plain.nbytes <= SAMPLE_NBYTES:
        return plain
    sample = scratch.sample(SAMPLE_NBYTES)
    return sample[: sample_of(plain, width, sample)]


def coded_bits(plane_bits: Sequence[float]) -> float:
    """Return the bits that coded planes take for each element."""
    return sum(8.0 if bits > NOISE_BITS else bits + _BLOCK_LOSS for bits in plane_bits if bits)


RAW, CONST, ZSTD, RANS, SPARSE = 0, 1, 2, 3, 4
_ROW = struct.Struct("<BI")

PLAIN_WORDS = b"\x00"
"""Config of planes whose words were not rotated."""

# Below this length the 64 states of the plane coder weigh more than what it saves over a Huffman code.
_RANS_NBYTES_MIN = 1 << 14
# Of a plane most of whose bytes are the same, a bitmap and the others are coded several times as fast as the plane; one
# that has three such bytes in four takes fewer bits a byte than this.
_SPARSE_BITS = 3.0
# Matches must pay visibly: zstd takes several times as long.
_MATCHES_SHARE = 0.97


class PlanesCodec:
    """Splits elements into byte planes and codes those that pay."""

    name = "planes"
    codec_id = 2

    def encode(self, plain: memoryview, brief: Brief, scratch: Scratch) -> Encoded | None:
        """Split the elements and code each plane whose sample is no noise."""
        if min(brief.plane_bits) > NOISE_BITS:
            return None
        split = scratch.planes(plain.nbytes)
        kernels.split_planes(plain, split, brief.width, brief.rotate)
        return self.encode_planes(split, brief, scratch)

    def encode_planes(self, split: memoryview, brief: Brief, scratch: Scratch) -> Encoded:
        """Code each plane of ``split``, which are one after another, whose sample is no noise."""
        width = brief.width
        planes = _cut(split, [split.nbytes // width] * width)
        # Each coded plane is shorter than the plane, so the last one finds room enough.
        room = scratch.coded(kernels.plane_bound(split.nbytes))
        rows = []
        for plane, bits in zip(planes, brief.plane_bits, strict=True):
            mode, stored = _encode_plane(plane, bits, brief, room, scratch)
            rows.append((mode, stored))
            if mode in (RANS, SPARSE):
                room = room[stored.nbytes :]
        table = b"".join(_ROW.pack(mode, stored.nbytes) for mode, stored in rows)
        config = bytes([brief.rotate])
        return Encoded(((self.codec_id, config),), [memoryview(table), *(stored for _, stored in rows)], width)

    def decode(
        self, payload: memoryview, config: bytes, *, width: int, destination: memoryview, scratch: Scratch
    ) -> None:
        """Decode the planes and merge them into ``destination``."""
        # Refused before there is work.
        is_rotated = _is_rotated(config)
        planes = self.decode_planes(payload, width=width, nbytes=destination.nbytes, scratch=scratch)
        kernels.merge_planes(planes, destination, width, is_rotated)

    def decode_planes(self, payload: memoryview, *, width: int, nbytes: int, scratch: Scratch) -> list[memoryview]:
        """Return the planes of ``nbytes`` bytes of elements; they lie in the payload and the scratch.

        Raises:
            CorruptError: The payload does not hold them.
        """
        count = require_elements(nbytes, width)
        modes, sizes = _read_table(payload[: width * _ROW.size], width)
        if payload.nbytes != width * _ROW.size + sum(sizes):
            raise MalformedError("planes are not as long as their table says")
        return _decode_planes(modes, _cut(payload[width * _ROW.size :], sizes), count, scratch)


def _encode_plane(
    plane: memoryview, bits: float, brief: Brief, room: memoryview, scratch: Scratch
) -> tuple[int, memoryview]:
    if bits > NOISE_BITS:
        return RAW, plane
    if kernels.is_constant(plane):
        return CONST, plane[:1]
    setting = _zstd_setting(plane, brief, room, scratch)
    if setting is None:
        nbytes = kernels.encode_sparse(plane, room) if bits < _SPARSE_BITS else 0
        if nbytes:
            return SPARSE, room[:nbytes]
        mode, coded = RANS, room[: kernels.encode_plane(plane, room)]
    else:
        mode, coded = ZSTD, memoryview(scratch.zstd.compress(plane, setting))
    # A plane that hardly shrinks costs more to decode than it saves.
    return (mode, coded) if coded.nbytes < plane.nbytes - plane.nbytes // 50 else (RAW, plane)


def _zstd_setting(plane: memoryview, brief: Brief, room: memoryview, scratch: Scratch) -> Setting | None:
    """Return how zstd codes the plane, or None where the plane coder does better."""
    if brief.compression == "best":
        start = max(0, (plane.nbytes - SAMPLE_NBYTES) // 2)
        piece = plane[start : start + SAMPLE_NBYTES]
        if len(scratch.zstd.compress(piece, "matches")) < _MATCHES_SHARE * kernels.encode_plane(piece, room):
            return "matches"
    # The numpy twin reads what the plane coder makes, but is too slow to write it.
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
                raise MalformedError(f"coded plane {index} does not hold {count} bytes")
            planes.append(plane)
        elif mode == SPARSE:
            if not kernels.decode_sparse(part, plane, scratch.bitmap(count)):
                raise MalformedError(f"sparse plane {index} does not hold {count} bytes")
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
        raise MalformedError("table of planes is cut short")
    rows = list(_ROW.iter_unpack(table))
    return [mode for mode, _ in rows], [nbytes for _, nbytes in rows]


def _cut(joined: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    pieces, start = [], 0
    for nbytes in sizes:
        pieces.append(joined[start : start + nbytes])
        start += nbytes
    return pieces
