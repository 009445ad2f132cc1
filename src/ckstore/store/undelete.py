"""Bring back what the trash still has: dropped checkpoints, and the exact form of those that were demoted.

A dropped one is published again, as a new entry that is archival: a drop mark is never taken back, and ``latest`` skips
archival entries, so that nothing old is resumed by surprise. A demoted one is replaced by its exact form, in place.

Invariants:
- A dropped one is published as any commit is: claimed, linked, and its packs looked for afterwards, in the trash too.
- The exact form is published as any replacement is, as the next generation, and the form with a loss goes to the trash.
- No lease is needed: a claim makes a seq exclusive, a generation's name makes a replacement so, and whoever trains goes
  on with the next one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from ckstore.errors import CorruptError, MissingChunkError, NotFoundError, UsageError
from ckstore.format.fidelity import EXACT_FIDELITY
from ckstore.format.layout import ManifestName
from ckstore.format.manifest import Manifest, decode_manifest, republished
from ckstore.format.pack_table import PackTable, decode_pack_table
from ckstore.store.gc_marks import UNREADABLE
from ckstore.store.known import LOCAL_TIER
from ckstore.store.parts import Parts
from ckstore.store.references import Reference
from ckstore.store.replace import settle
from ckstore.store.trash import TrashedManifest

TrashKind = Literal["dropped", "demoted", "made exact", "pushed", "pulled", "rewritten", "replaced", "stray"]
"""Why a manifest lies in the trash: the checkpoint was dropped; or it is in place in another form, and this is the one
before that (``replaced``: it cannot be read how). A stray belongs in place, and the next collection puts it there."""


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


def exact_in_trash(parts: Parts) -> list[TrashedManifest]:
    """Return the exact forms that the trash still has of checkpoints in place that were demoted, by seq."""
    in_place = {name.seq: name for name in parts.manifests.listing().names}
    found: dict[int, TrashedManifest] = {}
    for folder in parts.trash.contents():
        for trashed in folder.manifests:
            name, there = trashed.name, in_place.get(trashed.name.seq)
            if name.run == parts.run and there is not None and is_exact_form(parts, trashed, there):
                other = found.get(name.seq)
                if other is None or other.name.generation < name.generation:
                    found[name.seq] = trashed
    return [found[seq] for seq in sorted(found)]


def is_exact_form(parts: Parts, trashed: TrashedManifest, there: ManifestName) -> bool:
    """Whether a manifest in the trash is the exact form of a checkpoint that is in place with a loss."""
    if trashed.name.generation >= there.generation:
        return False
    try:
        if parts.manifests.header(there).fidelity == EXACT_FIDELITY:
            return False
    except (FileNotFoundError, *UNREADABLE):
        return False
    table = table_of(parts, trashed)
    return table is not None and table.header.fidelity == EXACT_FIDELITY


def find_in_trash(parts: Parts, reference: Reference) -> TrashedManifest:
    """Return the checkpoint that a step, ``seq:N`` or ``id:PREFIX`` means, dropped or demoted; of a step, the newest.

    Raises:
        NotFoundError: The trash has none such; the message names what it has.
        UsageError: It is no such reference.
    """
    candidates = sorted([*dropped_in_trash(parts), *exact_in_trash(parts)], key=lambda trashed: trashed.name.seq)
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
            f"the trash has neither a dropped checkpoint {reference} of run {parts.run!r} nor the exact form of one",
            where=parts.backend.root,
            todo=f"it has {there}" if there else "it has none of this run",
        )
    return found[-1]


def bring_back(parts: Parts, trashed: TrashedManifest) -> Manifest:
    """Bring back what ``find_in_trash`` has found: as a new entry, or as the exact form of the one in place.

    Raises:
        NotFoundError: The trash was emptied, or the checkpoint in place was dropped, meanwhile.
        MissingChunkError: A pack that it needs was freed already.
        CorruptError: Its manifest is damaged.
        ConflictError: Another process has replaced the checkpoint meanwhile.
    """
    there = next((name for name in parts.manifests.listing().names if name.seq == trashed.name.seq), None)
    return undelete(parts, trashed) if there is None else make_exact(parts, trashed, there)


def make_exact(parts: Parts, trashed: TrashedManifest, there: ManifestName) -> Manifest:
    """Replace a demoted checkpoint by its exact form, as the next generation; its seq and tags stay.

    Raises:
        NotFoundError: The trash was emptied, or the checkpoint was dropped, meanwhile.
        MissingChunkError: A pack that it needs was freed already.
        CorruptError: Its manifest is damaged.
        ConflictError: Another process has replaced the checkpoint meanwhile.
    """
    entry = _entry_of(parts, trashed)
    again = replace(entry, header=replace(entry.header, generation=there.generation + 1))
    settle(parts, again, parts.manifests.publish(again))
    return again


def _entry_of(parts: Parts, trashed: TrashedManifest) -> Manifest:
    """Read a manifest in the trash, and see that every pack that it needs is somewhere."""
    where = parts.backend.location_of(trashed.path)
    try:
        content = parts.backend.read_bytes(trashed.path, nbytes_max=parts.limits.manifest_nbytes_max)
    except FileNotFoundError:
        raise _emptied(trashed, where) from None
    entry = decode_manifest(content, limits=parts.limits, expect=trashed.name, where=where)
    if entry.header.store_id != parts.store_id:
        raise CorruptError("the manifest belongs to another store", where=where)
    parts.require_packs(entry)
    return entry


def undelete(parts: Parts, trashed: TrashedManifest) -> Manifest:
    """Publish a dropped checkpoint again, as the next seq of its run.

    Raises:
        NotFoundError: The trash was emptied meanwhile.
        MissingChunkError: A pack that it needs was freed already.
        CorruptError: Its manifest is damaged.
    """
    entry = _entry_of(parts, trashed)
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
    manifests.note_published(seq)
    return again


def _id_of(parts: Parts, trashed: TrashedManifest) -> str:
    table = table_of(parts, trashed)
    return "" if table is None else table.header.checkpoint_id.hex()


def table_of(parts: Parts, trashed: TrashedManifest) -> PackTable | None:
    """Return the header and packs of a manifest in the trash; None where it cannot be read."""
    try:
        content = parts.backend.read_bytes(trashed.path, nbytes_max=parts.limits.manifest_nbytes_max)
        return decode_pack_table(content, limits=parts.limits, expect=trashed.name)
    except (FileNotFoundError, *UNREADABLE):
        return None


def kind_in_trash(parts: Parts, trashed: TrashedManifest) -> TrashKind:
    """Say why a manifest of the run of ``parts`` lies in the trash."""
    name, listing = trashed.name, parts.manifests.listing()
    if name.seq in listing.dropped:
        return "dropped"
    there = next((other for other in listing.names if other.seq == name.seq), None)
    if there is None:
        return "stray"
    table = table_of(parts, trashed)
    try:
        header = parts.manifests.header(there)
        tiers = set(parts.manifests.tiers(header))
    except (FileNotFoundError, *UNREADABLE):
        return "replaced"
    if table is None:
        return "replaced"
    if (table.header.fidelity == EXACT_FIDELITY) != (header.fidelity == EXACT_FIDELITY):
        return "demoted" if table.header.fidelity == EXACT_FIDELITY else "made exact"
    before = set(table.tiers)
    if tiers != before:
        return "pulled" if LOCAL_TIER in tiers - before else "pushed"
    return "rewritten"


def _emptied(trashed: TrashedManifest, where: str) -> NotFoundError:
    return NotFoundError(f"the trash was emptied of seq {trashed.name.seq} meanwhile", where=where)
