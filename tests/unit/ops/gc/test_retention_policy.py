"""Protects the parsing of retention policies: valid values are read exactly, and wrong ones are refused by name."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle

import pytest

from ckstore.errors import UsageError
from ckstore.ops.gc.policy import (
    RULES,
    Best,
    Retention,
    day_of,
    hour_of,
    month_of,
    span_seconds,
    span_words,
    week_of,
    year_of,
    zone_offset_seconds,
)


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ("90s", 90), ("30m", 1800), ("12h", 43_200), ("7d", 604_800), ("2w", 1_209_600), ("1y", 31_536_000),
        ("1d12h", 129_600), ("0.5h", 1800), (60, 60), (1.5, 1.5),
    ],
)  # fmt: skip
def test_durations_are_parsed(words, seconds):
    assert span_seconds(words) == seconds


@pytest.mark.parametrize(
    "words", ["", "7", "d7", "7 d", "-7d", "0d", 0, -1, float("nan"), float("inf"), True, None, "7x"]
)
def test_invalid_durations_are_refused(words):
    with pytest.raises(UsageError, match="not a duration"):
        span_seconds(words)


@pytest.mark.parametrize("seconds", [1, 59, 60, 3599, 3600, 86_400, 90_061, 10**9, 1.5, 1_234_567.25])
def test_formatted_durations_round_trip(seconds):
    assert span_seconds(span_words(seconds)) == seconds


@pytest.mark.parametrize(("zone", "seconds"), [("UTC", 0), ("+02:00", 7200), ("-05:30", -19_800), ("+14:00", 50_400)])
def test_time_zones_are_fixed_offsets(zone, seconds):
    assert zone_offset_seconds(zone) == seconds


@pytest.mark.parametrize("zone", ["", "CET", "+2:00", "+15:00", "+02:60", "Europe/Berlin", None])
def test_zones_with_daylight_saving_are_refused(zone):
    with pytest.raises(UsageError, match="time zone"):
        zone_offset_seconds(zone)


@pytest.mark.parametrize(
    ("seconds", "hour", "week", "month"),
    [
        (0, "1970-01-01 00h", "week of 1969-12-29", "1970-01"),
        (951_782_399, "2000-02-28 23h", "week of 2000-02-28", "2000-02"),
        (951_782_400, "2000-02-29 00h", "week of 2000-02-28", "2000-02"),
        (951_868_800, "2000-03-01 00h", "week of 2000-02-28", "2000-03"),
        (1_709_164_800, "2024-02-29 00h", "week of 2024-02-26", "2024-02"),
        (4_107_542_399, "2100-02-28 23h", "week of 2100-02-22", "2100-02"),
        (4_107_542_400, "2100-03-01 00h", "week of 2100-03-01", "2100-03"),
        (-1, "1969-12-31 23h", "week of 1969-12-29", "1969-12"),
    ],
)
def test_calendar_knows_leap_years_and_mondays(seconds, hour, week, month):
    assert (hour_of(seconds), week_of(seconds), month_of(seconds)) == (hour, week, month)
    assert day_of(seconds) == hour[:10]
    assert year_of(seconds) == hour[:4]


def test_calendar_matches_the_standard_library():
    import datetime

    first = datetime.date(1901, 1, 1)
    for number in range(0, 146_097, 7):
        day = first + datetime.timedelta(days=number)
        seconds = (day - datetime.date(1970, 1, 1)).days * 86_400 + 4321
        assert day_of(seconds) == day.isoformat()
        monday = day - datetime.timedelta(days=day.weekday())
        assert week_of(seconds) == f"week of {monday.isoformat()}"


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("loss", Best("loss", 1, "min")), ("loss:3", Best("loss", 3, "min")), ("loss:max", Best("loss", 1, "max")),
        ("val/acc:2", Best("val/acc", 2, "max")), ("loss:2:min", Best("loss", 2, "min")),
    ],
)  # fmt: skip
def test_best_is_parsed(text, best):
    assert Best.of(text) == best
    assert Best.of(best.spec) == best


@pytest.mark.parametrize(
    "text", ["", ":2", "loss:0", "loss:2:mn", "loss:min:2", "loss:2:min:x", "loss:-1", None, "loss:"]
)
def test_invalid_best_is_refused(text):
    with pytest.raises(UsageError, match="keep_best"):
        Best.of(text)


def test_misspelled_order_names_the_nearest():
    with pytest.raises(UsageError, match="Did you mean 'max'"):
        Best.of("acc:2:maxx")


def test_policy_round_trips_through_config():
    policy = Retention(
        keep_last=3, keep_every=1000, keep_within="36h", keep_hourly=24, keep_daily=7, keep_weekly=4, keep_monthly=12,
        keep_yearly=2, keep_best=("loss:2", "acc:1:max"), keep_tag="release-*", keep_journal=2,
        time_zone="+02:00",
    )  # fmt: skip
    config = policy.to_config()
    assert Retention.of(config) == policy
    assert config["keep_within"] == "1d12h"
    assert set(RULES) <= set(config)


def test_policies_in_other_notation_are_equal():
    assert Retention(keep_within="36h", keep_best="loss") == Retention(keep_within="1d12h", keep_best=("loss:1:min",))
    assert Retention.of({"keep-last": 3}) == Retention(keep_last=3)
    policy = Retention(keep_last=3, keep_best=["b:min", "a:max"])
    assert str(policy) == "keep_last 3, keep_best b:1:min (lowest), keep_best a:1:max (highest)"


def test_policy_without_a_rule_is_refused():
    with pytest.raises(UsageError, match="needs at least one rule"):
        Retention()
    with pytest.raises(UsageError, match="needs at least one rule"):
        Retention(time_zone="+01:00")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("keep_lst", "keep_last"), ("keep-evry", "keep_every"), ("last", "keep_last"), ("keep_week", "keep_weekly"),
        ("keep_bestt", "keep_best"), ("timezone", "time_zone"), ("keep_tags", "keep_tag"), ("within", "keep_within"),
    ],
)  # fmt: skip
def test_misspelled_rule_names_the_nearest(given, meant):
    with pytest.raises(UsageError, match=f"Did you mean '{meant}'"):
        Retention.of({given: 3}, where="config.json")


@pytest.mark.parametrize(
    "rules",
    [
        {"keep_last": 0}, {"keep_last": -1}, {"keep_last": True}, {"keep_last": "3"}, {"keep_last": 1.5},
        {"keep_every": 0}, {"keep_within": "later"}, {"keep_daily": 10**10}, {"keep_best": 3}, {"keep_best": [""]},
        {"keep_tag": [3]}, {"keep_last": 1, "time_zone": "CET"},
    ],
)  # fmt: skip
def test_invalid_values_are_refused(rules):
    with pytest.raises(UsageError):
        Retention.of(rules)


def test_policy_can_be_copied_and_shown():
    policy = Retention(keep_last=3, keep_best="loss")
    for again in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), dataclasses.replace(policy)):
        assert again == policy
    assert dataclasses.replace(policy, keep_last=4).keep_last == 4
    assert "keep_weekly" in inspect.signature(Retention).parameters


def test_policy_arguments_are_accepted():
    policy = Retention(keep_last=3)
    assert Retention.given(policy) is policy
    assert Retention.given({"keep-last": 3}) == policy
    with pytest.raises(UsageError, match="Retention or a mapping"):
        Retention.given("keep_last=3")
