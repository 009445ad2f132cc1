"""Shapes of well-known models, and who holds which parts of them when many ranks train them.

Nothing is allocated. torch computes the shard of each rank; that needs no process group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from ckstore.format.tiles import Box, cuts_of, ranges_of
from ckstore.ranks.spans import Span

ITEMSIZE = 4
GRID_NBYTES = 4 << 20
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Each tensor of a model is stored with both moments of Adam; all are float32."""

Shape = tuple[int, ...]
Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Sharded:
    """A tensor of a layout.

    Args:
        name: Its name.
        shape: Its global shape.
        placements: One for each dimension of the mesh.
        first: The global rank that the mesh begins with.
        mesh: The shape of the mesh.
    """

    name: str
    shape: Shape
    placements: Placements
    mesh: Shape
    first: int = 0

    def boxes(self) -> dict[Box, tuple[int, ...]]:
        """Return the boxes that ranks hold, each with its holders."""
        held = _boxes_of(self.shape, self.mesh, self.placements)
        return {box: tuple(self.first + rank for rank in ranks) for box, ranks in held.items()}


@lru_cache(maxsize=1024)
def _boxes_of(shape: Shape, mesh: Shape, placements: Placements) -> dict[Box, tuple[int, ...]]:
    held: dict[Box, tuple[int, ...]] = {}
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
        box = Box(tuple(map(int, offsets)), tuple(map(int, sizes)))
        if 0 not in box.sizes:
            held[box] = (*held.get(box, ()), rank)
    return held


@dataclass
class RankLayout:
    """A model on many ranks.

    Args:
        name: Model and layout.
        world: The number of ranks.
        tensors: The tensors of its state.
    """

    name: str
    world: int
    tensors: list[Sharded] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """The bytes of the state; replicas count once."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors) * ITEMSIZE

    @cached_property
    def groups(self) -> dict[tuple[int, ...], list[Span]]:
        """What each group of ranks holds, as ranges of units; a unit is a tensor."""
        groups: dict[tuple[int, ...], list[Span]] = {}
        for unit, tensor in enumerate(self.tensors):
            boxes = tensor.boxes()
            cuts = cuts_of(tensor.shape, boxes)
            for box, holders in boxes.items():
                for each in ranges_of(tensor.shape, ITEMSIZE, cuts, box):
                    groups.setdefault(holders, []).append(Span(unit, each.offset, each.offset + each.nbytes))
        return groups

    def split(self) -> tuple[dict[tuple[int, ...], list[Span]], list[int]]:
        """Return what several ranks hold, and the number of bytes that each rank holds alone."""
        own = [0] * self.world
        for holders, spans in self.groups.items():
            if len(holders) == 1:
                own[holders[0]] += sum(span.hi - span.lo for span in spans)
        return {holders: spans for holders, spans in self.groups.items() if len(holders) > 1}, own


def llama_8b(layers: range = range(32), *, first: bool = True, last: bool = True) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors of LLaMA 3 8B, or of one pipeline stage of it."""
    if first:
        yield "embed", (128256, 4096)
    for layer in layers:
        yield from _block(layer, width=4096, kv_width=1024, inner=14336)
    if last:
        yield "norm", (4096,)
        yield "head", (128256, 4096)


def gemma_2b() -> Iterator[tuple[str, Shape]]:
    """Yield the tensors of Gemma 2B, of which a fifth is one embedding of 256,000 tokens."""
    yield "embed", (256000, 2048)
    for layer in range(18):
        yield from _block(layer, width=2048, kv_width=256, inner=16384)
    yield "norm", (2048,)


def deepseek_moe_16b() -> Iterator[tuple[str, Shape]]:
    """Yield the tensors of DeepSeekMoE 16B: 64 routed experts in each layer but the first, stacked."""
    yield "embed", (102400, 2048)
    yield from _block(0, width=2048, kv_width=2048, inner=10944)
    for layer in range(1, 28):
        yield from _block(layer, width=2048, kv_width=2048, inner=2816)
        yield f"{layer}.router", (64, 2048)
        for name, shape in (("gate", (1408, 2048)), ("up", (1408, 2048)), ("down", (2048, 1408))):
            yield f"{layer}.experts.{name}", (64, *shape)
    yield "norm", (2048,)
    yield "head", (102400, 2048)


