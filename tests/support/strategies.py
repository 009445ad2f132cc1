"""Hypothesis: arrays, tensors, states and histories of calls.

Small on purpose: what breaks a store is shape, aliasing and order, not size. Needs hypothesis, and torch only
for ``torch_leaves``.
"""

from __future__ import annotations

import importlib
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
from hypothesis import strategies as st

NUMPY_DTYPES = ("f4", "f8", "f2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16", "?")
"""Types of elements that states are drawn from."""

TORCH_DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
)

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def numpy_leaves(draw: st.DrawFn) -> Any:
    """Draw an array: any dtype and small shape, sometimes strided, transposed or a 0-d one."""
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(shapes)
    count = int(np.prod(shape, dtype=int)) * 2
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    plain = np.frombuffer(raw, np.uint8).copy()
    # Other bytes than 0 and 1 are no booleans.
    flat = (plain & 1).view(dtype) if dtype.kind == "b" else plain.view(dtype)
    kind = draw(st.sampled_from(["plain", "every second", "transposed", "reversed"]))
    if kind == "every second":
        return flat[::2].reshape(shape)
    array = flat[: count // 2].reshape(shape)
    if kind == "transposed":
        return array.T
    return array[::-1] if kind == "reversed" and shape else array


@st.composite
def torch_leaves(draw: st.DrawFn) -> Any:
    """Draw a tensor: any dtype and small shape, sometimes a view or a parameter."""
    torch = importlib.import_module("torch")
    dtype = getattr(torch, draw(st.sampled_from(TORCH_DTYPES)))
    shape = draw(shapes)
    count = int(np.prod(shape, dtype=int)) * 2
    values = draw(st.lists(st.integers(0, 255), min_size=count, max_size=count))
    flat = torch.tensor(values, dtype=torch.int64).to(dtype)
    kind = draw(st.sampled_from(["plain", "every second", "transposed", "parameter"]))
    if kind == "every second":
        return flat[::2].reshape(shape)
    tensor = flat[: count // 2].reshape(shape)
    if kind == "transposed" and len(shape) >= 2:
        return tensor.transpose(0, 1)
    if kind == "parameter" and (dtype.is_floating_point or dtype.is_complex):
        return torch.nn.Parameter(tensor)
    return tensor


plain_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**100), 2**100),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.binary(max_size=16),
    st.sampled_from([np.float32(1.5), np.int64(-3), np.float64("nan"), np.bool_(True)]),
)
"""Every plain value a state may hold."""

keys = st.one_of(st.text("ab.0", max_size=4), st.integers(-2, 12))


def states(leaves: st.SearchStrategy[Any] | None = None, *, leaves_max: int = 12) -> st.SearchStrategy[Any]:
    """Return a strategy for states: dicts around nested dicts, lists and tuples."""
    leaf = leaves if leaves is not None else st.one_of(plain_leaves, numpy_leaves())
    nested = st.recursive(leaf, _containers, max_leaves=leaves_max)
    return st.dictionaries(keys, nested, max_size=4)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.text("ab", max_size=2), st.integers(0, 9), max_size=3).map(Counter),
    )


def histories(*, length_max: int = 6) -> st.SearchStrategy[list[tuple[int, Any]]]:
    """Return a strategy for commits in order: steps, some twice, and states that share leaves with the one before."""

    @st.composite
    def draw_history(draw: st.DrawFn) -> list[tuple[int, Any]]:
        steps = draw(st.lists(st.integers(0, 9), min_size=1, max_size=length_max))
        state: dict[Any, Any] = draw(states())
        history = []
        for step in steps:
            changes = draw(states(leaves_max=3))
            state = {**state, **changes}
            history.append((step, dict(state)))
        return history

    return draw_history()
