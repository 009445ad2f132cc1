"""Protects what is computed after ``commit_async`` has returned: the state and the guard wait for it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ckstore.background.arena import STAGED
from support.staged_state import Staged, noise

SECONDS = 30


@pytest.fixture
def stage(arena, crew):
    made = []

    def start(late, **options):
        state = [noise(5000), np.zeros(4, np.uint64)]
        made.append(Staged(arena, crew, state, late=late, **options))
        return made[-1]

    yield start
    for each in made:
        each.close()


def write(staged):
    staged.slot.view(staged.stowage.places[1], 32)[:] = b"late" * 8


@pytest.mark.parametrize("lazy", [(), (0,)], ids=["nothing is guarded", "guarded"])
@pytest.mark.parametrize("wait", ["guard", "finish"])
def test_state_is_staged_after_its_late_part(stage, lazy, wait):
    may_go, order = threading.Event(), []

    def late(staged):
        assert may_go.wait(SECONDS)
        write(staged)
        order.append("written")

    staged = stage(late, lazy=lazy)
    staged.staging.copy_now()
    staged.wait_copied()
    assert staged.slot.state != STAGED
    assert staged.events == []
    waiting = threading.Thread(target=lambda: (getattr(staged.staging, wait)(), order.append("waited")))
    waiting.start()
    may_go.set()
    waiting.join(SECONDS)
    assert order == ["written", "waited"]
    staged.staging.finish()
    assert staged.events == ["staged"]
    assert staged.slot.state == STAGED
    assert staged.content()[1] == b"late" * 8
    assert staged.content()[0] == noise(5000).tobytes()


def test_failure_of_the_late_part_fails_the_staging(stage):
    def late(staged):
        raise ArithmeticError("late")

    staged = stage(late)
    staged.staging.copy_now()
    staged.staging.guard()
    staged.staging.finish()
    assert [type(each) for each in staged.events] == [ArithmeticError]
    assert staged.slot.state != STAGED


def test_staging_that_is_given_up_waits_for_a_late_part_that_has_begun(stage):
    begun, may_go, order = threading.Event(), threading.Event(), []

    def late(staged):
        begun.set()
        assert may_go.wait(SECONDS)
        order.append("late")

    staged = stage(late)
    staged.staging.copy_now()
    assert begun.wait(SECONDS)
    giving = threading.Thread(target=lambda: (staged.staging.give_up(KeyError("given up")), order.append("given up")))
    giving.start()
    may_go.set()
    giving.join(SECONDS)
    assert order == ["late", "given up"]
    assert [type(each) for each in staged.events] == [KeyError]


def test_late_part_of_a_staging_that_never_began_is_not_computed(stage):
    calls = []
    staged = stage(calls.append)
    staged.staging.give_up(KeyError("given up"))
    assert calls == []
    assert [type(each) for each in staged.events] == [KeyError]
    staged.staging.guard()
