"""Protects manifests: each seq is claimed once, and publishing never overwrites a published manifest."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import ConflictError, CorruptError, MalformedError
from ckstore.format import paths
from ckstore.format.manifest import decode_manifest, encode_manifest, republished
from ckstore.format.paths import ManifestName
from ckstore.io.memory import MemoryBackend
from support.drop_marks import mark_dropped

FOLDER = paths.manifests_folder("main")


@pytest.fixture
def manifests(store):
    """The manifests of a run with one checkpoint, seq 0."""
    store.commit({"a": 1}, 5)
    return repository_of(store).manifests


@pytest.fixture
def manifest(manifests):
    return manifests.load(manifests.listing().names[0])


def again(manifest, seq, time_ns=77):
    return republished(manifest, seq=seq, time_ns=time_ns, is_archival=False)


def put_generation(backend, manifest, generation):
    """Write a higher generation of a manifest, as a replacement does."""
    header = replace(manifest.header, generation=generation)
    content = encode_manifest(replace(manifest, header=header))
    name = ManifestName("main", header.seq, header.step, generation)
    backend.create(name.path, content, sync=True)
    return name


def test_claims_are_unique_and_increasing(manifests, backend):
    assert [manifests.claim(0) for _ in range(3)] == [1, 2, 3]
    assert manifests.claim(10) == 10
    assert manifests.listing().claimed_max == 10
    assert manifests.claim(9) == 9


def test_claim_is_durable(manifests, backend):
    before = backend.syncs[paths.claims_folder("main")]
    manifests.claim(1)
    assert backend.syncs[paths.claims_folder("main")] == before + 1


def test_claims_of_many_threads_differ(manifests):
    taken = []
    threads = [threading.Thread(target=lambda: taken.extend(manifests.claim(0) for _ in range(20))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 161))


def test_publish_syncs_before_and_after_the_link(manifests, manifest, backend):
    before = backend.syncs.copy()
    name = manifests.publish(again(manifest, manifests.claim(1)))
    synced = backend.syncs - before
    assert synced[FOLDER] == 1
    assert [count for path, count in synced.items() if path.startswith("tmp/") and path.endswith(".ckm")] == [1]
    assert backend.list_names("tmp") == []
    assert manifests.load(name).header.seq == 1


def test_publishing_same_bytes_again_succeeds(manifests, manifest):
    mine = again(manifest, manifests.claim(1))
    assert manifests.publish(mine) == manifests.publish(mine)
    assert [name.seq for name in manifests.listing().names] == [0, 1]


def test_publishing_other_bytes_under_a_name_is_a_conflict(manifests, manifest):
    seq = manifests.claim(1)
    name = manifests.publish(again(manifest, seq, time_ns=77))
    with pytest.raises(ConflictError, match="another writer has published"):
        manifests.publish(again(manifest, seq, time_ns=78))
    assert manifests.load(name).header.time_ns == 77


def test_publishing_longer_bytes_under_a_name_is_a_conflict(manifests, manifest, backend):
    mine = again(manifest, manifests.claim(1))
    backend.create(ManifestName("main", 1, 5, 0).path, b"x" * 100_000, sync=False)
    with pytest.raises(ConflictError):
        manifests.publish(mine)


def test_withdrawn_manifest_is_in_the_trash(manifests, manifest, backend):
    name = manifests.publish(again(manifest, manifests.claim(1)))
    encoded = backend.read_bytes(name.path, nbytes_max=1 << 20)
    before = backend.syncs.copy()
    manifests.withdraw(name)
    assert [found.seq for found in manifests.listing().names] == [0]
    (draft,) = backend.list_names("tmp")
    assert backend.read_bytes(f"tmp/{draft}", nbytes_max=1 << 20) == encoded
    assert backend.syncs[FOLDER] == before[FOLDER] + 1
    assert backend.syncs["tmp"] == before["tmp"] + 1
    manifests.withdraw(name)


def test_withdrawn_seq_is_not_reused(manifests, manifest):
    name = manifests.publish(again(manifest, manifests.claim(1)))
    manifests.withdraw(name)
    assert manifests.claim(1) == 2


def test_highest_generation_is_listed(manifests, manifest, backend):
    first = manifests.listing().names[0]
    second = put_generation(backend, manifest, 1)
    tenth = put_generation(backend, manifest, 10)
    listing = manifests.listing()
    assert listing.names == (tenth,)
    assert listing.lower == (first, second)


def test_dropped_seq_is_not_listed_before_the_move(manifests, store):
    store.commit({"a": 2}, 6)
    mark_dropped(repository_of(store), 0)
    listing = manifests.listing()
    assert [name.seq for name in listing.names] == [1]
    assert listing.dropped == {0}
    assert store.steps() == [6]


def test_drop_mark_is_durable_and_idempotent(manifests, store, backend):
    intents = {0: repository_of(store).tags.declare(0, "test")}
    before = backend.syncs[paths.claims_folder("main")]
    manifests.mark_dropped(intents)
    manifests.mark_dropped(intents)
    assert backend.syncs[paths.claims_folder("main")] == before + 2


def test_drop_mark_needs_the_intent(manifests, store, backend):
    # If the intent was taken for a dead maker's, a tag may exist by now.
    intents = {0: repository_of(store).tags.declare(0, "test")}
    backend.unlink(intents[0])
    with pytest.raises(ConflictError, match="removed the intent of this process"):
        manifests.mark_dropped(intents)
    assert not manifests.is_marked(0)


def test_drop_moves_all_generations_to_new_trash(manifests, manifest, store, backend):
    put_generation(backend, manifest, 1)
    mark_dropped(repository_of(store), 0)
    assert manifests.move_to_trash(frozenset({0})) == 2
    assert backend.list_names(FOLDER) == []
    (gc_id,) = backend.list_names("trash")
    folder = paths.trash_manifests_folder(gc_id, "main")
    assert len(backend.list_names(folder)) == 2
    assert backend.syncs[folder] >= 1
    assert manifests.move_to_trash(frozenset({0})) == 0


def test_each_drop_has_its_own_trash_folder(store, backend):
    for step in range(3):
        store.commit({"a": step}, step)
    for step in range(3):
        store.delete(step)
    assert len(backend.list_names("trash")) == 3


class HidingBackend(MemoryBackend):
    """Hide one name from a number of listings, as a readdir during a rename does."""

    def __init__(self):
        super().__init__()
        self.hidden = None
        self.hides = 0

    def list_names(self, folder):
        names = super().list_names(folder)
        if folder == FOLDER and self.hides:
            self.hides -= 1
            return [name for name in names if name != self.hidden]
        return names


def test_listing_without_a_claimed_seq_is_repeated():
    backend = HidingBackend()
    with ckstore.open(backend) as store:
        store.commit({"a": 1}, 1)
        store.commit({"a": 2}, 2)
        backend.hidden = ManifestName("main", 1, 2, 0).file
        backend.hides = 1
        assert [name.seq for name in repository_of(store).manifests.listing().names] == [0, 1]


def test_repeated_listings_are_merged():
    backend = HidingBackend()
    with ckstore.open(backend) as store:
        for step in range(3):
            store.commit({"a": step}, step)
        repository_of(store).manifests.claim(3)
        backend.hidden, backend.hides = ManifestName("main", 2, 2, 0).file, 1
        assert len(repository_of(store).manifests.listing().names) == 3


def test_foreign_files_are_not_listed(manifests, backend):
    for name in ("README", "00000001-000000000005.0.ckm.bak", "1-5.0.ckm", "00000001-000000000005.00.ckm"):
        backend.create(f"{FOLDER}/{name}", b"", sync=False)
    assert [name.seq for name in manifests.listing().names] == [0]


@pytest.mark.parametrize(
    "name", [ManifestName("main", 1, 5), ManifestName("main", 0, 6), ManifestName("main", 0, 5, 1)], ids=str
)
def test_manifest_under_another_name_is_refused(manifests, backend, name):
    backend.link(ManifestName("main", 0, 5).path, name.path)
    with pytest.raises(MalformedError):
        manifests.load(name)
    with pytest.raises(MalformedError):
        manifests.header(name)


def test_manifest_of_another_run_or_store_is_refused(manifests, backend):
    content = backend.read_bytes(ManifestName("main", 0, 5).path, nbytes_max=1 << 20)
    name = ManifestName("main", 0, 5)
    other = MemoryBackend()
    with ckstore.open(other) as there:
        there.commit({"b": 2}, 5)
        other.unlink(name.path)
        other.create(name.path, content, sync=False)
        for read in (repository_of(there).manifests.load, repository_of(there).manifests.header):
            with pytest.raises(MalformedError, match="another store"):
                read(name)
        with pytest.raises(CorruptError):
            there.restore()


def test_large_header_is_read_in_two_reads(store):
    metrics = {f"a rather long name of a metric, number {number}": number / 7 for number in range(400)}
    store.commit({"a": 1}, 1, metrics=metrics)
    assert store.info("latest").metrics == metrics
    assert store.log()[0].metrics == metrics


def test_manifest_over_the_limit_is_not_read(manifests, backend):
    name = ManifestName("main", 0, 5)
    content = backend.read_bytes(name.path, nbytes_max=1 << 20)
    manifests.limits = replace(manifests.limits, manifest_nbytes_max=len(content) - 1)
    with pytest.raises(CorruptError):
        manifests.load(name)


def test_manifest_round_trips(manifest, manifests):
    name = ManifestName("main", 0, 5)
    decoded = decode_manifest(encode_manifest(manifest), limits=manifests.limits, expect=name)
    assert encode_manifest(decoded) == encode_manifest(manifest)
