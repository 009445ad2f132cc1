"""The cases ranks_*: what rank 0 does for a checkpoint by very many ranks, with real code and fake bytes."""

from __future__ import annotations

import gc
import math
import pickle
import resource
import time
from dataclasses import dataclass

import numpy as np

from bench.measure import Result, Sample, interleave, log
from bench.workbench import Bench
from ckstore.config import Limits
from ckstore.format.columns import CHUNK, FRAME, PACK
from ckstore.format.frame import FRAME_HEADER_NBYTES
from ckstore.format.location import NO_BASE_INDEX
from ckstore.format.pack import DIRECTORY_ENTRY_NBYTES, PACK_ALIGN, SUPERHEADER_NBYTES, TAIL_NBYTES
from ckstore.format.records import DecisionsRecord, LogicalRecord
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import DictNode, TensorNode, ValueNode
from ckstore.format.wire import align_up
from ckstore.ranks.arrays import ArraySpec, Layout, Unit
from ckstore.ranks.merge import Merger
from ckstore.ranks.part import CHECK, RANGE, UNIT_DECISION, Part, Skeleton

WORLDS = (64, 256, 512, 1024, 4096)
WORLDS_SMALL = (4, 16)
DCP_WORLD_MAX = 256
"""DCP's step takes minutes with more ranks."""

LAYERS, LAYERS_SMALL = 32, 2
SHARED_NBYTES_MAX, CHUNK_NBYTES_MAX = 256 << 10, 4 << 20


