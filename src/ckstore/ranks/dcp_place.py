"""Which store, run and checkpoint a writer or reader of torch.distributed.checkpoint means, and the open store.

A ``checkpoint_id`` that a user passes to ``dcp.save`` or ``dcp.load`` is a step, or a store with or without a step.
"""

from __future__ import annotations

import os
import re
import weakref
from functools import partial
from typing import Any

from ckstore.clock import SYSTEM_CLOCK
from ckstore.config import Limits, check_name
from ckstore.errors import NotFoundError, UsageError, shown_object
from ckstore.io.backend import Backend
from ckstore.io.url import backend_for
from ckstore.ranks import opening
from ckstore.store.repository import Repository
from ckstore.store.store_config import create_store, read_store_record

CheckpointId = str | os.PathLike[str] | int

_NUMBER = re.compile(r"[0-9]{1,18}")


def parse_checkpoint_id(checkpoint_id: CheckpointId) -> tuple[str | None, str | None]:
    """Return the store and the checkpoint that an id means; None for what it does not say.

    ``1200`` and ``"1200"`` are a step, ``"runs/a"`` is a store, ``"runs/a#1200"`` is a store and a step.

    Raises:
        UsageError: It is neither.
    """
    if isinstance(checkpoint_id, bool) or not isinstance(checkpoint_id, (int, str, os.PathLike)):
        raise UsageError(
            "a checkpoint_id is a step, a store, or a store and a step",
            where=shown_object(checkpoint_id),
            todo='use for example 1200, "runs/a" or "runs/a#1200"',
        )
    text = str(checkpoint_id) if isinstance(checkpoint_id, int) else os.fspath(checkpoint_id)
    if _NUMBER.fullmatch(text):
        return None, text
    store, sign, ref = text.rpartition("#")
    return (store, ref) if sign and store and ref else (text, None)


class StorePlace:
    """A store and a run, opened on first use. Pickling keeps the address only, so that another process can open it.

    Args:
        store: A folder, a URL, a backend, or an open repository, which is used and never closed.
        run: The run.
    """

    def __init__(self, store: str | os.PathLike[str] | Backend | Repository, run: str) -> None:
        self.run = check_name(run, "run")
        self._store = store
        self._repository: Repository | None = store if isinstance(store, Repository) else None

    def __getstate__(self) -> dict[str, Any]:
        return {"run": self.run, "_store": self.address, "_repository": None}

    @property
    def address(self) -> str:
        """The folder or URL of the store."""
        if isinstance(self._store, Repository):
            return self._store.backend.root
        return os.fspath(self._store) if isinstance(self._store, (str, os.PathLike)) else self._store.root

    def move(self, store: str) -> None:
        """Mean another store from now on."""
        if store != self.address:
            self._store, self._repository = store, None

    def open(self, *, create: bool) -> Repository:
        """Return the open store.

        Raises:
            NotFoundError: There is no store, and ``create`` is False.
            UsageError: The folder contains something else.
        """
        if self._repository is not None:
            return self._repository
        assert not isinstance(self._store, Repository)
        backend = backend_for(self._store)
        try:
            record = read_store_record(backend)
        except NotFoundError:
            if not create:
                raise
            record = create_store(backend, SYSTEM_CLOCK, Limits())
        self._repository = repository = Repository(backend, record, self.run)
        # Releases the lease when the place is garbage collected, and at exit.
        weakref.finalize(self, repository.close)
        return repository

    def open_late(self, rank: int) -> Repository:
        """Return the open store, which another rank has opened. Wait until this rank sees it.

        Raises:
            NotFoundError: This rank does not see it.
        """
        open_store = partial(self.open, create=False)
        return opening.opened_late(open_store, self.address, rank, SYSTEM_CLOCK, opening.VISIBLE_SECONDS)

    def release_lease(self) -> None:
        """Let others write the run, unless the repository is the user's own."""
        if self._repository is not None and not isinstance(self._store, Repository):
            self._repository.lease.release()
