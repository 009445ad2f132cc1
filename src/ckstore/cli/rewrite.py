"""Rewrite the packs of a run: ``repack`` without a loss, ``demote`` with one, after showing what would be rewritten."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import completion, render
from ckstore.cli.parser import AsJson, Run, Shared, StorePath, confirm, opened, training_code
from ckstore.cli.render import SEQ, STEP, Column, Table, json_of, size, three_digits
from ckstore.clock import SYSTEM_CLOCK
from ckstore.config import NAMED_RESIDUALS, DemotePolicy, RepackPolicy
from ckstore.errors import UsageError

if TYPE_CHECKING:
    from ckstore.ops.demote import DemoteEntry, DemoteReport
    from ckstore.ops.repack import RepackReport
    from ckstore.ops.replay_form import TrainUntil


_REPACKED = Table(
    SEQ,
    STEP,
    Column("action"),
    Column("base", "base_seq", is_number=True),
    Column("stored now", "stored_before", size, is_number=True),
    Column("then", "stored_after", size, is_number=True),
    Column("read now", "read_before", size, is_number=True, worth=2),
    Column("then", "read_after", size, is_number=True, worth=1),
    Column("why", "reason", is_elastic=True, worth=0),
)


def repack(
    path: StorePath,
    run: Run = "main",
    keyframes: Annotated[
        int,
        typer.Option(
            "--keyframes", min=0, metavar="N", help="Store the newest N as keyframes, which need no other checkpoint."
        ),
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Spend more time on compression, for fewer bytes.")] = False,
    amplification: Annotated[
        float,
        typer.Option(
            "--read-amplification",
            min=1,
            metavar="X",
            help="A restore of an older checkpoint reads at most X times the bytes of a keyframe.",
        ),
    ] = 1.6,
    saving: Annotated[
        float,
        typer.Option("--saving", min=0, max=100, metavar="PERCENT", help="Rewrite only what saves at least this much."),
    ] = 3.0,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Rewrite a run for fast restores and less disk space.

    The newest checkpoints become keyframes, which may take more bytes than before. Older ones become differences from
    newer ones. Contents and ids do not change. Restores can run meanwhile; commits to this run cannot. The old packs
    stay, so the store grows until `ckstore gc` frees them.

    \b
    stored  bytes of the checkpoint's own chunks
    read    bytes that a restore reads, bases included
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    policy = RepackPolicy(
        keyframes=keyframes,
        compression="best" if best else "fast",
        read_amplification_max=amplification,
        saving_min=saving / 100,
    )
    start = SYSTEM_CLOCK.monotonic()
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        report = store.repack(policy, dry_run=dry_run)
    seconds = SYSTEM_CLOCK.monotonic() - start
    if as_json:
        render.print_json(_json_of_repacked(report, policy.saving_min, seconds))
    else:
        _print_repacked(report, saving, seconds)


def _print_repacked(report: RepackReport, saving: float, seconds: float) -> None:
    if not report.entries:
        render.say(f"Run {report.run} has no checkpoint.")
        return
    count = len(report.rewritten)
    would = "would be" if report.is_dry_run else "were"
    title = f"run {report.run}: {count} of {len(report.entries)} checkpoints {would} rewritten"
    _REPACKED.print(report.entries, title=title)
    render.say("")
    if count == 0:
        render.say(f"Nothing to do: no rewrite would save {saving:g}%.")
    else:
        about = "about " if report.is_dry_run else ""
        to_write = "to write" if report.is_dry_run else f"written in {render.duration(seconds)}"
        render.say(f"{about}{size(report.bytes_written)} {to_write}; until a gc the store is larger by that.")
        before, after = size(report.packs_before), size(report.packs_after)
        grown = "" if report.packs_after < report.packs_before else ": not smaller, but the newest restore faster"
        render.say(f"{before} of packs before, {about}{after} once `ckstore gc` has freed the old ones{grown}.")
        render.say(f"Checkpoints for which a rewrite saves less than {saving:g}% are not changed.")
    if report.superseded_count:
        left = render.count(report.superseded_count, "manifest")
        render.say(f"Moved to the trash: {left} of an interrupted repack.")


def _json_of_repacked(report: RepackReport, saving_min: float, seconds: float) -> dict[str, Any]:
    return {
        **json_of(report, "run", "is_dry_run"),
        "saving_min": saving_min,
        **json_of(report, "packs_before", "packs_after", "bytes_written", "superseded_count"),
        "seconds": seconds,
        "checkpoints": report.entries,
    }


Fidelity = Annotated[str | None, typer.Option("--fidelity", metavar="NAME", help="near, or small. [default: near]")]
Newest = Annotated[
    int | None, typer.Option("--keep-newest", min=1, metavar="N", help="The newest N stay exact. [default: 3]")
]
Every = Annotated[
    int | None,
    typer.Option(
        "--keep-every", min=0, metavar="M", help="Seqs that are multiples of M stay exact; 0: none. [default: 10]"
    ),
]
To = Annotated[str, typer.Option("--to", metavar="FORM", help="lossy, or replay: without bytes; see above.")]
Replay = Annotated[
    str | None,
    typer.Option("--replay", metavar="SCRIPT", help="For --to replay: a Python file with train_until(state, step)."),
]
Save = Annotated[bool, typer.Option("--save-policy", help="Store these rules, for demotions without rules.")]
Forget = Annotated[bool, typer.Option("--forget-policy", help="Remove the stored rules.")]


def demote(
    path: StorePath,
    refs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="REF...",
            help="Demote only these, even the newest. [default: by age]",
            autocompletion=completion.refs,
        ),
    ] = None,
    run: Run = "main",
    fidelity: Fidelity = None,
    keep_newest: Newest = None,
    keep_every: Every = None,
    save_policy: Save = False,
    forget_policy: Forget = False,
    to: To = "lossy",
    replay: Replay = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be done, with new sizes and errors.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Rewrite old checkpoints with a loss, to save disk space.

    The newest ones, every M-th of the others, and all tagged ones stay exact. Steps, seqs and metrics do not change.
    Ids do: `ckstore show` prints the id of the exact checkpoint. Training can continue meanwhile, unless the newest
    checkpoint is named or the store is in a bucket. Without rules, the stored rules apply. `ckstore gc` frees the old
    packs, except those that hold bases of exact checkpoints; `ckstore repack` stores such checkpoints without these
    bases. Until the trash is emptied, `ckstore undelete` makes a checkpoint exact again.

    \b
    near       for resuming: about 50 times smaller than the state
    small      for history and evaluation: about 100 times smaller
    replay     --to replay: no bytes of tensors, and still exact. Training must
               give the same bits now, and again for each restore; see --replay
    rms error  largest of any tensor, relative to the RMS of its values
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    rules = _rules_of(save_policy, fidelity=fidelity, keep_newest=keep_newest, keep_every=keep_every)
    # Without stored rules the defaults apply.
    policy = _policy_of(rules) if rules or forget_policy else None
    train_until = _training_code(to, replay, is_lossy=fidelity is not None or save_policy)
    start = SYSTEM_CLOCK.monotonic()
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        if not (dry_run or yes or as_json) and render.is_terminal() and sys.stdin.isatty():
            _ask(store.demote(*(refs or ()), policy=policy, replay=train_until, dry_run=True))
            start = SYSTEM_CLOCK.monotonic()
        if forget_policy and not dry_run:
            store.set_demotion(None)
        report = store.demote(*(refs or ()), policy=policy, replay=train_until, dry_run=dry_run)
        if save_policy and not dry_run:
            store.set_demotion(policy)
    seconds = SYSTEM_CLOCK.monotonic() - start
    if as_json:
        render.print_json(_json_of_demoted(report, seconds))
    else:
        _print_demoted(report, seconds)


def _rules_of(save_policy: bool, **given: Any) -> dict[str, Any]:
    rules = {name: value for name, value in given.items() if value is not None}
    if save_policy and not rules:
        raise UsageError("--save-policy needs rules", todo="for example --keep-newest 5 --keep-every 20")
    return rules


def _policy_of(rules: dict[str, Any]) -> DemotePolicy:
    name = rules.pop("fidelity", "near")
    if name not in NAMED_RESIDUALS:
        raise UsageError("not a fidelity", where=f"--fidelity {name}", todo="choose near or small")
    return DemotePolicy(**rules, fidelity=NAMED_RESIDUALS[name]())


def _training_code(to: str, script: str | None, *, is_lossy: bool) -> TrainUntil | None:
    """Return the function of the script that --to replay needs; None for a demotion with a loss.

    Raises:
        UsageError: The options contradict each other, or the script has no such function.
    """
    if to not in ("lossy", "replay"):
        raise UsageError("not a form", where=f"--to {to}", todo="choose lossy or replay")
    if (to == "replay") != (script is not None):
        raise UsageError("--to replay and --replay SCRIPT need each other", todo="give both, or neither")
    if script is not None and is_lossy:
        raise UsageError(
            "--to replay stores nothing with a loss, and runs only with its script",
            todo="leave out --fidelity and --save-policy",
        )
    return training_code(script)


def _ask(report: DemoteReport) -> None:
    """Show what would be demoted, if anything. End the command if the user declines."""
    chosen = sum(entry.action == "demote" for entry in report.entries)
    if not chosen:
        return
    _print_demoted(report, 0.0)
    these = "this checkpoint" if chosen == 1 else f"these {chosen} checkpoints"
    how = (
        f"with a loss ({report.fidelity})"
        if report.form == "lossy"
        else "without bytes of tensors, if training proves it"
    )
    confirm(f"Store {these} {how}?", unchanged="nothing was demoted")


def _print_demoted(report: DemoteReport, seconds: float) -> None:
    if not report.entries:
        render.say(f"Run {report.run} has no checkpoint.")
        return
    chosen = [entry for entry in report.entries if (entry.action == "demote" if report.is_dry_run else entry.is_done)]
    would = "would be" if report.is_dry_run else "were"
    wanted = f"fidelity {report.fidelity}" if report.form == "lossy" else "replay form"
    fidelity = f" to {wanted}" if chosen else ""
    title = f"run {report.run}: {len(chosen)} of {len(report.entries)} checkpoints {would} demoted{fidelity}"
    _demoted_table(report).print(report.entries, title=title)
    for warning in report.warnings:
        render.say(f"Warning: {warning}.")
    if not chosen:
        return
    render.say("")
    before, after = sum(entry.stored_before for entry in chosen), sum(entry.stored_after for entry in chosen)
    error = max(entry.worst_rel_rms for entry in chosen)
    sizes = f"{render.size(before)} {'become about' if report.is_dry_run else 'became'} {render.size(after)}"
    if report.form == "lossy":
        render.say(f"{sizes}; the largest RMS error of a tensor is {error:.3g} of the RMS of its values.")
    else:
        render.say(f"{sizes} of tensors. To restore one, pass the training code: restore(STEP, replay=train_until).")
    if report.is_dry_run:
        return
    packs = f"{render.size(report.packs_before)} of packs before, {render.size(report.packs_after)} after a gc"
    render.say(f"{packs}; {render.size(report.bytes_written)} written in {render.duration(seconds)}.")
    render.say("The store is larger until `ckstore gc` frees the old packs.")
    render.say("Until the trash is emptied, `ckstore undelete PATH seq:N` makes a checkpoint exact again.")


def _demoted_table(report: DemoteReport) -> Table:
    def size_after(entry: DemoteEntry) -> str:
        is_estimate = report.is_dry_run and entry.action == "demote" and report.form == "lossy"
        return f"{'~' if is_estimate else ''}{size(entry.stored_after)}"

    return Table(
        SEQ,
        STEP,
        Column("action"),
        Column("fidelity", worth=3) if report.form == "lossy" else Column("form", worth=3),
        Column("state", "bytes_state", size, is_number=True, worth=1),
        Column("stored now", "stored_before", size, is_number=True),
        Column("then", size_after, is_number=True),
        Column("rms error", lambda entry: entry.worst_rel_rms or None, three_digits, is_number=True, worth=2),
        Column("why", "reason", is_elastic=True, worth=0),
    )


def _json_of_demoted(report: DemoteReport, seconds: float) -> dict[str, Any]:
    return {
        **json_of(report, "run", "is_dry_run", "form", "fidelity", "packs_before", "packs_after", "bytes_written"),
        "seconds": seconds,
        "warnings": report.warnings,
        "checkpoints": report.entries,
    }
