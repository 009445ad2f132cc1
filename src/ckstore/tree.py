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
``torch...``          str: a dtype, device, Size and the like of torch, see adapters/torch_state.py
====================  =====================================================================

Everything else is a ``ConvertedNode``: what it was made of, and the name of what makes it again. Names that begin with
``ckstore:`` are those of named_types.py, standard_types.py and packed.py.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from ckstore.errors import MalformedError, UsageError, shown_object

BUILT_IN = "ckstore:"
"""What the names of ckstore's own conversions begin with; a registered converter cannot have such a name."""

Value = bool | int | str | bytes | None

DEPTH_MAX = 100
"""Most containers within one another."""

PACKED_NUMBERS = (f"{BUILT_IN}count", f"{BUILT_IN}numbers")
PACKED_PLAIN = f"{BUILT_IN}plain"
"""What the names of long plain values begin with, which have no node for each of their parts; see packed.py."""

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
"""The default factories of a defaultdict that can be stored, by their names on disk."""


@dataclass(frozen=True, slots=True)
class DictNode:
    """A mapping, in order.

    Args:
        kind: One of DICT_KINDS.
        keys: Its keys, in order.
        children: One node for each key.
        metadata: The ``_metadata`` of an OrderedDict that torch made, else None.
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
    """A tensor, by its index; the same index twice is one object at two places.

    Args:
        tensor: The index.
        attributes: A DictNode of the Python attributes of the tensor, else None.
    """

    tensor: int
    attributes: Node | None = None


@dataclass(frozen=True, slots=True)
class ConvertedNode:
    """A value that was turned into the child, and the name of what turns it back."""

    name: str
    child: Node


Node = DictNode | ListNode | TupleNode | ValueNode | TensorNode | ConvertedNode


@dataclass(frozen=True, slots=True)
class OtherKey:
    """A key of a mapping that is neither a str nor an int of 64 bits, as its node; no tensor lies below it."""

    node: Node

    def __str__(self) -> str:
        return shown(self.node)


Key = str | int | OtherKey
Path = tuple[Key, ...]
"""A leaf's identity: the typed keys that lead to it."""


def shown(node: Node) -> str:
    """Return a node without tensors as people write it, for paths: ``0.5``, ``(1, 'a')``, ``Colour.RED``."""
    if isinstance(node, ValueNode):
        return _shown_value(node)
    if isinstance(node, ConvertedNode):
        label = node.name.removeprefix(BUILT_IN).rpartition(":")[2]
        if node.name.startswith(f"{BUILT_IN}enum:") and isinstance(node.child, DictNode) and node.child.children:
            # The first field of a member is its name.
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
        # Escaped: what cannot be encoded cannot be printed.
        try:
            return ascii(value.decode("utf-8", "surrogatepass"))[1:-1]
        except UnicodeDecodeError:
            return repr(value)
    if kind == "bigint" and isinstance(value, bytes):
        return f"an int of {8 * len(value)} bits"
    return f"torch.{value}" if kind == "torch.dtype" and isinstance(value, str) else repr(value)


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


def parts_of(node: Node) -> Iterator[Node]:
    """Yield every node directly below one: children, metadata, attributes and keys."""
    if isinstance(node, ConvertedNode):
        yield node.child
    elif isinstance(node, DictNode | ListNode | TupleNode):
        yield from node.children
    if isinstance(node, DictNode):
        yield from (key.node for key in node.keys if isinstance(key, OtherKey))
        if node.metadata is not None:
            yield node.metadata
    if isinstance(node, DictNode | TensorNode) and node.attributes is not None:
        yield node.attributes


def libraries_of(node: Node) -> set[str]:
    """Return the libraries whose plain values lie below a node: the first part of ``torch.dtype``."""
    found: set[str] = set()
    pending = [node]
    while pending:
        top = pending.pop()
        library = None
        if isinstance(top, ValueNode):
            library = library_of(top.type)
        elif isinstance(top, ConvertedNode):
            library = library_of_conversion(top.name)
        if library is not None:
            found.add(library)
        pending.extend(parts_of(top))
    return found


def library_of_conversion(name: str) -> str | None:
    """Return the library that makes a converted value again: ``torch`` of ``ckstore:torch.Generator``, else None."""
    library, dot, _ = name.removeprefix(BUILT_IN).partition(":")[0].partition(".")
    return library if dot and name.startswith(BUILT_IN) else None


def library_of(value_type: str) -> str | None:
    """Return the library of a plain value's type: ``torch`` of ``torch.dtype``; None: Python itself."""
    library, dot, _ = value_type.partition(".")
    return library if dot else None


