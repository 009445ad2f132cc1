"""One state on its way into a slot of the arena: some of it before training goes on, the rest behind a guard.

Invariants:
- The slot is said to be staged after all its units were marked, and where checksums were taken, after those agreed.
- What a guard protects was not seen to change, by the counters of its library and by some bytes of each part of it,
  before all of it was copied.
- Sources are kept alive until they were copied or given up, and not longer.
- Once ``is_over`` is set, no thread touches the slot any more.
- It ends on a thread of the pool, where no Ctrl-C comes. What Ctrl-C keeps its owner from doing is done by whoever
  waits for it next; then it is given up, for its sources are no longer what they were.

What one handle stages with: the arena, the threads that copy, and where states of known shapes go.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ckstore.background.arena import FREE, SLOTS_MAX, STAGED, Arena, Slot
from ckstore.background.arena_layout import DEVICE_LAZY, DEVICE_NOW, LAZY, NOW, ArenaLayout, pitches_of, plan_layout
from ckstore.background.copying import CopyPool, HostCopy, Place, result_or_error, strip_traceback
from ckstore.background.device_copy import DeviceCopy, Span, codebooks_of, kinds_of, pin, starts_of, versions_of
from ckstore.background.staged_head import places_to_sample
from ckstore.concurrency import Latch, log_safely, noop
from ckstore.config import Limits, Policy
from ckstore.errors import CapacityError, CorruptError, copy_error
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import place_of
from ckstore.state.capture import Captured
from ckstore.state.memory import keeps_of


class Staging:
    """One state on its way into a slot.

    Args:
        captured: The state.
        layout: Where its bytes go.
        starts: Where its storages lie.
        slot: Given to it, with room and its head.
        pool: Who copies.
        bell: An eventfd to ring after each unit; -1: none.
        is_checked: Take checksums of what is copied behind the guard, before training goes on; it is staged when they
            were compared with those of the copy, and of the source when the guard is entered.
        on_staged: Called once, on any thread, when all is staged.
        on_failed: Called once, on any thread, when it never will be.
    """

    def __init__(
        self,
        captured: Captured,
        layout: ArenaLayout,
        starts: NDArray[np.uint64],
        slot: Slot,
        pool: CopyPool,
        *,
        bell: int,
        is_checked: bool,
        on_staged: Callable[[], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self.slot = slot
        self.is_over = Latch()
        """Nothing will be copied any more: it is staged, or was given up, and that was told."""
        self._captured: Captured | None = captured
        self._pool = pool
        # Without anything to guard there is nothing to compare.
        self._is_checked = is_checked and any(layout.sections[kind].unit_count for kind in (LAZY, DEVICE_LAZY))
        self._on_staged, self._on_failed = on_staged, on_failed
        self._lock = threading.Lock()
        self._checking = threading.Lock()
        self._copying = threading.RLock()
        self._error: BaseException | None = None
        self._is_noted = self._is_ended = self._is_left = False
        sections = layout.sections
        self._guarded = {kind: sections[kind].storages for kind in (LAZY, DEVICE_LAZY)}
        self._versions = {kind: self._versions_now(kind, captured) for kind in self._guarded}
        self._host = [
            HostCopy(
                sections[kind],
                slot,
                captured.storages,
                starts=starts,
                bell=bell,
                is_checked=is_checked and kind == LAZY,
                on_over=self._note_section_over,
                find_change=partial(self._find_guarded_change, kind),
            )
            for kind in (NOW, LAZY)
        ]
        # One of each, or none: a device that has nothing to send before training goes on is not waited for.
        self._device_now, self._device_lazy = (
            [self._from_device(kind, layout, captured, bell=bell, is_checked=is_checked)]
            if sections[kind].unit_count
            else []
            for kind in (DEVICE_NOW, DEVICE_LAZY)
        )
        self._left = len(self._host) + len(self._device_now) + len(self._device_lazy)

    def _from_device(
        self, kind: int, layout: ArenaLayout, captured: Captured, *, bell: int, is_checked: bool
    ) -> DeviceCopy:
        return DeviceCopy(
            layout.sections[kind],
            self.slot,
            captured.storages,
            self._note_section_over,
            bell=bell,
            find_change=partial(self._find_guarded_change, kind),
            error_at=self._error_at if is_checked and kind == DEVICE_LAZY else None,
        )

    @property
    def _half(self) -> int:
        """Threads that copy behind a guard, so that what training does meanwhile has processors too."""
        return (self._pool.count + 1) // 2

    @property
    def leaves_processors(self) -> bool:
        """Whether copies are going on, by threads that leave some processor to others."""
        lazy = self._host[1]
        is_going_on = self._is_noted and not (lazy.is_over.is_set() or lazy.is_rushed)
        return is_going_on and self._half < len(os.sched_getaffinity(0))

    def copy_now(self) -> None:
        """Copy what must not change; return when that is done, with the rest on its way.

        Raises:
            CapacityError: There is no memory for it.
        """
        with self._copying:
            self._copy_now()

    def _copy_now(self) -> None:
        now, lazy = self._host
        try:
            for copy in (*self._device_now, *self._device_lazy):
                copy.begin()
            # Before anything is waited for: else the device would have nothing to do meanwhile.
            for copy in self._device_now:
                if (error := copy.launch()) is not None:
                    raise copy_error(error)
            if now.section.unit_count <= 1:
                # As behind a guard, where it holds little: the call waits for one thread only.
                self._pool.run_on_caller_cpu(now.work)
            now.join(self._pool)
            for copy in self._device_now:
                # While it is waited for, the other one can be told.
                for other in self._device_lazy:
                    self._pool.send_one(other.launch)
                self._pool.device_thread.run_and_wait(copy.wait)
            if (error := self._error or now.error) is not None:
                raise copy_error(error)
            # What a guard protects must be copied as it is now.
            for copy in self._device_lazy:
                copy.note()
            lazy.note()
            lazy.send(self._pool, self._half)
            self._is_noted = True
            for copy in self._device_lazy:
                if not self._device_now:
                    # Last, since whoever tells a device needs the interpreter, and the call is to return.
                    self._pool.send_one(copy.launch)
                self._pool.device_thread.send_one(copy.wait)
            if not any(self._guarded.values()):
                self.is_over.wait()
        except BaseException as error:
            self.give_up(error)
            raise

    def guard(self, *, is_host_waiting: bool = False) -> None:
        """Return when the sources may be changed, having sent the whole pool to copy what is left of them.

        Args:
            is_host_waiting: Wait for devices too: what is told to them next may not be on the stream that is current.
        """
        for copy in self._device_lazy:
            if not copy.is_launched:
                self._pool.run_and_wait(copy.launch)
            if (error := copy.hold()) is not None:
                self.cancel(error)
        self._check_devices()
        for copy in self._device_lazy if is_host_waiting else ():
            self._pool.device_thread.run_and_wait(copy.wait)
        self._host[1].join(self._pool)
        self._compare()

    def finish(self, *, is_rushed: bool = True) -> None:
        """Return when all is staged, or was given up.

        Args:
            is_rushed: Send the whole pool; else no more of it than copy behind a guard.
        """
        with self._copying:
            if not self._is_noted:
                self.cancel(KeyboardInterrupt("while a state was copied"))
        self._check_devices()
        for copy in self._host:
            if is_rushed:
                copy.join(self._pool)
            else:
                copy.wait(self._pool, self._half)
        self._compare()
        self.is_over.wait()

    def leave(self) -> None:
        """Have checksums compared as soon as all is copied: nobody will come to do it. Takes no lock of its own."""
        # Whoever copies the last unit sees this, or this sees that he has.
        self._is_left = True
        if self._left == 0 and self._is_checked:
            self._pool.send_one(self._check_left)

    def give_up(self, error: BaseException) -> None:
        """Give it up, and wait until no thread is copying any more; a thread of the pool must not call this."""
        self.cancel(error)
        self.is_over.wait()

    def cancel(self, error: BaseException) -> None:
        """Give it up; does not wait for threads that are copying."""
        if self.is_over.is_set():
            return
        # What was raised has the frames of who called, and those the state.
        error = copy_error(error)
        with self._lock:
            self._error = self._error or error
        for copy in self._host:
            copy.stop(error)
        self._pool.send_one(self._wind_up)

    def _wind_up(self) -> None:
        """End what was cancelled."""
        with self._lock:
            error = self._error
            assert error is not None
            # All is copied, and only the check is missing: nobody else would end it.
            is_end = self._left == 0 and self._is_checked
            self._is_checked = False
        if is_end:
            self._end()
        for copy in self._host:
            copy.work()
        for device in (*self._device_now, *self._device_lazy):
            device.cancel(error)

    def _versions_now(self, kind: int, captured: Captured) -> list[tuple[int, int]]:
        return versions_of(keeps_of(captured.storages, self._guarded[kind]))

    def _find_guarded_change(self, kind: int) -> CorruptError | None:
        """Return an error if something was changed that a guard should have protected while it was copied."""
        captured, noted = self._captured, self._versions.get(kind)
        if captured is None or not noted:
            return None
        for index, one, other in zip(self._guarded[kind], noted, self._versions_now(kind, captured), strict=True):
            if one != other:
                return _changed_error(captured, index, 0)
        # What is changed through ``data``, or by a fused operation, counts nothing.
        row = self._host[1].sampled_change() if kind == LAZY else None
        return None if row is None else _changed_error(captured, *row)

    def _check_devices(self) -> None:
        """Compare sources that lie in devices with what was noted, as this thread's streams have them."""
        if not self._is_checked or not self._device_lazy:
            return
        # Whoever commits, on another thread maybe, has noted everything by then.
        with self._copying:
            for copy in self._device_lazy:
                if (error := result_or_error(partial(self._changed_source, copy), Exception)) is not None:
                    self.cancel(error)

    def _changed_source(self, copy: HostCopy | DeviceCopy) -> BaseException | None:
        """Return an error if a source is not what was noted any more, or its copy is something else."""
        place = copy.changed_at()
        return None if place is None else self._error_at(place)

    def _error_at(self, place: Place) -> BaseException | None:
        captured = self._captured
        # What is over can be changed.
        return None if captured is None else _changed_error(captured, *place)

    def _note_section_over(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            # Where checksums were taken it is staged when they were compared.
            is_copied = self._left == 0
            is_end = is_copied and not (self._is_checked and self._error is None)
        if is_end:
            self._end()
        elif is_copied and self._is_left:
            self._check_left()

    def _check_left(self) -> None:
        try:
            self._check()
        except BaseException as error:
            # Nobody would hear of it, and a saver would wait for what is never staged.
            self.cancel(strip_traceback(error))

    def _compare(self) -> None:
        """Compare checksums, where they were taken and were not compared yet."""
        if self._is_checked:
            self._pool.run_and_wait(self._check)

    def _check(self) -> None:
        with self._checking:
            if not self._is_checked:
                return
            found = None if self._error is not None else result_or_error(self._changed_now, Exception)
            with self._lock:
                self._error = self._error or found
                is_end = self._is_checked and self._left == 0
                self._is_checked = False
            if is_end:
                self._end()

    def _changed_now(self) -> BaseException | None:
        guarded: list[HostCopy | DeviceCopy] = [self._host[1], *self._device_lazy]
        return next((error for copy in guarded if (error := self._changed_source(copy)) is not None), None)

    def _end(self) -> None:
        with self._lock:
            was_ended, self._is_ended = self._is_ended, True
            error = self._error
        if was_ended:
            return
        for copy in self._host:
            copy.forget()
        for device in self._device_lazy:
            device.forget()
        self._captured = None
        if error is None:
            # The order matters: a saver whose trainer dies right here publishes what is marked and STAGED.
            self.slot.state = STAGED
        try:
            if error is None:
                self._on_staged()
            else:
                self._on_failed(error)
        finally:
            # They know of who has this: nothing of a commit is left for the collector of cycles, which may be off.
            self._on_staged, self._on_failed = noop, noop
            self.is_over.set()


def _changed_error(captured: Captured, storage: int, offset: int) -> CorruptError:
    """Return the error that names the first tensor at a place."""
    numbers = [number for number, spec in enumerate(captured.tensors) if spec.storage == storage]
    number = max((each for each in numbers if captured.tensors[each].offset <= offset), default=numbers[0])
    path = captured.paths[number]
    return CorruptError(
        "a tensor was changed between commit_async and the guard of its optimizer",
        where=place_of(path),
        todo="change what an attached optimizer owns only after its guard, or do not attach it; usual causes: a second "
        "optimizer, an Embedding with max_norm, rows restarted through data in a forward pass, share_memory_",
        path=path,
    )


_log = logging.getLogger("ckstore")

_LAYOUTS_MAX = 4
"""Shapes that are remembered: those of a state, and of parts of it that are committed sample_row_count."""

_POPULATED_NBYTES = 64 << 20

_UNGUARDED = {LAZY: NOW, DEVICE_LAZY: DEVICE_NOW}

_PATIENCE_SECONDS = 5.0
"""Longer than it takes to populate so much; a thread that was never sent does not end."""


@dataclass(frozen=True, slots=True, eq=False)
class _LastLayout:
    """What was stowed last: the tensors of the capture, which memory was guarded, and where its storages lay."""

    tensors: Sequence[TensorSpec]
    guarded: tuple[Span, ...]
    starts: NDArray[np.uint64]
    layout: ArenaLayout

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


class StagingArea:
    """The memory and the threads of one handle; both are taken when they are first needed."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._arena: Arena | None = None
        self._pool: CopyPool | None = None
        self._layouts: dict[object, ArenaLayout] = {}
        self._last: _LastLayout | None = None
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

    def release_all_but(self, slot: Slot) -> int:
        """Give the memory of all other free slots back to the system; return how many bytes."""
        return sum(each.give_back() for each in self.free_slots() if each is not slot)

    def pool(self, policy: Policy) -> CopyPool:
        """Return the threads that copy."""
        if self._pool is not None and self._pool.count != policy.staging_thread_count:
            self._pool.close()
            self._pool = None
        if self._pool is None:
            self._pool = CopyPool(policy.staging_thread_count)
        return self._pool

    def plan_layout(self, captured: Captured, guarded: Sequence[Span]) -> tuple[ArenaLayout, NDArray[np.uint64]]:
        """Say where a state goes in a slot, and where each of its storages lies now."""
        starts, last = starts_of(captured.storages), self._last
        if last is not None and last.is_for(captured, guarded, starts):
            return last.layout, starts
        shapes = self._shapes
        if shapes is None or shapes.tensors is not captured.tensors:
            shapes = self._shapes = _Shapes(captured.tensors, pitches_of(captured), codebooks_of(captured))
        kinds = kinds_of(captured, starts, guarded)
        for index in shapes.codebooks:
            # A forward pass may change it, whoever owns it.
            kinds[index] = _UNGUARDED.get(kinds[index], kinds[index])
        pitches = shapes.pitches
        key = (*kinds, *pitches, *((each.nbytes, each.element_width, each.is_float) for each in captured.storages))
        if key not in self._layouts:
            if len(self._layouts) >= _LAYOUTS_MAX:
                self._layouts.clear()
            sampled = places_to_sample(captured.storages, self._limits)
            self._layouts[key] = plan_layout(captured.storages, kinds, sampled, pitches)
        self._last = _LastLayout(captured.tensors, tuple(guarded), starts, self._layouts[key])
        return self._layouts[key], starts

    def may_retain(self, nbytes: int, policy: Policy) -> bool:
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
            log_safely(
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

    def prewarm(self, nbytes: int, policy: Policy, *, occupied_count: int = 0) -> None:
        """Take the memory that states of this length will need.

        Args:
            nbytes: How long a state is, with its head.
            policy: How it is to be staged.
            occupied_count: How many states lie there now.

        Raises:
            CapacityError: There is none for a single one, or the policy allows less.
        """
        # Where one stays for the next one to be coded against, that lies in another slot.
        wanted = max(0, 1 + self.may_retain(nbytes, policy) - occupied_count)
        for number, slot in enumerate(self.free_slots()[:wanted]):
            try:
                self.reserve(slot, nbytes, policy)
            except CapacityError:
                if number + occupied_count == 0:
                    raise
                # The policy's bound, which commits keep by themselves.
                return
            try:
                self._populate(slot, nbytes, policy)
            except CapacityError:
                slot.give_back()
                if number + occupied_count == 0:
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

        pool = self.pool(policy)
        pool.start()
        try:
            for begin in range(0, nbytes, _POPULATED_NBYTES):
                sent.append(Latch())
                pool.send(populate(begin, sent[-1]), 1)
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
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(is_waited=is_waited)
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close(is_idle=is_waited)
