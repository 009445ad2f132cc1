"""Write packs: frames are reserved in order, filled in parallel, and each pack is finished once.

Any number of threads encode. ``reserve`` is called in plan order, by one thread at a time, so the same commit writes
the same packs regardless of thread timing. ``fill`` runs in parallel.

A pack in which a write or sync failed is abandoned and never synced again. The caller still has the bytes and writes
them to a new pack.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckstore.errors import BackendError, CkstoreError
from ckstore.format import paths
from ckstore.format.frame import FRAME_ALIGN, FRAME_HEADER_NBYTES, FrameHeader, encode_frame_header
from ckstore.format.manifest import PackRef
from ckstore.format.pack import PACK_ALIGN, DirectoryEntry, encode_directory, encode_superheader, encode_tail
from ckstore.format.wire import new_xxh3
from ckstore.hashing import PackId, new_pack_id
from ckstore.io.backend import Backend
from ckstore.io.block_writer import BlockWriter, Reservation
from ckstore.io.buffers import BufferPool

_log = logging.getLogger("ckstore")

PACK_NBYTES_TARGET = 4 << 30
"""A pack is closed at this size: large enough for long sequential writes, small enough for gc."""

Check = Callable[[Sequence[memoryview], int], None]
"""Called with a frame's payload in the write block, and its xxh3. Raises if the payload is wrong."""


@dataclass(slots=True)
class FrameSlot:
    """The place reserved for one frame: its pack, and the offset of its header in it."""

    pack: OpenPack
    offset: int
    reservation: Reservation
    stored_nbytes: int


@dataclass(slots=True, eq=False)
class OpenPack:
    """A pack that is being filled, and afterwards its entry for the manifest."""

    pack_id: PackId
    name: str
    stream: BlockWriter
    entries: list[DirectoryEntry] = field(default_factory=list)
    unfilled: int = 0
    ref: PackRef | None = None


