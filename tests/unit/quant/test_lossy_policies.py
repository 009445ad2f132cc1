"""Protects lossy policies: rules, bounds and the guard of the next step hold, or the tensor is stored exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ckstore import Policy, Residual
from ckstore.config import KIB, TensorSettings
from ckstore.errors import BoundError
from ckstore.quant.planning import LossyTensor
from ckstore.quant.writer import scaled
from support.small_chunks import open_small
from support.states import difference
from support.synthetic_training import AdamRun, M, V, W, leaf, losses, lossy_policy

NEAR = Residual.near()


def test_rules_choose_by_path(store):
    exact_model = replace(NEAR, rules=(("model.*", "exact"),))
    run = AdamRun()
    for step in range(2):
        store.commit(run.train().state(), step, policy=lossy_policy(exact_model))
    # The moments of a weight follow the rule of the weight.
    assert losses(store) == {}
    moments_only = replace(NEAR, tensors=replace(NEAR.tensors, weights="exact"))
    store.commit(run.train().state(), 2, policy=lossy_policy(moments_only))
    assert set(losses(store)) == {M, V}
    first_only = replace(NEAR, tensors=replace(NEAR.tensors, weights="exact", second="exact"))
    state = run.train().state()
    store.commit(state, 3, policy=lossy_policy(first_only))
    assert set(losses(store)) == {M}
    assert np.array_equal(leaf(store.restore(), V), leaf(state, V))
    assert store.verify("decode").damage == []


def test_rule_can_make_any_tensor_a_weight(store):
    def lost(rules):
        # Small exact tensors have no chunk of their own that could be a base. The second commit finds one.
        for step in range(2):
            own = run.train().state() | {"blobs": {"a": other.train().w, "b": other.w[:, ::-1].copy()}}
            store.commit(own, step, policy=lossy_policy(replace(NEAR, rules=rules)))
        return set(losses(store))

    run, other = AdamRun(), AdamRun(2)
    assert lost((("*", NEAR.tensors),)) == {W, M, V}, "a rule for everything names nothing"
    assert lost((("blobs.a", NEAR.tensors),)) == {W, M, V, "blobs.a"}
    assert lost((("blobs.a", "exact"), ("blobs.*", NEAR.tensors))) == {W, M, V, "blobs.b"}


COUNTED = {
    # Excluded by its values: whole numbers.
    "seen": lambda noise, step: np.rint(100 * noise) + step,
    "seen_halves": lambda noise, step: np.rint((20 + step) * noise + step * noise[::-1]).astype(np.float16),
    # Excluded by its name: averages of counts.
    "cluster_size": lambda noise, step: noise + step / 3,
    "token_counts": lambda noise, step: noise + step / 3,
}


@pytest.mark.parametrize(("name", "count"), COUNTED.items(), ids=COUNTED)
def test_counters_stay_exact_without_a_rule(store, name, count):
    def lost(rules, first):
        for step in range(first, first + 2):
            state = run.train().state()
            state["model"] |= {name: count(noise, step), "other": noise + np.float32(0.01) * step * noise[::-1]}
            store.commit(state, step, policy=lossy_policy(replace(NEAR, rules=rules)))
        return {path for path in losses(store) if path.startswith("model.")}

    run, noise = AdamRun(), AdamRun(2).train().w.copy()
    assert lost((), 0) == {W, "model.other"}
    assert f"model.{name}" in lost(((f"model.{name}", NEAR.tensors),), 2)


def test_rule_matches_any_path_of_a_tied_weight(store):
    run = AdamRun()
    for step in range(2):
        state = run.train().state()
        state["model"]["head"] = state["model"]["w"]
        receipt = store.commit(state, step, policy=lossy_policy(replace(NEAR, rules=(("model.head", "exact"),))))
        assert receipt.warnings == ()
    assert W not in losses(store)


def test_rule_without_match_names_similar_paths(store):
    mistyped = replace(NEAR, rules=(("modle.w*", "exact"),))
    receipt = store.commit(AdamRun().train().state(), 0, policy=lossy_policy(mistyped))
    assert receipt.warnings == ("the rule for 'modle.w*' matches nothing in this state; the nearest path is model.w",)


def test_warnings_about_many_tensors_are_short(store):
    rng = np.random.default_rng(8)
    weights = {f"w{number}": rng.standard_normal((64, 80)).astype(np.float32) for number in range(30)}
    strict = lossy_policy(replace(NEAR, max_rel_rms=1e-9))
    store.commit({"model": weights}, 0, policy=strict)
    weights = {name: each * np.float32(1.01) + rng.standard_normal((64, 80)) for name, each in weights.items()}
    weights = {name: each.astype(np.float32) for name, each in weights.items()}
    weights["w29"][0, 0] = np.nan
    warnings = store.commit({"model": weights}, 1, policy=strict).warnings
    assert len(warnings) == 10
    assert all(" was stored exactly: its RMS error is " in warning for warning in warnings[:8])
    assert warnings[8].startswith(
        "22 more tensors were stored exactly, of 30 that could lose something; model.w8, for one"
    )
    assert warnings[9] == "model.w29 holds NaN or infinity: the run may have diverged"


def test_policy_without_lossy_tensors_warns(store):
    rng = np.random.default_rng(5)
    for step, state in enumerate(
        (
            {"blobs": {"w": rng.standard_normal((300, 300))}, "step": 1},
            {"model": {"w": rng.standard_normal((20, 20)).astype(np.float32)}},
            {"counts": np.arange(90_000).reshape(300, 300)},
        )
    ):
        receipt = store.commit(state, step, policy=lossy_policy(NEAR))
        (warning,) = receipt.warnings
        assert "the fidelity 'near' found nothing to quantize, so everything is exact" in warning
        assert "4096 floats" in warning
        assert store.info("latest").fidelity == "exact"
    state = AdamRun().train().state()
    assert store.commit(state, 3, policy=lossy_policy(NEAR)).warnings == (), "a keyframe has what will be quantized"
    everything = replace(NEAR, rules=(("*", "exact"),))
    assert store.commit(state, 4, policy=lossy_policy(everything)).warnings == (), "an explicit rule needs no warning"


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16"])
def test_rule_keeps_rounding_of_quantized_master(store, dtype):
    """The rounding's own bits are restored, not the rounding of the quantized master."""
    if dtype == "bfloat16":
        torch = pytest.importorskip("torch")

    def rounded(w):
        return torch.from_numpy(w).bfloat16() if dtype == "bfloat16" else w.astype(dtype)

    def bits(array):
        return (array.view(torch.int16).numpy() if dtype == "bfloat16" else array).tobytes()

    run = AdamRun()
    for rules in ((("half.*", "exact"),), (("half.*", TensorSettings(weights="exact")),)):
        for step in range(3):
            state = run.train().state()
            state["half"] = {"w": rounded(state["model"]["w"])}
            receipt = store.commit(state, step, policy=lossy_policy(replace(NEAR, rules=rules)))
            assert receipt.warnings == ()
            assert bits(store.restore()["half"]["w"]) == bits(state["half"]["w"])
        assert W in losses(store)
        assert "half.w" not in losses(store)
    assert store.verify("decode").damage == []


