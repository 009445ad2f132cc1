"""Adapters of torch for the ranks of a job: a DTensor as what this rank holds of it.

``ShardCaptureAdapter`` describes its local bytes for a commit, ``ShardRestoreAdapter`` the global tensor for a restore.

Invariants:
- A captured shard has its bytes in the order of the checkpoint: its ranges one after another, by ascending offset.
- A shard whose local tensor has another order is gathered to a copy each time it is described.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ckstore.format.tensors import TensorSpec, row_major_strides
from ckstore.format.tiles import Box, ranges_of
from ckstore.state.tensors import LeafBatch, LocalPart, TensorLeaf
from ckstore.state.torch_adapter import PLAIN_KINDS, TorchAdapter, as_words, dtype_named, is_strided
from ckstore.state.torch_objects import is_dtensor
from ckstore.state.torch_shards import Geometry, ShardedLeaf, ShardReader

if TYPE_CHECKING:
    from ckstore.format.tree import Path

_OWN_ATTRIBUTES = frozenset(("_is_param",))
"""Attributes that torch itself sets on tensors."""


class ShardRange(NamedTuple):
    """Bytes of a global tensor that this rank holds: where they begin there, their number, and all their holders."""

    offset: int
    nbytes: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How the local tensors of a geometry become bytes.

    Args:
        ranges: The ranges that this rank holds, by offset.
        blocks: The box of each range in the local tensors: number of the local tensor, begins and lengths.
        is_direct: Whether a contiguous local tensor has these bytes in this order.
    """

    ranges: tuple[ShardRange, ...]
    blocks: tuple[tuple[int, Box], ...]
    is_direct: bool


class CapturedShard(NamedTuple):
    """A shard that was described for a capture.

    Args:
        geometry: Where its boxes lie.
        plan: Where its bytes lie.
        itemsize: Bytes of one element.
        element_width: Bytes of the unit that byte planes are made of.
        is_float: Whether elements are floating-point numbers.
        view: Identifies the view of the local memory: equal for tied shards.
    """

    geometry: Geometry
    plan: ShardPlan
    itemsize: int
    element_width: int
    is_float: bool
    view: tuple[object, ...]


class ShardCaptureAdapter(TorchAdapter):
    """Describes shards by their local bytes.

    Attributes:
        found: The described shards by path, since ``begin``.
    """

    def __init__(self) -> None:
        self._reader = ShardReader()
        self._plans: dict[tuple[Geometry, int], ShardPlan] = {}
        self._gathered: dict[int, torch.Tensor] = {}
        """Copies that ``describe`` made, by id of the shard, until ``describe_many`` describes them once more."""
        self.found: dict[Path, CapturedShard] = {}

    def begin(self) -> None:
        """Begin a capture."""
        self.found = {}
        self._gathered = {}

    def describe(self, leaf: object, path: Path) -> TensorLeaf | None:
        """Describe a tensor, or the local bytes of a shard."""
        shard = None if type(leaf) in PLAIN_KINDS else self._reader.describe_shards(leaf, path)
        if shard is None:
            return super().describe(leaf, path)
        itemsize = shard.dtype.itemsize
        plan = self._plan_of(shard.geometry, itemsize)
        if not plan.is_direct:
            for each in shard.locals:
                # Refuse local tensors without plain memory before they are copied.
                super().describe(each, path)
        # The same shard may be at several paths. The walk keeps it alive, so its id stays unique.
        local = self._gathered.get(id(leaf))
        local = packed(shard, plan) if local is None else local
        found = super().describe(local, path)
        assert found is not None
        found.is_parameter, found.requires_grad = shard.is_parameter, shard.requires_grad
        if not (shard.locals and local is shard.locals[0]):
            self._gathered[id(leaf)] = local
        self.found[path] = CapturedShard(
            shard.geometry, plan, itemsize, found.element_width, found.is_float, _view_of(shard)
        )
        return found

    def describe_many(self, leaves: Sequence[object]) -> LeafBatch | None:
        """Return fingerprints of tensors and shards; None if ``describe`` would refuse or copy a plain one of them."""
        if PLAIN_KINDS.issuperset(map(type, leaves)):
            return super().describe_many(leaves)
        plain: list[object] = []
        marks: list[object] = []
        for leaf in leaves:
            if type(leaf) in PLAIN_KINDS:
                plain.append(leaf)
                marks.append(None)
                continue
            shard = self._reader.describe_shards(leaf)
            if shard is None or not _OWN_ATTRIBUTES.issuperset(getattr(leaf, "__dict__", ())):
                return None
            if not all(map(is_strided, shard.locals)):
                return None
            local = self._gathered.pop(id(leaf), None)
            plain.append(packed(shard, self._plan_of(shard.geometry, shard.dtype.itemsize)) if local is None else local)
            marks.append((shard.geometry, shard.is_parameter, shard.requires_grad))
        batch = super().describe_many(plain)
        if batch is None:
            return None
        facts = [each if mark is None else (each, mark) for each, mark in zip(batch.facts, marks, strict=True)]
        return batch._replace(facts=facts)

    def _plan_of(self, geometry: Geometry, itemsize: int) -> ShardPlan:
        plan = self._plans.get((geometry, itemsize))
        if plan is None:
            plan = self._plans[geometry, itemsize] = plan_of(geometry, itemsize)
        return plan


