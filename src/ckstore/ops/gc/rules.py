"""From entries and rules to the plan of what is kept and what goes: data, and nothing is done here.

Invariants:
- Rules are ORed; every kept entry has its reasons, every dropped one has, from each rule, why not.
- The newest entry that is whole is kept. An entry that is not whole counts for nothing, and nothing of its run goes.
- What is dropped of a step is older than all that is kept of it: a step never comes to mean something older.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ckstore.ops.gc.policy import PERIODS, Best, Retention, span_words

NANOSECONDS = 10**9


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint of a run, as rules see it.

    Args:
        seq: Its number in the run.
        step: The trainer's step.
        time_ns: When it was committed.
        metrics: As given to commit.
        tags: Names that people gave it.
        is_archival: It was brought back from the trash.
        is_partial: Some of its tensors are lost, and that is known.
        problem: Why it is not whole; empty where it is.
    """

    seq: int
    step: int
    time_ns: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    is_archival: bool = False
    is_partial: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one entry, and why."""

    seq: int
    step: int
    time_ns: int
    is_kept: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What becomes of the entries of a run, the newest first.

    Attributes:
        run: The run.
        rules: The policy in words; empty where there is none.
        verdicts: One for each entry.
        blocked: Why nothing of it may go; empty where nothing speaks against it.
        notes: What the rules could not judge.
    """

    run: str
    rules: str
    verdicts: tuple[Verdict, ...]
    blocked: str = ""
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[Verdict, ...]:
        """The entries that stay."""
        return tuple(verdict for verdict in self.verdicts if verdict.is_kept)

    @property
    def dropped(self) -> tuple[Verdict, ...]:
        """The entries that go, the newest first."""
        return tuple(verdict for verdict in self.verdicts if not verdict.is_kept)


def plan_run(
    run: str, entries: Iterable[Entry], policy: Retention | None, *, now_ns: int, blocked: str = ""
) -> RunPlan:
    """Decide what of a run is kept.

    Args:
        run: The run.
        entries: All that is in place of it.
        policy: The rules; None: everything is kept.
        now_ns: What the clock says; later times are not believed.
        blocked: Why nothing of this run may go.
    """
    ordered = sorted(entries, key=lambda entry: entry.seq, reverse=True)
    blocked = blocked or next((f"seq {entry.seq}: {entry.problem}" for entry in ordered if entry.problem), "")
    rules = "" if policy is None else str(policy)
    if policy is None or blocked:
        reason = f"nothing of this run goes: {blocked}" if blocked else "no rule is given"
        verdicts = tuple(Verdict(entry.seq, entry.step, entry.time_ns, True, (reason,)) for entry in ordered)
        return RunPlan(run, rules, verdicts, blocked)
    judged = _Judged(ordered, now_ns)
    judged.keep_always()
    for name, keep in _rules_of(policy):
        judged.apply(name, keep)
    judged.keep_newer_of_kept_steps()
    return RunPlan(run, rules, tuple(judged.verdicts()), notes=tuple(judged.notes(policy)))


