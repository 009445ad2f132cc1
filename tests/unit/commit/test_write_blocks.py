"""Protects write blocks: they are kept if requested, at most one commit's number, and never while in use."""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path

import numpy as np
import pytest

from ckstore.commit import pipeline
from ckstore.commit.pipeline import WriteBlocks
from ckstore.config import MIB, Limits, Policy
from ckstore.errors import CapacityError, UsageError
from ckstore.io.buffers import map_block
from ckstore.store.memory_budget import ENCODE, WRITE_BLOCK_NBYTES, WRITE_BLOCKS, WRITE_BLOCKS_MIN, MemoryBudget

COUNT = 4
NBYTES = COUNT * WRITE_BLOCK_NBYTES
PRESENT = 1 << 63


def address_of(view):
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]


def has_memory(address):
    """Return whether all (True), none (False) or some (None) of a block's pages have memory, by proc(5)."""
    first, count = address // mmap.PAGESIZE, WRITE_BLOCK_NBYTES // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(8 * first)
        there = np.frombuffer(pages.read(8 * count), np.uint64) & np.uint64(PRESENT)
    return True if there.all() else None if there.any() else False


def addresses(pool):
    """Return the addresses of a pool's blocks, in the order in which they are taken."""
    buffers = [pool.acquire(0) for _ in range(pool.free_count)]
    for buffer in reversed(buffers):
        buffer.release()
    return [address_of(buffer.view) for buffer in buffers]


@pytest.fixture
def kept_blocks():
    return WriteBlocks(is_reused=True)


@pytest.fixture
def mapped(monkeypatch):
    """Weak references to the blocks that are mapped, in order. A block lives as long as its array."""
    found = []

    def recorded_map(nbytes):
        array = np.frombuffer(map_block(nbytes), np.uint8)
        found.append(weakref.ref(array))
        return array.data

    monkeypatch.setattr(pipeline, "map_block", recorded_map)
    return found


def alive(mapped):
    """Return the addresses of the mapped blocks that are alive."""
    arrays = [each() for each in mapped]
    return [array.__array_interface__["data"][0] for array in arrays if array is not None]


def test_next_commit_uses_kept_blocks(kept_blocks):
    pool = kept_blocks.take(COUNT)
    before = addresses(pool)
    kept_blocks.give_back(pool)
    assert addresses(kept_blocks.take(COUNT)) == before
    assert not set(addresses(kept_blocks.take(COUNT))) & set(before), "they are in use"


def test_returned_blocks_are_not_usable(kept_blocks):
    pool = kept_blocks.take(COUNT)
    kept_blocks.give_back(pool)
    with pytest.raises(UsageError, match="closed"):
        pool.acquire(0)


def test_kept_blocks_follow_the_block_count(kept_blocks):
    pool = kept_blocks.take(COUNT)
    before = addresses(pool)
    kept_blocks.give_back(pool)
    fewer = kept_blocks.take(COUNT - 2)
    assert addresses(fewer) == before[: COUNT - 2]
    kept_blocks.give_back(fewer)
    more = kept_blocks.take(COUNT)
    assert addresses(more)[: COUNT - 2] == before[: COUNT - 2]
    assert more.free_count == COUNT


def test_blocks_not_kept_are_freed(kept_blocks, mapped):
    for blocks, counts in ((WriteBlocks(), (0, 0)), (kept_blocks, (COUNT, 1))):
        mapped.clear()
        pool = blocks.take(COUNT)
        blocks.give_back(pool)
        del pool
        assert len(alive(mapped)) == counts[0]
        pool = blocks.take(1)
        blocks.give_back(pool)
        del pool
        assert len(alive(mapped)) == counts[1]
        blocks.release()
        assert alive(mapped) == []


