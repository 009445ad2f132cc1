"""Parse, dispatch, turn errors into exit codes.

Only the module of the command that was called is imported: starting must cost less than listing.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from ckstore import __version__
from ckstore.cli.output import one_line, say
from ckstore.errors import CkstoreError

COMMANDS = (
    "init",
    "ls",
    "show",
    "verify",
    "restore",
    "export",
    "tag",
    "untag",
    "delete",
    "rewind",
    "doctor",
    "bench",
)

EXIT_UNFORESEEN = 1
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

_HELP = """Look at, restore and tidy up the checkpoints in a ckstore store.

A checkpoint (REF) is named by a step (3000), a tag, latest, best:METRIC[:min|max], seq:N, or id:PREFIX.
`ckstore ls PATH` shows them all.

Exit codes: 0 done; 1 unforeseen error; 2 wrong usage; 10 not found; 11 conflict; 12 damage found;
13 not supported here; 14 disk or memory full; 15 the disk failed; 130 interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and end the process with its exit code."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    called = next((argument for argument in arguments if not argument.startswith("-")), "")
    before = arguments[: arguments.index(called)] if called else arguments
    _log_to_stderr()
    try:
        command = typer.main.get_command(_app([called] if called in COMMANDS else COMMANDS))
        code = command.main(arguments, prog_name="ckstore", standalone_mode=False)
        # What is still in the buffer may meet a closed pipe as well.
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BaseException as error:
        if "--debug" in before:
            traceback.print_exception(type(error), error, error.__traceback__)
        return _code_of(error)


def _app(names: Sequence[str]) -> typer.Typer:
    app = typer.Typer(
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        # Rich costs as much time as the rest of a start; it draws tables only.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in names:
        app.command(name)(importlib.import_module(f"ckstore.cli.{name}").run)
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
    pass


_root.__doc__ = _HELP


def _code_of(error: BaseException) -> int:
    """Say on stderr what went wrong, in one line, and return the exit code for it."""
    if isinstance(error, CkstoreError):
        _complain(str(error))
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_UNFORESEEN
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        _complain("interrupted")
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has enough; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    show = getattr(error, "format_message", None)
    if show is not None and hasattr(error, "exit_code"):
        # The parser's own errors, whose class has moved between releases of typer.
        context = getattr(error, "ctx", None)
        path = getattr(context, "command_path", "ckstore")
        _complain(f"{show()} See `{path} --help`")
        return int(error.exit_code)
    _complain(f"unforeseen {type(error).__name__}: {error}. Run `ckstore --debug ...` to see where it came from")
    return EXIT_UNFORESEEN


def _complain(message: str) -> None:
    print(f"ckstore: {one_line(message)}", file=sys.stderr)


class _OneLine(logging.Formatter):
    """What the library logs may name files of others: nothing in it may steer the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message as one printable line."""
        return f"ckstore: {one_line(record.getMessage())}"


def _log_to_stderr() -> None:
    log = logging.getLogger("ckstore")
    if not log.handlers:
        stream = logging.StreamHandler()
        stream.setFormatter(_OneLine())
        stream.setLevel(logging.WARNING)
        log.addHandler(stream)
        log.propagate = False
