"""The messages between rank 0 and the other ranks of a job: kinds, limits and encoding.

A message is one byte for its kind, then its fields as a MessagePack array. ``number`` counts the commits of the job
from 1, in the same order on every rank. What a rank stores, and which rank writes what, are bytes that this module does
not read. docs/FORMAT.md, section 13, gives the order of the messages.

Invariants:
- Both sides limit the length of what they read, and refuse unknown kinds, wrong fields and wrong types.
- Errors travel as records, never as pickle.
- The numbers of the kinds never change within one ``PROTOCOL_VERSION``.
"""

from __future__ import annotations

from typing import NamedTuple

from ckstore.errors import MalformedError, RankError, UnsupportedError
from ckstore.format.error_records import ErrorRecord
from ckstore.format.records import Count, ShortText, decode_inner, encode_inner

PROTOCOL_VERSION = 1
"""Grows when a message, or the meaning of its content, changes. Ranks of different versions do not work together."""


class Begin(NamedTuple):
    """A rank takes part in a commit.

    ``facts`` are values that must be equal on all ranks, by their name for the user: run, store, policy, world.
    ``digests`` name content that this rank can send: what it holds. With ``is_async`` the rank sends Staged later.
    """

    number: Count
    step: Count
    is_async: bool
    facts: dict[ShortText, ShortText]
    digests: tuple[bytes, ...]


class Joining(NamedTuple):
    """A rank will take part in a commit. Begin follows when it has captured its state, for as long as it lives.

    ``handle`` is the store that a trainer has opened, and ``background`` how many commits its saver got there before.
    Savers send neither.
    """

    number: Count
    step: Count
    handle: ShortText = ""
    background: Count = 0


class Content(NamedTuple):
    """A rank: the content of a digest that rank 0 wanted."""

    number: Count
    digest: bytes
    content: bytes


class Staged(NamedTuple):
    """A rank: all its bytes are staged. From now on it writes them even if its trainer dies."""

    number: Count


class Part(NamedTuple):
    """A rank: its packs are durable, and this is its part record. ``turn`` counts the parts of one commit from 0."""

    number: Count
    turn: Count
    content: bytes


class Abort(NamedTuple):
    """A rank: it cannot go on. The answer is Failed, or Done if the commit is published in any case."""

    number: Count
    step: Count
    error: ErrorRecord


class Ask(NamedTuple):
    """A rank: its value for a question that all ranks ask. ``number`` counts the questions of one topic from 1.

    With ``is_patient``, rank 0 waits for as long as the other ranks live.
    """

    topic: ShortText
    number: Count
    value: bytes
    is_patient: bool = False


class Left(NamedTuple):
    """A rank: what another rank, or this one, will not do. ``how`` follows "rank 3".

    A saver: the rank joins no commit up to number ``last``, or none any more if that is 0, because its trainer has lost
    its saver, or is lost itself. A trainer sends with ``handle`` that it has lost its saver in background commit
    ``last`` of that handle; rank 0 passes that on as SaverLost.
    """

    rank: Count
    how: ShortText
    last: Count = 0
    handle: ShortText = ""


class Wanted(NamedTuple):
    """Rank 0: send the content of these digests."""

    number: Count
    digests: tuple[bytes, ...]


class Write(NamedTuple):
    """Rank 0: all ranks have begun; hash and write. ``spans`` is None if it is the same as in the last Write."""

    number: Count
    spans: bytes | None


class AllStaged(NamedTuple):
    """Rank 0: all ranks are staged. The checkpoint is published even if all trainers die."""

    number: Count


class More(NamedTuple):
    """Rank 0: write this, too, and send another part."""

    number: Count
    turn: Count
    content: bytes


class Done(NamedTuple):
    """Rank 0: the checkpoint is published and durable."""

    number: Count
    receipt: bytes


class Failed(NamedTuple):
    """Rank 0: the commit failed. ``rank`` is the rank that caused it, if it was one."""

    number: Count
    rank: Count | None
    error: ErrorRecord


class Asked(NamedTuple):
    """Rank 0: another rank asks a question that this rank has not asked yet."""

    topic: ShortText
    number: Count


class Awaited(NamedTuple):
    """Rank 0: another rank has begun this commit, and this one has not for a while. The fields are those of Joining."""

    number: Count
    step: Count
    rank: Count
    handle: ShortText
    background: Count


class SaverLost(NamedTuple):
    """Rank 0: a trainer has lost its saver in this background commit of this handle. ``how`` follows "rank 3"."""

    number: Count
    rank: Count
    handle: ShortText
    how: ShortText


class Agreed(NamedTuple):
    """Rank 0: the answer to a question, or why there is none. One of ``value`` and ``error`` is None."""

    topic: ShortText
    number: Count
    value: bytes | None
    rank: Count | None
    error: ErrorRecord | None


class Beat(NamedTuple):
    """Both: this process is running."""


class Bye(NamedTuple):
    """Both: this side closes the connection in an orderly way. ``why`` names the rank that rank 0 lost first."""

    why: ShortText = ""


class Welcome(NamedTuple):
    """Rank 0: the rank has joined the job. ``nonce`` is random: a user may give several jobs the same token."""

    nonce: bytes


