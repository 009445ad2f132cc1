"""Read everything, believe nothing, report; change nothing.

Levels, each with all of the one before:
- ``quick``: whole manifests with their digests; size, superheader, tail and directory of every pack they
  name; every location against the directory; claims, tags and config.json.
- ``read``: every stored byte, past the page cache where the file system allows it; checksums, padding.
- ``decode``: every frame decoded, and its BLAKE3 compared: everything a restore would find.

Not looked at, because losing it loses nothing: ``leases``, ``tmp``, ``trash``, ``gc.lock``, and packs that
no manifest names.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckstore.config import READ_BUFFERS, READ_BUFFERS_MIN, Policy, fit_memory
from ckstore.errors import BackendError, CkstoreError, CorruptError, MalformedError, UnsupportedError, UsageError
from ckstore.format import layout
from ckstore.format.frame import FRAME_ALIGN, FRAME_HEADER_NBYTES, FrameHeader, check_payload, decode_frame_header
from ckstore.format.layout import ManifestName
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
from ckstore.format.records import ConfigRecord, decode_record
from ckstore.format.wire import BLOCK_NBYTES, is_zero
from ckstore.ids import NO_BASE, PackId
from ckstore.io.backend import ReadFile, ReadRequest, ReadResult
from ckstore.io.buffers import BufferPool
from ckstore.store.damage import Damage, PackUses, Place, Report, Sufferers, Uses, label_of
from ckstore.store.manifests import Manifests
from ckstore.store.parts import Parts
from ckstore.store.tags import Tags
from ckstore.workers import run_aside

__all__ = ["LEVELS", "Damage", "FrameCheck", "Report", "verify"]

LEVELS = ("quick", "read", "decode")
CONFIG_NBYTES_MAX = 1 << 20

FrameCheck = Callable[[FrameHeader, memoryview], None]
"""Decodes a payload and compares its identity; raises CorruptError."""


def verify(
    parts: Parts,
    level: str,
    names: Iterable[tuple[str, ManifestName]] | None,
    *,
    make_check: Callable[[], FrameCheck],
    check_nbytes: int,
    policy: Policy,
    on_progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Check the manifests given, or all of the store, and what they need.

    Args:
        parts: The store.
        level: One of LEVELS.
        names: Run and name of each manifest; None: all runs.
        make_check: Makes, for each thread, what decodes a frame.
        check_nbytes: Memory that what ``make_check`` makes may use.
        policy: How many threads, and how much memory for them and for read buffers.
        on_progress: Called after each read, and each pack, with bytes done and bytes in all.
    """
    if level not in LEVELS:
        raise UsageError(f"level must be one of {', '.join(LEVELS)}", where=f"level={level!r}")
    report = Report(level)
    uses = Uses()
    is_partial = names is not None
    if names is None:
        names = list(_all_names(parts, report))
        _check_config(parts, report)
    for run, name in names:
        _check_manifest(parts.manifests_of(run), name, uses, report)
    total = sum(next(iter(pack.refs.values())).nbytes for pack in uses.packs.values())

    def tell() -> None:
        if on_progress is not None:
            on_progress(report.bytes_read, total)

    check = _Checking(make_check, check_nbytes, policy, tell)
    sufferers = Sufferers(parts)
    stop = _Stop()

    def audit_all() -> None:
        for pack_id in sorted(uses.packs):
            _PackAudit(parts, pack_id, uses, report, check, sufferers, stop, is_partial).run()
            if stop.error is not None:
                return
            tell()

    run_aside(audit_all, on_interrupt=stop.note)
    return report


def _all_names(parts: Parts, report: Report) -> Iterator[tuple[str, ManifestName]]:
    for run in parts.runs():
        manifests = parts.manifests_of(run)
        listing = manifests.listing()
        claims = {
            claim.seq
            for file in parts.backend.list_names(layout.claims_folder(run))
            if (claim := layout.parse_claim_file(file)) is not None and claim.kind == "claim"
        }
        for name in (*listing.names, *listing.lower):
            if name.seq in listing.dropped:
                continue
            if name.seq not in claims:
                where = parts.backend.location_of(layout.claim_name(run, name.seq))
                report.damage.append(Damage("the claim of a published seq is missing", where, (label_of(name),)))
            yield run, name
        _check_tags(parts, run, {name.seq for name in listing.names}, report)


