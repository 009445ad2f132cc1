"""Nested state as a tree of nodes: typed keys, order and kinds kept; paths and globs.

Invariants:
- Nothing here imports numpy or torch, and nothing is pickled.
- Two nodes are equal if and only if the values they stand for are equal bit for bit and type by type.
- A decoded tree is not trusted: ``check_tree`` says what it must be like before anything is built.

A plain value is held in a form that any typed encoding can carry (``Value``):

====================  =====================================================================
type                  value
====================  =====================================================================
``none``              None
``bool``              bool
``int``               int of 64 bits, signed
``bigint``            bytes: little-endian two's complement
``float``             bytes: 8, little-endian IEEE 754 (NaN payloads and -0.0 kept)
``complex``           bytes: 16, real part and imaginary part as ``float``
``str``               str
``surrogates``        bytes: UTF-8 of a str that holds lone surrogates
``bytes``             bytes
``numpy...``          bytes or str: a scalar of numpy, see leaves.py
``torch...``          str: a dtype, device or Size of torch, see adapters/torch_state.py
====================  =====================================================================
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ckstore.errors import MalformedError, UsageError

Key = str | int
Path = tuple[Key, ...]
"""A leaf's identity: the typed keys that lead to it."""

Value = bool | int | str | bytes | None

DEPTH_MAX = 100
"""Most containers within one another."""

KEY_INT_MIN, KEY_INT_MAX = -(1 << 63), (1 << 63) - 1

PLAIN_TYPES = ("none", "bool", "int", "bigint", "float", "complex", "str", "surrogates", "bytes")
"""The types of Python's own plain values; every other type begins with its library's name."""

DICT_KINDS = ("dict", "OrderedDict", "Counter", "defaultdict")

FACTORIES: dict[str, Callable[[], object] | None] = {
    "int": int,
    "float": float,
    "list": list,
    "dict": dict,
    "str": str,
    "tuple": tuple,
    "set": set,
    "bool": bool,
    "none": None,
}
"""The default factories of a defaultdict that can be stored, by their names on disk."""


@dataclass(frozen=True, slots=True)
class DictNode:
    """A mapping, in order.

    Args:
        kind: One of DICT_KINDS.
        keys: Its keys, in order; bool is no key.
        children: One node for each key.
        metadata: The ``_metadata`` of an OrderedDict that torch made, else None.
        factory: A name in FACTORIES for a defaultdict, else None.
    """

    kind: str
    keys: tuple[Key, ...]
    children: tuple[Node, ...]
    metadata: Node | None = None
    factory: str | None = None


@dataclass(frozen=True, slots=True)
class ListNode:
    """A list."""

    children: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class TupleNode:
    """A tuple."""

    children: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class ValueNode:
    """A plain value; the module docstring lists types and values."""

    type: str
    value: Value


@dataclass(frozen=True, slots=True)
class TensorNode:
    """A tensor, by its index; the same index twice is one object at two places."""

    tensor: int


@dataclass(frozen=True, slots=True)
class ConvertedNode:
    """A value that a registered converter turned into the child."""

    name: str
    child: Node


Node = DictNode | ListNode | TupleNode | ValueNode | TensorNode | ConvertedNode


def format_path(path: Path) -> str:
    """Return the dotted form of a path, for people and globs: ``model.layers.0.weight``."""
    return ".".join(str(key) for key in path)


def place_of(path: Path) -> str:
    """Return the dotted form for a message; the root has words instead."""
    return format_path(path) if path else "the state itself"


def leaves_of(node: Node, path: Path = ()) -> Iterator[tuple[Path, ValueNode | TensorNode]]:
    """Yield every leaf with its path, in order; an OrderedDict's metadata is not part of it."""
    if isinstance(node, ValueNode | TensorNode):
        yield path, node
    elif isinstance(node, ConvertedNode):
        yield from leaves_of(node.child, path)
    else:
        for key, child in items_of(node):
            yield from leaves_of(child, (*path, key))


def items_of(node: DictNode | ListNode | TupleNode) -> Iterator[tuple[Key, Node]]:
    """Yield key and child of a container; lists and tuples count from 0."""
    keys: Sequence[Key] = node.keys if isinstance(node, DictNode) else range(len(node.children))
    yield from zip(keys, node.children, strict=True)


def tensors_of(node: Node) -> list[int]:
    """Return the indices of the tensors below a node, metadata included, each once, in order."""
    found: dict[int, None] = {}
    pending = [node]
    while pending:
        top = pending.pop()
        if isinstance(top, TensorNode):
            found.setdefault(top.tensor)
        elif isinstance(top, ConvertedNode):
            pending.append(top.child)
        elif not isinstance(top, ValueNode):
            pending.extend(reversed(top.children))
            if isinstance(top, DictNode) and top.metadata is not None:
                pending.append(top.metadata)
    return list(found)


