"""Ranks of a DCP save in one process: each has a writer and data of its own, and calls are made as DCP makes them.

``run_ranks`` starts true ranks instead: processes in one gloo group.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckstore.ranks.dcp_writer import Writer

STAGE_SECONDS = 300
"""Far more than a group of ranks needs, even on a busy machine."""


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


def _run(rank, target, world, folder):
    """Be one rank. Never returns."""
    code = 1
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
        torch.set_num_threads(1)
        address = f"file://{folder}/rendezvous-{target.__name__}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
        target(rank, folder)
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run_stage(target, world, folder):
    """Run one group of ranks as forks of this process, which has imported torch already."""
    ranks = {}
    for rank in range(world):
        child = os.fork()
        if not child:
            _run(rank, target, world, folder)
        ranks[child] = rank
    failed = []
    until = time.monotonic() + STAGE_SECONDS
    while ranks:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            rank = ranks.pop(child, None)
            failed += [rank] if status and rank is not None else []
        elif time.monotonic() > until or failed:
            # The others may wait for a rank that has failed.
            for child in ranks:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            raise SystemExit(f"{target.__name__}: failed ranks {failed}, killed {sorted(ranks.values())}")
        else:
            time.sleep(0.02)
    if failed:
        raise SystemExit(f"{target.__name__}: failed ranks {failed}")


def run_ranks(folder, **stages):
    """Run functions of ``dcp_programs`` one after another, each by so many ranks: ``save_first=4, load_all=2``."""
    arguments = [f"{name}={world}" for name, world in stages.items()]
    path = os.pathsep.join((str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])))
    done = subprocess.run(
        [sys.executable, "-m", "support.dcp_ranks", str(folder), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]


if __name__ == "__main__":
    from support import dcp_programs

    for stage in sys.argv[2:]:
        stage_name, _, count = stage.partition("=")
        _run_stage(getattr(dcp_programs, stage_name), int(count), sys.argv[1])
