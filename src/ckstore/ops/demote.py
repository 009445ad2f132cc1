"""The story of a demotion: choose the checkpoints that have aged, then store each anew with a loss, the oldest first.

For each: declare the intent, read its state from the store, quantize it against the checkpoint before it, make the
packs durable, and replace the manifest by its next generation. The bytes differ, so the checkpoint's identity does
too; the new manifest says which one it was made from.

Invariants:
- Between any two steps every checkpoint can be restored, in its old or in its new form.
- No rule demotes the newest checkpoint of a run; what carries a tag is not demoted even by name.
- What cannot be stored with a loss, or would not become smaller, stays as it is.
- No lease is needed beside a living trainer: a demotion claims no seq, and replaces what is not the newest. What counts
  as newer is durable and whole, so that neither a power cut nor its own writer takes it back.

Decide which checkpoints of a run are to be stored anew with a loss, and why the others are not.

What comes out is data: ``demote`` carries it out, and a dry run prints it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from ckstore.commit.base_selection import BaseSelection, select_bases
from ckstore.commit.chunk_writer import WriteResult
from ckstore.commit.chunking import CommitPlan, plan_commit
from ckstore.concurrency import run_uninterrupted
from ckstore.config import GIB, MIB, DemotePolicy, Policy, Residual
from ckstore.delta.base_cache import BaseCache
from ckstore.errors import (
    BackendError,
    BoundError,
    CapacityError,
    CkstoreError,
    ConflictError,
    CorruptError,
    MissingChunkError,
    NotFoundError,
    UsageError,
)
from ckstore.format import paths as layout
from ckstore.format.frame import FRAME_HEADER_NBYTES
from ckstore.format.header import ManifestHeader
from ckstore.format.losses import EXACT_FIDELITY, fidelity_of
from ckstore.format.manifest import ChunkSpec, Manifest, build_manifest
from ckstore.format.paths import ManifestName
from ckstore.hashing import ChunkId
from ckstore.io.backend import Backend, Distant
from ckstore.io.memory import DiscardingBackend
from ckstore.ops.repack import IsolatedRepository
from ckstore.ops.stored_checkpoint import reader_nbytes, stored_state
from ckstore.quant.warnings import diverged_warnings, named_nothing, tensor_words
from ckstore.quant.writer import ResidualCommit, lossy_thread_nbytes
from ckstore.state.capture import Captured
from ckstore.store.chunk_index import LOST_TIER, ChunkIndex, locate
from ckstore.store.manifests import DroppedError, EmptyRunError
from ckstore.store.refs import Reference, header_or_none, load_whole, resolve
from ckstore.store.repository import Repository, finish_interrupted_replacements, finish_replacement

DemoteAction = Literal["demote", "keep"]


@dataclass(frozen=True, slots=True)
class DemoteEntry:
    """One checkpoint of a demotion.

    Attributes:
        seq: Its number in the run.
        step: The trainer's step.
        action: ``"demote"`` or ``"keep"``.
        reason: Why, in a sentence.
        fidelity: As it is told afterwards; before, in a dry run.
        bytes_state: Plain bytes of its tensors.
        stored_before: Bytes of the frames of its own chunks.
        stored_after: The same afterwards, and in a dry run what is expected; equal where nothing is done.
        worst_rel_rms: The greatest RMS error of a tensor, in the RMS of its values; in a dry run the one to expect.
        is_done: Whether it was demoted now.
        is_final: Whether it was tried and came to nothing, as it would again by the same policy.
    """

    seq: int
    step: int
    action: DemoteAction
    reason: str
    fidelity: str
    bytes_state: int
    stored_before: int
    stored_after: int
    worst_rel_rms: float = 0.0
    is_done: bool = False
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class DemoteReport:
    """What a demotion planned or did, the newest checkpoint first.

    Attributes:
        run: The run.
        is_dry_run: Nothing was changed.
        entries: Every checkpoint of the run.
        fidelity: What is asked for, by its name.
        packs_before: Bytes of the packs that the run's checkpoints need.
        packs_after: The same afterwards; packs that are needed no more are freed when the store is collected.
        bytes_written: Bytes of new packs.
        warnings: Rules of the fidelity that name nothing in any checkpoint that is, or would be, demoted; and of what
            was tried, which tensors stayed exact and why, and which hold NaN or infinity.
    """

    run: str
    is_dry_run: bool
    entries: tuple[DemoteEntry, ...]
    packs_before: int
    packs_after: int
    bytes_written: int
    warnings: tuple[str, ...] = ()
    fidelity: str = ""


def plan_warnings(repository: Repository, residual: Residual, entries: Sequence[DemoteEntry]) -> tuple[str, ...]:
    """Return a warning for each rule that names nothing in any checkpoint that is to be demoted."""
    paths: dict[str, None] = {}
    for entry in entries if residual.rules else ():
        if entry.action == "demote":
            # One that was dropped since has nothing that could be named.
            with contextlib.suppress(NotFoundError):
                tree = load_whole(repository, resolve(repository, f"seq:{entry.seq}")).tree
                paths |= dict.fromkeys(tensor_words(tree))
    return tuple(named_nothing(residual, list(paths))) if paths else ()


def plan_demotion(
    repository: Repository, wanted: DemotePolicy, refs: Sequence[Reference] = (), passed_over: Collection[int] = ()
) -> list[DemoteEntry]:
    """Choose what is to be demoted; the newest checkpoint comes first.

    Args:
        repository: The store.
        wanted: Which checkpoints stay exact.
        refs: Demote these, whatever the rules say, and no others; even the newest one.
        passed_over: Seqs that were tried before in vain.

    Raises:
        NotFoundError: One of these is not there.
        ConflictError: One of these carries a tag.
    """
    named = {resolve(repository, ref).seq for ref in refs}
    tags: dict[int, list[str]] = {}
    for tag, record in repository.tags.all().items():
        tags.setdefault(record.seq, []).append(tag)
    headers = [
        header
        for name in repository.manifests.listing().names
        if (header := header_or_none(repository.manifests, name))
    ]
    newest = [header.seq for header in reversed(headers) if not header.is_archival]
    entries = []
    for header in reversed(headers):
        reason = _reason_to_keep(header, wanted, newest, tags.get(header.seq, []), named)
        if not reason and header.seq in passed_over:
            reason = "it was tried before"
        if header.seq in named and header.seq in tags:
            raise _tagged(repository, header.seq, header.step, tags[header.seq])
        manifest = load_whole(repository, header.name)
        stored = own_nbytes(manifest)
        action: DemoteAction = "keep" if reason else "demote"
        why = reason or (
            "it was asked for" if named else f"{newest.index(header.seq) if header.seq in newest else 0} newer"
        )
        facts = (header.seq, header.step, action, why, header.fidelity, header.bytes_state, stored, stored)
        entries.append(DemoteEntry(*facts, worst_rel_rms=max((loss.rel_rms for loss in manifest.losses), default=0.0)))
    return entries


def _reason_to_keep(
    header: ManifestHeader, wanted: DemotePolicy, newest: Sequence[int], tags: Sequence[str], named: set[int]
) -> str:
    """Return why a checkpoint stays as it is; empty: it does not."""
    if header.fidelity != EXACT_FIDELITY:
        return "it was stored with a loss already"
    if named:
        return "" if header.seq in named else "it was not asked for"
    if tags:
        return f"it carries the tag {tags[0]!r}"
    if header.is_archival:
        return "it was brought back from the trash"
    if header.seq in newest[: wanted.keep_newest]:
        return f"it is among the newest {wanted.keep_newest}"
    if wanted.keep_every and header.seq % wanted.keep_every == 0:
        return f"every {wanted.keep_every}th stays exact"
    return ""


def own_nbytes(manifest: Manifest) -> int:
    """Return the bytes of the frames that hold a checkpoint's own chunks."""
    own = {chunk.chunk_id for chunk in manifest.chunks}
    return sum(frame.frame_nbytes for frame in manifest.frames if frame.chunk_id in own)


