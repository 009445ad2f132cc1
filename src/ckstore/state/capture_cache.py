"""Capture a state again, reusing the parts of the previous capture that have not changed.

A trainer commits the same structure many times, and waits while it is captured. So the previous capture is kept
without its tensors. The next walk compares each key, type and plain value with it, and each tensor's facts and
address. Plain values may change, and tensors that share their allocation with no other may move. After any other
change the whole state is captured again.

Invariants:
- The result always equals the result of ``capture``.
- No tensor is kept alive between two captures. The bytes of long plain values are, because making them is slow.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckstore.concurrency import collector_paused
from ckstore.format.tree import BUILT_IN, ConvertedNode, DictNode, ListNode, Node, TensorNode, TupleNode, ValueNode
from ckstore.state.capture import (
    FACTORY_NAMES,
    KINDS,
    LONG_NBYTES_MIN,
    Captured,
    StateDictCache,
    StateWalker,
    allocations_of,
    checked_value,
    convert_leaf,
    has_state_dict,
    loaded_adapters,
    state_dict_of,
)
from ckstore.state.markers import DECLARED
from ckstore.state.memory import Spans
from ckstore.state.named_types import has_class
from ckstore.state.numpy_adapter import BytesAdapter, NumpyAdapter
from ckstore.state.standard_types import COUNT, NUMBERS_MIN, PLAIN, exact_repr, pack_numbers
from ckstore.state.tensors import LeafAdapter, LeafBatch, TensorLeaf
from ckstore.state.values import (
    LONG_TEXT,
    Converter,
    converter_for,
    encode_plain,
    registered_converters,
)

_Group = tuple[LeafAdapter, Sequence[int]]

_TYPES: Mapping[str, type] = {name: kind for kind, name in KINDS.items()}
_KEY_TYPES = frozenset((str, int))
_CONTAINERS = frozenset((*KINDS, list, tuple))


class _ChangedError(Exception):
    """The state has another structure than in the previous capture."""


class CaptureCache:
    """Captures states; keeps the last capture for comparison."""

    def __init__(self) -> None:
        self._last: _CachedCapture | None = None

    def capture(self, state: object, adapters: Sequence[LeafAdapter] = ()) -> Captured:
        """Capture a state; same result as ``capture.capture``. What was captured already is returned as it is."""
        if isinstance(state, Captured):
            return state
        libraries = (NumpyAdapter(), *adapters)
        results = StateDictCache()
        last, self._last = self._last, None
        if last is not None and last.is_for(libraries):
            try:
                captured = _CachedWalker(last, libraries, results).captured(state)
            except Exception:
                # A complete capture raises the right error, or succeeds.
                captured = None
            if captured is not None:
                self._last = last
                return captured
        walk = StateWalker(libraries, results)
        captured = walk.captured(state)
        self._last = _CachedCapture.of(captured, walk)
        return captured

    def capture_for_commit(self, state: object, adapters: Sequence[LeafAdapter] | None = None) -> Captured:
        """Capture a state, and wait for device work that still computes it.

        The wait makes the values visible to all threads of the commit, whatever stream they use.

        Args:
            state: The state.
            adapters: Adapters of tensor libraries other than numpy; None: of every loaded one.

        Raises:
            LeafTypeError: A leaf cannot be stored.
        """
        captured = self.capture(state, loaded_adapters() if adapters is None else adapters)
        if not (isinstance(captured.storages, Spans) and captured.storages.are_host):
            from ckstore.state.torch_adapter import wait_for_devices

            wait_for_devices(captured.storages)
        return captured


@dataclass(frozen=True, slots=True)
class _StorageMembers:
    """A storage of the previous capture: its tensors, and the tensor whose reader reads it."""

    members: tuple[int, ...]
    reader: int


class _CachedCapture:
    """The previous capture without its tensors.

    Args:
        captured: The capture; the next walk follows its tree.
        walk: The walk that produced it.
        groups: Each adapter with the numbers of its tensors.
        batch: The fingerprints of all tensors.
    """

    def __init__(self, captured: Captured, walk: StateWalker, groups: Sequence[_Group], batch: LeafBatch) -> None:
        self.tree = captured.tree
        self.paths, self.tensors = captured.paths, captured.tensors
        self.warnings = tuple(captured.warnings)
        self.order: list[int] = []
        """Tensor numbers in the order of a walk, once for each path."""
        self.contents: dict[int, tuple[str, object]] = {}
        """The bytes of long plain values by tensor number, each with the ``exact_repr`` of the value."""
        self.only_tensors: dict[int, tuple[Node, ...]] = {}
        """Tuples of children that are all tensors, by id."""
        self._index(captured.tree)
        firsts: dict[int, int] = {}
        for place, number in enumerate(self.order):
            firsts.setdefault(number, place)
        # Usually each tensor has one path, and numbers follow the walk.
        is_plain = self.order == list(range(len(self.order)))
        self.firsts = [] if is_plain else [firsts[number] for number in range(len(firsts))]
        self.libraries = [adapter.library for adapter in walk.adapters]
        self.converters: Mapping[type[Any], Converter] = registered_converters()
        self.groups = groups
        # There are few distinct facts. Sharing them keeps the comparison in the CPU cache.
        unique: dict[object, tuple[object, ...]] = {}
        self.facts = [unique.setdefault(each, each) for each in batch.facts]
        self.starts = np.array(batch.starts, np.uint64)
        assert isinstance(captured.storages, Spans)
        self.shapes, self.span_starts = captured.storages.shapes, captured.storages.starts
        self.structure = captured.structure
        self.members = _members_of(captured, walk.leaves)
        # Usually each tensor has its own storage.
        self.is_simple = all(each == _StorageMembers((number,), number) for number, each in enumerate(self.members))
        # Tensors that are alone in their allocation. Empty tensors share nothing.
        alone = {group[0] for group in allocations_of(walk.leaves) if len(group) == 1}
        is_alone = [number in alone or not leaf.memory.nbytes for number, leaf in enumerate(walk.leaves)]
        self.is_alone = np.array(is_alone, np.bool_)
        self.storage_of = np.array([spec.storage for spec in captured.tensors], np.int64)
        spaces: dict[str, int] = {}
        self.spaces = np.array([spaces.setdefault(leaf.memory.space, len(spaces)) for leaf in walk.leaves], np.int64)
        lengths = [leaf.memory.owner_nbytes if leaf.memory.nbytes else 0 for leaf in walk.leaves]
        self.lengths = np.array(lengths, np.uint64)

    @classmethod
    def of(cls, captured: Captured, walk: StateWalker) -> _CachedCapture | None:
        """Return the cache entry of a capture; None if changes of the state could not be detected."""
        if walk.warnings:
            # Warnings concern attributes that are not in the tree, so changes of them would go unnoticed.
            return None
        groups = _groups_of(walk)
        batch = _fingerprints_of(groups, walk.items)
        return None if batch is None else cls(captured, walk, groups, batch)

    def _index(self, node: Node) -> None:
        """Record the tensors below a node, in the order in which ``_CachedWalker`` walks."""
        if isinstance(node, TensorNode):
            self.order.append(node.tensor)
        elif isinstance(node, ConvertedNode):
            self._index(node.child)
        elif isinstance(node, (DictNode, ListNode, TupleNode)):
            if all(isinstance(child, TensorNode) for child in node.children):
                self.only_tensors[id(node.children)] = node.children
            for child in node.children:
                self._index(child)
            if isinstance(node, DictNode) and node.metadata is not None:
                self._index(node.metadata)

    def is_for(self, libraries: Sequence[LeafAdapter]) -> bool:
        """Whether the adapters and converters are the same as in the previous capture."""
        return self.libraries == [adapter.library for adapter in libraries] and (
            self.converters == registered_converters()
        )

    def move(self, starts: NDArray[np.uint64]) -> None:
        """Update the addresses of all allocations.

        Raises:
            _ChangedError: A tensor moved that shares memory with another one, before or after the move.
        """
        is_moved = starts != self.starts
        if not is_moved.any():
            return
        if not self.is_alone[is_moved].all():
            raise _ChangedError
        shifted = self.span_starts.copy()
        shifted[self.storage_of[is_moved]] += starts[is_moved] - self.starts[is_moved]
        shifted.setflags(write=False)
        self.span_starts = shifted
        self.starts = starts
        if (_overlapping(self.spaces, starts, starts + self.lengths) & is_moved).any():
            raise _ChangedError

    def spans_of(self, batch: LeafBatch) -> Spans:
        """Return the storages for the tensors of this walk."""
        if self.is_simple:
            return Spans(self.shapes, self.span_starts, list(zip(batch.keeps, strict=True)), batch.readers)
        keeps = [tuple(batch.keeps[number] for number in each.members) for each in self.members]
        return Spans(self.shapes, self.span_starts, keeps, [batch.readers[each.reader] for each in self.members])


def _overlapping(spaces: NDArray[np.int64], begins: NDArray[np.uint64], ends: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Say for each range whether it overlaps another one in the same address space. Empty ranges overlap nothing."""
    found = np.zeros(len(begins), np.bool_)
    for space in np.unique(spaces):
        inside = np.flatnonzero((spaces == space) & (begins < ends))
        order = inside[np.argsort(begins[inside], kind="stable")]
        # A range begins before the end of an earlier one, or ends after the beginning of the next one.
        found[order[1:]] |= begins[order[1:]] < np.maximum.accumulate(ends[order])[:-1]
        found[order[:-1]] |= ends[order[:-1]] > begins[order[1:]]
    return found


