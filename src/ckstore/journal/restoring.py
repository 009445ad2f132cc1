"""Restore a point: bring its keyframe into place, replay the steps, prove what they made, and bring in the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from ckstore.concurrency import map_in_threads
from ckstore.errors import (
    BackendError,
    CkstoreError,
    CorruptError,
    NotFoundError,
    ReplayError,
    UnsupportedError,
    UsageError,
)
from ckstore.format.points import OptimizerFacts, Point, PointStorage, Source, Span, Step
from ckstore.format.tensors import StorageSpec
from ckstore.format.tree import Path, TensorNode, leaves_of, place_of
from ckstore.format.wire import xxh3_64
from ckstore.journal.blobs import BlobReader
from ckstore.journal.checksums import checksums_of
from ckstore.journal.drafting import owned_storages, storage_paths
from ckstore.journal.gradients import GradientMemory, load_gradient
from ckstore.journal.recorder import parameters_of
from ckstore.journal.replay import LoadedGradient, kept_gradients, loaded, made_again, replay_step
from ckstore.journal.word_sums import word_sum
from ckstore.state.capture import Captured
from ckstore.state.capture_cache import CaptureCache
from ckstore.state.environment import differences, environment_of
from ckstore.state.placement import prepare_restore
from ckstore.state.tensors import LeafAdapter

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Record = TypeVar("_Record")
ReadStorage = Callable[[int], Any]
"""Returns the bytes of a storage of the keyframe, by its index."""
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
        into: The live state to fill; None: make a new one.
        optimizers: The user's optimizers, in the order of the journal: they step the live state. None: torch's own are
            made again and step a new state, from which the live one is filled when it is proved.
        check: When checksums are compared.
        after_step: Called with each step of the trainer that was replayed, for what the loop updates itself.
        thread_count: Threads that compute checksums.
        device: Device of new tensors; None: the CPU.
    """

    into: Any
    optimizers: Sequence[Any] | None
    check: ReplayCheck
    after_step: Callable[[int], object] | None
    thread_count: int
    device: Any = None

    @property
    def is_in_place(self) -> bool:
        """Whether the steps change the live state."""
        return self.into is not None and self.optimizers is not None


@contextmanager
def reading(number: int, step: int, where: object) -> Iterator[None]:
    """Name the record in an error of its bytes, as ``number`` and ``step``."""
    try:
        yield
    except (CorruptError, BackendError) as error:
        raise type(error)(
            f"record {number} of the journal, step {step}, cannot be read: {error.what}",
            where=error.where or where,
            todo="restore an earlier step; `ckstore repair` takes a record from a mirror or a tier",
            **{**error.facts, "number": number, "step": step},  # type: ignore[arg-type]
        ) from error


class _LoadedPoint(NamedTuple):
    stored: StoredPoint
    paths: list[str]
    """For each storage: the path of its first tensor."""
    gradients: list[list[LoadedGradient]]
    """For each step of the point."""


class MadeState(NamedTuple):
    """A state that was made by replaying steps.

    Args:
        state: The state.
        rest: The checksum of every storage that the steps do not make, by its path.
    """

    state: Any
    rest: Mapping[str, int]


