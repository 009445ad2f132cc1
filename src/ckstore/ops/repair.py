"""Repair a damaged store: search and plan, then, unless it is a dry run, act.

Sound frames of damaged packs, and frames found elsewhere, are copied to new packs and made durable. Unreadable
manifests move to quarantine. Other manifests are replaced one by one, newest first. Last, damaged packs that no
manifest names move to quarantine.

Invariants:
- No byte is removed or overwritten. Packs and manifests are added, replaced by a next generation, or moved.
- Between any two steps every checkpoint is as before, or repaired. An interrupted repair can be run again.
- A checkpoint id never changes. Restored data has the committed identities, or is recorded as lost.
- A frame is compared with the plan when it is read, and again where it was written.
- No manifest names a new pack before ``Copies.write`` has returned, when all new packs are durable.

A missing ``store.json`` is made again, since every manifest and pack contains the store id. Purges by age remove this
file first, because nothing modifies it. It is made again only if all manifests (without manifests, all packs) belong to
one store, and it never replaces a file. Its limits are the defaults with which every store is made.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ckstore.clock import SYSTEM_CLOCK
from ckstore.codec import kernels
from ckstore.display import repr_of_summary
from ckstore.errors import ConflictError, CorruptError, UnsupportedError, UsageError
from ckstore.format import paths
from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader
from ckstore.format.manifest import FrameRef, Manifest, PackRef, relocated
from ckstore.format.paths import ManifestName
from ckstore.hashing import NO_BASE, ChunkId, PackId, chunk_id_of, new_token
from ckstore.io.backend import Backend
from ckstore.io.buffers import BufferPool
from ckstore.io.url import backend_for
from ckstore.ops.pack_copies import PackCopy
from ckstore.ops.repair_plan import Mend, Pick, RepairPlan, plan_repair
from ckstore.ops.repair_segments import SegmentRepair, plan_segments, replace_segment
from ckstore.ops.store_identity import record_or_remade, write_store_record
from ckstore.store.chunk_index import LocatedFrame, locate
from ckstore.store.damage import lost_frames
from ckstore.store.manifests import DroppedError, quarantine_manifest, quarantine_pack, quarantined_names
from ckstore.store.pack_writer import FrameSlot, PackWriter
from ckstore.store.repository import Repository, finish_replacement
from ckstore.store.store_config import read_store_record

_log = logging.getLogger("ckstore")

BLOCK_NBYTES = 8 << 20

BLOCKS = 3


@dataclass(frozen=True, slots=True)
class RepairEntry:
    """What happens to one checkpoint.

    Attributes:
        run: Its run.
        seq: Its number.
        step: The trainer's step.
        action: ``"heal"``: made complete again; ``"partial"``: lost tensors are recorded, the rest can be restored;
            ``"quarantine"``: its manifest is moved to quarantine; ``"revive"``, ``"bring back"``: another manifest
            takes its place.
        reason: Why.
        tensors: Dotted paths of lost tensors.
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
        entries: Damaged checkpoints.
        packs: For the id of each damaged pack, what is wrong with it.
        packs_rescued: Packs in the trash that manifests need.
        claims_made: ``run/seq`` of missing claims.
        bytes_copied: Bytes of frames copied to new packs.
        left: Sentences on what cannot be repaired.
        is_identity_made: ``store.json`` was missing, and was or would be made again from manifests and packs.
        packs_elsewhere: Number of packs in other tiers, which were not read.
        segments: Damaged segments of journals.
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
    segments: tuple[SegmentRepair, ...] = ()

    __repr__ = repr_of_summary

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found damaged."""
        if self.is_identity_made:
            return False
        return not (self.entries or self.packs or self.packs_rescued or self.claims_made or self.left or self.segments)

    @property
    def partial(self) -> tuple[RepairEntry, ...]:
        """Checkpoints of which some data is lost."""
        return tuple(entry for entry in self.entries if entry.action == "partial")


def repair(
    repository: Repository,
    *,
    dry_run: bool,
    sources: Sequence[Backend] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> RepairReport:
    """Plan and, unless it is a dry run, repair.

    Args:
        repository: The store.
        dry_run: Only plan.
        sources: Copies of the store.
        on_progress: Called with the number of packs checked and the total.

    Raises:
        ConflictError: Another live process writes a damaged run, or has replaced a checkpoint meanwhile.
        CapacityError: The disk is full. Each checkpoint is as before, or repaired.
    """
    plan = plan_repair(repository, sources=sources, on_progress=on_progress)
    copies = Copies(repository, plan)
    segments = plan_segments(repository, sources)
    if not dry_run:
        _act(repository, plan, copies)
        segments = [_replace_segment(repository, segment, sources) for segment in segments]
    report = replace(_report(plan, copies, dry_run=dry_run), segments=tuple(segments))
    if not any(entry.is_done and entry.action in ("revive", "bring back") for entry in report.entries):
        return report
    # The packs of these manifests were not checked yet.
    again = repair(repository, dry_run=False, sources=sources, on_progress=on_progress)
    return replace(
        again,
        entries=(*report.entries, *again.entries),
        packs={**report.packs, **again.packs},
        packs_rescued=(*report.packs_rescued, *again.packs_rescued),
        claims_made=(*report.claims_made, *again.claims_made),
        bytes_copied=report.bytes_copied + again.bytes_copied,
        segments=report.segments,
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
        packs={pack_id.hex(): problem for pack_id, problem in plan.damaged_packs.items()},
        packs_rescued=tuple(pack_id.hex() for pack_id in plan.in_trash),
        claims_made=tuple(f"{run}/{seq}" for run, seq in plan.claims),
        bytes_copied=copies.nbytes,
        left=tuple(plan.left),
        packs_elsewhere=plan.search.packs_elsewhere,
    )


def _act(repository: Repository, plan: RepairPlan, copies: Copies) -> None:
    for run in {run for run, _ in plan.claims}:
        repository.for_run(run).make_folders()
    for run, seq in plan.claims:
        with contextlib.suppress(FileExistsError):
            repository.backend.create(paths.claim_name(run, seq), b"", sync=False)
        repository.backend.sync_folder(paths.claims_folder(run))
    for pack_id in plan.in_trash:
        repository.trash.rescue_pack(pack_id)
    copies.write()
    for run in sorted({mend.name.run for mend in plan.mends}):
        with _writing(repository, run) as run_repository:
            _mend_run(run_repository, [mend for mend in plan.mends if mend.name.run == run], plan, copies)
    _quarantine_packs(repository, plan)


@contextlib.contextmanager
def _writing(repository: Repository, run: str) -> Iterator[Repository]:
    """Hold the lease of a run while its manifests are changed."""
    if run == repository.run:
        repository.prepare_run()
        repository.lease.take()
        try:
            yield repository
        finally:
            # The next commit must not follow a replaced checkpoint.
            repository.forget_run_state()
        return
    other = repository.for_run(run)
    try:
        other.prepare_run()
        other.lease.take()
        yield other
    finally:
        other.lease.release()


def _replace_segment(repository: Repository, segment: SegmentRepair, sources: Sequence[Backend]) -> SegmentRepair:
    if not segment.sources:
        return segment
    with _writing(repository, segment.run) as run_repository:
        return replace(segment, is_done=replace_segment(run_repository, segment, sources))


def _mend_run(repository: Repository, mends: Sequence[Mend], plan: RepairPlan, copies: Copies) -> None:
    # Put the new manifest in place before quarantining the old one. A crash then leaves too many files, never too few.
    for mend in mends:
        if mend.action == "revive" and mend.source is not None:
            mend.is_done = repository.trash.put_back(mend.source[1], mend.name.path)
    for mend in mends:
        if mend.action == "quarantine":
            mend.is_done = quarantine_manifest(repository.backend, mend.name) is not None
    for mend in mends:
        if mend.action in ("heal", "partial"):
            mend.is_done = _replace(repository, mend, plan, copies)
        elif mend.action == "bring back" and mend.source is not None:
            mend.is_done = _bring_back(repository, mend.name, *mend.source[:2])


def _replace(repository: Repository, mend: Mend, plan: RepairPlan, copies: Copies) -> bool:
    """Publish the next generation of a manifest, which names only sound packs."""
    name = mend.name
    manifest = plan.search.load(name)
    if any(
        other.seq == name.seq and other.generation > name.generation for other in repository.manifests.listing().names
    ):
        raise ConflictError(
            f"seq {name.seq} was replaced by another process after the repair was planned",
            where=repository.backend.root,
            todo="run `ckstore repair` again",
        )
    repository.lease.check()
    # Never reuse the generation of a quarantined manifest.
    quarantined_generations = [
        other.generation for other in quarantined_names(repository.backend, name.run) if other.seq == name.seq
    ]
    frames = [*copies.located(manifest, mend.picks), *lost_frames(mend.lost)]
    replacement = _next_generation(manifest, frames, max(name.generation, *quarantined_generations, 0) + 1)
    published = repository.manifests.publish(replacement)
    try:
        finish_replacement(repository, replacement, published)
    except DroppedError as error:
        _log.warning("%s; it stays deleted", error.what)
        return False
    return True


def _next_generation(manifest: Manifest, known: Sequence[LocatedFrame], generation: int) -> Manifest:
    header = manifest.header
    packs, frames = locate(known)
    replacement = relocated(
        manifest,
        generation=generation,
        packs=packs,
        frames=frames,
        bytes_written=header.bytes_written,
        chunks_new=0,
        decisions=manifest.decisions,
    )
    counts = replace(replacement.header, chunks_new=header.chunks_new, chunks_reused=header.chunks_reused)
    return replace(replacement, header=counts)


def _bring_back(repository: Repository, name: ManifestName, source: Backend, path: str) -> bool:
    """Copy a manifest, which was read and checked, from a copy of the store."""
    content = source.read_bytes(path, nbytes_max=repository.limits.manifest_nbytes_max)
    draft = paths.draft_name(new_token())
    repository.backend.create(draft, content, sync=True)
    is_back = True
    try:
        repository.backend.link(draft, name.path)
    except FileExistsError:
        is_back = False
    repository.backend.sync_folder(paths.manifests_folder(name.run))
    with contextlib.suppress(FileNotFoundError):
        repository.backend.unlink(draft)
    return is_back


def _quarantine_packs(repository: Repository, plan: RepairPlan) -> None:
    """Move damaged packs that no manifest in place names to quarantine."""
    named: set[PackId] = set()
    for run in repository.runs():
        manifests = repository.manifests_of(run)
        listing = manifests.listing()
        for name in (*listing.names, *listing.lower):
            try:
                named |= {pack.pack_id for pack in manifests.load(name).packs}
            except FileNotFoundError:
                continue
            except (CorruptError, UnsupportedError) as error:
                plan.left.append(f"no packs were moved to quarantine, because {name.file} may name them: {error.what}")
                return
    for pack_id in sorted(set(plan.damaged_packs) - named):
        # A commit that reuses a frame of this pack now checks for it after publishing, and withdraws.
        quarantine_pack(repository.backend, paths.pack_name(pack_id), pack_id)
        for path in list(repository.trash.find_pack(pack_id)):
            quarantine_pack(repository.backend, path, pack_id)


@dataclass(frozen=True, slots=True)
class _Source:
    """A frame to copy, or to store again as plain bytes."""

    copy: PackCopy
    offset: int
    chunk_id: ChunkId
    is_plain: bool


class Copies:
    """The frames that a repair copies to new packs."""

    def __init__(self, repository: Repository, plan: RepairPlan) -> None:
        self._repository = repository
        self._search = plan.search
        self._headers: dict[_Source, FrameHeader] = {}
        self._places: dict[_Source, FrameSlot] = {}
        self._refs: dict[PackId, PackRef] = {}
        for mend in plan.mends:
            if mend.picks:
                manifest = plan.search.load(mend.name)
                for pick in mend.picks:
                    self._want(manifest, pick)

    @property
    def nbytes(self) -> int:
        """Bytes of these frames."""
        return sum(FRAME_HEADER_NBYTES + header.stored_nbytes for header in self._headers.values())

    def _want(self, manifest: Manifest, first: Pick) -> None:
        pick: Pick | None = first
        while pick is not None:
            source = self._source_of(manifest, pick)
            if source is not None and source not in self._headers:
                self._headers[source] = self._header_of(manifest, pick)
            pick = pick.base

    def _source_of(self, manifest: Manifest, pick: Pick) -> _Source | None:
        """Return what to copy for a pick; None if its frame stays where it is."""
        if pick.index < 0:
            found = self._search.found[pick.chunk_id]
            return _Source(found.copy, found.offset, pick.chunk_id, pick.is_plain)
        frame = manifest.frames[pick.index]
        state = self._search.states.get(manifest.packs[frame.pack].pack_id)
        if state is None or not state.is_damaged:
            return None
        assert state.copy is not None, "a sound frame has a copy"
        return _Source(state.copy, frame.offset, pick.chunk_id, False)

    def _header_of(self, manifest: Manifest, pick: Pick) -> FrameHeader:
        if pick.index >= 0:
            frame = manifest.frames[pick.index]
            state = self._search.states[manifest.packs[frame.pack].pack_id]
            return state.frames[frame.chunk_id, frame.offset, frame.stored_nbytes]
        header = self._search.found[pick.chunk_id].header
        if not pick.is_plain:
            return header
        return replace(header, base_id=NO_BASE, steps=(), stored_nbytes=header.plain_nbytes)

    def write(self) -> None:
        """Copy the frames to new packs, check each where it was written, and make the packs durable."""
        waiting = list(self._headers.items())
        while waiting:
            # A pack contains a chunk only once. A second form of a chunk goes to another pack.
            chunk_ids: set[ChunkId] = set()
            this_pass: list[tuple[_Source, FrameHeader]] = []
            later: list[tuple[_Source, FrameHeader]] = []
            for row in waiting:
                (later if row[0].chunk_id in chunk_ids else this_pass).append(row)
                chunk_ids.add(row[0].chunk_id)
            self._write_packs(this_pass)
            waiting = later

    def _write_packs(self, rows: Sequence[tuple[_Source, FrameHeader]]) -> None:
        with BufferPool(BLOCK_NBYTES, BLOCKS) as pool:
            packer = PackWriter(
                self._repository.backend,
                pool,
                store_id=self._repository.store_id,
                nbytes_expected=sum(FRAME_HEADER_NBYTES + header.stored_nbytes for _, header in rows),
                copy=kernels.copy_bytes,
            )
            try:
                for source, header in rows:
                    self._copy(packer, source, header)
                self._refs.update({ref.pack_id: ref for ref in packer.finish()})
            except BaseException:
                packer.fail()
                packer.abandon()
                raise

    def _copy(self, packer: PackWriter, source: _Source, header: FrameHeader) -> None:
        payload = self._payload(source, header)

        def check(pieces: Sequence[memoryview], _: int) -> None:
            if b"".join(pieces) != payload:
                raise CorruptError("a frame changed while it was copied", todo="test this machine's memory")

        place = self._places[source] = packer.reserve(header.stored_nbytes)
        packer.fill(place, header, [memoryview(payload)], check)

    def _payload(self, source: _Source, header: FrameHeader) -> bytes:
        if source.is_plain:
            plain = self._search.decoded(source.chunk_id)
            assert chunk_id_of(memoryview(plain)) == source.chunk_id, "decoded chunks have the right id"
            return plain
        with contextlib.suppress(CorruptError, FileNotFoundError):
            found, payload = self._search.pack_copies.read(source.copy, source.offset, header.stored_nbytes)
            if found == header:
                return payload
        raise ConflictError(
            "a frame that was sound when the repair was planned is now missing or damaged",
            where=f"{source.copy.path}, offset {source.offset}",
            todo="run `ckstore repair` again",
        )

    def located(self, manifest: Manifest, picks: Iterable[Pick]) -> list[LocatedFrame]:
        """Return the frames of a manifest after copying."""
        made: dict[ChunkId, LocatedFrame] = {}
        return [self._located(manifest, pick, made) for pick in picks]

    def _located(self, manifest: Manifest, pick: Pick, made: dict[ChunkId, LocatedFrame]) -> LocatedFrame:
        # Iterate: chains may be longer than Python's recursion limit.
        chain: list[Pick] = []
        below: Pick | None = pick
        while below is not None and below.chunk_id not in made:
            chain.append(below)
            below = below.base
        for each in reversed(chain):
            base = None if each.base is None else made[each.base.chunk_id]
            made[each.chunk_id] = self._locate(manifest, each, base)
        return made[pick.chunk_id]

    def _locate(self, manifest: Manifest, pick: Pick, base: LocatedFrame | None) -> LocatedFrame:
        source = self._source_of(manifest, pick)
        if source is None:
            frame = manifest.frames[pick.index]
            return LocatedFrame(frame, manifest.packs[frame.pack], base)
        place = self._places[source]
        ref = FrameRef(pick.chunk_id, 0, place.offset, place.stored_nbytes)
        return LocatedFrame(ref, self._refs[place.pack.pack_id], base)


@contextmanager
def open_copies(sources: Sequence[str | os.PathLike[str] | Backend], store_id: bytes | None) -> Iterator[list[Backend]]:
    """Open copies of a store, and close them afterwards.

    Args:
        sources: Folders, URLs or backends. A backend is not closed.
        store_id: The id that each copy must have; None: any.

    Raises:
        UsageError: A source is another store.
    """
    backends: list[Backend] = []
    opened: list[Backend] = []
    try:
        for source in sources:
            backend = backend_for(source, allow_shared_folder=True)
            backends.append(backend)
            if backend is not source:
                opened.append(backend)
            if store_id is not None and bytes.fromhex(read_store_record(backend).store_id) != store_id:
                raise UsageError("this is another store, and no copy of this one", where=backend.root)
        yield backends
    finally:
        for backend in opened:
            backend.close()


def repair_store(
    path: str | os.PathLike[str] | Backend,
    *,
    dry_run: bool = True,
    sources: Sequence[str | os.PathLike[str] | Backend] = (),
    allow_shared_folder: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> RepairReport:
    """Repair a store as ``Store.repair`` does, even if it cannot be opened because ``store.json`` is missing.

    ``store.json`` is then written again from the store's id, which manifests and packs carry. Settings that were only
    in ``config.json``, such as the addresses of tiers, are not recovered.

    Args:
        path: A folder, a URL, or a backend.
        dry_run: Only report what would be done.
        sources: Copies of this store: folders, URLs or backends.
        allow_shared_folder: Accept a folder that other users can write to.
        on_progress: Called with packs read and packs in total.

    Raises:
        NotFoundError: There is no store, and no trace of one.
        ConflictError: The files belong to several stores, or a live process writes a run that needs repair.
        CapacityError: The disk is full. Each checkpoint is unchanged or repaired.
    """
    backend = backend_for(path, allow_shared_folder=allow_shared_folder)
    with open_copies(sources, None) as copies:
        record, is_made = record_or_remade(backend, SYSTEM_CLOCK, copies)
    if is_made and not dry_run:
        write_store_record(backend, record)
    repository = Repository(backend, record, "main")
    with contextlib.closing(repository), open_copies(sources, repository.store_id) as copies:
        report = repair(repository, dry_run=dry_run, sources=copies, on_progress=on_progress)
    return replace(report, is_identity_made=is_made)
