"""Protects prewarm: the saver maps and takes memory for later states in advance, without delaying other work."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ckstore.background import arena as arena_module
from ckstore.background import protocol
from ckstore.background.arena import UNIT_NBYTES, Arena
from ckstore.background.tickets import Questions
from ckstore.commit import pipeline
from ckstore.config import MIB, Limits, Policy
from ckstore.errors import CapacityError, MalformedError, SaverError
from ckstore.io.local import LocalBackend
from ckstore.store.memory_budget import ENCODE, WRITE_BLOCK_NBYTES
from support.saver_harness import SECONDS_MAX, noise, packs_nbytes, until

UNITS = 6
BLOCKS = 6
"""Write blocks."""
STATE_NBYTES = BLOCKS * WRITE_BLOCK_NBYTES


@pytest.fixture
def arena():
    made = Arena.create(slot_count=2)
    yield made
    made.close()


def mapped_nbytes():
    """Return how many bytes of all arenas are in this process's page tables."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_ours = "ckstore-arena" in line
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def memory_for(block_count):
    """Return the memory bound that gives a commit on one thread so many write blocks."""
    limits = Limits()
    for nbytes in range(56 * MIB, 256 * MIB, MIB):
        if ENCODE.fit_writing(Policy(threads=1, memory_nbytes_max=nbytes), limits) == (1, block_count):
            return nbytes
    raise AssertionError("there is none")


def policy_of(block_count):
    """Return a policy that gives commits so many write blocks."""
    return Policy(compression="none", threads=1, memory_nbytes_max=memory_for(block_count))


# The arena


def test_map_ahead_maps_populated_memory_only(arena):
    slot = arena.slots[0]
    slot.reserve(UNITS * UNIT_NBYTES)
    slot.populate(0, 2 * UNIT_NBYTES)
    slot.populate(4 * UNIT_NBYTES, UNIT_NBYTES)
    taken = os.fstat(arena.fd).st_blocks
    other = Arena.attach(os.dup(arena.fd))
    before = mapped_nbytes()
    assert list(other.slots[0].map_ahead()) == [True, True, False, False, True, False]
    assert mapped_nbytes() >= before + 3 * UNIT_NBYTES
    assert os.fstat(arena.fd).st_blocks == taken
    assert not list(other.slots[1].map_ahead()), "that slot has no room reserved"
    other.close()


def test_map_ahead_stops_on_old_kernels(arena, monkeypatch):
    slot = arena.slots[0]
    slot.reserve(UNITS * UNIT_NBYTES)
    slot.populate(0, UNITS * UNIT_NBYTES)
    real = arena_module.libc.madvise
    refusing = SimpleNamespace(madvise=lambda *args: -1 if args[2] == 22 else real(*args))
    refusing.mincore = arena_module.libc.mincore
    slot.view(5 * UNIT_NBYTES, 1)[:] = b"a"
    with monkeypatch.context() as patched:
        patched.setattr(arena_module, "libc", refusing)
        assert not list(slot.map_ahead())
    other = Arena.attach(os.dup(arena.fd))
    assert bytes(other.slots[0].view(5 * UNIT_NBYTES, 1)) == b"a"
    other.close()


# Requests to a saver


@pytest.fixture
def blocks(monkeypatch):
    """Track the write blocks that are mapped from now on and still exist."""
    return Blocks(monkeypatch)


