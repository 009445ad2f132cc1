"""Gather many pieces into large aligned blocks of one file, filled by many threads at once.

A place is reserved in order, then filled, looked at again, and declared done by any thread in any order.
A block is handed to the sink when reserving has moved past it and all its places are done.

Invariants:
- The bytes between places are zero.
- ``reserve`` waits only for blocks whose places were all reserved before; as long as filling a place
  needs no lock that a reserving thread holds, there is no deadlock.
- After ``stop`` or a failed write every call raises, the waiting ones too.
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
"""Copied and looked at in one go: what is looked at is in a cache still. Shorter pieces let go of the GIL more often,
and the threads of a commit then wait for each other: with 256 KiB a saver that codes is slower (``async_wall``)."""


def copy_plain(source: memoryview, destination: memoryview) -> None:
    """Copy bytes; numpy releases the GIL for all but tiny ones."""
    np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))


def _without(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return the views without their first bytes."""
    while views and nbytes >= len(views[0]):
        nbytes -= len(views.pop(0))
    return [views[0][nbytes:], *views[1:]] if views else []


@dataclass(slots=True, eq=False)
class _Block:
    """A block being filled.

    Args:
        open_count: Places that are reserved in it and not yet done, and one more until it is sealed.
    """

    buffer: AlignedBuffer
    offset: int
    open_count: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Where reserved bytes will lie: ``offset`` in the file, and the pieces of blocks that hold them."""

    offset: int
    nbytes: int
    pieces: tuple[tuple[_Block, int, int], ...]


class BlockWriter:
    """Writes one pack through blocks of a pool.

    Args:
        sink: Where full blocks go; the writer finishes or closes it.
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
        """Where the next place begins if it needs no alignment: the bytes reserved so far."""
        return self._position

    def reserve(self, nbytes: int, *, align: int = 1) -> Reservation:
        """Take the next bytes of the file; waits for a free block where one is needed.

        Calls come one at a time, in the order of the file.

        Raises:
            UsageError: More bytes than the whole pool holds, so that waiting would never end.
            CkstoreError: An earlier write failed, or the writer was stopped.
        """
        gap_nbytes = -self._position % align
        start_block = (self._position + gap_nbytes) // self._pool.block_nbytes
        end_block = -(-(self._position + gap_nbytes + nbytes) // self._pool.block_nbytes)
        if end_block - start_block > self._pool.count:
            raise UsageError("a place must fit the buffers", where=f"{nbytes} bytes in a pool of {self._pool.nbytes}")
        self._skip(gap_nbytes)
        offset = self._position
        pieces = self._take(nbytes)
        return Reservation(offset, nbytes, tuple(pieces))

    def fill(
        self,
        place: Reservation,
        parts: Sequence[memoryview],
        *,
        begin: int = 0,
        watch: Callable[[memoryview], object] | None = None,
    ) -> None:
        """Copy the parts, which add up to the rest of the place, to where they belong; any thread.

        Args:
            place: Where they belong.
            parts: What to copy.
            begin: Bytes of the place to leave as they are, for whoever writes them later.
            watch: Called with every piece as it lies in the block, in order, while it is still in the cache: a
                checksum taken here costs a third of one taken afterwards.
        """
        self._check()
        assert begin + sum(part.nbytes for part in parts) == place.nbytes, "the parts do not fill their place"
        targets = _without(self.views(place), begin)
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

    def views(self, place: Reservation) -> list[memoryview]:
        """Return the bytes of the place as they will be written; valid until ``done``."""
        return [block.buffer.view[start:stop] for block, start, stop in place.pieces]

    def done(self, place: Reservation) -> None:
        """Declare the place filled for good; hands out the blocks that are complete by it."""
        self._check()
        for block, _, _ in place.pieces:
            self._close_one(block)

    def finish(self, *, align: int = PAGE_NBYTES) -> int:
        """Pad with zeros to ``align``, write what is left, and make it all durable; every place is done.

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
        assert not self._open, "finished while places were not done"
        self._sink.finish(total_nbytes)
        self._error = UsageError("the pack is finished", where=self.name)
        return total_nbytes

    def stop(self, error: BaseException | None = None) -> None:
        """Make every call raise from now on, waiting ones too; nothing is released yet."""
        with self._lock:
            if self._error is None:
                self._error = error or CkstoreError("the pack was given up", where=self.name)

    def abandon(self) -> None:
        """Stop, give all blocks back and close the sink; no thread may be filling any more."""
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
        raise CkstoreError("the pack was given up", where=self.name) from error

    def _skip(self, nbytes: int) -> None:
        """Reserve and fill zeros."""
        for block, start, stop in self._take(nbytes):
            block.buffer.view[start:stop] = bytes(stop - start)
            self._close_one(block)

    def _take(self, nbytes: int) -> list[tuple[_Block, int, int]]:
        """Reserve exactly the next bytes, and seal each block that is used up."""
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
        self._close_one(block)

    def _close_one(self, block: _Block) -> None:
        with self._lock:
            block.open_count -= 1
            is_complete = block.open_count == 0 and block in self._open
            if is_complete:
                self._open.discard(block)
        if is_complete:
            self._hand_out(block)

    def _hand_out(self, block: _Block) -> None:
        # Only the last block can be shorter than the others; then the position is final.
        nbytes = min(self._pool.block_nbytes, round_up(self._position - block.offset))
        try:
            self._sink.write(block.buffer, nbytes, block.offset)
        except BaseException as error:
            self.stop(error)
            raise
