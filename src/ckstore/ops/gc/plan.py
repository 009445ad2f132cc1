"""From a survey to the plan of a collection: data that is printed, carried out once, and never exceeded.

Invariants:
- Nothing is planned for a run that is blocked, and no pack is touched where a manifest cannot be read.
- Ages spare work and give people time to change their minds; safety never rests on them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from ckstore.config import GIB
from ckstore.errors import UsageError
from ckstore.format.paths import ManifestName
from ckstore.hashing import PackId
from ckstore.ops.gc.survey import Draft, Survey
from ckstore.ops.gc.waste import PackUse
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.reachability import MarkedManifest, Marker
from ckstore.store.tier_checks import Unproven
from ckstore.store.trash import TrashedManifest, TrashFolder

DRAFT_AGE_SECONDS_MIN = 60.0
"""A draft lives for milliseconds; a process that was stopped meanwhile may come back to it."""

_NANOSECONDS = 10**9


@dataclass(frozen=True, slots=True)
class GcLimits:
    """How far a collection goes.

    Args:
        min_age_seconds: A pack that no manifest ever named is left alone until it is this old: someone may be about to
            publish it. Drafts too.
        trash_seconds: How long what was moved to the trash can be brought back.
        is_now: Free what is in the trash, and what goes there, at once.
        waste_max: A pack of which a larger share is needed by nobody is rewritten.
        repack_nbytes_max: Bytes that rewriting may write; 0: only whole packs are freed.
        clears_intents: Nobody else drops or demotes, whatever intents say.

    Raises:
        UsageError: One is out of range.
    """

    min_age_seconds: float = 3600.0
    trash_seconds: float = 86_400.0
    is_now: bool = False
    waste_max: float = 0.25
    repack_nbytes_max: int = 4 * GIB
    clears_intents: bool = False

    def __post_init__(self) -> None:
        if not (self.min_age_seconds >= 0 and self.trash_seconds >= 0 and self.repack_nbytes_max >= 0):
            raise UsageError("ages and budgets of a collection are not negative", where=repr(self))
        if not 0 < self.waste_max <= 1:
            raise UsageError("waste_max is a share, above 0 and at most 1", where=f"waste_max={self.waste_max!r}")

    @property
    def frees_at_once(self) -> bool:
        """Whether what goes to the trash is freed in the same run."""
        return self.is_now or self.trash_seconds == 0


@dataclass(frozen=True, slots=True)
class PackMove:
    """A pack that nobody needs, or will need when the plan is carried out."""

    pack_id: PackId
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackRewrite:
    """A pack of which much is needed by nobody.

    Attributes:
        pack_id: The pack.
        nbytes: Its size.
        packed_nbytes: Size of the pack that takes its place.
        manifests: The manifests that name it, and are replaced.
    """

    pack_id: PackId
    nbytes: int
    packed_nbytes: int
    manifests: tuple[ManifestName, ...]


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What a collection does.

    Attributes:
        stop: Why no pack is moved or removed; empty where nothing speaks against it.
        rescues: Packs that go from the trash back into place: manifests name them.
        put_back: Manifests that go from the trash back into place: nothing supersedes them.
        drops: Checkpoints that retention lets go, each by its highest generation.
        unfinished: Manifests of dropped checkpoints that are still in place.
        superseded: Lower generations that a replacement has left in place.
        rewrites: Packs that are rewritten; the old ones go to the trash afterwards.
        moves: Packs that go to the trash.
        young_nbytes: Bytes of packs that nobody names, but are too young to go.
        purges: Trash folders whose time is over.
        waiting: Trash folders whose time is not.
        free_ns: When the last of what waits, or goes to the trash now, can be freed; None: nothing, or not known.
        drafts: Files in ``tmp`` that are too old to be in use.
        unproven: Packs that stay only because the tier that manifests name could not be seen to have them.
        is_final: There is no trash for packs, as in a bucket: what would be moved there is removed at once.
        held_nbytes: Bytes of packs that stay there because manifests in the trash name them, and nobody else.
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

    @property
    def moved_nbytes(self) -> int:
        """Bytes of packs that go to the trash, without those that are rewritten."""
        return sum(move.nbytes for move in self.moves)

    @property
    def rewritten_nbytes(self) -> int:
        """Bytes of packs that are rewritten, before."""
        return sum(rewrite.nbytes for rewrite in self.rewrites)

    @property
    def written_nbytes(self) -> int:
        """Bytes of the packs that take their place."""
        return sum(rewrite.packed_nbytes for rewrite in self.rewrites)

    @property
    def purged_nbytes(self) -> int:
        """Bytes of trash whose time is over."""
        return sum(folder.nbytes for folder in self.purges)

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of trash whose time is not over."""
        return sum(folder.nbytes for folder in self.waiting)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        work: tuple[Sequence[object], ...] = (
            self.rescues, self.put_back, self.drops, self.unfinished, self.superseded,
            self.rewrites, self.moves, self.purges, self.drafts,
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
) -> GcPlan:
    """Decide what a collection does.

    Args:
        found: The store.
        marker: Numbers packs as the survey does.
        drops: What retention lets go.
        limits: Ages and budgets.
        count_uses: Returns what manifests need of every pack; asked only where packs may be rewritten.
        find_unproven: Returns which packs may not go, since manifests say that they are in a tier and it does not.
        is_final: Packs cannot be moved to the trash, only removed; those that manifests there name stay.
    """
    drops, blocked = tuple(sorted(drops)), {run for run, facts in found.runs.items() if facts.blocked}
    assert not any(name.run in blocked for name in drops), "nothing of a blocked run goes"
    unfinished = [marked.name for facts in found.runs.values() for marked in facts.marked]
    unblocked = [facts for facts in found.runs.values() if facts.run not in blocked]
    superseded = [marked.name for facts in unblocked for marked in facts.lower]
    goes = {(name.run, name.seq) for name in drops}
    leaving = {*unfinished, *superseded, *(name for name in found.look.manifests if (name.run, name.seq) in goes)}
    staying = [marked for name, marked in found.look.manifests.items() if name not in leaving]
    purges, waiting = _trash(found, limits)
    moves, rewrites = tuple[PackMove, ...](), tuple[PackRewrite, ...]()
    young_nbytes, held_nbytes, unproven = 0, 0, dict[PackId, Unproven]()
    if not found.stop:
        held = set[PackId]()
        moves, young_nbytes = _moves(found, marker, staying, limits)
        if is_final:
            held = _held(found, marker, waiting, () if limits.frees_at_once else leaving)
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
        free_ns=_free_ns(found, waiting, limits, has_moves=bool(moves or rewrites or drops)),
        drafts=tuple(draft for draft in found.drafts if _is_leftover(draft, found.now_ns, limits)),
        unproven=tuple(unproven[pack_id] for pack_id in sorted(unproven)),
        is_final=is_final,
        held_nbytes=held_nbytes,
    )


