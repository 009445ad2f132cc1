"""Choose for one commit how each chunk is stored: whole, as a difference from a base, or as a rounding; and say why.

A sample of the state and of its possible bases gives the estimated cost of each unit (a large storage, or a chunk that
small ones share). ``delta.cost_model.decide`` chooses from these. Without bases, or under a policy that wants none,
every chunk is stored whole.

A sample is at most 16 KiB of a chunk of 4 MiB, at the same places in every chunk of one length. The samples of the
previous commit and of the keyframe stay in memory, so choosing a base reads nothing from the store.

``masters_of`` finds weights that are the bf16 or fp16 rounding of an fp32 tensor in the same state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Protocol

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.kernels.bytes_reference import RUN_COUNT, run_of
from ckstore.commit.chunking import ChunkPlan, CommitPlan, StoragePlan
from ckstore.commit.pipeline import ByteSource, gathered
from ckstore.config import Limits, Policy
from ckstore.delta.base_cache import BaseCache, base_frame, first_paths, read_nbytes
from ckstore.delta.cost_model import BASE_KINDS, BaseKind, Decision, DeltaCost, Estimate, decide
from ckstore.format.location import (
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


class LossyChunks(Protocol):
    """The chunks of one commit that are quantized. ``ckstore.quant.planning.LossyPlan`` implements it."""

    @property
    def chunks(self) -> frozenset[int]:
        """Chunks of the plan that are quantized, with the roundings of quantized weights."""
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
    """The storages of one state that may be quantized. ``ckstore.quant.planning.Candidates`` implements it."""

    @property
    def unshared(self) -> frozenset[int]:
        """Storages that need chunks of their own, however small they are."""
        ...

    def plan(
        self,
        plan: CommitPlan,
        paths: Mapping[int, Path],
        masters: Mapping[int, int],
        chunk_index: ChunkIndex,
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
            chunk_index: Where chunks are stored.
            bases: The chunks of the previous checkpoint.
            limits: Bounds of the store.
            read_amplification_max: Bound on what a restore reads, in keyframes.
        """
        ...


SAMPLED_CHUNKS_MAX = 8
"""Maximum number of sampled chunks per storage, evenly spread. More change the estimate very little."""


UNKNOWN_SHARE = 0.9
"""Assumed cost of a difference, as a share of the full bits, if there is neither a sample nor a past estimate."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Chunks that are decided together: those of one large storage, or one chunk that small storages share."""

    chunks: tuple[int, ...]
    storage: int


