"""Gather many small pieces into large aligned blocks of one pack, filled by many threads.

One thread at a time reserves bytes, in file order. Any thread fills a reservation and then declares it done, in any
order. A block is written when it is completely reserved and all its reservations are done.

Invariants:
- The bytes between reservations are zero.
- ``reserve`` waits only for blocks that are completely reserved. It cannot deadlock as long as filling a reservation
  needs no lock that the reserving thread holds.
- After ``stop`` or a failed write every call raises, including calls that are waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ckstore.errors import CkstoreError, UsageError
from ckstore.io.backend import PackSink
from ckstore.io.buffers import AlignedBuffer, BufferPool
from ckstore.io.syscalls import PAGE_NBYTES, round_up

_WAIT_SECONDS = 0.2
_PIECE_NBYTES = 512 << 10
"""Bytes copied per call, few enough that ``watch`` finds them in the CPU cache. Smaller pieces release the GIL more
often, which slows the threads of a commit down."""


def copy_plain(source: memoryview, destination: memoryview) -> None:
    """Copy bytes; numpy releases the GIL except for tiny copies."""
    np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))


def _without(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return the views without their first ``nbytes`` bytes."""
    while views and nbytes >= len(views[0]):
        nbytes -= len(views.pop(0))
    return [views[0][nbytes:], *views[1:]] if views else []


