"""Protects verify: what each level finds and reports, and that it changes nothing.

Losing disposable files (docs/FORMAT.md: leases, tmp, trash, unreferenced packs) is not damage.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.cli.main import run as ckstore_command
from ckstore.clock import SYSTEM_CLOCK
from ckstore.config import Limits
from ckstore.errors import NotFoundError, UsageError
from ckstore.format.frame import FRAME_HEADER_NBYTES, decode_frame_header, encode_frame_header
from ckstore.format.pack import SUPERHEADER_NBYTES, TAIL_NBYTES, decode_tail
from ckstore.format.paths import pack_name
from ckstore.format.records import encode_record
from ckstore.format.wire import xxh3_64
from ckstore.ops import verify_packs
from ckstore.store.store_config import create_store
from support.format_samples import sample_records
from support.memory_files import edited, flip, names_of, swap, truncate

LEVELS = ["quick", "read", "decode"]


@pytest.fixture
def filled(store):
    """Two checkpoints in two packs. The second one also needs the first one's pack."""
    rng = np.random.default_rng(1)
    shared = rng.standard_normal(90_000)
    store.commit({"shared": shared, "own": rng.standard_normal(50)}, 1, tags=["good"])
    store.commit({"shared": shared, "own": rng.standard_normal(50)}, 2)
    return store


@pytest.fixture
def pack(filled):
    """The name of the first checkpoint's pack, which tests damage."""
    manifests = repository_of(filled).manifests
    return pack_name(manifests.load(manifests.listing().names[0]).packs[0].pack_id)


def found_by(store, level):
    return store.verify(level).damage


def test_whole_store_is_clean_at_every_level(filled):
    read = []
    for level in LEVELS:
        report = filled.verify(level)
        assert report.is_clean, report.damage
        assert (report.level, report.checkpoint_count, report.pack_count) == (level, 2, 2)
        read.append(report.bytes_read)
    assert read[0] < 50_000
    assert read[1] == read[2] > 600_000
    assert filled.verify("decode").frame_count == 3


def test_empty_store_is_clean(store):
    report = store.verify("decode")
    assert report.is_clean
    assert (report.checkpoint_count, report.pack_count, report.bytes_read) == (0, 0, 0)


def test_verify_changes_nothing(filled, backend, pack):
    flip(backend, pack, SUPERHEADER_NBYTES + 300)
    before = backend.files()
    for level in LEVELS:
        filled.verify(level)
    assert backend.files() == before


def test_unknown_level_is_refused(filled):
    with pytest.raises(UsageError, match="quick, read, decode"):
        filled.verify("thorough")
    with pytest.raises(NotFoundError):
        filled.verify("quick", ref=99)


def test_flipped_payload_is_found_by_reading(filled, pack, backend):
    flip(backend, pack, SUPERHEADER_NBYTES + FRAME_HEADER_NBYTES + 1000, mask=4)
    assert found_by(filled, "quick") == []
    for level in ("read", "decode"):
        (damage,) = found_by(filled, level)
        assert pack in damage.where
        assert f"offset {SUPERHEADER_NBYTES}" in damage.where
        assert damage.checkpoints == ("main/0 (step 1)", "main/1 (step 2)")
        assert damage.tensors == ("shared",)


def test_damage_names_only_the_affected_checkpoint(filled, pack, backend):
    content = backend.files()[pack]
    parts = repository_of(filled)
    tail = decode_tail(
        content[-TAIL_NBYTES:],
        pack_nbytes=len(content),
        store_id=parts.store_id,
        pack_id=bytes.fromhex(pack[-37:-5]),
        limits=parts.limits,
    )
    # The last frame before the directory is the small one of step 1.
    own = parts.manifests.load(parts.manifests.listing().names[0]).frames[-1]
    assert own.offset < tail.directory_offset
    flip(backend, pack, own.offset + FRAME_HEADER_NBYTES, mask=255)
    (damage,) = found_by(filled, "read")
    assert damage.checkpoints == ("main/0 (step 1)",)
    assert damage.tensors == ("own",)
    assert filled.verify("decode", ref=2).is_clean
    assert not filled.verify("decode", ref=1).is_clean


def test_wrong_content_is_found_by_decoding(filled, pack, backend):
    at = SUPERHEADER_NBYTES
    with edited(backend, pack) as content:
        header = decode_frame_header(bytes(content[at : at + FRAME_HEADER_NBYTES]))
        begin, end = at + FRAME_HEADER_NBYTES, at + FRAME_HEADER_NBYTES + header.stored_nbytes
        content[end - 1] ^= 1
        forged = replace(header, payload_xxh3=xxh3_64(bytes(content[begin:end])))
        content[at:begin] = encode_frame_header(forged)
    assert found_by(filled, "quick") == []
    assert found_by(filled, "read") == []
    assert len(found_by(filled, "decode")) == 1
    with pytest.raises(ckstore.CorruptError):
        filled.restore(1)


