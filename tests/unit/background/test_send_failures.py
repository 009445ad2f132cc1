"""Protects waiting callers when a message, log record or process fails: each gets an error, and none waits forever.

Tests with processes as savers are in ``tests/integration/background``.
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
    """Return whether each call raises UsageError, as it must in a forked child."""
    refused = 0
    for ask in asked:
        with pytest.raises(UsageError, match="forked child"):
            ask(timeout=60)
        refused += 1
    return refused == len(asked)


def test_result_in_forked_child_is_refused(fake_saver_store, savers):
    fake_saver_store.prewarm(state(1))
    saver = slow(savers)
    pending = fake_saver_store.commit_async(state(1), 1)
    check = fork(lambda: refuses(pending.result))
    check()
    saver.finish(1)
    assert pending.result().step == 1


def test_forked_child_does_not_wait_for_copies(fake_saver_store, savers, monkeypatch):
    DelayedCopy(monkeypatch)
    guarded = state(1)
    owner = attach_owner(fake_saver_store, guarded["w"])
    pending = fake_saver_store.commit_async(guarded, 1)
    assert not pending.is_staged
    check = fork(lambda: refuses(pending.result, pending.wait_staged))
    check()
    assert pending.result().step == 1
    del owner


# Failing logging


def test_saver_death_is_reported_without_logging(fake_saver_store, savers, broken_logging):
    fake_saver_store.prewarm(state(1))
    saver = slow(savers)
    pending = fake_saver_store.commit_async(state(1), 1)
    with broken_logging():
        saver.die()
        with pytest.raises(SaverError, match="the saver was killed"):
            pending.result(60)
        assert fake_saver_store.commit_async(state(2), 2).result(60).step == 2


def test_failing_callback_without_logging_harms_no_commit(fake_saver_store, savers, broken_logging):
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


def test_memory_error_is_reported_without_logging(fake_saver_store, savers, monkeypatch, broken_logging):
    def short(*given):
        raise CapacityError("no memory to copy to")

    fake_saver_store.prewarm(state(1))
    with broken_logging(), monkeypatch.context() as patch:
        patch.setattr("ckstore.background.staging.HostCopy.note", short)
        with pytest.raises(CapacityError):
            fake_saver_store.commit_async(state(1), 1)
    assert fake_saver_store.commit_async(state(2), 2).result(60).step == 2


# No memory to send a message


class FailingSend:
    """Make the first sends of a message kind fail for want of memory."""

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


def test_saver_resends_after_a_memory_error(served, monkeypatch):
    short = FailingSend(monkeypatch, (protocol.Done, protocol.SlotFree), count=4)
    assert served.commit(state(1), 1).seq == 0
    assert short.tries == 6


def test_log_record_waits_for_memory_within_its_limit(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    watch = ProcessWatch(os.getpid(), process_started(os.getpid()) or "")
    channel = protocol.Channel(theirs, watch)
    try:
        FailingSend(monkeypatch, protocol.Log)
        assert channel.send(protocol.log_of(30, "first"))
        assert protocol.receive(ours, protocol.TO_TRAINER) == protocol.Log(30, "first")
        FailingSend(monkeypatch, protocol.Log)
        assert not channel.send(protocol.log_of(30, "second"), wait_ms=20)
    finally:
        watch.close()
        ours.close()
        theirs.close()
