"""Protects readers from trees of checkpoints by many ranks that ckstore does not write."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckstore.errors import MalformedError
from ckstore.format.many_ranks import (
    LayoutFacts,
    MeshFacts,
    RankFacts,
    World,
    per_rank_node,
    plain_state,
    root_node,
    state_of,
    tiles_node,
    values_of,
    world_of,
)
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import (
    PER_RANK,
    TILES,
    ConvertedNode,
    DictNode,
    ListNode,
    OtherKey,
    Selection,
    TensorNode,
    TupleNode,
    ValueNode,
    decode_tree,
    encode_tree,
    leaves_of,
)

WORLD = World(
    size=4,
    attempt=bytes(range(16)),
    meshes=(MeshFacts(("dp", "tp"), (2, 2)), MeshFacts((), (4,))),
    layouts=(LayoutFacts(0, "(Shard(dim=0), Replicate())", (0, 2)),),
    ranks=(RankFacts("node1", 1 << 40, 5),),
    partial=((("model", "layers.1"), (1, 3)), (("order", 0, OtherKey(ValueNode("bool", True))), (2,))),
)
STATE = DictNode("dict", ("w",), (tiles_node(TensorNode(0), (4, 6), ((2,), (2, 4))),))
FLAT = TensorSpec("torch", "float32", (24,), (1,), 0, 0)


def test_a_root_comes_back():
    tree = decode_tree(encode_tree(root_node(STATE, WORLD)), tensor_count=1)
    assert world_of(tree) == WORLD
    assert state_of(tree) == STATE
    assert world_of(STATE) is None
    assert state_of(STATE) is STATE


def test_paths_and_selections_are_those_of_the_state():
    state = DictNode("dict", ("w", "rng"), (STATE.children[0], per_rank_node({1: ValueNode("int", 7)})))
    tree = root_node(state, WORLD)
    assert [path for path, _ in leaves_of(tree)] == [("w",), ("rng", 1)]
    assert dict(leaves_of(tree))["w",] == TensorNode(0)
    for glob in ("w", "w*"):
        assert Selection(glob, tree).prune(tree) is not None
    for glob in ("world", "state.*", "attempt"):
        assert Selection(glob, tree).prune(tree) is None


def test_tiles_become_tensors_of_their_shape():
    tree, tensors = plain_state(root_node(STATE, WORLD), (FLAT,))
    assert tree == DictNode("dict", ("w",), (TensorNode(0),))
    assert tensors == (replace(FLAT, shape=(4, 6), strides=(6, 1), cuts=((2,), (2, 4))),)
    tied = replace(STATE, keys=("w", "tied"), children=STATE.children * 2)
    assert plain_state(tied, (FLAT,))[1] == tensors
    assert plain_state(tree, tensors) == (tree, tensors)


@pytest.mark.parametrize(
    ("child", "spec"),
    [
        (TensorNode(0), FLAT),
        (tiles_node(TensorNode(1), (4, 6), ((2,), ())).child, FLAT),
        (tiles_node(ValueNode("int", 0), (4, 6), ((2,), ())).child, FLAT),
        (tiles_node(TensorNode(0), (4, 7), ((2,), ())).child, FLAT),
        (tiles_node(TensorNode(0), (4, 6), ()).child, FLAT),
        (tiles_node(TensorNode(0), (4, 6), ((2,),)).child, FLAT),
        (tiles_node(TensorNode(0), (4, 6), ((4,), ())).child, FLAT),
        (tiles_node(TensorNode(0), (4, 6), ((3, 2), ())).child, FLAT),
        (TupleNode((TensorNode(0), ValueNode("int", 24), TupleNode(()))), FLAT),
        (tiles_node(TensorNode(0), (4, 6), ((2,), ())).child, replace(FLAT, strides=(2,))),
        (tiles_node(TensorNode(0), (4, 6), ((2,), ())).child, replace(FLAT, library="numpy")),
    ],
)
def test_impossible_tiles_are_refused(child, spec):
    with pytest.raises(MalformedError):
        plain_state(DictNode("dict", ("w",), (ConvertedNode(TILES, child),)), (spec,))


@pytest.mark.parametrize("field", ["world", "attempt", "meshes", "layouts", "ranks", "partial"])
def test_an_impossible_root_is_refused(field):
    root = root_node(STATE, WORLD)
    fields = dict(zip(root.child.keys, root.child.children, strict=True))
    for wrong in (ValueNode("none", None), ValueNode("int", -1), ListNode((ValueNode("int", 1),))):
        made = {**fields, field: wrong}
        with pytest.raises(MalformedError):
            world_of(replace(root, child=DictNode("dict", tuple(made), tuple(made.values()))))
    with pytest.raises(MalformedError):
        state_of(replace(root, child=ListNode(())))


@pytest.mark.parametrize("child", [ListNode(()), DictNode("dict", (), ()), DictNode("dict", ("0",), (STATE,))])
def test_impossible_values_of_ranks_are_refused(child):
    with pytest.raises(MalformedError):
        values_of(ConvertedNode(PER_RANK, child))
