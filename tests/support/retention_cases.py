"""Golden cases of retention: a history, rules, and the seqs that stay, decided by hand.

A history is a list of entries, the oldest first; seqs count from 0. An entry is ``(step, hours)`` with hours after
Monday, 2024-02-26, 00:00 UTC, and further facts in a dict. Now is 2024-12-31 unless a case says otherwise.
"""

from __future__ import annotations

from ckstore.ops.gc.rules import Entry

MONDAY_NS = 1_708_905_600 * 10**9
HOUR_NS = 3600 * 10**9
NOW_HOURS = 309 * 24

NAN = float("nan")


def entries_of(history):
    entries = []
    for seq, row in enumerate(history):
        step, hours, *facts = row
        entries.append(Entry(seq, step, MONDAY_NS + round(hours * HOUR_NS), **(facts[0] if facts else {})))
    return entries


def hourly(count, *, every=1, steps=100):
    return [(steps * number, every * number) for number in range(count)]


def rated(*losses, metric="loss"):
    return [(number, number, {} if loss is None else {"metrics": {metric: loss}}) for number, loss in enumerate(losses)]


def tagged(count, **tags):
    return [
        (number, number, {"tags": (tags[f"s{number}"],)} if f"s{number}" in tags else {}) for number in range(count)
    ]


TEN = hourly(10)
DAYS = hourly(60, every=24)
REWOUND = [(0, 0), (1000, 1), (2000, 2), (1000, 3), (1500, 4), (2000, 5)]
ARCHIVAL = {"is_archival": True}

