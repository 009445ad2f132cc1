"""A policy as plain dicts, lists and numbers, and back: what a message or a settings file can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ckstore.config import Policy
from ckstore.errors import MalformedError, UsageError
from ckstore.quant.settings import (
    FirstMomentSettings,
    LowRank,
    Residual,
    SecondMomentSettings,
    TensorSettings,
    WeightSettings,
)

_KINDS = {
    kind.__name__: kind
    for kind in (
        FirstMomentSettings,
        LowRank,
        Residual,
        SecondMomentSettings,
        TensorSettings,
        WeightSettings,
    )
}
_KIND = "kind"
_DELETED_KINDS = ("PrunedMoments", "PrunedWeights")
"""Settings of ExCP, which is no longer written; ``config.json`` of an existing store may name them."""


def policy_row(policy: Policy) -> dict[str, Any]:
    """Return a policy as plain values."""
    return {field.name: plain_of(getattr(policy, field.name)) for field in dataclasses.fields(policy)}


def policy_of(row: Mapping[str, Any], *, where: object = None) -> Policy:
    """Return the policy of a row.

    Raises:
        MalformedError: It has other fields, or values that a policy cannot have.
    """
    try:
        return Policy(**{name: value_of(value) for name, value in row.items()})
    except (UsageError, TypeError, KeyError, AttributeError) as problem:
        raise MalformedError(f"a policy cannot be read ({problem})", where=where) from None


def plain_of(value: Any) -> Any:
    """Return a setting as plain values: a dataclass becomes a dict that names it, a tuple a list."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        facts = {field.name: plain_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_KIND: type(value).__name__, **facts}
    return [plain_of(part) for part in value] if isinstance(value, tuple) else value


def value_of(row: Any) -> Any:
    """Return the setting that plain values stand for; KeyError, TypeError or UsageError where they stand for none."""
    if isinstance(row, Mapping):
        if row[_KIND] in _DELETED_KINDS:
            raise UsageError(f"{row[_KIND]} no longer exists; use Residual.near() or Residual.small()")
        facts = {name: value_of(value) for name, value in row.items() if name != _KIND}
        return _KINDS[row[_KIND]](**facts)
    return tuple(value_of(part) for part in row) if isinstance(row, list | tuple) else row
