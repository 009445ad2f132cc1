"""``ckstore gc``: delete checkpoints that match no retention rule, and free disk space, here or in a tier."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.api import Store
from ckstore.cli import completion, render
from ckstore.cli.parser import AsJson, Shared, StorePath, opened
from ckstore.cli.render import SEQ, STEP, Column, Table, count, json_of, local_time, size
from ckstore.errors import CorruptError, NotFoundError, UsageError
from ckstore.opening import open_existing
from ckstore.ops.gc.policy import Retention
from ckstore.store.tier_checks import require_proof

if TYPE_CHECKING:
    from ckstore.ops.gc.rewrite_packs import Repacked
    from ckstore.ops.gc.rules import RunPlan, Verdict
    from ckstore.ops.gc.run import GcDone, GcReport
    from ckstore.tiers.gc import TierGc


_VERDICTS = Table(
    SEQ,
    STEP,
    Column("time (local)", "time_ns", local_time, worth=1),
    Column("", lambda verdict: "keep" if verdict.is_kept else "delete"),
    Column("why", lambda verdict: "; ".join(verdict.reasons), is_elastic=True),
)
_UNITS = {"": 1, "k": 10, "m": 20, "g": 30, "t": 40}


@dataclass(frozen=True, slots=True)
class Output:
    """What a collection prints: sentences, JSON, or nothing. Errors are raised in any case."""

    is_quiet: bool
    as_json: bool

    @classmethod
    def of(cls, *, quiet: bool, as_json: bool, dry_run: bool) -> Output:
        """Return what these options ask for.

        Raises:
            UsageError: They contradict each other.
        """
        if quiet and (dry_run or as_json):
            raise UsageError("--quiet cannot be combined with --dry-run or --json", todo="leave out --quiet")
        return cls(quiet, as_json)


def _option(
    words: str,
    metavar: str | None = None,
    *names: str,
    least: int | None = None,
    complete: completion.Complete | None = None,
) -> Any:
    return typer.Option(*names, help=words, metavar=metavar, min=least, autocompletion=complete)


Only = Annotated[str | None, _option("Apply the rules to this run only.", "NAME", "--run", complete=completion.runs)]
Last = Annotated[int | None, _option("Keep the newest N.", "N", least=1)]
Every = Annotated[int | None, _option("Keep steps that are multiples of this.", "STEPS", least=1)]
Within = Annotated[str | None, _option("Keep checkpoints at most this much older than the newest: 7d, 12h.", "SPAN")]
Hourly = Annotated[
    int | None, _option("Keep the newest of each of the last N hours that have a checkpoint.", "N", least=1)
]
Daily = Annotated[int | None, _option("The same for days.", "N", least=1)]
Weekly = Annotated[int | None, _option("The same for weeks, which begin on Mondays.", "N", least=1)]
Monthly = Annotated[int | None, _option("The same for months.", "N", least=1)]
Yearly = Annotated[int | None, _option("The same for years.", "N", least=1)]
Best = Annotated[
    list[str] | None,
    _option(
        "Keep the N best by a metric: loss:2, speed:1:max. May be repeated.",
        "METRIC[:N][:min|max]",
        complete=completion.metrics,
    ),
]
Tagged = Annotated[
    list[str] | None,
    _option("A rule for tags ('release-*'). Tagged checkpoints are always kept.", "NAME", complete=completion.tags),
]
Points = Annotated[
    int | None,
    _option("Keep the points of the journal after its newest N keyframes only.", "N", "--keep-journal", least=1),
]
Zone = Annotated[str | None, _option("Time zone in which days begin: UTC, or an offset such as +02:00.", "ZONE")]
DryRun = Annotated[bool, _option("Only print what would be done.", None, "--dry-run")]
Now = Annotated[bool, _option("Empty the trash immediately, including what is moved there now.", None, "--now")]
MaxDelete = Annotated[int | None, _option("Do nothing if more than N checkpoints would be deleted.", "N", least=0)]
MinAge = Annotated[
    str | None,
    _option("Keep packs younger than this that no manifest has ever named. [default: 1h; 24h in a tier]", "SPAN"),
]
TrashFor = Annotated[
    str | None,
    _option("How long the trash is kept: 2h, 7d, 0. [default: the stored time, else 24h]", "SPAN"),
]
RepackMax = Annotated[str, _option("Write at most this much to rewrite half-empty packs; 0: rewrite none.", "SIZE")]
Save = Annotated[
    bool, _option("Store these rules and --trash-for, for collections without rules.", None, "--save-policy")
]
InTier = Annotated[
    str | None, _option("Collect in this tier instead: remove there what was deleted and freed here.", "NAME", "--tier")
]
ClearLists = Annotated[
    bool,
    _option(
        "With --tier: remove deletion lists left by crashed collectors. Use only if no other collection is running on "
        "that tier.",
        None,
        "--clear-lists",
    ),
]
AcceptMissing = Annotated[
    bool,
    _option("Give up checkpoints whose manifests are missing, and collect without them.", None, "--accept-missing"),
]
ClearIntents = Annotated[
    bool,
    _option(
        "Remove intents of crashed processes, which block tags. Use only if no process is deleting or demoting.",
        None,
        "--clear-intents",
    ),
]
Forget = Annotated[bool, _option("Remove the stored rules and the stored --trash-for.", None, "--forget-policy")]
Quiet = Annotated[bool, _option("Print errors only, for example in a cron job.", None, "--quiet", "-q")]


def gc(
    path: StorePath,
    run: Only = None,
    keep_last: Last = None,
    keep_every: Every = None,
    keep_within: Within = None,
    keep_hourly: Hourly = None,
    keep_daily: Daily = None,
    keep_weekly: Weekly = None,
    keep_monthly: Monthly = None,
    keep_yearly: Yearly = None,
    keep_best: Best = None,
    keep_tag: Tagged = None,
    keep_journal: Points = None,
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
    quiet: Quiet = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Delete checkpoints by retention rules, and free disk space.

    Checkpoints that match no retention rule are deleted, unreferenced packs move to the trash, and old trash is
    emptied. A checkpoint is kept if any rule matches it. Rules apply to each run separately. The newest checkpoint and
    tagged ones are always kept. Without rules, the stored rules apply; if there are none, no checkpoint is deleted. The
    trash is kept for a day (--trash-for): until then, `ckstore undelete` and `ckstore trash` bring checkpoints back. A
    commit that finds the disk full empties the trash earlier. Training can continue meanwhile.
    """
    policy = _policy_of({name: value for name, value in locals().items() if name.startswith("keep_")}, time_zone)
    output = Output.of(quiet=quiet, as_json=as_json, dry_run=dry_run)
    if tier is not None or clear_lists:
        refused = {"rules": policy, "--run": run, "--now": now, "--max-delete": max_delete, "--trash-for": trash_for}
        refused |= {"--save-policy": save_policy, "--forget-policy": forget_policy, "--clear-intents": clear_intents}
        tier_options = {"min_age": min_age or "24h", "repack_nbytes_max": nbytes_of(repack_max)}
        tier_options |= {"dry_run": dry_run, "clear_lists": clear_lists}
        _collect_tier(path, tier, refused, tier_options, output, allow_shared_folder=allow_shared_folder)
        return
    if save_policy and policy is None and trash_for is None:
        raise UsageError("--save-policy needs rules, or --trash-for", todo="for example --keep-last 3")
    with open_existing(path, run=run or "main", allow_shared_folder=allow_shared_folder) as store:
        if run is not None and run not in store.runs():
            raise NotFoundError(f"there is no run {run!r}", where=str(path), todo="`ckstore ls` shows the runs")
        _begin(store, forget_policy=forget_policy and not dry_run, accept_missing=accept_missing and not dry_run)
        limits = {"min_age": min_age or "1h", "trash_for": trash_for, "repack_nbytes_max": nbytes_of(repack_max)}
        scope = {"all_runs": run is None, "dry_run": dry_run, "now": now, "max_delete": max_delete}
        report = store.gc(policy, **scope, **limits, clear_intents=clear_intents)  # type: ignore[arg-type]
        if save_policy and not dry_run:
            _save(store, policy, trash_for)
    _print(report, output)


