"""Bring a dropped checkpoint back: publish it again, as a new entry that is archival, while the trash still has it.

A drop mark is never taken back. ``latest`` skips archival entries, so that nothing old is resumed by surprise.

Invariants:
- It is published as any commit is: claimed, linked, and its packs looked for afterwards, in the trash too.
- No lease is needed: a claim makes the seq exclusive, and whoever trains goes on with the next one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckstore.errors import CorruptError, MissingChunkError, NotFoundError, UsageError
from ckstore.format.manifest import Manifest, decode_manifest, republished
from ckstore.format.pack_table import decode_pack_table
from ckstore.store.gc_marks import UNREADABLE
from ckstore.store.parts import Parts
from ckstore.store.references import Reference
from ckstore.store.trash import TrashedManifest


def dropped_in_trash(parts: Parts) -> list[TrashedManifest]:
    """Return the dropped checkpoints of the run that the trash still has, by seq, each by its highest generation."""
    dropped = parts.manifests.listing().dropped
    found: dict[int, TrashedManifest] = {}
    for folder in parts.trash.contents():
        for trashed in folder.manifests:
            name = trashed.name
            if name.run == parts.run and name.seq in dropped:
                other = found.get(name.seq)
                if other is None or other.name.generation < name.generation:
                    found[name.seq] = trashed
    return [found[seq] for seq in sorted(found)]


def find_in_trash(parts: Parts, reference: Reference) -> TrashedManifest:
    """Return the dropped checkpoint that a step, ``seq:N`` or ``id:PREFIX`` means; of a step, the newest.

    Raises:
        NotFoundError: The trash has none such; the message names what it has.
        UsageError: It is no such reference.
    """
    candidates = dropped_in_trash(parts)
    if isinstance(reference, bool) or not isinstance(reference, (int, str)):
        raise UsageError("a dropped checkpoint is named by a step, seq:N or id:PREFIX", where=repr(reference))
    kind, _, rest = str(reference).partition(":")
    if re.fullmatch(r"[0-9]{1,18}", str(reference)):
        found = [trashed for trashed in candidates if trashed.name.step == int(reference)]
    elif kind == "seq" and re.fullmatch(r"[0-9]{1,18}", rest):
        found = [trashed for trashed in candidates if trashed.name.seq == int(rest)]
    elif kind == "id" and re.fullmatch(r"[0-9a-f]{4,64}", rest):
        found = [trashed for trashed in candidates if _id_of(parts, trashed).startswith(rest)]
        if len(found) > 1:
            raise UsageError(f"{len(found)} checkpoint ids begin with {rest}", todo="give more digits")
    else:
        raise UsageError("a dropped checkpoint is named by a step, seq:N or id:PREFIX", where=repr(reference))
    if not found:
        there = ", ".join(f"{trashed.name.step} (seq:{trashed.name.seq})" for trashed in candidates[-5:])
        raise NotFoundError(
            f"the trash has no dropped checkpoint {reference} of run {parts.run!r}",
            where=parts.backend.root,
            todo=f"it has {there}" if there else "it has none of this run",
        )
    return found[-1]


def undelete(parts: Parts, trashed: TrashedManifest) -> Manifest:
    """Publish a dropped checkpoint again, as the next seq of its run.

    Raises:
        NotFoundError: The trash was emptied meanwhile.
        MissingChunkError: A pack that it needs was freed already.
        CorruptError: Its manifest is damaged.
    """
    where = parts.backend.location_of(trashed.path)
    try:
        content = parts.backend.read_bytes(trashed.path, nbytes_max=parts.limits.manifest_nbytes_max)
    except FileNotFoundError:
        raise _emptied(trashed, where) from None
    entry = decode_manifest(content, limits=parts.limits, expect=trashed.name, where=where)
    if entry.header.store_id != parts.store_id:
        raise CorruptError("the manifest belongs to another store", where=where)
    parts.require_packs(entry)
    manifests = parts.manifests
    manifests.make_folders()
    listing = manifests.listing()
    seqs: Iterable[int] = (name.seq for name in (*listing.names, *listing.lower))
    seq = manifests.claim(max([listing.claimed_max, *listing.dropped, *seqs]) + 1)
    again = republished(entry, seq=seq, time_ns=parts.clock.now_ns(), is_archival=True)
    name = manifests.publish(again)
    gone = parts.lost_packs(again.packs)
    if gone:
        manifests.withdraw(name)
        raise MissingChunkError(
            f"{len(gone)} packs of the dropped checkpoint of step {name.step} were freed meanwhile",
            where=parts.backend.root,
            todo="nothing brings them back; undelete another one",
            pack_id=min(gone).hex(),
        )
    return again


def _id_of(parts: Parts, trashed: TrashedManifest) -> str:
    try:
        content = parts.backend.read_bytes(trashed.path, nbytes_max=parts.limits.manifest_nbytes_max)
        return decode_pack_table(content, limits=parts.limits, expect=trashed.name).header.checkpoint_id.hex()
    except (FileNotFoundError, *UNREADABLE):
        return ""


def _emptied(trashed: TrashedManifest, where: str) -> NotFoundError:
    return NotFoundError(f"the trash was emptied of seq {trashed.name.seq} meanwhile", where=where)
