"""Run a collection: survey the store, apply the retention rules, plan, and carry out the plan.

The rules (``rules.py``) read no files, and the collector (``collect.py``) evaluates no rules. This module connects
them.

Only one collection runs at a time, to save work. Safety never depends on that lock, or on any other lock.

While another process writes to the store, a collection is throttled. Removing a file and syncing a folder occupy the
journal of most file systems, and a commit waits behind these calls. So the collection sleeps for a multiple of the time
that each such call took.

Invariants:
- Throttling changes only when calls are made. The calls and their order are always the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckstore.clock import Clock
from ckstore.config import is_name
from ckstore.display import repr_of_summary
from ckstore.errors import CkstoreError, LockHeldError, NotFoundError, UnsupportedError, UsageError
from ckstore.format import paths
from ckstore.format.paths import ManifestName
from ckstore.format.records import LeaseRecord
from ckstore.hashing import PackId
from ckstore.io.backend import Backend, Distant, FileLock, Locking, Probing
from ckstore.io.local import LocalBackend
from ckstore.ops.gc.collect import GcDone, collect, collect_bucket
from ckstore.ops.gc.journals import SegmentMove, plan_segments
from ckstore.ops.gc.plan import GcLimits, GcPlan, make_plan
from ckstore.ops.gc.policy import Retention
from ckstore.ops.gc.rules import Entry, RunPlan, plan_run
from ckstore.ops.gc.survey import PackUse, RunFacts, Survey, count_frames, survey
from ckstore.processes import owner_is_running
from ckstore.store.chunk_index import LOST_TIER
from ckstore.store.journal_needs import needed_keyframes
from ckstore.store.lease import Lease
from ckstore.store.reachability import MarkedManifest, Marker
from ckstore.store.replay_bases import ReplayEntries
from ckstore.store.repository import Repository
from ckstore.store.reserve import fill_reserve, with_reserve
from ckstore.store.tier_checks import Unproven, unproven_packs

_log = logging.getLogger("ckstore")

__all__ = ["GcDone", "GcLimits", "GcPlan", "GcReport", "collect_store"]

PATIENCE_SECONDS = 2.0
"""How long to wait for ``gc.lock``: an io_uring ring can keep a dead process's lock for a moment."""

TRASH_SECONDS = GcLimits().trash_seconds
"""How long the trash is kept if neither the caller nor the store sets a time."""


