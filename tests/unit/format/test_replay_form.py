"""Protects the root of checkpoints in replay form: what is written is read, and everything else is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckstore.errors import MalformedError
from ckstore.format.manifest import build_manifest, decode_manifest, encode_manifest, republished
from ckstore.format.replay_form import ReplayBase, described, in_replay_form, replay_form_of, root_of
from ckstore.format.tree import REPLAY, ConvertedNode, DictNode, ListNode, TupleNode, ValueNode, items_of
from support.format_samples import STORE_ID, sample_manifest, sample_replay_form, sample_replay_manifest

FORM = sample_replay_form()


def with_root(tree, **changes):
    """Return a manifest in replay form with another root."""
    facts = {"seq": 3, "step": 41_000, "generation": 2, "parent": None, "time_ns": 1, "run": "main"} | changes
    empty = dict.fromkeys(("tensors", "storages", "chunks", "packs", "frames"), ())
    return build_manifest(store_id=STORE_ID, tree=tree, bytes_written=0, chunks_new=0, **facts, **empty)


def with_field(**changes):
    fields = dict(items_of(root_of(FORM).child)) | changes
    return ConvertedNode(REPLAY, DictNode("dict", tuple(fields), tuple(fields.values())))


def test_what_is_written_is_read():
    manifest = decode_manifest(encode_manifest(sample_replay_manifest()))
    assert replay_form_of(manifest) == FORM
    assert (manifest.header.generation, manifest.header.bytes_state, manifest.header.fidelity) == (2, 0, "exact")
    assert manifest.header.metrics["loss"] == sample_manifest().header.metrics["loss"]


def test_a_checkpoint_with_tensors_has_no_replay_form():
    assert replay_form_of(sample_manifest()) is None
    assert not sample_manifest().header.may_be_in_replay_form


def test_contents_are_those_of_the_state():
    found = described(sample_replay_manifest(), FORM)
    assert (found.tree, found.tensors) == (FORM.tree, FORM.tensors)
    assert [storage.nbytes for storage in found.storages] == [16, 8, 96]


def test_only_a_generation_above_0_may_be_in_replay_form():
    again = republished(sample_replay_manifest(), seq=9, time_ns=1, is_archival=True, generation=1)
    assert again.header.may_be_in_replay_form
    assert replay_form_of(again) == FORM
    with pytest.raises(MalformedError, match="contradicts its root"):
        replay_form_of(republished(sample_replay_manifest(), seq=9, time_ns=1, is_archival=True))


@pytest.mark.parametrize(("seq", "step"), [(2, 41_000), (3, 40_000)])
def test_a_base_comes_before_the_checkpoint(seq, step):
    form = replace(FORM, base=ReplayBase(seq, step, FORM.base.checkpoint_id))
    with pytest.raises(MalformedError, match="contradicts its root"):
        replay_form_of(with_root(root_of(form)))


@pytest.mark.parametrize(
    "changes",
    [
        {"base": ValueNode("int", 3)},
        {"base": DictNode("dict", ("seq", "step"), (ValueNode("int", 1), ValueNode("int", 1)))},
        {"environment": DictNode("dict", ("torch",), (ValueNode("int", 2),))},
        {"environment": DictNode("OrderedDict", (), ())},
        {"tree": ValueNode("str", "x")},
        {"tree": ValueNode("bytes", b"\xc1")},
        {"tensors": ValueNode("bytes", b"\x90")},
        {"storages": ValueNode("bytes", b"")},
        {"storages": ValueNode("bytes", bytes(47))},
        {"storages": ValueNode("bytes", b"\1" * 144)},
        {"values": DictNode("dict", (), ())},
        {"values": ListNode((TupleNode((ValueNode("int", 3), ValueNode("bytes", b""))),))},
        {"values": ListNode((TupleNode((ValueNode("int", 2), ValueNode("bytes", b"short"))),))},
        {"values": ListNode((TupleNode((ValueNode("int", 1), ValueNode("bytes", bytes(8)))),) * 2)},
        {"more": ValueNode("none", None)},
    ],
)
def test_other_fields_are_refused(changes):
    with pytest.raises(MalformedError):
        replay_form_of(with_root(with_field(**changes)))


def test_tables_of_a_whole_checkpoint_are_refused():
    whole = sample_manifest()
    odd = replace(whole, tree=root_of(FORM), losses=())
    with pytest.raises(MalformedError, match="contradicts its root"):
        replay_form_of(odd)


@pytest.mark.parametrize("change", ["digest", "base", "value", "replay"])
def test_what_readers_refuse_is_not_written(change):
    storages = (FORM.storages[0]._replace(digest=b"short"), *FORM.storages[1:])
    odd = {
        "digest": {"storages": storages},
        "base": {"base": FORM.base._replace(checkpoint_id=b"")},
        "value": {"values": {2: b"short"}},
        "replay": {"tree": root_of(FORM)},
    }[change]
    with pytest.raises(MalformedError):
        in_replay_form(sample_manifest(), replace(FORM, **odd))
