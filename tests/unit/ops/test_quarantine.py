"""Protects quarantine: it moves only unreadable files, and never files that may still be written."""

from __future__ import annotations

import pytest

from ckstore._testing import repository_of
from ckstore.io.memory import MemoryBackend
from support import damaged_stores as stores
from support.damaged_stores import opened
from support.memory_files import add, first_of, flip

pytestmark = pytest.mark.usefixtures("quiet_log")


@pytest.fixture
def backend():
    made = MemoryBackend()
    stores.fill(made)
    return made


def test_quarantine_moves_only_unreadable_manifests(backend):
    with opened(backend) as store:
        name = first_of(backend, "manifests/main/00000002")
        flip(backend, name, 30)
        planned = store.quarantine()
        assert list(planned.manifests) == [name]
        assert name in backend.files()
        done = store.quarantine(dry_run=False)
        assert (done.manifests, done.packs) == (planned.manifests, {})
        assert name not in backend.files()
        assert f"quarantine/{name}" in backend.files()
        assert store.quarantine().manifests == {}
        assert store.steps() == [1, 2]


def test_quarantine_skips_packs_that_may_be_in_use(backend):
    with opened(backend) as store:
        now = repository_of(store).clock.now_ns()
        for number, modified_ns in ((1, 1), (2, now)):
            name = f"packs/0{number}/0{number}{'00' * 15}.pack"
            add(backend, name, b"torn" * 2000, modified_ns=modified_ns)
        report = store.quarantine(dry_run=False)
        assert list(report.packs) == [f"packs/01/01{'00' * 15}.pack"]
        assert f"packs/02/02{'00' * 15}.pack" in backend.files()
