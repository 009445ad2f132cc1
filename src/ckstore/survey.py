"""Sample a state and its possible bases, and estimate what each part of it would cost in each form.

A sample is at most 16 KiB of a chunk of 4 MiB, at the same places in every chunk of that length. Those of the last
commit and of the keyframe stay in memory, so that choosing a base reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckstore import forms
from ckstore.bases import Bases, base_frame, read_nbytes
from ckstore.choice import VIEWS, AgainstBase, Estimate, View
from ckstore.format.choices import DELTA, IDENTICAL, StorageChoice, stored_bits
from ckstore.ids import ChunkId
from ckstore.kernels.sample_on_numpy import RUN_COUNT, run_of
from ckstore.pipeline import ByteSource
from ckstore.plan import ChunkPlan, CommitPlan
from ckstore.store.known import Known, KnownFrame
from ckstore.tree import Path

SAMPLED_CHUNKS_MAX = 8
"""Chunks of one storage that are sampled, evenly spread: more change the estimate by less than a tie."""


UNKNOWN_SHARE = 0.9
"""What a difference is taken to cost, of the full bits, where nothing at all is known of it."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is decided together: the chunks of one large storage, or one chunk that small storages share."""

    chunks: tuple[int, ...]
    storage: int


@dataclass(frozen=True, slots=True)
class Surveyed:
    """A unit, its estimate, the frames it may be coded against, and the samples that were taken of it.

    Args:
        frames: For each view, chunk (an index of the plan) to the frame of its base.
        samples: Chunk (an index of the plan) to its sample.
        is_guess: Some base has no sample in memory: the estimate is what was recorded last time, or a guess.
    """

    unit: Unit
    estimate: Estimate
    frames: dict[View, dict[int, KnownFrame]]
    samples: dict[int, bytes]
    is_guess: bool


def units_of(plan: CommitPlan) -> list[Unit]:
    """Return the units of a plan, in its order."""
    units = []
    by_storage: dict[int, list[int]] = {}
    for index, chunk in enumerate(plan.chunks):
        if len(chunk.sources) == 1:
            by_storage.setdefault(chunk.sources[0].storage, []).append(index)
        else:
            units.append(Unit((index,), chunk.sources[0].storage))
    units += [Unit(tuple(chunks), storage) for storage, chunks in by_storage.items()]
    return sorted(units, key=lambda unit: unit.chunks[0])


