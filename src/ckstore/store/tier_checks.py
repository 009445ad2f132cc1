"""Checks before a tier is changed or relied on: whether this folder owns it, and whether it still has its packs.

Ownership: a copy of a store has the same id and the same tiers. If the copy drops a checkpoint, its collection would
delete packs in the tier that the original needs. So a store records where it was made (``home.json``), and a tier
records its owner (``owner.json``).

Proof: a push checks that packs are in the tier before a manifest says so. When the local copies are deleted, that may
be long ago, and others may change a bucket. So the tier is checked again first.

Invariants:
- Only the owner pushes to a tier, collects in it, or deletes local files because the tier has them.
- A folder whose ``home.json`` was made elsewhere is a copy. It changes no tier until a person has decided which of the
  two it is.
- Each change of a tier begins with a new turn: a random token, recorded in ``home.json`` before ``owner.json``. A store
  that was reset to an older state does not know the tier's turn and counts as a copy.
- A pack counts as proven only if its size and the digest of its directory were just read in the tier, and the
  checkpoint that was pushed there has its manifest.
- A tier that does not answer proves nothing, and is not damaged.
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
    counted,
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
"""Turns that a store remembers for each tier: so many pushes may run concurrently."""

_TRIES = 20

_ADOPT = (
    "run `ckstore adopt --as-original` if this folder is the original or takes its place, or `ckstore adopt --as-new` "
    "if both are kept"
)


def place_of(backend: Backend) -> str:
    """Return what distinguishes a folder from its copies: an inode, or the address of a bucket."""
    info = backend.stat(paths.MANIFESTS_FOLDER)
    return f"inode {info.inode}" if info is not None and info.inode else backend.root


def require_owner(repository: Repository, tier: str, target: Backend) -> None:
    """Check that this folder owns a tier. A tier without an owner passes.

    Raises:
        ConflictError: This folder is a copy or was reset, or another folder owns the tier.
        UnreachableError: Another copy of the store is at the tier's address.
    """
    home, owner = _home(repository.backend), _owner(target)
    if home is not None:
        _require_original(repository, home)
        turns = home.tiers.get(tier)
        if turns is not None and (owner is None or owner.tier_id != turns.tier_id):
            raise UnreachableError(
                f"another copy of this store is at the address of the tier {tier!r}",
                where=target.root,
                todo="check config.json, and the links and mounts along this path",
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
            f"this store was reset to an older state than the one in the tier {tier!r}",
            where=repository.backend.root,
            todo=_ADOPT,
        )


def begin_turn(repository: Repository, tier: str, target: Backend) -> None:
    """Begin a change of a tier: check that this folder owns it. A tier without an owner gets this one.

    Raises:
        ConflictError: As ``require_owner``.
        UnreachableError: As ``require_owner``.
    """
    require_owner(repository, tier, target)
    made = HomeRecord(home_id=new_token(), place=place_of(repository.backend))
    home = _change_home(repository.backend, lambda before: before or made)
    owner = _owner(target)
    if owner is None:
        owner = OwnerRecord(home_id=home.home_id, tier_id=new_token(), turn=new_token())
        with contextlib.suppress(FileExistsError):
            put_small(target, paths.OWNER_FILE, encode_record(owner))
        # Two first pushes both use what the first of them has written.
        owner = _owner(target) or owner
    tier_id, known_turn, turn = owner.tier_id, owner.turn, new_token()

    def with_turn(before: HomeRecord | None) -> HomeRecord:
        known = before or home
        turns = known.tiers[tier].turns if tier in known.tiers else (known_turn,)
        # Never forget the turn that the tier has: any number of turns may fail before they get there.
        later = [each for each in turns if each != known_turn][2 - TURNS_MAX :]
        noted = TierTurns(tier_id=tier_id, turns=(known_turn, *later, turn))
        return HomeRecord(home_id=known.home_id, place=known.place, tiers={**known.tiers, tier: noted})

    _change_home(repository.backend, with_turn)
    owner = OwnerRecord(home_id=home.home_id, tier_id=tier_id, turn=turn)
    replace_small(target, paths.OWNER_FILE, encode_record(owner))


def forget_turns(repository: Repository, tier: str) -> None:
    """Forget the turns of an empty tier, so that its name can get another address."""
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
    """Decide which of two copies of a store this folder is; return the tiers that it owns now, with their addresses.

    Args:
        repository: The store.
        is_original: True: this folder owns all tiers of ``config.json`` from now on, and no other folder does. False:
            it owns none. It can read them as long as their owner keeps the files, and can push elsewhere.

    Raises:
        UnreachableError: A tier cannot be reached. Nothing was changed.
    """
    repository.require_same_store()
    addresses = repository.tiers.addresses() if is_original else {}
    places = {tier: repository.tiers.open(tier) for tier in addresses}
    for target in places.values():
        _protect_unknown_checkpoints(repository, target)
    owners = {tier: _owner(target) for tier, target in places.items()}
    ids = {tier: new_token() if owner is None else owner.tier_id for tier, owner in owners.items()}
    turns = {tier: TierTurns(tier_id=tier_id, turns=(new_token(),)) for tier, tier_id in ids.items()}
    home = HomeRecord(home_id=new_token(), place=place_of(repository.backend), tiers=turns)
    _change_home(repository.backend, lambda before: home)
    for tier, target in places.items():
        owner = OwnerRecord(home_id=home.home_id, tier_id=ids[tier], turn=turns[tier].turns[-1])
        replace_small(target, paths.OWNER_FILE, encode_record(owner))
    return addresses


def _protect_unknown_checkpoints(repository: Repository, target: Backend) -> None:
    """Protect checkpoints in the tier that this folder does not have.

    Their seqs are claimed here, so that no commit takes them. Their claims in the tier no longer say that a push from
    here made them, so no collection deletes them.
    """
    for run in filter(is_name, target.list_names(paths.CLAIMS_FOLDER)):
        manifests = repository.manifests_of(run)
        local = {(name.seq, name.step) for name in manifests.listing().names}
        files = target.list_names(paths.manifests_folder(run))
        in_tier = {name for file in files if (name := paths.parse_manifest_file(run, file)) is not None}
        unknown = sorted({(name.seq, name.step) for name in in_tier} - local)
        if unknown:
            manifests.make_folders()
            manifests.claim_all(seq for seq, _ in unknown)
        for seq, step in unknown:
            replace_small(target, paths.claim_name(run, seq), b"kept %d" % step)


def _require_original(repository: Repository, home: HomeRecord) -> None:
    place = place_of(repository.backend)
    if home.place != place:
        raise ConflictError(
            "this folder is a copy of a store with tiers, or was moved or remounted: "
            f"{home.place} before, {place} now. It may not change the tiers",
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
    raise ConflictError("other processes keep changing home.json", where=where, todo="try again")


NOT_OURS = "another program writes to this tier: find it, and remove its files; no local file was deleted"


@dataclass(frozen=True, slots=True)
class Unproven:
    """A local pack that should be in a tier, and was not found there.

    Attributes:
        pack_id: The pack.
        tier: The name of the tier.
        problem: What was found instead.
        is_damage: True: the tier answered and does not have the pack. False: it did not answer and may do so later.
    """

    pack_id: PackId
    tier: str
    problem: str
    is_damage: bool


def check_pack(repository: Repository, target: Backend, pack: PackRef) -> None:
    """Check that a pack is in a tier, with its size and the digest of its directory.

    Raises:
        FileNotFoundError: It is not there.
        CorruptError: Another pack has its name.
    """
    name = paths.pack_name(pack.pack_id)
    where = target.location_of(name)
    file = target.open_read(name)
    try:
        if file.nbytes != pack.nbytes:
            raise CorruptError(
                f"a pack of {pack.nbytes} bytes has {file.nbytes} in the tier", where=where, todo=NOT_OURS
            )
        tail = decode_tail(
            file.read_at(file.nbytes - TAIL_NBYTES, TAIL_NBYTES),
            pack_nbytes=pack.nbytes,
            store_id=repository.store_id,
            pack_id=pack.pack_id,
            limits=repository.limits,
            where=where,
        )
        if tail.directory_digest != pack.directory_digest:
            raise ChecksumError("a pack in the tier has another directory", where=where, todo=NOT_OURS)
    finally:
        file.close()


def unproven_packs(
    repository: Repository,
    marker: Marker,
    manifests: Iterable[MarkedManifest],
    pack_ids: Collection[PackId],
    unreachable: Mapping[str, str] = MappingProxyType({}),
) -> dict[PackId, Unproven]:
    """Return those of these packs that manifests say are in a tier, and that are not found there now.

    Args:
        repository: The store.
        marker: The marker that has read the manifests.
        manifests: The manifests that stay.
        pack_ids: Packs whose local copies are about to be deleted.
        unreachable: Tiers that do not answer, and their errors. They are not asked again.
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
        for unproven in _unproven_in(repository, tier, packs, unreachable.get(tier)):
            # An answer is better evidence than none.
            if unproven.pack_id not in found or unproven.is_damage:
                found[unproven.pack_id] = unproven
    return found


