"""Load a part of a checkpoint into an object with ``load_state_dict``, and report what was written if that fails.

Invariants:
- The effect is the same as one call of ``load_state_dict`` with the restored values. The object's ``state_dict`` is
  not called: it may change the object, and its result may share memory with the values to load.
- Tensors of a module or optimizer are written in place before loading only if its library guarantees that loading
  only copies (``KnownObject.copyable_state``).
- Matching changes nothing. If an object fails while it loads, the error lists what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckstore.errors import CkstoreError, UsageError
from ckstore.format.tree import (
    ConvertedNode,
    DictNode,
    Key,
    ListNode,
    Node,
    OtherKey,
    Path,
    TensorNode,
    TupleNode,
    ValueNode,
    items_of,
    library_of,
    new_dict,
    place_of,
    tensors_of,
)
from ckstore.state.standard_types import COUNT, unpack_numbers
from ckstore.state.train_state import NamedOptimizer, TrainState
from ckstore.state.values import decode_plain

if TYPE_CHECKING:
    from ckstore.state.matching import Make, Matching, Step
    from ckstore.state.tensors import KnownObject


NAMED_MAX = 5
"""Most paths that a message lists."""


@dataclass(slots=True)
class Unit:
    """A leaf or an object of the live state, for messages."""

    place: str
    is_written: bool = False


class Progress:
    """Which parts of a live state have been written."""

    def __init__(self) -> None:
        self._units: dict[Path, Unit] = {}
        self._touched: set[Path] = set()

    def add(self, path: Path, *, is_written: bool = False) -> None:
        """Record a leaf or an object to write; ``is_written`` if it is complete before any object loads."""
        self._units.setdefault(path, Unit(place_of(path), is_written))

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
            self._units[path].is_written = True
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
        self._units[path].is_written = True

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
        units = {here: unit for here, unit in self._units.items() if here != path}
        written = tuple(unit.place for unit in units.values() if unit.is_written)
        partly = tuple(unit.place for here, unit in units.items() if not unit.is_written and here in self._touched)
        rest = tuple(unit.place for here, unit in units.items() if not unit.is_written and here not in self._touched)
        summary = [
            f"already written: {listed(written)}" if written else "nothing else was loaded",
            *([f"partly written: {listed(partly)}"] if partly else []),
            *([f"unchanged: {listed(rest)}"] if rest else []),
        ]
        return {"path": path, "written": written, "partly_written": partly, "not_written": rest}, summary


def match_object(matching: Matching, node: Node, target: Any, path: Path) -> Step:
    """Match a part of the checkpoint with an object that has ``load_state_dict``."""
    if type(target) is TrainState:
        return _train_state(matching, node, target, path)
    is_named = isinstance(target, NamedOptimizer)
    known = matching.known_object(target.optimizer if is_named else target)
    live = None if known is None else known.copyable_state()
    if is_named and live is not None:
        live = target.named(live)
    loadable = _loadable_preview(matching, node, target, path) if known is not None or is_named else None
    if loadable is None and (live is not None or is_named):
        matching.differ(path, "not the state of such an object", target)
        return matching.create(node, path)
    if known is not None and loadable is not None and (live is not None or known.kind == "optimizer"):
        matching.problems.extend(((*path, *place), text) for place, text in known.mismatches(loadable))
    if known is None or live is None or not isinstance(node, DictNode):
        return _load_restored(matching, node, target, path, known)
    if known.kind == "module":
        return _module(matching, node, target, path, known, live)
    return _optimizer(matching, node, target, path, known, live)


def _loadable_preview(matching: Matching, node: Node, target: Any, path: Path) -> Mapping[Any, Any] | None:
    """Return the state to load with tensor specs in place of tensors; None: it is not a dict."""
    if not isinstance(node, DictNode):
        return None
    preview: dict[Any, Any] = _preview(matching, node)
    # Without selected groups, the optimizer keeps its own.
    if isinstance(target, NamedOptimizer) and "param_groups" in preview:
        try:
            return target.numbered(preview, is_whole=False)
        except (KeyError, TypeError, AttributeError):
            return None
        except UsageError as error:
            matching.problems.append((path, f"does not fit: {error}"))
            return {}
    return preview


def _load_restored(matching: Matching, node: Node, target: Any, path: Path, known: KnownObject | None) -> Step:
    """Pass the restored values to an object, and write nothing before."""
    matching.created.update(tensors_of(node))
    matching.progress.add(path)

    def load(make: Make) -> object:
        _load(matching, target, matching.progress.make(path, lambda: make(node)), path, known)
        return target

    return load


def _load(matching: Matching, target: Any, values: Any, path: Path, known: KnownObject | None) -> None:
    # Read the dtypes first: the object may modify the values while it loads them.
    dtypes = list(_dtypes(matching, values, path)) if known is not None else []
    kind = type(target.optimizer if isinstance(target, NamedOptimizer) else target).__qualname__
    matching.progress.load(path, f"load_state_dict of {kind}", lambda: target.load_state_dict(values))
    if known is None:
        return
    now = known.current_tensors()
    named = target.named(now) if isinstance(target, NamedOptimizer) else now
    after = dict(_dtypes(matching, named, path))
    matching.warnings.extend(
        f"load_state_dict of {kind} changed {place_of(place)} from {dtype} to {after[place]}."
        for place, dtype in dtypes
        if after.get(place, dtype) != dtype
    )


def _dtypes(matching: Matching, part: object, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from _dtypes(matching, value, (*path, key))
    elif isinstance(part, list | tuple):
        for index, value in enumerate(part):
            yield from _dtypes(matching, value, (*path, index))
    else:
        leaf = matching.describe(part, path)
        if leaf is not None:
            yield path, leaf.dtype


def _module(
    matching: Matching, node: DictNode, target: Any, path: Path, known: KnownObject, live: Mapping[Any, Any]
) -> Step:
    unexpected = [key for key in node.keys if key not in live]
    theirs = set(node.keys)
    missing = [key for key in live if key not in theirs and matching.is_chosen((*path, key))]
    if missing and not unexpected and all(str(key).endswith("num_batches_tracked") for key in missing):
        # Checkpoints of old torch versions lack this buffer of norms; torch handles that.
        return _load_restored(matching, node, target, path, known)
    if missing or unexpected:
        matching.differ_in_keys(path, missing, unexpected)
        return matching.create(node, path)
    matching.progress.add(path)
    steps = [(key, _module_tensor(matching, child, live[key], (*path, key), path)) for key, child in items_of(node)]
    rest = {key: value for key, value in live.items() if key not in theirs}
    if node.metadata is not None:
        matching.created.update(tensors_of(node.metadata))

    def load(make: Make) -> object:
        values = matching.progress.make(path, lambda: _filled(node, steps, rest, make))
        if node.metadata is not None:
            values._metadata = make(node.metadata)
        _load(matching, target, values, path, known)
        return target

    return load


def _module_tensor(matching: Matching, node: Node, target: object, path: Path, owner: Path) -> Step:
    leaf = matching.describe(target, path)
    if isinstance(node, TensorNode) and leaf is not None:
        spec = matching.tensors[node.tensor]
        # The module converts it while loading, and a warning is given. Old checkpoints store a scalar as shape (1,).
        is_converted = spec.dtype != leaf.dtype and spec.shape == leaf.shape
        if spec.library == leaf.library and (is_converted or (spec.shape == (1,) and leaf.shape == ())):
            return matching.convert(node, target, leaf, path)
    return matching.match_tensor(node, target, path, owner=owner)


def _optimizer(
    matching: Matching, node: DictNode, target: Any, path: Path, known: KnownObject, live: Mapping[Any, Any]
) -> Step:
    matching.progress.add(path)
    steps: list[tuple[Key, Step]] = []
    for key, child in items_of(node):
        # The optimizer copies the content of groups, and their tensors may be shared: a learning rate, for example.
        is_state = key == "state"
        step = (
            _reuse_tensors(matching, child, live.get(key), (*path, key), path, known)
            if is_state
            else matching.create(child)
        )
        steps.append((key, step))
    rest = {key: value for key, value in live.items() if key not in node.keys and not matching.is_chosen((*path, key))}

    def load(make: Make) -> object:
        values = matching.progress.make(path, lambda: _filled(node, steps, rest, make))
        _load(matching, target, values, path, known)
        return target

    return load


def _reuse_tensors(matching: Matching, node: Node, live: object, path: Path, owner: Path, known: KnownObject) -> Step:
    """Build nested state, reusing live tensors that match the checkpoint's; leave out what the checkpoint lacks."""
    if isinstance(node, DictNode) and isinstance(live, dict):
        steps = [
            (key, _reuse_tensors(matching, child, live.get(key), (*path, key), owner, known))
            for key, child in items_of(node)
        ]
        theirs = set(node.keys)
        stored = {key: matching.stored_key(key, path) for key in live}
        rest = {
            key: value
            for key, value in live.items()
            if stored[key] not in theirs and not matching.is_chosen((*path, stored[key]))
        }

        return lambda make: _filled(node, steps, rest, make)
    if isinstance(node, ListNode | TupleNode) and type(live) is (list if isinstance(node, ListNode) else tuple):
        items: Any = live
        parts = [
            _reuse_tensors(matching, child, items[index] if index < len(items) else None, (*path, index), owner, known)
            for index, child in enumerate(node.children)
        ]
        if isinstance(node, ListNode):
            return lambda make: [part(make) for part in parts]
        return lambda make: tuple(part(make) for part in parts)
    if isinstance(node, TensorNode) and known.owns(live) and matching.fits(node, live, path):
        return matching.match_tensor(node, live, path, owner=owner, may_be_replaced=True)
    return matching.create(node)


