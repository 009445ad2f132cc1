"""Two Ctrl-C at random moments of a background commit, also inside Python's own code.

The second one may interrupt the handling of the first one. Nothing hangs, the next commit works, and a published step
has the state of that step.
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

# pytest-timeout uses a thread, because there is only one timer that sends signals and this test needs it.
pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.timeout(300, method="thread")]

COUNT = 500
"""Commits of each kind that a deep run interrupts."""


class Interrupts:
    """Raises KeyboardInterrupt after some time, and once more, but only inside ``within``; signals may come later.

    Args:
        first: Seconds until the first one.
        second: Seconds from the first to the second one.
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
        # During a garbage collection Python drops what is raised.
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
    """Restore the handler of the timer's signal afterwards."""
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def commit(store, state, step):
    """Commit; repeat it if the first call only reports that the previous commit was interrupted twice."""
    try:
        return store.commit_async(filled(state, step), step)
    except SaverError as error:
        if "was interrupted" not in str(error):
            raise
        return store.commit_async(filled(state, step), step)


@pytest.mark.deep(parts=4)
@pytest.mark.parametrize("kind", [NOW, LAZY, DEVICE_NOW, DEVICE_LAZY], ids=["now", "lazy", "far now", "far lazy"])
def test_commit_interrupted_twice_stages_own_state(
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
            # The speed of the machine varies: some signals may come too late, but not too many.
            seconds *= 1.05 if interrupts.count else 0.9
            train(step + 6)
            memory_kinds.kind = NOW
            assert commit(store, near, step + 7).result(60).step == step + 7
            filled(near, step + 8)
    note(f"{count} commits: {counts[1]} interrupted once, {counts[2]} twice, and none has become another one")
    check_seen(count)
    assert counts[1] + counts[2] > (COUNT // 4 if sample.is_whole else 0)
