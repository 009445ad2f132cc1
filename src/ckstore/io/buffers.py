"""Pools of aligned buffers, which bound the memory of all reading and writing.

Invariants:
- Every block starts at a multiple of 4096, as O_DIRECT requires. Most blocks are on huge pages.
- At most ``count`` blocks are in use. A pool touches no memory before a block is used, and reuses the block returned
  last, so that a lightly used pool stays small.
- A block that the kernel may still write to is discarded and never reused.

An ``Iovec`` of liburing gets a buffer from its memoryview (``PyObject_GetBuffer``) and never releases it. Without
``release_leaked_view``, every buffer of every commit and restore would stay allocated. ``leaks_views`` tests once
whether the installed liburing has this fault. Both are here so that they can be tested where liburing cannot be
imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ckstore.errors import CapacityError, UsageError
from ckstore.io.syscalls import PAGE_NBYTES

_HUGE_PAGE_NBYTES = 2 << 20


class AlignedBuffer:
    """One block of a pool, in use until it is released.

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
        """Return the block to its pool; its bytes must not be used afterwards."""
        self._pool._take_back(self)

    def discard(self) -> None:
        """Never reuse the block, because the kernel may still access it. The pool shrinks by one block."""
        self._pool._discard(self)


class BufferPool:
    """A bounded set of blocks of one size. Thread-safe.

    Args:
        block_nbytes: Size of each block, a multiple of 4096.
        count: Number of blocks.
        blocks: Existing memory for the blocks, from ``map_block``, used in this order; None: map new memory.

    Raises:
        CapacityError: The address space is exhausted.
    """

    def __init__(self, block_nbytes: int, count: int, *, blocks: Sequence[memoryview] | None = None) -> None:
        if block_nbytes <= 0 or block_nbytes % PAGE_NBYTES or count <= 0:
            where = f"BufferPool({block_nbytes}, {count})"
            raise UsageError(
                "a pool needs at least one block, and a block size that is a multiple of 4096", where=where
            )
        self.block_nbytes = block_nbytes
        self.count = count
        self._condition = threading.Condition()
        self._is_closed = False
        if blocks is None:
            whole = map_block(block_nbytes * count)
            blocks = [whole[i * block_nbytes : (i + 1) * block_nbytes] for i in range(count)]
        assert [len(block) for block in blocks] == [block_nbytes] * count, "number or size of the blocks is wrong"
        self._free = [AlignedBuffer(block, self) for block in reversed(blocks)]
        self._live_count = count

    @property
    def nbytes(self) -> int:
        """Memory of all blocks together."""
        return self.block_nbytes * self.count

    @property
    def free_count(self) -> int:
        """Number of blocks that are free."""
        with self._condition:
            return len(self._free)

    def acquire(self, timeout: float | None = None) -> AlignedBuffer:
        """Return a block, waiting until one is free.

        Raises:
            CapacityError: No block became free within ``timeout`` seconds, or every block was discarded.
            UsageError: The pool is closed.
        """
        buffer = self.try_acquire() if timeout == 0 else self.wait_acquire(timeout)
        if buffer is None:
            raise CapacityError(
                "no buffer became free in time", where=f"{self.count} buffers of {self.block_nbytes} bytes"
            )
        return buffer

    def try_acquire(self) -> AlignedBuffer | None:
        """Return a block if one is free, else None."""
        return self.wait_acquire(0)

    def wait_acquire(self, timeout: float | None) -> AlignedBuffer | None:
        """Return a block, or None if no block became free within ``timeout`` seconds.

        Raises:
            CapacityError: Every block was discarded, so that waiting would never end.
            UsageError: The pool is closed.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._free or self._is_closed or not self._live_count, timeout)
            if self._is_closed:
                raise UsageError("the buffer pool is closed")
            if not self._live_count:
                raise CapacityError("every buffer was discarded after a failed transfer", todo="open the store again")
            if not self._free:
                return None
            buffer = self._free.pop()
            buffer._is_out = True
            return buffer

    def close(self) -> None:
        """Release the memory. Blocks in use stay valid until they are released."""
        self.close_and_take_blocks()

    def close_and_take_blocks(self) -> list[memoryview]:
        """Close the pool and return the memory of its free blocks, in the order in which they would be used next."""
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

    def _take_back(self, buffer: AlignedBuffer) -> None:
        with self._condition:
            assert buffer._is_out, "a buffer was released twice"
            buffer._is_out = False
            if not self._is_closed:
                self._free.append(buffer)
                self._condition.notify()

    def _discard(self, buffer: AlignedBuffer) -> None:
        with self._condition:
            assert buffer._is_out, "a buffer was discarded after its release"
            buffer._is_out = False
            self._live_count -= 1
            _DISCARDED.append(buffer.view)
            self._condition.notify_all()


_DISCARDED: list[memoryview] = []
"""Memory that must stay mapped, because the kernel may still write to it."""


def map_zeros(nbytes: int) -> memoryview:
    """Return zeros that take memory only where they are written, for buffers that are rarely used completely.

    Raises:
        MemoryError: The address space is exhausted.
    """
    try:
        return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise MemoryError from error


def map_private(nbytes: int) -> mmap.mmap:
    """Return zeros that the caller unmaps, on huge pages where there is room for one.

    Raises:
        OSError: The address space is exhausted.
    """
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages raises; ordinary pages work as well.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def map_block(nbytes: int) -> memoryview:
    """Return memory that starts on a huge page and takes space only where it is written.

    Raises:
        CapacityError: The address space is exhausted.
    """
    # A transfer from huge pages has few segments. The mapping is larger so that its start can be aligned.
    try:
        mapping = map_private(nbytes + _HUGE_PAGE_NBYTES)
    except OSError as error:
        raise CapacityError("no address space for buffers", where=f"{nbytes} bytes") from error
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    start = -address % _HUGE_PAGE_NBYTES
    return memoryview(mapping)[start : start + nbytes]


class _Buffer(ctypes.Structure):
    """CPython's ``Py_buffer``. Releasing a memoryview reads only its ``obj``."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_Buffer),)
_release.restype = None


def leaks_views(make_vector: Any) -> bool:
    """Return True if a deleted vector leaves one export of, and one reference to, its view."""
    view = memoryview(bytearray(1))
    before = sys.getrefcount(view)
    vector = make_vector([view])
    del vector
    if sys.getrefcount(view) == before:
        return False
    try:
        view.release()
    except BufferError:
        return sys.getrefcount(view) == before + 1
    return False


def release_leaked_view(view: memoryview) -> None:
    """Release the leaked export of a view, and the view itself.

    REQUIRES: ``leaks_views`` is True, the vector was deleted, and this is the only call for it.
    """
    _release(ctypes.byref(_Buffer(obj=id(view))))
    view.release()
