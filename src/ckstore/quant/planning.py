"""Find the tensors of a state that may be quantized, and choose which are quantized in one commit.

A candidate is a storage that one tensor fills, whose role is known and whose settings are not "exact". Not candidates:
small tensors, vectors, non-floats, tensors of unknown role, and counters.

The plan puts chunks of the same elements into one task: a weight with its roundings, or a second moment with the first
moment that is coded relative to its root.

Invariants:
- The base of a weight is the chunk that the previous checkpoint's manifest locates: its reconstruction.
- A weight without such a base, or whose chain would take too much reading, is stored exactly in this commit.
- A keyframe is exact as a whole: one commit in ``keyframe_every``, and every commit without bases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ckstore.commit.chunking import CommitPlan
from ckstore.config import EXACT, Limits, Residual
from ckstore.delta.base_cache import BaseCache, read_nbytes
from ckstore.format.tensors import TensorSpec, byte_strides_of, count_of
from ckstore.format.tree import Path, format_path
from ckstore.quant.chunk_codec import Settings
from ckstore.quant.roles import FLOAT_NAMES, AdamConstants, Pairing, Role, pair
from ckstore.state.capture import Captured
from ckstore.state.tensors import HostStorage
from ckstore.store.chunk_index import ChunkIndex, LocatedFrame

_COUNT_WORD = re.compile(
    r"(?i)(\w+_)?(counts?|counters?|hist(ogram)?s?|usages?|confusion(_?mat(rix)?)?|cluster_sizes?|frequenc(y|ies))"
    r"|num_\w+|n_\w+|tokens_per_\w+"
)
"""Names of buffers that count something, or average counts."""

_FIRST_NBYTES, _LATER_NBYTES = 4096, 1 << 20

FloatName = Literal["float32", "bfloat16", "float16"]

WIDTHS: Mapping[FloatName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

_STEP_DTYPES = {"float32": "<f4", "float64": "<f8", "int64": "<i8", "int32": "<i4"}
"""numpy dtypes of step counters, by the names that torch uses."""


@dataclass(frozen=True, slots=True)
class LossyTensor:
    """A storage that may be quantized.

    Args:
        storage: Index of the storage.
        role: Weight, first or second moment.
        path: The dotted path of its tensor.
        dtype: Of its elements.
        memory_shape: Its dimensions in memory order, slowest first.
        settings: How it is quantized; ``"exact"`` for an exact moment whose partner is quantized.
        lossy_depth: Lossy commits since it was exact, this one included.
        constants: The optimizer's constants, for moments.
    """

    storage: int
    role: Role
    path: str
    dtype: FloatName
    memory_shape: tuple[int, ...]
    settings: Settings | Literal["exact"]
    lossy_depth: int = 1
    constants: AdamConstants | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """Chunks of the same elements, which one thread quantizes together: a weight, or both moments of one.

    All numbers are indices of the plan; -1 for none.

    Args:
        weight: A chunk of a weight.
        base: The frame of its base.
        rounded: Chunks that may be roundings of the weight.
        second: A chunk of a second moment.
        first: The same elements of the first moment.
    """

    weight: int = -1
    base: LocatedFrame | None = None
    rounded: tuple[int, ...] = ()
    second: int = -1
    first: int = -1

    @property
    def chunks(self) -> tuple[int, ...]:
        """All chunks, each after the one that it needs."""
        return tuple(index for index in (self.weight, *self.rounded, self.second, self.first) if index >= 0)


@dataclass(frozen=True, slots=True)
class LossyPlan:
    """What is quantized in one commit.

    Args:
        residual: The policy.
        tensors: The quantized tensors by storage, without roundings.
        tasks: Ordered by their lowest chunk.
        reason: The decision in a sentence, as recorded in the manifest.
        weight_of: The weight of each moment, by storage.
        unpaired: Chunks that a rule keeps exact although they may be roundings of quantized weights.
    """

    residual: Residual
    tensors: Mapping[int, LossyTensor] = field(default_factory=dict)
    tasks: tuple[Task, ...] = ()
    reason: str = ""
    weight_of: Mapping[int, int] = field(default_factory=dict)
    unpaired: frozenset[int] = frozenset()

    @property
    def weight_bases(self) -> Mapping[int, LocatedFrame | None]:
        """The base of each chunk of a quantized weight."""
        return {task.weight: task.base for task in self.tasks if task.weight >= 0}

    @property
    def chunks(self) -> frozenset[int]:
        """All chunks of all tasks."""
        return frozenset(index for task in self.tasks for index in task.chunks)


class Candidates:
    """The storages of a state that may be quantized. Used for one plan, which may change them.

    Args:
        captured: The state.
        residual: The settings.
        is_first_exact: A state in which no weight has a base is stored exactly; else its moments are quantized.
    """

    def __init__(self, captured: Captured, residual: Residual, *, is_first_exact: bool = True) -> None:
        self.residual = residual
        self.is_first_exact = is_first_exact
        self.tensors: dict[int, LossyTensor] = {}
        self.second_of: dict[int, int] = {}
        self.weight_of: dict[int, int] = {}
        self._captured = captured
        self._pairing: Pairing = pair(captured.tree, captured.tensors)
        self._paired = frozenset(self._pairing.weight_of.values())
        self._views: dict[int, list[int]] = {}
        for index in self._pairing.paths:
            self._views.setdefault(captured.tensors[index].storage, []).append(index)
        for storage in self._views:
            self._add(storage)
        storage_of = [tensor.storage for tensor in captured.tensors]
        pairing = self._pairing
        self.second_of = {storage_of[one]: storage_of[other] for one, other in pairing.second_of.items()}
        self.weight_of = {storage_of[one]: storage_of[other] for one, other in pairing.weight_of.items()}

    @property
    def unshared(self) -> frozenset[int]:
        """Storages that need chunks of their own, however small they are."""
        return frozenset(self.tensors)

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
    ) -> LossyPlan:
        """Choose what is quantized in this commit; see ``plan_lossy``."""
        return plan_lossy(
            self, plan, paths, masters, chunk_index, bases, limits, read_amplification_max=read_amplification_max
        )

    def keeps_exact(self, storage: int) -> bool:
        """Return True if a rule keeps a weight in this storage exact, even as the rounding of a quantized weight."""
        return self._settings(self._views.get(storage, []), "weight") is None

    def exact_moments(self) -> Mapping[int, int]:
        """Return the exact moments of weights that may be quantized, each with its weight."""
        return {
            moment: weight
            for moment, weight in self.weight_of.items()
            if weight in self.tensors and (moment not in self.tensors or self.tensors[moment].settings == EXACT)
        }

    def add_master(self, storage: int) -> None:
        """Add an optimizer's storage as a weight, because a weight of the model is its rounding."""
        self._add(storage, is_master=True)

    def _add(self, storage: int, *, is_master: bool = False) -> None:
        views = self._views.get(storage, [])
        roles = {"weight" if is_master else self._role_of(index) for index in views}
        specs = [self._captured.tensors[index] for index in views]
        if len(roles) != 1 or len({(spec.library, spec.dtype) for spec in specs}) != 1:
            return
        role = roles.pop()
        dtype = FLOAT_NAMES.get(specs[0].dtype)
        if role not in ("weight", "first", "second") or dtype is None:
            return
        nbytes = self._captured.storages[storage].nbytes
        shape = next((shape for spec in specs if (shape := memory_shape(spec, WIDTHS[dtype], nbytes))), None)
        if shape is None or len(shape) < 2 or count_of(shape) < self.residual.nelements_min:
            return
        if role == "weight" and not is_master and self._counts(views, storage, dtype):
            return
        settings = self._settings(views, role)
        if settings is not None:
            constants = self._constants(views[0])
            path = format_path(self._pairing.paths[views[0]])
            self.tensors[storage] = LossyTensor(storage, role, path, dtype, shape, settings, constants=constants)

    def _role_of(self, index: int) -> Role | None:
        """Return a tensor's role; an unknown tensor is a weight if a rule names it."""
        if index in self._pairing.unknown:
            return "weight" if self.residual.names(format_path(self._pairing.paths[index])) else None
        return self._pairing.roles.get(index)

    def _counts(self, views: Sequence[int], storage: int, dtype: FloatName) -> bool:
        """Return True if a supposed weight is a counter, by its name or its values.

        A weight that has optimizer moments is not a counter, and neither is one that a rule names.
        """
        if not self._paired.isdisjoint(views):
            return False
        paths = [
            path for index in views for path in (self._pairing.paths[index], *self._pairing.other_paths.get(index, ()))
        ]
        if any(self.residual.names(format_path(path)) for path in paths):
            return False
        if any(_COUNT_WORD.fullmatch(str(path[-1]).rpartition(".")[2]) for path in paths if path):
            return True
        return _holds_integers(self._captured.storages[storage], dtype)

    def _settings(self, views: Sequence[int], role: Role) -> Settings | Literal["exact"] | None:
        """Return how a storage is quantized; None if it stays exact and no other tensor depends on it."""
        pairing = self._pairing
        weights = [pairing.weight_of[index] for index in views if index in pairing.weight_of]
        indices = (*views, *weights)
        paths = [format_path(path) for i in indices for path in (pairing.paths[i], *pairing.other_paths.get(i, ()))]
        chosen = self.residual.settings_for(paths)
        if isinstance(chosen, str):
            return None
        if role == "weight":
            return None if chosen.weights == EXACT else chosen.weights
        # An exact moment with a quantized partner is still part of the task, because their quotient is the step.
        is_exact = chosen.second == EXACT and chosen.first == EXACT
        return None if is_exact else chosen.second if role == "second" else chosen.first

    def _constants(self, index: int) -> AdamConstants | None:
        """Return the optimizer's constants for a moment, with the value of its step counter."""
        constants = self._pairing.constants.get(self._pairing.second_of.get(index, index))
        if constants is None or constants.step_tensor is None:
            return constants
        spec = self._captured.tensors[constants.step_tensor]
        dtype = _STEP_DTYPES.get(spec.dtype, spec.dtype)
        if dtype not in _STEP_DTYPES.values() or count_of(spec.shape) != 1:
            return replace(constants, step_tensor=None)
        content = self._captured.storages[spec.storage].read(spec.offset, spec.offset + np.dtype(dtype).itemsize)
        return replace(constants, step=float(np.frombuffer(bytes(content), dtype)[0]), step_tensor=None)


