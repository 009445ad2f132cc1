"""Plan a repack: which checkpoints become keyframes, which become deltas, and which stay.

Checkpoints are planned from newest to oldest, each as a commit that follows the next newer one. So old checkpoints are
deltas against newer ones, and the newest are restored fastest. The plan is plain data: ``repack`` carries it out, and a
dry run prints it.

Checkpoints whose frames share bases form a group. A group is rewritten completely or not at all: the bases of one
checkpoint that stays would keep the bytes of the others alive.

Reading order: ``plan_repack``; ``_Planner`` decides for each group; ``Sketch`` estimates one checkpoint in its new
form; ``Ledger`` records which checkpoints need which frames and packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from ckstore.commit.base_selection import BaseSelection, select_bases
from ckstore.commit.chunking import CommitPlan
from ckstore.config import Policy, RepackPolicy
from ckstore.delta.base_cache import BaseCache
from ckstore.delta.cost_model import Decision
from ckstore.errors import ConflictError
from ckstore.format.frame import frame_extent
from ckstore.format.location import UNSAMPLED, Decisions
from ckstore.format.manifest import FrameRef, Manifest, PackRef
from ckstore.format.pack import DIRECTORY_ENTRY_NBYTES, PACK_ALIGN, SUPERHEADER_NBYTES, TAIL_NBYTES
from ckstore.format.paths import ManifestName
from ckstore.format.wire import align_up
from ckstore.hashing import ChunkId, PackId
from ckstore.ops.stored_checkpoint import plan_of, stored_state
from ckstore.store.chunk_index import LOCAL_TIER, ChunkIndex, LocatedFrame, locate
from ckstore.store.refs import load_whole
from ckstore.store.repository import Repository

Action = Literal["keyframe", "delta", "keep"]


class ChunkForm(NamedTuple):
    """How one chunk is coded: against a base (chunk id), as a rounding of a master (chunk index), or without."""

    base: ChunkId | None
    is_unsampled: bool
    master: int | None


@dataclass(frozen=True, slots=True)
class Rewrite:
    """How the chunks of one checkpoint are coded, which frames stay where they are, and why."""

    forms: tuple[ChunkForm, ...]
    in_place: frozenset[ChunkId]
    selection: BaseSelection

    @classmethod
    def of(cls, sketch: Sketch) -> Rewrite:
        """Return what ``repack`` needs of a sketch, without samples and other data that grows with the state."""
        forms = tuple(
            ChunkForm(None if form.base is None else form.base.frame.chunk_id, form.is_unsampled, form.master)
            for form in sketch.selection.plans
        )
        sampled = tuple(replace(each, samples={}, frames={}) for each in sketch.selection.sampled)
        return cls(forms, frozenset(sketch.in_place), replace(sketch.selection, plans=(), sampled=sampled))


@dataclass(frozen=True, slots=True)
class Member:
    """The plan for one checkpoint. Values ending in ``_after`` are estimates.

    Args:
        name: Its manifest.
        action: What to do.
        reason: Why, in a sentence.
        base_seq: The checkpoint whose chunks, or their roots, serve as bases.
        stored_before: Bytes of the frames of its own chunks.
        stored_after: The same afterwards, without frames shared with newer checkpoints.
        read_before: Bytes that a restore reads.
        read_after: The same afterwards.
        state_nbytes: Plain bytes of its tensors.
        written_nbytes: Bytes of new packs.
        rewrite: How it is rewritten; None if it stays.
    """

    name: ManifestName
    action: Action
    reason: str
    base_seq: int | None
    stored_before: int
    stored_after: int
    read_before: int
    read_after: int
    state_nbytes: int
    written_nbytes: int = 0
    rewrite: Rewrite | None = None


@dataclass(frozen=True, slots=True)
class RepackPlan:
    """The plan, newest checkpoint first, and the bytes of packs that the run needs before and after."""

    members: tuple[Member, ...]
    packs_before: int
    packs_after: int

    @property
    def written_nbytes(self) -> int:
        """Estimated bytes to write."""
        return sum(member.written_nbytes for member in self.members)


def plan_repack(
    repository: Repository,
    repack_policy: RepackPolicy,
    policy: Policy,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> RepackPlan:
    """Read samples of every checkpoint of the run, and decide.

    Args:
        repository: The store.
        repack_policy: How many keyframes to make, and when a rewrite is worth it.
        policy: Threads and memory.
        on_progress: Called with the number of checkpoints read and the total.

    Raises:
        CorruptError: A checkpoint of the run is damaged. Repair or delete it first.
        ConflictError: Another process has replaced a checkpoint meanwhile.
    """
    names = list(reversed(repository.manifests.listing().names))
    ledger = Ledger.of(repository, names)
    planner = _Planner(repository, repack_policy, policy, ledger, on_progress or (lambda done, total: None), len(names))
    members: list[Member] = []
    for first, last in ledger.groups():
        members += planner.group(names[first : last + 1], first)
    kept = [rank for rank, member in enumerate(members) if member.rewrite is None]
    after = ledger.packs_nbytes(kept, planner.packs_in_place)
    plan = RepackPlan(tuple(members), sum(ledger.packs.values()), after)
    return replace(plan, packs_after=after + plan.written_nbytes)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The decision on one checkpoint.

    Args:
        member: The decision as data.
        sketch: Its new form; None if it stays.
    """

    member: Member
    sketch: Sketch | None = None

    @property
    def packs_in_place(self) -> set[PackId]:
        """Packs of frames that stay where they are although the checkpoint is rewritten."""
        return set() if self.sketch is None else {known.pack.pack_id for known in self.sketch.in_place.values()}

    @property
    def written_nbytes(self) -> int:
        """Bytes of new packs."""
        return 0 if self.sketch is None else self.sketch.packed_nbytes