def _save(store: Store, policy: Retention | None, trash_for: str | None) -> None:
    """Store the rules and the trash time that are given."""
    if policy is not None:
        store.set_retention(policy)
    if trash_for is not None:
        store.set_trash_for(trash_for)


def _begin(store: Store, *, forget_policy: bool, accept_missing: bool) -> None:
    """Before the collection, forget stored rules and give up missing checkpoints, if the options say so."""
    if forget_policy:
        _forget(store)
    if accept_missing:
        store.accept_missing()


def _forget(store: Store) -> None:
    store.set_retention(None)
    store.set_trash_for(None)


def _policy_of(rules: dict[str, Any], time_zone: str | None) -> Retention | None:
    """Return the policy of the options, or None if no rule is given."""
    given = {name: value for name, value in rules.items() if value not in (None, [])}
    if time_zone is not None:
        given["time_zone"] = time_zone
    return Retention.of(given) if given else None


def nbytes_of(text: str) -> int:
    """Return the bytes of a size such as ``4G``, ``512MiB`` or ``0``.

    Raises:
        UsageError: It is not a size.
    """
    found = re.fullmatch(r"([0-9]{1,15})\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise UsageError(
            "not a size", where=repr(text)[:80], todo="write for example 4G, 512MiB or 0; units are powers of 1024"
        )
    return int(found[1]) << (_UNITS[found[2]] if found[2] else 0)


