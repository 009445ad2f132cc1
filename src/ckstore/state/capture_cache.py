"""A state taken apart once more: what has not changed since the last time is not worked out again.

A trainer commits the same structure again and again, and waits meanwhile. So the last capture is kept, but for the
tensors, and walked along: each key, type and plain value, and of each tensor all that is recorded of it and where its
allocation lies, is compared with what was there.

Invariants:
- What is returned equals what ``capture`` would return, whatever has changed. Plain values may, and tensors that share
  their allocation with no other one may have moved; on anything else the whole state is taken apart anew.
- Between two captures no tensor is kept alive. The bytes of long plain values are, since making them takes long.
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
    has_state_dict,
    state_dict_of,
    taken_apart,
)
from ckstore.state.memory_spans import Spans, SpanShape, fixed_starts_of
from ckstore.state.named_types import is_found
from ckstore.state.numpy_adapter import BytesAdapter, NumpyAdapter
from ckstore.state.packed import COUNT, NUMBERS_MIN, PLAIN, pack_numbers, spelled
from ckstore.state.tensors import LeafAdapter, LeafBatch, TensorLeaf
from ckstore.state.values import LONG_TEXT, Converter, converter_for, encode_plain, registered_converters

_MOVED_MAX = 64
"""More tensors than these are not looked at one by one: taking everything apart costs no more."""

_Group = tuple[LeafAdapter, Sequence[int]]

_TYPES: Mapping[str, type] = {name: kind for kind, name in KINDS.items()}
_KEY_TYPES = frozenset((str, int))
_CONTAINERS = frozenset((*KINDS, list, tuple))


class _ChangedError(Exception):
    """The state is not made as the last one was."""


class CaptureCache:
    """Takes states apart, one after the other; remembers the last one."""

    def __init__(self) -> None:
        self._memo: _CachedCapture | None = None

    def capture(self, state: object, adapters: Sequence[LeafAdapter] = ()) -> Captured:
        """Take a state apart; see ``capture.capture``."""
        libraries = (NumpyAdapter(), *adapters)
        asked = StateDictCache()
        memo, self._memo = self._memo, None
        if memo is not None and memo.is_for(libraries):
            try:
                captured = _CachedWalker(memo, libraries, asked).captured(state)
            except Exception:
                # Whatever is wrong with it, ``capture`` says it better, or has no problem with it.
                captured = None
            if captured is not None:
                self._memo = memo
                return captured
        walk = StateWalker(libraries, asked)
        captured = walk.captured(state)
        self._memo = _CachedCapture.of(captured, walk)
        return captured


@dataclass(frozen=True, slots=True)
class _Pool:
    """A storage as it was: the tensors that keep it alive, and the one that reads it."""

    members: tuple[int, ...]
    reader: int


class _CachedCapture:
    """What a capture was, without the tensors.

    Args:
        captured: The capture; its tree is the template of the next walk.
        walk: The walk that has made it.
        groups: Who looks at which tensors.
        sights: What they have seen.
    """

    def __init__(self, captured: Captured, walk: StateWalker, groups: Sequence[_Group], sights: LeafBatch) -> None:
        self.tree = captured.tree
        self.paths, self.tensors = captured.paths, captured.tensors
        self.warnings = tuple(captured.warnings)
        self.order: list[int] = []
        """The number of each tensor in the order of a walk, once for each place where it is."""
        self.contents: dict[int, tuple[str, object]] = {}
        """The bytes of long plain values by their number, each behind what ``packed.spelled`` says of the value."""
        self.only_tensors: dict[int, tuple[Node, ...]] = {}
        """Children that are all tensors, by their id."""
        self._survey(captured.tree)
        firsts: dict[int, int] = {}
        for place, number in enumerate(self.order):
            firsts.setdefault(number, place)
        # Nearly always each is in one place, and they are numbered as they come.
        is_plain = self.order == list(range(len(self.order)))
        self.firsts = [] if is_plain else [firsts[number] for number in range(len(firsts))]
        self.libraries = [adapter.library for adapter in walk.adapters]
        self.converters: Mapping[type[Any], Converter] = registered_converters()
        self.groups = groups
        # There are few kinds of tensors: what is compared with is then in the processor's cache.
        known: dict[object, tuple[object, ...]] = {}
        self.facts = [known.setdefault(each, each) for each in sights.facts]
        self.starts = np.array(sights.starts, np.uint64)
        self.shapes = [SpanShape(each.nbytes, each.element_width, each.is_float) for each in captured.storages]
        self.span_starts = fixed_starts_of(captured.storages)
        self.pools = _pools_of(captured, walk.leaves)
        # Nearly always each tensor has a storage of its own.
        self.is_simple = all(pool == _Pool((number,), number) for number, pool in enumerate(self.pools))
        # Which allocations no other tensor lies in; where nothing lies, nothing is shared.
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
        """Remember a capture; None where one cannot be told from another by looking."""
        if walk.warnings:
            # They tell of attributes, which the tree does not have.
            return None
        groups = _groups_of(walk)
        sights = _seen_by(groups, walk.items)
        return None if sights is None else cls(captured, walk, groups, sights)

    def _survey(self, node: Node) -> None:
        """Note what lies below a node, in the order in which ``_CachedWalker`` walks."""
        if isinstance(node, TensorNode):
            self.order.append(node.tensor)
        elif isinstance(node, ConvertedNode):
            self._survey(node.child)
        elif isinstance(node, (DictNode, ListNode, TupleNode)):
            if all(isinstance(child, TensorNode) for child in node.children):
                self.only_tensors[id(node.children)] = node.children
            for child in node.children:
                self._survey(child)
            if isinstance(node, DictNode) and node.metadata is not None:
                self._survey(node.metadata)

    def is_for(self, libraries: Sequence[LeafAdapter]) -> bool:
        """Whether a walk with these libraries, now, would take the same leaves for the same things."""
        return self.libraries == [adapter.library for adapter in libraries] and (
            self.converters == registered_converters()
        )

    def move(self, starts: NDArray[np.uint64]) -> None:
        """Take note of where the allocations of all tensors lie by now.

        Raises:
            _ChangedError: Some lie elsewhere, and share memory with other tensors, or did.
        """
        moved = np.flatnonzero(starts != self.starts)
        if not moved.size:
            return
        if moved.size > _MOVED_MAX or not self.is_alone[moved].all():
            raise _ChangedError
        shifted = self.span_starts.copy()
        shifted[self.storage_of[moved]] += starts[moved] - self.starts[moved]
        shifted.setflags(write=False)
        self.span_starts = shifted
        self.starts, ends = starts, starts + self.lengths
        for number in moved.tolist():
            start, end = starts[number], ends[number]
            if start < end and _touching(self.spaces == self.spaces[number], starts, ends, start, end) != 1:
                raise _ChangedError

    def spans_of(self, sights: LeafBatch) -> Spans:
        """Return the storages of tensors that were seen just now, and are made as these were."""
        if self.is_simple:
            return Spans(self.shapes, self.span_starts, list(zip(sights.keeps, strict=True)), sights.readers)
        keeps = [tuple(sights.keeps[number] for number in pool.members) for pool in self.pools]
        return Spans(self.shapes, self.span_starts, keeps, [sights.readers[pool.reader] for pool in self.pools])


def _touching(
    is_there: NDArray[np.bool_], begins: NDArray[np.uint64], ends: NDArray[np.uint64], start: np.uint64, end: np.uint64
) -> int:
    """Return how many of some ranges, which may be empty, have a byte in common with one."""
    here = is_there & (begins < ends) & (begins < end) & (ends > start)
    return int(np.count_nonzero(here))


def _pools_of(captured: Captured, leaves: Sequence[TensorLeaf]) -> list[_Pool]:
    members: list[list[int]] = [[] for _ in captured.storages]
    for number, spec in enumerate(captured.tensors):
        members[spec.storage].append(number)
    pools = []
    for numbers in members:
        # The same one as when the storage was made, so that it reaches as far.
        first = min(numbers, key=lambda number: (leaves[number].memory.start, leaves[number].memory.owner_start))
        pools.append(_Pool(tuple(numbers), first))
    return pools


def _groups_of(walk: StateWalker) -> list[_Group]:
    """Return each library with the numbers of its tensors."""
    adapters = {adapter.library: adapter for adapter in (*walk.adapters, BytesAdapter())}
    numbers: dict[str, list[int]] = {}
    for number, leaf in enumerate(walk.leaves):
        numbers.setdefault(leaf.library, []).append(number)
    return [(adapters[library], its) for library, its in numbers.items()]


def _seen_by(groups: Sequence[_Group], items: Sequence[object]) -> LeafBatch | None:
    """Return what libraries see of all tensors, in order; None where one of them is none of the usual."""
    if len(groups) == 1:
        return groups[0][0].describe_many(items)
    parts: list[list[Any]] = [[None] * len(items) for _ in LeafBatch._fields]
    for adapter, numbers in groups:
        sights = adapter.describe_many([items[number] for number in numbers])
        if sights is None:
            return None
        for part, found in zip(parts, sights, strict=True):
            for number, each in zip(numbers, found, strict=True):
                part[number] = each
    return LeafBatch(*parts)


class _CachedWalker:
    """One walk along the tree of the last capture.

    Args:
        memo: The last capture.
        libraries: Of tensors.
        asked: Keeps what objects answer.
    """

    def __init__(self, memo: _CachedCapture, libraries: Sequence[LeafAdapter], asked: StateDictCache) -> None:
        self._memo = memo
        self._libraries = libraries
        self._asked = asked
        self._found: list[object] = []
        """What stands where the tree has tensors, in the order of the walk."""

    def captured(self, state: object) -> Captured:
        """Return the state, taken apart.

        Raises:
            _ChangedError: It is not made as the last one was.
        """
        memo = self._memo
        tree = self._node(state, memo.tree)
        # Numbered as in the last capture, each thing has a number of its own if there are as many.
        numbers: dict[int, int] = {}
        if list(map(numbers.setdefault, map(id, self._found), memo.order)) != memo.order:
            raise _ChangedError
        if len(numbers) != len(memo.starts) or len(self._found) != len(memo.order):
            raise _ChangedError
        sights = _seen_by(memo.groups, [self._found[place] for place in memo.firsts] if memo.firsts else self._found)
        if sights is None or list(sights.facts) != memo.facts:
            raise _ChangedError
        memo.move(np.array(sights.starts, np.uint64))
        memo.tree = tree
        return Captured(tree, memo.paths, memo.tensors, memo.spans_of(sights), list(memo.warnings))

    def _node(self, item: Any, node: Node) -> Node:
        """Return the node of a part of the state; the one that was there, where it still says the same."""
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
        """Return the nodes of parts of the state; those that were there, if all of them still say the same."""
        found = self._found
        if self._memo.only_tensors.get(id(nodes)) is nodes:
            before = len(found)
            found.extend(items)
            if len(found) != before + len(nodes):
                raise _ChangedError
            return nodes
        children: list[Node] = []
        # zip tells where there are more or fewer.
        for item, node in zip(items, nodes, strict=True):
            form = type(node)
            if form is TensorNode:
                # What it is, is looked at when all are known.
                found.append(item)
            elif form is DictNode:
                # These are one for each parameter in the state of an optimizer.
                node = self._mapping(item, node)  # type: ignore[arg-type]
            elif form is ValueNode:
                node = self._value(item, node)  # type: ignore[arg-type]
            else:
                node = self._node(item, node)
            children.append(node)
        return nodes if all(map(is_, children, nodes)) else tuple(children)

    def _value(self, item: Any, node: ValueNode) -> Node:
        kind, name = type(item), node.type
        # The commonest, without making a node.
        if kind is int:
            if name == "int" and node.value == item:
                return node
        elif kind is float:
            if name == "float" and node.value == struct.pack("<d", item):
                return node
        elif kind is str or kind is bytes:
            # What was no long one is none.
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
            return self._answer(item, node)
        keys = tuple(item)
        # Equal keys of these types are of equal types; True is 1, but no key.
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
            return self._answer(item, node)
        if len(item) >= NUMBERS_MIN and pack_numbers(item, only_counts=False) is not None:
            # Outside of an optimizer it would be packed by now.
            raise _ChangedError
        children = self._children(item, node.children)
        return node if children is node.children else type(node)(children)

    def _converted(self, item: Any, node: ConvertedNode) -> Node:
        if type(item) is str and node.name == LONG_TEXT and len(item) >= LONG_NBYTES_MIN:
            child = self._node(item.encode("utf-8", "surrogatepass"), node.child)
        elif node.name.startswith(BUILT_IN):
            child = self._node(self._taken(item, node), node.child)
        else:
            converter = converter_for(type(item))
            if converter is None or converter.name != node.name:
                raise _ChangedError
            child = self._node(self._asked.ask(item, converter.to_state), node.child)
        return node if child is node.child else ConvertedNode(node.name, child)

    def _taken(self, item: Any, node: ConvertedNode) -> object:
        """Return what a leaf is made of, that is stored under the same name as before."""
        name = node.name
        if name == PLAIN and isinstance(node.child, TensorNode):
            return self._long_plain(item, node.child.tensor)
        if type(item) in (list, tuple):
            # Of an optimizer only counts are packed, and those were packed here before.
            taken = pack_numbers(item, only_counts=name.startswith(COUNT))
        elif converter_for(type(item)) is None and not has_state_dict(item):
            taken = taken_apart(item, (), self._libraries)
        else:
            taken = None
        if taken is None or taken[0] != name or not is_found(name, item):
            raise _ChangedError
        return taken[1]

    def _long_plain(self, item: object, number: int) -> object:
        """Return the bytes of a long plain value; the same ones as before if it has not changed."""
        text = spelled(item)
        known = self._memo.contents.get(number)
        if known is not None and known[0] == text:
            return known[1]
        walk = StateWalker(self._libraries, StateDictCache())
        node = walk.node_of(item, ("",))
        if not isinstance(node, ConvertedNode) or node.name != PLAIN or list(walk.left_out.sentences()):
            raise _ChangedError
        if text is not None:
            self._memo.contents[number] = text, walk.items[0]
        return walk.items[0]

    def _answer(self, item: object, node: Node) -> Node:
        """Return the node of what an object says of its state."""
        if type(item) in _CONTAINERS or encode_plain(item) is not None or converter_for(type(item)) is not None:
            raise _ChangedError
        if any(each.describe(item, ()) or each.encode_value(item, ()) for each in self._libraries):
            raise _ChangedError
        if not has_state_dict(item):
            raise _ChangedError
        return self._node(self._asked.ask(item, state_dict_of), node)
