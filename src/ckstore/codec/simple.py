"""A chunk that is one element over and over: zeros, ones, an untouched buffer."""

from __future__ import annotations

import numpy as np

from ckstore import kernels
from ckstore.codec.base import Brief, Encoded, require_elements, require_no_config
from ckstore.codec.scratch import Scratch
from ckstore.errors import MalformedError


class ConstCodec:
    """The payload is the element."""

    name = "const"
    codec_id = 1

    def encode(self, plain: memoryview, brief: Brief, scratch: Scratch) -> Encoded | None:
        """Return the first element if all others equal it."""
        if not _repeats(plain, brief.width):
            return None
        return Encoded(((self.codec_id, b""),), [plain[: brief.width]], brief.width)

    def decode(
        self, payload: memoryview, config: bytes, *, width: int, destination: memoryview, scratch: Scratch
    ) -> None:
        """Write the element over and over."""
        require_no_config(config, self.name)
        count = require_elements(destination.nbytes, width)
        if payload.nbytes != width:
            raise MalformedError(f"{payload.nbytes} bytes are no element of width {width}")
        word = np.dtype(f"u{width}")
        np.frombuffer(destination, word, count).fill(np.frombuffer(payload, word)[0])


def _repeats(plain: memoryview, width: int) -> bool:
    # All elements are the same exactly when each equals its neighbour.
    return kernels.equal_bytes(plain[width:], plain[: plain.nbytes - width])
