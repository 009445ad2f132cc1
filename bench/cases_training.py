"""What training with real forward and backward passes loses to commits in the background."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from bench import background, histories, machine
from bench.cases_stall import VARIANTS, if_possible
from bench.floor import Floor
from bench.measure import Participant, Result, Sample, interleave
from bench.workbench import Bench, facts_of, open_store

COMMITS, TOKENS = 6, 64
"""In a round, and of a batch: steps as short as they make sense, so that what a commit costs is seen best."""

MICRO_BATCHES, COMMITS_OF_LONG_STEPS = 8, 3
"""Of which gradients are accumulated for one step: a short one still, for a model of this size. And commits a round."""

QUIET_STEPS = 2
"""Before and after every commit: a commit is held against them."""

STEPS_MAX = 3
"""Beside one commit: what is not written by then is waited for, and that counts."""

Trained = TypeVar("Trained")

NOTHING = "nothing"
"""In place of a commit: what comes out then is what the measurement is off by."""

FLOORS = {"one copy, one hash": "", "one copy, one hash, one write": "write", "one copy, one hash, one coding": "code"}
"""In place of a commit: about the least that any takes, that a durable one takes, and one that codes by ``fast``."""


def stall_guarded(bench: Bench) -> Result:
    """Train with real forward and backward passes, commit behind the guard of the optimizer, and look what is lost."""
    cores = len(os.sched_getaffinity(0))
    half = max(1, cores // 2)
    plan = {cores: VARIANTS, half: (*VARIANTS, NOTHING, *FLOORS)}
    result = _compare(bench, "stall_guarded", plan, _train, commits=COMMITS)
    result.notes.append(
        f"a commit, as many steps as it takes until it is written, {STEPS_MAX} at most, and the wait for what is left "
        f"then, are held against the {QUIET_STEPS} steps before and the {QUIET_STEPS} after; again and again"
    )
    return result


def stall_accumulation(bench: Bench) -> Result:
    """Train by steps that accumulate gradients, which are longer, and look at the batches beside each commit."""
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    plan = {half: (*VARIANTS, NOTHING, "one copy, one hash", "one copy, one hash, one write")}
    result = _compare(bench, "stall_accumulation", plan, _accumulate, commits=COMMITS_OF_LONG_STEPS)
    result.notes.append(
        f"a step is {MICRO_BATCHES} batches forward and backward, and one of the optimizer; batches from the commit "
        "until one after it is written are held against those of the same step that follow, and of the step before"
    )
    return result


def _compare(
    bench: Bench, case: str, plan: Mapping[int, Sequence[str]], train: Callable[..., Sample], *, commits: int
) -> Result:
    """Compare what training loses.

    Args:
        bench: Where, and how large.
        case: Its name.
        plan: Threads that train -> what is done beside.
        train: Takes a sample.
        commits: Of each participant in a round.
    """
    cores = len(os.sched_getaffinity(0))
    tokens = 16 if bench.is_small else TOKENS
    loop = background.Loop(bench.nbytes, tokens=tokens)
    nbytes = histories.nbytes_of([loop.model.state_dict(), loop.optimizer.state_dict()])
    result = Result(case, "s a step", is_higher_better=False)
    result.setting = {
        "state_nbytes": nbytes,
        "rounds": bench.rounds,
        "pairs": commits,
        "cores": cores,
        "tokens": tokens,
    }
    result.columns = ("quiet_seconds", "lost_share", "held_up_share", "saver_cpu_seconds", "return_ms")
    machine.check_space(bench.folder, int((commits + 1) * 1.2 * nbytes))
    before = torch.get_num_threads()
    participants: dict[str, Participant] = {}
    for threads in sorted(plan):
        for compression in plan[threads]:
            name = f"ckstore {compression}" if compression in VARIANTS else compression
            participants[f"training on {threads} of {cores} cores, {name}"] = partial(
                train, bench, loop, threads, compression, commits
            )
    interleave(result, if_possible(bench, result, participants), bench.rounds)
    torch.set_num_threads(before)
    result.notes += [_cost_note(name, samples) for name, samples in result.samples.items()]
    return result


def _cost_note(name: str, samples: list[Sample]) -> str:
    """Return what a commit costs, with how sure that is: 95% of such medians, of rounds drawn again and again.

    Commits of one round have steps and the machine's mood in common, so that whole rounds are drawn.
    """
    held_up, worked = (
        statistics.median(float(str(sample.facts[fact])) for sample in samples)
        for fact in ("held_up_share", "saver_cpu_seconds")
    )
    share, seconds = (
        _median_of([np.asarray(sample.facts[fact]) for sample in samples]) for fact in ("lost_shares", "lost_seconds")
    )
    return (
        f"{name}: a commit costs {share[0]:.1%} of a step (median; 95%: {share[1]:.1%} to {share[2]:.1%}), "
        f"{1e3 * seconds[0]:.0f} ms ({1e3 * seconds[1]:.0f} to {1e3 * seconds[2]:.0f}); of {held_up:.1%} of a step it "
        f"is known that the loop waited or had no processor; the process beside it computes for {worked:.2f} s"
    )


def _median_of(rounds: list[np.ndarray]) -> tuple[float, float, float]:
    """Return the median of the values of all rounds, and between what it lies for 95% of draws of rounds."""
    picks = np.random.default_rng(0).integers(0, len(rounds), (10_000, len(rounds)))
    drawn = [float(np.median(np.concatenate([rounds[pick] for pick in row]))) for row in picks]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(np.median(np.concatenate(rounds))), float(low), float(high)


@dataclass(frozen=True)
class _Running:
    """A commit that is under way, or what stands in its place."""

    is_over: Callable[[], bool]
    finish: Callable[[], float]
    """Waits for its end; returns for how many seconds it has stalled the loop."""


@dataclass
class _Commits:
    """How commits begin."""

    begin: Callable[[], _Running]
    pid: int
    """Of the process that does the work."""
    facts: dict[str, object] = field(default_factory=dict)
    """Of the last one."""


@contextmanager
def _commits(bench: Bench, loop: background.Loop, compression: str) -> Iterator[_Commits]:
    """Yield what commits the state of a loop, or stands in its place."""
    if compression in FLOORS:
        tensors = (tensor for _, tensor in histories.tensors_of([loop.model.state_dict(), loop.optimizer.state_dict()]))
        path = bench.folder / "floor" if FLOORS[compression] == "write" else None
        with Floor(tensors, is_coded=FLOORS[compression] == "code", path=path) as floor:
            floor.begin()()

            def begin_floor() -> _Running:
                finish = floor.begin()
                return _Running(floor.is_over, finish)

            yield _Commits(begin_floor, floor.pid, {"writes_by": floor.writes_by})
    else:
        place = bench.folder / "store"
        with open_store(place, "none" if compression == NOTHING else compression) as store:
            store.attach(loop.optimizer)
            store.prewarm(loop.state)

            def begin() -> _Running:
                pending = store.commit_async(loop.state, loop.step)

                def finish() -> float:
                    commits.facts = facts_of(pending.result())
                    return float(pending.stall_seconds)

                return _Running(lambda: pending.is_done, finish)

            nothing = _Running(lambda: True, lambda: 0.0)
            pid = store._handover.saver_pid
            commits = _Commits((lambda: nothing) if compression == NOTHING else begin, pid)
            yield commits
        machine.remove_tree(place)


@dataclass
class _Tally:
    """What commits have cost, one entry each; seconds, but for ``returns_ms``."""

    lost: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    """A step right before and right after."""
    waited: list[float] = field(default_factory=list)
    """For the call, in the guard, and for its end."""
    held_up: list[float] = field(default_factory=list)
    """Waiting, or without a processor."""
    returns_ms: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    """By the process that does the work."""

    def take(self, commits: _Commits, train: Callable[[_Running], Trained]) -> tuple[float, Trained]:
        """Begin a commit, train, and wait for its end; return how long all that took, and what training returned."""
        delayed, computed = background.delay_seconds(), background.cpu_seconds(commits.pid)
        began = time.perf_counter()
        commit = commits.begin()
        returned = time.perf_counter() - began
        trained = train(commit)
        waited = time.perf_counter()
        stalled = commit.finish()
        ended = time.perf_counter()
        self.returns_ms.append(1e3 * returned)
        self.waited.append(max(returned, stalled) + ended - waited)
        self.held_up.append(background.delay_seconds() - delayed + stalled + ended - waited)
        self.computed.append(background.cpu_seconds(commits.pid) - computed)
        return ended - began, trained

    @property
    def facts(self) -> dict[str, object]:
        """What a record keeps."""
        # A step does not always take as long: what is lost in seconds is what participants are compared by.
        shares = [lost / beside for lost, beside in zip(self.lost, self.beside, strict=True)]
        step = statistics.median(self.beside)
        return {
            "quiet_seconds": step,
            "lost_shares": shares,
            "lost_seconds": self.lost,
            "lost_share": statistics.median(shares),
            "saver_cpu_seconds": statistics.fmean(self.computed),
            "held_up_share": statistics.median(self.held_up) / step,
            "return_ms": statistics.median(self.returns_ms),
            "returns_ms": self.returns_ms,
        }


def _train(bench: Bench, loop: background.Loop, threads: int, compression: str, count: int) -> Sample:
    """Train some steps without and with a commit, in turns; a sample is seconds a step beside a commit."""
    torch.set_num_threads(threads)
    steps, seconds, tally = [], [], _Tally()
    with _commits(bench, loop, compression) as commits:
        loop.train_one_step()
        quiet = [_step_seconds(loop, QUIET_STEPS)]
        for _ in range(count):
            took, taken = tally.take(commits, lambda commit: _steps_until(loop, commit.is_over))
            seconds.append(took)
            steps.append(taken)
            quiet.append(_step_seconds(loop, QUIET_STEPS))
    # The machine drifts: what is right before and what is right after count alike.
    tally.beside = [(one + other) / 2 for one, other in itertools.pairwise(quiet)]
    tally.lost = [took - taken * one for took, taken, one in zip(seconds, steps, tally.beside, strict=True)]
    facts = {**tally.facts, "steps": steps, "quiet": quiet, **commits.facts}
    return Sample(statistics.median(took / taken for took, taken in zip(seconds, steps, strict=True)), facts)


def _accumulate(bench: Bench, loop: background.Loop, threads: int, compression: str, count: int) -> Sample:
    """Train by steps of some batches, each of which begins with a commit; a sample is seconds of such a step."""
    torch.set_num_threads(threads)
    tally, steps, batches = _Tally(), [], []
    with _commits(bench, loop, compression) as commits:
        loop.train_one_step()
        before, _ = _accumulated(loop, _Running(lambda: True, lambda: 0.0))
        for _ in range(count):
            took, (after, beside) = tally.take(commits, partial(_accumulated, loop))
            quiet = (statistics.fmean(before) + statistics.fmean(after or before)) / 2
            tally.lost.append(tally.waited[-1] + sum(beside) - quiet * len(beside))
            tally.beside.append(took - tally.lost[-1])
            steps.append(took)
            batches.append(len(beside))
            before = after or before
    return Sample(statistics.median(steps), {**tally.facts, "batches": batches, **commits.facts})


def _accumulated(loop: background.Loop, commit: _Running) -> tuple[list[float], list[float]]:
    """Take one step of many batches; return the seconds of those after the end of a commit, and of those until then.

    The first batch after it counts as beside it: the process beside still tidies up.
    """
    beside: list[float] = []
    after: list[float] = []
    is_over = False
    for _ in range(MICRO_BATCHES):
        was_over, is_over = is_over, is_over or commit.is_over()
        began = time.perf_counter()
        loop.accumulate()
        (after if was_over else beside).append(time.perf_counter() - began)
    loop.take_step()
    # In place, or the first batch of the next step would take longer than the others: memory would be new.
    loop.optimizer.zero_grad(set_to_none=False)
    return after, beside


def _step_seconds(loop: background.Loop, count: int) -> float:
    """Take some steps; return the seconds of one."""
    began = time.perf_counter()
    for _ in range(count):
        loop.train_one_step()
    return (time.perf_counter() - began) / count


def _steps_until(loop: background.Loop, is_over: Callable[[], bool]) -> int:
    """Take steps until something is over, one at least; return how many."""
    count, is_done = 0, False
    while count < STEPS_MAX and not is_done:
        loop.train_one_step()
        count, is_done = count + 1, is_over()
    return count


CASES: dict[str, Callable[[Bench], Result]] = {"stall_guarded": stall_guarded, "stall_accumulation": stall_accumulation}
