"""A staged state as a commit sees it: storages in a slot of the arena, readable as soon as they are staged.

Invariants:
- A byte is read only after its unit is marked or its slot is STAGED. Readers wait for that.
- A ticket that is cancelled, or whose trainer dies, before it is fully staged is given up. All its readers raise.
- In a job of many ranks, so is a ticket whose trainer is stopped too long before that, because the other ranks wait. A
  slow copy is waited for. Whether it is staged or given up is decided once.
- Nothing is published before the state is fully staged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckstore.background import protocol
from ckstore.background.arena import STAGED, Slot
from ckstore.background.staged_head import Head, SampleRow, StorageRow
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import RankError, SaverError
from ckstore.processes import StopTimer
from ckstore.state.capture import Captured, Structure

LOOK_SECONDS = 0.05
"""How often a waiting reader checks the marks, in case the bell did not ring."""


@dataclass(frozen=True, slots=True)
class DelayedBegin:
    """A ``Begin`` message, with what was true when it arrived.

    Args:
        message: The message.
        is_granted: The lease was held, and then the trainer was seen alive.
        is_late: The saver was ending.
    """

    message: protocol.Begin
    is_granted: bool
    is_late: bool


@dataclass(frozen=True, slots=True)
class StopLimit:
    """How long the trainer of a rank may be stopped while it stages."""

    rank: int
    seconds: float


class StagingMonitor:
    """A condition on which commit threads wait for staged bytes or for the trainer's death. Thread-safe.

    Args:
        trainer_pid: The trainer.
    """

    def __init__(self, trainer_pid: int) -> None:
        self.changed = threading.Condition()
        """Reentrant."""
        self.trainer_pid = trainer_pid
        self.is_trainer_gone = False
        self._stop_timer = StopTimer(trainer_pid)

    def stopped_seconds(self) -> float:
        """Return how long the trainer has been stopped by a signal."""
        with self.changed:
            return self._stop_timer.seconds(SYSTEM_CLOCK.monotonic())

    def notify(self) -> None:
        """Wake the waiting threads, because more may be staged."""
        with self.changed:
            self.changed.notify_all()

    def note_trainer_gone(self) -> None:
        """Record the trainer's death: nothing else will be staged."""
        with self.changed:
            self.is_trainer_gone = True
            self.changed.notify_all()

    def wait(self, is_met: Callable[[], bool]) -> None:
        """Wait until a condition holds. Exceptions of the condition are raised."""
        with self.changed:
            while not is_met():
                self.changed.wait(LOOK_SECONDS)


