"""Collect in a tier: remove there what was dropped here, and the packs that nobody needs any more, here or there.

Packs of which much is needed by nobody are rewritten (``tier_repack``), and go when nothing names them any more.

A bucket has no atomic rename, so nothing is moved to a trash there: see ``doomed``.

Invariants:
- Only the store whose tier it is collects there, one collector at a time; what its trash still has is kept there.
- A manifest that cannot be read, here or there, stops the removal of packs: it may name anything.

Which packs of a tier manifests name: those there, those here, in the trash here and in quarantine.

Invariants:
- A manifest that cannot be read, here or there, is told: it may name anything.
- What is moved from its place to the trash meanwhile is seen in one of both.

Rewrite packs in a tier of which much is needed by nobody: first for this store's manifests, then for those there.

What lies in the tier is a copy of this store's checkpoints. So a pack there is rewritten as one here is: its needed
frames are copied to a new one there, the manifests here are replaced, and what is here then is put there too, as the
next generation of what is there. The old pack goes when nothing names it any more, the trash here included: see
``tier_gc``.

Invariants:
- A manifest is put there only after the one here, which names the same packs, was published and has seen them all.
- What an interrupted collection has left is what the next one finds to do: each checkpoint is compared with its copy.
- A pack is rewritten only if all that names it can follow, and if it does not lie here too: the copy here is freed by
  the proof that it lies there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ckstore.errors import BackendError, CapacityError, CkstoreError, CorruptError, UnsupportedError
from ckstore.format import paths
from ckstore.format.location import decode_pack_row, decode_pack_table
from ckstore.format.paths import ManifestName
from ckstore.hashing import PackId
from ckstore.io.backend import Backend, for_each_concurrent, map_concurrent
from ckstore.ops.gc.plan import GcLimits, PackRewrite, worthwhile_rewrites
from ckstore.ops.gc.rewrite_packs import Repacked, rewrite_packs
from ckstore.ops.gc.run import collector_lock
from ckstore.ops.gc.survey import missing_in
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.listing import manifests_in, packs_in
from ckstore.store.pending_deletes import remove_dead_lists, remove_packs
from ckstore.store.reachability import UNREADABLE, MarkedManifest, Marker, MarkResult, missing_packs
from ckstore.store.repository import Repository
from ckstore.store.small_files import put_small
from ckstore.store.tier_checks import begin_turn, require_owner
from ckstore.store.tiers import packs_gone
from ckstore.tiers.copy import StoreCopy


@dataclass(frozen=True, slots=True)
class Named:
    """What manifests name, here and there, each pack by its id, wherever they say that it lies.

    Attributes:
        there: By each manifest there.
        look: The manifests in place here.
        here: By these.
        held: By those in the trash here; and what one in quarantine may name.
    """

    there: dict[ManifestName, frozenset[PackId]]
    look: MarkResult
    here: frozenset[PackId]
    held: frozenset[PackId]

    @property
    def packs(self) -> frozenset[PackId]:
        """All of them."""
        return self.here.union(self.held, *self.there.values())


class TierMarker:
    """Looks at all manifests of a store and of a tier of it, again and again.

    Attributes:
        here: Looks at those of the store.
    """

    def __init__(self, repository: Repository, target: Backend) -> None:
        self._repository = repository
        self._target = target
        self._tables: dict[ManifestName, frozenset[PackId]] = {}
        self.here = Marker(repository)

    def seqs_here(self) -> set[tuple[str, int]]:
        """Return run and seq of every manifest in place here or in the trash, looked for there on both sides."""
        trashed = self._trashed()
        look = self.here.mark()
        kept = {(name.run, name.seq) for name in look.manifests}
        return kept | {(name.run, name.seq) for name, _ in (*trashed, *self._trashed())}

    def named(self, there: Iterable[ManifestName]) -> Named:
        """Look at everything that names packs now.

        Args:
            there: The manifests in the tier that count.

        Raises:
            CkstoreError: One cannot be read.
        """
        there = list(there)
        unread = [name for name in there if name not in self._tables]
        self._tables |= zip(unread, map_concurrent(self._target, self._table_there, unread), strict=True)
        trashed = self._trashed()
        look = self.here.mark()
        if look.unreadable:
            raise BackendError("a manifest cannot be read", where=look.unreadable[0].path)
        for sentence in missing_in(self._repository, look).values():
            raise CorruptError(sentence, where=self._repository.backend.root)
        held = set[PackId]()
        packs = [pack_id for pack_id, _ in packs_in(self._target)] if look.quarantined else []
        for content in look.quarantined:
            # Any bytes of it may be a name.
            held |= {pack_id for pack_id in packs if bytes(pack_id) in content}
        for found in self.here.read_each({*trashed, *self._trashed()}):
            if isinstance(found, FileNotFoundError):
                continue
            if isinstance(found, Exception):
                raise found
            held |= {ref.pack_id for ref in self.here.packs_of(found[0])}
        refs = self.here.numbers.refs
        here = frozenset(refs[number].pack_id for marked in look.manifests.values() for number in marked.packs)
        return Named({name: self._tables[name] for name in there}, look, here, frozenset(held))

    def _trashed(self) -> list[tuple[ManifestName, str]]:
        folders = self._repository.trash.contents()
        return [(trashed.name, trashed.path) for folder in folders for trashed in folder.manifests]

    def _table_there(self, name: ManifestName) -> frozenset[PackId]:
        where = self._target.location_of(name.path)
        try:
            content = self._target.read_bytes(name.path, nbytes_max=self._repository.limits.manifest_nbytes_max)
        except FileNotFoundError:
            return frozenset()
        table = decode_pack_table(content, limits=self._repository.limits, expect=name, where=where)
        return frozenset(decode_pack_row(row, table.tiers, where=where).pack_id for row in table.rows())


Checkpoint = tuple[str, int]
"""Run and seq."""


class _Pairs:
    """The checkpoints of a store beside their copies in a tier."""

    def __init__(self, tier: str, named: Named, marker: Marker) -> None:
        self._tier = tier
        self.marker = marker
        self._dropped = {(run, seq) for run, seqs in named.look.dropped.items() for seq in seqs}
        self.home: dict[Checkpoint, MarkedManifest] = {}
        """For each checkpoint, its manifest here of the highest generation."""
        for name in sorted(named.look.manifests):
            self.home[name.run, name.seq] = named.look.manifests[name]

    def follower(self, name: ManifestName) -> MarkedManifest | None:
        """Return what is here in place of a copy there: a form as late or later, all of which lies in the tier."""
        marked = self.home.get((name.run, name.seq))
        if marked is None or (name.run, name.seq) in self._dropped or marked.name.generation < name.generation:
            return None
        return marked if all(ref.tier == self._tier for ref in self.marker.packs_of(marked)) else None


def outdated_copies(tier: str, named: Named, marker: Marker) -> list[tuple[MarkedManifest, ManifestName]]:
    """Return the manifests here whose copies in a tier name other packs, with these: some packs were rewritten."""
    pairs, highest = _Pairs(tier, named, marker), dict[Checkpoint, ManifestName]()
    for name in sorted(named.there):
        highest[name.run, name.seq] = name
    found = []
    for name in highest.values():
        marked = pairs.follower(name)
        if marked is not None and {ref.pack_id for ref in marker.packs_of(marked)} != named.there[name]:
            found.append((marked, name))
    return found


def plan_rewrites(
    repository: Repository,
    tier: str,
    named: Named,
    marker: Marker,
    stored: Mapping[PackId, int],
    are_ours: Callable[[Iterable[ManifestName]], bool],
    limits: GcLimits,
) -> list[PackRewrite]:
    """Choose the packs of a tier that are worth rewriting.

    Args:
        repository: The store whose tier it is.
        tier: Its name.
        named: What manifests name, here and there.
        marker: The one that has looked at those here.
        stored: Packs that lie there, and their sizes.
        are_ours: Whether a push put all of these manifests there.
        limits: How much of a pack may be waste, and how much may be written.

    Raises:
        FileNotFoundError: A manifest was moved meanwhile: nothing is known of what it needed.
        CorruptError: One cannot be read any more.
    """
    if limits.repack_nbytes_max == 0:
        return []
    from ckstore.ops.gc.survey import count_frames

    pairs, refs = _Pairs(tier, named, marker), marker.numbers.refs
    current = list(pairs.home.values())
    barred = named.held | _barred_here(repository, tier, named, pairs, stored)
    naming: dict[PackId, list[ManifestName]] = {}
    for name, packs in named.there.items():
        if pairs.follower(name) is None:
            # Pulled, dropped, demoted, or committed there by another: its copy has nothing to follow.
            barred |= packs
        for pack_id in packs:
            naming.setdefault(pack_id, []).append(name)
    staying = [marked for marked in current if any(ref.pack_id not in barred for ref in marker.packs_of(marked))]
    uses = []
    for use in count_frames(marker, staying):
        ref = refs[use.number]
        if ref.pack_id not in barred and stored.get(ref.pack_id) == ref.nbytes:
            uses.append(use)

    def may_rewrite(pack_id: PackId) -> bool:
        return not _lies_here(repository, pack_id) and are_ours(naming.get(pack_id, ()))

    # Each manifest is written here, and there.
    return list(worthwhile_rewrites(uses, marker, staying, limits, manifest_copies=2, may_rewrite=may_rewrite))


def _barred_here(
    repository: Repository, tier: str, named: Named, pairs: _Pairs, stored: Mapping[PackId, int]
) -> frozenset[PackId]:
    """Return the packs of manifests here that cannot be replaced, or that would still name them after that."""
    marker, barred = pairs.marker, set[PackId]()
    wanted = {ref for marked in named.look.manifests.values() for ref in marker.packs_of(marked)}
    missing = missing_packs(repository, wanted)
    for marked in named.look.manifests.values():
        refs = list(marker.packs_of(marked))
        # A lower generation that an interrupted replacement has left is for the next collection here; and who replaces
        # a manifest has to see all of its packs.
        is_replaceable = pairs.home[marked.name.run, marked.name.seq] is marked and all(
            stored.get(ref.pack_id) == ref.nbytes
            if ref.tier == tier
            else ref.tier == LOCAL_TIER and ref.pack_id not in missing
            for ref in refs
        )
        barred |= {ref.pack_id for ref in refs if ref.tier != tier or not is_replaceable}
    return frozenset(barred)


def _lies_here(repository: Repository, pack_id: PackId) -> bool:
    """Whether a pack lies here too: what frees it looks for it in the tier, by the manifests that say so."""
    return any(repository.backend.stat(path) is not None for path in repository.trash.paths_of(pack_id))


def renew_copies(
    repository: Repository,
    target: Backend,
    outdated: Iterable[tuple[MarkedManifest, ManifestName]],
    troubles: list[str],
) -> int:
    """Put manifests to a tier whose copies there name other packs; return how many; what cannot be is told.

    Raises:
        CapacityError: The place is full.
        BackendError: It does not answer.
    """
    count = 0
    for marked, copy in outdated:
        name = marked.name
        run = repository.for_run(name.run)
        try:
            manifest = run.manifests.load(name)
            if run.rescue_packs(manifest.packs):
                # Replaced or dropped since, and collected; or damage, which a reader of it tells.
                continue
            # Never above what is here: a push finds the next number here free there.
            header = replace(manifest.header, generation=copy.generation + 1)
            StoreCopy(run, target).put_manifest(replace(manifest, header=header))
            count += 1
        except FileNotFoundError:
            # Dropped or replaced since.
            continue
        except (CapacityError, BackendError):
            raise
        except CkstoreError as error:
            troubles.append(f"the copy of seq {name.seq} of run {name.run} is as it was: {error}")
    return count


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


def collect_tier(
    repository: Repository, tier: str, limits: GcLimits, *, dry_run: bool, clear_lists: bool = False
) -> TierGc:
    """Remove from a tier what nobody needs.

    Args:
        repository: The store whose tier it is; any run of it.
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
    repository.tiers.address_of(tier)
    collector = _Collector(repository, tier, limits)
    with collector_lock(repository.backend, repository.clock):
        return collector.run(dry_run=dry_run, clear_lists=clear_lists)


