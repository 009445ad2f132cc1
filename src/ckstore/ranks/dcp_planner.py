"""Planners of torch.distributed.checkpoint that store plain values without pickle, and check before they load.

With any other storage than ckstore's they do what torch's default planners do.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor

from ckstore.config import KIB
from ckstore.errors import CkstoreError, NotFoundError, UnsupportedError, UsageError, counted
from ckstore.format.tree import encode_tree
from ckstore.hashing import digest_of
from ckstore.state.capture import capture
from ckstore.state.torch_adapter import PLAIN_KINDS, TorchAdapter

_log = logging.getLogger("ckstore")

_NAMED_MAX = 5

COMPARED_NBYTES_MAX = 64 * KIB
"""Larger tensors are not compared between ranks: states of random number generators and data loaders are smaller."""


def place_in_job() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, as torch.distributed counts them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


class StoreMeta(StorageMeta):
    """Tells a planner that ckstore is the storage."""


class JobMeta(StorageMeta):
    """Tells a planner that an open store commits the state, which needs no plan."""


class PlainValue(io.BytesIO):
    """A value that is not serialized, because the storage stores it as a typed node."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


class SavePlanner(DefaultSavePlanner):
    """Torch's default planner, except that values which are not tensors are stored typed, without pickle.

    Args:
        cache_key: Names the cached plans, with ``enable_plan_caching``. Saves of different states need different keys.
        options: As for torch's DefaultSavePlanner.

    Attributes:
        warnings: On the coordinator: values of which ranks had different ones. DCP saves one of them.
    """

    def __init__(self, *, cache_key: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.warnings: list[str] = []
        self._is_typed = False
        self._is_planned = True
        if cache_key is not None:
            self._cached_plans_key = f"{type(self).__qualname__}:{cache_key}"

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Note the state, and whether the storage is ckstore's."""
        self._is_typed = isinstance(storage_meta, StoreMeta)
        self._is_planned = not isinstance(storage_meta, JobMeta)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Return the plan of this rank, with digests of what DCP takes for equal on all ranks."""
        if not self._is_planned:
            return SavePlan([])
        plan = super().create_local_plan()
        if not (self._is_typed and torch.distributed.is_initialized()):
            return plan
        # The coordinator removes the digests again.
        return replace(plan, storage_data=_digests(self.state_dict))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans of all ranks, and note values that differ between ranks."""
        if not self._is_planned:
            return all_plans, Metadata({})
        self.warnings = list(_differences([plan.storage_data or {} for plan in all_plans]))
        for sentence in self.warnings:
            _log.warning("%s", sentence)
        return super().create_global_plan([replace(plan, storage_data=None) for plan in all_plans])

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return a tensor, or a value as the storage wants it."""
        if self._is_typed and write_item.type == WriteItemType.BYTE_IO:
            return PlainValue(object)
        return super().transform_object(write_item, object)


def planned_state(planner: object) -> dict[str, Any]:
    """Return the nested state that a planner was set up with.

    Raises:
        UnsupportedError: The planner decides what is saved.
    """
    if not isinstance(planner, DefaultSavePlanner) or type(planner).transform_object not in _UNCHANGING:
        raise UnsupportedError(
            "an open store commits the state as it is, and this planner decides what is saved",
            where=type(planner).__qualname__,
            todo="pass the path of the store, or use ckstore.dcp.SavePlanner",
        )
    return unflatten_state_dict(planner.state_dict, planner.mappings) if planner.mappings else planner.state_dict


_UNCHANGING = (DefaultSavePlanner.transform_object, SavePlanner.transform_object)


def _digests(state: dict[str, Any]) -> dict[str, bytes]:
    """Return digests of the values and small tensors that are not shards, by name."""
    found: dict[str, bytes] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not (type(value) in PLAIN_KINDS and value.nbytes <= COMPARED_NBYTES_MAX):
            continue
        try:
            captured = capture(value, [TorchAdapter()])
        except CkstoreError:
            # The save will name it.
            continue
        contents = [bytes(storage.read(0, storage.nbytes)) for storage in captured.storages]
        found[name] = digest_of(repr(captured.tensors).encode() + encode_tree(captured.tree) + b"".join(contents))
    return found


def _differences(found: list[dict[str, bytes]]) -> Iterator[str]:
    names = dict.fromkeys(name for digests in found for name in digests)
    for name in names:
        ranks = [rank for rank, digests in enumerate(found) if name in digests]
        others = [rank for rank in ranks if found[rank][name] != found[ranks[0]][name]]
        if others:
            listed = ", ".join(map(str, others[:_NAMED_MAX])) + (", ..." if len(others) > _NAMED_MAX else "")
            yield (
                f"{name} of rank {listed} differs from that of rank {ranks[0]}, and torch.distributed.checkpoint saves "
                "one of them. Give it another name on each rank to save all."
            )


class LoadPlanner(DefaultLoadPlanner):
    """Torch's default planner, except that it checks first and runs no code of a pickle.

    Before anything of the state is overwritten it refuses missing names, other dtypes, and tensors of which the
    checkpoint has only parts.

    Args:
        allow_cast: Convert tensors whose dtypes differ.
        options: As for torch's DefaultLoadPlanner, for example ``allow_partial_load=True``.
    """

    def __init__(self, *, allow_cast: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._allow_cast = allow_cast

    def create_local_plan(self) -> LoadPlan:
        """Return the plan of this rank.

        Raises:
            NotFoundError: The checkpoint does not have a part of the state.
            UsageError: A dtype, a shape or a kind of value differs.
            UnsupportedError: The checkpoint has only parts of a tensor.
        """
        assert self.metadata is not None
        if not self.allow_partial_load:
            self._require_names(self.metadata)
        self._check_kinds(self.metadata)
        plan = super().create_local_plan()
        _check_coverage(self.state_dict, self.metadata, plan)
        return plan

    def _require_names(self, metadata: Metadata) -> None:
        missing = [name for name in self.state_dict if name not in metadata.state_dict_metadata]
        if missing and not self._is_of_version_2_3(metadata):
            raise NotFoundError(
                f"{counted(len(missing), 'part')} of the state {'is' if len(missing) == 1 else 'are'} not in the "
                "checkpoint",
                where=", ".join(missing[:_NAMED_MAX]) + (", ..." if len(missing) > _NAMED_MAX else ""),
                todo="load with LoadPlanner(allow_partial_load=True) to leave them as they are",
                missing=missing,
            )

    def _is_of_version_2_3(self, metadata: Metadata) -> bool:
        """Say whether names may follow the rules of torch 2.3, which the default planner tries."""
        return bool(metadata.state_dict_metadata.keys() - self.state_dict.keys()) and not isinstance(
            metadata.storage_meta, StoreMeta
        )

    def _check_kinds(self, metadata: Metadata) -> None:
        for name, target in self.state_dict.items():
            stored = metadata.state_dict_metadata.get(name)
            if stored is None:
                continue
            is_tensor = isinstance(target, torch.Tensor)
            if is_tensor != isinstance(stored, TensorStorageMetadata):
                raise UsageError(
                    f"the checkpoint has {'another value' if is_tensor else 'a tensor'} where the state has "
                    f"{'a tensor' if is_tensor else f'a {type(target).__qualname__}'}",
                    where=name,
                    todo="load into a state of the same structure",
                )
            if not isinstance(stored, TensorStorageMetadata):
                continue
            if stored.size != target.size():
                raise UsageError(
                    f"the checkpoint has shape {list(stored.size)} where the state has {list(target.size())}",
                    where=name,
                    todo="load into a state of the same shapes",
                )
            if stored.properties.dtype != target.dtype and not self._allow_cast:
                raise UsageError(
                    f"the checkpoint has {stored.properties.dtype} where the state has {target.dtype}",
                    where=name,
                    todo="use the same dtype, or load with LoadPlanner(allow_cast=True)",
                )

    def load_value(self, read_item: ReadItem, value: object) -> None:
        """Put a value that was stored typed into the state."""
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], value)
        else:
            # ``state_dict`` is a copy.
            self.original_state_dict[name] = value

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that was pickled, if it needs no code.

        Raises:
            UnsupportedError: It does.
        """
        try:
            loaded = torch.load(value, weights_only=True)
        except Exception as error:
            raise UnsupportedError(
                "a value was saved as a pickle that may run code",
                where=read_item.dest_index.fqn,
                todo="if you trust the checkpoint, load it with torch's DefaultLoadPlanner",
            ) from error
        self.load_value(read_item, loaded)


def _check_coverage(state: dict[str, Any], metadata: Metadata, plan: LoadPlan) -> None:
    """Refuse a plan that leaves elements of a tensor unread."""
    planned: dict[tuple[str, tuple[int, ...]], int] = {}
    for item in plan.items:
        if item.type == LoadItemType.TENSOR:
            key = item.dest_index.fqn, tuple(item.dest_index.offset or ())
            planned[key] = planned.get(key, 0) + math.prod(item.lengths)
    for name, target in state.items():
        if not isinstance(target, torch.Tensor) or name not in metadata.state_dict_metadata or _is_elsewhere(target):
            continue
        for chunk in _create_chunk_list(target):
            wanted, found = math.prod(chunk.sizes), planned.get((name, tuple(chunk.offsets)), 0)
            if found != wanted:
                raise UnsupportedError(
                    f"the checkpoint has {found} of {wanted} elements of a tensor",
                    where=f"{name}, from index {list(chunk.offsets)} on",
                    todo="nothing was loaded; restore another checkpoint",
                )


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    """Say whether this rank is not in the mesh of a DTensor."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None
