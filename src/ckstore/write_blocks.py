"""The blocks that packs are written through: of one commit, or kept by a process that commits again and again.

Taking them anew can cost a commit more than writing what they hold first: where a machine's memory is in pieces, the
system makes room for each huge page, which takes it milliseconds (``async_wall``).

Invariants:
- Blocks are kept only when all of them came back: none is in flight, and none was lost.
- There are never two sets of blocks: what was kept and does not fit is given back before others are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ckstore.coding_thread import thread_nbytes
from ckstore.config import MIB, Limits, Policy, fit_memory
from ckstore.io.buffers import BufferPool

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
        self._pool: BufferPool | None = None

    def take(self, count: int) -> BufferPool:
        """Return so many blocks, the kept ones if they are as many.

        Raises:
            CapacityError: The address space is exhausted.
        """
        pool, self._pool = self._pool, None
        if pool is not None and pool.count == count:
            return pool
        if pool is not None:
            pool.close()
        return BufferPool(WRITE_BLOCK_NBYTES, count)

    def give_back(self, pool: BufferPool) -> None:
        """Take back what was handed out, if it was not taken back before; nothing of it is used any more."""
        if self._is_kept and self._pool in (None, pool) and pool.free_count == pool.count:
            self._pool = pool
        else:
            pool.close()

    def warm(self, count: int, nbytes: int) -> Iterator[None]:
        """Take blocks, and memory for as many as a commit of so many bytes fills, before they are wanted; yields often.

        Args:
            count: How many blocks.
            nbytes: Of the state that will be committed.

        Raises:
            CapacityError: The address space is exhausted.
        """
        assert self._is_kept, "nobody would find them"
        self._pool = self.take(count)
        # The first block holds a little more than the state, and so does the last.
        yield from islice(self._pool.populate(), 2 + nbytes // WRITE_BLOCK_NBYTES)

    def let_go(self) -> None:
        """Give back the memory of what is kept."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


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
