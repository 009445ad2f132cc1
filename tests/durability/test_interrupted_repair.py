"""Protects checkpoints during a repair that is killed or loses power: each keeps its old form or gets its new one.

Another repair completes the work.
"""

from __future__ import annotations

import contextlib
import errno

import pytest

from ckstore.errors import CapacityError, CkstoreError
from support import damaged_stores as stores
from support.crash_states import CheckedStates, crash_states
from support.damaged_stores import STATES, STEPS, is_right, opened
from support.faults import Fault, FaultyBackend
from support.invariants import order_violations
from support.simfs import SimFS

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.filterwarnings("ignore")]

SEED = 20261
WRITING = frozenset(
    {"create", "create sync", "link", "rename", "rename_new", "sync_folder", "create_pack", "pack.write", "pack.finish"}
)


def damaged():
    """Return a disk with a torn manifest, a pack without its tail, and a flipped byte in a delta."""
    disk = SimFS()
    stores.fill(disk)
    with opened(disk) as store:
        flipped, frame = stores.frames_of(store, 2, "model.weights")[0]
        headless = stores.pack_of(store, 3)
        torn = next(f"manifests/other/{name}" for name in disk.list_names("manifests/other") if name.endswith(".ckm"))
    change(disk, flipped, frame.offset + 300)
    disk.truncate(headless, disk.stat(headless).nbytes - 4096)
    disk.truncate(torn, disk.stat(torn).nbytes - 20)
    return disk.settled()


def change(disk, name, offset):
    """Flip a byte of a file of a simulated disk."""
    content = bytearray(disk.open_read(name).read_at(0, disk.stat(name).nbytes))
    content[offset] ^= 0x20
    disk.unlink(name)
    disk.create(name, bytes(content), sync=True)


def check(disk):
    """Check that undamaged checkpoints stay intact and that a second repair succeeds."""
    with opened(disk) as store:
        # Damage raises an error or is repaired already; a wrong tensor fails inside is_right.
        assert is_right(store, 1, STATES[1])
        for step in STEPS:
            is_right(store, step, STATES[step])
        report = store.repair(dry_run=False)
        assert {entry.step for entry in report.partial} <= {2}
        assert is_right(store, 1, STATES[1])
        assert is_right(store, 3, STATES[3])
        assert not is_right(store, 2, STATES[2])
        assert store.restore(2, only="small")["small"]["note"] == "step 2"
        assert store.quarantine().manifests == {}
        assert store.repair().entries == ()


def test_undisturbed_repair_gives_expected_result():
    check(damaged())


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_power_cut_in_repair_loses_nothing(sample, note):
    disk = damaged()
    with opened(disk) as store:
        store.repair(dry_run=False)
    points = sample.part(range(len(disk.log) + 1), parts=50)
    count, checked = 0, CheckedStates()
    for state in crash_states(disk, seed=SEED, samples=6, points=set(points), singles_max=12):
        count += 1
        if checked.is_new(state):
            check(state.disk)
    note(f"simulated power cuts, repair: seed {SEED}, {len(disk.log)} steps, {count} states, {len(checked)} different")
    assert count >= (300 if sample.is_whole else len(points)) > 0
    assert order_violations(disk.log) == []


def repaired(fault):
    """Repair a damaged disk with a fault; return the disk, the failed calls, and all calls."""
    disk = damaged()
    faulty = FaultyBackend(disk, fault)
    store = opened(faulty)
    with contextlib.suppress(CkstoreError):
        # Without a fault the repair must not raise; the callers check the result.
        store.repair(dry_run=False)
    store.close()
    return disk, faulty.disturbed, faulty.calls


@pytest.mark.deep(parts=2)
@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
def test_failing_call_in_repair_loses_nothing(for_ever, sample, note):
    _, _, calls = repaired(None)
    count = sum(call in WRITING for call in calls)
    points = sample.part(range(1, count + 1), parts=16)
    for number in points:
        disk, disturbed, _ = repaired(Fault(number, for_ever=for_ever, sites=WRITING))
        assert disturbed
        check(disk)
    _, disturbed, _ = repaired(Fault(count + 1, for_ever=for_ever, sites=WRITING))
    assert not disturbed
    note(f"failing calls, repair: {len(points)} of {count} calls")
    assert len(points) > (20 if sample.is_whole else 0)


def test_repair_on_full_disk_changes_nothing():
    disk = damaged()
    sites = frozenset({"pack.write", "create_pack"})
    faulty = FaultyBackend(disk, Fault(1, errno=errno.ENOSPC, for_ever=True, sites=sites))
    with opened(faulty) as store, pytest.raises(CapacityError):
        store.repair(dry_run=False)
    check(disk)
