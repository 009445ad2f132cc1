"""Media that fail: the k-th call, once or for ever, and disks that forget to sync.

Each wrapper adds one concern to a Backend and passes everything else on; ``completions`` does it for engines.

Invariants:
- Faults come as the errors a local folder would give: an errno goes through the same mapping.
- A sync that is made to fail has also lost what it was to keep, as after a failed fsync of the kernel.
- Every call is counted, so that a loop over k can end at the first run that no fault touched.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ckstore.errors import CkstoreError
from ckstore.io.backend import AppendFile, Backend, FileInfo, PackSink, ReadFile, ReadRequest, ReadResult
from ckstore.io.buffers import AlignedBuffer, BufferPool
from ckstore.io.syscalls import medium_error

WRITE_ERRNOS = (
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EINTR,
    errno.EAGAIN,
    errno.EROFS,
    errno.EMFILE,
    errno.ENOMEM,
)
"""The errors of the fault programme; the local folder retries EINTR itself, other backends may not."""

SYNC_SITES = frozenset({"create sync", "sync_file", "sync_folder", "pack.finish"})
"""Calls that make something durable; ``"create sync"`` is the sync inside ``create(sync=True)``."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Which call fails, and how.

    Args:
        at: The number of the call that fails, from 1, counted over ``sites``.
        errno: What it fails with.
        for_ever: Every later call of these sites fails too.
        sites: Names of methods, with ``pack.`` for those of a sink, ``file.`` for those of an open file,
            and ``create sync``; None: all.
        is_late: The call is carried out before it fails, as when an answer is lost.
        forgets: A sync that fails loses what it was to keep; False: it was just never made.
    """

    at: int
    errno: int = errno.EIO
    for_ever: bool = False
    sites: frozenset[str] | None = None
    is_late: bool = False
    forgets: bool = True


class FaultyBackend:
    """A Backend in which one call fails, or all from one on.

    Args:
        inner: The backend that does the work.
        fault: What fails; None: nothing, only count.
    """

    def __init__(self, inner: Backend, fault: Fault | None = None) -> None:
        self.inner = inner
        self.fault = fault
        self.calls: list[str] = []
        """The site of every call so far."""
        self.disturbed: list[str] = []
        """What was made to fail: site and name."""
        self._counted = 0
        self._lock = threading.Lock()

    @property
    def root(self) -> str:
        """The place, for messages."""
        return self.inner.root

    @property
    def engine_name(self) -> str:
        """What moves packs in the backend underneath."""
        return self.inner.engine_name

    def location_of(self, name: str) -> str:
        """Return the full path of a name."""
        return self.inner.location_of(name)

    def stat(self, name: str) -> FileInfo | None:
        """Return size and time, or fail."""
        with self._site("stat", name):
            return self.inner.stat(name)

    def list_names(self, folder: str) -> list[str]:
        """List a folder, or fail."""
        with self._site("list_names", folder):
            return self.inner.list_names(folder)

    def read_bytes(self, name: str, *, nbytes_max: int) -> bytes:
        """Read a small file, or fail."""
        with self._site("read_bytes", name):
            return self.inner.read_bytes(name, nbytes_max=nbytes_max)

    def read_head(self, name: str, nbytes: int) -> bytes:
        """Read the first bytes, or fail."""
        with self._site("read_head", name):
            return self.inner.read_head(name, nbytes)

    def make_folder(self, name: str) -> bool:
        """Make a folder, or fail."""
        with self._site("make_folder", name):
            return self.inner.make_folder(name)

    def create(self, name: str, content: bytes, *, sync: bool) -> None:
        """Make a file, or fail; a failure of its sync leaves the file."""
        with self._site("create", name):
            self.inner.create(name, content, sync=False)
        if sync:
            with self._site("create sync", name):
                self.inner.sync_file(name)

    def link(self, source: str, target: str) -> None:
        """Give a second name, or fail."""
        with self._site("link", target):
            self.inner.link(source, target)

    def rename(self, source: str, target: str) -> None:
        """Move a name, or fail."""
        with self._site("rename", target):
            self.inner.rename(source, target)

    def rename_new(self, source: str, target: str) -> None:
        """Move a name to a free one, or fail."""
        with self._site("rename_new", target):
            self.inner.rename_new(source, target)

    def unlink(self, name: str) -> None:
        """Remove a name, or fail."""
        with self._site("unlink", name):
            self.inner.unlink(name)

    def remove_folder(self, name: str) -> None:
        """Remove a folder, or fail."""
        with self._site("remove_folder", name):
            self.inner.remove_folder(name)

    def sync_file(self, name: str) -> None:
        """Sync a file, or fail and lose its bytes."""
        with self._site("sync_file", name):
            self.inner.sync_file(name)

    def sync_folder(self, name: str) -> None:
        """Sync a folder, or fail and lose its new names."""
        with self._site("sync_folder", name):
            self.inner.sync_folder(name)

    def free_nbytes(self) -> int | None:
        """Return the bytes that can still be written."""
        return self.inner.free_nbytes()

    def create_pack(self, name: str, *, nbytes_expected: int) -> PackSink:
        """Make a pack, or fail."""
        with self._site("create_pack", name):
            return FaultySink(self, self.inner.create_pack(name, nbytes_expected=nbytes_expected))

    def create_append_file(self, name: str, content: bytes) -> FaultyAppendFile:
        """Make a file that grows, or fail."""
        with self._site("create_append_file", name):
            return FaultyAppendFile(self, self.inner.create_append_file(name, content), name)

    def is_locked(self, name: str) -> bool:
        """Say whether a file that grows is open, or fail."""
        with self._site("is_locked", name):
            return self.inner.is_locked(name)

    def open_read(self, name: str) -> ReadFile:
        """Open a file, or fail."""
        with self._site("open_read", name):
            return self.inner.open_read(name)

    def read_ranges(self, requests: Iterable[ReadRequest], pool: BufferPool) -> Iterator[ReadResult]:
        """Fetch ranges; each result may fail."""
        results = self.inner.read_ranges(requests, pool)
        try:
            for result in results:
                try:
                    with self._site("read_ranges", str(result.tag)):
                        pass
                except BaseException:
                    result.release()
                    raise
                yield result
        finally:
            close = getattr(results, "close", None)
            if close is not None:
                close()

    def close(self) -> None:
        """Close what does the work."""
        self.inner.close()

    def _site(self, site: str, name: str) -> _Site:
        with self._lock:
            self.calls.append(site)
            fault = self.fault
            if fault is None or (fault.sites is not None and site not in fault.sites):
                return _Site(self, site, name, None)
            self._counted += 1
            is_hit = self._counted >= fault.at if fault.for_ever else self._counted == fault.at
            if is_hit:
                self.disturbed.append(f"{site} {name}".rstrip())
            return _Site(self, site, name, fault if is_hit else None)


class _Site:
    """One call: fails before or after the block, when it is hit."""

    def __init__(self, backend: FaultyBackend, site: str, name: str, fault: Fault | None) -> None:
        self._backend = backend
        self._site = site
        self._name = name
        self._fault = fault

    def __enter__(self) -> None:
        if self._fault is not None and not self._fault.is_late:
            self._fail(self._fault)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._fault is not None and error is None:
            self._fail(self._fault)

    def _fail(self, fault: Fault) -> None:
        if self._site in SYNC_SITES and fault.forgets:
            _forget(self._backend.inner, self._site, self._name)
        where = self._backend.location_of(self._name)
        cause = OSError(fault.errno, os.strerror(fault.errno), where)
        raise medium_error(cause, where=where, what=f"{self._site} (injected)") from cause


class FaultySink:
    """A pack in which a write, the drain or the finish may fail."""

    def __init__(self, backend: FaultyBackend, inner: PackSink) -> None:
        self._backend = backend
        self._inner = inner

    @property
    def name(self) -> str:
        """The name it was created under."""
        return self._inner.name

    def write(self, buffer: AlignedBuffer, nbytes: int, offset: int) -> None:
        """Write a block, or fail; the buffer is released in either case."""
        try:
            with self._backend._site("pack.write", self.name):
                pass
        except BaseException:
            buffer.release()
            raise
        self._inner.write(buffer, nbytes, offset)

    def drain(self) -> None:
        """Wait, or fail."""
        with self._backend._site("pack.drain", self.name):
            self._inner.drain()

    def finish(self, nbytes: int) -> None:
        """Cut and sync, or fail and lose the bytes."""
        with self._backend._site("pack.finish", self.name):
            self._inner.finish(nbytes)

    def close(self) -> None:
        """Close; never fails."""
        self._inner.close()


class FaultyAppendFile:
    """A file that grows, in which a write, a sync or the cut may fail. A write that fails has written a part."""

    def __init__(self, backend: FaultyBackend, inner: AppendFile, name: str) -> None:
        self._backend = backend
        self._inner = inner
        self._name = name

    def write(self, offset: int, parts: Sequence[bytes]) -> None:
        """Write, or fail in the middle."""
        content = b"".join(map(bytes, parts))
        try:
            with self._backend._site("append.write", self._name):
                self._inner.write(offset, parts)
        except CkstoreError:
            self._inner.write(offset, [content[: len(content) // 2]])
            raise

    def sync(self) -> None:
        """Make durable, or fail and lose the bytes."""
        try:
            with self._backend._site("append.sync", self._name):
                self._inner.sync()
        except CkstoreError:
            if isinstance(self._inner, _Losing):
                self._inner.lose()
            raise

    def truncate(self, nbytes: int) -> None:
        """Cut, or fail."""
        with self._backend._site("append.truncate", self._name):
            self._inner.truncate(nbytes)

    def close(self) -> None:
        """Close; never fails."""
        self._inner.close()


@runtime_checkable
class _Losing(Protocol):
    def lose(self) -> None: ...


@runtime_checkable
class _Forgetting(Protocol):
    def lose_data(self, name: str) -> None: ...

    def lose_folder(self, name: str) -> None: ...

    def truncate(self, name: str, nbytes: int) -> None: ...


def _forget(inner: Backend, site: str, name: str) -> None:
    if not isinstance(inner, _Forgetting):
        return
    if site == "sync_folder":
        inner.lose_folder(name)
    else:
        inner.lose_data(name)


class SyncSkippingBackend(FaultyBackend):
    """A Backend that leaves syncs out in silence: the negative control of every crash test.

    Args:
        inner: The backend that does the work.
        skips: ``"pack data"``, ``"draft data"``, ``"append data"``, ``"file data"`` (of ``sync_file``), or
            ``"folder "`` and the first part of a folder's name: ``"folder packs"``, ``"folder manifests"``,
            ``"folder claims"``, ``"folder "`` for the root.
        after_link: From the first link of a manifest on, no sync at all.
    """

    def __init__(self, inner: Backend, skips: Iterable[str] = (), *, after_link: bool = False) -> None:
        super().__init__(inner)
        self.skips = frozenset(skips)
        self.after_link = after_link
        self._has_linked = False

    def link(self, source: str, target: str) -> None:
        """Give a second name, and remember that it was a manifest's."""
        super().link(source, target)
        self._has_linked |= target.startswith("manifests/")

    def create(self, name: str, content: bytes, *, sync: bool) -> None:
        """Make a file, perhaps without its sync."""
        self.inner.create(name, content, sync=sync and not self._skips("draft data"))

    def sync_folder(self, name: str) -> None:
        """Sync a folder, or say that it was done."""
        if not self._skips(f"folder {name.split('/', 1)[0]}"):
            self.inner.sync_folder(name)

    def create_pack(self, name: str, *, nbytes_expected: int) -> PackSink:
        """Make a pack whose bytes may never be synced."""
        return _SyncSkippingSink(self, self.inner.create_pack(name, nbytes_expected=nbytes_expected))

    def create_append_file(self, name: str, content: bytes) -> FaultyAppendFile:
        """Make a file that grows, whose bytes may never be synced."""
        return _SyncSkippingAppendFile(self, self.inner.create_append_file(name, content), name)

    def sync_file(self, name: str) -> None:
        """Sync a file, or say that it was done."""
        if not self._skips("file data"):
            super().sync_file(name)

    def _skips(self, what: str) -> bool:
        return what in self.skips or (self.after_link and self._has_linked)


class _SyncSkippingAppendFile(FaultyAppendFile):
    def sync(self) -> None:
        """Sync, or say that it was done."""
        backend = self._backend
        assert isinstance(backend, SyncSkippingBackend)
        if not backend._skips("append data"):
            self._inner.sync()


class _SyncSkippingSink(FaultySink):
    def finish(self, nbytes: int) -> None:
        """Cut the file to its true size, perhaps without the sync."""
        backend = self._backend
        assert isinstance(backend, SyncSkippingBackend)
        if not backend._skips("pack data"):
            self._inner.finish(nbytes)
            return
        self._inner.drain()
        # Closing an unfinished pack removes its name: keep a second one meanwhile.
        backend.inner.link(self.name, f"{self.name}.kept")
        self._inner.close()
        backend.inner.rename(f"{self.name}.kept", self.name)
        if isinstance(backend.inner, _Forgetting):
            backend.inner.truncate(self.name, nbytes)
        else:
            os.truncate(Path(backend.location_of(self.name)), nbytes)
