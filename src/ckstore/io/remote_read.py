"""Read packs of a bucket by ranges, many at a time.

Invariants:
- Whatever way an iteration ends, it ends with nothing in flight and every unseen buffer given back.
- A range that came short is asked for again, and never shown.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from ckstore.errors import MissingChunkError, UsageError
from ckstore.io.backend import Fetching, ReadRequest, ReadResult
from ckstore.io.buffers import AlignedBuffer, BufferPool
from ckstore.io.remote import Bucket
from ckstore.pool import Pool


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
