"""The blocks that packs are written through: of one commit, or kept by a process that commits again and again.

Where a machine's memory is in pieces, the system has to make room for each huge page of new ones, and the disk waits
meanwhile: the first commit of a saver that has them is durable sooner (``async_wall``).

Invariants:
- A block is kept only when nobody has it any more: none that is in flight, and none that was lost.
- Never more are kept than one commit has; what the next one does not take gives its memory back.

What one thread of a commit has of its own: memory to code in, and a reader of bases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckstore.codec.frame_decoder import FrameDecoder
from ckstore.commit.pipeline import ChunkWorker, worker_nbytes
from ckstore.config import MIB, Limits, Policy, fit_memory
from ckstore.delta.chain_reader import ChainReader, chain_reader_nbytes
from ckstore.io.buffers import BufferPool, map_block
from ckstore.io.syscalls import PAGE_NBYTES
from ckstore.store.repository import Repository


@dataclass(frozen=True, slots=True)
class CodingThread:
    """What one thread has of its own."""

    worker: ChunkWorker
    reader: ChainReader

    @classmethod
    def of(cls, repository: Repository) -> CodingThread:
        """Make it; memory is taken when it is first needed."""
        worker = ChunkWorker(repository.limits.chunk_nbytes_max)
        # Bases are read before their chunk is coded, so that both can use the same scratch.
        decoder = FrameDecoder(repository.limits.chunk_nbytes_max, worker.scratch)
        return cls(worker, ChainReader(repository, decoder))


def thread_nbytes(limits: Limits, *, has_bases: bool) -> int:
    """Return the memory that one thread of a commit may use, in bytes."""
    return worker_nbytes(limits.chunk_nbytes_max) + (chain_reader_nbytes(limits) if has_bases else 0)


WRITE_BLOCK_NBYTES = 8 * MIB
"""Measured: larger blocks gain nothing on the devices we have, smaller ones cost system calls."""

WRITE_BLOCKS = 12
"""Eight in flight, and some being filled; more gained nothing."""

WRITE_BLOCKS_MIN = 3
"""A frame may span two blocks while a third one is being written."""


class WriteBlocks:
    """Hands out the blocks of one commit at a time.

    Args:
        is_kept: Whether blocks that came back are there for the next commit; else their memory is given back.
    """

    def __init__(self, *, is_kept: bool = False) -> None:
        self._is_kept = is_kept
        self._kept: list[memoryview] = []

    def take(self, count: int) -> BufferPool:
        """Return so many blocks, the kept ones first; commits that read bases have fewer than others.

        Raises:
            CapacityError: The address space is exhausted.
        """
        blocks, self._kept = self._kept[:count], []
        blocks += [map_block(WRITE_BLOCK_NBYTES) for _ in range(count - len(blocks))]
        return BufferPool(WRITE_BLOCK_NBYTES, count, blocks=blocks)

    def give_back(self, pool: BufferPool) -> None:
        """Take back what was handed out; nothing of it is used any more, but blocks that were lost."""
        blocks = pool.close_and_take_blocks()
        if self._is_kept:
            self._kept = [*self._kept, *blocks][:WRITE_BLOCKS]

    def warm(self, count: int, nbytes: int) -> Iterator[None]:
        """Take memory for as many blocks as a commit fills, before they are wanted; yields after each.

        Args:
            count: The most blocks that it will have.
            nbytes: Of the state that will be committed.

        Raises:
            CapacityError: The address space is exhausted.
        """
        assert self._is_kept, "nobody would find them"
        # One more than it fills for frames' headers and a directory.
        for index in range(min(count, 2 + nbytes // WRITE_BLOCK_NBYTES)):
            if index == len(self._kept):
                self._kept.append(map_block(WRITE_BLOCK_NBYTES))
            # A byte of each page: one that is written to has memory.
            np.frombuffer(self._kept[index], np.uint8)[::PAGE_NBYTES] = 0
            yield
            if index >= len(self._kept):
                # A commit has taken them meanwhile.
                return

    def let_go(self) -> None:
        """Give back the memory of what is kept."""
        self._kept = []


def threads_and_blocks(
    policy: Policy, limits: Limits, *, spare_threads: int = 0, nbytes_a_thread: int | None = None
) -> tuple[int, int]:
    """Return how many threads and write blocks a commit has within the memory that its policy allows.

    Args:
        policy: How it is stored.
        limits: Bounds of the store.
        spare_threads: Threads that mostly wait, beside those that compute.
        nbytes_a_thread: Memory that one thread may use; None: as much as one without bases.
    """
    return fit_memory(
        policy.thread_count + spare_threads,
        thread_nbytes(limits, has_bases=False) if nbytes_a_thread is None else nbytes_a_thread,
        WRITE_BLOCK_NBYTES,
        buffers_wanted=WRITE_BLOCKS,
        buffers_min=WRITE_BLOCKS_MIN,
        memory_nbytes_max=policy.memory_nbytes_max,
    )
