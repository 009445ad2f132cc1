"""Ask a backend about many things: in a folder one after another, far away many at a time, always in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from ckstore.io.backend import Backend, Distant

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 2
"""Answers that wait to be taken, for each request that is under way: they bound the memory."""


def ask_each(backend: Backend, ask: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield what is answered for each item, in their order; far away, many requests are under way at the same time.

    The first exception ends it. Whoever stops taking answers waits for those that are under way, and for no others.
    """
    if not isinstance(backend, Distant):
        yield from map(ask, items)
        return
    from concurrent.futures import ThreadPoolExecutor

    source = iter(items)
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(backend.requests_at_once, thread_name_prefix="ckstore-remote") as threads:
        try:
            waiting.extend(threads.submit(ask, item) for item in islice(source, _AHEAD * backend.requests_at_once))
            while waiting:
                answer = waiting.popleft().result()
                waiting.extend(threads.submit(ask, item) for item in islice(source, 1))
                yield answer
        finally:
            for future in waiting:
                future.cancel()


def do_each(backend: Backend, act: Callable[[T], object], items: Iterable[T]) -> None:
    """Do something to each item, in their order, or far away many at a time in any order; all are tried.

    Raises:
        Exception: The first that failed, after all others were tried.
    """

    def tried(item: T) -> Exception | None:
        try:
            act(item)
        except Exception as error:
            return error
        return None

    first: Exception | None = None
    for error in ask_each(backend, tried, items):
        first = first or error
    if first is not None:
        raise first
