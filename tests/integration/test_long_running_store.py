"""Protects stores in long use: any order of all operations on two runs, two tiers and a mirror, against a model.

The operations are exact and lossy commits, rewinds, tags, deletions, collections by rules, purges of the trash,
repacks, demotions, pushes, pulls, mirrors, and crashes of the handle. At every moment each retained checkpoint restores
bit for bit what it restored when it was committed or demoted, dropped checkpoints can be undeleted until they are
purged, and verify finds no damage.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import ckstore
from ckstore.errors import BoundError, ConflictError
from support.memory_folders import new_folder
from support.model import difference

RUNS = ("main", "other")
TIERS = ("near", "far")
SHAPE = (160, 512)
"""Over 256 KiB in float32: separate chunks, so that deltas are used."""

POLICIES = {
    "none": ckstore.Policy(compression="none", threads=1),
    "fast": ckstore.Policy(threads=2),
    "best": ckstore.Policy(compression="best", threads=1),
    "near": ckstore.Policy(fidelity=ckstore.Residual.near(), threads=1),
    "small": ckstore.Policy(fidelity=ckstore.Residual.small(), threads=2),
}
ANY_RUN, ANY_TIER, ANY = st.sampled_from(RUNS), st.sampled_from(TIERS), st.integers(0, 99)
RULES = st.one_of(
    st.none(),
    st.builds(lambda count: ckstore.Retention(keep_last=count), st.integers(1, 3)),
    st.builds(lambda every: ckstore.Retention(keep_every=every, keep_last=1), st.integers(2, 3)),
)


@dataclass
class Entry:
    """A checkpoint: its expected content, and whether it is exact."""

    step: int
    state: dict
    is_exact: bool


class Trainer:
    """A state that changes like one of AdamW: every part slightly, each step."""

    def __init__(self, seed):
        self.source = np.random.default_rng(seed)
        self.state = {
            "model": {"w": self.draw(1.0), "frozen": np.arange(50_000) * seed},
            "optimizer": {"state": {0: {"step": 0, "exp_avg": self.draw(1e-3), "exp_avg_sq": self.draw(1e-3) ** 2}}},
            "step": 0,
        }

    def draw(self, scale):
        return (self.source.standard_normal(SHAPE) * scale).astype(np.float32)

    def train(self, size, moves_moments=True):
        """Do a step; with size 0 only the counters change."""
        before = self.state["optimizer"]["state"][0]
        first, second = before["exp_avg"], before["exp_avg_sq"]
        if size and moves_moments:
            first = first * np.float32(0.9) + self.draw(1e-4)
            second = second * np.float32(0.95) + self.draw(1e-4) ** 2
        moments = {"step": before["step"] + 1, "exp_avg": first, "exp_avg_sq": second}
        model = self.state["model"]
        weights = model["w"] + self.draw(size) if size else model["w"]
        step = self.state["step"] + 1
        self.state = {"model": {**model, "w": weights}, "optimizer": {"state": {0: moments}}, "step": step}


class LongRunningStore(RuleBasedStateMachine):
    """A store in a folder, and its expected content."""

    def __init__(self):
        super().__init__()
        self.folder = new_folder()
        self.trainers = {run: Trainer(seed) for seed, run in enumerate(RUNS)}
        self.entries = {run: {} for run in RUNS}
        self.dropped = {run: {} for run in RUNS}
        """What undelete must bring back."""
        self.tags = {run: {} for run in RUNS}
        self.stores = {}
        for run in RUNS:
            self.open(run)

    @initialize()
    def begin(self):
        for run in RUNS:
            self.commit(run, 1e-3, "fast")

    def open(self, run):
        self.stores[run] = ckstore.open(self.folder / "store", run=run)

    def pick(self, run, number):
        seqs = sorted(self.entries[run])
        return seqs[number % len(seqs)]

    def has_dropped(self):
        return any(self.dropped.values())

    # The trainer

    @rule(run=ANY_RUN, size=st.sampled_from([0, 1e-5, 1e-3]), kind=st.sampled_from(sorted(POLICIES)))
    def commit(self, run, size, kind):
        self.commit_step(run, kind, size)

    def commit_step(self, run, kind, size, moves_moments=True):
        store, trainer = self.stores[run], self.trainers[run]
        trainer.train(size, moves_moments)
        receipt = store.commit(trainer.state, trainer.state["step"], policy=POLICIES[kind])
        kept = trainer.state if receipt.fidelity == "exact" else store.restore(f"seq:{receipt.seq}")
        assert receipt.fidelity == "exact" or kind in ("near", "small")
        error = kept["model"]["w"] - trainer.state["model"]["w"]
        assert np.abs(error).max() <= 0.1
        for part in ("step", "frozen"):
            get = (lambda state: state["step"]) if part == "step" else (lambda state: state["model"]["frozen"])
            assert np.array_equal(get(kept), get(trainer.state))
        assert receipt.seq > max([-1, *self.entries[run], *self.dropped[run]])
        self.entries[run][receipt.seq] = Entry(receipt.step, kept, receipt.fidelity == "exact")

    @rule(run=ANY_RUN, number=ANY)
    def go_back(self, run, number):
        """Rewind, and train on from there."""
        old = self.entries[run][self.pick(run, number)]
        info = self.stores[run].rewind(f"seq:{self.pick(run, number)}")
        self.entries[run][info.seq] = Entry(old.step, old.state, old.is_exact)
        self.trainers[run].state = self.stores[run].restore()

    @rule(run=ANY_RUN)
    def reopen(self, run):
        self.stores[run].close()
        self.open(run)

    @rule(run=ANY_RUN, number=ANY)
    def tag(self, run, number):
        self.stores[run].tag(f"seq:{self.pick(run, number)}", "good")
        self.tags[run]["good"] = self.pick(run, number)

    @rule(run=ANY_RUN)
    def untag(self, run):
        if self.tags[run]:
            self.stores[run].untag("good")
            self.tags[run].clear()

    # The operator

    @rule(run=ANY_RUN, number=ANY)
    def delete(self, run, number):
        seq = self.pick(run, number)
        if seq in self.tags[run].values():
            with pytest.raises(ConflictError):
                self.stores[run].delete(f"seq:{seq}")
            return
        if len(self.entries[run]) == 1:
            return
        self.stores[run].delete(f"seq:{seq}")
        self.dropped[run][seq] = self.entries[run].pop(seq)

    @precondition(has_dropped)
    @rule(run=ANY_RUN, number=ANY)
    def undelete(self, run, number):
        if not self.dropped[run]:
            return
        seq = sorted(self.dropped[run])[number % len(self.dropped[run])]
        info = self.stores[run].undelete(f"seq:{seq}")
        self.entries[run][info.seq] = self.dropped[run].pop(seq)

    @rule(run=ANY_RUN, rules=RULES, is_now=st.booleans(), waste=st.sampled_from([None, 0.05]))
    def collect(self, run, rules, is_now, waste):
        store = self.stores[run]
        newest = store.latest().seq
        report = store.gc(rules, now=is_now, min_age=0, waste_max=waste)
        left = {info.seq for info in store.log()}
        gone = self.entries[run].keys() - left
        assert len(gone) == report.dropped_count
        assert left == self.entries[run].keys() - gone
        assert rules is not None or not gone
        assert newest not in gone
        assert not gone & set(self.tags[run].values())
        for seq in gone:
            self.dropped[run][seq] = self.entries[run].pop(seq)
        if is_now:
            self.forget_dropped()

    def forget_dropped(self):
        for dropped in self.dropped.values():
            dropped.clear()

    @rule(run=ANY_RUN)
    def empty_the_trash(self, run):
        self.stores[run].purge()
        # A checkpoint that was deleted and never collected may still be complete, but this is not guaranteed.
        self.forget_dropped()

    @rule(run=ANY_RUN)
    def repack(self, run):
        self.stores[run].repack()

    @rule(run=ANY_RUN, newest=st.integers(1, 2), every=st.sampled_from([0, 2]), kind=st.sampled_from(["near", "small"]))
    def demote(self, run, newest, every, kind):
        store = self.stores[run]
        policy = ckstore.DemotePolicy(keep_newest=newest, keep_every=every, fidelity=getattr(ckstore.Residual, kind)())
        report = store.demote(policy=policy)
        for entry in report.entries:
            if not entry.is_done:
                continue
            assert entry.seq not in self.tags[run].values()
            assert entry.seq != store.latest().seq
            had, has = self.entries[run][entry.seq], store.restore(f"seq:{entry.seq}")
            assert np.abs(has["model"]["w"] - had.state["model"]["w"]).max() <= 0.2
            assert np.array_equal(has["model"]["frozen"], had.state["model"]["frozen"])
            assert has["step"] == had.state["step"]
            is_exact = store.info(f"seq:{entry.seq}").fidelity == "exact"
            self.entries[run][entry.seq] = Entry(had.step, has, is_exact)

    @rule(run=ANY_RUN, tier=ANY_TIER, keep_local=st.integers(0, 3))
    def push(self, run, tier, keep_local):
        self.stores[run].push(str(self.folder / tier), keep_local=keep_local)

    @rule(run=ANY_RUN, number=ANY, is_all=st.booleans())
    def pull(self, run, number, is_all):
        self.stores[run].pull(None if is_all else f"seq:{self.pick(run, number)}")

    @rule(run=ANY_RUN, tier=ANY_TIER, waste=st.sampled_from([None, 0.05]))
    def collect_tier(self, run, tier, waste):
        address = str(self.folder / tier)
        names = [name for name, place in self.stores[run].tiers().items() if place.endswith(address)]
        if names:
            report = self.stores[run].gc_tier(names[0], min_age=0, waste_max=waste)
            assert (report.stop, report.repacked.troubles) == ("", [])

    @rule(run=ANY_RUN, tier=ANY_TIER)
    def push_and_purge_one(self, run, tier):
        """Push everything, then purge one checkpoint whose pack the next one partly needs."""
        self.commit_step(run, "none", 1e-3)
        self.commit_step(run, "none", 1e-3, moves_moments=False)
        self.push(run, tier, 0)
        self.delete(run, -2)
        self.collect(run, None, True, None)
        self.collect_tier(run, tier, 0.05)

    @rule(run=ANY_RUN)
    def mirror(self, run):
        self.stores[run].mirror(str(self.folder / "mirror"))
        for name in RUNS:
            with ckstore.open(self.folder / "mirror", run=name, create=False) as copy:
                assert self.entries[name].keys() <= {info.seq for info in copy.log()}
                newest = max(self.entries[name])
                assert difference(copy.restore(f"seq:{newest}"), self.entries[name][newest].state) is None

    # Readers

    @rule(run=ANY_RUN, number=ANY)
    def restore(self, run, number):
        self.check(run, self.pick(run, number))

    @rule(run=ANY_RUN, level=st.sampled_from(["quick", "read", "decode"]), is_remote=st.booleans())
    def verify(self, run, level, is_remote):
        report = self.stores[run].verify(level, remote=is_remote)
        assert report.is_clean, report.damage
        assert report.checkpoint_count == sum(len(entries) for entries in self.entries.values())

    def check(self, run, seq):
        wanted = self.entries[run][seq]
        store = self.stores[run]
        assert difference(store.restore(f"seq:{seq}"), wanted.state) is None
        assert (store.info(f"seq:{seq}").fidelity == "exact") == wanted.is_exact
        if not wanted.is_exact:
            with pytest.raises(BoundError):
                store.restore(f"seq:{seq}", exact=True)

    def teardown(self):
        try:
            for run in RUNS:
                assert {info.seq for info in self.stores[run].log()} == self.entries[run].keys()
                for seq in self.entries[run]:
                    self.check(run, seq)
            self.verify(RUNS[0], "decode", True)
            self.verify(RUNS[0], "decode", False)
        finally:
            for store in self.stores.values():
                store.close()
            shutil.rmtree(self.folder)


@pytest.fixture(autouse=True)
def quiet():
    logger = logging.getLogger("ckstore")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


@pytest.mark.deep
@pytest.mark.timeout(1500)
def test_long_running_store_matches_model():
    # An example takes about a second: the depth of the run sets their number with its Hypothesis profile.
    examples = max(5, settings.default.max_examples // 5)
    run_state_machine_as_test(LongRunningStore, settings=settings(settings.default, max_examples=examples))
