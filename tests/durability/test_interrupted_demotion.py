"""Protects checkpoints during a demotion: wherever it stops, each one exists in its exact or in its new form."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

import ckstore
from ckstore.config import DemotePolicy
from ckstore.errors import ConflictError
from ckstore.io.memory import MemoryBackend
from support import crash_scenarios
from support.crash_states import CheckedStates, crash_states
from support.faults import SyncSkippingBackend
from support.invariants import order_violations
from support.simfs import SimFS
from support.states import difference

SEED = 515
COUNT = 5
WANTED = DemotePolicy(keep_newest=2, keep_every=0)
FINISHED_EVERY = 20
"""Interval of the states in which the demotion is repeated."""

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.filterwarnings("ignore")]


@functools.lru_cache(maxsize=32)
def state_of(step):
    """Return the state of a step: weights that change, moments, and a constant part."""
    rng = np.random.default_rng(step)
    weights = np.random.default_rng(0).standard_normal((64, 70))
    moves = [np.random.default_rng(number).standard_normal((64, 70)) * 1e-3 for number in range(step)]
    second = np.exp(rng.standard_normal((64, 70)))
    entry = {"exp_avg": (rng.standard_normal((64, 70)) * np.sqrt(second) / 3).astype(np.float32)}
    entry["exp_avg_sq"] = second.astype(np.float32)
    groups = [{"betas": (0.9, 0.999), "params": [0]}]
    return {
        "model": {"w": (weights + sum(moves)).astype(np.float32), "bias": np.arange(9.0) + step},
        "optimizer": {"state": {0: entry}, "param_groups": groups},
        "step": step,
    }


def filled(place):
    with crash_scenarios.open_store(place) as store:
        for step in range(COUNT):
            store.commit(state_of(step), step, policy=replace(crash_scenarios.QUIET_POLICY, compression="none"))
    return place


@functools.lru_cache(maxsize=1)
def demoted_states():
    """Return the state of every step after an undisturbed demotion."""
    with crash_scenarios.open_store(filled(MemoryBackend())) as store:
        report = store.demote(policy=WANTED)
        assert [entry.is_done for entry in report.entries] == [False, False, True, True, True]
        return [store.restore(step) for step in range(COUNT)]


def check(place):
    """Every checkpoint has its old or its new form, and the two newest have the old one."""
    with crash_scenarios.open_store(place) as store:
        by_step = {info.step: info for info in store.log()}
        assert sorted(by_step) == list(range(COUNT))
        for step, info in by_step.items():
            found = store.restore(step)
            wanted = state_of(step) if info.fidelity == "exact" else demoted_states()[step]
            assert difference(found, wanted) is None, f"step {step}, {info.fidelity}"
            assert info.fidelity in ("exact", "near")
            assert (info.fidelity == "near") == (info.origin_id is not None)
            assert step < COUNT - 2 or info.fidelity == "exact"
        assert difference(store.restore(), state_of(COUNT - 1)) is None


def finish(place):
    """The interrupted demotion can be repeated, and then everything has its final form."""
    with crash_scenarios.open_store(place) as store:
        store.demote(policy=WANTED)
        for step in range(COUNT):
            wanted = state_of(step) if step >= COUNT - 2 else demoted_states()[step]
            assert difference(store.restore(step), wanted) is None
        assert store.verify("decode").damage == []
        store.commit(state_of(COUNT), COUNT)
        assert difference(store.restore(exact=True), state_of(COUNT)) is None


def recorded(wrap=lambda disk: disk):
    disk = filled(SimFS()).settled()
    with crash_scenarios.open_store(wrap(disk)) as store:
        store.demote(policy=WANTED)
    return disk


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_power_cut_in_demotion_loses_nothing(sample, note):
    disk = recorded()
    points = sample.part(range(len(disk.log) + 1), parts=40)
    count, finished, checked = 0, 0, CheckedStates()
    for state in crash_states(disk, seed=SEED, samples=60, points=set(points)):
        is_finished = count % FINISHED_EVERY == 0
        count += 1
        if not checked.is_new(state, level=is_finished):
            continue
        check(state.disk)
        if is_finished:
            finish(state.disk)
            assert order_violations(state.disk.log) == []
            finished += 1
    note(f"simulated power cuts, demote: seed {SEED}, {len(disk.log)} steps, {count} states, {len(checked)} different")
    assert count >= (1000 if sample.is_whole else len(points)) > 0
    assert finished > 0


def test_demotion_follows_sync_order():
    assert order_violations(recorded().log) == []


@pytest.mark.parametrize("skips", ["pack data", "folder packs", "folder manifests"])
def test_demotion_without_one_sync_breaks_order(skips):
    disk = recorded(lambda disk: SyncSkippingBackend(disk, [skips]))
    assert order_violations(disk.log), "the ordering rules did not notice that a sync is missing"


def test_tag_during_demotion_is_refused():
    class TaggingBackend(MemoryBackend):
        """Lets another handle tag every checkpoint of step 1 when its demotion is declared."""

        seen: ClassVar[list[str]] = []

        def link(self, source, target):
            super().link(source, target)
            if f"{1:08d}.intent-" in target:
                with ckstore.open(self, run=crash_scenarios.RUN) as other, pytest.raises(ConflictError):
                    other.tag(1, "late")
                self.seen.append(target)

    backend = filled(TaggingBackend())
    with crash_scenarios.open_store(backend) as store:
        store.demote(policy=WANTED)
        assert store.tags() == {}
        assert store.info(1).fidelity == "near"
    assert backend.seen