def test_exact_moments_do_not_shorten_the_chain(store):
    """Exact moments are read once, for any chain of their weight. They are no reason for a new keyframe."""
    weights_only = replace(NEAR, tensors=replace(NEAR.tensors, first="exact", second="exact"))
    run, hops = AdamRun(), []
    for step in range(12):
        store.commit(run.train().state(), step, policy=lossy_policy(weights_only, read_amplification_max=1.6))
        hops.append(losses(store)[W].hops if W in losses(store) else 0)
    assert hops == list(range(12))


@pytest.mark.parametrize(
    "bounds",
    [{"max_rel_rms": 1e-6}, {"max_abs": 1e-9}, {"bits_per_parameter": 0.01}],
    ids=["relative", "greatest", "bits"],
)
def test_unreachable_bounds_raise_or_store_exactly(store, bounds):
    run = AdamRun()
    store.commit(run.train().state(), 0, policy=lossy_policy(NEAR))
    state = run.train().state()
    with pytest.raises(BoundError) as caught:
        store.commit(state, 1, policy=lossy_policy(replace(NEAR, on_bound="raise", **bounds)))
    assert caught.value.path in (W, M, V)
    assert [info.step for info in store.log()] == [0], "nothing was published"
    receipt = store.commit(state, 1, policy=lossy_policy(replace(NEAR, on_bound="exact", **bounds)))
    found = store.restore()
    assert np.array_equal(leaf(found, W), leaf(state, W))
    assert any("more than" in warning for warning in receipt.warnings)
    assert store.verify("decode").damage == []


