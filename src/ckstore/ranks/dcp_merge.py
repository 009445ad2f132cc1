"""Merge what the ranks of a DCP save wrote into one manifest, and publish it: the only commit point.

DCP's collectives carry the parts from all ranks to the coordinator. A part is never a file: what a rank wrote without
a published manifest is garbage, which gc collects.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckstore.commit.unpublished import packs_removed_on_failure
from ckstore.concurrency import collector_paused
from ckstore.errors import ConflictError, UsageError
from ckstore.format.location import UNSAMPLED, Decisions, StorageDecision
from ckstore.format.manifest import ChunkSpec, Manifest, build_manifest
from ckstore.format.many_ranks import RankFacts, root_node, tiles_node
from ckstore.format.paths import ManifestName
from ckstore.format.tensors import Piece, StorageSpec, Table, TensorSpec, count_of, row_major_strides
from ckstore.format.tiles import Box, Cuts
from ckstore.format.tree import DictNode, Node, Path, TensorNode
from ckstore.ranks.arrays import Layout
from ckstore.ranks.dcp_boxes import WrittenBox, arranged
from ckstore.ranks.dcp_tree import DCP_KEY, DcpFacts, nested, shifted
from ckstore.ranks.union import MergedTree, world_of_union
from ckstore.results import Receipt, Stopwatch
from ckstore.store.chunk_index import LocatedFrame, locate
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class ArrayPart:
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
class ValuePart:
    """Another value that a rank wrote; ``is_pickled``: it is bytes that DCP's planner made of it."""

    name: str
    node: Node
    is_pickled: bool


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank wrote.

    Args:
        host: The name of its host.
        arrays: Boxes of tensors.
        values: Other values. Their nodes index ``tensors``.
        tensors: Tensors and long byte strings in these values.
        storages: Storages of boxes and values. Their pieces index ``chunks``.
        chunks: The chunks of the plan, in order.
        frames: Where each of them is stored.
        nbytes_written: Bytes of the packs that the rank wrote.
        pack_names: Files of these packs.
        counts: New chunks, and those of them that are differences or roundings.
        decisions: How bases were chosen, with a row for each storage.
        warnings: For the receipt.
    """

    host: str
    arrays: tuple[ArrayPart, ...]
    values: tuple[ValuePart, ...]
    tensors: tuple[TensorSpec, ...]
    storages: tuple[StorageSpec, ...]
    chunks: tuple[ChunkSpec, ...]
    frames: tuple[LocatedFrame, ...]
    nbytes_written: int
    pack_names: tuple[str, ...]
    counts: tuple[int, int, int]
    decisions: Decisions | None = None
    warnings: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the state that the rank contributed."""
        return sum(storage.nbytes for storage in self.storages)


@dataclass(frozen=True, slots=True)
class Merged:
    """The tree and the tables of a checkpoint of many ranks."""

    tree: Node
    tensors: tuple[TensorSpec, ...]
    storages: tuple[StorageSpec, ...]
    chunks: tuple[ChunkSpec, ...]
    frames: tuple[LocatedFrame, ...]
    decisions: Decisions | None


@dataclass(frozen=True, slots=True)
class SaveFacts:
    """What the coordinator knows about a save.

    Args:
        step: The trainer's step; None: one more than that of the newest checkpoint.
        metrics: Numbers to find the checkpoint by.
        parent: The seq that the previous save of this writer made.
        attempt: A random id of this save.
    """

    step: int | None
    metrics: Mapping[str, float]
    parent: int | None
    attempt: bytes


class _Written(NamedTuple):
    rank: int
    array: ArrayPart
    storage: StorageSpec
    decision: StorageDecision


_UNSAMPLED = StorageDecision(UNSAMPLED)


