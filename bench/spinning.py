"""A process beside training that computes for a while and uses neither memory nor disk.

What training loses to it is what it loses to any process that computes for so long on another processor of this
machine: two virtual ones may be halves of one, share its clock, or be more than their host gives.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType

from bench.floor import NICENESS

PROGRAM = """
import sys, time
for line in sys.stdin:
    until = time.process_time() + float(line)
    while time.process_time() < until:
        pass
    print("done", flush=True)
"""


class Spinning:
    """Computes for some seconds of a processor, each time that it is begun.

    Args:
        seconds: Of a processor; where training wants all of them it takes longer.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        command = [sys.executable, "-c", PROGRAM]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        os.setpriority(os.PRIO_PROCESS, self.pid, NICENESS)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def begin(self) -> Callable[[], float]:
        """Begin; what is returned waits for the end, and returns for how long the caller was stalled: never."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._seconds}\n".encode())
        self._process.stdin.flush()

        def finish() -> float:
            assert self._process.stdout is not None
            if self._process.stdout.readline() != b"done\n":
                raise RuntimeError("the process that computes has died")
            return 0.0

        return finish

    def is_over(self) -> bool:
        """Return whether what was begun has ended, without waiting."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def __enter__(self) -> Spinning:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
