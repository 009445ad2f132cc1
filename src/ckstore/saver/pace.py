"""How fast a saver works where what it takes is taken from training, whatever its niceness.

A virtual machine or a container often may use as much processor time as it has processors, or less; and what its host
computes to move the bytes of its disk may count too. Whoever wants more has processors taken away for moments, and the
host does not ask which thread in there is nice. Linux tells how much it was: the "steal" of ``/proc/stat`` (proc(5)),
and ``throttled_usec`` or ``throttled_time`` in the ``cpu.stat`` of a control group.

So while the saver gives way each of its threads rests after a chunk: for longer when time was taken, and a little
shorter as long as none is (additive increase and multiplicative decrease, as Chiu and Jain found for networks, 1989;
here both are factors). Whether the saver or somebody else is to blame is not known, so it never rests for longer than
it works: a commit takes twice as long at most.

Invariants:
- No thread waits for another one here, also where one was put aside: what one of them looks at, others skip.
- A rest is at most as long as the work before it, and shorter than ``AGE_SECONDS_MAX``: whoever may begin will begin.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckstore.clock import SYSTEM_CLOCK, Clock

_log = logging.getLogger("ckstore")

LOOK_SECONDS = 0.1
"""Between two looks, at least: ten times the grain of "steal"."""

LOOK_COST_MAX = 0.02
"""Share of the time of one thread that looks may take: on machines of hundreds of processors ``/proc/stat`` is long."""

AGE_SECONDS_MAX = 0.3
"""After a longer silence it is not known what the saver did meanwhile; and after work that took longer nobody rests, as
it was more than a chunk, or the thread had no processor."""

SHARE_MIN = 0.5

TOLERATED_RATE = 0.02
"""Processors that may be taken for ever."""

TOLERATED_SECONDS = 0.02
"""And what may be taken at once beyond that: two steps of "steal"."""

RECOVERY_RATE = 0.05
"""By what the share grows in a second in which nothing is taken."""

OVERSLEPT_SECONDS_MAX = 0.02

_CPU_LINE_NBYTES = 256


@dataclass(slots=True)
class _Thread:
    """One thread's own; nobody else changes it."""

    asked: float
    """When it first asked for the chunk that it wants."""
    began: float | None = None
    """When it began its chunk; None: it wants one."""
    owed: float = 0.0
    """Seconds that it has to rest; below 0: it has rested for longer than it had to."""


class Pace:
    """When a thread may begin its next chunk.

    Args:
        taken: Returns the seconds of processors that were taken from this machine or container so far.
        clock: What time it is.
    """

    def __init__(self, taken: Callable[[], float], clock: Clock = SYSTEM_CLOCK) -> None:
        self.share = 1.0
        """Of the time that each thread works; the rest of it rests."""
        self._taken = taken
        self._clock = clock
        self._looking = threading.Lock()
        began = clock.monotonic()
        self._taken_then = taken()
        self._looked_at = self._asked_at = clock.monotonic()
        self._look_seconds = max(LOOK_SECONDS, (self._looked_at - began) / LOOK_COST_MAX)
        self._excess = 0.0
        self._has_told = False
        self._threads: dict[int, _Thread] = {}

    def admits(self, thread_index: int) -> bool:
        """Whether this thread may begin a chunk now; it asks again and again until it may."""
        self._look()
        now = self._clock.monotonic()
        thread = self._threads.setdefault(thread_index, _Thread(asked=now))
        if thread.began is not None:
            worked, thread.began, thread.asked = now - thread.began, None, now
            thread.owed += worked * (1 / self.share - 1) if worked < AGE_SECONDS_MAX else 0.0
        rested = now - thread.asked
        if rested < thread.owed:
            return False
        # Whoever asks now and then rests for a little too long, and has that taken off the next time.
        thread.owed = max(-OVERSLEPT_SECONDS_MAX, thread.owed - rested)
        thread.began = now
        return True

    def _look(self) -> None:
        if not self._looking.acquire(blocking=False):
            return
        try:
            now = self._clock.monotonic()
            silence, self._asked_at = now - self._asked_at, now
            seconds = now - self._looked_at
            if silence <= AGE_SECONDS_MAX and seconds < self._look_seconds:
                return
            taken = self._taken()
            before, self._taken_then, self._looked_at = self._taken_then, taken, now
            # What was taken while nobody asked, as between commits or in a hurry, says nothing.
            if silence <= AGE_SECONDS_MAX:
                self._adapt(seconds, max(0.0, taken - before))
        finally:
            self._looking.release()

    def _adapt(self, seconds: float, taken: float) -> None:
        self._excess = max(0.0, self._excess + taken - TOLERATED_RATE * seconds)
        if self._excess > TOLERATED_SECONDS:
            self._excess = 0.0
            self.share = max(SHARE_MIN, self.share / (1 + min(1.0, taken / seconds)))
            self._tell_once()
        elif not taken:
            self.share = min(1.0, self.share * (1 + RECOVERY_RATE * seconds))

    def _tell_once(self) -> None:
        if not self._has_told:
            self._has_told = True
            _log.info(
                "processors are taken from this machine while a commit is written: writing slower, so that training "
                "keeps its own"
            )


class Taken:
    """Reads what was taken from this machine, and from the control groups that this process is in.

    Args:
        proc: Where Linux tells of processes.
        cgroups: Where control groups are mounted.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._stat = proc / "stat"
        self._ticks = os.sysconf("SC_CLK_TCK")
        groups = [path for path in _cpu_stats(proc / "self" / "cgroup", cgroups) if _throttled_in(path) is not None]
        self._throttled = dict.fromkeys(groups, 0.0)
        self._stolen = 0.0

    def __call__(self) -> float:
        """Return seconds; 0 where nothing is told. What cannot be read this time is what it was the last time."""
        with contextlib.suppress(OSError, ValueError, IndexError), self._stat.open("rb", buffering=0) as file:
            self._stolen = int(file.read(_CPU_LINE_NBYTES).split()[8]) / self._ticks
        for path, before in self._throttled.items():
            now = _throttled_in(path)
            self._throttled[path] = before if now is None else now
        return self._stolen + sum(self._throttled.values())


def _cpu_stats(membership: Path, root: Path) -> list[Path]:
    """Return where the groups of this process, and all that they are in, tell of processor time."""
    found: list[Path] = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        # "0::/a/b" is of version 2, "5:cpu,cpuacct:/a/b" of version 1: cgroups(7).
        names, _, path = line.partition(":")[2].partition(":")
        if not path or (names and "cpu" not in names.split(",")):
            continue
        tops = [root / names, root / "cpu"] if names else [root / "unified", root]
        top = next((top for top in tops if top.is_dir()), None)
        if top is None:
            continue
        group = top / path.lstrip("/")
        # A container may see its own group at the top, and a path that is true outside: what is there counts.
        if ".." in group.parts:
            group = top
        found += [place / "cpu.stat" for place in (group, *group.parents) if place == top or top in place.parents]
    return found


def _throttled_in(path: Path) -> float | None:
    """Return for how many seconds a group had no processor because of its quota; None: that is not told."""
    try:
        facts = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        if "throttled_usec" in facts:
            return int(facts["throttled_usec"]) / 1e6
        return int(facts["throttled_time"]) / 1e9
    except (OSError, ValueError, KeyError):
        return None
