"""Collect in a tier: remove there what was dropped here, and the packs that nobody needs any more, here or there.

Packs of which much is needed by nobody are rewritten (``tier_repack``), and go when nothing names them any more.

A bucket has no atomic rename, so nothing is moved to a trash there: see ``doomed``.

Invariants:
- Only the store whose tier it is collects there, one collector at a time; what its trash still has is kept there.
- A manifest that cannot be read, here or there, stops the removal of packs: it may name anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckstore.errors import CorruptError, UnsupportedError
from ckstore.format import layout
from ckstore.format.layout import ManifestName
from ckstore.format.location import decode_pack_row
from ckstore.format.pack_table import decode_pack_table
from ckstore.ids import PackId
from ckstore.store.at_once import ask_each, do_each
from ckstore.store.doomed import put_small, remove_dead_lists, remove_packs
from ckstore.store.gc_lock import collector_lock
from ckstore.store.gc_marks import UNREADABLE, Marked
from ckstore.store.gc_plan import GcLimits, PackRewrite
from ckstore.store.gc_repack import Repacked, repack
from ckstore.store.inventory import manifests_in, packs_in
from ckstore.store.parts import Parts
from ckstore.store.tier_marks import Named, TierMarker
from ckstore.store.tier_owner import begin_turn, require_owner
from ckstore.store.tier_repack import outdated_copies, plan_rewrites, renew_copies
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
        rewrites: Packs of which much is needed by nobody, which are rewritten; they go in a later collection, when the
            trash here has none of the manifests any more that named them.
        repacked: What rewriting them came to.
        renewed: Manifests that were put there anew, since they named a pack that was rewritten; in a dry run those that
            an interrupted collection has left.
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
    rewrites: list[PackRewrite] = field(default_factory=list)
    repacked: Repacked = field(default_factory=Repacked)
    renewed: int = 0
    lists: int = 0
    stop: str = ""

    @property
    def freed_nbytes(self) -> int:
        """Bytes of the packs that nobody needs."""
        return sum(self.packs.values())

    @property
    def rewritten_nbytes(self) -> int:
        """Bytes of the packs that are rewritten, before."""
        return sum(rewrite.nbytes for rewrite in self.rewrites)

    @property
    def written_nbytes(self) -> int:
        """Bytes of the packs that take their place."""
        return sum(rewrite.packed_nbytes for rewrite in self.rewrites)


def collect_tier(parts: Parts, tier: str, limits: GcLimits, *, dry_run: bool, clear_lists: bool = False) -> TierGc:
    """Remove from a tier what nobody needs.

    Args:
        parts: The store whose tier it is; any run of it.
        tier: Its name.
        limits: Ages and budgets; packs that no manifest names are left alone until they are old: someone may be
            pushing. Nothing lies in a trash there.
        dry_run: Only say what would be removed.
        clear_lists: No other collector is at work in the tier, whatever lists there say: remove them.

    Raises:
        LockHeldError: Another collection is at work in the store.
        NotFoundError: No such tier is configured.
        UnreachableError: This store is not there.
        ConflictError: This folder is a copy of the store that owns the tier.
        BackendError: It does not answer; what was removed so far is gone, and nothing that is needed.
    """
    # Of a name that was mistyped, before what is in the tier is thought of.
    parts.tiers.address_of(tier)
    collector = _Collector(parts, tier, limits)
    with collector_lock(parts.backend, parts.clock):
        return collector.run(dry_run=dry_run, clear_lists=clear_lists)


_CLAIM_NBYTES_MAX = 4096


class _Collector:
    def __init__(self, parts: Parts, tier: str, limits: GcLimits) -> None:
        self._parts = parts
        self._tier = tier
        self._limits = limits
        self._target = parts.tiers.open(tier)
        self._marker = TierMarker(parts, self._target)

    def run(self, *, dry_run: bool, clear_lists: bool = False) -> TierGc:
        found = TierGc(self._tier, self._parts.tiers.address_of(self._tier), dry_run)
        check = require_owner if dry_run else begin_turn
        check(self._parts, self._tier, self._target)
        if not dry_run:
            found.lists = remove_dead_lists(self._target, self._parts.clock, everyone=clear_lists)
        there = manifests_in(self._target)
        kept = self._marker.seqs_here()
        gone = [name for name in sorted(there) if (name.run, name.seq) not in kept and self._is_dropped(name)]
        found.dropped += [name for name, is_ours in zip(gone, self._ours(gone), strict=True) if is_ours]
        found.superseded = self._superseded(there - set(found.dropped))
        doomed = {*found.dropped, *found.superseded}
        if not dry_run:
            self._remove_manifests(doomed)
        try:
            named = self._marker.named(there - doomed)
        except UNREADABLE as error:
            found.stop = str(error)
            return found
        stored = self._choose_packs(found, named)
        try:
            self._choose_rewrites(found, named, stored)
            if dry_run:
                found.renewed = len(self._outdated(named))
            else:
                self._carry_out(found)
        except (CorruptError, UnsupportedError) as error:
            # A manifest that was read a moment ago.
            found.stop = str(error)
        return found

    # Manifests

    def _is_dropped(self, name: ManifestName) -> bool:
        """Whether the mark lies here: that a manifest is not here any more would not be enough."""
        return self._parts.backend.stat(layout.drop_mark_name(name.run, name.seq)) is not None

    def _ours(self, names: Iterable[ManifestName]) -> list[bool]:
        return list(ask_each(self._target, self._is_ours, names))

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

    def _choose_packs(self, found: TierGc, named: Named) -> dict[PackId, int]:
        """Choose what nobody names; return the packs that lie there, and their sizes."""
        packs, now_ns, stored = named.packs, self._parts.clock.now_ns(), dict[PackId, int]()
        for pack_id, info in packs_in(self._target):
            stored[pack_id] = info.nbytes
            if pack_id in packs:
                continue
            # One whose time lies far ahead of the clock is not in anybody's hands now either.
            if abs(now_ns - info.modified_ns) < self._limits.min_age_seconds * 1e9:
                found.young_nbytes += info.nbytes
            else:
                found.packs[pack_id] = info.nbytes
        return stored

    def _choose_rewrites(self, found: TierGc, named: Named, stored: dict[PackId, int]) -> None:
        def are_ours(names: Iterable[ManifestName]) -> bool:
            return all(self._ours(names))

        # Another replaces or drops checkpoints just now: what is wasted is for the next collection to find.
        with contextlib.suppress(FileNotFoundError):
            here, limits = self._marker.here, self._limits
            found.rewrites = plan_rewrites(self._parts, self._tier, named, here, stored, are_ours, limits)

    def _carry_out(self, found: TierGc) -> None:
        target, clock, marker = self._target, self._parts.clock, self._marker
        if found.packs:
            removed = remove_packs(target, clock, found.packs, lambda: marker.named(manifests_in(target)).packs)
            found.packs, found.stop = removed.packs, removed.stop
        if found.stop:
            return
        found.repacked = repack(self._parts, marker.here, found.rewrites, tier=self._tier)
        outdated = self._outdated(marker.named(manifests_in(target)))
        found.renewed = renew_copies(self._parts, target, outdated, found.repacked.troubles)

    def _outdated(self, named: Named) -> list[tuple[Marked, ManifestName]]:
        found = outdated_copies(self._tier, named, self._marker.here)
        ours = self._ours(copy for _, copy in found)
        return [pair for pair, is_ours in zip(found, ours, strict=True) if is_ours]
