"""Protects the choice of a base: history stays small, a restore stays within its bound, and the reason is given."""

from __future__ import annotations

import math

import pytest

from ckstore.delta.cost_model import DeltaCost, Estimate, decide

ELEMENTS = 8_000_000
FULL_BITS = 26.0
FULL_NBYTES = ELEMENTS * 26 // 8


def estimate(previous=None, keyframe=None, *, depth=0, read_previous=FULL_NBYTES, read_keyframe=FULL_NBYTES, **more):
    return Estimate(
        ELEMENTS,
        FULL_BITS,
        None if previous is None else DeltaCost(previous, read_previous, depth),
        None if keyframe is None else DeltaCost(keyframe, read_keyframe, 0),
        **more,
    )


def decision(*estimates, bound=2.0, depth_max=64):
    return decide(estimates, read_amplification_max=bound, depth_max=depth_max)


def test_no_base_makes_a_keyframe():
    assert decision(estimate()).newest_base is None
    assert "nothing to take as base" in decision(estimate()).reason


def test_smaller_base_is_chosen():
    assert decision(estimate(17.0, 21.0)).newest_base == "previous"
    assert decision(estimate(21.0, 17.0)).newest_base == "keyframe"


def test_base_over_the_bound_is_skipped():
    found = decision(estimate(17.0, 21.0, read_previous=2 * FULL_NBYTES), bound=1.9)
    assert found.newest_base == "keyframe"
    assert "a restore reads 1.81 keyframes, at most 1.9 allowed" in found.reason


def test_no_base_within_bound_makes_a_keyframe():
    found = decision(estimate(17.0, 21.0), bound=1.6)
    assert found.is_keyframe
    assert found.reason == "keyframe: differences within the bound would save too little (0.0%)"


def test_bound_is_spent_where_it_saves_most():
    """Only one of two may chain to the previous checkpoint: the one that saves more per byte read."""
    much = estimate(14.0, 21.0, read_previous=1.8 * FULL_NBYTES)
    little = estimate(20.0, 21.0, read_previous=1.8 * FULL_NBYTES)
    assert decision(much, little, bound=9).kinds == ("previous", "previous")
    found = decision(much, little, bound=2.2)
    assert found.kinds == ("previous", "keyframe")
    assert found.base == "mixed"
    assert "against both bases" in found.reason


def test_chain_depth_is_limited():
    assert decision(estimate(17.0, 21.0, depth=64)).newest_base == "keyframe"
    assert decision(estimate(17.0, 21.0, depth=63)).newest_base == "previous"


def test_tiny_saving_uses_no_base():
    assert decision(estimate(25.8, 25.8)).newest_base is None
    assert decision(estimate(25.5, 25.8)).newest_base == "previous"


def test_one_saving_unit_is_enough_for_a_base():
    """Moments are stored whole, next to weights that are stored as deltas."""
    weights, moments = estimate(17.0, 17.0), estimate(27.0, 27.0)
    assert not moments.saves("previous")
    assert decision(weights, moments).newest_base is not None
    assert decision(weights, moments).kinds == ("previous", None)


def test_grown_delta_is_stored_whole():
    chained = 9.0  # So large that no part of the bound is left.
    young = estimate(21.0, 22.0, age=3, read_previous=chained * FULL_NBYTES)
    old = estimate(21.0, 23.5, age=12, read_previous=chained * FULL_NBYTES)
    assert not young.is_due()
    assert old.is_due()
    found = decision(young, old)
    assert found.kinds == ("keyframe", None)
    assert "1 of 2 parts were due to be stored whole" in found.reason


def test_all_parts_due_make_a_keyframe():
    old = estimate(21.0, 23.5, age=12, read_previous=9.0 * FULL_NBYTES)
    assert decision(old, old).is_keyframe
    assert "every part is due to be stored whole" in decision(old, old).reason


def test_tiny_deltas_allow_a_long_chain():
    assert decision(estimate(0.2, 9.0, age=60, depth=59)).newest_base == "previous"


def test_identical_part_costs_nothing():
    same = estimate(0.0, 0.0, identical_read_nbytes=1000)
    assert (same.cost(None), same.cost("previous")) == (0.0, 0.0)
    assert same.read_cost("previous") == 1000
    assert not decision(same, same).is_keyframe, "nothing is written, so no keyframe begins"
    # A frozen base and a small adapter: the frozen part must not hide what deltas save on the rest.
    assert decision(same, estimate(17.0, 17.0)).newest_base is not None


@pytest.mark.parametrize("growth", [0.0, 0.2, 0.5, 0.8])
def test_keyframe_rule_matches_best_fixed_interval(growth):
    """Deltas that grow with the logarithm of the distance from their keyframe, as in a random walk."""

    def bits(age):
        return min(FULL_BITS, 20.0 + growth * math.log2(age))

    def total_by_rule(count=200):
        total, age = 0.0, 0
        for _ in range(count):
            there_is_one = age > 0
            unit = estimate(bits(1), bits(age), age=age, read_previous=99 * FULL_NBYTES) if there_is_one else estimate()
            is_whole = decision(unit).newest_base is None
            total += FULL_BITS if is_whole else bits(age)
            age = 1 if is_whole else age + 1
        return total

    def total_by_interval(interval, count=200):
        return sum(FULL_BITS if index % interval == 0 else bits(index % interval) for index in range(count))

    assert total_by_rule() <= 1.01 * min(total_by_interval(interval) for interval in range(1, 201))
