"""Protects what asks a backend for many things: order, bounds, and that nothing is left under way."""

from __future__ import annotations

import threading
import time

import pytest

from ckstore.io.backend import for_each_concurrent, map_concurrent


class Far:
    """As much of a backend as is asked for: it answers many at a time."""

    request_concurrency = 4

    def list_deep(self, folder):
        return []


class StateDictCache:
    """Questions after a moment, and notes how many wait at the same time, and for what was asked."""

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


def test_answers_come_in_order_and_many_are_under_way():
    ask = StateDictCache()
    assert list(map_concurrent(Far(), ask, range(50))) == [-item for item in range(50)]
    assert 1 < ask.most <= Far.request_concurrency


def test_a_folder_is_asked_for_one_after_the_other_and_no_further_than_wanted():
    ask = StateDictCache()
    answers = map_concurrent(object(), ask, range(50))
    assert [next(answers), next(answers)] == [0, -1]
    assert (ask.items, ask.most) == ([0, 1], 1)


def test_no_more_is_asked_than_fits_ahead_of_who_takes_it():
    ask, source = StateDictCache(), iter(range(1000))
    answers = map_concurrent(Far(), ask, source)
    next(answers)
    time.sleep(0.1)
    answers.close()
    assert ask.now == 0
    assert next(source) <= 2 * Far.request_concurrency + 1


def test_first_exception_ends_it_with_nothing_under_way():
    ask = StateDictCache(broken={7, 9})
    with pytest.raises(OSError, match="7"):
        list(map_concurrent(Far(), ask, range(1000)))
    assert ask.now == 0
    assert len(ask.items) < 30


@pytest.mark.parametrize("backend", [Far(), object()])
def test_all_are_done_whichever_fail(backend):
    act = StateDictCache(broken={3, 5})
    with pytest.raises(OSError, match="3"):
        for_each_concurrent(backend, act, range(9))
    assert sorted(act.items) == list(range(9))
