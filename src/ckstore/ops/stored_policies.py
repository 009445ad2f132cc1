"""The policies in ``config.json``: retention rules, trash time, and the rules of demotion (docs/FORMAT.md section 4).

Writing one policy leaves the rest of ``config.json`` unchanged.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckstore.config import NAMED_RESIDUALS, DemotePolicy, plain_of, value_of
from ckstore.errors import UsageError
from ckstore.format.paths import CONFIG_FILE
from ckstore.format.records import ConfigRecord, with_changes
from ckstore.ops.gc.policy import Retention, span_seconds, span_words
from ckstore.store.repository import Repository
from ckstore.store.store_config import change_config, read_config

if TYPE_CHECKING:
    pass


def stored_policy(repository: Repository) -> Retention | None:
    """Return the retention policy in ``config.json``; None if there is none.

    Raises:
        UsageError: A name is not a rule; the message suggests the closest one.
        CorruptError: The file is damaged.
    """
    rules: dict[str, Any] = read_config(repository.backend).retention
    return Retention.of(rules, where=repository.backend.location_of(CONFIG_FILE)) if rules else None


def set_stored_policy(repository: Repository, policy: Retention | None) -> None:
    """Write the retention policy into ``config.json``, durably; None removes it."""
    rules = {} if policy is None else policy.to_config()

    def change(record: ConfigRecord) -> ConfigRecord:
        kept = {name: getattr(record, name) for name in record.__struct_fields__}
        return ConfigRecord(**{**kept, "retention": rules})

    change_config(repository.backend, change)


_TRASH_FOR = "trash_for"


def stored_trash_seconds(repository: Repository) -> float | None:
    """Return how long the trash is kept according to ``config.json``, in seconds; None if it does not say.

    Raises:
        UsageError: The stored value is not a duration.
        CorruptError: The file is damaged.
    """
    span = read_config(repository.backend).policy.get(_TRASH_FOR)
    if span is None:
        return None
    if span in (0, "0"):
        return 0.0
    try:
        return span_seconds(span)
    except UsageError as error:
        where = f"trash_for of {repository.backend.location_of(CONFIG_FILE)}"
        raise UsageError(error.what, where=where, todo=error.todo) from None


def set_stored_trash_seconds(repository: Repository, seconds: float | None) -> None:
    """Write how long the trash is kept into ``config.json``, durably; None removes it."""

    def change(record: ConfigRecord) -> ConfigRecord:
        others = {name: value for name, value in record.policy.items() if name != _TRASH_FOR}
        stored = {} if seconds is None else {_TRASH_FOR: span_words(seconds) if seconds else 0}
        return with_changes(record, policy={**others, **stored})

    change_config(repository.backend, change)


_FORM = "form"
_RULES = tuple(field.name for field in dataclasses.fields(DemotePolicy) if field.name != _FORM)
"""Rules that can be stored. Replay form needs training code, which is given when a demotion runs."""
_FIDELITY = "fidelity"
_KEY = "demotion"


def rules_of(policy: DemotePolicy) -> dict[str, Any]:
    """Return a demotion policy as plain values. A named fidelity is written by its name."""
    rules = {name: plain_of(getattr(policy, name)) for name in _RULES}
    for name, make in NAMED_RESIDUALS.items():
        if policy.fidelity == make():
            rules[_FIDELITY] = name
    return rules


def policy_of_rules(rules: Mapping[str, Any], *, where: object = None) -> DemotePolicy:
    """Make a demotion policy from names and values. Missing rules have their defaults.

    Raises:
        UsageError: A name is not a rule (the message suggests the closest one), or a value is invalid.
    """
    given: dict[str, Any] = {}
    for name, value in rules.items():
        if name not in (*_RULES, _FORM):
            near = difflib.get_close_matches(str(name), _RULES, n=1, cutoff=0.0)
            raise UsageError(
                f"{str(name)[:80]!r} is not a demotion rule", where=where, todo=f"did you mean {near[0]!r}?"
            )
        try:
            given[name] = value_of(value)
        except (UsageError, TypeError, KeyError, AttributeError) as problem:
            raise UsageError(f"demotion rule {name!r} is invalid ({problem})", where=where) from None
    fidelity = given.get(_FIDELITY)
    if isinstance(fidelity, str) and fidelity in NAMED_RESIDUALS:
        given[_FIDELITY] = NAMED_RESIDUALS[fidelity]()
    try:
        return DemotePolicy(**given)
    except TypeError as problem:
        raise UsageError(f"the demotion policy is invalid ({problem})", where=where) from None


def demotion_given(policy: object) -> DemotePolicy | None:
    """Return the policy for what a caller passed: a ``DemotePolicy``, a mapping of its rules, or None.

    Raises:
        UsageError: It is something else, or a name is not a rule.
    """
    if policy is None or isinstance(policy, DemotePolicy):
        return policy
    if isinstance(policy, Mapping):
        return policy_of_rules(policy, where="demotion")
    raise UsageError(
        "a demotion policy must be a ckstore.DemotePolicy or a mapping of its rules",
        where=repr(policy)[:80],
        todo="for example ckstore.DemotePolicy(keep_newest=5)",
    )


def require_lossy(policy: DemotePolicy) -> None:
    """Refuse replay form where no training code can be run.

    Raises:
        UsageError: The policy is for replay form.
    """
    if policy.form != "lossy":
        raise UsageError(
            "automatic demotion has no training code, which replay form needs",
            where=f"DemotePolicy(form={policy.form!r})",
            todo="run `ckstore demote --to replay --replay SCRIPT`, or call demote(replay=...)",
        )


def stored_demotion(repository: Repository) -> DemotePolicy | None:
    """Return the demotion policy in ``config.json``; None if there is none.

    Raises:
        UsageError: A name is not a rule, or a value is invalid.
        CorruptError: The file is damaged.
    """
    rules = read_config(repository.backend).policy.get(_KEY)
    if rules is None:
        return None
    where = repository.backend.location_of(CONFIG_FILE)
    if not isinstance(rules, Mapping):
        raise UsageError("the demotion policy must be a JSON object", where=where)
    return policy_of_rules(rules, where=where)


def set_stored_demotion(repository: Repository, policy: DemotePolicy | None) -> None:
    """Write the demotion policy into ``config.json``, durably; None removes it.

    Raises:
        UsageError: It is for replay form.
    """
    if policy is not None:
        require_lossy(policy)
    rules = None if policy is None else rules_of(policy)

    def change(record: ConfigRecord) -> ConfigRecord:
        kept = {name: getattr(record, name) for name in record.__struct_fields__}
        others = {name: value for name, value in record.policy.items() if name != _KEY}
        return ConfigRecord(**{**kept, "policy": others if rules is None else {**others, _KEY: rules}})

    change_config(repository.backend, change)
