"""Protects the quick decoding of skeletons: the same skeletons, the same refusals, and one object for equal parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.errors import CkstoreError
from ckstore.format.tree import ConvertedNode, DictNode, ListNode, Node, OtherKey, TensorNode, TupleNode, ValueNode
from ckstore.format.wire import xxh3_64
from ckstore.ranks.part import Skeleton
from ckstore.ranks.skeletons import SkeletonDecoder
from ckstore.ranks.union import merge_trees, unite
from support.rank_parts import Entry, skeleton_of

BASE = skeleton_of({"w": Entry((8, 16), is_shard=True), "n": Entry((3,))}, per_rank=(("rng",),))


def with_state(position: int) -> Skeleton:
    """Return a skeleton that differs from others in one number."""
    optimizer = DictNode("OrderedDict", ("step", 7), (ValueNode("int", 1), TupleNode((TensorNode(1), TensorNode(0)))))
    loader = DictNode("defaultdict", ("position",), (ValueNode("int", position),), None, "int")
    odd = DictNode("dict", (OtherKey(ValueNode("float", bytes(8))),), (ListNode((TensorNode(0),)),))
    marked = ConvertedNode("ckstore:set", ListNode((ValueNode("str", "a" * 300),)))
    keys = ("model", "optimizer", "loader", "odd", "marked")
    return replace(BASE, tree=DictNode("dict", keys, (BASE.tree, optimizer, loader, odd, marked)))


def test_what_is_decoded_is_what_was_encoded():
    decoder = SkeletonDecoder()
    for position in (1, 2, 1):
        skeleton = with_state(position)
        found = decoder.decode(skeleton.encode())
        assert found == skeleton == Skeleton.decode(skeleton.encode())
        assert (found.digest, found.tables_digest) == (skeleton.digest, skeleton.tables_digest)
        assert found.encode() == skeleton.encode()


def test_equal_parts_are_one_object():
    decoder = SkeletonDecoder()
    one, two = (decoder.decode(with_state(position).encode()) for position in (1, 2))
    decoder.begin()
    three = decoder.decode(with_state(3).encode())
    for left, right in ((one, two), (two, three)):
        assert left.tensors is right.tensors
        assert isinstance(left.tree, DictNode)
        assert isinstance(right.tree, DictNode)
        same = [a is b for a, b in zip(left.tree.children, right.tree.children, strict=True)]
        assert same == [True, True, False, True, True]


def test_what_two_commits_did_not_use_is_forgotten():
    decoder = SkeletonDecoder()
    first = decoder.decode(with_state(1).encode())
    decoder.begin()
    decoder.begin()
    assert decoder.decode(with_state(1).encode()).tensors is not first.tensors


@pytest.mark.parametrize("other", [BASE, skeleton_of({"w": Entry((8, 16), is_shard=True)})])
def test_merged_trees_do_not_depend_on_the_decoder(other):
    skeletons = [with_state(1), with_state(2), other, with_state(3)]
    decoder = SkeletonDecoder()
    quick = [decoder.decode(skeleton.encode()) for skeleton in skeletons]
    plain, shared = (merge_trees(unite(each, [0, 1, 2, 3, 1]), {}) for each in (skeletons, quick))
    assert plain == shared


@settings(deadline=None, max_examples=400)
@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=3), st.booleans())
def test_what_one_decoder_refuses_the_other_refuses(changes, is_warm):
    skeleton = with_state(1)
    plain = bytearray(skeleton.plain)
    for at, value in changes:
        plain[at % len(plain)] = value
    forged = replace(skeleton)
    tree_nbytes = len(skeleton.plain) - len(skeleton.tables)
    forged.__dict__.update(plain=bytes(plain), tables=bytes(plain[tree_nbytes:]))
    content = forged.encode()
    assert xxh3_64(content[:-8]).to_bytes(8, "little") == content[-8:]
    decoder = SkeletonDecoder()
    if is_warm:
        decoder.decode(skeleton.encode())
    outcomes: list[object] = []
    for decode in (Skeleton.decode, decoder.decode):
        try:
            outcomes.append(decode(content))
        except CkstoreError as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


def test_trees_that_are_too_deep_are_refused():
    node: Node = ValueNode("int", 1)
    for _ in range(101):
        node = DictNode("dict", ("a",), (node,))
    fine = replace(BASE, tree=node)
    deep = replace(BASE, tree=DictNode("dict", ("a",), (node,)))
    assert SkeletonDecoder().decode(fine.encode()) == fine
    with pytest.raises(CkstoreError):
        deep.encode()
