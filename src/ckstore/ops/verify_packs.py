"""Check one pack against everything that is said of it: its ends, its directory, and every byte of its frames.

What the audits of one verify share: what is needed, what is found, how frames are checked, when to end.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckstore.config import READ_BUFFERS, READ_BUFFERS_MIN, Policy, fit_memory
from ckstore.errors import BackendError, CorruptError, MalformedError, UnsupportedError, is_refused
from ckstore.format import paths
from ckstore.format.frame import FRAME_ALIGN, FRAME_HEADER_NBYTES, FrameHeader, check_payload, decode_frame_header
from ckstore.format.pack import (
    SUPERHEADER_NBYTES,
    TAIL_NBYTES,
    DirectoryEntry,
    PackDirectory,
    PackTail,
    check_entry,
    decode_directory,
    decode_superheader,
    decode_tail,
)
from ckstore.format.wire import BLOCK_NBYTES, is_zero
from ckstore.hashing import NO_BASE, PackId
from ckstore.io.backend import Backend, ReadFile, ReadRequest, ReadResult
from ckstore.io.buffers import BufferPool
from ckstore.store.chunk_index import LOCAL_TIER, LOST_TIER
from ckstore.store.damage import AffectedTensors, Damage, FramePosition, PackUses, Report, Uses, label_of
from ckstore.store.pack_reader import read_ranges, readable_from
from ckstore.store.repository import Repository


class FrameCheck(Protocol):
    """Decodes a payload and compares the identity of what comes out; raises CorruptError."""

    def __call__(self, header: FrameHeader, payload: memoryview, base: memoryview | None = None, /) -> memoryview:
        """Return the plain bytes, which last until the next call; they lie where ``base`` lay if it was as long."""
        ...


@dataclass(slots=True)
class Stop:
    """Why to end before everything was looked at: the first failure of the checking itself."""

    error: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Keep the first one."""
        self.error = self.error or error


