"""Ranks that commit in the background, as processes whose calls strace records on the thread of the trainer.

Run as a program, this is one rank: it does what the lines of its input say, and answers each with a line.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

import ckstore
from ckstore._testing import background_of
from ckstore.ranks import job
from support.thread_ranks import free_port

FOLDER = Path(__file__).parents[1]
SECONDS_MAX = 120.0
BEGIN, END = "/ckstore-call-begins", "/ckstore-call-ends"
"""Paths that a rank asks for before and after its call, so that the trace shows where it was."""

WAITS = re.compile(r"(?:recv\w*|readv?|p?poll|p?select6?|accept4?|connect)\(")
"""Calls that can wait for something from a socket that they name."""

TO_OTHERS = re.compile(r"<(?:TCP|UDP)|AF_INET")
"""How strace -yy shows sockets and addresses of the network. A rank and its own saver use pipes."""

TRACED = (
    "%network,read,readv,poll,ppoll,select,pselect6,epoll_wait,epoll_pwait,epoll_pwait2,faccessat,faccessat2,access"
)


def network_waits(trace: str, thread: int) -> list[str] | None:
    """Return the lines of a trace with calls of a thread that can wait for another rank; None: the call did not end.

    Only lines between the marks count.
    """
    lines = [line.split(maxsplit=1)[1] for line in trace.splitlines() if line.startswith(f"{thread} ")]
    begins, ends = ([at for at, line in enumerate(lines) if f'"{mark}"' in line] for mark in (BEGIN, END))
    if not begins or not ends:
        return None
    # What an epoll waits for is not shown. ckstore's trainers use none.
    return [
        line
        for line in lines[begins[0] : ends[0]]
        if line.startswith("epoll_") or (WAITS.match(line) and TO_OTHERS.search(line))
    ]


class TracedRank:
    """One rank, as its test sees it."""

    def __init__(self, place: Path, rank: int, world: int, address: str, token: str) -> None:
        given = json.dumps({"place": str(place), "rank": rank, "world": world, "address": address, "token": token})
        path = os.pathsep.join([str(FOLDER.parent / "src"), str(FOLDER)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.traced_ranks", given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        )
        self.saver_pid = 0

    @property
    def pid(self) -> int:
        """The process of the trainer; its main thread makes the calls."""
        return self._process.pid

    def ask(self, **line: object) -> None:
        """Have the rank do something."""
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, seconds: float = SECONDS_MAX) -> dict[str, object] | None:
        """Return the answer; None: it did not come in time."""
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return None
        line = self._process.stdout.readline()
        assert line, "the rank has ended"
        return json.loads(line)

    @contextmanager
    def stopped(self):
        """Stop the trainer and its saver."""
        pids = [self.pid, self.saver_pid]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    @contextmanager
    def traced(self, output: Path):
        """Record the calls of the trainer's threads."""
        command = ["strace", "-f", "-yy", "-o", str(output), "-e", f"trace={TRACED}", "-p", str(self.pid)]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            attached = tracer.stderr.readline()
            assert "attached" in attached, f"strace did not attach: {attached}"
            yield
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.communicate(timeout=SECONDS_MAX)

    def kill(self) -> None:
        """Kill the trainer."""
        self._process.kill()

    def close(self) -> None:
        """End the rank, and its saver."""
        self._process.stdin.close()
        try:
            self._process.wait(timeout=SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def traced_job(place: Path, world: int = 2):
    """Yield the ranks of a job that have committed twice, so that connections and layouts are known."""
    address, token = f"127.0.0.1:{free_port()}", secrets.token_hex()
    with ExitStack() as stack:
        ranks = []
        for rank in range(world):
            ranks.append(TracedRank(place, rank, world, address, token))
            stack.callback(ranks[-1].close)
        for step in (1, 2):
            # The first call starts the savers, which connect.
            for do in ("begin", "result"):
                for rank in ranks:
                    rank.ask(do=do, step=step)
                for rank in ranks:
                    answer = rank.answer()
                    assert answer is not None, "a rank does not answer"
                    rank.saver_pid = answer["saver"]
        yield ranks


# In a rank


def sockets_to_others() -> list[socket.socket]:
    """Return copies of the sockets of this process that are connected to other ranks."""
    found = []
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        try:
            is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
        except OSError:
            # The descriptor of the listing itself.
            continue
        if is_socket:
            end = socket.socket(fileno=os.dup(fd))
            try:
                is_connected = end.family == socket.AF_INET and bool(end.getpeername())
            except OSError:
                is_connected = False
            if is_connected:
                found.append(end)
            else:
                end.close()
    return found


def wait_for_bytes() -> None:
    """Wait for a moment on the connections to the other ranks."""
    ends = sockets_to_others()
    assert ends
    select.select(ends, [], [], 0.001)
    for end in ends:
        end.close()


def install(fault: str) -> None:
    """Make ``commit_async`` wait for the network: ``"bytes"`` on a socket, ``"answer"`` for a thread that does."""
    take_number = job.Job.next_background_commit

    def next_background_commit(self):
        if fault == "bytes":
            wait_for_bytes()
        elif fault == "answer":
            self._link.agree("fault", b"", lambda values: b"")
        return take_number(self)

    job.Job.next_background_commit = next_background_commit


def state_of(rank: int, step: int) -> dict[str, object]:
    """Return weights that all ranks have, and bytes of this rank."""
    weights = np.random.default_rng(step).standard_normal(100_000).astype(np.float32)
    own = np.random.default_rng((rank, step)).integers(0, 256, 300_000, dtype=np.uint8)
    return {"weights": weights, "own": own, "step": step}


def main() -> None:
    """Be a rank."""
    given = json.loads(sys.argv[1])
    ranks = ckstore.Ranks(given["rank"], given["world"], given["address"], given["token"])
    store = ckstore.open(given["place"], policy=ckstore.Policy(threads=1), ranks=ranks)
    pending = None
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "install":
            install(asked["fault"])
            continue
        facts = {}
        if asked["do"] == "begin":
            state = state_of(given["rank"], asked["step"])
            os.access(BEGIN, os.F_OK)
            began = time.perf_counter()
            pending = store.commit_async(state, asked["step"])
            facts["seconds"] = time.perf_counter() - began
            os.access(END, os.F_OK)
        else:
            facts["seq"] = pending.result(SECONDS_MAX).seq
        print(json.dumps({**facts, "saver": background_of(store).saver_pid}), flush=True)
    store.close()
    ranks.close()


if __name__ == "__main__":
    main()
