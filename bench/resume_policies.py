"""The policies that ``resume_gap`` runs through a chain: ckstore's, by a real store, and what they are compared with.

A chain begins with an exact keyframe. ckstore's policies commit every further state into a store, with
``Policy(fidelity=...)``, and restore from it; bits are those of the frames, from the manifest's table of losses.
Baselines turn arrays into arrays. Both are closed loops: every residual is told against what was reconstructed of the
checkpoint before, so the last state carries whatever adds up.
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
"""One checkpoint in so many is exact, unless a policy says otherwise."""

_ROLE_OF = {"weight": "w", "first": "m", "second": "v"}
# Where no moment of the exact tensors can be told apart, they are counted as in the baselines.
_NO_BITS: Bits = {"w": 0.0, "m": 0.0, "v": 0.0, "exact": 0.0}


@dataclass(frozen=True)
class Link:
    """What became of one state of the chain.

    Args:
        step: Its step.
        arrays: What is restored.
        bits: By role, of the whole state.
        facts: What else is known: bytes written, the greatest update that the store's guard allows.
    """

    step: int
    arrays: Arrays
    bits: Bits
    facts: dict[str, float]


@dataclass(frozen=True)
class Contender:
    """A policy.

    Args:
        name: What tables call it.
        kind: ``"ckstore"``, ``"baseline"`` (a method of compression) or ``"yardstick"``.
        residual: ckstore's fidelity.
        make: A baseline.
        skipped_batches: Batches that the resumed run skips: another order of the data.
        is_named: Resumed from the middle of the chain, too.
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
        assert self.make is not None, "a contender is a fidelity or a baseline"
        steps = trained.plan.chain
        if self.kind == "yardstick":
            # What does not depend on what became of the checkpoints before.
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
    """Return near() with other numbers of directions: at most so many of changes, of first and of second moments."""
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


def contenders() -> list[Contender]:
    """Return all policies, those that matter most first."""
    endless: dict[str, Any] = {"keyframe_every": 1000}
    named: list[Contender] = [
        Contender("near()", "ckstore", Residual.near(**endless), is_named=True),
        Contender("small()", "ckstore", Residual.small(**endless), is_named=True),
        Contender("ExCP, c = 2.5", "baseline", make=baselines.Excp(), is_named=True),
    ]
    frontier = [
        Contender(f"outer {weights:g} / {first:g} / {second:g}", "ckstore", outer(weights, first, second, rank_max))
        for weights, first, second, rank_max in (
            (4.0, 0.8, 0.8, 64),
            (1.0, 0.2, 0.8, 64),
            (0.5, 0.1, 0.1, 192),
            (3.0, 0.6, 0.8, 64),
        )
    ]
    return [
        *named,
        Contender("no moments", "yardstick", make=baselines.no_moments),
        Contender("stale weights", "yardstick", make=baselines.stale_weights),
        Contender("weights in bf16", "yardstick", make=baselines.weights_bf16),
        Contender("moments in 8 bits", "yardstick", make=baselines.moments_8_bit),
        Contender("8 bits, block-wise", "baseline", make=baselines.block_wise(8)),
        Contender("4 bits, block-wise", "baseline", make=baselines.block_wise(4)),
        *frontier,
        Contender("near() of 96 / 96 / 64", "ckstore", near_of(96, 96, 64)),
        Contender("grids 0.5 / 0.5", "ckstore", grids(0.5, 0.5)),
        Contender("grids 2 / 1.5", "ckstore", grids(2.0, 1.5)),
        Contender("ExCP, alpha = 5e-5", "baseline", make=baselines.Excp(alpha=5e-5)),
        Contender("ExCP, c = 1", "baseline", make=baselines.Excp(factor=1.0)),
        Contender("ExCP, c = 4", "baseline", make=baselines.Excp(factor=4.0)),
        Contender("ExCP, c = 2.5, coded by ckstore", "baseline", make=baselines.ExcpInFrames(Pruning(alpha=1e9))),
        Contender("one ulp", "yardstick", make=baselines.weights_one_ulp),
        Contender("another order of the data", "yardstick", make=baselines.exact, skipped_batches=1000),
        *_between(),
    ]


def _between() -> list[Contender]:
    """Return policies of sizes that the others leave out, from 8 to 150 times smaller."""
    return [
        Contender("grids 0.06 / 0.06", "ckstore", grids(0.06, 0.06)),
        Contender("grids 0.25 / 0.25", "ckstore", grids(0.25, 0.25)),
        Contender("outer 0.25 / 0.05 / 0.05", "ckstore", outer(0.25, 0.05, 0.05, 256)),
        Contender("outer 2 / 0.5 / 1", "ckstore", outer(2.0, 0.5, 1.0)),
        Contender("ExCP, c = 0.5, 64 levels", "baseline", make=baselines.Excp(factor=0.5, beta=0.5, levels=63)),
        Contender("ExCP, c = 1.5", "baseline", make=baselines.Excp(factor=1.5, beta=1.5)),
        Contender("2 bits, block-wise", "baseline", make=baselines.block_wise(2)),
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
    """Return how many times smaller the chain's keyframe is than the state, as a store holds it."""
    import ckstore

    shutil.rmtree(folder, ignore_errors=True)
    plan, first = trained.plan, trained.plan.chain[0]
    try:
        with ckstore.open(str(folder), run="main") as store:
            return store.commit(state_of(trained.state(first), first, plan), first).ratio
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def with_keyframes(ratio: float, keyframe: float, every: int = KEYFRAME_EVERY) -> float:
    """Return how many times smaller a whole history is, of which one checkpoint in so many is a keyframe."""
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
    """Commit the chain into a store and restore every link from it."""
    import ckstore

    shutil.rmtree(folder, ignore_errors=True)
    plan, steps = trained.plan, trained.plan.chain
    # Chains of any length: what is measured is what adds up.
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
    """Return the bits of the frames by role; tensors of which nothing was lost count as in the baselines."""
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
