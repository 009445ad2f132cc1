"""A job of up to thousands of ranks around the real protocol core, in virtual time with random delays and faults.

Unlike ``ranks_rules.py``, which visits every order of a small job, this plays one random order of a large one. Silence
is real here: a rank that is stopped or cut off is lost after ``SILENT_SECONDS`` of virtual time. The properties are the
same, and one more: everybody who lives has an answer ``ANSWER_SECONDS`` after the last fault or the last late rank.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from ckstore.format.error_records import ErrorRecord
from ckstore.hashing import digest_of
from ckstore.ranks import messages
from ckstore.ranks.actions import Finish, LookUp, Merge, Plan, Publish, Send
from support.ranks_rules import CORE

SILENT_SECONDS = 15.0
ANSWER_SECONDS = 20.0
WORK_SECONDS = 0.5
"""What a rank's work takes at most, and how far apart the ranks begin."""
DELAY_SECONDS = 0.05
_HORIZON = 1e6


class Faults(NamedTuple):
    """How many of each kind happen, at random moments of the first commits."""

    deaths: int = 0
    stops: int = 0
    """A rank that stands still for a random time, longer or shorter than silence may be."""
    cuts: int = 0
    failures: int = 0
    absences: int = 0
    leaves: int = 0
    """A rank that joins no commit any more, because its trainer is lost, as the trainers of others notice."""
    rank_0: bool = False
    """Whether rank 0 may be hit, too."""


NO_FAULTS = Faults()