class ShardRestoreAdapter(TorchAdapter):
    """Describes shards by their global tensors, with the memory of their first local tensor."""

    takes_shards = True

    def __init__(self) -> None:
        self._reader = ShardReader()

    def describe(self, leaf: object, path: Path) -> TensorLeaf | None:
        """Describe a tensor, or the global tensor of a shard."""
        shard = None if type(leaf) in PLAIN_KINDS else self._reader.describe_shards(leaf, path)
        if shard is None:
            return super().describe(leaf, path)
        for each in shard.locals[1:]:
            super().describe(each, path)
        local = shard.locals[0] if shard.locals else torch.empty(0, dtype=shard.dtype)
        found = super().describe(local, path)
        assert found is not None
        found.shape, found.strides = shard.geometry.shape, row_major_strides(shard.geometry.shape)
        found.is_parameter, found.requires_grad = shard.is_parameter, shard.requires_grad
        return found

    def describe_many(self, leaves: Sequence[object]) -> LeafBatch | None:
        """Return fingerprints of tensors and shards; None if ``describe`` would refuse or copy a plain one of them."""
        if PLAIN_KINDS.issuperset(map(type, leaves)):
            return super().describe_many(leaves)
        plain: list[object] = []
        marks: list[object] = []
        for leaf in leaves:
            shard = None if type(leaf) in PLAIN_KINDS else self._reader.describe_shards(leaf)
            if shard is not None and len(shard.locals) != 1:
                return None
            plain.append(leaf if shard is None else shard.locals[0])
            marks.append(shard and (shard.geometry, shard.is_parameter, shard.requires_grad))
        batch = super().describe_many(plain)
        if batch is None:
            return None
        facts = [each if mark is None else (each, mark) for each, mark in zip(batch.facts, marks, strict=True)]
        return batch._replace(facts=facts)

    def local_parts(self, item: object) -> Sequence[LocalPart] | None:
        """Return the boxes that a shard holds, each with the view of the local tensor; None: a whole tensor."""
        shard = None if type(item) in PLAIN_KINDS else self._reader.describe_shards(item)
        if shard is None:
            return None
        geometry = shard.geometry
        return [
            LocalPart(
                part.box,
                shard.locals[part.local]
                if part.box.sizes == geometry.local_shapes[part.local]
                else block_of(shard.locals[part.local].detach(), Box(part.begin, part.box.sizes)),
            )
            for part in geometry.parts
        ]

    def empty_like(self, item: object, spec: TensorSpec) -> object | None:
        """Return a new shard with the mesh and placements of a live one; None: it is no shard, or has another shape."""
        if not is_dtensor(item) or tuple(item.shape) != spec.shape:  # type: ignore[attr-defined]
            return None
        with torch.no_grad():
            return torch.empty_like(cast("torch.Tensor", item).detach(), dtype=dtype_named(spec.dtype))


def plan_of(geometry: Geometry, itemsize: int) -> ShardPlan:
    """Return how the local tensors of a geometry become bytes of the checkpoint."""
    rows: list[tuple[ShardRange, int, Box]] = []
    for part in geometry.parts:
        for each in ranges_of(geometry.shape, itemsize, geometry.cuts, part.box):
            inside = tuple(
                begin + lo - first
                for begin, lo, first in zip(part.begin, each.box.offsets, part.box.offsets, strict=True)
            )
            block = Box(inside, each.box.sizes)
            rows.append((ShardRange(each.offset, each.nbytes, part.holders), part.local, block))
    rows.sort(key=lambda row: row[0].offset)
    ranges, blocks = tuple(row[0] for row in rows), tuple((row[1], row[2]) for row in rows)
    return ShardPlan(ranges, blocks, _is_direct(geometry, blocks))


def _is_direct(geometry: Geometry, blocks: Sequence[tuple[int, Box]]) -> bool:
    if len(geometry.local_shapes) != 1:
        return False
    shape, at = geometry.local_shapes[0], 0
    for _, block in blocks:
        if _position_in(shape, block) != at:
            return False
        at += math.prod(block.sizes)
    return True


def _position_in(shape: tuple[int, ...], block: Box) -> int | None:
    """Return the element at which a block begins in a contiguous tensor; None: it is not contiguous there."""
    position, step, is_whole = 0, 1, True
    for length, begin, count in zip(shape[::-1], block.offsets[::-1], block.sizes[::-1], strict=True):
        if not is_whole and count != 1:
            return None
        is_whole = is_whole and count == length
        position += begin * step
        step *= length
    return position


def packed(shard: ShardedLeaf, plan: ShardPlan) -> torch.Tensor:
    """Return the bytes of a shard in the order of the checkpoint: its local tensor itself, if it has this order."""
    if plan.is_direct and shard.locals[0].is_contiguous():
        return shard.locals[0]
    nbytes = sum(each.nbytes for each in plan.ranges)
    device = shard.locals[0].device if shard.locals else None
    gathered, at = torch.empty(nbytes // shard.dtype.itemsize, dtype=shard.dtype, device=device), 0
    with torch.no_grad():
        for number, block in plan.blocks:
            source = block_of(shard.locals[number].detach(), block).resolve_conj().resolve_neg()
            target = gathered[at : at + source.numel()].view(source.shape)
            as_words(target).copy_(as_words(source))
            at += source.numel()
    return gathered


def block_of(local: torch.Tensor, block: Box) -> torch.Tensor:
    """Return the view of a block of a tensor."""
    for dim, (begin, count) in enumerate(zip(block.offsets, block.sizes, strict=True)):
        local = local.narrow(dim, begin, count)
    return local


def _view_of(shard: ShardedLeaf) -> tuple[object, ...]:
    views: list[Any] = [
        (each.untyped_storage()._cdata, each.storage_offset(), each.stride(), each.is_conj(), each.is_neg())
        for each in shard.locals
    ]
    # Tensors without memory are never tied.
    return (id(shard.geometry), shard.dtype, *views)
