"""The policies of ``resume_gap``: ckstore's, with a real store, and the baselines.

A chain begins with an exact keyframe. For ckstore's policies every further state is committed to a store with
``Policy(fidelity=...)`` and restored; bits are those of the frames, from the manifest's table of losses. Baselines map
arrays to arrays. Both are closed loops: every residual is relative to the reconstruction of the previous checkpoint, so
that errors accumulate in the last state.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench import resume_baselines as baselines
from bench.excp import Pruning
from bench.resume_baselines import Bits, Maker
from bench.resume_training import MOMENTS, ROLES, Plan, Trained
from bench.training import Arrays
from ckstore.config import FirstMomentSettings, LowRank, Residual, SecondMomentSettings, TensorSettings, WeightSettings

KEYFRAME_EVERY = Residual().keyframe_every
"""Interval of exact checkpoints, unless a policy says otherwise."""

_ROLE_OF = {"weight": "w", "first": "m", "second": "v"}
# Where the moments of exact tensors cannot be separated, they are counted as in the baselines.
_NO_BITS: Bits = {"w": 0.0, "m": 0.0, "v": 0.0, "exact": 0.0}


@dataclass(frozen=True)
class Link:
    """One reconstructed state of the chain.

    Args:
        step: Its step.
        arrays: The restored values.
        bits: Bits of the whole state, by role.
        facts: Further results: bytes written, and the greatest update that the store's guard allows.
    """

    step: int
    arrays: Arrays
    bits: Bits
    facts: dict[str, float]


@dataclass(frozen=True)
class CandidatePolicy:
    """A policy.

    Args:
        name: Its name in tables.
        kind: ``"ckstore"``, ``"baseline"`` (a compression method) or ``"yardstick"``.
        residual: ckstore's fidelity.
        make: A baseline.
        skipped_batches: Batches that the resumed run skips: another order of the data.
        is_named: Training is also resumed from the middle of the chain.
    """

    name: str
    kind: str
    residual: Residual | None = None
    make: Maker | None = None
    skipped_batches: int = 0
    is_named: bool = False

    def chain(self, trained: Trained, folder: Path) -> Iterator[Link]:
        """Yield the states after the keyframe."""
        if self.residual is not None:
            yield from _stored(trained, self.residual, folder)
            return
        assert self.make is not None, "a candidate is a fidelity or a baseline"
        steps = trained.plan.chain
        if self.kind == "yardstick":
            # This baseline does not depend on earlier reconstructions.
            steps = steps[-2:]
        before = trained.state(steps[0])
        for step in steps[1:]:
            before, bits = self.make(trained.state(step), before)
            yield Link(step, before, bits, {})


def outer(weights: float, first: float, second: float, rank_max: int = 64) -> Residual:
    """Return a fidelity of outer products alone, with these steps."""
    settings = TensorSettings(
        WeightSettings(step=max(0.25, weights / 2), low_rank=LowRank(weights, rank_max, 0.9)),
        FirstMomentSettings(step=max(0.25, 2 * first), low_rank=LowRank(first, rank_max, 0.9)),
        SecondMomentSettings(low_rank=LowRank(second, rank_max, 1.0)),
    )
    return Residual(f"outer-{weights:g}-{first:g}-{second:g}", settings, keyframe_every=1000)


def near_of(weights: int, first: int, second: int) -> Residual:
    """Return near() with other maximum ranks for changes, first moments and second moments."""
    near = Residual.near(keyframe_every=1000)

    def with_directions(settings: Any, rank_max: int) -> Any:
        return replace(settings, low_rank=replace(settings.low_rank, rank_max=rank_max))

    own = near.tensors
    tensors = TensorSettings(
        with_directions(own.weights, weights), with_directions(own.first, first), with_directions(own.second, second)
    )
    return replace(near, name=f"near-{weights}-{first}-{second}", tensors=tensors)


def grids(weights: float, first: float) -> Residual:
    """Return a fidelity of grids and rank-1 second moments, without outer products."""
    settings = TensorSettings(WeightSettings(step=weights), FirstMomentSettings(step=first), SecondMomentSettings())
    return Residual(f"grids-{weights:g}-{first:g}", settings, keyframe_every=1000)


def candidate_policies() -> list[CandidatePolicy]:
    """Return all policies, the most important ones first."""
    endless: dict[str, Any] = {"keyframe_every": 1000}
    named: list[CandidatePolicy] = [
        CandidatePolicy("near()", "ckstore", Residual.near(**endless), is_named=True),
        CandidatePolicy("small()", "ckstore", Residual.small(**endless), is_named=True),
        CandidatePolicy("ExCP, c = 2.5", "baseline", make=baselines.Excp(), is_named=True),
    ]
    frontier = [
        CandidatePolicy(
            f"outer {weights:g} / {first:g} / {second:g}", "ckstore", outer(weights, first, second, rank_max)
        )
        for weights, first, second, rank_max in (
            (4.0, 0.8, 0.8, 64),
            (1.0, 0.2, 0.8, 64),
            (0.5, 0.1, 0.1, 192),
            (3.0, 0.6, 0.8, 64),
        )
    ]
    return [
        *named,
        CandidatePolicy("no moments", "yardstick", make=baselines.no_moments),
        CandidatePolicy("stale weights", "yardstick", make=baselines.stale_weights),
        CandidatePolicy("weights in bf16", "yardstick", make=baselines.weights_bf16),
        CandidatePolicy("moments in 8 bits", "yardstick", make=baselines.moments_8_bit),
        CandidatePolicy("8 bits, block-wise", "baseline", make=baselines.block_wise(8)),
        CandidatePolicy("4 bits, block-wise", "baseline", make=baselines.block_wise(4)),
        *frontier,
        CandidatePolicy("near() of 96 / 96 / 64", "ckstore", near_of(96, 96, 64)),
        CandidatePolicy("grids 0.5 / 0.5", "ckstore", grids(0.5, 0.5)),
        CandidatePolicy("grids 2 / 1.5", "ckstore", grids(2.0, 1.5)),
        CandidatePolicy("ExCP, alpha = 5e-5", "baseline", make=baselines.Excp(alpha=5e-5)),
        CandidatePolicy("ExCP, c = 1", "baseline", make=baselines.Excp(factor=1.0)),
        CandidatePolicy("ExCP, c = 4", "baseline", make=baselines.Excp(factor=4.0)),
        CandidatePolicy("ExCP, c = 2.5, coded by ckstore", "baseline", make=baselines.ExcpInFrames(Pruning(alpha=1e9))),
        CandidatePolicy("one ulp", "yardstick", make=baselines.weights_one_ulp),
        CandidatePolicy("another order of the data", "yardstick", make=baselines.exact, skipped_batches=1000),
        *_between(),
    ]


def _between() -> list[CandidatePolicy]:
    """Return policies for sizes that the others do not cover, from 8 to 150 times smaller."""
    return [
        CandidatePolicy("grids 0.06 / 0.06", "ckstore", grids(0.06, 0.06)),
        CandidatePolicy("grids 0.25 / 0.25", "ckstore", grids(0.25, 0.25)),
        CandidatePolicy("outer 0.25 / 0.05 / 0.05", "ckstore", outer(0.25, 0.05, 0.05, 256)),
        CandidatePolicy("outer 2 / 0.5 / 1", "ckstore", outer(2.0, 0.5, 1.0)),
        CandidatePolicy("ExCP, c = 0.5, 64 levels", "baseline", make=baselines.Excp(factor=0.5, beta=0.5, levels=63)),
        CandidatePolicy("ExCP, c = 1.5", "baseline", make=baselines.Excp(factor=1.5, beta=1.5)),
        CandidatePolicy("2 bits, block-wise", "baseline", make=baselines.block_wise(2)),
    ]


def state_of(arrays: Arrays, step: int, plan: Plan) -> dict[str, Any]:
    """Return arrays as the state that ``ckstore.TrainState`` makes of a model and its optimizer."""
    names = baselines.names_of(arrays)
    group = {"lr": plan.settings.learning_rate, "betas": (0.9, plan.beta2), "eps": 1e-8, "weight_decay": 0.1}
    moments = {
        name: {
            "step": torch.tensor(float(step)),
            **{key: torch.from_numpy(arrays[f"{role}/{name}"]) for role, key in MOMENTS.items()},
        }
        for name in names
    }
    return {
        "model": {name: torch.from_numpy(arrays[f"w/{name}"]) for name in names},
        "optimizer": {"state": moments, "param_groups": [{**group, "params": names}]},
        "step": step,
    }


def keyframe_ratio(trained: Trained, folder: Path) -> float:
    """Return the compression ratio of the chain's keyframe in a store."""
    import ckstore

    shutil.rmtree(folder, ignore_errors=True)
    plan, first = trained.plan, trained.plan.chain[0]
    try:
        with ckstore.open(str(folder), run="main") as store:
            return store.commit(state_of(trained.state(first), first, plan), first).ratio
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_keyframes(ratio: float, keyframe: float, every: int = KEYFRAME_EVERY) -> float:
    """Return the compression ratio of a whole history with one keyframe per interval."""
    return every / ((every - 1) / ratio + 1 / keyframe)


