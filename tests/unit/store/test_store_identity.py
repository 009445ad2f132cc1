"""Protects commits when an open store's folder becomes another store, and runs that contain a foreign manifest."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import BackendError, ConflictError, NotFoundError, UnreachableError
from ckstore.format import paths as layout
from ckstore.io.memory import MemoryBackend
from ckstore.store import manifests


def state_of(number):
    return {"w": np.arange(1000.0) + number}


def made(path):
    with ckstore.open(path) as store:
        store.commit(state_of(0), 0)


def switch_link(top):
    (top / "link").unlink()
    (top / "link").symlink_to(top / "other")


def recreate(top):
    shutil.rmtree(top / "first")
    made(top / "first")


def replace_folder(top):
    """Act like a mount over the folder: the path leads to another store."""
    (top / "first").rename(top / "hidden")
    (top / "other").rename(top / "first")


EXCHANGES = [switch_link, recreate, replace_folder]


@pytest.fixture
def top(tmp_path):
    made(tmp_path / "other")
    made(tmp_path / "first")
    (tmp_path / "link").symlink_to(tmp_path / "first")
    return tmp_path


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_commit_into_exchanged_folder_is_refused(top, exchange):
    with ckstore.open(top / "link") as store:
        store.commit(state_of(1), 1)
        exchange(top)
        with pytest.raises(ConflictError, match=r"another store .* is at this path now"):
            store.commit(state_of(2), 2)
    with ckstore.open(top / "link") as there:
        assert there.steps() == [0]
        assert there.verify().is_clean


VERBS = {
    "delete": lambda store: store.delete(0),
    "tag": lambda store: store.tag(0, "best"),
    "restore": lambda store: store.restore(0),
    "latest": lambda store: store.latest(),
    "log": lambda store: store.log(),
    "steps": lambda store: store.steps(),
    "rewind": lambda store: store.rewind(0),
    "gc": lambda store: store.gc(now=True, min_age=0),
    "verify": lambda store: store.verify(),
    "push": lambda store: store.push(store.attic, keep_local=0),
    "mirror": lambda store: store.mirror(store.attic),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_an_exchanged_folder(top, verb):
    with ckstore.open(top / "link") as store:
        store.attic = str(top / "attic")
        switch_link(top)
        with pytest.raises(ConflictError, match=r"another store .* is at this path now"):
            VERBS[verb](store)
    with ckstore.open(top / "other") as there:
        assert (there.steps(), there.tags(), there.verify().is_clean) == ([0], {}, True)
    assert not (top / "attic" / "manifests" / "main").exists()


@pytest.mark.parametrize("verb", [*VERBS, "commit"])
def test_missing_folder_is_an_error_not_an_empty_run(top, verb):
    verbs = {**VERBS, "commit": lambda store: store.commit(state_of(1), 1)}
    with ckstore.open(top / "link") as store:
        store.attic = str(top / "attic")
        (top / "first").rename(top / "elsewhere")
        (top / "first").mkdir()
        with pytest.raises(UnreachableError, match=r"store\.json is missing now"):
            verbs[verb](store)
        shutil.rmtree(top / "first")
        (top / "elsewhere").rename(top / "first")
        verbs[verb](store)


def test_same_store_remounted_is_accepted(top):
    """A remounted file system, or a copy at the same path, is the same store."""
    with ckstore.open(top / "first") as store:
        store.commit(state_of(1), 1)
        shutil.copytree(top / "first", top / "copy")
        shutil.rmtree(top / "first")
        (top / "copy").rename(top / "first")
        store.commit(state_of(2), 2)
    with ckstore.open(top / "first") as store:
        assert np.array_equal(store.restore(2)["w"], state_of(2)["w"])
        assert store.verify("decode").is_clean


class ExchangedBackend(MemoryBackend):
    """A folder that becomes another store during a publication, between the last check and the link."""

    other = None

    def link(self, source, target):
        if target.startswith("manifests/") and self.other is not None:
            self.unlink(layout.STORE_FILE)
            self.create(layout.STORE_FILE, self.other, sync=True)
        super().link(source, target)


@pytest.fixture
def exchanged():
    backend, other = ExchangedBackend(), MemoryBackend()
    ckstore.open(other).close()
    with ckstore.open(backend) as store:
        store.commit(state_of(0), 0)
        backend.other = other.read_bytes(layout.STORE_FILE, nbytes_max=1 << 20)
        yield store, backend


def test_exchange_during_publication_raises(exchanged):
    store, backend = exchanged
    with pytest.raises(ConflictError, match="is at this path now"):
        store.commit(state_of(1), 1)
    assert len(backend.list_names("manifests/main")) == 1


def test_without_second_check_exchange_is_missed(exchanged, monkeypatch):
    store, backend = exchanged
    checks = iter([True, True, False])
    real = manifests.require_same_store
    monkeypatch.setattr(manifests, "require_same_store", lambda *what: next(checks) and real(*what))
    store.commit(state_of(1), 1)
    assert len(backend.list_names("manifests/main")) == 2


class SilentBackend(MemoryBackend):
    """A folder whose ``store.json`` cannot be read after a manifest was linked."""

    is_silent = False

    def link(self, source, target):
        super().link(source, target)
        self.is_silent = self.is_silent or target.endswith("00000001-000000000001.0.ckm")

    def read_bytes(self, name, *, nbytes_max):
        if self.is_silent and name == layout.STORE_FILE:
            raise BackendError("the disk does not answer", where=name)
        return super().read_bytes(name, nbytes_max=nbytes_max)


def test_publish_with_unreadable_store_file_keeps_the_manifest():
    """It may be this very store, and others may rely on the manifest. So manifest and packs stay."""
    backend = SilentBackend()
    with ckstore.open(backend) as store:
        store.commit(state_of(0), 0)
        with pytest.raises(BackendError, match="does not answer"):
            store.commit(state_of(1), 1)
        backend.is_silent = False
    with ckstore.open(backend) as store:
        assert store.verify("decode").is_clean
        assert np.array_equal(store.restore(1)["w"], state_of(1)["w"])


# A foreign manifest


@pytest.fixture
def mixed(tmp_path):
    """A store of three checkpoints. The newest one's manifest is from another store."""
    made(tmp_path / "other")
    with ckstore.open(tmp_path / "other") as other:
        for step in (1, 2):
            other.commit(state_of(step), step)
    with ckstore.open(tmp_path / "store") as store:
        for step in range(2):
            store.commit(state_of(step), step)
    name = "00000002-000000000002.0.ckm"
    shutil.copy(tmp_path / "other/manifests/main" / name, tmp_path / "store/manifests/main" / name)
    (tmp_path / "store/claims/main/00000002").touch()
    with ckstore.open(tmp_path / "other") as other:
        paths = [layout.pack_name(bytes.fromhex(pack.pack_id)) for pack in other.contents(2).packs]
    for path in paths:
        shutil.copy(tmp_path / "other" / path, tmp_path / "store" / path)
    return tmp_path / "store", paths


