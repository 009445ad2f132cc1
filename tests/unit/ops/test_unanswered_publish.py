"""Protects a manifest that appears after its publish was reported as failed: its packs must exist."""

from __future__ import annotations

import pytest

import ckstore
from ckstore.config import DemotePolicy
from ckstore.errors import BackendError, CkstoreError
from ckstore.io.memory import MemoryBackend
from support.demotion_histories import states

WRITES = {
    "commit": lambda store, state: store.commit(state, 3),
    "repack": lambda store, state: store.repack(),
    "demote": lambda store, state: store.demote(policy=DemotePolicy(keep_newest=1, keep_every=0)),
}


def packs_of(backend):
    return {name for name in backend.files() if name.endswith(".pack")}


@pytest.mark.parametrize("is_uncertain", [True, False], ids=["unanswered", "refused"])
@pytest.mark.parametrize("verb", WRITES)
def test_late_manifest_of_failed_publish_has_its_packs(monkeypatch, verb, is_uncertain):
    *committed, last = states(4)
    backend = MemoryBackend()
    store = ckstore.open(backend)
    for step, state in enumerate(committed):
        store.commit(state, step)
    link, lost = backend.link, []

    def fail_once(source, target):
        if target.endswith(".ckm") and not lost:
            lost.append((target, backend.read_bytes(source, nbytes_max=1 << 30)))
            raise BackendError("no answer", where=target, is_uncertain=is_uncertain)
        return link(source, target)

    monkeypatch.setattr(backend, "link", fail_once)
    packs = packs_of(backend)
    with pytest.raises(CkstoreError):
        WRITES[verb](store, last)
    added = packs_of(backend) - packs
    assert bool(added) == is_uncertain, "without a possible late manifest, the packs are removed"
    if is_uncertain:
        backend.create(*lost[0], sync=True)
        again = ckstore.open(backend)
        assert again.verify("decode").is_clean
        for info in again.log():
            again.restore(info.step)
