"""What the name of a file says of the checkpoint in it: its step, its metrics, its place among its shards.

Pure: names only, nothing is opened.
"""

from __future__ import annotations

import re

from ckstore.format.layout import STEP_MAX

_STEP_WORDS = r"(?:global_?step|steps?|iter(?:ation)?s?|it|checkpoint|ckpt|batch(?:es)?|ba|update)"
_STEP = re.compile(rf"(?:^|[^a-z]){_STEP_WORDS}[-_=:.]?([0-9]{{1,18}})(?![0-9])", re.ASCII | re.IGNORECASE)
_STEP_BEFORE = re.compile(r"(?<![0-9.])([0-9]{1,18})[-_]?(?:steps?|iters?|it|ba)(?![a-z])", re.ASCII | re.IGNORECASE)
_EPOCH = re.compile(r"(?:^|[^a-z])(?:epochs?|ep)[-_=:.]?([0-9]{1,18})(?![0-9])", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"(?<![0-9.])([0-9]{1,18})(?![0-9.])", re.ASCII)
_METRIC = re.compile(r"([A-Za-z][A-Za-z0-9_/]{0,60})=(-?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)", re.ASCII)
_SHARD = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})", re.ASCII)
_DIGITS = re.compile(r"([0-9]+)")

NOT_METRICS = frozenset({"step", "epoch", "global_step", "iter", "iteration", "v"})


def step_of_name(name: str) -> int | None:
    """Return the step that a name states in so many words: ``checkpoint-500``, ``epoch=3-step=1200``, ``ba100``."""
    found = _STEP.findall(name) or _STEP_BEFORE.findall(name)
    return _bounded(found[-1]) if found else None


def number_of_name(name: str) -> int | None:
    """Return the number in a name that has one and not more, such as ``model_1000``; an epoch's too."""
    found = _EPOCH.findall(name) or _NUMBER.findall(name)
    return _bounded(found[0]) if len(found) == 1 else None


def _bounded(digits: str) -> int | None:
    return int(digits) if int(digits) <= STEP_MAX else None


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