@pytest.mark.parametrize("level", LEVELS)
def test_missing_pack_is_found_at_every_level(filled, pack, backend, level):
    backend.unlink(pack)
    (damage,) = found_by(filled, level)
    assert "missing" in damage.what
    assert pack in damage.where
    assert damage.checkpoints == ("main/0 (step 1)", "main/1 (step 2)")
    assert damage.tensors == ("shared", "own")
    (damage,) = filled.verify(level, ref=2).damage
    assert damage.tensors == ("shared",)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_000, -4096, -1])
def test_truncated_pack_is_found_at_every_level(filled, pack, backend, level, nbytes):
    truncate(backend, pack, nbytes)
    assert [damage.tensors for damage in found_by(filled, level)] == [("shared", "own")]


@pytest.mark.parametrize("level", LEVELS)
def test_grown_pack_is_found_at_every_level(filled, pack, backend, level):
    with edited(backend, pack) as content:
        content.extend(bytes(4096))
    assert found_by(filled, level)


@pytest.mark.parametrize("level", LEVELS)
def test_swapped_packs_are_found_at_every_level(filled, backend, level):
    one, other = names_of(backend, "packs/")
    swap(backend, one, other)
    assert len(found_by(filled, level)) == 2


@pytest.mark.parametrize("level", LEVELS)
def test_altered_manifest_does_not_stop_the_check(filled, backend, pack, level):
    name = repository_of(filled).manifests.listing().names[1].path
    with edited(backend, name) as content:
        content[len(content) // 2] ^= 1
    (damage,) = found_by(filled, level)
    assert name in damage.where
    assert damage.checkpoints == ("main/1 (step 2)",)
    assert filled.verify(level).checkpoint_count == 1


def test_missing_claim_is_found(filled, backend):
    backend.unlink("claims/main/00000001")
    (damage,) = found_by(filled, "quick")
    assert "claim" in damage.what


def test_dangling_tag_is_found(filled, backend):
    for name in names_of(backend, "manifests/main/00000000-"):
        backend.unlink(name)
    assert any("points to seq 0" in damage.what for damage in found_by(filled, "quick"))


def test_damaged_tag_and_config_are_found(filled, backend):
    flip(backend, "tags/main/good", 20)
    backend.create("config.json", b"{}", sync=True)
    assert sorted(damage.where.rsplit(":", 1)[-1] for damage in found_by(filled, "quick")) == [
        "config.json",
        "tags/main/good",
    ]


@pytest.mark.parametrize("record", ["home", "owner"])
def test_damaged_tier_owner_record_is_found(filled, backend, record):
    golden = next(sample for sample in sample_records() if sample.kind == record)
    backend.create(f"{record}.json", encode_record(golden), sync=True)
    assert filled.verify("quick").is_clean
    flip(backend, f"{record}.json", 30)
    (damage,) = found_by(filled, "quick")
    assert damage.where.endswith(f"{record}.json")


def test_disposable_files_are_ignored(filled, backend):
    backend.create("tmp/" + "ab" * 16 + ".ckm", b"left by a crash", sync=False)
    backend.create("packs/ab/" + "ab" * 16 + ".pack", b"torn, and named by nobody", sync=False)
    backend.overwrite("leases/main", b"torn")
    backend.make_folder("trash/" + "ab" * 16 + "/packs")
    backend.create("trash/" + "ab" * 16 + "/packs/" + "cd" * 16 + ".pack", b"x", sync=False)
    assert filled.verify("decode").is_clean


def test_packs_in_the_trash_count_as_present(filled, backend, pack):
    folder = "trash/" + "ab" * 16 + "/packs"
    backend.make_folder(folder)
    trashed = f"{folder}/{pack.rsplit('/', 1)[1]}"
    backend.rename_new(pack, trashed)
    assert filled.verify("decode").is_clean
    flip(backend, trashed, SUPERHEADER_NBYTES + 300)
    assert not filled.verify("decode").is_clean


def test_all_runs_are_verified_unless_one_is_named(filled, backend):
    with ckstore.open(backend, run="other") as other:
        other.commit({"x": np.arange(7.0)}, 1)
        assert other.verify("decode").checkpoint_count == 3
        assert other.verify("decode", ref=1).checkpoint_count == 1
        name = repository_of(other).manifests.listing().names[0].path
    flip(backend, name, 200)
    (damage,) = found_by(filled, "quick")
    assert damage.checkpoints == ("other/0 (step 1)",)


def test_dropped_checkpoint_is_not_checked(filled, backend, pack):
    filled.untag("good")
    filled.delete(1)
    filled.delete(2)
    backend.unlink(pack)
    assert filled.verify("decode").is_clean


def test_internal_failure_is_raised(filled, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(verify_packs, "check_entry", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        filled.verify("read")


def test_progress_reaches_the_total(filled):
    seen = []
    filled.verify("decode", on_progress=lambda done, total: seen.append((done, total)))
    done, total = seen[-1]
    assert done == total == max(total for _, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_frame_at_another_offset_is_found(filled, backend, pack):
    # A pack with the same frames in another order has other offsets and another directory.
    with edited(backend, pack) as content:
        content[SUPERHEADER_NBYTES : SUPERHEADER_NBYTES + 64] = bytes(64)
    assert found_by(filled, "read")


def test_nonzero_padding_is_found(filled, backend, pack):
    parts = repository_of(filled)
    last = parts.manifests.load(parts.manifests.listing().names[0]).frames[-1]
    end = last.offset + FRAME_HEADER_NBYTES + last.stored_nbytes
    assert backend.files()[pack][end + 1] == 0
    flip(backend, pack, end + 1)
    assert found_by(filled, "read")
    assert filled.restore(1) is not None


def test_progress_is_reported_after_each_read(backend):
    seen = []
    create_store(backend, SYSTEM_CLOCK, Limits(chunk_nbytes_max=1 << 16))
    with ckstore.open(backend) as store:
        store.commit({"w": np.random.default_rng(0).standard_normal(200_000)}, 1)
        store.verify("read", on_progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 20
    assert seen == sorted(seen)


def test_shared_frames_are_stored_once_in_memory(filled):
    from ckstore.store.damage import Uses

    uses = Uses()
    manifests = repository_of(filled).manifests
    for name in manifests.listing().names:
        uses.add(name, manifests.load(name))
    users = sorted(list(pack.places.values()) for pack in uses.packs.values())
    assert users == [[[0, 1], [0]], [[1]]]
    assert sorted(list(pack.refs) for pack in uses.packs.values()) == [[0, 1], [1]]


def test_frames_of_a_manifest_are_iterated_once(filled):
    from ckstore.store.damage import Uses

    looks = []

    class Frames(tuple):
        def __iter__(self):
            looks.append(1)
            return super().__iter__()

    manifests = repository_of(filled).manifests
    name = manifests.listing().names[1]
    manifest = manifests.load(name)
    assert len(manifest.packs) == 2
    Uses().add(name, replace(manifest, frames=Frames(manifest.frames)))
    assert len(looks) == 1


# Copies made while the store was in use


def commit_and_copy(tmp_path, **how):
    """Commit twice, copy the folder as cp -a does, and lose the last files in the copy."""
    with ckstore.open(tmp_path / "store", **how) as store:
        for step in range(2):
            store.commit({"x": np.full(20_000, step)}, step)
    subprocess.run(["cp", "-a", str(tmp_path / "store"), str(tmp_path / "copy")], check=True)
    for place in ("store", "copy"):
        newest = max((tmp_path / place).glob("packs/*/*"), key=lambda path: path.stat().st_mtime_ns)
        yield tmp_path / place, newest


def test_torn_copy_is_reported_with_advice(tmp_path, clock, capsys):
    for place, newest in commit_and_copy(tmp_path, clock=clock):
        newest.unlink()
        with ckstore.open(place) as store:
            report = store.verify()
        assert (report.files_torn, report.copied_ns is not None) == (1, True)
        assert ckstore_command(["verify", str(place)]) == 12
        out = capsys.readouterr().out
        assert "This folder is a copy, made on" in out
        assert "ckstore mirror" in out


def test_store_with_lost_pack_is_not_called_a_copy(tmp_path, capsys):
    (place, newest), _ = commit_and_copy(tmp_path)
    newest.unlink()
    assert ckstore_command(["verify", str(place)]) == 12
    assert "If this folder is a copy made while the store was in use" in capsys.readouterr().out
    with ckstore.open(place) as store:
        assert store.verify().copied_ns is None


def test_torn_copy_is_completed_from_its_original(tmp_path, capsys):
    _, (copy, newest) = commit_and_copy(tmp_path)
    newest.chmod(0o600)
    newest.write_bytes(newest.read_bytes()[:-4096])
    assert ckstore_command(["repair", str(copy), "--from", str(tmp_path / "store"), "--apply"]) == 0
    assert ckstore_command(["verify", str(copy)]) == 0
