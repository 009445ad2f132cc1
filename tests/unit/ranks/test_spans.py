"""Which rank writes which replicated bytes: every byte once, whole chunks, and the same load for all ranks."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.commit.chunking import SHARED_NBYTES_MAX
from ckstore.config import KIB, MIB
from ckstore.ranks.spans import Span, plan_spans

ROOT = Path(__file__).parents[3]
if str(ROOT) not in sys.path:
    # The bench is not part of the package; the tests of its programs add the repository root to the path, too.
    sys.path.append(str(ROOT))

from bench.rank_layouts import GRID_NBYTES, level_layouts, pipeline, unequal_stages  # noqa: E402

STEP = 64 * KIB


def loads_of(assigned, own):
    return [sum((span.hi - span.lo for span in spans), mine) for spans, mine in zip(assigned, own, strict=True)]


def imbalance(loads):
    return max(loads) * len(loads) / sum(loads)


def lines_of(groups, assigned):
    """Return, for each group, its line as (place, unit, lo, hi, rank) of all assigned spans, ascending."""
    lines = {}
    for holders, ranges in groups.items():
        line = []
        starts = itertools.accumulate((each.hi - each.lo for each in ranges), initial=0)
        for start, each in zip(starts, ranges, strict=False):
            for rank, spans in enumerate(assigned):
                line += [
                    (start + span.lo - each.lo, *span, rank)
                    for span in spans
                    if span.unit == each.unit and each.lo <= span.lo < each.hi
                ]
        lines[holders] = sorted(line)
    return lines


def check_plan(groups, steps, assigned):
    """Check the invariants of a plan: each byte once, by a holder, one stretch each, and divided on the grid only."""
    lines = lines_of(groups, assigned)
    assert sum(map(len, lines.values())) == sum(map(len, assigned))
    edges = {(span.unit, at) for ranges in groups.values() for span in ranges for at in (span.lo, span.hi)}
    for holders, line in lines.items():
        place = 0
        for begin, unit, lo, hi, rank in line:
            assert begin == place
            assert lo < hi
            assert rank in holders
            for at in (lo, hi):
                assert at % steps[unit] == 0 or (unit, at) in edges
            place += hi - lo
        assert place == sum(span.hi - span.lo for span in groups[holders])
        # The ranks are in ascending order on the line, so each has one stretch.
        ranks = [rank for *_, rank in line]
        assert ranks == sorted(ranks)
    spans_of_all = set(itertools.chain.from_iterable(assigned))
    for each in itertools.chain.from_iterable(groups.values()):
        assert (
            each in spans_of_all or each.hi - each.lo >= min(SHARED_NBYTES_MAX, steps[each.unit]) or each.hi == each.lo
        )
    for spans in assigned:
        assert spans == sorted(spans)


@st.composite
def ranges_of_units(draw, units, nbytes_max):
    """Draw ranges, each of its own unit, in any order of lengths."""
    ranges = []
    for _ in range(draw(st.integers(0, 4))):
        lo = draw(st.integers(0, 3 * STEP))
        nbytes = draw(st.sampled_from([0, 4, SHARED_NBYTES_MAX - 1]) | st.integers(SHARED_NBYTES_MAX, nbytes_max))
        ranges.append(Span(next(units), lo, lo + nbytes))
    return ranges


@st.composite
def any_groups(draw):
    world = draw(st.integers(1, 6))
    units = itertools.count()
    holders = draw(st.sets(st.frozensets(st.integers(0, world - 1), min_size=1), max_size=5))
    groups = {tuple(sorted(each)): draw(ranges_of_units(units, MIB)) for each in sorted(holders, key=sorted)}
    own = draw(st.lists(st.integers(0, 2 * MIB), min_size=world, max_size=world))
    steps = [draw(st.sampled_from([STEP, 2 * STEP, 8 * STEP])) for _ in range(next(units))]
    return groups, steps, own


@given(any_groups())
def test_every_byte_is_written_once_and_divided_on_the_grid_only(drawn):
    groups, steps, own = drawn
    assigned = plan_spans(groups, steps, own)
    assert len(assigned) == len(own)
    check_plan(groups, steps, assigned)
    assert plan_spans(dict(reversed(groups.items())), steps, own) == assigned


@st.composite
def nested_groups(draw):
    """Draw groups each two of which are disjoint or nested, as on a device mesh, and how deep they are nested."""
    world, units = draw(st.integers(2, 8)), itertools.count()
    groups, depth, level = {}, 0, [tuple(range(world))]
    while level:
        depth += 1
        parts = []
        for holders in level:
            groups[holders] = draw(ranges_of_units(units, 4 * MIB))
            if len(holders) > 2:
                at = draw(st.integers(1, len(holders) - 1))
                parts += [part for part in (holders[:at], holders[at:]) if len(part) > 1]
        level = parts
    own = draw(st.lists(st.integers(0, 4 * MIB), min_size=world, max_size=world))
    return groups, [STEP] * next(units), own, depth


def lowest_maximum(groups, own):
    """Return the lowest possible maximum of the loads if bytes could be divided anywhere.

    Any ranks have to write everything that no other rank holds; the most loaded of them writes at least the mean.
    """
    sizes = {holders: sum(span.hi - span.lo for span in ranges) for holders, ranges in groups.items()}
    subsets = (
        set(ranks) for count in range(1, len(own) + 1) for ranks in itertools.combinations(range(len(own)), count)
    )
    return max(
        (sum(own[rank] for rank in ranks) + sum(n for holders, n in sizes.items() if ranks.issuperset(holders)))
        / len(ranks)
        for ranks in subsets
    )


@given(nested_groups())
def test_the_highest_load_is_as_low_as_the_grid_allows(drawn):
    groups, steps, own, depth = drawn
    loads = loads_of(plan_spans(groups, steps, own), own)
    # A cut moves by half a step, or by half of a range that is not divided.
    assert max(loads) <= lowest_maximum(groups, own) + depth * SHARED_NBYTES_MAX


@pytest.mark.parametrize("layout", level_layouts(), ids=lambda layout: layout.name)
def test_ranks_write_the_same_number_of_bytes(layout):
    groups, own = layout.split()
    steps = [GRID_NBYTES] * len(layout.tensors)
    assigned = plan_spans(groups, steps, own)
    loads = loads_of(assigned, own)
    assert sum(loads) == layout.nbytes
    assert imbalance(loads) <= 1.02


def test_unequal_pipeline_stages_are_within_a_tenth():
    layout = unequal_stages()
    groups, own = layout.split()
    loads = loads_of(plan_spans(groups, [GRID_NBYTES] * len(layout.tensors), own), own)
    assert sum(loads) == layout.nbytes
    assert imbalance(loads) <= 1.10


def test_replicas_of_a_pipeline_stage_are_level_even_if_stages_differ_much():
    layout = pipeline((2, 14, 14, 2), 4)
    groups, own = layout.split()
    loads = loads_of(plan_spans(groups, [GRID_NBYTES] * len(layout.tensors), own), own)
    for stage in range(4):
        assert imbalance(loads[4 * stage :][:4]) <= 1.02


def test_a_plan_of_a_real_layout_keeps_the_invariants():
    layout = next(layout for layout in level_layouts() if layout.name.startswith("DP4 x TP4"))
    groups, own = layout.split()
    steps = [GRID_NBYTES] * len(layout.tensors)
    check_plan(groups, steps, plan_spans(groups, steps, own))


def test_ranks_that_have_more_to_write_get_less():
    groups = {(0, 1, 2): [Span(0, 0, 12 * MIB)]}
    assigned = plan_spans(groups, [MIB], [8 * MIB, 2 * MIB, 0])
    assert assigned == [[], [Span(0, 0, 5 * MIB)], [Span(0, 5 * MIB, 12 * MIB)]]


def test_smaller_groups_come_first():
    groups = {(0, 1, 2, 3): [Span(0, 0, 12 * MIB)], (0, 1): [Span(1, 0, 4 * MIB)]}
    loads = loads_of(plan_spans(groups, [MIB, MIB], [0] * 4), [0] * 4)
    assert loads == [4 * MIB] * 4


def test_a_shard_is_divided_on_the_grid_of_the_whole_tensor():
    groups = {(0, 1): [Span(0, 3 * MIB, 13 * MIB)]}
    assert plan_spans(groups, [4 * MIB], [0, 0]) == [[Span(0, 3 * MIB, 8 * MIB)], [Span(0, 8 * MIB, 13 * MIB)]]


def test_units_have_steps_of_their_own():
    groups = {(0, 1): [Span(0, 0, 6 * MIB), Span(1, 0, 10 * MIB)]}
    assert plan_spans(groups, [4 * MIB, 2 * MIB], [0, 0]) == [
        [Span(0, 0, 6 * MIB), Span(1, 0, 2 * MIB)],
        [Span(1, 2 * MIB, 10 * MIB)],
    ]


def test_a_small_range_across_a_grid_line_is_written_by_one_rank():
    small = Span(0, 4 * MIB - 100 * KIB, 4 * MIB + 100 * KIB)
    assigned = plan_spans({(0, 1): [small]}, [4 * MIB], [0, 0])
    assert sorted(assigned) == [[], [small]]


def test_a_scalar_that_thousands_hold_is_written_by_the_least_loaded():
    own = [MIB] * 4096
    own[77] = 0
    assigned = plan_spans({tuple(range(4096)): [Span(0, 0, 4)]}, [4 * MIB], own)
    assert [rank for rank, spans in enumerate(assigned) if spans] == [77]
    assert assigned[77] == [Span(0, 0, 4)]


def test_scalars_of_many_groups_spread_over_their_holders():
    pairs = [(2 * index, 2 * index + 1) for index in range(50)] + [tuple(range(100))]
    groups = {pair: [Span(unit, 0, 4)] for unit, pair in enumerate(pairs)}
    assigned = plan_spans(groups, [4 * MIB] * len(groups), [0] * 100)
    assert max(map(len, assigned)) == 1
    check_plan(groups, [4 * MIB] * len(groups), assigned)


def test_nothing_to_assign():
    assert plan_spans({}, [], [5, 0]) == [[], []]
    assert plan_spans({(0, 1): []}, [], [5, 0]) == [[], []]
    assert plan_spans({(0, 1): [Span(0, 7, 7)]}, [MIB], [5, 0]) == [[], []]


def test_what_one_rank_holds_is_written_by_it():
    assert plan_spans({(1,): [Span(0, 0, 9 * MIB)]}, [MIB], [0, 5 * MIB]) == [[], [Span(0, 0, 9 * MIB)]]


def test_thousands_of_ranks_are_level():
    shards, replicas, tensors = 64, 64, 873
    nbytes = 16 * MIB
    groups = {
        tuple(range(shard, shards * replicas, shards)): [
            Span(unit, shard * nbytes, (shard + 1) * nbytes) for unit in range(tensors)
        ]
        for shard in range(shards)
    }
    own = [0] * (shards * replicas)
    loads = loads_of(plan_spans(groups, [4 * MIB] * tensors, own), own)
    assert sum(loads) == shards * tensors * nbytes
    assert imbalance(loads) <= 1.02
    assert math.isclose(min(loads), max(loads), rel_tol=0.04)
