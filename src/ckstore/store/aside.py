"""Which files of a store are damaged and can be put aside without harm: unreadable manifests, and torn packs unnamed.

Invariants:
- A pack that any manifest names stays where it is, and so does one that may still be written.
- Where a manifest cannot be read and stays in place, no pack is moved: it may name any.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckstore.errors import BackendError, CorruptError, UnsupportedError
from ckstore.format import layout
from ckstore.format.layout import ManifestName
from ckstore.ids import PackId
from ckstore.store.parts import Parts
from ckstore.store.quarantine import quarantine_manifest, quarantine_pack
from ckstore.store.shelf import PackCopy, Shelf

AGE_NS_MIN = 3600 * 10**9
"""A younger pack may be one that a commit is writing."""


@dataclass(frozen=True, slots=True)
class QuarantineReport:
    """What was, or would be, put aside.

    Attributes:
        is_dry_run: Nothing was moved.
        manifests: Name of each unreadable manifest -> what is wrong with it.
        packs: Name of each torn pack -> what is wrong with it.
        left: What cannot be read and stays, in sentences.
    """

    is_dry_run: bool
    manifests: dict[str, str]
    packs: dict[str, str]
    left: tuple[str, ...]


def put_aside(parts: Parts, *, dry_run: bool) -> QuarantineReport:
    """Find what is damaged, and unless it is a dry run, move it to quarantine."""
    manifests: dict[ManifestName, str] = {}
    named: set[PackId] = set()
    left: list[str] = []
    for run in parts.runs():
        there = parts.manifests_of(run)
        listing = there.listing()
        for name in (*listing.names, *listing.lower):
            try:
                named |= {pack.pack_id for pack in there.load(name).packs}
            except FileNotFoundError:
                continue
            except (UnsupportedError, BackendError) as error:
                # Not damage: a newer ckstore, or another disk, may read it.
                left.append(str(error))
            except CorruptError as error:
                manifests[name] = error.what
    packs = {} if manifests or left else _torn_packs(parts, named)
    if not dry_run:
        for name in manifests:
            quarantine_manifest(parts.backend, name)
        for pack_id in packs:
            quarantine_pack(parts.backend, layout.pack_name(pack_id), pack_id)
    return QuarantineReport(
        dry_run,
        {name.path: problem for name, problem in manifests.items()},
        {layout.pack_name(pack_id): problem for pack_id, problem in packs.items()},
        tuple(left),
    )


def _torn_packs(parts: Parts, named: set[PackId]) -> dict[PackId, str]:
    shelf, now_ns = Shelf(parts), parts.clock.now_ns()
    found: dict[PackId, str] = {}
    for folder in layout.pack_folders():
        for file in parts.backend.list_names(folder):
            pack_id = layout.parse_pack_file(file)
            info = parts.backend.stat(f"{folder}/{file}")
            if pack_id is None or info is None or pack_id in named or now_ns - info.modified_ns < AGE_NS_MIN:
                continue
            try:
                look = shelf.look_into(PackCopy(pack_id, parts.backend, f"{folder}/{file}", "place"))
            except FileNotFoundError:
                continue
            if look.problem:
                found[pack_id] = look.problem
    return found
