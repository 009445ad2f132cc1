"""Move old checkpoints of a run to another tier, the oldest first.

For each checkpoint: claim its seq there, copy and check its packs, put its manifest there and read it back. Then
publish the next generation of the manifest here, which says that the packs are in that tier. A later gc frees the local
packs that are no longer referenced. At last, copy the segments of the journal with points of the checkpoints that are
in the tier; they stay here, too.

Invariants:
- Every checkpoint can be restored at any time, from here or from there.
- The manifest here changes only after the whole checkpoint was checked there.
- A push that runs twice, concurrently or after a crash, does what is left to do.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

from ckstore.display import repr_of_summary
from ckstore.errors import ConflictError, CorruptError, UnsupportedError, UsageError
from ckstore.format.manifest import Manifest, PackRef
from ckstore.format.paths import ManifestName
from ckstore.hashing import PackId
from ckstore.io.backend import Backend, ReadFile
from ckstore.io.url import backend_for
from ckstore.store.chunk_index import LOCAL_TIER, LOST_TIER
from ckstore.store.journal_needs import JournalState
from ckstore.store.manifests import DroppedError
from ckstore.store.points import has_journal
from ckstore.store.refs import load_whole
from ckstore.store.repository import Repository, finish_replacement
from ckstore.store.tier_checks import begin_turn
from ckstore.tiers.copy import PackCopy, RelocatedError, StoreCopy
from ckstore.tiers.segments import SegmentCopy, segments_of
from ckstore.tiers.verify_copy import IncomingPackCheck

_log = logging.getLogger("ckstore")

Action = Literal["push", "keep", "there"]

_TRIES = 5


@dataclass(frozen=True, slots=True)
class PushPolicy:
    """Which checkpoints of a run are pushed.

    Args:
        keep_local: This many of the newest checkpoints stay here.
        older_than_seconds: Push only older checkpoints; None: of any age.
        read_back: Read every copied pack back and compare it before the manifest here changes.

    Raises:
        UsageError: A field has an invalid value.
    """

    keep_local: int = 1
    older_than_seconds: float | None = None
    read_back: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.keep_local, bool) or not isinstance(self.keep_local, int) or self.keep_local < 0:
            raise UsageError(
                "keep_local must be an integer of at least 0", where=f"PushPolicy(keep_local={self.keep_local!r})"
            )
        if self.older_than_seconds is not None and not self.older_than_seconds >= 0:
            raise UsageError(
                "older_than must not be negative", where=f"PushPolicy(older_than_seconds={self.older_than_seconds!r})"
            )


@dataclass(frozen=True, slots=True)
class PushEntry:
    """One checkpoint of a push.

    Attributes:
        seq: Commit number within the run.
        step: The trainer's step.
        action: ``"push"``, ``"keep"`` (stays here), or ``"there"`` (in a tier already).
        reason: Why it is not pushed, in a few words.
        packs_nbytes: Bytes of its local packs; other checkpoints may share them.
        is_done: True if it was pushed.
    """

    seq: int
    step: int
    action: Action
    reason: str
    packs_nbytes: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class PushReport:
    """Plan or result of a push, the oldest checkpoint first.

    Attributes:
        run: Name of the run.
        tier: Name of the tier; empty in a dry run if the address has no name yet.
        address: Address of the tier.
        is_dry_run: True if nothing was changed.
        entries: Every checkpoint of the run.
        bytes_to_push: Bytes of the packs of all checkpoints to push; a shared pack counts once.
        bytes_copied: Bytes of the packs that were copied.
        packs_copied: Number of packs that were copied.
        points_copied: Points of the journal that were copied, or would be.
        journal_bytes_copied: Bytes of the segments that contain them.
    """

    run: str
    tier: str
    address: str
    is_dry_run: bool
    entries: tuple[PushEntry, ...]
    bytes_to_push: int
    bytes_copied: int
    packs_copied: int
    points_copied: int = 0
    journal_bytes_copied: int = 0

    __repr__ = repr_of_summary

    @property
    def pushed(self) -> tuple[PushEntry, ...]:
        """Entries with action ``"push"``."""
        return tuple(entry for entry in self.entries if entry.action == "push")


@dataclass(frozen=True, slots=True)
class _Member:
    name: ManifestName
    action: Action
    reason: str
    packs: dict[PackId, int]


def push(
    repository: Repository,
    address: str,
    policy: PushPolicy,
    *,
    tier: str | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> PushReport:
    """Move checkpoints of a run to another tier. After any error, every checkpoint is complete here or there.

    Args:
        repository: The store.
        address: Address of the tier: a bucket or an absolute path.
        policy: Which checkpoints to push.
        tier: Name for the tier, if the address has none yet.
        dry_run: Only plan.
        on_progress: Called with the bytes of packs done, and in total.

    Raises:
        UsageError: Another store is there.
        UnreachableError: The place is empty although checkpoints are there; it may not be mounted.
        ConflictError: This folder is a copy of the store that owns the tier; or a seq there belongs to another
            checkpoint; or a checkpoint here was replaced several times.
        CorruptError: A pack here is damaged, or a pack there has other bytes. Or a segment of the journal here is
            damaged: then everything else was pushed, and ``report`` is the whole result.
        BackendError: The place does not respond.
    """
    repository.require_same_store()
    members = _members(repository, policy)
    total = _nbytes_of([member for member in members if member.action == "push"])
    if dry_run:
        names = {place: name for name, place in repository.tiers.addresses().items()}
        name = names.get(address, tier or "")
        report = _report(repository, name, address, members, {}, is_dry_run=True)
        pushed = {member.name.seq for member in members if member.action == "push"}
        target = repository.tiers.open(name) if address in names else None
        return _with_segments(report, _copy_segments(repository, name, target, pushed, policy, is_dry_run=True))
    name = _name_of_place(repository, address, tier)
    pusher = _Pusher(repository, name, policy, on_progress, total)
    done = pusher.run([member.name for member in members if member.action == "push"])
    report = _report(repository, name, repository.tiers.address_of(name), members, done, is_dry_run=False)
    copied = pusher.copied
    report = replace(report, bytes_copied=sum(copied.values()), packs_copied=len(copied))
    target = repository.tiers.open(name)
    report = _with_segments(report, segments := _copy_segments(repository, name, target, (), policy))
    failure = segments.failure("pushed", report)
    if failure is not None:
        raise failure
    return report


def _with_segments(report: PushReport, copied: SegmentCopy) -> PushReport:
    return replace(report, points_copied=copied.point_count, journal_bytes_copied=copied.nbytes)


def _copy_segments(
    repository: Repository,
    tier: str,
    target: Backend | None,
    pushed: Collection[int],
    policy: PushPolicy,
    *,
    is_dry_run: bool = False,
) -> SegmentCopy:
    """Copy the segments with points of checkpoints that are in the tier, after these: each point has its keyframe."""
    copy = SegmentCopy(repository.backend, target, repository.limits, policy.read_back, is_dry_run)
    if not has_journal(repository):
        return copy
    state = JournalState.read(repository, is_strict=False)
    in_tier = {name.seq for name in repository.manifests.listing().names if _is_in_tier(repository, name, tier)}
    names = {*segments_of(state, {*in_tier, *pushed}), *state.journal.problems}
    if names and target is not None and not is_dry_run:
        begin_turn(repository, tier, target)
    copy.run(state.journal, names)
    return copy


def _is_in_tier(repository: Repository, name: ManifestName, tier: str) -> bool:
    """Whether all packs of a checkpoint are in this tier, so that its manifest is there, too."""
    try:
        return repository.manifests.tiers(repository.manifests.header(name)) == (tier,)
    except (FileNotFoundError, CorruptError, UnsupportedError):
        # No point is restored from it.
        return False


def _name_of_place(repository: Repository, address: str, tier: str | None) -> str:
    """Return the name of the tier at an address. A new tier is named only after its store was opened or created."""
    place = repository.tiers.new_place(address, name=tier) or backend_for(address)
    try:
        StoreCopy(repository, place).prepare()
    finally:
        place.close()
    return repository.tiers.name_for(address, name=tier)


def _members(repository: Repository, policy: PushPolicy) -> list[_Member]:
    """Return the planned action for each checkpoint. The newest ones stay, and those that are too young."""
    names = repository.manifests.listing().names
    kept_seqs = {name.seq for name in names[max(0, len(names) - policy.keep_local) :]} if policy.keep_local else set()
    members = []
    for name in names:
        try:
            if name.seq in kept_seqs:
                members.append(_Member(name, "keep", f"one of the newest {policy.keep_local}", {}))
            elif _is_young(repository, name, policy):
                members.append(_Member(name, "keep", "too young", {}))
            else:
                members.append(_member_of(name, repository.manifests.load(name)))
        except FileNotFoundError:
            # Dropped or replaced since it was listed; the next push sees it.
            continue
    return members


def _is_young(repository: Repository, name: ManifestName, policy: PushPolicy) -> bool:
    if policy.older_than_seconds is None:
        return False
    # A time in the future counts as young, because the clock may have jumped.
    return repository.clock.now_ns() - repository.manifests.header(name).time_ns < policy.older_than_seconds * 1e9


def _member_of(name: ManifestName, manifest: Manifest) -> _Member:
    tiers = sorted({pack.tier for pack in manifest.packs})
    here = {pack.pack_id: pack.nbytes for pack in manifest.packs if pack.tier == LOCAL_TIER}
    if not manifest.packs:
        return _Member(name, "keep", "has no packs", {})
    if LOST_TIER in tiers:
        return _Member(name, "keep", "some of its packs are lost", here)
    if not here:
        return _Member(name, "there", "in " + ", ".join(tiers), {})
    return _Member(name, "push", "", here)


def _nbytes_of(members: list[_Member]) -> int:
    packs: dict[PackId, int] = {}
    for member in members:
        packs.update(member.packs)
    return sum(packs.values())


def _report(
    repository: Repository, tier: str, address: str, members: list[_Member], done: dict[int, bool], *, is_dry_run: bool
) -> PushReport:
    entries = tuple(
        PushEntry(
            seq=member.name.seq,
            step=member.name.step,
            action=member.action,
            reason=member.reason,
            packs_nbytes=sum(member.packs.values()),
            is_done=done.get(member.name.seq, False),
        )
        for member in members
    )
    to_push = _nbytes_of([member for member in members if member.action == "push"])
    return PushReport(repository.run, tier, address, is_dry_run, entries, to_push, 0, 0)


class _Pusher:
    """Pushes checkpoints of one run to one tier."""

    def __init__(
        self,
        repository: Repository,
        tier: str,
        policy: PushPolicy,
        on_progress: Callable[[int, int], None] | None,
        total_nbytes: int,
    ) -> None:
        self._repository = repository
        self._tier = tier
        self._address = repository.tiers.address_of(tier)
        self._target = target = repository.tiers.open(tier)
        self._store = StoreCopy(repository, target)
        self._done_nbytes = 0
        self._total_nbytes = total_nbytes
        self._report_progress = on_progress or (lambda done, total: None)
        self._pack_check: IncomingPackCheck | None = None
        self._packs = PackCopy(
            repository, target, reads_back=policy.read_back, check_new=self._check, on_bytes=self._on_bytes
        )

    @property
    def copied(self) -> dict[PackId, int]:
        """Copied packs and their sizes."""
        return self._packs.copied

    def run(self, names: list[ManifestName]) -> dict[int, bool]:
        """Push these checkpoints. Return for each seq whether it was pushed."""
        if not names:
            return {}
        self._repository.manifests.make_folders()
        begin_turn(self._repository, self._tier, self._target)
        return {name.seq: self._push(name) for name in names}

    def _push(self, name: ManifestName) -> bool:
        for _ in range(_TRIES):
            try:
                # Load the current generation.
                manifest = load_whole(self._repository, name)
                if all(pack.tier != LOCAL_TIER for pack in manifest.packs):
                    return True
                self._copy(manifest)
                self._replace(manifest)
                return True
            except RelocatedError:
                self._skip_taken_generations(manifest)
            except FileNotFoundError:
                # Folders are created before files, so a missing one means that the file system was unmounted.
                self._repository.tiers.require_present(self._tier)
                raise
            except DroppedError as error:
                _log.warning("seq %d was deleted while it was being pushed: %s", name.seq, error.what)
                return False
            except _ReplacedError:
                continue
        raise ConflictError(
            f"seq {name.seq} was replaced several times while it was being pushed",
            where=self._repository.backend.root,
            todo="wait until a repack or another push has ended",
        )

    def _copy(self, manifest: Manifest) -> None:
        self._store.claim(manifest.header)
        self._pack_check = IncomingPackCheck(self._repository, manifest.header.name, manifest, copy=self._target)
        self._packs.run(manifest.packs)
        self._store.put_manifest(manifest)

    def _check(self, pack: PackRef, file: ReadFile, *, is_new: bool) -> None:
        assert self._pack_check is not None, "a checkpoint is being copied"
        self._pack_check.check(pack, file, is_new=is_new)

    def _skip_taken_generations(self, manifest: Manifest) -> None:
        """Publish here under a generation that is free there. This store was set back after an earlier push."""
        header = manifest.header
        generation = max(header.generation, self._store.highest_generation(header)) + 1
        replacement = replace(manifest, header=replace(header, generation=generation))
        # If another process published first, the caller loads the manifest again.
        with contextlib.suppress(ConflictError):
            finish_replacement(self._repository, replacement, self._repository.manifests.publish(replacement))

    def _replace(self, manifest: Manifest) -> None:
        """Publish the generation that names the tier. After that, the local packs are no longer needed for it."""
        if self._repository.tiers.address_of(self._tier) != self._address:
            raise ConflictError(
                f"the address of the tier {self._tier!r} was changed during the push",
                where=self._repository.backend.root,
                todo="check config.json; nothing was deleted here",
            )
        # If the file system was unmounted, the copies are in the empty mount point.
        self._repository.tiers.require_present(self._tier)
        header = manifest.header
        replacement = replace(
            manifest,
            header=replace(header, generation=header.generation + 1),
            packs=tuple(replace(pack, tier=self._tier) for pack in manifest.packs),
        )
        try:
            name = self._repository.manifests.publish(replacement)
        except ConflictError as error:
            raise _ReplacedError from error
        # A concurrent forget_tier may not have seen this manifest, so make sure that the tier still has its name.
        self._repository.tiers.name_for(self._address, name=self._tier)
        finish_replacement(self._repository, replacement, name)

    def _on_bytes(self, nbytes: int) -> None:
        self._done_nbytes += nbytes
        self._report_progress(min(self._done_nbytes, self._total_nbytes), self._total_nbytes)


class _ReplacedError(Exception):
    """Another process has published the next generation first."""
