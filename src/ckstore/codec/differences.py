"""The two steps that need a base: the difference of two chunks, and the rounding of an fp32 chunk.

Delta (id 5). Each element minus the element of the base, as words that are small where both are close. Config: one
byte, 1 if the elements are floats, which are subtracted as integers in the order of the numbers, else 0. The words are
byte planes, as the plane coder needs them. The difference is exact for all values, NaN, infinities and -0 included.

Rounded (id 6). Each element is its fp32 base rounded to the nearest, ties to even: model weights that are stored with
their fp32 masters take one byte a chunk. Config: one byte, 1 for bf16, 2 for fp16. The payload is one zero byte. The
base is twice as long as the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckstore.codec import kernels
from ckstore.errors import MalformedError, UnsupportedError

DELTA_NAME, DELTA_ID = "delta", 5
INTEGERS, FLOATS = b"\x00", b"\x01"

ROUNDED_NAME, ROUNDED_ID = "rounded", 6
ROUNDED_WIDTH = 2
ROUNDED_PAYLOAD = b"\x00"
BF16, FP16 = b"\x01", b"\x02"


def delta_config(*, is_float: bool) -> bytes:
    """Return the config of a delta."""
    return FLOATS if is_float else INTEGERS


def require_delta_config(config: bytes) -> None:
    """Check the config of a delta.

    Raises:
        UnsupportedError: A newer version made the frame.
    """
    if config not in (INTEGERS, FLOATS):
        raise UnsupportedError("unknown config of codec delta", where=config.hex(), todo="upgrade ckstore")


def subtract(plain: memoryview, base: memoryview, planes_out: memoryview, *, width: int, config: bytes) -> None:
    """Write the byte planes of ``plain`` minus ``base``, one after another."""
    kernels.split_delta(plain, base, planes_out, width, config == FLOATS)


def delta_bits(plain: memoryview, base: memoryview, *, width: int, config: bytes) -> list[float]:
    """Estimate from a sample the bits per byte of each coded plane that ``subtract`` makes."""
    return kernels.delta_bits(plain, base, width, config == FLOATS)


def add(planes: Sequence[memoryview], base: memoryview, destination: memoryview, *, width: int, config: bytes) -> None:
    """Write the chunk from the planes of its difference; ``base`` and ``destination`` may be the same memory."""
    kernels.merge_delta(planes, base, destination, width, config == FLOATS)


def rounding_config(plain: memoryview, base: memoryview) -> bytes | None:
    """Return the config by which rounding ``base`` gives exactly ``plain``, or None."""
    if not plain.nbytes or plain.nbytes % ROUNDED_WIDTH or base.nbytes != 2 * plain.nbytes:
        return None
    return next((config for config in (BF16, FP16) if kernels.is_rounding(base, plain, config[0])), None)


def require_rounding_config(config: bytes) -> None:
    """Check the config of a rounding.

    Raises:
        UnsupportedError: A newer version made the frame.
    """
    if config not in (BF16, FP16):
        raise UnsupportedError("unknown config of codec rounded", where=config.hex(), todo="upgrade ckstore")


def round_base(payload: memoryview, base: memoryview, destination: memoryview, *, width: int, config: bytes) -> None:
    """Write the rounded elements of ``base``, which does not overlap the destination.

    Raises:
        MalformedError: The payload is not one zero byte, or the destination is not whole elements of two bytes.
    """
    if bytes(payload[:2]) != ROUNDED_PAYLOAD:
        raise MalformedError(f"a rounded chunk has a payload of {payload.nbytes} bytes instead of one zero byte")
    if width != ROUNDED_WIDTH or destination.nbytes == 0 or destination.nbytes % ROUNDED_WIDTH:
        raise MalformedError(f"a rounded chunk of {destination.nbytes} bytes and width {width} is not bf16 or fp16")
    kernels.round_floats(base, destination, config[0])
