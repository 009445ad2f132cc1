"""Read frame groups of open packs, and hand each frame to threads that decode it once its base is in place.

A frame that arrives before its base is done is set aside, with its buffer, and handed out when that is done. Nothing
waits for ever: bases are asked for first, so of all that lies in buffers one frame can always be decoded.

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
from functools import partial
from typing import Protocol

from ckstore.codec.frame_decoder import FrameDecoder, decoder_nbytes
from ckstore.concurrency import Latch, log_safely, run_uninterrupted
from ckstore.config import READ_BUFFERS, READ_BUFFERS_MIN, Limits, Policy, fit_memory
from ckstore.delta.chain_reader import ChainReader, chain_reader_nbytes
from ckstore.errors import BackendError
from ckstore.format.manifest import PackRef
from ckstore.io.backend import Backend, Fetching, ReadFile, ReadRequest, ReadResult
from ckstore.io.buffers import BufferPool
from ckstore.restore.plan import BufferedRead, FrameGroup, FrameRead, RestorePlan
from ckstore.store.pack_reader import open_pack, read_buffer_nbytes, read_in_halves, read_ranges
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class Tools:
    """What one thread decodes with."""

    decoder: FrameDecoder
    reader: ChainReader


class Filler(Protocol):
    """Decodes what was fetched to where it goes; called on any thread."""

    def fill(self, read: FrameRead, frame: memoryview, tools: Tools) -> None:
        """Decode a frame, header included, whose bytes are gone when this returns; its base is in place."""
        ...

    def fill_buffered(self, aside: BufferedRead, tools: Tools) -> None:
        """Read a chunk through its chain, and copy it to where it goes."""
        ...


def reader_nbytes(limits: Limits) -> int:
    """Return the memory that one thread may use beside read buffers, in bytes."""
    return decoder_nbytes(limits.chunk_nbytes_max) + chain_reader_nbytes(limits, has_pool=True)


def fit_reading(policy: Policy, limits: Limits) -> tuple[int, int]:
    """Return how many threads and read buffers fit into the memory of a policy.

    Each thread comes with a buffer, beside those that are being filled: more threads than that would only wait.
    """
    buffer_nbytes = read_buffer_nbytes(limits)
    thread_count, buffer_count = fit_memory(
        policy.thread_count,
        reader_nbytes(limits) + buffer_nbytes,
        buffer_nbytes,
        buffers_wanted=READ_BUFFERS,
        buffers_min=READ_BUFFERS_MIN,
        memory_nbytes_max=policy.memory_nbytes_max,
    )
    return thread_count, min(max(READ_BUFFERS, thread_count + READ_BUFFERS_MIN), thread_count + buffer_count)


def group_nbytes_max(limits: Limits) -> int:
    """Return the longest range one read may ask for; pages at both ends come on top."""
    return read_buffer_nbytes(limits) - 2 * 4096


@contextmanager
def open_packs(
    repository: Repository, packs: Sequence[PackRef], needed: Iterable[int]
) -> Iterator[dict[int, ReadFile]]:
    """Open all needed packs before anything is read: an open file stays readable when gc moves its name.

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
    """Yield each group's bytes, tagged with its index, as they arrive."""
    waiting = set(range(len(groups)))
    try:
        requests = (ReadRequest(files[group.pack], group.offset, group.nbytes, tag) for tag, group in enumerate(groups))
        for result in read_ranges(backend, requests, pool):
            waiting.discard(result.tag)
            yield result
    except BackendError as error:
        if any(isinstance(files[groups[tag].pack], Fetching) for tag in waiting):
            # A server was asked again and again; no half of a range comes where the whole does not.
            raise
        log_safely(_log, logging.WARNING, "a read failed (%s); reading one range at a time", error)
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
        """Keep the first one."""
        self.error = self.error or error


def decode_all(
    repository: Repository,
    plan: RestorePlan,
    packs: Sequence[PackRef],
    needed: Iterable[int],
    filler: Filler,
    *,
    policy: Policy,
) -> None:
    """Fetch every group of a plan and fill what it says, on as many threads as the policy and its memory allow.

    The first failure ends the work and is raised; nothing is in flight any more then.

    Args:
        repository: The store.
        plan: What is read.
        packs: What it numbers.
        needed: Which of them it reads from.
        filler: Decodes to where bytes go.
        policy: Threads and memory.
    """
    if plan.groups or plan.asides:
        failure = _Failure()
        run_uninterrupted(
            lambda: _decode_all(repository, plan, packs, needed, filler, policy, failure), on_interrupt=failure.note
        )


