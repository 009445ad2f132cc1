"""Protects runs against the journal saver of a dead trainer: no point appears after another process has looked."""

from __future__ import annotations

import gc
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import ckstore
from ckstore.background import protocol
from ckstore.errors import ConflictError, SaverError
from ckstore.io.local import LocalBackend
from ckstore.journal.drafting import draft_point
from ckstore.journal.encoding import ArrayPlace
from ckstore.state.capture import capture
from ckstore.store.journals import WRITER_SECONDS
from support.journals import journals_on, make_store
from support.saver_harness import until
from support.served_saver import ServedSaver


@pytest.fixture
def manifests(tmp_path):
    backend = LocalBackend(tmp_path / "store", engine="pwrite")
    yield make_store(backend)
    backend.close()


@pytest.fixture
def journals(manifests):
    return journals_on(manifests)


@pytest.fixture
def serve(tmp_path, manifests):
    savers = []

    def start(**options):
        savers.append(ServedSaver(tmp_path / "store", role="journal", **options))
        return savers[-1]

    yield start
    for each in savers:
        each.close()


def begin(saver, step, **changes):
    """Begin a point of which nothing is staged but its head."""
    captured = capture({"w": np.full(100, step)})
    drafted = draft_point(captured, (), [], before={}, metrics={}, has_facts=True, factors=[], thread_count=1)
    arrays = [ArrayPlace(number, 0, source.nbytes) for number, source in enumerate(drafted.sources)]
    draft = drafted.draft._replace(arrays=arrays, **{"begins_chain": step == 1, **changes})
    return saver.begin(list(drafted.sources), step, share=draft.encode())


def steps(journals):
    journal = journals.read()
    return [record.head.step for name in journal.segments for record in journal.records(name).records]


def is_locked(journals):
    try:
        journals.wait_for_writer(seconds=0)
    except ConflictError:
        return True
    return False


def test_points_are_promised_once_the_segment_is_locked(serve, journals):
    saver = serve()
    first = begin(saver, 1)
    saver.settle()
    assert "Began" not in first.events
    first.stage().finish().wait()
    assert "Began" in first.events
    assert is_locked(journals)
    second = begin(saver, 2)
    second.hear(protocol.Began)
    second.stage().finish().wait()
    assert steps(journals) == [1, 2]


def test_point_of_a_dead_trainer_without_a_segment_is_dropped(serve, journals):
    saver = serve(has_trainer=True, is_served=False)
    begin(saver, 1).stage().finish()
    saver.kill_trainer()
    saver.serve()
    saver.code()
    assert journals.names() == [], "a process that looked before would have begun its own chain"


def test_trainer_that_dies_while_the_segment_is_created_is_noticed(serve, journals, monkeypatch):
    saver = serve(has_trainer=True, is_served=False)
    create = type(journals).open_writer

    def create_late(*args, **options):
        saver.kill_trainer()
        return create(*args, **options)

    monkeypatch.setattr(type(journals), "open_writer", create_late)
    begin(saver, 1).stage().finish()
    saver.serve()
    saver.code()
    assert journals.names() == []


def test_staged_point_of_a_dead_trainer_is_appended_to_a_locked_segment(serve, journals):
    saver = serve(has_trainer=True)
    begin(saver, 1).stage().finish().wait()
    second = begin(saver, 2)
    second.hear(protocol.Began)
    second.stage().finish()
    saver.kill_trainer()
    assert saver.code() == 0
    assert steps(journals) == [1, 2]
    assert not is_locked(journals)


def test_point_that_begins_a_segment_is_appended_for_a_dead_trainer_because_the_last_one_is_locked(serve, journals):
    saver = serve(has_trainer=True)
    begin(saver, 1).stage().finish().wait()
    second = begin(saver, 2, begins_segment=True)
    second.hear(protocol.Began)
    second.stage().finish()
    saver.kill_trainer()
    assert saver.code() == 0
    assert steps(journals) == [1, 2]
    assert len(journals.names()) == 2


def test_after_a_release_points_are_promised_by_the_next_segment(serve, journals):
    saver = serve(has_trainer=True)
    begin(saver, 1).stage().finish().wait()
    saver.release_lease()
    assert not is_locked(journals)
    second = begin(saver, 2)
    saver.settle()
    assert "Began" not in second.events
    saver.kill_trainer()
    with pytest.raises(SaverError, match="given up"):
        second.stage().finish().result()
    saver.code()
    assert steps(journals) == [1]
    assert len(journals.names()) == 1


def test_waiting_ends_only_when_the_newest_segment_is_unlocked(journals, monkeypatch):
    first = journals.open_writer(previous=None)
    backend, opened = journals._backend, []
    is_locked_now = backend.is_locked

    def exchange(name):
        if not opened:
            # The saver goes on in a new segment between the listing and this check.
            opened.append(journals.open_writer(previous=None))
            first.close()
        return is_locked_now(name)

    monkeypatch.setattr(backend, "is_locked", exchange)
    with pytest.raises(ConflictError, match="still writes the journal"):
        journals.wait_for_writer(seconds=0)
    opened[0].close()
    journals.wait_for_writer(seconds=0)


class Loop:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self):
        self.model(torch.ones(2, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("last", [1, 3])
def test_a_second_handle_sees_the_points_of_a_dropped_one(tmp_path, last):
    loop = Loop()
    store = ckstore.open(tmp_path / "store")
    store.journal(loop.optimizer)
    for step in range(1, last + 1):
        loop.train()
        pending = store.commit_async(loop.state, step)
    expected = [each.clone() for each in loop.model.parameters()]
    pending.wait_staged()
    del store, pending
    gc.collect()
    other = Loop()
    with ckstore.open(tmp_path / "store") as store:
        store.journal(other.optimizer)
        store.restore(into=other.state)
    assert all(torch.equal(a, b) for a, b in zip(expected, other.model.parameters(), strict=True))


def test_a_journal_begins_after_that_of_another_process_has_ended(tmp_path, journals, monkeypatch):
    writer = journals.open_writer(previous=None)
    monkeypatch.setattr("ckstore.background.journal.WRITER_SECONDS", 0)
    loop = Loop()
    with ckstore.open(tmp_path / "store") as store:
        store.journal(loop.optimizer)
        loop.train()
        with pytest.raises(ConflictError, match="still writes the journal"):
            store.commit_async(loop.state, 1)
        writer.close()
        until(lambda: not is_locked(journals), "the lock to be free")
        store.commit_async(loop.state, 1)
        store.wait()
        names = journals.names()
    assert names[-1].token != writer.name.token


READER = """
import ckstore, sys
with ckstore.open(sys.argv[1], create=False) as store:
    print(store.restore()["step"])
"""


def test_another_process_reads_the_journal_of_a_live_trainer_without_waiting(tmp_path, monkeypatch):
    loop = Loop()
    with ckstore.open(tmp_path / "store") as store:
        store.journal(loop.optimizer)
        for step in (1, 2):
            loop.train()
            store.commit_async({**loop.state, "step": step}, step).result()
        begun = time.monotonic()
        found = subprocess.run(
            [sys.executable, "-c", READER, str(tmp_path / "store")], capture_output=True, text=True, check=True
        )
    assert found.stdout == "2\n"
    assert time.monotonic() - begun < WRITER_SECONDS / 2
