"""What ranks would write and read of large models: real plans and real manifests of tensors that are never filled.

Each rank is played by this process, with a process group of torch that communicates nothing. Tensors are allocated, and
no page of them is touched. Chunks have drawn ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from bench.rank_layouts import ITEMSIZE, RankLayout, Sharded, _with_moments, llama_8b
from bench.rank_parts import fake_part
from ckstore.commit.chunking import CommitPlan, plan_commit
from ckstore.config import Limits
from ckstore.format.manifest import Manifest, decode_manifest
from ckstore.format.many_ranks import plain_manifest
from ckstore.format.records import LogicalRecord
from ckstore.io.syscalls import PAGE_NBYTES
from ckstore.ranks.arrays import RankState
from ckstore.ranks.capture import RankCapture
from ckstore.ranks.merge import Merger
from ckstore.ranks.part import RANGE, Skeleton
from ckstore.ranks.planning import Holdings, RankContent, decode_spans, encode_spans, plan_ranks
from ckstore.ranks.readers import readers_of
from ckstore.ranks.writing import Share
from ckstore.restore.own_part import RankPlace, own_part
from ckstore.restore.plan import plan_restore
from ckstore.restore.restore import WAVE_NBYTES
from ckstore.state.placement import prepare_restore
from ckstore.state.shard_adapters import ShardRestoreAdapter
from ckstore.store.memory_budget import read_buffer_nbytes

LIMITS = Limits()
LAYERS = 4
"""Layers of LLaMA 8B: with embeddings, 1.9 billion parameters."""

_numbers = itertools.count()


def fsdp(ranks: int, layers: int = LAYERS) -> RankLayout:
    """Every tensor cut along its first dimension."""
    return _layout(f"FSDP{ranks}", (ranks,), lambda name: (Shard(0),), layers)


def tensor_parallel(ranks: int, layers: int = LAYERS) -> RankLayout:
    """Column-wise and row-wise parallelism, embeddings cut by vocabulary, norms replicated."""
    return _layout(f"TP{ranks}", (ranks,), lambda name: (_by_tensor(name),), layers)


def fsdp_and_tensor_parallel(data: int, tensor: int, layers: int = LAYERS) -> RankLayout:
    """Tensor parallelism, and the parts cut once more along the first dimension."""

    def placements(name: str) -> tuple[Placement, ...]:
        inner = _by_tensor(name)
        # What both cut along one dimension, FSDP2 cuts last.
        outer = _StridedShard(0, split_factor=tensor) if inner == Shard(0) else Shard(0)
        return outer, inner

    return _layout(f"FSDP{data} x TP{tensor}", (data, tensor), placements, layers)


def _by_tensor(name: str) -> Placement:
    if name.endswith((".o", ".down")):
        return Shard(1)
    return Replicate() if "norm" in name else Shard(0)


def _layout(name: str, mesh: tuple[int, ...], placements: Any, layers: int) -> RankLayout:
    tensors = [Sharded(each, shape, placements(each), mesh) for each, shape in llama_8b(range(layers))]
    return RankLayout(name, int(np.prod(mesh)), _with_moments(tensors))


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a job that never communicates."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def shards_of(layout: RankLayout, *, names: tuple[str, ...] | None = None) -> dict[str, DTensor]:
    """Return this rank's shards. Inside ``rank_of``.

    Args:
        layout: What the ranks hold.
        names: Names of the mesh's dimensions; None: new ones, because torch takes the meshes of two ranks for equal.
    """
    shape = layout.tensors[0].mesh
    names = names or tuple(f"m{next(_numbers)}" for _ in shape)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return {tensor.name: _shard(tensor, mesh) for tensor in layout.tensors}


def _shard(tensor: Sharded, mesh: Any) -> DTensor:
    sizes, _ = _compute_local_shape_and_global_offset(
        tensor.shape, tensor.mesh, list(mesh.get_coordinate()), tensor.placements
    )
    strides = torch.empty(tensor.shape, device="meta").stride()
    options: dict[str, Any] = {"run_check": False, "shape": torch.Size(tensor.shape), "stride": strides}
    return DTensor.from_local(torch.empty(tuple(sizes)), mesh, tensor.placements, **options)


@dataclass(frozen=True)
class Written:
    """What one rank would write."""

    state: RankState
    share: Share
    plan: CommitPlan

    def chunks(self) -> Iterator[tuple[tuple[object, ...], int]]:
        """Yield what each chunk contains, as ranges of global tensors, and its bytes."""
        for chunk in self.plan.chunks:
            ranges = tuple(
                (self.share.owned[source.storage].unit, self.plan.position_of(source), source.nbytes)
                for source in chunk.sources
            )
            yield ranges, chunk.nbytes


def written_by(layout: RankLayout) -> list[Written]:
    """Return what each rank of a layout writes."""
    states = []
    for rank in range(layout.world):
        with rank_of(rank, layout.world):
            states.append(RankCapture(layout.world).capture(shards_of(layout)))
    contents = [RankContent(Skeleton.of(state), Holdings.of(state)) for state in states]
    written = []
    for state, spans in zip(states, plan_ranks(contents, LIMITS, frozenset()), strict=True):
        share = Share.of(state, decode_spans(encode_spans(spans)))
        captured = share.captured(state)
        written.append(Written(state, share, plan_commit(captured.storages, LIMITS, starts=captured.starts)))
    if sum(each.plan.nbytes for each in written) != layout.nbytes:
        raise AssertionError("not every byte is written once")
    return written


def manifest_of(layout: RankLayout) -> Manifest:
    """Return the manifest of a layout, stored without compression."""
    rng = np.random.default_rng(0)
    parts, skeletons = [], {}
    for rank, written in enumerate(written_by(layout)):
        skeleton = Skeleton.of(written.state)
        skeletons[skeleton.digest] = skeleton
        ranges = []
        for (unit, offset), storage in zip(written.share.places, written.plan.storages, strict=True):
            for piece in storage.pieces:
                ranges.append((unit, offset, piece.nbytes, piece.chunk, piece.offset))
                offset += piece.nbytes
        lengths = [chunk.nbytes for chunk in written.plan.chunks]
        parts.append(fake_part(rank, skeleton, np.array(ranges, RANGE), lengths, rng, is_coded=False))
    merger = Merger(LIMITS)
    facts: dict[str, Any] = {"run": "main", "seq": 1, "step": 1, "time_ns": 1, "parent": None, "origin_id": None}
    record = LogicalRecord(**facts, is_archival=False, fidelity="exact", metrics={})
    content = merger.merge(merger.unite(parts, skeletons), parts).encode(record, bytes(16), limits=LIMITS)[1]
    return decode_manifest(content)


class Read(NamedTuple):
    """Bytes that a rank reads from a checkpoint.

    Args:
        needed: Bytes of its own shards.
        alone: Bytes that it reads if it does not share with other ranks.
        together: Bytes that it reads if all ranks are on one host and share what they decode.
    """

    needed: int
    alone: int
    together: int


class _Wanted(NamedTuple):
    """What a rank restores: the manifest with this rank's own tensors, their storages, and whether all are kept."""

    manifest: Manifest
    storages: tuple[int, ...]
    keeps_all: bool


