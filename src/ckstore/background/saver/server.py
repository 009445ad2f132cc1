"""The server loop of a saver: receive staged states, commit them in order, report the results, outlive the trainer.

One thread listens to the trainer and watches whether it is alive. A second thread commits one ticket after the other.
``Priority`` sets how much of the machine both get.

Invariants:
- After the trainer's death, a ticket is published exactly if it is fully staged and the lease was held for it while the
  trainer lived.
- The saver ends when no work is left and one of these is true: the trainer is dead, it has sent Quit, or a signal asked
  the saver to end and the trainer did not reply. It then gives up the lease.
- An invalid message ends the connection, and nothing is guessed. Fully staged tickets are still published.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import select
import signal
import socket
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from ckstore.background import protocol
from ckstore.background.arena import Arena
from ckstore.background.protocol import Channel, ProcessWatch
from ckstore.background.saver.committer import Committer
from ckstore.background.saver.staged_state import DelayedBegin, Job, StagingMonitor, Ticket
from ckstore.background.staged_head import decode_head
from ckstore.clock import SYSTEM_CLOCK
from ckstore.concurrency import Latch, ThreadLimit
from ckstore.errors import CapacityError, CkstoreError, MalformedError, SaverError
from ckstore.processes import JOB_SIGNALS, proc_is_ours
from ckstore.ranks import LINK_THREAD_NAME
from ckstore.store.lease import HEARTBEAT_THREAD_NAME
from ckstore.store.memory_budget import WRITE_BLOCKS, WRITE_BLOCKS_MIN

if TYPE_CHECKING:
    from ckstore.background.saver.journal import JournalCommitter

_log = logging.getLogger("ckstore")

BELL_PAUSE_MS = 1
"""Pause after the bell has rung. While a state is being copied, it would wake this thread about ten times as often."""

NICE_MAX = 19

_AWAKE_THREADS = frozenset((HEARTBEAT_THREAD_NAME, LINK_THREAD_NAME))
"""Other processes take this one for dead if these threads are suspended."""

_NORMAL = os.sched_param(0)
"""The only scheduling parameter that these classes accept."""


class Server:
    """One saver. All methods are called by the listening thread unless they say otherwise."""

    leave_seconds = 5.0
    """After a signal asked the saver to end: how long the trainer has to reply. A stopped trainer does not reply."""

    def __init__(
        self,
        end: socket.socket,
        bell: int,
        arena: Arena,
        hello: protocol.Hello,
        priority: Priority,
        listener: socket.socket | None = None,
    ) -> None:
        self._socket = end
        self._bell = bell
        self._arena = arena
        self._priority = priority
        self._is_hurried = False
        self._hurried_last = 0
        """The newest ticket at the moment when the trainer last started to wait."""
        self._trainer = ProcessWatch(hello.trainer_pid, hello.trainer_started)
        self.channel = Channel(end, self._trainer)
        self._monitor = StagingMonitor(hello.trainer_pid)
        self._changed = threading.Condition()
        self._reporting = threading.Lock()
        """Held while results are sent, so that nothing is sent about a ticket after its end."""
        self._jobs: deque[Job] = deque()
        self._delayed: list[DelayedBegin] = []
        """Owned by the listening thread. The committing thread may check whether it is empty."""
        self._delayed_until = 0.0
        self._is_working = self._has_read_socket = False
        self._is_end_requested = self._has_sent_leaving = False
        """Whether a signal asked the saver to end, and whether the trainer was informed."""
        self._leave_at: float | None = None
        """When the saver ends if the trainer does not reply to that."""
        self._is_ending = False
        """New tickets are refused."""
        self._is_over = False
        self._tickets: dict[int, Ticket] = {}
        """Tickets whose slots are in use: not yet committed, or retained as delta bases."""
        self._last = 0
        self._promised: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        """Tickets that all ranks of a job have staged, and that the trainer does not know about."""
        self._ended: set[int] = set()
        """Tickets that have ended and whose slots are not free. Owned by the committing thread."""
        self._committer = self._committer_for(hello, listener)
        self._worker = threading.Thread(target=self._work, name="ckstore-commit", daemon=True)

    def _committer_for(self, hello: protocol.Hello, listener: socket.socket | None) -> Committer | JournalCommitter:
        send, limit = self.channel.send, self._priority.thread_limit
        if hello.role == "journal":
            from ckstore.background.saver.journal import JournalCommitter

            return JournalCommitter(hello, send, self._on_lease, limit)
        return Committer(hello, send, self._on_lease, limit, listener, before_result=self.send_promises)

    def run(self) -> int:
        """Serve until the end, in a process of its own with signal handling. Return the exit code."""
        signal.signal(signal.SIGTERM, lambda number, frame: self.ask_to_end())
        # A terminal or scheduler sends signals to all processes of a job. Only the trainer reacts to them.
        signal.pthread_sigmask(signal.SIG_SETMASK, JOB_SIGNALS - {signal.SIGTERM})
        return self.serve()

    def serve(self) -> int:
        """Serve until the end, on any thread. Return the exit code."""
        try:
            self._committer.open()
        except Exception as error:
            self.channel.send(protocol.failed_of(0, error))
            self._trainer.close()
            return getattr(error, "exit_code", 1)
        self.channel.send(protocol.Ready(os.getpid()))
        self._worker.start()
        problem: Exception | None = None
        try:
            self._listen()
        except Exception as error:
            problem = error
            _log.error("the saver received an invalid message and ends: %s", error)
            # Earlier messages are valid, unless one of them is the invalid one.
            with contextlib.suppress(CkstoreError):
                self._begin_delayed()
            self._note_trainer_gone()
        self._finish()
        self._committer.close()
        self._trainer.close()
        if problem is not None:
            return getattr(problem, "exit_code", 1)
        # If the trainer lives, it has received every error.
        return self._committer.exit_code if self._monitor.is_trainer_gone else 0

    def ask_to_end(self) -> None:
        """Ask the trainer whether to end. Called by a signal handler at any moment, so it only wakes the loop."""
        self._is_end_requested = True
        os.eventfd_write(self._bell, 1)

    # The listening thread

    def _listen(self) -> None:
        without_bell, poll = select.poll(), select.poll()
        for fd in (self._socket.fileno(), self._trainer.fd):
            if fd >= 0:
                without_bell.register(fd, select.POLLIN)
                poll.register(fd, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        while not (self._is_ending and self._has_read_socket and self._is_idle()):
            # Check for the trainer's death before reading: then all messages that it sent before its death are read.
            is_alive = self._trainer.is_alive
            has_rung = self._has_rung()
            is_open = self._receive_all()
            self._has_read_socket = True
            if not (is_alive and is_open) or SYSTEM_CLOCK.monotonic() >= self._delayed_until:
                self._begin_delayed()
            self.send_promises()
            self._leave_in_time()
            # Only this thread lowers priorities: a thread that lowers its own could be suspended while it holds a lock.
            self._set_priority()
            self._monitor.notify()
            if not (is_alive and is_open):
                # The end of the connection counts as death: nobody can stage bytes or send requests.
                self._note_trainer_gone()
                return
            if self._delayed:
                # The copy threads ring the bell for every unit, so it is not polled here.
                without_bell.poll(max(1, round(1e3 * (self._delayed_until - SYSTEM_CLOCK.monotonic()))))
            elif not (self._is_ending and self._is_idle()):
                if has_rung:
                    without_bell.poll(BELL_PAUSE_MS)
                poll.poll(self._trainer.timeout_ms if self._leave_at is None else 1e3 * self.leave_seconds / 10)

    def _has_rung(self) -> bool:
        try:
            return os.eventfd_read(self._bell) > 0
        except BlockingIOError:
            return False

    def _receive_all(self) -> bool:
        while True:
            try:
                message = protocol.receive(self._socket, protocol.TO_SAVER)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if message is None:
                return False
            self._handle(message)

    def _handle(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Begin):
            # Check the lease before the trainer, as ``_confirm_lease`` does.
            is_granted = self._committer.holds_lease and self._trainer.is_alive
            # Messages that arrived before the first read are never late.
            is_late = self._is_ending and self._has_read_socket
            if not self._delayed:
                self._delayed_until = SYSTEM_CLOCK.monotonic() + message.start_delay_ms / 1e3
            self._delayed.append(DelayedBegin(message, is_granted=is_granted, is_late=is_late))
            if message.start_delay_ms and not is_late:
                self._set_priority()
                return
        if isinstance(message, protocol.Hurry):
            # Raise the priority before the delayed tickets begin: in the idle class, a thread can be suspended while it
            # holds the GIL.
            self._hurry()
        self._begin_delayed()
        if isinstance(message, protocol.Abort):
            self._abort(message.ticket)
        elif isinstance(message, (protocol.Release, protocol.Forget, protocol.Decline)):
            self._add(message)
        elif isinstance(message, protocol.Lost):
            self._committer.note_lost(message)
        elif isinstance(message, protocol.Warm):
            if not WRITE_BLOCKS_MIN <= message.block_count <= WRITE_BLOCKS:
                raise MalformedError("the requested number of write blocks is invalid", where=repr(message))
            for slot in self._arena.slots:
                # A lack of memory is reported by the ticket that needs it.
                with contextlib.suppress(CapacityError):
                    slot.refresh()
            self._add(message)
        elif isinstance(message, protocol.Quit):
            self._is_ending = True
            if not (message.is_parting or self._is_idle()):
                # The trainer dropped its handle. A new handle, even in the same process, must wait for this saver.
                self._committer.mark_trainer_dead()
        elif isinstance(message, protocol.Hurry):
            # Again, since a delayed ticket may have failed to begin.
            self._hurry()
        elif isinstance(message, protocol.Staged):
            if (ticket := self._tickets.get(message.ticket)) is not None:
                ticket.note_staged()
        elif not isinstance(message, protocol.Begin):
            raise MalformedError(f"unexpected {type(message).__name__} message from the trainer")
        self._set_priority()

    def _begin_delayed(self) -> None:
        """Begin the tickets whose start was delayed."""
        while self._delayed:
            self._begin(self._delayed.pop(0))

    def _begin(self, delayed: DelayedBegin) -> None:
        message = delayed.message
        if message.ticket <= self._last or message.slot >= len(self._arena.slots):
            raise MalformedError("a ticket is out of order, or its slot does not exist", where=repr(message))
        slot = self._arena.slots[message.slot]
        with self._changed:
            is_taken = any(ticket.is_in(slot) for ticket in self._tickets.values())
        if is_taken:
            raise MalformedError("a ticket was begun in a slot that is in use", where=repr(message))
        self._last = message.ticket
        try:
            if delayed.is_late:
                raise SaverError("the saver is ending", todo="commit again: that starts a new saver")
            slot.refresh()
            if message.head_place + message.head_nbytes > slot.nbytes or slot.ticket != message.ticket:
                raise MalformedError("the head of a ticket is not in its slot", where=repr(message))
            head = decode_head(bytes(slot.view(message.head_place, message.head_nbytes)), slot_nbytes=slot.nbytes)
        except CkstoreError as error:
            self.channel.send(protocol.failed_of(message.ticket, error))
            self.channel.send(protocol.SlotFree(message.ticket))
            return
        ticket = Ticket(message.ticket, slot, head, self._monitor, parents=(message.parent, message.parent_ticket))
        ticket.may_retain, ticket.job_number = message.may_retain, message.number
        ticket.may_outlive_trainer = self._committer.is_other_rank
        self._committer.announce(head.step)
        with self._changed:
            self._tickets[ticket.number] = ticket
        # Before the committing thread can end the ticket. The lease is read again: another writer may have taken it.
        is_transferred = self._committer.was_transferred(message.lease)
        if is_transferred or self._committer.holds_lease:
            self._confirm_lease(ticket if is_transferred or delayed.is_granted else None)
        self._add(ticket)

    def _abort(self, number: int) -> None:
        """Cancel a ticket: immediately if its commit has not begun, else when the commit checks next."""
        with self._reporting:
            with self._changed:
                ticket = self._tickets.get(number)
                is_waiting = any(job is ticket for job in self._jobs)
                if ticket is not None and is_waiting:
                    self._jobs.remove(ticket)
                    del self._tickets[number]
                    # The committing thread updates this after each job, but it may have no job.
                    self._is_hurried = self._is_hurried and bool(self._jobs or self._is_working)
            if ticket is not None:
                ticket.abort()
            if ticket is not None and is_waiting:
                self._committer.give_up(ticket)
                ticket.leave()
                self.channel.send(protocol.SlotFree(number))

    def _leave_in_time(self) -> None:
        """After a signal: ask the trainer when to end, since it may be about to begin a ticket."""
        if not self._is_end_requested or self._is_ending:
            return
        self._has_sent_leaving = self._has_sent_leaving or self.channel.send(protocol.Leaving(), wait_ms=0)
        if self._leave_at is None or not self._is_idle():
            self._leave_at = SYSTEM_CLOCK.monotonic() + self.leave_seconds
        elif SYSTEM_CLOCK.monotonic() >= self._leave_at:
            self._receive_all()
            self._is_ending = self._is_idle()

    def _hurry(self) -> None:
        with self._changed:
            # A delayed ticket may have failed to begin since the trainer asked.
            self._is_hurried = bool(self._jobs or self._is_working or self._delayed)
            if not self._is_hurried:
                return
            self._hurried_last = max([self._last, *(each.message.ticket for each in self._delayed)])
            self._set_priority()

    def _set_priority(self) -> None:
        """Full priority while the trainer waits, idle class during copies and without work, low priority otherwise."""
        with self._changed:
            is_idle = not (self._jobs or self._is_working)
            if self._is_hurried or self._is_over or (self._is_ending and is_idle):
                self._priority.use_full_priority()
            elif is_idle or self._delayed or any(ticket.is_being_copied for ticket in self._tickets.values()):
                # Without work too: if Begin arrived at low priority, threads would compete with the copy threads.
                self._priority.use_idle_class()
            else:
                self._priority.use_low_priority()

    def _note_trainer_gone(self) -> None:
        # Training has ended, and a restarted trainer must wait for this saver. So run at full priority.
        self._is_ending = True
        self._hurry()
        self._set_priority()
        self._monitor.note_trainer_gone()
        self._committer.mark_trainer_dead()

    def _finish(self) -> None:
        with self._changed:
            self._is_over = True
            self._set_priority()
            self._changed.notify_all()
        self._worker.join()

    # Shared by both threads

    def _add(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            # Before the committing thread wakes: in the idle class it could take a lock and then be suspended.
            self._set_priority()
            self._changed.notify_all()

    def _is_idle(self) -> bool:
        with self._changed:
            return not (self._jobs or self._is_working or self._delayed)

    def _on_lease(self, only: Ticket | None) -> None:
        if only is None:
            self._confirm_lease()
            return
        # On the thread of a link, which must not wait for a trainer whose socket is full.
        self._promised.put(only)
        os.eventfd_write(self._bell, 1)

    def send_promises(self) -> None:
        """Report tickets that all ranks have staged. On any thread that may wait for the trainer."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._confirm_lease(only=self._promised.get_nowait())

    def _confirm_lease(self, seen: Ticket | None = None, only: Ticket | None = None) -> None:
        """Report for every ticket that the lease is held, provided the trainer is alive to notice. On any thread.

        Args:
            seen: A ticket for which the trainer was seen alive while the lease was held already.
            only: Report for no other ticket than this one. In a job of many ranks: all ranks have staged it.
        """
        with self._reporting:
            with self._changed:
                waiting = [
                    ticket for ticket in self._tickets.values() if not ticket.has_lease and only in (None, ticket)
                ]
                # Checked after the lease was taken: a trainer that restarts from now on finds the lease.
                if waiting and not self._trainer.is_alive:
                    waiting = [ticket for ticket in waiting if ticket is seen]
                for ticket in waiting:
                    ticket.has_lease = ticket.may_outlive_trainer = True
            for ticket in waiting:
                self.channel.send(protocol.Began(ticket.number))

    # On the committing thread

    def _work(self) -> None:
        try:
            self._work_off()
        except BaseException:
            # Unfinished tickets would never end. The death of this process ends them in the trainer.
            _log.critical("internal error in the saver", exc_info=True)
            os._exit(1)

    def _work_off(self) -> None:
        while True:
            with self._changed:
                self._is_working = False
                self._is_hurried = self._is_hurried and any(map(self._is_waited_for, self._jobs))
                # Wake the listening thread: it may wait for this job to end, and it sets the next priority.
                os.eventfd_write(self._bell, 1)
                self._changed.wait_for(lambda: self._jobs or self._is_over)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._is_working = True
            if isinstance(job, Ticket):
                self._committer.commit(job)
                self._ended.add(job.number)
                self._free_slots()
                if job.number in self._ended:
                    self.channel.send(protocol.Retained(job.number))
            elif isinstance(job, protocol.Decline):
                self._committer.decline(job)
            elif isinstance(job, protocol.Forget):
                self._committer.release_retained()
                self._free_slots()
            elif isinstance(job, protocol.Warm):
                self._warm(job)
                self.channel.send(protocol.Answer(job.question))
            else:
                self._committer.release()
                self._free_slots()
                self.channel.send(protocol.Answer(job.question))

    def _is_waited_for(self, job: Job) -> bool:
        """Whether the trainer waits for this job. If it waits at all, it waits for all jobs of that moment."""
        if isinstance(job, protocol.Decline):
            return False
        return isinstance(job, protocol.Release | protocol.Forget | protocol.Warm) or job.number <= self._hurried_last

    def _warm(self, job: protocol.Warm) -> None:
        """Map memory for future states and allocate write blocks, until other work arrives."""
        steps = [self._committer.warm(job.block_count, job.nbytes), *(slot.map_ahead() for slot in self._arena.slots)]
        for _ in itertools.chain.from_iterable(steps):
            if self._jobs or self._delayed or self._is_ending:
                return

    def _free_slots(self) -> None:
        """Report the slots of ended tickets that the next commit does not need as free."""
        free = self._ended - self._committer.retained_tickets
        self._ended -= free
        with self._changed:
            for number in free:
                self._tickets.pop(number).leave()
        for number in sorted(free):
            self.channel.send(protocol.SlotFree(number))


