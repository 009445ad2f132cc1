"""Protects checkpoints while they are put in replay form: wherever it stops, each is exact, or is made again exactly.

Also races: another process drops or demotes the base while the checkpoint is published.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.config import DemotePolicy
from ckstore.errors import ConflictError, NotFoundError
from ckstore.io.memory import MemoryBackend
from ckstore.store import repository as repository_module
from ckstore.store.repository import finish_interrupted_replacements
from ckstore.store.tags import Tags
from support import crash_scenarios
from support.crash_states import CheckedStates, crash_states
from support.faults import SyncSkippingBackend
from support.invariants import order_violations
from support.simfs import SimFS
from support.states import difference

SEED = 516
COUNT = 4
WANTED = DemotePolicy(keep_newest=1, keep_every=0)
FINISHED_EVERY = 20
"""Interval of the states in which the demotion is repeated."""

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.filterwarnings("ignore")]


def first_state():
    return {"w": np.arange(900, dtype=np.float32), "step": 0}


def train_until(state, step):
    for number in range(state["step"], step):
        state["w"] *= np.float32(1.01)
        state["w"] += np.float32(number)
    state["step"] = step


def state_of(step):
    state = first_state()
    train_until(state, step)
    return state


def filled(place):
    with crash_scenarios.open_store(place) as store:
        for step in range(1, COUNT + 1):
            store.commit(state_of(step), step, policy=replace(crash_scenarios.QUIET_POLICY, compression="none"))
    return place


def check(place):
    """Every checkpoint is whole or is made again, bit for bit; the oldest and the newest are whole."""
    with crash_scenarios.open_store(place) as store:
        forms = {info.step: info.form for info in store.log()}
        assert sorted(forms) == list(range(1, COUNT + 1))
        assert forms[1] == forms[COUNT] == "whole"
        for step, form in forms.items():
            found = store.restore(step) if form == "whole" else store.restore(step, replay=train_until)
            assert difference(found, state_of(step)) is None, f"step {step}, {form}"
        assert difference(store.restore(), state_of(COUNT)) is None


def finish(place):
    """The interrupted demotion can be repeated and collected, and then everything has its final form."""
    with crash_scenarios.open_store(place) as store:
        # Intents that the power cut has left name this process, which lives: they would keep the bases from being used.
        store.gc(min_age=0, clear_intents=True)
        store.demote(policy=WANTED, replay=train_until)
        store.gc(min_age=0, trash_for=0)
        forms = {info.step: info.form for info in store.log()}
        assert forms == {1: "whole", 2: "replay, from step 1", 3: "replay, from step 1", 4: "whole"}
        assert store.verify("decode").is_clean
    check(place)


def recorded(wrap=lambda disk: disk):
    disk = filled(SimFS()).settled()
    with crash_scenarios.open_store(wrap(disk)) as store:
        store.demote(policy=WANTED, replay=train_until)
    return disk


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_power_cut_loses_nothing(sample, note):
    disk = recorded()
    points = sample.part(range(len(disk.log) + 1), parts=20)
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
    note(f"simulated power cuts, replay form: seed {SEED}, {count} states, {len(checked)} different")
    assert count >= len(points) > 0
    assert finished > 0


def test_it_follows_sync_order():
    assert order_violations(recorded().log) == []


def test_without_a_sync_of_manifests_the_order_is_broken():
    disk = recorded(lambda disk: SyncSkippingBackend(disk, ["folder manifests"]))
    assert order_violations(disk.log), "the ordering rules did not notice that a sync is missing"


class ActingBackend(MemoryBackend):
    """Calls ``act`` once, before or after the manifest of generation 1 of a seq appears."""

    act = None
    is_late = False
    seq = 1

    def link(self, source, target):
        is_it = target.endswith(".1.ckm") and f"/{self.seq:08d}-" in target
        if is_it and self.act is not None and not self.is_late:
            act, self.act = self.act, None
            act()
        super().link(source, target)
        if is_it and self.act is not None:
            act, self.act = self.act, None
            act()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_base_that_is_deleted_meanwhile_stays_or_stops_the_demotion(is_late):
    backend = filled(ActingBackend())
    backend.is_late, results = is_late, []

    def delete_base():
        with crash_scenarios.open_store(backend) as other:
            try:
                results.append(other.delete(1).steps)
            except ConflictError as error:
                results.append(str(error))

    with crash_scenarios.open_store(backend) as store:
        backend.act = delete_base
        report = store.demote(policy=WANTED, replay=train_until)
        done = {entry.step for entry in report.entries if entry.is_done}
        if is_late:
            # The deletion sees what was published.
            assert "begins from it" in results[0]
            assert done == {2, 3}
        else:
            # The demotion sees that its base is gone, and withdraws.
            assert results == [(1,)]
            assert 2 not in done
            assert difference(store.restore(2, exact=True), state_of(2)) is None
        for info in store.log():
            found = store.restore(info.step, replay=None if info.form == "whole" else train_until)
            assert difference(found, state_of(info.step)) is None


def test_without_the_check_of_the_base_a_checkpoint_would_be_lost(monkeypatch):
    """The negative control of the test above."""
    monkeypatch.setattr(repository_module, "base_problem", lambda repository, manifest: "")
    backend = filled(ActingBackend())
    with crash_scenarios.open_store(backend) as store:
        backend.act = lambda: crash_scenarios.open_store(backend).delete(1)
        store.demote(2, replay=train_until)
        assert store.info(2).form == "replay, from step 1"
        with pytest.raises(NotFoundError, match="which is not in place"):
            store.restore(2, replay=train_until)


def test_an_interrupted_demotion_whose_base_is_gone_is_withdrawn(monkeypatch):
    backend = filled(MemoryBackend())
    with crash_scenarios.open_store(backend) as store, monkeypatch.context() as patch:
        patch.setattr("ckstore.ops.demote.finish_replacement", lambda *_, **__: None)
        store.demote(2, replay=train_until)
    with crash_scenarios.open_store(backend) as store, monkeypatch.context() as patch:
        assert store.info(2).form == "replay, from step 1"
        assert store.verify("decode").is_clean
        patch.setattr("ckstore.store.history.ReplayEntries.needed", lambda *_: {})
        store.delete(1)
    with crash_scenarios.open_store(backend) as store:
        assert not store.verify().is_clean, "a base is missing"
        finish_interrupted_replacements(repository_of(store))
        assert store.info(2).form == "whole"
        assert difference(store.restore(2, exact=True), state_of(2)) is None
        assert store.verify("decode").is_clean


def test_a_base_is_not_demoted_while_a_checkpoint_is_published_from_it():
    backend = filled(ActingBackend())
    backend.seq, results = 2, []
    with crash_scenarios.open_store(backend) as store:
        intents = []
        backend.act = lambda: intents.append(repository_of(store).tags.declare(1, "demote"))
        report = store.demote(3, replay=train_until)
        results += [entry.reason for entry in report.entries if entry.step == 3]
        assert results == [
            "seq 2 was put in replay form, and seq 1 (step 2), from which it begins, is being changed or deleted; the "
            "replacement was withdrawn"
        ]
        assert store.info(3).form == "whole"
        repository_of(store).tags.retract(intents[0])
        store.demote(3, replay=train_until)
        assert store.info(3).form == "replay, from step 2"


def test_a_tag_stops_it():
    backend = filled(ActingBackend())
    with crash_scenarios.open_store(backend) as store:

        def tag():
            with ckstore.open(backend, run=crash_scenarios.RUN) as other, pytest.raises(ConflictError):
                other.tag(2, "late")

        backend.act = tag
        store.demote(2, replay=train_until)
        assert store.info(2).form == "replay, from step 1"
        assert store.tags() == {}


def test_a_collection_drops_a_checkpoint_before_its_base(monkeypatch):
    backend = filled(MemoryBackend())
    marked = []
    with crash_scenarios.open_store(backend) as store:
        store.demote(policy=WANTED, replay=train_until)
        manifests = repository_of(store).manifests
        mark = type(manifests).mark_dropped
        monkeypatch.setattr(
            type(manifests), "mark_dropped", lambda self, of: marked.append(sorted(of)) or mark(self, of)
        )
        store.gc({"keep_last": 1}, min_age=0, trash_for=0)
        assert marked == [[1, 2], [0]]
        assert store.steps() == [COUNT]


def test_a_collection_spares_the_base_of_a_checkpoint_that_was_tagged_meanwhile(monkeypatch):
    backend = filled(MemoryBackend())
    with crash_scenarios.open_store(backend) as store:
        store.demote(policy=WANTED, replay=train_until)
        declare = Tags.declare_all

        def tag_first(tags, seqs, purpose):
            store.tag(2, "good")
            return declare(tags, seqs, purpose)

        monkeypatch.setattr(Tags, "declare_all", tag_first)
        report = store.gc({"keep_last": 1}, min_age=0, trash_for=0)
        assert [name.step for name in report.done.dropped] == [3]
        assert {name.step: why for name, why in report.done.spared.items()} == {
            1: "step 2 (seq 1), which is in replay form, begins from it",
            2: "it was tagged 'good' meanwhile",
        }
        assert difference(store.restore(2, replay=train_until), state_of(2)) is None
