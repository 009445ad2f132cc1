"""The story of a commit, stage by stage.

stage -> plan -> (hash, encode, check, write) chunk by chunk -> flush -> publish -> verify -> acknowledge.
The numbers in comments are the steps of the commit protocol in docs/FORMAT.md.

Suspicion: was a stale copy of the model saved again?

The commonest silent loss among users of checkpoint tools is a model that is not the one being trained: an
old copy, a wrapper's shadow, weights before a swap. It is saved without error and noticed weeks later.
When the optimizer's state has changed since the last commit and not one byte of the model has, we say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckstore.commit.base_selection import BaseSelection, LossyCandidates, LossyChunks, select_bases
from ckstore.commit.chunk_writer import ChunkWriter, WriteResult
from ckstore.commit.chunking import CommitPlan, plan_commit
from ckstore.commit.pipeline import WriteBlocks
from ckstore.concurrency import ThreadLimit, run_uninterrupted
from ckstore.config import Policy
from ckstore.delta.base_cache import BaseCache
from ckstore.errors import BackendError, CkstoreError, ConflictError
from ckstore.format.losses import fidelity_of
from ckstore.format.manifest import ChunkSpec, Manifest, build_manifest
from ckstore.format.paths import ManifestName
from ckstore.format.tensors import StorageSpec
from ckstore.format.tree import DictNode, ListNode, Node, Path, TensorNode, TupleNode, format_path, items_of
from ckstore.hashing import digest_of
from ckstore.results import Receipt, Stopwatch
from ckstore.state.capture import Captured
from ckstore.state.tensors import HostStorage
from ckstore.store.chunk_index import locate
from ckstore.store.repository import Repository

_log = logging.getLogger("ckstore")


class LossyCommit(Protocol):
    """Quantization, as a commit uses it; ``ckstore.quant.writer.ResidualCommit`` implements it."""

    def candidates(self, captured: Captured) -> LossyCandidates:
        """Return the storages of a state that may be quantized."""
        ...

    def writer_factory(self, lossy: LossyChunks) -> Callable[..., ChunkWriter]:
        """Return what makes the writer of a plan with quantized chunks; it takes the arguments of ``ChunkWriter``."""
        ...

    def warnings(self, captured: Captured, manifest: Manifest, stored: WriteResult) -> list[str]:
        """Return the receipt's warnings about what was quantized and what was not."""
        ...


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """What the caller asked to commit."""

    captured: Captured
    step: int
    policy: Policy
    parent: int | None
    metrics: Mapping[str, float]
    bases: BaseCache
    fingerprint: Fingerprint | None = None
    """What the handle's previous commit looked like."""
    source_is_immutable: bool = False
    """Nobody changes the state until this returns: it lies in an arena."""
    retained_slot: int | None = None
    """The ticket of that state where its bytes stay as they are for as long as ``bases`` hold some of them."""
    thread_limit: ThreadLimit = field(default_factory=ThreadLimit)
    """How many threads may hash and code, at any time."""
    blocks: WriteBlocks = field(default_factory=WriteBlocks)
    """Where the blocks come from that packs are written through."""
    time_ns: int | None = None
    """When the state was made; None: now."""
    lossy: LossyCommit | None = None
    """Quantizes as ``policy.residual`` says; None for an exact policy."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A durable checkpoint, and what the next commit wants to know of it."""

    receipt: Receipt
    fingerprint: Fingerprint | None


def commit(repository: Repository, request: CommitRequest, watch: Stopwatch) -> Committed:
    """Write one checkpoint; it exists when this returns and not before.

    Raises:
        CapacityError: The disk is full. Earlier checkpoints are intact; nothing of this one is visible.
        ConflictError: Another live writer has the run, or packs vanished twice under this commit.
        BackendError: The medium failed twice.
        BoundError: The policy allows no loss that fits into its bounds, and nothing exact instead.
    """
    assert (request.lossy is None) == (request.policy.residual is None), "the policy's residual needs a LossyCommit"
    repository.prepare_run()
    repository.lease.take()  # 1
    request.bases.begin(request.policy.base_cache_nbytes_max if request.policy.base_cache == "memory" else 0)
    try:
        return _commit(repository, request, watch)
    finally:
        request.bases.discard_drafts()


