"""A local cache of ranges read from packs in tiers.

Invariants:
- The cache is bounded, and never uses more than a share of the free disk space. The oldest ranges are evicted first.
- Every range has a checksum. A range that does not match is removed and fetched again.
- A failure of the cache costs one request and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckstore.config import GIB
from ckstore.errors import CkstoreError
from ckstore.format import paths
from ckstore.format.wire import xxh3_64
from ckstore.hashing import PackId, new_token
from ckstore.io.backend import Backend, ReadRequest, ReadResult, ViewedFile
from ckstore.io.buffers import BufferPool

_log = logging.getLogger("ckstore")

CACHE_NBYTES_MAX = 2 * GIB
CACHE_SHARE_MAX = 0.25
"""Share of the free disk space."""

_CHECKSUM_NBYTES = 8
_FILE = re.compile(r"([0-9a-f]{16})-([0-9a-f]{8})\.range", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Range:
    """A cached range of a pack, and when it was written (0: by this handle)."""

    pack: str
    offset: int
    nbytes: int
    modified_ns: int

    def contains(self, offset: int, nbytes: int) -> bool:
        return self.offset <= offset and offset + nbytes <= self.offset + self.nbytes

    @property
    def path(self) -> str:
        return f"{paths.CACHE_FOLDER}/{self.pack}/{self.offset:016x}-{self.nbytes:08x}.range"


class RangeCache:
    """The cached ranges of a store. Thread-safe.

    Args:
        backend: The store's own backend.
        nbytes_max: Maximum size of all ranges.
    """

    def __init__(self, backend: Backend, *, nbytes_max: int = CACHE_NBYTES_MAX) -> None:
        self._backend = backend
        self._nbytes_max = nbytes_max
        self._lock = threading.Lock()
        self._ranges: dict[str, list[_Range]] | None = None
        self._folders: set[str] = set()

    def get(self, pack_id: PackId, offset: int, nbytes: int) -> memoryview | None:
        """Return a range, possibly as part of a larger cached one; None if it is not cached."""
        found: _Range | None = None
        try:
            with self._lock:
                ranges = self._index().get(pack_id.hex(), [])
                found = next((each for each in ranges if each.contains(offset, nbytes)), None)
            if found is None:
                return None
            content = self._backend.read_bytes(found.path, nbytes_max=found.nbytes + _CHECKSUM_NBYTES)
            view = memoryview(content)[:-_CHECKSUM_NBYTES]
            if len(view) != found.nbytes or xxh3_64(view).to_bytes(_CHECKSUM_NBYTES, "little") != content[-8:]:
                self._remove(found)
                return None
            return view[offset - found.offset :][:nbytes]
        except FileNotFoundError:
            self._remove(found)
            return None
        except (CkstoreError, OSError) as error:
            _log.debug("could not read the range cache: %s", error)
            return None

    def put(self, pack_id: PackId, offset: int, content: memoryview) -> None:
        """Cache a range and evict old ones; do nothing if there is no space."""
        new = _Range(pack_id.hex(), offset, len(content), 0)
        try:
            if not self._make_room(len(content)):
                return
            draft = paths.draft_name(new_token(), "range")
            checksum = xxh3_64(content).to_bytes(_CHECKSUM_NBYTES, "little")
            self._make_folder(new.path.rpartition("/")[0])
            self._backend.create(draft, bytes(content) + checksum, sync=False)
            self._backend.rename(draft, new.path)
            with self._lock:
                self._index().setdefault(new.pack, []).append(new)
        except (CkstoreError, OSError) as error:
            _log.debug("could not write the range cache: %s", error)

    def forget_packs(self, pack_ids: Iterable[PackId]) -> None:
        """Remove all ranges of these packs, because the cache or the tier had wrong bytes."""
        for pack_id in pack_ids:
            with self._lock:
                outdated = list(self._index().get(pack_id.hex(), []))
            for each in outdated:
                self._remove(each)

    def _make_folder(self, folder: str) -> None:
        if folder not in self._folders:
            self._backend.make_folder(folder)
            self._folders.add(folder)

    def _make_room(self, nbytes: int) -> bool:
        free = self._backend.free_nbytes()
        with self._lock:
            index = self._index()
            ranges = [each for found in index.values() for each in found]
            total = sum(each.nbytes for each in ranges)
            limit = self._nbytes_max if free is None else min(self._nbytes_max, int(CACHE_SHARE_MAX * (free + total)))
            if nbytes > limit:
                return False
            # Ranges written by this handle have no time. They are the newest, in the order of writing.
            evicted = []
            for each in sorted(ranges, key=lambda each: (each.modified_ns == 0, each.modified_ns)):
                if total + nbytes <= limit:
                    break
                total -= each.nbytes
                index[each.pack].remove(each)
                evicted.append(each)
        for each in evicted:
            with contextlib.suppress(FileNotFoundError):
                self._backend.unlink(each.path)
        return True

    def _remove(self, outdated: _Range | None) -> None:
        if outdated is None:
            return
        with self._lock, contextlib.suppress(ValueError):
            self._index().get(outdated.pack, []).remove(outdated)
        with contextlib.suppress(CkstoreError, OSError):
            self._backend.unlink(outdated.path)

    def _index(self) -> dict[str, list[_Range]]:
        """Return the index of ranges: what the folder listed at first use, plus later changes."""
        if self._ranges is None:
            self._ranges = {}
            for pack in filter(paths.is_token, self._backend.list_names(paths.CACHE_FOLDER)):
                folder = f"{paths.CACHE_FOLDER}/{pack}"
                found = [self._parse_file(pack, folder, file) for file in self._backend.list_names(folder)]
                self._ranges[pack] = [each for each in found if each is not None]
        return self._ranges

    def _parse_file(self, pack: str, folder: str, file: str) -> _Range | None:
        parsed, info = _FILE.fullmatch(file), self._backend.stat(f"{folder}/{file}")
        if parsed is None or info is None:
            return None
        return _Range(pack, int(parsed[1], 16), int(parsed[2], 16), info.modified_ns)


class CachedFile:
    """A pack in a tier whose ranges are cached here.

    Args:
        file: The pack, opened in the tier.
        pack_id: Its id.
        cache: The cache.
    """

    def __init__(self, file: ViewedFile, pack_id: PackId, cache: RangeCache) -> None:
        self._file = file
        self._pack_id = pack_id
        self._cache = cache

    @property
    def name(self) -> str:
        """The path that it was opened by."""
        return self._file.name

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""
        return self._file.nbytes

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Read exactly these bytes; fewer only at the end of the file."""
        return bytes(self.view_at(offset, nbytes))

    def view_at(self, offset: int, nbytes: int) -> memoryview:
        """As ``read_at``, from the cache if possible; otherwise fetch the range and cache it."""
        found = self._cache.get(self._pack_id, offset, nbytes)
        if found is None:
            found = self._file.view_at(offset, nbytes)
            self._cache.put(self._pack_id, offset, found)
        return found

    def fetch_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Fetch ranges of this file and others of its kind, many concurrently. They are not cached."""
        return self._file.fetch_ranges(requests, pool)

    def close(self) -> None:
        """Close the pack."""
        self._file.close()
