"""Read a pack from afar in a few long requests at once, and write it block by block as it comes.

Invariants:
- Every block of a pack is written once, whole; a span that breaks off goes on where it was.
- Whatever fails, nothing is read or written any more when this returns, and every buffer is given back.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckstore.config import MIB
from ckstore.io.backend import PackSink, Streaming
from ckstore.io.buffers import AlignedBuffer, BufferPool
from ckstore.latch import Latch
from ckstore.pool import ask_at_once

BLOCK_NBYTES = 4 * MIB
SPAN_NBYTES = 512 * MIB
"""One request. Some servers read an object whole for each range of it; large packs still come in several at once."""

SPANS_AT_ONCE = 3


def send_spans(file: Streaming, nbytes: int, sink: PackSink, pool: BufferPool, *, at_once: int = SPANS_AT_ONCE) -> None:
    """Read a whole pack, and hand it to a sink in blocks of ``BLOCK_NBYTES``; the last one may be shorter.

    Args:
        file: The pack.
        nbytes: Its size, a multiple of 4096.
        sink: Where it goes.
        pool: Blocks; more of them than spans that are read at once.
        at_once: How many spans.
    """
    stop = Latch()

    def send(begin: int) -> None:
        count = min(SPAN_NBYTES, nbytes - begin)
        _send_span(file.stream_at(begin, count, piece_nbytes=BLOCK_NBYTES), begin, sink, pool, stop)

    begins = range(0, nbytes, SPAN_NBYTES)
    for _ in ask_at_once(send, begins, count_max=at_once, name="ckstore-copy", on_stop=stop.set):
        pass


def _send_span(pieces: Iterable[memoryview], offset: int, sink: PackSink, pool: BufferPool, stop: Latch) -> None:
    block: AlignedBuffer | None = None
    used = 0
    try:
        for whole in pieces:
            piece = whole
            while len(piece):
                if stop.is_set():
                    return
                block = block or pool.acquire()
                count = min(len(piece), BLOCK_NBYTES - used)
                block.view[used : used + count] = piece[:count]
                used, piece = used + count, piece[count:]
                if used == BLOCK_NBYTES:
                    full, block = block, None
                    sink.write(full, used, offset)
                    offset, used = offset + used, 0
        if block is not None:
            full, block = block, None
            sink.write(full, used, offset)
    finally:
        if block is not None:
            block.release()