class Selection:
    """Leaves chosen by globs over dotted paths, in which ``*`` crosses dots.

    A pattern that matches a container chooses all that is in it. A pattern that is the path of something, letter for
    letter, means just that, whatever it matches as a glob: keys may hold brackets.

    Args:
        patterns: The globs.
        trees: What is chosen from.
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
        """Say whether a pattern matches this very path."""
        dotted = format_path(path)
        return any(dotted == each or (each in self._globs and fnmatchcase(dotted, each)) for each in self.patterns)

    def covers(self, path: Path) -> bool:
        """Say whether a pattern matches this path or a container that it lies in."""
        return any(self.matches(path[:length]) for length in range(len(path) + 1))

    def _may_match_below(self, node: ConvertedNode, path: Path) -> bool:
        """Say whether a pattern may match a part of a long plain value, whose parts are not known here."""
        dotted = f"{format_path(path)}."
        for each in self.patterns:
            for length in range(1, len(each) + 1):
                begin = each[:length]
                is_begin = fnmatchcase(dotted, begin) if each in self._globs else dotted == begin
                # Parts of a list of numbers have numbers for names.
                if is_begin and (node.name == PACKED_PLAIN or not set(each[length:]) - set("0123456789*?[]-!")):
                    return True
        return False

    def prune(self, node: Node, path: Path = ()) -> Node | None:
        """Return the tree with what was chosen; dicts keep only that, everything else comes whole."""
        if self.matches(path):
            return node
        if isinstance(node, DictNode):
            kept = [(key, self.prune(child, (*path, key))) for key, child in items_of(node)]
            chosen = [(key, child) for key, child in kept if child is not None]
            keys, children = tuple(key for key, _ in chosen), tuple(child for _, child in chosen)
            return replace(node, keys=keys, children=children) if chosen else None
        if isinstance(node, ConvertedNode):
            if node.name.startswith((*PACKED_NUMBERS, PACKED_PLAIN)):
                return node if self._may_match_below(node, path) else None
            return node if self.prune(node.child, path) is not None else None
        if isinstance(node, ListNode | TupleNode):
            chosen_any = any(self.prune(child, (*path, key)) is not None for key, child in items_of(node))
            return node if chosen_any else None
        return None


def _paths_of(node: Node, path: Path) -> Iterator[Path]:
    """Yield the path of every container and leaf."""
    yield path
    if isinstance(node, ConvertedNode):
        yield from _paths_of(node.child, path)
    elif isinstance(node, DictNode | ListNode | TupleNode):
        for key, child in items_of(node):
            yield from _paths_of(child, (*path, key))


def check_tree(node: Node, tensor_count: int, depth: int = 0) -> None:
    """Refuse a tree that ``capture`` does not make.

    Raises:
        MalformedError: Too deep, keys twice or not as many as children, a tensor that is not there.
    """
    # One level more than containers may have: a converted leaf is a node with a child.
    if depth > DEPTH_MAX + 1:
        raise MalformedError("the state tree is too deep", where=f"over {DEPTH_MAX} levels")
    if isinstance(node, TensorNode) and not 0 <= node.tensor < tensor_count:
        raise MalformedError("the state tree names a tensor that is not there", where=f"tensor {node.tensor}")
    if isinstance(node, DictNode):
        _check_dict(node)
    if isinstance(node, DictNode | TensorNode) and node.attributes is not None:
        _check_attributes(node.attributes)
    for part in parts_of(node):
        check_tree(part, tensor_count, depth + 1)


def _check_dict(node: DictNode) -> None:
    if node.kind not in DICT_KINDS:
        raise MalformedError("a dict of the state tree has an unknown kind", where=repr(node.kind[:40]))
    if len(node.keys) != len(node.children) or len(set(node.keys)) != len(node.keys):
        raise MalformedError("a dict of the state tree has keys twice, or not as many as values")
    if (node.kind == "defaultdict") != (node.factory is not None) or node.factory not in (None, *FACTORIES):
        raise MalformedError("a dict of the state tree has an impossible factory", where=repr(node.factory))
    if node.metadata is not None and node.kind != "OrderedDict":
        raise MalformedError("only an OrderedDict has metadata", where=node.kind)
    if any(tensors_of(key.node) for key in node.keys if isinstance(key, OtherKey)):
        raise MalformedError("a tensor is the key of a dict")


def _check_attributes(node: Node) -> None:
    is_plain = isinstance(node, DictNode) and node.kind == "dict" and all(type(key) is str for key in node.keys)
    if not is_plain or tensors_of(node):
        raise MalformedError("the attributes of a tensor or dict are no plain values with names")


def new_dict(node: DictNode) -> dict[Any, Any]:
    """Return an empty dict of the node's kind."""
    if node.kind == "defaultdict":
        return defaultdict(FACTORIES[node.factory or "none"])
    kinds: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
    return kinds[node.kind]()
