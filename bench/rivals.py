"""Other tools, each saving and loading the same state under the same promise: what ``save`` returned is durable.

Tools that do not sync by themselves are followed by an fsync of every file and folder that they made. Loads
start cold; whatever a tool maps lazily is touched, one value a page, before its clock stops. Tools that load
into existing tensors get tensors that exist already, with every page of them present.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import machine
from bench.histories import State, clear, tensors_of

PAGE_VALUES = 4096 // 8


@dataclass(frozen=True)
class Rival:
    """A tool: how it saves, how it loads, and who makes its files durable.

    Attributes:
        save: Writes a state into a folder that exists and is empty; durable when it returns.
        load: Reads it back; given a state of the same shape it may, or may not, fill that one.
        is_in_place: Whether ``load`` fills the state it is given.
        durability: Who calls fsync, for the table.
    """

    name: str
    save: Callable[[State, Path], object]
    load: Callable[[Path, State], Any]
    is_in_place: bool
    durability: str


@dataclass
class Rivals:
    """The tools that work here, and for every other one the reason why it does not."""

    usable: list[Rival] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)


def _touch(state: Any) -> Any:
    """Read one value of every page, so that lazily mapped tensors are really there."""
    for _, tensor in tensors_of(state):
        if tensor.numel():
            tensor.detach().reshape(-1)[::PAGE_VALUES].sum()
    return state


def _torch_save() -> Rival:
    def save(state: State, folder: Path) -> None:
        with (folder / "state.pt").open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        machine.sync_tree(folder)

    def load(folder: Path, _into: State) -> Any:
        return torch.load(folder / "state.pt", weights_only=True)

    return Rival("torch.save", save, load, is_in_place=False, durability="bench: fsync")


def _safetensors() -> Rival:
    from safetensors.torch import load_file, save_file

    def save(state: State, folder: Path) -> None:
        rest = {"optimizer.param_groups": state["optimizer"]["param_groups"], "step": state["step"]}
        save_file(dict(tensors_of(state)), folder / "state.safetensors", metadata={"rest": json.dumps(rest)})
        machine.sync_tree(folder)

    def load(folder: Path, _into: State) -> Any:
        return _touch(load_file(folder / "state.safetensors"))

    return Rival("safetensors", save, load, is_in_place=False, durability="bench: fsync")


def _dcp() -> Rival:
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    def save(state: State, folder: Path) -> None:
        with _quiet():
            dcp_save(state, storage_writer=FileSystemWriter(folder / "dcp", sync_files=True, thread_count=2))
        # sync_files covers the data files, and neither the metadata's name nor the folder.
        machine.sync_tree(folder)

    def load(folder: Path, into: State) -> Any:
        with _quiet():
            dcp_load(into, storage_reader=FileSystemReader(folder / "dcp"))
        return into

    return Rival("DCP", save, load, is_in_place=True, durability="own sync_files=True, bench: folders")


def _torchsnapshot() -> Rival:
    with _quiet():
        import torchsnapshot

    def save(state: State, folder: Path) -> None:
        with _quiet():
            torchsnapshot.Snapshot.take(str(folder / "snapshot"), {"state": torchsnapshot.StateDict(**state)})
        machine.sync_tree(folder)

    def load(folder: Path, into: State) -> Any:
        with _quiet():
            target = torchsnapshot.StateDict(**into)
            torchsnapshot.Snapshot(str(folder / "snapshot")).restore({"state": target})
        return dict(target)

    return Rival("torchsnapshot", save, load, is_in_place=True, durability="bench: fsync")


def _torch_checkpointing() -> Rival:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # Its direct writes are not aligned, and ext4 and xfs refuse them: buffered is the way it works here.
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    writer = CheckpointWriterConfig(file_write_max_threads=2)
    saver = SyncCheckpointSaverConfig(writer_config=writer)
    manager = CheckpointManager(CheckpointManager.Config(save=saver, storage_config=storage))

    def save(state: State, folder: Path) -> None:
        with _quiet():
            manager.save(str(folder / "checkpoint"), state)
        machine.sync_tree(folder)

    def load(folder: Path, into: State) -> Any:
        with _quiet():
            return _touch(manager.load(str(folder / "checkpoint"), into=into))

    return Rival("torch_checkpointing", save, load, is_in_place=False, durability="bench: fsync; buffered")


def _quiet() -> AbstractContextManager[object]:
    """Keep the warnings of other tools (no process group, old imports) out of our tables."""
    for name in ("torch.distributed", "torchsnapshot", "torch_checkpointing"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return nullcontext()


MAKERS: dict[str, Callable[[], Rival]] = {
    "safetensors": _safetensors,
    "DCP": _dcp,
    "torch.save": _torch_save,
    "torchsnapshot": _torchsnapshot,
    "torch_checkpointing": _torch_checkpointing,
}


def find(trial: State, folder: Path, names: list[str] | None = None) -> Rivals:
    """Try every tool on a small state and return those that bring it back, with the reasons for the others."""
    from bench.histories import blank_like, is_same

    found = Rivals()
    for name, make in MAKERS.items():
        if names is not None and name not in names:
            continue
        place = folder / f"trial-{name}"
        place.mkdir()
        try:
            rival = make()
            rival.save(trial, place)
            into = blank_like(trial)
            clear(into)
            loaded = rival.load(place, into)
            is_right = is_same(trial, loaded)
        except Exception as error:
            # Whatever stops a tool here is worth a line in the table and no more.
            found.unusable[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            if is_right:
                found.usable.append(rival)
            else:
                found.unusable[name] = "brings back other values than it was given"
        finally:
            machine.remove_tree(place)
    return found
