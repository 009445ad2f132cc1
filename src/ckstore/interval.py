"""How often to commit: ``AutoInterval`` tells a training loop when the next commit is due, ``advice_for`` computes it.

``Costs`` measures what the commits of a store cost. ``advice_for`` is pure arithmetic on these measurements:

- Overhead bound: the cost of a commit divided by the share of the time that commits may take (CheckFreq: Mohan,
  Phanishayee and Chidambaram, FAST 2021).
- Write bound: a commit every ``write_seconds`` at most, because more frequent ones would have to wait.
- Failure optimum: balances the cost of commits against the work that a failure loses. It is sqrt(2 C M) for a cost C
  and a mean time M between failures (Young, CACM 17(9), 1974), with the higher-order terms of Daly (FGCS 22(3), 2006).

Invariants:
- No commit is due while another one is being written.
- The advice never exceeds the overhead bound or the write rate. It says so if a part of the cost was not measured.
- Medians are used, so that a single slow step or commit changes nothing.
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
    "overhead": "a shorter interval would exceed the allowed overhead",
    "writing": "a shorter interval would leave no time to write the commits",
    "failures": "this is the optimum for the given failure rate",
    "seconds_min": "this is the minimum given by seconds_min",
    "seconds_max": "this is the maximum given by seconds_max",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Median costs of the last few commits.

    Attributes:
        commit_count: Number of commits measured. With few of them the other values are rough.
        stall_seconds: How long a commit blocks the trainer.
        write_seconds: Time from the return of ``commit_async`` until the checkpoint is durable; for ``commit``, the
            duration of the whole call.
        slowdown_seconds: How much longer the steps during one commit took in total; None if not measured.
    """

    commit_count: int
    stall_seconds: float
    write_seconds: float
    slowdown_seconds: float | None = None

    @property
    def cost_seconds(self) -> float:
        """Training time that one commit costs, as far as it was measured."""
        return self.stall_seconds + (self.slowdown_seconds or 0.0)


@dataclass(frozen=True, slots=True)
class Advice:
    """How often to commit, and what that costs. ``str(advice)`` gives it as sentences.

    Attributes:
        steps: Steps between two commits.
        seconds: Seconds of training between two commits.
        stall_share: Expected share of the training time that commits take.
        lost_seconds: Average work lost by a failure: half an interval plus the time until a commit is durable. If only
            the trainer dies, less is lost, because the saver still publishes a staged commit.
        lost_seconds_max: Largest work lost by a failure.
        lost_share: Expected share of the time lost by failures; None if no failure rate was given.
        reason: Which limit decided: ``"overhead"``, ``"writing"``, ``"failures"``, ``"seconds_min"`` or
            ``"seconds_max"``.
        step_seconds: Duration of a step, as given or measured.
        measured: The measured costs of commits.
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
        average, maximum = _duration(self.lost_seconds), _duration(self.lost_seconds_max)
        loss = f"a failure loses {average} of work on average, {maximum} at most"
        if self.lost_share is not None:
            loss += f": {_percent(self.lost_share)} of the time"
        is_complete = self.measured.slowdown_seconds is not None
        caveat = "" if is_complete else ", not counting the slowdown of steps, which was not measured"
        return (
            f"commit {often}, which is every {_duration(self.seconds)}: {_REASONS[self.reason]}. "
            f"Commits take {_percent(self.stall_share)} of the time{caveat}; {loss}."
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
        measured: Measured costs of commits.
        step_seconds: Duration of a step while no commit is running.
        overhead: Share of the time that commits may take.
        failures_per_day: Expected failures of the trainer per day; None: commit as often as the bounds allow.
        seconds_min: Shortest interval.
        seconds_max: Longest interval, even if it exceeds ``overhead``. The write bound still applies.

    Raises:
        UsageError: A number is out of range.
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
    """Return the interval that minimises the time lost to commits and failures together (Daly 2006).

    Args:
        cost_seconds: Training time that one commit costs.
        mtbf_seconds: Mean time between failures.
    """
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = cost_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * cost_seconds * mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_seconds


def _steps_of(seconds: float, step_seconds: float) -> int:
    """Return the smallest number of steps that takes at least this long."""
    # The tolerance absorbs the rounding error of the division.
    return max(1, math.ceil(seconds / step_seconds - 1e-6))


def median(values: Iterable[float]) -> float:
    """Return the median."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def check_positive(name: str, given: float) -> None:
    """Raise UsageError unless a number is positive and finite."""
    if not (given > 0 and math.isfinite(given)):
        raise UsageError(f"{name} must be a positive number", where=f"{name}={given!r}")


