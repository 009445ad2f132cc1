"""The story of a mirror: keep a second copy of a store elsewhere, all runs of it, that is a store of its own.

For each checkpoint that is not there in its newest form: take its seq there, copy its packs and see them there, put its
manifest. Then tags. Nothing here changes, and nothing there is removed: what was dropped here stays there.

Invariants:
- A checkpoint exists there only when all that it needs was seen there, and every byte of it was found to be what was
  committed: a copy of damage is none.
- One that is damaged, or in a tier that cannot be reached, keeps no other from being copied; which those were is told
  at the end, by an error.
- A mirror that was interrupted is done again, and copies what is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckstore.errors import CorruptError, NotFoundError, UnreachableError, UsageError
from ckstore.format import paths
from ckstore.format.manifest import Manifest, PackRef
from ckstore.format.paths import ManifestName
from ckstore.format.records import encode_record
from ckstore.io.backend import Backend, ReadFile
from ckstore.io.url import backend_for
from ckstore.store.chunk_index import LOST_TIER
from ckstore.store.manifests import DroppedError
from ckstore.store.refs import load_whole
from ckstore.store.repository import Repository
from ckstore.store.tags import Tags
from ckstore.tiers.copy import PackCopy, StoreCopy
from ckstore.tiers.verify_copy import IncomingPackCheck, partial_copy_error


@dataclass(frozen=True, slots=True)
class MirrorRun:
    """What a mirror did with one run, or would do.

    Attributes:
        run: The run.
        checkpoint_count: Checkpoints of it here.
        copied_count: Those that were not there in their newest form.
        partial_count: Those of which parts are lost; they are left out.
        kept_count: Checkpoints there that are not here any more.
        tag_count: Tags that were set or moved there.
        damaged_count: Those that are damaged here, or there; they were not copied.
        unreachable_count: Those that are in a tier that cannot be reached; they were not copied.
    """

    run: str
    checkpoint_count: int
    copied_count: int
    partial_count: int
    kept_count: int
    tag_count: int
    damaged_count: int = 0
    unreachable_count: int = 0


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """What a mirror did, or would do.

    Attributes:
        address: Where the copy is.
        is_dry_run: Nothing was copied.
        runs: Each run.
        bytes_copied: Bytes of packs that were not there.
        packs_copied: How many.
    """

    address: str
    is_dry_run: bool
    runs: tuple[MirrorRun, ...]
    bytes_copied: int
    packs_copied: int


def mirror(
    repository: Repository,
    address: str,
    *,
    read_back: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> MirrorReport:
    """Copy what is not there.

    Args:
        repository: The store; any run of it.
        address: Where the copy is: a bucket, or a folder.
        read_back: Read every pack that is copied back, and compare.
        dry_run: Only count.
        on_progress: Called with checkpoints done, and in all.

    Raises:
        UsageError: Another store lies there, or it is the same place.
        ConflictError: A checkpoint there is another one.
        CorruptError: Of some, a pack here is damaged or missing, or one there is not ours: these were not copied, and
            all others were. Its ``checkpoints`` names them, its ``report`` tells of all.
        UnreachableError: Some are in a tier that cannot be reached: these were not copied, and all others were; it has
            the same facts. Without a ``report``, it is the address of the copy that cannot be reached.
        BackendError: The place does not answer.
    """
    repository.require_same_store()
    target = backend_for(address)
    if target.root == repository.backend.root:
        raise UsageError("a store is no copy of itself", where=target.root, todo="name another place")
    try:
        return _Mirror(repository, target, read_back=read_back).run(dry_run=dry_run, on_progress=on_progress)
    finally:
        target.close()


class _Mirror:
    """One run of a mirror."""

    def __init__(self, repository: Repository, target: Backend, *, read_back: bool) -> None:
        self._repository = repository
        self._target = target
        self._store = StoreCopy(repository, target)
        self._packs = PackCopy(repository, target, reads_back=read_back, check=self._check)
        self._arrivals: IncomingPackCheck | None = None
        self._damaged: dict[ManifestName, CorruptError | UnreachableError] = {}
        self._left_out: set[tuple[str, int]] = set()

    def run(self, *, dry_run: bool, on_progress: Callable[[int, int], None] | None) -> MirrorReport:
        tell = on_progress or (lambda done, total: None)
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
                tell(done, total)
            tags = 0 if dry_run else sum(self._copy_tags(run))
            gone = {name.seq for name in there[run]} - {name.seq for name in here[run]}
            reports.append(MirrorRun(run, len(here[run]), copied, partial, len(gone), tags, *self._counts(run)))
        copies = self._packs.copied
        report = MirrorReport(self._target.root, dry_run, tuple(reports), sum(copies.values()), len(copies))
        if self._damaged:
            raise partial_copy_error("copied", self._damaged, report)
        return report

    def _counts(self, run: str) -> tuple[int, int]:
        """Return how many of a run are damaged, and how many cannot be reached."""
        found = [isinstance(error, UnreachableError) for name, error in self._damaged.items() if name.run == run]
        return found.count(False), found.count(True)

    def _names_there(self, run: str) -> set[ManifestName]:
        files = self._target.list_names(paths.manifests_folder(run))
        return {name for file in files if (name := paths.parse_manifest_file(run, file)) is not None}

    def _copy(self, name: ManifestName) -> bool:
        """Copy a checkpoint; return False for one that is partial, damaged, out of reach, or gone."""
        try:
            manifest = self._loaded(name)
            if any(pack.tier == LOST_TIER for pack in manifest.packs):
                return False
            self._store.claim(manifest.header)
            self._arrivals = IncomingPackCheck(self._repository, manifest.header.name, manifest, copy=self._target)
            self._packs.run(manifest.packs)
            self._store.put_manifest(manifest)
        except DroppedError:
            return False
        except (CorruptError, UnreachableError) as error:
            self._damaged[name] = error
            return False
        return True

    def _check(self, pack: PackRef, file: ReadFile, *, is_new: bool) -> None:
        assert self._arrivals is not None, "a checkpoint is being copied"
        self._arrivals.check(pack, file, is_new=is_new)

    def _loaded(self, name: ManifestName) -> Manifest:
        if name.run == self._repository.run:
            return load_whole(self._repository, name)
        return load_whole(self._repository.for_run(name.run), name)

    def _copy_tags(self, run: str) -> Iterator[bool]:
        """Set each tag there that is not as it is here; yield whether it was set."""
        there = Tags(self._target, run, self._repository.clock)
        for name, record in sorted(Tags(self._repository.backend, run, self._repository.clock).all().items()):
            if (run, record.seq) in self._left_out:
                # It would point to nothing there.
                continue
            # A damaged one is set anew.
            with contextlib.suppress(NotFoundError, CorruptError):
                if there.get(name) == record:
                    continue
            self._store.replace_small(paths.tag_name(run, name), encode_record(record))
            yield True
