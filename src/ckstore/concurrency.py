"""Something that happens once, waited for by threads that Ctrl-C may interrupt.

``threading.Event`` is made of Python code: a signal whose handler raises right after its lock was taken, before the
``with`` around it has begun, leaves that lock locked. Whoever sets the event then waits for it for ever, and so does
whoever waits for the event. Of waits that a signal comes to as they begin it happens to some in a thousand
(``tests/unit/test_latch.py`` counts them).

Invariants:
- No lock is held but by somebody who waits, and that one is his own: nobody ever waits for one that was left locked.
- Whoever is interrupted leaves nothing that keeps others waiting: if it was in ``set``, they look by themselves.

Run one step on many chunks in parallel, with turns in the order of the plan; let Ctrl-C interrupt none halfway.

The threads take chunks in ascending order, so the lowest chunk not yet done is always being worked on
and a thread that waits for its turn never waits for one that has not begun.

Threads that ask many things at the same time, for a caller whom Ctrl-C may interrupt at any moment.

The futures of ``concurrent.futures`` wait by conditions, whose locks Python code takes: Ctrl-C can leave one locked,
and a thread that has an answer then waits for ever, and who waits for that thread. Here all pass through queues made
in C, of which Ctrl-C leaves nothing behind.

Invariants:
- Nothing that was sent runs any more when ``close`` returns, and what had not begun by then never runs.
- Answers come in the order of what was asked, and so many at most wait to be taken.

Log from where an exception, or a wait, would keep others waiting.

Filters and handlers are the user's, and Python lets what they raise through to whoever logs. And each handler has a
lock that Python code takes: Ctrl-C in the middle of a trainer's own ``log.info`` can leave it with the main thread for
ever (``tests/unit/test_logs.py`` counts how often), and every other thread that logs by that handler then waits for
ever.
On the threads that copy a state, or hear of a saver's end, either would leave somebody waiting who needs them.

So all threads but the main one have a thread of its own say what they have to say, and wait a little for it at most.

Invariants:
- ``tell`` raises nothing, and of a thread other than the main one it takes no longer than ``LOG_WAIT_SECONDS``; but
  where no thread can be started it is said by whoever tells it, however long that takes.
- What is said is said in the order in which it was told; what waits to be said is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from queue import SimpleQueue
from typing import Generic, TypeVar

from ckstore.clock import SYSTEM_CLOCK

WAKE_SECONDS = 1.0
"""Between two looks of who waits, in case that whoever has set it was interrupted before all were woken."""


class Latch:
    """Is set once, and stays so."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Return whether it has happened."""
        return self._is_set

    @property
    def waiting_count(self) -> int:
        """How many threads wait for it."""
        return len(self._waiting)

    def set(self) -> None:
        """Wake all who wait, and let pass who comes later; never waits."""
        self._is_set = True
        # Whoever is not in the list by now sees that it has happened. Two may be setting it at a time.
        with contextlib.suppress(IndexError):
            while True:
                self._waiting.pop().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it happens.

        Args:
            timeout: Seconds; None: as long as it takes.

        Returns:
            Whether it has happened.
        """
        if not self._is_set:
            mine = threading.Lock()
            mine.acquire()
            # Not before: it may be set before this one is in the list.
            self._waiting.append(mine)
            end = math.inf if timeout is None else SYSTEM_CLOCK.monotonic() + timeout
            while not self._is_set and (left := end - SYSTEM_CLOCK.monotonic()) > 0:
                mine.acquire(timeout=min(WAKE_SECONDS, left))
            # Whoever is woken is not in it any more.
            with contextlib.suppress(ValueError):
                self._waiting.remove(mine)
        return self._is_set


Result = TypeVar("Result")

Step = Callable[[int, int], None]
"""Called with the index of the chunk and the index of the thread."""


TURN_SECONDS = 0.004
"""How often a thread that may not begin looks whether it may by now."""


def noop(*_: object) -> None:
    """Do nothing. Replaces a callback that must be called only once."""


class ThreadLimit:
    """How many threads may begin chunks at present.

    It is set and read without a lock: whoever sets it must never wait for a thread that has no processor.
    """

    def __init__(self) -> None:
        self.maximum: int | None = None
        """None: all threads may begin. The first one always may."""

    def allows(self, thread_index: int) -> bool:
        """Whether the thread of this index may begin a chunk."""
        most = self.maximum
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
            if self._is_over.wait(TURN_SECONDS):
                return None
        with self._lock:
            index = None if self._is_over.is_set() else next(self._rest, None)
        if index is None:
            self._is_over.set()
        return index

    def end(self) -> None:
        """Hand out no more."""
        self._is_over.set()


def start_thread(thread: threading.Thread) -> None:
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
            start_thread(thread)
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


def call_on_new_thread(work: Callable[[], None]) -> None:
    """Call ``work`` on a new thread: how ``run_uninterrupted`` does it unless it is told otherwise."""
    start_thread(threading.Thread(target=work, name="ckstore-aside", daemon=True))


def run_uninterrupted(
    step: Callable[[], Result],
    *,
    on_interrupt: Callable[[BaseException], None],
    start: Callable[[Callable[[], None]], None] | None = None,
) -> Result:
    """Run ``step`` on another thread, so that Ctrl-C is raised in a caller who waits and never halfway through it.

    Args:
        step: What to run; whatever it raises is raised here.
        on_interrupt: Called with what interrupted the caller, to make the step end soon; it is waited for.
        start: Lets another thread call what it is given, which never raises; None: ``call_on_new_thread``.
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
        (start or call_on_new_thread)(work)
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


