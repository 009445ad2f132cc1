"""Ranges of packs of other tiers, kept here for a while: who looks at an old checkpoint twice fetches it once.

Invariants:
- It is bounded, and never takes more than a share of what the disk has left: the oldest ranges go first.
- Nothing in it is believed: each range carries a checksum, and one that differs is forgotten and fetched again.
- Whatever fails in it costs a request, and nothing else.
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
"""Of what is free on the disk."""

_CHECKSUM_NBYTES = 8
_FILE = re.compile(r"([0-9a-f]{16})-([0-9a-f]{8})\.range", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Range:
    """A range that is kept: where in which pack, since when."""

    pack: str
    offset: int
    nbytes: int
    modified_ns: int

    def holds(self, offset: int, nbytes: int) -> bool:
        return self.offset <= offset and offset + nbytes <= self.offset + self.nbytes

    @property
    def path(self) -> str:
        return f"{paths.CACHE_FOLDER}/{self.pack}/{self.offset:016x}-{self.nbytes:08x}.range"


class RangeCache:
    """The ranges that a store keeps.

    Args:
        backend: The store's own.
        nbytes_max: All ranges together are no larger.
    """

    def __init__(self, backend: Backend, *, nbytes_max: int = CACHE_NBYTES_MAX) -> None:
        self._backend = backend
        self._nbytes_max = nbytes_max
        self._lock = threading.Lock()
        self._ranges: dict[str, list[_Range]] | None = None
        self._folders: set[str] = set()

    def get(self, pack_id: PackId, offset: int, nbytes: int) -> memoryview | None:
        """Return a range if it is kept, in part of a larger one perhaps."""
        found: _Range | None = None
        try:
            with self._lock:
                ranges = self._known().get(pack_id.hex(), [])
                found = next((each for each in ranges if each.holds(offset, nbytes)), None)
            if found is None:
                return None
            content = self._backend.read_bytes(found.path, nbytes_max=found.nbytes + _CHECKSUM_NBYTES)
            view = memoryview(content)[:-_CHECKSUM_NBYTES]
            if len(view) != found.nbytes or xxh3_64(view).to_bytes(_CHECKSUM_NBYTES, "little") != content[-8:]:
                self._forget(found)
                return None
            return view[offset - found.offset :][:nbytes]
        except FileNotFoundError:
            self._forget(found)
            return None
        except (CkstoreError, OSError) as error:
            _log.debug("the cache could not be read: %s", error)
            return None

    def put(self, pack_id: PackId, offset: int, content: memoryview) -> None:
        """Keep a range, and let older ones go; where there is no room, keep nothing."""
        kept = _Range(pack_id.hex(), offset, len(content), 0)
        try:
            if not self._make_room(len(content)):
                return
            draft = paths.draft_name(new_token(), "range")
            checksum = xxh3_64(content).to_bytes(_CHECKSUM_NBYTES, "little")
            self._make_folder(kept.path.rpartition("/")[0])
            self._backend.create(draft, bytes(content) + checksum, sync=False)
            self._backend.rename(draft, kept.path)
            with self._lock:
                self._known().setdefault(kept.pack, []).append(kept)
        except (CkstoreError, OSError) as error:
            _log.debug("the cache could not be written: %s", error)

    def forget_packs(self, pack_ids: Iterable[PackId]) -> None:
        """Forget what is kept of these packs: it turned out to be wrong, here or where it came from."""
        for pack_id in pack_ids:
            with self._lock:
                doomed = list(self._known().get(pack_id.hex(), []))
            for each in doomed:
                self._forget(each)

    def _make_folder(self, folder: str) -> None:
        if folder not in self._folders:
            self._backend.make_folder(folder)
            self._folders.add(folder)

    def _make_room(self, nbytes: int) -> bool:
        free = self._backend.free_nbytes()
        with self._lock:
            known = self._known()
            ranges = [each for kept in known.values() for each in kept]
            total = sum(each.nbytes for each in ranges)
            limit = self._nbytes_max if free is None else min(self._nbytes_max, int(CACHE_SHARE_MAX * (free + total)))
            if nbytes > limit:
                return False
            # Those of this handle have no time; they are the newest, in the order in which they came.
            doomed = []
            for each in sorted(ranges, key=lambda each: (each.modified_ns == 0, each.modified_ns)):
                if total + nbytes <= limit:
                    break
                total -= each.nbytes
                known[each.pack].remove(each)
                doomed.append(each)
        for each in doomed:
            with contextlib.suppress(FileNotFoundError):
                self._backend.unlink(each.path)
        return True

    def _forget(self, doomed: _Range | None) -> None:
        if doomed is None:
            return
        with self._lock, contextlib.suppress(ValueError):
            self._known().get(doomed.pack, []).remove(doomed)
        with contextlib.suppress(CkstoreError, OSError):
            self._backend.unlink(doomed.path)

    def _known(self) -> dict[str, list[_Range]]:
        """Return what is kept, as the folder showed it when it was first asked for, and what came since."""
        if self._ranges is None:
            self._ranges = {}
            for pack in filter(paths.is_token, self._backend.list_names(paths.CACHE_FOLDER)):
                folder = f"{paths.CACHE_FOLDER}/{pack}"
                found = [self._look_at(pack, folder, file) for file in self._backend.list_names(folder)]
                self._ranges[pack] = [each for each in found if each is not None]
        return self._ranges

    def _look_at(self, pack: str, folder: str, file: str) -> _Range | None:
        parsed, info = _FILE.fullmatch(file), self._backend.stat(f"{folder}/{file}")
        if parsed is None or info is None:
            return None
        return _Range(pack, int(parsed[1], 16), int(parsed[2], 16), info.modified_ns)


class CachedFile:
    """A pack of another tier, of which ranges that were read are kept here.

    Args:
        file: The pack, opened there.
        pack_id: Which one.
        cache: Where ranges are kept.
    """

    def __init__(self, file: ViewedFile, pack_id: PackId, cache: RangeCache) -> None:
        self._file = file
        self._pack_id = pack_id
        self._cache = cache

    @property
    def name(self) -> str:
        """The name it was opened by."""
        return self._file.name

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""
        return self._file.nbytes

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Read exactly these bytes; shorter only at the end."""
        return bytes(self.view_at(offset, nbytes))

    def view_at(self, offset: int, nbytes: int) -> memoryview:
        """Return what is kept of it, or what is fetched, and kept then."""
        found = self._cache.get(self._pack_id, offset, nbytes)
        if found is None:
            found = self._file.view_at(offset, nbytes)
            self._cache.put(self._pack_id, offset, found)
        return found

    def fetch_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Fetch ranges of this and other files of its kind, many at a time."""
        return self._file.fetch_ranges(requests, pool)

    def close(self) -> None:
        """Let go of the pack."""
        self._file.close()
