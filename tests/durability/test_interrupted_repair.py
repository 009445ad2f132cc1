"""A repair that dies or loses power anywhere leaves each checkpoint as it was or as it is to be, and is done again."""

from __future__ import annotations

import contextlib
import errno

import pytest

from ckstore.errors import CapacityError, CkstoreError
from ckstore.testing.cuts import Checked, crash_states
from ckstore.testing.faults import Fault, FaultyBackend
from ckstore.testing.invariants import order_violations
from ckstore.testing.simfs import SimFS
from support import damaged_stores as stores
from support.damaged_stores import STATES, STEPS, is_right, opened

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.filterwarnings("ignore")]

SEED = 20261
WRITING = frozenset(
    {"create", "create sync", "link", "rename", "rename_new", "sync_folder", "create_pack", "pack.write", "pack.finish"}
)


def damaged():
    """Return a disk with a torn manifest, a pack without its tail, and a flipped byte in a difference."""
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
    """Whatever became of the repair: what was whole is whole, and doing it again ends well."""
    with opened(disk) as store:
        # Damage is an error or healed already; a wrong tensor fails inside of is_right.
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


def test_repair_that_nothing_disturbs_does_what_the_others_are_compared_with():
    check(damaged())


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stride", [pytest.param(13, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_power_cut_at_any_point_of_a_repair_loses_nothing(stride, tell):
    disk = damaged()
    with opened(disk) as store:
        store.repair(dry_run=False)
    points = set(range(0, len(disk.log) + 1, stride))
    count, checked = 0, Checked()
    samples, singles_max = (1, 4) if stride > 1 else (6, 12)
    for state in crash_states(disk, seed=SEED, samples=samples, points=points, singles_max=singles_max):
        count += 1
        if checked.is_new(state):
            check(state.disk)
    tell(f"simulated power cuts, repair: seed {SEED}, {len(disk.log)} steps, {count} states, {len(checked)} different")
    assert count > 30
    assert order_violations(disk.log) == []


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
def test_failing_call_at_any_point_of_a_repair_is_an_error_and_no_harm(for_ever, tell):
    number, stride = 1, 2
    while True:
        disk = damaged()
        faulty = FaultyBackend(disk, Fault(number, for_ever=for_ever, sites=WRITING))
        store = opened(faulty)
        with contextlib.suppress(CkstoreError):
            # One that nothing disturbs must not raise: what it leaves is checked below.
            store.repair(dry_run=False)
        store.close()
        if not faulty.struck:
            break
        check(disk)
        number += stride
    tell(f"failing calls, repair: {number} sites")
    assert number > 20


def test_full_disk_is_told_and_leaves_everything_as_it_was():
    disk = damaged()
    sites = frozenset({"pack.write", "create_pack"})
    faulty = FaultyBackend(disk, Fault(1, errno=errno.ENOSPC, for_ever=True, sites=sites))
    with opened(faulty) as store, pytest.raises(CapacityError):
        store.repair(dry_run=False)
    check(disk)
