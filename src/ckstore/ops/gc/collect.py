"""The story of a collection: survey, plan, and then act, step by step as docs/FORMAT.md section 10 says.

rescue -> purge expired trash -> drop -> finish what others began -> mark -> mark again -> trash -> purge -> repack, and
free what that leaves.

A writer writes the manifest and then reads the pack's place; a collector moves the pack and then reads the manifests.
One of the two must see the other. ``testing/gc_model.py`` searches every interleaving of both.

Invariants:
- A pack is moved only if no manifest named it in a look that began after everything before was done; it is unlinked
  only by its path in the trash, and only if no manifest named it in a look that began after it lay there.
- No step waits for a writer, and every step can be done again by another collector after a crash.
- No checkpoint is dropped and no pack is moved that the plan does not name.

Collect a store that lies in a bucket: manifests go to the trash as elsewhere, packs are removed where they lie.

A bucket has no atomic rename, so a pack cannot be taken away from a writer and given back. Instead the collector
writes down what it is about to remove, then looks at all manifests: see ``doomed``. What manifests in the trash name
stays, so that what was dropped can be brought back as long as it lies there. A pack of which much is needed by nobody
is rewritten as elsewhere, and goes when the manifests that named it have left the trash.

Invariants:
- No pack is removed that a manifest in place, in the trash or in quarantine names in a look that began after the list
  of what goes was there.
- Nothing is collected where another store has pushed: its manifests are not here.

Empty folders of the trash: look at everything once more, bring back what is needed, unlink the rest.

Invariants:
- What is unlinked lay in the trash before the look began in which no manifest named it.
- All of the trash is judged, whichever folders are to be emptied: what supersedes a manifest may lie in another one.
- A manifest that is brought back names packs: what is needed is looked for anew after that.
- A pack that manifests say is in a tier is unlinked only when it was just seen there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ckstore.errors import CkstoreError, CorruptError
from ckstore.format import paths
from ckstore.format.paths import ManifestName
from ckstore.hashing import PackId
from ckstore.io.backend import Distant, map_concurrent
from ckstore.ops.gc.plan import GcLimits, GcPlan, is_expired
from ckstore.ops.gc.rewrite_packs import Repacked, repack
from ckstore.ops.gc.survey import missing_in, named_in_trash, strays_among
from ckstore.store.history import drop
from ckstore.store.pending_deletes import remove_dead_lists, remove_packs
from ckstore.store.reachability import Marker, MarkResult
from ckstore.store.repository import Repository, finish_interrupted_replacements
from ckstore.store.tags import intents_in, remove_abandoned
from ckstore.store.tier_checks import Unproven, unproven_packs
from ckstore.store.trash import TrashedPack, TrashFolder

_log = logging.getLogger("ckstore")

_ROUNDS = 3
"""Looks until nothing is left to be brought back; others do the same at the same time."""


@dataclass(slots=True)
class Purged:
    """What emptying trash folders came to.

    Attributes:
        look: What manifests name; where one of them cannot be read, nothing was removed.
        files: Files that were unlinked.
        nbytes: Bytes of these.
        rescued: Files that were brought back.
        unproven: Packs that stay although no manifest names them here: their tier could not be seen to have them.
    """

    look: MarkResult
    files: int = 0
    nbytes: int = 0
    rescued: int = 0
    unproven: dict[PackId, Unproven] = field(default_factory=dict)
    stop: str = ""
    """Why nothing was removed although everything could be read: a manifest is missing."""


def purge(
    repository: Repository, marker: Marker, gc_ids: Collection[str], waits: Mapping[str, str] = MappingProxyType({})
) -> Purged:
    """Unlink what is in these trash folders, but for what manifests need or what nothing supersedes: that goes back.

    Args:
        repository: The store.
        marker: Looks at all manifests.
        gc_ids: The folders.
        waits: Tiers that are known not to answer, and what they said.
    """
    done, trash = Purged(MarkResult({}, (), {}, (), frozenset())), repository.trash
    for _ in range(_ROUNDS):
        contents = trash.contents()
        done.look = marker.mark()
        strays = () if done.look.unreadable else tuple(strays_among(contents, done.look))
        if not strays:
            break
        done.rescued += sum(trash.put_back(stray.path, stray.name.path) for stray in strays)
    if done.look.unreadable or strays:
        return done
    done.stop = next(iter(missing_in(repository, done.look).values()), "")
    if done.stop:
        return done
    _unlink([folder for folder in contents if folder.gc_id in gc_ids], repository, marker, waits, done)
    return done


def _unlink(
    folders: Collection[TrashFolder], repository: Repository, marker: Marker, waits: Mapping[str, str], done: Purged
) -> None:
    trash, look = repository.trash, done.look
    packs = [pack for folder in folders for pack in folder.packs]
    unnamed = {pack.pack_id for pack in packs if not look.is_named(pack.pack_id)}
    done.unproven = unproven_packs(repository, marker, look.manifests.values(), unnamed, waits)
    unlinked: list[str] = []
    manifests = [manifest for folder in folders for manifest in folder.manifests]
    unlinks = map_concurrent(repository.backend, lambda manifest: trash.unlink(manifest.path), manifests)
    for manifest, is_unlinked in zip(manifests, unlinks, strict=True):
        if is_unlinked:
            unlinked.append(manifest.path)
            done.nbytes += manifest.nbytes
    for pack in packs:
        unproven = done.unproven.get(pack.pack_id)
        if unproven is not None and not unproven.is_damage:
            # Its tier may answer the next time; until then nothing is known.
            continue
        if (unproven is not None or pack.pack_id not in unnamed) and not _is_second_name(repository, pack, done):
            continue
        if trash.unlink(pack.path):
            unlinked.append(pack.path)
            done.nbytes += pack.nbytes
    done.files = len(unlinked)
    try:
        trash.sync(unlinked)
    except CkstoreError as error:
        # They may come back after a power cut; the next collection removes them again.
        _log.warning("the removal of %d files from the trash may not be durable: %s", len(unlinked), error)


def _is_second_name(repository: Repository, pack: TrashedPack, done: Purged) -> bool:
    """Bring back a pack that is needed; return whether it lay in place already, so that this name is one too many."""
    if repository.trash.put_back(pack.path, paths.pack_name(pack.pack_id)):
        done.rescued += 1
        return False
    info = repository.backend.stat(paths.pack_name(pack.pack_id))
    # Else another has taken it in hand, or what is in place is damaged: this may be the only one.
    return info is not None and info.nbytes == pack.nbytes


Tell = Callable[[int, int], None]


@dataclass(slots=True)
class GcDone:
    """What a collection did.

    Attributes:
        dropped: Checkpoints that retention let go.
        spared: Checkpoints that were to go and stay, and why.
        rescued: Packs and manifests that were brought back from the trash.
        superseded: Lower generations, and manifests of dropped checkpoints, that were moved to the trash.
        moved_packs: Packs that were moved to the trash.
        moved_nbytes: Bytes of these.
        freed_files: Packs and manifests that were removed from the trash.
        freed_nbytes: Bytes of these.
        repacked: What rewriting packs came to.
        drafts: Files that were removed from ``tmp``.
        intents: Intents of dead makers that were removed.
        waits_for: Intents that stay because their makers cannot be judged from here, in words.
        unproven: Packs that were about to go, and stay: the tier that manifests name could not be seen to have them.
        waits: Tiers that do not answer, and what they said; what depends on them was left as it is.
        stop: Why packs were left alone; empty where nothing spoke against it.
    """

    dropped: list[ManifestName] = field(default_factory=list)
    spared: dict[ManifestName, str] = field(default_factory=dict)
    rescued: int = 0
    superseded: int = 0
    moved_packs: int = 0
    moved_nbytes: int = 0
    freed_files: int = 0
    freed_nbytes: int = 0
    repacked: Repacked = field(default_factory=Repacked)
    drafts: int = 0
    intents: int = 0
    waits_for: list[str] = field(default_factory=list)
    unproven: dict[PackId, Unproven] = field(default_factory=dict)
    waits: dict[str, str] = field(default_factory=dict)
    stop: str = ""


def collect(
    repository: Repository,
    marker: Marker,
    plan: GcPlan,
    limits: GcLimits,
    purpose: str,
    tell: Tell = lambda done, total: None,
) -> GcDone:
    """Carry out a plan.

    Args:
        repository: The store.
        marker: The one that the plan was made with.
        plan: What to do.
        limits: Ages and budgets.
        purpose: Why checkpoints are dropped, for people who find an intent.
        tell: Called with steps done and steps in all.

    Raises:
        CorruptError: A tag became unreadable meanwhile.
        CapacityError: The disk is full.
        BackendError: The medium failed. Whatever is raised, the next collection goes on from there.
    """
    return Collector(repository, marker, plan, limits, tell).run(purpose)


class Collector:
    """Carries out one plan."""

    def __init__(self, repository: Repository, marker: Marker, plan: GcPlan, limits: GcLimits, tell: Tell) -> None:
        self._repository = repository
        self._marker = marker
        self._plan = plan
        self._limits = limits
        self._tell = tell
        self._steps = len(plan.drops) + len(plan.rewrites) + len({n for r in plan.rewrites for n in r.manifests}) + 2
        self._step = 0
        self.done = GcDone(stop=plan.stop)
        for unproven in plan.unproven:
            self._keep(unproven)

    def run(self, purpose: str) -> GcDone:
        """Do it all."""
        self._remove_intents()
        self._rescue()
        if not self.done.stop:
            self._purge(self._plan.purges)
        self._told()
        self._drop(purpose)
        self._finish_what_others_began()
        plan = self._plan
        self._free({move.pack_id: move.nbytes for move in plan.moves})
        if plan.rewrites and not self.done.stop:
            # Last, so that on a full disk there is room for it.
            self.done.repacked = repack(self._repository, self._marker, plan.rewrites, self._told)
            self._free({rewrite.pack_id: rewrite.nbytes for rewrite in plan.rewrites}, is_proven=False)
        self._remove_leftovers()
        self._told()
        damaged = [each for each in self.done.unproven.values() if each.is_damage]
        if damaged:
            words = "%d packs stay here, since the tier %r does not have what was pushed there: %s"
            _log.error(words, len(damaged), damaged[0].tier, damaged[0].problem)
        return self.done

    def _told(self, count: int = 1) -> None:
        self._step = min(self._steps, self._step + count)
        self._tell(self._step, self._steps)

    def _remove_intents(self) -> None:
        """Remove intents of dead makers before anything is dropped, and note those that nobody can judge here."""
        backend, clock = self._repository.backend, self._repository.clock
        for run in self._repository.runs():
            self.done.intents += remove_abandoned(backend, clock, run, everyone=self._limits.clears_intents)
            unknown = [intent for intent in intents_in(backend, clock, run) if not intent.is_known]
            self.done.waits_for += [f"run {run}, seq {intent.seq}: {intent.words}" for intent in unknown]

    def _rescue(self) -> None:
        """Step 0: bring back what manifests name, and manifests that nothing supersedes."""
        trash, backend = self._repository.trash, self._repository.backend
        for pack_id in self._plan.rescues:
            self.done.rescued += trash.rescue_pack(pack_id)
        for trashed in self._plan.put_back:
            self.done.rescued += trash.put_back(trashed.path, trashed.name.path)
        gone = [pack_id for pack_id in self._plan.rescues if backend.stat(paths.pack_name(pack_id)) is None]
        if gone:
            # Another collector has freed it: what names it was published too late, and will be withdrawn or stay
            # torn. It was taken for whole, and what is older must not go for its sake.
            why = f"pack {gone[0].hex()} was freed before it was brought back"
            self.done.spared = dict.fromkeys(self._plan.drops, why)

    def _drop(self, purpose: str) -> None:
        """Step 1: drop what retention lets go, after making durable what stays for it."""
        drops = [name for name in self._plan.drops if name not in self.done.spared]
        for run in sorted({name.run for name in drops}):
            names = [name for name in drops if name.run == run]
            repository = self._repository.for_run(run)
            going = {name.seq for name in names}
            # Before acting on what is seen: else what is kept might be in the page cache only.
            for name in repository.manifests.listing().names:
                if name.seq not in going and not isinstance(repository.backend, Distant):
                    try:
                        repository.backend.sync_file(name.path)
                    except FileNotFoundError:
                        # Replaced meanwhile, by one that is durable.
                        continue
            repository.backend.sync_folder(paths.manifests_folder(run))
            dropped = drop(repository, names, purpose)
            self._told(len(names))
            self.done.dropped += dropped.names
            self.done.spared |= dropped.spared

    def _finish_what_others_began(self) -> None:
        """Step 1: move what is marked or superseded, and still in place."""
        for run in sorted({name.run for name in self._plan.unfinished}):
            seqs = frozenset(name.seq for name in self._plan.unfinished if name.run == run)
            manifests = self._repository.for_run(run).manifests
            # The mark may have been made by a process that died before its sync.
            self._repository.backend.sync_folder(paths.claims_folder(run))
            self.done.superseded += manifests.move_to_trash(seqs)
        for run in sorted({name.run for name in self._plan.superseded}):
            self.done.superseded += finish_interrupted_replacements(self._repository.for_run(run), self.done.waits)

    def _keep(self, unproven: Unproven) -> None:
        """Tell of a pack that stays because it could not be seen in its tier."""
        self.done.unproven[unproven.pack_id] = unproven
        if not unproven.is_damage:
            self.done.waits.setdefault(unproven.tier, unproven.problem)

    def _free(self, planned: dict[PackId, int], *, is_proven: bool = True) -> None:
        """Steps 2 to 6: move what nobody names to the trash; where it is to be freed at once, list again and unlink."""
        if not self.done.stop:
            self._trash_packs(planned, is_proven=is_proven)
        if self._limits.frees_at_once and not self.done.stop:
            self._purge(self._repository.trash.contents())

    def _trash_packs(self, planned: dict[PackId, int], *, is_proven: bool) -> None:
        """Steps 2 to 4: mark, list again, and move to a fresh folder of the trash what nobody names."""
        candidates = self._unnamed(sorted(planned), self._marker.mark()) if planned else []
        look = self._marker.mark() if candidates else None
        candidates = self._unnamed(candidates, look) if look else []
        if candidates and look and not is_proven:
            manifests = look.manifests.values()
            found = unproven_packs(self._repository, self._marker, manifests, candidates, self.done.waits)
            for unproven in found.values():
                self._keep(unproven)
            candidates = [pack_id for pack_id in candidates if pack_id not in found]
        if not candidates:
            return
        moved = self._repository.trash.move_packs(candidates, self._repository.trash.new_packs_folder())
        self.done.moved_packs += len(moved)
        self.done.moved_nbytes += sum(planned[pack_id] for pack_id in moved)

    def _unnamed(self, pack_ids: Iterable[PackId], look: MarkResult) -> list[PackId]:
        if self._stops(look):
            return []
        return [pack_id for pack_id in pack_ids if not look.is_named(pack_id)]

    def _stops(self, look: MarkResult) -> bool:
        if look.unreadable and not self.done.stop:
            first = look.unreadable[0]
            where = self._repository.backend.location_of(first.path)
            self.done.stop = f"{where} cannot be read and may name any pack: {first.problem}"
        self.done.stop = self.done.stop or next(iter(missing_in(self._repository, look).values()), "")
        return bool(self.done.stop)

    def _purge(self, folders: Sequence[TrashFolder]) -> None:
        """Steps 5 and 6, for folders whose time is over."""
        now_ns = self._repository.clock.now_ns()
        folders = [folder for folder in folders if is_expired(folder, now_ns, self._limits)]
        if not any(folder.packs or folder.manifests for folder in folders):
            self._remove_empty(folders)
            return
        purged = purge(self._repository, self._marker, {folder.gc_id for folder in folders}, self.done.waits)
        if self._stops(purged.look):
            return
        self.done.rescued += purged.rescued
        self.done.freed_files += purged.files
        self.done.freed_nbytes += purged.nbytes
        for unproven in purged.unproven.values():
            self._keep(unproven)
        self._remove_empty(folders)

    def _remove_empty(self, folders: Iterable[TrashFolder]) -> None:
        now_ns, min_age_ns = self._repository.clock.now_ns(), int(self._limits.min_age_seconds * 1e9)
        for folder in folders:
            age_ns = folder.age_ns(now_ns)
            # Whoever has made it a moment ago may be about to fill it.
            if age_ns is None or age_ns >= max(min_age_ns, _FOLDER_AGE_NS_MIN):
                self._repository.trash.remove_if_empty(folder.gc_id)

    def _remove_leftovers(self) -> None:
        for draft in self._plan.drafts:
            self.done.drafts += self._repository.trash.unlink(draft.path)


_FOLDER_AGE_NS_MIN = 60 * 10**9


def collect_far(
    repository: Repository,
    marker: Marker,
    plan: GcPlan,
    limits: GcLimits,
    purpose: str,
    tell: Tell = lambda done, total: None,
) -> GcDone:
    """Carry out a plan in a bucket; the arguments are those of ``gc.collect``.

    Raises:
        CorruptError: A tag became unreadable meanwhile.
        BackendError: The server does not answer. Whatever is raised, the next collection goes on from there.
    """
    remove_dead_lists(repository.backend, repository.clock)
    return _FarCollector(repository, marker, plan, limits, tell).run(purpose)


class _FarCollector(Collector):
    """Carries out one plan where nothing can be renamed."""

    def _free(self, planned: dict[PackId, int], *, is_proven: bool = True) -> None:
        if self._limits.frees_at_once and not self.done.stop:
            # Manifests before packs: what they name goes only when they have gone.
            self._purge(self._repository.trash.contents())
        if not is_proven and not self._limits.frees_at_once:
            # Manifests in the trash name these yet.
            return
        if planned and not is_proven and not self.done.stop:
            planned = self._proven(planned)
        if planned and not self.done.stop:
            removed = remove_packs(
                self._repository.backend, self._repository.clock, planned, lambda: self._named(planned)
            )
            self.done.freed_files += len(removed.packs)
            self.done.freed_nbytes += sum(removed.packs.values())
            self.done.stop = removed.stop

    def _proven(self, planned: dict[PackId, int]) -> dict[PackId, int]:
        """Leave out what manifests say is in a tier, and was not seen there just now."""
        manifests = self._marker.mark().manifests.values()
        found = unproven_packs(self._repository, self._marker, manifests, planned, self.done.waits)
        for unproven in found.values():
            self._keep(unproven)
        return {pack_id: nbytes for pack_id, nbytes in planned.items() if pack_id not in found}

    def _named(self, planned: dict[PackId, int]) -> set[PackId]:
        """Return what anything names: what is moved from its place to the trash meanwhile is seen in one of both."""
        before = self._repository.trash.contents()
        look = self._marker.mark()
        if look.unreadable:
            first = look.unreadable[0]
            raise CorruptError(f"a manifest cannot be read and may name any pack: {first.problem}", where=first.path)
        for sentence in missing_in(self._repository, look).values():
            raise CorruptError(sentence, where=self._repository.backend.root)
        named = {pack_id for pack_id in planned if look.is_named(pack_id)}
        for trash in (before, self._repository.trash.contents()):
            named = named.union(*named_in_trash(self._repository, self._marker, trash).values())
        return named
