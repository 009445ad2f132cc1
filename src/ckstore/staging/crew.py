"""Threads that copy: how they are started, sent to work, waited for, and ended."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import threading
from collections.abc import Callable

from ckstore.logs import tell
from ckstore.workers import Result, begin, run_aside

_log = logging.getLogger("ckstore")

_processor_now: Callable[[], int] = ctypes.PyDLL(None).sched_getcpu
"""Which one the caller is on; the GIL is kept, so that this is still so when it returns."""


class Crew:
    """Threads that copy; they are started when first needed, and sleep in between.

    Args:
        count: How many there are at most.
        name: What the names of its threads begin with.
    """

    def __init__(self, count: int, name: str = "ckstore-stage") -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._changing = threading.RLock()
        """Held while these two are exchanged, or threads started: one counted here must serve what is sent here."""
        self.count = count
        self._waiters: Crew | None = None
        self._near: Crew | None = None
        self._is_closed = False

    @property
    def waiters(self) -> Crew:
        """One thread more, for what waits for devices: whoever copies must not wait behind it."""
        if self._waiters is None:
            self._waiters = Crew(1)
        return self._waiters

    def send(self, work: Callable[[], object], count: int | None = None) -> None:
        """Let threads call this, each once, or one more often; it must not raise.

        Where no thread can be started, for want of memory or while the interpreter ends, it is called right here.
        """
        count = self.count if count is None else min(count, self.count)
        is_sent = False
        while not is_sent:
            mine = self._work
            with contextlib.suppress(RuntimeError):
                self.start(count)
            if not self._threads:
                work()
                return
            for _ in range(count):
                mine.put(work)
            # Whoever closed the crew meanwhile has left its threads nothing but the word to end.
            is_sent = mine is self._work
        if self._is_closed:
            # These were started for what was still to be done, and nobody would end them.
            self.close(is_waited=False)

    def send_one(self, work: Callable[[], object]) -> None:
        """Let one thread call this; it must not raise."""
        self.send(work, 1)

    def see_through(self, step: Callable[[], Result]) -> Result:
        """Let one thread call this, and wait: Ctrl-C comes before it or after it, and never in its middle."""
        return run_aside(step, on_interrupt=lambda error: None, start=self.send_one)

    def see_through_here(self, step: Callable[[], Result]) -> Result:
        """As ``see_through``, by a thread of its own, on the processor that the caller leaves to wait.

        A thread that is woken goes to the processor that it ran on last. There another one of the trainer's may be
        computing, or spin, as those of OpenMP do after each parallel loop; and the caller's processor has nothing to do
        until the next tick of the scheduler, milliseconds (seen in traces).
        """
        if self._near is None:
            self._near = Crew(1, "ckstore-near")
        near = self._near

        def start(work: Callable[[], None]) -> None:
            # Its caller's, for whoever was interrupted here may have left the thread on one processor.
            processors = os.sched_getaffinity(0)

            def begin() -> None:
                try:
                    _run_on(0, processors)
                finally:
                    work()

            with contextlib.suppress(RuntimeError):
                near.start()
            thread = next(iter(near._threads), None)
            if thread is None or thread.native_id is None:
                # Threads of the crew may be there all the same.
                self.send_one(work)
                return
            _run_on(thread.native_id, {_processor_now()})
            near.send_one(begin)
            if self._is_closed:
                # Nobody would end its thread.
                near.close(is_waited=False)

        return run_aside(step, on_interrupt=lambda error: None, start=start)

    def start(self, count: int | None = None) -> None:
        """Start as many threads now."""
        with self._changing:
            # Both of one time: a handler of signals may close it in the middle of this.
            threads, work = self._threads, self._work
            while len(threads) < (self.count if count is None else count):
                name = f"{self._name}-{len(threads)}"
                thread = threading.Thread(target=_serve, args=(work,), name=name, daemon=True)
                begin(thread)
                threads.append(thread)

    def close(self, *, is_waited: bool = True) -> None:
        """End the threads after what they were sent; those that are started for more afterwards end after that."""
        threads = self._end()
        for thread in threads if is_waited else ():
            thread.join()

    def _end(self) -> list[threading.Thread]:
        """Tell all threads to end, before any is waited for: Ctrl-C must not leave one that nobody has told."""
        self._is_closed = True
        with self._changing:
            threads, self._threads = self._threads, []
            work, self._work = self._work, queue.SimpleQueue()
        work.put(None)
        others = [crew._end() for crew in (self._waiters, self._near) if crew is not None]
        return [*threads, *(thread for each in others for thread in each)]


def _serve(work: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (call := work.get()) is not None:
        try:
            call()
        except BaseException:
            # No Ctrl-C comes here, but whatever does: a thread that ended would still be counted, and waited for.
            with contextlib.suppress(BaseException):
                tell(_log, logging.ERROR, "a thread that copies met what it should not", exc_info=True)
        # Nothing of a commit is kept alive while the thread sleeps.
        del call
    # For the next one; Ctrl-C while a thread was started may have left one that nobody counts.
    work.put(None)


def _run_on(thread: int, processors: set[int]) -> None:
    # Where a thread runs is a matter of time, and of nothing else; -1, where the system tells of none, is no processor.
    with contextlib.suppress(OSError, ValueError):
        os.sched_setaffinity(thread, processors)
