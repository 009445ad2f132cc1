"""Check the journals of a store: every byte of every segment. ``verify`` runs these audits.

Levels, as for packs: ``quick`` reads the headers of segments, the heads of records, and a whole record where it can be
torn: the last one of a segment that no other segment continues. ``read`` checks every byte of every record. ``decode``
also decodes what a record says and every frame, and compares chunk ids.

The torn end of a segment is no damage: its writer was killed before it acknowledged the record. It becomes a note. If
another segment continues the record that is missing there, it was acknowledged, and is damaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import closing

from ckstore.codec.frame_decoder import FrameDecoder
from ckstore.config import is_name
from ckstore.errors import CorruptError, MalformedError, UnsupportedError, counted
from ckstore.format import paths
from ckstore.format.frame import FRAME_HEADER_NBYTES
from ckstore.format.journal import Read, check_record, read_body, read_frames
from ckstore.format.paths import SegmentName
from ckstore.format.points import decode_point
from ckstore.io.backend import Appending
from ckstore.store.damage import Damage, Report
from ckstore.store.journal_chain import ChainRecord, Journal
from ckstore.store.journals import Journals
from ckstore.store.repository import Repository


def journal_audits(repository: Repository, report: Report) -> Iterator[JournalAudit]:
    """Yield an audit for each run that has a journal."""
    for run in filter(is_name, repository.backend.list_names(paths.JOURNALS_FOLDER)):
        audit = JournalAudit(repository.for_run(run), report)
        if audit.names:
            yield audit


class JournalAudit:
    """Check the journal of one run.

    Args:
        repository: The store and its run.
        report: Receives the damage found.
    """

    def __init__(self, repository: Repository, report: Report) -> None:
        self._repository = repository
        self._report = report
        self._decoder = FrameDecoder(repository.limits.chunk_nbytes_max)
        self._journals = Journals(repository.manifests, clock=repository.clock)
        self.names = self._journals.names()
        """The segments."""

    @property
    def nbytes(self) -> int:
        """Bytes that ``run`` reads."""
        if self._report.level == "quick":
            return 0
        infos = (self._repository.backend.stat(name.path) for name in self.names)
        return sum(info.nbytes for info in infos if info is not None)

    def run(self, tell: Callable[[], None]) -> None:
        """Check all segments, and report their damage; call ``tell`` after each.

        Raises:
            BackendError: The storage cannot read a segment.
        """
        journal = self._journals.read()
        for name in journal.problems:
            self._report.segment_count += 1
            self._add_problem(journal, name)
        for name in journal.segments:
            self._report.segment_count += 1
            self._check(journal, name)
            tell()

    def _check(self, journal: Journal, name: SegmentName) -> None:
        # Asked before the segment is read: a writer that ends meanwhile leaves whole records.
        is_written = self._is_written(name)
        found = journal.records(name)
        self._report.point_count += len(found.records)
        if name in journal.problems:
            self._add_problem(journal, name)
        elif found.nbytes > found.end and not is_written:
            where = self._repository.backend.location_of(name.path)
            torn = counted(found.nbytes - found.end, "byte")
            self._report.notes.append(f"{where} has a torn end of {torn}, which was never acknowledged")
        self._check_previous(journal, name)
        if self._report.level == "quick" or not found.records:
            return
        try:
            file = journal.open_segment(name)
        except FileNotFoundError:
            # It was collected meanwhile.
            return
        with closing(file):
            for record in found.records:
                self._check_record(file.read_at, record)
                self._report.bytes_read += record.head.nbytes

    def _check_previous(self, journal: Journal, name: SegmentName) -> None:
        previous = journal.segments[name].facts.previous
        if previous is None or journal.find(previous) is not None:
            return
        for other in journal.segments:
            if other.token == previous.token and other not in journal.problems and journal.records(other).nbytes:
                what = f"record {previous.number} of a journal is damaged; {name.file} continues it"
                self._report.add(Damage(what, self._repository.backend.location_of(other.path)))

    def _check_record(self, read: Read, record: ChainRecord) -> None:
        where = self._repository.backend.location_of(record.segment.path)
        limits = self._repository.limits
        try:
            check_record(read, record.placed, limits=limits, where=where)
            if self._report.level == "decode":
                self._decode(read, record, where)
        except (CorruptError, UnsupportedError) as error:
            what = f"record {record.head.number} of a journal (step {record.head.step}): {error.what}"
            self._report.add(Damage(what, f"{where}, offset {record.offset}"), error)

    def _decode(self, read: Read, record: ChainRecord, where: str) -> None:
        limits = self._repository.limits
        point = decode_point(read_body(read, record.placed, where=where), limits=limits, where=where)
        expected = [chunk_id for blob in point.blobs for chunk_id, _ in blob.chunks]
        frames = list(read_frames(read, record.placed, limits=limits, where=where))
        if [header.chunk_id for header, _ in frames] != expected:
            raise MalformedError("its frames are not those that it names", where=where)
        for header, offset in frames:
            payload = memoryview(read(offset + FRAME_HEADER_NBYTES, header.stored_nbytes)).cast("B")
            self._decoder.check_frame(header, payload)
            self._report.frame_count += 1

    def _is_written(self, name: SegmentName) -> bool:
        backend = self._repository.backend
        with contextlib.suppress(FileNotFoundError):
            return isinstance(backend, Appending) and backend.is_locked(name.path)
        return False

    def _add_problem(self, journal: Journal, name: SegmentName) -> None:
        error = journal.problems[name]
        self._report.add(Damage(error.what, self._repository.backend.location_of(name.path)), error)
