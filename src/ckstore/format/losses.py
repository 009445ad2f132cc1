"""The losses of a checkpoint: the method and the errors of each storage that was stored lossily.

Losses are part of the logical section, because they describe the content: a repack does not change them, and the
checkpoint id covers them. An exact checkpoint has no such table.

Invariants:
- A storage without a row here is bit for bit what was committed.
- The header's fidelity is ``exact`` if and only if there are no rows.
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
"""Roles of lossy storages: a weight, a first or second moment, or the rounding of another storage."""

HOPS_MAX = 0xFFFF
NUMBERS_MAX = 16
"""Most parameters of one method."""

_WORD = re.compile(r"[a-z0-9][a-z0-9_.-]{0,31}", re.ASCII)
_SLACK = 1 + 1e-6
"""Tolerance for the rule that an RMS is at most the maximum, because the sum is rounded."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one lossy storage; errors are those of this commit alone.

    Args:
        storage: Index of the storage.
        role: Its role: ``"weight"``, ``"first"`` or ``"second"`` moment, ``"rounded"``.
        method: Name of the quantization method: ``"grid"``, ``"rank1"``, ``"log"``, ``"ternary"``, ...
        numbers: The method's parameters.
        bits: Stored bits per element.
        max_abs: Largest absolute error of an element.
        rms_error: Root mean square of the errors.
        rms_value: Root mean square of the committed values.
        kept: Share of the elements whose code is not zero.
        hops: Lossy commits since the storage was last exact, including this one.
        spike: Largest |update| / lr of the next Adam step, over all possible gradients; None for weights, and if the
            optimizer's constants are unknown.
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
        """RMS error divided by RMS value; infinite if only the value is zero."""
        if self.rms_error == 0:
            return 0.0
        return self.rms_error / self.rms_value if self.rms_value else math.inf


def fidelity_of(residual: Residual | None, losses: Sequence[Loss]) -> str:
    """Return the fidelity for a manifest's header: ``exact``, or the name of the residual policy.

    Characters that a header does not allow become hyphens. A policy named ``exact`` is stored as ``own``.
    """
    if residual is None or not losses:
        return EXACT_FIDELITY
    word = re.sub(r"[^a-z0-9_.-]+", "-", residual.name.lower()).strip("-_.")[:32]
    return word if word and word != EXACT_FIDELITY else "own"


def encode_losses(losses: Sequence[Loss]) -> bytes:
    """Return the table; empty for an exact checkpoint."""
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
    """Decode the table, which may be missing but not without rows.

    Raises:
        MalformedError: Wrong fields or types, or a table without rows.
    """
    if not len(table):
        return ()
    rows = decode_stored(table, list[LossRow], where=where)
    if not rows:
        raise MalformedError("the table of losses of a manifest has no rows", where=where)
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
    """Check the losses, before writing and after reading.

    Raises:
        MalformedError: A storage is missing, not float, empty or repeated, or a number is out of range.
    """
    last = -1
    for loss in losses:
        if not last < loss.storage < len(storages):
            raise MalformedError(
                "losses name a storage that does not exist, name one twice, or are out of order", where=where
            )
        last = loss.storage
        spec = storages[loss.storage]
        if not spec.is_float or spec.element_width not in (2, 4) or not spec.nbytes:
            raise MalformedError("a loss belongs to a storage that is empty or not float", where=where)
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
    """Check that the fidelity is ``exact`` if and only if there are no losses.

    Raises:
        MalformedError: It is not, or the fidelity is not a valid word.
    """
    if not _WORD.fullmatch(fidelity) or (fidelity == EXACT_FIDELITY) != (not losses):
        raise MalformedError("the fidelity of a manifest contradicts its losses", where=where)
