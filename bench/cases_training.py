"""How much slower training with real forward and backward passes is during background commits."""

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
from bench.load_processes import ComputeLoad, LoadProcess, MemoryReadLoad
from bench.measure import Participant, Result, Sample, interleave
from bench.minimal_commit import MinimalCommit
from bench.workbench import Bench, facts_of, open_store
from ckstore._testing import background_of

COMMITS, TOKENS = 6, 64
"""Commits in a round, and tokens of a batch. Steps are short, so that the cost of a commit is clearly visible."""

BATCHES, COMMITS_OF_LONG_STEPS = 8, 3
"""Batches whose gradients are accumulated for a long step, and commits in a round with such steps."""

QUIET_STEPS = 2
"""Steps before and after every commit, with which the commit is compared."""

STEPS_MAX = 3
"""Steps during one commit, if a step takes longer than a commit."""

NOTHING = "nothing"
"""Participant without a commit; it shows the error of the measurement."""

COMPUTE_SECONDS = 2.0
"""About the processor time that a saver needs with ``fast`` on a quick machine."""

READ_GB = 16
"""About eight times the full state."""

MEMORY_NBYTES, CACHE_NBYTES = 1 << 30, 512 << 10
"""A buffer larger than any cache, and one that fits into the cache of a core."""

LOAD_PROCESSES: Mapping[str, Callable[[], LoadProcess]] = {
    f"a process that computes for {COMPUTE_SECONDS:.0f} s": partial(ComputeLoad, COMPUTE_SECONDS),
    f"a process that reads {READ_GB} GB of memory": partial(MemoryReadLoad, READ_GB * 10**9, MEMORY_NBYTES),
    f"a process that reads {READ_GB} GB out of its cache": partial(MemoryReadLoad, READ_GB * 10**9, CACHE_NBYTES),
}
"""Participants that replace the commit with one kind of load, to see which kind slows training."""

MINIMAL_COMMITS = {
    "one copy, one hash": "",
    "one copy, one hash, one write": "write",
    "one copy, one hash, one coding": "code",
    "one copy, one hash, one coding, one write of that": "code and write",
    **dict.fromkeys(LOAD_PROCESSES, "process"),
}
"""Participants that replace the commit: minimal commits, and processes with one kind of load.

The minimal commits do about the minimum work of any commit, of a durable one, of one that encodes with ``fast``, and of
a durable one that encodes.
"""


