"""The states that lie in an arena, on their way or kept for the next one to be coded against, and room for one more.

Invariants:
- A slot is used again when its saver reads nothing of it any more and no thread of ours writes to it.
- What is kept makes way for what is to be committed: where memory is short, or the policy allows less.
"""

from __future__ import annotations

import logging

from ckstore.config import Policy
from ckstore.errors import CapacityError, SaverError
from ckstore.handed import Handed
from ckstore.saver.arena import FREE, UNIT_NBYTES, Slot, units_of
from ckstore.staging.dock import Dock

_log = logging.getLogger("ckstore")


class Outstanding:
    """What was handed over and still takes a slot; used by one thread at a time."""

    def __init__(self, dock: Dock) -> None:
        self._dock = dock
        self.going: list[Handed] = []
        """On their way, oldest first."""
        self.kept: list[Handed] = []
        """Over, and still in their slots: the next one is coded against them."""
        self._has_waited = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return all(handed.is_over for handed in self.going)

    def sweep(self) -> None:
        """Take back the slots that are not used any more."""
        # Ctrl-C may come between any two lines: nothing is in no list, and what was begun is done by the next call.
        for handed in [each for each in self.going if each.is_over]:
            if handed not in self.kept:
                self.kept.append(handed)
            self.going.remove(handed)
        for handed in [each for each in self.kept if each.freed.is_set()]:
            handed.slot.state = FREE
            self.kept.remove(handed)

    def leave(self) -> None:
        """Let go of what is over, without a word to the saver, which is ending; what is copied ends by itself."""
        self.sweep()
        for handed in self.going:
            handed.staging.leave()
        self.kept.clear()

    def slot_for(self, end: int, head_nbytes: int, policy: Policy) -> Slot:
        """Return a free slot with room for a state, and memory for its head behind it.

        Raises:
            CapacityError: There is no memory, or the policy allows less.
            SaverError: The saver has them all.
        """
        needed = end + head_nbytes
        if self._dock.is_short:
            # It would be taken while the state is copied, when it is too late to look for some.
            self._forget_kept()
            self._dock.give_back_all_but(self._free_slot())
        while True:
            slot = self._free_slot()
            try:
                self._dock.reserve(slot, needed, policy)
                slot.populate(end, head_nbytes)
                return slot
            except CapacityError:
                # Rather slower, or coded against what is read back from the store, or later, than not committed.
                if not (self._dock.give_back_all_but(slot) or self._forget_kept() or self._see_off(needed, policy)):
                    raise

    def prewarm(self, nbytes: int, policy: Policy) -> None:
        """Take the memory that states of this length will need beside those that lie there.

        Raises:
            CapacityError: There is none for a single one, or the policy allows less.
        """
        self.sweep()
        lying = len(self.going) + len(self.kept)
        try:
            self._dock.prewarm(nbytes, policy, lying=lying)
        except CapacityError:
            if not self._dock.give_back_all_but(self._free_slot()):
                raise
            self._dock.prewarm(nbytes, policy, lying=lying)

    def _free_slot(self) -> Slot:
        free = self._dock.free_slots()
        if not free and self._forget_kept():
            free = self._dock.free_slots()
        if not free:
            raise SaverError("the saver has every slot of the arena", todo="close the store and open it again")
        return free[0]

    def _see_off(self, needed: int, policy: Policy) -> bool:
        """Wait until what is being written has ended, if there would be room then; return whether that was so."""
        bound = policy.arena_nbytes_max
        if not self.going or (bound is not None and units_of(needed) * UNIT_NBYTES > bound):
            return False
        if not self._has_waited:
            self._has_waited = True
            step = self.going[0].pending.step
            _log.warning("no room for a second state in the arena: the next waits until step %d is written", step)
        self.going[0].wait_over()
        self.sweep()
        return True

    def _forget_kept(self) -> bool:
        """Wait until the saver has given back what it keeps for the next commit; return whether there was any."""
        kept = list(self.kept)
        for handed in kept:
            handed.wait_freed()
        self.sweep()
        return bool(kept)
