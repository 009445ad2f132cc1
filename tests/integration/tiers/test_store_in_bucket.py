"""Protects stores in a bucket: everything but collection works there as in a folder."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore.cli.main import run as ckstore_command
from ckstore.errors import CkstoreError, NotFoundError


def state_of(seed, count=200_000):
    source = np.random.default_rng(seed)
    return {"model": {"w": source.standard_normal(count).astype(np.float32), "b": np.arange(7)}, "step": seed}


def assert_equal(got, wanted):
    assert np.array_equal(got["model"]["w"], wanted["model"]["w"])
    assert np.array_equal(got["model"]["b"], wanted["model"]["b"])
    assert got["step"] == wanted["step"]


def test_commits_are_listed_and_restored(address):
    with ckstore.open(address) as store:
        for step in (1, 2, 3):
            store.commit(state_of(step), step, metrics={"loss": 1 / step}, tags=["best"] if step == 2 else ())
    with ckstore.open(address, create=False) as store:
        assert [info.step for info in store.log()] == [3, 2, 1]
        assert store.tags() == {"best": 1}
        assert_equal(store.restore(), state_of(3))
        assert_equal(store.restore("best"), state_of(2))
        assert_equal(store.restore("best:loss:max"), state_of(1))
        part = store.restore(1, only="model.b")
        assert np.array_equal(part["model"]["b"], np.arange(7))
        assert store.verify("decode").is_clean


def test_empty_prefix_is_no_store(address):
    with pytest.raises(NotFoundError):
        ckstore.open(address, create=False)


def test_two_writers_never_take_the_same_seq(address):
    with ckstore.open(address, run="one") as first:
        first.commit(state_of(1), 1)
        first.close()
    with ckstore.open(address, run="one") as first, ckstore.open(address, run="two") as second:
        first.commit(state_of(2), 2)
        second.commit(state_of(3), 3)
        with pytest.raises(CkstoreError, match="being written"), ckstore.open(address, run="one") as third:
            third.commit(state_of(4), 4)
    with ckstore.open(address, run="one") as store:
        assert store.steps() == [1, 2]


def test_equal_bytes_are_stored_once(address):
    with ckstore.open(address) as store:
        first = store.commit(state_of(1), 1)
        again = store.commit(state_of(1), 2)
    assert first.bytes_written > 500_000
    assert again.chunks_new == 0


def test_seq_of_deleted_checkpoint_is_not_reused(address):
    with ckstore.open(address) as store:
        store.commit(state_of(1), 1)
        store.commit(state_of(2), 2)
        store.delete(1)
        assert store.steps() == [2]
        store.commit(state_of(3), 3)
        assert [info.seq for info in store.log()] == [2, 1]


def test_late_manifest_has_its_packs(address, proxy, few_retries):
    """The put of the manifest takes effect, but its answer and all later ones are lost."""
    with ckstore.open(address) as store:
        store.commit(state_of(1), 1)

        def lost(number, method, path):
            lost.is_on = lost.is_on or (method == "PUT" and path.endswith(".ckm"))
            return "500-after" if lost.is_on else ""

        lost.is_on = False
        proxy.begin(lost)
        with pytest.raises(CkstoreError) as caught:
            store.commit(state_of(2), 2)
        assert caught.value.is_uncertain
        proxy.begin()
    with ckstore.open(address, create=False) as store:
        assert_equal(store.restore(), state_of(2))
        assert store.verify("decode").is_clean


def test_folder_can_be_tier_of_store_in_bucket(address, tmp_path):
    """Its packs are read through the folder backend, and mixed with those of the bucket if one restore needs both."""
    attic, copy = str(tmp_path / "attic"), str(tmp_path / "copy")
    with ckstore.open(address) as store:
        for step in (1, 2, 3):
            store.commit({"mine": state_of(step), "shared": state_of(0)}, step)
        store.push(attic, keep_local=1, read_back=True)
        store.gc(now=True, min_age=0)
        for step in (1, 2, 3):
            got = store.restore(step)
            assert_equal(got["mine"], state_of(step))
            assert_equal(got["shared"], state_of(0))
        assert store.verify("decode", remote=True).is_clean
        store.mirror(copy)
        store.pull(2)
        assert {pack.tier for pack in store.contents(2).packs} == {"local"}
    with ckstore.open(address, create=False) as store:
        assert_equal(store.restore(1)["mine"], state_of(1))
        assert_equal(store.restore(2)["mine"], state_of(2))
    with ckstore.open(copy, create=False) as store:
        assert store.steps() == [1, 2, 3]
        assert store.verify("decode").is_clean


def test_server_without_conditions_accepts_only_copies(address, proxy, folder, monkeypatch):
    from ckstore.errors import UnsupportedError
    from ckstore.io.remote.client import Bucket

    put_once = Bucket._put_once

    def replaces(bucket, key, content, mode, attempt):
        put_once(bucket, key, content, "overwrite", attempt)

    monkeypatch.setattr(Bucket, "_put_once", replaces)
    with pytest.raises(UnsupportedError, match="If-None-Match"):
        ckstore.open(address)
    with ckstore.open(folder) as store:
        store.commit(state_of(1), 1)
        store.push(address, keep_local=0)
        assert_equal(store.restore(1), state_of(1))
    with ckstore.open(address) as store:
        assert_equal(store.restore(1), state_of(1))
        with pytest.raises(UnsupportedError, match="If-None-Match"):
            store.commit(state_of(2), 2)


def test_doctor_checks_a_store_in_a_bucket(address, capsys):
    with ckstore.open(address) as store:
        store.commit({"x": np.arange(9)}, 1)
    assert ckstore_command(["doctor", address]) == 0
    out = capsys.readouterr().out
    assert "checkpoints: 1" in out
    assert "warning" not in out
    assert ckstore_command(["doctor", f"{address}/nothing"]) == 0
    assert "there is no store here" in capsys.readouterr().out
