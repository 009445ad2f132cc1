"""Choose the engine for a folder: io_uring if liburing is installed and a test transfer succeeds, else pwrite.

The reason is logged once.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from ckstore.concurrency import Latch
from ckstore.config import EngineName
from ckstore.errors import UnsupportedError, UsageError
from ckstore.hashing import new_token
from ckstore.io.buffers import BufferPool
from ckstore.io.direct_io import Engine, IoQueue, IoRequest, PwriteEngine, require_supported_processor
from ckstore.io.syscalls import PAGE_NBYTES

_LOG = logging.getLogger("ckstore")
_logged_reasons: set[str] = set()
_PROBE_SECONDS = 30


def choose_engine(name: EngineName, folder: str) -> tuple[Engine, str]:
    """Return the engine for a folder, and the reason for the choice in a few words.

    ``"auto"`` chooses io_uring if a test write and read in the folder succeed, else pwrite.

    Raises:
        UnsupportedError: ``"uring"`` was requested and does not work here.
    """
    if name == "pwrite":
        return PwriteEngine(), "pwrite: requested"
    if name not in ("auto", "uring"):
        raise UsageError("engine must be one of 'auto', 'uring', 'pwrite'", where=repr(name))
    engine, trouble = _try_uring(folder)
    if engine is not None:
        return engine, "uring: requested" if name == "uring" else "uring: passed its probe"
    if name == "uring":
        raise UnsupportedError(f"io_uring: {trouble}", where=folder, todo="use engine='auto' or engine='pwrite'")
    reason = f"io_uring: {trouble}, using pwrite"
    if reason not in _logged_reasons:
        _logged_reasons.add(reason)
        _LOG.info(reason)
    return PwriteEngine(), reason


def open_scratch(folder: str, *, direct: bool) -> int | None:
    """Open a temporary file in the folder for reading and writing; None if that is not possible.

    The file has no name if the file system supports O_TMPFILE. Otherwise it has the name of a draft in a store, or one
    starting with ``.probe-`` in a folder without a store, and is unlinked immediately. If the process is killed before
    that, a store still recognises the file as its own.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError:
        # Must match ckstore.format.paths.draft_name, which io cannot import.
        draft = Path(folder, "tmp", f"{new_token()}.probe")
        path = str(draft if draft.parent.is_dir() else Path(folder, f".probe-{new_token()}"))
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    finally:
        _unlink_if_exists(path)
    return fd


def supports_direct_io(folder: str) -> bool:
    """Test whether files in the folder can be written and read with O_DIRECT."""
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


def _unlink_if_exists(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108 - the same plain string that was opened
    except OSError:
        return


def _try_uring(folder: str) -> tuple[Engine | None, str]:
    try:
        # Also checked here, because Python executes a module again at every import that raised.
        require_supported_processor()
        from ckstore.io.uring_engine import UringEngine
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
        return f"not permitted, by seccomp or kernel.io_uring_disabled ({code})"
    if error.errno == errno.ENOSYS:
        return f"not supported by this kernel, or blocked ({code})"
    if error.errno == errno.ENOMEM:
        return f"not enough lockable memory for a ring, see `ulimit -l` ({code})"
    return f"failed its probe ({code}: {error.strerror or error})"


def _write_and_read(queue: IoQueue, folder: str) -> None:
    """Write a block through the queue and read it back, with O_DIRECT if the folder supports it."""
    fd = open_scratch(folder, direct=True)
    if fd is None:
        fd = open_scratch(folder, direct=False)
    if fd is None:
        # The folder is read-only. The ring itself works.
        return
    pattern = os.urandom(PAGE_NBYTES)
    try:
        with BufferPool(PAGE_NBYTES, 2) as pool:
            source, target = pool.acquire(), pool.acquire()
            source.view[:] = pattern
            _transfer(queue, IoRequest("write", fd, source.view, 0, _ignore))
            _transfer(queue, IoRequest("read", fd, target.view, 0, _ignore))
            if target.view != pattern:
                raise OSError(errno.EIO, "the bytes read differ from the bytes written")
    finally:
        os.close(fd)


def _ignore(moved: int, error: OSError | None) -> None:
    """Placeholder, replaced by ``_transfer``."""


def _transfer(queue: IoQueue, request: IoRequest) -> None:
    is_done = Latch()
    outcome: list[OSError | None] = []

    def on_done(moved: int, error: OSError | None) -> None:
        outcome.append(error)
        is_done.set()

    request.on_done = on_done
    queue.submit(request)
    if not is_done.wait(_PROBE_SECONDS):
        raise OSError(errno.ETIMEDOUT, "the transfer did not complete")
    if outcome[0] is not None:
        raise outcome[0]
