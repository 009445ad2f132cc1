"""Capture the state of one rank of a job: its tree, its shards of global tensors, and everything else.

Invariants:
- What follows from the structure of a state alone is computed for its first commit, and reused by later ones.
- Nothing is communicated. Which other ranks hold a shard follows from its mesh and placements if the mesh has all ranks
  of the job. Otherwise another mesh may hold the same shard, as with weights that tensor parallelism leaves whole.
  Which ranks hold a plain tensor is not known here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING, Any

from ckstore.errors import UsageError
from ckstore.format.many_ranks import tiles_node
from ckstore.format.tensors import TensorSpec, count_of, row_major_strides
from ckstore.format.tree import (
    ConvertedNode,
    DictNode,
    ListNode,
    Node,
    Path,
    TensorNode,
    TupleNode,
    ValueNode,
    is_bare_tensor,
    items_of,
    place_of,
)
from ckstore.ranks.arrays import ArraySpec, Held, Layout, RankState, Unit
from ckstore.state.capture import Captured
from ckstore.state.capture_cache import CaptureCache
from ckstore.state.markers import DECLARED, PerRank, Replicated
from ckstore.state.tensors import LeafAdapter, LeafBatch, TensorLeaf

if TYPE_CHECKING:
    from ckstore.format.tree import Value
    from ckstore.state.shard_adapters import CapturedShard, ShardCaptureAdapter

_PER_RANK = f"{DECLARED}per_rank"
_REPLICATED = f"{DECLARED}replicated:"

_STALE_COUNT_MAX = 1000
"""Nodes of earlier captures that are remembered beyond those of the first."""


class MarkerAdapter:
    """Takes ``PerRank`` and ``Replicated`` apart. Everything else is left to the other adapters."""

    library = "marks"

    def describe(self, leaf: object, path: Path) -> TensorLeaf | None:
        """Return None: marks are no tensors."""
        return None

    def describe_many(self, leaves: Sequence[object]) -> LeafBatch | None:
        """Return None: marks are no tensors."""
        return None

    def encode_value(self, leaf: object, path: Path) -> tuple[str, Value] | None:
        """Return None: marks are no plain values."""
        return None

    def convert(self, leaf: object) -> tuple[str, object] | None:
        """Return the name of the mark and the marked part."""
        if isinstance(leaf, PerRank):
            return _PER_RANK, leaf.value
        return (f"{_REPLICATED}{leaf.check!r}", leaf.value) if isinstance(leaf, Replicated) else None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: marks are only captured")


class RankCapture:
    """Captures the states of one rank; remembers the structure of the last one.

    Args:
        world: Number of ranks of the job; None: each mesh has all of them.
    """

    def __init__(self, world: int | None = None) -> None:
        self._world = world
        self._cache = CaptureCache()
        self._marks = MarkerAdapter()
        self._shards: ShardCaptureAdapter | None = None

    def capture(self, state: object, *, is_waited: bool = True) -> RankState:
        """Capture a state.

        Args:
            state: The state.
            is_waited: Wait for device work that still computes it. Staging waits for that by itself.

        Raises:
            LeafTypeError: A leaf cannot be stored.
            UsageError: A mark is inside another mark.
        """
        adapters: list[LeafAdapter] = []
        if "torch" in sys.modules:
            adapters.append(self._shard_adapter())
        capture = self._cache.capture_for_commit if is_waited else self._cache.capture
        captured = capture(state, [*adapters, self._marks])
        shards = self._shards.found if self._shards is not None else {}
        facts = captured.structure.once("rank", lambda: _RankFacts.of(captured, shards, self._world))
        if facts.trees is not None:
            captured = replace(captured, tree=facts.trees.of(captured.tree))
        return RankState(
            captured, facts.tensors, facts.units, facts.held, facts.layouts, facts.per_rank, facts.replicated
        )

    def _shard_adapter(self) -> LeafAdapter:
        from ckstore.state.shard_adapters import ShardCaptureAdapter

        if self._shards is None:
            self._shards = ShardCaptureAdapter()
        self._shards.begin()
        return self._shards


@dataclass(frozen=True, slots=True)
class _RankFacts:
    """What follows from the structure of a captured state; the fields are those of ``RankState``.

    Args:
        trees: Makes the tree of the checkpoint from that of a capture; None: they are equal.
    """

    tensors: tuple[TensorSpec, ...]
    units: tuple[Unit, ...]
    held: tuple[Held, ...]
    layouts: tuple[Layout, ...]
    per_rank: tuple[Path, ...]
    replicated: tuple[tuple[Path, float], ...]
    trees: _StoredTrees | None

    @classmethod
    def of(cls, captured: Captured, shards: Mapping[Path, CapturedShard], world: int | None) -> _RankFacts:
        """Return the facts of a capture, with the shards that its adapter described, by path."""
        units = _Units(captured, world)
        tiles: dict[int, ArraySpec] = {}
        for number, path in enumerate(captured.paths):
            shard = shards.get(path) if captured.tensors[number].library == "torch" else None
            if shard is None:
                units.add_plain(number)
            elif (array := units.add_shard(number, shard)).cuts:
                tiles[number] = array
        marks = list(_marks_in(captured.tree, ()))
        per_rank = tuple(path for path, name in marks if name == _PER_RANK)
        replicated = tuple(
            (path, float(name.removeprefix(_REPLICATED))) for path, name in marks if name.startswith(_REPLICATED)
        )
        _refuse_shards_in(per_rank, shards)
        trees = _StoredTrees(tiles) if marks or tiles else None
        held = tuple(sorted(units.held))
        return cls(tuple(units.tensors), tuple(units.units), held, tuple(units.layouts), per_rank, replicated, trees)


class _Units:
    """Assigns the tensors of a capture to units, in the order of the tree."""

    def __init__(self, captured: Captured, world: int | None) -> None:
        self._captured = captured
        self._world = None if world is None else tuple(range(world))
        self.tensors: list[TensorSpec] = []
        self.units: list[Unit] = []
        self.held: list[Held] = []
        self.layouts: dict[Layout, int] = {}
        self._of_storage: dict[int, int] = {}
        self._of_view: dict[tuple[object, ...], int] = {}

    def add_plain(self, number: int) -> None:
        """Add a tensor that is no shard: its unit is its local storage."""
        spec = self._captured.tensors[number]
        unit = self._of_storage.get(spec.storage)
        if unit is None:
            unit = self._of_storage[spec.storage] = len(self.units)
            span = self._captured.storages[spec.storage]
            self.units.append(Unit(self._captured.paths[number], span.nbytes, span.element_width, span.is_float))
            if span.nbytes:
                self.held.append(Held(unit, 0, span.nbytes, spec.storage, 0))
        self.tensors.append(replace(spec, storage=unit))

    def add_shard(self, number: int, shard: CapturedShard) -> ArraySpec:
        """Add a shard: its unit is the global tensor. Tied shards share it."""
        spec, geometry = self._captured.tensors[number], shard.geometry
        layout = Layout(*geometry.layout)
        is_known = self._world is None or tuple(sorted(layout.mesh_ranks)) == self._world
        array = ArraySpec(geometry.shape, geometry.cuts, self.layouts.setdefault(layout, len(self.layouts)))
        unit = self._of_view.get(shard.view)
        if unit is None:
            unit = self._of_view[shard.view] = len(self.units)
            span = self._captured.storages[spec.storage]
            nbytes = count_of(geometry.shape) * shard.itemsize
            path = self._captured.paths[number]
            self.units.append(Unit(path, nbytes, shard.element_width, shard.is_float, array))
            begin = spec.offset
            for each in shard.plan.ranges:
                holders = each.holders if is_known else ()
                self.held.append(Held(unit, each.offset, each.nbytes, spec.storage, begin, holders))
                begin += each.nbytes
            assert begin <= span.nbytes
        shape = (count_of(geometry.shape),) if geometry.cuts else geometry.shape
        self.tensors.append(replace(spec, shape=shape, strides=row_major_strides(shape), storage=unit, offset=0))
        return array


def _marks_in(node: Node, path: Path, *, is_inside: bool = False) -> Iterator[tuple[Path, str]]:
    """Yield the paths and names of marks.

    Raises:
        UsageError: A mark is inside another mark.
    """
    if isinstance(node, ConvertedNode):
        is_mark = node.name.startswith(DECLARED)
        if is_mark:
            if is_inside:
                todo = "mark either the whole part or its parts"
                raise UsageError("a marked part contains another mark", where=place_of(path), todo=todo, path=path)
            yield path, node.name
        yield from _marks_in(node.child, path, is_inside=is_inside or is_mark)
    elif isinstance(node, DictNode | ListNode | TupleNode):
        for key, child in items_of(node):
            if not is_bare_tensor(child):
                yield from _marks_in(child, (*path, key), is_inside=is_inside)


def _refuse_shards_in(per_rank: Sequence[Path], shards: Iterable[Path]) -> None:
    """Refuse ``PerRank`` marks of parts with shards: the ranks store one tensor together, and not one each.

    Raises:
        UsageError: There is one.
    """
    marked = set(per_rank)
    for path in shards if marked else ():
        mark = next((path[:length] for length in range(len(path) + 1) if path[:length] in marked), None)
        if mark is not None:
            raise UsageError(
                "ckstore.PerRank marks a part with a distributed tensor, of which each rank has only a shard",
                where=place_of(path),
                todo="commit the tensor outside of PerRank; all ranks store it as one tensor, and each gets its shard "
                "back. To store this rank's shard by itself, mark tensor.to_local()",
                path=path,
            )


class _StoredTrees:
    """Makes the trees of checkpoints from those of captures: without marks, with tiles as converted tensors.

    Parts that are unchanged since an earlier capture are the same objects, and are made once.

    Args:
        tiles: The tensors that are stored in tiles.
    """

    def __init__(self, tiles: Mapping[int, ArraySpec]) -> None:
        self._tiles = {number: (array.shape, array.cuts) for number, array in tiles.items()}
        # The nodes are stored with their results: an id is only unique while its object is alive.
        self._made: dict[int, tuple[Node, Node]] = {}
        self._count_max = 0

    def of(self, root: Node) -> Node:
        """Return the tree of the checkpoint."""
        if len(self._made) > self._count_max:
            self._made.clear()
        made = self._stored(root)
        self._count_max = self._count_max or 2 * len(self._made) + _STALE_COUNT_MAX
        return made

    def _stored(self, node: Node) -> Node:
        if isinstance(node, TensorNode):
            cut = self._tiles.get(node.tensor)
            return node if cut is None else tiles_node(node, *cut)
        if isinstance(node, ValueNode):
            return node
        known = self._made.get(id(node))
        if known is None:
            known = self._made[id(node)] = node, self._stored_container(node)
        return known[1]

    def _stored_container(self, node: DictNode | ListNode | TupleNode | ConvertedNode) -> Node:
        if isinstance(node, ConvertedNode):
            child = self._stored(node.child)
            if node.name.startswith(DECLARED):
                return child
            return node if child is node.child else replace(node, child=child)
        children = tuple([self._stored(child) for child in node.children])
        if all(map(is_, children, node.children)):
            return node
        return replace(node, children=children)
