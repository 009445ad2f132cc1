"""Protects diff: "equal" means equal bits, and the numbers describe the tensors."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

import ckstore
from ckstore.config import MIB
from ckstore.errors import NotFoundError
from ckstore.io.memory import MemoryBackend
from ckstore.quant.error_stats import distance_of, floats_of, is_finite

DTYPES = ["f2", "f4", "f8", "i1", "i4", "i8", "u2", "c8", "?"]


def diff(one, other, **options):
    """Return the difference of two states after committing both."""
    with ckstore.open(MemoryBackend()) as store:
        store.commit(one, 1)
        store.commit(other, 2)
        return store.diff(1, 2, **options)


def rows(found):
    return {row.path: row for row in found.tensors}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 600_000])
def test_numbers_match_the_tensors(dtype, count):
    rng = np.random.default_rng(count)
    one = (rng.standard_normal(count) * 50).astype(dtype)
    other = one.copy()
    other[:: max(1, count // 7)] = (rng.standard_normal(len(other[:: max(1, count // 7)])) * 50).astype(dtype)
    row = rows(diff({"a": one}, {"a": other}))["a"]
    difference = np.abs(one.astype(np.complex128) - other.astype(np.complex128))
    assert row.elements == count
    if dtype == "c8":
        return
    assert row.changed_count == np.count_nonzero(one != other)
    assert math.isclose(row.max_abs, difference.max(), rel_tol=1e-9)
    assert math.isclose(row.rms, math.sqrt(np.mean(difference**2)), rel_tol=1e-9)
    whole = np.sqrt(np.mean(np.abs(one.astype(np.complex128)) ** 2))
    assert whole == 0 or math.isclose(row.relative, row.rms / whole, rel_tol=1e-9)


def test_every_kind_of_change_is_reported():
    one = {
        "same": np.arange(5.0),
        "moved": np.zeros(5, np.float32),
        "gone": np.ones(3),
        "reshaped": np.ones((2, 3)),
        "retyped": np.ones(4, np.float32),
        "value": 3,
        "text": "a",
        "now a tensor": 1.5,
    }
    other = {
        "same": np.arange(5.0),
        "moved": np.full(5, 2.0, np.float32),
        "new": np.ones(9),
        "reshaped": np.ones((3, 2)),
        "retyped": np.ones(4),
        "value": 4,
        "text": "a",
        "now a tensor": np.ones(2),
    }
    found = diff(one, other)
    reported = {path: row.status for path, row in rows(found).items()}
    assert reported == {
        "same": "equal",
        "moved": "changed",
        "gone": "removed",
        "reshaped": "other kind",
        "retyped": "other kind",
        "new": "added",
        "now a tensor": "other kind",
    }
    assert rows(found)["retyped"].dtype == "<f4 -> <f8"
    assert rows(found)["moved"].relative == math.inf
    assert rows(found)["moved"].max_abs == 2.0
    assert [(value.path, value.status, value.before, value.after) for value in found.values] == [
        ("value", "changed", "3", "4")
    ]
    assert not found.is_equal


def test_equal_numbers_with_other_bits_differ():
    one = np.array([0.0, np.nan, np.inf, 1.0], np.float32)
    other = np.array([-0.0, np.nan, np.inf, 1.0], np.float32)
    row = rows(diff({"a": one}, {"a": other}))["a"]
    assert (row.status, row.changed_count, row.max_abs) == ("changed", 1, 0.0)
    row = rows(diff({"a": one}, {"a": np.array([0.0, 1.0, np.inf, 1.0], np.float32)}))["a"]
    assert (row.changed_count, row.max_abs) == (1, math.inf)
    same = rows(diff({"a": one, "b": 1}, {"a": one.copy(), "b": 2}))["a"]
    assert same.status == "equal"


def test_nan_is_compared_by_bits():
    kind = np.dtype([("a", "<i4"), ("b", "<f2")])
    one = np.zeros(40, kind)
    other = one.copy()
    other["b"][3] = 1
    row = rows(diff({"r": one, "t": np.array(["ab", "c"])}, {"r": other, "t": np.array(["ab", "d"])}))["r"]
    assert (row.status, row.changed_count, row.elements, row.max_abs) == ("changed", 1, 40, None)


def test_views_and_strides_are_compared_by_elements():
    base = np.arange(60_000, dtype=np.float32).reshape(200, 300)
    turned = np.asfortranarray(base)
    found = rows(
        diff({"a": base, "b": base[:, ::2], "c": base[::-1]}, {"a": turned, "b": base[:, ::2], "c": base[::-1]})
    )
    assert {path: row.status for path, row in found.items()} == {"a": "equal", "b": "equal", "c": "equal"}
    shifted = rows(diff({"b": base[:, ::2].copy()}, {"b": base[:, 1::2]}))["b"]
    assert (shifted.changed_count, shifted.max_abs) == (30_000, 1.0)


def test_empty_and_scalar_tensors():
    state = {"empty": np.zeros((0, 3)), "scalar": np.array(4.0)}
    found = diff(state, {"empty": np.zeros((0, 3)), "scalar": np.array(5.0)})
    assert rows(found)["empty"].status == "equal"
    assert rows(found)["scalar"].relative == 0.25


def test_shared_chunks_are_not_read():
    state = {"large": np.random.default_rng(1).standard_normal(400_000), "small": np.arange(10.0)}
    found = diff(state, {**state, "small": np.arange(10.0) + 1})
    assert found.bytes_read == 2 * 80
    assert diff(state, state).is_equal
    assert diff(state, state).bytes_read == 0


def test_globs_select_and_must_match():
    one, other = {"a": np.zeros(3), "b": np.zeros(3)}, {"a": np.ones(3), "b": np.ones(3)}
    assert set(rows(diff(one, other, only="a"))) == {"a"}
    with pytest.raises(NotFoundError):
        diff(one, other, only="nothing*")


def test_diff_does_not_load_whole_states():
    rng = np.random.default_rng(2)
    state = {str(number): rng.standard_normal(3_000_000).astype(np.float32) for number in range(4)}
    with ckstore.open(MemoryBackend(), policy=ckstore.Policy(compression="none")) as store:
        store.commit(state, 1)
        for tensor in state.values():
            tensor += 1
        store.commit(state, 2)
        del state
        store.diff(1, 2, only="0")
        tracemalloc.start()
        try:
            found = store.diff(1, 2)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert found.bytes_read == 2 * 48_000_000
    assert peak < 40 * MIB


def test_progress_ends_at_the_total():
    reported = []
    diff(
        {"a": np.zeros(3000), "b": 1}, {"a": np.ones(3000), "c": np.ones(8)}, on_progress=lambda *p: reported.append(p)
    )
    assert reported[-1] == (24_064, 24_064)


def test_distances_add_up():
    rng = np.random.default_rng(4)
    one, other = rng.standard_normal(5000).astype(np.float32), rng.standard_normal(5000).astype(np.float32)
    whole = distance_of(one, other)
    parts = distance_of(one[:777], other[:777]) + distance_of(one[777:], other[777:])
    assert (parts.count, parts.changed_count, parts.max_abs) == (whole.count, whole.changed_count, whole.max_abs)
    assert math.isclose(parts.rms, whole.rms)
    assert whole.rms_value == pytest.approx(float(np.sqrt(np.mean(one.astype(np.float64) ** 2))))
    assert distance_of(one[:0], one[:0]).rms == 0


def test_two_byte_floats_are_compared():
    values = np.array([1.0, -2.5, np.inf, 1e-40], np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(floats_of(bf16.data.cast("B"), "bfloat16"), (bf16.astype(np.uint32) << 16).view(np.float32))
    half = np.array([1.0, 65504.0], np.float16)
    assert np.array_equal(floats_of(half.data.cast("B"), "float16"), half.astype(np.float32))
    assert not is_finite(values)
    assert is_finite(values[:2])
    assert is_finite(values[:0])


def test_torch_tensors_of_every_kind_are_compared(tmp_path):
    torch = pytest.importorskip("torch")
    one = {
        "bf16": torch.ones(5, dtype=torch.bfloat16),
        "fp8": torch.ones(5).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
    }
    other = {
        "bf16": torch.full((5,), 1.5, dtype=torch.bfloat16),
        "fp8": torch.full((5,), 2.0).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, True]),
        "turned": torch.arange(6.0).reshape(2, 3).t().contiguous(),
    }
    found = rows(diff(one, other))
    assert (found["bf16"].relative, found["bf16"].max_abs) == (0.5, 0.5)
    assert (found["fp8"].status, found["fp8"].relative) == ("changed", None)
    assert found["bool"].changed_count == 1
    assert found["turned"].status == "equal"
