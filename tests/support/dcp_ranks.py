"""Ranks of a DCP save in one process: each has a writer and data of its own, and calls are made as DCP makes them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckstore.ranks.dcp_writer import Writer


@dataclass
class Rank:
    """One rank: the boxes that it writes, by name and place. It is the planner, too."""

    boxes: dict = field(default_factory=dict)
    items: list = field(default_factory=list)
    mappings: dict = field(default_factory=dict)

    def add(self, name, whole, offsets, sizes):
        part = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        index = MetadataIndex(name, torch.Size(offsets))
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=whole.dtype), whole.shape)
        self.boxes[name, torch.Size(offsets)] = part
        self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def resolve_data(self, item):
        return self.boxes[item.index.fqn, item.index.offset]


def save_by(ranks, store, step, *, alter=None):
    """Save what these ranks hold. Return the receipt, and all results as they crossed between processes."""
    writers = [Writer(store, step) for _ in ranks]
    plans = [SavePlan(rank.items) for rank in ranks]
    for number, writer in enumerate(writers):
        writer.set_up_storage_writer(number == 0, rank=number, use_collectives=True)
    plans = writers[0].prepare_global_plan(plans)
    plans, metadata = create_default_global_save_plan(plans)
    triples = zip(writers, plans, ranks, strict=True)
    results = [writer.write_data(plan, rank).value() for writer, plan, rank in triples]
    results = pickle.loads(pickle.dumps(results))
    if alter is not None:
        alter(results)
    writers[0].finish(metadata, results)
    return writers[0].receipt
