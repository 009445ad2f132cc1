"""The story of a repair: look, plan, and unless it is a dry run, act.

What is sound in damaged packs, and what was found elsewhere, is copied to new packs and made durable; manifests that
cannot be read are put aside, and others replaced one by one, the newest first; last, packs that nothing needs any more
are put aside.

Invariants:
- No byte is removed or written over: packs and manifests are added, replaced by a next generation, or moved aside.
- Between any two steps every checkpoint is as it was or as it is to be; a repair that was interrupted is done again.
- A checkpoint's id never changes: what is restored has the identities that were committed, or is named as lost.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckstore.errors import ConflictError, CorruptError, UnsupportedError
from ckstore.format import layout
from ckstore.format.layout import ManifestName
from ckstore.format.manifest import Manifest, relocated
from ckstore.ids import PackId, new_token
from ckstore.io.backend import Backend
from ckstore.repair_copies import Copies
from ckstore.repair_plan import Mend, RepairPlan, plan_repair
from ckstore.store.audit import FrameCheck
from ckstore.store.known import KnownFrame, locate
from ckstore.store.lost import lost_frames
from ckstore.store.manifests import DroppedError
from ckstore.store.parts import Parts
from ckstore.store.quarantine import quarantine_manifest, quarantine_pack, quarantined_names
from ckstore.store.replace import settle

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class RepairEntry:
    """What becomes of one checkpoint.

    Attributes:
        run: Its run.
        seq: Its number.
        step: The trainer's step.
        action: ``"heal"``; ``"partial"``: what is lost is named, the rest can be restored; ``"quarantine"``: its
            manifest is put aside; ``"revive"``, ``"bring back"``: another one takes its place.
        reason: Why.
        tensors: Dotted paths of tensors that are lost.
        is_done: Whether it was done.
    """

    run: str
    seq: int
    step: int
    action: str
    reason: str
    tensors: tuple[str, ...]
    is_done: bool


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair found, and what it did or would do.

    Attributes:
        is_dry_run: Nothing was changed.
        entries: Checkpoints that are not as they were.
        packs: Pack id -> what is wrong with it, and so what it is put aside for.
        packs_rescued: Packs that were needed and lay in the trash.
        claims_made: ``run/seq`` of claims that were missing.
        bytes_copied: Bytes of frames that were copied to new packs.
        left: What cannot be mended, in sentences.
        is_identity_made: ``store.json`` was missing: it was made again from manifests and packs, or would be.
        packs_elsewhere: Packs that lie in other tiers, of which nothing was read.
    """

    is_dry_run: bool
    entries: tuple[RepairEntry, ...]
    packs: dict[str, str]
    packs_rescued: tuple[str, ...]
    claims_made: tuple[str, ...]
    bytes_copied: int
    left: tuple[str, ...]
    is_identity_made: bool = False
    packs_elsewhere: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found that is not as it was written."""
        if self.is_identity_made:
            return False
        return not (self.entries or self.packs or self.packs_rescued or self.claims_made or self.left)

    @property
    def partial(self) -> tuple[RepairEntry, ...]:
        """Checkpoints of which something is lost for good."""
        return tuple(entry for entry in self.entries if entry.action == "partial")


def repair(
    parts: Parts,
    make_check: Callable[[], FrameCheck],
    *,
    dry_run: bool,
    sources: Sequence[Backend] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> RepairReport:
    """Plan, and unless it is a dry run, act.

    Args:
        parts: The store.
        make_check: Makes what decodes a frame.
        dry_run: Only plan.
        sources: Other places where files of this store may lie under the same names.
        on_progress: Called with packs looked at and packs in all.

    Raises:
        ConflictError: Another live process writes a run that has to be mended, or has replaced a checkpoint meanwhile.
        CapacityError: The disk is full; each checkpoint is as it was, or mended.
    """
    plan = plan_repair(parts, make_check, sources=sources, on_progress=on_progress)
    copies = Copies(parts, plan)
    if not dry_run:
        _act(parts, plan, copies)
    report = _report(plan, copies, dry_run=dry_run)
    if not any(entry.is_done and entry.action in ("revive", "bring back") for entry in report.entries):
        return report
    # What these name was not looked at yet.
    again = repair(parts, make_check, dry_run=False, sources=sources, on_progress=on_progress)
    return replace(
        again,
        entries=(*report.entries, *again.entries),
        packs={**report.packs, **again.packs},
        packs_rescued=(*report.packs_rescued, *again.packs_rescued),
        claims_made=(*report.claims_made, *again.claims_made),
        bytes_copied=report.bytes_copied + again.bytes_copied,
    )


def _report(plan: RepairPlan, copies: Copies, *, dry_run: bool) -> RepairReport:
    return RepairReport(
        is_dry_run=dry_run,
        entries=tuple(
            RepairEntry(
                mend.name.run, mend.name.seq, mend.name.step, mend.action, mend.reason, mend.tensors, mend.is_done
            )
            for mend in sorted(plan.mends, key=lambda mend: (mend.name.run, -mend.name.seq))
        ),
        packs={pack_id.hex(): problem for pack_id, problem in plan.spoiled.items()},
        packs_rescued=tuple(pack_id.hex() for pack_id in plan.in_trash),
        claims_made=tuple(f"{run}/{seq}" for run, seq in plan.claims),
        bytes_copied=copies.nbytes,
        left=tuple(plan.left),
        packs_elsewhere=plan.search.packs_elsewhere,
    )


def _act(parts: Parts, plan: RepairPlan, copies: Copies) -> None:
    for run in {run for run, _ in plan.claims}:
        parts.of_run(run).make_folders()
    for run, seq in plan.claims:
        with contextlib.suppress(FileExistsError):
            parts.backend.create(layout.claim_name(run, seq), b"", sync=False)
        parts.backend.sync_folder(layout.claims_folder(run))
    for pack_id in plan.in_trash:
        parts.trash.rescue_pack(pack_id)
    copies.write()
    for run in sorted({mend.name.run for mend in plan.mends}):
        with _writing(parts, run) as there:
            _mend_run(there, [mend for mend in plan.mends if mend.name.run == run], plan, copies)
    _put_packs_aside(parts, plan)


@contextlib.contextmanager
def _writing(parts: Parts, run: str) -> Iterator[Parts]:
    """Hold the lease of a run while its manifests are changed."""
    if run == parts.run:
        parts.prepare_run()
        parts.lease.take()
        try:
            yield parts
        finally:
            # The next commit must not follow what was replaced.
            parts.look_again()
        return
    other = parts.of_run(run)
    try:
        other.prepare_run()
        other.lease.take()
        yield other
    finally:
        other.lease.release()


def _mend_run(parts: Parts, mends: Sequence[Mend], plan: RepairPlan, copies: Copies) -> None:
    # What takes a place comes before what has it is put aside, so that a crash leaves too much and never too little.
    for mend in mends:
        if mend.action == "revive" and mend.source is not None:
            mend.is_done = parts.trash.put_back(mend.source[1], mend.name.path)
    for mend in mends:
        if mend.action == "quarantine":
            mend.is_done = quarantine_manifest(parts.backend, mend.name) is not None
    for mend in mends:
        if mend.action in ("heal", "partial"):
            mend.is_done = _replace(parts, mend, plan, copies)
        elif mend.action == "bring back" and mend.source is not None:
            mend.is_done = _bring_back(parts, mend.name, *mend.source[:2])


def _replace(parts: Parts, mend: Mend, plan: RepairPlan, copies: Copies) -> bool:
    """Publish the next generation of a manifest, which names only what is sound."""
    name = mend.name
    manifest = plan.search.load(name)
    if any(other.seq == name.seq and other.generation > name.generation for other in parts.manifests.listing().names):
        raise ConflictError(
            f"seq {name.seq} was replaced by another process after it was planned",
            where=parts.backend.root,
            todo="repair again",
        )
    parts.lease.check()
    # The name of one that was put aside is not used again.
    aside = [other.generation for other in quarantined_names(parts.backend, name.run) if other.seq == name.seq]
    frames = [*copies.located(manifest, mend.picks), *lost_frames(mend.lost)]
    replacement = _next_generation(manifest, frames, max(name.generation, *aside, 0) + 1)
    published = parts.manifests.publish(replacement)
    try:
        settle(parts, replacement, published)
    except DroppedError as error:
        _log.warning("%s; its drop stands", error.what)
        return False
    return True


def _next_generation(manifest: Manifest, known: Sequence[KnownFrame], generation: int) -> Manifest:
    header = manifest.header
    packs, frames = locate(known)
    replacement = relocated(
        manifest,
        generation=generation,
        packs=packs,
        frames=frames,
        bytes_written=header.bytes_written,
        chunks_new=0,
        choices=manifest.choices,
    )
    counts = replace(replacement.header, chunks_new=header.chunks_new, chunks_reused=header.chunks_reused)
    return replace(replacement, header=counts)


def _bring_back(parts: Parts, name: ManifestName, source: Backend, path: str) -> bool:
    """Copy a manifest from another place; it was read and checked there."""
    content = source.read_bytes(path, nbytes_max=parts.limits.manifest_nbytes_max)
    draft = layout.draft_name(new_token())
    parts.backend.create(draft, content, sync=True)
    is_back = True
    try:
        parts.backend.link(draft, name.path)
    except FileExistsError:
        is_back = False
    parts.backend.sync_folder(layout.manifests_folder(name.run))
    with contextlib.suppress(FileNotFoundError):
        parts.backend.unlink(draft)
    return is_back


def _put_packs_aside(parts: Parts, plan: RepairPlan) -> None:
    """Move spoiled packs into quarantine that no manifest in place names any more."""
    named: set[PackId] = set()
    for run in parts.runs():
        manifests = parts.manifests_of(run)
        listing = manifests.listing()
        for name in (*listing.names, *listing.lower):
            try:
                named |= {pack.pack_id for pack in manifests.load(name).packs}
            except FileNotFoundError:
                continue
            except (CorruptError, UnsupportedError) as error:
                plan.left.append(f"packs stay in place, since {name.file} may name them: {error.what}")
                return
    for pack_id in sorted(set(plan.spoiled) - named):
        # A commit that reuses a frame of it at this moment looks for it after it was published, and withdraws.
        quarantine_pack(parts.backend, layout.pack_name(pack_id), pack_id)
        for path in list(parts.trash.find_pack(pack_id)):
            quarantine_pack(parts.backend, path, pack_id)