def arrays_of(state: dict[str, Any]) -> Arrays:
    """Return the arrays of a restored state."""
    found: Arrays = {}
    for name, weight in state["model"].items():
        found[f"w/{name}"] = weight.numpy()
        for role, key in MOMENTS.items():
            found[f"{role}/{name}"] = state["optimizer"]["state"][name][key].numpy()
    return found


def _stored(trained: Trained, residual: Residual, folder: Path) -> Iterator[Link]:
    """Commit the chain to a store and restore every link from it."""
    import ckstore

    shutil.rmtree(folder, ignore_errors=True)
    plan, steps = trained.plan, trained.plan.chain
    # Chains of any length, because accumulated error is what is measured.
    exact = ckstore.Policy(read_amplification_max=1000)
    try:
        with ckstore.open(str(folder), run="main", policy=exact) as store:
            store.commit(state_of(trained.state(steps[0]), steps[0], plan), steps[0])
            for step in steps[1:]:
                state = trained.state(step)
                receipt = store.commit(state_of(state, step, plan), step, policy=replace(exact, fidelity=residual))
                restored = arrays_of(store.restore(step))
                bits = _bits_of(store.contents(step), restored)
                facts = {"bytes_written": float(receipt.bytes_written), "spike_bound": float(receipt.worst_spike)}
                yield Link(step, restored, bits, facts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _bits_of(contents: Any, arrays: Arrays) -> Bits:
    """Return the bits of the frames by role; exact tensors are counted as in the baselines."""
    bits = dict(_NO_BITS)
    sizes = {row.path: row for row in contents.losses}
    for path, values in arrays.items():
        role, _, name = path.partition("/")
        stored = f"model.{name}" if role == "w" else f"optimizer.state.{name}.{MOMENTS[role]}"
        row = sizes.get(stored) or next((row for key, row in sizes.items() if key.replace("'", "") == stored), None)
        if row is None:
            bits["exact"] += baselines.EXACT_BITS / 3 * values.size
        else:
            assert _ROLE_OF[row.role] in ROLES, f"{row.path} is a {row.role}"
            bits[_ROLE_OF[row.role]] += row.bits * values.size
    return bits