@pytest.mark.parametrize("chunk_count", [1, 4])
@pytest.mark.parametrize("target", [1.5, 12.0])
def test_steps_are_scaled_to_the_target_bits(backend, target, chunk_count):
    run = AdamRun(shape=(256 * chunk_count, 256))
    store = open_small(backend, 256 * KIB)
    store.commit(run.train(2).state(), 0, policy=lossy_policy(NEAR))
    state = run.train(2).state()
    store.commit(state, 1, policy=lossy_policy(replace(NEAR, keyframe_every=1000)))
    plain = losses(store)
    store.rewind(0)
    aimed = replace(NEAR, bits_per_parameter=target, on_bound="raise")
    receipt = store.commit(state, 2, policy=lossy_policy(aimed))
    recorded = losses(store)
    bits = sum(row.bits for row in recorded.values())
    assert 0.75 * target < bits <= target, receipt.warnings
    as_it_comes = sum(row.bits for row in plain.values())
    assert (recorded[W].numbers["step"] > plain[W].numbers["step"]) == (as_it_comes > target)
    assert (recorded[W].rel_rms > plain[W].rel_rms) == (as_it_comes > target)
    assert store.verify("decode").damage == []


@pytest.mark.parametrize(("octaves", "rank_max"), [(-3.0, 128), (-8.0, 256), (-0.5, 23), (0.0, 16), (2.0, 16)])
def test_finer_steps_may_find_more_directions(octaves, rank_max):
    settings = Residual.near().tensors.second
    assert settings.low_rank.rank_max == 16
    tensor = LossyTensor(0, "second", "v", "float32", (64, 64), settings)
    assert scaled(tensor, octaves).settings.low_rank.rank_max == rank_max


def test_met_bounds_change_nothing(store):
    run = AdamRun()
    bounded = replace(NEAR, on_bound="raise", max_rel_rms=0.9, max_abs=1.0, bits_per_parameter=40.0)
    for step in range(3):
        receipt = store.commit(run.train().state(), step, policy=lossy_policy(bounded))
    assert receipt.lossy_count == 3
    for row in losses(store).values():
        assert row.rel_rms <= 0.9


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
@pytest.mark.parametrize("residual", [NEAR, Residual.small()], ids=["near", "small"])
def test_next_step_is_within_the_step_guard(store, betas, residual):
    one, two = betas
    natural = (1 - one) / math.sqrt((1 - two) * (1 - one * one / two))
    run = AdamRun(betas=betas)
    for step in range(3):
        store.commit(run.train().state(), step, policy=lossy_policy(residual))
    found, recorded = store.restore(), losses(store)
    m, v = leaf(found, M).astype(np.float64), leaf(found, V).astype(np.float64)
    worst = np.sqrt(one * one * (m * m / v).max() / two + (1 - one) ** 2 / (1 - two))
    worst *= math.sqrt(1 - two ** (run.steps + 1)) / (1 - one ** (run.steps + 1))
    assert math.isclose(recorded[M].spike, worst, rel_tol=1e-4)
    assert recorded[M].spike == recorded[V].spike
    assert worst <= min(10, 1.5 * natural) * 1.001


def test_vanished_second_moment_makes_both_exact(store):
    run = AdamRun()
    store.commit(run.train().state(), 0, policy=lossy_policy())
    state = run.train().state()
    leaf(state, V)[4] = 0.0
    leaf(state, M)[4] = 1e-3
    keep_first = replace(NEAR, tensors=replace(NEAR.tensors, first="exact"))
    receipt = store.commit(state, 1, policy=lossy_policy(keep_first))
    found = store.restore()
    assert difference(found["optimizer"], state["optimizer"]) is None
    assert "a first moment would be left where the second moment is zero" in receipt.warnings[0]


def test_policy_names_are_normalized(store):
    run = AdamRun()
    store.commit(run.train().state(), 0, policy=lossy_policy())
    for name, word in (("My Own!", "my-own"), ("exact", "own"), ("é", "own"), ("x" * 90, "x" * 32)):
        store.commit(run.train().state(), 1, policy=lossy_policy(replace(NEAR, name=name)))
        assert store.info("latest").fidelity == word


def test_invalid_fidelity_is_refused():
    from ckstore.errors import UsageError

    for wrong in ("lossy", None, 3, Residual, Residual.near, []):
        with pytest.raises(UsageError, match=r"ckstore\.Residual\.near\(\) or \.small\(\)"):
            Policy(fidelity=wrong)
    assert Policy(fidelity="near") == Policy(fidelity=NEAR)
    assert Policy(fidelity="small").residual == Residual.small()
    assert Policy().residual is None
    assert lossy_policy().residual == NEAR


