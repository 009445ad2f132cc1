"""Saving and loading through torch.distributed.checkpoint in one process; ``test_dcp_ranks.py`` has true ranks."""

from __future__ import annotations

import io
import pickle
import threading

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

import ckstore
from ckstore import dcp, errors
from ckstore.errors import CkstoreError, ConflictError, LeafTypeError, NotFoundError, UnsupportedError, UsageError
from ckstore.ranks import dcp_targets
from ckstore.ranks.dcp_place import parse_checkpoint_id
from support.dcp_ranks import Rank, save_by
from support.late_folders import LateFolder
from support.thread_ranks import stores_of_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(steps: int):
    """Return the state of a model and its optimizer, and values of many types."""
    torch.manual_seed(steps)
    model = torch.nn.Linear(300, 400)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "step": steps,
        "loss": 1.5 / max(steps, 1),
        "names": ["a", "b"] * steps,
        "mixed": [torch.full((3,), float(steps)), {"x": steps}, [1, 2]],
        "rng": torch.get_rng_state(),
        "dtype": torch.bfloat16,
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(float(steps)),
    }


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def test_a_state_comes_back_without_pickle(tmp_path, monkeypatch):
    state = trained(3)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", None)
        receipt = dcp.save(state, tmp_path, 30, metrics={"loss": 0.5})
    assert (receipt.step, receipt.seq) == (30, 0)
    loaded = trained(1)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "load", None)
        info = dcp.load(loaded, tmp_path)
    assert equal(loaded, state)
    assert (info.step, info.metrics) == (30, {"loss": 0.5})
    with ckstore.open(tmp_path) as store:
        assert [entry.step for entry in store.log()] == [30]
        assert store.verify("decode").is_clean


def test_torch_planners_work_and_load_each_others_checkpoints(tmp_path):
    torch_dcp.save(trained(2), storage_writer=dcp.Writer(tmp_path, 2))
    torch_dcp.save(trained(3), storage_writer=dcp.Writer(tmp_path, 3), planner=dcp.SavePlanner())
    for step in (2, 3):
        for planner in (None, dcp.LoadPlanner()):
            loaded = trained(1)
            torch_dcp.load(loaded, storage_reader=dcp.Reader(tmp_path, step), planner=planner)
            assert equal(loaded, trained(step))


def test_our_planners_work_with_torch_storage(tmp_path):
    torch_dcp.save(trained(2), checkpoint_id=tmp_path, planner=dcp.SavePlanner())
    loaded = trained(1)
    torch_dcp.load(loaded, checkpoint_id=tmp_path, planner=dcp.LoadPlanner())
    assert equal(loaded, trained(2))


def test_a_checkpoint_of_one_rank_is_loaded(tmp_path):
    state = {"w": torch.arange(12.0).view(3, 4).t(), "p": torch.nn.Parameter(torch.ones(2)), "n": [1, 2]}
    with ckstore.open(tmp_path) as store:
        store.commit({"model": state, "step": 7}, 7)
    loaded = {"model": {"w": torch.zeros(4, 3), "p": torch.zeros(2), "n": None}, "step": 0}
    dcp.load(loaded, tmp_path)
    assert torch.equal(loaded["model"]["w"], state["w"])
    assert loaded["model"]["n"] == [1, 2]
    assert loaded["step"] == 7


def test_a_flat_state_with_dots_keeps_its_names(tmp_path):
    state = {"a.b": torch.ones(2), "a": {"c": 1}}
    torch_dcp.save(state, storage_writer=dcp.Writer(tmp_path), planner=dcp.SavePlanner(flatten_state_dict=False))
    metadata = dcp.Reader(tmp_path).read_metadata()
    assert list(metadata.state_dict_metadata) == ["a.b", "a"]
    assert metadata.planner_data is None
    loaded = {"a.b": torch.zeros(2), "a": None}
    torch_dcp.load(loaded, storage_reader=dcp.Reader(tmp_path), planner=dcp.LoadPlanner(flatten_state_dict=False))
    assert equal(loaded, state)