def check_overhead(overhead: float) -> None:
    """Raise UsageError unless ``overhead`` is more than 0 and at most 1."""
    if not 0 < overhead <= 1:
        raise UsageError(
            "overhead must be more than 0 and at most 1; it is the share of the time that commits may take",
            where=f"overhead={overhead!r}",
        )


def check_failures(failures_per_day: float | None) -> None:
    """Raise UsageError unless the rate is positive or None."""
    if failures_per_day is not None:
        check_positive("failures_per_day", failures_per_day)


def _duration(seconds: float) -> str:
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _percent(share: float) -> str:
    return f"{share:.2%}" if share < 0.1 else f"{share:.0%}"


COMMITS_MAX = 8
"""Commits in a median. Few, so that the median follows a change quickly, but enough to ignore three outliers."""

STEPS_MAX = 64
"""Steps in a median."""

FIRST_STEPS = 3
"""Steps before the first commit. It comes early so that a state that cannot be committed fails early."""


@dataclass(slots=True, eq=False)
class _MeasuredCommit:
    """One commit and its times. ``pending`` is None for a blocking commit, which sets ``seconds`` and ``receipt``."""

    step: int
    begun: float
    pending: Pending | None
    ended: float | None = None
    seconds: float = 0.0
    receipt: Receipt | None = None

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
        """Seconds until the commit was durable; None if it is not durable."""
        if self.pending is None:
            return self.seconds
        return None if self.ended is None or self.pending.receipt_or_none() is None else self.ended - self.begun


class Costs:
    """Measures what the commits of one handle cost (``Store.costs``)."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._commits: deque[_MeasuredCommit] = deque()
        self._dropped_seconds = 0.0
        self._slowdowns: deque[float] = deque(maxlen=COMMITS_MAX)
        self.commit_count = 0
        """Number of commits started."""
        self.failed_count = 0
        """Number of commits that raised inside ``commit`` or ``commit_async``."""

    def watch(self, pending: Pending) -> None:
        """Record a background commit."""
        if pending.is_skipped:
            return
        watched = _MeasuredCommit(pending.step, self._clock.monotonic(), pending)
        self._add(watched)
        clock = self._clock

        def note_end(_: Pending) -> None:
            watched.ended = clock.monotonic()

        pending.when_done(note_end)

    def note(self, step: int, seconds: float, receipt: Receipt | None = None) -> None:
        """Record a blocking commit that has finished."""
        self._add(_MeasuredCommit(step, self._clock.monotonic(), None, seconds=seconds, receipt=receipt))

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Count a failed commit if the block raises."""
        try:
            yield
        except BaseException:
            self.failed_count += 1
            raise

    def note_slowdown(self, seconds: float) -> None:
        """Record how much longer the steps during one commit took in total."""
        self._slowdowns.append(seconds)

    @property
    def is_busy(self) -> bool:
        """True while a background commit is being written."""
        return any(not each.is_done for each in self._commits)

    @property
    def newest(self) -> tuple[int, Pending | None] | None:
        """Step of the newest commit, and its Pending if it is a background commit; None if there was no commit."""
        return (self._commits[-1].step, self._commits[-1].pending) if self._commits else None

    @property
    def newest_receipt(self) -> Receipt | None:
        """Receipt of the newest commit if it was a blocking one."""
        return self._commits[-1].receipt if self._commits else None

    @property
    def has_newest_failed(self) -> bool:
        """True if the newest commit has failed. Its slowdown says nothing about other commits."""
        return bool(self._commits) and self._commits[-1].has_failed

    @property
    def stall_seconds(self) -> float:
        """Seconds that all commits together have blocked the trainer."""
        return self._dropped_seconds + sum(each.stall_seconds for each in self._commits)

    def measured(self) -> Measured | None:
        """Return the medians of the last durable commits, or None before the first one. Failed commits do not count."""
        durable = [
            (each.stall_seconds, seconds) for each in self._commits if (seconds := each.write_seconds) is not None
        ]
        if not durable:
            return None
        stalls, writes = zip(*durable[-COMMITS_MAX:], strict=True)
        slowdown = median(self._slowdowns) if self._slowdowns else None
        return Measured(len(stalls), median(stalls), median(writes), slowdown)

    def _add(self, watched: _MeasuredCommit) -> None:
        ended = [each for each in self._commits if each.is_done]
        self.commit_count += 1
        self._commits.append(watched)
        # Only finished commits are dropped, failed ones first, so that a backlog does not push out measurements.
        excess = max(0, len(self._commits) - COMMITS_MAX)
        for each in sorted(ended, key=lambda each: not each.has_failed)[:excess]:
            self._dropped_seconds += each.stall_seconds
            self._commits.remove(each)


