"""Measure what the commits of a store cost, and say in the training loop when the next one is due.

Invariants:
- Nothing is due while a commit is on its way: never more often than the saver can write.
- Medians decide: one step, or one commit, that took ten times as long as the others changes nothing.

How often to commit: from what a commit costs, how long a step takes, and how often a trainer fails.

Two bounds and one optimum. A bound on overhead divides the cost of a commit by the share of the time that commits
may take (CheckFreq: Mohan, Phanishayee and Chidambaram, FAST 2021). The time that writing takes is the other bound:
what is asked for more often is waited for. The optimum balances the cost of commits against the work that a failure
loses: sqrt(2 C M) for a cost C and a mean time M between failures (Young, CACM 17(9), 1974), with the terms of higher
order of Daly (FGCS 22(3), 2006). Pure: numbers in, numbers out.

Invariants:
- Nothing advised is more often than the saver can write, or costs more than the bound; what was not measured of that
  cost is said to be missing.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, SupportsIndex

from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.config import check_step
from ckstore.errors import UsageError

if TYPE_CHECKING:
    from ckstore.background.pending import Pending
    from ckstore.results import Receipt


DAY_SECONDS = 86_400.0

Reason = Literal["overhead", "writing", "failures", "seconds_min", "seconds_max"]

_REASONS: dict[Reason, str] = {
    "overhead": "more often would cost more than the overhead allowed",
    "writing": "more often cannot be written",
    "failures": "the optimum for this rate of failures",
    "seconds_min": "more often is not wanted",
    "seconds_max": "more rarely is not wanted",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """What a commit costs; medians over the last few.

    Attributes:
        commit_count: How many were measured; what follows is guesswork for few.
        stall_seconds: How long it keeps the trainer waiting.
        write_seconds: From its return until it is durable; for ``commit``, all of it.
        slowdown_seconds: What the steps that ran meanwhile took longer, all together; None: nobody has measured that.
    """

    commit_count: int
    stall_seconds: float
    write_seconds: float
    slowdown_seconds: float | None = None

    @property
    def cost_seconds(self) -> float:
        """What a commit takes from training, as far as that was measured."""
        return self.stall_seconds + (self.slowdown_seconds or 0.0)


@dataclass(frozen=True, slots=True)
class Advice:
    """How often to commit, and what that costs; ``str`` of it is a sentence or two.

    Attributes:
        steps: Steps between two commits.
        seconds: Seconds of training between two commits: of that many steps.
        stall_share: Expected share of the time of training that commits take.
        lost_seconds: Work that a failure loses, on average: half an interval, and what was not durable yet. Where
            only the trainer dies, what was staged is published all the same, and less is lost.
        lost_seconds_max: The most that a failure loses.
        lost_share: Expected share of the time that failures lose; None where no rate was given.
        reason: What decided: ``"overhead"``, ``"writing"``, ``"failures"``, ``"seconds_min"`` or ``"seconds_max"``.
        step_seconds: A step, as it was given or measured.
        measured: What commits have cost.
    """

    steps: int
    seconds: float
    stall_share: float
    lost_seconds: float
    lost_seconds_max: float
    lost_share: float | None
    reason: Reason
    step_seconds: float
    measured: Measured

    def __str__(self) -> str:
        often = "every step" if self.steps == 1 else f"every {self.steps} steps"
        loss = f"a failure loses {_span(self.lost_seconds)} of work on average, {_span(self.lost_seconds_max)} at most"
        if self.lost_share is not None:
            loss += f": {_share(self.lost_share)} of the time"
        is_known = self.measured.slowdown_seconds is not None
        unknown = "" if is_known else ", and what steps lose meanwhile is not measured"
        return (
            f"commit {often}, which is every {_span(self.seconds)}: {_REASONS[self.reason]}. "
            f"Commits take {_share(self.stall_share)} of the time{unknown}; {loss}."
        )


def advice_for(
    measured: Measured,
    step_seconds: float,
    *,
    overhead: float = 0.03,
    failures_per_day: float | None = None,
    seconds_min: float = 0.0,
    seconds_max: float | None = None,
) -> Advice:
    """Return how often to commit.

    Args:
        measured: What commits have cost.
        step_seconds: How long a step takes that no commit disturbs.
        overhead: The share of the time that commits may take.
        failures_per_day: How often the trainer is expected to fail; None: commit as often as the bounds allow.
        seconds_min: Not more often than this.
        seconds_max: Not more rarely than this, whatever it costs; what cannot be written so often is not.

    Raises:
        UsageError: A number is none that this could be.
    """
    check_positive("step_seconds", step_seconds)
    check_overhead(overhead)
    check_failures(failures_per_day)
    bounds: dict[Reason, float] = {
        "overhead": measured.cost_seconds / overhead,
        "seconds_min": seconds_min,
        "writing": measured.write_seconds,
    }
    mtbf = math.inf
    if failures_per_day is not None:
        mtbf = DAY_SECONDS / failures_per_day
        bounds["failures"] = optimal_seconds(measured.cost_seconds, mtbf)
    reason = max(bounds, key=lambda name: bounds[name])
    wanted = bounds[reason]
    steps = _steps_of(wanted, step_seconds)
    if seconds_max is not None and wanted > seconds_max:
        writing_steps = _steps_of(measured.write_seconds, step_seconds)
        steps = max(1, math.floor(seconds_max / step_seconds))
        reason = "seconds_max" if steps >= writing_steps else "writing"
        steps = max(steps, writing_steps)
    seconds = steps * step_seconds
    lost = seconds / 2 + measured.write_seconds
    return Advice(
        steps=steps,
        seconds=seconds,
        stall_share=measured.cost_seconds / (seconds + measured.cost_seconds),
        lost_seconds=lost,
        lost_seconds_max=seconds + measured.write_seconds,
        lost_share=None if failures_per_day is None else min(1.0, lost / mtbf),
        reason=reason,
        step_seconds=step_seconds,
        measured=measured,
    )


def optimal_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the time of work between two commits that loses least to commits and failures together (Daly 2006).

    Args:
        cost_seconds: What a commit takes from training.
        mtbf_seconds: Mean time between failures.
    """
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = cost_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * cost_seconds * mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


def _steps_of(seconds: float, step_seconds: float) -> int:
    """Return how many steps take at least as long."""
    # A hair less than a whole step more is the inaccuracy of a division.
    return max(1, math.ceil(seconds / step_seconds - 1e-6))


def median(values: Iterable[float]) -> float:
    """Return the middle of some values; of two in the middle, the mean."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def check_positive(name: str, given: float) -> None:
    """Raise UsageError unless a number is positive and finite."""
    if not (given > 0 and math.isfinite(given)):
        raise UsageError(f"{name} must be a positive number", where=f"{name}={given!r}")


def check_overhead(overhead: float) -> None:
    """Raise UsageError unless it is a share of the time."""
    if not 0 < overhead <= 1:
        raise UsageError(
            "overhead is the share of the time that commits may take: more than 0, at most 1",
            where=f"overhead={overhead!r}",
        )


def check_failures(failures_per_day: float | None) -> None:
    """Raise UsageError unless it is a rate, or None."""
    if failures_per_day is not None:
        check_positive("failures_per_day", failures_per_day)


def _span(seconds: float) -> str:
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _share(share: float) -> str:
    return f"{share:.2%}" if share < 0.1 else f"{share:.0%}"


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
