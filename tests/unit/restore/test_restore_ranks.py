"""Protects restores by ranks: exact bytes in any world and layout, and hardly a byte that the rank does not need."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("torch.testing._internal.distributed.fake_pg")

from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import ckstore  # noqa: E402
from ckstore.errors import UsageError  # noqa: E402
from ckstore.io.memory import MemoryBackend  # noqa: E402
from ckstore.ranks.capture import RankCapture  # noqa: E402
from ckstore.restore import restore as restore_module  # noqa: E402
from ckstore.state import shard_targets  # noqa: E402
from ckstore.state.markers import PerRank, PerRankValues  # noqa: E402
from ckstore.state.placement import RestoreTargets  # noqa: E402
from ckstore.state.train_state import TrainState  # noqa: E402
from support.fake_ranks import (  # noqa: E402
    commit_ranks,
    local_of,
    mesh_of,
    placements_of,
    rank_of,
    restore_as,
    sharded,
)
from support.small_chunks import open_small  # noqa: E402

SHAPES = {"a": (13, 6), "b": (8, 5, 3), "c": (7,), "d": (1, 9), "e": (0, 4)}
LAYOUTS = st.sampled_from(
    [
        *(((world,), text) for world in (1, 2, 3, 5) for text in ("S0", "R")),
        ((3,), "S1"),
        *(((2, 2), text) for text in ("S0 S0", "S0 S1", "S1 S0", "R S0", "T0:2 S0", "S1 S1", "T1:2 S1")),
        ((2, 3), "S0 S1"),
        ((2, 2, 2), "S0 S1 S1"),
    ]
)


def full_state():
    return {key: torch.randn(shape) for key, shape in SHAPES.items()}


def placed(full, mesh, text, *, fill=True):
    """Return shards of all tensors; what a tensor has too few dimensions for is replicated."""
    made = {}
    for key, tensor in full.items():
        words = [word if word == "R" or int(word[1]) < tensor.ndim else "R" for word in text.split()]
        made[key] = sharded(tensor, mesh, placements_of(" ".join(words)), fill=fill)
    return made


def capture_all(full, lengths, text, more=lambda rank: {}):
    world, states = math.prod(lengths), {}
    for rank in range(world):
        with rank_of(rank, world):
            states[rank] = RankCapture().capture({"model": placed(full, mesh_of(*lengths), text), **more(rank)})
    return states


def check_shards(made, full):
    for key, tensor in full.items():
        want = local_of(tensor, made[key].device_mesh, made[key].placements)
        assert torch.equal(made[key]._local_tensor, want), key


def is_same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@given(saved=LAYOUTS, wanted=LAYOUTS, bounds=st.sampled_from([(1 << 30, 1 << 30), (40, 1 << 30), (40, 8), (0, 0)]))
def test_any_layout_restores_into_any_other_bit_for_bit(saved, wanted, bounds):
    full = full_state()
    with ckstore.open(MemoryBackend()) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_targets, "WINDOW_NBYTES_MAX", bounds[0])
        patch.setattr(shard_targets, "GAP_NBYTES_MAX", bounds[1])
        commit_ranks(store, capture_all(full, *saved))
        lengths, text = wanted
        world = math.prod(lengths)
        for rank in range(world):
            with rank_of(rank, world):
                into = {"model": placed(full, mesh_of(*lengths), text, fill=False)}
                assert restore_as(store, rank, world, into).state is into
                check_shards(into["model"], full)
        # One process gets whole tensors, with a live state and without.
        whole = {"model": {key: torch.zeros_like(tensor) for key, tensor in full.items()}}
        assert store.restore(into=whole) is whole
        assert is_same(whole["model"], full)
        assert is_same(store.restore()["model"], full)
        assert is_same(store.restore(only="model.b")["model"], {"b": full["b"]})


def test_a_shard_that_is_one_range_is_read_into_place(store, monkeypatch):
    full = {"w": torch.randn(1024, 64)}
    store.commit({"model": full}, 1)
    direct = []
    finish = RestoreTargets.destination

    def watched(self, storage):
        direct.append(self.is_direct(storage))
        return finish(self, storage)

    monkeypatch.setattr(RestoreTargets, "destination", watched)
    with rank_of(2, 3):
        into = {"model": placed(full, mesh_of(3), "S0", fill=False)}
        restore_as(store, 2, 3, into)
        check_shards(into["model"], full)
    assert direct
    assert all(direct)


@pytest.mark.parametrize("world", [6, 16])
def test_a_rank_of_another_world_reads_hardly_more_than_its_shards(world, tmp_path, monkeypatch):
    # Shards of 4 MiB, and chunks of a sixteenth: as shards of 64 MiB with chunks of 4 MiB.
    full = {"w": torch.randint(0, 1 << 62, (4096, 1024))}
    plans = []
    plan = restore_module.plan_restore
    monkeypatch.setattr(
        restore_module, "plan_restore", lambda *args, **how: plans.append(plan(*args, **how)) or plans[-1]
    )
    with open_small(tmp_path / "store", 256 << 10) as store:
        commit_ranks(store, capture_all(full, (8,), "S0"))
        needed = read = 0
        for rank in range(world):
            with rank_of(rank, world):
                into = {"model": placed(full, mesh_of(world), "S0", fill=False)}
                restore_as(store, rank, world, into)
                check_shards(into["model"], full)
                needed += into["model"]["w"]._local_tensor.nbytes
    read = sum(group.nbytes for each in plans for group in each.groups)
    assert not any(each.buffered_reads for each in plans)
    assert read / needed <= 1.10


@pytest.mark.parametrize(("saved", "wanted"), [("S0", "S1"), ("S1", "S0"), ("S1", "S1")])
def test_parts_of_rows_are_read_in_short_windows_without_the_gaps_between(saved, wanted, tmp_path, monkeypatch):
    # Rows of 2 MiB, of which a rank needs a quarter, and 64 of them in all: no window may have more than 4 MiB.
    monkeypatch.setattr(shard_targets, "WINDOW_NBYTES_MAX", 4 << 20)
    monkeypatch.setattr(shard_targets, "GAP_NBYTES_MAX", 128 << 10)
    full = {"w": torch.randint(0, 1 << 62, (16, 1 << 18))}
    plans, longest = [], []
    plan = restore_module.plan_restore

    def watched(manifest, storages, **how):
        longest.append(max(manifest.storages[each].nbytes for each in storages))
        plans.append(plan(manifest, storages, **how))
        return plans[-1]

    monkeypatch.setattr(restore_module, "plan_restore", watched)
    with open_small(tmp_path / "store", 64 << 10) as store:
        commit_ranks(store, capture_all(full, (4,), saved))
        with rank_of(1, 3):
            into = {"model": placed(full, mesh_of(3), wanted, fill=False)}
            restore_as(store, 1, 3, into)
            check_shards(into["model"], full)
    read = sum(group.nbytes for each in plans for group in each.groups)
    assert read / into["model"]["w"]._local_tensor.nbytes <= 1.25
    assert max(longest) <= (12 << 20)


def net():
    return torch.nn.Sequential(torch.nn.Linear(10, 23), torch.nn.LayerNorm(23), torch.nn.Linear(23, 7))


def trained():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    return model, optimizer


def fsdp_of(mesh):
    model = net()
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


@pytest.mark.parametrize("is_named", [False, True], ids=["plain", "TrainState"])
def test_fsdp_modules_and_new_optimizers_get_their_shards(store, is_named):
    model, optimizer = trained()
    store.commit(TrainState(model, optimizer) if is_named else {"model": model, "optimizer": optimizer}, 1)
    full = model.state_dict()
    with rank_of(1, 3):
        mine, its = fsdp_of(mesh_of(3))
        into = TrainState(mine, its) if is_named else {"model": mine, "optimizer": its}
        for _ in range(2):
            # The second time, the optimizer has a state, which is written in place.
            restore_as(store, 1, 3, into)
            check_shards(mine.state_dict(), full)
            assert its.param_groups[0]["lr"] == 0.1
            for ours, theirs in zip(mine.parameters(), model.parameters(), strict=True):
                moment = its.state[ours]["exp_avg"]
                assert isinstance(moment, DTensor)
                assert moment.placements == ours.placements
                assert torch.equal(
                    moment._local_tensor,
                    local_of(optimizer.state[theirs]["exp_avg"], ours.device_mesh, ours.placements),
                )
                assert type(its.state[ours]["step"]) is torch.Tensor
        place = its.state[next(mine.parameters())]["exp_avg"]._local_tensor.data_ptr()
        restore_as(store, 1, 3, into)
        assert its.state[next(mine.parameters())]["exp_avg"]._local_tensor.data_ptr() == place


def test_an_optimizer_with_hooks_is_given_shards(store):
    model, optimizer = trained()
    store.commit({"optimizer": optimizer}, 1)
    with rank_of(1, 2):
        mine, its = fsdp_of(mesh_of(2))
        seen = []
        its.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append(state["state"][0]["exp_avg"]))
        for _ in range(2):
            restore_as(store, 1, 2, {"optimizer": its})
            for ours, theirs in zip(mine.parameters(), model.parameters(), strict=True):
                moment = its.state[ours]["exp_avg"]
                want = local_of(optimizer.state[theirs]["exp_avg"], ours.device_mesh, ours.placements)
                assert torch.equal(moment._local_tensor, want)
        assert [type(each) for each in seen] == [DTensor, DTensor]


class Wrapper:
    """As torchtitan's: an object whose state is that of a module, and of which nothing else is known."""

    def __init__(self, model):
        self.model, self.loaded = model, None

    def state_dict(self):
        return dict(self.model.state_dict())

    def load_state_dict(self, state):
        self.loaded = state
        self.model.load_state_dict(state)


