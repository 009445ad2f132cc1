"""Protects the connection between ranks, with real processes: whatever happens to one, the others get an answer.

Short heartbeats make the quick tests take seconds. One test uses the real times.
"""

from __future__ import annotations

import json
import os
import queue
import re
import secrets
import signal
import threading
import time

import pytest

from ckstore.ranks.io_loop import Timing
from ckstore.ranks.link import listen
from support.prepared_trainers import prepared

WORLD = 4
PROGRAM = """
from pathlib import Path
from support.link_rank import main

go, *listener = descriptors
main({rank}, 4, *(listener or [{place}]), {token!r}, Path({folder!r}), go=go, **{options})
"""
TOKEN = secrets.token_bytes(16)
QUICK = {
    "join_seconds": 8.0,
    "beat_seconds": 0.3,
    "silent_seconds": 1.5,
    "handshake_seconds": 1.5,
    "close_seconds": 1.0,
}
JOIN_QUICKLY = {**QUICK, "join_seconds": 4.0}
SECONDS_MAX = 6.0
"""Quick answers take silent_seconds, and the time of a loaded machine."""


class Rank:
    """One process, whose lines are read by a thread."""

    def __init__(self, rank, place, folder, **options):
        self.rank = rank
        self._forks = prepared("support.link_rank")
        (lines, lines_of_rank), (go_of_rank, go) = os.pipe(), os.pipe()
        self._go, self._source = os.fdopen(go, "w"), os.fdopen(lines)
        self._pid = self._forks.start(
            PROGRAM.format(rank=rank, place=place, folder=str(folder), token=TOKEN, options=options),
            *(lines_of_rank, 2, go_of_rank),
            *([place] if rank == 0 else []),
        )
        os.close(lines_of_rank)
        os.close(go_of_rank)
        self._lines = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._source:
            self._lines.put(line.strip())

    def line(self, seconds=30):
        return self._lines.get(timeout=seconds)

    def go(self):
        self._go.write("\n")
        self._go.flush()

    def send(self, number):
        self._forks.kill(self._pid, number)

    def outcome(self, deadline):
        return json.loads(self.line(max(0.01, deadline - time.monotonic())))

    def wait(self):
        """Return the exit code."""
        return self._forks.wait(self._pid)

    def end(self):
        self.send(signal.SIGKILL)
        self.wait()
        self._reader.join()
        self._go.close()
        self._source.close()


@pytest.fixture
def job(tmp_path):
    """Return what starts the processes of a job. They are killed at the end."""
    started = []

    def start(*, pauses=None, timing=QUICK, commits=1, absent=()):
        with listen("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            for rank in range(WORLD):
                if rank not in absent:
                    place = listener.fileno() if rank == 0 else port
                    options = {"timing": timing, "commits": commits, "meets": not absent}
                    started.append(Rank(rank, place, tmp_path, pauses=(pauses or {}).get(rank, []), **options))
        return started

    yield start
    for rank in started:
        rank.end()


def hit(job, tmp_path, role, phase, number, *, timing=QUICK, seconds_max=SECONDS_MAX):
    """Stop or kill one rank at a phase, and check that the others get the same answer in time. Return all ranks."""
    # A part has arrived when rank 0 merges.
    paused = 0 if (role, phase) == (2, "wait") else role
    pauses = {rank: ["close"] for rank in range(WORLD)}
    pauses[paused] = ["merge" if phase == "wait" else phase, "close"]
    ranks = job(pauses=pauses, timing=timing)
    assert ranks[paused].line() == f"at {pauses[paused][0]}"
    ranks[role].send(number)
    deadline = time.monotonic() + seconds_max
    if paused != role:
        ranks[paused].go()
    found = [rank.outcome(deadline) for rank in ranks if rank.rank != role]
    is_published = (tmp_path / "1").exists()
    assert is_published == (phase in ("wait", "published"))
    assert {outcome["is_done"] for outcome in found} == {is_published}
    if not is_published:
        assert {outcome["cause"] for outcome in found} == {role}
        assert all(outcome["what"].startswith(f"rank {role} ") for outcome in found)
    return ranks


HITS = [(2, phase) for phase in ("begin", "write", "wait")]
HITS += [(0, phase) for phase in ("begin", "write", "merge", "publish", "published")]
NUMBERS = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])


