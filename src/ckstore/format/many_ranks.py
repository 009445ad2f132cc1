"""What the tree of a checkpoint by many ranks says: the root with the ranks' facts, tiles, and values of each rank.

Three built-in conversions have these names. docs/FORMAT.md, section 13, describes them. ``plain_manifest`` returns the
manifest of the state alone, in which tiles are tensors of their global shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckstore.errors import MalformedError
from ckstore.format.manifest import Manifest
from ckstore.format.tensors import TensorSpec, count_of, row_major_strides
from ckstore.format.tiles import Cuts, check_cuts
from ckstore.format.tree import (
    PER_RANK,
    RANKS,
    TILES,
    ConvertedNode,
    DictNode,
    Key,
    ListNode,
    Node,
    OtherKey,
    Path,
    TensorNode,
    TupleNode,
    ValueNode,
    is_bare_tensor,
    items_of,
)

_ATTEMPT_NBYTES = 16


class MeshFacts(NamedTuple):
    """Names and lengths of the dimensions of a device mesh."""

    names: tuple[str, ...]
    shape: tuple[int, ...]


class LayoutFacts(NamedTuple):
    """How some tensors lie on a mesh: its index, the placements as text, and the indices of the tensors."""

    mesh: int
    placements: str
    tensors: tuple[int, ...]


class RankFacts(NamedTuple):
    """What one rank contributed: its host, bytes of the state, and bytes of packs that it wrote."""

    host: str
    nbytes: int
    written: int


@dataclass(frozen=True, slots=True)
class World:
    """Who saved a checkpoint by many ranks.

    Args:
        size: Number of ranks.
        attempt: Id of the commit, 16 bytes.
        meshes: Device meshes of the state's tensors.
        layouts: How tensors lie on them.
        ranks: What each rank contributed.
        partial: Parts of the state that only some ranks have: the path of each, and these ranks.
    """

    size: int
    attempt: bytes
    meshes: tuple[MeshFacts, ...] = ()
    layouts: tuple[LayoutFacts, ...] = ()
    ranks: tuple[RankFacts, ...] = ()
    partial: tuple[tuple[Path, tuple[int, ...]], ...] = ()


def is_many(tree: Node) -> bool:
    """Say whether a tree is that of a checkpoint by many ranks."""
    return isinstance(tree, ConvertedNode) and tree.name == RANKS


def state_of(tree: Node) -> Node:
    """Return the tree of the state alone.

    Raises:
        MalformedError: The root is malformed.
    """
    return _fields_of(tree)["state"] if is_many(tree) else tree


def world_of(tree: Node) -> World | None:
    """Return who saved a checkpoint; None: one rank, alone.

    Raises:
        MalformedError: The root is malformed.
    """
    if not is_many(tree):
        return None
    fields = _fields_of(tree)
    try:
        return World(
            size=_int(fields["world"]),
            attempt=_value(fields["attempt"], bytes),
            meshes=tuple(
                MeshFacts(
                    tuple(_value(name, str) for name in _items(row["names"])), tuple(map(_int, _items(row["shape"])))
                )
                for row in map(_row, _items(fields["meshes"]))
            ),
            layouts=tuple(
                LayoutFacts(_int(row["mesh"]), _value(row["placements"], str), tuple(map(_int, _items(row["tensors"]))))
                for row in map(_row, _items(fields["layouts"]))
            ),
            ranks=tuple(
                RankFacts(_value(row["host"], str), _int(row["nbytes"]), _int(row["written"]))
                for row in map(_row, _items(fields["ranks"]))
            ),
            partial=tuple(
                (tuple(_key(key) for key in _items(row["path"])), tuple(map(_int, _items(row["ranks"]))))
                for row in map(_row, _items(fields["partial"]))
            )
            if "partial" in fields
            else (),
        )
    except (KeyError, TypeError):
        raise _malformed("the root") from None


def root_node(state: Node, world: World) -> ConvertedNode:
    """Return the root of a checkpoint by many ranks."""
    fields: dict[str, Any] = {
        "state": state,
        "world": world.size,
        "attempt": world.attempt,
        "meshes": [{"names": list(mesh.names), "shape": list(mesh.shape)} for mesh in world.meshes],
        "layouts": [
            {"mesh": each.mesh, "placements": each.placements, "tensors": list(each.tensors)} for each in world.layouts
        ],
        "ranks": ListNode(tuple([_rank_node(each) for each in world.ranks])),
    }
    if world.partial:
        fields["partial"] = [
            {"path": [key.node if isinstance(key, OtherKey) else key for key in path], "ranks": list(ranks)}
            for path, ranks in world.partial
        ]
    return ConvertedNode(RANKS, _node(fields))


def _rank_node(rank: RankFacts) -> DictNode:
    # There may be thousands of ranks.
    host, nbytes, written = rank
    return DictNode(
        "dict", RankFacts._fields, (ValueNode("str", host), ValueNode("int", nbytes), ValueNode("int", written))
    )


def tiles_node(tensor: Node, shape: tuple[int, ...], cuts: Cuts) -> ConvertedNode:
    """Return the node of a tensor that is stored in tiles.

    Args:
        tensor: The node of the flat tensor.
        shape: The global shape.
        cuts: Where tiles begin, by dimension.
    """
    return ConvertedNode(TILES, TupleNode((tensor, _node(shape), _node(cuts))))


def per_rank_node(values: Mapping[int, Node]) -> ConvertedNode:
    """Return the node of a value that differs between ranks."""
    ranks = tuple(sorted(values))
    return ConvertedNode(PER_RANK, DictNode("dict", ranks, tuple(values[rank] for rank in ranks)))


def values_of(node: ConvertedNode) -> dict[int, Node]:
    """Return the nodes of a value that differs between ranks, by rank.

    Raises:
        MalformedError: The node is malformed.
    """
    items = list(items_of(node.child)) if isinstance(node.child, DictNode) else []
    values = {key: each for key, each in items if isinstance(key, int) and key >= 0}
    if not values or len(values) != len(items):
        raise _malformed("a value of each rank")
    return values


def plain_manifest(manifest: Manifest) -> Manifest:
    """Return the manifest of the state alone: without the root, and with tiles as tensors that have ``cuts``.

    Raises:
        MalformedError: The root or a tensor in tiles is malformed.
    """
    tree, tensors = plain_state(manifest.tree, manifest.tensors)
    return manifest if tree is manifest.tree else replace(manifest, tree=tree, tensors=tensors)


def plain_state(tree: Node, tensors: Sequence[TensorSpec]) -> tuple[Node, tuple[TensorSpec, ...]]:
    """Return the tree of the state alone, and its tensors.

    Raises:
        MalformedError: The root or a tensor in tiles is malformed.
    """
    made = list(tensors)
    return _without_tiles(state_of(tree), made), tuple(made)


def _without_tiles(node: Node, tensors: list[TensorSpec]) -> Node:
    """Return a node with tensors in place of tiles, and give them their shapes; the node itself if it has none."""
    if isinstance(node, ConvertedNode):
        if node.name == TILES:
            return _tensor_in_tiles(node, tensors)
        child = _without_tiles(node.child, tensors)
        return node if child is node.child else replace(node, child=child)
    if not isinstance(node, DictNode | ListNode | TupleNode):
        return node
    children = tuple(each if is_bare_tensor(each) else _without_tiles(each, tensors) for each in node.children)
    if all(one is other for one, other in zip(children, node.children, strict=True)):
        return node
    return replace(node, children=children)


def _tensor_in_tiles(node: ConvertedNode, tensors: list[TensorSpec]) -> TensorNode:
    parts = node.child.children if isinstance(node.child, TupleNode) else ()
    if len(parts) != 3 or not isinstance(parts[0], TensorNode) or not 0 <= parts[0].tensor < len(tensors):
        raise _malformed("a tensor in tiles")
    number = parts[0].tensor
    spec = tensors[number]
    try:
        shape = tuple(map(_int, _items(parts[1])))
        cuts = tuple(tuple(map(_int, _items(each))) for each in _items(parts[2]))
    except TypeError:
        raise _malformed("a tensor in tiles") from None
    check_cuts(shape, cuts)
    flat = TensorSpec(
        "torch", spec.dtype, (count_of(shape),), (1,), spec.storage, spec.offset, spec.is_parameter, spec.requires_grad
    )
    if spec.cuts == cuts and spec.shape == shape:
        # The same tensor at another path.
        return parts[0]
    if spec != flat or not cuts:
        raise _malformed("a tensor in tiles")
    tensors[number] = replace(spec, shape=shape, strides=row_major_strides(shape), cuts=cuts)
    return parts[0]


def per_rank_nodes(node: Node, path: Path = ()) -> Iterator[tuple[Path, ConvertedNode]]:
    """Yield the values that differ between ranks, with their paths."""
    if isinstance(node, ConvertedNode):
        if node.name == PER_RANK:
            yield path, node
        else:
            yield from per_rank_nodes(node.child, path)
    elif isinstance(node, DictNode | ListNode | TupleNode):
        for key, child in items_of(node):
            if not is_bare_tensor(child):
                yield from per_rank_nodes(child, (*path, key))


def _fields_of(tree: Node) -> dict[str, Any]:
    child = tree.child if isinstance(tree, ConvertedNode) else None
    if not isinstance(child, DictNode) or "state" not in child.keys:
        raise _malformed("the root")
    return {str(key): each for key, each in items_of(child)}


def _malformed(what: str) -> MalformedError:
    return MalformedError(f"{what} of a checkpoint by many ranks is malformed")


def _row(node: Node) -> dict[str, Node]:
    if not isinstance(node, DictNode):
        raise TypeError
    return {str(key): each for key, each in items_of(node)}


def _items(node: Any) -> tuple[Node, ...]:
    if not isinstance(node, ListNode | TupleNode):
        raise TypeError
    return node.children


def _value(node: Any, kind: type) -> Any:
    if not isinstance(node, ValueNode) or type(node.value) is not kind:
        raise TypeError
    return node.value


def _int(node: Any) -> int:
    found = _value(node, int)
    if found < 0:
        raise TypeError
    return int(found)


def _key(node: Node) -> Key:
    is_bare = isinstance(node, ValueNode) and type(node.value) is {"int": int, "str": str}.get(node.type)
    return node.value if is_bare else OtherKey(node)  # type: ignore[union-attr, return-value]


def _node(value: Any) -> Node:
    """Return the node of a value that is made of dicts, lists, tuples, ints, text and bytes."""
    if isinstance(value, dict):
        return DictNode("dict", tuple(value), tuple(_node(each) for each in value.values()))
    if isinstance(value, list):
        return ListNode(tuple(map(_node, value)))
    if isinstance(value, tuple):
        return TupleNode(tuple(map(_node, value)))
    return ValueNode(type(value).__name__, value) if isinstance(value, int | str | bytes) else value
