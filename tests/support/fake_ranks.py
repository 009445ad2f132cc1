"""Ranks of a job played one after another in this process: torch's fake process group, which communicates nothing.

The dimensions of each mesh get names of their own: torch caches results by mesh, and takes the meshes of two ranks for
equal.
"""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckstore._testing import repository_of
from ckstore.config import Policy
from ckstore.format.many_ranks import World, per_rank_node, root_node
from ckstore.format.tree import DictNode, items_of
from ckstore.restore.own_part import RankPlace
from ckstore.restore.restore import RestoreRequest, restore_reference
from ckstore.state.capture import Captured
from ckstore.state.memory import MemorySpan

_numbers = itertools.count()


@contextlib.contextmanager
def rank_of(rank, world):
    """Be one rank of a job."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(*shape, ranks=None):
    """Return a mesh of this rank's job."""
    names = tuple(f"m{next(_numbers)}" for _ in shape)
    if ranks is None:
        return init_device_mesh("cpu", shape, mesh_dim_names=names)
    return torch.distributed.DeviceMesh("cpu", torch.tensor(ranks).reshape(shape), mesh_dim_names=names)


def local_of(full, mesh, placements, coordinate=None):
    """Return what a coordinate holds of a tensor: cut by torch's own functions, not by ours."""
    coordinate = mesh.get_coordinate() if coordinate is None else coordinate
    local = full
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard | _StridedShard):
            parts, _ = placement._split_tensor(local, mesh.shape[dim], with_padding=False, contiguous=True)
            local = parts[coordinate[dim]]
    return local


def sharded(full, mesh, placements, *, fill=True):
    """Return a DTensor of this rank: with the elements of a tensor, or with zeros."""
    local = full[:0].clone() if mesh.get_coordinate() is None else local_of(full, mesh, placements).clone()
    local = local if fill else torch.zeros_like(local)
    options = {"run_check": False, "shape": full.shape, "stride": full.contiguous().stride()}
    return DTensor.from_local(local, mesh, placements, **options)


def placements_of(text):
    """Return placements from text: ``R``, ``S0``, and ``T0:2`` for a strided shard of dimension 0 with factor 2."""
    made = []
    for word in text.split():
        if word == "R":
            made.append(Replicate())
        elif word[0] == "S":
            made.append(Shard(int(word[1:])))
        else:
            dim, factor = word[1:].split(":")
            made.append(_StridedShard(int(dim), split_factor=int(factor)))
    return made


def commit_ranks(store, states, step=1, **facts):
    """Commit what all ranks captured as one checkpoint; their trees may differ in declared parts only.

    Args:
        store: The store.
        states: What each rank captured.
        step: The step.
        **facts: Fields of the checkpoint's ``World``.
    """
    first = states[min(states)]
    buffers = [np.full(unit.nbytes, 0xEE, np.uint8) for unit in first.units]
    written = [np.zeros(unit.nbytes, np.bool_) for unit in first.units]
    for state in states.values():
        for held in state.held:
            source = state.captured.storages[held.storage].read(held.begin, held.begin + held.nbytes)
            buffers[held.unit][held.offset : held.offset + held.nbytes] = np.frombuffer(source, np.uint8)
            written[held.unit][held.offset : held.offset + held.nbytes] = True
    assert all(each.all() for each in written), "bytes that no rank holds"
    tree = first.captured.tree
    for path in first.per_rank:
        tree = _with(tree, path, {rank: _at(state.captured.tree, path) for rank, state in states.items()})
    root = root_node(tree, World(len(states), bytes(16), **facts))
    spans = [
        MemorySpan(each.ctypes.data, each.nbytes, unit.element_width, unit.is_float, [each], None)
        for each, unit in zip(buffers, first.units, strict=True)
    ]
    captured = Captured(root, first.captured.paths, list(first.tensors), spans, [])
    store._captures = SimpleNamespace(capture_for_commit=lambda state: captured)
    try:
        return store.commit({}, step)
    finally:
        store._captures = None


def _at(node, path):
    for key in path:
        node = dict(items_of(node))[key]
    return node


def _with(node, path, values):
    if not path:
        return per_rank_node(values)
    assert isinstance(node, DictNode)
    children = tuple(_with(each, path[1:], values) if key == path[0] else each for key, each in items_of(node))
    return DictNode(node.kind, node.keys, children, node.metadata, node.factory)


def restore_as(store, rank, world, into=None, *, only=None, per_rank="own", ref=None):
    """Restore as one rank of a job; return the result."""
    request = RestoreRequest(into, only, None, False, None, RankPlace(rank, world, per_rank))
    return restore_reference(repository_of(store), Policy(), ref, request, [])
