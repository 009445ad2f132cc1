"""``ckstore quarantine``: put aside what cannot be read, so that the rest can be looked after."""

from __future__ import annotations

from typing import Annotated

import typer

from ckstore.cli import output
from ckstore.cli.options import AsJson, Shared, StorePath, opened

Apply = Annotated[bool, typer.Option("--apply", help="Do it; without this it is only said what would be done.")]


def run(
    path: StorePath,
    apply: Apply = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Put unreadable manifests aside, and torn packs.

    A manifest that cannot be read may name any pack, so that `ckstore gc` frees nothing until it was put aside. Files
    go to quarantine/ in the store; nothing is removed. `ckstore repair` does this too, and mends what it can.
    """
    with opened(path, run="main", allow_shared_folder=allow_shared_folder) as store:
        report = store.quarantine(dry_run=not apply)
    if as_json:
        output.print_json(
            {
                "path": path,
                "is_dry_run": report.is_dry_run,
                "manifests": report.manifests,
                "packs": report.packs,
                "left": report.left,
            }
        )
        return
    count = len(report.manifests) + len(report.packs)
    if not count:
        output.say("Nothing to put aside: every manifest can be read.")
    for kind, files in (("manifest", report.manifests), ("pack", report.packs)):
        for name, problem in files.items():
            output.say(f"{kind} {name}: {problem}")
    for sentence in report.left:
        output.say(f"left in place: {sentence}")
    if count and report.is_dry_run:
        output.say("")
        output.say(f"{count} files would be moved to quarantine/; --apply does it.")
    elif count:
        output.say("")
        output.say(f"{count} files were moved to quarantine/.")
