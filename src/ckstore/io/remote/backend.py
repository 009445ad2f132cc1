"""The bucket backend: files are objects, folders do not exist, and drafts stay in memory.

An object appears completely or not at all. Files created below ``tmp`` (drafts) therefore stay in the memory of this
process until ``link`` or ``rename`` gives them their final name.

Invariants:
- ``create``, ``link`` and ``rename_new`` never replace an object, if the server supports conditional writes
  (``If-None-Match``). ``probe`` tests that.
- Everything is durable when a call returns, so the sync functions do nothing.

Invariants of packs, which are written while they are being made, and whose ranges are read concurrently:
- Blocks arrive in any order and are uploaded in file order. A block is copied before its buffer is released, so that
  bytes in flight cannot change.
- The pack does not exist before ``finish``, and never exists if it is not finished.
- However a read ends, nothing is in flight afterwards, and every buffer not yielded is back in the pool.
- A range that arrives incomplete is requested again and never yielded.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.concurrency import Pool
from ckstore.errors import BackendError, MalformedError, MissingChunkError, UnsupportedError, UsageError
from ckstore.io.backend import Fetching, FileInfo, PackSink, ReadFile, ReadRequest, ReadResult, checked_name
from ckstore.io.buffers import AlignedBuffer, BufferPool
from ckstore.io.remote.client import Bucket, RemoteOptions
from ckstore.io.syscalls import PAGE_NBYTES

_DRAFTS = "tmp/"
_MOVED_NBYTES_MAX = 1 << 26
_SMALL_NBYTES_MAX = 1 << 30
"""Largest object that is copied through this process. The server copies packs."""


class RemoteBackend:
    """A prefix of a bucket. Thread-safe.

    Args:
        url: ``s3://bucket/prefix``, or the same with ``gs`` or ``az``.
        options: Retries, timeouts and concurrency.
        clock: Used to wait between retries, and for the time of drafts.
    """

    def __init__(self, url: str, *, options: RemoteOptions | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.bucket = Bucket(url, options=options, clock=clock)
        self._clock = clock
        self._drafts: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._honours_conditions: bool | None = None

    @property
    def root(self) -> str:
        """The address, for messages. It contains no credentials."""
        return self.bucket.root

    @property
    def engine_name(self) -> str:
        """Always ``"obstore"``."""
        return "obstore"

    @property
    def request_concurrency(self) -> int:
        """How many small requests to run concurrently."""
        return self.bucket.options.reads_at_once

    def location_of(self, name: str) -> str:
        """Return the URL of a name."""
        return self.bucket.location_of(checked_name(name))

    def probe(self) -> None:
        """Raise if the server ignores conditional writes, because two writers would then lose checkpoints.

        Raises:
            UnsupportedError: It ignores them. The bucket can hold copies, but no commits.
        """
        if not self.honours_conditions():
            raise UnsupportedError(
                "this server ignores If-None-Match, or does not list what was just written",
                where=self.root,
                todo="commit to a store in a folder, and use this bucket for copies with `ckstore push`",
            )

    def honours_conditions(self) -> bool:
        """Return True if the server refuses to replace an object in a conditional write. Tested once."""
        if self._honours_conditions is None:
            self._honours_conditions = self.bucket.honours_conditions()
        return self._honours_conditions

    # Reading

    def stat(self, name: str) -> FileInfo | None:
        """Return size and time of an object, or None if it does not exist. Folders do not exist."""
        draft = self._drafts.get(checked_name(name))
        if draft is not None:
            return FileInfo(len(draft), self._clock.now_ns())
        found = self.bucket.head(name) if name else None
        return None if found is None else FileInfo(found.nbytes, found.modified_ns)

    def list_names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; empty if it has no objects."""
        prefix = f"{checked_name(folder)}/" if folder else ""
        with self._lock:
            tails = [name[len(prefix) :].split("/")[0] for name in self._drafts if name.startswith(prefix)]
        return sorted({*self.bucket.list_folder(folder), *tails})

    def list_deep(self, folder: str) -> list[tuple[str, FileInfo]]:
        """Return every object below a folder, at any depth, with size and time."""
        found = self.bucket.list_deep(checked_name(folder))
        return [(name, FileInfo(info.nbytes, info.modified_ns)) for name, info in found]

    def read_bytes(self, name: str, *, nbytes_max: int) -> bytes:
        """Read a small object whole; MalformedError if it is larger than ``nbytes_max``."""
        draft = self._drafts.get(checked_name(name))
        if draft is None:
            return self.bucket.get(name, nbytes_max=nbytes_max)
        if len(draft) > nbytes_max:
            raise MalformedError("the file is larger than a valid one", where=self.location_of(name))
        return draft

    def read_head(self, name: str, nbytes: int) -> bytes:
        """Read the first ``nbytes`` bytes of an object, or all of a shorter one."""
        draft = self._drafts.get(checked_name(name))
        return self.bucket.get_head(name, nbytes) if draft is None else draft[:nbytes]

    # Creating and renaming

    def make_folder(self, name: str) -> bool:
        """Do nothing, because a bucket has no folders. Always returns False."""
        checked_name(name)
        return False

    def remove_folder(self, name: str) -> None:
        """Do nothing, because a bucket has no folders."""
        checked_name(name)

    def create(self, name: str, content: bytes, *, sync: bool) -> None:
        """Durably create a new object; FileExistsError if it exists. A draft stays in memory."""
        if not checked_name(name).startswith(_DRAFTS):
            self.bucket.put_new(name, content)
            return
        with self._lock:
            if name in self._drafts:
                raise FileExistsError(name)
            self._drafts[name] = bytes(content)

    def link(self, source: str, target: str) -> None:
        """Copy a small object to a new name; FileExistsError if ``target`` exists."""
        self.create(target, self.read_bytes(source, nbytes_max=_SMALL_NBYTES_MAX), sync=True)

    def rename(self, source: str, target: str) -> None:
        """Rename an object, replacing ``target``. Between the two requests it has both names."""
        if source.startswith(_DRAFTS) or target.startswith(_DRAFTS):
            content = self.read_bytes(source, nbytes_max=_SMALL_NBYTES_MAX)
            if checked_name(target).startswith(_DRAFTS):
                self._drafts[target] = content
            else:
                self.bucket.put_over(target, content)
        else:
            self.bucket.copy(checked_name(source), checked_name(target))
        self.unlink(source)

    def replace_if(self, name: str, before: bytes | None, after: bytes) -> bool:
        """Replace a small object if its content is ``before`` (None: it does not exist). Return True if replaced."""
        with contextlib.suppress(FileExistsError):
            # Read the etag before the content: if the object changes in between, the etag no longer matches.
            info = self.bucket.head(checked_name(name))
            if info is None:
                if before is None:
                    self.bucket.put_new(name, after)
                return before is None
            if before == self.bucket.get(name, nbytes_max=_SMALL_NBYTES_MAX):
                self.bucket.put_instead(name, after, etag=info.etag)
                return True
        return False

    def rename_new(self, source: str, target: str) -> None:
        """Rename an object; FileExistsError if ``target`` exists. For a large object this check is not atomic."""
        info = self.stat(source)
        if info is not None and info.nbytes > _MOVED_NBYTES_MAX:
            if self.stat(target) is not None:
                raise FileExistsError(self.location_of(target))
            self.rename(source, target)
            return
        self.link(source, target)
        self.unlink(source)

    def unlink(self, name: str) -> None:
        """Remove an object; FileNotFoundError if it does not exist."""
        with self._lock:
            if self._drafts.pop(checked_name(name), None) is not None:
                return
        if self.stat(name) is None:
            raise FileNotFoundError(self.location_of(name))
        self.bucket.delete(name)

    def sync_file(self, name: str) -> None:
        """Check that the object exists, which makes it durable; FileNotFoundError if it does not."""
        if self.stat(name) is None:
            raise FileNotFoundError(self.location_of(name))

    def sync_folder(self, name: str) -> None:
        """Do nothing, because names are durable when they appear."""
        checked_name(name)

    def free_nbytes(self) -> int | None:
        """Return None, because a bucket does not report free space."""
        return None

    # Packs

    def create_pack(self, name: str, *, nbytes_expected: int) -> PackSink:
        """Start a new pack, which appears when it is finished; FileExistsError if the name exists."""
        if self.stat(name) is not None:
            raise FileExistsError(self.location_of(name))
        return RemotePackSink(self.bucket, name, nbytes_expected=nbytes_expected)

    def create_pack_over(self, name: str, *, nbytes_expected: int) -> PackSink:
        """Start a pack that replaces an object of this name when it is finished."""
        return RemotePackSink(self.bucket, checked_name(name), nbytes_expected=nbytes_expected)

    def open_read(self, name: str) -> ReadFile:
        """Open an object for ranged reads; FileNotFoundError if it does not exist. Reads fail once it was removed."""
        info = self.stat(name)
        if info is None:
            raise FileNotFoundError(self.location_of(name))
        return RemoteReadFile(self.bucket, name, info.nbytes)

    def read_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Read ranges concurrently and yield results as they arrive, in any order."""
        return read_remote_ranges(requests, pool, count_max=self.request_concurrency)

    def close(self) -> None:
        """Do nothing, because nothing is held between calls."""


_COPIES_NBYTES_MAX = 64 << 20


class _UploadCancelled(Exception):
    """Ends the upload of a pack that was closed or has failed."""


class RemotePackSink:
    """Uploads one pack on its own thread. ``write`` is thread-safe.

    Args:
        bucket: The bucket.
        name: Name of the pack.
        nbytes_expected: Estimated size.
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
        """Name of the pack."""
        return self._name

    def write(self, buffer: AlignedBuffer, nbytes: int, offset: int) -> None:
        """Copy a block and release its buffer. Raises an earlier failure."""
        assert nbytes % PAGE_NBYTES == 0 == offset % PAGE_NBYTES, "blocks are multiples of 4096"
        try:
            self._check()
            with self._changed:
                # The next block in file order is always accepted, because all others wait for it.
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
        """Raise an earlier failure. The sink holds no buffers that could be waited for."""
        self._check()

    def finish(self, nbytes: int) -> None:
        """Upload the rest. The pack then exists and is durable.

        Raises:
            CapacityError: The quota of the bucket is full.
            BackendError: The upload failed.
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
        """Cancel the upload if the pack is not finished. Repeated calls do nothing."""
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
        except _UploadCancelled:
            return
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _in_order(self) -> Iterator[bytes]:
        """Yield the blocks in order. Each waits for the next one, because the last one is cut to the true size."""
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
                    raise _UploadCancelled
                block = self._arrived.pop(self._sent_nbytes, None)
                if block is not None:
                    self._sent_nbytes += len(block)
                    self._waiting_nbytes -= len(block)
                    self._changed.notify_all()
                total = self._total_nbytes
            if block is None:
                assert total is not None, "there is a next block, or the pack is complete"
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
    """An open object of a bucket. Thread-safe.

    Args:
        bucket: The bucket.
        name: Name of the object.
        nbytes: Size of the object.
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
        """Read exactly these bytes; fewer only at the end of the object."""
        return bytes(self.view_at(offset, nbytes))

    def view_at(self, offset: int, nbytes: int) -> memoryview:
        """Read as ``read_at`` does, but without a copy.

        Raises:
            MissingChunkError: The object was removed since it was opened.
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
            todo="find out which program removes objects there; restore another checkpoint",
        )

    def stream_at(self, offset: int, nbytes: int, *, piece_nbytes: int) -> Iterator[memoryview]:
        """Read a long range with one request, and yield it in pieces of about ``piece_nbytes``.

        Raises:
            MissingChunkError: The object was removed since it was opened.
        """
        try:
            yield from self._bucket.get_stream(self._name, offset, nbytes, piece_nbytes=piece_nbytes)
        except FileNotFoundError:
            raise self._removed() from None

    def fetch_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Read ranges of this and other objects concurrently."""
        return read_remote_ranges(requests, pool, count_max=self._bucket.options.reads_at_once)

    def close(self) -> None:
        """Do nothing, because nothing is held."""


