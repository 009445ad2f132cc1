"""Make the draft of a point from a captured state and noted steps; in the trainer.

A storage of the state is *owned* if an optimizer's step makes all of its bytes. Such bytes are not stored, but their
checksum is. The same holds for those that the user's own code makes after each step, also in a replay. Every other
storage is stored, unless it has the bytes that it had at the point before, or in the keyframe of the same state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from ckstore.errors import UsageError
from ckstore.format.logical import row_of
from ckstore.format.tree import DictNode, Node, Selection, TensorNode, encode_tree, place_of
from ckstore.journal.checksums import checksums_of, device_indices
from ckstore.journal.encoding import DraftGradient, DraftOptimizer, DraftStep, DraftStorage, PointDraft
from ckstore.journal.recorder import RecordedStep, node_of, owned_tensors, parameters_of
from ckstore.state.capture import Captured
from ckstore.state.memory import host_indices, shapes_of, starts_of


class Drafted(NamedTuple):
    """A draft, and the tensors and arrays whose bytes it needs, in the order of its indices.

    Args:
        draft: The draft.
        sources: torch tensors and numpy arrays.
        checksums: Of every storage that the steps do not make, by its path: what the next draft compares with.
        late: Storages whose checksums are still to be computed. The last source has room for them.
    """

    draft: PointDraft
    sources: list[Any]
    checksums: dict[str, int]
    late: Sequence[int] = ()


def draft_point(
    captured: Captured,
    steps: Sequence[RecordedStep],
    optimizers: Sequence[Any],
    *,
    before: Mapping[str, int] | None,
    metrics: Mapping[str, float],
    has_facts: bool,
    factors: Iterable[np.float32],
    thread_count: int,
    replayed: tuple[str, ...] = (),
    is_late: bool = False,
) -> Drafted:
    """Return the draft of a point.

    Args:
        captured: The state.
        steps: The steps since the point before.
        optimizers: The optimizers of the journal.
        before: Checksums of the point before, from its ``Drafted``: what has them is not stored again. None: nothing is
            stored that is not owned, because the keyframe of this record has it.
        metrics: Numbers to find the point by.
        has_facts: Whether to say how the optimizers are made again.
        factors: Factors that gradients may have been multiplied by.
        thread_count: Threads that compute checksums.
        replayed: Globs over the paths of what the user's own code makes after each step.
        is_late: Leave the checksums of what the optimizers own to the caller, in memory of the host and of torch.
    """
    owned = owned_storages(captured, optimizers)
    in_memory = {*host_indices(captured.storages, owned), *(owned & device_indices(captured))}
    late = sorted(in_memory) if is_late else []
    checksums = _checksums_without(late, captured, thread_count)
    sources: list[Any] = []
    made = owned | _replayed_storages(captured, replayed)
    storages, rest = _drafted_storages(captured, made, checksums, before, sources)
    drafted_steps = [_drafted_step(step, sources) for step in steps]
    if late:
        sources.append(np.zeros(len(late), np.uint64))
    draft = PointDraft(
        metrics=dict(metrics),
        tree=encode_tree(captured.tree),
        tensors=[row_of(tensor) for tensor in captured.tensors],
        storages=storages,
        steps=drafted_steps,
        optimizers=[facts_of(each, captured) for each in optimizers] if has_facts else None,
        factors=[np.float32(factor).tobytes() for factor in factors],
        environment={},
        arrays=[],
        late=tuple(late),
    )
    return Drafted(draft, sources, rest, late)


def _drafted_storages(
    captured: Captured,
    made: Set[int],
    checksums: Mapping[int, int],
    before: Mapping[str, int] | None,
    sources: list[Any],
) -> tuple[list[DraftStorage], dict[str, int]]:
    """Return the rows of all storages, and the checksums of those that are not made again. Add what is stored."""
    storages: list[DraftStorage] = []
    rest: dict[str, int] = {}
    paths, on_device = storage_paths(captured), device_indices(captured)
    # The trainer waits for this: the storages of which only the shape is needed are not created.
    for index, shape in enumerate(shapes_of(captured.storages)):
        facts = shape.nbytes, (checksum := checksums[index]), shape.element_width, shape.is_float
        is_word_sum = index in on_device
        if index in made:
            storages.append(DraftStorage(*facts, "steps", None, is_word_sum))
            continue
        rest[paths[index]] = checksum
        if before is None or before.get(paths[index]) == checksum:
            storages.append(DraftStorage(*facts, "before", None, is_word_sum))
        else:
            storages.append(DraftStorage(*facts, "blob", len(sources), is_word_sum))
            sources.append(np.frombuffer(captured.storages[index].read(0, shape.nbytes), np.uint8))
    return storages, rest


def _checksums_without(late: Sequence[int], captured: Captured, thread_count: int) -> dict[int, int]:
    now = sorted(set(range(len(captured.storages))).difference(late))
    found = checksums_of(captured, now, thread_count=thread_count)
    return dict.fromkeys(late, 0) | dict(zip(now, found, strict=True))


def storage_paths(captured: Captured) -> list[str]:
    """Return the path of the first tensor of each storage."""
    return captured.structure.once("paths of storages", lambda: _storage_paths(captured))


def _storage_paths(captured: Captured) -> list[str]:
    paths = [""] * len(captured.storages)
    for path, tensor in zip(captured.paths, captured.tensors, strict=True):
        if not paths[tensor.storage]:
            paths[tensor.storage] = place_of(path)
    return paths


def owned_storages(captured: Captured, optimizers: Sequence[Any]) -> set[int]:
    """Return the indices of the storages all of whose tensors are parameters or state of the optimizers.

    Raises:
        UsageError: A tensor of an optimizer is not in the state.
    """
    tensors = [tensor for optimizer in optimizers for tensor in owned_tensors(optimizer)]
    missing = {tensor.data_ptr(): tuple(tensor.shape) for tensor in tensors if tensor.numel()}
    addresses = frozenset(missing)
    owned: set[int] = set()
    others: set[int] = set()
    for tensor, address in zip(captured.tensors, _addresses_of(captured), strict=True):
        missing.pop(address, None)
        (owned if address in addresses else others).add(tensor.storage)
    if missing:
        raise UsageError(
            f"the state lacks a tensor of shape {next(iter(missing.values()))} that an optimizer of the journal owns, "
            "so its steps could not be replayed",
            todo="commit and restore the model and the optimizer together, or open the store without a journal",
        )
    return owned - others


def _replayed_storages(captured: Captured, patterns: tuple[str, ...]) -> frozenset[int]:
    """Return the indices of the storages all of whose tensors have paths that a pattern matches."""

    def find() -> frozenset[int]:
        selection = Selection(patterns, captured.tree)
        matching = list(map(selection.covers, captured.paths))
        others = {tensor.storage for tensor, is_chosen in zip(captured.tensors, matching, strict=True) if not is_chosen}
        return frozenset(range(len(captured.storages))) - others

    return captured.structure.once(("replayed", patterns), find) if patterns else frozenset()


def _addresses_of(captured: Captured) -> list[int]:
    """Return the address of each tensor."""
    starts = starts_of(captured.storages)
    return [starts[tensor.storage] + tensor.offset for tensor in captured.tensors]


def facts_of(optimizer: Any, captured: Captured) -> DraftOptimizer:
    """Return what makes an optimizer again."""
    # The first tensor of those with the same place. Views of other shapes may begin where a parameter does.
    places = zip(_addresses_of(captured), (tensor.shape for tensor in captured.tensors), strict=True)
    index_of = {place: index for index, place in reversed(list(enumerate(places)))}
    kind = type(optimizer)
    defaults = {name: _argument_of(optimizer, name, index_of) for name in optimizer.defaults}
    plain = {name: node for name, node in defaults.items() if node is not None}
    groups = [[index_of.get(_place_of(each), 0) for each in group["params"]] for group in optimizer.param_groups]
    state = []
    for parameter in parameters_of(optimizer):
        found = optimizer.state.get(parameter, {})
        tensors = {name: value for name, value in found.items() if hasattr(value, "data_ptr")}
        state.append({name: index_of[_place_of(value)] for name, value in tensors.items()})
    tree = encode_tree(DictNode("dict", tuple(plain), tuple(plain.values())))
    return DraftOptimizer(f"{kind.__module__}.{kind.__qualname__}", tree, groups, state)


_Place = tuple[int, tuple[int, ...]]


def _place_of(tensor: Any) -> _Place:
    return tensor.data_ptr(), tuple(tensor.shape)


def _argument_of(optimizer: Any, name: str, index_of: Mapping[_Place, int]) -> Node | None:
    """Return the node of an argument of an optimizer: for a tensor, where the state has one like it."""
    value = optimizer.defaults[name]
    # ``load_state_dict`` gives the groups tensors of their own.
    for each in (value, *(group.get(name) for group in optimizer.param_groups)):
        if hasattr(each, "data_ptr") and _place_of(each) in index_of:
            return TensorNode(index_of[_place_of(each)])
    return node_of(value)


def state_sizes(optimizers: Iterable[Any]) -> list[int]:
    """Return how much state each optimizer has. When that changes, ``facts_of`` do."""
    return [sum(map(len, optimizer.state.values())) for optimizer in optimizers]


def _drafted_step(step: RecordedStep, sources: list[Any]) -> DraftStep:
    gradients = []
    for reference in step.gradients:
        tensor = reference.tensor
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        indices = None
        if tensor.is_sparse:
            sources += [tensor._values().contiguous(), tensor._indices().contiguous()]
            values, indices = len(sources) - 2, len(sources) - 1
        else:
            sources.append(tensor.contiguous())
            values = len(sources) - 1
        sparse_dims = tensor.sparse_dim() if tensor.is_sparse else 0
        gradients.append(DraftGradient(reference.parameter, dtype, shape, values, indices, sparse_dims))
    return DraftStep(step.optimizer, encode_tree(step.groups), gradients)
