"""A checkpoint's tree against a live state: what goes where, and everything that forbids it, before a byte is written.

Invariants:
- Matching changes nothing. Only the steps it returns write, and they are run when every byte is in place.
- Every live tensor has the library, dtype and shape of the checkpoint's, may be written, and shares memory
  with another one only as the checkpoint's do.
- A container that stands at two places of the live state is written at the first; the other gets a copy, unless
  the checkpoint has the same there.
- A list or tuple of plain values only is itself a plain value: it is replaced whole, whatever its length.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckstore.capture import has_state_dict
from ckstore.errors import UsageError
from ckstore.leaves import share_bytes
from ckstore.tensor import LeafAdapter, TensorLeaf, TensorSpec, byte_strides_of, overlaps_itself
from ckstore.tree import (
    DEPTH_MAX,
    DictNode,
    Key,
    ListNode,
    Node,
    Path,
    Selection,
    TensorNode,
    TupleNode,
    items_of,
    place_of,
    tensors_of,
)
from ckstore.values import converter_for, encode_plain

_NAMED_MAX = 5
_DICTS = (dict, OrderedDict, Counter, defaultdict)

Make = Callable[[Node], object]
"""Builds a part of the checkpoint anew."""

Step = Callable[[Make], object]
"""Puts a part of the checkpoint into the live state and returns what stands there now."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A live tensor that is to be overwritten.

    Args:
        may_be_replaced: It was taken from an object that is no module: loading may give the object another one.
    """

    path: Path
    item: object
    leaf: TensorLeaf
    may_be_replaced: bool


@dataclass(frozen=True, slots=True)
class Match:
    """How a checkpoint goes into a live state.

    Args:
        step: Run last; returns the whole state.
        targets: The live tensors of each of the checkpoint's tensors.
        created: Tensors that are made anew, because some place in the live state has none.
        warnings: Filled while the step runs.
    """

    step: Step
    targets: dict[int, list[Target]]
    created: set[int]
    warnings: list[str]


def match_state(
    tree: Node,
    tensors: Sequence[TensorSpec],
    state: object,
    adapters: Sequence[LeafAdapter],
    selection: Selection | None,
) -> Match:
    """Find the place of every leaf of the tree in the live state.

    Args:
        tree: The checkpoint's tree, only with what was chosen.
        tensors: The checkpoint's tensors.
        state: The live state; nothing in it is changed.
        adapters: Libraries of tensors.
        selection: What was chosen of the tree; None: all.

    Raises:
        UsageError: The state has other leaves, shapes, dtypes or ties than the checkpoint.
    """
    matching = _Matching(tensors, adapters, selection)
    step = matching.match(tree, state, ())
    matching.check_ties()
    matching.complain()
    return Match(step, matching.targets, matching.created, matching.warnings)


class _Matching:
    """One walk over a tree and a live state, side by side."""

    def __init__(
        self, tensors: Sequence[TensorSpec], adapters: Sequence[LeafAdapter], selection: Selection | None
    ) -> None:
        self.tensors = tensors
        self.adapters = adapters
        self.selection = selection
        self.targets: dict[int, list[Target]] = {}
        self.created: set[int] = set()
        self.warnings: list[str] = []
        self.extras: list[Path] = []
        self.problems: list[tuple[Path, str]] = []
        self._replaced: set[Target] = set()
        self._is_replaceable = False
        # The containers are kept beside the numbers: an id means nothing once its object is gone.
        self._containers: dict[int, tuple[object, Node]] = {}

    def match(self, node: Node, target: Any, path: Path) -> Step:
        """Match one node with what stands at its place."""
        if has_state_dict(target) and converter_for(type(target)) is None and self._describe(target, path) is None:
            return self._object(node, target, path)
        if isinstance(node, DictNode):
            return self._dict(node, target, path)
        if isinstance(node, ListNode | TupleNode):
            return self._sequence(node, target, path)
        if isinstance(node, TensorNode) and self.tensors[node.tensor].library != "bytes":
            return self._tensor(node, target, path)
        if not self._is_plain(target) or (isinstance(target, dict) and target):
            self._differ(path, "a plain value", target)
        return self._create(node)

    def _create(self, node: Node) -> Step:
        self.created.update(tensors_of(node))
        return lambda make: make(node)

    def _differ(self, path: Path, what: str, target: object) -> None:
        self.problems.append((path, f"{what} in the checkpoint, {type(target).__qualname__} in the state"))

    def _object(self, node: Node, target: Any, path: Path) -> Step:
        inner = target.state_dict()
        is_module = callable(getattr(target, "named_parameters", None))
        if is_module and isinstance(node, DictNode) and isinstance(inner, Mapping):
            # A module takes no tensors that it does not know; say so before anything is written.
            unknown = [(*path, key) for key in node.keys if key not in inner]
            self.problems.extend((place, "in the checkpoint, unknown to the module") for place in unknown)
        outer, self._is_replaceable = self._is_replaceable, not is_module
        step = self.match(node, inner, path)
        self._is_replaceable = outer

        def load(make: Make) -> object:
            loaded = step(make)
            target.load_state_dict(loaded)
            if not is_module:
                changed = list(self._changed(loaded, target.state_dict(), path))
                self.warnings.extend(
                    f"load_state_dict of {type(target).__qualname__} changed {place_of(place)} {how}."
                    for place, how in changed
                )
            return target

        return load

    def _changed(self, loaded: object, now: object, path: Path) -> Iterator[tuple[Path, str]]:
        if isinstance(loaded, dict) and isinstance(now, dict):
            for key in loaded:
                if key in now:
                    yield from self._changed(loaded[key], now[key], (*path, key))
        elif isinstance(loaded, list | tuple) and isinstance(now, list | tuple):
            for index, (before, after) in enumerate(zip(loaded, now, strict=False)):
                yield from self._changed(before, after, (*path, index))
        else:
            before_leaf, after_leaf = self._describe(loaded, path), self._describe(now, path)
            if before_leaf and after_leaf and before_leaf.dtype != after_leaf.dtype:
                yield path, f"from {before_leaf.dtype} to {after_leaf.dtype}"

    def _dict(self, node: DictNode, target: Any, path: Path) -> Step:
        if target is None:
            return self._create(node)
        if type(target) not in _DICTS:
            self._differ(path, f"a {node.kind}", target)
            return self._create(node)
        held = self._writable(target, node)
        # Keys are typed: to Python 1, 1.0 and True are one key, to a checkpoint they are not.
        rest = {(type(key), key): value for key, value in target.items()}
        steps: list[tuple[Key, Step]] = []
        for key, child in items_of(node):
            if (type(key), key) in rest:
                steps.append((key, self.match(child, rest.pop((type(key), key)), (*path, key))))
            else:
                steps.append((key, self._create(child)))
        for (_, key), value in rest.items():
            self._extra(value, (*path, key), 0)
        metadata = node.metadata
        if metadata is not None:
            self.created.update(tensors_of(metadata))

        def fill(make: Make) -> object:
            for key, step in steps:
                held[key] = step(make)
            if metadata is not None and isinstance(held, OrderedDict):
                held._metadata = make(metadata)  # type: ignore[attr-defined]
            return held

        return fill

    def _sequence(self, node: ListNode | TupleNode, target: Any, path: Path) -> Step:
        if target is None:
            return self._create(node)
        kind = list if isinstance(node, ListNode) else tuple
        holds_tensors = any(self.tensors[index].library != "bytes" for index in tensors_of(node))
        if not holds_tensors and isinstance(target, list | tuple) and self._is_plain(target):
            create, replaced = self._create(node), self._writable(target, node)
            return lambda make: _renew(replaced, create(make))
        if type(target) is not kind:
            self._differ(path, f"a {kind.__name__}", target)
            return self._create(node)
        for index in range(len(node.children), len(target)):
            self._extra(target[index], (*path, index), 0)
        held = self._writable(target, node)
        steps = [
            self.match(child, target[index], (*path, index)) if index < len(target) else self._create(child)
            for index, child in enumerate(node.children)
        ]
        return lambda make: _renew(held, kind(step(make) for step in steps))

    def _writable(self, target: Any, node: Node) -> Any:
        first, its_node = self._containers.setdefault(id(target), (target, node))
        return first if its_node is node or its_node == node else copy.copy(target)

    def _extra(self, item: Any, path: Path, depth: int) -> None:
        """Note the leaves of a part of the state that the checkpoint lacks."""
        if isinstance(item, dict | list | tuple) and depth < DEPTH_MAX:
            pairs = item.items() if isinstance(item, dict) else enumerate(item)
            for key, value in pairs:
                self._extra(value, (*path, key), depth + 1)
        elif self.selection is None or self.selection.covers(path):
            self.extras.append(path)

    def _tensor(self, node: TensorNode, target: object, path: Path) -> Step:
        spec = self.tensors[node.tensor]
        leaf = self._describe(target, path)
        if leaf is None:
            if not self._is_plain(target) or isinstance(target, dict | list | tuple):
                self._differ(path, "a tensor", target)
            return self._create(node)
        if (leaf.library, leaf.dtype, leaf.shape) != (spec.library, spec.dtype, spec.shape):
            here = f"{leaf.library} {leaf.dtype} {leaf.shape}"
            there = f"{spec.library} {spec.dtype} {spec.shape}"
            self.problems.append((path, f"{there} in the checkpoint, {here} in the state"))
        elif not leaf.is_writable:
            self.problems.append((path, "read-only or a lazy conjugate in the state"))
        elif _cannot_be_filled(spec, leaf):
            self.problems.append((path, "a tensor in the state whose elements share memory"))
        place = Target(path, target, leaf, self._is_replaceable)
        self.targets.setdefault(node.tensor, []).append(place)
        return lambda make: make(node) if place in self._replaced else target

    def _describe(self, item: object, path: Path) -> TensorLeaf | None:
        for adapter in self.adapters:
            leaf = adapter.describe(item, path)
            if leaf is not None and leaf.library != "bytes":
                return leaf
        return None

    def _is_plain(self, item: object) -> bool:
        if isinstance(item, list | tuple) and type(item) in (list, tuple):
            return all(self._is_plain(part) for part in item)
        if type(item) in _DICTS:
            assert isinstance(item, dict)
            return all(self._is_plain(part) for part in item.values())
        if encode_plain(item) is not None or converter_for(type(item)) is not None:
            return True
        return any(adapter.encode_value(item, ()) is not None for adapter in self.adapters)

    def check_ties(self) -> None:
        """Note live tensors that share memory although the checkpoint's tensors do not, or do otherwise."""
        live = [(index, target) for index, targets in self.targets.items() for target in targets]
        live = [pair for pair in live if pair[1].leaf.memory.nbytes]
        live.sort(key=lambda pair: (pair[1].leaf.memory.space, pair[1].leaf.memory.start))
        running: list[tuple[int, Target]] = []
        for index, target in live:
            memory = target.leaf.memory
            running = [
                pair
                for pair in running
                if pair[1].leaf.memory.space == memory.space
                and pair[1].leaf.memory.start + pair[1].leaf.memory.nbytes > memory.start
            ]
            foreign = [
                other for number, other in running if not self._is_tied_alike(index, target.leaf, number, other.leaf)
            ]
            if not foreign:
                running.append((index, target))
            elif target.may_be_replaced:
                self.targets[index].remove(target)
                self._replaced.add(target)
                self.created.add(index)
            else:
                told = f"shares memory with {place_of(foreign[0].path)} only in the state"
                self.problems.append((target.path, told))

    def _is_tied_alike(self, index: int, leaf: TensorLeaf, other_index: int, other: TensorLeaf) -> bool:
        spec, other_spec = self.tensors[index], self.tensors[other_index]
        if spec.storage == other_spec.storage:
            is_same_view = (spec.offset, spec.shape, spec.strides) == (
                other_spec.offset,
                other_spec.shape,
                other_spec.strides,
            ) and (leaf.origin, leaf.strides) == (other.origin, other.strides)
            is_same_layout = (
                leaf.origin - spec.offset == other.origin - other_spec.offset
                and leaf.strides == spec.strides
                and other.strides == other_spec.strides
            )
            if is_same_view or is_same_layout:
                return True
        return not share_bytes(leaf, other)

    def complain(self) -> None:
        """Raise what was noted.

        Raises:
            UsageError: Something was.
        """
        if self.extras:
            raise UsageError(
                f"the state has {len(self.extras)} leaves that the checkpoint lacks",
                where=_listed([place_of(path) for path in self.extras]),
                todo="take them out of the state, or choose with only=",
                paths=tuple(self.extras),
            )
        if self.problems:
            raise UsageError(
                f"{len(self.problems)} leaves of the state do not fit the checkpoint",
                where=_listed([f"{place_of(path)} is {why}" for path, why in self.problems]),
                todo="restore without into=, or into a state of the same structure, shapes and dtypes",
                paths=tuple(path for path, _ in self.problems),
            )


def _cannot_be_filled(spec: TensorSpec, leaf: TensorLeaf) -> bool:
    steps = leaf.byte_strides
    is_alike = steps == byte_strides_of(spec.library, spec.strides, leaf.itemsize)
    return overlaps_itself(leaf.shape, steps, leaf.itemsize, is_expanded_ok=is_alike)


def _renew(target: object, items: object) -> object:
    if isinstance(target, list) and isinstance(items, list):
        target[:] = items
        return target
    return items


def _listed(places: list[str]) -> str:
    named = ", ".join(places[:_NAMED_MAX])
    return named if len(places) <= _NAMED_MAX else f"{named} and {len(places) - _NAMED_MAX} more"
