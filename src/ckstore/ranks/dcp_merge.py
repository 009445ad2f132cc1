"""Merge what the ranks of a DCP save wrote into one checkpoint.

DCP's collectives carry what each rank has sent to the coordinator. A rank does not know how others cut a tensor, so its
part says only which of its own storages its chunks contain. The coordinator makes units of these storages; from then on
the merge is that of all checkpoints by many ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ckstore.config import Limits
from ckstore.errors import MalformedError, UsageError
from ckstore.format.columns import CHUNK, FRAME, PACK, Rows
from ckstore.format.many_ranks import tiles_node
from ckstore.format.tensors import Piece, TensorSpec, count_of, row_major_strides
from ckstore.format.tiles import Box
from ckstore.format.tree import ConvertedNode, DictNode, Node, Path, TensorNode
from ckstore.ranks.arrays import ArraySpec, Layout, Unit
from ckstore.ranks.dcp_boxes import WrittenBox, arranged
from ckstore.ranks.dcp_tree import DCP_KEY, DcpFacts, nested, shifted
from ckstore.ranks.merge import Merged, Merger
from ckstore.ranks.part import CHECK, RANGE, UNIT_DECISION, Part, Skeleton
from ckstore.ranks.replicas import Comparison
from ckstore.state.memory import SpanShape


@dataclass(frozen=True, slots=True)
class SavedArray:
    """What a rank wrote of a tensor: one box.

    Args:
        name: The flat name.
        dtype: The name of its dtype.
        itemsize: Bytes of one element.
        shape: The global shape.
        box: The box.
        storage: Index of the storage that has its elements in row-major order.
        requires_grad: Whether the tensor required a gradient.
        layout: How it lies on a device mesh; None: it is not sharded, or the planner does not say.
    """

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    box: Box
    storage: int
    requires_grad: bool
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class SavedValue:
    """Another value that a rank wrote; ``is_pickled``: it is bytes that DCP's planner made of it."""

    name: str
    node: Node
    is_pickled: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """What one rank wrote.

    Args:
        arrays: Boxes of tensors.
        values: Other values. Their nodes index ``tensors``.
        tensors: Tensors and long byte strings in these values.
        storages: Storages of boxes and values.
        pack_names: Files of the packs that the rank wrote.
        part: The encoded part. Its units are ``storages``.
    """

    arrays: tuple[SavedArray, ...]
    values: tuple[SavedValue, ...]
    tensors: tuple[TensorSpec, ...]
    storages: tuple[SpanShape, ...]
    pack_names: tuple[str, ...]
    part: bytes


class _Written(NamedTuple):
    rank: int
    array: SavedArray


class _Units:
    """The units and tensors of the checkpoint, and which range of a unit each storage of each rank is."""

    def __init__(self, saved: Sequence[Saved | None], parts: Sequence[Part]) -> None:
        self._saved = saved
        self._parts = parts
        counts = [len(part.chunks) for part in parts]
        self._first_chunks = np.cumsum([0, *counts])
        self.units: list[Unit] = []
        self.tensors: list[TensorSpec] = []
        self.layouts: dict[Layout, int] = {}
        self.values: dict[str, tuple[int, SavedValue, Node]] = {}
        self._arrays: dict[str, list[_Written]] = {}
        self._pieces: list[tuple[Piece, ...]] = []
        self._unit_of: list[dict[int, int]] = [{} for _ in saved]
        """For each rank: the unit that each of its storages is a part of."""
        for rank, (each, part) in enumerate(zip(saved, parts, strict=True)):
            if (part.ranges["chunk"] >= len(part.chunks)).any():
                raise MalformedError(f"the part of rank {rank} has a range beyond its chunks", rank=rank)
            if each is not None:
                self._add(rank, each)

    def _add(self, rank: int, saved: Saved) -> None:
        for array in saved.arrays:
            self._arrays.setdefault(array.name, []).append(_Written(rank, array))
        base, unit_of = len(self.tensors), self._unit_of[rank]
        for spec in saved.tensors:
            if spec.storage not in unit_of:
                shape = saved.storages[spec.storage]
                path = (f"values of rank {rank}", spec.storage)
                unit_of[spec.storage] = self._add_unit(Unit(path, *shape), self._own_pieces(rank, spec.storage))
            self.tensors.append(replace(spec, storage=unit_of[spec.storage]))
        for value in saved.values:
            other, *_ = self.values.setdefault(value.name, (rank, value, shifted(value.node, base)))
            if other != rank:
                raise UsageError(
                    f"rank {other} and rank {rank} wrote the same value",
                    where=value.name,
                    todo="let the planner remove replicas, as torch's DefaultSavePlanner does; nothing was published",
                )

    def _add_unit(self, unit: Unit, pieces: tuple[Piece, ...]) -> int:
        self.units.append(unit)
        self._pieces.append(pieces)
        return len(self.units) - 1

    def _own_pieces(self, rank: int, storage: int) -> tuple[Piece, ...]:
        """Return the pieces of a storage of one rank, with the numbers of chunks that no other rank's have."""
        ranges, first = self._parts[rank].ranges, int(self._first_chunks[rank])
        rows = ranges[slice(*np.searchsorted(ranges["unit"], (storage, storage + 1)))]
        return tuple([Piece(first + chunk, offset, nbytes) for _, _, nbytes, chunk, offset in rows.tolist()])

    def node_of(self, name: str, path: Path) -> Node:
        """Return the node of a tensor or value."""
        if name in self.values:
            return self.values[name][2]
        if name not in self._arrays:
            raise UsageError(
                "no rank wrote a part of the state", where=name, todo="check the planner; nothing was published"
            )
        written = self._arrays[name]
        first = written[0].array
        for each in written:
            if (each.array.shape, each.array.dtype) != (first.shape, first.dtype):
                raise UsageError(
                    f"ranks saved different tensors under one name: rank {written[0].rank} {first.dtype} "
                    f"{list(first.shape)}, rank {each.rank} {each.array.dtype} {list(each.array.shape)}",
                    where=name,
                    todo="give them different names; nothing was published",
                )
        boxes = [WrittenBox(rank, array.box, self._own_pieces(rank, array.storage)) for rank, array in written]
        cuts, pieces = arranged(name, first.shape, first.itemsize, boxes)
        saved = self._saved[written[0].rank]
        assert saved is not None
        shape = saved.storages[first.storage]._replace(nbytes=count_of(first.shape) * first.itemsize)
        layout = None if first.layout is None else self.layouts.setdefault(first.layout, len(self.layouts))
        spec = None if layout is None else ArraySpec(first.shape, cuts, layout)
        unit = self._add_unit(Unit(path, *shape, spec), pieces)
        for rank, array in written:
            self._unit_of[rank][array.storage] = unit
        flat = (count_of(first.shape),) if cuts else first.shape
        self.tensors.append(
            TensorSpec("torch", first.dtype, flat, row_major_strides(flat), unit, 0, requires_grad=first.requires_grad)
        )
        node = TensorNode(len(self.tensors) - 1)
        return tiles_node(node, first.shape, cuts) if cuts else node

    def ranges(self) -> list[Rows]:
        """Return for each rank the bytes of units that it contributes, as ``RANGE``."""
        counts = [len(pieces) for pieces in self._pieces]
        rows = np.zeros(sum(counts), RANGE)
        rows["unit"] = np.repeat(np.arange(len(counts)), counts)
        for name, column in zip(("chunk", "chunk_offset", "nbytes"), range(3), strict=True):
            rows[name] = [piece[column] for pieces in self._pieces for piece in pieces]
        ends = np.cumsum(rows["nbytes"], dtype=np.uint64)
        begins = ends - rows["nbytes"]
        firsts = np.searchsorted(rows["unit"], np.arange(len(counts)))
        rows["offset"] = begins - np.append(begins, np.uint64(0))[firsts][rows["unit"]]
        ranks = np.searchsorted(self._first_chunks, rows["chunk"], side="right") - 1
        rows["chunk"] -= self._first_chunks[ranks].astype(np.uint32)
        return [rows[ranks == rank] for rank in range(len(self._parts))]

    def decisions(self, rank: int) -> Rows:
        """Return how a rank chose bases: for each unit, that for its first storage."""
        found, unit_of = self._parts[rank].unit_decisions, self._unit_of[rank]
        found = found[np.isin(found["unit"], [*unit_of])]
        units, first = np.unique([unit_of[storage] for storage in found["unit"].tolist()], return_index=True)
        found = found[first]
        found["unit"] = units
        return found


