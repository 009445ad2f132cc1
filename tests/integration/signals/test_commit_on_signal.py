"""Protects signal handling: earlier handlers are called and restored, nothing leaks, wrong use is refused."""

from __future__ import annotations

import contextlib
import errno
import gc
import signal
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import ckstore
from ckstore.errors import UsageError
from ckstore.preemption import LastCommit


def test_earlier_commit_of_the_step_does_not_count(disk_store):
    """A run that went back and reached the step again has another state."""
    state = {"w": np.arange(100)}
    disk_store.commit(state, 7)
    with disk_store.commit_on_signal(lambda: state, then="return") as last:
        last.check(6)
        signal.raise_signal(signal.SIGTERM)
        state["w"] += 1
        assert last.check(7)
    assert last.receipt.chunks_new > 0
    assert disk_store.restore()["w"][0] == 1


def test_failed_last_commit_is_raised(disk_store):
    def broken():
        return {"x": object()}

    with disk_store.commit_on_signal(broken) as last:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(ckstore.LeafTypeError, match="x"):
            last.check(1)
    assert disk_store.steps() == []


ERRORS = [MemoryError("no memory"), OSError(errno.ENOSPC, "full"), TimeoutError(errno.ETIMEDOUT, "no answer")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_last_commit_is_retried_after_system_error(disk_store, monkeypatch, error):
    commit, tries = disk_store.commit, []

    def failing_once(*args, **options):
        tries.append(args)
        if len(tries) == 1:
            raise error
        return commit(*args, **options)

    monkeypatch.setattr(disk_store, "commit", failing_once)
    with disk_store.commit_on_signal(lambda: {"a": 1}, then="return") as last:
        signal.raise_signal(signal.SIGTERM)
        assert last.check(3)
    assert (len(tries), last.receipt.step, disk_store.steps()) == (2, 3, [3])


@pytest.mark.parametrize("is_done", [True, False])
def test_system_timeout_differs_from_deadline(disk_store, monkeypatch, is_done):
    def no_answer(timeout=None):
        raise TimeoutError(errno.ETIMEDOUT, "no answer")

    def begin(*args, **options):
        return SimpleNamespace(result=no_answer, is_done=is_done, wait_staged=lambda timeout: True)

    monkeypatch.setattr(type(disk_store), "arena_nbytes", 1)
    monkeypatch.setattr(disk_store, "commit_async", begin)
    with disk_store.commit_on_signal(lambda: {"a": 1}, then="return") as last:
        signal.raise_signal(signal.SIGTERM)
        assert last.check(3)
    # The running commit is not repeated at the same time.
    assert disk_store.steps() == ([3] if is_done else [])


@pytest.mark.parametrize("is_background", [True, False])
def test_ranks_that_agree_do_not_decide_by_their_own_arena(disk_store, monkeypatch, is_background):
    calls = []
    receipt = disk_store.commit({"a": 1}, 1)
    pending = SimpleNamespace(result=lambda timeout=None: receipt, is_done=True)
    monkeypatch.setattr(type(disk_store), "arena_nbytes", 0 if is_background else 1)
    monkeypatch.setattr(disk_store, "commit", lambda *args, **options: calls.append(False) or receipt)
    monkeypatch.setattr(disk_store, "commit_async", lambda *args, **options: calls.append(True) or pending)
    agreement = SimpleNamespace(is_reached=lambda step, is_asked: True, is_background=is_background)
    with LastCommit(disk_store, lambda: {"a": 1}, then="return", agreement=agreement) as last:
        assert last.check(3)
    assert calls == [is_background]


def test_closing_store_stops_listening(folder, no_threads_left):
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        ours = signal.getsignal(signal.SIGTERM)
        with ckstore.open(folder) as store:
            last = store.commit_on_signal(dict)
            assert signal.getsignal(signal.SIGTERM) != ours
        assert signal.getsignal(signal.SIGTERM) is ours
        last.close()
        # A handler installed over a listener that is closed meanwhile still calls the original one.
        with ckstore.open(folder) as store:
            last = store.commit_on_signal(dict)
            under = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda number, frame: under(number, frame))
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_two_stores_both_commit(folder):
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, previous)
        stores = [stack.enter_context(ckstore.open(folder.with_name(name))) for name in ("a", "b")]
        both = [stack.enter_context(store.commit_on_signal(lambda: {"a": 1})) for store in stores]
        signal.raise_signal(signal.SIGTERM)
        # The later listener calls the earlier one.
        assert [last.check(1) for last in both] == [False, True]
        assert [last.check(2) for last in both] == [True, True]
        assert received == [signal.SIGTERM]
        assert [store.steps() for store in stores] == [[2], [1]]


