"""How long training waits for a background commit, and how much slower it is meanwhile."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import background, histories, machine
from bench.measure import Participant, Result, Sample, interleave
from bench.minimal_commit import NICENESS
from bench.workbench import Bench, facts_of, open_store

VARIANTS = ("none", "fast")
QUIET_SECONDS = 2.0
NICENESSES = (0, 5, 10, 19)
RETURNS = 6
COMPUTING = "a process that computes"


def stall_blocking(bench: Bench) -> Result:
    """Wait until a state may be changed again, without a guard; compare with a plain copy of the same memory."""
    result = bench.result("stall_blocking", "s", is_higher_better=False)
    result.columns = ("durable_seconds", "copy_seconds")
    state, nbytes, folder = bench.state, histories.nbytes_of(bench.state), bench.folder
    threads = len(os.sched_getaffinity(0))
    found, reasons = background.find(_trial(), folder, bench.tools)
    result.unusable |= reasons
    machine.check_space(folder, int(2.5 * nbytes))
    copies = background.Copies(state, threads)

    def copying() -> Sample:
        ways = copies.seconds()
        return Sample(min(ways.values()), {"ways": ways})

    def by_ckstore(compression: str) -> Participant:
        def run() -> Sample:
            background.change(state)
            place = folder / "store"
            with open_store(place, compression) as store:
                store.prewarm(state)
                copied = copies.shortest()
                began = time.perf_counter()
                pending = store.commit_async(state, 1)
                stall = time.perf_counter() - began
                receipt = pending.result()
                durable = time.perf_counter() - began
            machine.remove_tree(place)
            return Sample(stall, {"durable_seconds": durable, "copy_seconds": copied, **facts_of(receipt)})

        return run

    copy = f"a copy on {threads} threads"
    participants: dict[str, Participant] = {
        copy: copying,
        **{tool.name: blocked_by(tool, state, folder, copies.shortest) for tool in found},
    }
    mine = {f"ckstore {name}": by_ckstore(name) for name in VARIANTS}
    interleave(result, participants | if_possible(bench, result, mine), bench.rounds)
    copies.close()
    result.add_ratios(list(mine), list(participants))
    note_stalls(result, list(mine), list(participants))
    result.notes.append("every tool has saved before; its buffers are used again where it can do that")
    return result


def blocked_by(
    tool: background.AsyncTool, state: histories.State, folder: Path, copy: Callable[[], float]
) -> Participant:
    """Return a participant that waits until the tool lets the state change; a plain copy runs right before it."""

    def run() -> Sample:
        background.change(state)
        place = folder / "tool"
        place.mkdir()
        try:
            copied = copy()
            began = time.perf_counter()
            finish = tool.begin(state, place)
            stall = time.perf_counter() - began
            finish()
            durable = time.perf_counter() - began
            del finish
        finally:
            # Remove the folder even after a failure, so that the next tool can use it.
            machine.remove_tree(place)
        return Sample(stall, {"durable_seconds": durable, "copy_seconds": copied})

    return run


def note_stalls(result: Result, mine: list[str], others: list[str]) -> None:
    """Note how stalls compare with those of other tools."""
    for name in mine:
        for other in others:
            rounds = result.ratios.get(f"{name} / {other}")
            if rounds:
                times, won = 1 / statistics.median(rounds), sum(ratio > 1 for ratio in rounds)
                result.notes.append(
                    f"{name}: {times:.2f} times the stall of {other}; shorter in {won} of {len(rounds)} rounds"
                )
    _note_stalls_in_copies(result, mine, others)


def _note_stalls_in_copies(result: Result, mine: list[str], others: list[str]) -> None:
    """Note stalls relative to the copy right before them, because memory speed changes even within a round."""
    found = {name: _in_copies(result.samples[name]) for name in [*mine, *others] if name in result.samples}
    for name, stalls in found.items():
        if not stalls:
            continue
        median, least, most = statistics.median(stalls), min(stalls), max(stalls)
        note = f"{name}: {median:.2f} times a copy right before ({least:.2f} to {most:.2f})"
        for other in others if name in mine else ():
            if found.get(other):
                won = sum(one < more for one, more in zip(stalls, found[other], strict=True))
                note += f"; less of it than {other} in {won} of {len(stalls)} rounds"
        result.notes.append(note)


def _in_copies(samples: list[Sample]) -> list[float]:
    """Return each stall divided by the copy right before it, where there was one."""
    return [sample.value / float(str(copied)) for sample in samples if (copied := sample.facts.get("copy_seconds"))]


def stall_return(bench: Bench) -> Result:
    """Commit with nearly all of the state guarded: the time until ``commit_async`` returns."""
    state = histories.gpt_state(bench.nbytes, donors=histories.synthetic_donors())
    optimizer = background.owner_of(state)
    result = Result("stall_return", "ms", is_higher_better=False)
    result.setting = {"state_nbytes": histories.nbytes_of(state), "rounds": bench.rounds, "values": "synthetic"}
    result.setting |= {"tensors": sum(1 for _ in histories.tensors_of(state)), "commits": RETURNS}
    result.columns = ("first_ms", "shortest_ms", "longest_ms", "step_waits_ms")
    machine.check_space(bench.folder, int((RETURNS + 2) * 1.2 * histories.nbytes_of(state)))

    def committing(compression: str) -> Participant:
        def run() -> Sample:
            returns, waits = [], []
            place = bench.folder / "store"
            with open_store(place, compression) as store:
                store.attach(optimizer)
                store.prewarm(state)
                for step in range(RETURNS + 1):
                    began = time.perf_counter()
                    pending = store.commit_async({**state, "step": step}, step)
                    returns.append(1e3 * (time.perf_counter() - began))
                    # Wait as a step does: afterwards everything that it changes has been copied, and the caches hold
                    # nothing else.
                    began = time.perf_counter()
                    with store.guard(optimizer):
                        waits.append(1e3 * (time.perf_counter() - began))
                        background.change(state)
                    pending.result()
            machine.remove_tree(place)
            first, *later = returns
            facts: dict[str, object] = {"first_ms": first, "returns_ms": later, "shortest_ms": min(later)}
            facts |= {"longest_ms": max(later), "step_waits_ms": statistics.median(waits)}
            return Sample(statistics.median(later), facts)

        return run

    mine: dict[str, Participant] = {f"ckstore {name}": committing(name) for name in VARIANTS}
    interleave(result, if_possible(bench, result, mine), bench.rounds)
    result.notes.append("a sample is the median of the commits after the first; between them every tensor is rewritten")
    result.notes.append("step_waits_ms: what the guard waits for right after the call, where there is no forward pass")
    return result


def _loop_speed_with_compute_load() -> background.LoopDuringSave:
    """Measure the loop next to a process that only computes: this loss is due to the machine, not to a store."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            began = time.perf_counter()
            return background.run_loop_during_save(lambda: time.perf_counter() - began > QUIET_SECONDS, began)
        finally:
            process.kill()