@NUMBERS
@pytest.mark.parametrize(("role", "phase"), HITS)
def test_others_get_the_same_answer(job, tmp_path, role, phase, number):
    hit(job, tmp_path, role, phase, number)


@pytest.mark.deep(parts=16)
@NUMBERS
@pytest.mark.parametrize(("role", "phase"), HITS)
def test_others_get_the_same_answer_in_20_seconds(job, tmp_path, role, phase, number):
    hit(job, tmp_path, role, phase, number, timing=Timing()._asdict(), seconds_max=20.0)


def test_without_a_limit_of_silence_nobody_gets_an_answer(job):
    # The negative control of the tests above.
    ranks = job(pauses={2: ["write"]}, timing={**QUICK, "silent_seconds": 1000.0})
    assert ranks[2].line() == "at write"
    ranks[2].send(signal.SIGSTOP)
    with pytest.raises(queue.Empty):
        ranks[1].line(2 * QUICK["silent_seconds"])


def test_rank_that_goes_on_after_a_stop_gets_an_error(job, tmp_path):
    ranks = hit(job, tmp_path, 2, "write", signal.SIGSTOP)
    ranks[2].send(signal.SIGCONT)
    ranks[2].go()
    outcome = ranks[2].outcome(time.monotonic() + SECONDS_MAX)
    assert (outcome["is_done"], outcome["cause"]) == (False, 0)
    # It may find out before, while or after it sends its part.
    how = r"closed its connection( \((Broken pipe|Connection reset by peer)\))?"
    assert re.match(rf"rank 0 {how} before it acknowledged the commit of step 100", outcome["what"])


def test_stopped_rank_0_that_goes_on_may_publish_what_the_others_gave_up(job, tmp_path):
    # Section 13 of FORMAT.md names this case. The checkpoint is complete, and the next start of the job finds it.
    ranks = hit(job, tmp_path, 0, "merge", signal.SIGSTOP)
    ranks[0].send(signal.SIGCONT)
    ranks[0].go()
    assert ranks[0].outcome(time.monotonic() + SECONDS_MAX)["is_done"]
    assert (tmp_path / "1").exists()


def test_job_that_is_suspended_as_a_whole_goes_on(job, tmp_path):
    ranks = job(pauses={2: ["write"]})
    assert ranks[2].line() == "at write"
    for rank in ranks:
        rank.send(signal.SIGSTOP)
    time.sleep(2 * QUICK["silent_seconds"])
    for rank in ranks:
        rank.send(signal.SIGCONT)
    ranks[2].go()
    assert all(rank.outcome(time.monotonic() + SECONDS_MAX)["is_done"] for rank in ranks)
    assert (tmp_path / "1").exists()


def test_absent_rank_is_named(job, tmp_path):
    ranks = job(absent=[3], timing=JOIN_QUICKLY)
    found = [rank.outcome(time.monotonic() + 30) for rank in ranks]
    assert {outcome["cause"] for outcome in found} == {3}
    assert {outcome["what"] for outcome in found} == {
        "rank 3 did not begin the commit of step 100 within 4 s, and 1 rank never connected, rank 3 first"
    }
    assert not (tmp_path / "1").exists()


def test_absent_rank_0_is_named(job):
    ranks = job(absent=[0], timing=JOIN_QUICKLY)
    found = [rank.outcome(time.monotonic() + 30) for rank in ranks]
    assert {outcome["cause"] for outcome in found} == {0}
    assert all("could not reach rank 0 within 4 s" in outcome["what"] for outcome in found)


def test_ranks_may_close_in_any_order(job):
    ranks = job(commits=3, pauses={rank: ["close"] for rank in range(WORLD)})
    for rank in ranks:
        assert [rank.outcome(time.monotonic() + 30)["is_done"] for _ in range(3)] == [True] * 3
        assert rank.line() == "at close"
    for rank in ranks:
        rank.go()
        assert rank.line() == "closed"
        assert rank.wait() == 0
