"""The doors with a store in a bucket: saves are durable when they return, and another machine resumes from them."""

from __future__ import annotations

import shutil

import pytest
import torch

import ckstore
from ckstore.integrations.pointers import read_pointer
from support.s3_server import s3_server_in_environment
from support.small_trainers import losses_of, make_trainer


@pytest.fixture(scope="module")
def server():
    with s3_server_in_environment() as running:
        yield running


@pytest.fixture
def address(server):
    return server.new_address()


def steps_in(address):
    with ckstore.open(address, create=False) as store:
        return sorted(info.step for info in store.log())


def test_trainer_resumes_on_another_machine(transformers, address, tmp_path):
    first = make_trainer("gpt2", tmp_path / "one", max_steps=4, save_total_limit=1)
    ckstore.transformers.attach(first, address)
    first.train()
    assert sorted(path.name for path in (tmp_path / "one").glob("checkpoint-*")) == ["checkpoint-4"]
    assert steps_in(address) == [4]
    shutil.rmtree(tmp_path / "one")
    second = make_trainer("gpt2", tmp_path / "two", max_steps=6, save_total_limit=1)
    ckstore.transformers.attach(second, address)
    second.train(resume_from_checkpoint=True)
    assert losses_of(second).items() >= losses_of(first).items()
    assert steps_in(address) == [6]


def test_lightning_loads_what_it_saved(address, tmp_path):
    pytest.importorskip("lightning", reason="lightning is not installed")
    io = ckstore.lightning.CheckpointIO(address)
    for step in (1, 2):
        io.save_checkpoint(
            {"global_step": step, "state_dict": {"w": torch.full((4,), float(step))}}, tmp_path / "a.ckpt"
        )
        assert steps_in(address) == [step]
    assert io.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]["w"].tolist() == [2.0] * 4
    assert read_pointer(tmp_path / "a.ckpt").store == address
    io.remove_checkpoint(tmp_path / "a.ckpt")
    assert steps_in(address) == []
    io.teardown()


def test_accelerate_loads_what_it_saved(address, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    project = accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = accelerate.Accelerator(cpu=True, project_config=project)
    ckstore.accelerate.attach(accelerator, address)
    model = accelerator.prepare(torch.nn.Linear(3, 2))
    for _ in range(2):
        accelerator.save_state()
    assert steps_in(address) == [1]
    saved = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state()
    assert torch.equal(model.weight, saved)
    accelerator.end_training()
