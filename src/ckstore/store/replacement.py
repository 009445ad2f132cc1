"""Replace a checkpoint's manifest by its next generation: the same seq, step and state, in another form or place.

The steps are those of Replace in docs/FORMAT.md section 10: new packs are durable, the manifest of the next generation
is published without a claim, and then what is here.

Invariants:
- A lower generation is moved only when every pack of the higher one was seen in place.
- A drop mark wins: what was published is withdrawn, and the checkpoint stays dropped.
"""

from __future__ import annotations

from ckstore.errors import BackendError, CapacityError, ConflictError, UsageError
from ckstore.format.manifest import Manifest
from ckstore.format.paths import ManifestName
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.intents import require
from ckstore.store.manifests import DroppedError
from ckstore.store.repository import Repository


def settle(repository: Repository, manifest: Manifest, name: ManifestName, *, intent: str | None = None) -> None:
    """See every pack that a published replacement names, look for a drop, and move the lower generations to the trash.

    Args:
        repository: The store and its run.
        manifest: What was published.
        name: Its name.
        intent: The path of the intent that has kept tags away from it; None: it may carry tags.

    Raises:
        ConflictError: Packs or the intent vanished meanwhile; the replacement is withdrawn.
        DroppedError: The checkpoint was dropped meanwhile; its drop stands.
    """
    header, manifests = manifest.header, repository.manifests
    gone = repository.lost_packs(manifest.packs)
    if gone:
        _withdraw(repository, name)
        raise ConflictError(
            f"{len(gone)} packs of seq {header.seq} vanished while its manifest was replaced; it is as it was",
            where=repository.backend.root,
            todo="find out who removes files from the store, then plan again",
            pack_ids=sorted(pack_id.hex() for pack_id in gone),
        )
    if manifests.is_marked(header.seq):
        # Written first, looked at second: a drop that did not see this generation has left its mark by now.
        manifests.withdraw(name)
        raise DroppedError(f"seq {header.seq} was dropped while it was replaced", where=repository.backend.root)
    if intent is not None:
        # As long as it was in place after the publication, every tag that was accepted has come after that too.
        try:
            require(repository.backend, intent)
        except ConflictError:
            _withdraw(repository, name)
            raise
    manifests.move_lower_to_trash(name)


def _withdraw(repository: Repository, name: ManifestName) -> None:
    """Take back a replacement, if what it replaces is still in place."""
    if any(lower.seq == name.seq for lower in repository.manifests.listing().lower):
        # Without one it is all that there is of the checkpoint: gc has moved what it replaced.
        repository.manifests.withdraw(name)


def finish_replacements(repository: Repository, waits: dict[str, str] | None = None) -> int:
    """Move lower generations that a replacement left in place when it was interrupted; return how many.

    Args:
        repository: The store and its run.
        waits: Tiers that do not answer, and what they said. Given: what depends on such a tier stays as it is, and
            tiers that are found to be silent are added.

    Raises:
        BackendError: A tier does not answer, and ``waits`` was not given.
    """
    listing = repository.manifests.listing()
    highest = {name.seq: name for name in listing.names}
    count = 0
    for seq in sorted({name.seq for name in listing.lower} & set(highest)):
        name = highest[seq]
        try:
            manifest = repository.manifests.load(name)
        except FileNotFoundError:
            continue
        tiers = sorted({pack.tier for pack in manifest.packs} - {LOCAL_TIER})
        if waits is not None and not waits.keys().isdisjoint(tiers):
            continue
        try:
            lost = repository.lost_packs(manifest.packs)
        except (BackendError, CapacityError, UsageError) as error:
            if waits is None or not tiers:
                raise
            waits |= dict.fromkeys(tiers, str(error))
            continue
        if not lost:
            count += repository.manifests.move_lower_to_trash(name)
    return count
