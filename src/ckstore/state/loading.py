"""Match a checkpoint with a live state, and load parts of it into objects with ``load_state_dict``.

``match_state`` is the entry. It reports everything that does not fit before any byte is written. ``matching.py`` walks
over tree and state, and calls ``match_object`` for objects with ``load_state_dict``.

Invariants:
- The effect is the same as one call of ``load_state_dict`` with the restored values. The object's ``state_dict`` is
  not called: it may change the object, and its result may share memory with the values to load.
- Tensors of a module or optimizer are written in place before loading only if its library guarantees that loading
  only copies (``KnownObject.copyable_state``).
- Matching changes nothing. If an object fails while it loads, the error lists what was written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckstore.errors import UsageError
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import (
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
    ValueNode,
    format_path,
    items_of,
    library_of,
    new_dict,
    place_of,
    tensors_of,
)
from ckstore.state.live_layouts import LiveLayouts
from ckstore.state.matching import KeyDifference, Make, Matching, Step, Target, listed
from ckstore.state.standard_types import COUNT, unpack_numbers
from ckstore.state.tensors import KnownObject, LeafAdapter
from ckstore.state.train_state import NamedOptimizer, TrainState
from ckstore.state.values import decode_plain

_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DataParallel, DistributedDataParallel or AveragedModel",
    "model": "an object that holds the model as `model`",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "base_model": "PEFT",
}
"""What adds a part to the keys of a wrapped module, by that part."""


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
    matching = Matching(tensors, adapters, selection, match_object)
    matching.layouts.describe_together(state)
    step = matching.match(tree, state, ())
    matching.check_ties()
    _raise_problems(matching)
    return Match(step, matching.targets, matching.created, matching.warnings)


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
    matching.progress.add(path)
    step = _new_values(matching, node, target, path, known)

    def load(make: Make) -> object:
        _load(matching, target, matching.progress.make(path, lambda: step(make)), path, known)
        return target

    return load


def _new_values(matching: Matching, node: Node, target: Any, path: Path, known: KnownObject | None) -> Step:
    """Create values for an object to load: shards where it has shards."""
    if not matching.takes_shards or not tensors_of(node):
        return matching.create(node)
    if known is None:
        # Only the object knows how its state is distributed.
        return _create_like(matching, node, target.state_dict(), None, path)
    live, parameters = known.current_tensors(), known.parameters()
    if isinstance(target, NamedOptimizer):
        live, parameters = target.named(live), target.named(parameters)
    return _create_like(matching, node, live, parameters, path)


def _create_like(matching: Matching, node: Node, live: Any, parameter: Any, path: Path) -> Step:
    """Create nested state, with shards where the live state has some, or else the parameter that it is about."""
    if isinstance(node, DictNode) and node.attributes is None:
        steps = [
            (key, _create_like(matching, child, _item(live, key), _item(parameter, key, parameter), (*path, key)))
            for key, child in items_of(node)
        ]
        matching.created.update(tensors_of(node.metadata) if node.metadata is not None else ())

        def fill(make: Make) -> object:
            made = _filled(node, steps, {}, make)
            if node.metadata is not None:
                made._metadata = make(node.metadata)  # type: ignore[attr-defined]
            return made

        return fill
    if isinstance(node, ListNode | TupleNode):
        kind = list if isinstance(node, ListNode) else tuple
        parts = [
            _create_like(matching, child, _item(live, index), _item(parameter, index, parameter), (*path, index))
            for index, child in enumerate(node.children)
        ]
        return lambda make: kind(part(make) for part in parts)
    return matching.create_like(node, parameter if live is None else live, path)


def _item(part: Any, key: Any, otherwise: object = None) -> Any:
    """Return an item of a container; None if it lacks it; ``otherwise`` if it is no container."""
    if isinstance(part, Mapping):
        return part.get(key)
    if isinstance(part, list | tuple):
        return part[key] if type(key) is int and key < len(part) else None
    return otherwise


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


def _dtypes(matching: Matching, values: object, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the dtypes of all tensors."""
    # Not those of the matching: an object may give the same tensor another dtype.
    layouts = LiveLayouts((), matching.adapters)
    layouts.describe_together(values)
    for place, item in _items_below(values, path):
        leaf = layouts.layout_of(item, place)
        if leaf is not None:
            yield place, leaf.dtype


