"""A file system in memory that knows what was synced, and records every step it takes.

It is stricter than any real one, so that nothing rests on the kindness of ext4; ``cuts`` makes its crash states.
- A name is durable only after a sync of the folder that holds it, whatever was done to the file.
- Bytes are durable only after a sync of their file: ``create(sync=True)``, ``sync_file``, ``PackSink.finish``.
- A folder is a name in its parent. A rename between folders is a new name and, no earlier, the loss of the old one.
- A sync that failed has lost what it should have kept: a later one does not make it durable.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.errors import BackendError, MalformedError
from ckstore.io.backend import FileInfo, ReadRequest, ReadResult
from ckstore.io.buffers import AlignedBuffer, BufferPool

FOLDER: Final = -1
"""The node of a name that is a folder; files have numbers from 1."""

OpKind = Literal["entry", "write", "cut", "sync data", "sync folder", "lose data", "lose folder", "note"]


@dataclass(frozen=True, slots=True)
class Op:
    """One step that changed the disk, or may decide what survives of it.

    Args:
        kind: ``"entry"`` gives ``name`` in ``folder`` the node (None: removes the name); ``"write"`` and
            ``"cut"`` change a file's bytes and size; ``"sync ..."`` make durable; ``"lose ..."`` are syncs
            that failed; ``"note"`` is a mark of the test.
        call: The method of the backend that did it.
        needs: Positions in the record of entries without which this one cannot survive.
    """

    kind: OpKind
    call: str
    folder: str = ""
    name: str = ""
    node: int | None = None
    offset: int = 0
    content: bytes = b""
    needs: tuple[int, ...] = ()
    mark: Hashable = None

    @property
    def path(self) -> str:
        """The full name of an entry, or the folder itself."""
        return f"{self.folder}/{self.name}".strip("/")


@dataclass(slots=True)
class Tree:
    """Names and bytes: ``folders[path][name]`` is a node, ``contents[node]`` its bytes."""

    folders: dict[str, dict[str, int]] = field(default_factory=lambda: {"": {}})
    contents: dict[int, bytes] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)


class SimFS:
    """A Backend in memory that records what was done to it.

    Args:
        tree: What is on the disk at the start, all of it durable; it is shared, never changed.
        clock: Gives the times of files.
    """

    def __init__(self, tree: Tree | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.base = tree if tree is not None else Tree()
        self.log: list[Op] = []
        self._clock = clock
        self._lock = threading.RLock()
        self._folders = dict(self.base.folders)
        self._owned: set[str] = set()
        self._contents: dict[int, bytes | bytearray] = dict(self.base.contents)
        self._times = dict(self.base.times)
        self._next_node = max(self._contents, default=0) + 1
        self._locked: set[int] = set()

    @property
    def root(self) -> str:
        """The place, for messages."""
        return "simulated"

    @property
    def engine_name(self) -> str:
        """What moves packs: the simulation itself."""
        return "simulated"

    def location_of(self, name: str) -> str:
        """Return a name that says what it is."""
        return f"simulated:/{name}"

    def settled(self) -> SimFS:
        """Return a disk with the same files, all durable, and an empty record."""
        with self._lock:
            contents = {node: bytes(content) for node, content in self._contents.items()}
            folders = {path: dict(names) for path, names in self._folders.items()}
            return SimFS(Tree(folders, contents, dict(self._times)), clock=self._clock)

    def note(self, mark: Hashable) -> None:
        """Put a mark of the test into the record, such as an acknowledged commit."""
        self._record(Op("note", "note", mark=mark))

    def lose_data(self, name: str) -> None:
        """Do as the kernel after a failed fsync: what was not durable never will be."""
        with self._lock:
            self._record(Op("lose data", "sync_file", *_split(name), node=self._node(name)))

    def lose_folder(self, name: str) -> None:
        """Do as after a failed sync of a folder: no later sync vouches for its new names."""
        self._record(Op("lose folder", "sync_folder", folder=_clean(name)))

    def truncate(self, name: str, nbytes: int) -> None:
        """Cut a file to a size, without a sync."""
        with self._lock:
            self._cut(self._node(name), nbytes, call="truncate")

    def stat(self, name: str) -> FileInfo | None:
        """Return size and time of a file, or None when there is no such name."""
        with self._lock:
            folder, last = _split(name)
            node = self._folders.get(folder, {}).get(last)
            if node is None or node == FOLDER:
                return None
            return FileInfo(len(self._contents[node]), self._times.get(node, 0))

    def list_names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; empty when there is no such folder."""
        with self._lock:
            return sorted(self._folders.get(_clean(folder), ()))

    def read_bytes(self, name: str, *, nbytes_max: int) -> bytes:
        """Read a small file whole."""
        with self._lock:
            content = self._contents[self._node(name)]
            if len(content) > nbytes_max:
                raise MalformedError("file is larger than it can be", where=self.location_of(name))
            return bytes(content)

    def read_head(self, name: str, nbytes: int) -> bytes:
        """Read the first bytes of a file, fewer when it is shorter."""
        with self._lock:
            return bytes(self._contents[self._node(name)][:nbytes])

    def make_folder(self, name: str) -> bool:
        """Make a folder, parents included; return whether it is new."""
        with self._lock:
            path = _clean(name)
            if path in self._folders:
                return False
            folder, last = _split(path)
            if folder:
                self.make_folder(folder)
            if last in self._folders[folder]:
                raise _os_error(errno.ENOTDIR, self.location_of(name))
            self._enter(folder, last, FOLDER, call="make_folder")
            self._folders[path] = {}
            self._owned.add(path)
            return True

    def create(self, name: str, content: bytes, *, sync: bool) -> None:
        """Make a new file; with ``sync`` its bytes are durable on return, its name is not."""
        with self._lock:
            node = self._create(name, call="create")
            if content:
                self._write(node, 0, bytes(content), call="create")
            if sync:
                self._record(Op("sync data", "create", *_split(name), node=node))

    def link(self, source: str, target: str) -> None:
        """Give a file a second name."""
        with self._lock:
            node = self._node(source)
            self._enter(*self._free(target), node, call="link")

    def rename(self, source: str, target: str) -> None:
        """Move a name, replacing what has the target name."""
        self._rename(source, target, call="rename")

    def rename_new(self, source: str, target: str) -> None:
        """Move a name; FileExistsError when the target name is taken."""
        with self._lock:
            self._node(source)
            self._free(target)
            self._rename(source, target, call="rename_new")

    def unlink(self, name: str) -> None:
        """Remove a name."""
        with self._lock:
            self._node(name)
            self._enter(*_split(name), None, call="unlink")

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder."""
        with self._lock:
            path = _clean(name)
            if path not in self._folders:
                raise _os_error(errno.ENOENT, self.location_of(name))
            if self._folders[path]:
                raise BackendError("folder is not empty", where=self.location_of(name))
            self._enter(*_split(path), None, call="remove_folder")
            del self._folders[path]

    def sync_file(self, name: str) -> None:
        """Make a file's bytes durable."""
        with self._lock:
            self._record(Op("sync data", "sync_file", *_split(name), node=self._node(name)))

    def sync_folder(self, name: str) -> None:
        """Make the names in a folder durable."""
        with self._lock:
            if _clean(name) not in self._folders:
                raise _os_error(errno.ENOENT, self.location_of(name))
            self._record(Op("sync folder", "sync_folder", folder=_clean(name)))

    def free_nbytes(self) -> None:
        """Return None: memory is as large as it is."""

    def create_pack(self, name: str, *, nbytes_expected: int) -> SimSink:
        """Make a new pack."""
        with self._lock:
            return SimSink(self, name, self._create(name, call="create_pack"))

    def create_append_file(self, name: str, content: bytes) -> SimAppendFile:
        """Make a new file that is locked and grows; its first bytes are durable on return, its name is not."""
        with self._lock:
            self.create(name, content, sync=True)
            return SimAppendFile(self, name, self._node(name))

    def is_locked(self, name: str) -> bool:
        """Say whether such a file is still open."""
        with self._lock:
            return self._node(name) in self._locked

    def open_read(self, name: str) -> SimFile:
        """Open a file for ranged reads."""
        with self._lock:
            return SimFile(name, self._contents[self._node(name)])

    def read_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Fetch ranges one after another."""
        for request in requests:
            buffer = pool.acquire()
            got = request.file.read_at(request.offset, request.nbytes)
            view = buffer.view[: len(got)]
            view[:] = got
            yield ReadResult(request.tag, view, buffer)

    def close(self) -> None:
        """Do nothing."""

    def _record(self, op: Op) -> int:
        with self._lock:
            self.log.append(op)
            return len(self.log) - 1

    def _node(self, name: str) -> int:
        folder, last = _split(name)
        node = self._folders.get(folder, {}).get(last)
        if node is None:
            raise _os_error(errno.ENOENT, self.location_of(name))
        if node == FOLDER:
            raise _os_error(errno.EISDIR, self.location_of(name))
        return node

    def _free(self, name: str) -> tuple[str, str]:
        folder, last = _split(name)
        if folder not in self._folders:
            raise _os_error(errno.ENOENT, self.location_of(name))
        if last in self._folders[folder]:
            raise _os_error(errno.EEXIST, self.location_of(name))
        return folder, last

    def _enter(self, folder: str, last: str, node: int | None, *, call: str, needs: tuple[int, ...] = ()) -> int:
        if folder not in self._owned:
            self._folders[folder] = dict(self._folders[folder])
            self._owned.add(folder)
        if node is None:
            del self._folders[folder][last]
        else:
            self._folders[folder][last] = node
        return self._record(Op("entry", call, folder, last, node, needs=needs))

    def _create(self, name: str, *, call: str) -> int:
        folder, last = self._free(name)
        node = self._next_node
        self._next_node += 1
        self._contents[node] = bytearray()
        self._times[node] = self._clock.now_ns()
        self._enter(folder, last, node, call=call)
        return node

    def _write(self, node: int, offset: int, content: bytes, *, call: str) -> None:
        held = self._contents[node]
        if not isinstance(held, bytearray):
            held = self._contents[node] = bytearray(held)
        if len(held) < offset:
            held.extend(bytes(offset - len(held)))
        held[offset : offset + len(content)] = content
        self._record(Op("write", call, node=node, offset=offset, content=content))

    def _cut(self, node: int, nbytes: int, *, call: str) -> None:
        held = bytearray(self._contents[node])
        if len(held) == nbytes:
            return
        self._contents[node] = held[:nbytes] + bytes(max(0, nbytes - len(held)))
        self._record(Op("cut", call, node=node, offset=nbytes))

    def _rename(self, source: str, target: str, *, call: str) -> None:
        with self._lock:
            node = self._node(source)
            (old_folder, old), (new_folder, new) = _split(source), _split(target)
            if new_folder not in self._folders:
                raise _os_error(errno.ENOENT, self.location_of(target))
            there = self._folders[new_folder].get(new)
            if there == FOLDER:
                raise _os_error(errno.EISDIR, self.location_of(target))
            if there == node:
                # POSIX: between two names of one file rename does nothing at all.
                return
            # Inside one folder both names change in one journal record: each needs the other.
            here = len(self.log)
            together = (here + 1,) if old_folder == new_folder else ()
            self._enter(new_folder, new, node, call=call, needs=together)
            self._enter(old_folder, old, None, call=call, needs=(here,))


class SimFile:
    """A file opened for reading."""

    def __init__(self, name: str, content: bytes | bytearray) -> None:
        self._name = name
        self._content = content

    @property
    def name(self) -> str:
        """The name it was opened by."""
        return self._name

    @property
    def nbytes(self) -> int:
        """Its size."""
        return len(self._content)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Read exactly these bytes; shorter only at the end of the file."""
        return bytes(self._content[offset : offset + nbytes])

    def close(self) -> None:
        """Do nothing."""


