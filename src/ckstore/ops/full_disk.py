"""Make room for a commit that found the disk full: drop what the rules of its handle let go, and free the trash.

Invariants:
- Only what the trash may give up is freed, the oldest first, and no more than the commit is likely to need.
- Nothing is dropped except by rules that the handle was opened with.
- Nothing here raises: a commit that gets no room reports the full disk, not what happened here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ckstore.config import MIB
from ckstore.errors import CapacityError, CkstoreError, is_disk_full
from ckstore.io.backend import Distant
from ckstore.ops.gc.collect import purge
from ckstore.ops.gc.policy import Retention
from ckstore.ops.gc.run import GcLimits, collect_store
from ckstore.store.reachability import Marker
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")


COLLECTOR_SECONDS = 60.0
"""How long a commit waits for a collection that is running, and that may be about to fill the trash."""

_RESERVE_NBYTES = MIB
"""Manifests, claims and the ends of packs."""


@dataclass(slots=True)
class Room:
    """What was given up to make room.

    Attributes:
        nbytes: Bytes that were freed.
        folders: Folders of the trash that were emptied.
        dropped: Checkpoints that the rules of the handle let go.
    """

    nbytes: int = 0
    folders: int = 0
    dropped: int = 0

    def __str__(self) -> str:
        folders = f"{self.folders} folder{'' if self.folders == 1 else 's'} of the trash"
        drops = f", after the rules of retention= dropped {self.dropped}" if self.dropped else ""
        return f"{folders} ({self.nbytes / MIB:.1f} MiB) emptied{drops}"


def room_after(repository: Repository, nbytes: int, error: CapacityError) -> Room:
    """Make room after a write has failed, for a commit of a state of so many bytes.

    Raises:
        CapacityError: The error was not for want of space, or there was nothing to give up.
    """
    if not is_disk_full(error):
        raise error
    room = make_room(repository, nbytes)
    if room.nbytes:
        return room
    raise CapacityError(
        f"{error.what}, and the trash of the store has nothing to give up",
        where=error.where,
        todo="drop checkpoints (`ckstore gc STORE --keep-last 3 --now`), or enlarge the disk or quota",
        **error.facts,
    ) from error


def make_room(repository: Repository, nbytes: int) -> Room:
    """Free space in the store, for a commit of a state of so many bytes.

    Twice the state is freed where there is as much: a commit that frees what it needs and no more would leave the
    next one a full disk again.
    """
    room = Room()
    if isinstance(repository.backend, Distant):
        # Packs in a bucket do not go through the trash, and its quota is not this disk's.
        return room
    wanted = 2 * nbytes + _RESERVE_NBYTES
    try:
        _empty_trash(repository, wanted, room)
        if room.nbytes < wanted and repository.retention:
            _drop_by_rules(repository, room)
            _empty_trash(repository, wanted, room)
    except CkstoreError as error:
        _log.warning("making room on a full disk stopped: %s", error)
    return room


def _empty_trash(repository: Repository, wanted: int, room: Room) -> None:
    """Free folders of the trash until there is enough, the oldest first."""
    # No lock: a collection beside this one may be at work for long, and safety rests on no lock.
    marker = Marker(repository)
    for folder in repository.trash.contents():
        if room.nbytes >= wanted:
            return
        if not folder.packs and not folder.manifests:
            continue
        purged = purge(repository, marker, (folder.gc_id,))
        if purged.look.unreadable:
            problem = purged.look.unreadable[0]
            _log.warning("nothing of the trash was freed: %s cannot be read: %s", problem.path, problem.problem)
            return
        room.nbytes += purged.nbytes
        room.folders += bool(purged.files)


def _drop_by_rules(repository: Repository, room: Room) -> None:
    """Collect as the handle would have done after its next commits."""
    own = Repository(repository.backend, repository.record, repository.run, clock=repository.clock)
    report = collect_store(
        own,
        Retention.of(repository.retention),
        runs=(repository.run,),
        # What is rewritten takes space before it frees any.
        limits=GcLimits(repack_nbytes_max=0),
        dry_run=False,
        patience_seconds=COLLECTOR_SECONDS,
    )
    room.dropped += report.dropped_count
    room.nbytes += report.freed_nbytes
