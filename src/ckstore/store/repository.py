"""An opened store, seen from one run: its manifests, tags, lease, trash, tiers and chunk index.

Also the last steps of replacing a manifest by its next generation: the same checkpoint in another form or place
(docs/FORMAT.md section 10, Replace).

Invariants of a replacement:
- A lower generation is moved to the trash only after every pack of the higher one was found.
- A drop mark wins: the replacement is withdrawn and the checkpoint stays dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckstore.clock import SYSTEM_CLOCK, Clock
from ckstore.config import Limits, check_name, is_name
from ckstore.errors import (
    BackendError,
    CapacityError,
    CkstoreError,
    ConflictError,
    CorruptError,
    MissingChunkError,
    NotFoundError,
    UnsupportedError,
    UsageError,
    counted,
    is_refused,
)
from ckstore.format import paths
from ckstore.format.paths import ManifestName
from ckstore.format.records import StoreRecord
from ckstore.format.tree import is_in_replay_form
from ckstore.hashing import PackId
from ckstore.io.backend import Ageing, Backend, Distant, Probing
from ckstore.store.chunk_index import LOCAL_TIER, ChunkIndex
from ckstore.store.lease import Lease
from ckstore.store.manifests import DroppedError, Manifests
from ckstore.store.pending_deletes import packs_pending_deletion
from ckstore.store.reserve import fill_reserve
from ckstore.store.store_config import read_store_record, require_same_store
from ckstore.store.tags import Tags, require_intent
from ckstore.store.tiers import Tiers, packs_gone
from ckstore.store.trash import Trash

if TYPE_CHECKING:
    from ckstore.format.manifest import Manifest, PackRef


_log = logging.getLogger("ckstore")

_RENEWED_AFTER_NS = 86400 * 10**9
OTHER_RUNS_MAX = 16
"""Other runs whose newest checkpoint is indexed for reuse. Bounds what the first commit reads."""


class Repository:
    """An opened store and one of its runs, as one handle uses them.

    Args:
        backend: The store.
        record: Its ``store.json``.
        run: The run that is read and written.
        clock: The time source.
    """

    def __init__(self, backend: Backend, record: StoreRecord, run: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.backend = backend
        self.record = record
        self.run = check_name(run, "run")
        self.clock = clock
        self.store_id = bytes.fromhex(record.store_id)
        self.limits = Limits(
            chunk_nbytes_max=record.chunk_nbytes_max,
            pack_nbytes_max=record.pack_nbytes_max,
            manifest_nbytes_max=record.manifest_nbytes_max,
            depth_max=record.depth_max,
        )
        self.manifests = self.manifests_of(run)
        self.tags = Tags(backend, run, clock)
        self.trash = Trash(backend)
        self.lease = Lease(backend, run, clock)
        self.chunk_index = ChunkIndex()
        self.tiers = Tiers(backend, self.store_id, clock)
        self.newest: Manifest | None = None
        """The newest complete checkpoint of the run when the first commit began."""
        self.retention: Mapping[str, Any] = {}
        """Rules by which a commit on a full disk drops checkpoints of its own run. Empty: it drops none."""
        self._seq_highest: int | None = None
        self._nbytes_written_last: int | None = None
        self._times_renewed: float | None = None

    @property
    def engine_name(self) -> str:
        """The I/O engine that reads and writes packs."""
        return self.backend.engine_name

    def manifests_of(self, run: str) -> Manifests:
        """Return the manifests of any run of this store."""
        return Manifests(self.backend, run, store_id=self.store_id, limits=self.limits)

    def for_run(self, run: str) -> Repository:
        """Return a repository for another run of this store. It shares the open tiers."""
        other = Repository(self.backend, self.record, run, clock=self.clock)
        other.tiers = self.tiers
        return other

    def runs(self) -> list[str]:
        """Return the names of all runs, sorted."""
        return [name for name in self.backend.list_names(paths.MANIFESTS_FOLDER) if is_name(name)]

    def runs_with_claims(self) -> list[str]:
        """Return the names of all runs, sorted, including runs of which only claims are left."""
        claimed = filter(is_name, self.backend.list_names(paths.CLAIMS_FOLDER))
        return sorted({*self.runs(), *claimed})

    def require_same_store(self) -> None:
        """Check that the path still leads to the store that was opened. A bucket is not checked: it has no mounts.

        Raises:
            ConflictError: Another store is at this path now.
            UnreachableError: No store is at this path now.
        """
        if not isinstance(self.backend, Distant):
            require_same_store(self.backend, self.store_id)

    def prepare_run(self) -> None:
        """Before a commit: make folders. Before the first commit, also index the chunks that can be reused."""
        self.make_folders()
        if self._seq_highest is not None:
            return
        if isinstance(self.backend, Probing):
            # The store may have been made by a push, which needs less of a backend than a commit.
            self.backend.probe()
        # The process that made the store may not have reached its last sync. Without this one, a power cut could remove
        # store.json under acknowledged checkpoints.
        self.backend.sync_folder("")
        self.manifests.make_folders()
        listing = self.manifests.listing()
        seqs = [name.seq for name in (*listing.names, *listing.lower)]
        self._seq_highest = max([listing.claimed_max, *seqs, *listing.dropped, -1])
        self._fill_chunk_index()
        fill_reserve(self.backend)

    def make_folders(self) -> None:
        """Make missing folders of the store and the run. Copies and purges leave out empty folders.

        Raises:
            UnreachableError: The store itself is gone.
            CorruptError: ``store.json`` is missing.
        """
        if not isinstance(self.backend, Distant):
            if self.backend.stat(paths.STORE_FILE) is None:
                # Another disk, or none, may be mounted here now. Then make nothing.
                self._raise_for_missing_record()
            for folder in paths.TOP_FOLDERS:
                if self.backend.make_folder(folder):
                    self.backend.sync_folder("")
        self.manifests.make_folders()

    def _raise_for_missing_record(self) -> None:
        """Raise the error for a missing ``store.json``: only that file is gone, or the whole store."""
        try:
            read_store_record(self.backend)
        except NotFoundError:
            require_same_store(self.backend, self.store_id)

    def renew_file_times(self, packs: Iterable[PackRef]) -> None:
        """Set the modification times of files that are still needed to now, at most once an hour. Never raises.

        Purges of scratch file systems delete files that were not modified for weeks. A running training still needs
        ``store.json``, the configuration, tags, and the packs of the newest checkpoint.
        """
        now = self.clock.monotonic()
        if not isinstance(self.backend, Ageing) or (
            self._times_renewed is not None and now - self._times_renewed < 3600
        ):
            return
        self._times_renewed = now
        try:
            tags = (paths.tag_name(self.run, name) for name in self.backend.list_names(paths.tags_folder(self.run)))
            names = [*paths.TOP_FILES, *tags, *(paths.pack_name(p.pack_id) for p in packs if p.tier == LOCAL_TIER)]
            before_ns = self.clock.now_ns() - _RENEWED_AFTER_NS
            for name in names:
                self.backend.renew(name, before_ns=before_ns)
        except CkstoreError as error:
            _log.debug("could not renew the times of files: %s", error)

    def _fill_chunk_index(self) -> None:
        others = sorted((run for run in self.runs() if run != self.run), key=self._modified_ns, reverse=True)
        others = others[:OTHER_RUNS_MAX]
        newest: list[tuple[Manifests, int]] = [(self.manifests_of(run), 1) for run in others]
        newest.append((self.manifests, self.chunk_index.manifests_max))
        for manifests, count in newest:
            for name in self._names_to_index(manifests)[-count:]:
                try:
                    manifest = manifests.load(name)
                    self.chunk_index.add(manifest)
                    if manifests is self.manifests:
                        self.newest = manifest
                        self._nbytes_written_last = manifest.header.bytes_written
                except (CorruptError, UnsupportedError, BackendError, FileNotFoundError) as error:
                    if isinstance(error, BackendError) and not is_refused(error):
                        raise
                    # Chunks that are not indexed are simply written again.
                    _log.warning("chunks of %s cannot be reused: %s", manifests.path_of(name), error)

    def _names_to_index(self, manifests: Manifests) -> Sequence[ManifestName]:
        """Return the manifests of a run; none of another run that this user may not list."""
        try:
            return manifests.listing().names
        except BackendError as error:
            if manifests is self.manifests or not is_refused(error):
                raise
            _log.warning("chunks of run %r cannot be reused: %s", manifests.run, error)
            return ()

    def _modified_ns(self, run: str) -> int:
        info = self.backend.stat(paths.manifests_folder(run))
        return 0 if info is None else info.modified_ns

    def wait_for_orphan(self) -> None:
        """Wait as ``Lease.wait_for_orphan`` does; log a warning if the expected checkpoint was not published."""
        if not self.lease.wait_for_orphan():
            return
        orphans = self.lease.orphans
        step, orphans.awaited_step = orphans.awaited_step, None
        if step is not None and all(name.step != step for name in self.manifests.listing().names):
            _log.warning(
                "run %r: step %d was not published. It was not completely staged when the trainer died, or its saver "
                "failed or was killed. Continuing from the newest published checkpoint.",
                self.run,
                step,
            )

    def seq_next(self) -> int:
        """Return the first seq to try to claim."""
        assert self._seq_highest is not None, "prepare_run comes first"
        return self._seq_highest + 1

    def note_seq(self, seq: int) -> None:
        """Remember a claimed seq, so that the next claim needs no listing."""
        self._seq_highest = seq

    def nbytes_expected(self, nbytes: int) -> int:
        """Estimate how many bytes a commit of a state of this size writes: as many as the previous commit.

        That much space is reserved. So a full disk is noticed early, but not if little is new.
        """
        return nbytes if self._nbytes_written_last is None else min(nbytes, self._nbytes_written_last)

    def note_committed(self, manifest: Manifest) -> None:
        """Remember what an acknowledged commit of this handle wrote."""
        self.chunk_index.add(manifest)
        self._nbytes_written_last = manifest.header.bytes_written

    def forget_run_state(self) -> None:
        """Forget what was read of the run. The next commit reads it as the first one did."""
        self.chunk_index = ChunkIndex(self.chunk_index.manifests_max)
        self.newest = None
        self._seq_highest = None

    def packs_gone(self, packs: dict[PackId, int]) -> set[PackId]:
        """Return those of these packs (id to size) that are not in place with that size."""
        return packs_gone(self.backend, packs)

    def packs_not_found(self, packs: dict[PackId, int]) -> set[PackId]:
        """Return those of these packs (id to size) that are neither in place nor in the trash with that size."""
        return {pack_id for pack_id in self.packs_gone(packs) if self._is_not_found(pack_id, packs[pack_id])}

    def _is_not_found(self, pack_id: PackId, nbytes: int) -> bool:
        found = (self.backend.stat(path) for path in self.trash.paths_of(pack_id))
        return not any(info is not None and info.nbytes == nbytes for info in found)

    def rescue_local_packs(self, packs: dict[PackId, int]) -> set[PackId]:
        """Check that the packs of a published manifest exist. Move those that gc put into the trash back into place.

        Returns:
            Packs that are neither in place nor in the trash, or that a collector is about to delete.
        """
        # A collector in a bucket lists what it is about to delete. This store may also be another store's tier.
        pending = packs_pending_deletion(self.backend, set(packs), self.clock)
        missing = self.packs_gone(packs)
        for pack_id in sorted(missing):
            self.trash.rescue_pack(pack_id)
        # Check again: gc may have moved one back between the check and the rescue.
        return pending | self.packs_gone({pack_id: packs[pack_id] for pack_id in missing})

    def rescue_packs(self, packs: Iterable[PackRef]) -> set[PackId]:
        """Check that the packs of a published manifest exist, here and in tiers. Rescue local ones from the trash.

        Returns:
            Packs that are not in their tier (local ones: not in the trash either), and those that a collector there is
            about to delete.
        """
        packs = list(packs)
        pending = self.tiers.packs_pending_deletion(packs)
        lost = self.rescue_local_packs({pack.pack_id: pack.nbytes for pack in packs if pack.tier == LOCAL_TIER})
        return lost | pending | self.tiers.packs_gone(packs)

    def require_packs(self, manifest: Manifest) -> None:
        """Check that every pack of a manifest can be read: in place, in the trash, or in its tier.

        Raises:
            MissingChunkError: One cannot. The message names the pack and a tensor in it.
            UnreachableError: One is in a tier that cannot be reached.
        """
        # A pack of a tier may also be here. Pack ids are unique, so it has the same bytes.
        gone = self.packs_gone({pack.pack_id: pack.nbytes for pack in manifest.packs})
        missing = [pack for pack in manifest.packs if pack.pack_id in gone]
        gone -= {pack.pack_id for pack in missing if pack.tier != LOCAL_TIER} - self.tiers.packs_gone(missing)
        for pack in missing:
            if pack.pack_id in gone and self._is_not_found(pack.pack_id, pack.nbytes):
                raise self._missing(manifest, pack.pack_id)

    def _missing(self, manifest: Manifest, pack_id: PackId) -> MissingChunkError:
        from ckstore.format.manifest import tensor_paths

        index = next(index for index, pack in enumerate(manifest.packs) if pack.pack_id == pack_id)
        lost = {frame.chunk_id for frame in manifest.frames if frame.pack == index}
        chunks = {number for number, chunk in enumerate(manifest.chunks) if chunk.chunk_id in lost}
        tensors = tensor_paths(manifest, chunks, count_max=1)
        header = manifest.header
        tier = manifest.packs[index].tier
        backend = self.backend if tier == LOCAL_TIER else self.tiers.open(tier)
        return MissingChunkError(
            f"pack {pack_id.hex()} of seq {header.seq} (step {header.step}), which holds tensor "
            f"{tensors[0] if tensors else '(none)'}, is missing or has another size",
            where=backend.location_of(paths.pack_name(pack_id)),
            todo="run `ckstore repair`, restore an older checkpoint, or copy the file back from a backup",
            pack_id=pack_id.hex(),
            tensor=tensors[0] if tensors else None,
        )

    def close(self) -> None:
        """Release the lease and close open files. Never raises."""
        self.lease.release()
        try:
            self.tiers.close()
            self.backend.close()
        except CkstoreError as error:
            _log.warning("could not close the store: %s", error)


def finish_replacement(
    repository: Repository, manifest: Manifest, name: ManifestName, *, intent: str | None = None
) -> None:
    """Finish a published replacement: find all its packs, check for a drop, move the lower generations to the trash.

    Args:
        repository: The store and its run.
        manifest: The published replacement.
        name: Its name.
        intent: The path of the intent that keeps tags off the checkpoint. None: the checkpoint may have tags.

    Raises:
        ConflictError: Packs or the intent vanished meanwhile. The replacement is withdrawn.
        DroppedError: The checkpoint was dropped meanwhile. It stays dropped.
    """
    header, manifests = manifest.header, repository.manifests
    gone = repository.rescue_packs(manifest.packs)
    if gone:
        _withdraw(repository, name)
        raise ConflictError(
            f"{counted(len(gone), 'pack')} of seq {header.seq} vanished while it was replaced; "
            "the replacement was withdrawn",
            where=repository.backend.root,
            todo="find out who removes files from the store, then try again",
            pack_ids=sorted(pack_id.hex() for pack_id in gone),
        )
    if manifests.is_marked(header.seq):
        # The manifest was published before this check. So a drop that missed this generation has set its mark by now.
        manifests.withdraw(name)
        raise DroppedError(
            f"seq {header.seq} was deleted while its manifest was replaced", where=repository.backend.root
        )
    if problem := base_problem(repository, manifest):
        _withdraw(repository, name)
        raise ConflictError(
            f"seq {header.seq} was put in replay form, and {problem}; the replacement was withdrawn",
            where=repository.backend.root,
            todo="try again: it stays as it was",
        )
    if intent is not None:
        # If the intent is still in place after publishing, every accepted tag was set after that.
        try:
            require_intent(repository.backend, intent)
        except ConflictError:
            _withdraw(repository, name)
            raise
    manifests.move_lower_to_trash(name)


def base_problem(repository: Repository, manifest: Manifest) -> str:
    """Return why a manifest in replay form must not replace the exact one now; empty for every other manifest.

    Call this after it was published: a process that drops or demotes its base either sees it, or its intent is seen.
    """
    if not is_in_replay_form(manifest.tree):
        return ""
    from ckstore.format.replay_form import replay_form_of

    form = replay_form_of(manifest)
    assert form is not None
    base = next((name for name in repository.manifests.listing().names if name.seq == form.base.seq), None)
    try:
        is_same = base is not None and repository.manifests.header(base).checkpoint_id == form.base.checkpoint_id
    except (FileNotFoundError, CorruptError):
        is_same = False
    if not is_same or repository.tags.intents_on(form.base.seq):
        return f"seq {form.base.seq} (step {form.base.step}), from which it begins, is being changed or deleted"
    return ""


def _withdraw(repository: Repository, name: ManifestName) -> None:
    """Withdraw a replacement, if the generation that it replaces is still in place."""
    if any(lower.seq == name.seq for lower in repository.manifests.listing().lower):
        # Otherwise it is all that is left of the checkpoint: gc has moved the lower generation.
        repository.manifests.withdraw(name)


def finish_interrupted_replacements(repository: Repository, unreachable: dict[str, str] | None = None) -> int:
    """Move lower generations to the trash that an interrupted replacement left in place; return how many.

    Args:
        repository: The store and its run.
        unreachable: Unreachable tiers, and the error of each. If given, checkpoints in such tiers are skipped, and
            tiers that turn out to be unreachable are added.

    Raises:
        BackendError: A tier does not answer, and ``unreachable`` was not given.
    """
    listing = repository.manifests.listing()
    highest = {name.seq: name for name in listing.names}
    count = 0
    for seq in sorted({name.seq for name in listing.lower} & set(highest)):
        name = highest[seq]
        try:
            manifest = repository.manifests.load(name)
        except FileNotFoundError:
            continue
        tiers = sorted({pack.tier for pack in manifest.packs} - {LOCAL_TIER})
        if unreachable is not None and not unreachable.keys().isdisjoint(tiers):
            continue
        try:
            lost = repository.rescue_packs(manifest.packs)
        except (BackendError, CapacityError, UsageError) as error:
            if unreachable is None or not tiers:
                raise
            unreachable |= dict.fromkeys(tiers, str(error))
            continue
        if not lost and base_problem(repository, manifest):
            _withdraw(repository, name)
        elif not lost:
            count += repository.manifests.move_lower_to_trash(name)
    return count
