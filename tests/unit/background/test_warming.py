"""What states to come need is mapped or taken by the saver before they come, and that keeps nobody waiting."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckstore import write_blocks
from ckstore.config import MIB, Limits, Policy
from ckstore.errors import CapacityError, MalformedError, SaverError
from ckstore.saver import arena as arena_module
from ckstore.saver import client as client_module
from ckstore.saver import messages
from ckstore.saver.arena import UNIT_NBYTES, Arena, Slot
from ckstore.saver.tickets import Answers
from ckstore.write_blocks import WRITE_BLOCK_NBYTES, WriteBlocks, threads_and_blocks
from support import interrupts
from support.interrupts import Interrupt
from support.saver_desk import SECONDS_MAX, Desk, equal, noise, packs_nbytes, restored, until

UNITS = 6
BLOCKS = 6
"""Write blocks."""
STATE_NBYTES = BLOCKS * WRITE_BLOCK_NBYTES


@pytest.fixture
def arena():
    made = Arena.create(slot_count=2)
    yield made
    made.close()


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
    assert list(other.slots[0].map_ahead()) == [True, True, False, False, True, False]
    assert mapped_nbytes(os.getpid()) >= before + 3 * UNIT_NBYTES
    assert os.fstat(arena.fd).st_blocks == taken
    assert not list(other.slots[1].map_ahead()), "nobody has made room there"
    other.close()


def test_kernels_that_cannot_map_ahead_map_when_it_is_read(arena, monkeypatch):
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


def test_saver_has_mapped_the_state_to_come_when_it_says_so(address):
    desk = Desk(address)
    try:
        slot = desk.arena.slots[0]
        slot.reserve(UNITS * UNIT_NBYTES)
        slot.populate(0, UNITS * UNIT_NBYTES)
        assert mapped_nbytes(desk.saver.pid) < UNIT_NBYTES
        assert desk.saver.warm(BLOCKS, STATE_NBYTES, SECONDS_MAX)
        assert mapped_nbytes(desk.saver.pid) >= UNITS * UNIT_NBYTES
        assert desk.commit(noise(1, 16 * MIB), 1).seq == 0
        assert desk.saver.release_lease(SECONDS_MAX), "the next question has its own answer"
    finally:
        desk.close()


def own_nbytes(pid):
    """Return the memory that a process has, without what it shares."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(status["RssAnon"].split()[0]) * 1024


def warmed(desk):
    """Have a saver take its blocks' memory; return what it had before."""
    assert desk.saver.wait_ready(SECONDS_MAX)
    cold = own_nbytes(desk.saver.pid)
    assert desk.saver.warm(BLOCKS, STATE_NBYTES, SECONDS_MAX)
    return cold


def test_saver_that_was_warmed_writes_through_the_same_memory_until_it_is_told_to_forget(desk):
    cold = warmed(desk)
    assert own_nbytes(desk.saver.pid) >= cold + BLOCKS * WRITE_BLOCK_NBYTES
    policy = Policy(compression="none", threads=1, memory_nbytes_max=memory_for(BLOCKS))
    for step in (1, 2):
        desk.commit(noise(step, 64 * MIB), step, policy=policy)
        own = own_nbytes(desk.saver.pid) - cold
        assert BLOCKS * WRITE_BLOCK_NBYTES <= own < (2 * BLOCKS - 1) * WRITE_BLOCK_NBYTES, step
    desk.saver.forget_kept()
    until(lambda: own_nbytes(desk.saver.pid) < cold + BLOCKS * WRITE_BLOCK_NBYTES / 2, "the blocks given back")


def test_saver_whose_trainer_takes_the_run_back_keeps_no_blocks(desk):
    cold = warmed(desk)
    assert desk.saver.release_lease(SECONDS_MAX)
    assert own_nbytes(desk.saver.pid) < cold + BLOCKS * WRITE_BLOCK_NBYTES / 2


