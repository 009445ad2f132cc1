"""The case ranks_compare: what it costs to compare the replicas of a state, in full or by a sample."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench import histories, machine
from bench.measure import Participant, Result, Sample, interleave
from bench.played_ranks import PlayedRanks
from bench.processor_time import Meter
from bench.workbench import Bench, open_store

WORLD = 4
TRAINING_SHARE = 0.02
"""The share of a training process's time that a background comparison may take, at most."""

FULL, SAMPLED, NOT = "compared in full", "Replicated(1/64)", "Replicated(0)"


def ranks_compare(bench: Bench) -> Result:
    """Commit plain tensors that four ranks hold: processor time of all ranks, by how much of them is compared."""
    result = bench.result("ranks_compare", "processor s", is_higher_better=False)
    result.columns = ("compared_gb", "wall")
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
        return result
    tensors = {f"{number}.{name}": each for number, (name, each) in enumerate(histories.tensors_of(bench.state))}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    result.setting["ranks"] = WORLD
    machine.check_space(bench.folder, 2 * nbytes)
    participants = _participants(bench, tensors)
    next(iter(participants.values()))()
    interleave(result, participants, bench.rounds)
    _note(result, nbytes)
    return result


def _participants(bench: Bench, tensors: dict[str, torch.Tensor]) -> dict[str, Participant]:
    from ckstore import Replicated

    shares = {FULL: None, SAMPLED: 1 / 64, NOT: 0.0}
    states: dict[str, Any] = {
        name: {"state": tensors if share is None else Replicated(tensors, share)} for name, share in shares.items()
    }
    alone = {"1 rank": partial(_commit, bench, states[FULL], 1)}
    return alone | {f"{WORLD} ranks: {name}": partial(_commit, bench, state, WORLD) for name, state in states.items()}


_numbers = itertools.count()


def _commit(bench: Bench, state: Any, world: int) -> Sample:
    """Commit to a new store. The ranks take turns in this process, and hold the same memory."""
    place, meter = bench.folder / f"compared-{next(_numbers)}", Meter()
    open_store(place, "none").close()
    ranks = PlayedRanks(place, world)
    try:
        with meter.running():
            receipt = ranks.commit_states([state] * world, 1)
    finally:
        machine.remove_tree(place)
    if receipt.warnings:
        raise AssertionError(f"replicas differ: {receipt.warnings[0]}")
    facts = {"compared_gb": ranks.compared_nbytes / 1e9, "wall": meter.wall, "bytes_written": receipt.bytes_written}
    return Sample(meter.seconds, facts)


def _note(result: Result, nbytes: int) -> None:
    names = [f"{WORLD} ranks: {name}" for name in (FULL, NOT)]
    if not all(name in result.samples for name in names):
        return
    full, without = (result.median(name) for name in names)
    each = max(0.0, full - without) / WORLD
    result.notes.append(
        f"in full, a rank compares its {nbytes / 1e9:.2f} GB in {each:.3f} processor s: "
        f"{TRAINING_SHARE:.0%} of one core with a commit every {each / TRAINING_SHARE:.0f} s"
    )
    result.notes.append(
        "compared_gb: bytes of all ranks that are hashed only to be compared; the ranks take turns in one process"
    )


CASES: dict[str, Callable[[Bench], Result]] = {"ranks_compare": ranks_compare}
"""The case of replicas."""
