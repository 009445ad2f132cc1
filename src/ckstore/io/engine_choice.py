"""Choose an engine for a folder: probe it there, and say once which was taken and why."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from ckstore.config import EngineName
from ckstore.errors import UnsupportedError, UsageError
from ckstore.ids import new_token
from ckstore.io import ring_support
from ckstore.io.buffers import BufferPool
from ckstore.io.engine import Engine, IoQueue, IoRequest
from ckstore.io.engine_pwrite import PwriteEngine
from ckstore.io.os_calls import PAGE_NBYTES
from ckstore.latch import Latch

_LOG = logging.getLogger("ckstore")
_said: set[str] = set()
_PROBE_SECONDS = 30


def choose_engine(name: EngineName, folder: str) -> tuple[Engine, str]:
    """Return the engine to use in the folder, and the reason in a few words.

    ``"auto"`` takes io_uring where it passes a write and a read in the folder, else pwrite.

    Raises:
        UnsupportedError: ``"uring"`` was asked for and does not work here.
    """
    if name == "pwrite":
        return PwriteEngine(), "pwrite: asked for"
    if name not in ("auto", "uring"):
        raise UsageError("engine must be one of 'auto', 'uring', 'pwrite'", where=repr(name))
    engine, trouble = _try_uring(folder)
    if engine is not None:
        return engine, "uring: asked for" if name == "uring" else "uring: passed its probe"
    if name == "uring":
        raise UnsupportedError(f"io_uring: {trouble}", where=folder, todo="take engine='auto' or 'pwrite'")
    reason = f"io_uring: {trouble}, using pwrite"
    if reason not in _said:
        _said.add(reason)
        _LOG.info(reason)
    return PwriteEngine(), reason


def open_scratch(folder: str, *, direct: bool) -> int | None:
    """Open a file without a name in the folder for reading and writing; None where that is refused.

    Where files need a name, it is a draft's in a store, and begins with ``.probe-`` in a folder that is to become
    one: whoever is killed before it is removed leaves nothing that a store takes for foreign.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError:
        # As the store's layout has it: io knows no layout, but this one name has to fit it.
        draft = Path(folder, "tmp", f"{new_token()}.probe")
        path = str(draft if draft.parent.is_dir() else Path(folder, f".probe-{new_token()}"))
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    finally:
        _unlink_if_there(path)
    return fd


def takes_direct(folder: str) -> bool:
    """Say whether files in the folder can be written and read past the page cache, by trying it."""
    fd = open_scratch(folder, direct=True)
    if fd is None:
        return False
    with BufferPool(PAGE_NBYTES, 1) as pool:
        buffer = pool.acquire()
        try:
            return os.pwritev(fd, [buffer.view], 0) == PAGE_NBYTES == os.preadv(fd, [buffer.view], 0)
        except OSError:
            return False
        finally:
            os.close(fd)
            buffer.release()


def _unlink_if_there(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108 - the same plain string that was opened
    except OSError:
        return


def _try_uring(folder: str) -> tuple[Engine | None, str]:
    try:
        # Asked here too: an import that raises is read and run again each time.
        ring_support.refuse_where_it_kills()
        from ckstore.io.engine_uring import UringEngine
    except ModuleNotFoundError as error:
        return None, f"liburing is not installed ({error})"
    except ImportError as error:
        return None, str(error)
    engine = UringEngine()
    try:
        queue = engine.open_queue(depth=4)
    except OSError as error:
        return None, _refusal(error)
    try:
        _write_and_read(queue, folder)
    except OSError as error:
        return None, _refusal(error)
    finally:
        queue.close()
    return engine, ""


def _refusal(error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, str(error))
    if error.errno in (errno.EPERM, errno.EACCES):
        return f"refused by seccomp or by io_uring_disabled ({code})"
    if error.errno == errno.ENOSYS:
        return f"not in this kernel, or blocked ({code})"
    if error.errno == errno.ENOMEM:
        return f"no memory for a ring, see ulimit -l ({code})"
    return f"failed its probe ({code}: {error.strerror or error})"


def _write_and_read(queue: IoQueue, folder: str) -> None:
    """Write a block through the queue and read it back; in a folder without O_DIRECT, a buffered one."""
    fd = open_scratch(folder, direct=True)
    if fd is None:
        fd = open_scratch(folder, direct=False)
    if fd is None:
        # A folder that cannot be written: the ring itself was made, and reads fail over one by one.
        return
    pattern = os.urandom(PAGE_NBYTES)
    try:
        with BufferPool(PAGE_NBYTES, 2) as pool:
            source, target = pool.acquire(), pool.acquire()
            source.view[:] = pattern
            _transfer(queue, IoRequest("write", fd, source.view, 0, _ignore))
            _transfer(queue, IoRequest("read", fd, target.view, 0, _ignore))
            if target.view != pattern:
                raise OSError(errno.EIO, "other bytes came back")
    finally:
        os.close(fd)


def _ignore(moved: int, error: OSError | None) -> None:
    """Stand in until the transfer knows whom to tell."""


def _transfer(queue: IoQueue, request: IoRequest) -> None:
    is_done = Latch()
    outcome: list[OSError | None] = []

    def on_done(moved: int, error: OSError | None) -> None:
        outcome.append(error)
        is_done.set()

    request.on_done = on_done
    queue.submit(request)
    if not is_done.wait(_PROBE_SECONDS):
        raise OSError(errno.ETIMEDOUT, "no completion came")
    if outcome[0] is not None:
        raise outcome[0]
