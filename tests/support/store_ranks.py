"""A job whose ranks are threads of one process, and use a store only through what a user calls."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ckstore


class StoreRanks:
    """A job.

    Args:
        world: Number of ranks.
        **options: As for ``ckstore.Ranks``.
    """

    def __init__(self, world: int, **options: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as end:
            address = f"127.0.0.1:{end.getsockname()[1]}"
        options = {"token": secrets.token_hex(), **options}
        self.ranks = [ckstore.Ranks(rank, world, address, **options) for rank in range(world)]
        self.stores: list[ckstore.Store] = []
        self._threads = ThreadPoolExecutor(world)

    def each(self, call: Callable[[int], Any], ranks: list[int] | None = None) -> list[Any]:
        """Call a function for these ranks in threads. Return the results; an exception is a result, too."""

        def caught(rank: int) -> Any:
            try:
                return call(rank)
            except Exception as error:
                return error

        return list(self._threads.map(caught, range(len(self.ranks)) if ranks is None else ranks))

    def open(self, place: Callable[[int], Any], **options: Any) -> list[Any]:
        """Open the store of each rank; callable options are called with the rank."""

        def opened(rank: int) -> ckstore.Store:
            own = {name: value(rank) if callable(value) else value for name, value in options.items()}
            return ckstore.open(place(rank), ranks=self.ranks[rank], **own)

        found = self.each(opened)
        self.stores = [each for each in found if isinstance(each, ckstore.Store)]
        return found

    def stores_do(self, call: Callable[[ckstore.Store, int], Any]) -> list[Any]:
        """Call a function with the store and the number of each rank in threads; as ``each``."""
        return self.each(lambda rank: call(self.stores[rank], rank))

    def commit(self, state: Callable[[int], Any], step: Callable[[int], int] = lambda rank: 1, **options: Any) -> list:
        """Commit on all ranks; return what each gets."""
        return self.each(lambda rank: self.stores[rank].commit(state(rank), step(rank), **options))

    def close(self) -> None:
        """End the job."""
        for store in self.stores:
            store.close()
        for ranks in self.ranks:
            ranks.close()
        self._threads.shutdown()
