"""Protects acknowledged checkpoints against concurrent collections: real processes, killed and stopped at random.

``CKSTORE_TEST_STRESS_COUNT`` sets the number of commits of a deep run. By hand: ``PYTHONPATH=src:tests python -m
support.gc_stress --count 5000 --seed 1``. The negative controls leave out a step of the protocol and must fail;
otherwise the test detects nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.format import paths
from ckstore.hashing import PackId
from ckstore.io.local import LocalBackend
from support import gc_stress_check, gc_stress_roles

COUNT = int(os.environ.get("CKSTORE_TEST_STRESS_COUNT", "5000"))
FOLDER = Path(__file__).parents[1]
STORMS_MAX = 20


def stress(count, *, seed, without=None):
    """Run the stress program; return its exit status, its counters, and its output."""
    path = os.pathsep.join([str(FOLDER.parent / "src"), str(FOLDER)])
    command = [sys.executable, "-W", "ignore", "-m", "support.gc_stress", "--count", str(count), "--seed", str(seed)]
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    if without is not None:
        command += ["--without", without]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode in (0, 1), done.stderr
    *lines, last = done.stdout.splitlines()
    return done.returncode, json.loads(last), lines


def in_words(counters):
    shown = ("commits", "lives", "dropped", "packs moved", "files freed", "rescued", "manifests replaced", "read")
    return ", ".join(f"{counters.get(name, 0)} {name}" for name in shown)


def test_check_repairs_replacement_and_reports_damage(tmp_path):
    with ckstore.open(
        LocalBackend(tmp_path / "store", engine="pwrite"), run="w0", policy=gc_stress_roles.POLICY
    ) as store:
        for step in range(2):
            store.commit(gc_stress_roles.state_of(step), step)
        manifests = repository_of(store).manifests
        first, second = map(manifests.load, manifests.listing().names)
        gone = replace(first.packs[0], pack_id=PackId(bytes(range(16))))
        torn = replace(first, header=replace(first.header, generation=1), packs=(gone, *first.packs[1:]))
        assert gc_stress_check.repair_torn(tmp_path, ["w0"]) == []
        manifests.publish(torn)
    assert gc_stress_check.repair_torn(tmp_path, ["w0"]) == []
    with gc_stress_roles.open_store(tmp_path, "w0") as store:
        assert store.info("seq:0").generation == 2
        assert store.verify("decode").is_clean
        torn = replace(torn, header=replace(first.header, generation=3))
        repository_of(store).manifests.publish(torn)
        (own,) = {pack.pack_id for pack in second.packs} - {pack.pack_id for pack in first.packs}
        repository_of(store).backend.unlink(paths.pack_name(own))
    (reported,) = gc_stress_check.repair_torn(tmp_path, ["w0"])
    assert "('w0', 1, 'partial')" in reported


@pytest.mark.deep
@pytest.mark.timeout(3000)
def test_stress_loses_nothing(sample, note):
    count, seed = sample.count(COUNT, parts=64), sample.seed(COUNT)
    code, counters, lines = stress(count, seed=seed)
    note(f"stress, 8 writers, 2 collectors, 2 readers: seed {seed}, {in_words(counters)}, {counters['failures']} lost")
    assert code == 0, "\n".join(lines)
    assert counters["commits"] >= count
    assert counters["restored"] > 20
    if sample.is_whole:
        # A run in which little is collected or no process is killed proves nothing.
        assert counters["packs moved"] > COUNT // 10
        assert counters["manifests replaced"] > 0
        assert counters["lives"] > 20


@pytest.mark.deep(parts=15)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("without", ["verify", "recheck", "trash"])
def test_stress_detects_missing_protocol_step(without, sample, note):
    # With three other tests running on two cores, four of four runs of 600 commits found each of them.
    count, first = sample.count(600, parts=2), sample.seed(1)
    for storm in range(STORMS_MAX):
        code, _, lines = stress(count, seed=first + storm, without=without)
        if code:
            assert any("acknowledged" in line for line in lines)
            # The printed number of runs shows in time if a control becomes less sensitive.
            note(f"stress without {without}: found by storm {storm + 1} of {STORMS_MAX} at most, of {count} commits")
            return
    raise AssertionError(f"none of {STORMS_MAX} storms has found it")
