"""Carry out the plan of a collection, in the steps of docs/FORMAT.md section 10 (Collect).

Rescue, purge expired trash, delete checkpoints, finish interrupted deletions, mark, mark again, move to the trash,
purge, rewrite packs, and free the old packs.

A writer writes its manifest and then looks for the pack. A collector moves the pack and then reads the manifests. So
one of the two always sees the other. ``tests/support/gc_model.py`` searches every interleaving of both.

Invariants:
- A pack is moved only if no manifest named it in a mark pass that began after all earlier steps were done.
- A pack is unlinked only by its path in the trash, and only if no manifest named it in a mark pass that began after it
  was there.
- No step waits for a writer. After a crash, another collector can repeat every step.
- No checkpoint is deleted and no pack is moved that the plan does not name.

Purging a trash folder reads all manifests again, puts back what is needed, and unlinks the rest:
- Every unlinked file was in the trash before the mark pass began in which no manifest named it.
- All of the trash is read, whichever folders are purged: another folder may contain what supersedes a manifest.
- After a manifest was put back, manifests are read again, since it names packs.
- A pack that manifests locate in a tier is unlinked only after it was just seen there.

In a bucket, manifests go to the trash, but packs are removed in place: a bucket has no atomic rename, so a pack cannot
be taken from a writer and put back. The collector first publishes the list of packs to remove, then reads all manifests
(``store/pending_deletes.py``):
- A pack is removed only if no manifest in place, in the trash or in quarantine named it in a mark pass that began after
  that list was visible.
- A bucket to which another store has pushed is not collected, because that store's manifests are not visible here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ckstore.display import repr_of_summary
from ckstore.errors import CkstoreError, CorruptError, counted
from ckstore.format import paths
from ckstore.format.paths import ManifestName
from ckstore.hashing import PackId
from ckstore.io.backend import Distant, map_concurrent
from ckstore.ops.gc.journals import trash_segments
from ckstore.ops.gc.plan import GcLimits, GcPlan, is_expired
from ckstore.ops.gc.rewrite_packs import Repacked, rewrite_packs
from ckstore.ops.gc.survey import missing_in, named_in_trash, strays_among
from ckstore.store.history import drop
from ckstore.store.journal_needs import put_back_continued
from ckstore.store.pending_deletes import remove_dead_lists, remove_packs
from ckstore.store.reachability import Marker, MarkResult
from ckstore.store.repository import Repository, finish_interrupted_replacements
from ckstore.store.tags import intents_in, remove_abandoned
from ckstore.store.tier_checks import Unproven, unproven_packs
from ckstore.store.trash import TrashedManifest, TrashedPack, TrashedSegment, TrashFolder

_log = logging.getLogger("ckstore")

OnProgress = Callable[[int, int], None]


@dataclass(slots=True)
class GcDone:
    """What a collection did.

    Attributes:
        dropped: Checkpoints that were deleted because no retention rule keeps them.
        spared: Checkpoints that should have been deleted but stay, and why.
        rescued: Number of packs and manifests put back from the trash.
        superseded: Number of superseded or deleted manifests moved to the trash.
        moved_packs: Number of packs moved to the trash.
        moved_nbytes: Bytes of these packs.
        freed_files: Number of packs and manifests removed from the trash.
        freed_nbytes: Bytes of these files.
        repacked: What rewriting packs did.
        drafts: Number of files removed from ``tmp``.
        intents: Number of removed intents of dead processes.
        waits_for: Sentences on intents that stay because it is unknown whether their process is alive.
        unproven: Packs that stay because their tier could not be seen to contain them.
        waits: Tiers that do not answer, each with its error. What depends on them was left unchanged.
        stop: Why packs were left in place; empty if they were not.
        moved_segments: Number of segments of journals moved to the trash.
        moved_segments_nbytes: Bytes of these segments.
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
    moved_segments: int = 0
    moved_segments_nbytes: int = 0

    __repr__ = repr_of_summary


