"""The cases ranks_reshard and ranks_identity: bytes that are read, and written again, when the ranks change.

Bytes are counted, and nothing is timed: the counts do not depend on what else the machine does. There are no rounds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench import histories, machine, rank_plans
from bench.measure import Result, Sample, log
from bench.played_ranks import PlayedRanks
from bench.rank_layouts import RankLayout
from bench.workbench import Bench, open_store

Change = tuple[RankLayout, RankLayout]

MATRICES = 4
"""Matrices of the state that is really stored."""


def ranks_reshard(bench: Bench) -> Result:
    """Restore on ranks with another layout: bytes that all ranks read, each alone, relative to those that they need."""
    result = Result("ranks_reshard", "read / needed", is_higher_better=False)
    layers = 1 if bench.is_small else rank_plans.LAYERS
    result.setting = {"layers": layers, "rounds": 1}
    result.columns = ("highest_rank", "one_host")
    manifests: dict[str, Any] = {}
    for saved, wanted in reshard_changes(layers, is_small=bench.is_small):
        name = f"{saved.name} to {wanted.name}"

        def by_dcp(change: Change) -> Sample:
            read, needed = rank_plans.read_by_dcp(*change)
            return Sample(read / needed)

        def by_ckstore(change: Change) -> Sample:
            before, after = change
            if before.name not in manifests:
                manifests.clear()
                manifests[before.name] = rank_plans.manifest_of(before)
            reads = rank_plans.read_by(manifests[before.name], after)
            needed, alone, together = (sum(each) for each in zip(*reads, strict=True))
            highest = max(read.alone / read.needed for read in reads)
            return Sample(alone / needed, {"highest_rank": highest, "one_host": together / needed})

        for way, count in (("DCP", by_dcp), ("ckstore", by_ckstore)):
            _count(result, f"{name}: {way}", partial(count, (saved, wanted)))
    result.notes.append("one_host: all ranks on one host, where they share what they read")
    result.notes.append("compression none. DCP reads each saved shard whole of which a rank needs a part")
    return result


def reshard_changes(layers: int, *, is_small: bool) -> list[Change]:
    """Return the changes of ``ranks_reshard``. Those from one layout are next to each other."""
    fsdp, tensor = partial(rank_plans.fsdp, layers=layers), partial(rank_plans.tensor_parallel, layers=layers)
    both = partial(rank_plans.fsdp_and_tensor_parallel, layers=layers)
    if is_small:
        return [(fsdp(2), fsdp(3)), (fsdp(2), tensor(2))]
    return [
        *((fsdp(8), wanted) for wanted in (fsdp(6), fsdp(16), tensor(8), both(2, 4))),
        (fsdp(64), fsdp(48)),
        (tensor(8), fsdp(8)),
        (both(4, 2), tensor(8)),
    ]


def ranks_identity(bench: Bench) -> Result:
    """Commit an unchanged state after a change of the ranks: the share of its bytes that is written again."""
    result = Result("ranks_identity", "written again", is_higher_better=False)
    layers = 1 if bench.is_small else rank_plans.LAYERS
    result.setting = {"layers": layers, "stored_nbytes": bench.nbytes, "rounds": 1}
    worlds = [(2, 3)] if bench.is_small else [(8, 6), (1, 8), (8, 16)]
    for before, after in worlds:
        change = rank_plans.fsdp(before, layers), rank_plans.fsdp(after, layers)
        _count(result, f"FSDP{before} to FSDP{after}: ckstore, planned", partial(_planned_again, change))
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
        return result
    machine.check_space(bench.folder, 3 * bench.nbytes)
    arrays = _matrices(bench)
    for before, after in worlds:
        name = f"FSDP{before} to FSDP{after}: ckstore, stored"
        _count(result, name, partial(_stored_again, bench, arrays, before, after))
    result.notes.append("planned: shapes of LLaMA 8B, chunks are compared by the ranges that they contain")
    result.notes.append("stored: four matrices of the size of the bench, really committed; compression none")
    result.notes.append("tools that write whole shards write everything again")
    return result


def _planned_again(change: Change) -> Sample:
    before, after = (rank_plans.written_by(layout) for layout in change)
    known = {content for written in before for content, _ in written.chunks()}
    again = sum(nbytes for written in after for content, nbytes in written.chunks() if content not in known)
    return Sample(again / change[1].nbytes)


def _matrices(bench: Bench) -> dict[str, np.ndarray]:
    """Return matrices with a number of rows that 2, 3, 6, 8 and 16 ranks divide unevenly, too."""
    columns = 1024
    rows = max(100, bench.nbytes // (4 * MATRICES * columns))
    donor = next(iter(bench.donors.values()))[0].reshape(-1)
    arrays = {}
    for number in range(MATRICES):
        array = np.empty((rows, columns), np.float32)
        histories._fill(array.reshape(-1), donor, np.random.default_rng(number))
        arrays[f"{number}.weight"] = array
    return arrays


def _stored_again(bench: Bench, arrays: dict[str, np.ndarray], before: int, after: int) -> Sample:
    place = bench.folder / "identity"
    open_store(place, "none").close()
    try:
        PlayedRanks(place, before).commit(arrays, 1)
        receipt = PlayedRanks(place, after).commit(arrays, 2)
    finally:
        machine.remove_tree(place)
    return Sample(receipt.bytes_written / receipt.bytes_state, {"bytes_written": receipt.bytes_written})


def _count(result: Result, name: str, count: Callable[[], Sample]) -> None:
    """Add one sample. What fails is recorded with the reason."""
    gc.collect()
    try:
        sample = count()
    except Exception as error:
        result.unusable[name] = f"{type(error).__name__}: {error}"
        return
    result.samples[name] = [sample]
    log(f"  {name}: {sample.value:.4f}")


CASES: dict[str, Callable[[Bench], Result]] = {"ranks_reshard": ranks_reshard, "ranks_identity": ranks_identity}
"""Cases of changes of the ranks."""