class _GroupBytes:
    """Bytes of the packs of a group, without packs that are needed outside the group anyway."""

    def __init__(self, ledger: Ledger, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._ledger = ledger
        self._packs: set[PackId] = set()
        self._written = 0

    def add(self, outcome: _Outcome, manifest: Manifest) -> None:
        """Count a checkpoint."""
        packs = {pack.pack_id for pack in manifest.packs} if outcome.sketch is None else outcome.packs_in_place
        self._packs |= {pack for pack in packs if not self._ledger.is_needed_outside(pack, self.first, self.last)}
        self._written += outcome.written_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of packs, including new ones."""
        return self._written + sum(self._ledger.packs[pack_id] for pack_id in self._packs)


class _Planner:
    """Plan one group after the other, newest first."""

    def __init__(
        self,
        repository: Repository,
        repack_policy: RepackPolicy,
        policy: Policy,
        ledger: Ledger,
        tell: Callable[[int, int], None],
        count: int,
    ) -> None:
        self.packs_in_place: set[PackId] = set()
        self._repository = repository
        self._repack_policy = repack_policy
        self._policy = replace(
            policy,
            compression=repack_policy.compression,
            delta=True,
            read_amplification_max=repack_policy.read_amplification_max,
            base_cache="none",
        )
        self._ledger = ledger
        self._tell = tell
        self._count = count
        self._placed = PlannedIndex()
        self._bases = BaseCache()
        self._last: Sketch | None = None
        self._keyframes_left = repack_policy.keyframes

    def group(self, names: Sequence[ManifestName], first: int) -> list[Member]:
        """Plan a group whose newest checkpoint has rank ``first``."""
        mark, last = self._placed.mark(), first + len(names) - 1
        # Compare two outcomes: rewrite everything that gains by it, or only the requested keyframes.
        bytes_if_rewritten, bytes_if_kept = (
            _GroupBytes(self._ledger, first, last),
            _GroupBytes(self._ledger, first, last),
        )
        outcomes, otherwise = [], []
        for rank, name in enumerate(names, first):
            manifest = self._load(name)
            outcome, other = self._draft(manifest, rank, bytes_if_rewritten)
            bytes_if_rewritten.add(outcome, manifest)
            bytes_if_kept.add(other, manifest)
            outcomes.append(outcome)
            otherwise.append(other)
        is_worth_it = bytes_if_rewritten.nbytes <= (1 - self._repack_policy.saving_min) * bytes_if_kept.nbytes
        if any(outcome.sketch for outcome in outcomes) and not is_worth_it:
            self._revert_group(otherwise, mark)
            what = "rewriting it and all checkpoints that share its bases" if len(names) > 1 else "rewriting"
            reason = _saving_sentence(what, bytes_if_rewritten.nbytes, bytes_if_kept.nbytes)
            outcomes = [_with_reason(outcome, reason) for outcome in otherwise]
        self.packs_in_place.update(*(outcome.packs_in_place for outcome in outcomes))
        return [outcome.member for outcome in outcomes]

    def _load(self, name: ManifestName) -> Manifest:
        manifest = load_whole(self._repository, name)
        if manifest.header.generation != name.generation:
            raise ConflictError(f"seq {name.seq} was replaced by another process meanwhile", todo="repack again")
        return manifest

    def _draft(self, manifest: Manifest, rank: int, bytes_if_rewritten: _GroupBytes) -> tuple[_Outcome, _Outcome]:
        """Return the outcome for a checkpoint if its group is rewritten, and if it is not."""
        is_forced = self._keyframes_left > 0 and not manifest.header.is_archival
        self._keyframes_left -= is_forced
        found = self._sketch(manifest, bytes_if_rewritten, is_forced=is_forced)
        self._tell(rank + 1, self._count)
        self._last = found
        refusal = self._refusal(found, is_forced=is_forced)
        if refusal is not None:
            self._placed.put(roots_of(manifest))
            found.follow(self._bases, found.unchanged())
            stays = _Outcome(_keep_member(found, refusal))
            return stays, stays
        otherwise = _Outcome(_keep_member(found, ""))
        if is_forced:
            in_place = self._in_place(manifest, 0, self._repack_policy.keyframes - 1)
            alone = found.with_frames_in_place(in_place, self._placed)
            otherwise = _Outcome(_rewrite_member(alone), alone)
        self._placed.put(found.frames)
        found.follow(self._bases, found.planned())
        return _Outcome(_rewrite_member(found), found), otherwise

    def _sketch(self, manifest: Manifest, bytes_if_rewritten: _GroupBytes, *, is_forced: bool) -> Sketch:
        in_place = self._in_place(manifest, bytes_if_rewritten.first, bytes_if_rewritten.last)
        return sketch(
            self._repository,
            manifest,
            self._placed,
            self._bases,
            self._policy,
            is_keyframe=is_forced,
            in_place=in_place,
        )

    def _in_place(self, manifest: Manifest, first: int, last: int) -> dict[ChunkId, LocatedFrame]:
        """Return frames of a checkpoint's own chunks that checkpoints outside a range of ranks need in place."""
        own = {chunk.chunk_id for chunk in manifest.chunks}
        return {
            known.frame.chunk_id: known
            for known in roots_of(manifest)
            if known.frame.chunk_id in own
            and self._placed.find(known.frame.chunk_id) is None
            and self._ledger.is_needed_outside((known.pack.pack_id, known.frame.offset), first, last)
        }

    def _refusal(self, found: Sketch, *, is_forced: bool) -> str | None:
        """Return why a checkpoint stays whatever happens to its group; None if it need not stay."""
        if found.manifest.losses:
            # Coded again without loss, a reconstruction takes as many bytes as the exact state.
            return "it is stored with a loss, and such checkpoints are not repacked"
        share_max = 1 - self._repack_policy.saving_min
        if needs_others(found.manifest):
            is_faster = found.read_after <= share_max * found.read_before
            return (
                None
                if is_faster or not is_forced
                else _saving_sentence("a keyframe", found.read_after, found.read_before)
            )
        if found.written_nbytes <= share_max * found.moved_nbytes:
            return None
        return _saving_sentence("rewriting", found.written_nbytes, found.moved_nbytes)

    def _revert_group(self, outcomes: Sequence[_Outcome], mark: int) -> None:
        """Plan a group again in which only the requested keyframes are rewritten."""
        assert self._last is not None, "a group has a checkpoint"
        self._placed.back_to(mark)
        for outcome in outcomes:
            frames = outcome.sketch.frames if outcome.sketch else roots_of(self._load(outcome.member.name))
            self._placed.put(frames)
        self._bases = BaseCache()
        last = outcomes[-1].sketch
        self._last.follow(self._bases, self._last.unchanged() if last is None else last.planned())


def _with_reason(outcome: _Outcome, reason: str) -> _Outcome:
    if outcome.sketch is not None or outcome.member.reason:
        return outcome
    return _Outcome(replace(outcome.member, reason=reason))


def _saving_sentence(what: str, after: int, before: int) -> str:
    """Say what a change would save."""
    if not before:
        return f"{what} would free nothing: other checkpoints need its packs"
    saved = 1 - after / before
    return f"{what} would save {saved:.1%}" if saved >= 0 else f"{what} would cost {-saved:.1%} more"


def _rewrite_member(found: Sketch) -> Member:
    decision, decisions = found.selection.decision, found.decisions
    return Member(
        name=_name_of(found.manifest),
        action="keyframe" if decision.is_keyframe else "delta",
        reason=decision.reason,
        base_seq=None if decisions is None else decisions.base_seq,
        stored_before=found.stored_before,
        stored_after=found.stored_after,
        read_before=found.read_before,
        read_after=found.read_after,
        state_nbytes=found.manifest.header.bytes_state,
        written_nbytes=found.packed_nbytes,
        rewrite=Rewrite.of(found),
    )


def _keep_member(found: Sketch, reason: str) -> Member:
    stored, read = found.stored_before, found.read_before
    state_nbytes = found.manifest.header.bytes_state
    return Member(_name_of(found.manifest), "keep", reason, None, stored, stored, read, read, state_nbytes)


def _name_of(manifest: Manifest) -> ManifestName:
    header = manifest.header
    return ManifestName(header.run, header.seq, header.step, header.generation)


_PLANNED_PACK = PackRef(PackId(bytes(16)), 0, bytes(32))
"""Placeholder for packs that are not written yet."""


class PlannedIndex(ChunkIndex):
    """Frames, written or planned so far, that older checkpoints may share or use as bases."""

    def __init__(self) -> None:
        super().__init__(manifests_max=1)
        self._frames: dict[ChunkId, LocatedFrame] = {}
        self._added: list[ChunkId] = []

    def find(self, chunk_id: ChunkId) -> LocatedFrame | None:
        """Return the frame of a chunk."""
        return self._frames.get(chunk_id)

    def put(self, frames: Iterable[LocatedFrame]) -> None:
        """Add frames. The first frame of a chunk wins."""
        for known in frames:
            if known.frame.chunk_id not in self._frames:
                self._frames[known.frame.chunk_id] = known
                self._added.append(known.frame.chunk_id)

    def mark(self) -> int:
        """Return a position for ``back_to``."""
        return len(self._added)

    def back_to(self, mark: int) -> None:
        """Remove every frame that was added after a mark."""
        for chunk_id in self._added[mark:]:
            del self._frames[chunk_id]
        del self._added[mark:]


def roots_of(manifest: Manifest) -> list[LocatedFrame]:
    """Return the local frames of a manifest that need no base.

    Of a checkpoint that stays, only these may serve older checkpoints, because its bases may be rewritten later.
    """
    return [
        LocatedFrame(frame, manifest.packs[frame.pack], None)
        for frame in manifest.frames
        if frame.base < 0 and manifest.packs[frame.pack].tier == LOCAL_TIER
    ]


def needs_others(manifest: Manifest) -> bool:
    """Return whether a restore needs chunks that are not part of the state."""
    return len(manifest.frames) > len(manifest.chunks)


@dataclass(slots=True)
class Sketch:
    """A planned form of a checkpoint.

    Args:
        manifest: As it is stored now.
        plan: How it is cut into chunks.
        selection: The base, the form of each chunk, and why.
        in_place: Frames that stay where they are, by chunk.
        frames: The frame of each chunk. Sizes of new frames are estimates.
        is_new: For each chunk, whether its frame is new.
    """

    manifest: Manifest
    plan: CommitPlan
    selection: BaseSelection
    in_place: dict[ChunkId, LocatedFrame]
    frames: list[LocatedFrame] = field(init=False, default_factory=list)
    is_new: list[bool] = field(init=False, default_factory=list)
    _frame_of: dict[ChunkId, FrameRef] = field(init=False)

    def __post_init__(self) -> None:
        self._frame_of = {frame.chunk_id: frame for frame in self.manifest.frames}

    def with_frames_in_place(self, in_place: dict[ChunkId, LocatedFrame], placed: ChunkIndex) -> Sketch:
        """Return the same form with other frames that stay in place."""
        other = Sketch(self.manifest, self.plan, self.selection, in_place)
        other.place(placed)
        return other

    def place(self, placed: ChunkIndex) -> None:
        """Give every chunk a frame: one from the index, one that stays in place, or a new one."""
        bits = self._bits()
        found: dict[int, LocatedFrame] = {}
        new: set[int] = set()
        forms = self.selection.plans
        for index in sorted(range(len(forms)), key=lambda index: forms[index].master is not None):
            chunk, form = self.manifest.chunks[index], forms[index]
            chunk_id = ChunkId(chunk.chunk_id)
            known = placed.find(chunk_id) or self.in_place.get(chunk_id)
            if known is None:
                new.add(index)
                base = form.base if form.master is None else found[form.master]
                estimate = chunk.nbytes * bits.get(index, 8.0 * chunk.element_width) / (8 * chunk.element_width)
                stored_nbytes = 1 if form.master is not None else max(1, min(chunk.nbytes, round(estimate)))
                stored_nbytes = self._known_stored_nbytes(chunk_id, base, chunk.nbytes) or stored_nbytes
                depth = 0 if base is None else base.frame.depth + 1
                known = LocatedFrame(FrameRef(chunk_id, 0, 0, stored_nbytes, -1, depth), _PLANNED_PACK, base)
            found[index] = known
        self.frames = [found[index] for index in range(len(forms))]
        self.is_new = [index in new for index in range(len(forms))]

    def _known_stored_nbytes(self, chunk_id: ChunkId, base: LocatedFrame | None, nbytes: int) -> int | None:
        """Return the stored bytes of a chunk that is already coded against this base: better than an estimate."""
        frame = self._frame_of[chunk_id]
        base_id = self.manifest.frames[frame.base].chunk_id if frame.base >= 0 else None
        has_this_base = base_id == (None if base is None else base.frame.chunk_id) and frame.stored_nbytes < nbytes
        return frame.stored_nbytes if has_this_base else None

    def _bits(self) -> dict[int, float]:
        """Return the estimated bits per element of each sampled chunk."""
        bits: dict[int, float] = {}
        for sampled, view in zip(self.selection.sampled, self.selection.decision.kinds, strict=True):
            against = None if view is None else sampled.estimate.against(view)
            for index in sampled.unit.chunks:
                has_base = self.selection.plans[index].base is not None
                bits[index] = against.bits if has_base and against is not None else sampled.estimate.full_bits
        return bits

    @property
    def written_nbytes(self) -> int:
        """Bytes of new frames."""
        return sum(known.frame.frame_nbytes for known, is_new in zip(self.frames, self.is_new, strict=True) if is_new)

    @property
    def packed_nbytes(self) -> int:
        """Size of a pack that contains the new frames; 0 without new frames."""
        new = [known.frame.stored_nbytes for known, is_new in zip(self.frames, self.is_new, strict=True) if is_new]
        frames = align_up(sum(map(frame_extent, new)), PACK_ALIGN)
        directory = align_up(len(new) * DIRECTORY_ENTRY_NBYTES, PACK_ALIGN)
        return SUPERHEADER_NBYTES + frames + directory + TAIL_NBYTES if new else 0

    @property
    def moved_nbytes(self) -> int:
        """Bytes of frames of the checkpoint's own chunks that are replaced."""
        return sum(nbytes for key, nbytes in self._own().items() if key not in self.keys_in_place())

    @property
    def stored_before(self) -> int:
        """Bytes of the frames of the checkpoint's own chunks now."""
        return sum(self._own().values())

    @property
    def stored_after(self) -> int:
        """The same afterwards, without frames shared with newer checkpoints."""
        return self.written_nbytes + sum(self.keys_in_place().values())

    @property
    def read_before(self) -> int:
        """Bytes that a restore reads now."""
        return sum(frame.frame_nbytes for frame in self.manifest.frames)

    @property
    def read_after(self) -> int:
        """Bytes that a restore reads afterwards."""
        links = {link.frame.chunk_id: link.frame.frame_nbytes for known in self.frames for link in known.closure()}
        return sum(links.values())

    def keys_in_place(self) -> dict[Key, int]:
        """Return the frames that stay where they are, with their bytes."""
        return {(k.pack.pack_id, k.frame.offset): k.frame.frame_nbytes for k in self.in_place.values()}

    def _own(self) -> dict[Key, int]:
        chunk_ids = {chunk.chunk_id for chunk in self.manifest.chunks}
        sizes = sizes_of(self.manifest).items()
        return {
            key: n for (key, n), frame in zip(sizes, self.manifest.frames, strict=True) if frame.chunk_id in chunk_ids
        }

    def planned(self) -> Manifest:
        """Return the planned manifest, as the next older checkpoint sees it."""
        packs, frames = locate(self.frames)
        return replace(self.manifest, packs=tuple(packs), frames=tuple(frames), decisions=self.decisions)

    @property
    def decisions(self) -> Decisions | None:
        """The decisions that its manifest would record."""
        return self.selection.decisions([UNSAMPLED] * len(self.manifest.storages))

    def unchanged(self) -> Manifest:
        """Return the present manifest as a keyframe, as the next older checkpoint sees it."""
        return replace(self.manifest, decisions=None)

    def follow(self, bases: BaseCache, manifest: Manifest) -> None:
        """Let the next older checkpoint be coded against this one."""
        self.selection.remember(bases, manifest, [ChunkId(chunk.chunk_id) for chunk in self.manifest.chunks])


def sketch(
    repository: Repository,
    manifest: Manifest,
    placed: ChunkIndex,
    bases: BaseCache,
    policy: Policy,
    *,
    is_keyframe: bool,
    in_place: dict[ChunkId, LocatedFrame],
) -> Sketch:
    """Read samples of a checkpoint and plan its form.

    Args:
        repository: The store.
        manifest: The checkpoint.
        placed: Frames that it may share or use as bases.
        bases: The next newer checkpoint, and its keyframe.
        policy: How to code it.
        is_keyframe: Code every chunk without a base.
        in_place: Frames of it that others need where they are.

    Raises:
        CorruptError: Stored bytes are damaged.
        UnsupportedError: Its tensors do not cover its chunks.
    """
    plan = plan_of(manifest)
    with stored_state(repository, manifest) as state:
        selection = select_bases(state.captured(), plan, placed, bases, policy, repository.limits)
    if is_keyframe:
        whole = tuple(replace(form, base=None, is_unsampled=False) for form in selection.plans)
        decision = Decision((None,) * len(selection.sampled), "keyframe: among the newest, for fast restores")
        selection = replace(selection, plans=whole, decision=decision)
    found = Sketch(manifest, plan, selection, in_place)
    found.place(placed)
    return found


Key = tuple[PackId, int]
"""A frame, by pack and offset."""


def sizes_of(manifest: Manifest) -> dict[Key, int]:
    """Return the bytes of every frame of a manifest, in the manifest's order."""
    return {(manifest.packs[frame.pack].pack_id, frame.offset): frame.frame_nbytes for frame in manifest.frames}


class Ledger:
    """Which checkpoints of a run need which frames and packs. The newest checkpoint has rank 0."""

    def __init__(self) -> None:
        self.packs: dict[PackId, int] = {}
        """Sizes of the packs that checkpoints of the run name."""
        self._spans: dict[Key | PackId, tuple[int, int]] = {}
        self._bases: set[Key] = set()
        self._elsewhere: set[Key | PackId] = set()
        self._packs_of: list[set[PackId]] = []

    @classmethod
    def of(cls, repository: Repository, names: Sequence[ManifestName]) -> Ledger:
        """Read every manifest of the store.

        Args:
            repository: The store.
            names: The run's manifests, newest first.

        Raises:
            CorruptError: A checkpoint of the run is damaged, or lacks a pack.
        """
        ledger = cls()
        for rank, name in enumerate(names):
            ledger._add(rank, load_whole(repository, name))
        for run in repository.runs():
            manifests = repository.manifests_of(run)
            for name in manifests.listing().names if run != repository.run else ():
                try:
                    keys = sizes_of(manifests.load(name))
                except FileNotFoundError:
                    # It was deleted or replaced meanwhile. Whatever that frees only improves the plan.
                    continue
                ledger._elsewhere.update(keys, (pack_id for pack_id, _ in keys))
        return ledger

    def _add(self, rank: int, manifest: Manifest) -> None:
        keys = list(sizes_of(manifest))
        needed: list[Key | PackId] = [*keys, *(pack.pack_id for pack in manifest.packs)]
        for key in needed:
            self._spans[key] = self._spans.get(key, (rank, rank))[0], rank
        self._bases.update(keys[frame.base] for frame in manifest.frames if frame.base >= 0)
        self._packs_of.append({pack.pack_id for pack in manifest.packs})
        self.packs.update({pack.pack_id: pack.nbytes for pack in manifest.packs})

    def groups(self) -> Iterator[tuple[int, int]]:
        """Yield the first and last rank of each group. No frame is a base in one group and needed in another."""
        reach = list(range(len(self._packs_of)))
        for key in self._bases:
            first, last = self._spans[key]
            reach[first] = max(reach[first], last)
        begin, end = 0, -1
        for rank, farthest in enumerate(reach):
            if rank > end >= 0:
                yield begin, end
                begin = rank
            end = max(end, farthest)
        if reach:
            yield begin, end

    def is_needed_outside(self, key: Key | PackId, first: int, last: int) -> bool:
        """Return whether a frame or pack is needed by a checkpoint outside these ranks, or by another run."""
        span = self._spans[key]
        return span[0] < first or span[1] > last or key in self._elsewhere

    def packs_nbytes(self, kept: Iterable[int], in_place: Iterable[PackId]) -> int:
        """Return the bytes of packs that are needed if only checkpoints of these ranks keep their frames.

        Args:
            kept: Ranks of checkpoints that stay as they are.
            in_place: Packs of frames that rewritten checkpoints leave where they are.
        """
        needed = set(in_place).union(*(self._packs_of[rank] for rank in kept))
        return sum(nbytes for pack_id, nbytes in self.packs.items() if pack_id in needed)
