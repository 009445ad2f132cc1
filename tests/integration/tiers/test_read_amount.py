"""Protects the cost of restores from a bucket: they read what is needed, and little more."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.config import Policy

COUNT = 24


def state_of(seed):
    source = np.random.default_rng(seed)
    tensors = {f"w{index:02d}": source.standard_normal(400_000).astype(np.float32) for index in range(COUNT)}
    return {"model": tensors, "small": {f"s{index}": source.standard_normal(9) for index in range(50)}}


@pytest.fixture
def pushed(folder, proxy, address):
    with ckstore.open(folder, policy=Policy(compression="fast")) as store:
        store.commit(state_of(1), 1)
        store.push(address, keep_local=0)
        # What a collection would free.
        for file in folder.glob("packs/*/*.pack"):
            file.unlink()
        yield store


def stored_nbytes(store, paths):
    rows = {row.path: row for row in store.contents(1).tensors}
    return sum(rows[path].stored_nbytes for path in paths)


@pytest.mark.parametrize("only", ["model.w07", "model.w0*", "model.w?3"])
def test_partial_restore_reads_what_it_needs(pushed, proxy, only):
    proxy.begin()
    part = pushed.restore(1, only=only)
    wanted = [f"model.{name}" for name in part["model"]]
    needed = stored_nbytes(pushed, wanted)
    assert needed <= proxy.answered_nbytes <= 1.2 * needed
    assert np.array_equal(part["model"][wanted[0][6:]], state_of(1)["model"][wanted[0][6:]])


def test_partial_restore_in_bucket_reads_one_manifest(pushed, proxy, address):
    manifest_nbytes = next((repository_of(pushed).backend.stat(name.path).nbytes for name in names(pushed)), 0)
    needed = stored_nbytes(pushed, ["model.w11"])
    with ckstore.open(address, create=False) as there:
        proxy.begin()
        there.restore(1, only="model.w11")
    # Listings and store.json are a few kilobytes.
    assert proxy.answered_nbytes <= 1.2 * needed + manifest_nbytes + 20_000


def names(store):
    return repository_of(store).manifests.listing().names


def test_whole_restore_reads_once_in_few_requests(pushed, proxy):
    proxy.begin()
    restored = pushed.restore(1)
    assert all(np.array_equal(restored["model"][name], value) for name, value in state_of(1)["model"].items())
    total = sum(pack.nbytes for pack in pushed.contents(1).packs)
    assert proxy.answered_nbytes <= total
    assert len(proxy.seen) <= total // (2 << 20) + 12
