"""The state tree: nested state as nodes with typed keys, order and kinds; its encoding; paths and globs.

Invariants:
- Nothing here imports numpy or torch, and nothing is pickled.
- Two nodes are equal if and only if their values are equal bit for bit and type by type.
- A decoded tree is not trusted: ``check_tree`` must accept it before anything is built from it.

The value of a ``ValueNode`` has a type that MessagePack can represent (``Value``):

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
``surrogates``        bytes: UTF-8 of a str that contains lone surrogates
``bytes``             bytes
``numpy...``          bytes or str: a numpy scalar, see state/numpy_adapter.py
``torch...``          str: a torch dtype, device, Size or similar, see state/torch_adapter.py
====================  =====================================================================

Every other object is a ``ConvertedNode``: the node of its state, and the name of the conversion that builds it. Names
with the prefix ``ckstore:`` are defined in state/named_types.py and state/standard_types.py.

This module is long because nodes, their paths and their encoding are read together.

On disk the tree consists of nested MessagePack arrays. A tensor is its index, an integer. Every other node is an array:
``[0, kind, keys, children, metadata, factory]`` a mapping, ``[1, children]`` a list, ``[2, children]`` a tuple,
``[3, type, value]`` a plain value, ``[4, name, child]`` a converted node. ``decode_tree`` checks only this shape;
``check_tree`` checks kinds and values.

Nodes that early readers do not know are encoded as converted nodes, which these readers refuse only when the leaf is
restored. A mapping with keys other than text and integers is a list: the empty mapping, then keys and values in turn. A
tensor or mapping with attributes is a tuple of the node and the attributes.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeGuard

from ckstore.errors import MalformedError, UsageError, shown_object
from ckstore.format.records import decode_stored, encode_inner, encoded

BUILT_IN = "ckstore:"
"""Prefix of the names of built-in conversions; registered converters cannot have it."""

RANKS, PER_RANK, TILES = f"{BUILT_IN}ranks", f"{BUILT_IN}per_rank", f"{BUILT_IN}torch.tiles"
"""Names that only checkpoints by many ranks have; see many_ranks.py."""

REPLAY = f"{BUILT_IN}replay"
"""Name of the root of a checkpoint in replay form; see replay_form.py."""

Value = bool | int | str | bytes | None

DEPTH_MAX = 100
"""Largest nesting depth of containers."""

PACKED_NUMBERS = (f"{BUILT_IN}count", f"{BUILT_IN}numbers")
PACKED_PLAIN = f"{BUILT_IN}plain"
"""Prefixes of the names of long plain values, whose parts have no nodes; see state/standard_types.py."""

KEY_INT_MIN, KEY_INT_MAX = -(1 << 63), (1 << 63) - 1

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
"""Default factories of a defaultdict that can be stored, by their names on disk."""


@dataclass(frozen=True, slots=True)
class DictNode:
    """A mapping; the order of its items is kept.

    Args:
        kind: One of DICT_KINDS.
        keys: Its keys, in order.
        children: One node for each key.
        metadata: The ``_metadata`` that torch adds to an OrderedDict, else None.
        factory: A name in FACTORIES for a defaultdict, else None.
        attributes: A DictNode of the Python attributes of the mapping, else None.
    """

    kind: str
    keys: tuple[Key, ...]
    children: tuple[Node, ...]
    metadata: Node | None = None
    factory: str | None = None
    attributes: Node | None = None


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
    """A tensor by its index. Two nodes with one index are one object at two paths.

    Args:
        tensor: The index.
        attributes: A DictNode of the Python attributes of the tensor, else None.
    """

    tensor: int
    attributes: Node | None = None


@dataclass(frozen=True, slots=True)
class ConvertedNode:
    """A converted object: the node of its state, and the name of the conversion that builds it."""

    name: str
    child: Node


Node = DictNode | ListNode | TupleNode | ValueNode | TensorNode | ConvertedNode


@dataclass(frozen=True, slots=True)
class OtherKey:
    """A key of a mapping that is neither a str nor a 64-bit int, as a node without tensors."""

    node: Node

    def __str__(self) -> str:
        return shown(self.node)


Key = str | int | OtherKey
Path = tuple[Key, ...]
"""The typed keys from the root to a node."""


def shown(node: Node) -> str:
    """Return a readable form of a node without tensors, for paths: ``0.5``, ``(1, 'a')``, ``Colour.RED``."""
    if isinstance(node, ValueNode):
        return _shown_value(node)
    if isinstance(node, ConvertedNode):
        label = node.name.removeprefix(BUILT_IN).rpartition(":")[2]
        if node.name.startswith(f"{BUILT_IN}enum:") and isinstance(node.child, DictNode) and node.child.children:
            # The first field of an enum member is its name.
            return f"{label}.{getattr(node.child.children[0], 'value', '?')}"
        return f"{label}({shown(node.child)})"
    if isinstance(node, TensorNode):
        return f"tensor {node.tensor}"
    if isinstance(node, DictNode):
        return "{" + ", ".join(f"{key}: {shown(child)}" for key, child in items_of(node)) + "}"
    inner = ", ".join(shown(child) for child in node.children)
    return f"[{inner}]" if isinstance(node, ListNode) else f"({inner},)" if len(node.children) == 1 else f"({inner})"


def _shown_value(node: ValueNode) -> str:
    kind, value = node.type, node.value
    if kind in ("float", "complex") and isinstance(value, bytes) and len(value) == (8 if kind == "float" else 16):
        numbers = struct.unpack(f"<{len(value) // 8}d", value)
        return repr(numbers[0] if kind == "float" else complex(*numbers))
    if kind == "surrogates" and isinstance(value, bytes):
        # Escaped, because lone surrogates cannot be printed.
        try:
            return ascii(value.decode("utf-8", "surrogatepass"))[1:-1]
        except UnicodeDecodeError:
            return repr(value)
    if kind == "bigint" and isinstance(value, bytes):
        return f"an int of {8 * len(value)} bits"
    return f"torch.{value}" if kind == "torch.dtype" and isinstance(value, str) else repr(value)


def format_path(path: Path) -> str:
    """Return the dotted form of a path, for users and globs: ``model.layers.0.weight``."""
    return ".".join(str(key) for key in path)


def place_of(path: Path) -> str:
    """Return the dotted form for a message; the root is "the state itself"."""
    return format_path(path) if path else "the state itself"


def leaves_of(node: Node, path: Path = ()) -> Iterator[tuple[Path, ValueNode | TensorNode]]:
    """Yield every leaf with its path, in order, without the metadata of an OrderedDict."""
    if isinstance(node, (ValueNode, TensorNode)):
        yield path, node
    elif isinstance(node, ConvertedNode):
        yield from leaves_of(_content_of(node), path)
    else:
        for key, child in items_of(node):
            yield from leaves_of(child, (*path, key))


def _content_of(node: ConvertedNode) -> Node:
    """Return the node whose leaves are those of a converted one: not what describes ranks, or how a tensor lies."""
    child = node.child
    if node.name == RANKS and isinstance(child, DictNode) and "state" in child.keys:
        return child.children[child.keys.index("state")]
    if node.name == TILES and isinstance(child, TupleNode) and child.children:
        return child.children[0]
    return child


def items_of(node: DictNode | ListNode | TupleNode) -> Iterator[tuple[Key, Node]]:
    """Yield the keys and children of a container; lists and tuples have the keys 0, 1, ..."""
    keys: Sequence[Key] = node.keys if isinstance(node, DictNode) else range(len(node.children))
    yield from zip(keys, node.children, strict=True)


def tensors_of(node: Node) -> list[int]:
    """Return the indices of the tensors below a node, including metadata, in order without repetitions."""
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


def parts_of(node: Node) -> Iterator[Node]:
    """Yield the nodes directly below a node: children, metadata, attributes and keys."""
    if isinstance(node, ConvertedNode):
        yield node.child
    elif isinstance(node, (DictNode, ListNode, TupleNode)):
        yield from node.children
    if isinstance(node, DictNode):
        yield from [key.node for key in node.keys if isinstance(key, OtherKey)]
        if node.metadata is not None:
            yield node.metadata
    if isinstance(node, (DictNode, TensorNode)) and node.attributes is not None:
        yield node.attributes


def libraries_of(node: Node) -> set[str]:
    """Return the libraries of the plain values and conversions below a node."""
    found: set[str] = set()
    pending = [node]
    while pending:
        top = pending.pop()
        library = library_of(top.type) if isinstance(top, ValueNode) else None
        if isinstance(top, ConvertedNode):
            library = library_of_conversion(top.name)
        if library is not None:
            found.add(library)
        pending.extend([part for part in parts_of(top) if not is_bare_tensor(part)])
    return found


def is_in_replay_form(tree: Node) -> bool:
    """Say whether a tree is that of a checkpoint in replay form."""
    return isinstance(tree, ConvertedNode) and tree.name == REPLAY


def is_bare_tensor(node: Node) -> TypeGuard[TensorNode]:
    """Say whether a node is a tensor without attributes: nothing is below it."""
    return type(node) is TensorNode and node.attributes is None


def library_of_conversion(name: str) -> str | None:
    """Return the library of a conversion: ``torch`` for ``ckstore:torch.Generator``; None: ckstore or a user."""
    library, dot, _ = name.removeprefix(BUILT_IN).partition(":")[0].partition(".")
    return library if dot and name.startswith(BUILT_IN) else None


def library_of(value_type: str) -> str | None:
    """Return the library of a plain type: ``torch`` for ``torch.dtype``; None: Python itself."""
    library, dot, _ = value_type.partition(".")
    return library if dot else None


class Selection:
    """Leaves selected by globs over dotted paths; ``*`` also matches dots.

    A pattern that matches a container selects everything in it. A pattern that equals the path of a node selects only
    that node and is not used as a glob, because keys may contain brackets.

    Args:
        patterns: The globs.
        trees: The trees to select from.
    """

    def __init__(self, patterns: str | Sequence[str], *trees: Node) -> None:
        several = patterns if isinstance(patterns, Iterable) else ()
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(several)
        if not self.patterns or not all(isinstance(pattern, str) for pattern in self.patterns):
            raise UsageError("only= takes a glob or a list of globs", where=shown_object(patterns))
        globs = {pattern for pattern in self.patterns if any(sign in pattern for sign in "*?[")}
        paths = (format_path(path) for tree in trees for path in _paths_of(tree, ())) if globs else ()
        self._globs = globs.difference(paths)

    def matches(self, path: Path) -> bool:
        """Say whether a pattern matches this path itself."""
        dotted = format_path(path)
        return any(dotted == each or (each in self._globs and fnmatchcase(dotted, each)) for each in self.patterns)

    def covers(self, path: Path) -> bool:
        """Say whether a pattern matches this path or one of its containers."""
        return any(self.matches(path[:length]) for length in range(len(path) + 1))

    def _may_match_below(self, node: ConvertedNode, path: Path) -> bool:
        """Say whether a pattern may match a part of a long plain value, whose parts are not in the tree."""
        dotted = f"{format_path(path)}."
        for each in self.patterns:
            for length in range(1, len(each) + 1):
                begin = each[:length]
                is_begin = fnmatchcase(dotted, begin) if each in self._globs else dotted == begin
                # The parts of a list of numbers have the keys 0, 1, ...
                if is_begin and (node.name == PACKED_PLAIN or not set(each[length:]) - set("0123456789*?[]-!")):
                    return True
        return False

    def prune(self, node: Node, path: Path = ()) -> Node | None:
        """Return the selected part of the tree. Dicts keep selected items only; lists and tuples are kept whole."""
        if self.matches(path):
            return node
        if isinstance(node, DictNode):
            pruned = [(key, self.prune(child, (*path, key))) for key, child in items_of(node)]
            chosen = [(key, child) for key, child in pruned if child is not None]
            keys, children = tuple(key for key, _ in chosen), tuple(child for _, child in chosen)
            return replace(node, keys=keys, children=children) if chosen else None
        if isinstance(node, ConvertedNode):
            if node.name.startswith((*PACKED_NUMBERS, PACKED_PLAIN)):
                return node if self._may_match_below(node, path) else None
            return node if self.prune(_content_of(node), path) is not None else None
        if isinstance(node, ListNode | TupleNode):
            chosen_any = any(self.prune(child, (*path, key)) is not None for key, child in items_of(node))
            return node if chosen_any else None
        return None


def _paths_of(node: Node, path: Path) -> Iterator[Path]:
    """Yield the path of every container and leaf."""
    yield path
    if isinstance(node, ConvertedNode):
        yield from _paths_of(_content_of(node), path)
    elif isinstance(node, DictNode | ListNode | TupleNode):
        for key, child in items_of(node):
            yield from _paths_of(child, (*path, key))


def check_tree(node: Node, tensor_count: int, depth: int = 0) -> None:
    """Refuse a tree that ``capture`` does not produce.

    Raises:
        MalformedError: The tree is too deep, repeats keys, or refers to a tensor that does not exist.
    """
    # One more level than containers may have, because a converted leaf is a node with a child.
    if depth > DEPTH_MAX + 1:
        raise MalformedError("the state tree is too deep", where=f"over {DEPTH_MAX} levels")
    if isinstance(node, TensorNode) and not 0 <= node.tensor < tensor_count:
        raise MalformedError("the state tree refers to a tensor that does not exist", where=f"tensor {node.tensor}")
    if isinstance(node, DictNode):
        _check_dict(node)
    if isinstance(node, (DictNode, TensorNode)) and node.attributes is not None:
        _check_attributes(node.attributes)
    for part in parts_of(node):
        # A call for each of very many tensors would be slow.
        if depth > DEPTH_MAX or not is_bare_tensor(part) or not 0 <= part.tensor < tensor_count:
            check_tree(part, tensor_count, depth + 1)


def _check_dict(node: DictNode) -> None:
    if node.kind not in DICT_KINDS:
        raise MalformedError("a dict of the state tree has an unknown kind", where=repr(node.kind[:40]))
    if len(node.keys) != len(node.children) or len(set(node.keys)) != len(node.keys):
        raise MalformedError("a dict of the state tree repeats a key, or has different numbers of keys and values")
    if (node.kind == "defaultdict") != (node.factory is not None) or node.factory not in (None, *FACTORIES):
        raise MalformedError("a dict of the state tree has an impossible factory", where=repr(node.factory))
    if node.metadata is not None and node.kind != "OrderedDict":
        raise MalformedError("only an OrderedDict has metadata", where=node.kind)
    if any(tensors_of(key.node) for key in node.keys if isinstance(key, OtherKey)):
        raise MalformedError("a key of a dict contains a tensor")


def _check_attributes(node: Node) -> None:
    is_plain = isinstance(node, DictNode) and node.kind == "dict" and all(type(key) is str for key in node.keys)
    if not is_plain or tensors_of(node):
        raise MalformedError("the attributes of a tensor or dict are not plain values with names")


def new_dict(node: DictNode) -> dict[Any, Any]:
    """Return an empty dict of the node's kind."""
    if node.kind == "defaultdict":
        return defaultdict(FACTORIES[node.factory or "none"])
    kinds: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
    return kinds[node.kind]()