@dataclass(frozen=True, slots=True)
class SampledUnit:
    """A unit, its estimated costs, its possible bases and its samples.

    Args:
        unit: The unit.
        estimate: Its costs.
        frames: For each kind of base, the frame of the base by chunk (an index of the plan).
        samples: The sample of each sampled chunk (an index of the plan).
        is_guess: No base of one kind has a sample in memory. Its cost is the one recorded last time, or assumed.
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


class UnitSampler:
    """Samples the units of one plan and estimates their costs."""

    def __init__(
        self,
        plan: CommitPlan,
        storages: Sequence[ByteSource],
        paths: dict[int, Path],
        chunk_index: ChunkIndex,
        bases: BaseCache,
    ) -> None:
        self._plan = plan
        self._storages = storages
        self._paths = paths
        self._chunk_index = chunk_index
        self._bases = bases
        self._sample = memoryview(bytearray(chunk_codec.SAMPLE_NBYTES))

    def sample(self, unit: Unit) -> SampledUnit:
        """Sample a unit and estimate its costs with and without a base."""
        frames: dict[BaseKind, dict[int, LocatedFrame]] = {"previous": {}, "keyframe": {}}
        previous: dict[int, ChunkId] = {}
        for index in unit.chunks:
            chunk_id = self._previous(index)
            if chunk_id is None:
                continue
            previous[index] = chunk_id
            for kind in BASE_KINDS:
                frame = base_frame(self._chunk_index, self._bases, chunk_id, kind)
                if frame is not None:
                    frames[kind][index] = frame
        samples = {index: self._take(self._plan.chunks[index]) for index in sampled_of(unit)}
        estimate, is_guess = self._estimate(unit, frames, previous, samples)
        return SampledUnit(unit, estimate, frames, samples, is_guess)

    def _previous(self, index: int) -> ChunkId | None:
        chunk = self._plan.chunks[index]
        source = chunk.sources[0]
        path = self._paths.get(source.storage)
        if path is None:
            return None
        position = path, self._plan.position_of(source)
        return self._bases.previous_at(position, chunk.nbytes, chunk.element_width, chunk.is_float)

    def _take(self, chunk: ChunkPlan) -> bytes:
        width = chunk.element_width
        if len(chunk.sources) > 1:
            whole = gathered(chunk, self._storages, memoryview(bytearray(chunk.nbytes)))
            return bytes(self._sample[: chunk_codec.sample_of(whole, width, self._sample)])
        (source,) = chunk.sources
        storage = self._storages[source.storage]
        # A storage that is still being staged provides its samples beforehand.
        taken = getattr(storage, "sample", None)
        sample: bytes | None = None if taken is None else taken(source.offset, source.nbytes, width)
        if sample is not None:
            return sample
        if not storage.is_host and chunk.nbytes > chunk_codec.SAMPLE_NBYTES:
            # Copy only the sample from the device.
            runs = [run_of(index, chunk.nbytes // width, width) for index in range(RUN_COUNT)]
            places = [(source.offset + start * width, count * width) for start, count in runs]
            return b"".join(storage.read(offset, offset + nbytes) for offset, nbytes in places)
        whole = storage.read(source.offset, source.offset + source.nbytes)
        return bytes(self._sample[: chunk_codec.sample_of(whole, width, self._sample)])

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
        # An unchanged unit keeps the estimate from the commit in which it last changed.
        full_bits = None if last is None else last.full_bits
        if full_bits is None:
            estimate_full = chunk_codec.estimate_full
            full_bits = _mean(estimate_full(memoryview(sample), width, is_float) for sample in samples.values())
        found: dict[BaseKind, DeltaCost | None] = dict.fromkeys(BASE_KINDS)
        is_guess = False
        for kind in BASE_KINDS:
            bits = [
                chunk_codec.estimate_delta(memoryview(sample), memoryview(base_sample), width, is_float)
                for index, sample in samples.items()
                if index in frames[kind]
                and (base_sample := self._bases.sample_of(frames[kind][index].frame.chunk_id)) is not None
                and len(base_sample) == len(sample)
            ]
            if frames[kind] and not bits:
                is_guess = True
                bits = [self._guess(unit, kind, full_bits)]
            if bits:
                # Chunks without a base of this kind are stored whole.
                covered = sum(chunks[index].nbytes for index in frames[kind]) / (elements * width)
                mean_bits = covered * _mean(bits) + (1 - covered) * full_bits
                found[kind] = _against(frames[kind].values(), mean_bits)
        identical = sum(map(read_nbytes, frames["previous"].values())) if is_identical else None
        age = self._age(unit)
        return Estimate(elements, full_bits, found["previous"], found["keyframe"], age, identical), is_guess

    def _age(self, unit: Unit) -> int:
        """Return how many commits ago the unit was stored whole; 1 if unknown."""
        last = self._last(unit)
        return 1 if last is None else last.age + 1

    def _last(self, unit: Unit) -> StorageDecision | None:
        path = self._paths.get(unit.storage)
        return None if path is None else self._bases.decision_at(path)

    def _guess(self, unit: Unit, kind: BaseKind, full_bits: float) -> float:
        """Return the last estimate of bits, or a value that makes the writer try both forms for each chunk."""
        last = self._last(unit)
        bits = None if last is None else last.previous_bits if kind == "previous" else last.keyframe_bits
        return full_bits * UNKNOWN_SHARE if bits is None else bits


def _against(frames: Iterable[LocatedFrame], bits: float) -> DeltaCost:
    frames = list(frames)
    return DeltaCost(bits, sum(map(read_nbytes, frames)), max(frame.frame.depth for frame in frames))


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def sampled_of(unit: Unit) -> Sequence[int]:
    """Return the chunks of a unit to sample: at most ``SAMPLED_CHUNKS_MAX``, evenly spread."""
    chunks = unit.chunks
    count = min(len(chunks), SAMPLED_CHUNKS_MAX)
    return [chunks[index * len(chunks) // count] for index in range(count)]


def storage_decision(
    sampled: SampledUnit, base: BaseKind | None, mode: int, new_bits: float | None = None
) -> StorageDecision:
    """Return the manifest's record of how a storage was stored.

    Args:
        sampled: Its unit, as sampled.
        base: The base that was chosen for the unit.
        mode: How the storage was stored in the end.
        new_bits: Stored bits per element. Recorded in place of a guess, so that the next process has an estimate.
    """
    estimate = sampled.estimate

    def bits(kind: BaseKind) -> float | None:
        other = estimate.against(kind)
        if sampled.is_guess:
            return stored_bits(new_bits) if kind == base and mode == DELTA else None
        return None if other is None else stored_bits(other.bits)

    kind = base if base is not None and mode == DELTA else "none"
    age = estimate.age if mode in (DELTA, IDENTICAL) else 0
    return StorageDecision(mode, stored_bits(estimate.full_bits), bits("previous"), bits("keyframe"), kind, age)


@dataclass(frozen=True, slots=True)
class BaseSelection:
    """How every chunk of a commit is stored, and why.

    Args:
        plans: For each chunk of the plan, how to store it.
        decision: The base of each sampled unit, and the reason.
        sampled: The units that were sampled; empty if there was no choice.
        seqs: For each kind of base, the seq of the checkpoint that the bases belong to.
        lossy: The quantized chunks; None for an exact policy.
    """

    plans: tuple[StoragePlan, ...]
    decision: Decision
    sampled: tuple[SampledUnit, ...] = ()
    seqs: dict[BaseKind, int | None] = field(default_factory=dict)
    lossy: LossyChunks | None = None

    def remember(
        self,
        bases: BaseCache,
        manifest: Manifest,
        chunk_ids: Sequence[ChunkId],
        paths: Mapping[int, Path] | None = None,
        starts: Sequence[int] = (),
    ) -> None:
        """Make the published manifest the base of the next commit.

        Args:
            bases: Where it is remembered.
            manifest: The manifest.
            chunk_ids: The ids of the plan's chunks.
            paths: The path of the first tensor of each storage, if they are known.
            starts: Where each storage begins in the storage of the checkpoint; empty: at 0.
        """
        for sampled in self.sampled:
            for index, sample in sampled.samples.items():
                bases.keep_sample(chunk_ids[index], sample)
        bases.follow(manifest, paths, starts)

    def modes(self, chunks_of: Sequence[tuple[int, ...]], stored: WriteResult) -> list[int]:
        """Return the mode that each storage was stored in; ``chunks_of`` has the chunks of each."""
        lossy = {loss.storage for loss in stored.losses}

        # Ten thousand small storages may share one chunk.
        @cache
        def mode(chunks: tuple[int, ...]) -> int:
            new = [chunk for chunk in chunks if stored.is_new[chunk]]
            if not new:
                return IDENTICAL
            if any(stored.is_rounding[chunk] for chunk in new):
                return DERIVED
            if any(stored.frames[chunk].base is not None for chunk in new):
                return DELTA
            return FULL if self.sampled else UNSAMPLED

        return [RESIDUAL if index in lossy else mode(chunks) for index, chunks in enumerate(chunks_of)]

    def decisions(self, modes: Sequence[int], new_bits: Sequence[float | None] | None = None) -> Decisions | None:
        """Return the manifest's record of the decision, given each storage's mode and stored bits per element."""
        if not self.sampled:
            return None
        kind = self.decision.newest_base
        reason, lossy = self.decision.reason, self.lossy
        if lossy is not None and lossy.chunks:
            # The bound on read amplification is for the whole state, so its reason is left out for the exact rest.
            reason = f"the rest: {self.decision.saving or reason}"
        if lossy is not None and lossy.reason:
            reason = f"{lossy.reason}; {reason}"
        decided = zip(self.sampled, self.decision.kinds, strict=True)
        by_storage = {sampled.unit.storage: (sampled, base) for sampled, base in decided}
        unsampled = {mode: StorageDecision(mode) for mode in set(modes)}
        return Decisions(
            base=self.decision.base,
            base_seq=None if kind is None else self.seqs[kind],
            keyframe_seq=None if kind is None else self.seqs["keyframe"],
            reason=reason,
            storages=tuple(
                storage_decision(*by_storage[index], mode, new_bits[index] if new_bits else None)
                if index in by_storage
                else unsampled[mode]
                for index, mode in enumerate(modes)
            ),
        )


def select_bases(
    captured: Captured,
    plan: CommitPlan,
    chunk_index: ChunkIndex,
    bases: BaseCache,
    policy: Policy,
    limits: Limits,
    candidates: LossyCandidates | None = None,
) -> BaseSelection:
    """Choose how every chunk is stored. Reads samples of the state, and nothing from the store.

    Args:
        captured: The state.
        plan: How it is cut into chunks.
        chunk_index: Where chunks are stored.
        bases: The chunks of the previous checkpoint.
        policy: How to store the state.
        limits: Bounds of the store.
        candidates: The storages that may be quantized; None for an exact policy.
    """
    masters = {} if policy.compression == "none" else masters_of(plan, captured.storages)
    paths = paths_of_storages(captured)
    lossy: LossyChunks | None = None
    if candidates is not None:
        amplification = policy.read_amplification_max
        lossy = candidates.plan(plan, paths, masters, chunk_index, bases, limits, read_amplification_max=amplification)
        masters = {chunk: master for chunk, master in masters.items() if chunk not in lossy.unpaired}
    quantized = frozenset() if lossy is None else lossy.chunks
    if policy.compression == "none" or not policy.delta:
        reason = "keyframe: the policy codes nothing" if policy.compression == "none" else "keyframe: no differences"
        decision = Decision((), reason)
        return BaseSelection(_plans_for(plan, [], decision, masters, is_held=frozenset()), decision, lossy=lossy)
    sampler = UnitSampler(plan, captured.storages, paths, chunk_index, bases)
    sampled = [
        sampler.sample(unit)
        for unit in units_of(plan)
        if not all(chunk in masters or chunk in quantized for chunk in unit.chunks)
    ]
    decision = decide(
        [each.estimate for each in sampled],
        read_amplification_max=policy.read_amplification_max,
        depth_max=limits.depth_max,
    )
    is_held = frozenset(_held(sampled, decision)) if policy.base_cache == "memory" else frozenset()
    plans = _plans_for(plan, sampled, decision, masters, is_held=is_held)
    if lossy is not None:
        plans = _with_bases(plans, lossy, is_held=policy.base_cache == "memory")
    return BaseSelection(
        plans, decision, tuple(sampled), {"previous": bases.seq, "keyframe": bases.keyframe_seq}, lossy
    )


def paths_of_storages(captured: Captured) -> dict[int, Path]:
    """Return the path of the first tensor that views each storage."""
    return captured.structure.once(
        "paths", lambda: first_paths(captured.tree, [tensor.storage for tensor in captured.tensors])
    )


def _with_bases(plans: tuple[StoragePlan, ...], lossy: LossyChunks, *, is_held: bool) -> tuple[StoragePlan, ...]:
    """Return plans in which quantized weights have their bases: for storing them exactly if a bound is exceeded."""
    found = list(plans)
    for chunk, base in lossy.weight_bases.items():
        found[chunk] = StoragePlan(base, is_unsampled=True, is_held=is_held)
    return tuple(found)


def _plans_for(
    plan: CommitPlan,
    sampled: Sequence[SampledUnit],
    decision: Decision,
    masters: dict[int, int],
    *,
    is_held: frozenset[int],
) -> tuple[StoragePlan, ...]:
    plans = [StoragePlan(master=masters.get(index), is_held=index in is_held) for index in range(len(plan.chunks))]
    for each, kind in zip(sampled, decision.kinds, strict=True):
        for index, frame in each.frames[kind].items() if kind is not None else ():
            if index not in masters:
                plans[index] = StoragePlan(frame, each.is_guess, None, index in is_held)
    return tuple(plans)


def _held(sampled: Sequence[SampledUnit], decision: Decision) -> list[int]:
    """Return the chunks that the next commit will probably need as bases."""
    found: list[int] = []
    for each, kind in zip(sampled, decision.kinds, strict=True):
        estimate = each.estimate
        is_candidate = estimate.previous is None or each.is_guess or estimate.saves("previous")
        # Unchanged chunks are held already.
        is_candidate = is_candidate and estimate.identical_read_nbytes is None
        # A unit that is coded against the keyframe will be so again, and the keyframe's chunks are held already.
        if is_candidate and kind != "keyframe":
            found += each.unit.chunks
    return found


_PROBE_COUNT = 64
"""Elements per probe."""

_PROBE_POSITIONS = (0.13, 0.5, 0.71)
"""Positions of the probes, as shares of the storage. Several, because rows that never changed are equal in many
tensors."""

_KINDS = (1, 2)
"""bf16 and fp16, as kernels number them."""


def masters_of(plan: CommitPlan, storages: Sequence[ByteSource]) -> dict[int, int]:
    """Return the chunks that may be bf16 or fp16 roundings, each with the fp32 chunk that may be its master.

    Only a few elements are compared, so a pair may be wrong. Coding compares every bit: a wrong pair costs time and
    never bytes. All numbers are indices of the plan.
    """
    rounded = [index for index, spec in enumerate(plan.storages) if spec.element_width == 2 and spec.is_float]
    if not rounded:
        return {}
    sizes = {2 * plan.storages[index].nbytes for index in rounded}
    whole = _chunks_of_large_storages(plan)
    by_probe: dict[tuple[int, bytes], int] = {}
    for index, spec in enumerate(plan.storages):
        if spec.is_float and spec.element_width == 4 and spec.nbytes in sizes and index in whole:
            for probe in _rounded_probes(storages[index], spec.nbytes // 4):
                by_probe.setdefault((spec.nbytes // 4, probe), index)
    found: dict[int, int] = {}
    for index in rounded:
        count = plan.storages[index].nbytes // 2
        master = by_probe.get((count, _probe(storages[index], count, 2))) if index in whole else None
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


def _probe(storage: ByteSource, count: int, width: int) -> bytes:
    """Return ``_PROBE_COUNT`` elements from each of ``_PROBE_POSITIONS``."""
    found = []
    for place in _PROBE_POSITIONS:
        start = max(0, int(count * place) - _PROBE_COUNT // 2)
        found.append(bytes(storage.read(start * width, min(count, start + _PROBE_COUNT) * width)))
    return b"".join(found)


def _rounded_probes(storage: ByteSource, count: int) -> list[bytes]:
    probe = _probe(storage, count, 4)
    probes = []
    for kind in _KINDS:
        rounded = bytearray(len(probe) // 2)
        kernels.round_floats(memoryview(probe), memoryview(rounded), kind)
        # A constant probe matches too many tensors.
        if bytes(rounded) != bytes(rounded[:2]) * (len(rounded) // 2):
            probes.append(bytes(rounded))
    return probes
