"""Open packs for reading, in place, in the trash or in their tier, and read what a failing medium still gives.

Files of a place that the store's own backend cannot read: a folder, where the store itself lies in a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import TypeGuard

from ckstore.config import KIB, Limits
from ckstore.errors import BackendError, ChecksumError, MissingChunkError
from ckstore.format import paths
from ckstore.format.manifest import PackRef
from ckstore.io.backend import Backend, Distant, Fetching, ReadFile, ReadRequest, ReadResult, ViewedFile
from ckstore.io.buffers import BufferPool
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.range_cache import CachedFile
from ckstore.store.repository import Repository


class ForeignFile:
    """A file that another place has opened, whose ranges that place fetches.

    Args:
        place: What has opened it.
        file: The file.
    """

    def __init__(self, place: Backend, file: ReadFile) -> None:
        self.place = place
        self.file = file

    @property
    def name(self) -> str:
        """The name it was opened by."""
        return self.file.name

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""
        return self.file.nbytes

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Read exactly these bytes; shorter only at the end."""
        return self.file.read_at(offset, nbytes)

    def view_at(self, offset: int, nbytes: int) -> memoryview:
        """Read as ``read_at`` does."""
        return memoryview(self.file.read_at(offset, nbytes))

    def fetch_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Fetch ranges of this and other files of the same place, many at a time."""
        return self.place.read_ranges((replace(request, file=_opened(request.file)) for request in requests), pool)

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()


def readable_from(home: Backend, place: Backend, file: ReadFile) -> ReadFile:
    """Return a file of a place in a form whose ranges ``store.packs.read_ranges`` fetches for this home."""
    if place is home or not isinstance(home, Distant) or isinstance(file, Fetching):
        return file
    return ForeignFile(place, file)


def fetcher_of(file: ReadFile) -> int:
    """Return what has to fetch ranges of a file: 0 the store's backend, 1 a file of its kind, else one place's."""
    if isinstance(file, ForeignFile):
        return id(file.place)
    return int(isinstance(file, Fetching))


def _opened(file: ReadFile) -> ReadFile:
    assert isinstance(file, ForeignFile), "requests are grouped by what fetches them"
    return file.file


READ_SLACK_NBYTES = 64 * KIB
"""Room in a read buffer beyond one chunk: frame header, codec tables, alignment at both ends."""

_PAGE_NBYTES = 4096


def read_buffer_nbytes(limits: Limits) -> int:
    """Return the size of a read buffer, in bytes: any frame fits."""
    return limits.chunk_nbytes_max + READ_SLACK_NBYTES


def open_pack(repository: Repository, pack: PackRef, *, keeps_ranges: bool = True) -> ReadFile:
    """Open a pack wherever it lies; an open file stays readable when gc moves its name.

    One of another tier is taken from here where it still, or again, lies here: its name stands for its bytes.

    Args:
        repository: The store.
        pack: The pack, and where it lies.
        keeps_ranges: Ranges that are fetched from afar are kept here for a while.

    Raises:
        MissingChunkError: It is neither in place nor in the trash nor in its tier, or has another size.
        UnreachableError: Its tier cannot be reached.
    """
    backend: Backend = repository.backend
    place = paths.pack_name(pack.pack_id)
    names = repository.trash.paths_of(pack.pack_id)
    if pack.tier != LOCAL_TIER:
        file = _open_if_whole(backend, place, pack)
        if file is not None:
            return file
        backend, names = repository.tiers.open(pack.tier), iter((place,))
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
            f"pack {pack.pack_id.hex()} has {file.nbytes} bytes where the manifest says {pack.nbytes}",
            where=backend.location_of(name),
            todo="restore an older checkpoint, or bring the file back from a copy",
            pack_id=pack.pack_id.hex(),
        )
    if pack.tier != LOCAL_TIER:
        repository.tiers.require_present(pack.tier)
    raise MissingChunkError(
        f"pack {pack.pack_id.hex()} is missing",
        where=backend.location_of(place),
        todo="restore an older checkpoint, or bring the file back from a copy",
        pack_id=pack.pack_id.hex(),
    )


def _is_viewed(file: ReadFile) -> TypeGuard[ViewedFile]:
    return isinstance(file, Fetching)


def _open_if_whole(backend: Backend, name: str, pack: PackRef) -> ReadFile | None:
    try:
        file = backend.open_read(name)
    except FileNotFoundError:
        return None
    if file.nbytes == pack.nbytes:
        return file
    file.close()
    return None


def distant_packs(repository: Repository, packs: Sequence[PackRef]) -> frozenset[int]:
    """Return which packs, by their index, are far away, as those of a bucket are."""
    is_home_distant = isinstance(repository.backend, Distant)
    return frozenset(index for index, pack in enumerate(packs) if is_home_distant or pack.tier != LOCAL_TIER)


def read_ranges(backend: Backend, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
    """Fetch ranges of files that this backend has opened, or another tier's, and yield them as they arrive.

    What lies in different places is fetched in the order of the requests, one place after another: a range that others
    wait for is asked for before them.
    """
    for fetcher, group in groupby(requests, key=lambda request: fetcher_of(request.file)):
        if not fetcher:
            yield from backend.read_ranges(group, pool)
            continue
        first = next(group)
        assert isinstance(first.file, Fetching), "the key said so"
        yield from first.file.fetch_ranges(chain((first,), group), pool)  # noqa: B031 - the rest of it


def read_frame(backend: Backend, file: ReadFile, offset: int, nbytes: int, pool: BufferPool) -> ReadResult:
    """Read one frame into a buffer of the pool; shorter only where the file ends.

    Raises:
        ChecksumError: The medium does not give it.
    """
    results = iter(read_ranges(backend, [ReadRequest(file, offset, nbytes, 0)], pool))
    try:
        # Not asked for a second one: that would wait for a second buffer.
        return next(results)
    except BackendError:
        if isinstance(file, Fetching):
            # It was asked for again and again, and no half of it comes where the whole does not.
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