class SimSink:
    """A pack being written; every write is recorded immediately and durable only after ``finish``."""

    def __init__(self, disk: SimFS, name: str, node: int) -> None:
        self._disk = disk
        self._name = name
        self._node = node
        self._is_finished = False

    @property
    def name(self) -> str:
        """The name it was created under."""
        return self._name

    def write(self, buffer: AlignedBuffer, nbytes: int, offset: int) -> None:
        """Write ``buffer[:nbytes]`` at ``offset`` and release the buffer."""
        assert nbytes % 4096 == 0, "packs are written in aligned blocks"
        assert offset % 4096 == 0, "packs are written in aligned blocks"
        with self._disk._lock:
            self._disk._write(self._node, offset, bytes(buffer.view[:nbytes]), call="pack.write")
        buffer.release()

    def drain(self) -> None:
        """Nothing is ever in flight."""

    def finish(self, nbytes: int) -> None:
        """Cut the file to its true size and make its bytes durable."""
        with self._disk._lock:
            self._disk._cut(self._node, nbytes, call="pack.finish")
            self._disk._record(Op("sync data", "pack.finish", *_split(self._name), node=self._node))
        self._is_finished = True

    def close(self) -> None:
        """Close; an unfinished pack loses its name, which frees space."""
        if not self._is_finished:
            self._is_finished = True
            with self._disk._lock, contextlib.suppress(FileNotFoundError):
                self._disk.unlink(self._name)


