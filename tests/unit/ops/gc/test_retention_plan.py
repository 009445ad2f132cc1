"""Protects retention plans: golden histories, and a reason for every decision."""

from __future__ import annotations

import pytest

from ckstore.ops.gc.policy import Retention
from ckstore.ops.gc.rules import Entry, plan_run
from support import retention_cases as golden

NOW_NS = golden.MONDAY_NS + golden.NOW_HOURS * golden.HOUR_NS


def plan_of(history, rules, **options):
    policy = None if rules is None else Retention.of(rules)
    return plan_run("main", golden.entries_of(history), policy, now_ns=NOW_NS, **options)


def reasons_of(plan):
    return {verdict.seq: verdict.reasons for verdict in plan.verdicts}


def test_there_are_enough_golden_cases():
    assert len(golden.CASES) >= 60


@pytest.mark.parametrize("case", golden.CASES)
def test_golden_history_matches_decisions_by_hand(case):
    history, rules, kept = golden.CASES[case]
    plan = plan_of(history, rules)
    assert {verdict.seq for verdict in plan.kept} == kept
    assert {verdict.seq for verdict in plan.dropped} == set(range(len(history))) - kept
    assert all(verdict.reasons for verdict in plan.verdicts)
    assert [verdict.seq for verdict in plan.verdicts] == list(range(len(history)))[::-1]


def test_plan_does_not_depend_on_entry_order():
    for history, rules, _ in golden.CASES.values():
        entries = golden.entries_of(history)
        policy = Retention.of(rules)
        one = plan_run("main", entries, policy, now_ns=NOW_NS)
        other = plan_run("main", entries[::-1], policy, now_ns=NOW_NS)
        assert one == other


def test_without_rules_nothing_is_dropped():
    plan = plan_of(golden.TEN, None)
    assert plan.dropped == ()
    assert plan.rules == ""
    assert set(reasons_of(plan).values()) == {("there is no rule",)}


def test_kept_entry_has_every_reason():
    history = [
        (0, 0),
        (1000, 1, {"tags": ("good", "fine"), "metrics": {"loss": 0.5}}),
        (1001, 2, {"metrics": {"loss": 2}}),
    ]
    rules = {"keep_last": 2, "keep_every": 1000, "keep_within": "1h", "keep_daily": 1, "keep_best": "loss"}
    reasons = reasons_of(plan_of(history, rules))
    assert reasons[1] == (
        "tag good", "tag fine", "keep_last 2", "keep_every 1000", "keep_within 1h",
        "keep_best loss:1:min (lowest): 0.5 is number 1",
    )  # fmt: skip
    assert reasons[2] == ("the newest", "keep_last 2", "keep_within 1h", "keep_daily 1: 2024-02-26")
    assert reasons[0] == ("keep_every 1000", "keep_best loss:1:min (lowest): it lacks the metric or has NaN")


def test_dropped_entry_has_a_reason_per_rule():
    history = [
        (77, 0, {"metrics": {"loss": 3}}),
        (100, 30, {"metrics": {"loss": 1}}),
        (200, 31, {"metrics": {"loss": 2}}),
    ]
    rules = {
        "keep_last": 1, "keep_every": 100, "keep_within": "1h", "keep_daily": 1, "keep_best": "loss", "keep_tag": "x"
    }  # fmt: skip
    assert reasons_of(plan_of(history, rules))[0] == (
        "keep_last 1: number 3 from the newest",
        "keep_every 100: step 77 is not a multiple",
        "keep_within 1h: 1d7h older than the newest",
        "keep_daily 1: 2024-02-26 is not one of the last 1",
        "keep_best loss:1:min (lowest): 3 is number 3",
        "keep_tag x: no matching tag",
    )


def test_dropped_entry_names_its_newer_replacement():
    reasons = reasons_of(plan_of([(10, 0), (10, 1), (11, 2)], {"keep_every": 10, "keep_daily": 1}))
    assert reasons[0] == (
        "keep_every 10: seq 1 is a newer entry of step 10", "keep_daily 1: seq 2 is the newest of 2024-02-26"
    )  # fmt: skip


