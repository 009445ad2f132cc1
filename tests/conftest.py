"""What several test folders share: stores in memory and on disk, small states, Hypothesis profiles.

Libraries of mathematics get one thread each, here and in the children of tests: several workers share few processors,
and threads of OpenMP burn them while they wait for each other.
"""
# ruff: noqa: E402 - how many threads there are is read when such a library is loaded.

from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import functools
import gc
import logging
import signal
import subprocess
import tempfile
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import ckstore
from ckstore import concurrency
from ckstore.io.engine_choice import choose_engine
from ckstore.io.memory import MemoryBackend
from ckstore.ops.scheduled import AutomaticDemotion, AutomaticGc

pytest_plugins = ["support.reporting", "support.sampling_plugin"]

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("sample", max_examples=25, stateful_step_count=20, **_COMMON)
# A sample and a slice together make as many examples as a deep run.
settings.register_profile("slice", max_examples=75, stateful_step_count=30, **_COMMON)
settings.register_profile("all", max_examples=100, stateful_step_count=30, derandomize=True, **_COMMON)


def pytest_configure(config):
    settings.load_profile(config.getoption("depth"))
    # A shell that was told to go on in the background ignores Ctrl-C, and so would all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    # Modules and tests live as long as the process: each of its garbage collections went through all of them.
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    if item.get_closest_marker("uring") is not None and (trouble := ring_trouble()) is not None:
        pytest.skip(trouble)


@functools.cache
def ring_trouble():
    """Return why there are no rings here, or None."""
    with tempfile.TemporaryDirectory() as folder:
        engine, reason = choose_engine("auto", folder)
    return None if engine.name == "uring" else reason


class FakeClock:
    """A clock that moves only when someone sleeps, or a test says so.

    Args:
        now: Seconds since 1970 at which it starts.
    """

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now
        self.slept = 0.0
        self.on_sleep = None

    def now_ns(self):
        return int(self.now * 1e9)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept += seconds
        if self.on_sleep is not None:
            self.on_sleep()


@pytest.fixture(scope="session", autouse=True)
def nobody_gives_way():
    """Let what follows commits have its share of the processor: beside other tests it would wait for minutes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for work in (AutomaticGc, AutomaticDemotion):
            assert work.nice > 0
            monkeypatch.setattr(work, "nice", 0)
        yield


@pytest.fixture(scope="session")
def unmount():
    """Return what unmounts a folder; a ring keeps the files of a process that has ended open for a moment."""

    def act(folder):
        deadline = time.monotonic() + 60
        while subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, f"{folder} stays busy"
            time.sleep(0.05)

    return act


@pytest.fixture
def clock():
    """A clock that stands still until someone sleeps."""
    return FakeClock()


@pytest.fixture
def backend():
    """An empty backend in memory."""
    return MemoryBackend()


@pytest.fixture
def store(backend):
    """A store in memory, run ``main``."""
    with ckstore.open(backend) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path):
    """Where a store on disk may be made."""
    return tmp_path / "store"


@pytest.fixture
def disk_store(folder):
    """A store on disk, run ``main``."""
    with ckstore.open(folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def no_quarantine():
    """Run in the caller what ckstore runs on a thread of its own for the sake of Ctrl-C: half of a small restore."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(concurrency, "call_on_new_thread", lambda work: work())
        yield


@pytest.fixture
def no_threads_left():
    """Fail when a test leaves threads of ours behind; the heart of a lease may beat until the handle closes."""
    yield
    deadline = time.monotonic() + 60
    while working_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert working_threads() == []


def working_threads():
    """Return the names of the threads of ours that live, but for the hearts of leases."""
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("ckstore-") and name != "ckstore-lease"]


def state_of(seed, count=64):
    """Return a small state that a seed decides: arrays of several dtypes, plain values, nesting."""
    source = np.random.default_rng(seed)
    return {
        "model": {"w": source.standard_normal(count).astype(np.float32), "b": source.integers(0, 255, 7, np.uint8)},
        "optimizer": [{"step": seed, "lr": 1e-3, "m": source.standard_normal((3, 5))}],
        "seed": seed,
    }


@pytest.fixture
def quiet_log():
    """Log nothing: pytest keeps each record, with the errors in it and all memory that their tracebacks hold."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
