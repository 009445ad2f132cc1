"""The Backend protocol, and what a backend must promise.

A backend knows names and bytes, and nothing of chunks. Names are relative POSIX paths without ``..``.

Promises:
- ``create``, ``link``, ``rename_new`` and ``create_pack`` never replace what has the name already.
- Nothing is durable before the sync that names it has returned: file contents after ``sync=True`` or
  ``PackSink.sync``, names after ``sync_folder`` of the folder that holds them.
- A sync that failed is never repeated on the same file: the kernel may have forgotten the bytes.
- ``FileNotFoundError`` and ``FileExistsError`` are ordinary answers and pass as they are; every other
  failure of the medium is a CapacityError, BackendError or UsageError with the path in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from ckstore.concurrency import map_in_threads
from ckstore.io.buffers import AlignedBuffer, BufferPool

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Size in bytes, wall time of the last change in nanoseconds, and number of the inode; 0 where there is none."""

    nbytes: int
    modified_ns: int
    inode: int = 0


class ReadFile(Protocol):
    """A file opened for reading; it stays readable when its name goes away."""

    @property
    def name(self) -> str:
        """The name it was opened by."""
        ...

    @property
    def nbytes(self) -> int:
        """Its size when it was opened."""
        ...

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Read exactly these bytes, for small structures; shorter only at the end of the file."""
        ...

    def close(self) -> None:
        """Let go of the descriptor; repeated calls do nothing."""
        ...


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One range to fetch; ``tag`` comes back with the bytes."""

    file: ReadFile
    offset: int
    nbytes: int
    tag: int


@dataclass(slots=True)
class ReadResult:
    """The bytes of one request, in a pooled buffer that must be released.

    ``view`` is exactly the requested range, or shorter where the file ended.
    """

    tag: int
    view: memoryview
    buffer: AlignedBuffer

    def release(self) -> None:
        """Give the buffer back; ``view`` must not be used afterwards."""
        self.view.release()
        self.buffer.release()


class PackSink(Protocol):
    """A pack being written under its final name, in aligned blocks that may go out in any order."""

    @property
    def name(self) -> str:
        """The name it was created under."""
        ...

    def write(self, buffer: AlignedBuffer, nbytes: int, offset: int) -> None:
        """Start writing ``buffer[:nbytes]`` at ``offset``; the buffer is released when it is written.

        ``nbytes`` and ``offset`` are multiples of 4096. An earlier failure is raised here or by ``drain``.
        """
        ...

    def drain(self) -> None:
        """Wait until every write is done.

        Raises:
            CapacityError: The disk or the quota is full.
            BackendError: A write failed.
        """
        ...

    def finish(self, nbytes: int) -> None:
        """Drain, cut the file to its true size, and make its bytes durable (fdatasync), once."""
        ...

    def close(self) -> None:
        """Wait for what is in flight, ignoring its result, and let go; repeated calls do nothing.

        A pack that was not finished loses its name.
        """
        ...


