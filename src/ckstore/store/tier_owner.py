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
from collections.abc import Callable

from ckstore.config import is_name
from ckstore.errors import ConflictError, UnreachableError
from ckstore.format import paths
from ckstore.format.records import RECORD_NBYTES_MAX, HomeRecord, OwnerRecord, TierTurns, decode_record, encode_record
from ckstore.hashing import new_token
from ckstore.io.backend import Backend
from ckstore.store.config_file import replace_record
from ckstore.store.pending_deletes import put_small, replace_small
from ckstore.store.repository import Repository

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
