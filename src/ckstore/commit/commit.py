"""Write one checkpoint, stage by stage.

plan -> hash, encode, check and write chunk by chunk -> flush -> publish -> verify -> acknowledge. The numbers in
comments are the steps of the commit protocol in docs/FORMAT.md.

Also: warn when a stale copy of the model may have been saved. The model that is saved is sometimes not the one that is
trained: an old copy, a wrapper's shadow, weights before a swap. Nothing fails, and the loss is noticed weeks later. So
the receipt warns if the optimizer's state has changed since the previous commit and not one byte of the model has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from ckstore.commit.base_selection import (
    BaseSelection,
    LossyCandidates,
    LossyChunks,
    paths_of_storages,
    select_bases,
)
from ckstore.commit.chunk_writer import ChunkWriter, WriteResult
from ckstore.commit.chunking import CommitPlan, Source, plan_commit
from ckstore.commit.pipeline import WriteBlocks
from ckstore.commit.unpublished import Unpublished, packs_removed_on_failure
from ckstore.concurrency import ThreadLimit, collector_paused, noop
from ckstore.config import Policy
from ckstore.delta.base_cache import BaseCache
from ckstore.errors import BackendError, CkstoreError, ConflictError
from ckstore.format.location import Decisions
from ckstore.format.logical import fidelity_of
from ckstore.format.manifest import Manifest, build_manifest
from ckstore.format.paths import ManifestName
from ckstore.format.tensors import Table
from ckstore.format.tree import DictNode, ListNode, Node, Path, TensorNode, TupleNode, format_path, items_of
from ckstore.hashing import new_hasher
from ckstore.results import Receipt, Stopwatch
from ckstore.state.capture import Captured
from ckstore.store.chunk_index import locate
from ckstore.store.refs import load_whole, resolve
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")

_OPTIMIZER_KEYS = {"state", "param_groups"}
"""Keys of the state_dict of every ``torch.optim`` optimizer."""


class LossyCommit(Protocol):
    """Quantization, as a commit uses it. ``ckstore.quant.writer.ResidualCommit`` implements it."""

    def candidates(self, captured: Captured) -> LossyCandidates:
        """Return the storages of a state that may be quantized."""
        ...

    def writer_factory(self, lossy: LossyChunks) -> Callable[..., ChunkWriter]:
        """Return the function that makes the writer; it takes the arguments of ``ChunkWriter``."""
        ...

    def warnings(self, captured: Captured, manifest: Manifest, stored: WriteResult) -> list[str]:
        """Return the receipt's warnings about what was quantized and what was not."""
        ...


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """One state to commit, and everything that the commit needs from its caller.

    Args:
        captured: The state.
        step: The trainer's step.
        policy: How to store it.
        parent: The seq that training continued from.
        metrics: Numbers to find the checkpoint by.
        bases: Chunks of the previous checkpoint; updated by the commit.
        fingerprint: Digests from the handle's previous commit.
        source_is_immutable: Nothing changes the state's memory until the commit returns, because it is in an arena.
        retained_slot: The ticket of the arena's slot, if its memory stays unchanged for as long as ``bases`` use it.
        thread_limit: How many threads may hash and code; may change during the commit.
        blocks: Source of the blocks that packs are written through.
        time_ns: When the state was made; None for now.
        lossy: Quantizes as ``policy.residual`` says; None for an exact policy.
        check: Called before each chunk, on any thread. What it raises ends the commit.
    """

    captured: Captured
    step: int
    policy: Policy
    parent: int | None
    metrics: Mapping[str, float]
    bases: BaseCache
    fingerprint: Fingerprint | None = None
    source_is_immutable: bool = False
    retained_slot: int | None = None
    thread_limit: ThreadLimit = field(default_factory=ThreadLimit)
    blocks: WriteBlocks = field(default_factory=WriteBlocks)
    time_ns: int | None = None
    lossy: LossyCommit | None = None
    check: Callable[[], None] = noop


@dataclass(frozen=True, slots=True)
class Committed:
    """The receipt of a durable checkpoint, and the digests that the handle's next commit compares with."""

    receipt: Receipt
    fingerprint: Fingerprint | None


