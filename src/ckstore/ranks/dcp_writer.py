"""A StorageWriter of torch.distributed.checkpoint: any number of ranks save one checkpoint of a store.

DCP's planner decides which rank writes which item, and its collectives carry what ranks have written to the
coordinator, whose ``finish`` publishes one manifest. Every rank writes packs of its own.

Invariants:
- Packs are durable before ``write_data`` returns. Nothing is visible before ``finish`` has published the manifest.
- Nothing of one save is in ``plan.storage_data``: with plan caching, DCP passes the plan of an earlier save.
- What a save needs begins in ``set_up_storage_writer``: DCP calls ``reset`` only with a checkpoint id.
"""

from __future__ import annotations

import io
import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckstore.commit.commit import CommitRequest, refresh_bases, write_unpublished
from ckstore.commit.unpublished import Unpublished, packs_removed_on_failure
from ckstore.config import Policy, check_metrics, check_policy, check_step
from ckstore.delta.base_cache import BaseCache, first_paths
from ckstore.errors import CorruptError, LeafTypeError, UnsupportedError, UsageError
from ckstore.format.many_ranks import state_of
from ckstore.format.tensors import count_of
from ckstore.format.tiles import Box
from ckstore.format.tree import DictNode, ListNode, Path
from ckstore.hashing import DIGEST_NBYTES
from ckstore.io.backend import Backend
from ckstore.ranks.arrays import Layout
from ckstore.ranks.dcp_boxes import start_of
from ckstore.ranks.dcp_merge import Saved, SavedArray, SavedValue, merge
from ckstore.ranks.dcp_place import CheckpointId, StorePlace, parse_checkpoint_id
from ckstore.ranks.dcp_planner import JobMeta, PlainValue, StoreMeta, place_in_job, planned_state
from ckstore.ranks.part import ATTEMPT_NBYTES, make_part
from ckstore.ranks.publishing import Entry, Publisher
from ckstore.results import Receipt, Stopwatch
from ckstore.state.capture import Captured, Structure, capture
from ckstore.state.memory import MemorySpan, Spans, SpanShape
from ckstore.state.tensors import HostStorage
from ckstore.state.torch_adapter import TorchAdapter, wait_for_devices
from ckstore.state.torch_shards import Geometry, ShardReader
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")

CommitCall = Callable[[dict[str, Any], int | None], Receipt]
"""Commits a state with a step; without one, it is one more than that of the newest checkpoint."""


