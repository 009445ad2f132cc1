"""A StorageReader of torch.distributed.checkpoint: loads any checkpoint of a store in any layout.

DCP's metadata is made from the manifest. It shows each tensor as one chunk, because any box of a tensor can be read:
only the byte ranges that a rank needs are read, and each stored chunk is decoded once.

Invariants:
- All ranks load the same checkpoint, or an error names those that would not.
- Bytes are compared with their BLAKE3, as in every restore.
"""

from __future__ import annotations

import io
import logging
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckstore.config import Policy, check_policy
from ckstore.errors import ConflictError, MalformedError, UnsupportedError, UsageError
from ckstore.format.manifest import Manifest
from ckstore.format.many_ranks import World, plain_manifest, world_of
from ckstore.format.tensors import TensorSpec, check_layout
from ckstore.format.tiles import Box, View, views_of
from ckstore.format.tree import PER_RANK, ConvertedNode, DictNode, Node, Path, TensorNode, check_tree, format_path
from ckstore.io.backend import Backend
from ckstore.ranks.dcp_place import CheckpointId, StorePlace, parse_checkpoint_id
from ckstore.ranks.dcp_planner import LoadPlanner as CheckedLoadPlanner
from ckstore.ranks.dcp_planner import StoreMeta, place_in_job
from ckstore.ranks.dcp_targets import BoxTargets, Wanted
from ckstore.ranks.dcp_tree import dcp_items, facts_of, is_array, planner_data_of
from ckstore.ranks.opening import wait_visible
from ckstore.restore.own_part import OwnValues, RankPlace
from ckstore.restore.restore import restore
from ckstore.results import Info
from ckstore.state.placement import prepare_restore
from ckstore.state.torch_adapter import DTYPES, TorchAdapter
from ckstore.store.refs import Reference, load_whole, newest_whole, resolve
from ckstore.store.replay_bases import require_stored
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a checkpoint has for this rank, by flat name.

    Args:
        manifest: The manifest of the state alone.
        paths: The path of everything.
        arrays: Tensors.
        values: The nodes of everything else.
        pickled: Those of them that are bytes which DCP's planner made.
        planner_data: DCP's planner data.
        own: Which of the values that differ between ranks these are.
    """

    manifest: Manifest
    paths: dict[str, Path]
    arrays: dict[str, TensorSpec]
    values: dict[str, Node]
    pickled: frozenset[str]
    planner_data: Any
    own: OwnValues

    @classmethod
    def of(cls, manifest: Manifest, rank: RankPlace) -> _Contents:
        check_tree(manifest.tree, len(manifest.tensors))
        require_stored(manifest, f"step {manifest.header.step}")
        facts, plain = facts_of(manifest.tree), plain_manifest(manifest)
        # A value of each rank that a user committed again is the same value in any world.
        own = OwnValues(world_of(manifest.tree) or World(rank.world, b""), rank, leaves_missing=True)
        paths: dict[str, Path] = {}
        arrays: dict[str, TensorSpec] = {}
        values: dict[str, Node] = {}
        for name, path, node in dcp_items(own.own(plain.tree, None, ()), facts, plain.tensors):
            paths[name] = path
            if isinstance(node, TensorNode) and is_array(node, plain.tensors):
                arrays[name] = spec = plain.tensors[node.tensor]
                check_layout(spec, TorchAdapter().itemsize_of(spec), plain.storages[spec.storage].nbytes)
            else:
                values[name] = node
        pickled = frozenset(map(format_path, facts.pickled)) & values.keys()
        return cls(plain, paths, arrays, values, pickled, planner_data_of(facts, paths), own)

    def warnings(self, names: Iterable[str]) -> list[str]:
        """Return what the user must know about the values of some ranks that are loaded by these names."""
        # DCP's paths contain text where the tree has other keys.
        loaded = {tuple(map(str, self.paths[name])) for name in names}
        above = {keys[:length] for keys in loaded for length in range(len(keys))}

        def is_loaded(path: Path) -> bool:
            keys = tuple(map(str, path))
            return keys in above or any(keys[:length] in loaded for length in range(len(keys) + 1))

        return self.own.warnings(is_loaded)


def _views(spec: TensorSpec, box: Box) -> list[View]:
    """Return views of a tensor's storage that together show a box."""
    itemsize = DTYPES[spec.dtype].itemsize
    if spec.cuts:
        return views_of(spec.shape, itemsize, spec.cuts, box)
    if 0 in box.sizes:
        return []
    steps = zip(box.offsets, spec.strides, strict=True)
    return [View(spec.offset + sum(at * step for at, step in steps) * itemsize, box, spec.strides)]


