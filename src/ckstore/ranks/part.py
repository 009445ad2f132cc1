"""What a rank sends to rank 0 about its share of a checkpoint: its skeleton, and its part record.

The *skeleton* is what ranks with equal states have in common: the tree, the tensors, and the units that these view. It
is sent only if rank 0 does not have it yet. The *part* says which bytes of which units the rank contributes, and where
they are stored.

Both come from another process: ``decode`` refuses what ``encode`` does not write. ``merge.py`` checks the numbers in
the columns, for all ranks together.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ckstore.commit.commit import decisions_of
from ckstore.commit.unpublished import Unpublished
from ckstore.config import MIB
from ckstore.errors import MalformedError, UnsupportedError, UsageError
from ckstore.format.columns import CHUNK, DECISION, FRAME, PACK, Rows
from ckstore.format.frame import ELEMENT_WIDTHS
from ckstore.format.location import (
    DECISION_ROW,
    NO_BASE_INDEX,
    Decisions,
    check_decisions,
    decision_rows,
    decisions_record,
    frame_rows,
    pack_rows,
)
from ckstore.format.logical import check_tensors, distinct_chunks, row_of, tensor_of
from ckstore.format.records import (
    DecisionsRecord,
    LayoutRow,
    PartRecord,
    PathKeys,
    SkeletonRecord,
    UnitRow,
    decode_stored,
    encode_inner,
)
from ckstore.format.tensors import TensorSpec, count_of
from ckstore.format.tree import Node, OtherKey, Path, check_tree, decode_tree, encode_tree
from ckstore.format.wire import SEAL_NBYTES, Reader, check_seal, xxh3_64
from ckstore.format.zstd import plain_section, stored_section
from ckstore.hashing import DIGEST_NBYTES, digest_of
from ckstore.ranks.arrays import ArraySpec, Layout, RankState, Unit
from ckstore.store.chunk_index import LOCAL_TIER, locate

if TYPE_CHECKING:
    from typing_extensions import Buffer

VERSION = 1
"""Version of skeletons and parts, which only processes of one job exchange."""

ATTEMPT_NBYTES = 16
SKELETON_NBYTES_MAX = 512 * MIB
"""Largest skeleton: that of a million tensors has about 200 MB."""

RANGE = np.dtype([("unit", "<u4"), ("offset", "<u8"), ("nbytes", "<u8"), ("chunk", "<u4"), ("chunk_offset", "<u4")])
"""Bytes of a unit that this rank contributes, and where they are in a chunk of its table."""

CHECK = np.dtype([("unit", "<u4"), ("offset", "<u8"), ("nbytes", "<u8"), ("digest", "V16")])
"""The digest of replicated bytes of a unit, as this rank holds them."""

UNIT_DECISION = np.dtype([("unit", "<u4"), *DECISION_ROW])

_SKELETON_MAGIC, _PART_MAGIC = b"CKSKEL\x00\x01", b"CKPART\x00\x01"
_SKELETON_HEAD = struct.Struct("<8sHHIQQ")
_PART_HEAD = struct.Struct("<8sHHIQQQQQQQ")
_NBYTES_LIMIT = 1 << 62


@dataclass(frozen=True)
class Skeleton:
    """What ranks with equal states have in common.

    Args:
        tree: The state; its tensor nodes number ``tensors``.
        tensors: The tensors as the checkpoint has them; their ``storage`` is the index of a unit.
        units: The units, in the order of the tree.
        layouts: How arrays lie on device meshes.
        per_rank: Paths of the parts that were declared ``PerRank``.
        replicated: Paths of the parts that were declared ``Replicated``, each with the share to compare.
    """

    tree: Node
    tensors: tuple[TensorSpec, ...]
    units: tuple[Unit, ...]
    layouts: tuple[Layout, ...] = ()
    per_rank: tuple[Path, ...] = ()
    replicated: tuple[tuple[Path, float], ...] = ()

    @classmethod
    def of(cls, state: RankState) -> Skeleton:
        """Return the skeleton of a captured state."""
        tree = state.captured.tree
        found = cls(tree, state.tensors, state.units, state.layouts, state.per_rank, state.replicated)
        # Captures of one structure have the same tables.
        found.__dict__["tables"] = state.captured.structure.once("skeleton tables", lambda: found.tables)
        return found

    @cached_property
    def tables(self) -> bytes:
        """Everything but the tree, encoded. It stays the same when only plain values change."""
        return encode_inner(
            SkeletonRecord(
                tensors=[row_of(tensor) for tensor in self.tensors],
                units=[_row_of_unit(unit) for unit in self.units],
                layouts=[LayoutRow(*layout) for layout in self.layouts],
                per_rank=[_keys_of(path) for path in self.per_rank],
                replicated=[(_keys_of(path), share) for path, share in self.replicated],
            )
        )

    @cached_property
    def plain(self) -> bytes:
        """The encoded tree, then ``tables``."""
        return encode_tree(self.tree) + self.tables

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 of the whole skeleton, by which parts refer to it."""
        return digest_of(self.plain)

    @cached_property
    def tables_digest(self) -> bytes:
        """BLAKE3 of ``tables``."""
        return digest_of(self.tables)

    def encode(self, *, rank: int = 0) -> bytes:
        """Return the skeleton as rank ``rank`` sends it."""
        tree_nbytes = len(self.plain) - len(self.tables)
        head = _SKELETON_HEAD.pack(_SKELETON_MAGIC, VERSION, 0, rank, len(self.plain), tree_nbytes)
        return _sealed(head, stored_section(memoryview(self.plain)))

    @classmethod
    def decode(cls, content: Buffer, *, where: object = None) -> Skeleton:
        """Decode a skeleton that another rank has sent; ``SkeletonDecoder`` decodes those of many ranks.

        Raises:
            MalformedError: It contradicts itself, or is not what ``encode`` writes.
            ChecksumError: It was changed on the way.
            UnsupportedError: The rank runs another version of ckstore.
        """
        plain, tree_nbytes = cls.opened(content, where=where)
        record = decode_stored(plain[tree_nbytes:], SkeletonRecord, where=where)
        tree = decode_tree(plain[:tree_nbytes], tensor_count=len(record.tensors), where=where)
        check_tree(tree, len(record.tensors))
        return cls._of_record(tree, record, where)

    @classmethod
    def of_tables(cls, tree: Node, tables: Buffer, *, where: object = None) -> Skeleton:
        """Return the skeleton with this tree and these ``tables``.

        Raises:
            MalformedError: The tables contradict themselves.
        """
        return cls._of_record(tree, decode_stored(memoryview(tables), SkeletonRecord, where=where), where)

    @classmethod
    def _of_record(cls, tree: Node, record: SkeletonRecord, where: object) -> Skeleton:
        found = cls(
            tree,
            tuple(map(tensor_of, record.tensors)),
            tuple(_unit_of(row, where) for row in record.units),
            tuple(Layout(row.mesh_names, row.mesh_shape, row.mesh_ranks, row.placements) for row in record.layouts),
            tuple(_path_of(keys, where) for keys in record.per_rank),
            tuple((_path_of(keys, where), share) for keys, share in record.replicated),
        )
        _check_skeleton(found, where)
        return found

    @staticmethod
    def opened(content: Buffer, *, where: object = None) -> tuple[memoryview, int]:
        """Return the plain bytes of a skeleton, and the length of the tree at their begin. Raises as ``decode``."""
        (_, nbytes, tree_nbytes), reader = _opened(content, _SKELETON_HEAD, _SKELETON_MAGIC, "a skeleton", where)
        if nbytes > SKELETON_NBYTES_MAX or tree_nbytes > nbytes:
            raise MalformedError(f"a skeleton of {nbytes} bytes is over the limit or contradicts itself", where=where)
        return plain_section(reader.take(reader.remaining), nbytes, where=where), tree_nbytes