def _check_tags(parts: Parts, run: str, seqs: set[int], report: Report) -> None:
    tags = Tags(parts.backend, run, parts.clock)
    for file in parts.backend.list_names(layout.tags_folder(run)):
        where = parts.backend.location_of(f"{layout.tags_folder(run)}/{file}")
        if not layout.is_name(file):
            continue
        try:
            record = tags.get(file)
        except CorruptError as error:
            report.damage.append(Damage(error.what, where))
            continue
        if record.seq not in seqs:
            report.damage.append(Damage(f"the tag points to seq {record.seq}, which is not in place", where))


def _check_config(parts: Parts, report: Report) -> None:
    try:
        content = parts.backend.read_bytes(layout.CONFIG_FILE, nbytes_max=CONFIG_NBYTES_MAX)
        decode_record(content, ConfigRecord, nbytes_max=CONFIG_NBYTES_MAX)
    except FileNotFoundError:
        return
    except CkstoreError as error:
        report.damage.append(Damage(error.what, parts.backend.location_of(layout.CONFIG_FILE)))


def _check_manifest(manifests: Manifests, name: ManifestName, uses: Uses, report: Report) -> None:
    where = manifests.backend.location_of(manifests.path_of(name))
    try:
        manifest = manifests.load(name)
    except FileNotFoundError:
        # Dropped or replaced since it was listed.
        return
    except (CorruptError, UnsupportedError, BackendError) as error:
        report.damage.append(Damage(error.what, where, (label_of(name),)))
        return
    report.checkpoint_count += 1
    uses.add(name, manifest)


@dataclass(slots=True)
class _Stop:
    """Why to end before everything was looked at: the first failure of the checking itself."""

    error: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Keep the first one."""
        self.error = self.error or error


@dataclass(frozen=True, slots=True)
class _Checking:
    """How frames are checked, with how much memory, and who is told of each read."""

    make_check: Callable[[], FrameCheck]
    check_nbytes: int
    policy: Policy
    tell: Callable[[], None]

    def fit(self, level: str, buffer_nbytes: int) -> tuple[int, int]:
        """Return how many threads and buffers the policy's memory holds."""
        return fit_memory(
            self.policy.thread_count,
            self.check_nbytes if level == "decode" else 1,
            buffer_nbytes,
            buffers_wanted=READ_BUFFERS,
            buffers_min=READ_BUFFERS_MIN,
            memory_nbytes_max=self.policy.memory_nbytes_max,
        )


@dataclass(slots=True)
class _Span:
    """A run of frames that one read covers, padding behind the last one included."""

    offset: int
    nbytes: int
    entries: tuple[DirectoryEntry, ...]


