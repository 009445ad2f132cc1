"""Protects commit intervals: commits cost no more than the bound, wait for the writer, and follow changes.

Training loops are simulated on a clock that advances only for steps and commits.
"""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest

import ckstore
from ckstore.background.pending import Pending
from ckstore.errors import UsageError
from ckstore.interval import COMMITS_MAX, DAY_SECONDS, Costs, Measured, advice_for, optimal_seconds


class Run:
    """A training loop whose steps and commits take the time that a test sets."""

    def __init__(self, clock, *, step=1.0, stall=0.1, write=5.0, slower=1.0, **options):
        self.clock, self.costs = clock, Costs(clock)
        self.step_seconds, self.stall, self.write, self.slower = step, stall, write, slower
        self.pending, self.left, self.number = None, 0.0, 0
        self.committed, self.took = [], []
        self.auto = ckstore.AutoInterval(clock=clock, **{"seconds_min": 0.0, **options}).follow(self)
        self.auto.due(0)

    def run(self, steps, *, loses=()):
        """Train these steps, and return the share of time that commits cost."""
        begun, worked = self.clock.now, 0.0
        for _ in range(steps):
            self.number += 1
            worked += self.step_seconds
            seconds = self.step_seconds * (self.slower if self.pending else 1.0)
            self.clock.sleep(seconds)
            self.write_on(seconds)
            if self.auto.due(self.number):
                self.commit(is_lost=self.number in loses)
        return 1 - worked / (self.clock.now - begun)

    def commit(self, *, is_lost=False):
        assert self.pending is None, "due while another commit was being written"
        self.committed.append(self.number)
        self.clock.sleep(self.stall)
        self.pending, self.left = Pending(self.number), self.write
        self.pending.stall_seconds = self.stall
        self.costs.watch(self.pending)
        if is_lost:
            self.pending.note_failed(ckstore.SaverError("lost"))
            self.pending = None

    def write_on(self, seconds):
        self.left -= seconds
        if self.pending is not None and self.left <= 0:
            self.clock.now += self.left
            self.pending.note_done(object())
            self.clock.now -= self.left
            self.pending = None

    def intervals(self, since=0):
        later = [number for number in self.committed if number >= since]
        return [second - first for first, second in itertools.pairwise(later)]


def measured(stall=0.2, write=3.0, slowdown=0.0):
    return Measured(4, stall, write, slowdown)


def test_advice_keeps_the_bound_on_overhead():
    for stall, step, overhead in ((0.2, 0.5, 0.03), (1.0, 0.013, 0.01), (3.0, 60.0, 0.05)):
        advice = advice_for(measured(stall, write=0.0), step, overhead=overhead)
        assert advice.reason == "overhead"
        assert advice.stall_share <= overhead
        fewer = (advice.steps - 1) * step
        assert fewer == 0 or stall / fewer > overhead, "one step less would also be within the bound"


def test_advice_is_not_faster_than_writing():
    advice = advice_for(measured(stall=0.001, write=7.3), 2.0)
    assert (advice.steps, advice.reason) == (4, "writing")
    assert advice.seconds >= 7.3
    limited = advice_for(measured(stall=0.5, write=7.3), 2.0, seconds_max=3.0)
    assert 7.3 <= limited.seconds <= 7.3 + 2
    assert limited.reason == "writing"
    barely = advice_for(measured(stall=0.5, write=7.3), 5.0, seconds_max=8.0)
    assert (barely.steps, barely.reason) == (2, "writing")


def test_longest_interval_overrides_the_overhead_bound():
    advice = advice_for(measured(stall=5.0), 2.0, overhead=0.01, seconds_max=100.0)
    assert (advice.steps, advice.reason) == (50, "seconds_max")
    assert advice.stall_share > 0.01


@pytest.mark.parametrize(("cost", "mtbf"), [(0.5, 3600.0), (30.0, 4000.0), (600.0, 7200.0), (5.0, 864_000.0)])
def test_optimum_matches_a_search(cost, mtbf):
    """Minimize Daly's expected time to finish a second of work, with free restarts, by search."""

    def expected(tau):
        return mtbf * math.expm1((tau + cost) / mtbf) / tau

    tried = min((mtbf * 1.001**-power for power in range(1, 12_000)), key=expected)
    assert expected(optimal_seconds(cost, mtbf)) <= expected(tried) * 1.0002
    assert optimal_seconds(cost, mtbf) == pytest.approx(tried, rel=0.03)


def test_optimum_has_the_right_limits():
    assert optimal_seconds(0.01, 1e6) == pytest.approx(math.sqrt(2 * 0.01 * 1e6), rel=1e-3)
    assert optimal_seconds(50.0, 10.0) == 10.0


