"""Choose how a state is stored: whole, or as differences from an earlier checkpoint. Pure numbers, no bytes.

Each unit is stored whole, against the previous checkpoint or against the last keyframe, so that the commit costs the
fewest bytes while a restore reads no more than the policy's bound. Each unit has its own keyframe: it is stored whole
again when that costs less than the growth of its differences will (Check-N-Run's intermittent baselines, arXiv
2010.08679, for each tensor of its own).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TIE_SHARE = 0.01
"""A difference must save this much to be worth reading its base."""

_PRICE_STEPS = 40
"""Halvings of the price of a byte read: more change nothing."""

BaseKind = Literal["previous", "keyframe"]
BASE_KINDS: tuple[BaseKind, ...] = ("previous", "keyframe")


@dataclass(frozen=True, slots=True)
class AgainstBase:
    """What a unit would cost as a difference.

    Args:
        bits: Estimated bits per element.
        read_nbytes: Stored bytes of the base and of all that it needs.
        depth: Depth of the base's frame.
    """

    bits: float
    read_nbytes: int
    depth: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a sample says of a unit: a large storage, or the chunk that small ones share.

    Args:
        elements: Number of elements.
        full_bits: Estimated bits per element without a base.
        previous: Against the previous commit; None where there is no chunk of this length, or no sample of it.
        keyframe: Against the keyframe.
        age: Commits since the chunk at the root of its chain was written.
        identical_read_nbytes: The sample equals the previous commit's, so nothing will be written; what reading its
            frames costs. None where it differs.
    """

    elements: int
    full_bits: float
    previous: AgainstBase | None = None
    keyframe: AgainstBase | None = None
    age: int = 1
    identical_read_nbytes: int | None = None

    @property
    def full_nbytes(self) -> float:
        """Estimated bytes without a base."""
        return self.elements * self.full_bits / 8

    def against(self, view: BaseKind) -> AgainstBase | None:
        """What the unit costs against a base."""
        return self.previous if view == "previous" else self.keyframe

    def pays(self, view: BaseKind) -> bool:
        """Whether the difference is smaller by more than a tie."""
        other = self.against(view)
        return other is not None and other.bits < self.full_bits * (1 - TIE_SHARE)

    def is_due(self) -> bool:
        """Whether storing the unit whole now costs less than going on with differences from its old keyframe.

        A difference grows with the logarithm of the steps between (the change is a random walk; COMPRESSION section
        1.2), from what one commit makes to what it is now. Over as many commits as have gone by since the keyframe, a
        new one saves that much: the sum of ``1 - log(k) / log(age)`` for k from 1 to age, times the growth.
        """
        if self.previous is None or self.keyframe is None or self.age < 2:
            return False
        growth = self.keyframe.bits - self.previous.bits
        commits = self.age - math.lgamma(self.age + 1) / math.log(self.age)
        return growth * commits > self.full_bits - self.keyframe.bits

    def cost(self, view: BaseKind | None) -> float:
        """Estimated bytes to write."""
        if self.identical_read_nbytes is not None:
            return 0.0
        other = None if view is None else self.against(view)
        return self.full_nbytes if other is None else self.elements * other.bits / 8

    def read_cost(self, view: BaseKind | None) -> float:
        """Estimated bytes that a restore reads."""
        if self.identical_read_nbytes is not None:
            return float(self.identical_read_nbytes)
        other = None if view is None else self.against(view)
        return self.cost(view) + (0 if other is None else other.read_nbytes)

    def views(self, depth_max: int) -> list[BaseKind | None]:
        """Return the forms to choose from, whole first."""
        if self.identical_read_nbytes is not None and self.previous is not None and self.previous.depth < depth_max:
            # Nothing will be written; and where the sample has missed a change, that is small.
            return ["previous"]
        allowed: list[BaseKind | None] = [None]
        for view in BASE_KINDS:
            other = self.against(view)
            if other is not None and self.pays(view) and other.depth < depth_max:
                allowed.append(view)
        return allowed


