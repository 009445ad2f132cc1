"""The trainer's end of a saver: start it, hand it tickets, hear what became of them, see it die, end it.

Invariants:
- Every ticket that was begun ends in ``on_done`` or ``on_failed``, once, and then in ``on_free``, whatever becomes of
  the saver: its death is seen by pidfd, not by the end of a socket.
- One thread listens; it sleeps until there is a message, so a trainer that computes is not disturbed.
- Nothing here waits for a saver without looking whether it lives; a forked child has no part in it.

What becomes of what a saver was given to do: each ticket is told once how it ended, each question answered.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from ckstore.background import protocol
from ckstore.background.arena import Arena
from ckstore.background.protocol import Began, Done, Failed, Kept, Message, Progress, SlotFree, error_of
from ckstore.background.saver_process import SHORT_OF_MEMORY, Watch, death_of, hello_to, launch
from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.concurrency import Latch, log_safely
from ckstore.config import EngineName
from ckstore.errors import CkstoreError, MalformedError, SaverError, UsageError
from ckstore.processes import close_in_children, is_stopped, process_started
from ckstore.results import Receipt

_log = logging.getLogger("ckstore")

OF_TICKET = (Began, Progress, Done, Failed, Kept, SlotFree)


def _ignore(*facts: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What is called, on the listening thread, as a ticket goes on; none of them may wait.

    Args:
        on_done: It is durable.
        on_failed: It was not acknowledged; with the error of the saver, or SaverError if that died.
        on_free: The slot may be used again; comes last, and always.
        on_began: The saver holds the lease for it. From here on the checkpoint is published even if the trainer
            dies, provided that all was staged; and a trainer that is started again waits for it.
        on_progress: Stage, bytes done, bytes in all.
        on_kept: The ticket has ended, and its slot is still needed; ``on_free`` comes later.
    """

    on_done: Callable[[Receipt], None]
    on_failed: Callable[[Exception], None]
    on_free: Callable[[], None]
    on_began: Callable[[], None] = _ignore
    on_progress: Callable[[str, int, int], None] = _ignore
    on_kept: Callable[[], None] = _ignore


class Tickets:
    """The tickets that have not ended yet; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callbacks] = {}
        self._told: set[int] = set()
        self._is_closed = False

    @property
    def untold(self) -> int:
        """How many were neither acknowledged nor given up."""
        with self._lock:
            return len(self._callbacks) - len(self._told)

    def add(self, number: int, callbacks: Callbacks) -> bool:
        """Add a ticket; False: it is too late, the saver is dead or about to end."""
        with self._lock:
            if not self._is_closed:
                self._callbacks[number] = callbacks
            return not self._is_closed

    @property
    def is_closed(self) -> bool:
        """Whether no more are taken."""
        return self._is_closed

    def close(self) -> bool:
        """Take no more, unless one was not told yet how it ended; return whether none is taken any more."""
        with self._lock:
            self._is_closed = self._is_closed or len(self._callbacks) == len(self._told)
            return self._is_closed

    def remove(self, number: int) -> None:
        """Take back a ticket that was not handed over."""
        with self._lock:
            self._callbacks.pop(number, None)

    def take(self, message: Began | Progress | Done | Failed | Kept | SlotFree) -> None:
        """Call what a message calls for.

        Raises:
            MalformedError: There is no such ticket.
        """
        number = message.ticket
        with self._lock:
            callbacks = self._callbacks.get(number)
            if isinstance(message, SlotFree):
                self._callbacks.pop(number, None)
                self._told.discard(number)
            elif isinstance(message, (Done, Failed)):
                self._told.add(number)
        if callbacks is None:
            raise MalformedError("the saver tells of a ticket that it was not given", where=f"ticket {number}")
        if isinstance(message, Began):
            _call(callbacks.on_began)
        elif isinstance(message, Progress):
            _call(callbacks.on_progress, message.stage, message.nbytes_done, message.nbytes_total)
        elif isinstance(message, Done):
            _call(callbacks.on_done, message.receipt)
        elif isinstance(message, Failed):
            _call(callbacks.on_failed, error_of(message))
        else:
            _call(callbacks.on_kept if isinstance(message, Kept) else callbacks.on_free)

    def end(self, death: Callable[[], Exception]) -> None:
        """The saver is dead: end every ticket; ``death`` makes an error for each."""
        with self._lock:
            self._is_closed = True
            callbacks, self._callbacks = self._callbacks, {}
        for number, each in callbacks.items():
            if number not in self._told:
                _call(each.on_failed, death())
            _call(each.on_free)


class Answers:
    """Questions that a saver answers in the order in which they were asked; thread-safe.

    Each has a number, and an answer is one to all before it: whoever is interrupted before a question was sent, or
    before its answer came, leaves nothing that another one could take for theirs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: dict[int, Latch] = {}
        self._is_closed = False

    def ask(self) -> tuple[int, Latch]:
        """Return the number of the next question, and what is set when it was answered, or nobody is there to do so."""
        answered = Latch()
        with self._lock:
            self._last += 1
            if self._is_closed:
                answered.set()
            else:
                self._open[self._last] = answered
            return self._last, answered

    def take(self, number: int) -> None:
        """Take an answer.

        Raises:
            MalformedError: Nobody asked that.
        """
        with self._lock:
            if not 0 < number <= self._last:
                raise MalformedError("the saver answers what nobody asked", where=f"question {number}")
            answered = [self._open.pop(each) for each in sorted(self._open) if each <= number]
        for event in answered:
            event.set()

    def end(self) -> None:
        """The saver is dead: let nobody wait."""
        with self._lock:
            self._is_closed = True
            waiting, self._open = self._open, {}
        for event in waiting.values():
            event.set()


