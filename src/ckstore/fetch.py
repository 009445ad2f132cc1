"""Read frame groups of open packs, and hand each frame to threads that decode it.

One read that fails does not end a restore: it is tried once more on its own, then in halves, so that the
bad part is known to the byte; what cannot be read counts as damage.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckstore.config import KIB, READ_BUFFERS, READ_BUFFERS_MIN, Limits, Policy, fit_memory
from ckstore.errors import BackendError, ChecksumError, MissingChunkError
from ckstore.format import layout
from ckstore.format.frame import FRAME_HEADER_NBYTES
from ckstore.format.manifest import PackRef
from ckstore.io.backend import Backend, ReadFile, ReadRequest, ReadResult
from ckstore.io.buffers import BufferPool
from ckstore.pipeline import ChunkWorker, worker_nbytes
from ckstore.plan import FrameGroup
from ckstore.store.parts import Parts
from ckstore.workers import run_aside

_log = logging.getLogger("ckstore")

READ_SLACK_NBYTES = 64 * KIB
"""Room in a read buffer beyond one chunk: frame header, codec tables, alignment at both ends."""

Decode = Callable[[FrameGroup, memoryview, ChunkWorker], None]
"""Called on a thread with a group's bytes, which are gone when it returns."""


def read_buffer_nbytes(limits: Limits) -> int:
    """Return the size of a read buffer, in bytes: any frame fits."""
    return limits.chunk_nbytes_max + READ_SLACK_NBYTES


def group_nbytes_max(limits: Limits) -> int:
    """Return the longest range one read may ask for; pages at both ends come on top."""
    return read_buffer_nbytes(limits) - 2 * 4096


@contextmanager
def open_packs(parts: Parts, packs: Sequence[PackRef], needed: Iterable[int]) -> Iterator[dict[int, ReadFile]]:
    """Open all needed packs before anything is read: an open file stays readable when gc moves its name.

    Raises:
        MissingChunkError: A pack is neither in place nor in the trash, or has another size.
    """
    files: dict[int, ReadFile] = {}
    try:
        for index in sorted(set(needed)):
            files[index] = _open_pack(parts, packs[index])
        yield files
    finally:
        for file in files.values():
            file.close()


def _open_pack(parts: Parts, pack: PackRef) -> ReadFile:
    backend: Backend = parts.backend
    place = layout.pack_name(pack.pack_id)
    # gc may move it to the trash, or a writer back from it, between two looks.
    for name in (place, *parts.trash.find_pack(pack.pack_id), place):
        try:
            file = backend.open_read(name)
        except FileNotFoundError:
            continue
        if file.nbytes == pack.nbytes:
            return file
        file.close()
        raise MissingChunkError(
            f"pack {pack.pack_id.hex()} has {file.nbytes} bytes where the manifest says {pack.nbytes}",
            where=backend.location_of(name),
            todo="restore an older checkpoint, or bring the file back from a copy",
            pack_id=pack.pack_id.hex(),
        )
    raise MissingChunkError(
        f"pack {pack.pack_id.hex()} is missing",
        where=backend.location_of(place),
        todo="restore an older checkpoint, or bring the file back from a copy",
        pack_id=pack.pack_id.hex(),
    )


def fetch(
    backend: Backend, groups: Sequence[FrameGroup], files: Mapping[int, ReadFile], pool: BufferPool
) -> Iterator[ReadResult]:
    """Yield each group's bytes, tagged with its index, as they arrive."""
    waiting = set(range(len(groups)))
    try:
        requests = (ReadRequest(files[group.pack], group.offset, group.nbytes, tag) for tag, group in enumerate(groups))
        for result in backend.read_ranges(requests, pool):
            waiting.discard(result.tag)
            yield result
    except BackendError as error:
        _log.warning("a read failed (%s); reading one range at a time", error)
        for tag in sorted(waiting):
            yield _fetch_alone(groups[tag], files[groups[tag].pack], tag, pool)


def _fetch_alone(group: FrameGroup, file: ReadFile, tag: int, pool: BufferPool) -> ReadResult:
    buffer = pool.acquire()
    try:
        view = buffer.view[: group.nbytes]
        _read_in_halves(file, group.offset, view, try_count=2)
    except BaseException:
        buffer.release()
        raise
    return ReadResult(tag, view, buffer)