class Simulation:
    """One job.

    Args:
        world: Number of ranks.
        seed: Of all that is random.
        commits: How many commits each rank makes; at most two are unfinished.
        faults: What goes wrong.
        core: The state machines, perhaps changed.
    """

    def __init__(self, world: int, seed: int, *, commits: int = 2, faults: Faults = NO_FAULTS, core=CORE) -> None:
        self.world, self.commits, self.core = world, commits, core
        self.random = random.Random(seed)
        self.now = 0.0
        self.coordinator = core.Coordinator(world)
        self.members = [core.Member(rank) for rank in range(world)]
        self.outcomes: list[dict[int, Finish]] = [{} for _ in range(world)]
        self.answered_at: dict[int, float] = {}
        self.begun = [0] * world
        self.store: list[int] = []
        self.parts: dict[tuple[int, int], set[int]] = {}
        self.more: dict[int, set[int]] = {}
        self.dead: set[int] = set()
        self.is_cut: set[int] = set()
        self.absent: set[int] = set()
        self.left: set[int] = set()
        self.stopped_until = [0.0] * world
        self.quiet_since = 0.0
        self.messages = 0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = count()
        self._arrival: dict[tuple[int, int], float] = {}
        self._plan_faults(faults)
        for rank in range(world):
            self._later(self._work(), rank, lambda rank=rank: self._begin(rank))

    # Virtual time

    def _work(self) -> float:
        return self.random.random() * WORK_SECONDS

    def _later(self, seconds: float, rank: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), rank, act))

    def run(self) -> None:
        """Run until nothing happens any more, and check the properties."""
        self._later(1.0, 0, self._tick)
        while self._events:
            at, order, rank, act = heapq.heappop(self._events)
            self.now = at
            assert at < _HORIZON, "the job never ends"
            if rank in self.dead:
                continue
            if self.stopped_until[rank] > at:
                # Everything that a stopped process would do, it does afterwards, in the same order.
                heapq.heappush(self._events, (self.stopped_until[rank], order, rank, act))
                continue
            act()
        self._check()

    def _tick(self) -> None:
        self._do(0, self.coordinator.tick(self.now))
        if self.now < 400:
            self._later(1.0, 0, self._tick)

    # Faults

    def _plan_faults(self, faults: Faults) -> None:
        first = 0 if faults.rank_0 else 1
        kinds = [(faults.deaths, self._die), (faults.stops, self._stop), (faults.cuts, self._cut)]
        kinds.append((faults.failures, self._fail))
        for number, act in kinds:
            for _ in range(number):
                rank = self.random.randrange(first, self.world)
                self._later(self.random.random() * 4 * WORK_SECONDS, rank, lambda act=act, rank=rank: act(rank))
        self.absent = {self.random.randrange(first, self.world) for _ in range(faults.absences)}
        for _ in range(faults.leaves):
            rank = self.random.randrange(first, self.world)
            self._later(self.random.random() * 4 * WORK_SECONDS, rank, lambda rank=rank: self._leave(rank))

    def _die(self, rank: int) -> None:
        self.dead.add(rank)
        self._disconnect(rank, 0.0)

    def _cut(self, rank: int) -> None:
        if rank:
            self.is_cut.add(rank)
            self._disconnect(rank, SILENT_SECONDS)

    def _stop(self, rank: int) -> None:
        seconds = self.random.choice([1.0, 30.0])
        self.stopped_until[rank] = self.now + seconds
        if seconds > SILENT_SECONDS:
            self._disconnect(rank, SILENT_SECONDS)

    def _leave(self, rank: int) -> None:
        self.left.add(rank)
        self.quiet_since = max(self.quiet_since, self.now)
        # Rank 0 is connected to all, the others to rank 0.
        for other in range(1, self.world) if rank == 0 else [0]:
            act = lambda other=other: self._do(other, self.members[other].left(rank, "has ended"))  # noqa: E731
            self._later(self.random.random() * DELAY_SECONDS, other, act)

    def _disconnect(self, rank: int, seconds: float) -> None:
        """Both sides of a rank's connections notice after some time that the other one is lost."""
        self.quiet_since = max(self.quiet_since, self.now)
        for other in range(1, self.world) if rank == 0 else [rank]:
            self._lose(other, 0, seconds)
            self._lose(0, other, seconds)

    def _lose(self, source: int, target: int, seconds: float) -> None:
        """Have a rank notice that another one is lost, after what that one sent before."""
        at = max(self.now + seconds, self._arrival.get((source, target), 0.0)) + self.random.random() * DELAY_SECONDS
        how = "has been silent" if seconds else "closed its connection"
        if target == 0:
            self._later(at - self.now, 0, lambda: self._do(0, self.coordinator.lost(source, how)))
        else:
            self._later(at - self.now, target, lambda: self._do(target, self.members[target].lost(how)))

    def _fail(self, rank: int) -> None:
        number = max(1, self.begun[rank])
        if number in self.outcomes[rank]:
            return
        self.begun[rank] = number
        self.quiet_since = max(self.quiet_since, self.now)
        record = ErrorRecord("CapacityError", "the disk is full", None, None, {})
        self._do(rank, self.members[rank].abort(number, number, record))

    # Ranks

    def _begin(self, rank: int) -> None:
        number = self.begun[rank] + 1
        if number > self.commits or rank in self.absent | self.left or number - len(self.outcomes[rank]) > 2:
            return
        self.begun[rank] = number
        layout = digest_of(b"%d" % (rank % 3))
        self._do(rank, self.members[rank].begin(messages.Begin(number, number, True, {"run": "main"}, (layout,))))
        self._later(self._work(), rank, lambda: self._do(rank, self.members[rank].staged(number)))
        self._later(self._work(), rank, lambda: self._begin(rank))

    def _do(self, rank: int, actions) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(rank, action)
            elif isinstance(action, Finish):
                self._finish(rank, action)
            elif not isinstance(action, messages.AllStaged):
                self._later(self._work(), rank, lambda action=action: self._do(rank, self._answer(rank, action)))

    def _send(self, rank: int, send: Send) -> None:
        self.messages += 1
        key = (rank, send.rank)
        if rank in self.is_cut or send.rank in self.is_cut:
            return
        # In order, like TCP.
        at = max(self.now + self.random.random() * DELAY_SECONDS, self._arrival.get(key, 0.0))
        self._arrival[key] = at
        source, target, message = rank, send.rank, send.message
        if isinstance(message, messages.ToRank0):
            act = lambda: self._do(0, self.coordinator.received(source, message, self.now))  # noqa: E731
        else:
            act = lambda: self._do(target, self.members[target].received(message))  # noqa: E731
        self._later(at - self.now, target, act)

    def _answer(self, rank: int, action):
        number, member, coordinator = getattr(action, "number", 0), self.members[rank], self.coordinator
        if isinstance(action, messages.Wanted):
            return member.contents(number, dict.fromkeys(action.digests, b"%d" % (rank % 3)))
        if isinstance(action, (messages.Write, messages.More)):
            turn = getattr(action, "turn", 0)
            if number not in self.outcomes[rank]:
                self.parts.setdefault((number, turn), set()).add(rank)
            return member.part(number, b"part")
        if isinstance(action, Plan):
            return coordinator.planned(number, [b"spans"] * self.world)
        if isinstance(action, Merge):
            if action.turn == 0 and self.random.random() < 0.5:
                chosen = self.more[number] = {self.random.randrange(self.world) for _ in range(3)}
                return coordinator.more(number, dict.fromkeys(chosen, b"more"))
            return coordinator.merged(number)
        if isinstance(action, Publish):
            return self._publish(number)
        assert isinstance(action, LookUp), action
        return member.found(number, b"receipt") if number in self.store else member.not_found(number)

    def _publish(self, number: int):
        assert self.parts[number, 0] == set(range(self.world)), "a commit is published without a part"
        assert self.more.get(number, set()) <= self.parts.get((number, 1), set()), "a part of the second turn lacks"
        assert not self.store or self.store[-1] < number, "a commit is published twice, or out of order"
        lost = self._lost()
        for rank in range(self.world):
            finish = self.outcomes[rank].get(number)
            assert finish is None or rank in lost, f"rank {rank} already has an error"
        self.store.append(number)
        self._later(self._work(), 0, lambda: self._do(0, self.coordinator.published(number, b"receipt")))
        return []

    def _finish(self, rank: int, finish: Finish) -> None:
        number = finish.number
        assert number not in self.outcomes[rank], f"rank {rank} gets two answers"
        assert (finish.receipt is None) == (finish.error is not None)
        assert finish.receipt is None or number in self.store, "a receipt without a checkpoint"
        assert finish.receipt is not None or number not in self.store, "an error for a published checkpoint"
        self.outcomes[rank][number] = finish
        self.answered_at[rank] = self.now
        self._later(self._work(), rank, lambda: self._begin(rank))

    def _lost(self) -> set[int]:
        """Return the ranks that rank 0 may not reach, by its own view or theirs."""
        return {rank for rank in range(self.world) if self.members[rank]._lost is not None} | set(
            self.coordinator._lost
        )

    def _check(self) -> None:
        living = [rank for rank in range(self.world) if rank not in self.dead]
        for rank in living:
            assert len(self.outcomes[rank]) == self.begun[rank], f"rank {rank} waits forever"
        lost = self._lost()
        connected = [rank for rank in living if rank not in lost] if 0 not in self.dead else []
        for number in range(1, self.commits + 1):
            found = {finish[number][1:] for finish in self._plain(connected) if number in finish}
            assert len(found) <= 1, f"ranks get different answers: {found}"
            assert not found or (number in self.store) == next(iter(found))[0], "connected ranks miss a checkpoint"
        if not self.absent:
            late = max((self.answered_at[rank] for rank in living if rank in self.answered_at), default=0.0)
            ordinary = self.commits * 6 * (WORK_SECONDS + DELAY_SECONDS)
            last_fault = max(self.quiet_since, *self.stopped_until)
            assert late <= last_fault + ordinary + ANSWER_SECONDS, (
                f"an answer {late - last_fault:.1f} s after the fault"
            )

    def _plain(self, ranks):
        for rank in ranks:
            yield {
                number: (number, finish.receipt is not None, None if finish.error is None else finish.error.what)
                for number, finish in self.outcomes[rank].items()
            }
