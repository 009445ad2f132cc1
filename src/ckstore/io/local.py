"""The folder backend: names by ordinary system calls, packs by an engine, with O_DIRECT where the folder supports it.

Invariants:
- Files are created with O_EXCL and with the owner and mode of the store (``ownership``: 0600 and 0700 by default).
- Operations that create, rename, link or remove a name follow no symbolic link below the root. They open each folder
  relative to the one above it (``folder_of``), so that a store made by somebody else cannot redirect them to files
  outside of the store. Read operations follow links to folders, but not links to files.
- Engine and queues are created on first use, and again in a forked child, because rings and threads do not survive a
  fork.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from ckstore.config import EngineName
from ckstore.errors import MalformedError, UnsupportedError, UsageError
from ckstore.io.backend import AppendFile, FileInfo, FileLock, PackSink, ReadFile, ReadRequest, ReadResult, checked_name
from ckstore.io.buffers import BufferPool
from ckstore.io.direct_io import Engine, IoQueue
from ckstore.io.engine_choice import choose_engine, supports_direct_io
from ckstore.io.local_append import LocalAppendFile
from ckstore.io.local_packs import LocalPackSink, LocalReadFile, RangeReader
from ckstore.io.ownership import Ownership, Sharing, ownership_of
from ckstore.io.syscalls import medium_error, medium_errors, rename_noreplace

_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV})
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})

WRITE_DEPTH = {"uring": 8, "pwrite": 8}
READ_DEPTH = {"uring": 32, "pwrite": 8}
READ_NBYTES_MAX = 16 << 20
"""Bytes of reads in flight. More do not raise the throughput, and delay the first result: with 32 MiB it takes three
times as long as with 16 MiB."""


class LocalBackend:
    """A folder of this machine. Thread-safe.

    Args:
        root: The folder. It need not exist; ``make_folder("")`` creates it.
        engine: Name of the engine for packs, or an engine.
        try_direct: Use O_DIRECT where the folder supports it. False always uses the page cache.
        sharing: Who may use a store that is created here. An existing store keeps its own setting.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        engine: EngineName | Engine = "auto",
        try_direct: bool = True,
        sharing: Sharing | None = None,
    ) -> None:
        self._root = str(_absolute(Path(root)))
        self._wanted_engine = engine
        self._try_direct = try_direct
        self._sharing = sharing
        self._ownership_cache: Ownership | None = None
        self._supports_direct: bool | None = None
        self._chosen: tuple[Engine, str] | None = None
        self._queues: dict[str, IoQueue] = {}
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def root(self) -> str:
        """The folder, for messages."""
        return self._root

    @property
    def engine_name(self) -> str:
        """``"uring"`` or ``"pwrite"``. The first call probes the folder."""
        return self._choose()[0].name

    @property
    def engine_reason(self) -> str:
        """Why that engine was chosen, in a few words."""
        return self._choose()[1]

    @property
    def is_direct(self) -> bool:
        """True if packs are written with O_DIRECT."""
        if self._supports_direct is None:
            self._supports_direct = self._try_direct and supports_direct_io(self.root)
        return self._supports_direct

    def location_of(self, name: str) -> str:
        """Return the full path of a name."""
        return self._path(name)

    def stat(self, name: str) -> FileInfo | None:
        """Return size and time, or None if the name does not exist. A folder has size 0."""
        path = self._path(name)
        with medium_errors(path, "reading the size and time of a file"):
            try:
                found = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return FileInfo(0 if stat.S_ISDIR(found.st_mode) else found.st_size, found.st_mtime_ns, found.st_ino)

    def list_names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; empty if it does not exist."""
        path = self._path(folder)
        with medium_errors(path, "listing a folder"):
            try:
                return sorted(os.listdir(path))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def read_bytes(self, name: str, *, nbytes_max: int) -> bytes:
        """Read a small file whole; MalformedError if it is larger than ``nbytes_max``."""
        content = self._read(name, nbytes_max + 1)
        if len(content) > nbytes_max:
            raise MalformedError("the file is larger than a valid one", where=self._path(name), nbytes_max=nbytes_max)
        return content

    def read_head(self, name: str, nbytes: int) -> bytes:
        """Read the first ``nbytes`` bytes of a file, or all of a shorter one."""
        return self._read(name, nbytes)

    def make_folder(self, name: str) -> bool:
        """Create a folder and its parents. Return True if it is new."""
        path = self._path(name)
        with medium_errors(path, "creating a folder"):
            # Folders above the root have no name in this backend, so their entries are synced here.
            if name:
                return self._make_folders(name.split("/"))
            is_new = _make_root(Path(path), self._ownership)
            if self._sharing is not None and not is_new:
                self._ownership.give_folder(path)
            # New files take owner and mode from this folder, so look them up again.
            self._ownership_cache = None
            return is_new

    def create(self, name: str, content: bytes, *, sync: bool) -> None:
        """Create a new file (O_EXCL). With ``sync`` its bytes are durable on return, but not its name."""
        path = self._path(name)
        with medium_errors(path, "writing a file"):
            with self.folder_of(name) as (folder, last):
                fd = os.open(last, _CREATE_FLAGS, 0o600, dir_fd=folder)
            try:
                self._ownership.give_file(fd, path)
                rest = memoryview(content)
                while len(rest):
                    rest = rest[os.write(fd, rest) :]
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; UnsupportedError if the file system has no hard links."""
        path = self._path(target)
        with (
            medium_errors(path, "linking a file"),
            self.folder_of(source) as (source_folder, source_last),
            self.folder_of(target) as (folder, last),
        ):
            try:
                os.link(source_last, last, src_dir_fd=source_folder, dst_dir_fd=folder, follow_symlinks=False)
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise UnsupportedError("the file system does not support hard links", where=path) from error
                raise

    def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing ``target``."""
        path = self._path(target)
        with (
            medium_errors(path, "renaming a file"),
            self.folder_of(source) as (source_folder, source_last),
            self.folder_of(target) as (folder, last),
        ):
            os.replace(source_last, last, src_dir_fd=source_folder, dst_dir_fd=folder)

    def rename_new(self, source: str, target: str) -> None:
        """Rename a file; FileExistsError if ``target`` exists.

        Without RENAME_NOREPLACE the file is linked and then unlinked, so it briefly has both names.
        """
        path = self._path(target)
        with (
            medium_errors(path, "renaming a file"),
            self.folder_of(source) as (source_folder, source_last),
            self.folder_of(target) as (folder, last),
        ):
            if not rename_noreplace(source_last, last, source_folder=source_folder, target_folder=folder):
                self.link(source, target)
                os.unlink(source_last, dir_fd=source_folder)

    def unlink(self, name: str) -> None:
        """Remove a name; FileNotFoundError if it does not exist."""
        path = self._path(name)
        with medium_errors(path, "removing a file"), self.folder_of(name) as (folder, last):
            os.unlink(last, dir_fd=folder)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        path = self._path(name)
        with medium_errors(path, "removing a folder"), self.folder_of(name) as (folder, last):
            os.rmdir(last, dir_fd=folder)

    def sync_file(self, name: str) -> None:
        """Make the bytes of a file durable, even if another process has written them."""
        self._sync(name, os.O_RDONLY | os.O_NOFOLLOW)

    def sync_folder(self, name: str) -> None:
        """Make the names in a folder durable."""
        self._sync(name, os.O_RDONLY | os.O_DIRECTORY)

    def renew(self, name: str, *, before_ns: int) -> None:
        """Set the time of a file to now if it is older than ``before_ns`` and this user has the permission."""
        with contextlib.suppress(OSError), self.folder_of(name) as (folder, last):
            if os.stat(last, dir_fd=folder, follow_symlinks=False).st_mtime_ns < before_ns:
                os.utime(last, dir_fd=folder, follow_symlinks=False)

    def arrived_ns(self, name: str) -> int | None:
        """Return the ctime of a file, which copying tools cannot preserve; None if it does not exist."""
        path = self._path(name)
        with medium_errors(path, "reading the size and time of a file"):
            try:
                return os.lstat(path).st_ctime_ns
            except FileNotFoundError:
                return None

    def free_nbytes(self) -> int | None:
        """Return the free space in bytes, or None if the file system does not report it."""
        try:
            found = os.statvfs(self._root)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def create_pack(self, name: str, *, nbytes_expected: int) -> PackSink:
        """Create a new pack (O_EXCL) and reserve space for it, in large steps if there is enough.

        CapacityError is raised only when written bytes do not fit. After an error the name is removed.
        """
        path = self._path(name)
        flags = _CREATE_FLAGS | (os.O_DIRECT if self.is_direct else 0)
        queue, _ = self._queue("write")
        with medium_errors(path, "creating a pack"), self.folder_of(name) as (folder, last):
            fd = os.open(last, flags, 0o600, dir_fd=folder)
        try:
            ownership = self._ownership
            ownership.give_file(fd, path)
            sizes = {"nbytes_expected": nbytes_expected, "final_mode": ownership.pack_mode}
            return LocalPackSink(fd, name, path, queue, self.unlink, **sizes)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                self.unlink(name)
            raise

    def open_read(self, name: str) -> ReadFile:
        """Open a file for ranged reads; FileNotFoundError if it does not exist."""
        return LocalReadFile(name, self._path(name), try_direct=self._try_direct)

    def read_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Read ranges concurrently and yield results as they arrive, in any order."""
        queue, depth = self._queue("read")
        return RangeReader(queue, pool, depth, nbytes_max=READ_NBYTES_MAX).run(requests)

    def try_lock(self, name: str) -> FileLock | None:
        """Lock a file by flock, creating it if needed. Return None if another process holds the lock.

        Raises:
            UnsupportedError: The file system has no flock, for example Lustre without ``flock`` and some FUSE systems.
        """
        path = self._path(name)
        with medium_errors(path, "locking"):
            with self.folder_of(name) as (folder, last):
                fd = self._open_lock(folder, last, path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            except BaseException as error:
                os.close(fd)
                if isinstance(error, OSError) and error.errno in _NO_LOCKS:
                    raise UnsupportedError(
                        "the file system has no locks (flock)", where=path, todo="mount it with flock if possible"
                    ) from error
                raise
        return os.fdopen(fd, "rb", buffering=0)

    def create_append_file(self, name: str, content: bytes) -> AppendFile:
        """Create a new file (O_EXCL) and lock it by flock. ``content`` is durable on return, but not the name.

        Where the file system has no locks, the file is not locked. After an error the name is removed.
        """
        path = self._path(name)
        with medium_errors(path, "creating a file"), self.folder_of(name) as (folder, last):
            fd = os.open(last, _CREATE_FLAGS, 0o600, dir_fd=folder)
        file = LocalAppendFile(fd, path)
        try:
            with medium_errors(path, "writing a file"):
                self._ownership.give_file(fd, path)
                try:
                    # Nobody else has this file open, so the lock is free.
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                file.write(0, [content])
                os.fsync(fd)
        except BaseException:
            file.close()
            with contextlib.suppress(FileNotFoundError):
                self.unlink(name)
            raise
        return file

    def is_locked(self, name: str) -> bool:
        """Return whether a process holds the lock of a file; False where the file system has no locks."""
        path = self._path(name)
        with medium_errors(path, "locking"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            finally:
                os.close(fd)
        return False

    def close(self) -> None:
        """Wait for transfers in flight and release rings and threads. Later calls create new ones."""
        self._reset_after_fork()
        with self._lock:
            queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.close()

    @contextlib.contextmanager
    def folder_of(self, name: str) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the folder of a name, and the last part of the name.

        Raises:
            UnsupportedError: A folder below the root is a symbolic link.
        """
        assert name, "the root itself has no folder in the store"
        self._path(name)
        *folders, last = name.split("/")
        fds = [os.open(self._root, _FOLDER_FLAGS)]
        try:
            for index, folder in enumerate(folders):
                fds.append(self._open_subfolder(fds[-1], folders[: index + 1], folder))
            yield fds[-1], last
        finally:
            _close_all(fds)

    def _open_subfolder(self, above: int, folders: list[str], folder: str) -> int:
        try:
            return os.open(folder, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=above)
        except NotADirectoryError:
            if stat.S_ISLNK(os.stat(folder, dir_fd=above, follow_symlinks=False).st_mode):
                raise UnsupportedError(
                    "a folder of the store is a symbolic link, and ckstore does not write through links",
                    where=os.path.join(self._root, *folders),
                    todo="replace the link by the folder itself, or use a bind mount",
                ) from None
            raise

    def _make_folders(self, folders: list[str]) -> bool:
        """Create a folder below the root and its parents. Return True if it is new."""
        try:
            fds = [os.open(self._root, _FOLDER_FLAGS)]
        except FileNotFoundError:
            _make_root(Path(self._root), self._ownership)
            fds = [os.open(self._root, _FOLDER_FLAGS)]
        try:
            for index, folder in enumerate(folders):
                is_new = True
                try:
                    os.mkdir(folder, 0o700, dir_fd=fds[-1])
                    self._ownership.give_folder(self._path("/".join(folders[: index + 1])), inside=fds[-1])
                except FileExistsError:
                    is_new = False
                try:
                    fds.append(self._open_subfolder(fds[-1], folders[: index + 1], folder))
                except NotADirectoryError:
                    raise FileExistsError(errno.EEXIST, "a file has this name", "/".join(folders)) from None
        finally:
            _close_all(fds)
        return is_new

    def _path(self, name: str) -> str:
        # A str and not a Path: a commit names many files, and creating a Path takes longer than a stat call.
        return os.path.join(self._root, checked_name(name)) if name else self._root

    def _open_lock(self, folder: int, last: str, path: str) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(last, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        except FileExistsError:
            return os.open(last, flags, dir_fd=folder)
        self._ownership.give_file(fd, path)
        return fd

    @property
    def _ownership(self) -> Ownership:
        """Owner and mode of new files and folders, looked up when the first one is created."""
        if self._ownership_cache is None:
            self._ownership_cache = ownership_of(self._root, sharing=self._sharing)
        return self._ownership_cache

    def _reset_after_fork(self) -> None:
        """In a forked child, drop the queues of the parent. Called before the lock is taken."""
        if self._pid != os.getpid():
            # The threads of the parent do not exist here, and one of them may have held the lock.
            self._lock = threading.Lock()
            self._queues = {}
            self._pid = os.getpid()

    def _choose(self) -> tuple[Engine, str]:
        self._reset_after_fork()
        with self._lock:
            if self._chosen is None:
                wanted = self._wanted_engine
                if isinstance(wanted, str):
                    self._chosen = choose_engine(wanted, self.root)
                else:
                    self._chosen = wanted, f"{wanted.name}: passed by the caller"
            return self._chosen

    def _queue(self, kind: Literal["read", "write"]) -> tuple[IoQueue, int]:
        engine, _ = self._choose()
        depth = (READ_DEPTH if kind == "read" else WRITE_DEPTH).get(engine.name, 4)
        with self._lock:
            if kind not in self._queues:
                nbytes_max = READ_NBYTES_MAX if kind == "read" else None
                self._queues[kind] = engine.open_queue(depth=depth, nbytes_max=nbytes_max)
            return self._queues[kind], depth

    def _read(self, name: str, nbytes_max: int) -> bytes:
        path = self._path(name)
        with medium_errors(path, "reading a file"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                # Read in pieces, so that memory is allocated only for bytes that exist.
                parts: list[bytes] = []
                missing = nbytes_max
                while missing and (part := os.read(fd, min(missing, 1 << 20))):
                    parts.append(part)
                    missing -= len(part)
                return b"".join(parts)
            finally:
                os.close(fd)

    def _sync(self, name: str, flags: int) -> None:
        path = self._path(name)
        with medium_errors(path, "syncing"):
            _fsync(path, flags)


def _absolute(path: Path) -> Path:
    try:
        return path.absolute()
    except FileNotFoundError:
        raise UsageError(
            "the path is relative, and the working directory of this process was removed",
            where=path,
            todo="use an absolute path, or change to an existing directory",
        ) from None


def _make_root(path: Path, ownership: Ownership) -> bool:
    """Durably create the folder of a store and its parents. Return True if it is new."""
    is_new = _mkdir(path)
    if is_new is None:
        _make_root(path.parent, ownership)
        is_new = _mkdir(path)
    if is_new is None:
        # The parent exists but refuses new folders, as /proc does, or it was removed just now.
        gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        raise medium_error(gone, where=path, what="creating a folder")
    if is_new:
        ownership.give_folder(str(path))
        _fsync(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    return is_new


def _mkdir(path: Path) -> bool | None:
    """Create a folder. Return True if it is new, or None if its parent does not exist."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
        return False
    except FileNotFoundError:
        return None
    return True


def _fsync(path: str | Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _close_all(fds: list[int]) -> None:
    # Each number leaves the list first: after a Ctrl-C in between, a second close could hit another thread's file.
    while fds:
        os.close(fds.pop())
