"""Protects the import of objects: plain fields are stored, everything else is listed, and no code is run."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import pathlib
import pickle
import types

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckstore.errors import CkstoreError, UnsupportedError
from support.states import difference


class Schedule(enum.Enum):
    COSINE = "cosine"


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    schedule: Schedule = Schedule.COSINE
    data: pathlib.Path = pathlib.Path("/data/x")
    betas: tuple[float, float] = (0.9, 0.999)


class AttributeDict(dict):
    """Like Lightning's container of hyper-parameters."""


class RowList(list):
    """A list subclass."""


WEIGHTS = {"w": torch.arange(4.0)}
PLAIN_CONFIG = {"lr": 0.1, "schedule": "cosine", "data": "/data/x", "betas": (0.9, 0.999)}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (argparse.Namespace(lr=0.1, names=["a"]), {"lr": 0.1, "names": ["a"]}),
        (argparse.Namespace(inner=argparse.Namespace(x=None)), {"inner": {"x": None}}),
        (argparse.Namespace(), {}),
        (types.SimpleNamespace(dtype=torch.float16), {"dtype": torch.float16}),
        (Config(), PLAIN_CONFIG),
        (AttributeDict(a=1, b=AttributeDict(c=[1, 2])), {"a": 1, "b": {"c": [1, 2]}}),
        (argparse.Namespace(function=difference), {"function": "support.states.difference"}),
        (argparse.Namespace(weight=torch.ones(2)), {"weight": torch.ones(2)}),
    ],
)  # fmt: skip
def test_plain_config_fields_are_imported_and_reported(store, tmp_path, config, fields):
    torch.save({"model": WEIGHTS, "args": config}, tmp_path / "step_3.pt")
    report = store.import_from(tmp_path / "step_3.pt")
    assert difference(store.restore(3), {"model": WEIGHTS, "args": fields}) is None
    assert any("args is an object of" in warning for warning in report.entries[0].warnings)
    assert not report.is_partial


def test_whole_module_is_refused_or_skipped(store, tmp_path):
    torch.save({"model": torch.nn.Linear(2, 2), "optimizer": WEIGHTS}, tmp_path / "step_3.pt")
    with pytest.raises(UnsupportedError, match=r"model: an object of torch\.nn\.modules.*--skip-leaf model"):
        store.import_from(tmp_path / "step_3.pt")
    report = store.import_from(tmp_path / "step_3.pt", skip_leaf=["model"])
    assert difference(store.restore(3), {"optimizer": WEIGHTS}) is None
    assert dict(report.entries[0].left_out) == {"model": "as asked for with --skip-leaf model"}
    assert report.is_partial


def test_all_unsupported_leaves_are_in_one_error(store, tmp_path):
    model, optimizer = torch.nn.Linear(2, 2), torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    torch.save({"a": model, "b": [1, optimizer], "w": WEIGHTS, "s": torch.eye(2).to_sparse()}, tmp_path / "step_3.pt")
    with pytest.raises(UnsupportedError, match=r"a: .*b\.1: .*s: "):
        store.import_from(tmp_path / "step_3.pt")
    store.import_from(tmp_path / "step_3.pt", skip_leaf=["a", "b.*", "s"])
    assert difference(store.restore(3), {"b": [None, None], "w": WEIGHTS}) is None


def test_skip_leaf_matches_paths_in_the_whole_state(store, tmp_path):
    from safetensors.torch import save_file

    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    save_file({"keep": torch.ones(1), "drop": torch.ones(1)}, folder / "model.safetensors")
    torch.save({"state": {0: torch.ones(2)}, "lr": 1}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 3, "log_history": []}')
    report = store.import_from(
        folder, skip_leaf=["model.drop", "optimizer.state.*", "trainer_state.log_history", "nowhere"]
    )
    assert (
        difference(
            store.restore(3),
            {
                "model": {"keep": torch.ones(1)},
                "optimizer": {"state": {}, "lr": 1},
                "trainer_state": {"global_step": 3},
                "files": {"trainer_state.json": b'{"global_step": 3, "log_history": []}'},
            },
        )
        is None
    )
    assert set(report.entries[0].left_out) == {"model.drop", "optimizer.state.0", "trainer_state.log_history"}
    assert [warning for warning in report.warnings if "nowhere matches nothing" in warning]


@pytest.mark.parametrize("value", [argparse.Namespace(a=1), torch.nn.Linear(2, 2), AttributeDict(a=1)])
def test_file_with_only_an_object_is_refused(store, tmp_path, value):
    torch.save({"x": value}, tmp_path / "step_1.pt")
    with pytest.raises(UnsupportedError, match="only code can create"):
        store.import_from(tmp_path / "step_1.pt")