def merge(
    saved: Sequence[Saved | None], names: Iterable[str], planner_data: Any, attempt: bytes, limits: Limits
) -> Merged:
    """Merge what all ranks wrote into the content of one manifest.

    Args:
        saved: What each rank wrote; None for a rank that wrote nothing.
        names: Everything that DCP's metadata names.
        planner_data: The planner data of DCP's metadata.
        attempt: A random id of this save.
        limits: Bounds of the store.

    Raises:
        UsageError: A part of a tensor is missing or was written twice, or ranks disagree.
        UnsupportedError: The planner data is not plain.
        MalformedError: What a rank sent contradicts itself.
    """
    parts = [
        _nothing_of(rank) if each is None else Part.decode(each.part, where=f"rank {rank}")
        for rank, each in enumerate(saved)
    ]
    units = _Units(saved, parts)
    paths = planner_data if isinstance(planner_data, dict) else {}
    leaves: list[tuple[Path, Node]] = []
    pickled: list[Path] = []
    for name in names:
        path = paths.get(name, (name,))
        leaves.append((path, units.node_of(name, path)))
        if name in units.values and units.values[name][1].is_pickled:
            pickled.append(path)
    state, absent = nested(leaves)
    follows = planner_data is None or planner_data == {".".join(map(str, path)): path for path, _ in leaves}
    facts = DcpFacts(planner_data is not None, tuple(pickled), absent, None if follows else planner_data)
    skeleton = Skeleton(state, tuple(units.tensors), tuple(units.units), tuple(units.layouts))
    parts = [
        replace(
            part,
            rank=rank,
            attempt=attempt,
            skeleton=skeleton.digest,
            ranges=ranges,
            unit_decisions=units.decisions(rank),
        )
        for rank, (part, ranges) in enumerate(zip(parts, units.ranges(), strict=True))
    ]
    merger = Merger(limits)
    # DCP's planner has removed replicas, so there is nothing to compare.
    merged = merger.merge(merger.unite(parts, {skeleton.digest: skeleton}), parts, Comparison((), {}, {}))
    return replace(merged, columns=replace(merged.columns, tree=_with_facts(merged.columns.tree, facts)))


def _nothing_of(rank: int) -> Part:
    """Return the part of a rank that wrote nothing."""
    ranges, chunks, packs, frames, checks = (np.empty(0, dtype) for dtype in (RANGE, CHUNK, PACK, FRAME, CHECK))
    decisions = np.empty(0, UNIT_DECISION)
    return Part(rank, b"", b"", "", ranges, chunks, packs, frames, checks, None, decisions, 0, 0, 0, 0, 0)


def _with_facts(root: Node, facts: DcpFacts) -> Node:
    assert isinstance(root, ConvertedNode)
    assert isinstance(root.child, DictNode)
    keys, children = (*root.child.keys, DCP_KEY), (*root.child.children, facts.node())
    return replace(root, child=replace(root.child, keys=keys, children=children))