def restore_point(
    replay: Replay,
    keyframe: _Record,
    points: Iterable[_Record],
    restore_base: Callable[[], Any],
    adapters: Sequence[LeafAdapter],
    read: Callable[[_Record], Callable[[], StoredPoint]],
    read_base: ReadStorage,
) -> MadeState:
    """Return the state of the last point.

    Args:
        replay: How to restore.
        keyframe: The record of the keyframe.
        points: The records after it, up to the one to restore.
        restore_base: Restores the keyframe and returns it: ``replay.into`` if that is stepped in place, else new.
        adapters: Adapters of tensor libraries.
        read: Reads the bytes of a record, and returns what decodes them. Each on a thread of its own: the next records
            are read and decoded while the keyframe is restored, and while the optimizer works.
        read_base: Reads a storage of the keyframe again, by its index. For objects whose state is another one after
            they have loaded the keyframe's.

    Raises:
        ReplayError: The keyframe is not the state of its record, or a replayed step has given other bytes.
        CorruptError: A record is damaged.
        UsageError: The optimizers do not fit.
    """
    with _loading(keyframe, points, read) as loading:
        first = next(loading)
        # From here on, the threads work ahead.
        live = _Live(restore_base(), replay, adapters)
        live.require_base(first, read_base)
        rest: dict[str, Callable[[], NDArray[np.uint8]]] = {}
        _note_rest(first, rest)
        optimizers = live.optimizers_of(first) if replay.optimizers is None else replay.optimizers
        live.note_owned(optimizers, first.stored.point.optimizers or ())
        live.environment = environment_of(optimizers)
        last = first
        with kept_gradients(optimizers):
            for last in loading:
                live.require_after_step(last)
                _replay_point(optimizers, last, is_made_again=replay.optimizers is None)
                if replay.optimizers is None:
                    live.follow(optimizers, last.stored.point)
                if replay.after_step is not None:
                    replay.after_step(last.stored.step)
                if replay.check == "each":
                    live.require(last, f"after the replayed step {last.stored.step}")
                _note_rest(last, rest)
    if replay.check != "each":
        live.require(last, f"after the replayed step {last.stored.step}")
    stored = last.stored.point.storages
    checksums = {path: each.checksum for path, each in zip(last.paths, stored, strict=True) if each.source != "steps"}
    return MadeState(live.finish(last, rest), checksums)


@contextmanager
def _loading(
    keyframe: _Record, points: Iterable[_Record], read: Callable[[_Record], Callable[[], StoredPoint]]
) -> Iterator[Iterator[_LoadedPoint]]:
    """Yield the records in order. The next ones are read and decoded meanwhile; see ``restore_point``."""
    memory = GradientMemory()

    def read_one(item: tuple[_Record, bool]) -> tuple[Callable[[], StoredPoint], bool]:
        record, is_replayed = item
        try:
            return read(record), is_replayed
        except Exception as error:
            # Raised when the records before it were replayed.
            return partial(_raise, error), is_replayed

    def load_whole(item: tuple[Callable[[], StoredPoint], bool]) -> _LoadedPoint:
        decode, is_replayed = item
        stored = decode()
        with reading(stored.number, stored.step, stored.blobs.where):
            gradients = [
                [loaded(load_gradient(each, stored.blobs, memory)) for each in step.gradients]
                for step in (stored.point.steps if is_replayed else ())
            ]
        return _LoadedPoint(stored, paths_of(stored.point), gradients)

    records = itertools.chain([(keyframe, False)], ((each, True) for each in points))
    with (
        closing(map_in_threads(read_one, records, count_max=1, name="ckstore-journal-read")) as contents,
        closing(map_in_threads(load_whole, contents, count_max=1, name="ckstore-journal")) as loading,
    ):
        yield loading


def _raise(error: Exception) -> StoredPoint:
    raise error


def _replay_point(optimizers: Sequence[Any], loaded_point: _LoadedPoint, *, is_made_again: bool) -> None:
    steps = loaded_point.stored.point.steps
    for step, seen in zip(steps, loaded_point.gradients, strict=True):
        if step.optimizer >= len(optimizers):
            raise _other_optimizers(len(optimizers), step.optimizer)
        _replay(optimizers[step.optimizer], step, seen, is_made_again=is_made_again)
    # Only the parameters refer to the gradients now. Their memory is used again after the next step.
    loaded_point.gradients.clear()


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


def _note_rest(loaded_point: _LoadedPoint, rest: dict[str, Callable[[], NDArray[np.uint8]]]) -> None:
    """Note for each storage that a record stores how to read it. It holds until a later record stores it again."""
    stored = loaded_point.stored
    for path, storage in zip(loaded_point.paths, stored.point.storages, strict=True):
        if storage.span is not None:
            rest[path] = partial(_read_rest, stored, storage.span)