def test_failure_rate_lengthens_the_interval():
    often = advice_for(measured(stall=0.005, write=2.0), 0.5)
    rare = advice_for(measured(stall=0.005, write=2.0), 0.5, failures_per_day=1)
    assert (often.reason, rare.reason) == ("writing", "failures")
    assert rare.seconds == pytest.approx(math.sqrt(2 * 0.005 * DAY_SECONDS), abs=1)
    assert rare.lost_seconds == pytest.approx(rare.seconds / 2 + 2)
    assert rare.lost_seconds_max == pytest.approx(rare.seconds + 2)
    assert rare.lost_share == pytest.approx(rare.lost_seconds / DAY_SECONDS)
    assert often.lost_share is None


def test_advice_reads_as_a_sentence():
    text = str(advice_for(measured(stall=0.9, slowdown=0.3, write=3.0), 0.5, failures_per_day=4))
    assert text.startswith(
        "commit every 454 steps, which is every 3.78 min: this is the optimum for the given failure rate. "
    )
    assert "Commits take 0.53% of the time; a failure loses 116 s of work on average, 3.83 min at most" in text
    assert text.endswith(": 0.54% of the time.")
    text = str(advice_for(measured(stall=0.9, slowdown=None), 0.5))
    assert (
        "Commits take 2.91% of the time, not counting the slowdown of steps, which was not measured; a failure" in text
    )


def test_invalid_numbers_are_refused():
    for arguments in (
        {"step_seconds": 0.0},
        {"step_seconds": math.nan},
        {"overhead": 0.0},
        {"overhead": 3.0},
        {"failures_per_day": 0.0},
        {"failures_per_day": math.inf},
    ):
        with pytest.raises(UsageError, match=next(iter(arguments))):
            advice_for(measured(), **{"step_seconds": 1.0, **arguments})
    for arguments in ({"overhead": 30}, {"seconds_min": -1.0}, {"seconds_max": 0.0}, {"seconds_max": 5.0}):
        with pytest.raises(UsageError, match=next(iter(arguments))):
            ckstore.AutoInterval(**arguments)


def test_simulated_run_obeys_the_overhead_bound(clock):
    run = Run(clock, step=0.5, stall=0.4, write=3.0)
    assert run.run(20_000) == pytest.approx(0.03, rel=0.1)
    assert run.committed[0] == 3
    assert run.auto.advice.reason == "overhead"


def test_slower_steps_during_writing_count(clock):
    run = Run(clock, step=0.5, stall=0.01, write=10.0, slower=1.3)
    assert run.run(20_000) == pytest.approx(0.03, rel=0.2)
    assert run.auto.advice.measured.slowdown_seconds == pytest.approx(0.15 * 20, rel=0.35)


def test_store_advice_uses_measured_intervals(clock):
    run = Run(clock, step=0.5, stall=0.005, write=10.0, slower=1.2)
    run.run(5_000)
    advice = advice_for(run.costs.measured(), 0.5)
    assert advice.measured.slowdown_seconds == pytest.approx(0.1 * 20, rel=0.2)
    assert advice.seconds == run.auto.advice.seconds > 50, "the write time alone allows a commit every 10 s"


def test_failed_commits_are_not_retried_early(clock):
    run = Run(clock, step=1.0, stall=0.1, write=1.0, seconds_min=60.0)
    run.run(600)
    assert min(run.intervals()) >= 60
    run.run(6_000, loses=range(10_000))
    assert len(run.committed) > 3 * COMMITS_MAX
    assert min(run.intervals()) >= 60
    slowed = Run(clock, step=0.5, stall=0.005, write=10.0, slower=1.2)
    slowed.run(5_000)
    before = slowed.costs.measured()
    slowed.run(6_000, loses=range(20_000))
    after = slowed.costs.measured()
    assert (after.commit_count, after.slowdown_seconds) == (COMMITS_MAX - 1, before.slowdown_seconds)
    assert after.write_seconds == pytest.approx(before.write_seconds)
    never = Run(clock, step=1.0, stall=0.1, write=1.0, seconds_min=60.0)
    never.run(600, loses=range(10_000))
    assert never.committed[0] == 3
    assert min(never.intervals()) >= 60


def test_failed_call_is_not_due_immediately(disk_store, clock):
    auto = ckstore.AutoInterval(seconds_min=60.0, clock=clock).follow(disk_store)
    tried = []
    for step in range(300):
        if auto.due(step):
            tried.append(step)
            with pytest.raises(ckstore.CkstoreError):
                disk_store.commit_async({"w": np.zeros(1 << 20)}, step, policy=ckstore.Policy(arena_nbytes_max=4096))
        clock.sleep(1.0)
    assert tried[0] == 3
    assert len(tried) > 2
    assert min(np.diff(tried)) >= 60


def test_writing_is_never_overtaken(clock):
    run = Run(clock, step=0.5, stall=0.001, write=20.0)
    run.run(5_000)
    assert min(run.intervals()) * 0.5 >= 20
    assert np.median(run.intervals()) * 0.5 <= 21.5


