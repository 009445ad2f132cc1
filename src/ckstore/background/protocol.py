"""The messages between trainer and saver, and the socket that carries them.

Each packet of the socket pair holds one message: a byte for its kind, then its fields as a MessagePack array. Long data
(tree, tensors, samples) is in the *head* of a staged state (``staged_head.py``), in the slot. ``Begin`` says
where. Trainer to saver: ``TO_SAVER``. Saver to trainer: ``TO_TRAINER``.

Invariants:
- Both sides limit the length of what they read, and refuse unknown kinds, wrong fields and wrong types.
- Progress of the staging is not sent as messages. The arena marks staged units, and a bell (an eventfd) wakes the saver
  without ever blocking the trainer.
- Errors keep their class, their three sentences and their facts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckstore.clock import SYSTEM_CLOCK
from ckstore.config import EngineName
from ckstore.errors import MalformedError, SaverError
from ckstore.format.error_records import ErrorRecord, Fact, cut_text, record_of, restored_error
from ckstore.format.records import Count, ShortText, decode_inner, encode_inner
from ckstore.processes import is_running, process_started
from ckstore.results import Receipt

_log = logging.getLogger("ckstore")

MESSAGE_NBYTES_MAX = 128 << 10
_WARNINGS_MAX = 12


class Hello(NamedTuple):
    """Trainer: first message, with the store to write to and the trainer to watch.

    ``address`` is bytes because a path need not be UTF-8. ``store_id`` (hexadecimal) is the store that the trainer has
    opened, in case another store has replaced it. ``trainer_started`` is the result of ``processes.process_started``.
    ``retention`` holds as JSON the rules by which checkpoints may be deleted when the disk is full. ``job`` is the job
    of many ranks (``ranks/savers.py``); empty: there is none. ``role`` is what the saver does: ``commits`` or
    ``journal``.
    """

    address: bytes
    run: ShortText
    engine: ShortText
    trainer_pid: Count
    trainer_started: ShortText
    nice: int
    log_level: Count
    retention: str = "{}"
    store_id: ShortText = ""
    job: bytes = b""
    role: ShortText = "commits"


class Begin(NamedTuple):
    """Trainer: a slot with a complete head is being filled. Tickets count up from 1.

    The parent checkpoint is the result of ``parent_ticket`` if that is not 0 and was published, else seq ``parent``.
    With ``may_retain`` the saver may keep the slot as the delta base of the next commit. For ``start_delay_ms`` the
    saver does not start, because copies need every processor. ``lease`` is the token of the lease that was
    transferred to the saver before this message, so a restarted trainer finds it. ``number`` counts the background
    commits of a job of many ranks, the same on every rank.
    """

    ticket: Count
    slot: Count
    head_place: Count
    head_nbytes: Count
    parent: Count | None
    parent_ticket: Count
    may_retain: bool = False
    start_delay_ms: Count = 0
    lease: ShortText = ""
    number: Count = 0


class Decline(NamedTuple):
    """Trainer: this rank cannot take part in a background commit of its job, and why. There is no reply."""

    number: Count
    step: Count
    error: ErrorRecord


class Lost(NamedTuple):
    """Trainer: another rank's trainer is lost, or has lost its saver in a background commit. ``how`` follows "rank 3".

    The rank does not join the background commit ``number``; 0: it joins none any more.
    """

    rank: Count
    how: ShortText
    number: Count = 0


class Staged(NamedTuple):
    """Trainer: all bytes of a ticket are staged. From now on it is published even if the trainer dies."""

    ticket: Count


class Abort(NamedTuple):
    """Trainer: cancel a ticket. The reply is Failed, or Done if it was already published."""

    ticket: Count


class Hurry(NamedTuple):
    """Trainer: somebody waits. Run at full priority until all begun work has ended."""


class Release(NamedTuple):
    """Trainer: after all tickets, give up the lease and forget the run. Answered by Answer."""

    question: Count


class Warm(NamedTuple):
    """Trainer: states will follow. Map the arena's memory now and allocate write blocks.

    All other work has priority. Answered by Answer.
    """

    question: Count
    block_count: Count
    nbytes: Count


class Forget(NamedTuple):
    """Trainer: after all tickets, free the slots and the memory that are retained for the next commit."""


class Quit(NamedTuple):
    """Trainer: finish all begun work and exit. With ``is_parting`` the trainer's handle stays open."""

    is_parting: bool = False


class Ready(NamedTuple):
    """Saver: the store is open."""

    pid: Count


class Began(NamedTuple):
    """Saver: it holds the lease for a ticket, so a restarted trainer would wait for it."""

    ticket: Count


