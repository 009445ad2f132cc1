"""Protects the kernels around products: numpy and native give the same values, words and sums, bit for bit."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from ckstore.codec.kernels import reference

on_native = pytest.importorskip("ckstore._native", reason="the extension is not built")

BOTH = pytest.mark.parametrize("loops", [reference, on_native], ids=["numpy", "native"])
SHAPES = pytest.mark.parametrize(
    ("count", "row", "phase"),
    [(0, 16, 3), (1, 16, 15), (300, 16, 5), (1000, 33, 32), (70_001, 513, 300), (66_000, 65_536, 65_000)],
)
VECTORS = pytest.mark.parametrize(("count", "length"), [(0, 0), (1, 1), (3, 64), (5, 63), (7, 129), (96, 2048)])


def both(call, *outs: np.ndarray) -> tuple[object, list[np.ndarray]]:
    """Call both implementations with their own arrays, compare all results, and return them."""
    filled = [[out.copy() for out in outs] for _ in range(2)]
    results = [call(loops, *made) for loops, made in zip((reference, on_native), filled, strict=True)]
    assert results[0] == results[1]
    for one, other in zip(*filled, strict=True):
        assert one.tobytes() == other.tobytes()
    return results[0], filled[0]


def row_count(count: int, row: int, phase: int) -> int:
    return -(-(count + phase) // row) if count else 0


@SHAPES
def test_roots_are_taken_and_summed(count: int, row: int, phase: int) -> None:
    rng = np.random.default_rng(count)
    values = np.exp(rng.normal(size=count) * 9).astype(np.float32)
    values[::7] = 0
    height = row_count(count, row, phase)
    (least, greatest), (roots, rows, cols) = both(
        lambda loops, x, above, beside: loops.take_roots(x, above, beside, row, phase),
        *(values, np.full(height, 7.0), np.full(row, 7.0)),
    )
    assert np.array_equal(roots, np.sqrt(values))
    assert (least, greatest) == ((values.min(), values.max()) if count else (0, 0))
    whole = np.zeros(height * row)
    whole[phase : phase + count] = np.sqrt(values)
    assert np.allclose(rows, whole.reshape(height, row).sum(axis=1), rtol=1e-12)
    assert np.allclose(cols, whole.reshape(height, row).sum(axis=0), rtol=1e-12)


@BOTH
def test_negative_value_is_reported_by_the_minimum(loops: ModuleType) -> None:
    values = np.array([4.0, -1.0, 9.0], np.float32)
    assert loops.take_roots(values, np.empty(1), np.empty(16), 16, 0) == (-1.0, 9.0)
    assert values[0] == 2
    assert values[2] == 3


@pytest.mark.parametrize("place", [0, 1, 15, 63, 64, 100, 139])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e-42])
def test_single_nan_is_reported(place: int, wrong: float) -> None:
    values = np.ones(140, np.float32)
    values[place] = wrong
    for loops in (reference, on_native):
        extremes = loops.take_roots(values.copy(), np.empty(3), np.empty(70), 70, 3)
        expected = (np.nan, np.nan) if np.isnan(wrong) else sorted((1.0, float(np.float32(wrong))))
        assert np.array_equal(extremes, expected, equal_nan=True)


@SHAPES
def test_subtract_ones_matches_numpy(count: int, row: int, phase: int) -> None:
    rng = np.random.default_rng(count)
    values, height = rng.normal(size=count).astype(np.float32), row_count(count, row, phase)
    above, beside = (np.exp2(rng.normal(size=each)).astype(np.float32) for each in (height, row))
    _, (made,) = both(lambda loops, x: loops.subtract_ones(x, above, beside, row, phase), values)
    places = np.arange(phase, phase + count)
    expected = values * above[places // row] * beside[places % row] - np.float32(1)
    assert made.tobytes() == expected.tobytes()


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 100_003])
def test_product_error_is_summed_in_double(count: int) -> None:
    rng = np.random.default_rng(count)
    values, integers = rng.normal(size=count).astype(np.float32), rng.integers(-99, 99, count).astype(np.float32)
    (missed, given), _ = both(lambda loops: loops.missed_squares(values, integers, 0.0123))
    errors = (integers * np.float32(0.0123)).astype(np.float64) - values
    assert missed == pytest.approx(float(np.square(errors).sum()), rel=1e-12)
    assert given == pytest.approx(float(np.square(values.astype(np.float64)).sum()), rel=1e-12)
    (missed, given), _ = both(lambda loops: loops.missed_squares(values, np.zeros(count, np.float32), 3.0))
    assert missed == given, "an empty product misses everything, exactly"


@VECTORS
def test_vectors_are_rounded_to_the_nearest_words(count: int, length: int) -> None:
    rng = np.random.default_rng(count)
    vectors = rng.normal(size=(count, length)).astype(np.float32)
    factors = np.exp2(rng.integers(0, 12, count)).astype(np.float32)
    if length > 60:
        vectors[0, :6], factors[0] = [0.5, 1.5, -0.5, -1.5, 2.5, -2.5], 1.0
    greatest, (words,) = both(
        lambda loops, out: loops.round_vectors(vectors, factors, out), np.full((count, length), 7, np.int16)
    )
    expected = np.rint(vectors * factors[:, None])
    assert np.array_equal(words, expected)
    assert greatest == np.abs(expected).max(initial=0)
    if length > 60:
        assert words[0, :6].tolist() == [0, 2, 0, -2, 2, -2]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e30, -1e30, 40_000.0, 2.0**20 + 1])
def test_word_overflow_is_reported_by_the_maximum(wrong: float) -> None:
    vectors = np.ones((2, 70), np.float32)
    vectors[1, 66] = wrong
    greatest, _ = both(
        lambda loops, out: loops.round_vectors(vectors, np.ones(2, np.float32), out), np.empty((2, 70), np.int16)
    )
    assert greatest == (40_000 if wrong == 40_000 else 2**20)


@VECTORS
def test_words_are_folded_and_split(count: int, length: int) -> None:
    rng = np.random.default_rng(length)
    words = rng.integers(-(2**15), 2**15, (count, length)).astype(np.int16)
    if words.size:
        words.flat[0] = -(2**15)
    _, (low, high, sums) = both(
        lambda loops, *out: loops.split_zigzag(words, *out),
        *(np.full(words.shape, 7, np.uint8), np.full(words.shape, 7, np.uint8), np.full(count, 7.0)),
    )
    wide = words.astype(np.int64)
    folded = np.where(wide < 0, -2 * wide - 1, 2 * wide)
    assert np.array_equal(low, folded & 255)
    assert np.array_equal(high, folded >> 8)
    assert np.array_equal(sums, np.square(wide).sum(axis=1))


@BOTH
def test_wrong_arguments_raise_value_error(loops: ModuleType) -> None:
    x, words, low, two = np.zeros(16, np.float32), np.zeros(16, np.int16), np.zeros(16, np.uint8), np.zeros(2)
    frozen = np.zeros(16, np.float32)
    frozen.flags.writeable = False
    for call in (
        lambda: loops.take_roots(x, np.empty(2), np.empty(16), 16, 0),
        lambda: loops.take_roots(x, np.empty(1), np.empty(15), 16, 0),
        lambda: loops.take_roots(x, np.empty(1), np.empty(16), 16, 16),
        lambda: loops.take_roots(x, np.empty(2), np.empty(8), 8, 0),
        lambda: loops.take_roots(frozen, np.empty(1), np.empty(16), 16, 0),
        lambda: loops.subtract_ones(x, x[:2], x, 16, 0),
        lambda: loops.subtract_ones(x, x[:1], x[:15], 16, 0),
        lambda: loops.subtract_ones(frozen, x[:1], x, 16, 0),
        lambda: loops.missed_squares(x, x[:15], 1.0),
        lambda: loops.missed_squares(x.view(np.uint8)[:15], x.view(np.uint8)[:15], 1.0),
        lambda: loops.round_vectors(x, x[:3], words),
        lambda: loops.round_vectors(x, x[:0], words),
        lambda: loops.round_vectors(x[:0], x[:1], words[:0]),
        lambda: loops.round_vectors(x, x[:2], words[:15]),
        lambda: loops.split_zigzag(words, low, low[:15], two),
        lambda: loops.split_zigzag(words, low[:15], low[:15], two),
        lambda: loops.split_zigzag(words, low, low.copy(), np.zeros(3)),
        lambda: loops.split_zigzag(words[:0], low[:0], low[:0], two),
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            call()
