"""Measure what the commits of a store cost, and say in the training loop when the next one is due.

Invariants:
- Nothing is due while a commit is on its way: never more often than the saver can write.
- Medians decide: one step, or one commit, that took ten times as long as the others changes nothing.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, SupportsIndex

from ckstore.advice import Advice, Measured, advice_for, check_failures, check_overhead, check_positive, median
from ckstore.arguments import check_step
from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.errors import UsageError

if TYPE_CHECKING:
    from ckstore.pending import Pending
    from ckstore.receipt import Receipt

COMMITS_MAX = 8
"""Commits that medians are taken over: as few as outvote three of them, so that what changes is soon noticed."""

STEPS_MAX = 64
"""Steps that medians are taken over."""

FIRST_STEPS = 3
"""Steps before the first commit: it comes early, because what cannot be committed should be known early."""


@dataclass(slots=True, eq=False)
class _Watched:
    """A commit, and when it began and ended; ``pending`` is None where the trainer waited for all of it."""

    step: int
    begun: float
    pending: Pending | None
    ended: float | None = None
    seconds: float = 0.0
    receipt: Receipt | None = None
    """Of a commit that the trainer waited for."""

    @property
    def stall_seconds(self) -> float:
        return self.seconds if self.pending is None else self.pending.stall_seconds

    @property
    def is_done(self) -> bool:
        return self.pending is None or self.pending.is_done

    @property
    def has_failed(self) -> bool:
        return self.pending is not None and self.pending.error_or_none() is not None

    @property
    def write_seconds(self) -> float | None:
        """How long it took to be durable; None: it is not, or not yet."""
        if self.pending is None:
            return self.seconds
        return None if self.ended is None or self.pending.receipt_or_none() is None else self.ended - self.begun


class Costs:
    """What the last commits of one handle have cost; ``Store.costs``."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._watched: deque[_Watched] = deque()
        self._forgotten_seconds = 0.0
        self._slowdowns: deque[float] = deque(maxlen=COMMITS_MAX)
        self.commit_count = 0
        """Commits that were begun."""
        self.failed_count = 0
        """Commits that failed in the very call."""

    def watch(self, pending: Pending) -> None:
        """Learn of a commit that has gone into the background."""
        if pending.is_skipped:
            return
        watched = _Watched(pending.step, self._clock.monotonic(), pending)
        self._add(watched)
        clock = self._clock

        def note_end(_: Pending) -> None:
            watched.ended = clock.monotonic()

        pending.when_done(note_end)

    def note(self, step: int, seconds: float, receipt: Receipt | None = None) -> None:
        """Learn of a commit that the trainer has waited for."""
        self._add(_Watched(step, self._clock.monotonic(), None, seconds=seconds, receipt=receipt))

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Count a commit that fails inside of this."""
        try:
            yield
        except BaseException:
            self.failed_count += 1
            raise

    def note_slowdown(self, seconds: float) -> None:
        """Learn how much longer the steps took, all together, that ran while a commit was on its way."""
        self._slowdowns.append(seconds)

    @property
    def is_busy(self) -> bool:
        """Whether a commit is on its way."""
        return any(not each.is_done for each in self._watched)

    @property
    def newest(self) -> tuple[int, Pending | None] | None:
        """Step of the last commit that was begun, and what is pending of it; None: there was none."""
        return (self._watched[-1].step, self._watched[-1].pending) if self._watched else None

    @property
    def newest_receipt(self) -> Receipt | None:
        """Receipt of the last commit that was begun, where the trainer has waited for it."""
        return self._watched[-1].receipt if self._watched else None

    @property
    def has_newest_failed(self) -> bool:
        """Whether the last commit that was begun is known to have failed: it says nothing of what others cost."""
        return bool(self._watched) and self._watched[-1].has_failed

    @property
    def stall_seconds(self) -> float:
        """How long all commits together have kept the trainer waiting."""
        return self._forgotten_seconds + sum(each.stall_seconds for each in self._watched)

    def measured(self) -> Measured | None:
        """Return the medians of the last commits that became durable; None: none ever has.

        Commits that fail change nothing of it, however many.
        """
        durable = [
            (each.stall_seconds, seconds) for each in self._watched if (seconds := each.write_seconds) is not None
        ]
        if not durable:
            return None
        stalls, writes = zip(*durable[-COMMITS_MAX:], strict=True)
        slowdown = median(self._slowdowns) if self._slowdowns else None
        return Measured(len(stalls), median(stalls), median(writes), slowdown)

    def _add(self, watched: _Watched) -> None:
        ended = [each for each in self._watched if each.is_done]
        self.commit_count += 1
        self._watched.append(watched)
        # Those on their way come on top, so that a backlog does not push out what was measured; nor does what failed.
        excess = max(0, len(self._watched) - COMMITS_MAX)
        for each in sorted(ended, key=lambda each: not each.has_failed)[:excess]:
            self._forgotten_seconds += each.stall_seconds
            self._watched.remove(each)


class Followed(Protocol):
    """A store, as far as it is followed."""

    @property
    def costs(self) -> Costs:
        """What its commits cost."""
        ...


class AutoInterval:
    """Says when the next commit is due, so that commits cost no more than a share of the time of training.

    It measures how long steps take, how long commits keep the trainer waiting, and how much slower the steps are that
    run meanwhile; as these change, so does the interval. The first commit is due after three steps: what cannot be
    committed should be known early. ::

        auto = ckstore.AutoInterval(overhead=0.03).follow(store)
        for step in range(start, steps):
            train_one_step()
            if auto.due(step):
                store.commit_async(state, step)

    Args:
        overhead: The share of the time that commits may take.
        seconds_min: Not more often than this: commits cost disk space too.
        seconds_max: Not more rarely than this, whatever it costs; None: as rarely as ``overhead`` asks for.
        failures_per_day: How often the trainer is expected to fail; then not more often than loses least.
        clock: Where time comes from.

    Raises:
        UsageError: A number is none that this could be.
    """

    def __init__(
        self,
        overhead: float = 0.03,
        *,
        seconds_min: float = 60.0,
        seconds_max: float | None = None,
        failures_per_day: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        check_overhead(overhead)
        check_failures(failures_per_day)
        if not seconds_min >= 0:
            raise UsageError("seconds_min must not be negative", where=f"seconds_min={seconds_min!r}")
        if seconds_max is not None:
            check_positive("seconds_max", seconds_max)
            if seconds_max < seconds_min:
                raise UsageError("seconds_max is less than seconds_min", where=f"seconds_max={seconds_max!r}")
        self._overhead, self._failures_per_day = overhead, failures_per_day
        self._seconds_min, self._seconds_max = seconds_min, seconds_max
        self._clock = clock
        self._costs: Costs | None = None
        self._quiet: deque[float] = deque(maxlen=STEPS_MAX)
        self._busy: deque[float] = deque(maxlen=STEPS_MAX)
        self._busy_count = 0
        self._step_count = 0
        self._elapsed = 0.0
        self._last: tuple[int, float, float] | None = None
        """Step, time and stalls so far, when ``due`` was asked last."""
        self._was_busy = self._is_observed = False
        self._try_count = self._first_count = 0

    def follow(self, store: Followed) -> AutoInterval:
        """Learn from the commits of a store, from now on; returns itself."""
        self._costs = store.costs
        self._try_count = self._first_count = _tries_of(self._costs)
        return self

    def observe(self, step_seconds: float) -> None:
        """Say how long a step took, commits left out; without it ``due`` measures from call to call.

        Raises:
            UsageError: It is no time that a step can take.
        """
        check_positive("step_seconds", step_seconds)
        self._is_observed = True
        self._take(step_seconds)

    def due(self, step: SupportsIndex) -> bool:
        """Say whether to commit now; asked once after each step.

        Raises:
            UsageError: No store is followed.
        """
        number = check_step(step)
        costs = self._followed()
        now, stalled = self._clock.monotonic(), costs.stall_seconds
        if self._last is not None and number > self._last[0] and not self._is_observed:
            self._take(max(1e-9, (now - self._last[1]) - (stalled - self._last[2])))
        self._is_observed = False
        self._last = (number, now, stalled)
        self._was_busy = costs.is_busy
        if self._was_busy:
            return False
        advice = self.advice
        if advice is None:
            # Where commits fail from the first on, they are not tried more often than what succeeds.
            is_first = _tries_of(costs) == self._first_count
            return self._step_count >= FIRST_STEPS and (is_first or self._elapsed >= self._seconds_min)
        # Half a step too early is nearer than half a step too late.
        return self._elapsed >= advice.seconds - advice.step_seconds / 2

    @property
    def advice(self) -> Advice | None:
        """What it goes by; None until a commit was measured."""
        measured = self._followed().measured()
        steps = self._quiet or self._busy
        if measured is None or not steps:
            return None
        return advice_for(
            measured,
            median(steps),
            overhead=self._overhead,
            failures_per_day=self._failures_per_day,
            seconds_min=self._seconds_min,
            seconds_max=self._seconds_max,
        )

    def __repr__(self) -> str:
        return f"<ckstore.AutoInterval: {'nothing measured yet' if self._costs is None else self.advice}>"

    def _followed(self) -> Costs:
        if self._costs is None:
            raise UsageError("no store is followed", todo="ckstore.AutoInterval(...).follow(store)")
        return self._costs

    def _take(self, seconds: float) -> None:
        """Learn of a step."""
        costs = self._followed()
        if (count := _tries_of(costs)) != self._try_count:
            # It was begun since the last step: what came before belongs to an earlier one.
            self._try_count = count
            self._close_commit()
            self._elapsed, self._step_count, is_busy = 0.0, 0, True
        else:
            is_busy = self._was_busy or costs.is_busy
        self._elapsed += seconds
        self._step_count += 1
        if is_busy:
            self._busy.append(seconds)
            self._busy_count += 1
        else:
            self._quiet.append(seconds)
            self._close_commit()

    def _close_commit(self) -> None:
        """Take stock of the steps that ran while a commit was on its way."""
        if self._busy_count and self._quiet:
            times = list(self._busy)[-self._busy_count :]
            slower = median(times) - median(self._quiet)
            if not self._followed().has_newest_failed:
                self._followed().note_slowdown(max(0.0, slower) * self._busy_count)
        self._busy_count = 0


def _tries_of(costs: Costs) -> int:
    return costs.commit_count + costs.failed_count
