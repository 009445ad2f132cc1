"""The verbs that make room: collect by rules, look into the trash, bring back from it, empty it.

Invariants:
- Nothing is dropped without a rule, and nothing is freed that was not in the trash before.
- These verbs need no lease: they run beside writers, readers and each other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckstore.config import Policy
from ckstore.errors import ConflictError, CorruptError, NotFoundError, UsageError
from ckstore.io.backend import Backend
from ckstore.io.url import backend_for
from ckstore.ops.gc.policy import Retention, span_seconds, span_words
from ckstore.ops.stored_policies import (
    set_stored_policy,
    set_stored_trash_seconds,
    stored_policy,
    stored_trash_seconds,
)
from ckstore.results import Info
from ckstore.store.manifests import missing_sentence
from ckstore.store.refs import Reference
from ckstore.store.repository import Repository
from ckstore.store.store_config import read_store_record
from ckstore.store.trash import TrashedManifest, TrashFolder
from ckstore.verbs.reading import Handle

if TYPE_CHECKING:
    from ckstore.ops.gc.run import GcReport
    from ckstore.ops.scheduled import AutomaticGc


@dataclass(frozen=True, slots=True)
class TrashEntry:
    """One folder of the trash.

    Attributes:
        trash_id: Its name; a prefix of it is enough to name it.
        time_ns: When it was made; None where that is not known.
        pack_count: Packs in it.
        nbytes: Bytes of all that is in it.
        manifests: Run, seq, step and generation of the manifests in it.
        kinds: Why each of them lies there: ``"dropped"``; or the checkpoint is in place, and was ``"demoted"`` (this is
            its exact form), ``"made exact"``, ``"pushed"``, ``"pulled"``, ``"rewritten"`` or ``"replaced"``.
    """

    trash_id: str
    time_ns: int | None
    pack_count: int
    nbytes: int
    manifests: tuple[tuple[str, int, int, int], ...]
    kinds: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: TrashFolder, kind_of: Callable[[TrashedManifest], str]) -> TrashEntry:
        """Make it from what lies there."""
        found = sorted(folder.manifests, key=lambda trashed: trashed.name)
        names = [trashed.name for trashed in found]
        manifests = tuple((name.run, name.seq, name.step, name.generation) for name in names)
        kinds = tuple(kind_of(trashed) for trashed in found)
        return cls(folder.gc_id, folder.made_ns, len(folder.packs), folder.nbytes, manifests, kinds)


@dataclass(frozen=True, slots=True)
class TrashRestored:
    """What was brought back from the trash.

    Attributes:
        packs: Packs that lie in place again.
        undeleted: Checkpoints that were dropped, as the entries they are now.
        exact_again: Checkpoints that had been demoted, and are in place in their exact form again.
        superseded: Manifests that stay in the trash, because a later form of the same checkpoint is in place.
        troubles: What could not be brought back, and why.
    """

    packs: int
    undeleted: tuple[Info, ...]
    superseded: int
    troubles: tuple[str, ...]
    exact_again: tuple[Info, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was brought back."""
        return not (self.packs or self.undeleted or self.exact_again)


_log = logging.getLogger("ckstore")


