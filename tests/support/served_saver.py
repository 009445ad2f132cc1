"""A saver's server on a thread of the test; the test sends and receives the messages of the protocol.

Tests use only what its trainer sees: the socket, the bell, the arena, and the store on disk. The priority of its
process is a fake that records what it is set to.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from ckstore.background import protocol
from ckstore.background.arena import STAGED, Arena
from ckstore.background.protocol import error_of
from ckstore.background.saver.server import Server
from ckstore.concurrency import ThreadLimit
from ckstore.processes import process_started
from support.saver_harness import SECONDS_MAX, lay_out, stage_storages, until

LONG_MS = int(20e3 * SECONDS_MAX)
"""To hold back for longer than any test waits."""

NICE = 7


class AskedThreadLimit(ThreadLimit):
    """A thread limit that also asks a test whether a thread may begin, while not all may."""

    def __init__(self):
        super().__init__()
        self.is_due = lambda index: True

    def allows(self, thread_index):
        return super().allows(thread_index) and (self.maximum is None or self.is_due(thread_index))


class Levels:
    """A priority that changes nothing: it notes each level when it is set to another one."""

    def __init__(self):
        self.thread_limit = AskedThreadLimit()
        self.changes = []
        self.on_change = lambda level: None

    @property
    def now(self):
        return self.changes[-1] if self.changes else None

    def use_low_priority(self):
        self._note("low")

    def use_idle_class(self):
        self._note("idle")

    def use_full_priority(self):
        self._note("full")

    def _note(self, level):
        if level != self.now:
            self.changes.append(level)
            self.on_change(level)


class Gate:
    """Keeps the threads of commits from beginning chunks, as the thread limit of a priority may, until it is opened.

    Args:
        priority: Whose thread_limit decides as this gate does from now on.
        most: How many threads may begin at most.
    """

    def __init__(self, priority, most=1):
        self.asked = []
        """The indices of the threads that have asked whether they may begin, one after the other."""
        self.admitted = set()
        """Those that may begin."""
        self._priority = priority
        priority.thread_limit.is_due, priority.thread_limit.maximum = self._is_due, most

    def _is_due(self, index):
        self.asked.append(index)
        return index in self.admitted

    def open(self):
        self._priority.thread_limit.maximum = None


class Begun:
    """A ticket of a served saver, and its events."""

    def __init__(self, saver, number, slot, captured, places):
        self.number, self.slot = number, slot
        self._saver, self._captured, self._places = saver, captured, places

    def stage(self, units=None):
        """Copy all storages, or as much as fits into the first units of the slot; mark these, and ring."""
        stage_storages(self.slot, self._captured, self._places, units)
        self._saver.ring()
        return self

    def finish(self):
        """Say that all is staged."""
        self.slot.state = STAGED
        self._saver.say(protocol.Staged(self.number))
        self._saver.ring()
        return self

    @property
    def staged_units(self):
        """How many units at the beginning of the slot are marked."""
        return int(self.slot.marks.argmin())

    def abort(self):
        """Give it up."""
        self._saver.say(protocol.Abort(self.number))
        return self

    def hear(self, kind):
        return self._saver.hear(kind, ticket=self.number)

    @property
    def events(self):
        """Return the kinds of what was said of it by now, but for how far it is."""
        message = [each for each in self._saver.heard() if getattr(each, "ticket", None) == self.number]
        return [type(each).__name__ for each in message if not isinstance(each, protocol.Progress)]

    def result(self):
        """Wait for the end; return the receipt, or raise the error."""
        message = self.hear((protocol.Done, protocol.Failed))
        if isinstance(message, protocol.Failed):
            raise error_of(message)
        return message.receipt

    def wait(self):
        """Wait until the slot is free, too."""
        self.hear(protocol.SlotFree)
        return self.result()


class ServedSaver:
    """A server, and the trainer's end of its socket, bell and arena; close it.

    Args:
        address: The store.
        run: The run.
        slot_count: Of the arena.
        has_trainer: Whether the trainer is a process of its own, which can be killed; else it is this one.
        is_served: Whether it serves immediately; otherwise after ``serve``, and earlier messages wait.
        engine: What moves packs.
        leave_seconds: For how long a trainer that says nothing keeps one that was asked to end; None: as long as ever.
        role: What it does: ``commits`` or ``journal``.
    """

    def __init__(
        self,
        address,
        run="main",
        *,
        slot_count=2,
        has_trainer=False,
        is_served=True,
        engine="auto",
        leave_seconds=None,
        role="commits",
    ):
        self.address = str(address)
        self.end, self.savers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.arena = Arena.create(slot_count=slot_count)
        self.savers_arena = Arena.attach(os.dup(self.arena.fd))
        self.priority = Levels()
        self.ticket = self._question = 0
        self._trainer = subprocess.Popen(["sleep", "600"]) if has_trainer else None
        self.trainer_pid = os.getpid() if self._trainer is None else self._trainer.pid
        self._hello = protocol.Hello(
            os.fsencode(self.address),
            run,
            engine,
            self.trainer_pid,
            process_started(self.trainer_pid),
            NICE,
            30,
            role=role,
        )
        self._leave_seconds = leave_seconds
        self._heard, self._codes = [], []
        self.has_fault = False
        self._thread = threading.Thread(target=self._serve, name="served-saver", daemon=True)
        if is_served:
            self.serve()

    def serve(self):
        """Let the server begin; it finds what was said before."""
        self._server = Server(self.savers_end, self.bell, self.savers_arena, self._hello, self.priority)
        if self._leave_seconds is not None:
            self._server.leave_seconds = self._leave_seconds
        self._thread.start()
        return self

    def _serve(self):
        self._codes.append(self._server.serve())

    # What a trainer does

    def say(self, *said):
        for message in said:
            protocol.send(self.end, message)
        return self

    def ring(self):
        os.eventfd_write(self.bell, 1)

    def begin(
        self, state, step, *, slot=0, parent=None, parent_ticket=0, may_retain=False, start_delay_ms=0, lease="", **head
    ):
        """Begin a ticket of which nothing is staged but its head."""
        self.ticket += 1
        room, captured, places, place, nbytes = lay_out(self.arena, self.ticket, state, step, slot=slot, **head)
        self.say(
            protocol.Begin(self.ticket, slot, place, nbytes, parent, parent_ticket, may_retain, start_delay_ms, lease)
        )
        return Begun(self, self.ticket, room, captured, places)

    def begin_nonsense(self, *, slot=0, start_delay_ms=0):
        """Begin a ticket whose head means nothing."""
        self.ticket += 1
        room = self.arena.slots[slot]
        room.reserve(100)
        room.start(self.ticket, 100)
        room.view(0, 100)[:] = b"\xff" * 100
        self.say(protocol.Begin(self.ticket, slot, 0, 100, None, 0, False, start_delay_ms))
        return Begun(self, self.ticket, room, None, ())

    def commit(self, state, step, **options):
        """Stage a state, and wait until it is durable and its slot is free."""
        return self.begin(state, step, **options).stage().finish().wait()

    def ask(self, kind, **facts):
        """Ask something; return its number, which the answer has."""
        self._question += 1
        self.say(kind(question=self._question, **facts))
        return self._question

    def release_lease(self):
        """Have the lease given up, and wait for that."""
        self.hear(protocol.Answer, question=self.ask(protocol.Release))

    def ask_to_end(self):
        """Ask it to end, as a signal does."""
        self._server.ask_to_end()

    def hang_up(self):
        """Close the trainer's end of the socket."""
        self.end.close()

    def kill_trainer(self):
        """Kill the trainer's process; its end of the socket stays open, as it does where a child of it lives on."""
        self._trainer.send_signal(signal.SIGKILL)
        self._trainer.wait()

    # What a trainer hears

    def hear(self, kind, **facts):
        """Return the first message of a kind with these facts, which may have come before; wait for it."""
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            is_over = self.has_ended or time.monotonic() > deadline
            for message in self.heard():
                if isinstance(message, kind) and all(getattr(message, name) == fact for name, fact in facts.items()):
                    return message
            assert not self.has_fault, "the saver has met a fault of its own, which it has logged"
            assert not is_over, f"{kind} {facts} was not said, but {self._heard}"
            select.select([self.end], [], [], 0.1)

    def heard(self):
        """Return all that was said by now."""
        while self.end.fileno() >= 0:
            try:
                message = protocol.receive(self.end, protocol.TO_TRAINER)
            except BlockingIOError:
                break
            if message is None:
                break
            self._heard.append(message)
        return list(self._heard)

    @property
    def has_word(self):
        """Whether something was said that was not heard yet."""
        return self.end.fileno() >= 0 and bool(select.select([self.end], [], [], 0)[0])

    # What is known from outside

    @property
    def rings_left(self):
        """How often the bell was rung that the saver has not handled yet."""
        lines = Path(f"/proc/self/fdinfo/{self.bell}").read_text().splitlines()
        return next(int(line.split()[1], 16) for line in lines if line.startswith("eventfd-count"))

    def settle(self):
        """Wait until all was taken note of that was said before; not while it holds back, when no bell is heard."""
        # When it hears the second ring it has done what it does after the first.
        for _ in range(2):
            self.ring()
            until(lambda: self.rings_left == 0, "an ear for the bell")

    @property
    def has_ended(self):
        return bool(self._codes)

    def code(self):
        """Wait for the end; return the exit code."""
        self._thread.join(SECONDS_MAX)
        assert self._codes, "the saver has not ended"
        return self._codes[0]

    def close(self):
        """End it, whatever it does."""
        self.priority.thread_limit.maximum = None
        if self._thread.is_alive():
            with contextlib.suppress(OSError):
                self.say(*(protocol.Abort(number) for number in range(1, self.ticket + 1)))
            self.hang_up()
            self.code()
        self.end.close()
        self.savers_end.close()
        os.close(self.bell)
        for arena in (self.savers_arena, self.arena):
            arena.close()
        if self._trainer is not None:
            self.kill_trainer()