_CLAIM_NBYTES_MAX = 4096


class _Collector:
    def __init__(self, repository: Repository, tier: str, limits: GcLimits) -> None:
        self._repository = repository
        self._tier = tier
        self._limits = limits
        self._target = repository.tiers.open(tier)
        self._marker = TierMarker(repository, self._target)

    def run(self, *, dry_run: bool, clear_lists: bool = False) -> TierGc:
        found = TierGc(self._tier, self._repository.tiers.address_of(self._tier), dry_run)
        check = require_owner if dry_run else begin_turn
        check(self._repository, self._tier, self._target)
        if not dry_run:
            found.lists = remove_dead_lists(self._target, self._repository.clock, everyone=clear_lists)
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
        return self._repository.backend.stat(paths.drop_mark_name(name.run, name.seq)) is not None

    def _ours(self, names: Iterable[ManifestName]) -> list[bool]:
        return list(map_concurrent(self._target, self._is_ours, names))

    def _is_ours(self, name: ManifestName) -> bool:
        """Whether a push put it there: the claim of a copy says of which commit; that of a commit there is empty."""
        try:
            claim = self._target.read_bytes(paths.claim_name(name.run, name.seq), nbytes_max=_CLAIM_NBYTES_MAX)
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
            content = self._target.read_bytes(name.path, nbytes_max=self._repository.limits.manifest_nbytes_max)
            table = decode_pack_table(content, limits=self._repository.limits, expect=name)
            refs = [decode_pack_row(row, table.tiers) for row in table.rows()]
            return not packs_gone(self._target, {ref.pack_id: ref.nbytes for ref in refs})
        except (FileNotFoundError, *UNREADABLE):
            return False

    def _remove_manifests(self, names: Iterable[ManifestName]) -> None:
        names = sorted(names)
        marked = {(name.run, name.seq) for name in names if self._is_dropped(name)}
        for_each_concurrent(self._target, self._mark, sorted(marked))
        for_each_concurrent(self._target, self._unlink, names)

    def _mark(self, dropped: tuple[str, int]) -> None:
        with contextlib.suppress(FileExistsError):
            put_small(self._target, paths.drop_mark_name(*dropped), b"")

    def _unlink(self, name: ManifestName) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._target.unlink(name.path)

    # Packs

    def _choose_packs(self, found: TierGc, named: Named) -> dict[PackId, int]:
        """Choose what nobody names; return the packs that lie there, and their sizes."""
        packs, now_ns, stored = named.packs, self._repository.clock.now_ns(), dict[PackId, int]()
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
            found.rewrites = plan_rewrites(self._repository, self._tier, named, here, stored, are_ours, limits)

    def _carry_out(self, found: TierGc) -> None:
        target, clock, marker = self._target, self._repository.clock, self._marker
        if found.packs:
            removed = remove_packs(target, clock, found.packs, lambda: marker.named(manifests_in(target)).packs)
            found.packs, found.stop = removed.packs, removed.stop
        if found.stop:
            return
        found.repacked = rewrite_packs(self._repository, marker.here, found.rewrites, tier=self._tier)
        outdated = self._outdated(marker.named(manifests_in(target)))
        found.renewed = renew_copies(self._repository, target, outdated, found.repacked.troubles)

    def _outdated(self, named: Named) -> list[tuple[MarkedManifest, ManifestName]]:
        found = outdated_copies(self._tier, named, self._marker.here)
        ours = self._ours(copy for _, copy in found)
        return [pair for pair, is_ours in zip(found, ours, strict=True) if is_ours]
