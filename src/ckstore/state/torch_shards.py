"""Shards of global torch tensors: what this rank holds of a DTensor or a ShardedTensor.

Invariants:
- Nothing is communicated. Where all shards lie follows from the mesh and the placements.
- A shard whose local tensor has another shape than its placements say is refused.
- Tensors of one mesh, placements and shape share one ``Geometry``. So a state of very many tensors has few of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckstore.format.tiles import Box, Cuts, cuts_of
from ckstore.state.torch_adapter import PLAIN_KINDS
from ckstore.state.torch_objects import is_dtensor, is_sharded_tensor
from ckstore.state.values import leaf_type_error

if TYPE_CHECKING:
    from ckstore.format.tree import Path

Run = tuple[int, int]
"""Where consecutive indices of one dimension begin, and how many there are."""

LayoutFacts = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], str]
"""Names and lengths of the mesh's dimensions, its global ranks in row-major order, and the placements as text."""


class Part(NamedTuple):
    """A box of a global tensor that this rank holds.

    Args:
        box: Its place in the global tensor.
        local: The local tensor that contains it, by number.
        begin: Where it begins in the local tensor, by dimension.
        holders: The global ranks that hold the same box, ascending; this one included.
    """

    box: Box
    local: int
    begin: tuple[int, ...]
    holders: tuple[int, ...]


# Compared by identity: one geometry stands for all equal ones.
@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """Where a global tensor lies, as this rank sees it.

    Args:
        shape: The global shape.
        local_shapes: Shapes of the local tensors.
        parts: The boxes that this rank holds, in the order of their elements in the local tensors.
        cuts: Where tiles begin, such that every box of every rank is a union of tiles; see format/tiles.py.
        layout: The mesh and the placements.
    """

    shape: tuple[int, ...]
    local_shapes: tuple[tuple[int, ...], ...]
    parts: tuple[Part, ...]
    cuts: Cuts
    layout: LayoutFacts


class ShardedLeaf(NamedTuple):
    """What this rank holds of a global tensor.

    Args:
        locals: The local tensors.
        geometry: Where they lie.
        dtype: The dtype of all of them.
        is_parameter: Whether the global tensor is a torch.nn.Parameter.
        requires_grad: Whether it requires a gradient.
    """

    locals: tuple[torch.Tensor, ...]
    geometry: Geometry
    dtype: torch.dtype
    is_parameter: bool
    requires_grad: bool


class ShardReader:
    """Describes shards; remembers geometries."""

    def __init__(self) -> None:
        self._geometries: dict[tuple[Any, ...], Geometry] = {}
        # The specs are stored with their ids: an id is only unique while its object is alive.
        self._specs: dict[int, tuple[object, Geometry]] = {}

    def describe_shards(self, item: object, path: Path = ()) -> ShardedLeaf | None:
        """Return what this rank holds of a global tensor; None: the item is not one.

        Raises:
            LeafTypeError: It cannot be stored.
        """
        if type(item) in PLAIN_KINDS or not isinstance(item, torch.Tensor):
            return None
        if is_dtensor(item):
            return self._of_dtensor(item, path)
        return self._of_sharded_tensor(item, path) if is_sharded_tensor(item) else None

    def _of_dtensor(self, item: Any, path: Path) -> ShardedLeaf:
        spec, local = item._spec, item._local_tensor
        if type(local) is not torch.Tensor:
            local = resolved(local)
        known = self._specs.get(id(spec))
        geometry = self._geometry_of(item, path) if known is None else known[1]
        # A rank outside the mesh has an empty local tensor of any shape.
        if geometry.local_shapes and tuple(local.shape) != geometry.local_shapes[0]:
            raise leaf_type_error(item, path, _wrong_local_shape(local, geometry), _GIVE_SHAPE)
        is_parameter = "_is_param" in item.__dict__
        return ShardedLeaf((local,), geometry, local.dtype, is_parameter, item.requires_grad)

    def _geometry_of(self, item: Any, path: Path) -> Geometry:
        spec, shape = item._spec, tuple(item.shape)
        order = getattr(spec, "shard_order", None)
        key = spec.mesh, spec.placements, shape, order
        geometry = self._geometries.get(key)
        if geometry is None:
            why = _why_not_stored(spec.placements)
            if why is not None:
                raise leaf_type_error(item, path, *why)
            geometry = self._geometries[key] = geometry_on_mesh(spec.mesh, spec.placements, shape, order)
        if len(self._specs) >= _SPECS_MAX:
            self._specs.clear()
        self._specs[id(spec)] = spec, geometry
        return geometry

    def _of_sharded_tensor(self, item: Any, path: Path) -> ShardedLeaf:
        metadata, shards = item.metadata(), item.local_shards()
        shape = tuple(metadata.size)
        boxes = [Box(tuple(each.shard_offsets), tuple(each.shard_sizes)) for each in metadata.shards_metadata]
        ranks = [each.placement.rank() or 0 for each in metadata.shards_metadata]
        own = [Box(tuple(each.metadata.shard_offsets), tuple(each.metadata.shard_sizes)) for each in shards]
        key = shape, tuple(boxes), tuple(ranks), tuple(own)
        geometry = self._geometries.get(key)
        if geometry is None:
            geometry = self._geometries[key] = _geometry_of_shards(shape, boxes, ranks, own)
        found = tuple(resolved(each.tensor).detach() for each in shards)
        if any(tuple(each.shape) != sizes for each, sizes in zip(found, geometry.local_shapes, strict=True)):
            raise leaf_type_error(item, path, "a local shard has another shape than its metadata says")
        dtype = metadata.tensor_properties.dtype
        return ShardedLeaf(found, geometry, dtype, isinstance(item, torch.nn.Parameter), item.requires_grad)


