"""Protects states with many small tensors: what commits of one structure share is what a first commit works out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.commit import commit, pipeline
from ckstore.commit.chunking import plan_commit
from ckstore.config import Limits
from ckstore.errors import MalformedError
from ckstore.format import logical
from ckstore.format.logical import Logical, check_logical, decode_logical, encode_logical
from ckstore.format.tensors import ChunkSpec, Piece, StorageSpec, Table, TensorSpec
from ckstore.format.tree import TensorNode
from ckstore.io.memory import MemoryBackend
from ckstore.state.capture import capture
from ckstore.state.capture_cache import CaptureCache
from support.model import difference


def state_of(seed, count=300):
    source = np.random.default_rng(seed)
    model = {f"experts.{index}": source.standard_normal(index % 40).astype(np.float32) for index in range(count)}
    moments = {index: {"step": seed, "m": source.standard_normal(3)} for index in range(count // 4)}
    return {"model": model, "optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}, "mask": np.arange(5)}


def trained_to(state, seed):
    """Change a state in place, as training does, to that of another seed."""
    other = state_of(seed, len(state["model"]))
    for name, values in state["model"].items():
        values[:] = other["model"][name]
    for index, moment in state["optimizer"]["state"].items():
        moment["step"] = seed
        moment["m"][:] = other["optimizer"]["state"][index]["m"]
    return state


def newest(store):
    manifests = repository_of(store).manifests
    return manifests.load(max(manifests.listing().names, key=lambda name: name.seq))


def test_later_commits_write_what_a_new_handle_writes():
    kept, fresh, state = MemoryBackend(), MemoryBackend(), state_of(0)
    with ckstore.open(kept) as store:
        for step in range(4):
            store.commit(trained_to(state, step), step)
            with ckstore.open(fresh) as other:
                other.commit(state_of(step), step)
                one, two = newest(store), newest(other)
            assert one.logical == two.logical
            # A new handle has no samples of the checkpoint before.
            assert [each.mode for each in one.decisions.storages] == [each.mode for each in two.decisions.storages]
            assert difference(store.restore(), state_of(step)) is None
        assert store.verify("decode").is_clean


def test_second_commit_plans_nothing_again(store, monkeypatch):
    state = state_of(0)
    store.commit(state, 0)
    monkeypatch.setattr(commit, "plan_commit", lambda *_, **__: pytest.fail("it is planned again"))
    monkeypatch.setattr("ckstore.state.capture.StateWalker.captured", lambda *_: pytest.fail("it is captured again"))
    store.commit(trained_to(state, 1), 1)
    assert difference(store.restore(), state_of(1)) is None


def test_copies_of_a_state_share_its_structure(store, monkeypatch):
    """As `tensor.cpu()` makes them: other objects at other addresses each time."""
    store.commit(state_of(0), 0)
    monkeypatch.setattr(commit, "plan_commit", lambda *_, **__: pytest.fail("it is planned again"))
    for step in range(1, 4):
        store.commit(state_of(step), step)
        assert difference(store.restore(), state_of(step)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["model"].update({"experts.7": np.ones(9, np.float32)}),
        lambda state: state["model"].update({"experts.7": state["model"]["experts.7"].astype(np.float64)}),
        lambda state: state["model"].update(new=np.ones(2)),
        lambda state: state["model"].pop("experts.7"),
        lambda state: state.update(mask=state["model"]["experts.9"]),
    ],
    ids=["shape", "dtype", "new", "gone", "shared"],
)
def test_other_structure_is_worked_out_again(store, change):
    state = state_of(0)
    for step in range(2):
        store.commit(trained_to(state, step), step)
    changed = {**trained_to(state, 2), "model": dict(state["model"])}
    change(changed)
    store.commit(changed, 2)
    assert difference(store.restore(), changed) is None
    store.commit(trained_to(state, 3), 3)
    assert difference(store.restore(), state_of(3)) is None
    assert store.verify("decode").is_clean


def test_background_commits_share_a_structure_until_it_changes(folder):
    state = state_of(0)
    with ckstore.open(folder) as store:
        for step in range(6):
            if step == 3:
                # The same paths, in another order of tensors and with another shape.
                state["model"] = dict(reversed(state["model"].items()))
                state["mask"] = np.arange(6)
            expected = trained_to(state, step)
            store.commit_async(state, step).result()
            assert difference(store.restore(step), expected) is None
        assert [len(store.restore(step)["mask"]) for step in range(6)] == [5, 5, 5, 6, 6, 6]
        assert store.verify("decode").is_clean


@pytest.mark.parametrize("is_first", [True, False])
def test_chunk_is_gathered_from_all_its_tensors(is_first):
    cache = CaptureCache()
    state = state_of(5)
    captured = capture(state) if is_first else [cache.capture(state), cache.capture(state)][1]
    plan = plan_commit(captured.storages, Limits())
    for chunk in plan.chunks:
        expected = b"".join(
            bytes(captured.storages[each.storage].read(each.offset, each.offset + each.nbytes))
            for each in chunk.sources
        )
        destination = memoryview(bytearray(chunk.nbytes + 8))
        assert bytes(pipeline.gathered(chunk, captured.storages, destination)) == expected
        assert bytes(pipeline.gathered(chunk, list(captured.storages), destination)) == expected
        assert bytes(destination[-8:]) == bytes(8)


# Tables that manifests repeat


def logical_of(*, shape=(3,)):
    tensors = Table([TensorSpec("numpy", "<f4", shape, (4,), 0, 0)])
    storages = Table([StorageSpec(12, 4, True, (Piece(0, 0, 12),))])
    return Logical(TensorNode(0), tensors, storages, (ChunkSpec(b"c" * 32, 12, 4, True),))


def test_written_table_is_decoded_once(monkeypatch):
    written = logical_of()
    section = memoryview(encode_logical(b"record", written))
    _, found = decode_logical(section, limits=Limits(), written=written)
    assert found == written
    monkeypatch.setattr(logical, "decode_stored", lambda *_, **__: pytest.fail("it is decoded again"))
    _, found = decode_logical(section, limits=Limits(), written=written)
    assert found.tensors is written.tensors


def test_changed_byte_of_a_written_table_is_noticed(store):
    """The encoded table stays in memory for all commits of a run, so faulty memory must not reach a manifest."""
    state = {f"w{index}": np.full(100, float(index)) for index in range(20)}
    store.commit(state, 1)
    (table,) = [each for each in store._captures._last.structure._results.values() if isinstance(each, Table)]
    table.encoded = table.encoded.replace(b"<f8", b"<i8", 1)
    for values in state.values():
        values += 1
    with pytest.raises(MalformedError, match="does not decode to the rows that were encoded"):
        store.commit(state, 2)
    assert store.steps() == [1]
    store.commit(state, 2)
    assert difference(store.restore(), state) is None


def test_unreadable_table_is_refused():
    written = logical_of()
    written.tensors.encoded = b"\x91\xc0"
    section = memoryview(encode_logical(b"record", written))
    for _ in range(2):
        with pytest.raises(MalformedError):
            decode_logical(section, limits=Limits(), written=written)


@pytest.mark.parametrize(
    "wrong",
    [
        logical_of(shape=(4,)),
        dataclasses.replace(logical_of(), storages=Table([StorageSpec(13, 4, True, (Piece(0, 0, 12),))])),
    ],
    ids=["tensor", "storage"],
)
def test_tables_that_do_not_fit_are_refused_every_time(wrong):
    for _ in range(2):
        with pytest.raises(MalformedError):
            check_logical(wrong, Limits(), None)


def test_tables_are_checked_again_with_other_chunks():
    whole = logical_of()
    check_logical(whole, Limits(), None)
    shorter = dataclasses.replace(whole, chunks=(ChunkSpec(b"c" * 32, 8, 4, True),))
    with pytest.raises(MalformedError, match="reaches beyond its chunk"):
        check_logical(shorter, Limits(), None)