class _Judged:
    """The entries of a run, newest first, with what speaks for and against each."""

    def __init__(self, ordered: Sequence[Entry], now_ns: int) -> None:
        self.ordered = ordered
        self.now_ns = now_ns
        self.rated = [entry for entry in ordered if not (entry.is_archival or entry.is_partial)]
        """What rules count: archival entries are no part of the history that goes on, partial ones are not whole."""
        self.timed = sorted(
            (entry for entry in self.rated if entry.time_ns <= now_ns),
            key=lambda entry: (entry.time_ns, entry.seq),
            reverse=True,
        )
        """By time, the newest first; times in the future are not believed."""
        self._for: dict[int, list[str]] = {entry.seq: [] for entry in ordered}
        self._against: dict[int, list[str]] = {entry.seq: [] for entry in ordered}

    def keep_always(self) -> None:
        """Keep what no rule may drop."""
        newest = next(iter(self.rated), None)
        for entry in self.ordered:
            reasons = self._for[entry.seq]
            if entry is newest:
                reasons.append("the newest")
            reasons += [f"tag {tag}" for tag in entry.tags]
            if entry.is_archival:
                reasons.append("brought back by undelete")
            if entry.is_partial:
                reasons.append("partial: what is left of it goes by hand only")
            if entry.time_ns > self.now_ns:
                reasons.append("its time lies in the future")

    def apply(self, name: str, rule: _Rule) -> None:
        """Let one rule speak of every entry that it looks at."""
        kept, why_not = rule(self)
        for entry in self.ordered:
            if entry.seq in kept:
                self._for[entry.seq].append(f"{name}: {kept[entry.seq]}" if kept[entry.seq] else name)
            else:
                self._against[entry.seq].append(f"{name}: {why_not(entry)}")

    def keep_newer_of_kept_steps(self) -> None:
        """Keep every entry that is newer than a kept one of its step."""
        oldest_kept: dict[int, int] = {}
        for entry in self.ordered:
            if self._for[entry.seq]:
                oldest_kept[entry.step] = entry.seq
        for entry in self.ordered:
            seq = oldest_kept.get(entry.step)
            if seq is not None and seq < entry.seq and not self._for[entry.seq]:
                self._for[entry.seq].append(f"seq {seq}, an older entry of this step, is kept")

    def verdicts(self) -> Iterable[Verdict]:
        """Yield what becomes of every entry."""
        for entry in self.ordered:
            is_kept = bool(self._for[entry.seq])
            reasons = self._for[entry.seq] if is_kept else self._against[entry.seq]
            yield Verdict(entry.seq, entry.step, entry.time_ns, is_kept, tuple(reasons))

    def notes(self, policy: Retention) -> Iterable[str]:
        """Yield what the rules could not judge."""
        for best in policy.best:
            if best.contradicts_name:
                yield f"keep_best {best}: its name says the opposite; write {best.metric}:{best.count} if you mean that"
            unrated = [entry for entry in self.rated if _value(entry, best) is None]
            if unrated and len(unrated) == len(self.rated):
                known = sorted({name for entry in self.rated for name in entry.metrics})
                there = f"metrics there are: {', '.join(known)}" if known else "no metric was ever recorded"
                if best.metric in known:
                    yield f"keep_best {best}: this metric has only NaN, so all are kept"
                else:
                    yield f"keep_best {best}: no checkpoint has this metric, so all are kept; {there}"
            elif unrated:
                yield f"keep_best {best}: {len(unrated)} checkpoints lack the metric or have NaN, and are kept"
        known = sorted({tag for entry in self.ordered for tag in entry.tags})
        there = f"tags there are: {', '.join(known)}" if known else "no checkpoint has a tag"
        kept = ", so all are kept" if _is_mistyped(policy, self.ordered) else ""
        for pattern in policy.keep_tag:
            if not _with_tag(pattern, self.ordered):
                yield f"keep_tag {pattern}: no checkpoint has such a tag{kept}; {there}"


_Rule = Callable[["_Judged"], tuple[dict[int, str], Callable[[Entry], str]]]
"""Returns the seqs that it keeps, with what there is to say beyond the rule's name; and what speaks against another."""


def _rules_of(policy: Retention) -> Iterable[tuple[str, _Rule]]:
    if policy.keep_last is not None:
        yield f"keep_last {policy.keep_last}", _last(policy.keep_last)
    if policy.keep_every is not None:
        yield f"keep_every {policy.keep_every}", _every(policy.keep_every)
    if policy.within_seconds is not None:
        yield f"keep_within {span_words(policy.within_seconds)}", _within(policy.within_seconds)
    for rule, period_of in PERIODS.items():
        count = getattr(policy, rule)
        if count is not None:
            yield f"{rule} {count}", _periods(count, period_of, policy.zone_seconds)
    for best in policy.best:
        yield f"keep_best {best}", _best(best)
    for pattern in policy.keep_tag:
        yield f"keep_tag {pattern}", _tagged(pattern, policy)


def _last(count: int) -> _Rule:
    def judge(judged: _Judged) -> tuple[dict[int, str], Callable[[Entry], str]]:
        ranks = {entry.seq: rank for rank, entry in enumerate(judged.rated, start=1)}
        kept = {entry.seq: "" for entry in judged.rated[:count]}
        return kept, lambda entry: f"number {ranks.get(entry.seq, 0)} from the newest"

    return judge


