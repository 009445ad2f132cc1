"""A checkpoint's tree against a live state: what goes where, and everything that forbids it, before a byte is written.

Invariants:
- Matching changes nothing. Only the steps it returns write, and they are run when every byte is in place.
- What goes into an object with ``load_state_dict`` is matched by ``loading.py``.
- Every live tensor has the library, dtype and shape of the checkpoint's, may be written, and shares memory
  with another one only as the checkpoint's do.
- A container that stands at two places of the live state is written at the first; the other gets a copy, unless
  the checkpoint has the same there.
- A dict ends as it would without a live state, keys, order, class and factory; the live one is kept if its class is
  the same. Where only parts of it were chosen, it keeps all else.
- A list or tuple of plain values only is itself a plain value: it is replaced whole, whatever its length.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckstore.errors import CkstoreError, LeafTypeError, UsageError
from ckstore.format.tensors import TensorSpec, byte_strides_of, overlaps_itself
from ckstore.format.tree import (
    BUILT_IN,
    DEPTH_MAX,
    ConvertedNode,
    DictNode,
    Key,
    ListNode,
    Node,
    OtherKey,
    Path,
    Selection,
    TensorNode,
    TupleNode,
    items_of,
    leaves_of,
    library_of_conversion,
    new_dict,
    place_of,
    tensors_of,
)
from ckstore.state.capture import has_state_dict, stored_key, taken_apart
from ckstore.state.differences import KeyDifference, describe_differences, listed
from ckstore.state.loading import Progress, match_object
from ckstore.state.named_types import distinct
from ckstore.state.numpy_adapter import share_bytes
from ckstore.state.standard_types import Taken, is_standard, make_standard, renew
from ckstore.state.tensors import KnownObject, LeafAdapter, TensorLeaf
from ckstore.state.values import converter_for, encode_plain

_DICTS = (dict, OrderedDict, Counter, defaultdict)

Make = Callable[[Node], object]
"""Builds a part of the checkpoint anew."""

Step = Callable[[Make], object]
"""Puts a part of the checkpoint into the live state and returns what stands there now."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A live tensor that is to be overwritten.

    Args:
        may_be_replaced: It is an object's that takes over the tensor that it is given.
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
    matching = Matching(tensors, adapters, selection)
    step = matching.match(tree, state, ())
    matching.check_ties()
    matching.complain()
    return Match(step, matching.targets, matching.created, matching.warnings)