@dataclass(slots=True, eq=False)
class Audit:
    """One verify.

    Args:
        repository: The store.
        uses: What the manifests need.
        report: What is found.
        make_check: Makes, for each thread, what decodes a frame.
        check_nbytes: Memory that what ``make_check`` makes may use.
        policy: How many threads, and how much memory for them and for read buffers.
        tell: Called after each read, and each pack.
        is_partial: Only some checkpoints are looked at, so that damage no one of them suffers is left out.
        is_remote: Packs of other tiers are looked at, where they lie there and not here.
    """

    repository: Repository
    uses: Uses
    report: Report
    make_check: Callable[[], FrameCheck]
    check_nbytes: int
    policy: Policy
    tell: Callable[[], None]
    is_partial: bool
    is_remote: bool = False
    stop: Stop = field(default_factory=Stop)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _damaged: set[tuple[PackId, FramePosition]] = field(default_factory=set)
    _affected: AffectedTensors = field(init=False)

    def __post_init__(self) -> None:
        self._affected = AffectedTensors(self.repository)

    def fit(self, buffer_nbytes: int, *, check_nbytes: int | None = None) -> tuple[int, int]:
        """Return how many threads and buffers the policy's memory holds."""
        return fit_memory(
            self.policy.thread_count,
            self.check_nbytes if check_nbytes is None else check_nbytes,
            buffer_nbytes,
            buffers_wanted=READ_BUFFERS,
            buffers_min=READ_BUFFERS_MIN,
            memory_nbytes_max=self.policy.memory_nbytes_max,
        )

    def add(
        self,
        pack_id: PackId,
        what: str,
        offset: int | None = None,
        place: FramePosition | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Add damage, of one frame or of all of a pack, with the checkpoints that need it; ``error`` as it came."""
        uses = self.uses.packs[pack_id]
        hit = list(uses.refs) if place is None else uses.places.get(place, [])
        if self.is_partial and not hit:
            # A frame that only other checkpoints need, in a pack that this one shares with them.
            return
        where = self.home_of(pack_id).location_of(paths.pack_name(pack_id))
        if offset is not None:
            where = f"{where}, offset {offset}"
        checkpoints = tuple(label_of(self.uses.names[index]) for index in hit)
        with self.lock:
            if place is not None:
                self._damaged.add((pack_id, place))
            tensors = self._tensors_of(hit, pack_id, place)
            self.report.add(Damage(what, where, checkpoints, tensors), error)

    def home_of(self, pack_id: PackId) -> Backend:
        """Return where a pack lies as manifests say: here, if one of them says so."""
        tiers = {ref.tier for ref in self.uses.packs[pack_id].refs.values()}
        if tiers & {LOCAL_TIER, LOST_TIER}:
            return self.repository.backend
        return self.repository.tiers.open(min(tiers))

    def is_damaged(self, pack_id: PackId, place: FramePosition) -> bool:
        """Whether damage of this frame was found already."""
        return (pack_id, place) in self._damaged

    def _tensors_of(self, hit: list[int], pack_id: PackId, place: FramePosition | None) -> tuple[str, ...]:
        if not hit:
            return ()
        name = self.uses.names[hit[0]]
        if place is None:
            return self._affected.of_pack(name, pack_id)
        return self._affected.of_frame(name, place[0])


@dataclass(slots=True)
class _Span:
    """A run of frames that one read covers, padding behind the last one included."""

    offset: int
    nbytes: int
    entries: tuple[DirectoryEntry, ...]


class PackAudit:
    """Checks one pack.

    Args:
        audit: The verify that this is part of.
        pack_id: Which one.
    """

    def __init__(self, audit: Audit, pack_id: PackId) -> None:
        self._audit = audit
        self._repository = audit.repository
        self._pack_id = pack_id
        self._uses: PackUses = audit.uses.packs[pack_id]
        self._report = audit.report

    def run(self) -> None:
        """Check, and add what is wrong to the report."""
        self._report.pack_count += 1
        try:
            file = self._open()
        except BackendError as error:
            if not is_refused(error):
                raise
            self._audit.add(self._pack_id, error.what, error=error)
            return
        if file is None:
            is_lost = all(ref.tier == LOST_TIER for ref in self._uses.refs.values())
            self._report.files_torn += not is_lost
            self._add("chunks are lost, as a repair has recorded" if is_lost else "the pack is missing")
            return
        try:
            self.check(file)
        except (CorruptError, UnsupportedError, BackendError) as error:
            self._report.files_torn += isinstance(error, CorruptError)
            self._audit.add(self._pack_id, error.what, error=error)
        finally:
            file.close()

    def check(self, file: ReadFile) -> None:
        """Check the bytes of a file that holds the pack, wherever it lies, and add to the report which are damaged.

        Raises:
            CorruptError: Its ends are damaged, so that nothing can be said of its frames.
            UnsupportedError: A newer ckstore wrote it.
            BackendError: The medium does not give it.
        """
        tail, directory = self._check_ends(file)
        self._check_uses(directory)
        if self._report.level != "quick":
            self._check_frames(file, tail, directory)

    def _open(self) -> ReadFile | None:
        for name in self._repository.trash.paths_of(self._pack_id):
            try:
                return self._repository.backend.open_read(name)
            except FileNotFoundError:
                continue
        home = self._audit.home_of(self._pack_id)
        if home is not self._repository.backend:
            with contextlib.suppress(FileNotFoundError):
                return readable_from(self._repository.backend, home, home.open_read(paths.pack_name(self._pack_id)))
        return None

    def _check_ends(self, file: ReadFile) -> tuple[PackTail, PackDirectory]:
        store_id, limits = self._repository.store_id, self._repository.limits
        decode_superheader(file.read_at(0, SUPERHEADER_NBYTES), store_id=store_id, pack_id=self._pack_id)
        tail = decode_tail(
            file.read_at(max(0, file.nbytes - TAIL_NBYTES), TAIL_NBYTES),
            pack_nbytes=file.nbytes,
            store_id=store_id,
            pack_id=self._pack_id,
            limits=limits,
        )
        end = file.nbytes - TAIL_NBYTES
        stored = file.read_at(tail.directory_offset, end - tail.directory_offset)
        directory = decode_directory(stored[: tail.directory_nbytes], tail, limits=limits)
        if not is_zero(memoryview(stored)[tail.directory_nbytes :]):
            raise MalformedError("the padding behind the directory is not zero")
        self._report.bytes_read += SUPERHEADER_NBYTES + len(stored) + TAIL_NBYTES
        for index, ref in self._uses.refs.items():
            if (ref.nbytes, ref.directory_digest) != (file.nbytes, tail.directory_digest):
                checkpoint = label_of(self._audit.uses.names[index])
                raise MalformedError(f"size or directory is not what the manifest of {checkpoint} says")
        return tail, directory

    def _check_uses(self, directory: PackDirectory) -> None:
        there = {_place_of(entry): entry.base_id for entry in directory.entries}
        for place in self._uses.places:
            chunk_id, offset, _ = place
            base = self._uses.bases.get(place)
            if place not in there:
                self._add(f"chunk {chunk_id.hex()[:16]} does not lie where the manifest says", offset, place)
            elif place in self._uses.disputed or there[place] != (NO_BASE if base is None else base[1][0]):
                self._add(f"chunk {chunk_id.hex()[:16]} needs another base than the manifest says", offset, place)

    def _check_frames(self, file: ReadFile, tail: PackTail, directory: PackDirectory) -> None:
        spans = list(self._spans(tail, directory))
        nbytes = max((span.nbytes for span in spans), default=0) + 2 * BLOCK_NBYTES
        nbytes = -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
        thread_count, buffer_count = self._audit.fit(nbytes, check_nbytes=None if self._decodes else 1)
        inbox: queue.SimpleQueue[ReadResult | None] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=self._work, args=(inbox, spans), name="ckstore-verify", daemon=True)
            for _ in range(min(thread_count, len(spans)))
        ]
        with BufferPool(nbytes, min(buffer_count, len(spans) + 1)) as pool:
            for thread in threads:
                thread.start()
            requests = (ReadRequest(file, span.offset, span.nbytes, tag) for tag, span in enumerate(spans))
            try:
                for result in read_ranges(self._repository.backend, requests, pool):
                    self._report.bytes_read += len(result.view)
                    inbox.put(result)
                    self._audit.tell()
                    if self._audit.stop.error is not None:
                        break
            finally:
                for _ in threads:
                    inbox.put(None)
                for thread in threads:
                    thread.join()
        if self._audit.stop.error is not None:
            raise self._audit.stop.error

    def _spans(self, tail: PackTail, directory: PackDirectory) -> Iterator[_Span]:
        """Cut the frames into reads; each span ends where the next begins, so that no byte is left out."""
        span_nbytes_max = self._repository.limits.chunk_nbytes_max + BLOCK_NBYTES
        begins = [entry.offset for entry in directory.entries]
        ends = [*begins[1:], tail.directory_offset]
        group: list[DirectoryEntry] = []
        behind = SUPERHEADER_NBYTES
        for entry, end in zip(directory.entries, ends, strict=True):
            gap = entry.offset - behind
            if gap >= FRAME_ALIGN:
                raise MalformedError(f"{gap} bytes before offset {entry.offset} belong to no frame")
            behind = entry.end
            if group and end - group[0].offset > span_nbytes_max:
                yield _Span(group[0].offset, entry.offset - group[0].offset, tuple(group))
                group = []
            group.append(entry)
        if tail.directory_offset - behind >= BLOCK_NBYTES:
            raise MalformedError(f"{tail.directory_offset - behind} bytes before the directory belong to no frame")
        if group:
            yield _Span(group[0].offset, tail.directory_offset - group[0].offset, tuple(group))

    def _work(self, inbox: queue.SimpleQueue[ReadResult | None], spans: Sequence[_Span]) -> None:
        check = self._audit.make_check() if self._decodes else None
        while (result := inbox.get()) is not None:
            try:
                # After a failure the rest is only let go of, so that the reader is not left waiting for buffers.
                if self._audit.stop.error is None:
                    self._check_span(spans[result.tag], result.view, check)
            except BaseException as error:
                self._audit.stop.note(error)
            finally:
                result.release()

    def _check_span(self, span: _Span, view: memoryview, check: FrameCheck | None) -> None:
        if len(view) != span.nbytes:
            self._add("the pack ends early", span.offset + len(view))
            return
        ends = [*(entry.offset for entry in span.entries[1:]), span.offset + span.nbytes]
        for entry, end in zip(span.entries, ends, strict=True):
            begin = entry.offset - span.offset
            frame = view[begin : begin + FRAME_HEADER_NBYTES + entry.stored_nbytes]
            try:
                header = decode_frame_header(frame[:FRAME_HEADER_NBYTES], limits=self._repository.limits)
                check_entry(entry, header)
                payload = frame[FRAME_HEADER_NBYTES:]
                check_payload(header, payload)
                if not is_zero(view[entry.end - span.offset : end - span.offset]):
                    raise MalformedError("the padding behind a frame is not zero")
                # What needs a base is decoded when all packs have been looked at.
                if check is not None and not header.has_base:
                    check(header, payload)
            except (CorruptError, UnsupportedError) as error:
                self._add(error.what, entry.offset, _place_of(entry))
            with self._audit.lock:
                self._report.frame_count += 1

    @property
    def _decodes(self) -> bool:
        return self._report.level == "decode"

    def _add(self, what: str, offset: int | None = None, place: FramePosition | None = None) -> None:
        self._audit.add(self._pack_id, what, offset, place)


def _place_of(entry: DirectoryEntry) -> FramePosition:
    return entry.chunk_id, entry.offset, entry.stored_nbytes
