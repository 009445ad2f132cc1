"""``ckstore undelete``: bring dropped checkpoints back while the trash has them."""

from __future__ import annotations

from typing import Annotated

import typer

from ckstore.cli import output
from ckstore.cli.options import AsJson, Run, Shared, StorePath
from ckstore.cli.shown import json_of, name_of
from ckstore.info import Info


def told(info: Info) -> str:
    """Say what bringing back a checkpoint came to."""
    if info.generation:
        return f"Exact again: {name_of(info)} of run {info.run}; its form with a loss went to the trash."
    return f"Brought back: {name_of(info)} of run {info.run}, a new entry; `latest` skips it."


def run(
    path: StorePath,
    refs: Annotated[
        list[str],
        typer.Argument(metavar="REF...", help="What to bring back: a step (its newest entry), seq:N, or id:PREFIX."),
    ],
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Bring back dropped checkpoints, or exact forms.

    Dropped ones become new entries that `latest` skips, so that no old state is resumed by surprise. Demoted ones are
    exact again where they are. `ckstore trash ls` shows what there is; what was freed cannot come back.
    """
    from ckstore.keeping import keep

    with keep(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        infos = []
        for ref in refs:
            infos.append(store.undelete(ref))
            if not as_json:
                output.say(told(infos[-1]))
    if as_json:
        output.print_json({"run": run, "undeleted": [json_of(info) for info in infos]})