def test_plain_pickles_are_parsed_not_executed(store, tmp_path):
    state = {
        "numpy": np.arange(3.0), "args": argparse.Namespace(x=1), "n": 3, "bytes": b"\x00\xff",
        "ordered": collections.OrderedDict(a=1),
    }  # fmt: skip
    (tmp_path / "step_1.pkl").write_bytes(pickle.dumps(state))
    store.import_from(tmp_path / "step_1.pkl")
    wanted = state | {"args": {"x": 1}, "ordered": {"a": 1}}
    assert difference(store.restore(1), wanted) is None


def test_container_subclasses_become_dicts_and_lists(store, tmp_path):
    state = {"plain": AttributeDict(a=[1]), "tensors": AttributeDict(w=torch.ones(2)), "list": RowList([1, 2]), "n": 1}
    torch.save(state, tmp_path / "step_1.pt")
    report = store.import_from(tmp_path / "step_1.pt")
    wanted = {"plain": {"a": [1]}, "tensors": {"w": torch.ones(2)}, "list": [1, 2], "n": 1}
    assert difference({key: _bare(child) for key, child in store.restore(1).items()}, wanted) is None
    assert len(report.entries[0].warnings) == 3


def _bare(child):
    return dict(child) if isinstance(child, dict) else child


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.parametrize("suffix", ["pt", "pkl"])
def test_stand_ins_run_no_code(store, tmp_path, suffix):
    state = {"w": 1, "args": argparse.Namespace(x=Evil(tmp_path / "owned")), "y": Evil(tmp_path / "owned")}
    file = tmp_path / f"step_1.{suffix}"
    torch.save(state, file) if suffix == "pt" else file.write_bytes(pickle.dumps(state))
    with contextlib.suppress(CkstoreError):
        store.import_from(file)
    assert not (tmp_path / "owned").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", ["script", "protocol"])
def test_advice_to_run_code_is_never_shown(store, tmp_path, make):
    file = tmp_path / "step_1.pt"
    if make == "script":
        torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2)), file)
    else:
        torch.save(WEIGHTS, file, pickle_protocol=4)
    with pytest.raises(CkstoreError) as raised:
        store.import_from(file)
    assert "weights_only" not in str(raised.value)
    assert "trusted source" not in str(raised.value)


@pytest.mark.parametrize("state", [(WEIGHTS, [1]), [torch.ones(2), 3], torch.arange(3)])
def test_states_other_than_dicts_are_imported(store, tmp_path, state):
    torch.save(state, tmp_path / "step_1.pt")
    store.import_from(tmp_path / "step_1.pt")
    assert difference(store.restore(1), state) is None


def _stepped(scheduler_of=None, optimizer_of=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = optimizer_of(model.parameters(), lr=0.1, **options)
    scheduler = None if scheduler_of is None else scheduler_of(optimizer)
    for _ in range(2):
        model(torch.ones(2, 4)).pow(2).sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model, optimizer, scheduler


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("optimizer_of", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {}), (torch.optim.Adagrad, {})],
)
def test_dcp_moments_get_optimizer_keys(store, tmp_path, optimizer_of, options):
    model, optimizer, _ = _stepped(None, optimizer_of, **options)
    state = {"nested": {"optim": optimizer.state_dict()}, "model": dict(model.state_dict())}
    dcp.save(state, checkpoint_id=str(tmp_path / "step_2"), no_dist=True)
    store.import_from(tmp_path / "step_2")
    restored = store.restore(2)["nested"]["optim"]
    assert set(restored["state"]) == set(optimizer.state_dict()["state"])
    _, other, _ = _stepped(None, optimizer_of, **options)
    other.load_state_dict(restored)
    assert difference(other.state_dict()["state"], optimizer.state_dict()["state"]) is None


@pytest.mark.filterwarnings("ignore")
def test_dcp_milestones_get_integer_keys(store, tmp_path):
    _, _, scheduler = _stepped(lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 7]))
    state = {"sched": scheduler.state_dict(), "w": torch.ones(2), "mine": {"0": torch.ones(1)}}
    dcp.save(state, checkpoint_id=str(tmp_path / "step_2"), no_dist=True)
    report = store.import_from(tmp_path / "step_2")
    restored = store.restore(2)
    assert restored["sched"]["milestones"] == collections.Counter({5: 1, 7: 1})
    # Nothing identifies the keys of the user, so they stay, and that is reported.
    assert set(restored["mine"]) == {"0"}
    assert [warning for warning in report.entries[0].warnings if "keys of mine are numbers as text" in warning]


@pytest.mark.filterwarnings("ignore")
def test_files_next_to_a_dcp_are_imported(store, tmp_path):
    folder = tmp_path / "epoch=0-step=4.ckpt"
    dcp.save({"state_dict": dict(WEIGHTS)}, checkpoint_id=str(folder), no_dist=True)
    torch.save({"global_step": 4, "loops": {}}, folder / "meta.pt")
    store.import_from(folder)
    assert difference(
        store.restore(4), {"dcp": {"state_dict": WEIGHTS}, "meta": {"global_step": 4, "loops": {}}}
    ) is None  # fmt: skip
