"""Log from where an exception would end what others wait for.

Filters and handlers are the user's, and Python lets what they raise through to whoever logs. On the threads that copy a
state, or hear of a saver's end, that would leave somebody waiting for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable


def tell(say: Callable[..., None], text: str, *facts: object) -> None:
    """Log by one of a logger's methods; what a filter or handler raises is dropped, for it cannot be told either."""
    with contextlib.suppress(Exception):
        say(text, *facts, stacklevel=2)