def test_the_next_save_stores_differences_and_a_new_process_finds_them(tmp_path):
    weights = torch.randn(2_000_000)
    writer = dcp.Writer(tmp_path)
    deltas = []
    for step in range(3):
        writer = dcp.Writer(tmp_path) if step == 2 else writer
        torch_dcp.save({"w": weights}, storage_writer=writer, checkpoint_id=step)
        deltas.append(writer.receipt.chunks_delta)
        weights *= 1 + 1e-4 * torch.rand(2_000_000)
    assert deltas[0] == 0
    assert min(deltas[1:]) > 0
    assert writer.receipt.step == 2


def test_an_unchanged_state_is_not_written_again(tmp_path):
    dcp.save(trained(2), tmp_path)
    assert dcp.save(trained(2), tmp_path).chunks_new == 0


@pytest.mark.parametrize("cut", ["rows", "columns", "blocks"])
def test_ranks_save_one_checkpoint(tmp_path, cut):
    whole = torch.randn(64, 48)
    boxes = {
        "rows": [((0, 0), (20, 48)), ((20, 0), (44, 48))],
        "columns": [((0, 0), (64, 20)), ((0, 20), (64, 28))],
        "blocks": [((0, 0), (20, 30)), ((20, 0), (44, 48)), ((0, 30), (20, 18))],
    }[cut]
    ranks = [Rank() for _ in boxes] + [Rank()]
    for rank, box in zip(ranks, boxes, strict=False):
        rank.add("w", whole, *box)
    receipt = save_by(ranks, tmp_path, 5)
    assert receipt.bytes_state == whole.nbytes
    loaded = {"w": torch.zeros(64, 48)}
    dcp.load(loaded, tmp_path)
    assert torch.equal(loaded["w"], whole)
    with ckstore.open(tmp_path) as store:
        assert len(store.log()) == 1
        assert store.verify("decode").is_clean


def test_nothing_is_published_if_the_part_of_a_rank_is_missing(tmp_path):
    whole = torch.randn(64, 48)
    ranks = [Rank(), Rank()]
    ranks[0].add("w", whole, (0, 0), (20, 48))
    ranks[1].add("w", whole, (20, 0), (44, 48))
    with pytest.raises(UsageError, match=r"no rank wrote a part of a tensor: w, .* from index \[20, 0\]"):
        save_by(ranks, tmp_path, 5, alter=lambda results: results[1].clear())
    with ckstore.open(tmp_path) as store:
        assert store.log() == []


def test_plan_caching_keeps_no_dtype_of_an_earlier_save(tmp_path):
    planner = dcp.SavePlanner(enable_plan_caching=True, cache_key=str(tmp_path))
    for step, dtype in enumerate((torch.float32, torch.int32, torch.bfloat16)):
        state = {"w": torch.arange(10).to(dtype), "n": step}
        torch_dcp.save(state, storage_writer=dcp.Writer(tmp_path, step), planner=planner)
        loaded = {"w": torch.zeros(10, dtype=dtype), "n": -1}
        dcp.load(loaded, tmp_path, step)
        assert equal(loaded, state)


def test_a_load_that_does_not_fit_changes_nothing(tmp_path):
    dcp.save({"w": torch.ones(4), "n": 3}, tmp_path)
    wrong = [
        ({"w": torch.zeros(4, dtype=torch.float16)}, UsageError, "float32 where the state has torch.float16"),
        ({"w": torch.zeros(4), "b": torch.zeros(1), "c": 1}, NotFoundError, "2 parts of the state are not in .*: b, c"),
        ({"w": torch.zeros(4), "n": torch.zeros(1)}, UsageError, "another value where the state has a tensor"),
        ({"w": 5}, UsageError, "a tensor where the state has a int"),
        ({"w": torch.zeros(5)}, UsageError, r"shape \[4\] where the state has \[5\]"),
    ]
    for state, kind, message in wrong:
        with pytest.raises(kind, match=message):
            dcp.load(state, tmp_path)
        assert not isinstance(state["w"], torch.Tensor) or not state["w"].any()


def test_a_tensor_of_which_parts_are_missing_is_refused(tmp_path):
    torch_dcp.save({"w": torch.ones(8)}, checkpoint_id=tmp_path)
    reader = torch_dcp.FileSystemReader(tmp_path)
    metadata = reader.read_metadata()
    metadata.state_dict_metadata["w"].chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))]
    planner = dcp.LoadPlanner()
    planner.set_up_planner({"w": torch.zeros(8)}, metadata, True)
    with pytest.raises(UnsupportedError, match="3 of 8 elements of a tensor: w"):
        planner.create_local_plan()