def packs_nbytes(repository: Repository) -> int:
    """Return the bytes of all packs that the checkpoints of the run need."""
    packs: dict[bytes, int] = {}
    for name in repository.manifests.listing().names:
        try:
            manifest = load_whole(repository, name)
        except DroppedError:
            continue
        packs.update({pack.pack_id: pack.nbytes for pack in manifest.packs})
    return sum(packs.values())


def _tagged(repository: Repository, seq: int, step: int, tags: Sequence[str]) -> ConflictError:
    return ConflictError(
        f"seq {seq} (step {step}) carries the tag {tags[0]!r}, and what carries one stays exact",
        where=repository.backend.root,
        todo="`ckstore untag` it first if it is to be demoted",
        tags=list(tags),
    )


_log = logging.getLogger("ckstore")

_MEMORY_NBYTES_MIN = 56 * MIB
"""Less cannot work, and a policy refuses it."""


def demote(
    repository: Repository,
    wanted: DemotePolicy,
    policy: Policy,
    *,
    refs: Sequence[Reference] = (),
    passed_over: Collection[int] = (),
    dry_run: bool,
    on_progress: Callable[[int, int], None] | None = None,
) -> DemoteReport:
    """Choose, and unless it is a dry run, act.

    Args:
        repository: The store.
        wanted: Which checkpoints stay exact, and how the others are stored.
        policy: Threads and memory.
        refs: Demote these and no others.
        passed_over: Seqs that were tried before in vain, and are not tried again.
        dry_run: Only choose.
        on_progress: Called with checkpoints done and checkpoints to be done.

    Raises:
        ConflictError: One that was named carries a tag; or the newest one was named, or the store lies in a bucket, and
            another live process writes the run.
        CorruptError: A checkpoint of the run is damaged.
        CapacityError: The disk is full. Whatever is raised, each checkpoint is in its old or its new form.
    """
    tell = on_progress or (lambda done, total: None)
    if dry_run:
        return _dry_run(repository, wanted, policy, plan_demotion(repository, wanted, refs, passed_over), tell)
    repository.prepare_run()
    if isinstance(repository.backend, Distant) or names_newest(repository, refs):
        # A writer in a bucket may take back what was seen whole; and who makes the newest one lossy resumes from it.
        repository.lease.take()
    finish_interrupted_replacements(repository)
    entries = plan_demotion(repository, wanted, refs, passed_over)
    told = plan_warnings(repository, wanted.fidelity, entries)
    for warning in told:
        _log.warning("%s", warning)
    before = packs_nbytes(repository)
    demoter = _Demoter(repository, wanted, policy, is_named=bool(refs))
    try:
        done = demoter.run(entries, tell)
    finally:
        # Even one that fails halfway has moved what the next commit would follow.
        repository.forget_run_state()
    return DemoteReport(
        run=repository.run,
        is_dry_run=False,
        entries=tuple(done),
        packs_before=before,
        packs_after=packs_nbytes(repository),
        bytes_written=demoter.written_nbytes,
        warnings=(*told, *demoter.warnings),
        fidelity=wanted.fidelity.name,
    )