def _read_in_halves(file: ReadFile, offset: int, view: memoryview, *, try_count: int) -> None:
    for _ in range(try_count):
        try:
            content = file.read_at(offset, len(view))
        except BackendError:
            continue
        view[: len(content)] = content
        return
    if len(view) <= 4096:
        raise ChecksumError(
            f"bytes {offset} to {offset + len(view)} cannot be read",
            where=file.name,
            todo="restore an older checkpoint; the medium is failing",
            offset=offset,
        )
    half = max(4096, len(view) // 2 // 4096 * 4096)
    _read_in_halves(file, offset, view[:half], try_count=1)
    _read_in_halves(file, offset + half, view[half:], try_count=1)


def split(group: FrameGroup, view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the index of each read of a group with its frame, header included."""
    for index, read in enumerate(group.reads):
        begin = read.frame.offset - group.offset
        yield index, view[begin : begin + FRAME_HEADER_NBYTES + read.frame.stored_nbytes]


@dataclass(slots=True)
class _Failure:
    error: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Keep the first one."""
        self.error = self.error or error


def decode_all(
    parts: Parts,
    groups: Sequence[FrameGroup],
    packs: Sequence[PackRef],
    decode: Decode,
    *,
    policy: Policy,
) -> None:
    """Fetch every group and run ``decode`` on it, on as many threads as the policy and its memory allow.

    The first failure ends the work and is raised; nothing is in flight any more then.
    """
    if not groups:
        return
    failure = _Failure()
    run_aside(lambda: _decode_all(parts, groups, packs, decode, policy, failure), on_interrupt=failure.note)


def _decode_all(
    parts: Parts,
    groups: Sequence[FrameGroup],
    packs: Sequence[PackRef],
    decode: Decode,
    policy: Policy,
    failure: _Failure,
) -> None:
    limits = parts.limits
    thread_count, buffer_count = fit_memory(
        policy.thread_count,
        worker_nbytes(limits.chunk_nbytes_max),
        read_buffer_nbytes(limits),
        buffers_wanted=READ_BUFFERS,
        buffers_min=READ_BUFFERS_MIN,
        memory_nbytes_max=policy.memory_nbytes_max,
    )
    with (
        open_packs(parts, packs, (group.pack for group in groups)) as files,
        BufferPool(read_buffer_nbytes(limits), min(buffer_count, len(groups) + 1)) as pool,
        _Decoders(groups, decode, thread_count, limits.chunk_nbytes_max, failure) as decoders,
    ):
        results = fetch(parts.backend, groups, files, pool)
        try:
            for result in results:
                decoders.put(result)
        finally:
            results.close()  # type: ignore[attr-defined]


class _Decoders:
    """Threads that decode; leaving the context waits for them and raises their first failure."""

    def __init__(
        self,
        groups: Sequence[FrameGroup],
        decode: Decode,
        thread_count: int,
        chunk_nbytes_max: int,
        failure: _Failure,
    ) -> None:
        self._groups = groups
        self._decode = decode
        self._chunk_nbytes_max = chunk_nbytes_max
        self._inbox: queue.SimpleQueue[ReadResult | None] = queue.SimpleQueue()
        self._failure = failure
        self._threads = [
            threading.Thread(target=self._work, name=f"ckstore-decode-{index}", daemon=True)
            for index in range(min(thread_count, len(groups)))
        ]

    def __enter__(self) -> _Decoders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._failure.note(error)
        for _ in self._threads:
            self._inbox.put(None)
        for thread in self._threads:
            thread.join()
        if error is None and self._failure.error is not None:
            raise self._failure.error

    def put(self, result: ReadResult) -> None:
        """Hand over a group's bytes; raises what a decoder has raised meanwhile."""
        if self._failure.error is not None:
            result.release()
            raise self._failure.error
        self._inbox.put(result)

    def _work(self) -> None:
        worker = ChunkWorker(self._chunk_nbytes_max)
        while (result := self._inbox.get()) is not None:
            try:
                # After a failure the rest is only let go of, so that the reader is not left waiting for buffers.
                if self._failure.error is None:
                    self._decode(self._groups[result.tag], result.view, worker)
            except BaseException as error:
                self._failure.note(error)
            finally:
                result.release()
