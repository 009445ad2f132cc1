"""Elements that are the rounding of a base of fp32: weights of a model beside their masters cost nothing.

Config: one byte, how each element was rounded to the nearest, ties to even: 1 bf16, 2 fp16. The payload is
one zero byte. The base is twice as long as the chunk.
"""

from __future__ import annotations

from ckstore.codec import kernels
from ckstore.errors import MalformedError, UnsupportedError

NAME = "rounded"
CODEC_ID = 6

WIDTH = 2
BF16, FP16 = b"\x01", b"\x02"
PAYLOAD = b"\x00"


def rounding_of(plain: memoryview, base: memoryview) -> bytes | None:
    """Return the config by which ``base`` gives exactly ``plain``, or None where none does."""
    if not plain.nbytes or plain.nbytes % WIDTH or base.nbytes != 2 * plain.nbytes:
        return None
    return next((config for config in (BF16, FP16) if kernels.is_rounding(base, plain, config[0])), None)


def require_known(config: bytes) -> None:
    """Refuse a config that this version does not know.

    Raises:
        UnsupportedError: A newer version made the frame.
    """
    if config not in (BF16, FP16):
        raise UnsupportedError("unknown config of codec rounded", where=config.hex(), todo="upgrade ckstore")


def round_base(payload: memoryview, base: memoryview, destination: memoryview, *, width: int, config: bytes) -> None:
    """Write the rounded elements of ``base``, which does not overlap the destination.

    Raises:
        MalformedError: The payload is another one, or the destination holds no elements of two bytes.
    """
    if bytes(payload[:2]) != PAYLOAD:
        raise MalformedError(f"{payload.nbytes} bytes are stored of a chunk that is rounded")
    if width != WIDTH or destination.nbytes == 0 or destination.nbytes % WIDTH:
        raise MalformedError(f"{destination.nbytes} bytes of width {width} are no floats of two bytes")
    kernels.round_floats(base, destination, config[0])