class Refused(NamedTuple):
    """Rank 0: the rank may not join, and why."""

    error: ErrorRecord


ToRank0 = Joining | Begin | Content | Staged | Part | Abort | Ask | Left
ToRank = Wanted | Write | AllStaged | More | Done | Failed | Asked | Agreed | Awaited | SaverLost
Message = ToRank0 | ToRank | Beat | Bye | Welcome | Refused

TO_RANK_0: tuple[type[Message], ...] = (Joining, Begin, Content, Staged, Part, Abort, Ask, Left, Beat, Bye)
TO_RANK: tuple[type[Message], ...] = (
    *(Wanted, Write, AllStaged, More, Done, Failed, Asked, Agreed, Awaited, SaverLost),
    *(Beat, Bye, Welcome, Refused),
)

KINDS: dict[int, type[Message]] = {
    1: Beat,
    2: Bye,
    3: Welcome,
    4: Refused,
    16: Begin,
    17: Content,
    18: Staged,
    19: Part,
    20: Abort,
    21: Ask,
    22: Joining,
    23: Left,
    32: Wanted,
    33: Write,
    34: AllStaged,
    35: More,
    36: Done,
    37: Failed,
    38: Asked,
    39: Agreed,
    40: Awaited,
    41: SaverLost,
}
_NUMBER_OF = {kind: number for number, kind in KINDS.items()}

_SMALL, _MEDIUM, _LARGE = 16 << 10, 256 << 10, 1 << 30
NBYTES_MAX: dict[type[Message], int] = {
    **dict.fromkeys(KINDS.values(), _SMALL),
    # An error has three texts of 8 KiB and 16 facts of at most 2 KiB.
    **dict.fromkeys((Begin, Ask, Wanted, Done, Abort, Failed, Agreed, Refused), _MEDIUM),
    # A part takes about 110 bytes for each chunk. A rank with 8 TB in chunks of 4 MiB sends 220 MB.
    **dict.fromkeys((Content, Part, Write, More), _LARGE),
}
"""Limits of encoded messages, the byte of the kind included."""


def encode_message(message: Message) -> bytes:
    """Return a message as bytes.

    Raises:
        RankError: It is too long.
    """
    kind = type(message)
    packet = bytes((_NUMBER_OF[kind],)) + encode_inner(message)
    if len(packet) > NBYTES_MAX[kind]:
        raise RankError(
            f"{kind.__name__}, a message between ranks, is too long: {len(packet)} bytes, at most {NBYTES_MAX[kind]}",
            todo="report this",
            nbytes=len(packet),
        )
    return packet


def kind_of(number: int, kinds: tuple[type[Message], ...], *, source: str) -> type[Message]:
    """Return the kind of a message that begins with this byte.

    Raises:
        UnsupportedError: This version does not know the kind.
        MalformedError: The kind is not one of those that may arrive here.
    """
    kind = KINDS.get(number)
    if kind is None:
        raise UnsupportedError(
            f"{source} sent a message of kind {number}, which version {PROTOCOL_VERSION} of the protocol between "
            "ranks does not have",
            todo="run the same version of ckstore on all ranks",
            kind=number,
        )
    if kind not in kinds:
        raise MalformedError(f"{source} sent {kind.__name__}, which may not arrive here", todo="report this")
    return kind


def check_length(kind: type[Message], nbytes: int, *, source: str) -> None:
    """Check the length of a message before memory is allocated for it.

    Raises:
        MalformedError: It is too long.
    """
    if nbytes > NBYTES_MAX[kind]:
        raise MalformedError(
            f"{source} sent {kind.__name__} with {nbytes} bytes; at most {NBYTES_MAX[kind]} are allowed",
            todo="report this",
        )


def decode_message(packet: bytes | memoryview, kinds: tuple[type[Message], ...], *, source: str) -> Message:
    """Decode a message of one of these kinds.

    Args:
        packet: The message.
        kinds: ``TO_RANK_0`` or ``TO_RANK``.
        source: The sender, such as ``rank 3 (host b)``, for error messages.

    Raises:
        MalformedError: The message is invalid, or its kind may not arrive here.
        UnsupportedError: This version does not know the kind.
    """
    if not len(packet):
        raise MalformedError(f"{source} sent an empty message", todo="report this")
    kind = kind_of(packet[0], kinds, source=source)
    check_length(kind, len(packet), source=source)
    return decode_inner(memoryview(packet)[1:], kind, where=f"{kind.__name__} of {source}")


def version_error(rank: int, theirs: int, their_release: str, ours: int, our_release: str) -> UnsupportedError:
    """Return the error for a rank that runs another version of ckstore than rank 0.

    Args:
        rank: That rank.
        theirs: Its version of the protocol.
        their_release: Its version of ckstore.
        ours: The version of the protocol on rank 0.
        our_release: The version of ckstore on rank 0.
    """
    return UnsupportedError(
        f"rank {rank} runs ckstore {their_release} (version {theirs} of the protocol between ranks), and rank 0 runs "
        f"ckstore {our_release} (version {ours})",
        todo="run the same version of ckstore on all ranks",
        rank=rank,
        version=theirs,
    )
