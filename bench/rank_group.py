"""The ranks of one job as processes: started once for a case, because importing torch takes seconds."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.measure import log
from bench.workbench import Bench

Facts = dict[str, float]

PROGRAM = ("-m", "bench.rank_process")
"""What the interpreter runs as a rank."""

CALL_SECONDS = 900.0
"""How long a call may take, before its ranks are killed: far more than any tool needs."""


class RankGroup:
    """Processes that are the ranks of one job. They start with the first call, and again after a call that failed.

    Args:
        bench: The options of the bench.
        mesh: The shape of the device mesh: the last dimension cuts tensors, the others replicate them.
    """

    def __init__(self, bench: Bench, mesh: tuple[int, ...]) -> None:
        self.world = math.prod(mesh)
        self._bench, self._mesh = bench, mesh
        self._processes: list[subprocess.Popen[str]] = []
        self._folder = bench.folder

    def call(self, name: str, **options: object) -> list[Facts]:
        """Have all ranks call one of their functions. Return what each measured.

        Raises:
            RuntimeError: A rank failed. The states of all ranks are lost.
        """
        if not self._processes:
            self._start()
        line = json.dumps({"do": name, **options})
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()
        answers = self._answers(time.monotonic() + CALL_SECONDS)
        # The first error is the cause of the others.
        errors = [f"rank {rank}: {answer['error']}" for rank, answer in answers.items() if "error" in answer]
        if errors or len(answers) < self.world:
            # Ranks whose group is in an unknown state cannot be used.
            self._kill()
            raise RuntimeError(errors[0] if errors else f"of {self.world} ranks {len(answers)} answered")
        return [answers[rank]["facts"] for rank in range(self.world)]

    def _start(self) -> None:
        log(f"starting {self.world} ranks")
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=self._bench.folder))
        bench = self._bench
        command = [sys.executable, *PROGRAM, "--mesh", "x".join(map(str, self._mesh))]
        command += [
            "--size",
            str(bench.nbytes),
            "--cache",
            str(bench.cache),
            "--rendezvous",
            str(self._folder / "meeting"),
        ]
        command += ["--small"] if bench.is_small else []
        for rank in range(self.world):
            with self._log_of(rank).open("w") as errors:
                process = subprocess.Popen(
                    [*command, "--rank", str(rank)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=_environment(),
                )
            self._processes.append(process)

    def _log_of(self, rank: int) -> Path:
        """Return the file of what a rank prints."""
        return self._folder / f"rank-{rank}.log"

    def _answers(self, until: float) -> dict[int, dict[str, Any]]:
        """Return the answers of the ranks by number; those of the others are missing once a rank has failed."""
        found: dict[int, dict[str, Any]] = {}
        waiting = {process.stdout: rank for rank, process in enumerate(self._processes)}
        while waiting and (left := until - time.monotonic()) > 0:
            for stream in select.select(list(waiting), [], [], left)[0]:
                rank = waiting.pop(stream)
                line = stream.readline()
                found[rank] = json.loads(line) if line else {"error": self._last_line_of(rank)}
                if "error" in found[rank]:
                    # The others may wait for this rank without end.
                    until = min(until, time.monotonic() + 5.0)
        return found

    def _last_line_of(self, rank: int) -> str:
        lines = self._log_of(rank).read_text().split("\n")
        return next((line for line in reversed(lines) if line.strip()), "ended without a message")

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes = []

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        until = time.monotonic() + 30.0
        for process in self._processes:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._processes = []


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # Several ranks share the processors, so each uses one thread for arithmetic.
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