class _Merger:
    """Collects storages and tensors of all parts."""

    def __init__(self, parts: Sequence[Part | None]) -> None:
        self.tensors: list[TensorSpec] = []
        self.storages: list[StorageSpec] = []
        self.decided: list[StorageDecision] = []
        self.chunks: list[ChunkSpec] = []
        self.frames: list[LocatedFrame] = []
        self.arrays: dict[str, list[_Written]] = {}
        self.layouts: dict[Layout, list[int]] = {}
        self.values: dict[str, tuple[int, ValuePart, Node]] = {}
        for rank, part in enumerate(parts):
            if part is not None:
                self._add(rank, part)

    def _add(self, rank: int, part: Part) -> None:
        first = len(self.chunks)
        self.chunks += part.chunks
        self.frames += part.frames
        storages = [
            replace(spec, pieces=tuple(Piece(piece.chunk + first, *piece[1:]) for piece in spec.pieces))
            for spec in part.storages
        ]
        rows = [_UNSAMPLED] * len(storages) if part.decisions is None else part.decisions.storages
        for array in part.arrays:
            written = _Written(rank, array, storages[array.storage], rows[array.storage])
            self.arrays.setdefault(array.name, []).append(written)
        base, renumbered = len(self.tensors), dict[int, int]()
        for spec in part.tensors:
            if spec.storage not in renumbered:
                renumbered[spec.storage] = len(self.storages)
                self.storages.append(storages[spec.storage])
                self.decided.append(rows[spec.storage])
            self.tensors.append(replace(spec, storage=renumbered[spec.storage]))
        for value in part.values:
            other, *_ = self.values.setdefault(value.name, (rank, value, shifted(value.node, base)))
            if other != rank:
                raise UsageError(
                    f"rank {other} and rank {rank} wrote the same value",
                    where=value.name,
                    todo="let the planner remove replicas, as torch's DefaultSavePlanner does; nothing was published",
                )

    def node_of(self, name: str) -> Node:
        """Return the node of a tensor or value."""
        if name in self.values:
            return self.values[name][2]
        if name not in self.arrays:
            raise UsageError(
                "no rank wrote a part of the state", where=name, todo="check the planner; nothing was published"
            )
        written = self.arrays[name]
        first = written[0].array
        for each in written:
            if (each.array.shape, each.array.dtype) != (first.shape, first.dtype):
                raise UsageError(
                    f"ranks saved different tensors under one name: rank {written[0].rank} {first.dtype} "
                    f"{list(first.shape)}, rank {each.rank} {each.array.dtype} {list(each.array.shape)}",
                    where=name,
                    todo="give them different names; nothing was published",
                )
        boxes = [WrittenBox(each.rank, each.array.box, each.storage.pieces) for each in written]
        cuts, pieces = arranged(name, first.shape, first.itemsize, boxes)
        nbytes = count_of(first.shape) * first.itemsize
        self.storages.append(replace(written[0].storage, nbytes=nbytes, pieces=pieces))
        self.decided.append(written[0].decision)
        return self._array_node(first, cuts)

    def _array_node(self, array: ArrayPart, cuts: Cuts) -> Node:
        shape = (count_of(array.shape),) if cuts else array.shape
        spec = TensorSpec(
            library="torch",
            dtype=array.dtype,
            shape=shape,
            strides=row_major_strides(shape),
            storage=len(self.storages) - 1,
            offset=0,
            requires_grad=array.requires_grad,
        )
        node = TensorNode(len(self.tensors))
        self.tensors.append(spec)
        if array.layout is not None:
            self.layouts.setdefault(array.layout, []).append(node.tensor)
        return tiles_node(node, array.shape, cuts) if cuts else node


def merge(parts: Sequence[Part | None], names: Iterable[str], planner_data: Any, attempt: bytes) -> Merged:
    """Merge the parts of all ranks into the tables of one manifest.

    Args:
        parts: The part of each rank; None for a rank that wrote nothing.
        names: Everything that DCP's metadata names.
        planner_data: The planner data of DCP's metadata.
        attempt: A random id of this save.

    Raises:
        UsageError: A part of a tensor is missing or was written twice, or ranks disagree.
        UnsupportedError: The planner data is not plain.
    """
    merger = _Merger(parts)
    paths = planner_data if isinstance(planner_data, dict) else {}
    leaves: list[tuple[Path, Node]] = []
    pickled: list[Path] = []
    for name in names:
        path = paths.get(name, (name,))
        leaves.append((path, merger.node_of(name)))
        if name in merger.values and merger.values[name][1].is_pickled:
            pickled.append(path)
    state, absent = nested(leaves)
    follows = planner_data is None or planner_data == {".".join(map(str, path)): path for path, _ in leaves}
    facts = DcpFacts(planner_data is not None, tuple(pickled), absent, None if follows else planner_data)
    return Merged(
        _root(MergedTree(state, Table(merger.tensors), merger.layouts), facts, parts, attempt),
        tuple(merger.tensors),
        tuple(merger.storages),
        tuple(merger.chunks),
        tuple(merger.frames),
        _decisions([part.decisions for part in parts if part is not None], merger.decided),
    )


