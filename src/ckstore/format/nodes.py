"""The state tree on disk: nested arrays of MessagePack.

A tensor is its index, a bare integer. Every other node is an array that begins with its kind:
``[0, kind, keys, children, metadata, factory]`` a mapping, ``[1, children]`` a list, ``[2, children]`` a tuple,
``[3, type, value]`` a plain value, ``[4, name, child]`` a converted one. Only the shape is judged here;
``ckstore.tree`` knows which kinds and values can be rebuilt.

What earlier readers do not know is written as a converted node, which they refuse only when it is to be restored: a
mapping with keys that are neither text nor integers is a list that begins with the empty mapping and goes on with keys
and values by turns; attributes of a tensor or mapping stand behind it in a tuple of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckstore.errors import MalformedError
from ckstore.format.records import decode_stored, encode_inner, encoded
from ckstore.tree import (
    BUILT_IN,
    DEPTH_MAX,
    ConvertedNode,
    DictNode,
    Key,
    ListNode,
    Node,
    OtherKey,
    TensorNode,
    TupleNode,
    ValueNode,
    tensors_of,
)

NODE_DEPTH_MAX = DEPTH_MAX + 1
"""Most nodes around one another: containers, and in the innermost one a plain value or tensor."""

_WRITTEN_SPARE = 1000
"""Nodes that may change before what was written of all of them is forgotten."""

_VALUE_TYPES = frozenset((type(None), bool, int, str, bytes))
_DICT, _LIST, _TUPLE, _VALUE, _CONVERTED = range(5)
_KEYED, _ATTRIBUTED = f"{BUILT_IN}keys", f"{BUILT_IN}attributes"

Plain = Callable[[Node | None, int], object]


def encode_tree(root: Node) -> bytes:
    """Return the tree as written.

    Raises:
        MalformedError: It is nested more deeply than a reader would follow.
    """
    return encode_inner(_plain(root, 0))


def _plain(node: Node | None, depth: int) -> object:
    if depth > NODE_DEPTH_MAX:
        raise MalformedError(f"a state tree is more than {NODE_DEPTH_MAX} nodes deep")
    if isinstance(node, TensorNode):
        return node.tensor if node.attributes is None else _attributed(node, depth, _plain)
    if isinstance(node, ValueNode):
        return [_VALUE, node.type, node.value]
    if isinstance(node, ConvertedNode):
        return [_CONVERTED, node.name, _plain(node.child, depth + 1)]
    return None if node is None else _container(node, depth, _plain)


def _container(node: DictNode | ListNode | TupleNode, depth: int, plain: Plain) -> object:
    if isinstance(node, DictNode):
        if node.attributes is not None:
            return _attributed(node, depth, plain)
        if any(type(key) is OtherKey for key in node.keys):
            return _keyed(node, depth, plain)
        children = [plain(child, depth + 1) for child in node.children]
        return [_DICT, node.kind, list(node.keys), children, plain(node.metadata, depth + 1), node.factory]
    children = [plain(child, depth + 1) for child in node.children]
    return [_LIST if isinstance(node, ListNode) else _TUPLE, children]


def _attributed(node: DictNode | TensorNode, depth: int, plain: Plain) -> object:
    bare, attributes = replace(node, attributes=None), node.attributes
    return [_CONVERTED, _ATTRIBUTED, [_TUPLE, [plain(bare, depth + 2), plain(attributes, depth + 2)]]]


def _keyed(node: DictNode, depth: int, plain: Plain) -> object:
    empty = DictNode(node.kind, (), (), node.metadata, node.factory)
    rows = [plain(empty, depth + 2)]
    for key, child in zip(node.keys, node.children, strict=True):
        key_node = key.node if isinstance(key, OtherKey) else _node_of_key(key)
        rows += [plain(key_node, depth + 2), plain(child, depth + 2)]
    return [_CONVERTED, _KEYED, [_LIST, rows]]


def _node_of_key(key: str | int) -> ValueNode:
    return ValueNode("int" if isinstance(key, int) else "str", key)


class TreeWriter:
    """Writes trees, one after the other, as ``encode_tree`` does; what was in an earlier one is not encoded again."""

    def __init__(self) -> None:
        # The nodes are kept beside what became of them: an id means nothing once its object is gone.
        self._written: dict[tuple[int, int], tuple[Node, object]] = {}
        self._count_max = 0

    def encode(self, root: Node) -> bytes:
        """Return a tree as written.

        Raises:
            MalformedError: It is nested more deeply than a reader would follow.
        """
        if len(self._written) > self._count_max:
            self._written.clear()
        content = encode_inner(self._plain(root, 0))
        self._count_max = self._count_max or 2 * len(self._written) + _WRITTEN_SPARE
        return content

    def _plain(self, node: Node | None, depth: int) -> object:
        if not isinstance(node, (DictNode, ListNode, TupleNode)):
            return _plain(node, depth)
        key = id(node), depth
        found = self._written.get(key)
        if found is None:
            found = self._written[key] = node, encoded(_container(node, depth, self._plain))
        return found[1]


def _key_of_node(node: Node) -> Key:
    # As ``_node_of_key`` made it; with another value it is refused when it is to be restored.
    is_bare = isinstance(node, ValueNode) and type(node.value) is {"int": int, "str": str}.get(node.type)
    return node.value if is_bare else OtherKey(node)  # type: ignore[union-attr, return-value]


def decode_tree(content: bytes | memoryview, *, tensor_count: int, where: object = None) -> Node:
    """Read a tree whose tensors are numbered below ``tensor_count``.

    Raises:
        MalformedError: No writer of ours makes these bytes; keys of one mapping repeat.
    """
    return _Decoder(tensor_count, where).node(decode_stored(content, object, where=where), 0)


class _Decoder:
    def __init__(self, tensor_count: int, where: object) -> None:
        self._tensor_count = tensor_count
        self._where = where
        # A byte may stand for a tensor: many mentions of one are one node, so that memory is bounded by the content.
        self._tensors: dict[int, TensorNode] = {}

    def node(self, plain: Any, depth: int) -> Node:
        if depth > NODE_DEPTH_MAX:
            raise self._malformed(f"is more than {NODE_DEPTH_MAX} nodes deep")
        if type(plain) is int:
            if not 0 <= plain < self._tensor_count:
                raise self._malformed("names a tensor that is not there")
            return self._tensors.setdefault(plain, TensorNode(plain))
        if type(plain) is not list or not plain:
            raise self._malformed("has something else where a node belongs")
        kind = plain[0]
        if type(kind) is not int:
            raise self._malformed("has a node without a kind")
        if kind == _VALUE and len(plain) == 3:
            return self._value(plain[1], plain[2])
        if kind == _DICT and len(plain) == 6:
            return self._mapping(plain, depth)
        if kind == _LIST and len(plain) == 2:
            return ListNode(self._children(plain[1], depth))
        if kind == _TUPLE and len(plain) == 2:
            return TupleNode(self._children(plain[1], depth))
        if kind == _CONVERTED and len(plain) == 3 and type(plain[1]) is str:
            return self._converted(plain[1], self.node(plain[2], depth + 1))
        raise self._malformed("has a node of unknown form")

    def _children(self, plain: Any, depth: int) -> tuple[Node, ...]:
        if type(plain) is not list:
            raise self._malformed("has something else where children belong")
        return tuple([self.node(child, depth + 1) for child in plain])

    def _value(self, name: Any, value: Any) -> ValueNode:
        if type(name) is not str or type(value) not in _VALUE_TYPES:
            raise self._malformed("has a plain value of unknown form")
        return ValueNode(name, value)

    def _mapping(self, plain: list[Any], depth: int) -> DictNode:
        _, kind, keys, children, metadata, factory = plain
        if type(kind) is not str or type(keys) is not list or not (factory is None or type(factory) is str):
            raise self._malformed("has a mapping of unknown form")
        if not all(type(key) in (str, int) for key in keys) or len(set(keys)) != len(keys):
            raise self._malformed("has a mapping with repeated or impossible keys")
        nodes = self._children(children, depth)
        if len(nodes) != len(keys):
            raise self._malformed("has a mapping with more or fewer values than keys")
        below = None if metadata is None else self.node(metadata, depth + 1)
        return DictNode(kind, tuple(keys), nodes, below, factory)

    def _converted(self, name: str, child: Node) -> Node:
        if name == _KEYED:
            return self._with_keys(child)
        return self._with_attributes(child) if name == _ATTRIBUTED else ConvertedNode(name, child)

    def _with_keys(self, child: Node) -> DictNode:
        rows = child.children if isinstance(child, ListNode) else ()
        empty, keys = (rows[0], rows[1::2]) if rows else (None, ())
        if (
            not isinstance(empty, DictNode)
            or empty.keys
            or empty.attributes is not None
            or len(rows) != 1 + 2 * len(keys)
        ):
            raise self._malformed("has keys of unknown form")
        found = tuple(map(_key_of_node, keys))
        is_needed = any(isinstance(key, OtherKey) for key in found)
        if not is_needed or len(set(found)) != len(found) or any(map(tensors_of, keys)):
            raise self._malformed("has a mapping with repeated or impossible keys")
        return replace(empty, keys=found, children=rows[2::2])

    def _with_attributes(self, child: Node) -> DictNode | TensorNode:
        pair = child.children if isinstance(child, TupleNode) else ()
        bare, attributes = pair if len(pair) == 2 else (None, None)
        if not isinstance(attributes, DictNode) or not attributes.children:
            raise self._malformed("has attributes of unknown form")
        if isinstance(bare, DictNode | TensorNode) and bare.attributes is None:
            return replace(bare, attributes=attributes)
        raise self._malformed("has attributes of unknown form")

    def _malformed(self, what: str) -> MalformedError:
        return MalformedError(f"the state tree {what}", where=self._where)
