"""``ckstore gc``: drop what no rule keeps, move what nobody needs to the trash, free what lay there long."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import output
from ckstore.cli.gc_json import json_of
from ckstore.cli.options import AsJson, Shared, StorePath
from ckstore.cli.output import Column
from ckstore.errors import CorruptError, NotFoundError, UsageError

if TYPE_CHECKING:
    from ckstore.collection import GcReport
    from ckstore.keeping import Keeping
    from ckstore.retention.plan import RunPlan
    from ckstore.retention.policy import Retention

_COLUMNS = (
    Column("seq", is_number=True),
    Column("step", is_number=True),
    Column("time (local)", worth=1),
    Column(""),
    Column("why", is_elastic=True),
)

_UNITS = {"": 1, "k": 10, "m": 20, "g": 30, "t": 40}


def _option(words: str, metavar: str | None = None, *names: str, least: int | None = None) -> Any:
    return typer.Option(*names, help=words, metavar=metavar, min=least)


Only = Annotated[str | None, _option("Apply the rules to this run only.", "NAME", "--run")]
Last = Annotated[int | None, _option("Keep the newest N.", "N", least=1)]
Every = Annotated[int | None, _option("Keep steps that are multiples of this.", "STEPS", least=1)]
Within = Annotated[str | None, _option("Keep what is at most this much older than the newest: 7d, 12h.", "SPAN")]
Hourly = Annotated[int | None, _option("Keep the newest of each of the last N hours that have one.", "N", least=1)]
Periods = Annotated[int | None, _option("The same for longer periods.", "N", least=1)]
Best = Annotated[
    list[str] | None,
    _option("Keep the N best by a metric: loss:2, speed:1:max; may be repeated.", "METRIC[:N][:min|max]"),
]
Tagged = Annotated[list[str] | None, _option("A rule for tags ('release-*'); every tag keeps anyway.", "NAME")]
Zone = Annotated[str | None, _option("Where days begin: UTC, or an offset as in +02:00.", "ZONE")]
DryRun = Annotated[bool, _option("Only print what would be done.", None, "--dry-run")]
Now = Annotated[bool, _option("Free at once what is in the trash, and what goes there.", None, "--now")]
MaxDelete = Annotated[int | None, _option("Do nothing if more checkpoints than this would go.", "N", least=0)]
MinAge = Annotated[
    str | None,
    _option("Leave packs alone that are younger, and that nobody ever named. [default: 1h; 24h in a tier]", "SPAN"),
]
TrashFor = Annotated[
    str | None,
    _option("How long what goes can be brought back: 2h, 7d, 0. [default: as kept with the store, else 24h]", "SPAN"),
]
RepackMax = Annotated[str, _option("Bytes to write, at most, to rewrite half-empty packs; 0: none.", "SIZE")]
Save = Annotated[
    bool, _option("Keep these rules, and --trash-for, with the store, for collections without.", None, "--save-policy")
]
InTier = Annotated[
    str | None, _option("Collect in this tier instead: remove there what was dropped and freed here.", "NAME", "--tier")
]
ClearLists = Annotated[
    bool,
    _option("With --tier: nobody else collects there, whatever lists of dead collectors say.", None, "--clear-lists"),
]
AcceptMissing = Annotated[
    bool,
    _option("Checkpoints whose manifests are gone are lost: go on without them.", None, "--accept-missing"),
]
ClearIntents = Annotated[
    bool,
    _option("Nobody deletes or demotes here now: forget what unknown processes have left.", None, "--clear-intents"),
]
Forget = Annotated[
    bool, _option("Remove the rules that are kept with the store, and --trash-for.", None, "--forget-policy")
]


def run(
    path: StorePath,
    run: Only = None,
    keep_last: Last = None,
    keep_every: Every = None,
    keep_within: Within = None,
    keep_hourly: Hourly = None,
    keep_daily: Periods = None,
    keep_weekly: Periods = None,
    keep_monthly: Periods = None,
    keep_yearly: Periods = None,
    keep_best: Best = None,
    keep_tag: Tagged = None,
    time_zone: Zone = None,
    dry_run: DryRun = False,
    now: Now = False,
    max_delete: MaxDelete = None,
    min_age: MinAge = None,
    trash_for: TrashFor = None,
    repack_max: RepackMax = "4G",
    save_policy: Save = False,
    forget_policy: Forget = False,
    tier: InTier = None,
    clear_lists: ClearLists = False,
    accept_missing: AcceptMissing = False,
    clear_intents: ClearIntents = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Drop checkpoints that no rule keeps, and free disk space.

    What any rule keeps is kept; each run is looked at by itself. The newest checkpoint and tagged ones always stay.
    Without rules those kept with the store apply; if there are none, only garbage is collected. What goes lies in the
    trash for a day (--trash-for): `ckstore undelete` and `ckstore trash` bring it back. A commit that finds the
    disk full frees the trash earlier. Training may go on meanwhile.
    """
    policy = _policy_of({name: value for name, value in locals().items() if name.startswith("keep_")}, time_zone)
    if tier is not None or clear_lists:
        from ckstore.cli.gc_tier import collect_there

        others = {"rules": policy, "--run": run, "--now": now, "--max-delete": max_delete, "--trash-for": trash_for}
        others |= {"--save-policy": save_policy, "--forget-policy": forget_policy, "--clear-intents": clear_intents}
        given = {"min_age": min_age or "24h", "repack_nbytes_max": nbytes_of(repack_max)}
        given |= {"dry_run": dry_run, "clear_lists": clear_lists}
        collect_there(path, tier, others, given, as_json=as_json, allow_shared_folder=allow_shared_folder)
        return
    from ckstore.keeping import keep

    if save_policy and policy is None and trash_for is None:
        raise UsageError("--save-policy needs rules, or --trash-for", todo="for example --keep-last 3")
    with keep(path, run=run or "main", allow_shared_folder=allow_shared_folder) as store:
        if run is not None and run not in store.runs():
            raise NotFoundError(f"there is no run {run!r}", where=str(path), todo="`ckstore ls` shows the runs")
        _begin(store, forget_policy=forget_policy and not dry_run, accept_missing=accept_missing and not dry_run)
        limits = {"min_age": min_age or "1h", "trash_for": trash_for, "repack_nbytes_max": nbytes_of(repack_max)}
        asked = {"all_runs": run is None, "dry_run": dry_run, "now": now, "max_delete": max_delete}
        report = store.gc(policy, **asked, **limits, clear_intents=clear_intents)  # type: ignore[arg-type]
        if save_policy and not dry_run:
            _save(store, policy, trash_for)
    _tell(report, as_json=as_json)