@dataclass(frozen=True, slots=True)
class Decision:
    """The base of each unit, None where it is stored whole, and why.

    Args:
        kinds: The bases.
        reason: A sentence.
        saving: The part of it that also holds where the units are a small part of a state; empty: all of it does.
    """

    kinds: tuple[BaseKind | None, ...]
    reason: str
    saving: str = ""

    @property
    def is_keyframe(self) -> bool:
        """Whether nothing is stored as a difference."""
        return not any(self.kinds)

    @property
    def newest_base(self) -> BaseKind | None:
        """The newest checkpoint that something is stored against; None for a keyframe."""
        return "previous" if "previous" in self.kinds else "keyframe" if self.kinds and any(self.kinds) else None

    @property
    def base(self) -> str:
        """``none``, ``previous``, ``keyframe``, or ``mixed``."""
        found = {kind for kind in self.kinds if kind is not None}
        return "none" if not found else "mixed" if len(found) > 1 else found.pop()


def decide(estimates: Sequence[Estimate], *, read_amplification_max: float, depth_max: int) -> Decision:
    """Choose the base of every unit of a commit.

    Args:
        estimates: What the samples say of every unit.
        read_amplification_max: Bound on what a restore reads, in keyframes.
        depth_max: Bound on the depth of any frame.
    """
    keyframe = (None,) * len(estimates)
    if not any(estimate.against(view) for estimate in estimates for view in BASE_KINDS):
        return Decision(keyframe, "keyframe: nothing to take as base")
    keyframe_read_nbytes = max(1.0, sum(estimate.full_nbytes for estimate in estimates))
    read_nbytes_max = read_amplification_max * keyframe_read_nbytes
    allowed = [estimate.views(depth_max) for estimate in estimates]
    views = _cheapest(estimates, allowed, read_nbytes_max)
    due = {index for index, view in enumerate(views) if view == "keyframe" and estimates[index].is_due()}
    if due:
        # What they no longer read may be spent on others.
        allowed = [[None] if index in due else forms for index, forms in enumerate(allowed)]
        views = _cheapest(estimates, allowed, read_nbytes_max)
    share = _total(estimates, views) / max(1.0, _total(estimates, keyframe))
    if not any(views) or share > 1 - TIE_SHARE:
        why = "every part is due to be stored whole" if due else "differences within the bound would save too little"
        return Decision(keyframe, f"keyframe: {why} ({100 - 100 * min(1.0, share):.1f}%)")
    read = sum(estimate.read_cost(view) for estimate, view in zip(estimates, views, strict=True))
    found = Decision(tuple(views), "")
    bases = "both bases" if found.base == "mixed" else f"the {found.base}"
    saving = f"against {bases}: {100 * share:.1f}% of a keyframe's bytes"
    reading = f"a restore reads {read / keyframe_read_nbytes:.2f} keyframes, at most {read_amplification_max:g} allowed"
    whole = f"; {len(due)} of {len(views)} parts were due to be stored whole" if due else ""
    return Decision(found.kinds, f"{saving}; {reading}{whole}", f"{saving}{whole}")


def _cheapest(
    estimates: Sequence[Estimate], allowed: Sequence[Sequence[BaseKind | None]], read_nbytes_max: float
) -> list[BaseKind | None]:
    """Return the forms that cost the fewest bytes while a restore reads at most so many.

    Each byte read gets a price, the smallest at which what everyone then prefers keeps the bound (Lagrange; the best
    choice but for one unit).
    """

    def choose(price: float) -> list[BaseKind | None]:
        best: list[BaseKind | None] = []
        for estimate, views in zip(estimates, allowed, strict=True):
            prices = [estimate.cost(view) + price * estimate.read_cost(view) for view in views]
            best.append(views[prices.index(min(prices))])
        return best

    def fits(views: Sequence[BaseKind | None]) -> bool:
        read = sum(estimate.read_cost(view) for estimate, view in zip(estimates, views, strict=True))
        return read <= read_nbytes_max

    best = choose(0.0)
    if fits(best):
        return best
    # Above 1, whole is always preferred: a difference reads at least as much more as it saves.
    low, high = 0.0, 2.0
    best = choose(high)
    for _ in range(_PRICE_STEPS):
        middle = (low + high) / 2
        views = choose(middle)
        if fits(views):
            best, high = views, middle
        else:
            low = middle
    return best


def _total(estimates: Sequence[Estimate], views: Sequence[BaseKind | None]) -> float:
    return sum(estimate.cost(view) for estimate, view in zip(estimates, views, strict=True))
