"""Demote checkpoints: store old exact checkpoints again with a bounded loss, oldest first.

For each: declare an intent, read the state, quantize it against the checkpoint before it, make the packs durable, and
replace the manifest by its next generation. The bytes change, so the checkpoint id changes too. The new manifest
records the id of the exact checkpoint.

``plan_demotion`` decides, and its result is plain data. ``demote`` carries it out, and a dry run prints it.

Invariants:
- Between any two steps every checkpoint can be restored, in its old or its new form.
- No rule demotes the newest checkpoint of a run. A tagged checkpoint is never demoted, not even by name.
- The keyframe of the newest point of a journal is never demoted. Points of a demoted keyframe are gone with it.
- A checkpoint that cannot be stored with a loss, or would not become smaller, stays exact.
- A demotion next to a running trainer needs no lease: it claims no seq and does not replace the newest checkpoint. A
  checkpoint counts as newer only if it is durable and complete, so that neither a power cut nor its writer takes it
  back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, cast

from ckstore.commit.base_selection import paths_of_storages, select_bases
from ckstore.commit.chunk_writer import WriteResult
from ckstore.commit.chunking import plan_commit
from ckstore.commit.unpublished import Unpublished, packs_removed_on_failure, remove_packs
from ckstore.config import GIB, DemotedForm, DemotePolicy, Policy, Residual
from ckstore.delta.base_cache import BaseCache, first_paths
from ckstore.display import repr_of_summary
from ckstore.errors import (
    BackendError,
    BoundError,
    CapacityError,
    ConflictError,
    CorruptError,
    MissingChunkError,
    NotFoundError,
    ReplayError,
    UnsupportedError,
    UsageError,
)
from ckstore.format import paths
from ckstore.format.header import ManifestHeader
from ckstore.format.logical import EXACT_FIDELITY, fidelity_of
from ckstore.format.manifest import Manifest, build_manifest
from ckstore.format.many_ranks import plain_manifest
from ckstore.format.paths import ManifestName
from ckstore.format.replay_form import in_replay_form
from ckstore.format.tree import Path, is_in_replay_form
from ckstore.io.backend import Backend, Distant
from ckstore.io.memory import DiscardingBackend
from ckstore.ops.replay_form import (
    TrainUntil,
    choose_base,
    form_of_stored,
    no_base_error,
    reproduce,
    require_function,
)
from ckstore.ops.stored_checkpoint import IsolatedRepository, is_replaced, rewrite_policy, stored_state
from ckstore.quant.warnings import diverged_warnings, named_nothing, tensor_words
from ckstore.quant.writer import ResidualCommit
from ckstore.restore.restore import RestoreRequest
from ckstore.state.capture import Captured
from ckstore.store.chunk_index import LOST_TIER, ChunkIndex, locate
from ckstore.store.journal_needs import needed_keyframes
from ckstore.store.manifests import DroppedError, EmptyRunError
from ckstore.store.memory_budget import QUANTIZE
from ckstore.store.refs import Reference, header_or_none, load_whole, resolve
from ckstore.store.replay_bases import ReplayEntries
from ckstore.store.repository import Repository, finish_interrupted_replacements, finish_replacement

_log = logging.getLogger("ckstore")

DemoteAction = Literal["demote", "keep"]


@dataclass(frozen=True, slots=True)
class DemoteEntry:
    """One checkpoint of a demotion.

    Attributes:
        seq: Its number in the run.
        step: The trainer's step.
        action: ``"demote"`` or ``"keep"``.
        reason: Why, in a sentence.
        fidelity: Its fidelity afterwards; in a dry run, the expected one.
        bytes_state: Plain bytes of its tensors.
        stored_before: Bytes of the frames of its own chunks.
        stored_after: The same afterwards; in a dry run, the expected number. Equal if nothing is done.
        worst_rel_rms: Largest relative RMS error of a tensor; in a dry run, the expected one.
        is_done: Whether it was demoted by this call.
        is_final: Whether it could not be demoted, and cannot be by the same policy.
        form: Its form afterwards: ``"whole"``, or for example ``"replay, from step 100"``.
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
    form: str = "whole"