class Blocks:
    """Track every write block that is mapped."""

    def __init__(self, monkeypatch):
        self._real, self._mapped = pipeline.map_block, []
        self.on_map = lambda count: None
        monkeypatch.setattr(pipeline, "map_block", self._map)

    def _map(self, nbytes):
        self.on_map(len(self._mapped))
        block = self._real(nbytes)
        address = np.frombuffer(block, np.uint8).ctypes.data
        # A live view of a part keeps the whole block.
        self._mapped.append((weakref.ref(block.obj), address, nbytes))
        return block

    @property
    def mapped_count(self):
        """How many were mapped, including those that were freed."""
        return len(self._mapped)

    @property
    def living_count(self):
        return sum(reference() is not None for reference, _, _ in self._mapped)

    @property
    def nbytes_taken(self):
        """How many bytes of memory they have."""
        total, libc = 0, ctypes.CDLL(None)
        for reference, address, nbytes in self._mapped:
            if reference() is not None:
                pages = ctypes.create_string_buffer(nbytes // mmap.PAGESIZE)
                assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
                total += sum(page & 1 for page in pages.raw) * mmap.PAGESIZE
        return total


def warm(served, block_count=BLOCKS):
    """Ask a saver to take memory in advance, and wait for its answer."""
    question = served.ask(protocol.Warm, block_count=block_count, nbytes=STATE_NBYTES)
    return served.hear(protocol.Answer, question=question)


def test_answer_comes_after_mapping_and_taking_blocks(served, blocks):
    slot = served.arena.slots[0]
    slot.reserve(UNITS * UNIT_NBYTES)
    slot.populate(0, UNITS * UNIT_NBYTES)
    before = mapped_nbytes()
    warm(served)
    assert mapped_nbytes() >= before + UNITS * UNIT_NBYTES
    assert blocks.nbytes_taken == BLOCKS * WRITE_BLOCK_NBYTES
    assert served.commit(noise(1, 16 * MIB), 1).seq == 0


def test_warmed_blocks_are_used_until_released(served, blocks):
    warm(served)
    for step in (1, 2):
        served.commit(noise(step, 24 * MIB), step, policy=policy_of(BLOCKS))
        assert (blocks.mapped_count, blocks.living_count) == (BLOCKS, BLOCKS), step
    served.say(protocol.Forget())
    until(lambda: blocks.living_count == 0, "the release of the blocks")


def test_lease_release_frees_the_blocks(served, blocks):
    warm(served)
    served.release_lease()
    assert (blocks.mapped_count, blocks.living_count) == (BLOCKS, 0)


def test_commits_with_fewer_blocks_share_them(served, blocks):
    few, many = 3, 12
    for step, count in enumerate((many, few, many, few)):
        served.commit(noise(step, MIB), step, policy=policy_of(count))
        assert blocks.living_count == count
    assert blocks.mapped_count == many + (many - few)


def test_blocks_of_a_failed_commit_are_reused(served, blocks):
    policy = policy_of(BLOCKS)
    for step in range(4):
        begun = served.begin(noise(step, 24 * MIB), step, policy=policy).stage(units=3)
        until(lambda: packs_nbytes(served.address) > 7 * MIB, "the first written bytes")
        begun.abort()
        with pytest.raises(SaverError, match="given up"):
            begun.wait()
    served.commit(noise(9, 24 * MIB), 9, policy=policy)
    assert (blocks.mapped_count, blocks.living_count) == (BLOCKS, BLOCKS)


@pytest.mark.parametrize("block_count", [0, 1 << 40])
def test_invalid_block_count_is_malformed(served, caplog, block_count):
    served.ask(protocol.Warm, block_count=block_count, nbytes=STATE_NBYTES)
    assert served.code() == MalformedError.exit_code
    assert "the requested number of write blocks is invalid" in caplog.text


def test_states_are_mapped_without_memory_for_blocks(served, blocks):
    def refuse(count):
        raise CapacityError("no address space for buffers")

    blocks.on_map = refuse
    slot = served.arena.slots[1]
    slot.reserve(2 * UNIT_NBYTES)
    slot.populate(0, 2 * UNIT_NBYTES)
    before = mapped_nbytes()
    warm(served)
    assert mapped_nbytes() >= before + 2 * UNIT_NBYTES


def test_slot_without_addresses_is_skipped(served):
    def refuse():
        raise CapacityError("no addresses")

    served.savers_arena.slots[0].refresh = refuse
    slot = served.arena.slots[1]
    slot.reserve(2 * UNIT_NBYTES)
    slot.populate(0, 2 * UNIT_NBYTES)
    before = mapped_nbytes()
    warm(served)
    assert mapped_nbytes() >= before + 2 * UNIT_NBYTES


# It stops when there is other work


SAID = {"forget": protocol.Forget(), "begin": None, "quit": protocol.Quit()}


def say(served, said):
    """Send a message while the saver takes memory, and wait until its arrival is visible."""
    if said is None:
        served.begin(noise(1, MIB), 1, start_delay_ms=2000)
    else:
        served.say(said)
        served.settle()


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_taking_blocks_stops_for_other_work(served, blocks, said):
    def speak_at_the_second(count):
        if count == 1:
            say(served, said)
        elif count > 1:
            time.sleep(0.02)

    blocks.on_map = speak_at_the_second
    question = served.ask(protocol.Warm, block_count=12, nbytes=12 * WRITE_BLOCK_NBYTES)
    served.hear(protocol.Answer, question=question)
    # A delayed message is read some moments after it was sent.
    assert blocks.mapped_count < 12 if said is None else blocks.mapped_count == 2


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_mapping_stops_for_other_work(served, said):
    steps = []

    def map_on_and_on():
        deadline = time.monotonic() + SECONDS_MAX / 2
        while time.monotonic() < deadline:
            steps.append("unit")
            if len(steps) == 2:
                say(served, said)
            elif len(steps) > 2:
                time.sleep(0.005)
            yield True
        steps.append("the end")

    served.savers_arena.slots[0].map_ahead = map_on_and_on
    warm(served, 3)
    assert set(steps) == {"unit"}
    assert said is None or len(steps) == 2


# Before the first state


def test_engine_is_logged_before_ready(open_served, caplog):
    with caplog.at_level("DEBUG", "ckstore"):
        open_served().hear(protocol.Ready)
        assert "packs are moved by" in caplog.text


def test_failed_open_reports_the_reason(open_served, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(LocalBackend, "engine_name", property(refuse))
    served = open_served()
    assert served.hear(protocol.Failed, ticket=0).kind == "RuntimeError"
    assert served.code() == 1


# The trainer's side


def test_prewarm_requests_the_blocks_of_the_policy(fake_saver_store, savers):
    few = Policy(threads=1, memory_nbytes_max=memory_for(BLOCKS))
    fake_saver_store.prewarm(noise(1), policy=few)
    block_count, nbytes = savers[0].warmed
    assert block_count == BLOCKS
    assert noise(1)["w0"].nbytes <= nbytes < 2 * noise(1)["w0"].nbytes + MIB


def test_prewarm_does_not_wait_for_a_commit(fake_saver_store, savers):
    fake_saver_store.prewarm(noise(1))
    assert savers[0].calls == ["wait ready", "warm"]
    savers[0].is_quick = False
    fake_saver_store.commit_async(noise(1), 1)
    fake_saver_store.prewarm(noise(1))
    assert savers[0].calls == ["wait ready", "warm", "begin", "staged", "wait ready"]


def test_one_answer_covers_earlier_requests():
    answers = Questions()
    (one, first), (two, second), (three, third) = answers.ask(), answers.ask(), answers.ask()
    assert (one, two, three) == (1, 2, 3)
    answers.take(2)
    assert [event.is_set() for event in (first, second, third)] == [True, True, False]
    answers.take(1)
    answers.end()
    assert third.is_set()
    assert answers.ask()[1].is_set()
    for number in (0, 5):
        with pytest.raises(MalformedError, match="answered a question that was not asked"):
            answers.take(number)
