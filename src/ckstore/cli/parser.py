"""Parse the command line, by typer, and run the command."""

from __future__ import annotations

import importlib
import keyword
from collections.abc import Sequence
from typing import Annotated

import typer

from ckstore import __version__
from ckstore.cli.output import say
from ckstore.errors import UsageError

COMMANDS = (
    "init",
    "ls",
    "show",
    "diff",
    "stats",
    "verify",
    "restore",
    "export",
    "import",
    "tag",
    "untag",
    "delete",
    "rewind",
    "repack",
    "demote",
    "gc",
    "trash",
    "undelete",
    "quarantine",
    "repair",
    "report",
    "push",
    "pull",
    "mirror",
    "adopt",
    "doctor",
    "bench",
)

_HELP = """Look at, restore and tidy up the checkpoints in a ckstore store.

A checkpoint (REF) is named by a step (3000), a tag, latest, best:METRIC[:min|max], seq:N, or id:PREFIX.
`ckstore ls PATH` shows them all.

Exit codes: 0 done; 1 unforeseen error; 2 wrong usage; 3 imported in part; 10 not found; 11 conflict;
12 damage found; 13 not supported here; 14 disk or memory full; 15 disk or server failed; 16 a bound is not met;
17 the saver died; 130 interrupted.
"""


def parse_and_run(arguments: list[str]) -> int:
    """Run the command that the arguments name; return its exit code.

    Raises:
        UsageError: The arguments make no sense.
        KeyboardInterrupt: Someone pressed Ctrl-C, or ended the input at a question.
    """
    called = next((argument for argument in arguments if not argument.startswith("-")), "")
    command = typer.main.get_command(_app([called] if called in COMMANDS else COMMANDS))
    try:
        code = command.main(arguments, prog_name="ckstore", standalone_mode=False)
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except Exception as error:
        raise _meant(error) from error
    return code if isinstance(code, int) else 0


def _meant(error: Exception) -> Exception:
    """Return a mistake that the parser found as ours; its class has moved between releases of typer."""
    show = getattr(error, "format_message", None)
    if show is None:
        return error
    path = getattr(getattr(error, "ctx", None), "command_path", "ckstore")
    return UsageError(str(show()).rstrip(".?"), todo=f"see `{path} --help`")


def _app(names: Sequence[str]) -> typer.Typer:
    app = typer.Typer(
        help=_HELP,
        add_completion=False,
        # Errors and help are plain text: rich is for tables.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in names:
        module = f"{name}_" if keyword.iskeyword(name) else name
        app.command(name)(importlib.import_module(f"ckstore.cli.{module}").run)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"ckstore {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="On an error, show where in the code it came from.")] = False,
) -> None:
    """Take the options that stand before the command; main looks at --debug."""


_root.__doc__ = _HELP
