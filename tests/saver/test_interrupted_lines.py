"""Ctrl-C before each line of what the trainer's thread does in a background commit, one commit a line.

Whatever it hits: the call raises it, the next commit works, and what is published of a step is the state of that step.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import sys
from pathlib import Path

import numpy as np
import pytest
from pretend import OwnerOfAll, PretendSaver

import ckstore
from ckstore.saver.arena import STAGED, UNIT_NBYTES

pytestmark = pytest.mark.usefixtures("quiet_log")

SOURCE = Path(ckstore.__file__).parent
TRACED = {
    str(SOURCE / name) for name in ("background.py", "handover.py", "outstanding.py", "handed.py", "workers.py")
} | {str(path) for path in (SOURCE / "staging").glob("*.py")}


class Interrupt:
    """Raises Ctrl-C in this thread before one line of the files that count; knows whether it came to that.

    Args:
        line: Which line, counted as they are run.
    """

    def __init__(self, line):
        self.left = line
        self.place = None

    def __enter__(self):
        # A forgotten store of another test would be ended here, by the collector, and Python drops what that raises.
        gc.disable()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)
        gc.enable()

    def _enter(self, frame, event, _):
        return self._run if frame.f_code.co_filename in TRACED else None

    def _run(self, frame, event, _):
        # Leaving a block is told as its first line once more, and there Python itself lets no Ctrl-C in.
        is_left = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and self.place is None and not is_left:
            self.left -= 1
            if self.left == 0:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._run


class Witness(PretendSaver):
    """Looks at what is staged, at the moment when it is; ends each ticket once."""

    seen: list[tuple[int, set[int]]]
    """Steps, and the least and the greatest byte that was staged of them."""

    def __init__(self, *facts):
        super().__init__(*facts)
        self.ended = set()

    def staged(self, ticket):
        for content in self.content(ticket):
            values = np.frombuffer(content, np.uint8)
            self.seen.append((self.head(ticket).step, {int(values.min()), int(values.max())}))
        super().staged(ticket)

    def finish(self, ticket, warnings=()):
        if ticket not in self.ended:
            self.ended.add(ticket)
            super().finish(ticket, warnings)

    def fail(self, ticket, error):
        if ticket not in self.ended:
            self.ended.add(ticket)
            super().fail(ticket, error)

    def finish_staged(self):
        for ticket, (room, _, _) in list(self.begun.items()):
            if room.ticket == ticket and room.state == STAGED:
                self.finish(ticket)


@pytest.fixture
def witnesses(savers, monkeypatch):
    Witness.started = savers
    Witness.seen = []
    monkeypatch.setattr("ckstore.handover.Saver", Witness)
    return savers


STEPS = 10
"""For one line: those before the interrupt, the one that it hits, and the one that comes next."""


def filled(state, step):
    """Return the state as it is at a step."""
    state["w"][:] = step % 251
    return state


def commit(store, state, step):
    store.commit_async(filled(state, step), step).result(60)


def commit_and_guard(store, state, step):
    pending = store.commit_async(filled(state, step), step)
    store._handover.guard()
    state["w"][:] = (step + 1) % 251
    pending.wait_staged()
    pending.result(60)


def nothing(store, state, step):
    """Do nothing."""


def guard(store, state, step):
    """What an optimizer's step does, before it changes anything."""
    store._handover.guard()


def interrupt_each_line(store, act=commit, before=nothing, after=nothing, stride=1):
    """Act with Ctrl-C before the first line, the second, and so on; return the places that it came at."""
    state = {"w": np.zeros(2 * UNIT_NBYTES + 1000, np.uint8)}
    places = []
    store.prewarm(state)
    while True:
        step = len(places) * STEPS
        before(store, state, step)
        with contextlib.suppress(KeyboardInterrupt), Interrupt(1 + len(places) * stride) as interrupt:
            act(store, state, step + 5)
        after(store, state, step)
        # Nothing of this may ever be taken for what the call was given.
        state["w"][:] = (step + 6) % 251
        if interrupt.place is None:
            return places
        places.append(interrupt.place)
        assert store.commit_async(filled(state, step + 7), step + 7).result(60).step == step + 7, interrupt.place


def check_seen(places):
    steps = [step for step, _ in Witness.seen]
    assert [(step, content) for step, content in Witness.seen if content != {step % 251}] == []
    assert {step for step in steps if step % STEPS == 7} == {index * STEPS + 7 for index in range(len(places))}
    assert len(steps) == len(set(steps))


@pytest.mark.parametrize("threads", [1, 2])
def test_where_all_is_copied_before_the_call_returns(witnesses, folder, threads):
    with ckstore.open(folder, policy=ckstore.Policy(staging_threads=threads)) as store:
        places = interrupt_each_line(store)
    assert {place.partition(":")[0] for place in places} >= {"handover.py", "state.py", "copying.py", "workers.py"}
    check_seen(places)


@pytest.mark.parametrize("is_checked", [False, True])
def test_where_all_is_copied_behind_a_guard(witnesses, folder, is_checked):
    with ckstore.open(folder, policy=ckstore.Policy(debug_guard=is_checked)) as store:
        store._guarded = OwnerOfAll()
        places = interrupt_each_line(store, commit_and_guard, after=guard)
    assert len(places) > 150
    check_seen(places)


def test_where_the_state_that_waits_is_replaced(witnesses, folder):
    def fill(store, state, step):
        witnesses[-1].is_quick = False
        store.commit_async(filled(state, step), step)
        store.commit_async(filled(state, step + 1), step + 1)

    def replace(store, state, step):
        store.commit_async(filled(state, step), step)

    def end(store, state, step):
        witnesses[-1].is_quick = True
        witnesses[-1].finish_staged()

    with ckstore.open(folder, policy=ckstore.Policy(on_busy="replace")) as store:
        places = interrupt_each_line(store, replace, fill, end)
        assert len(witnesses[-1].aborted) > len(places) // 2
    check_seen(places)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("guarded", [False, True])
def test_with_a_saver_that_is_a_process(folder, tell, monkeypatch, guarded):
    ours = {str(SOURCE / "saver" / name) for name in ("client.py", "tickets.py", "messages.py")}
    monkeypatch.setattr(sys.modules[__name__], "TRACED", TRACED | ours)
    with ckstore.open(folder, policy=ckstore.Policy(debug_guard=guarded, compression="none")) as store:
        if guarded:
            store._guarded = OwnerOfAll()
        places = interrupt_each_line(store, commit_and_guard, after=guard, stride=3)
        assert store._handover._saver.pid
    with ckstore.open(folder) as store:
        steps = store.steps()
        for step in steps:
            assert set(np.unique(store.restore(step)["w"]).tolist()) == {step % 251}, step
        assert {index * STEPS + 7 for index in range(len(places))} <= set(steps)
    tell(f"Ctrl-C at {len(places)} lines: {len(steps)} checkpoints, each of its own step")
