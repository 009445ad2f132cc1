"""Where nothing can be renamed: lists of what collectors are about to remove, who wrote them, and the removal itself.

A collector writes down what it is about to remove, *then* looks at all manifests, and removes only what none of them
names; whoever makes a pack live again publishes, *then* reads all such lists, *then* looks at the packs. One of the two
must see the other. ``tests/support/gc_bucket_rules.py`` is the model of it.

Invariants:
- Nothing is removed that does not stand in a list which was there before manifests were looked at.
- A list is removed by whoever wrote it, and only when no request of its may still take effect; or when its writer
  cannot be at work any more.
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
from ckstore.format import paths as layout
from ckstore.format.records import DeletionListRecord, decode_record, encode_record
from ckstore.hashing import PackId
from ckstore.io.backend import Backend, Distant, map_concurrent
from ckstore.processes import identity_of, owner_is_running
from ckstore.store.small_files import MAKER_AGE_SECONDS_MAX, is_older, put_small

_log = logging.getLogger("ckstore")

LIST_FILE = "doomed"

COLLECT_SECONDS_MAX = 3600.0
"""What was written down longer ago is not removed any more."""

LIST_AGE_SECONDS_MAX = MAKER_AGE_SECONDS_MAX
"""A list this old is a dead collector's, wherever that ran: six times as long as it would have gone on."""

LAST_REQUEST_SECONDS = 60.0
"""What a process has sent before it died may still take effect for so long."""

_LIST_NBYTES_MAX = 1 << 26
_AT_WORK: set[str] = set()
"""Tokens of the lists of this process that are in use."""


@dataclass(slots=True)
class Removed:
    """What a removal came to.

    Attributes:
        packs: Packs that are gone, and their sizes.
        stop: Why others are not; empty where nothing spoke against it.
    """

    packs: dict[PackId, int] = field(default_factory=dict)
    stop: str = ""


def remove_packs(
    backend: Backend, clock: Clock, packs: Mapping[PackId, int], find_named: Callable[[], AbstractSet[PackId]]
) -> Removed:
    """Write down what is about to go, look once more who names it, and remove what nobody does.

    Args:
        backend: Where the packs lie.
        clock: Ends what takes too long.
        packs: What is to go, and its sizes.
        find_named: Looks at all manifests; raises what makes one of them unreadable.

    Raises:
        BackendError: A removal failed; the list stays where it may still take effect.
    """
    path = _write_list(backend, clock, packs)
    is_certain = True
    try:
        try:
            named = find_named()
        except (CorruptError, UnsupportedError, BackendError, CapacityError) as error:
            return Removed(stop=str(error))
        is_certain = False
        removed = _remove(backend, clock, {pack_id: packs[pack_id] for pack_id in packs if pack_id not in named})
        is_certain = True
        return removed
    except BackendError as error:
        is_certain = is_certain or not error.is_transient
        raise
    finally:
        _AT_WORK.discard(path)
        if is_certain:
            with contextlib.suppress(CkstoreError, FileNotFoundError):
                backend.unlink(path)


def _write_list(backend: Backend, clock: Clock, packs: Mapping[PackId, int]) -> str:
    names = tuple(sorted(pack_id.hex() for pack_id in packs))
    record = DeletionListRecord(**identity_of(os.getpid()), acquired_ns=clock.now_ns(), packs=names)
    path = f"{layout.trash_folder(record.token)}/{LIST_FILE}"
    _AT_WORK.add(path)
    put_small(backend, path, encode_record(record))
    return path


def _remove(backend: Backend, clock: Clock, packs: Mapping[PackId, int]) -> Removed:
    # By both clocks: one stands still while a machine sleeps, the other may be set.
    begun, begun_ns = clock.monotonic(), clock.now_ns()
    removed, left = Removed(), sorted(packs)
    at_once = backend.requests_at_once if isinstance(backend, Distant) else 1

    def remove(pack_id: PackId) -> None:
        with contextlib.suppress(FileNotFoundError):
            backend.unlink(layout.pack_name(pack_id))

    while left:
        seconds = max(clock.monotonic() - begun, (clock.now_ns() - begun_ns) / 1e9)
        if seconds > COLLECT_SECONDS_MAX:
            removed.stop = "it took too long; collect again"
            break
        batch, left = left[:at_once], left[at_once:]
        list(map_concurrent(backend, remove, batch))
        removed.packs |= {pack_id: packs[pack_id] for pack_id in batch}
    return removed


