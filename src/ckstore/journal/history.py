"""The points of a run: find one, and restore it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckstore.config import Policy
from ckstore.errors import CkstoreError, CorruptError, NotFoundError, ReplayError, UsageError, shown_object
from ckstore.format.journal import read_body, structure_of
from ckstore.format.logical import encoded_tensors
from ckstore.format.many_ranks import plain_manifest
from ckstore.format.points import decode_point
from ckstore.format.tree import encode_tree
from ckstore.journal.blobs import BlobReader, DecodeMemory
from ckstore.processes import owner_is_running
from ckstore.restore.restore import Restored, RestoreRequest, read_storage, restore_manifest
from ckstore.state.capture import loaded_adapters
from ckstore.store.journal_chain import ChainRecord, Entry, Journal, Keyframe, entry_of
from ckstore.store.journals import WRITER_SECONDS, Journals
from ckstore.store.orphans import SaverPurpose
from ckstore.store.points import find_point, is_tag_on_point
from ckstore.store.refs import Reference, headers_newest_first, load_whole, resolve
from ckstore.store.repository import Repository

if TYPE_CHECKING:
    from ckstore.format.manifest import Manifest
    from ckstore.format.records import RecordPlace
    from ckstore.journal.restoring import MadeState, Replay, ReplayCheck, StoredPoint

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """How points are replayed; see ``Store.restore``.

    Args:
        optimizers: The user's optimizers; None: torch's own are made again.
        check: After which steps checksums are compared.
        after_step: Called after each replayed step with the trainer's step.

    Raises:
        UsageError: There is no such check.
    """

    optimizers: Sequence[Any] | None
    check: ReplayCheck
    after_step: Callable[[int], object] | None

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


class History:
    """The points of one run at one moment.

    Args:
        repository: The store and its run.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.journals = Journals(repository.manifests, clock=repository.clock)
        self._journal: Journal | None = None
        self._manifests: dict[int, Manifest | None] = {}
        self._entries: list[Entry] | None = None

    @property
    def journal(self) -> Journal:
        """The segments, read once."""
        if self._journal is None:
            self._journal = self.journals.read()
        return self._journal

    @property
    def entries(self) -> list[Entry]:
        """The checkpoints of the run, oldest first."""
        if self._entries is None:
            headers = headers_newest_first(self._repository.manifests)
            self._entries = [entry_of(header) for header in reversed(headers)]
        return self._entries

    def newest(self) -> ChainRecord | None:
        """Return the newest point if it is newer than every checkpoint; None: the newest checkpoint is."""
        found = self.journal.newest(self.entries, self._structure_of)
        return found if isinstance(found, ChainRecord) else None

    def of_step(self, step: int) -> ChainRecord | None:
        """Return the newest point of a step that has a keyframe, if no checkpoint has this step."""
        if any(entry.step == step and not entry.is_archival for entry in self.entries):
            return None
        for name in reversed(self.journal.segments):
            for record in reversed(self.journal.records(name).records):
                if record.head.step == step and next(self._keyframes(record), None) is not None:
                    return record
        return None

    def keyframe_of(self, record: ChainRecord) -> Keyframe:
        """Return the nearest keyframe of a point.

        Raises:
            NotFoundError: It has none any more.
        """
        found = next(self._keyframes(record), None)
        if found is None:
            raise _no_keyframe(record)
        return found

    def place_of_entry(self, seq: int) -> RecordPlace | None:
        """Return the record of the state of a checkpoint, if the journal has one that is the end of a chain."""
        for name in reversed(self.journal.segments):
            for record in reversed(self.journal.records(name).records):
                keyframe = next(self._keyframes(record), None)
                if keyframe is not None and not keyframe.replayed and keyframe.entry.seq == seq:
                    return record.place
        return None

    def restore(
        self,
        record: ChainRecord,
        policy: Policy,
        request: RestoreRequest,
        replay: ReplayRequest,
        *,
        may_fall_back: bool,
    ) -> RestoredPoint:
        """Restore a point from its nearest keyframe that can be read and is the state of its record.

        Args:
            record: The point.
            policy: Threads, memory and checks.
            request: What to restore into.
            replay: How to replay.
            may_fall_back: Restore the newest proved point if a replay gives other bytes.

        Raises:
            ReplayError: The replay has given other bytes.
            CorruptError: No keyframe, or a record, can be read.
        """
        problems: list[str] = []
        for keyframe in self._keyframes(record):
            try:
                return self._from(keyframe, policy, request, replay, may_fall_back, problems)
            except (CorruptError, NotFoundError, ReplayError) as error:
                # A keyframe that is another state has only the same step and structure.
                if isinstance(error, ReplayError) and error.number > keyframe.record.head.number:
                    raise
                problems.append(f"seq {keyframe.entry.seq} could not be used: {error}")
                _log.warning("%s", problems[-1])
        raise _no_keyframe(record, problems)

    def _from(
        self,
        keyframe: Keyframe,
        policy: Policy,
        request: RestoreRequest,
        replay: ReplayRequest,
        may_fall_back: bool,
        problems: Sequence[str],
    ) -> RestoredPoint:
        from ckstore.journal.restoring import Replay

        replayed = keyframe.replayed
        warnings = list(problems)
        how = Replay(
            into=request.into,
            optimizers=replay.optimizers,
            check=replay.check,
            after_step=replay.after_step,
            thread_count=policy.thread_count,
        )
        while True:
            try:
                base, made, seconds = self._replay(keyframe, replayed, policy, request, how)
            except ReplayError as error:
                proved = [each for each in replayed if each.head.number < error.number]
                if not may_fall_back or len(proved) == len(replayed) or error.number <= keyframe.record.head.number:
                    raise
                warnings.append(f"step {replayed[-1].head.step} could not be replayed, an earlier point was: {error}")
                _log.warning("%s", warnings[-1])
                replayed = tuple(proved)
                continue
            last = replayed[-1] if replayed else keyframe.record
            return RestoredPoint(
                made.state,
                self._manifest(keyframe.entry),
                last.place,
                last.head.step,
                len(replayed),
                seconds,
                made.rest,
                (*base.warnings, *warnings),
            )

    def _replay(
        self, keyframe: Keyframe, replayed: Sequence[ChainRecord], policy: Policy, request: RestoreRequest, how: Replay
    ) -> tuple[Restored, MadeState, float]:
        """Return the restored keyframe, the state after the replayed records, and how long the replay took."""
        from ckstore.journal.restoring import restore_point

        manifest, memory = self._manifest(keyframe.entry), DecodeMemory(self._repository.limits)
        bases: list[Restored] = []
        clock, begun = self._repository.clock, 0.0

        def restore_base() -> Any:
            nonlocal begun
            bases.append(restore_manifest(self._repository, policy, manifest, (), request))
            begun = clock.monotonic()
            return bases[0].state

        read = partial(self._read, memory=memory)
        read_base = partial(read_storage, self._repository, policy, plain_manifest(manifest))
        made = restore_point(how, keyframe.record, replayed, restore_base, loaded_adapters(), read, read_base)
        return bases[0], made, clock.monotonic() - begun

    def _keyframes(self, record: ChainRecord) -> Iterator[Keyframe]:
        return self.journal.keyframes(record, self.entries, self._structure_of)

    def _structure_of(self, entry: Entry) -> bytes | None:
        try:
            manifest = self._manifest(entry)
        except CkstoreError:
            return None
        return structure_of(encode_tree(manifest.tree), encoded_tensors(tuple(manifest.tensors)))

    def _manifest(self, entry: Entry) -> Manifest:
        found = self._manifests.get(entry.seq)
        if found is None:
            found = self._manifests[entry.seq] = load_whole(
                self._repository, resolve(self._repository, f"seq:{entry.seq}")
            )
        return found

    def _read(self, record: ChainRecord, memory: DecodeMemory) -> Callable[[], StoredPoint]:
        """Read the bytes of a record, and return what decodes them. Frames are decoded when they are needed."""
        repository = self._repository
        path = record.segment.path
        with closing(repository.backend.open_read(path)) as file:
            content = memoryview(file.read_at(record.offset, record.head.nbytes))
        return partial(self._decoded, record, content, memory, repository.backend.location_of(path))

    def _decoded(self, record: ChainRecord, content: memoryview, memory: DecodeMemory, where: object) -> StoredPoint:
        from ckstore.journal.restoring import StoredPoint

        def read(offset: int, count: int) -> memoryview:
            return content[offset - record.offset : offset - record.offset + count]

        limits = self._repository.limits
        point = decode_point(read_body(read, record.placed, where=where), limits=limits, where=where)
        blobs = BlobReader(read, record.placed, point.blobs, limits, where=where, memory=memory)
        environment = self.journal.segments[record.segment].facts.environment
        return StoredPoint(record.head.number, record.head.step, point, blobs, environment)