def stall_guarded(bench: Bench) -> Result:
    """Train with the optimizer guarded, commit in the background, and measure the slowdown."""
    cores = len(os.sched_getaffinity(0))
    half = max(1, cores // 2)
    plan = {cores: VARIANTS, half: (*VARIANTS, NOTHING, *MINIMAL_COMMITS)}
    return compare(bench, "stall_guarded", plan, _loop(bench, batches=1), commits=COMMITS)


def stall_accumulation(bench: Bench) -> Result:
    """The same as ``stall_guarded``, with longer steps: each accumulates the gradients of several batches."""
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    plan = {half: (*VARIANTS, NOTHING, *MINIMAL_COMMITS)}
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
    """Compare the slowdown of training.

    Args:
        bench: Folder, size and rounds.
        case: Name of the case.
        plan: Number of training threads -> the participants.
        loop: What is trained.
        commits: Commits of each participant in a round.
        steps_max: Steps during one commit. If the commit has not ended by then, training waits for it, and the wait
            counts.
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
            if name in MINIMAL_COMMITS and bench.tools is not None and name not in bench.tools:
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
    """Return the cost of a commit with its 95 % interval, by bootstrap over rounds.

    Commits of one round share the state of the machine, so that whole rounds are resampled.
    """
    waits, worked = (
        statistics.median(float(str(sample.facts[fact])) for sample in samples)
        for fact in ("held_up_share", "saver_cpu_seconds")
    )
    share, seconds = (
        _median_of([np.asarray(sample.facts[fact]) for sample in samples]) for fact in ("lost_shares", "lost_seconds")
    )
    return (
        f"{name}: a commit costs {share[0]:.1%} of a step (median; 95%: {share[1]:.1%} to {share[2]:.1%}), "
        f"{1e3 * seconds[0]:.0f} ms ({1e3 * seconds[1]:.0f} to {1e3 * seconds[2]:.0f}); of {waits:.1%} of a step it "
        f"is known that the loop waited or had no processor; the process beside it computes for {worked:.2f} s"
    )


def _median_of(rounds: list[np.ndarray]) -> tuple[float, float, float]:
    """Return the median of the values of all rounds, and its 95 % interval over resampled rounds."""
    picks = np.random.default_rng(0).integers(0, len(rounds), (10_000, len(rounds)))
    # Every round has the same number of commits.
    values = np.stack(rounds)
    low, high = np.quantile(np.median(values[picks].reshape(len(picks), -1), axis=1), (0.025, 0.975))
    return float(np.median(values)), float(low), float(high)


@dataclass(frozen=True)
class _Running:
    """A commit in progress, or what replaces it."""

    is_over: Callable[[], bool]
    finish: Callable[[], float]
    """Wait for the end; return the seconds for which the loop was stalled."""


@dataclass
class _Commits:
    """How to start commits."""

    begin: Callable[[], _Running]
    pid: int
    """The process that does the work."""
    facts: dict[str, object] = field(default_factory=dict)
    """Facts of the last commit."""


@contextmanager
def _commits(bench: Bench, loop: background.Loop, compression: str) -> Iterator[_Commits]:
    """Yield what commits the state of a loop, or what replaces it."""
    if compression in LOAD_PROCESSES:
        with LOAD_PROCESSES[compression]() as load:
            # Warm up.
            load.begin()()
            yield _Commits(lambda: _Running(is_over=load.is_over, finish=load.begin()), load.pid)
    elif compression in MINIMAL_COMMITS:
        tensors = (tensor for _, tensor in histories.tensors_of([loop.model.state_dict(), loop.optimizer.state_dict()]))
        path = bench.folder / "floor" if "write" in MINIMAL_COMMITS[compression] else None
        with MinimalCommit(tensors, is_coded="code" in MINIMAL_COMMITS[compression], path=path) as minimal:
            minimal.begin()()

            def begin_minimal() -> _Running:
                finish = minimal.begin()
                return _Running(minimal.is_over, finish)

            yield _Commits(begin_minimal, minimal.pid, {"writes_by": minimal.writes_by})
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
    """Train some steps without and with a commit, alternately; the sample is seconds per step during a commit."""
    torch.set_num_threads(threads)
    busy, steps, waits, returns, worked = [], [], [], [], 0.0
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
            waits.append(background.delay_seconds() - delayed + stalled + ended - waited)
            worked += background.cpu_seconds(commits.pid) - computed
            quiet.append(_step_seconds(loop, QUIET_STEPS))
    # The speed of the machine drifts, so the quiet steps before and after count equally.
    quiet_means = [(one + other) / 2 for one, other in itertools.pairwise(quiet)]
    lost = [taken * (one - other) / other for one, taken, other in zip(busy, steps, quiet_means, strict=True)]
    facts: dict[str, object] = {"quiet_seconds": statistics.median(quiet), "lost_shares": lost, "steps": steps}
    # Step times vary, so participants are compared by lost seconds.
    facts |= {"lost_seconds": [share * other for share, other in zip(lost, quiet_means, strict=True)], "quiet": quiet}
    facts |= {"lost_share": statistics.median(lost), "saver_cpu_seconds": worked / count}
    facts |= {"held_up_share": statistics.median(waits) / statistics.median(quiet)}
    facts |= {"return_ms": statistics.median(returns), "returns_ms": returns}
    return Sample(statistics.median(busy), facts | commits.facts)


def _step_seconds(loop: background.Loop, count: int) -> float:
    """Do some steps; return the seconds per step."""
    began = time.perf_counter()
    for _ in range(count):
        loop.train_one_step()
    return (time.perf_counter() - began) / count


def _steps_until(loop: background.Loop, is_over: Callable[[], bool], steps_max: int) -> int:
    """Do steps until something is over, at least one; return how many."""
    count, is_done = 0, False
    while count < steps_max and not is_done:
        loop.train_one_step()
        count, is_done = count + 1, is_over()
    return count


CASES: dict[str, Callable[[Bench], Result]] = {"stall_guarded": stall_guarded, "stall_accumulation": stall_accumulation}
