"""Protects what trainer and saver say to each other: it arrives, or whoever waits is told; nobody waits for ever."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket

import pytest

import ckstore
from ckstore.errors import CapacityError, SaverError, UsageError
from ckstore.saver import channel, messages
from ckstore.saver.process import Watch
from ckstore.store.processes import process_started
from support.fake_saver import HeldCrew, OwnerOfAll, state
from support.saver_desk import fork, noise, stop


def test_a_forked_child_that_asks_for_a_pending_result_is_told_that_it_cannot_have_it(address):
    with ckstore.open(address) as store:
        store.prewarm(noise(1))
        stop(store._handover.saver_pid)
        pending = store.commit_async(noise(1), 1)

        def child():
            try:
                pending.result()
            except UsageError as error:
                return 7 if "forked child" in str(error) else 1

        pid, end = fork(child)
        assert end() == 7, pid
        os.kill(store._handover.saver_pid, signal.SIGCONT)
        assert pending.result().step == 1


def test_a_forked_child_does_not_wait_for_copies_that_its_parent_makes(handing_store, savers, monkeypatch):
    HeldCrew(monkeypatch)
    handing_store._guarded = OwnerOfAll()
    pending = handing_store.commit_async(state(1), 1)
    assert not pending.is_staged

    def child():
        told = 0
        for ask in (pending.result, pending.wait_staged):
            try:
                ask(timeout=60)
            except UsageError:
                told += 1
        return 7 if told == 2 else 1

    _, end = fork(child)
    assert end() == 7
    assert pending.result().step == 1


@pytest.fixture
def broken_logging():
    """A filter of the user's that raises; Python lets that through to whoever logs."""

    def broken(record):
        raise ValueError("no such field")

    logger = logging.getLogger("ckstore")

    @contextlib.contextmanager
    def breaking():
        logger.addFilter(broken)
        try:
            yield
        finally:
            logger.removeFilter(broken)

    return breaking


def test_a_log_filter_that_raises_ends_no_commit(address, broken_logging):
    with ckstore.open(address) as store:
        store.prewarm(noise(1))
        with broken_logging():
            store._handover._saver._take(messages.log_of(logging.ERROR, "something"))
        assert store.commit_async(noise(1), 1).result().step == 1


def test_a_saver_that_dies_is_told_of_although_nothing_can_be_logged(address, broken_logging):
    with ckstore.open(address) as store:
        store.prewarm(noise(1))
        pid = store._handover.saver_pid
        with broken_logging():
            stop(pid)
            pending = store.commit_async(noise(1), 1)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(SaverError, match="killed by SIGKILL"):
                pending.result(60)
            assert store.commit_async(noise(2), 2).result(60).step == 2


def test_a_callback_that_fails_while_nothing_can_be_logged_kills_no_saver(address, broken_logging):
    def fail(pending):
        raise RuntimeError("of the user's")

    with ckstore.open(address) as store:
        store.prewarm(noise(1))
        pid = store._handover.saver_pid
        with broken_logging():
            for step in range(2):
                pending = store.commit_async(noise(step), step)
                pending.when_done(fail)
                assert pending.result(60).step == step
        assert store._handover.saver_pid == pid


def test_want_of_memory_is_told_although_nothing_can_be_logged(handing_store, savers, monkeypatch, broken_logging):
    def short(*given):
        raise CapacityError("no memory to copy to")

    handing_store.prewarm(state(1))
    with broken_logging(), monkeypatch.context() as patch:
        patch.setattr("ckstore.staging.state.HostCopy.note", short)
        with pytest.raises(CapacityError):
            handing_store.commit_async(state(1), 1)
    assert handing_store.commit_async(state(2), 2).result(60).step == 2


def test_a_saver_is_told_to_end_as_soon_as_there_is_memory_to_say_so(address, monkeypatch):
    store = ckstore.open(address)
    store.prewarm(noise(1))
    pid, send, refused = store._handover.saver_pid, messages.send, []

    def short(end, message):
        if isinstance(message, messages.Quit) and len(refused) < 3:
            refused.append(message)
            raise OSError(errno.ENOBUFS, "no buffer space")
        send(end, message)

    monkeypatch.setattr(messages, "send", short)
    store.close()
    assert (len(refused), process_started(pid)) == (3, None)


def test_who_polls_does_not_fill_the_ears_of_a_saver_that_does_not_read(address, monkeypatch):
    """A saver that is stopped reads nothing; what it must hear later, such as to end, must find room."""
    with ckstore.open(address) as store:
        store.prewarm(noise(1))
        pid = store._handover.saver_pid
        stop(pid)
        pending = store.commit_async(noise(1), 1)
        said, send = [], messages.send
        monkeypatch.setattr(messages, "send", lambda end, message: (said.append(message), send(end, message)))
        for _ in range(2000):
            with pytest.raises(TimeoutError):
                pending.result(timeout=1e-4)
        assert said == [messages.Hurry()]
        os.kill(pid, signal.SIGCONT)
        assert pending.result().step == 1


def test_who_waits_hurries_what_another_thread_began_while_it_was_being_said(address, monkeypatch):
    with ckstore.open(address) as store:
        store.prewarm(noise(1))
        saver = store._handover._saver
        stop(store._handover.saver_pid)
        saver.forget_kept()
        said, send = [], messages.send

        def meanwhile(end, message):
            said.append(type(message).__name__)
            send(end, message)
            if said == ["Hurry"]:
                saver.forget_kept()

        with monkeypatch.context() as patch:
            patch.setattr(messages, "send", meanwhile)
            for _ in range(3):
                saver.hurry()
        os.kill(store._handover.saver_pid, signal.SIGCONT)
        assert said == ["Hurry", "Forget", "Hurry"]


def test_a_message_that_there_is_no_memory_for_is_sent_again(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    send, tries = messages.send, []

    def short(end, message):
        tries.append(message)
        if len(tries) <= 3:
            raise OSError(errno.ENOBUFS, "no buffer space")
        send(end, message)

    watch = Watch(os.getpid(), process_started(os.getpid()) or "")
    told = channel.Channel(theirs, watch)
    monkeypatch.setattr(messages, "send", short)
    try:
        assert told.tell(messages.SlotFree(1))
        assert messages.receive(ours, messages.TO_TRAINER) == messages.SlotFree(1)
        del tries[:]
        assert not told.tell(messages.SlotFree(2), wait_ms=20), "a log record waits no longer than it may"
    finally:
        watch.close()
        ours.close()
        theirs.close()
