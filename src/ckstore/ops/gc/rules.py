"""Apply retention rules to the entries of a run. Pure: the result is data, and nothing is read or changed.

Invariants:
- Rules are combined with OR. A kept entry lists its reasons; a deleted entry lists, for each rule, why it did not
  match.
- The newest complete entry is kept. If an entry is incomplete without a record of it, nothing of its run is deleted.
- A deleted entry of a step is older than every kept entry of that step, so a step never changes to an older state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ckstore.display import repr_of_summary
from ckstore.ops.gc.policy import PERIODS, Best, Retention, span_words

NANOSECONDS = 10**9


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint of a run, as the rules see it.

    Args:
        seq: Its number in the run.
        step: The trainer's step.
        time_ns: When it was committed.
        metrics: As passed to commit.
        tags: Its tags.
        is_archival: It was restored from the trash.
        is_partial: A repair has recorded that some of its tensors are lost.
        problem: Why it is incomplete; empty if it is complete.
        needed: Why points of the journal need it; empty if the newest ones do not.
        base: The seq of the checkpoint that must stay with it, because it is in replay form; None: it is stored whole.
    """

    seq: int
    step: int
    time_ns: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    is_archival: bool = False
    is_partial: bool = False
    problem: str = ""
    needed: str = ""
    base: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one entry is kept, and why."""

    seq: int
    step: int
    time_ns: int
    is_kept: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The verdicts on all entries of a run, newest first.

    Attributes:
        run: The run.
        rules: The policy in words; empty without a policy.
        verdicts: One per entry.
        blocked: Why nothing of the run may be deleted; empty if it may.
        notes: What the rules could not evaluate.
    """

    run: str
    rules: str
    verdicts: tuple[Verdict, ...]
    blocked: str = ""
    notes: tuple[str, ...] = ()

    __repr__ = repr_of_summary

    @property
    def kept(self) -> tuple[Verdict, ...]:
        """Entries that stay."""
        return tuple(verdict for verdict in self.verdicts if verdict.is_kept)

    @property
    def dropped(self) -> tuple[Verdict, ...]:
        """Entries to delete, newest first."""
        return tuple(verdict for verdict in self.verdicts if not verdict.is_kept)


def plan_run(
    run: str, entries: Iterable[Entry], policy: Retention | None, *, now_ns: int, blocked: str = ""
) -> RunPlan:
    """Decide which checkpoints of a run are kept.

    Args:
        run: The run.
        entries: All entries in place.
        policy: The rules; None: keep everything.
        now_ns: The current time. Entries with a later time are kept.
        blocked: Why nothing of this run may be deleted.
    """
    ordered = sorted(entries, key=lambda entry: entry.seq, reverse=True)
    blocked = blocked or next((f"seq {entry.seq}: {entry.problem}" for entry in ordered if entry.problem), "")
    rules = "" if policy is None else str(policy)
    if policy is None or not policy.has_checkpoint_rules or blocked:
        reason = f"nothing of this run is deleted: {blocked}" if blocked else "there is no rule"
        verdicts = tuple(Verdict(entry.seq, entry.step, entry.time_ns, True, (reason,)) for entry in ordered)
        return RunPlan(run, rules, verdicts, blocked)
    run_entries = _RunEntries(ordered, now_ns)
    run_entries.keep_always()
    for name, rule in _rules_of(policy):
        run_entries.apply(name, rule)
    run_entries.keep_what_kept_ones_need()
    return RunPlan(run, rules, tuple(run_entries.verdicts()), notes=tuple(run_entries.notes(policy)))