class MeasuredStore(Protocol):
    """The part of a store that AutoInterval needs."""

    @property
    def costs(self) -> Costs:
        """Costs of its commits."""
        ...


class AutoInterval:
    """Tells a training loop when the next commit is due, so that commits take a bounded share of the time.

    It measures how long steps take, how long commits block the trainer, and how much commits slow down steps, and
    adapts the interval. The first commit is due after three steps, so that a state that cannot be committed fails
    early. ::

        auto = ckstore.AutoInterval(overhead=0.03).follow(store)
        for step in range(start, steps):
            train_one_step()
            if auto.due(step):
                store.commit_async(state, step)

    Args:
        overhead: Share of the time that commits may take.
        seconds_min: Shortest interval; commits also cost disk space.
        seconds_max: Longest interval, even if it exceeds ``overhead``; None: no limit.
        failures_per_day: Expected failures of the trainer per day. If given, the interval is at least the one that
            loses least to commits and failures together.
        clock: Source of time.

    Raises:
        UsageError: A number is out of range.
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
        self._undisturbed: deque[float] = deque(maxlen=STEPS_MAX)
        self._disturbed: deque[float] = deque(maxlen=STEPS_MAX)
        self._disturbed_count = 0
        self._step_count = 0
        self._elapsed = 0.0
        self._last: tuple[int, float, float] | None = None
        """Step, time and total stall at the last call of ``due``."""
        self._was_busy = self._is_observed = False
        self._try_count = self._first_count = 0

    def follow(self, store: MeasuredStore) -> AutoInterval:
        """Measure the commits of a store from now on. Returns ``self``."""
        self._costs = store.costs
        self._try_count = self._first_count = _attempts_of(self._costs)
        return self

    def observe(self, step_seconds: float) -> None:
        """Report the duration of a step, without time spent in commits. Otherwise ``due`` measures from call to call.

        Raises:
            UsageError: The duration is not positive.
        """
        check_positive("step_seconds", step_seconds)
        self._is_observed = True
        self._record_step(step_seconds)

    def due(self, step: SupportsIndex) -> bool:
        """Return True if a commit is due. Call it once after each step.

        Raises:
            UsageError: ``follow`` was not called.
        """
        number = check_step(step)
        costs = self._required_costs()
        now, stalled = self._clock.monotonic(), costs.stall_seconds
        if self._last is not None and number > self._last[0] and not self._is_observed:
            self._record_step(max(1e-9, (now - self._last[1]) - (stalled - self._last[2])))
        self._is_observed = False
        self._last = (number, now, stalled)
        self._was_busy = costs.is_busy
        if self._was_busy:
            return False
        advice = self.advice
        if advice is None:
            # If all commits have failed so far, retry at most every seconds_min.
            is_first = _attempts_of(costs) == self._first_count
            return self._step_count >= FIRST_STEPS and (is_first or self._elapsed >= self._seconds_min)
        # Round to the nearest step.
        return self._elapsed >= advice.seconds - advice.step_seconds / 2

    @property
    def advice(self) -> Advice | None:
        """The current advice; None until a commit was measured."""
        measured = self._required_costs().measured()
        steps = self._undisturbed or self._disturbed
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

    def _required_costs(self) -> Costs:
        if self._costs is None:
            raise UsageError("AutoInterval has no store", todo="call ckstore.AutoInterval(...).follow(store)")
        return self._costs

    def _record_step(self, seconds: float) -> None:
        """Record the duration of a step."""
        costs = self._required_costs()
        if (count := _attempts_of(costs)) != self._try_count:
            # A commit has started since the last step. Steps before it belong to an earlier commit.
            self._try_count = count
            self._close_commit()
            self._elapsed, self._step_count, is_busy = 0.0, 0, True
        else:
            is_busy = self._was_busy or costs.is_busy
        self._elapsed += seconds
        self._step_count += 1
        if is_busy:
            self._disturbed.append(seconds)
            self._disturbed_count += 1
        else:
            self._undisturbed.append(seconds)
            self._close_commit()

    def _close_commit(self) -> None:
        """Record the slowdown of the steps that ran during the last commit."""
        if self._disturbed_count and self._undisturbed:
            times = list(self._disturbed)[-self._disturbed_count :]
            slower = median(times) - median(self._undisturbed)
            if not self._required_costs().has_newest_failed:
                self._required_costs().note_slowdown(max(0.0, slower) * self._disturbed_count)
        self._disturbed_count = 0


def _attempts_of(costs: Costs) -> int:
    return costs.commit_count + costs.failed_count