class Progress(NamedTuple):
    """Saver: progress of a ticket. Sent rarely, and dropped if the socket is full."""

    ticket: Count
    stage: ShortText
    nbytes_done: Count
    nbytes_total: Count


class Done(NamedTuple):
    """Saver: a ticket is durable."""

    ticket: Count
    receipt: Receipt


class Failed(NamedTuple):
    """Saver: a ticket failed, and why. Ticket 0: the saver could not start."""

    ticket: Count
    kind: ShortText
    what: str
    where: str | None
    todo: str | None
    facts: dict[str, Fact]


class Retained(NamedTuple):
    """Saver: a ticket has ended, and its slot is retained as a delta base. SlotFree follows later."""

    ticket: Count


class SlotFree(NamedTuple):
    """Saver: last message of every ticket. Its slot will not be read again."""

    ticket: Count


class Answer(NamedTuple):
    """Saver: this question and all earlier ones are done. Questions count up from 1."""

    question: Count


class Leaving(NamedTuple):
    """Saver: a signal asked it to end. It waits for Quit, which the trainer sends when all tickets have ended."""


class Log(NamedTuple):
    """Saver: a log record."""

    level: Count
    text: str


Message = (
    Hello
    | Begin
    | Decline
    | Lost
    | Staged
    | Abort
    | Hurry
    | Release
    | Warm
    | Forget
    | Quit
    | Ready
    | Began
    | Progress
    | Done
    | Failed
    | Retained
    | SlotFree
    | Answer
    | Leaving
    | Log
)  # fmt: skip
TicketMessage = Began | Progress | Done | Failed | Retained | SlotFree
TO_SAVER = (Hello, Begin, Staged, Abort, Release, Forget, Quit, Hurry, Warm, Decline, Lost)
TO_TRAINER = (Ready, Began, Progress, Done, Failed, Retained, SlotFree, Answer, Leaving, Log)

_KINDS: tuple[type[Message], ...] = (*TO_SAVER, *TO_TRAINER)
_NUMBER_OF = {kind: number for number, kind in enumerate(_KINDS)}


def encode_message(message: Message) -> bytes:
    """Return the packet of a message.

    Raises:
        SaverError: The packet is too long.
    """
    packet = bytes((_NUMBER_OF[type(message)],)) + encode_inner(message)
    if len(packet) > MESSAGE_NBYTES_MAX:
        raise SaverError(f"a {type(message).__name__} message is too long ({len(packet)} bytes)", todo="report this")
    return packet


def decode_message(packet: bytes, kinds: Sequence[type[Message]]) -> Message:
    """Decode a packet of one of these kinds.

    Raises:
        MalformedError: The packet is invalid or of another kind.
    """
    if not packet or packet[0] >= len(_KINDS) or _KINDS[packet[0]] not in kinds:
        raise MalformedError("unexpected kind of message on the saver's socket")
    return decode_inner(memoryview(packet)[1:], _KINDS[packet[0]], where="a message of the saver's socket")


def done_of(ticket: int, receipt: Receipt) -> Done:
    """Return the message for a receipt. Excess warnings are dropped and long ones are cut."""
    warnings = [cut_text(text) for text in receipt.warnings[:_WARNINGS_MAX]]
    if len(receipt.warnings) > _WARNINGS_MAX:
        warnings.append(f"{len(receipt.warnings) - _WARNINGS_MAX} more warnings were dropped")
    return Done(ticket, replace(receipt, warnings=tuple(warnings)))


