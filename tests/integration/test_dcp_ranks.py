"""True ranks save and load through torch.distributed.checkpoint: processes of a gloo group, FSDP2 and 2D states."""

from __future__ import annotations

from functools import partial

import torch

import ckstore
from ckstore import dcp
from ckstore.format.many_ranks import MeshFacts
from support import dcp_programs
from support.forked_ranks import run_ranks


def test_four_ranks_save_one_checkpoint_that_any_world_loads(tmp_path):
    stages = (dcp_programs.save_first, 4), (dcp_programs.load_all, 2), (dcp_programs.save_in_background, 1)
    for stage, world in stages:
        run_ranks(partial(stage, folder=str(tmp_path)), world, tmp_path / stage.__name__)
    expected = {"fsdp": [10, 11, 12], "fsdp_tp": [10, 11, 12], "failing": [2], "background": [20, 21]}
    for name, steps in expected.items():
        with ckstore.open(tmp_path / name) as store:
            assert [info.step for info in store.log()] == steps[::-1]
            assert store.verify("decode").is_clean
    with ckstore.open(tmp_path / "opened") as store:
        assert store.steps() == [1, 2]
        assert [store.restore(1)["rng"][rank].tolist() for rank in range(4)] == [[rank] * 4 for rank in range(4)]
    with ckstore.open(tmp_path / "fsdp_tp") as store:
        world = store.contents(10).world
        assert world.meshes == (MeshFacts(("dp", "tp"), (2, 2)),)
        assert len(world.layouts) > 1
    model, optim = torch.load(tmp_path / "fsdp_tp.pt")
    loaded = {
        "model": {key: torch.zeros_like(value) for key, value in model.items()},
        "optim": {"state": {key: {"exp_avg": torch.zeros_like(value)} for key, value in model.items()}},
    }
    dcp.load(loaded, tmp_path / "fsdp_tp", 10)
    for key, value in model.items():
        assert torch.equal(loaded["model"][key], value)
        assert torch.equal(loaded["optim"]["state"][key]["exp_avg"], optim["state"][key]["exp_avg"])
