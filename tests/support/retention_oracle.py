"""Retention once more, as plainly as it can be said: for each entry and rule, is it kept? Slow, and easy to believe.

It shares nothing with the code it is compared with but the types: dates come from the standard library, and every
question is answered from the definition, by checking all entries again.
"""

from __future__ import annotations

import datetime
import fnmatch
import math


def kept_seqs(entries, rules, now_ns):
    """Return the seqs that rules keep; ``rules`` is a dict as in a configuration."""
    if any(entry.problem for entry in entries):
        return {entry.seq for entry in entries}
    if rules.keys() - {"time_zone"} == {"keep_tag"} and not any(
        _tag(entry, entries, pattern, rules, now_ns) for entry in entries for pattern in rules["keep_tag"]
    ):
        return {entry.seq for entry in entries}
    kept = {entry.seq for entry in entries if _is_kept(entry, entries, rules, now_ns)}
    while True:
        more = {
            entry.seq
            for entry in entries
            if any(other.seq in kept and other.step == entry.step and other.seq < entry.seq for other in entries)
        }
        if more <= kept:
            return kept
        kept |= more


def _is_kept(entry, entries, rules, now_ns):
    if entry.tags or entry.is_archival or entry.is_partial or entry.time_ns > now_ns:
        return True
    history = [other for other in entries if not other.is_archival and not other.is_partial]
    if entry.seq == max(other.seq for other in history):
        return True
    return any(
        RULES[name](entry, history, one, rules, now_ns)
        for name, value in rules.items()
        if name != "time_zone"
        for one in (value if isinstance(value, list) else [value])
    )


def _last(entry, history, count, rules, now_ns):
    return sum(other.seq > entry.seq for other in history) < count


def _every(entry, history, steps, rules, now_ns):
    is_newest = not any(other.step == entry.step and other.seq > entry.seq for other in history)
    return entry.step % steps == 0 and is_newest


def _within(entry, history, seconds, rules, now_ns):
    believed = [other for other in history if other.time_ns <= now_ns]
    newest = max(believed, key=lambda other: other.seq)
    return entry.time_ns >= newest.time_ns - seconds * 10**9


def _moment(entry, rules):
    zone = rules.get("time_zone", "UTC")
    offset = datetime.timedelta(0)
    if zone != "UTC":
        offset = datetime.timedelta(hours=int(zone[1:3]), minutes=int(zone[4:])) * (-1 if zone[0] == "-" else 1)
    return datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=entry.time_ns // 10**9) + offset


def _period(part):
    def is_kept(entry, history, count, rules, now_ns):
        def place(other):
            return part(_moment(other, rules))

        believed = [other for other in history if other.time_ns <= now_ns]
        of_mine = [other for other in believed if place(other) == place(entry)]
        if max(of_mine, key=lambda other: (other.time_ns, other.seq)).seq != entry.seq:
            return False
        return len({place(other) for other in believed if place(other) > place(entry)}) < count

    return is_kept


def _best(entry, history, text, rules, now_ns):
    metric, count, order = text.split(":")
    value = entry.metrics.get(metric, math.nan)
    if math.isnan(value):
        return True

    def is_better(other):
        theirs = other.metrics.get(metric, math.nan)
        if theirs == value:
            return other.seq > entry.seq
        return theirs < value if order == "min" else theirs > value

    return sum(is_better(other) for other in history) < int(count)


def _tag(entry, history, pattern, rules, now_ns):
    return any(fnmatch.fnmatchcase(tag, pattern) for tag in entry.tags)


RULES = {
    "keep_last": _last,
    "keep_every": _every,
    "keep_within": _within,
    "keep_hourly": _period(lambda moment: (moment.date(), moment.hour)),
    "keep_daily": _period(lambda moment: moment.date()),
    "keep_weekly": _period(lambda moment: moment.isocalendar()[:2]),
    "keep_monthly": _period(lambda moment: (moment.year, moment.month)),
    "keep_yearly": _period(lambda moment: moment.year),
    "keep_best": _best,
    "keep_tag": _tag,
}
