"""How fast a saver works where what it takes is taken from training, whatever its niceness.

A virtual machine or a container often may use as much processor time as it has processors, or less, and what its host
does for it counts too: on one host that we measured, each GB that is written takes 1.2 s of a processor there. Whoever
wants more has processors taken away for moments, and the host does not ask which thread is nice. Linux counts that:
the "steal" of ``/proc/stat`` (proc(5)), and ``throttled_usec`` or ``throttled_time`` of a cgroup's ``cpu.stat``.

So while the saver gives way it rests after each chunk, for longer when time was taken (additive increase and
multiplicative decrease, as Chiu and Jain showed for networks, 1989), and as short as it can be without. Where resting
saves nothing (others take the processors, or training takes all of them whole) it is not done.

Invariants:
- No thread waits for another one here, also where one was put aside: what one of them is looking at, others skip.
- A rest is short (``REST_SECONDS_MAX``) and follows work: whoever may begin will begin.
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
"""Between two looks: ten times the grain of "steal"."""

LOOK_SECONDS_MAX = 2.0
"""Of looks that are further apart it is not known what happened in between, and of chunks not when they ended."""

SHARE_MIN = 0.25
"""A commit takes at most about four times as long."""

REST_SECONDS_MAX = 0.25

OVERSLEPT_SECONDS_MAX = 0.02

TOLERATED_RATE = 0.02
"""Processors, taken away, that count as none: a look sees some hundredth of a second, or nothing."""

RECOVERY_RATE = 0.05
"""By what the share grows in a second in which nothing was taken."""

PROOF_SECONDS = 0.05
"""Taken from a saver that works without a rest, before it begins to rest: what resting is held against."""

TRIAL_CHUNKS = 128
"""After as many chunks it is looked whether resting has paid; not in the first of these spans, when it still adapts."""

WORTH = 0.5
"""Of what a chunk costs without a rest: with rests it must cost less, or there is no point in them."""

TRUCE_SECONDS = 60.0
"""Before it is tried again where it has not paid."""

_CPU_LINE_NBYTES = 256
_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(slots=True)
class _Tally:
    """What was taken while some chunks were worked on."""

    taken: float = 0.0
    seconds: float = 0.0
    chunks: int = 0
    spans: int = 0

    @property
    def cost(self) -> float:
        """Seconds that a chunk costs."""
        return self.taken / max(1, self.chunks)


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
        taken: Returns the seconds of processors that were taken from this machine or container, all in all.
        clock: What time it is.
    """

    def __init__(self, taken: Callable[[], float], clock: Clock = SYSTEM_CLOCK) -> None:
        self.share = 1.0
        """Of the time that each thread works; the rest of it rests."""
        self._taken = taken
        self._clock = clock
        self._looking = threading.Lock()
        self._looked_at = clock.monotonic()
        self._taken_then = taken()
        self._chunks = 0
        self._without, self._with = _Tally(), _Tally()
        self._truce_until = self._looked_at
        self._has_told = False
        self._threads: dict[int, _Thread] = {}

    def admits(self, thread_index: int) -> bool:
        """Whether this thread may begin a chunk now; it asks again and again until it may."""
        now = self._clock.monotonic()
        self._look(now)
        thread = self._threads.setdefault(thread_index, _Thread(asked=now))
        if thread.began is not None:
            worked, thread.began, thread.asked = now - thread.began, None, now
            rest = worked * (1 / self.share - 1) if worked < LOOK_SECONDS_MAX else 0.0
            thread.owed = min(REST_SECONDS_MAX, thread.owed + rest)
        rested = now - thread.asked
        if rested < thread.owed:
            return False
        # Whoever asks now and then rests for a little too long, and has that taken off the next time.
        thread.owed = max(-OVERSLEPT_SECONDS_MAX, thread.owed - rested)
        thread.began = now
        self._chunks += 1
        return True

    def _look(self, now: float) -> None:
        if now - self._looked_at < LOOK_SECONDS or not self._looking.acquire(blocking=False):
            return
        try:
            seconds, self._looked_at = now - self._looked_at, now
            before, self._taken_then = self._taken_then, self._taken()
            chunks, self._chunks = self._chunks, 0
            # Another thread may have looked just before this one locked.
            if LOOK_SECONDS / 2 < seconds < LOOK_SECONDS_MAX:
                self._adapt(now, seconds, max(0.0, self._taken_then - before), chunks)
        finally:
            self._looking.release()

    def _adapt(self, now: float, seconds: float, taken: float, chunks: int) -> None:
        if now < self._truce_until:
            return
        tally = self._without if self.share == 1 else self._with
        tally.taken, tally.seconds, tally.chunks = tally.taken + taken, tally.seconds + seconds, tally.chunks + chunks
        if self.share == 1 and tally.taken < PROOF_SECONDS:
            if tally.seconds > LOOK_SECONDS_MAX:
                self._without = _Tally()
        elif taken > TOLERATED_RATE * seconds:
            self._tell_once()
            self.share = max(SHARE_MIN, self.share / (1 + min(1.0, taken / seconds)))
        else:
            self.share = min(1.0, self.share * (1 + RECOVERY_RATE * seconds))
            if self.share == 1:
                self._without, self._with = _Tally(), _Tally()
        if self._with.chunks >= TRIAL_CHUNKS:
            self._judge(now)

    def _tell_once(self) -> None:
        if not self._has_told:
            self._has_told = True
            _log.info(
                "processors are taken from this machine while a commit is written: writing slower, so that training "
                "keeps its own"
            )

    def _judge(self, now: float) -> None:
        """Go on without rests for a while if chunks cost as much with them."""
        has_paid = self._with.cost < WORTH * self._without.cost
        if has_paid or not self._with.spans:
            self._with = _Tally(spans=self._with.spans + 1)
            return
        _log.debug("writing slower saves training nothing: full speed for %.0f s", TRUCE_SECONDS)
        self.share, self._truce_until = 1.0, now + TRUCE_SECONDS
        self._without, self._with = _Tally(), _Tally()


class Taken:
    """Reads what was taken from this machine, and from the control groups that this process is in."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = _CGROUP_ROOT) -> None:
        self._stat = proc / "stat"
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._files = [
            path for path in _cpu_stats(proc / "self" / "cgroup", cgroups) if _throttled_in(path) is not None
        ]

    def __call__(self) -> float:
        """Return seconds; 0 where nothing is known."""
        return self._stolen() + sum(_throttled_in(path) or 0.0 for path in self._files)

    def _stolen(self) -> float:
        with contextlib.suppress(OSError, ValueError, IndexError), self._stat.open("rb", buffering=0) as file:
            return int(file.read(_CPU_LINE_NBYTES).split()[8]) / self._ticks
        return 0.0


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
        tops = [root / names, root / "cpu"] if names else [root, root / "unified"]
        top = next((top for top in tops if top.is_dir()), root)
        group = top / path.lstrip("/")
        # A container may see its own group at the top, and its path as it is outside.
        group = group if group.is_dir() and ".." not in group.parts else top
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
