"""Protects the names of tiers: only a reachable location gets a name, and only an unused tier loses it."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.cli.main import run
from ckstore.errors import BackendError, CkstoreError, ConflictError, NotFoundError, UsageError


def state_of(seed):
    return {"w": np.random.default_rng(seed).standard_normal(5000).astype(np.float32)}


@pytest.fixture
def store(folder):
    with ckstore.open(folder) as store:
        for step in (1, 2):
            store.commit(state_of(step), step)
        yield store


@pytest.mark.parametrize("keep_local", [1, 9])
def test_unreachable_location_gets_no_name(store, folder, address, keep_local):
    with pytest.raises(CkstoreError):
        store.push("s3://no-such-bucket-at-all/runs", keep_local=keep_local)
    assert store.tiers() == {}
    assert not (folder / "config.json").exists()
    store.push(address, keep_local=keep_local)
    assert store.tiers() == {"remote": address}


def test_silent_server_gets_no_name(store, address, few_retries, monkeypatch):
    with monkeypatch.context() as patches:
        patches.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(BackendError):
            store.push(address)
    assert store.tiers() == {}


def test_location_of_another_store_gets_no_name(store, tmp_path):
    ckstore.open(tmp_path / "other").close()
    with pytest.raises(UsageError, match="another store"):
        store.push(str(tmp_path / "other"))
    assert store.tiers() == {}


def test_unused_tier_is_forgotten(store, address, tmp_path):
    wrong = str(tmp_path / "wrong")
    store.push(wrong, keep_local=9)
    repository_of(store).tiers.open("remote")
    assert store.forget_tier("remote") == wrong
    assert store.tiers() == {}
    store.push(address)
    assert store.tiers() == {"remote": address}
    store.gc(now=True)
    assert np.array_equal(store.restore(1)["w"], state_of(1)["w"])
    with pytest.raises(NotFoundError, match="Existing tiers: remote"):
        store.forget_tier("remot")


def test_used_tier_is_not_forgotten(store, address):
    store.push(address)
    with pytest.raises(UsageError, match=r"seq 0 \(step 1\) of run 'main' names"):
        store.forget_tier("remote")
    store.pull()
    with pytest.raises(UsageError, match="in the trash"):
        store.forget_tier("remote")
    store.purge()
    assert store.forget_tier("remote") == address
    assert np.array_equal(store.restore(1)["w"], state_of(1)["w"])


def test_other_settings_are_kept(store, tmp_path):
    store.set_retention({"keep_last": 3})
    store.push(str(tmp_path / "a"), keep_local=9, tier="a")
    store.push(str(tmp_path / "b"), keep_local=9, tier="b")
    store.forget_tier("a")
    assert store.tiers() == {"b": str(tmp_path / "b")}
    assert store.retention == ckstore.Retention(keep_last=3)


def test_concurrent_push_keeps_the_tier(store, folder, address, monkeypatch):
    from ckstore.tiers import copy

    look, looks = copy._users, []

    def push_after_first_check(parts, tier):
        looks.append(tier)
        if len(looks) == 2:
            with ckstore.open(folder) as other:
                other.push(address)
        return look(parts, tier)

    store.push(address, keep_local=9)
    monkeypatch.setattr(copy, "_users", push_after_first_check)
    with pytest.raises(ConflictError, match="so it was not removed"):
        store.forget_tier("remote")
    assert store.tiers() == {"remote": address}


def test_push_renames_concurrently_forgotten_tier(store, address, monkeypatch):
    publish = type(repository_of(store).manifests).publish

    def forgets_first(manifests, manifest):
        repository_of(store).tiers.forget("remote")
        return publish(manifests, manifest)

    monkeypatch.setattr(type(repository_of(store).manifests), "publish", forgets_first)
    store.push(address)
    assert store.tiers() == {"remote": address}


def test_command_forgets(store, folder, tmp_path, capsys, quiet_log):
    store.push(str(tmp_path / "wrong"), keep_local=9)
    assert run(["push", str(folder), "--forget", "remote", "--tier", "x"]) == UsageError.exit_code
    assert run(["push", str(folder), "--forget", "remote", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"forgotten": "remote", "address": str(tmp_path / "wrong")}
    assert store.tiers() == {}
