"""What each stage of a commit costs training on other cores, through shared caches and memory bandwidth."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from bench import background
from bench.measure import Participant, Result, Sample, interleave
from bench.minimal_commit import NICENESS
from bench.stage_process import CHUNK_NBYTES, REST
from bench.workbench import Bench

CHUNKS, CHUNKS_SMALL = 64, 2
"""Chunks of 4 MiB, and as many bases: more than caches hold."""

STEPS = 3
"""Steps during a stage, in each round; each is compared with the quiet steps before and after it."""


class Helper:
    """The process that repeats a stage."""

    def __init__(self, chunks: int) -> None:
        command = [sys.executable, "-m", "bench.stage_process", f"--chunks={chunks}"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent
        )
        ready, *self.stages = self._read_line()
        assert ready == "ready", ready
        os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)

    def do(self, stage: str) -> tuple[int, float]:
        """Switch to this stage; return the chunks and seconds since the last call."""
        assert self._process.stdin is not None
        self._process.stdin.write(stage + "\n")
        self._process.stdin.flush()
        chunks, seconds = self._read_line()
        return int(chunks), float(seconds)

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()

    def _read_line(self) -> list[str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().rstrip("\n")
        if not line:
            raise RuntimeError("the stage process has died")
        return line.split("\t")


@contextmanager
def _helper(chunks: int) -> Iterator[Helper]:
    helper = Helper(chunks)
    try:
        yield helper
    finally:
        helper.close()


def stages_beside(bench: Bench) -> Result:
    """Train on half of the cores while a process repeats one stage of a commit; measure the slowdown."""
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    loop = background.Loop(bench.nbytes, tokens=16 if bench.is_small else 64)
    chunks = CHUNKS_SMALL if bench.is_small else CHUNKS
    result = Result("stages_beside", "% of a step", is_higher_better=False)
    result.setting = {"rounds": bench.rounds, "threads": half, "chunks": chunks, "steps": STEPS}
    result.columns = ("ms_a_chunk", "lost_ms_a_gb")
    before = torch.get_num_threads()
    torch.set_num_threads(half)
    try:
        with _helper(chunks) as helper:
            loop.train_one_step()
            stages = [stage for stage in helper.stages if bench.tools is None or stage in bench.tools]
            participants: dict[str, Participant] = {"nothing": partial(_lost, loop, helper, REST)}
            participants |= {stage: partial(_lost, loop, helper, stage) for stage in stages}
            interleave(result, participants, bench.rounds)
    finally:
        torch.set_num_threads(before)
    result.notes.append(
        "what training loses while another core does nothing but this, and what it loses to a GB of chunks: the share, "
        "for as long as one thread takes for them"
    )
    return result


def _lost(loop: background.Loop, helper: Helper, stage: str) -> Sample:
    """Compare steps during a stage with quiet ones before and after; the sample is the loss in %."""
    lost, chunks, seconds = [], 0, 0.0
    quiet = _step_seconds(loop)
    for _ in range(STEPS):
        helper.do(stage)
        during = _step_seconds(loop)
        done, took = helper.do(REST)
        chunks, seconds = chunks + done, seconds + took
        after = _step_seconds(loop)
        lost.append(during / ((quiet + after) / 2) - 1)
        quiet = after
    share = statistics.median(lost)
    facts: dict[str, object] = {"lost": lost}
    if chunks:
        facts |= {"ms_a_chunk": 1e3 * seconds / chunks}
        facts |= {"lost_ms_a_gb": 1e3 * share * seconds / (chunks * CHUNK_NBYTES / 1e9)}
    return Sample(100 * share, facts)


def _step_seconds(loop: background.Loop) -> float:
    began = time.perf_counter()
    loop.train_one_step()
    return time.perf_counter() - began


CASES: dict[str, Callable[[Bench], Result]] = {"stages_beside": stages_beside}