def _commit(repository: Repository, request: CommitRequest, watch: Stopwatch) -> Committed:
    repository.chunk_index.forget_packs(repository.packs_gone(repository.chunk_index.packs()))
    if request.bases.seq is None and repository.newest is not None:
        request.bases.follow(repository.newest)
    for _ in range(2):  # again at most once, without the packs that were collected
        with watch("plan"):
            plan, selection = _planned(repository, request)  # 2
        stored = _store_chunks_durably(repository, plan, selection, request, watch)  # 3-7
        name, manifest = _publish(repository, Drafted(plan, selection, stored), request, watch)  # 8
        with watch("verify"):
            packs_gone = repository.rescue_local_packs({pack.pack_id: pack.nbytes for pack in manifest.packs})  # 9
        if not packs_gone:
            repository.manifests.note_published(name.seq)
            repository.note_committed(manifest)
            selection.remember(request.bases, manifest, [frame.frame.chunk_id for frame in stored.frames])
            request.bases.keep_only_slot(request.retained_slot)
            repository.renew_file_times(manifest.packs)
            return _acknowledge(repository, request, manifest, stored, watch)  # 10
        repository.manifests.withdraw(name)
        repository.chunk_index.forget_packs(packs_gone)
        _log.warning("packs vanished under a commit of step %d; writing it again without them", request.step)
    raise ConflictError(
        "packs vanished twice under one commit",
        where=repository.backend.root,
        todo="find out who removes files from the store, then commit again",
        pack_ids=sorted(pack_id.hex() for pack_id in packs_gone),
    )


def _planned(repository: Repository, request: CommitRequest) -> tuple[CommitPlan, BaseSelection]:
    captured, policy = request.captured, request.policy
    candidates = None if request.lossy is None else request.lossy.candidates(captured)
    unshared = frozenset[int]() if candidates is None else candidates.unshared
    plan = plan_commit(captured.storages, repository.limits, unshared=unshared)
    return plan, select_bases(
        captured, plan, repository.chunk_index, request.bases, policy, repository.limits, candidates
    )


def _acknowledge(
    repository: Repository, request: CommitRequest, manifest: Manifest, stored: WriteResult, watch: Stopwatch
) -> Committed:
    warnings = [*request.captured.warnings, *stored.warnings]
    fingerprint: Fingerprint | None = None
    try:
        fingerprint = Fingerprint.of(request.captured, manifest.storages, manifest.chunks)
        warnings += stale_warnings(request.fingerprint, fingerprint)
        if request.lossy is not None:
            warnings += request.lossy.warnings(request.captured, manifest, stored)
    except Exception as error:
        # The checkpoint is durable; a suspicion that could not be looked into must not hide that.
        warnings.append(f"whether a stale or diverged model was saved could not be checked: {error}")
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


def _store_chunks_durably(
    repository: Repository, plan: CommitPlan, selection: BaseSelection, request: CommitRequest, watch: Stopwatch
) -> WriteResult:
    """Write what is not known yet into packs that survive a power cut when this returns."""
    for attempt in range(2):
        writer = _writer(repository, plan, selection, request)
        try:
            with watch("write"):
                writer.run()
            with watch("flush"):
                return run_uninterrupted(writer.flush, on_interrupt=lambda error: None)
        except BackendError as error:
            # The pack is never synced again: the kernel may have dropped its bytes and say nothing the
            # second time. Everything is still in memory, so it is written anew, once.
            writer.abandon()
            if attempt == 1:
                raise
            _log.warning("writing packs failed (%s); writing them anew under other names", error)
        except BaseException:
            writer.abandon()
            raise
    raise AssertionError("unreachable")


