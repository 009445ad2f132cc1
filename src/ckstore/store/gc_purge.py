"""Empty folders of the trash: look at everything once more, bring back what is needed, unlink the rest.

Invariants:
- What is unlinked lay in the trash before the look began in which no manifest named it.
- All of the trash is judged, whichever folders are to be emptied: what supersedes a manifest may lie in another one.
- A manifest that is brought back names packs: what is needed is looked for anew after that.
- A pack that manifests say is in a tier is unlinked only when it was just seen there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ckstore.errors import CkstoreError
from ckstore.format import layout
from ckstore.ids import PackId
from ckstore.store.at_once import ask_each
from ckstore.store.gc_marks import Look, Marker
from ckstore.store.gc_survey import missing_in, strays_among
from ckstore.store.parts import Parts
from ckstore.store.tier_proof import Unproven, unproven_packs
from ckstore.store.trash import TrashedPack, TrashFolder

_log = logging.getLogger("ckstore")

_ROUNDS = 3
"""Looks until nothing is left to be brought back; others do the same at the same time."""


@dataclass(slots=True)
class Purged:
    """What emptying trash folders came to.

    Attributes:
        look: What manifests name; where one of them cannot be read, nothing was removed.
        files: Files that were unlinked.
        nbytes: Bytes of these.
        rescued: Files that were brought back.
        unproven: Packs that stay although no manifest names them here: their tier could not be seen to have them.
    """

    look: Look
    files: int = 0
    nbytes: int = 0
    rescued: int = 0
    unproven: dict[PackId, Unproven] = field(default_factory=dict)
    stop: str = ""
    """Why nothing was removed although everything could be read: a manifest is missing."""


def purge(
    parts: Parts, marker: Marker, gc_ids: Collection[str], waits: Mapping[str, str] = MappingProxyType({})
) -> Purged:
    """Unlink what is in these trash folders, but for what manifests need or what nothing supersedes: that goes back.

    Args:
        parts: The store.
        marker: Looks at all manifests.
        gc_ids: The folders.
        waits: Tiers that are known not to answer, and what they said.
    """
    done, trash = Purged(Look({}, (), {}, (), frozenset())), parts.trash
    for _ in range(_ROUNDS):
        contents = trash.contents()
        done.look = marker.look()
        strays = () if done.look.unreadable else tuple(strays_among(contents, done.look))
        if not strays:
            break
        done.rescued += sum(trash.put_back(stray.path, stray.name.path) for stray in strays)
    if done.look.unreadable or strays:
        return done
    done.stop = next(iter(missing_in(parts, done.look).values()), "")
    if done.stop:
        return done
    _unlink([folder for folder in contents if folder.gc_id in gc_ids], parts, marker, waits, done)
    return done


def _unlink(
    folders: Collection[TrashFolder], parts: Parts, marker: Marker, waits: Mapping[str, str], done: Purged
) -> None:
    trash, look = parts.trash, done.look
    packs = [pack for folder in folders for pack in folder.packs]
    unnamed = {pack.pack_id for pack in packs if not look.is_named(pack.pack_id)}
    done.unproven = unproven_packs(parts, marker, look.manifests.values(), unnamed, waits)
    unlinked: list[str] = []
    manifests = [manifest for folder in folders for manifest in folder.manifests]
    unlinks = ask_each(parts.backend, lambda manifest: trash.unlink(manifest.path), manifests)
    for manifest, is_unlinked in zip(manifests, unlinks, strict=True):
        if is_unlinked:
            unlinked.append(manifest.path)
            done.nbytes += manifest.nbytes
    for pack in packs:
        unproven = done.unproven.get(pack.pack_id)
        if unproven is not None and not unproven.is_damage:
            # Its tier may answer the next time; until then nothing is known.
            continue
        if (unproven is not None or pack.pack_id not in unnamed) and not _is_second_name(parts, pack, done):
            continue
        if trash.unlink(pack.path):
            unlinked.append(pack.path)
            done.nbytes += pack.nbytes
    done.files = len(unlinked)
    try:
        trash.sync(unlinked)
    except CkstoreError as error:
        # They may come back after a power cut; the next collection removes them again.
        _log.warning("the removal of %d files from the trash may not be durable: %s", len(unlinked), error)


def _is_second_name(parts: Parts, pack: TrashedPack, done: Purged) -> bool:
    """Bring back a pack that is needed; return whether it lay in place already, so that this name is one too many."""
    if parts.trash.put_back(pack.path, layout.pack_name(pack.pack_id)):
        done.rescued += 1
        return False
    info = parts.backend.stat(layout.pack_name(pack.pack_id))
    # Else another has taken it in hand, or what is in place is damaged: this may be the only one.
    return info is not None and info.nbytes == pack.nbytes
