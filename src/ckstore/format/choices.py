"""Why a checkpoint is stored as it is: the base it was coded against, and what the samples said of each storage.

Part of the location section, since it concerns the form of the bytes and not the bytes: a repack may change it, and
the checkpoint's identity does not cover it. Nothing is needed from here to restore.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckstore.errors import MalformedError
from ckstore.format.paths import SEQ_MAX
from ckstore.format.records import ChoicesRecord, decode_stored, encode_inner
from ckstore.format.wire import Reader

UNSAMPLED, FULL, DELTA, DERIVED, IDENTICAL, RESIDUAL = range(6)
MODE_NAMES = ("unsampled", "full", "delta", "derived", "identical", "residual")
BASES = ("none", "previous", "keyframe", "mixed")
VIEWS = BASES[:3]
"""What one storage is coded against."""

BITS_STEP = 1 / 256
"""Estimates are kept in steps of this many bits."""

AGE_MAX = 0xFFFF

_HEAD = struct.Struct("<I")
_ROW = struct.Struct("<BBHHHH")
_NO_BITS = 0xFFFF


@dataclass(frozen=True, slots=True)
class StorageChoice:
    """How one storage was to be stored, and what a sample of it promised, in bits per element.

    Args:
        mode: Unsampled, full, delta, derived (the rounding of another storage), identical (to the base's), or residual
            (with a loss).
        full_bits: Without a base; None where nothing was estimated, here and below.
        previous_bits: Against the previous commit.
        keyframe_bits: Against the keyframe.
        view: Which of them was its base: ``"none"``, ``"previous"`` or ``"keyframe"``.
        age: Commits since it was last stored whole; 0 if it is so here.
    """

    mode: int
    full_bits: float | None = None
    previous_bits: float | None = None
    keyframe_bits: float | None = None
    view: str = "none"
    age: int = 0

    @property
    def mode_name(self) -> str:
        """The mode in a word."""
        return MODE_NAMES[self.mode]


@dataclass(frozen=True, slots=True)
class Choices:
    """What one commit decided.

    Args:
        base: ``"none"`` for a keyframe, else ``"previous"``, ``"keyframe"``, or ``"mixed"`` where storages differ.
        base_seq: The checkpoint whose chunks serve as bases; None for a keyframe.
        keyframe_seq: The keyframe that it goes back to; None for a keyframe itself.
        reason: A sentence for people.
        storages: One for each storage of the logical section.
    """

    base: str
    base_seq: int | None
    keyframe_seq: int | None
    reason: str
    storages: tuple[StorageChoice, ...]


def stored_bits(bits: float | None) -> float | None:
    """Return an estimate as it comes back from disk."""
    return None if bits is None else min(round(bits / BITS_STEP), _NO_BITS - 1) * BITS_STEP


def encode_choices(choices: Choices | None) -> bytes:
    """Return the table; nothing for None.

    Raises:
        MalformedError: A reader would refuse it.
    """
    if choices is None:
        return b""
    _check(choices, None)
    head = encode_inner(
        ChoicesRecord(
            base=choices.base,
            base_seq=choices.base_seq,
            keyframe_seq=choices.keyframe_seq,
            reason=choices.reason,
        )
    )
    return _HEAD.pack(len(head)) + head + b"".join(_rows(choices.storages))


def _rows(storages: Sequence[StorageChoice]) -> Iterator[bytes]:
    for storage in storages:
        bits = (storage.full_bits, storage.previous_bits, storage.keyframe_bits)
        view = VIEWS.index(storage.view)
        steps = (_NO_BITS if value is None else round(value / BITS_STEP) for value in bits)
        yield _ROW.pack(storage.mode, view, *steps, min(storage.age, AGE_MAX))


def decode_choices(table: memoryview, *, where: object = None) -> Choices | None:
    """Read the table.

    Raises:
        MalformedError: Lengths contradict each other, or a field is out of range.
    """
    if not len(table):
        return None
    reader = Reader(table, "a manifest's choices", where)
    (head_nbytes,) = _HEAD.unpack(reader.take(_HEAD.size))
    record = decode_stored(reader.take(head_nbytes), ChoicesRecord, where=where)
    rows = reader.take((len(table) - _HEAD.size - head_nbytes) // _ROW.size * _ROW.size)
    reader.done()
    storages = []
    for mode, view, *steps, age in _ROW.iter_unpack(rows):
        if view >= len(VIEWS) or mode >= len(MODE_NAMES):
            raise MalformedError("a storage's choice has fields out of range", where=where)
        full, previous, keyframe = (None if value == _NO_BITS else value * BITS_STEP for value in steps)
        storages.append(StorageChoice(mode, full, previous, keyframe, VIEWS[view], age))
    choices = Choices(
        base=record.base,
        base_seq=record.base_seq,
        keyframe_seq=record.keyframe_seq,
        reason=record.reason,
        storages=tuple(storages),
    )
    _check(choices, where)
    return choices


def _check(choices: Choices, where: object) -> None:
    is_keyframe = choices.base == "none"
    if (
        choices.base not in BASES
        or any(storage.view not in VIEWS for storage in choices.storages)
        or is_keyframe != (choices.base_seq is None)
        or is_keyframe != (choices.keyframe_seq is None)
        or not all(0 <= (seq or 0) <= SEQ_MAX for seq in (choices.base_seq, choices.keyframe_seq))
    ):
        raise MalformedError("a manifest's choices have fields out of range", where=where)
