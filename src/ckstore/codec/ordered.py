"""Elements less the elements of a base, as words that are small where both are close; and back.

Config: one byte, 1 if elements are floats, which are subtracted in the order of the numbers, else 0. The
words come in byte planes, as the plane coder wants them, and fit the chunk exactly: nothing is lost, NaN,
infinities and -0 included. The bytes of the base may be the very memory that receives the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckstore.codec import kernels
from ckstore.errors import MalformedError, UnsupportedError

NAME = "delta"
CODEC_ID = 5

WIDTHS = (1, 2, 4, 8)
INTEGERS, FLOATS = b"\x00", b"\x01"


def config_of(*, is_float: bool) -> bytes:
    """Return what a frame says of how its elements were subtracted."""
    return FLOATS if is_float else INTEGERS


def require_known(config: bytes) -> None:
    """Refuse a config that this version does not know.

    Raises:
        UnsupportedError: A newer version made the frame.
    """
    if config not in (INTEGERS, FLOATS):
        raise UnsupportedError("unknown config of codec delta", where=config.hex(), todo="upgrade ckstore")


def require_elements(nbytes: int, width: int) -> None:
    """Refuse what is no positive number of elements.

    Raises:
        MalformedError: The width is none of ours, or the length no multiple of it.
    """
    if width not in WIDTHS or nbytes == 0 or nbytes % width:
        raise MalformedError(f"{nbytes} bytes are no elements of width {width}")


def subtract(plain: memoryview, base: memoryview, planes_out: memoryview, *, width: int, config: bytes) -> None:
    """Write the planes of ``plain`` less ``base`` one after another."""
    kernels.split_delta(plain, base, planes_out, width, config == FLOATS)


def residual_bits(plain: memoryview, base: memoryview, *, width: int, config: bytes) -> list[float]:
    """Return the bits per byte that coding takes in each plane of what ``subtract`` makes, as a sample tells."""
    return kernels.delta_bits(plain, base, width, config == FLOATS)


def add(planes: Sequence[memoryview], base: memoryview, destination: memoryview, *, width: int, config: bytes) -> None:
    """Write the chunk whose planes less ``base`` are given; the base may be the very bytes of the destination."""
    kernels.merge_delta(planes, base, destination, width, config == FLOATS)
