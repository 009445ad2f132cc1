"""Protects the local store from changed data in a tier: a pull verifies every byte before it uses it."""

from __future__ import annotations

import json

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.cli.main import run
from ckstore.errors import CapacityError, CorruptError
from ckstore.io.url import backend_for
from support.push_states import assert_restores, pack_of, packs_here, state_of


def put_over(backend, name, content):
    backend.unlink(name)
    backend.create(name, bytes(content), sync=True)


def content_of(backend, name):
    return bytearray(backend.read_bytes(name, nbytes_max=1 << 30))


def flipped(content, offset):
    content[offset] ^= 1
    return content


@pytest.mark.parametrize("offset", [100, 20_000, -5000, -20])
def test_altered_pack_is_not_pulled_until_fixed(pushed, folder, place, offset):
    pushed.gc(now=True)
    before, name, there = packs_here(folder), pack_of(pushed, 2), backend_for(place)
    sound = content_of(there, name)
    put_over(there, name, flipped(bytearray(sound), offset))
    with pytest.raises(CorruptError) as caught:
        pushed.pull(2)
    assert place in str(caught.value)
    assert name in str(caught.value)
    assert packs_here(folder) == before
    assert list((folder / "tmp").iterdir()) == []
    assert [pack.tier for pack in pushed.contents(2).packs] == ["remote"]
    assert_restores(pushed, 1, 3)
    put_over(there, name, sound)
    pushed.pull(2)
    assert pushed.verify("decode").is_clean
    assert_restores(pushed, 1, 2, 3)


def test_altered_payload_names_tensor_and_fails(pushed, folder, place, capsys, quiet_log):
    pushed.gc(now=True)
    name, there = pack_of(pushed, 1), backend_for(place)
    put_over(there, name, flipped(content_of(there, name), 20_000))
    with pytest.raises(CorruptError, match="offset") as caught:
        pushed.pull(1)
    assert caught.value.pack_id in name
    assert caught.value.tensors == ("w",)
    assert run(["pull", str(folder)]) == CorruptError.exit_code
    assert "is not what was pushed there" in capsys.readouterr().err
    assert_restores(pushed, 2, 3)


def test_altered_checkpoint_does_not_block_others(pushed, folder, place, capsys, quiet_log):
    pushed.commit(state_of(4), 4)
    pushed.push(keep_local=0)
    pushed.gc(now=True)
    there = backend_for(place)
    names = {step: pack_of(pushed, step) for step in (2, 3)}
    sound = {step: content_of(there, name) for step, name in names.items()}
    for step, name in names.items():
        put_over(there, name, flipped(bytearray(sound[step]), 20_000))
    with pytest.raises(CorruptError, match=r"seq 2 \(step 3\).*seq 1 \(step 2\)") as caught:
        pushed.pull()
    assert [(entry.step, entry.is_done) for entry in caught.value.report.entries] == [
        (4, True), (3, False), (2, False), (1, True),
    ]  # fmt: skip
    assert len(caught.value.checkpoints) == 2
    for name in names.values():
        there.unlink(name)
    assert_restores(pushed, 4, 1)
    for step, name in names.items():
        there.create(name, bytes(sound[step]), sync=True)
    put_over(there, names[3], flipped(bytearray(sound[3]), 20_000))
    assert run(["pull", str(folder), "--json"]) == CorruptError.exit_code
    said = capsys.readouterr()
    assert [(entry["step"], entry["is_done"]) for entry in json.loads(said.out)["checkpoints"]] == [
        (3, False),
        (2, True),
    ]
    assert "seq 2 (step 3) of run main" in said.err


def test_damaged_manifest_does_not_block_others(pushed, folder):
    pushed.gc(now=True)
    (manifest,) = folder.glob("manifests/main/*-000000000002.*")
    manifest.chmod(0o600)
    manifest.write_bytes(flipped(bytearray(manifest.read_bytes()), -100))
    with pytest.raises(CorruptError, match="seq 1"):
        pushed.pull()
    assert [pack.tier for pack in pushed.contents(1).packs] == ["local"]


def test_damaged_local_copy_is_pulled_again(pushed, folder):
    name = pack_of(pushed, 1)
    (folder / name).chmod(0o600)
    (folder / name).write_bytes(flipped(bytearray((folder / name).read_bytes()), 20_000))
    with pytest.raises(CorruptError, match="existing pack here") as caught:
        pushed.pull(1)
    assert str(folder / name) in str(caught.value)
    pushed.gc(now=True)
    pushed.pull(1)
    assert pushed.verify("decode").is_clean
    assert_restores(pushed, 1, 2, 3)


def test_store_in_bucket_pulls_no_altered_pack(server, address):
    attic = server.new_address()
    with ckstore.open(address) as store:
        for step in (1, 2):
            store.commit(state_of(step), step)
        store.push(attic, keep_local=1)
        name, there, home = pack_of(store, 1), backend_for(attic), backend_for(address)
        home.unlink(name)
        put_over(there, name, flipped(content_of(there, name), 20_000))
        with pytest.raises(CorruptError, match="is not what was pushed there"):
            store.pull(1)
        assert home.stat(name) is None
        put_over(there, name, flipped(content_of(there, name), 20_000))
        store.pull(1)
        assert_restores(store, 1, 2)


@pytest.mark.parametrize("room", [0, 1])
def test_full_disk_during_pull_loses_nothing(pushed, room, monkeypatch):
    """The packs that fit are here; the others stay in the tier, and can be pulled when there is space again."""
    pushed.gc(now=True, min_age=0)
    backend, made = repository_of(pushed).backend, []
    create = type(backend).create_pack

    def fills_up(self, name, **given):
        made.append(name)
        if len(made) > room:
            raise CapacityError("the disk is full", where=name)
        return create(self, name, **given)

    with monkeypatch.context() as patch:
        patch.setattr(type(backend), "create_pack", fills_up)
        with pytest.raises(CapacityError, match="the disk is full"):
            pushed.pull()
    assert len(made) > room
    assert_restores(pushed, 1, 2, 3)
    assert repository_of(pushed).backend.list_names("tmp") == []
    pushed.pull()
    assert {pack.tier for step in (1, 2, 3) for pack in pushed.contents(step).packs} == {"local"}
    assert_restores(pushed, 1, 2, 3)
