"""Chunks as in training: weights, their changes and moments, and shared helper functions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckstore.codec import chunk_codec
from ckstore.codec.byte_codecs import Scratch
from ckstore.quant import chunk_codec as lossy_forms
from ckstore.quant.chunk_codec import ChunkShape, QuantizedChunk

DTYPES = ("float32", "bfloat16", "float16")
STORED = {"float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}


@dataclass(frozen=True, slots=True)
class Trained:
    """A weight before and after some steps, and its moments; fp32."""

    before: np.ndarray
    weight: np.ndarray
    first: np.ndarray
    second: np.ndarray


def trained(rows: int, cols: int, seed: int = 1, octaves: float = 0.7) -> Trained:
    """Return heavy-tailed changes whose size depends on row and column, and moments that go with them."""
    rng = np.random.default_rng(seed)
    spread = np.exp2(rng.normal(0, octaves, (rows, 1)) + rng.normal(0, 0.7 * octaves, (1, cols)))
    before = (rng.standard_normal((rows, cols)) * 0.02).astype(np.float32)
    change = rng.standard_t(5, (rows, cols)) * spread * 1e-4
    second = (spread * 1e-5 * np.exp2(rng.normal(0, 0.5, (rows, cols)))) ** 2
    first = np.sqrt(second) * rng.standard_normal((rows, cols)) * 0.3
    return Trained(before, (before + change).astype(np.float32), first.astype(np.float32), second.astype(np.float32))


def stored(values: np.ndarray, dtype: str = "float32") -> memoryview:
    """Return the bytes of values in a dtype; bf16 is cut off."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    if dtype == "bfloat16":
        return memoryview((flat.view("<u4") >> 16).astype("<u2").tobytes())
    with np.errstate(over="ignore", under="ignore"):
        return memoryview(flat.astype(STORED[dtype]).tobytes())


def values_of(plain: memoryview, dtype: str = "float32") -> np.ndarray:
    """Return stored elements as fp32."""
    if dtype == "bfloat16":
        return (np.frombuffer(plain, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(plain, STORED[dtype]).astype(np.float32)


def room_for(plain: memoryview) -> memoryview:
    """Return as many bytes, none of them zero."""
    return memoryview(bytearray(b"\xa5" * plain.nbytes))


def payload_of(made: QuantizedChunk) -> memoryview:
    """Return the payload in one piece, as in a pack."""
    return memoryview(b"".join(made.encoded.parts))


def decoded(made: QuantizedChunk, scratch: Scratch, base: memoryview | None) -> memoryview:
    """Decode to separate memory and, if there is a base, onto it; both must give the reconstruction."""
    payload, plain = payload_of(made), room_for(made.reconstruction)
    how = {"width": made.encoded.width, "scratch": scratch}
    chunk_codec.decode(payload, made.encoded.steps, destination=plain, base=base, **how)
    assert plain == made.reconstruction
    if base is not None:
        onto = memoryview(bytearray(base))
        chunk_codec.decode(payload, made.encoded.steps, destination=onto, base=onto, **how)
        assert onto == made.reconstruction
    needed = 0 if base is None else plain.nbytes
    assert chunk_codec.base_nbytes(made.encoded.steps, plain.nbytes) == needed
    return plain


def quantized_weight(
    state: Trained, settings: object, scratch: Scratch, dtype: str = "float32", phase: int = 0
) -> QuantizedChunk:
    """Quantize the change of a weight, and prove that it comes back."""
    plain, base = stored(state.weight, dtype), stored(state.before, dtype)
    shape = ChunkShape(dtype, state.weight.shape[1], phase)
    made = lossy_forms.encode_weights(plain, base, shape, settings, scratch=scratch, reconstruction=room_for(plain))
    assert made is not None
    decoded(made, scratch, base)
    return made