def test_entry_kept_for_an_older_one_says_so():
    history = [(5, 0, {"tags": ("a",)}), (5, 1), (6, 2)]
    assert reasons_of(plan_of(history, {"keep_last": 1}))[1] == ("seq 0, an older entry of this step, is kept",)


def test_blocked_run_keeps_all_with_reason():
    plan = plan_of(golden.TEN, {"keep_last": 1}, blocked="a tag cannot be read")
    assert plan.blocked == "a tag cannot be read"
    assert plan.dropped == ()
    assert "a tag cannot be read" in plan.verdicts[0].reasons[0]
    plan = plan_of([(1, 0, {"problem": "pack ab is missing"}), (2, 1)], {"keep_last": 1})
    assert plan.blocked == "seq 0: pack ab is missing"


def test_unknown_metric_lists_existing_ones():
    plan = plan_of(golden.rated(3, 1, 2), {"keep_best": "los:min"})
    assert plan.notes == (
        "keep_best los:1:min (lowest): no checkpoint has this metric, so all are kept; existing metrics: loss",
    )  # fmt: skip
    assert "no checkpoint has a metric" in plan_of(golden.TEN, {"keep_best": "loss"}).notes[0]
    assert (
        "without the metric or with NaN, and therefore kept: 1"
        in plan_of(golden.rated(3, None, 2), {"keep_best": "loss"}).notes[0]
    )
    assert plan_of(golden.rated(3, 1), {"keep_best": "loss"}).notes == ()


def test_metric_with_only_nan_is_not_missing():
    plan = plan_of(golden.rated(float("nan"), float("nan")), {"keep_best": "loss"})
    assert plan.notes == ("keep_best loss:1:min (lowest): every value of this metric is NaN, so all are kept",)


def test_unknown_tag_lists_existing_ones():
    history = golden.tagged(4, s1="good", s2="fine")
    plan = plan_of(history, {"keep_tag": "god"})
    assert plan.notes == (
        "keep_tag god: no checkpoint has such a tag, so all are kept; existing tags: fine, good",
    )  # fmt: skip
    assert reasons_of(plan)[0] == ("keep_tag god: no checkpoint has such a tag",)
    plan = plan_of(history, {"keep_tag": ["god", "fine"], "keep_last": 1})
    assert plan.notes == ("keep_tag god: no checkpoint has such a tag; existing tags: fine, good",)
    assert "no checkpoint has a tag" in plan_of(golden.TEN, {"keep_tag": "x"}).notes[0]
    assert plan_of(history, {"keep_tag": "g*"}).notes == ()


def test_large_history_is_planned_quickly():
    entries = [Entry(n, n, golden.MONDAY_NS + n * 10**9, {"loss": float(n % 97)}) for n in range(20_000)]
    policy = Retention(keep_last=3, keep_every=1000, keep_within="1h", keep_hourly=24, keep_best="loss:5")
    plan = plan_run("main", entries, policy, now_ns=NOW_NS)
    assert len(plan.verdicts) == 20_000


def test_a_kept_entry_in_replay_form_keeps_its_base():
    """Of entries that a base keeps because it is older and of the same step, the bases are kept, too."""
    entries = [
        Entry(seq, step, NOW_NS, base=base)
        for seq, step, base in ((0, 1, None), (1, 2, None), (2, 2, 0), (3, 3, 1), (4, 4, None), (5, 5, 4), (6, 6, None))
    ]
    plan = plan_run("main", entries, Retention.of({"keep_every": 3}), now_ns=NOW_NS)
    assert {verdict.seq for verdict in plan.kept} == {0, 1, 2, 3, 6}
    reasons = reasons_of(plan)
    assert reasons[1] == ("step 3, which is kept in replay form, begins from it",)
    assert reasons[2] == ("seq 1, an older entry of this step, is kept",)
    assert reasons[0] == ("step 2, which is kept in replay form, begins from it",)
    plan = plan_run("main", entries, Retention.of({"keep_last": 1}), now_ns=NOW_NS)
    assert {verdict.seq for verdict in plan.kept} == {6}