class PackWriter:
    """Writes the packs of one commit."""

    def __init__(
        self,
        backend: Backend,
        pool: BufferPool,
        *,
        store_id: bytes,
        nbytes_expected: int,
        copy: Callable[[memoryview, memoryview], None],
        pack_nbytes_target: int = PACK_NBYTES_TARGET,
        new_id: Callable[[], PackId] = new_pack_id,
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._store_id = store_id
        self._nbytes_expected = nbytes_expected
        self._copy = copy
        self._pack_nbytes_target = pack_nbytes_target
        self._new_id = new_id
        self._packs: list[OpenPack] = []
        self._filled = threading.Condition()
        self._nbytes_reserved = 0
        self._has_failed = False

    @property
    def pack_names(self) -> list[str]:
        """The names of all packs that were begun, for removal after a failure."""
        return [pack.name for pack in self._packs]

    def reserve(self, stored_nbytes: int) -> FrameSlot:
        """Reserve the next place for a frame with a payload of this many bytes. Calls must not overlap."""
        pack = self._packs[-1] if self._packs else None
        if pack is None or pack.stream.position >= self._pack_nbytes_target:
            if pack is not None:
                self._finish(pack)
            pack = self._open()
        frame_nbytes = FRAME_HEADER_NBYTES + stored_nbytes
        place = pack.stream.reserve(frame_nbytes, align=FRAME_ALIGN)
        with self._filled:
            pack.unfilled += 1
        self._nbytes_reserved += frame_nbytes
        return FrameSlot(pack, place.offset, place, stored_nbytes)

    def fill(self, at: FrameSlot, header: FrameHeader, parts: Sequence[memoryview], check: Check) -> None:
        """Copy a frame to its place, check it there, then write its header.

        ``header.payload_xxh3`` is set here, from the bytes in the write block.

        Args:
            at: The frame's place.
            header: Its header.
            parts: Its payload.
            check: Called with the payload in the write block, and its xxh3. Raises if it is wrong.
        """
        stream = at.pack.stream
        found = new_xxh3()
        stream.fill(at.reservation, parts, begin=FRAME_HEADER_NBYTES, watch=found.update)
        check(_skip(stream.views(at.reservation), FRAME_HEADER_NBYTES), found.intdigest())
        header = header.with_checksum(found.intdigest())
        _put(stream.views(at.reservation), encode_frame_header(header))
        entry = DirectoryEntry.of(header, offset=at.offset)
        stream.done(at.reservation)
        with self._filled:
            at.pack.entries.append(entry)
            at.pack.unfilled -= 1
            self._filled.notify_all()

    def fail(self) -> None:
        """Report that some frame will never be filled, so that no thread waits for it."""
        with self._filled:
            self._has_failed = True
            self._filled.notify_all()

    def finish(self) -> list[PackRef]:
        """Write directories, wait for all writes, and make all packs and their folders durable.

        Raises:
            CapacityError: The disk is full.
            BackendError: A write or sync failed. None of these packs may be used.
        """
        for pack in self._packs:
            self._finish(pack)
        for folder in sorted({pack.name.rsplit("/", 1)[0] for pack in self._packs}):
            self._backend.sync_folder(folder)
        return [pack.ref for pack in self._packs if pack.ref is not None]

    def abandon(self) -> None:
        """Abandon and delete all packs. Nothing refers to them; what cannot be deleted is left for gc."""
        for pack in self._packs:
            try:
                pack.stream.abandon()
                self._backend.unlink(pack.name)
            except (CkstoreError, OSError) as error:
                _log.debug("could not delete abandoned pack %s; gc will: %s", pack.name, error)

    def _open(self) -> OpenPack:
        pack_id = self._new_id()
        name = paths.pack_name(pack_id)
        remaining = max(0, self._nbytes_expected - self._nbytes_reserved)
        nbytes_expected = min(remaining, self._pack_nbytes_target)
        try:
            sink = self._backend.create_pack(name, nbytes_expected=nbytes_expected)
        except FileNotFoundError:
            # All pack folders were made with the store, but a copy may have left out the empty ones.
            self._backend.make_folder(paths.pack_folder(pack_id))
            self._backend.sync_folder(paths.PACKS_FOLDER)
            sink = self._backend.create_pack(name, nbytes_expected=nbytes_expected)
        pack = OpenPack(pack_id, name, BlockWriter(sink, self._pool, copy=self._copy))
        self._packs.append(pack)
        self._append(pack, encode_superheader(store_id=self._store_id, pack_id=pack_id))
        return pack

    def _append(self, pack: OpenPack, content: bytes, *, align: int = 1) -> int:
        place = pack.stream.reserve(len(content), align=align)
        pack.stream.fill(place, [memoryview(content)])
        pack.stream.done(place)
        return place.offset

    def _finish(self, pack: OpenPack) -> None:
        if pack.ref is not None:
            return
        with self._filled:
            self._filled.wait_for(lambda: self._has_failed or pack.unfilled == 0)
        if pack.unfilled:
            raise BackendError("a frame of this pack was never written", where=self._backend.location_of(pack.name))
        directory = encode_directory(sorted(pack.entries, key=lambda entry: entry.offset))
        offset = self._append(pack, directory.encoded, align=PACK_ALIGN)
        tail = encode_tail(store_id=self._store_id, pack_id=pack.pack_id, directory=directory, directory_offset=offset)
        self._append(pack, tail, align=PACK_ALIGN)
        pack.ref = PackRef(pack.pack_id, pack.stream.finish(), directory.digest, "local")


def _put(views: Sequence[memoryview], content: bytes) -> None:
    """Overwrite the first bytes of a place."""
    begin = 0
    for view in views:
        part = content[begin : begin + len(view)]
        view[: len(part)] = part
        begin += len(part)


def _skip(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return views of the same bytes without the first ``nbytes``."""
    rest = []
    for view in views:
        if nbytes >= len(view):
            nbytes -= len(view)
        else:
            rest.append(view[nbytes:])
            nbytes = 0
    return rest
