"""Memory of states to come is mapped by the saver before they come: that takes none, and keeps nobody waiting."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from rig import SECONDS_MAX, Desk, noise, until

import ckstore
from ckstore.config import MIB
from ckstore.errors import MalformedError
from ckstore.saver import arena as arena_module
from ckstore.saver.arena import UNIT_NBYTES, Arena
from ckstore.saver.tickets import Answers

UNITS = 6


@pytest.fixture
def arena():
    made = Arena.create(slot_count=2)
    yield made
    made.close()


@pytest.fixture
def address(folder):
    ckstore.open(folder).close()
    return folder


def mapped_nbytes(pid):
    """Return how much of an arena is in the page tables of a process."""
    total, is_ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_ours = "ckstore-arena" in line
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_what_was_taken_is_mapped_and_what_was_not_is_not_taken(arena):
    slot = arena.slots[0]
    slot.reserve(UNITS * UNIT_NBYTES)
    slot.populate(0, 2 * UNIT_NBYTES)
    slot.populate(4 * UNIT_NBYTES, UNIT_NBYTES)
    taken = os.fstat(arena.fd).st_blocks
    other = Arena.attach(os.dup(arena.fd))
    before = mapped_nbytes(os.getpid())
    assert len(list(other.slots[0].map_ahead())) == 3
    assert mapped_nbytes(os.getpid()) >= before + 3 * UNIT_NBYTES
    assert os.fstat(arena.fd).st_blocks == taken
    assert not list(other.slots[1].map_ahead()), "nobody has made room there"
    other.close()


def test_kernels_that_cannot_map_ahead_map_when_it_is_read(arena, monkeypatch):
    slot = arena.slots[0]
    slot.reserve(UNITS * UNIT_NBYTES)
    slot.populate(0, UNITS * UNIT_NBYTES)
    real = arena_module._libc.madvise
    refusing = SimpleNamespace(madvise=lambda *args: -1 if args[2] == 22 else real(*args))
    refusing.mincore = arena_module._libc.mincore
    monkeypatch.setattr(arena_module, "_libc", refusing)
    assert not list(slot.map_ahead())
    assert slot.view(5 * UNIT_NBYTES, 1)[0] == 0


def test_saver_has_mapped_the_state_to_come_when_it_says_so(address):
    desk = Desk(address)
    try:
        slot = desk.arena.slots[0]
        slot.reserve(UNITS * UNIT_NBYTES)
        slot.populate(0, UNITS * UNIT_NBYTES)
        assert mapped_nbytes(desk.saver.pid) < UNIT_NBYTES
        assert desk.saver.warm(SECONDS_MAX)
        assert mapped_nbytes(desk.saver.pid) >= UNITS * UNIT_NBYTES
        assert desk.commit(noise(1, 16 * MIB), 1).seq == 0
        assert desk.saver.release_lease(SECONDS_MAX), "the next question has its own answer"
    finally:
        desk.close()


def test_prewarm_lets_the_saver_map_memory_unless_that_would_wait_for_a_commit(handing_store, savers):
    handing_store.prewarm(noise(1))
    assert savers[0].calls == ["wait ready", "warm"]
    savers[0].is_quick = False
    handing_store.commit_async(noise(1), 1)
    handing_store.prewarm(noise(1))
    assert savers[0].calls == ["wait ready", "warm", "begin", "staged", "wait ready"]


def test_nobody_waits_for_the_answer_of_a_saver_that_died(address):
    desk = Desk(address)
    os.kill(desk.saver.pid, 9)
    until(lambda: not desk.saver.is_alive)
    assert desk.saver.warm(SECONDS_MAX)
    desk.close()


def test_answer_that_nobody_asked_for_is_not_understood():
    answers = Answers()
    first, second = answers.ask(), answers.ask()
    answers.take()
    assert (first.is_set(), second.is_set()) == (True, False)
    answers.end()
    assert second.is_set()
    assert answers.ask().is_set()
    with pytest.raises(MalformedError, match="nobody asked"):
        answers.take()