def _dry_run(
    repository: Repository,
    wanted: DemotePolicy,
    policy: Policy,
    entries: Sequence[DemoteEntry],
    tell: Callable[[int, int], None],
) -> DemoteReport:
    """Code as the act would, write it nowhere, and report what to expect."""
    packs = packs_nbytes(repository)
    nowhere = Repository(
        cast(Backend, DiscardingBackend(repository.backend)), repository.record, repository.run, clock=repository.clock
    )
    estimator = _Demoter(nowhere, wanted, policy, is_named=False)
    expected = tuple(estimator.estimate(entries, tell))
    warnings = (*plan_warnings(repository, wanted.fidelity, entries), *estimator.warnings)
    return DemoteReport(repository.run, True, expected, packs, packs, 0, warnings, wanted.fidelity.name)


def names_newest(repository: Repository, refs: Sequence[Reference]) -> bool:
    """Whether one of these is the newest checkpoint of the run."""
    if not refs:
        return False
    try:
        newest = resolve(repository, "latest").seq
    except EmptyRunError:
        return False
    return any(resolve(repository, ref).seq == newest for ref in refs)


_NEWEST = "it is the newest by now"

_ESTIMATE_NBYTES = 4 * GIB
_ESTIMATES_MIN = 2
"""A dry run codes so many checkpoints, and others until their states have so many bytes."""

