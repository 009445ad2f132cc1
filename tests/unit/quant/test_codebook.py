"""Protects what symbols stand for: clusters that are near the best, means that are means, and streams that pay."""

from __future__ import annotations

import numpy as np
import pytest

from ckstore.quant import contexts
from ckstore.quant.codebook import Occurring, clusters_of, conditional_means
from ckstore.quant.geometry import Grid


def assigned(values: np.ndarray, count: int, threshold: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    clusters = clusters_of(values.astype(np.float32), threshold, count)
    symbols = np.searchsorted(clusters.bounds, values.astype(np.float32), side="right")
    return symbols, clusters.codebook[symbols]


def test_clusters_of_a_normal_distribution_are_near_the_best() -> None:
    values = np.random.default_rng(1).standard_normal(100_000)
    for count, best in ((4, 0.1175), (8, 0.0345), (16, 0.0095)):
        _, made = assigned(values, count)
        # Lloyd's own figures for this distribution; the symbol of zero takes nothing away.
        assert ((made - values) ** 2).mean() == pytest.approx(best, rel=0.08)


def test_clusters_prune_within_the_threshold_and_nowhere_else() -> None:
    values = np.random.default_rng(2).standard_normal(10_000).astype(np.float32)
    for threshold in (0.0, 0.5, np.float32(values[17])):
        symbols, made = assigned(values, 15, abs(float(threshold)))
        assert ((made == 0) == (np.abs(values) <= abs(threshold))).all()
        assert np.unique(symbols).size <= 16


@pytest.mark.parametrize(
    "values", [[], [0.0], [1.0], [-1.0, 2.0], [3.0] * 10, [-3e38, 3e38], [1e-45, -1e-45, 0.0], [5.0, 5.0, -1.0]]
)
def test_few_values_are_their_own_clusters(values: list[float]) -> None:
    given = np.array(values, np.float32)
    _, made = assigned(given, 15)
    assert made.tolist() == pytest.approx(given.tolist(), rel=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_values_on_one_side_take_all_clusters(sign: int) -> None:
    values = sign * np.random.default_rng(3).lognormal(0, 2, 10_000)
    symbols, made = assigned(values, 15)
    assert np.unique(symbols).size == 15
    assert (np.sign(made) == sign).all()


def test_means_are_of_what_has_the_symbol_and_zero_is_zero() -> None:
    totals = np.zeros(512)
    totals[[127, 128, 129]] = [2, 10, 4]
    totals[[256 + 127, 256 + 128, 256 + 129]] = [-5.0, 3.0, 6.0]
    table = conditional_means(totals, zero=128)
    assert table[[127, 128, 129]].tolist() == [-2.5, 0.0, 1.5]
    assert conditional_means(totals, zero=None)[128] == np.float32(0.3)
    assert np.count_nonzero(table) == 2
    assert Occurring.of(totals[:256]) == Occurring(127, 3)


def test_alike_rows_and_columns_have_one_stream_and_unlike_ones_more() -> None:
    rng = np.random.default_rng(4)
    grid = Grid(512 * 256, 256, 0)
    for octaves, more in ((0.0, False), (1.0, True)):
        spread = np.exp2(rng.normal(0, octaves, (512, 1)) + rng.normal(0, octaves, (1, 256)))
        values = rng.standard_normal((512, 256)) * spread
        squares = values**2
        rows, cols = contexts.classes_of(squares.sum(axis=1), squares.sum(axis=0), grid, has_row_scales=False)
        symbols = (128 + np.clip(np.rint(values), -99, 99)).astype(np.int64)
        counts = np.zeros((31, 256), np.uint32)
        np.add.at(counts, ((rows[:, None] + cols[None]).reshape(-1), symbols.reshape(-1)), 1)
        found = contexts.contexts_of(rows, cols, counts.reshape(-1))
        assert (found.stream_count > 1) is more
        assert (np.diff(found.stream_of.astype(int)) >= 0).all()
        assert found.stream_of.max() == found.stream_count - 1


def test_rows_that_never_change_are_of_the_lowest_class() -> None:
    sums = np.array([0.0, 1.0, 4.0])
    grid = Grid(48, 16, 0)
    rows, cols = contexts.classes_of(sums, np.full(16, 5.0 / 16), grid, has_row_scales=False)
    assert rows[0] == 0
    assert rows[2] - rows[1] == 4
    assert (cols == 8).all()
    nothing, _ = contexts.classes_of(np.zeros(3), np.zeros(16), grid, has_row_scales=False)
    assert (nothing == nothing[0]).all()
    same, _ = contexts.classes_of(sums, np.full(16, 5.0 / 16), grid, has_row_scales=True)
    assert (same == 8).all()