@dataclass(frozen=True, slots=True)
class GcReport:
    """The plan of a collection, and what was carried out.

    Attributes:
        is_dry_run: Nothing was changed.
        runs: For each run to which rules were applied, the verdict on each checkpoint.
        plan: What happens to packs and manifests. The collection never does more than this; it leaves packs that a
            manifest has named since.
        done: What was done; None in a dry run.
        limits: Ages and budgets.
        refused: Why the plan must not be carried out; empty if it may be.
    """

    is_dry_run: bool
    runs: tuple[RunPlan, ...]
    plan: GcPlan
    done: GcDone | None
    limits: GcLimits
    refused: str = ""

    __repr__ = repr_of_summary

    @property
    def dropped_count(self) -> int:
        """Checkpoints that were, or would be, deleted."""
        return len(self.plan.drops) if self.done is None else len(self.done.dropped)

    @property
    def unproven(self) -> dict[PackId, Unproven]:
        """Packs that stay only because their tier lacks them or does not answer."""
        return {each.pack_id: each for each in self.plan.unproven} | ({} if self.done is None else self.done.unproven)

    @property
    def waits(self) -> tuple[tuple[str, str], ...]:
        """Tiers that do not answer, each with its error."""
        silent = {each.tier: each.problem for each in self.unproven.values() if not each.is_damage}
        return tuple(sorted((silent | ({} if self.done is None else self.done.waits)).items()))

    @property
    def stop(self) -> str:
        """Why packs are left in place; empty if they are not."""
        return self.plan.stop if self.done is None else self.done.stop

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why something stays that could have been removed; empty if the whole plan was carried out."""
        spared = {} if self.done is None else self.done.spared
        lines = [self.refused] if self.refused else []
        lines += [f"packs were not collected: {self.stop}"] if self.stop else []
        lines += [f"no checkpoint of run {run.run} was deleted: {run.blocked}" for run in self.runs if run.blocked]
        lines += [f"seq {name.seq} of run {name.run} was kept: {why}" for name, why in sorted(spared.items())]
        lines += [f"tier {tier} does not answer: {said}" for tier, said in self.waits]
        damaged = [each for each in self.unproven.values() if each.is_damage]
        lines += [
            f"pack {each.pack_id.hex()} was kept, because tier {each.tier} lacks it: {each.problem}" for each in damaged
        ]
        return tuple(lines)

    @property
    def freed_nbytes(self) -> int:
        """Bytes that were, or would be, freed by this collection."""
        if self.done is not None:
            return self.done.freed_nbytes
        if self.limits.frees_immediately:
            moved_nbytes = self.plan.moved_nbytes + self.plan.segments_nbytes
            return self.plan.purged_nbytes + moved_nbytes + self.plan.rewritten_nbytes
        # In a bucket, a rewritten pack stays until no manifest in the trash names it.
        return self.plan.purged_nbytes + (self.plan.moved_nbytes if self.plan.is_final else 0)

    @property
    def later_nbytes(self) -> int:
        """Bytes in the trash that a later collection frees."""
        if self.limits.frees_immediately:
            return 0
        if self.plan.is_final:
            return self.plan.waiting_nbytes + self.plan.held_nbytes + self._rewritten_nbytes()
        if self.done is not None:
            return self.plan.waiting_nbytes + self.done.moved_nbytes + self.done.moved_segments_nbytes
        moved_nbytes = self.plan.moved_nbytes + self.plan.segments_nbytes + self.plan.rewritten_nbytes
        return self.plan.waiting_nbytes + moved_nbytes

    def _rewritten_nbytes(self) -> int:
        if self.done is None:
            return self.plan.rewritten_nbytes
        rewritten = set(self.done.repacked.pack_ids)
        return sum(rewrite.nbytes for rewrite in self.plan.rewrites if rewrite.pack_id in rewritten)


def collect_store(
    repository: Repository,
    policy: Retention | None,
    *,
    runs: Collection[str] | None,
    limits: GcLimits,
    dry_run: bool,
    max_delete: int | None = None,
    patience_seconds: float = PATIENCE_SECONDS,
    on_progress: Callable[[int, int], None] | None = None,
) -> GcReport:
    """Plan a collection of the whole store and, unless it is a dry run, carry it out.

    Args:
        repository: The store.
        policy: The retention rules; None: delete no checkpoints, only collect garbage.
        runs: The runs to which the rules are applied; None: all. Garbage of every run is collected.
        limits: Ages and budgets.
        dry_run: Only plan.
        max_delete: Refuse a plan that deletes more checkpoints than this.
        patience_seconds: How long to wait for another collection to end.
        on_progress: Called with the number of steps done and the total.

    Raises:
        UnsupportedError: The store is in a bucket whose server ignores conditional requests.
        LockHeldError: Another collection is running.
        UsageError: The plan deletes more than ``max_delete``; nothing was changed.
        NotFoundError: A run in ``runs`` does not exist.
    """
    if dry_run:
        return _plan_collection(repository, Marker(repository), policy, runs, limits, max_delete)
    if isinstance(repository.backend, Probing):
        repository.backend.probe()

    def collect_once() -> GcReport:
        with collector_lock(repository.backend, repository.clock, patience_seconds=patience_seconds):
            marker = Marker(repository)
            report = _plan_collection(repository, marker, policy, runs, limits, max_delete)
            if report.refused:
                raise UsageError(
                    report.refused,
                    where=repository.backend.root,
                    todo="nothing was changed; check the plan with --dry-run, then raise --max-delete",
                )
            report_progress = on_progress or (lambda done, total: None)
            act = collect_bucket if report.plan.is_final else collect
            with _throttled_repository(repository) as acting:
                done = act(acting, marker, report.plan, limits, "retention", report_progress)
            fill_reserve(repository.backend)
            return GcReport(False, report.runs, report.plan, done, limits)

    return with_reserve(repository.backend, collect_once)


def _plan_collection(
    repository: Repository,
    marker: Marker,
    policy: Retention | None,
    runs: Collection[str] | None,
    limits: GcLimits,
    max_delete: int | None,
) -> GcReport:
    found = survey(repository, marker)
    unknown = sorted(set(runs or ()) - found.runs.keys())
    if unknown and policy is not None:
        existing = ", ".join(sorted(found.runs)) or "none"
        raise NotFoundError(
            f"there is no run {unknown[0]!r}", where=repository.backend.root, todo=f"existing runs: {existing}"
        )
    chosen = [facts for run, facts in sorted(found.runs.items()) if runs is None or run in runs]
    lost = frozenset(number for number, ref in enumerate(marker.numbers.refs) if ref.tier == LOST_TIER)
    plans = tuple(_run_plan(repository, facts, policy, found.now_ns, lost) for facts in chosen)
    highest = {(facts.run, marked.name.seq): marked.name for facts in chosen for marked in facts.highest}
    drops = [highest[plan.run, verdict.seq] for plan in plans for verdict in plan.dropped]
    refused = collection_obstacle(repository)
    if max_delete is not None and len(drops) > max_delete:
        checkpoints = f"{len(drops)} checkpoint{'' if len(drops) == 1 else 's'}"
        refused = f"{checkpoints} would be deleted, but max_delete is {max_delete}"
    chosen_runs = {facts.run for facts in chosen}
    counts = {} if policy is None or policy.keep_journal is None else dict.fromkeys(chosen_runs, policy.keep_journal)
    segments = _segment_plan(repository, found, drops, counts, limits)
    plan = _pack_plan(repository, marker, found, drops, segments, limits)
    return GcReport(True, plans, plan, None, limits, refused)


def _segment_plan(
    repository: Repository,
    found: Survey,
    drops: Iterable[ManifestName],
    counts: Mapping[str, int],
    limits: GcLimits,
) -> list[SegmentMove]:
    """Return the segments of journals to move, of all runs that are not blocked.

    ``counts`` has the rule ``keep_journal`` of each run to which the policy is applied.
    """
    if isinstance(repository.backend, Distant):
        return []
    dropped = {(name.run, name.seq) for name in drops}
    return [
        move
        for run, facts in sorted(found.runs.items())
        if not facts.blocked
        for move in plan_segments(
            repository.for_run(run),
            counts.get(run),
            {seq for of_run, seq in dropped if of_run == run},
            limits.min_age_seconds,
        )
    ]


def _run_plan(
    repository: Repository, facts: RunFacts, policy: Retention | None, now_ns: int, lost: frozenset[int]
) -> RunPlan:
    has_rules = policy is not None and not facts.blocked
    needed = needed_keyframes(repository.for_run(facts.run)) if has_rules else {}
    bases = ReplayEntries(repository.for_run(facts.run)).bases if has_rules else {}
    entries = [
        Entry(
            seq=marked.name.seq,
            step=marked.name.step,
            time_ns=marked.header.time_ns,
            metrics=marked.header.metrics,
            tags=facts.tags.get(marked.name.seq, ()),
            is_archival=marked.header.is_archival,
            is_partial=bool(lost) and not lost.isdisjoint(marked.packs),
            problem=facts.problem_of(marked.name),
            needed=needed.get(marked.name.seq, ""),
            base=bases.get(marked.name.seq),
        )
        for marked in facts.highest
    ]
    return plan_run(facts.run, entries, policy, now_ns=now_ns, blocked=facts.blocked)


def _pack_plan(
    repository: Repository,
    marker: Marker,
    found: Survey,
    drops: Iterable[ManifestName],
    segments: Sequence[SegmentMove],
    limits: GcLimits,
) -> GcPlan:
    def count_uses(manifests: Iterable[MarkedManifest]) -> list[PackUse]:
        try:
            return count_frames(marker, manifests)
        except FileNotFoundError:
            # Another process is replacing or deleting checkpoints. The next collection rewrites packs.
            return []

    def find_unproven(manifests: Iterable[MarkedManifest], pack_ids: Collection[PackId]) -> dict[PackId, Unproven]:
        return unproven_packs(repository, marker, manifests, pack_ids)

    is_final = isinstance(repository.backend, Distant)
    return make_plan(found, marker, drops, limits, count_uses, find_unproven, is_final=is_final, segments=segments)


def collection_obstacle(repository: Repository) -> str:
    """Return why this bucket must not be collected; empty if it may be, as in every folder.

    Manifests of another store name the packs that were pushed here, and they cannot be seen from here.
    """
    if not isinstance(repository.backend, Distant):
        return ""
    for name, info in repository.backend.list_deep(paths.CLAIMS_FOLDER):
        claim = paths.parse_claim_file(name.rpartition("/")[2])
        # A commit leaves an empty claim; a copied checkpoint's claim says which checkpoint it is.
        if claim is not None and claim.kind == "claim" and info.nbytes:
            return (
                "another store has pushed or mirrored checkpoints here, and only that store knows which packs they "
                "need; collect from there: `ckstore gc THAT-STORE --tier NAME`"
            )
    return ""


_POLL_SECONDS = 0.1


@contextmanager
def collector_lock(backend: Backend, clock: Clock, *, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Hold ``gc.lock`` while the block runs. Without lock support in the backend, just run the block.

    Raises:
        LockHeldError: Another collection is running.
    """
    lock = _lock(backend, clock, patience_seconds) if isinstance(backend, Locking) else None
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def _lock(backend: Locking, clock: Clock, patience_seconds: float) -> FileLock | None:
    deadline = clock.monotonic() + patience_seconds
    while True:
        try:
            lock = backend.try_lock(paths.GC_LOCK_FILE)
        except UnsupportedError as error:
            _log.info("collecting without a lock, which is safe even if two collections run: %s", error)
            return None
        if lock is not None:
            return lock
        if clock.monotonic() >= deadline:
            raise LockHeldError(
                "another collection is running in this store",
                where=paths.GC_LOCK_FILE,
                todo="wait until it has ended, then try again",
            )
        clock.sleep(_POLL_SECONDS)


