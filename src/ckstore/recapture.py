"""A state taken apart once more: what has not changed since the last time is not worked out again.

A trainer commits the same structure again and again, and waits meanwhile. So the last capture is kept, but for the
tensors, and walked along: each key, type and plain value, and of each tensor all that is recorded of it and where its
allocation lies, is compared with what was there.

Invariants:
- What is returned equals what ``capture`` would return, whatever has changed. Plain values may, and tensors that share
  their allocation with no other one may have moved; on anything else the whole state is taken apart anew.
- Between two captures no tensor is kept alive.
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

from ckstore.capture import (
    FACTORY_NAMES,
    KINDS,
    LONG_NBYTES_MIN,
    Asked,
    Captured,
    MemorySpan,
    Walk,
    allocations_of,
    has_state_dict,
    state_dict_of,
)
from ckstore.leaves import BytesAdapter, NumpyAdapter
from ckstore.tensor import HostStorage, LeafAdapter, Sights, TensorLeaf
from ckstore.tree import ConvertedNode, DictNode, ListNode, Node, TensorNode, TupleNode, ValueNode
from ckstore.values import LONG_TEXT, Converter, converter_for, encode_plain, registered_converters

_MOVED_MAX = 64
"""More tensors than these are not looked at one by one: taking everything apart costs no more."""

_Group = tuple[LeafAdapter, Sequence[int]]

_TYPES: Mapping[str, type] = {name: kind for kind, name in KINDS.items()}
_KEY_TYPES = frozenset((str, int))
_CONTAINERS = frozenset((*KINDS, list, tuple))


class _ChangedError(Exception):
    """The state is not made as the last one was."""


class Recapture:
    """Takes states apart, one after the other; remembers the last one."""

    def __init__(self) -> None:
        self._memo: _Memo | None = None

    def capture(self, state: object, adapters: Sequence[LeafAdapter] = ()) -> Captured:
        """Take a state apart; see ``capture.capture``."""
        libraries = (NumpyAdapter(), *adapters)
        asked = Asked()
        memo, self._memo = self._memo, None
        if memo is not None and memo.is_for(libraries):
            try:
                captured = _Again(memo, libraries, asked).captured(state)
            except Exception:
                # Whatever is wrong with it, ``capture`` says it better, or has no problem with it.
                captured = None
            if captured is not None:
                self._memo = memo
                return captured
        walk = Walk(libraries, asked)
        captured = walk.captured(state)
        self._memo = _Memo.of(captured, walk)
        return captured


@dataclass(frozen=True, slots=True)
class _Pool:
    """A storage as it was: its span, and the tensors that keep it alive, the one that reads it first."""

    start: int
    nbytes: int
    element_width: int
    is_float: bool
    members: tuple[int, ...]
    reader: int


class _Memo:
    """What a capture was, without the tensors.

    Args:
        captured: The capture; its tree is the template of the next walk.
        walk: The walk that has made it.
        groups: Who looks at which tensors.
        sights: What they have seen.
    """

    def __init__(self, captured: Captured, walk: Walk, groups: Sequence[_Group], sights: Sights) -> None:
        self.tree = captured.tree
        self.paths, self.tensors = captured.paths, captured.tensors
        self.warnings = tuple(captured.warnings)
        self.libraries = [adapter.library for adapter in walk.adapters]
        self.converters: Mapping[type[Any], Converter] = registered_converters()
        self.groups = groups
        self.facts, self.starts = list(sights.facts), list(sights.starts)
        self.pools = _pools_of(captured, walk.leaves)
        # Which allocations no other tensor lies in; where nothing lies, nothing is shared.
        alone = {group[0] for group in allocations_of(walk.leaves) if len(group) == 1}
        self.is_alone = [number in alone or not leaf.memory.nbytes for number, leaf in enumerate(walk.leaves)]
        spaces: dict[str, int] = {}
        self.spaces = np.array([spaces.setdefault(leaf.memory.space, len(spaces)) for leaf in walk.leaves], np.int64)
        self.lengths = [leaf.memory.owner_nbytes if leaf.memory.nbytes else 0 for leaf in walk.leaves]

    @classmethod
    def of(cls, captured: Captured, walk: Walk) -> _Memo | None:
        """Remember a capture; None where one cannot be told from another by looking."""
        if walk.warnings:
            # They tell of attributes, which the tree does not have.
            return None
        groups = _groups_of(walk)
        sights = _seen_by(groups, walk.items)
        return None if sights is None else cls(captured, walk, groups, sights)

    def is_for(self, libraries: Sequence[LeafAdapter]) -> bool:
        """Whether a walk with these libraries, now, would take the same leaves for the same things."""
        return self.libraries == [adapter.library for adapter in libraries] and (
            self.converters == registered_converters()
        )

    def move(self, moved: Sequence[tuple[int, int]]) -> None:
        """Take note that allocations lie elsewhere: number of the tensor, and where.

        Raises:
            _ChangedError: They share memory with other tensors, or did.
        """
        if len(moved) > _MOVED_MAX or not all(self.is_alone[number] for number, _ in moved):
            raise _ChangedError
        for number, start in moved:
            index = self.tensors[number].storage
            pool = self.pools[index]
            shifted = pool.start + start - self.starts[number]
            self.pools[index] = _Pool(
                shifted, pool.nbytes, pool.element_width, pool.is_float, pool.members, pool.reader
            )
            self.starts[number] = start
        begins = np.array(self.starts, np.uint64)
        ends = begins + np.array(self.lengths, np.uint64)
        for number, start in moved:
            length = self.lengths[number]
            if length and _touching(self.spaces == self.spaces[number], begins, ends, start, length) != 1:
                raise _ChangedError


def _touching(
    is_there: NDArray[np.bool_], begins: NDArray[np.uint64], ends: NDArray[np.uint64], start: int, nbytes: int
) -> int:
    """Return how many of some ranges, which may be empty, have a byte in common with one."""
    here = is_there & (begins < ends) & (begins < np.uint64(start + nbytes)) & (ends > np.uint64(start))
    return int(np.count_nonzero(here))


def _pools_of(captured: Captured, leaves: Sequence[TensorLeaf]) -> list[_Pool]:
    members: list[list[int]] = [[] for _ in captured.storages]
    for number, spec in enumerate(captured.tensors):
        members[spec.storage].append(number)
    pools = []
    for span, numbers in zip(captured.storages, members, strict=True):
        assert isinstance(span, MemorySpan)
        # The same one as when the storage was made, so that it reaches as far.
        first = min(numbers, key=lambda number: (leaves[number].memory.start, leaves[number].memory.owner_start))
        pools.append(_Pool(span.start, span.nbytes, span.element_width, span.is_float, tuple(numbers), first))
    return pools


def _groups_of(walk: Walk) -> list[_Group]:
    """Return each library with the numbers of its tensors."""
    adapters = {adapter.library: adapter for adapter in (*walk.adapters, BytesAdapter())}
    numbers: dict[str, list[int]] = {}
    for number, leaf in enumerate(walk.leaves):
        numbers.setdefault(leaf.library, []).append(number)
    return [(adapters[library], its) for library, its in numbers.items()]


def _seen_by(groups: Sequence[_Group], items: Sequence[object]) -> Sights | None:
    """Return what libraries see of all tensors, in order; None where one of them is none of the usual."""
    if len(groups) == 1:
        return groups[0][0].glances(items)
    parts: list[list[Any]] = [[None] * len(items) for _ in Sights._fields]
    for adapter, numbers in groups:
        sights = adapter.glances([items[number] for number in numbers])
        if sights is None:
            return None
        for part, found in zip(parts, sights, strict=True):
            for number, each in zip(numbers, found, strict=True):
                part[number] = each
    return Sights(*parts)


class _Again:
    """One walk along the tree of the last capture.

    Args:
        memo: The last capture.
        libraries: Of tensors.
        asked: Keeps what objects answer.
    """

    def __init__(self, memo: _Memo, libraries: Sequence[LeafAdapter], asked: Asked) -> None:
        self._memo = memo
        self._libraries = libraries
        self._asked = asked
        self._seen: dict[int, int] = {}
        self._items: list[object] = []

    def captured(self, state: object) -> Captured:
        """Return the state, taken apart.

        Raises:
            _ChangedError: It is not made as the last one was.
        """
        memo = self._memo
        tree = self._node(state, memo.tree)
        if len(self._items) != len(memo.starts):
            raise _ChangedError
        sights = _seen_by(memo.groups, self._items)
        if sights is None or list(sights.facts) != memo.facts:
            raise _ChangedError
        places = zip(sights.starts, memo.starts, strict=True)
        moved = [(number, start) for number, (start, last) in enumerate(places) if start != last]
        if moved:
            memo.move(moved)
        memo.tree = tree
        keeps, readers = sights.keeps, sights.readers
        storages: list[HostStorage] = [
            MemorySpan(
                pool.start,
                pool.nbytes,
                pool.element_width,
                pool.is_float,
                [keeps[number] for number in pool.members],
                readers[pool.reader],
            )
            for pool in memo.pools
        ]
        return Captured(tree, memo.paths, memo.tensors, storages, list(memo.warnings))

    def _node(self, item: Any, node: Node) -> Node:
        """Return the node of a part of the state; the one that was there, where it still says the same."""
        form = type(node)
        if form is TensorNode:
            return self._tensor(item, node)  # type: ignore[arg-type]
        if form is ValueNode:
            return self._value(item, node)  # type: ignore[arg-type]
        if form is DictNode:
            return self._mapping(item, node)  # type: ignore[arg-type]
        if form is ConvertedNode:
            return self._converted(item, node)  # type: ignore[arg-type]
        return self._sequence(item, node)  # type: ignore[arg-type]

    def _tensor(self, item: object, node: TensorNode) -> Node:
        return self._children((item,), (node,))[0]

    def _children(self, items: Iterable[object], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the nodes of parts of the state; those that were there, if all of them still say the same."""
        seen, tensors = self._seen, self._items
        children: list[Node] = []
        # zip tells where there are more or fewer.
        for item, node in zip(items, nodes, strict=True):
            if type(node) is TensorNode:
                # Nearly all are. What it is, is looked at when all are known.
                number = seen.setdefault(id(item), len(tensors))
                if number == len(tensors):
                    tensors.append(item)
                if number != node.tensor:
                    raise _ChangedError
                children.append(node)
            else:
                children.append(self._node(item, node))
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
                    return ValueNode(*value)
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
        metadata = node.metadata
        if kind is not dict:
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
        children = self._children(item, node.children)
        return node if children is node.children else type(node)(children)

    def _converted(self, item: Any, node: ConvertedNode) -> Node:
        if type(item) is str and node.name == LONG_TEXT and len(item) >= LONG_NBYTES_MIN:
            child = self._node(item.encode("utf-8", "surrogatepass"), node.child)
        else:
            converter = converter_for(type(item))
            if converter is None or converter.name != node.name:
                raise _ChangedError
            child = self._node(self._asked.ask(item, converter.to_state), node.child)
        return node if child is node.child else ConvertedNode(node.name, child)

    def _answer(self, item: object, node: Node) -> Node:
        """Return the node of what an object says of its state."""
        if type(item) in _CONTAINERS or encode_plain(item) is not None or converter_for(type(item)) is not None:
            raise _ChangedError
        if any(each.describe(item, ()) or each.encode_value(item, ()) for each in self._libraries):
            raise _ChangedError
        if not has_state_dict(item):
            raise _ChangedError
        return self._node(self._asked.ask(item, state_dict_of), node)
