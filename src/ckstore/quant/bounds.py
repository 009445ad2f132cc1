"""Sum up the errors of each quantized tensor, and decide which tensors must be stored exactly after all.

Invariants:
- A tensor is quantized as a whole or not at all: one chunk that cannot be quantized makes the tensor exact.
- A second moment and its first moment are both quantized or both exact, because their quotient is the optimizer's step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckstore.config import Residual, WeightSettings
from ckstore.errors import BoundError, counted
from ckstore.format.logical import Loss
from ckstore.quant.chunk_codec import numbers_of, word_of
from ckstore.quant.error_stats import Distance, Errors
from ckstore.quant.planning import LossyTensor
from ckstore.quant.roles import AdamConstants, Role

STEP_RATIO_MAX = 10.0
STEP_RATIO_SHARE_MAX = 1.5
"""Bounds on |update| / lr of the next step: absolute, and relative to the largest step of an exact state."""

_INFLATED_SHARE_MAX = 0.01
"""Bound on the share of a moment's energy that is lost where second moments are too small to be represented."""

_CHANGE_MAX = 1.1
"""Bound on the energy of a weight's change, as a multiple of the weight's own. Above it the weight was reset."""

_INFLATED: Mapping[Role, str] = {
    "first": "much of the first moment is where the second moment is zero or too small to be represented",
    "second": "the second moment is below 1.2e-38 and would be stored as a much larger value",
}

_SLACK = 1.001
"""Allowance for the rounding of a clipped quotient."""


@dataclass(slots=True)
class TensorOutcome:
    """The errors of one storage over all chunks so far, and whether it is stored exactly.

    Args:
        tensor: The tensor; None for the rounding of a weight.
        count: Elements.
        max_abs: Greatest error of an element.
        sq_errors: For each chunk, the sum of squared errors.
        sq_values: For each chunk, the sum of squared values.
        sq_changes: For each chunk of a weight, the sum of squared changes since the base.
        sq_inflated: For each chunk, the part of the squared errors that is due to tiny second moments.
        nonzero_count: Elements that are not quantized to zero.
        stored_nbytes: Payload bytes.
        max_update_ratio: Greatest |m| / sqrt(v).
        failure: Why the tensor is stored exactly; empty if it is quantized.
        is_bound: The failure is a bound of the policy.
        methods: How its chunks were quantized.
    """

    tensor: LossyTensor | None
    count: int = 0
    max_abs: float = 0.0
    sq_errors: list[float] = field(default_factory=list)
    sq_values: list[float] = field(default_factory=list)
    sq_changes: list[float] = field(default_factory=list)
    sq_inflated: list[float] = field(default_factory=list)
    nonzero_count: int = 0
    stored_nbytes: int = 0
    max_update_ratio: float = 0.0
    failure: str = ""
    is_bound: bool = False
    methods: set[str] = field(default_factory=set)

    def fail(self, why: str, *, is_bound: bool = False) -> None:
        """Store the tensor exactly. The first reason is kept."""
        if not self.failure:
            self.failure, self.is_bound = why, is_bound

    def add(self, errors: Errors | Distance, *, max_update_ratio: float = 0.0, method: str = "") -> None:
        """Add the errors of one chunk, and how it was quantized."""
        self.methods.update([method] if method else [])
        self.max_update_ratio = max(self.max_update_ratio, max_update_ratio)
        if isinstance(errors, Distance):
            self.sq_errors.append(errors.sum_sq_difference)
            self.nonzero_count += errors.changed_count
        else:
            self.sq_errors.append(errors.sum_sq_error)
            self.sq_changes.append(errors.sum_sq_change)
            self.nonzero_count += errors.nonzero_count
        self.count += errors.count
        # An error that is NaN counts as infinite.
        self.max_abs = math.inf if math.isnan(errors.max_abs) else max(self.max_abs, errors.max_abs)
        self.sq_values.append(errors.sum_sq_value)

    @property
    def sum_sq_error(self) -> float:
        """Sum of the squares of the errors."""
        return _sum_in_any_order(self.sq_errors)

    @property
    def sum_sq_value(self) -> float:
        """Sum of the squares of the values."""
        return _sum_in_any_order(self.sq_values)

    @property
    def rel_rms(self) -> float:
        """RMS error divided by the RMS of the values."""
        if self.sum_sq_error == 0:
            return 0.0
        return math.sqrt(self.sum_sq_error / self.sum_sq_value) if self.sum_sq_value else math.inf

    @property
    def max_step_ratio(self) -> float | None:
        """Largest |update| / lr of the next optimizer step; None if the optimizer's constants are unknown."""
        constants = None if self.tensor is None else self.tensor.constants
        return None if constants is None or self.tensor is None else step_ratio_of(self.max_update_ratio, constants)

    def loss(self, storage: int, bits: float) -> Loss | None:
        """Return the manifest's record; None if the tensor is exact."""
        if self.failure or not self.count or self.max_abs == 0:
            return None
        settings = None if self.tensor is None else self.tensor.settings
        if isinstance(settings, str):
            return None
        return Loss(
            storage=storage,
            role="rounded" if self.tensor is None else self.tensor.role,
            method=word_of(self.methods),
            bits=bits,
            max_abs=self.max_abs,
            # Squares of very small errors are zero, but the greatest error is not.
            rms_error=min(math.sqrt(self.sum_sq_error / self.count), self.max_abs),
            rms_value=math.sqrt(self.sum_sq_value / self.count),
            kept=self.nonzero_count / self.count,
            hops=1 if self.tensor is None else self.tensor.lossy_depth,
            spike=self.max_step_ratio,
            numbers={} if settings is None else numbers_of(settings, self.methods),
        )


