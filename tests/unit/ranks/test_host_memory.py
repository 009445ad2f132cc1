"""Protects the memory of a host: no rank waits for one that has ended or stopped, and no bytes are mixed up."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ckstore import processes
from ckstore.ranks import host_memory
from ckstore.ranks.host_memory import HostMemory, SlotTaker, SlotWriter


def child_in(fd, act):
    """Fork a rank, the second of two; return its pid when it has opened the memory."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ready)
            memory = HostMemory(fd, 2, 1, 4)
            memory.write_needs(np.arange(4))
            os.write(done, b"1")
            act(memory)
        finally:
            os._exit(1)
    os.close(done)
    assert os.read(ready, 1) == b"1"
    os.close(ready)
    return pid


@pytest.fixture
def memory_file():
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def test_a_reader_that_is_killed_is_not_waited_for(memory_file):
    readers = np.array([1, 1, 1, 1], np.int16)

    def read_one_and_hang(memory):
        memory.read_needs()
        memory.open_slots(4096)
        SlotWriter(memory, readers).write(2, memoryview(b"c" * 100))
        signal.pause()

    memory = HostMemory(memory_file, 2, 0, 4)
    memory.write_needs(np.arange(4))
    pid = child_in(memory_file, read_one_and_hang)
    memory.read_needs()
    memory.open_slots(4096)
    taken = {}
    taker = SlotTaker(memory, dict.fromkeys(range(4), 1), lambda chunk, plain: taken.update({chunk: bytes(plain)}))
    deadline = time.monotonic() + 20
    while not taken and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert set(taker.missing()) == {0, 1, 3}
    assert taken == {2: b"c" * 100}
    taker.stop()
    memory.close()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_taker_that_takes_nothing_is_not_waited_for(memory_file, how):
    pid = child_in(memory_file, lambda memory: signal.pause())
    is_broken = []
    memory = HostMemory(memory_file, 2, 0, 40, lambda: bool(is_broken))
    memory.write_needs(np.arange(40))
    memory.needs = np.ones((2, 40), np.bool_)
    memory.open_slots(4096)
    writer = SlotWriter(memory, np.zeros(40, np.int16))

    def end():
        time.sleep(0.3)
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        else:
            os.kill(pid, signal.SIGSTOP)
            # The other ranks notice that, and the job is broken.
            is_broken.append(True)

    ending = threading.Thread(target=end)
    ending.start()
    for chunk in range(40):
        writer.write(chunk, memoryview(b"x" * 4096))
    # The slots were full before.
    ending.join(0)
    assert not ending.is_alive()
    memory.close()
    if how == "stopped":
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_rank_that_is_stopped_is_waited_for_as_long_as_it_may_be_silent(memory_file, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    stopped = HostMemory(memory_file, 2, 1, 40)
    stopped._fields[1, host_memory._PID] = 77
    monkeypatch.setattr(host_memory, "SYSTEM_CLOCK", clock)
    monkeypatch.setattr(host_memory, "is_running", lambda pid, started: True)
    monkeypatch.setattr(processes, "is_stopped", lambda pid: pid == 77)
    memory = HostMemory(memory_file, 2, 0, 40)
    memory.needs = np.ones((2, 40), np.bool_)
    memory.open_slots(4096)
    writer = SlotWriter(memory, np.zeros(40, np.int16))
    for chunk in range(40):
        writer.write(chunk, memoryview(b"x" * 4096))
    assert 115 <= clock.now <= 117
    stopped.close()
    memory.close()


def test_a_slot_that_is_used_again_too_early_makes_no_wrong_bytes(memory_file):
    reader, taking = (HostMemory(memory_file, 2, own, 4) for own in (1, 0))
    for memory in (reader, taking):
        memory.needs = np.ones((2, 4), np.bool_)
        memory.open_slots(4096)
    writer = SlotWriter(reader, np.ones(4, np.int16))
    writer.write(2, memoryview(b"c" * 100))
    # What a rank sees that was interrupted after it has read the number of an earlier chunk.
    reader.records[1, 0, host_memory._CHUNK] = 3
    writer.end()
    taker = SlotTaker(taking, {3: 1}, lambda chunk, plain: pytest.fail("these are the bytes of another chunk"))
    assert set(taker.missing()) == {3}
    for memory in (reader, taking):
        memory.close()


def test_a_reader_waits_for_a_slower_one(memory_file, monkeypatch):
    monkeypatch.setattr(host_memory, "RING_NBYTES", 10 * 4096)
    readers = np.array([0, 1] * 50, np.int16)
    memories = [HostMemory(memory_file, 3, own, 100) for own in range(3)]
    for memory in memories:
        memory.write_needs(np.arange(100))
    for memory in memories:
        memory.read_needs()
        memory.open_slots(4096)
    fast, slow, _ = (SlotWriter(memory, readers) for memory in memories)
    plain = memoryview(b"x" * 4096)
    takers = [
        SlotTaker(memory, {c: int(r) for c, r in enumerate(readers) if r != own}, lambda chunk, plain: None)
        for own, memory in enumerate(memories)
    ]
    done = []
    writing = threading.Thread(target=lambda: [done.append(fast.write(2 * index, plain)) for index in range(50)])
    writing.start()
    try:
        for index in range(20):
            slow.write(2 * index + 1, plain)
            # A tenth of all chunks is as much as the ring: five of these.
            assert len(done) <= index + 1 + 7
        deadline = time.monotonic() + 20
        while len(done) < 24 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 24 <= len(done) <= 27
        assert writing.is_alive()
        slow.end()
        writing.join(20)
        assert len(done) == 50
    finally:
        for taker, memory in zip(takers, memories, strict=True):
            taker.stop()
            memory.close()
        writing.join(20)