def _read_rest(stored: StoredPoint, span: Span) -> NDArray[np.uint8]:
    with reading(stored.number, stored.step, stored.blobs.where):
        return stored.blobs.bytes_of(span)


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
        self._cache = CaptureCache()
        self._others: frozenset[str] = frozenset()
        """Paths of storages that no optimizer owns, once that is known."""
        self.environment: Mapping[str, str] = {}
        """Facts of this process, noted before the first step is replayed."""
        self._made: list[tuple[Any, Any, Mapping[str, Any], str]] = []
        """Where what optimizers that were made again have made is in the state, and in their own."""
        self._base_storages: dict[str, Callable[[], Any]] = {}
        """How to read what the keyframe has and no record stores."""

    def _captured(self) -> Captured:
        # Whatever has replaced a tensor, an optimizer or ``after_step``, the capture finds the new one.
        return self._cache.capture(self._base, self._adapters)

    def require_base(self, first: _LoadedPoint, read_base: ReadStorage) -> None:
        """Compare the keyframe with its record.

        Raises:
            ReplayError: A storage has other bytes, or is not there.
        """
        when = "before the first replayed step"
        self.require(first, when)
        differing = self._differing(first, "before")
        for index, (path, storage) in enumerate(zip(first.paths, first.stored.point.storages, strict=True)):
            if storage.source == "before":
                self._base_storages[path] = partial(read_base, index)
            if path in differing and not _has_checksum(read_base(index), storage):
                raise self._differs(path, when, first.stored, is_missing=False)

    def _differing(self, loaded_point: _LoadedPoint, source: Source) -> dict[str, bool]:
        """Return the paths of the storages with this source whose live bytes are others; True: there are none."""
        captured, stored = self._captured(), loaded_point.stored
        live = {path: index for index, path in enumerate(storage_paths(captured))}
        rows = zip(loaded_point.paths, stored.point.storages, strict=True)
        wanted = {path: storage for path, storage in rows if storage.source == source}
        # The kind of each checksum is that of the run, wherever the memory is now.
        word_sums = {live[path] for path, storage in wanted.items() if storage.is_word_sum and path in live}
        chosen = [live[path] for path in wanted if path in live]
        checksums = checksums_of(captured, chosen, thread_count=self._replay.thread_count, word_sums=word_sums)
        found = dict(zip(chosen, checksums, strict=True))
        return {
            path: path not in live
            for path, storage in wanted.items()
            if found.get(live.get(path, -1)) != storage.checksum
        }

    def require(self, loaded_point: _LoadedPoint, when: str) -> None:
        """Compare what the steps have made with a record.

        Raises:
            ReplayError: A storage has other bytes, or is not there.
        """
        differing = self._differing(loaded_point, "steps")
        if differing:
            path, is_missing = next(iter(differing.items()))
            is_made_by_caller = path in self._others
            raise self._differs(
                path, when, loaded_point.stored, is_missing=is_missing, is_made_by_caller=is_made_by_caller
            )

    def _differs(
        self, path: str, when: str, stored: StoredPoint, *, is_missing: bool, is_made_by_caller: bool = False
    ) -> ReplayError:
        what = "is not in the state" if is_missing else "has other bytes than the run had"
        facts = differences(stored.environment, self.environment)
        todo = "restore an earlier step or the keyframe"
        if is_made_by_caller:
            todo = "pass after_step=, a function that updates it exactly as the training loop does after each step"
        elif facts:
            todo = f"restore where these facts are as they were, or {todo}"
        elif self.environment:
            todo = (
                "no fact of the environment differs: the optimizers are in another order than in the run, or their "
                f"steps depend on more than gradients, groups and state; {todo}"
            )
        return ReplayError(
            f"{path} {what} {when}" + (f" ({facts})" if facts else ""),
            todo=todo,
            path=path,
            number=stored.number,
            step=stored.step,
        )

    def note_owned(self, optimizers: Sequence[Any], facts: Sequence[OptimizerFacts]) -> None:
        """Note what the optimizers own, after checking that it is in the state that is being restored.

        Raises:
            UsageError: One of them owns a tensor elsewhere, which a replayed step would change.
        """
        captured = self._captured()
        owned = owned_storages(captured, optimizers)
        # Without all optimizers of the run, it is not known what none of them owns.
        if len(optimizers) >= len(facts):
            self._others = frozenset(path for index, path in enumerate(storage_paths(captured)) if index not in owned)

    def require_after_step(self, loaded_point: _LoadedPoint) -> None:
        """Check that there is a function for what the user's own code makes after each step.

        Raises:
            UsageError: There is none, or it cannot have the tensors that are being restored.
        """
        if self._replay.after_step is not None and self._replay.is_in_place:
            return
        for path, storage in zip(loaded_point.paths, loaded_point.stored.point.storages, strict=True):
            if storage.source == "steps" and path in self._others:
                raise UsageError(
                    f"{path} is made by the training loop after each step, as replayed= says, and not by an optimizer",
                    todo="call store.journal with all optimizers, then restore(into=state, after_step=function), where "
                    "the function updates it as the loop does; or restore the keyframe",
                )

    def optimizers_of(self, loaded_keyframe: _LoadedPoint) -> list[Any]:
        """Return torch's optimizers, made again on the tensors of the state."""
        keyframe = loaded_keyframe.stored
        if keyframe.point.optimizers is None:
            raise NotFoundError(
                "this point does not say how its optimizers are made",
                todo="call store.journal(optimizer) and then restore(into=state)",
            )
        paths = _tensor_paths(keyframe.point)
        return [
            made_again(facts, lambda index: _container_of(self._base, paths[index])[paths[index][-1]])
            for facts in keyframe.point.optimizers
        ]

    def follow(self, optimizers: Sequence[Any], point: Point) -> None:
        """Put what optimizers that were made again have made into the state, where the record has it."""
        if point.optimizers is not None:
            paths = _tensor_paths(point)
            self._made = [
                (_container_of(self._base, paths[index]), paths[index][-1], optimizer.state[parameter], name)
                for optimizer, facts in zip(optimizers, point.optimizers, strict=False)
                for parameter, names in zip(parameters_of(optimizer), facts.state, strict=False)
                for name, index in names.items()
            ]
        for container, key, state, name in self._made:
            if name in state:
                container[key] = state[name]

    def finish(self, loaded_point: _LoadedPoint, rest: Mapping[str, Callable[[], NDArray[np.uint8]]]) -> Any:
        """Bring everything that the steps have not made into place, and return the state."""
        last, paths = loaded_point.stored, loaded_point.paths
        point = last.point
        captured = self._captured()
        live = dict(zip(storage_paths(captured), captured.storages, strict=True))
        specs = [StorageSpec(each.nbytes, each.element_width, each.is_float, ()) for each in point.storages]
        targets = prepare_restore(
            point.tree,
            point.tensors,
            specs,
            into=self._replay.into,
            device=self._replay.device,
            adapters=self._adapters,
        )
        for index in targets.storages:
            storage, path = point.storages[index], paths[index]
            is_there = storage.source == "steps" and self._replay.is_in_place and targets.is_direct(index)
            if not is_there:
                readers: list[Callable[[], Any]] = []
                if storage.source != "steps" and path in rest:
                    readers.append(rest[path])
                elif path in live:
                    readers.append(partial(live[path].read, 0, storage.nbytes))
                if storage.source == "before" and path in self._base_storages:
                    readers.append(self._base_storages[path])
                found = (read() for read in readers)
                plain = next((plain for plain in found if _has_checksum(plain, storage)), None)
                if plain is None:
                    raise self._differs(path, f"at step {last.step}", last, is_missing=not readers)
                np.frombuffer(targets.destination(index), np.uint8)[:] = np.frombuffer(plain, np.uint8)
            targets.complete(index)
        return targets.finish()


def _has_checksum(plain: Any, storage: PointStorage) -> bool:
    return (word_sum if storage.is_word_sum else xxh3_64)(plain) == storage.checksum


def _tensor_paths(point: Point) -> list[Path]:
    """Return the first path of each tensor of a point."""
    paths: list[Path] = [()] * len(point.tensors)
    for path, node in leaves_of(point.tree):
        if isinstance(node, TensorNode):
            paths[node.tensor] = paths[node.tensor] or path
    return paths


def _container_of(state: Any, path: Path) -> Any:
    """Return what holds the leaf of this path in a state of plain containers. A dict that is not there is made."""
    for key in path[:-1]:
        state = state.setdefault(key, {}) if isinstance(state, dict) else state[key]
    return state