class Keeping(Handle):
    """A run of a store, to be tidied up."""

    _automatic: AutomaticGc | None = None
    _trash_seconds: float | None = None
    """How long what goes to the trash can be brought back, where ``open`` was given that."""

    def gc(
        self,
        policy: Retention | Mapping[str, Any] | None = None,
        *,
        all_runs: bool = False,
        dry_run: bool = False,
        now: bool = False,
        max_delete: int | None = None,
        min_age: str | float = "1h",
        trash_for: str | float | None = None,
        repack_nbytes_max: int | None = None,
        waste_max: float | None = None,
        clear_intents: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> GcReport:
        """Drop the checkpoints that no rule keeps, and move what nobody needs to the trash; free what lay there long.

        Others may go on meanwhile. Dropped checkpoints can be brought back by ``undelete`` until they are freed. What
        cannot be read, or is missing, keeps what it may name, anywhere in the store: ``obstacles`` tells.

        Args:
            policy: What is kept, a ``Retention`` or its rules; None: as is stored, and without that only garbage goes.
            all_runs: Apply the rules to every run, each by itself; False: to this handle's.
            dry_run: Only say what would be done.
            now: Free at once what is in the trash and what goes there; then nothing can be brought back.
            max_delete: Refuse to drop more checkpoints than this.
            min_age: Leave packs that no manifest ever named alone until they are this old: ``"1h"``, or seconds.
            trash_for: How long what goes there can be brought back; None: as ``open`` was told, or the store, or 24h.
            repack_nbytes_max: Bytes that may be written to rewrite packs that are partly needed; 0: none is rewritten.
            waste_max: The share of a pack that may be needed by nobody before it is rewritten.
            clear_intents: Nobody else deletes or demotes here now: remove what processes elsewhere left to say so.
            on_progress: Called with steps done and steps in all.

        Raises:
            LockHeldError: Another collection is at work.
            UsageError: More than ``max_delete`` would go, and nothing was changed; or the policy has a mistake.
        """
        from ckstore.ops.gc.run import GcLimits, collect_store

        chosen = {"repack_nbytes_max": repack_nbytes_max, "waste_max": waste_max}
        limits = GcLimits(
            min_age_seconds=_age(min_age),
            trash_seconds=self._trash_seconds_or(trash_for),
            is_now=now,
            clears_intents=clear_intents,
            **{name: value for name, value in chosen.items() if value is not None},  # type: ignore[arg-type]
        )
        if max_delete is not None and max_delete < 0:
            raise UsageError("max_delete is not negative", where=f"max_delete={max_delete!r}")
        with self._lock:
            self._look_at_newest()
            return collect_store(
                self._repository,
                rules_given(policy) or stored_policy(self._repository),
                runs=None if all_runs else self._runs_to_keep(),
                limits=limits,
                dry_run=dry_run,
                max_delete=max_delete,
                on_progress=on_progress,
            )

    def accept_missing(self) -> dict[str, tuple[int, ...]]:
        """Take checkpoints, of any run, for lost that were committed and whose manifests are gone.

        Until then nothing is freed, since what they need is not known; after that, the next collection frees it.

        Returns:
            For each run that lacked some: their seqs, ascending.
        """
        found = {}
        with self._lock:
            self._look_at_newest()
            self._repository.require_same_store()
            for run in self._repository.runs_with_claims():
                missing = self._repository.manifests_of(run).accept_missing()
                if missing:
                    found[run] = tuple(sorted(missing))
                    _log.warning("%s; taken for lost from now on", missing_sentence(run, missing))
        return found

    @property
    def retention(self) -> Retention | None:
        """The policy that is stored with the store, for all of its runs; None where there is none."""
        with self._lock:
            self._check_open()
            return stored_policy(self._repository)

    def set_retention(self, policy: Retention | Mapping[str, Any] | None) -> None:
        """Store a policy with the store, for collections that are given none; None removes it."""
        rules = rules_given(policy)
        with self._lock:
            self._check_open()
            set_stored_policy(self._repository, rules)

    @property
    def trash_for(self) -> str | None:
        """How long the trash is kept as is stored with the store, such as ``"12h"``; None where nothing is stored."""
        with self._lock:
            self._check_open()
            seconds = stored_trash_seconds(self._repository)
            return None if seconds is None else span_words(seconds)

    def set_trash_for(self, span: str | float | None) -> None:
        """Store with the store how long its trash is kept, for collections that are not given it; None removes it.

        Raises:
            UsageError: It is not a duration.
        """
        seconds = trash_seconds_given(span)
        with self._lock:
            self._check_open()
            set_stored_trash_seconds(self._repository, seconds)

    def trash(self) -> list[TrashEntry]:
        """Return what lies in the trash, the oldest first."""
        with self._lock:
            self._check_open()
            from ckstore.store.history import kind_in_trash

            def kind_of(trashed: TrashedManifest) -> str:
                return kind_in_trash(self._repository.for_run(trashed.name.run), trashed)

            folders = self._repository.trash.contents()
            return [TrashEntry.of(folder, kind_of) for folder in folders if folder.packs or folder.manifests]

    def restore_from_trash(self, trash_id: str) -> TrashRestored:
        """Bring back what lies in one folder of the trash.

        Packs go back as they were, dropped checkpoints as new entries; one that was demoted gets its exact form back.
        What lies there of a checkpoint that is in place in another form for any other reason stays in the trash.

        Args:
            trash_id: The folder, or the first letters of its name.

        Raises:
            NotFoundError: There is no such folder.
            UsageError: Several begin with these letters.
        """
        from ckstore.store.history import bring_back, kind_in_trash

        with self._lock:
            self._look_at_newest()
            folder = self._trash_folder(trash_id)
            packs = sum(self._repository.trash.rescue_pack(pack.pack_id) for pack in folder.packs)
            undeleted: list[Info] = []
            exact_again: list[Info] = []
            superseded, troubles = 0, []
            # By number, so that the highest generation of each is the one that counts.
            found = sorted(folder.manifests, key=lambda trashed: trashed.name)
            for trashed in {(trashed.name.run, trashed.name.seq): trashed for trashed in found}.values():
                repository = self._repository.for_run(trashed.name.run)
                kind = kind_in_trash(repository, trashed)
                if kind not in ("dropped", "demoted"):
                    superseded += 1
                    continue
                try:
                    info = Info.of(bring_back(repository, trashed).header)
                except (NotFoundError, ConflictError, CorruptError) as error:
                    troubles.append(f"seq {trashed.name.seq} of run {trashed.name.run}: {error}")
                    continue
                (undeleted if kind == "dropped" else exact_again).append(info)
            return TrashRestored(packs, tuple(undeleted), superseded, tuple(troubles), tuple(exact_again))

    def purge(self, trash_id: str | None = None) -> int:
        """Free what lies in the trash, or in one folder of it, at once; return the bytes.

        What manifests name is not freed but brought back, and so is what a tier should have and has not.

        Raises:
            ConflictError: A manifest cannot be read, and may name anything, or is missing: nothing was freed.
            CorruptError: A tier lacks packs that manifests say are there; these lie in place again, the rest is freed.
            LockHeldError: A collection is at work.
        """
        from ckstore.io.backend import Distant
        from ckstore.ops.gc.collect import purge
        from ckstore.ops.gc.run import GcLimits, collect_store, collector_lock
        from ckstore.store.reachability import Marker
        from ckstore.store.tier_checks import require_proof

        with self._lock:
            self._check_open()
            with collector_lock(self._repository.backend, self._repository.clock):
                trash = self._repository.trash
                chosen = trash.folders() if trash_id is None else [self._trash_folder(trash_id).gc_id]
                purged = purge(self._repository, Marker(self._repository), chosen)
            if purged.stop:
                raise ConflictError(purged.stop, where=self._repository.backend.root, todo="nothing was freed")
            unreadable = purged.marks.unreadable
            if unreadable:
                raise ConflictError(
                    f"a manifest cannot be read, and may name any pack: {unreadable[0].problem}",
                    where=self._repository.backend.location_of(unreadable[0].path),
                    todo="nothing was freed; `ckstore verify` tells more",
                )
            require_proof(purged.unproven.values())
            if isinstance(self._repository.backend, Distant):
                # Packs never lay in the trash there: they go now that nothing in it names them.
                report = collect_store(self._repository, None, runs=None, limits=GcLimits(), dry_run=False)
                return purged.nbytes + report.freed_nbytes
            return purged.nbytes

    def undelete(self, ref: Reference) -> Info:
        """Bring back a dropped checkpoint, or the exact form of one that was demoted, while the trash has it.

        A dropped one becomes a new entry of its run, which ``latest`` skips. A demoted one is exact again where it is,
        with its seq and its tags; its generation is higher than 0 then.

        Args:
            ref: A step (its newest entry that can be brought back), ``"seq:N"``, or ``"id:PREFIX"``.

        Raises:
            NotFoundError: The trash has no such checkpoint any more.
            CorruptError: It is damaged, or a pack that it needs was freed already.
            ConflictError: Another process has replaced the checkpoint meanwhile.
        """
        from ckstore.store.history import bring_back, find_in_trash

        with self._lock:
            self._look_at_newest()
            return Info.of(bring_back(self._repository, find_in_trash(self._repository, ref)).header)

    def close(self) -> None:
        """Let go of a collection that still runs, which ends by itself, and of everything else."""
        with self._lock:
            automatic, self._automatic = self._automatic, None
            try:
                super().close()
            finally:
                if automatic is not None:
                    automatic.close()

    # For the verbs that commit

    def _collect_after(self, policy: Retention, every: int) -> None:
        """Collect this run by these rules after every so many of its commits, in a process of its own."""
        from ckstore.ops.scheduled import AutomaticGc

        self._automatic = AutomaticGc(self._repository, policy, every, trash_seconds=self._trash_seconds)
        # A commit that finds the disk full does not wait for the next collection.
        self._repository.retention = policy.to_config()

    def _committed(self, seq: int) -> None:
        """Take note of acknowledged commits, of which ``seq`` is the newest; never raises and never waits."""
        if self._automatic is not None:
            self._automatic.after_commit(seq)

    def _trash_seconds_or(self, trash_for: str | float | None) -> float:
        """Return how long the trash is kept: as is said here, or by ``open``, or in the store, or a day."""
        from ckstore.ops.gc.run import TRASH_SECONDS

        for seconds in (trash_seconds_given(trash_for), self._trash_seconds):
            if seconds is not None:
                return seconds
        stored = stored_trash_seconds(self._repository)
        return TRASH_SECONDS if stored is None else stored

    def _trash_folder(self, trash_id: str) -> TrashFolder:
        found = [gc_id for gc_id in self._repository.trash.folders() if gc_id.startswith(trash_id)] if trash_id else []
        if len(found) > 1:
            raise UsageError(f"{len(found)} folders of the trash begin with {trash_id!r}", todo="give more letters")
        if not found:
            raise NotFoundError(
                f"there is no folder {trash_id!r} in the trash",
                where=self._repository.backend.root,
                todo="`ckstore trash ls` shows what there is",
            )
        return self._repository.trash.read_folder(found[0])

    def _runs_to_keep(self) -> tuple[str, ...]:
        """Return this handle's run, if anything was ever committed to it."""
        return (self.run,) if self.run in self._repository.runs() else ()

    def _look_at_newest(self) -> None:
        """Wait for commits in the background, for verbs that judge what is newest."""
        self._check_open()
        settle: Callable[[], None] | None = getattr(self, "_settle", None)
        if settle is not None:
            settle()


def keep(path: str | os.PathLike[str] | Backend, *, run: str = "main", allow_shared_folder: bool = False) -> Keeping:
    """Open a store that exists, for these verbs and those that only look; torch is not needed.

    Raises:
        NotFoundError: There is no store.
    """
    backend = backend_for(path, allow_shared_folder=allow_shared_folder)
    return Keeping(Repository(backend, read_store_record(backend), run), Policy())


def rules_given(policy: object) -> Retention | None:
    """Return a policy as callers may give one; UsageError for what is none."""
    return None if policy is None else Retention.given(policy)


def trash_seconds_given(span: str | float | None) -> float | None:
    """Return how long the trash is to be kept, in seconds; UsageError for what is not a duration."""
    return None if span is None else _age(span)


def _age(span: str | float) -> float:
    return 0.0 if span in (0, "0") else span_seconds(span)
