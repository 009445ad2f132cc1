"""Protects products of narrow matrices: numpy and native give exact products and the same elements, bit for bit."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckstore.codec.kernels import reference

on_native = pytest.importorskip("ckstore._native", reason="the extension is not built")
_native = pytest.importorskip("ckstore._native", reason="the extension is not built")

KINDS = {0: "<f4", 1: "<u2", 2: "<f2"}
SHAPES = [(0, 16, 3), (1, 16, 15), (300, 16, 5), (1000, 33, 32), (70_001, 513, 300), (66_000, 65_536, 65_000)]
BOTH = pytest.mark.parametrize("loops", [reference, on_native], ids=["numpy", "native"])
PORTABLE = SimpleNamespace(
    multiply_floats=_native.multiply_floats_portably, multiply_words=_native.multiply_words_portably
)
"""Instruction sets of processors without bf16 and word pairs."""

ALL = pytest.mark.parametrize("loops", [reference, on_native, PORTABLE], ids=["numpy", "native", "portable"])
V_MIN = np.float32(2.0**-126)


def stored(values: np.ndarray, kind: int) -> np.ndarray:
    if kind == 1:
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    return values.astype(KINDS[kind])


SIDES = pytest.mark.parametrize(
    ("rows", "inner", "cols"),
    # Tiles of 12, 8, 4 and 1 rows by 32 and 16 columns, parts of 256 and 512 along the inner side, either side kept.
    [
        *[(1, 1, 1), (4, 256, 32), (5, 257, 33), (64, 3, 700), (13, 600, 1), (2, 0, 40), (0, 5, 7), (25, 513, 49)],
        *[(140, 1100, 150), (300, 75, 530), (1300, 7, 20)],
    ],
)


@ALL
@SIDES
@pytest.mark.parametrize("rounds", [False, True], ids=["", "rounded"])
def test_products_of_integers_are_exact(loops: Any, rows: int, inner: int, cols: int, rounds: bool) -> None:
    rng = np.random.default_rng(rows)
    # Integers that bf16 represents exactly.
    left, right = rng.integers(-99, 100, (rows, inner)), rng.integers(-99, 100, (inner, cols))
    out = np.full((rows, cols), 7, np.float32)
    loops.multiply_floats(left.astype(np.float32), right.astype(np.float32), out, rows, inner, cols, rounds=rounds)
    assert np.array_equal(out, left @ right)
    turned, there = np.ascontiguousarray(right.T, np.float32), np.full((cols, rows), 7, np.float32)
    loops.multiply_floats(left.astype(np.float32), turned, out, rows, inner, cols, True, rounds=rounds)
    assert np.array_equal(out, left @ right)
    loops.multiply_floats(left.astype(np.float32), turned, there, rows, inner, cols, True, True, rounds)
    assert np.array_equal(there.T, left @ right)


@ALL
@SIDES
def test_products_of_largest_words_are_exact(loops: Any, rows: int, inner: int, cols: int) -> None:
    rng = np.random.default_rng(cols)
    # Sums stay below 2**24, as callers ensure. Zeros of the product are +0.
    left, right = rng.integers(-9, 10, (rows, inner)), rng.integers(-99, 100, (inner, cols))
    left[:, 3:] = np.where(rng.random(left[:, 3:].shape) < 0.5, 0, left[:, 3:])
    right[:2] = rng.choice([-(2**15), 2**15 - 1, 0], right[:2].shape)
    out = np.full((rows, cols), 7, np.float32)
    loops.multiply_words(left.astype(np.int16), right.astype(np.int16), out, rows, inner, cols)
    assert out.tobytes() == (left @ right).astype(np.float32).tobytes()


@ALL
def test_factors_are_rounded_to_nearest_even_bf16(loops: Any) -> None:
    rng = np.random.default_rng(11)
    left, right = (rng.normal(size=shape).astype(np.float32) for shape in ((29, 700), (700, 77)))
    # Halfway between two neighbours, on either side of an even one.
    left[0, :2], right[:2, 0] = [1 + 2**-8, 1 + 3 * 2**-8], 1.0
    left[0, 2:], right[2:, 0] = 0.0, 0.0
    out, expected = np.empty((29, 77), np.float32), np.empty((29, 77), np.float32)
    loops.multiply_floats(left, right, out, 29, 700, 77, rounds=True)
    reference.multiply_floats(left, right, expected, 29, 700, 77, rounds=True)
    assert out[0, 0] == 1.0 + (1 + 2**-6)
    assert np.abs(out - expected).max() < 1e-4
    plain = left @ right
    assert 1e-3 < np.abs(out - plain).max() < 1.0, "it was not rounded"


@pytest.mark.parametrize("loops", [on_native, PORTABLE], ids=["native", "portable"])
@pytest.mark.parametrize("rounds", [False, True], ids=["", "rounded"])
def test_sums_do_not_depend_on_tile_or_transposition(loops: Any, rounds: bool) -> None:
    rng = np.random.default_rng(3)
    left, right = (rng.normal(size=shape).astype(np.float32) for shape in ((29, 700), (700, 77)))
    out, turned = np.empty((29, 77), np.float32), np.empty((77, 29), np.float32)
    loops.multiply_floats(left, right, out, 29, 700, 77, rounds=rounds)
    loops.multiply_floats(left, np.ascontiguousarray(right.T), turned, 29, 700, 77, True, True, rounds)
    assert np.array_equal(out, turned.T)
    for row in range(29):
        alone = np.empty(77, np.float32)
        loops.multiply_floats(left[row], right, alone, 1, 700, 77, rounds=rounds)
        assert np.array_equal(alone, out[row]), "what is stored must not depend on the size of a call"


@BOTH
@pytest.mark.parametrize(("count", "inner"), [(0, 5), (1, 1), (3, 0), (9, 4), (33, 130), (104, 513)])
def test_products_of_rows_are_summed_in_double(loops: ModuleType, count: int, inner: int) -> None:
    rows = np.random.default_rng(count).normal(size=(count, inner)).astype(np.float32)
    out = np.full((count, count), 7.0)
    loops.products_of_rows(rows, out, count, inner)
    wide = rows.astype(np.float64)
    assert np.allclose(out, np.triu(wide @ wide.T), rtol=1e-13, atol=1e-13)
    assert not np.tril(out, -1).any()


@BOTH
@pytest.mark.parametrize("count", [0, 1, 2, 17, 104])
def test_inverse_root_gives_the_identity(loops: ModuleType, count: int) -> None:
    rows = np.random.default_rng(count).normal(size=(count, count + 9))
    square, inverse = rows @ rows.T, np.full((count, count), 7.0)
    given = square.copy()
    given[np.tril_indices(count, -1)] = np.nan  # the lower half is not read
    assert loops.inverse_root(given, inverse)
    assert np.allclose(inverse @ square @ inverse.T, np.eye(count), atol=1e-8)
    assert not np.triu(inverse, 1).any()


@BOTH
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_non_finite_matrix_has_no_eigenvectors(loops: ModuleType, wrong: float) -> None:
    square = np.eye(5)
    square[3, 1] = square[1, 3] = wrong
    assert not loops.symmetric_eigen(square, np.empty((5, 5)), np.empty(5), np.empty(15))


@BOTH
@pytest.mark.parametrize("wrong", [0.0, -1.0, np.inf, np.nan])
def test_a_matrix_that_is_not_positive_has_no_root(loops: ModuleType, wrong: float) -> None:
    square = np.eye(5)
    square[3, 3] = wrong
    assert not loops.inverse_root(square, np.empty((5, 5)))


@BOTH
@pytest.mark.parametrize("count", [1, 2, 3, 17, 72])
@pytest.mark.parametrize("case", ["full", "diagonal", "low rank", "nearly constant", "zero"])
def test_eigenvectors_are_those_of_the_matrix(loops: ModuleType, count: int, case: str) -> None:
    rng = np.random.default_rng(count)
    narrow = rng.normal(size=(count, max(1, count // 3)))
    wide = rng.normal(size=(count, 2 * count))
    matrix = {
        "full": wide @ wide.T,
        "diagonal": np.diag(rng.normal(size=count)),
        "low rank": narrow @ narrow.T,
        # Rank one, and rounding errors of fp32.
        "nearly constant": np.outer(wide[:, 0], wide[:, 0]).astype(np.float32).astype(np.float64),
        "zero": np.zeros((count, count)),
    }[case]
    vectors, values = np.empty((count, count)), np.empty(count)
    assert loops.symmetric_eigen(matrix.copy(), vectors, values, np.empty(3 * count))
    assert vectors @ vectors.T == pytest.approx(np.eye(count), abs=1e-12)
    size = max(1.0, float(np.abs(matrix).max()))
    assert vectors @ matrix == pytest.approx(values[:, None] * vectors, abs=1e-12 * count * size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [0, 1, 2])
@pytest.mark.parametrize(("count", "row", "phase"), SHAPES)
def test_elements_are_the_same_bit_for_bit(count: int, row: int, phase: int, rule: int, kind: int) -> None:
    rng = np.random.default_rng(count + rule)
    row_count = -(-(phase + count) // row) if count else 0
    product = rng.integers(-(2**20), 2**20, row_count * row).astype(np.float32)
    rows, cols = (np.exp2(rng.integers(-60, 20, size)).astype(np.float32) for size in (row_count, row))
    rows[::3], cols[::5] = 0, 0
    base = np.abs(rng.normal(size=count)).astype(np.float32) * np.float32(1e-3)
    base[::7] *= np.float32(1e-36)
    given = stored(base, kind)
    sides = (rows, cols, b"") if rule == 2 else (b"", b"", given)
    made = []
    for loops in (reference, on_native):
        out = np.full(count, 7, KINDS[kind])
        greatest = loops.finish_outer(product, *sides, out, row, phase, kind, rule, 3e-7, 0.25)
        made.append((greatest, out.tobytes()))
        if rule != 2:
            place = given.copy()
            loops.finish_outer(product, b"", b"", place, place, row, phase, kind, rule, 3e-7, 0.25)
            assert place.tobytes() == out.tobytes()
    assert made[0] == made[1]
    if rule == 1 and count > 100:
        assert made[0][0] == 0.25


@BOTH
def test_second_moments_vanish_only_with_a_factor(loops: ModuleType) -> None:
    product = np.full(64, -1000, np.float32)
    rows, cols = np.full(4, 1e-30, np.float32), np.full(16, 1e-12, np.float32)
    rows[2] = 0
    out = np.empty(64, np.float32)
    loops.finish_outer(product, rows, cols, b"", out, 16, 0, 0, 2, 1.0, 0.0)
    assert np.array_equal(out.reshape(4, 16)[[0, 1, 3]], np.full((3, 16), V_MIN))
    assert not out.reshape(4, 16)[2].any()


@BOTH
def test_wrong_arguments_raise_value_error(loops: ModuleType) -> None:
    product, plain, side = np.zeros(64, np.float32), np.zeros(64, np.float32), np.zeros(16, np.float32)
    square, few, short = np.zeros((4, 4)), np.zeros(12), np.zeros(16, np.int16)
    for call in (
        lambda: loops.multiply_floats(side, side, np.empty(16, np.float32), 4, 4, 5),
        lambda: loops.multiply_floats(side, side, np.empty(15, np.float32), 4, 4, 4),
        lambda: loops.multiply_words(short, short, np.empty(16, np.float32), 4, 4, 5),
        lambda: loops.multiply_words(short, short, np.empty(15, np.float32), 4, 4, 4),
        lambda: loops.products_of_rows(side, np.empty((4, 4)), 4, 5),
        lambda: loops.products_of_rows(side, np.empty((4, 3)), 4, 4),
        lambda: loops.products_of_rows(np.empty(1025, np.float32), np.empty((1025, 1025)), 1025, 1),
        lambda: loops.inverse_root(square, np.empty((4, 3))),
        lambda: loops.inverse_root(np.empty(15), np.empty(15)),
        lambda: loops.symmetric_eigen(square, np.empty((4, 4)), np.empty(4), few[:11]),
        lambda: loops.symmetric_eigen(square, np.empty((4, 3)), np.empty(4), few),
        lambda: loops.finish_outer(product, b"", b"", plain, np.empty(64, np.float32), 16, 0, 0, 3, 1.0, 1.0),
        lambda: loops.finish_outer(product, b"", b"", plain, np.empty(63, np.float32), 16, 0, 0, 0, 1.0, 1.0),
        lambda: loops.finish_outer(product, b"", b"", b"", np.empty(64, np.float32), 16, 0, 0, 0, 1.0, 1.0),
        lambda: loops.finish_outer(product, side, side, plain, np.empty(64, np.float32), 16, 0, 0, 1, 1.0, 1.0),
        lambda: loops.finish_outer(product, side, side, b"", np.empty(64, np.float32), 16, 0, 0, 2, 1.0, 1.0),
        lambda: loops.finish_outer(product, b"", b"", plain, np.empty(64, np.float32), 16, 3, 0, 0, 1.0, 1.0),
        lambda: loops.finish_outer(product, b"", b"", plain, np.empty(64, np.float32), 8, 0, 0, 0, 1.0, 1.0),
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            call()
