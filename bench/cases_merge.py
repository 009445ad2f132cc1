"""The case ranks_plan: what rank 0 does for a checkpoint by very many ranks, with real code and fake chunks."""

from __future__ import annotations

import gc
import pickle
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import rank_parts
from bench.measure import Participant, Result, Sample, interleave, log
from bench.rank_parts import World
from bench.workbench import Bench

WORLDS, WORLDS_SMALL = (64, 256, 512, 1024, 4096), (4, 16)
LAYERS, LAYERS_SMALL = 32, 2
DCP_WORLD_MAX = 256
"""DCP's step takes minutes with more ranks."""


def ranks_plan(bench: Bench) -> Result:
    """Merge the parts of very many ranks into one manifest: the first time, and with an unchanged layout."""
    result = Result("ranks_plan", "processor s", is_higher_better=False)
    result.columns = ("wall", "decode", "parts_mb", "manifest_mb", "memory_mb")
    worlds, layers = (WORLDS_SMALL, LAYERS_SMALL) if bench.is_small else (WORLDS, LAYERS)
    result.setting = {"tensors": len(rank_parts.sizes_of(layers, 1)), "worlds": list(worlds), "rounds": bench.rounds}
    for count in worlds:
        log(f"making the parts of {count} ranks")
        _run(result, _participants(count, layers), bench.rounds)
        if count <= DCP_WORLD_MAX:
            # Once, because it is slow, and the difference is large.
            _run(result, {f"{count} ranks: DCP": _dcp_step(count, layers)}, 1)
            _compare(result, count)
    for kind in ("first", "again"):
        seconds = [result.median(f"{count} ranks: {kind}") for count in worlds]
        exponent = np.polyfit(np.log(worlds), np.log(seconds), 1)[0]
        result.notes.append(f"{kind}: the time grows with the number of ranks to the power of {exponent:.2f}")
    result.notes.append("decode: processor time of decoding the parts, which arrive one by one; not in the value")
    return result


def _run(result: Result, participants: dict[str, Participant], rounds: int) -> None:
    found = Result(result.case, result.unit, result.is_higher_better)
    interleave(found, participants, rounds)
    result.samples |= found.samples
    result.unusable |= found.unusable
    result.notes += found.notes


def _participants(count: int, layers: int) -> dict[str, Participant]:
    from ckstore.config import Limits
    from ckstore.ranks.merge import Merger

    worlds = [rank_parts.make_world(count, layers, seed) for seed in (1, 2)]
    mergers: list[Any] = []

    def first() -> Sample:
        mergers[:] = [Merger(Limits())]
        return _merge(worlds[0], mergers[0])

    def again() -> Sample:
        if not mergers:
            first()
        return _merge(worlds[1], mergers[0])

    return {f"{count} ranks: first": first, f"{count} ranks: again": again}


def _merge(world: World, merger: Any) -> Sample:
    """Make the bytes of a manifest: units, replicas, tiling check, chunks, frames, all checks of a reader, encoding."""
    from ckstore.config import Limits
    from ckstore.format.records import LogicalRecord
    from ckstore.ranks.part import Part

    facts = {"run": "main", "seq": 1, "step": 1, "time_ns": 1, "parent": None, "origin_id": None}
    record = LogicalRecord(**facts, is_archival=False, fidelity="exact", metrics={})
    gc.collect()
    opened = time.process_time()
    parts = [Part.decode(content) for content in world.encoded]
    began, began_wall = time.process_time(), time.perf_counter()
    union = merger.unite(parts, {world.skeleton.digest: world.skeleton})
    _, content = merger.merge(union, parts).encode(record, bytes(16), limits=Limits())
    seconds, wall = time.process_time() - began, time.perf_counter() - began_wall
    return _sample(seconds, wall, began - opened, sum(map(len, world.encoded)), len(content))


def _sample(seconds: float, wall: float, decode: float, parts_nbytes: int, manifest_nbytes: int) -> Sample:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    facts: dict[str, object] = {"wall": wall, "decode": decode, "memory_mb": memory}
    return Sample(seconds, facts | {"parts_mb": parts_nbytes / 1e6, "manifest_mb": manifest_nbytes / 1e6})


def _compare(result: Result, count: int) -> None:
    if (name := f"{count} ranks: DCP") in result.samples:
        ratio = result.median(name) / result.median(f"{count} ranks: first")
        result.notes.append(f"{count} ranks: DCP's global step takes {ratio:.0f} times as long")


def _dcp_step(count: int, layers: int) -> Participant:
    """Let torch's default planner make the global plan of the same shards."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    def plan_of(rank: int) -> SavePlan:
        items = []
        for name, numel in rank_parts.sizes_of(layers, count).items():
            offset, size = torch.Size([rank * numel // count]), torch.Size([numel // count])
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offset, size),
                properties=TensorProperties(dtype=torch.float32),
                size=torch.Size([numel]),
            )
            items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    sent = [pickle.dumps(plan_of(rank)) for rank in range(count)]

    def run() -> Sample:
        planner = DefaultSavePlanner(flatten_state_dict=False)
        gc.collect()
        opened = time.process_time()
        plans = [pickle.loads(content) for content in sent]
        began, began_wall = time.process_time(), time.perf_counter()
        _, metadata = planner.create_global_plan(plans)
        seconds, wall = time.process_time() - began, time.perf_counter() - began_wall
        return _sample(seconds, wall, began - opened, sum(map(len, sent)), len(pickle.dumps(metadata)))

    return run


CASES: dict[str, Callable[[Bench], Result]] = {"ranks_plan": ranks_plan}
