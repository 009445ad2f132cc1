"""Copy packs and manifests of a store to another place, and check that they arrived.

The copy can be opened as a store of its own: ``store.json``, packs, claims and manifests have the same names, and its
manifests say that every pack is local. ``PackCopy`` copies packs, ``StoreCopy`` creates the store and puts manifests,
``forget_tier`` removes the name of an unused tier.

Invariants:
- A manifest is put only after every pack that it names was found there with its size and directory digest.
- A different file under one of our names is reported and never replaced.
- In a folder a pack is durable before it gets its name. Every block of a pack is written once, completely.
- If copying fails, nothing is read or written when the function returns, and every buffer is released.
- ``forget_tier`` searches for manifests that name the tier before and after it removes the name. A push publishes such
  a manifest first and checks the address of the tier afterwards. One of the two therefore notices the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from ckstore.concurrency import Latch, map_in_threads
from ckstore.config import MIB
from ckstore.errors import (
    BackendError,
    ChecksumError,
    CkstoreError,
    ConflictError,
    CorruptError,
    NotFoundError,
    UnreachableError,
    UsageError,
)
from ckstore.format import paths
from ckstore.format.header import ManifestHeader
from ckstore.format.manifest import Manifest, PackRef, decode_manifest, encode_manifest
from ckstore.format.records import RECORD_NBYTES_MAX, StoreRecord, decode_record
from ckstore.hashing import PackId, new_token
from ckstore.io.backend import Backend, Distant, PackSink, ReadFile, ReadRequest, Streaming
from ckstore.io.buffers import AlignedBuffer, BufferPool
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.pack_reader import open_pack, read_ranges, readable_from
from ckstore.store.reachability import UNREADABLE, Marker
from ckstore.store.repository import Repository
from ckstore.store.small_files import make_durable_folder, put_small, replace_small
from ckstore.store.tier_checks import NOT_OURS, check_pack, forget_turns

BLOCK_NBYTES = 4 * MIB
SPAN_NBYTES = 512 * MIB
"""Bytes per request. Large, because some servers read the whole object for each range of it."""

SPANS_AT_ONCE = 3


def send_spans(
    file: Streaming, nbytes: int, sink: PackSink, pool: BufferPool, *, request_count: int = SPANS_AT_ONCE
) -> None:
    """Read a whole pack with a few long concurrent requests, and write it in blocks of ``BLOCK_NBYTES``.

    Args:
        file: The pack.
        nbytes: Its size, a multiple of 4096.
        sink: Where to write it.
        pool: Buffers of ``BLOCK_NBYTES``; more of them than concurrent requests.
        request_count: Number of concurrent requests.
    """
    stop = Latch()

    def send(begin: int) -> None:
        count = min(SPAN_NBYTES, nbytes - begin)
        _send_span(file.stream_at(begin, count, piece_nbytes=BLOCK_NBYTES), begin, sink, pool, stop)

    begins = range(0, nbytes, SPAN_NBYTES)
    for _ in map_in_threads(send, begins, count_max=request_count, name="ckstore-copy", on_stop=stop.set):
        pass


def _send_span(pieces: Iterable[memoryview], offset: int, sink: PackSink, pool: BufferPool, stop: Latch) -> None:
    block: AlignedBuffer | None = None
    used = 0
    try:
        for whole in pieces:
            piece = whole
            while len(piece):
                if stop.is_set():
                    return
                block = block or pool.acquire()
                count = min(len(piece), BLOCK_NBYTES - used)
                block.view[used : used + count] = piece[:count]
                used, piece = used + count, piece[count:]
                if used == BLOCK_NBYTES:
                    full, block = block, None
                    sink.write(full, used, offset)
                    offset, used = offset + used, 0
        if block is not None:
            full, block = block, None
            sink.write(full, used, offset)
    finally:
        if block is not None:
            block.release()


def forget_tier(repository: Repository, tier: str) -> str:
    """Remove a tier from the configuration and return its address. Its files are not changed.

    Args:
        repository: The store.
        tier: Name of the tier.

    Raises:
        NotFoundError: There is no such tier.
        UsageError: A manifest names it.
        ConflictError: A manifest cannot be read, so it may name the tier; or a new manifest names it.
    """
    address, where = repository.tiers.addresses().get(tier), repository.backend.location_of(paths.CONFIG_FILE)
    if address is None:
        names = ", ".join(repository.tiers.addresses()) or "none"
        raise NotFoundError(f"there is no tier {tier!r}", where=where, todo=f"existing tiers: {names}")
    user = next(_users(repository, tier), None)
    if user is not None:
        raise UsageError(
            f"{user} names the tier {tier!r}",
            where=address,
            todo="bring its checkpoints back with `ckstore pull`, then run `ckstore trash purge`",
        )
    repository.tiers.forget(tier)
    user = next(_users(repository, tier), None)
    if user is not None:
        repository.tiers.name_for(address, name=tier)
        raise ConflictError(
            f"{user} now names the tier {tier!r}, so it was not removed", where=address, todo="try again"
        )
    forget_turns(repository, tier)
    return address


def require_unused(repository: Repository, place: Backend) -> None:
    """Check that no checkpoint is in an empty place before a new store is created there.

    Raises:
        UnreachableError: A manifest says that its packs are there. A new store would hide that they are missing.
        ConflictError: A manifest cannot be read, so it may name the place.
    """
    tier = repository.tiers.name_at(place.root)
    user = None if tier is None else next(_users(repository, tier), None)
    if user is not None:
        raise UnreachableError(
            f"{user} is in the tier {tier!r}, but the place is empty",
            where=place.root,
            todo="mount its file system, or restore its files; then try again",
        )
    if tier is not None:
        forget_turns(repository, tier)


def _users(repository: Repository, tier: str) -> Iterator[str]:
    """Yield a description of everything that names a tier, including manifests in the trash, which can be restored."""
    marker = Marker(repository)
    marks = marker.mark()
    if marks.unreadable:
        bad = marks.unreadable[0]
        raise ConflictError(
            f"a manifest cannot be read, so it may name the tier {tier!r}: {bad.problem}",
            where=repository.backend.location_of(bad.path),
            todo="run `ckstore verify` for details",
        )
    for marked in marks.manifests.values():
        if any(pack.tier == tier for pack in marker.packs_of(marked)):
            yield f"seq {marked.name.seq} (step {marked.name.step}) of run {marked.name.run!r}"
    if any(tier.encode() in content for content in marks.quarantined):
        yield "a manifest in quarantine"
    for folder in repository.trash.contents():
        for trashed in folder.manifests:
            try:
                marked, _ = marker.read(trashed.name, trashed.path)
            except FileNotFoundError:
                # Purged or undeleted meanwhile. forget_tier checks again and finds an undeleted one in its place.
                continue
            except UNREADABLE as error:
                yield f"possibly an unreadable manifest in the trash ({error.what})"
                continue
            if any(pack.tier == tier for pack in marker.packs_of(marked)):
                yield f"seq {trashed.name.seq} of run {trashed.name.run!r} (in the trash)"


PACKS_AT_ONCE = 3
BLOCKS_PER_PACK = 6
"""Buffers per pack being copied."""

_TRIES = 3


class RelocatedError(ConflictError):
    """A manifest of the same checkpoint has the name there but names other packs: one of the two was rewritten."""


class PackCheck(Protocol):
    """Checks every byte of a pack, and raises if they are not the bytes of the pack."""

    def __call__(self, pack: PackRef, file: ReadFile, *, is_new: bool) -> None:
        """Check a file that holds a pack: a new copy without its final name, or a file that existed already."""
        ...


class PackCopy:
    """Copies packs to one place, several concurrently, each one once.

    Args:
        repository: The store of the packs.
        target: Where to copy them.
        reads_back: Read every copied pack back and compare it with the source.
        check: Checks new packs before they get their name, and existing packs instead of comparing them with the
            source.
        check_new: Checks new packs only; packs that exist there already are compared with the source.
        on_bytes: Called with the bytes of each pack copied or found; from any thread.
    """

    def __init__(
        self,
        repository: Repository,
        target: Backend,
        *,
        reads_back: bool = False,
        check: PackCheck | None = None,
        check_new: PackCheck | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> None:
        self._repository = repository
        self._target = target
        self._reads_back = reads_back
        self._check = check
        self._check_new = check_new or check
        self._on_bytes = on_bytes or (lambda nbytes: None)
        self._lock = threading.Lock()
        self._seen: set[PackId] = set()
        self.copied: dict[PackId, int] = {}
        """Copied packs and their sizes."""

    def run(self, packs: Iterable[PackRef]) -> None:
        """Copy the missing packs, and check that all packs are there.

        Raises:
            CorruptError: A pack there has other bytes, or a pack here is damaged or missing.
            CapacityError: The place is full.
            BackendError: The place does not respond.
        """
        wanted = [pack for pack in packs if pack.pack_id not in self._seen]
        for _ in map_in_threads(self._copy, wanted, count_max=PACKS_AT_ONCE, name="ckstore-copy"):
            pass

    def _copy(self, pack: PackRef) -> None:
        is_new = self._ensure(pack)
        if self._check is not None and not is_new:
            self._check_file(self._check, pack, paths.pack_name(pack.pack_id), is_new=False)
        elif self._reads_back or not is_new:
            # An existing pack may have been changed since it was copied.
            self._read_back(pack)
        with self._lock:
            self._seen.add(pack.pack_id)
            if is_new:
                self.copied[pack.pack_id] = pack.nbytes
        self._on_bytes(pack.nbytes)

    def _ensure(self, pack: PackRef) -> bool:
        """Write a pack unless it exists, and check that it exists. Return True if it was written."""
        is_new = False
        for _ in range(_TRIES):
            if self._target.stat(paths.pack_name(pack.pack_id)) is None:
                self._write(pack)
                is_new = True
            try:
                self._see(pack, is_new=is_new)
                return is_new
            except FileNotFoundError:
                # The pack was removed between the two calls.
                continue
        raise CorruptError(
            "a pack does not exist right after it was written",
            where=self._target.location_of(paths.pack_name(pack.pack_id)),
            todo=NOT_OURS,
        )

    def _write(self, pack: PackRef) -> None:
        for number in range(_TRIES):
            file = open_pack(self._repository, pack, keeps_ranges=False)
            try:
                self._write_once(pack, file)
                return
            except BackendError as error:
                if not error.is_transient or number == _TRIES - 1:
                    raise
            finally:
                file.close()

    def _write_once(self, pack: PackRef, file: ReadFile) -> None:
        name, target = paths.pack_name(pack.pack_id), self._target
        if isinstance(target, Distant):
            # An object has no draft, so the source is checked before the object is written.
            if self._check_new is not None:
                self._check_new(pack, file, is_new=True)
            with contextlib.suppress(FileExistsError):
                self._stream(pack, file, name)
            return
        draft = paths.draft_name(new_token(), "pack")
        try:
            self._stream(pack, file, draft)
            if self._check_new is not None:
                self._check_file(self._check_new, pack, draft, is_new=True)
            make_durable_folder(target, paths.pack_folder(pack.pack_id))
            with contextlib.suppress(FileExistsError):
                target.link(draft, name)
            target.sync_folder(paths.pack_folder(pack.pack_id))
        finally:
            with contextlib.suppress(FileNotFoundError, CkstoreError):
                target.unlink(draft)

    def _check_file(self, check: PackCheck, pack: PackRef, name: str, *, is_new: bool) -> None:
        file = readable_from(self._repository.backend, self._target, self._target.open_read(name))
        try:
            check(pack, file, is_new=is_new)
        finally:
            file.close()

    def _stream(self, pack: PackRef, file: ReadFile, name: str) -> None:
        sink = self._target.create_pack(name, nbytes_expected=pack.nbytes)
        try:
            with BufferPool(BLOCK_NBYTES, BLOCKS_PER_PACK) as pool:
                if isinstance(file, Streaming):
                    # An upload takes blocks in order, so concurrent reads would wait for each other.
                    request_count = 1 if isinstance(self._target, Distant) else SPANS_AT_ONCE
                    send_spans(file, pack.nbytes, sink, pool, request_count=request_count)
                else:
                    self._send_blocks(file, pack, sink, pool)
                sink.finish(pack.nbytes)
        finally:
            sink.close()

    def _send_blocks(self, file: ReadFile, pack: PackRef, sink: PackSink, pool: BufferPool) -> None:
        results = read_ranges(self._repository.backend, _blocks(file, pack.nbytes), pool)
        try:
            for result in results:
                if len(result.view) != min(BLOCK_NBYTES, pack.nbytes - result.tag):
                    result.release()
                    raise CorruptError(
                        "a pack is shorter than its manifest says", where=file.name, pack_id=pack.pack_id.hex()
                    )
                # Blocks start on pages, so the bytes of a result are at the start of its buffer.
                sink.write(result.buffer, len(result.view), result.tag)
        finally:
            results.close()  # type: ignore[attr-defined]

    def _see(self, pack: PackRef, *, is_new: bool) -> None:
        """Check that a pack is there. For an object that this process has just uploaded, only the size is checked.

        Its bytes came from a pack that was read completely, and ``tier_checks`` compares the directory before any local
        pack is freed.
        """
        if not (is_new and isinstance(self._target, Distant)):
            self.check(pack)
            return
        name = paths.pack_name(pack.pack_id)
        info = self._target.stat(name)
        if info is None:
            raise FileNotFoundError(name)
        if info.nbytes != pack.nbytes:
            where = self._target.location_of(name)
            raise CorruptError(f"a pack of {pack.nbytes} bytes has {info.nbytes} there", where=where, todo=NOT_OURS)

    def check(self, pack: PackRef) -> None:
        """Check that a pack is there, with its size and directory digest.

        Raises:
            FileNotFoundError: It does not exist.
            CorruptError: It is a different file.
        """
        check_pack(self._repository, self._target, pack)

    def _read_back(self, pack: PackRef) -> None:
        """Compare every byte of a pack there with the pack here."""
        name = paths.pack_name(pack.pack_id)
        here, there = open_pack(self._repository, pack, keeps_ranges=False), self._target.open_read(name)
        try:
            with BufferPool(BLOCK_NBYTES, BLOCKS_PER_PACK) as pool:
                for result in read_ranges(self._target, _blocks(there, pack.nbytes), pool):
                    is_equal = result.view == here.read_at(result.tag, len(result.view))
                    result.release()
                    if not is_equal:
                        raise ChecksumError(
                            f"a pack differs from the one here within {BLOCK_NBYTES} bytes of offset {result.tag}",
                            where=self._target.location_of(name),
                            todo="run `ckstore verify` on both to see which one is damaged; nothing was deleted here",
                            pack_id=pack.pack_id.hex(),
                        )
        finally:
            here.close()
            there.close()


def _blocks(file: ReadFile, nbytes: int) -> Iterator[ReadRequest]:
    """Yield a request for each block of a pack."""
    for offset in range(0, nbytes, BLOCK_NBYTES):
        yield ReadRequest(file, offset, min(BLOCK_NBYTES, nbytes - offset), offset)


class StoreCopy:
    """The store in another place that holds copies of this store's checkpoints.

    Args:
        repository: This store.
        target: The other place.
    """

    def __init__(self, repository: Repository, target: Backend) -> None:
        self._repository = repository
        self._target = target

    def prepare(self) -> None:
        """Create a store with the identity of this one, unless it exists.

        Raises:
            UsageError: The place holds other files, or another store.
            UnreachableError: The place is empty although it is a tier with checkpoints.
        """
        try:
            found = self._target.read_bytes(paths.STORE_FILE, nbytes_max=RECORD_NBYTES_MAX)
        except FileNotFoundError:
            found = self._make()
        record = decode_record(found, StoreRecord, where=self._target.location_of(paths.STORE_FILE))
        if bytes.fromhex(record.store_id) != self._repository.store_id:
            raise UsageError(
                "another store is there", where=self._target.root, todo="name another bucket, prefix or folder"
            )

    def _make(self) -> bytes:
        target = self._target
        require_unused(self._repository, target)
        target.make_folder("")
        # Another push may have started to create the store.
        ours = (*paths.TOP_FOLDERS, paths.STORE_FILE, "lost+found")
        foreign = [name for name in target.list_names("") if name not in ours]
        if foreign:
            raise UsageError(
                f"not a ckstore store, and not empty (contains {foreign[0]!r})",
                where=target.root,
                todo="name an empty prefix or folder",
            )
        for folder in paths.TOP_FOLDERS:
            target.make_folder(folder)
        content = self._repository.backend.read_bytes(paths.STORE_FILE, nbytes_max=RECORD_NBYTES_MAX)
        # If two pushes create it, both write the same content and the first file stays.
        return self._ensure(paths.STORE_FILE, content, nbytes_max=RECORD_NBYTES_MAX)

    def claim(self, header: ManifestHeader) -> None:
        """Claim the seq of a checkpoint there, so that a commit there cannot use it.

        Raises:
            ConflictError: The seq belongs to another checkpoint.
        """
        name, content = paths.claim_name(header.run, header.seq), f"{header.step} {header.time_ns}".encode()
        if self._ensure(name, content, nbytes_max=RECORD_NBYTES_MAX) != content:
            raise ConflictError(
                f"seq {header.seq} of run {header.run!r} belongs to another checkpoint there",
                where=self._target.location_of(name),
                todo="another process commits or pushes there; push to another prefix. Nothing was deleted here",
            )

    def put_manifest(self, manifest: Manifest) -> None:
        """Publish a checkpoint there.

        REQUIRES: All packs of the manifest were checked there.

        Raises:
            RelocatedError: A manifest of the same checkpoint has the name, but names other packs.
            ConflictError: A manifest of another checkpoint has the name.
        """
        header = manifest.header
        there = replace(manifest, packs=tuple(replace(pack, tier=LOCAL_TIER) for pack in manifest.packs))
        encoded = encode_manifest(there, limits=self._repository.limits)
        name = header.name
        where = self._target.location_of(name.path)
        found = self._ensure(name.path, encoded, nbytes_max=self._repository.limits.manifest_nbytes_max)
        if found == encoded:
            return
        # Another version of ckstore may have encoded the same manifest differently.
        other = decode_manifest(found, limits=self._repository.limits, expect=name, where=where)
        if (other.checkpoint_id, other.packs, other.frames) != (there.checkpoint_id, there.packs, there.frames):
            kind = RelocatedError if other.checkpoint_id == there.checkpoint_id else ConflictError
            raise kind(
                f"another manifest of seq {header.seq} is there",
                where=where,
                todo="another process commits or pushes there; push to another prefix. Nothing was deleted here",
            )

    def highest_generation(self, header: ManifestHeader) -> int:
        """Return the highest generation of a checkpoint there, or -1 if it is not there."""
        files = self._target.list_names(paths.manifests_folder(header.run))
        names = (paths.parse_manifest_file(header.run, file) for file in files)
        return max((name.generation for name in names if name is not None and name.seq == header.seq), default=-1)

    def _ensure(self, name: str, content: bytes, *, nbytes_max: int) -> bytes:
        """Create a small file unless it exists. Return the content that is there afterwards."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                # Checked first, because some servers ignore conditional writes.
                if self._target.stat(name) is None:
                    put_small(self._target, name, content)
            # The file may have been removed between the two calls.
            with contextlib.suppress(FileNotFoundError):
                return self._target.read_bytes(name, nbytes_max=nbytes_max)
        raise BackendError(
            "a file does not exist right after it was written", where=self._target.location_of(name), is_transient=True
        )

    def replace_small(self, name: str, content: bytes) -> None:
        """Durably create or replace a small file there."""
        replace_small(self._target, name, content)