def libraries_of(node: Node) -> set[str]:
    """Return the libraries whose plain values lie below a node: the first part of ``torch.dtype``."""
    found: set[str] = set()
    pending = [node]
    while pending:
        top = pending.pop()
        if isinstance(top, ValueNode):
            if top.type not in PLAIN_TYPES:
                found.add(library_of(top.type))
        elif isinstance(top, ConvertedNode):
            pending.append(top.child)
        elif not isinstance(top, TensorNode):
            pending.extend(top.children)
            if isinstance(top, DictNode) and top.metadata is not None:
                pending.append(top.metadata)
    return found


def library_of(value_type: str) -> str:
    """Return the library of a plain value's type: ``torch`` of ``torch.dtype``."""
    return value_type.partition(".")[0]


class Selection:
    """Leaves chosen by globs over dotted paths, in which ``*`` crosses dots.

    A pattern that matches a container chooses all that is in it.
    """

    def __init__(self, patterns: str | Sequence[str]) -> None:
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        if not self.patterns or not all(isinstance(pattern, str) for pattern in self.patterns):
            raise UsageError("only= takes a glob or a list of globs", where=repr(patterns))

    def matches(self, path: Path) -> bool:
        """Say whether a pattern matches this very path."""
        dotted = format_path(path)
        return any(fnmatchcase(dotted, pattern) for pattern in self.patterns)

    def covers(self, path: Path) -> bool:
        """Say whether a pattern matches this path or a container that it lies in."""
        return any(self.matches(path[:length]) for length in range(len(path) + 1))

    def prune(self, node: Node, path: Path = ()) -> Node | None:
        """Return the tree with what was chosen; dicts keep only that, lists and tuples come whole."""
        if self.matches(path):
            return node
        if isinstance(node, DictNode):
            kept = [(key, self.prune(child, (*path, key))) for key, child in items_of(node)]
            chosen = [(key, child) for key, child in kept if child is not None]
            keys, children = tuple(key for key, _ in chosen), tuple(child for _, child in chosen)
            return DictNode(node.kind, keys, children, node.metadata, node.factory) if chosen else None
        if isinstance(node, ConvertedNode):
            return node if self.prune(node.child, path) is not None else None
        if isinstance(node, ListNode | TupleNode):
            chosen_any = any(self.prune(child, (*path, key)) is not None for key, child in items_of(node))
            return node if chosen_any else None
        return None


def check_tree(node: Node, tensor_count: int, depth: int = 0) -> None:
    """Refuse a tree that ``capture`` does not make.

    Raises:
        MalformedError: Too deep, keys twice or not as many as children, a tensor that is not there.
    """
    # One level more than containers may have: a converted leaf is a node with a child.
    if depth > DEPTH_MAX + 1:
        raise MalformedError("the state tree is too deep", where=f"over {DEPTH_MAX} levels")
    if isinstance(node, TensorNode):
        if not 0 <= node.tensor < tensor_count:
            raise MalformedError("the state tree names a tensor that is not there", where=f"tensor {node.tensor}")
    elif isinstance(node, ConvertedNode):
        check_tree(node.child, tensor_count, depth + 1)
    elif not isinstance(node, ValueNode):
        if isinstance(node, DictNode):
            _check_dict(node)
            if node.metadata is not None:
                check_tree(node.metadata, tensor_count, depth + 1)
        for child in node.children:
            check_tree(child, tensor_count, depth + 1)


def _check_dict(node: DictNode) -> None:
    if node.kind not in DICT_KINDS:
        raise MalformedError("a dict of the state tree has an unknown kind", where=repr(node.kind[:40]))
    if len(node.keys) != len(node.children) or len(set(node.keys)) != len(node.keys):
        raise MalformedError("a dict of the state tree has keys twice, or not as many as values")
    if (node.kind == "defaultdict") != (node.factory is not None) or node.factory not in (None, *FACTORIES):
        raise MalformedError("a dict of the state tree has an impossible factory", where=repr(node.factory))
    if node.metadata is not None and node.kind != "OrderedDict":
        raise MalformedError("only an OrderedDict has metadata", where=node.kind)


def new_dict(node: DictNode) -> dict[Any, Any]:
    """Return an empty dict of the node's kind."""
    if node.kind == "defaultdict":
        return defaultdict(FACTORIES[node.factory or "none"])
    kinds: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
    return kinds[node.kind]()
