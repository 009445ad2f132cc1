"""Fixtures of tests that stage and commit in a saver."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

import ckstore
from ckstore import Policy
from ckstore.background import commits, device_copy, staging
from ckstore.background.arena import Arena
from ckstore.background.arena_layout import DEVICE_LAZY, LAZY
from ckstore.background.copying import CopyPool
from support.fake_device import FakeDevice, MemoryKinds, SlowDevice
from support.fake_saver import DelayedCopy, FakeSaver
from support.interrupts import RecordingSaver
from support.saver_harness import Child, SaverHarness, links, until
from support.served_saver import ServedSaver


@pytest.fixture(autouse=True)
def no_arena_left():
    """Fail a test that leaves the descriptor of an arena behind: else one of another file would find it, by luck."""
    before = arena_count()
    yield
    # Savers of handles that were dropped are waited for by nobody.
    until(lambda: arena_count() <= before, "the end of the arenas")


def arena_count():
    return sum("ckstore-arena" in link for link in links())


@pytest.fixture
def fast_folder(tmp_path):
    """Where no disk is waited for: what survives SIGKILL does not depend on the file system."""
    memory = Path("/dev/shm")
    base = memory / f"ckstore-{tmp_path.name}-{time.monotonic_ns()}" if memory.is_dir() else tmp_path / "fast"
    base.mkdir(mode=0o700)
    yield base
    shutil.rmtree(base)


@pytest.fixture
def arena():
    """An arena of one slot."""
    made = Arena.create()
    yield made
    made.close()


@pytest.fixture
def crew():
    """Two threads that copy."""
    made = CopyPool(2)
    yield made
    made.close()


@pytest.fixture
def address(folder):
    """A store on disk with nothing in it."""
    ckstore.open(folder).close()
    return str(folder)


@pytest.fixture
def child(address):
    """Make trainers, each a process of its own that runs some code; they end with the test."""
    children = []

    def make(code, **options):
        children.append(Child(address, code, **options))
        return children[-1]

    yield make
    for each in children:
        each.close()


@pytest.fixture
def harness(address):
    """A trainer's harness before that store."""
    made = SaverHarness(address)
    yield made
    made.close()


@pytest.fixture
def savers(monkeypatch):
    """The pretended savers that were started: from now on all are."""
    FakeSaver.started = []
    monkeypatch.setattr(commits, "Saver", FakeSaver)
    return FakeSaver.started


@pytest.fixture
def recording_savers(savers, monkeypatch):
    """The fake savers that were started; they record what is staged."""
    RecordingSaver.started, RecordingSaver.seen = savers, []
    monkeypatch.setattr(commits, "Saver", RecordingSaver)
    return savers


@pytest.fixture
def memory_kinds(monkeypatch):
    """Sets in which memory states are: in host memory at first."""
    found = MemoryKinds()
    monkeypatch.setattr(staging, "kinds_of", found.kinds_of)
    return found


@pytest.fixture
def device(monkeypatch):
    """A fake device, for states that are in device memory."""
    played = FakeDevice()
    monkeypatch.setattr(device_copy, "copies_of", played.copies_of)
    # What it sends too late is there when somebody looks.
    monkeypatch.setattr(RecordingSaver, "wait_for_others", lambda _: played.finish())
    yield played
    played.close()


@pytest.fixture
def on_device(monkeypatch):
    """Take what is guarded for memory of a slow device, but for what is as small as a counter of steps."""
    kinds_of = staging.kinds_of

    def kinds_there(captured, storages, guarded):
        kinds = kinds_of(captured, storages, guarded)
        is_large = [captured.storages[index].nbytes > 4096 for index in range(len(kinds))]
        return [DEVICE_LAZY if kind == LAZY and large else kind for kind, large in zip(kinds, is_large, strict=True)]

    SlowDevice.may_copy, SlowDevice.may_enqueue = threading.Event(), threading.Event()
    SlowDevice.may_enqueue.set()
    monkeypatch.setattr(staging, "kinds_of", kinds_there)
    monkeypatch.setattr(device_copy, "copies_of", SlowDevice)
    return SlowDevice


@pytest.fixture
def quick_saver_store(savers, folder):
    """A store on disk with pretended savers, which end by themselves what was staged."""
    with ckstore.open(folder) as opened:
        yield opened


@pytest.fixture
def held(monkeypatch):
    """Copy nothing behind a guard before somebody waits."""
    return DelayedCopy(monkeypatch)


@pytest.fixture
def open_fake_store(savers, folder):
    """Return a function that opens a store with pretended savers, which end what they have begun before it closes.

    It takes what the store's policy says.
    """
    opened = []

    def make(**fields):
        opened.append(ckstore.open(folder, policy=Policy(**fields)))
        return opened[-1]

    yield make
    for saver in savers:
        saver.is_quick = True
        for ticket in list(saver.begun):
            saver.finish(ticket)
    for store in opened:
        store.close()


@pytest.fixture
def fake_saver_store(open_fake_store):
    """A store on disk with pretended savers, which end what they have begun before it closes."""
    return open_fake_store()


@pytest.fixture
def broken_logging():
    """Return a context in which a filter of the user's raises; Python passes that to the code that logs."""

    def broken(record):
        raise ValueError("no such field")

    logger = logging.getLogger("ckstore")

    @contextlib.contextmanager
    def breaking():
        logger.addFilter(broken)
        try:
            yield
        finally:
            logger.removeFilter(broken)

    return breaking


@pytest.fixture
def open_served(address, monkeypatch):
    """Return a function that serves a saver of that store on a thread, with options of ``ServedSaver``."""
    opened, leave = [], os._exit

    def leave_thread(code):
        if threading.current_thread() is threading.main_thread():
            leave(code)
        for saver in opened:
            saver.has_fault = True
        raise SystemExit

    # A saver's process ends when it meets a fault of its own; this one is the tests'.
    monkeypatch.setattr(os, "_exit", leave_thread)

    def make(**options):
        opened.append(ServedSaver(address, **options))
        return opened[-1]

    yield make
    for saver in opened:
        saver.close()


@pytest.fixture
def served(open_served):
    """A saver of that store which is served on a thread, with two slots."""
    return open_served()
