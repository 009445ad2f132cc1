"""Bring checkpoints of a run back from other tiers, the newest first.

For each checkpoint: copy its missing packs durably under draft names, check every byte, give them their names, then
publish the next generation of the manifest, which says that the packs are local. The copies in the tier stay. At last,
copy the segments of the journal with points of these checkpoints that are missing here.

Invariants:
- Every checkpoint can be restored at any time.
- A checkpoint that cannot be brought back does not stop the others. An error at the end names them all.
- A pack has its name here only after all its bytes are durable and were checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from ckstore.display import repr_of_summary
from ckstore.errors import CkstoreError, ConflictError, CorruptError, NotFoundError
from ckstore.format.manifest import Manifest, PackRef
from ckstore.format.paths import ManifestName
from ckstore.hashing import PackId
from ckstore.io.backend import ReadFile
from ckstore.store.chunk_index import LOCAL_TIER, LOST_TIER
from ckstore.store.journals import Journals
from ckstore.store.manifests import DroppedError
from ckstore.store.refs import Reference, load_whole, resolve
from ckstore.store.repository import Repository, finish_replacement
from ckstore.tiers.copy import PackCopy
from ckstore.tiers.segments import SegmentCopy, has_segments, segments_of, state_there
from ckstore.tiers.verify_copy import IncomingPackCheck, partial_copy_error

_TRIES = 5


@dataclass(frozen=True, slots=True)
class PullEntry:
    """One checkpoint with packs in other tiers.

    Attributes:
        seq: Commit number within the run.
        step: The trainer's step.
        tiers: The other tiers that held its packs.
        packs_nbytes: Bytes of its packs there; other checkpoints may share them.
        is_done: True if it is completely here now.
        problem: Why it could not be brought back; else empty.
    """

    seq: int
    step: int
    tiers: tuple[str, ...]
    packs_nbytes: int
    is_done: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PullReport:
    """Plan or result of a pull, the newest checkpoint first.

    Attributes:
        run: Name of the run.
        is_dry_run: True if nothing was changed.
        entries: Every requested checkpoint with packs in other tiers.
        bytes_to_pull: Bytes of these packs; a shared pack counts once.
        bytes_copied: Bytes of the packs that were copied.
        packs_copied: Number of packs that were copied.
        points_copied: Points of the journal that were missing here and were copied, or would be.
        journal_bytes_copied: Bytes of the segments that contain them.
    """

    run: str
    is_dry_run: bool
    entries: tuple[PullEntry, ...]
    bytes_to_pull: int
    bytes_copied: int
    packs_copied: int
    points_copied: int = 0
    journal_bytes_copied: int = 0

    __repr__ = repr_of_summary


def pull(
    repository: Repository,
    refs: Sequence[Reference] | None,
    *,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> PullReport:
    """Bring checkpoints of a run back from other tiers.

    Args:
        repository: The store.
        refs: References of the checkpoints; None: all of the run.
        dry_run: Only plan.
        on_progress: Called with the bytes of packs done, and in total.

    Raises:
        NotFoundError: No such checkpoint.
        UnreachableError: A checkpoint is in a tier that cannot be reached.
        CorruptError: A pack in the tier is not what was pushed, or a manifest here is damaged. These checkpoints are
            unchanged, all others are here. ``checkpoints`` names them, ``report`` is the whole result. Or a segment of
            the journal there is damaged: then everything else is here.
        CapacityError: The disk is full. Checkpoints brought back so far are here.
        BackendError: A server does not respond.
    """
    repository.require_same_store()
    listed = repository.manifests.listing().names
    names = list(listed) if refs is None else [resolve(repository, ref) for ref in refs]
    away: dict[ManifestName, dict[PackId, int]] = {}
    tiers: dict[ManifestName, tuple[str, ...]] = {}
    damaged: dict[ManifestName, CorruptError] = {}
    for name in sorted(set(names), reverse=True):
        try:
            manifest = _loaded(repository, name, is_asked_for=refs is not None)
        except CorruptError as error:
            damaged[name] = error
            continue
        packs = [] if manifest is None else [pack for pack in manifest.packs if _is_away(pack.tier)]
        if packs:
            away[name] = {pack.pack_id: pack.nbytes for pack in packs}
            tiers[name] = tuple(sorted({pack.tier for pack in packs}))
    total = sum({pack_id: nbytes for packs in away.values() for pack_id, nbytes in packs.items()}.values())
    puller = _Puller(repository, on_progress, total)
    entries = []
    for name, packs_away in away.items():
        is_done = False
        try:
            is_done = not dry_run and puller.pull(name)
        except CorruptError as error:
            damaged[name] = error
        problem = str(damaged[name]) if name in damaged else ""
        entries.append(PullEntry(name.seq, name.step, tiers[name], sum(packs_away.values()), is_done, problem))
    copied = puller.copied
    report = PullReport(repository.run, dry_run, tuple(entries), total, sum(copied.values()), len(copied))
    report, failure = _pull_points(repository, report)
    if damaged:
        raise partial_copy_error("pulled", damaged, report)
    if failure is not None:
        raise failure
    return report


def _pull_points(repository: Repository, report: PullReport) -> tuple[PullReport, CkstoreError | None]:
    """Copy the missing points of the checkpoints that were pulled; return what failed."""
    seqs: dict[str, set[int]] = {}
    for entry in report.entries:
        for tier in entry.tiers if entry.is_done or (report.is_dry_run and not entry.problem) else ():
            seqs.setdefault(tier, set()).add(entry.seq)
    copies = [_copy_segments(repository, *each, is_dry_run=report.is_dry_run) for each in sorted(seqs.items())]
    points, nbytes = sum(each.point_count for each in copies), sum(each.nbytes for each in copies)
    report = replace(report, points_copied=points, journal_bytes_copied=nbytes)
    failures = (failure for each in copies if (failure := each.failure("pulled", report)) is not None)
    return report, next(failures, None)


def _copy_segments(repository: Repository, tier: str, seqs: Collection[int], *, is_dry_run: bool) -> SegmentCopy:
    """Copy the segments with points of these checkpoints that the tier has and the store has not."""
    source = repository.tiers.open(tier)
    copy = SegmentCopy(source, repository.backend, repository.limits, is_dry_run=is_dry_run, brings_back=True)
    if not has_segments(repository, source):
        return copy
    here = Journals(repository.manifests, clock=repository.clock).names()
    order_end, seq_max = here[-1].order if here else None, repository.manifests.listing().claimed_max
    state = state_there(repository, source)
    # A store that was set back must not take points of its former self for its newest state.
    names = [
        name
        for name in segments_of(state, seqs)
        if (order_end is None or name.order < order_end)
        and (state.journal.segments[name].facts.after_seq or 0) <= seq_max
        and name not in here
    ]
    copy.run(state.journal, names)
    return copy


def _loaded(repository: Repository, name: ManifestName, *, is_asked_for: bool) -> Manifest | None:
    try:
        return repository.manifests.load(name)
    except FileNotFoundError:
        if is_asked_for:
            raise NotFoundError(
                f"seq {name.seq} was deleted or replaced while it was being read",
                where=repository.backend.root,
                todo="run `ckstore ls` and try again",
            ) from None
        return None


def _is_away(tier: str) -> bool:
    return tier not in (LOCAL_TIER, LOST_TIER)


class _Puller:
    """Brings checkpoints of one run back."""

    def __init__(
        self, repository: Repository, on_progress: Callable[[int, int], None] | None, total_nbytes: int
    ) -> None:
        self._repository = repository
        self._done_nbytes = 0
        self._total_nbytes = total_nbytes
        self._report_progress = on_progress or (lambda done, total: None)
        self._packs = PackCopy(repository, repository.backend, check=self._check, on_bytes=self._on_bytes)
        self._pack_check: IncomingPackCheck | None = None

    @property
    def copied(self) -> dict[PackId, int]:
        """Copied packs and their sizes."""
        return self._packs.copied

    def pull(self, name: ManifestName) -> bool:
        """Bring a checkpoint back. Return False if it was dropped meanwhile."""
        for _ in range(_TRIES):
            try:
                if self._pull_once(name):
                    return True
            except DroppedError:
                return False
        raise ConflictError(
            f"seq {name.seq} was replaced several times while it was being pulled",
            where=self._repository.backend.root,
            todo="wait until a repack or a push has ended",
        )

    def _pull_once(self, name: ManifestName) -> bool:
        """Bring a checkpoint back. Return False if another process has replaced its manifest meanwhile."""
        manifest = load_whole(self._repository, name)
        away = [pack for pack in manifest.packs if _is_away(pack.tier)]
        if not away:
            return True
        self._pack_check = IncomingPackCheck(self._repository, name, manifest)
        self._packs.run(away)
        header = manifest.header
        replacement = replace(
            manifest,
            header=replace(header, generation=header.generation + 1),
            packs=tuple(replace(pack, tier=LOCAL_TIER) if _is_away(pack.tier) else pack for pack in manifest.packs),
        )
        try:
            published = self._repository.manifests.publish(replacement)
        except ConflictError:
            return False
        finish_replacement(self._repository, replacement, published)
        return True

    def _check(self, pack: PackRef, file: ReadFile, *, is_new: bool) -> None:
        assert self._pack_check is not None, "a checkpoint is being pulled"
        self._pack_check.check(pack, file, is_new=is_new)

    def _on_bytes(self, nbytes: int) -> None:
        self._done_nbytes += nbytes
        self._report_progress(min(self._done_nbytes, self._total_nbytes), self._total_nbytes)
