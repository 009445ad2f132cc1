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

import numpy as np
import torch

from bench import background, histories, machine
from bench.cases_stall import VARIANTS, if_possible
from bench.floor import Floor
from bench.measure import Participant, Result, Sample, interleave
from bench.spinning import Companion, Reading, Spinning
from bench.workbench import Bench, facts_of, open_store
from ckstore._testing import background_of

COMMITS, TOKENS = 6, 64
"""In a round, and of a batch: steps as short as they make sense, so that what a commit costs is seen best."""

BATCHES, COMMITS_OF_LONG_STEPS = 8, 3
"""Of which gradients are accumulated for one step: a short one still, for a model of this size. And commits a round."""

QUIET_STEPS = 2
"""Before and after every commit: a commit is held against them."""

STEPS_MAX = 3
"""Beside one commit, where a step takes longer than a commit."""

NOTHING = "nothing"
"""In place of a commit: what comes out then is what the measurement is off by."""

SPIN_SECONDS = 2.0
"""About as long as a saver computes for ``fast`` where it is quick."""

READ_GB = 16
"""About eight times the state of the full size: a number of passes that is not hard to think of."""

MEMORY_NBYTES, CACHE_NBYTES = 1 << 30, 512 << 10
"""More than any cache has, and no more than a processor's own one has."""

COMPANIONS: Mapping[str, Callable[[], Companion]] = {
    f"a process that computes for {SPIN_SECONDS:.0f} s": partial(Spinning, SPIN_SECONDS),
    f"a process that reads {READ_GB} GB of memory": partial(Reading, READ_GB * 10**9, MEMORY_NBYTES),
    f"a process that reads {READ_GB} GB out of its cache": partial(Reading, READ_GB * 10**9, CACHE_NBYTES),
}
"""In place of a commit: one thing only, so that is seen what it is of a commit that training loses to."""

FLOORS = {
    "one copy, one hash": "",
    "one copy, one hash, one write": "write",
    "one copy, one hash, one coding": "code",
    "one copy, one hash, one coding, one write of that": "code and write",
    **dict.fromkeys(COMPANIONS, "beside"),
}
"""In place of a commit: about the least that any takes, that a durable one takes, one that codes by ``fast``, and a
durable one that does; and processes that do one thing."""


