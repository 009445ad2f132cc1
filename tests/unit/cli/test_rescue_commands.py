"""Protects ``import``, ``quarantine``, ``repair`` and ``report``: what they print and write, and their exit codes."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ckstore
from ckstore.ops.interop.export import export_safetensors


@pytest.fixture
def source(tmp_path):
    """A folder of safetensors files, which need only numpy."""
    folder = tmp_path / "source"
    folder.mkdir()
    weights = np.random.default_rng(0).standard_normal(60_000).astype(np.float32)
    for step in (100, 200, 1000):
        name = f"model_step{step}-loss={step / 100}.safetensors"
        export_safetensors({"w": weights, "step": np.array([step])}, folder / name)
    return folder


def test_import_prints_the_saving(call, source, tmp_path):
    code, out, err = call("import", tmp_path / "new", source)
    assert (code, err) == (0, "")
    assert out.startswith("run main: 3 of 3 checkpoints were imported")
    assert "times smaller." in out
    assert "loss=10" in out
    with ckstore.open(tmp_path / "new", create=False) as store:
        assert store.steps() == [100, 200, 1000]
        assert store.restore(200)["step"][0] == 200


def test_import_dry_run_makes_no_store(call, source, tmp_path):
    code, out, _ = call("import", tmp_path / "new", source, "--dry-run")
    assert code == 0
    assert "would be imported" in out
    assert "nothing was changed" in out
    assert not (tmp_path / "new").exists()


def test_import_a_second_time_skips_everything(call, source, tmp_path):
    call("import", tmp_path / "new", source)
    code, out, _ = call("import", tmp_path / "new", source)
    assert code == 0
    assert out.startswith("run main: 0 of 3 checkpoints were imported")
    assert out.count("skip") == 3


def test_import_as_json_has_every_entry(call, source, tmp_path):
    found = json.loads(call("import", tmp_path / "new", source, "--json", "--exclude", "*step100-*")[1])
    assert [(each["step"], each["action"], each["seq"]) for each in found["checkpoints"]] == [
        (200, "import", 0), (1000, "import", 1)
    ]  # fmt: skip
    assert found["ratio"] == pytest.approx(found["bytes_before"] / found["bytes_stored"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere"], 10, "no such file"),
        (["source", "--step", "5"], 2, "--step applies to one checkpoint, but there are 3"),
        (["source", "--exclude", "*"], 10, "no checkpoint found in the folder"),
    ],
)
def test_import_errors_name_the_mistake(call, source, tmp_path, arguments, code, words):
    found, _, err = call("import", tmp_path / "new", tmp_path / arguments[0], *arguments[1:])
    assert found == code
    assert words in err


def damage(store):
    """Flip a byte in the first commit's pack, and tear the second one's manifest."""
    with ckstore.open(store) as opened:
        pack_id = opened.contents("seq:0").packs[0].pack_id
    (first,) = store.glob(f"packs/*/{pack_id}.pack")
    content = bytearray(first.read_bytes())
    content[6000] ^= 1
    first.chmod(0o600)
    first.write_bytes(content)
    torn = next(store.glob("manifests/main/00000001-*"))
    torn.chmod(0o600)
    torn.write_bytes(torn.read_bytes()[:-3])


def test_repair_acts_only_with_apply(call, store):
    damage(store)
    code, out, err = call("repair", store)
    assert code == 12
    assert "step 200 (seq 1) has an unreadable manifest, which would move to quarantine" in out
    assert "would be partial" in out
    assert "lost tensors:" in out
    assert "add --apply to do all of this." in out
    assert "have lost data" in err
    assert not list(store.glob("quarantine/*/*"))
    code, out, _ = call("repair", store, "--apply")
    assert code == 12
    assert "step 200 (seq 1) had an unreadable manifest, which moved to quarantine" in out
    assert "is partial" in out
    assert list(store.glob("quarantine/packs/*.pack"))
    again = json.loads(call("repair", store, "--json")[1])
    assert (again["checkpoints"], again["packs"]) == ([], {})


def test_repair_recovers_data_from_a_copy(call, store, readonly_store):
    damage(store)
    code, out, _ = call("repair", store, "--apply", "--from", readonly_store)
    # The torn manifest is reported, although the copy restores it.
    assert code == 12
    assert "has its manifest from a copy" in out
    assert call("verify", store, "--level", "decode")[0] == 0


def test_repair_of_an_undamaged_store_says_so(call, store):
    code, out, err = call("repair", store)
    assert (code, err) == (0, "")
    assert out.startswith("No damage;")


def test_quarantine_moves_only_with_apply(call, store):
    damage(store)
    code, out, _ = call("quarantine", store)
    assert code == 0
    assert "1 file would be moved" in out
    code, out, _ = call("quarantine", store, "--apply")
    assert "1 file moved" in out
    assert len(list(store.glob("quarantine/manifests/main/*.ckm"))) == 1
    assert call("quarantine", store)[1].startswith("Nothing to move")
    assert call("ls", store)[0] == 0


def test_partial_checkpoint_restores_with_only(call, store, tmp_path):
    damage(store)
    call("repair", store, "--apply")
    code, _, err = call("restore", store, "100", "-o", tmp_path / "all.npz")
    assert code == 12
    assert "are lost:" in err
    assert call("restore", store, "100", "-o", tmp_path / "some.npz", "--only", "note")[0] == 0


def test_report_replaces_a_file_only_with_force(call, store, tmp_path):
    page = tmp_path / "report.html"
    code, out, err = call("report", store, "-o", page)
    assert (code, err) == (0, "")
    assert out.startswith(f"Wrote {page}: ")
    assert page.read_text().startswith("<!doctype html>")
    assert call("report", store, "-o", page)[0] == 2
    assert json.loads(call("report", store, "-o", page, "--force", "--json")[1])["nbytes"] == page.stat().st_size
    assert call("report", store, "-o", tmp_path / "report.txt")[0] == 2


def test_repair_reports_unread_packs_in_tiers(call, tmp_path):
    with ckstore.open(tmp_path / "store") as store:
        for step in range(3):
            store.commit({"w": np.arange(1000) * step}, step)
        store.push(str(tmp_path / "tier"), keep_local=1)
    code, out, _ = call("repair", tmp_path / "store")
    assert code == 0
    assert out.startswith("No damage; every local pack that a checkpoint needs was read")
    assert "2 packs in other tiers were not read; `ckstore verify --remote --level read` reads them." in out
    assert json.loads(call("repair", tmp_path / "store", "--json")[1])["packs_elsewhere"] == 2
