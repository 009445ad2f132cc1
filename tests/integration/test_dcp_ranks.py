"""True ranks save and load through torch.distributed.checkpoint: processes of a gloo group, FSDP2 and 2D states."""

from __future__ import annotations

from functools import partial

import torch

import ckstore
from ckstore import dcp
from support.dcp_programs import load_all, save_first, save_in_background
from support.dcp_ranks import run_ranks


def test_four_ranks_save_one_checkpoint_that_any_world_loads(tmp_path):
    run_ranks(partial(save_first, folder=str(tmp_path)), 4, tmp_path / "four")
    run_ranks(partial(load_all, folder=str(tmp_path)), 2, tmp_path / "two")
    for name, steps in (("fsdp", [10, 11, 12]), ("fsdp_tp", [10, 11, 12]), ("failing", [2])):
        with ckstore.open(tmp_path / name) as store:
            assert [info.step for info in store.log()] == steps[::-1]
            assert store.verify("decode").is_clean
    model, optim = torch.load(tmp_path / "fsdp_tp.pt")
    loaded = {
        "model": {key: torch.zeros_like(value) for key, value in model.items()},
        "optim": {"state": {key: {"exp_avg": torch.zeros_like(value)} for key, value in model.items()}},
    }
    dcp.load(loaded, tmp_path / "fsdp_tp", 10)
    for key, value in model.items():
        assert torch.equal(loaded["model"][key], value)
        assert torch.equal(loaded["optim"]["state"][key]["exp_avg"], optim["state"][key]["exp_avg"])


def test_background_saves_in_a_process_of_torch_work(tmp_path):
    run_ranks(partial(save_in_background, folder=str(tmp_path)), 1, tmp_path / "one")
    with ckstore.open(tmp_path / "background") as store:
        assert [info.step for info in store.log()] == [21, 20]
