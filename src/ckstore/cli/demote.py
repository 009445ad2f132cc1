"""``ckstore demote``: store old checkpoints anew with a loss, after saying which."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import output
from ckstore.cli.options import AsJson, Run, Shared, StorePath, opened
from ckstore.cli.output import NOTHING, Column
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import UsageError

if TYPE_CHECKING:
    from ckstore.config import DemotePolicy
    from ckstore.demote_plan import DemoteEntry, DemoteReport

_COLUMNS = (
    Column("seq", is_number=True),
    Column("step", is_number=True),
    Column("action"),
    Column("fidelity", worth=3),
    Column("state", is_number=True, worth=1),
    Column("stored now", is_number=True),
    Column("then", is_number=True),
    Column("rms error", is_number=True, worth=2),
    Column("why", is_elastic=True, worth=0),
)


Fidelity = Annotated[str | None, typer.Option("--fidelity", metavar="NAME", help="near, or small. [default: near]")]
Newest = Annotated[
    int | None, typer.Option("--keep-newest", min=1, metavar="N", help="The newest N stay exact. [default: 3]")
]
Every = Annotated[
    int | None,
    typer.Option("--keep-every", min=0, metavar="M", help="Seqs that M divides stay exact; 0: none. [default: 10]"),
]
Save = Annotated[bool, typer.Option("--save-policy", help="Keep these rules with the store, for demotions without.")]
Forget = Annotated[bool, typer.Option("--forget-policy", help="Remove the rules that are kept with the store.")]


def run(
    path: StorePath,
    refs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[REF]...", help="Demote these and no others, the newest one too. [default: by age]"),
    ] = None,
    run: Run = "main",
    fidelity: Fidelity = None,
    keep_newest: Newest = None,
    keep_every: Every = None,
    save_policy: Save = False,
    forget_policy: Forget = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be done: new sizes and errors too.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, as on a terminal otherwise.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Store old checkpoints anew, smaller, with a loss.

    The newest, every M-th of the others, and all that carry a tag stay exact. Steps, seqs and metrics stay; ids do not:
    `ckstore show` names the exact one that a checkpoint was made from. Training may go on meanwhile, except where the
    newest is named or the store lies in a bucket. Without rules those kept with the store apply. The old packs are
    freed by `ckstore gc`, unless a checkpoint that stays exact is stored as a difference from what lies in them:
    `ckstore repack` stores it whole. Until the trash is emptied, `ckstore undelete` makes a checkpoint exact again.

    \b
    near       for resuming: about 20 times smaller than the state
    small      for history and evaluation: 50 times and more
    rms error  the greatest of any tensor, in the RMS of its values
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    given = {"fidelity": fidelity, "keep_newest": keep_newest, "keep_every": keep_every}
    rules = {name: value for name, value in given.items() if value is not None}
    if save_policy and not rules:
        raise UsageError("--save-policy needs rules", todo="for example --keep-newest 5 --keep-every 20")
    policy = _policy_of(rules) if rules else None
    begun = SYSTEM_CLOCK.monotonic()
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        if forget_policy and not dry_run:
            store.set_demotion(None)
        if not (dry_run or yes or as_json) and output.is_terminal() and sys.stdin.isatty():
            _ask(store.demote(*(refs or ()), policy=policy, dry_run=True))
            begun = SYSTEM_CLOCK.monotonic()
        report = store.demote(*(refs or ()), policy=policy, dry_run=dry_run)
        if save_policy and not dry_run:
            store.set_demotion(policy)
    seconds = SYSTEM_CLOCK.monotonic() - begun
    if as_json:
        output.print_json(_json_of(report, seconds))
    else:
        _print(report, seconds)


def _policy_of(rules: dict[str, Any]) -> DemotePolicy:
    from ckstore.config import NAMED_RESIDUALS, DemotePolicy

    name = rules.pop("fidelity", "near")
    if name not in NAMED_RESIDUALS:
        raise UsageError("a fidelity is near or small", where=f"--fidelity {name}")
    return DemotePolicy(**rules, fidelity=NAMED_RESIDUALS[name]())


def _ask(report: DemoteReport) -> None:
    """Show what would be demoted, and end where it is not wanted; where nothing would be, there is nothing to ask."""
    chosen = sum(entry.action == "demote" for entry in report.entries)
    if not chosen:
        return
    _print(report, 0.0)
    these = "this checkpoint" if chosen == 1 else f"these {chosen} checkpoints"
    if not typer.confirm(f"Store {these} with a loss ({report.fidelity})?"):
        output.say("Nothing was demoted.")
        raise typer.Exit(1)


def _print(report: DemoteReport, seconds: float) -> None:
    if not report.entries:
        output.say(f"Run {report.run} has no checkpoint.")
        return
    chosen = [entry for entry in report.entries if (entry.action == "demote" if report.is_dry_run else entry.is_done)]
    would = "would be" if report.is_dry_run else "were"
    fidelity = f" to fidelity {report.fidelity}" if chosen else ""
    title = f"run {report.run}: {len(chosen)} of {len(report.entries)} checkpoints {would} demoted{fidelity}"
    output.print_table(_COLUMNS, [_cells(entry, is_dry_run=report.is_dry_run) for entry in report.entries], title=title)
    for warning in report.warnings:
        output.say(f"Warning: {warning}.")
    if not chosen:
        return
    output.say("")
    before, after = sum(entry.stored_before for entry in chosen), sum(entry.stored_after for entry in chosen)
    error = max(entry.worst_rel_rms for entry in chosen)
    sizes = f"{output.size(before)} {'become about' if report.is_dry_run else 'became'} {output.size(after)}"
    output.say(f"{sizes}; the greatest RMS error of a tensor is {error:.3g} of its values' RMS.")
    if report.is_dry_run:
        return
    packs = f"{output.size(report.packs_before)} of packs before, {output.size(report.packs_after)} after a gc"
    output.say(f"{packs}; {output.size(report.bytes_written)} written in {output.duration(seconds)}.")
    output.say("Until `ckstore gc` frees the old packs, the store is larger.")
    output.say("Until the trash is emptied, `ckstore undelete PATH seq:N` makes one exact again.")


def _cells(entry: DemoteEntry, *, is_dry_run: bool) -> list[str]:
    is_open = is_dry_run and entry.action == "demote"
    return [
        str(entry.seq),
        str(entry.step),
        entry.action,
        entry.fidelity,
        output.size(entry.bytes_state),
        output.size(entry.stored_before),
        f"{'~' if is_open else ''}{output.size(entry.stored_after)}",
        f"{entry.worst_rel_rms:.3g}" if entry.worst_rel_rms else NOTHING,
        entry.reason,
    ]


def _json_of(report: DemoteReport, seconds: float) -> dict[str, Any]:
    return {
        "run": report.run,
        "is_dry_run": report.is_dry_run,
        "fidelity": report.fidelity,
        "packs_before": report.packs_before,
        "packs_after": report.packs_after,
        "bytes_written": report.bytes_written,
        "seconds": seconds,
        "warnings": list(report.warnings),
        "checkpoints": [{name: getattr(entry, name) for name in type(entry).__slots__} for entry in report.entries],
    }
