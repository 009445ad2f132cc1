"""What one handle stages with: the arena, the threads that copy, and where states of known shapes go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore.capture import Captured
from ckstore.config import Limits, Policy
from ckstore.errors import CapacityError
from ckstore.latch import Latch
from ckstore.logs import tell
from ckstore.saver.arena import FREE, SLOTS_MAX, Arena, Slot
from ckstore.saver.state import places_to_sample
from ckstore.staging.crew import Crew
from ckstore.staging.devices import Span, codebooks_of, kinds_of, pin, starts_of
from ckstore.staging.spots import pitches_of
from ckstore.staging.stowage import DEVICE_LAZY, DEVICE_NOW, LAZY, NOW, Stowage, stow
from ckstore.tensor import TensorSpec

_log = logging.getLogger("ckstore")

_STOWED_MAX = 4
"""Shapes that are remembered: those of a state, and of parts of it that are committed apart."""

_POPULATED_NBYTES = 64 << 20

_UNGUARDED = {LAZY: NOW, DEVICE_LAZY: DEVICE_NOW}

_PATIENCE_SECONDS = 5.0
"""Longer than it takes to populate so much; a thread that was never sent does not end."""


@dataclass(frozen=True, slots=True, eq=False)
class _Stowed:
    """What was stowed last: the tensors of the capture, which memory was guarded, and where its storages lay."""

    tensors: Sequence[TensorSpec]
    guarded: tuple[Span, ...]
    starts: NDArray[np.uint64]
    stowage: Stowage

    def is_for(self, captured: Captured, guarded: Sequence[Span], starts: NDArray[np.uint64]) -> bool:
        """Whether this state would be stowed in the same way."""
        if self.tensors is not captured.tensors or self.guarded != tuple(guarded):
            return False
        return self.starts is starts or np.array_equal(self.starts, starts)


@dataclass(frozen=True, slots=True, eq=False)
class _Shapes:
    """What the tensors of the last capture say of its storages: the length of their rows, and which are codebooks."""

    tensors: Sequence[TensorSpec]
    pitches: Sequence[int]
    codebooks: frozenset[int]


class Dock:
    """The memory and the threads of one handle; both are taken when they are first needed."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._arena: Arena | None = None
        self._crew: Crew | None = None
        self._stowed: dict[object, Stowage] = {}
        self._last: _Stowed | None = None
        self._shapes: _Shapes | None = None
        self.is_short = False
        """Whether there was no memory for a state: ``note_short``."""

    @property
    def arena(self) -> Arena:
        """The arena; made now if there is none."""
        if self._arena is None:
            # A slot that is never used takes no memory.
            self._arena = Arena.create(slot_count=SLOTS_MAX)
        return self._arena

    @property
    def nbytes(self) -> int:
        """Shared memory that the arena has taken."""
        return 0 if self._arena is None else self._arena.nbytes_taken

    def free_slots(self) -> list[Slot]:
        """Return the free slots, those with the most memory first."""
        free = [slot for slot in self.arena.slots if slot.state == FREE]
        return sorted(free, key=lambda slot: (slot.nbytes_taken, slot.nbytes), reverse=True)

    def give_back_all_but(self, slot: Slot) -> int:
        """Give the memory of all other free slots back to the system; return how many bytes."""
        return sum(each.give_back() for each in self.free_slots() if each is not slot)

    def crew(self, policy: Policy) -> Crew:
        """Return the threads that copy."""
        if self._crew is not None and self._crew.count != policy.staging_thread_count:
            self._crew.close()
            self._crew = None
        if self._crew is None:
            self._crew = Crew(policy.staging_thread_count)
        return self._crew

    def stow(self, captured: Captured, guarded: Sequence[Span]) -> tuple[Stowage, NDArray[np.uint64]]:
        """Say where a state goes in a slot, and where each of its storages lies now."""
        starts, last = starts_of(captured.storages), self._last
        if last is not None and last.is_for(captured, guarded, starts):
            return last.stowage, starts
        shapes = self._shapes
        if shapes is None or shapes.tensors is not captured.tensors:
            shapes = self._shapes = _Shapes(captured.tensors, pitches_of(captured), codebooks_of(captured))
        kinds = kinds_of(captured, starts, guarded)
        for index in shapes.codebooks:
            # A forward pass may change it, whoever owns it.
            kinds[index] = _UNGUARDED.get(kinds[index], kinds[index])
        pitches = shapes.pitches
        key = (*kinds, *pitches, *((each.nbytes, each.element_width, each.is_float) for each in captured.storages))
        if key not in self._stowed:
            if len(self._stowed) >= _STOWED_MAX:
                self._stowed.clear()
            sampled = places_to_sample(captured.storages, self._limits)
            self._stowed[key] = stow(captured.storages, kinds, sampled, pitches)
        self._last = _Stowed(captured.tensors, tuple(guarded), starts, self._stowed[key])
        return self._stowed[key], starts

    def may_keep(self, nbytes: int, policy: Policy) -> bool:
        """Whether a state of this length may stay in its slot, as what the next one is coded against."""
        if policy.base_cache != "memory" or self.is_short or policy.compression == "none" or not policy.delta:
            return False
        # The next one lies beside it, and may be longer; so does one that waits for its turn.
        count = 3 if policy.on_busy == "replace" else 2
        bounds = ((policy.base_cache_nbytes_max, nbytes), (policy.arena_nbytes_max, count * (nbytes + nbytes // 8)))
        return all(bound is None or wanted <= bound for bound, wanted in bounds)

    def note_short(self) -> None:
        """Take note that there was no memory for a state: none is kept for the next one from now on."""
        if not self.is_short:
            self.is_short = True
            tell(
                _log,
                logging.WARNING,
                "memory for staged states is short: from now on none of them is kept as a base of the next",
            )

    def reserve(self, slot: Slot, nbytes: int, policy: Policy) -> None:
        """Make room in a slot.

        Raises:
            CapacityError: The policy allows less, or there is no room in this process.
        """
        needed = self.nbytes + slot.nbytes_wanting(nbytes)
        if policy.arena_nbytes_max is not None and needed > policy.arena_nbytes_max:
            raise CapacityError(
                f"staging takes {needed} bytes of shared memory, and the policy allows {policy.arena_nbytes_max}",
                todo="raise arena_nbytes_max, or use commit, which needs no second copy",
            )
        if nbytes > slot.nbytes:
            # Room takes no memory; with some to spare, a state that grows is not mapped anew each time.
            slot.reserve(nbytes + nbytes // 8)

    def prewarm(self, nbytes: int, policy: Policy, *, lying: int = 0) -> None:
        """Take the memory that states of this length will need.

        Args:
            nbytes: How long a state is, with its head.
            policy: How it is to be staged.
            lying: How many states lie there now.

        Raises:
            CapacityError: There is none for a single one, or the policy allows less.
        """
        # Where one stays for the next one to be coded against, that lies in another slot.
        wanted = max(0, 1 + self.may_keep(nbytes, policy) - lying)
        for number, slot in enumerate(self.free_slots()[:wanted]):
            try:
                self.reserve(slot, nbytes, policy)
            except CapacityError:
                if number + lying == 0:
                    raise
                # The policy's bound, which commits keep by themselves.
                return
            try:
                self._populate(slot, nbytes, policy)
            except CapacityError:
                slot.give_back()
                if number + lying == 0:
                    raise
                self.note_short()

    def _populate(self, slot: Slot, nbytes: int, policy: Policy) -> None:
        """Take the memory of a slot, on all threads.

        Raises:
            CapacityError: There is no memory left.
        """
        errors: list[BaseException] = []
        sent: list[Latch] = []

        def populate(begin: int, ended: Latch) -> Callable[[], None]:
            def work() -> None:
                try:
                    if not errors:
                        slot.populate(begin, min(_POPULATED_NBYTES, nbytes - begin))
                except BaseException as error:
                    errors.append(error)
                finally:
                    ended.set()

            return work

        crew = self.crew(policy)
        crew.start()
        try:
            for begin in range(0, nbytes, _POPULATED_NBYTES):
                sent.append(Latch())
                crew.send(populate(begin, sent[-1]), 1)
            for ended in sent:
                ended.wait()
        except BaseException as error:
            # Nobody populates a slot that its owner takes for idle.
            errors.append(error)
            for ended in sent:
                ended.wait(_PATIENCE_SECONDS)
            raise
        if errors:
            raise errors[0]
        pin(slot, nbytes)

    def close(self, *, is_waited: bool) -> None:
        """Let go of memory and threads; what threads have begun they finish, waited for or not."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close(is_waited=is_waited)
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close(is_idle=is_waited)