@dataclass(slots=True)
class _Fetched:
    request: ReadRequest
    buffer: AlignedBuffer
    nbytes: int = 0
    error: BaseException | None = None


def read_remote_ranges(requests: Iterable[ReadRequest], pool: BufferPool, *, count_max: int) -> Iterator[ReadResult]:
    """Yield the ranges of requests as they arrive; at most ``count_max`` are in flight."""
    source: Iterator[ReadRequest] | None = iter(requests)
    completed: queue.SimpleQueue[_Fetched] = queue.SimpleQueue()
    in_flight: dict[int, _Fetched] = {}
    threads = Pool(count_max, "ckstore-remote")
    try:
        while True:
            while source is not None and len(in_flight) < count_max:
                # Wait for a buffer only if nothing is in flight; otherwise a completion may come first.
                buffer = pool.try_acquire() if in_flight else pool.acquire()
                if buffer is None:
                    break
                fetched = _next(source, buffer)
                if fetched is None:
                    source = None
                    break
                in_flight[id(fetched)] = fetched
                threads.send(partial(_fetch, fetched, completed))
            if not in_flight:
                return
            done = completed.get()
            del in_flight[id(done)]
            if done.error is not None:
                done.buffer.release()
                raise done.error
            yield ReadResult(done.request.tag, done.buffer.view[: done.nbytes], done.buffer)
    finally:
        # Release by identity instead of counting results, because Ctrl-C can make a count wrong by one.
        threads.close()
        for fetched in in_flight.values():
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


def _fetch(fetched: _Fetched, completed: queue.SimpleQueue[_Fetched]) -> None:
    try:
        file = fetched.request.file
        assert isinstance(file, Fetching), "checked by _next"
        view = file.view_at(fetched.request.offset, fetched.request.nbytes)
        fetched.buffer.view[: len(view)] = view
        fetched.nbytes = len(view)
    except BaseException as error:
        fetched.error = error
    completed.put(fetched)
