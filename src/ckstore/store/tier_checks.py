"""Which folder owns a tier: of a store and its copies, one may change what is there.

A copy of a store has the same identity and names the same tiers. What it drops would be removed from a tier although
the original needs it. So the store has a record of its own (``home.json``), which says where it was made, and each tier
has one (``owner.json``), which says whose it is.

Invariants:
- Who pushes to a tier, collects there, or frees what lies there too, has been found to be its owner.
- A folder whose ``home.json`` was made in another place is a copy; it changes no tier until a person has said which of
  the two it is.
- Each change of a tier begins with a new turn, noted here before it is noted there. A store that was set back to an
  older state does not know the tier's turn, and counts as a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ckstore.config import is_name
from ckstore.errors import (
    ChecksumError,
    CkstoreError,
    ConflictError,
    CorruptError,
    MissingChunkError,
    UnreachableError,
)
from ckstore.format import paths
from ckstore.format.location import PackRef
from ckstore.format.pack import TAIL_NBYTES, decode_tail
from ckstore.format.paths import ManifestName
from ckstore.format.records import RECORD_NBYTES_MAX, HomeRecord, OwnerRecord, TierTurns, decode_record, encode_record
from ckstore.hashing import PackId, new_token
from ckstore.io.backend import Backend, map_concurrent
from ckstore.store.chunk_index import LOCAL_TIER, LOST_TIER
from ckstore.store.reachability import MarkedManifest, Marker
from ckstore.store.repository import Repository
from ckstore.store.small_files import put_small, replace_small
from ckstore.store.store_config import replace_record

TURNS_MAX = 16
"""Turns that a store remembers of each tier: as many pushes may run at the same time."""

_TRIES = 20

_ADOPT = (
    "run `ckstore adopt --as-original` if this folder is the original or takes its place, or `ckstore adopt --as-new` "
    "if both are kept"
)


def place_of(backend: Backend) -> str:
    """Return what tells a folder from its copies: they have other inodes; a bucket is told by its address."""
    info = backend.stat(paths.MANIFESTS_FOLDER)
    return f"inode {info.inode}" if info is not None and info.inode else backend.root


def require_owner(repository: Repository, tier: str, target: Backend) -> None:
    """Check that this folder owns a tier; one that nobody owns yet, as older versions left it, is anybody's.

    Raises:
        ConflictError: This folder is a copy, or was set back; or another one owns the tier.
        UnreachableError: Another copy of the store is where the tier was.
    """
    home, owner = _home(repository.backend), _owner(target)
    if home is not None:
        _require_original(repository, home)
        turns = home.tiers.get(tier)
        if turns is not None and (owner is None or owner.tier_id != turns.tier_id):
            raise UnreachableError(
                f"where the tier {tier!r} was there is another copy of this store",
                where=target.root,
                todo="see config.json, and links and mounts on the way there",
            )
    if owner is None:
        return
    if home is None or owner.home_id != home.home_id:
        raise ConflictError(
            f"the tier {tier!r} is owned by another folder of this store",
            where=target.root,
            todo=f"push elsewhere, or {_ADOPT}",
        )
    if tier in home.tiers and owner.turn not in home.tiers[tier].turns:
        raise ConflictError(
            f"this store was set back to a state older than what is in the tier {tier!r}",
            where=repository.backend.root,
            todo=_ADOPT,
        )


def begin_turn(repository: Repository, tier: str, target: Backend) -> None:
    """Begin to change a tier: check that this folder owns it, and make it the owner where it has none.

    Raises:
        ConflictError: As by ``require_owner``.
        UnreachableError: As by ``require_owner``.
    """
    require_owner(repository, tier, target)
    made = HomeRecord(home_id=new_token(), place=place_of(repository.backend))
    home = _change_home(repository.backend, lambda before: before or made)
    owner = _owner(target)
    if owner is None:
        owner = OwnerRecord(home_id=home.home_id, tier_id=new_token(), turn=new_token())
        with contextlib.suppress(FileExistsError):
            put_small(target, paths.OWNER_FILE, encode_record(owner))
        # Of two first pushes, both take what the first one has written.
        owner = _owner(target) or owner
    tier_id, known_turn, turn = owner.tier_id, owner.turn, new_token()

    def with_turn(before: HomeRecord | None) -> HomeRecord:
        known = before or home
        turns = known.tiers[tier].turns if tier in known.tiers else (known_turn,)
        # The turn that is in the tier is never forgotten: any number of turns may fail before they are there.
        later = [each for each in turns if each != known_turn][2 - TURNS_MAX :]
        noted = TierTurns(tier_id=tier_id, turns=(known_turn, *later, turn))
        return HomeRecord(home_id=known.home_id, place=known.place, tiers={**known.tiers, tier: noted})

    _change_home(repository.backend, with_turn)
    owner = OwnerRecord(home_id=home.home_id, tier_id=tier_id, turn=turn)
    replace_small(target, paths.OWNER_FILE, encode_record(owner))


def forget_turns(repository: Repository, tier: str) -> None:
    """Forget what is known of a tier that nothing is in, so that its name may get another place."""
    home = _home(repository.backend)
    if home is None or tier not in home.tiers:
        return
    made = home

    def without(before: HomeRecord | None) -> HomeRecord:
        known = before or made
        kept = {name: turns for name, turns in known.tiers.items() if name != tier}
        return HomeRecord(home_id=known.home_id, place=known.place, tiers=kept)

    _change_home(repository.backend, without)


def adopt(repository: Repository, *, is_original: bool) -> dict[str, str]:
    """Say which of two copies of a store this folder is; return the tiers that it owns now, and where they are.

    Args:
        repository: The store.
        is_original: It owns all tiers of ``config.json`` from now on, and any other folder none. False: it owns none of
            them; it can read from them as long as their owner keeps what is there, and push to other places.

    Raises:
        UnreachableError: A tier cannot be reached; nothing was changed.
    """
    repository.require_same_store()
    addresses = repository.tiers.addresses() if is_original else {}
    places = {tier: repository.tiers.open(tier) for tier in addresses}
    for target in places.values():
        _keep_what_is_unknown(repository, target)
    owners = {tier: _owner(target) for tier, target in places.items()}
    ids = {tier: new_token() if owner is None else owner.tier_id for tier, owner in owners.items()}
    turns = {tier: TierTurns(tier_id=tier_id, turns=(new_token(),)) for tier, tier_id in ids.items()}
    home = HomeRecord(home_id=new_token(), place=place_of(repository.backend), tiers=turns)
    _change_home(repository.backend, lambda before: home)
    for tier, target in places.items():
        owner = OwnerRecord(home_id=home.home_id, tier_id=ids[tier], turn=turns[tier].turns[-1])
        replace_small(target, paths.OWNER_FILE, encode_record(owner))
    return addresses


def _keep_what_is_unknown(repository: Repository, target: Backend) -> None:
    """See to it that what was pushed there, and is not known here as it is there, is never given away nor removed.

    Its seqs are claimed here, so that no commit takes them; and its claims there say no more that a push from here made
    them, so that a collection leaves them alone.
    """
    for run in filter(is_name, target.list_names(paths.CLAIMS_FOLDER)):
        manifests = repository.manifests_of(run)
        here = {(name.seq, name.step) for name in manifests.listing().names}
        files = target.list_names(paths.manifests_folder(run))
        there = {name for file in files if (name := paths.parse_manifest_file(run, file)) is not None}
        unknown = sorted({(name.seq, name.step) for name in there} - here)
        if unknown:
            manifests.make_folders()
            manifests.claim_all(seq for seq, _ in unknown)
        for seq, step in unknown:
            replace_small(target, paths.claim_name(run, seq), b"kept %d" % step)


def _require_original(repository: Repository, home: HomeRecord) -> None:
    place = place_of(repository.backend)
    if home.place != place:
        raise ConflictError(
            "this folder is a copy of a store that has tiers, or was remounted or moved: "
            f"{home.place} before, {place} now; it may not change the tiers",
            where=repository.backend.root,
            todo=_ADOPT,
        )


def _home(backend: Backend) -> HomeRecord | None:
    return _decoded_home(backend, _content(backend, paths.HOME_FILE))


def _decoded_home(backend: Backend, content: bytes | None) -> HomeRecord | None:
    where = backend.location_of(paths.HOME_FILE)
    return None if content is None else decode_record(content, HomeRecord, where=where)


def _owner(target: Backend) -> OwnerRecord | None:
    content = _content(target, paths.OWNER_FILE)
    where = target.location_of(paths.OWNER_FILE)
    return None if content is None else decode_record(content, OwnerRecord, where=where)


def _content(backend: Backend, name: str) -> bytes | None:
    try:
        return backend.read_bytes(name, nbytes_max=RECORD_NBYTES_MAX)
    except FileNotFoundError:
        return None


def _change_home(backend: Backend, change: Callable[[HomeRecord | None], HomeRecord]) -> HomeRecord:
    for _ in range(_TRIES):
        before = _content(backend, paths.HOME_FILE)
        after = change(_decoded_home(backend, before))
        if replace_record(backend, paths.HOME_FILE, before, encode_record(after)):
            return after
    where = backend.location_of(paths.HOME_FILE)
    raise ConflictError("others push at the same time, again and again", where=where, todo="try again")


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


def check_pack(repository: Repository, target: Backend, pack: PackRef) -> None:
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
    manifests: Iterable[MarkedManifest],
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
            check_pack(repository, target, pack)
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