def _items_below(part: object, path: Path) -> Iterator[tuple[Path, object]]:
    if isinstance(part, Mapping | list | tuple):
        for key, value in part.items() if isinstance(part, Mapping) else enumerate(part):
            yield from _items_below(value, (*path, key))
    else:
        yield path, part


def _module(
    matching: Matching, node: DictNode, target: Any, path: Path, known: KnownObject, live: Mapping[Any, Any]
) -> Step:
    unexpected = [key for key in node.keys if key not in live]
    theirs = set(node.keys)
    matching.layouts.describe_together(live)
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
    is_fitting = matching.layouts.fitting(node, target) is not None
    leaf = None if is_fitting else matching.layouts.describe(target, path)
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
    matching.layouts.describe_together(live.get("state"))
    parameters = known.parameters()
    if isinstance(target, NamedOptimizer):
        parameters = target.named(parameters)
    like = _Like(path, known, parameters["state"])
    steps: list[tuple[Key, Step]] = []
    for key, child in items_of(node):
        # The optimizer copies the content of groups, and their tensors may be shared: a learning rate, for example.
        is_state = key == "state"
        step = (
            _reuse_tensors(matching, child, live.get(key), (*path, key), like) if is_state else matching.create(child)
        )
        steps.append((key, step))
    rest = {key: value for key, value in live.items() if key not in node.keys and not matching.is_chosen((*path, key))}

    def load(make: Make) -> object:
        values = matching.progress.make(path, lambda: _filled(node, steps, rest, make))
        _load(matching, target, values, path, known)
        return target

    return load


@dataclass(frozen=True, slots=True)
class _Like:
    """What tensors of an optimizer's state belong to.

    Args:
        owner: Path of the optimizer.
        known: What is known about it.
        parameter: The parameter, or all parameters by key.
    """

    owner: Path
    known: KnownObject
    parameter: Any

    def item(self, key: Key) -> _Like:
        """Return the same for one entry of the state."""
        return replace(self, parameter=_item(self.parameter, key, self.parameter))


def _reuse_tensors(matching: Matching, node: Node, live: object, path: Path, like: _Like) -> Step:
    """Build nested state, reusing live tensors that match the checkpoint's; leave out what the checkpoint lacks."""
    if isinstance(node, DictNode) and isinstance(live, dict):
        steps = [
            (key, _reuse_tensors(matching, child, live.get(key), (*path, key), like.item(key)))
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
            _reuse_tensors(matching, child, items[index] if index < len(items) else None, (*path, index), like)
            for index, child in enumerate(node.children)
        ]
        if isinstance(node, ListNode):
            return lambda make: [part(make) for part in parts]
        return lambda make: tuple(part(make) for part in parts)
    if isinstance(node, TensorNode) and like.known.owns(live) and matching.fits(node, live, path):
        return matching.match_tensor(node, live, path, owner=like.owner, may_be_replaced=True)
    if matching.takes_shards and isinstance(node, DictNode | ListNode | TupleNode):
        # The live state has no such entry: it is that of an optimizer that has made no step yet.
        return _create_like(matching, node, live, like.parameter, path)
    return matching.create_like(node, like.parameter if live is None else live, path)


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


def _raise_problems(matching: Matching) -> None:
    """Raise the recorded differences as one error.

    Raises:
        UsageError: There are some.
    """
    if matching.differences:
        what, where, todo = describe_differences(matching.differences)
        paths = tuple(path for each in matching.differences for path in each.missing or each.unexpected)
        raise UsageError(what, where=where, todo=f"{todo}. Nothing was written", paths=paths)
    if matching.problems:
        count, same = len(matching.problems), "a state of the same structure, shapes and dtypes"
        raise UsageError(
            f"{count} leaves of the state do not fit the checkpoint"
            if count > 1
            else "one leaf of the state does not fit the checkpoint",
            where=listed([f"{place_of(path)} {why}" for path, why in matching.problems]),
            todo="; ".join([*matching.remedies, f"restore without into=, or into {same}. Nothing was written"]),
            paths=tuple(path for path, _ in matching.problems),
        )


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
