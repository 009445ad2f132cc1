"""Processes that create one kind of load next to training: computation, memory reads, or cache reads.

The effect of a computing process is that of any process on another processor of this machine: two virtual processors
may be halves of one core, share its clock, or exceed what the host provides. If reading memory slows training more than
reading the same amount from cache, the memory bus and the last-level cache are shared.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType

from bench.minimal_commit import NICENESS

COMPUTE = """
import sys, time
for line in sys.stdin:
    until = time.process_time() + float(line)
    while time.process_time() < until:
        pass
    print("done", flush=True)
"""

READ = """
import sys
import numpy as np
words, piece = int(sys.argv[1]) // 8, 1 << 15
room = np.ones(words, np.uint64)
for line in sys.stdin:
    left = int(line)
    while left > 0:
        for begin in range(0, words, piece):
            found = room[begin : begin + piece]
            found.sum()
            left -= found.nbytes
            if left <= 0:
                break
    print("done", flush=True)
"""


class LoadProcess:
    """A process that does a given amount of one kind of work each time it is started.

    Args:
        program: The Python program; it gets the amount as a line.
        amount: The amount of work.
        arguments: Command-line arguments of the program.
    """

    def __init__(self, program: str, amount: float, *arguments: str) -> None:
        self._amount = amount
        command = [sys.executable, "-c", program, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        os.setpriority(os.PRIO_PROCESS, self.pid, NICENESS)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def begin(self) -> Callable[[], float]:
        """Start the work; the returned function waits for the end and returns the stall of the caller, always 0."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._amount}\n".encode())
        self._process.stdin.flush()

        def finish() -> float:
            assert self._process.stdout is not None
            if self._process.stdout.readline() != b"done\n":
                raise RuntimeError("the load process has died")
            return 0.0

        return finish

    def is_over(self) -> bool:
        """Return whether the work has ended, without waiting."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def __enter__(self) -> LoadProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


class ComputeLoad(LoadProcess):
    """Computes, and uses neither memory nor disk.

    Args:
        seconds: Processor time. It takes longer if training uses all processors.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(COMPUTE, seconds)


class MemoryReadLoad(LoadProcess):
    """Reads its own memory from beginning to end, repeatedly.

    Args:
        nbytes: Bytes to read in total.
        buffer_nbytes: Size of the memory: larger than any cache, or smaller than the cache of one core.
    """

    def __init__(self, nbytes: int, buffer_nbytes: int) -> None:
        super().__init__(READ, nbytes, str(buffer_nbytes))
