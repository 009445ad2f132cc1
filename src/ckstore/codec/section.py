"""Short runs of bytes within a payload, each raw, constant, or coded by whichever coder makes it shorter.

Invariants:
- Decoding writes exactly the bytes asked for, or raises; it allocates no more than these.
"""

from __future__ import annotations

import numpy as np

from ckstore.codec import kernels
from ckstore.codec.byte_codecs import Scratch
from ckstore.errors import MalformedError

RAW, CONST, ZSTD, RANS = 0, 1, 2, 3

# Below this length the 64 states of the plane coder may weigh more than what it saves over a Huffman code.
_ZSTD_NBYTES_MAX = 1 << 14
# Shorter ones are not worth a frame of zstd.
_CODED_NBYTES_MIN = 32


def encode_section(plain: memoryview, room: memoryview, scratch: Scratch) -> tuple[int, memoryview]:
    """Return how the bytes are stored, and as what; in ``room``, in ``plain`` or elsewhere.

    Args:
        plain: The bytes.
        room: Memory, ``kernels.plane_bound`` of their length.
        scratch: Memory of this thread.
    """
    if plain.nbytes and kernels.is_constant(plain):
        return CONST, plain[:1]
    mode, stored = RAW, plain
    if plain.nbytes >= _CODED_NBYTES_MIN:
        coded = room[: kernels.encode_plane(plain, room)]
        if coded.nbytes < stored.nbytes:
            mode, stored = RANS, coded
        if plain.nbytes <= _ZSTD_NBYTES_MAX:
            frame = memoryview(scratch.zstd.compress(plain, "entropy"))
            if frame.nbytes < stored.nbytes:
                mode, stored = ZSTD, frame
    return mode, stored


def decode_section(mode: int, stored: memoryview, destination: memoryview, scratch: Scratch) -> None:
    """Write exactly the bytes of a section.

    Raises:
        MalformedError: The section does not hold them.
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
