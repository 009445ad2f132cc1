"""Save and load with torch.distributed.checkpoint (DCP): any number of ranks, one checkpoint of a store.

``save``, ``load`` and ``async_save`` are DCP's own functions with a store in place of a folder. ``Writer`` and
``Reader`` are for callers that use DCP themselves:

    dcp.save(state, storage_writer=ckstore.dcp.Writer("runs/a", step), planner=ckstore.dcp.SavePlanner())
    dcp.load(state, storage_reader=ckstore.dcp.Reader("runs/a"), planner=ckstore.dcp.LoadPlanner())

In place of a path they take an open ``ckstore.Store``. Then the store commits the state as ``Store.commit`` does. On
many ranks it must have been opened with ``ranks=``; DCP's collectives are not needed then (``use_collectives=False``).

With torch's default planners values that are not tensors are pickled by DCP, and ckstore stores these bytes.

DCP makes text of all keys, also of the numbers in the state of an optimizer. DCP's own functions load such a state into
one with numbers as keys. ``Store.restore`` returns the keys as they are stored:
``restore()["optim"]["state"]["0"]["exp_avg"]``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import planner as torch_planner
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from ckstore.api import Store
from ckstore.config import Policy
from ckstore.errors import CkstoreError, UsageError
from ckstore.io.backend import Backend
from ckstore.ranks import dcp_reader, dcp_writer
from ckstore.ranks.dcp_planner import LoadPlanner, SavePlanner
from ckstore.results import Info, Receipt
from ckstore.store.refs import Reference

__all__ = ["LoadPlanner", "Reader", "SavePlanner", "Writer", "async_save", "load", "save"]

StorePlace = str | os.PathLike[str] | Backend | Store


class Writer(dcp_writer.Writer):
    """Saves to a store through ``torch.distributed.checkpoint.save`` and ``async_save``.

    Args:
        store: A folder, a URL, a backend, or an open ``Store``, which commits the state itself. The coordinator makes
            the store if it does not exist.
        step: The trainer's step; None: one more than that of the newest checkpoint.
        run: The run to save to; that of an open store.
        policy: How to store the state. None: the policy of an open store, else the default. Residual policies need an
            open store, on one rank.
        metrics: Numbers to find this checkpoint by, as in ``best:loss``.

    Attributes:
        receipt: The receipt of the last save; with a path, on the coordinator only.
    """

    def __init__(
        self,
        store: StorePlace,
        step: int | None = None,
        *,
        run: str = "main",
        policy: Policy | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        if not isinstance(store, Store):
            super().__init__(store, step, run=run, policy=policy, metrics=metrics)
            return

        def commit(state: dict[str, Any], step: int | None) -> Receipt:
            if step is None:
                newest = store.latest()
                step = 0 if newest is None else newest.step + 1
            return store.commit(state, step, metrics=metrics, policy=policy)

        _check_ranks(store)
        place = store._repository
        super().__init__(place, step, run=_run_of(store, run), policy=policy, metrics=metrics, commit=commit)


class Reader(dcp_reader.Reader):
    """Loads from a store through ``torch.distributed.checkpoint.load``.

    Args:
        store: A folder, a URL, a backend, or an open ``Store``, with or without ranks.
        ref: Which checkpoint: a step, a tag, ``latest``, ``best:metric``, ``seq:N``; None: the newest whole one.
        run: The run to load from; that of an open store.
        policy: Threads, memory and checks.

    Attributes:
        info: Facts about the checkpoint that was loaded last.
    """

    def __init__(
        self, store: StorePlace, ref: Reference | None = None, *, run: str = "main", policy: Policy | None = None
    ) -> None:
        if isinstance(store, Store):
            # Background commits may be newer than what the store has.
            store.wait()
            rank = None if store._job is None else store._job.place
            super().__init__(store._repository, ref, run=_run_of(store, run), policy=policy, rank=rank)
        else:
            super().__init__(store, ref, run=run, policy=policy)


def _run_of(store: Store, run: str) -> str:
    if run not in ("main", store.run):
        raise UsageError(
            f"the store was opened with the run {store.run!r}, not {run!r}", todo="leave out run=, or open that run"
        )
    return store.run


def _check_ranks(store: Store) -> None:
    is_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if is_many and store._job is None:
        raise UsageError(
            "each rank would commit a checkpoint of its own with this store",
            todo="open it with ranks=ckstore.Ranks.of_torch(), or pass its path",
        )


def save(
    state: dict[str, Any],
    store: StorePlace,
    step: int | None = None,
    *,
    run: str = "main",
    policy: Policy | None = None,
    metrics: Mapping[str, float] | None = None,
    planner: torch_planner.SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Receipt:
    """Save a state on all ranks as one checkpoint. Every rank calls this, and gets the same receipt or an error.

    Args:
        state: A dict of tensors, DTensors, plain values, objects with ``state_dict``, and dicts and lists of these.
        store: The folder or URL of the store, which is made if it does not exist; or an open store. Then the other
            arguments are as for ``Writer``.
        step: The trainer's step; None: one more than that of the newest checkpoint.
        run: The run to save to.
        policy: How to store the state.
        metrics: Numbers to find this checkpoint by, as in ``best:loss``.
        planner: None: ``SavePlanner``, which stores values without pickle.
        process_group: The ranks that save; None: all.
        no_dist: This process saves alone.

    Raises:
        CkstoreError: Nothing was saved. If several ranks failed, it is the error of the first.
    """
    writer = Writer(store, step, run=run, policy=policy, metrics=metrics)
    with _errors_of_ranks(store), _alone():
        metadata = state_dict_saver.save(
            state,
            storage_writer=writer,
            planner=planner or SavePlanner(),
            process_group=process_group,
            no_dist=no_dist,
        )
    receipt: Receipt = metadata.storage_data
    return receipt


def async_save(
    state: dict[str, Any],
    store: StorePlace,
    step: int | None = None,
    *,
    run: str = "main",
    policy: Policy | None = None,
    metrics: Mapping[str, float] | None = None,
    planner: torch_planner.SavePlanner | None = None,
    **options: Any,
) -> Any:
    """Copy a state on all ranks, and save it in the background as ``save`` does.

    DCP does the copy and the background work: until the result is there, the checkpoint is lost if this process dies.
    ``Store.commit_async`` survives that.

    Args:
        state: As for ``save``.
        store: The folder or URL of the store, which is made if it does not exist; or an open store. Then the other
            arguments are as for ``Writer``.
        step: The trainer's step; None: one more than that of the newest checkpoint.
        run: The run to save to.
        policy: How to store the state.
        metrics: Numbers to find this checkpoint by.
        planner: None: ``SavePlanner``.
        options: Further arguments of torch's ``async_save``: ``process_group``, ``async_checkpointer_type``,
            ``async_stager``.

    Returns:
        What torch's ``async_save`` returns. The result of its future is DCP's metadata, with the receipt as
        ``storage_data``.
    """
    writer = Writer(store, step, run=run, policy=policy, metrics=metrics)
    with _alone():
        return state_dict_saver.async_save(state, storage_writer=writer, planner=planner or SavePlanner(), **options)


def load(
    state: dict[str, Any],
    store: StorePlace,
    ref: Reference | None = None,
    *,
    run: str = "main",
    policy: Policy | None = None,
    planner: torch_planner.LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Info:
    """Load a checkpoint into a state on all ranks, in any layout. Every rank calls this.

    Each rank reads only the byte ranges that it needs.

    Args:
        state: The state to overwrite, as for ``save``. Its tensors may be sharded in another way.
        store: The folder or URL of the store, or an open store.
        ref: Which checkpoint: a step, a tag, ``latest``, ``best:metric``, ``seq:N``; None: the newest whole one, as
            rank 0 finds it.
        run: The run to load from.
        policy: Threads, memory and checks.
        planner: None: ``LoadPlanner``, which checks names, dtypes and coverage before anything is overwritten.
        process_group: The ranks that load; None: all.
        no_dist: This process loads alone.

    Returns:
        Facts about the checkpoint.

    Raises:
        CkstoreError: There is no such checkpoint, it does not fit the state, or it is damaged.
    """
    is_alone = no_dist or not (dist.is_available() and dist.is_initialized())
    reader = Reader(store, ref, run=run, policy=policy)
    if is_alone:
        reader.find()
    else:
        _agree(reader, process_group)
    with _errors_of_ranks(store), _alone():
        state_dict_loader.load(
            state,
            storage_reader=reader,
            planner=planner or LoadPlanner(),
            process_group=process_group,
            no_dist=no_dist,
        )
    assert reader.info is not None
    return reader.info


def _agree(reader: Reader, group: dist.ProcessGroup | None) -> None:
    """Let all readers load the checkpoint that the first rank of a group finds."""
    found: list[Any] = [None]
    is_first = dist.get_rank(group) == 0
    if is_first:
        try:
            found = [reader.find()]
        except CkstoreError as error:
            found = [error]
    dist.broadcast_object_list(found, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    if isinstance(found[0], CkstoreError):
        raise found[0]
    if not is_first:
        reader.follow(found[0])


@contextmanager
def _errors_of_ranks(store: StorePlace) -> Iterator[None]:
    """Raise ckstore's own error instead of DCP's, which is no Exception and has it inside."""
    try:
        yield
    except CheckpointException as error:
        found = {
            rank: failure for rank, (failure, _) in sorted(error.failures.items()) if isinstance(failure, CkstoreError)
        }
        if not found:
            raise
        rank, failure = next(iter(found.items()))
        what = failure.what
        if isinstance(store, Store) and len(found) > 1:
            # All ranks got the error of one of them. It alone got it without its number.
            failure = next((each for each in found.values() if "rank " in str(each)), failure)
            what = failure.what
        elif len(error.failures) > 1 or rank:
            what = f"rank {rank}: {what}"
        raise type(failure)(what, where=failure.where, todo=failure.todo, **failure.facts) from error


@contextmanager
def _alone() -> Iterator[None]:
    """Leave out DCP's warning that a process without ranks saves alone: it does what was asked."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
