"""Protects waits from Ctrl-C: it may come at any moment, and no thread waits forever because of it."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ckstore
from ckstore.concurrency import Latch

SECONDS_MAX = 30.0


def test_set_wakes_all_waiting_and_later_threads():
    latch, woken = Latch(), []
    threads = [threading.Thread(target=lambda: woken.append(latch.wait(SECONDS_MAX))) for _ in range(20)]
    for thread in threads:
        thread.start()
    assert not latch.is_set()
    latch.set()
    for thread in threads:
        thread.join(SECONDS_MAX)
    assert woken == [True] * 20
    assert latch.is_set()
    assert latch.wait()
    assert latch.wait(0)


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 0.02])
def test_wait_with_timeout_ends_and_leaves_nothing(seconds):
    latch = Latch()
    begun = time.monotonic()
    assert latch.wait(seconds) is False
    assert time.monotonic() - begun >= seconds
    assert latch.waiting_count == 0
    latch.set()
    assert latch.wait(seconds) is True


def test_wait_during_set_is_woken():
    for _ in range(300):
        latch = Latch()
        threads = [threading.Thread(target=latch.wait, args=(SECONDS_MAX,)) for _ in range(3)]
        setters = [threading.Thread(target=latch.set) for _ in range(2)]
        for thread in (threads[0], setters[0], threads[1], setters[1], threads[2]):
            thread.start()
        for thread in (*threads, *setters):
            thread.join(SECONDS_MAX)
            assert not thread.is_alive()
        assert latch.waiting_count == 0


def interrupted_before(number, call):
    """Raise KeyboardInterrupt before the ``number``-th line of a call, and return whether it has so many lines.

    The call runs on its own thread. An exception that is raised while another one is handled stays behind as the
    thread's handled exception (CPython 3.11).
    """
    code, left, was_interrupted = call.__func__.__code__, number, []

    def trace(frame, event, argument):
        nonlocal left
        if event == "line":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    def run():
        sys.settrace(lambda frame, event, argument: trace if frame.f_code is code else None)
        try:
            call()
        except KeyboardInterrupt:
            was_interrupted.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive()
    return bool(was_interrupted)


def test_interrupted_set_delays_others_only_briefly(monkeypatch):
    monkeypatch.setattr("ckstore.concurrency.WAKE_SECONDS", 0.05)
    for number in itertools.count():
        latch = Latch()
        threads = [threading.Thread(target=latch.wait, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        while latch.waiting_count < len(threads):
            time.sleep(0.001)
        was_interrupted = interrupted_before(number, latch.set)
        if was_interrupted and not latch.is_set():
            latch.set()
        for thread in threads:
            thread.join(SECONDS_MAX)
            assert not thread.is_alive(), number
        if not was_interrupted:
            break
    assert number > 4, "each line is interrupted, with and without woken threads"


# In its own process, because pytest's timeout uses the only timer of this kind.
INTERRUPTED_WAITS = """
import random, signal, sys, threading
from ckstore.concurrency import Latch

class Interrupted(Exception):
    pass

def hear(*_):
    raise Interrupted

def interrupt(happening):
    try:
        signal.setitimer(signal.ITIMER_REAL, choice.uniform(1e-6, 60e-6))
        # It may come too late to be heard before the wait, which then takes its time.
        happening.wait(0.005)
    except Interrupted:
        pass
    return happening

def is_left_locked(event):
    try:
        interrupt(event)
    except RuntimeError:
        # Raised in place of the signal's error, where the lock had not even been taken.
        pass
    return event._cond._lock.locked()

def set_and_record(latch):
    latch.set()
    set_latches.append(latch)

signal.signal(signal.SIGALRM, hear)
count, seed = map(int, sys.argv[1:])
choice = random.Random(seed)
print(sum(is_left_locked(threading.Event()) for _ in range(count)))
set_latches = []
for _ in range(count):
    latch = interrupt(Latch())
    setter = threading.Thread(target=set_and_record, args=(latch,), daemon=True)
    setter.start()
    setter.join(30)
    assert set_latches.pop() is latch, "the setting thread waits, or fails"
    assert latch.wait(30), "the next waiting thread is not woken"
"""


@pytest.mark.deep
@pytest.mark.timeout(120)
def test_signal_at_any_moment_of_a_wait_blocks_no_thread(note, sample):
    count = sample.count(5000, parts=8)
    command = [sys.executable, "-c", INTERRUPTED_WAITS, str(count), str(sample.seed(0))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    locked = int(ran.stdout)
    note(f"of {count} interrupted waits for a threading.Event {locked} have left its lock locked; of a Latch, none")


def test_waits_use_no_lock_that_ctrl_c_can_leave_held():
    # Conditions are for our own threads, which no signal interrupts. docs/ARCHITECTURE.md explains other uses.
    breaches = [
        f"{path.name}:{number}"
        for path in sorted(Path(ckstore.__file__).parent.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"threading\.(Event|Semaphore|BoundedSemaphore|Barrier)\b|(from|import) concurrent\b", line)
        and not line.startswith("``threading.Event`` is made of Python code")
    ]
    assert not breaches