def _every(steps: int) -> _Rule:
    def judge(judged: _Judged) -> tuple[dict[int, str], Callable[[Entry], str]]:
        newest: dict[int, int] = {}
        for entry in judged.rated:
            if entry.step % steps == 0:
                # An older entry of the step is not what the step means.
                newest.setdefault(entry.step, entry.seq)

        def why_not(entry: Entry) -> str:
            if entry.step in newest:
                return f"seq {newest[entry.step]} is a newer entry of step {entry.step}"
            return f"step {entry.step} is no multiple"

        return dict.fromkeys(newest.values(), ""), why_not

    return judge


def _within(seconds: float) -> _Rule:
    def judge(judged: _Judged) -> tuple[dict[int, str], Callable[[Entry], str]]:
        believed = [entry for entry in judged.rated if entry.time_ns <= judged.now_ns]
        if not believed:
            return {}, lambda entry: "no time is to be believed"
        # From the newest checkpoint, not from now: a run that stands still loses nothing. The newest is the one with
        # the highest seq: a clock that was ahead once must not make all later ones look old.
        newest_ns = believed[0].time_ns
        first_ns = newest_ns - round(seconds * NANOSECONDS)
        kept = {entry.seq: "" for entry in believed if entry.time_ns >= first_ns}
        return kept, lambda entry: f"{span_words((newest_ns - entry.time_ns) // NANOSECONDS)} older than the newest"

    return judge


def _periods(count: int, period_of: Callable[[int], str], zone_seconds: int) -> _Rule:
    def judge(judged: _Judged) -> tuple[dict[int, str], Callable[[Entry], str]]:
        newest: dict[str, int] = {}
        for entry in judged.timed:
            newest.setdefault(period_of(entry.time_ns // NANOSECONDS + zone_seconds), entry.seq)
        kept = {seq: period for period, seq in list(newest.items())[:count]}

        def why_not(entry: Entry) -> str:
            period = period_of(entry.time_ns // NANOSECONDS + zone_seconds)
            if newest.get(period) in kept:
                return f"seq {newest[period]} is the newest of {period}"
            return f"{period} is none of the last {count}"

        return kept, why_not

    return judge


def _best(best: Best) -> _Rule:
    def judge(judged: _Judged) -> tuple[dict[int, str], Callable[[Entry], str]]:
        kept = {entry.seq: "it has no value to compare" for entry in judged.rated if _value(entry, best) is None}
        rated = [(value, entry.seq) for entry in judged.rated if (value := _value(entry, best)) is not None]
        # Of equals the newer one is the better: the list is newest first, and sorting keeps that order.
        rated.sort(key=lambda pair: pair[0], reverse=best.order == "max")
        words = {seq: f"{value:.6g} is number {rank}" for rank, (value, seq) in enumerate(rated, start=1)}
        kept |= {seq: words[seq] for _, seq in rated[: best.count]}
        return kept, lambda entry: words.get(entry.seq, "not rated")

    return judge


def _value(entry: Entry, best: Best) -> float | None:
    value = entry.metrics.get(best.metric, math.nan)
    return None if math.isnan(value) else value


def _tagged(pattern: str, policy: Retention) -> _Rule:
    def judge(judged: _Judged) -> tuple[dict[int, str], Callable[[Entry], str]]:
        if _is_mistyped(policy, judged.ordered):
            kept = {entry.seq: "no checkpoint has such a tag" for entry in judged.rated}
        else:
            kept = {entry.seq: "" for entry in _with_tag(pattern, judged.ordered)}
        return kept, lambda entry: "no such tag"

    return judge


def _with_tag(pattern: str, entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if any(fnmatchcase(tag, pattern) for tag in entry.tags)]


def _is_mistyped(policy: Retention, entries: Sequence[Entry]) -> bool:
    """Whether a policy has rules for tags only, and no entry has such a tag: then it says nothing of what may go."""
    is_of_tags_only = not policy.to_config().keys() - {"keep_tag", "time_zone"}
    return is_of_tags_only and not any(_with_tag(pattern, entries) for pattern in policy.keep_tag)
