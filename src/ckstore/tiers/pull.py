"""The story of a pull: bring checkpoints of a run back from other tiers, one after another, the newest first.

For each: copy the packs that are not here, durably, under drafts; check every byte of these before they get their
names; then replace the manifest by its next generation, which says that they are local. What lies in the tier stays
there.

Invariants:
- Between any two steps every checkpoint can be restored.
- One that cannot be brought back keeps no other from it; which those were is told at the end.
- A pack has its name here only when all its bytes are durable, and were found to be those that were committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ckstore.errors import ConflictError, CorruptError, NotFoundError
from ckstore.format.manifest import Manifest, PackRef
from ckstore.format.paths import ManifestName
from ckstore.hashing import PackId
from ckstore.io.backend import ReadFile
from ckstore.store.chunk_index import LOCAL_TIER, LOST_TIER
from ckstore.store.manifests import DroppedError
from ckstore.store.refs import Reference, load_whole, resolve
from ckstore.store.repository import Repository, finish_replacement
from ckstore.tiers.copy import PackCopy
from ckstore.tiers.verify_copy import IncomingPackCheck, partial_copy_error

_TRIES = 5


@dataclass(frozen=True, slots=True)
class PullEntry:
    """One checkpoint that lay, in part or whole, in other tiers.

    Attributes:
        seq: Its number in the run.
        step: The trainer's step.
        tiers: Where it lay, besides here.
        packs_nbytes: Bytes of its packs there; other checkpoints may name them too.
        is_done: Whether it is here now.
        problem: Why it is not: what lies there is not what was pushed; empty otherwise.
    """

    seq: int
    step: int
    tiers: tuple[str, ...]
    packs_nbytes: int
    is_done: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull planned or did, the newest checkpoint first.

    Attributes:
        run: The run.
        is_dry_run: Nothing was changed.
        entries: Every checkpoint asked for that did not lie here.
        bytes_to_pull: Bytes of their packs in other tiers, each once.
        bytes_copied: Bytes of packs that were not here.
        packs_copied: How many.
    """

    run: str
    is_dry_run: bool
    entries: tuple[PullEntry, ...]
    bytes_to_pull: int
    bytes_copied: int
    packs_copied: int


def pull(
    repository: Repository,
    refs: Sequence[Reference] | None,
    *,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> PullReport:
    """Plan, and unless it is a dry run, act.

    Args:
        repository: The store.
        refs: Which checkpoints; None: all of the run.
        dry_run: Only plan.
        on_progress: Called with bytes of packs done, and in all.

    Raises:
        NotFoundError: No such checkpoint.
        UnreachableError: It is in a tier that cannot be reached.
        CorruptError: Of some, a pack there is not what was pushed, or the manifest here is damaged: these are as they
            were, and all others are here. Its ``checkpoints`` names them, its ``report`` tells of all.
        CapacityError: The disk is full; what was brought back so far is here.
        BackendError: A server does not answer.
    """
    repository.require_same_store()
    listed = repository.manifests.listing().names
    names = list(listed) if refs is None else [resolve(repository, ref) for ref in refs]
    away: dict[ManifestName, dict[PackId, int]] = {}
    tiers: dict[ManifestName, tuple[str, ...]] = {}
    damaged: dict[ManifestName, CorruptError] = {}
    for name in sorted(set(names), reverse=True):
        try:
            manifest = _loaded(repository, name, is_asked_for=refs is not None)
        except CorruptError as error:
            damaged[name] = error
            continue
        packs = [] if manifest is None else [pack for pack in manifest.packs if _is_away(pack.tier)]
        if packs:
            away[name] = {pack.pack_id: pack.nbytes for pack in packs}
            tiers[name] = tuple(sorted({pack.tier for pack in packs}))
    total = sum({pack_id: nbytes for packs in away.values() for pack_id, nbytes in packs.items()}.values())
    puller = _Puller(repository, on_progress, total)
    entries = []
    for name, packs_away in away.items():
        is_done = False
        try:
            is_done = not dry_run and puller.pull(name)
        except CorruptError as error:
            damaged[name] = error
        problem = str(damaged[name]) if name in damaged else ""
        entries.append(PullEntry(name.seq, name.step, tiers[name], sum(packs_away.values()), is_done, problem))
    copied = puller.copied
    report = PullReport(repository.run, dry_run, tuple(entries), total, sum(copied.values()), len(copied))
    if damaged:
        raise partial_copy_error("pulled", damaged, report)
    return report


def _loaded(repository: Repository, name: ManifestName, *, is_asked_for: bool) -> Manifest | None:
    try:
        return repository.manifests.load(name)
    except FileNotFoundError:
        if is_asked_for:
            raise NotFoundError(
                f"seq {name.seq} was dropped or replaced while it was read",
                where=repository.backend.root,
                todo="look again",
            ) from None
        return None


def _is_away(tier: str) -> bool:
    return tier not in (LOCAL_TIER, LOST_TIER)


class _Puller:
    """Brings checkpoints back."""

    def __init__(
        self, repository: Repository, on_progress: Callable[[int, int], None] | None, total_nbytes: int
    ) -> None:
        self._repository = repository
        self._done_nbytes = 0
        self._total_nbytes = total_nbytes
        self._tell = on_progress or (lambda done, total: None)
        self._packs = PackCopy(repository, repository.backend, check=self._check, on_bytes=self._on_bytes)
        self._arrivals: IncomingPackCheck | None = None

    @property
    def copied(self) -> dict[PackId, int]:
        """Packs that were not here."""
        return self._packs.copied

    def pull(self, name: ManifestName) -> bool:
        """Bring one back; return whether it is here now, which it is not where it was dropped meanwhile."""
        for _ in range(_TRIES):
            try:
                if self._pull_once(name):
                    return True
            except DroppedError:
                return False
        raise ConflictError(
            f"seq {name.seq} is replaced again and again while it is pulled",
            where=self._repository.backend.root,
            todo="wait until a repack or a push has ended",
        )

    def _pull_once(self, name: ManifestName) -> bool:
        """Bring one back; return False where someone else has replaced it meanwhile."""
        manifest = load_whole(self._repository, name)
        away = [pack for pack in manifest.packs if _is_away(pack.tier)]
        if not away:
            return True
        self._arrivals = IncomingPackCheck(self._repository, name, manifest)
        self._packs.run(away)
        header = manifest.header
        replacement = replace(
            manifest,
            header=replace(header, generation=header.generation + 1),
            packs=tuple(replace(pack, tier=LOCAL_TIER) if _is_away(pack.tier) else pack for pack in manifest.packs),
        )
        try:
            published = self._repository.manifests.publish(replacement)
        except ConflictError:
            return False
        finish_replacement(self._repository, replacement, published)
        return True

    def _check(self, pack: PackRef, file: ReadFile, *, is_new: bool) -> None:
        assert self._arrivals is not None, "a checkpoint is being pulled"
        self._arrivals.check(pack, file, is_new=is_new)

    def _on_bytes(self, nbytes: int) -> None:
        self._done_nbytes += nbytes
        self._tell(min(self._done_nbytes, self._total_nbytes), self._total_nbytes)
