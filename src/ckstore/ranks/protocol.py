"""How rank 0 leads the ranks of a job to one checkpoint: a state machine without sockets, threads or clocks.

``Coordinator`` is on rank 0; ``member.py`` has the side of every rank, rank 0 included. Events go in, and a list of
actions comes out: ``Send``, or something that rank 0's caller must do. docs/FORMAT.md, section 13, describes the steps
and the crashes. ``tests/support/ranks_rules.py`` is a model that searches the interleavings of this code.

One commit, as rank 0 sees it::

    joining ──> listing ──> planning ──> writing ──> merging ──> publishing ──> ended
    begins      contents    Plan         parts       Merge       Publish        Done or Failed
                of new         └─> Write   ^            └─> More    │
                digests                    └────────────────┘       └ from here on no rank can abort it

Invariants:
- Publish is issued at most once for a commit, after every rank's part of every turn has arrived, and in the order of
  the commits.
- A rank is needed until its part has arrived. If it is lost before, the commit fails on all other ranks.
- Every rank that takes part in a commit gets one answer: Done, or Failed with the rank that caused it.
- A message of a commit that has ended changes nothing. A late Begin, Abort or Ask is answered.
- A rank that has joined is waited for as long as it lives. Any other has ``join_seconds``, or ``LEAVE_SECONDS`` if its
  trainer is lost, or has lost its saver.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ckstore.errors import counted
from ckstore.format.error_records import ErrorRecord, cut_text
from ckstore.hashing import digest_of
from ckstore.ranks.actions import (
    START_AGAIN,
    Action,
    Decide,
    Merge,
    Plan,
    Publish,
    Send,
    of_rank,
    other_calls_record,
    rank_error,
)
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

JOIN_SECONDS = 60.0
"""How long ranks wait for one that does not take part."""

NOTICE_SECONDS = 1.0
"""After this time, ranks that have not begun a commit learn who has. One that has called commit_async reports it."""

LEAVE_SECONDS = 3.0
"""How long a saver whose trainer is lost may take to join a commit that its trainer has begun, or that is repeated."""

IN_FLIGHT_MAX = 2
"""Commits that may be unfinished at a time."""

_ENDED_MAX = 16
"""Outcomes that are remembered for late ranks."""

_NAMED_MAX = 8
"""Ranks that a message names."""

_WHY_NBYTES_MAX = 1000


class Stage(IntEnum):
    """How far a commit is."""

    JOINING = 0
    LISTING = 1
    PLANNING = 2
    WRITING = 3
    MERGING = 4
    PUBLISHING = 5


@dataclass
class _Commit:
    number: int
    opened: float
    stage: Stage = Stage.JOINING
    answered_to: set[int] = field(default_factory=set)
    """Ranks that wait for the outcome."""
    step: int | None = None
    first: tuple[int, Joining] | None = None
    """The rank that joined first."""
    has_noticed: bool = False
    """Whether the missing ranks know who has begun."""
    joined: set[int] = field(default_factory=set)
    """Ranks that take part, and may still be capturing their state."""
    begun: dict[int, Begin] = field(default_factory=dict)
    wanted: dict[bytes, int] = field(default_factory=dict)
    """Digests whose content was not received yet, and the rank that sends it."""
    contents: dict[bytes, bytes] = field(default_factory=dict)
    staged: set[int] = field(default_factory=set)
    turn: int = 0
    awaited: set[int] = field(default_factory=set)
    """Ranks whose part of this turn was not received yet."""
    parts: dict[int, bytes] = field(default_factory=dict)

    def digests(self, world: int) -> tuple[tuple[bytes, ...], ...]:
        """Return the digests of each rank; all have begun."""
        return tuple(self.begun[rank].digests for rank in range(world))


@dataclass
class _Question:
    number: int
    opened: float
    is_patient: bool = False
    values: dict[int, bytes] = field(default_factory=dict)


class Coordinator:
    """Rank 0's side for all ranks.

    Args:
        world: Number of ranks.
        join_seconds: How long to wait for a rank that does not take part.
        in_flight_max: Commits that may be unfinished at a time.
        after_loss: What the user is to do after a rank was lost.
    """

    def __init__(
        self,
        world: int,
        *,
        join_seconds: float = JOIN_SECONDS,
        in_flight_max: int = IN_FLIGHT_MAX,
        after_loss: str = START_AGAIN,
    ) -> None:
        self._world = world
        self._join_seconds = join_seconds
        self._in_flight_max = in_flight_max
        self._after_loss = after_loss
        self._connected = {0}
        self._lost: dict[int, str] = {}
        self._left: dict[int, tuple[Left, float]] = {}
        self._live: dict[int, _Commit] = {}
        self._ended: dict[int, Done | Failed] = {}
        self._ended_max = 0
        self._planned: frozenset[bytes] = frozenset()
        self._spans: dict[int, bytes] = {}
        self._questions: dict[str, _Question] = {}
        self._answers: dict[str, Agreed] = {}

    # Events from the ranks

    def joined(self, rank: int) -> list[Action]:
        """A rank has connected."""
        self._connected.add(rank)
        actions: list[Action] = []
        for topic, question in self._questions.items():
            actions += self._send([rank], Asked(topic, question.number))
        return actions

    def how_lost(self, rank: int) -> str | None:
        """Return what ``lost`` said about a rank. None: it is not lost."""
        return self._lost.get(rank)

    def received(self, rank: int, message: Message, now: float) -> list[Action]:
        """A rank has sent a message.

        Args:
            rank: The sender.
            message: One of ``TO_RANK_0``.
            now: Monotonic time in seconds.
        """
        if rank in self._lost:
            return []
        if isinstance(message, Joining):
            return self._join(rank, message, now)
        if isinstance(message, Begin):
            return self._begin(rank, message, now)
        if isinstance(message, Abort):
            return self._abort(rank, message, now)
        if isinstance(message, Ask):
            return self._ask(rank, message, now)
        if isinstance(message, Left):
            return self._leave(message, now)
        if isinstance(message, (Content, Staged, Part)):
            commit = self._live.get(message.number)
            if commit is not None and commit.stage < Stage.PUBLISHING:
                return self._progress(rank, message, commit)
        return []

    def lost(self, rank: int, how: str) -> list[Action]:
        """A rank has closed its connection, or has been silent for too long. It does not come back.

        Args:
            rank: The rank.
            how: What happened, to follow the name of the rank in a sentence.
        """
        if rank in self._lost:
            return []
        self._lost[rank] = how
        actions: list[Action] = []
        for commit in list(self._live.values()):
            if self._needs(commit, rank):
                actions += self._fail(commit, rank, self._lost_record(rank, _step_text(commit)))
        for topic, question in list(self._questions.items()):
            actions += self._answer(topic, question.number, None, rank, self._lost_record(rank, f"call {topic!r}"))
        return actions

    def tick(self, now: float) -> list[Action]:
        """Time has passed. Call it about once a second."""
        actions: list[Action] = []
        for commit in list(self._live.values()):
            missing = self._missing(commit.joined)
            gone = next((rank for rank in missing if self._has_left(rank, commit, now)), None)
            if gone is not None:
                actions += self._fail(commit, gone, self._left_record(gone, _step_text(commit)))
            elif missing and now - commit.opened >= self._join_seconds:
                record = self._absent_record(missing, f"begin the {_step_text(commit)}", "call commit on every rank")
                actions += self._fail(commit, missing[0], record)
            elif missing and not commit.has_noticed and now - commit.opened >= NOTICE_SECONDS:
                commit.has_noticed = True
                actions += self._notice(commit, missing)
        for topic, question in list(self._questions.items()):
            missing = self._missing(question.values)
            if missing and not question.is_patient and now - question.opened >= self._join_seconds:
                record = self._absent_record(missing, f"take part in {topic!r}", "make the same calls on every rank")
                actions += self._answer(topic, question.number, None, missing[0], record)
        return actions

    def has_seen(self, number: int) -> bool:
        """Whether a rank has taken part in a commit. On any thread."""
        return number in self._live or number in self._ended

    @property
    def is_idle(self) -> bool:
        """Whether no commit and no question is unfinished."""
        return not (self._live or self._questions)

    @property
    def first_lost(self) -> int | None:
        """The rank that was lost first."""
        return next(iter(self._lost), None)

    @property
    def first_loss(self) -> str:
        """The rank that was lost first, and how. Empty: none was."""
        rank = self.first_lost
        return "" if rank is None else cut_text(f"rank {rank} {self._lost[rank]}", _WHY_NBYTES_MAX)

    # Events from rank 0's caller

    def planned(self, number: int, spans: Sequence[bytes]) -> list[Action]:
        """Plan is done.

        Args:
            number: The commit.
            spans: For each rank what it must know in order to write.
        """
        commit = self._live.get(number)
        if commit is None or commit.stage is not Stage.PLANNING:
            return []
        commit.stage = Stage.WRITING
        commit.awaited = set(range(self._world))
        self._planned = frozenset(digest for listed in commit.digests(self._world) for digest in listed)
        actions: list[Action] = []
        for rank, content in enumerate(spans):
            is_same = self._spans.get(rank) == content
            self._spans[rank] = content
            actions += self._send([rank], Write(number, None if is_same else content))
        return actions

    def merged(self, number: int) -> list[Action]:
        """Merge is done, and the checkpoint is complete."""
        commit = self._live.get(number)
        if commit is None or commit.stage is not Stage.MERGING:
            return []
        commit.stage = Stage.PUBLISHING
        return [Publish(number)]

    def more(self, number: int, contents: Mapping[int, bytes]) -> list[Action]:
        """Merge found that ranks must write more.

        Args:
            number: The commit.
            contents: For each of these ranks what it must write. At least one.
        """
        commit = self._live.get(number)
        if commit is None or commit.stage is not Stage.MERGING:
            return []
        commit.stage = Stage.WRITING
        commit.turn += 1
        commit.awaited = set(contents)
        for rank in sorted(contents):
            if rank in self._lost:
                return self._fail(commit, rank, self._lost_record(rank, _step_text(commit)))
        actions: list[Action] = []
        for rank, content in contents.items():
            actions += self._send([rank], More(number, commit.turn, content))
        return actions

    def published(self, number: int, receipt: bytes) -> list[Action]:
        """Publish is done: the checkpoint is durable."""
        commit = self._live.get(number)
        if commit is None or commit.stage is not Stage.PUBLISHING:
            return []
        return self._end(commit, Done(number, receipt))

    def failed(self, number: int, error: ErrorRecord) -> list[Action]:
        """Plan, Merge or Publish failed, and nothing is published."""
        commit = self._live.get(number)
        return [] if commit is None else self._fail(commit, 0, of_rank(error, 0))

    def decided(self, topic: str, number: int, value: bytes | ErrorRecord) -> list[Action]:
        """Decide is done."""
        question = self._questions.get(topic)
        if question is None or question.number != number or len(question.values) < self._world:
            return []
        if isinstance(value, ErrorRecord):
            return self._answer(topic, number, None, 0, of_rank(value, 0))
        return self._answer(topic, number, value, None, None)

    def refuse(self, topic: str, number: int, error: ErrorRecord) -> list[Action]:
        """Rank 0's caller was interrupted while it waited for the ranks. The others get an error."""
        question = self._questions.get(topic)
        if question is None or question.number != number:
            return []
        return self._answer(topic, number, None, 0, of_rank(error, 0))

    # Commits

    def _join(self, rank: int, joining: Joining, now: float) -> list[Action]:
        commit, actions = self._taken(rank, joining.number, now)
        if commit is None:
            return actions
        commit.joined.add(rank)
        commit.step = joining.step if commit.step is None else commit.step
        commit.first = commit.first or (rank, joining)
        if self._lost:
            return self._fail_of_lost(commit)
        other, first = commit.first
        if joining.handle == first.handle and joining.background != first.background:
            counts = {other: first.background, rank: joining.background}
            return self._fail(commit, None, other_calls_record(first.step, counts))
        return []

    def _notice(self, commit: _Commit, missing: Sequence[int]) -> list[Action]:
        if commit.first is None or not commit.first[1].handle:
            return []
        rank, first = commit.first
        return self._send(missing, Awaited(first.number, first.step, rank, first.handle, first.background))

    def _fail_of_lost(self, commit: _Commit) -> list[Action]:
        lost = next(iter(self._lost))
        return self._fail(commit, lost, self._lost_record(lost, _step_text(commit)))

    def _begin(self, rank: int, begin: Begin, now: float) -> list[Action]:
        commit, actions = self._taken(rank, begin.number, now)
        if commit is None:
            return actions
        other = next(iter(commit.begun), None)
        first = begin if other is None else commit.begun[other]
        is_repeated = rank in commit.begun
        commit.begun[rank] = begin
        commit.joined.add(rank)
        if self._lost:
            return self._fail_of_lost(commit)
        if is_repeated or len(self._live) > self._in_flight_max:
            return self._fail(commit, rank, _out_of_turn(rank, begin))
        if other is not None and (record := _difference(other, first, rank, begin)):
            return self._fail(commit, None, record)
        return self._advance()

    def _abort(self, rank: int, abort: Abort, now: float) -> list[Action]:
        commit, actions = self._taken(rank, abort.number, now)
        if commit is None or commit.stage is Stage.PUBLISHING:
            return actions
        return self._fail(commit, rank, of_rank(abort.error, rank))

    def _taken(self, rank: int, number: int, now: float) -> tuple[_Commit | None, list[Action]]:
        """Return the commit that a rank takes part in, or the answer for a rank that is too late."""
        commit = self._live.get(number)
        if commit is None:
            if number <= self._ended_max:
                ended = self._ended.get(number)
                # A rank that took part in a published commit has its answer, and ignores a second one.
                late = ended if isinstance(ended, Failed) else Failed(number, rank, _late_record(rank))
                return None, self._send([rank], late)
            commit = self._live[number] = _Commit(number, now)
        commit.answered_to.add(rank)
        return commit, []

    def _progress(self, rank: int, message: Content | Staged | Part, commit: _Commit) -> list[Action]:
        if isinstance(message, Content):
            if commit.wanted.get(message.digest) != rank or digest_of(message.content) != message.digest:
                return self._fail(commit, rank, _out_of_turn(rank, message))
            del commit.wanted[message.digest]
            commit.contents[message.digest] = message.content
            return self._advance()
        if isinstance(message, Part):
            if rank not in commit.awaited or message.turn != commit.turn:
                return self._fail(commit, rank, _out_of_turn(rank, message))
            commit.awaited.remove(rank)
            commit.parts[rank] = message.content
        actions = self._staged(rank, commit)
        return [*actions, *self._advance()]

    def _staged(self, rank: int, commit: _Commit) -> list[Action]:
        if rank in commit.staged:
            return []
        commit.staged.add(rank)
        is_last = len(commit.staged) == self._world
        is_async = any(begin.is_async for begin in commit.begun.values())
        return self._send(range(self._world), AllStaged(commit.number)) if is_last and is_async else []

    def _advance(self) -> list[Action]:
        """Move every commit as far as it can go, the earliest first."""
        actions: list[Action] = []
        earlier: list[_Commit] = []
        for commit in self._live.values():
            if self._may_list(commit, earlier):
                actions += self._list(commit)
            if commit.stage is Stage.LISTING and not commit.wanted:
                commit.stage = Stage.PLANNING
                # If this plan fails, it is not clear what rank 0 has kept.
                self._planned = frozenset()
                actions.append(Plan(commit.number, commit.digests(self._world), commit.contents))
                commit.contents = {}
            if commit.stage is Stage.WRITING and not commit.awaited and not earlier:
                commit.stage = Stage.MERGING
                actions.append(Merge(commit.number, commit.turn, commit.parts))
                commit.parts = {}
            earlier.append(commit)
        return actions

    def _may_list(self, commit: _Commit, earlier: Sequence[_Commit]) -> bool:
        is_whole = commit.stage is Stage.JOINING and len(commit.begun) == self._world
        return is_whole and all(other.stage >= Stage.WRITING for other in earlier)

    def _list(self, commit: _Commit) -> list[Action]:
        """Ask for what rank 0 has not seen. Of ranks with the same digest, the lowest sends the content."""
        commit.stage = Stage.LISTING
        actions: list[Action] = []
        for rank in range(self._world):
            wanted = tuple(
                digest
                for digest in dict.fromkeys(commit.begun[rank].digests)
                if digest not in self._planned and digest not in commit.wanted
            )
            commit.wanted.update(dict.fromkeys(wanted, rank))
            if wanted:
                actions += self._send([rank], Wanted(commit.number, wanted))
        return actions

    def _needs(self, commit: _Commit, rank: int) -> bool:
        return commit.stage < Stage.WRITING or (commit.stage is Stage.WRITING and rank in commit.awaited)

    def _fail(self, commit: _Commit, rank: int | None, record: ErrorRecord) -> list[Action]:
        return self._end(commit, Failed(commit.number, rank, record))

    def _end(self, commit: _Commit, outcome: Done | Failed) -> list[Action]:
        del self._live[commit.number]
        self._ended_max = max(self._ended_max, commit.number)
        self._ended[commit.number] = outcome
        while len(self._ended) > _ENDED_MAX:
            del self._ended[min(self._ended)]
        actions = self._send(sorted(commit.answered_to), outcome)
        return [*actions, *self._advance()]

    def _leave(self, left: Left, now: float) -> list[Action]:
        if left.handle:
            return self._send(self._missing({left.rank}), SaverLost(left.last, left.rank, left.handle, left.how))
        # The commits that wait for the rank fail at a later tick.
        before = self._left.get(left.rank)
        if before is None or (before[0].last and not 0 < left.last <= before[0].last):
            self._left[left.rank] = (left, now)
        return []

    # Questions

    def _ask(self, rank: int, ask: Ask, now: float) -> list[Action]:
        question = self._questions.get(ask.topic)
        answer = self._answers.get(ask.topic)
        if question is None and answer is not None and ask.number <= answer.number:
            is_same = answer.number == ask.number
            late = answer if is_same else Agreed(ask.topic, ask.number, None, rank, _late_record(rank))
            return self._send([rank], late)
        actions: list[Action] = []
        if question is None:
            question = self._questions[ask.topic] = _Question(ask.number, now, ask.is_patient)
            others = [other for other in range(self._world) if other != rank]
            actions = self._send(others, Asked(ask.topic, ask.number))
        if question.number != ask.number or rank in question.values:
            record = _late_record(rank) if ask.number < question.number else _out_of_turn(rank, ask)
            return self._send([rank], Agreed(ask.topic, ask.number, None, rank, record))
        question.values[rank] = ask.value
        if self._lost:
            lost = next(iter(self._lost))
            return self._answer(ask.topic, ask.number, None, lost, self._lost_record(lost, f"call {ask.topic!r}"))
        if len(question.values) == self._world:
            values = tuple(question.values[other] for other in range(self._world))
            actions.append(Decide(ask.topic, ask.number, values))
        return actions

    def _answer(
        self, topic: str, number: int, value: bytes | None, rank: int | None, error: ErrorRecord | None
    ) -> list[Action]:
        question = self._questions.pop(topic)
        answer = self._answers[topic] = Agreed(topic, number, value, rank, error)
        return self._send(sorted(question.values), answer)

    # Both

    def _send(self, ranks: Iterable[int], message: Message) -> list[Action]:
        return [Send(rank, message) for rank in ranks if rank not in self._lost]

    def _missing(self, arrived: Container[int]) -> list[int]:
        return [rank for rank in range(self._world) if rank not in arrived]

    def _has_left(self, rank: int, commit: _Commit, now: float) -> bool:
        left, noticed = self._left.get(rank, (None, now))
        if left is None or 0 < left.last < commit.number:
            return False
        # All ranks begin within moments, also a commit that is repeated after all trainers have died.
        return now - max(commit.opened, noticed) >= LEAVE_SECONDS

    def _left_record(self, rank: int, during: str) -> ErrorRecord:
        left, _ = self._left[rank]
        return _failed_with(rank, left.how, during, self._after_loss if left.last else START_AGAIN)

    def _lost_record(self, rank: int, during: str) -> ErrorRecord:
        return _failed_with(rank, self._lost[rank], during, self._after_loss)

    def _absent_record(self, missing: Sequence[int], verb: str, todo: str) -> ErrorRecord:
        names = ", ".join(str(rank) for rank in missing[:_NAMED_MAX])
        names += f" and {len(missing) - _NAMED_MAX} more" if len(missing) > _NAMED_MAX else ""
        what = f"{'rank' if len(missing) == 1 else 'ranks'} {names} did not {verb} within {self._join_seconds:g} s"
        strangers = [rank for rank in missing if rank not in self._connected]
        if strangers:
            what += f", and {counted(len(strangers), 'rank')} never connected, rank {strangers[0]} first"
        return rank_error(what, todo, rank=missing[0], ranks=[str(rank) for rank in missing])


