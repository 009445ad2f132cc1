"""Turn a survey into the plan of a collection: plain data that is printed, carried out once, and never exceeded.

Invariants:
- Nothing is planned for a blocked run, and no pack is moved while a manifest cannot be read.
- Ages save work and give users time to change their minds. Safety never depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from ckstore.config import GIB
from ckstore.display import repr_of_summary
from ckstore.errors import UsageError
from ckstore.format.paths import ManifestName
from ckstore.hashing import PackId
from ckstore.ops.gc.journals import SegmentMove
from ckstore.ops.gc.survey import Draft, PackUse, Survey
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.reachability import MarkedManifest, Marker
from ckstore.store.tier_checks import Unproven
from ckstore.store.trash import TrashedManifest, TrashFolder

DRAFT_AGE_SECONDS_MIN = 60.0
"""Minimum age of a removed draft. A writer needs a draft for milliseconds, but may have been suspended meanwhile."""

_NANOSECONDS = 10**9


@dataclass(frozen=True, slots=True)
class GcLimits:
    """How far a collection goes.

    Args:
        min_age_seconds: A pack or draft that no manifest has ever named is kept until it is this old, because a writer
            may be about to publish it.
        trash_seconds: How long files in the trash can be restored.
        is_now: Empty the trash in this collection, including what this collection moves there.
        waste_max: A pack is rewritten if more than this share of its bytes is unreferenced.
        repack_nbytes_max: Bytes that rewriting packs may write; 0: only whole packs are freed.
        clears_intents: Remove all intents. Only safe if no other process deletes or demotes checkpoints.

    Raises:
        UsageError: A value is out of range.
    """

    min_age_seconds: float = 3600.0
    trash_seconds: float = 86_400.0
    is_now: bool = False
    waste_max: float = 0.25
    repack_nbytes_max: int = 4 * GIB
    clears_intents: bool = False

    def __post_init__(self) -> None:
        if not (self.min_age_seconds >= 0 and self.trash_seconds >= 0 and self.repack_nbytes_max >= 0):
            raise UsageError("ages and budgets of a collection must not be negative", where=repr(self))
        if not 0 < self.waste_max <= 1:
            raise UsageError("waste_max must be above 0 and at most 1", where=f"waste_max={self.waste_max!r}")

    @property
    def frees_immediately(self) -> bool:
        """Whether this collection also frees what it moves to the trash."""
        return self.is_now or self.trash_seconds == 0


@dataclass(frozen=True, slots=True)
class PackMove:
    """A pack that no manifest names after the planned deletions."""

    pack_id: PackId
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackRewrite:
    """A pack with many unreferenced bytes.

    Attributes:
        pack_id: The pack.
        nbytes: Its size.
        packed_nbytes: Size of the pack that replaces it.
        manifests: The manifests that name it and will be replaced.
    """

    pack_id: PackId
    nbytes: int
    packed_nbytes: int
    manifests: tuple[ManifestName, ...]


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What a collection will do.

    Attributes:
        stop: Why no pack is moved or removed; empty if packs may be.
        rescues: Packs to move from the trash back into place, because manifests name them.
        put_back: Manifests to move from the trash back into place, because nothing supersedes them.
        drops: Checkpoints that no retention rule keeps, each by its highest generation.
        unfinished: Manifests of deleted checkpoints that are still in place.
        superseded: Lower generations that are still in place after a replacement.
        rewrites: Packs to rewrite. The old packs then go to the trash.
        moves: Packs to move to the trash.
        young_nbytes: Bytes of unreferenced packs that are too young to move.
        purges: Trash folders whose retention time is over.
        waiting: Trash folders whose retention time is not over.
        free_ns: When everything now in the trash, or moved there now, can be freed; None: nothing, or unknown.
        drafts: Files in ``tmp`` that are too old to be in use.
        unproven: Packs that stay only because their tier could not be seen to contain them.
        is_final: The store is in a bucket, where packs are removed in place instead of moved to the trash.
        held_nbytes: Bytes of packs in a bucket that stay because only manifests in the trash name them.
        segments: Segments of journals to move to the trash.
    """

    stop: str
    rescues: tuple[PackId, ...]
    put_back: tuple[TrashedManifest, ...]
    drops: tuple[ManifestName, ...]
    unfinished: tuple[ManifestName, ...]
    superseded: tuple[ManifestName, ...]
    rewrites: tuple[PackRewrite, ...]
    moves: tuple[PackMove, ...]
    young_nbytes: int
    purges: tuple[TrashFolder, ...]
    waiting: tuple[TrashFolder, ...]
    free_ns: int | None
    drafts: tuple[Draft, ...]
    unproven: tuple[Unproven, ...] = ()
    is_final: bool = False
    held_nbytes: int = 0
    segments: tuple[SegmentMove, ...] = ()

    __repr__ = repr_of_summary

    @property
    def moved_nbytes(self) -> int:
        """Bytes of packs moved to the trash, without rewritten packs."""
        return sum(move.nbytes for move in self.moves)

    @property
    def segments_nbytes(self) -> int:
        """Bytes of segments of journals moved to the trash."""
        return sum(move.nbytes for move in self.segments)

    @property
    def rewritten_nbytes(self) -> int:
        """Bytes of the packs to rewrite, before rewriting."""
        return sum(rewrite.nbytes for rewrite in self.rewrites)

    @property
    def written_nbytes(self) -> int:
        """Bytes of the packs that replace them."""
        return sum(rewrite.packed_nbytes for rewrite in self.rewrites)

    @property
    def purged_nbytes(self) -> int:
        """Bytes in the trash whose retention time is over."""
        return sum(folder.nbytes for folder in self.purges)

    @property
    def waiting_nbytes(self) -> int:
        """Bytes in the trash whose retention time is not over."""
        return sum(folder.nbytes for folder in self.waiting)

    @property
    def is_empty(self) -> bool:
        """Whether the plan contains no work."""
        work: tuple[Sequence[object], ...] = (
            self.rescues, self.put_back, self.drops, self.unfinished, self.superseded,
            self.rewrites, self.moves, self.purges, self.drafts, self.segments,
        )  # fmt: skip
        return not any(work)


