"""Fetch frame groups from packs, and pass the frames to threads that decode each one after its base.

A frame that arrives before its base is decoded waits in its buffer. This cannot deadlock: bases are requested first,
so at least one of the buffered frames can always be decoded.

A failed read does not end a restore. The range is read once more alone, then in halves, so that the unreadable bytes
are known exactly. Unreadable bytes count as damage.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ckstore.codec.frame_decoder import FrameDecoder
from ckstore.concurrency import Latch, log_safely, run_uninterrupted
from ckstore.config import Policy
from ckstore.delta.chain_reader import ChainReader
from ckstore.errors import BackendError
from ckstore.format.manifest import PackRef
from ckstore.io.backend import Backend, Fetching, ReadFile, ReadRequest, ReadResult
from ckstore.io.buffers import BufferPool
from ckstore.restore.plan import BufferedRead, FrameGroup, FrameRead, RestorePlan
from ckstore.store.memory_budget import DECODE_CHAIN, read_buffer_nbytes
from ckstore.store.pack_reader import open_pack, read_in_halves, read_ranges
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class DecodeTools:
    """The decoder and the chain reader of one thread."""

    decoder: FrameDecoder
    reader: ChainReader


class DestinationFiller(Protocol):
    """Decodes fetched frames to their destinations; called on any thread."""

    def fill(self, read: FrameRead, frame: memoryview, tools: DecodeTools) -> None:
        """Decode a frame with its header, after its base. The frame's buffer is reused after this returns."""
        ...

    def fill_buffered(self, read: BufferedRead, tools: DecodeTools) -> None:
        """Read a chunk with its chain, and copy it to its targets."""
        ...


@contextmanager
def open_packs(
    repository: Repository, packs: Sequence[PackRef], needed: Iterable[int]
) -> Iterator[dict[int, ReadFile]]:
    """Open all needed packs before reading: an open file stays readable when gc moves it.

    Raises:
        MissingChunkError: A pack is neither in place nor in the trash, or has another size.
    """
    files: dict[int, ReadFile] = {}
    try:
        for index in sorted(set(needed)):
            files[index] = open_pack(repository, packs[index])
        yield files
    finally:
        for file in files.values():
            file.close()


def fetch(
    backend: Backend, groups: Sequence[FrameGroup], files: Mapping[int, ReadFile], pool: BufferPool
) -> Iterator[ReadResult]:
    """Yield the bytes of each group as they arrive, tagged with the group's index."""
    waiting = set(range(len(groups)))
    try:
        requests = (ReadRequest(files[group.pack], group.offset, group.nbytes, tag) for tag, group in enumerate(groups))
        for result in read_ranges(backend, requests, pool):
            waiting.discard(result.tag)
            yield result
    except BackendError as error:
        if any(isinstance(files[groups[tag].pack], Fetching) for tag in waiting):
            # The client has already retried; a half of the range would fail as well.
            raise
        log_safely(_log, logging.WARNING, "a read failed (%s); reading the remaining ranges one by one", error)
        for tag in sorted(waiting):
            yield _fetch_alone(groups[tag], files[groups[tag].pack], tag, pool)


def _fetch_alone(group: FrameGroup, file: ReadFile, tag: int, pool: BufferPool) -> ReadResult:
    buffer = pool.acquire()
    try:
        view = buffer.view[: group.nbytes]
        read_in_halves(file, group.offset, view)
    except BaseException:
        buffer.release()
        raise
    return ReadResult(tag, view, buffer)


