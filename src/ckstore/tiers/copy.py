"""Copy checkpoints of a store to another place, where they are a store of the same identity, and prove that they are.

What is copied can be opened there as a store of its own: ``store.json``, packs, claims and manifests have the names
that they have here, and a manifest there says of every pack that it is local.

Invariants:
- A manifest is put only after every pack that it names was seen there, with its size and its directory's digest.
- What lies there under a name of ours and is not ours is told, never replaced.
- A pack that is in place in a folder was durable before it got its name.

Read a pack from afar in a few long requests at once, and write it block by block as it comes.

Invariants:
- Every block of a pack is written once, whole; a span that breaks off goes on where it was.
- Whatever fails, nothing is read or written any more when this returns, and every buffer is given back.

Forget a tier that nothing names: one that was mistyped, or that is not wanted any more.

Invariants:
- What names a tier can find it: it is looked for before the tier is forgotten, and once more after that. A push
  publishes what names the tier first, and sees to its address second; one of the two sees the other.
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
"""One request. Some servers read an object whole for each range of it; large packs still come in several at once."""

SPANS_AT_ONCE = 3


def send_spans(file: Streaming, nbytes: int, sink: PackSink, pool: BufferPool, *, at_once: int = SPANS_AT_ONCE) -> None:
    """Read a whole pack, and hand it to a sink in blocks of ``BLOCK_NBYTES``; the last one may be shorter.

    Args:
        file: The pack.
        nbytes: Its size, a multiple of 4096.
        sink: Where it goes.
        pool: Blocks; more of them than spans that are read at once.
        at_once: How many spans.
    """
    stop = Latch()

    def send(begin: int) -> None:
        count = min(SPAN_NBYTES, nbytes - begin)
        _send_span(file.stream_at(begin, count, piece_nbytes=BLOCK_NBYTES), begin, sink, pool, stop)

    begins = range(0, nbytes, SPAN_NBYTES)
    for _ in map_in_threads(send, begins, count_max=at_once, name="ckstore-copy", on_stop=stop.set):
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
    """Forget a tier, and return where it was; what lies there stays.

    Args:
        repository: The store.
        tier: Its name.

    Raises:
        NotFoundError: There is no such tier.
        UsageError: Manifests name it.
        ConflictError: A manifest cannot be read, and may name it; or one names it since it was looked for.
    """
    address, where = repository.tiers.addresses().get(tier), repository.backend.location_of(paths.CONFIG_FILE)
    if address is None:
        known = ", ".join(repository.tiers.addresses()) or "none"
        raise NotFoundError(f"there is no tier {tier!r}", where=where, todo=f"tiers there are: {known}")
    user = next(_users(repository, tier), None)
    if user is not None:
        raise UsageError(
            f"{user} names the tier {tier!r}",
            where=address,
            todo="`ckstore pull` brings checkpoints back from there, and `ckstore trash purge` frees what was replaced",
        )
    repository.tiers.forget(tier)
    user = next(_users(repository, tier), None)
    if user is not None:
        repository.tiers.name_for(address, name=tier)
        raise ConflictError(f"{user} has come to name the tier {tier!r}, which stays", where=address, todo="try again")
    forget_turns(repository, tier)
    return address


def require_unused(repository: Repository, place: Backend) -> None:
    """Check, of a place where nothing is, that no checkpoint is said to be there; then it may be made anew.

    Raises:
        UnreachableError: One is; a new store there would pass for the one that holds it.
        ConflictError: A manifest cannot be read, and may say so.
    """
    tier = repository.tiers.name_at(place.root)
    user = None if tier is None else next(_users(repository, tier), None)
    if user is not None:
        raise UnreachableError(
            f"{user} is in the tier {tier!r}, and nothing is there",
            where=place.root,
            todo="mount its file system, or bring back what was there; then try again",
        )
    if tier is not None:
        forget_turns(repository, tier)


def _users(repository: Repository, tier: str) -> Iterator[str]:
    """Yield what names a tier, in words; manifests in the trash can be brought back, and count."""
    marker = Marker(repository)
    look = marker.mark()
    if look.unreadable:
        bad = look.unreadable[0]
        raise ConflictError(
            f"a manifest cannot be read, and may name the tier {tier!r}: {bad.problem}",
            where=repository.backend.location_of(bad.path),
            todo="`ckstore verify` tells more",
        )
    for marked in look.manifests.values():
        if any(pack.tier == tier for pack in marker.packs_of(marked)):
            yield f"seq {marked.name.seq} (step {marked.name.step}) of run {marked.name.run!r}"
    if any(tier.encode() in content for content in look.quarantined):
        yield "a manifest in quarantine"
    for folder in repository.trash.contents():
        for trashed in folder.manifests:
            try:
                marked, _ = marker.read(trashed.name, trashed.path)
            except FileNotFoundError:
                # Purged or brought back meanwhile; brought back, it is seen in place by whoever looks again.
                continue
            except UNREADABLE as error:
                yield f"what cannot be read in the trash ({error.what}) perhaps"
                continue
            if any(pack.tier == tier for pack in marker.packs_of(marked)):
                yield f"seq {trashed.name.seq} of run {trashed.name.run!r}, in the trash,"


PACKS_AT_ONCE = 3
BLOCKS_PER_PACK = 6
"""Of each pack that is being copied so much lies in buffers, and in parts on their way."""

_TRIES = 3


class RelocatedError(ConflictError):
    """The name of a manifest is taken by the same checkpoint in other places: one of both was rewritten."""


class PackCheck(Protocol):
    """Checks every byte of a pack that arrives, and raises where they are not its own."""

    def __call__(self, pack: PackRef, file: ReadFile, *, is_new: bool) -> None:
        """Check a file that holds a pack: one that was just copied and has no name yet, or one that lay there."""
        ...


class PackCopy:
    """Copies packs to one place, several at once, each once.

    Args:
        repository: The store that they belong to.
        target: Where they go.
        reads_back: Read every pack there whole, and compare.
        check: Checks a pack by itself before it gets its name there, and one that lies there already; for places where
            what is there is believed and not compared again.
        check_new: Checks a pack by itself before it gets its name there; one that lies there already is compared.
        on_bytes: Called with bytes that were copied or found to be there, from any thread.
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
        """Packs that were copied, and their sizes."""

    def run(self, packs: Iterable[PackRef]) -> None:
        """Copy what is not there yet, and see all of them there.

        Raises:
            CorruptError: A pack there is another one; or one here is damaged or missing.
            CapacityError: The place is full.
            BackendError: It does not answer.
        """
        wanted = [pack for pack in packs if pack.pack_id not in self._seen]
        for _ in map_in_threads(self._copy, wanted, count_max=PACKS_AT_ONCE, name="ckstore-copy"):
            pass

    def _copy(self, pack: PackRef) -> None:
        is_new = self._ensure(pack)
        if self._check is not None and not is_new:
            self._check_file(self._check, pack, paths.pack_name(pack.pack_id), is_new=False)
        elif self._reads_back or not is_new:
            # What lay there already is not believed: it may have been changed since.
            self._read_back(pack)
        with self._lock:
            self._seen.add(pack.pack_id)
            if is_new:
                self.copied[pack.pack_id] = pack.nbytes
        self._on_bytes(pack.nbytes)

    def _ensure(self, pack: PackRef) -> bool:
        """Write a pack unless it is there, and see it there; return whether it was written."""
        is_new = False
        for _ in range(_TRIES):
            if self._target.stat(paths.pack_name(pack.pack_id)) is None:
                self._write(pack)
                is_new = True
            try:
                self._see(pack, is_new=is_new)
                return is_new
            except FileNotFoundError:
                # What was said to be there was not, or has gone again.
                continue
        raise CorruptError(
            "a pack that was just written is not there",
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
            # It appears whole or not at all, so that only its source can be checked before it does.
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
                    # What goes on to another bucket goes in order, and would wait.
                    at_once = 1 if isinstance(self._target, Distant) else SPANS_AT_ONCE
                    send_spans(file, pack.nbytes, sink, pool, at_once=at_once)
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
                    raise CorruptError("a pack ends early", where=file.name, pack_id=pack.pack_id.hex())
                # The blocks begin where pages do, so that a range lies at the front of its buffer.
                sink.write(result.buffer, len(result.view), result.tag)
        finally:
            results.close()  # type: ignore[attr-defined]

    def _see(self, pack: PackRef, *, is_new: bool) -> None:
        """See that a pack lies there; of one that this process has just written to a bucket, its size says enough.

        Its parts were sent from a pack that was read whole, and the directory is compared before anything here is
        freed (``tier_proof``).
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
        """See that a pack lies there, with its size and the digest of its directory.

        Raises:
            FileNotFoundError: There is none.
            CorruptError: It is another one.
        """
        check_pack(self._repository, self._target, pack)

    def _read_back(self, pack: PackRef) -> None:
        """Compare every byte there with what lies here."""
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
                            todo="`ckstore verify` tells which is damaged; nothing here was let go of",
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
    """The store that a copy of this store's checkpoints is.

    Args:
        repository: This store.
        target: Where the copy is.
    """

    def __init__(self, repository: Repository, target: Backend) -> None:
        self._repository = repository
        self._target = target

    def prepare(self) -> None:
        """Make it a store, with this one's identity, if nothing is there and nothing was.

        Raises:
            UsageError: Something else is there, or another store.
            UnreachableError: It is a tier that checkpoints are in, and nothing is there.
        """
        try:
            found = self._target.read_bytes(paths.STORE_FILE, nbytes_max=RECORD_NBYTES_MAX)
        except FileNotFoundError:
            found = self._make()
        record = decode_record(found, StoreRecord, where=self._target.location_of(paths.STORE_FILE))
        if bytes.fromhex(record.store_id) != self._repository.store_id:
            raise UsageError(
                "another store lies there", where=self._target.root, todo="name another bucket, prefix or folder"
            )

    def _make(self) -> bytes:
        target = self._target
        require_unused(self._repository, target)
        target.make_folder("")
        # Another push may have begun meanwhile.
        ours = (*paths.TOP_FOLDERS, paths.STORE_FILE, "lost+found")
        foreign = [name for name in target.list_names("") if name not in ours]
        if foreign:
            raise UsageError(
                f"the place is not empty and no store: it holds {foreign[0]!r}",
                where=target.root,
                todo="name an empty prefix or folder",
            )
        for folder in paths.TOP_FOLDERS:
            target.make_folder(folder)
        content = self._repository.backend.read_bytes(paths.STORE_FILE, nbytes_max=RECORD_NBYTES_MAX)
        # Two who push at once: the first one's stays, and both have the same.
        return self._ensure(paths.STORE_FILE, content, nbytes_max=RECORD_NBYTES_MAX)

    def claim(self, header: ManifestHeader) -> None:
        """Take the seq there too, so that nobody who commits there gives it to something else.

        Raises:
            ConflictError: Someone did.
        """
        name, content = paths.claim_name(header.run, header.seq), f"{header.step} {header.time_ns}".encode()
        if self._ensure(name, content, nbytes_max=RECORD_NBYTES_MAX) != content:
            raise ConflictError(
                f"seq {header.seq} of run {header.run!r} is another checkpoint there",
                where=self._target.location_of(name),
                todo="someone commits or pushes there too; push to another prefix. Nothing here was let go of",
            )

    def put_manifest(self, manifest: Manifest) -> None:
        """Make the checkpoint exist there; all its packs were seen there.

        Raises:
            RelocatedError: A manifest of the same checkpoint has the name, and names other places.
            ConflictError: Another manifest has the name.
        """
        header = manifest.header
        there = replace(manifest, packs=tuple(replace(pack, tier=LOCAL_TIER) for pack in manifest.packs))
        encoded = encode_manifest(there, limits=self._repository.limits)
        name = header.name
        where = self._target.location_of(name.path)
        found = self._ensure(name.path, encoded, nbytes_max=self._repository.limits.manifest_nbytes_max)
        if found == encoded:
            return
        # Another version of this program may have put the same in other bytes.
        other = decode_manifest(found, limits=self._repository.limits, expect=name, where=where)
        if (other.checkpoint_id, other.packs, other.frames) != (there.checkpoint_id, there.packs, there.frames):
            kind = RelocatedError if other.checkpoint_id == there.checkpoint_id else ConflictError
            raise kind(
                f"another manifest of seq {header.seq} lies there",
                where=where,
                todo="someone commits or pushes there too; push to another prefix. Nothing here was let go of",
            )

    def highest_generation(self, header: ManifestHeader) -> int:
        """Return the highest generation of a checkpoint there; -1: there is none."""
        files = self._target.list_names(paths.manifests_folder(header.run))
        names = (paths.parse_manifest_file(header.run, file) for file in files)
        return max((name.generation for name in names if name is not None and name.seq == header.seq), default=-1)

    def _ensure(self, name: str, content: bytes, *, nbytes_max: int) -> bytes:
        """Make a small file unless it is there; return what is there then, whosever it is."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                # Looked at first, too: some servers do not refuse to replace.
                if self._target.stat(name) is None:
                    put_small(self._target, name, content)
            # What was said to be there may not be.
            with contextlib.suppress(FileNotFoundError):
                return self._target.read_bytes(name, nbytes_max=nbytes_max)
        raise BackendError(
            "a file that was just written is not there", where=self._target.location_of(name), is_transient=True
        )

    def replace_small(self, name: str, content: bytes) -> None:
        """Make a small file there, or replace the one that has the name, durably."""
        replace_small(self._target, name, content)