def _members_of(captured: Captured, leaves: Sequence[TensorLeaf]) -> list[_StorageMembers]:
    numbers_of: list[list[int]] = [[] for _ in captured.storages]
    for number, spec in enumerate(captured.tensors):
        numbers_of[spec.storage].append(number)
    members = []
    for numbers in numbers_of:
        # The same choice as when the storage was created, so that its reader covers the same bytes.
        first = min(numbers, key=lambda number: (leaves[number].memory.start, leaves[number].memory.owner_start))
        members.append(_StorageMembers(tuple(numbers), first))
    return members


def _groups_of(walk: StateWalker) -> list[_Group]:
    """Return each adapter with the numbers of its tensors."""
    adapters = {adapter.library: adapter for adapter in (*walk.adapters, BytesAdapter())}
    numbers: dict[str, list[int]] = {}
    for number, leaf in enumerate(walk.leaves):
        numbers.setdefault(leaf.library, []).append(number)
    return [(adapters[library], own) for library, own in numbers.items()]


def _fingerprints_of(groups: Sequence[_Group], items: Sequence[object]) -> LeafBatch | None:
    """Return the fingerprints of all tensors in order; None if an adapter cannot give them."""
    if len(groups) == 1:
        return groups[0][0].describe_many(items)
    parts: list[list[Any]] = [[None] * len(items) for _ in LeafBatch._fields]
    for adapter, numbers in groups:
        batch = adapter.describe_many([items[number] for number in numbers])
        if batch is None:
            return None
        for part, found in zip(parts, batch, strict=True):
            for number, each in zip(numbers, found, strict=True):
                part[number] = each
    return LeafBatch(*parts)