def _check_skeleton(skeleton: Skeleton, where: object) -> None:
    for unit in skeleton.units:
        if unit.nbytes >= _NBYTES_LIMIT or unit.element_width not in ELEMENT_WIDTHS:
            raise MalformedError("a unit of a skeleton has an impossible length or element width", where=where)
        if unit.array is not None and not _is_possible(unit.array, unit.nbytes, len(skeleton.layouts)):
            raise MalformedError("a unit of a skeleton has an impossible shape, cuts or layout", where=where)
    for layout in skeleton.layouts:
        if count_of(layout.mesh_shape) != len(layout.mesh_ranks):
            raise MalformedError("a mesh of a skeleton has another number of ranks than places", where=where)
    check_tensors(skeleton.tensors, [unit.nbytes for unit in skeleton.units], where)


def _is_possible(array: ArraySpec, nbytes: int, layout_count: int) -> bool:
    if array.cuts and len(array.cuts) != len(array.shape):
        return False
    for length, cuts in zip(array.shape, array.cuts, strict=False):
        if list(cuts) != sorted(set(cuts)) or (cuts and not 0 < cuts[0] <= cuts[-1] < length):
            return False
    count = count_of(array.shape)
    is_whole = nbytes == 0 if count == 0 else nbytes % count == 0
    return is_whole and 0 <= array.layout < layout_count