def read_by(manifest: Manifest, layout: RankLayout) -> list[Read]:
    """Return what each rank of a layout reads from a checkpoint."""
    wants, needed = [], []
    for rank in range(layout.world):
        with rank_of(rank, layout.world):
            into = shards_of(layout)
            needed.append(sum(tensor.to_local().nbytes for tensor in into.values()))
            wants.append(_wanted(manifest, into, RankPlace(rank, layout.world)))
    needs = np.zeros((layout.world, len(manifest.chunks)), np.bool_)
    for rank, want in enumerate(wants):
        for storage in want.storages:
            needs[rank, [piece.chunk for piece in want.manifest.storages[storage].pieces]] = True
    readers = readers_of(manifest, needs)
    reads = []
    for rank, want in enumerate(wants):
        alone = together = _read_nbytes(want, None)
        if readers is not None:
            own = needs[rank] & ((readers == rank) | (readers < 0))
            together = _read_nbytes(want, frozenset(np.flatnonzero(own).tolist()))
        reads.append(Read(needed[rank], alone, together))
    return reads


def _wanted(manifest: Manifest, into: dict[str, DTensor], place: RankPlace) -> _Wanted:
    """Return what ``Store.restore`` plans with."""
    adapters = [ShardRestoreAdapter()]
    plain = plain_manifest(manifest)
    plain, _ = own_part(manifest, plain, place, into, adapters)
    targets = prepare_restore(plain.tree, plain.tensors, plain.storages, into=into, adapters=adapters)
    tensors, storages = targets.tables
    plain = replace(plain, tensors=tensors, storages=storages)
    return _Wanted(plain, tuple(targets.storages), targets.keeps_all)


def _read_nbytes(want: _Wanted, chunks: frozenset[int] | None) -> int:
    """Return the bytes that ``Store.restore`` reads for these chunks; None: for all that the rank needs."""
    plan = plan_restore(
        want.manifest,
        want.storages,
        group_nbytes_max=read_buffer_nbytes(LIMITS) - 2 * PAGE_NBYTES,
        wave_nbytes=None if want.keeps_all else WAVE_NBYTES,
        chunks=chunks,
    )
    buffered = sum(want.manifest.frames[read.frame].stored_nbytes for read in plan.buffered_reads)
    return sum(group.nbytes for group in plan.groups) + buffered


def read_by_dcp(saved: RankLayout, wanted: RankLayout) -> tuple[int, int]:
    """Return the bytes that all ranks read with torch.distributed.checkpoint, and those that they need.

    It reads every saved shard of which a rank needs a part as a whole.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    read = needed = 0
    properties = TensorProperties(torch.float32)

    def chunk_of(box: Any) -> Any:
        return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))

    for before, after in zip(saved.tensors, wanted.tensors, strict=True):
        stored = TensorStorageMetadata(properties, torch.Size(before.shape), [chunk_of(box) for box in before.boxes()])
        sizes = {chunk.offsets: chunk.sizes.numel() * ITEMSIZE for chunk in stored.chunks}
        for box, holders in after.boxes().items():
            items = create_read_items_for_chunk_list(before.name, stored, [chunk_of(box)])
            read += len(holders) * sum(sizes[item.storage_index.offset] for item in items)
            needed += len(holders) * chunk_of(box).sizes.numel() * ITEMSIZE
    return read, needed
