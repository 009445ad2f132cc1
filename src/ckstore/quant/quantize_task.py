"""One task of a commit with a loss: chunks of the same elements, quantized one against the other.

Invariants:
- What is handed out aliases only memory of this thread that the task does not use again, and the trainer's.
- A chunk that cannot be quantized is coded exactly here, or its whole tensor is told to be stored exactly.

Moments where the second one vanishes, or nearly: no form tells it, and the first one has no direction there.

A second moment below the least normal number comes back as many times what it is; one that is zero may come back as
what its row and its column have. A first moment that kept its quotient there would be a step that nobody would have
made, so it is dropped, and what that loses is counted: much of it makes both moments exact.
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
from ckstore.quant import chunk_codec as lossy_forms
from ckstore.quant.bounds import clip_max
from ckstore.quant.chunk_codec import EXACT_METHOD, ROUNDED_METHOD, ChunkShape, Errors, QuantizedChunk, method_of
from ckstore.quant.error_stats import Distance, distance_of, floats_of, is_finite
from ckstore.quant.planning import LossyTensor, Task
from ckstore.store.chunk_index import LocatedFrame

_TINY = 2.0**-128
"""A second moment below this may be told as more than four times what it is: forms know none below 2 ** -126."""


def quotient_max(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Return the greatest |m| / sqrt(v); infinite where v vanishes and m does not."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient = np.abs(first) / np.sqrt(second)
    return float(np.where(first == 0, np.float32(0), quotient).max(initial=0.0))


def inflated_mask(values: NDArray[Any], became: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Return where second moments became many times what they are because they are next to nothing; None: nowhere."""
    if float(values.min(initial=1.0)) >= _TINY:
        return None
    found: NDArray[np.bool_] = (values > 0) & (values < _TINY)
    found &= became > 4 * values
    return found if found.any() else None


def unrepresentable_mask(second: NDArray[Any], where: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    """Return where first moments cannot be told: where the second one was inflated_mask, or is zero; None: nowhere."""
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
    """A chunk that waits for its place.

    Args:
        index: In the plan.
        chunk_id: Of what is stored.
        coded: How.
        beside: The chunk of this task whose frame is the base; -1: ``coded`` has it already, or there is none.
    """

    index: int
    chunk_id: ChunkId
    coded: EncodedChunk
    beside: int = -1


class TaskContext(Protocol):
    """What a task needs of the writer it works for; all of it may be called from any thread."""

    @property
    def policy(self) -> Policy:
        """How much is checked and coded."""
        ...

    @property
    def plan(self) -> CommitPlan:
        """What the indices of chunks count in."""
        ...

    def gather_for(self, index: int, purpose: BufferPurpose, thread: CodingThread) -> memoryview:
        """Return the plain bytes of a chunk."""
        ...

    def base_plain_of(self, base: LocatedFrame, nbytes: int, thread: CodingThread) -> memoryview | None:
        """Return the plain bytes of a base; None where they cannot be read."""
        ...

    def reconstruction_for(self, index: int, purpose: BufferPurpose, thread: CodingThread) -> memoryview:
        """Return memory for what a chunk becomes."""
        ...

    def hold(self, index: int, chunk_id: ChunkId, plain: memoryview, *, is_own: bool) -> None:
        """Keep a chunk for the next commit, if its form says so; a copy of it where the memory is the trainer's."""
        ...

    def note(self, index: int, errors: Errors | Distance, *, max_update_ratio: float = 0.0, method: str = "") -> None:
        """Add the errors of one chunk to those of its tensor, and how it was quantized."""
        ...

    def note_inflated(self, index: int, sum_sq_error: float) -> None:
        """Add the error of what goes with second moments that are too small to be told."""
        ...

    def fail(self, index: int, why: str) -> None:
        """Let the tensor of a chunk be stored exactly."""
        ...

    def leave(self, index: int) -> None:
        """Let a chunk be stored without its master."""
        ...

    def tensor_of(self, index: int) -> LossyTensor:
        """Return what the tensor of a chunk is."""
        ...


class TaskCoder:
    """Quantizes and codes the chunks of one task."""

    def __init__(self, context: TaskContext, task: Task, thread: CodingThread) -> None:
        self._context = context
        self._task = task
        self._thread = thread

    def drafts(self) -> list[ChunkDraft]:
        """Return what is to be placed, each chunk after what it needs."""
        return self._weight_drafts() if self._task.weight >= 0 else self._moment_drafts()

    # Weights

    def _weight_drafts(self) -> list[ChunkDraft]:
        task, context, thread = self._task, self._context, self._thread
        index, base = task.weight, task.base
        assert base is not None, "a weight is told as a change"
        tensor, settings = context.tensor_of(index), context.tensor_of(index).settings
        assert isinstance(settings, WeightSettings)
        plain = context.gather_for(index, "primary plain", thread)
        base_plain = context.base_plain_of(base, len(plain), thread)
        if base_plain is None:
            context.fail(index, "its base could not be read")
            return []
        made = lossy_forms.encode_weights(
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
        """Return the rounding of what a weight became, where this chunk was the rounding of the weight."""
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
        return [ChunkDraft(index, chunk_id_of(again), coded, beside=self._task.weight)]

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
            made = lossy_forms.encode_second_moment(
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
            made = lossy_forms.encode_first_moment(
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
        # It stands on the second one, unless it is stored by itself.
        if _needs_base(made):
            draft.beside = task.second
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
        assert not isinstance(tensor.settings, str), "what is exact is not quantized"
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
        """Code a chunk as it is, although others of its tensor are not."""
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
    """Return settings by which no next step can be too large."""
    if tensor.constants is None:
        return settings
    return replace(settings, clip=min(settings.clip, max(1e-3, clip_max(tensor.constants))))


def _is_dropped(tensor: LossyTensor) -> bool:
    """Whether nothing of a first moment is asked for."""
    return isinstance(tensor.settings, FirstMomentSettings) and tensor.settings.form == "dropped"


def _turns_negative(plain: memoryview, became: memoryview, tensor: LossyTensor) -> bool:
    """Whether something that is nowhere negative would be: it may be a second moment that nobody told us of."""
    values = floats_of(plain, tensor.dtype)
    # Nearly every weight has a negative element among its first.
    if float(values[:1024].min(initial=0.0)) < 0 or float(values.min(initial=0.0)) < 0:
        return False
    return float(floats_of(became, tensor.dtype).min(initial=0.0)) < 0


def _needs_base(made: QuantizedChunk) -> bool:
    """Whether a chunk cannot be decoded by itself."""
    return chunk_codec.base_nbytes(made.encoded.steps, len(made.reconstruction)) > 0


def _kept(encoded: Encoded) -> Encoded:
    """Return what was encoded in memory of its own: the next chunk of the task is coded in the same scratch."""
    return Encoded(encoded.steps, [memoryview(b"".join(encoded.parts))], encoded.width)
