"""What a run's journal needs: keyframes that must stay, and segments that points are restored from.

A drop or a collection asks here (docs/FORMAT.md section 14, Collect). Nothing is changed, except that segments in the
trash are renamed back.

Invariants:
- The nearest keyframe of the newest point is needed, and those of the points that processes are appending to.
- The segments from a tagged point back to the keyframe that the tag keeps are needed.
- A segment of which a part cannot be read is needed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ckstore.errors import CkstoreError, ConflictError, CorruptError, UnsupportedError
from ckstore.format.paths import SegmentName
from ckstore.format.records import RecordPlace, TagRecord
from ckstore.io.backend import Appending, map_concurrent
from ckstore.store.journal_chain import (
    ChainRecord,
    Entry,
    Journal,
    Keyframe,
    SegmentKeyframes,
    StructureOf,
    entry_of,
)
from ckstore.store.journals import Journals, structures_of
from ckstore.store.refs import read_headers
from ckstore.store.repository import Repository
from ckstore.store.segment_writer import SegmentWriter
from ckstore.store.tags import place_of_tagged
from ckstore.store.trash import TrashFolder


def _entries_of(repository: Repository, *, is_strict: bool) -> list[Entry]:
    """Return the checkpoints of the run, oldest first; damaged ones are left out, or raised if ``is_strict``."""
    manifests, entries = repository.manifests, []
    for found in read_headers(manifests, manifests.listing().names):
        if isinstance(found, (CorruptError, UnsupportedError)) and not is_strict:
            continue
        if isinstance(found, Exception):
            raise found
        if found is not None:
            entries.append(entry_of(found))
    return entries


@dataclass(frozen=True, slots=True)
class JournalState:
    """A run's journal and checkpoints at one moment.

    Attributes:
        journal: The segments; all heads were read, unless it is lazy.
        entries: The checkpoints, read after the segments. So a keyframe that was published before a record that was
            found is found, too.
        structure_of: Reads the structure of a checkpoint.
        held: Segments that a process may be appending to; empty if it is lazy.
        tags: The tags on points, by name. Read last: a collection reads them after its intents.
    """

    journal: Journal
    entries: list[Entry]
    structure_of: StructureOf
    held: frozenset[SegmentName]
    tags: Mapping[str, TagRecord]

    @classmethod
    def read(
        cls,
        repository: Repository,
        *,
        min_age_seconds: float = 0.0,
        elsewhere: Mapping[SegmentName, str] = MappingProxyType({}),
        is_strict: bool = True,
        is_lazy: bool = False,
    ) -> JournalState:
        """Read the journal and the checkpoints of a run.

        Args:
            repository: The store and its run.
            min_age_seconds: Segments that were changed within this time count as held.
            elsewhere: Paths of segments in the trash.
            is_strict: Raise if a manifest or tag cannot be used. Otherwise leave it out.
            is_lazy: Read heads when they are needed, and do not find out what is held: for one point.

        Raises:
            CorruptError: A manifest or a tag is damaged.
            UnsupportedError: A newer ckstore has written one.
            BackendError: A file cannot be read.
        """
        journals = Journals(repository.manifests, clock=repository.clock)
        names = () if is_lazy else journals.names()
        held = _held_segments(repository, names, min_age_seconds)
        journal = journals.read(elsewhere)
        if not is_lazy:
            # Those that were created since they were listed.
            held |= journal.segments.keys() - set(names) - elsewhere.keys()
            journal.read_all(repository.backend)
        entries = _entries_of(repository, is_strict=is_strict)
        structure_of = functools.cache(structures_of(repository.manifests, is_strict=is_strict))
        tags = repository.tags.on_points(is_strict=is_strict)
        return cls(journal, entries, structure_of, frozenset(held), tags)

    def without(self, seqs: Collection[int]) -> JournalState:
        """Return the state after these checkpoints are dropped."""
        entries = [entry for entry in self.entries if entry.seq not in seqs]
        return replace(self, entries=entries)

    def active_tips(self) -> list[ChainRecord]:
        """Return the newest point, if it is newer than every checkpoint, and the last records of held segments."""
        newest = self.newest()
        tips = [self.journal.tip(name) for name in self.journal.segments if name in self.held]
        return [tip for tip in (newest, *tips) if isinstance(tip, ChainRecord)]

    def keyframes(self, point: ChainRecord) -> Iterator[Keyframe]:
        """Yield the keyframes of a point, the nearest first."""
        return self.journal.keyframes(point, self.entries, self.structure_of)

    def newest(self) -> ChainRecord | Entry | None:
        """Return the newest state of the run, a point or a checkpoint."""
        return self.journal.newest(self.entries, self.structure_of)

    def lasting_keyframe(self, point: ChainRecord) -> Keyframe | None:
        """Return the keyframe that must stay for a point: the nearest one that the writer of its record has published.

        A nearer checkpoint of another process may have the same step and structure, and not the same bits.
        """
        first: Keyframe | None = None
        for keyframe in self.keyframes(point):
            if self.journal.is_own(keyframe.entry, keyframe.record):
                return keyframe
            first = first or keyframe
        return first

    def keyframe_of(self, point: ChainRecord, seq: int) -> Keyframe | None:
        """Return the keyframe of a point that has this seq; None if it, the point or a record between is not there."""
        if self.journal.find(point.place) is None:
            return None
        keyframes = self.keyframes(point)
        return next((keyframe for keyframe in keyframes if keyframe.entry.seq == seq), None)

    def tagged_points(self) -> Iterator[tuple[str, ChainRecord, Keyframe | None]]:
        """Yield name, point and kept keyframe of each tag on a point. Those whose record is not there are left out."""
        for name, record in self.tags.items():
            assert record.point is not None, "it is on a point"
            point = self.journal.find(place_of_tagged(record.point))
            if point is not None:
                yield name, point, self.keyframe_of(point, record.seq)

    def nearest_keyframes(self) -> dict[SegmentName, SegmentKeyframes]:
        """Return the nearest keyframe of every record."""
        return self.journal.nearest_keyframes(self.entries, self.structure_of)


def needed_keyframes(repository: Repository) -> dict[int, str]:
    """Return the seqs of the run's checkpoints that must stay for its journal, and why.

    Damaged checkpoints are left out: no point can be restored from them. Without a journal it costs one listing of a
    folder that is not there.

    Raises:
        BackendError: A file cannot be read.
    """
    if not Journals(repository.manifests, clock=repository.clock).names():
        return {}
    state = JournalState.read(repository, is_strict=False)
    return {
        keyframe.entry.seq: f"the newest points of the journal, up to step {tip.head.step}, need it"
        for tip in state.active_tips()
        if (keyframe := state.lasting_keyframe(tip)) is not None
    }


def _held_segments(repository: Repository, names: Sequence[SegmentName], min_age_seconds: float) -> set[SegmentName]:
    """Return the segments that a process may be appending to: locked, or changed within this time.

    A file system without locks leaves only the time.
    """
    backend, now_ns = repository.backend, repository.clock.now_ns()

    def is_held(name: SegmentName) -> bool:
        with contextlib.suppress(FileNotFoundError):
            info = backend.stat(name.path)
            # A time far in the future does not mean that the segment is in use.
            is_young = info is not None and abs(now_ns - info.modified_ns) < min_age_seconds * 1e9
            return is_young or (isinstance(backend, Appending) and backend.is_locked(name.path))
        return False

    return {name for name, each in zip(names, map_concurrent(backend, is_held, names), strict=True) if each}


def keyframes_in(state: JournalState, names: Iterable[SegmentName]) -> list[int]:
    """Return the seqs of all keyframes of the records in these segments, ascending."""
    found = state.nearest_keyframes()
    return sorted({entry.seq for name in names if name in found for entry in found[name].entries})


def needed_segments(state: JournalState, keyframe_count: int | None = None) -> set[SegmentName]:
    """Return the segments that a collection keeps.

    Args:
        state: The journal, and the checkpoints that stay.
        keyframe_count: Keep the points of this many keyframes, those with the youngest records; None: of all.
    """
    keyframes = state.nearest_keyframes()
    times = {
        nearest.entry.seq: nearest.record.head.time_ns
        for each in keyframes.values()
        for nearest in (each.before, *each.of_records)
        if nearest is not None
    }
    kept = sorted(times, key=lambda seq: (times[seq], seq), reverse=True)[:keyframe_count]
    needed = {name for name, each in keyframes.items() if any(entry.seq in kept for entry in each.entries)}
    for tip in state.active_tips():
        needed |= set(_segments_between(state.journal, tip, state.lasting_keyframe(tip)))
    for _, point, keyframe in state.tagged_points():
        needed |= set(_segments_between(state.journal, point, keyframe))
    return needed | state.held | set(state.journal.problems)


def _segments_between(journal: Journal, tip: ChainRecord, keyframe: Keyframe | None) -> Iterator[SegmentName]:
    """Yield the segments from a point back to its keyframe; without one, back to the first record."""
    for record in journal.backwards(tip):
        yield record.segment
        if keyframe is not None and record.place == keyframe.record.place:
            return


def put_back_continued(repository: Repository, trash: Iterable[TrashFolder]) -> int:
    """Rename segments of the run back that the chain of a segment in place needs; return how many.

    Raises:
        BackendError: A file cannot be read or renamed.
    """

    def needed(state: JournalState, in_place: Collection[SegmentName]) -> Iterator[SegmentName]:
        for name in state.journal.segments.keys() & in_place:
            tip = state.journal.tip(name)
            keyframes = () if tip is None else state.keyframes(tip)
            nearest = next(iter(keyframes), None)
            if tip is not None and nearest is not None:
                yield from _segments_between(state.journal, tip, nearest)

    return _put_back(repository, trash, needed)


def put_back_points_of(repository: Repository, seq: int) -> int:
    """Rename segments back whose points are restored from a checkpoint that has come back; return how many.

    Raises:
        BackendError: A file cannot be read or renamed.
    """

    def needed(state: JournalState, in_place: Collection[SegmentName]) -> Iterator[SegmentName]:
        for name, each in state.nearest_keyframes().items():
            if any(entry.seq == seq for entry in each.entries):
                yield name

    return _put_back(repository, repository.trash.contents(), needed)


def put_back_needed(repository: Repository, names: Collection[SegmentName], keyframe_count: int | None) -> int:
    """Rename those of these segments back that a collection would keep now; return how many.

    Raises:
        BackendError: A file cannot be read or renamed.
    """
    return _put_back(
        repository,
        repository.trash.contents(),
        lambda state, in_place: needed_segments(state, keyframe_count) & set(names),
    )


def _put_back(
    repository: Repository,
    trash: Iterable[TrashFolder],
    needed: Callable[[JournalState, Collection[SegmentName]], Iterable[SegmentName]],
) -> int:
    run = repository.run
    trashed = {each.name: each.path for folder in trash for each in folder.segments if each.name.run == run}
    if not trashed:
        return 0
    in_place = set(Journals(repository.manifests, clock=repository.clock).names())
    state = JournalState.read(repository, elsewhere=trashed, is_strict=False)
    names = set(needed(state, in_place)) & trashed.keys() - in_place
    # The lowest order first: what is back begins at its keyframe.
    return sum(repository.trash.put_back(trashed[name], name.path) for name in sorted(names))


def require_keyframe(repository: Repository, writer: SegmentWriter) -> None:
    """Close and delete a new segment unless its chain has a keyframe that no process is dropping.

    Call it for a segment that continues the record of another process, before its first record. A drop or a collection
    writes its intents first and reads the segments second.

    Raises:
        ConflictError: The point that it continues is being deleted.
    """
    place = writer.segment.facts.previous
    if place is None:
        return
    try:
        if not _has_lasting_keyframe(repository, place):
            raise ConflictError(
                f"record {place.number} of the journal of run {repository.run!r}, which was to be continued, is being "
                "deleted",
                where=repository.backend.root,
                todo="commit again: the next commit stores the whole state",
            )
    except BaseException:
        writer.close()
        with contextlib.suppress(FileNotFoundError, CkstoreError):
            repository.backend.unlink(writer.name.path)
        raise


def _has_lasting_keyframe(repository: Repository, place: RecordPlace) -> bool:
    journal = Journals(repository.manifests, clock=repository.clock).read()
    record = journal.find(place)
    if record is None:
        return False
    entries = _entries_of(repository, is_strict=False)
    keyframes = journal.keyframes(record, entries, structures_of(repository.manifests))
    return any(not repository.tags.intents_on(keyframe.entry.seq) for keyframe in keyframes)