def _decode_all(
    repository: Repository,
    plan: RestorePlan,
    packs: Sequence[PackRef],
    needed: Iterable[int],
    filler: Filler,
    policy: Policy,
    failure: _Failure,
) -> None:
    limits = repository.limits
    thread_count, buffer_count = fit_reading(policy, limits)
    job_count = len(plan.groups) + len(plan.asides)
    with (
        open_packs(repository, packs, needed) as files,
        BufferPool(read_buffer_nbytes(limits), min(buffer_count, job_count + 1)) as pool,
    ):
        by_id = {packs[index].pack_id: file for index, file in files.items()}

        decoders = [FrameDecoder(limits.chunk_nbytes_max) for _ in range(min(thread_count, job_count))]
        tools = [Tools(decoder, ChainReader(repository, decoder, pool=pool, files=by_id)) for decoder in decoders]
        with _Decoders(plan, filler, tools, failure) as threads:
            results = fetch(repository.backend, plan.groups, files, pool)
            try:
                for result in results:
                    threads.put(result)
            finally:
                results.close()  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class _Held:
    """A group's bytes, and how many of its frames are still to be decoded."""

    group: FrameGroup
    result: ReadResult
    left: int

    def frame_of(self, read: FrameRead) -> memoryview:
        begin = read.ref.offset - self.group.offset
        return self.result.view[begin : begin + read.ref.frame_nbytes]


class _Decoders:
    """Threads that decode; leaving the context waits for them and raises their first failure."""

    def __init__(self, plan: RestorePlan, filler: Filler, tools: Sequence[Tools], failure: _Failure) -> None:
        self._plan = plan
        self._filler = filler
        self._failure = failure
        self._inbox: queue.SimpleQueue[tuple[_Held, Sequence[FrameRead]] | BufferedRead | None] = queue.SimpleQueue()
        # The lock guards what follows, and the counts of what is held.
        self._lock = threading.Lock()
        self._left = sum(len(group.reads) for group in plan.groups)
        self._is_done = bytearray(self._left)
        self._set_aside: dict[int, list[tuple[_Held, FrameRead]]] = {}
        self._is_settled = Latch()
        self._threads = [
            threading.Thread(target=self._work, args=(each,), name=f"ckstore-decode-{index}", daemon=True)
            for index, each in enumerate(tools)
        ]

    def __enter__(self) -> _Decoders:
        if not self._left:
            self._begin_asides()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._failure.note(error)
            self._is_settled.set()
        self._is_settled.wait()
        for _ in self._threads:
            self._inbox.put(None)
        for thread in self._threads:
            thread.join()
        self._let_go_of_set_aside()
        if error is None and self._failure.error is not None:
            raise self._failure.error

    def put(self, result: ReadResult) -> None:
        """Hand over a group's bytes; raises what a decoder has raised meanwhile."""
        if self._failure.error is not None:
            result.release()
            raise self._failure.error
        group = self._plan.groups[result.tag]
        self._inbox.put((_Held(group, result, len(group.reads)), group.reads))

    def _begin_asides(self) -> None:
        # Not before everything else is done: they borrow buffers, and a frame set aside must not hold the last one.
        for aside in self._plan.asides:
            self._inbox.put(aside)
        self._is_settled.set()

    def _work(self, tools: Tools) -> None:
        while (task := self._inbox.get()) is not None:
            if isinstance(task, BufferedRead):
                self._guarded(partial(self._filler.fill_buffered, task, tools))
            else:
                held, reads = task
                for read in reads:
                    self._decode(held, read, tools)
            # The buffer belongs to someone else now.
            del task
        tools.reader.close()

    def _decode(self, held: _Held, read: FrameRead, tools: Tools) -> None:
        with self._lock:
            is_early = read.needs >= 0 and not self._is_done[read.needs]
            if is_early and self._failure.error is None:
                self._set_aside.setdefault(read.needs, []).append((held, read))
                return
        self._guarded(partial(self._fill, held, read, tools))
        with self._lock:
            self._is_done[read.index] = True
            self._left -= 1
            ready = self._set_aside.pop(read.index, [])
            is_last = self._left == 0
            self._let_go(held)
        for each in ready:
            self._inbox.put((each[0], (each[1],)))
        if is_last:
            self._begin_asides()

    def _fill(self, held: _Held, read: FrameRead, tools: Tools) -> None:
        self._filler.fill(read, held.frame_of(read), tools)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step, unless there was a failure: then the rest is only let go of, so that nobody waits for buffers."""
        if self._failure.error is None:
            try:
                step()
                return
            except BaseException as error:
                self._failure.note(error)
        self._let_go_of_set_aside()
        self._is_settled.set()

    def _let_go_of_set_aside(self) -> None:
        with self._lock:
            for each in self._set_aside.values():
                for held, _ in each:
                    self._let_go(held)
            self._set_aside.clear()

    def _let_go(self, held: _Held) -> None:
        held.left -= 1
        if held.left == 0:
            held.result.release()
