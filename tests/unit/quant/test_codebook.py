"""Protects codebooks: an entry is the mean of its symbol's values, and separate streams are used where they save."""

from __future__ import annotations

import numpy as np

from ckstore.quant import grid as contexts
from ckstore.quant.geometry import Grid
from ckstore.quant.grid import Occurring, conditional_means


def test_entries_are_means_and_zero_stays_zero() -> None:
    totals = np.zeros(512)
    totals[[127, 128, 129]] = [2, 10, 4]
    totals[[256 + 127, 256 + 128, 256 + 129]] = [-5.0, 3.0, 6.0]
    table = conditional_means(totals, zero=128)
    assert table[[127, 128, 129]].tolist() == [-2.5, 0.0, 1.5]
    assert conditional_means(totals, zero=None)[128] == np.float32(0.3)
    assert np.count_nonzero(table) == 2
    assert Occurring.of(totals[:256]) == Occurring(127, 3)


def test_only_differing_rows_get_more_streams() -> None:
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


def test_unchanged_rows_are_in_the_lowest_class() -> None:
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
