"""One rank of a job, as a process of its own: ``bench.rank_group`` starts it and tells it what to do.

It reads one JSON line for each call, ``{"do": NAME, ...}``, and prints one with what it measured, or with an error. All
ranks get the same calls. Its state is made once: shards of what ``histories.gpt_state`` describes, in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from bench import background, histories, machine
from bench.histories import ROLES, Donors, State
from bench.other_tools import _quiet

Facts = dict[str, float]

PIECES = 8
"""Equal parts of the rows of a tensor that are filled each by itself, so that its values do not depend on the ranks."""

STEP_SECONDS = 0.5
"""Training between a guarded commit and the optimizer's step; nothing runs meanwhile."""

WARM_UPS = 2
"""Background commits before the one that is measured."""


def shards_of(nbytes: int, donors: Donors, lengths: tuple[int, ...]) -> State:
    """Return this rank's shards of a training state: replicated on all mesh dimensions but the last, and cut there.

    One rank alone has plain tensors.

    Args:
        nbytes: Bytes of the whole state.
        donors: The source of the values.
        lengths: Shape of the mesh.
    """
    mesh, place, count = None, 0, lengths[-1]
    if lengths != (1,):
        mesh = init_device_mesh("cpu", lengths, mesh_dim_names=("replicate", "shard")[-len(lengths) :])
        place = mesh.get_local_rank(mesh.ndim - 1)
    placements = (*(Replicate() for _ in lengths[:-1]), Shard(0))
    shapes = histories.shapes_of(histories.width_for(nbytes))
    made = {
        (name, role): _shard(
            shape, donors[histories._kind_of(name), role], (number, at), place, count, mesh, placements
        )
        for number, (name, shape) in enumerate(shapes.items())
        for at, role in enumerate(ROLES)
    }
    moments = {
        number: {role: made[name, role] for role in ROLES if role != "weight"} for number, name in enumerate(shapes)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(range(len(shapes)))}
    model = {name: made[name, "weight"] for name in shapes}
    return {"model": model, "optimizer": {"state": moments, "param_groups": [group]}, "step": 1000}


