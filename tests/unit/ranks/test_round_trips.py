"""Protects the way of a state through a commit by all ranks of one job and a restore by those of another."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("torch.testing._internal.distributed.fake_pg")

from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

import ckstore  # noqa: E402
from ckstore.errors import UsageError  # noqa: E402
from ckstore.format.many_ranks import world_of  # noqa: E402
from ckstore.state.markers import PerRank, PerRankValues, Replicated  # noqa: E402
from ckstore.state.train_state import TrainState  # noqa: E402
from support.fake_ranks import local_of, mesh_of, placements_of, rank_of, restore_as, sharded  # noqa: E402
from support.rank_jobs import PlayedJob  # noqa: E402
from support.small_chunks import open_small  # noqa: E402

LAYOUTS = st.sampled_from(
    [
        *(((world,), text) for world in (1, 2, 3, 4) for text in ("S0", "R")),
        ((3,), "S1"),
        *(((2, 2), text) for text in ("S0 S0", "S0 S1", "S1 S0", "R S0", "T0:2 S0", "S1 S1", "R S1")),
    ]
)


@pytest.fixture
def path(tmp_path):
    ckstore.open(tmp_path / "store").close()
    return tmp_path / "store"


def play(path, states, step=1):
    """Commit states that ranks have; return the receipt."""
    job = PlayedJob(path, len(states))
    try:
        return job.commit(states, step)
    finally:
        job.close()


def states_of(lengths, make):
    """Return what each rank of a job makes; a mesh and its rank are given."""
    made, world = [], math.prod(lengths)
    for rank in range(world):
        with rank_of(rank, world):
            made.append(make(rank, mesh_of(*lengths)))
    return made


@given(saved=LAYOUTS, wanted=LAYOUTS, shape=st.sampled_from([(13, 6), (7, 2), (600, 130), (1, 5)]))
def test_any_job_restores_what_any_other_committed(saved, wanted, shape):
    full, plain = torch.randn(shape), torch.arange(5)

    def make(text, *, fill):
        def state(rank, mesh):
            shard = sharded(full, mesh, placements_of(text), fill=fill)
            same = plain.clone() if fill else torch.zeros(5, dtype=torch.int64)
            return {"w": shard, "tied": shard.detach(), "x": same, "r": Replicated([same]), "rng": PerRank([rank])}

        return state

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "store"
        ckstore.open(path).close()
        play(path, states_of(saved[0], make(saved[1], fill=True)))
        world = math.prod(wanted[0])
        with ckstore.open(path) as store:
            for rank, into in enumerate(states_of(wanted[0], make(wanted[1], fill=False))):
                restore_as(store, rank, world, into, per_rank="nearest")
                want = local_of(full, into["w"].device_mesh, into["w"].placements)
                assert torch.equal(into["w"]._local_tensor, want)
                assert torch.equal(into["x"], plain)
                assert into["r"].value[0] is into["x"]
                assert into["rng"].value == [rank % math.prod(saved[0])]
            found = store.restore()
            assert torch.equal(found["w"], full)
            assert found["tied"].data_ptr() == found["w"].data_ptr()
            assert found["rng"] == {rank: [rank] for rank in range(math.prod(saved[0]))}
            assert type(found["rng"]) is PerRankValues


def mixed_model(mesh):
    """Return a model that is sharded by fully_shard on top of tensor parallelism, and its optimizer."""
    data, tensor = (mesh[name] for name in mesh.mesh_dim_names)
    model = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.ReLU(), torch.nn.Linear(20, 6, bias=False))
    parallelize_module(model, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=data)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def fill(shards, full):
    for name, shard in shards.items():
        shard.to_local().copy_(local_of(full[name], shard.device_mesh, shard.placements))


@pytest.mark.parametrize("is_stepped", [False, True], ids=["new optimizer", "optimizer with a state"])
def test_fully_sharded_models_with_tensor_parallelism_come_back(path, is_stepped):
    shapes = {"0.weight": (20, 6), "0.bias": (20,), "2.weight": (6, 20)}
    full = {name: torch.randn(shape) for name, shape in shapes.items()}
    moments = {name: torch.randn(shape) for name, shape in shapes.items()}

    def stepped(model, optimizer):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {name: optimizer.state[each]["exp_avg"] for name, each in model.named_parameters()}

    def trained(rank, mesh):
        model, optimizer = mixed_model(mesh)
        its = stepped(model, optimizer)
        with torch.no_grad():
            fill(model.state_dict(), full)
            fill(its, moments)
        return TrainState(model, optimizer)

    play(path, states_of((2, 2), trained))
    with ckstore.open(path) as store:
        found = store.restore()
        for name, tensor in full.items():
            assert torch.equal(found["model"][name], tensor), name
            assert torch.equal(found["optimizer"]["state"][name]["exp_avg"], moments[name]), name
        for rank in range(4):
            with rank_of(rank, 4):
                model, optimizer = mixed_model(mesh_of(2, 2))
                if is_stepped:
                    stepped(model, optimizer)
                restore_as(store, rank, 4, TrainState(model, optimizer))
                for name, shard in model.named_parameters():
                    want = local_of(full[name], shard.device_mesh, shard.placements)
                    assert torch.equal(shard.to_local(), want), name
                    moment = optimizer.state[shard]["exp_avg"]
                    assert moment.placements == shard.placements
                    assert torch.equal(moment.to_local(), local_of(moments[name], shard.device_mesh, shard.placements))


def test_shards_that_lie_on_several_meshes_are_stored_once(path):
    # A layer norm that tensor parallelism leaves whole: fully_shard cuts it on each data-parallel mesh.
    full = torch.randn(13, 6)

    def made(rank, _):
        data = mesh_of(2, ranks=[rank % 2, rank % 2 + 2])
        return {"w": sharded(full, data, placements_of("S0")), "r": sharded(full, data, placements_of("R"))}

    receipt = play(path, states_of((2, 2), made))
    assert receipt.warnings == ()
    with ckstore.open(path) as store:
        found = store.restore()
        assert torch.equal(found["w"], full)
        assert torch.equal(found["r"], full)
        assert store.info("latest").bytes_state == 2 * full.nbytes


def test_shards_that_differ_between_meshes_are_named(path):
    def made(rank, _):
        data = mesh_of(2, ranks=[rank % 2, rank % 2 + 2])
        full = torch.zeros(12, 6)
        full[7] = float(rank == 3)
        return {"w": sharded(full, data, placements_of("S0"))}

    (warning,) = play(path, states_of((2, 2), made)).warnings
    assert warning.startswith("w: a shard differs on rank 3 from rank 2, first in bytes")


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [2, 1, 0, 3]])
@pytest.mark.parametrize("shape", [(13, 6), (300, 500)], ids=["small", "large"])
def test_of_replicas_that_have_diverged_one_is_stored(path, ranks, shape):
    def made(rank, _):
        mesh = mesh_of(2, 2, ranks=ranks)
        full = torch.arange(math.prod(shape)).reshape(shape) + 1e6 * (ranks.index(rank) // 2)
        names = {"weight": "R S0", "exp_avg": "R S0", "scale": "R R", "column": "R S1"}
        return {name: sharded(full, mesh, placements_of(text)) for name, text in names.items()}

    job = PlayedJob(path, 4)
    for step in (1, 2):
        receipt = job.commit(states_of((4,), made), step)
        first, second = (f"ranks {min(each)}, {max(each)}" for each in (ranks[:2], ranks[2:]))
        assert len(receipt.warnings) == 4
        assert all(first in warning and second in warning for warning in receipt.warnings)
        assert f"that of {first} was stored" in receipt.warnings[0]
        with ckstore.open(path) as store:
            found = store.restore(step)
        for name, value in found.items():
            assert torch.equal(value, torch.arange(math.prod(shape)).reshape(shape).float()), name
    job.close()


def test_shards_that_differ_are_refused_if_only_a_sample_of_some_is_compared(path):
    def made(rank, mesh):
        same = sharded(torch.zeros(4, 4), mesh, placements_of("R S0"))
        odd = sharded(torch.full((4, 4), float(rank == 3)), mesh, placements_of("R S0"))
        return {"same": Replicated(same), "odd": odd}

    with pytest.raises(UsageError, match="odd") as caught:
        play(path, states_of((2, 2), made))
    assert "a shard differs on rank 3 from rank 1" in str(caught.value)
    assert "only a sample of same was compared" in str(caught.value)


def test_stages_of_a_pipeline_get_their_own_layers_back(path):
    def stage_of(rank, mesh=None, fill=1.0):
        layers = {
            f"layers.{number}": torch.full((3,), fill * (10 * rank + number))
            for number in range(2 * rank, 2 * rank + 2)
        }
        return {"model": layers, "step": int(7 * fill)}

    play(path, [stage_of(rank) for rank in range(3)])
    with ckstore.open(path) as store:
        for rank in range(3):
            into = stage_of(rank, fill=0.0)
            restore_as(store, rank, 3, into)
            want = stage_of(rank)
            assert into["model"].keys() == want["model"].keys()
            assert all(torch.equal(into["model"][key], want["model"][key]) for key in want["model"])
            assert into["step"] == 7
        assert list(store.restore()["model"]) == [f"layers.{number}" for number in range(6)]
        with pytest.raises(UsageError, match=r"that the checkpoint lacks: model\.layers\.9"):
            restore_as(store, 0, 3, {"model": {**stage_of(0)["model"], "layers.9": torch.ones(1)}, "step": 0})


def test_values_that_differ_come_back_to_their_ranks(path):
    states = [{"rng": torch.full((4,), float(rank)), "pos": rank, "same": [1, "a"]} for rank in range(4)]
    play(path, states)
    with ckstore.open(path) as store:
        assert world_of(store._repository.manifests.load(store._repository.manifests.listing().names[0]).tree).size == 4
        for rank in range(4):
            into = {"rng": torch.zeros(4), "pos": -1, "same": []}
            place = into["rng"].data_ptr()
            restore_as(store, rank, 4, into)
            assert into["rng"].tolist() == [float(rank)] * 4
            assert into["rng"].data_ptr() == place
            assert (into["pos"], into["same"]) == (rank, [1, "a"])


@pytest.fixture(scope="module")
def saved_by_256():
    """A checkpoint of 256 ranks that take turns, and the receipt."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "store"
        ckstore.open(path).close()
        yield path, play(path, [state_of_256(rank) for rank in range(256)])


