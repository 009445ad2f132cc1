"""Rewrite packs in a tier of which much is needed by nobody: first for this store's manifests, then for those there.

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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ckstore.errors import BackendError, CapacityError, CkstoreError
from ckstore.format.layout import ManifestName
from ckstore.ids import PackId
from ckstore.io.backend import Backend
from ckstore.store.gc_marks import Marked, Marker, missing_packs
from ckstore.store.gc_plan import GcLimits, PackRewrite, worthwhile_rewrites
from ckstore.store.known import LOCAL_TIER
from ckstore.store.parts import Parts
from ckstore.store.tier_copy import StoreCopy
from ckstore.store.tier_marks import Named

Checkpoint = tuple[str, int]
"""Run and seq."""


class _Pairs:
    """The checkpoints of a store beside their copies in a tier."""

    def __init__(self, tier: str, named: Named, marker: Marker) -> None:
        self._tier = tier
        self.marker = marker
        self._dropped = {(run, seq) for run, seqs in named.look.dropped.items() for seq in seqs}
        self.home: dict[Checkpoint, Marked] = {}
        """For each checkpoint, its manifest here of the highest generation."""
        for name in sorted(named.look.manifests):
            self.home[name.run, name.seq] = named.look.manifests[name]

    def follower(self, name: ManifestName) -> Marked | None:
        """Return what is here in place of a copy there: a form as late or later, all of which lies in the tier."""
        marked = self.home.get((name.run, name.seq))
        if marked is None or (name.run, name.seq) in self._dropped or marked.name.generation < name.generation:
            return None
        return marked if all(ref.tier == self._tier for ref in self.marker.packs_of(marked)) else None


def outdated_copies(tier: str, named: Named, marker: Marker) -> list[tuple[Marked, ManifestName]]:
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
    parts: Parts,
    tier: str,
    named: Named,
    marker: Marker,
    stored: Mapping[PackId, int],
    are_ours: Callable[[Iterable[ManifestName]], bool],
    limits: GcLimits,
) -> list[PackRewrite]:
    """Choose the packs of a tier that are worth rewriting.

    Args:
        parts: The store whose tier it is.
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
    from ckstore.store.gc_waste import count_frames

    pairs, refs = _Pairs(tier, named, marker), marker.numbers.refs
    current = list(pairs.home.values())
    barred = named.held | _barred_here(parts, tier, named, pairs, stored)
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
        return not _lies_here(parts, pack_id) and are_ours(naming.get(pack_id, ()))

    # Each manifest is written here, and there.
    return list(worthwhile_rewrites(uses, marker, staying, limits, manifest_copies=2, may_rewrite=may_rewrite))


def _barred_here(
    parts: Parts, tier: str, named: Named, pairs: _Pairs, stored: Mapping[PackId, int]
) -> frozenset[PackId]:
    """Return the packs of manifests here that cannot be replaced, or that would still name them after that."""
    marker, barred = pairs.marker, set[PackId]()
    wanted = {ref for marked in named.look.manifests.values() for ref in marker.packs_of(marked)}
    missing = missing_packs(parts, wanted)
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


def _lies_here(parts: Parts, pack_id: PackId) -> bool:
    """Whether a pack lies here too: what frees it looks for it in the tier, by the manifests that say so."""
    return any(parts.backend.stat(path) is not None for path in parts.trash.paths_of(pack_id))


def renew_copies(
    parts: Parts, target: Backend, outdated: Iterable[tuple[Marked, ManifestName]], troubles: list[str]
) -> int:
    """Put manifests to a tier whose copies there name other packs; return how many; what cannot be is told.

    Raises:
        CapacityError: The place is full.
        BackendError: It does not answer.
    """
    count = 0
    for marked, copy in outdated:
        name = marked.name
        run = parts.of_run(name.run)
        try:
            manifest = run.manifests.load(name)
            if run.lost_packs(manifest.packs):
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
