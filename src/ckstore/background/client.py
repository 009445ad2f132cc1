"""The trainer's client of a saver process: start it, send tickets, receive their results, stop it.

A ticket is the number of one background commit. ``tickets.py`` matches the saver's messages to callers.

Invariants:
- Every begun ticket ends in exactly one call of ``on_done`` or ``on_failed``, followed by one call of ``on_free``. This
  holds even if the saver dies.
- The death of the saver is detected by pidfd. The end of the socket does not prove it, because a forked child may hold
  the socket open.
- One thread receives all messages. It sleeps until a message arrives, so it does not disturb training. In a job of many
  ranks it also looks four times a second whether the saver was stopped by a signal.
- Every wait for the saver also ends when the saver dies. A forked child cannot use its parent's saver.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import threading
import weakref
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from ckstore.background import protocol
from ckstore.background.arena import Arena
from ckstore.background.protocol import Message, ProcessWatch
from ckstore.background.tickets import Callbacks, Questions, Tickets
from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.concurrency import Latch, log_safely
from ckstore.config import EngineName
from ckstore.errors import CkstoreError, SaverError, UsageError
from ckstore.processes import StopTimer, close_in_children, is_stopped, process_started, start_python

_log = logging.getLogger("ckstore")

WARN_AFTER_SECONDS = 10.0
"""A wait that takes longer logs a warning, then again every six times as long."""

GRACE_SECONDS = 5.0
"""Time for a saver to exit after it has closed its socket."""

SEND_RETRY_SECONDS = 0.02
"""Between two attempts to send while the socket is full, which takes hundreds of unread messages."""

_LOOK_MS = 250
"""Between two looks whether the saver is stopped. The other ranks wait for the result."""

_NO_RULES: Mapping[str, Any] = MappingProxyType({})

_WORK_MESSAGES = (protocol.Begin, protocol.Release, protocol.Warm, protocol.Forget, protocol.Quit)
"""Messages that give the saver work."""


class Saver:
    """A saver process, as seen by its trainer. Thread-safe."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: socket.socket,
        bell: int,
        watch: ProcessWatch,
        clock: Clock,
        stopped_seconds_max: float | None = None,
    ) -> None:
        self._process = process
        self._stop_timer, self._stopped_seconds_max = StopTimer(process.pid), stopped_seconds_max
        self._channel = channel
        self.bell = bell
        """The eventfd that wakes the saver when more bytes are staged. Stays open as long as this object."""
        # Not closed when the saver dies: another file could get the same number while a thread still writes to it.
        self._close_bell = weakref.finalize(self, os.close, bell)
        self._watch = watch
        self._clock = clock
        self._owner = os.getpid()
        self.lease: str | None = ""
        """Token of the lease that was transferred to the saver. None: asked to give it up, and not yet confirmed."""
        # Reentrant: garbage collection in the middle of a send may finalize a store, which sends Quit on this thread.
        self._sending = threading.RLock()
        # Identify the last message that gave work, and the one for which the saver was last asked to hurry.
        self._last_request, self._hurried_request = object(), object()
        self._tickets, self._answers = Tickets(), Questions()
        self._ready, self._dead = Latch(), Latch()
        self._is_leaving = False
        """Whether a signal asked the saver to end."""
        self._death_cause: Exception | None = None
        self._listener = threading.Thread(target=self._listen, name="ckstore-saver", daemon=True)
        close_in_children(self)

    @classmethod
    def start(
        cls,
        address: str,
        run: str,
        arena: Arena,
        *,
        nice: int = 19,
        engine: EngineName = "auto",
        retention: Mapping[str, Any] = _NO_RULES,
        clock: Clock = SYSTEM_CLOCK,
        store_id: str = "",
        job: bytes = b"",
        listener: int | None = None,
        stopped_seconds_max: float | None = None,
        role: str = "commits",
    ) -> Saver:
        """Start a saver process. Return without waiting for it; tickets may be sent immediately.

        Args:
            address: Folder or URL of the store. It is sent over the socket and never appears on a command line.
            run: The run to commit to.
            arena: Shared memory for staged states, which the saver maps too.
            nice: Added to the saver's nice value.
            engine: I/O engine for packs.
            retention: Rules by which checkpoints may be deleted when the disk is full.
            clock: Time source.
            store_id: Identity of the store in hexadecimal; the saver refuses any other store. Empty: any store.
            job: The job of many ranks; empty: there is none.
            listener: Rank 0 of such a job: the socket on which the saver accepts the others.
            stopped_seconds_max: Kill the saver when it has been stopped by a signal for so long; None: wait for it.
            role: What it does: ``commits`` or ``journal``.

        Raises:
            SaverError: The process or its listening thread cannot be started.
        """
        try:
            hello = protocol.hello_to(address, run, engine, nice, retention, store_id, job, role)
            process, channel, bell = launch(hello, arena.fd, listener)
        except OSError as error:
            raise SaverError(f"cannot start a saver process ({error})", todo="use commit instead") from error
        watch = ProcessWatch(process.pid, process_started(process.pid) or "")
        saver = cls(process, channel, bell, watch, clock, stopped_seconds_max)
        try:
            saver._listener.start()
        except RuntimeError as error:
            saver._death_cause = SaverError(
                f"cannot start a thread that listens to the saver ({error})", todo="use commit instead"
            )
            process.kill()
            saver._reap()
            raise saver._death_error() from error
        return saver

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the saver is alive and connected, and this process started it."""
        return not self._dead.is_set() and self._owner == os.getpid()

    @property
    def takes_tickets(self) -> bool:
        """Whether the saver accepts tickets: it is alive, and no signal has asked it to end."""
        return self.is_alive and not self._tickets.is_closed

    def begin(
        self,
        ticket: int,
        slot: int,
        head_place: int,
        head_nbytes: int,
        callbacks: Callbacks,
        *,
        parent: int | None = None,
        parent_ticket: int = 0,
        may_retain: bool = False,
        start_delay_ms: int = 0,
        number: int = 0,
    ) -> None:
        """Send ``Begin`` for a slot whose head is complete and whose state is being staged.

        Args:
            ticket: Number of the commit, greater than all earlier ones.
            slot: Index of the slot.
            head_place: Offset of the head in the slot.
            head_nbytes: Length of the head.
            callbacks: Called as the commit progresses.
            parent: The seq of the checkpoint that this state continues.
            parent_ticket: The earlier ticket that this state continues. If that was published, it replaces ``parent``.
            may_retain: Whether the saver may keep the slot as the delta base of the next commit.
            start_delay_ms: How long the saver leaves all processors to the copy threads.
            number: In a job of many ranks: the number of this background commit.

        Raises:
            SaverError: The saver is dead, or about to end. No callback will be called.
            UsageError: This is a forked child.
        """
        self._check_owner()
        if not self._tickets.add(ticket, callbacks):
            raise self._death_error()
        try:
            options = parent, parent_ticket, may_retain, start_delay_ms, self.lease or "", number
            self._send(protocol.Begin(ticket, slot, head_place, head_nbytes, *options))
        except BaseException:
            self._tickets.remove(ticket)
            raise

    def staged(self, ticket: int) -> None:
        """Report that all bytes of a ticket are staged. A dead saver is not an error."""
        with contextlib.suppress(Exception):
            self._send(protocol.Staged(ticket))

    def tell(self, message: protocol.Decline | protocol.Lost) -> None:
        """Send what other ranks must know. Never waits, since it may be called on the thread of their connection."""
        with contextlib.suppress(Exception), self._sending:
            protocol.send(self._channel, message)

    def abort(self, ticket: int) -> None:
        """Cancel a ticket. It still ends in a callback: ``on_failed``, or ``on_done`` if it was already published."""
        with contextlib.suppress(Exception):
            self._send(protocol.Abort(ticket))

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until the saver has opened the store. Return False after the timeout.

        Raises:
            CkstoreError: The saver could not open it, or died.
        """
        is_ready = self.wait(self._ready, timeout, "open the store")
        if self._dead.is_set():
            raise self._death_error()
        return is_ready

    def release_lease(self, timeout: float | None = None) -> bool:
        """Have the saver finish its tickets, give up the lease and forget the run. Return False after the timeout.

        Raises:
            SaverError: The saver is alive, but the message cannot be sent. A dead saver holds no lease.
        """
        self.lease = None
        if is_answered := self._ask(protocol.Release, timeout, "give up the writer lease"):
            self.lease = ""
        return is_answered

    def warm(self, block_count: int, nbytes: int, timeout: float | None = None) -> bool:
        """Have the saver map the arena and allocate write blocks for a state. Return False after the timeout."""
        return self._ask(partial(protocol.Warm, block_count=block_count, nbytes=nbytes), timeout, "take memory ahead")

    def release_retained(self) -> None:
        """Ask the saver to free retained slots after its current tickets. Does not wait."""
        with contextlib.suppress(Exception):
            self._send(protocol.Forget())

    def quit(self, timeout: float | None = None, *, is_waited: bool = True) -> bool:
        """Have the saver finish its tickets and exit. Return whether it has exited by now."""
        if self._owner != os.getpid():
            return True
        with contextlib.suppress(Exception):
            self._send(protocol.Quit(), is_blocking=is_waited)
        if not (is_waited and self.wait(self._dead, timeout, "finish", is_urgent=True)):
            return not self.is_alive
        if threading.current_thread() is not self._listener:
            self._listener.join()
        return True

    def wait(self, event: Latch, timeout: float | None, doing: str, *, is_urgent: bool = False) -> bool:
        """Wait for an event that the listening thread sets, or the death of the saver. Return whether it is set.

        Args:
            event: An event that a callback or this class sets.
            timeout: Seconds. None: as long as the saver lives.
            doing: What the saver is expected to do, for the warning "still waiting for the saver to ...".
            is_urgent: Raise the saver's priority meanwhile.
        """
        if event.is_set():
            return True
        self._check_owner()
        begun, patience = self._clock.monotonic(), WARN_AFTER_SECONDS
        if is_urgent and (timeout is None or timeout > 0):
            self.hurry()
        while True:
            waited = self._clock.monotonic() - begun
            left = None if timeout is None else timeout - waited
            if left is not None and left <= 0:
                return event.is_set()
            if event.wait(patience - waited if left is None else max(0.0, min(left, patience - waited))):
                return True
            if self._clock.monotonic() - begun >= patience:
                patience = self._clock.monotonic() - begun + 6 * WARN_AFTER_SECONDS
                stopped = "; the process is stopped: send it SIGCONT" if is_stopped(self.pid) else ""
                _log.warning("still waiting for the saver (pid %d) to %s%s", self.pid, doing, stopped)

    def hurry(self) -> None:
        """Raise the saver's priority until it has no work left. Sent once per work, so that polling is cheap."""
        request = self._last_request
        if self._hurried_request is not request:
            with contextlib.suppress(Exception):
                self._send(protocol.Hurry())
                # Not the current value of _last_request: another thread may have sent new work meanwhile.
                self._hurried_request = request

    def _check_owner(self) -> None:
        # Checked before any lock is taken: in a forked child, a lock may be held by a thread that does not exist there.
        if self._owner != os.getpid():
            raise UsageError("a forked child cannot use its parent's saver", todo="open the store again")

    def _ask(self, kind: type[protocol.Release] | partial[protocol.Warm], timeout: float | None, doing: str) -> bool:
        """Send a question and wait for its answer. The death of the saver also ends the wait."""
        self._check_owner()
        number, answered = self._answers.ask()
        try:
            self._send(kind(number), is_blocking=True)
        except Exception:
            if not self._dead.is_set():
                raise
        return self.wait(answered, timeout, doing, is_urgent=True)

    def _send(self, message: Message, *, is_blocking: bool = False) -> None:
        """Send a message. If the socket is full, raise SaverError, or wait for room if ``is_blocking``."""
        self._check_owner()
        while True:
            try:
                with self._sending:
                    protocol.send(self._channel, message)
                if isinstance(message, _WORK_MESSAGES):
                    self._last_request = object()
                return
            except BlockingIOError:
                if is_blocking and not self._dead.wait(SEND_RETRY_SECONDS):
                    continue
                raise SaverError(
                    f"the saver (pid {self.pid}) does not read its messages", todo="stop that process", pid=self.pid
                ) from None
            except OSError as error:
                if error.errno in protocol.SHORT_OF_MEMORY and is_blocking and not self._dead.wait(SEND_RETRY_SECONDS):
                    continue
                # The listening thread will determine within seconds how the saver ended.
                if threading.current_thread() is not self._listener and self._dead.wait(2 * GRACE_SECONDS):
                    raise self._death_error() from None
                raise SaverError(f"lost the connection to the saver (pid {self.pid}): {error}", pid=self.pid) from None

    # On the listening thread

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        if self._watch.fd >= 0:
            poll.register(self._watch.fd, select.POLLIN)
        try:
            while self._receive_all():
                if not self._watch.is_alive:
                    # Messages that were sent before the death are still in the socket.
                    self._receive_all()
                    break
                self._end_if_stopped()
                timeout_ms = self._watch.timeout_ms
                poll.poll(_LOOK_MS if timeout_ms is None and self._stopped_seconds_max is not None else timeout_ms)
        except BaseException as error:
            # A saver whose messages cannot be read must not continue to write.
            self._death_cause = error if isinstance(error, CkstoreError) else None
            self._process.kill()
            log_safely(
                _log, logging.ERROR, "killed the saver (pid %d) because of an invalid message: %s", self.pid, error
            )
        finally:
            self._reap()

    def _end_if_stopped(self) -> None:
        """Kill the saver if it was stopped for too long. The other ranks have given it up, so it cannot go on."""
        limit = self._stopped_seconds_max
        if limit is None or self._stop_timer.seconds(self._clock.monotonic()) < limit:
            return
        self._death_cause = SaverError(
            f"the saver (pid {self.pid}) was stopped by a signal for {limit:g} s, and was killed",
            todo="commit again: that starts a new saver; earlier checkpoints are intact",
            pid=self.pid,
        )
        self._process.kill()

    def _receive_all(self) -> bool:
        """Handle all messages in the socket. Return False at the end of the connection."""
        while True:
            try:
                message = protocol.receive(self._channel, protocol.TO_TRAINER)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if message is None:
                return False
            self._handle(message)

    def _handle(self, message: Message) -> None:
        if isinstance(message, protocol.Log):
            log_safely(_log, message.level, "saver (pid %d): %s", self.pid, message.text)
        elif isinstance(message, protocol.Ready):
            self._ready.set()
        elif isinstance(message, protocol.Answer):
            self._answers.take(message.question)
        elif isinstance(message, protocol.Failed) and message.ticket == 0:
            self._death_cause = protocol.error_of(message)
        elif isinstance(message, protocol.TicketMessage):
            self._tickets.take(message)
        self._is_leaving = self._is_leaving or isinstance(message, protocol.Leaving)
        # A saver that was asked to end by a signal finishes what it has begun. The next commit starts a new saver.
        is_end = self._is_leaving and not self._tickets.is_closed and self._tickets.close()
        # Not blocking: the thread that holds the lock may be in a signal handler that waits for this thread. Then Quit
        # is sent when the next saver is started.
        if is_end and self._sending.acquire(blocking=False):
            with contextlib.suppress(Exception):
                self._send(protocol.Quit(is_parting=True))
            self._sending.release()

    def _reap(self) -> None:
        """Ensure that the process is dead, collect its exit code, and end every ticket and every wait."""
        try:
            code = self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            # It closed its socket without exiting.
            self._process.kill()
            code = self._process.wait()
        is_busy = self._tickets.unfinished_count > 0
        if self._death_cause is None:
            self._death_cause = protocol.death_of(self.pid, code, is_busy=is_busy, was_signalled=self._is_leaving)
        self._dead.set()
        self._watch.close()
        with self._sending:
            self._channel.close()
        if is_busy or code:
            log_safely(_log, logging.ERROR, "%s", self._death_cause)
        self._tickets.end(self._death_error)
        self._answers.end()
        self._ready.set()

    def _death_error(self) -> Exception:
        """Return a new error that says how the saver ended. Each caller raises its own."""
        why = self._death_cause or SaverError(f"the saver (pid {self.pid}) was asked to end by a signal", pid=self.pid)
        return protocol.error_of(protocol.failed_of(0, why))

    def close_in_child(self) -> None:
        """Close the saver's descriptors in a forked child, which must not keep trainer or saver alive."""
        # Takes no lock: a lock may be held by a thread that does not exist in the child.
        self._watch.close()
        self._channel.close()
        if self._close_bell.detach():
            os.close(self.bell)
        # The saver is not a child of this process, so there is no exit code to wait for.
        self._process.returncode = 0


def launch(
    hello: protocol.Hello, arena: int, listener: int | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Start the saver process. Return it with this end of the socket and the eventfd that is its bell.

    Raises:
        OSError: The process cannot be started. All descriptors are closed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        # Sent before the process starts, so that it never waits for its first message.
        protocol.send(ours, hello)
        # A session of its own keeps the terminal's signals away.
        process = start_python(
            ["-m", "ckstore.background.saver"],
            fds=(theirs.fileno(), bell, arena, *(() if listener is None else (listener,))),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        return process, ours, bell
    except BaseException:
        ours.close()
        os.close(bell)
        raise
    finally:
        theirs.close()