_READ_AMPLIFICATION_MAX = 4.0
"""A restore of what has aged may read this many times the plain bytes of a weight: it is wanted rarely, and small."""


@dataclass(frozen=True, slots=True)
class _Drafted:
    """A checkpoint in its new form, before it is published."""

    plan: CommitPlan
    selection: BaseSelection
    stored: WriteResult


class _OutrunError(Exception):
    """Another process was first; the checkpoint is as that one left it."""


class _Demoter:
    """Demotes checkpoint by checkpoint."""

    def __init__(self, repository: Repository, wanted: DemotePolicy, policy: Policy, *, is_named: bool) -> None:
        self.written_nbytes = 0
        self.warnings: list[str] = []
        self._is_named = is_named
        self._repository = repository
        self._wanted = wanted
        # A thread reads a chunk and its bases before it codes it: what reading takes comes off the bound.
        spare = policy.memory_nbytes_max
        coding = lossy_thread_nbytes(repository.limits, is_private=False)
        per_thread = reader_nbytes(repository.limits) + coding
        threads = max(1, min(policy.thread_count, spare // per_thread))
        self._policy = replace(
            policy,
            compression=wanted.compression,
            fidelity=wanted.fidelity,
            base_cache="none",
            threads=threads,
            memory_nbytes_max=max(_MEMORY_NBYTES_MIN, spare - threads * reader_nbytes(repository.limits)),
            read_amplification_max=max(policy.read_amplification_max, _READ_AMPLIFICATION_MAX),
            verify_encoded=True,
        )

    def run(self, entries: Sequence[DemoteEntry], tell: Callable[[int, int], None]) -> list[DemoteEntry]:
        """Demote what is to be, the oldest first; return what became of each, the newest first."""
        total = sum(entry.action == "demote" for entry in entries)
        done: list[DemoteEntry] = []
        before: ManifestName | None = None
        count = 0
        for entry in reversed(entries):
            if entry.action == "demote":
                entry = self._demote(entry, before)
                count += 1
                tell(count, total)
            done.append(entry)
            before = next(
                (name for name in self._repository.manifests.listing().names if name.seq == entry.seq), before
            )
        return done[::-1]

    def estimate(self, entries: Sequence[DemoteEntry], tell: Callable[[int, int], None]) -> list[DemoteEntry]:
        """Code what would be demoted, the oldest first, and publish nothing; return what each would come to.

        After so many bytes of states the sizes and errors of those that were coded stand for the others.
        """
        total, count, hops, nbytes_coded = sum(entry.action == "demote" for entry in entries), 0, 0, 0
        done: list[DemoteEntry] = []
        coded: list[DemoteEntry] = []
        before: ManifestName | None = None
        for entry in reversed(entries):
            name = resolve(self._repository, f"seq:{entry.seq}")
            if entry.action == "demote":
                if nbytes_coded < _ESTIMATE_NBYTES or len(coded) < _ESTIMATES_MIN:
                    entry = self._estimated(entry, name, before, hops)
                    nbytes_coded += entry.bytes_state
                    coded += [entry] if entry.action == "demote" else []
                else:
                    entry = _like(entry, coded)
                count += 1
                tell(count, total)
            hops = hops + 1 if entry.action == "demote" else _hops_of(load_whole(self._repository, name))
            done.append(entry)
            before = name
        return done[::-1]

    def _estimated(self, entry: DemoteEntry, name: ManifestName, before: ManifestName | None, hops: int) -> DemoteEntry:
        if before is not None and 1 + hops >= self._wanted.fidelity.keyframe_every:
            return replace(entry, action="keep", reason=_end_of_chain(self._wanted.fidelity.keyframe_every))
        manifest = load_whole(self._repository, name)
        try:
            stored = self._stored(manifest, None if before is None else load_whole(self._repository, before)).stored
        except BoundError as error:
            return replace(entry, action="keep", reason=f"{error.what}")
        after = stored.payload_nbytes + FRAME_HEADER_NBYTES * stored.chunks_new
        if why := self._why_vain(entry, stored, after):
            return replace(entry, action="keep", reason=why)
        return replace(
            entry,
            fidelity=fidelity_of(self._wanted.fidelity, stored.losses),
            stored_after=after,
            worst_rel_rms=max(loss.rel_rms for loss in stored.losses),
        )

    def _why_vain(self, entry: DemoteEntry, stored: WriteResult, after: int) -> str:
        """Return why the new form of a checkpoint is not worth it; empty where it is."""
        if not stored.losses:
            return "nothing of it can be stored with a loss"
        return "it would not become smaller" if after > (1 - self._wanted.saving_min) * entry.stored_before else ""

    def _demote(self, entry: DemoteEntry, before: ManifestName | None) -> DemoteEntry:
        repository = self._repository
        intent = repository.tags.declare(entry.seq, "demote")
        try:
            # Read after the intent is durable: a tag set meanwhile is seen here, a later one is refused.
            tags = repository.tags.names_of(entry.seq, is_strict=True)
            if tags:
                return replace(entry, action="keep", reason=f"it carries the tag {tags[0]!r}")
            if self._is_newest(entry):
                return replace(entry, action="keep", reason=_NEWEST)
            return self._coded(entry, before, intent)
        except NotFoundError:
            # It was dropped since, and its drop stands.
            return replace(entry, action="keep", reason="it was dropped meanwhile")
        except _OutrunError as outrun:
            return replace(entry, action="keep", reason=str(outrun))
        finally:
            repository.tags.retract(intent)

    def _coded(self, entry: DemoteEntry, before: ManifestName | None, intent: str) -> DemoteEntry:
        """Store it anew; again where it or its base was replaced, and the old packs freed, while they were read."""
        repository = self._repository
        last: tuple[int, int | None] | None = None
        while True:
            manifest = load_whole(repository, resolve(repository, f"seq:{entry.seq}"))
            if manifest.losses:
                return replace(entry, action="keep", reason="another process has demoted it")
            base = None if before is None else load_whole(repository, before)
            every = self._wanted.fidelity.keyframe_every
            if base is not None and 1 + _hops_of(base) >= every:
                return replace(entry, action="keep", reason=_end_of_chain(every))
            try:
                return self._replaced(entry, manifest, base, intent)
            except MissingChunkError:
                found = (manifest.header.generation, None if base is None else base.header.generation)
                if found == last:
                    raise
                last = found

    def _is_newest(self, entry: DemoteEntry) -> bool:
        """Whether a checkpoint that nobody named has nothing newer that stays; what is being dropped does not.

        To be asked while the intent stands: a drop declares its own first and looks for this one second.
        """
        repository = self._repository
        if self._is_named:
            return False
        # What a writer has published and not synced yet could vanish in a power cut after this one was replaced.
        repository.backend.sync_folder(layout.manifests_folder(repository.run))
        for name in reversed(repository.manifests.listing().names):
            if name.seq <= entry.seq:
                break
            header = header_or_none(repository.manifests, name)
            if header is None or header.is_archival or repository.tags.intents_on(name.seq):
                continue
            if self._is_whole(name):
                return False
        return True

    def _is_whole(self, name: ManifestName) -> bool:
        """Whether every pack of a checkpoint is where it says; its writer, who looks later, withdraws nothing then."""
        try:
            manifest = load_whole(self._repository, name)
            if any(pack.tier == LOST_TIER for pack in manifest.packs):
                return False
            return not self._repository.rescue_packs(manifest.packs)
        except (BackendError, CapacityError, CorruptError, NotFoundError, UsageError) as error:
            # Whatever is wrong with it, or the tier that it lies in: it is not what makes another one old.
            _log.warning("seq %d does not count as newer: %s", name.seq, error)
            return False

    def _replaced(self, entry: DemoteEntry, manifest: Manifest, base: Manifest | None, intent: str) -> DemoteEntry:
        try:
            drafted = self._stored(manifest, base)
        except BoundError as error:
            return replace(entry, action="keep", reason=f"{error.what}", is_final=True)
        stored = drafted.stored
        after = stored.payload_nbytes + FRAME_HEADER_NBYTES * stored.chunks_new
        if why := self._why_vain(entry, stored, after):
            self._unlink(stored)
            return replace(entry, action="keep", reason=why, is_final=True)
        if self._is_newest(entry):
            # Coding took long enough for the newer ones to be dropped.
            self._unlink(stored)
            return replace(entry, action="keep", reason=_NEWEST)
        replacement = self._publish(manifest, drafted, intent)
        self.written_nbytes += stored.nbytes_written
        return replace(
            entry,
            fidelity=replacement.header.fidelity,
            stored_after=own_nbytes(replacement),
            worst_rel_rms=max(loss.rel_rms for loss in replacement.losses),
            is_done=True,
        )

    def _stored(self, manifest: Manifest, base: Manifest | None) -> _Drafted:
        """Code the state anew, and make the packs durable."""
        repository, residual = self._repository, self._wanted.fidelity
        known, bases = ChunkIndex(1), BaseCache()
        if base is not None:
            # What lies in packs of its own exact form must not be shared: it would keep all of that alive.
            known.add(base)
            bases.follow(base)
        aside = IsolatedRepository(repository, known)
        aside.nbytes_planned = own_nbytes(manifest) // 2
        with stored_state(repository, manifest) as state:
            captured = state.captured()
            # What is asked to be small loses what it can, even where its weights begin a chain.
            lossy = ResidualCommit(residual, is_first_exact=False)
            candidates = lossy.candidates(captured)
            plan = plan_commit(captured.storages, repository.limits, unshared=candidates.unshared)
            selection = select_bases(captured, plan, known, bases, self._policy, repository.limits, candidates)
            assert selection.lossy is not None
            make_writer = lossy.writer_factory(selection.lossy)
            writer = make_writer(aside, plan, state.storages, self._policy, selection.plans, bases)
            try:
                writer.run()
                stored = run_uninterrupted(writer.flush, on_interrupt=lambda error: None)
            except BaseException:
                writer.abandon()
                raise
            try:
                self._tell(manifest.header.step, captured, stored)
            except BaseException:
                self._unlink(stored)
                raise
            return _Drafted(plan, selection, stored)

    def _tell(self, step: int, captured: Captured, stored: WriteResult) -> None:
        """Keep what whoever asked for a loss should know of a checkpoint, as the receipt of a commit would say it."""
        looked_at = {loss.storage for loss in stored.losses if loss.role != "rounded"}
        diverged = diverged_warnings(captured, looked_at, stored.warnings)
        for warning in (*stored.warnings, *diverged):
            _log.warning("step %d: %s", step, warning)
            self.warnings.append(f"step {step}: {warning}")

    def _publish(self, manifest: Manifest, drafted: _Drafted, intent: str) -> Manifest:
        repository = self._repository
        try:
            if repository.lease.is_held:
                repository.lease.check()
            replacement = _replacement(manifest, drafted, self._wanted)
        except BaseException:
            self._remove_unpublished(manifest, drafted.stored)
            raise
        try:
            name = repository.manifests.publish(replacement)
        except (ConflictError, FileNotFoundError) as error:
            # The name has, or had, another one's bytes, so nothing names these packs.
            self._unlink(drafted.stored)
            raise _OutrunError("another process has replaced it meanwhile") from error
        except BaseException:
            self._remove_unpublished(manifest, drafted.stored)
            raise
        try:
            finish_replacement(repository, replacement, name, intent=intent)
        except ConflictError as error:
            _log.warning("%s", error)
            raise _OutrunError(error.what) from error
        return replacement

    def _remove_unpublished(self, manifest: Manifest, stored: WriteResult) -> None:
        """Free the packs of a replacement that did not get published; on a full disk every byte counts."""
        header = manifest.header
        name = ManifestName(header.run, header.seq, header.step, header.generation + 1)
        try:
            # Publishing may have failed after the manifest became visible: then its packs are needed.
            if self._repository.backend.stat(name.path) is None:
                self._unlink(stored)
        except (CkstoreError, OSError) as error:
            _log.warning("packs of a checkpoint that was not demoted are left for gc: %s", error)

    def _unlink(self, stored: WriteResult) -> None:
        for pack_name in stored.pack_names:
            # A collector without grace may have taken what nobody named.
            with contextlib.suppress(FileNotFoundError):
                self._repository.backend.unlink(pack_name)


def _hops_of(manifest: Manifest) -> int:
    """Return how many checkpoints with a loss a checkpoint goes back through."""
    return max((loss.hops for loss in manifest.losses), default=0)


def _end_of_chain(every: int) -> str:
    return f"one in {every} stays exact, so that chains end"


def _like(entry: DemoteEntry, coded: Sequence[DemoteEntry]) -> DemoteEntry:
    """Return what to expect of a checkpoint from those that were coded; the first has no base, and is larger."""
    share = coded[-1].stored_after / max(1, coded[-1].bytes_state)
    return replace(
        entry,
        fidelity=coded[-1].fidelity,
        stored_after=round(share * entry.bytes_state),
        worst_rel_rms=max(each.worst_rel_rms for each in coded),
    )


def _replacement(manifest: Manifest, drafted: _Drafted, wanted: DemotePolicy) -> Manifest:
    """Return the manifest of the next generation: the same entry of the run, with what it lost."""
    header, stored, plan = manifest.header, drafted.stored, drafted.plan
    packs, frames = locate(stored.frames)
    chunks = [
        ChunkSpec(ChunkId(known.frame.chunk_id), chunk.nbytes, chunk.element_width, chunk.is_float)
        for chunk, known in zip(plan.chunks, stored.frames, strict=True)
    ]
    return build_manifest(
        store_id=header.store_id,
        run=header.run,
        seq=header.seq,
        step=header.step,
        time_ns=header.time_ns,
        parent=header.parent,
        origin_id=header.checkpoint_id,
        is_archival=header.is_archival,
        fidelity=fidelity_of(wanted.fidelity, stored.losses),
        metrics=header.metrics,
        generation=header.generation + 1,
        tree=manifest.tree,
        tensors=manifest.tensors,
        storages=plan.storages,
        chunks=chunks,
        packs=packs,
        frames=frames,
        bytes_written=stored.nbytes_written,
        chunks_new=stored.chunks_new,
        decisions=drafted.selection.decisions(drafted.selection.modes(plan.storages, stored)),
        losses=stored.losses,
    )
