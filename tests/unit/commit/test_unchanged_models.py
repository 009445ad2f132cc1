"""Protects the warning about a model that did not change although its optimizer stepped."""

from __future__ import annotations

import numpy as np
import pytest

import ckstore

LARGE, SMALL = 200_000, 8


def training_state(model, moment, size):
    return {
        "model": {"w": np.full(size, model, np.float32), "b": np.full(4, model, np.float32)},
        "optimizer": {
            "state": {0: {"exp_avg": np.full(size, moment, np.float32), "step": np.float32(moment)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "step": moment,
    }


@pytest.fixture(params=[LARGE, SMALL], ids=["own chunks", "shared chunks"])
def size(request):
    return request.param


def test_unchanged_model_with_stepped_optimizer_warns(store, size, caplog):
    assert store.commit(training_state(1, 1, size), 1).warnings == ()
    (warning,) = store.commit(training_state(1, 2, size), 2).warnings
    assert "stale" in warning
    assert "model." in warning
    assert "stale" in caplog.text


def test_warning_repeats_while_the_model_is_unchanged(store, size):
    store.commit(training_state(1, 1, size), 1)
    assert store.commit(training_state(1, 2, size), 2).warnings
    assert store.commit(training_state(1, 3, size), 3).warnings
    assert store.commit(training_state(2, 4, size), 4).warnings == ()


def test_other_tensors_may_come_and_go(store, size):
    for step in range(3):
        seen = [np.arange(size) + index for index in range(step)]
        warnings = store.commit({"seen": seen, **training_state(1, step, size)}, step).warnings
        assert len(warnings) == (step > 0)


def test_changing_model_does_not_warn(store, size):
    for step in range(4):
        assert store.commit(training_state(step, step, size), step).warnings == ()


def test_unchanged_state_does_not_warn(store, size):
    for step in range(3):
        assert store.commit(training_state(1, 1, size), step).warnings == ()


def test_one_changed_model_tensor_is_enough(store, size):
    state = training_state(1, 1, size)
    store.commit(state, 1)
    state = training_state(1, 2, size)
    state["model"]["b"][0] += 1
    assert store.commit(state, 2).warnings == ()


def test_changed_integers_do_not_count_as_model(store, size):
    # A data position or a random generator also changes in a stale copy.
    state = training_state(1, 1, size)
    state["position"] = np.array([1, 2, 3])
    store.commit(state, 1)
    state = training_state(1, 2, size)
    state["position"] = np.array([4, 5, 6])
    assert store.commit(state, 2).warnings


def test_state_without_optimizer_does_not_warn(store):
    for step in range(3):
        assert store.commit({"model": {"w": np.ones(5)}, "n": step}, step).warnings == ()


def test_restore_resets_the_comparison(store, size):
    store.commit(training_state(1, 1, size), 1)
    store.commit(training_state(2, 2, size), 2)
    store.restore(1)
    assert store.commit(training_state(2, 3, size), 3).warnings == ()


def test_new_handle_does_not_warn(store, backend, size):
    store.commit(training_state(1, 1, size), 1)
    store.close()
    with ckstore.open(backend) as again:
        assert again.commit(training_state(1, 2, size), 2).warnings == ()


def test_optimizer_of_another_torch_model_is_found(store):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    trained, saved = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(trained.parameters())
    warnings = []
    for step in range(3):
        trained(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        warnings.append(store.commit({"model": saved, "optimizer": optimizer}, step).warnings)
    assert [len(found) for found in warnings] == [0, 1, 1]
    optimizer.zero_grad()
    trained(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert store.commit({"model": trained, "optimizer": optimizer}, 3).warnings == ()
