"""Repair segments of journals: find damaged records, and write the segment again with records of its copies.

A record has the same offset in each copy of its segment. So a segment is read record by record: each from the store if
it is whole there, else from the first copy that has it whole.

Invariants:
- A record is taken from a copy only where the store has, or had, a record. So a store that was set back does not get
  points of its former self.
- What cannot be found stays as it is, and the damaged file stays in quarantine.
- A segment that a process is appending to is not changed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from ckstore.config import Limits, is_name
from ckstore.errors import CkstoreError, CorruptError, UnsupportedError
from ckstore.format import paths
from ckstore.format.journal import (
    NO_RECORD,
    RECORD_ALIGN,
    RECORD_HEAD_NBYTES,
    SEGMENT_HEADER_NBYTES,
    PlacedHead,
    RecordHead,
    Segment,
    check_record,
    decode_record_head,
    decode_segment,
    heads_behind,
)
from ckstore.format.paths import SegmentName
from ckstore.format.records import RecordPlace
from ckstore.io.backend import Appending, Backend, Distant, ReadFile
from ckstore.store.journal_chain import ChainRecord, Journal, Nearest
from ckstore.store.journal_needs import JournalState
from ckstore.store.journals import Journals
from ckstore.store.manifests import quarantine_segment
from ckstore.store.repository import Repository
from ckstore.store.segment_copies import Piece, write_segment

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class SegmentRepair:
    """A damaged segment of a journal.

    Attributes:
        run: Its run.
        path: Its path in the store.
        problem: What is damaged.
        sources: Where missing records were found: addresses of copies. Empty: nowhere, so the segment stays as it is.
        lost_steps: Steps of points that cannot be restored, also after the repair. That of a record with a
            damaged head is unknown.
        is_lost: Whether any record is lost, also after the repair.
        todo: What to do about these; empty if there are none.
        is_done: Whether it was written again.
    """

    run: str
    path: str
    problem: str
    sources: tuple[str, ...]
    lost_steps: tuple[int, ...]
    is_lost: bool
    todo: str
    is_done: bool = False


class _Scan(NamedTuple):
    """A segment, record by record.

    Args:
        segment: Its header.
        pieces: Of which file which bytes: number of the file, begin, end.
        whole: How many of the records are whole.
        lost: Numbers of records of which no file has all bytes.
        last: Number of the last record.
        behind: Heads of records behind the last one: one between is damaged, and so all of them are lost.
    """

    segment: Segment
    pieces: list[tuple[int, int, int]]
    whole: int
    lost: list[int]
    last: int
    behind: list[RecordHead]

    @property
    def end(self) -> int:
        """Where the last record ends."""
        return self.pieces[-1][2]


def plan_segments(repository: Repository, sources: Sequence[Backend]) -> list[SegmentRepair]:
    """Read every segment of every journal, and return the damaged ones. Changes nothing.

    Args:
        repository: The store.
        sources: Copies of the store. Tiers are searched, too, if a segment is damaged.
    """
    found: list[SegmentRepair] = []
    for run in filter(is_name, repository.backend.list_names(paths.JOURNALS_FOLDER)):
        run_repository = repository.for_run(run)
        journal = Journals(run_repository.manifests, clock=repository.clock).read()
        damaged: dict[SegmentName, tuple[str, _Scan | None, tuple[str, ...]]] = {}
        for name in sorted({*journal.segments, *journal.problems}):
            with contextlib.suppress(FileNotFoundError):
                row = _examine(run_repository, journal, name, sources)
                if row is not None:
                    damaged[name] = row
        if damaged:
            found += _described(run_repository, damaged)
    return found


def replace_segment(repository: Repository, repair: SegmentRepair, sources: Sequence[Backend]) -> bool:
    """Write a damaged segment again; return whether that was done.

    REQUIRES: This process holds the lease of the run.
    """
    name = paths.parse_segment_file(repair.run, repair.path.rpartition("/")[2])
    assert name is not None, "its name was listed"
    backend = repository.backend
    required = _required(Journals(repository.manifests, clock=repository.clock).read(), name)
    with _copies(repository, name, sources) as (files, _):
        before, after = _scan(files[:1], name, repository, required), _scan(files, name, repository, required)
        if after is None or _is_locked(backend, name) or after.whole <= (0 if before is None else before.whole):
            return False
        # What is behind the last record is not understood, so it is kept.
        rest = files[0].nbytes // RECORD_ALIGN * RECORD_ALIGN
        pieces = [Piece(files[index], begin, end) for index, begin, end in after.pieces]
        pieces += [Piece(files[0], after.end, rest)] if rest > after.end else []
        whole = after.whole

        def check(draft: ReadFile) -> None:
            written = _scan([draft], name, repository, required)
            if written is None or written.whole < whole:
                raise CorruptError("a segment was not written as it was read", where=draft.name, todo="try again")

        quarantine_segment(backend, name)
        return write_segment(backend, name, pieces, check=check, is_wanted=lambda: True, replaces=True)


def _examine(
    repository: Repository, journal: Journal, name: SegmentName, sources: Sequence[Backend]
) -> tuple[str, _Scan | None, tuple[str, ...]] | None:
    """Return what is wrong with a segment, what can be had of it, and from where; None if it is sound."""
    error = journal.problems.get(name)
    if isinstance(error, UnsupportedError):
        return None
    required = _required(journal, name)
    with closing(repository.backend.open_read(name.path)) as file:
        before = _scan([file], name, repository, required)
        problem = _problem(before, required, error)
        is_torn = before is not None and before.end < file.nbytes
    unrepaired = (problem, before, ()) if problem else None
    # In a bucket there is no second name that could keep the damaged object.
    if not (problem or is_torn) or isinstance(repository.backend, Distant) or _is_locked(repository.backend, name):
        return unrepaired
    with _copies(repository, name, sources) as (files, places):
        after = _scan(files, name, repository, required)
        if after is None or after.whole <= (0 if before is None else before.whole):
            return unrepaired
        used = {places[index] for index, _, _ in after.pieces if index}
    return problem or "the last record is not whole, and a copy has it", after, tuple(sorted(used))


def _problem(before: _Scan | None, required: int, error: CkstoreError | None) -> str:
    if before is None:
        return "the header is damaged" if error is None else error.what
    if before.lost:
        return f"record {before.lost[0]} is damaged"
    if before.behind or before.last < required:
        return f"record {before.last + 1} is damaged, and the records behind it are lost with it"
    return ""


def _described(
    repository: Repository, damaged: Mapping[SegmentName, tuple[str, _Scan | None, tuple[str, ...]]]
) -> Iterator[SegmentRepair]:
    state = JournalState.read(repository, is_strict=False)
    for name, (problem, scan, used) in damaged.items():
        is_lost = scan is None or bool(scan.lost or scan.behind)
        steps = _lost_steps(state, name, scan) if is_lost else ()
        todo = _todo(repository, name) if is_lost else ""
        yield SegmentRepair(repository.run, name.path, problem, used, steps, is_lost, todo)


def _todo(repository: Repository, name: SegmentName) -> str:
    if isinstance(repository.backend, Distant):
        return "delete the object, and mirror or push again from the store that it is a copy of"
    if _is_locked(repository.backend, name):
        return "stop the trainer, whose journal it is, and repair again"
    return "repair with --from COPY if a copy of the store has the segment, or restore another step"


def _lost_steps(state: JournalState, name: SegmentName, scan: _Scan | None) -> tuple[int, ...]:
    """Return the steps of the points, also of other segments, that cannot be computed without the lost records."""
    lost = () if scan is None else scan.lost
    committed = {entry.step for entry in state.entries if not entry.is_archival}
    steps = {head.step for head in (() if scan is None else scan.behind)} - committed
    for each, found in state.nearest_keyframes().items():
        for record, keyframe in zip(state.journal.records(each).records, found.of_records, strict=True):
            if record.head.step not in committed and _needs(state.journal, record, keyframe, name, lost):
                steps.add(record.head.step)
    return tuple(sorted(steps))


def _needs(
    journal: Journal, record: ChainRecord, keyframe: Nearest | None, name: SegmentName, lost: Collection[int]
) -> bool:
    """Whether a restore of a point reads one of the lost records of a segment, or one that is not found there."""
    first = record
    for first in journal.backwards(record):
        if first.segment == name and first.head.number in lost:
            return True
        if keyframe is not None and first.place == keyframe.record.place:
            return False
    previous = journal.segments[first.segment].facts.previous
    return previous is not None and previous.token == name.token


def _required(journal: Journal, name: SegmentName) -> int:
    """Return the number of the last record of a segment that another one continues: it was acknowledged."""
    places = (segment.facts.previous for segment in journal.segments.values())
    return max((place.number for place in places if place is not None and place.token == name.token), default=0)


def _is_locked(backend: Backend, name: SegmentName) -> bool:
    return isinstance(backend, Appending) and backend.is_locked(name.path)


@contextmanager
def _copies(
    repository: Repository, name: SegmentName, sources: Sequence[Backend]
) -> Iterator[tuple[list[ReadFile], list[str]]]:
    """Open a segment in the store, then its copies in these places and in tiers that can be reached; yield their roots.

    The first file is that of the store.
    """
    backends = [*sources]
    for tier in repository.tiers.addresses():
        try:
            backends.append(repository.tiers.open(tier))
        except CkstoreError as error:
            _log.warning("the tier %r was not searched for %s: %s", tier, name.file, error)
    with ExitStack() as stack:
        files, roots = list[ReadFile](), list[str]()
        for backend in (repository.backend, *backends):
            try:
                files.append(stack.enter_context(closing(backend.open_read(name.path))))
                roots.append(backend.root)
            except FileNotFoundError:
                if backend is repository.backend:
                    raise
        yield files, roots


def _scan(files: Sequence[ReadFile], name: SegmentName, repository: Repository, required: int) -> _Scan | None:
    """Read a segment record by record, each from the first file that has it whole; None without a sound header.

    Args:
        files: The segment in the store, then its copies.
        name: Its name.
        repository: The store and its run.
        required: Records up to this number were acknowledged, wherever the file in the store ends.
    """
    headers = [_header(file, name, repository.store_id) for file in files]
    segment = next((header for header in headers if header is not None), None)
    if segment is None:
        return None
    pieces = [(headers.index(segment), 0, SEGMENT_HEADER_NBYTES)]
    before, home, limits = segment.facts.previous, files[0], repository.limits
    previous, number = (NO_RECORD, 0) if before is None else (before.record_id, before.number)
    whole, lost, offset = 0, list[int](), SEGMENT_HEADER_NBYTES
    while True:
        # A copy has nothing to say about records that the store never had.
        nbytes_max = home.nbytes if number >= required else None
        chosen = _record_at(
            files, RecordPlace(token=name.token, number=number, record_id=previous), offset, nbytes_max, limits
        )
        if chosen is None:
            break
        index, head, is_whole = chosen
        previous, number = head.record_id, head.number
        pieces.append((index, offset, offset + head.nbytes))
        offset += head.nbytes
        whole += is_whole
        lost += [] if is_whole else [number]
    behind = list(heads_behind(home.read_at, offset, home.nbytes, number, limits=limits))
    if lost and lost[-1] == number > required and not behind:
        # The end may be torn: then this record was never acknowledged.
        lost.pop()
        pieces.pop()
        number -= 1
    return _Scan(segment, pieces, whole, lost, number, behind)


def _record_at(
    files: Sequence[ReadFile], before: RecordPlace, offset: int, nbytes_max: int | None, limits: Limits
) -> tuple[int, RecordHead, bool] | None:
    """Return the file from which to take a record, its head, and whether it is whole there; None: no file has it."""
    damaged: tuple[int, RecordHead, bool] | None = None
    for index, file in enumerate(files):
        head = _head_at(file, offset, before, limits)
        if head is None or (nbytes_max is not None and offset + head.nbytes > nbytes_max):
            continue
        if _is_whole(file, PlacedHead(head, offset), limits):
            return index, head, True
        if not index:
            damaged = index, head, False
    return damaged


def _header(file: ReadFile, name: SegmentName, store_id: bytes) -> Segment | None:
    try:
        segment = decode_segment(file.read_at(0, SEGMENT_HEADER_NBYTES), store_id=store_id)
    except (CorruptError, UnsupportedError):
        return None
    facts = segment.facts
    return segment if (facts.run, facts.order, segment.token) == (name.run, name.order, name.token) else None


def _head_at(file: ReadFile, offset: int, before: RecordPlace, limits: Limits) -> RecordHead | None:
    try:
        head = decode_record_head(file.read_at(offset, RECORD_HEAD_NBYTES), limits=limits)
    except (CorruptError, UnsupportedError):
        return None
    is_next = (head.previous, head.number) == (
        before.record_id,
        before.number + 1,
    ) and offset + head.nbytes <= file.nbytes
    return head if is_next else None


def _is_whole(file: ReadFile, placed: PlacedHead, limits: Limits) -> bool:
    try:
        check_record(file.read_at, placed, limits=limits)
    except (CorruptError, UnsupportedError):
        return False
    return True