def test_objects_that_load_by_themselves_are_given_shards(store):
    model, _ = trained()
    store.commit({"model": Wrapper(model), "hooked": model}, 1)
    with rank_of(0, 2):
        mesh = mesh_of(2)
        (mine, _), (hooked, _) = fsdp_of(mesh), fsdp_of(mesh)
        seen = []
        hooked.register_load_state_dict_post_hook(lambda *_: seen.append(1))
        wrapper = Wrapper(mine)
        restore_as(store, 0, 2, {"model": wrapper, "hooked": hooked})
        assert all(isinstance(each, DTensor) for each in wrapper.loaded.values())
        check_shards(mine.state_dict(), model.state_dict())
        check_shards(hooked.state_dict(), model.state_dict())
        assert seen


def test_another_global_shape_or_dtype_is_refused_before_the_first_write(store):
    store.commit({"a": torch.ones(8, 2), "w": torch.ones(8, 2)}, 1)
    with rank_of(0, 2):
        mesh = mesh_of(2)
        for wrong in (torch.ones(8, 3), torch.ones(8, 2, dtype=torch.int32)):
            shards = {
                "a": sharded(torch.ones(8, 2), mesh, placements_of("S0"), fill=False),
                "w": sharded(wrong, mesh, placements_of("S0"), fill=False),
            }
            with pytest.raises(UsageError, match=r"w is torch float32 \(8, 2\) in the checkpoint"):
                restore_as(store, 0, 2, shards)
            assert not shards["a"]._local_tensor.any()