def _decisions(found: Sequence[Decisions | None], storages: Sequence[StorageDecision]) -> Decisions | None:
    """Return the decisions of all ranks as one."""
    made = [each for each in found if each is not None]
    if not made:
        return None
    bases = {each.base for each in made}
    return Decisions(
        base=bases.pop() if len(bases) == 1 else "mixed",
        base_seq=max((each.base_seq for each in made if each.base_seq is not None), default=None),
        keyframe_seq=min((each.keyframe_seq for each in made if each.keyframe_seq is not None), default=None),
        reason=next((each.reason for each in made if each.base_seq is not None), made[0].reason),
        storages=tuple(storages),
    )


def _root(merged: MergedTree, facts: DcpFacts, parts: Sequence[Part | None], attempt: bytes) -> Node:
    ranks = [
        RankFacts("", 0, 0) if part is None else RankFacts(part.host, part.nbytes, part.nbytes_written)
        for part in parts
    ]
    root = root_node(merged.tree, world_of_union(merged, attempt=attempt, ranks=ranks))
    assert isinstance(root.child, DictNode)
    keys, children = (*root.child.keys, DCP_KEY), (*root.child.children, facts.node())
    return replace(root, child=replace(root.child, keys=keys, children=children))


def publish(
    repository: Repository, merged: Merged, parts: Sequence[Part | None], facts: SaveFacts, watch: Stopwatch
) -> Receipt:
    """Publish the merged parts as one checkpoint. It is durable when this returns, and invisible before.

    Raises:
        ConflictError: Another live process writes this run, or a collector deleted packs that this save reuses.
        CapacityError: The disk is full. Nothing was published.
        BackendError: The storage failed.
    """
    written = [part for part in parts if part is not None]
    pack_names = [name for part in written for name in part.pack_names]
    seq: int | None = None

    def is_visible() -> bool:
        return seq is not None and repository.manifests.is_visible(seq)

    repository.lease.take()
    with watch("publish"), packs_removed_on_failure(repository, pack_names, is_visible):
        repository.lease.check()
        seq = repository.manifests.claim(repository.seq_next())
        repository.note_seq(seq)
        with collector_paused():
            manifest = _manifest(repository, merged, written, facts, seq)
        name = repository.manifests.publish(manifest)
    with watch("verify"):
        _require_packs(repository, manifest, name)
    repository.manifests.note_published(name.seq)
    repository.note_committed(manifest)
    repository.newest = manifest
    repository.renew_file_times(manifest.packs)
    _, delta, derived = map(sum, zip((0, 0, 0), *(part.counts for part in written), strict=True))
    return Receipt.of(
        manifest,
        watch,
        engine=repository.engine_name,
        warnings=[warning for part in written for warning in part.warnings],
        chunks_delta=delta,
        chunks_derived=derived,
    )


def _manifest(repository: Repository, merged: Merged, parts: Sequence[Part], facts: SaveFacts, seq: int) -> Manifest:
    packs, frames = locate(merged.frames)
    newest = repository.newest
    after = 0 if newest is None else newest.header.step + 1
    return build_manifest(
        store_id=repository.store_id,
        run=repository.run,
        seq=seq,
        step=after if facts.step is None else facts.step,
        time_ns=repository.clock.now_ns(),
        parent=facts.parent,
        metrics=facts.metrics,
        tree=merged.tree,
        tensors=merged.tensors,
        storages=merged.storages,
        chunks=merged.chunks,
        packs=packs,
        frames=frames,
        bytes_written=sum(part.nbytes_written for part in parts),
        chunks_new=sum(part.counts[0] for part in parts),
        decisions=merged.decisions,
    )


def _require_packs(repository: Repository, manifest: Manifest, name: ManifestName) -> None:
    """Withdraw the published checkpoint if a pack that it names is gone."""
    gone = repository.rescue_local_packs({pack.pack_id: pack.nbytes for pack in manifest.packs})
    if not gone:
        return
    repository.manifests.withdraw(name)
    repository.chunk_index.forget_packs(gone)
    raise ConflictError(
        "packs vanished during the save, which was withdrawn",
        where=repository.backend.root,
        todo="save again; if it happens again, find the process that removes files from the store",
        pack_ids=sorted(pack_id.hex() for pack_id in gone),
    )
