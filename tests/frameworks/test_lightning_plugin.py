"""The plugin for Lightning and Fabric: what stands at a path, what is kept, and what is refused with what to do."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch

import ckstore
from ckstore.errors import BackendError, ChecksumError, LeafTypeError, NotFoundError, UnsupportedError, UsageError
from ckstore.format.records import with_changes
from ckstore.integrations import exact_resume, lightning_copies
from ckstore.integrations.pointer_store import PointerStore
from ckstore.integrations.pointers import is_pointer, read_pointer, write_pointer
from ckstore.io.remote import client
from ckstore.io.remote.client import RemoteOptions

L = pytest.importorskip("lightning", reason="lightning is not installed")

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO as Abstract  # noqa: E402
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO  # noqa: E402
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from lightning.pytorch.core import saving  # noqa: E402
from lightning.pytorch.demos.boring_classes import BoringModel  # noqa: E402
from lightning.pytorch.plugins import AsyncCheckpointIO  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def io(tmp_path):
    made = ckstore.lightning.CheckpointIO(tmp_path / "store", background=False)
    yield made
    made.teardown()


def checkpoint(step, **parts):
    return {"global_step": step, "state_dict": {"w": torch.full((4,), float(step))}, **parts}


def steps_in(io):
    return sorted(info.step for info in io.store.log())


def fit(folder, io, *, callbacks=(), model=None, resume=None, batches=4, **checkpoints):
    saving_callback = ModelCheckpoint(dirpath=folder / "checkpoints", **checkpoints)
    trainer = L.Trainer(
        max_epochs=2,
        limit_train_batches=batches,
        limit_val_batches=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[io],
        callbacks=[saving_callback, *callbacks],
    )
    trainer.fit(model or BoringModel(), ckpt_path=resume)
    return trainer


def test_saved_checkpoint_comes_back(io, tmp_path):
    path = tmp_path / "new folder" / "a.ckpt"
    saved = checkpoint(3, hyper_parameters={"rate": 0.1}, optimizer_states=[{"state": {0: torch.ones(2)}}])
    io.save_checkpoint(saved, path)
    loaded = io.load_checkpoint(path)
    assert torch.equal(loaded.pop("state_dict")["w"], saved["state_dict"]["w"])
    assert loaded["hyper_parameters"] == {"rate": 0.1}
    assert torch.equal(loaded["optimizer_states"][0]["state"][0], torch.ones(2))
    assert read_pointer(path).step == 3
    assert read_pointer(path).made_by == f"Lightning {L.__version__}"


def test_device_is_taken_from_map_location(io, tmp_path):
    io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    with pytest.raises(UsageError, match="meta device"):
        io.load_checkpoint(tmp_path / "a.ckpt", map_location="meta")
    for other in (torch.device("cpu"), lambda storage, location: storage, {"cuda:0": "cpu"}):
        assert io.load_checkpoint(tmp_path / "a.ckpt", map_location=other)["state_dict"]["w"].device.type == "cpu"


def test_step_of_fabric_checkpoints(io, tmp_path):
    for number, saved in enumerate(({"step": 7}, {"iteration": 9}, {"model": {}}, {"step": torch.tensor(3)})):
        io.save_checkpoint(saved, tmp_path / f"{number}.ckpt")
    assert steps_in(io) == [7, 9, 10, 11]


def test_storage_options(io, tmp_path):
    policy = ckstore.Policy(compression="none")
    options = {"metrics": {"loss": 2.0}, "tags": ["good"], "policy": policy}
    io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt", storage_options=options)
    assert io.store.info("good").metrics == {"loss": 2.0}
    for wrong in ({"metric": {}}, "best"):
        with pytest.raises(UsageError, match="metrics, policy, tags"):
            io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt", storage_options=wrong)


def test_file_of_lightning_is_loaded_replaced_and_removed_by_lightning(io, tmp_path):
    old, other = tmp_path / "last.ckpt", tmp_path / "old.ckpt"
    for path in (old, other):
        TorchCheckpointIO().save_checkpoint(checkpoint(1), path)
    assert io.load_checkpoint(old, weights_only=True)["global_step"] == 1
    io.save_checkpoint(checkpoint(2), old)
    assert io.load_checkpoint(old)["global_step"] == 2
    io.remove_checkpoint(other)
    assert not other.exists()


def test_missing_file_is_not_found(io, tmp_path):
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        io.load_checkpoint(tmp_path / "missing.ckpt")
    io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        io.load_checkpoint(tmp_path / "missing.ckpt")
    io.remove_checkpoint(tmp_path / "missing.ckpt")


def test_references_of_the_store_are_paths(io, tmp_path):
    for step in (1, 2):
        io.save_checkpoint(
            checkpoint(step), tmp_path / f"{step}.ckpt", {"metrics": {"loss": step}, "tags": [f"t{step}"]}
        )
    for reference, step in (("latest", 2), ("t1", 1), ("best:loss", 1), ("seq:1", 2)):
        assert io.load_checkpoint(reference)["global_step"] == step


def test_to_a_url_lightning_saves_itself_and_the_log_says_so(io, caplog):
    for step in (1, 2):
        io.save_checkpoint(checkpoint(step), "memory://ckstore-test/last.ckpt")
    assert io.load_checkpoint("memory://ckstore-test/last.ckpt")["global_step"] == 2
    io.remove_checkpoint("memory://ckstore-test/last.ckpt")
    assert caplog.text.count("local dirpath, and put the store in the bucket") == 1


def test_file_url_is_a_path(io, tmp_path):
    io.save_checkpoint(checkpoint(1), f"file://{tmp_path}/a.ckpt")
    assert is_pointer(tmp_path / "a.ckpt")


def test_weights_of_a_launched_process_are_an_ordinary_file(io, tmp_path):
    io.save_checkpoint({"w": torch.ones(2)}, tmp_path / ".temp.ckpt")
    assert torch.load(tmp_path / ".temp.ckpt")["w"].tolist() == [1, 1]
    assert not (tmp_path / "store").exists()


def test_unstorable_hyper_parameter_is_named_and_the_way_out_too(io, tmp_path):
    saved = checkpoint(1, hyper_parameters={"loss": torch.nn.functional.mse_loss})
    with pytest.raises(LeafTypeError, match=r'hyper_parameters\.loss.*on_unstorable="drop"'):
        io.save_checkpoint(saved, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_unstorable_hyper_parameter_is_left_out_with_one_log_line(tmp_path, caplog):
    io = ckstore.lightning.CheckpointIO(tmp_path / "store", background=False, on_unstorable="drop")
    for step in (1, 2):
        io.save_checkpoint(checkpoint(step, hyper_parameters={"loss": len, "rate": 1}), tmp_path / f"{step}.ckpt")
    assert io.load_checkpoint(tmp_path / "1.ckpt")["hyper_parameters"] == {"rate": 1}
    assert caplog.text.count("hyper_parameters.loss") == 1
    io.teardown()
    with pytest.raises(UsageError, match="on_unstorable"):
        ckstore.lightning.CheckpointIO(tmp_path / "store", on_unstorable="pickle")


def test_score_belongs_to_the_checkpoint_that_was_saved_for_it(io, tmp_path):
    path = str(tmp_path / "a.ckpt")
    state = {"monitor": "val_loss", "best_k_models": {path: torch.tensor(0.5)}, "current_score": torch.tensor(0.5)}
    io.save_checkpoint(checkpoint(1, callbacks={"ModelCheckpoint": state}), path)
    io.save_checkpoint(checkpoint(1, callbacks={"ModelCheckpoint": state}), tmp_path / "last.ckpt")
    io.save_checkpoint(checkpoint(2, callbacks={"ModelCheckpoint": state}), tmp_path / "last.ckpt")
    assert [(info.step, dict(info.metrics)) for info in io.store.log()] == [(2, {}), (1, {"val_loss": 0.5})]


def test_plugin_is_pickled_as_what_it_was_made_with(io, tmp_path):
    io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    copy = pickle.loads(pickle.dumps(io))
    assert repr(copy) == repr(io)
    assert copy.load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 1
    copy.teardown()
    callback = pickle.loads(pickle.dumps(ckstore.lightning.ExactResume(guard=False)))
    assert isinstance(callback, Callback)
    assert not callback._guard


def test_every_loaded_copy_of_lightning_accepts_plugin_and_callback(io, tmp_path):
    other = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO as OtherAbstract

    io = ckstore.lightning.CheckpointIO(tmp_path / "store", background=False)
    callback = ckstore.lightning.ExactResume()
    assert isinstance(io, Abstract)
    assert isinstance(io, OtherAbstract)
    assert isinstance(callback, Callback)
    assert isinstance(callback, other.Callback)
    assert isinstance(callback, ckstore.lightning.ExactResume)
    trainer = other.Trainer(plugins=[io], callbacks=[callback], logger=False, accelerator="cpu")
    assert trainer.strategy.checkpoint_io is io


def test_unknown_version_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(Abstract, "save_checkpoint", lambda self, checkpoint, path: None)
    lightning_copies.check.cache_clear()
    with pytest.raises(UnsupportedError, match=r"CheckpointIO.save_checkpoint has the parameters.*2\.6\.6"):
        ckstore.lightning.CheckpointIO(tmp_path / "store")
    lightning_copies.check.cache_clear()


def test_without_lightning_the_door_says_so(monkeypatch):
    with pytest.raises(UnsupportedError, match="Install it: pip install lightning"):
        lightning_copies.loaded(("no_such_lightning.fabric",))


def test_trainer_keeps_what_lightning_keeps_and_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    io = ckstore.lightning.CheckpointIO(tmp_path / "store")
    trainer = fit(tmp_path, io, save_top_k=1, save_last=True, every_n_train_steps=2)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert set(threading.enumerate()) == before
    assert len(kept) == 2
    assert "last.ckpt" in kept
    assert steps_in(io) == [trainer.global_step, trainer.global_step]
    io.teardown()


def test_second_save_of_a_step_stores_nothing(tmp_path):
    io = ckstore.lightning.CheckpointIO(tmp_path / "store", background=False)
    model = BoringModel()
    model.layer = torch.nn.Linear(32, 2**15)
    model.validation_step = None
    fit(tmp_path, io, save_last=True, model=model, batches=1)
    last, named = io.store.log()
    assert last.step == named.step == 2
    assert last.bytes_written <= 0.02 * named.bytes_written
    io.teardown()


@pytest.mark.parametrize("save_last", [True, "link"])
def test_last_resumes_tests_and_is_a_link_if_wanted(tmp_path, save_last):
    io = ckstore.lightning.CheckpointIO(tmp_path / "store")
    trainer = fit(tmp_path, io, save_last=save_last, save_top_k=1)
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert last.is_symlink() is (save_last == "link")
    assert trainer.test(ckpt_path="best", verbose=False)
    resumed = ckstore.lightning.CheckpointIO(tmp_path / "store")
    trainer = fit(tmp_path, resumed, save_last=save_last, save_top_k=1, resume="last")
    assert trainer.global_step == 8
    assert ckstore.lightning.load(last)["global_step"] == 8
    resumed.teardown()
    io.teardown()


def test_load_and_load_from_checkpoint_read_pointers_and_files(io, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "pl_load", saving.pl_load)
    fit(tmp_path, io, filename="a")
    pointer, file = tmp_path / "checkpoints" / "a.ckpt", tmp_path / "b.ckpt"
    TorchCheckpointIO().save_checkpoint(io.load_checkpoint(pointer), file)
    loaded = ckstore.lightning.load(pointer)
    assert torch.equal(loaded["state_dict"]["layer.weight"], ckstore.lightning.load(file)["state_dict"]["layer.weight"])
    with pytest.raises(pickle.UnpicklingError):
        BoringModel.load_from_checkpoint(pointer)
    ckstore.lightning.install_loader()
    ckstore.lightning.install_loader()
    for path in (pointer, str(pointer), file):
        model = BoringModel.load_from_checkpoint(path)
        assert torch.equal(model.layer.weight, loaded["state_dict"]["layer.weight"])
    with pytest.raises(NotFoundError, match="no such checkpoint"):
        ckstore.lightning.load(tmp_path / "missing.ckpt")


def test_pointer_tells_people_what_it_is(io, tmp_path):
    io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    # torch reads the first byte only, and its message cannot be changed.
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "a.ckpt")
    text = (tmp_path / "a.ckpt").read_text()
    assert "ckstore restore" in text
    assert "ckstore.lightning.load" in text


def test_wrapper_that_saves_in_a_thread_is_seen_through(tmp_path):
    io = ckstore.lightning.CheckpointIO(tmp_path / "store")
    callback = ckstore.lightning.ExactResume()
    trainer = fit(tmp_path, AsyncCheckpointIO(io), callbacks=[callback], save_last=True)
    assert exact_resume.plugin_of(trainer) is io
    assert io.load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 8
    io.teardown()


def test_fabric_saves_and_loads_in_place(tmp_path):
    io = ckstore.lightning.CheckpointIO(tmp_path / "store")
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[io])
    model = torch.nn.Linear(4, 4)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    io.attach(optimizer.optimizer)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    fabric.save(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer, "step": 5})
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load(tmp_path / "a.ckpt", state) == {}
    assert state["step"] == 5
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    fabric.strategy.teardown()
    assert read_pointer(tmp_path / "a.ckpt").seq == 0


def test_callbacks_that_swap_weights_leave_the_optimizers_unattached(tmp_path):
    class WeightAveraging(Callback):
        pass

    attached = []
    io = ckstore.lightning.CheckpointIO(tmp_path / "store", background=False)
    io.attach = attached.append
    fit(tmp_path, io, callbacks=[ckstore.lightning.ExactResume(), WeightAveraging()])
    assert attached == []
    fit(tmp_path, io, callbacks=[ckstore.lightning.ExactResume()])
    assert len(attached) == 1
    fit(tmp_path, io, callbacks=[ckstore.lightning.ExactResume(guard=False)])
    assert len(attached) == 1
    io.teardown()


@pytest.mark.parametrize("name", ["step=2", "elastic-step=2"])
def test_lost_save_resumes_from_the_newest_durable_one(tmp_path, caplog, name):
    io = ckstore.lightning.CheckpointIO(tmp_path / "store")
    io.save_checkpoint(checkpoint(1), tmp_path / "step=1.ckpt")
    io.wait()
    record = read_pointer(tmp_path / "step=1.ckpt")
    io.save_checkpoint(checkpoint(2), tmp_path / f"{name}.ckpt")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / f"{name}.ckpt")
    io.wait()
    # As a kill leaves them: the pointer is in flight, and its commit was never staged.
    io.store.delete(2)
    lost = with_changes(record, step=2, after_seq=record.seq, seq=None, checkpoint_id=None)
    write_pointer(tmp_path / f"{name}.ckpt", lost)
    assert io.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 1
    assert "step=1.ckpt is used instead" in caplog.text
    with pytest.raises(NotFoundError, match="step 2 did not become durable"):
        io.load_checkpoint(tmp_path / f"{name}.ckpt")
    io.teardown()


def test_save_waits_where_the_only_or_the_last_checkpoint_would_be_lost(io, tmp_path, monkeypatch):
    waits = {}
    own = PointerStore.save

    def save(self, state, step, path, *, wait=False, **options):
        waits[path.name] = wait
        own(self, state, step, path, **options)

    monkeypatch.setattr(PointerStore, "save", save)
    named = {"ModelCheckpoint": {"last_model_path": str(tmp_path / "newest.ckpt")}}
    for name in ("a", "elastic-2", "last", "last-v1", "last-layer", "newest"):
        io.save_checkpoint(checkpoint(1, callbacks=named), tmp_path / f"{name}.ckpt")
    assert [name for name, wait in waits.items() if wait] == ["a.ckpt", "last.ckpt", "last-v1.ckpt", "newest.ckpt"]


def test_damaged_pointer_is_named_with_what_to_do(io, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "pl_load", saving.pl_load)
    ckstore.lightning.install_loader()
    path = tmp_path / "a.ckpt"
    io.save_checkpoint(checkpoint(1), path)
    path.write_bytes(path.read_bytes().replace(b'"step": 1,', b'"step": 2,'))
    for load in (io.load_checkpoint, ckstore.lightning.load, BoringModel.load_from_checkpoint):
        with pytest.raises(ChecksumError, match=r"a\.ckpt\. Delete it; the checkpoint stays in the store"):
            load(path)


def test_store_that_is_gone_is_named_on_resume_and_none_is_made(tmp_path):
    io = ckstore.lightning.CheckpointIO(tmp_path / "disk" / "store")
    fit(tmp_path, io, save_last=True)
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    io = ckstore.lightning.CheckpointIO(tmp_path / "disk" / "store")
    with pytest.raises(NotFoundError, match=str(tmp_path / "disk" / "store")):
        fit(tmp_path, io, save_last=True, resume="last")
    assert not (tmp_path / "disk").exists()
    (tmp_path / "unmounted").rename(tmp_path / "disk")
    assert fit(tmp_path, io, save_last=True, resume="last").global_step == 8


def test_bucket_out_of_reach_is_named_on_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "DEFAULT_OPTIONS", RemoteOptions(try_count=1))
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:9", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    here = ckstore.lightning.CheckpointIO(tmp_path / "store", background=False)
    fit(tmp_path, here, save_last=True)
    last = tmp_path / "checkpoints" / "last.ckpt"
    write_pointer(last, with_changes(read_pointer(last), store="s3://bucket/run"))
    io = ckstore.lightning.CheckpointIO("s3://bucket/run")
    with pytest.raises(BackendError, match="s3://bucket/run") as caught:
        fit(tmp_path, io, save_last=True, resume="last")
    assert caught.value.is_transient


def test_first_save_is_durable_before_it_can_be_resumed_from(tmp_path):
    io = ckstore.lightning.CheckpointIO(tmp_path / "store")
    io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    assert io.store.latest().step == 1
    io.save_checkpoint(checkpoint(1), tmp_path / "last.ckpt")
    assert len(io.store.log()) == 2
    io.teardown()
