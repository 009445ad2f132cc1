"""Trainers and savers of a job of many ranks as forks of one process, which stop where a test wants it.

Trainers and savers run the real code over real sockets. The hooks are wrappers around its functions, put there in the
children only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass

import numpy as np

import ckstore
from ckstore.background import client
from ckstore.background.commits import BackgroundCommits, InFlightCommit
from ckstore.background.saver.staged_state import Ticket
from ckstore.errors import CkstoreError
from ckstore.io.local import LocalBackend
from ckstore.processes import JOB_SIGNALS
from ckstore.ranks import commits, savers, work, world
from ckstore.ranks.io_loop import Timing
from ckstore.ranks.link import listen
from ckstore.ranks.world import Listener, Ranks
from ckstore.store.manifests import Manifests
from ckstore.store.pack_writer import PackWriter
from ckstore.store.repository import Repository

WORLD = 4
ANSWER_SECONDS = 20.0
"""When every rank must have its answer, and every saver must have ended."""

JOIN_SECONDS = 8.0
"""Shorter than as shipped, like the other times, unless the point says otherwise."""

_timing = functools.partial(Timing, beat_seconds=0.5, silent_seconds=5.0, close_seconds=0.5)

COMMITS = 2


def state_of(rank, step):
    """Return the state of a rank: a part that all have, and a part of its own."""
    rng = np.random.default_rng(step)
    drift = rng.standard_normal(40_000).astype(np.float32) * np.float32(1e-4)
    weights = np.random.default_rng(0).standard_normal(40_000).astype(np.float32) + drift
    own = np.random.default_rng((rank, step)).integers(0, 256, 300_000, dtype=np.uint8)
    return {"weights": weights, "own": own, "step": step, "rank": rank}


# In the processes of a job


class Hook:
    """Reports steps to the runner, and waits where the runner wants it.

    Args:
        end: The socket to the runner.
        name: This process.
        point: What the runner does.
    """

    def __init__(self, end, name, point):
        self._end, self._point = end, point
        self._is_mine = point is not None and point.by == name
        self.is_as_shipped = point is not None and point.is_as_shipped
        self._count = 0
        self._is_publishing = False
        self._lock = threading.Lock()

    def tell(self, **facts):
        with contextlib.suppress(BrokenPipeError):
            self._end.send(json.dumps(facts).encode())

    def at(self, step):
        """This process is at a step."""
        if not self._is_mine or step != self._point.step:
            return
        with self._lock:
            self._count += 1
            is_now = self._count == self._point.occurrence
        if is_now:
            self.tell(at=step)
            self._end.recv(1)

    def wrap(self, owner, name, before=None, after=None, when=lambda: True):
        """Report a step before and after each call of a function."""
        call = getattr(owner, name)

        @functools.wraps(call)
        def wrapped(*args, **kwargs):
            if before and when():
                self.at(before)
            result = call(*args, **kwargs)
            if after and when():
                self.at(after)
            return result

        setattr(owner, name, wrapped)

    def install(self):
        """Wrap the functions whose calls are steps."""
        self.wrap(commits.RankCommits, "commit", "call")
        self.wrap(commits._RankCommit, "begin", "begin", "begun")
        self.wrap(work.RankWork, "content", "content")
        self.wrap(work.RankWork, "write", "write")
        self.wrap(PackWriter, "fill", None, "packing")
        self.wrap(PackWriter, "finish", "flushing")
        self.wrap(work, "write_unpublished", None, "packed")
        self.wrap(commits._RankCommit, "_send_part", None, "sent")
        self.wrap(commits._RankCommit, "_finish", "end")
        self.wrap(work.Root, "plan", "plan", "planned")
        self.wrap(work.Root, "merge", "merge", "merged")
        self.wrap(work.Root, "publish", "publish", "acknowledge")
        self.wrap(Manifests, "claim", None, "claimed")
        self.wrap(LocalBackend, "create", None, "drafted", self.is_publishing)
        self.wrap(LocalBackend, "link", None, "linked", self.is_publishing)
        self.wrap(LocalBackend, "sync_folder", None, "synced", self.is_publishing)
        self.wrap(Repository, "rescue_local_packs", None, "rescued")
        self.wrap(BackgroundCommits, "_send_begin", "submit", "submitted")
        self.wrap(InFlightCommit, "report_staged", None, "staged")
        publish = Manifests.publish_encoded

        def publish_encoded(*args):
            self._is_publishing = True
            try:
                return publish(*args)
            finally:
                self._is_publishing = False

        Manifests.publish_encoded = publish_encoded
        fault = "" if self._point is None else self._point.fault
        if fault == "removes packs":
            fail = work.RankWork.fail
            commits.find_attempt = lambda *_: None
            work.RankWork.fail = lambda self, is_unpublished: fail(self, is_unpublished=True)
        elif fault == "forgets promises":
            Ticket.is_given_up = property(lambda ticket: ticket.is_aborted or ticket._monitor.is_trainer_gone)
        if not self.is_as_shipped:
            world.Timing = savers.Timing = _timing

    def is_publishing(self):
        return self._is_publishing


class LentSaver:
    """A saver that the runner has forked, in the place of a ``Popen``."""

    def __init__(self, pid):
        self.pid, self.returncode = pid, None
        self._watch = client.ProcessWatch(pid, client.process_started(pid) or "")

    def poll(self):
        if not self._watch.is_alive:
            self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout=None):
        deadline = time.monotonic() + (timeout or 1e6)
        while self.poll() is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("saver", timeout)
            time.sleep(0.01)
        return self.returncode

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def be_saver(end, hook):
    """Serve as a saver once a trainer sends the descriptors."""
    _, fds, _, _ = socket.recv_fds(end, 1, 8)
    end.close()
    if fds:
        hook.install()
        signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
        importlib.import_module("ckstore.background.saver.__main__").main(fds)


def be_trainer(place, rank, ranks_count, listener, invitation, hook, steps, *, is_async, blanks):
    """Restore if there is something, commit these steps, and report every answer."""
    hook.install()

    def start_python(arguments, *, fds, **options):
        end, pid = blanks.pop(0)
        socket.send_fds(end, [b"s"], fds)
        end.close()
        return LentSaver(pid)

    client.start_python = start_python
    address, token = invitation
    times = {} if hook.is_as_shipped else {"join_seconds": JOIN_SECONDS}
    ranks = Ranks(rank, ranks_count, address, token, per_rank="nearest", **times)
    if listener is not None:
        ranks._shared.listener = Listener(listener)
    store = ckstore.open(place, policy=ckstore.Policy(threads=1), ranks=ranks)
    hook.tell(opened=None if (latest := store.latest()) is None else latest.step)
    failed = 0
    for step in steps:
        called = time.monotonic()
        try:
            receipt = commit_one(store, hook, rank, step, is_async=is_async)
            hook.tell(ack=step, called=called, seq=receipt.seq, id=receipt.checkpoint_id)
        except CkstoreError as error:
            hook.tell(failed=step, called=called, kind=type(error).__name__, text=str(error))
            failed += 1
            if failed == 2:
                break
    with contextlib.suppress(CkstoreError):
        store.close()
    ranks.close()
    hook.tell(ended=True)


def commit_one(store, hook, rank, step, *, is_async):
    state = state_of(rank, step)
    if not is_async:
        return store.commit(state, step)
    pending = store.commit_async(state, step)
    if pending.wait_staged():
        hook.tell(promised=step)
        hook.at("promised")
    return pending.result()


def fork(body, output):
    """Run a function in a forked child, whose output goes to a file. Return its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(170)
        for number in (1, 2):
            os.dup2(output, number)
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


