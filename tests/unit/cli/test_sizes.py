"""Protects the meaning of the sizes that commands print."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore.cli import render


@pytest.fixture
def history(tmp_path):
    """Four checkpoints of a drifting tensor, one of runs, and one whose halves differ."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal(150_000).astype(np.float32)
    with ckstore.open(tmp_path / "store") as store:
        for step in range(4):
            w = w + rng.standard_normal(w.size).astype(np.float32) * 1e-4
            halves = np.concatenate([np.full(90_000, 1.5, np.float32), rng.standard_normal(90_000).astype(np.float32)])
            store.commit({"w": w, "runs": np.repeat(np.arange(100), 1000), "halves": halves}, step)
    return tmp_path / "store"


def test_show_prints_own_chunks_and_bases_separately(call, history):
    with ckstore.open(history) as store:
        contents = store.contents("latest")
    assert contents.base_nbytes > 0
    own = contents.info.bytes_stored - contents.base_nbytes
    out = call("show", history)[1]
    compared = render.compared(own, contents.info.bytes_state)
    assert f"stored    {render.size(own)} of its own chunks ({compared})" in out
    assert f"bases     {render.size(contents.base_nbytes)} of chunks of other checkpoints" in out
    assert f"restore   reads {render.size(contents.info.bytes_stored)}, bases included" in out


@pytest.mark.parametrize(
    ("nbytes", "state_nbytes", "words"),
    [
        (50, 100, "2.00x smaller than the state"), (135, 100, "1.35x larger than the state"),
        (7, 7, "as large as the state"), (5, 0, "-"), (0, 5, "-"), (0, 0, "as large as the state"),
    ],
)  # fmt: skip
def test_sizes_are_compared_in_words(nbytes, state_nbytes, words):
    assert render.compared(nbytes, state_nbytes) == words


def test_entropy_is_not_called_a_bound(call, history):
    with ckstore.open(history) as store:
        share = {each.coding.path: each.share for each in store.stats(exact=True).tensors}
    assert share["runs"].stored_bits < share["runs"].bound_bits, "a coder that finds repeats needs fewer bits"
    out = call("stats", history, "--exact")[1]
    assert "order-0" in out
    assert "bound" not in out


def test_exact_entropy_of_few_elements_uses_all(tmp_path):
    values = np.arange(200, dtype=np.uint8)
    with ckstore.open(tmp_path / "store") as store:
        store.commit({"a": values}, 1)
        (row,) = store.stats(1, exact=True).tensors
    assert row.share.bound_bits == pytest.approx(np.log2(200), abs=1e-9)


def test_repack_warns_that_the_store_grows_until_gc(call, history):
    def used():
        return sum(path.stat().st_size for path in (history / "packs").rglob("*.pack"))

    before = used()
    out = call("repack", history)[1]
    assert used() > before
    assert "until a gc the store is larger by that" in out
    assert "once `ckstore gc` has freed the old ones" in out
    after = next(line for line in out.splitlines() if "of packs before" in line)
    call("gc", history, "--now", "--min-age", "0")
    assert render.size(used()) in after
    assert ("not smaller" in after) == (used() >= before)


def test_trash_distinguishes_deleted_from_pushed(call, history, tmp_path):
    call("repack", history)
    out = call("trash", "ls", history)[1]
    assert "form before its packs were rewritten: main step 0 (seq:0)" in out
    call("push", history, tmp_path / "tier", "--keep-local", 2)
    out = call("trash", "ls", history)[1]
    assert "form before a push: main step 0 (seq:0)" in out
    assert "form before a push: main step 1 (seq:1)" in out
    assert "deleted" not in out
    call("delete", history, 0, "--yes")
    assert "deleted: main step 0 (seq:0)" in call("trash", "ls", history)[1]
