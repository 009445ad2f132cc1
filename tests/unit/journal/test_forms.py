"""Protects the forms of gradients: every bit comes back, and the numbers behind a factor are found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.journal.forms import form_of, stored_count, write_gradient


def bf16(numbers):
    """Round to bf16, to the nearest, ties to even, with arithmetic that shares nothing with the code."""
    mantissas, exponents = np.frexp(numbers.astype(np.float64))
    return np.ldexp(np.rint(mantissas * 256), exponents - 8).astype(np.float32)


def fp16(numbers):
    return numbers.astype(np.float16).astype(np.float32)


def normal(count, seed=0, scale=1e-3):
    return (np.random.default_rng(seed).standard_normal(count) * scale).astype(np.float32)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def back(gradient, factors=()):
    form = form_of(gradient, factors)
    again = np.full_like(gradient, 7)
    write_gradient(form, again)
    assert same_bits(again, gradient)
    assert form.values.size == stored_count(form.rows, gradient.shape)
    return form


@pytest.mark.parametrize(("kind", "narrow"), [("bf16", bf16), ("fp16", fp16)])
def test_numbers_of_two_bytes_are_stored_as_such(kind, narrow):
    form = back(narrow(normal(5000, scale=1.0)).reshape(50, 100))
    assert (form.kind, form.factor, form.rows) == (kind, None, None)
    assert form.values.dtype == np.uint16


@pytest.mark.parametrize(("kind", "narrow"), [("bf16", bf16), ("fp16", fp16)])
@pytest.mark.parametrize("seed", range(40))
def test_a_factor_is_found_and_proved(kind, narrow, seed):
    factor = np.float32(10 ** np.random.default_rng(seed).uniform(-5, 3))
    form = back(narrow(normal(3000, seed, scale=1.0)) * factor)
    assert form.kind == kind
    assert float(form.factor / factor) == pytest.approx(2.0 ** round(np.log2(float(form.factor / factor))), rel=1e-6)


def test_a_given_factor_is_used_without_a_search(monkeypatch):
    factor = np.float32(0.66)
    gradient = bf16(normal(3000)) * factor
    monkeypatch.setattr("ckstore.journal.forms.factors_of", lambda *_: [])
    assert back(gradient).kind == "plain"
    assert back(gradient, [np.float32(0.5), factor]).factor == factor


def test_one_element_that_is_no_multiple_makes_all_plain():
    gradient = bf16(normal(100_000)) * np.float32(0.7)
    gradient[77_777] = np.nextafter(gradient[77_777], np.float32(1))
    assert back(gradient).kind == "plain"


def test_sums_of_micro_batches_are_plain():
    assert back(bf16(normal(5000, 1)) + bf16(normal(5000, 2, 3e-4))).kind == "plain"


def test_zero_rows_are_not_stored():
    gradient = np.zeros((1000, 64), np.float32)
    used = np.random.default_rng(0).choice(1000, 30, replace=False)
    gradient[used] = bf16(normal((30, 64))) * np.float32(0.9)
    form = back(gradient)
    assert (form.kind, form.values.size) == ("bf16", 30 * 64)


def test_negative_zeros_make_a_row_that_is_stored():
    gradient = np.zeros((100, 4), np.float32)
    gradient[7, 2] = -0.0
    assert back(gradient).values.size == 4


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (), (1,), (3, 1, 2)])
def test_any_shape_comes_back(shape):
    back(np.zeros(shape, np.float32))
    back(np.ones(shape, np.float32))


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.uint16, np.int64])
def test_other_dtypes_are_stored_as_they_are(dtype):
    form = back(np.arange(12).astype(dtype).reshape(3, 4))
    assert form.kind == "plain"


ODD = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x807FFFFF], np.uint32)
"""NaNs with and without payload, infinities, -0, subnormal numbers."""


def test_numbers_that_are_not_finite_keep_their_bits():
    for odd in ODD.view(np.float32):
        for gradient in (bf16(normal(500)), bf16(normal(500)) * np.float32(0.3), normal(500)):
            gradient[123] = odd
            back(gradient)
    back(np.tile(ODD.view(np.float32), 10))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=80), st.floats(2**-20, 2**20, width=32))
def test_any_bits_come_back(words, factor):
    numbers = np.array(words, np.uint32).view(np.float32)
    back(numbers, [np.float32(factor)])
    with np.errstate(all="ignore"):
        back((np.array(words, np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) * np.float32(factor))
