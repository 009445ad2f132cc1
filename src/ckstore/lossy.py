"""Tell which tensors of a state may be stored with a loss, and how.

A candidate is a storage that one tensor fills, whose role is known and whose settings are not "exact". ``lossy_plan``
decides which of them are stored so in a commit, and against what.

Invariants:
- What is small, of one dimension, no float, or of unknown meaning is no candidate; nor is what counts something.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ckstore.capture import Captured
from ckstore.pairing import FLOAT_NAMES, AdamConstants, Pairing, Role, pair
from ckstore.quant.settings import (
    EXACT,
    FirstMomentSettings,
    Residual,
    SecondMomentSettings,
    WeightSettings,
)
from ckstore.store.known import KnownFrame
from ckstore.tensor import HostStorage, TensorSpec, byte_strides_of, count_of
from ckstore.tree import format_path

_COUNT_WORD = re.compile(
    r"(?i)(\w+_)?(counts?|counters?|hist(ogram)?s?|usages?|confusion(_?mat(rix)?)?|cluster_sizes?|frequenc(y|ies))"
    r"|num_\w+|n_\w+|tokens_per_\w+"
)
"""What buffers are called that count something, averages of counts included."""

_FIRST_NBYTES, _LATER_NBYTES = 4096, 1 << 20

Settings = WeightSettings | FirstMomentSettings | SecondMomentSettings
FloatName = Literal["float32", "bfloat16", "float16"]

WIDTHS: Mapping[FloatName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

_STEP_DTYPES = {"float32": "<f4", "float64": "<f8", "int64": "<i8", "int32": "<i4"}
"""Of counters of steps; what numpy makes has these names already."""


@dataclass(frozen=True, slots=True)
class LossyTensor:
    """A storage that may be stored with a loss.

    Args:
        storage: Index of the storage.
        role: What it is.
        path: The dotted path of its tensor.
        dtype: Of its elements.
        memory_shape: Its dimensions in the order in which they lie in memory.
        settings: How it is quantized; ``"exact"`` for a moment that stays so beside one that does not.
        hops: Commits with a loss since it was exact, this one included.
        constants: What the optimizer says, of moments.
    """

    storage: int
    role: Role
    path: str
    dtype: FloatName
    memory_shape: tuple[int, ...]
    settings: Settings | Literal["exact"]
    hops: int = 1
    constants: AdamConstants | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """Chunks of the same elements, indices of the plan; -1 for none. One thread stores them together.

    It has a weight, or both moments of one.

    Args:
        weight: A chunk of a weight.
        base: The frame of its base.
        rounded: Chunks that may be roundings of the weight.
        second: A chunk of a second moment.
        first: The same elements of the first moment.
    """

    weight: int = -1
    base: KnownFrame | None = None
    rounded: tuple[int, ...] = ()
    second: int = -1
    first: int = -1

    @property
    def chunks(self) -> tuple[int, ...]:
        """All of them, each after what it needs."""
        return tuple(index for index in (self.weight, *self.rounded, self.second, self.first) if index >= 0)


@dataclass(frozen=True, slots=True)
class LossyPlan:
    """What is stored with a loss.

    Args:
        residual: The policy.
        tensors: By storage; roundings of others are not among them.
        tasks: By their lowest chunk.
        reason: A sentence for people.
        weight_of: The weight of moments, by storage.
    """

    residual: Residual
    tensors: Mapping[int, LossyTensor] = field(default_factory=dict)
    tasks: tuple[Task, ...] = ()
    reason: str = ""
    weight_of: Mapping[int, int] = field(default_factory=dict)

    @property
    def chunks(self) -> frozenset[int]:
        """All chunks of all tasks."""
        return frozenset(index for task in self.tasks for index in task.chunks)


class Candidates:
    """The storages of a state that may be stored with a loss.

    Args:
        captured: The state.
        residual: What is asked for.
        is_first_exact: A state of which no weight has a base is a keyframe; else moments are quantized all the same.
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
    def apart(self) -> frozenset[int]:
        """Storages that want chunks of their own, however small they are."""
        return frozenset(self.tensors)

    def keeps_exact(self, storage: int) -> bool:
        """Whether a rule says that a weight there stays as it is, were it even the rounding of one that does not."""
        return self._settings(self._views.get(storage, []), "weight") is None

    def exact_moments(self) -> Mapping[int, int]:
        """Return the moments that stay exact beside a weight that may be quantized, with that weight."""
        return {
            moment: weight
            for moment, weight in self.weight_of.items()
            if weight in self.tensors and (moment not in self.tensors or self.tensors[moment].settings == EXACT)
        }

    def add_master(self, storage: int) -> None:
        """Take a storage for a weight because another one is its rounding, although it stands in an optimizer."""
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
        """Return what a tensor is: what it was found to be, or a weight where a rule says so of what is unknown."""
        if index in self._pairing.unknown:
            return "weight" if self.residual.names(format_path(self._pairing.paths[index])) else None
        return self._pairing.roles.get(index)

    def _counts(self, views: Sequence[int], storage: int, dtype: FloatName) -> bool:
        """Whether what is taken for a weight counts something, by its name or its values: a buffer of a model.

        A weight that an optimizer trains counts nothing, and a rule that names it decides.
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
        """Return how a part is quantized; None: not at all, and nothing depends on it."""
        pairing = self._pairing
        weights = [pairing.weight_of[index] for index in views if index in pairing.weight_of]
        indices = (*views, *weights)
        paths = [format_path(path) for i in indices for path in (pairing.paths[i], *pairing.other_paths.get(i, ()))]
        chosen = self.residual.settings_for(paths)
        if isinstance(chosen, str):
            return None
        if role == "weight":
            return None if chosen.weights == EXACT else chosen.weights
        # An exact moment beside a quantized one must still be looked at: their quotient is the step.
        is_exact = chosen.second == EXACT and chosen.first == EXACT
        return None if is_exact else chosen.second if role == "second" else chosen.first

    def _constants(self, index: int) -> AdamConstants | None:
        """Return what the optimizer says of a moment, with the number of steps read."""
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
    """Whether every element is a whole number; of nearly every weight the first few bytes say that it is not so."""
    begin, step = 0, _FIRST_NBYTES
    while begin < storage.nbytes:
        end = min(begin + step, storage.nbytes)
        content = bytes(storage.read(begin, end))
        if dtype == "bfloat16":
            values = (np.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(content, "<f4" if dtype == "float32" else "<f2").astype("<f4")
        # What is no number equals nothing, and infinity counts nothing.
        if not (np.isfinite(values) & (values == np.rint(values))).all():
            return False
        begin, step = end, _LATER_NBYTES
    return True


def memory_shape(spec: TensorSpec, width: int, nbytes: int) -> tuple[int, ...] | None:
    """Return a tensor's dimensions as they lie in its storage, slowest first; None where it does not fill it."""
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
