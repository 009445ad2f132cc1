"""Garbage collection in a tier: delete dropped checkpoints, and packs that no manifest in the tier or the store names.

``collect_tier`` runs these steps::

    delete manifests in the tier that were dropped here and have left the trash here, and superseded generations
    delete segments of journals that are not here, and of which no point has a keyframe there   # gc_segments
    mark: packs named by manifests in the tier, in the store, its trash and its quarantine   # TierMarker
    delete unmarked packs in the tier that are old enough
    rewrite packs with many unreferenced bytes, publish in the store, then in the tier       # plan_rewrites

A bucket has no atomic rename, so a tier has no trash; ``store/pending_deletes.py`` protects readers instead.

Invariants:
- Only the store that owns the tier collects in it, one collector at a time. Packs that its trash needs are kept.
- If a manifest cannot be read, no pack is deleted, because the manifest may name any of them.
- A manifest that is moved to the trash during the marking is found in its old or its new place.
- A manifest is put in the tier only after the one in the store, which names the same packs and has checked them.
- A pack is rewritten only if every manifest that names it can follow, and if it has no local copy. A local copy is
  freed by the proof that the same pack is in the tier.
- The next collection completes an interrupted one, because it compares each checkpoint with its copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ckstore.display import repr_of_summary
from ckstore.errors import BackendError, CapacityError, CkstoreError, CorruptError, UnsupportedError
from ckstore.format import paths
from ckstore.format.location import decode_pack_row, decode_pack_table
from ckstore.format.paths import ManifestName, SegmentName
from ckstore.hashing import PackId
from ckstore.io.backend import Backend, for_each_concurrent, map_concurrent
from ckstore.ops.gc.plan import GcLimits, PackRewrite, worthwhile_rewrites
from ckstore.ops.gc.rewrite_packs import Repacked, rewrite_packs
from ckstore.ops.gc.run import collector_lock
from ckstore.ops.gc.survey import count_frames, missing_in
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.listing import manifests_in, packs_in
from ckstore.store.pending_deletes import remove_dead_lists, remove_packs
from ckstore.store.reachability import UNREADABLE, MarkedManifest, Marker, MarkResult, missing_packs
from ckstore.store.repository import Repository
from ckstore.store.small_files import put_small
from ckstore.store.tier_checks import begin_turn, require_owner
from ckstore.store.tiers import packs_gone
from ckstore.tiers.copy import StoreCopy
from ckstore.tiers.gc_segments import remove_segments, superfluous_segments


@dataclass(frozen=True, slots=True)
class NamedPacks:
    """Pack ids named by the manifests of a store and of one of its tiers.

    Attributes:
        in_tier: Packs named by each manifest in the tier.
        marks: The manifests of the store.
        in_store: Packs named by these.
        in_trash: Packs named by manifests in the trash, and packs that quarantined manifests may name.
    """

    in_tier: dict[ManifestName, frozenset[PackId]]
    marks: MarkResult
    in_store: frozenset[PackId]
    in_trash: frozenset[PackId]

    @property
    def packs(self) -> frozenset[PackId]:
        """All packs named by any manifest."""
        return self.in_store.union(self.in_trash, *self.in_tier.values())


class TierMarker:
    """Reads all manifests of a store and of one of its tiers, and caches the pack tables of the tier.

    Attributes:
        store_marker: Reads the manifests of the store.
    """

    def __init__(self, repository: Repository, target: Backend) -> None:
        self._repository = repository
        self._target = target
        self._tables: dict[ManifestName, frozenset[PackId]] = {}
        self.store_marker = Marker(repository)

    def seqs_here(self) -> set[tuple[str, int]]:
        """Return run and seq of every manifest here, including the trash, which is listed twice."""
        trashed = self._trashed()
        marks = self.store_marker.mark()
        in_place = {(name.run, name.seq) for name in marks.manifests}
        return in_place | {(name.run, name.seq) for name, _ in (*trashed, *self._trashed())}

    def named(self, names: Iterable[ManifestName]) -> NamedPacks:
        """Return everything that names packs now.

        Args:
            names: The manifests in the tier to include.

        Raises:
            CkstoreError: A manifest cannot be read.
        """
        names = list(names)
        unread = [name for name in names if name not in self._tables]
        self._tables |= zip(unread, map_concurrent(self._target, self._table_there, unread), strict=True)
        trashed = self._trashed()
        marks = self.store_marker.mark()
        if marks.unreadable:
            raise BackendError("a manifest cannot be read", where=marks.unreadable[0].path)
        for problem in missing_in(self._repository, marks).values():
            raise CorruptError(problem, where=self._repository.backend.root)
        held = set[PackId]()
        packs = [pack_id for pack_id, _ in packs_in(self._target)] if marks.quarantined else []
        for content in marks.quarantined:
            # The content may be damaged, so search it for each pack id.
            held |= {pack_id for pack_id in packs if bytes(pack_id) in content}
        for found in self.store_marker.read_each({*trashed, *self._trashed()}):
            if isinstance(found, FileNotFoundError):
                continue
            if isinstance(found, Exception):
                raise found
            held |= {ref.pack_id for ref in self.store_marker.packs_of(found[0])}
        refs = self.store_marker.numbers.refs
        here = frozenset(refs[number].pack_id for marked in marks.manifests.values() for number in marked.packs)
        return NamedPacks({name: self._tables[name] for name in names}, marks, here, frozenset(held))

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
    """Pairs the checkpoints of a store with their copies in a tier."""

    def __init__(self, tier: str, named: NamedPacks, marker: Marker) -> None:
        self._tier = tier
        self.marker = marker
        self._dropped = {(run, seq) for run, seqs in named.marks.dropped.items() for seq in seqs}
        self.home: dict[Checkpoint, MarkedManifest] = {}
        """The newest generation here of each checkpoint."""
        for name in sorted(named.marks.manifests):
            self.home[name.run, name.seq] = named.marks.manifests[name]

    def follower(self, name: ManifestName) -> MarkedManifest | None:
        """Return the manifest of the store that can replace a copy in the tier, or None.

        It has the same or a higher generation, was not dropped, and all its packs are in the tier.
        """
        marked = self.home.get((name.run, name.seq))
        if marked is None or (name.run, name.seq) in self._dropped or marked.name.generation < name.generation:
            return None
        return marked if all(ref.tier == self._tier for ref in self.marker.packs_of(marked)) else None


def outdated_copies(tier: str, named: NamedPacks, marker: Marker) -> list[tuple[MarkedManifest, ManifestName]]:
    """Return pairs of a manifest here and its copy in the tier that names other packs, because some were rewritten."""
    pairs, highest = _Pairs(tier, named, marker), dict[Checkpoint, ManifestName]()
    for name in sorted(named.in_tier):
        highest[name.run, name.seq] = name
    found = []
    for name in highest.values():
        marked = pairs.follower(name)
        if marked is not None and {ref.pack_id for ref in marker.packs_of(marked)} != named.in_tier[name]:
            found.append((marked, name))
    return found


def plan_rewrites(
    repository: Repository,
    tier: str,
    named: NamedPacks,
    marker: Marker,
    stored: Mapping[PackId, int],
    are_ours: Callable[[Iterable[ManifestName]], bool],
    limits: GcLimits,
) -> list[PackRewrite]:
    """Choose the packs of a tier that are worth rewriting.

    Args:
        repository: The store that owns the tier.
        tier: Name of the tier.
        named: Packs named by manifests of the store and the tier.
        marker: The marker that has read the manifests here.
        stored: Packs in the tier, and their sizes.
        are_ours: Returns True if a push has put all of these manifests in the tier.
        limits: How much of a pack may be unreferenced, and how much may be written.

    Raises:
        FileNotFoundError: A manifest was moved meanwhile, so its packs are unknown.
        CorruptError: A manifest cannot be read.
    """
    if limits.repack_nbytes_max == 0:
        return []
    pairs, refs = _Pairs(tier, named, marker), marker.numbers.refs
    current = list(pairs.home.values())
    barred = named.in_trash | _barred_here(repository, tier, named, pairs, stored)
    naming: dict[PackId, list[ManifestName]] = {}
    for name, packs in named.in_tier.items():
        if pairs.follower(name) is None:
            # The checkpoint was pulled, dropped, demoted, or committed in the tier: no manifest here replaces the copy.
            barred |= packs
        for pack_id in packs:
            naming.setdefault(pack_id, []).append(name)
    candidates = [marked for marked in current if any(ref.pack_id not in barred for ref in marker.packs_of(marked))]
    uses = []
    for use in count_frames(marker, candidates):
        ref = refs[use.number]
        if ref.pack_id not in barred and stored.get(ref.pack_id) == ref.nbytes:
            uses.append(use)

    def may_rewrite(pack_id: PackId) -> bool:
        return not _is_local(repository, pack_id) and are_ours(naming.get(pack_id, ()))

    # Each manifest is written to the store and to the tier.
    return list(worthwhile_rewrites(uses, marker, candidates, limits, manifest_copies=2, may_rewrite=may_rewrite))


def _barred_here(
    repository: Repository, tier: str, named: NamedPacks, pairs: _Pairs, stored: Mapping[PackId, int]
) -> frozenset[PackId]:
    """Return the packs that must not be rewritten, because a manifest here that names them cannot be replaced."""
    marker, barred = pairs.marker, set[PackId]()
    wanted = {ref for marked in named.marks.manifests.values() for ref in marker.packs_of(marked)}
    missing = missing_packs(repository, wanted)
    for marked in named.marks.manifests.values():
        refs = list(marker.packs_of(marked))
        # A superseded generation is left to the next local collection. Replacing a manifest requires all of its packs.
        is_replaceable = pairs.home[marked.name.run, marked.name.seq] is marked and all(
            stored.get(ref.pack_id) == ref.nbytes
            if ref.tier == tier
            else ref.tier == LOCAL_TIER and ref.pack_id not in missing
            for ref in refs
        )
        barred |= {ref.pack_id for ref in refs if ref.tier != tier or not is_replaceable}
    return frozenset(barred)


def _is_local(repository: Repository, pack_id: PackId) -> bool:
    """Return True if the pack also exists here. Before it is freed here, it is looked up in the tier."""
    return any(repository.backend.stat(path) is not None for path in repository.trash.paths_of(pack_id))


def renew_copies(
    repository: Repository,
    target: Backend,
    outdated: Iterable[tuple[MarkedManifest, ManifestName]],
    troubles: list[str],
) -> int:
    """Put the next generation of outdated copies to a tier, and return how many were put.

    A copy that cannot be renewed is described in ``troubles``.

    Raises:
        CapacityError: The tier is full.
        BackendError: The tier does not respond.
    """
    count = 0
    for marked, copy in outdated:
        name = marked.name
        run = repository.for_run(name.run)
        try:
            manifest = run.manifests.load(name)
            if run.rescue_packs(manifest.packs):
                # Replaced or dropped, and collected, since it was read. If it is damage, verify and restore report it.
                continue
            # At most the generation here, so that the next generation stays free for a later push.
            header = replace(manifest.header, generation=copy.generation + 1)
            StoreCopy(run, target).put_manifest(replace(manifest, header=header))
            count += 1
        except FileNotFoundError:
            # Dropped or replaced since it was read.
            continue
        except (CapacityError, BackendError):
            raise
        except CkstoreError as error:
            troubles.append(f"the copy of seq {name.seq} of run {name.run} was not renewed: {error}")
    return count


@dataclass(slots=True)
class TierGc:
    """Plan or result of a collection in a tier.

    Attributes:
        tier: Name of the tier.
        address: Address of the tier.
        is_dry_run: True if nothing was deleted.
        dropped: Manifests of checkpoints that were dropped here and are no longer in the trash here.
        superseded: Lower generations of manifests in the tier.
        packs: Packs that no manifest names, and their sizes.
        young_nbytes: Bytes of packs that no manifest names, but that are too young to delete.
        rewrites: Packs to rewrite. The old packs are deleted by a later collection, after the manifests that named
            them have left the trash here.
        repacked: Result of rewriting them.
        renewed: Manifests put in the tier again because they named a rewritten pack. In a dry run, those left by
            an interrupted collection.
        lists: Deletion lists of crashed collectors that were removed. Packs on such a list cannot be reused.
        stop: Why no pack was deleted; empty if there was no obstacle.
        segments: Segments of journals that no point needs, and their sizes.
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
    segments: dict[SegmentName, int] = field(default_factory=dict)

    __repr__ = repr_of_summary

    @property
    def freed_nbytes(self) -> int:
        """Bytes of the packs that no manifest names."""
        return sum(self.packs.values())

    @property
    def segments_nbytes(self) -> int:
        """Bytes of the segments that no point needs."""
        return sum(self.segments.values())

    @property
    def rewritten_nbytes(self) -> int:
        """Bytes of the packs to rewrite."""
        return sum(rewrite.nbytes for rewrite in self.rewrites)

    @property
    def written_nbytes(self) -> int:
        """Bytes of the packs that replace them."""
        return sum(rewrite.packed_nbytes for rewrite in self.rewrites)


