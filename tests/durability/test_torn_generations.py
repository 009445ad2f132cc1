"""Protects a checkpoint from a replacement that was killed before it verified its packs, and whose packs were freed.

Such a generation is called torn. The lower generation is still complete, and a restore returns it. Also protects packs
that other processes move to the trash and back from being reported missing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import MissingChunkError, NotFoundError
from ckstore.hashing import PackId
from ckstore.io.memory import MemoryBackend
from ckstore.ops.gc.policy import Retention
from ckstore.ops.pack_copies import PackCopies
from ckstore.store.refs import load_whole, newest_whole, resolve
from ckstore.store.trash import Trash
from support.drop_marks import mark_dropped
from support.gc_histories import (
    LAST_ONE,
    PLAIN,
    check_restores,
    commit_all,
    commit_half_needed,
    damage,
    once,
    other_handle,
    pack_of,
    parts_state,
)
from support.model import difference


class Killed(BaseException):
    """Ends a collector as SIGKILL does."""


@pytest.fixture
def backend(clock):
    return MemoryBackend(clock=clock)


@pytest.fixture
def store(backend, clock):
    with ckstore.open(backend, clock=clock, policy=PLAIN) as opened:
        yield opened


STATES = {1: parts_state(1, {1, 2, 3}), 2: parts_state(2, {0, 1, 2, 3})}


@pytest.fixture
def torn(store, clock, monkeypatch):
    """A store in which step 1 has a generation with a missing pack, above the acknowledged generation."""
    commit_half_needed(store, clock)
    tear(store, monkeypatch)
    return store


def tear(store, monkeypatch):
    """Rewrite a pack for step 1, let another collector free the new pack, publish, and die."""

    def die():
        raise Killed

    def free():
        other_handle(store).gc(now=True, min_age=0, repack_nbytes_max=0)

    once(monkeypatch, type(repository_of(store).manifests), "publish", before=free, after=die)
    with pytest.raises(Killed):
        other_handle(store).gc(Retention(keep_last=2), now=True)


def generations(store, step):
    listing = repository_of(store).manifests.listing()
    return sorted(name.generation for name in (*listing.names, *listing.lower) if name.step == step)


def restores(store):
    assert store.steps() == [1, 2]
    for step, state in STATES.items():
        found = difference(store.restore(step), state)
        assert found is None, found


def test_restore_skips_torn_generation_with_warning(torn, caplog):
    assert generations(torn, 1) == [0, 1]
    torn_one = resolve(repository_of(torn), 1)
    assert torn_one.generation == 1
    assert repository_of(torn).packs_not_found({pack.pack_id: pack.nbytes for pack in load(torn, torn_one).packs})
    assert load_whole(repository_of(torn), torn_one, takes_lower=True).header.generation == 0
    assert "skipping generation 1, using generation 0: pack" in caplog.text
    restores(torn)


@pytest.mark.parametrize("replace_it", ["repack", "demote", "push"])
def test_replacing_torn_generation_reports_missing(torn, tmp_path, replace_it):
    acts = {
        "repack": torn.repack,
        "demote": lambda: torn.demote("seq:1"),
        "push": lambda: torn.push(str(tmp_path / "there")),
    }
    with pytest.raises(MissingChunkError, match="seq 1"):
        acts[replace_it]()
    assert generations(torn, 1) == [0, 1]
    restores(torn)


def test_unreadable_generation_does_not_hide_lower_one(torn, backend):
    damage(backend, resolve(repository_of(torn), 1).path)
    assert difference(torn.restore(1), STATES[1]) is None


def load(store, name):
    return repository_of(store).manifests.load(name)


def test_newest_torn_checkpoint_is_restored(torn):
    torn.delete(2)
    manifest, passed_over = newest_whole(repository_of(torn))
    assert (manifest.header.step, manifest.header.generation, passed_over) == (1, 0, [])
    assert difference(torn.restore(), STATES[1]) is None


def test_torn_generation_blocks_gc_until_repair(torn):
    torn.commit(parts_state(3, {0, 1, 2, 3}), 3)
    report = other_handle(torn).gc(LAST_ONE, now=True)
    assert "missing" in report.runs[0].blocked
    assert generations(torn, 1) == [0, 1]
    assert difference(torn.restore(1), STATES[1]) is None
    torn.repair(dry_run=False)
    assert other_handle(torn).gc(LAST_ONE, now=True).runs[0].blocked == ""
    assert torn.steps() == [3]


def test_restore_skips_two_torn_generations(torn):
    first = load(torn, resolve(repository_of(torn), 1))
    gone = replace(first.packs[0], pack_id=PackId(bytes(range(16))))
    header = replace(first.header, generation=2)
    repository_of(torn).manifests.publish(replace(first, header=header, packs=(gone, *first.packs[1:])))
    restores(torn)


def test_load_of_withdrawn_generation_returns_lower(torn, monkeypatch):
    torn_one = resolve(repository_of(torn), 1)
    parts = type(repository_of(torn))
    once(monkeypatch, parts, "require_packs", before=lambda: repository_of(torn).manifests.withdraw(torn_one))
    assert load_whole(repository_of(torn), torn_one).header.generation == 0


def test_load_reports_concurrently_dropped(torn, monkeypatch):
    torn_one = resolve(repository_of(torn), 1)
    once(monkeypatch, type(repository_of(torn)), "require_packs", before=lambda: torn.delete(1))
    with pytest.raises(NotFoundError, match="deleted while"):
        load_whole(repository_of(torn), torn_one)


def test_load_reports_concurrently_marked_as_dropped(torn, monkeypatch):
    parts = repository_of(torn)
    torn_one = resolve(parts, 1)
    once(monkeypatch, type(parts), "require_packs", before=lambda: mark_dropped(parts, torn_one.seq))
    with pytest.raises(NotFoundError, match="deleted while"):
        load_whole(parts, torn_one, takes_lower=True)


def test_repair_fixes_torn_generation_from_lower_one(torn):
    report = torn.repair(dry_run=False)
    assert [entry.action for entry in report.entries] == ["heal"]
    assert report.partial == ()
    restores(torn)
    assert torn.verify("decode").is_clean


def test_no_complete_generation_raises_and_blocks_gc(torn, backend):
    lowest = min(name for name in names_of(torn) if name.step == 1)
    pack = load(torn, lowest).packs[-1]
    backend.unlink(f"packs/{pack.pack_id.hex()[:2]}/{pack.pack_id.hex()}.pack")
    with pytest.raises(MissingChunkError, match="seq 1"):
        torn.restore(1)
    report = other_handle(torn).gc(LAST_ONE, now=True)
    assert "missing" in report.runs[0].blocked
    assert generations(torn, 1) == [0, 1]


def names_of(store):
    listing = repository_of(store).manifests.listing()
    return (*listing.names, *listing.lower)


# A pack that is moved back between two checks is found in neither place


@pytest.fixture
def trashed(store, backend, clock):
    """A store with the pack of step 2 in the trash."""
    commit_all(store, [0, 1, 2])
    path = pack_of(store, 2)
    backend.rename(path, f"trash/{repository_of(store).trash.new_packs_folder()}/packs/{path.rsplit('/')[-1]}")
    return store


def bring_back(store):
    pack_ids = [pack.pack_id for pack in load(store, resolve(repository_of(store), 2)).packs]
    assert sum(repository_of(store).trash.rescue_pack(pack_id) for pack_id in pack_ids) == 1


LOOKS = {
    "restore": lambda store: check_restores(store, [0, 1, 2]),
    "newest": lambda store: store.restore() and None,
    "whole": lambda store: load_whole(repository_of(store), resolve(repository_of(store), 2)) and None,
    "verify": lambda store: store.verify("quick").damage or None,
    "repair": lambda store: store.repair().packs,
    "gc": lambda store: other_handle(store).gc(dry_run=True).runs[0].blocked or None,
}


def test_repair_finds_a_pack_that_is_brought_back_before_it_is_opened(trashed, monkeypatch):
    once(monkeypatch, PackCopies, "read_contents", before=lambda: bring_back(trashed))
    assert trashed.repair().is_clean


@pytest.mark.parametrize("look", LOOKS)
def test_pack_rescued_between_checks_is_not_missing(trashed, monkeypatch, look):
    once(monkeypatch, Trash, "find_pack", before=lambda: bring_back(trashed))
    assert not LOOKS[look](trashed)
    assert trashed.restored is None or trashed.restored.step == 2