def _row_of_unit(unit: Unit) -> UnitRow:
    array = unit.array
    shape, cuts, layout = (None, (), 0) if array is None else array
    return UnitRow(_keys_of(unit.path), unit.nbytes, unit.element_width, unit.is_float, shape, cuts, layout)


def _unit_of(row: UnitRow, where: object) -> Unit:
    array = None if row.shape is None else ArraySpec(row.shape, row.cuts, row.layout)
    if array is None and (row.cuts or row.layout):
        raise MalformedError("a unit of a skeleton has cuts or a layout, and no shape", where=where)
    return Unit(_path_of(row.path, where), row.nbytes, row.element_width, row.is_float, array)


def _keys_of(path: Path) -> PathKeys:
    return [(encode_tree(key.node),) if isinstance(key, OtherKey) else key for key in path]


def _path_of(keys: PathKeys, where: object) -> Path:
    return tuple(
        OtherKey(decode_tree(key[0], tensor_count=0, where=where)) if isinstance(key, tuple) else key for key in keys
    )


@dataclass(frozen=True, eq=False)
class Part:
    """What one rank contributes to a checkpoint.

    Args:
        rank: The rank.
        attempt: Id of the attempt to commit, the same on all ranks.
        skeleton: Digest of its skeleton.
        host: Its host.
        ranges: The bytes that it contributes, as ``RANGE``.
        chunks: The chunks that contain these, as ``columns.CHUNK``.
        packs: Packs of the local tier, as ``columns.PACK``.
        frames: The frames of the chunks and their bases, as ``columns.FRAME``; a base precedes its users.
        checks: Digests of the replicated bytes that it holds, as ``CHECK``.
        decisions: How it chose bases.
        unit_decisions: The same for its units, as ``UNIT_DECISION``.
        bytes_written: Bytes of the packs that it wrote.
        chunks_new: Chunks that it wrote.
        chunks_delta: Those of them that are differences from a base.
        chunks_derived: Those of them that are roundings.
        chunks_planned: Chunks of its plan.
        warnings: For the receipt, in whole sentences.
    """

    rank: int
    attempt: bytes
    skeleton: bytes
    host: str
    ranges: Rows
    chunks: Rows
    packs: Rows
    frames: Rows
    checks: Rows
    decisions: DecisionsRecord | None
    unit_decisions: Rows
    bytes_written: int
    chunks_new: int
    chunks_delta: int
    chunks_derived: int
    chunks_planned: int
    warnings: tuple[str, ...] = ()

    def joined(self, later: Part) -> Part:
        """Return this part and what the same rank wrote later for the same attempt, as one part."""
        first_pack, first_frame, first_chunk = len(self.packs), len(self.frames), len(self.chunks)
        ranges, frames = later.ranges.copy(), later.frames.copy()
        ranges["chunk"] += np.uint32(first_chunk)
        frames["pack"] += np.uint32(first_pack)
        frames["base"][frames["base"] != NO_BASE_INDEX] += np.uint32(first_frame)
        return replace(
            self,
            ranges=np.concatenate((self.ranges, ranges)),
            chunks=np.concatenate((self.chunks, later.chunks)),
            packs=np.concatenate((self.packs, later.packs)),
            frames=np.concatenate((self.frames, frames)),
            checks=np.concatenate((self.checks, later.checks)),
            bytes_written=self.bytes_written + later.bytes_written,
            chunks_new=self.chunks_new + later.chunks_new,
            chunks_delta=self.chunks_delta + later.chunks_delta,
            chunks_derived=self.chunks_derived + later.chunks_derived,
            chunks_planned=self.chunks_planned + later.chunks_planned,
            warnings=(*self.warnings, *later.warnings),
        )

    def encode(self) -> bytes:
        """Return the part as it is sent."""
        record = encode_inner(
            PartRecord(
                attempt=self.attempt,
                skeleton=self.skeleton,
                host=self.host,
                bytes_written=self.bytes_written,
                chunks_new=self.chunks_new,
                chunks_delta=self.chunks_delta,
                chunks_derived=self.chunks_derived,
                chunks_planned=self.chunks_planned,
                warnings=list(self.warnings),
                decisions=self.decisions,
            )
        )
        columns = [np.ascontiguousarray(rows) for rows in self._columns]
        head = _PART_HEAD.pack(_PART_MAGIC, VERSION, 0, self.rank, len(record), *map(len, columns))
        return _sealed(head, record, *(rows.tobytes() for rows in columns))

    @property
    def _columns(self) -> tuple[Rows, ...]:
        return self.ranges, self.chunks, self.packs, self.frames, self.checks, self.unit_decisions

    @classmethod
    def decode(cls, content: Buffer, *, where: object = None) -> Part:
        """Decode a part that another rank has sent. The columns are views of ``content``.

        Raises:
            MalformedError: It contradicts itself, or is not what ``encode`` writes.
            ChecksumError: It was changed on the way.
            UnsupportedError: The rank runs another version of ckstore.
        """
        (rank, record_nbytes, *counts), reader = _opened(content, _PART_HEAD, _PART_MAGIC, "a part record", where)
        record = decode_stored(reader.take(record_nbytes), PartRecord, where=where)
        dtypes = (RANGE, CHUNK, PACK, FRAME, CHECK, UNIT_DECISION)
        views = [reader.take(dtype.itemsize * count) for dtype, count in zip(dtypes, counts, strict=True)]
        reader.done()
        if len(record.attempt) != ATTEMPT_NBYTES or len(record.skeleton) != DIGEST_NBYTES:
            raise MalformedError(f"the part of rank {rank} has ids of another length", where=where)
        if record.decisions is not None:
            check_decisions(record.decisions, where)
        ranges, chunks, packs, frames, checks, unit_decisions = map(np.frombuffer, views, dtypes)
        return cls(
            rank=rank,
            attempt=record.attempt,
            skeleton=record.skeleton,
            host=record.host,
            ranges=ranges,
            chunks=chunks,
            packs=packs,
            frames=frames,
            checks=checks,
            decisions=record.decisions,
            unit_decisions=unit_decisions,
            bytes_written=record.bytes_written,
            chunks_new=record.chunks_new,
            chunks_delta=record.chunks_delta,
            chunks_derived=record.chunks_derived,
            chunks_planned=record.chunks_planned,
            warnings=tuple(record.warnings),
        )


