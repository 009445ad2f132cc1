"""The story of a push: move old checkpoints of a run to another tier, one after another, the oldest first.

For each: take its seq there, copy its packs and see them there, put its manifest and read it back, and only then
replace the manifest here by its next generation, which says that its packs lie in that tier. What nobody needs here any
more is then freed by an ordinary collection.

Invariants:
- Between any two steps every checkpoint can be restored, from here or from there.
- Nothing here is let go of before all of the checkpoint was seen there.
- Done twice, at once or after a crash, a push does what is left to do.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ckstore.errors import ConflictError, UsageError
from ckstore.format.manifest import Manifest, PackRef
from ckstore.format.paths import ManifestName
from ckstore.hashing import PackId
from ckstore.io.backend import ReadFile
from ckstore.io.url import backend_for
from ckstore.store.chunk_index import LOCAL_TIER, LOST_TIER
from ckstore.store.manifests import DroppedError
from ckstore.store.refs import load_whole
from ckstore.store.repository import Repository, finish_replacement
from ckstore.store.tier_checks import begin_turn
from ckstore.tiers.copy import PackCopy, RelocatedError, StoreCopy
from ckstore.tiers.verify_copy import IncomingPackCheck

_log = logging.getLogger("ckstore")

Action = Literal["push", "keep", "there"]

_TRIES = 5


@dataclass(frozen=True, slots=True)
class PushPolicy:
    """Which checkpoints of a run go to another tier.

    Args:
        keep_local: So many of the newest stay here.
        older_than_seconds: Only what is older goes; None: age does not matter.
        read_back: Read every pack there whole before anything is let go of.

    Raises:
        UsageError: A field has a value that it cannot have.
    """

    keep_local: int = 1
    older_than_seconds: float | None = None
    read_back: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.keep_local, bool) or not isinstance(self.keep_local, int) or self.keep_local < 0:
            raise UsageError("keep_local counts checkpoints", where=f"PushPolicy(keep_local={self.keep_local!r})")
        if self.older_than_seconds is not None and not self.older_than_seconds >= 0:
            raise UsageError(
                "older_than is not negative", where=f"PushPolicy(older_than_seconds={self.older_than_seconds!r})"
            )


@dataclass(frozen=True, slots=True)
class PushEntry:
    """One checkpoint of a push.

    Attributes:
        seq: Its number in the run.
        step: The trainer's step.
        action: ``"push"``, ``"keep"`` here, or ``"there"``: in a tier already.
        reason: Why it does not go, in a few words.
        packs_nbytes: Bytes of the packs here that it names; other checkpoints may name them too.
        is_done: Whether it was pushed.
    """

    seq: int
    step: int
    action: Action
    reason: str
    packs_nbytes: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push planned or did, the oldest checkpoint first.

    Attributes:
        run: The run.
        tier: Name of the tier; empty where a dry run found none yet.
        address: Where it is.
        is_dry_run: Nothing was changed.
        entries: Every checkpoint of the run.
        bytes_to_push: Bytes of the packs of what goes, each once.
        bytes_copied: Bytes of packs that were not there yet.
        packs_copied: How many.
    """

    run: str
    tier: str
    address: str
    is_dry_run: bool
    entries: tuple[PushEntry, ...]
    bytes_to_push: int
    bytes_copied: int
    packs_copied: int

    @property
    def pushed(self) -> tuple[PushEntry, ...]:
        """Entries that went, or would go."""
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
    """Plan, and unless it is a dry run, act.

    Args:
        repository: The store.
        address: Where checkpoints go: a bucket, or an absolute path.
        policy: Which of them.
        tier: What that place is called, if it has no name yet.
        dry_run: Only plan.
        on_progress: Called with bytes of packs done, and in all.

    Raises:
        UsageError: Another store lies there.
        UnreachableError: Checkpoints are there already, and the place is empty: it is not mounted, perhaps.
        ConflictError: This folder is a copy of the store that owns the tier; or a checkpoint there is another one,
            or one here is replaced again and again.
        CorruptError: A pack here is damaged, or one there is not ours.
        BackendError: The place does not answer. Whatever is raised, every checkpoint is whole, here or there.
    """
    repository.require_same_store()
    members = _members(repository, policy)
    total = _nbytes_of([member for member in members if member.action == "push"])
    if dry_run:
        known = {place: name for name, place in repository.tiers.addresses().items()}
        return _report(repository, known.get(address, tier or ""), address, members, {}, is_dry_run=True)
    name = _name_of_place(repository, address, tier)
    pusher = _Pusher(repository, name, policy, on_progress, total)
    done = pusher.run([member.name for member in members if member.action == "push"])
    report = _report(repository, name, repository.tiers.address_of(name), members, done, is_dry_run=False)
    copied = pusher.copied
    return replace(report, bytes_copied=sum(copied.values()), packs_copied=len(copied))


def _name_of_place(repository: Repository, address: str, tier: str | None) -> str:
    """Return the name of the tier at an address; a new one gets it only when it was reached, and is or may be ours."""
    place = repository.tiers.new_place(address, name=tier) or backend_for(address)
    try:
        StoreCopy(repository, place).prepare()
    finally:
        place.close()
    return repository.tiers.name_for(address, name=tier)


