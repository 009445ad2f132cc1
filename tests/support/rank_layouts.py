"""Training programs of real ranks in every layout that people use, each as a run of one store.

Data comes from a generator that has another state on each rank, so losses depend on what a rank restores of its own.
``whole`` returns the global values of a state: what any world must find after a restore.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ckstore
from support.forked_ranks import report

LAYOUTS = ("fsdp", "fsdp_tp", "tp", "hsdp", "ddp", "pipeline", "by_name")
WORLD = 4
"""Ranks of the job that trains."""
TRAINED_ON = 2
"""Steps after a restore that are compared with a job that was never killed."""
_LAYERS = 8
_IN, _HIDDEN = 70, 1032
"""The first does not divide by the number of ranks. The large weights have more than 256 KiB."""


def new_model(seed: int) -> nn.Sequential:
    """Return the model without any layout."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(_IN, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _IN), nn.LayerNorm(_IN))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Layout:
    """A model and its optimizer in one layout.

    Args:
        name: One of LAYOUTS.
        seed: Of the initial weights.
    """

    def __init__(self, name: str, seed: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.name, self.rank = name, rank
        model: nn.Module = new_model(seed)
        if name == "pipeline":
            layers = [nn.Linear(_IN, 7 + index) for index in range(_LAYERS)]
            model = nn.ModuleDict(
                {f"layer{n}": layer for n, layer in enumerate(layers) if n * world // _LAYERS == rank}
            )
        elif name in ("fsdp", "by_name"):
            fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
        elif name == "hsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
        elif name in ("tp", "fsdp_tp"):
            ways = world if name == "tp" else 2
            mesh = init_device_mesh("cpu", (world // ways, ways), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            if name == "fsdp_tp":
                fully_shard(model, mesh=mesh["dp"])
        self.model = model
        self.caller = DistributedDataParallel(model) if name == "ddp" else model
        if name == "ddp":
            # After the first backward pass it sorts parameters into other buckets, and sums are rounded differently.
            self.caller(torch.zeros(1, _IN)).sum().backward()
        self.optimizer = new_optimizer(model)
        self.options = None
        if name == "by_name":
            self.options = StateDictOptions()
        elif name == "pipeline":
            # Each stage numbers its parameters from 0, and lists them. Only flat names fit other stages.
            self.options = StateDictOptions(flatten_optimizer_state_dict=True)
        self.step = 0
        self.rng = torch.Generator().manual_seed(100 * seed + rank)

    def train_one_step(self) -> float:
        self.optimizer.zero_grad()
        if self.name == "pipeline":
            loss = torch.stack([(layer(self._noise()) ** 2).mean() for layer in self.model.values()]).sum()
        else:
            noise = self._noise()
            if self.name in ("tp", "fsdp_tp"):
                # All ranks of a tensor-parallel group need the same data.
                dist.broadcast(noise, 0)
            loss = (self.caller(noise) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def _noise(self) -> torch.Tensor:
        return torch.randn(4, _IN, generator=self.rng)

    def state(self) -> dict:
        model, optimizer = self.model, self.optimizer
        if self.options is not None:
            model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        own = ckstore.PerRank(self.own_state())
        return {"model": model, "optimizer": optimizer, "own": own, "step": self.step}

    def own_state(self) -> dict:
        """Return what belongs to this rank."""
        return {"rng": self.rng.get_state(), "position": [self.rank, self.step]}

    def load(self, store: ckstore.Store) -> None:
        """Restore the newest checkpoint."""
        state = store.restore(into=self.state())
        if self.options is not None:
            model, optimizer = state["model"], state["optimizer"]
            set_state_dict(
                self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=self.options
            )
        self.step = state["step"]
        self.own = state["own"].value if isinstance(state["own"], ckstore.PerRank) else state["own"]
        self.rng.set_state(self.own["rng"])

    def whole(self) -> dict[str, torch.Tensor]:
        """Return all global tensors by name: weights and moments."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        found = dict(model)
        for name, entry in optimizer["state"].items():
            found.update({f"{name}.{key}": value for key, value in entry.items()})
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in sorted(found.items())
        }


def train_and_commit(rank, folder, layouts, job):
    """Train layouts and commit them, again and again, until the job is killed."""
    ranks = ckstore.Ranks.of_torch()
    trained = [(ckstore.open(f"{folder}/store", run=name, ranks=ranks), Layout(name, seed=1)) for name in layouts]
    for round_number in itertools.count():
        for store, layout in trained:
            layout.train_one_step()
            commit(store, layout, folder)
        if round_number == 1:
            report("trained", rank, job)


def commit(store, layout, folder):
    """Commit a layout, and note before what a restore must find."""
    noted = {"whole": layout.whole(), "own": layout.own_state()}
    torch.save(noted, f"{folder}/{layout.name}-{layout.step}-{layout.rank}.pt")
    dist.barrier()
    receipt = store.commit(layout.state(), layout.step)
    assert receipt.step == layout.step
    assert receipt.warnings == ()
    if layout.rank == 0:
        # The job may be killed between two calls: the file is there with its text, or as it was.
        draft = Path(folder, f"draft-{layout.name}")
        draft.write_text(str(receipt.step))
        draft.replace(Path(folder, f"acknowledged-{layout.name}"))


def resume(rank, folder, layouts, exchanged, per_rank="own"):
    """Restore layouts in this world, and compare bit for bit. In the same world, train on and exchange, too."""
    world, ranks = dist.get_world_size(), ckstore.Ranks.of_torch(per_rank=per_rank)
    for name in layouts:
        layout = Layout(name, seed=2)
        with ckstore.open(f"{folder}/store", run=name, create=False, ranks=ranks) as store:
            layout.load(store)
        check_restored(layout, folder)
        if world == WORLD:
            check_trained_on(layout)
    if world == WORLD:
        exchange(folder, ranks, *exchanged)


def check_restored(layout, folder):
    """Compare with what was noted before the commit."""
    step = int(Path(folder, f"acknowledged-{layout.name}").read_text())
    assert layout.step >= step, "an acknowledged checkpoint is lost"
    notes = [torch.load(path) for path in sorted(Path(folder).glob(f"{layout.name}-{layout.step}-?.pt"))]
    assert len(notes) == WORLD
    check_whole(layout, {name: tensor for note in notes for name, tensor in note["whole"].items()})
    own = notes[layout.rank % WORLD]["own"]
    assert torch.equal(layout.own["rng"], own["rng"])
    assert layout.own["position"] == own["position"] == [layout.rank % WORLD, layout.step]


def check_whole(layout, want):
    """Compare all global tensors of a layout bit for bit."""
    found = layout.whole()
    if layout.name == "pipeline":
        # A stage has its own layers only.
        want = {name: want[name] for name in found}
    check_same(found, want)


def check_same(found, want):
    """Compare tensors by name, bit for bit."""
    assert found.keys() == want.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, want[name]), f"{name} differs"


def check_trained_on(layout):
    """Train on, and compare with a job that was never killed."""
    losses = [layout.train_one_step().hex() for _ in range(TRAINED_ON)]
    reference = Layout(layout.name, seed=1)
    expected = [reference.train_one_step().hex() for _ in range(layout.step)]
    assert losses == expected[-TRAINED_ON:], layout.name
    check_whole(layout, reference.whole())


def exchange(folder, ranks, source, name):
    """Restore a checkpoint in another layout than it was saved in, and commit it from there."""
    layout = Layout(name, seed=3)
    with ckstore.open(f"{folder}/store", run=source, create=False, ranks=ranks) as store:
        into = {"model": layout.model, "optimizer": layout.optimizer}
        store.restore(into=into, only=["model.*", "optimizer.*"])
        if source == "plain":
            check_whole(layout, named(store.restore()))
    with ckstore.open(f"{folder}/store", run=f"{source}_to_{name}", ranks=ranks) as store:
        store.commit(into, 1)


def named(state):
    """Return the tensors of a plain state by the names that ``Layout.whole`` gives."""
    names = [*state["model"]]
    moments = {
        f"{names[number]}.{key}": value
        for number, entry in state["optimizer"]["state"].items()
        for key, value in entry.items()
    }
    return {**state["model"], **moments}
