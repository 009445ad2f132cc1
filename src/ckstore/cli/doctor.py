"""``ckstore doctor``: what this machine and a store are like, for a report of a problem."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckstore.cli import output
from ckstore.cli.options import AsJson, Shared
from ckstore.cli.output import Column
from ckstore.errors import NotFoundError

MEASURE_NBYTES = 64 << 20

_COLUMNS = (Column("what"), Column("found", is_elastic=True), Column("verdict"))


def run(
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="A store, or a folder that may become one.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also write 64 MiB to PATH and time it.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Say what this machine and a store are like.

    Put the output into a report of a problem. Without --measure nothing is written. "warning" means: worth doing
    something about.
    """
    from ckstore.diagnosis import Finding, diagnose_machine, diagnose_store

    findings = diagnose_machine()
    if path is not None:
        findings += diagnose_store(path, allow_shared_folder=allow_shared_folder)
    if measure:
        if path is None:
            raise NotFoundError("--measure needs a PATH", todo="name the folder whose disk is to be measured")
        from ckstore.cli.bench import plain_write

        seconds = plain_write(Path(path.removeprefix("file://")), MEASURE_NBYTES)
        found = f"{output.rate(MEASURE_NBYTES, seconds)}: {output.size(MEASURE_NBYTES)} written and synced"
        findings.append(Finding("plain write", found))
    if as_json:
        rows = [{"topic": one.topic, "found": one.found, "verdict": one.verdict} for one in findings]
        output.print_json({"path": path, "findings": rows})
        return
    if output.is_terminal():
        for one in findings:
            mark = "" if one.verdict == "ok" else f"[{one.verdict}] "
            output.say(f"{one.topic:<14} {mark}{one.found}")
    else:
        output.print_table(_COLUMNS, [[one.topic, one.found, one.verdict] for one in findings])
