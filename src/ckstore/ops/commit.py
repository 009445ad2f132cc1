"""Commit as the policy says, and commit again after freeing space if the disk is full.

``commit/`` imports neither quantization nor garbage collection. This module adds both: it imports ``quant`` only
for a policy with a residual, and ``ops/gc`` only after a write has failed because the disk is full. So an exact commit
imports neither.

Invariants of freeing space:
- Trash folders are purged oldest first, and only as many as the commit is likely to need.
- Checkpoints are deleted only by the retention rules that the handle was opened with.
- ``make_room`` raises nothing. If it frees nothing, the commit reports the full disk, not an error from here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ckstore.commit.commit import CommitRequest, Committed, commit
from ckstore.config import MIB
from ckstore.errors import CapacityError, CkstoreError, is_disk_full
from ckstore.io.backend import Distant
from ckstore.results import Receipt, Stopwatch
from ckstore.store import history
from ckstore.store.repository import Repository

__all__ = ["CommitRequest", "Committed", "commit_checkpoint", "room_after", "set_tags"]

_log = logging.getLogger("ckstore")

COLLECTOR_SECONDS = 60.0
"""How long to wait for a collection that is already running: it may be about to fill the trash."""

_RESERVE_NBYTES = MIB
"""Room for manifests, claims and the ends of packs."""


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


def set_tags(repository: Repository, receipt: Receipt, tags: Iterable[str]) -> Receipt:
    """Give a durable checkpoint its tags. Return its receipt, with a warning for each tag that was not set."""
    warnings = []
    for name in tags:
        try:
            history.tag(repository, name, f"seq:{receipt.seq}")
        except CkstoreError as error:
            # Not an error: the checkpoint is durable, and an error would make the caller commit it again.
            warnings.append(f"the checkpoint is durable, but tag {name!r} was not set: {error}")
    return replace(receipt, warnings=(*receipt.warnings, *warnings))


@dataclass(slots=True)
class Room:
    """What was freed to make room.

    Attributes:
        nbytes: Bytes that were freed.
        folders: Trash folders that were emptied.
        dropped: Checkpoints deleted by the handle's retention rules.
    """

    nbytes: int = 0
    folders: int = 0
    dropped: int = 0

    def __str__(self) -> str:
        folders = f"{self.folders} trash folder{'' if self.folders == 1 else 's'}"
        checkpoints = f"{self.dropped} checkpoint{'' if self.dropped == 1 else 's'}"
        drops = f", after retention= deleted {checkpoints}" if self.dropped else ""
        return f"emptied {folders} ({self.nbytes / MIB:.1f} MiB){drops}"


def room_after(repository: Repository, nbytes: int, error: CapacityError) -> Room:
    """Make room after a write has failed, for a commit of a state of ``nbytes`` bytes.

    Raises:
        CapacityError: The cause was not a full disk, or nothing could be freed.
    """
    if not is_disk_full(error):
        raise error
    room = make_room(repository, nbytes)
    if room.nbytes:
        return room
    raise CapacityError(
        f"{error.what}, and the trash of the store contains nothing that could be freed",
        where=error.where,
        todo="delete checkpoints (`ckstore gc STORE --keep-last 3 --now`), or enlarge the disk or quota",
        **error.facts,
    ) from error


def make_room(repository: Repository, nbytes: int) -> Room:
    """Free space in the store for a commit of a state of ``nbytes`` bytes.

    Up to twice the state is freed. Otherwise the next commit would find the disk full again.
    """
    room = Room()
    if isinstance(repository.backend, Distant):
        # Packs in a bucket do not go through the trash, and a bucket's quota is not this disk's.
        return room
    wanted = 2 * nbytes + _RESERVE_NBYTES
    try:
        _empty_trash(repository, wanted, room)
        if room.nbytes < wanted and repository.retention:
            _drop_by_rules(repository, room)
            _empty_trash(repository, wanted, room)
    except CkstoreError as error:
        _log.warning("could not free more space on the full disk: %s", error)
    return room


def _empty_trash(repository: Repository, wanted: int, room: Room) -> None:
    """Purge trash folders, oldest first, until ``wanted`` bytes are free."""
    from ckstore.ops.gc.collect import purge
    from ckstore.store.reachability import Marker

    # Take no lock: a running collection may hold it for long, and safety does not depend on it.
    marker = Marker(repository)
    for folder in repository.trash.contents():
        if room.nbytes >= wanted:
            return
        if not folder.packs and not folder.manifests:
            continue
        purged = purge(repository, marker, (folder.gc_id,))
        if purged.marks.unreadable:
            problem = purged.marks.unreadable[0]
            _log.warning("nothing of the trash was freed: %s cannot be read: %s", problem.path, problem.problem)
            return
        room.nbytes += purged.nbytes
        room.folders += bool(purged.files)


def _drop_by_rules(repository: Repository, room: Room) -> None:
    """Collect as the handle would do after its next commits."""
    from ckstore.ops.gc.policy import Retention
    from ckstore.ops.gc.run import GcLimits, collect_store

    own = Repository(repository.backend, repository.record, repository.run, clock=repository.clock)
    report = collect_store(
        own,
        Retention.of(repository.retention),
        runs=(repository.run,),
        # Rewriting packs needs space before it frees any.
        limits=GcLimits(repack_nbytes_max=0),
        dry_run=False,
        patience_seconds=COLLECTOR_SECONDS,
    )
    room.dropped += report.dropped_count
    room.nbytes += report.freed_nbytes
