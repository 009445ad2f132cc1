"""``store.json`` and ``config.json``: create a store, recognise it, and change its configuration.

``store.json`` is written once, as the last step of creation, and carries the store's random id. A folder without it is
not a store, so an interrupted creation is simply repeated. A path can later lead to another folder (a link, a mount, a
restored copy). ``require_same_store`` reads the id again at the moments when that would do harm.

``config.json`` holds what a person may change. It is read when needed and replaced as a whole.

Invariants of ``config.json``:
- A change is durable before the caller relies on it.
- A change replaces exactly the version it was made from, so concurrent changes are never lost. A bucket compares the
  etag. A folder uses a kernel lock, or a lock file if the file system has no locks. A person who edits the file by hand
  takes no lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.config import Limits, is_name
from ckstore.errors import (
    ConflictError,
    CorruptError,
    LockHeldError,
    NotFoundError,
    UnreachableError,
    UnsupportedError,
    UsageError,
)
from ckstore.format import paths
from ckstore.format.records import RECORD_NBYTES_MAX, ConfigRecord, StoreRecord, decode_record, encode_record
from ckstore.hashing import new_token
from ckstore.io.backend import Backend, Distant, FileLock, Locking, Probing, Swapping

_log = logging.getLogger("ckstore")

STORE_FILE_NBYTES_MAX = 1 << 20

_TRIES_MAX = 20
LOCK_PATIENCE_SECONDS = 10.0
"""How long a change waits for another process's change."""
LOCK_AGE_SECONDS_MAX = 60
"""A lock file older than this was left by a dead process. A change takes milliseconds."""
_LOCK_POLL_SECONDS = 0.01
_LOCK_FILE = f"{paths.TMP_FOLDER}/config.lock"
_PROCESS_LOCK = threading.Lock()


def create_store(backend: Backend, clock: Clock, limits: Limits) -> StoreRecord:
    """Make a store in an empty folder, or finish an interrupted creation.

    Raises:
        UsageError: The folder contains something else.
        CorruptError: It contains checkpoints, but ``store.json`` is missing.
        UnsupportedError: The file system lacks an operation that durability needs.
    """
    backend.make_folder("")
    foreign = [name for name in backend.list_names("") if not _is_harmless(backend, name)]
    if foreign:
        raise UsageError(
            f"Not a ckstore store, and not empty (contains {foreign[0]!r})",
            where=backend.root,
            todo="choose an empty or new folder",
        )
    for folder in (*paths.TOP_FOLDERS, *paths.pack_folders()):
        backend.make_folder(folder)
    if isinstance(backend, Probing):
        backend.probe()
    else:
        _probe(backend)
        if problem := why_no_locks(backend):
            _log.warning("%s", problem)
    for folder in paths.pack_folders():
        backend.sync_folder(folder)
    for folder in paths.TOP_FOLDERS:
        backend.sync_folder(folder)
    backend.sync_folder("")
    record = StoreRecord(
        store_id=os.urandom(16).hex(),
        created_ns=clock.now_ns(),
        chunk_nbytes_max=limits.chunk_nbytes_max,
        pack_nbytes_max=limits.pack_nbytes_max,
        manifest_nbytes_max=limits.manifest_nbytes_max,
        depth_max=limits.depth_max,
    )
    draft = f"{paths.TMP_FOLDER}/{new_token()}.store"
    backend.create(draft, encode_record(record), sync=True)
    # If two processes create at the same time, the first store.json stays and the other process reads it.
    with contextlib.suppress(FileExistsError):
        backend.link(draft, paths.STORE_FILE)
    backend.sync_folder("")
    backend.unlink(draft)
    return read_store_record(backend)


def _is_harmless(backend: Backend, name: str) -> bool:
    """Whether a name may be in the root of a new store: ours, a dead probe's, or made with the file system."""
    if name == paths.RESERVE_FOLDER:
        # The reserve's files are deleted on a full disk, so the folder must not contain a user's files.
        info = backend.stat(name)
        return info is not None and info.nbytes == 0 and not backend.list_names(name)
    return name in (*paths.TOP_FOLDERS, paths.GC_LOCK_FILE, paths.CONFIG_LOCK_FILE, "lost+found") or name.startswith(
        ".probe-"
    )


