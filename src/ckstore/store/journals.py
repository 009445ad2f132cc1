"""The files of a run's journal: list its segments, read them, wait for their writer, and create new ones.

Invariants:
- A segment gets its name when its header is durable and its lock is held. So a segment without a valid header is
  damaged.
- The record that a new segment continues is durable before the segment exists. Otherwise a power cut could remove it
  from under acknowledged records.
- Segments of other processes are read and never changed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from types import MappingProxyType

from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.errors import (
    CkstoreError,
    ConflictError,
    CorruptError,
    MalformedError,
    UnsupportedError,
)
from ckstore.format import paths
from ckstore.format.journal import SEGMENT_HEADER_NBYTES, Segment, decode_segment, encode_segment, structure_of
from ckstore.format.logical import encoded_tensors
from ckstore.format.paths import SegmentName
from ckstore.format.records import RecordPlace, SegmentRecord
from ckstore.format.tree import encode_tree
from ckstore.hashing import new_token
from ckstore.io.backend import Appending, Distant, map_concurrent
from ckstore.store.journal_chain import Entry, Journal, StructureOf
from ckstore.store.manifests import Manifests
from ckstore.store.segment_writer import SegmentWriter
from ckstore.store.small_files import make_durable_folder
from ckstore.store.store_config import require_same_store

_log = logging.getLogger("ckstore")

WRITER_SECONDS = 60.0
"""How long a process waits for the journal's writer of a previous, dead trainer."""

_POLL_SECONDS = 0.05
_LISTINGS_MAX = 5


def structures_of(manifests: Manifests, *, is_strict: bool = False) -> StructureOf:
    """Return a function that reads the structure of a checkpoint of this run from its manifest.

    It returns None for a checkpoint that was dropped, or whose manifest is damaged. It raises BackendError if the
    manifest cannot be read.

    Args:
        manifests: The manifests of the run.
        is_strict: Raise for a damaged manifest, too.
    """

    def read(entry: Entry) -> bytes | None:
        # A replacement may move the listed generation away before it is read.
        for _ in range(_LISTINGS_MAX):
            name = next((name for name in manifests.listing().names if name.seq == entry.seq), None)
            if name is None:
                return None
            try:
                manifest = manifests.load(name)
                return structure_of(encode_tree(manifest.tree), encoded_tensors(manifest.tensors))
            except FileNotFoundError:
                continue
            except (CorruptError, UnsupportedError) as error:
                if is_strict:
                    raise
                _log.warning("seq %d (step %d) is no keyframe: %s", entry.seq, entry.step, error)
                return None
        return None

    return read