def _print(report: GcReport, output: Output) -> None:
    if output.as_json:
        render.print_json(_json_of(report))
    elif not output.is_quiet:
        for plan in report.runs:
            _print_run(plan)
        for line in _lines_of(report):
            render.say(line)
    if report.stop:
        raise CorruptError(f"packs were not collected: {report.stop}", todo="`ckstore verify` shows the damage")
    blocked = [plan for plan in report.runs if plan.blocked]
    if blocked:
        todo = "`ckstore verify` shows the damage, `ckstore repair` repairs what it can; then collect again"
        raise CorruptError(f"no checkpoint of run {blocked[0].run} was deleted: {blocked[0].blocked}", todo=todo)
    require_proof(report.unproven.values())


def _print_run(plan: RunPlan) -> None:
    if not plan.rules:
        return
    title = f"run {plan.run}: {len(plan.kept)} kept, {len(plan.dropped)} deleted by {plan.rules}"
    _VERDICTS.print(plan.verdicts, title=title)
    for note in plan.notes:
        render.say(note)
    render.say("")


def _lines_of(report: GcReport) -> list[str]:
    """Return sentences on what a collection did, or would do."""
    plan, done = report.plan, report.done
    lines = []
    if report.refused:
        lines.append(f"Refused: {report.refused}.")
    if not any(run_plan.rules for run_plan in report.runs):
        lines.append("No rules: no checkpoint is deleted, only unreferenced packs are collected.")
    if done is None:
        if plan.is_empty:
            lines.append("Nothing to do.")
        if plan.drops:
            lines.append(f"{count(len(plan.drops), 'checkpoint')} would be deleted.")
        if plan.moves:
            where = "be removed" if plan.is_final else "move to the trash"
            lines.append(f"{count(len(plan.moves), 'pack')} would {where}: {size(plan.moved_nbytes)}.")
        if plan.segments:
            segments = count(len(plan.segments), "segment")
            lines.append(f"{segments} of journals would move to the trash: {size(plan.segments_nbytes)}.")
        if plan.rewrites:
            lines.append(
                f"{count(len(plan.rewrites), 'pack')} would be rewritten: {size(plan.rewritten_nbytes)} become "
                f"{size(plan.written_nbytes)}."
            )
        if report.freed_nbytes:
            lines.append(f"{size(report.freed_nbytes)} would be freed immediately.")
    else:
        if done.dropped:
            lines.append(f"{count(len(done.dropped), 'checkpoint')} deleted.")
        if not plan.is_final:
            lines.append(f"{count(done.moved_packs, 'pack')} moved to the trash: {size(done.moved_nbytes)}.")
        if done.moved_segments:
            segments = count(done.moved_segments, "segment")
            lines.append(f"{segments} of journals moved to the trash: {size(done.moved_segments_nbytes)}.")
        if done.repacked.pack_ids:
            rewritten = count(len(done.repacked.pack_ids), "pack")
            lines.append(f"{rewritten} rewritten into {size(done.repacked.nbytes_written)}.")
        lines += [f"{trouble}." for trouble in done.repacked.troubles]
        lines += [f"seq {name.seq} of run {name.run} was kept: {why}." for name, why in sorted(done.spared.items())]
        if done.rescued:
            lines.append(f"{count(done.rescued, 'file')} restored from the trash, because a checkpoint needs them.")
        lines.append(f"{size(done.freed_nbytes)} freed.")
    if report.later_nbytes and plan.free_ns is not None:
        lines.append(
            f"{size(report.later_nbytes)} in the trash. A collection after {render.local_time(plan.free_ns)} frees all "
            "of it; --now frees it immediately."
        )
    elif report.later_nbytes:
        lines.append(f"{size(report.later_nbytes)} in the trash; --now frees it immediately.")
    lines += [f"Tier {tier} does not answer, so local copies of its packs stay: {said}." for tier, said in report.waits]
    if done is not None and done.waits_for:
        lines += [f"Intent of another process: {what}." for what in done.waits_for]
        lines.append(
            "Intents block tags on these checkpoints until they are 6 h old. If the processes are dead, "
            "`ckstore gc PATH --clear-intents` removes the intents."
        )
    if plan.young_nbytes:
        lines.append(f"{size(plan.young_nbytes)} in unreferenced packs younger than --min-age are kept.")
    return lines


