"""What trainer and saver say to each other: small typed records, one a packet of a socket pair.

A packet is one byte that says its kind, and the fields of its record as a MessagePack array. What may be long - tree,
tensors, samples - is the *head* of a staged state (head.py): it lies in its slot, and ``Begin`` says where.

Invariants:
- Both sides bound what they read; unknown kinds, missing or additional fields and other types are refused.
- Staged bytes are announced by a bell (an eventfd), which never blocks the trainer: what is staged, the arena says.
- Errors keep their class, their three sentences and their facts.
"""

from __future__ import annotations

import builtins
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckstore import errors
from ckstore.errors import CkstoreError, MalformedError, SaverError
from ckstore.format.records import Count, ShortText, decode_inner, encode_inner
from ckstore.results import Receipt

MESSAGE_NBYTES_MAX = 128 << 10
TEXT_NBYTES_MAX = 8 << 10
"""Of one part of an error or of a log record; longer ones are cut."""

_WARNINGS_MAX = 12

Scalar = None | bool | int | float | str
Fact = Scalar | list[str]


class Hello(NamedTuple):
    """Trainer: the first message; where to save, and whom to watch.

    ``store_id`` (hex) is the store that the trainer has opened there: by now another one may have taken its place.
    The address is as the file system has it, which need not be UTF-8. ``trainer_started`` is what
    ``store.processes.process_started`` says of the trainer; ``retention`` holds, as JSON, the rules by which
    checkpoints may go when the disk is full.
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


class Begin(NamedTuple):
    """Trainer: a slot is being filled; its head lies there, complete. Tickets ascend from 1.

    The parent is what ``parent_ticket`` became, where that is not 0 and was published; else ``parent``, a seq.
    Where its slot may be kept, the saver may go on to read it for the next commit, which is coded against it.
    The saver does not start it for ``start_delay_ms``, since copies need every processor until then.
    A ``lease`` is the token of one that was the saver's before this was said: a trainer that is started again finds it.
    """

    ticket: Count
    slot: Count
    head_place: Count
    head_nbytes: Count
    parent: Count | None
    parent_ticket: Count
    may_keep: bool = False
    start_delay_ms: Count = 0
    lease: ShortText = ""


class Staged(NamedTuple):
    """Trainer: every byte of a ticket is staged; from now on it is published whether or not the trainer lives."""

    ticket: Count


class Abort(NamedTuple):
    """Trainer: give a ticket up; what comes is Failed, or Done where it was too late."""

    ticket: Count


class Hurry(NamedTuple):
    """Trainer: somebody waits, until all that was begun has ended; the saver need not give way so long."""


class Release(NamedTuple):
    """Trainer: when all tickets are done, give up the lease and forget the run; answered by Answer."""

    question: Count


class Warm(NamedTuple):
    """Trainer: states will come; map memory that was taken for them now, and take what commits write through.

    Whatever else is to be done comes first. Answered by Answer.
    """

    question: Count
    block_count: Count
    nbytes: Count


class Forget(NamedTuple):
    """Trainer: when all tickets are done, give back the slots and the memory that are kept for the next one."""


class Quit(NamedTuple):
    """Trainer: carry through what has begun, and exit; a parting where its handle lives on and all was told of."""

    is_parting: bool = False


class Ready(NamedTuple):
    """Saver: the store is open."""

    pid: Count


class Began(NamedTuple):
    """Saver: it holds the lease for a ticket, so that a trainer that is started again would wait for it."""

    ticket: Count


class Progress(NamedTuple):
    """Saver: how far a ticket is; sent seldom, and left out where the trainer does not read."""

    ticket: Count
    stage: ShortText
    nbytes_done: Count
    nbytes_total: Count


class Done(NamedTuple):
    """Saver: a ticket is durable."""

    ticket: Count
    receipt: Receipt


class Failed(NamedTuple):
    """Saver: nothing of a ticket was acknowledged, and why; ticket 0: the saver could not start."""

    ticket: Count
    kind: ShortText
    what: str
    where: str | None
    todo: str | None
    facts: dict[str, Fact]


class Kept(NamedTuple):
    """Saver: a ticket has ended, and its slot holds what the next one may be coded against; SlotFree comes later."""

    ticket: Count


class SlotFree(NamedTuple):
    """Saver: the last message of every ticket; nothing of its slot will be read again."""

    ticket: Count


class Answer(NamedTuple):
    """Saver: what was asked, and all that was asked before it, has been done; questions are numbered from 1."""

    question: Count


class Leaving(NamedTuple):
    """Saver: a signal has asked it to end. It waits for Quit, which comes when all has ended that was begun."""


class Log(NamedTuple):
    """Saver: a log record."""

    level: Count
    text: str


Message = (
    Hello
    | Begin
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
    | Kept
    | SlotFree
    | Answer
    | Leaving
    | Log
)  # fmt: skip
TO_SAVER = (Hello, Begin, Staged, Abort, Release, Forget, Quit, Hurry, Warm)
TO_TRAINER = (Ready, Began, Progress, Done, Failed, Kept, SlotFree, Answer, Leaving, Log)

_KINDS: tuple[type[Message], ...] = (*TO_SAVER, *TO_TRAINER)
_NUMBER_OF = {kind: number for number, kind in enumerate(_KINDS)}


def encode_message(message: Message) -> bytes:
    """Return the packet of a message.

    Raises:
        SaverError: It is too long.
    """
    packet = bytes((_NUMBER_OF[type(message)],)) + encode_inner(message)
    if len(packet) > MESSAGE_NBYTES_MAX:
        raise SaverError(f"a {type(message).__name__} message has {len(packet)} bytes", todo="report this")
    return packet


def decode_message(packet: bytes, kinds: Sequence[type[Message]]) -> Message:
    """Read a packet that may hold one of these kinds.

    Raises:
        MalformedError: It holds something else.
    """
    if not packet or packet[0] >= len(_KINDS) or _KINDS[packet[0]] not in kinds:
        raise MalformedError("a message of the saver's socket is of no kind that belongs here")
    return decode_inner(memoryview(packet)[1:], _KINDS[packet[0]], where="a message of the saver's socket")


def done_of(ticket: int, receipt: Receipt) -> Done:
    """Return the message of a receipt; of very many or very long warnings it holds the first ones."""
    warnings = [_cut(text) for text in receipt.warnings[:_WARNINGS_MAX]]
    if len(receipt.warnings) > _WARNINGS_MAX:
        warnings.append(f"{len(receipt.warnings) - _WARNINGS_MAX} more warnings are not told")
    return Done(ticket, replace(receipt, warnings=tuple(warnings)))


def send(channel: socket.socket, message: Message) -> None:
    """Send without waiting.

    Raises:
        BlockingIOError: The other side has not read what was sent before.
        OSError: The other side is gone.
    """
    channel.send(encode_message(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive(channel: socket.socket, kinds: Sequence[type[Message]]) -> Message | None:
    """Return the next message, or None at the end.

    Raises:
        BlockingIOError: There is none now.
        MalformedError: The other side sent something else.
        OSError: The connection is broken.
    """
    try:
        packet = channel.recv(MESSAGE_NBYTES_MAX + 1, socket.MSG_DONTWAIT)
    except ConnectionResetError:
        # Said once, before what is still there, of a peer that is gone and has not read all that it was told.
        packet = channel.recv(MESSAGE_NBYTES_MAX + 1, socket.MSG_DONTWAIT)
    return decode_message(packet, kinds) if packet else None


def failed_of(ticket: int, error: BaseException) -> Failed:
    """Return the message that tells of an error."""
    kind = type(error).__name__
    if not isinstance(error, CkstoreError):
        number, text = getattr(error, "errno", None), getattr(error, "strerror", None) or str(error)
        if isinstance(error, MemoryError):
            # Python's own says nothing.
            text = text or "the saver has no memory for this commit"
        return Failed(ticket, kind, _cut(text), None, None, _plain_facts({"errno": number}))
    todo, where = error.todo, error.where
    return Failed(
        ticket,
        kind,
        _cut(error.what),
        None if where is None else _cut(where),
        None if todo is None else _cut(todo),
        _plain_facts(error.facts),
    )


def error_of(failed: Failed) -> Exception:
    """Return the error that a message tells of, of its own class where that is one of ckstore's."""
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, CkstoreError):
        return kind(failed.what, where=failed.where, todo=failed.todo, **failed.facts)
    if failed.kind == "MemoryError":
        return MemoryError(failed.what)
    builtin = getattr(builtins, failed.kind, None)
    number = failed.facts.get("errno")
    if isinstance(builtin, type) and issubclass(builtin, OSError) and isinstance(number, int):
        return OSError(number, failed.what)
    return SaverError(
        f"the saver met {failed.kind}: {failed.what}", todo="look into the log, and report this", kind=failed.kind
    )