class Backend(Protocol):
    """Where bytes live."""

    @property
    def root(self) -> str:
        """The place, for messages."""
        ...

    @property
    def engine_name(self) -> str:
        """What moves packs: ``"uring"``, ``"pwrite"``, or the backend's own name for it."""
        ...

    def location_of(self, name: str) -> str:
        """Return the full path or URL of a name, for messages."""
        ...

    def stat(self, name: str) -> FileInfo | None:
        """Return size and time of a file, or None when there is no such name."""
        ...

    def list_names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; empty when there is no such folder."""
        ...

    def read_bytes(self, name: str, *, nbytes_max: int) -> bytes:
        """Read a small file whole.

        Raises:
            FileNotFoundError: No such name.
            MalformedError: The file is larger than ``nbytes_max``.
        """
        ...

    def read_head(self, name: str, nbytes: int) -> bytes:
        """Read the first bytes of a file, fewer when it is shorter."""
        ...

    def make_folder(self, name: str) -> bool:
        """Make a folder, parents included; return whether it is new."""
        ...

    def create(self, name: str, content: bytes, *, sync: bool) -> None:
        """Make a new file (O_EXCL); with ``sync`` its bytes are durable on return, its name is not."""
        ...

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; FileExistsError when the name is taken."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Move a name, replacing what has the target name."""
        ...

    def rename_new(self, source: str, target: str) -> None:
        """Move a name; FileExistsError when the target name is taken."""
        ...

    def unlink(self, name: str) -> None:
        """Remove a name; FileNotFoundError when there is none."""
        ...

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        ...

    def sync_file(self, name: str) -> None:
        """Make a file's bytes durable that another process may have left unsynced."""
        ...

    def sync_folder(self, name: str) -> None:
        """Make the names in a folder durable."""
        ...

    def free_nbytes(self) -> int | None:
        """Return the bytes that can still be written, or None when that is not known."""
        ...

    def create_pack(self, name: str, *, nbytes_expected: int) -> PackSink:
        """Make a new pack (O_EXCL) and reserve space for it in large steps."""
        ...

    def open_read(self, name: str) -> ReadFile:
        """Open a file for ranged reads; FileNotFoundError when there is none."""
        ...

    def read_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Fetch ranges, many at a time, and yield them as they arrive, in any order.

        The next request is taken from the iterable only when a buffer is free. Closing the iterator early
        waits for what is in flight.
        """
        ...

    def close(self) -> None:
        """Let go of rings and descriptors."""
        ...


class FileLock(Protocol):
    """A lock that is held until it is closed, or its process ends."""

    def close(self) -> None:
        """Let go of it; repeated calls do nothing."""
        ...


@runtime_checkable
class Locking(Protocol):
    """A backend that can keep two processes from doing the same work at once; safety never rests on it."""

    def try_lock(self, name: str) -> FileLock | None:
        """Lock a file, which is made if it is not there; None when another holds it.

        Raises:
            UnsupportedError: There are no locks in this place.
        """
        ...


@runtime_checkable
class Ageing(Protocol):
    """A backend whose files may be removed by others for their age."""

    def renew(self, name: str, *, before_ns: int) -> None:
        """Set the time of a file to now, if there is one that was changed before this, and if this user may."""
        ...

    def arrived_ns(self, name: str) -> int | None:
        """Return when a file came to this place at the latest, which no copy of it can keep; None where it is gone."""
        ...


@runtime_checkable
class Swapping(Protocol):
    """A backend that replaces a small file under the condition that it is still what was read."""

    def replace_if(self, name: str, before: bytes | None, after: bytes) -> bool:
        """Replace a file, durably, if it still says ``before`` (None: is not there); return whether it did."""
        ...


@runtime_checkable
class Probing(Protocol):
    """A backend that may turn out not to keep its promises, and finds that out when it is asked."""

    def probe(self) -> None:
        """Try what publishing needs.

        Raises:
            UnsupportedError: Two writers there would lose checkpoints.
        """
        ...


@runtime_checkable
class Distant(Protocol):
    """A backend that answers late, and many requests at a time: what is not asked for is worth more than a request."""

    @property
    def requests_at_once(self) -> int:
        """How many small requests are worth making at the same time."""
        ...

    def list_deep(self, folder: str) -> list[tuple[str, FileInfo]]:
        """Return every name below a folder, of whatever depth, with size and time."""
        ...


@runtime_checkable
class Fetching(Protocol):
    """A file that fetches ranges of itself and its like, whichever backend the rest of a read goes to."""

    def view_at(self, offset: int, nbytes: int) -> memoryview:
        """Read exactly these bytes, as ``ReadFile.read_at`` does, without another copy."""
        ...

    def fetch_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Fetch ranges as ``Backend.read_ranges`` does."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """A file that sends long ranges in one request."""

    def stream_at(self, offset: int, nbytes: int, *, piece_nbytes: int) -> Iterator[memoryview]:
        """Read exactly these bytes, and yield them in pieces of about so many as they come."""
        ...


class ViewedFile(Fetching, ReadFile, Protocol):
    """A file of a bucket: opened for reading, and fetched by ranges."""


def map_concurrent(backend: Backend, ask: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield what is answered for each item, in their order; far away, many requests are under way at the same time.

    The first exception ends it. Whoever stops taking answers waits for those that are under way, and for no others.
    """
    if isinstance(backend, Distant):
        return map_in_threads(ask, items, count_max=backend.requests_at_once, name="ckstore-remote")
    return map(ask, items)


def for_each_concurrent(backend: Backend, act: Callable[[T], object], items: Iterable[T]) -> None:
    """Do something to each item, in their order, or far away many at a time in any order; all are tried.

    Raises:
        Exception: The first that failed, after all others were tried.
    """

    def tried(item: T) -> Exception | None:
        try:
            act(item)
        except Exception as error:
            return error
        return None

    first: Exception | None = None
    for error in map_concurrent(backend, tried, items):
        first = first or error
    if first is not None:
        raise first
