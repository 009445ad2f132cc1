"""Choose for each unit of a state: store it whole, or as a difference from the previous checkpoint or the keyframe.

The choice minimizes the bytes that the commit writes, while a restore reads at most as many bytes as the policy
allows. Each unit has its own keyframe: it is stored whole again as soon as that costs less than the expected growth of
its differences (the intermittent baselines of Check-N-Run, arXiv 2010.08679, for each tensor). Works on numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TIE_SHARE = 0.01
"""A difference must save at least this share to be worth reading its base."""

_PRICE_BISECTIONS = 40
"""Steps of the bisection of the price of a byte read; more change nothing."""

BaseKind = Literal["previous", "keyframe"]
BASE_KINDS: tuple[BaseKind, ...] = ("previous", "keyframe")


@dataclass(frozen=True, slots=True)
class DeltaCost:
    """The cost of a unit as a difference from one kind of base.

    Args:
        bits: Estimated bits per element.
        read_nbytes: Stored bytes of the base and of all its bases.
        depth: Depth of the base's frame.
    """

    bits: float
    read_nbytes: int
    depth: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated costs of a unit: a large storage, or a chunk that small ones share.

    Args:
        elements: Number of elements.
        full_bits: Estimated bits per element without a base.
        previous: As a difference from the previous commit; None without a chunk of the same length.
        keyframe: As a difference from the keyframe; None likewise.
        age: Commits since the unit was stored whole.
        identical_read_nbytes: Stored bytes of the previous commit's frames if the samples are equal, so that nothing
            needs to be written; None if they differ.
    """

    elements: int
    full_bits: float
    previous: DeltaCost | None = None
    keyframe: DeltaCost | None = None
    age: int = 1
    identical_read_nbytes: int | None = None

    @property
    def full_nbytes(self) -> float:
        """Estimated bytes without a base."""
        return self.elements * self.full_bits / 8

    def against(self, kind: BaseKind) -> DeltaCost | None:
        """Return the cost as a difference from one kind of base."""
        return self.previous if kind == "previous" else self.keyframe

    def saves(self, kind: BaseKind) -> bool:
        """Return True if the difference saves more than ``TIE_SHARE``."""
        other = self.against(kind)
        return other is not None and other.bits < self.full_bits * (1 - TIE_SHARE)

    def is_due(self) -> bool:
        """Return True if storing the unit whole now costs less than further differences from its old keyframe.

        The change of a weight is a random walk, so a difference's bits grow with the logarithm of the commits since
        the keyframe: from ``previous.bits`` after one commit to ``keyframe.bits`` after ``age``. Over the next ``age``
        commits a new keyframe saves the growth times the sum of ``1 - log(k) / log(age)`` for k from 1 to ``age``.
        """
        if self.previous is None or self.keyframe is None or self.age < 2:
            return False
        growth = self.keyframe.bits - self.previous.bits
        commits = self.age - math.lgamma(self.age + 1) / math.log(self.age)
        return growth * commits > self.full_bits - self.keyframe.bits

    def cost(self, kind: BaseKind | None) -> float:
        """Return the estimated bytes to write."""
        if self.identical_read_nbytes is not None:
            return 0.0
        other = None if kind is None else self.against(kind)
        return self.full_nbytes if other is None else self.elements * other.bits / 8

    def read_cost(self, kind: BaseKind | None) -> float:
        """Return the estimated bytes that a restore reads."""
        if self.identical_read_nbytes is not None:
            return float(self.identical_read_nbytes)
        other = None if kind is None else self.against(kind)
        return self.cost(kind) + (0 if other is None else other.read_nbytes)

    def allowed_kinds(self, depth_max: int) -> list[BaseKind | None]:
        """Return the kinds of base to choose from; the first is None, for storing the unit whole."""
        if self.identical_read_nbytes is not None and self.previous is not None and self.previous.depth < depth_max:
            # Nothing will be written. A change that the sample missed is small.
            return ["previous"]
        allowed: list[BaseKind | None] = [None]
        for kind in BASE_KINDS:
            other = self.against(kind)
            if other is not None and self.saves(kind) and other.depth < depth_max:
                allowed.append(kind)
        return allowed


