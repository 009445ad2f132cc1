"""The store a user holds: each verb is handed to its story."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.config import (
    DemotePolicy,
    EngineName,
    Limits,
    Policy,
    RepackPolicy,
    check_metrics,
    check_name,
    check_policy,
    check_step,
    check_tags,
)
from ckstore.errors import BackendError, CkstoreError, CorruptError, MissingChunkError, NotFoundError, UsageError
from ckstore.io.backend import Backend
from ckstore.io.url import backend_for
from ckstore.results import Info, require_exact
from ckstore.state.tensors import LeafAdapter
from ckstore.store import history
from ckstore.store.refs import Reference, load_whole, newest_whole, resolve
from ckstore.store.repository import Repository
from ckstore.store.reserve import with_reserve
from ckstore.store.store_config import create_store, read_store_record
from ckstore.verbs.background import loaded_adapters
from ckstore.verbs.demoting import Demoting, demotion_asked
from ckstore.verbs.importing import Importing
from ckstore.verbs.maintenance import Keeping, rules_given, trash_seconds_given
from ckstore.verbs.repairing import Repairing, opened_copies
from ckstore.verbs.reporting import Reporting
from ckstore.verbs.tiers import Tiering

if TYPE_CHECKING:
    from ckstore.format.manifest import Manifest
    from ckstore.ops.gc.policy import Retention
    from ckstore.ops.repack import RepackReport
    from ckstore.ops.repair import RepairReport
    from ckstore.results import Receipt
    from ckstore.state.capture import Captured


_log = logging.getLogger("ckstore")


def open(
    path: str | os.PathLike[str] | Backend,
    *,
    run: str = "main",
    create: bool = True,
    policy: Policy | None = None,
    retention: Retention | Mapping[str, Any] | None = None,
    gc_every: int = 10,
    trash_for: str | float | None = None,
    demotion: DemotePolicy | Mapping[str, Any] | Literal["stored"] | None = None,
    demote_every: int = 10,
    engine: EngineName = "auto",
    allow_shared_folder: bool = False,
    shared: Literal["group", "umask"] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Store:
    """Open a store, and make it on first use.

    Args:
        path: A folder, a ``file://`` URL, or a backend.
        run: The run to work in; letters, digits, ``.``, ``_`` and ``-``.
        create: Make the store if there is none; False: never.
        policy: How commits are stored unless a commit says otherwise.
        retention: Drop what these rules do not keep, and free space, after every so many commits: in a process of its
            own, so that no commit waits. A ``Retention``, or a mapping of its rules.
        gc_every: After how many commits of the run, whatever the number of handles that made them.
        trash_for: How long what these collections, and ``gc`` of this handle, drop can be brought back before its space
            is freed: ``"2h"``, ``"7d"``, or seconds; 0: it is freed immediately. None: as is stored with the store, and
            without that a day. A commit that finds the disk full frees the trash earlier.
        demotion: Store anew, with a loss, the checkpoints that these rules do not keep exact, after every so many
            commits: in a process of its own, too. A ``DemotePolicy``, a mapping of its rules, or ``"stored"``: as the
            store says at that time. Space is freed when the store is collected.
        demote_every: After how many commits of the run.
        engine: What moves packs: ``"auto"`` takes io_uring where it works, else pwrite.
        allow_shared_folder: Accept a folder that others may write.
        shared: Who may use a store that is made now: ``"group"``, ``"umask"``, or None, its owner only.
        clock: Where time comes from.

    Raises:
        NotFoundError: There is no store and ``create`` is False.
        UsageError: The folder holds something else, or others may write it; or a rule, or ``trash_for``, is no such.
        UnsupportedError: A newer ckstore made it, or the file system lacks what durability needs.
    """
    check_policy(policy)
    rules, aging = rules_given(retention), demotion_asked(demotion)
    seconds = trash_seconds_given(trash_for)
    backend = backend_for(path, engine=engine, allow_shared_folder=allow_shared_folder, sharing=shared)
    try:
        record = read_store_record(backend)
    except NotFoundError:
        if not create:
            raise
        record = create_store(backend, clock, Limits())
    store = Store(Repository(backend, record, run, clock=clock), policy or Policy())
    store._trash_seconds = seconds
    if rules is not None:
        store._collect_after(rules, gc_every)
    if aging is not None:
        store._demote_after(aging, demote_every)
    return store


def repair_store(
    path: str | os.PathLike[str] | Backend,
    *,
    dry_run: bool = True,
    sources: Sequence[str | os.PathLike[str] | Backend] = (),
    allow_shared_folder: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> RepairReport:
    """Mend a store as ``Store.repair`` does, also one that cannot be opened because ``store.json`` is gone.

    That file is then made again: manifests and packs carry the store's id. What stood in ``config.json`` alone, such as
    the addresses of tiers, is not.

    Args:
        path: A folder, a URL, or a backend.
        dry_run: Only say what would be done.
        sources: Copies of this store: folders, URLs or backends.
        allow_shared_folder: Accept a folder that others may write.
        on_progress: Called with packs looked at and packs in all.

    Raises:
        NotFoundError: There is no store, and nothing is left of one.
        ConflictError: Files of several stores lie there, or another live process writes a run that has to be mended.
        CapacityError: The disk is full; each checkpoint is as it was, or mended.
        UsageError: A source is another store.
    """
    from ckstore.ops.repair import record_or_remade, write_store_record

    backend = backend_for(path, allow_shared_folder=allow_shared_folder)
    with opened_copies(sources, None) as copies:
        record, is_made = record_or_remade(backend, SYSTEM_CLOCK, copies)
    if is_made and not dry_run:
        write_store_record(backend, record)
    with Store(Repository(backend, record, "main"), Policy()) as store:
        report = store.repair(dry_run=dry_run, sources=sources, on_progress=on_progress)
    return dataclasses.replace(report, is_identity_made=is_made)


@dataclasses.dataclass(frozen=True, slots=True)
class _Wanted:
    """What a restore was asked for."""

    into: Any
    only: str | Sequence[str] | None
    device: Any
    exact: bool
    on_progress: Callable[[int, int], None] | None


class Store(Demoting, Importing, Repairing, Keeping, Tiering, Reporting):
    """A run of a store, to commit to and restore from; made by ``ckstore.open``.

    A handle may be used from several threads, one verb at a time. It is not for a forked child: open the
    store again there.
    """

    # Writing

    def commit(
        self,
        state: Any,
        step: SupportsIndex,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        policy: Policy | None = None,
    ) -> Receipt:
        """Store a state; when this returns, it survives a SIGKILL and a power cut.

        Args:
            state: Nested dicts, lists and tuples whose leaves are tensors, arrays and plain values, or
                objects with ``state_dict``. It must not be changed before this returns.
            step: The trainer's step, not negative. An earlier entry of the step stays in the history.
            metrics: Numbers to find this checkpoint by, as in ``best:loss``.
            tags: Names for it.
            policy: How to store it; the store's policy otherwise.

        Raises:
            LeafTypeError: A leaf cannot be stored; the message names its path.
            ConflictError: Another live process writes this run.
            CapacityError: The disk is full; earlier checkpoints are intact.
            BackendError: The medium failed.
            CkstoreError: An earlier commit failed in the background, unasked for: this call did nothing; repeat it.
        """
        from ckstore.ops.commit import CommitRequest, commit_checkpoint
        from ckstore.results import Stopwatch

        number = check_step(step)
        checked_metrics, checked_tags = check_metrics(metrics), check_tags(tags)
        check_policy(policy)
        with self._lock:
            self._check_open()
            self._reclaim_lease()
            self._repository.wait_for_orphan()
            watch = Stopwatch(self._repository.clock)
            with watch("stage"):
                captured = _captured(state)
            request = CommitRequest(
                captured=captured,
                step=number,
                policy=policy or self._policy,
                parent=self._parent,
                metrics=checked_metrics,
                bases=self._known_bases(),
                fingerprint=self._fingerprint,
            )
            with self._costs.trying():
                committed = commit_checkpoint(self._repository, request, watch)
            receipt = committed.receipt
            self._parent, self._fingerprint = receipt.seq, committed.fingerprint
            untagged = [warning for name in checked_tags if (warning := self._tag_or_warning(name, receipt.seq))]
            receipt = dataclasses.replace(receipt, warnings=(*receipt.warnings, *untagged))
            self._update_parent()
            self._committed(receipt.seq)
            self._costs.note(number, receipt.seconds["total"], receipt)
        for warning in receipt.warnings:
            _log.warning("step %d: %s", receipt.step, warning)
        return receipt

    def _tag_or_warning(self, name: str, seq: int) -> str:
        try:
            history.tag(self._repository, name, f"seq:{seq}")
        except CkstoreError as error:
            # The checkpoint is durable: an error here would make the caller commit it again.
            return f"the checkpoint is durable, but tag {name!r} was not set: {error}"
        return ""

    def tag(self, ref: Reference, name: str) -> None:
        """Give a checkpoint a name; a name that exists moves to it."""
        check_name(name, "tag")
        with self._lock:
            self._check_open()
            self._settle()
            self._repository.make_folders()
            history.tag(self._repository, name, ref)

    def untag(self, name: str) -> None:
        """Remove a name; NotFoundError when there is none."""
        with self._lock:
            self._check_open()
            self._repository.make_folders()
            self._repository.tags.remove(name)

    def rewind(self, ref: Reference) -> Info:
        """Publish an entry again as the newest, so that a crash before the next commit resumes from it.

        Raises:
            NotFoundError: There is no such checkpoint.
            ConflictError: Another live process writes this run.
            CkstoreError: An earlier commit failed in the background, as for ``commit``: repeat this call.
        """
        with self._lock:
            self._check_open()
            self._reclaim_lease()
            manifest = history.rewind(self._repository, ref)
            self._repository.chunk_index.pin(manifest)
            self._known_bases().follow(manifest)
            self._parent = manifest.header.seq
            self._update_parent()
            return self._info(manifest.header)

    def delete(self, ref: Reference) -> history.Deleted:
        """Drop a checkpoint: every entry of a step, or with ``"seq:N"`` one.

        Raises:
            NotFoundError: There is no such checkpoint.
            ConflictError: It carries a tag.
        """
        with self._lock:
            self._check_open()
            self._settle()

            def drop() -> history.Deleted:
                self._repository.make_folders()
                return history.delete(self._repository, ref)

            return with_reserve(self._repository.backend, drop)

    def repack(
        self,
        policy: RepackPolicy | None = None,
        *,
        dry_run: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> RepackReport:
        """Store the checkpoints of the run anew: the newest for fast restores, older ones in fewer bytes.

        What they hold, and their ids, stay. Readers are not disturbed. The disk space of what is stored no more is
        freed by ``gc``.

        Args:
            policy: What they shall become; one keyframe, otherwise, and differences behind it.
            dry_run: Only say what would be done.
            on_progress: Called with checkpoints done and checkpoints in all, first for the plan, then for the act.

        Raises:
            ConflictError: Another live process writes this run.
            CorruptError: A checkpoint of the run is damaged.
            CapacityError: The disk is full; every checkpoint is in its old or its new form.
        """
        from ckstore.ops.repack import repack

        with self._lock:
            self._check_open()
            self._settle()
            if not dry_run:
                self._reclaim_lease()
                # What the next commit is coded against is looked up again.
                self._bases = None
            return repack(
                self._repository, policy or RepackPolicy(), self._policy, dry_run=dry_run, on_progress=on_progress
            )

    # Reading

    def restore(
        self,
        ref: Reference | None = None,
        *,
        into: Any = None,
        only: str | Sequence[str] | None = None,
        device: Any = None,
        exact: bool = False,
        fallback: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """Return a state as it was committed, bit for bit unless its fidelity says otherwise, or raise.

        Args:
            ref: Which checkpoint; None: the newest whose manifest is whole and whose packs are there. Newer ones are
                passed over with a warning. Damage inside of a pack shows when it is read, and raises.
            into: A state to fill in place: its tensors are overwritten where they are, leaves that it lacks are made.
                Each object in it has its ``load_state_dict`` called once with what was restored, and is not asked for
                its state. Tensors of torch's modules and optimizers are overwritten before that, which saves a second
                copy, if their loading does nothing but copy.
            only: Globs over dotted leaf paths, where ``*`` crosses dots; a path of the checkpoint, letter for
                letter, means just that. Only their bytes are read, also of a tensor that is a view of a long
                one. What comes back is nested dicts; lists and long plain values come whole.
            device: Where tensors go; the CPU otherwise.
            exact: Refuse a checkpoint that was stored with a loss.
            fallback: Where damage is met while the newest is read, go back to the newest one that can be read, with a
                warning; ``restored`` says which that is. Only without a ``ref``, or with ``"latest"``.
            on_progress: Called now and then, from any thread, with bytes restored and bytes in all.

        Raises:
            NotFoundError: There is no such checkpoint, or nothing matches ``only``.
            CorruptError: Stored bytes are damaged; names pack, offset and tensor, `ckstore repair`, and the newest
                checkpoint that reads whole (``whole_step``, ``whole_seq``), which is looked for then. ``into`` may be
                partly overwritten.
            UsageError: ``into`` has other leaves, shapes or dtypes: nothing was written. Or ``load_state_dict`` of an
                object raised: ``path`` says which, ``written``, ``partly_written`` and ``not_written`` what became of
                the others.
            BoundError: ``exact`` was asked for, and it is not.
        """
        with self._lock:
            self._check_open()
            if fallback and ref not in (None, "latest"):
                raise UsageError(
                    "fallback=True goes back from the newest checkpoint only", where=f"restore({ref!r})",
                    todo="leave out the reference, or fallback",
                )  # fmt: skip
            self._settle()
            wanted = _Wanted(into, only, device, exact, on_progress)
            begun: list[int] = []
            try:
                return self._restore_newest_form(ref, wanted, begun)
            except (CorruptError, BackendError) as error:
                from ckstore.ops.verify import is_damage, with_recovery_advice

                if not is_damage(error):
                    raise
                damaged = begun[-1] if begun else None
                if not fallback:
                    raise with_recovery_advice(self._repository, self._policy, damaged, error) from error
                return self._fall_back(damaged, error, wanted)

    def _fall_back(self, damaged: int | None, error: CkstoreError, wanted: _Wanted) -> Any:
        """Restore the newest other checkpoint that can be read; raise where none can."""
        from ckstore.ops.verify import fallback_candidates, is_damage

        first, passed_over = error, [f"seq {damaged} was passed over: {error}"]
        for manifest in fallback_candidates(self._repository, damaged, first):
            _log.warning("%s", passed_over[-1])
            if wanted.exact:
                require_exact(manifest.header, self._repository.backend.root)
            try:
                return self._restore_from(manifest, passed_over, wanted)
            except (CorruptError, BackendError) as problem:
                if not is_damage(problem):
                    raise
                header = manifest.header
                passed_over.append(f"seq {header.seq} (step {header.step}) was passed over: {problem}")
            except UsageError as problem:
                raise UsageError(
                    f"seq {manifest.header.seq} does not fit into what was given, of which parts were already "
                    f"overwritten by a newer checkpoint that turned out to be damaged: {problem.what}",
                    where=problem.where,
                    todo=problem.todo,
                ) from problem
        raise type(first)(
            f"{first.what}; no checkpoint of run {self.run!r} can be read whole",
            where=first.where,
            todo=f"run `ckstore repair {self._repository.backend.root}`, which says what can be made whole again",
            **first.facts,
        ) from first

    def _restore_newest_form(self, ref: Reference | None, wanted: _Wanted, begun: list[int]) -> Any:
        """Restore what a reference means, again where it was replaced meanwhile; add what is begun to a list."""
        last: tuple[int, int] | None = None
        while True:
            manifest, passed_over = self._chosen(ref)
            begun.append(manifest.header.seq)
            if wanted.exact:
                require_exact(manifest.header, self._repository.backend.root)
            try:
                return self._restore_from(manifest, passed_over, wanted)
            except MissingChunkError:
                # It may have been replaced, and its packs freed, since its manifest was read.
                found = (manifest.header.seq, manifest.header.generation)
                if found == last:
                    raise
                last = found

    def _restore_from(self, manifest: Manifest, passed_over: list[str], wanted: _Wanted) -> Any:
        from ckstore.restore.plan import narrowed
        from ckstore.restore.restore import restore
        from ckstore.state.placement import libraries_needed, prepare_restore

        if wanted.only is not None:
            manifest = narrowed(manifest, wanted.only)
        needs_torch = "torch" in libraries_needed(manifest.tree, manifest.tensors)
        placement = prepare_restore(
            manifest.tree,
            manifest.tensors,
            manifest.storages,
            into=wanted.into,
            only=wanted.only,
            device=wanted.device,
            adapters=_adapters(needs_torch=needs_torch),
        )
        state = restore(self._repository, manifest, placement, self._policy, on_progress=wanted.on_progress)
        for sentence in placement.warnings:
            _log.warning("%s", sentence)
        self._restored = self._info(manifest.header, warnings=[*passed_over, *placement.warnings])
        if wanted.only is None:
            self._repository.chunk_index.pin(manifest)
            self._known_bases().follow(manifest)
            self._parent = manifest.header.seq
            self._fingerprint = None
            self._update_parent()
        return state

    def _chosen(self, ref: Reference | None) -> tuple[Manifest, list[str]]:
        """Return the checkpoint to restore, and why newer ones were passed over."""
        if not str(ref).startswith(("seq:", "id:")):
            # Whatever else names a checkpoint may mean the one that is about to be published.
            self._repository.wait_for_orphan()
        if ref is not None:
            return load_whole(self._repository, resolve(self._repository, ref), takes_lower=True), []
        manifest, passed_over = newest_whole(self._repository)
        for sentence in passed_over:
            _log.warning("%s", sentence)
        return manifest, passed_over


def _captured(state: Any) -> Captured:
    """Take a state apart, so that every thread of a commit finds on devices what the trainer's has let them compute."""
    from ckstore.state.capture import capture

    captured = capture(state, loaded_adapters())
    if not all(storage.is_host for storage in captured.storages):
        from ckstore.state.torch_adapter import wait_for_devices

        wait_for_devices(captured.storages)
    return captured


def _adapters(*, needs_torch: bool) -> list[LeafAdapter]:
    """Return the tensor libraries to ask; torch also where it is not loaded, but needed and installed."""
    if needs_torch and importlib.util.find_spec("torch"):
        importlib.import_module("torch")
    return loaded_adapters()