def collect_tier(
    repository: Repository, tier: str, limits: GcLimits, *, dry_run: bool, clear_lists: bool = False
) -> TierGc:
    """Delete dropped checkpoints and unreferenced packs in a tier.

    Args:
        repository: The store that owns the tier; any run of it.
        tier: Name of the tier.
        limits: Ages and budgets. Young packs that no manifest names are kept, because a push may be copying them.
        dry_run: Only report what would be deleted.
        clear_lists: Remove all deletion lists in the tier. Use it only if no other collection is running on that tier.

    Raises:
        LockHeldError: Another collection is running in the store.
        NotFoundError: The tier does not exist.
        UnreachableError: The place does not hold this store.
        ConflictError: This folder is a copy of the store that owns the tier.
        BackendError: The tier does not respond. Only unreferenced files were deleted so far.
    """
    # Raises for a mistyped name before anything else.
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
        in_tier = manifests_in(self._target)
        seqs_here = self._marker.seqs_here()
        gone = [name for name in sorted(in_tier) if (name.run, name.seq) not in seqs_here and self._is_dropped(name)]
        found.dropped += [name for name, is_ours in zip(gone, self._ours(gone), strict=True) if is_ours]
        found.superseded = self._superseded(in_tier - set(found.dropped))
        removable = {*found.dropped, *found.superseded}
        if not dry_run:
            self._remove_manifests(removable)
        kept = in_tier - removable
        found.segments = superfluous_segments(self._repository, self._target, kept, self._limits.min_age_seconds)
        if not dry_run:
            remove_segments(self._target, found.segments)
        try:
            named = self._marker.named(kept)
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
            # A manifest that was readable before can no longer be read.
            found.stop = str(error)
        return found

    # Manifests

    def _is_dropped(self, name: ManifestName) -> bool:
        """Return True if the checkpoint has a drop mark here. A missing manifest alone is not enough."""
        return self._repository.backend.stat(paths.drop_mark_name(name.run, name.seq)) is not None

    def _ours(self, names: Iterable[ManifestName]) -> list[bool]:
        return list(map_concurrent(self._target, self._is_ours, names))

    def _is_ours(self, name: ManifestName) -> bool:
        """Return True if a push put the manifest in the tier. Only the claim of a pushed checkpoint has its step."""
        try:
            claim = self._target.read_bytes(paths.claim_name(name.run, name.seq), nbytes_max=_CLAIM_NBYTES_MAX)
        except FileNotFoundError:
            return False
        return claim.split()[:1] == [str(name.step).encode()]

    def _superseded(self, in_tier: Iterable[ManifestName]) -> list[ManifestName]:
        """Return the lower generations of checkpoints whose highest generation is complete in the tier."""
        highest: dict[tuple[str, int], ManifestName] = {}
        names = sorted(in_tier)
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

    def _choose_packs(self, found: TierGc, named: NamedPacks) -> dict[PackId, int]:
        """Choose the packs that no manifest names. Return all packs in the tier and their sizes."""
        packs, now_ns, stored = named.packs, self._repository.clock.now_ns(), dict[PackId, int]()
        for pack_id, info in packs_in(self._target):
            stored[pack_id] = info.nbytes
            if pack_id in packs:
                continue
            # A time far in the future counts as old, because no push is writing that pack now.
            if abs(now_ns - info.modified_ns) < self._limits.min_age_seconds * 1e9:
                found.young_nbytes += info.nbytes
            else:
                found.packs[pack_id] = info.nbytes
        return stored

    def _choose_rewrites(self, found: TierGc, named: NamedPacks, stored: dict[PackId, int]) -> None:
        def are_ours(names: Iterable[ManifestName]) -> bool:
            return all(self._ours(names))

        # Another process is replacing or dropping checkpoints; the next collection rewrites.
        with contextlib.suppress(FileNotFoundError):
            here, limits = self._marker.store_marker, self._limits
            found.rewrites = plan_rewrites(self._repository, self._tier, named, here, stored, are_ours, limits)

    def _carry_out(self, found: TierGc) -> None:
        target, clock, marker = self._target, self._repository.clock, self._marker
        if found.packs:
            removed = remove_packs(target, clock, found.packs, lambda: marker.named(manifests_in(target)).packs)
            found.packs, found.stop = removed.packs, removed.stop
        if found.stop:
            return
        found.repacked = rewrite_packs(self._repository, marker.store_marker, found.rewrites, tier=self._tier)
        outdated = self._outdated(marker.named(manifests_in(target)))
        found.renewed = renew_copies(self._repository, target, outdated, found.repacked.troubles)

    def _outdated(self, named: NamedPacks) -> list[tuple[MarkedManifest, ManifestName]]:
        found = outdated_copies(self._tier, named, self._marker.store_marker)
        ours = self._ours(copy for _, copy in found)
        return [pair for pair, is_ours in zip(found, ours, strict=True) if is_ours]
