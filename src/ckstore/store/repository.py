"""Open or create a store's folder, and hold its parts.

``store.json`` is the last thing that init makes: a folder without it is no store, and an interrupted
init is simply done again.
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
    is_refused,
)
from ckstore.format import paths
from ckstore.format.paths import ManifestName
from ckstore.format.records import StoreRecord
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
"""Other runs whose newest checkpoint is looked at for chunks to share; bounds the first commit's reading."""


class Repository:
    """A store's parts for one run, as one handle uses them."""

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
        """The newest whole checkpoint of the run, as the first commit found it."""
        self.retention: Mapping[str, Any] = {}
        """Rules by which a commit that finds the disk full lets checkpoints of its run go; empty: none."""
        self._seq_highest: int | None = None
        self._nbytes_written_last: int | None = None
        self._renewed: float | None = None

    @property
    def engine_name(self) -> str:
        """What moves packs."""
        return self.backend.engine_name

    def manifests_of(self, run: str) -> Manifests:
        """Return the manifests of any run of this store."""
        return Manifests(self.backend, run, store_id=self.store_id, limits=self.limits)

    def for_run(self, run: str) -> Repository:
        """Return the parts for another run of this store; tiers that are open are shared."""
        other = Repository(self.backend, self.record, run, clock=self.clock)
        other.tiers = self.tiers
        return other

    def runs(self) -> list[str]:
        """Return the names of all runs, sorted."""
        return [name for name in self.backend.list_names(paths.MANIFESTS_FOLDER) if is_name(name)]

    def runs_with_claims(self) -> list[str]:
        """Return the names of all runs, sorted; also of one whose manifests are gone while its claims are there."""
        claimed = filter(is_name, self.backend.list_names(paths.CLAIMS_FOLDER))
        return sorted({*self.runs(), *claimed})

    def require_same_store(self) -> None:
        """Check that the store that was opened is still at its place; a bucket, where nothing is mounted, is believed.

        Raises:
            ConflictError: Another store has taken its place.
            UnreachableError: It is not there any more.
        """
        if not isinstance(self.backend, Distant):
            require_same_store(self.backend, self.store_id)

    def prepare_run(self) -> None:
        """Before a commit: make folders; before the first of a handle, learn which chunks there are."""
        self.make_folders()
        if self._seq_highest is not None:
            return
        if isinstance(self.backend, Probing):
            # Whoever made the store, a push perhaps, needed less than a commit does.
            self.backend.probe()
        # Whoever made the store may have died, or still be, before its last sync: without this one, store.json
        # could vanish in a power cut under checkpoints that were acknowledged.
        self.backend.sync_folder("")
        self.manifests.make_folders()
        listing = self.manifests.listing()
        seqs = [name.seq for name in (*listing.names, *listing.lower)]
        self._seq_highest = max([listing.claimed_max, *seqs, *listing.dropped, -1])
        self._learn_known()
        fill_reserve(self.backend)

    def make_folders(self) -> None:
        """Make what is missing of the store's folders and the run's: a copy, or a purge, leaves out empty ones.

        Raises:
            UnreachableError: The store itself is gone.
            CorruptError: ``store.json`` is gone.
        """
        if not isinstance(self.backend, Distant):
            if self.backend.stat(paths.STORE_FILE) is None:
                # Nothing is made where another disk, or none, is mounted by now.
                self._raise_for_no_record()
            for folder in paths.TOP_FOLDERS:
                if self.backend.make_folder(folder):
                    self.backend.sync_folder("")
        self.manifests.make_folders()

    def _raise_for_no_record(self) -> None:
        """Raise what the loss of ``store.json`` means: of that file alone, or of the whole store."""
        try:
            read_store_record(self.backend)
        except NotFoundError:
            require_same_store(self.backend, self.store_id)

    def renew_file_times(self, packs: Iterable[PackRef]) -> None:
        """Renew the times of files that every later commit or restore needs, at most once an hour; never raises.

        Purges of scratch file systems remove what was not changed for weeks. What a running training still needs is
        no leftover: ``store.json``, the configuration, tags, and the packs of the newest checkpoint.
        """
        now = self.clock.monotonic()
        if not isinstance(self.backend, Ageing) or (self._renewed is not None and now - self._renewed < 3600):
            return
        self._renewed = now
        try:
            tags = (paths.tag_name(self.run, name) for name in self.backend.list_names(paths.tags_folder(self.run)))
            names = [*paths.TOP_FILES, *tags, *(paths.pack_name(p.pack_id) for p in packs if p.tier == LOCAL_TIER)]
            before_ns = self.clock.now_ns() - _RENEWED_AFTER_NS
            for name in names:
                self.backend.renew(name, before_ns=before_ns)
        except CkstoreError as error:
            _log.debug("times of files were not renewed: %s", error)

    def _learn_known(self) -> None:
        others = sorted((run for run in self.runs() if run != self.run), key=self._changed_ns, reverse=True)
        others = others[:OTHER_RUNS_MAX]
        newest: list[tuple[Manifests, int]] = [(self.manifests_of(run), 1) for run in others]
        newest.append((self.manifests, self.chunk_index.manifests_max))
        for manifests, count in newest:
            for name in self._names_known(manifests)[-count:]:
                try:
                    manifest = manifests.load(name)
                    self.chunk_index.add(manifest)
                    if manifests is self.manifests:
                        self.newest = manifest
                        self._nbytes_written_last = manifest.header.bytes_written
                except (CorruptError, UnsupportedError, BackendError, FileNotFoundError) as error:
                    if isinstance(error, BackendError) and not is_refused(error):
                        raise
                    # Nothing is lost: what is not known is written again.
                    _log.warning("chunks of %s cannot be reused: %s", manifests.path_of(name), error)

    def _names_known(self, manifests: Manifests) -> Sequence[ManifestName]:
        """Return what a run holds; of another run that this user may not list, nothing."""
        try:
            return manifests.listing().names
        except BackendError as error:
            if manifests is self.manifests or not is_refused(error):
                raise
            _log.warning("chunks of run %r cannot be reused: %s", manifests.run, error)
            return ()

    def _changed_ns(self, run: str) -> int:
        info = self.backend.stat(paths.manifests_folder(run))
        return 0 if info is None else info.modified_ns

    def wait_for_orphan(self) -> None:
        """Wait as ``Lease.wait_for_orphan`` does; say so where what was waited for did not come."""
        if not self.lease.wait_for_orphan():
            return
        orphans = self.lease.orphans
        step, orphans.awaited_step = orphans.awaited_step, None
        if step is not None and all(name.step != step for name in self.manifests.listing().names):
            _log.warning(
                "run %r: step %d was not published: it was not staged whole when the trainer died, or its saver failed "
                "or was killed; going on from what there is",
                self.run,
                step,
            )

    def seq_next(self) -> int:
        """Return the first seq worth claiming."""
        assert self._seq_highest is not None, "prepare_run comes first"
        return self._seq_highest + 1

    def note_seq(self, seq: int) -> None:
        """Remember a claimed seq, so that no listing is needed for the next one."""
        self._seq_highest = seq

    def nbytes_expected(self, nbytes: int) -> int:
        """Return about how much a commit of a state this large will write: as much as the last one did.

        Space is reserved by it, so that a full disk shows early and not at all when little is new.
        """
        return nbytes if self._nbytes_written_last is None else min(nbytes, self._nbytes_written_last)

    def note_committed(self, manifest: Manifest) -> None:
        """Remember what an acknowledged commit of this handle wrote."""
        self.chunk_index.add(manifest)
        self._nbytes_written_last = manifest.header.bytes_written

    def forget_run_state(self) -> None:
        """Forget what is known of the run; the next commit looks at it as the first one did."""
        self.chunk_index = ChunkIndex(self.chunk_index.manifests_max)
        self.newest = None
        self._seq_highest = None

    def packs_gone(self, packs: dict[PackId, int]) -> set[PackId]:
        """Return those of these packs (id to size) that are not in place with that size."""
        return packs_gone(self.backend, packs)

    def packs_not_found(self, packs: dict[PackId, int]) -> set[PackId]:
        """Return those of these packs (id to size) that lie neither in place nor in the trash with that size."""
        return {pack_id for pack_id in self.packs_gone(packs) if self._is_nowhere(pack_id, packs[pack_id])}

    def _is_nowhere(self, pack_id: PackId, nbytes: int) -> bool:
        found = (self.backend.stat(path) for path in self.trash.paths_of(pack_id))
        return not any(info is not None and info.nbytes == nbytes for info in found)

    def rescue_local_packs(self, packs: dict[PackId, int]) -> set[PackId]:
        """Look for packs that a published manifest names; bring back those that gc moved meanwhile.

        Returns:
            Packs that are neither in place nor in the trash.
        """
        # In a bucket a collector writes down what it removes; and this store may be another one's tier.
        doomed = packs_pending_deletion(self.backend, set(packs), self.clock)
        missing = self.packs_gone(packs)
        for pack_id in sorted(missing):
            self.trash.rescue_pack(pack_id)
        # Looked at once more: gc may have moved one back between our look and our rescue.
        return doomed | self.packs_gone({pack_id: packs[pack_id] for pack_id in missing})

    def rescue_packs(self, packs: Iterable[PackRef]) -> set[PackId]:
        """Look for packs that a manifest names, wherever it says that they lie; bring local ones back from the trash.

        Returns:
            Packs that are not where the manifest says, nor, if they are local, in the trash; and those that a collector
            in their tier is about to remove.
        """
        packs = list(packs)
        doomed = self.tiers.packs_pending_deletion(packs)
        lost = self.rescue_local_packs({pack.pack_id: pack.nbytes for pack in packs if pack.tier == LOCAL_TIER})
        return lost | doomed | self.tiers.packs_gone(packs)

    def require_packs(self, manifest: Manifest) -> None:
        """Check that every pack of a manifest can be found: in place, in the trash, or in its tier.

        Raises:
            MissingChunkError: One cannot; it names the pack, and a tensor that lies in it.
            UnreachableError: It is in a tier that cannot be reached.
        """
        # A pack of a tier that lies here too holds the same bytes: names are never used again.
        gone = self.packs_gone({pack.pack_id: pack.nbytes for pack in manifest.packs})
        missing = [pack for pack in manifest.packs if pack.pack_id in gone]
        gone -= {pack.pack_id for pack in missing if pack.tier != LOCAL_TIER} - self.tiers.packs_gone(missing)
        for pack in missing:
            if pack.pack_id in gone and self._is_nowhere(pack.pack_id, pack.nbytes):
                raise self._missing(manifest, pack.pack_id)

    def _missing(self, manifest: Manifest, pack_id: PackId) -> MissingChunkError:
        from ckstore.store.damage import tensor_paths

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
            todo="run `ckstore repair`, restore an older checkpoint, or bring the file back from a copy",
            pack_id=pack_id.hex(),
            tensor=tensors[0] if tensors else None,
        )

    def close(self) -> None:
        """Give up the lease and let go of descriptors; never raises."""
        self.lease.release()
        try:
            self.tiers.close()
            self.backend.close()
        except CkstoreError as error:
            _log.warning("closing the store failed: %s", error)


