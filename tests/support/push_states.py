"""States to be pushed, a check that they restore, and functions that locate their packs."""

from __future__ import annotations

import numpy as np

from ckstore._testing import repository_of
from ckstore.format import paths
from ckstore.store.listing import packs_in


def state_of(seed, count=60_000):
    source = np.random.default_rng(seed)
    return {"w": source.standard_normal(count).astype(np.float32), "step": seed}


def assert_restores(store, *steps):
    for step in steps:
        assert np.array_equal(store.restore(step)["w"], state_of(step)["w"])


def pack_of(store, step):
    return paths.pack_name(bytes.fromhex(store.contents(step).packs[0].pack_id))


def packs_here(folder):
    return {file.stem for file in folder.glob("packs/*/*.pack")}


def free_local_packs(store):
    """Remove what a collection would: packs here that no manifest says are here; return how many there were."""
    repository, named, count = repository_of(store), set(), 0
    for name in repository.manifests.listing().names:
        named |= {pack.pack_id for pack in repository.manifests.load(name).packs if pack.tier == "local"}
    for pack_id, _ in packs_in(repository.backend):
        if pack_id not in named:
            repository.backend.unlink(paths.pack_name(pack_id))
            count += 1
    return count
