"""Protects the order of syncs: no simulated power cut loses an acknowledged checkpoint or a store.

The simulated disk keeps nothing that was not synced, so a missing folder sync fails here even where ext4 would hide it.
Each negative control leaves out one sync and must fail.
"""

from __future__ import annotations

import pytest

from support.faults import SyncSkippingBackend
from support.invariants import order_violations
from support.power_cuts import SEED, in_words, losses, recorded

STATES_MIN = {"commit": 2600, "recommit": 6300, "maintain": 11_200, "repack": 5500}
"""Minimum number of states that a deep run checks, by scenario; equal disks are checked once."""
SAMPLES = {"repack": 20}
assert sum(STATES_MIN.values()) >= 20_000

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.deep(parts=4)
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("no_quarantine")
@pytest.mark.parametrize("scenario", STATES_MIN)
def test_power_cut_loses_nothing(scenario, sample, note):
    disk, acks = recorded(scenario)
    points = sample.part(range(len(disk.log) + 1), parts=16)
    counters, found = losses(disk, acks, samples=SAMPLES.get(scenario, 250), points=set(points), commit_every=8)
    note(f"simulated power cuts, {scenario}: seed {SEED}, {len(disk.log)} steps, {in_words(counters)}")
    assert found == []
    assert counters["states"] >= (STATES_MIN[scenario] if sample.is_whole else len(points)) > 0


@pytest.mark.deep
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("no_quarantine")
def test_init_after_power_cut_can_be_repeated(sample, note):
    disk, acks = recorded("first", from_scratch=True)
    # Most steps make and sync one of 256 equal folders: check some of these, and every later step.
    last = next(index for index, op in enumerate(disk.log) if op.path.startswith("packs/") and op.kind == "sync folder")
    points = sample.part([*range(0, last + 256, 29), *range(last + 256, len(disk.log) + 1)], parts=10)
    counters, found = losses(disk, acks, samples=4, points=set(points), singles_max=3)
    note(f"simulated power cuts, first: seed {SEED}, {len(disk.log)} steps, {in_words(counters)}")
    assert found == []
    assert counters["states"] >= (700 if sample.is_whole else len(points)) > 0


@pytest.mark.parametrize("scenario", ["first", "commit", "recommit", "maintain", "repack"])
def test_commit_follows_sync_order(scenario):
    disk, _ = recorded(scenario, from_scratch=scenario == "first")
    assert order_violations(disk.log) == []


def since_last_ack(disk):
    """Return the points after the last acknowledgement, where a missing sync loses data too."""
    last = max(index for index, op in enumerate(disk.log) if op.kind == "note")
    return set(range(last + 1, len(disk.log) + 1))


@pytest.mark.parametrize("skips", ["pack data", "draft data", "folder packs", "folder manifests"])
def test_commit_without_one_sync_loses_data(skips):
    disk, acks = recorded("recommit", wrap=lambda disk: SyncSkippingBackend(disk, [skips]))
    _, found = losses(disk, acks, samples=2, points=since_last_ack(disk), stop_at=1)
    assert found, "the simulated disk did not notice that a sync is missing"
    assert order_violations(disk.log), "the ordering rules did not notice that a sync is missing"


@pytest.mark.parametrize("skips", ["pack data", "folder packs", "folder manifests"])
def test_repack_without_one_sync_breaks_order(skips):
    disk, _ = recorded("repack", wrap=lambda disk: SyncSkippingBackend(disk, [skips]))
    assert order_violations(disk.log), "the ordering rules did not notice that a sync is missing"


def test_unsynced_replacement_breaks_order():
    # Moving a file out of the manifests folder also syncs it, so only the ordering rules detect this.
    def without_first_sync(disk):
        backend = SyncSkippingBackend(disk)
        sync_folder, link = backend.sync_folder, backend.link

        def link_without_sync(source, target):
            link(source, target)
            if target.endswith(".1.ckm"):
                backend.skips = frozenset({"folder manifests"})

        def sync_twice(name):
            # The sync after the link, and the one before the lower generations move.
            sync_folder(name)
            if name.startswith("manifests/") and backend.skips:
                forgotten.append(name)
            if len(forgotten) == 2:
                backend.skips = frozenset()

        forgotten: list[str] = []
        backend.link, backend.sync_folder = link_without_sync, sync_twice
        return backend

    disk, _ = recorded("repack", wrap=without_first_sync)
    assert any("moved away while" in violation for violation in order_violations(disk.log))


def test_commit_without_claim_sync_breaks_order():
    # A lost claim does no harm while its manifest exists, so only the ordering rules detect this.
    disk, _ = recorded("commit", wrap=lambda disk: SyncSkippingBackend(disk, ["folder claims"]))
    assert any("claim" in violation for violation in order_violations(disk.log))


def test_commit_without_sync_after_link_loses_data():
    disk, acks = recorded("commit", wrap=lambda disk: SyncSkippingBackend(disk, after_link=True))
    _, found = losses(disk, acks, samples=2, points=since_last_ack(disk), stop_at=1)
    assert found
