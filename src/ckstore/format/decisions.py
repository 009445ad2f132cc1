"""Decisions of a commit: the base of the checkpoint, and the estimates for each storage.

Decisions are part of the location section. They describe how bytes are stored, so a repack may change them, and the
checkpoint id does not cover them. A restore does not need them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckstore.errors import MalformedError
from ckstore.format.paths import SEQ_MAX
from ckstore.format.records import DecisionsRecord, decode_stored, encode_inner
from ckstore.format.wire import Reader

UNSAMPLED, FULL, DELTA, DERIVED, IDENTICAL, RESIDUAL = range(6)
MODE_NAMES = ("unsampled", "full", "delta", "derived", "identical", "residual")
BASES = ("none", "previous", "keyframe", "mixed")
VIEWS = BASES[:3]
"""Bases that one storage can be encoded against."""

BITS_STEP = 1 / 256
"""Resolution of the stored estimates, in bits."""

AGE_MAX = 0xFFFF

_HEAD = struct.Struct("<I")
_ROW = struct.Struct("<BBHHHH")
_NO_BITS = 0xFFFF


@dataclass(frozen=True, slots=True)
class StorageDecision:
    """The decision for one storage, and the estimates from a sample of it, in bits per element.

    Args:
        mode: Unsampled, full, delta, derived (rounded from another storage), identical to the base, or residual
            (lossy).
        full_bits: Estimate without a base; None: not estimated, here and below.
        previous_bits: Estimate against the previous commit.
        keyframe_bits: Estimate against the keyframe.
        view: The base that was chosen: ``"none"``, ``"previous"`` or ``"keyframe"``.
        age: Commits since the storage was last stored without a base; 0: this commit.
    """

    mode: int
    full_bits: float | None = None
    previous_bits: float | None = None
    keyframe_bits: float | None = None
    view: str = "none"
    age: int = 0

    @property
    def mode_name(self) -> str:
        """The name of the mode."""
        return MODE_NAMES[self.mode]


@dataclass(frozen=True, slots=True)
class Decisions:
    """The decisions of one commit.

    Args:
        base: ``"none"`` for a keyframe, else ``"previous"``, ``"keyframe"``, or ``"mixed"`` if storages differ.
        base_seq: The checkpoint whose chunks are the bases; None for a keyframe.
        keyframe_seq: The keyframe at the start of the chain; None for a keyframe itself.
        reason: A sentence for users.
        storages: One decision for each storage of the logical section.
    """

    base: str
    base_seq: int | None
    keyframe_seq: int | None
    reason: str
    storages: tuple[StorageDecision, ...]


def stored_bits(bits: float | None) -> float | None:
    """Return an estimate rounded to its stored resolution."""
    return None if bits is None else min(round(bits / BITS_STEP), _NO_BITS - 1) * BITS_STEP


def encode_decisions(decisions: Decisions | None) -> bytes:
    """Return the table; empty for None.

    Raises:
        MalformedError: A reader would refuse the table.
    """
    if decisions is None:
        return b""
    _check(decisions, None)
    head = encode_inner(
        DecisionsRecord(
            base=decisions.base,
            base_seq=decisions.base_seq,
            keyframe_seq=decisions.keyframe_seq,
            reason=decisions.reason,
        )
    )
    return _HEAD.pack(len(head)) + head + b"".join(_rows(decisions.storages))


def _rows(storages: Sequence[StorageDecision]) -> Iterator[bytes]:
    for storage in storages:
        bits = (storage.full_bits, storage.previous_bits, storage.keyframe_bits)
        view = VIEWS.index(storage.view)
        steps = (_NO_BITS if value is None else round(value / BITS_STEP) for value in bits)
        yield _ROW.pack(storage.mode, view, *steps, min(storage.age, AGE_MAX))


def decode_decisions(table: memoryview, *, where: object = None) -> Decisions | None:
    """Read the table.

    Raises:
        MalformedError: Lengths contradict each other, or a field is out of range.
    """
    if not len(table):
        return None
    reader = Reader(table, "a manifest's decisions", where)
    (head_nbytes,) = _HEAD.unpack(reader.take(_HEAD.size))
    record = decode_stored(reader.take(head_nbytes), DecisionsRecord, where=where)
    rows = reader.take((len(table) - _HEAD.size - head_nbytes) // _ROW.size * _ROW.size)
    reader.done()
    storages = []
    for mode, view, *steps, age in _ROW.iter_unpack(rows):
        if view >= len(VIEWS) or mode >= len(MODE_NAMES):
            raise MalformedError("the decision for a storage has fields out of range", where=where)
        full, previous, keyframe = (None if value == _NO_BITS else value * BITS_STEP for value in steps)
        storages.append(StorageDecision(mode, full, previous, keyframe, VIEWS[view], age))
    decisions = Decisions(
        base=record.base,
        base_seq=record.base_seq,
        keyframe_seq=record.keyframe_seq,
        reason=record.reason,
        storages=tuple(storages),
    )
    _check(decisions, where)
    return decisions


def _check(decisions: Decisions, where: object) -> None:
    is_keyframe = decisions.base == "none"
    if (
        decisions.base not in BASES
        or any(storage.view not in VIEWS for storage in decisions.storages)
        or is_keyframe != (decisions.base_seq is None)
        or is_keyframe != (decisions.keyframe_seq is None)
        or not all(0 <= (seq or 0) <= SEQ_MAX for seq in (decisions.base_seq, decisions.keyframe_seq))
    ):
        raise MalformedError("a manifest's decisions have fields out of range", where=where)