def test_policy_round_trips_through_rows():
    from ckstore.config import policy_of, policy_row
    from ckstore.errors import MalformedError

    own = replace(NEAR, rules=(("a.*", "exact"), ("b.*", Residual.small().tensors)), max_abs=0.5)
    for each in (
        Policy(),
        lossy_policy(),
        lossy_policy(Residual.small(), threads=3),
        lossy_policy(own),
    ):
        assert policy_of(policy_row(each)) == each
    for wrong in ({"fidelity": {"kind": "Nothing"}}, {"colour": 3}, {"threads": -1}, {"fidelity": {"step": 1}}):
        with pytest.raises(MalformedError):
            policy_of(wrong)


@pytest.mark.parametrize("where", ["model", "model.w", "optimizer.state"])
def test_rule_for_a_container_applies_to_its_content(store, where):
    run = AdamRun()
    for step in range(2):
        receipt = store.commit(run.train().state(), step, policy=lossy_policy(replace(NEAR, rules=((where, "exact"),))))
    assert losses(store).keys() == (set() if where.startswith("model") else {W})
    assert receipt.warnings == ()


def test_rule_without_match_warns(store):
    wrong = replace(NEAR, rules=(("model.wide", "exact"), ("model.*", "exact"), ("mod", "exact")))
    receipt = store.commit(AdamRun().train().state(), 0, policy=lossy_policy(wrong))
    assert [warning.split("'")[1] for warning in receipt.warnings] == ["model.wide", "mod"]


def test_reported_method_is_the_one_used(store):
    """A tensor without a low rank falls back to a grid, whichever method the settings try first."""
    run = AdamRun()
    for step in range(2):
        store.commit(run.train().state(), step, policy=lossy_policy(NEAR))
    recorded = losses(store)
    # Changes of this run are noise of full rank. Its second moments have factors of rows and columns.
    assert (recorded[W].method, recorded[M].method, recorded[V].method) == ("grid", "grid", "outer")
    assert "outer_step" in recorded[V].numbers
    assert "outer_step" not in recorded[W].numbers
    rng = np.random.default_rng(5)
    run.w = run.w + (rng.normal(size=(96, 2)) @ rng.normal(size=(2, 160)) * 1e-2).astype(np.float32)
    store.commit(run.state(), 2, policy=lossy_policy(NEAR))
    assert losses(store)[W].method == "outer"
    assert "outer_step" in losses(store)[W].numbers


def test_tensor_with_few_rows_uses_a_log_grid(store):
    """Row factors need rows: rank 1 becomes a grid of logarithms here."""
    plain = TensorSettings(weights="exact")
    for shape, method in (((5, 1000), "log"), ((50, 100), "rank1")):
        run = AdamRun(shape=shape)
        # The first one of this shape is stored exactly.
        for step in range(2):
            receipt = store.commit(run.train().state(), step, policy=lossy_policy(replace(NEAR, tensors=plain)))
        assert losses(store)[V].method == method, receipt.warnings


def test_bounds_apply_to_roundings(store):
    """bf16 steps are wide: a master may be within a bound that its rounding, one step off, exceeds."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    w = torch.from_numpy((rng.standard_normal((96, 160)) * 0.5).astype(np.float32))
    bounded = replace(Residual.near(), max_abs=5e-5)
    for step in range(2):
        w = w + torch.from_numpy((rng.standard_normal((96, 160)) * 2e-5).astype(np.float32))
        state = {"model": {"w": w.to(torch.bfloat16)}, "master": {"w": w}}
        receipt = store.commit(state, step, policy=lossy_policy(bounded))
    found = store.restore()
    for part in ("model", "master"):
        worst = (found[part]["w"].float() - state[part]["w"].float()).abs().max().item()
        assert worst <= 5e-5, part
    assert any("its rounding's greatest error" in warning for warning in receipt.warnings)


@pytest.mark.parametrize("path", ["model.bias", "small", "doubles", M, W])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_divergence_warns_for_any_tensor(store, path, value):
    state = AdamRun().train().state()
    state |= {"small": np.ones((4, 4), np.float16), "doubles": np.ones(7), "model": {**state["model"]}}
    leaf(state, path).reshape(-1)[1] = value
    receipt = store.commit(state, 0, policy=lossy_policy())
    warnings = [warning for warning in receipt.warnings if warning.startswith(f"{path} ")]
    assert len(warnings) == 1
    assert "NaN or infinity" in warnings[0]
    assert store.commit(state, 1, policy=Policy()).warnings == (), "checked only in lossy commits"