def collect(
    repository: Repository,
    marker: Marker,
    plan: GcPlan,
    limits: GcLimits,
    purpose: str,
    on_progress: OnProgress = lambda done, total: None,
) -> GcDone:
    """Carry out a plan.

    Args:
        repository: The store.
        marker: The marker that the plan was made with.
        plan: What to do.
        limits: Ages and budgets.
        purpose: Why checkpoints are deleted; written into intents.
        on_progress: Called with the number of steps done and the total.

    Raises:
        CorruptError: A tag became unreadable meanwhile.
        CapacityError: The disk is full.
        BackendError: The storage failed. After any error, the next collection continues from there.
    """
    return Collector(repository, marker, plan, limits, on_progress).run(purpose)


def collect_bucket(
    repository: Repository,
    marker: Marker,
    plan: GcPlan,
    limits: GcLimits,
    purpose: str,
    on_progress: OnProgress = lambda done, total: None,
) -> GcDone:
    """Carry out a plan in a bucket. The arguments are those of ``collect``.

    Raises:
        CorruptError: A tag became unreadable meanwhile.
        BackendError: The server does not answer. After any error, the next collection continues from there.
    """
    remove_dead_lists(repository.backend, repository.clock)
    return _BucketCollector(repository, marker, plan, limits, on_progress).run(purpose)


