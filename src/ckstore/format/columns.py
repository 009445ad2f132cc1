"""Encode a manifest from numpy columns, without an object for each row: for the manifests of many ranks.

Invariants:
- ``encode_columns`` writes the bytes that ``manifest.encode_manifest`` writes for the same content, and refuses what it
  refuses.
- The arrays have the dtypes of this module, which are the rows of the tables on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckstore.config import Limits, is_name
from ckstore.errors import MalformedError
from ckstore.format.frame import ELEMENT_WIDTHS, FRAME_ALIGN, FRAME_HEADER_NBYTES
from ckstore.format.header import ManifestHeader, encode_header
from ckstore.format.location import (
    DECISION_ROW,
    FRAME_ROW,
    MODE_NAMES,
    NO_BASE_INDEX,
    PACK_NBYTES_MIN,
    PACK_ROW,
    TIER_COUNT_MAX,
    VIEWS,
    join_decisions,
    join_location,
)
from ckstore.format.logical import (
    CHUNK_ROW,
    PIECE_ROW,
    STORAGE_ROW,
    Loss,
    check_fidelity,
    check_losses,
    check_tensors,
    encoded_tensors,
    join_logical,
)
from ckstore.format.manifest import check_plain_size, header_of, join_manifest
from ckstore.format.pack import DIRECTORY_ENTRY_NBYTES, PACK_ALIGN, SUPERHEADER_NBYTES, TAIL_NBYTES
from ckstore.format.records import DecisionsRecord, LogicalRecord, encode_inner
from ckstore.format.tensors import StorageSpec, TensorSpec
from ckstore.format.tree import Node, encode_tree
from ckstore.hashing import digest_of

Rows = NDArray[Any]
"""An array of one of the dtypes below."""

STORAGE, PIECE, CHUNK = np.dtype([*STORAGE_ROW]), np.dtype([*PIECE_ROW]), np.dtype([*CHUNK_ROW])
PACK, FRAME, DECISION = np.dtype([*PACK_ROW]), np.dtype([*FRAME_ROW]), np.dtype([*DECISION_ROW])

_DEFAULT_LIMITS = Limits()


class Pieces:
    """The pieces of all storages. Many manifests repeat them, and they may be millions.

    Attributes:
        rows: The pieces, in the order of the storages; they never change.
        fits: The lengths of storages and chunks, and the numbers of pieces, that they were last checked against.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.fits: tuple[NDArray[Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """The scalars of a manifest.

    Args:
        record: Those that the checkpoint id covers.
        store_id: Id of the store.
        bytes_written: Bytes of the packs that the commit wrote.
        chunks_new: Chunks that the commit wrote.
        chunks_reused: Chunks in its plan, repetitions included, that it did not write.
        generation: The version of the manifest.
    """

    record: LogicalRecord
    store_id: bytes
    bytes_written: int
    chunks_new: int
    chunks_reused: int
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Columns:
    """The content of a manifest.

    Args:
        tree: The state tree.
        tensors: The tensors; a ``Table`` is encoded once.
        storages: The storages.
        pieces: Their pieces.
        chunks: The chunks.
        tiers: The names of the tiers that packs refer to, ascending.
        packs: The packs.
        frames: The frames.
        decisions: The decisions for the checkpoint, and one row for each storage; None if there are none.
        losses: The losses by storage.
    """

    tree: Node
    tensors: tuple[TensorSpec, ...]
    storages: Rows
    pieces: Pieces
    chunks: Rows
    tiers: list[str]
    packs: Rows
    frames: Rows
    decisions: tuple[DecisionsRecord, Rows] | None = None
    losses: Sequence[Loss] = ()


def encode_columns(columns: Columns, facts: Facts, *, limits: Limits = _DEFAULT_LIMITS) -> tuple[ManifestHeader, bytes]:
    """Return the header and the bytes of a manifest.

    Raises:
        MalformedError: A reader would refuse the manifest.
        UsageError: Its metrics do not fit into a header.
    """
    counts = (len(columns.storages), len(columns.pieces.rows), len(columns.chunks))
    tables = [_bytes(rows) for rows in (columns.storages, columns.pieces.rows, columns.chunks)]
    logical = join_logical(
        encode_inner(facts.record),
        encode_tree(columns.tree),
        encoded_tensors(columns.tensors),
        counts,
        tables,
        columns.losses,
    )
    decisions = b"" if columns.decisions is None else _encoded_decisions(*columns.decisions, len(columns.storages))
    location = join_location(columns.tiers, columns.packs.tobytes(), columns.frames.tobytes(), decisions)
    header = header_of(
        facts.record,
        digest_of(logical),
        store_id=facts.store_id,
        generation=facts.generation,
        bytes_written=facts.bytes_written,
        chunks_new=facts.chunks_new,
        chunks_reused=facts.chunks_reused,
        bytes_state=int(columns.storages["nbytes"].sum()),
        bytes_stored=int(columns.frames["stored_nbytes"].sum(dtype=np.uint64)),
        tensor_count=len(columns.tensors),
        chunk_count=len(columns.chunks),
        depth_max=int(columns.frames["depth"].max(initial=0)),
    )
    head = encode_header(header)
    check_plain_size(head, logical, location, limits)
    check_columns(columns, limits)
    check_fidelity(header.fidelity, columns.losses, None)
    return header, join_manifest(facts.store_id, head, logical, location)


def _bytes(rows: Rows) -> memoryview:
    return np.ascontiguousarray(rows).view(np.uint8).data


def _encoded_decisions(record: DecisionsRecord, rows: Rows, storage_count: int) -> bytes:
    if len(rows) != storage_count:
        raise MalformedError("a manifest has decisions for another number of storages")
    if (rows["mode"] >= len(MODE_NAMES)).any() or (rows["view"] >= len(VIEWS)).any():
        raise MalformedError("the decision for a storage has fields out of range")
    return join_decisions(record, rows.tobytes())


def check_columns(columns: Columns, limits: Limits) -> None:
    """Check the content of a manifest, as ``check_logical`` and ``check_location`` do.

    Raises:
        MalformedError: A reader would refuse it.
    """
    _check_elements(columns.storages, "storage")
    _check_elements(columns.chunks, "chunk")
    lengths = columns.chunks["nbytes"]
    if not ((lengths > 0) & (lengths <= limits.chunk_nbytes_max)).all():
        raise MalformedError("a chunk is over the size limit or empty")
    _check_pieces(columns.pieces, columns.storages, columns.chunks)
    check_tensors(columns.tensors, columns.storages["nbytes"].tolist(), None)
    if columns.losses:
        rows = columns.storages.tolist()
        specs = [StorageSpec(nbytes, width, bool(flag), ()) for nbytes, _, width, flag, _ in rows]
        check_losses(columns.losses, specs, None)
    _check_packs(columns.packs, columns.tiers, limits)
    _check_ids(columns.chunks["chunk_id"], columns.frames)
    _check_bases(columns.frames, limits)
    _check_places(columns.packs, columns.frames, limits)


def _check_elements(rows: Rows, what: str) -> None:
    if not np.isin(rows["element_width"], [*ELEMENT_WIDTHS]).all():
        raise MalformedError(f"a {what} has an invalid element width")
    if (rows["is_float"] > 1).any() or rows["zero"].any():
        raise MalformedError(f"reserved fields of a {what} are set")


def _check_pieces(pieces: Pieces, storages: Rows, chunks: Rows) -> None:
    facts = (storages["nbytes"].copy(), storages["pieces"].copy(), chunks["nbytes"].copy())
    if pieces.fits is not None and all(map(np.array_equal, pieces.fits, facts)):
        return
    rows, (nbytes, counts, lengths) = pieces.rows, facts
    if int(counts.sum(dtype=np.uint64)) != len(rows):
        raise MalformedError("the storages of a manifest need another number of pieces than it lists")
    if len(rows) and (int(rows["chunk"].max()) >= len(lengths) or not rows["nbytes"].all()):
        raise MalformedError("a piece of a storage is empty, or its chunk does not exist")
    ends = rows["offset"].astype(np.uint64)
    ends += rows["nbytes"]
    if (ends > lengths[rows["chunk"]]).any():
        raise MalformedError("a piece of a storage reaches beyond its chunk")
    sums = np.zeros(len(rows) + 1, np.uint64)
    np.cumsum(rows["nbytes"], dtype=np.uint64, out=sums[1:])
    marks = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=marks[1:])
    if not np.array_equal(np.diff(sums[marks]), nbytes):
        raise MalformedError("the pieces of a storage do not add up to it")
    is_used = np.zeros(len(lengths), bool)
    is_used[rows["chunk"]] = True
    if not is_used.all():
        raise MalformedError("a manifest lists a chunk that no storage needs")
    pieces.fits = facts


def _check_packs(packs: Rows, tiers: list[str], limits: Limits) -> None:
    used = np.unique(packs["tier"]).tolist()
    if used != list(range(len(tiers))) or tiers != sorted(set(tiers)) or len(tiers) > TIER_COUNT_MAX:
        raise MalformedError("a manifest lists a tier twice, or a tier without packs, or too many tiers")
    if not all(map(is_name, tiers)) or packs["zero"].any() or packs["zero_too"].any():
        raise MalformedError("a pack of a manifest has a malformed tier, or reserved fields are set")
    nbytes = packs["nbytes"]
    if (nbytes % PACK_ALIGN).any() or not ((nbytes >= PACK_NBYTES_MIN) & (nbytes <= limits.pack_nbytes_max)).all():
        raise MalformedError("a manifest gives a pack an impossible size")
    if len(np.unique(numbered(packs["pack_id"]))) != len(packs):
        raise MalformedError("a manifest names a pack twice")


def _check_ids(chunk_ids: Rows, frames: Rows) -> None:
    """Check that chunks and frames do not repeat, that each chunk has a frame, and that each frame is needed."""
    # Row 0 is the id that no chunk may have.
    none = np.zeros(1, chunk_ids.dtype)
    numbers = numbered(np.concatenate([none, chunk_ids, frames["chunk_id"]]))
    chunks, located = numbers[1 : len(chunk_ids) + 1], numbers[len(chunk_ids) + 1 :]
    count = int(numbers.max()) + 1
    chunk_counts, frame_counts = np.bincount(chunks, minlength=count), np.bincount(located, minlength=count)
    if chunk_counts.max() > 1 or chunk_counts[numbers[0]]:
        raise MalformedError("a manifest lists a chunk twice")
    if frame_counts.max() > 1 or frame_counts[numbers[0]]:
        raise MalformedError("a manifest locates a chunk twice")
    if (chunk_counts > frame_counts).any():
        raise MalformedError("a manifest does not locate all of its chunks")
    is_needed = chunk_counts[located] > 0
    bases = frames["base"][frames["base"] != NO_BASE_INDEX]
    is_needed[bases[bases < len(frames)]] = True
    if not is_needed.all():
        raise MalformedError("a manifest locates a frame that it does not need")


def _check_bases(frames: Rows, limits: Limits) -> None:
    base, depth = frames["base"], frames["depth"].astype(np.int64)
    with_base = np.flatnonzero(base != NO_BASE_INDEX)
    if (base[with_base] >= with_base).any():
        raise MalformedError("the base of a frame does not precede it")
    expected = np.zeros(len(frames), np.int64)
    expected[with_base] = depth[base[with_base]] + 1
    if not np.array_equal(depth, expected) or (depth > limits.depth_max).any():
        raise MalformedError("the depth of a frame is wrong or over the limit")


def _check_places(packs: Rows, frames: Rows, limits: Limits) -> None:
    pack, offset = frames["pack"], frames["offset"]
    stored = frames["stored_nbytes"].astype(np.uint64)
    if (pack >= len(packs)).any():
        raise MalformedError("a frame is in a pack that the manifest does not list")
    if not ((stored > 0) & (stored <= limits.chunk_nbytes_max)).all() or (offset % FRAME_ALIGN).any():
        raise MalformedError("a frame is misplaced, empty or over the chunk limit")
    if (offset > limits.pack_nbytes_max).any():
        raise MalformedError("a frame reaches into the directory or beyond the end of its pack")
    order = np.lexsort((offset, pack))
    pack, offset, ends = pack[order], offset[order], (offset + FRAME_HEADER_NBYTES + stored)[order]
    is_same = pack[1:] == pack[:-1]
    if (offset < SUPERHEADER_NBYTES).any() or (is_same & (offset[1:] < ends[:-1])).any():
        raise MalformedError("frames overlap each other or a superheader")
    counts = np.bincount(pack, minlength=len(packs)).astype(np.uint64)
    if not counts.all():
        raise MalformedError("a manifest names a pack that it does not need")
    last = ends[np.cumsum(counts).astype(np.int64) - 1]
    directory = -(-(counts.astype(np.int64) * DIRECTORY_ENTRY_NBYTES) // PACK_ALIGN) * PACK_ALIGN
    if (last.astype(np.int64) > packs["nbytes"].astype(np.int64) - TAIL_NBYTES - directory).any():
        raise MalformedError("a frame reaches into the directory or beyond the end of its pack")


def joined(columns: Iterable[Rows], dtype: np.dtype[Any]) -> Rows:
    """Return the rows of all ranks. Joining bytes is much faster than joining rows."""
    return np.frombuffer(bytearray().join([rows.data for rows in columns]), dtype)


def numbered(ids: Rows) -> NDArray[np.int64]:
    """Return a number for each id, equal for equal ids and for these only. Ids have a multiple of 8 bytes."""
    if not len(ids):
        return np.zeros(0, np.int64)
    words = np.ascontiguousarray(ids).view(np.uint64).reshape(len(ids), -1)
    order = np.argsort(words[:, 0])
    first = words[order, 0]
    is_new = np.append(True, first[1:] != first[:-1])
    again = np.flatnonzero(~is_new)
    # Equal first words of different ids are rare: then all words are needed to bring equal ids together.
    if (words[order[again]] != words[order[again - 1]]).any():
        order = np.lexsort(words.T[::-1])
        found = words[order]
        is_new = np.append(True, (found[1:] != found[:-1]).any(axis=1))
    numbers = np.empty(len(ids), np.int64)
    numbers[order] = np.cumsum(is_new) - 1
    return numbers