def test_casts_and_partial_loads_have_to_be_asked_for(tmp_path):
    dcp.save({"w": torch.ones(4)}, tmp_path)
    state = {"w": torch.zeros(4, dtype=torch.float64), "new": torch.zeros(1), "m": 5}
    dcp.load(state, tmp_path, planner=dcp.LoadPlanner(allow_cast=True, allow_partial_load=True))
    assert state["w"].tolist() == [1.0] * 4
    assert state["m"] == 5


def test_a_pickle_is_not_run(tmp_path):
    torch_dcp.save({"x": io.StringIO("text")}, storage_writer=dcp.Writer(tmp_path))
    with pytest.raises(UnsupportedError, match="pickle that may run code: x"):
        dcp.load({"x": None}, tmp_path)


def test_a_value_that_cannot_be_stored_is_named(tmp_path):
    with pytest.raises(LeafTypeError, match=r"part\.x"):
        dcp.save({"part": {"x": object()}}, tmp_path)
    with pytest.raises(UnsupportedError, match="residual"):
        dcp.Writer(tmp_path, policy=ckstore.Policy(fidelity="near"))


def test_targets_of_any_layout_are_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp_targets, "BUFFER_NBYTES_MAX", 4096)
    whole = torch.randn(100, 90)
    dcp.save({"w": whole}, tmp_path)
    target = torch.zeros(90, 100).t()
    dcp.load({"w": target}, tmp_path)
    assert torch.equal(target, whole)
    conjugate = torch.zeros(100, 90, dtype=torch.complex64).conj()
    dcp.load({"w": conjugate}, tmp_path, planner=dcp.LoadPlanner(allow_cast=True))
    assert torch.equal(conjugate.real, whole)


def test_ranks_that_find_different_checkpoints_get_an_error(tmp_path):
    dcp.save({"n": 1}, tmp_path, 1)
    dcp.save({"n": 2}, tmp_path, 2)
    readers = [dcp.Reader(tmp_path, 1), dcp.Reader(tmp_path)]
    for reader in readers:
        reader.read_metadata()
    plans = [reader.prepare_local_plan(LoadPlan([])) for reader in readers]
    with pytest.raises(ConflictError, match=r"rank 0 step 1 \(seq 0\), rank 1 step 2 \(seq 1\)"):
        readers[0].prepare_global_plan(plans)
    assert readers[0].prepare_global_plan(plans[:1]) == plans[:1]


def test_a_rank_waits_for_what_its_host_shows_late(tmp_path):
    dcp.save({"n": 5}, tmp_path, 1)
    late = LateFolder(tmp_path, 3600)

    def show_later():
        late.seconds = 3600
        threading.Timer(0.3, lambda: setattr(late, "seconds", 0)).start()

    reader, loaded = dcp.Reader(late), {"n": 0}
    reader.follow(dcp.Reader(tmp_path).find())
    show_later()
    torch_dcp.load(loaded, storage_reader=reader, planner=dcp.LoadPlanner())
    assert loaded == {"n": 5}
    rank, writer = Rank(), dcp.Writer(late, 2)
    rank.add("w", torch.ones(4), (0,), (4,))
    show_later()
    (result,) = writer.write_data(SavePlan(rank.items), rank).value()
    assert result.storage_data is not None


