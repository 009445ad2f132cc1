"""What must hold after the stress test: all that was acknowledged, and nothing that needs more than a collection."""

from __future__ import annotations

import contextlib
from collections import Counter

from ckstore._testing import repository_of
from ckstore.errors import CorruptError
from ckstore.store.refs import load_whole
from support.gc_stress_roles import KEPT_EVERY, KEPT_LAST, open_store, other_handle, remove_unacknowledged, state_of
from support.model import difference


def check(folder, acks, counters):
    """Return what was lost: acknowledged and neither dropped nor there, or dropped although it had to stay."""
    held, doubtful, again, failures = {}, set(), Counter(), []
    for line in acks:
        verb, *facts = line.split()
        if verb == "commit":
            run, seq, step, number = facts[0], *map(int, facts[1:])
            if (run, seq) in held:
                failures.append(f"seq {seq} of {run} was given twice")
            held[run, seq] = step, number
        elif verb == "deleting":
            doubtful.add((facts[0], int(facts[1])))
        elif verb == "again":
            again[facts[0], int(facts[1])] += 1
    for run in sorted({run for run, _ in held}):
        remove_unacknowledged(folder, run, failures.append)
    failures = [failure for failure in failures if failure.startswith("FAIL") or "given twice" in failure]
    failures += repair_torn(folder, sorted({run for run, _ in held}))
    with open_store(folder, "w0") as store:
        for _ in range(2):
            report = other_handle(store).gc(None, now=True, all_runs=True, min_age=0)
        blocked = [f"{plan.run}: {plan.blocked}" for plan in report.runs if plan.blocked]
        failures += [f"blocked after all have ended: {each}" for each in (*blocked, report.done.stop) if each]
        report = store.verify("decode")
        failures += [f"damage: {damage.what} {damage.where}" for damage in report.damage]
    for run in sorted({run for run, _ in held}):
        mine = {seq: facts for (each, seq), facts in held.items() if each == run}
        doubts = {seq for each, seq in doubtful if each == run}
        failures += check_run(folder, run, mine, doubts, {step: again[run, step] for _, step in again}, counters)
    return failures


def repair_torn(folder, runs):
    """Repair replacements that were killed before they looked for their packs; return what else a repair would mend."""
    torn = set()
    for run in runs:
        with open_store(folder, run) as store:
            for name in repository_of(store).manifests.listing().names:
                # One without a whole generation was reported already, and is again when it is restored.
                with contextlib.suppress(CorruptError):
                    if load_whole(repository_of(store), name, takes_lower=True).header.generation < name.generation:
                        torn.add((run, name.seq, "heal"))
    if not torn:
        return []
    with open_store(folder, runs[0]) as store:
        mended = {(entry.run, entry.seq, entry.action) for entry in store.repair(dry_run=False).entries}
    return [f"mended, and not by a replacement that was killed: {each}" for each in sorted(mended - torn)]


def check_run(folder, run, held, doubtful, again, counters):
    failures = []
    newest_of_step = {held[seq][0]: seq for seq in sorted(held)}
    entries_of_step = Counter(step for step, _ in held.values())
    with open_store(folder, run) as store:
        listing = repository_of(store).manifests.listing()
        present = {name.seq for name in listing.names}
        # What a killed writer had published and not noted any more counted among the last ones, too.
        newest = set(sorted(held.keys() | present | doubtful)[-KEPT_LAST:])
        tagged = {record.seq for record in repository_of(store).tags.all().values()}
        for seq, (step, number) in held.items():
            if seq in listing.dropped:
                counters["gone by rule or by hand"] += 1
                # A rewind that was published by one that died before it could say so, or what was brought back, is a
                # newer entry of its step, for which this one went; it may be gone by now itself.
                is_known = entries_of_step[step] > again.get(step, 0)
                is_every = step % KEPT_EVERY == 0 and newest_of_step[step] == seq and is_known
                if seq not in doubtful and (seq in newest or is_every or seq in tagged):
                    failures.append(f"{run} seq {seq} (step {step}) was dropped although it had to stay")
            elif seq not in present:
                failures.append(f"{run} seq {seq} (step {step}) was acknowledged, never dropped, and is not there")
            else:
                counters["restored"] += 1
                found = what_is_wrong(store, seq, number)
                if found:
                    failures.append(f"{run} seq {seq} was acknowledged: {found}")
        for seq in present - held.keys():
            # Published by one that died before it could say so, or brought back.
            found = what_is_wrong(store, seq)
            if found:
                failures.append(f"{run} seq {seq}, which was not acknowledged: {found}")
    return failures


def what_is_wrong(store, seq, number=None):
    """Restore a checkpoint, and say how it differs from what was committed, or why it cannot be restored."""
    try:
        state = store.restore(f"seq:{seq}")
    except CorruptError as error:
        return repr(error)
    return difference(state, state_of(state["number"] if number is None else number))
