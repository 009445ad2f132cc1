"""All ranks agree after which step they commit once more, when some of them got a signal to end.

Ranks notice a signal after different steps, and most steps cannot end on one rank without the others. So no rank may
wait for another rank's next step. A rank that noticed the signal asks. The others reply immediately, on the thread of
their connection, with the last step that they have checked. From then on each of them waits at its next check for the
answer: one more than the highest of these steps.

Invariants:
- A rank that has replied with a step passes no later check before it knows the answer. So none runs past it.
- An answer needs only the connections' threads. A training step that waits for another rank does not delay it.
"""

from __future__ import annotations

import threading

from ckstore.ranks.calls import Calls
from ckstore.ranks.link import Link


class LastStep:
    """One rank's part in the agreement. Made on all ranks.

    Args:
        link: The connection to the other ranks.
        name: Tells several agreements of one job apart; the same on all ranks.
        calls: The calls of this rank; None: it makes no background commits.
    """

    def __init__(self, link: Link, name: str = "", calls: Calls | None = None) -> None:
        self._link, self._calls = link, calls
        self._topic = f"commit_on_signal {name}".strip()
        self._lock = threading.Lock()
        self._checked = 0
        self._has_replied = False
        self._target: int | None = None
        link.reply_to(self._topic, self._reply, _after_highest)

    @property
    def is_background(self) -> bool:
        """Whether the last commit is a background commit, as others before: the same on all ranks after one step."""
        return self._calls is not None and self._calls.background > 0

    def is_reached(self, step: int, *, is_asked: bool) -> bool:
        """Say whether the last commit is to be made now, after a step of this rank.

        Args:
            step: The step; the same sequence on all ranks.
            is_asked: This rank got a signal to end.

        Raises:
            RankError: A rank was lost before the ranks could agree.
        """
        with self._lock:
            is_waiting = self._has_replied
            if not is_waiting:
                self._checked = step
        if not is_waiting and not is_asked:
            return False
        if not is_waiting:
            self._link.ask(self._topic)
        if self._target is None and (is_waiting or self._link.world == 1):
            self._target = int(self._link.answer_to(self._topic))
        return self._target is not None and step >= self._target

    def _reply(self) -> bytes:
        with self._lock:
            self._has_replied = True
            return str(self._checked).encode()


def _after_highest(values: tuple[bytes, ...]) -> bytes:
    return str(max(map(int, values)) + 1).encode()
