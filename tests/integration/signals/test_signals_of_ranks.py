"""A job of many ranks is preempted: all ranks commit after one step, whichever of them got the signal."""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
import sys

import pytest

import ckstore

WORLD = 3

RANK = """
import sys
import numpy as np
import ckstore

rank, world, address, token, path, style = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
ranks = ckstore.Ranks(rank, world, address, token)
with ckstore.open(path, ranks=ranks) as store:
    state = {"w": np.arange(50_000.0), "step": 0}
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


@pytest.mark.parametrize(("style", "signalled"), [("blocking", (0, 1, 2)), ("background", (2,))])
def test_all_ranks_commit_one_step_and_exit(tmp_path, style, signalled):
    path, address, token = tmp_path / "store", f"127.0.0.1:{free_port()}", secrets.token_hex(16)
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(WORLD), address, token, str(path), style],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        assert all(job.stdout.readline() == "ready\n" for job in jobs), [job.communicate()[1] for job in jobs]
        for rank in signalled:
            jobs[rank].send_signal(signal.SIGTERM)
        errors = [job.communicate(timeout=60)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [143] * WORLD, errors
    with ckstore.open(path) as store:
        newest = store.latest()
        state = store.restore()
    assert newest.step == state["step"] >= 20
    assert state["w"][0] == state["step"]
    assert all("is durable" in text for text in errors), errors