def state_of_256(rank):
    """Return a state: weights of all, a value that only rank 77 has otherwise, a random state, and a loader's place."""
    odd = torch.zeros(40)
    odd[3] = float(rank == 77)
    random_state = torch.Generator().manual_seed(rank).get_state()
    loader = PerRank({"position": 1000 + rank, "order": torch.full((3,), rank)})
    return {"weight": torch.arange(5000.0), "odd": odd, "random": random_state, "seed": rank, "loader": loader}


def assert_is_of_rank(state, rank):
    want = state_of_256(rank)
    assert all(torch.equal(state[key], want[key]) for key in ("weight", "odd", "random")), rank
    assert state["seed"] == rank
    assert state["loader"].value["position"] == 1000 + rank
    assert state["loader"].value["order"].tolist() == [rank] * 3


def test_of_256_ranks_all_values_are_stored_and_those_that_differ_unmarked_are_named(saved_by_256):
    path, receipt = saved_by_256
    with ckstore.open(path) as store:
        found = store.restore()
        nbytes = store.info("latest").bytes_state
    want = [state_of_256(rank) for rank in range(256)]
    assert torch.equal(found["weight"], want[0]["weight"])
    for key in ("odd", "random"):
        assert found[key].keys() == set(range(256))
        assert all(torch.equal(found[key][rank], want[rank][key]) for rank in range(256)), key
    assert len({bytes(each.numpy()) for each in found["random"].values()}) == 256
    assert found["seed"] == {rank: rank for rank in range(256)}
    assert all(found["loader"][rank]["position"] == 1000 + rank for rank in range(256))
    # Equal values of ranks are counted, and stored, once.
    own_nbytes = want[0]["random"].nbytes + 3 * 8
    assert nbytes == want[0]["weight"].nbytes + 2 * want[0]["odd"].nbytes + 256 * own_nbytes
    named = {warning.partition(": ")[0]: warning for warning in receipt.warnings}
    assert named.keys() == {"odd", "random", "seed"}
    assert named["odd"].startswith("odd: a tensor differs on rank 77 from ranks 0, 1, 2")
    assert "stored for each rank" in named["odd"]


