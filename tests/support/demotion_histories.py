"""Shared by the tests of demotion: histories of small states with moments, and checks of them."""

from __future__ import annotations

import copy
import functools
import time

import numpy as np

import ckstore
from ckstore._testing import repository_of
from ckstore.store.refs import resolve
from ckstore.store.tags import Tags
from support.states import difference

SECONDS_MAX = 240
SHAPE = (260, 300)


def states(count):
    """Return the states of a run of its own, which a test may change."""
    return copy.deepcopy(_states(count))


@functools.cache
def _states(count, seed=3, shape=SHAPE):
    rng = np.random.default_rng(seed)
    w, found = rng.standard_normal(shape) * 0.02, []
    for step in range(count):
        w = w + rng.standard_normal(shape) * 1e-4
        v = np.exp(rng.standard_normal(shape)) * 1e-8
        entry = {"step": step, "exp_avg": (rng.standard_normal(shape) * np.sqrt(v) / 3).astype(np.float32)}
        entry["exp_avg_sq"] = v.astype(np.float32)
        groups = [{"betas": (0.9, 0.999), "params": [0]}]
        model = {"w": w.astype(np.float32), "bias": np.arange(50.0) + step}
        found.append({"model": model, "optimizer": {"state": {0: entry}, "param_groups": groups}, "step": step})
    return found


def filled(backend, count=8, **options):
    store, held = ckstore.open(backend, **options), states(count)
    for step, state in enumerate(held):
        store.commit(state, step, metrics={"loss": 3.0 - step})
    return store, held


def manifest_of(store, seq):
    return repository_of(store).manifests.load(resolve(repository_of(store), f"seq:{seq}"))


def while_coding(monkeypatch, backend, seq, act):
    """Call ``act`` once, when a demotion has declared its intent on a seq and writes the first pack of its new form."""
    declare, create_pack = Tags.declare, backend.create_pack
    is_coded = []

    def declare_and_note(tags, declared, purpose):
        path = declare(tags, declared, purpose)
        if (declared, purpose) == (seq, "demote"):
            is_coded.append(True)
            monkeypatch.setattr(Tags, "declare", declare)
        return path

    def act_first(name, *, nbytes_expected):
        if is_coded:
            is_coded.clear()
            act()
        return create_pack(name, nbytes_expected=nbytes_expected)

    monkeypatch.setattr(Tags, "declare", declare_and_note)
    monkeypatch.setattr(backend, "create_pack", act_first)


def fidelities(store):
    """Return what each checkpoint is, the newest first."""
    return [info.fidelity for info in store.log()]


def wait_until(is_so):
    """Wait for what another process does."""
    end = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def check_exact_or_near(store, held, *, newest):
    """Every checkpoint is whole, exact ones bit for bit, and the newest is one."""
    for step, state in enumerate(held[: newest + 1]):
        found = store.restore(step)
        if store.info(step).fidelity == "exact":
            assert difference(found, state) is None, step
        else:
            assert np.abs(found["model"]["w"] - state["model"]["w"]).max() < 2e-3
    assert difference(store.restore(exact=True), held[newest]) is None
    assert store.verify("decode").damage == []
