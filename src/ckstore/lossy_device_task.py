"""One task of a commit with a loss whose chunks lie on a device: quantized there, or else as every other one.

Invariants:
- Nothing is noted of a chunk before all of its task is done: a task that fails on the device leaves no trace, and goes
  the way of those that lie in host memory, with what that says of them.
- A device that lacks memory, fails, or makes other bytes than the host costs speed and a warning, never a checkpoint.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckstore import forms, kernels, lossy_on_device
from ckstore.coding_thread import CodingThread
from ckstore.device_bases import DeviceBases
from ckstore.distance import Distance
from ckstore.ids import ChunkId, chunk_id_of
from ckstore.kernels import on_gpu
from ckstore.kernels.on_gpu import Tensor
from ckstore.lossy import LossyTensor, Task
from ckstore.lossy_methods import ROUNDED_METHOD
from ckstore.lossy_on_device import DivergedError, MadeThere, Place
from ckstore.lossy_task import Desk, Draft, TaskCoder, clipped, coded_rounding, is_dropped, kept, needs_base
from ckstore.memory_spans import is_on_device
from ckstore.pipeline import BufferPurpose, ByteSource
from ckstore.plan import CommitPlan
from ckstore.quant.geometry import KINDS
from ckstore.quant.settings import EXACT, FirstMomentSettings, SecondMomentSettings, WeightSettings
from ckstore.tiny_moments import TINY

_log = logging.getLogger("ckstore")


class Devices:
    """The chunks of one commit that lie on devices, and what is kept beside them; thread-safe.

    Args:
        plan: What indices of chunks count in.
        storages: Where the chunks lie.
        bases: What is kept on devices from commit to commit.
    """

    def __init__(self, plan: CommitPlan, storages: Sequence[ByteSource], bases: DeviceBases) -> None:
        self.warnings: list[str] = []
        self._plan = plan
        self._storages = storages
        self._bases = bases
        self._nbytes_of: dict[int, int] = {}
        self._is_off = False
        self._lock = threading.Lock()

    @property
    def nbytes_of(self) -> Mapping[int, int]:
        """Plain bytes of each storage that were quantized where they lie."""
        return self._nbytes_of

    def bytes_of(self, index: int) -> Tensor | None:
        """Return the bytes of a chunk where they lie; None where they are to be quantized on the host."""
        source = self._plan.chunks[index].sources[0]
        storage = self._storages[source.storage]
        if self._is_off or not is_on_device(storage):
            return None
        found: Tensor = storage.there(source.offset, source.offset + source.nbytes)
        return found if on_gpu.has_doubles(found) else None

    def base_of(self, chunk_id: ChunkId, plain: memoryview, beside: Tensor) -> Tensor:
        """Return a base beside a tensor, in its dtype: what was kept of it there, or a copy of the host's."""
        found = self._bases.take(chunk_id)
        if found is not None and (found.device, found.dtype, found.nbytes) == (beside.device, beside.dtype, len(plain)):
            kept_base: Tensor = found
            return kept_base
        return on_gpu.uploaded(plain, beside)

    def done(self, index: int, chunk_id: ChunkId | None = None, became: Tensor | None = None) -> None:
        """Take note of a chunk that was quantized; keep what it became, if that is given, for the next commit."""
        chunk = self._plan.chunks[index]
        storage = chunk.sources[0].storage
        with self._lock:
            self._nbytes_of[storage] = self._nbytes_of.get(storage, 0) + chunk.nbytes
        if chunk_id is not None and became is not None:
            self._bases.keep(chunk_id, became)

    def attempt(self, work: Callable[[], list[Draft] | None]) -> list[Draft] | None:
        """Return the drafts of a task; None: the host has to make them."""
        if self._is_off:
            return None
        try:
            with on_gpu.undisturbed():
                return work()
        except DivergedError:
            self._tell("a device decoded other bytes than the host from the same codes: it may be faulty")
        except RuntimeError as problem:
            # Memory that is short is no better for the next chunk: each failure lets the allocator give up its caches.
            self._is_off = True
            reason = str(problem).partition("\n")[0][:200] or type(problem).__name__
            self._tell(f"a device could not quantize ({reason})")
        # Whatever was kept there is not trusted, or takes the memory that was short.
        self._bases.forget()
        return None

    def _tell(self, why: str) -> None:
        warning = f"{why}; the host has quantized what that concerned"
        with self._lock:
            if warning not in self.warnings:
                self.warnings.append(warning)
        _log.debug("%s", warning)


