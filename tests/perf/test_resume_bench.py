"""The resume bench compares with an exact resume; baselines count bits and change values as documented."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    # The bench is not part of the package; add the repository root to the path, as `python -m bench.resume_gap` does.
    sys.path.append(str(ROOT))

from bench import resume_baselines as baselines  # noqa: E402
from bench import resume_gap, resume_policies, resume_training  # noqa: E402
from bench.resume_policies import CandidatePolicy  # noqa: E402

V_MIN = replace(
    resume_training.TINY_PLANS[0.999],
    name="resume-test",
    first=4,
    gap=2,
    residuals=2,
    resumed=3,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return resume_training.ensure(tmp_path_factory.mktemp("cache"), V_MIN, log=lambda line: None)


def state_of(seed: int, shape: tuple[int, int] = (64, 80)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    weight, first = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    return {"w/a": weight, "m/a": first, "v/a": first * first + np.float32(0.1)}


def test_exact_resume_repeats_losses(trained):
    resume_training.check_exact(trained)
    step = trained.plan.chain[1]
    state = trained.state(step)
    changed = {path: values * np.float32(1.001) if path[0] == "m" else values for path, values in state.items()}
    assert trained.resume(changed, step, count=3).losses[1:] != trained.exact_losses(step)[1:3]
    assert trained.resume(state, step, count=2, skipped_batches=5).losses != trained.exact_losses(step)[:2]


def test_inexact_resume_stops_the_bench(trained, monkeypatch):
    truth = trained.exact_losses(trained.plan.points[0])
    monkeypatch.setattr(resume_training.Trained, "exact_losses", lambda self, step: [truth[0] + 1e-7, *truth[1:]])
    with pytest.raises(AssertionError, match="resumes with"):
        resume_training.check_exact(trained)


def test_policies_and_baselines_run_through_the_chain(trained, tmp_path):
    chosen = [
        one for one in resume_policies.candidate_policies() if one.name in ("near()", "ExCP, c = 2.5", "stale weights")
    ]
    plans = {0.999: trained.plan}
    (tmp_path / trained.plan.name).symlink_to(trained.folder)
    everything, exact = resume_gap.examine_all(plans, chosen, tmp_path)
    result = resume_gap.result_of(everything, exact, plans, {0.999: 1.25})
    gaps = {name.partition(", beta2")[0]: samples[0] for name, samples in result.samples.items()}
    assert gaps["near()"].value < gaps["stale weights"].value
    assert gaps["near()"].facts["bits_w"] > 0
    assert gaps["ExCP, c = 2.5"].facts["ratio"] > gaps["stale weights"].facts["ratio"] > 1
    assert len(everything[0.999][0]["points"]) == 2
    kept = sorted((tmp_path / f"{trained.plan.name}-found").glob("*.json"))
    assert [path.stem for path in kept] == ["exact", "excp-c-2.5", "near", "stale-weights"]
    # Results are cached, unless the parameters of a policy have changed.
    note = json.loads(kept[-1].read_text())
    kept[-1].write_text(json.dumps({**note, "kind": "marked"}))
    again, _ = resume_gap.examine_all(plans, chosen, tmp_path, is_cached=True)
    assert again[0.999][-1]["kind"] == "marked"
    other = [CandidatePolicy("stale weights", "yardstick", make=baselines.no_moments)]
    assert resume_gap.examine_all(plans, other, tmp_path)[0][0.999][-1]["kind"] == "yardstick"


def test_update_bound_matches_closed_form():
    state = {"m/a": np.array([0.5, 0.0], np.float32), "v/a": np.array([0.25, 0.0], np.float32)}
    expected = math.sqrt(0.81 / 0.95 + 0.01 / 0.05)
    assert resume_gap.spike_bound(state, 0.95, 10_000) == pytest.approx(expected)
    state["m/a"][1] = 1e-3
    assert resume_gap.spike_bound(state, 0.95, 10_000) == math.inf


def test_entropy_of_known_codes():
    assert baselines.entropy_bits(np.zeros(0, np.uint8)) == 0.0
    assert baselines.entropy_bits(np.repeat([0, 1, 2, 3], 100)) == pytest.approx(2 * 400 + 64)


def test_clusters_find_separate_groups():
    rng = np.random.default_rng(1)
    values = np.concatenate([middle + 0.01 * rng.normal(size=500) for middle in (-3.0, 0.5, 4.0)])
    assert baselines.clusters(values, 3) == pytest.approx([-3.0, 0.5, 4.0], abs=0.01)


def test_excp_prunes_by_median_and_by_first_moments():
    state, before = state_of(2), state_of(3)
    made, bits = baselines.Excp()(state, before)
    change = state["w/a"] - before["w/a"]
    is_kept = np.abs(change) > 2.5 * np.median(np.abs(change))
    assert np.array_equal(made["w/a"] != before["w/a"], is_kept)
    has_moments = is_kept & (np.abs(state["m/a"]) > 2 * np.abs(state["m/a"]).mean())
    assert np.array_equal(made["m/a"] != 0, has_moments)
    assert np.array_equal(made["v/a"] != 0, has_moments)
    assert len(np.unique(made["w/a"] - before["w/a"])) <= 16 * 4
    assert bits["w"] > bits["m"] > bits["v"] > 0
    assert math.isinf(resume_gap.spike_bound(made, 0.999, 10)) is False


@pytest.mark.parametrize(("bits", "share"), [(8, 1 / 127), (4, 1 / 7)])
def test_block_wise_error_is_at_most_half_a_step(bits, share):
    state = state_of(4)
    made, counted = baselines.block_wise(bits)(state, state)
    for path in ("w/a", "m/a"):
        rows = state[path].reshape(-1, baselines.BLOCK)
        steps = np.abs(rows).max(axis=1, keepdims=True) * share
        assert np.all(np.abs(made[path].reshape(rows.shape) - rows) <= 0.51 * steps)
    assert counted["w"] == state["w/a"].size * (bits + 32 / baselines.BLOCK)


def test_yardsticks_change_only_what_they_name():
    state, before = state_of(5), state_of(6)
    for make, roles in (
        (baselines.exact, ""),
        (baselines.weights_one_ulp, "w"),
        (baselines.weights_bf16, "w"),
        (baselines.stale_weights, "w"),
        (baselines.moments_8_bit, "mv"),
        (baselines.no_moments, "mv"),
    ):
        made, _ = make(state, before)
        assert {path[0] for path in state if not np.array_equal(made[path], state[path])} == set(roles), make
    ulps = baselines.weights_one_ulp(state, before)[0]["w/a"].view(np.int32) - state["w/a"].view(np.int32)
    assert set(np.unique(ulps)) == {-1, 0, 1}
