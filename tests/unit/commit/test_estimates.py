"""Protects the inputs of a commit's decisions: samples of two chunks match, and estimates are close to coded sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ckstore.codec import chunk_codec, kernels

MIB = 1 << 20
COUNT = MIB // 4


@pytest.fixture(scope="module")
def scratch() -> chunk_codec.Scratch:
    return chunk_codec.Scratch(4 * MIB)


def weights(seed: int = 1, by: float = 0.02) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(COUNT) * by).astype(np.float32)


def bf16(values: np.ndarray) -> np.ndarray:
    rounded = np.empty(values.size, np.uint16)
    kernels.round_floats(values, rounded, 1)
    return rounded


def hardly_changed(before: np.ndarray) -> np.ndarray:
    return before + (np.random.default_rng(3).random(before.size) < 0.01)


PAIRS: dict[str, tuple[int, bool, Callable[[], tuple[np.ndarray, np.ndarray]]]] = {
    "fp32": (4, True, lambda: (weights() + weights(2, 1e-4), weights())),
    "fp32, far": (4, True, lambda: (weights() + weights(2, 5e-3), weights())),
    "fp16": (2, True, lambda: ((weights() + weights(2, 1e-4)).astype("f2"), weights().astype("f2"))),
    "bf16": (2, True, lambda: (bf16(weights() + weights(2, 1e-4)), bf16(weights()))),
    "bf16, hardly changed": (2, True, lambda: (hardly_changed(bf16(weights())).astype("u2"), bf16(weights()))),
    "integers": (8, False, lambda: (np.arange(COUNT) * 7 + (weights() * 100).astype(int), np.arange(COUNT) * 7)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_estimates_match_coded_sizes(name: str, scratch: chunk_codec.Scratch) -> None:
    width, is_float, make = PAIRS[name]
    plain, base = (memoryview(side.tobytes()) for side in make())
    samples = [memoryview(bytearray(chunk_codec.SAMPLE_NBYTES)) for _ in range(2)]
    sample, other = (
        room[: chunk_codec.sample_of(side, width, room)] for side, room in zip((plain, base), samples, strict=True)
    )
    full = chunk_codec.encode(plain, width=width, is_float=is_float, compression="fast", scratch=scratch).nbytes
    delta = chunk_codec.encode_delta(plain, base, width=width, is_float=is_float, compression="fast", scratch=scratch)
    assert delta is not None
    count = plain.nbytes / width
    estimated = chunk_codec.estimate_delta(sample, other, width, is_float)
    # Without the extension, zstd codes the planes.
    error = 0.02 if kernels.IMPLEMENTATION["encode_plane"] == "native" else 0.1
    assert estimated * count / 8 == pytest.approx(delta.nbytes, rel=error, abs=0.03 * count)
    if is_float:
        assert chunk_codec.estimate_full(sample, width, is_float) * count / 8 == pytest.approx(full, rel=error)


def test_equal_samples_cost_nothing_and_noise_full_size() -> None:
    noise, other = (memoryview(np.random.default_rng(seed).bytes(chunk_codec.SAMPLE_NBYTES)) for seed in (1, 2))
    assert chunk_codec.estimate_delta(noise, noise, 4, True) == 0.0
    assert chunk_codec.estimate_delta(noise, other, 4, True) == 32.0
    assert chunk_codec.estimate_full(noise, 8, False) == 64.0
    assert chunk_codec.estimate_full(memoryview(b""), 4, True) == 32.0


@pytest.mark.parametrize(
    "nbytes", [0, 1, 16, 1000, chunk_codec.SAMPLE_NBYTES, chunk_codec.SAMPLE_NBYTES + 8, 300_001, 4 * MIB]
)
def test_samples_of_equal_length_hold_the_same_elements(nbytes: int) -> None:
    for width in (1, 2, 4, 8):
        if nbytes % width:
            continue
        places = np.arange(nbytes // width, dtype=np.uint64).astype(f"u{width}")
        room = memoryview(bytearray(chunk_codec.SAMPLE_NBYTES))
        sample = bytes(room[: chunk_codec.sample_of(memoryview(places.tobytes()), width, room)])
        assert len(sample) == min(nbytes, len(sample)) <= chunk_codec.SAMPLE_NBYTES
        assert len(sample) == nbytes or len(sample) == chunk_codec.SAMPLE_NBYTES
        # Whole elements, in order, from the whole range.
        taken = np.frombuffer(sample, f"u{width}")
        if width >= 4 and nbytes > chunk_codec.SAMPLE_NBYTES:
            assert (np.diff(taken.astype(np.int64)) > 0).all()
            assert taken[-1] > 0.9 * places[-1]


def test_samples_are_taken_piece_by_piece() -> None:
    asked: list[slice] = []

    class Elsewhere:
        nbytes = 4 * MIB

        def __getitem__(self, part: slice) -> memoryview:
            asked.append(part)
            return memoryview(bytes(part.stop - part.start))

    room = memoryview(bytearray(chunk_codec.SAMPLE_NBYTES))
    assert chunk_codec.sample_of(Elsewhere(), 4, room) == chunk_codec.SAMPLE_NBYTES
    assert sum(part.stop - part.start for part in asked) == chunk_codec.SAMPLE_NBYTES