def tensors_of_model(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of LLaMA-8B's tensors, with two moments of Adam: 873 for 32 layers."""
    hidden, wide, kv, words = 4096, 14336, 1024, 128256
    layer = {
        "q": (hidden, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, hidden),
        "gate": (wide, hidden),
        "up": (wide, hidden),
        "down": (hidden, wide),
        "norm1": (hidden,),
        "norm2": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"embedding": (words, hidden)}
    for number in range(layers):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes |= {"norm": (hidden,), "output": (words, hidden)}
    return [(f"{kind}.{name}", shape) for kind in ("model", "exp_avg", "exp_avg_sq") for name, shape in shapes.items()]


@dataclass
class World:
    """The parts of one world, as rank 0 receives them."""

    skeleton: Skeleton
    parts: list[Part]
    encoded: list[bytes]


def make_world(count: int, layers: int, seed: int) -> World:
    """Return the parts of FSDP ranks: every rank has an equal range of every tensor, and random chunk ids."""
    shapes = tensors_of_model(layers)
    # The fake tensors have a multiple of elements per rank, so that every rank has a range of every tensor.
    rounded = [(name, (align_up(math.prod(shape), count),)) for name, shape in shapes]
    layout = Layout(("fsdp",), (count,), tuple(range(count)), "(Shard(dim=0),)")
    units = [Unit((name,), 4 * shape[0], 4, True, ArraySpec(shape, (), 0)) for name, shape in rounded]
    skeleton = Skeleton(
        DictNode(
            "dict",
            (*(name for name, _ in rounded), "step"),
            (*(TensorNode(index) for index in range(len(rounded))), ValueNode("int", seed)),
        ),
        tuple(TensorSpec("torch", "float32", shape, (1,), index, 0) for index, (_, shape) in enumerate(rounded)),
        tuple(units),
        (layout,),
    )
    shares = np.array([unit.nbytes // count for unit in units], np.int64)
    ranges, lengths = _plan(shares)
    rng = np.random.default_rng(seed)
    parts = [_part(rank, skeleton, ranges, lengths, shares, rng) for rank in range(count)]
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


def _part(
    rank: int,
    skeleton: Skeleton,
    ranges: np.ndarray,
    lengths: list[int],
    shares: np.ndarray,
    rng: np.random.Generator,
) -> Part:
    own = ranges.copy()
    own["offset"] += (rank * shares[own["unit"]]).astype(np.uint64)
    chunks, frames, packs = np.zeros(len(lengths), CHUNK), np.zeros(len(lengths), FRAME), np.zeros(1, PACK)
    chunks["chunk_id"] = frames["chunk_id"] = np.frombuffer(rng.bytes(32 * len(lengths)), "V32")
    chunks["nbytes"], chunks["element_width"], chunks["is_float"] = lengths, 4, 1
    # Coded chunks have about 0.8 of their bytes, and never the same number.
    frames["stored_nbytes"] = [int(nbytes * rng.uniform(0.75, 0.85)) + 1 for nbytes in lengths]
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
        ranges=own,
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


RECORD = LogicalRecord(
    run="main", seq=1, step=1, time_ns=1, parent=None, origin_id=None, is_archival=False, fidelity="exact", metrics={}
)


def publishable(merger: Merger, world: World, parts: list[Part]) -> bytes:
    """Return the bytes of the manifest: units, merge, tiling check, all checks of a reader, encoding."""
    union = merger.unite(parts, {world.skeleton.digest: world.skeleton})
    return merger.merge(union, parts).encode(RECORD, bytes(16), limits=Limits())[1]


def ranks_plan(bench: Bench) -> Result:
    """Merge the parts of very many ranks into one manifest: the first time, and with an unchanged layout."""
    result = Result("ranks_plan", "s", is_higher_better=False, columns=("decode_seconds", "parts_mb", "manifest_mb"))
    worlds, layers = (WORLDS_SMALL, LAYERS_SMALL) if bench.is_small else (WORLDS, LAYERS)
    result.setting = {"tensors": len(tensors_of_model(layers)), "worlds": list(worlds), "rounds": bench.rounds}
    for count in worlds:
        log(f"parts of {count} ranks")
        _measure(result, count, layers, bench.rounds)
        if count <= DCP_WORLD_MAX:
            _measure_dcp(result, count, layers)
    _note_growth(result, worlds)
    return result


def _measure(result: Result, count: int, layers: int, rounds: int) -> None:
    worlds = [make_world(count, layers, seed) for seed in (1, 2)]
    mergers: list[Merger] = []

    def timed(world: World, merger: Merger) -> Sample:
        began = time.perf_counter()
        parts = [Part.decode(content) for content in world.encoded]
        decoded = time.perf_counter()
        content = publishable(merger, world, parts)
        seconds = time.perf_counter() - decoded
        facts: dict[str, object] = {
            "decode_seconds": decoded - began,
            "parts_mb": sum(map(len, world.encoded)) / 1e6,
            "manifest_mb": len(content) / 1e6,
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        }
        return Sample(seconds, facts)

    def first() -> Sample:
        gc.collect()
        mergers[:] = [Merger(Limits())]
        return timed(worlds[0], mergers[0])

    def again() -> Sample:
        if not mergers:
            first()
        gc.collect()
        return timed(worlds[1], mergers[0])

    interleave(result, {f"{count} ranks, first": first, f"{count} ranks, again": again}, rounds)


def _measure_dcp(result: Result, count: int, layers: int) -> None:
    """DCP's global step on the same shapes: unpickle the plans, merge and validate them."""
    import torch
    from torch.distributed.checkpoint.default_planner import _validate_global_plan, create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    shapes = [(name, align_up(math.prod(shape), count)) for name, shape in tensors_of_model(layers)]

    def plan_of(rank: int) -> SavePlan:
        items = []
        for name, numel in shapes:
            offset, size = torch.Size([rank * numel // count]), torch.Size([numel // count])
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offset, size),
                properties=TensorProperties(dtype=torch.float32),
                size=torch.Size([numel]),
            )
            items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    pickled = [pickle.dumps(plan_of(rank)) for rank in range(count)]

    def run() -> Sample:
        gc.collect()
        began = time.perf_counter()
        plans = [pickle.loads(content) for content in pickled]
        decoded = time.perf_counter()
        plans, metadata = create_default_global_save_plan(plans)
        assert _validate_global_plan(plans, metadata)
        seconds = time.perf_counter() - decoded
        content = pickle.dumps(metadata)
        facts: dict[str, object] = {
            "decode_seconds": decoded - began,
            "parts_mb": sum(map(len, pickled)) / 1e6,
            "manifest_mb": len(content) / 1e6,
        }
        return Sample(seconds, facts)

    name = f"{count} ranks, DCP's global step"
    interleave(result, {name: run}, 1)
    mine = result.median(f"{count} ranks, first")
    result.notes.append(f"{count} ranks: DCP's global step takes {result.median(name) / mine:.0f} times as long")


def _note_growth(result: Result, worlds: tuple[int, ...]) -> None:
    for kind in ("first", "again"):
        seconds = [result.median(f"{count} ranks, {kind}") for count in worlds]
        exponent = np.polyfit(np.log(worlds), np.log(seconds), 1)[0]
        result.notes.append(f"{kind}: the time grows with the ranks to the power of {exponent:.2f}")
    result.notes.append(
        "peak memory of the process: " + str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000) + " MB"
    )