class Collector:
    """Carry out one plan."""

    def __init__(
        self, repository: Repository, marker: Marker, plan: GcPlan, limits: GcLimits, on_progress: OnProgress
    ) -> None:
        self._repository = repository
        self._marker = marker
        self._plan = plan
        self._limits = limits
        self._on_progress = on_progress
        self._steps = len(plan.drops) + len(plan.rewrites) + len({n for r in plan.rewrites for n in r.manifests}) + 2
        self._step = 0
        self.done = GcDone(stop=plan.stop)
        for unproven in plan.unproven:
            self._record_unproven(unproven)

    def run(self, purpose: str) -> GcDone:
        """Carry out every step, and return what was done."""
        self._remove_intents()
        self._rescue()
        if not self.done.stop:
            self._purge(self._plan.purges)
        self._count_steps()
        self._drop(purpose)
        self._finish_interrupted_deletions()
        plan = self._plan
        self._trash_segments()
        self._free({move.pack_id: move.nbytes for move in plan.moves})
        if plan.rewrites and not self.done.stop:
            # Rewrite last: on a full disk, the steps above have made room.
            self.done.repacked = rewrite_packs(self._repository, self._marker, plan.rewrites, self._count_steps)
            self._free({rewrite.pack_id: rewrite.nbytes for rewrite in plan.rewrites}, is_proven=False)
        self._remove_leftovers()
        self._count_steps()
        damaged = [each for each in self.done.unproven.values() if each.is_damage]
        if damaged:
            words = "kept %s here, because the tier %r lacks what was pushed to it: %s"
            _log.error(words, counted(len(damaged), "pack"), damaged[0].tier, damaged[0].problem)
        return self.done

    def _count_steps(self, count: int = 1) -> None:
        self._step = min(self._steps, self._step + count)
        self._on_progress(self._step, self._steps)

    def _remove_intents(self) -> None:
        """Remove intents of dead processes before deleting checkpoints, and record those of unknown processes."""
        backend, clock = self._repository.backend, self._repository.clock
        for run in self._repository.runs():
            self.done.intents += remove_abandoned(backend, clock, run, everyone=self._limits.clears_intents)
            unknown = [intent for intent in intents_in(backend, clock, run) if not intent.is_known]
            self.done.waits_for += [f"run {run}, seq {intent.seq}: {intent.words}" for intent in unknown]

    def _rescue(self) -> None:
        """Step 0: put back packs that manifests name, and manifests that nothing supersedes."""
        trash, backend = self._repository.trash, self._repository.backend
        for pack_id in self._plan.rescues:
            self.done.rescued += trash.rescue_pack(pack_id)
        for trashed in self._plan.put_back:
            self.done.rescued += trash.put_back(trashed.path, trashed.name.path)
        self.done.rescued += _put_back_segments(self._repository, trash.contents())
        gone = [pack_id for pack_id in self._plan.rescues if backend.stat(paths.pack_name(pack_id)) is None]
        if gone:
            # Another collector has freed the pack. Its manifest was published too late, and will be withdrawn or stay
            # incomplete. The rules counted that checkpoint as complete, so nothing may be deleted in favour of it.
            why = f"pack {gone[0].hex()} was freed before it could be put back"
            self.done.spared = dict.fromkeys(self._plan.drops, why)

    def _drop(self, purpose: str) -> None:
        """Step 1: delete checkpoints that no rule keeps, after making durable those that stay."""
        drops = [name for name in self._plan.drops if name not in self.done.spared]
        for run in sorted({name.run for name in drops}):
            names = [name for name in drops if name.run == run]
            repository = self._repository.for_run(run)
            dropped_seqs = {name.seq for name in names}
            # Sync the manifests that stay before deleting others: they may be in the page cache only.
            for name in repository.manifests.listing().names:
                if name.seq not in dropped_seqs and not isinstance(repository.backend, Distant):
                    try:
                        repository.backend.sync_file(name.path)
                    except FileNotFoundError:
                        # It was replaced meanwhile, by a manifest that is durable.
                        continue
            repository.backend.sync_folder(paths.manifests_folder(run))
            dropped = drop(repository, names, purpose)
            self._count_steps(len(names))
            self.done.dropped += dropped.names
            self.done.spared |= dropped.spared

    def _finish_interrupted_deletions(self) -> None:
        """Step 1: move manifests that are marked or superseded but still in place."""
        for run in sorted({name.run for name in self._plan.unfinished}):
            seqs = frozenset(name.seq for name in self._plan.unfinished if name.run == run)
            manifests = self._repository.for_run(run).manifests
            # The process that made the mark may have died before it synced it.
            self._repository.backend.sync_folder(paths.claims_folder(run))
            self.done.superseded += manifests.move_to_trash(seqs)
        for run in sorted({name.run for name in self._plan.superseded}):
            self.done.superseded += finish_interrupted_replacements(self._repository.for_run(run), self.done.waits)

    def _trash_segments(self) -> None:
        """Move segments of journals whose keyframes are gone (section 14, Collect)."""
        moved, put_back = trash_segments(self._repository, self._plan.segments, self._limits.min_age_seconds)
        self.done.moved_segments += len(moved)
        self.done.moved_segments_nbytes += sum(move.nbytes for move in moved)
        self.done.rescued += put_back

    def _record_unproven(self, unproven: Unproven) -> None:
        """Record a pack that stays because it could not be seen in its tier."""
        self.done.unproven[unproven.pack_id] = unproven
        if not unproven.is_damage:
            self.done.waits.setdefault(unproven.tier, unproven.problem)

    def _free(self, planned: dict[PackId, int], *, is_proven: bool = True) -> None:
        """Steps 2 to 6: move unreferenced packs to the trash and, if this collection frees immediately, purge it.

        With ``is_proven``, the plan has already checked that other copies are in their tiers.
        """
        if not self.done.stop:
            self._trash_packs(planned, is_proven=is_proven)
        if self._limits.frees_immediately and not self.done.stop:
            self._purge(self._repository.trash.contents())

    def _trash_packs(self, planned: dict[PackId, int], *, is_proven: bool) -> None:
        """Steps 2 to 4: read all manifests twice, then move packs that none names to a new trash folder."""
        candidates = self._unnamed(sorted(planned), self._marker.mark()) if planned else []
        marks = self._marker.mark() if candidates else None
        candidates = self._unnamed(candidates, marks) if marks else []
        if candidates and marks and not is_proven:
            manifests = marks.manifests.values()
            found = unproven_packs(self._repository, self._marker, manifests, candidates, self.done.waits)
            for unproven in found.values():
                self._record_unproven(unproven)
            candidates = [pack_id for pack_id in candidates if pack_id not in found]
        if not candidates:
            return
        moved = self._repository.trash.move_packs(candidates, self._repository.trash.new_packs_folder())
        self.done.moved_packs += len(moved)
        self.done.moved_nbytes += sum(planned[pack_id] for pack_id in moved)

    def _unnamed(self, pack_ids: Iterable[PackId], marks: MarkResult) -> list[PackId]:
        if self._must_stop(marks):
            return []
        return [pack_id for pack_id in pack_ids if not marks.is_named(pack_id)]

    def _must_stop(self, marks: MarkResult) -> bool:
        if marks.unreadable and not self.done.stop:
            first = marks.unreadable[0]
            where = self._repository.backend.location_of(first.path)
            self.done.stop = f"{where} cannot be read and may name any pack: {first.problem}"
        self.done.stop = self.done.stop or next(iter(missing_in(self._repository, marks).values()), "")
        return bool(self.done.stop)

    def _purge(self, folders: Sequence[TrashFolder]) -> None:
        """Steps 5 and 6, for folders whose retention time is over."""
        now_ns = self._repository.clock.now_ns()
        folders = [folder for folder in folders if is_expired(folder, now_ns, self._limits)]
        if all(folder.is_empty for folder in folders):
            self._remove_empty(folders)
            return
        purged = purge(self._repository, self._marker, {folder.gc_id for folder in folders}, self.done.waits)
        if self._must_stop(purged.marks):
            return
        self.done.rescued += purged.rescued
        self.done.freed_files += purged.files
        self.done.freed_nbytes += purged.nbytes
        for unproven in purged.unproven.values():
            self._record_unproven(unproven)
        self._remove_empty(folders)

    def _remove_empty(self, folders: Iterable[TrashFolder]) -> None:
        now_ns, min_age_ns = self._repository.clock.now_ns(), int(self._limits.min_age_seconds * 1e9)
        for folder in folders:
            age_ns = folder.age_ns(now_ns)
            # A collector that has just made this folder may be about to fill it.
            if age_ns is None or age_ns >= max(min_age_ns, _FOLDER_AGE_NS_MIN):
                self._repository.trash.remove_if_empty(folder.gc_id)

    def _remove_leftovers(self) -> None:
        for draft in self._plan.drafts:
            self.done.drafts += self._repository.trash.unlink(draft.path)


