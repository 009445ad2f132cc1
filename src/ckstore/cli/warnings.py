"""Show the warnings of the library on stderr, one line each."""

from __future__ import annotations

import logging

from ckstore.cli.render import one_line


class _OneLine(logging.Formatter):
    """Formats a log message as one printable line, because it may contain file names that control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message as one printable line."""
        return f"ckstore: {one_line(record.getMessage())}"


def show_warnings() -> None:
    """Print what the library logs, from warnings upward, unless a handler exists. Repeated calls do nothing."""
    log = logging.getLogger("ckstore")
    if not log.handlers:
        stream = logging.StreamHandler()
        stream.setFormatter(_OneLine())
        stream.setLevel(logging.WARNING)
        log.addHandler(stream)
        log.propagate = False