_FACTS_MAX, _FACT_NBYTES_MAX = 16, 1024
_ITEMS_MAX, _ITEM_NBYTES_MAX = 16, 128
_RESERVED = {"what", "where", "todo"}


def _plain_facts(facts: Mapping[str, object]) -> dict[str, Fact]:
    kept = [(name, value) for name, value in facts.items() if value is not None and name not in _RESERVED]
    return {_cut(name, _ITEM_NBYTES_MAX): _plain_fact(value) for name, value in kept[:_FACTS_MAX]}


def _plain_fact(value: object) -> Fact:
    if isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else f"{value:#x}"[:_FACT_NBYTES_MAX]
    if isinstance(value, (list, tuple)):
        return [_cut(str(item), _ITEM_NBYTES_MAX) for item in value[:_ITEMS_MAX]]
    return _cut(str(value), _FACT_NBYTES_MAX)


def _cut(text: str, nbytes_max: int = TEXT_NBYTES_MAX) -> str:
    # Text of the operating system may hold surrogates, which have no form in UTF-8.
    content = text.encode("utf-8", "replace")
    if len(content) <= nbytes_max:
        return content.decode()
    return content[: nbytes_max - 3].decode("utf-8", "ignore") + "..."


def log_of(level: int, text: str) -> Log:
    """Return the message of a log record, cut where it is too long."""
    return Log(max(0, level), _cut(text))