# In the runner


@dataclass
class Process:
    """A process of a job, as the runner sees it."""

    name: str
    end: socket.socket
    pid: int = 0
    status: int | None = None


class Job:
    """One start of a job.

    Args:
        place: The store.
        ranks_count: How many ranks.
        steps: The steps that they commit.
        output: Where the output of the processes goes.
        point: What is done to it; None: nothing.
    """

    def __init__(self, place, ranks_count, steps, output, *, is_async, point=None):
        self.ranks_count, self.point = ranks_count, point
        self.acks, self.failures, self.promised, self.opened, self.ended = {}, {}, set(), {}, {}
        self.problems = []
        self.struck_at = None
        self.longest = 0.0
        self._listener = listen("127.0.0.1", 0)
        invitation = f"127.0.0.1:{self._listener.getsockname()[1]}", os.urandom(16).hex()
        names = [f"saver {rank}{mark}" for rank in range(ranks_count) for mark in ("", "b") if is_async]
        names += [f"trainer {rank}" for rank in range(ranks_count)]
        pairs = {name: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for name in names}
        doors = {name: socket.socketpair() for name in names if name.startswith("saver")}
        self.processes = {name: Process(name, pair[0]) for name, pair in pairs.items()}

        def body(name):
            kind, number = name.split()
            mine = [pairs[name][1]]
            rank = int(number.rstrip("b"))
            blanks = [f"saver {rank}{mark}" for mark in ("", "b")] if kind == "trainer" and doors else []
            mine += [doors[name][1]] if kind == "saver" else [doors[blank][0] for blank in blanks]
            for each in itertools.chain(*pairs.values(), *doors.values()):
                if each not in mine:
                    each.close()
            hook = Hook(pairs[name][1], name, point)
            if kind == "saver":
                self._listener.close()
                os.setsid()
                be_saver(doors[name][1], hook)
                return
            lent = [(doors[blank][0], self.processes[blank].pid) for blank in blanks]
            listener = None if rank else self._listener
            if rank:
                self._listener.close()
            be_trainer(place, rank, ranks_count, listener, invitation, hook, steps, is_async=is_async, blanks=lent)

        for name in names:
            self.processes[name].pid = fork(functools.partial(body, name), output)
        for each in itertools.chain((pair[1] for pair in pairs.values()), *doors.values()):
            each.close()
        self._listener.close()
        self._poll = select.poll()
        self._by_fd = {process.end.fileno(): process for process in self.processes.values()}
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)

    def run(self):
        """Serve the job until it has ended, with the disturbance of its point."""
        victims = () if self.point is None else self.point.victims
        others = [name for name in self._trainers() if name not in victims]
        begun = time.monotonic()
        self._serve(lambda: all(self.processes[name].status is not None for name in others), begun)
        if self.struck_at is not None and self.point.signal == "SIGSTOP":
            for victim in victims:
                self._signal(victim, signal.SIGCONT if self.point.is_continued else signal.SIGKILL)
        self._serve(lambda: all(process.status is not None for process in self.processes.values()), time.monotonic())
        for name, process in self.processes.items():
            if process.status is None:
                self.problems.append(f"{name} did not end")
                self._signal(name, signal.SIGKILL)
                os.waitpid(process.pid, 0)
            elif process.status and not (name in victims and self.struck_at is not None):
                self.problems.append(f"{name} ended with {process.status}")
            process.end.close()

    def _trainers(self):
        return [name for name in self.processes if name.startswith("trainer")]

    def _serve(self, is_over, begun):
        while not is_over():
            limit = max(begun, self.struck_at or 0.0) + (COMMITS + 1) * ANSWER_SECONDS
            if time.monotonic() >= limit:
                return
            for fd, _ in self._poll.poll(20):
                self._receive(self._by_fd[fd])
            for process in self.processes.values():
                if process.status is None and os.waitpid(process.pid, os.WNOHANG)[0]:
                    # Its messages first: poll returned before it had ended.
                    while self._receive(process):
                        pass
                    process.status = 1 if process.name in self.ended.get("bad", ()) else self._status_of(process)

    def _status_of(self, process):
        return 0 if process.name in self.ended or process.name.startswith("saver") else 1

    def _receive(self, process):
        try:
            content = process.end.recv(1 << 16)
        except OSError:
            content = b""
        if not content:
            with contextlib.suppress(KeyError):
                self._poll.unregister(process.end)
            return False
        message, rank = json.loads(content), process.name.split()[1]
        if "at" in message:
            self._strike(process)
        elif "ack" in message:
            self.acks.setdefault(message["ack"], {})[int(rank)] = (message["seq"], message["id"])
        elif "failed" in message:
            self.failures.setdefault(message["failed"], {})[int(rank)] = f"{message['kind']}: {message['text']}"
        elif "promised" in message:
            self.promised.add(message["promised"])
        elif "opened" in message:
            self.opened[int(rank)] = message["opened"]
        elif "ended" in message:
            self.ended[process.name] = True
        if "called" in message and self.struck_at and process.name not in self.point.victims:
            self.longest = max(self.longest, time.monotonic() - max(self.struck_at, message["called"]))
        return True

    def _strike(self, process):
        point = self.point
        is_self = process.name in point.victims
        if point.delay and not is_self:
            process.end.send(b"g")
        time.sleep(point.delay)
        for victim in point.victims:
            self._signal(victim, getattr(signal, point.signal))
        self.struck_at = time.monotonic()
        if not point.delay or is_self:
            with contextlib.suppress(OSError):
                process.end.send(b"g")

    def _signal(self, name, number):
        process = self.processes[name]
        if process.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def in_child(body, output):
    """Return what a function returns in a forked child, as JSON."""
    reader, writer = os.pipe()

    def run():
        with os.fdopen(writer, "w") as file:
            json.dump(body(), file)

    pid = fork(run, output)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else ["the check itself failed"]
