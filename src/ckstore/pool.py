"""Threads that ask many things at the same time, for a caller whom Ctrl-C may interrupt at any moment.

The futures of ``concurrent.futures`` wait by conditions, whose locks Python code takes: Ctrl-C can leave one locked,
and a thread that has an answer then waits for ever, and who waits for that thread. Here all pass through queues made
in C, of which Ctrl-C leaves nothing behind.

Invariants:
- Nothing that was sent runs any more when ``close`` returns, and what had not begun by then never runs.
- Answers come in the order of what was asked, and so many at most wait to be taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from queue import SimpleQueue
from typing import Generic, TypeVar

from ckstore.latch import Latch
from ckstore.workers import begin

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
                begin(thread)
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


def ask_at_once(
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
