"""The Backend protocol, its optional extensions, and calls that run concurrently on an object store.

Names are relative POSIX paths without ``..``.

Promises of every backend:
- Atomic publish: ``link`` and ``rename_new`` name a complete file in one step. These two, ``create`` and
  ``create_pack`` never replace an existing name.
- Durability: file contents are durable after ``create(sync=True)``, ``sync_file`` or ``PackSink.finish``. A name is
  durable after ``sync_folder`` of its folder. Callers rely on nothing earlier.
- A failed sync is never repeated on the same file, because the kernel may already have dropped the bytes.
- ``FileNotFoundError`` and ``FileExistsError`` are ordinary results and pass unchanged. Any other failure of the
  storage becomes a CapacityError, BackendError, UnsupportedError or UsageError that names the path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from ckstore.concurrency import map_in_threads
from ckstore.errors import UsageError
from ckstore.io.buffers import AlignedBuffer, BufferPool

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")
R = TypeVar("R")


_INVALID_PARTS = frozenset({"", ".", ".."})


def checked_name(name: str) -> str:
    """Return a name that is empty (the root) or a relative path inside the root; else raise UsageError."""
    if "\0" in name or (name and not _INVALID_PARTS.isdisjoint(name.split("/"))):
        raise UsageError("a name must be relative, without empty parts, '.' and '..'", where=repr(name))
    return name


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Size in bytes, time of the last change in nanoseconds since 1970, and inode number (0: no inodes)."""

    nbytes: int
    modified_ns: int
    inode: int = 0


class ReadFile(Protocol):
    """A file opened for reading. A local file stays readable after its name was removed."""

    @property
    def name(self) -> str:
        """The name it was opened by."""
        ...

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""
        ...

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Read exactly these bytes; fewer only at the end of the file. Meant for small structures."""
        ...

    def close(self) -> None:
        """Close the descriptor. Repeated calls do nothing."""
        ...


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One range to read; ``tag`` identifies its result."""

    file: ReadFile
    offset: int
    nbytes: int
    tag: int


@dataclass(slots=True)
class ReadResult:
    """The bytes of one request, in a pooled buffer that the caller must release.

    ``view`` is the requested range, or shorter if the file ends.
    """

    tag: int
    view: memoryview
    buffer: AlignedBuffer

    def release(self) -> None:
        """Return the buffer to its pool; ``view`` must not be used afterwards."""
        self.view.release()
        self.buffer.release()


class PackSink(Protocol):
    """Writes one pack under its final name, in aligned blocks and in any order."""

    @property
    def name(self) -> str:
        """The name it was created under."""
        ...

    def write(self, buffer: AlignedBuffer, nbytes: int, offset: int) -> None:
        """Start writing ``buffer[:nbytes]`` at ``offset``. The sink releases the buffer when it is written.

        ``nbytes`` and ``offset`` are multiples of 4096. The failure of an earlier write is raised here or by ``drain``.
        """
        ...

    def drain(self) -> None:
        """Wait until all writes have finished.

        Raises:
            CapacityError: The disk or the quota is full.
            BackendError: A write failed.
        """
        ...

    def finish(self, nbytes: int) -> None:
        """Drain, truncate the file to ``nbytes``, and make its bytes durable by one fdatasync."""
        ...

    def close(self) -> None:
        """Wait for writes in flight, ignore their results, and release everything. Repeated calls do nothing.

        The name of an unfinished pack is removed.
        """
        ...


