"""``ckstore.open``, and how the command line opens a store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ckstore.api import Store
from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.config import DemotePolicy, EngineName, Limits, Policy, check_policy
from ckstore.errors import NotFoundError
from ckstore.io.backend import Backend
from ckstore.io.url import backend_for
from ckstore.ops.gc.policy import Retention, seconds_of
from ckstore.store.repository import Repository
from ckstore.store.store_config import create_store, read_store_record

if TYPE_CHECKING:
    from ckstore.format.records import StoreRecord
    from ckstore.ranks.world import Ranks


def open(
    path: str | os.PathLike[str] | Backend,
    *,
    run: str = "main",
    create: bool = True,
    policy: Policy | None = None,
    retention: Retention | Mapping[str, Any] | None = None,
    gc_every: int = 10,
    trash_for: str | float | None = None,
    demotion: DemotePolicy | Mapping[str, Any] | Literal["stored"] | None = None,
    demote_every: int = 10,
    engine: EngineName = "auto",
    allow_shared_folder: bool = False,
    shared: Literal["group", "umask"] | None = None,
    ranks: Ranks | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Store:
    """Open a store; create it on first use.

    Args:
        path: A folder, a URL (``file://``, ``s3://``, ``gs://``, ``az://``), or a backend.
        run: The run to work in. Letters, digits, ``.``, ``_`` and ``-``.
        create: Create the store if it does not exist.
        policy: How commits are stored, unless a commit is given its own policy.
        retention: Delete checkpoints that match none of these rules, and free space, after every ``gc_every`` commits.
            A child process does it; commits do not wait. A ``Retention``, or a mapping of its rules.
        gc_every: Commits of the run between two collections, counted over all handles.
        trash_for: How long deleted checkpoints can be brought back: ``"2h"``, ``"7d"``, or seconds; 0: not at all.
            Applies to these collections and to ``gc`` of this handle. None: the value stored with the store, else one
            day. A commit that finds the disk full empties the trash earlier.
        demotion: Store old checkpoints again with a loss after every ``demote_every`` commits, also in a child process.
            A ``DemotePolicy``, a mapping of its rules, or ``"stored"``: the policy stored with the store at that time.
            The space is freed by the next collection.
        demote_every: Commits of the run between two demotions.
        engine: How packs are read and written. ``"auto"``: io_uring where it works, else pread and pwrite.
        allow_shared_folder: Accept a folder that other users can write to.
        shared: Who may use a store that is created now: ``"group"``, ``"umask"``, or None: only its owner.
        ranks: The ranks that commit one checkpoint together, for example ``ckstore.Ranks.of_torch()``. Every rank opens
            the store, and calls ``commit``, ``commit_async``, ``restore``, ``latest``, ``rewind`` and the ``check`` of
            ``commit_on_signal`` as often as the others. All get the same checkpoint, or an error that names a rank.
        clock: Source of time.

    Raises:
        NotFoundError: There is no store and ``create`` is False.
        UsageError: The folder holds something else, other users can write to it, or an argument is not valid.
        UnsupportedError: A newer ckstore made the store, or the file system lacks an operation that durability needs.
    """
    check_policy(policy)
    rules, aging = Retention.given_or_none(retention), _demotion(demotion)
    trash_seconds = None if trash_for is None else seconds_of(trash_for)
    backend = backend_for(path, engine=engine, allow_shared_folder=allow_shared_folder, sharing=shared)
    record = _record_of(backend, run, ranks, clock, create=create)
    repository = Repository(backend, record, run, clock=clock)
    store = Store(repository, policy or Policy(), trash_seconds=trash_seconds, ranks=ranks)
    if rules is not None:
        store._collect_after(rules, gc_every)
    if aging is not None:
        store._demote_after(aging, demote_every)
    return store


def _record_of(backend: Backend, run: str, ranks: Ranks | None, clock: Clock, *, create: bool) -> StoreRecord:
    """Return the record of a store; make the store if there is none and ``create`` is True."""

    def read_or_make() -> StoreRecord:
        try:
            return read_store_record(backend)
        except NotFoundError:
            if not create:
                raise
            return create_store(backend, clock, Limits())

    if ranks is None:
        return read_or_make()
    from ckstore.ranks.opening import open_record

    return open_record(backend, run, ranks, clock, read_or_make)


def open_existing(
    path: str | os.PathLike[str] | Backend, *, run: str = "main", allow_shared_folder: bool = False
) -> Store:
    """Open a store for maintenance, with defaults for everything else.

    Raises:
        NotFoundError: There is no store.
    """
    return open(path, run=run, create=False, allow_shared_folder=allow_shared_folder)


def _demotion(demotion: object) -> DemotePolicy | Literal["stored"] | None:
    """Return what ``open`` is to do after commits; UsageError for what is not a policy."""
    if demotion is None or demotion == "stored":
        return demotion
    from ckstore.ops.stored_policies import demotion_given

    return demotion_given(demotion)
