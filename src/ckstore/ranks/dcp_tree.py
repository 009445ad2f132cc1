"""The state tree of a checkpoint that torch.distributed.checkpoint (DCP) saved, and the names of its parts in DCP.

DCP flattens a nested state. Its planner data says where each flat name was: ``{"model.weight": ("model", "weight")}``.
The tree has the nested form. On load the names and the planner data are made from the tree again, by DCP's rules: it
descends into mappings, and into lists that contain a tensor or a mapping.

What the tree does not say is in ``DcpFacts``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckstore.errors import MalformedError, UnsupportedError, UsageError
from ckstore.format.many_ranks import is_many
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import (
    ConvertedNode,
    DictNode,
    Key,
    ListNode,
    Node,
    Path,
    TensorNode,
    TupleNode,
    ValueNode,
    format_path,
    items_of,
)
from ckstore.state.values import decode_plain, encode_plain

DCP_KEY = "dcp"
"""Key of the facts in the root of a checkpoint by many ranks."""

ABSENT = ValueNode("none", None)
"""Fills a list of which no rank saved an item."""


@dataclass(frozen=True, slots=True)
class DcpFacts:
    """What DCP's metadata says beyond the tree.

    Args:
        is_flattened: The planner flattened the state, so there is planner data.
        pickled: Paths of values that DCP's planner had serialized. They are stored as these bytes.
        absent: Paths of list items that no rank saved.
        planner: The planner data, if it does not follow from the tree; else None.
    """

    is_flattened: bool = True
    pickled: tuple[Path, ...] = ()
    absent: tuple[Path, ...] = ()
    planner: Any = None

    def node(self) -> Node:
        """Return the facts as a node."""
        return plain_node(
            {
                "flattened": self.is_flattened,
                "pickled": self.pickled,
                "absent": self.absent,
                "planner": self.planner,
            }
        )

    @classmethod
    def of_node(cls, node: Node) -> DcpFacts:
        """Return the facts in a node of a manifest, which is not trusted."""
        facts = plain_value(node)
        try:
            found = cls(
                bool(facts["flattened"]),
                tuple(map(tuple, facts["pickled"])),
                tuple(map(tuple, facts["absent"])),
                facts["planner"],
            )
        except (KeyError, TypeError):
            raise MalformedError("a checkpoint's facts for torch.distributed.checkpoint are malformed") from None
        return found


def plain_node(value: Any) -> Node:
    """Return the node of nested dicts, lists and tuples of plain values.

    Raises:
        UnsupportedError: It contains something else.
    """
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return DictNode("dict", tuple(value), tuple(plain_node(each) for each in value.values()))
    if type(value) is list:
        return ListNode(tuple(map(plain_node, value)))
    if type(value) is tuple:
        return TupleNode(tuple(map(plain_node, value)))
    plain = encode_plain(value)
    if plain is None:
        raise UnsupportedError(
            "the planner data of a save is not made of plain values",
            where=f"a {type(value).__qualname__}",
            todo="use a planner whose planner_data consists of dicts, lists, tuples, numbers and text",
        )
    return plain


def plain_value(node: Node) -> Any:
    """Return the value of a node that ``plain_node`` made."""
    if isinstance(node, ValueNode):
        return decode_plain(node)
    if isinstance(node, ListNode):
        return [plain_value(child) for child in node.children]
    if isinstance(node, TupleNode):
        return tuple(plain_value(child) for child in node.children)
    if isinstance(node, DictNode):
        return {key: plain_value(child) for key, child in zip(node.keys, node.children, strict=True)}
    raise MalformedError("a plain value is expected in the state tree")


def facts_of(tree: Node) -> DcpFacts:
    """Return what DCP's metadata says beyond the tree of a checkpoint.

    A checkpoint that was not saved through DCP has neither pickled values nor planner data of its own.
    """
    if is_many(tree) and isinstance(tree, ConvertedNode) and isinstance(tree.child, DictNode):
        found = dict(items_of(tree.child)).get(DCP_KEY)
        return DcpFacts() if found is None else DcpFacts.of_node(found)
    return DcpFacts()


def nested(leaves: Iterable[tuple[Path, Node]]) -> tuple[DictNode, tuple[Path, ...]]:
    """Return the tree with these leaves, and the paths of list items that are missing.

    Raises:
        UsageError: Two leaves need different containers at one place.
    """
    root = _Container(is_list=False)
    for path, node in leaves:
        here = root
        for depth, key in enumerate(path[:-1]):
            here = here.container(key, path[: depth + 1], is_list=isinstance(path[depth + 1], int))
        here.put(path[-1], node, path)
    absent: list[Path] = []
    node = root.node((), absent)
    assert isinstance(node, DictNode)
    return node, tuple(absent)


class _Container:
    """A dict or list that is being filled."""

    def __init__(self, *, is_list: bool) -> None:
        self.is_list = is_list
        self.items: dict[Key, Node | _Container] = {}

    def container(self, key: Key, path: Path, *, is_list: bool) -> _Container:
        found = self.items.setdefault(key, _Container(is_list=is_list))
        if not isinstance(found, _Container) or found.is_list != is_list:
            raise _mixed(path)
        return found

    def put(self, key: Key, node: Node, path: Path) -> None:
        if key in self.items or isinstance(key, int) != self.is_list:
            raise _mixed(path)
        self.items[key] = node

    def node(self, path: Path, absent: list[Path]) -> Node:
        def child(key: Key) -> Node:
            found = self.items.get(key)
            if found is None:
                absent.append((*path, key))
                return ABSENT
            return found.node((*path, key), absent) if isinstance(found, _Container) else found

        if self.is_list:
            count = max((key for key in self.items if isinstance(key, int)), default=-1) + 1
            return ListNode(tuple(map(child, range(count))))
        return DictNode("dict", tuple(self.items), tuple(map(child, self.items)))


def _mixed(path: Path) -> UsageError:
    return UsageError(
        "ranks saved different kinds of containers, or a container and a value, at one place of the state",
        where=format_path(path),
        todo="give the parts of different ranks different names; nothing was published",
        path=path,
    )


def dcp_items(state: Node, facts: DcpFacts, tensors: Sequence[TensorSpec]) -> Iterator[tuple[str, Path, Node]]:
    """Yield the flat name, the path and the node of everything that DCP saves of a state.

    Raises:
        UnsupportedError: The state is not a dict, which DCP needs, or two parts have the same flat name.
    """
    if not isinstance(state, DictNode):
        raise UnsupportedError(
            "torch.distributed.checkpoint loads only states that are dicts",
            todo="use Store.restore for this checkpoint",
        )
    absent = set(facts.absent)
    seen: set[str] = set()
    for key, child in zip(state.keys, state.children, strict=True):
        top = (str(key),)
        leaves = _leaves(child, top, tensors) if facts.is_flattened else [(top, child)]
        for path, node in leaves:
            name = format_path(path)
            if path in absent:
                continue
            if name in seen:
                raise UnsupportedError(
                    "two parts of the state have the same name in torch.distributed.checkpoint",
                    where=name,
                    todo="use Store.restore for this checkpoint",
                )
            seen.add(name)
            yield name, path, node


def _leaves(node: Node, path: Path, tensors: Sequence[TensorSpec]) -> Iterator[tuple[Path, Node]]:
    if isinstance(node, DictNode):
        for key, child in zip(node.keys, node.children, strict=True):
            yield from _leaves(child, (*path, str(key)), tensors)
    elif isinstance(node, ListNode) and not _is_leaf(node, tensors):
        for index, child in enumerate(node.children):
            yield from _leaves(child, (*path, index), tensors)
    else:
        yield path, node


def _is_leaf(node: Node, tensors: Sequence[TensorSpec]) -> bool:
    """Say whether DCP does not descend into a node."""
    if isinstance(node, DictNode):
        return False
    if not isinstance(node, ListNode):
        return True
    return all(not is_array(child, tensors) and _is_leaf(child, tensors) for child in node.children)


def is_array(node: Node, tensors: Sequence[TensorSpec]) -> bool:
    """Say whether a node is a tensor of torch."""
    return isinstance(node, TensorNode) and tensors[node.tensor].library == "torch"


def planner_data_of(facts: DcpFacts, paths: Mapping[str, Path]) -> Any:
    """Return the planner data of a checkpoint whose parts have these paths."""
    if facts.planner is not None:
        return facts.planner
    return dict(paths) if facts.is_flattened else None


def shifted(node: Node, by: int) -> Node:
    """Return a node whose tensors have higher indices."""
    if isinstance(node, TensorNode):
        return TensorNode(node.tensor + by, node.attributes)
    if isinstance(node, ConvertedNode):
        return ConvertedNode(node.name, shifted(node.child, by))
    if isinstance(node, ListNode):
        return ListNode(tuple(shifted(child, by) for child in node.children))
    if isinstance(node, TupleNode):
        return TupleNode(tuple(shifted(child, by) for child in node.children))
    if isinstance(node, DictNode):
        children = tuple(shifted(child, by) for child in node.children)
        metadata = None if node.metadata is None else shifted(node.metadata, by)
        return DictNode(node.kind, node.keys, children, metadata, node.factory, node.attributes)
    return node
