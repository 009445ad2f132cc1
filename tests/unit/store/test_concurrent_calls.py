"""Protects ``map_concurrent`` and ``run_all``: results keep their order, and no call runs after the end."""

from __future__ import annotations

import threading
import time

import pytest

from ckstore.io.backend import for_each_concurrent, map_concurrent


class ConcurrentBackend:
    """A backend that allows many concurrent requests."""

    request_concurrency = 4

    def list_deep(self, folder):
        return []


class SlowCalls:
    """A slow function that records its items and how many calls run at the same time."""

    def __init__(self, broken=()):
        self.lock = threading.Lock()
        self.now = self.most = 0
        self.items = []
        self.broken = broken

    def __call__(self, item):
        with self.lock:
            self.items.append(item)
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.002 * (item % 3))
        with self.lock:
            self.now -= 1
        if item in self.broken:
            raise OSError(item)
        return -item


def test_calls_run_concurrently_and_results_keep_order():
    ask = SlowCalls()
    assert list(map_concurrent(ConcurrentBackend(), ask, range(50))) == [-item for item in range(50)]
    assert 1 < ask.most <= ConcurrentBackend.request_concurrency


def test_folder_calls_run_one_by_one_on_demand():
    ask = SlowCalls()
    answers = map_concurrent(object(), ask, range(50))
    assert [next(answers), next(answers)] == [0, -1]
    assert (ask.items, ask.most) == ([0, 1], 1)


def test_calls_ahead_of_the_consumer_are_bounded():
    ask, source = SlowCalls(), iter(range(1000))
    answers = map_concurrent(ConcurrentBackend(), ask, source)
    next(answers)
    time.sleep(0.1)
    answers.close()
    assert ask.now == 0
    assert next(source) <= 2 * ConcurrentBackend.request_concurrency + 1


def test_first_exception_waits_for_running_calls():
    ask = SlowCalls(broken={7, 9})
    with pytest.raises(OSError, match="7"):
        list(map_concurrent(ConcurrentBackend(), ask, range(1000)))
    assert ask.now == 0
    assert len(ask.items) < 30


@pytest.mark.parametrize("backend", [ConcurrentBackend(), object()])
def test_run_all_runs_all_despite_failures(backend):
    act = SlowCalls(broken={3, 5})
    with pytest.raises(OSError, match="3"):
        for_each_concurrent(backend, act, range(9))
    assert sorted(act.items) == list(range(9))
