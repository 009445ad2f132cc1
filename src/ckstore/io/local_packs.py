"""A pack being written into a folder: space reserved in large steps, blocks in flight, one sync at the end.

Invariants:
- The file is extended by fallocate before blocks are written into it, so that no write grows it and writes
  run side by side; it is cut to its true size before the sync, never after.
- Only room for what is written is a must: what is reserved ahead shrinks with the room there is.
- The first failure stays: every later call raises it, and the file is never synced again.
- The descriptor is closed only when nothing is in flight and no other thread is finishing the pack.
- A pack that is let go of before it was finished loses its name, so that a full disk has room again.

Read packs of a folder: large ranges past the page cache, many at a time, and small ones on the way.

Invariants:
- Ranges are widened to pages for O_DIRECT and narrowed again before anyone sees them.
- Whatever way an iteration ends, it ends with nothing in flight and every unseen buffer given back.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ckstore.config import GIB, MIB
from ckstore.errors import CapacityError, CkstoreError, UsageError
from ckstore.io.backend import ReadRequest, ReadResult
from ckstore.io.buffers import AlignedBuffer, BufferPool
from ckstore.io.direct_io import IoQueue, IoRequest
from ckstore.io.syscalls import PAGE_NBYTES, fallocate, medium_error, medium_errors, round_down, round_up

STEP_NBYTES_MAX = 16 * GIB
"""No more is reserved at once."""

STEP_NBYTES_MIN = 64 * MIB
"""No less is reserved ahead, once a pack has grown beyond what was expected; where that is no longer free, nothing."""

_STEP_NBYTES_FIRST = MIB
"""What is reserved beyond what was expected: this at first, then twice as much each time, up to the least of later
steps. A pack needs little more than its directory. In memory (tmpfs) room is filled with zeros, and a commit of a few
KiB spent most of its time on what it gave back again."""


class LocalPackSink:
    """Blocks on their way into one file.

    Args:
        fd: Open for writing; the sink owns it.
        name: The name it was created under.
        path: Where that is, for messages.
        queue: What writes blocks.
        unlink: Removes a name: that of a pack that is given up.
        nbytes_expected: About how large the pack will be; that much is reserved at once, up to 16 GiB, or
            less where there is less room: the pack may turn out smaller.
        final_mode: Mode of the finished pack, which nobody writes any more.

    Raises:
        BackendError: Reserving failed for another reason than a lack of room.
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
        # Apart from the condition, so that completions need not wait for the file system.
        self._reserving = threading.Lock()
        self._step_nbytes = _STEP_NBYTES_FIRST
        if nbytes_expected:
            self._reserve_some(min(self._expected_nbytes, STEP_NBYTES_MAX), nbytes_needed=0)

    @property
    def name(self) -> str:
        """The name it was created under."""
        return self._name

    def write(self, buffer: AlignedBuffer, nbytes: int, offset: int) -> None:
        """Start writing ``buffer[:nbytes]`` at ``offset``; the buffer is released when it is written."""
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
        """Wait until every write is done; raise the first failure."""
        with self._condition:
            self._condition.wait_for(lambda: not self._in_flight)
        self._check()

    def finish(self, nbytes: int) -> None:
        """Drain, cut the file to its true size, make its bytes durable, make it read-only, and close it."""
        with self._condition:
            self._condition.wait_for(lambda: not self._in_flight)
            self._check()
            # A close from another thread waits for this too: the descriptor's number must not become another file's.
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
        """Wait for what is in flight, ignoring its result, and let go; an unfinished pack is removed."""
        with self._condition:
            self._condition.wait_for(lambda: not self._in_flight)
            if self._is_closed:
                return
            self._is_closed = True
            if self._failure is None:
                self._failure = UsageError("the pack is closed", where=self._path)
        # What close reports was reported by the sync, or is of no interest to who gave up; what cannot be
        # removed is garbage that nobody names.
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
                self._failure = CkstoreError("the pack was given up", where=self._path)

    def _finish_one(self, buffer: AlignedBuffer, error: OSError | None) -> None:
        if error is not None:
            self._fail(medium_error(error, where=self._path, what="writing a pack"))
        if error is not None and error.errno == errno.EBADR:
            # The kernel lost count of its completions and may still read the block.
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
        """Reserve so many bytes, or fewer where there is less room, but never fewer than are needed."""
        while nbytes:
            try:
                return self._reserve(nbytes)
            except CapacityError:
                if nbytes <= nbytes_needed:
                    raise
            # Some file systems keep what they had found; others on this disk may need it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._reserved_nbytes)
            # What did not fit is not tried again: on a nearly full disk every block would pay for it.
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
