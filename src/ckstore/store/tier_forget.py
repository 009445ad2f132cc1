"""Forget a tier that nothing names: one that was mistyped, or that is not wanted any more.

Invariants:
- What names a tier can find it: it is looked for before the tier is forgotten, and once more after that. A push
  publishes what names the tier first, and sees to its address second; one of the two sees the other.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckstore.errors import ConflictError, NotFoundError, UnreachableError, UsageError
from ckstore.format import layout
from ckstore.io.backend import Backend
from ckstore.store.gc_marks import UNREADABLE, Marker
from ckstore.store.parts import Parts
from ckstore.store.tier_owner import forget_turns


def forget_tier(parts: Parts, tier: str) -> str:
    """Forget a tier, and return where it was; what lies there stays.

    Args:
        parts: The store.
        tier: Its name.

    Raises:
        NotFoundError: There is no such tier.
        UsageError: Manifests name it.
        ConflictError: A manifest cannot be read, and may name it; or one names it since it was looked for.
    """
    address, where = parts.tiers.addresses().get(tier), parts.backend.location_of(layout.CONFIG_FILE)
    if address is None:
        known = ", ".join(parts.tiers.addresses()) or "none"
        raise NotFoundError(f"there is no tier {tier!r}", where=where, todo=f"tiers there are: {known}")
    user = next(_users(parts, tier), None)
    if user is not None:
        raise UsageError(
            f"{user} names the tier {tier!r}",
            where=address,
            todo="`ckstore pull` brings checkpoints back from there, and `ckstore trash purge` frees what was replaced",
        )
    parts.tiers.forget(tier)
    user = next(_users(parts, tier), None)
    if user is not None:
        parts.tiers.name_for(address, name=tier)
        raise ConflictError(f"{user} has come to name the tier {tier!r}, which stays", where=address, todo="try again")
    forget_turns(parts, tier)
    return address


def require_unused(parts: Parts, place: Backend) -> None:
    """Check, of a place where nothing is, that no checkpoint is said to be there; then it may be made anew.

    Raises:
        UnreachableError: One is; a new store there would pass for the one that holds it.
        ConflictError: A manifest cannot be read, and may say so.
    """
    tier = parts.tiers.name_at(place.root)
    user = None if tier is None else next(_users(parts, tier), None)
    if user is not None:
        raise UnreachableError(
            f"{user} is in the tier {tier!r}, and nothing is there",
            where=place.root,
            todo="mount its file system, or bring back what was there; then try again",
        )
    if tier is not None:
        forget_turns(parts, tier)


def _users(parts: Parts, tier: str) -> Iterator[str]:
    """Yield what names a tier, in words; manifests in the trash can be brought back, and count."""
    marker = Marker(parts)
    look = marker.look()
    if look.unreadable:
        bad = look.unreadable[0]
        raise ConflictError(
            f"a manifest cannot be read, and may name the tier {tier!r}: {bad.problem}",
            where=parts.backend.location_of(bad.path),
            todo="`ckstore verify` tells more",
        )
    for marked in look.manifests.values():
        if any(pack.tier == tier for pack in marker.packs_of(marked)):
            yield f"seq {marked.name.seq} (step {marked.name.step}) of run {marked.name.run!r}"
    if any(tier.encode() in content for content in look.quarantined):
        yield "a manifest in quarantine"
    for folder in parts.trash.contents():
        for trashed in folder.manifests:
            try:
                marked, _ = marker.read(trashed.name, trashed.path)
            except FileNotFoundError:
                # Purged or brought back meanwhile; brought back, it is seen in place by whoever looks again.
                continue
            except UNREADABLE as error:
                yield f"what cannot be read in the trash ({error.what}) perhaps"
                continue
            if any(pack.tier == tier for pack in marker.packs_of(marked)):
                yield f"seq {trashed.name.seq} of run {trashed.name.run!r}, in the trash,"