def commit(repository: Repository, request: CommitRequest, watch: Stopwatch) -> Committed:
    """Write one checkpoint. It is durable when this returns, and invisible before.

    Raises:
        CapacityError: The disk is full. Earlier checkpoints are intact; nothing of this one is visible.
        ConflictError: Another live writer has the run, or packs vanished twice during this commit.
        BackendError: The storage failed twice.
        BoundError: A tensor cannot be quantized within the policy's bounds, and ``on_bound`` is ``"raise"``.
    """
    assert (request.lossy is None) == (request.policy.residual is None), "the policy's residual needs a LossyCommit"
    repository.prepare_run()
    repository.lease.take()  # 1
    request.bases.begin(request.policy.base_cache_nbytes_max if request.policy.base_cache == "memory" else 0)
    try:
        return _commit_with_lease(repository, request, watch)
    finally:
        request.bases.discard_drafts()


def write_unpublished(repository: Repository, request: CommitRequest, watch: Stopwatch) -> Unpublished:
    """Write the chunks of a state that the store does not have; they are durable when this returns.

    Raises:
        CapacityError: The disk is full.
        BackendError: The storage failed twice.
    """
    with watch("plan"), collector_paused():
        plan, selection = _plan(repository, request)  # 2
    return Unpublished(plan, selection, _write_chunks(repository, plan, selection, request, watch))  # 3-7


def refresh_bases(repository: Repository, bases: BaseCache) -> None:
    """Before the chunks are planned: forget packs that are gone, and after a restart follow the newest checkpoint."""
    repository.chunk_index.forget_packs(repository.packs_gone(repository.chunk_index.packs()))
    if bases.seq is None and repository.newest is not None:
        bases.follow(repository.newest)


def follow_parent(repository: Repository, bases: BaseCache, parent: int | None) -> bool:
    """Make the parent the delta base, if training has gone back to an earlier checkpoint. Return whether it has."""
    last = bases.seq if bases.seq is not None else repository.newest and repository.newest.header.seq
    if parent is None or parent == last:
        return False
    try:
        manifest = load_whole(repository, resolve(repository, f"seq:{parent}"))
    except CkstoreError as error:
        _log.info("seq %d cannot be a base: %s", parent, error)
        return False
    repository.chunk_index.pin(manifest)
    bases.follow(manifest)
    return True


def _commit_with_lease(repository: Repository, request: CommitRequest, watch: Stopwatch) -> Committed:
    refresh_bases(repository, request.bases)
    # A collector may delete packs that this commit refers to. Then it is repeated once, without them.
    for _ in range(2):
        unpublished = write_unpublished(repository, request, watch)
        plan, selection, stored = unpublished.plan, unpublished.selection, unpublished.stored
        name, manifest = _publish(repository, unpublished, request, watch)  # 8
        with watch("verify"):
            packs_gone = repository.rescue_local_packs({pack.pack_id: pack.nbytes for pack in manifest.packs})  # 9
        if not packs_gone:
            repository.manifests.note_published(name.seq)
            repository.note_committed(manifest)
            chunk_ids = [frame.frame.chunk_id for frame in stored.frames]
            selection.remember(request.bases, manifest, chunk_ids, paths_of_storages(request.captured))
            request.bases.keep_only_slot(request.retained_slot)
            repository.renew_file_times(manifest.packs)
            return _acknowledge(repository, request, plan, manifest, stored, watch)  # 10
        repository.manifests.withdraw(name)
        repository.chunk_index.forget_packs(packs_gone)
        _log.warning("packs vanished during the commit of step %d; repeating it without them", request.step)
    raise ConflictError(
        "packs vanished twice during one commit",
        where=repository.backend.root,
        todo="find the process that removes files from the store, then commit again",
        pack_ids=sorted(pack_id.hex() for pack_id in packs_gone),
    )


def _plan(repository: Repository, request: CommitRequest) -> tuple[CommitPlan, BaseSelection]:
    captured, policy = request.captured, request.policy
    candidates = None if request.lossy is None else request.lossy.candidates(captured)
    unshared = frozenset[int]() if candidates is None else candidates.unshared
    limits = repository.limits
    plan = captured.structure.once(
        ("plan", limits, unshared),
        lambda: plan_commit(captured.storages, limits, unshared=unshared, starts=captured.starts),
    )
    return plan, select_bases(
        captured, plan, repository.chunk_index, request.bases, policy, repository.limits, candidates
    )


