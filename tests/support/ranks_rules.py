"""A job of three ranks around the real protocol core, as a model whose interleavings a search can visit.

What is real: ``Coordinator`` of ckstore/ranks/protocol.py and ``Member`` of member.py, or changed copies. What is
modelled: connections (each a queue in each direction), the callers (what the ranks do on each action), and the store (a
list of published commits).

A fault is one of: a rank dies or is stopped forever; a connection is cut while both ends live (a partition, or a
process that was stopped for too long); a rank's own work fails. Messages on the way arrive or are lost with the
connection, each direction by itself. Time passes only when a rank is late, and nothing else can happen.

The properties, for every reachable state:
- A commit is published at most once, in the order of the commits, and only with all parts of all ranks.
- A rank that gets a receipt finds the checkpoint in the store. A rank that gets an error does not, and the checkpoint
  is published later only if that rank has lost rank 0.
- Every rank that lives gets one answer for each commit and each question. Ranks that are connected get the same one.
- An error names the rank that caused it. Without a fault, everything is published.

Limits: three ranks, two commits, at most two faults. Silence is an event here; ``test_link.py`` measures it.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from ckstore.format.error_records import ErrorRecord
from ckstore.format.records import encode_inner
from ckstore.hashing import digest_of
from ckstore.ranks import member, messages, protocol
from ckstore.ranks.actions import Finish, Send
from ckstore.ranks.protocol import LEAVE_SECONDS

WORLD = 3
STATES_MAX = 400_000
CLOSED = "closed"
LATER = 1000.0
"""A time at which every deadline is over."""


class Core(NamedTuple):
    """The classes of the two state machines."""

    Coordinator: type
    Member: type


CORE = Core(protocol.Coordinator, member.Member)


class Violation(Exception):
    """A property does not hold."""


class Setting(NamedTuple):
    """What the ranks do, and how much may go wrong."""

    commits: int = 1
    steps: tuple[int, ...] = (10, 10, 10)
    is_async: bool = False
    layouts: tuple[str, ...] = ("a", "a", "b")
    """What each rank holds. The second commit of rank 1 has another one if ``changes_layout``."""
    changes_layout: bool = False
    more_for: int | None = None
    """This rank must write more in the first commit."""
    late: int | None = None
    """This rank begins only after the others have waited too long."""
    leaves: int | None = None
    """The trainer of this rank is lost, and the next rank says so. Its saver may have begun a commit before."""
    asks: bool = False
    deaths: int = 0
    cuts: int = 0
    failures: int = 0


def content_of(setting: Setting, rank: int, number: int) -> bytes:
    changed = "changed" if setting.changes_layout and rank == 1 and number > 1 else ""
    return f"layout {setting.layouts[rank]}{changed}".encode()


def spans_of(setting: Setting, rank: int, number: int) -> bytes:
    changed = number if setting.changes_layout and rank < 2 else 0
    return f"spans of {rank} {changed}".encode()


PLAIN = {int, str, bytes, bool, float, type(None)}


def copied(value):
    """Copy what can change; messages and texts are shared."""
    if type(value) in PLAIN or isinstance(value, tuple):
        return value
    if isinstance(value, dict):
        return {name: copied(inner) for name, inner in value.items()}
    if isinstance(value, (set, list)):
        return type(value)(value)
    if is_dataclass(value) or hasattr(value, "received"):
        other = object.__new__(type(value))
        other.__dict__.update({name: copied(inner) for name, inner in value.__dict__.items()})
        return other
    return value


def frozen(value):
    """Return a hashable form of a state."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, dict):
        return tuple(sorted((repr(name), frozen(inner)) for name, inner in value.items()))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(value, key=repr))
    if isinstance(value, list):
        return tuple(frozen(inner) for inner in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value).__name__, encode_inner(value)
    if is_dataclass(value) or hasattr(value, "received"):
        return frozen(value.__dict__)
    return value