def _sum_in_any_order(terms: list[float]) -> float:
    """Return a sum that does not depend on the order of threads, because it is stored and compared with bounds."""
    return sum(sorted(terms))


def natural_quotient(constants: AdamConstants) -> float:
    """Return the bound on |m| / sqrt(v) over all histories of gradients (Cauchy-Schwarz inequality)."""
    beta1, beta2 = constants.beta1, constants.beta2
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2))


def _correction(constants: AdamConstants) -> float:
    """Return the factor of bias correction for the next step; its greatest value if the step is unknown."""

    def at(step: float) -> float:
        return math.sqrt(1 - math.pow(constants.beta2, step)) / (1 - math.pow(constants.beta1, step))

    if constants.step is None or not 0 <= constants.step < 1e15:
        return max(1.0, at(2))
    return at(constants.step + 1)


def step_ratio_of(quotient: float, constants: AdamConstants) -> float:
    """Return the largest |update| / lr of the next step that starts from this |m| / sqrt(v), over all gradients."""
    beta1, beta2 = constants.beta1, constants.beta2
    worst = math.hypot(beta1 * quotient / math.sqrt(beta2), (1 - beta1) / math.sqrt(1 - beta2))
    return min(worst * _correction(constants), sys.float_info.max)


def step_ratio_max(constants: AdamConstants) -> float:
    """Return the bound on |update| / lr of the next step."""
    return min(STEP_RATIO_MAX, STEP_RATIO_SHARE_MAX * natural_quotient(constants))


def clip_max(constants: AdamConstants) -> float:
    """Return the greatest |m| / sqrt(v) from which the next step stays within ``step_ratio_max``."""
    beta1, beta2 = constants.beta1, constants.beta2
    if beta1 == 0:
        return math.inf
    rest = (step_ratio_max(constants) / _correction(constants)) ** 2 - (1 - beta1) ** 2 / (1 - beta2)
    # Never below the quotient of an exact state. If even that steps too far, the moment is stored exactly.
    return max(natural_quotient(constants), math.sqrt(max(0.0, rest) * beta2) / beta1)


