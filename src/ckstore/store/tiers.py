"""Tiers: other storage locations of a store, by name, and a local cache of ranges that were read from them.

Each tier is a bucket or a folder; ``config.json`` has its address.

Invariants:
- A tier is used only after a check that it contains this store. An empty mount point, or another store, is an error. It
  is never taken for a tier without packs.
- A manifest contains only the name of a tier. Nothing in it becomes a path or an address.
- A tier's name keeps its address as long as anything refers to the name.
- The cache is bounded, and never uses more than a share of the free disk space. The oldest ranges are evicted first.
- Every cached range has a checksum. A range that does not match is removed and fetched again.
- A failure of the cache costs one request and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.config import GIB, check_name
from ckstore.errors import BackendError, CkstoreError, MissingChunkError, NotFoundError, UnreachableError, UsageError
from ckstore.format import paths
from ckstore.format.records import ConfigRecord
from ckstore.format.wire import xxh3_64
from ckstore.hashing import PackId, new_token
from ckstore.io.backend import Backend, Distant, ReadRequest, ReadResult, ViewedFile, map_concurrent
from ckstore.io.buffers import BufferPool
from ckstore.io.remote import check_address, is_bucket_address
from ckstore.io.url import backend_for
from ckstore.store.chunk_index import LOCAL_TIER, LOST_TIER
from ckstore.store.pending_deletes import packs_pending_deletion
from ckstore.store.store_config import change_config, read_config, store_id_at

if TYPE_CHECKING:
    from ckstore.format.manifest import PackRef


DEFAULT_NAME = "remote"


class Tiers:
    """The tiers of a store. Each is opened at first use.

    Args:
        backend: The store.
        store_id: The store's id, which its tiers share.
        clock: The time source.
    """

    def __init__(self, backend: Backend, store_id: bytes, clock: Clock = SYSTEM_CLOCK) -> None:
        self._backend = backend
        self._store_id = store_id
        self._clock = clock
        self._opened: dict[str, Backend] = {}
        self._places: dict[str, str] = {}
        self._checked: set[str] = set()
        self._lock = threading.Lock()
        self._cache: RangeCache | None = None

    @property
    def cache(self) -> RangeCache | None:
        """The cache of ranges that were read from tiers; None if the store itself is in a bucket."""
        if isinstance(self._backend, Distant):
            return None

        with self._lock:
            if self._cache is None:
                self._cache = RangeCache(self._backend)
            return self._cache

    def addresses(self) -> dict[str, str]:
        """Return the address of each tier, by name."""
        return dict(sorted(read_config(self._backend).tiers.items()))

    def address_of(self, tier: str) -> str:
        """Return the address of a tier that a user has named.

        Raises:
            NotFoundError: There is no such tier.
        """
        tiers = self.addresses()
        if tier not in tiers:
            raise NotFoundError(
                f"no tier {tier!r} is configured",
                where=self._backend.location_of(paths.CONFIG_FILE),
                todo=f"configured tiers: {', '.join(tiers) or 'none'}",
            )
        return tiers[tier]

    def choose(self, address: str | None, tier: str | None) -> str:
        """Return the address that a caller means: the given one, that of a named tier, or that of the only tier.

        Raises:
            NotFoundError: No tier is configured, or none has this name.
            UsageError: There are several tiers, and none was named.
        """
        if address is not None:
            return address
        if tier is not None:
            return self.address_of(tier)
        addresses = self.addresses()
        if len(addresses) == 1:
            return next(iter(addresses.values()))
        if addresses:
            raise UsageError(
                "there are several tiers",
                where=", ".join(addresses),
                todo="name one, or an address; `ckstore push --forget` removes one that is not wanted",
            )
        raise NotFoundError("no tier is configured", where=self._backend.root, todo="name a bucket: s3://bucket/prefix")

    def name_at(self, place: str) -> str | None:
        """Return the name of the tier at an address (as in ``Backend.root``); None if there is none."""
        return _name_of(place, read_config(self._backend).tiers, None)

    def open(self, tier: str) -> Backend:
        """Return the backend of a tier that contains packs, after checking that it contains this store.

        Raises:
            UnreachableError: ``config.json`` does not have the tier, its address is unusable, or this store is not
                there.
            BackendError: It does not answer.
            MissingChunkError: It is the tier ``lost``.
        """
        if tier == LOST_TIER:
            raise MissingChunkError(
                "a chunk is lost",
                todo="restore other tensors with only=, restore another checkpoint, or run `ckstore repair`",
            )
        with self._lock:
            backend = self._opened.get(tier)
            if backend is None:
                backend = self._opened[tier] = self._backend_of(tier)
        # A folder may be unmounted at any time. A bucket is checked once, and again if something is missing.
        if not (isinstance(backend, Distant) and tier in self._checked):
            self.require_present(tier, backend)
            self._checked.add(tier)
        return backend

    def require_present(self, tier: str, backend: Backend | None = None) -> None:
        """Check that a tier contains this store now. Only then do missing files mean that they are lost.

        Raises:
            UnreachableError: It is empty or contains another store.
            BackendError: It does not answer.
        """
        backend = backend or self.open(tier)
        try:
            found = store_id_at(backend)
        except BackendError as error:
            raise _unreachable(tier, error) from error
        if found is None:
            raise UnreachableError(
                f"the tier {tier!r} is empty: its store.json is not there",
                where=backend.root,
                todo="mount its file system or restore its files, then try again",
            )
        if found != self._store_id:
            raise UnreachableError(
                f"another store is at the address of the tier {tier!r}",
                where=backend.root,
                todo="check config.json, and the links and mounts along this path",
            )

    def _backend_of(self, tier: str) -> Backend:
        address = self.addresses().get(tier)
        if address is None:
            raise UnreachableError(
                f"checkpoints are in the tier {tier!r}, but config.json has no address for it",
                where=self._backend.location_of(paths.CONFIG_FILE),
                todo=f'add it to config.json: "tiers": {{"{tier}": "s3://bucket/prefix"}}, with "xxh3": null',
            )
        self._places[tier] = address
        try:
            return backend_for(address)
        except (BackendError, UsageError) as error:
            raise _unreachable(tier, error) from error

    def new_place(self, address: str, *, name: str | None = None) -> Backend | None:
        """Return the backend of an address that has no name yet, to test it before it gets one; None if it has a name.

        Raises:
            UsageError: As ``name_for``.
        """
        place, tiers = _valid_address(address), read_config(self._backend).tiers
        if _name_of(place, tiers, _valid_name(name)) is not None:
            return None
        _require_free(name, tiers)
        return backend_for(place)

    def name_for(self, address: str, *, name: str | None = None) -> str:
        """Return the name of the tier at an address. A new address gets a name, durably.

        Args:
            address: The address of a bucket, or an absolute path.
            name: The wanted name. None: ``remote``, with a number if that is taken.

        Raises:
            UsageError: The name belongs to another address, or the address is invalid.
        """
        place, name = _valid_address(address), _valid_name(name)

        def with_tier(config: ConfigRecord) -> ConfigRecord:
            if _name_of(place, config.tiers, name) is not None:
                return config
            _require_free(name, config.tiers)
            free = name or _free_name(config.tiers)
            return _with_tiers(config, {**config.tiers, free: place})

        found = _name_of(place, change_config(self._backend, with_tier).tiers, name)
        assert found is not None, "the change above has added it"
        with self._lock:
            if self._places.get(found, place) != place:
                # The name was removed and given to another address since this handle opened it.
                self._opened.pop(found, None)
        return found

    def forget(self, tier: str) -> None:
        """Remove a tier from ``config.json``, durably. The caller has checked that nothing refers to it."""
        change_config(
            self._backend,
            lambda config: _with_tiers(config, {name: at for name, at in config.tiers.items() if name != tier}),
        )

    def packs_gone(self, packs: Iterable[PackRef]) -> set[PackId]:
        """Return those of these packs that are not in their tiers with their sizes. Local ones are skipped."""
        by_tier: dict[str, dict[PackId, int]] = {}
        for pack in packs:
            if pack.tier not in (LOCAL_TIER, LOST_TIER):
                by_tier.setdefault(pack.tier, {})[pack.pack_id] = pack.nbytes
        gone: set[PackId] = set()
        for tier, wanted in by_tier.items():
            found = packs_gone(self.open(tier), wanted)
            if found:
                self.require_present(tier)
            gone |= found
        return gone

    def packs_pending_deletion(self, packs: Iterable[PackRef]) -> set[PackId]:
        """Return those of these packs that a collector in their tier may be about to delete.

        Call it after publishing the manifest that names them, and before ``packs_gone``.
        """
        pending: set[PackId] = set()
        by_tier: dict[str, set[PackId]] = {}
        for pack in packs:
            if pack.tier not in (LOCAL_TIER, LOST_TIER):
                by_tier.setdefault(pack.tier, set()).add(pack.pack_id)
        for tier, wanted in by_tier.items():
            pending |= packs_pending_deletion(self.open(tier), wanted, self._clock)
        return pending

    def forget_ranges(self, packs: Iterable[PackRef]) -> None:
        """Remove cached ranges of these packs, because the cache or the tier had wrong bytes."""
        elsewhere = [pack.pack_id for pack in packs if pack.tier not in (LOCAL_TIER, LOST_TIER)]
        if elsewhere and self.cache is not None:
            self.cache.forget_packs(elsewhere)

    def close(self) -> None:
        """Close all tiers. A later use opens them again."""
        with self._lock:
            opened, self._opened = self._opened, {}
        for backend in opened.values():
            backend.close()


def packs_gone(backend: Backend, packs: Mapping[PackId, int]) -> set[PackId]:
    """Return those of these packs (id to size) that are not in place with that size."""

    def is_gone(pack_id: PackId) -> bool:
        info = backend.stat(paths.pack_name(pack_id))
        return info is None or info.nbytes != packs[pack_id]

    return {pack_id for pack_id, gone in zip(packs, map_concurrent(backend, is_gone, packs), strict=True) if gone}


def _unreachable(tier: str, error: CkstoreError) -> UnreachableError:
    return UnreachableError(
        f"the tier {tier!r} cannot be reached: {error.what}",
        where=error.where,
        todo=error.todo,
        is_transient=bool(error.facts.get("is_transient")),
    )


def _name_of(place: str, tiers: Mapping[str, str], name: str | None) -> str | None:
    found = sorted(tier for tier, address in tiers.items() if _normalized(address) == place)
    if name is not None:
        return name if name in found else None
    return found[0] if found else None


def _with_tiers(config: ConfigRecord, tiers: dict[str, str]) -> ConfigRecord:
    kept = {name: getattr(config, name) for name in config.__struct_fields__}
    return ConfigRecord(**{**kept, "tiers": tiers})


def _valid_name(name: str | None) -> str | None:
    if name is not None and check_name(name, "tier") in (LOCAL_TIER, LOST_TIER):
        raise UsageError("this tier name is reserved", where=repr(name), todo="choose another name")
    return name


def _require_free(name: str | None, tiers: Mapping[str, str]) -> None:
    if name is not None and name in tiers:
        raise UsageError(
            f"the tier {name!r} already has another address",
            where=tiers[name],
            todo="choose another name; checkpoints may be stored at the old address",
        )


def _free_name(tiers: Mapping[str, str]) -> str:
    number = 1
    while (name := DEFAULT_NAME if number == 1 else f"{DEFAULT_NAME}-{number}") in tiers:
        number += 1
    return name


def _valid_address(address: str) -> str:
    if is_bucket_address(address):
        return check_address(address)
    path = Path(address.removeprefix("file://"))
    if "://" in address.removeprefix("file://") or not path.is_absolute():
        raise UsageError(
            "a tier is a bucket or an absolute path",
            where=repr(address)[:200],
            todo="use s3://bucket/prefix (gs, az) or /path",
        )
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(
            "the path of a tier must be UTF-8, because it is written into config.json", where=ascii(address)[:200]
        ) from None
    return str(path)


def _normalized(address: str) -> str:
    try:
        return _valid_address(address)
    except CkstoreError:
        # An invalid address that was written by hand is compared as it is.
        return address


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