REST = 4.0
"""Sleep this many times as long as the disk was busy, so that others can use it four fifths of the time."""

REST_SECONDS_MAX = 0.1
"""Longest sleep after one call, since a slow call may have waited for other processes."""

TOTAL_SECONDS_MAX = 600.0
"""Longest total sleep in one collection. After that it runs unthrottled, so that it ends."""

BEAT_SECONDS = 60.0
"""A lease holder on another host counts as alive if its heartbeat is younger than this, by both clocks."""


@contextmanager
def _throttled_repository(repository: Repository) -> Iterator[Repository]:
    """Yield a throttled repository if another process is writing; else the given repository."""
    backend = throttled(repository.backend, repository.clock)
    if backend is repository.backend:
        yield repository
        return
    acting = Repository(backend, repository.record, repository.run, clock=repository.clock)
    try:
        yield acting
    finally:
        acting.close()


def throttled(backend: Backend, clock: Clock) -> Backend:
    """Return a throttled backend if another process writes to this folder; else the given backend."""
    if type(backend) is LocalBackend and someone_writes(backend, clock):
        return ThrottledBackend(backend.root, clock)
    return backend


def someone_writes(backend: Backend, clock: Clock) -> bool:
    """Return whether another process holds the lease of a run, checked without waiting."""
    try:
        runs = [run for run in backend.list_names(paths.LEASES_FOLDER) if is_name(run)]
        return any(_is_alive(Lease(backend, run, clock).holder(), clock) for run in runs)
    except CkstoreError:
        # If the leases cannot be read, do not throttle.
        return False


