"""Match a checkpoint's tree with a live state, and report everything that does not fit before any byte is written.

Invariants:
- Matching changes nothing. Only the returned steps write, and they run after all bytes have been read.
- ``loading.py`` matches objects with ``load_state_dict``.
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
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Sequence
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
    format_path,
    items_of,
    leaves_of,
    library_of_conversion,
    new_dict,
    place_of,
    tensors_of,
)
from ckstore.state.capture import convert_leaf, has_state_dict, stored_key
from ckstore.state.loading import Progress, listed, match_object
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

_DICTS = (dict, OrderedDict, Counter, defaultdict)

_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DataParallel, DistributedDataParallel or AveragedModel",
    "model": "an object that holds the model as `model`",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "base_model": "PEFT",
}
"""What adds a part to the keys of a wrapped module, by that part."""

Make = Callable[[Node], object]
"""Builds a part of the checkpoint as a new object."""

Step = Callable[[Make], object]
"""Writes a part of the checkpoint into the live state, and returns the resulting object."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A live tensor to overwrite.

    Args:
        may_be_replaced: Its owner takes over any tensor that it is given.
    """

    path: Path
    item: object
    leaf: TensorLeaf
    may_be_replaced: bool


@dataclass(frozen=True, slots=True)
class Match:
    """How a checkpoint is written into a live state.

    Args:
        step: Run after all bytes are in place; returns the whole state.
        targets: The live tensors of each tensor of the checkpoint.
        created: Tensors to create, because some path of the live state has none.
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
    """Match every leaf of the tree with the live state.

    Args:
        tree: The selected part of the checkpoint's tree.
        tensors: The checkpoint's tensors.
        state: The live state; not changed.
        adapters: Libraries of tensors.
        selection: The selection made with ``only=``; None: everything.

    Raises:
        UsageError: Leaves, shapes, dtypes or shared memory differ between the state and the checkpoint.
    """
    matching = Matching(tensors, adapters, selection)
    step = matching.match(tree, state, ())
    matching.check_ties()
    matching.raise_problems()
    return Match(step, matching.targets, matching.created, matching.warnings)


