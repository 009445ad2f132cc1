"""Protects factors: they are the same integers on every machine, and close to the values they code."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ckstore.errors import MalformedError
from ckstore.quant import geometry
from ckstore.quant.geometry import Grid


@pytest.mark.parametrize(("octaves", "bits"), [(1, 4), (14, 4), (15, 3), (30, 3), (31, 2), (62, 2), (90, 2)])
def test_factors_use_the_finest_fitting_steps(octaves: float, bits: int) -> None:
    values = np.exp2(np.linspace(-octaves, 0, 1000)) * 3.7
    found = geometry.factors_of(values)
    assert found.octave_bits == bits
    reached = values > values.max() * 2.0 ** -((254 >> bits) - 1)
    octaves_off = np.abs(np.log2(found.values()[reached] / values[reached]))
    assert octaves_off.max() <= 0.501 / (1 << bits)
    assert (found.values() > 0).all()


def test_codes_match_the_table_of_powers() -> None:
    codes = np.arange(256, dtype=np.uint8)
    for bits, exponents in ((4, (-126, 0, 112)), (3, (-126, 96)), (2, (-126, 64))):
        for exponent in exponents:
            geometry.require_known(exponent, bits)
            found = geometry.Factors(codes, exponent, bits).values()
            assert found[0] == 0
            for code in range(1, 256):
                exact = math.ldexp(2.0 ** ((code - 1) % (1 << bits) / (1 << bits)), exponent + ((code - 1) >> bits))
                assert found[code] == np.float32(exact), (code, bits)
            assert (found[1:] >= np.finfo(np.float32).tiny).all()
            assert np.isfinite(found).all()
            assert (np.diff(found) > 0).all()


def test_zero_stays_zero_and_one_is_one() -> None:
    assert (geometry.ones(5).values() == 1).all()
    assert not geometry.factors_of(np.zeros(5)).values().any()
    found = geometry.factors_of(np.array([0.0, 1e-30, 1.0])).values()
    assert found[0] == 0
    assert found[2] == pytest.approx(1, rel=0.1)
    assert found[1] > 0
    assert (geometry.factors_of(np.array([2.0**-140, 2.0**-126])).values() >= 2.0**-126).all()


@pytest.mark.parametrize(("exponent", "bits"), [(-127, 4), (113, 4), (97, 3), (65, 2), (0, 1), (0, 5), (0, 0)])
def test_factors_that_are_not_normal_are_malformed(exponent: int, bits: int) -> None:
    with pytest.raises(MalformedError):
        geometry.require_known(exponent, bits)


@pytest.mark.parametrize(("count", "row", "phase"), [(1, 16, 0), (1, 16, 15), (100, 16, 5), (96, 16, 0), (7, 32, 30)])
def test_rows_and_columns_are_counted(count: int, row: int, phase: int) -> None:
    grid = Grid(count, row, phase)
    places = np.arange(phase, phase + count)
    assert grid.row_count == places[-1] // row + 1
    assert (grid.row_sizes() == np.bincount(places // row, minlength=grid.row_count)).all()
    assert (grid.col_sizes() == np.bincount(places % row, minlength=row)).all()