class _RunEntries:
    """The entries of a run, newest first, with the reasons for and against keeping each."""

    def __init__(self, ordered: Sequence[Entry], now_ns: int) -> None:
        self.ordered = ordered
        self.now_ns = now_ns
        self.counted = [entry for entry in ordered if not (entry.is_archival or entry.is_partial)]
        """Entries that rules count, without archival and partial ones."""
        self.by_time = sorted(
            (entry for entry in self.counted if entry.time_ns <= now_ns),
            key=lambda entry: (entry.time_ns, entry.seq),
            reverse=True,
        )
        """By time, newest first, without times in the future."""
        self._for: dict[int, list[str]] = {entry.seq: [] for entry in ordered}
        self._against: dict[int, list[str]] = {entry.seq: [] for entry in ordered}

    def keep_always(self) -> None:
        """Keep entries that no rule may delete."""
        newest = next(iter(self.counted), None)
        for entry in self.ordered:
            reasons = self._for[entry.seq]
            if entry is newest:
                reasons.append("the newest")
            if entry.needed:
                reasons.append(entry.needed)
            reasons += [f"tag {tag}" for tag in entry.tags]
            if entry.is_archival:
                reasons.append("restored by undelete")
            if entry.is_partial:
                reasons.append("partial: only `ckstore delete` deletes it")
            if entry.time_ns > self.now_ns:
                reasons.append("its time is in the future")

    def apply(self, name: str, rule: _Rule) -> None:
        """Evaluate one rule for every entry."""
        kept, why_not = rule(self)
        for entry in self.ordered:
            if entry.seq in kept:
                self._for[entry.seq].append(f"{name}: {kept[entry.seq]}" if kept[entry.seq] else name)
            else:
                self._against[entry.seq].append(f"{name}: {why_not(entry)}")

    def keep_what_kept_ones_need(self) -> None:
        """Keep bases of kept entries in replay form, and newer entries of kept steps, until none is missing."""
        kept_count = -1
        while kept_count != (kept_count := sum(map(bool, self._for.values()))):
            self._keep_newer_of_kept_steps()
            self._keep_bases()

    def _keep_bases(self) -> None:
        """Keep the base of every kept entry in replay form."""
        for entry in self.ordered:
            if self._for[entry.seq] and entry.base in self._for and not self._for[entry.base]:
                self._for[entry.base].append(f"step {entry.step}, which is kept in replay form, begins from it")

    def _keep_newer_of_kept_steps(self) -> None:
        """Keep every entry that is newer than a kept entry of the same step."""
        oldest_kept: dict[int, int] = {}
        for entry in self.ordered:
            if self._for[entry.seq]:
                oldest_kept[entry.step] = entry.seq
        for entry in self.ordered:
            seq = oldest_kept.get(entry.step)
            if seq is not None and seq < entry.seq and not self._for[entry.seq]:
                self._for[entry.seq].append(f"seq {seq}, an older entry of this step, is kept")

    def verdicts(self) -> Iterable[Verdict]:
        """Yield the verdict on each entry."""
        for entry in self.ordered:
            is_kept = bool(self._for[entry.seq])
            reasons = self._for[entry.seq] if is_kept else self._against[entry.seq]
            yield Verdict(entry.seq, entry.step, entry.time_ns, is_kept, tuple(reasons))

    def notes(self, policy: Retention) -> Iterable[str]:
        """Yield what the rules could not evaluate."""
        for best in policy.best:
            if best.contradicts_name:
                other = f"{best.metric}:{best.count}"
                yield f"keep_best {best}: the metric's name implies the opposite order; {other} uses that order"
            unrated = [entry for entry in self.counted if _value(entry, best) is None]
            if unrated and len(unrated) == len(self.counted):
                names = sorted({name for entry in self.counted for name in entry.metrics})
                existing = f"existing metrics: {', '.join(names)}" if names else "no checkpoint has a metric"
                if best.metric in names:
                    yield f"keep_best {best}: every value of this metric is NaN, so all are kept"
                else:
                    yield f"keep_best {best}: no checkpoint has this metric, so all are kept; {existing}"
            elif unrated:
                yield f"keep_best {best}: without the metric or with NaN, and therefore kept: {len(unrated)}"
        tags = sorted({tag for entry in self.ordered for tag in entry.tags})
        existing = f"existing tags: {', '.join(tags)}" if tags else "no checkpoint has a tag"
        suffix = ", so all are kept" if _matches_no_tag(policy, self.ordered) else ""
        for pattern in policy.keep_tag:
            if not _with_tag(pattern, self.ordered):
                yield f"keep_tag {pattern}: no checkpoint has such a tag{suffix}; {existing}"


_RuleResult = tuple[dict[int, str], Callable[[Entry], str]]
"""The seqs that a rule keeps, each with a detail or "", and a function that says why it does not keep an entry."""

_Rule = Callable[["_RunEntries"], _RuleResult]


def _rules_of(policy: Retention) -> Iterable[tuple[str, _Rule]]:
    if policy.keep_last is not None:
        yield f"keep_last {policy.keep_last}", _keep_last(policy.keep_last)
    if policy.keep_every is not None:
        yield f"keep_every {policy.keep_every}", _keep_every(policy.keep_every)
    if policy.within_seconds is not None:
        yield f"keep_within {span_words(policy.within_seconds)}", _keep_within(policy.within_seconds)
    for rule, period_of in PERIODS.items():
        count = getattr(policy, rule)
        if count is not None:
            yield f"{rule} {count}", _keep_periods(count, period_of, policy.zone_seconds)
    for best in policy.best:
        yield f"keep_best {best}", _keep_best(best)
    for pattern in policy.keep_tag:
        yield f"keep_tag {pattern}", _keep_tag(pattern, policy)