def _call(callback: Callable[..., None], *facts: object) -> None:
    try:
        callback(*facts)
    except Exception:
        log_safely(_log, logging.ERROR, "a callback of a background commit failed", exc_info=True)


PATIENCE_SECONDS = 10.0
"""Whoever waits for longer is told for what; and again after six times as long."""

GRACE_SECONDS = 5.0
"""For a saver to be gone after it has closed its socket."""

SPEAK_SECONDS = 0.02
"""Between two tries to say something to a saver that does not read; it takes hundreds of messages to get there."""


_NO_RULES: Mapping[str, Any] = MappingProxyType({})

_TAKE_TIME = (protocol.Begin, protocol.Release, protocol.Warm, protocol.Forget, protocol.Quit)


class Saver:
    """A saver process, as its trainer sees it; thread-safe."""

    def __init__(
        self, process: subprocess.Popen[bytes], channel: socket.socket, bell: int, watch: Watch, clock: Clock
    ) -> None:
        self._process = process
        self._channel = channel
        self._bell = bell
        # Not before: another file may get its number.
        self._close_bell = weakref.finalize(self, os.close, bell)
        self._watch = watch
        self._clock = clock
        self._owner = os.getpid()
        self.lease: str | None = ""  # The token of what was lent; None: asked back, and not known to be given back.
        # A handle that is collected in the middle of a message says goodbye on the same thread.
        self._speaking = threading.RLock()
        self._said, self._hurried = object(), object()  # What takes time, and for what of it the saver was hurried.
        self._tickets, self._answers = Tickets(), Answers()
        self._ready, self._dead = Latch(), Latch()
        self._is_leaving = False  # A signal has asked it to end.
        self._why: Exception | None = None
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
    ) -> Saver:
        """Start a saver; returns at once, and tickets may be handed to it at once.

        Args:
            address: The store's folder or URL; it goes through the socket, never onto a command line.
            run: The run to commit to.
            arena: What tickets are staged in; the saver maps it too.
            nice: Added to the saver's niceness.
            engine: What moves packs.
            retention: Rules by which checkpoints may go when the disk is full.
            clock: Where time comes from.
            store_id: Identity of the store, hexadecimal; the saver refuses another one. Empty: it takes any.

        Raises:
            SaverError: No process can be started.
        """
        try:
            hello = hello_to(address, run, engine, nice, retention, store_id)
            process, channel, bell = launch(hello, arena.fd)
        except OSError as error:
            raise SaverError(f"no saver can be started ({error})", todo="commit without one") from error
        watch = Watch(process.pid, process_started(process.pid) or "")
        saver = cls(process, channel, bell, watch, clock)
        try:
            saver._listener.start()
        except RuntimeError as error:
            # There is no memory for a thread, or no more of them are allowed.
            saver._why = SaverError(f"no saver can be listened to ({error})", todo="commit without one")
            process.kill()
            saver._bury()
            raise saver._death() from error
        return saver

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the saver lives and listens, and this is the process that started it."""
        return not self._dead.is_set() and self._owner == os.getpid()

    @property
    def takes_tickets(self) -> bool:
        """Whether it lives, and is not about to end because a signal has asked it to."""
        return self.is_alive and not self._tickets.is_closed

    @property
    def bell(self) -> int:
        """The eventfd that tells the saver that more is staged; open as long as this object."""
        return self._bell

    # Tickets

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
        may_keep: bool = False,
        start_delay_ms: int = 0,
    ) -> None:
        """Hand over a slot that is being staged; its head (``head.HeadWriter``) is there.

        Args:
            ticket: A number of the trainer's, greater than every earlier one.
            slot: Which slot.
            head_place: Where in the slot the head lies.
            head_nbytes: How long it is.
            callbacks: What to call as it goes on.
            parent: The seq that the state comes from.
            parent_ticket: The ticket that it comes from, whose seq is not known yet; it wins if it is published.
            may_keep: Whether the saver may go on to read the slot for the next ticket, and give it back later.
            start_delay_ms: For how long it is to leave all processors to those who copy.

        Raises:
            SaverError: The saver is dead, or about to end; nothing will be called.
            UsageError: This is a forked child.
        """
        self._check_owner()
        if not self._tickets.add(ticket, callbacks):
            raise self._death()
        try:
            whose = parent, parent_ticket, may_keep, start_delay_ms, self.lease or ""
            self._say(protocol.Begin(ticket, slot, head_place, head_nbytes, *whose))
        except BaseException:
            self._tickets.remove(ticket)
            raise

    def staged(self, ticket: int) -> None:
        """Tell that a ticket is staged whole, its slot marked and its state ``STAGED``; a dead saver is no error."""
        with contextlib.suppress(Exception):
            self._say(protocol.Staged(ticket))

    def abort(self, ticket: int) -> None:
        """Give a ticket up; it still ends in a callback: failed, or done where it was too late."""
        with contextlib.suppress(Exception):
            self._say(protocol.Abort(ticket))

    # Waiting, and the end

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until the saver has opened the store; False: not in this time.

        Raises:
            CkstoreError: It could not, or died.
        """
        is_ready = self.wait(self._ready, timeout, "open the store")
        if self._dead.is_set():
            raise self._death()
        return is_ready

    def release_lease(self, timeout: float | None = None) -> bool:
        """Let the saver finish what it has, give up the writer lease and forget the run; return whether it has in time.

        Raises:
            SaverError: It lives, and cannot be asked. A dead one holds no lease.
        """
        self.lease = None
        if is_answered := self._ask(protocol.Release, timeout, "give up the writer lease"):
            self.lease = ""
        return is_answered

    def warm(self, block_count: int, nbytes: int, timeout: float | None = None) -> bool:
        """Let the saver map the arena, and take write blocks for a state; return whether it has answered in time."""
        return self._ask(partial(protocol.Warm, block_count=block_count, nbytes=nbytes), timeout, "take memory ahead")

    def forget_kept(self) -> None:
        """Let the saver give back what it keeps for the next commit, when it has done what was begun; does not wait."""
        with contextlib.suppress(Exception):
            self._say(protocol.Forget())

    def quit(self, timeout: float | None = None, *, is_waited: bool = True) -> bool:
        """End the saver when it has done what was begun, waited for or not; return whether it has, in that time."""
        if self._owner != os.getpid():
            return True
        with contextlib.suppress(Exception):
            self._say(protocol.Quit(), is_patient=is_waited)
        if not (is_waited and self.wait(self._dead, timeout, "finish", is_urgent=True)):
            return not self.is_alive
        if threading.current_thread() is not self._listener:
            self._listener.join()
        return True

    def wait(self, event: Latch, timeout: float | None, doing: str, *, is_urgent: bool = False) -> bool:
        """Wait for an event that the listening thread sets, at the latest when the saver dies; say so after a while.

        Args:
            event: Callbacks or this class set it.
            timeout: Seconds; None: as long as the saver lives.
            doing: What the saver is to do, as in "waiting for the saver to ...".
            is_urgent: Let it not give way to others meanwhile.

        Returns:
            Whether the event is set.
        """
        if event.is_set():
            return True
        self._check_owner()
        begun, patience = self._clock.monotonic(), PATIENCE_SECONDS
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
                patience = self._clock.monotonic() - begun + 6 * PATIENCE_SECONDS
                stopped = "; it is stopped: SIGCONT lets it go on" if is_stopped(self.pid) else ""
                _log.warning("still waiting for the saver (pid %d) to %s%s", self.pid, doing, stopped)

    def hurry(self) -> None:
        """Let the saver not give way until it has nothing left to do; once: who polls would fill its socket."""
        said = self._said
        if self._hurried is not said:
            with contextlib.suppress(Exception):
                self._say(protocol.Hurry())
                self._hurried = said  # Not what it is by now: another thread may have begun something.

    def _check_owner(self) -> None:
        # Before any lock: in a forked child somebody may hold it who is not there.
        if self._owner != os.getpid():
            raise UsageError("a forked child cannot use its parent's saver", todo="open the store again")

    def _ask(self, kind: type[protocol.Release] | partial[protocol.Warm], timeout: float | None, doing: str) -> bool:
        """Ask something that is answered in its turn, and wait for that; a dead saver answers everything."""
        self._check_owner()
        number, answered = self._answers.ask()
        try:
            self._say(kind(number), is_patient=True)
        except Exception:
            if not self._dead.is_set():
                raise
        return self.wait(answered, timeout, doing, is_urgent=True)

    def _say(self, message: Message, *, is_patient: bool = False) -> None:
        """Send a message; where the saver does not read, raise, or be patient until it does or is dead."""
        self._check_owner()
        while True:
            try:
                with self._speaking:
                    protocol.send(self._channel, message)
                if isinstance(message, _TAKE_TIME):
                    self._said = object()
                return
            except BlockingIOError:
                if is_patient and not self._dead.wait(SPEAK_SECONDS):
                    continue
                raise SaverError(f"the saver (pid {self.pid}) does not read what it is told", pid=self.pid) from None
            except OSError as error:
                if error.errno in SHORT_OF_MEMORY and is_patient and not self._dead.wait(SPEAK_SECONDS):
                    continue
                # The listening thread is about to find out how it ended.
                if threading.current_thread() is not self._listener and self._dead.wait(2 * GRACE_SECONDS):
                    raise self._death() from None
                raise SaverError(f"the saver (pid {self.pid}) does not listen ({error})", pid=self.pid) from None

    # The listening thread

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        if self._watch.fd >= 0:
            poll.register(self._watch.fd, select.POLLIN)
        try:
            while self._hear():
                if not self._watch.is_alive:
                    # What it said before it died is still there.
                    self._hear()
                    break
                poll.poll(self._watch.timeout_ms)
        except BaseException as error:
            # It must not go on to write unheard.
            self._why = error if isinstance(error, CkstoreError) else None
            self._process.kill()
            log_safely(
                _log, logging.ERROR, "the saver (pid %d) is killed, for it cannot be understood: %s", self.pid, error
            )
        finally:
            self._bury()

    def _hear(self) -> bool:
        """Take all messages there are; False at the end of the connection."""
        while True:
            try:
                message = protocol.receive(self._channel, protocol.TO_TRAINER)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if message is None:
                return False
            self._take(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, protocol.Log):
            log_safely(_log, message.level, "saver (pid %d): %s", self.pid, message.text)
        elif isinstance(message, protocol.Ready):
            self._ready.set()
        elif isinstance(message, protocol.Answer):
            self._answers.take(message.question)
        elif isinstance(message, protocol.Failed) and message.ticket == 0:
            self._why = protocol.error_of(message)
        elif isinstance(message, OF_TICKET):
            self._tickets.take(message)
        self._is_leaving = self._is_leaving or isinstance(message, protocol.Leaving)
        # What was begun before a signal asked it to end is carried through, and what comes next another one's.
        is_end = self._is_leaving and not self._tickets.is_closed and self._tickets.close()
        # Where a signal has come to who speaks, its handler may wait for what this thread is to hear: then it is said
        # by whoever starts another saver.
        if is_end and self._speaking.acquire(blocking=False):
            with contextlib.suppress(Exception):
                self._say(protocol.Quit(is_parting=True))
            self._speaking.release()

    def _bury(self) -> None:
        """Make sure that it is dead, take its exit code, and tell everybody who waits."""
        try:
            code = self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:  # It has closed its socket, and lives on.
            self._process.kill()
            code = self._process.wait()
        is_busy = self._tickets.untold > 0
        if self._why is None:
            self._why = death_of(self.pid, code, is_busy=is_busy, error_was_raised=self._is_leaving)
        self._dead.set()
        self._watch.close()
        with self._speaking:
            self._channel.close()
        if is_busy or code:
            log_safely(_log, logging.ERROR, "%s", self._why)
        self._tickets.end(self._death)
        self._answers.end()
        self._ready.set()

    def _death(self) -> Exception:
        """Return the error of whoever needs the saver: a new one each time, since each is raised elsewhere."""
        why = self._why or SaverError(f"the saver (pid {self.pid}) was told by a signal to end", pid=self.pid)
        return protocol.error_of(protocol.failed_of(0, why))

    def close_in_child(self) -> None:
        """In a forked child: keep nothing that the trainer or the saver could be taken to live by."""
        # No lock is touched: whoever held it is not here.
        self._watch.close()
        self._channel.close()
        if self._close_bell.detach():
            os.close(self._bell)
        # Not this process's child: nothing to wait for.
        self._process.returncode = 0
