"""Protects a checkpoint whose replacement was interrupted: a name that is not durable must not supersede it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support import crash_scenarios
from support.faults import SyncSkippingBackend
from support.invariants import order_violations
from support.simfs import SimFS


class Killed(BaseException):
    """The process ends here."""


class KilledAfterLink(SyncSkippingBackend):
    """Dies after linking the next generation of a manifest, before the link is durable."""

    is_dead = False

    def link(self, source, target):
        super().link(source, target)
        self.is_dead = target.endswith(".1.ckm")

    def __getattribute__(self, name):
        if name in {"sync_folder", "rename", "unlink", "create"} and object.__getattribute__(self, "is_dead"):
            raise Killed
        return object.__getattribute__(self, name)


def test_only_durable_generation_supersedes():
    disk = SimFS()
    crash_scenarios.prepare(disk)
    disk = disk.settled()
    plain = replace(crash_scenarios.QUIET_POLICY, compression="none")
    dying = KilledAfterLink(disk)
    store = crash_scenarios.open_store(dying)
    for step, number in ((80, 2001), (81, 2002), (82, 2003)):
        crash_scenarios.commit(store, number, step, disk.note, policy=plain)
    with pytest.raises(Killed):
        store.repack()
    dying.is_dead = False
    store.close()
    with crash_scenarios.open_store(disk) as successor:
        assert successor.repack().superseded_count == 1
    assert order_violations(disk.log) == []
