"""Protects repair: damage is healed from remaining data or reported, and nothing is removed or made wrong."""

from __future__ import annotations

import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import ConflictError, CorruptError, MissingChunkError, UsageError
from ckstore.format import paths
from ckstore.io.memory import MemoryBackend
from support import damaged_stores as stores
from support.damaged_stores import STATES, STEPS, is_right, opened
from support.memory_files import add, copy_of, edited, files_of, first_of, flip, names_of, truncate
from support.model import difference

pytestmark = pytest.mark.usefixtures("quiet_log")


@pytest.fixture(scope="module")
def pristine():
    """The undamaged store, which no test changes."""
    backend = MemoryBackend()
    stores.fill(backend)
    return backend


@pytest.fixture
def backend(pristine):
    return copy_of(pristine)


def flip_frame(backend, store, step, path):
    pack, frame = stores.frames_of(store, step, path)[0]
    flip(backend, pack, frame.offset + 192 + frame.stored_nbytes // 2, mask=0x40)
    return pack


def actions(report):
    return {(entry.run, entry.step): entry.action for entry in report.entries}


def check_all_right(backend):
    with opened(backend) as store, opened(backend, run="other") as other:
        assert all(is_right(store, step, STATES[step]) for step in STEPS)
        assert is_right(other, 20, STATES[3])
        assert store.verify("decode").is_clean
        assert store.repair().is_clean


def test_repair_of_a_clean_store_changes_nothing(backend, pristine):
    with opened(backend) as store:
        assert store.repair().is_clean
        assert store.repair(dry_run=False).is_clean
    assert names_of(backend, ("packs", "manifests", "quarantine")) == names_of(pristine, ("packs", "manifests"))


def test_dry_run_changes_nothing(backend):
    with opened(backend) as store:
        flip_frame(backend, store, 2, "model.weights")
        before = backend.files()
        report = store.repair()
    assert report.is_dry_run
    assert not any(entry.is_done for entry in report.entries)
    assert actions(report)["main", 2] == "partial"
    after = {name: content for name, content in backend.files().items() if not name.startswith("leases")}
    assert after == {name: content for name, content in before.items() if not name.startswith("leases")}


def test_flipped_byte_affects_dependent_checkpoints_only(backend):
    with opened(backend) as store:
        spoiled = flip_frame(backend, store, 3, "model.weights")
        report = store.repair(dry_run=False)
        # Step 3 lost its delta, and so did the run that shares it. Step 1 is its base and does not need it.
        assert actions(report) == {("main", 3): "partial", ("other", 20): "partial"}
        assert [entry.tensors for entry in report.partial] == [("model.weights",)] * 2
        assert is_right(store, 1, STATES[1])
        assert is_right(store, 2, STATES[2])
        with pytest.raises(MissingChunkError, match=r"1 of 3 tensors of seq 2 \(step 3\) are lost: model\.weights"):
            store.restore(3)
        rest = store.restore(3, only=["model.still", "small.*"])
        assert difference(rest["model"]["still"], STATES[3]["model"]["still"]) is None
        assert difference(rest["small"], STATES[3]["small"]) is None
        with pytest.raises(MissingChunkError):
            store.restore(3, only="model.*")
    assert spoiled not in backend.files()
    assert paths.quarantine_packs_folder() + "/" + spoiled.rsplit("/", 1)[1] in backend.files()


def test_verify_names_only_lost_tensors(backend):
    with opened(backend) as store:
        flip_frame(backend, store, 2, "model.weights")
        store.repair(dry_run=False)
        for level in ("quick", "read", "decode"):
            damage = store.verify(level).damage
            assert [(each.what, each.checkpoints, each.tensors) for each in damage] == [
                ("chunks are lost (recorded by a repair)", ("main/1 (step 2)",), ("model.weights",))
            ]


def test_checkpoint_id_metrics_and_tags_survive_a_repair(backend):
    with opened(backend) as store:
        store.tag(2, "good")
        before = store.info(2)
        flip_frame(backend, store, 2, "model.weights")
        store.repair(dry_run=False)
        after = store.info("good")
    assert (after.checkpoint_id, after.metrics, after.parent) == (before.checkpoint_id, before.metrics, before.parent)
    assert after.generation == before.generation + 1
    assert (after.bytes_written, after.chunks_new) == (before.bytes_written, before.chunks_new)


def test_restore_without_ref_skips_a_partial_checkpoint(backend):
    with opened(backend) as store:
        flip_frame(backend, store, 3, "small.own")
        store.repair(dry_run=False)
        assert difference(store.restore(), STATES[2]) is None
        assert "some of its tensors are lost" in store.restored.warnings[0]
        assert store.latest().step == 2


def test_second_repair_changes_nothing(backend):
    with opened(backend) as store:
        flip_frame(backend, store, 2, "model.weights")
        store.repair(dry_run=False)
        names = set(names_of(backend))
        again = store.repair(dry_run=False)
        assert again.entries == ()
        assert names == set(names_of(backend))


def test_later_commit_of_the_same_bytes_heals(backend):
    with opened(backend) as store:
        flip_frame(backend, store, 2, "model.weights")
        store.repair(dry_run=False)
        receipt = store.commit({"again": STATES[2]["model"]["weights"]}, 4)
        assert receipt.chunks_new == 1
        report = store.repair(dry_run=False)
        assert actions(report) == {("main", 2): "heal"}
    check_all_right(backend)


def test_commit_after_repair_does_not_use_lost_chunks(backend):
    with opened(backend) as store:
        flip_frame(backend, store, 3, "model.weights")
        store.repair(dry_run=False)
        store.commit(STATES[3], 5)
        assert is_right(store, 5, STATES[3])
        assert store.verify("decode", ref=5).is_clean


def test_chunk_is_found_in_another_pack(backend):
    with opened(backend) as store:
        pack, _ = stores.frames_of(store, 1, "model.still")[0]
        whole = backend.files()[pack]
        # A dead writer left an unreferenced pack with the same chunk.
        with opened(backend, run="third") as other:
            repository_of(other).prepare_run()
            backend.overwrite(pack, bytes(len(whole)))
            repository_of(other).chunk_index.forget_packs([p.pack_id for p in stores.manifest_of(store, 1).packs])
            other.commit({"still": STATES[1]["model"]["still"]}, 0)
            seq = other.info(0).seq
            other.delete(f"seq:{seq}")
        backend.overwrite(pack, whole)
        flip_frame(backend, store, 1, "model.still")
        report = store.repair(dry_run=False)
        assert set(actions(report).values()) == {"heal"}
    check_all_right(backend)


@pytest.mark.parametrize("kind", ["tail", "directory", "superheader", "truncated", "gone"])
def test_pack_without_header_or_directory_is_scanned(backend, kind):
    with opened(backend) as store:
        name = stores.pack_of(store, 3)
        if kind == "truncated":
            truncate(backend, name, -8192)
        elif kind == "gone":
            backend.unlink(name)
        else:
            flip(backend, name, {"tail": -100, "directory": -4096 - 4090, "superheader": 40}[kind])
        report = store.repair(dry_run=False)
        expected = "partial" if kind == "gone" else "heal"
        assert actions(report) == {("main", 3): expected, ("other", 20): expected}
        if kind == "gone":
            assert is_right(store, 1, STATES[1])
            assert is_right(store, 2, STATES[2])
            return
        assert paths.quarantine_packs_folder() + "/" + name.rsplit("/", 1)[1] in backend.files()
    check_all_right(backend)


def test_truncated_base_pack_loses_only_the_cut_part(backend):
    with opened(backend) as store:
        pack, frame = stores.frames_of(store, 1, "model.still")[0]
        assert stores.frames_of(store, 1, "model.weights")[0][1].offset < frame.offset
        truncate(backend, pack, frame.offset + 500)
        report = store.repair(dry_run=False)
        assert {entry.step for entry in report.partial} == {1, 2, 3, 20}
        assert all("model.still" in entry.tensors for entry in report.partial)
        assert not any("model.weights" in entry.tensors for entry in report.partial)
        for step in STEPS:
            weights = store.restore(step, only="model.weights")
            assert difference(weights["model"]["weights"], STATES[step]["model"]["weights"]) is None


def test_lost_base_loses_its_dependents(backend):
    with opened(backend) as store:
        flip_frame(backend, store, 1, "model.weights")
        report = store.repair(dry_run=False)
        assert {entry.step for entry in report.partial} == {1, 2, 3, 20}
        assert all(entry.tensors == ("model.weights",) for entry in report.partial)
        assert difference(store.restore(3, only="small")["small"], STATES[3]["small"]) is None
        # A chunk that depended on the lost base has no usable frame, so a later commit must store its bytes again.
        store.commit({"w": STATES[1]["model"]["weights"]}, 9)
        report = store.repair(dry_run=False)
        assert ("main", 1) in actions(report)
        assert actions(report)["main", 1] == "heal"
        assert is_right(store, 1, STATES[1])


def test_delta_in_quarantine_heals_with_its_base(backend):
    with opened(backend) as store:
        flip_frame(backend, store, 1, "model.weights")
        store.repair(dry_run=False)
        store.commit({"w": STATES[1]["model"]["weights"]}, 9)
        store.repair(dry_run=False)
        # The packs of steps 2 and 3 are sound and in place, although no manifest names their deltas now.
        assert all(is_right(store, step, STATES[step]) for step in STEPS)
    check_all_right(backend)


def test_copy_of_the_store_heals_everything(backend, pristine):
    mirror = copy_of(pristine)
    with opened(backend) as store:
        flip_frame(backend, store, 1, "model.weights")
        backend.unlink(stores.pack_of(store, 3))
        torn = first_of(backend, "manifests/main/00000001")
        truncate(backend, torn, -50)
        report = store.repair(dry_run=False, sources=[mirror])
        assert not report.partial
        assert actions(report)["main", 2] in ("quarantine", "bring back", "heal")
    check_all_right(backend)


def test_another_store_is_refused_as_source(backend):
    other = MemoryBackend()
    ckstore.open(other).close()
    with opened(backend) as store, pytest.raises(UsageError, match="another store"):
        store.repair(sources=[other])


@pytest.mark.parametrize("harm", ["torn", "flipped", "empty"])
def test_torn_manifest_is_quarantined(backend, harm):
    with opened(backend) as store:
        name = first_of(backend, "manifests/main/00000001")
        with edited(backend, name) as content:
            if harm == "flipped":
                content[len(content) // 2] ^= 1
            else:
                del content[0 if harm == "empty" else len(content) // 2 :]
        damaged = backend.files()[name]
        report = store.repair(dry_run=False)
        assert actions(report) == {("main", 2): "quarantine"}
        assert store.steps() == [1, 3]
        assert backend.files()[f"quarantine/{name}"] == damaged
        assert is_right(store, 3, STATES[3])
        assert store.verify("decode").is_clean


def test_torn_generation_is_replaced_from_the_trash(backend):
    with opened(backend) as store:
        # The state after a repack: generation 1 in place, generation 0 in the trash.
        manifests = repository_of(store).manifests
        name = next(name for name in manifests.listing().names if name.step == 2)
        before = backend.files()[name.path]
        from dataclasses import replace

        manifest = manifests.load(name)
        repository_of(store).prepare_run()
        published = manifests.publish(replace(manifest, header=replace(manifest.header, generation=1)))
        manifests.move_lower_to_trash(published)
        assert name.path not in backend.files()
        truncate(backend, published.path, -10)
        assert not is_right(store, 2, STATES[2])
        report = store.repair(dry_run=False)
        assert sorted(entry.action for entry in report.entries) == ["quarantine", "revive"]
        assert backend.files()[name.path] == before
        assert is_right(store, 2, STATES[2])
        # The next generation does not reuse the name of the quarantined one.
        flip_frame(backend, store, 2, "model.weights")
        store.repair(dry_run=False)
        assert store.info(2).generation == 2


def test_pack_moved_by_gc_is_rescued(backend):
    with opened(backend) as store:
        name = stores.pack_of(store, 2)
        gc_id = repository_of(store).trash.new_packs_folder()
        repository_of(store).trash.move_packs([paths.parse_pack_file(name.rsplit("/", 1)[1])], gc_id)
        report = store.repair(dry_run=False)
        assert len(report.packs_rescued) == 1
        assert name in backend.files()
    check_all_right(backend)


def test_missing_claim_is_recreated(backend):
    backend.unlink("claims/main/00000001")
    with opened(backend) as store:
        assert not store.verify("quick").is_clean
        assert store.repair(dry_run=False).claims_made == ("main/1",)
    check_all_right(backend)


def test_repair_refuses_a_run_with_live_writer(backend):
    with opened(backend) as writer, opened(backend) as store:
        flip_frame(backend, store, 3, "small.own")
        writer.commit(STATES[1], 7)
        with pytest.raises(ConflictError):
            store.repair(dry_run=False)
        assert is_right(writer, 7, STATES[1])


def test_forged_frame_in_a_stray_pack_is_not_used(backend):
    # A chunk that holds the bytes of a pack: a scan of the torn pack finds frames in it that were never stored.
    with opened(backend) as store:
        pack, frame = stores.frames_of(store, 2, "model.weights")[0]
        content = bytearray(backend.files()[pack])
        header = bytearray(content[frame.offset : frame.offset + 192])
        from ckstore.format.frame import decode_frame_header, encode_frame_header
        from ckstore.format.wire import xxh3_64

        forged = b"\x01" * frame.stored_nbytes
        sealed = encode_frame_header(decode_frame_header(header).with_checksum(xxh3_64(forged)))
        stray = bytes(4096) + sealed + forged
        add(backend, "packs/ab/" + "ab" * 16 + ".pack", stray)
        flip_frame(backend, store, 2, "model.weights")
        report = store.repair(dry_run=False)
        assert actions(report)["main", 2] == "partial"
        with pytest.raises(CorruptError):
            store.restore(2)


@pytest.mark.deep
def test_flipped_bytes_are_healed_or_reported(pristine, sample):
    counts = {"heal": 0, "partial": 0, "quarantine": 0, "unneeded": 0}
    # Offsets take turns, the same in all files. The order of files changes, because pack names are random.
    places = sample.part(range(14), parts=4)
    contents = files_of(pristine, ("packs/", "manifests/"))
    for name, offset in [(name, place * len(contents[name]) // 14 + 3) for name in contents for place in places]:
        backend = copy_of(pristine)
        flip(backend, name, offset, mask=0x40)
        with opened(backend) as store, opened(backend, run="other") as other:
            report = store.repair(dry_run=False)
            for entry in report.entries:
                counts[entry.action] += 1
            counts["unneeded"] += not report.entries
            hurt = {(entry.run, entry.step) for entry in report.entries if entry.action != "heal"}
            for step in STEPS:
                assert ("main", step) in hurt or is_right(store, step, STATES[step]), (name, offset)
                if any(("main", step) == (entry.run, entry.step) for entry in report.partial):
                    _check_rest(store, step)
            assert ("other", 20) in hurt or is_right(other, 20, STATES[3])
            assert store.verify("read").is_clean or report.partial, (name, offset)
    assert not sample.is_whole or min(counts["heal"], counts["partial"], counts["quarantine"]) > 0, counts


def _check_rest(store, step):
    with pytest.raises(MissingChunkError) as raised:
        store.restore(step)
    for path in ("model.weights", "model.still", "small.own"):
        if path in raised.value.tensors:
            with pytest.raises(MissingChunkError):
                store.restore(step, only=path)
            continue
        found, keys = store.restore(step, only=path), path.split(".")
        assert difference(found[keys[0]][keys[1]], STATES[step][keys[0]][keys[1]]) is None