_FOLDER_AGE_NS_MIN = 60 * 10**9


class _BucketCollector(Collector):
    """Carry out one plan in a bucket, where files cannot be renamed."""

    def _free(self, planned: dict[PackId, int], *, is_proven: bool = True) -> None:
        if self._limits.frees_immediately and not self.done.stop:
            # Remove manifests before packs: a pack may go only when no manifest in the trash names it.
            self._purge(self._repository.trash.contents())
        if not is_proven and not self._limits.frees_immediately:
            # Manifests in the trash still name these packs.
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
        """Leave out packs that manifests locate in a tier, unless they were just seen there."""
        manifests = self._marker.mark().manifests.values()
        found = unproven_packs(self._repository, self._marker, manifests, planned, self.done.waits)
        for unproven in found.values():
            self._record_unproven(unproven)
        return {pack_id: nbytes for pack_id, nbytes in planned.items() if pack_id not in found}

    def _named(self, planned: dict[PackId, int]) -> set[PackId]:
        """Return the packs that any manifest names.

        The trash is read before and after the manifests in place, so a manifest that is moved meanwhile is seen.
        """
        before = self._repository.trash.contents()
        marks = self._marker.mark()
        if marks.unreadable:
            first = marks.unreadable[0]
            raise CorruptError(f"a manifest cannot be read and may name any pack: {first.problem}", where=first.path)
        for sentence in missing_in(self._repository, marks).values():
            raise CorruptError(sentence, where=self._repository.backend.root)
        named = {pack_id for pack_id in planned if marks.is_named(pack_id)}
        for trash in (before, self._repository.trash.contents()):
            named = named.union(*named_in_trash(self._repository, self._marker, trash).values())
        return named


_ROUNDS = 3
"""How often the trash is read again for manifests to put back; other processes add to it meanwhile."""


