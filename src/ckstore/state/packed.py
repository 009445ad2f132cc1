"""Long plain values as chunks: a sampler's order, a log, a vocabulary would make every manifest long, and slow.

Three forms, by what a value is:

==============================  =================================================================================
name                            child
==============================  =================================================================================
``ckstore:count[:tuple]``       a tuple of two ints: the value is every int from the first up to before the second
``ckstore:numbers[:tuple]``     an array of one dimension of ``<i8``, ``<f8`` or ``|b1``: its elements
``ckstore:plain``               bytes: the tree of the value, as a manifest has it, without tensors
==============================  =================================================================================

Invariants:
- What is unpacked equals what was packed, bit for bit and type by type.
- A short content never becomes much memory: counted ints are bounded, and everything else is as long as its chunks.
"""

from __future__ import annotations

from operator import ne
from typing import Any

import numpy as np

from ckstore.errors import MalformedError
from ckstore.format.tree import DEPTH_MAX, KEY_INT_MAX, KEY_INT_MIN, PACKED_NUMBERS, PACKED_PLAIN

NUMBERS_MIN = 1024
"""A list or tuple of numbers from this length on is stored as an array."""

PLAIN_MIN = 8192
"""A container of this many plain values, other than numbers, is stored as bytes."""

COUNT_MAX = 1 << 16
"""Ints that are stored as a count; the parameters of an optimizer are numbered so, and readers want to see these."""

_SPELLED_MAX = 10_000_000
"""Most values of which ``spelled`` makes a text."""

_SPELLED = frozenset((type(None), bool, int, float, complex, str, bytes, list, tuple, dict))

(COUNT, NUMBERS), PLAIN = PACKED_NUMBERS, PACKED_PLAIN
_TUPLE = ":tuple"
_DTYPES = {int: "<i8", float: "<f8", bool: "|b1"}
_KINDS = {list: "", tuple: _TUPLE}
NAMES = frozenset((PLAIN, *(name + kind for name in (COUNT, NUMBERS) for kind in _KINDS.values())))


def pack_numbers(items: list[Any] | tuple[Any, ...], *, only_counts: bool) -> tuple[str, Any] | None:
    """Return name and child of a list or tuple of numbers; None: it is short, or something else.

    Args:
        items: What is to be packed.
        only_counts: Pack only what whoever looks at a tree can read there.
    """
    if len(items) < NUMBERS_MIN:
        return None
    kinds = set(map(type, items))
    dtype = _DTYPES.get(kinds.pop()) if len(kinds) == 1 else None
    if dtype is None:
        return None
    kind = _KINDS[type(items)]
    if dtype == "<i8":
        first, end = items[0], items[0] + len(items)
        if not all(KEY_INT_MIN <= bound <= KEY_INT_MAX for bound in (min(items), max(items))):
            return None
        if len(items) <= COUNT_MAX and end <= KEY_INT_MAX and all(map(int.__eq__, items, range(first, end))):
            return COUNT + kind, (first, end)
    return None if only_counts else (NUMBERS + kind, np.array(items, dtype))


def unpack(name: str, child: Any) -> Any:
    """Return the list or tuple that was packed; ``PLAIN`` is for whoever builds trees.

    Raises:
        MalformedError: The child is none that ``pack_numbers`` returns.
    """
    stem = name.removesuffix(_TUPLE)
    kind = tuple if name.endswith(_TUPLE) else list
    if stem == COUNT and type(child) is tuple and [type(each) for each in child] == [int, int]:
        first, end = child
        if NUMBERS_MIN <= end - first <= COUNT_MAX:
            return kind(range(first, end))
    if stem == NUMBERS and isinstance(child, np.ndarray) and child.ndim == 1 and child.dtype.str in _DTYPES.values():
        return kind(child.tolist())
    raise MalformedError("a list of numbers is not what its name says", where=repr(name[:80]))


def spelled(value: object) -> str | None:
    """Return a text that no other value has, nor an equal one of another type; None: there is no such text.

    This is many times faster than to build a tree.
    """
    level: list[Any] = [value]
    for _ in range(DEPTH_MAX):
        if not level:
            try:
                return repr(value)
            except ValueError:
                # Python refuses to write very long integers in decimal.
                return None
        kinds = set(map(type, level))
        # Objects of other types spell themselves as they like, and all NaNs alike.
        if not kinds <= _SPELLED or (kinds & {float, complex} and any(map(ne, level, level))):
            return None
        inner: list[Any] = []
        for each in level if kinds & {list, tuple, dict} else ():
            if type(each) in (list, tuple, dict):
                inner += each
                if type(each) is dict:
                    inner += each.values()
            if len(inner) > _SPELLED_MAX:
                return None
        level = inner
    return None