class Matching:
    """One walk over a tree and a live state in parallel."""

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
        # The containers are stored with their ids: an id is only unique while its object is alive.
        self._containers: dict[int, tuple[object, Node]] = {}

    def match(self, node: Node, target: Any, path: Path) -> Step:
        """Match one node with the object at its path."""
        if has_state_dict(target) and converter_for(type(target)) is None and self.describe(target, path) is None:
            return match_object(self, node, target, path)
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
        self._differences.append(KeyDifference(path, ours, theirs))

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
        if type(target) not in _DICTS:
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
            if (type(key), key) in unmatched:
                live_key, value = unmatched.pop((type(key), key))
                steps.append((live_key, self.match(child, value, here)))
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
            self._differences.append(KeyDifference(path, tuple(extras), tuple(added)))

    def _list_extras(self, item: Any, path: Path, depth: int, found: list[Path]) -> None:
        if isinstance(item, dict | list | tuple) and item and depth < DEPTH_MAX:
            pairs = item.items() if isinstance(item, dict) else enumerate(item)
            for key, value in pairs:
                self._list_extras(value, (*path, key), depth + 1, found)
        elif self.is_chosen(path):
            found.append(path)

    def fits(self, node: TensorNode, target: object, path: Path) -> bool:
        """Say whether the checkpoint's bytes can be written into a live tensor unchanged."""
        spec, leaf = self.tensors[node.tensor], self.describe(target, path)
        return (
            leaf is not None
            and (leaf.library, leaf.dtype, leaf.shape) == (spec.library, spec.dtype, spec.shape)
            and leaf.is_writable
            and not _cannot_be_filled(spec, leaf)
        )

    def convert(self, node: TensorNode, target: object, leaf: TensorLeaf, path: Path) -> Step:
        """Let an object copy a tensor of another dtype or shape into one of its own tensors."""
        self._converted.append((node.tensor, Target(path, target, leaf, may_be_replaced=False)))
        return self.create(node)

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
            actual = f"{leaf.library} {leaf.dtype} {leaf.shape}"
            stored = f"{spec.library} {spec.dtype} {spec.shape}"
            self.problems.append((path, f"is {stored} in the checkpoint, {actual} in the state"))
        elif not leaf.is_writable:
            self.problems.append((path, "is read-only or a lazy conjugate in the state"))
        elif _cannot_be_filled(spec, leaf):
            self.problems.append((path, "is a tensor in the state whose elements share memory"))
        if owner is not None:
            self.progress.touch(owner)
        matched = Target(path, target, leaf, may_be_replaced)
        self.targets.setdefault(node.tensor, []).append(matched)
        return lambda make: make(node) if matched in self._replaced else _attach(target, node, make)

    def describe(self, item: object, path: Path) -> TensorLeaf | None:
        """Describe a tensor that can be overwritten; None: anything else."""
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
        conversion = self._convert(item)
        return conversion is not None and (
            library_of_conversion(conversion[0]) is not None or self._is_plain(conversion[1])
        )

    def check_ties(self) -> None:
        """Record live tensors that share memory differently from the checkpoint's tensors."""
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
                # Each gets a new tensor of its own.
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

    def raise_problems(self) -> None:
        """Raise the recorded differences as one error.

        Raises:
            UsageError: There are some.
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
                else "one leaf of the state does not fit the checkpoint",
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
    """Set the stored Python attributes on a live tensor or dict, and return it."""
    if node.attributes is not None:
        # Not by setattr, which would run property setters.
        attributes: Any = make(node.attributes)
        getattr(target, "__dict__", {}).update(attributes)
    return target


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


def describe_differences(found: Sequence[KeyDifference]) -> tuple[str, str, str]:
    """Return the parts of an error message: what differs, where, and what to do."""
    missing = [format_path(path) for each in found for path in each.missing]
    unexpected = [format_path(path) for each in found for path in each.unexpected]
    if missing:
        what = f"the state has {_leaves(missing)} that the checkpoint lacks"
        where = listed(missing)
        if unexpected:
            where += f"; the checkpoint has {len(unexpected)} that the state lacks: {listed(unexpected)}"
        todo = "remove them from the state, or select leaves with only="
    else:
        what = f"the checkpoint has {_leaves(unexpected)} that the state lacks"
        where = listed(unexpected)
        todo = "build the state as it was committed, or select leaves with only="
    advice = next((text for each in found if (text := _prefix_advice(each)) is not None), None)
    return what, where, advice or todo


def added_part(longer: Collection[str], shorter: Collection[str]) -> str | None:
    """Return the part, such as ``module.``, that turns all shorter keys into longer ones; None: no part does."""
    if not longer or not shorter:
        return None
    theirs, sample = set(longer), next(iter(shorter))
    for key in longer:
        prefix = key.removesuffix(sample)
        if prefix != key and prefix.endswith(".") and all(prefix + other in theirs for other in shorter):
            return prefix
    for word in _WRAPPERS:
        if {_without(key, word) for key in longer if word in key.split(".")} >= set(shorter):
            return f"{word}."
    return None


def _leaves(places: Sequence[str]) -> str:
    return "1 leaf" if len(places) == 1 else f"{len(places)} leaves"


def _without(key: str, word: str) -> str:
    return ".".join(part for part in key.split(".") if part != word)


def _prefix_advice(found: KeyDifference) -> str | None:
    ours = [format_path(path[len(found.path) :]) for path in found.missing]
    theirs = [format_path(path[len(found.path) :]) for path in found.unexpected]
    part, place = added_part(theirs, ours), format_path(found.path)
    if part is not None:
        keys = f"state[{place!r}]" if place else "state"
        return (
            f"the keys of the checkpoint have an extra {part!r}{_cause(part)}: restore into a model with the same "
            f"wrapper, or remove it from the keys: load_state_dict({{key.replace({part!r}, '', 1): value "
            f"for key, value in {keys}.items()}}) with state = store.restore()"
        )
    part = added_part(ours, theirs)
    if part is not None:
        inner = part.rstrip(".")
        return (
            f"the keys of the state have an extra {part!r}{_cause(part)}: restore into the wrapped model, "
            f"which is its attribute {inner!r}"
        )
    return None


def _cause(part: str) -> str:
    causes = [_WRAPPERS[word] for word in part.split(".") if word in _WRAPPERS]
    return f", from {' in '.join(causes)}" if causes else ""
