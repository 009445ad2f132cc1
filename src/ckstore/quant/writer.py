"""Write the chunks of a commit of which some are quantized, and connect quantization with ``commit``.

What is hashed is the reconstruction: what the frame decodes to. One thread handles all chunks of the same elements:
a first moment is coded relative to the root of the second moment's reconstruction, and the rounding of a weight becomes
the rounding of the weight's reconstruction.

Invariants:
- The chunk id of a quantized frame is that of its reconstruction. Everything else treats it like any other chunk.
- A tensor that cannot be quantized as the policy says is stored exactly as a whole, with a warning.
- Bounds are applied before anything is published.

With a target of ``bits_per_parameter``, the steps are searched first: a parameter then takes about so many bits, and
not more. A weight and its moments share one scale, found by bisection over powers of two. Every trial quantizes and
codes some chunks as the commit will, and discards the result: it writes no frame, records no error and holds no chunk.
The manifest records the chosen steps, and ``bounds`` still checks the bytes that were written.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np

from ckstore.commit.base_selection import LossyChunks
from ckstore.commit.chunk_writer import ChunkWriter, EncodedChunk, PendingFrame, WriteResult, depth_of
from ckstore.commit.chunking import WHOLE, ChunkPlan, CommitPlan
from ckstore.commit.pipeline import BufferPurpose, CodingThread
from ckstore.concurrency import Turns
from ckstore.config import FirstMomentSettings, LowRank, Policy, Residual, SecondMomentSettings, WeightSettings
from ckstore.format.manifest import Loss, Manifest
from ckstore.hashing import ChunkId, chunk_id_of
from ckstore.quant.bounds import TensorOutcome, apply_bounds
from ckstore.quant.chunk_codec import Errors
from ckstore.quant.error_stats import Distance
from ckstore.quant.lowrank import RANK_MAX
from ckstore.quant.planning import Candidates, LossyPlan, LossyTensor, Task
from ckstore.quant.quantize_task import ChunkDraft, TaskCoder, TaskContext
from ckstore.quant.warnings import diverged_warnings, no_effect_warnings, rules_warnings
from ckstore.state.capture import Captured
from ckstore.store.chunk_index import LocatedFrame
from ckstore.store.memory_budget import QUANTIZE, MemoryBudget

_NAMED_COUNT = 8
"""Tensors that warnings name one by one."""


@dataclass(slots=True, eq=False)
class LossyChunkWriter(ChunkWriter):
    """A ``ChunkWriter`` that quantizes some chunks. It is the ``TaskContext`` of its tasks.

    Exact chunks that need no quantized chunk are written first, then the tasks, then the tensors that exceeded a
    bound, then roundings.
    """

    lossy: LossyPlan = field(kw_only=True)
    _outcomes: dict[int, TensorOutcome] = field(init=False, default_factory=dict)
    _without_master: list[int] = field(init=False, default_factory=list)
    _pairs: dict[int, int] = field(init=False, default_factory=dict)
    _groups: dict[int, int] = field(init=False, default_factory=dict)
    _masters: dict[int, int] = field(init=False, default_factory=dict)
    _guard: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        super(LossyChunkWriter, self).__post_init__()
        self._outcomes = {storage: TensorOutcome(tensor) for storage, tensor in self.lossy.tensors.items()}
        for task in self.lossy.tasks:
            for index in task.rounded:
                self._outcomes.setdefault(self._storage_of(index), TensorOutcome(None))
                self._masters[self._storage_of(index)] = self._storage_of(task.weight)
            if task.second >= 0:
                second, first = self._storage_of(task.second), self._storage_of(task.first)
                self._pairs[first] = second
        self._groups = {one: weight for one, weight in self.lossy.weight_of.items() if weight in self._outcomes}

    def _thread_budget(self, *, has_bases: bool) -> MemoryBudget:
        return QUANTIZE

    def _store(self, indices: Sequence[int]) -> None:
        chunks = self.lossy.chunks
        rest = [index for index in indices if index not in chunks]
        self._run([index for index in rest if self.plans[index].master is None])
        if self.lossy.residual.bits_per_parameter is not None:
            self._scale_steps(self.lossy.residual.bits_per_parameter)
        self._run_tasks()
        self._apply_bounds()
        again = self._to_be_stored_exactly()
        self._run([index for index in again if self.plans[index].master is None])
        self._run([index for index in sorted((*rest, *again)) if self.plans[index].master is not None])

    def flush(self) -> WriteResult:
        """Make the packs durable. Return where each chunk is stored, with the loss of each quantized storage."""
        stored = super(LossyChunkWriter, self).flush()
        payload_of = [frame.frame.stored_nbytes for frame in stored.frames]
        losses: list[Loss] = []
        for first, second in self._pairs.items():
            self._outcomes[second].max_update_ratio = self._outcomes[first].max_update_ratio
        for storage, outcome in sorted(self._outcomes.items()):
            spec = self.plan.storages[storage]
            nbytes = sum(payload_of[piece.chunk] for piece in spec.pieces if stored.is_new[piece.chunk])
            loss = outcome.loss(storage, 8 * nbytes * spec.element_width / spec.nbytes)
            losses += [] if loss is None else [loss]
        stored.losses = tuple(losses)
        return stored

    def _scale_steps(self, target: float) -> None:
        """Set the steps of every parameter so that its tensors take about ``target`` bits per element."""
        by_parameter: dict[int, list[Task]] = {}
        for task in self.lossy.tasks:
            storage = self._storage_of(task.weight if task.weight >= 0 else task.second)
            by_parameter.setdefault(self._groups.get(storage, storage), []).append(task)
        parameters = list(by_parameter.items())
        octaves = [0.0] * len(parameters)

        def step(turn: int, thread_index: int) -> None:
            tasks, is_all = sample_of(parameters[turn][1], self._offset_of)
            octaves[turn] = seek(self, tasks, target, self._thread(thread_index), is_all=is_all)

        self._run_in_turns(len(parameters), step, Turns())
        tensors = dict(self.lossy.tensors)
        for (_, tasks), each in zip(parameters, octaves, strict=True):
            storages = {self._storage_of(index) for task in tasks for index in task.chunks} & tensors.keys()
            for storage in storages:
                tensors[storage] = self._outcomes[storage].tensor = scaled(tensors[storage], each)
        self.lossy = replace(self.lossy, tensors=tensors)

    def _offset_of(self, task: Task) -> int:
        return self.plan.chunks[min(task.chunks)].sources[0].offset

    def _run_tasks(self) -> None:
        turns = Turns()

        def step(turn: int, thread_index: int) -> None:
            self._store_task(self.lossy.tasks[turn], turn, turns, thread_index)

        self._run_in_turns(len(self.lossy.tasks), step, turns)

    def _apply_bounds(self) -> None:
        apply_bounds(self._outcomes, self._pairs, self._groups, self._masters, self.lossy.residual)
        failed = [
            (outcome.tensor.path, outcome.failure)
            for outcome in self._outcomes.values()
            if outcome.failure and outcome.tensor
        ]
        self._warnings += [f"{path} was stored exactly: {failure}" for path, failure in failed[:_NAMED_COUNT]]
        if len(failed) > _NAMED_COUNT:
            # A bound that is too tight may concern hundreds of tensors. One line summarizes the rest.
            path, failure = failed[_NAMED_COUNT]
            rest = f"{len(failed) - _NAMED_COUNT} more tensors were stored exactly, of {len(self.lossy.tensors)}"
            self._warnings.append(f"{rest} that could lose something; {path}, for one: {failure}")

    def _to_be_stored_exactly(self) -> list[int]:
        """Return the chunks to store exactly: those of failed tensors, their roundings, and chunks without a master."""
        failed = {storage for storage, outcome in self._outcomes.items() if outcome.failure}
        again = set(self._without_master)
        own = list(self.plans)
        for task in self.lossy.tasks:
            if task.weight >= 0 and self._storage_of(task.weight) in failed:
                again.update((task.weight, *task.rounded))
                for index in task.rounded:
                    self._outcomes[self._storage_of(index)].fail("its master is exact")
            for index in (task.second, task.first):
                if index >= 0 and self._storage_of(index) in failed:
                    again.add(index)
        for index in self._without_master:
            # A chunk that is not the rounding of its supposed master is coded by itself, unless the master is exact.
            own[index] = WHOLE if own[index].master is None or not self._is_failed_master(index, failed) else own[index]
        self.plans = own
        return sorted(again)

    def _is_failed_master(self, index: int, failed: set[int]) -> bool:
        master = self.plans[index].master
        return master is not None and self._storage_of(master) in failed

    def _storage_of(self, index: int) -> int:
        return self.plan.chunks[index].sources[0].storage

    # One task

    def _store_task(self, task: Task, turn: int, turns: Turns, thread_index: int) -> None:
        thread = self._thread(thread_index)
        drafts = TaskCoder(self, task, thread).drafts()
        waiting: list[tuple[PendingFrame, EncodedChunk, ChunkPlan]] = []
        waiting_nbytes = 0
        with turns.turn(turn):
            for draft in drafts:
                # At most one chunk's bytes are reserved and not filled. With more, threads could wait for each other.
                if waiting_nbytes + draft.coded.encoded.nbytes > self.repository.limits.chunk_nbytes_max:
                    self._fill_all(waiting, thread)
                    waiting, waiting_nbytes = [], 0
                frame = self._put(draft)
                if frame is not None:
                    waiting.append((frame, draft.coded, self.plan.chunks[draft.index]))
                    waiting_nbytes += draft.coded.encoded.nbytes
        self._fill_all(waiting, thread)

    def _put(self, draft: ChunkDraft) -> PendingFrame | None:
        """Reserve space for a chunk; None if it needs no frame."""
        existing = self.repository.chunk_index.find(draft.chunk_id)
        outcome = self._outcomes[self._storage_of(draft.index)]
        if draft.chunk_id not in self._pending and existing is not None:
            # An existing frame costs this commit nothing.
            self._results[draft.index] = existing
            return None
        if draft.base_chunk >= 0:
            base = self._results[draft.base_chunk]
            assert base is not None, "a chunk comes after its base"
            if depth_of(base) >= self.repository.limits.depth_max:
                outcome.fail("its chain of bases is too long")
                return None
            draft.coded.base = base
        frame, is_first = self._reserve_frame(draft.index, draft.chunk_id, draft.coded)
        outcome.stored_nbytes += frame.slot.stored_nbytes
        return frame if is_first else None

    def _fill_all(self, waiting: Sequence[tuple[PendingFrame, EncodedChunk, ChunkPlan]], thread: CodingThread) -> None:
        for frame, coded, chunk in waiting:
            self._fill(frame, coded, thread.worker, chunk)

    # What a task asks for

    def gather_for(self, index: int, purpose: BufferPurpose, thread: CodingThread) -> memoryview:
        """Return the plain bytes of a chunk, copied to the thread's memory unless the frame will be decoded again."""
        private = None if self.policy.verify_encoded else thread.worker.buffer(purpose)
        return thread.worker.gather(self.plan.chunks[index], self.storages, private=private)

    def base_plain_of(self, base: LocatedFrame, nbytes: int, thread: CodingThread) -> memoryview | None:
        """Return the plain bytes of a base; None if they cannot be read."""
        return self._base_plain(base, nbytes, thread)

    def reconstruction_for(self, index: int, purpose: BufferPurpose, thread: CodingThread) -> memoryview:
        """Return memory for a reconstruction: memory of its own if the next commit will need it."""
        nbytes = self.plan.chunks[index].nbytes
        return np.empty(nbytes, np.uint8).data if self.plans[index].is_held else thread.worker.buffer(purpose)[:nbytes]

    def hold(self, index: int, chunk_id: ChunkId, plain: memoryview, *, is_own: bool) -> None:
        """Hold a reconstruction for the next commit if the plan says so."""
        if not self.plans[index].is_held:
            return
        held = plain if is_own else memoryview(bytearray(plain))
        # If the trainer changed the memory in the meantime, the copy is not what was hashed.
        if is_own or chunk_id_of(held) == chunk_id:
            self.bases.hold(chunk_id, held)

    def note(self, index: int, errors: Errors | Distance, *, max_update_ratio: float = 0.0, method: str = "") -> None:
        """Add the errors of one chunk to those of its tensor, and how it was quantized."""
        outcome = self._outcomes[self._storage_of(index)]
        with self._guard:
            outcome.add(errors, max_update_ratio=max_update_ratio, method=method)

    def note_inflated(self, index: int, sum_sq_error: float) -> None:
        """Add the error that is due to second moments that are too small to be represented."""
        with self._guard:
            self._outcomes[self._storage_of(index)].sq_inflated.append(sum_sq_error)

    def fail(self, index: int, why: str) -> None:
        """Store the tensor of a chunk exactly, and report why."""
        with self._guard:
            self._outcomes[self._storage_of(index)].fail(why)

    def leave(self, index: int) -> None:
        """Store a chunk that is not the rounding of its supposed master by itself."""
        with self._guard:
            self._without_master.append(index)

    def tensor_of(self, index: int) -> LossyTensor:
        """Return the tensor of a chunk."""
        return self.lossy.tensors[self._storage_of(index)]