@dataclass(slots=True, eq=False)
class _Block:
    """A block being filled.

    Args:
        open_count: Reservations in it that are not done, plus one until the block is completely reserved.
    """

    buffer: AlignedBuffer
    offset: int
    open_count: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Reserved bytes: their offset in the file, and the parts of blocks that hold them."""

    offset: int
    nbytes: int
    pieces: tuple[tuple[_Block, int, int], ...]


class BlockWriter:
    """Writes one pack through the blocks of a pool. ``fill`` and ``done`` are thread-safe.

    Args:
        sink: Receives full blocks; the writer finishes or closes it.
        pool: Where blocks come from.
        copy: Copies a source into a destination of the same length.
    """

    def __init__(
        self, sink: PackSink, pool: BufferPool, *, copy: Callable[[memoryview, memoryview], None] = copy_plain
    ) -> None:
        self._sink = sink
        self._pool = pool
        self._copy = copy
        self._position = 0
        self._tail: _Block | None = None
        self._open: set[_Block] = set()
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The name of the pack."""
        return self._sink.name

    @property
    def position(self) -> int:
        """Bytes reserved so far, which is the offset of the next unaligned reservation."""
        return self._position

    def reserve(self, nbytes: int, *, align: int = 1) -> Reservation:
        """Reserve the next bytes of the file; wait for a free block if one is needed.

        REQUIRES: Only one thread calls it at a time.

        Raises:
            UsageError: The pool is smaller than ``nbytes``, so that waiting would never end.
            CkstoreError: An earlier write failed, or the writer was stopped.
        """
        gap_nbytes = -self._position % align
        start_block = (self._position + gap_nbytes) // self._pool.block_nbytes
        end_block = -(-(self._position + gap_nbytes + nbytes) // self._pool.block_nbytes)
        if end_block - start_block > self._pool.count:
            raise UsageError("a reservation is larger than the pool", where=f"{nbytes} of {self._pool.nbytes} bytes")
        self._skip(gap_nbytes)
        offset = self._position
        pieces = self._take(nbytes)
        return Reservation(offset, nbytes, tuple(pieces))

    def fill(
        self,
        reservation: Reservation,
        parts: Sequence[memoryview],
        *,
        begin: int = 0,
        watch: Callable[[memoryview], object] | None = None,
    ) -> None:
        """Copy the parts into a reservation, which they must fill from ``begin`` to its end. Thread-safe.

        Args:
            reservation: Where to copy to.
            parts: What to copy.
            begin: Bytes at the start of the reservation to leave unchanged; the caller writes them later.
            watch: Called with every copied piece in order, while it is still in the CPU cache. A checksum computed
                here costs a third of one computed afterwards.
        """
        self._check()
        assert begin + sum(part.nbytes for part in parts) == reservation.nbytes, (
            "the parts do not fill their reservation"
        )
        targets = _without(self.views(reservation), begin)
        for part in parts:
            source = part if part.format == "B" and part.ndim == 1 else part.cast("B")
            while len(source):
                count = min(len(source), len(targets[0]), _PIECE_NBYTES)
                piece = targets[0][:count]
                self._copy(source[:count], piece)
                if watch is not None:
                    watch(piece)
                source = source[count:]
                targets[0] = targets[0][count:]
                if not len(targets[0]):
                    targets.pop(0)

    def views(self, reservation: Reservation) -> list[memoryview]:
        """Return the bytes of the reservation in its blocks; valid until ``done``."""
        return [block.buffer.view[start:stop] for block, start, stop in reservation.pieces]

    def done(self, reservation: Reservation) -> None:
        """Declare the reservation filled. Writes the blocks that it completes."""
        self._check()
        for block, _, _ in reservation.pieces:
            self._close_part(block)

    def finish(self, *, align: int = PAGE_NBYTES) -> int:
        """Pad with zeros to ``align``, write the remaining blocks, and make the file durable.

        REQUIRES: Every reservation is done.

        Returns:
            The size of the file.

        Raises:
            CapacityError: The disk or the quota is full.
            BackendError: A write or the sync failed.
        """
        self._skip(-self._position % align)
        total_nbytes = self._position
        self._seal_tail(pad=True)
        self._check()
        assert not self._open, "finish() was called before all reservations were done"
        self._sink.finish(total_nbytes)
        self._error = UsageError("the pack is finished", where=self.name)
        return total_nbytes

    def stop(self, error: BaseException | None = None) -> None:
        """Make every call raise from now on, including waiting ones. Releases nothing."""
        with self._lock:
            if self._error is None:
                self._error = error or CkstoreError("writing the pack was cancelled", where=self.name)

    def abandon(self) -> None:
        """Stop, return all blocks to the pool and close the sink.

        REQUIRES: No thread is filling a reservation.
        """
        self.stop()
        with self._lock:
            blocks, self._tail = list(self._open), None
            self._open.clear()
        for block in blocks:
            block.buffer.release()
        self._sink.close()

    def _check(self) -> None:
        error = self._error
        if error is None:
            return
        if isinstance(error, CkstoreError):
            raise error
        raise CkstoreError("writing the pack failed", where=self.name) from error

    def _skip(self, nbytes: int) -> None:
        """Reserve and fill zeros."""
        for block, start, stop in self._take(nbytes):
            block.buffer.view[start:stop] = bytes(stop - start)
            self._close_part(block)

    def _take(self, nbytes: int) -> list[tuple[_Block, int, int]]:
        """Reserve exactly the next bytes, and seal each block that they fill."""
        self._check()
        pieces = []
        while nbytes:
            block = self._tail or self._next_block()
            start = self._position - block.offset
            count = min(nbytes, self._pool.block_nbytes - start)
            with self._lock:
                block.open_count += 1
            pieces.append((block, start, start + count))
            self._position += count
            nbytes -= count
            if start + count == self._pool.block_nbytes:
                self._seal_tail(pad=False)
        return pieces

    def _next_block(self) -> _Block:
        buffer = None
        while buffer is None:
            self._check()
            buffer = self._pool.wait_acquire(_WAIT_SECONDS)
        block = _Block(buffer, self._position)
        with self._lock:
            self._tail = block
            self._open.add(block)
        return block

    def _seal_tail(self, *, pad: bool) -> None:
        block = self._tail
        if block is None:
            return
        if pad:
            used = self._position - block.offset
            block.buffer.view[used : round_up(used)] = bytes(round_up(used) - used)
        self._tail = None
        self._close_part(block)

    def _close_part(self, block: _Block) -> None:
        with self._lock:
            block.open_count -= 1
            is_complete = block.open_count == 0 and block in self._open
            if is_complete:
                self._open.discard(block)
        if is_complete:
            self._write_block(block)

    def _write_block(self, block: _Block) -> None:
        # Only the last block can be shorter than the others, and by then the position is final.
        nbytes = min(self._pool.block_nbytes, round_up(self._position - block.offset))
        try:
            self._sink.write(block.buffer, nbytes, block.offset)
        except BaseException as error:
            self.stop(error)
            raise
