"""Copy the segments of journals between a store and its copies (docs/FORMAT.md, section 14: Journals in other stores).

Invariants:
- Only whole records are copied, and every byte of them is checked on the way.
- A copy is replaced only by a longer one that begins with the same records.
- A damaged segment does not keep others from being copied. The caller raises ``SegmentCopy.failure`` at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace

from ckstore.config import Limits
from ckstore.errors import CkstoreError, ConflictError, CorruptError, UnsupportedError, counted
from ckstore.format.journal import RECORD_HEAD_NBYTES, SEGMENT_HEADER_NBYTES
from ckstore.format.paths import SegmentName
from ckstore.io.backend import Backend, Distant, FileInfo, ReadFile, map_concurrent
from ckstore.store.journal_chain import Journal, SegmentRecords
from ckstore.store.journal_needs import JournalState
from ckstore.store.journals import Journals
from ckstore.store.manifests import Manifests
from ckstore.store.repository import Repository
from ckstore.store.segment_copies import Piece, check_segment, write_segment
from ckstore.store.tier_checks import NOT_OURS

_NAMED_MAX = 10


@dataclass(slots=True)
class SegmentCopy:
    """Copies segments to one place, each one once.

    Args:
        source: Where they come from.
        target: Where they go to; None: a place that does not exist yet, in a dry run.
        limits: Limits of the store.
        reads_back: Check every byte again after an upload.
        is_dry_run: Only count.
        brings_back: The target is the store: segments that it has are not changed.

    Attributes:
        points: Records that were copied, by run.
        nbytes: Bytes of the segments that were written.
        problems: Segments that were not copied, and why.
    """

    source: Backend
    target: Backend | None
    limits: Limits
    reads_back: bool = False
    is_dry_run: bool = False
    brings_back: bool = False
    points: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    problems: dict[SegmentName, CkstoreError] = field(default_factory=dict)

    @property
    def point_count(self) -> int:
        """Records that were copied."""
        return sum(self.points.values())

    def run(self, journal: Journal, names: Iterable[SegmentName]) -> None:
        """Copy these segments, the lowest order first.

        Raises:
            CapacityError: The place is full.
            BackendError: The place does not respond.
        """
        ordered = sorted(names)
        target = self.target
        # In a bucket, sizes are asked for concurrently. Most segments have been copied before.
        infos = [None] * len(ordered) if target is None else map_concurrent(target, _stat_in(target), ordered)
        for name, info in zip(ordered, [*infos], strict=True):
            try:
                self._copy(journal, name, info)
            except FileNotFoundError:
                # It was collected since it was listed.
                continue
            except (CorruptError, ConflictError, UnsupportedError) as error:
                self.problems[name] = error

    def failure(self, what_was_not: str, report: object) -> CkstoreError | None:
        """Return one error for all problems; None if there are none.

        Args:
            what_was_not: What did not happen to the segments: ``"pushed"``.
            report: The whole result, stored as an attribute of the error.
        """
        if not self.problems:
            return None
        names = list(self.problems)
        first = self.problems[names[0]]
        listed = ", ".join(f"{name.run}/{name.file}" for name in names[:_NAMED_MAX])
        return type(first)(
            f"not {what_was_not}: {counted(len(names), 'segment')} of journals ({listed}); of the first, {first.what}",
            where=first.where,
            todo=first.todo,
            report=report,
        )

    def _copy(self, journal: Journal, name: SegmentName, info: FileInfo | None) -> None:
        if name in journal.problems:
            raise self._damage_error(name, journal.problems[name])
        found = journal.records(name)
        if name in journal.problems:
            raise self._damage_error(name, journal.problems[name])
        if not found.nbytes:
            raise FileNotFoundError(name.path)
        if info is not None and info.nbytes == found.end:
            return
        with closing(self.source.open_read(name.path)) as file:
            there = None if self.target is None else self._records_there(self.target, name, found, file)
            if there is not None and (there >= len(found.records) or self.brings_back):
                return
            is_new = self.target is not None and (self.is_dry_run or self._write(self.target, journal, name, file))
            if is_new or self.target is None:
                self.points[name.run] = self.points.get(name.run, 0) + len(found.records) - (there or 0)
                self.nbytes += found.end

    def _records_there(self, target: Backend, name: SegmentName, found: SegmentRecords, file: ReadFile) -> int | None:
        """Return how many of our records a copy there has; None: there is no copy.

        A record's id covers all records before it. So equal heads of one record mean equal records up to it.

        Raises:
            ConflictError: The copy has other bytes, or ends within a record.
        """
        info = target.stat(name.path)
        if info is None:
            return None
        count = sum(record.offset + record.head.nbytes <= info.nbytes for record in found.records)
        last = found.records[count - 1] if count else None
        end = SEGMENT_HEADER_NBYTES if last is None else last.offset + last.head.nbytes
        is_equal = info.nbytes == end or (info.nbytes > end and count == len(found.records))
        with closing(target.open_read(name.path)) as copy:
            ranges = [(0, SEGMENT_HEADER_NBYTES)] + ([] if last is None else [(last.offset, RECORD_HEAD_NBYTES)])
            is_equal = is_equal and all(bytes(copy.read_at(*each)) == bytes(file.read_at(*each)) for each in ranges)
        if not is_equal:
            raise ConflictError(
                "another file has the name of a journal's segment there, or the copy is damaged",
                where=target.location_of(name.path),
                todo=NOT_OURS,
            )
        return count

    def _write(self, target: Backend, journal: Journal, name: SegmentName, file: ReadFile) -> bool:
        found, segment = journal.records(name), journal.segments[name]
        tip = found.records[-1].place if found.records else segment.facts.previous

        def check_sent(copy: ReadFile) -> None:
            try:
                check_segment(copy, segment, tip, nbytes=found.end, limits=self.limits, where=here)
            except CorruptError as error:
                raise self._damage_error(name, error) from error

        def is_wanted() -> bool:
            there = self._records_there(target, name, found, file)
            return there is None or (there < len(found.records) and not self.brings_back)

        here = self.source.location_of(name.path)
        if isinstance(target, Distant):
            check_sent(file)
        pieces = [Piece(file, 0, found.end)]
        replaces = not self.brings_back
        is_new = write_segment(target, name, pieces, check=check_sent, is_wanted=is_wanted, replaces=replaces)
        if is_new and isinstance(target, Distant):
            with closing(target.open_read(name.path)) as copy:
                if copy.nbytes < found.end:
                    raise CorruptError("a segment has another size there", where=copy.name, todo=NOT_OURS)
                if self.reads_back:
                    there = target.location_of(name.path)
                    check_segment(copy, segment, tip, nbytes=found.end, limits=self.limits, where=there)
        return is_new

    def _damage_error(self, name: SegmentName, error: CkstoreError) -> CkstoreError:
        todo = "restore the file there from a copy" if self.brings_back else "run `ckstore repair`, then try again"
        what = f"a segment of a journal was not copied: {error.what}"
        if isinstance(error, UnsupportedError):
            return UnsupportedError(what, where=self.source.location_of(name.path), todo=error.todo)
        return CorruptError(what, where=self.source.location_of(name.path), todo=todo)


def _stat_in(target: Backend) -> Callable[[SegmentName], FileInfo | None]:
    return lambda name: target.stat(name.path)


def segments_of(state: JournalState, seqs: Collection[int]) -> list[SegmentName]:
    """Return the segments with a record whose nearest keyframe is one of these checkpoints."""
    nearest = state.nearest_keyframes().items()
    return [name for name, each in nearest if any(entry.seq in seqs for entry in each.entries)]


def state_there(repository: Repository, place: Backend) -> JournalState:
    """Return the run's journal in another place, and the checkpoints here."""
    manifests = Manifests(place, repository.run, store_id=repository.store_id, limits=repository.limits)
    journal = Journals(manifests, clock=repository.clock).read()
    journal.read_all(place)
    return replace(JournalState.read(repository, is_strict=False), journal=journal)


def has_segments(repository: Repository, place: Backend) -> bool:
    """Return whether a place has segments of the run."""
    manifests = Manifests(place, repository.run, store_id=repository.store_id, limits=repository.limits)
    return bool(Journals(manifests, clock=repository.clock).names())
