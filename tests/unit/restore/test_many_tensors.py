"""Protects states with very many tensors: they are described and filled together, as if each were alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckstore.errors import UsageError
from ckstore.restore import restore
from ckstore.state import live_layouts
from support.model import difference

COUNT = 3 * restore._MANY_TARGETS
"""Enough for all shortcuts; the tests assume no other value, and compare with a run without shortcuts."""


def noise(seed):
    """Return small tensors that share a chunk, equal ones among them, and one of a whole chunk that has many owners."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(7 + index % 5, generator=generator) for index in range(COUNT)]
    return {
        "small": {f"w{index}": part for index, part in enumerate(parts)},
        "equal": [parts[3].clone() for _ in range(COUNT)],
        "large": {index: torch.full((400_000,), float(seed)) for index in range(COUNT)},
        "arrays": [np.arange(index // 2, dtype=np.int16) for index in range(COUNT)],
    }


def zeros_like(part):
    if isinstance(part, dict):
        return {key: zeros_like(value) for key, value in part.items()}
    if isinstance(part, list):
        return [zeros_like(value) for value in part]
    return part * 0


def leaves_of(part):
    if isinstance(part, dict | list):
        for value in part.values() if isinstance(part, dict) else part:
            yield from leaves_of(value)
    else:
        yield part


def without_shortcuts(monkeypatch):
    monkeypatch.setattr(restore, "_MANY_TARGETS", 10**9)
    monkeypatch.setattr(live_layouts, "_MANY", 10**9)


@pytest.mark.parametrize("has_shortcuts", [True, False])
def test_many_tensors_are_restored_into_old_and_new_ones(store, monkeypatch, has_shortcuts):
    if not has_shortcuts:
        without_shortcuts(monkeypatch)
    for step in range(3):
        store.commit(noise(step), step)
    for step in range(3):
        live = zeros_like(noise(step))
        held = list(leaves_of(live))
        done = []
        assert store.restore(step, into=live, on_progress=lambda *now, done=done: done.append(now)) is live
        assert difference(live, noise(step)) is None
        assert all(one is other for one, other in zip(held, leaves_of(live), strict=True))
        assert done[-1][0] == done[-1][1] == sum(leaf.nbytes for leaf in leaves_of(live))
        assert all(leaf._version == 1 for leaf in held if isinstance(leaf, torch.Tensor))
        assert difference(store.restore(step), noise(step)) is None


def test_memory_beyond_a_destination_is_never_written(store):
    whole = torch.full((COUNT, 9), -1.0)
    store.commit({"w": list(torch.ones(COUNT, 5).clone().unbind())}, 0)
    store.commit({"w": [torch.ones(5) for _ in range(COUNT)]}, 1)
    store.restore(1, into={"w": [row[2:7] for row in whole]})
    assert (whole[:, 2:7] == 1).all()
    assert (whole[:, :2] == -1).all()
    assert (whole[:, 7:] == -1).all()


def test_target_beyond_its_chunk_is_refused(store, monkeypatch):
    store.commit(noise(0), 0)
    columns = restore._columns_of
    monkeypatch.setattr(restore, "_columns_of", lambda targets: columns(targets) + np.array([[0], [0], [1], [0]]))
    with pytest.raises(AssertionError, match="beyond"):
        store.restore(0)


def put(key, make):
    def change(live):
        live["small"][key] = make(live["small"][key])

    return change


def tie(live):
    live["small"]["w9"] = live["small"]["w4"]


CHANGES = {
    "nothing": lambda live: None,
    "dtype": put("w5", lambda one: one.double()),
    "shape": put("w5", lambda one: one.reshape(1, -1)),
    "steps": put("w5", lambda one: torch.zeros(2 * len(one))[::2]),
    "expanded": put("w5", lambda one: torch.zeros(1).expand(len(one))),
    "conjugate": put("w5", lambda one: torch.zeros(len(one), dtype=torch.complex64).conj()),
    "negative": put("w5", lambda one: torch.zeros(len(one), dtype=torch.complex64).conj().imag),
    "meta": put("w5", lambda one: one.to("meta")),
    "sparse": put("w5", lambda one: one.to_sparse()),
    "no tensor": put("w5", lambda one: 5),
    "tied": tie,
    "overlapping": lambda live: live["small"].update(zip(("w0", "w5"), torch.zeros(10).unfold(0, 7, 3), strict=True)),
    "read-only array": lambda live: live["arrays"][5].setflags(write=False),
    "array of objects": lambda live: live["arrays"].__setitem__(3, np.array([None, 1, 2])),
    "swapped": lambda live: live["small"].update(w0=live["small"]["w5"], w5=live["small"]["w0"]),
    "missing": lambda live: live["small"].pop("w5"),
    "added": lambda live: live["small"].update(z=torch.zeros(1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_misfits_among_many_are_reported_as_without_shortcuts(store, monkeypatch, change):
    store.commit(noise(1), 1)
    outcomes = []
    for has_shortcuts in (True, False):
        if not has_shortcuts:
            without_shortcuts(monkeypatch)
        live = zeros_like(noise(1))
        CHANGES[change](live)
        try:
            store.restore(1, into=live)
            outcomes.append((live, None))
        except UsageError as error:
            assert all((live["small"][f"w{index}"] == 0).all() for index in range(6, COUNT))
            outcomes.append((None, (str(error), error.paths)))
    assert outcomes[0][1] == outcomes[1][1]
    assert difference(outcomes[0][0], outcomes[1][0]) is None
    assert (outcomes[0][1] is None) == (change in ("nothing", "steps", "no tensor", "swapped", "missing"))


def test_attributes_and_parameters_among_many_are_restored(store):
    def state(value):
        made = {f"w{index}": torch.nn.Parameter(torch.full((4,), value)) for index in range(COUNT)}
        made["w2"].note = "kept"
        with torch.inference_mode():
            made["w3"] = torch.full((4,), value)
        return made

    store.commit(state(2.0), 0)
    live = state(0.0)
    live["w2"].note = "other"
    store.restore(0, into=live)
    assert all((value == 2).all() for value in live.values())
    assert live["w2"].note == "kept"
    assert live["w1"]._version == 1
    assert live["w3"].is_inference()


def test_modules_and_optimizers_of_many_tensors_are_filled_in_place(store):
    def make(value):
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(COUNT)))
        for each in model.parameters():
            torch.nn.init.constant_(each, value)
        optimizer = torch.optim.AdamW(model.parameters())
        for each in model.parameters():
            each.grad = torch.full_like(each, value)
        optimizer.step()
        return model, optimizer

    one, other = make(1.0), make(0.0)
    store.commit({"model": one[0], "optimizer": one[1]}, 0)
    addresses = [each.data_ptr() for each in other[0].parameters()]
    store.restore(0, into={"model": other[0], "optimizer": other[1]})
    assert difference(other[0].state_dict(), one[0].state_dict()) is None
    assert difference(other[1].state_dict(), one[1].state_dict()) is None
    assert [each.data_ptr() for each in other[0].parameters()] == addresses