class Ticket:
    """One staged state, from its first byte to its receipt.

    Args:
        number: The trainer's number for it.
        slot: Where it is staged.
        head: Its description.
        monitor: Where readers wait.
        parents: The seq of its parent, and the ticket that becomes its parent if that is published (0: none).
    """

    def __init__(
        self,
        number: int,
        slot: Slot,
        head: Head,
        monitor: StagingMonitor,
        *,
        parents: tuple[int | None, int] = (None, 0),
    ) -> None:
        self.number = number
        self.head = head
        self.parents = parents
        self.has_lease = False
        """Whether the lease was held for it while the trainer lived, and the trainer was sent Began."""
        self.may_outlive_trainer = False
        """Whether it is published after the trainer's death, if it is fully staged."""
        self.job_number = 0
        """In a job of many ranks: the number of this background commit."""
        self.may_retain = False
        """Whether the saver may keep the slot as the delta base of the next commit."""
        self.is_aborted = False
        """Whether the trainer has cancelled it."""
        self.stop_limit: StopLimit | None = None
        """In a job of many ranks: when it is given up because its trainer is stopped."""
        self._is_given_up_stopped = False
        self.nbytes_read = 0
        self.on_read: Callable[[], None] = lambda: None
        self._slot = slot
        self._bytes = slot.view(0, slot.nbytes).toreadonly()
        self._is_known_whole = False
        self._when_whole: list[Callable[[], None]] = []
        self._monitor = monitor
        samples: dict[int, list[SampleRow]] = {}
        for sample in head.samples:
            samples.setdefault(sample.storage, []).append(sample)
        self.storages = [StagedStorage(self, row, samples.get(index, ())) for index, row in enumerate(head.storages)]

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        return sum(storage.nbytes for storage in self.head.storages)

    @property
    def is_whole(self) -> bool:
        """Whether every byte is staged."""
        return self._slot.ticket == self.number and self._slot.state == STAGED

    def note_staged(self) -> None:
        """Record that it is fully staged, so that readers need not check marks any more."""
        self._is_known_whole = self.is_whole
        self._call_when_whole()

    def when_whole(self, call: Callable[[], None]) -> None:
        """Have a function called once it is fully staged, on any thread."""
        with self._monitor.changed:
            self._when_whole.append(call)
        self._call_when_whole()

    def _call_when_whole(self) -> None:
        with self._monitor.changed:
            calls: list[Callable[[], None]] = []
            if self.is_whole and not self._is_given_up_stopped:
                calls, self._when_whole = self._when_whole, []
        for call in calls:
            call()

    @property
    def is_being_copied(self) -> bool:
        """Whether the trainer is still copying."""
        return not (self.is_whole or self.is_given_up)

    @property
    def is_given_up(self) -> bool:
        """Whether it will never be published."""
        # Read the trainer's death before the slot: then everything that was staged before the death counts.
        is_gone = self._monitor.is_trainer_gone
        is_left = is_gone and not (self.may_outlive_trainer and self.is_whole)
        return self.is_aborted or self._is_given_up_stopped or is_left

    @property
    def is_orphan(self) -> bool:
        """Whether it is to be published although its trainer is dead."""
        return self.may_outlive_trainer and self._monitor.is_trainer_gone

    def abort(self) -> None:
        """Cancel it, as the trainer asked."""
        self.is_aborted = True
        self._monitor.notify()

    def is_in(self, slot: Slot) -> bool:
        """Whether it is staged in this slot."""
        return self._slot is slot

    def leave(self) -> None:
        """Release the slot's memory. Views that were returned before stay valid."""
        self._bytes = memoryview(b"")

    def captured(self, structure: Structure) -> Captured:
        """Return the state as input of a commit; ``structure`` is the one with the number in the head."""
        head = self.head
        return Captured(head.tree, [], list(head.tensors), list(self.storages), list(head.warnings), structure)

    def _check_stop(self, limit: StopLimit) -> None:
        """Give the ticket up if its trainer has been stopped for too long.

        Raises:
            RankError: It is given up.
        """
        with self._monitor.changed:
            # Staged was reported under the same lock, or will not be.
            if not self.is_whole and self._monitor.stopped_seconds() >= limit.seconds:
                self._is_given_up_stopped = True
        if self._is_given_up_stopped:
            raise RankError(
                f"the trainer of rank {limit.rank} (pid {self._monitor.trainer_pid}) was stopped by a signal for "
                f"{limit.seconds:g} s before it had staged step {self.head.step}",
                todo="find out who has stopped it (a debugger, SIGSTOP), and start the job again",
                rank=limit.rank,
            )

    def check(self) -> None:
        """Raise if the ticket is given up.

        Raises:
            SaverError: It is.
            RankError: It is, because its trainer was stopped for too long.
        """
        if self.stop_limit is not None and not self._is_known_whole:
            self._check_stop(self.stop_limit)
        if self.is_given_up:
            raise self.given_up_error()

    def given_up_error(self) -> SaverError:
        """Return the error of a ticket that is given up because of its trainer."""
        why = "by the trainer" if self.is_aborted else "because the trainer died before it was staged"
        return SaverError(f"the commit of step {self.head.step} was given up {why}", todo="commit again")

    def wait_whole(self) -> None:
        """Wait until all bytes are staged.

        Raises:
            SaverError: They never will be.
        """
        self._wait(lambda: self.is_whole)

    def read(self, place: int, nbytes: int) -> memoryview:
        """Return bytes of the slot, after waiting until they are staged.

        Raises:
            SaverError: They never will be, or the ticket was given up meanwhile.
        """
        self.check()
        if not self.is_staged(place, nbytes):
            self._wait(lambda: self.is_staged(place, nbytes))
        return self._bytes[place : place + nbytes]

    def is_staged(self, place: int, nbytes: int) -> bool:
        """Whether these bytes of the slot are staged."""
        return self._is_known_whole or self._slot.is_staged(place, place + nbytes)

    def _wait(self, is_met: Callable[[], bool]) -> None:
        def look() -> bool:
            self.check()
            return is_met()

        self._monitor.wait(look)


Job = Ticket | protocol.Decline | protocol.Release | protocol.Forget | protocol.Warm
"""What the committing thread works on, in order."""


class StagedStorage:
    """One storage, of which some bytes may not be staged yet."""

    def __init__(self, ticket: Ticket, row: StorageRow, samples: Sequence[SampleRow]) -> None:
        self.nbytes = row.nbytes
        self.element_width = row.element_width
        self.is_float = row.is_float
        self._ticket = ticket
        self._place = row.place
        self._samples = {(row.offset, row.nbytes, row.width): row for row in samples if row.width}
        self._excerpts = [row for row in samples if not row.width]

    @property
    def is_host(self) -> bool:
        """Whether the bytes are in host memory. Always true."""
        return True

    def read(self, lo: int, hi: int) -> memoryview:
        """Return bytes ``lo`` to ``hi``, after waiting until they are staged."""
        assert 0 <= lo <= hi <= self.nbytes
        if lo == hi:
            return memoryview(b"")
        ticket = self._ticket
        if not ticket.is_staged(self._place + lo, hi - lo):
            for row in self._excerpts:
                if row.offset <= lo and hi <= row.offset + row.nbytes:
                    return ticket.read(row.place + lo - row.offset, hi - lo)
        ticket.nbytes_read += hi - lo
        ticket.on_read()
        return ticket.read(self._place + lo, hi - lo)

    def sample(self, offset: int, nbytes: int, width: int) -> bytes | None:
        """Return the sample of a chunk if it is staged separately, which is earlier than the chunk itself."""
        row = self._samples.get((offset, nbytes, width))
        return None if row is None else bytes(self._ticket.read(row.place, row.sample_nbytes))
