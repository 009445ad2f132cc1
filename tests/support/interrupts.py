"""Ctrl-C before each line of what the trainer's thread does in a background commit, and what is looked at then."""

from __future__ import annotations

import contextlib
import gc
import linecache
import sys
from pathlib import Path

import numpy as np

import ckstore
from ckstore.saver.arena import STAGED, UNIT_NBYTES
from support.fake_saver import PretendSaver

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
        # Leaving a block is told as its first line once more, and there Python itself lets no Ctrl-C in. Nor does it at
        # ``try``, which does nothing: what a tracer raises there would not even leave the block around it.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and self.place is None and not line.startswith(("with ", "try:")):
            self.left -= 1
            if self.left == 0:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._run


class Witness(PretendSaver):
    """Looks at what is staged, at the moment when it is; ends each ticket once."""

    seen: list[tuple[int, set[int]]]
    """Steps, and the least and the greatest byte that was staged of them."""

    def wait_for_others(self):
        """Wait until nobody else writes to the arena any more; there is nobody."""

    def __init__(self, *facts):
        super().__init__(*facts)
        self.ended = set()

    def staged(self, ticket):
        self.wait_for_others()
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
