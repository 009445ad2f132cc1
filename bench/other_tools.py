"""Other tools that save and load the same state under the same promise: it is durable when ``save`` returns.

If a tool does not sync by itself, the bench calls fsync on every file and folder that it made. Loads start with cold
caches. If a tool maps files lazily, one value of every page is read before the clock stops. Tools that load into
existing tensors get tensors whose pages are all present.
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
class Tool:
    """A tool: how it saves, how it loads, and who makes its files durable.

    Attributes:
        save: Writes a state into an empty folder; durable when it returns.
        load: Reads it back; it may fill the given state of the same shape.
        is_in_place: Whether ``load`` fills the state it is given.
        durability: Who calls fsync, for the table.
    """

    name: str
    save: Callable[[State, Path], object]
    load: Callable[[Path, State], Any]
    is_in_place: bool
    durability: str


@dataclass
class AvailableTools:
    """The tools that work here, and the reason for every one that does not."""

    usable: list[Tool] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)


def _touch(state: Any) -> Any:
    """Read one value of every page, so that lazily mapped tensors are in memory."""
    for _, tensor in tensors_of(state):
        if tensor.numel():
            tensor.detach().reshape(-1)[::PAGE_VALUES].sum()
    return state


def _torch_save() -> Tool:
    def save(state: State, folder: Path) -> None:
        with (folder / "state.pt").open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        machine.sync_tree(folder)

    def load(folder: Path, _into: State) -> Any:
        return torch.load(folder / "state.pt", weights_only=True)

    return Tool("torch.save", save, load, is_in_place=False, durability="bench: fsync")


def _safetensors() -> Tool:
    from safetensors.torch import load_file, save_file

    def save(state: State, folder: Path) -> None:
        rest = {"optimizer.param_groups": state["optimizer"]["param_groups"], "step": state["step"]}
        save_file(dict(tensors_of(state)), folder / "state.safetensors", metadata={"rest": json.dumps(rest)})
        machine.sync_tree(folder)

    def load(folder: Path, _into: State) -> Any:
        return _touch(load_file(folder / "state.safetensors"))

    return Tool("safetensors", save, load, is_in_place=False, durability="bench: fsync")


def _dcp() -> Tool:
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

    return Tool("DCP", save, load, is_in_place=True, durability="own sync_files=True, bench: folders")


def _torchsnapshot() -> Tool:
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

    return Tool("torchsnapshot", save, load, is_in_place=True, durability="bench: fsync")


def _torch_checkpointing() -> Tool:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # Its direct writes are not aligned; ext4 and xfs refuse them. Use buffered writes.
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

    return Tool("torch_checkpointing", save, load, is_in_place=False, durability="bench: fsync; buffered")


def _quiet() -> AbstractContextManager[object]:
    """Suppress the warnings of other tools (no process group, old imports)."""
    for name in ("torch.distributed", "torchsnapshot", "torch_checkpointing"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return nullcontext()


MAKERS: dict[str, Callable[[], Tool]] = {
    "safetensors": _safetensors,
    "DCP": _dcp,
    "torch.save": _torch_save,
    "torchsnapshot": _torchsnapshot,
    "torch_checkpointing": _torch_checkpointing,
}


def find(trial: State, folder: Path, names: list[str] | None = None) -> AvailableTools:
    """Try every tool on a small state; return those that restore it, and the reasons for the others."""
    from bench.histories import blank_like, is_same

    found = AvailableTools()
    for name, make in MAKERS.items():
        if names is not None and name not in names:
            continue
        place = folder / f"trial-{name}"
        place.mkdir()
        try:
            tool = make()
            tool.save(trial, place)
            into = blank_like(trial)
            clear(into)
            loaded = tool.load(place, into)
            is_right = is_same(trial, loaded)
        except Exception as error:
            # Any failure of a tool becomes a line in the table.
            found.unusable[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            if is_right:
                found.usable.append(tool)
            else:
                found.unusable[name] = "brings back other values than it was given"
        finally:
            machine.remove_tree(place)
    return found
