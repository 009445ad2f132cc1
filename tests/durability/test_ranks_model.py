"""Protects the protocol between ranks: model checks of every interleaving of three ranks, and of changed protocols.

The number of visited states is part of the expectation: a model that visits fewer states checks less. The changed
protocols are the negative control: each lacks one rule, and the model must find what goes wrong.
"""

from __future__ import annotations

import pytest

from support.ranks_rules import Setting, mutant, search

SAME = ("a", "a", "a")
"""All ranks hold the same, so only rank 0 sends it."""
DEATH, CUT, FAILURE = {"deaths": 1}, {"cuts": 1}, {"failures": 1}


def name_of(value):
    """Return what differs from the defaults of a setting."""
    if not isinstance(value, Setting):
        return str(value)
    usual = Setting()._asdict()
    return " ".join(f"{name}={found}" for name, found in value._asdict().items() if found != usual[name]) or "no fault"


QUICK = [
    (Setting(), 66),
    (Setting(**DEATH), 889),
    (Setting(**CUT), 1152),
    (Setting(**FAILURE), 1026),
    (Setting(more_for=2, **DEATH), 950),
    (Setting(more_for=1, **CUT), 1213),
    (Setting(steps=(10, 10, 11)), 30),
    (Setting(steps=(10, 10, 11), **DEATH), 320),
    (Setting(late=0), 17),
    (Setting(late=2, asks=True), 160),
    (Setting(late=1, **DEATH), 147),
    (Setting(commits=0, asks=True, **DEATH), 387),
    (Setting(commits=0, asks=True, **CUT), 518),
    (Setting(leaves=2), 138),
    (Setting(leaves=0), 224),
]
DEEP = [
    (Setting(is_async=True), 1700),
    (Setting(is_async=True, **DEATH), 14480),
    (Setting(deaths=1, cuts=1), 10969),
    (Setting(deaths=1, failures=1), 11697),
    (Setting(deaths=2), 3103),
    (Setting(cuts=2), 7706),
    (Setting(more_for=1, cuts=1, failures=1), 20961),
    (Setting(commits=0, asks=True, deaths=1, cuts=1), 3453),
    (Setting(commits=2, changes_layout=True), 1517),
    (Setting(leaves=1, **DEATH), 2877),
    (Setting(leaves=1, **CUT), 3931),
    (Setting(commits=2, layouts=SAME, leaves=1), 5715),
    (Setting(commits=2, layouts=SAME, **DEATH), 23177),
    (Setting(commits=2, layouts=SAME, **CUT), 37062),
    (Setting(commits=2, layouts=SAME, **FAILURE), 42889),
]
SAMPLE_STATES = 1000
"""So many states of a large model are visited in ``make test``; all of them in ``make test-deep``."""

TWO = Setting(commits=2, layouts=SAME)