T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 2
"""Answers that wait to be taken, for each question that is under way: they bound the memory."""


class Pool:
    """Threads that call what they are sent; they start as they are needed.

    Args:
        count_max: How many at most.
        name: What they are called, before their numbers.
    """

    def __init__(self, count_max: int, name: str) -> None:
        self._count_max = count_max
        self._name = name
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_over = Latch()

    def send(self, call: Callable[[], object]) -> None:
        """Let one thread call this; it must not raise.

        Raises:
            RuntimeError: No thread can be started, and there is none.
        """
        if len(self._threads) < self._count_max:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=_serve, args=(self._work, self._is_over), name=name, daemon=True)
            # Before it starts: Ctrl-C must not leave one that nobody waits for.
            self._threads.append(thread)
            try:
                start_thread(thread)
            except RuntimeError:
                self._threads.remove(thread)
                if not self._threads:
                    raise
        self._work.put(call)

    def close(self) -> None:
        """Wait for what has begun, and drop what has not."""
        self._end()
        for thread in self._threads:
            if thread.is_alive():  # One that Ctrl-C has kept from beginning cannot be joined.
                thread.join()

    def _end(self) -> None:
        self._is_over.set()
        self._work.put(None)

    def __del__(self) -> None:
        # Ctrl-C may have come before ``close`` could do it.
        self._end()


def _serve(work: SimpleQueue[Callable[[], object] | None], is_over: Latch) -> None:
    while (call := work.get()) is not None and not is_over.is_set():
        call()
        # Nothing of it is kept alive while the thread sleeps.
        del call
    # For the next one.
    work.put(None)


def map_in_threads(
    ask: Callable[[T], R],
    items: Iterable[T],
    *,
    count_max: int,
    name: str,
    on_stop: Callable[[], object] = lambda: None,
) -> Iterator[R]:
    """Yield what is answered for each item, in their order.

    The first exception ends it. Whoever stops taking answers waits for those that are under way, and for no others.

    Args:
        ask: Asked on other threads, about several items at a time.
        items: What to ask about; taken as there is room.
        count_max: How many are under way at the same time.
        name: What the threads are called.
        on_stop: Called when not all are asked or answered, or one failed, before those under way are waited for.
    """
    asked, source = _Asked(ask, Pool(count_max, name)), enumerate(items)
    try:
        for number, item in islice(source, _AHEAD * count_max):
            asked.send(number, item)
        while asked.taken < asked.sent:
            answer = asked.next_answer()
            for number, item in islice(source, 1):
                asked.send(number, item)
            yield answer
    except BaseException:
        on_stop()
        raise
    finally:
        asked.pool.close()