def make_plan(
    found: Survey,
    marker: Marker,
    drops: Iterable[ManifestName],
    limits: GcLimits,
    count_uses: Callable[[Sequence[MarkedManifest]], list[PackUse]],
    find_unproven: Callable[[Sequence[MarkedManifest], Collection[PackId]], dict[PackId, Unproven]],
    *,
    is_final: bool = False,
    segments: Sequence[SegmentMove] = (),
) -> GcPlan:
    """Decide what a collection does.

    Args:
        found: The survey of the store.
        marker: The marker that the survey used; it numbers the packs.
        drops: Checkpoints that no retention rule keeps.
        limits: Ages and budgets.
        count_uses: Returns what manifests need of each pack. Called only if packs may be rewritten.
        find_unproven: Returns the packs that must stay, because manifests locate them in a tier that lacks them.
        is_final: The store is in a bucket: packs are removed, not moved. Packs that trashed manifests name stay.
        segments: Segments of journals that no point needs after the drops.
    """
    drops, blocked = tuple(sorted(drops)), {run for run, facts in found.runs.items() if facts.blocked}
    assert not any(name.run in blocked for name in drops), "nothing of a blocked run is deleted"
    unfinished = [marked.name for facts in found.runs.values() for marked in facts.marked]
    superseded = [marked.name for facts in found.runs.values() if not facts.blocked for marked in facts.lower]
    leaving = {*unfinished, *superseded, *_generations(found, drops)}
    staying = [marked for name, marked in found.marks.manifests.items() if name not in leaving]
    purges, waiting = _trash(found, limits)
    moves, rewrites = tuple[PackMove, ...](), tuple[PackRewrite, ...]()
    young_nbytes, held_nbytes, unproven, held = 0, 0, dict[PackId, Unproven](), set[PackId]()
    if not found.stop:
        moves, young_nbytes = _moves(found, marker, staying, limits)
        if is_final:
            held = _packs_of_trashed_manifests(found, marker, waiting, () if limits.frees_immediately else leaving)
            held_nbytes = sum(move.nbytes for move in moves if move.pack_id in held)
            moves = tuple(move for move in moves if move.pack_id not in held)
        unproven = find_unproven(staying, [move.pack_id for move in moves])
        moves = tuple(move for move in moves if move.pack_id not in unproven)
        rewrites = tuple(_rewrites(found, marker, staying, blocked, held, limits, count_uses))
    return GcPlan(
        stop=found.stop,
        rescues=tuple(found.trashed_and_named()),
        put_back=tuple(found.strays()),
        drops=drops,
        unfinished=tuple(unfinished),
        superseded=tuple(superseded),
        rewrites=rewrites,
        moves=moves,
        young_nbytes=young_nbytes,
        purges=purges,
        waiting=waiting,
        free_ns=_free_ns(found, waiting, limits, has_moves=bool(moves or rewrites or drops or segments)),
        drafts=tuple(draft for draft in found.drafts if _is_leftover(draft, found.now_ns, limits)),
        unproven=tuple(unproven[pack_id] for pack_id in sorted(unproven)),
        is_final=is_final,
        held_nbytes=held_nbytes,
        segments=tuple(segments),
    )


