"""``config.json``: what a person may change, read when it is needed and replaced whole.

Invariants:
- A change is made durable before it is relied on.
- It replaces what it was made from, and nothing else: of two who change at once, neither is lost. In a bucket the
  server sees to that (update by etag), in a folder a lock that the kernel takes from a dead holder, and where the file
  system has no such locks, a file that only one can make. A person who edits the file by hand has no lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import ConflictError, CorruptError, LockHeldError, UnsupportedError
from ckstore.format import paths
from ckstore.format.records import RECORD_NBYTES_MAX, ConfigRecord, decode_record, encode_record
from ckstore.hashing import new_token
from ckstore.io.backend import Backend, FileLock, Locking, Swapping

_TRIES_MAX = 20
LOCK_PATIENCE_SECONDS = 10.0
"""How long a change waits for one that another process makes."""
LOCK_AGE_SECONDS_MAX = 60
"""Where there are no locks: a file in place of one is a dead process's when it is this old. A change takes moments."""
_LOCK_POLL_SECONDS = 0.01
_LOCK_BY_NAME = f"{paths.TMP_FOLDER}/config.lock"
_IN_THIS_PROCESS = threading.Lock()


def read_config(backend: Backend) -> ConfigRecord:
    """Return what ``config.json`` says; the defaults where there is none.

    Raises:
        CorruptError: It cannot be read; the message says what a person has to mend.
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
        todo = error.todo or "mend it; after editing it by hand, set its xxh3 to null"
        raise type(error)(error.what, where=where, todo=todo) from error


def change_config(backend: Backend, change: Callable[[ConfigRecord], ConfigRecord]) -> ConfigRecord:
    """Replace ``config.json`` by what ``change`` makes of it, durably; return what is there then.

    Args:
        backend: The store.
        change: Called with what is there, perhaps more than once; what it has made must be no change to itself.

    Raises:
        CorruptError: What is there cannot be read.
        ConflictError: Others change it all the time, or one of them does not end.
    """
    for _ in range(_TRIES_MAX):
        content = _content(backend)
        before = _record(backend, content)
        after = change(before)
        if after == before or replace_record(backend, paths.CONFIG_FILE, content, encode_record(after)):
            return after
        # Another one's change came between: ours is made on top of it.
    raise ConflictError(
        "others change the configuration all the time", where=backend.location_of(paths.CONFIG_FILE), todo="try again"
    )


def replace_record(backend: Backend, name: str, before: bytes | None, after: bytes) -> bool:
    """Replace a record at the top of a store, durably, if it still says ``before`` (None: is not there)."""
    if isinstance(backend, Swapping):
        return backend.replace_if(name, before, after)
    # A purge may have taken it while it was empty.
    backend.make_folder(paths.TMP_FOLDER)
    with _serialised(backend):
        if _content(backend, name) != before:
            return False
        draft = paths.draft_name(new_token(), "config")
        backend.create(draft, after, sync=True)
        backend.rename(draft, name)
        backend.sync_folder("")
        return True


@contextmanager
def _serialised(backend: Backend) -> Iterator[None]:
    """Keep others from replacing it at the same time; for the few moments that a reading and a rename take."""
    with _IN_THIS_PROCESS:
        deadline = SYSTEM_CLOCK.monotonic() + LOCK_PATIENCE_SECONDS
        lock: FileLock | None = None
        while isinstance(backend, Locking) and lock is None:
            lock = _try_lock(backend, backend)
            if lock is None and SYSTEM_CLOCK.monotonic() > deadline:
                raise LockHeldError(
                    "another process is changing the configuration, and does not end",
                    where=backend.location_of(paths.CONFIG_LOCK_FILE),
                    todo="see which process holds the file open; it may be one that was stopped",
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
        return _FileOfOne.try_make(backend)


class _FileOfOne:
    """A file that only one process can make at a time, in place of a lock; one that was left behind ends by its age."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @classmethod
    def try_make(cls, backend: Backend) -> _FileOfOne | None:
        """Make it; None while another's is there."""
        with contextlib.suppress(FileExistsError):
            backend.create(_LOCK_BY_NAME, b"", sync=False)
            return cls(backend)
        info = backend.stat(_LOCK_BY_NAME)
        if info is not None and _is_left_behind(info.modified_ns):
            # Moved to a name of our own first: two who find it must not remove each other's new one.
            mine = paths.draft_name(new_token(), "lock")
            with contextlib.suppress(FileNotFoundError):
                backend.rename_new(_LOCK_BY_NAME, mine)
                moved = backend.stat(mine)
                if moved is not None and not _is_left_behind(moved.modified_ns):
                    with contextlib.suppress(FileExistsError):
                        backend.link(mine, _LOCK_BY_NAME)
                backend.unlink(mine)
        return None

    def close(self) -> None:
        """Remove it."""
        with contextlib.suppress(FileNotFoundError):
            self._backend.unlink(_LOCK_BY_NAME)


def _is_left_behind(modified_ns: int) -> bool:
    return SYSTEM_CLOCK.now_ns() - modified_ns > LOCK_AGE_SECONDS_MAX * 10**9
