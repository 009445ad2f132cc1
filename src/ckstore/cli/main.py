"""Run the command that was called, and turn errors into exit codes.

Only the module of that command is imported: starting must not take longer than the work.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from ckstore.cli.render import one_line
from ckstore.errors import CkstoreError, UsageError

EXIT_UNFORESEEN = 1
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141


GC_NICE = 10
"""Nice value of a collection: training and commits on the same machine have priority."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and end the process with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["gc"]:
        # Not in the command itself: if that is run inside another program, the whole process would become slow.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, max(GC_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    sys.exit(run(given))


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    if not arguments:
        run(["--help"])
        return UsageError.exit_code
    _log_to_stderr()
    try:
        code = _dispatch(arguments)
        # Flush here, so that a closed pipe is found inside this try block.
        sys.stdout.flush()
        return code
    except BaseException as error:
        if arguments[0] == "--debug":
            traceback.print_exception(type(error), error, error.__traceback__)
        return _code_of(error)


def _dispatch(arguments: list[str]) -> int:
    if arguments[0] == "ls":
        from ckstore.cli.ls import quick

        if quick(arguments[1:]):
            return 0
    from ckstore.cli.parser import parse_and_run

    return parse_and_run(arguments)


def _code_of(error: BaseException) -> int:
    """Say on stderr what went wrong, in one line, and return the exit code for it."""
    if isinstance(error, CkstoreError):
        _complain(str(error))
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_UNFORESEEN
    if isinstance(error, KeyboardInterrupt):
        _complain("interrupted")
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # The reader has closed the pipe. Without this, Python prints another error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    _complain(f"unforeseen {type(error).__name__}: {error}. Run `ckstore --debug ...` to see where it came from")
    return EXIT_UNFORESEEN


def _complain(message: str) -> None:
    print(f"ckstore: {one_line(message)}", file=sys.stderr)


class _OneLine(logging.Formatter):
    """Log messages can contain names of files that others made: remove what could control the terminal."""

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
