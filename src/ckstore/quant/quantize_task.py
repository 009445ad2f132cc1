"""Quantize and code the chunks of one task: a weight with its roundings, or a second moment with its first moment.

Invariants:
- A returned chunk aliases only the trainer's memory, and memory of this thread that the task does not use again.
- A chunk that cannot be quantized is coded exactly here, or its tensor is reported as failed and stored exactly.

Second moments near zero cannot be quantized: below 2**-126 they are restored much too large, and v = 0 may be restored
as the estimate from its row and column. Keeping m / sqrt(v) there would create an update that training never made, so
m is set to zero. The error is counted; if it exceeds 1 % of a moment's energy, both moments are stored exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.chunk_codec import Encoded
from ckstore.commit.chunk_writer import EncodedChunk
from ckstore.commit.chunking import ChunkPlan, CommitPlan
from ckstore.commit.pipeline import BufferPurpose, CodingThread
from ckstore.config import FirstMomentSettings, Policy, SecondMomentSettings, WeightSettings
from ckstore.hashing import ChunkId, chunk_id_of
from ckstore.quant.bounds import clip_max
from ckstore.quant.chunk_codec import (
    EXACT_METHOD,
    ROUNDED_METHOD,
    ChunkShape,
    Errors,
    QuantizedChunk,
    encode_first_moment,
    encode_second_moment,
    encode_weights,
    method_of,
)
from ckstore.quant.error_stats import Distance, distance_of, floats_of, is_finite
from ckstore.quant.planning import LossyTensor, Task
from ckstore.store.chunk_index import LocatedFrame

_TINY = 2.0**-128
"""A second moment below this may be restored as more than four times its value, because no form goes below 2**-126."""


def quotient_max(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Return the greatest |m| / sqrt(v); infinite if v is zero where m is not."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = np.abs(first) / np.sqrt(second)
    return float(np.where(first == 0, np.float32(0), quotient).max(initial=0.0))


def inflated_mask(values: NDArray[Any], became: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Return a mask of tiny second moments that became much larger; None if there are none."""
    if float(values.min(initial=1.0)) >= _TINY:
        return None
    found: NDArray[np.bool_] = (values > 0) & (values < _TINY)
    found &= became > 4 * values
    return found if found.any() else None