class _CachedWalker:
    """One walk over a state along the tree of the previous capture.

    Args:
        last: The previous capture.
        libraries: Adapters of all tensor libraries.
        results: Records the results of ``state_dict`` calls.
    """

    def __init__(self, last: _CachedCapture, libraries: Sequence[LeafAdapter], results: StateDictCache) -> None:
        self._last = last
        self._libraries = libraries
        self._results = results
        self._found: list[object] = []
        """Objects at the paths of tensors, in the order of the walk."""

    def captured(self, state: object) -> Captured:
        """Capture the state.

        Raises:
            _ChangedError: Its structure has changed.
        """
        tree = self._node(state, self._last.tree)
        # From here on, no code of the user is called.
        with collector_paused():
            return self._captured(tree)

    def _captured(self, tree: Node) -> Captured:
        last = self._last
        # Each object must have the same number at all its paths, and no two objects may have the same number.
        numbers: dict[int, int] = {}
        if list(map(numbers.setdefault, map(id, self._found), last.order)) != last.order:
            raise _ChangedError
        if len(numbers) != len(last.starts) or len(self._found) != len(last.order):
            raise _ChangedError
        batch = _fingerprints_of(
            last.groups, [self._found[place] for place in last.firsts] if last.firsts else self._found
        )
        if batch is None or list(batch.facts) != last.facts:
            raise _ChangedError
        last.move(np.array(batch.starts, np.uint64))
        last.tree = tree
        return Captured(tree, last.paths, last.tensors, last.spans_of(batch), list(last.warnings), last.structure)

    def _node(self, item: Any, node: Node) -> Node:
        """Return the node of a part of the state: the previous node if it is unchanged."""
        form = type(node)
        if form is TensorNode:
            self._found.append(item)
            return node
        if form is ValueNode:
            return self._value(item, node)  # type: ignore[arg-type]
        if form is DictNode:
            return self._mapping(item, node)  # type: ignore[arg-type]
        if form is ConvertedNode:
            return self._converted(item, node)  # type: ignore[arg-type]
        return self._sequence(item, node)  # type: ignore[arg-type]

    def _children(self, items: Iterable[object], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the nodes of several parts: the previous tuple if all are unchanged."""
        found = self._found
        if self._last.only_tensors.get(id(nodes)) is nodes:
            before = len(found)
            found.extend(items)
            if len(found) != before + len(nodes):
                raise _ChangedError
            return nodes
        children: list[Node] = []
        # A strict zip raises ValueError if the number of items has changed.
        for item, node in zip(items, nodes, strict=True):
            form = type(node)
            if form is TensorNode:
                # Tensors are compared later, all together.
                found.append(item)
            elif form is DictNode:
                # Common: an optimizer state has one dict for each parameter.
                node = self._mapping(item, node)  # type: ignore[arg-type]
            elif form is ValueNode:
                node = self._value(item, node)  # type: ignore[arg-type]
            else:
                node = self._node(item, node)
            children.append(node)
        return nodes if all(map(is_, children, nodes)) else tuple(children)

    def _value(self, item: Any, node: ValueNode) -> Node:
        kind, name = type(item), node.type
        # Fast paths for the most common types, without creating a node.
        if kind is int:
            if name == "int" and node.value == item:
                return node
        elif kind is float:
            if name == "float" and node.value == struct.pack("<d", item):
                return node
        elif kind is str or kind is bytes:
            # Equal to a short value, so it is short.
            if name == kind.__name__ and node.value == item:
                return node
            if len(item) >= LONG_NBYTES_MIN:
                raise _ChangedError
        elif item is None and name == "none":
            return node
        found = encode_plain(item) or self._library_value(item)
        return node if found == node else found

    def _library_value(self, item: object) -> ValueNode:
        if converter_for(type(item)) is None:
            for adapter in self._libraries:
                if adapter.describe(item, ()) is not None:
                    break
                value = adapter.encode_value(item, ())
                if value is not None:
                    return checked_value(adapter, item, value, ())
        raise _ChangedError

    def _mapping(self, item: Any, node: DictNode) -> Node:
        kind = type(item)
        if kind is not _TYPES[node.kind]:
            return self._state_dict_node(item, node)
        keys = tuple(item)
        # For str and int, equal keys have equal types. Other types, such as True == 1, need a complete capture.
        if keys != node.keys or not _KEY_TYPES.issuperset(map(type, keys)):
            raise _ChangedError
        children = self._children(item.values(), node.children)
        if kind is dict:
            return node if children is node.children else DictNode(node.kind, node.keys, children)
        metadata = node.metadata
        if tuple(getattr(item, "__dict__", ())) != (() if metadata is None else ("_metadata",)):
            raise _ChangedError
        if metadata is not None:
            metadata = self._node(item._metadata, metadata)
        if kind is defaultdict and FACTORY_NAMES[item.default_factory] != node.factory:
            raise _ChangedError
        if metadata is node.metadata and children is node.children:
            return node
        return DictNode(node.kind, node.keys, children, metadata, node.factory)

    def _sequence(self, item: Any, node: ListNode | TupleNode) -> Node:
        kind = type(item)
        if kind is not (list if type(node) is ListNode else tuple):
            return self._state_dict_node(item, node)
        if len(item) >= NUMBERS_MIN and pack_numbers(item, only_counts=False) is not None:
            # A complete capture would pack it, unless it is part of an optimizer's state.
            raise _ChangedError
        children = self._children(item, node.children)
        return node if children is node.children else type(node)(children)

    def _converted(self, item: Any, node: ConvertedNode) -> Node:
        if type(item) is str and node.name == LONG_TEXT and len(item) >= LONG_NBYTES_MIN:
            child = self._node(item.encode("utf-8", "surrogatepass"), node.child)
        elif node.name.startswith(BUILT_IN):
            child = self._node(self._converted_state(item, node), node.child)
        else:
            converter = converter_for(type(item))
            if converter is None or converter.name != node.name:
                raise _ChangedError
            child = self._node(self._results.call(item, converter.to_state), node.child)
        return node if child is node.child else ConvertedNode(node.name, child)

    def _converted_state(self, item: Any, node: ConvertedNode) -> object:
        """Return the state of a built-in conversion that has the same name as before."""
        name = node.name
        if name == PLAIN and isinstance(node.child, TensorNode):
            return self._long_plain(item, node.child.tensor)
        if type(item) in (list, tuple):
            # In an optimizer's state only counts are packed.
            taken = pack_numbers(item, only_counts=name.startswith(COUNT))
        elif converter_for(type(item)) is None and not has_state_dict(item):
            taken = convert_leaf(item, (), self._libraries)
        else:
            taken = None
        if taken is None or taken[0] != name or not (name.startswith(DECLARED) or has_class(name, item)):
            raise _ChangedError
        return taken[1]

    def _long_plain(self, item: object, number: int) -> object:
        """Return the bytes of a long plain value: the previous object if the value is unchanged."""
        text = exact_repr(item)
        previous = self._last.contents.get(number)
        if previous is not None and previous[0] == text:
            return previous[1]
        walk = StateWalker(self._libraries, StateDictCache())
        node = walk.node_of(item, ("",))
        if not isinstance(node, ConvertedNode) or node.name != PLAIN or list(walk.omitted.sentences()):
            raise _ChangedError
        if text is not None:
            self._last.contents[number] = text, walk.items[0]
        return walk.items[0]

    def _state_dict_node(self, item: object, node: Node) -> Node:
        """Return the node of an object's ``state_dict``."""
        if type(item) in _CONTAINERS or encode_plain(item) is not None or converter_for(type(item)) is not None:
            raise _ChangedError
        if any(each.describe(item, ()) or each.encode_value(item, ()) for each in self._libraries):
            raise _ChangedError
        if not has_state_dict(item):
            raise _ChangedError
        return self._node(self._results.call(item, state_dict_of), node)
