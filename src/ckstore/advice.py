"""How often to commit: from what a commit costs, how long a step takes, and how often a trainer fails.

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

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ckstore.errors import UsageError

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