def _step_text(commit: _Commit) -> str:
    begin = next(iter(commit.begun.values()), None)
    step = commit.step if begin is None else begin.step
    return "commit" if step is None else f"commit of step {step}"


def _failed_with(rank: int, how: str, during: str, todo: str) -> ErrorRecord:
    return rank_error(f"rank {rank} {how}: the {during} failed on all ranks", todo, rank=rank)


def _out_of_turn(rank: int, message: Message) -> ErrorRecord:
    return rank_error(f"rank {rank} sent {type(message).__name__} out of turn", "report this", rank=rank)


def _late_record(rank: int) -> ErrorRecord:
    return rank_error(
        f"rank {rank} is behind the other ranks, for which this call has ended",
        "make the same calls in the same order on every rank",
        rank=rank,
    )


def _difference(other: int, first: Begin, rank: int, begin: Begin) -> ErrorRecord | None:
    """Return the error for two ranks that do not commit the same. None: they do."""
    names = sorted({*first.facts, *begin.facts})
    pairs = [("step", str(first.step), str(begin.step))]
    pairs += [("call", _call_text(first), _call_text(begin))]
    pairs += [(name, first.facts.get(name, "not set"), begin.facts.get(name, "not set")) for name in names]
    for name, ours, theirs in pairs:
        if ours != theirs:
            values = sorted([(other, ours), (rank, theirs)])
            texts = " and ".join(f"{value} on rank {number}" for number, value in values)
            what = f"the ranks do not commit the same: {name} is {texts}"
            ranks = [str(number) for number, _ in values]
            return rank_error(what, f"pass the same {name} on every rank", kind="UsageError", ranks=ranks)
    return None


def _call_text(begin: Begin) -> str:
    return "commit_async" if begin.is_async else "commit"
