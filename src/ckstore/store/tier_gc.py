"""Collect in a tier: remove there what was dropped here, and the packs that nobody needs any more, here or there.

A bucket has no atomic rename, so nothing is moved to a trash there: see ``doomed``.

Invariants:
- Only the store whose tier it is collects there, one collector at a time; what its trash still has is kept there.
- A manifest that cannot be read, here or there, stops the removal of packs: it may name anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckstore.errors import BackendError
from ckstore.format import layout
from ckstore.format.layout import ManifestName
from ckstore.format.location import decode_pack_row
from ckstore.format.pack_table import decode_pack_table
from ckstore.ids import PackId
from ckstore.io.backend import Distant, FileInfo
from ckstore.store.at_once import ask_each, do_each
from ckstore.store.doomed import put_small, remove_dead_lists, remove_packs
from ckstore.store.gc_lock import collector_lock
from ckstore.store.gc_marks import UNREADABLE, Marker
from ckstore.store.parts import Parts
from ckstore.store.tiers import packs_gone


@dataclass(slots=True)
class TierGc:
    """What a collection in a tier removes, or has removed.

    Attributes:
        tier: Its name.
        address: Where it is.
        is_dry_run: Nothing was removed.
        dropped: Checkpoints that were dropped here, and that the trash here has no longer.
        superseded: Lower generations there.
        packs: Packs that nobody needs, and their sizes.
        young_nbytes: Bytes of packs that nobody names, but are too young to go.
        lists: Lists of dead collectors that were removed; they had kept others from using what they named.
        stop: Why no pack was removed; empty where nothing spoke against it.
    """

    tier: str
    address: str
    is_dry_run: bool
    dropped: list[ManifestName] = field(default_factory=list)
    superseded: list[ManifestName] = field(default_factory=list)
    packs: dict[PackId, int] = field(default_factory=dict)
    young_nbytes: int = 0
    lists: int = 0
    stop: str = ""

    @property
    def freed_nbytes(self) -> int:
        """Bytes of the packs."""
        return sum(self.packs.values())


def collect_tier(
    parts: Parts, tier: str, *, min_age_seconds: float, dry_run: bool, clear_lists: bool = False
) -> TierGc:
    """Remove from a tier what nobody needs.

    Args:
        parts: The store whose tier it is; any run of it.
        tier: Its name.
        min_age_seconds: Packs that no manifest names are left alone until they are this old: someone may be pushing.
        dry_run: Only say what would be removed.
        clear_lists: No other collector is at work in the tier, whatever lists there say: remove them.

    Raises:
        LockHeldError: Another collection is at work in the store.
        NotFoundError: No such tier is configured.
        BackendError: It does not answer; what was removed so far is gone, and nothing that is needed.
    """
    collector = _Collector(parts, tier, min_age_seconds)
    with collector_lock(parts.backend, parts.clock):
        return collector.run(dry_run=dry_run, clear_lists=clear_lists)


_CLAIM_NBYTES_MAX = 4096


class _Collector:
    def __init__(self, parts: Parts, tier: str, min_age_seconds: float) -> None:
        self._parts = parts
        self._tier = tier
        self._min_age_seconds = min_age_seconds
        self._target = parts.tiers.open(tier)
        self._marker = Marker(parts)
        self._tables: dict[ManifestName, frozenset[PackId]] = {}

    def run(self, *, dry_run: bool, clear_lists: bool = False) -> TierGc:
        found = TierGc(self._tier, self._parts.tiers.address_of(self._tier), dry_run)
        if not dry_run:
            found.lists = remove_dead_lists(self._target, self._parts.clock, everyone=clear_lists)
        there = self._manifests_there()
        kept = self._seqs_kept()
        gone = [name for name in sorted(there) if (name.run, name.seq) not in kept and self._is_dropped(name)]
        ours = ask_each(self._target, self._is_ours, gone)
        found.dropped += [name for name, is_ours in zip(gone, ours, strict=True) if is_ours]
        found.superseded = self._superseded(there - set(found.dropped))
        doomed = {*found.dropped, *found.superseded}
        if not dry_run:
            self._remove_manifests(doomed)
        self._choose_packs(found, there - doomed)
        if not dry_run and found.packs and not found.stop:
            self._remove_packs(found)
        return found

    # Manifests

    def _manifests_there(self) -> set[ManifestName]:
        found = set()
        for run in filter(layout.is_name, self._target.list_names(layout.MANIFESTS_FOLDER)):
            files = self._target.list_names(layout.manifests_folder(run))
            found |= {name for file in files if (name := layout.parse_manifest_file(run, file)) is not None}
        return found

    def _seqs_kept(self) -> set[tuple[str, int]]:
        """Return run and seq of every manifest in place here or in the trash, looked for there on both sides."""
        trashed = self._trashed()
        look = self._marker.look()
        kept = {(name.run, name.seq) for name in look.manifests}
        return kept | {(name.run, name.seq) for name, _ in (*trashed, *self._trashed())}

    def _trashed(self) -> list[tuple[ManifestName, str]]:
        folders = self._parts.trash.contents()
        return [(trashed.name, trashed.path) for folder in folders for trashed in folder.manifests]

    def _is_dropped(self, name: ManifestName) -> bool:
        """Whether the mark lies here: that a manifest is not here any more would not be enough."""
        return self._parts.backend.stat(layout.drop_mark_name(name.run, name.seq)) is not None

    def _is_ours(self, name: ManifestName) -> bool:
        """Whether a push put it there: the claim of a copy says of which commit; that of a commit there is empty."""
        try:
            claim = self._target.read_bytes(layout.claim_name(name.run, name.seq), nbytes_max=_CLAIM_NBYTES_MAX)
        except FileNotFoundError:
            return False
        return claim.split()[:1] == [str(name.step).encode()]

    def _superseded(self, there: Iterable[ManifestName]) -> list[ManifestName]:
        """Return the lower generations whose highest one is whole there."""
        highest: dict[tuple[str, int], ManifestName] = {}
        names = sorted(there)
        for name in names:
            highest[name.run, name.seq] = name
        lower = [name for name in names if highest[name.run, name.seq] != name]
        whole = {top for top in {highest[name.run, name.seq] for name in lower} if self._is_whole(top)}
        return [name for name in lower if highest[name.run, name.seq] in whole]

    def _is_whole(self, name: ManifestName) -> bool:
        try:
            content = self._target.read_bytes(name.path, nbytes_max=self._parts.limits.manifest_nbytes_max)
            table = decode_pack_table(content, limits=self._parts.limits, expect=name)
            refs = [decode_pack_row(row, table.tiers) for row in table.rows()]
            return not packs_gone(self._target, {ref.pack_id: ref.nbytes for ref in refs})
        except (FileNotFoundError, *UNREADABLE):
            return False

    def _remove_manifests(self, names: Iterable[ManifestName]) -> None:
        names = sorted(names)
        marked = {(name.run, name.seq) for name in names if self._is_dropped(name)}
        do_each(self._target, self._mark, sorted(marked))
        do_each(self._target, self._unlink, names)

    def _mark(self, dropped: tuple[str, int]) -> None:
        with contextlib.suppress(FileExistsError):
            put_small(self._target, layout.drop_mark_name(*dropped), b"")

    def _unlink(self, name: ManifestName) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._target.unlink(name.path)

    # Packs

    def _choose_packs(self, found: TierGc, staying: set[ManifestName]) -> None:
        try:
            named = self._named(staying)
        except UNREADABLE as error:
            found.stop = str(error)
            return
        now_ns = self._parts.clock.now_ns()
        for pack_id, info in self._packs_there():
            if pack_id in named:
                continue
            # One whose time lies far ahead of the clock is not in anybody's hands now either.
            if abs(now_ns - info.modified_ns) < self._min_age_seconds * 1e9:
                found.young_nbytes += info.nbytes
            else:
                found.packs[pack_id] = info.nbytes

    def _packs_there(self) -> Iterator[tuple[PackId, FileInfo]]:
        target = self._target
        if isinstance(target, Distant):
            found = target.list_deep(layout.PACKS_FOLDER)
        else:
            names = [f"{folder}/{file}" for folder in layout.pack_folders() for file in target.list_names(folder)]
            found = [(name, info) for name in names if (info := target.stat(name)) is not None]
        for name, info in found:
            pack_id = layout.parse_pack_file(name.rpartition("/")[2])
            if pack_id is not None and layout.pack_name(pack_id) == name:
                yield pack_id, info

    def _named(self, there: Iterable[ManifestName]) -> set[PackId]:
        """Return the packs that manifests name: those there, and of this store's, which lie there, or did.

        Raises:
            CkstoreError: One cannot be read.
        """
        there = list(there)
        unread = [name for name in there if name not in self._tables]
        self._tables |= zip(unread, ask_each(self._target, self._table_there, unread), strict=True)
        named = set[PackId]().union(*(self._tables[name] for name in there))
        trashed = self._trashed()
        look = self._marker.look()
        if look.unreadable:
            raise BackendError("a manifest cannot be read", where=look.unreadable[0].path)
        refs = self._marker.numbers.refs
        named |= {refs[number].pack_id for marked in look.manifests.values() for number in marked.packs}
        for content in look.quarantined:
            # Any bytes of it may be a name.
            named |= {pack_id for pack_id, _ in self._packs_there() if bytes(pack_id) in content}
        for found in self._marker.read_each({*trashed, *self._trashed()}):
            if isinstance(found, FileNotFoundError):
                continue
            if isinstance(found, Exception):
                raise found
            named |= {ref.pack_id for ref in self._marker.packs_of(found[0])}
        return named

    def _table_there(self, name: ManifestName) -> frozenset[PackId]:
        where = self._target.location_of(name.path)
        try:
            content = self._target.read_bytes(name.path, nbytes_max=self._parts.limits.manifest_nbytes_max)
        except FileNotFoundError:
            return frozenset()
        table = decode_pack_table(content, limits=self._parts.limits, expect=name, where=where)
        return frozenset(decode_pack_row(row, table.tiers, where=where).pack_id for row in table.rows())

    def _remove_packs(self, found: TierGc) -> None:
        target, clock = self._target, self._parts.clock
        removed = remove_packs(target, clock, found.packs, lambda: self._named(self._manifests_there()))
        found.packs, found.stop = removed.packs, removed.stop
