"""A store in a bucket: objects for files, nothing for folders, drafts in memory.

A draft is a file that has no name yet; an object appears whole or not at all, so here a draft needs no object: what is
made below ``tmp`` stays in this process until it gets a name. That name is given under a condition (``link``), or
replaces what has it (``rename``).

Invariants:
- ``create``, ``link`` and ``rename_new`` never replace what has the name, where the server keeps conditions;
  ``probe`` finds out whether it does.
- What a call has made is durable when it returns: the syncs have nothing left to do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.errors import MalformedError, UnsupportedError, UsageError
from ckstore.io.backend import FileInfo, PackSink, ReadFile, ReadRequest, ReadResult
from ckstore.io.buffers import BufferPool
from ckstore.io.remote.client import Bucket, RemoteOptions
from ckstore.io.remote.packs import RemotePackSink, RemoteReadFile, read_remote_ranges

_DRAFTS = "tmp/"
_MOVED_NBYTES_MAX = 1 << 26
_SMALL_NBYTES_MAX = 1 << 30
"""What is copied by way of this process; packs are copied by the server."""


class RemoteBackend:
    """A store in a bucket, or a copy of one.

    Args:
        url: ``s3://bucket/prefix``, or the same with ``gs`` or ``az``.
        options: How patient it is, and how much it does at once.
        clock: How it waits, and what stamps drafts.
    """

    def __init__(self, url: str, *, options: RemoteOptions | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.bucket = Bucket(url, options=options, clock=clock)
        self._clock = clock
        self._drafts: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._honours_conditions: bool | None = None

    @property
    def root(self) -> str:
        """The address, for messages; it holds no credentials."""
        return self.bucket.root

    @property
    def engine_name(self) -> str:
        """What moves packs."""
        return "obstore"

    @property
    def requests_at_once(self) -> int:
        """How many small requests are worth making at the same time."""
        return self.bucket.options.reads_at_once

    def location_of(self, name: str) -> str:
        """Return the address of a name."""
        return self.bucket.location_of(_checked(name))

    def probe(self) -> None:
        """Refuse a server that replaces what was asked to be new: two writers there would lose checkpoints.

        Raises:
            UnsupportedError: It does; it can hold copies, and no commits.
        """
        if not self.honours_conditions():
            raise UnsupportedError(
                "this server ignores If-None-Match, or does not list what was just written",
                where=self.root,
                todo="commit to a store in a folder and `ckstore push` to this bucket: for copies it will do",
            )

    def honours_conditions(self) -> bool:
        """Whether the server refuses to replace an object that was asked to be new; it is asked once."""
        if self._honours_conditions is None:
            self._honours_conditions = self.bucket.honours_conditions()
        return self._honours_conditions

    # Looking

    def stat(self, name: str) -> FileInfo | None:
        """Return size and time of an object, or None when there is none; folders are not there."""
        draft = self._drafts.get(_checked(name))
        if draft is not None:
            return FileInfo(len(draft), self._clock.now_ns())
        found = self.bucket.head(name) if name else None
        return None if found is None else FileInfo(found.nbytes, found.modified_ns)

    def list_names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; empty when nothing lies there."""
        prefix = f"{_checked(folder)}/" if folder else ""
        with self._lock:
            tails = [name[len(prefix) :].split("/")[0] for name in self._drafts if name.startswith(prefix)]
        return sorted({*self.bucket.list_folder(folder), *tails})

    def list_deep(self, folder: str) -> list[tuple[str, FileInfo]]:
        """Return every object below a folder, of whatever depth, with size and time."""
        found = self.bucket.list_deep(_checked(folder))
        return [(name, FileInfo(info.nbytes, info.modified_ns)) for name, info in found]

    def read_bytes(self, name: str, *, nbytes_max: int) -> bytes:
        """Read a small object whole; MalformedError when it is larger than ``nbytes_max``."""
        draft = self._drafts.get(_checked(name))
        if draft is None:
            return self.bucket.get(name, nbytes_max=nbytes_max)
        if len(draft) > nbytes_max:
            raise MalformedError("the file is larger than it can be", where=self.location_of(name))
        return draft

    def read_head(self, name: str, nbytes: int) -> bytes:
        """Read the first bytes of an object, fewer when it is shorter."""
        draft = self._drafts.get(_checked(name))
        return self.bucket.get_head(name, nbytes) if draft is None else draft[:nbytes]

    # Making and moving

    def make_folder(self, name: str) -> bool:
        """There are no folders in a bucket; never new."""
        _checked(name)
        return False

    def remove_folder(self, name: str) -> None:
        """There are no folders in a bucket: one without objects is gone already."""
        _checked(name)

    def create(self, name: str, content: bytes, *, sync: bool) -> None:
        """Make a new object, durably; FileExistsError when the name is taken. A draft stays in memory."""
        if not _checked(name).startswith(_DRAFTS):
            self.bucket.put_new(name, content)
            return
        with self._lock:
            if name in self._drafts:
                raise FileExistsError(name)
            self._drafts[name] = bytes(content)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; FileExistsError when the name is taken."""
        self.create(target, self.read_bytes(source, nbytes_max=_SMALL_NBYTES_MAX), sync=True)

    def rename(self, source: str, target: str) -> None:
        """Move a name, replacing what has the target name; between the two steps a file has both."""
        if source.startswith(_DRAFTS) or target.startswith(_DRAFTS):
            content = self.read_bytes(source, nbytes_max=_SMALL_NBYTES_MAX)
            if _checked(target).startswith(_DRAFTS):
                self._drafts[target] = content
            else:
                self.bucket.put_over(target, content)
        else:
            self.bucket.copy(_checked(source), _checked(target))
        self.unlink(source)

    def replace_if(self, name: str, before: bytes | None, after: bytes) -> bool:
        """Replace a small object if it still says ``before`` (None: is not there); return whether it did."""
        with contextlib.suppress(FileExistsError):
            # The version first: a content that is newer than it is refused with it.
            info = self.bucket.head(_checked(name))
            if info is None:
                if before is None:
                    self.bucket.put_new(name, after)
                return before is None
            if before == self.bucket.get(name, nbytes_max=_SMALL_NBYTES_MAX):
                self.bucket.put_instead(name, after, etag=info.etag)
                return True
        return False

    def rename_new(self, source: str, target: str) -> None:
        """Move a name; FileExistsError when the target name is taken, which for a large file is looked at first."""
        info = self.stat(source)
        if info is not None and info.nbytes > _MOVED_NBYTES_MAX:
            if self.stat(target) is not None:
                raise FileExistsError(self.location_of(target))
            self.rename(source, target)
            return
        self.link(source, target)
        self.unlink(source)

    def unlink(self, name: str) -> None:
        """Remove a name; FileNotFoundError when there is none."""
        with self._lock:
            if self._drafts.pop(_checked(name), None) is not None:
                return
        if self.stat(name) is None:
            raise FileNotFoundError(self.location_of(name))
        self.bucket.delete(name)

    def sync_file(self, name: str) -> None:
        """What is there is durable; FileNotFoundError when it is not there."""
        if self.stat(name) is None:
            raise FileNotFoundError(self.location_of(name))

    def sync_folder(self, name: str) -> None:
        """Names are durable as soon as they are there."""
        _checked(name)

    def free_nbytes(self) -> int | None:
        """Nobody says how much a bucket still takes."""
        return None

    # Packs

    def create_pack(self, name: str, *, nbytes_expected: int) -> PackSink:
        """Make a new pack, which appears when it is finished; FileExistsError when the name is taken."""
        if self.stat(name) is not None:
            raise FileExistsError(self.location_of(name))
        return RemotePackSink(self.bucket, name, nbytes_expected=nbytes_expected)

    def open_read(self, name: str) -> ReadFile:
        """Look at an object for ranged reads; FileNotFoundError when there is none. It does not outlive its name."""
        info = self.stat(name)
        if info is None:
            raise FileNotFoundError(self.location_of(name))
        return RemoteReadFile(self.bucket, name, info.nbytes)

    def read_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Fetch ranges, many at a time, and yield them as they arrive, in any order."""
        return read_remote_ranges(requests, pool, count_max=self.requests_at_once)

    def close(self) -> None:
        """Nothing is held between two calls."""


def _checked(name: str) -> str:
    if "\0" in name or (name and any(part in ("", ".", "..") for part in name.split("/"))):
        raise UsageError("a name must be relative, without empty parts, '.' and '..'", where=repr(name))
    return name
