"""Commit as the policy says, and commit again after freeing space if the disk is full.

``commit/`` knows neither quantization nor garbage collection. This module gives it both: it loads ``quant`` only for
a policy with a residual, and ``full_disk`` only after a write has failed for want of space.
"""

from __future__ import annotations

from dataclasses import replace

from ckstore.commit.commit import CommitRequest, Committed, commit
from ckstore.errors import CapacityError
from ckstore.results import Stopwatch
from ckstore.store.repository import Repository

__all__ = ["CommitRequest", "commit_checkpoint"]


def commit_checkpoint(repository: Repository, request: CommitRequest, watch: Stopwatch) -> Committed:
    """Write one checkpoint. It is durable when this returns, and invisible before.

    Args:
        repository: The open run.
        request: What to commit. ``lossy`` is set here.
        watch: Receives the duration of each stage.

    Raises:
        CapacityError: The disk is full, even after everything in the trash that may go was freed. Earlier
            checkpoints are intact; nothing of this one is visible.
        ConflictError: Another live writer has the run, or packs vanished twice during this commit.
        BackendError: The storage failed twice.
        BoundError: A tensor cannot be quantized within the policy's bounds, and ``on_bound`` is ``"raise"``.
    """
    request = _with_quantization(request)
    try:
        return commit(repository, request, watch)
    except CapacityError as error:
        from ckstore.ops.full_disk import room_after

        room = room_after(repository, request.captured.nbytes, error)
    try:
        committed = commit(repository, request, watch)
    except CapacityError as error:
        raise CapacityError(
            f"{error.what}, although the disk was full before and what could go was given up: {room}",
            where=error.where,
            todo=error.todo,
            **error.facts,
        ) from error
    warning = f"the disk was full: {room}; what lay there cannot be brought back"
    receipt = replace(committed.receipt, warnings=(*committed.receipt.warnings, warning))
    return replace(committed, receipt=receipt)


def _with_quantization(request: CommitRequest) -> CommitRequest:
    residual = request.policy.residual
    if residual is None:
        return request
    from ckstore.quant.writer import ResidualCommit

    return replace(request, lossy=ResidualCommit(residual))