def _json_of(report: GcReport) -> dict[str, Any]:
    """Return the report for programs. A dry run and a real run have the same keys."""
    plan = report.plan
    return {
        **json_of(report, "is_dry_run", "refused"),
        "runs": [
            {
                **json_of(each, "run", "rules", "blocked", "notes"),
                "checkpoints": [_json_of_verdict(verdict) for verdict in each.verdicts],
            }
            for each in report.runs
        ],
        "plan": {
            **json_of(plan, "stop", "drops", "unfinished", "superseded"),
            "put_back": [trashed.name for trashed in plan.put_back],
            "rescues": plan.rescues,
            "moves": [json_of(move, "pack_id", "nbytes") for move in plan.moves],
            "rewrites": [
                {
                    **json_of(rewrite, "pack_id", "nbytes"),
                    "nbytes_after": rewrite.packed_nbytes,
                    "manifests": len(rewrite.manifests),
                }
                for rewrite in plan.rewrites
            ],
            "purges": [{"trash_id": folder.gc_id, "nbytes": folder.nbytes} for folder in plan.purges],
            **json_of(plan, "waiting_nbytes", "young_nbytes"),
            "segments": [{"path": move.name.path, "nbytes": move.nbytes} for move in plan.segments],
            "drafts": [draft.path for draft in plan.drafts],
            "unproven": plan.unproven,
        },
        "done": None if report.done is None else _json_of_done(report.done),
        **json_of(report, "freed_nbytes", "later_nbytes"),
        "later_time": None if plan.free_ns is None else render.iso_time(plan.free_ns),
    }


def _json_of_verdict(verdict: Verdict) -> dict[str, Any]:
    time = render.iso_time(verdict.time_ns)
    return {**json_of(verdict, "seq", "step"), "time": time, **json_of(verdict, "is_kept", "reasons")}


def _json_of_done(done: GcDone) -> dict[str, Any]:
    return {
        "dropped": done.dropped,
        "spared": [{**json_of(name), "why": why} for name, why in sorted(done.spared.items())],
        **json_of(done, "rescued", "superseded", "moved_packs", "moved_nbytes", "freed_files", "freed_nbytes"),
        **json_of(done, "moved_segments", "moved_segments_nbytes"),
        **_json_of_repacked(done.repacked),
        "troubles": done.repacked.troubles,
        **json_of(done, "drafts", "intents", "waits_for"),
        "unproven": [each for _, each in sorted(done.unproven.items())],
        **json_of(done, "waits", "stop"),
    }


