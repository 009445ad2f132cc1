"""Decide for one commit what each chunk is coded against, and say why.

survey -> decide -> a form for every chunk. Without a base, or where a policy wants none, every chunk is coded whole.

Sample a state and its possible bases, and estimate what each part of it would cost in each form.

A sample is at most 16 KiB of a chunk of 4 MiB, at the same places in every chunk of that length. Those of the last
commit and of the keyframe stay in memory, so that choosing a base reads nothing.

Find tensors that are the rounding of another tensor of the same state: weights beside their fp32 masters.

A few elements tell who may be whose master; whether every bit agrees is found out chunk by chunk when they are
coded, so a wrong guess costs time and never bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ckstore.codec import chunk_codec as forms
from ckstore.codec import kernels
from ckstore.codec.kernels.bytes_reference import RUN_COUNT, run_of
from ckstore.commit.chunking import ChunkPlan, CommitPlan
from ckstore.commit.pipeline import ByteSource
from ckstore.config import Limits, Policy
from ckstore.delta.base_cache import BaseCache, base_frame, first_paths, read_nbytes
from ckstore.delta.cost_model import BASE_KINDS, AgainstBase, BaseKind, Decision, Estimate, decide
from ckstore.format.decisions import (
    DELTA,
    DERIVED,
    FULL,
    IDENTICAL,
    RESIDUAL,
    UNSAMPLED,
    Decisions,
    StorageDecision,
    stored_bits,
)
from ckstore.format.manifest import Manifest
from ckstore.format.tree import Path
from ckstore.hashing import ChunkId
from ckstore.state.capture import Captured
from ckstore.store.chunk_index import ChunkIndex, LocatedFrame

if TYPE_CHECKING:
    from ckstore.commit.chunk_writer import WriteResult
    from ckstore.format.tensors import StorageSpec


class LossyChunks(Protocol):
    """The chunks of one commit that are quantized, as far as the others depend on them."""

    @property
    def chunks(self) -> frozenset[int]:
        """Chunks of the plan that are quantized together with others, or by themselves."""
        ...

    @property
    def unpaired(self) -> frozenset[int]:
        """Chunks that must not be stored as roundings, because their masters are quantized and they stay exact."""
        ...

    @property
    def weight_bases(self) -> Mapping[int, LocatedFrame | None]:
        """The base of each chunk of a quantized weight."""
        ...

    @property
    def reason(self) -> str:
        """The decision in a sentence; empty if nothing is quantized."""
        ...


class LossyCandidates(Protocol):
    """The storages of one state that may be quantized."""

    @property
    def unshared(self) -> frozenset[int]:
        """Storages that need chunks of their own, however small they are."""
        ...

    def plan(
        self,
        plan: CommitPlan,
        paths: Mapping[int, Path],
        masters: Mapping[int, int],
        known: ChunkIndex,
        bases: BaseCache,
        limits: Limits,
        *,
        read_amplification_max: float,
    ) -> LossyChunks:
        """Choose what is quantized in this commit.

        Args:
            plan: How the state is cut into chunks.
            paths: The path of the first tensor of each storage.
            masters: Chunks that may be roundings, each with the chunk that it may be a rounding of.
            known: Where chunks are stored.
            bases: The chunks of the previous checkpoint.
            limits: Bounds of the store.
            read_amplification_max: Bound on what a restore reads, in keyframes.
        """
        ...


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
class SampledUnit:
    """A unit, its estimate, the frames it may be coded against, and the samples that were taken of it.

    Args:
        frames: For each view, chunk (an index of the plan) to the frame of its base.
        samples: Chunk (an index of the plan) to its sample.
        is_guess: Some base has no sample in memory: the estimate is what was recorded last time, or a guess.
    """

    unit: Unit
    estimate: Estimate
    frames: dict[BaseKind, dict[int, LocatedFrame]]
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
        known: ChunkIndex,
        bases: BaseCache,
        chunk_nbytes_max: int,
    ) -> None:
        self._plan = plan
        self._storages = storages
        self._paths = paths
        self._known = known
        self._bases = bases
        self._scratch = forms.Scratch(chunk_nbytes_max)
        self._sample = memoryview(bytearray(forms.SAMPLE_NBYTES))

    def survey(self, unit: Unit) -> SampledUnit:
        """Sample a unit and estimate what it costs."""
        frames: dict[BaseKind, dict[int, LocatedFrame]] = {"previous": {}, "keyframe": {}}
        previous: dict[int, ChunkId] = {}
        for index in unit.chunks:
            chunk_id = self._previous(index)
            if chunk_id is None:
                continue
            previous[index] = chunk_id
            for view in BASE_KINDS:
                frame = base_frame(self._known, self._bases, chunk_id, view)
                if frame is not None:
                    frames[view][index] = frame
        samples = {index: self._take(self._plan.chunks[index]) for index in sampled_of(unit)}
        estimate, is_guess = self._estimate(unit, frames, previous, samples)
        return SampledUnit(unit, estimate, frames, samples, is_guess)

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
        frames: dict[BaseKind, dict[int, LocatedFrame]],
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
            full_bits = _mean(forms.estimate_full(memoryview(sample), width, is_float) for sample in samples.values())
        found: dict[BaseKind, AgainstBase | None] = dict.fromkeys(BASE_KINDS)
        is_guess = False
        for view in BASE_KINDS:
            bits = [
                forms.estimate_delta(memoryview(sample), memoryview(base_sample), width, is_float)
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

    def _last(self, unit: Unit) -> StorageDecision | None:
        path = self._paths.get(unit.storage)
        return None if path is None else self._bases.decision_at(path)

    def _guess(self, unit: Unit, view: BaseKind, full_bits: float) -> float:
        """Return the bits that were estimated last time, or a figure that makes the chunk itself be tried."""
        last = self._last(unit)
        bits = None if last is None else last.previous_bits if view == "previous" else last.keyframe_bits
        return full_bits * UNKNOWN_SHARE if bits is None else bits


def _against(frames: Iterable[LocatedFrame], bits: float) -> AgainstBase:
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


def storage_decision(
    sampled: SampledUnit, base: BaseKind | None, mode: int, came_out: float | None = None
) -> StorageDecision:
    """Return what the manifest says of a storage that was stored in this mode.

    Args:
        sampled: What its unit's sample said.
        base: What the unit was to be stored against.
        mode: What became of it.
        came_out: Bits per element that it took. Where there was only a guess, the next process learns from this.
    """
    estimate = sampled.estimate

    def bits(view: BaseKind) -> float | None:
        other = estimate.against(view)
        if sampled.is_guess:
            return stored_bits(came_out) if view == base and mode == DELTA else None
        return None if other is None else stored_bits(other.bits)

    view = base if base is not None and mode == DELTA else "none"
    age = estimate.age if mode in (DELTA, IDENTICAL) else 0
    return StorageDecision(mode, stored_bits(estimate.full_bits), bits("previous"), bits("keyframe"), view, age)


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """How a chunk is to be stored, if it is not known already.

    Args:
        base: The frame of the chunk it is coded against; None: whole.
        is_unsampled: The base was never sampled: code whole where a sample of it says so.
        master: The chunk of the plan whose rounding it may be.
        is_held: Its plain bytes will be wanted as a base.
    """

    base: LocatedFrame | None = None
    is_unsampled: bool = False
    master: int | None = None
    is_held: bool = False


WHOLE = StoragePlan()


@dataclass(frozen=True, slots=True)
class BaseSelection:
    """What was decided for one commit.

    Args:
        plans: One for each chunk of the plan.
        decision: The base, and why.
        sampled: What was sampled; empty where nothing was to be decided.
        seqs: For each view, the checkpoint that the bases belong to.
        lossy: What is stored with a loss; None: nothing.
    """

    plans: tuple[StoragePlan, ...]
    decision: Decision
    sampled: tuple[SampledUnit, ...] = ()
    seqs: dict[BaseKind, int | None] = field(default_factory=dict)
    lossy: LossyChunks | None = None

    def remember(self, bases: BaseCache, manifest: Manifest, chunk_ids: Sequence[ChunkId]) -> None:
        """Let the next commit follow the manifest that this one became; ``chunk_ids`` are those of the plan."""
        for sampled in self.sampled:
            for index, sample in sampled.samples.items():
                bases.keep_sample(chunk_ids[index], sample)
        bases.follow(manifest)

    def modes(self, storages: Sequence[StorageSpec], stored: WriteResult) -> list[int]:
        """Return the mode that each storage came out with, given what became of its chunks."""
        lost = {loss.storage for loss in stored.losses}
        modes = []
        for index, storage in enumerate(storages):
            new = [piece.chunk for piece in storage.pieces if stored.is_new[piece.chunk]]
            if index in lost:
                modes.append(RESIDUAL)
            elif not new:
                modes.append(IDENTICAL)
            elif any(stored.is_rounding[chunk] for chunk in new):
                modes.append(DERIVED)
            elif any(stored.frames[chunk].base is not None for chunk in new):
                modes.append(DELTA)
            else:
                modes.append(FULL if self.sampled else UNSAMPLED)
        return modes

    def decisions(self, modes: Sequence[int], came_out: Sequence[float | None] | None = None) -> Decisions | None:
        """Return what the manifest says, given the mode and the bits per element that each storage came out with."""
        if not self.sampled:
            return None
        view = self.decision.newest_base
        views = self.decision.kinds
        told, lossy = self.decision.reason, self.lossy
        if lossy is not None and lossy.chunks:
            # The bound on reading is that of whole states: a few numbers read many times over are nothing in one.
            told = f"the rest: {self.decision.saving or told}"
        if lossy is not None and lossy.reason:
            told = f"{lossy.reason}; {told}"
        by_storage = {each.unit.storage: (each, view) for each, view in zip(self.sampled, views, strict=True)}
        return Decisions(
            base=self.decision.base,
            base_seq=None if view is None else self.seqs[view],
            keyframe_seq=None if view is None else self.seqs["keyframe"],
            reason=told,
            storages=tuple(
                storage_decision(*by_storage[index], mode, came_out[index] if came_out else None)
                if index in by_storage
                else StorageDecision(mode)
                for index, mode in enumerate(modes)
            ),
        )


def select_bases(
    captured: Captured,
    plan: CommitPlan,
    known: ChunkIndex,
    bases: BaseCache,
    policy: Policy,
    limits: Limits,
    candidates: LossyCandidates | None = None,
) -> BaseSelection:
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
    lossy: LossyChunks | None = None
    if candidates is not None:
        amplification = policy.read_amplification_max
        lossy = candidates.plan(plan, paths, masters, known, bases, limits, read_amplification_max=amplification)
        masters = {chunk: master for chunk, master in masters.items() if chunk not in lossy.unpaired}
    quantized = frozenset() if lossy is None else lossy.chunks
    if policy.compression == "none" or not policy.delta:
        reason = "keyframe: the policy codes nothing" if policy.compression == "none" else "keyframe: no differences"
        decision = Decision((), reason)
        return BaseSelection(_forms(plan, [], decision, masters, is_held=frozenset()), decision, lossy=lossy)
    surveyor = Surveyor(plan, captured.storages, paths, known, bases, limits.chunk_nbytes_max)
    sampled = [
        surveyor.survey(unit)
        for unit in units_of(plan)
        if not all(chunk in masters or chunk in quantized for chunk in unit.chunks)
    ]
    decision = decide(
        [each.estimate for each in sampled],
        read_amplification_max=policy.read_amplification_max,
        depth_max=limits.depth_max,
    )
    is_held = frozenset(_held(sampled, decision)) if policy.base_cache == "memory" else frozenset()
    forms = _forms(plan, sampled, decision, masters, is_held=is_held)
    if lossy is not None:
        forms = _with_bases(forms, lossy, is_held=policy.base_cache == "memory")
    return BaseSelection(
        forms, decision, tuple(sampled), {"previous": bases.seq, "keyframe": bases.keyframe_seq}, lossy
    )


def _with_bases(forms: tuple[StoragePlan, ...], lossy: LossyChunks, *, is_held: bool) -> tuple[StoragePlan, ...]:
    """Return forms by which weights are stored if they are exact after all, and held if they are not."""
    found = list(forms)
    for chunk, base in lossy.weight_bases.items():
        found[chunk] = StoragePlan(base, is_unsampled=True, is_held=is_held)
    return tuple(found)


def _forms(
    plan: CommitPlan,
    sampled: Sequence[SampledUnit],
    decision: Decision,
    masters: dict[int, int],
    *,
    is_held: frozenset[int],
) -> tuple[StoragePlan, ...]:
    forms = [StoragePlan(master=masters.get(index), is_held=index in is_held) for index in range(len(plan.chunks))]
    for each, view in zip(sampled, decision.kinds, strict=True):
        for index, frame in each.frames[view].items() if view is not None else ():
            if index not in masters:
                forms[index] = StoragePlan(frame, each.is_guess, None, index in is_held)
    return tuple(forms)


def _held(sampled: Sequence[SampledUnit], decision: Decision) -> list[int]:
    """Return the chunks that the next commit will want as bases, as far as this one can tell."""
    found: list[int] = []
    for each, view in zip(sampled, decision.kinds, strict=True):
        estimate = each.estimate
        is_candidate = estimate.previous is None or each.is_guess or estimate.pays("previous")
        # What has not changed is held already.
        is_candidate = is_candidate and estimate.identical_read_nbytes is None
        # What is coded against the keyframe will be so again: that one stays.
        if is_candidate and view != "keyframe":
            found += each.unit.chunks
    return found


_MARK_COUNT = 64
"""Elements that are compared to find a pair."""

_MARK_PLACES = (0.13, 0.5, 0.71)
"""Where they are: rows that were never touched look alike in many tensors."""

_KINDS = (1, 2)
"""bf16 and fp16, as kernels call them."""


def masters_of(plan: CommitPlan, storages: Sequence[ByteSource]) -> dict[int, int]:
    """Return, for chunks that may be roundings, the chunk that may be the master (indices of the plan)."""
    rounded = [index for index, spec in enumerate(plan.storages) if spec.is_float and spec.element_width == 2]
    sizes = {2 * plan.storages[index].nbytes for index in rounded}
    whole = _chunks_of_large_storages(plan)
    by_mark: dict[tuple[int, bytes], int] = {}
    for index, spec in enumerate(plan.storages):
        if spec.is_float and spec.element_width == 4 and spec.nbytes in sizes and index in whole:
            for mark in _rounded_marks(storages[index], spec.nbytes // 4):
                by_mark.setdefault((spec.nbytes // 4, mark), index)
    found: dict[int, int] = {}
    for index in rounded:
        count = plan.storages[index].nbytes // 2
        master = by_mark.get((count, _mark(storages[index], count, 2))) if index in whole else None
        if master is not None and len(whole[index]) == len(whole[master]):
            found.update(zip(whole[index], whole[master], strict=True))
    return {
        chunk: master for chunk, master in found.items() if plan.chunks[master].nbytes == 2 * plan.chunks[chunk].nbytes
    }


def _chunks_of_large_storages(plan: CommitPlan) -> dict[int, list[int]]:
    """Return the chunks of each storage that has chunks of its own."""
    found: dict[int, list[int]] = {}
    for index, chunk in enumerate(plan.chunks):
        if len(chunk.sources) == 1:
            found.setdefault(chunk.sources[0].storage, []).append(index)
    return found


def _mark(storage: ByteSource, count: int, width: int) -> bytes:
    """Return some elements from the places of ``_MARK_PLACES``."""
    found = []
    for place in _MARK_PLACES:
        start = max(0, int(count * place) - _MARK_COUNT // 2)
        found.append(bytes(storage.read(start * width, min(count, start + _MARK_COUNT) * width)))
    return b"".join(found)


def _rounded_marks(storage: ByteSource, count: int) -> list[bytes]:
    mark = _mark(storage, count, 4)
    marks = []
    for kind in _KINDS:
        rounded = bytearray(len(mark) // 2)
        kernels.round_floats(memoryview(mark), memoryview(rounded), kind)
        # A constant tells nobody from anybody else.
        if bytes(rounded) != bytes(rounded[:2]) * (len(rounded) // 2):
            marks.append(bytes(rounded))
    return marks