def _filled(
    node: DictNode, steps: Sequence[tuple[Key, Step]], rest: Mapping[Any, object], make: Make
) -> dict[Any, Any]:
    made = new_dict(node)
    made.update({make(key.node) if isinstance(key, OtherKey) else key: step(make) for key, step in steps})
    made.update(rest)
    return made


def _train_state(matching: Matching, node: Node, target: TrainState, path: Path) -> Step:
    parts = target.parts()
    step = matching.match(node, parts, path)

    def fill(make: Make) -> object:
        step(make)
        target.take(parts)
        return target

    return fill


def _preview(matching: Matching, node: Node) -> Any:
    """Return the state with specs in place of tensors, and None for values that only their library can build."""
    if isinstance(node, TensorNode):
        return matching.tensors[node.tensor]
    if isinstance(node, ValueNode):
        return decode_plain(node) if library_of(node.type) is None else None
    if isinstance(node, ConvertedNode):
        # The parameter numbers of a large optimizer are stored as a count.
        return unpack_numbers(node.name, _preview(matching, node.child)) if node.name.startswith(COUNT) else None
    if isinstance(node, DictNode):
        return {key: _preview(matching, child) for key, child in items_of(node)}
    items = (_preview(matching, child) for child in node.children)
    return list(items) if isinstance(node, ListNode) else tuple(items)


def listed(places: Sequence[str]) -> str:
    """Return the first paths, and how many more there are."""
    named = ", ".join(places[:NAMED_MAX])
    return named if len(places) <= NAMED_MAX else f"{named} and {len(places) - NAMED_MAX} more"