@pytest.mark.parametrize("is_async", [False, True], ids=["in the process", "by a saver"])
def test_last_commit_uses_given_options(disk_store, is_async):
    def state(step):
        return {"w": np.arange(1 << 20) + step}

    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        plain = ckstore.Policy(compression="none", delta=False, saver_nice=3)
        with disk_store.commit_on_signal(lambda: state(2), policy=plain) as last:
            if is_async:
                disk_store.commit_async(state(1), 1).result()
            signal.raise_signal(signal.SIGTERM)
            assert last.check(2)
            assert last.receipt.bytes_written >= state(2)["w"].nbytes
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_invalid_calls_are_refused(disk_store):
    errors = []

    def elsewhere():
        try:
            disk_store.commit_on_signal(dict)
        except UsageError as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]
    before = signal.getsignal(signal.SIGTERM)
    for wrong in ({"signals": [signal.SIGTERM, signal.SIGKILL]}, {"signals": [999]}, {"signals": []}):
        with pytest.raises(UsageError, match="signal"):
            disk_store.commit_on_signal(dict, **wrong)
    for wrong in ({"deadline_seconds": 0.0}, {"then": "explode"}, {"policy": "fast"}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            disk_store.commit_on_signal(dict, **wrong)
    assert signal.getsignal(signal.SIGTERM) == before


def test_unnamed_signal_is_refused(disk_store):
    number = signal.SIGRTMIN + 1
    before = signal.getsignal(number)
    with pytest.raises(UsageError, match="cannot be handled"):
        disk_store.commit_on_signal(lambda: {}, signals=[signal.SIGTERM, number])
    assert signal.getsignal(number) is before


def test_failed_tags_do_not_fail_last_commit(disk_store, monkeypatch, caplog):
    def refuse(ref, name):
        raise ckstore.ConflictError("it is being dropped")

    monkeypatch.setattr(disk_store, "tag", refuse)
    with disk_store.commit_on_signal(lambda: {"a": 1}, then="return", tags=["preempted"]) as last:
        last.check(1)
        disk_store.commit_async({"a": 2}, 2)
        signal.raise_signal(signal.SIGTERM)
        assert last.check(2)
    assert (last.receipt.step, disk_store.steps()) == (2, [2])
    assert "tagging it 'preempted' failed" in caplog.text


def descriptor_count():
    """Count the open descriptors, except sockets: those of earlier tests may be closed at any time."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(path.readlink()))
    return sum(not link.startswith("socket:") for link in links)


def test_closed_listener_keeps_nothing(disk_store):
    class Model:
        """An object that a closure of ``get_state`` holds."""

    def listen():
        model = Model()
        with disk_store.commit_on_signal(lambda: {"model": id(model)}) as last:
            last.check(1)
        return weakref.ref(model)

    gc.collect()
    before = descriptor_count()
    gc.disable()
    try:
        watched = [listen() for _ in range(20)]
        assert [each() for each in watched] == [None] * 20
        assert descriptor_count() == before
    finally:
        gc.enable()


def test_closing_store_stops_all_listeners(folder):
    before = signal.getsignal(signal.SIGTERM)
    store = ckstore.open(folder)
    several = [store.commit_on_signal(dict) for _ in range(3)]
    store.close()
    assert signal.getsignal(signal.SIGTERM) is before
    assert all(last._is_closed for last in several)


def test_unreferenced_listener_stays_active(folder):
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with ckstore.open(folder) as store:
            store.commit_on_signal(dict)
            gc.collect()
            assert signal.getsignal(signal.SIGTERM) is not previous
            signal.raise_signal(signal.SIGTERM)
            assert received == []
        assert received == [signal.SIGTERM], "a signal that came is acted on in the end"
    finally:
        signal.signal(signal.SIGTERM, previous)
