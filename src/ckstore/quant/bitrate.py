"""Search the quantization steps with which a parameter takes about ``bits_per_parameter`` bits, and not more.

A weight and its moments share one scale, found by bisection over powers of two. Every trial quantizes and codes some
chunks as the commit will, and discards the result. The manifest records the chosen steps, and ``bounds`` still checks
the bytes that were actually written.

Invariants:
- Without a target nothing here runs, and the steps are those of the settings.
- A trial has no side effects: it writes no frame, records no error and holds no chunk.
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
"""Range of the scale, as powers of two."""

_TRIALS = 5
_SAMPLES_MAX = 3
_SAMPLED_SHARE = 0.97
"""Share of the target to aim at if only some chunks are tried: the others may take a little more."""

_NEAR_ENOUGH = 0.95
_STEP_MIN, _STEP_MAX = 1e-3, 100.0
_LOG_STEP_MIN, _LOG_STEP_MAX = 1.0 / 64, 4.0

Stepped = TypeVar("Stepped", WeightSettings, FirstMomentSettings)


def scaled(tensor: LossyTensor, octaves: float) -> LossyTensor:
    """Return the tensor with steps that are 2**octaves as wide; an exact tensor is returned unchanged."""
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
    # A larger error of coarser steps must not make the matrix fall back to a grid, which takes more bits.
    error_max = min(1.0, low_rank.error_max * max(1.0, scale * scale))
    # With finer steps more directions are worth their bits.
    rank_max = min(RANK_MAX, math.ceil(low_rank.rank_max / min(1.0, scale)))
    return replace(low_rank, step=_step(low_rank.step * scale), rank_max=rank_max, error_max=error_max)


def _step(step: float) -> float:
    return min(_STEP_MAX, max(_STEP_MIN, step))


def octaves_for(target: float, bits_at: Callable[[float], float]) -> float:
    """Return the scale, as a power of two, with which steps take at most ``target`` bits, and about as many.

    Args:
        target: Bits per element.
        bits_at: Returns the bits per element for steps of a given scale.
    """
    bits = bits_at(0.0)
    if _NEAR_ENOUGH * target <= bits <= target:
        return 0.0
    # Coarser steps take fewer bits. Find the finest steps that take few enough.
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
    """Return the tasks at a few positions of a parameter, and True if these are all of its tasks."""
    places = sorted({offset_of(task) for task in tasks})
    if len(places) > _SAMPLES_MAX:
        last = len(places) - 1
        chosen = {places[last * number // (_SAMPLES_MAX - 1)] for number in range(_SAMPLES_MAX)}
        return [task for task in tasks if offset_of(task) in chosen], False
    return list(tasks), True


def seek(context: TaskContext, tasks: Sequence[Task], target: float, thread: CodingThread, *, is_all: bool) -> float:
    """Return the scale, as a power of two, for the steps of one parameter.

    Args:
        context: Provides the chunks for the trials.
        tasks: Some tasks of the parameter.
        target: Bits per element that all its tensors together may take.
        thread: Memory of this thread.
        is_all: ``tasks`` are all tasks of the parameter.
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
    """A task context with scaled steps that discards all results."""

    context: TaskContext
    octaves: float
    counts: dict[int, int]

    def __init__(self, context: TaskContext, octaves: float) -> None:
        self.context, self.octaves, self.counts = context, octaves, {}

    @property
    def policy(self) -> Policy:
        """How the state is stored."""
        return self.context.policy

    @property
    def plan(self) -> CommitPlan:
        """How the state is cut into chunks."""
        return self.context.plan

    def gather_for(self, index: int, purpose: BufferPurpose, thread: CodingThread) -> memoryview:
        """Return the plain bytes of a chunk."""
        return self.context.gather_for(index, purpose, thread)

    def base_plain_of(self, base: LocatedFrame, nbytes: int, thread: CodingThread) -> memoryview | None:
        """Return the plain bytes of a base; None if they cannot be read."""
        return self.context.base_plain_of(base, nbytes, thread)

    def reconstruction_for(self, index: int, purpose: BufferPurpose, thread: CodingThread) -> memoryview:
        """Return memory for the reconstruction of a chunk."""
        return self.context.reconstruction_for(index, purpose, thread)

    def hold(self, index: int, chunk_id: ChunkId, plain: memoryview, *, is_own: bool) -> None:
        """Do nothing."""

    def note(self, index: int, errors: Errors | Distance, *, max_update_ratio: float = 0.0, method: str = "") -> None:
        """Do nothing."""

    def note_inflated(self, index: int, sum_sq_error: float) -> None:
        """Do nothing; the commit will record it."""

    def fail(self, index: int, why: str) -> None:
        """Do nothing; the commit will find the same."""

    def leave(self, index: int) -> None:
        """Do nothing; the commit will find the same."""

    def tensor_of(self, index: int) -> LossyTensor:
        """Return the tensor of a chunk, with scaled steps."""
        return scaled(self.context.tensor_of(index), self.octaves)