@dataclass(frozen=True, slots=True)
class DemoteReport:
    """What a demotion planned or did, newest checkpoint first.

    Attributes:
        run: The run.
        is_dry_run: Nothing was changed.
        entries: Every checkpoint of the run.
        fidelity: Name of the requested fidelity.
        packs_before: Bytes of the packs that the run's checkpoints need.
        packs_after: The same afterwards. gc frees packs that are no longer referenced.
        bytes_written: Bytes of new packs.
        warnings: Rules of the fidelity that match no tensor of any demoted checkpoint; tensors that stayed exact, and
            why; tensors that contain NaN or infinity; checkpoints that training does not make again.
        form: The requested form, as in the policy.
    """

    run: str
    is_dry_run: bool
    entries: tuple[DemoteEntry, ...]
    packs_before: int
    packs_after: int
    bytes_written: int
    warnings: tuple[str, ...] = ()
    fidelity: str = ""
    form: DemotedForm = "lossy"

    __repr__ = repr_of_summary


def demote(
    repository: Repository,
    demote_policy: DemotePolicy,
    policy: Policy,
    *,
    refs: Sequence[Reference] = (),
    passed_over: Collection[int] = (),
    dry_run: bool,
    train_until: TrainUntil | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> DemoteReport:
    """Choose checkpoints and, unless it is a dry run, demote them.

    Args:
        repository: The store.
        demote_policy: Which checkpoints stay exact, and how the others are stored.
        policy: Threads and memory.
        refs: Demote exactly these checkpoints.
        passed_over: Seqs to skip, because they could not be demoted before.
        dry_run: Only estimate.
        train_until: The user's training code, for replay form; a dry run does not call it.
        on_progress: Called with the number of checkpoints done and the total.

    Raises:
        ConflictError: A checkpoint in ``refs`` is tagged. Or another live process writes the run, and the store is in a
            bucket or ``refs`` contains the newest checkpoint.
        CkstoreError: As for ``Store.demote``. After any error, each checkpoint is in its old or its new form.
    """
    report_progress = on_progress or (lambda done, total: None)
    if demote_policy.form == "replay":
        _check_replay(repository, refs, train_until)
    if dry_run:
        entries = plan_demotion(repository, demote_policy, refs, passed_over)
        return _dry_run(repository, demote_policy, policy, entries, report_progress)
    repository.prepare_run()
    if isinstance(repository.backend, Distant) or names_newest(repository, refs):
        # In a bucket, a writer may withdraw a checkpoint that was seen complete. And a trainer that demotes its newest
        # checkpoint resumes from the lossy state.
        repository.lease.take()
    finish_interrupted_replacements(repository)
    entries = plan_demotion(repository, demote_policy, refs, passed_over)
    rule_warnings = _rule_warnings(repository, demote_policy, entries)
    packs_before = packs_nbytes(repository)
    demoter = _demoter(repository, demote_policy, policy, is_named=bool(refs), train_until=train_until)
    try:
        done = demoter.run(entries, report_progress)
    finally:
        # Even a failed call may have replaced the checkpoint that the next commit would follow.
        repository.forget_run_state()
    return DemoteReport(
        run=repository.run,
        is_dry_run=False,
        entries=tuple(done),
        packs_before=packs_before,
        packs_after=packs_nbytes(repository),
        bytes_written=demoter.written_nbytes,
        warnings=(*rule_warnings, *demoter.warnings),
        fidelity=demote_policy.fidelity.name if demote_policy.form == "lossy" else EXACT_FIDELITY,
        form=demote_policy.form,
    )


def _rule_warnings(
    repository: Repository, demote_policy: DemotePolicy, entries: Sequence[DemoteEntry]
) -> tuple[str, ...]:
    """Return and log a warning for each rule of a lossy demotion that matches no tensor."""
    if demote_policy.form != "lossy":
        return ()
    warnings = plan_warnings(repository, demote_policy.fidelity, entries)
    for warning in warnings:
        _log.warning("%s", warning)
    return warnings


def _check_replay(repository: Repository, refs: Sequence[Reference], train_until: object) -> None:
    require_function(train_until)
    if names_newest(repository, refs):
        raise ConflictError(
            "the newest checkpoint is stored whole, so that training can resume from it without training code",
            where=repository.backend.root,
            todo="demote older checkpoints",
        )


def _dry_run(
    repository: Repository,
    demote_policy: DemotePolicy,
    policy: Policy,
    entries: Sequence[DemoteEntry],
    report_progress: Callable[[int, int], None],
) -> DemoteReport:
    """Code checkpoints as ``demote`` would, without writing, and report the expected result."""
    packs = packs_nbytes(repository)
    if demote_policy.form == "replay":
        planned = tuple(_planned_replays(repository, entries))
        return DemoteReport(repository.run, True, planned, packs, packs, 0, (), EXACT_FIDELITY, "replay")
    nowhere = Repository(
        cast(Backend, DiscardingBackend(repository.backend)), repository.record, repository.run, clock=repository.clock
    )
    estimator = _Demoter(nowhere, demote_policy, policy, is_named=False)
    expected = tuple(estimator.estimate(entries, report_progress))
    warnings = (*plan_warnings(repository, demote_policy.fidelity, entries), *estimator.warnings)
    return DemoteReport(repository.run, True, expected, packs, packs, 0, warnings, demote_policy.fidelity.name)


def names_newest(repository: Repository, refs: Sequence[Reference]) -> bool:
    """Return whether ``refs`` contains the newest checkpoint of the run."""
    if not refs:
        return False
    try:
        newest = resolve(repository, "latest").seq
    except EmptyRunError:
        return False
    return any(resolve(repository, ref).seq == newest for ref in refs)


def plan_demotion(
    repository: Repository,
    demote_policy: DemotePolicy,
    refs: Sequence[Reference] = (),
    passed_over: Collection[int] = (),
) -> list[DemoteEntry]:
    """Choose the checkpoints to demote. The result lists every checkpoint, newest first.

    Args:
        repository: The store.
        demote_policy: Which checkpoints stay exact.
        refs: Demote exactly these, whatever the rules say, even the newest one.
        passed_over: Seqs to skip, because they could not be demoted before.

    Raises:
        NotFoundError: One of ``refs`` does not exist.
        ConflictError: One of ``refs`` is tagged, or is the keyframe of the newest point of the journal.
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
    needed = _needed(repository)
    entries = []
    for header in reversed(headers):
        reason = _reason_to_keep(header, demote_policy, newest, tags.get(header.seq, []), named)
        if not reason and header.seq in needed:
            reason = needed[header.seq]
        if header.seq in named & needed.keys():
            raise ConflictError(
                f"seq {header.seq} (step {header.step}) stays exact: {needed[header.seq]}",
                where=repository.backend.root,
                todo="commit a newer checkpoint with `commit`, or delete what needs this one, first",
            )
        if not reason and header.seq in passed_over:
            reason = "it could not be demoted before"
        if header.seq in named and header.seq in tags:
            raise _tagged(repository, header.seq, header.step, tags[header.seq])
        manifest = load_whole(repository, header.name)
        stored = own_nbytes(manifest)
        action: DemoteAction = "keep" if reason else "demote"
        newer_count = newest.index(header.seq) if header.seq in newest else 0
        newer = f"{newer_count} newer checkpoint{'' if newer_count == 1 else 's'}"
        reason = reason or ("it was named" if named else newer)
        facts = (header.seq, header.step, action, reason, header.fidelity, header.bytes_state, stored, stored)
        entries.append(DemoteEntry(*facts, worst_rel_rms=max((loss.rel_rms for loss in manifest.losses), default=0.0)))
    return entries


def _needed(repository: Repository) -> dict[int, str]:
    """Return the seqs of checkpoints that must stay exact, and why. Call it after an intent, before publishing."""
    return {**ReplayEntries(repository).needed(), **needed_keyframes(repository)}


def _planned_replays(repository: Repository, entries: Sequence[DemoteEntry]) -> list[DemoteEntry]:
    """Return what a demotion to replay form would do if training made every checkpoint again, newest first."""
    leaving: set[int] = set()
    bases: set[int] = set()
    planned: list[DemoteEntry] = []
    for entry in reversed(entries):
        if entry.action == "demote":
            base = choose_base(repository, load_whole(repository, resolve(repository, f"seq:{entry.seq}")), leaving)
            if base is None:
                entry = replace(entry, action="keep", reason=_NO_BASE)
            else:
                leaving.add(entry.seq)
                bases.add(base.header.seq)
                entry = replace(entry, form=_form_from(base), stored_after=0)
        planned.append(entry)
    assert not leaving & bases, "a base stays whole"
    return planned[::-1]


def _form_from(base: Manifest) -> str:
    return f"replay, from step {base.header.step}"


def _reason_to_keep(
    header: ManifestHeader, demote_policy: DemotePolicy, newest: Sequence[int], tags: Sequence[str], named: set[int]
) -> str:
    """Return why a checkpoint is not demoted; empty if it is."""
    if header.fidelity != EXACT_FIDELITY:
        return "it is already stored with a loss"
    if header.may_be_in_replay_form:
        return "it is already in replay form"
    if named:
        return "" if header.seq in named else "it was not named"
    if tags:
        return f"the tag {tags[0]!r} keeps it"
    if header.is_archival:
        return "it was restored from the trash"
    if header.seq in newest[: demote_policy.keep_newest]:
        return f"it is one of the newest {demote_policy.keep_newest}"
    if demote_policy.keep_every and header.seq % demote_policy.keep_every == 0:
        return f"every checkpoint with a seq divisible by {demote_policy.keep_every} stays exact"
    return ""


def _tagged(repository: Repository, seq: int, step: int, tags: Sequence[str]) -> ConflictError:
    return ConflictError(
        f"seq {seq} (step {step}) is kept by the tag {tags[0]!r}, and stays exact",
        where=repository.backend.root,
        todo="remove the tag with `ckstore untag` first, if it should be demoted",
        tags=list(tags),
    )


def plan_warnings(repository: Repository, residual: Residual, entries: Sequence[DemoteEntry]) -> tuple[str, ...]:
    """Return a warning for each rule that matches no tensor of any checkpoint to demote."""
    words: dict[str, None] = {}
    for entry in entries if residual.rules else ():
        if entry.action == "demote":
            # A checkpoint that was deleted meanwhile has no tensors to match.
            with contextlib.suppress(NotFoundError):
                tree = load_whole(repository, resolve(repository, f"seq:{entry.seq}")).tree
                words |= dict.fromkeys(tensor_words(tree))
    return tuple(named_nothing(residual, list(words))) if words else ()


def own_nbytes(manifest: Manifest) -> int:
    """Return the bytes of the frames of a checkpoint's own chunks, without their bases."""
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


_NEWEST = "it is now the newest checkpoint"
_NO_BASE = "no exact, whole checkpoint of a lower step precedes it"

_ESTIMATE_NBYTES = 4 * GIB

_ESTIMATES_MIN = 2
"""A dry run codes checkpoints until both this many, and ``_ESTIMATE_NBYTES`` of state, are coded."""

_READ_AMPLIFICATION_MAX = 4.0
"""Restoring an old checkpoint may read this multiple of a weight's plain bytes: it is rarely restored."""


class _OutrunError(Exception):
    """Another process replaced the checkpoint first."""


class _Demoter:
    """Demote one checkpoint after the other."""

    def __init__(self, repository: Repository, demote_policy: DemotePolicy, policy: Policy, *, is_named: bool) -> None:
        self.written_nbytes = 0
        self.warnings: list[str] = []
        self._is_named = is_named
        self._repository = repository
        self._demote_policy = demote_policy
        self._policy = rewrite_policy(
            policy,
            repository.limits,
            QUANTIZE,
            compression=demote_policy.compression,
            fidelity=demote_policy.fidelity,
            base_cache="none",
            read_amplification_max=max(policy.read_amplification_max, _READ_AMPLIFICATION_MAX),
        )

    def run(self, entries: Sequence[DemoteEntry], report_progress: Callable[[int, int], None]) -> list[DemoteEntry]:
        """Demote the chosen checkpoints, oldest first. Return the result for every entry, newest first."""
        total = sum(entry.action == "demote" for entry in entries)
        done: list[DemoteEntry] = []
        previous: ManifestName | None = None
        count = 0
        for entry in reversed(entries):
            if entry.action == "demote":
                entry = self._demote(entry, previous)
                count += 1
                report_progress(count, total)
            done.append(entry)
            previous = next(
                (name for name in self._repository.manifests.listing().names if name.seq == entry.seq), previous
            )
        return done[::-1]

    def estimate(
        self, entries: Sequence[DemoteEntry], report_progress: Callable[[int, int], None]
    ) -> list[DemoteEntry]:
        """Code the chosen checkpoints, oldest first, without publishing. Return the estimates.

        After ``_ESTIMATE_NBYTES`` of state, the other checkpoints are estimated from those that were coded.
        """
        total, count, hops, nbytes_coded = sum(entry.action == "demote" for entry in entries), 0, 0, 0
        done: list[DemoteEntry] = []
        coded: list[DemoteEntry] = []
        previous: ManifestName | None = None
        for entry in reversed(entries):
            name = resolve(self._repository, f"seq:{entry.seq}")
            if entry.action == "demote":
                if nbytes_coded < _ESTIMATE_NBYTES or len(coded) < _ESTIMATES_MIN:
                    entry = self._estimated(entry, name, previous, hops)
                    nbytes_coded += entry.bytes_state
                    coded += [entry] if entry.action == "demote" else []
                else:
                    entry = _estimate_from(entry, coded)
                count += 1
                report_progress(count, total)
            hops = hops + 1 if entry.action == "demote" else _hops_of(load_whole(self._repository, name))
            done.append(entry)
            previous = name
        return done[::-1]

    def _estimated(
        self, entry: DemoteEntry, name: ManifestName, previous: ManifestName | None, hops: int
    ) -> DemoteEntry:
        if previous is not None and 1 + hops >= self._demote_policy.fidelity.keyframe_every:
            return replace(entry, action="keep", reason=_end_of_chain(self._demote_policy.fidelity.keyframe_every))
        manifest = load_whole(self._repository, name)
        try:
            stored = self._code(manifest, None if previous is None else load_whole(self._repository, previous)).stored
        except BoundError as error:
            return replace(entry, action="keep", reason=f"{error.what}")
        if reason := self._reason_to_discard(entry, stored):
            return replace(entry, action="keep", reason=reason)
        return replace(
            entry,
            fidelity=fidelity_of(self._demote_policy.fidelity, stored.losses),
            stored_after=stored.frames_nbytes,
            worst_rel_rms=max(loss.rel_rms for loss in stored.losses),
        )

    def _reason_to_discard(self, entry: DemoteEntry, stored: WriteResult) -> str:
        """Return why a demotion is not worth publishing; empty if it is."""
        if not stored.losses:
            return "none of its tensors can be stored with a loss"
        nbytes_max = (1 - self._demote_policy.saving_min) * entry.stored_before
        return "it would not become smaller" if stored.frames_nbytes > nbytes_max else ""

    def _demote(self, entry: DemoteEntry, previous: ManifestName | None) -> DemoteEntry:
        repository = self._repository
        intent = repository.tags.declare(entry.seq, "demote")
        try:
            # Read tags after the intent is durable: an earlier tag is seen here, and a later one is refused.
            tags = repository.tags.that_keep(entry.seq, is_strict=True)
            if tags:
                return replace(entry, action="keep", reason=f"the tag {tags[0]!r} keeps it")
            if reason := self._reason_to_stay(entry):
                return replace(entry, action="keep", reason=reason)
            return self._code_and_replace(entry, previous, intent)
        except NotFoundError:
            # It was deleted meanwhile, and stays deleted.
            return replace(entry, action="keep", reason="it was deleted meanwhile")
        except _OutrunError as outrun:
            return replace(entry, action="keep", reason=str(outrun))
        finally:
            repository.tags.retract(intent)

    def _code_and_replace(self, entry: DemoteEntry, previous: ManifestName | None, intent: str) -> DemoteEntry:
        """Code and replace a checkpoint. Try again if the packs that it reads were replaced and freed meanwhile."""
        repository = self._repository
        last: tuple[int, int | None] | None = None
        while True:
            manifest = load_whole(repository, resolve(repository, f"seq:{entry.seq}"))
            if manifest.losses:
                return replace(entry, action="keep", reason="another process has already demoted it")
            base = None if previous is None else load_whole(repository, previous)
            every = self._demote_policy.fidelity.keyframe_every
            if base is not None and 1 + _hops_of(base) >= every:
                return replace(entry, action="keep", reason=_end_of_chain(every))
            try:
                return self._replace(entry, manifest, base, intent)
            except MissingChunkError:
                found = (manifest.header.generation, None if base is None else base.header.generation)
                if found == last:
                    raise
                last = found

    def _reason_to_stay(self, entry: DemoteEntry) -> str:
        """Return why a checkpoint must stay exact now, whatever it was when it was chosen; empty if it need not.

        Call this while the intent exists.
        """
        return _needed(self._repository).get(entry.seq, "") or (_NEWEST if self._is_newest(entry) else "")

    def _is_newest(self, entry: DemoteEntry) -> bool:
        """Return whether a checkpoint chosen by rule is the newest one that stays; those with an intent do not count.

        Call this while the intent exists: a drop first declares its own intent, and then looks for this one.
        """
        repository = self._repository
        if self._is_named:
            return False
        # A newer manifest that was published but not synced could vanish in a power cut.
        repository.backend.sync_folder(paths.manifests_folder(repository.run))
        for name in reversed(repository.manifests.listing().names):
            if name.seq <= entry.seq:
                break
            header = header_or_none(repository.manifests, name)
            if header is None or header.is_archival or header.may_be_in_replay_form:
                continue
            if repository.tags.intents_on(name.seq):
                continue
            if self._is_whole(name):
                return False
        return True

    def _is_whole(self, name: ManifestName) -> bool:
        """Return whether every pack of a checkpoint is in place, so that its writer, which checks later, keeps it."""
        try:
            manifest = load_whole(self._repository, name)
            if any(pack.tier == LOST_TIER for pack in manifest.packs):
                return False
            return not self._repository.rescue_packs(manifest.packs)
        except (BackendError, CapacityError, CorruptError, NotFoundError, UsageError) as error:
            # Whatever is wrong with it or its tier, it does not count as newer.
            _log.warning("seq %d is incomplete or unreadable, so it does not count as newer: %s", name.seq, error)
            return False

    def _replace(self, entry: DemoteEntry, manifest: Manifest, base: Manifest | None, intent: str) -> DemoteEntry:
        try:
            new_form = self._code(manifest, base)
        except BoundError as error:
            return replace(entry, action="keep", reason=f"{error.what}", is_final=True)
        stored = new_form.stored
        if reason := self._reason_to_discard(entry, stored):
            remove_packs(self._repository, stored.pack_names)
            return replace(entry, action="keep", reason=reason, is_final=True)
        if reason := self._reason_to_stay(entry):
            # The newer checkpoints may have been deleted while this one was coded.
            remove_packs(self._repository, stored.pack_names)
            return replace(entry, action="keep", reason=reason)
        replacement = _replacement(manifest, new_form, self._demote_policy)
        self._publish(manifest, replacement, stored.pack_names, intent)
        self.written_nbytes += stored.nbytes_written
        return replace(
            entry,
            fidelity=replacement.header.fidelity,
            stored_after=own_nbytes(replacement),
            worst_rel_rms=max(loss.rel_rms for loss in replacement.losses),
            is_done=True,
        )

    def _code(self, manifest: Manifest, base: Manifest | None) -> Unpublished:
        """Quantize the state, and make the packs durable."""
        repository, residual = self._repository, self._demote_policy.fidelity
        chunk_index, bases = ChunkIndex(1), BaseCache()
        if base is not None:
            # Share frames with the base only. A shared frame of the exact form would keep its whole pack alive.
            chunk_index.add(base)
            bases.follow(base)
        isolated = IsolatedRepository(repository, chunk_index)
        isolated.nbytes_planned = own_nbytes(manifest) // 2
        with stored_state(repository, manifest) as state:
            captured = state.captured()
            # Weights may lose precision even where they begin a chain.
            lossy = ResidualCommit(residual, is_first_exact=False)
            candidates = lossy.candidates(captured)
            edges = _edges_of(captured, manifest if base is None else base)
            plan = plan_commit(captured.storages, repository.limits, unshared=candidates.unshared, edges=edges)
            selection = select_bases(captured, plan, chunk_index, bases, self._policy, repository.limits, candidates)
            assert selection.lossy is not None
            make_writer = lossy.writer_factory(selection.lossy)
            writer = make_writer(isolated, plan, state.storages, self._policy, selection.plans, bases)
            stored = writer.write()
            try:
                self._record_warnings(manifest.header.step, captured, stored)
            except BaseException:
                remove_packs(self._repository, stored.pack_names)
                raise
            return Unpublished(plan, selection, stored)

    def _record_warnings(self, step: int, captured: Captured, stored: WriteResult) -> None:
        """Record and log warnings about a checkpoint, as the receipt of a commit would."""
        lossy_storages = {loss.storage for loss in stored.losses if loss.role != "rounded"}
        diverged = diverged_warnings(captured, lossy_storages, stored.warnings)
        for warning in (*stored.warnings, *diverged):
            _log.warning("step %d: %s", step, warning)
            self.warnings.append(f"step {step}: {warning}")

    def _publish(self, manifest: Manifest, replacement: Manifest, pack_names: Collection[str], intent: str) -> Manifest:
        repository = self._repository
        with packs_removed_on_failure(repository, pack_names, lambda: is_replaced(repository, manifest)):
            if repository.lease.is_held:
                repository.lease.check()
            try:
                name = repository.manifests.publish(replacement)
            except (ConflictError, FileNotFoundError) as error:
                # The manifest name has, or had, other bytes, so no manifest names these packs.
                remove_packs(repository, pack_names)
                raise _OutrunError("another process has replaced it meanwhile") from error
        try:
            finish_replacement(repository, replacement, name, intent=intent)
        except ConflictError as error:
            _log.warning("%s", error)
            raise _OutrunError(error.what) from error
        return replacement


class _ReplayDemoter(_Demoter):
    """Puts checkpoints into replay form, each after training has made it again.

    Args:
        repository: The store and its run.
        demote_policy: Which checkpoints are kept as they are.
        policy: Threads and memory.
        is_strict: Raise if training does not make a checkpoint again, instead of keeping it.
        train_until: The user's training code.
    """

    def __init__(
        self,
        repository: Repository,
        demote_policy: DemotePolicy,
        policy: Policy,
        *,
        is_strict: bool,
        train_until: TrainUntil,
    ) -> None:
        # Not even by name is the newest checkpoint put into this form.
        super().__init__(repository, demote_policy, policy, is_named=False)
        self._is_strict = is_strict
        self._train_until = train_until

    def _code_and_replace(self, entry: DemoteEntry, previous: ManifestName | None, intent: str) -> DemoteEntry:
        repository = self._repository
        manifest = load_whole(repository, resolve(repository, f"seq:{entry.seq}"))
        if manifest.losses or is_in_replay_form(manifest.tree):
            return replace(entry, action="keep", reason="another process has already demoted it")
        base = choose_base(repository, manifest)
        if base is None and self._is_strict:
            raise no_base_error(repository, manifest)
        if base is None:
            return replace(entry, action="keep", reason=_NO_BASE)
        request = RestoreRequest(into=None, only=None, device=None, exact=True, on_progress=None)
        try:
            form = form_of_stored(repository, self._policy, manifest, base)
            reproduce(repository, self._policy, (manifest, form), request, self._train_until)
        except (ReplayError, UnsupportedError) as error:
            if self._is_strict:
                raise
            self.warnings.append(f"step {entry.step}: {error.what}")
            _log.warning("step %d: %s", entry.step, error)
            return replace(entry, action="keep", reason=error.what, is_final=True)
        if reason := self._reason_to_stay(entry):
            # The newer checkpoints may have been deleted during training.
            return replace(entry, action="keep", reason=reason)
        self._publish(manifest, in_replay_form(manifest, form), (), intent)
        return replace(entry, form=_form_from(base), stored_after=0, is_done=True)


def _demoter(
    repository: Repository,
    demote_policy: DemotePolicy,
    policy: Policy,
    *,
    is_named: bool,
    train_until: TrainUntil | None,
) -> _Demoter:
    if train_until is None or demote_policy.form == "lossy":
        return _Demoter(repository, demote_policy, policy, is_named=is_named)
    return _ReplayDemoter(repository, demote_policy, policy, is_strict=is_named, train_until=train_until)


def _hops_of(manifest: Manifest) -> int:
    """Return how many lossy checkpoints lie between a checkpoint and an exact one, itself included."""
    return max((loss.hops for loss in manifest.losses), default=0)


def _end_of_chain(every: int) -> str:
    return f"one in {every} stays exact, to limit the length of chains"


def _estimate_from(entry: DemoteEntry, coded: Sequence[DemoteEntry]) -> DemoteEntry:
    """Estimate a checkpoint from those that were coded. The last is used: the first has no base and is larger."""
    share = coded[-1].stored_after / max(1, coded[-1].bytes_state)
    return replace(
        entry,
        fidelity=coded[-1].fidelity,
        stored_after=round(share * entry.bytes_state),
        worst_rel_rms=max(each.worst_rel_rms for each in coded),
    )


def _edges_of(captured: Captured, base: Manifest) -> dict[int, list[int]]:
    """Return for each storage of a state where the chunks of its base begin: many ranks cut it at their shards."""
    path_of = first_paths(plain_manifest(base).tree, [tensor.storage for tensor in base.tensors])
    found: dict[Path, list[int]] = {}
    for index, path in path_of.items():
        pieces = base.storages[index].pieces
        begins = accumulate((piece.nbytes for piece in pieces), initial=0)
        found[path] = [begin for begin, piece in zip(begins, pieces, strict=False) if piece.offset == 0]
    return {index: found[path] for index, path in paths_of_storages(captured).items() if path in found}


def _replacement(manifest: Manifest, new_form: Unpublished, demote_policy: DemotePolicy) -> Manifest:
    """Return the manifest of the next generation: the same entry of the run, with its losses."""
    header, plan, selection, stored = manifest.header, new_form.plan, new_form.selection, new_form.stored
    packs, frames = locate(stored.frames)
    return build_manifest(
        store_id=header.store_id,
        run=header.run,
        seq=header.seq,
        step=header.step,
        time_ns=header.time_ns,
        parent=header.parent,
        origin_id=header.checkpoint_id,
        is_archival=header.is_archival,
        fidelity=fidelity_of(demote_policy.fidelity, stored.losses),
        metrics=header.metrics,
        generation=header.generation + 1,
        tree=manifest.tree,
        tensors=manifest.tensors,
        storages=plan.storages,
        chunks=new_form.chunk_specs(),
        packs=packs,
        frames=frames,
        bytes_written=stored.nbytes_written,
        chunks_new=stored.chunks_new,
        decisions=selection.decisions(selection.modes(plan.chunks_of, stored)),
        losses=stored.losses,
    )