def _sealed(*fields: Buffer) -> bytes:
    body = b"".join(fields)
    return body + xxh3_64(body).to_bytes(SEAL_NBYTES, "little")


def _opened(content: Buffer, head: struct.Struct, magic: bytes, what: str, where: object) -> tuple[list[int], Reader]:
    """Return the numbers of a head, the rank first, and a reader of what follows it."""
    view = memoryview(content).cast("B")
    if len(view) < head.size + SEAL_NBYTES or view[:8] != magic:
        raise MalformedError(f"{what} of another rank is torn, or something else", where=where)
    check_seal(view, f"{what} of another rank", where)
    _, version, reserved, rank, *numbers = head.unpack_from(view)
    if version != VERSION:
        raise UnsupportedError(
            f"rank {rank} sends {what} of version {version}, and this rank reads version {VERSION}",
            where=where,
            todo="use the same version of ckstore on all ranks",
            rank=rank,
            version=version,
        )
    if reserved:
        raise MalformedError(f"reserved bytes of {what} of another rank are not zero", where=where)
    return [rank, *numbers], Reader(view[head.size : -SEAL_NBYTES], what, where)


def make_part(
    unpublished: Unpublished,
    places: Sequence[tuple[int, int]],
    checks: Iterable[tuple[int, int, int, bytes]],
    *,
    rank: int,
    attempt: bytes,
    skeleton: bytes,
    host: str,
    warnings: Sequence[str] = (),
) -> Part:
    """Return the part of a rank whose packs are durable.

    Args:
        unpublished: What it wrote. Each storage of the plan is a byte range of a unit.
        places: The unit of each storage, and where the storage begins in it.
        checks: Unit, offset, length and digest of replicated bytes.
        rank: The rank.
        attempt: Id of the attempt.
        skeleton: Digest of its skeleton.
        host: Its host.
        warnings: Further warnings.

    Raises:
        UsageError: The policy quantizes, which many ranks cannot do.
    """
    plan, stored = unpublished.plan, unpublished.stored
    if stored.losses:
        raise UsageError("many ranks cannot quantize a checkpoint", todo="use a policy without residual=")
    chunks, storages = distinct_chunks(unpublished.chunk_specs(), plan.storages)
    ranges = []
    for (unit, offset), storage in zip(places, storages, strict=True):
        for piece in storage.pieces:
            ranges.append((unit, offset, piece.nbytes, piece.chunk, piece.offset))
            offset += piece.nbytes
    packs, frames = locate(stored.frames)
    decisions = decisions_of(unpublished)
    return Part(
        rank=rank,
        attempt=attempt,
        skeleton=skeleton,
        host=host,
        ranges=np.array(ranges, RANGE),
        chunks=np.array([(each.chunk_id, each.nbytes, each.element_width, each.is_float, 0) for each in chunks], CHUNK),
        packs=np.frombuffer(pack_rows(packs, [LOCAL_TIER]), PACK),
        frames=np.frombuffer(frame_rows(frames), FRAME),
        checks=np.array(list(checks), CHECK),
        decisions=None if decisions is None else decisions_record(decisions),
        unit_decisions=_unit_decisions(decisions, places),
        bytes_written=stored.nbytes_written,
        chunks_new=stored.chunks_new,
        chunks_delta=stored.chunks_delta,
        chunks_derived=stored.chunks_derived,
        chunks_planned=len(plan.chunks),
        warnings=(*stored.warnings, *warnings),
    )


def _unit_decisions(decisions: Decisions | None, places: Sequence[tuple[int, int]]) -> Rows:
    """Return the decision for each unit: that for its first range."""
    if decisions is None:
        return np.empty(0, UNIT_DECISION)
    rows = np.frombuffer(b"".join(decision_rows(decisions.storages)), DECISION)
    units, first = np.unique(np.array([unit for unit, _ in places], np.uint32), return_index=True)
    found = np.empty(len(units), UNIT_DECISION)
    found["unit"] = units
    for name in DECISION.names or ():
        found[name] = rows[name][first]
    return found
