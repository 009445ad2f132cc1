"""Descriptions of live tensors that a restore may overwrite. Tensors of one layout are described together.

Invariants:
- The results equal those of describing each tensor alone.
- Nothing is changed, and only plain containers are searched for tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from ckstore.errors import LeafTypeError
from ckstore.format.tensors import TensorSpec, byte_strides_of, overlaps_itself
from ckstore.format.tree import Node, Path, TensorNode
from ckstore.state.tensors import LeafAdapter, TensorLeaf
from ckstore.state.values import converter_for

DICTS = (dict, OrderedDict, Counter, defaultdict)
"""Classes of mappings whose items are matched."""

_CONTAINERS = frozenset((*DICTS, list, tuple))

_MANY = 4
"""From this number of tensors on, describing them together is faster."""


_PART = 256
"""Tensors that are described in one call. If the call refuses one of them, the walk describes all of them."""


class LiveLayout(NamedTuple):
    """A live tensor, described together with others of the same layout.

    Args:
        layout: Description of the first tensor with this layout.
        shift: What must be added to the addresses in ``layout`` to get those of this tensor.
        keep: Objects that keep its memory alive.
    """

    layout: TensorLeaf
    shift: int
    keep: object


class LiveLayouts:
    """Descriptions of the tensors of one live state.

    Args:
        tensors: The checkpoint's tensors.
        adapters: Libraries of tensors.
    """

    def __init__(self, tensors: Sequence[TensorSpec], adapters: Sequence[LeafAdapter]) -> None:
        self._tensors = tensors
        self._adapters = adapters
        self._layouts: dict[int, LiveLayout] = {}
        """Layouts by the ids of live tensors, which ``_described`` keeps alive."""
        self._described: list[Sequence[object]] = []
        self._fitting: dict[tuple[object, ...], bool] = {}

    def describe_together(self, part: object) -> None:
        """Describe the tensors of a part of the live state together, which is faster than one after another.

        Tensors that are not described here, such as those that cannot be overwritten, are described by the walk.
        """
        by_kind: dict[type, list[object]] = {}
        pending, seen = [part], set()
        while pending:
            top = pending.pop()
            if type(top) not in _CONTAINERS:
                by_kind.setdefault(type(top), []).append(top)
            elif id(top) not in seen:
                seen.add(id(top))
                items: Any = top
                pending.extend(items.values() if isinstance(items, dict) else items)
        for each in by_kind.values():
            first = self.describe(each[0], ()) if len(each) >= _MANY else None
            if first is not None:
                adapter = next(adapter for adapter in self._adapters if adapter.library == first.library)
                # An adapter describes no tensors with Python attributes together.
                self._describe([item for item in each if not getattr(item, "__dict__", None)], adapter)

    def _describe(self, items: Sequence[object], adapter: LeafAdapter) -> None:
        firsts: dict[tuple[object, ...], tuple[TensorLeaf | None, int]] = {}
        self._described.append(items)
        # In parts, because the facts of a few tensors are freed before the collector of reference cycles searches them.
        for begin in range(0, len(items), _PART):
            part = items[begin : begin + _PART]
            try:
                batch = adapter.describe_many(part)
            except LeafTypeError:
                continue
            if batch is None:
                continue
            for item, facts, start, keep in zip(part, batch.facts, batch.starts, batch.keeps, strict=True):
                first = firsts.get(facts)
                if first is None:
                    first = firsts[facts] = self.describe(item, ()), start
                if first[0] is not None:
                    self._layouts[id(item)] = LiveLayout(first[0], start - first[1], keep)

    def fitting(self, node: Node, target: object) -> LiveLayout | None:
        """Return the layout of a live tensor that takes the checkpoint's bytes unchanged; None: it must be checked."""
        found = self._layouts.get(id(target))
        if found is None or not isinstance(node, TensorNode):
            return None
        spec, layout = self._tensors[node.tensor], found[0]
        # A model has few distinct layouts, each repeated by many tensors.
        key = (id(layout), spec.shape, spec.strides, spec.dtype, spec.library)
        does_fit = self._fitting.get(key)
        if does_fit is None:
            does_fit = self._fitting[key] = fits(spec, layout)
        return found if does_fit else None

    def layout_of(self, item: object, path: Path) -> TensorLeaf | None:
        """Return a description that is right except for the addresses; None: not a tensor that can be overwritten."""
        found = self._layouts.get(id(item))
        return self.describe(item, path) if found is None else found.layout

    def describe(self, item: object, path: Path) -> TensorLeaf | None:
        """Describe a tensor that can be overwritten; None: anything else."""
        try:
            return self.checked(item, path)
        except LeafTypeError:
            return None

    def checked(self, item: object, path: Path) -> TensorLeaf | None:
        """Describe a tensor; None: not a tensor.

        Raises:
            LeafTypeError: A tensor that cannot be overwritten.
        """
        if converter_for(type(item)) is not None:
            return None
        for adapter in self._adapters:
            leaf = adapter.describe(item, path)
            if leaf is not None and leaf.library != "bytes":
                return leaf
        return None


def fits(spec: TensorSpec, leaf: TensorLeaf) -> bool:
    """Say whether the bytes of a tensor of the checkpoint can be written into a live tensor unchanged."""
    return (
        (leaf.library, leaf.dtype, leaf.shape) == (spec.library, spec.dtype, spec.shape)
        and leaf.is_writable
        and not cannot_be_filled(spec, leaf)
    )


def cannot_be_filled(spec: TensorSpec, leaf: TensorLeaf) -> bool:
    """Say whether elements of a live tensor share memory, other than in the checkpoint."""
    steps = leaf.byte_strides
    is_alike = steps == byte_strides_of(spec.library, spec.strides, leaf.itemsize)
    return overlaps_itself(leaf.shape, steps, leaf.itemsize, is_expanded_ok=is_alike)
