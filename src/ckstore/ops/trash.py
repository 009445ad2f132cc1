"""Verbs on the trash: list it, bring checkpoints back from it, and empty it.

Invariants:
- Emptying the trash never frees a pack that a manifest names, nor one that a tier should have but lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckstore.errors import ConflictError, CorruptError, NotFoundError, UsageError
from ckstore.io.backend import Distant
from ckstore.ops.gc.collect import purge
from ckstore.ops.gc.plan import GcLimits
from ckstore.ops.gc.run import collect_store, collector_lock
from ckstore.results import Info
from ckstore.store.history import bring_back, kind_in_trash
from ckstore.store.reachability import Marker
from ckstore.store.repository import Repository
from ckstore.store.tier_checks import require_proof
from ckstore.store.trash import TrashedManifest, TrashFolder


@dataclass(frozen=True, slots=True)
class TrashEntry:
    """One folder of the trash.

    Attributes:
        trash_id: Its name. A unique prefix is enough to refer to it.
        time_ns: When it was made, in nanoseconds since 1970; None if unknown.
        pack_count: Packs in it.
        nbytes: Bytes of all files in it.
        manifests: Run, seq, step and generation of each manifest in it.
        kinds: Why each manifest is there. ``"dropped"``: the checkpoint was deleted. Otherwise the checkpoint still
            exists in another form: it was ``"demoted"`` (this is the exact form), ``"made exact"``, ``"pushed"``,
            ``"pulled"``, ``"rewritten"`` or ``"replaced"``.
        segment_count: Segments of journals in it.
    """

    trash_id: str
    time_ns: int | None
    pack_count: int
    nbytes: int
    manifests: tuple[tuple[str, int, int, int], ...]
    kinds: tuple[str, ...] = ()
    segment_count: int = 0

    @classmethod
    def of(cls, folder: TrashFolder, kind_of: Callable[[TrashedManifest], str]) -> TrashEntry:
        """Describe a folder of the trash."""
        found = sorted(folder.manifests, key=lambda trashed: trashed.name)
        names = [trashed.name for trashed in found]
        manifests = tuple((name.run, name.seq, name.step, name.generation) for name in names)
        kinds = tuple(kind_of(trashed) for trashed in found)
        packs, segments = len(folder.packs), len(folder.segments)
        return cls(folder.gc_id, folder.made_ns, packs, folder.nbytes, manifests, kinds, segments)


@dataclass(frozen=True, slots=True)
class TrashRestored:
    """What was brought back from the trash.

    Attributes:
        packs: Packs that were moved back.
        undeleted: Checkpoints that had been deleted, as the new entries.
        superseded: Manifests left in the trash because a newer form of their checkpoint exists.
        troubles: What could not be brought back, and why.
        exact_again: Checkpoints that had been demoted and have their exact form again.
        segments: Segments of journals that were moved back.
    """

    packs: int
    undeleted: tuple[Info, ...]
    superseded: int
    troubles: tuple[str, ...]
    exact_again: tuple[Info, ...] = ()
    segments: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was brought back."""
        return not (self.packs or self.undeleted or self.exact_again or self.segments)


def list_trash(repository: Repository) -> list[TrashEntry]:
    """Return the folders of the trash that hold anything, oldest first."""

    def kind_of(trashed: TrashedManifest) -> str:
        return kind_in_trash(repository.for_run(trashed.name.run), trashed)

    folders = repository.trash.contents()
    return [TrashEntry.of(folder, kind_of) for folder in folders if not folder.is_empty]


def restore_from_trash(repository: Repository, trash_id: str) -> TrashRestored:
    """Bring back one folder of the trash; see ``Store.restore_from_trash``.

    Raises:
        NotFoundError: There is no such folder.
        UsageError: Several folders begin with ``trash_id``.
    """
    folder = _find_folder(repository, trash_id)
    packs = sum(repository.trash.rescue_pack(pack.pack_id) for pack in folder.packs)
    segments = sum(repository.trash.put_back(each.path, each.name.path) for each in folder.segments)
    undeleted: list[Info] = []
    exact_again: list[Info] = []
    superseded, troubles = 0, []
    # Sorted by generation: of each checkpoint, only the highest generation is brought back.
    found = sorted(folder.manifests, key=lambda trashed: trashed.name)
    for trashed in {(trashed.name.run, trashed.name.seq): trashed for trashed in found}.values():
        of_run = repository.for_run(trashed.name.run)
        kind = kind_in_trash(of_run, trashed)
        if kind not in ("dropped", "demoted"):
            superseded += 1
            continue
        try:
            info = Info.of(bring_back(of_run, trashed).header)
        except (NotFoundError, ConflictError, CorruptError) as error:
            troubles.append(f"seq {trashed.name.seq} of run {trashed.name.run}: {error}")
            continue
        (undeleted if kind == "dropped" else exact_again).append(info)
    return TrashRestored(packs, tuple(undeleted), superseded, tuple(troubles), tuple(exact_again), segments)


def purge_trash(repository: Repository, trash_id: str | None) -> int:
    """Free the whole trash or one folder of it, and return the bytes; see ``Store.purge``.

    Raises:
        ConflictError: A manifest is missing or cannot be read, and may name any pack. Nothing was freed.
        CorruptError: A tier lacks packs that manifests expect there. They were moved back; the rest was freed.
        LockHeldError: Another collection is running.
    """
    with collector_lock(repository.backend, repository.clock):
        chosen = repository.trash.folders() if trash_id is None else [_find_folder(repository, trash_id).gc_id]
        purged = purge(repository, Marker(repository), chosen)
    if purged.stop:
        raise ConflictError(purged.stop, where=repository.backend.root, todo="nothing was freed")
    unreadable = purged.marks.unreadable
    if unreadable:
        raise ConflictError(
            f"a manifest cannot be read, and may name any pack: {unreadable[0].problem}",
            where=repository.backend.location_of(unreadable[0].path),
            todo="nothing was freed; `ckstore verify` tells more",
        )
    require_proof(purged.unproven.values())
    if isinstance(repository.backend, Distant):
        # In a bucket, packs are never moved to the trash: delete those that only the trash named.
        report = collect_store(repository, None, runs=None, limits=GcLimits(), dry_run=False)
        return purged.nbytes + report.freed_nbytes
    return purged.nbytes


def _find_folder(repository: Repository, trash_id: str) -> TrashFolder:
    found = [gc_id for gc_id in repository.trash.folders() if gc_id.startswith(trash_id)] if trash_id else []
    if len(found) > 1:
        raise UsageError(f"{len(found)} folders of the trash begin with {trash_id!r}", todo="give more letters")
    if not found:
        raise NotFoundError(
            f"there is no folder {trash_id!r} in the trash",
            where=repository.backend.root,
            todo="`ckstore trash ls` shows what there is",
        )
    return repository.trash.read_folder(found[0])
