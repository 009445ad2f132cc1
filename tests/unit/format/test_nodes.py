"""Protects the encoded state tree: typed keys, kinds and values round-trip; other shapes raise at any depth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import MalformedError, UsageError
from ckstore.format.records import encode_inner
from ckstore.format.tree import (
    NODE_DEPTH_MAX,
    ConvertedNode,
    DictNode,
    ListNode,
    TensorNode,
    TupleNode,
    ValueNode,
    decode_tree,
    encode_tree,
)
from support.format_samples import sample_manifest

ints = st.integers(-(1 << 63), (1 << 63) - 1)
leaves = st.builds(TensorNode, st.integers(0, 9)) | st.builds(
    ValueNode, st.text(max_size=8), st.none() | st.booleans() | ints | st.text(max_size=8) | st.binary(max_size=8)
)


def containers(below):
    children = st.lists(below, max_size=4).map(tuple)
    keyed = st.lists(st.tuples(st.text(max_size=4) | ints, below), max_size=4, unique_by=lambda pair: pair[0])
    return (
        st.builds(ListNode, children)
        | st.builds(TupleNode, children)
        | st.builds(ConvertedNode, st.text(max_size=8), below)
        | st.builds(
            lambda kind, pairs, metadata, factory: DictNode(
                kind, tuple(key for key, _ in pairs), tuple(child for _, child in pairs), metadata, factory
            ),
            st.sampled_from(("dict", "OrderedDict")),
            keyed,
            st.none() | below,
            st.none() | st.text(max_size=4),
        )
    )


# Hypothesis describes the recursive strategy where a draw exceeds its bound on leaves, and that text is long.
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@given(st.recursive(leaves, containers, max_leaves=20))
def test_tree_round_trips(tree):
    found = decode_tree(encode_tree(tree), tensor_count=10)
    assert found == tree
    assert repr(found) == repr(tree)


def test_the_sample_uses_every_kind_of_node():
    text = repr(sample_manifest().tree)
    for kind in (ConvertedNode, DictNode, ListNode, TensorNode, TupleNode, ValueNode):
        assert kind.__name__ in text


WRONG = {
    "nothing": None,
    "text": "x",
    "float": 1.0,
    "bool for a tensor": True,
    "negative tensor": -1,
    "tensor that is not there": 10,
    "no kind": [],
    "kind of text": ["1", []],
    "kind of bool": [True, []],
    "unknown kind": [9, []],
    "list of something else": [1, {}],
    "list with more": [1, [], 0],
    "value of a list": [3, "int", [1]],
    "value of a float": [3, "float", 1.0],
    "value without type": [3, 1, 1],
    "mapping without end": [0, "dict", [], []],
    "mapping of no kind": [0, 1, [], [], None, None],
    "more keys than values": [0, "dict", ["a"], [], None, None],
    "more values than keys": [0, "dict", [], [0], None, None],
    "a key twice": [0, "dict", ["a", "a"], [0, 0], None, None],
    "a key of bool": [0, "dict", [True], [0], None, None],
    "a key of bytes": [0, "dict", [b"a"], [0], None, None],
    "a key of float": [0, "dict", [1.0], [0], None, None],
    "a key of a list": [0, "dict", [[1]], [0], None, None],
    "factory of int": [0, "defaultdict", [], [], None, 1],
    "metadata of text": [0, "OrderedDict", [], [], "x", None],
    "converted without name": [4, None, 0],
}


@pytest.mark.parametrize("plain", WRONG.values(), ids=WRONG.keys())
def test_other_shapes_are_refused(plain):
    with pytest.raises(MalformedError):
        decode_tree(encode_inner(plain), tensor_count=10)
    with pytest.raises(MalformedError):
        decode_tree(encode_inner([1, [plain]]), tensor_count=10)


def test_keys_are_typed():
    tree = DictNode("dict", (1, "1"), (TensorNode(0), TensorNode(1)))
    assert decode_tree(encode_tree(tree), tensor_count=2).keys == (1, "1")


@pytest.mark.parametrize("depth", [NODE_DEPTH_MAX + 1, 5000, 1_000_000])
def test_deep_nesting_is_refused_not_a_crash(depth):
    with pytest.raises(MalformedError):
        decode_tree(b"\x92\x01\x91" * depth + b"\x00", tensor_count=1)


def test_a_deep_tree_is_not_written():
    tree = TensorNode(0)
    for _ in range(NODE_DEPTH_MAX):
        tree = ListNode((tree,))
    assert decode_tree(encode_tree(tree), tensor_count=1) == tree
    with pytest.raises(MalformedError):
        encode_tree(ListNode((tree,)))


def test_unsupported_values_are_not_written():
    for value in (1 << 64, "\ud800"):
        with pytest.raises(UsageError):
            encode_tree(ValueNode("int", value))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_tree_or_malformed(content):
    try:
        tree = decode_tree(content, tensor_count=3)
    except MalformedError:
        return
    assert decode_tree(encode_tree(tree), tensor_count=3) == tree
