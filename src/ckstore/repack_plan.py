"""Decide how the checkpoints of a run are stored anew: which become keyframes, which differences, which stay.

Checkpoints are taken from the newest to the oldest, and each is planned as a commit that follows the one before it
here: older ones are differences from newer ones, so that the newest are restored fastest. What comes out is data;
``repack`` carries it out, and a dry run prints it.

Checkpoints that are coded against common frames form a group. It is rewritten whole or not at all: the bases of one
that stays would keep the others' bytes alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ckstore.bases import Bases
from ckstore.basing import Basing
from ckstore.config import Policy, RepackPolicy
from ckstore.errors import ConflictError
from ckstore.format.layout import ManifestName
from ckstore.format.manifest import Manifest
from ckstore.ids import ChunkId, PackId
from ckstore.repack_ledger import Ledger
from ckstore.repack_sketch import Placed, Sketch, needs_others, roots_of, sketch
from ckstore.store.known import KnownFrame
from ckstore.store.parts import Parts
from ckstore.store.references import load_whole

Action = Literal["keyframe", "delta", "keep"]


class ChunkForm(NamedTuple):
    """How one chunk is coded: against a base (a chunk's identity), as the rounding of a master (an index), or whole."""

    base: ChunkId | None
    is_tried: bool
    master: int | None


@dataclass(frozen=True, slots=True)
class Rewrite:
    """How the chunks of one checkpoint are coded, which of them stay where they are, and why."""

    forms: tuple[ChunkForm, ...]
    in_place: frozenset[ChunkId]
    basing: Basing

    @classmethod
    def of(cls, sketch: Sketch) -> Rewrite:
        """Keep of a sketch what the act needs, and nothing that grows with the state's bytes."""
        forms = tuple(
            ChunkForm(None if form.base is None else form.base.frame.chunk_id, form.is_tried, form.master)
            for form in sketch.basing.forms
        )
        surveyed = tuple(replace(each, samples={}, frames={}) for each in sketch.basing.surveyed)
        return cls(forms, frozenset(sketch.in_place), replace(sketch.basing, forms=(), surveyed=surveyed))


@dataclass(frozen=True, slots=True)
class Member:
    """What is planned for one checkpoint; what comes after the act is an estimate.

    Args:
        name: Its manifest.
        action: What is done with it.
        reason: Why, in a sentence.
        base_seq: The checkpoint whose chunks, or their roots, serve as bases.
        stored_before: Bytes of the frames of its own chunks.
        stored_after: The same afterwards; frames that newer checkpoints hold count there.
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
    """What is to be done, the newest checkpoint first, and the bytes of packs that the run needs before and after."""

    members: tuple[Member, ...]
    packs_before: int
    packs_after: int

    @property
    def written_nbytes(self) -> int:
        """About how many bytes will be written."""
        return sum(member.written_nbytes for member in self.members)


def plan_repack(
    parts: Parts, wanted: RepackPolicy, policy: Policy, *, on_progress: Callable[[int, int], None] | None = None
) -> RepackPlan:
    """Look at every checkpoint of the run, read samples of it, and decide.

    Args:
        parts: The store.
        wanted: What the newest and the older ones shall become.
        policy: Threads and memory.
        on_progress: Called with checkpoints looked at and checkpoints in all.

    Raises:
        CorruptError: A checkpoint of the run is damaged: it must be repaired or deleted first.
        ConflictError: Another has replaced one meanwhile.
    """
    names = list(reversed(parts.manifests.listing().names))
    ledger = Ledger.of(parts, names)
    planner = _Planner(parts, wanted, policy, ledger, on_progress or (lambda done, total: None), len(names))
    members: list[Member] = []
    for first, last in ledger.groups():
        members += planner.group(names[first : last + 1], first)
    kept = [rank for rank, member in enumerate(members) if member.rewrite is None]
    after = ledger.packs_nbytes(kept, planner.packs_in_place)
    plan = RepackPlan(tuple(members), sum(ledger.packs.values()), after)
    return replace(plan, packs_after=after + plan.written_nbytes)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What becomes of a checkpoint.

    Args:
        member: As it is told.
        sketch: Its form; None if it stays.
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


class _Live:
    """Bytes of packs that a group takes, other than those that are needed outside of it anyhow."""

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
        """Bytes of packs, new ones too."""
        return self._written + sum(self._ledger.packs[pack_id] for pack_id in self._packs)


class _Planner:
    """Plans group by group, the newest first."""

    def __init__(
        self,
        parts: Parts,
        wanted: RepackPolicy,
        policy: Policy,
        ledger: Ledger,
        tell: Callable[[int, int], None],
        count: int,
    ) -> None:
        self.packs_in_place: set[PackId] = set()
        self._parts = parts
        self._wanted = wanted
        self._policy = replace(
            policy,
            compression=wanted.compression,
            delta=True,
            read_amplification_max=wanted.read_amplification_max,
            base_cache="none",
        )
        self._ledger = ledger
        self._tell = tell
        self._count = count
        self._placed = Placed()
        self._bases = Bases()
        self._last: Sketch | None = None
        self._keyframes_left = wanted.keyframes

    def group(self, names: Sequence[ManifestName], first: int) -> list[Member]:
        """Plan a group whose newest checkpoint has rank ``first``."""
        mark, last = self._placed.mark(), first + len(names) - 1
        # The two ways it can go: all of it is rewritten that gains by it, or only keyframes that were asked for.
        live, live_otherwise = _Live(self._ledger, first, last), _Live(self._ledger, first, last)
        outcomes, otherwise = [], []
        for rank, name in enumerate(names, first):
            manifest = self._load(name)
            outcome, other = self._draft(manifest, rank, live)
            live.add(outcome, manifest)
            live_otherwise.add(other, manifest)
            outcomes.append(outcome)
            otherwise.append(other)
        is_worth_it = live.nbytes <= (1 - self._wanted.saving_min) * live_otherwise.nbytes
        if any(outcome.sketch for outcome in outcomes) and not is_worth_it:
            self._take_back(otherwise, mark)
            what = "rewriting it with all that share its bases" if len(names) > 1 else "rewriting"
            reason = _told(what, live.nbytes, live_otherwise.nbytes)
            outcomes = [_with_reason(outcome, reason) for outcome in otherwise]
        self.packs_in_place.update(*(outcome.packs_in_place for outcome in outcomes))
        return [outcome.member for outcome in outcomes]

    def _load(self, name: ManifestName) -> Manifest:
        manifest = load_whole(self._parts, name)
        if manifest.header.generation != name.generation:
            raise ConflictError(f"seq {name.seq} was replaced while it was looked at", todo="plan again")
        return manifest

    def _draft(self, manifest: Manifest, rank: int, live: _Live) -> tuple[_Outcome, _Outcome]:
        """Return what becomes of a checkpoint if its group is rewritten, and otherwise."""
        is_forced = self._keyframes_left > 0 and not manifest.header.is_archival
        self._keyframes_left -= is_forced
        found = self._sketch(manifest, live, is_forced=is_forced)
        self._tell(rank + 1, self._count)
        self._last = found
        refusal = self._refusal(found, is_forced=is_forced)
        if refusal is not None:
            self._placed.put(roots_of(manifest))
            found.follow(self._bases, found.unchanged())
            stays = _Outcome(_kept(found, refusal))
            return stays, stays
        otherwise = _Outcome(_kept(found, ""))
        if is_forced:
            in_place = self._in_place(manifest, 0, self._wanted.keyframes - 1)
            alone = found.leaving(in_place, self._placed)
            otherwise = _Outcome(_rewritten(alone), alone)
        self._placed.put(found.frames)
        found.follow(self._bases, found.planned())
        return _Outcome(_rewritten(found), found), otherwise

    def _sketch(self, manifest: Manifest, live: _Live, *, is_forced: bool) -> Sketch:
        in_place = self._in_place(manifest, live.first, live.last)
        return sketch(
            self._parts, manifest, self._placed, self._bases, self._policy, is_keyframe=is_forced, in_place=in_place
        )

    def _in_place(self, manifest: Manifest, first: int, last: int) -> dict[ChunkId, KnownFrame]:
        """Return frames of a checkpoint's own chunks that are needed where they are outside of a range of ranks."""
        own = {chunk.chunk_id for chunk in manifest.chunks}
        return {
            known.frame.chunk_id: known
            for known in roots_of(manifest)
            if known.frame.chunk_id in own
            and self._placed.find(known.frame.chunk_id) is None
            and self._ledger.is_needed_outside((known.pack.pack_id, known.frame.offset), first, last)
        }

    def _refusal(self, found: Sketch, *, is_forced: bool) -> str | None:
        """Return why a checkpoint stays as it is whatever its group does, or None."""
        if found.manifest.losses:
            # Coded without a loss, a reconstruction takes as much as what it stands for.
            return "it was stored with a loss, and stays as it is"
        least = 1 - self._wanted.saving_min
        if needs_others(found.manifest):
            is_faster = found.read_after <= least * found.read_before
            return None if is_faster or not is_forced else _told("a keyframe", found.read_after, found.read_before)
        if found.written_nbytes <= least * found.moved_nbytes:
            return None
        return _told("rewriting", found.written_nbytes, found.moved_nbytes)

    def _take_back(self, outcomes: Sequence[_Outcome], mark: int) -> None:
        """Place a group again of which only keyframes that were asked for are rewritten."""
        assert self._last is not None, "a group has a checkpoint"
        self._placed.back_to(mark)
        for outcome in outcomes:
            frames = outcome.sketch.frames if outcome.sketch else roots_of(self._load(outcome.member.name))
            self._placed.put(frames)
        self._bases = Bases()
        last = outcomes[-1].sketch
        self._last.follow(self._bases, self._last.unchanged() if last is None else last.planned())


def _with_reason(outcome: _Outcome, reason: str) -> _Outcome:
    if outcome.sketch is not None or outcome.member.reason:
        return outcome
    return _Outcome(replace(outcome.member, reason=reason))


def _told(what: str, after: int, before: int) -> str:
    """Say what a change would save, in a sentence."""
    if not before:
        return f"{what} would free nothing: others need its packs"
    saved = 1 - after / before
    return f"{what} would save {saved:.1%}" if saved >= 0 else f"{what} would cost {-saved:.1%} more"


def _rewritten(found: Sketch) -> Member:
    verdict, choices = found.basing.verdict, found.choices
    return Member(
        name=_name_of(found.manifest),
        action="keyframe" if verdict.is_keyframe else "delta",
        reason=verdict.reason,
        base_seq=None if choices is None else choices.base_seq,
        stored_before=found.stored_before,
        stored_after=found.stored_after,
        read_before=found.read_before,
        read_after=found.read_after,
        state_nbytes=found.manifest.header.bytes_state,
        written_nbytes=found.packed_nbytes,
        rewrite=Rewrite.of(found),
    )


def _kept(found: Sketch, reason: str) -> Member:
    stored, read = found.stored_before, found.read_before
    state_nbytes = found.manifest.header.bytes_state
    return Member(_name_of(found.manifest), "keep", reason, None, stored, stored, read, read, state_nbytes)


def _name_of(manifest: Manifest) -> ManifestName:
    header = manifest.header
    return ManifestName(header.run, header.seq, header.step, header.generation)