def test_interval_follows_changing_costs(clock):
    run = Run(clock, step=0.5, stall=0.3, write=2.0)
    run.run(1_000)
    before = np.median(run.intervals())
    run.stall = 1.2
    run.run(15_000)
    assert np.median(run.intervals(since=10_000)) == pytest.approx(4 * before, rel=0.1)
    run.step_seconds = 2.0
    since = run.number + 2_000
    run.run(12_000)
    assert np.median(run.intervals(since)) == pytest.approx(before, rel=0.1)


def test_outlier_counts_only_as_elapsed_time(clock):
    run = Run(clock, step=0.5, stall=0.3, write=2.0)
    run.run(1_000)
    before = run.auto.advice
    # A disk that hangs once, then an evaluation that takes as long as a slow step.
    run.stall, run.write = 30.0, 100.0
    while len(run.committed) < COMMITS_MAX + 2 and run.stall > 1:
        count = len(run.committed)
        run.run(1)
        if len(run.committed) > count:
            run.stall, run.write = 0.3, 2.0
    run.run(300)
    assert run.auto.advice.seconds == before.seconds
    count = len(run.committed)
    run.step_seconds = 100.0
    run.run(1)
    run.step_seconds = 0.5
    run.run(1)
    assert len(run.committed) == count + 1
    assert run.auto.advice.seconds == before.seconds


def test_shortest_and_longest_interval_are_kept(clock):
    run = Run(clock, step=0.5, stall=0.001, write=0.1, seconds_min=60.0)
    run.run(2_000)
    assert set(run.intervals()) == {120}
    run = Run(clock, step=0.5, stall=60.0, write=0.1, seconds_max=100.0)
    run.run(4_000)
    assert set(run.intervals()) == {200}


def test_commits_that_failed_are_not_measured(clock):
    run = Run(clock, step=0.5, stall=0.1, write=1.0)
    run.run(4, loses={3})
    assert run.costs.measured() is None
    run.run(10)
    assert run.costs.measured().commit_count == 1
    assert run.committed == [3, 6, 13]


def test_observed_steps_are_used(clock):
    run = Run(clock, stall=0.3, write=0.1)
    for number in range(1, 41):
        run.auto.observe(2.0)
        if run.auto.due(number):
            run.number = number
            run.commit()
            run.write_on(1.0)
    assert run.auto.advice.step_seconds == 2.0
    # 0.3 s may be spent in 10 s, which is in five steps.
    assert set(run.intervals(3)) == {5}


def test_without_a_store_nothing_is_due():
    with pytest.raises(UsageError, match="follow"):
        ckstore.AutoInterval().due(1)


def test_store_advice_uses_its_commit_costs(disk_store):
    with pytest.raises(UsageError, match="Commit once"):
        disk_store.advise(0.5)
    state = {"w": np.random.default_rng(0).standard_normal(1 << 20)}
    pending = disk_store.commit_async(state, 1)
    pending.result()
    advice = disk_store.advise(0.5, failures_per_day=2)
    assert advice.measured.commit_count == 1
    assert advice.measured.stall_seconds == pending.stall_seconds > 0
    assert advice.measured.write_seconds > 0
    receipt = disk_store.commit(state, 2)
    assert disk_store.costs.newest == (2, None)
    both = disk_store.advise(0.5).measured
    assert both.stall_seconds == pytest.approx((pending.stall_seconds + receipt.seconds["total"]) / 2)


def test_loop_commits_through_a_real_saver(disk_store):
    state = {"w": np.zeros(1 << 18)}
    auto = ckstore.AutoInterval(overhead=1.0, seconds_min=0.0).follow(disk_store)
    assert "nothing measured" in repr(ckstore.AutoInterval())
    step, pendings = 0, []
    while len(pendings) < 5:
        assert step < 60_000, "commits are no longer due"
        state["w"] += 1
        if auto.due(step):
            assert not disk_store.costs.is_busy
            pendings.append(disk_store.commit_async(state, step))
        step += 1
        time.sleep(0.001)
    disk_store.wait()
    assert disk_store.steps() == [pending.step for pending in pendings]
    assert disk_store.steps()[0] == 3
    assert disk_store.restore()["w"][0] == pendings[-1].step + 1
    assert "commit every" in repr(auto)


def test_finished_commits_are_not_kept(clock):
    costs = Costs(clock)
    for step in range(50):
        pending = Pending(step)
        pending.stall_seconds = 1.0
        costs.watch(pending)
        clock.sleep(2.0)
        pending.note_done(object())
    costs.note(50, 4.0)
    assert costs.stall_seconds == 54.0
    assert costs.newest == (50, None)
    assert costs.measured() == Measured(COMMITS_MAX, 1.0, 2.0)
