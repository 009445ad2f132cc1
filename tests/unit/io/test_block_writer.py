"""Protects the block writer: every byte at its reserved offset, zeros between, no deadlock, no lost buffer."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckstore.errors import BackendError, CapacityError, CkstoreError, UsageError
from ckstore.io.block_writer import BlockWriter
from ckstore.io.buffers import BufferPool
from ckstore.io.memory import MemoryBackend

PAGE = 4096
BLOCK = 4 * PAGE


class SlowSink:
    """A sink that holds blocks until released, and may fail."""

    name = "slow"

    def __init__(self):
        self.blocks = []
        self.error = None
        self.is_closed = False
        self.total = None

    def write(self, buffer, nbytes, offset):
        if self.error is not None:
            buffer.release()
            raise self.error
        self.blocks.append((buffer, nbytes, offset))

    def finish(self, nbytes):
        self.total = nbytes

    def close(self):
        self.is_closed = True


@pytest.fixture
def pool():
    with BufferPool(BLOCK, 4) as pool:
        # Buffers contain old data, which must not get into a pack.
        blocks = [pool.acquire() for _ in range(4)]
        for block in blocks:
            block.view[:] = b"\xaa" * BLOCK
            block.release()
        yield pool


def put(writer, content, align=1):
    place = writer.reserve(len(content), align=align)
    writer.fill(place, [memoryview(content)])
    writer.done(place)
    return place


def test_gaps_and_padding_are_zero(pool):
    backend = MemoryBackend()
    writer = BlockWriter(backend.create_pack("x", nbytes_expected=0), pool)
    first = put(writer, b"\xff" * 10)
    second = put(writer, b"\xee" * 10, align=64)
    third = put(writer, b"\xdd" * 5, align=PAGE)
    assert [first.offset, second.offset, third.offset] == [0, 64, PAGE]
    assert writer.finish() == 2 * PAGE
    wanted = b"\xff" * 10 + bytes(54) + b"\xee" * 10 + bytes(PAGE - 74) + b"\xdd" * 5 + bytes(PAGE - 5)
    assert backend.read_bytes("x", nbytes_max=1 << 20) == wanted


def test_finish_can_end_a_file_anywhere(pool):
    backend = MemoryBackend()
    writer = BlockWriter(backend.create_pack("x", nbytes_expected=0), pool)
    put(writer, b"abc")
    assert writer.finish(align=1) == 3
    assert backend.read_bytes("x", nbytes_max=100) == b"abc"


def test_file_may_end_with_a_block_or_be_empty(pool):
    backend = MemoryBackend()
    for name, nbytes in (("full", 2 * BLOCK), ("empty", 0)):
        writer = BlockWriter(backend.create_pack(name, nbytes_expected=0), pool)
        put(writer, b"z" * nbytes)
        assert writer.finish() == nbytes
        assert backend.read_bytes(name, nbytes_max=1 << 20) == b"z" * nbytes
    assert pool.free_count == 4


def test_parts_are_joined_across_blocks(pool):
    backend = MemoryBackend()
    writer = BlockWriter(backend.create_pack("x", nbytes_expected=0), pool)
    put(writer, bytes(BLOCK - 100))
    place = writer.reserve(BLOCK + 200)
    parts = [b"a" * 50, b"", b"b" * (BLOCK + 100), b"c" * 50]
    writer.fill(place, [memoryview(part) for part in parts])
    assert b"".join(writer.views(place)) == b"".join(parts)
    assert len(writer.views(place)) == 3
    writer.done(place)
    writer.finish()
    assert backend.read_bytes("x", nbytes_max=1 << 20)[BLOCK - 100 : 2 * BLOCK + 100] == b"".join(parts)


def test_block_is_written_after_all_its_slots_are_done(pool):
    sink = SlowSink()
    writer = BlockWriter(sink, pool)
    first, second = writer.reserve(PAGE), writer.reserve(BLOCK)
    writer.done(second)
    assert sink.blocks == []
    writer.done(first)
    assert [(nbytes, offset) for _, nbytes, offset in sink.blocks] == [(BLOCK, 0)]


def test_many_threads_fill_one_pack_with_few_buffers(pool):
    backend = MemoryBackend()
    writer = BlockWriter(backend.create_pack("x", nbytes_expected=0), pool)
    source = random.Random(7)
    pieces = [source.randbytes(source.randrange(2 * BLOCK)) for _ in range(300)]
    places = [None] * len(pieces)
    ordered = threading.Lock()
    order = iter(range(len(pieces)))

    def work():
        while True:
            with ordered:
                index = next(order, None)
                if index is None:
                    return
                places[index] = writer.reserve(len(pieces[index]), align=64)
            writer.fill(places[index], [memoryview(pieces[index])])
            assert b"".join(writer.views(places[index])) == pieces[index]
            writer.done(places[index])

    with ThreadPoolExecutor(6) as threads:
        for future in [threads.submit(work) for _ in range(6)]:
            future.result(timeout=60)
    writer.finish()
    content = backend.read_bytes("x", nbytes_max=1 << 30)
    for place, piece in zip(places, pieces, strict=True):
        assert content[place.offset : place.offset + len(piece)] == piece
    assert pool.free_count == 4


def test_slot_larger_than_the_pool_is_refused(pool):
    writer = BlockWriter(SlowSink(), pool)
    with pytest.raises(UsageError):
        writer.reserve(4 * BLOCK + 1)
    writer.abandon()


def test_stop_wakes_waiting_threads(pool):
    writer = BlockWriter(SlowSink(), pool)
    writer.reserve(4 * BLOCK)
    threading.Timer(0.05, writer.stop).start()
    with pytest.raises(CkstoreError, match="was cancelled"):
        writer.reserve(1)
    writer.abandon()
    assert pool.free_count == 4


def test_failed_write_is_raised_by_every_later_call(pool):
    sink = SlowSink()
    sink.error = CapacityError("full")
    writer = BlockWriter(sink, pool)
    place = writer.reserve(BLOCK)
    with pytest.raises(CapacityError):
        writer.done(place)
    for call in (lambda: writer.reserve(1), lambda: writer.fill(place, []), writer.finish):
        with pytest.raises(CapacityError):
            call()
    writer.abandon()
    assert sink.is_closed
    assert sink.total is None
    assert pool.free_count == 4


def test_unexpected_sink_error_stops_the_writer(pool):
    sink = SlowSink()
    sink.error = BackendError("disk")
    writer = BlockWriter(sink, pool)
    with pytest.raises(BackendError):
        writer.done(writer.reserve(2 * BLOCK))
    writer.abandon()
    assert pool.free_count == 4


def test_finish_with_an_open_slot_is_a_bug(pool):
    writer = BlockWriter(SlowSink(), pool)
    writer.reserve(10)
    with pytest.raises(AssertionError):
        writer.finish()
    writer.abandon()


def test_parts_that_do_not_fit_their_slot_are_a_bug(pool):
    writer = BlockWriter(SlowSink(), pool)
    place = writer.reserve(10)
    with pytest.raises(AssertionError):
        writer.fill(place, [memoryview(b"123")])
    writer.abandon()
