"""Processes beside training that do one thing only, each for itself: compute, or read memory, or read their own cache.

What training loses to one that computes is what it loses to any process that computes for so long on another
processor of this machine: two virtual ones may be halves of one, share its clock, or be more than their host gives.
What it loses to one that reads memory, and not to one that reads as much out of its cache, it loses because memory and
the last cache are everybody's.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType

from bench.floor import NICENESS

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


class Companion:
    """A process that does so much of one thing, each time that it is begun.

    Args:
        program: What it does, in Python; it gets the amount as a line.
        amount: Of what it does.
        arguments: What it is given when it starts.
    """

    def __init__(self, program: str, amount: float, *arguments: str) -> None:
        self._amount = amount
        command = [sys.executable, "-c", program, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        os.setpriority(os.PRIO_PROCESS, self.pid, NICENESS)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def begin(self) -> Callable[[], float]:
        """Begin; what is returned waits for the end, and returns for how long the caller was stalled: never."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._amount}\n".encode())
        self._process.stdin.flush()

        def finish() -> float:
            assert self._process.stdout is not None
            if self._process.stdout.readline() != b"done\n":
                raise RuntimeError("the process beside training has died")
            return 0.0

        return finish

    def is_over(self) -> bool:
        """Return whether what was begun has ended, without waiting."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def __enter__(self) -> Companion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


class Spinning(Companion):
    """Computes, and uses neither memory nor disk.

    Args:
        seconds: Of a processor; where training wants all of them it takes longer.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(COMPUTE, seconds)


class Reading(Companion):
    """Reads memory of its own, from its beginning to its end, again and again.

    Args:
        nbytes: How many bytes it reads.
        room_nbytes: In how many: more than any cache has, or less than its processor has for itself.
    """

    def __init__(self, nbytes: int, room_nbytes: int) -> None:
        super().__init__(READ, nbytes, str(room_nbytes))
