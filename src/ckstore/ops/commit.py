"""Commit as the policy says, and commit again after freeing space if the disk is full.

``commit/`` imports neither quantization nor garbage collection. This module adds both: it imports ``quant`` only
for a policy with a residual, and ``full_disk`` only after a write has failed because the disk is full. So an exact
commit imports neither, and this module stays separate from ``full_disk.py``.
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
        CapacityError: The disk is full, even after the trash was emptied as far as possible. Earlier
            checkpoints are intact, and nothing of this one is visible.
        ConflictError: Another live process writes the run, or reused packs disappeared twice during this commit.
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
            f"{error.what}, even after space was freed: {room}",
            where=error.where,
            todo=error.todo,
            **error.facts,
        ) from error
    warning = f"the disk was full: {room}; what was in the trash can no longer be restored"
    receipt = replace(committed.receipt, warnings=(*committed.receipt.warnings, warning))
    return replace(committed, receipt=receipt)


def _with_quantization(request: CommitRequest) -> CommitRequest:
    residual = request.policy.residual
    if residual is None:
        return request
    from ckstore.quant.writer import ResidualCommit

    return replace(request, lossy=ResidualCommit(residual))
