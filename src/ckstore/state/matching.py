"""Walk over a checkpoint's tree and a live state in parallel, and record everything that does not fit.

Invariants:
- Matching changes nothing. Only the returned steps write, and they run after all bytes have been read.
- ``loading.py`` starts the walk, matches objects with ``load_state_dict``, and reports what does not fit.
- Every matched live tensor has the library, dtype and shape of the checkpoint's tensor and is writable. Live tensors
  share memory only if the checkpoint's tensors do.
- A container that occurs twice in the live state is written at its first path. The second path gets a copy, unless the
  checkpoint has equal content there.
- A dict gets the keys, order, class and factory that a restore without a live state would give. The live dict is kept
  if its class is the same. If only parts of it were selected, its other items stay.
- A list or tuple of plain values is itself a plain value: it is replaced whole, whatever its length.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckstore.errors import CkstoreError, LeafTypeError, UsageError
from ckstore.format.tensors import TensorSpec
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
from ckstore.state.capture import convert_leaf, has_state_dict, stored_key
from ckstore.state.live_layouts import DICTS, LiveLayouts, cannot_be_filled, fits
from ckstore.state.markers import PerRank, Replicated
from ckstore.state.named_types import distinct
from ckstore.state.numpy_adapter import share_bytes
from ckstore.state.standard_types import (
    Conversion,
    build_standard,
    is_standard,
    update_dict,
    update_in_place,
    update_list,
)
from ckstore.state.tensors import KnownObject, LeafAdapter, TensorLeaf
from ckstore.state.values import converter_for, encode_plain

NAMED_MAX = 5
"""Most paths that a message lists."""

Make = Callable[[Node], object]
"""Builds a part of the checkpoint as a new object."""

Step = Callable[[Make], object]
"""Writes a part of the checkpoint into the live state, and returns the resulting object."""


# Not frozen: a restore creates one for each tensor, and freezing makes creation three times as slow.
@dataclass(slots=True, eq=False)
class Target:
    """A live tensor to overwrite. As a step it returns the tensor, which is complete when steps run.

    Args:
        layout: Description of this tensor, or of another with the same layout.
        shift: What must be added to the addresses in ``layout``.
        keep: Objects that keep its memory alive.
        may_be_replaced: Its owner takes over any tensor that it is given.
    """

    path: Path
    item: object
    layout: TensorLeaf
    shift: int
    keep: object
    may_be_replaced: bool

    @classmethod
    def of(cls, path: Path, item: object, leaf: TensorLeaf, may_be_replaced: bool) -> Target:
        """Return a target with a description of its own."""
        return cls(path, item, leaf, 0, leaf.memory.keep, may_be_replaced)

    def __call__(self, make: Make) -> object:
        """Return the tensor."""
        return self.item

    @property
    def origin(self) -> int:
        """Address of element (0, ..., 0)."""
        return self.layout.origin + self.shift

    @property
    def start(self) -> int:
        """Address of the lowest byte that the tensor views."""
        return self.layout.memory.start + self.shift

    @property
    def leaf(self) -> TensorLeaf:
        """Description of this tensor."""
        memory = self.layout.memory
        memory = replace(memory, owner_start=memory.owner_start + self.shift, start=self.start, keep=self.keep)
        return replace(self.layout, origin=self.origin, memory=memory)


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """Keys of one container that only one side has.

    Args:
        path: The module or dict.
        missing: Keys of the state that the checkpoint lacks.
        unexpected: Keys of the checkpoint that the state lacks.
    """

    path: Path
    missing: tuple[Path, ...]
    unexpected: tuple[Path, ...]


class Progress:
    """Which leaves and objects of a live state have been written, for messages."""

    def __init__(self) -> None:
        self._units: dict[Path, bool] = {}
        """Whether each of them is written."""
        self._touched: set[Path] = set()

    def add(self, path: Path, *, is_written: bool = False) -> None:
        """Record a leaf or an object to write; ``is_written`` if it is complete before any object loads."""
        self._units.setdefault(path, is_written)

    def touch(self, path: Path) -> None:
        """Record that some tensors of this object are written before any object loads."""
        self._touched.add(path)

    def make(self, path: Path, call: Callable[[], Any], *, is_end: bool = False) -> Any:
        """Build the values for a path; ``is_end`` if the path is complete after this.

        Raises:
            UsageError: A converter raised an exception. The error lists what was written.
            CkstoreError: The values cannot be built. The error lists what was written, if anything was.
        """
        try:
            made = call()
        except CkstoreError as error:
            facts, summary = self._report(path)
            is_touched = path in self._touched
            if not (is_touched or facts["written"] or facts["partly_written"]):
                raise
            first = f"{error.todo}. " if error.todo else ""
            last = ", which is partly written" if is_touched else ""
            parts = "; ".join([f"Could not build {place_of(path)}{last}", *summary])
            todo = f"{first}{parts}. Then restore again: that rewrites everything"
            raise type(error)(error.what, where=error.where, todo=todo, **{**error.facts, **facts}) from error
        except Exception as error:
            raise self._stopped(path, "a converter", error) from error
        if is_end:
            self._units[path] = True
        return made

    def load(self, path: Path, what: str, call: Callable[[], object]) -> None:
        """Let an object load its part.

        Raises:
            UsageError: The object raised an exception. The error lists what was written.
        """
        try:
            call()
        except Exception as error:
            raise self._stopped(path, what, error) from error
        self._units[path] = True

    def _stopped(self, path: Path, what: str, error: Exception) -> UsageError:
        facts, summary = self._report(path)
        # torch names keys and shapes on the lines after the first.
        text = " ".join(line.strip() for line in str(error).strip().split("\n")[:3]).rstrip(".")
        raised = f"{type(error).__name__}: {text}" if text else type(error).__name__
        by_hand = f"restore(only={place_of(path)!r})" if path else "restore()"
        return UsageError(
            f"{what} raised {raised}",
            where=place_of(path),
            todo="; ".join(["It may be partly loaded", *summary])
            + ". Change the object so that it fits and restore again: that rewrites everything. "
            f"Or load this part yourself from {by_hand}, and the other parts with only=",
            **facts,
        )

    def _report(self, path: Path) -> tuple[dict[str, Any], list[str]]:
        """Return what was written, except this path: as facts of an error, and as texts."""
        units = {here: is_written for here, is_written in self._units.items() if here != path}
        written = tuple(place_of(here) for here, is_written in units.items() if is_written)
        partly = tuple(place_of(here) for here, is_written in units.items() if not is_written and here in self._touched)
        rest = tuple(
            place_of(here) for here, is_written in units.items() if not is_written and here not in self._touched
        )
        summary = [
            f"already written: {listed(written)}" if written else "nothing else was loaded",
            *([f"partly written: {listed(partly)}"] if partly else []),
            *([f"unchanged: {listed(rest)}"] if rest else []),
        ]
        return {"path": path, "written": written, "partly_written": partly, "not_written": rest}, summary


class Matching:
    """One walk over a tree and a live state in parallel.

    Args:
        tensors: The checkpoint's tensors.
        adapters: Libraries of tensors.
        selection: The selection made with ``only=``; None: everything.
        match_object: Matches a part of the checkpoint with an object that has ``load_state_dict``.
    """

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        adapters: Sequence[LeafAdapter],
        selection: Selection | None,
        match_object: Callable[[Matching, Node, Any, Path], Step],
    ) -> None:
        self.tensors = tensors
        self.adapters = adapters
        self.layouts = LiveLayouts(tensors, adapters)
        self.selection = selection
        self._match_object = match_object
        self.targets: dict[int, list[Target]] = {}
        self.created: set[int] = set()
        self.warnings: list[str] = []
        self.problems: list[tuple[Path, str]] = []
        self.remedies: dict[str, None] = {}
        self.progress = Progress()
        self.differences: list[KeyDifference] = []
        self._replaced: set[Target] = set()
        self._converted: list[tuple[int, Target]] = []
        # The containers are stored with their ids: an id is only unique while its object is alive.
        self._containers: dict[int, tuple[object, Node]] = {}

    def match(self, node: Node, target: Any, path: Path) -> Step:
        """Match one node with the object at its path."""
        if isinstance(target, PerRank | Replicated):
            return self._match_marked(node, target, path)
        if isinstance(node, TensorNode) and (found := self.layouts.fitting(node, target)) is not None:
            self.progress.add(path, is_written=True)
            return self._overwrite(node, Target(path, target, *found, may_be_replaced=False), None)
        if (
            has_state_dict(target)
            and converter_for(type(target)) is None
            and self.layouts.describe(target, path) is None
        ):
            return self._match_object(self, node, target, path)
        if isinstance(node, ConvertedNode) and node.name.startswith(BUILT_IN):
            return self._match_conversion(node, target, path)
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

    def _match_marked(self, node: Node, target: PerRank[Any] | Replicated[Any], path: Path) -> Step:
        inner = self.match(node, target.value, path)
        return lambda make: target.with_value(inner(make))

    @property
    def takes_shards(self) -> bool:
        """Whether the state may have shards of global tensors."""
        return any(adapter.takes_shards for adapter in self.adapters)

    def create_like(self, node: Node, prototype: object, path: Path) -> Step:
        """Create a part that is distributed like a live tensor, if that is a shard of a tensor of this shape."""
        if isinstance(node, TensorNode) and self.takes_shards:
            spec = self.tensors[node.tensor]
            made = next((each for a in self.adapters if (each := a.empty_like(prototype, spec)) is not None), None)
            leaf = None if made is None else self.layouts.describe(made, path)
            if leaf is not None:
                return self._overwrite(node, Target.of(path, made, leaf, may_be_replaced=False), None)
        return self.create(node)

    def create(self, node: Node, path: Path | None = None) -> Step:
        """Create a part; ``path`` is given unless the part belongs to an object that loads it."""
        self.created.update(tensors_of(node))
        if path is None:
            return lambda make: make(node)
        self.progress.add(path)
        return lambda make: self.progress.make(path, lambda: make(node), is_end=True)

    def _match_conversion(self, node: ConvertedNode, target: Any, path: Path) -> Step:
        """Match a built-in conversion: update the live object in place if possible, else replace it."""
        conversion = self._convert(target)
        if conversion is not None and conversion[0] == node.name and tensors_of(node) and is_standard(node.name):
            inner = self.match(node.child, conversion[1], path)
            return lambda make: update_in_place(target, build_standard(node.name, inner(make)))
        if target is not None and not self._is_plain(target):
            self.differ(path, "a plain value", target)
        create = self.create(node, path)
        if isinstance(target, list | dict):
            target = self._writable(target, node)
        return lambda make: self._update_by_library(target, create(make))

    def _update_by_library(self, target: Any, made: object) -> object:
        for adapter in self.adapters:
            if type(made) is type(target) and adapter.convert(target) is not None:
                adapter.copy_into(target, made)
                return target
        return update_in_place(target, made)

    def _convert(self, target: object) -> Conversion | None:
        try:
            return convert_leaf(target, (), self.adapters)
        except CkstoreError:
            return None

    def differ(self, path: Path, what: str, target: object) -> None:
        """Record that the state has another kind of object."""
        self.problems.append((path, f"is {what} in the checkpoint, {type(target).__qualname__} in the state"))

    def differ_in_keys(self, path: Path, missing: Sequence[Key], unexpected: Sequence[Key]) -> None:
        """Record the keys of one path that only the state or only the checkpoint has."""
        ours, theirs = [tuple((*path, key) for key in keys) for keys in (missing, unexpected)]
        self.differences.append(KeyDifference(path, ours, theirs))

    def is_chosen(self, path: Path) -> bool:
        """Say whether ``only=`` selects a leaf of the state."""
        return self.selection is None or self.selection.covers(path)

    def known_object(self, item: object) -> KnownObject | None:
        """Return what a library can predict about an object; None: nothing."""
        found = (adapter.object_of(item) for adapter in self.adapters)
        return next((known for known in found if known is not None), None)

    def _dict(self, node: DictNode, target: Any, path: Path) -> Step:
        if target is None:
            return self.create(node, path)
        if type(target) not in DICTS:
            self.differ(path, f"a {node.kind}", target)
            return self.create(node, path)
        writable = self._writable(target, node)
        # Keys are typed: 1, 1.0 and True are one key to Python, but different keys to a checkpoint.
        unmatched = {
            (type(stored := self.stored_key(key, path)), stored): (key, value) for key, value in target.items()
        }
        steps: list[tuple[Any, Step]] = []
        added: list[Path] = []
        for key, child in items_of(node):
            here = (*path, key)
            found = unmatched.pop((type(key), key), None)
            if found is not None:
                steps.append((found[0], self.match(child, found[1], here)))
            else:
                steps.append((key, self.create(child, here)))
                added.extend(_places_of(child, here))
        self._note_extras(path, [((*path, key), value) for (_, key), (_, value) in unmatched.items()], added)
        metadata = node.metadata
        if metadata is not None:
            self.created.update(tensors_of(metadata))
        is_whole = self.is_chosen(path)

        def fill(make: Make) -> object:
            # Store each item immediately: if a later object refuses its part, the error lists what was written.
            keys = distinct(make(key.node) if isinstance(key, OtherKey) else key for key, _ in steps)
            for key, (_, step) in zip(keys, steps, strict=True):
                writable[key] = step(make)
            result = writable
            if is_whole:
                made = new_dict(node)
                made.update({key: writable[key] for key in keys})
                result = update_dict(writable, made)
            if metadata is not None and isinstance(result, OrderedDict):
                result._metadata = make(metadata)  # type: ignore[attr-defined]
            _attach(result, node, make)
            return result

        return fill

    def stored_key(self, key: object, path: Path) -> Any:
        """Return a live key in its stored form; unchanged if it cannot be stored."""
        if type(key) is str and key.isascii():
            return key
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
            return lambda make: update_list(replaced, create(make))
        if type(target) is not kind:
            self.differ(path, f"a {kind.__name__}", target)
            return self.create(node, path)
        more = [((*path, index), target[index]) for index in range(len(node.children), len(target))]
        self._note_extras(path, more, [])
        writable = self._writable(target, node)
        steps = [
            self.match(child, target[index], (*path, index))
            if index < len(target)
            else self.create(child, (*path, index))
            for index, child in enumerate(node.children)
        ]
        return lambda make: update_list(writable, kind(step(make) for step in steps))

    def _writable(self, target: Any, node: Node) -> Any:
        first, its_node = self._containers.setdefault(id(target), (target, node))
        return first if its_node is node or its_node == node else copy.copy(target)

    def _note_extras(self, path: Path, items: Sequence[tuple[Path, object]], added: Sequence[Path]) -> None:
        """Record leaves that the checkpoint lacks, and the ones it has in the same container instead."""
        extras: list[Path] = []
        for here, item in items:
            self._list_extras(item, here, 0, extras)
        if extras:
            self.differences.append(KeyDifference(path, tuple(extras), tuple(added)))

    def _list_extras(self, item: Any, path: Path, depth: int, found: list[Path]) -> None:
        if isinstance(item, dict | list | tuple) and item and depth < DEPTH_MAX:
            pairs = item.items() if isinstance(item, dict) else enumerate(item)
            for key, value in pairs:
                self._list_extras(value, (*path, key), depth + 1, found)
        elif self.is_chosen(path):
            found.append(path)

    def fits(self, node: TensorNode, target: object, path: Path) -> bool:
        """Say whether the checkpoint's bytes can be written into a live tensor unchanged."""
        if self.layouts.fitting(node, target) is not None:
            return True
        leaf = self.layouts.describe(target, path)
        return leaf is not None and fits(self.tensors[node.tensor], leaf)

    def convert(self, node: TensorNode, target: object, leaf: TensorLeaf, path: Path) -> Step:
        """Let an object copy a tensor of another dtype or shape into one of its own tensors."""
        self._converted.append((node.tensor, Target.of(path, target, leaf, may_be_replaced=False)))
        return self.create_like(node, target, path)

    def match_tensor(
        self, node: Node, target: object, path: Path, *, owner: Path | None = None, may_be_replaced: bool = False
    ) -> Step:
        """Mark a live tensor to be overwritten.

        Args:
            node: The checkpoint's node at this path.
            target: The live tensor.
            path: Its path.
            owner: Path of the object that loads the tensor afterwards, if there is one.
            may_be_replaced: The owner takes over any tensor that it is given.
        """
        if not isinstance(node, TensorNode):
            self.differ(path, "a plain value", target)
            return self.create(node)
        found = self.layouts.fitting(node, target)
        if found is not None:
            return self._overwrite(node, Target(path, target, *found, may_be_replaced), owner)
        spec = self.tensors[node.tensor]
        try:
            leaf = self.layouts.checked(target, path)
        except LeafTypeError as error:
            self.problems.append((path, f"cannot be overwritten in the state: {error.what}"))
            self.remedies.setdefault(error.todo or "leave it out")
            return self.create(node)
        if leaf is None:
            if not self._is_plain(target) or isinstance(target, dict | list | tuple):
                self.differ(path, "a tensor", target)
            return self.create(node)
        if (leaf.library, leaf.dtype, leaf.shape) != (spec.library, spec.dtype, spec.shape):
            actual = f"{leaf.library} {leaf.dtype} {leaf.shape}"
            stored = f"{spec.library} {spec.dtype} {spec.shape}"
            self.problems.append((path, f"is {stored} in the checkpoint, {actual} in the state"))
        elif not leaf.is_writable:
            self.problems.append((path, "is read-only or a lazy conjugate in the state"))
        elif cannot_be_filled(spec, leaf):
            self.problems.append((path, "is a tensor in the state whose elements share memory"))
        return self._overwrite(node, Target.of(path, target, leaf, may_be_replaced), owner)

    def _overwrite(self, node: TensorNode, target: Target, owner: Path | None) -> Step:
        if owner is not None:
            self.progress.touch(owner)
        self.targets.setdefault(node.tensor, []).append(target)
        if node.attributes is None and not target.may_be_replaced:
            return target
        return lambda make: make(node) if target in self._replaced else _attach(target.item, node, make)

    def _is_plain(self, item: object) -> bool:
        if isinstance(item, list | tuple) and type(item) in (list, tuple):
            return all(self._is_plain(part) for part in item)
        if type(item) in DICTS:
            assert isinstance(item, dict)
            return all(self._is_plain(part) for part in item.values())
        if encode_plain(item) is not None or converter_for(type(item)) is not None:
            return True
        if any(adapter.encode_value(item, ()) is not None for adapter in self.adapters):
            return True
        conversion = self._convert(item)
        return conversion is not None and (
            library_of_conversion(conversion[0]) is not None or self._is_plain(conversion[1])
        )

    def check_ties(self) -> None:
        """Record live tensors that share memory differently from the checkpoint's tensors."""
        live = [(index, target) for index, targets in self.targets.items() for target in targets] + self._converted
        live = [pair for pair in live if pair[1].layout.memory.nbytes]
        if not _may_share_memory([target for _, target in live]):
            return
        live.sort(key=lambda pair: (pair[1].layout.memory.space, pair[1].start))
        running: list[tuple[int, Target]] = []
        for index, target in live:
            memory = target.layout.memory
            running = [
                pair
                for pair in running
                if pair[1].layout.memory.space == memory.space
                and pair[1].start + pair[1].layout.memory.nbytes > target.start
            ]
            others = [pair for pair in running if not self._is_tied_alike(index, target.leaf, pair[0], pair[1].leaf)]
            if not others:
                running.append((index, target))
            elif all(place.may_be_replaced and not self._is_shard(place) for _, place in [*others, (index, target)]):
                # Each gets a new tensor of its own.
                self._replace(others, target, index)
            else:
                place = next((other.path for _, other in others if not other.may_be_replaced), others[0][1].path)
                self.problems.append((target.path, f"shares memory with {place_of(place)} only in the state"))

    def _is_shard(self, target: Target) -> bool:
        return any(adapter.local_parts(target.item) is not None for adapter in self.adapters)

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


def _places_of(node: Node, path: Path) -> list[Path]:
    return [place for place, _ in leaves_of(node, path)] or [path]


def _may_share_memory(targets: Sequence[Target]) -> bool:
    """Say whether the address ranges of some targets overlap, in whatever address space they are."""
    starts = np.fromiter((target.start for target in targets), np.uint64, len(targets))
    ends = starts + np.fromiter((target.layout.memory.nbytes for target in targets), np.uint64, len(targets))
    order = np.argsort(starts)
    return bool((ends[order[:-1]] > starts[order[1:]]).any())


def _attach(target: object, node: DictNode | TensorNode, make: Make) -> object:
    """Set the stored Python attributes on a live tensor or dict, and return it."""
    if node.attributes is not None:
        # Not by setattr, which would run property setters.
        attributes: Any = make(node.attributes)
        getattr(target, "__dict__", {}).update(attributes)
    return target


def listed(places: Sequence[str]) -> str:
    """Return the first paths, and how many more there are."""
    named = ", ".join(places[:NAMED_MAX])
    return named if len(places) <= NAMED_MAX else f"{named} and {len(places) - NAMED_MAX} more"
