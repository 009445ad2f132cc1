"""Write a pack to a bucket while it is being made: blocks arrive in any order, and leave in that of the file.

Invariants:
- Nothing has the pack's name before ``finish``, and nothing ever has if it is not finished.
- A block is copied before it is given back, so that what is on its way cannot change.

Read packs of a bucket by ranges, many at a time.

Invariants:
- Whatever way an iteration ends, it ends with nothing in flight and every unseen buffer given back.
- A range that came short is asked for again, and never shown.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from ckstore.concurrency import Pool
from ckstore.errors import BackendError, MissingChunkError, UsageError
from ckstore.io.backend import Fetching, ReadRequest, ReadResult
from ckstore.io.buffers import AlignedBuffer, BufferPool
from ckstore.io.remote.client import Bucket
from ckstore.io.syscalls import PAGE_NBYTES

_COPIES_NBYTES_MAX = 64 << 20


class _GivenUp(Exception):
    """Ends an upload that is not wanted any more."""


class RemotePackSink:
    """A pack on its way to a bucket, sent by a thread of its own.

    Args:
        bucket: Where it goes.
        name: Its name.
        nbytes_expected: About how long it will be.
    """

    def __init__(self, bucket: Bucket, name: str, *, nbytes_expected: int) -> None:
        self._bucket = bucket
        self._name = name
        self._nbytes_expected = nbytes_expected
        self._arrived: dict[int, bytes] = {}
        self._waiting_nbytes = 0
        self._sent_nbytes = 0
        self._total_nbytes: int | None = None
        self._failure: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The name it will have."""
        return self._name

    def write(self, buffer: AlignedBuffer, nbytes: int, offset: int) -> None:
        """Take a block; the buffer is released when this returns. Raises an earlier failure."""
        assert nbytes % PAGE_NBYTES == 0 == offset % PAGE_NBYTES, "blocks are multiples of 4096"
        try:
            self._check()
            with self._changed:
                # What is next must always be taken: everything else waits for it.
                self._changed.wait_for(
                    lambda: (
                        self._failure is not None
                        or offset == self._sent_nbytes
                        or self._waiting_nbytes < _COPIES_NBYTES_MAX
                    )
                )
            content = bytes(buffer.view[:nbytes])
        finally:
            buffer.release()
        with self._changed:
            self._arrived[offset] = content
            self._waiting_nbytes += nbytes
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._send, name="ckstore-upload", daemon=True)
                self._thread.start()
        self._check()

    def drain(self) -> None:
        """Raise what has failed so far; before the end there is nothing to wait for."""
        self._check()

    def finish(self, nbytes: int) -> None:
        """Send the rest, and make the pack exist; its bytes are durable then.

        Raises:
            CapacityError: The bucket's quota is full.
            BackendError: It was not written.
        """
        self._check()
        with self._changed:
            self._total_nbytes = nbytes
            self._changed.notify_all()
        if self._thread is None:
            assert nbytes == 0, "a pack is as long as what was written"
            self._bucket.put_over(self._name, b"")
        else:
            self._thread.join()
            self._check()
        self._is_closed = True
        self._failure = UsageError("the pack is finished", where=self._bucket.location_of(self._name))

    def close(self) -> None:
        """Give the pack up if it is not finished; repeated calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._changed:
            self._failure = self._failure or UsageError("the pack is closed", where=self._name)
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _send(self) -> None:
        try:
            self._bucket.put_stream(self._name, self._in_order(), nbytes_expected=self._nbytes_expected)
        except _GivenUp:
            return
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _in_order(self) -> Iterator[bytes]:
        """Yield the blocks in order; the last one cut to the true size, so that each waits for the one behind it."""
        held = b""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._failure is not None
                        or self._sent_nbytes in self._arrived
                        or self._total_nbytes is not None
                    )
                )
                if self._failure is not None:
                    raise _GivenUp
                block = self._arrived.pop(self._sent_nbytes, None)
                if block is not None:
                    self._sent_nbytes += len(block)
                    self._waiting_nbytes -= len(block)
                    self._changed.notify_all()
                total = self._total_nbytes
            if block is None:
                assert total is not None, "there is a next block, or an end"
                rest = total - (self._sent_nbytes - len(held))
                if not 0 <= rest <= len(held):
                    raise BackendError("a block of the pack is missing", where=self._bucket.location_of(self._name))
                if rest:
                    yield held[:rest]
                return
            if held:
                yield held
            held = block


class RemoteReadFile:
    """An object, to be read by ranges.

    Args:
        bucket: Where it lies.
        name: Its name.
        nbytes: Its size.
    """

    def __init__(self, bucket: Bucket, name: str, nbytes: int) -> None:
        self._bucket = bucket
        self._name = name
        self._nbytes = nbytes

    @property
    def name(self) -> str:
        """The name it was opened by."""
        return self._name

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""
        return self._nbytes

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Read exactly these bytes; shorter only at the end."""
        return bytes(self.view_at(offset, nbytes))

    def view_at(self, offset: int, nbytes: int) -> memoryview:
        """Read as ``read_at`` does, without another copy.

        Raises:
            MissingChunkError: It was removed from the bucket since it was opened.
        """
        nbytes = min(nbytes, max(0, self._nbytes - offset))
        if nbytes <= 0:
            return memoryview(b"")
        try:
            return self._bucket.get_range(self._name, offset, nbytes)
        except FileNotFoundError:
            raise self._removed() from None

    def _removed(self) -> MissingChunkError:
        return MissingChunkError(
            "an object was removed from the bucket while it was being read",
            where=self._bucket.location_of(self._name),
            todo="find out who removes objects there; restore another checkpoint",
        )

    def stream_at(self, offset: int, nbytes: int, *, piece_nbytes: int) -> Iterator[memoryview]:
        """Read a long range in one request, and yield it in pieces of about so many bytes.

        Raises:
            MissingChunkError: It was removed from the bucket since it was opened.
        """
        try:
            yield from self._bucket.get_stream(self._name, offset, nbytes, piece_nbytes=piece_nbytes)
        except FileNotFoundError:
            raise self._removed() from None

    def fetch_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Fetch ranges of this and other objects, many at a time."""
        return read_remote_ranges(requests, pool, count_max=self._bucket.options.reads_at_once)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class _Fetched:
    request: ReadRequest
    buffer: AlignedBuffer
    nbytes: int = 0
    error: BaseException | None = None


def read_remote_ranges(requests: Iterable[ReadRequest], pool: BufferPool, *, count_max: int) -> Iterator[ReadResult]:
    """Yield the ranges of requests as they arrive; at most ``count_max`` are under way."""
    source: Iterator[ReadRequest] | None = iter(requests)
    finished: queue.SimpleQueue[_Fetched] = queue.SimpleQueue()
    under_way: dict[int, _Fetched] = {}
    threads = Pool(count_max, "ckstore-remote")
    try:
        while True:
            while source is not None and len(under_way) < count_max:
                # Only with nothing under way is there nothing better to do than to wait for a buffer.
                buffer = pool.try_acquire() if under_way else pool.acquire()
                if buffer is None:
                    break
                fetched = _next(source, buffer)
                if fetched is None:
                    source = None
                    break
                under_way[id(fetched)] = fetched
                threads.send(partial(_fetch, fetched, finished))
            if not under_way:
                return
            done = finished.get()
            del under_way[id(done)]
            if done.error is not None:
                done.buffer.release()
                raise done.error
            yield ReadResult(done.request.tag, done.buffer.view[: done.nbytes], done.buffer)
    finally:
        # Whatever was interrupted: no count of answers is relied on, which Ctrl-C may have made wrong by one.
        threads.close()
        for fetched in under_way.values():
            fetched.buffer.release()


def _next(source: Iterator[ReadRequest], buffer: AlignedBuffer) -> _Fetched | None:
    try:
        request = next(source, None)
        if request is None:
            buffer.release()
            return None
        if not isinstance(request.file, Fetching):
            raise UsageError("the file was opened by another backend", where=request.file.name)
        if request.nbytes > buffer.nbytes:
            where = f"{request.nbytes} bytes at {request.offset} of {request.file.name}"
            raise UsageError("the range is larger than a buffer", where=where)
    except BaseException:
        buffer.release()
        raise
    return _Fetched(request, buffer)


def _fetch(fetched: _Fetched, finished: queue.SimpleQueue[_Fetched]) -> None:
    try:
        file = fetched.request.file
        assert isinstance(file, Fetching), "it was looked at before"
        view = file.view_at(fetched.request.offset, fetched.request.nbytes)
        fetched.buffer.view[: len(view)] = view
        fetched.nbytes = len(view)
    except BaseException as error:
        fetched.error = error
    finished.put(fetched)