def require_proof(unproven: Iterable[Unproven]) -> None:
    """Raise if a tier lacks packs that it should have. A tier that does not answer is ignored.

    Raises:
        CorruptError: A tier lacks packs that manifests say are there. Their local copies are kept.
    """
    damaged = [each for each in unproven if each.is_damage]
    if damaged:
        raise CorruptError(
            f"kept {counted(len(damaged), 'pack')} here, because the tier {damaged[0].tier!r} "
            f"lacks what was pushed to it: {damaged[0].problem}",
            todo="find out who changes the tier; run `ckstore pull` to use the local packs again, then push again",
            pack_ids=sorted(each.pack_id.hex() for each in damaged),
        )


def _unproven_in(
    repository: Repository, tier: str, packs: dict[PackRef, set[ManifestName]], problem_of_tier: str | None
) -> Iterable[Unproven]:
    if problem_of_tier is not None:
        return [Unproven(pack.pack_id, tier, problem_of_tier, is_damage=False) for pack in packs]
    try:
        target = repository.tiers.open(tier)
        # The owner keeps in the tier only what it needs itself.
        require_owner(repository, tier, target)
        gone = _manifests_gone(target, set().union(*packs.values()))
    except CkstoreError as error:
        return [Unproven(pack.pack_id, tier, str(error), is_damage=False) for pack in packs]

    def check(pack: PackRef) -> Unproven | None:
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

    return [unproven for unproven in map_concurrent(target, check, packs) if unproven is not None]


def _manifests_gone(target: Backend, names: Collection[ManifestName]) -> set[ManifestName]:
    """Return the checkpoints that were pushed to the tier, as its claims say, and have no manifest there now."""
    gone = set()
    for run in {name.run for name in names}:
        claims = map(paths.parse_claim_file, target.list_names(paths.claims_folder(run)))
        claimed = {claim.seq for claim in claims if claim is not None and claim.kind == "claim"}
        files = target.list_names(paths.manifests_folder(run))
        in_tier = {name.seq for file in files if (name := paths.parse_manifest_file(run, file)) is not None}
        # A checkpoint made here later, by a rewind or an undelete, was never in the tier.
        gone |= {name for name in names if name.run == run and name.seq in claimed - in_tier}
    return gone