class _PackAudit:
    """Checks one pack against everything that is said of it."""

    def __init__(
        self,
        parts: Parts,
        pack_id: PackId,
        uses: Uses,
        report: Report,
        checking: _Checking,
        sufferers: Sufferers,
        stop: _Stop,
        is_partial: bool,
    ) -> None:
        self._parts = parts
        self._pack_id = pack_id
        self._names = uses.names
        self._uses: PackUses = uses.packs[pack_id]
        self._report = report
        self._checking = checking
        self._sufferers = sufferers
        self._is_partial = is_partial
        self._stop = stop
        self._lock = threading.Lock()
        self._where = parts.backend.location_of(layout.pack_name(pack_id))

    def run(self) -> None:
        """Check, and add what is wrong to the report."""
        self._report.pack_count += 1
        file = self._open()
        if file is None:
            self._add("the pack is missing")
            return
        try:
            tail, directory = self._check_ends(file)
            self._check_uses(directory)
            if self._report.level != "quick":
                self._check_frames(file, tail, directory)
        except (CorruptError, UnsupportedError, BackendError) as error:
            self._add(error.what)
        finally:
            file.close()

    def _open(self) -> ReadFile | None:
        for name in (layout.pack_name(self._pack_id), *self._parts.trash.find_pack(self._pack_id)):
            try:
                return self._parts.backend.open_read(name)
            except FileNotFoundError:
                continue
        return None

    def _check_ends(self, file: ReadFile) -> tuple[PackTail, PackDirectory]:
        store_id, limits = self._parts.store_id, self._parts.limits
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
                checkpoint = label_of(self._names[index])
                raise MalformedError(f"size or directory is not what the manifest of {checkpoint} says")
        return tail, directory

    def _check_uses(self, directory: PackDirectory) -> None:
        there = {_place_of(entry) for entry in directory.entries}
        for place in self._uses.places:
            if place not in there:
                chunk_id, offset, _ = place
                self._add(f"chunk {chunk_id.hex()[:16]} does not lie where the manifest says", offset, place)

    def _check_frames(self, file: ReadFile, tail: PackTail, directory: PackDirectory) -> None:
        spans = list(self._spans(tail, directory))
        nbytes = max((span.nbytes for span in spans), default=0) + 2 * BLOCK_NBYTES
        nbytes = -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
        thread_count, buffer_count = self._checking.fit(self._report.level, nbytes)
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
                for result in self._parts.backend.read_ranges(requests, pool):
                    self._report.bytes_read += len(result.view)
                    inbox.put(result)
                    self._checking.tell()
                    if self._stop.error is not None:
                        break
            finally:
                for _ in threads:
                    inbox.put(None)
                for thread in threads:
                    thread.join()
        if self._stop.error is not None:
            raise self._stop.error

    def _spans(self, tail: PackTail, directory: PackDirectory) -> Iterator[_Span]:
        """Cut the frames into reads; each span ends where the next begins, so that no byte is left out."""
        span_nbytes_max = self._parts.limits.chunk_nbytes_max + BLOCK_NBYTES
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
        check = self._checking.make_check() if self._report.level == "decode" else None
        while (result := inbox.get()) is not None:
            try:
                # After a failure the rest is only let go of, so that the reader is not left waiting for buffers.
                if self._stop.error is None:
                    self._check_span(spans[result.tag], result.view, check)
            except BaseException as error:
                self._stop.note(error)
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
                header = decode_frame_header(frame[:FRAME_HEADER_NBYTES], limits=self._parts.limits)
                check_entry(entry, header)
                payload = frame[FRAME_HEADER_NBYTES:]
                check_payload(header, payload)
                if not is_zero(view[entry.end - span.offset : end - span.offset]):
                    raise MalformedError("the padding behind a frame is not zero")
                if check is not None and header.base_id == NO_BASE:
                    check(header, payload)
                elif check is not None:
                    raise UnsupportedError("the frame is a delta, which this version cannot decode")
            except (CorruptError, UnsupportedError) as error:
                self._add(error.what, entry.offset, _place_of(entry))
            with self._lock:
                self._report.frame_count += 1

    def _add(self, what: str, offset: int | None = None, place: Place | None = None) -> None:
        """Add damage, of one frame or of all of the pack, with the checkpoints that need it."""
        hit = list(self._uses.refs) if place is None else self._uses.places.get(place, [])
        if self._is_partial and not hit:
            # A frame that only other checkpoints need, in a pack that this one shares with them.
            return
        where = self._where if offset is None else f"{self._where}, offset {offset}"
        checkpoints = tuple(label_of(self._names[index]) for index in hit)
        with self._lock:
            self._report.damage.append(Damage(what, where, checkpoints, self._tensors_of(hit, place)))

    def _tensors_of(self, hit: Sequence[int], place: Place | None) -> tuple[str, ...]:
        if not hit:
            return ()
        name = self._names[hit[0]]
        if place is None:
            return self._sufferers.of_pack(name, self._pack_id)
        return self._sufferers.of_frame(name, place[0])


def _place_of(entry: DirectoryEntry) -> Place:
    return entry.chunk_id, entry.offset, entry.stored_nbytes
