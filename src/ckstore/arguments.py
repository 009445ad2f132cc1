"""Check what a trainer hands to a commit, before anything is read or written."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import SupportsIndex

from ckstore.config import Policy
from ckstore.errors import UsageError, shown_object
from ckstore.format.layout import STEP_MAX, check_name

METRICS_NBYTES_MAX = 48 << 10
"""Names and numbers together, so that they fit into a manifest's header of 64 KiB."""


def check_step(step: SupportsIndex) -> int:
    """Return the step as an int; UsageError if it is none, or out of range."""
    if isinstance(step, bool):
        raise UsageError("a step is an integer", where=f"step={shown_object(step)}")
    try:
        number = operator.index(step)
    except TypeError:
        raise UsageError("a step is an integer", where=f"step={shown_object(step)}") from None
    if not 0 <= number <= STEP_MAX:
        raise UsageError(f"a step lies between 0 and {STEP_MAX}", where=f"step={shown_object(step)}")
    return number


def check_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics with plain floats; UsageError for names and values that are none."""
    checked: dict[str, float] = {}
    if (
        sum(len(name.encode(errors="replace")) + 12 for name in metrics or () if isinstance(name, str))
        > METRICS_NBYTES_MAX
    ):
        raise UsageError(f"there are more than {METRICS_NBYTES_MAX} bytes of metrics", todo="store them as state")
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or not 0 < len(name) <= 128 or ":" in name or not _is_unicode(name):
            raise UsageError(
                "a metric's name is Unicode text of 1 to 128 characters without ':'", where=shown_object(name)
            )
        try:
            # A string would convert too, and would more likely be a mistake than a number.
            if isinstance(value, (str, bytes)):
                raise TypeError
            checked[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            shown = shown_object(value)[:80]
            raise UsageError("a metric is a number", where=f"metrics[{name!r}] = {shown}") from None
    return checked


def _is_unicode(text: str) -> bool:
    return text.encode(errors="replace").decode() == text


def check_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """Return tags as a tuple, a single string as one tag; UsageError for names that cannot be tags."""
    return tuple(check_name(name, "tag") for name in ((tags,) if isinstance(tags, str) else tags))


def check_policy(policy: object) -> None:
    """Raise UsageError for what is no policy, before a state is looked at."""
    if policy is not None and not isinstance(policy, Policy):
        shown = shown_object(policy)[:80]
        raise UsageError(
            "a policy is a ckstore.Policy", where=f"policy={shown}", todo="as in ckstore.Policy(compression='fast')"
        )
