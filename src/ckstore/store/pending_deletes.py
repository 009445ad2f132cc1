"""Delete packs where nothing can be renamed (buckets and tiers), announced by deletion lists.

A collector writes a list of the packs that it is about to delete, *then* reads all manifests, and deletes only packs
that no manifest names. A writer that makes a pack live again publishes its manifest, *then* reads all lists, *then*
checks that the packs exist. One of the two sees the other. ``tests/support/gc_bucket_rules.py`` is a model of this
protocol.

Invariants:
- A pack is deleted only if it was in a list before the manifests were read.
- A list is removed by its collector, once no request of that collector can still take effect; or by others, once its
  collector cannot be running.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ckstore.clock import Clock
from ckstore.errors import BackendError, CapacityError, CkstoreError, CorruptError, UnsupportedError, is_refused
from ckstore.format import paths
from ckstore.format.records import DeletionListRecord, decode_record, encode_record
from ckstore.hashing import PackId
from ckstore.io.backend import Backend, Distant, map_concurrent
from ckstore.processes import identity_of, owner_is_running
from ckstore.store.small_files import MAKER_AGE_SECONDS_MAX, is_older, put_small

_log = logging.getLogger("ckstore")

LIST_FILE = "doomed"

COLLECT_SECONDS_MAX = 3600.0
"""A collector stops deleting this long after it has written its list."""

LIST_AGE_SECONDS_MAX = MAKER_AGE_SECONDS_MAX
"""A list of this age belongs to a dead collector, on any machine: six times the longest collection."""

LAST_REQUEST_SECONDS = 60.0
"""A request that a process sent before it died may still take effect for this long."""

_LIST_NBYTES_MAX = 1 << 26
_LISTS_IN_USE: set[str] = set()
"""Paths of the lists that this process is using."""


@dataclass(slots=True)
class Removed:
    """The result of a deletion.

    Attributes:
        packs: The deleted packs and their sizes.
        stop: Why the others were not deleted; empty if all were.
    """

    packs: dict[PackId, int] = field(default_factory=dict)
    stop: str = ""


def remove_packs(
    backend: Backend, clock: Clock, packs: Mapping[PackId, int], find_named: Callable[[], AbstractSet[PackId]]
) -> Removed:
    """List the packs that may go, read all manifests again, and delete the packs that none names.

    Args:
        backend: The place that contains the packs.
        clock: Limits the duration.
        packs: Packs to delete, and their sizes.
        find_named: Reads all manifests and returns the packs that they name. Raises if one of them is unreadable.

    Raises:
        BackendError: A deletion failed. The list stays if a request may still take effect.
    """
    path = _write_list(backend, clock, packs)
    is_settled = True
    try:
        try:
            named = find_named()
        except (CorruptError, UnsupportedError, BackendError, CapacityError) as error:
            return Removed(stop=str(error))
        is_settled = False
        removed = _remove(backend, clock, {pack_id: packs[pack_id] for pack_id in packs if pack_id not in named})
        is_settled = True
        return removed
    except BackendError as error:
        is_settled = is_settled or not error.is_transient
        raise
    finally:
        _LISTS_IN_USE.discard(path)
        if is_settled:
            with contextlib.suppress(CkstoreError, FileNotFoundError):
                backend.unlink(path)


def _write_list(backend: Backend, clock: Clock, packs: Mapping[PackId, int]) -> str:
    names = tuple(sorted(pack_id.hex() for pack_id in packs))
    record = DeletionListRecord(**identity_of(os.getpid()), acquired_ns=clock.now_ns(), packs=names)
    path = f"{paths.trash_folder(record.token)}/{LIST_FILE}"
    _LISTS_IN_USE.add(path)
    put_small(backend, path, encode_record(record))
    return path


def _remove(backend: Backend, clock: Clock, packs: Mapping[PackId, int]) -> Removed:
    # Use both clocks: one stops while the machine sleeps, the other may be set.
    begun, begun_ns = clock.monotonic(), clock.now_ns()
    removed, left = Removed(), sorted(packs)
    concurrent = backend.request_concurrency if isinstance(backend, Distant) else 1

    def remove(pack_id: PackId) -> None:
        with contextlib.suppress(FileNotFoundError):
            backend.unlink(paths.pack_name(pack_id))

    while left:
        seconds = max(clock.monotonic() - begun, (clock.now_ns() - begun_ns) / 1e9)
        if seconds > COLLECT_SECONDS_MAX:
            removed.stop = f"the collection took longer than {COLLECT_SECONDS_MAX:.0f} s; run it again"
            break
        batch, left = left[:concurrent], left[concurrent:]
        list(map_concurrent(backend, remove, batch))
        removed.packs |= {pack_id: packs[pack_id] for pack_id in batch}
    return removed


# Reading lists


def deletion_lists(backend: Backend) -> list[str]:
    """Return the paths of all deletion lists of this backend."""
    folders = filter(paths.is_token, backend.list_names(paths.TRASH_FOLDER))
    names = (f"{paths.trash_folder(folder)}/{LIST_FILE}" for folder in folders)
    return [name for name in names if _may_exist(backend, name)]


def _may_exist(backend: Backend, path: str) -> bool:
    try:
        return backend.stat(path) is not None
    except BackendError as error:
        if not is_refused(error):
            raise
        # This user may not read the folder, so it may contain a list.
        return True


def packs_pending_deletion(backend: Backend, packs: AbstractSet[PackId], clock: Clock) -> set[PackId]:
    """Return those of these packs that a collector may be about to delete.

    Call it after publishing the manifest that names them, and before checking that the packs exist.
    """
    pending: set[PackId] = set()
    for path in deletion_lists(backend):
        # The collector of a list that is gone has finished. The check of the packs shows the result.
        with contextlib.suppress(FileNotFoundError):
            try:
                record = _read_list(backend, path)
            except BackendError as error:
                if not is_refused(error):
                    raise
                pending |= _packs_in_unreadable_list(backend, clock, path, packs, error)
                continue
            found = packs if record is None else packs & {PackId(bytes.fromhex(each)) for each in record.packs}
            if found and not _is_dead(backend, clock, path, record):
                maker = "a collector" if record is None else f"pid {record.pid} on {record.host}"
                message = "%s is about to delete %d packs that are needed here (listed in %s); %s"
                todo = "if it is dead, run `ckstore gc STORE --tier NAME --clear-lists`"
                _log.warning(message, maker, len(found), backend.location_of(path), todo)
                pending |= found
    return pending


def _packs_in_unreadable_list(
    backend: Backend, clock: Clock, path: str, packs: AbstractSet[PackId], error: BackendError
) -> set[PackId]:
    """Return those of these packs that may be in a list that this user cannot read: all that are older than it.

    A commit then writes their chunks again.
    """
    # The folder was made right before the list, and its modification time is readable.
    made = backend.stat(path.rpartition("/")[0])
    if made is None or (clock.now_ns() - made.modified_ns) / 1e9 > LIST_AGE_SECONDS_MAX:
        return set()
    infos = {pack_id: backend.stat(paths.pack_name(pack_id)) for pack_id in packs}
    found = {pack_id for pack_id, info in infos.items() if info is not None and info.modified_ns <= made.modified_ns}
    if found:
        message = "%d packs are not reused: a collector may be about to delete them, but its list %s is unreadable (%s)"
        _log.warning(message, len(found), backend.location_of(path), error)
    return found


def remove_dead_lists(backend: Backend, clock: Clock, *, everyone: bool = False) -> int:
    """Remove the lists of collectors that cannot be running, or with ``everyone`` all; return how many."""
    count = 0
    for path in deletion_lists(backend):
        with contextlib.suppress(FileNotFoundError):
            if everyone or _is_dead(backend, clock, path, _read_list(backend, path)):
                backend.unlink(path)
                count += 1
    return count


def _read_list(backend: Backend, path: str) -> DeletionListRecord | None:
    """Return the content of a list; None if it is damaged, so that it may name anything."""
    content = backend.read_bytes(path, nbytes_max=_LIST_NBYTES_MAX)
    try:
        return decode_record(content, DeletionListRecord, nbytes_max=_LIST_NBYTES_MAX)
    except (CorruptError, UnsupportedError):
        return None


def _is_dead(backend: Backend, clock: Clock, path: str, record: DeletionListRecord | None) -> bool:
    """Whether a collector cannot be running and no request of it can still take effect."""
    info = backend.stat(path)
    if info is None:
        return True
    age_seconds = (clock.now_ns() - info.modified_ns) / 1e9
    if age_seconds > LIST_AGE_SECONDS_MAX:
        return is_older(backend, clock, info, LIST_AGE_SECONDS_MAX)
    if record is None or age_seconds < LAST_REQUEST_SECONDS:
        return False
    is_running = owner_is_running(record)
    if is_running and record.pid == os.getpid():
        return path not in _LISTS_IN_USE
    return is_running is False
