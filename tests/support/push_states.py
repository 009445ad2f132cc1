"""States to be pushed, what restores them, and where they lie."""

from __future__ import annotations

import numpy as np

from ckstore.format import layout


def state_of(seed, count=60_000):
    source = np.random.default_rng(seed)
    return {"w": source.standard_normal(count).astype(np.float32), "step": seed}


def assert_restores(store, *steps):
    for step in steps:
        assert np.array_equal(store.restore(step)["w"], state_of(step)["w"])


def pack_of(store, step):
    return layout.pack_name(bytes.fromhex(store.contents(step).packs[0].pack_id))


def packs_here(folder):
    return {file.stem for file in folder.glob("packs/*/*.pack")}
