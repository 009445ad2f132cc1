"""The bucket backend: files are objects, folders do not exist, and drafts stay in memory.

An object appears completely or not at all. Files created below ``tmp`` (drafts) therefore stay in the memory of this
process until ``link`` or ``rename`` gives them their final name.

Invariants:
- ``create``, ``link`` and ``rename_new`` never replace an object, if the server supports conditional writes
  (``If-None-Match``). ``probe`` tests that.
- Everything is durable when a call returns, so the sync functions do nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.errors import MalformedError, UnsupportedError
from ckstore.io.backend import FileInfo, PackSink, ReadFile, ReadRequest, ReadResult, checked_name
from ckstore.io.buffers import BufferPool
from ckstore.io.remote.client import Bucket, RemoteOptions
from ckstore.io.remote.packs import RemotePackSink, RemoteReadFile, read_remote_ranges

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
