"""Leaves that cannot be stored: named, left out or stored as text, and never without a note."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from types import ModuleType

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import LeafTypeError, UsageError
from ckstore.integrations.leaves import check_mode, rebuilt, storable, with_hint


class Schedule:
    def __repr__(self):
        return "Schedule(3)"


class Unprintable:
    def __repr__(self):
        raise RuntimeError


class AttributeDict(dict):
    pass


@dataclasses.dataclass
class Settings:
    rate: float
    schedule: object


def test_state_that_can_be_stored_is_not_copied():
    state = {"model": OrderedDict(w=torch.ones(2)), "numbers": [1, (2.0, {"a"})], "array": np.ones(2)}
    for mode in ("raise", "drop", "text"):
        found = storable(state, mode)
        assert found.state is state
        assert not found.notes
        assert not found.configs


def test_raise_leaves_everything_to_the_commit(tmp_path):
    state = {"hyper_parameters": {"schedule": Schedule()}}
    assert storable(state).state is state
    with ckstore.open(tmp_path) as store, pytest.raises(LeafTypeError, match=r"hyper_parameters\.schedule"):
        store.commit(storable(state).state, 1)


def test_drop_leaves_out_and_says_so(tmp_path):
    state = {"rate": 0.1, "schedule": Schedule(), "list": [1, Schedule()], "pair": (Schedule(), 2)}
    found = storable(state, "drop")
    assert found.state == {"rate": 0.1, "list": [1, None], "pair": (None, 2)}
    assert list(state) == ["rate", "schedule", "list", "pair"]
    assert [note.partition(":")[0] for note in found.notes] == ["schedule", "list.1", "pair.0"]
    assert "test_leaves.Schedule cannot be stored and is left out" in found.notes[0]
    with ckstore.open(tmp_path) as store:
        store.commit(found.state, 1)
        assert store.restore() == found.state


def test_text_is_stored_in_place_of_a_leaf():
    found = storable({"schedule": Schedule(), "odd": [Unprintable()], "function": len}, "text")
    assert found.state == {"schedule": "Schedule(3)", "odd": ["a Unprintable"], "function": "<built-in function len>"}
    assert len(found.notes) == 3


def test_subclass_of_dict_becomes_plain():
    found = storable({"hparams": AttributeDict(rate=0.1, inner=AttributeDict(schedule=Schedule()))}, "drop")
    assert found.state == {"hparams": {"rate": 0.1, "inner": {}}}
    assert type(found.state["hparams"]) is type(found.state["hparams"]["inner"]) is dict
    assert [note.partition(":")[0] for note in found.notes] == ["hparams", "hparams.inner", "hparams.inner.schedule"]


def test_dataclass_with_such_a_field_is_left_out_whole():
    found = storable({"settings": Settings(0.1, Schedule()), "good": Settings(0.2, None)}, "drop")
    assert found.state == {"good": Settings(0.2, None)}
    assert "Settings" in found.notes[0]
    assert "Schedule" in found.notes[0]


def test_attributes_of_a_changed_container_stay():
    state = OrderedDict(w=torch.ones(2), bad=Schedule())
    state._metadata = {"": {"version": 1}}
    assert storable(state, "drop").state._metadata == state._metadata


def test_cycle_is_left_to_the_commit(tmp_path):
    state = {"rate": 0.1}
    state["self"] = state
    with ckstore.open(tmp_path) as store, pytest.raises(UsageError, match="contains itself"):
        store.commit(storable(state, "drop").state, 1)


@pytest.fixture
def omegaconf(monkeypatch):
    """OmegaConf with the three names that are used, so that its absence hides no fault."""
    module = ModuleType("omegaconf")

    class Container:
        __module__ = "omegaconf.base"

        def __init__(self, content):
            self.content = content

    class OmegaConf:
        @staticmethod
        def to_container(config, *, resolve):
            assert not resolve
            return config.content

        create = Container

    module.Container, module.OmegaConf = Container, OmegaConf
    monkeypatch.setitem(sys.modules, "omegaconf", module)
    return module


@pytest.mark.parametrize("mode", ["raise", "drop", "text"])
def test_configuration_is_stored_plain_and_made_again(tmp_path, omegaconf, mode):
    config = omegaconf.Container({"rate": 0.1, "layers": [1, 2]})
    found = storable({"hyper_parameters": {"config": config}, "parts": [config], "pair": (config,)}, mode)
    assert found.configs == [["hyper_parameters", "config"], ["parts", 0]]
    with ckstore.open(tmp_path) as store:
        store.commit(found.state, 1)
        restored = rebuilt(store.restore(), found.configs)
    assert type(restored["hyper_parameters"]["config"]) is omegaconf.Container
    assert restored["parts"][0].content == config.content
    # A tuple cannot be changed, so what is in it stays plain.
    assert restored["pair"] == (config.content,)


def test_configuration_is_plain_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    assert rebuilt({"config": {"rate": 0.1}}, [["config"]]) == {"config": {"rate": 0.1}}


def test_whole_state_may_be_a_configuration(omegaconf):
    found = storable(omegaconf.Container({"rate": 0.1}))
    assert (found.state, found.configs) == ({"rate": 0.1}, [[]])
    assert rebuilt(found.state, found.configs).content == {"rate": 0.1}


def test_unknown_mode_is_refused():
    with pytest.raises(UsageError, match="'raise', 'drop' or 'text'"):
        check_mode("pickle")


def test_hint_keeps_the_facts():
    error = with_hint(LeafTypeError("no", where="a.b", todo="leave it out", path=("a", "b")), "use on_unstorable")
    assert error.path == ("a", "b")
    assert str(error).endswith("Leave it out; or use on_unstorable")
