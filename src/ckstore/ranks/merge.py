"""Merge the parts of all ranks into the columns of one manifest.

Every byte of every storage must be contributed exactly once, which ``tiling.py`` checks. A chunk or a frame that
several ranks list is listed once.

Invariants:
- The numbers in parts come from other processes. None is used as an index, or added up, before it was checked.
- What depends only on which rank contributes which range is kept from one commit to the next. It is used again only if
  the ranges of all ranks are the same, byte by byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore.concurrency import collector_paused
from ckstore.config import Limits
from ckstore.errors import MalformedError, counted
from ckstore.format.columns import (
    CHUNK,
    DECISION,
    FRAME,
    PACK,
    Columns,
    Facts,
    Pieces,
    Rows,
    encode_columns,
    joined,
    numbered,
)
from ckstore.format.error_records import cut_text
from ckstore.format.header import ManifestHeader
from ckstore.format.location import NO_BASE_INDEX, NO_BITS, PackRef
from ckstore.format.many_ranks import RankFacts, root_node
from ckstore.format.records import DecisionsRecord, LogicalRecord
from ckstore.format.tree import Path, place_of
from ckstore.hashing import PackId
from ckstore.ranks.part import Part, Skeleton
from ckstore.ranks.replicas import STORED_FOR_EACH, Comparison, compare, ranks_text
from ckstore.ranks.tiling import Tiling, tile
from ckstore.ranks.union import (
    DifferentNodes,
    MergedTree,
    Numbers,
    Union,
    Variants,
    copies_of,
    first_storages,
    merge_trees,
    storages_of,
    unite,
    world_of_union,
)
from ckstore.store.chunk_index import LOCAL_TIER

_NAMED_MAX = 8
"""Values that differ between ranks, of which each has a warning of its own."""

_WARNINGS_NBYTES_MAX = 128 << 10
"""Limit for all warnings of a receipt: rank 0 sends it to the others in one message."""

_TEXT_HEAD_NBYTES_MAX = 5
"""Bytes before a text in a message."""


@dataclass(frozen=True)
class Merged:
    """The content of the manifest, and what the receipt says.

    Args:
        columns: The content.
        chunks_new: Chunks that the ranks wrote.
        chunks_delta: Those of them that are differences from a base.
        chunks_derived: Those of them that are roundings.
        chunks_reused: Chunks in the plans of the ranks that they did not write.
        bytes_written: Bytes of the packs that the ranks wrote.
        warnings: The warnings of all ranks, and those of the first differences; at most 128 KiB.
    """

    columns: Columns
    chunks_new: int
    chunks_delta: int
    chunks_derived: int
    chunks_reused: int
    bytes_written: int
    warnings: tuple[str, ...]

    @property
    def packs(self) -> list[PackRef]:
        """The packs that the manifest names. All are local."""
        return [
            PackRef(PackId(bytes(row["pack_id"])), int(row["nbytes"]), bytes(row["directory_digest"]), LOCAL_TIER)
            for row in self.columns.packs
        ]

    def encode(self, record: LogicalRecord, store_id: bytes, *, limits: Limits) -> tuple[ManifestHeader, bytes]:
        """Return the header and the bytes of the manifest; see ``encode_columns``."""
        facts = Facts(record, store_id, self.bytes_written, self.chunks_new, self.chunks_reused)
        with collector_paused():
            return encode_columns(self.columns, facts, limits=limits)


class Merger:
    """Merges the parts of the commits of one run, one after another."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._united: tuple[tuple[bytes, ...], tuple[int, ...], Union] | None = None
        self._tree: tuple[Union, Variants, MergedTree] | None = None
        self._layout: tuple[bytes, Tiling] | None = None
        self._pieces: tuple[Tiling, Numbers, Pieces] | None = None
        self._named: dict[Path, frozenset[int]] = {}
        """Values that differ between ranks, of which a commit has warned, and the ranks that it has named."""

    def unite(self, parts: Sequence[Part], skeletons: Mapping[bytes, Skeleton]) -> Union:
        """Return the units of all ranks.

        Args:
            parts: The part of each rank, in their order.
            skeletons: The skeletons that they name, by digest.

        Raises:
            MalformedError: A part is missing, is of another attempt, or names another skeleton.
            UsageError: Shards of one path belong to different global tensors.
        """
        index_of: dict[bytes, int] = {}
        for rank, part in enumerate(parts):
            if part.rank != rank or part.attempt != parts[0].attempt or part.skeleton not in skeletons:
                raise MalformedError(
                    f"the part of rank {rank} is missing, is of another attempt, or names an unknown skeleton",
                    rank=rank,
                )
            index_of.setdefault(part.skeleton, len(index_of))
        skeleton_of = tuple([index_of[part.skeleton] for part in parts])
        digests = tuple(index_of)
        if self._united is None or self._united[:2] != (digests, skeleton_of):
            self._united = digests, skeleton_of, unite([skeletons[digest] for digest in digests], skeleton_of)
        return self._united[2]

    def merge(self, union: Union, parts: Sequence[Part], comparison: Comparison | None = None) -> Merged:
        """Merge the parts of all ranks.

        Args:
            union: The units of all ranks.
            parts: The part of each rank, in their order, with what ``comparison.more`` says.
            comparison: The comparison of the replicas; None: compare them.

        Raises:
            MalformedError: A part contradicts itself or its skeleton.
            UsageError: Bytes of a tensor are contributed by no rank, or by several.
        """
        with collector_paused():
            return self._merge(union, parts, compare(union, parts) if comparison is None else comparison)

    def _merge(self, union: Union, parts: Sequence[Part], comparison: Comparison) -> Merged:
        variants, parts = comparison.variants, comparison.kept(parts)
        layout = self._layout_of(union, parts, variants)
        chunks, chunk_numbers = _merged_chunks(parts, layout.is_used)
        packs, frames = _merged_frames(parts, chunks["chunk_id"], self._limits.depth_max)
        merged = self._tree_of(union, variants)
        ranks = [
            RankFacts(part.host, nbytes, part.bytes_written)
            for part, nbytes in zip(parts, layout.contributed.tolist(), strict=True)
        ]
        world = world_of_union(merged, attempt=parts[0].attempt, ranks=ranks)
        chunks_new = sum(part.chunks_new for part in parts)
        columns = Columns(
            tree=root_node(merged.tree, world),
            tensors=merged.tensors,
            storages=layout.storages,
            pieces=self._pieces_of(layout, chunk_numbers),
            chunks=chunks,
            tiers=[LOCAL_TIER] if len(packs) else [],
            packs=packs,
            frames=frames,
            decisions=_merged_decisions(union, parts, variants, layout.storages),
        )
        return Merged(
            columns,
            chunks_new=chunks_new,
            chunks_delta=sum(part.chunks_delta for part in parts),
            chunks_derived=sum(part.chunks_derived for part in parts),
            chunks_reused=max(0, sum(part.chunks_planned for part in parts) - chunks_new),
            bytes_written=sum(part.bytes_written for part in parts),
            warnings=_within_limit(self._warnings_of(parts, comparison, merged)),
        )

    def _warnings_of(self, parts: Sequence[Part], comparison: Comparison, merged: MergedTree) -> Iterator[str]:
        """Yield what differs between the ranks without being declared and is new, and the warnings of all ranks."""
        # Shards first: these should be equal on all ranks that have them.
        differences = sorted(comparison.differences, key=lambda each: not each.is_shard)
        yield from _first_ones([str(each) for each in differences], "further tensor")
        news = []
        for each in merged.differing:
            known = self._named.get(each.path, frozenset())
            self._named[each.path] = known.union(each.others)
            if not known.issuperset(each.others):
                news.append(f"{place_of(each.path)}: {_difference_text(each)}")
        yield from _first_ones(news, "further value")
        for part in parts:
            yield from part.warnings

    def _tree_of(self, union: Union, variants: Variants) -> MergedTree:
        if self._tree is None or self._tree[0] is not union or not _are_equal(self._tree[1], variants):
            self._tree = union, variants, merge_trees(union, variants)
        return self._tree[2]

    def _layout_of(self, union: Union, parts: Sequence[Part], variants: Variants) -> Tiling:
        # A skeleton with other plain values has the same units.
        tables = b"".join([union.skeletons[index].tables_digest for index in union.skeleton_of.tolist()])
        counts = np.array([len(part.chunks) for part in parts], np.int64)
        if self._layout is not None:
            known, layout = self._layout
            if (
                tables == known
                and np.array_equal(counts, layout.chunk_counts)
                and _are_equal(variants, layout.variants)
                and all(part.ranges.tobytes() == rows for part, rows in zip(parts, layout.ranges, strict=True))
                and layout.has_compared_repeats(union, parts)
            ):
                return layout
        layout = tile(union, parts, variants, counts)
        self._layout = tables, layout
        return layout

    def _pieces_of(self, layout: Tiling, chunk_numbers: Numbers) -> Pieces:
        if self._pieces is None or self._pieces[0] is not layout or not np.array_equal(self._pieces[1], chunk_numbers):
            rows = layout.pieces.copy()
            rows["chunk"] = chunk_numbers.astype(np.uint32)[layout.chunk_rows]
            self._pieces = layout, chunk_numbers, Pieces(rows)
        return self._pieces[2]


