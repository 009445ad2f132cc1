"""Ask a tier again for what this store is about to let go of, because manifests say that it lies there.

A push has seen every pack in the tier before it let a manifest say so. That may be long ago when the copies here are
freed, and a bucket has other masters: only what is seen there again may go here.

Invariants:
- A pack is proven only when its size and the digest of its directory were just read there, and the checkpoint that a
  push has put there has its manifest.
- A tier that does not answer proves nothing, and is no damage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ckstore.errors import ChecksumError, CkstoreError, CorruptError, MissingChunkError
from ckstore.format import paths
from ckstore.format.location import PackRef
from ckstore.format.pack import TAIL_NBYTES, decode_tail
from ckstore.format.paths import ManifestName
from ckstore.hashing import PackId
from ckstore.io.backend import Backend, map_concurrent
from ckstore.store.chunk_index import LOCAL_TIER, LOST_TIER
from ckstore.store.reachability import Marked, Marker
from ckstore.store.repository import Repository
from ckstore.store.tier_owner import require_owner

NOT_OURS = "someone else writes there: find out who, and remove what is not ours; nothing here was let go of"


@dataclass(frozen=True, slots=True)
class Unproven:
    """A pack here that a tier should have, and that was not seen there.

    Attributes:
        pack_id: The pack.
        tier: Name of the tier.
        problem: What was found there instead.
        is_damage: The tier has answered, and does not have it; else it did not answer, and may do so another time.
    """

    pack_id: PackId
    tier: str
    problem: str
    is_damage: bool


def see_pack(repository: Repository, target: Backend, pack: PackRef) -> None:
    """See that a pack lies in a place, with its size and the digest of its directory.

    Raises:
        FileNotFoundError: There is none.
        CorruptError: It is another one.
    """
    name = paths.pack_name(pack.pack_id)
    where = target.location_of(name)
    file = target.open_read(name)
    try:
        if file.nbytes != pack.nbytes:
            raise CorruptError(f"a pack of {pack.nbytes} bytes has {file.nbytes} there", where=where, todo=NOT_OURS)
        tail = decode_tail(
            file.read_at(file.nbytes - TAIL_NBYTES, TAIL_NBYTES),
            pack_nbytes=pack.nbytes,
            store_id=repository.store_id,
            pack_id=pack.pack_id,
            limits=repository.limits,
            where=where,
        )
        if tail.directory_digest != pack.directory_digest:
            raise ChecksumError("a pack there has another directory", where=where, todo=NOT_OURS)
    finally:
        file.close()


def unproven_packs(
    repository: Repository,
    marker: Marker,
    manifests: Iterable[Marked],
    pack_ids: Collection[PackId],
    waits: Mapping[str, str] = MappingProxyType({}),
) -> dict[PackId, Unproven]:
    """Return those of these packs that manifests say are in a tier, and that cannot be seen there now.

    Args:
        repository: The store.
        marker: The one that has read the manifests.
        manifests: Those that stay.
        pack_ids: Packs whose bytes here are about to go.
        waits: Tiers that are known not to answer, and what they said; they are not asked.
    """
    wanted, refs = set(pack_ids), marker.numbers.refs
    numbers = {n for n, ref in enumerate(refs) if ref.pack_id in wanted and ref.tier not in (LOCAL_TIER, LOST_TIER)}
    if not numbers:
        return {}
    named: dict[str, dict[PackRef, set[ManifestName]]] = {}
    for marked in manifests:
        for number in numbers.intersection(marked.packs):
            named.setdefault(refs[number].tier, {}).setdefault(refs[number], set()).add(marked.name)
    found: dict[PackId, Unproven] = {}
    for tier, packs in sorted(named.items()):
        for unproven in _unproven_in(repository, tier, packs, waits.get(tier)):
            # What has answered says more than what has not.
            if unproven.pack_id not in found or unproven.is_damage:
                found[unproven.pack_id] = unproven
    return found


def require_proof(unproven: Iterable[Unproven]) -> None:
    """Raise where a tier lacks what it should have; one that does not answer is no damage.

    Raises:
        CorruptError: A tier lacks packs that manifests say are there; what lies here of them is kept.
    """
    damaged = [each for each in unproven if each.is_damage]
    if damaged:
        raise CorruptError(
            f"{len(damaged)} packs stay here, since the tier {damaged[0].tier!r} does not have what was pushed there: "
            f"{damaged[0].problem}",
            todo="find out who changes it; `ckstore pull` makes what is here count again, then push anew",
            pack_ids=sorted(each.pack_id.hex() for each in damaged),
        )


def _unproven_in(
    repository: Repository, tier: str, packs: dict[PackRef, set[ManifestName]], silence: str | None
) -> Iterable[Unproven]:
    if silence is not None:
        return [Unproven(pack.pack_id, tier, silence, is_damage=False) for pack in packs]
    try:
        target = repository.tiers.open(tier)
        # Its owner keeps there what it needs itself, and knows nothing of a copy's needs.
        require_owner(repository, tier, target)
        gone = _manifests_gone(target, set().union(*packs.values()))
    except CkstoreError as error:
        return [Unproven(pack.pack_id, tier, str(error), is_damage=False) for pack in packs]

    def judge(pack: PackRef) -> Unproven | None:
        try:
            see_pack(repository, target, pack)
        except (FileNotFoundError, MissingChunkError):
            problem = f"{target.location_of(paths.pack_name(pack.pack_id))} is gone"
            return Unproven(pack.pack_id, tier, problem, is_damage=True)
        except CkstoreError as error:
            return Unproven(pack.pack_id, tier, str(error), is_damage=isinstance(error, CorruptError))
        for name in sorted(packs[pack] & gone):
            problem = f"the manifest of seq {name.seq} of run {name.run} is gone from {target.root}"
            return Unproven(pack.pack_id, tier, problem, is_damage=True)
        return None

    return [unproven for unproven in map_concurrent(target, judge, packs) if unproven is not None]


def _manifests_gone(target: Backend, names: Collection[ManifestName]) -> set[ManifestName]:
    """Return the checkpoints that were pushed there, as their claims say, and have no manifest there any more."""
    gone = set()
    for run in {name.run for name in names}:
        claims = map(paths.parse_claim_file, target.list_names(paths.claims_folder(run)))
        claimed = {claim.seq for claim in claims if claim is not None and claim.kind == "claim"}
        files = target.list_names(paths.manifests_folder(run))
        there = {name.seq for file in files if (name := paths.parse_manifest_file(run, file)) is not None}
        # One that was made here since, by a rewind or an undelete, has never been there.
        gone |= {name for name in names if name.run == run and name.seq in claimed - there}
    return gone