def _holds_integers(storage: HostStorage, dtype: FloatName) -> bool:
    """Return True if every element is a whole number. For most weights, the first few bytes show that it is not."""
    begin, step = 0, _FIRST_NBYTES
    while begin < storage.nbytes:
        end = min(begin + step, storage.nbytes)
        content = bytes(storage.read(begin, end))
        if dtype == "bfloat16":
            values = (np.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(content, "<f4" if dtype == "float32" else "<f2").astype("<f4")
        # NaN and infinity are not counts.
        if not (np.isfinite(values) & (values == np.rint(values))).all():
            return False
        begin, step = end, _LATER_NBYTES
    return True


def memory_shape(spec: TensorSpec, width: int, nbytes: int) -> tuple[int, ...] | None:
    """Return a tensor's dimensions in memory order, slowest first; None if it does not fill its storage."""
    if spec.offset or not nbytes or count_of(spec.shape) * width != nbytes:
        return None
    strides = byte_strides_of(spec.library, spec.strides, width)
    dims = sorted(
        ((step, length) for step, length in zip(strides, spec.shape, strict=True) if length > 1), reverse=True
    )
    reach = width
    for step, length in reversed(dims):
        if step != reach:
            return None
        reach *= length
    return tuple(length for _, length in dims)


_BEGINS = "exact as a whole: a chain begins"

_EXACT_SHARE = 0.8
"""Approximate share of a float that exact coding needs, for estimating what a restore reads."""


def plan_lossy(
    candidates: Candidates,
    plan: CommitPlan,
    paths: Mapping[int, Path],
    masters: Mapping[int, int],
    chunk_index: ChunkIndex,
    bases: BaseCache,
    limits: Limits,
    *,
    read_amplification_max: float,
) -> LossyPlan:
    """Choose what is quantized in this commit.

    Args:
        candidates: The storages that may be quantized.
        plan: How the state is cut into chunks.
        paths: The path of the first tensor of each storage, as ``bases`` names it.
        masters: Chunks that may be roundings, each with the chunk that it may be a rounding of.
        chunk_index: Where chunks are stored.
        bases: The chunks of the previous checkpoint.
        limits: Bounds of the store.
        read_amplification_max: Bound on the bytes read to restore a weight and its moments, as a multiple of their
            exact size. Moments have no chain: quantized ones read almost nothing, exact ones their size.
    """
    residual = candidates.residual
    if bases.lossy_depth_max + 1 >= residual.keyframe_every:
        return LossyPlan(residual, reason=f"exact as a whole: one in {residual.keyframe_every} is")
    if bases.seq is None and candidates.is_first_exact:
        return LossyPlan(residual, reason=_BEGINS)
    exact_roundings = _exact_roundings(plan, masters, candidates)
    planner = _Planner(
        candidates, plan, {one: other for one, other in masters.items() if one not in exact_roundings}, limits
    )
    planner.find_masters()
    due: list[str] = []
    share, share_exact = planner.state_share()
    read_share_max = _EXACT_SHARE * (read_amplification_max * share - share_exact)
    for storage, tensor in sorted(candidates.tensors.items()):
        if tensor.role == "weight":
            lossy_depth = bases.lossy_depth_at(paths.get(storage)) + 1
            frames = planner.bases_of(storage, paths[storage], chunk_index, bases)
            read = sum(map(read_nbytes, frames.values()))
            if not frames or read > read_share_max * plan.storages[storage].nbytes:
                due.append(tensor.path)
                continue
            planner.add_weight(replace(tensor, lossy_depth=lossy_depth), frames)
    if due and not planner.tensors and candidates.is_first_exact:
        return LossyPlan(residual, reason=_BEGINS)
    planner.add_moments({storage: bases.lossy_depth_at(paths.get(storage)) + 1 for storage in candidates.tensors})
    reason = _reason(planner, due, bases.seq)
    found = LossyPlan(residual, planner.tensors, planner.tasks(), reason, candidates.weight_of)
    quantized = found.chunks
    return replace(found, unpaired=frozenset(chunk for chunk in exact_roundings if masters[chunk] in quantized))


def _exact_roundings(plan: CommitPlan, masters: Mapping[int, int], candidates: Candidates) -> frozenset[int]:
    """Return the chunks that may be roundings and that a rule keeps exact."""
    storage_of = {chunk: plan.chunks[chunk].sources[0].storage for chunk in masters}
    exact = {storage for storage in set(storage_of.values()) if candidates.keeps_exact(storage)}
    return frozenset(chunk for chunk, storage in storage_of.items() if storage in exact)


def _reason(planner: _Planner, due: Sequence[str], seq: int | None) -> str:
    count = sum(tensor.role == "weight" for tensor in planner.tensors.values())
    moments = len(planner.tensors) - count
    parts = [f"{count} weights as residuals of seq {seq}"] if count else []
    parts += [f"{len(due)} weights exact: a chain begins"] if due else []
    parts += [f"{moments} moments quantized"] if moments else []
    return ", ".join(parts)


class _Planner:
    """Collects the tasks of a plan."""

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
        """Remove roundings from the candidates, and add their masters, which are weights even inside an optimizer."""
        candidates = self._candidates
        for chunk, master in self._masters.items():
            rounded, storage = self._storage_of(chunk), self._storage_of(master)
            own = candidates.tensors.pop(rounded, None)
            if own is not None and storage not in candidates.tensors:
                candidates.add_master(storage)

    def state_share(self) -> tuple[float, float]:
        """Return the bytes of weights and moments, and of exact moments, both as multiples of the weights' bytes."""
        candidates, storages = self._candidates, self._plan.storages
        exact = candidates.exact_moments()
        nbytes = {storage: storages[storage].nbytes for storage in {*candidates.tensors, *exact}}
        weights = sum(storages[index].nbytes for index, each in candidates.tensors.items() if each.role == "weight")
        return sum(nbytes.values()) / max(1, weights), sum(nbytes[storage] for storage in exact) / max(1, weights)

    def bases_of(self, storage: int, path: Path, chunk_index: ChunkIndex, bases: BaseCache) -> dict[int, LocatedFrame]:
        """Return the frame of each chunk's base; nothing if one chunk of the storage has none."""
        found: dict[int, LocatedFrame] = {}
        for index in self._chunks.get(storage, ()):
            chunk = self._plan.chunks[index]
            place = (path, chunk.sources[0].offset)
            chunk_id = bases.previous_at(place, chunk.nbytes, chunk.element_width, chunk.is_float)
            frame = None if chunk_id is None else chunk_index.find(chunk_id)
            if frame is None or frame.frame.depth >= self._limits.depth_max:
                return {}
            found[index] = frame
        return found

    def add_weight(self, tensor: LossyTensor, frames: Mapping[int, LocatedFrame]) -> None:
        """Add the tasks of a weight."""
        rounded: dict[int, list[int]] = {}
        for chunk, master in self._masters.items():
            rounded.setdefault(master, []).append(chunk)
        for index in self._chunks[tensor.storage]:
            key = (tensor.storage, self._plan.chunks[index].sources[0].offset)
            self._tasks[key] = Task(index, frames[index], tuple(rounded.get(index, ())))
        self.tensors[tensor.storage] = tensor

    def add_moments(self, lossy_depths: Mapping[int, int]) -> None:
        """Add a task for every pair of moments whose chunks have the same elements."""
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
                self.tensors[storage] = replace(tensors[storage], lossy_depth=lossy_depths[storage])

    def _aligned(self, second: int, first: int) -> Iterator[tuple[int, int, int]]:
        for two, one in zip(self._chunks.get(second, ()), self._chunks.get(first, ()), strict=False):
            offset = self._plan.chunks[two].sources[0].offset
            if offset == self._plan.chunks[one].sources[0].offset and self._is_alike(two, one):
                yield offset, two, one

    def _is_alike(self, one: int, other: int) -> bool:
        chunk, partner = self._plan.chunks[one], self._plan.chunks[other]
        return (chunk.nbytes, chunk.element_width) == (partner.nbytes, partner.element_width)

    def tasks(self) -> tuple[Task, ...]:
        """Return all tasks, by their lowest chunk."""
        return tuple(sorted(self._tasks.values(), key=lambda task: min(task.chunks)))

    def _storage_of(self, chunk: int) -> int:
        return self._plan.chunks[chunk].sources[0].storage