MUTANTS = [
    ("merge before all parts", Setting(), "WRITING and not commit.awaited and", "WRITING and"),
    ("one part counts for all", Setting(), "commit.awaited.remove(rank)", "commit.awaited.clear()"),
    (
        "merge out of order",
        Setting(commits=2, more_for=1),
        "not commit.awaited and not earlier:",
        "not commit.awaited:",
    ),
    ("no rank is needed", Setting(**DEATH), "if self._needs(commit, rank):", "if False:"),
    (
        "a rank is needed to the end",
        Setting(**DEATH),
        "return commit.stage < Stage.WRITING or (commit.stage is Stage.WRITING and rank in commit.awaited)",
        "return True",
    ),
    ("a rank is not needed before it writes", Setting(**DEATH), "return commit.stage < Stage.WRITING or", "return"),
    ("a rank is not needed while it writes", Setting(**DEATH), "Stage.WRITING and rank in commit.awaited)", "None)"),
    (
        "abort while publishing",
        Setting(**FAILURE),
        "commit is None or commit.stage is Stage.PUBLISHING:",
        "commit is None:",
    ),
    (
        "More from a dead rank",
        Setting(more_for=2, **DEATH),
        "if rank in self._lost:\n                return self._fail",
        "if False:\n                return self._fail",
    ),
    ("turns are not counted", Setting(more_for=2), "commit.turn += 1", "pass"),
    ("More is not expected", Setting(more_for=2), "commit.awaited = set(contents)", "pass"),
    (
        "a member does not take More",
        Setting(more_for=2),
        "share.duty, share.turn = Duty.WRITING,",
        "_, share.turn = 0,",
    ),
    ("a member does not look into the store", Setting(**DEATH), "if share.duty is Duty.SENT:", "if False:"),
    ("late ranks get no answer", Setting(late=2), "return None, self._send([rank], late)", "return None, []"),
    ("late ranks begin again", Setting(late=2), "if number <= self._ended_max:", "if False:"),
    ("absent ranks are waited for", Setting(late=2), "missing and now - commit.opened >=", "False and 0 >="),
    (
        "absent ranks are waited for in questions",
        Setting(commits=0, asks=True, late=2),
        "now - question.opened >= self._join_seconds",
        "False",
    ),
    (
        "the loss of a trainer is not reported",
        Setting(leaves=2),
        "return [Send(0, Left(rank, how, last, handle))]",
        "return []",
    ),
    ("a rank that has left is waited for", Setting(leaves=2), "if gone is not None:", "if False:"),
    (
        "a saver does not outlive its trainer",
        Setting(leaves=2),
        "in missing if self._has_left",
        "in range(3) if self._has_left",
    ),
    ("steps are not compared", Setting(steps=(10, 10, 11)), "if other is not None and (record", "if False and (record"),
    (
        "lost ranks are forgotten",
        Setting(**DEATH),
        "lost = next(iter(self._lost))\n        return self._fail(commit, lost,",
        "return []\n        lost = 0\n        return self._fail(commit, lost,",
    ),
    (
        "lost ranks are forgotten in questions",
        Setting(commits=0, asks=True, **DEATH),
        "if self._lost:\n            lost = next(iter(self._lost))\n            return self._answer",
        "if False:\n            lost = next(iter(self._lost))\n            return self._answer",
    ),
    (
        "questions outlive a lost rank",
        Setting(commits=0, asks=True, **DEATH),
        "items()):\n            actions += self._answer",
        "items()):\n            actions += [] and self._answer",
    ),
    (
        "a question without all values",
        Setting(commits=0, asks=True),
        "if len(question.values) == self._world:",
        "if question.values:",
    ),
    (
        "only rank 0 gets the outcome",
        Setting(),
        "self._send(sorted(commit.answered_to), outcome)",
        "self._send([0], outcome)",
    ),
    (
        "later commits are not moved on",
        TWO,
        "outcome)\n        return [*actions, *self._advance()]",
        "outcome)\n        return actions",
    ),
    ("an ended commit goes on", Setting(**FAILURE), "del self._live[commit.number]", "pass"),
    (
        "changed spans are not sent",
        Setting(commits=2, changes_layout=True),
        "is_same = self._spans.get(rank) == content",
        "is_same = rank in self._spans",
    ),
    ("content is wanted twice", Setting(), "and digest not in commit.wanted", ""),
    ("content is not wanted", Setting(), "if digest not in self._planned and", "if digest in self._planned and"),
    (
        "a member ends what it wants to abort",
        Setting(**FAILURE),
        "or [Send(0, Abort(number, step, error))]",
        "or self._end_lost(number, share)",
    ),
    (
        "a member begins without rank 0",
        Setting(**DEATH),
        "return self._end_if_lost(begin.number) or [Send(0, begin)]",
        "return [Send(0, begin)]",
    ),
    (
        "a member asks a lost rank 0",
        Setting(commits=0, asks=True, **DEATH),
        "return self._unanswered(topic)\n        return",
        "pass\n        return",
    ),
    (
        "a member waits for a lost answer",
        Setting(commits=0, asks=True, **DEATH),
        "for topic in list(self._questions):",
        "for topic in ():",
    ),
    ("a failing rank is not named", Setting(**FAILURE), "of_rank(abort.error, rank)", "abort.error"),
    ("staged before all are", Setting(is_async=True), "is_last = len(commit.staged) == self._world", "is_last = True"),
    (
        "an aborting member forgets its spans",
        Setting(commits=2, layouts=("a", "a", "a"), **FAILURE),
        "message.spans if message.spans is not None else",
        "message.spans if message.spans is not None and self._live[message.number].error is None else",
    ),
]


FAST = [row for row in MUTANTS if row[1].commits < 2]
SLOW = [row for row in MUTANTS if row[1].commits == 2]
"""Models of two commits take many seconds, and are deep tests."""


def check(setting, states, limit=None):
    found, trace = search(setting, limit=limit)
    assert trace is None
    assert found == states if limit is None else found >= min(states, limit)


@pytest.mark.parametrize(("setting", "states"), QUICK, ids=name_of)
def test_every_interleaving_keeps_the_promises(setting, states):
    check(setting, states)


@pytest.mark.deep(parts=len(DEEP))
@pytest.mark.parametrize(("setting", "states"), DEEP, ids=name_of)
def test_every_interleaving_of_large_models_keeps_the_promises(setting, states, sample):
    check(setting, states, None if sample.is_whole else SAMPLE_STATES)


def find(setting, old, new):
    _, trace = search(setting, mutant(old, new))
    assert trace, "the model does not notice that this rule is missing"


@pytest.mark.parametrize(("setting", "old", "new"), [row[1:] for row in FAST], ids=[row[0] for row in FAST])
def test_model_finds_each_missing_rule(setting, old, new):
    find(setting, old, new)


@pytest.mark.deep(parts=16)
@pytest.mark.parametrize(("setting", "old", "new"), [row[1:] for row in SLOW], ids=[row[0] for row in SLOW])
def test_large_model_finds_each_missing_rule(setting, old, new):
    find(setting, old, new)


def test_mutants_are_many():
    assert len({(old, new) for _, _, old, new in MUTANTS}) == len(MUTANTS) >= 30
