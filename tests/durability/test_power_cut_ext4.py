"""Protects acknowledged commits against real power cuts: ext4 on a loop device, shut down by an ioctl.

Cuts happen right after an acknowledgement and at random moments of a commit, with and without a last write of the
journal. Two negative controls leave out syncs and must lose data; otherwise the cuts are not effective.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time

import pytest

from ckstore.errors import CkstoreError
from support import crash_scenarios
from support.ext4 import LOG_FLUSHED, LOG_LOST, Ext4
from support.strace_harness import ChildServer

pytestmark = [
    pytest.mark.usefixtures("quiet_log"),
    pytest.mark.root,
    pytest.mark.usefixtures("loop_devices"),
    pytest.mark.filterwarnings("ignore"),
]
SEED = 7
COMMITS_MAX = 40
"""A store is replaced after this many commits, so that checking it stays fast."""


@pytest.fixture
def disk(tmp_path):
    with contextlib.closing(Ext4(tmp_path)) as disk:
        yield disk


class Cutter:
    """Commits to a store on the disk, cuts the power, and checks the result."""

    def __init__(self, disk, **options):
        self.disk = disk
        self.options = {"engine": "auto", **options}
        self.number = 0
        self.cuts = 0
        self.lost: list[str] = []
        self.random_acks = 0
        self._new_store()

    def _new_store(self):
        if self.cuts:
            shutil.rmtree(self.place)
        self.place = self.disk.folder / f"store{self.cuts}"
        self.acks = crash_scenarios.prepare(self.place, count=1)
        if self.cuts:
            # Sync everything: the negative controls must lose what they commit, not what is prepared.
            self.disk.sync()

    def cut_after_a_commit(self, mode):
        self.number += 1
        store = crash_scenarios.open_store(crash_scenarios.backend_of(self.place, **self.options))
        try:
            crash_scenarios.commit(store, self.number, self.number + 10, self.acks.append)
            self.disk.cut(mode)
        finally:
            store.close()
        self._check(mode)

    def cut_at_random(self, server, rng, mode, ack_path):
        job = {"scenario": "stream", "place": str(self.place), "acks": str(ack_path), **self.options}
        pid = server.start(**job)
        server.go()
        deadline = time.monotonic() + (10 if rng.random() < 0.7 else 0)
        while time.monotonic() < deadline and not crash_scenarios.read_acks(ack_path):
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.04))
        self.disk.cut(mode)
        # The child may have exited at its first I/O error.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        server.wait()
        new = crash_scenarios.read_acks(ack_path)
        self.acks += new
        self.random_acks += len(new)
        ack_path.unlink(missing_ok=True)
        self._check(mode)

    def _check(self, mode):
        self.disk.reboot()
        self.cuts += 1
        is_long = len(self.acks) > COMMITS_MAX
        try:
            # Check all of them now and then, otherwise only the newest, which was affected by the cut.
            crash_scenarios.check_store(self.place, self.acks if is_long else self.acks[-6:], level="read")
        except (CkstoreError, AssertionError) as error:
            self.lost.append(f"cut {self.cuts}, mode {mode}: {error!r}")
            is_long = True
        if is_long:
            self._new_store()


def cycles(cutter, server, tmp_path, *, count, seed):
    """Cut the power this many times; return a summary."""
    rng = random.Random(seed)
    for number in range(count):
        mode = LOG_LOST if number % 3 else LOG_FLUSHED
        if number % 2:
            cutter.cut_at_random(server, rng, mode, tmp_path / "acks")
        else:
            cutter.cut_after_a_commit(mode)
    counts = f"{cutter.cuts} cuts, {cutter.random_acks} acknowledged at the same time, {len(cutter.lost)} lost"
    return f"ext4 power cuts: seed {seed}, {counts}"


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_acknowledged_checkpoints_survive_power_cuts(disk, tmp_path, sample, note):
    cutter, count = Cutter(disk), sample.count(300, parts=30)
    with contextlib.closing(ChildServer()) as server:
        note(cycles(cutter, server, tmp_path, count=count, seed=sample.seed(SEED)))
    assert cutter.lost == []
    assert cutter.cuts == count


@pytest.mark.parametrize(
    "negative",
    # With O_DIRECT, because otherwise the later folder syncs would save the pack by writing out ext4's journal.
    [{"skips": ["pack data"], "try_direct": False}, {"after_link": True}],
    ids=["no pack sync", "no sync"],
)
def test_commits_without_syncs_lose_checkpoints(disk, negative):
    cutter = Cutter(disk, **negative)
    # A sync of all disks by another program between a commit and its cut would make that cut ineffective.
    while len(cutter.lost) < 4 and cutter.cuts < 12:
        cutter.cut_after_a_commit(LOG_LOST)
    assert len(cutter.lost) == 4, "power cuts lost nothing although syncs were left out: nothing is cut"
