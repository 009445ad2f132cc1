"""What a forked child must let go of, because it is its parent's: descriptors, memory, ears for signals."""

from __future__ import annotations

import os
import sys
import weakref
from typing import Protocol


class Inherited(Protocol):
    """Something that a process made, and a child of it finds in its memory."""

    def leave_child(self) -> None:
        """Let go of it, in a forked child; locks may be held there by threads that are not, so none is taken."""
        ...


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def leave_in_children(thing: Inherited) -> None:
    """Have every child that is forked from now on let go of something, for as long as it is not collected."""
    _inherited.add(thing)


def stay_in_children(thing: Inherited) -> None:
    """Take that back: there is nothing left to let go of."""
    _inherited.discard(thing)


def _leave_children() -> None:
    for thing in list(_inherited):
        try:
            thing.leave_child()
        except Exception as error:
            # What one cannot let go of must not keep the others; no log, whose locks may be held by nobody here.
            sys.stderr.write(f"ckstore: a forked child could not let go of a {type(thing).__name__}: {error}\n")


os.register_at_fork(after_in_child=_leave_children)
