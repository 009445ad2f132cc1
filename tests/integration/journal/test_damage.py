"""Protects points against damaged files: a record costs what follows from it, a keyframe as little as possible."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import CorruptError
from ckstore.store.journals import Journals
from support.journaled_training import JournaledTraining, bits


def trained(place, *steps, **options):
    """Train from scratch as one process, and commit these steps; return the bits of each."""
    training = JournaledTraining()
    with ckstore.open(place) as store:
        store.journal(training.optimizer, **options)
        training.run(store, steps)
    return training.expected


def flip(path, *places):
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)


def damage_record(place, step, *, at):
    """Flip one byte of the newest record of a step: of its ``body``, or of the end of its ``frames``."""
    with ckstore.open(place, create=False) as store:
        repository = repository_of(store)
        journal = Journals(repository.manifests).read()
        records = [each for name in journal.segments for each in journal.records(name).records]
    record = next(each for each in reversed(records) if each.head.step == step)
    offset = 130 if at == "body" else record.head.frames_end - 200
    flip(Path(repository.backend.location_of(record.segment.path)), record.offset + offset)


def packs(place):
    return {path for path in Path(place, "packs").rglob("*") if path.is_file()}


def damage_packs(found):
    for path in found:
        flip(path, *range(4200, path.stat().st_size - 5000, 97))


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store"


@pytest.mark.parametrize("at", ["body", "frames"])
def test_a_damaged_record_costs_the_points_behind_it(place, at, caplog):
    expected = trained(place, *range(1, 8))
    damage_record(place, 5, at=at)
    with ckstore.open(place, create=False) as store:
        assert bits(store.restore()) == expected[4]
        assert store.restored.step == 4
        assert any("record 5 of the journal, step 5, cannot be read" in each for each in store.restored.warnings)
        assert "step 7 could not be replayed; this is an earlier state: record 5" in caplog.text
        with pytest.raises(CorruptError, match=r"record 5 of the journal, step 5, cannot be read: .*\.ckj"):
            store.restore(6)


def test_a_damaged_record_of_a_keyframe_costs_nothing_up_to_the_keyframe(place):
    expected = trained(place, *range(1, 9), keyframe_every=5)
    damage_record(place, 6, at="body")
    with ckstore.open(place, create=False) as store:
        assert bits(store.restore()) == expected[6]
        assert any("record 6 of the journal" in each for each in store.restored.warnings)


def test_a_damaged_keyframe_costs_nothing_if_an_earlier_one_can_be_read(place, caplog):
    training = JournaledTraining()
    with ckstore.open(place) as store:
        store.journal(training.optimizer, keyframe_every=5)
        training.run(store, range(1, 6))
        before = packs(place)
        training.run(store, range(6, 9))
        assert sorted(info.step for info in store.log()) == [1, 6]
    damage_packs(packs(place) - before)
    with ckstore.open(place, create=False) as store:
        assert bits(store.restore()) == training.expected[8]
        assert bits(store.restore(8)) == training.expected[8]
        assert "seq 1 could not be used" in caplog.text


def test_without_another_keyframe_only_the_option_goes_back(place):
    first = trained(place, 1, 2, 3)
    before = packs(place)
    trained(place, 10, 11, 12)
    damage_packs(packs(place) - before)
    with ckstore.open(place, create=False) as store:
        with pytest.raises(CorruptError, match=r"restore\(fallback=True\)"):
            store.restore()
        with pytest.raises(CorruptError, match="seq 1"):
            store.restore(12)
        assert bits(store.restore(fallback=True)) == first[3], "the newest point whose keyframe can be read"
        assert store.restored.step == 3
        assert any("seq 1 could not be used" in each for each in store.restored.warnings)


def test_the_option_goes_back_to_a_checkpoint(place):
    with ckstore.open(place) as store:
        store.commit({"x": 1}, 0)
    before = packs(place)
    trained(place, 1, 2, 3)
    damage_packs(packs(place) - before)
    with ckstore.open(place, create=False) as store:
        with pytest.raises(CorruptError, match=r"restore\(fallback=True\)"):
            store.restore()
        assert store.restore(fallback=True) == {"x": 1}
        assert any("seq 1 could not be used" in each for each in store.restored.warnings)


def test_a_keyframe_whose_pack_is_gone_is_skipped_as_a_checkpoint_is(place):
    first = trained(place, 1, 2, 3)
    before = packs(place)
    trained(place, 10, 11, 12)
    for path in packs(place) - before:
        path.unlink()
    with ckstore.open(place, create=False) as store:
        assert bits(store.restore()) == first[3]
        assert any("seq 1 could not be used" in each for each in store.restored.warnings)