def _members(repository: Repository, policy: PushPolicy) -> list[_Member]:
    """Decide what goes: the newest stay, and what is too young."""
    names = repository.manifests.listing().names
    kept = {name.seq for name in names[max(0, len(names) - policy.keep_local) :]} if policy.keep_local else set()
    members = []
    for name in names:
        try:
            if name.seq in kept:
                members.append(_Member(name, "keep", f"one of the newest {policy.keep_local}", {}))
            elif _is_young(repository, name, policy):
                members.append(_Member(name, "keep", "too young", {}))
            else:
                members.append(_judged(name, repository.manifests.load(name)))
        except FileNotFoundError:
            # Dropped or replaced since it was listed; the next push sees it.
            continue
    return members


def _is_young(repository: Repository, name: ManifestName, policy: PushPolicy) -> bool:
    if policy.older_than_seconds is None:
        return False
    # One of the future is young, too: a clock that jumped is no reason to let go of anything.
    return repository.clock.now_ns() - repository.manifests.header(name).time_ns < policy.older_than_seconds * 1e9


def _judged(name: ManifestName, manifest: Manifest) -> _Member:
    tiers = sorted({pack.tier for pack in manifest.packs})
    here = {pack.pack_id: pack.nbytes for pack in manifest.packs if pack.tier == LOCAL_TIER}
    if not manifest.packs:
        return _Member(name, "keep", "it has no packs", {})
    if LOST_TIER in tiers:
        return _Member(name, "keep", "parts of it are lost", here)
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
    """Pushes checkpoints to one tier."""

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
        self._tell = on_progress or (lambda done, total: None)
        self._target = target
        self._arrivals: IncomingPackCheck | None = None
        self._packs = PackCopy(
            repository, target, reads_back=policy.read_back, check_new=self._check, on_bytes=self._on_bytes
        )

    @property
    def copied(self) -> dict[PackId, int]:
        """Packs that were not there."""
        return self._packs.copied

    def run(self, names: list[ManifestName]) -> dict[int, bool]:
        """Push these checkpoints; return which were, by seq."""
        if not names:
            return {}
        self._repository.manifests.make_folders()
        begin_turn(self._repository, self._tier, self._target)
        return {name.seq: self._push(name) for name in names}

    def _push(self, name: ManifestName) -> bool:
        for _ in range(_TRIES):
            try:
                # Of whatever generation it is by now.
                manifest = load_whole(self._repository, name)
                if all(pack.tier != LOCAL_TIER for pack in manifest.packs):
                    return True
                self._copy(manifest)
                self._replace(manifest)
                return True
            except RelocatedError:
                self._step_over(manifest)
            except FileNotFoundError:
                # A folder is made before anything is put into it: this one went away with its file system.
                self._repository.tiers.require_present(self._tier)
                raise
            except DroppedError as error:
                _log.warning("seq %d was dropped while it was pushed: %s", name.seq, error.what)
                return False
            except _ReplacedError:
                continue
        raise ConflictError(
            f"seq {name.seq} is replaced again and again while it is pushed",
            where=self._repository.backend.root,
            todo="wait until a repack or another push has ended",
        )

    def _copy(self, manifest: Manifest) -> None:
        self._store.claim(manifest.header)
        self._arrivals = IncomingPackCheck(self._repository, manifest.header.name, manifest, copy=self._target)
        self._packs.run(manifest.packs)
        self._store.put_manifest(manifest)

    def _check(self, pack: PackRef, file: ReadFile, *, is_new: bool) -> None:
        assert self._arrivals is not None, "a checkpoint is being copied"
        self._arrivals.check(pack, file, is_new=is_new)

    def _step_over(self, manifest: Manifest) -> None:
        """Take a generation here that is free there: this store had gone on there, and was set back since."""
        header = manifest.header
        generation = max(header.generation, self._store.highest_generation(header)) + 1
        replacement = replace(manifest, header=replace(header, generation=generation))
        # If another was first, it is looked at again.
        with contextlib.suppress(ConflictError):
            finish_replacement(self._repository, replacement, self._repository.manifests.publish(replacement))

    def _replace(self, manifest: Manifest) -> None:
        """Say here where the checkpoint lies now; from then on nothing here is needed for it."""
        if self._repository.tiers.address_of(self._tier) != self._address:
            raise ConflictError(
                f"the tier {self._tier!r} was given another address meanwhile",
                where=self._repository.backend.root,
                todo="see config.json; nothing here was let go of",
            )
        # What was copied after its file system went away lies in a bare mount point.
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
        # One who has forgotten the tier meanwhile may not have seen this.
        self._repository.tiers.name_for(self._address, name=self._tier)
        finish_replacement(self._repository, replacement, name)

    def _on_bytes(self, nbytes: int) -> None:
        self._done_nbytes += nbytes
        self._tell(min(self._done_nbytes, self._total_nbytes), self._total_nbytes)


class _ReplacedError(Exception):
    """Someone else has published the next generation first."""
