"""Find every copy of a pack, and move damaged files of a store to quarantine.

``PackCopies`` finds a pack in place, in the trash, in quarantine and in copies of the store. It changes nothing.
Contents are taken from the directory only if its digest is right; otherwise frames are found by a scan.

``quarantine_damaged`` moves unreadable manifests and unreferenced torn packs:
- A pack stays if any manifest names it, or if it may still be being written.
- No pack is moved while an unreadable manifest is in place, since that may name any pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ckstore.config import Limits
from ckstore.display import repr_of_summary
from ckstore.errors import BackendError, CkstoreError, CorruptError, MalformedError, UnsupportedError
from ckstore.format import paths
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader, check_payload, decode_frame_header
from ckstore.format.manifest import PackRef
from ckstore.format.pack import (
    SUPERHEADER_NBYTES,
    TAIL_NBYTES,
    DirectoryEntry,
    decode_directory,
    decode_superheader,
    decode_tail,
    scan_frames,
)
from ckstore.format.paths import ManifestName
from ckstore.format.wire import is_zero
from ckstore.hashing import PackId
from ckstore.io.backend import Backend, ReadFile, ReadRequest
from ckstore.io.buffers import BufferPool
from ckstore.store.damage import FramePosition
from ckstore.store.manifests import quarantine_manifest, quarantine_pack
from ckstore.store.memory_budget import read_buffer_nbytes
from ckstore.store.pack_reader import read_frame
from ckstore.store.repository import Repository

READ_BUFFERS = 6

CopyKind = Literal["place", "trash", "quarantine", "elsewhere"]


@dataclass(frozen=True, slots=True)
class PackCopy:
    """One file that may be a copy of a pack."""

    pack_id: PackId
    backend: Backend
    path: str
    kind: CopyKind


@dataclass(frozen=True, slots=True)
class PackContents:
    """What is readable in one copy of a pack.

    Attributes:
        ref: The pack as a manifest would name it; None if its ends are damaged.
        entries: Its frames, from its directory, or from a scan if the directory is damaged.
        problem: What is wrong with its ends; empty if they are sound.
    """

    ref: PackRef | None
    entries: tuple[DirectoryEntry, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class FoundFrame:
    """A frame found in a copy of a pack, with its header."""

    copy: PackCopy
    offset: int
    header: FrameHeader


class PackCopies:
    """All reachable copies of packs.

    Args:
        repository: The store.
        sources: Copies of the store, such as a mirror or a bucket.
    """

    def __init__(self, repository: Repository, sources: Sequence[Backend] = ()) -> None:
        self._repository = repository
        self._sources = sources
        self._broken: dict[str, PackContents] = {}

    def copies_of(self, pack_id: PackId) -> Iterator[PackCopy]:
        """Yield the files that may be copies of a pack, the one in place first."""
        backend, name = self._repository.backend, paths.pack_name(pack_id)
        is_found = False
        for path in self._repository.trash.paths_of(pack_id):
            if path == name and is_found:
                # The trash was searched completely.
                break
            if backend.stat(path) is not None:
                is_found = True
                yield PackCopy(pack_id, backend, path, "place" if path == name else "trash")
        quarantined = f"{paths.quarantine_packs_folder()}/{paths.pack_file(pack_id)}"
        if backend.stat(quarantined) is not None:
            yield PackCopy(pack_id, backend, quarantined, "quarantine")
        for source in self._sources:
            if source.stat(name) is not None:
                yield PackCopy(pack_id, source, name, "elsewhere")

    def all_copies(self, named: Iterable[PackId]) -> Iterator[PackCopy]:
        """Yield every file that is a pack. Of ``sources``, yield only packs in ``named``."""
        backend = self._repository.backend
        folders: list[tuple[str, CopyKind]] = [(folder, "place") for folder in paths.pack_folders()]
        folders += [(paths.trash_packs_folder(gc_id), "trash") for gc_id in self._repository.trash.folders()]
        folders.append((paths.quarantine_packs_folder(), "quarantine"))
        for folder, kind in folders:
            for file in backend.list_names(folder):
                pack_id = paths.parse_pack_file(file)
                if pack_id is not None:
                    yield PackCopy(pack_id, backend, f"{folder}/{file}", kind)
        for pack_id in sorted(named):
            yield from (copy for copy in self.copies_of(pack_id) if copy.kind == "elsewhere")

    def read_contents(self, copy: PackCopy) -> PackContents:
        """Read the ends of a pack. If they are damaged, scan for its frames.

        Raises:
            FileNotFoundError: The file no longer exists.
        """
        if copy.path in self._broken and copy.kind != "elsewhere":
            return self._broken[copy.path]
        file = copy.backend.open_read(copy.path)
        try:
            try:
                return self._by_directory(file, copy.pack_id)
            except (CorruptError, UnsupportedError, BackendError) as error:
                found = PackContents(None, tuple(self._by_scan(file)), error.what)
        finally:
            file.close()
        if copy.kind != "elsewhere":
            self._broken[copy.path] = found
        return found

    def _by_directory(self, file: ReadFile, pack_id: PackId) -> PackContents:
        store_id, limits = self._repository.store_id, self._repository.limits
        decode_superheader(file.read_at(0, SUPERHEADER_NBYTES), store_id=store_id, pack_id=pack_id)
        tail = decode_tail(
            file.read_at(max(0, file.nbytes - TAIL_NBYTES), TAIL_NBYTES),
            pack_nbytes=file.nbytes,
            store_id=store_id,
            pack_id=pack_id,
            limits=limits,
        )
        stored = file.read_at(tail.directory_offset, file.nbytes - TAIL_NBYTES - tail.directory_offset)
        directory = decode_directory(stored[: tail.directory_nbytes], tail, limits=limits)
        if not is_zero(memoryview(stored)[tail.directory_nbytes :]):
            raise MalformedError("the padding after the directory is not zero")
        return PackContents(PackRef(pack_id, file.nbytes, tail.directory_digest), directory.entries)

    def _by_scan(self, file: ReadFile) -> Iterator[DirectoryEntry]:
        try:
            for offset, header in scan_frames(file.read_at, file.nbytes, limits=self._repository.limits):
                yield DirectoryEntry.of(header, offset=offset)
        except BackendError:
            # The rest cannot be read. Frames found before may still be useful.
            return

    def read(self, copy: PackCopy, offset: int, stored_nbytes: int) -> tuple[FrameHeader, bytes]:
        """Return header and payload of a frame after checking both.

        Raises:
            CorruptError: They are damaged.
            FileNotFoundError: The file no longer exists.
        """
        file = copy.backend.open_read(copy.path)
        try:
            content = file.read_at(offset, FRAME_HEADER_NBYTES + stored_nbytes)
        finally:
            file.close()
        header = decode_frame_header(content[:FRAME_HEADER_NBYTES], limits=self._repository.limits)
        payload = content[FRAME_HEADER_NBYTES:]
        check_payload(header, payload)
        return header, payload

    def check(self, copy: PackCopy, places: Iterable[FramePosition]) -> dict[FramePosition, FrameHeader | None]:
        """Read frames where manifests locate them. Return the header of each sound frame, None for others."""
        limits = self._repository.limits
        ordered = sorted(places, key=lambda place: place[1])
        found: dict[FramePosition, FrameHeader | None] = dict.fromkeys(ordered)
        file = copy.backend.open_read(copy.path)
        done: set[int] = set()
        try:
            with BufferPool(read_buffer_nbytes(limits), READ_BUFFERS) as pool:
                requests = (
                    ReadRequest(file, offset, FRAME_HEADER_NBYTES + stored_nbytes, index)
                    for index, (_, offset, stored_nbytes) in enumerate(ordered)
                )
                try:
                    for result in copy.backend.read_ranges(requests, pool):
                        try:
                            found[ordered[result.tag]] = _sound_header(result.view, ordered[result.tag], limits)
                            done.add(result.tag)
                        finally:
                            result.release()
                except BackendError:
                    # Some bytes cannot be read at all. Read frame by frame to find out which.
                    for index in sorted(set(range(len(ordered))) - done):
                        found[ordered[index]] = self._check_frame(copy.backend, file, ordered[index], pool)
        finally:
            file.close()
        return found

    def _check_frame(
        self, backend: Backend, file: ReadFile, place: FramePosition, pool: BufferPool
    ) -> FrameHeader | None:
        try:
            result = read_frame(backend, file, place[1], FRAME_HEADER_NBYTES + place[2], pool)
        except CkstoreError:
            return None
        try:
            return _sound_header(result.view, place, self._repository.limits)
        finally:
            result.release()


def _sound_header(view: memoryview, place: FramePosition, limits: Limits) -> FrameHeader | None:
    """Return the header of a frame if it is the frame that the manifest names, and its payload is intact."""
    chunk_id, _, stored_nbytes = place
    try:
        header = decode_frame_header(view[:FRAME_HEADER_NBYTES], limits=limits)
        if (header.chunk_id, header.stored_nbytes) != (chunk_id, stored_nbytes):
            return None
        check_payload(header, view[FRAME_HEADER_NBYTES:])
    except (CorruptError, UnsupportedError):
        return None
    return header


AGE_NS_MIN = 3600 * 10**9
"""A younger pack may be one that a commit is writing."""


@dataclass(frozen=True, slots=True)
class QuarantineReport:
    """What was, or would be, moved to quarantine.

    Attributes:
        is_dry_run: Nothing was moved.
        manifests: For the name of each unreadable manifest, what is wrong with it.
        packs: For the name of each torn pack, what is wrong with it.
        left: Sentences on files that cannot be read and stay.
    """

    is_dry_run: bool
    manifests: dict[str, str]
    packs: dict[str, str]
    left: tuple[str, ...]

    __repr__ = repr_of_summary


def quarantine_damaged(repository: Repository, *, dry_run: bool) -> QuarantineReport:
    """Find damaged files and, unless it is a dry run, move them to quarantine."""
    manifests: dict[ManifestName, str] = {}
    named: set[PackId] = set()
    left: list[str] = []
    for run in repository.runs():
        manifests_of_run = repository.manifests_of(run)
        listing = manifests_of_run.listing()
        for name in (*listing.names, *listing.lower):
            try:
                named |= {pack.pack_id for pack in manifests_of_run.load(name).packs}
            except FileNotFoundError:
                continue
            except (UnsupportedError, BackendError) as error:
                # Not damage: a newer ckstore, or a working disk, may read it.
                left.append(str(error))
            except CorruptError as error:
                manifests[name] = error.what
    packs = {} if manifests or left else _torn_packs(repository, named)
    if not dry_run:
        for name in manifests:
            quarantine_manifest(repository.backend, name)
        for pack_id in packs:
            quarantine_pack(repository.backend, paths.pack_name(pack_id), pack_id)
    return QuarantineReport(
        dry_run,
        {name.path: problem for name, problem in manifests.items()},
        {paths.pack_name(pack_id): problem for pack_id, problem in packs.items()},
        tuple(left),
    )


def _torn_packs(repository: Repository, named: set[PackId]) -> dict[PackId, str]:
    copies, now_ns = PackCopies(repository), repository.clock.now_ns()
    found: dict[PackId, str] = {}
    for folder in paths.pack_folders():
        for file in repository.backend.list_names(folder):
            pack_id = paths.parse_pack_file(file)
            info = repository.backend.stat(f"{folder}/{file}")
            if pack_id is None or info is None or pack_id in named or now_ns - info.modified_ns < AGE_NS_MIN:
                continue
            try:
                contents = copies.read_contents(PackCopy(pack_id, repository.backend, f"{folder}/{file}", "place"))
            except FileNotFoundError:
                continue
            if contents.problem:
                found[pack_id] = contents.problem
    return found
