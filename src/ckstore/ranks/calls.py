"""Notice what other ranks do with the same handle: another call, or the loss of a saver.

One rank may have called ``commit`` where another has called ``commit_async``. Trainers make the first with each other,
savers the second. So each of these ranks would wait for the others until its time is over. Rank 0 tells ranks that are
missing in a commit who has begun it, and how often that rank had called ``commit_async`` before. A rank that has called
it more often made another call, and fails the commit on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckstore.format.error_records import ErrorRecord
from ckstore.ranks.actions import other_calls_record
from ckstore.ranks.messages import Awaited, SaverLost


class Calls:
    """The calls of one rank. Thread-safe.

    Args:
        rank: The rank.
        handle: Names the store that it has opened; the same on all ranks, and for no other one.
    """

    def __init__(self, rank: int, handle: str) -> None:
        self.handle = handle
        self.background = 0
        """Calls of ``commit_async``."""
        self._rank = rank
        self._lock = threading.Lock()
        self._begun = 0
        self._awaited: Awaited | None = None
        self._savers_lost: dict[int, SaverLost] = {}
        self._on_saver_lost: Callable[[int, str, int], None] | None = None

    def note(self, message: Awaited | SaverLost) -> ErrorRecord | None:
        """Note what another rank has done. Return the error if this one has made another call than that rank."""
        if isinstance(message, Awaited):
            return self.await_by(message)
        with self._lock:
            self._savers_lost[message.rank] = message
            call = self._on_saver_lost
        if call is not None:
            call(message.rank, message.how, message.number)
        return None

    def call_when_saver_lost(self, call: Callable[[int, str, int], None]) -> None:
        """Have a function called, on any thread, for each rank whose trainer loses its saver, or has lost it.

        Args:
            call: Gets the rank, what happened, and the number of the background commit.
        """
        with self._lock:
            self._on_saver_lost = call
            lost = list(self._savers_lost.values())
        for each in lost:
            call(each.rank, each.how, each.number)

    def begin_background(self) -> int:
        """Note a call of ``commit_async``. Return its number, from 1."""
        with self._lock:
            self.background += 1
            return self.background

    def begin(self, number: int) -> None:
        """Note a call of ``commit``, with the number of the commit."""
        with self._lock:
            self._begun = number

    def await_by(self, message: Awaited) -> ErrorRecord | None:
        """Note that another rank has begun a commit. Return the error if this one has made another call instead."""
        with self._lock:
            self._awaited = message
        found = self.take_missed()
        return None if found is None else found[1]

    def take_missed(self) -> tuple[Awaited, ErrorRecord] | None:
        """Return the commit in place of which this rank has called ``commit_async``, and the error; None: none.

        Each is returned once: the caller fails this commit.
        """
        with self._lock:
            other = self._awaited
            if other is None or other.number <= self._begun or other.background >= self.background:
                return None
            self._awaited = None
            return other, other_calls_record(other.step, {other.rank: other.background, self._rank: self.background})
