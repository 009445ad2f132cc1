"""Restore a point: bring its keyframe into place, replay the steps, prove what they made, and bring in the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from ckstore.concurrency import map_in_threads
from ckstore.errors import CkstoreError, NotFoundError, ReplayError, UnsupportedError, UsageError
from ckstore.format.points import Point, Step
from ckstore.format.tensors import StorageSpec
from ckstore.format.tree import TensorNode, leaves_of, place_of
from ckstore.format.wire import xxh3_64
from ckstore.journal.blobs import BlobReader
from ckstore.journal.drafting import checksums_of, owned_storages, storage_paths
from ckstore.journal.gradients import load_gradient
from ckstore.journal.replay import LoadedGradient, kept_gradients, loaded, made_again, replay_step
from ckstore.state.capture import Captured, capture
from ckstore.state.environment import differences, environment_of
from ckstore.state.placement import prepare_restore
from ckstore.state.tensors import LeafAdapter

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Record = TypeVar("_Record")
ReplayCheck = Literal["each", "last"]
"""After which steps the checksums are compared: each, or the last."""


@dataclass(frozen=True, slots=True)
class StoredPoint:
    """A record of a journal that was read.

    Args:
        number: Its number in the chain.
        step: The trainer's step.
        point: Its content.
        blobs: Its bytes.
        environment: What its segment says about where it was written.
    """

    number: int
    step: int
    point: Point
    blobs: BlobReader
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Replay:
    """How a point is restored.

    Args:
        into: The live state; None: make a new one.
        optimizers: The user's optimizers, in the order of the journal; None: make torch's own again.
        check: When checksums are compared.
        after_step: Called with each step of the trainer that was replayed, for what the loop updates itself.
        thread_count: Threads that compute checksums.
    """

    into: Any
    optimizers: Sequence[Any] | None
    check: ReplayCheck
    after_step: Callable[[int], object] | None
    thread_count: int


class _LoadedPoint(NamedTuple):
    stored: StoredPoint
    gradients: list[list[LoadedGradient]]
    """For each step of the point."""


def restore_point(
    replay: Replay,
    keyframe: StoredPoint,
    points: Iterable[_Record],
    base: Any,
    adapters: Sequence[LeafAdapter],
    load: Callable[[_Record], StoredPoint],
) -> Any:
    """Return the state of the last point.

    Args:
        replay: How to restore.
        keyframe: The record of the keyframe.
        points: The records after it, up to the one to restore.
        base: The restored keyframe: ``replay.into`` if that is not None.
        adapters: Adapters of tensor libraries.
        load: Reads a record. On another thread: the next records are read and decoded while the optimizer works.

    Raises:
        ReplayError: The keyframe is not the state of its record, or a replayed step has given other bytes.
        CorruptError: A record is damaged.
        UsageError: The optimizers do not fit.
    """
    live = _Live(base, replay, adapters)
    live.require(keyframe, "before the first replayed step")
    rest: dict[str, Callable[[], NDArray[np.uint8]]] = {}
    _note_rest(keyframe, rest)
    optimizers = live.optimizers_of(keyframe) if replay.optimizers is None else live.with_state(replay.optimizers)
    live.environment = environment_of(optimizers)
    last = keyframe

    def load_whole(record: _Record) -> _LoadedPoint:
        stored = load(record)
        steps = stored.point.steps
        return _LoadedPoint(
            stored, [[loaded(load_gradient(each, stored.blobs)) for each in step.gradients] for step in steps]
        )

    loading = map_in_threads(load_whole, points, count_max=1, name="ckstore-journal")
    with kept_gradients(optimizers), closing(loading):
        for stored, gradients in loading:
            for step, seen in zip(stored.point.steps, gradients, strict=True):
                if step.optimizer >= len(optimizers):
                    raise _other_optimizers(len(optimizers), step.optimizer)
                _replay(optimizers[step.optimizer], step, seen, is_made_again=replay.optimizers is None)
            if replay.after_step is not None:
                replay.after_step(stored.step)
            if replay.check == "each":
                live.require(stored, f"after the replayed step {stored.step}")
            _note_rest(stored, rest)
            last = stored
    if replay.check == "last":
        live.require(last, f"after the replayed step {last.step}")
    return live.finish(last, rest)


def _replay(optimizer: Any, step: Step, gradients: Sequence[LoadedGradient], *, is_made_again: bool) -> None:
    try:
        replay_step(optimizer, step.groups, gradients)
    except CkstoreError:
        raise
    except Exception as error:
        if not is_made_again:
            raise
        # The journal has the tensors of its state only; SparseAdam counts its steps in a number.
        raise UnsupportedError(
            f"a {type(optimizer).__name__} cannot be made again from the journal "
            f"(its step has raised {type(error).__name__}: {error})",
            todo="call store.journal(optimizer) and then restore(into=state): then your own optimizer is called",
        ) from error


def _other_optimizers(count: int, index: int) -> CkstoreError:
    return UsageError(
        f"the journal has steps of optimizer {index}, and there are {count} optimizers here",
        todo="call store.journal with all optimizers of the run, in the same order",
    )


def _note_rest(stored: StoredPoint, rest: dict[str, Callable[[], NDArray[np.uint8]]]) -> None:
    """Note for each storage that a record stores how to read it. It holds until a later record stores it again."""
    paths = paths_of(stored.point)
    for path, storage in zip(paths, stored.point.storages, strict=True):
        if storage.span is not None:
            span, blobs = storage.span, stored.blobs
            rest[path] = lambda span=span, blobs=blobs: blobs.bytes_of(span)  # type: ignore[misc]


def paths_of(point: Point) -> list[str]:
    """Return the path of the first tensor of each storage of a point."""
    paths = [""] * len(point.storages)
    for path, node in leaves_of(point.tree):
        if isinstance(node, TensorNode):
            storage = point.tensors[node.tensor].storage
            paths[storage] = paths[storage] or place_of(path)
    return paths


class _Live:
    """The state in memory while steps are replayed."""

    def __init__(self, base: Any, replay: Replay, adapters: Sequence[LeafAdapter]) -> None:
        self._base = base
        self._replay = replay
        self._adapters = adapters
        self.environment: Mapping[str, str] = {}
        """Facts of this process, noted before the first step is replayed."""

    def _captured(self) -> Captured:
        return capture(self._base, self._adapters)

    def require(self, stored: StoredPoint, when: str) -> None:
        """Compare what the steps have made with a record.

        Raises:
            ReplayError: A storage has other bytes, or is not there.
        """
        captured = self._captured()
        found = dict(
            zip(storage_paths(captured), checksums_of(captured, thread_count=self._replay.thread_count), strict=True)
        )
        for path, storage in zip(paths_of(stored.point), stored.point.storages, strict=True):
            if storage.source == "steps" and found.get(path) != storage.xxh3:
                raise self._differs(path, when, stored, is_missing=path not in found)

    def _differs(self, path: str, when: str, stored: StoredPoint, *, is_missing: bool) -> ReplayError:
        facts = differences(stored.environment, self.environment or environment_of(()))
        what = "is not in the state" if is_missing else "has other bytes than the run had"
        return ReplayError(
            f"{path} {what} {when} ({facts})",
            todo="restore where these facts are as they were, or restore an earlier step or the keyframe",
            path=path,
            number=stored.number,
            step=stored.step,
        )

    def with_state(self, optimizers: Sequence[Any]) -> Sequence[Any]:
        """Return the user's optimizers, after checking that they are those of the state that is being restored.

        Raises:
            UsageError: One of them owns a tensor elsewhere, which a replayed step would change.
        """
        owned_storages(self._captured(), optimizers)
        return optimizers

    def optimizers_of(self, keyframe: StoredPoint) -> list[Any]:
        """Return torch's optimizers, made again on the tensors of the state."""
        captured = self._captured()
        objects = [keep[0] for keep in (getattr(storage, "keep", ()) for storage in captured.storages) if keep]
        if keyframe.point.optimizers is None or len(objects) != len(captured.storages):
            raise NotFoundError(
                "this point does not say how its optimizers are made",
                todo="call store.journal(optimizer) and then restore(into=state)",
            )
        leaves = {place_of(path): leaf for path, leaf in _leaves_in(self._base)}
        places = [""] * len(keyframe.point.tensors)
        for path, node in leaves_of(keyframe.point.tree):
            if isinstance(node, TensorNode):
                places[node.tensor] = places[node.tensor] or place_of(path)
        return [made_again(facts, lambda index: leaves[places[index]]) for facts in keyframe.point.optimizers]

    def finish(self, last: StoredPoint, rest: Mapping[str, Callable[[], NDArray[np.uint8]]]) -> Any:
        """Bring everything that the steps have not made into place, and return the state."""
        point, paths = last.point, paths_of(last.point)
        captured = self._captured()
        live = dict(zip(storage_paths(captured), captured.storages, strict=True))
        specs = [StorageSpec(each.nbytes, each.element_width, each.is_float, ()) for each in point.storages]
        targets = prepare_restore(point.tree, point.tensors, specs, into=self._replay.into, adapters=self._adapters)
        for index in targets.storages:
            storage, path = point.storages[index], paths[index]
            is_there = storage.source == "steps" and targets.is_direct(index)
            if not is_there:
                plain: Any = rest[path]() if path in rest else None
                if storage.source == "steps" or plain is None:
                    if path not in live:
                        raise self._differs(path, f"at step {last.step}", last, is_missing=True)
                    plain = live[path].read(0, storage.nbytes)
                if xxh3_64(plain) != storage.xxh3:
                    raise self._differs(path, f"at step {last.step}", last, is_missing=False)
                np.frombuffer(targets.destination(index), np.uint8)[:] = np.frombuffer(plain, np.uint8)
            targets.complete(index)
        return targets.finish()


def _leaves_in(state: Any, path: tuple[Any, ...] = ()) -> Iterable[tuple[tuple[Any, ...], Any]]:
    """Yield the leaves of a state of plain containers."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _leaves_in(value, (*path, key))
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state):
            yield from _leaves_in(value, (*path, number))
    else:
        yield path, state