def _no_keyframe(record: ChainRecord, problems: Sequence[str] = ()) -> NotFoundError:
    return NotFoundError(
        f"the point of step {record.head.step} has no keyframe that can be used"
        + "".join(f"; {each}" for each in problems),
        todo="restore another step; `ckstore ls` shows what there is",
        step=record.head.step,
    )


def has_journal(repository: Repository) -> bool:
    """Return whether the run has a journal. Cheap: one listing of a folder that is usually not there."""
    return bool(Journals(repository.manifests, clock=repository.clock).names())


def _has_live_trainer(repository: Repository) -> bool:
    """Whether the trainer of another process writes the run: then its journal is read as it is at this moment."""
    holder = repository.lease.holder()
    if holder is None or owner_is_running(holder) is not True:
        return False
    purpose = SaverPurpose.of(holder.purpose)
    return os.getpid() != (holder.pid if purpose is None else purpose.trainer_pid)


def restore_newest_or_step(
    repository: Repository, policy: Policy, ref: Reference | None, request: RestoreRequest, replay: ReplayRequest
) -> RestoredPoint | None:
    """Restore the point that a reference names; None: it names a checkpoint, or the run has no journal.

    Args:
        repository: The store and its run.
        policy: Threads, memory and checks.
        ref: None or ``latest``: the newest state; a step: the newest point of this step, if no checkpoint has it; a
            tag on a point; or the best of a metric.
        request: What to restore into.
        replay: How to replay.

    Raises:
        ReplayError: A step was named, and its replay has given other bytes.
        UsageError: A part of a point was asked for.
        ConflictError: The journal's writer of a dead trainer still runs.
    """
    is_newest = ref in (None, "latest")
    is_step = (isinstance(ref, int) and not isinstance(ref, bool)) or (isinstance(ref, str) and ref.isdecimal())
    is_best = isinstance(ref, str) and ref.startswith("best:")
    is_tag = ref is not None and is_tag_on_point(repository, ref)
    if not (is_newest or is_step or is_best or is_tag):
        return None
    # First: the saver of a handle that was dropped may be about to create the first segment.
    repository.wait_for_orphan()
    if not (is_tag or has_journal(repository)):
        return None
    history = History(repository)
    if not _has_live_trainer(repository):
        history.journals.wait_for_writer(seconds=WRITER_SECONDS)
    if is_best or is_tag:
        found = find_point(repository, str(ref))
        record = None if found is None else found.record
    else:
        record = history.newest() if is_newest else history.of_step(int(ref or 0))
    if record is None:
        return None
    if request.only is not None:
        if not is_newest:
            raise UsageError(
                f"step {record.head.step} is a point of the journal, and a point is restored as a whole",
                todo="leave out only=",
            )
        _log.warning(
            "only= restores from the newest checkpoint; the newest state is the point of step %d, which is restored "
            "without only=",
            record.head.step,
        )
        return None
    return history.restore(record, policy, request, replay, may_fall_back=is_newest)