def _probe(backend: Backend) -> None:
    """Check that links never replace a name. Otherwise the first commit would find out."""
    token = new_token()
    source, target = f"{paths.TMP_FOLDER}/{token}.probe", f"{paths.TMP_FOLDER}/{token}.probe2"
    backend.create(source, b"ckstore probe", sync=True)
    try:
        backend.link(source, target)
        try:
            backend.link(source, target)
        except FileExistsError:
            return
        raise UnsupportedError(
            "on this file system a link replaces an existing file, so commits would not be safe",
            where=backend.root,
            todo="use a local file system",
        )
    finally:
        for name in (source, target):
            with contextlib.suppress(FileNotFoundError):
                backend.unlink(name)
        backend.sync_folder(paths.TMP_FOLDER)


def why_no_locks(backend: Backend) -> str:
    """Return why this backend has no file locks, as a warning; empty if it has them. Uses a temporary file."""
    if not isinstance(backend, Locking):
        return ""
    name = f"{paths.TMP_FOLDER}/{new_token()}.probe"
    try:
        lock = backend.try_lock(name)
        if lock is not None:
            lock.close()
    except UnsupportedError as error:
        return f"{error}. Collections stay safe without locks: two at the same time only do some work twice"
    finally:
        with contextlib.suppress(FileNotFoundError):
            backend.unlink(name)
    return ""


def read_store_record(backend: Backend) -> StoreRecord:
    """Read ``store.json``.

    Raises:
        NotFoundError: There is no store here.
        UnsupportedError: A newer ckstore made it.
        CorruptError: It is damaged, or missing from a store that contains checkpoints.
    """
    where = backend.location_of(paths.STORE_FILE)
    try:
        content = backend.read_bytes(paths.STORE_FILE, nbytes_max=STORE_FILE_NBYTES_MAX)
    except FileNotFoundError:
        if what := _remains_of_store(backend):
            raise CorruptError(
                f"store.json is missing from a store that contains {what}",
                where=where,
                todo=f"run `ckstore repair {backend.root} --apply` to make it again; a purge may have removed it",
            ) from None
        raise NotFoundError(
            "there is no store here",
            where=backend.root,
            todo="check the path, or run `ckstore init PATH` to make a store",
        ) from None
    return decode_record(content, StoreRecord, nbytes_max=STORE_FILE_NBYTES_MAX, where=where)


def _remains_of_store(backend: Backend) -> str:
    """Return what shows that a store was here, such as its packs; empty if nothing does."""
    for run in filter(is_name, backend.list_names(paths.MANIFESTS_FOLDER)):
        if any(paths.parse_manifest_file(run, file) for file in backend.list_names(paths.manifests_folder(run))):
            return f"checkpoints of run {run!r}"
    if not isinstance(backend, Distant):
        for folder in backend.list_names(paths.PACKS_FOLDER):
            if any(map(paths.parse_pack_file, backend.list_names(f"{paths.PACKS_FOLDER}/{folder}"))):
                return "packs"
    return ""


def store_id_at(backend: Backend) -> bytes | None:
    """Return the id of the store at this backend; None if there is no ``store.json``.

    Raises:
        CorruptError: ``store.json`` is damaged.
        BackendError: The backend does not answer.
    """
    try:
        content = backend.read_bytes(paths.STORE_FILE, nbytes_max=RECORD_NBYTES_MAX)
    except FileNotFoundError:
        return None
    where = backend.location_of(paths.STORE_FILE)
    return bytes.fromhex(decode_record(content, StoreRecord, where=where).store_id)


def require_same_store(backend: Backend, store_id: bytes) -> None:
    """Check that this path still leads to the store with this id.

    Raises:
        ConflictError: Another store is there now.
        UnreachableError: No store is there now.
        CorruptError: ``store.json`` is damaged.
        BackendError: The backend does not answer.
    """
    found = store_id_at(backend)
    if found == store_id:
        return
    if found is None:
        raise UnreachableError(
            f"store {store_id.hex()[:8]} was opened here, but its store.json is missing now",
            where=backend.root,
            todo="check whether the file system is mounted and whether the folder was moved; then open the store again",
        )
    raise ConflictError(
        f"store {store_id.hex()[:8]} was opened here, but another store ({found.hex()[:8]}) is at this path now",
        where=backend.root,
        todo="check the links and mounts along this path, then open the store again",
    )


def read_config(backend: Backend) -> ConfigRecord:
    """Return the content of ``config.json``, or the defaults if there is no such file.

    Raises:
        CorruptError: It cannot be read. The message says what to repair.
    """
    return _record(backend, _content(backend))


def _content(backend: Backend, name: str = paths.CONFIG_FILE) -> bytes | None:
    try:
        return backend.read_bytes(name, nbytes_max=RECORD_NBYTES_MAX)
    except FileNotFoundError:
        return None


