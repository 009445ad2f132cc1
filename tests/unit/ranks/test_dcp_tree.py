"""Protects the names of DCP: the tree of a checkpoint gives back the planner data that a state was saved with."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckstore.errors import MalformedError, UnsupportedError, UsageError
from ckstore.format.many_ranks import World, per_rank_node
from ckstore.format.tree import DictNode, ListNode, TensorNode, ValueNode
from ckstore.ranks.dcp_tree import (
    DcpFacts,
    dcp_items,
    facts_of,
    nested,
    plain_node,
    plain_value,
    planner_data_of,
    shifted,
)
from ckstore.restore.own_part import OwnValues, RankPlace
from ckstore.state.capture import capture, loaded_adapters

NONE = ValueNode("none", None)
STATES = {
    "nested": {"model": {"a": torch.ones(2), "b.c": torch.ones(3)}, "optim": {"state": {0: {"step": torch.ones(1)}}}},
    "plain list": {"losses": [1, 2, 3], "betas": (0.9, 0.99), "names": [["a"], ["b"]]},
    "list of tensors": {"l": [torch.ones(1), 5, {"x": torch.ones(1)}, [1, 2], [torch.ones(1)]]},
    "groups": {"param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": []}]},
    "tuple of tensors": {"pair": (1, 2), "empty": [], "none": None},
}


@pytest.mark.parametrize("name", STATES)
def test_a_tree_has_the_names_of_dcp(name):
    state = STATES[name]
    _, mapping = flatten_state_dict(state)
    captured = capture(state, loaded_adapters())
    found = {fqn: path for fqn, path, _ in dcp_items(captured.tree, DcpFacts(), captured.tensors)}
    assert found == mapping
    assert planner_data_of(DcpFacts(), found) == mapping
    assert planner_data_of(DcpFacts(is_flattened=False), found) is None


def test_leaves_make_the_tree_that_they_came_from():
    leaves = [(("model", "a"), TensorNode(0)), (("l", 1), TensorNode(1)), (("l", 0), NONE), (("x",), TensorNode(2))]
    tree, absent = nested(leaves)
    assert tree == DictNode(
        "dict",
        ("model", "l", "x"),
        (DictNode("dict", ("a",), (TensorNode(0),)), ListNode((NONE, TensorNode(1))), TensorNode(2)),
    )
    assert absent == ()


def test_list_items_that_no_rank_saved_are_no_values():
    tree, absent = nested([(("l", 2), TensorNode(0)), (("l", 0), TensorNode(1))])
    assert absent == (("l", 1),)
    tensors = capture([torch.ones(1), torch.zeros(1)], loaded_adapters()).tensors
    assert [name for name, *_ in dcp_items(tree, DcpFacts(absent=absent), tensors)] == ["l.0", "l.2"]


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param((("a",), ("a", "b")), id="a value and a dict"),
        pytest.param((("a", "b"), ("a",)), id="a dict and a value"),
        pytest.param((("a", "b"), ("a", 0)), id="a dict and a list"),
    ],
)
def test_ranks_that_saved_different_containers_are_refused(paths):
    with pytest.raises(UsageError, match="different kinds of containers"):
        nested([(path, NONE) for path in paths])


def test_facts_survive_a_manifest():
    facts = DcpFacts(False, (("a", 1),), (("l", 0),), {"x": ("y", 2), 3: [None, True, 0.5]})
    assert DcpFacts.of_node(facts.node()) == facts
    assert DcpFacts.of_node(DcpFacts().node()) == DcpFacts()
    with pytest.raises(MalformedError, match="are malformed"):
        DcpFacts.of_node(plain_node({"flattened": True}))
    with pytest.raises(MalformedError, match="plain value"):
        plain_value(TensorNode(0))
    with pytest.raises(UnsupportedError, match="planner_data"):
        plain_node({"a": object()})


def test_a_checkpoint_of_one_rank_has_no_facts():
    assert facts_of(capture({"a": 1}).tree) == DcpFacts()
    with pytest.raises(UnsupportedError, match="dicts"):
        list(dcp_items(capture([1]).tree, DcpFacts(), ()))


def test_a_rank_gets_its_own_values():
    values = per_rank_node({0: ValueNode("int", 5), 2: ValueNode("int", 7)})
    tree = DictNode("dict", ("a", "l"), (values, ListNode((values, NONE))))

    def own(rank):
        return OwnValues(World(3, b""), RankPlace(rank, 3), leaves_missing=True).own(tree, None, ())

    assert own(2) == DictNode("dict", ("a", "l"), (ValueNode("int", 7), ListNode((ValueNode("int", 7), NONE))))
    assert own(1) is tree


def test_two_parts_of_one_name_are_refused():
    captured = capture({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, loaded_adapters())
    with pytest.raises(UnsupportedError, match="same name"):
        list(dcp_items(captured.tree, DcpFacts(), captured.tensors))


def test_tensors_are_renumbered_in_all_places():
    tree = capture({"a": torch.ones(1), "l": [torch.ones(1), (torch.ones(1), 2)]}, loaded_adapters()).tree
    moved = shifted(tree, 5)
    assert [node.tensor for node in _tensors(moved)] == [node.tensor + 5 for node in _tensors(tree)] == [5, 6, 7]


def _tensors(node):
    if isinstance(node, TensorNode):
        return [node]
    return [found for child in getattr(node, "children", ()) for found in _tensors(child)]
