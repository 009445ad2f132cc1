"""Chunks and the bases they are coded against, of every width and kind of content."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckstore.codec import chunk_codec, kernels
from ckstore.config import MIB

COUNT = 40_000


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def bf16(values: np.ndarray) -> np.ndarray:
    rounded = np.empty(values.size, np.uint16)
    kernels.round_floats(values.astype(np.float32), rounded, 1)
    return rounded


def weights(count: int = COUNT, seed: int = 1) -> np.ndarray:
    return (random(seed).standard_normal(count) * 0.02).astype(np.float32)


def trained(before: np.ndarray, by: float = 1e-4, seed: int = 2) -> np.ndarray:
    return (before + random(seed).standard_normal(before.size) * by).astype(np.float32)


def a_few_changed(before: np.ndarray, share: float, seed: int = 3) -> np.ndarray:
    rng = random(seed)
    steps = rng.choice(np.array([1, (1 << 16) - 1], np.uint16), before.size)
    return np.where(rng.random(before.size) < share, before + steps, before).astype(before.dtype)


def fp8(seed: int) -> np.ndarray:
    """The upper half of fp16 is a float of 8 bits."""
    return weights(seed=seed).astype("f2").view("u1")[1::2]


def some_nan() -> np.ndarray:
    return np.resize(np.array([np.nan, 1, -np.inf, -0.0], "f4"), COUNT)


PAIRS: dict[str, tuple[int, bool, Callable[[], tuple[np.ndarray, np.ndarray]]]] = {
    "fp32": (4, True, lambda: (trained(weights()), weights())),
    "fp64": (8, True, lambda: (weights().astype("f8") + 1e-9, weights().astype("f8"))),
    "fp16": (2, True, lambda: (trained(weights()).astype("f2"), weights().astype("f2"))),
    "bf16": (2, True, lambda: (bf16(trained(weights())), bf16(weights()))),
    "bf16 hardly changed": (2, True, lambda: (a_few_changed(bf16(weights(MIB // 2)), 0.01), bf16(weights(MIB // 2)))),
    "fp8": (1, True, lambda: (fp8(1), fp8(2))),
    "crossing zero": (4, True, lambda: (weights() * -1e-30, weights() * 1e-30)),
    "nan and inf": (4, True, lambda: (some_nan(), np.ones(COUNT, "f4"))),
    "pairs": (8, True, lambda: (np.full(COUNT, 1 + 2j, np.complex64), np.full(COUNT, 1 + 3j, np.complex64))),
    "token ids": (8, False, lambda: (np.arange(COUNT) + random(4).integers(0, 3, COUNT), np.arange(COUNT))),
    "flags": (1, False, lambda: (random(5).random(COUNT) < 0.1, random(6).random(COUNT) < 0.1)),
    "nothing changed": (4, True, lambda: (weights(), weights())),
}  # fmt: skip


def pair(name: str) -> tuple[int, bool, memoryview, memoryview]:
    width, is_float, make = PAIRS[name]
    chunk, base = make()
    return width, is_float, memoryview(chunk.tobytes()), memoryview(base.tobytes())


def decoded(
    payload: bytes, encoded: chunk_codec.Encoded, nbytes: int, base: memoryview | None, scratch: chunk_codec.Scratch
) -> bytes:
    # A guard on both sides shows writes beyond the destination.
    room = bytearray(b"\x5a" * (nbytes + 32))
    try:
        chunk_codec.decode(
            memoryview(payload),
            encoded.steps,
            width=encoded.width,
            destination=memoryview(room)[16 : 16 + nbytes],
            scratch=scratch,
            base=base,
        )
    finally:
        assert room[:16] == room[-16:] == b"\x5a" * 16
    return bytes(room[16:-16])