@dataclass(frozen=True, slots=True)
class Decision:
    """The kind of base of each unit, None if it is stored whole, and the reason.

    Args:
        kinds: For each unit, the kind of its base.
        reason: The reason in a sentence, as recorded in the manifest.
        saving: The part of the reason that also holds if the units are a small part of the state; empty if all of it
            does.
    """

    kinds: tuple[BaseKind | None, ...]
    reason: str
    saving: str = ""

    @property
    def is_keyframe(self) -> bool:
        """Return True if no unit is stored as a difference."""
        return not any(self.kinds)

    @property
    def newest_base(self) -> BaseKind | None:
        """The newest kind of base that a unit has; None for a keyframe."""
        return "previous" if "previous" in self.kinds else "keyframe" if self.kinds and any(self.kinds) else None

    @property
    def base(self) -> str:
        """``none``, ``previous``, ``keyframe``, or ``mixed``."""
        found = {kind for kind in self.kinds if kind is not None}
        return "none" if not found else "mixed" if len(found) > 1 else found.pop()


def decide(estimates: Sequence[Estimate], *, read_amplification_max: float, depth_max: int) -> Decision:
    """Choose the kind of base of every unit of a commit.

    Args:
        estimates: The estimated costs of every unit.
        read_amplification_max: Bound on the bytes that a restore reads, in keyframes.
        depth_max: Bound on the depth of a frame.
    """
    keyframe = (None,) * len(estimates)
    if not any(estimate.against(kind) for estimate in estimates for kind in BASE_KINDS):
        return Decision(keyframe, "keyframe: nothing to take as base")
    keyframe_read_nbytes = max(1.0, sum(estimate.full_nbytes for estimate in estimates))
    read_nbytes_max = read_amplification_max * keyframe_read_nbytes
    allowed = [estimate.allowed_kinds(depth_max) for estimate in estimates]
    kinds = _cheapest(estimates, allowed, read_nbytes_max)
    due = {index for index, kind in enumerate(kinds) if kind == "keyframe" and estimates[index].is_due()}
    if due:
        # The bytes that they no longer read are available to other units.
        allowed = [[None] if index in due else forms for index, forms in enumerate(allowed)]
        kinds = _cheapest(estimates, allowed, read_nbytes_max)
    share = _total(estimates, kinds) / max(1.0, _total(estimates, keyframe))
    if not any(kinds) or share > 1 - TIE_SHARE:
        why = "every part is due to be stored whole" if due else "differences within the bound would save too little"
        return Decision(keyframe, f"keyframe: {why} ({100 - 100 * min(1.0, share):.1f}%)")
    read = sum(estimate.read_cost(kind) for estimate, kind in zip(estimates, kinds, strict=True))
    found = Decision(tuple(kinds), "")
    bases = "both bases" if found.base == "mixed" else f"the {found.base}"
    saving = f"against {bases}: {100 * share:.1f}% of a keyframe's bytes"
    reading = f"a restore reads {read / keyframe_read_nbytes:.2f} keyframes, at most {read_amplification_max:g} allowed"
    whole = f"; {len(due)} of {len(kinds)} parts were due to be stored whole" if due else ""
    return Decision(found.kinds, f"{saving}; {reading}{whole}", f"{saving}{whole}")


def _cheapest(
    estimates: Sequence[Estimate], allowed: Sequence[Sequence[BaseKind | None]], read_nbytes_max: float
) -> list[BaseKind | None]:
    """Return the kinds that cost the fewest bytes to write while a restore reads at most ``read_nbytes_max``.

    Lagrangian relaxation: each byte read gets a price, each unit chooses its cheapest kind, and bisection finds the
    smallest price at which the bound is kept. The result is optimal except for one unit.
    """

    def choose(price: float) -> list[BaseKind | None]:
        best: list[BaseKind | None] = []
        for estimate, kinds in zip(estimates, allowed, strict=True):
            prices = [estimate.cost(kind) + price * estimate.read_cost(kind) for kind in kinds]
            best.append(kinds[prices.index(min(prices))])
        return best

    def fits(kinds: Sequence[BaseKind | None]) -> bool:
        read = sum(estimate.read_cost(kind) for estimate, kind in zip(estimates, kinds, strict=True))
        return read <= read_nbytes_max

    best = choose(0.0)
    if fits(best):
        return best
    # At a price above 1 every unit is stored whole, because a difference reads at least as many bytes as it saves.
    low, high = 0.0, 2.0
    best = choose(high)
    for _ in range(_PRICE_BISECTIONS):
        middle = (low + high) / 2
        kinds = choose(middle)
        if fits(kinds):
            best, high = kinds, middle
        else:
            low = middle
    return best


def _total(estimates: Sequence[Estimate], kinds: Sequence[BaseKind | None]) -> float:
    return sum(estimate.cost(kind) for estimate, kind in zip(estimates, kinds, strict=True))
