"""Open packs for reading, wherever they are, and recover readable bytes from a failing disk.

A pack is in place, in the trash, or in a tier. A store in a bucket may have a tier in a folder, whose files the
bucket's backend cannot read: ``ForeignFile`` wraps those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import TypeGuard

from ckstore.errors import BackendError, ChecksumError, MissingChunkError
from ckstore.format import paths
from ckstore.format.manifest import PackRef
from ckstore.io.backend import Backend, Distant, Fetching, ReadFile, ReadRequest, ReadResult, ViewedFile
from ckstore.io.buffers import BufferPool
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.repository import Repository
from ckstore.store.tiers import CachedFile


class ForeignFile:
    """A file of another backend, which must also fetch its ranges.

    Args:
        backend: The backend that opened the file.
        file: The file.
    """

    def __init__(self, backend: Backend, file: ReadFile) -> None:
        self.backend = backend
        self.file = file

    @property
    def name(self) -> str:
        """The path that it was opened by."""
        return self.file.name

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""
        return self.file.nbytes

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Read exactly these bytes; fewer only at the end of the file."""
        return self.file.read_at(offset, nbytes)

    def view_at(self, offset: int, nbytes: int) -> memoryview:
        """As ``read_at``, as a memoryview."""
        return memoryview(self.file.read_at(offset, nbytes))

    def fetch_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Fetch ranges of this file and others of the same backend, many concurrently."""
        return self.backend.read_ranges((replace(request, file=_unwrapped(request.file)) for request in requests), pool)

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def readable_from(home: Backend, place: Backend, file: ReadFile) -> ReadFile:
    """Return a file of ``place`` in a form that ``read_ranges`` accepts for the store's own backend ``home``."""
    if place is home or not isinstance(home, Distant) or isinstance(file, Fetching):
        return file
    return ForeignFile(place, file)


def fetcher_of(file: ReadFile) -> int:
    """Return which object fetches ranges of a file: 0 the store's backend, 1 the file, else another backend."""
    if isinstance(file, ForeignFile):
        return id(file.backend)
    return int(isinstance(file, Fetching))


def _unwrapped(file: ReadFile) -> ReadFile:
    assert isinstance(file, ForeignFile), "requests are grouped by what fetches them"
    return file.file


_PAGE_NBYTES = 4096


def open_pack(repository: Repository, pack: PackRef, *, keeps_ranges: bool = True) -> ReadFile:
    """Open a pack wherever it is. An open file stays readable when gc moves its name.

    A pack of a tier is read locally if it is also here: a pack id always means the same bytes.

    Args:
        repository: The store.
        pack: The pack, and the tier that contains it.
        keeps_ranges: Cache ranges fetched from a tier locally.

    Raises:
        MissingChunkError: It is neither in place, nor in the trash, nor in its tier, or it has another size.
        UnreachableError: Its tier cannot be reached.
    """
    backend: Backend = repository.backend
    in_place = paths.pack_name(pack.pack_id)
    names = repository.trash.paths_of(pack.pack_id)
    if pack.tier != LOCAL_TIER:
        file = _open_if_complete(backend, in_place, pack)
        if file is not None:
            return file
        backend, names = repository.tiers.open(pack.tier), iter((in_place,))
    for name in names:
        try:
            file = backend.open_read(name)
        except FileNotFoundError:
            continue
        if file.nbytes == pack.nbytes:
            file = readable_from(repository.backend, backend, file)
            cache = repository.tiers.cache if keeps_ranges else None
            return file if cache is None or not _is_viewed(file) else CachedFile(file, pack.pack_id, cache)
        file.close()
        raise MissingChunkError(
            f"pack {pack.pack_id.hex()} has {file.nbytes} bytes, but the manifest says {pack.nbytes}",
            where=backend.location_of(name),
            todo="restore an older checkpoint, or copy the file back from a backup",
            pack_id=pack.pack_id.hex(),
        )
    if pack.tier != LOCAL_TIER:
        repository.tiers.require_present(pack.tier)
    raise MissingChunkError(
        f"pack {pack.pack_id.hex()} is missing",
        where=backend.location_of(in_place),
        todo="restore an older checkpoint, or copy the file back from a backup",
        pack_id=pack.pack_id.hex(),
    )


def _is_viewed(file: ReadFile) -> TypeGuard[ViewedFile]:
    return isinstance(file, Fetching)


def _open_if_complete(backend: Backend, name: str, pack: PackRef) -> ReadFile | None:
    try:
        file = backend.open_read(name)
    except FileNotFoundError:
        return None
    if file.nbytes == pack.nbytes:
        return file
    file.close()
    return None


def distant_packs(repository: Repository, packs: Sequence[PackRef]) -> frozenset[int]:
    """Return the indices of the packs that are in a bucket or a tier."""
    is_home_distant = isinstance(repository.backend, Distant)
    return frozenset(index for index, pack in enumerate(packs) if is_home_distant or pack.tier != LOCAL_TIER)


def read_ranges(backend: Backend, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
    """Read ranges of files of this backend or of tiers; yield them as they arrive.

    Consecutive requests to the same backend run concurrently. Requests to different backends run in the given order: an
    earlier range may be needed to decode a later one.
    """
    for fetcher, group in groupby(requests, key=lambda request: fetcher_of(request.file)):
        if not fetcher:
            yield from backend.read_ranges(group, pool)
            continue
        first = next(group)
        assert isinstance(first.file, Fetching), "the key of the group is not 0"
        yield from first.file.fetch_ranges(chain((first,), group), pool)  # noqa: B031 - the rest of it


def read_frame(backend: Backend, file: ReadFile, offset: int, nbytes: int, pool: BufferPool) -> ReadResult:
    """Read one frame into a buffer of the pool; shorter only if the file ends.

    Raises:
        ChecksumError: The medium cannot read it.
    """
    results = iter(read_ranges(backend, [ReadRequest(file, offset, nbytes, 0)], pool))
    try:
        # Do not ask the iterator for a second result: that would wait for a second buffer.
        return next(results)
    except BackendError:
        if isinstance(file, Fetching):
            # A remote range was already retried, and halves do not help.
            raise
        buffer = pool.acquire()
        try:
            view = buffer.view[:nbytes]
            read_in_halves(file, offset, view)
        except BaseException:
            buffer.release()
            raise
        return ReadResult(0, view, buffer)


def read_in_halves(file: ReadFile, offset: int, view: memoryview, *, try_count: int = 2) -> None:
    """Fill ``view`` from a file whose reads fail: retry, then halve until the unreadable part is found.

    Raises:
        ChecksumError: Some bytes cannot be read. The message names them.
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