def _write_chunks(
    repository: Repository, plan: CommitPlan, selection: BaseSelection, request: CommitRequest, watch: Stopwatch
) -> WriteResult:
    """Write the chunks that the store does not have into packs; they are durable when this returns."""
    for attempt in range(2):
        writer = _make_writer(repository, plan, selection, request)
        try:
            return writer.write(watch)
        except BackendError as error:
            # A pack whose fsync failed is never synced again: the kernel may have dropped its pages and report success
            # the second time. The state is still in memory, so everything is written once more, to new packs.
            if attempt == 1:
                raise
            _log.warning("writing packs failed (%s); writing them once more under other names", error)
    raise AssertionError("unreachable")


def _make_writer(
    repository: Repository, plan: CommitPlan, selection: BaseSelection, request: CommitRequest
) -> ChunkWriter:
    make: Callable[..., ChunkWriter] = ChunkWriter
    if request.lossy is not None and selection.lossy is not None and selection.lossy.chunks:
        make = request.lossy.writer_factory(selection.lossy)
    return make(
        repository,
        plan,
        request.captured.storages,
        request.policy,
        selection.plans,
        request.bases,
        source_is_immutable=request.source_is_immutable,
        retained_slot=request.retained_slot,
        thread_limit=request.thread_limit,
        blocks=request.blocks,
        check=request.check,
    )


def _publish(
    repository: Repository, unpublished: Unpublished, request: CommitRequest, watch: Stopwatch
) -> tuple[ManifestName, Manifest]:
    seq: int | None = None

    def is_visible() -> bool:
        return seq is not None and repository.manifests.is_visible(seq)

    with watch("publish"), packs_removed_on_failure(repository, unpublished.stored.pack_names, is_visible):
        repository.lease.check()
        seq = repository.manifests.claim(repository.seq_next())  # 8a
        repository.note_seq(seq)
        with collector_paused():
            manifest = _manifest_of(repository, unpublished, request, seq)
        return repository.manifests.publish(manifest), manifest  # 8b-8d: the commit point


def _manifest_of(repository: Repository, unpublished: Unpublished, request: CommitRequest, seq: int) -> Manifest:
    plan, stored = unpublished.plan, unpublished.stored
    packs, frames = locate(stored.frames)
    now_ns = repository.clock.now_ns()
    return build_manifest(
        store_id=repository.store_id,
        run=repository.run,
        seq=seq,
        step=request.step,
        time_ns=now_ns if request.time_ns is None else min(request.time_ns, now_ns),
        parent=request.parent,
        origin_id=None,
        is_archival=False,
        fidelity=fidelity_of(request.policy.residual, stored.losses),
        metrics=request.metrics,
        tree=request.captured.tree,
        tensors=request.captured.structure.once("tensors", lambda: Table(request.captured.tensors)),
        storages=plan.storages,
        chunks=unpublished.chunk_specs(),
        packs=packs,
        frames=frames,
        bytes_written=stored.nbytes_written,
        chunks_new=stored.chunks_new,
        decisions=decisions_of(unpublished),
        losses=stored.losses,
    )


def decisions_of(unpublished: Unpublished) -> Decisions | None:
    """Return the manifest's record of how bases were chosen."""
    plan, selection, stored = unpublished.plan, unpublished.selection, unpublished.stored
    return selection.decisions(selection.modes(plan.chunks_of, stored), _bits(plan, stored))


def _bits(plan: CommitPlan, stored: WriteResult) -> list[float | None]:
    """Return the stored bits per element of each storage's new chunks; None for a storage without new chunks."""

    @cache
    def bits(chunks: tuple[int, ...], element_width: int) -> float | None:
        new = [chunk for chunk in chunks if stored.is_new[chunk]]
        plain_nbytes = sum(plan.chunks[chunk].nbytes for chunk in new)
        payload_nbytes = sum(stored.frames[chunk].frame.stored_nbytes for chunk in new)
        return 8 * element_width * payload_nbytes / plain_nbytes if new else None

    return [bits(chunks, spec.element_width) for chunks, spec in zip(plan.chunks_of, plan.storages, strict=True)]


def _acknowledge(
    repository: Repository,
    request: CommitRequest,
    plan: CommitPlan,
    manifest: Manifest,
    stored: WriteResult,
    watch: Stopwatch,
) -> Committed:
    warnings = [*request.captured.warnings, *stored.warnings]
    fingerprint: Fingerprint | None = None
    try:
        fingerprint = Fingerprint.of(request.captured, plan, stored)
        warnings += stale_warnings(request.fingerprint, fingerprint)
        if request.lossy is not None:
            warnings += request.lossy.warnings(request.captured, manifest, stored)
    except Exception as error:
        # The checkpoint is durable. A failed check must not make the caller believe otherwise.
        warnings.append(f"the check for a stale or diverged model failed: {error}")
    receipt = Receipt.of(
        manifest,
        watch,
        engine=repository.engine_name,
        warnings=warnings,
        chunks_delta=stored.chunks_delta,
        chunks_derived=stored.chunks_derived,
        chunks_lossy=stored.chunks_lossy,
        bytes_bases=(request.bases.held_nbytes, request.bases.held_nbytes_peak, request.bases.staged_nbytes),
    )
    return Committed(receipt, fingerprint)


