"""Protects the word ``exact``: a checkpoint that lost even the sign of a zero is not called exact."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore
from ckstore import Policy, Residual


@pytest.mark.parametrize("residual", [Residual.near(), Residual.small()], ids=["near", "small"])
def test_signs_of_zeros_are_kept_or_reported(folder, residual):
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((256, 256)).astype(np.float32)
    weight[rng.random((256, 256)) < 0.5] = -0.0
    state = {"model": {"weight": weight}}
    with ckstore.open(folder, policy=Policy(fidelity=residual)) as store:
        for step in range(3):
            store.commit(state, step)
        for step in range(3):
            restored = store.restore(step)["model"]["weight"]
            if store.info(step).fidelity == "exact":
                assert restored.tobytes() == weight.tobytes()


def test_moments_of_other_optimizers_are_not_weights(folder):
    rng = np.random.default_rng(4)

    def state(step):
        make = lambda: rng.standard_normal((256, 256)).astype(np.float32)  # noqa: E731 - used three times
        return {"params": {"w": make()}, "opt_state": {"mu": {"w": make()}, "nu": {"w": make() ** 2}}}

    states = [state(step) for step in range(2)]
    with ckstore.open(folder, policy=Policy(fidelity=Residual.small())) as store:
        for step, each in enumerate(states):
            store.commit(each, step)
        restored = store.restore(1)
    for name in ("mu", "nu"):
        assert restored["opt_state"][name]["w"].tobytes() == states[1]["opt_state"][name]["w"].tobytes()