def _generations(found: Survey, drops: Iterable[ManifestName]) -> Iterable[ManifestName]:
    """Return all manifests of these checkpoints."""
    dropped = {(name.run, name.seq) for name in drops}
    return (name for name in found.marks.manifests if (name.run, name.seq) in dropped)


def _packs_of_trashed_manifests(
    found: Survey, marker: Marker, waiting: Iterable[TrashFolder], leaving: Iterable[ManifestName]
) -> set[PackId]:
    """Return the packs of manifests that are in the trash or go there, since these can still be restored."""
    paths = (manifest.path for folder in waiting for manifest in folder.manifests)
    held = set[PackId]().union(*(found.trashed.get(path, ()) for path in paths))
    return held.union(*({ref.pack_id for ref in marker.packs_of(found.marks.manifests[name])} for name in leaving))


def _is_leftover(draft: Draft, now_ns: int, limits: GcLimits) -> bool:
    return abs(now_ns - draft.modified_ns) >= max(limits.min_age_seconds, DRAFT_AGE_SECONDS_MIN) * _NANOSECONDS


def is_expired(folder: TrashFolder, now_ns: int, limits: GcLimits) -> bool:
    """Return whether the retention time of a trash folder is over. A folder of unknown age never expires by age."""
    age_ns = folder.age_ns(now_ns)
    return limits.frees_immediately or (age_ns is not None and age_ns >= limits.trash_seconds * _NANOSECONDS)


def _trash(found: Survey, limits: GcLimits) -> tuple[tuple[TrashFolder, ...], tuple[TrashFolder, ...]]:
    """Return the folders to purge and the folders that wait. Nothing is purged while the survey says stop."""
    expired = [not found.stop and is_expired(folder, found.now_ns, limits) for folder in found.trash]
    purges = tuple(folder for folder, is_over in zip(found.trash, expired, strict=True) if is_over)
    waiting = tuple(folder for folder, is_over in zip(found.trash, expired, strict=True) if not is_over)
    return purges, waiting


def _free_ns(found: Survey, waiting: Iterable[TrashFolder], limits: GcLimits, *, has_moves: bool) -> int | None:
    times = [folder.made_ns for folder in waiting if folder.made_ns is not None and folder.nbytes]
    if has_moves and not limits.frees_immediately:
        times.append(found.now_ns)
    return max(times) + int(limits.trash_seconds * _NANOSECONDS) if times else None