@dataclass(frozen=True, slots=True)
class ResidualCommit:
    """Plugs quantization into a commit: implements ``ckstore.commit.commit.LossyCommit``.

    Args:
        residual: The settings.
        is_first_exact: A state of which no weight has a base is stored exactly; else its moments are quantized.
    """

    residual: Residual
    is_first_exact: bool = True

    def candidates(self, captured: Captured) -> Candidates:
        """Return the storages of a state that may be quantized."""
        return Candidates(captured, self.residual, is_first_exact=self.is_first_exact)

    def writer_factory(self, lossy: LossyChunks) -> Callable[..., LossyChunkWriter]:
        """Return what makes the writer of a plan; it takes the arguments of ``ChunkWriter``."""
        assert isinstance(lossy, LossyPlan), "the plan was made by other candidates"
        return partial(LossyChunkWriter, lossy=lossy)

    def warnings(self, captured: Captured, manifest: Manifest, stored: WriteResult) -> list[str]:
        """Return the receipt's warnings: unused rules, nothing to quantize, NaN or infinity in exact tensors."""
        # Roundings are not checked for NaN and infinity when they are quantized.
        checked = {loss.storage for loss in manifest.losses if loss.role != "rounded"}
        rules = rules_warnings(self.residual, captured.tree)
        vain = [] if manifest.losses else no_effect_warnings(self.residual, captured)
        return [*rules, *vain, *diverged_warnings(captured, checked, stored.warnings)]


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
