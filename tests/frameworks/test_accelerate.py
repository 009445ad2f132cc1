"""accelerate: what its own checkpoints hold comes back exactly, and no crash leaves a run without a checkpoint."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckstore
from ckstore.errors import ChecksumError, LeafTypeError, NotFoundError, UsageError
from ckstore.format.records import with_changes
from ckstore.integrations.pointers import read_pointer, write_pointer

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import ProjectConfiguration  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def one_process():
    yield
    for state in (AcceleratorState, PartialState):
        state._reset_state(True) if state is AcceleratorState else state._reset_state()
    GradientState._reset_state()


class Counter:
    """An object that a user registers."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Training:
    """A small training run with everything that accelerate saves."""

    def __init__(self, folder, *, seed, limit=None, store=None, **options):
        accelerate.utils.set_seed(seed)
        self.project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=limit)
        self.accelerator = accelerate.Accelerator(cpu=True, project_config=self.project)
        ckstore.accelerate.attach(self.accelerator, store, **options)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        data = torch.utils.data.TensorDataset(torch.linspace(0, 1, 32 * 8).reshape(32, 8))
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        parts = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = parts
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def epoch(self):
        """Train one epoch; return its losses."""
        losses = []
        for (batch,) in self.loader:
            loss = self.model(batch).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counter.count += 1
            losses.append(loss.item())
        return losses

    def save(self):
        return self.accelerator.save_state()

    @property
    def door(self):
        return self.accelerator._ckstore

    def folders(self):
        return sorted(path.name for path in (self.door._checkpoints()).iterdir())

    def steps(self):
        return sorted(info.step for info in self.door.pointers.store.log())


def test_resumed_losses_are_equal(tmp_path):
    first = Training(tmp_path, seed=1)
    first.epoch()
    first.save()
    expected = first.epoch() + first.epoch()
    first.accelerator.end_training()
    second = Training(tmp_path, seed=2)
    second.accelerator.load_state()
    assert second.epoch() + second.epoch() == expected
    assert second.counter.count == 3 * 8
    second.accelerator.end_training()


def test_saves_after_a_resume_continue_the_numbers(tmp_path):
    first = Training(tmp_path, seed=1)
    first.save()
    first.save()
    first.accelerator.end_training()
    second = Training(tmp_path, seed=2)
    second.accelerator.load_state()
    second.save()
    assert second.folders() == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    second.accelerator.end_training()


@pytest.mark.parametrize("background", [True, False])
def test_limit_leaves_the_newest(tmp_path, background):
    run = Training(tmp_path, seed=1, limit=2, background=background)
    for _ in range(4):
        run.epoch()
        run.save()
    run.accelerator.end_training()
    assert run.folders() == ["checkpoint_2", "checkpoint_3"]
    assert run.steps() == [2, 3]
    run.door.pointers.close()


def test_older_folder_stays_until_the_new_checkpoint_is_durable(tmp_path, monkeypatch):
    run = Training(tmp_path, seed=1, limit=1)
    run.save()
    run.door.pointers.wait()
    monkeypatch.setattr(run.door.pointers, "poll", lambda: None)
    run.save()
    assert run.folders() == ["checkpoint_0", "checkpoint_1"]
    assert 0 in run.steps()
    monkeypatch.undo()
    run.accelerator.end_training()
    assert run.folders() == ["checkpoint_1"]


def test_save_that_never_completed_is_passed_over(tmp_path):
    first = Training(tmp_path, seed=1)
    first.epoch()
    first.save()
    expected = first.epoch()
    first.save()
    first.accelerator.end_training()
    checkpoints = tmp_path / "checkpoints"
    with ckstore.open(tmp_path / "ckstore") as store:
        store.delete(1)
        lost = with_changes(read_pointer(checkpoints / "checkpoint_1"), seq=None, after_seq=1)
    write_pointer(checkpoints / "checkpoint_1" / "ckstore.json", lost)
    (checkpoints / "checkpoint_2").mkdir()
    second = Training(tmp_path, seed=2)
    second.accelerator.load_state()
    assert second.epoch() == expected
    second.save()
    assert second.folders() == ["checkpoint_0", "checkpoint_1"]
    second.accelerator.end_training()


