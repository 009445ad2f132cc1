"""Ctrl-C before each line of what the trainer's thread does in a background commit, and what must hold afterwards.

Lines are counted in the packages that make up the trainer's side of a background commit: all but those in ``BELOW``.
So a module that is merged, moved or renamed is still interrupted, and a new package is interrupted from its first day.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import ckstore
from ckstore._testing import background_of
from ckstore.background.arena import STAGED, UNIT_NBYTES
from support.fake_saver import FakeSaver

SOURCE = Path(ckstore.__file__).parent
BELOW = {"codec", "delta", "format", "io", "kernels", "quant", "store", "testing"}
"""Packages that files and bytes are the subject of. In a background commit, the saver's process runs them; where a
trainer's thread does, as in a blocking commit, other programmes end it at every call."""
TRACED = {str(path) for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in BELOW}


class Interrupt:
    """Raises KeyboardInterrupt in this thread before one line of the files in ``TRACED``.

    Args:
        line: Which line, counted from 1 as they run; 0: none, only count.

    Attributes:
        count: Lines that have run.
        place: File and number of the line that was interrupted; None: there were fewer lines.
    """

    def __init__(self, line):
        self.line = line
        self.count = 0
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
        # Leaving a block is traced as its first line once more, where Python itself raises no KeyboardInterrupt. Nor
        # does it at ``try``, which does nothing: what a tracer raises there would not even leave the block around it.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and self.place is None and not line.startswith(("with ", "try:")):
            self.count += 1
            if self.count == self.line:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._run


class RecordingSaver(FakeSaver):
    """A fake saver that records the staged bytes when they are staged, and ends each ticket once."""

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
"""Steps of one round: those before the interrupted commit, its own (5), and the one of the commit after it (7)."""


def filled(state, step):
    """Return the state as it is at a step."""
    state["w"][:] = step % 251
    return state


def commit(store, state, step):
    store.commit_async(filled(state, step), step).result(60)


def commit_and_guard(store, state, step):
    pending = store.commit_async(filled(state, step), step)
    background_of(store).guard()
    state["w"][:] = (step + 1) % 251
    pending.wait_staged()
    pending.result(60)


def nothing(store, state, step):
    """Do nothing."""


def guard(store, state, step):
    """What an optimizer's step does, before it changes anything."""
    background_of(store).guard()


@dataclass(slots=True)
class Rounds:
    """Commits of one store that were interrupted, each followed by one that was not; see ``interrupt_each_line``.

    Attributes:
        count: How many rounds there were.
        places: Where they were interrupted.
    """

    store: ckstore.Store
    act: object
    before: object
    after: object
    count: int = 0
    places: list[str] = field(default_factory=list)
    _state: dict = field(default_factory=lambda: {"w": np.zeros(2 * UNIT_NBYTES + 1000, np.uint8)})

    def run(self, line):
        """Interrupt one commit before a line, and make another one; return what counted the lines."""
        state, step = self._state, self.count * STEPS
        self.before(self.store, state, step)
        with contextlib.suppress(KeyboardInterrupt), Interrupt(line) as interrupt:
            self.act(self.store, state, step + 5)
        self.after(self.store, state, step)
        # Nothing of this may ever be taken for what the call was given.
        state["w"][:] = (step + 6) % 251
        receipt = self.store.commit_async(filled(state, step + 7), step + 7).result(60)
        assert receipt.step == step + 7, interrupt.place
        self.count += 1
        if interrupt.place is not None:
            self.places.append(interrupt.place)
        return interrupt


def interrupt_each_line(store, sample, act=commit, before=nothing, after=nothing, *, parts, every=1):
    """Interrupt a commit before each line that has its turn, and a last one past the last line; return the rounds.

    Args:
        store: Where they are made.
        sample: Which lines have their turn.
        act: What is interrupted; it is given the store, a state and a step.
        before: What comes before it.
        after: What comes after it.
        parts: Into how many parts they are divided in ``make test``.
        every: Only each ``every``-th line counts.
    """
    rounds = Rounds(store, act, before, after)
    store.prewarm(rounds._state)
    # The first commit runs lines that no later one does.
    rounds.run(0)
    count = rounds.run(0).count
    lines = sample.part(range(1, count + 1, every), parts=parts)
    for line in lines:
        rounds.run(line)
    # One commit may run some lines more than another.
    assert len(rounds.places) > len(lines) // 2
    while rounds.run(count + 1).place is not None:
        count += every
    return rounds


def check_seen(count):
    """Check what was staged in so many rounds: each state is that of its step, and none was staged twice."""
    steps = [step for step, _ in RecordingSaver.seen]
    assert [(step, content) for step, content in RecordingSaver.seen if content != {step % 251}] == []
    assert {step for step in steps if step % STEPS == 7} == {index * STEPS + 7 for index in range(count)}
    assert len(steps) == len(set(steps))


def check_rounds(rounds):
    """Check what was staged, and that some commits were interrupted before they were staged, and some after that."""
    check_seen(rounds.count)
    untouched = rounds.count - len(rounds.places)
    staged = sum(step % STEPS == 5 for step, _ in RecordingSaver.seen)
    assert 0 < staged - untouched < len(rounds.places)