# Reading lists


def deletion_lists(backend: Backend) -> list[str]:
    """Return the lists of collectors in a place, by path."""
    folders = filter(layout.is_token, backend.list_names(layout.TRASH_FOLDER))
    paths = (f"{layout.trash_folder(folder)}/{LIST_FILE}" for folder in folders)
    return [path for path in paths if _may_be_there(backend, path)]


def _may_be_there(backend: Backend, path: str) -> bool:
    try:
        return backend.stat(path) is not None
    except BackendError as error:
        if not is_refused(error):
            raise
        # A folder that this user may not read may hold one.
        return True


def packs_pending_deletion(backend: Backend, packs: AbstractSet[PackId], clock: Clock) -> set[PackId]:
    """Return those of these packs that a collector may be about to remove.

    To be asked after what names them was published, and before the packs are looked at.
    """
    doomed: set[PackId] = set()
    for path in deletion_lists(backend):
        # One that is gone meanwhile has done what it said, and the packs tell.
        with contextlib.suppress(FileNotFoundError):
            try:
                record = _read_list(backend, path)
            except BackendError as error:
                if not is_refused(error):
                    raise
                doomed |= _doomed_unread(backend, clock, path, packs, error)
                continue
            found = packs if record is None else packs & {PackId(bytes.fromhex(each)) for each in record.packs}
            if found and not _is_dead(backend, clock, path, record):
                maker = "a collector" if record is None else f"pid {record.pid} on {record.host}"
                words = "%s is about to remove %d packs that are needed here, as %s says; if it is dead, %s"
                remedy = "`ckstore gc STORE --tier NAME --clear-lists` helps"
                _log.warning(words, maker, len(found), backend.location_of(path), remedy)
                doomed |= found
    return doomed


def _doomed_unread(
    backend: Backend, clock: Clock, path: str, packs: AbstractSet[PackId], error: BackendError
) -> set[PackId]:
    """Return those of these packs that a list which this user may not read may name: all that are older than it.

    So a commit writes again what it would have reused, and goes on.
    """
    # The folder was made for the list, right before it, and its own time may be read.
    made = backend.stat(path.rpartition("/")[0])
    if made is None or (clock.now_ns() - made.modified_ns) / 1e9 > LIST_AGE_SECONDS_MAX:
        return set()
    infos = {pack_id: backend.stat(layout.pack_name(pack_id)) for pack_id in packs}
    found = {pack_id for pack_id, info in infos.items() if info is not None and info.modified_ns <= made.modified_ns}
    if found:
        words = "%d packs that are needed here are not reused: %s may say that a collector is about to remove them (%s)"
        _log.warning(words, len(found), backend.location_of(path), error)
    return found


def remove_dead_lists(backend: Backend, clock: Clock, *, everyone: bool = False) -> int:
    """Remove the lists of collectors that cannot be at work any more, or all of them; return how many."""
    count = 0
    for path in deletion_lists(backend):
        with contextlib.suppress(FileNotFoundError):
            if everyone or _is_dead(backend, clock, path, _read_list(backend, path)):
                backend.unlink(path)
                count += 1
    return count


def _read_list(backend: Backend, path: str) -> DeletionListRecord | None:
    """Return what a list says; None where it cannot be read, and may name anything."""
    content = backend.read_bytes(path, nbytes_max=_LIST_NBYTES_MAX)
    try:
        return decode_record(content, DeletionListRecord, nbytes_max=_LIST_NBYTES_MAX)
    except (CorruptError, UnsupportedError):
        return None


def _is_dead(backend: Backend, clock: Clock, path: str, record: DeletionListRecord | None) -> bool:
    """Whether a collector cannot be at work any more, and nothing that it has sent may still take effect."""
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
        return path not in _AT_WORK
    return is_running is False
