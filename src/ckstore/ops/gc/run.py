"""A collection from outside: survey the store, let retention decide, and carry out or only tell what follows.

The rules (``retention``) know nothing of files, and the collector (``store.gc``) nothing of rules: they meet here.

One collector at a time, to save work: safety never rests on this lock, nor on any other.

Give way to whoever commits: rest after each call that keeps the disk, and its journal, from others.

Removing a file whose bytes are on the disk, and making a name durable, take the journal of most file systems for as
long as they last; a commit makes five of its own calls wait behind them. A collection is in no hurry: while someone
writes to the store it sleeps a few times as long as it has kept the disk busy.

Invariants:
- Only time is spent here: every call is made, in the same order, whoever writes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckstore.clock import Clock
from ckstore.config import is_name
from ckstore.errors import CkstoreError, LockHeldError, NotFoundError, UnsupportedError, UsageError
from ckstore.format import paths
from ckstore.format.paths import CONFIG_FILE, ManifestName
from ckstore.format.records import ConfigRecord, LeaseRecord, with_changes
from ckstore.hashing import PackId
from ckstore.io.backend import Backend, Distant, FileLock, Locking, Probing
from ckstore.io.local import LocalBackend
from ckstore.ops.gc.collect import GcDone, collect, collect_far
from ckstore.ops.gc.plan import GcLimits, GcPlan, make_plan
from ckstore.ops.gc.policy import Retention, span_seconds, span_words
from ckstore.ops.gc.rules import Entry, RunPlan, plan_run
from ckstore.ops.gc.survey import RunFacts, Survey, survey
from ckstore.processes import owner_is_running
from ckstore.store.chunk_index import LOST_TIER
from ckstore.store.lease import Lease
from ckstore.store.reachability import MarkedManifest, Marker
from ckstore.store.repository import Repository
from ckstore.store.reserve import fill_reserve, with_reserve
from ckstore.store.store_config import change_config, read_config
from ckstore.store.tier_checks import Unproven, unproven_packs

if TYPE_CHECKING:
    from ckstore.ops.gc.waste import PackUse


_log = logging.getLogger("ckstore")

PATIENCE_SECONDS = 2.0
"""A ring can keep a dead process's descriptor, and so its lock, for a moment."""

_POLL_SECONDS = 0.1


