"""A process that trains and handles signals, for the tests of this folder.

It updates two arrays one after the other, slowly, so that nearly every signal arrives between the two.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import ckstore
from support.memory_folders import tmp_path as tmp_path
from support.prepared_trainers import prepared

PROGRAM = '''
import contextlib, logging, os, pathlib, signal, sys, threading, time
import numpy as np, ckstore
from ckstore import preemption as signals
from ckstore._testing import background_of, repository_of

logging.basicConfig(format="%(message)s", level=logging.WARNING)
say = lambda *words: print(*words, flush=True)
aloud = logging.StreamHandler(sys.stdout)
aloud.setFormatter(logging.Formatter("log %(message)s"))
logging.getLogger().addHandler(aloud)
state = {{"first": np.zeros(4096), "second": np.zeros(4096), "step": 0}}

def train_one_step(seconds=0.02):
    state["first"] += 1
    # In naps: Python handles a signal that comes right before a sleep only after it.
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))
    state["second"] += 1
    state["step"] += 1

def when_told(text):
    """Return what is set when something with this text is logged."""
    class Heard(logging.Handler):
        def emit(self, record):
            if text in record.getMessage():
                is_told.set()
    is_told = threading.Event()
    logging.getLogger().addHandler(Heard())
    return is_told

def stop(pid):
    # Each of its threads: on a busy machine they go on for a while.
    os.kill(pid, signal.SIGSTOP)
    states = None
    while states is None or states - {{"T", "t"}}:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stats = [(task / "stat").read_text() for task in pathlib.Path(f"/proc/{{pid}}/task").iterdir()]
            states = {{stat.rpartition(")")[2].split()[0] for stat in stats}}

# A saver that gives way would starve on a busy machine, and the last commit has a deadline.
store = ckstore.open({folder!r}, policy=ckstore.Policy(saver_nice=0))
{code}
'''

LOOP = """
with store.commit_on_signal(lambda: state, **OPTIONS) as last:
    say("ready")
    for step in range(1, 100_000):
        train_one_step()
        COMMIT
        last.check(step)
"""


class Trainer:
    """A training process, forked by a process that has imported what it needs."""

    def __init__(self, folder, code):
        self.folder = folder
        self._forks = prepared(
            "numpy", "ckstore.api", "ckstore.commit", "ckstore.background.commits", "ckstore.preemption"
        )
        (out, out_of_trainer), (err, err_of_trainer) = os.pipe(), os.pipe()
        self._out, self._err = os.fdopen(out), os.fdopen(err)
        self._pid = self._forks.start(PROGRAM.format(folder=str(folder), code=code), out_of_trainer, err_of_trainer)
        os.close(out_of_trainer)
        os.close(err_of_trainer)

    def hear(self, word):
        for line in self._out:
            if line.split()[0] == word:
                return line.split()[1:]
        raise AssertionError(f"it ended without saying {word!r}: {self._err.read()}")

    def wait_for_log(self, text):
        """Wait until something was logged."""
        while text not in " ".join(self.hear("log")):
            pass

    def send(self, number=signal.SIGTERM):
        self._forks.kill(self._pid, number)

    def is_running(self):
        return Path(f"/proc/{self._pid}").exists()

    def end(self):
        """Return exit code and log."""
        self.out = [line.rstrip("\n") for line in self._out if not line.startswith("log ")]
        return self._forks.wait(self._pid), self._err.read()

    def close(self):
        """Kill it if it still runs."""
        self._forks.kill(self._pid)
        self._forks.wait(self._pid)
        self._out.close()
        self._err.close()

    def restored(self):
        """Return the newest checkpoint, which must contain a complete step."""
        with ckstore.open(self.folder, create=False) as store:
            state = store.restore()
            assert state["first"].min() == state["first"].max() == state["second"].min() == state["step"]
            assert store.restored.step == state["step"]
            return state


@pytest.fixture
def trainer(folder):
    """Return a function that starts a trainer; all of them are ended afterwards."""
    started = []

    def start(code):
        started.append(Trainer(folder, code))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def loop():
    """Return a function that makes the code of a training loop, which commits on request and checks each step."""
    return _loop


def _loop(commit="pass", **options):
    return f"OPTIONS = {options!r}\n" + LOOP.replace("COMMIT", commit)
