"""How one rank takes part in the commits of its job: a state machine without sockets, threads or clocks.

``Member`` is on every rank, also on rank 0, and talks to ``Coordinator`` (``protocol.py``) on rank 0.

Invariants:
- Every commit and question that the caller has begun ends with one Finish or Agreed.
- A rank that loses rank 0 looks into the store if the commit may be published, and otherwise fails.
- A rank that has lost rank 0 neither sends nor receives any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from ckstore.format.error_records import ErrorRecord
from ckstore.ranks.actions import START_AGAIN, Action, Finish, LookUp, Send, of_rank, rank_error
from ckstore.ranks.messages import (
    Abort,
    Agreed,
    AllStaged,
    Ask,
    Asked,
    Awaited,
    Begin,
    Content,
    Done,
    Failed,
    Joining,
    Left,
    Message,
    More,
    Part,
    SaverLost,
    Staged,
    Wanted,
    Write,
)


class Duty(IntEnum):
    """What a rank has to do for a commit."""

    BEGUN = 0
    WRITING = 1
    SENT = 2
    LOOKING = 3


@dataclass
class _Share:
    step: int
    duty: Duty = Duty.BEGUN
    turn: int = 0
    error: ErrorRecord | None = None
    """Why this rank asked to abort the commit."""


class Member:
    """One rank's side.

    Args:
        rank: The rank.
        after_loss: What the user is to do after rank 0 was lost.
    """

    def __init__(self, rank: int, *, after_loss: str = START_AGAIN) -> None:
        self._rank = rank
        self._after_loss = after_loss
        self._lost: str | None = None
        self._live: dict[int, _Share] = {}
        self._begun_max = self._joined = 0
        self._spans: bytes | None = None
        self._questions: dict[str, int] = {}

    # Events from the caller

    def join(self, number: int, step: int, handle: str = "", background: int = 0) -> list[Action]:
        """The caller will take part in a commit. Finish follows, at the latest after ``begin`` or ``abort``."""
        self._begun_max = self._joined = number
        self._live[number] = _Share(step)
        return self._end_if_lost(number) or [Send(0, Joining(number, step, handle, background))]

    def begin(self, begin: Begin) -> list[Action]:
        """The caller takes part in a commit."""
        if begin.number == self._joined and begin.number not in self._live:
            # It has failed on another rank meanwhile.
            return []
        self._begun_max = max(self._begun_max, begin.number)
        self._live[begin.number] = _Share(begin.step)
        return self._end_if_lost(begin.number) or [Send(0, begin)]

    def contents(self, number: int, contents: Mapping[bytes, bytes]) -> list[Action]:
        """The answer to Wanted."""
        if number not in self._live or self._lost is not None:
            return []
        return [Send(0, Content(number, digest, content)) for digest, content in contents.items()]

    def staged(self, number: int) -> list[Action]:
        """All bytes are staged, and this rank will write them."""
        return [Send(0, Staged(number))] if number in self._live and self._lost is None else []

    def part(self, number: int, content: bytes) -> list[Action]:
        """The answer to Write or More: this rank's packs are durable."""
        share = self._live.get(number)
        if share is None or share.duty is not Duty.WRITING or share.error is not None:
            return []
        share.duty = Duty.SENT
        return [Send(0, Part(number, share.turn, content))]

    def abort(self, number: int, step: int, error: ErrorRecord) -> list[Action]:
        """This rank cannot go on, or never began. Finish follows, with the receipt if it was too late."""
        share = self._live.get(number)
        if share is None:
            if number <= self._begun_max:
                return []
            self._begun_max = number
            share = self._live[number] = _Share(step)
        if share.error is not None or share.duty is Duty.LOOKING:
            return []
        share.error = error
        return self._end_if_lost(number) or [Send(0, Abort(number, step, error))]

    def ask(self, topic: str, number: int, value: bytes, *, is_patient: bool = False) -> list[Action]:
        """The caller asks a question that all ranks ask. Agreed follows."""
        self._questions[topic] = number
        if self._lost is not None:
            return self._unanswered(topic)
        return [Send(0, Ask(topic, number, value, is_patient))]

    def left(self, rank: int, how: str, last: int = 0, handle: str = "") -> list[Action]:
        """A rank joins no commit any more, or none up to a number; see ``Left``."""
        return [Send(0, Left(rank, how, last, handle))] if self._lost is None else []

    def found(self, number: int, receipt: bytes) -> list[Action]:
        """The answer to LookUp: the checkpoint is in the store."""
        share = self._live.get(number)
        if share is None or share.duty is not Duty.LOOKING:
            return []
        del self._live[number]
        return [Finish(number, receipt, None, None)]

    def not_found(self, number: int) -> list[Action]:
        """The answer to LookUp: the checkpoint is not in the store."""
        share = self._live.get(number)
        if share is None or share.duty is not Duty.LOOKING:
            return []
        return self._end_lost(number, share)

    # Events from rank 0

    def received(self, message: Message) -> list[Action]:
        """Rank 0 has sent a message, one of ``TO_RANK``."""
        if self._lost is not None:
            return []
        if isinstance(message, Write):
            return self._write(message)
        if isinstance(message, More):
            return self._more(message)
        if isinstance(message, (Done, Failed)):
            return self._finish(message)
        if isinstance(message, Agreed):
            is_mine = self._questions.get(message.topic) == message.number
            if is_mine:
                del self._questions[message.topic]
            return [message] if is_mine else []
        if isinstance(message, (Wanted, AllStaged)):
            return [message] if message.number in self._live else []
        if isinstance(message, Awaited):
            return [message] if message.number > self._begun_max else []
        return [message] if isinstance(message, (Asked, SaverLost)) else []

    def lost(self, how: str) -> list[Action]:
        """Rank 0 has closed the connection, or has been silent for too long.

        Args:
            how: What happened, to follow ``rank 0`` in a sentence.
        """
        if self._lost is not None:
            return []
        self._lost = how
        actions: list[Action] = []
        for number, share in list(self._live.items()):
            # Without this rank's part, nothing can have been published.
            if share.duty is Duty.SENT:
                share.duty = Duty.LOOKING
                actions.append(LookUp(number))
            else:
                actions += self._end_lost(number, share)
        for topic in list(self._questions):
            actions += self._unanswered(topic)
        return actions

    # Both

    def _write(self, message: Write) -> list[Action]:
        # Also of a commit that this rank wants to abort: the next Write may refer to it.
        self._spans = message.spans if message.spans is not None else self._spans
        share = self._live.get(message.number)
        if share is None or share.error is not None:
            return []
        assert self._spans is not None, "the first Write has spans"
        share.duty = Duty.WRITING
        return [Write(message.number, self._spans)]

    def _more(self, message: More) -> list[Action]:
        share = self._live.get(message.number)
        if share is None:
            return []
        share.duty, share.turn = Duty.WRITING, message.turn
        return [message] if share.error is None else []

    def _finish(self, message: Done | Failed) -> list[Action]:
        if self._live.pop(message.number, None) is None:
            return []
        if isinstance(message, Done):
            return [Finish(message.number, message.receipt, None, None)]
        return [Finish(message.number, None, message.rank, message.error)]

    def _end_if_lost(self, number: int) -> list[Action]:
        return [] if self._lost is None else self._end_lost(number, self._live[number])

    def _end_lost(self, number: int, share: _Share) -> list[Action]:
        del self._live[number]
        if share.error is not None:
            return [Finish(number, None, self._rank, of_rank(share.error, self._rank))]
        what = f"rank 0 {self._lost} before it acknowledged the commit of step {share.step}"
        what += ", which was not in the store then" if share.duty is Duty.LOOKING else ""
        return [Finish(number, None, 0, rank_error(what, self._after_loss, rank=0))]

    def _unanswered(self, topic: str) -> list[Action]:
        number = self._questions.pop(topic)
        record = rank_error(f"rank 0 {self._lost} before it answered {topic!r}", self._after_loss, rank=0)
        return [Agreed(topic, number, None, 0, record)]
