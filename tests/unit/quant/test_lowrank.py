"""Protects low-rank directions: found at any magnitude, multiplied exactly, and grouped in the fewest bits."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from ckstore.config import LowRank
from ckstore.quant import lowrank, lowrank_payload
from ckstore.quant.geometry import Grid
from ckstore.quant.lowrank_payload import make_change

SETTINGS = LowRank(0.5, error_max=0.3)


def directed(rows: int, cols: int, rank: int = 5, noise: float = 0.02) -> np.ndarray:
    rng = np.random.default_rng(rows)
    found = rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, cols))
    return found / found.std() + noise * rng.normal(size=(rows, cols))


def left_over(matrix: np.ndarray, product: lowrank.Product) -> float:
    whole = np.empty(matrix.shape, np.float32)
    lowrank.multiply(product, whole)
    error = whole.astype(np.float64) * float(product.scale) - matrix
    return float((error**2).sum() / (matrix.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("shape", [(96, 160), (160, 96), (20, 300), (301, 33)])
@pytest.mark.parametrize("exponent", [-13, -8, 0, 4, 8, 12])
def test_directions_do_not_depend_on_magnitude(shape: tuple[int, int], exponent: int) -> None:
    matrix = directed(*shape)
    found = {}
    for scale in (1.0, 10.0**exponent):
        values = (matrix * scale).astype(np.float32)
        made = make_change(values.data.cast("B"), Grid(values.size, shape[1], 0), SETTINGS)
        assert made is not None
        found[scale] = made.product.rank, left_over(values, made.product)
    (rank, error), (other_rank, other_error) = found[1.0], found[10.0**exponent]
    assert 5 <= rank == other_rank
    assert error == pytest.approx(other_error, rel=0.05)
    assert error < 0.02


def test_directions_are_close_to_singular_vectors() -> None:
    # With a flat spectrum, the last kept directions are hard to separate from the dropped ones.
    rng = np.random.default_rng(4)
    matrix = (rng.normal(size=(200, 300)) * np.exp(-np.arange(300) / 40)) @ np.linalg.qr(rng.normal(size=(300, 300)))[0]
    matrix = matrix.astype(np.float32)
    step = 0.2 * float(np.sqrt((matrix**2).mean()))
    product = lowrank.fit(matrix, step, 48)
    assert product is not None
    sizes = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    ideal = float((sizes[product.rank :] ** 2).sum() / (sizes**2).sum())
    assert product.rank == 48
    # This few random vectors and the rounding lose a quarter here. A basis that is not orthogonal loses more.
    assert ideal < left_over(matrix, product) < 1.35 * ideal


@pytest.mark.parametrize("rank", [1, 2])
def test_low_rank_matrix_is_described_by_its_rank(rank: int) -> None:
    matrix = directed(64, 80, rank, noise=0.0).astype(np.float32)
    product = lowrank.fit(matrix, 0.1, 32)
    assert product is not None
    assert product.rank == rank
    assert left_over(matrix, product) < 1e-3


@pytest.mark.parametrize("shape", [(300, 768), (768, 300), (1024, 1024), (100, 100)])
@pytest.mark.parametrize("kind", ["constant", "one direction", "nearly constant", "two directions and noise"])
@pytest.mark.parametrize("seed", range(3))
def test_one_direction_may_dominate(shape: tuple[int, int], kind: str, seed: int) -> None:
    # Rounding errors of fp32 products are larger than the weakest directions of what remains of such a matrix.
    rng = np.random.default_rng(seed)
    matrix = np.full(shape, 0.37)
    if kind == "one direction":
        matrix = np.outer(rng.normal(size=shape[0]), rng.normal(size=shape[1]))
    elif kind == "nearly constant":
        matrix = matrix + 0.01 * rng.normal(size=shape)
    elif kind == "two directions and noise":
        matrix = rng.normal(size=(shape[0], 2)) @ rng.normal(size=(2, shape[1])) + 0.03 * rng.normal(size=shape)
    product = lowrank.fit(matrix.astype(np.float32), 0.26, 96)
    assert product is not None
    assert product.rank == (2 if kind.startswith("two") else 1)
    assert left_over(matrix, product) < 5e-3


@pytest.mark.parametrize(("row", "phase"), [(16, 0), (24, 0), (32, 5)])
def test_two_byte_chunk_may_have_many_rows(row: int, phase: int) -> None:
    count = (4 << 20) // 2
    grid = Grid(count, row, phase)
    rng = np.random.default_rng(row)
    values = (rng.normal(size=(grid.row_count, 2)) @ rng.normal(size=(2, row))).astype(np.float32)
    values = values.reshape(-1)[phase : phase + count].copy()
    made = make_change(values.data.cast("B"), grid, SETTINGS)
    assert made is not None
    found = lowrank_payload.unpack(memoryview(lowrank_payload.pack(made.product)), grid.row_count, row)
    assert np.array_equal(found.left, made.product.left)
    assert np.array_equal(found.right, made.product.right)


def test_most_rows_may_be_zero() -> None:
    matrix = np.zeros((128, 96), np.float32)
    matrix[::9] = directed(15, 96, 3, noise=0.0)
    product = lowrank.fit(matrix, 0.1, 32)
    assert product is not None
    assert product.rank == 3
    assert left_over(matrix, product) < 1e-3


@pytest.mark.parametrize(
    ("left_max", "right_max", "shift"),
    # As words, as floats for a right side that is too wide for words, and as doubles.
    [(60, 60, 0), (60, 60, 9), (3, 20_000, 0), (1, 20_000, 3), (9, 9, 15), (2000, 2000, 0), (32_767, 32_767, 15)],
)
def test_products_of_large_integers_are_exact(left_max: int, right_max: int, shift: int) -> None:
    rng = np.random.default_rng(left_max)
    left = rng.integers(-left_max, left_max + 1, (70, 19)).astype(np.int16)
    right = rng.integers(-right_max, right_max + 1, (19, 90)).astype(np.int16)
    if right_max > 10_000:
        right[0, :2] = -(2**15), 2**15 - 1
    shifts = np.full(19, shift, np.uint8)
    product = lowrank.Product(left, right, shifts, np.float32(1))
    assert product.is_exact()
    out = np.empty((70, 90), np.float32)
    lowrank.multiply(product, out)
    exact = left.astype(np.int64) @ (right.astype(np.int64) << shift)
    assert out.tobytes() == exact.astype(np.float64).astype(np.float32).tobytes()


@pytest.mark.parametrize("seed", range(6))
def test_groups_take_the_fewest_bits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spreads = np.sort(rng.choice([1, 2, 3, 8, 20, 60, 200, 900], 6))
    counts = np.zeros((6, 2, 256), np.int64)
    for index, spread in enumerate(spreads):
        words = np.minimum(np.abs(rng.normal(size=rng.integers(50, 4000)) * spread), 65_535).astype(np.int64)
        counts[index, 0] = np.bincount(words & 255, minlength=256)
        counts[index, 1] = np.bincount(words >> 8, minlength=256)

    def bits(starts: tuple[int, ...]) -> float:
        parts = np.split(counts, starts)
        both = [part.sum(axis=0) for part in parts]
        return float(
            sum(lowrank_payload.bits_of_groups(each.reshape(1, -1), each.sum(axis=1)[None])[0] for each in both)
        )

    ways = [starts for many in range(6) for starts in combinations(range(1, 6), many)]
    chosen = tuple(sorted(set(lowrank_payload.partition(counts)) - {0}))
    assert bits(chosen) == pytest.approx(min(bits(starts) for starts in ways), rel=1e-12)


def test_vectors_of_every_spread_come_back() -> None:
    rng = np.random.default_rng(9)
    # From all zero to the largest words: more octaves than there are classes.
    sizes = np.array([0, *2.0 ** np.arange(14)])
    left = (rng.normal(size=(50, 15)) * sizes).clip(-(2**15), 2**15 - 1).astype(np.int16)
    right = (rng.normal(size=(15, 20)) * sizes[::-1, None]).clip(-(2**15), 2**15 - 1).astype(np.int16)
    product = lowrank.Product(left, right, np.zeros(15, np.uint8), np.float32(0.5))
    found = lowrank_payload.unpack(memoryview(lowrank_payload.pack(product)), 50, 20)
    assert np.array_equal(found.left, left)
    assert np.array_equal(found.right, right)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("number", "fits"), [(32_767.4, True), (-32_767.4, True), (32_767.6, False), (np.nan, False)])
def test_directions_out_of_range_make_no_product(side: str, number: float, fits: bool) -> None:
    left, right = np.full((5, 1), 0.25, np.float32), np.full((1, 6), 0.25, np.float32)
    {"left": left, "right": right}[side].flat[3] = number
    found = lowrank.product_of(left, np.ones(1), right, 1.0)
    assert (found is not None) is fits
    if found is not None:
        assert {"left": found.left, "right": found.right}[side].flat[3] == np.rint(number)
