"""Write and read the packs of a folder: ``LocalPackSink``, ``LocalReadFile`` and ``RangeReader``.

Invariants of writing:
- The file is extended by fallocate before blocks are written, because writes that do not grow a file run in parallel.
  It is truncated to its true size before the sync, never after.
- Space must be available only for bytes that are written. Space reserved ahead shrinks if the disk is nearly full.
- The first failure is final: every later call raises it, and the file is not synced again.
- The descriptor is closed only when nothing is in flight and no other thread is finishing the pack.
- The name of a pack that was closed before it was finished is removed, so that a full disk has space again.

Invariants of reading:
- Ranges are widened to pages for O_DIRECT, and results are narrowed to the requested range.
- However an iteration ends, nothing is in flight afterwards, and every buffer not yielded is back in the pool.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ckstore.config import GIB, MIB
from ckstore.errors import CapacityError, CkstoreError, UsageError
from ckstore.io.backend import ReadRequest, ReadResult
from ckstore.io.buffers import AlignedBuffer, BufferPool, map_private
from ckstore.io.direct_io import IoQueue, IoRequest
from ckstore.io.syscalls import PAGE_NBYTES, fallocate, medium_error, medium_errors, round_down, round_up

STEP_NBYTES_MAX = 16 * GIB
"""Largest reservation."""

STEP_NBYTES_MIN = 64 * MIB
"""Smallest reservation ahead of the written bytes, after the first few. Nothing is reserved on a fuller disk."""

_STEP_NBYTES_FIRST = MIB
"""First reservation beyond the expected size; each further one is twice as large, up to ``STEP_NBYTES_MIN``. Small,
because a pack usually needs only its directory more, and tmpfs fills reserved space with zeros."""


class LocalPackSink:
    """Writes the blocks of one pack. Thread-safe.

    Args:
        fd: Descriptor open for writing; the sink owns it.
        name: Name of the pack.
        path: Its full path, for messages.
        queue: Writes the blocks.
        unlink: Removes the name of an unfinished pack.
        nbytes_expected: Estimated size of the pack. This much is reserved in one step, up to 16 GiB, or less if the
            disk has less free space.
        final_mode: File mode of the finished pack.

    Raises:
        BackendError: Reserving space failed for another reason than a full disk.
    """

    def __init__(
        self,
        fd: int,
        name: str,
        path: str,
        queue: IoQueue,
        unlink: Callable[[str], None],
        *,
        nbytes_expected: int,
        final_mode: int = 0o400,
    ) -> None:
        self._fd = fd
        self._unlink = unlink
        self._name = name
        self._path = path
        self._queue = queue
        self._final_mode = final_mode
        self._expected_nbytes = round_up(nbytes_expected)
        self._reserved_nbytes = 0
        self._step_nbytes_max = STEP_NBYTES_MAX
        self._can_reserve = True
        self._in_flight = 0
        self._failure: CkstoreError | None = None
        self._is_finished = False
        self._is_closed = False
        self._condition = threading.Condition()
        # A lock of its own, so that completions do not wait for fallocate.
        self._reserving = threading.Lock()
        self._step_nbytes = _STEP_NBYTES_FIRST
        if nbytes_expected:
            self._reserve_some(min(self._expected_nbytes, STEP_NBYTES_MAX), nbytes_needed=0)

    @property
    def name(self) -> str:
        """The name it was created under."""
        return self._name

    def write(self, buffer: AlignedBuffer, nbytes: int, offset: int) -> None:
        """Start writing ``buffer[:nbytes]`` at ``offset``. The buffer is released when it is written."""
        assert nbytes % PAGE_NBYTES == 0 == offset % PAGE_NBYTES, "blocks are multiples of 4096"

        def on_done(moved: int, error: OSError | None) -> None:
            if error is None and moved != nbytes:
                error = OSError(errno.EIO, f"{moved} of {nbytes} bytes were written")
            self._finish_one(buffer, error)

        with self._condition:
            self._in_flight += 1
        try:
            self._check()
            self._reserve_for(offset + nbytes)
            self._queue.submit(IoRequest("write", self._fd, buffer.view[:nbytes], offset, on_done))
        except BaseException as error:
            self._finish_one(buffer, None)
            self._fail(error)
            raise

    def drain(self) -> None:
        """Wait until all writes have finished; raise the first failure."""
        with self._condition:
            self._condition.wait_for(lambda: not self._in_flight)
        self._check()

    def finish(self, nbytes: int) -> None:
        """Drain, truncate the file to ``nbytes``, make it read-only and durable, and close it."""
        with self._condition:
            self._condition.wait_for(lambda: not self._in_flight)
            self._check()
            # Makes close() on another thread wait, so that the descriptor is not reused for another file meanwhile.
            self._in_flight += 1
        try:
            with medium_errors(self._path, "making the pack durable"):
                os.ftruncate(self._fd, nbytes)
                os.fchmod(self._fd, self._final_mode)
                os.fdatasync(self._fd)
            self._is_finished = True
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._count_one_done()
        self.close()

    def close(self) -> None:
        """Wait for writes in flight, ignore their results, and close. Removes an unfinished pack."""
        with self._condition:
            self._condition.wait_for(lambda: not self._in_flight)
            if self._is_closed:
                return
            self._is_closed = True
            if self._failure is None:
                self._failure = UsageError("the pack is closed", where=self._path)
        # Errors are ignored: the sync has reported write errors, and a pack that cannot be removed here is unreferenced
        # and is deleted by a later gc.
        with contextlib.suppress(OSError):
            os.close(self._fd)
        if not self._is_finished:
            with contextlib.suppress(OSError, CkstoreError):
                self._unlink(self._name)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        with self._condition:
            if self._failure is None and isinstance(error, CkstoreError):
                self._failure = error
            elif self._failure is None:
                self._failure = CkstoreError("writing the pack was cancelled", where=self._path)

    def _finish_one(self, buffer: AlignedBuffer, error: OSError | None) -> None:
        if error is not None:
            self._fail(medium_error(error, where=self._path, what="writing a pack"))
        if error is not None and error.errno == errno.EBADR:
            # EBADR: the completion was lost, and the kernel may still read the block.
            buffer.discard()
        else:
            buffer.release()
        self._count_one_done()

    def _count_one_done(self) -> None:
        with self._condition:
            self._in_flight -= 1
            self._condition.notify_all()

    def _reserve_for(self, stop: int) -> None:
        with self._reserving:
            missing = stop - self._reserved_nbytes
            if missing <= 0:
                return
            rest = self._expected_nbytes - self._reserved_nbytes
            step = min(max(rest, min(self._step_nbytes, STEP_NBYTES_MIN)), self._step_nbytes_max)
            if rest <= 0:
                self._step_nbytes *= 2
            self._reserve_some(max(missing, step), nbytes_needed=missing)

    def _reserve_some(self, nbytes: int, *, nbytes_needed: int) -> None:
        """Reserve ``nbytes``, or less if the disk has less free space, but at least ``nbytes_needed``."""
        while nbytes:
            try:
                return self._reserve(nbytes)
            except CapacityError:
                if nbytes <= nbytes_needed:
                    raise
            # Some file systems keep the part that they could reserve. Give it back to other users of the disk.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._reserved_nbytes)
            # Do not try this size again, because each attempt is slow on a nearly full disk.
            half = round_down(nbytes // 2)
            self._step_nbytes_max = half if half >= STEP_NBYTES_MIN else 0
            nbytes = max(nbytes_needed, self._step_nbytes_max)
        return None

    def _reserve(self, nbytes: int) -> None:
        if self._can_reserve:
            with medium_errors(self._path, "reserving space"):
                self._can_reserve = fallocate(self._fd, self._reserved_nbytes, nbytes)
        self._reserved_nbytes += nbytes


_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class LocalReadFile:
    """An open file of a folder, with O_DIRECT where the file system supports it.

    Raises:
        FileNotFoundError: The file does not exist.
        BackendError: It cannot be opened.
    """

    def __init__(self, name: str, path: str, *, try_direct: bool) -> None:
        self._name = name
        self._path = path
        with medium_errors(path, "opening a file"):
            self.fd, self.is_direct = _open_read(path, try_direct=try_direct)
            self._nbytes = os.fstat(self.fd).st_size
        self._is_closed = False

    @property
    def name(self) -> str:
        """The name it was opened by."""
        return self._name

    @property
    def path(self) -> str:
        """The path it was opened by, for messages."""
        return self._path

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""
        return self._nbytes

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Read exactly these bytes; fewer only at the end of the file.

        Each call reads from the disk, so a caller that scans a file should read large windows.
        """
        nbytes = min(nbytes, max(0, self._nbytes - offset))
        if nbytes <= 0:
            return b""
        start = round_down(offset)
        with map_private(round_up(offset + nbytes) - start) as page, medium_errors(self._path, "reading"):
            moved = 0
            # A read may return fewer bytes. It has reached the end of the file if it makes no progress.
            while start + moved < offset + nbytes:
                with memoryview(page)[round_down(moved) :] as rest:
                    count = os.preadv(self.fd, [rest], start + round_down(moved))
                if round_down(moved) + count <= moved:
                    break
                moved = round_down(moved) + count
            return page[offset - start : min(moved, offset - start + nbytes)]

    def close(self) -> None:
        """Close the descriptor. Repeated calls do nothing."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self.fd)


def _open_read(path: str, *, try_direct: bool) -> tuple[int, bool]:
    if try_direct:
        try:
            return os.open(path, _READ_FLAGS | os.O_DIRECT), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    return os.open(path, _READ_FLAGS), False


@dataclass(slots=True, eq=False)
class _Fetch:
    """A request in flight."""

    request: ReadRequest
    file: LocalReadFile
    buffer: AlignedBuffer
    moved: int = 0
    error: OSError | None = None
    try_count: int = 0

    @property
    def start(self) -> int:
        return round_down(self.request.offset)

    def result(self) -> ReadResult:
        """Return the requested part of the bytes read."""
        skipped = self.request.offset - self.start
        stop = max(skipped, min(self.moved, skipped + self.request.nbytes))
        return ReadResult(self.request.tag, self.buffer.view[skipped:stop], self.buffer)

    def drop(self) -> None:
        """Release or discard the buffer without yielding it."""
        if self.error is not None and self.error.errno == errno.EBADR:
            # EBADR: the completion was lost, and the kernel may still write into the block.
            self.buffer.discard()
        else:
            self.buffer.release()


class RangeReader:
    """Reads the ranges of one iterable of requests. Used by one thread.

    Args:
        io_queue: Moves the bytes.
        pool: Where buffers come from.
        depth: Transfers that the queue runs concurrently. Twice as many requests and bytes are submitted, so that the
            queue does not wait for the iterating thread.
        nbytes_max: Bytes that the queue transfers concurrently.
    """

    def __init__(self, io_queue: IoQueue, pool: BufferPool, depth: int, *, nbytes_max: int) -> None:
        self._queue = io_queue
        self._pool = pool
        self._in_flight_max = 2 * depth
        self._ahead_nbytes_max = 2 * nbytes_max
        self._ahead_nbytes = 0
        self._in_flight = 0
        self._completed: queue.SimpleQueue[_Fetch] = queue.SimpleQueue()

    def run(self, requests: Iterable[ReadRequest]) -> Iterator[ReadResult]:
        """Yield results as they arrive."""
        source: Iterator[ReadRequest] | None = iter(requests)
        try:
            while True:
                if source is not None and not self._refill(source):
                    source = None
                if not self._in_flight:
                    return
                fetch = self._next_completed()
                if fetch is not None:
                    yield fetch.result()
        finally:
            while self._in_flight:
                self._take_completed().drop()

    def _refill(self, source: Iterator[ReadRequest]) -> bool:
        """Start requests while buffers are free. Return False after the last request."""
        while self._in_flight < self._in_flight_max and self._ahead_nbytes < self._ahead_nbytes_max:
            # Wait for a buffer only if nothing is in flight; otherwise a completion may come first.
            buffer = self._pool.try_acquire() if self._in_flight else self._pool.acquire()
            if buffer is None:
                return True
            try:
                request = next(source, None)
                if request is not None:
                    self._start(self._fetch_of(request, buffer))
            except BaseException:
                buffer.release()
                raise
            if request is None:
                buffer.release()
                return False
        return True

    def _fetch_of(self, request: ReadRequest, buffer: AlignedBuffer) -> _Fetch:
        if not isinstance(request.file, LocalReadFile):
            raise UsageError("the file was opened by another backend", where=request.file.name)
        if round_up(request.offset + request.nbytes) - round_down(request.offset) > buffer.nbytes:
            where = f"{request.nbytes} bytes at {request.offset} of {request.file.name}"
            raise UsageError("the range is larger than a buffer", where=where)
        return _Fetch(request, request.file, buffer)

    def _start(self, fetch: _Fetch) -> None:
        def on_done(moved: int, error: OSError | None) -> None:
            if error is None and moved < min(nbytes, fetch.file.nbytes - fetch.start):
                error = OSError(errno.EIO, f"{moved} bytes were read")
            fetch.moved, fetch.error = moved, error
            self._completed.put(fetch)

        nbytes = round_up(fetch.request.offset + fetch.request.nbytes) - fetch.start
        fetch.try_count += 1
        self._queue.submit(IoRequest("read", fetch.file.fd, fetch.buffer.view[:nbytes], fetch.start, on_done))
        self._in_flight += 1
        self._ahead_nbytes += fetch.request.nbytes

    def _take_completed(self) -> _Fetch:
        fetch = self._completed.get()
        self._in_flight -= 1
        self._ahead_nbytes -= fetch.request.nbytes
        return fetch

    def _next_completed(self) -> _Fetch | None:
        """Wait for a completion. Return None if it failed and was retried."""
        fetch = self._take_completed()
        if fetch.error is None:
            return fetch
        if fetch.error.errno == errno.EIO and fetch.try_count == 1:
            # A second read of the same sectors often succeeds.
            fetch.error = None
            self._start(fetch)
            return None
        fetch.drop()
        where = f"{fetch.request.nbytes} bytes at {fetch.request.offset} of {fetch.file.path}"
        raise medium_error(fetch.error, where=where, what="reading") from fetch.error