def test_commits_of_a_saver_share_their_blocks_also_where_they_have_not_as_many(desk):
    cold = own_nbytes(desk.saver.pid) if desk.saver.wait_ready(SECONDS_MAX) else 0
    few, many = (Policy(compression="none", threads=1, memory_nbytes_max=memory_for(count)) for count in (3, 12))
    states = [noise(step, 100 * MIB) for step in range(4)]
    most = []
    for step, (state, policy) in enumerate(zip(states, (many, few, many, few), strict=True)):
        desk.commit(state, step, policy=policy)
        most.append((own_nbytes(desk.saver.pid) - cold) // WRITE_BLOCK_NBYTES)
    assert max(most) < 12 + 5, "beside them a saver has some buffers of its own"
    assert max(most[1], most[3]) < 3 + 5
    for step, state in enumerate(states):
        assert equal(restored(desk.address, step), state), step


def test_blocks_of_a_commit_that_failed_are_those_of_the_next(desk):
    assert desk.saver.wait_ready(SECONDS_MAX)
    cold = own_nbytes(desk.saver.pid)
    policy = Policy(compression="none", threads=1, memory_nbytes_max=memory_for(BLOCKS))
    for step in range(4):
        handed = desk.begin(noise(step, 100 * MIB), step, policy=policy).stage(units=20)
        until(lambda: packs_nbytes(desk.address) > 16 * MIB, "some of it being written")
        desk.saver.abort(handed.number)
        with pytest.raises(SaverError, match="given up"):
            handed.wait()
    receipt = desk.commit(noise(9, 100 * MIB), 9, policy=policy)
    assert own_nbytes(desk.saver.pid) - cold < (BLOCKS + 5) * WRITE_BLOCK_NBYTES
    assert equal(restored(desk.address, receipt.step), noise(9, 100 * MIB))


@pytest.mark.parametrize("block_count", [0, 1 << 40])
def test_blocks_that_no_commit_has_are_not_understood(server, block_count):
    with pytest.raises(MalformedError, match="write blocks"):
        server._take(messages.Warm(1, block_count, STATE_NBYTES))
    assert not server._jobs


def memory_for(block_count):
    """Return a bound on memory within which a commit on one thread has so many blocks."""
    limits = Limits()
    for nbytes in range(56 * MIB, 256 * MIB, MIB):
        if threads_and_blocks(Policy(threads=1, memory_nbytes_max=nbytes), limits) == (1, block_count):
            return nbytes
    raise AssertionError("there is none")


def test_prewarm_has_as_many_blocks_taken_as_the_policy_allows(handing_store, savers):
    few = Policy(threads=1, memory_nbytes_max=memory_for(BLOCKS))
    handing_store.prewarm(noise(1), policy=few)
    block_count, nbytes = savers[0].warmed
    assert block_count == BLOCKS
    assert noise(1)["w0"].nbytes <= nbytes < 2 * noise(1)["w0"].nbytes + MIB


def test_saver_that_lacks_memory_for_blocks_maps_states_all_the_same(server, monkeypatch):
    slot = server._arena.slots[0]
    slot.reserve(2 * UNIT_NBYTES)
    slot.populate(0, 2 * UNIT_NBYTES)
    mapped = []

    def map_ahead(slot):
        mapped.append(slot)
        yield

    def refuse(nbytes):
        raise CapacityError("no address space for buffers")

    monkeypatch.setattr(Slot, "map_ahead", map_ahead)
    monkeypatch.setattr(write_blocks, "map_block", refuse)
    server._warm(messages.Warm(1, BLOCKS, STATE_NBYTES))
    assert mapped == [slot]


def noted(real, step, steps, to_do):
    """Return a generator like ``real`` that notes its steps, after the second of which there is something to do."""

    def stepping(*arguments):
        for _ in real(*arguments):
            steps.append(step)
            if len(steps) == 2:
                to_do.append(messages.Forget())
            yield

    return stepping


@pytest.mark.parametrize("to_do", ["_jobs", "_held"])
def test_saver_that_takes_blocks_ahead_stops_when_there_is_something_to_do(server, monkeypatch, to_do):
    steps = []
    monkeypatch.setattr(WriteBlocks, "warm", noted(WriteBlocks.warm, "block", steps, getattr(server, to_do)))
    server._warm(messages.Warm(1, BLOCKS, STATE_NBYTES))
    assert steps == ["block", "block"]


@pytest.mark.parametrize("to_do", ["_jobs", "_held"])
def test_saver_that_maps_memory_ahead_stops_when_there_is_something_to_do(server, monkeypatch, to_do):
    slot = server._arena.slots[0]
    slot.reserve(6 * UNIT_NBYTES)
    slot.populate(0, 6 * UNIT_NBYTES)
    steps = []
    monkeypatch.setattr(WriteBlocks, "warm", lambda *_: iter(()))
    monkeypatch.setattr(Slot, "map_ahead", noted(Slot.map_ahead, "unit", steps, getattr(server, to_do)))
    server._warm(messages.Warm(1, BLOCKS, STATE_NBYTES))
    assert steps == ["unit", "unit"]
    getattr(server, to_do).clear()
    server._warm(messages.Warm(1, BLOCKS, STATE_NBYTES))
    assert steps == ["unit"] * 8
    server._is_ending = True
    server._warm(messages.Warm(1, BLOCKS, STATE_NBYTES))
    assert steps == ["unit"] * 9


def test_saver_that_lacks_addresses_for_a_slot_maps_the_others_and_goes_on(server, monkeypatch):
    def refuse(slot):
        raise CapacityError("no addresses")

    monkeypatch.setattr(Slot, "refresh", refuse)
    server._take(messages.Warm(1, BLOCKS, STATE_NBYTES))
    assert list(server._jobs) == [messages.Warm(1, BLOCKS, STATE_NBYTES)]


def test_what_moves_packs_is_known_when_a_saver_has_opened_its_store(server):
    server._committer.open()
    backend = server._committer._parts.backend
    assert backend._chosen is not None
    assert backend._takes_direct is not None
    server._committer.close()


def test_saver_that_cannot_open_its_store_for_any_reason_says_which(server, monkeypatch):
    def refuse():
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(server._committer, "open", refuse)
    held = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert server.run() == 1
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
    told = messages.receive(server.trainers_end, messages.TO_TRAINER)
    assert (told.ticket, told.kind) == (0, "RuntimeError")


def test_prewarm_lets_the_saver_map_memory_unless_that_would_wait_for_a_commit(handing_store, savers):
    handing_store.prewarm(noise(1))
    assert savers[0].calls == ["wait ready", "warm"]
    savers[0].is_quick = False
    handing_store.commit_async(noise(1), 1)
    handing_store.prewarm(noise(1))
    assert savers[0].calls == ["wait ready", "warm", "begin", "staged", "wait ready"]


@pytest.mark.parametrize("is_asked_before", [True, False])
def test_nobody_waits_for_the_answer_of_a_saver_that_dies(address, is_asked_before):
    desk = Desk(address)
    assert desk.saver.wait_ready(SECONDS_MAX)
    os.kill(desk.saver.pid, signal.SIGSTOP)
    thread = threading.Thread(target=desk.saver.warm, args=(BLOCKS, STATE_NBYTES), daemon=True)
    if is_asked_before:
        thread.start()
        until(lambda: desk.saver._answers._open)
    os.kill(desk.saver.pid, signal.SIGKILL)
    if not is_asked_before:
        until(lambda: not desk.saver.is_alive)
        thread.start()
    thread.join(SECONDS_MAX)
    assert not thread.is_alive()
    desk.close()


def test_ctrl_c_while_one_asks_leaves_no_question_for_the_next_to_wait_behind(address, monkeypatch):
    client = Path(client_module.__file__)
    monkeypatch.setattr(interrupts, "TRACED", {str(client), str(client.with_name("tickets.py"))})
    desk = Desk(address)
    try:
        places = []
        while True:
            with contextlib.suppress(KeyboardInterrupt), Interrupt(1 + len(places)) as interrupt:
                desk.saver.warm(BLOCKS, STATE_NBYTES, SECONDS_MAX)
            assert desk.saver.release_lease(SECONDS_MAX), interrupt.place
            assert desk.saver.is_alive, interrupt.place
            if interrupt.place is None:
                break
            places.append(interrupt.place)
        assert len(places) > 15
    finally:
        desk.close()


def test_saver_that_lives_and_cannot_be_asked_is_an_error(address, monkeypatch):
    desk = Desk(address)
    try:

        def refuse(message, *, is_patient=False):
            raise SaverError("the saver does not listen")

        with monkeypatch.context() as patched:
            patched.setattr(desk.saver, "_say", refuse)
            with pytest.raises(SaverError, match="does not listen"):
                desk.saver.release_lease(SECONDS_MAX)
        assert desk.saver.release_lease(SECONDS_MAX)
    finally:
        desk.close()


def test_an_answer_is_one_to_all_that_was_asked_before():
    answers = Answers()
    (one, first), (two, second), (three, third) = answers.ask(), answers.ask(), answers.ask()
    assert (one, two, three) == (1, 2, 3)
    answers.take(2)
    assert [event.is_set() for event in (first, second, third)] == [True, True, False]
    answers.take(1)
    answers.end()
    assert third.is_set()
    assert answers.ask()[1].is_set()
    for number in (0, 5):
        with pytest.raises(MalformedError, match="nobody asked"):
            answers.take(number)