class Reader(StorageReader):
    """Loads from a store through ``torch.distributed.checkpoint.load``.

    Args:
        store: A folder, a URL, a backend or an open repository.
        ref: Which checkpoint: a step, a tag, ``latest``, ``best:metric``, ``seq:N``; None: the newest whole one.
        run: The run to load from.
        policy: Threads, memory and checks.
        rank: The place of this rank; None: as torch.distributed says.

    Attributes:
        info: Facts about the checkpoint that was loaded last.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Backend | Repository,
        ref: Reference | None = None,
        *,
        run: str = "main",
        policy: Policy | None = None,
        rank: RankPlace | None = None,
    ) -> None:
        super().__init__()
        check_policy(policy)
        self._rank = rank
        self._place = StorePlace(store, run)
        self._ref = ref
        self._policy = policy or Policy()
        self._contents: _Contents | None = None
        self._found: Manifest | None = None
        self._seq_found: int | None = None
        """The checkpoint that another rank has found for all."""
        self._load_id = str(uuid.uuid4())
        self.info: Info | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_contents": None, "_found": None}

    @property
    def checkpoint_id(self) -> str:
        """The store and, if it was given, the reference."""
        return self._place.address if self._ref is None else f"{self._place.address}#{self._ref}"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Say whether a checkpoint id is a step, a store, or a store and a reference."""
        try:
            parse_checkpoint_id(checkpoint_id)
        except UsageError:
            return False
        return True

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin another load: of another checkpoint, or from another store."""
        self._contents = self._found = None
        self._load_id = str(uuid.uuid4())
        if checkpoint_id is None:
            return
        store, ref = parse_checkpoint_id(checkpoint_id)
        if store is not None:
            self._place.move(store)
        self._ref, self._seq_found = ref, None

    # Without ``**kwargs``: with it, DCP would try again to read metadata of one rank only.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Return DCP's metadata of the checkpoint.

        Raises:
            CkstoreError: There is no such checkpoint, or it cannot be read.
        """
        manifest, self._found = self._found or self._choose(self._opened()), None
        self._contents = contents = _Contents.of(manifest, self._rank or RankPlace(*place_in_job()))
        self.info = Info.of(manifest.header)
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name in contents.paths:
            array = contents.arrays.get(name)
            entries[name] = BytesStorageMetadata() if array is None else _metadata_of(array)
        meta = StoreMeta(
            checkpoint_id=f"{self._place.address}#{manifest.header.step}",
            save_id=manifest.checkpoint_id.hex(),
            load_id=self._load_id,
        )
        return Metadata(entries, planner_data=contents.planner_data, storage_data={}, storage_meta=meta)

    def find(self) -> str:
        """Find the checkpoint now, for the next load. Return its seq, by which other ranks can find it.

        Raises:
            CkstoreError: There is no such checkpoint, or it cannot be read.
        """
        self._found = self._choose(self._place.open(create=False))
        return f"seq:{self._found.header.seq}"

    def follow(self, ref: str) -> None:
        """Load the checkpoint that ``find`` has found on another rank. The load waits until this rank sees it."""
        self._ref, self._seq_found = ref, int(ref.removeprefix("seq:"))

    def _opened(self) -> Repository:
        if self._seq_found is None:
            return self._place.open(create=False)
        rank, _ = place_in_job()
        repository = self._place.open_late(rank)
        wait_visible(repository, self._seq_found, rank)
        return repository

    def _choose(self, repository: Repository) -> Manifest:
        if not str(self._ref).startswith(("seq:", "id:")):
            repository.wait_for_orphan()
        if self._ref is not None:
            return load_whole(repository, resolve(repository, self._ref), takes_lower=True)
        manifest, skipped = newest_whole(repository)
        for sentence in skipped:
            _log.warning("%s", sentence)
        return manifest

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add which checkpoint this rank has found."""
        assert self._contents is not None
        header = self._contents.manifest.header
        return replace(plan, storage_data=(header.step, header.seq, header.checkpoint_id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks have found the same checkpoint.

        Raises:
            ConflictError: They have not.
        """
        found = [plan.storage_data for plan in plans]
        for rank, other in enumerate(found):
            if other != found[0]:
                raise ConflictError(
                    f"ranks found different checkpoints: rank 0 step {found[0][0]} (seq {found[0][1]}), "
                    f"rank {rank} step {other[0]} (seq {other[1]})",
                    where=self._place.address,
                    todo="load again, or name a step",
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank. Only the byte ranges that they need are read."""
        assert self._contents is not None
        for sentence in self._contents.warnings({item.storage_index.fqn for item in plan.items}):
            _log.warning("%s", sentence)
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        self._read_arrays([item for item in plan.items if item.type == LoadItemType.TENSOR], planner)
        self._read_values(values, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_arrays(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        contents = self._contents
        assert contents is not None
        wanted: list[Wanted] = []
        tensors: list[torch.Tensor] = []
        for item in items:
            array = contents.arrays[item.storage_index.fqn]
            begin = item.storage_index.offset or (0,) * len(array.shape)
            offsets = tuple(at + lo for at, lo in zip(begin, item.storage_offsets, strict=True))
            box = Box(offsets, tuple(item.lengths))
            target = planner.resolve_tensor(item).detach()
            if tuple(target.shape) != box.sizes:
                raise UsageError(
                    f"a tensor has shape {list(target.shape)} where {list(box.sizes)} are to be loaded",
                    where=item.storage_index.fqn,
                )
            _warn_of_cast(item.storage_index.fqn, DTYPES[array.dtype], target.dtype)
            tensors.append(target)
            wanted += _wanted(array, box, target)
        repository = self._place.open(create=False)
        with BoxTargets(contents.manifest, wanted) as targets:
            restore(repository, targets.manifest, targets, self._policy)
        for item, target in zip(items, tensors, strict=True):
            planner.commit_tensor(item, target)

    def _read_values(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        contents = self._contents
        assert contents is not None
        names = [item.storage_index.fqn for item in items]
        if not names:
            return
        manifest = contents.manifest
        children = tuple(contents.values[name] for name in names)
        for name, node in zip(names, children, strict=True):
            if isinstance(node, ConvertedNode) and node.name == PER_RANK:
                raise UsageError(
                    f"the checkpoint has no value of rank {contents.own.place.rank}",
                    where=name,
                    todo="load with as many ranks as saved it, or from a store that was opened with "
                    "ranks=ckstore.Ranks(..., per_rank='nearest')",
                )
        tree = DictNode("dict", tuple(names), children)
        targets = prepare_restore(tree, manifest.tensors, manifest.storages, adapters=[TorchAdapter()])
        found: Mapping[str, object] = restore(self._place.open(create=False), manifest, targets, self._policy)
        for item, name in zip(items, names, strict=True):
            value = found[name]
            if name in contents.pickled:
                if not isinstance(value, bytes):
                    raise MalformedError("a pickled value is not bytes", where=name)
                planner.load_bytes(item, io.BytesIO(value))
            elif isinstance(planner, CheckedLoadPlanner):
                planner.load_value(item, value)
            else:
                planner.load_bytes(item, _serialized(value))


def _metadata_of(array: TensorSpec) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(torch.Size((0,) * len(array.shape)), torch.Size(array.shape))
    properties = TensorProperties(dtype=DTYPES[array.dtype], requires_grad=array.requires_grad)
    return TensorStorageMetadata(properties, torch.Size(array.shape), [whole])


def _serialized(value: object) -> io.BytesIO:
    """Return a value in the form that torch's default planner loads."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _wanted(array: TensorSpec, box: Box, target: torch.Tensor) -> Iterator[Wanted]:
    for view in _views(array, box):
        part = target
        for dim, (lo, begin, length) in enumerate(zip(box.offsets, *view.box, strict=True)):
            part = part.narrow(dim, begin - lo, length)
        yield Wanted(array.storage, view.offset, view.strides, DTYPES[array.dtype], part)


def _warn_of_cast(name: str, stored: torch.dtype, wanted: torch.dtype) -> None:
    if stored == wanted:
        return
    if stored.is_complex and not wanted.is_complex:
        raise UnsupportedError(f"a complex tensor would lose its imaginary part in {wanted}", where=name)
    _log.warning("%s is stored as %s and is converted to %s", name, stored, wanted)
