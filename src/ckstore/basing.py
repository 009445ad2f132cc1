"""Decide for one commit what each chunk is coded against, and say why.

survey -> decide -> a form for every chunk. Without a base, or where a policy wants none, every chunk is coded whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckstore.bases import Bases, first_paths
from ckstore.capture import Captured
from ckstore.choice import Verdict, View, decide
from ckstore.config import Limits, Policy
from ckstore.format.choices import DELTA, DERIVED, FULL, IDENTICAL, RESIDUAL, UNSAMPLED, Choices, StorageChoice
from ckstore.format.manifest import Manifest
from ckstore.ids import ChunkId
from ckstore.lossy import Candidates, LossyPlan
from ckstore.lossy_plan import plan_lossy
from ckstore.masters import masters_of
from ckstore.plan import CommitPlan
from ckstore.store.known import Known, KnownFrame
from ckstore.survey import Surveyed, Surveyor, storage_choice, units_of

if TYPE_CHECKING:
    # Only types here: what writes chunks asks this module for their forms.
    from ckstore.tensor import StorageSpec
    from ckstore.written import Stored


@dataclass(frozen=True, slots=True)
class Form:
    """How a chunk is to be stored, if it is not known already.

    Args:
        base: The frame of the chunk it is coded against; None: whole.
        is_tried: The base was never sampled: code whole where a sample of it says so.
        master: The chunk of the plan whose rounding it may be.
        is_held: Its plain bytes will be wanted as a base.
    """

    base: KnownFrame | None = None
    is_tried: bool = False
    master: int | None = None
    is_held: bool = False


WHOLE = Form()


@dataclass(frozen=True, slots=True)
class Basing:
    """What was decided for one commit.

    Args:
        forms: One for each chunk of the plan.
        verdict: The base, and why.
        surveyed: What was sampled; empty where nothing was to be decided.
        seqs: For each view, the checkpoint that the bases belong to.
        lossy: What is stored with a loss; None: nothing.
    """

    forms: tuple[Form, ...]
    verdict: Verdict
    surveyed: tuple[Surveyed, ...] = ()
    seqs: dict[View, int | None] = field(default_factory=dict)
    lossy: LossyPlan | None = None

    def remember(self, bases: Bases, manifest: Manifest, chunk_ids: Sequence[ChunkId]) -> None:
        """Let the next commit follow the manifest that this one became; ``chunk_ids`` are those of the plan."""
        for surveyed in self.surveyed:
            for index, sample in surveyed.samples.items():
                bases.keep_sample(chunk_ids[index], sample)
        bases.follow(manifest)

    def modes(self, storages: Sequence[StorageSpec], stored: Stored) -> list[int]:
        """Return the mode that each storage came out with, given what became of its chunks."""
        lost = {loss.storage for loss in stored.losses}
        modes = []
        for index, storage in enumerate(storages):
            new = [piece.chunk for piece in storage.pieces if stored.is_new[piece.chunk]]
            if index in lost:
                modes.append(RESIDUAL)
            elif not new:
                modes.append(IDENTICAL)
            elif any(stored.is_derived[chunk] for chunk in new):
                modes.append(DERIVED)
            elif any(stored.frames[chunk].base is not None for chunk in new):
                modes.append(DELTA)
            else:
                modes.append(FULL if self.surveyed else UNSAMPLED)
        return modes

    def choices(self, modes: Sequence[int], came_out: Sequence[float | None] | None = None) -> Choices | None:
        """Return what the manifest says, given the mode and the bits per element that each storage came out with."""
        if not self.surveyed:
            return None
        view = self.verdict.view
        views = self.verdict.views
        told, lossy = self.verdict.reason, self.lossy
        if lossy is not None and lossy.tasks:
            # The bound on reading is that of whole states: a few numbers read many times over are nothing in one.
            told = f"the rest: {self.verdict.saving or told}"
        if lossy is not None and lossy.reason:
            told = f"{lossy.reason}; {told}"
        by_storage = {each.unit.storage: (each, view) for each, view in zip(self.surveyed, views, strict=True)}
        return Choices(
            base=self.verdict.base,
            base_seq=None if view is None else self.seqs[view],
            keyframe_seq=None if view is None else self.seqs["keyframe"],
            reason=told,
            storages=tuple(
                storage_choice(*by_storage[index], mode, came_out[index] if came_out else None)
                if index in by_storage
                else StorageChoice(mode)
                for index, mode in enumerate(modes)
            ),
        )


def choose_forms(
    captured: Captured,
    plan: CommitPlan,
    known: Known,
    bases: Bases,
    policy: Policy,
    limits: Limits,
    candidates: Candidates | None = None,
) -> Basing:
    """Choose the base of a commit and the form of every chunk; reads samples of the state and nothing of the store.

    Args:
        captured: The state.
        plan: How it is cut into chunks.
        known: Where chunks lie.
        bases: What the previous checkpoint holds.
        policy: How it is to be stored.
        limits: Bounds of the store.
        candidates: What of it may be stored with a loss.
    """
    masters = {} if policy.compression == "none" else masters_of(plan, captured.storages)
    paths = first_paths(captured.tree, [tensor.storage for tensor in captured.tensors])
    lossy: LossyPlan | None = None
    if candidates is not None:
        amplification = policy.read_amplification_max
        apart = _kept_roundings(plan, masters, candidates)
        with_master = {chunk: master for chunk, master in masters.items() if chunk not in apart}
        lossy = plan_lossy(
            candidates, plan, paths, with_master, known, bases, limits, read_amplification_max=amplification
        )
        # What a rule keeps is no rounding of a master that is about to change.
        masters = {
            chunk: master for chunk, master in masters.items() if not (chunk in apart and master in lossy.chunks)
        }
    quantized = frozenset() if lossy is None else lossy.chunks
    if policy.compression == "none" or not policy.delta:
        reason = "keyframe: the policy codes nothing" if policy.compression == "none" else "keyframe: no differences"
        verdict = Verdict((), reason)
        return Basing(_forms(plan, [], verdict, masters, is_held=frozenset()), verdict, lossy=lossy)
    surveyor = Surveyor(plan, captured.storages, paths, known, bases, limits.chunk_nbytes_max)
    surveyed = [
        surveyor.survey(unit)
        for unit in units_of(plan)
        if not all(chunk in masters or chunk in quantized for chunk in unit.chunks)
    ]
    verdict = decide(
        [each.estimate for each in surveyed],
        read_amplification_max=policy.read_amplification_max,
        depth_max=limits.depth_max,
    )
    is_held = frozenset(_held(surveyed, verdict)) if policy.base_cache == "memory" else frozenset()
    forms = _forms(plan, surveyed, verdict, masters, is_held=is_held)
    if lossy is not None:
        forms = _with_bases(forms, lossy, is_held=policy.base_cache == "memory")
    return Basing(forms, verdict, tuple(surveyed), {"previous": bases.seq, "keyframe": bases.keyframe_seq}, lossy)


def _kept_roundings(plan: CommitPlan, masters: Mapping[int, int], candidates: Candidates) -> frozenset[int]:
    """Return the chunks that may be roundings, and stay as they are by a rule that names them."""
    storage_of = {chunk: plan.chunks[chunk].sources[0].storage for chunk in masters}
    kept = {storage for storage in set(storage_of.values()) if candidates.keeps_exact(storage)}
    return frozenset(chunk for chunk, storage in storage_of.items() if storage in kept)


def _with_bases(forms: tuple[Form, ...], lossy: LossyPlan, *, is_held: bool) -> tuple[Form, ...]:
    """Return forms by which weights are stored if they are exact after all, and held if they are not."""
    found = list(forms)
    for task in lossy.tasks:
        if task.weight >= 0:
            found[task.weight] = Form(task.base, is_tried=True, is_held=is_held)
    return tuple(found)


def _forms(
    plan: CommitPlan,
    surveyed: Sequence[Surveyed],
    verdict: Verdict,
    masters: dict[int, int],
    *,
    is_held: frozenset[int],
) -> tuple[Form, ...]:
    forms = [Form(master=masters.get(index), is_held=index in is_held) for index in range(len(plan.chunks))]
    for each, view in zip(surveyed, verdict.views, strict=True):
        for index, frame in each.frames[view].items() if view is not None else ():
            if index not in masters:
                forms[index] = Form(frame, each.is_guess, None, index in is_held)
    return tuple(forms)


def _held(surveyed: Sequence[Surveyed], verdict: Verdict) -> list[int]:
    """Return the chunks that the next commit will want as bases, as far as this one can tell."""
    found: list[int] = []
    for each, view in zip(surveyed, verdict.views, strict=True):
        estimate = each.estimate
        is_candidate = estimate.previous is None or each.is_guess or estimate.pays("previous")
        # What has not changed is held already.
        is_candidate = is_candidate and estimate.identical_read_nbytes is None
        # What is coded against the keyframe will be so again: that one stays.
        if is_candidate and view != "keyframe":
            found += each.unit.chunks
    return found
