"""Run one step on many chunks in parallel, with turns in the order of the plan; let Ctrl-C interrupt none halfway.

The threads take chunks in ascending order, so the lowest chunk not yet done is always being worked on
and a thread that waits for its turn never waits for one that has not begun.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ckstore.latch import Latch

Result = TypeVar("Result")

Step = Callable[[int, int], None]
"""Called with the index of the chunk and the index of the thread."""


LOOK_SECONDS = 0.004
"""How often a thread that may not begin looks whether it may by now."""


class Headcount:
    """How many threads may begin chunks at present.

    It is set and read without a lock: whoever sets it must never wait for a thread that has no processor.
    """

    def __init__(self) -> None:
        self.most: int | None = None
        """None: all threads may begin. The first one always may."""

    def admits(self, thread_index: int) -> bool:
        """Whether the thread of this index may begin a chunk."""
        most = self.most
        return most is None or thread_index < max(1, most)


class Stopped(Exception):
    """Raised in a thread that waits for its turn after another one failed."""


class Turns:
    """Lets chunk ``i`` pass after chunk ``i - 1``."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._is_stopped = False

    @contextmanager
    def turn(self, index: int) -> Iterator[None]:
        """Wait for the turn of a chunk, and pass it on afterwards."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._next == index)
            if self._is_stopped:
                raise Stopped
        # Outside the condition's lock: what happens in a turn may itself wait, for a free buffer say.
        yield
        with self._changed:
            self._next = index + 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Wake everybody who waits; they raise ``Stopped``."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()


class _Indices:
    """Hands out indices in ascending order, to threads that may begin."""

    def __init__(self, count: int, may_begin: Callable[[int], bool]) -> None:
        self._rest = iter(range(count))
        self._may_begin = may_begin
        self._lock = threading.Lock()
        self._is_over = Latch()

    def next_for(self, thread_index: int) -> int | None:
        """Return the next index, waiting until the thread may begin with it; None: there is none, or all is over."""
        # Never waits between an index and its turn: others wait for that.
        while not self._may_begin(thread_index):
            if self._is_over.wait(LOOK_SECONDS):
                return None
        with self._lock:
            index = None if self._is_over.is_set() else next(self._rest, None)
        if index is None:
            self._is_over.set()
        return index

    def end(self) -> None:
        """Hand out no more."""
        self._is_over.set()


def begin(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        RuntimeError: There is no room for one. Python's own wait for a thread to begin may make such an error of Ctrl-C
            as well; that is raised as what it was.
    """
    handled = sys.exc_info()[1]
    try:
        thread.start()
    except RuntimeError as error:
        # What the caller is dealing with is the context of whatever is raised here, and no Ctrl-C.
        if error.__context__ is not handled and error.__context__ is not None:
            raise error.__context__ from None
        raise
    finally:
        # It would keep this frame, and this frame would keep it.
        del handled


def run_in_turns(
    count: int,
    thread_count: int,
    step: Step,
    turns: Turns,
    *,
    on_failure: Callable[[], None],
    may_begin: Callable[[int], bool] = lambda _: True,
) -> None:
    """Run ``step`` for every index below ``count``; raise the first failure once every thread has ended.

    Args:
        count: How many indices there are.
        thread_count: Threads to start, at most.
        step: Called for each index.
        turns: In which order those who ask for a turn get it.
        on_failure: Called once, when a step fails or the caller is interrupted; wakes who waits, but not for a turn.
        may_begin: Whether the thread of an index may begin a step now, asked again and again; that of 0 soon may.
    """
    indices = _Indices(count, may_begin)
    failures: list[BaseException] = []
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # Not a semaphore, for what latch.py says of events.

    def stop(error: BaseException) -> None:
        failures.append(error)
        indices.end()
        turns.stop()
        on_failure()

    def work(thread_index: int) -> None:
        try:
            while (index := indices.next_for(thread_index)) is not None:
                step(index, thread_index)
        except Stopped:
            return
        except BaseException as error:
            stop(error)
        finally:
            ended.put(None)

    threads = [
        threading.Thread(target=work, args=(index,), name=f"ckstore-chunk-{index}", daemon=True)
        for index in range(min(thread_count, count))
    ]
    try:
        for thread in threads:
            begin(thread)
        # The caller only waits, so that Ctrl-C is raised here and never in the middle of a step.
        for _ in threads:
            ended.get()
    except BaseException as error:
        stop(error)
        raise
    finally:
        for thread in threads:
            if thread.is_alive():  # One that Ctrl-C has kept from beginning cannot be joined.
                thread.join()
    if failures:
        # Out of the list: an error that this frame has keeps the frame, and it all that its callers have.
        raise failures.pop(0)


def start_thread(work: Callable[[], None]) -> None:
    """Call ``work`` on a new thread: how ``run_aside`` does it unless it is told otherwise."""
    begin(threading.Thread(target=work, name="ckstore-aside", daemon=True))


def run_aside(
    step: Callable[[], Result],
    *,
    on_interrupt: Callable[[BaseException], None],
    start: Callable[[Callable[[], None]], None] | None = None,
) -> Result:
    """Run ``step`` on another thread, so that Ctrl-C is raised in a caller who waits and never halfway through it.

    Args:
        step: What to run; whatever it raises is raised here.
        on_interrupt: Called with what interrupted the caller, to make the step end soon; it is waited for.
        start: Lets another thread call what it is given, which never raises; None: ``start_thread``.
    """
    results: list[Result] = []
    failures: list[BaseException] = []
    ended = Latch()
    # Who takes it first decides whether the step runs: the thread, or whatever interrupts the caller while it starts.
    chance = threading.Lock()

    def work() -> None:
        if not chance.acquire(blocking=False):
            return
        try:
            results.append(step())
        except BaseException as error:
            failures.append(error)
        finally:
            ended.set()

    try:
        (start or start_thread)(work)
        ended.wait()
    except BaseException as error:
        if not chance.acquire(blocking=False):
            on_interrupt(error)
            _wait_in_any_case(ended)
        raise
    if failures:
        raise failures.pop(0)
    return results[0]


def _wait_in_any_case(event: Latch) -> None:
    """Wait for what comes soon; whoever interrupts the wait has interrupted the caller before, and is told by that."""
    while not event.is_set():
        with contextlib.suppress(BaseException):
            event.wait()
