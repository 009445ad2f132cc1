"""Protects journals from forked children, such as the workers of a data loader: the parent's points do not change."""

from __future__ import annotations

import pytest
import torch

import ckstore
from ckstore.background import journal
from ckstore.errors import ConflictError
from support.forked import fork
from support.journaled_training import JournaledTraining, bits


def test_workers_of_a_data_loader_do_not_disturb_the_journal(tmp_path):
    training = JournaledTraining()
    data = torch.utils.data.TensorDataset(torch.randn(12, 5))
    with ckstore.open(tmp_path / "store") as store:
        store.journal(training.optimizer)
        training.run(store, [1])
        loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
        for step, _ in enumerate(loader, 2):
            training.run(store, [step])
        training.run(store, [5])
    with ckstore.open(tmp_path / "store", create=False) as store:
        assert [info.step for info in store.log()] == [1]
        for step, expected in training.expected.items():
            assert bits(store.restore(step)) == expected


@pytest.mark.parametrize("verb", ["step", "close", "garbage", "commit_async"])
def test_a_forked_child_leaves_the_journal_to_its_parent(tmp_path, verb):
    training = JournaledTraining()
    store = ckstore.open(tmp_path / "store")
    store.journal(training.optimizer)
    training.run(store, [1, 2])
    training.train(3)
    pending = store.commit_async(training.state, 3)

    def act():
        nonlocal store
        for step in range(4, 12):
            training.train(step)
        if verb == "close":
            store.close()
        elif verb == "garbage":
            store = None
        elif verb == "commit_async":
            journal.WRITER_SECONDS = 0.1
            with pytest.raises(ConflictError, match="another process still writes the journal"):
                store.commit_async(training.state, 4)

    check = fork(act)
    check()
    pending.result()
    training.expected[3] = bits(training.state)
    training.run(store, [4])
    assert [info.step for info in store.log()] == [1]
    for step, expected in training.expected.items():
        assert bits(store.restore(step)) == expected
    store.close()