def stall_python_loop(bench: Bench) -> Result:
    """Run a loop of pure Python during a save, and alone."""
    result = bench.result("stall_python_loop", "rounds/s", is_higher_better=True)
    result.columns = ("kept_share", "had_processor", "durable_seconds")
    state, nbytes, folder = bench.state, histories.nbytes_of(bench.state), bench.folder
    found, reasons = background.find(_trial(), folder, bench.tools)
    result.unusable |= reasons
    machine.check_space(folder, int(2.5 * nbytes))

    def sampled(count: Callable[[], background.LoopDuringSave]) -> Sample:
        found = background.measure_loop_speed(count, enough_seconds=QUIET_SECONDS)
        facts: dict[str, object] = {"kept_share": found.share, "had_processor": found.had_processor}
        return Sample(found.rate, facts | {"durable_seconds": found.seconds})

    def by(tool: background.AsyncTool) -> Participant:
        def count() -> background.LoopDuringSave:
            background.change(state)
            place = folder / "tool"
            place.mkdir()
            began = time.perf_counter()
            counted = _counting(tool.begin(state, place), began)
            machine.remove_tree(place)
            return counted

        return partial(sampled, count)

    def by_ckstore(compression: str) -> Participant:
        def count() -> background.LoopDuringSave:
            background.change(state)
            place = folder / "store"
            with open_store(place, compression) as store:
                store.prewarm(state)
                began = time.perf_counter()
                pending = store.commit_async(state, 1)
                counted = background.run_loop_during_save(lambda: pending.is_done, began)
                pending.result()
            machine.remove_tree(place)
            return counted

        return partial(sampled, count)

    participants: dict[str, Participant] = {tool.name: by(tool) for tool in found}
    participants[COMPUTING] = partial(sampled, _loop_speed_with_compute_load)
    mine = {f"ckstore {name}": by_ckstore(name) for name in VARIANTS}
    interleave(result, participants | if_possible(bench, result, mine), bench.rounds)
    for name, samples in result.samples.items():
        shares = [float(sample.facts["kept_share"]) for sample in samples]
        result.notes.append(
            f"{name}: the loop keeps {statistics.median(shares):.1%} of its speed "
            f"({min(shares):.1%} to {max(shares):.1%}), and has a processor for "
            f"{statistics.median(float(sample.facts['had_processor']) for sample in samples):.1%} of the time"
        )
    result.notes.append(
        "the loop runs from when the call has returned until the save is durable, and alone before and after; "
        f"a sample is as many saves as take {QUIET_SECONDS:g} s"
    )
    return result