def _save(store: Keeping, policy: Retention | None, trash_for: str | None) -> None:
    """Keep with the store what is not None."""
    if policy is not None:
        store.set_retention(policy)
    if trash_for is not None:
        store.set_trash_for(trash_for)


def _begin(store: Keeping, *, forget_policy: bool, accept_missing: bool) -> None:
    """Do what was asked for before the collection."""
    if forget_policy:
        _forget(store)
    if accept_missing:
        store.accept_missing()


def _forget(store: Keeping) -> None:
    store.set_retention(None)
    store.set_trash_for(None)


def _policy_of(rules: dict[str, Any], time_zone: str | None) -> Retention | None:
    """Return the policy that the options make, or None where none of them is a rule."""
    from ckstore.retention.policy import Retention

    given = {name: value for name, value in rules.items() if value not in (None, [])}
    if time_zone is not None:
        given["time_zone"] = time_zone
    return Retention.of(given) if given else None


def nbytes_of(text: str) -> int:
    """Return the bytes of a size such as ``4G``, ``512MiB`` or ``0``; UsageError for anything else."""
    found = re.fullmatch(r"([0-9]{1,15})\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise UsageError(
            "this is no size", where=repr(text)[:80], todo="write 4G, 512MiB or 0; units are powers of 1024"
        )
    return int(found[1]) << (_UNITS[found[2]] if found[2] else 0)


