"""Protects the blocks of commits: kept where that is wanted, never two sets of them, never one that is in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckstore import write_blocks
from ckstore.config import MIB, Limits, Policy
from ckstore.errors import CapacityError, UsageError
from ckstore.io.buffers import BufferPool
from ckstore.write_blocks import WRITE_BLOCK_NBYTES, WRITE_BLOCKS, WRITE_BLOCKS_MIN, WriteBlocks, threads_and_blocks

COUNT = 4
NBYTES = COUNT * WRITE_BLOCK_NBYTES


def own_nbytes():
    """Return the memory of its own that this process has."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


def is_closed(pool):
    try:
        pool.acquire(0).release()
    except UsageError:
        return True
    return False


def test_kept_blocks_are_those_of_the_next_commit():
    blocks = WriteBlocks(is_kept=True)
    pool = blocks.take(COUNT)
    blocks.give_back(pool)
    assert blocks.take(COUNT) is pool
    assert blocks.take(COUNT) is not pool, "they are taken already"


def test_blocks_that_are_not_kept_give_their_memory_back():
    blocks = WriteBlocks()
    pool = blocks.take(COUNT)
    blocks.give_back(pool)
    assert is_closed(pool)
    assert blocks.take(COUNT) is not pool


def test_there_are_never_two_sets_of_blocks(monkeypatch):
    blocks = WriteBlocks(is_kept=True)
    few, many = blocks.take(COUNT), blocks.take(2 * COUNT)
    blocks.give_back(few)
    blocks.give_back(many)
    assert is_closed(many), "others are kept already"

    def refuse(*_):
        assert is_closed(few), "given back before others are taken"
        raise CapacityError("no address space for buffers")

    monkeypatch.setattr(write_blocks, "BufferPool", refuse)
    with pytest.raises(CapacityError):
        blocks.take(2 * COUNT)


def test_blocks_of_which_one_is_out_or_lost_are_not_kept():
    blocks = WriteBlocks(is_kept=True)
    pool = blocks.take(COUNT)
    out = pool.acquire()
    blocks.give_back(pool)
    assert is_closed(pool)
    out.release()
    pool = blocks.take(COUNT)
    pool.acquire().discard()
    blocks.give_back(pool)
    assert is_closed(pool)
    assert blocks.take(COUNT).free_count == COUNT


def test_blocks_that_are_given_back_twice_stay_in_use():
    blocks = WriteBlocks(is_kept=True)
    pool = blocks.take(COUNT)
    blocks.give_back(pool)
    blocks.give_back(pool)
    assert not is_closed(pool)
    assert blocks.take(COUNT) is pool


def test_warm_blocks_have_their_memory_before_they_are_wanted():
    blocks = WriteBlocks(is_kept=True)
    before = own_nbytes()
    steps = blocks.warm(COUNT, NBYTES)
    for index in range(1, COUNT + 1):
        next(steps)
        assert own_nbytes() > before + index * WRITE_BLOCK_NBYTES - MIB
    assert next(steps, "over") == "over"
    pool = blocks.take(COUNT)
    warm = own_nbytes()
    for buffer in [pool.acquire() for _ in range(COUNT)]:
        buffer.view[:] = bytes([7]) * WRITE_BLOCK_NBYTES
        buffer.release()
    assert own_nbytes() < warm + WRITE_BLOCK_NBYTES, "no block took memory anew"
    blocks.give_back(pool)
    del buffer
    blocks.let_go()
    assert is_closed(pool)


def test_a_small_state_has_few_blocks_warmed():
    blocks = WriteBlocks(is_kept=True)
    before = own_nbytes()
    list(blocks.warm(COUNT, 0))
    assert before + 2 * WRITE_BLOCK_NBYTES - MIB < own_nbytes() < before + 3 * WRITE_BLOCK_NBYTES
    assert blocks.take(COUNT).free_count == COUNT


def test_warming_that_is_broken_off_leaves_blocks_that_are_whole():
    blocks = WriteBlocks(is_kept=True)
    next(blocks.warm(COUNT, NBYTES))
    pool = blocks.take(COUNT)
    assert pool.free_count == COUNT
    blocks.give_back(pool)
    list(blocks.warm(COUNT, NBYTES))
    assert blocks.take(COUNT) is pool


def test_the_block_that_is_handed_out_first_is_populated_first():
    pool = BufferPool(16 * MIB, 2)
    next(pool.populate())
    before = own_nbytes()
    pool.acquire().view[:] = bytes(16 * MIB)
    assert own_nbytes() < before + 20 * MIB, "only what was made here took memory"


def test_threads_and_blocks_fit_the_memory_of_the_policy():
    limits = Limits()
    assert threads_and_blocks(Policy(threads=1), limits) == (1, WRITE_BLOCKS)
    least = Policy(threads=64, memory_nbytes_max=56 * MIB)
    threads, blocks = threads_and_blocks(least, limits)
    assert (threads, blocks >= WRITE_BLOCKS_MIN) == (1, True)
    many = 100 * MIB
    assert threads_and_blocks(Policy(threads=2), limits, spare_threads=1, nbytes_a_thread=many) == (1, 11)