def _json_of_repacked(repacked: Repacked) -> dict[str, Any]:
    return {
        "repacked": repacked.pack_ids,
        "repacked_nbytes": repacked.nbytes_written,
        "replaced_manifests": repacked.manifests,
    }


def _collect_tier(
    path: str,
    tier: str | None,
    refused: dict[str, Any],
    options: dict[str, Any],
    output: Output,
    *,
    allow_shared_folder: bool,
) -> None:
    """Collect in a tier, and print the report.

    Args:
        path: The store whose tier it is.
        tier: The name of the tier.
        refused: Options that do not apply to a tier, and their values. An error if one was given.
        options: Options of the collection.
        output: What to print.
        allow_shared_folder: Accept a folder that other users may write to.

    Raises:
        UsageError: The name of the tier is missing, or an option does not apply to tiers.
        CorruptError: Packs were not collected, because a manifest cannot be read.
    """
    if tier is None:
        raise UsageError("--clear-lists needs --tier NAME", todo="name the tier that holds the lists")
    wrong = [name for name, value in refused.items() if value]
    if wrong:
        raise UsageError(
            f"{wrong[0]} cannot be combined with --tier",
            todo="first apply rules and free the trash here; --tier then removes the same from the tier",
        )
    with opened(path, run="main", allow_shared_folder=allow_shared_folder) as store:
        report = store.gc_tier(tier, **options)
    if output.as_json:
        render.print_json(_json_of_tier(report))
    elif not output.is_quiet:
        for line in _lines_of_tier(report):
            render.say(line)
    if report.stop:
        raise CorruptError(f"packs were not collected: {report.stop}", where=report.address)


def _json_of_tier(report: TierGc) -> dict[str, Any]:
    return {
        **json_of(report, "is_dry_run", "tier", "address", "dropped", "superseded"),
        "packs": [{"pack_id": pack_id, "nbytes": nbytes} for pack_id, nbytes in sorted(report.packs.items())],
        **json_of(report, "freed_nbytes", "young_nbytes"),
        "rewrites": [json_of(each, "pack_id", "nbytes", "packed_nbytes") for each in report.rewrites],
        **_json_of_repacked(report.repacked),
        "renewed_manifests": report.renewed,
        "troubles": report.repacked.troubles,
        **json_of(report, "lists", "stop"),
        "segments": [{"path": name.path, "nbytes": nbytes} for name, nbytes in report.segments.items()],
    }


def _lines_of_tier(report: TierGc) -> list[str]:
    would = "would be " if report.is_dry_run else ""
    lines = [
        f"{count(len(report.dropped), 'deleted checkpoint')} {would}removed from {report.address}.",
        f"{count(len(report.packs), 'pack')} {would}removed there: {size(report.freed_nbytes)}.",
    ]
    if report.superseded:
        lines.append(f"{count(len(report.superseded), 'superseded manifest')} {would}removed.")
    if report.segments:
        segments = f"{count(len(report.segments), 'segment')} of journals"
        lines.append(f"{segments} {would}removed there: {size(report.segments_nbytes)}.")
    if report.rewrites and report.is_dry_run:
        become = f"{size(report.rewritten_nbytes)} become {size(report.written_nbytes)}"
        lines.append(f"{count(len(report.rewrites), 'pack')} there would be rewritten: {become}.")
    if report.repacked.pack_ids:
        lines.append(
            f"{count(len(report.repacked.pack_ids), 'pack')} there rewritten into "
            f"{size(report.repacked.nbytes_written)}. A later collection removes the old ones, after the manifests "
            "that reference them have left the trash here."
        )
    if report.renewed:
        lines.append(f"{count(report.renewed, 'manifest')} {would}updated there, because the packs here changed.")
    lines += [f"{trouble}." for trouble in report.repacked.troubles]
    if report.lists:
        lines.append(f"{count(report.lists, 'deletion list')} of crashed collectors removed.")
    if report.young_nbytes:
        lines.append(f"{size(report.young_nbytes)} in unreferenced packs younger than --min-age were kept there.")
    return lines
