"""Scale the steps of a parameter's tensors until they take about as many bits as were asked for, and not more.

One scale for a weight and its moments, found by bisection over powers of two; every trial quantizes and codes some
chunks as the commit will, and keeps nothing. What is chosen is what the manifest records, and the bound is still held
against what was really written.

Invariants:
- Without a target nothing of this runs, and steps are what the settings say.
- A trial leaves no trace: no frame, no error, no held chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ckstore.commit.chunking import CommitPlan
from ckstore.commit.pipeline import BufferPurpose, CodingThread
from ckstore.config import FirstMomentSettings, LowRank, Policy, SecondMomentSettings, WeightSettings
from ckstore.hashing import ChunkId
from ckstore.quant.chunk_codec import Errors
from ckstore.quant.error_stats import Distance
from ckstore.quant.lowrank import RANK_MAX
from ckstore.quant.planning import LossyTensor, Task
from ckstore.quant.quantize_task import TaskCoder, TaskContext
from ckstore.store.chunk_index import LocatedFrame

FINEST, COARSEST = -3.0, 4.0
"""Powers of two that steps are scaled by, at most."""

_TRIALS = 5
_SAMPLES_MAX = 3
_SAMPLED_SHARE = 0.97
"""Chunks that were not tried may take a little more than those that were."""

_NEAR_ENOUGH = 0.95
_STEP_MIN, _STEP_MAX = 1e-3, 100.0
_LOG_STEP_MIN, _LOG_STEP_MAX = 1.0 / 64, 4.0

Stepped = TypeVar("Stepped", WeightSettings, FirstMomentSettings)


def scaled(tensor: LossyTensor, octaves: float) -> LossyTensor:
    """Return a tensor whose steps are so many powers of two wider; what has no steps stays as it is."""
    settings, scale = tensor.settings, 2.0**octaves
    if not octaves or isinstance(settings, str):
        return tensor
    if isinstance(settings, WeightSettings):
        return replace(tensor, settings=_stepped(settings, scale))
    if isinstance(settings, FirstMomentSettings):
        return replace(tensor, settings=_stepped(settings, scale))
    if isinstance(settings, SecondMomentSettings):
        log_step = min(_LOG_STEP_MAX, max(_LOG_STEP_MIN, settings.log_step * scale))
        return replace(tensor, settings=replace(settings, log_step=log_step, low_rank=_wider(settings.low_rank, scale)))
    return tensor


def _stepped(settings: Stepped, scale: float) -> Stepped:
    return replace(settings, step=_step(settings.step * scale), low_rank=_wider(settings.low_rank, scale))


def _wider(low_rank: LowRank | None, scale: float) -> LowRank | None:
    if low_rank is None:
        return None
    # What coarser steps leave over must not drive a matrix to the grid, which takes more.
    error_max = min(1.0, low_rank.error_max * max(1.0, scale * scale))
    # Finer steps find more directions worth keeping.
    rank_max = min(RANK_MAX, math.ceil(low_rank.rank_max / min(1.0, scale)))
    return replace(low_rank, step=_step(low_rank.step * scale), rank_max=rank_max, error_max=error_max)


def _step(step: float) -> float:
    return min(_STEP_MAX, max(_STEP_MIN, step))


def octaves_for(target: float, bits_at: Callable[[float], float]) -> float:
    """Return the powers of two by which steps take at most so many bits, and about as many.

    Args:
        target: Bits.
        bits_at: Bits that are taken with steps so many powers of two wider.
    """
    bits = bits_at(0.0)
    if _NEAR_ENOUGH * target <= bits <= target:
        return 0.0
    # Fewest bits lie at the coarse end; of those that are few enough the finest is wanted.
    fine, coarse = (0.0, COARSEST) if bits > target else (FINEST, 0.0)
    for _ in range(_TRIALS):
        middle = (fine + coarse) / 2
        bits = bits_at(middle)
        if bits > target:
            fine = middle
        else:
            coarse = middle
            if bits >= _NEAR_ENOUGH * target:
                break
    return coarse


def sample_of(tasks: Sequence[Task], offset_of: Callable[[Task], int]) -> tuple[list[Task], bool]:
    """Return tasks of the same few places of a parameter, and whether these are all there are."""
    places = sorted({offset_of(task) for task in tasks})
    if len(places) > _SAMPLES_MAX:
        last = len(places) - 1
        chosen = {places[last * number // (_SAMPLES_MAX - 1)] for number in range(_SAMPLES_MAX)}
        return [task for task in tasks if offset_of(task) in chosen], False
    return list(tasks), True


def seek(context: TaskContext, tasks: Sequence[Task], target: float, thread: CodingThread, *, is_all: bool) -> float:
    """Return the powers of two by which the steps of one parameter are to be scaled.

    Args:
        context: What the trials read from.
        tasks: Some of the parameter.
        target: Bits that all its tensors may take for each of its elements.
        thread: Memory to work in.
        is_all: These are all of them.
    """

    def bits_at(octaves: float) -> float:
        trial = Trial(context, octaves)
        nbytes = sum(_stored_nbytes(trial, task, thread) for task in tasks)
        return 8 * nbytes / max(1, max(trial.counts.values(), default=1))

    return octaves_for(target if is_all else _SAMPLED_SHARE * target, bits_at)


def _stored_nbytes(trial: Trial, task: Task, thread: CodingThread) -> int:
    own = {index for index in (task.weight, task.second, task.first) if index >= 0}
    for index in own:
        storage = trial.plan.chunks[index].sources[0].storage
        chunk = trial.plan.chunks[index]
        trial.counts[storage] = trial.counts.get(storage, 0) + chunk.nbytes // max(1, chunk.element_width)
    drafts = TaskCoder(trial, task, thread).drafts()
    return sum(draft.coded.encoded.nbytes for draft in drafts if draft.index in own)


@dataclass(slots=True, eq=False)
class Trial:
    """A context on which nothing is kept, with steps of another width."""

    context: TaskContext
    octaves: float
    counts: dict[int, int]

    def __init__(self, context: TaskContext, octaves: float) -> None:
        self.context, self.octaves, self.counts = context, octaves, {}

    @property
    def policy(self) -> Policy:
        """How much is checked and coded."""
        return self.context.policy

    @property
    def plan(self) -> CommitPlan:
        """What the indices of chunks count in."""
        return self.context.plan

    def gather_for(self, index: int, purpose: BufferPurpose, thread: CodingThread) -> memoryview:
        """Return the plain bytes of a chunk."""
        return self.context.gather_for(index, purpose, thread)

    def base_plain_of(self, base: LocatedFrame, nbytes: int, thread: CodingThread) -> memoryview | None:
        """Return the plain bytes of a base; None where they cannot be read."""
        return self.context.base_plain_of(base, nbytes, thread)

    def reconstruction_for(self, index: int, purpose: BufferPurpose, thread: CodingThread) -> memoryview:
        """Return memory for what a chunk becomes."""
        return self.context.reconstruction_for(index, purpose, thread)

    def hold(self, index: int, chunk_id: ChunkId, plain: memoryview, *, is_own: bool) -> None:
        """Keep nothing."""

    def note(self, index: int, errors: Errors | Distance, *, max_update_ratio: float = 0.0, method: str = "") -> None:
        """Add nothing."""

    def note_inflated(self, index: int, sum_sq_error: float) -> None:
        """Let it be judged when it is stored."""

    def fail(self, index: int, why: str) -> None:
        """Leave it to the commit to find that out."""

    def leave(self, index: int) -> None:
        """Leave it to the commit to find that out."""

    def tensor_of(self, index: int) -> LossyTensor:
        """Return what the tensor of a chunk is, with other steps."""
        return scaled(self.context.tensor_of(index), self.octaves)
