"""Clip gradients as torch does, and note the factor, so that the journal need not search for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

_FACTORS_MAX = 16
"""Calls that are remembered until the next point. Each factor is tried for each gradient."""

_noted: deque[Any] = deque(maxlen=_FACTORS_MAX)
"""Factors since the last point, as tensors of one element: reading them on a device would wait for it."""


def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Any:
    """Call ``torch.nn.utils.clip_grad_norm_``, and note the factor for the next point of a journal.

    Gradients of bf16 and fp16 numbers are then stored as these numbers and the factor, without a search for it.

    Args:
        parameters: A tensor, or several, whose gradients are clipped in place.
        max_norm: The norm of all gradients together is at most this afterwards.
        norm_type: Which norm; ``inf`` for the largest element.
        error_if_nonfinite: Raise an error if the norm is infinite or NaN.
        foreach: Use torch's faster implementation. None: where it is available.

    Returns:
        The norm before, a tensor of one element.

    Raises:
        RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
    """
    import torch

    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    # A norm over several devices is a tensor of another kind; reading it would communicate.
    if type(norm) is torch.Tensor:
        # torch's own operations, so that every bit is the same.
        _noted.append(torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))
    return norm


def take_factors() -> list[np.float32]:
    """Return the factors since the last call, the newest first, without those that change nothing."""
    factors: list[np.float32] = []
    while _noted:
        factors.append(np.float32(_noted.pop().item()))
    return _distinct(factor for factor in factors if factor != 1)


def _distinct(factors: Iterable[np.float32]) -> list[np.float32]:
    return list({factor.tobytes(): factor for factor in factors}.values())
