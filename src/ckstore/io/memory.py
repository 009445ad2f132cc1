"""Backends that store nothing durably: ``MemoryBackend`` for tests, ``DiscardingBackend`` for dry runs.

``MemoryBackend`` is also the model that tests compare other backends with. It counts syncs.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.errors import BackendError, CapacityError, CkstoreError, MalformedError, UsageError
from ckstore.io.backend import Backend, FileInfo, PackSink, ReadFile, ReadRequest, ReadResult, checked_name
from ckstore.io.buffers import AlignedBuffer, BufferPool
from ckstore.io.syscalls import PAGE_NBYTES


class _File:
    """Contents of a file, which may have several names."""

    __slots__ = ("content", "modified_ns")

    def __init__(self, content: bytes | bytearray, now_ns: int) -> None:
        self.content = bytearray(content)
        self.modified_ns = now_ns


class MemoryBackend:
    """Files in the memory of this process. Thread-safe.

    Args:
        nbytes_max: Largest total size of all files; None: no limit.
        clock: Source of file times.
    """

    def __init__(self, *, nbytes_max: int | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.syncs: Counter[str] = Counter()
        """How many times each file or folder was synced, by name."""
        self.nbytes_max = nbytes_max
        """Can be changed at any time, to simulate a full disk."""
        self._clock = clock
        self._files: dict[str, _File] = {}
        self._folders = {""}
        self._lock = threading.RLock()

    def files(self) -> dict[str, bytes]:
        """Return a copy of all files by sorted name, for tests."""
        with self._lock:
            return {name: bytes(self._files[name].content) for name in sorted(self._files)}

    def folders(self) -> frozenset[str]:
        """Return the names of all folders; the root has the empty name."""
        with self._lock:
            return frozenset(self._folders)

    def clone(self, *, modified_ns: int | None = None) -> MemoryBackend:
        """Return a copy of this backend with all files and folders.

        Args:
            modified_ns: Time of all files in the copy; None keeps the time of each.
        """
        copied = MemoryBackend(nbytes_max=self.nbytes_max, clock=self._clock)
        with self._lock:
            copies = {
                id(file): _File(file.content, file.modified_ns if modified_ns is None else modified_ns)
                for file in self._files.values()
            }
            copied._files = {name: copies[id(file)] for name, file in self._files.items()}
            copied._folders = set(self._folders)
        return copied

    def overwrite(self, name: str, content: bytes, *, modified_ns: int | None = None) -> None:
        """Change the bytes of a file in place, as a failing disk or another program does.

        Args:
            name: An existing file.
            content: Its new content.
            modified_ns: Its new time in nanoseconds since 1970; None keeps the time.
        """
        with self._lock:
            file = self._find(name)
            file.content[:] = content
            if modified_ns is not None:
                file.modified_ns = modified_ns

    @property
    def root(self) -> str:
        """The address in messages."""
        return "memory:"

    @property
    def engine_name(self) -> str:
        """Always ``"memory"``."""
        return "memory"

    def location_of(self, name: str) -> str:
        """Return the name with a scheme, for messages."""
        return f"memory:{checked_name(name)}"

    def stat(self, name: str) -> FileInfo | None:
        """Return size and time, or None if the name does not exist. A folder has size 0."""
        with self._lock:
            file = self._files.get(checked_name(name))
            if file is not None:
                return FileInfo(len(file.content), file.modified_ns)
            return FileInfo(0, 0) if name in self._folders else None

    def list_names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; empty if it does not exist."""
        prefix = f"{checked_name(folder)}/" if folder else ""
        with self._lock:
            names = [*self._files, *self._folders]
        tails = (name[len(prefix) :] for name in names if name.startswith(prefix))
        return sorted(tail for tail in tails if tail and "/" not in tail)

    def read_bytes(self, name: str, *, nbytes_max: int) -> bytes:
        """Read a small file whole; MalformedError if it is larger than ``nbytes_max``."""
        content = bytes(self._find(name).content)
        if len(content) > nbytes_max:
            raise MalformedError("the file is larger than a valid one", where=name, nbytes_max=nbytes_max)
        return content

    def read_head(self, name: str, nbytes: int) -> bytes:
        """Read the first ``nbytes`` bytes of a file, or all of a shorter one."""
        return bytes(self._find(name).content[:nbytes])

    def make_folder(self, name: str) -> bool:
        """Create a folder and its parents. Return True if it is new."""
        with self._lock:
            if checked_name(name) in self._files:
                raise FileExistsError(name)
            if name in self._folders:
                return False
            self.make_folder(_folder_of(name))
            self._folders.add(name)
            return True

    def create(self, name: str, content: bytes, *, sync: bool) -> None:
        """Create a new file; FileExistsError if the name exists."""
        with self._lock:
            self._check_room(len(content))
            self._add(name, _File(content, self._clock.now_ns()))
            if sync:
                self.syncs[name] += 1

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; FileExistsError if ``target`` exists."""
        with self._lock:
            self._add(target, self._find(source))

    def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing ``target``."""
        with self._lock:
            file = self._find(source)
            self._check_folder_of(target)
            del self._files[source]
            self._files[target] = file

    def rename_new(self, source: str, target: str) -> None:
        """Rename a file; FileExistsError if ``target`` exists."""
        with self._lock:
            self._add(target, self._find(source))
            del self._files[source]

    def unlink(self, name: str) -> None:
        """Remove a name; FileNotFoundError if it does not exist."""
        with self._lock:
            self._find(name)
            del self._files[name]

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        with self._lock:
            if checked_name(name) not in self._folders:
                raise FileNotFoundError(name)
            if self.list_names(name):
                raise BackendError("removing a folder failed (ENOTEMPTY)", where=self.location_of(name))
            self._folders.discard(name)

    def sync_file(self, name: str) -> None:
        """Count a sync of a file."""
        with self._lock:
            self._find(name)
            self.syncs[name] += 1

    def sync_folder(self, name: str) -> None:
        """Count a sync of a folder."""
        with self._lock:
            if checked_name(name) not in self._folders:
                raise FileNotFoundError(name)
            self.syncs[name] += 1

    def free_nbytes(self) -> int | None:
        """Return the unused bytes of ``nbytes_max``."""
        if self.nbytes_max is None:
            return None
        with self._lock:
            # A file with two names counts once.
            files = {id(file): file for file in self._files.values()}.values()
            return self.nbytes_max - sum(len(file.content) for file in files)

    def create_pack(self, name: str, *, nbytes_expected: int) -> PackSink:
        """Create a new pack; CapacityError if the expected size does not fit."""
        with self._lock:
            self._check_room(nbytes_expected)
            file = _File(b"", self._clock.now_ns())
            self._add(name, file)
            return _MemoryPackSink(self, name, file)

    def open_read(self, name: str) -> ReadFile:
        """Open a file for ranged reads; FileNotFoundError if it does not exist."""
        return _MemoryReadFile(name, self._find(name))

    def read_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Read ranges sequentially."""
        for request in requests:
            buffer = pool.acquire()
            try:
                if request.nbytes > buffer.nbytes:
                    where = f"{request.nbytes} bytes at {request.offset} of {request.file.name}"
                    raise UsageError("the range is larger than a buffer", where=where)
                content = request.file.read_at(request.offset, request.nbytes)
            except BaseException:
                buffer.release()
                raise
            buffer.view[: len(content)] = content
            yield ReadResult(request.tag, buffer.view[: len(content)], buffer)

    def close(self) -> None:
        """Do nothing; there is nothing to release."""

    def _find(self, name: str) -> _File:
        with self._lock:
            if checked_name(name) not in self._files:
                raise FileNotFoundError(name)
            return self._files[name]

    def _add(self, name: str, file: _File) -> None:
        self._check_folder_of(checked_name(name))
        if name in self._files or name in self._folders:
            raise FileExistsError(name)
        self._files[name] = file

    def _check_folder_of(self, name: str) -> None:
        if _folder_of(name) not in self._folders:
            raise FileNotFoundError(_folder_of(name))

    def _check_room(self, nbytes: int) -> None:
        free = self.free_nbytes()
        if free is not None and nbytes > free:
            full = "the memory backend is full"
            raise CapacityError(full, where=self.root, todo="run gc, or raise nbytes_max", errno=errno.ENOSPC)


class _MemoryReadFile:
    def __init__(self, name: str, file: _File) -> None:
        self._file = file
        self.name = name
        self.nbytes = len(file.content)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._file.content[offset : min(offset + nbytes, self.nbytes)])

    def close(self) -> None:
        """Do nothing."""


class _MemoryPackSink:
    def __init__(self, backend: MemoryBackend, name: str, file: _File) -> None:
        self._backend = backend
        self._file = file
        self._failure: CkstoreError | None = None
        self._is_finished = False
        self.name = name

    def write(self, buffer: AlignedBuffer, nbytes: int, offset: int) -> None:
        assert nbytes % PAGE_NBYTES == 0 == offset % PAGE_NBYTES, "blocks are multiples of 4096"
        try:
            self.drain()
            with self._backend._lock:
                content = self._file.content
                missing = max(0, offset + nbytes - len(content))
                self._backend._check_room(missing)
                content.extend(bytes(missing))
                content[offset : offset + nbytes] = buffer.view[:nbytes]
        except CkstoreError as error:
            self._failure = error
            raise
        finally:
            buffer.release()

    def drain(self) -> None:
        if self._failure is not None:
            raise self._failure

    def finish(self, nbytes: int) -> None:
        self.drain()
        with self._backend._lock:
            del self._file.content[nbytes:]
            self._file.content.extend(bytes(nbytes - len(self._file.content)))
            self._backend.syncs[self.name] += 1
        self._is_finished = True
        self.close()

    def close(self) -> None:
        self._failure = self._failure or UsageError("the pack is closed", where=self.name)
        with self._backend._lock:
            if not self._is_finished and self._backend._files.get(self.name) is self._file:
                del self._backend._files[self.name]


class _DiscardingSink:
    """A pack sink that releases every block unwritten."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, buffer: AlignedBuffer, nbytes: int, offset: int) -> None:
        buffer.release()

    def drain(self) -> None: ...

    def finish(self, nbytes: int) -> None: ...

    def close(self) -> None: ...


class DiscardingBackend:
    """Reads from another backend and discards new packs, to measure how large a commit would be.

    Nothing that a commit does before publishing changes the other backend.

    Args:
        backend: The backend to read from.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def create_pack(self, name: str, *, nbytes_expected: int) -> PackSink:
        """Return a sink that discards the pack."""
        return _DiscardingSink(name)

    def make_folder(self, name: str) -> bool:
        """Do nothing."""
        return False

    def sync_folder(self, name: str) -> None:
        """Do nothing."""

    def unlink(self, name: str) -> None:
        """Do nothing."""


def _folder_of(name: str) -> str:
    """Return the folder of a name; empty for the root."""
    return name.rpartition("/")[0]