def _block(layer: int, *, width: int, kv_width: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{layer}.norm1", (width,)
    yield f"{layer}.q", (width, width)
    yield f"{layer}.k", (kv_width, width)
    yield f"{layer}.v", (kv_width, width)
    yield f"{layer}.o", (width, width)
    yield f"{layer}.norm2", (width,)
    yield f"{layer}.gate", (inner, width)
    yield f"{layer}.up", (inner, width)
    yield f"{layer}.down", (width, inner)


def _tensor_parallel(name: str) -> Placement:
    """Column-wise and row-wise parallelism in each block; norms and embeddings are replicated."""
    if name.endswith((".o", ".down")):
        return Shard(1)
    return Shard(0) if name.endswith((".q", ".k", ".v", ".gate", ".up")) else Replicate()


def _with_moments(tensors: list[Sharded]) -> list[Sharded]:
    """Return model and optimizer in the order of ``torch.distributed.checkpoint.state_dict.get_state_dict``."""
    moments = [replace(tensor, name=f"optim.{tensor.name}.{moment}") for tensor in tensors for moment in MOMENTS]
    return [*tensors, *moments]


def hsdp(replicas: int, shards: int) -> RankLayout:
    """LLaMA 8B, sharded, with replicas of all shards."""
    mesh = (replicas, shards)
    tensors = [Sharded(name, shape, (Replicate(), Shard(0)), mesh) for name, shape in llama_8b()]
    return RankLayout(f"HSDP {replicas}x{shards}, 8B", math.prod(mesh), _with_moments(tensors))


def data_and_tensor_parallel(data: int, tensor: int) -> RankLayout:
    """LLaMA 8B with tensor parallelism, and replicated embeddings."""
    mesh = (data, tensor)
    tensors = [Sharded(name, shape, (Replicate(), _tensor_parallel(name)), mesh) for name, shape in llama_8b()]
    return RankLayout(f"DP{data} x TP{tensor}, 8B", math.prod(mesh), _with_moments(tensors))


def experts(data: int, expert: int) -> RankLayout:
    """DeepSeekMoE 16B with expert parallelism; everything but the experts is replicated."""
    mesh = (data, expert)
    tensors = [
        Sharded(name, shape, (Replicate(), Shard(0) if ".experts." in name else Replicate()), mesh)
        for name, shape in deepseek_moe_16b()
    ]
    return RankLayout(f"DP{data} x EP{expert}, MoE 16B", math.prod(mesh), _with_moments(tensors))


def replicated(ranks: int) -> RankLayout:
    """Gemma 2B, whole on each rank."""
    tensors = [Sharded(name, shape, (Replicate(),), (ranks,)) for name, shape in gemma_2b()]
    return RankLayout(f"DDP {ranks}, 2B", ranks, _with_moments(tensors))


def pipeline(stages: tuple[int, ...], data: int) -> RankLayout:
    """LLaMA 8B in pipeline stages of so many layers, each with replicas."""
    tensors: list[Sharded] = []
    begin = 0
    for stage, count in enumerate(stages):
        held = llama_8b(range(begin, begin + count), first=stage == 0, last=stage == len(stages) - 1)
        tensors += [Sharded(name, shape, (Replicate(),), (data,), first=stage * data) for name, shape in held]
        begin += count
    name = f"PP {'+'.join(map(str, stages))} x DP{data}, 8B"
    return RankLayout(name, len(stages) * data, _with_moments(tensors))


def level_layouts() -> list[RankLayout]:
    """Return layouts of which all ranks can write about the same number of bytes."""
    return [
        *(hsdp(2, 4), hsdp(4, 8), hsdp(8, 8)),
        *(data_and_tensor_parallel(4, 4), data_and_tensor_parallel(2, 8)),
        *(experts(2, 8), experts(4, 8)),
        *(replicated(8), replicated(32), replicated(64)),
    ]


def unequal_stages() -> RankLayout:
    """A pipeline whose stages differ: the first has the embedding, and the last the head."""
    return pipeline((7, 9, 9, 7), 4)