def finish_replacement(
    repository: Repository, manifest: Manifest, name: ManifestName, *, intent: str | None = None
) -> None:
    """See every pack that a published replacement names, look for a drop, and move the lower generations to the trash.

    Args:
        repository: The store and its run.
        manifest: What was published.
        name: Its name.
        intent: The path of the intent that has kept tags away from it; None: it may carry tags.

    Raises:
        ConflictError: Packs or the intent vanished meanwhile; the replacement is withdrawn.
        DroppedError: The checkpoint was dropped meanwhile; its drop stands.
    """
    header, manifests = manifest.header, repository.manifests
    gone = repository.rescue_packs(manifest.packs)
    if gone:
        _withdraw(repository, name)
        raise ConflictError(
            f"{len(gone)} packs of seq {header.seq} vanished while its manifest was replaced; it is as it was",
            where=repository.backend.root,
            todo="find out who removes files from the store, then plan again",
            pack_ids=sorted(pack_id.hex() for pack_id in gone),
        )
    if manifests.is_marked(header.seq):
        # Written first, looked at second: a drop that did not see this generation has left its mark by now.
        manifests.withdraw(name)
        raise DroppedError(f"seq {header.seq} was dropped while it was replaced", where=repository.backend.root)
    if intent is not None:
        # As long as it was in place after the publication, every tag that was accepted has come after that too.
        try:
            require_intent(repository.backend, intent)
        except ConflictError:
            _withdraw(repository, name)
            raise
    manifests.move_lower_to_trash(name)


def _withdraw(repository: Repository, name: ManifestName) -> None:
    """Take back a replacement, if what it replaces is still in place."""
    if any(lower.seq == name.seq for lower in repository.manifests.listing().lower):
        # Without one it is all that there is of the checkpoint: gc has moved what it replaced.
        repository.manifests.withdraw(name)


def finish_interrupted_replacements(repository: Repository, waits: dict[str, str] | None = None) -> int:
    """Move lower generations that a replacement left in place when it was interrupted; return how many.

    Args:
        repository: The store and its run.
        waits: Tiers that do not answer, and what they said. Given: what depends on such a tier stays as it is, and
            tiers that are found to be silent are added.

    Raises:
        BackendError: A tier does not answer, and ``waits`` was not given.
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
        if waits is not None and not waits.keys().isdisjoint(tiers):
            continue
        try:
            lost = repository.rescue_packs(manifest.packs)
        except (BackendError, CapacityError, UsageError) as error:
            if waits is None or not tiers:
                raise
            waits |= dict.fromkeys(tiers, str(error))
            continue
        if not lost:
            count += repository.manifests.move_lower_to_trash(name)
    return count
