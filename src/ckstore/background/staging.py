"""Copy a state into a slot of the arena: one part before training continues, the guarded part behind a guard.

``StagingArea`` owns the arena, the copy threads and the cached layouts of one handle. ``Staging`` copies one state:
``copy_now`` before ``commit_async`` returns, ``guard`` before the optimizer steps, ``finish`` when a caller waits.

Invariants:
- The slot becomes STAGED after all its units were marked. With ``debug_guard``, checksums were compared before, too.
- If a change of guarded memory is detected before all of it is copied, staging fails and the slot never becomes
  STAGED. Changes are detected by the version counters of its library, and by comparing some words of each row.
- Sources are kept alive until they were copied or given up, and no longer.
- Once ``is_over`` is set, no thread accesses the slot.
- Staging ends on a copy thread, which Ctrl-C cannot interrupt. If Ctrl-C interrupts ``copy_now``, the next wait gives
  the staging up, because the sources may have changed since.
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
from ckstore.background.copying import CopyPool, HostCopy, Span, StorageOffset, result_or_error, strip_traceback
from ckstore.background.device_copy import DeviceCopy, codebooks_of, kinds_of, pin, starts_of, versions_of
from ckstore.background.staged_head import places_to_sample
from ckstore.concurrency import Latch, log_safely, noop
from ckstore.config import Limits, Policy
from ckstore.errors import CapacityError, CorruptError, copy_error
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import place_of
from ckstore.state.capture import Captured
from ckstore.state.memory import keeps_of

_log = logging.getLogger("ckstore")

_LAYOUTS_MAX = 4
"""Layouts that are remembered: those of a state, and of its parts if they are committed separately."""

_POPULATED_NBYTES = 64 << 20

_UNGUARDED = {LAZY: NOW, DEVICE_LAZY: DEVICE_NOW}

_POPULATE_WAIT_SECONDS = 5.0
"""More than it takes to populate ``_POPULATED_NBYTES``. Limited, because interrupted work may never have been sent."""


class Staging:
    """The copying of one state into a slot.

    Args:
        captured: The state.
        layout: Where its bytes go in the slot.
        starts: The address of each storage.
        slot: The slot, with memory reserved and the head written.
        pool: The copy threads.
        bell: An eventfd to ring after each unit; -1: none.
        is_checked: Take checksums of guarded memory before training continues, and compare them with the copy, and
            with the source when the guard is entered.
        on_staged: Called once, on any thread, when all bytes are staged.
        on_failed: Called once, on any thread, when they never will be.
        late: Called on a copy thread after ``copy_now``, to write to the slot what is computed meanwhile. Guards wait.
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
        late: Callable[[], None] | None = None,
    ) -> None:
        self.slot = slot
        self.is_over = Latch()
        """Set when the state is staged or given up, after ``on_staged`` or ``on_failed`` was called."""
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
        # At most one of each: a device section without bytes is never waited for.
        self._device_now, self._device_lazy = (
            [self._from_device(kind, layout, captured, bell=bell, is_checked=is_checked)]
            if sections[kind].unit_count
            else []
            for kind in (DEVICE_NOW, DEVICE_LAZY)
        )
        self._late, self._has_late, self._is_late_over = late, late is not None, Latch()
        self._left = len(self._host) + len(self._device_now) + len(self._device_lazy) + self._has_late

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
        """How many threads copy behind a guard. The others leave their processors to training."""
        return (self._pool.count + 1) // 2

    @property
    def leaves_processors(self) -> bool:
        """Whether guarded memory is being copied by fewer threads than there are processors."""
        lazy = self._host[1]
        is_going_on = self._is_noted and not (lazy.is_over.is_set() or lazy.is_rushed)
        return is_going_on and self._half < len(os.sched_getaffinity(0))

    def copy_now(self) -> None:
        """Copy all unguarded memory, and begin to copy the guarded part. Return when the former is done.

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
            # Launch before waiting for anything, so that the device is busy meanwhile.
            for copy in self._device_now:
                if (error := copy.launch()) is not None:
                    raise copy_error(error)
            if now.section.unit_count <= 1:
                # With little unguarded memory, the caller waits for one thread only.
                self._pool.run_on_caller_cpu(now.work)
            now.join(self._pool)
            for copy in self._device_now:
                # Launch the guarded copies while waiting for the others.
                for other in self._device_lazy:
                    self._pool.send_one(other.launch)
                self._pool.device_thread.run_and_wait(copy.wait)
            if (error := self._error or now.error) is not None:
                raise copy_error(error)
            # Record what guarded memory contains now, to detect changes.
            for copy in self._device_lazy:
                copy.note()
            lazy.note()
            lazy.send(self._pool, self._half)
            if self._has_late:
                self._pool.send_one(self._work_late)
            self._is_noted = True
            for copy in self._device_lazy:
                if not self._device_now:
                    # Last, because launching needs the interpreter, and this call should return quickly.
                    self._pool.send_one(copy.launch)
                self._pool.device_thread.send_one(copy.wait)
            if not (self._has_late or any(self._guarded.values())):
                self.is_over.wait()
        except BaseException as error:
            self.give_up(error)
            raise

    def guard(self, *, is_host_waiting: bool = False) -> None:
        """Return when guarded memory may be changed. All copy threads work on the rest of it.

        Args:
            is_host_waiting: Wait until devices have copied. The following operations may use other streams.
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
        if self._has_late:
            self._is_late_over.wait()
        self._compare()

    def finish(self, *, is_rushed: bool = True) -> None:
        """Wait until the state is staged or given up.

        Args:
            is_rushed: Use all copy threads. Else only those that copy behind a guard.
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
        """Compare checksums once all bytes are copied, since no caller will wait for this staging. Takes no lock."""
        # Set before reading ``_left``: either this call or the thread that copies the last unit sees both.
        self._is_left = True
        if self._left == 0 and self._is_checked:
            self._pool.send_one(self._check_left)

    def give_up(self, error: BaseException) -> None:
        """Give the staging up, and wait until no thread is copying. Must not be called on a copy thread."""
        self.cancel(error)
        self.is_over.wait()

    def cancel(self, error: BaseException) -> None:
        """Give the staging up, without waiting for threads that are copying."""
        if self.is_over.is_set():
            return
        # A copy: the traceback would keep the caller's frames alive, and with them the state.
        error = copy_error(error)
        with self._lock:
            self._error = self._error or error
        for copy in self._host:
            copy.stop(error)
        self._pool.send_one(self._wind_up)

    def _wind_up(self) -> None:
        """End a cancelled staging, on a copy thread."""
        with self._lock:
            error = self._error
            assert error is not None
            # If only the comparison of checksums is missing, no other thread would end the staging.
            is_end = self._left == 0 and self._is_checked
            self._is_checked = False
        if is_end:
            self._end()
        for copy in self._host:
            copy.work()
        self._work_late()
        for device in (*self._device_now, *self._device_lazy):
            device.cancel(error)

    def _work_late(self) -> None:
        """Write what is computed late, unless that is done or staging has failed. On a copy thread; never raises."""
        with self._lock:
            late, self._late = self._late, None
            is_given_up = self._error is not None
        if late is not None:
            try:
                self._note_section_over(None if is_given_up else result_or_error(late))
            finally:
                self._is_late_over.set()

    def _versions_now(self, kind: int, captured: Captured) -> list[tuple[int, int]]:
        return versions_of(keeps_of(captured.storages, self._guarded[kind]))

    def _find_guarded_change(self, kind: int) -> CorruptError | None:
        """Return an error if guarded memory was changed while it was copied."""
        captured, noted = self._captured, self._versions.get(kind)
        if captured is None or not noted:
            return None
        for index, one, other in zip(self._guarded[kind], noted, self._versions_now(kind, captured), strict=True):
            if one != other:
                return _changed_error(captured, index, 0)
        # Changes through ``.data`` or by fused operations do not increase the version counters.
        row = self._host[1].sampled_change() if kind == LAZY else None
        return None if row is None else _changed_error(captured, *row)

    def _check_devices(self) -> None:
        """Compare sources on devices with their checksums, on this thread's current streams."""
        if not self._is_checked or not self._device_lazy:
            return
        # The lock ensures that ``copy_now``, perhaps on another thread, has recorded all checksums.
        with self._copying:
            for copy in self._device_lazy:
                if (error := result_or_error(partial(self._changed_source, copy), Exception)) is not None:
                    self.cancel(error)

    def _changed_source(self, copy: HostCopy | DeviceCopy) -> BaseException | None:
        """Return an error if a source or its copy does not match the recorded checksums."""
        place = copy.changed_at()
        return None if place is None else self._error_at(place)

    def _error_at(self, place: StorageOffset) -> BaseException | None:
        captured = self._captured
        # After the end, the sources may be changed.
        return None if captured is None else _changed_error(captured, *place)

    def _note_section_over(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            # With checksums, the state is staged only after they were compared.
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
            # Nobody waits for this staging, and the saver would wait forever for the rest.
            self.cancel(strip_traceback(error))

    def _compare(self) -> None:
        """Compare checksums, if there are any and they were not compared yet."""
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
            # Set before the callback: if the trainer dies in between, the saver publishes the state.
            self.slot.state = STAGED
        try:
            if error is None:
                self._on_staged()
            else:
                self._on_failed(error)
        finally:
            # The callbacks refer to the owner of this object. Drop them, because garbage collection may be off.
            self._on_staged, self._on_failed = noop, noop
            self.is_over.set()


def _changed_error(captured: Captured, storage: int, offset: int) -> CorruptError:
    """Return the error that names the first tensor at this offset of a storage."""
    numbers = [number for number, spec in enumerate(captured.tensors) if spec.storage == storage]
    number = max((each for each in numbers if captured.tensors[each].offset <= offset), default=numbers[0])
    path = captured.paths[number]
    return CorruptError(
        "a tensor was changed between commit_async and the guard of its optimizer",
        where=place_of(path),
        todo="change what an attached optimizer owns only inside its guard, or do not attach it; usual causes: a "
        "second optimizer, an Embedding with max_norm, rows restarted through .data in a forward pass, share_memory_",
        path=path,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _LastLayout:
    """The last layout, and what it was planned for."""

    tensors: Sequence[TensorSpec]
    guarded: tuple[Span, ...]
    starts: NDArray[np.uint64]
    layout: ArenaLayout

    def is_for(self, captured: Captured, guarded: Sequence[Span], starts: NDArray[np.uint64]) -> bool:
        """Whether this state would get the same layout."""
        if self.tensors is not captured.tensors or self.guarded != tuple(guarded):
            return False
        return self.starts is starts or np.array_equal(self.starts, starts)


@dataclass(frozen=True, slots=True, eq=False)
class _Shapes:
    """Row lengths and codebooks of the storages, derived from the tensors of the last capture."""

    tensors: Sequence[TensorSpec]
    pitches: Sequence[int]
    codebooks: frozenset[int]


class StagingArea:
    """The arena, the copy threads and the cached layouts of one handle. Arena and threads are created when needed."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._arena: Arena | None = None
        self._pool: CopyPool | None = None
        self._layouts: dict[object, ArenaLayout] = {}
        self._last: _LastLayout | None = None
        self._shapes: _Shapes | None = None
        self.is_short = False
        """Whether memory for a state was missing once. Then nothing is retained for the next commit."""

    @property
    def arena(self) -> Arena:
        """The arena. Created on first use."""
        if self._arena is None:
            # An unused slot takes no memory.
            self._arena = Arena.create(slot_count=SLOTS_MAX)
        return self._arena

    @property
    def nbytes(self) -> int:
        """Shared memory that the arena occupies."""
        return 0 if self._arena is None else self._arena.nbytes_taken

    def free_slots(self) -> list[Slot]:
        """Return the free slots, those with the most memory first."""
        free = [slot for slot in self.arena.slots if slot.state == FREE]
        return sorted(free, key=lambda slot: (slot.nbytes_taken, slot.nbytes), reverse=True)

    def release_all_but(self, slot: Slot) -> int:
        """Return the memory of all other free slots to the system. Return how many bytes that were."""
        return sum(each.give_back() for each in self.free_slots() if each is not slot)

    def pool(self, policy: Policy) -> CopyPool:
        """Return the copy threads, as many as the policy says."""
        if self._pool is not None and self._pool.count != policy.staging_thread_count:
            self._pool.close()
            self._pool = None
        if self._pool is None:
            self._pool = CopyPool(policy.staging_thread_count)
        return self._pool

    def plan_layout(self, captured: Captured, guarded: Sequence[Span]) -> tuple[ArenaLayout, NDArray[np.uint64]]:
        """Return where the bytes of a state go in a slot, and the address of each of its storages."""
        starts, last = starts_of(captured.storages), self._last
        if last is not None and last.is_for(captured, guarded, starts):
            return last.layout, starts
        shapes = self._shapes
        if shapes is None or shapes.tensors is not captured.tensors:
            shapes = self._shapes = _Shapes(captured.tensors, pitches_of(captured), codebooks_of(captured))
        kinds = kinds_of(captured, starts, guarded)
        for index in shapes.codebooks:
            # A forward pass may change a codebook of an attached optimizer, so it is copied without a guard.
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
        """Whether a state of this length may stay in its slot as the delta base of the next commit."""
        if policy.base_cache != "memory" or self.is_short or policy.compression == "none" or not policy.delta:
            return False
        # The next state needs a slot of its own and may be longer. So does one that waits for its turn.
        count = 3 if policy.on_busy == "replace" else 2
        bounds = ((policy.base_cache_nbytes_max, nbytes), (policy.arena_nbytes_max, count * (nbytes + nbytes // 8)))
        return all(bound is None or wanted <= bound for bound, wanted in bounds)

    def note_short(self) -> None:
        """Record that memory for a state was missing. From now on nothing is retained for the next commit."""
        if not self.is_short:
            self.is_short = True
            log_safely(
                _log,
                logging.WARNING,
                "memory for staged states is short: states are no longer kept in shared memory as delta bases",
            )

    def reserve(self, slot: Slot, nbytes: int, policy: Policy) -> None:
        """Make room in a slot.

        Raises:
            CapacityError: The policy allows less, or this process has no address space left.
        """
        needed = self.nbytes + slot.nbytes_wanting(nbytes)
        if policy.arena_nbytes_max is not None and needed > policy.arena_nbytes_max:
            raise CapacityError(
                f"staging needs {needed} bytes of shared memory, but the policy allows {policy.arena_nbytes_max}",
                todo="raise arena_nbytes_max, or use commit, which needs no second copy",
            )
        if nbytes > slot.nbytes:
            # Address space is free. Some extra room avoids a new mapping each time a state grows a little.
            slot.reserve(nbytes + nbytes // 8)

    def prewarm(self, nbytes: int, policy: Policy, *, occupied_count: int = 0) -> None:
        """Take the memory that states of this length will need.

        Args:
            nbytes: Length of a state with its head.
            policy: How it will be staged.
            occupied_count: How many states occupy slots now.

        Raises:
            CapacityError: There is no memory for a single state, or the policy allows less.
        """
        # A retained state needs a slot in addition to that of the next commit.
        wanted = max(0, 1 + self.may_retain(nbytes, policy) - occupied_count)
        for number, slot in enumerate(self.free_slots()[:wanted]):
            try:
                self.reserve(slot, nbytes, policy)
            except CapacityError:
                if number + occupied_count == 0:
                    raise
                # The policy's limit for a second slot, which commits respect, too.
                return
            try:
                self._populate(slot, nbytes, policy)
            except CapacityError:
                slot.give_back()
                if number + occupied_count == 0:
                    raise
                self.note_short()

    def _populate(self, slot: Slot, nbytes: int, policy: Policy) -> None:
        """Take the memory of a slot, on all copy threads.

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
            # Interrupted: no thread may populate a slot that the caller considers idle.
            errors.append(error)
            for ended in sent:
                ended.wait(_POPULATE_WAIT_SECONDS)
            raise
        if errors:
            raise errors[0]
        pin(slot, nbytes)

    def close(self, *, is_waited: bool) -> None:
        """Release memory and threads. The threads finish what they have begun, whether waited for or not."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close(is_waited=is_waited)
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close(is_idle=is_waited)
