"""Ask a backend about many things: in a folder one after another, far away many at a time, always in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ckstore.concurrency import map_in_threads
from ckstore.io.backend import Backend, Distant

T = TypeVar("T")
R = TypeVar("R")


def map_concurrent(backend: Backend, ask: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield what is answered for each item, in their order; far away, many requests are under way at the same time.

    The first exception ends it. Whoever stops taking answers waits for those that are under way, and for no others.
    """
    if isinstance(backend, Distant):
        return map_in_threads(ask, items, count_max=backend.requests_at_once, name="ckstore-remote")
    return map(ask, items)


def for_each_concurrent(backend: Backend, act: Callable[[T], object], items: Iterable[T]) -> None:
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
    for error in map_concurrent(backend, tried, items):
        first = first or error
    if first is not None:
        raise first
