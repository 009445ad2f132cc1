"""Protects what a rank takes itself to hold of a DTensor: exactly what torch gives it, without communication."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("torch.testing._internal.distributed.fake_pg")

from torch.distributed.tensor import DTensor, Partial  # noqa: E402

from ckstore.errors import LeafTypeError  # noqa: E402
from ckstore.format.tiles import ranges_of  # noqa: E402
from ckstore.state.shard_adapters import ShardCaptureAdapter, plan_of  # noqa: E402
from ckstore.state.torch_shards import ShardReader, geometry_on_mesh  # noqa: E402
from support.fake_ranks import local_of, mesh_of, placements_of, rank_of, sharded  # noqa: E402

LAYOUTS = st.one_of(
    st.tuples(st.tuples(st.integers(1, 5)), st.sampled_from(["R", "S0", "S1", "T0:2"])),
    st.tuples(
        st.tuples(st.integers(1, 4), st.integers(1, 4)),
        st.sampled_from(["R R", "S0 R", "R S0", "S0 S0", "S0 S1", "S1 S0", "T0:2 S0", "T1:3 S1", "S1 R", "T0:4 R"]),
    ),
    st.tuples(st.just((2, 2, 2)), st.sampled_from(["S0 S0 S1", "S0 S1 S0", "R S1 S1", "T0:2 S0 S1", "S2 S1 S0"])),
)
SHAPES = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3))


def all_of(shape):
    return torch.arange(math.prod(shape), dtype=torch.int64).reshape(shape)


@given(layout=LAYOUTS, shape=SHAPES, rank=st.integers(0, 15))
def test_each_part_is_what_torch_gives_the_rank(layout, shape, rank):
    (lengths, text), placements = layout, placements_of(layout[1])
    world = math.prod(lengths)
    with rank_of(rank % world, world):
        mesh = mesh_of(*lengths)
        full = all_of(shape)
        local = local_of(full, mesh, placements)
        geometry = geometry_on_mesh(mesh, placements, shape)
        assert geometry.local_shapes == (tuple(local.shape),), text
        found = torch.full_like(local, -1)
        for part in geometry.parts:
            inside = tuple(slice(at, at + size) for at, size in zip(part.begin, part.box.sizes, strict=True))
            box = tuple(slice(at, at + size) for at, size in zip(*part.box, strict=True))
            found[inside] = full[box]
        assert torch.equal(found, local), text
        # The checkpoint's ranges are the same elements, in the order of its storage.
        ranges = plan_of(geometry, 8).ranges
        assert sum(each.nbytes for each in ranges) == local.numel() * 8
        assert all(one.offset + one.nbytes <= other.offset for one, other in itertools.pairwise(ranges))


@given(layout=LAYOUTS, shape=SHAPES)
def test_the_parts_of_all_ranks_cover_each_element_once_for_each_holder(layout, shape):
    (lengths, text), placements = layout, placements_of(layout[1])
    world = math.prod(lengths)
    covered: dict[tuple[int, int], set[int]] = {}
    cuts = set()
    for rank in range(world):
        with rank_of(rank, world):
            geometry = geometry_on_mesh(mesh_of(*lengths), placements, shape)
            cuts.add(geometry.cuts)
            for part in geometry.parts:
                assert rank in part.holders, text
                for each in ranges_of(shape, 1, geometry.cuts, part.box):
                    assert covered.setdefault((each.offset, each.nbytes), set(part.holders)) == set(part.holders)
    assert len(cuts) == 1
    at = 0
    for offset, nbytes in sorted(covered):
        assert offset == at, text
        at += nbytes
    assert at == math.prod(shape)


def test_shards_are_applied_in_the_order_that_the_spec_says():
    with rank_of(1, 4):
        mesh = mesh_of(2, 2)
        spec = DTensor.from_local(torch.zeros(2), mesh, placements_of("S0 S0"), run_check=False)._spec
        assert spec.shard_order[0].mesh_dims == (0, 1)
        turned = (spec.shard_order[0]._replace(mesh_dims=(1, 0)),)
        from_left = geometry_on_mesh(mesh, placements_of("S0 S0"), (8,), spec.shard_order)
        from_right = geometry_on_mesh(mesh, placements_of("S0 S0"), (8,), turned)
    # Coordinate (0, 1): second quarter, or first half of the second half.
    assert [part.box.offsets for part in (*from_left.parts, *from_right.parts)] == [(2,), (4,)]


def test_a_rank_outside_the_mesh_holds_nothing():
    with rank_of(3, 4):
        tensor = sharded(all_of((6, 2)), mesh_of(2, ranks=[0, 1]), placements_of("S0"))
        shard = ShardReader().describe_shards(tensor)
        assert shard is not None
        assert shard.geometry.parts == ()
        leaf = ShardCaptureAdapter().describe(tensor, ("w",))
        assert leaf is not None
        assert leaf.memory.nbytes == 0


def test_a_sum_that_was_not_computed_is_refused_with_a_remedy():
    with rank_of(0, 2):
        tensor = DTensor.from_local(torch.zeros(2), mesh_of(2), [Partial()], run_check=False)
        with pytest.raises(LeafTypeError, match=r"w\. Reduce it first: tensor\.redistribute"):
            ShardReader().describe_shards(tensor, ("w",))


def test_a_local_tensor_of_another_shape_than_the_placements_say_is_refused():
    with rank_of(0, 2):
        options = {"run_check": False, "shape": torch.Size((5, 1)), "stride": (1, 1)}
        wrong = DTensor.from_local(torch.zeros(2, 1), mesh_of(2), placements_of("S0"), **options)
        with pytest.raises(LeafTypeError, match=r"its local tensor is \(2, 1\), and by its placements .* \(3, 1\)"):
            ShardReader().describe_shards(wrong, ("w",))
