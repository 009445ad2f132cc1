"""``ckstore rewind``: make an older checkpoint the newest."""

from __future__ import annotations

from ckstore.cli import render
from ckstore.cli.parser import AsJson, Ref, Run, Shared, StorePath, opened
from ckstore.cli.render import json_of_info, name_of


def rewind(
    path: StorePath,
    ref: Ref,
    run: Run = "main",
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Make an older checkpoint the newest again.

    Training then resumes from it. It is published again under a new seq, without copying data. The newer checkpoints
    stay in the history. Refused while a trainer is writing to this run.
    """
    with opened(path, run=run, allow_shared_folder=allow_shared_folder) as store:
        before = store.info(ref)
        info = store.rewind(f"seq:{before.seq}")
    if as_json:
        render.print_json(json_of_info(info))
    else:
        render.say(f"Rewound run {run}: {name_of(before, ref)} is the newest again, as seq {info.seq}.")