@contextmanager
def collector_lock(backend: Backend, clock: Clock, *, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Hold ``gc.lock`` while the block runs; where the place has no locks, just run it.

    Raises:
        LockHeldError: Another collector is at work.
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
            _log.info("this collection runs without a lock, and two at a time are safe: %s", error)
            return None
        if lock is not None:
            return lock
        if clock.monotonic() >= deadline:
            raise LockHeldError(
                "another collection is at work in this store",
                where=paths.GC_LOCK_FILE,
                todo="wait for it to end; what it leaves, the next one takes",
            )
        clock.sleep(_POLL_SECONDS)


REST = 4.0
"""Sleep for so many times as long as the disk was kept busy: it is free for others four fifths of the time."""

REST_SECONDS_MAX = 0.1
"""After one call: a disk that was stuck for long was not kept busy by us."""

TOTAL_SECONDS_MAX = 600.0
"""All rests of one collection; after that it goes on at its own pace, so that it ends."""

BEAT_SECONDS = 60.0
"""A holder on another host lives if its heart has beaten within this time, by the clocks of both."""


class ThrottledBackend(LocalBackend):
    """A folder whose names are removed and made durable in leisure.

    Args:
        root: The folder.
        clock: How it rests.
    """

    def __init__(self, root: str, clock: Clock) -> None:
        super().__init__(root)
        self._clock = clock
        self._left_seconds = TOTAL_SECONDS_MAX

    def unlink(self, name: str) -> None:
        """Remove a name, and rest."""
        with self._rest():
            super().unlink(name)

    def create(self, name: str, content: bytes, *, sync: bool) -> None:
        """Make a new file; rest if it was made durable."""
        if not sync:
            super().create(name, content, sync=False)
            return
        with self._rest():
            super().create(name, content, sync=True)

    def sync_file(self, name: str) -> None:
        """Make a file durable, and rest."""
        with self._rest():
            super().sync_file(name)

    def sync_folder(self, name: str) -> None:
        """Make the names in a folder durable, and rest."""
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


def throttled(backend: Backend, clock: Clock) -> Backend:
    """Return what a collection works on: a folder that someone else writes to just now is taken in leisure."""
    if type(backend) is LocalBackend and someone_writes(backend, clock):
        return ThrottledBackend(backend.root, clock)
    return backend


def someone_writes(backend: Backend, clock: Clock) -> bool:
    """Whether a process other than this one holds the lease of a run, as far as can be told without waiting."""
    try:
        runs = [run for run in backend.list_names(paths.LEASES_FOLDER) if is_name(run)]
        return any(_lives(Lease(backend, run, clock).holder(), clock) for run in runs)
    except CkstoreError:
        # Whoever cannot say who writes does not do so in leisure.
        return False


def _lives(holder: LeaseRecord | None, clock: Clock) -> bool:
    if holder is None:
        return False
    is_running = owner_is_running(holder)
    if is_running is not None:
        return is_running and holder.pid != os.getpid()
    return abs(clock.now_ns() - holder.heartbeat_ns) < BEAT_SECONDS * 1e9


TRASH_SECONDS = GcLimits().trash_seconds
"""How long the trash is kept where nobody says otherwise."""

__all__ = ["GcDone", "GcLimits", "GcPlan", "GcReport", "collect_store", "set_stored_policy", "stored_policy"]


@dataclass(frozen=True, slots=True)
class GcReport:
    """What a collection planned, and did.

    Attributes:
        is_dry_run: Nothing was changed.
        runs: For each run that rules were applied to, what becomes of each checkpoint, and why.
        plan: What is done with packs and manifests; exactly this is carried out, less what is named meanwhile.
        done: What was done; None in a dry run.
        limits: Ages and budgets.
        refused: Why the plan may not be carried out; empty where it may.
    """

    is_dry_run: bool
    runs: tuple[RunPlan, ...]
    plan: GcPlan
    done: GcDone | None
    limits: GcLimits
    refused: str = ""

    @property
    def dropped_count(self) -> int:
        """Checkpoints that go, or went."""
        return len(self.plan.drops) if self.done is None else len(self.done.dropped)

    @property
    def unproven(self) -> dict[PackId, Unproven]:
        """Packs that stay only because the tier that should have them does not, or does not answer."""
        return {each.pack_id: each for each in self.plan.unproven} | ({} if self.done is None else self.done.unproven)

    @property
    def waits(self) -> tuple[tuple[str, str], ...]:
        """Tiers that do not answer, and what they said."""
        silent = {each.tier: each.problem for each in self.unproven.values() if not each.is_damage}
        return tuple(sorted((silent | ({} if self.done is None else self.done.waits)).items()))

    @property
    def stop(self) -> str:
        """Why packs are left alone, or were; empty where nothing spoke against it."""
        return self.plan.stop if self.done is None else self.done.stop

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why something stays that rules let go, or that nobody needs; empty where all of the plan was carried out."""
        spared = {} if self.done is None else self.done.spared
        lines = [self.refused] if self.refused else []
        lines += [f"packs were left alone: {self.stop}"] if self.stop else []
        lines += [f"nothing of run {run.run} was dropped: {run.blocked}" for run in self.runs if run.blocked]
        lines += [f"seq {name.seq} of run {name.run} stays: {why}" for name, why in sorted(spared.items())]
        lines += [f"tier {tier} does not answer: {said}" for tier, said in self.waits]
        damaged = [each for each in self.unproven.values() if each.is_damage]
        lines += [f"pack {each.pack_id.hex()} stays, tier {each.tier} lacks it: {each.problem}" for each in damaged]
        return tuple(lines)

    @property
    def freed_nbytes(self) -> int:
        """Bytes that are free now, or would be."""
        if self.done is not None:
            return self.done.freed_nbytes
        if self.limits.frees_at_once:
            return self.plan.purged_nbytes + self.plan.moved_nbytes + self.plan.rewritten_nbytes
        # In a bucket what is rewritten stays as long as the trash has manifests that name it.
        return self.plan.purged_nbytes + (self.plan.moved_nbytes if self.plan.is_final else 0)

    @property
    def later_nbytes(self) -> int:
        """Bytes in the trash that a later collection frees."""
        if self.limits.frees_at_once:
            return 0
        if self.plan.is_final:
            return self.plan.waiting_nbytes + self.plan.held_nbytes + self._rewritten_nbytes()
        moved = self.plan.moved_nbytes + self.plan.rewritten_nbytes if self.done is None else self.done.moved_nbytes
        return self.plan.waiting_nbytes + moved

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
    """Plan a collection of the whole store, and unless it is a dry run, carry it out.

    Args:
        repository: The store.
        policy: What is kept; None: nothing is dropped, and only garbage is collected.
        runs: The runs that the policy is applied to; None: all. Garbage is looked for everywhere.
        limits: Ages and budgets.
        dry_run: Only plan.
        max_delete: Refuse a plan that drops more checkpoints than this.
        patience_seconds: How long to wait for another collection to end.
        on_progress: Called with steps done and steps in all.

    Raises:
        UnsupportedError: The store lies in a bucket whose server does not keep conditions.
        LockHeldError: Another collection is at work.
        UsageError: The plan drops more than ``max_delete``; nothing was changed.
        NotFoundError: There is no such run.
    """
    if dry_run:
        return _planned(repository, Marker(repository), policy, runs, limits, max_delete)
    if isinstance(repository.backend, Probing):
        repository.backend.probe()

    def collect_once() -> GcReport:
        with collector_lock(repository.backend, repository.clock, patience_seconds=patience_seconds):
            marker = Marker(repository)
            report = _planned(repository, marker, policy, runs, limits, max_delete)
            if report.refused:
                raise UsageError(
                    report.refused, where=repository.backend.root, todo="nothing was changed; see --dry-run"
                )
            tell = on_progress or (lambda done, total: None)
            act = collect_far if report.plan.is_final else collect
            with _in_leisure(repository) as acting:
                done = act(acting, marker, report.plan, limits, "retention", tell)
            fill_reserve(repository.backend)
            return GcReport(False, report.runs, report.plan, done, limits)

    return with_reserve(repository.backend, collect_once)


@contextmanager
def _in_leisure(repository: Repository) -> Iterator[Repository]:
    """Yield parts that give way to whoever commits to the store just now; these, if nobody does."""
    backend = throttled(repository.backend, repository.clock)
    if backend is repository.backend:
        yield repository
        return
    acting = Repository(backend, repository.record, repository.run, clock=repository.clock)
    try:
        yield acting
    finally:
        acting.close()


def collection_obstacle(repository: Repository) -> str:
    """Say why a store in a bucket may not be collected; empty where it may, as everywhere else.

    What was pushed there is named by manifests of another store, which nobody sees from here.
    """
    if not isinstance(repository.backend, Distant):
        return ""
    for name, info in repository.backend.list_deep(paths.CLAIMS_FOLDER):
        claim = paths.parse_claim_file(name.rpartition("/")[2])
        # Whoever commits leaves an empty claim; a copy says which checkpoint it is of.
        if claim is not None and claim.kind == "claim" and info.nbytes:
            return (
                "checkpoints of another store were pushed or mirrored here, and only that one knows what it needs: "
                "collect by `ckstore gc THAT-STORE --tier NAME`"
            )
    return ""


def _planned(
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
        known = ", ".join(sorted(found.runs)) or "none yet"
        raise NotFoundError(
            f"there is no run {unknown[0]!r}", where=repository.backend.root, todo=f"runs there are: {known}"
        )
    chosen = [facts for run, facts in sorted(found.runs.items()) if runs is None or run in runs]
    lost = frozenset(number for number, ref in enumerate(marker.numbers.refs) if ref.tier == LOST_TIER)
    plans = tuple(_run_plan(facts, policy, found.now_ns, lost) for facts in chosen)
    highest = {(facts.run, marked.name.seq): marked.name for facts in chosen for marked in facts.highest}
    drops = [highest[plan.run, verdict.seq] for plan in plans for verdict in plan.dropped]
    refused = collection_obstacle(repository)
    if max_delete is not None and len(drops) > max_delete:
        refused = f"{len(drops)} checkpoints would be dropped, and max_delete is {max_delete}"
    return GcReport(True, plans, _plan(repository, marker, found, drops, limits), None, limits, refused)


def _run_plan(facts: RunFacts, policy: Retention | None, now_ns: int, lost: frozenset[int]) -> RunPlan:
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
        )
        for marked in facts.highest
    ]
    return plan_run(facts.run, entries, policy, now_ns=now_ns, blocked=facts.blocked)


def _plan(
    repository: Repository, marker: Marker, found: Survey, drops: Iterable[ManifestName], limits: GcLimits
) -> GcPlan:
    def count_uses(manifests: Iterable[MarkedManifest]) -> list[PackUse]:
        from ckstore.ops.gc.waste import count_frames

        try:
            return count_frames(marker, manifests)
        except FileNotFoundError:
            # Another replaces or drops checkpoints just now: what is wasted is for the next collection to find.
            return []

    def find_unproven(manifests: Iterable[MarkedManifest], pack_ids: Collection[PackId]) -> dict[PackId, Unproven]:
        return unproven_packs(repository, marker, manifests, pack_ids)

    is_final = isinstance(repository.backend, Distant)
    return make_plan(found, marker, drops, limits, count_uses, find_unproven, is_final=is_final)


# The policy that lives in the store


def stored_policy(repository: Repository) -> Retention | None:
    """Return the policy in ``config.json``; None where there is none.

    Raises:
        UsageError: It has a rule that is none; the message names the nearest one.
        CorruptError: The file is damaged.
    """
    rules: dict[str, Any] = read_config(repository.backend).retention
    return Retention.of(rules, where=repository.backend.location_of(CONFIG_FILE)) if rules else None


def set_stored_policy(repository: Repository, policy: Retention | None) -> None:
    """Write the policy into ``config.json``, durably; None removes it."""
    rules = {} if policy is None else policy.to_config()

    def change(record: ConfigRecord) -> ConfigRecord:
        kept = {name: getattr(record, name) for name in record.__struct_fields__}
        return ConfigRecord(**{**kept, "retention": rules})

    change_config(repository.backend, change)


_TRASH_FOR = "trash_for"


def stored_trash_seconds(repository: Repository) -> float | None:
    """Return how long the trash is kept as ``config.json`` says, in seconds; None where it does not.

    Raises:
        UsageError: What it says is not a duration.
        CorruptError: The file is damaged.
    """
    span = read_config(repository.backend).policy.get(_TRASH_FOR)
    if span is None:
        return None
    if span in (0, "0"):
        return 0.0
    try:
        return span_seconds(span)
    except UsageError as error:
        where = f"trash_for of {repository.backend.location_of(CONFIG_FILE)}"
        raise UsageError(error.what, where=where, todo=error.todo) from None


def set_stored_trash_seconds(repository: Repository, seconds: float | None) -> None:
    """Write into ``config.json``, durably, how long the trash is kept; None removes it."""

    def change(record: ConfigRecord) -> ConfigRecord:
        others = {name: value for name, value in record.policy.items() if name != _TRASH_FOR}
        stored = {} if seconds is None else {_TRASH_FOR: span_words(seconds) if seconds else 0}
        return with_changes(record, policy={**others, **stored})

    change_config(repository.backend, change)