def test_a_handle_of_one_rank_refuses_shards_and_names_the_remedy(store):
    store.commit({"w": torch.ones(8, 2)}, 1)
    with rank_of(0, 2):
        into = {"w": sharded(torch.ones(8, 2), mesh_of(2), placements_of("S0"), fill=False)}
        with pytest.raises(UsageError, match=r"Open the store with ckstore\.open\(\.\.\., ranks="):
            store.restore(into=into)


# Values that differ between ranks.


@pytest.fixture
def saved_by_four(store):
    states = {rank: RankCapture().capture({"rng": PerRank({"seed": 100 + rank}), "step": 7}) for rank in range(4)}
    commit_ranks(store, states)
    return store


def test_each_rank_gets_its_own_value_back(saved_by_four):
    for rank in range(4):
        into = {"rng": PerRank({"seed": 0}), "step": 0}
        found = restore_as(saved_by_four, rank, 4, into)
        assert (into["rng"].value, into["step"]) == ({"seed": 100 + rank}, 7)
        assert found.warnings == ()
        assert restore_as(saved_by_four, rank, 4).state == {"rng": {"seed": 100 + rank}, "step": 7}


def test_a_smaller_world_gets_its_own_values_with_a_warning(saved_by_four):
    into = {"rng": {"seed": 0}, "step": 0}
    (warning,) = restore_as(saved_by_four, 1, 2, into).warnings
    assert into["rng"] == {"seed": 101}
    assert warning == "The checkpoint was saved by 4 ranks, and this job has 2: rank 1 got its own values of rng."


def test_a_rank_that_was_not_there_needs_a_policy(saved_by_four):
    into = {"rng": PerRank({"seed": 0}), "step": 0}
    with pytest.raises(UsageError, match=r"no value of rank 5: it was saved by 4 ranks, and this job has 8: rng\. "):
        restore_as(saved_by_four, 5, 8, into)
    assert into["step"] == 0
    (warning,) = restore_as(saved_by_four, 5, 8, into, per_rank="nearest").warnings
    assert into["rng"].value == {"seed": 101}
    assert warning.endswith("rank 5 got another rank's values of rng.")
    # The mark stands above the policy of the handle.
    into = {"rng": PerRank({"seed": 0}, on_new_world=lambda rank, world, saved: world - saved - 1), "step": 0}
    restore_as(saved_by_four, 5, 8, into)
    assert into["rng"].value == {"seed": 103}
    with pytest.raises(UsageError, match="on_new_world chose rank 9"):
        restore_as(saved_by_four, 5, 8, {"rng": PerRank(0, on_new_world=lambda *_: 9), "step": 0})


