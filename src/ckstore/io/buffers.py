"""Aligned, bounded, reusable buffers: the memory budget of all reading and writing.

Invariants:
- Every block starts at a multiple of 4096, so that O_DIRECT takes it; most lie on huge pages.
- No more than ``count`` blocks are out; a pool touches no memory before a block is used, and the
  block returned last is handed out first, so that a pool used little stays small.
- A block that the kernel may still write to is never handed out again: it is discarded.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Sequence
from types import TracebackType

from ckstore.errors import CapacityError, UsageError
from ckstore.io.syscalls import PAGE_NBYTES

_HUGE_PAGE_NBYTES = 2 << 20


class AlignedBuffer:
    """One block of a pool, out until it is released.

    Args:
        view: The whole block.
    """

    __slots__ = ("_is_out", "_pool", "view")

    def __init__(self, view: memoryview, pool: BufferPool) -> None:
        self.view = view
        self._pool = pool
        self._is_out = False

    @property
    def nbytes(self) -> int:
        """Size of the block."""
        return len(self.view)

    def release(self) -> None:
        """Give the block back to its pool; its bytes must not be used afterwards."""
        self._pool._give_back(self)

    def discard(self) -> None:
        """Give up the block for good, because the kernel may still use it; the pool shrinks by it."""
        self._pool._lose(self)


class BufferPool:
    """A bounded set of equal blocks, handed out to whoever waits for one.

    Args:
        block_nbytes: Size of each block, a multiple of 4096.
        count: How many blocks can be out at once.
        blocks: As many, made by ``map_block``, of which the first is handed out first; None: they are made here.

    Raises:
        CapacityError: The address space is exhausted.
    """

    def __init__(self, block_nbytes: int, count: int, *, blocks: Sequence[memoryview] | None = None) -> None:
        if block_nbytes <= 0 or block_nbytes % PAGE_NBYTES or count <= 0:
            where = f"BufferPool({block_nbytes}, {count})"
            raise UsageError("blocks must be a multiple of 4096 bytes, and at least one", where=where)
        self.block_nbytes = block_nbytes
        self.count = count
        self._condition = threading.Condition()
        self._is_closed = False
        if blocks is None:
            whole = map_block(block_nbytes * count)
            blocks = [whole[i * block_nbytes : (i + 1) * block_nbytes] for i in range(count)]
        assert [len(block) for block in blocks] == [block_nbytes] * count, "other blocks than were asked for"
        self._free = [AlignedBuffer(block, self) for block in reversed(blocks)]
        self._live_count = count

    @property
    def nbytes(self) -> int:
        """The most memory the pool can take."""
        return self.block_nbytes * self.count

    @property
    def free_count(self) -> int:
        """Blocks that can be had without waiting."""
        with self._condition:
            return len(self._free)

    def acquire(self, timeout: float | None = None) -> AlignedBuffer:
        """Return a block, waiting until there is one.

        Raises:
            CapacityError: None was given back within ``timeout`` seconds, or none is left at all.
            UsageError: The pool is closed.
        """
        buffer = self.try_acquire() if timeout == 0 else self.wait_acquire(timeout)
        if buffer is None:
            raise CapacityError("no buffer became free in time", where=f"{self.count} of {self.block_nbytes} bytes")
        return buffer

    def try_acquire(self) -> AlignedBuffer | None:
        """Return a block if one is free at once."""
        return self.wait_acquire(0)

    def wait_acquire(self, timeout: float | None) -> AlignedBuffer | None:
        """Return a block, or None when none was given back within ``timeout`` seconds.

        Raises:
            CapacityError: Every block was discarded, so none can ever come.
            UsageError: The pool is closed.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._free or self._is_closed or not self._live_count, timeout)
            if self._is_closed:
                raise UsageError("the buffer pool is closed")
            if not self._live_count:
                raise CapacityError("every buffer was lost to failed transfers", todo="open the store again")
            if not self._free:
                return None
            buffer = self._free.pop()
            buffer._is_out = True
            return buffer

    def close(self) -> None:
        """Let go of the memory; blocks still out stay valid until they are released."""
        self.close_and_take_blocks()

    def close_and_take_blocks(self) -> list[memoryview]:
        """Close the pool, and return the blocks that nobody has any more, the one first that was next."""
        with self._condition:
            self._is_closed = True
            blocks = [buffer.view for buffer in reversed(self._free)]
            self._free.clear()
            self._condition.notify_all()
        return blocks

    def __enter__(self) -> BufferPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _give_back(self, buffer: AlignedBuffer) -> None:
        with self._condition:
            assert buffer._is_out, "a buffer was released twice"
            buffer._is_out = False
            if not self._is_closed:
                self._free.append(buffer)
                self._condition.notify()

    def _lose(self, buffer: AlignedBuffer) -> None:
        with self._condition:
            assert buffer._is_out, "a buffer was discarded after its release"
            buffer._is_out = False
            self._live_count -= 1
            _LOST.append(buffer.view)
            self._condition.notify_all()


_LOST: list[memoryview] = []
"""Memory that the kernel may write to at any time, and that must stay mapped therefore."""


def map_zeros(nbytes: int) -> memoryview:
    """Return zeros that take memory, and time, only where they are written to: for what is seldom used whole.

    Raises:
        MemoryError: There is no address space.
    """
    try:
        return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise MemoryError from error


def map_block(nbytes: int) -> memoryview:
    """Return memory that begins on a huge page, and takes room only where it is written to.

    Raises:
        CapacityError: The address space is exhausted.
    """
    # Huge pages make long transfers of few pieces; the mapping is a little larger, so that it can begin on one.
    try:
        mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CapacityError("no address space for buffers", where=f"{nbytes} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages refuses; ordinary ones do.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    start = -address % _HUGE_PAGE_NBYTES
    return memoryview(mapping)[start : start + nbytes]