class Matching:
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
        self.problems: list[tuple[Path, str]] = []
        self.progress = Progress()
        self._differences: list[KeyDifference] = []
        self._replaced: set[Target] = set()
        self._converted: list[tuple[int, Target]] = []
        # The containers are kept beside the numbers: an id means nothing once its object is gone.
        self._containers: dict[int, tuple[object, Node]] = {}

    def match(self, node: Node, target: Any, path: Path) -> Step:
        """Match one node with what stands at its place."""
        if has_state_dict(target) and converter_for(type(target)) is None and self.describe(target, path) is None:
            return match_object(self, node, target, path)
        if isinstance(node, ConvertedNode) and node.name.startswith(BUILT_IN):
            return self._conversion(node, target, path)
        if isinstance(node, DictNode):
            return self._dict(node, target, path)
        if isinstance(node, ListNode | TupleNode):
            return self._sequence(node, target, path)
        if isinstance(node, TensorNode) and self.tensors[node.tensor].library != "bytes":
            self.progress.add(path, is_written=True)
            return self.match_tensor(node, target, path)
        if not self._is_plain(target) or (isinstance(target, dict) and target):
            self.differ(path, "a plain value", target)
        return self.create(node, path)

    def create(self, node: Node, path: Path | None = None) -> Step:
        """Make a part anew; ``path`` if it is no part of an object."""
        self.created.update(tensors_of(node))
        if path is None:
            return lambda make: make(node)
        self.progress.add(path)
        return lambda make: self.progress.make(path, lambda: make(node), is_end=True)

    def _conversion(self, node: ConvertedNode, target: Any, path: Path) -> Step:
        """Match what ckstore itself has converted: what can be changed in place is, all else is replaced."""
        taken = self._taken(target)
        if taken is not None and taken[0] == node.name and tensors_of(node) and is_standard(node.name):
            inner = self.match(node.child, taken[1], path)
            return lambda make: _renewed(target, make_standard(node.name, inner(make)))
        if target is not None and not self._is_plain(target):
            self.differ(path, "a plain value", target)
        create = self.create(node, path)
        if isinstance(target, list | dict):
            target = self._writable(target, node)
        return lambda make: self._renewed_by_library(target, create(make))

    def _renewed_by_library(self, target: Any, made: object) -> object:
        for adapter in self.adapters:
            if type(made) is type(target) and adapter.take_apart(target) is not None:
                adapter.copy_into(target, made)
                return target
        return _renewed(target, made)

    def _taken(self, target: object) -> Taken | None:
        try:
            return taken_apart(target, (), self.adapters)
        except CkstoreError:
            return None

    def differ(self, path: Path, what: str, target: object) -> None:
        """Note that something else is in the state."""
        self.problems.append((path, f"is {what} in the checkpoint, {type(target).__qualname__} in the state"))

    def differ_in_keys(self, path: Path, missing: Sequence[Key], unexpected: Sequence[Key]) -> None:
        """Note keys of one place that only the state has, or only the checkpoint."""
        ours, theirs = [tuple((*path, key) for key in keys) for keys in (missing, unexpected)]
        self._differences.append(KeyDifference(path, ours, theirs))

    def is_chosen(self, path: Path) -> bool:
        """Say whether a leaf of the state would be chosen by ``only=``."""
        return self.selection is None or self.selection.covers(path)

    def known_object(self, item: object) -> KnownObject | None:
        """Return what a library knows of an object."""
        found = (adapter.object_of(item) for adapter in self.adapters)
        return next((known for known in found if known is not None), None)

    def _dict(self, node: DictNode, target: Any, path: Path) -> Step:
        if target is None:
            return self.create(node, path)
        if type(target) not in _DICTS:
            self.differ(path, f"a {node.kind}", target)
            return self.create(node, path)
        held = self._writable(target, node)
        # Keys are typed: to Python 1, 1.0 and True are one key, to a checkpoint they are not.
        rest = {(type(stored := self.stored_key(key, path)), stored): (key, value) for key, value in target.items()}
        steps: list[tuple[Any, Step]] = []
        added: list[Path] = []
        for key, child in items_of(node):
            here = (*path, key)
            if (type(key), key) in rest:
                held_key, value = rest.pop((type(key), key))
                steps.append((held_key, self.match(child, value, here)))
            else:
                steps.append((key, self.create(child, here)))
                added.extend(_places_of(child, here))
        self._note_extras(path, [((*path, key), value) for (_, key), (_, value) in rest.items()], added)
        metadata = node.metadata
        if metadata is not None:
            self.created.update(tensors_of(metadata))
        is_whole = self.is_chosen(path)

        def fill(make: Make) -> object:
            # Each is put in as soon as it is made: if an object refuses its part, what was written before is told.
            keys = distinct(make(key.node) if isinstance(key, OtherKey) else key for key, _ in steps)
            for key, (_, step) in zip(keys, steps, strict=True):
                held[key] = step(make)
            stands = held
            if is_whole:
                made = new_dict(node)
                made.update({key: held[key] for key in keys})
                stands = _refilled(held, made)
            if metadata is not None and isinstance(stands, OrderedDict):
                stands._metadata = make(metadata)  # type: ignore[attr-defined]
            _attach(stands, node, make)
            return stands

        return fill

    def stored_key(self, key: object, path: Path) -> Any:
        """Return a live key as it would be stored; itself, if it could not be."""
        try:
            return stored_key(key, path, self.adapters)
        except UsageError:
            # No checkpoint has such a key.
            return key

    def _sequence(self, node: ListNode | TupleNode, target: Any, path: Path) -> Step:
        if target is None:
            return self.create(node, path)
        kind = list if isinstance(node, ListNode) else tuple
        holds_tensors = any(self.tensors[index].library != "bytes" for index in tensors_of(node))
        if not holds_tensors and isinstance(target, list | tuple) and self._is_plain(target):
            create, replaced = self.create(node, path), self._writable(target, node)
            return lambda make: _renew(replaced, create(make))
        if type(target) is not kind:
            self.differ(path, f"a {kind.__name__}", target)
            return self.create(node, path)
        more = [((*path, index), target[index]) for index in range(len(node.children), len(target))]
        self._note_extras(path, more, [])
        held = self._writable(target, node)
        steps = [
            self.match(child, target[index], (*path, index))
            if index < len(target)
            else self.create(child, (*path, index))
            for index, child in enumerate(node.children)
        ]
        return lambda make: _renew(held, kind(step(make) for step in steps))

    def _writable(self, target: Any, node: Node) -> Any:
        first, its_node = self._containers.setdefault(id(target), (target, node))
        return first if its_node is node or its_node == node else copy.copy(target)

    def _note_extras(self, path: Path, items: Sequence[tuple[Path, object]], added: Sequence[Path]) -> None:
        """Note the leaves of parts of the state that the checkpoint lacks, and what it has in their place."""
        extras: list[Path] = []
        for here, item in items:
            self._list_extras(item, here, 0, extras)
        if extras:
            self._differences.append(KeyDifference(path, tuple(extras), tuple(added)))

    def _list_extras(self, item: Any, path: Path, depth: int, found: list[Path]) -> None:
        if isinstance(item, dict | list | tuple) and item and depth < DEPTH_MAX:
            pairs = item.items() if isinstance(item, dict) else enumerate(item)
            for key, value in pairs:
                self._list_extras(value, (*path, key), depth + 1, found)
        elif self.is_chosen(path):
            found.append(path)

    def fits(self, node: TensorNode, target: object, path: Path) -> bool:
        """Say whether a live tensor can take the checkpoint's bytes as it is."""
        spec, leaf = self.tensors[node.tensor], self.describe(target, path)
        return (
            leaf is not None
            and (leaf.library, leaf.dtype, leaf.shape) == (spec.library, spec.dtype, spec.shape)
            and leaf.is_writable
            and not _cannot_be_filled(spec, leaf)
        )

    def convert(self, node: TensorNode, target: object, leaf: TensorLeaf, path: Path) -> Step:
        """Have an object copy a tensor of another dtype or shape over one of its own."""
        self._converted.append((node.tensor, Target(path, target, leaf, may_be_replaced=False)))
        return self.create(node)

    def match_tensor(
        self, node: Node, target: object, path: Path, *, owner: Path | None = None, may_be_replaced: bool = False
    ) -> Step:
        """Have a live tensor overwritten.

        Args:
            node: What the checkpoint has there.
            target: The tensor.
            path: Its place.
            owner: The object that loads it afterwards, if there is one.
            may_be_replaced: The object takes over another tensor, too.
        """
        if not isinstance(node, TensorNode):
            self.differ(path, "a plain value", target)
            return self.create(node)
        spec = self.tensors[node.tensor]
        try:
            leaf = self._described(target, path)
        except LeafTypeError as error:
            self.problems.append((path, f"cannot be overwritten in the state: {error.what}"))
            return self.create(node)
        if leaf is None:
            if not self._is_plain(target) or isinstance(target, dict | list | tuple):
                self.differ(path, "a tensor", target)
            return self.create(node)
        if (leaf.library, leaf.dtype, leaf.shape) != (spec.library, spec.dtype, spec.shape):
            here = f"{leaf.library} {leaf.dtype} {leaf.shape}"
            there = f"{spec.library} {spec.dtype} {spec.shape}"
            self.problems.append((path, f"is {there} in the checkpoint, {here} in the state"))
        elif not leaf.is_writable:
            self.problems.append((path, "is read-only or a lazy conjugate in the state"))
        elif _cannot_be_filled(spec, leaf):
            self.problems.append((path, "is a tensor in the state whose elements share memory"))
        if owner is not None:
            self.progress.touch(owner)
        place = Target(path, target, leaf, may_be_replaced)
        self.targets.setdefault(node.tensor, []).append(place)
        return lambda make: make(node) if place in self._replaced else _attach(target, node, make)

    def describe(self, item: object, path: Path) -> TensorLeaf | None:
        """Describe a tensor that can be overwritten; None: it is something else."""
        try:
            return self._described(item, path)
        except LeafTypeError:
            return None

    def _described(self, item: object, path: Path) -> TensorLeaf | None:
        if converter_for(type(item)) is not None:
            return None
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
        if any(adapter.encode_value(item, ()) is not None for adapter in self.adapters):
            return True
        taken = self._taken(item)
        return taken is not None and (library_of_conversion(taken[0]) is not None or self._is_plain(taken[1]))

    def check_ties(self) -> None:
        """Note live tensors that share memory although the checkpoint's tensors do not, or do otherwise."""
        live = [(index, target) for index, targets in self.targets.items() for target in targets] + self._converted
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
            others = [pair for pair in running if not self._is_tied_alike(index, target.leaf, pair[0], pair[1].leaf)]
            if not others:
                running.append((index, target))
            elif all(place.may_be_replaced for _, place in [*others, (index, target)]):
                # Then each gets a tensor of its own.
                self._replace(others, target, index)
            else:
                place = next((other.path for _, other in others if not other.may_be_replaced), others[0][1].path)
                self.problems.append((target.path, f"shares memory with {place_of(place)} only in the state"))

    def _replace(self, others: Sequence[tuple[int, Target]], target: Target, index: int) -> None:
        for number, each in [*others, (index, target)]:
            if each not in self._replaced:
                self.targets[number].remove(each)
                self._replaced.add(each)
                self.created.add(number)

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
        if self._differences:
            what, where, todo = describe_differences(self._differences)
            paths = tuple(path for each in self._differences for path in each.missing or each.unexpected)
            raise UsageError(what, where=where, todo=f"{todo}. Nothing was written", paths=paths)
        if self.problems:
            count = len(self.problems)
            raise UsageError(
                f"{count} leaves of the state do not fit the checkpoint"
                if count > 1
                else "a part of the state does not fit the checkpoint",
                where=listed([f"{place_of(path)} {why}" for path, why in self.problems]),
                todo="restore without into=, or into a state of the same structure, shapes and dtypes. "
                "Nothing was written",
                paths=tuple(path for path, _ in self.problems),
            )


