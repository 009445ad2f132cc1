"""Arguments that commands share, and what they have in common with the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.errors import CkstoreError

if TYPE_CHECKING:
    from ckstore.api import Store

StorePath = Annotated[str, typer.Argument(metavar="PATH", help="Folder of the store, or s3://bucket/prefix (gs, az).")]
Ref = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        help="Which checkpoint: a step, a tag, latest, best:METRIC[:min|max], seq:N, or id:PREFIX.",
    ),
]
Run = Annotated[str, typer.Option("--run", metavar="NAME", help="Which run of the store.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
Shared = Annotated[bool, typer.Option("--allow-shared-folder", help="Accept a folder that other users may write to.")]
OutFile = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write; it appears whole or not at all.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="GLOB", help="Only leaves whose dotted path matches, such as 'model.*'; may be repeated."
    ),
]


@contextmanager
def opened(path: str, *, run: str, allow_shared_folder: bool) -> Iterator[Store]:
    """Open a store that exists, and close it."""
    import ckstore

    with ckstore.open(path, run=run, create=False, allow_shared_folder=allow_shared_folder) as store:
        yield store


def report_of(error: CkstoreError) -> Any:
    """Return the report of what went well nonetheless; raise the error where nothing did."""
    if "report" not in error.facts:
        raise error
    return error.facts["report"]
