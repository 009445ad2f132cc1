"""Protects prewarming: afterwards the saver process has memory for coming states; nobody waits for a dead saver."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest

import ckstore
from ckstore._testing import background_of, saver_of
from ckstore.background import protocol
from ckstore.config import MIB, Policy
from ckstore.errors import SaverError
from ckstore.store.memory_budget import WRITE_BLOCK_NBYTES
from support.interrupts import Interrupt
from support.saver_harness import SECONDS_MAX, SaverHarness, noise, until

BLOCKS = 6
STATE_NBYTES = BLOCKS * WRITE_BLOCK_NBYTES


def mapped_nbytes(pid):
    """Return how many bytes of an arena are in the page tables of a process."""
    total, is_ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_ours = "ckstore-arena" in line
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def own_nbytes(pid):
    """Return the private memory of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(status["RssAnon"].split()[0]) * 1024


def settled(measure):
    """Wait until a size stays the same: a process that has just started releases some memory."""
    found = [measure()]
    deadline = time.monotonic() + SECONDS_MAX
    while len(found) < 5 or len(set(found[-5:])) > 1:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
        found.append(measure())
    return found[-1]


def test_prewarm_maps_memory_until_it_is_released(folder):
    state = noise(1, 64 * MIB)
    with ckstore.open(folder, policy=Policy(compression="none", threads=1)) as store:
        store.prewarm({"w": state["w0"][:10]})
        saver = saver_of(store)
        cold, mapped = settled(lambda: own_nbytes(saver.pid)), mapped_nbytes(saver.pid)
        store.prewarm(state)
        warm = own_nbytes(saver.pid) - cold
        assert warm >= BLOCKS * WRITE_BLOCK_NBYTES
        assert mapped_nbytes(saver.pid) >= mapped + 64 * MIB
        for step in (1, 2):
            store.commit_async(state, step).result(SECONDS_MAX)
            store.wait()
            # Besides the blocks it has some small buffers.
            assert own_nbytes(saver.pid) - cold < warm + 5 * WRITE_BLOCK_NBYTES, step
        saver.release_retained()
        until(lambda: own_nbytes(saver.pid) < cold + BLOCKS * WRITE_BLOCK_NBYTES / 2, "the blocks given back")
        assert background_of(store).saver_pid == saver.pid


@pytest.mark.parametrize("is_asked_before", [True, False])
def test_prewarm_does_not_wait_for_a_dead_saver(address, altered, is_asked_before):
    heard = 2 if is_asked_before else 1
    altered.run(f"for _ in range({heard}):\n    os.read(channel, 1 << 17)\nos._exit(1)")
    harness = SaverHarness(address)
    try:
        if not is_asked_before:
            until(lambda: not harness.saver.is_alive, "its death")
        thread = threading.Thread(target=harness.saver.warm, args=(BLOCKS, STATE_NBYTES), daemon=True)
        thread.start()
        thread.join(SECONDS_MAX)
        assert not thread.is_alive()
    finally:
        harness.close()


def test_interrupted_prewarm_does_not_block_the_next(harness):
    places = []
    while True:
        with contextlib.suppress(KeyboardInterrupt), Interrupt(1 + len(places)) as interrupt:
            harness.saver.warm(BLOCKS, STATE_NBYTES, SECONDS_MAX)
        assert harness.saver.release_lease(SECONDS_MAX), interrupt.place
        assert harness.saver.is_alive, interrupt.place
        if interrupt.place is None:
            break
        places.append(interrupt.place)
    assert len(places) > 15


def test_failed_prewarm_message_is_an_error(harness, monkeypatch):
    def refuse(end, message):
        raise SaverError("the saver does not listen")

    with monkeypatch.context() as patched:
        patched.setattr(protocol, "send", refuse)
        with pytest.raises(SaverError, match="does not listen"):
            harness.saver.release_lease(SECONDS_MAX)
    assert harness.saver.release_lease(SECONDS_MAX)