class Journals:
    """The journal of one run.

    Args:
        manifests: The manifests of the run.
        clock: The time source.
    """

    def __init__(self, manifests: Manifests, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._manifests = manifests
        self._backend = manifests.backend
        self._run = manifests.run
        self._clock = clock

    def names(self) -> list[SegmentName]:
        """Return the names of all segments, by ascending order, then token. Foreign names are left out."""
        files = self._backend.list_names(paths.journal_folder(self._run))
        parsed = (paths.parse_segment_file(self._run, file) for file in files)
        return sorted(name for name in parsed if name is not None)

    def read(self, elsewhere: Mapping[SegmentName, str] = MappingProxyType({})) -> Journal:
        """Read the headers of all segments. Damaged ones, and those of a newer ckstore, are reported as problems.

        Args:
            elsewhere: Paths of other segments of the run, in the trash. One that is in place is read there.

        Raises:
            BackendError: A header cannot be read.
        """
        in_place = self.names()
        files = {**elsewhere, **{name: name.path for name in in_place}}
        names = sorted(files)
        segments: dict[SegmentName, Segment] = {}
        problems: dict[SegmentName, CkstoreError] = {}
        headers = map_concurrent(self._backend, lambda name: self._header(name, files[name]), names)
        for name, found in zip(names, headers, strict=True):
            if isinstance(found, Segment):
                segments[name] = found
            elif found is not None:
                problems[name] = found
                _log.warning("skipping a segment of the journal of run %r: %s", self._run, found)
        return Journal(
            segments,
            problems,
            lambda name: self._backend.open_read(files[name]),
            limits=self._manifests.limits,
        )

    def _header(self, name: SegmentName, path: str) -> Segment | CkstoreError | None:
        """Return the header of a segment, why it cannot be used, or None if it was removed since it was listed."""
        where = self._backend.location_of(path)
        try:
            content = self._backend.read_head(path, SEGMENT_HEADER_NBYTES)
            segment = decode_segment(content, store_id=self._manifests.store_id, where=where)
            facts = segment.facts
            if (facts.run, facts.order, segment.token) != (name.run, name.order, name.token):
                raise MalformedError(
                    "a segment of a journal has another name than its header says",
                    where=where,
                    todo="give the file its own name again",
                )
            return segment
        except FileNotFoundError:
            return None
        except (CorruptError, UnsupportedError) as error:
            return error

    def wait_for_writer(self, *, seconds: float) -> None:
        """Wait until no process appends to the newest segment.

        Call it before looking for the newest point, unless the writer is this process or its saver.

        Raises:
            ConflictError: A process still holds the lock after this time.
        """
        backend = self._backend
        if not isinstance(backend, Appending):
            return
        deadline = self._clock.monotonic() + seconds
        while names := self.names():
            newest = names[-1]
            with contextlib.suppress(FileNotFoundError):
                # Listed again: before its writer closed this segment, it may have created the next one.
                if not backend.is_locked(newest.path) and self.names()[-1:] == [newest]:
                    return
            if self._clock.monotonic() >= deadline:
                raise ConflictError(
                    f"another process still writes the journal of run {self._run!r}",
                    where=backend.location_of(newest.path),
                    todo="wait until that process has ended, or stop it; then try again",
                )
            self._clock.sleep(_POLL_SECONDS)

    def open_writer(
        self,
        *,
        previous: RecordPlace | None,
        is_durable: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> SegmentWriter:
        """Create a segment, durably. The caller holds the lease of the run.

        Open it when its first record is about to be appended: without records, it makes the record that it continues
        the newest point of the run, as a rewind does.

        Args:
            previous: The record to continue; None begins a chain.
            is_durable: This process has appended ``previous``. Otherwise its segment is synced first: the process that
                appended it may have been killed before its own sync.
            environment: Texts for people: what may change the result of a step.

        Raises:
            ConflictError: ``previous`` is not in the journal. Or another store is at this path now.
            UnsupportedError: The store is not in a folder.
            CapacityError: The disk is full.
        """
        backend = self._backend
        if not isinstance(backend, Appending):
            raise UnsupportedError(
                "a journal needs a store in a folder",
                where=backend.root,
                todo="keep the store in a folder, and push it",
            )
        self._require_same_store()
        self._make_folder()
        if previous is not None and not is_durable:
            self.secure(previous)
        segment = self._next_segment(previous, environment or {})
        name = SegmentName(self._run, segment.facts.order, segment.token)
        draft = paths.draft_name(new_token(), "ckj")
        file = backend.create_append_file(draft, encode_segment(segment))
        try:
            backend.rename_new(draft, name.path)
            backend.sync_folder(paths.journal_folder(self._run))
            # Checked before and after: if the folder was exchanged in between, one of the checks fails.
            self._require_same_store()
        except BaseException:
            file.close()
            # Nobody else has these names, because tokens are random.
            for leftover in (draft, name.path):
                with contextlib.suppress(CkstoreError, OSError):
                    backend.unlink(leftover)
            raise
        where = backend.location_of(name.path)
        return SegmentWriter(file, name, segment, limits=self._manifests.limits, where=where)

    def discard(self, writer: SegmentWriter) -> None:
        """Remove a segment that has no records, and close it. Only the process that created it may do that.

        Raises:
            BackendError: It cannot be removed. It is closed in any case.
        """
        assert writer.last == writer.segment.facts.previous, "it has no records"
        try:
            self._backend.unlink(writer.name.path)
        finally:
            writer.close()

    def _next_segment(self, previous: RecordPlace | None, environment: Mapping[str, str]) -> Segment:
        """Return the header of a segment that comes after all that are there now."""
        listing = self._manifests.listing()
        seqs = [name.seq for name in (*listing.names, *listing.lower)]
        facts = SegmentRecord(
            run=self._run,
            order=max((name.order for name in self.names()), default=0) + 1,
            after_seq=max(seqs, default=None),
            time_ns=self._clock.now_ns(),
            previous=previous,
            first=1 if previous is None else previous.number + 1,
            environment=dict(environment),
        )
        return Segment(self._manifests.store_id, bytes.fromhex(new_token()), facts)

    def _require_same_store(self) -> None:
        if not isinstance(self._backend, Distant):
            require_same_store(self._backend, self._manifests.store_id)

    def _make_folder(self) -> None:
        """Make the folder of the journal durable, also if a process has made it that was killed before its sync."""
        folder = paths.journal_folder(self._run)
        make_durable_folder(self._backend, folder)
        self._backend.sync_folder("")
        self._backend.sync_folder(paths.JOURNALS_FOLDER)

    def secure(self, place: RecordPlace) -> None:
        """Make a record of another process durable: it may have been killed between the write and its own sync.

        Raises:
            ConflictError: It is not in the journal, or did not reach the disk.
        """
        for name in self.names():
            if name.token == place.token:
                with contextlib.suppress(FileNotFoundError):
                    self._backend.sync_file(name.path)
        self._backend.sync_folder(paths.journal_folder(self._run))
        # Read after the sync: if that process could not write it, the disk has other bytes than the process had.
        if self.read().find(place) is None:
            raise ConflictError(
                f"record {place.number} of the journal of run {self._run!r}, which was to be kept, is gone",
                where=self._backend.location_of(paths.journal_folder(self._run)),
                todo="restore again, from what the store has now",
            )