@dataclass(frozen=True, slots=True)
class Side:
    """A model, or its optimizers: the paths of its tensors, and where their bytes are in the plan of the commit.

    Args:
        paths: The paths of the tensors.
        chunks: The chunks that contain nothing else.
        rest: Their ranges of the other chunks.
    """

    paths: tuple[Path, ...]
    chunks: tuple[int, ...]
    rest: tuple[Source, ...]

    @classmethod
    def of(cls, tensors: Mapping[Path, int], plan: CommitPlan) -> Side:
        """Return the side with these tensors; their storages are given by path."""
        storages = set(tensors.values())
        chunks: list[int] = []
        rest: list[Source] = []
        for index, chunk in enumerate(plan.chunks):
            own = [source for source in chunk.sources if source.storage in storages]
            if len(own) == len(chunk.sources):
                chunks.append(index)
            else:
                rest += own
        return cls(tuple(tensors), tuple(chunks), tuple(rest))

    def digest(self, captured: Captured, stored: WriteResult) -> bytes:
        """Return the digest of all tensors, whatever the numbers of their chunks are.

        Only ranges of chunks that contain something else are hashed again.
        """
        hasher = new_hasher()
        hasher.update(b"".join(stored.frames[chunk].frame.chunk_id for chunk in self.chunks))
        for source in self.rest:
            hasher.update(captured.storages[source.storage].read(source.offset, source.offset + source.nbytes))
        return hasher.digest()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Paths and digest of the float tensors of the model, and of all tensors of its optimizers, in one commit."""

    model: tuple[tuple[Path, ...], bytes]
    optimizer: tuple[tuple[Path, ...], bytes]

    @classmethod
    def of(cls, captured: Captured, plan: CommitPlan, stored: WriteResult) -> Fingerprint:
        """Return the fingerprint of a commit."""
        # The structure keeps the plan, so its id stays unique.
        model, optimizer = captured.structure.once(("sides", id(plan)), lambda: _sides(captured, plan))
        return cls(
            (model.paths, model.digest(captured, stored)),
            (optimizer.paths, optimizer.digest(captured, stored)),
        )


def _sides(captured: Captured, plan: CommitPlan) -> tuple[Side, Side]:
    model: dict[Path, int] = {}
    optimizer: dict[Path, int] = {}
    for path, tensor, is_optimizer in _tensors(captured.tree, (), is_optimizer=False):
        index = captured.tensors[tensor].storage
        if is_optimizer or plan.storages[index].is_float:
            (optimizer if is_optimizer else model)[path] = index
    return Side.of(model, plan), Side.of(optimizer, plan)


def stale_warnings(before: Fingerprint | None, now: Fingerprint) -> list[str]:
    """Return a warning if the optimizer has changed since the handle's previous commit and the model has not."""
    if before is None or not now.model[0] or not now.optimizer[0]:
        return []
    if now.model != before.model or now.optimizer[1] == before.optimizer[1]:
        return []
    if now.optimizer[0] != before.optimizer[0]:
        return []
    paths, _ = now.model
    return [
        f"all {len(paths)} model tensors ({format_path(paths[0])}, ...) are equal to the previous commit's although "
        "the optimizer's state has changed: check that you do not save a stale copy of the model"
    ]


def _tensors(node: Node, path: Path, *, is_optimizer: bool) -> Iterator[tuple[Path, int, bool]]:
    """Yield each tensor's path, its index, and whether it belongs to an optimizer."""
    if isinstance(node, TensorNode):
        yield path, node.tensor, is_optimizer
    elif isinstance(node, (DictNode, ListNode, TupleNode)):
        is_optimizer = is_optimizer or (isinstance(node, DictNode) and set(node.keys) >= _OPTIMIZER_KEYS)
        for key, child in items_of(node):
            yield from _tensors(child, (*path, key), is_optimizer=is_optimizer)
