"""Restore a point: from which keyframe, and what instead if that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckstore.config import Limits, Policy
from ckstore.errors import CkstoreError, NotFoundError, ReplayError, UsageError, is_damage, shown_object
from ckstore.format.journal import read_body
from ckstore.format.many_ranks import plain_manifest
from ckstore.format.points import decode_point
from ckstore.journal.blobs import BlobReader, DecodeMemory
from ckstore.processes import owner_is_running, process_started
from ckstore.restore.restore import Restored, RestoreRequest, read_storage, restore_reference
from ckstore.state.capture import loaded_adapters
from ckstore.store.journal_chain import ChainRecord, Journal, Keyframe
from ckstore.store.journal_needs import JournalState
from ckstore.store.journals import WRITER_SECONDS, Journals
from ckstore.store.orphans import SaverPurpose
from ckstore.store.points import find_point, may_mean_point
from ckstore.store.refs import Reference
from ckstore.store.repository import Repository

if TYPE_CHECKING:
    from ckstore.format.manifest import Manifest
    from ckstore.format.records import RecordPlace
    from ckstore.journal.restoring import ReplayCheck, StoredPoint

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """How points are replayed; see ``Store.restore``.

    Args:
        check: After which steps checksums are compared.
        after_step: Called after each replayed step with the trainer's step.
        fallback: If a keyframe is damaged, restore the newest state that can be read.
        optimizers: The user's optimizers; None: torch's own are made again.

    Raises:
        UsageError: There is no such check.
    """

    check: ReplayCheck
    after_step: Callable[[int], object] | None
    fallback: bool
    optimizers: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if self.check not in ("each", "last"):
            raise UsageError(
                "replay_check is 'each' or 'last'",
                where=f"replay_check={shown_object(self.check)}",
                todo="use 'each', or 'last' to compare checksums after the last replayed step only",
            )


@dataclass(frozen=True, slots=True)
class RestoredPoint:
    """A restored point.

    Attributes:
        state: The state.
        keyframe: The checkpoint from which it was computed.
        place: The record that a journal continues.
        step: The trainer's step.
        replayed: How many records were replayed.
        seconds: How long that took.
        rest: The checksum of every storage that the steps do not make, by its path.
        warnings: Sentences for the user.
    """

    state: Any
    keyframe: Manifest
    place: RecordPlace
    step: int
    replayed: int
    seconds: float
    rest: Mapping[str, int]
    warnings: tuple[str, ...] = ()


class _Restorer:
    """Restores points of one run as it was at one moment.

    Args:
        repository: The store and its run.
        state: Its journal and checkpoints.
        policy: Threads, memory and checks.
        request: What to restore into. It gets the warnings about what was skipped.
        replay: How to replay.
    """

    def __init__(
        self,
        repository: Repository,
        state: JournalState,
        policy: Policy,
        request: RestoreRequest,
        replay: ReplayRequest,
    ) -> None:
        self._repository = repository
        self._state = state
        self._policy = policy
        self._request = request
        self._replay = replay

    def restore(self, record: ChainRecord) -> RestoredPoint:
        """Restore a point from its nearest keyframe that can be read and is the state of its record.

        Raises:
            ReplayError: The replay has given other bytes.
            CorruptError: No keyframe, or a record, can be read.
            NotFoundError: It has no keyframe any more.
        """
        first: CkstoreError | None = None
        for keyframe in self._state.keyframes(record):
            try:
                return self._from(keyframe)
            except CkstoreError as error:
                if not _is_failure(error) or _failed_record(error, keyframe) is not None:
                    raise
                first = first or error
                self._leave_out(keyframe, error)
        if first is not None:
            raise first
        raise NotFoundError(
            f"the point of step {record.head.step} has no keyframe any more",
            todo="restore another step; `ckstore ls` shows what there is",
            step=record.head.step,
        )

    def restore_newest(self) -> RestoredPoint | None:
        """Restore the newest point of which every replayed step can be proved; None: a checkpoint is newer than that.

        A record that cannot be replayed ends its segment. Without the option ``fallback``, a keyframe whose bytes are
        damaged is an error unless an earlier one of the same point can be used: as for checkpoints.

        Raises:
            CorruptError: The keyframe is damaged, and there is no other one.
        """
        damage: CkstoreError | None = None
        damaged: ChainRecord | None = None
        while isinstance(record := self._state.newest(), ChainRecord) and damaged in (None, record):
            keyframe, started = next(self._state.keyframes(record)), list[int]()
            try:
                return self._from(keyframe, started)
            except CkstoreError as error:
                if not _is_failure(error):
                    raise
                failed = _failed_record(error, keyframe)
                if failed is not None:
                    self._end_before(failed, record, error)
                    continue
                self._leave_out(keyframe, error)
                if started and not (self._replay.fallback or isinstance(error, ReplayError)):
                    damage, damaged = self._with_advice(error), record
        if damage is not None:
            raise damage
        return None

    def _with_advice(self, damage: CkstoreError) -> CkstoreError:
        if not is_damage(damage):
            return damage
        root = self._repository.backend.root
        return type(damage)(
            damage.what,
            where=damage.where,
            todo=f"run `ckstore repair {root}` to see what can be repaired; or restore(fallback=True), which restores "
            "the newest state that can be read",
            **damage.facts,
        )

    def _leave_out(self, keyframe: Keyframe, error: CkstoreError) -> None:
        self._note(f"seq {keyframe.entry.seq} could not be used: {error}")
        self._state = self._state.without({keyframe.entry.seq})

    def _end_before(self, failed: ChainRecord, record: ChainRecord, error: CkstoreError) -> None:
        self._note(f"step {record.head.step} could not be replayed; this is an earlier state: {error}")
        self._state.journal.end_before(failed, error)
        # Compared at the end only, each attempt would replay all steps and find one more that differs.
        self._replay = replace(self._replay, check="each")

    def _note(self, sentence: str) -> None:
        _log.warning("%s", sentence)
        self._request.skipped.append(sentence)

    def _from(self, keyframe: Keyframe, started: list[int] | None = None) -> RestoredPoint:
        """Restore a point from one of its keyframes. ``started`` is as for ``restore_reference``."""
        from ckstore.journal.restoring import Replay, restore_point

        how = Replay(
            into=self._request.into,
            optimizers=self._replay.optimizers,
            check=self._replay.check,
            after_step=self._replay.after_step,
            thread_count=self._policy.thread_count,
            device=self._request.device,
        )
        bases: list[Restored] = []
        clock, begun = self._repository.clock, 0.0

        def restore_base() -> Any:
            nonlocal begun
            reference = f"seq:{keyframe.entry.seq}"
            request = self._request if how.is_in_place else replace(self._request, into=None)
            began = [] if started is None else started
            bases.append(restore_reference(self._repository, self._policy, reference, request, began))
            begun = clock.monotonic()
            return bases[0].state

        def read_base(index: int) -> Any:
            return read_storage(self._repository, self._policy, plain_manifest(bases[0].manifest), index)

        memory = DecodeMemory(self._repository.limits)
        read = partial(read_point, self._repository, self._state.journal, memory=memory)
        adapters = loaded_adapters()
        made = restore_point(how, keyframe.record, keyframe.replayed, restore_base, adapters, read, read_base)
        last, (base,) = keyframe.replayed[-1] if keyframe.replayed else keyframe.record, bases
        return RestoredPoint(
            made.state,
            base.manifest,
            last.place,
            last.head.step,
            len(keyframe.replayed),
            clock.monotonic() - begun,
            made.rest,
            base.warnings,
        )


def read_point(
    repository: Repository, journal: Journal, record: ChainRecord, memory: DecodeMemory
) -> Callable[[], StoredPoint]:
    """Read the bytes of a record, and return what decodes them. Frames are decoded when they are needed.

    Args:
        repository: The store.
        journal: The journal that has the record.
        record: The record.
        memory: Memory for frames, which other records use, too.

    Raises:
        CorruptError: It is damaged.
        NotFoundError: Its segment was collected meanwhile.
    """
    from ckstore.journal.restoring import reading

    number, step = record.head.number, record.head.step
    where = repository.backend.location_of(record.segment.path)
    try:
        with reading(number, step, where), closing(journal.open_segment(record.segment)) as file:
            content = memoryview(file.read_at(record.offset, record.head.nbytes))
    except FileNotFoundError:
        raise NotFoundError(
            f"record {number} of the journal, step {step}, was deleted meanwhile",
            where=where,
            todo="restore another step",
            number=number,
            step=step,
        ) from None
    environment = journal.segments[record.segment].facts.environment
    return partial(_decoded, repository.limits, record, content, memory, environment, where)


def _decoded(
    limits: Limits,
    record: ChainRecord,
    content: memoryview,
    memory: DecodeMemory,
    environment: Mapping[str, str],
    where: object,
) -> StoredPoint:
    from ckstore.journal.restoring import StoredPoint, reading

    def read(offset: int, count: int) -> memoryview:
        return content[offset - record.offset : offset - record.offset + count]

    with reading(record.head.number, record.head.step, where):
        point = decode_point(read_body(read, record.placed, where=where), limits=limits, where=where)
        blobs = BlobReader(read, record.placed, point.blobs, limits, where=where, memory=memory)
    return StoredPoint(record.head.number, record.head.step, point, blobs, environment)


def _is_failure(error: CkstoreError) -> bool:
    """Return whether another keyframe, or an earlier point, may be restored."""
    return isinstance(error, (NotFoundError, ReplayError)) or is_damage(error)


def _failed_record(error: CkstoreError, keyframe: Keyframe) -> ChainRecord | None:
    """Return the record that is damaged, or whose replay has given other bytes; None: the keyframe cannot be used."""
    number = error.facts.get("number")
    if isinstance(error, ReplayError) and number == keyframe.record.head.number:
        # A keyframe that is another state has only the same step and structure.
        return None
    records = (keyframe.record, *keyframe.replayed)
    return next((record for record in records if record.head.number == number), None)


def _has_live_trainer(repository: Repository) -> bool:
    """Whether a live trainer writes the run, also one of this process: then its journal is read as it is now."""
    holder = repository.lease.holder()
    if holder is None or owner_is_running(holder) is not True:
        return False
    purpose = SaverPurpose.of(holder.purpose)
    return purpose is None or process_started(purpose.trainer_pid) == purpose.trainer_started


def restore_newest_or_step(
    repository: Repository, policy: Policy, ref: Reference | None, request: RestoreRequest, replay: ReplayRequest
) -> RestoredPoint | None:
    """Restore the point that a reference means; None: it means a checkpoint, or the run has no journal.

    Args:
        repository: The store and its run.
        policy: Threads, memory and checks.
        ref: None or ``latest``: the newest state; or as for ``find_point``.
        request: What to restore into.
        replay: How to replay.

    Raises:
        ReplayError: A step was named, and its replay has given other bytes.
        CorruptError: The point that was named, or the keyframe of the newest one, is damaged.
        UsageError: A part of a point was asked for.
        ConflictError: The journal's writer of a dead trainer still runs.
    """
    ref = "latest" if ref is None else ref
    if str(ref).startswith(("seq:", "id:")):
        return None
    # First: the saver of a handle that was dropped may be about to create the first segment.
    repository.wait_for_orphan()
    if not may_mean_point(repository, ref):
        return None
    if not _has_live_trainer(repository):
        Journals(repository.manifests, clock=repository.clock).wait_for_writer(seconds=WRITER_SECONDS)
    # A journal continues the newest point, and not its checkpoint.
    found = find_point(repository, ref, or_its_checkpoint=ref == "latest" and request.only is None)
    if found is None:
        return None
    step = found.record.head.step
    if request.only is not None and ref != "latest":
        raise UsageError(
            f"step {step} is a point of the journal, and a point is restored as a whole", todo="leave out only="
        )
    if request.only is not None:
        _log.warning(
            "only= restores from the newest checkpoint; the newest state is the point of step %d, which is restored "
            "without only=",
            step,
        )
        return None
    restorer = _Restorer(repository, found.state, policy, request, replay)
    return restorer.restore_newest() if ref == "latest" else restorer.restore(found.record)