class _Asked(Generic[T, R]):
    """What was asked, and the answers that nobody has taken yet."""

    def __init__(self, ask: Callable[[T], R], pool: Pool) -> None:
        self.pool = pool
        self.sent = self.taken = 0
        self._ask = ask
        self._told: SimpleQueue[tuple[int, tuple[R | None, BaseException | None]]] = SimpleQueue()
        self._waiting: dict[int, tuple[R | None, BaseException | None]] = {}

    def send(self, number: int, item: T) -> None:
        """Ask about an item, which is the next one."""
        ask, told = self._ask, self._told

        def call() -> None:
            try:
                told.put((number, (ask(item), None)))
            except BaseException as error:
                told.put((number, (None, error)))

        self.pool.send(call)
        self.sent = number + 1

    def next_answer(self) -> R:
        """Return the next one in order, or raise what was raised instead."""
        while self.taken not in self._waiting:
            self._waiting.update([self._told.get()])
        answer, error = self._waiting.pop(self.taken)
        self.taken += 1
        if error is not None:
            try:
                raise error
            finally:
                # It would keep this frame, and this frame would keep it.
                del error
        return answer  # type: ignore[return-value]  # R may be None itself


LOG_WAIT_SECONDS = 1.0
"""How long who tells something waits until it is said: what a thread logs before it acts is usually read before."""

QUEUED_LOG_RECORDS_MAX = 1000
"""What may wait to be said while a handler keeps everybody waiting; what comes after it is dropped."""


def log_safely(log: logging.Logger, level: int, text: str, *facts: object, exc_info: bool = False) -> None:
    """Log what a thread has to say that others wait for; what a filter or handler raises cannot be told, and is not.

    Args:
        log: Where to.
        level: One of those of ``logging``.
        text: What to say, with a place for each fact as ``logging`` has them.
        facts: What the places stand for.
        exc_info: Whether to say what exception is being handled.
    """
    failure = sys.exc_info() if exc_info else None
    frame, thread = sys._getframe(1), threading.current_thread()
    where = frame.f_code.co_filename, frame.f_lineno
    function = frame.f_code.co_name

    def say() -> None:
        if log.isEnabledFor(level):
            record = log.makeRecord(log.name, level, *where, text, facts, failure, function)
            # Who says it, not who passes it on.
            record.thread, record.threadName = thread.ident, thread.name
            log.handle(record)

    if thread is threading.main_thread() or not _speaker.has_said(say):
        # Nobody else can; and the main thread never waits for a lock that it was left with itself.
        with contextlib.suppress(Exception):
            say()


class _Speaker:
    """Says what others tell it, one after another, on a thread that is there while there is something to say."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin anew, in a forked child too: it has no thread, and perhaps a lock that nobody releases."""
        # Entered by threads that no signal interrupts, and for no longer than a thread takes to start.
        self._changing = threading.Lock()
        self._unsaid: deque[tuple[Callable[[], None], Latch]] = deque()
        self._is_speaking = False
        self._is_stuck = False

    def has_said(self, say: Callable[[], None]) -> bool:
        """Have it said, and wait a little for it; False: no thread can be started for it."""
        said = Latch()
        with self._changing:
            if len(self._unsaid) == QUEUED_LOG_RECORDS_MAX:
                return True
            self._unsaid.append((say, said))
            if not self._is_speaking:
                try:
                    threading.Thread(target=self._speak, name="ckstore-logs", daemon=True).start()
                except RuntimeError:
                    self._unsaid.pop()
                    return False
                self._is_speaking = True
        # Whoever waited in vain has waited for all who come after him, until something is said again.
        if not self._is_stuck and not said.wait(LOG_WAIT_SECONDS):
            self._is_stuck = True
        return True

    def _speak(self) -> None:
        while True:
            with self._changing:
                if not self._unsaid:
                    self._is_speaking = False
                    return
                say, said = self._unsaid.popleft()
            with contextlib.suppress(BaseException):
                say()
            self._is_stuck = False
            said.set()


_speaker = _Speaker()
os.register_at_fork(after_in_child=_speaker.begin)