@dataclass(slots=True)
class Purged:
    """What purging trash folders did.

    Attributes:
        marks: What manifests name. If one could not be read, nothing was removed.
        files: Number of unlinked files.
        nbytes: Bytes of these files.
        rescued: Number of files put back.
        unproven: Packs that stay because their tier could not be seen to contain them.
        stop: Why nothing was removed although all manifests were readable: one is missing.
    """

    marks: MarkResult
    files: int = 0
    nbytes: int = 0
    rescued: int = 0
    unproven: dict[PackId, Unproven] = field(default_factory=dict)
    stop: str = ""


def purge(
    repository: Repository, marker: Marker, gc_ids: Collection[str], waits: Mapping[str, str] = MappingProxyType({})
) -> Purged:
    """Unlink the files in these trash folders, except those that belong in place: these are put back.

    Args:
        repository: The store.
        marker: Reads all manifests.
        gc_ids: The folders to purge.
        waits: Tiers already known not to answer, each with its error.
    """
    done, trash = Purged(MarkResult({}, (), {}, (), frozenset())), repository.trash
    for _ in range(_ROUNDS):
        contents = trash.contents()
        done.marks = marker.mark()
        strays = () if done.marks.unreadable else tuple(strays_among(contents, done.marks))
        if not strays:
            break
        done.rescued += sum(trash.put_back(stray.path, stray.name.path) for stray in strays)
    if done.marks.unreadable or strays:
        return done
    done.stop = next(iter(missing_in(repository, done.marks).values()), "")
    if done.stop:
        return done
    put_back = _put_back_segments(repository, contents)
    done.rescued += put_back
    contents = trash.contents() if put_back else contents
    _unlink([folder for folder in contents if folder.gc_id in gc_ids], repository, marker, waits, done)
    return done


def _put_back_segments(repository: Repository, contents: Sequence[TrashFolder]) -> int:
    """Put back segments of journals that others in place continue; return how many."""
    runs = {segment.name.run for folder in contents for segment in folder.segments}
    return sum(put_back_continued(repository.for_run(run), contents) for run in sorted(runs))


def _unlink(
    folders: Collection[TrashFolder], repository: Repository, marker: Marker, waits: Mapping[str, str], done: Purged
) -> None:
    trash, marks = repository.trash, done.marks
    packs = [pack for folder in folders for pack in folder.packs]
    unnamed = {pack.pack_id for pack in packs if not marks.is_named(pack.pack_id)}
    done.unproven = unproven_packs(repository, marker, marks.manifests.values(), unnamed, waits)
    unlinked: list[str] = []
    files: list[TrashedManifest | TrashedSegment] = []
    for folder in folders:
        files += [*folder.manifests, *folder.segments]
    unlinks = map_concurrent(repository.backend, lambda file: trash.unlink(file.path), files)
    for file, is_unlinked in zip(files, unlinks, strict=True):
        if is_unlinked:
            unlinked.append(file.path)
            done.nbytes += file.nbytes
    for pack in packs:
        unproven = done.unproven.get(pack.pack_id)
        if unproven is not None and not unproven.is_damage:
            # The tier may answer the next time. Until then, keep the pack.
            continue
        if (unproven is not None or pack.pack_id not in unnamed) and not _is_surplus_copy(repository, pack, done):
            continue
        if trash.unlink(pack.path):
            unlinked.append(pack.path)
            done.nbytes += pack.nbytes
    done.files = len(unlinked)
    try:
        trash.sync(unlinked)
    except CkstoreError as error:
        # They may reappear after a power cut. The next collection removes them again.
        _log.warning("the removal of %d files from the trash may not be durable: %s", len(unlinked), error)


def _is_surplus_copy(repository: Repository, pack: TrashedPack, done: Purged) -> bool:
    """Put back a pack that is needed. Return whether a good copy is already in place, so that this one may go."""
    if repository.trash.put_back(pack.path, paths.pack_name(pack.pack_id)):
        done.rescued += 1
        return False
    info = repository.backend.stat(paths.pack_name(pack.pack_id))
    # Otherwise another process has moved it, or the copy in place is damaged and this may be the only good one.
    return info is not None and info.nbytes == pack.nbytes
