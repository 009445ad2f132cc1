"""A process that forks the trainers that are killed: everything is imported once, a trainer starts in a few ms.

It reads one JSON job per line. Each trainer restores the newest checkpoint, then trains and commits in the background,
and prints what it did and which promises it got: ``life word fact...``. A line is one write, so that it is complete
even before a SIGKILL. The process adopts orphans (PR_SET_CHILD_SUBREAPER) and reports when one has ended, so that the
reader knows every process that a trainer leaves behind.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import random
import resource
import select
import signal
import sys
import time

import numpy as np

import ckstore
from ckstore._testing import background_of
from ckstore.format.wire import xxh3_64

PR_SET_CHILD_SUBREAPER = 36
MIB = 1 << 20


def say(life, word, *facts):
    """Say one line, whole or not at all."""
    text = " ".join(str(fact).replace("\n", " | ") for fact in (life, word, *facts))
    os.write(1, text.encode()[:4000] + b"\n")


def digest(state):
    """Return what two states share only if they are the same, bit for bit; modules stand for their state dicts."""
    if hasattr(state, "state_dict"):
        state = state.state_dict()
    if isinstance(state, dict):
        return fold(f"{key}={digest(value)}" for key, value in sorted(state.items(), key=lambda item: str(item[0])))
    if isinstance(state, (list, tuple)):
        return fold(map(digest, state))
    if hasattr(state, "detach"):
        state = state.detach().numpy()
    if isinstance(state, np.ndarray):
        return fold([str(state.dtype), str(state.shape), f"{xxh3_64(np.ascontiguousarray(state).data):x}"])
    return repr(state)


def fold(texts):
    return f"{xxh3_64(chr(10).join(texts).encode()):x}"


class NumpyTask:
    """Weights that drift, moments that shrink, and bytes that are new in each step; all changed in place.

    Args:
        seed: What the state begins with.
        nbytes: How large it is.
    """

    def __init__(self, seed, nbytes):
        self._source = np.random.default_rng(seed)
        count = nbytes // 12
        weights = self._source.standard_normal(count, np.float32)
        fresh = np.zeros(nbytes // 3, np.uint8)
        self.state = {"w": weights, "m": weights * np.float32(0.1), "fresh": fresh, "plain": [seed, {"x": None}]}

    def load(self, store):
        self.state = store.restore()

    def change(self):
        state = self.state
        state["w"] += np.float32(1e-4) * state["m"]
        state["m"] *= np.float32(0.99)
        state["fresh"][:] = self._source.integers(0, 256, state["fresh"].size, np.uint8)
        state["plain"][0] += 1

    def grow(self, nbytes):
        """Make the state larger, once."""
        self.state["more"] = np.zeros(nbytes, np.uint8)

    def attach(self, store):
        """Nothing of it is guarded: everything is copied before the commit returns."""


class TorchTask:
    """A model with buffers that is trained by AdamW, whose step is guarded."""

    def __init__(self, seed, nbytes):
        import torch

        torch.manual_seed(seed)
        width = int((nbytes / 4 / 3 / 2) ** 0.5)
        self._torch = torch
        self._width = width
        layers = torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, width)
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer, "count": 0}

    def load(self, store):
        self.state["count"] = store.restore(into=self.state)["count"]

    def change(self):
        self.optimizer.zero_grad()
        self.model(self._torch.randn(4, self._width)).square().mean().backward()
        self.optimizer.step()
        self.state["count"] += 1

    def grow(self, nbytes):
        self.state["more"] = self._torch.zeros(nbytes, dtype=self._torch.uint8)

    def attach(self, store):
        store.attach(self.optimizer)


class LogLines(logging.Handler):
    """Says every log record."""

    def __init__(self, life):
        super().__init__(logging.WARNING)
        self._life = life

    def emit(self, record):
        say(self._life, "log", self.format(record))


def copy_slowly(pause):
    """Copy unit by unit, with a pause before each, so that death finds many states half staged."""
    from ckstore.background import copying

    make, copy = copying.HostCopy.__init__, copying.HostCopy._copy

    def made(self, *facts, **options):
        make(self, *facts, **options)
        self._is_fresh = True

    def paused(self, *facts):
        time.sleep(pause)
        copy(self, *facts)

    copying._FRESH_UNITS = 1
    copying.HostCopy.__init__, copying.HostCopy._copy = made, paused


def bound_memory(nbytes):
    """Let this process have so much address space beyond what it has; None: as much as it likes."""
    if nbytes is None:
        limit = resource.RLIM_INFINITY
    else:
        with open("/proc/self/statm") as file:  # noqa: PTH123
            limit = int(file.read().split()[0]) * resource.getpagesize() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def leave(how):
    """End this process in one of the ways that are no signal."""
    if how == "exit":
        sys.exit(5)
    if how == "raise":
        raise RuntimeError("a fault of the training loop")
    if how == "memory":
        bound_memory(MIB)
        held = []
        while True:
            held.append(bytearray(MIB))
    os._exit(6)


class Trainer:
    """One life: what a trainer does from its birth on, and says of it.

    Args:
        job: What a lane wants of it.
    """

    def __init__(self, job):
        self.job, self.life = job, job["life"]
        self._choice = random.Random(job["seed"])

    def say(self, word, *facts):
        say(self.life, word, *facts)

    def run(self):
        job = self.job
        # As a shell would have it, so that Ctrl-C can be sent to all of its group.
        os.setpgid(0, 0)
        self.say("started", os.getpid())
        logging.getLogger("ckstore").addHandler(LogLines(self.life))
        from ckstore.background import client

        client.WARN_AFTER_SECONDS = job["patience"]
        if job["pause"]:
            copy_slowly(job["pause"])
        task = {"numpy": NumpyTask, "torch": TorchTask}[job["task"]](job["seed"], job["nbytes"])
        with ckstore.open(job["place"], policy=ckstore.Policy(**job["policy"])) as store:
            step = self._resume(store, task)
            task.attach(store)
            for index in range(job["steps"]):
                try:
                    # In here: Ctrl-C may come at any time, and forking takes its time too.
                    if index in job["loaders"]:
                        self._fork_loader()
                    task.change()
                    self._commit(store, task, step + index + 1, index)
                except KeyboardInterrupt:
                    # As in a notebook: the loop goes on.
                    self.say("interrupted", step + index + 1)
        self.say("closed")

    def _resume(self, store, task):
        try:
            task.load(store)
        except ckstore.NotFoundError:
            self.say("restored", -1, -1, "-")
            return -1
        info = store.restored
        self.say("restored", info.step, int(info.metrics["life"]), digest(task.state))
        return info.step

    def _commit(self, store, task, step, index):
        if index == self.job["limit_at"]:
            task.grow(64 * MIB)
            bound_memory(16 * MIB)
        self.say("begin", step, digest(task.state))
        try:
            pending = store.commit_async(task.state, step, metrics={"life": self.life})
        except (ckstore.CkstoreError, MemoryError) as error:
            bound_memory(None)
            task.state.pop("more", None)
            self.say("refused", step, type(error).__name__, error)
            return
        self.say("submitted", step, background_of(store).saver_pid or 0)
        if pending.is_skipped:
            # Training takes time.
            time.sleep(0.02)
        pending.when_done(self._report_end)
        if index == self.job["exit_at"]:
            leave(self.job["exit_how"])
        wait = self._choice.choice(self.job["waits"])
        if wait == "staged":
            self.say("staged" if pending.wait_staged() else "unstaged", step)
        elif wait == "result":
            try:
                pending.result()
            except (ckstore.CkstoreError, MemoryError, OSError) as error:
                self.say("asked", step, type(error).__name__)

    def _report_end(self, pending):
        receipt, error = pending.receipt_or_none(), pending.error_or_none()
        if receipt is not None:
            self.say("durable", pending.step, receipt.seq)
        else:
            self.say("failed", pending.step, type(error).__name__, time.monotonic(), error)

    def _fork_loader(self):
        # A loader that is interrupted before it can ignore that would go on as a second trainer.
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            if os.fork() == 0:
                self._load()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def _load(self):
        """Be a data loader: it inherits what its parent has, and outlives it."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # It says so itself: its parent may be dead by now.
        self.say("loader", os.getpid())
        for fd in (0, 1, 2):
            os.close(fd)
        time.sleep(600)
        os._exit(0)


def import_everything(task):
    """Import what a trainer would import in its first commit and restore."""
    for name in (
        "state.capture",
        "ops.commit",
        "background.commits",
        "state.placement",
        "restore.restore",
        "background.client",
    ):
        importlib.import_module(f"ckstore.{name}")
    if task == "torch":
        import torch

        from ckstore.background import optimizer_guard  # noqa: F401
        from ckstore.state import torch_adapter  # noqa: F401

        torch.set_num_threads(1)


def main():
    # What outlives a trainer becomes ours: nobody can hide from the count.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    import_everything(sys.argv[1])
    say(0, "ready")
    lives = {}
    text = b""
    while True:
        if select.select([0], [], [], 0.005)[0]:
            more = os.read(0, 1 << 16)
            if not more:
                return
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                job = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    Trainer(job).run()
                    return
                lives[pid] = job["life"]
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            say(lives.pop(pid, 0), "dead", pid, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