def test_folder_whose_checkpoint_is_gone_is_refused(tmp_path):
    run = Training(tmp_path, seed=1)
    run.save()
    run.save()
    run.door.pointers.wait()
    run.door.pointers.store.delete(0)
    with pytest.raises(NotFoundError, match="not in the store any more; the newest checkpoint is step 1"):
        run.accelerator.load_state(str(tmp_path / "checkpoints" / "checkpoint_0"))
    run.accelerator.end_training()


def test_damaged_pointer_is_named(tmp_path, caplog):
    run = Training(tmp_path, seed=1)
    folder = Path(run.save())
    run.door.pointers.wait()
    pointer = folder / "ckstore.json"
    pointer.write_bytes(pointer.read_bytes().replace(b'"step": 0', b'"step": 1'))
    with pytest.raises(ChecksumError, match=r"checkpoint_0/ckstore\.json\. Delete it"):
        run.accelerator.load_state(str(folder))
    with pytest.raises(NotFoundError, match="no folder has a checkpoint"):
        run.accelerator.load_state()
    assert re.search(r"checkpoint_0 is passed over: .*checkpoint_0/ckstore\.json\. Delete it", caplog.text)
    assert pointer.exists()
    run.accelerator.end_training()


def test_folder_of_accelerate_itself_is_loaded(tmp_path, monkeypatch):
    plain = Training(tmp_path, seed=1)
    expected = plain.epoch()
    kind = type(plain.accelerator).__mro__[2]
    kind.save_state(plain.accelerator)
    later = plain.epoch()
    plain.accelerator.end_training()
    assert (tmp_path / "checkpoints" / "checkpoint_0" / "model.safetensors").exists()
    second = Training(tmp_path, seed=2)
    second.accelerator.load_state()
    # accelerate does not save the order of data.
    second.loader.iteration = 1
    assert second.counter.count == len(expected)
    assert torch.isfinite(torch.tensor(second.epoch())).all()
    assert len(later) == len(expected)
    second.accelerator.end_training()


def test_hooks_keep_their_files_and_their_weights(tmp_path):
    run = Training(tmp_path, seed=1)

    def save_own(models, weights, output_dir):
        torch.save(weights.pop(), f"{output_dir}/own.bin")

    def load_own(models, input_dir):
        models.pop().load_state_dict(torch.load(f"{input_dir}/own.bin", weights_only=True))

    run.accelerator.register_save_state_pre_hook(save_own)
    run.accelerator.register_load_state_pre_hook(load_own)
    run.epoch()
    before = [value.clone() for value in run.model.state_dict().values()]
    folder = run.save()
    assert (folder / "own.bin").is_file()
    run.epoch()
    run.accelerator.load_state()
    assert all(torch.equal(one, two) for one, two in zip(before, run.model.state_dict().values(), strict=True))
    assert "model" not in run.door.pointers.store.restore()
    run.accelerator.end_training()


def test_random_states_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    run = Training(tmp_path, seed=1)
    run.save()

    def refuse(states):
        raise UsageError("the random states cannot be restored")

    monkeypatch.setattr("ckstore.integrations.accelerate.put_rng", refuse)
    with pytest.raises(UsageError, match="random states"):
        run.accelerator.load_state()
    run.accelerator.end_training()


def test_object_that_cannot_be_stored_is_named(tmp_path):
    run = Training(tmp_path, seed=1)
    run.counter.count = lambda: None
    with pytest.raises(LeafTypeError, match=r"custom\.0\.count"):
        run.save()
    run.counter.count = 0
    run.accelerator.end_training()


def test_attach_again_changes_nothing_and_elsewhere_is_refused(tmp_path):
    run = Training(tmp_path, seed=1)
    ckstore.accelerate.attach(run.accelerator)
    with pytest.raises(UsageError, match="attached to another store"):
        ckstore.accelerate.attach(run.accelerator, tmp_path / "other")
    with pytest.raises(UsageError, match="no place for the store"):
        ckstore.accelerate.attach(accelerate.Accelerator(cpu=True))


