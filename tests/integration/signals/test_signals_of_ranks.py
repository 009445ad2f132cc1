"""A job of many ranks is preempted: all ranks commit after one step, whichever of them got the signal."""

from __future__ import annotations

import os
import secrets
import signal
import socket

import pytest

import ckstore
from support.prepared_trainers import prepared

WORLD = 3

RANK = """
import numpy as np
import ckstore

rank, world, address, token, path, style = {arguments}
ranks = ckstore.Ranks(rank, world, address, token)
with ckstore.open(path, ranks=ranks) as store:
    state = {{"w": np.arange(50_000.0), "step": 0}}
    if style == "background":
        store.commit_async(state, 0).result()
    with store.commit_on_signal(lambda: state) as last:
        for step in range(1, 100_000):
            # No rank can end a step without the others, as in training.
            ranks.link().agree("a step", b"", lambda values: b"")
            state["step"] = step
            state["w"] += 1
            if step == 20:
                print("ready", flush=True)
            last.check(step)
"""


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as end:
        return int(end.getsockname()[1])


class Rank:
    """One process."""

    def __init__(self, *arguments):
        self._forks = prepared(
            "numpy", "ckstore.api", "ckstore.commit", "ckstore.background.commits", "ckstore.preemption"
        )
        (out, out_of_rank), (err, err_of_rank) = os.pipe(), os.pipe()
        self._out, self._err = os.fdopen(out), os.fdopen(err)
        self._pid = self._forks.start(RANK.format(arguments=arguments), out_of_rank, err_of_rank)
        os.close(out_of_rank)
        os.close(err_of_rank)

    def line(self):
        return self._out.readline()

    def send(self, number):
        self._forks.kill(self._pid, number)

    def end(self):
        """Return exit code and log."""
        return self._forks.wait(self._pid), self._err.read()

    def close(self):
        """Kill it if it still runs."""
        self.send(signal.SIGKILL)
        self._forks.wait(self._pid)
        self._out.close()
        self._err.close()


@pytest.fixture
def job():
    """Return a function that starts ranks; they are killed at the end."""
    ranks = []

    def start(*arguments):
        ranks.extend(Rank(rank, WORLD, *arguments) for rank in range(WORLD))
        return ranks

    yield start
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize(("style", "signalled"), [("blocking", (0, 1, 2)), ("background", (2,))])
def test_all_ranks_commit_one_step_and_exit(job, tmp_path, style, signalled):
    path, address, token = tmp_path / "store", f"127.0.0.1:{free_port()}", secrets.token_hex(16)
    ranks = job(address, token, str(path), style)
    assert all(rank.line() == "ready\n" for rank in ranks), [rank.end() for rank in ranks]
    for rank in signalled:
        ranks[rank].send(signal.SIGTERM)
    codes, errors = zip(*[rank.end() for rank in ranks], strict=True)
    assert codes == (143,) * WORLD, errors
    with ckstore.open(path) as store:
        newest = store.latest()
        state = store.restore()
    assert newest.step == state["step"] >= 20
    assert state["w"][0] == state["step"]
    assert all("is durable" in text for text in errors), errors
