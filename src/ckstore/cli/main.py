"""Run one command, and turn errors into exit codes and one line on stderr.

Only the module of that command is imported, so that starting takes less time than the work.
"""

from __future__ import annotations

import contextlib
import os
import sys

import ckstore
from ckstore.cli.render import one_line, say
from ckstore.errors import CkstoreError, UsageError

# ``typing`` is not imported, so that `ckstore ls` starts quickly. Type checkers take this name for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_UNEXPECTED = 1
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141


COMPLETION_VARIABLE = "_CKSTORE_COMPLETE"
"""Set by the completion script of a shell."""

GC_NICE = 10
"""Nice value of a collection: training and commits on the same machine have priority."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and end the process with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["gc"]:
        # Not in the command itself, which another program may call: that would slow down its whole process.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, max(GC_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    sys.exit(run(given))


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    if os.environ.get(COMPLETION_VARIABLE):
        return _complete()
    if not arguments:
        run(["--help"])
        return UsageError.exit_code
    try:
        code = _dispatch(arguments)
        # Flush here, so that a closed pipe is found inside this try block.
        sys.stdout.flush()
        return code
    except BaseException as error:
        if arguments[0] == "--debug":
            import traceback

            traceback.print_exception(type(error), error, error.__traceback__)
        return _code_of(error)


def _complete() -> int:
    """Answer the completion script of a shell, which typer has made. Errors print nothing: the user is typing."""
    try:
        from ckstore.cli.parser import parse_and_run

        line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
        return parse_and_run([], completed_words=line.split()[1:])
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0
    except Exception:
        return EXIT_UNEXPECTED


def _dispatch(arguments: list[str]) -> int:
    if arguments[0] == "ls":
        from ckstore.cli.ls import quick

        if quick(arguments[1:]):
            return 0
    if arguments == ["--version"]:
        say(f"ckstore {ckstore.__version__}")
        return 0
    from ckstore.cli.parser import parse_and_run
    from ckstore.cli.warnings import show_warnings

    show_warnings()
    return parse_and_run(arguments)


def _code_of(error: BaseException) -> int:
    """Print one line about the error on stderr, and return its exit code."""
    if isinstance(error, CkstoreError):
        _print_error(str(error))
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_UNEXPECTED
    if isinstance(error, KeyboardInterrupt):
        _print_error("interrupted")
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # The reader closed the pipe. Without this line, Python prints another error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    _print_error(
        f"unexpected {type(error).__name__}: {error}. Run `ckstore --debug ...` for the traceback, and report it"
    )
    return EXIT_UNEXPECTED


def _print_error(message: str) -> None:
    print(f"ckstore: {one_line(message)}", file=sys.stderr)