def _held(
    found: Survey, marker: Marker, waiting: Iterable[TrashFolder], leaving: Iterable[ManifestName]
) -> set[PackId]:
    """Return the packs of manifests that lie in the trash, or go there: they can be brought back as long as they do."""
    paths = (manifest.path for folder in waiting for manifest in folder.manifests)
    held = set[PackId]().union(*(found.trashed.get(path, ()) for path in paths))
    return held.union(*({ref.pack_id for ref in marker.packs_of(found.look.manifests[name])} for name in leaving))


def _is_leftover(draft: Draft, now_ns: int, limits: GcLimits) -> bool:
    return abs(now_ns - draft.modified_ns) >= max(limits.min_age_seconds, DRAFT_AGE_SECONDS_MIN) * _NANOSECONDS


def is_expired(folder: TrashFolder, now_ns: int, limits: GcLimits) -> bool:
    """Whether the time of a trash folder is over; where its age is not known, only if none is asked for."""
    age_ns = folder.age_ns(now_ns)
    return limits.frees_at_once or (age_ns is not None and age_ns >= limits.trash_seconds * _NANOSECONDS)


def _trash(found: Survey, limits: GcLimits) -> tuple[tuple[TrashFolder, ...], tuple[TrashFolder, ...]]:
    """Return the folders whose time is over, if anything may be removed at all, and those whose time is not."""
    expired = [not found.stop and is_expired(folder, found.now_ns, limits) for folder in found.trash]
    purges = tuple(folder for folder, is_over in zip(found.trash, expired, strict=True) if is_over)
    waiting = tuple(folder for folder, is_over in zip(found.trash, expired, strict=True) if not is_over)
    return purges, waiting


def _free_ns(found: Survey, waiting: Iterable[TrashFolder], limits: GcLimits, *, has_moves: bool) -> int | None:
    times = [folder.made_ns for folder in waiting if folder.made_ns is not None and folder.nbytes]
    if has_moves and not limits.frees_at_once:
        times.append(found.now_ns)
    return max(times) + int(limits.trash_seconds * _NANOSECONDS) if times else None


def _moves(
    found: Survey, marker: Marker, staying: Iterable[MarkedManifest], limits: GcLimits
) -> tuple[tuple[PackMove, ...], int]:
    refs = marker.numbers.refs
    named = {number for marked in staying for number in marked.packs}
    # A pack that lies in a bucket too, and is named there, is not needed here.
    live = {refs[number].pack_id for number in named if refs[number].tier == LOCAL_TIER}
    moves, young_nbytes = [], 0
    for pack_id, info in sorted(found.packs.items()):
        if pack_id in live or any(bytes(pack_id) in content for content in found.look.quarantined):
            continue
        # One whose time lies far ahead of the clock is not in anybody's hands now either.
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

    Where packs stay for what lies in the trash (``held``), rewriting them now would free nothing.
    """
    if limits.repack_nbytes_max == 0 or not staying:
        return
    refs = marker.numbers.refs
    kept = {number for marked in staying if marked.name.run in blocked for number in marked.packs}
    uses = []
    for use in count_uses(staying):
        ref, info = refs[use.number], found.packs.get(refs[use.number].pack_id)
        if ref.tier != LOCAL_TIER or use.number in kept or ref.pack_id in held:
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
    """Yield the packs that are worth rewriting, those that free most for each byte written first.

    Args:
        uses: What is needed of packs that may be rewritten.
        marker: Has numbered the packs.
        staying: Manifests that stay.
        limits: How much of a pack may be waste, and how much may be written.
        manifest_copies: How often a manifest is written when it is replaced.
        may_rewrite: Asked last, about packs that are worth it, since it is dear.
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
        # Writing thousands of manifests anew to free a few bytes is no gain.
        if packed_nbytes + manifests_nbytes > budget or manifests_nbytes > ref.nbytes - packed_nbytes:
            continue
        if not may_rewrite(ref.pack_id):
            continue
        budget -= packed_nbytes + manifests_nbytes
        yield PackRewrite(ref.pack_id, ref.nbytes, packed_nbytes, tuple(marked.name for marked in manifests))
