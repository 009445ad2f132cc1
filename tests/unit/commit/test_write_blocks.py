"""Protects the blocks of commits: kept where that is wanted, never more than one commit has, never one in use."""

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
    """Return whether all, none (False) or some (None) of the pages of a block have memory, by proc(5)."""
    first, count = address // mmap.PAGESIZE, WRITE_BLOCK_NBYTES // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(8 * first)
        there = np.frombuffer(pages.read(8 * count), np.uint64) & np.uint64(PRESENT)
    return True if there.all() else None if there.any() else False


def addresses(pool):
    """Return where the blocks of a pool lie, in the order in which they are handed out."""
    buffers = [pool.acquire(0) for _ in range(pool.free_count)]
    for buffer in reversed(buffers):
        buffer.release()
    return [address_of(buffer.view) for buffer in buffers]


@pytest.fixture
def kept():
    return WriteBlocks(is_reused=True)


@pytest.fixture
def mapped(monkeypatch):
    """Blocks that were mapped, in order, as weak references; a block is alive while its array is."""
    found = []

    def noting(nbytes):
        array = np.frombuffer(map_block(nbytes), np.uint8)
        found.append(weakref.ref(array))
        return array.data

    monkeypatch.setattr(pipeline, "map_block", noting)
    return found


def alive(mapped):
    """Return the addresses of the mapped blocks that are alive."""
    arrays = [each() for each in mapped]
    return [array.__array_interface__["data"][0] for array in arrays if array is not None]


def test_kept_blocks_are_those_of_the_next_commit(kept):
    pool = kept.take(COUNT)
    before = addresses(pool)
    kept.give_back(pool)
    assert addresses(kept.take(COUNT)) == before
    assert not set(addresses(kept.take(COUNT))) & set(before), "they are taken already"


def test_blocks_that_are_given_back_are_nobodys_any_more(kept):
    pool = kept.take(COUNT)
    kept.give_back(pool)
    with pytest.raises(UsageError, match="closed"):
        pool.acquire(0)


def test_a_commit_of_fewer_blocks_frees_the_others_and_one_of_more_makes_the_missing(kept):
    pool = kept.take(COUNT)
    before = addresses(pool)
    kept.give_back(pool)
    fewer = kept.take(COUNT - 2)
    assert addresses(fewer) == before[: COUNT - 2]
    kept.give_back(fewer)
    more = kept.take(COUNT)
    assert addresses(more)[: COUNT - 2] == before[: COUNT - 2]
    assert more.free_count == COUNT


def test_memory_of_blocks_that_are_not_kept_is_given_back(kept, mapped):
    for blocks, counts in ((WriteBlocks(), (0, 0)), (kept, (COUNT, 1))):
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


def test_a_block_that_is_out_or_lost_is_not_kept(kept):
    pool = kept.take(COUNT)
    out, lost = pool.acquire(), pool.acquire()
    gone = {address_of(out.view), address_of(lost.view)}
    lost.discard()
    kept.give_back(pool)
    again = kept.take(COUNT)
    assert again.free_count == COUNT
    assert not gone & set(addresses(again))
    out.view[:1] = b"a"
    out.release()
    assert not gone & set(addresses(again))


def test_blocks_that_are_given_back_twice_are_kept_once(kept):
    pool = kept.take(COUNT)
    before = addresses(pool)
    kept.give_back(pool)
    kept.give_back(pool)
    assert addresses(kept.take(COUNT)) == before


def test_never_more_blocks_are_kept_than_a_commit_has(kept, mapped):
    pools = [kept.take(WRITE_BLOCKS), kept.take(WRITE_BLOCKS)]
    assert len(alive(mapped)) == 2 * WRITE_BLOCKS
    while pools:
        kept.give_back(pools.pop())
    assert len(alive(mapped)) == WRITE_BLOCKS


def test_warm_blocks_have_their_memory_before_they_are_wanted(kept, mapped):
    steps = kept.warm(COUNT, NBYTES)
    for count in range(1, COUNT + 1):
        next(steps)
        assert [has_memory(address) for address in alive(mapped)] == [True] * count
    assert next(steps, "over") == "over"
    warm = alive(mapped)
    pool = kept.take(COUNT)
    assert addresses(pool) == warm


@pytest.mark.parametrize(("nbytes", "count"), [(0, 2), (WRITE_BLOCK_NBYTES, 3), (1 << 62, COUNT)])
def test_as_many_blocks_are_warmed_as_a_state_fills(kept, mapped, nbytes, count):
    list(kept.warm(COUNT, nbytes))
    assert [has_memory(address) for address in alive(mapped)] == [True] * count
    assert kept.take(COUNT).free_count == COUNT


def test_blocks_that_are_kept_are_not_made_anew_to_be_warmed(kept):
    pool = kept.take(COUNT)
    before = addresses(pool)
    kept.give_back(pool)
    list(kept.warm(COUNT, NBYTES))
    assert addresses(kept.take(COUNT)) == before


def test_warming_touches_nothing_that_a_commit_has_taken(kept):
    steps = kept.warm(COUNT, NBYTES)
    next(steps)
    pool = kept.take(COUNT)
    buffers = [pool.acquire() for _ in range(COUNT)]
    for buffer in buffers:
        buffer.view[:] = b"\x07" * WRITE_BLOCK_NBYTES
    assert list(steps) == []
    assert all(bytes(buffer.view) == b"\x07" * WRITE_BLOCK_NBYTES for buffer in buffers)


def test_blocks_that_no_addresses_are_left_for_are_an_error_and_what_is_kept_stays_usable(kept, monkeypatch):
    next(kept.warm(COUNT, NBYTES))

    def refuse(nbytes):
        raise CapacityError("no address space for buffers")

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "map_block", refuse)
        with pytest.raises(CapacityError):
            list(kept.warm(COUNT, NBYTES))
        assert kept.take(1).free_count == 1
        with pytest.raises(CapacityError):
            kept.take(1)
    assert kept.take(COUNT).free_count == COUNT


def test_a_block_has_no_memory_before_it_is_used():
    block = map_block(WRITE_BLOCK_NBYTES)
    assert has_memory(address_of(block)) is False


def test_threads_and_write_blocks_fit_the_memory_of_the_policy():
    limits = Limits()
    assert ENCODE.fit_writing(Policy(threads=1), limits) == (1, WRITE_BLOCKS)
    least = Policy(threads=64, memory_nbytes_max=56 * MIB)
    threads, blocks = ENCODE.fit_writing(least, limits)
    assert (threads, blocks >= WRITE_BLOCKS_MIN) == (1, True)
    assert MemoryBudget(0, 100).fit_writing(Policy(threads=2), limits, spare_threads=1) == (1, 11)