def _moves(
    found: Survey, marker: Marker, staying: Iterable[MarkedManifest], limits: GcLimits
) -> tuple[tuple[PackMove, ...], int]:
    refs = marker.numbers.refs
    named = {number for marked in staying for number in marked.packs}
    # A pack that manifests locate in a tier is not needed here as well.
    live = {refs[number].pack_id for number in named if refs[number].tier == LOCAL_TIER}
    moves, young_nbytes = [], 0
    for pack_id, info in sorted(found.packs.items()):
        if pack_id in live or any(bytes(pack_id) in content for content in found.marks.quarantined):
            continue
        # A modification time far in the future does not mean that the pack is in use.
        is_young = abs(found.now_ns - info.modified_ns) < limits.min_age_seconds * _NANOSECONDS
        if is_young and pack_id not in found.published:
            young_nbytes += info.nbytes
        else:
            moves.append(PackMove(pack_id, info.nbytes))
    return tuple(moves), young_nbytes


def _rewrites(
    found: Survey,
    marker: Marker,
    staying: Sequence[MarkedManifest],
    blocked: set[str],
    held: Collection[PackId],
    limits: GcLimits,
    count_uses: Callable[[Sequence[MarkedManifest]], list[PackUse]],
) -> Iterable[PackRewrite]:
    """Yield the packs here that are worth rewriting.

    Packs in ``held`` stay for manifests in the trash, so rewriting them now would free nothing.
    """
    if limits.repack_nbytes_max == 0 or not staying:
        return
    refs = marker.numbers.refs
    untouchable = {number for marked in staying if marked.name.run in blocked for number in marked.packs}
    uses = []
    for use in count_uses(staying):
        ref, info = refs[use.number], found.packs.get(refs[use.number].pack_id)
        if ref.tier != LOCAL_TIER or use.number in untouchable or ref.pack_id in held:
            continue
        if info is not None and info.nbytes == ref.nbytes:
            uses.append(use)
    yield from worthwhile_rewrites(uses, marker, staying, limits)


def worthwhile_rewrites(
    uses: Iterable[PackUse],
    marker: Marker,
    staying: Sequence[MarkedManifest],
    limits: GcLimits,
    *,
    manifest_copies: int = 1,
    may_rewrite: Callable[[PackId], bool] = lambda pack_id: True,
) -> Iterable[PackRewrite]:
    """Yield the packs that are worth rewriting, the highest share of waste first.

    Args:
        uses: What is needed of each pack that may be rewritten.
        marker: The marker that numbered the packs.
        staying: Manifests that stay.
        limits: How much of a pack may be waste, and how much may be written.
        manifest_copies: How often a replaced manifest is written.
        may_rewrite: Called last, and only for packs that are worth rewriting, because it is expensive.
    """
    refs = marker.numbers.refs
    wasteful: list[tuple[float, int, int]] = []
    for use in uses:
        nbytes = refs[use.number].nbytes
        waste = nbytes - use.packed_nbytes
        if waste > limits.waste_max * nbytes:
            wasteful.append((waste / nbytes, use.number, use.packed_nbytes))
    if not wasteful:
        return
    naming: dict[int, list[MarkedManifest]] = {number: [] for _, number, _ in wasteful}
    for marked in staying:
        for number in naming.keys() & set(marked.packs):
            naming[number].append(marked)
    budget = limits.repack_nbytes_max
    for _, number, packed_nbytes in sorted(wasteful, key=lambda each: (-each[0], refs[each[1]].pack_id)):
        ref, manifests = refs[number], naming[number]
        manifests_nbytes = manifest_copies * sum(marked.nbytes for marked in manifests)
        # Rewriting thousands of manifests to free a few bytes is not worth it.
        if packed_nbytes + manifests_nbytes > budget or manifests_nbytes > ref.nbytes - packed_nbytes:
            continue
        if not may_rewrite(ref.pack_id):
            continue
        budget -= packed_nbytes + manifests_nbytes
        yield PackRewrite(ref.pack_id, ref.nbytes, packed_nbytes, tuple(marked.name for marked in manifests))