class Priority:
    """The scheduling priority of all threads of the saver. Thread-safe.

    - Low priority, while a commit runs and training continues: the policy's nice value. Training that uses every
      processor leaves the saver about a thirtieth of one.
    - Full priority, while the trainer waits: the priority that the process was started with.
    - Idle class (SCHED_IDLE, sched(7)), while a state is being copied and between commits. Such a thread gives up its
      processor to any other thread, so that the copy threads are scheduled onto it. A waking thread still gets a
      processor until the next tick; see ``Begin.start_delay_ms``.

    Returning to full priority needs ``CAP_SYS_NICE`` or a limit (``ulimit -e``), and ``CAP_SYS_ADMIN`` for autogroups.
    If that is refused, the saver keeps its low priority, and never enters the idle class, which it could not leave.

    Args:
        nice: Added to the initial nice value at low priority.
    """

    def __init__(self, nice: int) -> None:
        self._nice = nice
        self._base = os.getpriority(os.PRIO_PROCESS, 0)
        self._group_base = _autogroup_nice()
        self._lock = threading.Lock()
        self._last: tuple[int, bool] | None = None
        self._may_use_idle_class: bool | None = None
        self._others_count = max(1, len(os.sched_getaffinity(0)) - 1)
        self.thread_limit = ThreadLimit()
        """How many threads may hash and encode. At low priority, one processor is left free."""

    def use_low_priority(self) -> None:
        """Let other processes run first."""
        self._set(self._nice, is_idle=False)

    def use_idle_class(self) -> None:
        """Give up every processor that others want. Without effect if the saver's nice value is 0."""
        self._set(self._nice, is_idle=self._nice > 0)

    def use_full_priority(self) -> None:
        """Return to the initial priority, if the system allows that."""
        self._set(0, is_idle=False)

    def _set(self, added: int, *, is_idle: bool) -> None:
        with self._lock:
            self.thread_limit.maximum = self._others_count if added else None
            if self._may_use_idle_class is None and is_idle:
                self._may_use_idle_class = _may_leave_idle_class()
            wanted = (added, is_idle and self._may_use_idle_class is True)
            if wanted != self._last:
                self._set_all(*wanted)
                self._last = wanted

    def _set_all(self, added: int, is_idle: bool) -> None:
        nice = min(NICE_MAX, self._base + added)
        # The listening thread must stay responsive to leave the idle class, and others judge by the heartbeat thread.
        awake = {
            os.getpid(),
            *(thread.native_id for thread in threading.enumerate() if thread.name in _AWAKE_THREADS),
        }
        # Priority belongs to a thread. A thread that starts meanwhile inherits it, perhaps the old one: so repeat.
        done: set[int] = set()
        while new := _threads() - done:
            for thread_id in new:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, thread_id, nice)
                if self._may_use_idle_class and thread_id not in awake:
                    with contextlib.suppress(OSError):
                        os.sched_setscheduler(thread_id, os.SCHED_IDLE if is_idle else os.SCHED_OTHER, _NORMAL)
            done |= new
        if self._group_base is not None:
            # Where the kernel groups processes by session, nice values only count within the session's group.
            with contextlib.suppress(OSError):
                Path("/proc/self/autogroup").write_text(str(min(NICE_MAX, self._group_base + added)))


def _threads() -> set[int]:
    """Return the ids of all threads of this process."""
    if proc_is_ours():
        return {int(thread.name) for thread in Path("/proc/self/task").iterdir()}
    # The /proc of another pid namespace uses other numbers. Only the threads that Python has started are known then.
    return {os.getpid(), *(thread.native_id for thread in threading.enumerate() if thread.native_id)}


def _may_leave_idle_class() -> bool:
    """Return whether a thread of this process that has entered the idle class may leave it."""
    # Tried on a sleeping thread. Capabilities do not tell, because they may be void in a user namespace.
    is_over = Latch()
    thread = threading.Thread(target=is_over.wait, name="ckstore-priority", daemon=True)
    try:
        thread.start()
        for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
            os.sched_setscheduler(thread.native_id or 0, policy, _NORMAL)
        return True
    except (OSError, RuntimeError):
        return False
    finally:
        is_over.set()


def _autogroup_nice() -> int | None:
    """Return the nice value of this session's autogroup, or None. Its file holds ``/autogroup-25 nice 0``, say."""
    try:
        return int(Path("/proc/self/autogroup").read_text().rpartition(" ")[2])
    except (OSError, ValueError):
        return None
