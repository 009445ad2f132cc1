"""Places other than the store itself, by name: a bucket, or another folder. ``config.json`` says where each is.

Invariants:
- A manifest names a tier, and nothing that it says becomes a path or an address.
- The name of a tier keeps its meaning while anything names it: it is never given another address here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.errors import CkstoreError, MissingChunkError, NotFoundError, UsageError
from ckstore.format import layout
from ckstore.format.records import ConfigRecord
from ckstore.ids import PackId
from ckstore.io.address import backend_for
from ckstore.io.backend import Backend, Distant
from ckstore.io.remote_options import check_address, is_bucket_address
from ckstore.store.at_once import ask_each
from ckstore.store.config_file import change_config, read_config
from ckstore.store.doomed import doomed_in
from ckstore.store.known import LOCAL_TIER, LOST_TIER

if TYPE_CHECKING:
    # Only a type here: listing a run reads headers, and must start at once.
    from ckstore.format.manifest import PackRef
    from ckstore.store.range_cache import RangeCache

DEFAULT_NAME = "remote"


class Tiers:
    """The tiers of a store; each is opened when it is first needed."""

    def __init__(self, backend: Backend, clock: Clock = SYSTEM_CLOCK) -> None:
        self._backend = backend
        self._clock = clock
        self._opened: dict[str, Backend] = {}
        self._places: dict[str, str] = {}
        self._lock = threading.Lock()
        self._cache: RangeCache | None = None

    @property
    def cache(self) -> RangeCache | None:
        """What keeps ranges that were fetched from afar; None where the store itself is far away."""
        if isinstance(self._backend, Distant):
            return None
        from ckstore.store.range_cache import RangeCache

        with self._lock:
            if self._cache is None:
                self._cache = RangeCache(self._backend)
            return self._cache

    def addresses(self) -> dict[str, str]:
        """Return where each tier is, by name."""
        return dict(sorted(read_config(self._backend).tiers.items()))

    def address_of(self, tier: str) -> str:
        """Return where a tier is.

        Raises:
            NotFoundError: ``config.json`` does not say.
        """
        found = self.addresses().get(tier)
        if found is None:
            raise NotFoundError(
                f"no tier {tier!r} is configured, and a checkpoint lies there",
                where=self._backend.location_of(layout.CONFIG_FILE),
                todo=f'say there where it is: "tiers": {{"{tier}": "s3://bucket/prefix"}}, with "xxh3": null',
            )
        return found

    def open(self, tier: str) -> Backend:
        """Return the backend of a tier.

        Raises:
            NotFoundError: No such tier is configured.
            UsageError: Its address cannot be used.
            MissingChunkError: It is the tier of what is lost.
        """
        if tier == LOST_TIER:
            raise MissingChunkError(
                "a chunk is lost", todo="restore other tensors with only=, or another checkpoint; see `ckstore repair`"
            )
        with self._lock:
            if tier not in self._opened:
                self._places[tier] = self.address_of(tier)
                self._opened[tier] = backend_for(self._places[tier])
            return self._opened[tier]

    def new_place(self, address: str, *, name: str | None = None) -> Backend | None:
        """Return the backend of an address that has no name yet, to be tried before it gets one; None where it has one.

        Raises:
            UsageError: As by ``name_for``.
        """
        place, tiers = _checked(address), read_config(self._backend).tiers
        if _name_of(place, tiers, _checked_name(name)) is not None:
            return None
        _require_free(name, tiers)
        return backend_for(place)

    def name_for(self, address: str, *, name: str | None = None) -> str:
        """Return the name of the tier at an address, and give it one, durably, where it has none.

        Args:
            address: A bucket's address, or an absolute path.
            name: What it shall be called; otherwise ``remote``, with a number where that is taken.

        Raises:
            UsageError: The name means another place, or the address none.
        """
        place, name = _checked(address), _checked_name(name)

        def with_it(config: ConfigRecord) -> ConfigRecord:
            if _name_of(place, config.tiers, name) is not None:
                return config
            _require_free(name, config.tiers)
            free = name or _free_name(config.tiers)
            return _with_tiers(config, {**config.tiers, free: place})

        found = _name_of(place, change_config(self._backend, with_it).tiers, name)
        assert found is not None, "it was just given"
        with self._lock:
            if self._places.get(found, place) != place:
                # It was forgotten since it was opened here, and means another place now.
                self._opened.pop(found, None)
        return found

    def forget(self, tier: str) -> None:
        """Let a tier have no place any more, durably; ``tier_forget`` sees to it first that nothing names it."""
        change_config(
            self._backend,
            lambda config: _with_tiers(config, {name: at for name, at in config.tiers.items() if name != tier}),
        )

    def packs_gone(self, packs: Iterable[PackRef]) -> set[PackId]:
        """Return those of these packs that do not lie in their tiers with their sizes; local ones are passed over."""
        by_tier: dict[str, dict[PackId, int]] = {}
        for pack in packs:
            if pack.tier not in (LOCAL_TIER, LOST_TIER):
                by_tier.setdefault(pack.tier, {})[pack.pack_id] = pack.nbytes
        gone: set[PackId] = set()
        for tier, wanted in by_tier.items():
            gone |= packs_gone(self.open(tier), wanted)
        return gone

    def packs_doomed(self, packs: Iterable[PackRef]) -> set[PackId]:
        """Return those of these packs that a collector in their tier may be about to remove.

        To be asked after what names them was published, and before ``packs_gone``.
        """
        doomed: set[PackId] = set()
        by_tier: dict[str, set[PackId]] = {}
        for pack in packs:
            if pack.tier not in (LOCAL_TIER, LOST_TIER):
                by_tier.setdefault(pack.tier, set()).add(pack.pack_id)
        for tier, wanted in by_tier.items():
            doomed |= doomed_in(self.open(tier), wanted, self._clock)
        return doomed

    def forget_ranges(self, packs: Iterable[PackRef]) -> None:
        """Forget what is kept here of packs of other tiers: it was wrong, or they are."""
        elsewhere = [pack.pack_id for pack in packs if pack.tier not in (LOCAL_TIER, LOST_TIER)]
        if elsewhere and self.cache is not None:
            self.cache.forget_packs(elsewhere)

    def close(self) -> None:
        """Let go of all tiers; a later use opens them again."""
        with self._lock:
            opened, self._opened = self._opened, {}
        for backend in opened.values():
            backend.close()


def packs_gone(backend: Backend, packs: Mapping[PackId, int]) -> set[PackId]:
    """Return those of these packs (id to size) that are not in place with that size; far away, many are looked at."""

    def is_gone(pack_id: PackId) -> bool:
        info = backend.stat(layout.pack_name(pack_id))
        return info is None or info.nbytes != packs[pack_id]

    return {pack_id for pack_id, gone in zip(packs, ask_each(backend, is_gone, packs), strict=True) if gone}


def _name_of(place: str, tiers: Mapping[str, str], name: str | None) -> str | None:
    found = sorted(tier for tier, address in tiers.items() if _spelled(address) == place)
    if name is not None:
        return name if name in found else None
    return found[0] if found else None


def _with_tiers(config: ConfigRecord, tiers: dict[str, str]) -> ConfigRecord:
    kept = {name: getattr(config, name) for name in config.__struct_fields__}
    return ConfigRecord(**{**kept, "tiers": tiers})


def _checked_name(name: str | None) -> str | None:
    if name is not None and layout.check_name(name, "tier") in (LOCAL_TIER, LOST_TIER):
        raise UsageError("this name of a tier has a meaning already", where=repr(name), todo="choose another name")
    return name


def _require_free(name: str | None, tiers: Mapping[str, str]) -> None:
    if name is not None and name in tiers:
        raise UsageError(
            f"the tier {name!r} is another place already",
            where=tiers[name],
            todo="choose another name; checkpoints may lie there",
        )


def _free_name(tiers: Mapping[str, str]) -> str:
    number = 1
    while (name := DEFAULT_NAME if number == 1 else f"{DEFAULT_NAME}-{number}") in tiers:
        number += 1
    return name


def _checked(address: str) -> str:
    if is_bucket_address(address):
        return check_address(address)
    path = Path(address.removeprefix("file://"))
    if "://" in address.removeprefix("file://") or not path.is_absolute():
        raise UsageError(
            "a tier is a bucket or an absolute path", where=repr(address)[:200], todo="name s3://bucket/prefix (gs, az)"
        )
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(
            "the path of a tier must be UTF-8: it is written into config.json", where=ascii(address)[:200]
        ) from None
    return str(path)


def _spelled(address: str) -> str:
    try:
        return _checked(address)
    except CkstoreError:
        # What a person has written there by hand means itself.
        return address
