"""Protects recorded errors: they do not depend on the order in which chunks are quantized."""

import itertools

from ckstore.quant.bounds import TensorOutcome
from ckstore.quant.error_stats import Distance, Errors


def test_errors_do_not_depend_on_chunk_order():
    chunks = [
        Errors(count, max_abs=0.1 * count, sum_sq_error=0.1 * count, sum_sq_value=0.7 / count, sum_sq_change=0.3)
        for count in (1, 2, 3, 7)
    ]
    losses = set()
    for order in itertools.permutations([*chunks, Distance(5, 4, 0.2, sum_sq_difference=0.13, sum_sq_value=0.9)]):
        outcome = TensorOutcome(None)
        for errors in order:
            outcome.add(errors, max_update_ratio=errors.max_abs, method="grid")
        loss = outcome.loss(0, bits=1.0)
        losses.add((outcome.rel_rms, loss.rms_error, loss.rms_value, loss.max_abs, loss.kept))
    assert len(losses) == 1
