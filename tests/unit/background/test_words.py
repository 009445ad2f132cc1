"""Protects what trainer and saver say to each other: it arrives, or whoever waits is told; nobody waits for ever.

With processes in the place of savers: ``tests/integration/background/test_words.py``.
"""

from __future__ import annotations

import errno
import os
import socket

import pytest

from ckstore.background import protocol
from ckstore.background.protocol import ProcessWatch
from ckstore.errors import CapacityError, SaverError, UsageError
from ckstore.processes import process_started
from support.fake_saver import DelayedCopy, slow, state
from support.forked import fork
from support.guarded_memory import attach_owner


def refuses(*asked):
    """Return whether each raises UsageError, as it must in a forked child."""
    told = 0
    for ask in asked:
        with pytest.raises(UsageError, match="forked child"):
            ask(timeout=60)
        told += 1
    return told == len(asked)


def test_forked_child_that_asks_for_a_pending_result_is_told_that_it_cannot_have_it(fake_saver_store, savers):
    fake_saver_store.prewarm(state(1))
    saver = slow(savers)
    pending = fake_saver_store.commit_async(state(1), 1)
    check = fork(lambda: refuses(pending.result))
    check()
    saver.finish(1)
    assert pending.result().step == 1


def test_forked_child_does_not_wait_for_copies_that_its_parent_makes(fake_saver_store, savers, monkeypatch):
    DelayedCopy(monkeypatch)
    guarded = state(1)
    owner = attach_owner(fake_saver_store, guarded["w"])
    pending = fake_saver_store.commit_async(guarded, 1)
    assert not pending.is_staged
    check = fork(lambda: refuses(pending.result, pending.wait_staged))
    check()
    assert pending.result().step == 1
    del owner


# Where nothing can be logged


def test_death_of_a_saver_is_told_although_nothing_can_be_logged(fake_saver_store, savers, broken_logging):
    fake_saver_store.prewarm(state(1))
    saver = slow(savers)
    pending = fake_saver_store.commit_async(state(1), 1)
    with broken_logging():
        saver.die()
        with pytest.raises(SaverError, match="the saver was killed"):
            pending.result(60)
        assert fake_saver_store.commit_async(state(2), 2).result(60).step == 2


def test_callback_that_fails_while_nothing_can_be_logged_harms_no_commit(fake_saver_store, savers, broken_logging):
    def fail(pending):
        raise RuntimeError("of the user's")

    fake_saver_store.prewarm(state(1))
    saver = slow(savers)
    with broken_logging():
        for step in (1, 2):
            pending = fake_saver_store.commit_async(state(step), step)
            pending.when_done(fail)
            saver.finish(step)
            assert pending.result(60).step == step


def test_want_of_memory_is_told_although_nothing_can_be_logged(fake_saver_store, savers, monkeypatch, broken_logging):
    def short(*given):
        raise CapacityError("no memory to copy to")

    fake_saver_store.prewarm(state(1))
    with broken_logging(), monkeypatch.context() as patch:
        patch.setattr("ckstore.background.staging.HostCopy.note", short)
        with pytest.raises(CapacityError):
            fake_saver_store.commit_async(state(1), 1)
    assert fake_saver_store.commit_async(state(2), 2).result(60).step == 2


# Where the system has no memory for a message


class Short:
    """Has no memory for the first messages of a kind."""

    def __init__(self, monkeypatch, kind, count=3):
        self.kind, self.left, self.tries = kind, count, 0
        self._send = protocol.send
        monkeypatch.setattr(protocol, "send", self._try)

    def _try(self, end, message):
        if isinstance(message, self.kind):
            self.tries += 1
            self.left -= 1
            if self.left >= 0:
                raise OSError(errno.ENOBUFS, "no buffer space")
        self._send(end, message)


def test_saver_says_again_what_there_was_no_memory_for(served, monkeypatch):
    short = Short(monkeypatch, (protocol.Done, protocol.SlotFree), count=4)
    assert served.commit(state(1), 1).seq == 0
    assert short.tries == 6


def test_log_record_waits_no_longer_than_it_may_for_memory(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    watch = ProcessWatch(os.getpid(), process_started(os.getpid()) or "")
    told = protocol.Channel(theirs, watch)
    try:
        Short(monkeypatch, protocol.Log)
        assert told.send(protocol.log_of(30, "first"))
        assert protocol.receive(ours, protocol.TO_TRAINER) == protocol.Log(30, "first")
        Short(monkeypatch, protocol.Log)
        assert not told.send(protocol.log_of(30, "second"), wait_ms=20)
    finally:
        watch.close()
        ours.close()
        theirs.close()
