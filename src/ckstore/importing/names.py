"""What the name of a file says of the checkpoint in it: its step, its metrics, its place among its shards.

Pure: names only, nothing is opened.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from ckstore.format.layout import STEP_MAX

_STEP_WORDS = r"(?:global_?step|steps?|iter(?:ation)?s?|it|checkpoint|ckpt|batch(?:es)?|ba|update)"
# A count of thousands or millions: 10k, 1.5M.
_COUNT = r"([0-9]{1,18}(?:\.[0-9]{1,3}(?=[kKmM]))?(?:[kKmM](?![A-Za-z]))?)(?![0-9])"
_STEP = re.compile(rf"(?:^|[^a-z]){_STEP_WORDS}[-_=:.]?{_COUNT}", re.ASCII | re.IGNORECASE)
_STEP_BEFORE = re.compile(
    r"(?<![0-9.])([0-9]{1,18}[kKmM]?)[-_]?(?:steps?|iters?|it|ba)(?![a-z])", re.ASCII | re.IGNORECASE
)
_EPOCH = re.compile(r"(?:^|[^a-z])(?:epochs?|ep)[-_=:.]?([0-9]{1,18})(?![0-9])", re.ASCII | re.IGNORECASE)
# By itself, or behind a word for a state: the number in resnet50, v2, fp16 or 7b counts no steps.
_NUMBER = re.compile(
    r"(?:^|[-_= ]|model|weights|state|snapshot|save)([0-9]{1,18})(?=$|[-_= ])", re.ASCII | re.IGNORECASE
)
_METRIC = re.compile(r"([A-Za-z][A-Za-z0-9_/]{0,60})=(-?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)", re.ASCII)
_SHARD = re.compile(r"(.+?)[-_]([0-9]{1,6})[-_]of[-_]([0-9]{1,6})", re.ASCII)
_DIGITS = re.compile(r"([0-9]+)")

_YEAR, _MONTH, _DAY = r"(?:19|20)[0-9]{2}", r"(?:0[1-9]|1[0-2])", r"(?:0[1-9]|[12][0-9]|3[01])"
_TIME = r"(?:[-_.T ]?(?:[01][0-9]|2[0-3])[-_.:h]?[0-5][0-9](?:[-_.:m]?[0-5][0-9])?)?"
_DATE = re.compile(
    rf"(?<![0-9])(?:{_YEAR}([-_.]){_MONTH}\1{_DAY}|{_DAY}([-_.]){_MONTH}\2{_YEAR}|{_MONTH}([-_.]){_DAY}\3{_YEAR})"
    rf"{_TIME}(?![0-9])",
    re.ASCII,
)
# A bare run of digits: a date, with or without a time, or seconds or milliseconds since 1970.
_STAMP = re.compile(rf"(?<![0-9])(?:{_YEAR}{_MONTH}{_DAY}{_TIME}|1[4-9][0-9]{{8}}(?:[0-9]{{3}})?)(?![0-9])", re.ASCII)
# Only these say of a run of digits that looks like a date that it is a step all the same.
_COUNTS_STEPS = re.compile(r"(?:step|steps|iter|iters|iteration|iterations)[-_=:.]?$", re.ASCII | re.IGNORECASE)
_UNFINISHED = re.compile(
    r"^[._]?(?:tmp|temp|incomplete|partial)[-_.]"
    r"|[-_.](?:tmp|temp|incomplete|partial|part|download|crdownload|saving|writing)(?:[-_.]?[0-9]+)?$"
    r"|[-_.]tmp[-_.]",
    re.ASCII | re.IGNORECASE,
)

NOT_METRICS = frozenset({"step", "epoch", "global_step", "iter", "iteration", "v"})


def step_of_name(name: str) -> int | None:
    """Return the step that a name states in so many words: ``checkpoint-500``, ``epoch=3-step=1200``, ``ba100``."""
    bare = _without_dates(name)[0]
    found = _STEP.findall(bare) or _STEP_BEFORE.findall(bare)
    return _bounded(found[-1]) if found else None


def number_of_name(name: str) -> int | None:
    """Return the number in a name that has one and not more, such as ``model_1000``; an epoch's too."""
    bare = _without_dates(name)[0]
    found = _EPOCH.findall(bare) or _NUMBER.findall(bare)
    return _bounded(found[0]) if len(found) == 1 else None


def dates_in_name(name: str) -> list[str]:
    """Return the dates and times in a name, which are no steps: ``20240115`` of ``run-20240115``."""
    return _without_dates(name)[1]


def is_unfinished(name: str) -> bool:
    """Say whether a name is one that writers give to what they have not finished: ``tmp-checkpoint-8``."""
    return _UNFINISHED.search(name) is not None


def _without_dates(name: str) -> tuple[str, list[str]]:
    dates: list[str] = []

    def drop(found: re.Match[str]) -> str:
        if _COUNTS_STEPS.search(found.string, 0, found.start()):
            return found[0]
        dates.append(found[0])
        return ""

    return _STAMP.sub(drop, _DATE.sub(drop, name)), dates


def _bounded(count: str) -> int | None:
    unit = {"k": 1000, "m": 1_000_000}.get(count[-1].lower(), 1)
    digits = count if unit == 1 else count[:-1]
    whole, _, part = digits.partition(".")
    number = int(whole) * unit + (int(part) * unit // 10 ** len(part) if part else 0)
    return number if number <= STEP_MAX else None


def metrics_of_name(name: str) -> dict[str, float]:
    """Return what a name says of metrics, as Lightning writes them: ``epoch=3-step=1200-val_loss=0.31``."""
    return {key: float(value) for key, value in _METRIC.findall(name) if key.lower() not in NOT_METRICS}


def shard_of_name(stem: str) -> tuple[str, int, int] | None:
    """Return of ``model-00002-of-00003`` the name of the whole, the number of the shard, and how many there are."""
    found = _SHARD.fullmatch(stem)
    return (found[1], int(found[2]), int(found[3])) if found else None


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key by which names are sorted as people do: ``model_9`` before ``model_10``."""
    parts = _DIGITS.split(name)
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts if part)


def matches(path: str, pattern: str) -> bool:
    """Say whether a glob matches a path: ``*`` stays within a name, ``**`` crosses folders."""
    return _match(path.split("/"), pattern.strip("/").split("/"))


def _match(names: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_match(names[skipped:], patterns[1:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], patterns[0]) and _match(names[1:], patterns[1:])