def test_foreign_manifest_hides_no_other_checkpoint(mixed, caplog):
    folder, _ = mixed
    with ckstore.open(folder) as store:
        assert [info.step for info in store.log()] == [1, 0]
        assert store.latest().step == 1
        assert np.array_equal(store.restore()["w"], state_of(1)["w"])
        assert np.array_equal(store.restore(0)["w"], state_of(0)["w"])
        assert not store.verify("quick").is_clean
    assert "skipping seq 2 (step 2): the manifest belongs to another store" in caplog.text


def test_gc_keeps_packs_of_a_foreign_manifest(mixed):
    folder, packs = mixed
    with ckstore.open(folder) as store:
        store.commit(state_of(3), 3)
        store.delete(0)
        report = store.gc(now=True, min_age=0)
        assert report.freed_nbytes > 0
    assert all((folder / pack).exists() for pack in packs)


def test_log_continues_after_a_torn_manifest(tmp_path):
    with ckstore.open(tmp_path / "store") as store:
        for step in range(3):
            store.commit(state_of(step), step)
        path = tmp_path / "store/manifests/main/00000001-000000000001.0.ckm"
        path.write_bytes(path.read_bytes()[:100])
        assert [info.step for info in store.log()] == [2, 0]
        assert np.array_equal(store.restore(2)["w"], state_of(2)["w"])


def test_run_without_checkpoints_is_empty(tmp_path):
    with ckstore.open(tmp_path / "store") as store:
        assert store.latest() is None
        with pytest.raises(NotFoundError, match="has no checkpoint"):
            store.restore()
        assert repository_of(store).runs() == []
