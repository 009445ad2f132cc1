"""Decide what is stored with a loss in one commit, and against what; and when everything is exact again.

The plan puts chunks of the same elements into one task: a weight with its roundings, a second moment and the first one
that is told in its root.

Invariants:
- The base of a weight is the chunk that the previous checkpoint's manifest locates: its reconstruction.
- A weight that has no such base, or whose chain takes too much reading, is stored exactly in this commit.
- A keyframe is exact as a whole: nothing has a base, or it is the turn of one in ``keyframe_every``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckstore.bases import Bases, read_nbytes
from ckstore.config import Limits
from ckstore.lossy import Candidates, LossyPlan, LossyTensor, Task
from ckstore.plan import CommitPlan
from ckstore.store.known import Known, KnownFrame
from ckstore.tree import Path

_BEGINS = "exact as a whole: a chain begins"

_EXACT_SHARE = 0.8
"""About what is left of a float when it is coded exactly, for comparing what restores read."""


def plan_lossy(
    candidates: Candidates,
    plan: CommitPlan,
    paths: Mapping[int, Path],
    masters: Mapping[int, int],
    known: Known,
    bases: Bases,
    limits: Limits,
    *,
    read_amplification_max: float,
) -> LossyPlan:
    """Choose what is stored with a loss in this commit.

    Args:
        candidates: What may be.
        plan: How the state is cut into chunks.
        paths: The path of the first tensor of each storage, as bases know it.
        masters: Chunks that may be roundings, and those whose they may be.
        known: Where chunks lie.
        bases: What the previous checkpoint holds.
        limits: Bounds of the store.
        read_amplification_max: The most that restoring a weight and its moments may read, in what they would take
            exactly; moments have no chain: quantized they take almost nothing, and exact ones what they take.
    """
    residual = candidates.residual
    if bases.hops_max + 1 >= residual.keyframe_every:
        return LossyPlan(residual, reason=f"exact as a whole: one in {residual.keyframe_every} is")
    if bases.seq is None and candidates.is_first_exact:
        return LossyPlan(residual, reason=_BEGINS)
    planner = _Planner(candidates, plan, masters, limits)
    planner.find_masters()
    due: list[str] = []
    share, share_exact = planner.state_share()
    read_share_max = _EXACT_SHARE * (read_amplification_max * share - share_exact)
    for storage, tensor in sorted(candidates.tensors.items()):
        if tensor.role == "weight":
            hops = bases.hops_at(paths.get(storage)) + 1
            frames = planner.bases_of(storage, paths[storage], known, bases)
            read = sum(map(read_nbytes, frames.values()))
            if not frames or read > read_share_max * plan.storages[storage].nbytes:
                due.append(tensor.path)
                continue
            planner.add_weight(replace(tensor, hops=hops), frames)
    if due and not planner.tensors and candidates.is_first_exact:
        return LossyPlan(residual, reason=_BEGINS)
    planner.add_moments({storage: bases.hops_at(paths.get(storage)) + 1 for storage in candidates.tensors})
    reason = _reason(planner, due, bases.seq)
    return LossyPlan(residual, planner.tensors, planner.tasks(), reason, candidates.weight_of)


def _reason(planner: _Planner, due: Sequence[str], seq: int | None) -> str:
    count = sum(tensor.role == "weight" for tensor in planner.tensors.values())
    moments = len(planner.tensors) - count
    parts = [f"{count} weights as residuals of seq {seq}"] if count else []
    parts += [f"{len(due)} weights exact: a chain begins"] if due else []
    parts += [f"{moments} moments quantized"] if moments else []
    return ", ".join(parts)


class _Planner:
    """Collects tasks."""

    def __init__(self, candidates: Candidates, plan: CommitPlan, masters: Mapping[int, int], limits: Limits) -> None:
        self.tensors: dict[int, LossyTensor] = {}
        self._candidates = candidates
        self._plan = plan
        self._masters = masters
        self._limits = limits
        self._chunks: dict[int, list[int]] = {}
        for index, chunk in enumerate(plan.chunks):
            if len(chunk.sources) == 1:
                self._chunks.setdefault(chunk.sources[0].storage, []).append(index)
        self._tasks: dict[tuple[int, int], Task] = {}

    def find_masters(self) -> None:
        """Let roundings go with their masters, which are weights wherever they stand."""
        candidates = self._candidates
        for chunk, master in self._masters.items():
            rounded, storage = self._storage_of(chunk), self._storage_of(master)
            own = candidates.tensors.pop(rounded, None)
            if own is not None and storage not in candidates.tensors:
                candidates.add_master(storage)

    def state_share(self) -> tuple[float, float]:
        """Return the bytes of weights and moments in those of the weights, and those of moments that stay exact."""
        candidates, storages = self._candidates, self._plan.storages
        exact = candidates.exact_moments()
        nbytes = {storage: storages[storage].nbytes for storage in {*candidates.tensors, *exact}}
        weights = sum(storages[index].nbytes for index, each in candidates.tensors.items() if each.role == "weight")
        return sum(nbytes.values()) / max(1, weights), sum(nbytes[storage] for storage in exact) / max(1, weights)

    def bases_of(self, storage: int, path: Path, known: Known, bases: Bases) -> dict[int, KnownFrame]:
        """Return the frame of the base of each chunk of a storage; nothing where one has none."""
        found: dict[int, KnownFrame] = {}
        for index in self._chunks.get(storage, ()):
            chunk = self._plan.chunks[index]
            place = (path, chunk.sources[0].offset)
            chunk_id = bases.previous_at(place, chunk.nbytes, chunk.element_width, chunk.is_float)
            frame = None if chunk_id is None else known.find(chunk_id)
            if frame is None or frame.frame.depth >= self._limits.depth_max:
                return {}
            found[index] = frame
        return found

    def add_weight(self, tensor: LossyTensor, frames: Mapping[int, KnownFrame]) -> None:
        """Add the tasks of a weight."""
        rounded: dict[int, list[int]] = {}
        for chunk, master in self._masters.items():
            rounded.setdefault(master, []).append(chunk)
        for index in self._chunks[tensor.storage]:
            key = (tensor.storage, self._plan.chunks[index].sources[0].offset)
            self._tasks[key] = Task(index, frames[index], tuple(rounded.get(index, ())))
        self.tensors[tensor.storage] = tensor

    def add_moments(self, hops: Mapping[int, int]) -> None:
        """Add every second moment with the first one of the same elements."""
        tensors = self._candidates.tensors
        for first, second in sorted(self._candidates.second_of.items()):
            if second not in tensors or first not in tensors:
                continue
            pairs = list(self._aligned(second, first))
            if not pairs or len(pairs) != len(self._chunks.get(second, ())):
                continue
            for offset, two, one in pairs:
                self._tasks[second, offset] = Task(second=two, first=one)
            for storage in (second, first):
                self.tensors[storage] = replace(tensors[storage], hops=hops[storage])

    def _aligned(self, second: int, first: int) -> Iterator[tuple[int, int, int]]:
        for two, one in zip(self._chunks.get(second, ()), self._chunks.get(first, ()), strict=False):
            offset = self._plan.chunks[two].sources[0].offset
            if offset == self._plan.chunks[one].sources[0].offset and self._is_alike(two, one):
                yield offset, two, one

    def _is_alike(self, one: int, other: int) -> bool:
        chunk, beside = self._plan.chunks[one], self._plan.chunks[other]
        return (chunk.nbytes, chunk.element_width) == (beside.nbytes, beside.element_width)

    def tasks(self) -> tuple[Task, ...]:
        """Return all tasks, by their lowest chunk."""
        return tuple(sorted(self._tasks.values(), key=lambda task: min(task.chunks)))

    def _storage_of(self, chunk: int) -> int:
        return self._plan.chunks[chunk].sources[0].storage
