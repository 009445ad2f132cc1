"""A captured state on its way to the saver: what was asked for, and the slot that it lies in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ckstore.capture import Captured
from ckstore.config import Policy
from ckstore.errors import ConflictError
from ckstore.latch import Latch
from ckstore.pending import Pending
from ckstore.receipt import Receipt
from ckstore.saver.arena import Slot
from ckstore.saver.client import Saver
from ckstore.saver.tickets import Callbacks
from ckstore.staging.devices import Span
from ckstore.staging.state import Staging
from ckstore.store.lease import Lease

ASK_AGAIN_SECONDS = 30.0
"""Until a saver that has not given a slot back, or a ticket up, is asked once more."""


@dataclass(frozen=True, slots=True)
class Order:
    """A commit to be handed over.

    Args:
        captured: The state.
        step: The trainer's step.
        metrics: Numbers to find it by.
        tags: Names for it.
        policy: How to store it, and how it goes into the background.
        guarded: Memory that a guard protects.
    """

    captured: Captured
    step: int
    metrics: Mapping[str, float]
    tags: Sequence[str]
    policy: Policy
    guarded: Sequence[Span]


@dataclass(slots=True, eq=False)
class Handed:
    """A state in a slot."""

    ticket: int
    pending: Pending
    slot: Slot
    saver: Saver
    may_keep: bool
    """Whether the saver may keep the slot, for the next commit to be coded against."""
    hold_ms: int
    """For how long the saver leaves every processor to those who copy."""
    staging: Staging = field(init=False)
    ended: Latch = field(default_factory=Latch)
    """The saver commits it no more."""
    freed: Latch = field(default_factory=Latch)
    """The saver reads nothing of the slot any more."""
    is_begun: bool = False

    @property
    def is_over(self) -> bool:
        """Whether it has ended; its slot may be used again if it is free, too."""
        return self.ended.is_set() and self.staging.is_over.is_set()

    def lend(self, lease: Lease) -> None:
        """Have the saver hold the run's lease, before it is told of the state, if that needs no waiting.

        Else nobody would wait for it until it has started, if the trainer dies or drops its handle before.
        """
        # What it was to give back it may give back at any moment, and then takes another one.
        if lease.is_held or self.saver.lease == "":
            self.saver.lease = lease.lend(self.saver.pid, self.pending.step)

    def finish_copying(self, is_receipt_wanted: bool) -> None:
        """Wait until all is copied, as soon as can be; or somewhat later, if the receipt comes sooner by that.

        Where the crew wants every processor the saver would have none until all is copied, and the disk nothing to do.
        The half of it that copies behind a guard leaves some, and the saver begins at once (``async_wall``).
        """
        is_shared = is_receipt_wanted and self.hold_ms > 0 and self.staging.leaves_processors
        if is_shared:
            self.saver.hurry()
        self.staging.finish(is_rushed=not is_shared)

    def wait_over(self) -> None:
        """Wait until it has ended."""
        self.finish_copying(True)
        doing = f"end the commit of step {self.pending.step}"
        while not self.ended.is_set():
            is_given_up = self.pending.error_or_none() is not None
            if is_given_up:
                # Where memory is short it may not have heard, and would wait for what is never staged.
                self.saver.abort(self.ticket)
            self.saver.wait(self.ended, ASK_AGAIN_SECONDS if is_given_up else None, doing, is_urgent=True)

    def wait_freed(self) -> None:
        """Have the saver give its slot back, which it keeps for the next commit."""
        while not self.freed.is_set():
            # Where memory is short it may not have heard.
            self.saver.forget_kept()
            doing = f"give back the memory of step {self.pending.step}"
            self.saver.wait(self.freed, ASK_AGAIN_SECONDS, doing, is_urgent=True)

    def callbacks(self, on_done: Callable[[Receipt], None], on_failed: Callable[[Exception], None]) -> Callbacks:
        """Return what the saver's messages call."""
        return Callbacks(
            on_done,
            on_failed,
            self.free,
            on_began=self.pending.note_began,
            on_progress=self.pending.note_progress,
            on_kept=self.ended.set,
        )

    def fail(self, error: Exception) -> None:
        """Take note that the saver has given it up."""
        if isinstance(error, ConflictError) and self.saver.lease:
            # The lease was taken over: for the next state it is lent anew.
            self.saver.lease = ""
        self.staging.cancel(error)

    def free(self) -> None:
        """Take note that the saver is done with it."""
        self.freed.set()
        self.ended.set()

    def tell_staged(self) -> None:
        """Say that all is copied, here and to the saver."""
        self.pending.note_staged()
        self.saver.staged(self.ticket)
