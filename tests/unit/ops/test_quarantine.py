"""Putting aside what cannot be read moves it and nothing else, and never what may still be written."""

from __future__ import annotations

import pytest

from ckstore.io.memory import MemoryBackend, _File
from support import damaged_stores as stores
from support.damaged_stores import opened

pytestmark = pytest.mark.usefixtures("quiet_log")


@pytest.fixture
def backend():
    made = MemoryBackend()
    stores.fill(made)
    return made


def test_quarantine_moves_unreadable_manifests_and_nothing_else(backend):
    with opened(backend) as store:
        name = next(name for name in backend._files if name.startswith("manifests/main/00000002"))
        backend._files[name].content[30] ^= 1
        planned = store.quarantine()
        assert list(planned.manifests) == [name]
        assert name in backend._files
        done = store.quarantine(dry_run=False)
        assert (done.manifests, done.packs) == (planned.manifests, {})
        assert name not in backend._files
        assert f"quarantine/{name}" in backend._files
        assert store.quarantine().manifests == {}
        assert store.steps() == [1, 2]


def test_quarantine_leaves_packs_that_may_still_be_written(backend):
    with opened(backend) as store:
        now = store._parts.clock.now_ns()
        for number, modified_ns in ((1, 1), (2, now)):
            backend._files[f"packs/0{number}/0{number}{'00' * 15}.pack"] = _File(b"torn" * 2000, modified_ns)
        report = store.quarantine(dry_run=False)
        assert list(report.packs) == [f"packs/01/01{'00' * 15}.pack"]
        assert f"packs/02/02{'00' * 15}.pack" in backend._files