def unrepresentable_mask(second: NDArray[Any], where: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    """Return a mask of first moments to drop: the second moment is zero or was inflated; None if there are none."""
    is_zero: NDArray[np.bool_] = second == 0
    if not is_zero.any():
        return where
    return is_zero if where is None else is_zero | where


def sum_sq(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Return the sum of the squared differences."""
    difference = one.astype(np.float64) - other
    return float(np.dot(difference, difference))


_NOT_FINITE = "it holds NaN or infinity"
_NOT_SECOND = "it is negative somewhere, so it is no second moment"


@dataclass(slots=True, eq=False)
class ChunkDraft:
    """A coded chunk that has no space in a pack yet.

    Args:
        index: Its index in the plan.
        chunk_id: Of the reconstruction, or of the plain bytes if it is coded exactly.
        coded: Its payload.
        base_chunk: The chunk of this task whose frame is its base; -1 if ``coded`` names the base or there is none.
    """

    index: int
    chunk_id: ChunkId
    coded: EncodedChunk
    base_chunk: int = -1


class TaskContext(Protocol):
    """What a task needs from the writer that runs it, or from a trial that writes nothing. Thread-safe."""

    @property
    def policy(self) -> Policy:
        """How the state is stored."""
        ...

    @property
    def plan(self) -> CommitPlan:
        """How the state is cut into chunks."""
        ...

    def gather_for(self, index: int, purpose: BufferPurpose, thread: CodingThread) -> memoryview:
        """Return the plain bytes of a chunk."""
        ...

    def base_plain_of(self, base: LocatedFrame, nbytes: int, thread: CodingThread) -> memoryview | None:
        """Return the plain bytes of a base; None if they cannot be read."""
        ...

    def reconstruction_for(self, index: int, purpose: BufferPurpose, thread: CodingThread) -> memoryview:
        """Return memory for the reconstruction of a chunk."""
        ...

    def hold(self, index: int, chunk_id: ChunkId, plain: memoryview, *, is_own: bool) -> None:
        """Hold a reconstruction for the next commit if the plan says so; a copy of it if ``is_own`` is False."""
        ...

    def note(self, index: int, errors: Errors | Distance, *, max_update_ratio: float = 0.0, method: str = "") -> None:
        """Add the errors of one chunk to those of its tensor, and how it was quantized."""
        ...

    def note_inflated(self, index: int, sum_sq_error: float) -> None:
        """Add the error that is due to second moments that are too small to be represented."""
        ...

    def fail(self, index: int, why: str) -> None:
        """Store the tensor of a chunk exactly, and report why."""
        ...

    def leave(self, index: int) -> None:
        """Store a chunk that is not the rounding of its supposed master by itself."""
        ...

    def tensor_of(self, index: int) -> LossyTensor:
        """Return the tensor of a chunk."""
        ...


class TaskCoder:
    """Quantizes and codes the chunks of one task."""

    def __init__(self, context: TaskContext, task: Task, thread: CodingThread) -> None:
        self._context = context
        self._task = task
        self._thread = thread

    def drafts(self) -> list[ChunkDraft]:
        """Return the coded chunks, each after the chunk that is its base."""
        return self._weight_drafts() if self._task.weight >= 0 else self._moment_drafts()

    # Weights

    def _weight_drafts(self) -> list[ChunkDraft]:
        task, context, thread = self._task, self._context, self._thread
        index, base = task.weight, task.base
        assert base is not None, "a quantized weight has a base"
        tensor, settings = context.tensor_of(index), context.tensor_of(index).settings
        assert isinstance(settings, WeightSettings)
        plain = context.gather_for(index, "primary plain", thread)
        base_plain = context.base_plain_of(base, len(plain), thread)
        if base_plain is None:
            context.fail(index, "its base could not be read")
            return []
        made = encode_weights(
            plain,
            base_plain,
            self._shape(index, tensor),
            settings,
            scratch=thread.worker.scratch,
            reconstruction=context.reconstruction_for(index, "primary", thread),
        )
        if made is None and not is_finite(floats_of(plain, tensor.dtype)):
            context.fail(index, _NOT_FINITE)
            return []
        if made is not None and _turns_negative(plain, made.reconstruction, tensor):
            made = None
        if made is None:
            draft, became = self._exact(index, plain, tensor, base, base_plain), plain
        else:
            became = made.reconstruction
            draft = self._build_chunk(index, made, base if _needs_base(made) else None, base_plain)
        context.hold(index, draft.chunk_id, became, is_own=made is not None)
        return [draft, *(each for other in task.rounded for each in self._rounded_drafts(other, plain, became))]

    def _rounded_drafts(self, index: int, plain: memoryview, became: memoryview) -> list[ChunkDraft]:
        """Return the rounding of a weight's reconstruction, if this chunk is the rounding of the weight."""
        context, thread, tensor = self._context, self._thread, self._context.tensor_of(self._task.weight)
        rounded = context.gather_for(index, "secondary plain", thread)
        encoded = chunk_codec.encode_rounded(rounded, plain, scratch=thread.worker.scratch)
        if encoded is None or tensor.dtype != "float32":
            context.leave(index)
            return []
        kind = encoded.steps[0][1][0]
        again = thread.worker.buffer("secondary")[: len(rounded)]
        kernels.round_floats(became, again, kind)
        name = "bfloat16" if kind == 1 else "float16"
        distance = distance_of(floats_of(rounded, name), floats_of(again, name))
        context.note(index, distance, method=ROUNDED_METHOD)
        coded = EncodedChunk(_kept(encoded), None, became, is_rounding=True)
        return [ChunkDraft(index, chunk_id_of(again), coded, base_chunk=self._task.weight)]

    # Moments

    def _moment_drafts(self) -> list[ChunkDraft]:
        task, context, thread = self._task, self._context, self._thread
        tensor = context.tensor_of(task.second)
        second = context.gather_for(task.second, "primary plain", thread)
        first = context.gather_for(task.first, "secondary plain", thread)
        values = floats_of(second, tensor.dtype)
        if not is_finite(values):
            context.fail(task.second, _NOT_FINITE)
            return []
        if float(values.min(initial=0.0)) < 0:
            context.fail(task.second, _NOT_SECOND)
            return []
        if not is_finite(floats_of(first, tensor.dtype)):
            context.fail(task.first, _NOT_FINITE)
            return []
        made: QuantizedChunk | None = None
        if isinstance(tensor.settings, SecondMomentSettings):
            made = encode_second_moment(
                second,
                self._shape(task.second, tensor),
                tensor.settings,
                scratch=thread.worker.scratch,
                reconstruction=context.reconstruction_for(task.second, "primary", thread),
            )
        became = second if made is None else made.reconstruction
        draft = self._exact(task.second, second, tensor) if made is None else self._build_chunk(task.second, made, None)
        inflated = None if made is None else inflated_mask(values, floats_of(became, tensor.dtype))
        if inflated is not None:
            context.note_inflated(task.second, sum_sq(values[inflated], floats_of(became, tensor.dtype)[inflated]))
        return [draft, self._first_draft(first, second, became, inflated)]

    def _first_draft(
        self, first: memoryview, second: memoryview, became: memoryview, inflated: NDArray[np.bool_] | None
    ) -> ChunkDraft:
        task, context, thread = self._task, self._context, self._thread
        tensor = context.tensor_of(task.first)
        made: QuantizedChunk | None = None
        if isinstance(tensor.settings, FirstMomentSettings):
            made = encode_first_moment(
                first,
                second,
                became,
                self._shape(task.first, tensor),
                _clipped(tensor.settings, tensor),
                scratch=thread.worker.scratch,
                reconstruction=context.reconstruction_for(task.first, "secondary", thread),
            )
        if made is None:
            quotient = quotient_max(floats_of(first, tensor.dtype), floats_of(became, tensor.dtype))
            return self._exact(task.first, first, tensor, max_update_ratio=quotient)
        lost = unrepresentable_mask(floats_of(second, tensor.dtype), inflated)
        if lost is not None and not _is_dropped(tensor):
            again = floats_of(made.reconstruction, tensor.dtype)
            context.note_inflated(task.first, sum_sq(floats_of(first, tensor.dtype)[lost], again[lost]))
        draft = self._build_chunk(task.first, made, None, became)
        # Its base is the second moment, unless it is stored by itself.
        if _needs_base(made):
            draft.base_chunk = task.second
        else:
            draft.coded.base_plain = None
        return draft

    # What both do

    def _shape(self, index: int, tensor: LossyTensor) -> ChunkShape:
        offset = self._context.plan.chunks[index].sources[0].offset // thread_width(tensor)
        return ChunkShape.of(tensor.memory_shape, tensor.dtype, offset)

    def _build_chunk(
        self, index: int, made: QuantizedChunk, base: LocatedFrame | None, base_plain: memoryview | None = None
    ) -> ChunkDraft:
        tensor = self._context.tensor_of(index)
        assert not isinstance(tensor.settings, str), "an exact tensor was quantized"
        nbytes, shape = len(made.reconstruction), self._shape(index, tensor)
        method = method_of(made.encoded.steps, tensor.settings, shape, nbytes)
        self._context.note(index, made.errors, max_update_ratio=made.errors.max_update_ratio, method=method)
        coded = EncodedChunk(_kept(made.encoded), base, base_plain, is_lossy=True)
        return ChunkDraft(index, chunk_id_of(made.reconstruction), coded)

    def _exact(
        self,
        index: int,
        plain: memoryview,
        tensor: LossyTensor,
        base: LocatedFrame | None = None,
        base_plain: memoryview | None = None,
        *,
        max_update_ratio: float = 0.0,
    ) -> ChunkDraft:
        """Code a chunk exactly, although its tensor is quantized."""
        worker, compression = self._thread.worker, self._context.policy.compression
        chunk: ChunkPlan = self._context.plan.chunks[index]
        values = floats_of(plain, tensor.dtype)
        distance = replace(distance_of(values, values), changed_count=len(values))
        self._context.note(index, distance, max_update_ratio=max_update_ratio, method=EXACT_METHOD)
        if base_plain is not None:
            encoded = worker.encode_delta(plain, base_plain, chunk, compression)
            if encoded is not None:
                return ChunkDraft(index, chunk_id_of(plain), EncodedChunk(_kept(encoded), base, base_plain))
        return ChunkDraft(index, chunk_id_of(plain), EncodedChunk(_kept(worker.encode(plain, chunk, compression))))


def thread_width(tensor: LossyTensor) -> int:
    """Return the bytes of an element."""
    return 4 if tensor.dtype == "float32" else 2


def _clipped(settings: FirstMomentSettings, tensor: LossyTensor) -> FirstMomentSettings:
    """Return settings whose clip keeps the next optimizer step within its bound."""
    if tensor.constants is None:
        return settings
    return replace(settings, clip=min(settings.clip, max(1e-3, clip_max(tensor.constants))))


def _is_dropped(tensor: LossyTensor) -> bool:
    """Return True if the settings drop the first moment."""
    return isinstance(tensor.settings, FirstMomentSettings) and tensor.settings.form == "dropped"


def _turns_negative(plain: memoryview, became: memoryview, tensor: LossyTensor) -> bool:
    """Return True if a weight without negative elements would get some: it may be an unrecognized second moment."""
    values = floats_of(plain, tensor.dtype)
    # Nearly every weight has a negative element among its first.
    if float(values[:1024].min(initial=0.0)) < 0 or float(values.min(initial=0.0)) < 0:
        return False
    return float(floats_of(became, tensor.dtype).min(initial=0.0)) < 0


def _needs_base(made: QuantizedChunk) -> bool:
    """Return True if decoding the chunk needs a base."""
    return chunk_codec.base_nbytes(made.encoded.steps, len(made.reconstruction)) > 0


def _kept(encoded: Encoded) -> Encoded:
    """Return a copy of what was encoded, because the next chunk of the task is coded in the same scratch."""
    return Encoded(encoded.steps, [memoryview(b"".join(encoded.parts))], encoded.width)
