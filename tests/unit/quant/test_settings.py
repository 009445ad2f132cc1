"""Protects fidelity settings: they are checked when created, and an error names the wrong field."""

from __future__ import annotations

import dataclasses

import pytest

from ckstore.config import FirstMomentSettings, Residual, SecondMomentSettings, TensorSettings, WeightSettings
from ckstore.errors import UsageError


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (WeightSettings, {"step": 0.0}),
        (WeightSettings, {"step": float("nan")}),
        (WeightSettings, {"step": "1"}),
        (WeightSettings, {"step": True}),
        (WeightSettings, {"dead_zone": 0.4}),
        (WeightSettings, {"levels_max": 0}),
        (WeightSettings, {"levels_max": 128}),
        (WeightSettings, {"scale": "column"}),
        (SecondMomentSettings, {"form": "rank2"}),
        (SecondMomentSettings, {"log_step": 0.0}),
        (FirstMomentSettings, {"form": "none"}),
        (FirstMomentSettings, {"clip": 0.0}),
        (FirstMomentSettings, {"step": float("inf")}),
        (Residual, {"max_abs": -1.0}),
        (Residual, {"max_rel_rms": float("nan")}),
        (Residual, {"bits_per_parameter": "4"}),
        (Residual, {"on_bound": "ignore"}),
        (Residual, {"keyframe_every": 0}),
        (Residual, {"nelements_min": 0}),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(kind: type, fields: dict[str, object]) -> None:
    (name,) = fields
    with pytest.raises(UsageError, match=name):
        kind(**fields)


@pytest.mark.parametrize("rule", ["lm_head*", ("lm_head*",), ("lm_head*", "lossy"), (3, "exact"), ("a", None)])
def test_rules_are_pairs_of_a_glob_and_settings(rule: object) -> None:
    with pytest.raises(UsageError, match="rule"):
        Residual(rules=(rule,))
    Residual(rules=(("lm_head*", "exact"), ("*", TensorSettings())))


def test_named_fidelities_can_be_changed_and_compared() -> None:
    for make in (Residual.near, Residual.small):
        residual = make(max_abs=0.5, on_bound="raise")
        assert residual.max_abs == 0.5
        assert dataclasses.replace(residual, max_abs=None, on_bound="exact") == make()
        assert hash(make()) == hash(make())
        with pytest.raises(UsageError, match="max_error"):
            make(max_error=1.0)
    assert [make().name for make in (Residual.near, Residual.small)] == ["near", "small"]
