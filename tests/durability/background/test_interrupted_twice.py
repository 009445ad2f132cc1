"""Ctrl-C twice, at random moments of a background commit: also inside of what Python itself is made of.

The second one may interrupt what the first one has made the thread do. Nothing hangs then, the next commit works, and
what is published of a step is the state of that step.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import random
import signal
import statistics
import time

import numpy as np
import pytest

import ckstore
from ckstore._testing import background_of
from ckstore.background.arena import UNIT_NBYTES
from ckstore.background.arena_layout import DEVICE_LAZY, DEVICE_NOW, LAZY, NOW
from ckstore.errors import SaverError
from support.fake_saver import guard_with
from support.interrupts import STEPS, RecordingSaver, check_seen, filled

# The limit of time is kept by a thread: there is one timer that makes signals, and it is needed here.
pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.timeout(300, method="thread")]

COUNT = 500
"""So many commits of each kind are interrupted in a deep run."""


class Interrupts:
    """Raises Ctrl-C after some time, and once more, but only within what is called; a signal itself may come later.

    Args:
        first: Seconds until the first one.
        second: From there to the second one.
    """

    def __init__(self, first, second):
        self._seconds = first, second
        self.count = 0

    def within(self, call, *given):
        first, second = self._seconds

        def hear(_, frame):
            while frame is not None and frame.f_code is not call.__code__:
                frame = frame.f_back
            if frame is not None and self.count < 2:
                self.count += 1
                signal.setitimer(signal.ITIMER_REAL, second if self.count == 1 else 0)
                raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, hear)
        # What a collection ends that runs just then drops what is raised.
        gc.disable()
        try:
            signal.setitimer(signal.ITIMER_REAL, first)
            with contextlib.suppress(KeyboardInterrupt):
                call(*given)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            gc.enable()


@pytest.fixture
def alarm():
    """Put the handler of the timer's signal back afterwards."""
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def commit(store, state, step):
    """Commit; once more if the first call only raises that the last one was interrupted twice."""
    try:
        return store.commit_async(filled(state, step), step)
    except SaverError as error:
        if "was interrupted" not in str(error):
            raise
        return store.commit_async(filled(state, step), step)


@pytest.mark.deep(parts=4)
@pytest.mark.parametrize("kind", [NOW, LAZY, DEVICE_NOW, DEVICE_LAZY], ids=["now", "lazy", "far now", "far lazy"])
def test_commit_interrupted_twice_stages_its_own_state_or_none(
    recording_savers, folder, device, memory_kinds, alarm, sample, note, kind
):
    far, near = ({"w": np.zeros(2 * UNIT_NBYTES + 1000, np.uint8)} for _ in range(2))
    count, choice, counts = sample.count(COUNT, parts=10), random.Random(sample.seed(kind)), collections.Counter()

    def commit_and_train(step):
        memory_kinds.kind = kind
        pending = commit(store, far, step)
        train(step + 1)
        pending.result(60)

    def train(step):
        background_of(store).guard()
        device.wait_for_held_copies()
        filled(far, step)

    with ckstore.open(folder) as store:
        guard_with(store, memory_kinds)
        store.prewarm(near)
        taken = []
        for _ in range(10):
            began = time.perf_counter()
            commit_and_train(0)
            taken.append(time.perf_counter() - began)
        seconds = statistics.median(taken)
        RecordingSaver.seen.clear()
        for number in range(count):
            step = STEPS * number
            second = choice.choice([choice.uniform(1e-5, 1e-4), choice.uniform(1e-5, 1e-3)])
            interrupts = Interrupts(choice.uniform(1e-5, 1.2 * seconds), second)
            interrupts.within(commit_and_train, step + 5)
            counts[interrupts.count] += 1
            # The machine may be slower or faster by now: some come too late, and not too many.
            seconds *= 1.05 if interrupts.count else 0.9
            train(step + 6)
            memory_kinds.kind = NOW
            assert commit(store, near, step + 7).result(60).step == step + 7
            filled(near, step + 8)
    note(f"{count} commits: {counts[1]} interrupted once, {counts[2]} twice, and none has become another one")
    check_seen(count)
    assert counts[1] + counts[2] > (COUNT // 4 if sample.is_whole else 0)