def stall_nice(bench: Bench) -> Result:
    """Run a loop of pure Python on every core while the saver writes, at several nice values of the saver."""
    result = bench.result("stall_nice", "share kept", is_higher_better=True)
    result.columns = ("durable_seconds",)
    state, folder = bench.state, bench.folder
    machine.check_space(folder, int(2.5 * histories.nbytes_of(state)))
    others = len(os.sched_getaffinity(0)) - 1

    def rate_until(is_over: Callable[[], bool]) -> float:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
        try:
            return background.run_python_loop(is_over)
        finally:
            for process in busy:
                process.kill()
                process.wait()

    def committing(nice: int) -> Participant:
        def run() -> Sample:
            background.change(state)
            place = folder / "store"
            until = time.perf_counter() + QUIET_SECONDS
            alone = rate_until(lambda: time.perf_counter() >= until)
            with open_store(place, "fast", saver_nice=nice) as store:
                store.prewarm(state)
                began = time.perf_counter()
                pending = store.commit_async(state, 1)
                kept = rate_until(lambda: pending.is_done) / alone
                seconds = time.perf_counter() - began
            machine.remove_tree(place)
            return Sample(kept, {"durable_seconds": seconds})

        return run

    mine: dict[str, Participant] = {f"saver_nice={nice}": committing(nice) for nice in NICENESSES}
    return interleave(result, if_possible(bench, result, mine), bench.rounds)


def _counting(finish: background.Finish, began: float) -> background.LoopDuringSave:
    """Run the loop while a started operation finishes on another thread."""
    ended: list[float] = []

    def wait() -> None:
        finish()
        ended.append(time.perf_counter())

    thread = threading.Thread(target=wait)
    thread.start()
    counted = background.run_loop_during_save(lambda: bool(ended), began)
    thread.join()
    return replace(counted, seconds=ended[0] - began)


def _trial() -> histories.State:
    return histories.gpt_state(8_000_000, donors=histories.synthetic_donors())


def if_possible(bench: Bench, result: Result, mine: dict[str, Any]) -> dict[str, Participant]:
    """Return participants that need ckstore; an empty dict if ckstore cannot be used."""
    if bench.has_ckstore is None:
        return mine
    result.unusable["ckstore"] = bench.has_ckstore
    return {}


CASES: dict[str, Callable[[Bench], Result]] = {
    "stall_blocking": stall_blocking,
    "stall_return": stall_return,
    "stall_python_loop": stall_python_loop,
    "stall_nice": stall_nice,
}
