"""What a checkpoint lost: for each storage that is not what was committed, how it was made and how far it is off.

Part of the logical section, because it says what the checkpoint *is*: a repack or a move leaves it alone, and the
checkpoint id covers it. A checkpoint of which every byte is what was committed has no such table.

Invariants:
- A storage that has no record here is, bit for bit, what was committed.
- The header's fidelity is ``exact`` where there is no record, and never otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckstore.config import Residual
from ckstore.errors import MalformedError
from ckstore.format.records import LossRow, decode_stored, encode_inner
from ckstore.format.tensors import StorageSpec

EXACT_FIDELITY = "exact"

ROLES = ("weight", "first", "second", "rounded")
"""What a storage was taken for: a weight, a first or second moment, or the rounding of another storage."""

HOPS_MAX = 0xFFFF
NUMBERS_MAX = 16
"""Parameters of one method."""

_WORD = re.compile(r"[a-z0-9][a-z0-9_.-]{0,31}", re.ASCII)
_SLACK = 1 + 1e-6
"""An RMS is at most the maximum, but for the rounding of a sum."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What became of one storage that was stored with a loss; errors are those of this commit alone.

    Args:
        storage: Index of the storage.
        role: What it was taken for: ``"weight"``, ``"first"`` or ``"second"`` moment, ``"rounded"``.
        method: How it was quantized, in a word: ``"grid"``, ``"rank1"``, ``"log"``, ``"ternary"``, ...
        numbers: The method's parameters.
        bits: Stored bits per element, as the commit wrote it.
        max_abs: Greatest error of any element.
        rms_error: Root of the mean squared error.
        rms_value: Root of the mean square of what was committed.
        kept: Share of the elements whose code is not zero.
        hops: Commits with a loss since the storage was last exact, this one included.
        spike: Largest |update| / lr of a virtual next step of Adam, over every gradient; None where the optimizer's
            constants are not known, and for what is no moment.
    """

    storage: int
    role: str
    method: str
    bits: float
    max_abs: float
    rms_error: float
    rms_value: float
    kept: float
    hops: int = 1
    spike: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def rel_rms(self) -> float:
        """RMS error in the RMS of the values; infinite where those are zero and the error is not."""
        if self.rms_error == 0:
            return 0.0
        return self.rms_error / self.rms_value if self.rms_value else math.inf


def fidelity_of(residual: Residual | None, losses: Sequence[Loss]) -> str:
    """Return the fidelity that a manifest's header records: ``exact``, or the name of the residual policy.

    Characters that a header does not allow become hyphens. A policy that is called ``exact`` is recorded as ``own``.
    """
    if residual is None or not losses:
        return EXACT_FIDELITY
    word = re.sub(r"[^a-z0-9_.-]+", "-", residual.name.lower()).strip("-_.")[:32]
    return word if word and word != EXACT_FIDELITY else "own"


def encode_losses(losses: Sequence[Loss]) -> bytes:
    """Return the table; nothing for a checkpoint that lost nothing."""
    if not losses:
        return b""
    return encode_inner(
        [
            LossRow(
                storage=loss.storage,
                role=loss.role,
                method=loss.method,
                bits=float(loss.bits),
                max_abs=float(loss.max_abs),
                rms_error=float(loss.rms_error),
                rms_value=float(loss.rms_value),
                kept=float(loss.kept),
                hops=min(loss.hops, HOPS_MAX),
                spike=None if loss.spike is None else float(loss.spike),
                numbers={name: float(value) for name, value in sorted(loss.numbers.items())},
            )
            for loss in losses
        ]
    )


def decode_losses(table: memoryview, *, where: object = None) -> tuple[Loss, ...]:
    """Read the table, which may be missing but not empty.

    Raises:
        MalformedError: Other fields or types, or a table without a row.
    """
    if not len(table):
        return ()
    rows = decode_stored(table, list[LossRow], where=where)
    if not rows:
        raise MalformedError("a manifest's losses are an empty table", where=where)
    return tuple(
        Loss(
            storage=row.storage,
            role=row.role,
            method=row.method,
            bits=row.bits,
            max_abs=row.max_abs,
            rms_error=row.rms_error,
            rms_value=row.rms_value,
            kept=row.kept,
            hops=row.hops,
            spike=row.spike,
            numbers=row.numbers,
        )
        for row in rows
    )


def check_losses(losses: Sequence[Loss], storages: Sequence[StorageSpec], where: object) -> None:
    """Refuse what contradicts itself or cannot be: both before writing and after reading.

    Raises:
        MalformedError: A storage is not there, no float, empty, or named twice; a number is out of range.
    """
    last = -1
    for loss in losses:
        if not last < loss.storage < len(storages):
            raise MalformedError("losses name a storage that is not there, twice, or out of order", where=where)
        last = loss.storage
        spec = storages[loss.storage]
        if not spec.is_float or spec.element_width not in (2, 4) or not spec.nbytes:
            raise MalformedError("a storage that is no float, or empty, is said to have lost something", where=where)
        numbers = (loss.bits, loss.max_abs, loss.rms_error, loss.rms_value, loss.spike or 0.0)
        if (
            loss.role not in ROLES
            or not _WORD.fullmatch(loss.method)
            or not all(math.isfinite(number) and number >= 0 for number in numbers)
            or loss.rms_error > loss.max_abs * _SLACK
            or not 0 <= loss.kept <= 1
            or not 1 <= loss.hops <= HOPS_MAX
            or len(loss.numbers) > NUMBERS_MAX
            or not all(_WORD.fullmatch(name) and math.isfinite(value) for name, value in loss.numbers.items())
        ):
            raise MalformedError("a loss has fields out of range", where=where)


def check_fidelity(fidelity: str, losses: Sequence[Loss], where: object) -> None:
    """Refuse a checkpoint that says it is exact and is not, or the other way round.

    Raises:
        MalformedError: The text is no word, or contradicts the table.
    """
    if not _WORD.fullmatch(fidelity) or (fidelity == EXACT_FIDELITY) != (not losses):
        raise MalformedError("a manifest's fidelity contradicts what it says of its losses", where=where)