@pytest.mark.deep
def test_each_of_256_ranks_gets_its_own_values_back(saved_by_256, sample):
    places = [(rank, world) for world in (256, 64, 512) for rank in range(world)]
    with ckstore.open(saved_by_256[0]) as store:
        for rank, world in sample.part(places, parts=64):
            own = state_of_256((rank + 1) % 256)
            if rank >= 256:
                with pytest.raises(UsageError, match=f"no value of rank {rank}: it was saved by 256 ranks"):
                    restore_as(store, rank, world, own, per_rank="own")
                assert_is_of_rank(own, (rank + 1) % 256)
            restore_as(store, rank, world, own, per_rank="own" if rank < 256 else "nearest")
            assert_is_of_rank(own, rank % 256)


def test_another_world_writes_hardly_anything_again(tmp_path):
    # Shards of 1 MiB and more with chunks of 64 KiB: as shards of 64 MiB with chunks of 4 MiB.
    path = tmp_path / "store"
    open_small(path, 64 << 10).close()
    full = torch.randint(0, 1 << 62, (4096, 256))
    shares = []
    for step, world in enumerate((8, 6, 1)):
        states = states_of((world,), lambda rank, mesh: {"w": sharded(full, mesh, placements_of("S0"))})
        shares.append(play(path, states, step).bytes_written / full.nbytes)
    assert shares[0] > 0.9
    # Only chunks at the edges of shards.
    assert shares[1] <= 0.10
    assert shares[2] <= 0.04
