"""Protects the capture of one rank: each byte that it holds is where it says, and later captures reuse the first."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.testing._internal.distributed.fake_pg")

from ckstore.errors import LeafTypeError, UsageError  # noqa: E402
from ckstore.format.many_ranks import tiles_node  # noqa: E402
from ckstore.format.tree import TensorNode  # noqa: E402
from ckstore.ranks.capture import RankCapture  # noqa: E402
from ckstore.state.markers import PerRank, PerRankValues, Replicated  # noqa: E402
from support.fake_ranks import commit_ranks, mesh_of, placements_of, rank_of, sharded  # noqa: E402


def bytes_of(state, held):
    return bytes(state.captured.storages[held.storage].read(held.begin, held.begin + held.nbytes))


def test_row_shards_are_ranges_of_an_ordinary_tensor():
    full = torch.arange(40.0).reshape(10, 4)
    with rank_of(1, 4):
        shard = sharded(full, mesh_of(4), placements_of("S0"))
        state = RankCapture().capture({"w": shard, "step": 3})
    (held,) = state.held
    assert (held.offset, held.nbytes, held.holders) == (48, 48, (1,))
    assert bytes_of(state, held) == full[3:6].numpy().tobytes()
    assert held.begin + state.captured.storages[0].start == shard._local_tensor.data_ptr(), "the memory was copied"
    assert (state.tensors[0].shape, state.tensors[0].strides, state.tensors[0].offset) == ((10, 4), (4, 1), 0)
    assert state.units[0].nbytes == 160
    assert state.captured.tree.children[0] == TensorNode(0)


def test_column_shards_are_tiles():
    full = torch.arange(40.0).reshape(4, 10)
    with rank_of(3, 4):
        state = RankCapture().capture({"w": sharded(full, mesh_of(2, 2), placements_of("R S1"))})
    (held,) = state.held
    assert (held.offset, held.holders) == (80, (1, 3))
    assert bytes_of(state, held) == full[:, 5:].contiguous().numpy().tobytes()
    assert state.captured.tree.children[0] == tiles_node(TensorNode(0), (4, 10), ((), (5,)))
    assert state.tensors[0].shape == (40,)


@pytest.mark.parametrize(
    "change",
    [lambda local: local.t().contiguous().t(), lambda local: torch.cat([local, local], 1)[:, : local.shape[1]]],
    ids=["transposed", "slice"],
)
def test_a_local_tensor_that_is_not_contiguous_is_gathered(change):
    full = torch.arange(40.0).reshape(10, 4)
    with rank_of(1, 2):
        shard = sharded(full, mesh_of(2), placements_of("S0"))
        shard._local_tensor = change(shard._local_tensor)
        capture = RankCapture()
        state = capture.capture({"w": shard, "again": shard})
        assert bytes_of(state, state.held[0]) == full[5:].numpy().tobytes()
        shard._local_tensor += 1
        again = capture.capture({"w": shard, "again": shard})
        assert again.held is state.held
        assert bytes_of(again, again.held[0]) == (full[5:] + 1).numpy().tobytes()


@pytest.mark.parametrize(("text", "is_copied"), [("T0:2 S0", False), ("T0:2 R", False), ("R T1:2", True)])
def test_strided_shards_are_copied_only_if_their_columns_are_in_another_order(text, is_copied):
    with rank_of(1, 4):
        shard = sharded(torch.arange(64.0).reshape(8, 8), mesh_of(2, 2), placements_of(text))
        state = RankCapture().capture({"w": shard})
    local = shard._local_tensor
    places = [state.captured.storages[each.storage].start + each.begin - local.data_ptr() for each in state.held]
    assert all(0 <= place < local.nbytes for place in places) == (not is_copied)


def test_strided_shards_have_a_range_for_each_run_of_rows():
    full = torch.arange(32.0).reshape(16, 2)
    with rank_of(2, 4):
        state = RankCapture().capture({"w": sharded(full, mesh_of(2, 2), placements_of("T0:2 S0"))})
    # The second half of each half is rows 4-7 and 12-15; of these the first ones.
    found = b"".join(bytes_of(state, held) for held in state.held)
    assert [(held.offset // 8, held.nbytes // 8) for held in state.held] == [(4, 4)]
    assert found == full[4:8].numpy().tobytes()


def test_tied_shards_share_a_unit_and_other_tensors_have_their_own():
    with rank_of(0, 2):
        shard = sharded(torch.ones(6, 2), mesh_of(2), placements_of("S0"))
        local = torch.zeros(8)
        state = RankCapture().capture(
            {"a": shard, "tied": shard.detach(), "b": torch.nn.Parameter(shard), "x": local[:4], "y": local[2:]}
        )
    assert [spec.storage for spec in state.tensors] == [0, 0, 0, 1, 1]
    assert [unit.path for unit in state.units] == [("a",), ("x",)]
    assert [spec.is_parameter for spec in state.tensors] == [False, False, True, False, False]
    assert [held.holders for held in state.held] == [(0,), ()]


def test_later_captures_reuse_what_follows_from_the_structure():
    with rank_of(0, 2):
        mesh, capture = mesh_of(2), RankCapture()

        def state_of(step):
            shard = sharded(torch.full((4, 6), float(step)), mesh, placements_of("S1"))
            return {"w": shard, "rng": PerRank([step]), "log": Replicated({"n": step}, check=0.5), "step": step}

        first, second = capture.capture(state_of(1)), capture.capture(state_of(2))
        assert second.held is first.held
        assert second.tensors is first.tensors
        assert second.captured.structure is first.captured.structure
        assert second.captured.tree.children[1].children[0].value == 2
        assert np.frombuffer(bytes_of(second, second.held[0]), np.float32).tolist() == [2.0] * 12
        assert (second.per_rank, second.replicated) == ((("rng",),), ((("log",), 0.5),))
        other = {**state_of(3), "w": sharded(torch.ones(4, 6), mesh, placements_of("S0"))}
        third = capture.capture(other)
        assert third.captured.structure is not second.captured.structure
        assert (first.units[0].array.cuts, third.units[0].array.cuts) == (((), (3,)), ())


def test_a_mark_keeps_long_plain_values_readable(store):
    values = {"all": {str(number): number for number in range(9000)}, "own": PerRank(1)}
    states = {rank: RankCapture().capture({"loader": values, "w": torch.ones(1)}) for rank in range(2)}
    commit_ranks(store, states)
    assert store.restore()["loader"]["own"] == {0: 1, 1: 1}


def test_marks_in_marks_are_refused():
    with pytest.raises(UsageError, match=r"a marked part contains another mark: rng\.a"):
        RankCapture().capture({"rng": PerRank({"a": Replicated(1)})})


@pytest.mark.parametrize("values", [{}, {"0": 1}, {-1: 1}, {True: 1}])
def test_values_of_impossible_ranks_are_refused(store, values):
    with pytest.raises(LeafTypeError, match=r"its keys are not the numbers of ranks\): rng"):
        store.commit({"rng": PerRankValues(values)}, 1)


def test_a_handle_of_one_rank_names_the_remedy(store):
    with rank_of(0, 2):
        state = {"w": sharded(torch.ones(4, 2), mesh_of(2), placements_of("S0"))}
        with pytest.raises(LeafTypeError, match=r"ckstore\.open\(\.\.\., ranks=ckstore\.Ranks\.of_torch\(\)\)"):
            store.commit(state, 1)
    with pytest.raises(LeafTypeError, match=r"ckstore\.open\(\.\.\., ranks="):
        store.commit({"rng": PerRank(1)}, 1)


@pytest.mark.parametrize("placements", ["S0", "S1", "R"])
def test_a_shard_in_a_part_of_one_rank_is_refused_by_name(placements):
    with rank_of(0, 2):
        shard = sharded(torch.ones(4, 4), mesh_of(2), placements_of(placements))
        with pytest.raises(
            UsageError, match=r"distributed tensor.*: own\.w\. Commit the tensor outside of PerRank"
        ) as caught:
            RankCapture().capture({"own": PerRank({"w": shard}), "w": shard})
        assert caught.value.path == ("own", "w")
        found = RankCapture().capture({"own": PerRank({"w": shard.to_local()}), "w": shard})
    assert found.per_rank == (("own",),)