def test_values_of_ranks_are_loaded_in_another_world_as_the_store_says(tmp_path, monkeypatch, caplog):
    def state_of(rank):
        return {"w": torch.ones(8), "rng": torch.full((4,), rank), "own": {"pos": rank, "same": 1}}

    def load(store, loaded):
        caplog.clear()
        dcp.load(loaded, store)
        return loaded, [record.message for record in caplog.records if record.name == "ckstore"]

    with stores_of_ranks(tmp_path, 3) as each:
        each(lambda rank: rank.store.commit(state_of(rank.rank), 1))
    loaded, (warning,) = load(tmp_path, state_of(7))
    assert equal(loaded, state_of(0))
    first = "The checkpoint was saved by 3 ranks, and this job has 1: rank 0 got"
    assert warning == f"{first} its own values of rng, own.pos."
    loaded, warnings = load(tmp_path, {"w": torch.zeros(8), "own": {"same": 0}})
    assert (loaded["own"], warnings) == ({"same": 1}, [])
    ranks = ckstore.Ranks(0, 1, per_rank=lambda rank, world, saved: saved - 1)
    with ckstore.open(tmp_path, ranks=ranks) as store:
        loaded, (warning,) = load(store, {"own": {"pos": 7}})
    assert loaded == {"own": {"pos": 2}}
    assert warning == f"{first} another rank's values of own.pos."
    monkeypatch.setattr("ckstore.ranks.dcp_reader.place_in_job", lambda: (5, 8))
    loaded, warnings = load(tmp_path, {"w": torch.zeros(8)})
    assert (loaded["w"].tolist(), warnings) == ([1.0] * 8, [])
    with pytest.raises(UsageError, match="the checkpoint has no value of rank 5"):
        dcp.load({"own": {"pos": 7}}, tmp_path)


def test_saves_without_collectives_are_refused_only_for_many_ranks(tmp_path, monkeypatch):
    torch_dcp.save({"n": 1}, storage_writer=dcp.Writer(tmp_path), use_collectives=False)
    monkeypatch.setattr("ckstore.ranks.dcp_writer._world_size", lambda: 2)
    with pytest.raises(UnsupportedError, match="use_collectives=False cannot publish one checkpoint"):
        torch_dcp.save({"n": 1}, storage_writer=dcp.Writer(tmp_path), use_collectives=False)


def moment_of(steps):
    return trained(steps)["optim"]["state"][0]["exp_avg"]


def test_an_open_store_commits_for_dcp(tmp_path):
    with ckstore.open(tmp_path, run="a") as store:
        assert dcp.save(trained(2), store, metrics={"loss": 1.0}).step == 0
        store.commit({"n": 1}, 7)
        writer = dcp.Writer(store)
        torch_dcp.save(trained(3), storage_writer=writer)
        assert [(info.step, info.seq) for info in store.log()] == [(8, 2), (7, 1), (0, 0)]
        assert writer.receipt.seq == 2
        for target, ref, steps in ((store, None, 3), (tmp_path, "best:loss", 2)):
            loaded = trained(1)
            assert dcp.load(loaded, target, ref, run="a").seq == steps * 2 - 4
            assert equal(loaded, trained(steps))
        # As with a path, keys are those of DCP: text.
        assert torch.equal(store.restore()["optim"]["state"]["0"]["exp_avg"], moment_of(3))
        pending = store.commit_async({"n": torch.ones(2)}, 9)
        loaded = {"n": torch.zeros(2)}
        torch_dcp.load(loaded, storage_reader=dcp.Reader(store))
        assert loaded["n"].tolist() == [1.0, 1.0]
        pending.result()


def test_what_an_open_store_cannot_do_is_refused(tmp_path, monkeypatch):
    class Changing(torch_dcp.DefaultSavePlanner):
        def transform_object(self, write_item, object):
            return super().transform_object(write_item, object)

    with ckstore.open(tmp_path) as store:
        with pytest.raises(torch_dcp.CheckpointException, match=r"what is saved: .*Changing"):
            torch_dcp.save({"n": 1}, storage_writer=dcp.Writer(store, 1), planner=Changing())
        with pytest.raises(UsageError, match="names another store"):
            torch_dcp.save({"n": 1}, storage_writer=dcp.Writer(store, 1), checkpoint_id="elsewhere")
        with pytest.raises(UsageError, match="run 'main', not 'b'"):
            dcp.save({"n": 1}, store, 1, run="b")
        with pytest.raises(UsageError, match="another process cannot use an open store"):
            pickle.dumps(dcp.Writer(store))
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(UsageError, match="each rank would commit a checkpoint of its own"):
            dcp.Writer(store)
        assert store.log() == []