@dataclass(slots=True)
class _Failure:
    error: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Keep the first error."""
        self.error = self.error or error


def decode_all(
    repository: Repository,
    plan: RestorePlan,
    packs: Sequence[PackRef],
    needed: Iterable[int],
    filler: DestinationFiller,
    *,
    policy: Policy,
) -> None:
    """Execute a plan on as many threads as the policy and its memory allow.

    The first failure stops the work and is raised after all threads have finished.

    Args:
        repository: The store.
        plan: The reads.
        packs: The manifest's packs, which the plan indexes.
        needed: Indices of the packs to open.
        filler: Decodes frames to their destinations.
        policy: Limits of threads and memory.
    """
    if plan.groups or plan.buffered_reads:
        failure = _Failure()
        run_uninterrupted(
            lambda: _decode_all(repository, plan, packs, needed, filler, policy, failure), on_interrupt=failure.note
        )


def _decode_all(
    repository: Repository,
    plan: RestorePlan,
    packs: Sequence[PackRef],
    needed: Iterable[int],
    filler: DestinationFiller,
    policy: Policy,
    failure: _Failure,
) -> None:
    limits = repository.limits
    thread_count, buffer_count = DECODE_CHAIN.fit_reading(policy, limits)
    job_count = len(plan.groups) + len(plan.buffered_reads)
    with (
        open_packs(repository, packs, needed) as files,
        BufferPool(read_buffer_nbytes(limits), min(buffer_count, job_count + 1)) as pool,
    ):
        by_id = {packs[index].pack_id: file for index, file in files.items()}

        decoders = [FrameDecoder(limits.chunk_nbytes_max) for _ in range(min(thread_count, job_count))]
        tools = [DecodeTools(decoder, ChainReader(repository, decoder, pool=pool, files=by_id)) for decoder in decoders]
        with _Decoders(plan, filler, tools, failure) as threads:
            results = fetch(repository.backend, plan.groups, files, pool)
            try:
                for result in results:
                    threads.put(result)
            finally:
                results.close()  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class _FetchedGroup:
    """The bytes of a group, and how many of its frames are not decoded yet."""

    group: FrameGroup
    result: ReadResult
    pending_count: int

    def frame_of(self, read: FrameRead) -> memoryview:
        begin = read.ref.offset - self.group.offset
        return self.result.view[begin : begin + read.ref.frame_nbytes]


class _Decoders:
    """Decoding threads. Leaving the context waits for them and raises the first failure."""

    def __init__(
        self, plan: RestorePlan, filler: DestinationFiller, tools: Sequence[DecodeTools], failure: _Failure
    ) -> None:
        self._plan = plan
        self._filler = filler
        self._failure = failure
        self._inbox: queue.SimpleQueue[tuple[_FetchedGroup, Sequence[FrameRead]] | BufferedRead | None] = (
            queue.SimpleQueue()
        )
        # The lock guards the next three attributes, and ``pending_count`` of groups.
        self._lock = threading.Lock()
        self._pending_count = sum(len(group.reads) for group in plan.groups)
        self._is_done = bytearray(self._pending_count)
        self._waiting: dict[int, list[tuple[_FetchedGroup, FrameRead]]] = {}
        self._is_finished = Latch()
        self._threads = [
            threading.Thread(target=self._work, args=(each,), name=f"ckstore-decode-{index}", daemon=True)
            for index, each in enumerate(tools)
        ]

    def __enter__(self) -> _Decoders:
        if not self._pending_count:
            self._queue_buffered_reads()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._failure.note(error)
            self._is_finished.set()
        self._is_finished.wait()
        for _ in self._threads:
            self._inbox.put(None)
        for thread in self._threads:
            thread.join()
        self._release_waiting()
        if error is None and self._failure.error is not None:
            raise self._failure.error

    def put(self, result: ReadResult) -> None:
        """Queue a fetched group. Raises the first failure of a decoding thread, if there was one."""
        if self._failure.error is not None:
            result.release()
            raise self._failure.error
        planned = self._plan.groups[result.tag]
        self._inbox.put((_FetchedGroup(planned, result, len(planned.reads)), planned.reads))

    def _queue_buffered_reads(self) -> None:
        # Only after all other reads: these borrow buffers, and a waiting frame could hold the last one.
        for read in self._plan.buffered_reads:
            self._inbox.put(read)
        self._is_finished.set()

    def _work(self, tools: DecodeTools) -> None:
        while (task := self._inbox.get()) is not None:
            if isinstance(task, BufferedRead):
                self._run_unless_failed(partial(self._filler.fill_buffered, task, tools))
            else:
                group, reads = task
                for read in reads:
                    self._decode(group, read, tools)
            # Drop the reference: the buffer may be in use for another read.
            del task
        tools.reader.close()

    def _decode(self, group: _FetchedGroup, read: FrameRead, tools: DecodeTools) -> None:
        with self._lock:
            is_early = read.needs >= 0 and not self._is_done[read.needs]
            if is_early and self._failure.error is None:
                self._waiting.setdefault(read.needs, []).append((group, read))
                return
        self._run_unless_failed(partial(self._fill, group, read, tools))
        with self._lock:
            self._is_done[read.index] = True
            self._pending_count -= 1
            ready = self._waiting.pop(read.index, [])
            is_last = self._pending_count == 0
            self._release(group)
        for each in ready:
            self._inbox.put((each[0], (each[1],)))
        if is_last:
            self._queue_buffered_reads()

    def _fill(self, group: _FetchedGroup, read: FrameRead, tools: DecodeTools) -> None:
        self._filler.fill(read, group.frame_of(read), tools)

    def _run_unless_failed(self, step: Callable[[], None]) -> None:
        """Run a step. After a failure only release buffers, so that no thread waits for one."""
        if self._failure.error is None:
            try:
                step()
                return
            except BaseException as error:
                self._failure.note(error)
        self._release_waiting()
        self._is_finished.set()

    def _release_waiting(self) -> None:
        with self._lock:
            for each in self._waiting.values():
                for group, _ in each:
                    self._release(group)
            self._waiting.clear()

    def _release(self, group: _FetchedGroup) -> None:
        group.pending_count -= 1
        if group.pending_count == 0:
            group.result.release()