def _tell(report: GcReport, *, as_json: bool) -> None:
    if as_json:
        output.print_json(json_of(report))
    else:
        for plan in report.runs:
            _print_run(plan)
        _print_packs(report)
    if report.stop:
        raise CorruptError(f"packs were left alone: {report.stop}", todo="`ckstore verify` tells more")
    blocked = [plan for plan in report.runs if plan.blocked]
    if blocked:
        todo = "`ckstore verify` tells more, `ckstore repair` mends what it can; then collect again"
        raise CorruptError(f"nothing of run {blocked[0].run} was dropped: {blocked[0].blocked}", todo=todo)
    from ckstore.store.tier_proof import require_proof

    require_proof(report.unproven.values())


def _print_run(plan: RunPlan) -> None:
    if not plan.rules:
        return
    title = f"run {plan.run}: {len(plan.kept)} kept, {len(plan.dropped)} dropped by {plan.rules}"
    rows = [
        [
            str(verdict.seq),
            str(verdict.step),
            output.local_time(verdict.time_ns),
            "keep" if verdict.is_kept else "drop",
            "; ".join(verdict.reasons),
        ]
        for verdict in plan.verdicts
    ]
    output.print_table(_COLUMNS, rows, title=title)
    for note in plan.notes:
        output.say(note)
    output.say("")


def _print_packs(report: GcReport) -> None:
    for line in lines_of(report):
        output.say(line)


def lines_of(report: GcReport) -> list[str]:
    """Return what a collection does, or did, in sentences."""
    plan, done, size = report.plan, report.done, output.size
    lines = []
    if report.refused:
        lines.append(f"Refused: {report.refused}.")
    if not any(run_plan.rules for run_plan in report.runs):
        lines.append("No rules: nothing is dropped, only garbage is collected.")
    if done is None:
        if plan.is_empty:
            lines.append("Nothing to do.")
        if plan.drops:
            lines.append(f"{_count(len(plan.drops), 'checkpoint')} would be dropped.")
        if plan.moves:
            where = "be removed" if plan.is_final else "go to the trash"
            lines.append(f"{_count(len(plan.moves), 'pack')} would {where}: {size(plan.moved_nbytes)}.")
        if plan.rewrites:
            lines.append(
                f"{_count(len(plan.rewrites), 'pack')} would be rewritten: {size(plan.rewritten_nbytes)} become "
                f"{size(plan.written_nbytes)}."
            )
        if report.freed_nbytes:
            lines.append(f"{size(report.freed_nbytes)} would be freed at once.")
    else:
        if done.dropped:
            lines.append(f"{_count(len(done.dropped), 'checkpoint')} dropped.")
        if not plan.is_final:
            lines.append(f"{_count(done.moved_packs, 'pack')} moved to the trash: {size(done.moved_nbytes)}.")
        if done.repacked.pack_ids:
            count, nbytes = len(done.repacked.pack_ids), done.repacked.nbytes_written
            lines.append(f"{_count(count, 'pack')} rewritten into {size(nbytes)}.")
        lines += [f"{trouble}." for trouble in done.repacked.troubles]
        lines += [f"seq {name.seq} of run {name.run} stays: {why}." for name, why in sorted(done.spared.items())]
        if done.rescued:
            lines.append(f"{_count(done.rescued, 'file')} brought back from the trash: something names them.")
        lines.append(f"{size(done.freed_nbytes)} freed.")
    if report.later_nbytes and plan.free_ns is not None:
        lines.append(
            f"{size(report.later_nbytes)} in the trash; a collection after {output.local_time(plan.free_ns)} frees all "
            "of it, --now frees it at once."
        )
    elif report.later_nbytes:
        lines.append(f"{size(report.later_nbytes)} in the trash; --now frees it at once.")
    lines += [f"Tier {tier} does not answer, and what depends on it waits: {said}." for tier, said in report.waits]
    if done is not None and done.waits_for:
        lines += [f"Left alone: {what}." for what in done.waits_for]
        lines.append(
            "These refuse tags on their checkpoints until they are 6 h old; if their processes are dead, "
            "`ckstore gc STORE --clear-intents` removes them."
        )
    if plan.young_nbytes:
        lines.append(f"{size(plan.young_nbytes)} that nobody names yet are too young to be garbage.")
    return lines


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