def _first_ones(texts: Sequence[str], what: str) -> Iterator[str]:
    """Yield the first texts about what differs, and how many there are beyond."""
    yield from texts[:_NAMED_MAX]
    left = len(texts) - _NAMED_MAX
    if left > 0:
        yield f"{counted(left, what)} {'differs' if left == 1 else 'differ'} between ranks"


def _within_limit(warnings: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct warnings, or the first ones and the number of the others."""
    found: list[str] = []
    left = nbytes = 0
    for text in map(cut_text, dict.fromkeys(warnings)):
        nbytes += len(text.encode()) + _TEXT_HEAD_NBYTES_MAX
        if nbytes > _WARNINGS_NBYTES_MAX:
            left += 1
        else:
            found.append(text)
    return (*found, f"{counted(left, 'further warning')} left out") if left else tuple(found)


def _difference_text(node: DifferentNodes) -> str:
    if node.tied is None:
        return f"differs on {ranks_text(node.others)} from rank {node.lowest}; {STORED_FOR_EACH}"
    other, ranks = node.tied
    return (
        f"shares memory with {place_of(other)} on {ranks_text(ranks)} only, so it was stored for each rank; tie these "
        "tensors on all ranks, or on none"
    )


def _are_equal(left: Variants, right: Variants) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(copies, right[unit]) for unit, copies in left.items())


def _merged_chunks(parts: Sequence[Part], is_used: NDArray[np.bool_]) -> tuple[Rows, Numbers]:
    """Return the distinct chunks that pieces need, and for each row in the tables of all ranks the number of its chunk.

    Raises:
        MalformedError: Ranks give one chunk different lengths.
    """
    rows = joined((part.chunks for part in parts), CHUNK)
    needed = np.flatnonzero(is_used)
    rows = rows[needed]
    chosen, places = _distinct(rows["chunk_id"])
    distinct = rows[chosen]
    if (distinct["nbytes"][places] != rows["nbytes"]).any():
        raise MalformedError("ranks give one chunk different lengths")
    numbers = np.zeros(len(is_used), np.int64)
    numbers[needed] = places
    return distinct, numbers


def _distinct(ids: Rows) -> tuple[Numbers, Numbers]:
    """Return the first row of each distinct id, ascending, and for each row the place of its id among them."""
    numbers = numbered(ids)
    first = np.empty(int(numbers.max(initial=-1)) + 1, np.int64)
    # The last assignment counts: that of the first row.
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    chosen = np.sort(first)
    place = np.empty(len(chosen), np.int64)
    place[numbers[chosen]] = np.arange(len(chosen))
    return chosen, place[numbers]


def _first_places(numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Return the distinct numbers in the order in which they occur, and for each number its place among them."""
    values, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return values[order], place[inverse]


def _merged_frames(parts: Sequence[Part], chunk_ids: Rows, depth_max: int) -> tuple[Rows, Rows]:
    """Return the packs and frames that a restore needs.

    Of several frames of one chunk the one with the fewest bases is listed. Its base is one level below, so the frame
    that is listed for the base has fewer bases still: there is no cycle, and no chain gets longer.

    Raises:
        MalformedError: A part contradicts itself, ranks contradict each other, or a chunk has no frame.
    """
    packs, pack_numbers = _merged_packs(parts)
    frames, base, pack_rows = _checked_frames(parts, depth_max)
    numbers = numbered(np.concatenate([frames["chunk_id"], chunk_ids]))
    own, wanted = numbers[: len(frames)], numbers[len(frames) :]
    order = np.lexsort((frames["depth"], own))
    listed = np.full(int(numbers.max(initial=-1)) + 1, -1, np.int64)
    # The last assignment counts: that of the frame with the least depth, and of these of the first.
    listed[own[order[::-1]]] = order[::-1]
    if (listed[wanted] < 0).any():
        raise MalformedError("no rank says where one of its chunks is stored")
    has_base = base >= 0
    base[has_base] = listed[own[base[has_base]]]
    is_needed = np.zeros(len(frames), bool)
    level = listed[wanted]
    while len(level):
        is_needed[level] = True
        level = np.unique(base[level])
        level = level[level >= 0]
        level = level[~is_needed[level]]
    kept = np.flatnonzero(is_needed)
    depth = _depths(base)
    if (base[kept] >= kept).any():
        kept = kept[np.argsort(depth[kept], kind="stable")]
    place = np.full(len(frames), -1, np.int64)
    place[kept] = np.arange(len(kept))
    found = frames[kept]
    found["depth"] = depth[kept]
    found["base"] = np.where(base[kept] < 0, NO_BASE_INDEX, place[base[kept]])
    first, found["pack"] = _first_places(pack_numbers[pack_rows[kept]])
    return packs[first], found


def _checked_frames(parts: Sequence[Part], depth_max: int) -> tuple[Rows, Numbers, Numbers]:
    """Return the frames of all ranks, the row of the base of each (-1: none), and the row of its pack."""
    counts = np.array([len(part.frames) for part in parts], np.int64)
    pack_counts = np.array([len(part.packs) for part in parts], np.int64)
    frames = joined((part.frames for part in parts), FRAME)
    rank_of = np.repeat(np.arange(len(parts)), counts)
    base = np.where(frames["base"] == NO_BASE_INDEX, -1, frames["base"] + np.repeat(np.cumsum(counts) - counts, counts))
    depth = frames["depth"].astype(np.int64)
    is_wrong = (frames["pack"] >= pack_counts[rank_of]) | (base >= np.arange(len(frames))) | (depth > depth_max)
    has_base = np.flatnonzero((base >= 0) & ~is_wrong)
    expected = np.zeros(len(frames), np.int64)
    expected[has_base] = depth[base[has_base]] + 1
    is_wrong |= depth != expected
    if is_wrong.any():
        rank = int(rank_of[np.flatnonzero(is_wrong)[0]])
        raise MalformedError(f"the part of rank {rank} has a frame without its pack or base", rank=rank)
    return frames, base, np.repeat(np.cumsum(pack_counts) - pack_counts, counts) + frames["pack"]


def _depths(base: Numbers) -> Numbers:
    """Return the number of bases below each frame; there must not be a cycle."""
    depth = np.zeros(len(base), np.int64)
    while True:
        deeper = np.where(base >= 0, depth[base] + 1, 0)
        if np.array_equal(deeper, depth):
            return depth
        depth = deeper


def _merged_packs(parts: Sequence[Part]) -> tuple[Rows, Numbers]:
    """Return the distinct packs of all ranks, and the number of the pack in each row of their tables."""
    rows = joined((part.packs for part in parts), PACK)
    chosen, numbers = _distinct(rows["pack_id"])
    distinct = rows[chosen]
    if rows.tobytes() != distinct[numbers].tobytes():
        raise MalformedError("ranks describe one pack differently")
    if rows["tier"].any():
        raise MalformedError("a part locates chunks in a tier")
    return distinct, numbers


def _merged_decisions(
    union: Union, parts: Sequence[Part], variants: Variants, storages: Rows
) -> tuple[DecisionsRecord, Rows] | None:
    """Return the decisions of all ranks. Of several for one storage, that of the lowest rank is listed."""
    decided = [part.decisions for part in parts if part.decisions is not None]
    if not decided:
        return None
    first = first_storages(union, storages_of(union, variants))
    rows = np.zeros(len(storages), DECISION)
    for name in ("full", "previous", "keyframe"):
        rows[name] = NO_BITS
    is_open = storages["nbytes"] > 0
    for rank, part in enumerate(parts):
        if not is_open.any():
            break
        own, index = part.unit_decisions, int(union.skeleton_of[rank])
        if len(own) and int(own["unit"].max()) >= len(union.numbers[index]):
            raise MalformedError(f"the part of rank {rank} names a unit that it does not have", rank=rank)
        storage = (first[union.numbers[index]] + copies_of(union, variants, rank, index))[own["unit"]]
        own, storage = own[is_open[storage]], storage[is_open[storage]]
        for name in DECISION.names or ():
            rows[name][storage] = own[name]
        is_open[storage] = False
    return _merged_record(decided), rows


def _merged_record(records: Sequence[DecisionsRecord]) -> DecisionsRecord:
    """Return the decision for the checkpoint: ``mixed`` if ranks use different bases."""
    counts = Counter(records)
    ((usual, count),) = counts.most_common(1)
    if len({(record.base, record.base_seq, record.keyframe_seq) for record in records}) == 1:
        return usual
    bases = [record for record in records if record.base != "none"]
    return DecisionsRecord(
        base="mixed",
        base_seq=max(record.base_seq or 0 for record in bases),
        keyframe_seq=min(record.keyframe_seq or 0 for record in bases),
        reason=f"{usual.reason} ({count} of {len(records)} ranks)",
    )
