"""Threads that stay correct when Ctrl-C (KeyboardInterrupt) is raised at any moment, and logging that never blocks.

The classes of ``threading`` and ``concurrent.futures`` take locks in Python code. A KeyboardInterrupt between taking
such a lock and entering its ``with`` block leaves it locked, and every thread that needs it waits forever. This happens
to about one in a thousand interrupted waits (``tests/unit/test_latch.py`` counts them). The tools here use only locks
that belong to one waiting thread, and queues that are implemented in C.

- ``Latch``: a one-shot event.
- ``run_in_turns``: run one step on many chunks in parallel, with turns in the order of the plan. Threads take chunks in
  ascending order. So the lowest unfinished chunk is always being processed, and a thread that waits for its turn never
  waits for a chunk that has not begun.
- ``run_uninterrupted``: run a step on another thread, so that Ctrl-C never interrupts it halfway.
- ``Pool`` and ``map_in_threads``: many calls at a time, with results in the order of the items.
- ``log_safely``: log from a thread that others wait for. A log handler belongs to the user: it may raise, and Ctrl-C
  during the trainer's own ``log.info`` may leave its lock locked (``tests/unit/test_logs.py`` counts how often). So all
  threads except the main one pass their records to a logging thread, and wait for it only briefly.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from queue import SimpleQueue
from typing import Generic, TypeVar

from ckstore.clock import SYSTEM_CLOCK

WAKE_SECONDS = 1.0
"""How often a waiting thread checks the event itself, in case ``set`` was interrupted before it woke all threads."""


class Latch:
    """A one-shot event. Thread-safe, and safe under KeyboardInterrupt in ``set`` and ``wait``.

    Each waiting thread uses a lock of its own, so no thread can wait for a lock that an interruption left locked. If
    ``set`` is interrupted, the waiting threads notice the event by themselves.
    """

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._is_set

    @property
    def waiting_count(self) -> int:
        """How many threads are waiting."""
        return len(self._waiting)

    def set(self) -> None:
        """Set the event and wake all waiting threads. Never waits."""
        self._is_set = True
        # A thread that is not in the list yet will see the flag. Two threads may be in this loop at a time.
        with contextlib.suppress(IndexError):
            while True:
                self._waiting.pop().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set.

        Args:
            timeout: Seconds. None: no limit.

        Returns:
            Whether the event is set.
        """
        if not self._is_set:
            own_lock = threading.Lock()
            own_lock.acquire()
            # Append before the check below: ``set`` may be called at any moment.
            self._waiting.append(own_lock)
            end = math.inf if timeout is None else SYSTEM_CLOCK.monotonic() + timeout
            while not self._is_set and (left := end - SYSTEM_CLOCK.monotonic()) > 0:
                own_lock.acquire(timeout=min(WAKE_SECONDS, left))
            # ``set`` has already removed the locks of the threads that it woke.
            with contextlib.suppress(ValueError):
                self._waiting.remove(own_lock)
        return self._is_set


Result = TypeVar("Result")

Step = Callable[[int, int], None]
"""Called with the index of the chunk and the index of the thread."""


TURN_SECONDS = 0.004
"""How often a thread that may not begin checks again."""


def noop(*_: object) -> None:
    """Do nothing. Replaces a callback that must be called only once."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Create very many objects without runs of Python's collector of reference cycles.

    The collector runs after every few thousand new objects and searches all objects of the process. Garbage of other
    threads waits meanwhile, so this is for short work that calls no code of the user. Several threads may pause it; it
    runs again at the latest when the last of them has finished.
    """
    was_enabled, pause = gc.isenabled(), object()
    try:
        if was_enabled:
            _pauses.add(pause)
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
            _pauses.discard(pause)


_pauses: set[object] = set()
"""Pauses of the collector that will end it again."""


def _end_pauses() -> None:
    """In a forked child: the threads that would end the pauses do not exist."""
    if _pauses:
        _pauses.clear()
        gc.enable()


os.register_at_fork(after_in_child=_end_pauses)