class Backend(Protocol):
    """Stores named files. Thread-safe."""

    @property
    def root(self) -> str:
        """The folder or URL, for messages."""
        ...

    @property
    def engine_name(self) -> str:
        """The engine that reads and writes packs: ``"uring"``, ``"pwrite"``, or a name of the backend."""
        ...

    def location_of(self, name: str) -> str:
        """Return the full path or URL of a name, for messages."""
        ...

    def stat(self, name: str) -> FileInfo | None:
        """Return size and time of a file, or None if it does not exist."""
        ...

    def list_names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; empty if it does not exist."""
        ...

    def read_bytes(self, name: str, *, nbytes_max: int) -> bytes:
        """Read a small file whole.

        Raises:
            FileNotFoundError: It does not exist.
            MalformedError: The file is larger than ``nbytes_max``.
        """
        ...

    def read_head(self, name: str, nbytes: int) -> bytes:
        """Read the first ``nbytes`` bytes of a file, or all of a shorter one."""
        ...

    def make_folder(self, name: str) -> bool:
        """Create a folder and its parents. Return True if it is new."""
        ...

    def create(self, name: str, content: bytes, *, sync: bool) -> None:
        """Create a new file (O_EXCL). With ``sync`` its bytes are durable on return, but not its name."""
        ...

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; FileExistsError if ``target`` exists."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing ``target``."""
        ...

    def rename_new(self, source: str, target: str) -> None:
        """Rename a file; FileExistsError if ``target`` exists."""
        ...

    def unlink(self, name: str) -> None:
        """Remove a name; FileNotFoundError if it does not exist."""
        ...

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        ...

    def sync_file(self, name: str) -> None:
        """Make the bytes of a file durable, even if another process has written them."""
        ...

    def sync_folder(self, name: str) -> None:
        """Make the names in a folder durable."""
        ...

    def free_nbytes(self) -> int | None:
        """Return the free space in bytes, or None if unknown."""
        ...

    def create_pack(self, name: str, *, nbytes_expected: int) -> PackSink:
        """Create a new pack (O_EXCL) and reserve space for it in large steps."""
        ...

    def open_read(self, name: str) -> ReadFile:
        """Open a file for ranged reads; FileNotFoundError if it does not exist."""
        ...

    def read_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Read ranges concurrently and yield results as they arrive, in any order.

        The next request is taken only when a buffer is free. Closing the iterator early waits for reads in flight.
        """
        ...

    def close(self) -> None:
        """Release rings, threads and descriptors."""
        ...


class FileLock(Protocol):
    """A lock that is held until it is closed or its process ends."""

    def close(self) -> None:
        """Release the lock. Repeated calls do nothing."""
        ...


@runtime_checkable
class Locking(Protocol):
    """A backend with advisory locks. They avoid duplicate work; correctness never depends on them."""

    def try_lock(self, name: str) -> FileLock | None:
        """Lock a file, creating it if needed. Return None if another process holds the lock.

        Raises:
            UnsupportedError: The file system has no locks.
        """
        ...


class AppendFile(Protocol):
    """A file that its creator extends, and locks until it closes it or its process ends. Used by one thread."""

    def write(self, offset: int, parts: Sequence[Buffer]) -> None:
        """Write all of these parts, one behind the other. After an error, some bytes may have been written.

        Raises:
            CapacityError: The disk or the quota is full.
            BackendError: The write failed.
        """
        ...

    def sync(self) -> None:
        """Make all that was written durable. After an error, the caller must not sync this file again."""
        ...

    def truncate(self, nbytes: int) -> None:
        """Shorten the file, without a sync."""
        ...

    def close(self) -> None:
        """Close the file and release its lock. Repeated calls do nothing."""
        ...


@runtime_checkable
class Appending(Protocol):
    """A backend with files that grow."""

    def create_append_file(self, name: str, content: bytes) -> AppendFile:
        """Create a new file (O_EXCL) and lock it. ``content`` is durable on return, but not the name.

        Where the file system has no locks, the file is not locked.
        """
        ...

    def is_locked(self, name: str) -> bool:
        """Return whether the creator of such a file has it open; False where the file system has no locks.

        Raises:
            FileNotFoundError: It does not exist.
        """
        ...


@runtime_checkable
class Ageing(Protocol):
    """A backend whose files other programs may remove because of their age."""

    def renew(self, name: str, *, before_ns: int) -> None:
        """Set the time of a file to now if it is older than ``before_ns`` and this user has the permission."""
        ...

    def arrived_ns(self, name: str) -> int | None:
        """Return the change time (ctime) of a file, which copying tools cannot preserve; None if it does not exist."""
        ...


@runtime_checkable
class Swapping(Protocol):
    """A backend with compare-and-swap on small files."""

    def replace_if(self, name: str, before: bytes | None, after: bytes) -> bool:
        """Durably replace a file if its content is ``before`` (None: it does not exist). Return True if replaced."""
        ...


@runtime_checkable
class Probing(Protocol):
    """A backend that can test whether its server keeps the promises above."""

    def probe(self) -> None:
        """Test the operations that publishing needs.

        Raises:
            UnsupportedError: Two concurrent writers would lose checkpoints there.
        """
        ...


@runtime_checkable
class Distant(Protocol):
    """A backend with high latency that serves many requests concurrently, such as a bucket."""

    @property
    def request_concurrency(self) -> int:
        """How many small requests to run concurrently."""
        ...

    def list_deep(self, folder: str) -> list[tuple[str, FileInfo]]:
        """Return every file below a folder, at any depth, with size and time."""
        ...


@runtime_checkable
class Overwriting(Protocol):
    """A backend in which a large file can replace another one as a whole, without a draft."""

    def create_pack_over(self, name: str, *, nbytes_expected: int) -> PackSink:
        """Start a pack that replaces what has this name when it is finished. Until then readers find the old one."""
        ...


@runtime_checkable
class Fetching(Protocol):
    """A file that reads ranges by itself, so that one read can mix files of several backends."""

    def view_at(self, offset: int, nbytes: int) -> memoryview:
        """Read exactly these bytes, as ``ReadFile.read_at`` does, but without a copy."""
        ...

    def fetch_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Read ranges as ``Backend.read_ranges`` does."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """A file that reads a long range with one request."""

    def stream_at(self, offset: int, nbytes: int, *, piece_nbytes: int) -> Iterator[memoryview]:
        """Read exactly these bytes and yield them as they arrive, in pieces of about ``piece_nbytes``."""
        ...


class ViewedFile(Fetching, ReadFile, Protocol):
    """An open file of a bucket."""


def map_concurrent(backend: Backend, call: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield ``call(item)`` for each item in order: sequentially on a local folder, concurrently on an object store.

    The first exception ends the iteration. Closing the iterator early waits for calls in flight and starts no others.
    """
    if isinstance(backend, Distant):
        return map_in_threads(call, items, count_max=backend.request_concurrency, name="ckstore-remote")
    return map(call, items)


def for_each_concurrent(backend: Backend, call: Callable[[T], object], items: Iterable[T]) -> None:
    """Run ``call(item)`` for each item: in order on a local folder, concurrently on an object store.

    Every item is tried, even after a failure.

    Raises:
        Exception: The first failure, after all items were tried.
    """

    def error_of(item: T) -> Exception | None:
        try:
            call(item)
        except Exception as error:
            return error
        return None

    first: Exception | None = None
    for error in map_concurrent(backend, error_of, items):
        first = first or error
    if first is not None:
        raise first