class Surveyor:
    """Surveys the units of one plan."""

    def __init__(
        self,
        plan: CommitPlan,
        storages: Sequence[ByteSource],
        paths: dict[int, Path],
        known: Known,
        bases: Bases,
        chunk_nbytes_max: int,
    ) -> None:
        self._plan = plan
        self._storages = storages
        self._paths = paths
        self._known = known
        self._bases = bases
        self._scratch = forms.Scratch(chunk_nbytes_max)
        self._sample = memoryview(bytearray(forms.SAMPLE_NBYTES))

    def survey(self, unit: Unit) -> Surveyed:
        """Sample a unit and estimate what it costs."""
        frames: dict[View, dict[int, KnownFrame]] = {"previous": {}, "keyframe": {}}
        previous: dict[int, ChunkId] = {}
        for index in unit.chunks:
            chunk_id = self._previous(index)
            if chunk_id is None:
                continue
            previous[index] = chunk_id
            for view in VIEWS:
                frame = base_frame(self._known, self._bases, chunk_id, view)
                if frame is not None:
                    frames[view][index] = frame
        samples = {index: self._take(self._plan.chunks[index]) for index in sampled_of(unit)}
        estimate, is_guess = self._estimate(unit, frames, previous, samples)
        return Surveyed(unit, estimate, frames, samples, is_guess)

    def _previous(self, index: int) -> ChunkId | None:
        chunk = self._plan.chunks[index]
        source = chunk.sources[0]
        path = self._paths.get(source.storage)
        if path is None:
            return None
        return self._bases.previous_at((path, source.offset), chunk.nbytes, chunk.element_width, chunk.is_float)

    def _take(self, chunk: ChunkPlan) -> bytes:
        width = chunk.element_width
        sources = [(self._storages[source.storage], source) for source in chunk.sources]
        storage, source = sources[0]
        # A storage that is still being staged has its samples already.
        taken = getattr(storage, "sample", None) if len(sources) == 1 else None
        sample: bytes | None = None if taken is None else taken(source.offset, source.nbytes, width)
        if sample is not None:
            return sample
        if len(sources) == 1 and not storage.is_host and chunk.nbytes > forms.SAMPLE_NBYTES:
            # Only the sample is copied from the device.
            runs = [run_of(index, chunk.nbytes // width, width) for index in range(RUN_COUNT)]
            places = [(source.offset + start * width, count * width) for start, count in runs]
            return b"".join(storage.read(offset, offset + nbytes) for offset, nbytes in places)
        pieces = [storage.read(source.offset, source.offset + source.nbytes) for storage, source in sources]
        whole = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
        return bytes(self._sample[: forms.sample_of(whole, width, self._sample)])

    def _estimate(
        self,
        unit: Unit,
        frames: dict[View, dict[int, KnownFrame]],
        previous: dict[int, ChunkId],
        samples: dict[int, bytes],
    ) -> tuple[Estimate, bool]:
        chunks = self._plan.chunks
        width, is_float = chunks[unit.chunks[0]].element_width, chunks[unit.chunks[0]].is_float
        elements = sum(chunks[index].nbytes for index in unit.chunks) // width
        is_identical = len(previous) == len(unit.chunks) and all(
            self._bases.sample_of(previous[index]) == sample for index, sample in samples.items()
        )
        last = self._last(unit) if is_identical else None
        # What has not changed was estimated when it had.
        full_bits = None if last is None else last.full_bits
        if full_bits is None:
            full_bits = _mean(
                forms.estimate_full(memoryview(sample), width, is_float, self._scratch) for sample in samples.values()
            )
        found: dict[View, AgainstBase | None] = dict.fromkeys(VIEWS)
        is_guess = False
        for view in VIEWS:
            bits = [
                forms.estimate_delta(memoryview(sample), memoryview(base_sample), width, is_float, self._scratch)
                for index, sample in samples.items()
                if index in frames[view]
                and (base_sample := self._bases.sample_of(frames[view][index].frame.chunk_id)) is not None
                and len(base_sample) == len(sample)
            ]
            if frames[view] and not bits:
                is_guess = True
                bits = [self._guess(unit, view, full_bits)]
            if bits:
                # Chunks without a base there are stored whole.
                covered = sum(chunks[index].nbytes for index in frames[view]) / (elements * width)
                mean_bits = covered * _mean(bits) + (1 - covered) * full_bits
                found[view] = _against(frames[view].values(), mean_bits)
        identical = sum(map(read_nbytes, frames["previous"].values())) if is_identical else None
        age = self._age(unit)
        return Estimate(elements, full_bits, found["previous"], found["keyframe"], age, identical), is_guess

    def _age(self, unit: Unit) -> int:
        """Return how many commits ago the unit was stored whole; 1 where that is not known."""
        last = self._last(unit)
        return 1 if last is None else last.age + 1

    def _last(self, unit: Unit) -> StorageChoice | None:
        path = self._paths.get(unit.storage)
        return None if path is None else self._bases.choice_at(path)

    def _guess(self, unit: Unit, view: View, full_bits: float) -> float:
        """Return the bits that were estimated last time, or a figure that makes the chunk itself be tried."""
        last = self._last(unit)
        bits = None if last is None else last.previous_bits if view == "previous" else last.keyframe_bits
        return full_bits * UNKNOWN_SHARE if bits is None else bits


def _against(frames: Iterable[KnownFrame], bits: float) -> AgainstBase:
    frames = list(frames)
    return AgainstBase(bits, sum(map(read_nbytes, frames)), max(frame.frame.depth for frame in frames))


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def sampled_of(unit: Unit) -> Sequence[int]:
    """Return the chunks of a unit that are sampled: at most ``SAMPLED_CHUNKS_MAX``, evenly spread."""
    chunks = unit.chunks
    count = min(len(chunks), SAMPLED_CHUNKS_MAX)
    return [chunks[index * len(chunks) // count] for index in range(count)]


def storage_choice(surveyed: Surveyed, base: View | None, mode: int, came_out: float | None = None) -> StorageChoice:
    """Return what the manifest says of a storage that was stored in this mode.

    Args:
        surveyed: What its unit's sample said.
        base: What the unit was to be stored against.
        mode: What became of it.
        came_out: Bits per element that it took. Where there was only a guess, the next process learns from this.
    """
    estimate = surveyed.estimate

    def bits(view: View) -> float | None:
        other = estimate.against(view)
        if surveyed.is_guess:
            return stored_bits(came_out) if view == base and mode == DELTA else None
        return None if other is None else stored_bits(other.bits)

    view = base if base is not None and mode == DELTA else "none"
    age = estimate.age if mode in (DELTA, IDENTICAL) else 0
    return StorageChoice(mode, stored_bits(estimate.full_bits), bits("previous"), bits("keyframe"), view, age)
