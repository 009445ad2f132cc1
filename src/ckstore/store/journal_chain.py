"""A run's journal at one moment: its chains of records, the keyframes of a point, and the newest state of the run.

Nothing here depends on where segments are stored. Records are read when they are first needed, from the newest segment
backwards.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckstore.config import Limits
from ckstore.errors import ChecksumError, CkstoreError, CorruptError, UnsupportedError
from ckstore.format.header import ManifestHeader
from ckstore.format.journal import (
    SEGMENT_HEADER_NBYTES,
    PlacedHead,
    RecordHead,
    Segment,
    find_head_behind,
    read_heads,
)
from ckstore.format.logical import EXACT_FIDELITY
from ckstore.format.paths import SegmentName
from ckstore.format.records import RecordPlace
from ckstore.io.backend import Backend, ReadFile, map_concurrent

_log = logging.getLogger("ckstore")


class ChainRecord(NamedTuple):
    """A record, and where it is.

    Args:
        segment: Its segment.
        head: Its head.
        offset: Where it begins in the segment, in bytes.
    """

    segment: SegmentName
    head: RecordHead
    offset: int

    @property
    def placed(self) -> PlacedHead:
        """Its head and offset, for ``format.journal``."""
        return PlacedHead(self.head, self.offset)

    @property
    def place(self) -> RecordPlace:
        """What a segment that continues it says."""
        return RecordPlace(token=self.segment.token, number=self.head.number, record_id=self.head.record_id)


@dataclass(frozen=True, slots=True)
class SegmentRecords:
    """The whole records of a segment.

    Attributes:
        records: In their order.
        end: Where the last one ends, in bytes.
        nbytes: Length of the file. What is behind ``end`` was torn, or is damaged.
    """

    records: tuple[ChainRecord, ...]
    end: int
    nbytes: int


class Entry(NamedTuple):
    """A checkpoint of the run.

    Args:
        seq: Its seq.
        step: Its step.
        is_archival: It is never the latest: archival, or in replay form.
        is_exact: Its bytes are those that were committed.
        is_rewound: A rewind has published it again.
        time_ns: When it was made; None: unknown.
    """

    seq: int
    step: int
    is_archival: bool = False
    is_exact: bool = True
    is_rewound: bool = False
    time_ns: int | None = None


def entry_of(header: ManifestHeader) -> Entry:
    """Return what the rules of a journal need of a checkpoint."""
    is_exact = header.fidelity == EXACT_FIDELITY
    is_never_latest = header.is_archival or header.may_be_in_replay_form
    # A demotion sets the origin as well. It makes a lossy checkpoint, of a higher generation, or one in replay form.
    is_rewound = header.origin_id is not None and not is_never_latest and (is_exact or not header.generation)
    return Entry(header.seq, header.step, is_never_latest, is_exact, is_rewound, header.time_ns)


StructureOf = Callable[[Entry], "bytes | None"]
"""Returns ``format.journal.structure_of`` of a checkpoint; None if it was dropped or cannot be read."""


class Keyframe(NamedTuple):
    """A checkpoint from which a point can be computed.

    Args:
        entry: The checkpoint.
        record: The record of the same state.
        replayed: The records to replay after it, in their order. The last one is the point.
    """

    entry: Entry
    record: ChainRecord
    replayed: tuple[ChainRecord, ...]


class Nearest(NamedTuple):
    """The nearest keyframe of a record.

    Args:
        entry: The checkpoint.
        record: The record of the same state.
    """

    entry: Entry
    record: ChainRecord


class SegmentKeyframes(NamedTuple):
    """The nearest keyframes of the records of a segment; None: a record has none.

    Args:
        before: That of the record that the segment continues.
        of_records: Those of its own records, in their order.
    """

    before: Nearest | None
    of_records: tuple[Nearest | None, ...]

    @property
    def tip(self) -> Nearest | None:
        """That of the last record of the chain that ends in the segment."""
        return self.of_records[-1] if self.of_records else self.before

    @property
    def entries(self) -> list[Entry]:
        """The keyframes from which its points are restored, each once, in the order of the records."""
        found = dict.fromkeys(each for each in (self.of_records or (self.before,)) if each is not None)
        return list(dict.fromkeys(each.entry for each in found))


class Journal:
    """The segments of a run's journal at one moment.

    Args:
        segments: Their headers, by name.
        problems: Segments that cannot be used, and why. Damage that is found later is added.
        open_segment: Opens a segment for reading, also for callers; FileNotFoundError if it was removed meanwhile.
        limits: Limits of the store.
    """

    def __init__(
        self,
        segments: Mapping[SegmentName, Segment],
        problems: Mapping[SegmentName, CkstoreError],
        open_segment: Callable[[SegmentName], ReadFile],
        *,
        limits: Limits,
    ) -> None:
        self.segments = dict(sorted(segments.items()))
        self.problems = dict(problems)
        self.open_segment = open_segment
        self._limits = limits
        self._by_token = {name.token: name for name in self.segments}
        self._records: dict[SegmentName, SegmentRecords] = {}
        previous = (segment.facts.previous for segment in segments.values())
        # The last record of a segment may be torn, unless another segment continues it: then it was durable before.
        self._continued = frozenset(place.record_id for place in previous if place is not None)

    def records(self, name: SegmentName) -> SegmentRecords:
        """Return the whole records of a segment. They are read once.

        Raises:
            BackendError: The segment cannot be read.
        """
        if name not in self._records:
            try:
                file = self.open_segment(name)
            except FileNotFoundError:
                self._records[name] = SegmentRecords((), 0, 0)
                return self._records[name]
            try:
                self._records[name] = self._read(name, file)
            finally:
                file.close()
        return self._records[name]

    def read_all(self, backend: Backend) -> None:
        """Read the records of all segments, concurrently in a bucket: each head is a request.

        Args:
            backend: Where the segments are.

        Raises:
            BackendError: A segment cannot be read.
        """
        for _ in map_concurrent(backend, self.records, self.segments):
            pass

    def _read(self, name: SegmentName, file: ReadFile) -> SegmentRecords:
        segment, found = self.segments[name], []
        end, nbytes = SEGMENT_HEADER_NBYTES, file.nbytes
        try:
            for head, offset in read_heads(
                file.read_at, nbytes, segment, limits=self._limits, where=name.path, continued=self._continued
            ):
                found.append(ChainRecord(name, head, offset))
                end = offset + head.nbytes
            number = found[-1].head.number if found else segment.facts.first - 1
            behind = find_head_behind(file.read_at, end, nbytes, number, limits=self._limits)
            if behind is not None:
                raise ChecksumError(
                    f"record {number + 1} of a journal is damaged, and the records behind it are lost with it",
                    where=name.path,
                    todo="copy the file back from a backup; the records before it are intact",
                    number=number + 1,
                    number_behind=behind.number,
                )
        except (CorruptError, UnsupportedError) as error:
            self.problems[name] = error
            _log.warning("a journal ends early: %s", error)
        return SegmentRecords(tuple(found), end, nbytes)

    def end_before(self, record: ChainRecord, problem: CkstoreError) -> None:
        """Leave out a record that cannot be used, and those behind it in its segment."""
        found = self.records(record.segment)
        kept = tuple(each for each in found.records if each.head.number < record.head.number)
        self._records[record.segment] = SegmentRecords(kept, record.offset, found.nbytes)
        self.problems[record.segment] = problem

    def find(self, place: RecordPlace) -> ChainRecord | None:
        """Return the record of this place; None if it is not there, or damaged."""
        name = self._by_token.get(place.token)
        records = () if name is None else self.records(name).records
        index = place.number - records[0].head.number if records else -1
        if not 0 <= index < len(records) or records[index].head.record_id != place.record_id:
            return None
        return records[index]

    def tip(self, name: SegmentName) -> ChainRecord | None:
        """Return the last record of the chain that ends in a segment. A segment may only continue another one."""
        found = self.records(name)
        if found.records or not found.nbytes:
            return found.records[-1] if found.records else None
        previous = self.segments[name].facts.previous
        return None if previous is None else self.find(previous)

    def backwards(self, record: ChainRecord) -> Iterator[ChainRecord]:
        """Yield a record and those before it in its chain, up to the first one that exists."""
        current: ChainRecord | None = record
        while current is not None:
            records = self.records(current.segment).records
            yield from reversed(records[: current.head.number - records[0].head.number + 1])
            # Numbers decrease from segment to segment, so this ends.
            previous = self.segments[current.segment].facts.previous
            current = None if previous is None else self.find(previous)

    def keyframes(self, point: ChainRecord, entries: Sequence[Entry], structure_of: StructureOf) -> Iterator[Keyframe]:
        """Yield the keyframes of a point, the nearest first.

        Equal step and structure do not prove that a checkpoint is the state of the record. A reader compares checksums
        before it replays, and takes the next keyframe if they differ.

        Args:
            point: The record.
            entries: All checkpoints of the run.
            structure_of: Reads the structure of one; called only for those of the record's step.
        """
        by_step = _by_step(entry for entry in entries if entry.is_exact)
        replayed: list[ChainRecord] = []
        for record in self.backwards(point):
            for entry in self._entries_of(record, by_step, structure_of):
                yield Keyframe(entry, record, tuple(reversed(replayed)))
            replayed.append(record)

    def _entries_of(
        self, record: ChainRecord, by_step: Mapping[int, Sequence[Entry]], structure_of: StructureOf
    ) -> Iterator[Entry]:
        """Yield the exact checkpoints that may be the state of a record, in the order in which to try them."""
        # Those that did not exist when the segment was created come first: one of them is the writer's own.
        for entry in sorted(
            by_step.get(record.head.step, ()), key=lambda each: (not self.is_own(each, record), each.seq)
        ):
            if structure_of(entry) == record.head.structure and not self._is_of_another_branch(entry, record):
                yield entry

    def _is_of_another_branch(self, entry: Entry, record: ChainRecord) -> bool:
        """Whether a checkpoint was made before the record before this one, so that it is another state of its step."""
        if entry.time_ns is None or self.is_own(entry, record):
            return False
        before = next(itertools.islice(self.backwards(record), 1, None), None)
        return before is not None and entry.time_ns < before.head.time_ns

    def is_own(self, entry: Entry, record: ChainRecord) -> bool:
        """Whether a checkpoint was published after the segment of a record was created, perhaps by its writer."""
        return entry.seq > self._after_seq(record)

    def nearest_keyframes(
        self, entries: Sequence[Entry], structure_of: StructureOf
    ) -> dict[SegmentName, SegmentKeyframes]:
        """Return the nearest keyframe of every record, in one pass over all heads.

        Args:
            entries: All checkpoints of the run.
            structure_of: Reads the structure of one; called only for those of a record's step.
        """
        structure_of = functools.cache(structure_of)
        by_step = _by_step(entry for entry in entries if entry.is_exact)
        found: dict[SegmentName, SegmentKeyframes] = {}
        for name, segment in self.segments.items():
            # The order of a segment is above that of the one that it continues.
            nearest = before = self._nearest_at(segment.facts.previous, found)
            of_records = []
            for record in self.records(name).records:
                entry = next(self._entries_of(record, by_step, structure_of), None)
                nearest = nearest if entry is None else Nearest(entry, record)
                of_records.append(nearest)
            found[name] = SegmentKeyframes(before, tuple(of_records))
        return found

    def _nearest_at(self, place: RecordPlace | None, found: Mapping[SegmentName, SegmentKeyframes]) -> Nearest | None:
        record = None if place is None else self.find(place)
        if record is None or record.segment not in found:
            return None
        first = self.records(record.segment).records[0].head.number
        return found[record.segment].of_records[record.head.number - first]

    def newest(self, entries: Sequence[Entry], structure_of: StructureOf) -> ChainRecord | Entry | None:
        """Return the newest state of the run, a point or a checkpoint (docs/FORMAT.md, section 14).

        Args:
            entries: All checkpoints of the run.
            structure_of: Reads the structure of one.
        """
        structure_of = functools.cache(structure_of)
        latest = max((each for each in entries if not each.is_archival), key=lambda each: each.seq, default=None)
        for name in reversed(self.segments):
            tip = self.tip(name)
            if tip is None or next(self.keyframes(tip, entries, structure_of), None) is None:
                continue
            after_seq = self.segments[name].facts.after_seq
            if latest is None or (after_seq is not None and latest.seq <= after_seq):
                return tip
            own = self._record_of(latest, tip, entries, structure_of)
            is_tip = own is not None and own.place == tip.place
            return latest if own is None or (is_tip and latest.is_exact) else tip
        return latest

    def _record_of(
        self, entry: Entry, tip: ChainRecord, entries: Sequence[Entry], structure_of: StructureOf
    ) -> ChainRecord | None:
        """Return the record that the writer of a chain made of a checkpoint; None if another process committed it.

        Entries and records are made in one order. So if an older entry belongs to the same record or a later one, this
        entry was committed after the chain had ended.
        """
        if entry.is_rewound:
            return None
        by_step = _by_step(each for each in entries if each.seq < entry.seq)
        own, others = None, set[int]()
        for record in self.backwards(tip):
            older = by_step.get(record.head.step, ())
            matching = {each.seq for each in older if self._may_be(each, record, structure_of)}
            if own is None:
                others |= matching
                own = record if self._may_be(entry, record, structure_of) else None
            else:
                others -= matching
            if own is not None and not others:
                return own
        return None

    def _may_be(self, entry: Entry, record: ChainRecord, structure_of: StructureOf) -> bool:
        """Whether the writer of a record may have committed this checkpoint as the same state."""
        return (
            entry.step == record.head.step
            and self.is_own(entry, record)
            and structure_of(entry) == record.head.structure
        )

    def _after_seq(self, record: ChainRecord) -> int:
        after_seq = self.segments[record.segment].facts.after_seq
        return -1 if after_seq is None else after_seq


def _by_step(entries: Iterable[Entry]) -> dict[int, list[Entry]]:
    found: dict[int, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.step, []).append(entry)
    return found