def _writer(repository: Repository, plan: CommitPlan, selection: BaseSelection, request: CommitRequest) -> ChunkWriter:
    what = (repository, plan, request.captured.storages, request.policy, selection.plans, request.bases)
    make: Callable[..., ChunkWriter] = ChunkWriter
    if request.lossy is not None and selection.lossy is not None and selection.lossy.chunks:
        make = request.lossy.writer_factory(selection.lossy)
    return make(
        *what,
        source_is_immutable=request.source_is_immutable,
        retained_slot=request.retained_slot,
        thread_limit=request.thread_limit,
        blocks=request.blocks,
    )


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a manifest is made of."""

    plan: CommitPlan
    selection: BaseSelection
    stored: WriteResult


def _publish(
    repository: Repository, drafted: Drafted, request: CommitRequest, watch: Stopwatch
) -> tuple[ManifestName, Manifest]:
    with watch("publish"):
        seq: int | None = None
        try:
            repository.lease.check()
            seq = repository.manifests.claim(repository.seq_next())  # 8a
            repository.note_seq(seq)
            manifest = _manifest_of(repository, drafted, request, seq)
            return repository.manifests.publish(manifest), manifest  # 8b-8d: the commit point
        except BaseException as error:
            # A server that gave no answer may still make the manifest appear; then its packs are needed.
            if seq is None or not (isinstance(error, BackendError) and error.facts.get("is_uncertain")):
                _remove_unpublished(repository, drafted.stored, seq)
            raise


def _remove_unpublished(repository: Repository, stored: WriteResult, seq: int | None) -> None:
    """Free the packs of a commit that did not get published; on a full disk every byte counts."""
    try:
        # Publishing may have failed after the manifest became visible: then its packs are needed.
        if seq is None or not repository.manifests.is_visible(seq):
            for pack_name in stored.pack_names:
                repository.backend.unlink(pack_name)
    except (CkstoreError, OSError) as error:
        _log.warning("packs of an unpublished commit are left for gc: %s", error)


def _manifest_of(repository: Repository, drafted: Drafted, request: CommitRequest, seq: int) -> Manifest:
    plan, stored = drafted.plan, drafted.stored
    packs, frames = locate(stored.frames)
    return build_manifest(
        store_id=repository.store_id,
        run=repository.run,
        seq=seq,
        step=request.step,
        time_ns=repository.clock.now_ns()
        if request.time_ns is None
        else min(request.time_ns, repository.clock.now_ns()),
        parent=request.parent,
        origin_id=None,
        is_archival=False,
        fidelity=fidelity_of(request.policy.residual, stored.losses),
        metrics=request.metrics,
        tree=request.captured.tree,
        tensors=request.captured.tensors,
        storages=plan.storages,
        chunks=[
            ChunkSpec(known.frame.chunk_id, chunk.nbytes, chunk.element_width, chunk.is_float)
            for chunk, known in zip(plan.chunks, stored.frames, strict=True)
        ],
        packs=packs,
        frames=frames,
        bytes_written=stored.nbytes_written,
        chunks_new=stored.chunks_new,
        decisions=drafted.selection.decisions(drafted.selection.modes(plan.storages, stored), _bits(drafted)),
        losses=stored.losses,
    )


def _bits(drafted: Drafted) -> list[float | None]:
    """Return the bits per element that the new chunks of each storage took; None where none is new."""
    stored, found = drafted.stored, []
    for storage in drafted.plan.storages:
        new = [piece.chunk for piece in storage.pieces if stored.is_new[piece.chunk]]
        plain_nbytes = sum(drafted.plan.chunks[chunk].nbytes for chunk in new)
        payload_nbytes = sum(stored.frames[chunk].frame.stored_nbytes for chunk in new)
        found.append(8 * storage.element_width * payload_nbytes / plain_nbytes if new else None)
    return found


_OPTIMIZER_KEYS = {"state", "param_groups"}
"""What every ``torch.optim`` optimizer's state_dict has."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A digest of every tensor of the model, and of the optimizer's state, as one commit saw them."""

    model: dict[Path, bytes]
    optimizer: dict[Path, bytes]

    @classmethod
    def of(cls, captured: Captured, storages: Sequence[StorageSpec], chunks: Sequence[ChunkSpec]) -> Fingerprint:
        """Take it from a commit whose chunks are hashed; only small storages are hashed again."""
        found = cls({}, {})
        for path, tensor, is_optimizer in _tensors(captured.tree, (), is_optimizer=False):
            index = captured.tensors[tensor].storage
            if is_optimizer or storages[index].is_float:
                side = found.optimizer if is_optimizer else found.model
                side[path] = _digest(captured.storages[index], storages[index], chunks)
        return found


def stale_warnings(before: Fingerprint | None, now: Fingerprint) -> list[str]:
    """Return what is suspicious about a commit after another one of the same handle."""
    if before is None or not now.model or not now.optimizer:
        return []
    if now.model != before.model or now.optimizer == before.optimizer:
        return []
    if now.optimizer.keys() != before.optimizer.keys():
        return []
    example = format_path(next(iter(now.model)))
    return [
        f"every one of {len(now.model)} model tensors ({example}, ...) equals the previous commit's although the "
        "optimizer's state has changed: is this a stale copy of the model?"
    ]


def _tensors(node: Node, path: Path, *, is_optimizer: bool) -> Iterator[tuple[Path, int, bool]]:
    if isinstance(node, TensorNode):
        yield path, node.tensor, is_optimizer
    elif isinstance(node, (DictNode, ListNode, TupleNode)):
        is_optimizer = is_optimizer or (isinstance(node, DictNode) and set(node.keys) >= _OPTIMIZER_KEYS)
        for key, child in items_of(node):
            yield from _tensors(child, (*path, key), is_optimizer=is_optimizer)


def _digest(source: HostStorage, storage: StorageSpec, chunks: Sequence[ChunkSpec]) -> bytes:
    if all(piece.offset == 0 and piece.nbytes == chunks[piece.chunk].nbytes for piece in storage.pieces):
        return digest_of(b"".join(chunks[piece.chunk].chunk_id for piece in storage.pieces))
    # A small storage in a shared chunk: the chunk changes with its neighbours, so hash it alone.
    return digest_of(source.read(0, storage.nbytes))
