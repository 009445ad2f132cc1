"""``ckstore ls``: the checkpoints of a store, newest first."""

from __future__ import annotations

from typing import Annotated

import typer

from ckstore.cli.log import print_log
from ckstore.cli.options import AsJson, Shared, StorePath


def run(
    path: StorePath,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="Only this run; all runs otherwise.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            "-n",
            min=0,
            metavar="N",
            help="Show the newest N of each run; 0: all. [default: 30 on a terminal, all otherwise]",
        ),
    ] = None,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """List checkpoints, newest first.

    \b
    state       bytes of all tensors
    written     bytes that this commit added to the disk
    ratio       state / written
    new/reused  chunks written / chunks that were stored already
    parent      the seq that training went on from
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    print_log(path, run=run, limit=limit, as_json=as_json, allow_shared_folder=allow_shared_folder)