class SimAppendFile:
    """A file that grows; what is written is durable only after ``sync``."""

    def __init__(self, disk: SimFS, name: str, node: int) -> None:
        self._disk = disk
        self._name = name
        self._node = node
        disk._locked.add(node)

    def write(self, offset: int, parts: Sequence[bytes]) -> None:
        """Write parts one behind the other, each as a write of its own."""
        with self._disk._lock:
            for part in map(bytes, parts):
                self._disk._write(self._node, offset, part, call="append.write")
                offset += len(part)

    def sync(self) -> None:
        """Make the bytes durable."""
        self._disk._record(Op("sync data", "append.sync", *_split(self._name), node=self._node))

    def lose(self) -> None:
        """Do as the kernel after a failed fdatasync."""
        self._disk._record(Op("lose data", "append.sync", *_split(self._name), node=self._node))

    def truncate(self, nbytes: int) -> None:
        """Cut the file, without a sync."""
        with self._disk._lock:
            self._disk._cut(self._node, nbytes, call="append.truncate")

    def close(self) -> None:
        """Release the lock."""
        self._disk._locked.discard(self._node)


def _clean(name: str) -> str:
    return "" if name in ("", ".") else name.strip("/")


def _split(name: str) -> tuple[str, str]:
    folder, _, last = _clean(name).rpartition("/")
    return folder, last


def _os_error(number: int, where: str) -> OSError:
    return OSError(number, os.strerror(number), where)