def _places_of(node: Node, path: Path) -> list[Path]:
    return [place for place, _ in leaves_of(node, path)] or [path]


def _cannot_be_filled(spec: TensorSpec, leaf: TensorLeaf) -> bool:
    steps = leaf.byte_strides
    is_alike = steps == byte_strides_of(spec.library, spec.strides, leaf.itemsize)
    return overlaps_itself(leaf.shape, steps, leaf.itemsize, is_expanded_ok=is_alike)


def _attach(target: object, node: DictNode | TensorNode, make: Make) -> object:
    """Give a live tensor or dict the Python attributes of the checkpoint's, and return it."""
    if node.attributes is not None:
        # Not by setattr: no property of a library is to be set.
        attributes: Any = make(node.attributes)
        getattr(target, "__dict__", {}).update(attributes)
    return target


def _renewed(target: object, made: object) -> object:
    """Return the live object with what was just made in it, or that, where a live one cannot be changed."""
    if isinstance(target, dict) and isinstance(made, dict):
        return _refilled(target, made)
    if isinstance(target, list):
        return _renew(target, made)
    return target if renew(target, made) else made


def _refilled(target: dict[Any, Any], made: dict[Any, Any]) -> dict[Any, Any]:
    """Give a live dict what another one holds, in its order; return it, or the other one if that is of another class.

    The live one is filled in either case: others may hold it.
    """
    target.clear()
    # A Counter adds up, but not to nothing.
    target.update(made)
    if type(target) is not type(made):
        return made
    if isinstance(target, defaultdict) and isinstance(made, defaultdict):
        target.default_factory = made.default_factory
    return target


def _renew(target: object, items: object) -> object:
    if isinstance(target, list) and isinstance(items, list):
        target[:] = items
        return target
    return items
