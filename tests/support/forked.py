"""Children that are forked in the middle of something, as by a trainer's data loader; they end without a trace."""

from __future__ import annotations

import os
import signal


def fork(act, *, seconds_max=200):
    """Call ``act`` in a forked child, which ends then; return what waits for the child and checks that it went well.

    Args:
        act: What it raises, and any answer but None and True, fails the child.
        seconds_max: When the child is killed.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(seconds_max)
            status = 0 if act() in (None, True) else 2
        finally:
            os._exit(status)

    def check():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    return check
