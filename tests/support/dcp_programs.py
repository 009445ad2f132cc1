"""What ranks do in the tests of DCP saves: functions that processes of one gloo group call."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckstore
from ckstore import dcp
from ckstore.errors import CkstoreError


def trained(mesh):
    """Return a model on a mesh (FSDP2, and tensor parallelism along a second dimension), and its optimizer."""
    torch.manual_seed(0)
    # Uneven shards: 130 and 70 do not divide by 4.
    model = torch.nn.Sequential(torch.nn.Linear(70, 130), torch.nn.ReLU(), torch.nn.Linear(130, 70))
    if mesh.ndim == 2:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = mesh["dp"]
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(4, 70)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model, optimizer):
    state, optim = get_state_dict(model, optimizer)
    return {"model": state, "optim": optim, "epoch": 3, "names": ["a", "b"]}


def meshes():
    return {
        "fsdp": init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)),
        "fsdp_tp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    }


def save_all(rank, folder):
    """Save states of two layouts in all ways, and what is expected of them as whole tensors."""
    for name, mesh in meshes().items():
        model, optimizer = trained(mesh)
        whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(whole, f"{folder}/{name}.pt")
        state = state_of(model, optimizer)
        receipt = dcp.save(state, f"{folder}/{name}", 10)
        torch_dcp.save(state, storage_writer=dcp.Writer(f"{folder}/{name}", 11))
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, receipt.checkpoint_id)
        assert len(set(found)) == 1
        assert receipt.seq == 0
        again = dcp.async_save(state, f"{folder}/{name}", 12).result(120).storage_data
        assert (again.chunks_new, again.bytes_written) == (0, 0)


def save_in_background(rank, folder):
    """Save with a process of torch's own, twice: it keeps one for all saves."""
    for step in (20, 21):
        state = {"w": torch.full((1000,), float(step)), "n": step}
        kind = AsyncCheckpointerType.PROCESS
        future = dcp.async_save(state, f"{folder}/background", step, async_checkpointer_type=kind)
        assert future.result(120).storage_data.step == step
    loaded = {"w": torch.zeros(1000), "n": 0}
    assert dcp.load(loaded, f"{folder}/background").step == 21
    assert loaded["w"].tolist() == [21.0] * 1000
    assert loaded["n"] == 21


def fail_on_one_rank(rank, folder):
    """Save with a value that one rank cannot store. Every rank gets the same error, and the next save works."""
    store = f"{folder}/failing"
    state = {"w": distribute_tensor(torch.ones(8, 8), meshes()["fsdp"], [Shard(0)])}
    with pytest.raises(CkstoreError, match=r"rank 2: a leaf of type builtins\.object cannot be stored: x"):
        dcp.save({**state, **({"x": object()} if rank == 2 else {})}, store, 1)
    receipt = dcp.save({**state, "rng": torch.full((4,), rank), "pos": rank, "same": 5}, store, 2)
    assert receipt.seq == 0
    assert [warning.partition(" differs")[0] for warning in receipt.warnings] == [
        "rng of rank 1, 2, 3",
        "pos of rank 1, 2, 3",
    ]


def save_tiles(rank, folder):
    """Save a tensor that is cut by columns, twice: each rank stores the difference from its own tile."""
    torch.manual_seed(1)
    whole = torch.randn(512, 2048)
    writer = dcp.Writer(f"{folder}/tiles")
    for step in range(2):
        state = {"w": distribute_tensor(whole, meshes()["fsdp"], [Shard(1)])}
        receipt = torch_dcp.save(state, storage_writer=writer, checkpoint_id=step).storage_data
        assert receipt.chunks_delta == 4 * step
        whole *= 1 + 1e-4 * torch.rand_like(whole)


def save_to_open_store(rank, folder):
    """Save to a store that the ranks have opened, with collectives of torch and without."""
    state = state_of(*trained(meshes()["fsdp"]))
    with ckstore.open(f"{folder}/opened", ranks=ckstore.Ranks.of_torch()) as store:
        assert dcp.save({**state, "rng": torch.full((4,), rank)}, store, 1).seq == 0
        writer = dcp.Writer(store)
        torch_dcp.save(state, storage_writer=writer, planner=dcp.SavePlanner(), use_collectives=False)
        assert (writer.receipt.step, writer.receipt.chunks_new) == (2, 0)
        target = {"model": {key: torch.zeros_like(value) for key, value in state["model"].items()}}
        assert dcp.load(target, store).step == 2
        for key, value in state["model"].items():
            assert torch.equal(target["model"][key].to_local(), value.to_local())
        with pytest.raises(CkstoreError, match=r"^a leaf of type builtins\.object cannot be stored: rank 3: x"):
            dcp.save({**state, **({"x": object()} if rank == 3 else {})}, store, 3)


def save_first(rank, folder):
    """Run the programmes that save, in one group of four."""
    save_to_open_store(rank, folder)
    save_tiles(rank, folder)
    save_all(rank, folder)
    fail_on_one_rank(rank, folder)


def load_all(rank, folder):
    """Load what four ranks saved with two, in other layouts, and compare with the whole tensors."""
    mesh = init_device_mesh("cpu", (2,))
    for name, step in (("fsdp", 10), ("fsdp", 11), ("fsdp_tp", 10), ("fsdp_tp", 11)):
        model, _ = torch.load(f"{folder}/{name}.pt")
        for placement in (Shard(0), Shard(1), Replicate()):
            state = {
                key: distribute_tensor(torch.full_like(value, -1.0), mesh, [placement if value.ndim > 1 else Shard(0)])
                for key, value in model.items()
            }
            target = {"model": state, "epoch": 0, "names": None}
            planner = None if step == 10 else torch_dcp.DefaultLoadPlanner()
            info = dcp.load(target, f"{folder}/{name}", step, planner=planner)
            assert info.step == step
            assert (target["epoch"], target["names"]) == (3, ["a", "b"])
            for key, value in model.items():
                found = target["model"][key]
                assert isinstance(found, DTensor)
                assert torch.equal(found.full_tensor(), value), (name, step, placement, key)
    assert dcp.load({}, f"{folder}/fsdp").step == 12
