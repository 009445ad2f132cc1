"""Protects reports about checkpoints in other tiers: listings, verify, and commands."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import ckstore
from ckstore.cli.main import run
from ckstore.io.url import backend_for
from support.chains import ChainWriter


@pytest.fixture
def call(capsys):
    """Run a command in this process; return exit code, stdout and stderr."""

    def call_it(*arguments):
        code = run([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    return call_it


def state_of(seed, count=50_000):
    source = np.random.default_rng(seed)
    return {"w": source.standard_normal(count).astype(np.float32), "step": seed}


def walk_of(step):
    return np.float64(step) * 1e-9 + np.linspace(1.0, 2.0, 70_000)


@pytest.fixture
def filled(folder):
    with ckstore.open(folder) as store:
        for step in (1, 2, 3):
            store.commit(state_of(step), step)
    return folder


def remove_packs(folder, store, step):
    for pack in store.contents(step).packs:
        (folder / "packs" / pack.pack_id[:2] / f"{pack.pack_id}.pack").unlink()


def test_commands_push_list_show_restore_and_pull(filled, address, call, tmp_path):
    assert call("push", filled)[0] == 10
    code, out, _ = call("push", filled, address, "--keep-local", 2, "--dry-run")
    assert (code, "1 of 3 checkpoints would be pushed" in out) == (0, True)
    code, out, _ = call("push", filled, address, "--keep-local", 1, "--tier", "attic", "--json")
    report = json.loads(out)
    assert (code, report["tier"], report["packs_copied"]) == (0, "attic", 2)
    assert [entry["action"] for entry in report["checkpoints"]] == ["push", "push", "keep"]
    code, out, _ = call("ls", filled)
    assert code == 0
    assert out.count("attic") == 2
    code, out, _ = call("ls", filled, "--json")
    assert [entry["tiers"] for entry in json.loads(out)["runs"][0]["entries"]] == [["local"], ["attic"], ["attic"]]
    code, out, _ = call("show", filled, 1)
    assert (code, "attic" in out) == (0, True)
    code, out, _ = call("ls", address)
    assert (code, "2 checkpoints" in out, "lies in" in out) == (0, True, False)
    assert call("restore", address, 1, "-o", tmp_path / "one.npz")[0] == 0
    code, out, _ = call("pull", filled, "1", "--json")
    assert (code, json.loads(out)["checkpoints"][0]["is_done"]) == (0, True)
    code, out, _ = call("pull", filled)
    assert (code, "1 checkpoint pulled" in out) == (0, True)
    assert call("pull", filled)[1].startswith("Nothing to pull")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("push", "nowhere://x/y"), 2),
        (("push", "s3://there-is-no-such-bucket/x"), 15),
        (("push", "s3://key:SECRET@bucket/x"), 2),
        (("push", "--older-than", "later"), 2),
        (("pull", "7"), 10),
    ],
)
def test_mistakes_are_reported_in_one_line(filled, address, call, arguments, code):
    verb, *rest = arguments
    found, _, err = call(verb, filled, *rest)
    assert found == code
    assert len(err.splitlines()) == 1
    assert "SECRET" not in err


def test_verify_reads_tiers_on_request(filled, address):
    with ckstore.open(filled) as store:
        store.push(address, keep_local=1)
        remove_packs(filled, store, 1)
        report = store.verify("decode")
        assert report.is_clean
        assert (report.pack_count, report.packs_elsewhere) == (1, 2)
        report = store.verify("decode", remote=True)
        assert report.is_clean
        assert (report.pack_count, report.packs_elsewhere) == (3, 0)
        pack = store.contents(1).packs[0]
        there, name = backend_for(address), f"packs/{pack.pack_id[:2]}/{pack.pack_id}.pack"
        content = bytearray(there.read_bytes(name, nbytes_max=1 << 30))
        content[9000] ^= 1
        there.bucket.put_over(name, bytes(content))
        assert store.verify("quick", remote=True).is_clean
        [damage] = store.verify("read", remote=True).damage
        assert address in damage.where
        assert damage.checkpoints == ("main/0 (step 1)",)
        there.unlink(name)
        [damage] = store.verify("quick", remote=True).damage
        assert damage.what == "the pack is missing"


def test_chain_with_base_in_tier_is_no_damage(folder, address):
    """A local checkpoint needs part of packs with chains of other checkpoints, whose bases are in the tier."""
    shared, later = np.arange(70_000.0), np.arange(70_000.0) + 0.5
    with ckstore.open(folder) as store:
        writer = ChainWriter(store)
        writer.commit({"w": walk_of(0)}, 0)
        writer.commit({"w": walk_of(1)}, 1, base=0)
        writer.commit({"w": walk_of(2), "x": shared}, 2, base=1)
        writer.commit({"w": walk_of(3), "x": shared, "y": later}, 3, base=2)
        writer.commit({"w": walk_of(9), "x": shared, "y": later}, 4)
        store.push(address, keep_local=1)
        tiers = {step: [pack.tier for pack in store.contents(step).packs] for step in (3, 4)}
        assert tiers == {3: ["remote"] * 4, 4: ["local"] * 3}
        for is_freed in (False, True):
            if is_freed:
                for step in (0, 1):
                    [*_, newest] = store.contents(step).packs
                    (folder / "packs" / newest.pack_id[:2] / f"{newest.pack_id}.pack").unlink()
            report = store.verify("decode")
            assert (report.damage, report.pack_count, report.packs_elsewhere) == ([], 3, 2)
            report = store.verify("decode", remote=True)
            assert (report.damage, report.packs_elsewhere) == ([], 0)


def test_local_listing_does_not_import_obstore(filled):
    program = (
        "import sys\n"
        "import ckstore\n"
        f"store = ckstore.open({str(filled)!r}, create=False)\n"
        "store.log(); store.restore(); store.close()\n"
        "from ckstore.cli.main import run\n"
        f"assert run(['ls', {str(filled)!r}]) == 0\n"
        "assert 'obstore' not in sys.modules\n"
        "assert 'ckstore.io.remote.client' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