def test_store_elsewhere_and_a_named_folder(tmp_path):
    run = Training(tmp_path / "project", seed=1, store=tmp_path / "store", run="b")
    run.project.automatic_checkpoint_naming = False
    for _ in range(2):
        run.epoch()
        run.accelerator.save_state(str(tmp_path / "last"))
    expected = run.epoch()
    run.accelerator.load_state(str(tmp_path / "last"))
    assert run.epoch() == expected
    assert run.steps() == [1]
    run.accelerator.end_training()


def train_on_two_ranks(rank, folder, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    run = Training(folder, seed=1)
    run.epoch()
    torch.manual_seed(rank)
    run.save()
    expected = run.epoch()
    run.accelerator.load_state()
    assert run.epoch() == expected
    run.accelerator.end_training()


def test_two_ranks_get_their_own_random_states(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    torch.multiprocessing.spawn(train_on_two_ranks, (tmp_path, port), nprocs=2)
    with ckstore.open(tmp_path / "ckstore", create=False) as store:
        ranks = store.restore()["ranks"]
    assert len(ranks) == 2
    assert not torch.equal(ranks[0]["random"]["torch"], ranks[1]["random"]["torch"])
    # One process continues what two have saved.
    alone = Training(tmp_path, seed=3)
    alone.accelerator.load_state()
    alone.epoch()
    alone.accelerator.end_training()


def test_failed_save_leaves_the_last_good_checkpoint(tmp_path):
    run = Training(tmp_path, seed=1, limit=1)
    run.epoch()
    run.save()
    expected = run.epoch()
    run.counter.count = lambda: None
    with pytest.raises(LeafTypeError):
        run.save()
    run.door.finish()
    assert run.folders() == ["checkpoint_0", "checkpoint_1"]
    second = Training(tmp_path, seed=2, limit=1)
    second.accelerator.load_state()
    assert second.epoch() == expected
    second.accelerator.end_training()


def test_folders_of_another_run_are_passed_over(tmp_path, caplog):
    first = Training(tmp_path, seed=1)
    first.save()
    (first.door._checkpoints() / "checkpoint_0" / "mine.txt").write_text("kept")
    first.accelerator.end_training()
    other = Training(tmp_path, seed=1, run="other")
    with pytest.raises(NotFoundError, match="no folder has a checkpoint"):
        other.accelerator.load_state()
    assert "the pointer belongs to run main; this is run other" in caplog.text
    assert other.folders() == ["checkpoint_0"]
    (tmp_path / "checkpoints" / "checkpoint_best_7").mkdir()
    again = Training(tmp_path, seed=2)
    again.accelerator.load_state()
    assert again.folders() == ["checkpoint_0", "checkpoint_best_7"]
    again.accelerator.end_training()
    other.accelerator.end_training()


def test_two_named_folders_in_flight_keep_their_own(tmp_path):
    run = Training(tmp_path, seed=1)
    run.project.automatic_checkpoint_naming = False
    run.epoch()
    run.accelerator.save_state(str(tmp_path / "one"))
    one = read_pointer(tmp_path / "one")
    run.epoch()
    run.accelerator.save_state(str(tmp_path / "two"))
    two = read_pointer(tmp_path / "two")
    assert one.step != two.step
    run.accelerator.end_training()


def test_other_number_of_objects_is_refused(tmp_path):
    run = Training(tmp_path, seed=1)
    run.save()
    run.accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="the checkpoint has 1 models, and the accelerator has 2"):
        run.accelerator.load_state()
    run.accelerator.end_training()


def test_end_of_the_process_saves_the_end(tmp_path):
    script = f"""
import sys
from pathlib import Path
sys.path[:0] = {[str(path) for path in (Path(__file__).parent, Path(__file__).parents[1])]!r}
from test_accelerate import Training
def main():
    run = Training({str(tmp_path)!r}, seed=1, limit=1)
    run.save()
    run.epoch()
    run.save()
main()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]
    assert read_pointer(tmp_path / "checkpoints" / "checkpoint_1").seq is not None
