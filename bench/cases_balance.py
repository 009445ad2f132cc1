"""The case ranks_balance: how level the shares of ranks are. Bytes are counted, and nothing is stored."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from bench import rank_layouts
from bench.measure import Result, Sample, log
from bench.rank_layouts import ITEMSIZE, RankLayout
from bench.workbench import Bench
from ckstore.format.tensors import count_of

Loads = list[int]
"""The bytes that each rank writes."""

Way = Callable[[RankLayout], tuple[Loads, float]]
"""Divides a layout, and returns the loads and the seconds that planning took."""


def by_ckstore(layout: RankLayout) -> tuple[Loads, float]:
    """Divide replicated ranges into level spans."""
    from ckstore.ranks.spans import plan_spans

    groups, own = layout.split()
    steps = [rank_layouts.GRID_NBYTES] * len(layout.tensors)
    began = time.perf_counter()
    assigned = plan_spans(groups, steps, own)
    seconds = time.perf_counter() - began
    return [
        sum((span.hi - span.lo for span in spans), alone) for spans, alone in zip(assigned, own, strict=True)
    ], seconds


def by_dcp(layout: RankLayout) -> tuple[Loads, float]:
    """Let the planner of torch.distributed.checkpoint remove duplicates from the plans of all ranks."""
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint.planner import SavePlan

    plans = [SavePlan(items) for items in _items_of(layout)]
    began = time.perf_counter()
    kept = dedup_save_plans(plans)
    seconds = time.perf_counter() - began
    return [
        sum(count_of(tuple(item.tensor_data.chunk.sizes)) * ITEMSIZE for item in plan.items) for plan in kept
    ], seconds


def _items_of(layout: RankLayout) -> list[list[Any]]:
    """Return what each rank would write, as DCP's default planner lists it."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(torch.float32)
    items: list[list[Any]] = [[] for _ in range(layout.world)]
    for tensor in layout.tensors:
        for box, holders in tensor.boxes().items():
            offset = torch.Size(box.offsets)
            data = TensorWriteData(
                ChunkStorageMetadata(offset, torch.Size(box.sizes)), properties, torch.Size(tensor.shape)
            )
            item = WriteItem(MetadataIndex(tensor.name, offset), WriteItemType.SHARD, tensor_data=data)
            for rank in holders:
                items[rank].append(item)
    return items


def by_megatron_rule(layout: RankLayout) -> tuple[Loads, float]:
    """Give whole shards to ranks: those with the fewest holders first, then the largest, each to the least loaded.

    This is the rule of Megatron-Core's fully parallel saving.
    """
    shards = [
        (len(holders), -count_of(box.sizes) * ITEMSIZE, tensor.name, box.offsets, holders)
        for tensor in layout.tensors
        for box, holders in tensor.boxes().items()
    ]
    began = time.perf_counter()
    loads = [0] * layout.world
    for _, negative_nbytes, _, _, holders in sorted(shards):
        loads[min(holders, key=loads.__getitem__)] -= negative_nbytes
    return loads, time.perf_counter() - began


WAYS: dict[str, Way] = {
    "DCP": by_dcp,
    "Megatron's rule": by_megatron_rule,
    "ckstore": by_ckstore,
}


def ranks_balance(bench: Bench) -> Result:
    """Divide what several ranks hold: the highest number of bytes that a rank writes, relative to the mean."""
    result = Result("ranks_balance", "highest / mean", is_higher_better=False)
    result.setting = {"grid_nbytes": rank_layouts.GRID_NBYTES, "rounds": 1}
    result.columns = ("plan_ms",)
    layouts = [*rank_layouts.level_layouts(), rank_layouts.unequal_stages()]
    # Counts do not depend on what else the machine does. So there are no rounds, and the plan's time is only a fact.
    for layout in layouts[-2:] if bench.is_small else layouts:
        for name, way in WAYS.items():
            _measure(result, f"{layout.name}: {name}", layout, way)
    if not bench.is_small:
        many = rank_layouts.hsdp(64, 64)
        _measure(result, f"{many.name}: ckstore", many, by_ckstore)
    result.notes.append("DCP and Megatron's rule assign whole shards; DCP weighs each by the size of the whole tensor")
    return result


def _measure(result: Result, name: str, layout: RankLayout, way: Way) -> None:
    """Add one sample. A way that fails is recorded with the reason."""
    gc.collect()
    try:
        loads, seconds = way(layout)
    except Exception as error:
        result.unusable[name] = f"{type(error).__name__}: {error}"
        return
    if sum(loads) != layout.nbytes:
        raise AssertionError("not every byte is written once")
    sample = Sample(max(loads) * len(loads) / sum(loads), {"plan_ms": 1e3 * seconds, "ranks": layout.world})
    result.samples[name] = [sample]
    log(f"  {name}: {sample.value:.4f}")


CASES: dict[str, Callable[[Bench], Result]] = {"ranks_balance": ranks_balance}
