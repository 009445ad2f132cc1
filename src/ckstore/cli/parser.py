"""The parser: the list of commands, shared options, and errors in the arguments."""

from __future__ import annotations

import importlib
import keyword
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ckstore
from ckstore.cli import completion
from ckstore.cli.ls import print_log
from ckstore.cli.render import say
from ckstore.errors import CkstoreError, UsageError

if TYPE_CHECKING:
    from ckstore.api import Store
    from ckstore.ops.replay_form import TrainUntil


StorePath = Annotated[str, typer.Argument(metavar="PATH", help="Folder of the store, or s3://bucket/prefix (gs, az).")]
Ref = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        help="Which checkpoint: a step, a tag, latest, best:METRIC[:min|max], seq:N, or id:PREFIX.",
        autocompletion=completion.refs,
    ),
]
PointedPath = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="Folder of the store, s3://bucket/prefix (gs, az), or a pointer that a framework's save has left: "
        "such a file, or a folder such as checkpoint-500.",
    ),
]
PointedRef = Annotated[
    str | None,
    typer.Argument(
        metavar="REF",
        help="Which checkpoint, see `ckstore --help`. [default: the one that a pointer names, else latest]",
        autocompletion=completion.refs,
    ),
]
Run = Annotated[str, typer.Option("--run", metavar="NAME", help="Name of the run.", autocompletion=completion.runs)]
OnlyRun = Annotated[
    str | None,
    typer.Option("--run", metavar="NAME", help="Only this run. [default: all runs]", autocompletion=completion.runs),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
Shared = Annotated[bool, typer.Option("--allow-shared-folder", help="Accept a folder that other users may write to.")]
OutFile = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write. It appears complete or not at all.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="GLOB", help="Only leaves whose dotted path matches, such as 'model.*'. May be repeated."
    ),
]


@contextmanager
def opened(path: str, *, run: str, allow_shared_folder: bool) -> Iterator[Store]:
    """Open an existing store, and close it at the end."""
    with ckstore.open(path, run=run, create=False, allow_shared_folder=allow_shared_folder) as store:
        yield store


def training_code(script: str | None) -> TrainUntil | None:
    """Return the function of a script that --replay names; None without a script."""
    if script is None:
        return None
    from ckstore.ops.replay_form import train_until_of

    return train_until_of(script)


def followed(path: str, run: str, ref: str | None) -> tuple[str, str, str | None]:
    """Return store, run and reference that a command is to use: if PATH is a pointer, those that it names.

    A reference that the user gives applies to the run of the pointer.
    """
    if "://" in path or not (Path(path).is_file() or (Path(path) / "ckstore.json").is_file()):
        return path, run, ref
    from ckstore.integrations.pointers import follow_pointer

    store, its_run, its_ref = follow_pointer(path)
    return store, its_run, ref or its_ref


def require_terminal(*, unchanged: str, as_json: bool) -> None:
    """Raise UsageError if the user cannot be asked for confirmation."""
    if as_json or not sys.stdin.isatty():
        raise UsageError(f"cannot ask for confirmation without a terminal; {unchanged}", todo="add --yes")


def confirm(question: str, *, unchanged: str) -> None:
    """Ask the user. If the answer is no, end the command with exit code 1."""
    if not typer.confirm(question):
        say(f"{unchanged.capitalize()}.")
        raise typer.Exit(1)


def report_of(error: CkstoreError) -> Any:
    """Return the report in the error of a partly successful operation; raise the error if it has none."""
    if "report" not in error.facts:
        raise error
    return error.facts["report"]


COMMANDS = {
    "init": "tiers",
    "ls": "parser",
    "status": "health",
    "du": "inspect",
    "show": "inspect",
    "diff": "inspect",
    "stats": "inspect",
    "verify": "health",
    "restore": "files",
    "export": "files",
    "import": "files",
    "tag": "history",
    "untag": "history",
    "delete": "history",
    "rewind": "history",
    "repack": "rewrite",
    "demote": "rewrite",
    "gc": "gc",
    "trash": "history",
    "undelete": "history",
    "quarantine": "health",
    "repair": "health",
    "report": "files",
    "push": "tiers",
    "pull": "tiers",
    "mirror": "tiers",
    "adopt": "tiers",
    "doctor": "health",
    "bench": "health",
}
"""Command -> its module, in the order of the help. The function has the name of the command."""

_HELP = """List, restore and maintain the checkpoints of a ckstore store.

REF names a checkpoint: a step (3000), a tag, latest, best:METRIC[:min|max], seq:N, or id:PREFIX.
`ckstore ls PATH` lists all checkpoints.

Exit codes: 0 done; 1 unexpected error, or declined; 2 wrong usage; 3 imported in part; 4 the newest checkpoint is too
old for `status --max-age`; 10 not found; 11 conflict; 12 damage found; 13 not supported here; 14 disk or memory full;
15 disk or server failed; 16 a bound is not met; 17 the saver died; 18 a rank of the job failed; 19 a replay made
other bytes; 130 interrupted.
"""


def parse_and_run(arguments: list[str], *, completed_words: Sequence[str] = ()) -> int:
    """Run a command; return its exit code.

    Args:
        arguments: The command line.
        completed_words: For shell completion: the words on the line, which tell the command whose module is needed.

    Raises:
        UsageError: The arguments are wrong.
        KeyboardInterrupt: The user pressed Ctrl-C, or ended the input at a question.
    """
    called = next((word for word in completed_words or arguments if not word.startswith("-")), "")
    command = typer.main.get_command(_app([called] if called in COMMANDS else COMMANDS))
    try:
        code = command.main(arguments, prog_name="ckstore", standalone_mode=False)
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except Exception as error:
        raise _usage_error(error) from error
    return code if isinstance(code, int) else 0


def _usage_error(error: Exception) -> Exception:
    """Return an error of the parser as a UsageError. The class of such errors differs between releases of typer."""
    show = getattr(error, "format_message", None)
    if show is None:
        return error
    path = getattr(getattr(error, "ctx", None), "command_path", "ckstore")
    return UsageError(str(show()).rstrip(".?"), todo=f"see `{path} --help`")


def _app(names: Iterable[str]) -> typer.Typer:
    app = typer.Typer(
        help=_HELP,
        # Errors and help are plain text; rich draws tables only.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in names:
        module = importlib.import_module(f"ckstore.cli.{COMMANDS[name]}")
        app.command(name)(getattr(module, f"{name}_" if keyword.iskeyword(name) else name))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"ckstore {ckstore.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="On an error, print the traceback.")] = False,
) -> None:
    """Take the options before the command. `main.run` handles --debug."""


_root.__doc__ = _HELP


# This command is not in ls.py, because ls.py must not import typer: `ckstore ls PATH` runs without the parser.
def ls(
    path: StorePath,
    run: OnlyRun = None,
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
    points: Annotated[
        bool, typer.Option("--points", help="Also list the points of the journal after each checkpoint.")
    ] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """List checkpoints, newest first. `1200 +49`: the journal has 49 points after step 1200.

    \b
    state       bytes of all tensors
    written     bytes that this commit added to the disk
    ratio       state / written
    new/reused  chunks written / chunks that were already stored
    parent      seq of the checkpoint that training continued from
    """  # noqa: D301 - the mark keeps the parser from joining these lines
    print_log(path, run=run, limit=limit, as_json=as_json, points=points, allow_shared_folder=allow_shared_folder)