def test_one_process_gets_the_values_of_all_ranks_and_can_commit_them(saved_by_four):
    found = saved_by_four.restore()
    assert type(found["rng"]) is PerRankValues
    assert found == {"rng": {rank: {"seed": 100 + rank} for rank in range(4)}, "step": 7}
    saved_by_four.commit(found, 2)
    again = saved_by_four.restore()
    assert (type(again["rng"]), again) == (PerRankValues, found)


def test_parts_that_only_other_ranks_have_are_left_out(store):
    state = {"layers": {"0": torch.ones(2), "1": torch.full((2,), 2.0)}, "step": 1}
    partial = [(("layers", "0"), (0,)), (("layers", "1"), (1,))]
    commit_ranks(store, {rank: RankCapture().capture(state) for rank in range(2)}, partial=partial)
    into = {"layers": {"1": torch.zeros(2)}, "step": 0}
    restore_as(store, 1, 2, into)
    assert list(into["layers"]) == ["1"]
    assert into["layers"]["1"].tolist() == [2.0, 2.0]
    stage = torch.nn.ParameterDict({"1": torch.zeros(2)})
    restore_as(store, 1, 2, {"layers": stage, "step": 0})
    assert stage["1"].tolist() == [2.0, 2.0]
    # One process that has all of it gets all of it. A part that it alone has is still an error.
    whole = {"layers": {"0": torch.zeros(2), "1": torch.zeros(2)}, "step": 0}
    assert store.restore(into=whole)["layers"]["0"].tolist() == [1.0, 1.0]
    with pytest.raises(UsageError, match=r"the state has 1 leaf that the checkpoint lacks: layers\.2"):
        restore_as(store, 1, 2, {"layers": {"1": torch.zeros(2), "2": torch.zeros(2)}, "step": 0})


@pytest.fixture
def saved_stages(store):
    """Two pipeline stages, of which each has a layer."""
    state = {"layers": {"0": torch.ones(2), "1": torch.full((2,), 2.0)}, "step": 1}
    partial = [(("layers", "0"), (0,)), (("layers", "1"), (1,))]
    commit_ranks(store, {rank: RankCapture().capture(state) for rank in range(2)}, partial=partial)
    return store


def test_without_a_live_state_each_rank_gets_its_own_parts_in_the_same_world_and_all_in_another(saved_stages):
    for rank in range(2):
        found = restore_as(saved_stages, rank, 2)
        assert (list(found.state["layers"]), found.warnings) == ([str(rank)], ())
    for rank, world in ((0, 1), (2, 3)):
        found = restore_as(saved_stages, rank, world)
        assert list(found.state["layers"]) == ["0", "1"]
        named = f"this job has {world}: rank {rank} got layers.0, layers.1, which only some of them had."
        assert [each.endswith(named) for each in found.warnings] == [True]


def test_one_process_gets_all_parts_or_is_warned_of_what_its_state_lacks(saved_stages):
    assert list(saved_stages.restore()["layers"]) == ["0", "1"]
    assert saved_stages.restored.warnings == ()
    into = {"layers": {"1": torch.zeros(2)}, "step": 0}
    saved_stages.restore(into=into)
    assert into["layers"]["1"].tolist() == [2.0, 2.0]
    (warning,) = saved_stages.restored.warnings
    assert warning.endswith("layers.0 was left out, because the state that was passed lacks it.")


def test_one_process_is_warned_whose_values_it_gets(saved_by_four):
    into = {"rng": {"seed": 0}, "step": 0}
    saved_by_four.restore(into=into)
    assert into["rng"] == {"seed": 100}
    assert saved_by_four.restored.warnings == (
        "The checkpoint was saved by 4 ranks, and this job has 1: rank 0 got its own values of rng.",
    )


def test_a_function_chooses_for_every_rank_of_another_world_and_for_none_of_the_same(saved_by_four):
    def every_second(rank, world, saved):
        return rank * saved // world

    for world, expected in ((2, [100, 102]), (4, [100, 101, 102, 103])):
        found = [restore_as(saved_by_four, rank, world, per_rank=every_second).state for rank in range(world)]
        assert [each["rng"]["seed"] for each in found] == expected
