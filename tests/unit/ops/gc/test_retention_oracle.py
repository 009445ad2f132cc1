"""Protects retention plans: random histories and rules, compared with a brute-force oracle."""

from __future__ import annotations

import random

import pytest

from ckstore.ops.gc.policy import Retention
from ckstore.ops.gc.rules import Entry, plan_run
from support import retention_cases as golden
from support import retention_oracle as oracle

SEED = 20_266
SETS = 10_000
"""Histories with rules that a deep run compares."""
NOW_NS = golden.MONDAY_NS + 1000 * golden.HOUR_NS


def random_entries(rng):
    count = rng.choice([0, 1, 2, 3, 5, 8, 13, 25])
    hours, step, entries = 0.0, 0, []
    spread = rng.choice([0.3, 1, 7, 30, 200])
    for seq in range(count):
        hours += rng.choice([0, spread * rng.random(), spread])
        if rng.random() < 0.1:
            # A clock that jumps.
            hours += rng.choice([-300, 300])
        step = rng.choice([step + 100, step + 100, step + 50, rng.randrange(0, 1000, 50)])
        metrics = {}
        for name in ("a", "b"):
            if rng.random() < 0.8:
                metrics[name] = rng.choice([float("nan"), 0.0, 1.0, rng.random(), float("inf")])
        entries.append(
            Entry(
                seq=2 * seq,
                step=step,
                time_ns=golden.MONDAY_NS + int(hours * golden.HOUR_NS),
                metrics=metrics,
                tags=("good",) if rng.random() < 0.08 else ("other",) if rng.random() < 0.03 else (),
                is_archival=rng.random() < 0.08,
                is_partial=rng.random() < 0.03,
                problem="torn" if rng.random() < 0.004 else "",
            )
        )
    return entries


def random_rules(rng):
    makers = {
        "keep_last": lambda: rng.randrange(1, 6),
        "keep_every": lambda: rng.choice([50, 100, 300, 1000]),
        "keep_within": lambda: rng.choice([1, 3600, 7200, 86_400, 1_000_000]),
        "keep_hourly": lambda: rng.randrange(1, 5),
        "keep_daily": lambda: rng.randrange(1, 5),
        "keep_weekly": lambda: rng.randrange(1, 4),
        "keep_monthly": lambda: rng.randrange(1, 3),
        "keep_yearly": lambda: rng.randrange(1, 3),
        "keep_best": lambda: [f"{rng.choice('ab')}:{rng.randrange(1, 4)}:{rng.choice(['min', 'max'])}"],
        "keep_tag": lambda: [rng.choice(["good", "g*", "none"])],
    }
    names = rng.sample(list(makers), rng.choice([1, 1, 2, 3, 5]))
    rules = {name: makers[name]() for name in names}
    if rng.random() < 0.4:
        rules["time_zone"] = rng.choice(["+02:00", "-05:30", "+14:00"])
    return rules


def check(seed):
    rng = random.Random(f"{SEED}:{seed}")
    entries, rules = random_entries(rng), random_rules(rng)
    plan = plan_run("main", entries, Retention.of(rules), now_ns=NOW_NS)
    kept = {verdict.seq for verdict in plan.kept}
    assert kept == oracle.kept_seqs(entries, rules, NOW_NS), f"seed {seed}: {rules}"
    assert all(verdict.reasons for verdict in plan.verdicts)
    return len(plan.dropped)


@pytest.mark.deep
def test_random_plans_match_the_oracle(sample, note):
    seeds = sample.part(range(SETS), parts=10)
    dropped = [check(seed) for seed in seeds]
    count = len(dropped)
    assert count >= (SETS if sample.is_whole else SETS // 10)
    note(f"retention against the oracle: seed {SEED}, {count} sets, {sum(map(bool, dropped))} with something dropped")
    assert sum(map(bool, dropped)) > count // 4, "some rules must drop entries"