_SPECS_MAX = 1 << 16
"""Most specs of DTensors that are remembered. A training job reuses those of its parameters."""

_GIVE_SHAPE = "pass shape= and stride= of the global tensor to DTensor.from_local"


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of a collective that was started earlier; every other tensor itself."""
    if type(tensor) not in PLAIN_KINDS and callable(getattr(tensor, "trigger_wait", None)):
        return tensor.trigger_wait()  # type: ignore[attr-defined, no-any-return]
    return tensor


def _wrong_local_shape(local: torch.Tensor, geometry: Geometry) -> str:
    return f"its local tensor is {tuple(local.shape)}, and by its placements it would be {geometry.local_shapes[0]}"


def _why_not_stored(placements: Sequence[Any]) -> tuple[str, str] | None:
    """Return why a tensor with these placements cannot be stored, and what to do; None: it can."""
    for placement in placements:
        kind = type(placement).__name__
        if placement.is_partial():
            return (
                f"its placement {placement} is a sum that has not been computed",
                "reduce it first: tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)",
            )
        if not (placement.is_replicate() or kind in ("Shard", "_StridedShard")):
            return f"its placement {placement} is unknown", "redistribute it to Shard or Replicate placements"
    return None


def geometry_on_mesh(mesh: Any, placements: Sequence[Any], shape: tuple[int, ...], order: Any = None) -> Geometry:
    """Return where the shards of a DTensor lie.

    Args:
        mesh: Its device mesh.
        placements: Its placements, Replicate, Shard or strided shard, one for each dimension of the mesh.
        shape: Its global shape.
        order: Its shard order: for each tensor dimension the mesh dimensions that cut it, in this order; None: from
            left to right.
    """
    ranks = mesh.mesh
    coordinate = mesh.get_coordinate()
    names = tuple(mesh.mesh_dim_names or ())
    layout = names, tuple(ranks.shape), tuple(ranks.flatten().tolist()), str(tuple(placements))
    lengths = layout[1]
    cutting = [_cutting_dims(dim, placements, order) for dim in range(len(shape))]
    samples: list[Box] = []
    for dim, length in enumerate(shape):
        for place in itertools.product(*(range(lengths[each]) for each in cutting[dim])):
            for begin, count in runs_of(length, cutting[dim], place, placements, lengths):
                samples.append(_slab(shape, dim, begin, count))
    cuts = cuts_of(shape, samples)
    if coordinate is None:
        return Geometry(shape, (), (), cuts, layout)
    own = [
        runs_of(length, cutting[dim], [coordinate[each] for each in cutting[dim]], placements, lengths)
        for dim, length in enumerate(shape)
    ]
    local_shape = tuple(sum(count for _, count in runs) for runs in own)
    is_cut = {each for dims in cutting for each in dims}
    same = ranks[tuple(coordinate[each] if each in is_cut else slice(None) for each in range(ranks.ndim))]
    holders = tuple(sorted(same.flatten().tolist()))
    parts = tuple(_parts_of(own, holders)) if math.prod(local_shape) else ()
    return Geometry(shape, (local_shape,), parts, cuts, layout)


def _cutting_dims(dim: int, placements: Sequence[Any], order: Any) -> list[int]:
    """Return the mesh dimensions that cut a tensor dimension, in the order in which they cut it."""
    found = [number for number, each in enumerate(placements) if not each.is_replicate() and each.dim == dim]
    if any(type(placements[number]).__name__ == "_StridedShard" for number in found):
        # A strided shard is how an order from right to left is expressed.
        return found
    entry = next((each for each in order or () if each.tensor_dim == dim), None)
    return found if entry is None or sorted(entry.mesh_dims) != found else list(entry.mesh_dims)


def runs_of(
    length: int, cutting: Sequence[int], place: Sequence[int], placements: Sequence[Any], lengths: Sequence[int]
) -> list[Run]:
    """Return the indices of one tensor dimension that a coordinate of the mesh holds, ascending.

    The same arithmetic as in ``torch.distributed.tensor._utils._compute_local_shape_and_global_offset``.

    Args:
        length: Length of the tensor dimension.
        cutting: The mesh dimensions that cut it, in this order.
        place: The coordinate in these mesh dimensions.
        placements: The placements by mesh dimension.
        lengths: Lengths of the mesh dimensions.
    """
    runs = [(0, length)] if length else []
    for dim, number in zip(cutting, place, strict=True):
        held = sum(count for _, count in runs)
        factor = int(getattr(placements[dim], "split_factor", 1))
        chosen = [_chunk(begin, count, lengths[dim], number) for begin, count in _chunks(held, factor)]
        runs = _joined(_select(runs, chosen))
    return runs


def _chunks(length: int, count: int) -> list[Run]:
    """Cut a length in parts, as torch.chunk does: the last ones may be shorter or empty."""
    return [_chunk(0, length, count, number) for number in range(count)]


def _chunk(begin: int, length: int, count: int, number: int) -> Run:
    step = -(-length // count)
    lo, hi = min(step * number, length), min(step * (number + 1), length)
    return begin + lo, hi - lo


def _select(runs: Sequence[Run], chosen: Iterable[Run]) -> Iterable[Run]:
    """Yield the runs of indices at some positions of a list of runs."""
    for lo, count in chosen:
        at = 0
        for begin, length in runs:
            first, last = max(lo, at), min(lo + count, at + length)
            if first < last:
                yield begin + first - at, last - first
            at += length


def _joined(runs: Iterable[Run]) -> list[Run]:
    found: list[Run] = []
    for begin, count in runs:
        if found and sum(found[-1]) == begin:
            found[-1] = (found[-1][0], found[-1][1] + count)
        else:
            found.append((begin, count))
    return found


def _slab(shape: tuple[int, ...], dim: int, begin: int, count: int) -> Box:
    """Return the box of some indices of one dimension and all indices of the others."""
    offsets = tuple(begin if each == dim else 0 for each in range(len(shape)))
    return Box(offsets, tuple(count if each == dim else length for each, length in enumerate(shape)))


def _parts_of(own: Sequence[Sequence[Run]], holders: tuple[int, ...]) -> Iterable[Part]:
    """Yield the boxes that are products of one run of each dimension."""
    placed: list[list[tuple[Run, int]]] = []
    for runs in own:
        ends = itertools.accumulate((count for _, count in runs), initial=0)
        placed.append(list(zip(runs, ends, strict=False)))
    for choice in itertools.product(*placed):
        box = Box(tuple(run[0] for run, _ in choice), tuple(run[1] for run, _ in choice))
        yield Part(box, 0, tuple(at for _, at in choice), holders)


def _geometry_of_shards(
    shape: tuple[int, ...], boxes: Sequence[Box], ranks: Sequence[int], own: Sequence[Box]
) -> Geometry:
    holders: dict[Box, list[int]] = {}
    for box, rank in zip(boxes, ranks, strict=True):
        holders.setdefault(box, []).append(rank)
    parts = tuple(
        Part(box, number, (0,) * len(shape), tuple(sorted(holders.get(box, ()))))
        for number, box in enumerate(own)
        if math.prod(box.sizes)
    )
    cuts = cuts_of(shape, [box for box in boxes if math.prod(box.sizes)])
    world = tuple(sorted(set(ranks)))
    layout = (), (len(world),), world, "ShardedTensor"
    return Geometry(shape, tuple(box.sizes for box in own), parts, cuts, layout)
