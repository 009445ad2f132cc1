"""Which checkpoints age, as ``config.json`` holds it: the rules of a ``DemotePolicy`` as plain values, and back.

docs/FORMAT.md section 4 has the names. Whatever else the ``policy`` of ``config.json`` holds is left as it is.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from ckstore.config import NAMED_RESIDUALS, DemotePolicy, plain_of, value_of
from ckstore.errors import UsageError
from ckstore.format.paths import CONFIG_FILE
from ckstore.format.records import ConfigRecord
from ckstore.store.repository import Repository
from ckstore.store.store_config import change_config, read_config

_RULES = tuple(field.name for field in dataclasses.fields(DemotePolicy))
_FIDELITY = "fidelity"
_KEY = "demotion"


def rules_of(policy: DemotePolicy) -> dict[str, Any]:
    """Return a policy as plain values; a fidelity that has a name is told by it."""
    rules = {name: plain_of(getattr(policy, name)) for name in _RULES}
    for name, make in NAMED_RESIDUALS.items():
        if policy.fidelity == make():
            rules[_FIDELITY] = name
    return rules


def policy_of_rules(rules: Mapping[str, Any], *, where: object = None) -> DemotePolicy:
    """Make a policy of names and values; what is not named has its default.

    Raises:
        UsageError: A name is no rule, and the message tells the nearest one; or a value cannot be.
    """
    given: dict[str, Any] = {}
    for name, value in rules.items():
        if name not in _RULES:
            near = difflib.get_close_matches(str(name), _RULES, n=1, cutoff=0.0)
            raise UsageError(
                f"{str(name)[:80]!r} is no rule of demotion", where=where, todo=f"did you mean {near[0]!r}?"
            )
        try:
            given[name] = value_of(value)
        except (UsageError, TypeError, KeyError, AttributeError) as problem:
            raise UsageError(f"the rule {name!r} of demotion cannot be read ({problem})", where=where) from None
    fidelity = given.get(_FIDELITY)
    if isinstance(fidelity, str) and fidelity in NAMED_RESIDUALS:
        given[_FIDELITY] = NAMED_RESIDUALS[fidelity]()
    try:
        return DemotePolicy(**given)
    except TypeError as problem:
        raise UsageError(f"a policy of demotion cannot be read ({problem})", where=where) from None


def demotion_given(policy: object) -> DemotePolicy | None:
    """Return a policy as callers may give one: itself, names and values of its rules, or None.

    Raises:
        UsageError: It is none of these, or has a rule that is none.
    """
    if policy is None or isinstance(policy, DemotePolicy):
        return policy
    if isinstance(policy, Mapping):
        return policy_of_rules(policy, where="demotion")
    raise UsageError(
        "a policy of demotion is a ckstore.DemotePolicy, or a mapping of its rules",
        where=repr(policy)[:80],
        todo="for example ckstore.DemotePolicy(keep_newest=5)",
    )


def stored_demotion(repository: Repository) -> DemotePolicy | None:
    """Return the policy in ``config.json``; None where there is none.

    Raises:
        UsageError: It has a rule that is none, or a value that cannot be.
        CorruptError: The file is damaged.
    """
    rules = read_config(repository.backend).policy.get(_KEY)
    if rules is None:
        return None
    where = repository.backend.location_of(CONFIG_FILE)
    if not isinstance(rules, Mapping):
        raise UsageError("a policy of demotion is an object of rules", where=where)
    return policy_of_rules(rules, where=where)


def set_stored_demotion(repository: Repository, policy: DemotePolicy | None) -> None:
    """Write the policy into ``config.json``, durably; None removes it."""
    rules = None if policy is None else rules_of(policy)

    def change(record: ConfigRecord) -> ConfigRecord:
        kept = {name: getattr(record, name) for name in record.__struct_fields__}
        others = {name: value for name, value in record.policy.items() if name != _KEY}
        return ConfigRecord(**{**kept, "policy": others if rules is None else {**others, _KEY: rules}})

    change_config(repository.backend, change)