def test_block_in_use_or_lost_is_not_kept(kept_blocks):
    pool = kept_blocks.take(COUNT)
    out, lost = pool.acquire(), pool.acquire()
    gone = {address_of(out.view), address_of(lost.view)}
    lost.discard()
    kept_blocks.give_back(pool)
    again = kept_blocks.take(COUNT)
    assert again.free_count == COUNT
    assert not gone & set(addresses(again))
    out.view[:1] = b"a"
    out.release()
    assert not gone & set(addresses(again))


def test_block_returned_twice_is_kept_once(kept_blocks):
    pool = kept_blocks.take(COUNT)
    before = addresses(pool)
    kept_blocks.give_back(pool)
    kept_blocks.give_back(pool)
    assert addresses(kept_blocks.take(COUNT)) == before


def test_kept_blocks_are_at_most_one_commits(kept_blocks, mapped):
    pools = [kept_blocks.take(WRITE_BLOCKS), kept_blocks.take(WRITE_BLOCKS)]
    assert len(alive(mapped)) == 2 * WRITE_BLOCKS
    while pools:
        kept_blocks.give_back(pools.pop())
    assert len(alive(mapped)) == WRITE_BLOCKS


def test_warm_blocks_have_memory(kept_blocks, mapped):
    steps = kept_blocks.warm(COUNT, NBYTES)
    for count in range(1, COUNT + 1):
        next(steps)
        assert [has_memory(address) for address in alive(mapped)] == [True] * count
    assert next(steps, "over") == "over"
    warm = alive(mapped)
    pool = kept_blocks.take(COUNT)
    assert addresses(pool) == warm


@pytest.mark.parametrize(("nbytes", "count"), [(0, 2), (WRITE_BLOCK_NBYTES, 3), (1 << 62, COUNT)])
def test_warmed_blocks_fit_the_state(kept_blocks, mapped, nbytes, count):
    list(kept_blocks.warm(COUNT, nbytes))
    assert [has_memory(address) for address in alive(mapped)] == [True] * count
    assert kept_blocks.take(COUNT).free_count == COUNT


def test_warming_reuses_kept_blocks(kept_blocks):
    pool = kept_blocks.take(COUNT)
    before = addresses(pool)
    kept_blocks.give_back(pool)
    list(kept_blocks.warm(COUNT, NBYTES))
    assert addresses(kept_blocks.take(COUNT)) == before


def test_warming_does_not_touch_blocks_in_use(kept_blocks):
    steps = kept_blocks.warm(COUNT, NBYTES)
    next(steps)
    pool = kept_blocks.take(COUNT)
    buffers = [pool.acquire() for _ in range(COUNT)]
    for buffer in buffers:
        buffer.view[:] = b"\x07" * WRITE_BLOCK_NBYTES
    assert list(steps) == []
    assert all(bytes(buffer.view) == b"\x07" * WRITE_BLOCK_NBYTES for buffer in buffers)


def test_failed_mapping_leaves_kept_blocks_usable(kept_blocks, monkeypatch):
    next(kept_blocks.warm(COUNT, NBYTES))

    def refuse(nbytes):
        raise CapacityError("no address space for buffers")

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "map_block", refuse)
        with pytest.raises(CapacityError):
            list(kept_blocks.warm(COUNT, NBYTES))
        assert kept_blocks.take(1).free_count == 1
        with pytest.raises(CapacityError):
            kept_blocks.take(1)
    assert kept_blocks.take(COUNT).free_count == COUNT


def test_unused_block_has_no_memory():
    block = map_block(WRITE_BLOCK_NBYTES)
    assert has_memory(address_of(block)) is False


def test_threads_and_blocks_fit_the_memory_policy():
    limits = Limits()
    assert ENCODE.fit_writing(Policy(threads=1), limits) == (1, WRITE_BLOCKS)
    least = Policy(threads=64, memory_nbytes_max=56 * MIB)
    threads, blocks = ENCODE.fit_writing(least, limits)
    assert (threads, blocks >= WRITE_BLOCKS_MIN) == (1, True)
    assert MemoryBudget(0, 100).fit_writing(Policy(threads=2), limits, spare_threads=1) == (1, 11)