def send(channel: socket.socket, message: Message) -> None:
    """Send a message without waiting.

    Raises:
        BlockingIOError: The socket is full.
        OSError: The other side is gone, or the system is out of memory.
    """
    channel.send(encode_message(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive(channel: socket.socket, kinds: Sequence[type[Message]]) -> Message | None:
    """Return the next message, or None at the end of the connection.

    Raises:
        BlockingIOError: There is no message now.
        MalformedError: The message is invalid.
        OSError: The connection is broken.
    """
    try:
        packet = channel.recv(MESSAGE_NBYTES_MAX + 1, socket.MSG_DONTWAIT)
    except ConnectionResetError:
        # Reported once if the other side died with unread messages. Its own messages are still in the socket.
        packet = channel.recv(MESSAGE_NBYTES_MAX + 1, socket.MSG_DONTWAIT)
    return decode_message(packet, kinds) if packet else None


def failed_of(ticket: int, error: BaseException) -> Failed:
    """Return the message for an error."""
    # Python's own MemoryError has no text.
    return Failed(ticket, *record_of(error, memory_text="the saver has no memory for this commit"))


def error_of(failed: Failed) -> Exception:
    """Return the error of a message, with its own class if that is a class of ckstore or an OSError."""
    record = ErrorRecord(failed.kind, failed.what, failed.where, failed.todo, failed.facts)
    return restored_error(record, source="the saver", other=SaverError)


def log_of(level: int, text: str) -> Log:
    """Return the message for a log record."""
    return Log(max(0, level), cut_text(text))


POLL_SECONDS = 0.5
"""How often a process is checked on systems without pidfds."""


class ProcessWatch:
    """Watches one process. ``fd`` becomes readable when the process dies; it is -1 on systems without pidfds.

    Args:
        pid: Process id.
        started: Start time as ``process_started`` returns it; the pid with another start time is another process.
            Empty: unknown.
    """

    def __init__(self, pid: int, started: str) -> None:
        self.pid = pid
        self._started = started
        self.fd = -1
        # Some sandboxes refuse pidfds, and a dead process has none.
        with contextlib.suppress(OSError, AttributeError):
            self.fd = os.pidfd_open(pid)
        # Checked after opening: the pid may have been reused before. From here on, the pidfd refers to this process.
        self._is_gone = is_running(pid, started) is False

    @property
    def is_alive(self) -> bool:
        """Whether the process is alive. A stopped process is."""
        if self._is_gone:
            return False
        if self.fd < 0:
            return is_running(self.pid, self._started) is not False
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not poll.poll(0)

    @property
    def timeout_ms(self) -> int | None:
        """How long to poll before checking ``is_alive`` again. None: ``fd`` becomes readable."""
        return None if self.fd >= 0 else int(POLL_SECONDS * 1000)

    def close(self) -> None:
        """Close the descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def how_ended(code: int) -> str:
    """Describe how a process ended, from its ``subprocess`` return code."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (by a user, or out of memory)" if -code == signal.SIGKILL else "")


def hello_to(
    address: str,
    run: str,
    engine: EngineName,
    nice: int,
    retention: Mapping[str, Any],
    store_id: str = "",
    job: bytes = b"",
    role: str = "commits",
) -> Hello:
    """Return the first message of this process to a new saver."""
    return Hello(
        address=os.fsencode(address),
        run=run,
        engine=engine,
        trainer_pid=os.getpid(),
        trainer_started=process_started(os.getpid()) or "",
        nice=nice,
        log_level=_log.getEffectiveLevel(),
        retention=json.dumps(dict(retention)),
        store_id=store_id,
        job=job,
        role=role,
    )


def death_of(pid: int, code: int, *, is_busy: bool, was_signalled: bool) -> SaverError:
    """Return the error for a saver that has ended.

    Args:
        pid: Its process id.
        code: Its return code.
        is_busy: Whether a commit was unfinished.
        was_signalled: Whether the saver reported that a signal asked it to end.
    """
    how = "was asked to end by a signal" if was_signalled and code == 0 else how_ended(code)
    return SaverError(
        f"the saver (pid {pid}) {how}" + (" before the commit was durable" if is_busy else ""),
        todo="commit again: that starts a new saver; earlier checkpoints are intact",
        pid=pid,
        saver_exit_code=code,
    )


SHORT_OF_MEMORY = (errno.ENOBUFS, errno.ENOMEM)
"""The system has no memory for a message at the moment. The connection is intact."""

SEND_AGAIN_SECONDS = 0.02
"""Between two attempts to send a message that there was no memory for."""


class Channel:
    """The saver's end of the socket. Thread-safe."""

    def __init__(self, end: socket.socket, trainer: ProcessWatch) -> None:
        self._end = end
        self._trainer = trainer

    def send(self, message: Message, *, wait_ms: int | None = None) -> bool:
        """Send a message, waiting while the socket is full. Return whether it was sent.

        Args:
            message: What to send.
            wait_ms: How long to wait. 0: not at all. None: as long as the trainer lives.
        """
        tries_left = math.inf if wait_ms is None else wait_ms / (1000 * SEND_AGAIN_SECONDS)
        while True:
            try:
                send(self._end, message)
                return True
            except BlockingIOError:
                if wait_ms == 0 or not self._wait(wait_ms):
                    return False
            except OSError as error:
                tries_left -= 1
                if error.errno not in SHORT_OF_MEMORY or tries_left < 0 or not self._trainer.is_alive:
                    return False
                SYSTEM_CLOCK.sleep(SEND_AGAIN_SECONDS)

    def _wait(self, wait_ms: int | None) -> bool:
        poll = select.poll()
        poll.register(self._end, select.POLLOUT)
        if self._trainer.fd >= 0:
            poll.register(self._trainer.fd, select.POLLIN)
        while True:
            ready = poll.poll(self._trainer.timeout_ms if wait_ms is None else wait_ms)
            if any(fd == self._end.fileno() for fd, _ in ready):
                return True
            if wait_ms is not None or not self._trainer.is_alive:
                return False
