"""What a person asks of residual checkpoints: steps for each part of the state, and bounds that are held.

Invariants:
- Everything is frozen and checked where it is made; nothing here reads a tensor.
- Steps have no physical unit: those of weights count the RMS of a row's change, those of first moments the root of
  the second moment. What works for one size of model works for another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from ckstore.errors import UsageError

__all__ = [
    "EXACT",
    "LEVELS_MAX",
    "FirstMomentSettings",
    "LowRank",
    "Residual",
    "SecondMomentSettings",
    "TensorSettings",
    "WeightSettings",
]

LEVELS_MAX = 127
"""Most levels on either side of zero."""

EXACT: Literal["exact"] = "exact"


def _check_choice(settings: object, field: str, given: object, choices: tuple[str, ...]) -> None:
    if given not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise UsageError(f"{field} must be one of {listed}", where=f"{type(settings).__name__}({field}={given!r})")


def _check_range(settings: object, field: str, given: object, least: float, most: float) -> None:
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool) and not math.isnan(given)
    if not is_number or not least <= given <= most:  # type: ignore[operator]
        raise UsageError(
            f"{field} must be between {least} and {most}", where=f"{type(settings).__name__}({field}={given!r})"
        )


@dataclass(frozen=True, slots=True)
class LowRank:
    """How a matrix is told as a sum of a few outer products; training moves weights along few directions at a time.

    Args:
        step: Width of a step of the transform's coefficients: of weights in the RMS of the change, of first moments in
            the root of the second moment, of second moments in the product of their row's and column's factors.
        rank_max: Most outer products.
        error_max: Share of the energy that may be left over; above it the grid is taken.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    step: float = 1.0
    rank_max: int = 64
    error_max: float = 0.5

    def __post_init__(self) -> None:
        _check_range(self, "step", self.step, 1e-3, 100.0)
        _check_range(self, "rank_max", self.rank_max, 1, 256)
        _check_range(self, "error_max", self.error_max, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class WeightSettings:
    """How the change of a weight since its base is quantized: uniform steps around a dead zone.

    Args:
        step: Width of a step, in the RMS of the change; scales are kept for each row.
        dead_zone: Changes of less than so many steps become zero; 0.5 is plain rounding.
        levels_max: Steps on either side of zero; what lies beyond is stored exactly.
        scale: ``"row"``: steps follow each row's RMS; ``"chunk"``: one step for all, which has the least squared error.
        low_rank: Tried first, where it is given: the rest is for matrices that few directions do not describe.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    step: float = 0.5
    dead_zone: float = 0.6
    levels_max: int = 63
    scale: Literal["row", "chunk"] = "row"
    low_rank: LowRank | None = None

    def __post_init__(self) -> None:
        _check_range(self, "step", self.step, 1e-3, 100.0)
        _check_range(self, "dead_zone", self.dead_zone, 0.5, 10.0)
        _check_range(self, "levels_max", self.levels_max, 1, LEVELS_MAX)
        _check_choice(self, "scale", self.scale, ("row", "chunk"))


@dataclass(frozen=True, slots=True)
class SecondMomentSettings:
    """How a second moment is quantized; what was not zero never becomes zero.

    Args:
        form: ``"rank1"``: a factor for each row and one for each column; ``"log"``: what the factors leave over goes
            on a grid of logarithms, too.
        log_step: Width of that grid, in powers of two of the *root* of the moment.
        low_rank: Tried first, where it is given: the rest is for matrices that few directions do not describe.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    form: Literal["rank1", "log"] = "rank1"
    log_step: float = 0.5
    low_rank: LowRank | None = None

    def __post_init__(self) -> None:
        _check_choice(self, "form", self.form, ("rank1", "log"))
        _check_range(self, "log_step", self.log_step, 1.0 / 64, 4.0)


@dataclass(frozen=True, slots=True)
class FirstMomentSettings:
    """How a first moment, divided by the root of the second, is quantized.

    Args:
        form: ``"grid"``: uniform steps around a dead zone; ``"ternary"``: the same with one level on either side;
            ``"dropped"``: zero.
        step: Width of a step, in the root of the second moment.
        dead_zone: Less than so many steps become zero.
        clip: Greatest quotient that is kept; what lies beyond is clipped. Where the second moment is zero nothing is
            kept, and where much of the first one stands there, both are stored exactly.
        low_rank: Tried first, where it is given: the rest is for matrices that few directions do not describe.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    form: Literal["grid", "ternary", "dropped"] = "grid"
    step: float = 0.5
    dead_zone: float = 0.6
    clip: float = 8.0
    low_rank: LowRank | None = None

    def __post_init__(self) -> None:
        _check_choice(self, "form", self.form, ("grid", "ternary", "dropped"))
        _check_range(self, "step", self.step, 1e-3, 100.0)
        _check_range(self, "dead_zone", self.dead_zone, 0.5, 10.0)
        _check_range(self, "clip", self.clip, 1e-3, 1e6)


@dataclass(frozen=True, slots=True)
class TensorSettings:
    """How a weight and its moments are stored; each part may stay exact."""

    weights: WeightSettings | Literal["exact"] = WeightSettings()
    first: FirstMomentSettings | Literal["exact"] = FirstMomentSettings()
    second: SecondMomentSettings | Literal["exact"] = SecondMomentSettings()


Rule = tuple[str, "TensorSettings | Literal['exact']"]


@dataclass(frozen=True, slots=True)
class Residual:
    """A fidelity that loses something, for ``Policy(fidelity=...)``: how much, and what must not be exceeded.

    Take ``Residual.near()`` or ``Residual.small()``, and change what should be different with
    ``dataclasses.replace`` or the arguments of these.

    Args:
        name: What reports call it.
        tensors: How tensors are stored that no rule names.
        rules: Globs over dotted paths of leaves, or of what they are in, and how the tensors there are stored; the
            first match counts, and a receipt warns of globs that match nothing. A glob of more than
            ``*`` also makes weights of matrices that no key says are some.
        max_rel_rms: Greatest RMS error of a tensor, in the RMS of its values; None: no bound.
        max_abs: Greatest error of any element of a weight; None: no bound.
        bits_per_parameter: Bits that all tensors of a parameter are to take together: their steps are scaled, by 1/8 to
            16, until they take about so many and not more. What takes more even then breaks a bound. None: as it comes.
        on_bound: What happens where a bound cannot be met: ``"raise"`` a BoundError, or store the tensor ``"exact"``.
        keyframe_every: One checkpoint in so many is exact as a whole, weights and moments, so that chains end; so is
            the first one of a run.
        nelements_min: Tensors of fewer elements, and those of one dimension, stay exact.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    name: str = "own"
    tensors: TensorSettings = TensorSettings()
    rules: tuple[Rule, ...] = ()
    max_rel_rms: float | None = None
    max_abs: float | None = None
    bits_per_parameter: float | None = None
    on_bound: Literal["raise", "exact"] = "exact"
    keyframe_every: int = 20
    nelements_min: int = 4096

    def __post_init__(self) -> None:
        for bound in ("max_rel_rms", "max_abs", "bits_per_parameter"):
            value = getattr(self, bound)
            if value is not None:
                _check_range(self, bound, value, 0.0, 1e30)
        _check_choice(self, "on_bound", self.on_bound, ("raise", "exact"))
        _check_range(self, "keyframe_every", self.keyframe_every, 1, 1 << 30)
        _check_range(self, "nelements_min", self.nelements_min, 1, 1 << 40)
        for rule in self.rules:
            is_rule = isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str)
            if not is_rule or not (rule[1] == EXACT or isinstance(rule[1], TensorSettings)):
                raise UsageError("a rule is a glob and TensorSettings or 'exact'", where=f"Residual(rules={rule!r})")

    def settings_for(self, paths: Iterable[str]) -> TensorSettings | Literal["exact"]:
        """Return how a tensor is stored that is known by these dotted paths."""
        words = list(paths)
        for glob, settings in self.rules:
            if any(_is_meant(path, glob) for path in words):
                return settings
        return self.tensors

    def names(self, path: str) -> bool:
        """Whether a rule says how the tensor at a dotted path is quantized, and does not say it of everything."""
        glob, settings = next((rule for rule in self.rules if _is_meant(path, rule[0])), ("", EXACT))
        return bool(glob.strip("*?")) and settings != EXACT

    def globs_without(self, paths: Iterable[str]) -> list[str]:
        """Return the globs of rules that name none of the leaves at these dotted paths."""
        words = list(paths) if self.rules else []
        return [glob for glob, _ in self.rules if not any(_is_meant(path, glob) for path in words)]

    @staticmethod
    def near(**changes: object) -> Residual:
        """Return the fidelity whose resumes nobody should be able to tell from exact ones: 20 to 60 times smaller."""
        # More directions cost more than they bring: near() of 96 / 96 / 64 in bench/resume_gap, and docs/BENCH.md.
        settings = TensorSettings(
            WeightSettings(step=0.5, low_rank=LowRank(step=0.7, rank_max=80, error_max=0.2)),
            FirstMomentSettings(step=0.5, low_rank=LowRank(step=0.15, rank_max=80, error_max=0.2)),
            SecondMomentSettings(low_rank=LowRank(step=0.25, rank_max=16, error_max=1.0)),
        )
        return _changed(Residual("near", settings), changes)

    @staticmethod
    def small(**changes: object) -> Residual:
        """Return the fidelity for history and evaluation: 50 to 120 times smaller."""
        settings = TensorSettings(
            WeightSettings(step=2.0, low_rank=LowRank(step=1.5, error_max=0.6)),
            FirstMomentSettings(form="ternary", step=1.5, low_rank=LowRank(step=0.4, error_max=0.6)),
            SecondMomentSettings(low_rank=LowRank(step=1.0, error_max=1.0)),
        )
        return _changed(Residual("small", settings), changes)


def _is_meant(path: str, glob: str) -> bool:
    """Whether a glob names a leaf, or something that the leaf is in."""
    return fnmatchcase(path, glob) or fnmatchcase(path, f"{glob}.*")


def _changed(residual: Residual, changes: dict[str, object]) -> Residual:
    unknown = changes.keys() - set(Residual.__dataclass_fields__)
    if unknown:
        raise UsageError(f"Residual has no field {sorted(unknown)[0]!r}", where=f"Residual.{residual.name}(...)")
    return replace(residual, **changes)  # type: ignore[arg-type]
