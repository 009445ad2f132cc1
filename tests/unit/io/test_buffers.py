"""Protects buffer pools: blocks are aligned, bounded and reusable, and never reused while the kernel uses them."""

import ctypes
import threading

import pytest

from ckstore.errors import CapacityError, UsageError
from ckstore.io.buffers import BufferPool

PAGE = 4096


def test_every_block_starts_on_a_page():
    with BufferPool(3 * PAGE, 5) as pool:
        blocks = [pool.acquire() for _ in range(5)]
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(block.view)) for block in blocks]
        assert [address % PAGE for address in addresses] == [0] * 5
        assert len(set(addresses)) == 5
        assert pool.nbytes == 15 * PAGE


def test_blocks_do_not_overlap():
    with BufferPool(PAGE, 3) as pool:
        blocks = [pool.acquire() for _ in range(3)]
        for index, block in enumerate(blocks):
            block.view[:] = bytes([index + 1]) * PAGE
        assert all(block.view == bytes([index + 1]) * PAGE for index, block in enumerate(blocks))


def test_at_most_count_blocks_are_in_use():
    with BufferPool(PAGE, 2) as pool:
        first, _ = pool.acquire(), pool.acquire()
        assert pool.try_acquire() is None
        with pytest.raises(CapacityError):
            pool.acquire(timeout=0.01)
        first.release()
        assert pool.acquire(timeout=0) is first


def test_waiting_ends_when_a_block_is_released():
    with BufferPool(PAGE, 1) as pool:
        block = pool.acquire()
        threading.Timer(0.05, block.release).start()
        assert pool.acquire(timeout=60) is block


def test_last_released_block_is_reused_first():
    with BufferPool(PAGE, 3) as pool:
        first, second = pool.acquire(), pool.acquire()
        second.release()
        first.release()
        assert pool.acquire() is first


def test_closing_ends_waiting_with_an_error():
    pool = BufferPool(PAGE, 1)
    block = pool.acquire()
    threading.Timer(0.05, pool.close).start()
    with pytest.raises(UsageError):
        pool.acquire(timeout=60)
    block.view[0] = 1
    block.release()


def test_block_released_twice_is_a_bug():
    with BufferPool(PAGE, 1) as pool:
        block = pool.acquire()
        block.release()
        with pytest.raises(AssertionError):
            block.release()


def test_discarded_block_is_never_reused():
    with BufferPool(PAGE, 2) as pool:
        lost, kept = pool.acquire(), pool.acquire()
        lost.discard()
        kept.release()
        assert pool.acquire() is kept
        assert pool.try_acquire() is None
        kept.discard()
        with pytest.raises(CapacityError):
            pool.acquire(timeout=60)


@pytest.mark.parametrize(("block_nbytes", "count"), [(0, 1), (1000, 1), (PAGE, 0), (-PAGE, 1)])
def test_impossible_pools_are_refused(block_nbytes, count):
    with pytest.raises(UsageError):
        BufferPool(block_nbytes, count)


def test_too_large_a_pool_is_a_capacity_error():
    with pytest.raises(CapacityError):
        BufferPool(1 << 50, 1 << 10)