NODE_DEPTH_MAX = DEPTH_MAX + 1
"""Largest nesting depth of nodes: containers, with a plain value or tensor in the innermost."""

_STALE_COUNT_MAX = 1000
"""Entries of changed nodes that the cache may collect before it is cleared."""

_VALUE_TYPES = frozenset((type(None), bool, int, str, bytes))
_DICT, _LIST, _TUPLE, _VALUE, _CONVERTED = range(5)
_KEYED, _ATTRIBUTED = f"{BUILT_IN}keys", f"{BUILT_IN}attributes"

Plain = Callable[[Node | None, int], object]


def encode_tree(root: Node) -> bytes:
    """Return the encoded tree.

    Raises:
        MalformedError: The tree is nested too deeply for readers.
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
    """Encodes successive trees like ``encode_tree``, and reuses the encoding of nodes from earlier trees."""

    def __init__(self) -> None:
        # The nodes are stored with their encodings: an id is only unique while its object is alive.
        self._encodings: dict[tuple[int, int], tuple[Node, object]] = {}
        self._count_max = 0

    def encode(self, root: Node) -> bytes:
        """Return the encoded tree.

        Raises:
            MalformedError: The tree is nested too deeply for readers.
        """
        if len(self._encodings) > self._count_max:
            self._encodings.clear()
        content = encode_inner(self._plain(root, 0))
        self._count_max = self._count_max or 2 * len(self._encodings) + _STALE_COUNT_MAX
        return content

    def _plain(self, node: Node | None, depth: int) -> object:
        if not isinstance(node, (DictNode, ListNode, TupleNode)):
            return _plain(node, depth)
        key = id(node), depth
        found = self._encodings.get(key)
        if found is None:
            found = self._encodings[key] = node, encoded(_container(node, depth, self._plain))
        return found[1]


def _key_of_node(node: Node) -> Key:
    # The inverse of ``_node_of_key``. An invalid value is refused when the key is restored.
    is_bare = isinstance(node, ValueNode) and type(node.value) is {"int": int, "str": str}.get(node.type)
    return node.value if is_bare else OtherKey(node)  # type: ignore[union-attr, return-value]


def decode_tree(content: bytes | memoryview, *, tensor_count: int, where: object = None) -> Node:
    """Decode a tree with tensor indices below ``tensor_count``.

    Raises:
        MalformedError: ckstore does not write such bytes, or a mapping repeats a key.
    """
    return _Decoder(tensor_count, where).node(decode_stored(content, object, where=where), 0)


class _Decoder:
    def __init__(self, tensor_count: int, where: object) -> None:
        self._tensor_count = tensor_count
        self._where = where
        # One byte can refer to a tensor. Sharing one node for all references keeps memory proportional to the content.
        self._tensors: dict[int, TensorNode] = {}

    def node(self, plain: Any, depth: int) -> Node:
        if depth > NODE_DEPTH_MAX:
            raise self._malformed(f"is more than {NODE_DEPTH_MAX} nodes deep")
        if type(plain) is int:
            if not 0 <= plain < self._tensor_count:
                raise self._malformed("refers to a tensor that does not exist")
            return self._tensors.setdefault(plain, TensorNode(plain))
        if type(plain) is not list or not plain:
            raise self._malformed("has another object in place of a node")
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
            raise self._malformed("has another object in place of children")
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
            raise self._malformed("has a mapping with different numbers of keys and values")
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
