"""The strongest directions of a chunk on the device where it lies, as ``quant.lowrank`` finds them on the host.

Invariants:
- They are the encoder's choice: what is stored says what they came to, and no reader finds them again.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ckstore.latch import Latch

_TINY = 2.0**-126
# Directions of less than this share of the greatest square come short: rounding to fp32 would turn them.
_NO_SIZE = 1e-6

_loading, _is_loaded = threading.Lock(), Latch()


def directions(matrix: Tensor, signs: Tensor, count: int, least: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the strongest left directions, singular values (fp64) and right directions, as ``quant.lowrank`` does.

    Args:
        matrix: Finite fp32 values.
        signs: Random signs, as long as the shorter side.
        count: Most directions.
        least: Squares of singular values that are not above it are left out.

    Returns:
        None where products of the values are too large for fp32.
    """
    rows, cols = matrix.shape
    across = _rounded(matrix if rows <= cols else matrix.T)
    try:
        basis = _orthogonal(_rounded(signs @ across) @ across.T)
        inside = _rounded(basis) @ across
        squares, vectors = _eigen(inside @ inside.T)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # It says something of the values, and nothing of the device.
        return None
    sizes = squares[:count].clamp(min=_TINY).sqrt()
    kept = int((sizes.square() > least).sum())
    sizes, turn = sizes[:kept], vectors[:kept].float()
    here, there = turn @ basis, (turn / sizes[:, None].float()) @ inside
    return (here.T, sizes, there) if rows <= cols else (there.T, sizes, here)


def _rounded(values: Tensor) -> Tensor:
    """Return factors as the host's kernels take them: the nearest bf16, as fp32."""
    return values.bfloat16().float()


def _orthogonal(wide: Tensor) -> Tensor:
    """Return orthogonal rows of length 1 that span those of a matrix; directions of no size become short."""
    # The squares of what is divided so neither vanish nor overflow; errors of fp32 are larger than what is added.
    doubles = (wide / wide.abs().max().clamp(min=_TINY)).double()
    gram = doubles @ doubles.T
    gram.diagonal().add_(_NO_SIZE * gram.diagonal().max() + _TINY)
    rows: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), doubles, upper=False)
    return rows.float()


def _eigen(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, the greatest first, and eigenvectors as rows, in fp64."""
    if not _is_loaded.is_set():
        # torch loads what it needs at the first call, and fails where two threads make it (pytorch issue 90613).
        with _loading:
            torch.linalg.eigh(torch.zeros(1, 1, dtype=torch.float64, device=symmetric.device))
            _is_loaded.set()
    values, vectors = torch.linalg.eigh(symmetric.double())
    return values.flip(0), vectors.T.flip(0)
