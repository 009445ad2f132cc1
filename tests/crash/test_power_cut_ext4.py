"""Protects acknowledged commits against real power cuts: ext4 on a loop device, shut down by an ioctl.

Cuts fall right after an acknowledgement and at random moments of a commit, with and without a last write of the
journal. Two negative controls, which leave out syncs, must lose data: else the cut is none.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest
import scenarios
from ext4 import LOG_FLUSHED, LOG_LOST, Ext4
from harness import ChildServer

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("loop_devices"), pytest.mark.filterwarnings("ignore")]
SEED = 7
COMMITS_MAX = 40
"""A store is replaced after this many commits, so that checking it stays cheap."""


@pytest.fixture
def disk(tmp_path):
    with contextlib.closing(Ext4(tmp_path)) as disk:
        yield disk


class Cutter:
    """Commits to a store on the disk, cuts the power, and checks what is left."""

    def __init__(self, disk, *, skips=(), after_link=False):
        self.disk = disk
        self.options = {"engine": "auto", "skips": skips, "after_link": after_link}
        self.number = 0
        self.cuts = 0
        self.lost: list[str] = []
        self._new_store()

    def _new_store(self):
        self.place = self.disk.folder / f"store{self.cuts}"
        self.acks = scenarios.prepare(self.place, count=1)
        if self.cuts:
            # Made durable whole: the negative controls must lose what they commit, not what is prepared.
            os.sync()

    def cut_after_a_commit(self, mode):
        self.number += 1
        store = scenarios.open_store(scenarios.backend_of(self.place, **self.options))
        try:
            scenarios.commit(store, self.number, self.number + 10, self.acks.append)
            self.disk.cut(mode)
        finally:
            store.close()
        self._check(mode)

    def cut_at_random(self, server, rng, mode, ack_path):
        job = {"scenario": "stream", "place": str(self.place), "acks": str(ack_path), **self.options}
        pid = server.start(**job)
        server.go()
        time.sleep(rng.uniform(0.0, 0.08))
        self.disk.cut(mode)
        os.kill(pid, signal.SIGKILL)
        server.wait()
        self.acks += scenarios.read_acks(ack_path)
        ack_path.unlink(missing_ok=True)
        self._check(mode)

    def _check(self, mode):
        self.disk.reboot()
        self.cuts += 1
        try:
            scenarios.check_store(self.place, self.acks, level="read")
        except Exception as error:
            self.lost.append(f"cut {self.cuts}, mode {mode}: {error!r}")
            self._new_store()
            return
        self._restart_if_long()

    def _restart_if_long(self):
        # The commit that the check made is none of ours to promise; its seq is known by what follows.
        if len(self.acks) > COMMITS_MAX:
            self._new_store()


def cycles(cutter, server, tmp_path, *, count):
    rng = random.Random(SEED)
    for number in range(count):
        mode = LOG_LOST if number % 3 else LOG_FLUSHED
        if number % 2:
            cutter.cut_at_random(server, rng, mode, tmp_path / "acks")
        else:
            cutter.cut_after_a_commit(mode)
    print(f"seed {SEED}: {cutter.cuts} cuts, {len(cutter.lost)} lost")


@pytest.mark.parametrize("count", [12, pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_acknowledged_checkpoints_survive_power_cuts(disk, tmp_path, count):
    cutter = Cutter(disk)
    with contextlib.closing(ChildServer()) as server:
        cycles(cutter, server, tmp_path, count=count)
    assert cutter.lost == []


@pytest.mark.parametrize("negative", [{"skips": ["pack data"]}, {"after_link": True}], ids=["no pack sync", "no sync"])
def test_commits_without_syncs_lose_acknowledged_checkpoints(disk, negative):
    cutter = Cutter(disk, **negative)
    for _ in range(4):
        cutter.cut_after_a_commit(LOG_LOST)
    assert len(cutter.lost) == 4, "a power cut lost nothing although syncs were left out: the cut is none"