@pytest.mark.parametrize("planner", [torch_dcp.DefaultSavePlanner, dcp.SavePlanner])
def test_ranks_of_an_open_store_save_one_checkpoint_without_collectives(tmp_path, planner):
    def save(store):
        state = {"w": torch.ones(1000), "rng": torch.full((4,), store.rank), "pos": store.rank, "names": ["a"]}
        writer = dcp.Writer(store.store)
        torch_dcp.save(state, storage_writer=writer, planner=planner(), use_collectives=False)
        return writer.receipt

    with stores_of_ranks(tmp_path, 3) as each:
        receipts = each(save)
    assert [receipt.seq for receipt in receipts] == [0, 0, 0]
    with ckstore.open(tmp_path) as store:
        assert [info.step for info in store.log()] == [0]
        found = store.restore()
        assert (found["pos"], found["names"]) == ({0: 0, 1: 1, 2: 2}, ["a"])
        assert [found["rng"][rank].tolist() for rank in range(3)] == [[rank] * 4 for rank in range(3)]
        assert torch.equal(found["w"], torch.ones(1000))


def test_checkpoint_ids_name_a_step_or_a_store(tmp_path):
    assert parse_checkpoint_id(12) == parse_checkpoint_id("12") == (None, "12")
    assert parse_checkpoint_id("runs/a#12") == ("runs/a", "12")
    assert parse_checkpoint_id(tmp_path) == (str(tmp_path), None)
    assert not dcp.Writer.validate_checkpoint_id(None)
    assert not dcp.Writer.validate_checkpoint_id("runs/a#best")
    assert dcp.Reader.validate_checkpoint_id("runs/a#best")
    writer = dcp.Writer(tmp_path / "first")
    torch_dcp.save({"n": 1}, storage_writer=writer, checkpoint_id=5)
    torch_dcp.save({"n": 2}, storage_writer=writer, checkpoint_id=f"{tmp_path}/second#8")
    torch_dcp.save({"n": 3}, storage_writer=writer, checkpoint_id=tmp_path / "second")
    for store, step, value in (("first", 5, 1), ("second", 8, 2), ("second", 9, 3)):
        state = {"n": 0}
        torch_dcp.load(state, storage_reader=dcp.Reader("unused"), checkpoint_id=f"{tmp_path}/{store}#{step}")
        assert state == {"n": value}


def test_background_saves_of_torch_work(tmp_path):
    state = trained(2)
    future = dcp.async_save(state, tmp_path, 2)
    metadata = future.result(60)
    assert metadata.storage_data.step == 2
    loaded = trained(1)
    dcp.load(loaded, tmp_path)
    assert equal(loaded, trained(2))


def test_writers_and_readers_cross_processes(tmp_path):
    writer = dcp.Writer(tmp_path, 1)
    torch_dcp.save({"n": 1}, storage_writer=writer)
    reader = dcp.Reader(tmp_path)
    torch_dcp.load({"n": 0}, storage_reader=reader)
    torch_dcp.save({"n": 2}, storage_writer=pickle.loads(pickle.dumps(writer)), checkpoint_id=2)
    state = {"n": 0}
    torch_dcp.load(state, storage_reader=pickle.loads(pickle.dumps(reader)))
    assert state == {"n": 2}


def test_a_save_lets_others_write_the_run(tmp_path):
    writer = dcp.Writer(tmp_path, 1)
    torch_dcp.save({"n": 1}, storage_writer=writer)
    with ckstore.open(tmp_path) as store:
        store.commit({"n": 2}, 2)
        with pytest.raises(ConflictError, match="run"):
            dcp.save({"n": 3}, tmp_path, 3)
    assert dcp.save({"n": 3}, tmp_path, 3).seq == 2


def test_the_next_save_works_after_a_failed_one(tmp_path, monkeypatch):
    writer = dcp.Writer(tmp_path, 1)
    monkeypatch.setattr(writer, "write_data", None)
    with pytest.raises(torch_dcp.CheckpointException):
        torch_dcp.save({"n": 1}, storage_writer=writer)
    assert dcp.save({"n": 2}, tmp_path, 2).seq == 0
    assert writer.receipt is None


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_every_error_crosses_processes(kind):
    if not issubclass(kind, CkstoreError):
        pytest.skip("not an error of ckstore")
    error = kind("it failed", where="w: 'x'", todo="try again", rank=3, path=("a", 0))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert (again.rank, again.path, again.code) == (3, ("a", 0), kind.code)
