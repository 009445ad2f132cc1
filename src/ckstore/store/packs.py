"""Open packs for reading, in place or in the trash, and read what a failing medium still gives."""

from __future__ import annotations

from ckstore.config import KIB, Limits
from ckstore.errors import BackendError, ChecksumError, MissingChunkError
from ckstore.format import layout
from ckstore.format.manifest import PackRef
from ckstore.io.backend import Backend, ReadFile, ReadRequest, ReadResult
from ckstore.io.buffers import BufferPool
from ckstore.store.parts import Parts

READ_SLACK_NBYTES = 64 * KIB
"""Room in a read buffer beyond one chunk: frame header, codec tables, alignment at both ends."""

_PAGE_NBYTES = 4096


def read_buffer_nbytes(limits: Limits) -> int:
    """Return the size of a read buffer, in bytes: any frame fits."""
    return limits.chunk_nbytes_max + READ_SLACK_NBYTES


def open_pack(parts: Parts, pack: PackRef) -> ReadFile:
    """Open a pack wherever it lies; an open file stays readable when gc moves its name.

    Raises:
        MissingChunkError: It is neither in place nor in the trash, or has another size.
    """
    backend: Backend = parts.backend
    place = layout.pack_name(pack.pack_id)
    # gc may move it to the trash, or a writer back from it, between two looks.
    for name in (place, *parts.trash.find_pack(pack.pack_id), place):
        try:
            file = backend.open_read(name)
        except FileNotFoundError:
            continue
        if file.nbytes == pack.nbytes:
            return file
        file.close()
        raise MissingChunkError(
            f"pack {pack.pack_id.hex()} has {file.nbytes} bytes where the manifest says {pack.nbytes}",
            where=backend.location_of(name),
            todo="restore an older checkpoint, or bring the file back from a copy",
            pack_id=pack.pack_id.hex(),
        )
    raise MissingChunkError(
        f"pack {pack.pack_id.hex()} is missing",
        where=backend.location_of(place),
        todo="restore an older checkpoint, or bring the file back from a copy",
        pack_id=pack.pack_id.hex(),
    )


def read_frame(backend: Backend, file: ReadFile, offset: int, nbytes: int, pool: BufferPool) -> ReadResult:
    """Read one frame into a buffer of the pool; shorter only where the file ends.

    Raises:
        ChecksumError: The medium does not give it.
    """
    results = iter(backend.read_ranges([ReadRequest(file, offset, nbytes, 0)], pool))
    try:
        # Not asked for a second one: that would wait for a second buffer.
        return next(results)
    except BackendError:
        buffer = pool.acquire()
        try:
            view = buffer.view[:nbytes]
            read_in_halves(file, offset, view)
        except BaseException:
            buffer.release()
            raise
        return ReadResult(0, view, buffer)


def read_in_halves(file: ReadFile, offset: int, view: memoryview, *, try_count: int = 2) -> None:
    """Fill ``view`` from a file whose reads fail: try again, then halve until the bad part is known.

    Raises:
        ChecksumError: Some bytes cannot be read; it names them.
    """
    for _ in range(try_count):
        try:
            content = file.read_at(offset, len(view))
        except BackendError:
            continue
        view[: len(content)] = content
        return
    if len(view) <= _PAGE_NBYTES:
        raise ChecksumError(
            f"bytes {offset} to {offset + len(view)} cannot be read",
            where=file.name,
            todo="restore an older checkpoint; the medium is failing",
            offset=offset,
        )
    half = max(_PAGE_NBYTES, len(view) // 2 // _PAGE_NBYTES * _PAGE_NBYTES)
    read_in_halves(file, offset, view[:half], try_count=1)
    read_in_halves(file, offset + half, view[half:], try_count=1)
