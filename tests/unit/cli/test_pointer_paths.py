"""Commands that take a pointer in place of a store."""

from __future__ import annotations

import json

import pytest

from ckstore.integrations.pointer_store import PointerStore


@pytest.fixture
def pointer(tmp_path):
    """A folder whose pointer names the first of two checkpoints of the run ``b``."""
    pointers = PointerStore(tmp_path / "store", run="b", background=False, made_by="a test")
    for step in (10, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        pointers.save({"step": step, "text": "x"}, step, tmp_path / f"checkpoint-{step}" / "ckstore.json")
    pointers.close()
    return tmp_path / "checkpoint-10"


def test_show_takes_the_checkpoint_of_the_pointer(call, pointer):
    for path in (pointer, pointer / "ckstore.json"):
        code, out, _ = call("show", path, "--json")
        assert (code, json.loads(out)["step"]) == (0, 10)
    assert json.loads(call("show", pointer, "20", "--json")[1])["step"] == 20


def test_restore_writes_the_checkpoint_of_the_pointer(call, pointer, tmp_path):
    code, out, _ = call("restore", pointer, "-o", tmp_path / "x.npz")
    assert code == 0
    assert "step 10" in out


def test_store_has_the_newest_as_default(call, pointer):
    assert json.loads(call("show", pointer.parent / "store", "--run", "b", "--json")[1])["step"] == 20


def test_pointer_whose_checkpoint_is_gone_is_refused(call, pointer):
    assert call("delete", pointer.parent / "store", "10", "--run", "b", "--yes")[0] == 0
    code, _, err = call("show", pointer)
    assert code == 10
    assert "not in the store any more" in err
    assert "step 20" in err