class Writer(StorageWriter):
    """Saves to a store through ``torch.distributed.checkpoint.save`` and ``async_save``.

    Args:
        store: A folder, a URL, a backend or an open repository. The coordinator makes the store if it does not exist.
        step: The trainer's step; None: one more than that of the newest checkpoint.
        run: The run to save to.
        policy: How to store the state. Residual policies need ``Store.commit``.
        metrics: Numbers to find this checkpoint by, as in ``best:loss``.
        commit: Commits the state of this rank in place of DCP's planner and collectives; None: these are used.

    Attributes:
        receipt: The receipt of the last save; on the coordinator only, unless ``commit`` was given.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Backend | Repository,
        step: int | None = None,
        *,
        run: str = "main",
        policy: Policy | None = None,
        metrics: Mapping[str, float] | None = None,
        commit: CommitCall | None = None,
    ) -> None:
        super().__init__()
        check_policy(policy)
        self._commit = commit
        self._place = StorePlace(store, run)
        self._step = None if step is None else check_step(step)
        self._policy = policy or Policy()
        self._metrics = check_metrics(metrics)
        self.receipt: Receipt | None = None
        self._parent: int | None = None
        self._bases: BaseCache | None = None
        self._written: Unpublished | None = None
        self._watch: Stopwatch | None = None
        if self._policy.residual is not None and commit is None:
            raise UnsupportedError(
                "a residual policy cannot be used with torch.distributed.checkpoint",
                todo="use a policy without residual=, or demote the checkpoint later with `ckstore demote`",
            )

    def __getstate__(self) -> dict[str, Any]:
        if self._commit is not None:
            raise UsageError(
                "another process cannot use an open store",
                where=self._place.address,
                todo="pass the path of the store to the writer",
            )
        return {**self.__dict__, "_bases": None, "_written": None, "_watch": None}

    @property
    def checkpoint_id(self) -> str:
        """The store and, if it is known, the step."""
        return self._place.address if self._step is None else f"{self._place.address}#{self._step}"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Say whether a checkpoint id is a step, a store, or a store and a step."""
        try:
            _store_and_step(checkpoint_id)
        except UsageError:
            return False
        return True

    def storage_meta(self) -> StorageMeta:
        """Return facts for the planner: that values need not be serialized, or that no plan is needed."""
        kind = StoreMeta if self._commit is None else JobMeta
        return kind(checkpoint_id=self.checkpoint_id)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin another save: of another step, or to another store."""
        if checkpoint_id is None:
            return
        store, step = _store_and_step(checkpoint_id)
        if store is not None:
            if store != self._place.address:
                if self._commit is not None:
                    raise UsageError(
                        f"the checkpoint_id {checkpoint_id!r} names another store than the writer's open one",
                        where=self._place.address,
                        todo="pass only a step as checkpoint_id",
                    )
                self._bases, self._written, self._parent = None, None, None
            self._place.move(store)
        if step is not None or store is not None:
            self._step = step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Open the store; the coordinator makes it if it does not exist."""
        self._watch = None
        if self._commit is not None:
            return
        if not kwargs.get("use_collectives", True) and _world_size() > 1:
            raise UnsupportedError(
                "use_collectives=False cannot publish one checkpoint of many ranks: no rank learns what others wrote",
                where=self._place.address,
                todo="save with use_collectives=True, or pass a store that was opened with ranks= to the writer",
            )
        if is_coordinator:
            self._watch = Stopwatch(self._place.open(create=True).clock)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that no other process writes the run, before any rank begins. Return the plans unchanged."""
        if self._commit is not None:
            return plans
        lease = self._place.open(create=True).lease
        was_held = lease.is_held
        lease.take()
        if not was_held:
            # If a rank fails, nothing tells this writer, and another one saves next. ``finish`` takes the lease again.
            lease.release()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of this rank to packs; these are durable when this returns."""
        done: Future[list[WriteResult]] = Future()
        if self._commit is not None:
            self.receipt = self._commit(planned_state(planner), self._step)
            done.set_result([])
            return done
        done.set_result(self._write(plan.items, planner) if plan.items else [])
        return done

    def _write(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        # The coordinator has made it.
        repository = self._place.open_late(place_in_job()[0])
        repository.prepare_run()
        self._bases = self._bases or BaseCache()
        _catch_up(repository, self._bases, self._written)
        items = list(items)
        gathered = _Gathered(items, planner)
        wait_for_devices(gathered.storages)
        bases = self._bases
        bases.begin(self._policy.base_cache_nbytes_max if self._policy.base_cache == "memory" else 0)
        request = CommitRequest(
            captured=gathered.captured(),
            step=self._step or 0,
            policy=self._policy,
            parent=None,
            metrics={},
            bases=bases,
        )
        try:
            unpublished = write_unpublished(repository, request, self._watch or Stopwatch(repository.clock))
        finally:
            bases.discard_drafts()
        self._written = unpublished
        saved = gathered.saved(unpublished, getattr(planner, "warnings", ()))
        sizes = gathered.nbytes_by_item
        return [
            WriteResult(item.index, nbytes, saved if number == 0 else None)
            for number, (item, nbytes) in enumerate(zip(items, sizes, strict=True))
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish what all ranks wrote as one checkpoint.

        Raises:
            CkstoreError: Nothing was published; the message says why.
        """
        if self._commit is None:
            self.receipt = self._publish(metadata, results)
        assert self.receipt is not None
        # DCP passes the metadata to all ranks.
        metadata.storage_data = self.receipt
        metadata.storage_meta = StorageMeta(checkpoint_id=f"{self._place.address}#{self.receipt.step}")

    def _publish(self, metadata: Metadata, results: list[list[WriteResult]]) -> Receipt:
        saved: list[Saved | None] = [
            next((each.storage_data for each in result if each.storage_data), None) for result in results
        ]
        repository = self._place.open(create=True)
        watch = self._watch or Stopwatch(repository.clock)
        repository.prepare_run()
        publisher = Publisher(repository)
        pack_names = [name for each in saved if each is not None for name in each.pack_names]
        try:
            repository.lease.take()
            with packs_removed_on_failure(repository, pack_names, publisher.is_visible):
                with watch("merge"):
                    attempt = os.urandom(ATTEMPT_NBYTES)
                    data = metadata.state_dict_metadata, metadata.planner_data
                    merged = merge(saved, *data, attempt, repository.limits)
                step = _step_after(repository) if self._step is None else self._step
                receipt = publisher.publish(merged, Entry(step, self._parent, self._metrics), watch)
        finally:
            self._place.release_lease()
        self._parent = receipt.seq
        return receipt


def _step_after(repository: Repository) -> int:
    """Return the step after that of the newest checkpoint."""
    names = repository.manifests.listing().names
    return names[-1].step + 1 if names else 0


def _world_size() -> int:
    return place_in_job()[1]


def _store_and_step(checkpoint_id: CheckpointId) -> tuple[str | None, int | None]:
    store, text = parse_checkpoint_id(checkpoint_id)
    if text is None:
        return store, None
    if not text.isdecimal():
        raise UsageError("a step must be an integer", where=repr(checkpoint_id))
    return store, check_step(int(text))


def _catch_up(repository: Repository, bases: BaseCache, written: Unpublished | None) -> None:
    """Learn what was published since the last save, in which this rank wrote ``written``: another rank published it."""
    names = repository.manifests.listing().names
    newest = repository.newest
    if names and (newest is None or names[-1].seq > newest.header.seq):
        try:
            newest = repository.manifests.load(names[-1])
        except (CorruptError, UnsupportedError, FileNotFoundError) as error:
            # Chunks that are not indexed are simply written again.
            _log.warning("chunks of seq %d cannot be reused: %s", names[-1].seq, error)
        else:
            repository.chunk_index.add(newest)
            repository.newest = newest
            repository.note_seq(max(repository.seq_next() - 1, names[-1].seq))
    if newest is not None and newest.header.seq != bases.seq:
        paths = first_paths(state_of(newest.tree), [tensor.storage for tensor in newest.tensors])
        if written is None:
            bases.follow(newest, paths)
        else:
            chunk_ids = [frame.frame.chunk_id for frame in written.stored.frames]
            written.selection.remember(bases, newest, chunk_ids, paths)
    refresh_bases(repository, bases)


def _value_of(data: object) -> tuple[object, bool]:
    """Return what to store of a value, and whether it is the bytes that a planner made of it."""
    if isinstance(data, PlainValue):
        return data.value, False
    assert isinstance(data, io.BytesIO)
    return data.getvalue(), True


def _paths_of(values: Captured, mapping: Mapping[str, Path]) -> list[Path]:
    """Return the path in the checkpoint of each storage of captured values."""
    found = first_paths(values.tree, [tensor.storage for tensor in values.tensors])
    paths = [found.get(index, (f"storage {index}",)) for index in range(len(values.storages))]
    return [(*mapping.get(str(path[0]), path[:1]), *path[1:]) for path in paths]


class _Gathered:
    """The items that one rank writes: storages over their memory, and what the part says about them."""

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        self.storages: list[HostStorage] = []
        self.nbytes_by_item: list[int] = []
        self._paths: list[Path] = []
        self._starts: list[int] = []
        self._arrays: list[SavedArray] = []
        self._adapter = TorchAdapter()
        self._shards = ShardReader()
        self._state: Mapping[str, object] = getattr(planner, "state_dict", None) or {}
        mapping = getattr(planner, "mappings", None) or {}
        values: dict[str, tuple[object, bool]] = {}
        for item in items:
            path = mapping.get(item.index.fqn, (item.index.fqn,))
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                values[item.index.fqn] = _value_of(data)
                self.nbytes_by_item.append(0)
            else:
                assert isinstance(data, torch.Tensor)
                self._add_tensor(item, data, path)
        self._values = capture({name: value for name, (value, _) in values.items()}, [self._adapter])
        self._pickled = {name for name, (_, is_pickled) in values.items() if is_pickled}
        self._first_value = len(self.storages)
        for storage, path in zip(self._values.storages, _paths_of(self._values, mapping), strict=True):
            self._add_storage(storage, path, 0)

    def _add_tensor(self, item: WriteItem, tensor: torch.Tensor, path: Path) -> None:
        planned = item.tensor_data
        assert planned is not None
        name, shape = item.index.fqn, tuple(planned.size)
        box = Box(tuple(planned.chunk.offsets), tuple(planned.chunk.sizes))
        if tuple(tensor.shape) != box.sizes:
            raise UsageError(
                f"a tensor has shape {list(tensor.shape)}, but was planned as a box of {list(box.sizes)}", where=name
            )
        leaf = self._adapter.describe(tensor.detach().contiguous(), path)
        assert leaf is not None
        nbytes = count_of(box.sizes) * leaf.itemsize
        memory = leaf.memory
        span = MemorySpan(memory.start, nbytes, leaf.element_width, leaf.is_float, (memory.keep,), memory.read)
        requires_grad = bool(tensor.requires_grad)
        geometry = self._geometry_of(name, shape)
        cuts, layout = ((), None) if geometry is None else (geometry.cuts, Layout(*geometry.layout))
        index = len(self.storages)
        self._arrays.append(SavedArray(name, leaf.dtype, leaf.itemsize, shape, box, index, requires_grad, layout))
        # A base is named by its place in the storage. A wrong place would cost space only.
        self._add_storage(span, path, start_of(shape, leaf.itemsize, cuts, box) or 0)
        self.nbytes_by_item.append(nbytes)

    def _geometry_of(self, name: str, shape: tuple[int, ...]) -> Geometry | None:
        """Return where the shards of a tensor lie; None: it is not sharded, or the planner does not say."""
        try:
            shards = self._shards.describe_shards(self._state.get(name))
        except LeafTypeError:
            return None
        return None if shards is None or shards.geometry.shape != shape else shards.geometry

    def _add_storage(self, storage: HostStorage, path: Path, start: int) -> None:
        self.storages.append(storage)
        self._paths.append(path)
        self._starts.append(start)

    def captured(self) -> Captured:
        """Return the storages as input of a commit; no tree."""
        structure = Structure()
        paths = dict(enumerate(self._paths))
        # A commit names bases by the path of a storage's first tensor. Boxes have no tree to take it from.
        structure.once("paths", lambda: paths)
        storages = Spans.of([each for each in self.storages if isinstance(each, MemorySpan)])
        assert len(storages) == len(self.storages)
        return Captured(
            tree=ListNode(()),
            paths=[],
            tensors=[],
            storages=storages,
            warnings=self._values.warnings,
            structure=structure,
            starts=tuple(self._starts),
        )

    def saved(self, unpublished: Unpublished, warnings: Iterable[str]) -> Saved:
        """Return what this rank wrote, with the planner's warnings."""
        tree = self._values.tree
        assert isinstance(tree, DictNode)
        storages = unpublished.plan.storages
        part = make_part(
            unpublished,
            [(index, 0) for index in range(len(storages))],
            (),
            # The coordinator knows the rank, the attempt and the tree.
            rank=0,
            attempt=bytes(ATTEMPT_NBYTES),
            skeleton=bytes(DIGEST_NBYTES),
            host=socket.gethostname(),
            warnings=(*self._values.warnings, *warnings),
        )
        return Saved(
            arrays=tuple(self._arrays),
            values=tuple(
                SavedValue(str(name), node, name in self._pickled)
                for name, node in zip(tree.keys, tree.children, strict=True)
            ),
            tensors=tuple(replace(spec, storage=spec.storage + self._first_value) for spec in self._values.tensors),
            storages=tuple(SpanShape(each.nbytes, each.element_width, each.is_float) for each in storages),
            pack_names=tuple(unpublished.stored.pack_names),
            part=part.encode(),
        )