def _record(backend: Backend, content: bytes | None) -> ConfigRecord:
    if content is None:
        return ConfigRecord()
    where = backend.location_of(paths.CONFIG_FILE)
    try:
        return decode_record(content, ConfigRecord, where=where)
    except CorruptError as error:
        todo = error.todo or "correct the file; after editing it by hand, set its xxh3 to null"
        raise type(error)(error.what, where=where, todo=todo) from error


def change_config(backend: Backend, change: Callable[[ConfigRecord], ConfigRecord]) -> ConfigRecord:
    """Replace ``config.json`` durably by the result of ``change``; return the new content.

    Args:
        backend: The store.
        change: Maps the current content to the new one. It may be called several times. Applied to its own result, it
            must change nothing.

    Raises:
        CorruptError: The current content cannot be read.
        ConflictError: Other processes change it again and again, or one of them holds the lock.
    """
    for _ in range(_TRIES_MAX):
        content = _content(backend)
        before = _record(backend, content)
        after = change(before)
        if after == before or replace_record(backend, paths.CONFIG_FILE, content, encode_record(after)):
            return after
        # Another change came first. Apply ours to its result.
    raise ConflictError(
        "other processes keep changing config.json", where=backend.location_of(paths.CONFIG_FILE), todo="try again"
    )


def replace_record(backend: Backend, name: str, before: bytes | None, after: bytes) -> bool:
    """Replace a record at the top of a store durably, if it still equals ``before``; return whether it did.

    With ``before=None`` the file must not exist.
    """
    if isinstance(backend, Swapping):
        return backend.replace_if(name, before, after)
    # A purge of empty folders may have removed it.
    backend.make_folder(paths.TMP_FOLDER)
    with _exclusive(backend):
        if _content(backend, name) != before:
            return False
        draft = paths.draft_name(new_token(), "config")
        backend.create(draft, after, sync=True)
        backend.rename(draft, name)
        backend.sync_folder("")
        return True


@contextmanager
def _exclusive(backend: Backend) -> Iterator[None]:
    """Keep other processes from replacing the record between the read and the rename."""
    with _PROCESS_LOCK:
        deadline = SYSTEM_CLOCK.monotonic() + LOCK_PATIENCE_SECONDS
        lock: FileLock | None = None
        while isinstance(backend, Locking) and lock is None:
            lock = _try_lock(backend, backend)
            if lock is None and SYSTEM_CLOCK.monotonic() > deadline:
                raise LockHeldError(
                    f"another process has locked config.json for more than {LOCK_PATIENCE_SECONDS:.0f} s",
                    where=backend.location_of(paths.CONFIG_LOCK_FILE),
                    todo="find the process that has the lock file open (`lsof`); it may be stopped",
                )
            if lock is None:
                SYSTEM_CLOCK.sleep(_LOCK_POLL_SECONDS)
        try:
            yield
        finally:
            if lock is not None:
                lock.close()


def _try_lock(locks: Locking, backend: Backend) -> FileLock | None:
    try:
        return locks.try_lock(paths.CONFIG_LOCK_FILE)
    except UnsupportedError:
        return _LockFile.try_make(backend)


class _LockFile:
    """A lock file, for file systems without locks. A file left by a dead process expires by its age."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @classmethod
    def try_make(cls, backend: Backend) -> _LockFile | None:
        """Make the file; None while another process has one."""
        with contextlib.suppress(FileExistsError):
            backend.create(_LOCK_FILE, b"", sync=False)
            return cls(backend)
        info = backend.stat(_LOCK_FILE)
        if info is not None and _is_expired(info.modified_ns):
            # Rename it first: two processes that find it must not remove each other's new file.
            mine = paths.draft_name(new_token(), "lock")
            with contextlib.suppress(FileNotFoundError):
                backend.rename_new(_LOCK_FILE, mine)
                moved = backend.stat(mine)
                if moved is not None and not _is_expired(moved.modified_ns):
                    with contextlib.suppress(FileExistsError):
                        backend.link(mine, _LOCK_FILE)
                backend.unlink(mine)
        return None

    def close(self) -> None:
        """Remove the file."""
        with contextlib.suppress(FileNotFoundError):
            self._backend.unlink(_LOCK_FILE)


def _is_expired(modified_ns: int) -> bool:
    return SYSTEM_CLOCK.now_ns() - modified_ns > LOCK_AGE_SECONDS_MAX * 10**9