class Job:
    """One state of the model: three ranks, two connections, one store."""

    def __init__(self, setting: Setting, core) -> None:
        self.setting, self.core = setting, core
        self.coordinator = core.Coordinator(WORLD)
        self.members = [core.Member(rank) for rank in range(WORLD)]
        self.coordinator.joined(1)
        self.coordinator.joined(2)
        self.to_rank_0: list[tuple] = [(), (), ()]
        self.from_rank_0: list[tuple] = [(), (), ()]
        self.is_up = [True] * WORLD
        self.begun = [0] * WORLD
        self.duties: list[tuple] = [(), (), ()]
        self.outcomes: dict[tuple[int, int], tuple] = {}
        self.asked = [0] * WORLD
        self.answers: dict[int, tuple] = {}
        self.store: tuple[int, ...] = ()
        self.written: frozenset = frozenset()
        self.staged: frozenset = frozenset()
        self.known: frozenset = frozenset()
        self.faults: tuple = ()
        self.is_late = self.has_left = False

    def copy(self) -> Job:
        other = object.__new__(Job)
        other.__dict__.update(self.__dict__)
        other.coordinator = copied(self.coordinator)
        other.members = [copied(member) for member in self.members]
        for name in ("to_rank_0", "from_rank_0", "is_up", "begun", "duties", "outcomes", "asked", "answers"):
            setattr(other, name, copied(getattr(self, name)))
        return other

    def key(self):
        changing = {name: value for name, value in self.__dict__.items() if name not in ("setting", "core")}
        changing["to_rank_0"] = [frozen(list(queue)) for queue in self.to_rank_0]
        changing["from_rank_0"] = [frozen(list(queue)) for queue in self.from_rank_0]
        changing["duties"] = [frozen(list(queue)) for queue in self.duties]
        return frozen(changing)

    # Moves

    def moves(self) -> Iterator[tuple[str, Job]]:
        """Yield everything that can happen next, with the state it leads to."""
        count = 0
        for label, act in [*self._ordinary(), *self._faulty()]:
            other = self.copy()
            try:
                act(other)
            except (Violation, AssertionError, LookupError, AttributeError) as problem:
                raise Violation(f"{label}: {type(problem).__name__}: {problem}") from None
            count += not label.startswith("fault")
            yield label, other
        if not count:
            yield from self._time_passes()

    def _time_passes(self) -> Iterator[tuple[str, Job]]:
        if self.setting.late is None or self.is_late:
            return
        other = self.copy()
        other.is_late = True
        if other.is_up[0]:
            other._tick(LATER)
        yield "a minute passes", other

    def _tick(self, now: float) -> None:
        self._do(0, self.coordinator.tick(now))

    def _leave_time_matters(self) -> bool:
        """Whether something happens if three seconds pass now. All messages arrive before."""
        queues = [*self.to_rank_0, *self.from_rank_0]
        if not self.has_left or not self.is_up[0] or any(each != CLOSED for queue in queues for each in queue):
            return False
        return bool(copied(self.coordinator).tick(LEAVE_SECONDS))

    def _leave(self) -> None:
        self.has_left = True
        other = (self.setting.leaves + 1) % WORLD
        if self.is_up[other]:
            self._do(other, self.members[other].left(self.setting.leaves, "has ended"))

    def _ordinary(self):
        setting = self.setting
        for rank in range(WORLD):
            if not self.is_up[rank]:
                continue
            may_begin = (rank != setting.late or self.is_late) and not (rank == setting.leaves and self.has_left)
            if may_begin and self.begun[rank] < setting.commits and len(self._open(rank)) < 2:
                yield f"rank {rank} begins", lambda job, rank=rank: job._begin(rank)
            if setting.asks and not self.asked[rank] and may_begin:
                yield f"rank {rank} asks", lambda job, rank=rank: job._ask(rank)
            if setting.is_async:
                for number in self._open(rank):
                    if (rank, number) not in self.staged:
                        act = lambda job, rank=rank, number=number: job._stage(rank, number)  # noqa: E731
                        yield f"rank {rank} has staged {number}", act
            if self.duties[rank]:
                name = type(self.duties[rank][0]).__name__
                yield f"rank {rank} does {name}", lambda job, rank=rank: job._work(rank)
        if setting.leaves is not None and not self.has_left:
            yield f"the trainer of rank {setting.leaves} is lost", lambda job: job._leave()
        if self._leave_time_matters():
            yield "three seconds pass", lambda job: job._tick(LEAVE_SECONDS)
        for rank in range(1, WORLD):
            if self.is_up[0] and self.to_rank_0[rank]:
                yield f"from {rank}: {_name(self.to_rank_0[rank][0])}", lambda job, rank=rank: job._arrive(rank, 0)
            if self.is_up[rank] and self.from_rank_0[rank]:
                yield f"to {rank}: {_name(self.from_rank_0[rank][0])}", lambda job, rank=rank: job._arrive(0, rank)

    def _faulty(self):
        kinds = [kind for kind, _ in self.faults]
        for rank in range(WORLD):
            if not self.is_up[rank]:
                continue
            if kinds.count("death") < self.setting.deaths:
                for kept in _kept_sets([1, 2] if rank == 0 else [rank]):
                    act = lambda job, rank=rank, kept=kept: job._die(rank, kept)  # noqa: E731
                    yield f"fault: rank {rank} dies, messages of {sorted(kept)} arrive", act
            is_whole = CLOSED not in (self.to_rank_0[rank][-1:] + self.from_rank_0[rank][-1:])
            is_linked = rank > 0 and self.is_up[0] and is_whole and self.members[rank]._lost is None
            if kinds.count("cut") < self.setting.cuts and is_linked and rank not in self.coordinator._lost:
                for kept in _kept_sets([0, rank]):
                    act = lambda job, rank=rank, kept=kept: job._cut(rank, kept)  # noqa: E731
                    yield f"fault: connection {rank} is cut, messages of {sorted(kept)} arrive", act
            if kinds.count("failure") < self.setting.failures:
                for number in range(1, min(self.begun[rank] + 1, self.setting.commits) + 1):
                    if (rank, number) not in self.outcomes and (number <= self.begun[rank] or not self._open(rank)):
                        act = lambda job, rank=rank, number=number: job._give_up(rank, number)  # noqa: E731
                        yield f"fault: rank {rank} fails in {number}", act

    def _open(self, rank: int) -> list[int]:
        return [number for number in range(1, self.begun[rank] + 1) if (rank, number) not in self.outcomes]

    def _begin(self, rank: int) -> None:
        number = self.begun[rank] = self.begun[rank] + 1
        digests = (digest_of(content_of(self.setting, rank, number)),)
        step = self.setting.steps[rank] + number
        begin = messages.Begin(number, step, self.setting.is_async, {"run": "main"}, digests)
        self._do(rank, self.members[rank].begin(begin))

    def _ask(self, rank: int) -> None:
        self.asked[rank] = 1
        self._do(rank, self.members[rank].ask("step", 1, b"%d" % rank))

    def _stage(self, rank: int, number: int) -> None:
        self.staged |= {(rank, number)}
        self._do(rank, self.members[rank].staged(number))

    def _give_up(self, rank: int, number: int) -> None:
        self.faults += (("failure", rank),)
        self.begun[rank] = max(self.begun[rank], number)
        record = ErrorRecord("CapacityError", "the disk is full", "packs", None, {})
        self._do(rank, self.members[rank].abort(number, 11, record))

    def _die(self, rank: int, kept: frozenset[int]) -> None:
        self.faults += (("death", rank),)
        self.is_up[rank] = False
        self.duties[rank] = ()
        for other in (1, 2) if rank == 0 else (rank,):
            toward, back = (self.from_rank_0, self.to_rank_0) if rank == 0 else (self.to_rank_0, self.from_rank_0)
            if CLOSED not in toward[other]:
                toward[other] = (*(toward[other] if other in kept else ()), CLOSED)
            back[other] = ()

    def _cut(self, rank: int, kept: frozenset[int]) -> None:
        self.faults += (("cut", rank),)
        for sender, queues in ((0, self.from_rank_0), (rank, self.to_rank_0)):
            queues[rank] = (*(queues[rank] if sender in kept else ()), CLOSED)

    def _arrive(self, source: int, target: int) -> None:
        queues, rank = (self.to_rank_0, source) if target == 0 else (self.from_rank_0, target)
        head, *rest = queues[rank]
        queues[rank] = tuple(rest)
        if head == CLOSED and target == 0:
            # What rank 0 has not sent yet is not sent any more.
            self._do(0, self.coordinator.lost(rank, "closed its connection"))
        elif head == CLOSED:
            self._do(rank, self.members[rank].lost("closed its connection"))
        elif target == 0:
            self._do(0, self.coordinator.received(rank, head, 0.0))
        else:
            self._do(rank, self.members[rank].received(head))

    # What the actions lead to

    def _do(self, rank: int, actions) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(rank, action)
            elif isinstance(action, Finish):
                self._finish(rank, action)
            elif isinstance(action, messages.Agreed):
                self._answer(rank, action)
            elif isinstance(action, messages.AllStaged):
                written = {(other, number) for other, number, _ in self.written}
                for other in range(WORLD):
                    if (other, action.number) not in self.staged | written:
                        raise Violation(f"rank {rank} was promised the commit, and rank {other} has not staged")
            elif not isinstance(action, messages.Asked):
                self.duties[rank] += (action,)

    def _send(self, rank: int, send) -> None:
        if rank == 0 and send.rank == 0:
            is_from_coordinator = type(send.message) in messages.ToRank.__args__
            if is_from_coordinator:
                self._do(0, self.members[0].received(send.message))
            else:
                self._do(0, self.coordinator.received(0, send.message, 0.0))
        elif rank == 0:
            is_open = self.is_up[send.rank] and self.members[send.rank]._lost is None
            if is_open and CLOSED not in self.from_rank_0[send.rank]:
                self.from_rank_0[send.rank] += (send.message,)
        elif self.is_up[0] and rank not in self.coordinator._lost and CLOSED not in self.to_rank_0[rank]:
            self.to_rank_0[rank] += (send.message,)

    def _work(self, rank: int) -> None:
        action, *rest = self.duties[rank]
        self.duties[rank] = tuple(rest)
        name = type(action).__name__
        self._do(rank, getattr(self, f"_on_{name.lower()}")(rank, action) or [])

    def _on_wanted(self, rank, action):
        content = content_of(self.setting, rank, action.number)
        return self.members[rank].contents(action.number, dict.fromkeys(action.digests, content))

    def _on_plan(self, rank, action):
        wanted = {digest for digests in action.digests for digest in digests}
        if not wanted <= self.known | action.contents.keys():
            raise Violation("a plan lacks the content of a digest")
        self.known = frozenset(wanted)
        spans = [spans_of(self.setting, other, action.number) for other in range(WORLD)]
        return self.coordinator.planned(action.number, spans)

    def _on_write(self, rank, action):
        if action.spans != spans_of(self.setting, rank, action.number):
            raise Violation(f"rank {rank} writes what another commit planned")
        return self._write(rank, action.number, 0)

    def _on_more(self, rank, action):
        return self._write(rank, action.number, action.turn)

    def _write(self, rank, number, turn):
        if (rank, number) in self.outcomes:
            return []
        self.written |= {(rank, number, turn)}
        return self.members[rank].part(number, b"part of %d" % rank)

    def _on_merge(self, rank, action):
        more_for = self.setting.more_for if action.number == 1 else None
        expected = set(range(WORLD)) if action.turn == 0 else {more_for}
        if set(action.parts) != expected:
            raise Violation(f"merge has the parts of {sorted(action.parts)}")
        if more_for is not None and action.turn == 0:
            return self.coordinator.more(action.number, {more_for: b"more"})
        return self.coordinator.merged(action.number)

    def _on_publish(self, rank, action):
        number = action.number
        turns = [(other, number, 0) for other in range(WORLD)]
        turns += [(self.setting.more_for, number, 1)] if self.setting.more_for is not None and number == 1 else []
        if not self.written.issuperset(turns):
            raise Violation("a commit is published without a part")
        if number in self.store or any(other > number for other in self.store):
            raise Violation("a commit is published twice, or out of order")
        if len(set(self.setting.steps)) > 1:
            raise Violation("ranks with different steps made one checkpoint")
        for other in range(WORLD):
            if (other, number) in self.outcomes and self.members[other]._lost is None:
                raise Violation(f"a commit is published that rank {other} knows to have failed")
        self.store += (number,)
        self.duties[0] = (Published(number), *self.duties[0])

    def _on_published(self, rank, action):
        return self.coordinator.published(action.number, b"receipt %d" % action.number)

    def _on_lookup(self, rank, action):
        number = action.number
        if number in self.store:
            return self.members[rank].found(number, b"receipt %d" % number)
        return self.members[rank].not_found(number)

    def _on_decide(self, rank, action):
        if len(action.values) != WORLD or set(action.values) != {b"0", b"1", b"2"}:
            raise Violation("a question is decided without all values")
        return self.coordinator.decided(action.topic, action.number, max(action.values))

    def _finish(self, rank: int, finish) -> None:
        key = (rank, finish.number)
        if key in self.outcomes:
            raise Violation(f"rank {rank} gets two answers")
        if finish.number > self.begun[rank]:
            raise Violation(f"rank {rank} gets an answer for a commit that it has not begun")
        is_done = finish.receipt is not None
        if is_done and finish.number not in self.store:
            raise Violation(f"rank {rank} gets a receipt for a checkpoint that is not in the store")
        if is_done and finish.receipt != b"receipt %d" % finish.number:
            raise Violation(f"rank {rank} gets another commit's receipt")
        if not is_done and finish.number in self.store:
            raise Violation(f"rank {rank} gets an error for a checkpoint that is in the store")
        text = "" if finish.error is None else f"{finish.error.where}: {finish.error.what}"
        self.outcomes[key] = (is_done, finish.rank, text)

    def _answer(self, rank: int, agreed) -> None:
        if rank in self.answers:
            raise Violation(f"rank {rank} gets two answers to one question")
        self.answers[rank] = (agreed.value, agreed.rank)

    # Properties of states in which nothing can happen any more

    def check_end(self) -> None:
        """Check what must hold when nothing can happen any more.

        Raises:
            Violation: A property does not hold.
        """
        up = [rank for rank in range(WORLD) if self.is_up[rank]]
        for rank in up:
            for number in range(1, self.begun[rank] + 1):
                if (rank, number) not in self.outcomes:
                    raise Violation(f"rank {rank} waits forever for commit {number}")
            if self.asked[rank] and rank not in self.answers:
                raise Violation(f"rank {rank} waits forever for an answer")
        self._check_same(up)
        causes = {rank for _, rank in self.faults}
        leaves = self.setting.leaves
        is_sound = len(set(self.setting.steps)) == 1 and self.setting.late is None
        is_sound = is_sound and (leaves is None or self.begun[leaves] == self.setting.commits)
        if self.setting.late is not None and not self.faults:
            self._check_late()
        for (rank, number), (is_done, cause, text) in self.outcomes.items():
            if not is_done and not self.faults and is_sound:
                raise Violation(f"rank {rank}: commit {number} failed without a fault: {text}")
            self._check_text(rank, number, cause, text, causes)
        if (
            not self.faults
            and is_sound
            and self.setting.asks
            and {value for value, _ in self.answers.values()} != {b"2"}
        ):
            raise Violation("a question without a fault has no answer")

    def _check_late(self) -> None:
        if any(is_done for is_done, *_ in self.outcomes.values()):
            raise Violation("a rank that did not join in time is in the checkpoint")
        if any(value is not None for value, _ in self.answers.values()):
            raise Violation("a rank that did not ask in time has an answer")

    def _check_same(self, up: list[int]) -> None:
        connected = [rank for rank in up if self.members[rank]._lost is None and rank not in self.coordinator._lost]
        connected = connected if self.is_up[0] else []
        for number in range(1, self.setting.commits + 1):
            found = {self.outcomes[rank, number] for rank in connected if (rank, number) in self.outcomes}
            if len(found) > 1 and self.setting.late is None:
                raise Violation(f"ranks get different answers for commit {number}: {found}")
            if number in self.store and any(not is_done for is_done, *_ in found):
                raise Violation(f"connected ranks get an error for commit {number}, which is published")
        if len({self.answers[rank] for rank in connected if rank in self.answers}) > 1 and self.setting.late is None:
            raise Violation("ranks get different answers to one question")

    def _check_text(self, rank, number, cause, text, causes) -> None:
        if not text:
            return
        if len(set(self.setting.steps)) > 1:
            if not self.faults and not ("step is" in text and "11 on rank" in text and "12 on rank" in text):
                raise Violation(f"different steps are not named: {text}")
            return
        causes = causes | ({self.setting.late, self.setting.leaves} - {None})
        if self.members[rank]._lost is not None:
            # A rank whose connection was cut has lost rank 0.
            causes = causes | {0}
        if cause not in causes or f"rank {cause}" not in text:
            raise Violation(f"rank {rank}, commit {number}: {cause} is named, and the fault was {self.faults}: {text}")