class ThreadLimit:
    """How many threads may begin chunks at present.

    Set and read without a lock, so that the thread that sets it never waits for a suspended thread.
    """

    def __init__(self) -> None:
        self.maximum: int | None = None
        """None: no limit. The first thread may always begin."""

    def allows(self, thread_index: int) -> bool:
        """Whether the thread of this index may begin a chunk."""
        maximum = self.maximum
        return maximum is None or thread_index < max(1, maximum)


class Stopped(Exception):
    """Raised in a thread that waits for its turn, after another thread failed."""


class Turns:
    """Lets chunk ``i`` pass after chunk ``i - 1``. Thread-safe."""

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
        # Not under the lock: the caller may wait during its turn, for example for a free buffer.
        yield
        with self._changed:
            self._next = index + 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Wake all waiting threads, which raise ``Stopped``."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()


class _Indices:
    """Distributes indices in ascending order to threads that may begin. Thread-safe."""

    def __init__(self, count: int, may_begin: Callable[[int], bool]) -> None:
        self._rest = iter(range(count))
        self._may_begin = may_begin
        self._lock = threading.Lock()
        self._is_over = Latch()

    def next_for(self, thread_index: int) -> int | None:
        """Return the next index when the thread may begin, or None if no index is left or ``end`` was called."""
        # Wait before taking an index: the other threads wait for the turn of every index that was taken.
        while not self._may_begin(thread_index):
            if self._is_over.wait(TURN_SECONDS):
                return None
        with self._lock:
            index = None if self._is_over.is_set() else next(self._rest, None)
        if index is None:
            self._is_over.set()
        return index

    def end(self) -> None:
        """Stop distributing indices."""
        self._is_over.set()


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        RuntimeError: The system cannot start a thread. Python also raises RuntimeError if Ctrl-C interrupts its wait
            for the new thread; then the original exception is raised instead.
    """
    handled = sys.exc_info()[1]
    try:
        thread.start()
    except RuntimeError as error:
        # The context is the interruption, unless it is an exception that the caller was already handling.
        if error.__context__ is not handled and error.__context__ is not None:
            raise error.__context__ from None
        raise
    finally:
        # Break the reference cycle between this frame and the exception.
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
    """Run ``step`` for every index below ``count``. Raise the first failure after every thread has ended.

    Args:
        count: Number of indices.
        thread_count: Number of threads, at most.
        step: Called for each index.
        turns: The turns that the steps wait for.
        on_failure: Called once when a step fails or the caller is interrupted. Must wake steps that wait for anything
            except a turn.
        may_begin: Whether the thread of an index may begin a step now. Called repeatedly; becomes true for index 0.
    """
    indices = _Indices(count, may_begin)
    failures: list[BaseException] = []
    # A queue and not a semaphore, whose lock an interruption could leave locked.
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()

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
            start_thread(thread)
        # The caller only waits, so Ctrl-C is raised here and never within a step.
        for _ in threads:
            ended.get()
    except BaseException as error:
        stop(error)
        raise
    finally:
        _join(threads)
    if failures:
        # Popped: an exception in a local variable would keep this frame and those of its callers alive.
        raise failures.pop(0)


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        # An interrupted start leaves a thread that cannot be joined.
        if thread.is_alive():
            thread.join()


def call_on_new_thread(work: Callable[[], None]) -> None:
    """Call ``work`` on a new thread. The default of ``run_uninterrupted``."""
    start_thread(threading.Thread(target=work, name="ckstore-uninterrupted", daemon=True))


def run_uninterrupted(
    step: Callable[[], Result],
    *,
    on_interrupt: Callable[[BaseException], None],
    start: Callable[[Callable[[], None]], None] | None = None,
) -> Result:
    """Run ``step`` on another thread and wait, so that Ctrl-C is raised in the caller and never within the step.

    Args:
        step: The function to run. Its exceptions are raised here.
        on_interrupt: Called with the exception that interrupted the caller, to make the step end early. The step is
            then waited for.
        start: Has another thread call its argument, which never raises. None: ``call_on_new_thread``.
    """
    results: list[Result] = []
    failures: list[BaseException] = []
    ended = Latch()
    # The first to take it decides whether the step runs: the thread, or an interruption while the thread is started.
    decision = threading.Lock()

    def work() -> None:
        if not decision.acquire(blocking=False):
            return
        try:
            results.append(step())
        except BaseException as error:
            failures.append(error)
        finally:
            ended.set()

    try:
        (start or call_on_new_thread)(work)
        ended.wait()
    except BaseException as error:
        if not decision.acquire(blocking=False):
            on_interrupt(error)
            wait_in_any_case(ended)
        raise
    if failures:
        raise failures.pop(0)
    return results[0]


def wait_in_any_case(event: Latch) -> None:
    """Wait for an event that is about to be set. Ignore further interruptions: one is already being raised."""
    while not event.is_set():
        with contextlib.suppress(BaseException):
            event.wait()


T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 2
"""Results per running call that may wait to be taken. Limits the memory."""


class Pool:
    """Threads that call functions. They are started when needed.

    When ``close`` returns, no function is running, and those that had not begun never run.

    Args:
        count_max: Number of threads, at most.
        name: Prefix of the thread names.
    """

    def __init__(self, count_max: int, name: str) -> None:
        self._count_max = count_max
        self._name = name
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_over = Latch()

    def send(self, call: Callable[[], object]) -> None:
        """Have a thread call a function, which must not raise.

        Raises:
            RuntimeError: No thread can be started, and there is none yet.
        """
        if len(self._threads) < self._count_max:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=_serve, args=(self._work, self._is_over), name=name, daemon=True)
            # Recorded before it starts, so that an interruption leaves no unknown thread.
            self._threads.append(thread)
            try:
                start_thread(thread)
            except RuntimeError:
                self._threads.remove(thread)
                if not self._threads:
                    raise
        self._work.put(call)

    def close(self) -> None:
        """Wait for the calls that have begun, and drop the others."""
        self._end()
        for thread in self._threads:
            # An interrupted start leaves a thread that cannot be joined.
            if thread.is_alive():
                thread.join()

    def _end(self) -> None:
        self._is_over.set()
        self._work.put(None)

    def __del__(self) -> None:
        # For a caller that was interrupted before it called ``close``.
        self._end()


def _serve(work: SimpleQueue[Callable[[], object] | None], is_over: Latch) -> None:
    while (call := work.get()) is not None and not is_over.is_set():
        call()
        # A sleeping thread must not keep the data of a call alive.
        del call
    # For the next thread.
    work.put(None)


def map_in_threads(
    call: Callable[[T], R],
    items: Iterable[T],
    *,
    count_max: int,
    name: str,
    on_stop: Callable[[], object] = lambda: None,
) -> Generator[R, None, None]:
    """Yield the result of each call, in the order of the items.

    The first exception ends the iteration. If the caller stops early, calls that have begun are waited for, and the
    others never run.

    Args:
        call: Called on other threads, for several items at a time.
        items: The items. Taken from the iterable as results are taken.
        count_max: Number of calls at a time, at most.
        name: Prefix of the thread names.
        on_stop: Called if the iteration ends early, before running calls are waited for.
    """
    calls, source = _Calls(call, Pool(count_max, name)), enumerate(items)
    try:
        for number, item in islice(source, _AHEAD * count_max):
            calls.send(number, item)
        while calls.taken < calls.sent:
            result = calls.next_result()
            for number, item in islice(source, 1):
                calls.send(number, item)
            yield result
    except BaseException:
        on_stop()
        raise
    finally:
        calls.pool.close()


class _Calls(Generic[T, R]):
    """Calls that were sent to a pool, and results that were not taken yet."""

    def __init__(self, call: Callable[[T], R], pool: Pool) -> None:
        self.pool = pool
        self.sent = self.taken = 0
        self._call = call
        self._results: SimpleQueue[tuple[int, tuple[R | None, BaseException | None]]] = SimpleQueue()
        self._waiting: dict[int, tuple[R | None, BaseException | None]] = {}

    def send(self, number: int, item: T) -> None:
        """Call the function for the next item."""
        call, results = self._call, self._results

        def work() -> None:
            try:
                results.put((number, (call(item), None)))
            except BaseException as error:
                results.put((number, (None, error)))

        self.pool.send(work)
        self.sent = number + 1

    def next_result(self) -> R:
        """Return the next result in order, or raise the exception of its call."""
        while self.taken not in self._waiting:
            self._waiting.update([self._results.get()])
        result, error = self._waiting.pop(self.taken)
        self.taken += 1
        if error is not None:
            try:
                raise error
            finally:
                # Break the reference cycle between this frame and the exception.
                del error
        return result  # type: ignore[return-value]  # R may be None itself


LOG_WAIT_SECONDS = 1.0
"""How long a thread waits for its record to be logged. So a record is usually logged before the thread goes on."""

QUEUED_LOG_RECORDS_MAX = 1000
"""Records that may wait while a handler blocks. Further ones are dropped."""


def log_safely(log: logging.Logger, level: int, text: str, *facts: object, exc_info: bool = False) -> None:
    """Log a record from a thread that others wait for. Exceptions of filters and handlers are dropped.

    On the main thread, or if no logging thread can be started, the record is logged directly. On any other thread this
    returns after at most ``LOG_WAIT_SECONDS``. Records keep their order.

    Args:
        log: The logger.
        level: One of the levels of ``logging``.
        text: The message, with placeholders as in ``logging``.
        facts: Values of the placeholders.
        exc_info: Whether to add the exception that is being handled.
    """
    failure = sys.exc_info() if exc_info else None
    frame, thread = sys._getframe(1), threading.current_thread()
    where = frame.f_code.co_filename, frame.f_lineno
    function = frame.f_code.co_name

    def emit() -> None:
        if log.isEnabledFor(level):
            record = log.makeRecord(log.name, level, *where, text, facts, failure, function)
            # Name the thread that logs, not the logging thread.
            record.thread, record.threadName = thread.ident, thread.name
            log.handle(record)

    if thread is threading.main_thread() or not _logging_thread.has_taken(emit):
        # The main thread cannot wait for a lock that it left locked itself: the locks of handlers are reentrant.
        with contextlib.suppress(Exception):
            emit()


class _LoggingThread:
    """Emits the records of other threads, in order, on a thread that runs while there are any."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything. In a forked child the thread does not exist, and the lock may be held forever."""
        # Held only by threads that no signal interrupts, and no longer than a thread takes to start.
        self._changing = threading.Lock()
        self._queue: deque[tuple[Callable[[], None], Latch]] = deque()
        self._is_running = False
        self._is_stuck = False

    def has_taken(self, emit: Callable[[], None]) -> bool:
        """Queue a record and wait briefly until it is emitted. Return False if no thread can be started."""
        emitted = Latch()
        with self._changing:
            if len(self._queue) == QUEUED_LOG_RECORDS_MAX:
                return True
            self._queue.append((emit, emitted))
            if not self._is_running:
                try:
                    threading.Thread(target=self._run, name="ckstore-logs", daemon=True).start()
                except RuntimeError:
                    self._queue.pop()
                    return False
                self._is_running = True
        # After one wait has timed out, no thread waits until a record is emitted again.
        if not self._is_stuck and not emitted.wait(LOG_WAIT_SECONDS):
            self._is_stuck = True
        return True

    def _run(self) -> None:
        while True:
            with self._changing:
                if not self._queue:
                    self._is_running = False
                    return
                emit, emitted = self._queue.popleft()
            with contextlib.suppress(BaseException):
                emit()
            self._is_stuck = False
            emitted.set()


_logging_thread = _LoggingThread()
os.register_at_fork(after_in_child=_logging_thread.reset)


def leave_idle_class(thread: threading.Thread) -> None:
    """Return a thread from the idle class, which it inherited, to the normal one, if the system allows that."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(thread.native_id or 0, os.SCHED_OTHER, os.sched_param(0))
