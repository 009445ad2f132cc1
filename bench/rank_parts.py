"""Parts of the ranks of a large model, as rank 0 receives them: real encodings of chunks that do not exist."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bench.rank_layouts import ITEMSIZE, MOMENTS, llama_8b
from ckstore.commit.chunking import SHARED_NBYTES_MAX
from ckstore.config import Limits
from ckstore.format.columns import CHUNK, FRAME, PACK
from ckstore.format.frame import FRAME_HEADER_NBYTES
from ckstore.format.location import NO_BASE_INDEX
from ckstore.format.pack import DIRECTORY_ENTRY_NBYTES, PACK_ALIGN, SUPERHEADER_NBYTES, TAIL_NBYTES
from ckstore.format.records import DecisionsRecord
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import DictNode, TensorNode, ValueNode
from ckstore.format.wire import align_up
from ckstore.ranks.arrays import ArraySpec, Layout, Unit
from ckstore.ranks.part import CHECK, RANGE, UNIT_DECISION, Part, Skeleton

CHUNK_NBYTES_MAX = Limits().chunk_nbytes_max


def sizes_of(layers: int, ranks: int) -> dict[str, int]:
    """Return the elements of the tensors of LLaMA 8B and of its moments, each a multiple of the ranks."""
    shapes = list(llama_8b(range(layers)))
    counts = {name: align_up(math.prod(shape), ranks) for name, shape in shapes}
    moments = {f"optim.{name}.{moment}": count for name, count in counts.items() for moment in MOMENTS}
    return counts | moments


@dataclass
class World:
    """The parts of one world, as rank 0 receives them."""

    skeleton: Skeleton
    parts: list[Part]
    encoded: list[bytes]


def make_world(count: int, layers: int, seed: int) -> World:
    """Return the parts of FSDP ranks: every rank has an equal range of every tensor. ``seed`` draws the chunk ids."""
    sizes = sizes_of(layers, count)
    layout = Layout(("fsdp",), (count,), tuple(range(count)), "(Shard(dim=0),)")
    skeleton = Skeleton(
        DictNode(
            "dict", (*sizes, "step"), (*(TensorNode(index) for index in range(len(sizes))), ValueNode("int", seed))
        ),
        tuple(TensorSpec("torch", "float32", (numel,), (1,), index, 0) for index, numel in enumerate(sizes.values())),
        tuple(
            Unit((name,), ITEMSIZE * numel, ITEMSIZE, True, ArraySpec((numel,), (), 0)) for name, numel in sizes.items()
        ),
        (layout,),
    )
    shares = np.array([unit.nbytes // count for unit in skeleton.units], np.int64)
    ranges, lengths = _plan(shares)
    rng = np.random.default_rng(seed)
    parts = []
    for rank in range(count):
        own = ranges.copy()
        own["offset"] += (rank * shares[own["unit"]]).astype(np.uint64)
        parts.append(fake_part(rank, skeleton, own, lengths, rng, is_coded=True))
    return World(skeleton, parts, [part.encode() for part in parts])


def _plan(shares: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Cut the ranges of one rank into chunks: large ranges alone, small ones together."""
    rows: list[tuple[int, int, int, int, int]] = []
    lengths: list[int] = []
    shared = -1
    for unit, share in enumerate(shares.tolist()):
        if share < SHARED_NBYTES_MAX:
            if shared < 0 or lengths[shared] + share > CHUNK_NBYTES_MAX:
                shared = len(lengths)
                lengths.append(0)
            rows.append((unit, 0, share, shared, lengths[shared]))
            lengths[shared] += share
            continue
        for offset in range(0, share, CHUNK_NBYTES_MAX):
            rows.append((unit, offset, min(CHUNK_NBYTES_MAX, share - offset), len(lengths), 0))
            lengths.append(rows[-1][2])
    return np.array(rows, RANGE), lengths


def fake_part(
    rank: int, skeleton: Skeleton, ranges: np.ndarray, lengths: list[int], rng: np.random.Generator, *, is_coded: bool
) -> Part:
    """Return the part of a rank whose chunks have drawn ids.

    Args:
        rank: The rank.
        skeleton: Its skeleton.
        ranges: What it contributes, as ``RANGE``.
        lengths: Plain bytes of each chunk.
        rng: Draws the ids.
        is_coded: Whether chunks are stored with fewer bytes.
    """
    chunks, frames, packs = np.zeros(len(lengths), CHUNK), np.zeros(len(lengths), FRAME), np.zeros(1, PACK)
    chunks["chunk_id"] = frames["chunk_id"] = np.frombuffer(rng.bytes(32 * len(lengths)), "V32")
    chunks["nbytes"], chunks["element_width"], chunks["is_float"] = lengths, 4, 1
    # Coded chunks have about 0.8 of their bytes, and never the same number.
    coded = (int(nbytes * rng.uniform(0.75, 0.85)) + 1 for nbytes in lengths)
    frames["stored_nbytes"] = list(coded) if is_coded else lengths
    frames["base"] = NO_BASE_INDEX
    offset = SUPERHEADER_NBYTES
    for row in range(len(lengths)):
        frames["offset"][row] = offset
        offset += align_up(FRAME_HEADER_NBYTES + int(frames["stored_nbytes"][row]), 64)
    packs["pack_id"], packs["directory_digest"] = rng.bytes(16), rng.bytes(32)
    packs["nbytes"] = align_up(offset, PACK_ALIGN) + align_up(DIRECTORY_ENTRY_NBYTES * len(lengths), PACK_ALIGN)
    packs["nbytes"] += TAIL_NBYTES
    decisions = np.zeros(len(skeleton.units), UNIT_DECISION)
    decisions["unit"], decisions["mode"] = np.arange(len(skeleton.units)), 1
    return Part(
        rank=rank,
        attempt=bytes(16),
        skeleton=skeleton.digest,
        host=f"node{rank // 8}",
        ranges=ranges,
        chunks=chunks,
        packs=packs,
        frames=frames,
        checks=np.empty(0, CHECK),
        decisions=DecisionsRecord(base="none", base_seq=None, keyframe_seq=None, reason="keyframe: no base"),
        unit_decisions=decisions,
        bytes_written=int(packs["nbytes"][0]),
        chunks_new=len(lengths),
        chunks_delta=0,
        chunks_derived=0,
        chunks_planned=len(lengths),
    )