class Published(NamedTuple):
    """Publish has succeeded, and rank 0's caller is about to say so."""

    number: int


def _name(message) -> str:
    return message if isinstance(message, str) else type(message).__name__


def _kept_sets(ranks):
    for flags in product((True, False), repeat=len(ranks)):
        yield frozenset(rank for rank, is_kept in zip(ranks, flags, strict=True) if is_kept)


def search(setting: Setting, core=CORE, *, limit: int | None = None) -> tuple[int, list[str] | None]:
    """Visit every reachable state. Return how many, and the shortest way to a violation if there is one.

    Args:
        setting: What can happen.
        core: The state machines.
        limit: Stop after so many states, those that the fewest moves lead to.
    """
    start = Job(setting, core)
    came_from: dict[int, tuple[int, str] | None] = {hash(start.key()): None}
    queue = deque([(start, hash(start.key()))])
    while queue and (limit is None or len(came_from) < limit):
        job, own_key = queue.popleft()
        try:
            is_end = True
            for label, other in job.moves():
                is_end = is_end and label.startswith("fault")
                key = hash(other.key())
                if key not in came_from:
                    came_from[key] = (own_key, label)
                    queue.append((other, key))
            if is_end:
                job.check_end()
        except Violation as violation:
            return len(came_from), [*_trace(own_key, came_from), str(violation)]
        if len(came_from) > STATES_MAX:
            raise RuntimeError(f"more than {STATES_MAX} states: the model is not small any more")
    return len(came_from), None


def _trace(key, came_from) -> list[str]:
    labels = []
    while (step := came_from[key]) is not None:
        key, label = step
        labels.append(label)
    return labels[::-1]


def mutant(old: str, new: str) -> Core:
    """Return the state machines with one place of their source changed."""
    places = [(module, Path(module.__file__).read_text()) for module in (protocol, member)]
    found = [(module, text) for module, text in places if old in text]
    assert sum(text.count(old) for _, text in found) == 1, f"not in one place of the protocol: {old}"
    [(original, text)] = found
    module = types.ModuleType(f"{original.__name__}_mutant")
    # Dataclasses look for their module.
    sys.modules[module.__name__] = module
    try:
        exec(compile(text.replace(old, new), "mutant.py", "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    if original is protocol:
        return CORE._replace(Coordinator=module.Coordinator)
    return CORE._replace(Member=module.Member)
