"""Jobs of four ranks with a process killed or stopped at each step of a commit lose, tear and mix nothing.

After each point: what a rank got a receipt for, and what ``wait_staged`` promised before trainers died, restores bit by
bit; so does everything else that is visible; every rank got a receipt or an error that names a rank in 20 seconds; the
savers have ended; a job with another number of ranks resumes and commits; gc removes all packs without references.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.killed_ranks import points_as_shipped, points_of, promised_points, random_points, results_of
from support.strace_sweep import fast_folder

LANES = 8
"""Jobs at a time: they wait most of the time."""

SEEDS = range(6)

SAMPLE_PART = 12
"""``make test`` samples one of so many parts of the points: a job takes two seconds of processor time."""


@pytest.fixture
def base(tmp_path):
    with fast_folder(tmp_path) as folder:
        yield folder


def check(results):
    bad = [result for result in results if result["problems"]]
    assert not bad, "\n".join(f"{result['point']}: {result['problems']}" for result in bad) + bad[0]["output"]


@pytest.mark.deep
def test_a_process_killed_or_stopped_at_any_step_breaks_no_promise(base, sample):
    points = points_of(SEEDS)
    assert len(points) >= 3000
    if not sample.is_whole:
        points = points[sample.seed(0) % SAMPLE_PART :: SAMPLE_PART]
    results = results_of(sample.part(points, parts=64), base, lanes=LANES)
    check(results)
    missed = [result["point"] for result in results if not result["was_struck"]]
    assert not missed, missed


@pytest.mark.deep(parts=64)
def test_every_rank_has_its_answer_in_20_seconds_with_the_times_as_shipped(base):
    results = results_of(points_as_shipped(), base, lanes=LANES // 2)
    check(results)
    assert all(result["was_struck"] for result in results)
    # Stopped processes are given up after 15 s.
    assert max(result["seconds"] for result in results) > 14


@pytest.mark.deep
def test_a_promised_checkpoint_survives_all_trainers(base, sample):
    points = promised_points(200)
    if not sample.is_whole:
        points = points[sample.seed(0) % 2 :: 2]
    results = results_of(sample.part(points, parts=64), base, lanes=LANES)
    check(results)
    assert all(result["was_struck"] and result["promised"] for result in results)


@pytest.mark.deep
def test_trainers_killed_at_random_moments_leave_whole_checkpoints(base, sample):
    first = sample.seed(10)
    check(results_of(random_points(range(first, first + sample.count(250, parts=128))), base, lanes=LANES))


@pytest.mark.deep(parts=2)
@pytest.mark.parametrize("fault", ["removes packs", "forgets promises"])
def test_a_missing_protection_is_found(base, fault):
    if fault == "removes packs":
        points = [point for point in points_of([0]) if (point.step, point.victims) == ("synced", ("trainer 0",))]
        points = [replace(point, fault=fault) for point in points if point.signal == "SIGKILL" and not point.is_async]
    else:
        # Several, as savers may be faster than the kill.
        points = promised_points(4, fault)
    results = results_of(points, base, lanes=1)
    problems = [problem for result in results for problem in result["problems"]]
    assert any("is not there" in problem or "restore: " in problem for problem in problems), results