def _keep_last(count: int) -> _Rule:
    def keep_newest(run: _RunEntries) -> _RuleResult:
        ranks = {entry.seq: rank for rank, entry in enumerate(run.counted, start=1)}
        kept = {entry.seq: "" for entry in run.counted[:count]}
        return kept, lambda entry: f"number {ranks.get(entry.seq, 0)} from the newest"

    return keep_newest


def _keep_every(steps: int) -> _Rule:
    def keep_newest_of_each_multiple(run: _RunEntries) -> _RuleResult:
        newest: dict[int, int] = {}
        for entry in run.counted:
            if entry.step % steps == 0:
                # A step always means its newest entry.
                newest.setdefault(entry.step, entry.seq)

        def why_not(entry: Entry) -> str:
            if entry.step in newest:
                return f"seq {newest[entry.step]} is a newer entry of step {entry.step}"
            return f"step {entry.step} is not a multiple"

        return dict.fromkeys(newest.values(), ""), why_not

    return keep_newest_of_each_multiple


def _keep_within(seconds: float) -> _Rule:
    def keep_recent(run: _RunEntries) -> _RuleResult:
        past_entries = [entry for entry in run.counted if entry.time_ns <= run.now_ns]
        if not past_entries:
            return {}, lambda entry: "every time is in the future"
        # Measure from the newest checkpoint, not from now, so that a paused run loses nothing. The newest has the
        # highest seq: a clock that was once ahead must not make all later checkpoints look old.
        newest_ns = past_entries[0].time_ns
        first_ns = newest_ns - round(seconds * NANOSECONDS)
        kept = {entry.seq: "" for entry in past_entries if entry.time_ns >= first_ns}
        return kept, lambda entry: f"{span_words((newest_ns - entry.time_ns) // NANOSECONDS)} older than the newest"

    return keep_recent


def _keep_periods(count: int, period_of: Callable[[int], str], zone_seconds: int) -> _Rule:
    def keep_newest_of_each_period(run: _RunEntries) -> _RuleResult:
        newest: dict[str, int] = {}
        for entry in run.by_time:
            newest.setdefault(period_of(entry.time_ns // NANOSECONDS + zone_seconds), entry.seq)
        kept = {seq: period for period, seq in list(newest.items())[:count]}

        def why_not(entry: Entry) -> str:
            period = period_of(entry.time_ns // NANOSECONDS + zone_seconds)
            if newest.get(period) in kept:
                return f"seq {newest[period]} is the newest of {period}"
            return f"{period} is not one of the last {count}"

        return kept, why_not

    return keep_newest_of_each_period


def _keep_best(best: Best) -> _Rule:
    def keep_best_values(run: _RunEntries) -> _RuleResult:
        kept = {entry.seq: "it lacks the metric or has NaN" for entry in run.counted if _value(entry, best) is None}
        rated = [(value, entry.seq) for entry in run.counted if (value := _value(entry, best)) is not None]
        # Of equal values the newer is better: the list is newest first, and the sort is stable.
        rated.sort(key=lambda pair: pair[0], reverse=best.order == "max")
        words = {seq: f"{value:.6g} is number {rank}" for rank, (value, seq) in enumerate(rated, start=1)}
        kept |= {seq: words[seq] for _, seq in rated[: best.count]}
        return kept, lambda entry: words.get(entry.seq, "not compared")

    return keep_best_values


def _value(entry: Entry, best: Best) -> float | None:
    value = entry.metrics.get(best.metric, math.nan)
    return None if math.isnan(value) else value


def _keep_tag(pattern: str, policy: Retention) -> _Rule:
    def keep_matching_tags(run: _RunEntries) -> _RuleResult:
        if _matches_no_tag(policy, run.ordered):
            kept = {entry.seq: "no checkpoint has such a tag" for entry in run.counted}
        else:
            kept = {entry.seq: "" for entry in _with_tag(pattern, run.ordered)}
        return kept, lambda entry: "no matching tag"

    return keep_matching_tags


def _with_tag(pattern: str, entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if any(fnmatchcase(tag, pattern) for tag in entry.tags)]


def _matches_no_tag(policy: Retention, entries: Sequence[Entry]) -> bool:
    """Return whether a policy has only tag rules and no entry has such a tag. It then keeps everything."""
    is_of_tags_only = not policy.to_config().keys() - {"keep_tag", "keep_journal", "time_zone"}
    return is_of_tags_only and not any(_with_tag(pattern, entries) for pattern in policy.keep_tag)
