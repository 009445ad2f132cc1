"""The units and the tree of a checkpoint by many ranks, from the skeletons of the ranks.

Units of several ranks are one unit of the checkpoint if they have the same path and the same kind. Trees are merged
node by node: what is equal is stored once, and what differs becomes a ``ckstore:per_rank`` node.

Invariants:
- Pure: no bytes of tensors are read.
- If all ranks have one skeleton, its tree and its tensors are used as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckstore.errors import UsageError
from ckstore.format.many_ranks import LayoutFacts, MeshFacts, RankFacts, World, per_rank_node
from ckstore.format.tensors import Table, TensorSpec
from ckstore.format.tree import (
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
    items_of,
    place_of,
    tensors_of,
)
from ckstore.ranks.arrays import Layout, Unit
from ckstore.ranks.part import Skeleton

Numbers = NDArray[np.int64]
Variants = Mapping[int, Numbers]
"""For each unit of which there are several copies: the copy that each rank has; -1: none."""


@dataclass(frozen=True)
class Union:
    """The units of all ranks.

    Args:
        skeletons: The distinct skeletons, in the order of their first ranks.
        skeleton_of: The index of each rank's skeleton, by rank.
        units: The units of the checkpoint.
        numbers: For each skeleton, the numbers of its units in ``units``.
        per_rank: The units that were declared ``PerRank``: each rank that has them has its own copy.
    """

    skeletons: tuple[Skeleton, ...]
    skeleton_of: Numbers
    units: tuple[Unit, ...]
    numbers: tuple[Numbers, ...]
    per_rank: frozenset[int]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.skeleton_of)

    @cached_property
    def lengths(self) -> list[NDArray[np.uint64]]:
        """The lengths of the units of each skeleton."""
        known: dict[bytes, NDArray[np.uint64]] = {}
        for skeleton in self.skeletons:
            if skeleton.tables_digest not in known:
                known[skeleton.tables_digest] = np.array([unit.nbytes for unit in skeleton.units], np.uint64)
        return [known[skeleton.tables_digest] for skeleton in self.skeletons]

    @cached_property
    def ranks_of(self) -> list[list[int]]:
        """The ranks of each skeleton."""
        order = np.argsort(self.skeleton_of, kind="stable")
        ends = np.cumsum(np.bincount(self.skeleton_of, minlength=len(self.skeletons)))
        return [each.tolist() for each in np.split(order, ends[:-1])]

    def holders(self, unit: int) -> list[int]:
        """Return the ranks that have a unit of the checkpoint, ascending."""
        return sorted(rank for ranks, numbers in self._tables for rank in (ranks if (numbers == unit).any() else ()))

    @cached_property
    def _tables(self) -> list[tuple[list[int], Numbers]]:
        """The ranks of skeletons with equal tables, and the numbers of their units."""
        found: dict[bytes, tuple[list[int], Numbers]] = {}
        for skeleton, ranks, numbers in zip(self.skeletons, self.ranks_of, self.numbers, strict=True):
            found.setdefault(skeleton.tables_digest, ([], numbers))[0].extend(ranks)
        return [*found.values()]

    def mesh_places(self, unit: int) -> dict[int, int]:
        """Return where each rank that has a shard is in its device mesh, in row-major order.

        Of the ranks that hold the same bytes, the first one has the coordinate 0 in all dimensions that replicate.
        """
        found: dict[int, int] = {}
        tables = {skeleton.tables_digest: skeleton for skeleton in self.skeletons}
        for (ranks, numbers), skeleton in zip(self._tables, tables.values(), strict=True):
            for index in np.flatnonzero(numbers == unit)[:1].tolist():
                array = skeleton.units[index].array
                assert array is not None
                places = {rank: place for place, rank in enumerate(skeleton.layouts[array.layout].mesh_ranks)}
                found |= {rank: places.get(rank, len(places)) for rank in ranks}
        return found

    def local(self, rank: int, unit: int) -> int:
        """Return the number that a unit of the checkpoint has in the skeleton of a rank that holds it."""
        return int(np.flatnonzero(self.numbers[self.skeleton_of[rank]] == unit)[0])

    @cached_property
    def declared_variants(self) -> dict[int, Numbers]:
        """The copies of the units that were declared ``PerRank``: one for each rank that has the unit."""
        found = {}
        for unit in self.per_rank:
            variants = np.full(self.world, -1, np.int64)
            holders = self.holders(unit)
            variants[holders] = np.arange(len(holders))
            found[unit] = variants
        return found


def tie_of(union: Union, unit: int) -> tuple[Path, int] | None:
    """Return the path of another unit to which a rank has tied the tensor of a unit, and this rank; None: none has."""
    path = union.units[unit].path
    for index, skeleton in enumerate(union.skeletons):
        for tensor in tensors_of(_node_at(skeleton.tree, path))[:1]:
            other = union.units[int(union.numbers[index][skeleton.tensors[tensor].storage])].path
            if other != path:
                return other, union.ranks_of[index][0]
    return None


def _node_at(node: Node, path: Path) -> Node:
    """Return the node at a path; one without tensors if there is none."""
    for key in path:
        while isinstance(node, ConvertedNode):
            node = node.child
        items = dict(items_of(node)) if isinstance(node, DictNode | ListNode | TupleNode) else {}
        node = items.get(key, ValueNode("NoneType", None))
    return node


def unite(skeletons: Sequence[Skeleton], skeleton_of: Sequence[int]) -> Union:
    """Number the units of all ranks.

    Args:
        skeletons: The distinct skeletons, in the order of their first ranks.
        skeleton_of: The index of each rank's skeleton, by rank.

    Raises:
        UsageError: Shards of one path belong to different global tensors.
    """
    ranks = np.asarray(skeleton_of, np.int64)
    units: list[Unit] = []
    first: list[tuple[int, str]] = []
    found: dict[object, int] = {}
    per_rank: set[int] = set()
    numbers: dict[bytes, Numbers] = {}
    for index, skeleton in enumerate(skeletons):
        if skeleton.tables_digest in numbers:
            continue
        declared, dtypes = frozenset(skeleton.per_rank), _dtypes_of(skeleton)
        own = numbers[skeleton.tables_digest] = np.empty(len(skeleton.units), np.int64)
        for local, unit in enumerate(skeleton.units):
            is_own = bool(declared) and _is_below(unit.path, declared)
            number = own[local] = found.setdefault(_key_of(unit, is_own=is_own), len(units))
            if number == len(units):
                units.append(unit)
                first.append((index, dtypes[local]))
                if is_own:
                    per_rank.add(number)
            elif unit.array is not None and not is_own:
                before, dtype = first[number]
                pair = int(np.flatnonzero(ranks == before)[0]), int(np.flatnonzero(ranks == index)[0])
                _check_same(units[number], dtype, unit, dtypes[local], pair)
    of_each = tuple(numbers[skeleton.tables_digest] for skeleton in skeletons)
    return Union(tuple(skeletons), ranks, tuple(units), of_each, frozenset(per_rank))


def _key_of(unit: Unit, *, is_own: bool) -> object:
    if unit.array is not None and not is_own:
        return unit.path
    return unit.path, unit.nbytes, unit.element_width, unit.is_float, is_own


def _dtypes_of(skeleton: Skeleton) -> list[str]:
    """Return the dtype of the first tensor of each unit."""
    dtypes = [""] * len(skeleton.units)
    for tensor in reversed(skeleton.tensors):
        dtypes[tensor.storage] = tensor.dtype
    return dtypes


def _is_below(path: Path, declared: frozenset[Path]) -> bool:
    return any(path[:length] in declared for length in range(len(path) + 1))


def _check_same(there: Unit, dtype_there: str, here: Unit, dtype_here: str, ranks: tuple[int, int]) -> None:
    assert there.array is not None
    assert here.array is not None
    facts = (
        ("shape", there.array.shape, here.array.shape),
        ("dtype", dtype_there, dtype_here),
        ("cuts", there.array.cuts, here.array.cuts),
        ("bytes", there.nbytes, here.nbytes),
    )
    for name, left, right in facts:
        if left != right:
            raise UsageError(
                f"shards of one tensor differ in their {name}: {left} on rank {ranks[0]}, {right} on rank {ranks[1]}",
                where=place_of(here.path),
                todo="make the same distributed tensor on all ranks, or give each its own key in the state",
                ranks=ranks,
            )


class DifferentNodes(NamedTuple):
    """What differs between ranks without being declared.

    Args:
        path: Where it is.
        lowest: The lowest rank that has it.
        others: The ranks that differ from it.
        tied: If only some ranks have tied this tensor to another one: the path of that one, and these ranks.
    """

    path: Path
    lowest: int
    others: tuple[int, ...]
    tied: tuple[Path, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class MergedTree:
    """The tree of the state, and its tensors.

    Args:
        tree: The tree.
        tensors: Its tensors; their ``storage`` is a storage of the checkpoint.
        layouts: The tensors of each layout.
        partial: The items of mappings that only some of the ranks have that have the mapping, and these ranks.
        differing: What differs between ranks without being declared, in more than the bytes of a tensor.
    """

    tree: Node
    tensors: Table[TensorSpec]
    layouts: dict[Layout, list[int]]
    partial: tuple[tuple[Path, tuple[int, ...]], ...] = ()
    differing: tuple[DifferentNodes, ...] = ()


def storages_of(union: Union, variants: Variants) -> Numbers:
    """Return the unit of each storage of the checkpoint: one for each copy of each unit, in the order of the units."""
    counts = np.ones(len(union.units), np.int64)
    for unit, copies in variants.items():
        counts[unit] = int(copies.max()) + 1
    return np.repeat(np.arange(len(counts)), counts)


def first_storages(union: Union, storages: Numbers) -> Numbers:
    """Return the storage of the first copy of each unit."""
    return np.searchsorted(storages, np.arange(len(union.units)))


def copies_of(union: Union, variants: Variants, rank: int, index: int) -> Numbers:
    """Return the copy that a rank has of each unit of its skeleton."""
    numbers = union.numbers[index]
    copies = np.zeros(len(numbers), np.int64)
    for local in np.flatnonzero(np.isin(numbers, [*variants])).tolist():
        copies[local] = variants[int(numbers[local])][rank]
    return copies


def merge_trees(union: Union, variants: Variants) -> MergedTree:
    """Merge the trees of all ranks."""
    storages = storages_of(union, variants)
    first = first_storages(union, storages)
    if len(union.skeletons) == 1 and not variants and not union.skeletons[0].per_rank:
        (skeleton,), (numbers,) = union.skeletons, union.numbers
        tensors = Table(replace(tensor, storage=int(first[numbers[tensor.storage]])) for tensor in skeleton.tensors)
        return MergedTree(skeleton.tree, tensors, _layouts_of(skeleton))
    merger = _TreeMerger(union, variants, first)
    tree = merger.merge([((index,), skeleton.tree) for index, skeleton in enumerate(union.skeletons)], ())
    used = tensors_of(tree)
    number_of = {provisional: number for number, provisional in enumerate(used)}
    tensors = Table(merger.tensors[provisional] for provisional in used)
    layouts: dict[Layout, list[int]] = {}
    is_listed: set[int] = set()
    for digest, skeleton in {each.tables_digest: each for each in union.skeletons}.items():
        given = merger.numbers_of[digest]
        for layout, locals_ in _layouts_of(skeleton).items():
            here = [number_of[number] for local in locals_ for number in given.get(local, ()) if number in number_of]
            layouts.setdefault(layout, []).extend(number for number in here if number not in is_listed)
            is_listed.update(here)
    listed = {layout: found for layout, found in layouts.items() if found}
    return MergedTree(_renumbered(tree, number_of), tensors, listed, tuple(merger.partial), tuple(merger.differing))


def _layouts_of(skeleton: Skeleton) -> dict[Layout, list[int]]:
    found: dict[Layout, list[int]] = {}
    for index, tensor in enumerate(skeleton.tensors):
        array = skeleton.units[tensor.storage].array
        if array is not None:
            found.setdefault(skeleton.layouts[array.layout], []).append(index)
    return found


def _renumbered(node: Node, number_of: Mapping[int, int]) -> Node:
    """Return a node with other numbers of tensors."""
    if isinstance(node, ValueNode):
        return node
    if isinstance(node, TensorNode):
        return replace(node, tensor=number_of[node.tensor])
    if isinstance(node, ConvertedNode):
        return replace(node, child=_renumbered(node.child, number_of))
    children = tuple([_renumbered(child, number_of) for child in node.children])
    if isinstance(node, DictNode) and node.metadata is not None:
        return replace(node, children=children, metadata=_renumbered(node.metadata, number_of))
    return replace(node, children=children)


Group = tuple[tuple[int, ...], Node]
"""Skeletons with equal tables, and the node that their ranks have at one path."""


class _TreeMerger:
    def __init__(self, union: Union, variants: Variants, first: Numbers) -> None:
        self._union = union
        self._variants = variants
        self._first = first
        self._declared = frozenset(path for skeleton in union.skeletons for path in skeleton.per_rank)
        self._tables = [skeleton.tables_digest for skeleton in union.skeletons]
        pairs = zip(union.skeletons, union.numbers, strict=True)
        tables = {skeleton.tables_digest: (skeleton, numbers) for skeleton, numbers in pairs}
        self._keys = {digest: self._keys_of(*each) for digest, each in tables.items()}
        self._numbers: dict[object, int] = {}
        self.numbers_of: dict[bytes, dict[int, dict[int, None]]] = {digest: {} for digest in tables}
        """The provisional numbers of the tensors of each table."""
        self._per_rank_count = 0
        self.tensors: list[TensorSpec] = []
        self.partial: list[tuple[Path, tuple[int, ...]]] = []
        self.differing: list[DifferentNodes] = []

    @staticmethod
    def _keys_of(skeleton: Skeleton, numbers: Numbers) -> list[tuple[TensorSpec, int, int]]:
        """Return what makes two tensors of different ranks the same: the spec with the unit, and the how-manieth.

        A rank may have several tensors of one spec on one unit: several objects that share memory.
        """
        counts: dict[tuple[TensorSpec, int], int] = {}
        keys = []
        for tensor in skeleton.tensors:
            unit = int(numbers[tensor.storage])
            spec = replace(tensor, storage=0)
            nth = counts[spec, unit] = counts.get((spec, unit), -1) + 1
            keys.append((spec, unit, nth))
        return keys

    def merge(self, groups: Sequence[Group], path: Path) -> Node:
        """Return the node of all ranks at one path."""
        if path in self._declared:
            return self._per_rank(groups, is_declared=True)
        groups = self._joined(groups)
        node = groups[0][1]
        if any(type(other) is not type(node) for _, other in groups):
            return self._per_rank(groups, path)
        if isinstance(node, TensorNode):
            return self._merge_tensors(groups, path)
        if isinstance(node, ValueNode):
            return node if all(other == node for _, other in groups) else self._per_rank(groups, path)
        if isinstance(node, ConvertedNode):
            return self._merge_converted(groups, path)
        if isinstance(node, DictNode):
            return self._merge_dicts(groups, path)
        return self._merge_sequences(groups, path)

    def _joined(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Join the groups of skeletons with equal tables that have one object as node."""
        if len(groups) == 1:
            return groups
        joined: dict[tuple[bytes, int], tuple[list[int], Node]] = {}
        for indices, node in groups:
            joined.setdefault((self._tables[indices[0]], id(node)), ([], node))[0].extend(indices)
        return [(tuple(indices), node) for indices, node in joined.values()]

    def _ranks_of(self, groups: Iterable[Group]) -> list[int]:
        return sorted(rank for indices, _ in groups for index in indices for rank in self._union.ranks_of[index])

    def _merge_tensors(self, groups: Sequence[Group], path: Path) -> Node:
        nodes = [(indices[0], node) for indices, node in groups if isinstance(node, TensorNode)]
        keys = {self._keys[self._tables[index]][node.tensor] for index, node in nodes}
        if len(keys) > 1 or any(node.attributes != nodes[0][1].attributes for _, node in nodes):
            return self._per_rank(groups, path, tied=self._tie_of(groups, path))
        if next(iter(keys))[1] in self._variants:
            # Only bytes differ. The comparison of the replicas names them.
            return self._per_rank(groups)
        for index, node in nodes:
            number = self._number(index, node.tensor, 0)
        return replace(nodes[0][1], tensor=number)

    def _tie_of(self, groups: Sequence[Group], path: Path) -> tuple[Path, tuple[int, ...]] | None:
        """Return the path of the tensor to which some ranks have tied the one at a path, and these ranks; else None."""
        found: dict[Path, list[Group]] = {}
        for indices, node in groups:
            if isinstance(node, TensorNode):
                _, unit, _ = self._keys[self._tables[indices[0]]][node.tensor]
                found.setdefault(self._union.units[unit].path, []).append((indices, node))
        other = next((each for each in found if each != path), None)
        return None if other is None or len(found) == 1 else (other, tuple(self._ranks_of(found[other])))

    def _number(self, index: int, tensor: int, variant: int) -> int:
        """Return the provisional number of a tensor."""
        spec, unit, nth = self._keys[self._tables[index]][tensor]
        number = self._numbers.setdefault((spec, unit, nth, variant), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(replace(spec, storage=int(self._first[unit]) + variant))
        self.numbers_of[self._tables[index]].setdefault(tensor, {})[number] = None
        return number

    def _merge_converted(self, groups: Sequence[Group], path: Path) -> Node:
        nodes = [(indices, node) for indices, node in groups if isinstance(node, ConvertedNode)]
        if len({node.name for _, node in nodes}) > 1:
            return self._per_rank(groups, path)
        before = self._per_rank_count
        child = self.merge([(indices, node.child) for indices, node in nodes], path)
        # A conversion needs its whole state, so it is one object for each rank if any part of it differs.
        return self._per_rank(groups) if self._per_rank_count > before else replace(nodes[0][1], child=child)

    def _merge_sequences(self, groups: Sequence[Group], path: Path) -> Node:
        nodes = [(indices, node) for indices, node in groups if isinstance(node, ListNode | TupleNode)]
        if len({len(node.children) for _, node in nodes}) > 1:
            return self._per_rank(groups, path)
        children = tuple(
            [
                self.merge([(indices, node.children[at]) for indices, node in nodes], (*path, at))
                for at in range(len(nodes[0][1].children))
            ]
        )
        return replace(nodes[0][1], children=children)

    def _merge_dicts(self, groups: Sequence[Group], path: Path) -> Node:
        nodes = [(indices, node) for indices, node in groups if isinstance(node, DictNode)]
        top = nodes[0][1]
        facts = (top.kind, top.factory, top.attributes)
        if any((node.kind, node.factory, node.attributes) != facts for _, node in nodes):
            return self._per_rank(groups, path)
        items: dict[Key, list[Group]] = {}
        for indices, node in nodes:
            for key, child in zip(node.keys, node.children, strict=True):
                items.setdefault(key, []).append((indices, child))
        children = tuple([self.merge(found, (*path, key)) for key, found in items.items()])
        for key, found in items.items():
            below = (*path, key)
            # The root names paths of text and integers only.
            if len(found) < len(nodes) and not any(isinstance(each, OtherKey) for each in below):
                self.partial.append((below, tuple(self._ranks_of(found))))
        metadata = [(indices, node.metadata) for indices, node in nodes if node.metadata is not None]
        about = self._merged_metadata(metadata) if metadata else None
        return replace(top, keys=tuple(items), children=children, metadata=about)

    def _merged_metadata(self, groups: Sequence[Group]) -> Node:
        """Return the metadata of a mapping: it has no path, so nothing in it is declared, partial or named."""
        facts = self._declared, self.partial, self.differing
        self._declared, self.partial, self.differing = frozenset(), [], []
        try:
            return self.merge(groups, ())
        finally:
            self._declared, self.partial, self.differing = facts

    def _per_rank(
        self,
        groups: Sequence[Group],
        path: Path | None = None,
        *,
        is_declared: bool = False,
        tied: tuple[Path, tuple[int, ...]] | None = None,
    ) -> Node:
        """Return what each rank has. One node if all have the same copies of the same tensors and values.

        Args:
            groups: The nodes.
            path: Where they are, if the user must know that they differ.
            is_declared: The user has said that they may differ.
            tied: See ``DifferentNodes``.
        """
        by_rank = {
            rank: (index, node) for indices, node in groups for index in indices for rank in self._union.ranks_of[index]
        }
        ranks = tuple(sorted(by_rank))
        children = tuple([self._own_node(*by_rank[rank], rank) for rank in ranks])
        if not is_declared and all(child == children[0] for child in children):
            return children[0]
        self._per_rank_count += 1
        if path is not None:
            pairs = zip(ranks, children, strict=True)
            others = tuple(rank for rank, child in pairs if child != children[0])
            self.differing.append(DifferentNodes(path, ranks[0], others, tied))
        return per_rank_node(dict(zip(ranks, children, strict=True)))

    def _own_node(self, index: int, node: Node, rank: int) -> Node:
        """Return a node as one rank has it."""
        own = {}
        for tensor in tensors_of(node):
            copies = self._variants.get(self._keys[self._tables[index]][tensor][1])
            own[tensor] = self._number(index, tensor, 0 if copies is None else int(copies[rank]))
        return _renumbered(node, own) if own else node


def world_of_union(merged: MergedTree, *, attempt: bytes, ranks: Sequence[RankFacts]) -> World:
    """Return who saved a checkpoint."""
    meshes: dict[MeshFacts, int] = {}
    layouts: dict[tuple[int, str], list[int]] = {}
    for layout, tensors in merged.layouts.items():
        mesh = meshes.setdefault(MeshFacts(layout.mesh_names, layout.mesh_shape), len(meshes))
        layouts.setdefault((mesh, layout.placements), []).extend(tensors)
    return World(
        size=len(ranks),
        attempt=attempt,
        meshes=tuple(meshes),
        layouts=tuple(LayoutFacts(*key, tuple(sorted(tensors))) for key, tensors in layouts.items()),
        ranks=tuple(ranks),
        partial=merged.partial,
    )