def _shard(
    shape: tuple[int, ...],
    layers: list[Any],
    number: tuple[int, int],
    place: int,
    count: int,
    mesh: Any,
    placements: tuple[Placement, ...],
) -> torch.Tensor:
    """Return the rows of a tensor that this rank holds: a plain tensor if there is no mesh."""
    if shape[0] % PIECES or PIECES % count:
        raise ValueError(f"{shape[0]} rows cannot be divided among {count} ranks")
    rows = shape[0] // PIECES
    local = torch.empty((shape[0] // count, *shape[1:]))
    for index, piece in enumerate(local.split(rows)):
        source = histories.np.random.default_rng((*number, place * (PIECES // count) + index))
        histories._fill(piece.numpy().reshape(-1), layers[number[0] % len(layers)], source)
    if mesh is None:
        return local
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Timed:
    """Measures one section on this rank, from when all ranks are ready."""

    def __enter__(self) -> Timed:
        dist.barrier()
        # Of all threads of this process, and of its children that have ended.
        self._cpu = _processor_seconds()
        self.began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = time.perf_counter()
        self.cpu = _processor_seconds() - self._cpu

    def facts(self, **more: float) -> Facts:
        """Return what was measured; the clock is the same on all ranks of a machine."""
        return {"began": self.began, "ended": self.ended, "cpu": self.cpu, **more}


def _processor_seconds() -> float:
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


class Rank:
    """What one rank does."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._stagers: dict[str, Any] = {}
        self._managers: list[Any] = []

    @cached_property
    def _donors(self) -> Donors:
        return histories.synthetic_donors() if self._given.small else histories.trained_donors(self._given.cache)

    @cached_property
    def _state(self) -> State:
        lengths = tuple(self._given.mesh)
        return shards_of(self._given.size, self._donors, lengths)

    @cached_property
    def _owner(self) -> torch.optim.Optimizer:
        """An optimizer that owns all tensors of the state."""
        return background.owner_of(self._state)

    @cached_property
    def _into(self) -> State:
        return histories.blank_like(self._state)

    @cached_property
    def _ranks(self) -> Any:
        import ckstore

        return ckstore.Ranks.of_torch() if dist.get_world_size() > 1 else None

    def _open(self, place: str, compression: str) -> Any:
        import ckstore

        policy: Any = {"compression": compression}
        if self._given.small:
            # A saver with low priority would starve while tests run.
            policy["saver_nice"] = 0
        return ckstore.open(place, run="main", policy=ckstore.Policy(**policy), ranks=self._ranks)

    def make(self) -> Facts:
        """Make the state; return the bytes that this rank holds."""
        return {"nbytes": float(sum(local_of(tensor).nbytes for _, tensor in histories.tensors_of(self._state)))}

    # Durable saves

    def save_ckstore(self, place: str, compression: str) -> Facts:
        """Commit to a new store."""
        with self._open(place, compression) as store:
            with Timed() as timed:
                receipt = store.commit(self._state, 1)
            stages = {f"stage {name}": seconds for name, seconds in receipt.seconds.items()}
            return timed.facts(**stages)

    def save_dcp(self, place: str) -> Facts:
        """Save with torch.distributed.checkpoint."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        with _quiet(), Timed() as timed:
            save(self._state, storage_writer=FileSystemWriter(place, sync_files=True))
            self._sync(place)
        return timed.facts()

    def save_torch_checkpointing(self, place: str) -> Facts:
        """Save with torch_checkpointing, which writes each shard by all ranks that hold it."""
        if not self._managers:
            self._managers.append(_manager())
        with _quiet(), Timed() as timed:
            self._managers[0].save(place, self._state)
            dist.barrier()
            self._sync(place)
        return timed.facts()

    def _sync(self, place: str) -> None:
        """Make what all ranks wrote durable, including names. Rank 0 does it."""
        if dist.get_rank() == 0:
            machine.sync_tree(Path(place))

    # Background saves

    def async_ckstore(self, place: str, compression: str, is_guarded: bool) -> Facts:
        """Commit in the background: the third commit of a new store counts."""
        owner = self._owner
        with self._open(place, compression) as store:
            if is_guarded:
                store.attach(owner)
            store.prewarm(self._state)
            for step in range(WARM_UPS):
                background.change(self._state)
                store.commit_async(self._state, step).result()
            background.change(self._state)
            with Timed() as timed:
                pending = store.commit_async(self._state, WARM_UPS)
            waited = self._waited_at_step(owner) if is_guarded else 0.0
            pending.result()
            return timed.facts(step_wait=waited, durable=time.perf_counter() - timed.began)

    def _waited_at_step(self, owner: torch.optim.Optimizer) -> float:
        """Return how long a step waits that has nothing to do itself: no parameter has a gradient."""
        time.sleep(STEP_SECONDS)
        began = time.perf_counter()
        owner.step()
        return time.perf_counter() - began

    def async_dcp(self, place: str, kind: str) -> Facts:
        """Save in the background with torch.distributed.checkpoint, on a thread or in a process."""
        self._owner  # noqa: B018 - all participants save parameters
        if kind not in self._stagers:
            self._stagers[kind] = _stager(kind)
            for number in range(WARM_UPS):
                self._async_dcp(f"{place}-warm-{number}", kind)
        return self._async_dcp(place, kind)

    def _async_dcp(self, place: str, kind: str) -> Facts:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        background.change(self._state)
        writer = FileSystemWriter(place, sync_files=True)
        with _quiet(), Timed() as timed:
            saved: Any = async_save(
                self._state,
                storage_writer=writer,
                async_checkpointer_type=AsyncCheckpointerType[kind],
                async_stager=self._stagers[kind],
            )
        getattr(saved, "upload_completion", saved).result()
        dist.barrier()
        self._sync(place)
        return timed.facts(durable=time.perf_counter() - timed.began)

    # Loads

    def load_ckstore(self, place: str) -> Facts:
        """Restore into existing shards. Opening is not counted."""
        histories.clear(self._into)
        with self._open(place, "none") as store, Timed() as timed:
            store.restore(into=self._into)
        self._check()
        return timed.facts()

    def load_dcp(self, place: str) -> Facts:
        """Load with torch.distributed.checkpoint into existing shards."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        histories.clear(self._into)
        with _quiet(), Timed() as timed:
            load(self._into, storage_reader=FileSystemReader(place))
        self._check()
        return timed.facts()

    def _check(self) -> None:
        pairs = zip(histories.tensors_of(self._state), histories.tensors_of(self._into), strict=True)
        for (path, expected), (_, found) in pairs:
            if not torch.equal(local_of(expected), local_of(found)):
                raise AssertionError(f"{path} is not what was saved")

    def close(self) -> None:
        """End the job."""
        if dist.get_world_size() > 1 and "_ranks" in self.__dict__:
            self._ranks.close()
        for stager in self._stagers.values():
            stager.close()


def _stager(kind: str) -> Any:
    """Return a stager of DCP that reuses its memory, and has copied everything when ``async_save`` returns."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=kind == "PROCESS",
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )


def _manager() -> Any:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # Its direct writes are not aligned; ext4 and xfs refuse them. Use buffered writes.
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage))


def main() -> NoReturn:
    """Join the process group, and answer calls until the end of input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--mesh", type=lambda text: [int(length) for length in text.split("x")], required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    # Libraries print to standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    world = 1
    for length in given.mesh:
        world *= length
    os.environ |= {"RANK": str(given.rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(given.rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group(
        "gloo", init_method=f"file://{given.rendezvous.resolve()}", rank=given.rank, world_size=world
    )
    rank = Rank(given)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer: dict[str, object] = {"facts": getattr(rank, call.pop("do"))(**call)}
        except BaseException as error:
            # DCP's CheckpointException is no Exception.
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        print(json.dumps(answer), file=answers, flush=True)
    rank.close()
    dist.destroy_process_group()
    # The interpreter's own end takes seconds with torch.
    os._exit(0)


if __name__ == "__main__":
    main()
