"""The Engine protocol: how aligned blocks get from memory to a descriptor and back.

An engine is chosen once per store: probed, overridable, reported with the reason. Its queue may be
submitted to from any thread; ``on_done`` runs on the engine's own thread and must be quick.

Choose an engine for a folder: probe it there, and say once which was taken and why.

The engine that is always there: pwrite and pread on a few threads.

Invariants:
- Threads are started as requests come, never more than ``depth``; each waits without the GIL.
- A queue belongs to the process that made it: its threads do not exist in a forked child.

Keep liburing from being loaded where it would kill the process: on every processor without AVX-512.

Its one wheel was compiled for its author's processor, and 512-bit vectors lie even in what makes a ``Ring``. Elsewhere
that is SIGILL, which no probe survives, so the processor is asked before the import.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ckstore.concurrency import Latch
from ckstore.config import EngineName
from ckstore.errors import UnsupportedError, UsageError
from ckstore.hashing import new_token
from ckstore.io.buffers import BufferPool
from ckstore.io.syscalls import PAGE_NBYTES, round_down


@dataclass(slots=True, eq=False)
class IoRequest:
    """One transfer between ``buffer`` and the file at ``offset``.

    Args:
        on_done: Called once with the bytes moved (fewer than asked only at the end of a file that is
            read) and None, or with the error.
    """

    kind: Literal["read", "write"]
    fd: int
    buffer: memoryview
    offset: int
    on_done: Callable[[int, OSError | None], None]


class IoQueue(Protocol):
    """Transfers in flight; keeps every buffer alive until its completion was reaped."""

    def submit(self, request: IoRequest) -> None:
        """Start a transfer, or keep it until there is room; never blocks."""
        ...

    def close(self) -> None:
        """Wait for everything submitted, then let go; repeated calls do nothing."""
        ...


class Engine(Protocol):
    """A way to move blocks."""

    @property
    def name(self) -> str:
        """``"uring"`` or ``"pwrite"``."""
        ...

    def open_queue(self, *, depth: int, nbytes_max: int | None = None) -> IoQueue:
        """Make a queue that keeps at most ``depth`` transfers in flight, and about ``nbytes_max`` bytes of them."""
        ...


_STALLS_MAX = 3
_SECTOR_NBYTES = 512


@dataclass(slots=True, eq=False)
class Transfer:
    """How far a request has come, the same for every engine.

    A call that moved fewer bytes than asked is a success to the kernel; the rest is asked for again, from
    an aligned offset, until a write is complete or a read finds the end of the file.
    """

    request: IoRequest
    moved: int = 0
    stall_count: int = 0

    @property
    def start(self) -> int:
        """Where in the buffer the next call begins: what was moved, rounded down so that O_DIRECT takes it.

        After a stall by less, so that a limit within a page is met and the kernel names it.
        """
        return self.moved & -_SECTOR_NBYTES if self.stall_count else round_down(self.moved)

    def advance(self, result: int) -> bool:
        """Count what a call moved; return whether the request is complete.

        Raises:
            OSError: Writes stop short again and again without getting further.
        """
        reached = self.start + result
        has_progress = reached > self.moved
        self.moved = max(self.moved, reached)
        if self.moved >= len(self.request.buffer):
            return True
        if has_progress:
            return False
        if self.request.kind == "read":
            return True
        self.stall_count += 1
        if self.stall_count >= _STALLS_MAX:
            raise OSError(errno.EIO, "writes stop short")
        return False


class PwriteEngine:
    """Moves blocks by ordinary system calls."""

    name = "pwrite"

    def open_queue(self, *, depth: int, nbytes_max: int | None = None) -> IoQueue:
        """Make a queue of at most ``depth`` threads; of bytes it keeps no count."""
        return PwriteQueue(depth)


class PwriteQueue:
    """Requests waiting for, or in the hands of, a few threads."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._pid = os.getpid()
        self._waiting: queue.SimpleQueue[IoRequest | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished_count = 0
        self._is_closed = False
        self._lock = threading.Lock()

    def submit(self, request: IoRequest) -> None:
        """Start a transfer, or keep it until a thread is free."""
        if self._pid != os.getpid():
            raise UsageError("a queue cannot be used in a forked process; open the store again there")
        with self._lock:
            if self._is_closed:
                raise UsageError("the queue is closed")
            self._unfinished_count += 1
            if len(self._threads) < min(self._depth, self._unfinished_count):
                self._start_thread()
        self._waiting.put(request)

    def close(self) -> None:
        """Wait for everything submitted, then end the threads."""
        if self._pid != os.getpid():
            # The lock may have been held by a thread of the parent.
            return
        with self._lock:
            threads, self._threads = self._threads, []
            self._is_closed = True
        for _ in threads:
            self._waiting.put(None)
        for thread in threads:
            thread.join()

    def _start_thread(self) -> None:
        # A store that is never closed must not keep the process alive: what is in flight then was never promised.
        thread = threading.Thread(target=self._work, name="ckstore-pwrite", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (request := self._waiting.get()) is not None:
            moved, error = _run(request)
            with self._lock:
                self._unfinished_count -= 1
            request.on_done(moved, error)
            # The buffer belongs to someone else now; nothing here may keep it alive while waiting.
            del request


def _run(request: IoRequest) -> tuple[int, OSError | None]:
    transfer = Transfer(request)
    call = os.preadv if request.kind == "read" else os.pwritev
    try:
        while True:
            start = transfer.start
            # Python repeats a call that a signal interrupted.
            if transfer.advance(call(request.fd, [request.buffer[start:]], request.offset + start)):
                return transfer.moved, None
    except OSError as error:
        return transfer.moved, error


_CPU_FACTS = Path("/proc/cpuinfo")

NEEDED_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "bmi1", "bmi2", "movbe")
"""As Linux names them. Read off the disassembly of the wheel of 2026.3.30: zmm registers, kortestw, bextr, mulx, movbe;
of AVX-512 all that compilers take for granted where they use some of it (x86-64-v4 of the psABI)."""


def require_supported_processor(cpu_facts: Path = _CPU_FACTS) -> None:
    """Return where liburing may be loaded; for processors of other kinds there is no wheel, so it was made there.

    Args:
        cpu_facts: Where Linux says what the processor can do.

    Raises:
        ImportError: It may not, or nobody can tell; the message says why.
    """
    if os.uname().machine != "x86_64":
        return
    flags = _flags_of(cpu_facts)
    if flags is None:
        raise ImportError(f"liburing needs AVX-512, and {cpu_facts} does not say whether the processor has it")
    missing = [flag for flag in NEEDED_FLAGS if flag not in flags]
    if missing:
        what = "AVX-512" if all(flag.startswith("avx512") for flag in missing) else ", ".join(missing)
        raise ImportError(f"the processor lacks {what}, which liburing was compiled for")


def _flags_of(cpu_facts: Path) -> frozenset[str] | None:
    """Return the flags of the first processor; None where they are not told."""
    try:
        # Hundreds of processors make it long, and Linux writes it as it is read.
        with cpu_facts.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "flags":
                    return frozenset(value.split())
    except OSError:
        return None
    return None


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


def supports_direct_io(folder: str) -> bool:
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
