"""Protects local packs if someone else changes a tier: a pack is freed only after it was just verified there."""

from __future__ import annotations

import json

import pytest

import ckstore
from ckstore.cli.main import run
from ckstore.errors import CorruptError
from ckstore.io.url import backend_for
from support.push_states import assert_restores, pack_of, packs_here, state_of


def other_bytes(there, name):
    content = bytearray(there.read_bytes(name, nbytes_max=1 << 30))
    content[-300:] = bytes(300)
    return bytes(content)


def shorter_bytes(there, name):
    return there.read_bytes(name, nbytes_max=1 << 30)[:-4096]


def change_there(place, name, how):
    """Change a pack in the tier, which ckstore never does."""
    there = backend_for(place)
    content = None if how == "gone" else (other_bytes if how == "other bytes" else shorter_bytes)(there, name)
    there.unlink(name)
    if content is not None:
        there.create(name, content, sync=True)


@pytest.mark.parametrize("how", ["gone", "other bytes", "another size"])
def test_pack_missing_in_tier_is_not_freed_locally(pushed, folder, place, how, quiet_log):
    name, before = pack_of(pushed, 1), packs_here(folder)
    change_there(place, name, how)
    planned = pushed.gc(now=True, dry_run=True)
    report = pushed.gc(now=True)
    assert [each.is_damage for each in report.unproven.values()] == [True]
    assert planned.plan == report.plan
    assert len(before) - len(packs_here(folder)) == 1, "what was proven is freed"
    assert_restores(pushed, 1, 2, 3)
    # After a pull the local pack counts again, and can be pushed once the other one is removed.
    pushed.pull(1)
    assert pushed.gc(now=True).unproven == {}
    assert_restores(pushed, 1, 2, 3)


def test_trashed_pack_is_restored_if_tier_lost_it(pushed, folder, place, quiet_log):
    name, before = pack_of(pushed, 2), packs_here(folder)
    assert pushed.gc().done.moved_packs == 2
    change_there(place, name, "gone")
    report = pushed.gc(trash_for=0)
    assert len(report.unproven) == report.done.rescued == 1
    assert len(before) - len(packs_here(folder)) == 1
    assert_restores(pushed, 1, 2, 3)


def test_purge_checks_the_tier(pushed, folder, place):
    name = pack_of(pushed, 2)
    pushed.gc()
    change_there(place, name, "gone")
    with pytest.raises(CorruptError, match="lacks what was pushed"):
        pushed.purge()
    assert (folder / name).exists()
    assert_restores(pushed, 1, 2, 3)


def test_packs_stay_if_tier_lost_the_manifest(pushed, folder, place, quiet_log):
    there, before = backend_for(place), packs_here(folder)
    gone = there.list_names("manifests/main")[0]
    there.unlink(f"manifests/main/{gone}")
    report = pushed.gc(now=True)
    assert "manifest of seq 0" in next(iter(report.unproven.values())).problem
    assert len(before) - len(packs_here(folder)) == 1


def test_rewound_checkpoint_needs_no_manifest_in_tier(pushed, folder):
    pushed.rewind(1)
    before = packs_here(folder)
    report = pushed.gc(now=True)
    assert report.unproven == {}
    assert len(before) - len(packs_here(folder)) == 2


def test_command_reports_it_and_fails(pushed, folder, place, capsys, quiet_log):
    name = pack_of(pushed, 1)
    change_there(place, name, "gone")
    assert run(["gc", str(folder), "--now", "--json"]) == CorruptError.exit_code
    said = capsys.readouterr()
    assert "lacks what was pushed to it" in said.err
    assert len(json.loads(said.out)["done"]["unproven"]) == 1
    assert (folder / name).exists()


# A tier that does not answer


def interrupted(folder, place, monkeypatch):
    """A push that was killed after publishing, and unrelated garbage."""
    from ckstore.tiers import push

    with ckstore.open(folder) as store:
        for step in (1, 2, 3):
            store.commit(state_of(step), step)
        with monkeypatch.context() as patches:
            patches.setattr(push, "finish_replacement", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                store.push(place, keep_local=2)
        store.delete(2)


def test_silent_tier_blocks_only_dependent_packs(folder, address, few_retries, monkeypatch, capsys, quiet_log):
    interrupted(folder, address, monkeypatch)
    before = packs_here(folder)
    endpoint = "http://127.0.0.1:9"
    with monkeypatch.context() as patches, ckstore.open(folder) as store:
        patches.setenv("AWS_ENDPOINT_URL", endpoint)
        report = store.gc(now=True)
        assert list(report.done.waits) == ["remote"]
        assert len(before) - len(packs_here(folder)) == 1, "the checkpoint that was dropped is freed"
        assert_restores(store, 1, 3)
        assert run(["gc", str(folder), "--now"]) == 0
        said = capsys.readouterr().out
        assert "Tier remote does not answer, so local copies of its packs stay" in said
    with ckstore.open(folder) as store:
        assert store.gc(now=True).done.superseded == 1
        assert len(before) - len(packs_here(folder)) == 2
        assert_restores(store, 1, 3)


def test_packs_stay_in_trash_while_tier_is_silent(folder, address, few_retries, monkeypatch, quiet_log):
    with ckstore.open(folder) as store:
        for step in (1, 2):
            store.commit(state_of(step), step)
        store.push(address, keep_local=1)
        assert store.gc().done.moved_packs == 1
        with monkeypatch.context() as patches, ckstore.open(folder) as other:
            patches.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
            report = other.gc(trash_for=0)
            assert (report.done.freed_files, report.done.rescued) == (1, 0), "the superseded manifest and no pack"
            assert [tier for tier, _ in report.waits] == ["remote"]
        assert store.gc(trash_for=0).freed_nbytes > 200_000
        assert_restores(store, 1, 2)
