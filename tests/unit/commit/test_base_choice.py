"""Protects the choice of a base: history stays small, a restore reads within the bound, and people learn why."""

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


def test_without_a_base_there_is_a_keyframe():
    assert decision(estimate()).newest_base is None
    assert "nothing to take as base" in decision(estimate()).reason


def test_the_smaller_of_two_bases_is_taken():
    assert decision(estimate(17.0, 21.0)).newest_base == "previous"
    assert decision(estimate(21.0, 17.0)).newest_base == "keyframe"


def test_a_base_over_the_bound_is_passed_over_for_one_within_it():
    found = decision(estimate(17.0, 21.0, read_previous=2 * FULL_NBYTES), bound=1.9)
    assert found.newest_base == "keyframe"
    assert "a restore reads 1.81 keyframes, at most 1.9 allowed" in found.reason


def test_no_base_within_the_bound_makes_a_keyframe_that_says_so():
    found = decision(estimate(17.0, 21.0), bound=1.6)
    assert found.is_keyframe
    assert found.reason == "keyframe: differences within the bound would save too little (0.0%)"


def test_what_the_bound_leaves_goes_to_those_who_save_most_by_it():
    """One of two may chain to the previous checkpoint; it is the one that gains more for each byte read."""
    much = estimate(14.0, 21.0, read_previous=1.8 * FULL_NBYTES)
    little = estimate(20.0, 21.0, read_previous=1.8 * FULL_NBYTES)
    assert decision(much, little, bound=9).kinds == ("previous", "previous")
    found = decision(much, little, bound=2.2)
    assert found.kinds == ("previous", "keyframe")
    assert found.base == "mixed"
    assert "against both bases" in found.reason


def test_a_chain_is_not_made_longer_than_the_store_allows():
    assert decision(estimate(17.0, 21.0, depth=64)).newest_base == "keyframe"
    assert decision(estimate(17.0, 21.0, depth=63)).newest_base == "previous"


def test_a_saving_within_a_tie_is_not_worth_a_base():
    assert decision(estimate(25.8, 25.8)).newest_base is None
    assert decision(estimate(25.5, 25.8)).newest_base == "previous"


def test_one_unit_that_pays_carries_those_that_do_not():
    """Moments are stored whole beside weights that are stored as differences."""
    weights, moments = estimate(17.0, 17.0), estimate(27.0, 27.0)
    assert not moments.saves("previous")
    assert decision(weights, moments).newest_base is not None
    assert decision(weights, moments).kinds == ("previous", None)


def test_a_part_is_stored_whole_again_when_its_differences_have_grown():
    chained = 9.0  # What the bound leaves to nobody.
    young = estimate(21.0, 22.0, age=3, read_previous=chained * FULL_NBYTES)
    old = estimate(21.0, 23.5, age=12, read_previous=chained * FULL_NBYTES)
    assert not young.is_due()
    assert old.is_due()
    found = decision(young, old)
    assert found.kinds == ("keyframe", None)
    assert "1 of 2 parts were due to be stored whole" in found.reason


def test_when_all_parts_are_due_there_is_a_keyframe_that_says_so():
    old = estimate(21.0, 23.5, age=12, read_previous=9.0 * FULL_NBYTES)
    assert decision(old, old).is_keyframe
    assert "every part is due to be stored whole" in decision(old, old).reason


def test_a_sparse_history_goes_on_for_long_with_tiny_differences():
    assert decision(estimate(0.2, 9.0, age=60, depth=59)).newest_base == "previous"


def test_what_is_identical_costs_nothing_and_is_read_as_it_lies():
    same = estimate(0.0, 0.0, identical_read_nbytes=1000)
    assert (same.cost(None), same.cost("previous")) == (0.0, 0.0)
    assert same.read_cost("previous") == 1000
    assert not decision(same, same).is_keyframe, "nothing is written, so no keyframe begins"
    # A frozen base and a small adapter: the frozen part does not hide what differences save on the rest.
    assert decision(same, estimate(17.0, 17.0)).newest_base is not None


@pytest.mark.parametrize("growth", [0.0, 0.2, 0.5, 0.8])
def test_storing_whole_when_due_is_about_as_good_as_the_best_fixed_interval(growth):
    """Differences that grow with the logarithm of the distance from their keyframe, as those of a random walk do."""

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