def apply_bounds(
    outcomes: Mapping[int, TensorOutcome],
    pairs: Mapping[int, int],
    groups: Mapping[int, int],
    masters: Mapping[int, int],
    residual: Residual,
) -> None:
    """Check every outcome against the bounds of the policy. Those that exceed one get a failure.

    Args:
        outcomes: The outcomes, by storage.
        pairs: The second moment of each first moment, by storage.
        groups: The weight that a moment belongs to, by storage, if both are quantized.
        masters: The weight that a storage is the rounding of, by storage.
        residual: The policy.

    Raises:
        BoundError: A bound is exceeded, and ``on_bound`` is ``"raise"``.
    """
    for outcome in outcomes.values():
        if outcome.tensor is not None:
            _check_errors(outcome, outcome, residual)
            if _sum_in_any_order(outcome.sq_inflated) > _INFLATED_SHARE_MAX * outcome.sum_sq_value:
                outcome.fail(_INFLATED[outcome.tensor.role])
            is_rewritten = _sum_in_any_order(outcome.sq_changes) > _CHANGE_MAX * outcome.sum_sq_value
            if is_rewritten and isinstance(outcome.tensor.settings, WeightSettings):
                outcome.fail("it has changed by more than its own size, so its base is of no use")
    for rounded, master in masters.items():
        # A rounding has the errors of its master, so a bound that it exceeds makes both exact.
        if rounded in outcomes and master in outcomes:
            if not math.isfinite(outcomes[rounded].max_abs + outcomes[rounded].sum_sq_error):
                outcomes[master].fail("its rounding would have elements that become infinite or stop being infinite")
            _check_errors(outcomes[rounded], outcomes[master], residual, "its rounding's ")
    _check_bits(outcomes, pairs, groups, residual)
    for first, second in pairs.items():
        if first in outcomes and second in outcomes:
            _check_next_step(outcomes[first], outcomes[second])
            for name, outcome, other in (
                ("second", outcomes[first], outcomes[second]),
                ("first", outcomes[second], outcomes[first]),
            ):
                if other.failure:
                    outcome.fail(_failure_of_partner(other.failure, name), is_bound=other.is_bound)
    broken = [outcome for outcome in outcomes.values() if outcome.failure and outcome.is_bound]
    if broken and residual.on_bound == "raise":
        tensor = broken[0].tensor
        assert tensor is not None
        raise BoundError(
            f"{counted(len(broken), 'tensor')} cannot be quantized within the policy's bounds: {broken[0].failure}",
            where=tensor.path,
            todo='loosen the bound, take finer steps, or let on_bound be "exact"',
            path=tensor.path,
        )


def _failure_of_partner(failure: str, name: str) -> str:
    """Return the failure of a moment, worded for the other moment of the pair."""
    subject, _, rest = failure.partition(" ")
    if subject == "it":
        return f"its {name} moment {rest}"
    return f"its {name} moment's {rest}" if subject == "its" else failure


def _check_errors(outcome: TensorOutcome, blamed: TensorOutcome, residual: Residual, whose: str = "its ") -> None:
    tensor = blamed.tensor
    assert tensor is not None
    relative, greatest = residual.max_rel_rms, residual.max_abs
    if relative is not None and not outcome.rel_rms <= relative:
        blamed.fail(f"{whose}RMS error is {outcome.rel_rms:.3g} of its RMS, more than {relative:g}", is_bound=True)
    if greatest is not None and tensor.role == "weight" and not outcome.max_abs <= greatest:
        blamed.fail(f"{whose}greatest error is {outcome.max_abs:.3g}, more than {greatest:g}", is_bound=True)


def _check_bits(
    outcomes: Mapping[int, TensorOutcome], pairs: Mapping[int, int], groups: Mapping[int, int], residual: Residual
) -> None:
    if residual.bits_per_parameter is None:
        return
    members: dict[int, list[TensorOutcome]] = {}
    for storage, outcome in outcomes.items():
        if outcome.tensor is not None:
            members.setdefault(groups.get(storage, pairs.get(storage, storage)), []).append(outcome)
    for group in members.values():
        bits = 8 * sum(outcome.stored_nbytes for outcome in group) / max(1, *(outcome.count for outcome in group))
        for outcome in group if bits > residual.bits_per_parameter else ():
            why = f"it takes {bits:.2f} bits a parameter, more than {residual.bits_per_parameter:g}"
            outcome.fail(why, is_bound=True)


def _check_next_step(first: TensorOutcome, second: TensorOutcome) -> None:
    assert first.tensor is not None
    constants = first.tensor.constants
    if first.max_abs == second.max_abs == 0:
        return
    if not math.isfinite(first.max_update_ratio):
        first.fail("a first moment would be left where the second moment is zero")
    elif (
        constants is not None
        and (ratio := step_ratio_of(first.max_update_ratio, constants)) > step_ratio_max(constants) * _SLACK
    ):
        first.fail(f"the next step could be {ratio:.3g} times the learning rate")
