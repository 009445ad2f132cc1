"""A saver that a signal has asked to end, as schedulers ask every process of a job, costs its trainer no commit.

It asks its trainer, who may be about to begin something, and ends when that lets it go, or does not answer.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import ckstore
from ckstore.config import MIB
from ckstore.errors import SaverError
from ckstore.saver import client, messages
from ckstore.saver import server as saver_server
from ckstore.saver.process import death_of
from ckstore.saver.tickets import Callbacks, Tickets
from support.saver_desk import SECONDS_MAX, noise, stop, until

PLAIN = {"compression": "none"}


@pytest.mark.parametrize("on_busy", ["wait", "replace"])
def test_a_commit_that_comes_while_the_saver_writes_an_earlier_one_is_durable(folder, on_busy):
    with ckstore.open(folder, policy=ckstore.Policy(on_busy=on_busy, **PLAIN)) as store:
        for number in range(4):
            first = store.commit_async(noise(number, 48 * MIB), 10 * number + 1)
            store._handover._saver._process.send_signal(signal.SIGTERM)
            second = store.commit_async(noise(number + 10), 10 * number + 2)
            assert [first.result(SECONDS_MAX).step, second.result(SECONDS_MAX).step] == [
                10 * number + 1,
                10 * number + 2,
            ]
    with ckstore.open(folder) as store:
        assert store.steps() == [step for number in range(4) for step in (10 * number + 1, 10 * number + 2)]
        assert np.array_equal(store.restore(32)["w0"], noise(13)["w0"])


def test_a_commit_right_after_the_signal_is_durable(folder):
    left = []
    with ckstore.open(folder, policy=ckstore.Policy(**PLAIN)) as store:
        for step in range(1, 9):
            store.commit_async({"step": np.full(100, step)}, step).result(SECONDS_MAX)
            left.append(store._handover._saver.pid)
            # One that was asked before may have ended by itself.
            store._handover._saver._process.send_signal(signal.SIGTERM)
            time.sleep(0.003 * (step % 4))
        store.commit_async({"step": np.full(100, 9)}, 9).result(SECONDS_MAX)
        assert store.steps() == list(range(1, 10))
        assert len(set(left)) > 1, "those that were asked have ended"


def test_a_state_that_is_just_being_prepared_goes_to_another_saver(folder, monkeypatch, caplog):
    with ckstore.open(folder, policy=ckstore.Policy(**PLAIN)) as store:
        store.commit_async(noise(1), 1).result(SECONDS_MAX)
        handover, prepare = store._handover, store._handover._prepare
        asked = []

        def prepare_slowly(order, stowage, starts, saver):
            if not asked:
                asked.append(saver)
                os.kill(saver.pid, signal.SIGTERM)
                until(lambda: saver._tickets.is_closed, "the word of the saver")
            return prepare(order, stowage, starts, saver)

        monkeypatch.setattr(handover, "_prepare", prepare_slowly)
        with caplog.at_level(logging.WARNING, "ckstore"):
            assert store.commit_async(noise(2), 2).result(SECONDS_MAX).step == 2
        assert handover._saver is not asked[0]
        assert f"the saver (pid {asked[0].pid}) was told by a signal to end; another saver is started" in caplog.text
        assert not [record for record in caplog.records if record.levelno > logging.WARNING]
        assert store.steps() == [1, 2]


def test_a_saver_whose_trainer_stands_still_ends_after_a_while(child):
    trainer = child("desk.commit(noise(1), 1)\nsay('ready')")
    assert trainer.hear() == "ready"
    stop(trainer.pid)
    os.kill(trainer.saver_pid, signal.SIGTERM)
    began = time.monotonic()
    until(lambda: not trainer.is_saver_alive, "the end of the saver")
    assert time.monotonic() - began > saver_server.LEAVE_SECONDS / 2


def test_a_saver_that_is_busy_does_not_end_before_its_time(server, monkeypatch):
    monkeypatch.setattr(saver_server, "LEAVE_SECONDS", 0.3)
    server._ask_to_end()
    server._leave_in_time()
    assert messages.receive(server.trainers_end, messages.TO_TRAINER) == messages.Leaving()
    server._is_working = True
    for _ in range(3):
        time.sleep(0.35)
        server._leave_in_time()
        assert not server._is_ending
    server._is_working = False
    time.sleep(0.35)
    server._leave_in_time()
    assert server._is_ending
    with pytest.raises(BlockingIOError):
        messages.receive(server.trainers_end, messages.TO_TRAINER)


def test_what_is_begun_before_the_trainer_lets_a_saver_go_is_not_too_late(server, monkeypatch):
    held = []
    monkeypatch.setattr(server, "_begin", held.append)
    server._has_heard = True
    server._ask_to_end()
    server._leave_in_time()
    server._take(messages.Begin(1, 0, 0, 1, None, 0))
    assert [each.is_late for each in held] == [False]


@pytest.mark.parametrize("is_parting", [True, False])
def test_only_a_handle_that_was_dropped_leaves_its_run_to_others(server, monkeypatch, is_parting):
    disowned = []
    monkeypatch.setattr(server._committer, "disown", lambda: disowned.append(1))
    # The last commit was told of, and its slot is being given back.
    server._is_working = True
    server._take(messages.Quit(is_parting=is_parting))
    assert server._is_ending
    assert bool(disowned) != is_parting


def test_who_is_interrupted_while_he_speaks_may_wait_for_what_the_saver_says(folder):
    with ckstore.open(folder, policy=ckstore.Policy(**PLAIN)) as store:
        pending = store.commit_async(noise(1), 1)
        saver = store._handover._saver
        with saver._speaking:
            saver._process.send_signal(signal.SIGTERM)
            assert pending.result(SECONDS_MAX).step == 1
            until(lambda: saver._tickets.is_closed, "the word of the saver")
        assert store.commit_async(noise(2), 2).result(SECONDS_MAX).step == 2


def nothing(*_):
    """Do nothing."""


def test_tickets_are_closed_only_when_each_was_told_how_it_ended():
    tickets = Tickets()
    callbacks = Callbacks(nothing, nothing, nothing)
    assert tickets.add(1, callbacks)
    assert not tickets.close()
    assert not tickets.is_closed
    tickets.take(messages.failed_of(1, SaverError("it failed")))
    # Its slot is in use all the same.
    assert tickets.close()
    assert tickets.is_closed
    assert not tickets.add(2, callbacks)
    tickets.take(messages.SlotFree(1))
    assert tickets.close()


def test_a_trainer_lets_a_saver_go_once_and_as_soon_as_all_was_told_of():
    said = []
    saver = SimpleNamespace(_is_leaving=False, _tickets=Tickets(), _speaking=threading.RLock(), _say=said.append)
    take = partial(client.Saver._take, saver)
    saver._tickets.add(1, Callbacks(nothing, nothing, nothing))
    take(messages.Leaving())
    assert said == []
    take(messages.failed_of(1, SaverError("it failed")))
    # Its handle lives on: nobody is to wait for the run.
    assert said == [messages.Quit(is_parting=True)]
    take(messages.SlotFree(1))
    take(messages.Leaving())
    assert len(said) == 1


def test_what_was_said_by_one_who_died_without_reading_all_is_heard():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        messages.send(ours, messages.Staged(1))
        for said in (messages.Began(1), messages.SlotFree(1)):
            messages.send(theirs, said)
        theirs.close()
        heard = [messages.receive(ours, messages.TO_TRAINER) for _ in range(3)]
    assert heard == [messages.Began(1), messages.SlotFree(1), None]


def test_a_saver_takes_what_was_said_by_a_trainer_that_died_without_reading_all(server, monkeypatch):
    taken = []
    monkeypatch.setattr(server, "_take", taken.append)
    server.channel.tell(messages.Leaving())
    for said in (messages.Forget(), messages.Staged(1)):
        messages.send(server.trainers_end, said)
    server.trainers_end.close()
    assert not server._hear()
    assert taken == [messages.Forget(), messages.Staged(1)]


def test_a_trainer_takes_what_was_said_by_a_saver_that_died_without_reading_all(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    taken = []
    saver = SimpleNamespace(_channel=ours, _take=taken.append)
    with ours:
        messages.send(ours, messages.Hurry())
        for said in (messages.Began(1), messages.SlotFree(1)):
            messages.send(theirs, said)
        theirs.close()
        assert not client.Saver._hear(saver)
    assert taken == [messages.Began(1), messages.SlotFree(1)]


def test_a_death_says_whether_a_signal_has_asked_for_it():
    error = death_of(12, 0, is_busy=False, was_asked=True)
    assert str(error).startswith("the saver (pid 12) was told by a signal to end. Commit again")
    assert "ended with code 0 before the commit" in str(death_of(12, 0, is_busy=True, was_asked=False))
    assert "was killed by SIGKILL" in str(death_of(12, -9, is_busy=False, was_asked=True))
