"""Keep a second copy of a whole store, all runs of it, in another place. The copy is a store of its own.

For each checkpoint whose newest generation is not there: claim its seq there, copy and check its packs, put its
manifest. Then the tags, and the segments of journals that have a keyframe there. Nothing changes here, and nothing is
removed there: checkpoints dropped here stay there.

Invariants:
- A checkpoint exists there only after every byte of its packs was checked, so damage is never copied.
- A damaged or unreachable checkpoint does not keep others from being copied. An error at the end names them all.
- An interrupted mirror can be run again and copies the rest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckstore.display import repr_of_summary
from ckstore.errors import CorruptError, NotFoundError, UnreachableError, UsageError
from ckstore.format import paths
from ckstore.format.manifest import Manifest, PackRef
from ckstore.format.paths import ManifestName
from ckstore.format.records import encode_record
from ckstore.io.backend import Backend, ReadFile
from ckstore.io.url import backend_for
from ckstore.store.chunk_index import LOST_TIER
from ckstore.store.journal_needs import JournalState
from ckstore.store.manifests import DroppedError
from ckstore.store.points import has_journal
from ckstore.store.refs import load_whole
from ckstore.store.repository import Repository
from ckstore.store.tags import Tags
from ckstore.tiers.copy import PackCopy, StoreCopy
from ckstore.tiers.segments import SegmentCopy, segments_of
from ckstore.tiers.verify_copy import IncomingPackCheck, partial_copy_error


@dataclass(frozen=True, slots=True)
class MirrorRun:
    """Result of a mirror for one run.

    Attributes:
        run: Name of the run.
        checkpoint_count: Checkpoints of the run here.
        copied_count: Checkpoints whose newest generation was not there; copied unless it is a dry run.
        partial_count: Checkpoints with lost packs, which are not copied.
        kept_count: Checkpoints there that no longer exist here.
        tag_count: Tags that were set or moved there.
        damaged_count: Checkpoints that are damaged here or there, which were not copied.
        unreachable_count: Checkpoints in a tier that cannot be reached, which were not copied.
        points_copied: Points of the journal that were copied, or would be.
    """

    run: str
    checkpoint_count: int
    copied_count: int
    partial_count: int
    kept_count: int
    tag_count: int
    damaged_count: int = 0
    unreachable_count: int = 0
    points_copied: int = 0


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """Result of a mirror.

    Attributes:
        address: Address of the copy.
        is_dry_run: True if nothing was copied.
        runs: Result for each run.
        bytes_copied: Bytes of the packs that were copied.
        packs_copied: Number of packs that were copied.
        points_copied: Points of journals that were copied, or would be.
        journal_bytes_copied: Bytes of the segments that contain them.
    """

    address: str
    is_dry_run: bool
    runs: tuple[MirrorRun, ...]
    bytes_copied: int
    packs_copied: int
    points_copied: int = 0
    journal_bytes_copied: int = 0

    __repr__ = repr_of_summary


def mirror(
    repository: Repository,
    address: str | Path,
    *,
    read_back: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> MirrorReport:
    """Copy the checkpoints that are missing in another place.

    Args:
        repository: The store; any run of it.
        address: Address of the copy: a bucket or a folder.
        read_back: Read every copied pack back and compare it.
        dry_run: Only count.
        on_progress: Called with the number of checkpoints done, and in total.

    Raises:
        UsageError: Another store is there, or it is the same place.
        ConflictError: A seq there belongs to another checkpoint.
        CorruptError: Some packs here are damaged or missing, or packs there have other bytes. Their checkpoints were
            not copied, all others were. ``checkpoints`` names them, ``report`` is the whole result. Or a segment of a
            journal here is damaged: then everything else was copied.
        UnreachableError: Some checkpoints are in a tier that cannot be reached; all others were copied. It has the same
            attributes. Without a ``report``, the copy itself cannot be reached.
        BackendError: The place does not respond.
    """
    repository.require_same_store()
    target = backend_for(os.fspath(address))
    if target.root == repository.backend.root:
        raise UsageError("a store cannot be mirrored to itself", where=target.root, todo="choose another place")
    try:
        return _Mirror(repository, target, read_back=read_back).run(dry_run=dry_run, on_progress=on_progress)
    finally:
        target.close()


class _Mirror:
    """Copies one store to one place."""

    def __init__(self, repository: Repository, target: Backend, *, read_back: bool) -> None:
        self._repository = repository
        self._target = target
        self._store = StoreCopy(repository, target)
        self._packs = PackCopy(repository, target, reads_back=read_back, check=self._check)
        self._pack_check: IncomingPackCheck | None = None
        self._damaged: dict[ManifestName, CorruptError | UnreachableError] = {}
        self._left_out: set[tuple[str, int]] = set()
        self._segments = SegmentCopy(repository.backend, target, repository.limits, read_back)

    def run(self, *, dry_run: bool, on_progress: Callable[[int, int], None] | None) -> MirrorReport:
        report_progress = on_progress or (lambda done, total: None)
        self._segments.is_dry_run = dry_run
        runs = self._repository.runs()
        if not dry_run:
            self._store.prepare()
        here = {run: self._repository.manifests_of(run).listing().names for run in runs}
        there = {run: self._names_there(run) for run in runs}
        total = sum(len(names) for names in here.values())
        done, reports = 0, []
        for run in runs:
            copied = partial = 0
            for name in here[run]:
                is_new = name not in there[run]
                if is_new and not dry_run:
                    is_new = self._copy(name)
                    partial += not is_new and name not in self._damaged
                    if not is_new and all(other.seq != name.seq for other in there[run]):
                        self._left_out.add((run, name.seq))
                copied += is_new
                done += 1
                report_progress(done, total)
            self._copy_segments(run, here[run] if dry_run else self._names_there(run))
            # After the points that they are on.
            tags = 0 if dry_run else sum(self._copy_tags(run))
            gone = {name.seq for name in there[run]} - {name.seq for name in here[run]}
            found = MirrorRun(run, len(here[run]), copied, partial, len(gone), tags, *self._counts(run))
            reports.append(replace(found, points_copied=self._segments.points.get(run, 0)))
        copies = self._packs.copied
        report = MirrorReport(self._target.root, dry_run, tuple(reports), sum(copies.values()), len(copies))
        report = replace(report, points_copied=self._segments.point_count, journal_bytes_copied=self._segments.nbytes)
        if self._damaged:
            raise partial_copy_error("copied", self._damaged, report)
        failure = self._segments.failure("copied", report)
        if failure is not None:
            raise failure
        return report

    def _copy_segments(self, run: str, names: Iterable[ManifestName]) -> None:
        """Copy the segments of a run with points that can be restored from these checkpoints."""
        repository = self._repository.for_run(run)
        if not has_journal(repository):
            return
        seqs = {name.seq for name in names}
        state = JournalState.read(repository, is_strict=False)
        state = state.without([entry.seq for entry in state.entries if entry.seq not in seqs])
        self._segments.run(state.journal, {*segments_of(state, seqs), *state.journal.problems})

    def _counts(self, run: str) -> tuple[int, int]:
        """Return how many checkpoints of a run are damaged, and how many cannot be reached."""
        found = [isinstance(error, UnreachableError) for name, error in self._damaged.items() if name.run == run]
        return found.count(False), found.count(True)

    def _names_there(self, run: str) -> set[ManifestName]:
        files = self._target.list_names(paths.manifests_folder(run))
        return {name for file in files if (name := paths.parse_manifest_file(run, file)) is not None}

    def _copy(self, name: ManifestName) -> bool:
        """Copy a checkpoint. Return False if it is partial, damaged, unreachable or dropped."""
        try:
            manifest = self._loaded(name)
            if any(pack.tier == LOST_TIER for pack in manifest.packs):
                return False
            self._store.claim(manifest.header)
            self._pack_check = IncomingPackCheck(self._repository, manifest.header.name, manifest, copy=self._target)
            self._packs.run(manifest.packs)
            self._store.put_manifest(manifest)
        except DroppedError:
            return False
        except (CorruptError, UnreachableError) as error:
            self._damaged[name] = error
            return False
        return True

    def _check(self, pack: PackRef, file: ReadFile, *, is_new: bool) -> None:
        assert self._pack_check is not None, "a checkpoint is being copied"
        self._pack_check.check(pack, file, is_new=is_new)

    def _loaded(self, name: ManifestName) -> Manifest:
        if name.run == self._repository.run:
            return load_whole(self._repository, name)
        return load_whole(self._repository.for_run(name.run), name)

    def _copy_tags(self, run: str) -> Iterator[bool]:
        """Set each tag there that differs from the tag here; yield True for each."""
        there = Tags(self._target, run, self._repository.clock)
        for name, record in sorted(Tags(self._repository.backend, run, self._repository.clock).all().items()):
            if (run, record.seq) in self._left_out:
                # The checkpoint was not copied, so the tag would point to nothing.
                continue
            # A damaged tag there is replaced.
            with contextlib.suppress(NotFoundError, CorruptError):
                if there.get(name) == record:
                    continue
            self._store.replace_small(paths.tag_name(run, name), encode_record(record))
            yield True
