"""Repack a run: code its checkpoints again, newest first, so that the newest are restored fastest.

``plan_repack`` decides. Then, for each checkpoint: read the state, code and check it, make the packs durable, and
replace the manifest by its next generation. The state's bytes do not change, so the checkpoint id does not either.

Invariants:
- Between any two steps every checkpoint can be restored, and the newest checkpoint stays the newest.
- Readers are not affected: old packs stay until gc removes them, and open files stay readable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckstore.commit.chunk_writer import ChunkWriter, WriteResult
from ckstore.commit.chunking import StoragePlan, chunks_of
from ckstore.commit.unpublished import packs_removed_on_failure
from ckstore.config import Policy, RepackPolicy
from ckstore.delta.base_cache import BaseCache
from ckstore.display import repr_of_summary
from ckstore.errors import ConflictError
from ckstore.format.manifest import Manifest, relocated
from ckstore.format.paths import ManifestName
from ckstore.ops.repack_plan import Action, Member, PlannedIndex, RepackPlan, Rewrite, plan_repack, roots_of
from ckstore.ops.stored_checkpoint import IsolatedRepository, is_replaced, plan_of, rewrite_policy, stored_state
from ckstore.store.chunk_index import locate
from ckstore.store.manifests import DroppedError
from ckstore.store.memory_budget import ENCODE_DELTA
from ckstore.store.refs import load_whole
from ckstore.store.repository import Repository, finish_interrupted_replacements, finish_replacement

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class RepackEntry:
    """One checkpoint of a repack. Numbers for afterwards are estimates until it was rewritten.

    Attributes:
        seq: Its number in the run.
        step: The trainer's step.
        action: ``"keyframe"``, ``"delta"``, or ``"keep"``.
        base_seq: The checkpoint that a delta is computed against; None otherwise.
        reason: Why, in a sentence.
        bytes_state: Plain bytes of its tensors.
        stored_before: Bytes of the frames of its own chunks.
        stored_after: The same afterwards, without frames shared with a newer checkpoint.
        read_before: Bytes that a restore reads.
        read_after: The same afterwards.
        is_done: Whether it was rewritten.
    """

    seq: int
    step: int
    action: Action
    base_seq: int | None
    reason: str
    bytes_state: int
    stored_before: int
    stored_after: int
    read_before: int
    read_after: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class RepackReport:
    """What a repack planned or did, newest checkpoint first.

    Attributes:
        run: The run.
        is_dry_run: Nothing was changed.
        entries: Every checkpoint of the run.
        packs_before: Bytes of the packs that the run's checkpoints needed.
        packs_after: The same afterwards. gc frees packs that are no longer referenced.
        bytes_written: Bytes of new packs.
        superseded_count: Manifests that an interrupted repack had left in place, and that were moved to the trash.
    """

    run: str
    is_dry_run: bool
    entries: tuple[RepackEntry, ...]
    packs_before: int
    packs_after: int
    bytes_written: int
    superseded_count: int = 0

    __repr__ = repr_of_summary

    @property
    def rewritten(self) -> tuple[RepackEntry, ...]:
        """Entries that were, or would be, rewritten."""
        return tuple(entry for entry in self.entries if entry.action != "keep")


def repack(
    repository: Repository,
    repack_policy: RepackPolicy,
    policy: Policy,
    *,
    dry_run: bool,
    on_progress: Callable[[int, int], None] | None = None,
) -> RepackReport:
    """Plan and, unless it is a dry run, rewrite.

    Args:
        repository: The store.
        repack_policy: Which checkpoints become keyframes, and how the others are coded.
        policy: Threads and memory.
        dry_run: Only plan.
        on_progress: Called with the number of checkpoints done and the total, first for the plan, then for the rewrite.

    Raises:
        ConflictError: Another live process writes the run, or has replaced a checkpoint meanwhile.
        CorruptError: A checkpoint of the run is damaged.
        CapacityError: The disk is full. After any error, each checkpoint is in its old or its new form.
    """
    if dry_run:
        return _report(
            repository, plan_repack(repository, repack_policy, policy, on_progress=on_progress), {}, is_dry_run=True
        )
    repository.prepare_run()
    repository.lease.take()
    superseded_count = finish_interrupted_replacements(repository)
    plan = plan_repack(repository, repack_policy, policy, on_progress=on_progress)
    try:
        done = _Repacker(repository, repack_policy, policy, plan).run(on_progress or (lambda done, total: None))
    finally:
        # Even a failed call may have replaced the checkpoint that the next commit would follow.
        repository.forget_run_state()
    return replace(_report(repository, plan, done, is_dry_run=False), superseded_count=superseded_count)


@dataclass(frozen=True, slots=True)
class _Rewritten:
    """Bytes after one checkpoint was rewritten."""

    written: int
    stored: int
    read: int


def _report(repository: Repository, plan: RepackPlan, done: dict[int, _Rewritten], *, is_dry_run: bool) -> RepackReport:
    entries = tuple(
        RepackEntry(
            seq=member.name.seq,
            step=member.name.step,
            action=member.action,
            base_seq=member.base_seq,
            reason=member.reason,
            bytes_state=member.state_nbytes,
            stored_before=member.stored_before,
            stored_after=done[seq].stored if (seq := member.name.seq) in done else member.stored_after,
            read_before=member.read_before,
            read_after=done[seq].read if seq in done else member.read_after,
            is_done=seq in done,
        )
        for member in plan.members
    )
    planned = plan.written_nbytes
    written = planned if is_dry_run else sum(each.written for each in done.values())
    after = plan.packs_after - planned + written
    return RepackReport(repository.run, is_dry_run, entries, plan.packs_before, after, written)


class _Repacker:
    """Carry out a plan."""

    def __init__(self, repository: Repository, repack_policy: RepackPolicy, policy: Policy, plan: RepackPlan) -> None:
        self._repository = repository
        self._plan = plan
        self._index = PlannedIndex()
        self._isolated = IsolatedRepository(repository, self._index)
        self._policy = rewrite_policy(policy, repository.limits, ENCODE_DELTA, compression=repack_policy.compression)

    def run(self, on_progress: Callable[[int, int], None]) -> dict[int, _Rewritten]:
        """Rewrite checkpoints, and return the result for each rewritten seq."""
        done: dict[int, _Rewritten] = {}
        total = sum(member.rewrite is not None for member in self._plan.members)
        for member in self._plan.members:
            try:
                manifest = load_whole(self._repository, member.name)
            except DroppedError:
                # It was deleted meanwhile. No other checkpoint depends on it: each manifest names all frames that it
                # needs.
                continue
            if manifest.header.generation != member.name.generation:
                raise _replaced_meanwhile(self._repository, member)
            if member.rewrite is None:
                self._index.put(roots_of(manifest))
                continue
            result = self._rewrite(manifest, member, member.rewrite)
            if result is not None:
                done[member.name.seq] = result
            on_progress(len(done), total)
        return done

    def _rewrite(self, manifest: Manifest, member: Member, rewrite: Rewrite) -> _Rewritten | None:
        mark = self._index.mark()
        self._index.put(known for known in roots_of(manifest) if known.frame.chunk_id in rewrite.in_place)
        stored = self._store_chunks(manifest, member, rewrite)
        replacement, name = self._publish(manifest, rewrite, stored)
        try:
            finish_replacement(self._repository, replacement, name)
        except DroppedError as error:
            _log.warning("%s; it stays deleted", error.what)
            self._index.back_to(mark)
            return None
        self._index.put(stored.frames)
        in_place = sum(known.frame.frame_nbytes for known in stored.frames if known.frame.chunk_id in rewrite.in_place)
        read = sum(frame.frame_nbytes for frame in replacement.frames)
        return _Rewritten(stored.nbytes_written, stored.frames_nbytes + in_place, read)

    def _publish(self, manifest: Manifest, rewrite: Rewrite, stored: WriteResult) -> tuple[Manifest, ManifestName]:
        repository = self._repository
        with packs_removed_on_failure(repository, stored.pack_names, lambda: is_replaced(repository, manifest)):
            repository.lease.check()
            replacement = _replacement(manifest, rewrite, stored)
            return replacement, repository.manifests.publish(replacement)

    def _store_chunks(self, manifest: Manifest, member: Member, rewrite: Rewrite) -> WriteResult:
        """Code every chunk that is not yet in the index, and make the packs durable."""
        forms = [
            StoragePlan(None if form.base is None else self._index.find(form.base), form.is_unsampled, form.master)
            for form in rewrite.forms
        ]
        self._isolated.nbytes_planned = member.written_nbytes
        with stored_state(self._repository, manifest) as state:
            writer = ChunkWriter(self._isolated, plan_of(manifest), state.storages, self._policy, forms, BaseCache())
            return writer.write()


def _replacement(manifest: Manifest, rewrite: Rewrite, stored: WriteResult) -> Manifest:
    """Return the manifest of the next generation: the same checkpoint at new locations."""
    packs, frames = locate(stored.frames)
    return relocated(
        manifest,
        generation=manifest.header.generation + 1,
        packs=packs,
        frames=frames,
        bytes_written=stored.nbytes_written,
        chunks_new=stored.chunks_new,
        decisions=rewrite.selection.decisions(rewrite.selection.modes(chunks_of(manifest.storages), stored)),
    )


def _replaced_meanwhile(repository: Repository, member: Member) -> ConflictError:
    return ConflictError(
        f"seq {member.name.seq} was replaced by another process after the repack was planned",
        where=repository.backend.root,
        todo="run `ckstore repack` again",
    )