CASES = {
    # keep_last
    "last 1": (TEN, {"keep_last": 1}, {9}),
    "last 3": (TEN, {"keep_last": 3}, {7, 8, 9}),
    "last of fewer": (hourly(2), {"keep_last": 5}, {0, 1}),
    "last of one": (hourly(1), {"keep_last": 1}, {0}),
    "last of none": ([], {"keep_last": 1}, set()),
    "last counts by seq, not by step": ([(500, 0), (100, 1), (200, 2)], {"keep_last": 1}, {2}),
    "last counts by seq, not by time": ([(1, 9), (2, 1), (3, 0)], {"keep_last": 1}, {2}),
    "last counts entries of one step each": (REWOUND, {"keep_last": 2}, {4, 5}),
    "last does not count archival ones": ([(1, 0), (2, 1), (1, 2, ARCHIVAL)], {"keep_last": 1}, {1, 2}),
    "last counts those of the future": ([(1, 0), (2, 1), (3, 1e5)], {"keep_last": 2}, {1, 2}),
    # keep_every
    "every 200": (TEN, {"keep_every": 200}, {0, 2, 4, 6, 8, 9}),
    "every 1": (TEN, {"keep_every": 1}, set(range(10))),
    "every one that none is": ([(3, 0), (5, 1), (7, 2)], {"keep_every": 1000}, {2}),
    "every keeps step 0": ([(0, 0), (5, 1), (7, 2)], {"keep_every": 1000}, {0, 2}),
    "every keeps the newest entry of a step": (REWOUND, {"keep_every": 1000}, {0, 3, 5}),
    "every keeps the newest entry of a step once": ([(10, 0), (10, 1), (10, 2), (11, 3)], {"keep_every": 10}, {2, 3}),
    # keep_within
    "within 3h": (TEN, {"keep_within": "3h"}, {6, 7, 8, 9}),
    "within an hour and a half": (TEN, {"keep_within": "1.5h"}, {8, 9}),
    "within counts from the newest, not from now": (TEN, {"keep_within": "1h"}, {8, 9}),
    "within longer than all": (TEN, {"keep_within": "9d"}, set(range(10))),
    "within does not believe the future": ([(1, 0), (2, 5), (3, 6), (4, 1e5)], {"keep_within": "2h"}, {1, 2, 3}),
    "within a clock that was ahead once": ([(1, 0), (2, 900), (3, 1), (4, 2)], {"keep_within": "1h"}, {1, 2, 3}),
    "within a clock that was set back": ([(1, 50), (2, 51), (3, 0), (4, 1)], {"keep_within": "2h"}, {0, 1, 2, 3}),
    "within when all is future": ([(1, 1e5), (2, 1e5 + 1)], {"keep_within": "1h"}, {0, 1}),
    "within to the second": ([(1, 0), (2, 1), (3, 2)], {"keep_within": 3600}, {1, 2}),
    "within just short of it": ([(1, 0), (2, 1), (3, 2)], {"keep_within": 3599}, {2}),
    # hours, days, weeks, months, years
    "hourly 2 of two an hour": (hourly(8, every=0.5), {"keep_hourly": 2}, {5, 7}),
    "hourly skips hours that have none": ([(1, 0), (2, 7), (3, 100)], {"keep_hourly": 2}, {1, 2}),
    "daily 2": (hourly(72, every=1), {"keep_daily": 2}, {47, 71}),
    "daily of one a day": (DAYS, {"keep_daily": 3}, {57, 58, 59}),
    "daily more than there are": (hourly(30), {"keep_daily": 9}, {23, 29}),
    "daily in another zone": (hourly(72), {"keep_daily": 2, "time_zone": "+02:00"}, {69, 71}),
    "daily in a zone behind": (hourly(72), {"keep_daily": 2, "time_zone": "-02:00"}, {49, 71}),
    "weekly 2": (DAYS, {"keep_weekly": 2}, {55, 59}),
    "weekly begins on Monday": (hourly(9, every=24), {"keep_weekly": 9}, {6, 8}),
    "monthly over a leap day": (hourly(10, every=24), {"keep_monthly": 2}, {3, 9}),
    "monthly 3": (DAYS, {"keep_monthly": 3}, {34, 59, 3}),
    "yearly": ([(1, 0), (2, 24), (3, -24 * 60), (4, 24 * 300)], {"keep_yearly": 2}, {2, 3}),
    "yearly, by seq and time": ([(1, -24 * 60), (2, 0), (3, 24)], {"keep_yearly": 2}, {0, 2}),
    "daily does not believe the future": ([(1, 0), (2, 24), (3, 1e5)], {"keep_daily": 1}, {1, 2}),
    "daily of equal times takes the higher seq": ([(1, 5), (2, 5), (3, 30), (4, 30)], {"keep_daily": 2}, {1, 3}),
    "daily does not count archival ones": ([(1, 0), (2, 1), (1, 2, ARCHIVAL), (3, 24)], {"keep_daily": 2}, {1, 2, 3}),
    # keep_best
    "best 1 is the least": (rated(3, 1, 2, 4), {"keep_best": "loss"}, {1, 3}),
    "best 2": (rated(3, 1, 2, 4), {"keep_best": "loss:2"}, {1, 2, 3}),
    "best max": (rated(3, 9, 2, 4), {"keep_best": "loss:1:max"}, {1, 3}),
    "best of equals is the newer": (rated(1, 1, 1, 4), {"keep_best": "loss"}, {2, 3}),
    "best of equals is the newer, for max too": (rated(1, 7, 7, 4), {"keep_best": "loss:1:max"}, {2, 3}),
    "best without the metric is kept": (rated(3, None, 2, 4), {"keep_best": "loss"}, {1, 2, 3}),
    "best with NaN is kept": (rated(3, NAN, 2, 4), {"keep_best": "loss"}, {1, 2, 3}),
    "best of a metric that nobody has keeps all": (rated(3, 1, 2), {"keep_best": "los:min"}, {0, 1, 2}),
    "best takes infinity for a number": (rated(float("-inf"), 1, float("inf")), {"keep_best": "loss"}, {0, 2}),
    "best of two metrics": (
        [(number, number, {"metrics": {"a": number, "b": b}}) for number, b in enumerate((5, 9, 7))],
        {"keep_best": ["a:1:min", "b:1:max"]},
        {0, 1, 2},
    ),
    "best of more than there are": (rated(3, 1), {"keep_best": "loss:9"}, {0, 1}),
    "best does not rank archival ones": (
        [(1, 0, {"metrics": {"l": 5}}), (2, 1, {"metrics": {"l": 6}}), (1, 2, {"metrics": {"l": 1}, **ARCHIVAL})],
        {"keep_best": "l:min"},
        {0, 1, 2},
    ),
    # tags
    "tag keeps whatever the rules": (tagged(5, s1="good"), {"keep_last": 1}, {1, 4}),
    "tag as a rule": (tagged(5, s1="release-1", s3="other"), {"keep_tag": "release-*"}, {1, 3, 4}),
    "tag rule that matches nothing, alone, keeps all": (tagged(4), {"keep_tag": "x"}, {0, 1, 2, 3}),
    "tag rules of which none matches keep all": (tagged(4, s1="good"), {"keep_tag": ["x", "god"]}, {0, 1, 2, 3}),
    "tag rules of which one matches": (tagged(4, s1="good"), {"keep_tag": ["x", "good"]}, {1, 3}),
    "tag rule that matches nothing with another rule": (tagged(4), {"keep_tag": "x", "keep_last": 2}, {2, 3}),
    "tag of letters and case": (tagged(4, s0="Good", s1="good"), {"keep_tag": "good"}, {0, 1, 3}),
    # several rules
    "last or every": (TEN, {"keep_last": 2, "keep_every": 400}, {0, 4, 8, 9}),
    "last or within": (TEN, {"keep_last": 5, "keep_within": "1h"}, {5, 6, 7, 8, 9}),
    "last or best": (rated(1, 5, 6, 7, 8), {"keep_last": 2, "keep_best": "loss"}, {0, 3, 4}),
    "like a grandfather": (
        hourly(24 * 21),
        {"keep_hourly": 2, "keep_daily": 2, "keep_weekly": 2},
        {24 * 21 - 2, 24 * 21 - 1, 24 * 20 - 1, 24 * 14 - 1},
    ),
    # safety
    "newest stays though no rule keeps it": ([(1, 0), (2, 1)], {"keep_every": 7}, {1}),
    "newest stays despite a newer archival one": ([(1, 0), (2, 1), (1, 2, ARCHIVAL)], {"keep_every": 7}, {1, 2}),
    "partial does not count and stays": ([(1, 0), (2, 1), (3, 2, {"is_partial": True})], {"keep_last": 1}, {1, 2}),
    "all archival stay": ([(1, 0, ARCHIVAL), (2, 1, ARCHIVAL)], {"keep_every": 7}, {0, 1}),
    "future stays": ([(1, 0), (2, 1e5), (3, 2)], {"keep_last": 1}, {1, 2}),
    "older entry of a step that is tagged keeps the newer": (
        [(5, 0, {"tags": ("a",)}), (5, 1), (6, 2)],
        {"keep_last": 1},
        {0, 1, 2},
    ),
    "newer entry of a step keeps no older": ([(5, 0), (6, 1), (5, 2)], {"keep_last": 1}, {2}),
    "entry between two of a step": (
        [(5, 0), (5, 1, {"tags": ("a",)}), (5, 2), (5, 3), (6, 4)],
        {"keep_last": 1},
        {1, 2, 3, 4},
    ),
    "one that is not whole blocks": ([(1, 0), (2, 1, {"problem": "torn"}), (3, 2)], {"keep_last": 1}, {0, 1, 2}),
    "newest that is not whole blocks": ([(1, 0), (2, 1), (3, 2, {"problem": "torn"})], {"keep_last": 1}, {0, 1, 2}),
}  # fmt: skip
