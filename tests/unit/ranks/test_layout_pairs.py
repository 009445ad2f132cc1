"""Protects resharding: what ranks store in one layout, ranks of any other layout read back element by element.

Only geometry and a storage in memory, without processes and packs, so that thousands of pairs are tried.
The oracle is torch: its own functions cut the tensors.
"""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.testing._internal.distributed.fake_pg")

from torch.distributed.tensor import Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

from ckstore.format.tiles import ranges_of, views_of  # noqa: E402
from ckstore.state.torch_shards import geometry_on_mesh  # noqa: E402
from support.fake_ranks import local_of  # noqa: E402

PAIRS = 10_000
ITEMSIZE = 4
RANKS_MAX = 16


def random_layout(rng, dims):
    """Return the lengths of a mesh, and placements on it."""
    lengths = [rng.choice((1, 2, 2, 3, 4, 5, 8, 16)) for _ in range(rng.randint(1, 3))]
    while math.prod(lengths) > RANKS_MAX:
        lengths[rng.randrange(len(lengths))] = rng.choice((1, 2))
    placements = []
    for number in range(len(lengths)):
        kind, dim = rng.choice("RSSST"), rng.randrange(dims)
        # As fully_shard on top of tensor parallelism makes it: cut again by a later dimension of the mesh.
        factor = math.prod(lengths[number + 1 :])
        if kind == "R":
            placements.append(Replicate())
        elif kind == "T" and factor > 1:
            placements.append(_StridedShard(dim, split_factor=factor))
        else:
            placements.append(Shard(dim))
    return lengths, placements


def ranks_of(lengths, placements, shape):
    """Yield what each rank of a job holds: its geometry, and a mesh."""
    ranks = torch.arange(math.prod(lengths)).reshape(lengths)
    for place in itertools.product(*map(range, lengths)):
        mesh = SimpleNamespace(
            mesh=ranks, shape=tuple(lengths), mesh_dim_names=None, get_coordinate=lambda place=place: list(place)
        )
        yield geometry_on_mesh(mesh, placements, shape), mesh


def part_of(array, offsets, sizes):
    return array[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]


def stored(full, lengths, placements):
    """Return the storage that the ranks of a job write, and its cuts. Replicas write the same bytes."""
    storage, cuts = np.full(full.size, -1, np.int32), ()
    for geometry, mesh in ranks_of(lengths, placements, full.shape):
        local = local_of(torch.from_numpy(full), mesh, placements).numpy()
        assert geometry.local_shapes == (local.shape,)
        assert sum(math.prod(part.box.sizes) for part in geometry.parts) == local.size
        cuts = geometry.cuts
        for part in geometry.parts:
            block = part_of(local, part.begin, part.box.sizes)
            for each in ranges_of(full.shape, ITEMSIZE, cuts, part.box):
                begin = [a - b for a, b in zip(each.box.offsets, part.box.offsets, strict=True)]
                target = storage[each.offset // ITEMSIZE :][: each.nbytes // ITEMSIZE]
                source = part_of(block, begin, each.box.sizes).ravel()
                assert ((target == -1) | (target == source)).all()
                target[:] = source
    assert (np.sort(storage) == np.arange(full.size)).all()
    return storage, cuts


def check_read(storage, cuts, full, lengths, placements):
    """Read what each rank of another job needs through strided views of the storage."""
    for geometry, mesh in ranks_of(lengths, placements, full.shape):
        want = local_of(torch.from_numpy(full), mesh, placements).numpy()
        found = np.full(want.shape, -1, np.int32)
        for part in geometry.parts:
            block = part_of(found, part.begin, part.box.sizes)
            for view in views_of(full.shape, ITEMSIZE, cuts, part.box):
                begin = [a - b for a, b in zip(view.box.offsets, part.box.offsets, strict=True)]
                strides = [step * ITEMSIZE for step in view.strides]
                source = np.ndarray(view.box.sizes, np.int32, storage, view.offset, strides)
                part_of(block, begin, view.box.sizes)[...] = source
        assert np.array_equal(found, want)


@pytest.mark.deep
def test_any_layout_is_read_from_any_other(sample):
    rng = random.Random(sample.seed(40))
    for number in range(sample.count(PAIRS, parts=32)):
        shape = tuple(rng.choice((0, 1, 2, 3, 5, 7, 12, 17)) for _ in range(rng.randint(1, 3)))
        full = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
        saved, wanted = random_layout(rng, len(shape)), random_layout(rng, len(shape))
        try:
            storage, cuts = stored(full, *saved)
            check_read(storage, cuts, full, *wanted)
        except AssertionError:
            raise AssertionError(f"pair {number}: {shape}, {saved} to {wanted}") from None
