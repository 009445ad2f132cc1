"""Protects the mirror: a complete, independent store that continues after an interruption."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ckstore
from ckstore.cli.main import run
from ckstore.errors import CorruptError, UsageError
from ckstore.format import paths
from ckstore.io.url import backend_for


def state_of(seed, count=30_000):
    source = np.random.default_rng(seed)
    return {"w": source.standard_normal(count).astype(np.float32), "step": seed}


def assert_holds(store, *steps):
    assert store.steps() == list(steps)
    for step in steps:
        assert np.array_equal(store.restore(step)["w"], state_of(step)["w"])
    assert store.verify("decode").is_clean


@pytest.fixture
def filled(folder):
    with ckstore.open(folder) as store:
        for step in (1, 2):
            store.commit(state_of(step), step, tags=["best"] if step == 1 else ())
    with ckstore.open(folder, run="other") as store:
        store.commit(state_of(7), 7)
    return folder


@pytest.mark.parametrize("is_bucket", [True, False])
def test_copy_holds_all_runs_and_tags(filled, address, tmp_path, is_bucket):
    place = address if is_bucket else str(tmp_path / "copy")
    with ckstore.open(filled) as store:
        report = store.mirror(place)
        assert [(each.run, each.checkpoint_count, each.copied_count, each.tag_count) for each in report.runs] == [
            ("main", 2, 2, 1),
            ("other", 1, 1, 0),
        ]
        assert store.tiers() == {}
        assert [{pack.tier for pack in store.contents(step).packs} for step in (1, 2)] == [{"local"}] * 2
    with ckstore.open(place, create=False) as copy:
        assert_holds(copy, 1, 2)
        assert copy.tags() == {"best": 0}
    with ckstore.open(place, run="other", create=False) as copy:
        assert_holds(copy, 7)


def test_second_mirror_copies_only_new_data(filled, address):
    with ckstore.open(filled) as store:
        store.mirror(address)
        store.untag("best")
        store.delete(1)
        store.commit(state_of(3), 3)
        store.tag(3, "best")
        planned = store.mirror(address, dry_run=True)
        assert [each.copied_count for each in planned.runs] == [1, 0]
        report = store.mirror(address, read_back=True)
        assert report.packs_copied == 1
        assert [(each.copied_count, each.kept_count, each.tag_count) for each in report.runs] == [(1, 1, 1), (0, 0, 0)]
    with ckstore.open(address, create=False) as copy:
        assert_holds(copy, 1, 2, 3)
        assert copy.tags() == {"best": 2}


def test_packs_in_a_bucket_are_mirrored(filled, address, tmp_path):
    with ckstore.open(filled) as store:
        store.push(address, keep_local=0)
        for pack in (filled / "packs").glob("*/*.pack"):
            if pack.stem in {row.pack_id for step in (1, 2) for row in store.contents(step).packs}:
                pack.unlink()
        store.mirror(str(tmp_path / "copy"))
    with ckstore.open(tmp_path / "copy", create=False) as copy:
        assert_holds(copy, 1, 2)


def test_repacked_checkpoint_is_mirrored_in_new_form(filled, address):
    with ckstore.open(filled) as store:
        store.mirror(address)
        # Add a generation with the same content.
        store.push(str(filled.parent / "attic"), keep_local=0)
        store.pull()
        assert [each.copied_count for each in store.mirror(address).runs] == [2, 0]
    with ckstore.open(address, create=False) as copy:
        assert_holds(copy, 1, 2)


def pack_of(store, step):
    return paths.pack_name(bytes.fromhex(store.contents(step).packs[0].pack_id))


def alter(path):
    content = bytearray(path.read_bytes())
    content[20_000] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)


def test_missing_pack_is_reported_and_rest_is_copied(filled, address):
    with ckstore.open(filled) as store:
        (filled / pack_of(store, 2)).unlink()
        with pytest.raises(CorruptError, match=r"seq 1 \(step 2\) of run main") as caught:
            store.mirror(address)
        facts = [(each.run, each.copied_count, each.damaged_count) for each in caught.value.report.runs]
        assert facts == [("main", 1, 1), ("other", 1, 0)]
    with ckstore.open(address, create=False) as copy:
        assert_holds(copy, 1)


@pytest.mark.parametrize("is_bucket", [True, False])
def test_altered_pack_is_not_copied_until_fixed(filled, address, tmp_path, is_bucket, capsys, quiet_log):
    place = address if is_bucket else str(tmp_path / "copy")
    with ckstore.open(filled) as store:
        path = filled / pack_of(store, 1)
        sound = path.read_bytes()
        alter(path)
        with pytest.raises(CorruptError, match=r"seq 0 \(step 1\) of run main.*offset") as caught:
            store.mirror(place)
        assert str(path) in str(caught.value)
        assert caught.value.tensors == ("w",)
        assert backend_for(place).stat(pack_of(store, 1)) is None
        assert run(["mirror", str(filled), place, "--json"]) == CorruptError.exit_code
        said = capsys.readouterr()
        assert [each["damaged_count"] for each in json.loads(said.out)["runs"]] == [1, 0]
        assert "damaged and was not copied" in said.err
        with ckstore.open(place, create=False) as copy:
            assert_holds(copy, 2)
            assert copy.tags() == {}
        path.write_bytes(sound)
        store.mirror(place)
    with ckstore.open(place, create=False) as copy:
        assert_holds(copy, 1, 2)
        assert copy.tags() == {"best": 0}


def test_altered_pack_in_the_copy_is_found_when_needed(filled, tmp_path):
    place = tmp_path / "copy"
    with ckstore.open(filled) as store:
        store.mirror(str(place))
        alter(place / pack_of(store, 2))
        # The same bytes again, in another checkpoint.
        store.rewind(2)
        with pytest.raises(CorruptError, match="existing pack in the copy") as caught:
            store.mirror(str(place))
        assert str(place) in str(caught.value)


def test_store_in_a_bucket_is_copied_to_a_folder(address, tmp_path):
    with ckstore.open(address) as store:
        for step in (1, 2):
            store.commit(state_of(step), step)
        store.mirror(str(tmp_path / "copy"), read_back=True)
        store.rewind(1)
        store.mirror(str(tmp_path / "copy"))
    with ckstore.open(tmp_path / "copy", create=False) as copy:
        assert_holds(copy, 1, 2)


def test_store_cannot_mirror_itself(filled, tmp_path):
    with ckstore.open(filled) as store, pytest.raises(UsageError, match="itself"):
        store.mirror(str(filled))
