"""Model check of ckstore's deletions: every interleaving, by breadth-first search.

Run `PYTHONPATH=tests python -m support.gc_model` for the table, with `--trace` to see how each broken
variant breaks. The exit status is 1 if any row differs from what is expected, in verdict or in state count.
"""

from __future__ import annotations

import sys
from collections import deque

from support.gc_bucket_rules import BucketRules
from support.gc_intent_rules import IntentRules
from support.gc_rules import PackRules, ReplaceRules, Rules, State, TrashNames
from support.gc_tier_rules import TierRules

STATES_MAX = 3_000_000


def search(rules: Rules) -> tuple[int, list[str] | None]:
    """Visit every reachable state; return how many, and the shortest way to a violation if there is one."""
    start = rules.start()
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if state.is_violation:
            return len(came_from), trace_to(state, came_from)
        for label, target in rules.moves(state):
            if target not in came_from:
                came_from[target] = (state, label)
                queue.append(target)
        if len(came_from) > STATES_MAX:
            raise RuntimeError(f"more than {STATES_MAX} states: the model is not finite any more")
    return len(came_from), None


def trace_to(state: State, came_from: dict[State, tuple[State, str] | None]) -> list[str]:
    labels = []
    while (step := came_from[state]) is not None:
        state, label = step
        labels.append(label)
    return labels[::-1]


# Variant, rules, states visited, is it safe. A broken variant that the search cannot break means that
# the model has gone blind: those rows matter as much as the others.
EXPECTED: list[tuple[str, Rules, int, bool]] = [
    ("full protocol: 2 writers, 1 collector", PackRules(), 1_118, True),
    ("1 writer, 2 collectors concurrently", PackRules(writers=1, collectors=2), 2_355, True),
    ("2 writers, 2 collectors concurrently", PackRules(collectors=2), 28_052, True),
    ("without verify after publish", PackRules(verifies_after_publish=False), 619, False),
    ("without trash (unlink after the recheck)", PackRules(has_trash=False), 273, False),
    ("without recheck before purge", PackRules(rechecks_before_purge=False), 650, False),
    ("without recheck before trash", PackRules(rechecks_before_trash=False), 1_118, True),
    ("like git: recheck, unlink; no verify", PackRules(verifies_after_publish=False, has_trash=False), 267, False),
    ("verify without rescue from trash", PackRules(rescues_from_trash=False), 1_109, True),
    (
        "1 writer, 2 collectors, one trash path for all",
        PackRules(writers=1, collectors=2, trash_names=TrashNames.SHARED),
        1_876,
        False,
    ),
    (
        "2 writers, 2 collectors, trash name reused",
        PackRules(collectors=2, trash_names=TrashNames.REUSED),
        20_651,
        False,
    ),
    ("undelete: both start from the trash", PackRules(collectors=2, undeletes=True), 24_902, True),
    ("undelete without verify", PackRules(verifies_after_publish=False, undeletes=True), 545, False),
    ("replace: 2 replacers, 1 dropper, 1 collector", ReplaceRules(), 3_856, True),
    ("replace without the drop mark", ReplaceRules(looks_for_mark=False), 590, False),
    ("bucket: 2 writers, 2 collectors", BucketRules(), 33_246, True),
    ("bucket: 1 writer, 2 collectors", BucketRules(writers=1), 3_962, True),
    ("bucket: writer reads no lists", BucketRules(reads_lists=False), 2_399, False),
    ("bucket: writer checks packs before lists", BucketRules(looks_last=False), 7_043, False),
    ("bucket: manifests not listed after the list", BucketRules(lists_again=False), 2_755, False),
    ("bucket: lost answer, and the list goes", BucketRules(keeps_list_if_unsure=False), 6_926, False),
    ("bucket: dead list goes before its requests", BucketRules(waits_for_requests=False), 10_769, False),
    ("bucket: collector strikes others' entries", BucketRules(strikes_others=True), 12_509, False),
    ("tier: rewriting during pull and push", TierRules(), 229_359, True),
    ("tier: push does not step over numbers", TierRules(steps_over=False), 125_914, False),
    ("tier: packs not checked after publishing", TierRules(looks_after=False), 366, False),
    ("tier: copies name nothing", TierRules(cleans_by_copies=False), 603, False),
    ("tier: the trash names nothing", TierRules(cleans_by_trash=False), 1_074, False),
    ("intents: a drop, a tag, a collector", IntentRules(), 79, True),
    ("intents: a demotion, a tag, a collector", IntentRules(demotes=True), 117, True),
    (
        "intents that are torn for a moment",
        IntentRules(appears_whole=False, removes_old=False, is_tied=False),
        89,
        False,
    ),
    ("intents: the mark is no link", IntentRules(is_tied=False), 78, False),
    ("intents: a demotion does not look again", IntentRules(demotes=True, is_tied=False), 114, False),
    ("intents: a tagger looks for the mark first", IntentRules(intents_first=False), 85, False),
]


def main() -> int:
    shows_traces = "--trace" in sys.argv[1:]
    surprises = 0
    print(f"{'variant':<48}{'states':>9}  result")
    for name, rules, states_expected, is_safe_expected in EXPECTED:
        states, trace = search(rules)
        result = "safe" if trace is None else "VIOLATION"
        if (states, trace is None) != (states_expected, is_safe_expected):
            surprises += 1
            expected = "safe" if is_safe_expected else "VIOLATION"
            result += f"   <-- expected {expected} in {states_expected:,} states"
        print(f"{name:<48}{states:>9,}  {result}")
        if shows_traces and trace:
            print("".join(f"    {label}\n" for label in trace), end="")
    print("as expected" if not surprises else f"{surprises} of {len(EXPECTED)} rows differ from what is expected")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
