"""The saver's loop: take staged states, commit them as a synchronous commit would, report, and outlive the trainer.

One thread listens to the trainer and watches it; another one commits, one ticket after the other.

Invariants:
- A ticket that is whole when the trainer dies, and whose lease was held while it lived, is published; another is not.
- The saver ends when the trainer is dead or has said so, or says nothing to one that a signal asks to, and nothing is
  left to do; the lease is given up at last.
- What cannot be understood ends the connection: nothing is guessed. What was whole is published all the same.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import signal
import socket
import threading
from collections import deque
from pathlib import Path

from ckstore.background import protocol
from ckstore.background.arena import Arena
from ckstore.background.protocol import Channel, ProcessWatch
from ckstore.background.saver.committer import Committer
from ckstore.background.saver.staged_state import DelayedBegin, Job, StagingMonitor, Ticket
from ckstore.background.staged_head import decode_head
from ckstore.clock import SYSTEM_CLOCK
from ckstore.commit.pipeline import WRITE_BLOCKS, WRITE_BLOCKS_MIN
from ckstore.concurrency import Latch, ThreadLimit
from ckstore.errors import CapacityError, CkstoreError, MalformedError, SaverError
from ckstore.processes import JOB_SIGNALS, proc_is_ours
from ckstore.store.lease import HEARTBEAT_THREAD_NAME

_log = logging.getLogger("ckstore")

BELL_PAUSE_MS = 1
"""After the bell has rung, until it is listened for again: it rings some ten times as often while a state is copied."""


class Server:
    """One saver."""

    leave_seconds = 5.0
    """For a trainer to let a saver go that a signal has asked to end; one that is stopped does not."""

    def __init__(self, end: socket.socket, bell: int, arena: Arena, hello: protocol.Hello, priority: Priority) -> None:
        self._socket = end
        self._bell = bell
        self._arena = arena
        self._priority = priority
        self._is_hurried = False
        self._hurried_last = 0
        """The last ticket that there was when somebody waited."""
        self._trainer = ProcessWatch(hello.trainer_pid, hello.trainer_started)
        self.channel = Channel(end, self._trainer)
        self._monitor = StagingMonitor()
        self._changed = threading.Condition()
        self._telling = threading.Lock()
        """Nothing is told of a ticket after its end."""
        self._jobs: deque[Job] = deque()
        self._delayed: list[DelayedBegin] = []
        """The listening thread's; another one may look whether there is one."""
        self._delayed_until = 0.0
        self._is_working = self._has_read_socket = False
        self._is_end_requested = self._has_sent_leaving = self._is_ending = (
            False  # By a signal; what is begun now is too late.
        )
        self._leave_at: float | None = None  # When to end that was asked, if the trainer says nothing to it.
        self._is_over = False
        self._tickets: dict[int, Ticket] = {}
        """Those whose slots are in use: they are to be committed, or the next commit may be coded against them."""
        self._last = 0
        self._ended: set[int] = set()
        """Tickets that have ended, and whose slots were not given back; the committing thread's."""
        self._committer = Committer(hello, self.channel.send, self._confirm_lease, priority.thread_limit)
        self._worker = threading.Thread(target=self._work, name="ckstore-commit", daemon=True)

    def run(self) -> int:
        """Serve until the end, as a process that signals may ask to end; return the exit code."""
        signal.signal(signal.SIGTERM, lambda number, frame: self.ask_to_end())
        # Ctrl-C, and whatever else a terminal or a scheduler sends to all processes of a job, is the trainer's affair.
        signal.pthread_sigmask(signal.SIG_SETMASK, JOB_SIGNALS - {signal.SIGTERM})
        return self.serve()

    def serve(self) -> int:
        """Serve until the end, on any thread, whatever signals come; return the exit code."""
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
            _log.error("the saver cannot understand its trainer, and ends: %s", error)
            # What was said before that counts, unless it is what cannot be understood.
            with contextlib.suppress(CkstoreError):
                self._begin_delayed()
            self._note_trainer_gone()
        self._finish()
        self._committer.close()
        self._trainer.close()
        if problem is not None:
            return getattr(problem, "exit_code", 1)
        # A trainer that lives was told of every error.
        return self._committer.exit_code if self._monitor.is_trainer_gone else 0

    def ask_to_end(self) -> None:
        """Have the listening thread ask the trainer whether to end; called by a signal, in the middle of anything."""
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
            # First whether it is dead, then what it said: all that it said before counts.
            is_alive = self._trainer.is_alive
            has_rung = self._has_rung()
            is_open = self._receive_all()
            self._has_read_socket = True
            if not (is_alive and is_open) or SYSTEM_CLOCK.monotonic() >= self._delayed_until:
                self._begin_delayed()
            self._leave_in_time()
            # No other thread does it: one that put itself aside would hold up whoever wants what it has locked.
            self._set_priority()
            self._monitor.notify()
            if not (is_alive and is_open):
                # A socket that nobody holds any more is the end too: nobody could stage or ask for anything.
                self._note_trainer_gone()
                return
            if self._delayed:
                # Whoever copies rings for every unit.
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
            # First the lease, then the trainer, as in ``_confirm_lease``.
            is_granted = self._committer.holds_lease and self._trainer.is_alive
            # What was said before it could listen was not said too late.
            is_late = self._is_ending and self._has_read_socket
            if not self._delayed:
                self._delayed_until = SYSTEM_CLOCK.monotonic() + message.start_delay_ms / 1e3
            self._delayed.append(DelayedBegin(message, is_granted=is_granted, is_late=is_late))
            if message.start_delay_ms and not is_late:
                self._set_priority()
                return
        if isinstance(message, protocol.Hurry):
            # Before what was held begins: a thread that wakes in the idle class may hold the GIL, and no processor.
            self._hurry()
        self._begin_delayed()
        if isinstance(message, protocol.Abort):
            self._abort(message.ticket)
        elif isinstance(message, (protocol.Release, protocol.Forget)):
            self._add(message)
        elif isinstance(message, protocol.Warm):
            if not WRITE_BLOCKS_MIN <= message.block_count <= WRITE_BLOCKS:
                raise MalformedError("write blocks were asked for that no commit has", where=repr(message))
            for slot in self._arena.slots:
                # What it is too short of memory for is told by the ticket that wants it.
                with contextlib.suppress(CapacityError):
                    slot.refresh()
            self._add(message)
        elif isinstance(message, protocol.Quit):
            self._is_ending = True
            if not (message.is_parting or self._is_idle()):
                # Its handle was dropped: another one, of the same process perhaps, must not resume what is older.
                self._committer.mark_trainer_dead()
        elif isinstance(message, protocol.Hurry):
            self._hurry()
        elif isinstance(message, protocol.Staged):
            if (ticket := self._tickets.get(message.ticket)) is not None:
                ticket.note_staged()
        elif not isinstance(message, protocol.Begin):
            raise MalformedError(f"a {type(message).__name__} message came where none belongs")
        self._set_priority()

    def _begin_delayed(self) -> None:
        """Take note of what was begun, and waited until now."""
        while self._delayed:
            self._begin(self._delayed.pop(0))

    def _begin(self, held: DelayedBegin) -> None:
        message = held.message
        if message.ticket <= self._last or message.slot >= len(self._arena.slots):
            raise MalformedError("a ticket is out of order, or of a slot that is not there", where=repr(message))
        slot = self._arena.slots[message.slot]
        with self._changed:
            is_taken = any(ticket.is_in(slot) for ticket in self._tickets.values())
        if is_taken:
            raise MalformedError("a slot was begun that is not free", where=repr(message))
        self._last = message.ticket
        try:
            if held.is_late:
                raise SaverError("the saver is ending", todo="commit again: that starts a new one")
            slot.refresh()
            if message.head_place + message.head_nbytes > slot.nbytes or slot.ticket != message.ticket:
                raise MalformedError("the head of a ticket does not lie in its slot", where=repr(message))
            head = decode_head(bytes(slot.view(message.head_place, message.head_nbytes)), slot_nbytes=slot.nbytes)
        except CkstoreError as error:
            self.channel.send(protocol.failed_of(message.ticket, error))
            self.channel.send(protocol.SlotFree(message.ticket))
            return
        ticket = Ticket(message.ticket, slot, head, self._monitor, parents=(message.parent, message.parent_ticket))
        ticket.may_retain = message.may_retain
        self._committer.announce(head.step)
        with self._changed:
            self._tickets[ticket.number] = ticket
        # Before the other thread can get at it, and end it; it may have been taken over meanwhile.
        is_transferred = self._committer.was_transferred(message.lease)
        if is_transferred or self._committer.holds_lease:
            self._confirm_lease(ticket if is_transferred or held.is_granted else None)
        self._add(ticket)

    def _abort(self, number: int) -> None:
        """Give a ticket up: at once where nothing of it has begun, else at the next look."""
        with self._telling:
            with self._changed:
                ticket = self._tickets.get(number)
                is_waiting = any(job is ticket for job in self._jobs)
                if ticket is not None and is_waiting:
                    self._jobs.remove(ticket)
                    del self._tickets[number]
                    # The thread that commits says so at the end of a job, and may have none.
                    self._is_hurried = self._is_hurried and bool(self._jobs or self._is_working)
            if ticket is not None:
                ticket.abort()
            if ticket is not None and is_waiting:
                self._committer.give_up(ticket)
                ticket.leave()
                self.channel.send(protocol.SlotFree(number))

    def _leave_in_time(self) -> None:
        """Where a signal has asked to end: let the trainer say when, who may be about to begin something."""
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
            # What was held may have failed to begin since it was hurried.
            self._is_hurried = bool(self._jobs or self._is_working or self._delayed)
            if not self._is_hurried:
                return
            self._hurried_last = max([self._last, *(each.message.ticket for each in self._delayed)])
            self._set_priority()

    def _set_priority(self) -> None:
        """Hurry while somebody waits; stand aside while a state is copied, or nothing is to do; give way otherwise."""
        with self._changed:
            is_idle = not (self._jobs or self._is_working)
            if self._is_hurried or self._is_over or (self._is_ending and is_idle):
                self._priority.hurry()
            elif is_idle or self._delayed or any(ticket.is_being_copied for ticket in self._tickets.values()):
                # Before the next state comes: told by its first message, threads would compute on until they heard.
                self._priority.use_idle_class()
            else:
                self._priority.use_low_priority()

    def _note_trainer_gone(self) -> None:
        # Nobody trains any more, and whoever starts the run again has to wait.
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

    # The committing thread

    def _add(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            # Before it wakes: it might lock something, and have no processor to unlock it.
            self._set_priority()
            self._changed.notify_all()

    def _is_idle(self) -> bool:
        with self._changed:
            return not (self._jobs or self._is_working or self._delayed)

    def _confirm_lease(self, seen: Ticket | None = None) -> None:
        """Tell every ticket that the lease is held for it, if the trainer lives to see that.

        Args:
            seen: It did when this one came, and the lease was held then.
        """
        with self._telling:
            with self._changed:
                waiting = [ticket for ticket in self._tickets.values() if not ticket.has_lease]
                # After the lease was taken: from now on a trainer that is started again finds it.
                if waiting and not self._trainer.is_alive:
                    waiting = [ticket for ticket in waiting if ticket is seen]
                for ticket in waiting:
                    ticket.has_lease = True
            for ticket in waiting:
                self.channel.send(protocol.Began(ticket.number))

    def _work(self) -> None:
        try:
            self._work_off()
        except BaseException:
            # Nobody would end the tickets that are left: let the trainer see the saver die.
            _log.critical("the saver met a fault of its own", exc_info=True)
            os._exit(1)

    def _work_off(self) -> None:
        while True:
            with self._changed:
                self._is_working = False
                self._is_hurried = self._is_hurried and any(map(self._is_waited_for, self._jobs))
                # Whoever listens may be waiting for this one to end, and says what priority comes next.
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
        """Whether whoever has waited since the last idle moment waits for this one too."""
        return isinstance(job, protocol.Release | protocol.Forget | protocol.Warm) or job.number <= self._hurried_last

    def _warm(self, job: protocol.Warm) -> None:
        """Map what memory was taken for states to come, and take what else they need, until there is more to do."""
        steps = [self._committer.warm(job.block_count, job.nbytes), *(slot.map_ahead() for slot in self._arena.slots)]
        for _ in itertools.chain.from_iterable(steps):
            if self._jobs or self._delayed or self._is_ending:
                return

    def _free_slots(self) -> None:
        """Give back the slots of tickets that have ended, and that hold nothing of what the next one wants."""
        free = self._ended - self._committer.retained_tickets
        self._ended -= free
        with self._changed:
            for number in free:
                self._tickets.pop(number).leave()
        for number in sorted(free):
            self.channel.send(protocol.SlotFree(number))


NICE_MAX = 19


_NORMAL = os.sched_param(0)
"""The only one that these classes have."""


class Priority:
    """The priority of this process, all threads of it; thread-safe.

    Args:
        nice: Added to the niceness that the process was started with, while it gives way.
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
        """How many threads may hash and code: while the saver gives way, one fewer than there are processors."""

    def use_low_priority(self) -> None:
        """Let others go first."""
        self._set(self._nice, is_idle=False)

    def use_idle_class(self) -> None:
        """Let others have every processor that they want, at once; who is not to give way does not do this either."""
        self._set(self._nice, is_idle=self._nice > 0)

    def hurry(self) -> None:
        """Be as important as the process was when it was started, where the system allows that."""
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
        # The thread that listens: what it hears is when this ends. And the lease's: others judge by it who lives.
        awake = {
            os.getpid(),
            *(thread.native_id for thread in threading.enumerate() if thread.name == HEARTBEAT_THREAD_NAME),
        }
        # Niceness belongs to a thread; one that is started later has that of its maker, which may be the old one still.
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
            # A session has its own share where the kernel groups processes by session: niceness counts within it only.
            with contextlib.suppress(OSError):
                Path("/proc/self/autogroup").write_text(str(min(NICE_MAX, self._group_base + added)))


def _threads() -> set[int]:
    """Return the ids of all threads of this process."""
    if proc_is_ours():
        return {int(thread.name) for thread in Path("/proc/self/task").iterdir()}
    # Another pid namespace's /proc gives them numbers that are other processes' here: then only Python's own are known.
    return {os.getpid(), *(thread.native_id for thread in threading.enumerate() if thread.native_id)}


def _may_leave_idle_class() -> bool:
    """Return whether a thread of this process that has entered the idle class may leave it."""
    # Capabilities do not tell: in a user namespace they are not worth what they say. A thread that sleeps is asked.
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
    """Return the niceness of this session's group, as ``/autogroup-25 nice 0`` says it; None where there is none."""
    try:
        return int(Path("/proc/self/autogroup").read_text().rpartition(" ")[2])
    except (OSError, ValueError):
        return None