@dataclass(frozen=True, slots=True)
class _Rounding:
    """A chunk that is the rounding of a weight's: its draft, and what it is off by."""

    draft: Draft
    distance: Distance

    @property
    def is_told(self) -> bool:
        """Whether a number tells what it is off by: where halves overflow, equal infinities differ by NaN here."""
        found = self.distance
        return all(map(math.isfinite, (found.max_abs, found.sum_sq_difference, found.sum_sq_value)))


class DeviceTaskCoder(TaskCoder):
    """Quantizes the chunks of one task where they lie."""

    def __init__(self, desk: Desk, task: Task, thread: CodingThread, devices: Devices) -> None:
        super().__init__(desk, task, thread)
        self._devices = devices

    # Weights

    def _weight_drafts(self) -> list[Draft]:
        found = self._devices.attempt(self._weights_there)
        return super()._weight_drafts() if found is None else found

    def _weights_there(self) -> list[Draft] | None:
        task, desk, devices = self._task, self._desk, self._devices
        index, base, tensor = task.weight, task.base, desk.tensor_of(task.weight)
        assert base is not None, "a weight is told as a change"
        content = devices.bytes_of(index)
        roundings = {other: devices.bytes_of(other) for other in task.rounded}
        if content is None or not isinstance(tensor.settings, WeightSettings):
            return None
        if any(other is None or other.device != content.device for other in roundings.values()):
            return None
        base_plain = desk.base_plain_of(base, desk.plan.chunks[index].nbytes, self._thread)
        if base_plain is None:
            desk.fail(index, "its base could not be read")
            return []
        place = self._place(index, content, tensor, self._names["weight"])
        there = devices.base_of(base.frame.chunk_id, base_plain, place.plain)
        made = lossy_on_device.encode_weights(place, there, base_plain, tensor.settings)
        if made is None or lossy_on_device.turns_negative(place.plain, made.became):
            return None
        # The next chunk is coded in the same scratch, and a rounding may still fail here.
        made = _kept(made)
        rounded = {
            other: self._rounding_there(other, each, place.plain, made)
            for other, each in roundings.items()
            if each is not None
        }
        if any(rounding is not None and not rounding.is_told for rounding in rounded.values()):
            return None
        draft = self._draft(index, made.made, base if needs_base(made.made) else None, base_plain)
        desk.hold(index, draft.chunk_id, made.made.reconstruction, is_own=True)
        devices.done(index, draft.chunk_id, made.became)
        self._weights = (made.made.reconstruction, base_plain)
        return [draft, *self._noted(rounded)]

    def _rounding_there(self, index: int, content: Tensor, plain: Tensor, made: MadeThere) -> _Rounding | None:
        """Return what a chunk becomes that is the rounding of the weight; None where it is not."""
        name = lossy_on_device.rounding_of(content, plain) if plain.dtype == on_gpu.DTYPES["float32"] else None
        if name is None:
            return None
        became, kind = made.made.reconstruction, KINDS[name]
        again = self._thread.worker.buffer(self._names["rounded"])[: len(became) // 2]
        kernels.round_floats(became, again, kind)
        own, there = on_gpu.elements_of(content, name), made.became.to(on_gpu.DTYPES[name])
        off = lossy_on_device.measured(own, there, again)
        changed = int((on_gpu.words_of(own) != on_gpu.words_of(there)).sum())
        distance = Distance(own.numel(), changed, off.max_abs, off.sum_sq_error, off.sum_sq_value)
        draft = Draft(index, chunk_id_of(again), coded_rounding(forms.rounded_as(kind), became), self._task.weight)
        return _Rounding(draft, distance)

    def _noted(self, roundings: Mapping[int, _Rounding | None]) -> list[Draft]:
        found: list[Draft] = []
        for index, rounding in roundings.items():
            if rounding is None:
                self._desk.leave(index)
                continue
            self._desk.note(index, rounding.distance, method=ROUNDED_METHOD)
            self._devices.done(index)
            found.append(rounding.draft)
        return found

    # Moments

    def _moment_drafts(self) -> list[Draft]:
        found = self._devices.attempt(self._moments_there)
        return super()._moment_drafts() if found is None else found

    def _moments_there(self) -> list[Draft] | None:
        task, desk, thread, devices = self._task, self._desk, self._thread, self._devices
        tensor, first_tensor = desk.tensor_of(task.second), desk.tensor_of(task.first)
        contents = devices.bytes_of(task.second), devices.bytes_of(task.first)
        if contents[0] is None or contents[1] is None or contents[0].device != contents[1].device:
            return None
        if not isinstance(tensor.settings, SecondMomentSettings) or tensor.dtype != first_tensor.dtype:
            return None
        place = self._place(task.second, contents[0], tensor, "second")
        first_place = self._place(task.first, contents[1], first_tensor, "first")
        if not on_gpu.are_moments(place.plain, first_place.plain):
            return None
        second = lossy_on_device.encode_second_moment(place, tensor.settings)
        if second is None:
            return None
        second = _kept(second)
        raised = on_gpu.raised(place.plain, second.became, TINY)
        second_off = _raised_off(place, second, raised)
        if first_tensor.settings == EXACT:
            plain = desk.gather_for(task.first, "first plain", thread)
            became = second.made.reconstruction
            # Told by the host, which has what both are stored as; nothing is noted before that can fail no more.
            first_draft = self._first_draft(plain, became, became, None)
            return [self._second_draft(second, second_off), first_draft]
        if not isinstance(first_tensor.settings, FirstMomentSettings):
            return None
        how = clipped(first_tensor.settings, first_tensor)
        first = lossy_on_device.encode_first_moment(
            first_place, place.plain, second.became, second.made.reconstruction, how
        )
        if first is None:
            return None
        first = _kept(first)
        lost = None if is_dropped(first_tensor) else on_gpu.untold(place.plain, raised)
        first_off = _raised_off(first_place, first, lost)
        return [self._second_draft(second, second_off), self._first_draft_there(first, first_off, second)]

    def _second_draft(self, second: MadeThere, off: float | None) -> Draft:
        index = self._task.second
        if off is not None:
            self._desk.note_raised(index, off)
        self._devices.done(index)
        return self._draft(index, second.made, None)

    def _first_draft_there(self, first: MadeThere, off: float | None, second: MadeThere) -> Draft:
        index = self._task.first
        if off is not None:
            self._desk.note_raised(index, off)
        self._devices.done(index)
        return self._told_in_second(self._draft(index, first.made, None, second.made.reconstruction), first.made)

    # What both do

    def _place(self, index: int, content: Tensor, tensor: LossyTensor, purpose: BufferPurpose) -> Place:
        reconstruction = self._desk.reconstruction_for(index, purpose, self._thread)
        plain = on_gpu.elements_of(content, tensor.dtype)
        return Place(plain, self._shape(index, tensor), self._thread.worker.scratch, reconstruction)


def _kept(found: MadeThere) -> MadeThere:
    return replace(found, made=replace(found.made, encoded=kept(found.made.encoded)))


def _raised_off(place: Place, found: MadeThere, raised: Tensor | None) -> float | None:
    return None if raised is None else on_gpu.sum_of_squares(place.plain, found.became, raised)
