"""Protects journals of states on a device: the device computes checksums, and the state is not copied to the host.

There is no device here: torch's host memory is taken for one, so everything runs except CUDA's own order of events.
"""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import ReplayError
from ckstore.format.journal import read_body
from ckstore.format.points import decode_point
from ckstore.state import torch_adapter
from ckstore.store.points import find_point
from support.journaled_training import JournaledTraining, bits


@pytest.fixture
def device(monkeypatch):
    """Take all memory of torch for that of a device; return the numbers of bytes that were copied to the host."""
    copied = []
    read = torch_adapter.DeviceBytes.__call__
    monkeypatch.setattr(torch_adapter, "device_of", lambda tensor: tensor.device)
    monkeypatch.setattr(
        torch_adapter.DeviceBytes, "__call__", lambda self, lo, hi: (copied.append(hi - lo), read(self, lo, hi))[1]
    )
    return copied


@pytest.fixture
def trained(device, tmp_path):
    """A store of a keyframe and points, written on the device; and the training."""
    training = JournaledTraining()
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        training.run(store, [1])
        device.clear()
        training.run(store, [2, 3, 4])
        yield training, store


def stored(store, step):
    backend, record = repository_of(store).backend, find_point(repository_of(store), step).record
    with closing(backend.open_read(record.segment.path)) as file:
        return decode_point(read_body(file.read_at, record.placed))


def test_the_device_computes_what_the_steps_make(trained, device):
    training, store = trained
    kinds = {(storage.source, storage.is_word_sum) for storage in stored(store, 3).storages}
    assert kinds == {("steps", True)}
    training.train(5)
    device.clear()
    store.commit_async(training.state, 5).result()
    assert sum(device) == sum(each.nbytes for each in training.model.parameters()), "only gradients leave the device"


def test_points_are_restored_on_the_device(trained, tmp_path):
    training, store = trained
    for step in (2, 3, 4):
        assert bits(store.restore(step)) == training.expected[step]
    again = JournaledTraining()

    store.close()
    with ckstore.open(tmp_path / "store") as other:
        other.journal(again.optimizer)
        other.restore(into=again.state)
    assert bits(again.state) == training.expected[4]


def test_points_are_restored_without_the_device(trained, monkeypatch):
    training, store = trained
    monkeypatch.undo()
    for step in (2, 3, 4):
        assert bits(store.restore(step)) == training.expected[step]


@pytest.mark.parametrize("is_there", [True, False])
def test_other_bits_are_noticed(trained, monkeypatch, is_there):
    _, store = trained
    if not is_there:
        monkeypatch.undo()
    step = torch.optim.AdamW.step

    def disturbed(self, *args):
        step(self, *args)
        self.param_groups[0]["params"][0].data.view(torch.int32)[0, 0] ^= 1

    monkeypatch.setattr(torch.optim.AdamW, "step", disturbed)
    with pytest.raises(ReplayError, match=r"model\.weight has other bytes"):
        store.restore(4)
