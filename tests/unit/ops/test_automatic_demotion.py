"""Protects demotion after commits, by given or stored rules, and the stored form of these rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ckstore
from ckstore import Residual
from ckstore._testing import repository_of
from ckstore.config import DemotePolicy, Policy
from ckstore.errors import CorruptError, UsageError
from ckstore.io.memory import MemoryBackend
from ckstore.ops import demote as demoting
from ckstore.ops.scheduled import AutomaticDemotion
from ckstore.ops.stored_policies import rules_of
from ckstore.store.store_config import change_config, read_config
from support.demotion_histories import fidelities, filled, states
from support.memory_files import flip

ALL = DemotePolicy(keep_newest=1, keep_every=0)


def test_stored_rules_are_applied_as_stored():
    with ckstore.open(MemoryBackend(), demotion="stored", demote_every=2) as store:
        held = states(6)
        for step in (0, 1):
            store.commit(held[step], step)
        assert set(fidelities(store)) == {"exact"}
        store.set_demotion({"keep_newest": 1, "keep_every": 0, "fidelity": "near"})
        store.commit(held[2], 2)
        assert set(fidelities(store)) == {"exact"}
        store.commit(held[3], 3)
        assert fidelities(store) == ["exact", "near", "near", "near"]


def test_futile_demotion_is_not_repeated(store, monkeypatch):
    tried = []
    demote = demoting.demote

    def noting(*args, **options):
        report = demote(*args, **options)
        tried.extend(entry.seq for entry in report.entries if entry.is_final)
        return report

    monkeypatch.setattr(demoting, "demote", noting)
    automatic = AutomaticDemotion(repository_of(store), ALL, Policy())
    for step in range(4):
        store.commit({"counts": np.arange(9000) + step}, step)
        automatic.after_commit(step)
    assert tried == [0, 1, 2]


# The stored rules


def test_stored_policy_round_trips(tmp_path):
    own = replace(Residual.small(), max_rel_rms=0.5, rules=(("model.*", "exact"),))
    with ckstore.open(tmp_path / "store") as store:
        assert store.demotion is None
        for policy in (ALL, DemotePolicy(fidelity=Residual.near()), DemotePolicy(fidelity=own, saving_min=0.25)):
            store.set_demotion(policy)
            with ckstore.open(tmp_path / "store") as other:
                assert other.demotion == policy
        store.set_retention({"keep_last": 3})
        assert store.demotion is not None
        store.set_demotion(None)
        assert (store.demotion, store.retention) == (None, ckstore.Retention(keep_last=3))


def test_stored_form_matches_the_format(store):
    backend = repository_of(store).backend
    change_config(backend, lambda record: type(record)(policy={"other": {"x": 1}}))
    store.set_demotion(ALL)
    demotion = {"keep_newest": 1, "keep_every": 0, "fidelity": "near", "compression": "fast", "saving_min": 0.03}
    assert read_config(backend).policy == {"other": {"x": 1}, "demotion": demotion}
    store.set_demotion(None)
    assert read_config(backend).policy == {"other": {"x": 1}}
    own = replace(Residual.small(), max_abs=0.5)
    assert rules_of(DemotePolicy(fidelity=own))["fidelity"]["kind"] == "Residual"


@pytest.mark.parametrize("kind", ["PrunedWeights", "PrunedMoments"])
def test_stored_policy_with_removed_settings_is_refused(store, kind):
    tensors = {"kind": "TensorSettings", "weights": {"kind": kind, "bits": 4}}
    rules = {"fidelity": {"kind": "Residual", "name": "excp", "tensors": tensors}}
    change_config(repository_of(store).backend, lambda record: type(record)(policy={"demotion": rules}))
    for verb in (store.demote, lambda: store.demotion, lambda: store.set_demotion(rules)):
        with pytest.raises(UsageError, match=f"{kind} no longer exists; use Residual.near"):
            verb()


def test_stored_rules_are_the_default():
    store, _ = filled(MemoryBackend(), 4)
    store.set_demotion({"keep_newest": 2, "keep_every": 0, "fidelity": "small"})
    store.demote()
    assert fidelities(store) == ["exact", "exact", "small", "small"]
    store.demote(policy={"keep_newest": 1, "keep_every": 0})
    assert fidelities(store) == ["exact", "near", "small", "small"]


@pytest.mark.parametrize(
    "rules",
    [
        {"keep_newst": 1},
        {"keep_newest": "3"},
        {"keep_newest": 0},
        {"fidelity": "exact"},
        {"fidelity": {"kind": "Policy"}},
        {"fidelity": {"name": "x"}},
        {"fidelity": {"kind": "Residual", "depth": 3}},
        {"fidelity": {"kind": ["Residual"]}},
        {"compression": "none"},
    ],
)
def test_invalid_rules_are_refused(tmp_path, rules):
    with pytest.raises(UsageError):
        ckstore.open(tmp_path / "new", demotion=rules)
    assert not (tmp_path / "new").exists()
    store, _ = filled(MemoryBackend(), 2)
    for verb in (store.set_demotion, lambda rules: store.demote(policy=rules)):
        with pytest.raises(UsageError):
            verb(rules)
    change_config(repository_of(store).backend, lambda record: type(record)(policy={"demotion": rules}))
    with pytest.raises(UsageError):
        store.demote()
    change_config(repository_of(store).backend, lambda record: type(record)(policy={"demotion": 3}))
    with pytest.raises(UsageError):
        store.demote()
    assert set(fidelities(store)) == {"exact"}


def test_misspelled_rule_names_the_nearest():
    store, _ = filled(MemoryBackend(), 1)
    with pytest.raises(UsageError, match="'keep_newest'"):
        store.demote(policy={"keep_newst": 1})


def test_damaged_config_demotes_nothing():
    store, _ = filled(MemoryBackend(), 3)
    store.set_demotion(ALL)
    flip(repository_of(store).backend, "config.json", 30)
    with pytest.raises(CorruptError):
        store.demote()
    assert set(fidelities(store)) == {"exact"}


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "3"])
def test_interval_is_checked(store, every):
    with pytest.raises(UsageError, match="demote_every"):
        AutomaticDemotion(repository_of(store), ALL, Policy(), every=every)