def _is_alive(holder: LeaseRecord | None, clock: Clock) -> bool:
    if holder is None:
        return False
    is_running = owner_is_running(holder)
    if is_running is not None:
        return is_running and holder.pid != os.getpid()
    return abs(clock.now_ns() - holder.heartbeat_ns) < BEAT_SECONDS * 1e9


class ThrottledBackend(LocalBackend):
    """A folder backend that sleeps after each call that removes a name or makes one durable.

    Args:
        root: The folder.
        clock: Used to sleep.
    """

    def __init__(self, root: str, clock: Clock) -> None:
        super().__init__(root)
        self._clock = clock
        self._left_seconds = TOTAL_SECONDS_MAX

    def unlink(self, name: str) -> None:
        """Remove a name, then sleep."""
        with self._rest():
            super().unlink(name)

    def create(self, name: str, content: bytes, *, sync: bool) -> None:
        """Create a file; sleep if it was synced."""
        if not sync:
            super().create(name, content, sync=False)
            return
        with self._rest():
            super().create(name, content, sync=True)

    def sync_file(self, name: str) -> None:
        """Sync a file, then sleep."""
        with self._rest():
            super().sync_file(name)

    def sync_folder(self, name: str) -> None:
        """Sync the names in a folder, then sleep."""
        with self._rest():
            super().sync_folder(name)

    @contextmanager
    def _rest(self) -> Iterator[None]:
        begun = self._clock.monotonic()
        yield
        seconds = min(REST * (self._clock.monotonic() - begun), REST_SECONDS_MAX, self._left_seconds)
        if seconds > 0:
            self._left_seconds -= seconds
            self._clock.sleep(seconds)