def stall_guarded(bench: Bench) -> Result:
    """Train with real forward and backward passes, commit behind the guard of the optimizer, and look what is lost."""
    cores = len(os.sched_getaffinity(0))
    half = max(1, cores // 2)
    plan = {cores: VARIANTS, half: (*VARIANTS, NOTHING, *FLOORS)}
    return compare(bench, "stall_guarded", plan, _loop(bench, batches=1), commits=COMMITS)


def stall_accumulation(bench: Bench) -> Result:
    """Do as in ``stall_guarded``, with longer steps: each accumulates the gradients of some batches."""
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    plan = {half: (*VARIANTS, NOTHING, *FLOORS)}
    return compare(bench, "stall_accumulation", plan, _loop(bench, batches=BATCHES), commits=COMMITS_OF_LONG_STEPS)


def _loop(bench: Bench, *, batches: int) -> background.Loop:
    return background.Loop(bench.nbytes, tokens=16 if bench.is_small else TOKENS, batches=batches)


def compare(
    bench: Bench,
    case: str,
    plan: Mapping[int, Sequence[str]],
    loop: background.Loop,
    *,
    commits: int,
    steps_max: int = STEPS_MAX,
) -> Result:
    """Compare what training loses.

    Args:
        bench: Where, and how large.
        case: Its name.
        plan: Threads that train -> what is done beside.
        loop: What is trained.
        commits: Of each participant in a round.
        steps_max: Steps beside one commit; what is not written by then is waited for, and that counts.
    """
    cores = len(os.sched_getaffinity(0))
    nbytes = histories.nbytes_of([loop.model.state_dict(), loop.optimizer.state_dict()])
    result = Result(case, "s a step", is_higher_better=False)
    result.setting = {
        "state_nbytes": nbytes,
        "rounds": bench.rounds,
        "pairs": commits,
        "cores": cores,
        "batches": loop.batches,
    }
    result.columns = ("quiet_seconds", "lost_share", "held_up_share", "saver_cpu_seconds", "return_ms")
    machine.check_space(bench.folder, int((commits + 1) * 1.2 * nbytes))
    before = torch.get_num_threads()
    participants: dict[str, Participant] = {}
    for threads in sorted(plan):
        for compression in plan[threads]:
            name = f"ckstore {compression}" if compression in VARIANTS else compression
            if name in FLOORS and bench.tools is not None and name not in bench.tools:
                continue
            participants[f"training on {threads} of {cores} cores, {name}"] = partial(
                _train, bench, loop, threads, compression, commits, steps_max
            )
    interleave(result, if_possible(bench, result, participants), bench.rounds)
    torch.set_num_threads(before)
    result.notes += [_cost_note(name, samples) for name, samples in result.samples.items()]
    result.notes.append(
        f"a commit, as many steps as it takes until it is written, {steps_max} at most, and the wait for what is left "
        f"then, are held against the {QUIET_STEPS} steps before and the {QUIET_STEPS} after; again and again"
    )
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
    # Every round has as many commits.
    values = np.stack(rounds)
    low, high = np.quantile(np.median(values[picks].reshape(len(picks), -1), axis=1), (0.025, 0.975))
    return float(np.median(values)), float(low), float(high)


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
    if compression in COMPANIONS:
        with COMPANIONS[compression]() as companion:
            # Whatever it does first, it does now.
            companion.begin()()
            yield _Commits(lambda: _Running(is_over=companion.is_over, finish=companion.begin()), companion.pid)
    elif compression in FLOORS:
        tensors = (tensor for _, tensor in histories.tensors_of([loop.model.state_dict(), loop.optimizer.state_dict()]))
        path = bench.folder / "floor" if "write" in FLOORS[compression] else None
        with Floor(tensors, is_coded="code" in FLOORS[compression], path=path) as floor:
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
            pid = background_of(store).saver_pid
            commits = _Commits((lambda: nothing) if compression == NOTHING else begin, pid)
            yield commits
        machine.remove_tree(place)


def _train(bench: Bench, loop: background.Loop, threads: int, compression: str, count: int, steps_max: int) -> Sample:
    """Train some steps without and with a commit, in turns; a sample is seconds a step beside a commit."""
    torch.set_num_threads(threads)
    busy, steps, held_up, returns, worked = [], [], [], [], 0.0
    with _commits(bench, loop, compression) as commits:
        loop.train_one_step()
        quiet = [_step_seconds(loop, QUIET_STEPS)]
        for _ in range(count):
            delayed, began = background.delay_seconds(), time.perf_counter()
            computed = background.cpu_seconds(commits.pid)
            commit = commits.begin()
            returns.append(1e3 * (time.perf_counter() - began))
            steps.append(_steps_until(loop, commit.is_over, steps_max))
            waited = time.perf_counter()
            stalled = commit.finish()
            ended = time.perf_counter()
            busy.append((ended - began) / steps[-1])
            held_up.append(background.delay_seconds() - delayed + stalled + ended - waited)
            worked += background.cpu_seconds(commits.pid) - computed
            quiet.append(_step_seconds(loop, QUIET_STEPS))
    # The machine drifts: what is right before and what is right after count alike.
    beside = [(one + other) / 2 for one, other in itertools.pairwise(quiet)]
    lost = [taken * (one - other) / other for one, taken, other in zip(busy, steps, beside, strict=True)]
    facts: dict[str, object] = {"quiet_seconds": statistics.median(quiet), "lost_shares": lost, "steps": steps}
    # A step does not always take as long: what is lost in seconds is what participants are compared by.
    facts |= {"lost_seconds": [share * other for share, other in zip(lost, beside, strict=True)], "quiet": quiet}
    facts |= {"lost_share": statistics.median(lost), "saver_cpu_seconds": worked / count}
    facts |= {"held_up_share": statistics.median(held_up) / statistics.median(quiet)}
    facts |= {"return_ms": statistics.median(returns), "returns_ms": returns}
    return Sample(statistics.median(busy), facts | commits.facts)


def _step_seconds(loop: background.Loop, count: int) -> float:
    """Take some steps; return the seconds of one."""
    began = time.perf_counter()
    for _ in range(count):
        loop.train_one_step()
    return (time.perf_counter() - began) / count


def _steps_until(loop: background.Loop, is_over: Callable[[], bool], steps_max: int) -> int:
    """Take steps until something is over, one at least; return how many."""
    count, is_done = 0, False
    while count < steps_max and not is_done:
        loop.train_one_step()
        count, is_done = count + 1, is_over()
    return count


CASES: dict[str, Callable[[Bench], Result]] = {"stall_guarded": stall_guarded, "stall_accumulation": stall_accumulation}
