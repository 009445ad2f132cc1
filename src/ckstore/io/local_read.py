"""Read packs of a folder: large ranges past the page cache, many at a time, and small ones on the way.

Invariants:
- Ranges are widened to pages for O_DIRECT and narrowed again before anyone sees them.
- Whatever way an iteration ends, it ends with nothing in flight and every unseen buffer given back.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckstore.errors import UsageError
from ckstore.io.backend import ReadRequest, ReadResult
from ckstore.io.buffers import AlignedBuffer, BufferPool
from ckstore.io.engine import IoQueue, IoRequest
from ckstore.io.os_calls import medium_error, medium_errors, round_down, round_up

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class LocalReadFile:
    """A file of a folder, open past the page cache where the file system takes it.

    Raises:
        FileNotFoundError: No such file.
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
        """Where it was, for messages."""
        return self._path

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""
        return self._nbytes

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Read exactly these bytes; shorter only at the end of the file.

        Each call goes to the disk, so whoever scans a file takes it in windows.
        """
        nbytes = min(nbytes, max(0, self._nbytes - offset))
        if nbytes <= 0:
            return b""
        start = round_down(offset)
        with mmap.mmap(-1, round_up(offset + nbytes) - start) as page, medium_errors(self._path, "reading"):
            moved = 0
            # A read may stop early at a page; at the end of the file it stops for good.
            while start + moved < offset + nbytes:
                with memoryview(page)[round_down(moved) :] as rest:
                    count = os.preadv(self.fd, [rest], start + round_down(moved))
                if round_down(moved) + count <= moved:
                    break
                moved = round_down(moved) + count
            return page[offset - start : min(moved, offset - start + nbytes)]

    def close(self) -> None:
        """Let go of the descriptor; repeated calls do nothing."""
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
    """A request under way."""

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
        """Narrow what was read to what was asked for."""
        skipped = self.request.offset - self.start
        stop = max(skipped, min(self.moved, skipped + self.request.nbytes))
        return ReadResult(self.request.tag, self.buffer.view[skipped:stop], self.buffer)

    def let_go(self) -> None:
        """Give the buffer back, or up, without showing it to anyone."""
        if self.error is not None and self.error.errno == errno.EBADR:
            # The kernel lost count of its completions and may still write into the block.
            self.buffer.discard()
        else:
            self.buffer.release()


class RangeReader:
    """One run through an iterable of requests.

    Args:
        depth: How many the queue moves at once.
        nbytes_max: How many bytes of them. As many again are handed to it, so that it need not wait for the thread
            that iterates.
    """

    def __init__(self, io_queue: IoQueue, pool: BufferPool, depth: int, *, nbytes_max: int) -> None:
        self._queue = io_queue
        self._pool = pool
        self._in_flight_max = 2 * depth
        self._ahead_nbytes_max = 2 * nbytes_max
        self._ahead_nbytes = 0
        self._in_flight = 0
        self._finished: queue.SimpleQueue[_Fetch] = queue.SimpleQueue()

    def run(self, requests: Iterable[ReadRequest]) -> Iterator[ReadResult]:
        """Yield results as they arrive."""
        source: Iterator[ReadRequest] | None = iter(requests)
        try:
            while True:
                if source is not None and not self._refill(source):
                    source = None
                if not self._in_flight:
                    return
                fetch = self._next_finished()
                if fetch is not None:
                    yield fetch.result()
        finally:
            while self._in_flight:
                self._take_finished().let_go()

    def _refill(self, source: Iterator[ReadRequest]) -> bool:
        """Start requests while there are buffers; return False when there are no more requests."""
        while self._in_flight < self._in_flight_max and self._ahead_nbytes < self._ahead_nbytes_max:
            # Only with nothing in flight is there nothing better to do than to wait for a buffer.
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
            self._finished.put(fetch)

        nbytes = round_up(fetch.request.offset + fetch.request.nbytes) - fetch.start
        fetch.try_count += 1
        self._queue.submit(IoRequest("read", fetch.file.fd, fetch.buffer.view[:nbytes], fetch.start, on_done))
        self._in_flight += 1
        self._ahead_nbytes += fetch.request.nbytes

    def _take_finished(self) -> _Fetch:
        fetch = self._finished.get()
        self._in_flight -= 1
        self._ahead_nbytes -= fetch.request.nbytes
        return fetch

    def _next_finished(self) -> _Fetch | None:
        """Wait for a completion; None when it failed and was started once more."""
        fetch = self._take_finished()
        if fetch.error is None:
            return fetch
        if fetch.error.errno == errno.EIO and fetch.try_count == 1:
            # A disk often answers the second time.
            fetch.error = None
            self._start(fetch)
            return None
        fetch.let_go()
        where = f"{fetch.request.nbytes} bytes at {fetch.request.offset} of {fetch.file.path}"
        raise medium_error(fetch.error, where=where, what="reading") from fetch.error
