"""Claim, publish, replace, drop, withdraw; list, load: the manifests of one run.

Invariants:
- Publishing is the only commit point. A manifest is written once, under a name that no other commit can
  take: its seq was claimed first. Nothing is overwritten or exchanged.
- Replacing means the next generation under its own name; a drop mark, once made, is never taken back.
- What is visible may be unacknowledged: a reader checks the packs before it trusts a manifest.

Put damaged manifests and packs aside, where nothing reads them and nobody removes them.

Invariants:
- A file is moved, never copied or removed; a name that is taken in quarantine is left to the file that has it.
- A move is durable when it returns.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckstore.config import Limits, check_name
from ckstore.errors import CkstoreError, ConflictError, CorruptError, MalformedError, NotFoundError
from ckstore.format import paths
from ckstore.format.header import PREAMBLE_NBYTES, ManifestHeader, decode_header, decode_preamble, header_nbytes_needed
from ckstore.format.paths import ManifestName
from ckstore.hashing import PackId, new_token
from ckstore.io.backend import Backend, Distant, map_concurrent
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.small_files import make_durable_folder
from ckstore.store.store_config import require_same_store
from ckstore.store.tags import intent_removed_error, require_intent
from ckstore.store.trash import Trash

if TYPE_CHECKING:
    from ckstore.format.manifest import Manifest


_AGAIN = "~"
"""Between the name of a file and what is added to it where that name was taken."""


def quarantine_manifest(backend: Backend, name: ManifestName) -> str | None:
    """Move a manifest into quarantine; return where it lies now, or None if it was not there any more."""
    folder = paths.quarantine_manifests_folder(name.run)
    return _move(backend, name.path, folder, name.file)


def quarantine_pack(backend: Backend, path: str, pack_id: PackId) -> str | None:
    """Move a pack into quarantine from where it lies; return where it lies now, or None if it was not there."""
    return _move(backend, path, paths.quarantine_packs_folder(), paths.pack_file(pack_id))


def quarantined_names(backend: Backend, run: str) -> list[ManifestName]:
    """Return the manifests of a run that lie in quarantine, by the names that they had."""
    files = backend.list_names(paths.quarantine_manifests_folder(run))
    names = (paths.parse_manifest_file(run, file.split(_AGAIN)[0]) for file in files)
    return [name for name in names if name is not None]


def _move(backend: Backend, path: str, folder: str, file: str) -> str | None:
    make_durable_folder(backend, folder)
    target = f"{folder}/{file}"
    try:
        try:
            backend.rename_new(path, target)
        except FileExistsError:
            # A file of this name was put aside before, and may hold other bytes.
            target = f"{target}{_AGAIN}{new_token()}"
            backend.rename_new(path, target)
    except FileNotFoundError:
        return None
    backend.sync_folder(folder)
    backend.sync_folder(path.rsplit("/", 1)[0])
    return target


_log = logging.getLogger("ckstore")

_SHOWN_MAX = 8
"""Seqs that a message names."""

HEAD_NBYTES = 4096
"""First read of a header: holds every header with fewer than about a hundred metrics."""


TIERS_NBYTES = 4096
"""Read for the names of tiers, of which there are few."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What one look at a run's folders showed.

    ``names`` holds the highest generation in place of every seq without a drop mark, by ascending seq;
    ``lower`` the superseded generations; ``dropped`` the seqs that carry a drop mark; ``missing`` those that were
    published, as a mark says, and have no manifest any more, neither in place nor in the trash nor in quarantine.
    """

    names: tuple[ManifestName, ...]
    lower: tuple[ManifestName, ...]
    dropped: frozenset[int]
    claimed_max: int
    missing: frozenset[int] = frozenset()


class Manifests:
    """The manifests of one run."""

    def __init__(self, backend: Backend, run: str, *, store_id: bytes, limits: Limits) -> None:
        self.backend = backend
        self.run = check_name(run, "run")
        self.store_id = store_id
        self.limits = limits
        self._has_folders = False

    # Reading

    def listing(self) -> Listing:
        """Look at the run's folders; a claimed seq that shows no manifest makes us look twice.

        One readdir may show neither of two names of which one is made and the other moved meanwhile.
        """
        found = self._names_in_place()
        marks = self._marks()
        dropped, claimed = frozenset(marks["dropped"]), marks["claim"]
        missing = frozenset[int]()
        if claimed - dropped - {name.seq for name in found}:
            found |= self._names_in_place()
            missing = self._missing(marks["published"] - dropped - {name.seq for name in found})
        highest: dict[int, ManifestName] = {}
        for name in found:
            if name.seq not in dropped and (name.seq not in highest or highest[name.seq].generation < name.generation):
                highest[name.seq] = name
        names = tuple(highest[seq] for seq in sorted(highest))
        lower = tuple(sorted(found - set(names), key=lambda name: (name.seq, name.generation)))
        return Listing(names, lower, dropped, max(claimed, default=-1), missing)

    def _marks(self) -> dict[str, set[int]]:
        """Return the seqs of this run's claims and marks, by kind."""
        marks: dict[str, set[int]] = {"claim": set(), "dropped": set(), "published": set(), "intent": set()}
        for file in self.backend.list_names(paths.claims_folder(self.run)):
            claim = paths.parse_claim_file(file)
            if claim is not None:
                marks[claim.kind].add(claim.seq)
        return marks

    def _missing(self, seqs: set[int]) -> frozenset[int]:
        """Return those of these published seqs that are nowhere; each may have been dropped or moved meanwhile."""
        if not seqs:
            return frozenset()
        trashed = {
            m.name.seq for folder in Trash(self.backend).contents() for m in folder.manifests if m.name.run == self.run
        }
        aside = {name.seq for name in quarantined_names(self.backend, self.run)}
        # Last, since what is dropped gets its mark before it is moved.
        in_place = {name.seq for name in self._names_in_place()}
        return frozenset(seqs - trashed - aside - in_place - self._marks()["dropped"])

    def _names_in_place(self) -> set[ManifestName]:
        files = self.backend.list_names(paths.manifests_folder(self.run))
        parsed = (paths.parse_manifest_file(self.run, file) for file in files)
        return {name for name in parsed if name is not None}

    def path_of(self, name: ManifestName) -> str:
        """Return the backend name of a manifest."""
        return name.path

    def header(self, name: ManifestName) -> ManifestHeader:
        """Read the header only.

        Raises:
            FileNotFoundError: It was moved or replaced meanwhile: list again.
            CorruptError: Its bytes are not what was written.
            UnsupportedError: A newer ckstore wrote it.
        """
        path = self.path_of(name)
        where = self.backend.location_of(path)
        head = self.backend.read_head(path, HEAD_NBYTES)
        needed = header_nbytes_needed(head, where=where)
        if needed > len(head):
            head = self.backend.read_head(path, needed)
        header = decode_header(head, expect=name, where=where)
        self._check_store(header, where)
        return header

    def tiers(self, header: ManifestHeader) -> tuple[str, ...]:
        """Return the tiers that a checkpoint lies in, by name; reads a few bytes of its manifest.

        What was never moved nor published again lies here, and is not asked.
        """
        if header.generation == 0 and header.origin_id is None:
            return (LOCAL_TIER,)
        from ckstore.format.location import decode_tiers

        path = header.name.path
        where = self.backend.location_of(path)
        preamble = decode_preamble(self.backend.read_head(path, PREAMBLE_NBYTES), where=where)
        file = self.backend.open_read(path)
        try:
            begin = file.read_at(preamble.head_nbytes + preamble.logical_nbytes, TIERS_NBYTES)
        finally:
            file.close()
        return decode_tiers(begin, version=preamble.version, where=where) or (LOCAL_TIER,)

    def load(self, name: ManifestName) -> Manifest:
        """Read and check a whole manifest; raises as ``header`` does."""
        from ckstore.format.manifest import decode_manifest

        path = self.path_of(name)
        where = self.backend.location_of(path)
        encoded = self.backend.read_bytes(path, nbytes_max=self.limits.manifest_nbytes_max)
        manifest = decode_manifest(encoded, limits=self.limits, expect=name, where=where)
        self._check_store(manifest.header, where)
        return manifest

    def _check_store(self, header: ManifestHeader, where: str) -> None:
        if header.store_id != self.store_id:
            raise MalformedError("the manifest belongs to another store", where=where)

    def is_visible(self, seq: int) -> bool:
        """Whether a manifest of this seq lies in place, of whatever generation."""
        return any(name.seq == seq for name in self._names_in_place())

    # Writing

    def make_folders(self) -> None:
        """Make the run's folders durable, old ones once per handle: another process may have left them unsynced."""
        if self._has_folders and isinstance(self.backend, Distant):
            return
        for folder in (paths.manifests_folder(self.run), paths.claims_folder(self.run), paths.tags_folder(self.run)):
            if self.backend.make_folder(folder) or not self._has_folders:
                self.backend.sync_folder(folder.rsplit("/", 1)[0])
        self._has_folders = True

    def claim(self, seq_first: int) -> int:
        """Take the lowest free seq from ``seq_first`` upward; it is ours for ever once this returns.

        Raises:
            ConflictError: Another store has taken this one's place.
            UnreachableError: The store is not there any more.
        """
        self._require_same_store()
        seq = seq_first
        while True:
            try:
                self.backend.create(paths.claim_name(self.run, seq), b"", sync=False)
            except FileExistsError:
                seq += 1
                continue
            self.backend.sync_folder(paths.claims_folder(self.run))
            return seq

    def claim_all(self, seqs: Iterable[int]) -> None:
        """Take these seqs where nobody has them, so that no commit does; durable on return."""
        for seq in seqs:
            with contextlib.suppress(FileExistsError):
                self.backend.create(paths.claim_name(self.run, seq), b"", sync=False)
        self.backend.sync_folder(paths.claims_folder(self.run))

    def publish(self, manifest: Manifest) -> ManifestName:
        """Make the checkpoint exist, so that it survives a power cut.

        Raises:
            ConflictError: Other bytes have the name; someone did not claim, or has replaced it first. Or another store
                has taken this one's place.
            UnreachableError: The store is not there any more.
            CapacityError: The disk is full; nothing was published.
        """
        from ckstore.format.manifest import decode_manifest, encode_manifest

        header = manifest.header
        name = ManifestName(self.run, header.seq, header.step, header.generation)
        encoded = encode_manifest(manifest, limits=self.limits)
        # Nothing is published that a reader would refuse: it would be found out when it is needed.
        decode_manifest(encoded, limits=self.limits, expect=name)
        draft = paths.draft_name(new_token())
        target = self.path_of(name)
        require_same_store(self.backend, self.store_id)
        self.backend.create(draft, encoded, sync=True)
        try:
            # A rename would silently replace what another writer has published.
            self.backend.link(draft, target)
        except FileNotFoundError:
            raise ConflictError(
                "the draft of a manifest was removed before it was published",
                where=self.backend.location_of(draft),
                todo="commit again; a collection takes drafts of processes that were stopped for long",
            ) from None
        except FileExistsError:
            # An interrupted first try may have got this far; then the name is already ours.
            if self.backend.read_bytes(target, nbytes_max=self.limits.manifest_nbytes_max) != encoded:
                raise ConflictError(
                    "another writer has published under this name",
                    where=self.backend.location_of(target),
                    todo="commit again; see `ckstore ls` for what is there",
                ) from None
        self.backend.sync_folder(paths.manifests_folder(self.run))
        try:
            # Checked before and after: a folder that was exchanged in between fails one of the two.
            self._require_same_store()
        except ConflictError:
            self._take_back(name, encoded)
            raise
        self._forget_draft(draft)
        return name

    def _take_back(self, name: ManifestName, encoded: bytes) -> None:
        """Withdraw a manifest that was linked into the store that has taken this one's place.

        Only there: where it cannot be told which store this is, it may be this one, and others may build on what they
        see in it. It is whole and stays, unacknowledged, as after a sync of its folder that failed.
        """
        with contextlib.suppress(OSError, CkstoreError):
            # Only the very bytes that were put there: by now the name may be a manifest of that store.
            if self.backend.read_bytes(self.path_of(name), nbytes_max=self.limits.manifest_nbytes_max) == encoded:
                self.withdraw(name)

    def _require_same_store(self) -> None:
        """Check a folder; nothing is mounted or linked in a bucket, which is asked once a manifest, by ``publish``."""
        if not isinstance(self.backend, Distant):
            require_same_store(self.backend, self.store_id)

    def _forget_draft(self, draft: str) -> None:
        try:
            self.backend.unlink(draft)
        except (OSError, CorruptError) as error:
            _log.debug("draft %s left for gc: %s", draft, error)

    def withdraw(self, name: ManifestName) -> None:
        """Undo an unacknowledged publish: the manifest goes to ``tmp``, durably."""
        with contextlib.suppress(FileNotFoundError):
            self.backend.rename(self.path_of(name), paths.draft_name(new_token()))
        self.backend.sync_folder(paths.manifests_folder(self.run))
        self.backend.sync_folder(paths.TMP_FOLDER)

    def note_published(self, seq: int) -> None:
        """Leave a mark that a checkpoint was acknowledged, so that the loss of its manifest shows.

        It is not synced, and may fail: without it everything else is as safe.
        """
        try:
            self.backend.create(paths.published_mark_name(self.run, seq), b"", sync=False)
        except (OSError, CkstoreError) as error:
            _log.debug("no mark that seq %d was published: %s", seq, error)

    def accept_missing(self) -> frozenset[int]:
        """Forget that those were published whose manifests are gone, durably; return their seqs."""
        missing = self.listing().missing
        for seq in sorted(missing):
            with contextlib.suppress(FileNotFoundError):
                self.backend.unlink(paths.published_mark_name(self.run, seq))
        if missing:
            self.backend.sync_folder(paths.claims_folder(self.run))
        return missing

    def mark_dropped(self, intents: Mapping[int, str]) -> None:
        """Make drop marks, in any order; every generation of these seqs is to go, and none will come back.

        Args:
            intents: For each seq the path of this process's intent on it.

        Raises:
            ConflictError: Somebody else has removed an intent, so there may be a tag; or this is another store by now.
            UnreachableError: The store is not there any more.
        """
        self._require_same_store()

        def mark(seq: int) -> None:
            intent, name = intents[seq], paths.drop_mark_name(self.run, seq)
            with contextlib.suppress(FileExistsError):
                if isinstance(self.backend, Distant):
                    require_intent(self.backend, intent)
                    self.backend.create(name, b"", sync=False)
                    return
                try:
                    # No mark without the intent: whoever takes that away has it before or after this, not meanwhile.
                    self.backend.link(intent, name)
                except FileNotFoundError:
                    raise intent_removed_error(self.backend, intent) from None

        for _ in map_concurrent(self.backend, mark, intents):
            pass
        self.backend.sync_folder(paths.claims_folder(self.run))

    def is_marked(self, seq: int) -> bool:
        """Whether a drop mark lies there: every generation of this seq is to go."""
        return self.backend.stat(paths.drop_mark_name(self.run, seq)) is not None

    def move_to_trash(self, seqs: frozenset[int]) -> int:
        """Move all generations of marked seqs into a fresh trash folder until none is left; return how many."""
        return self._move_to_trash(lambda name: name.seq in seqs)

    def move_lower_to_trash(self, name: ManifestName) -> int:
        """Move the generations below this one to the trash; return how many.

        Whoever calls this has seen every pack that this generation names. Its name is made durable first: another
        process may have linked it, and died before its sync.
        """
        self.backend.sync_folder(paths.manifests_folder(self.run))
        return self._move_to_trash(lambda other: other.seq == name.seq and other.generation < name.generation)

    def _move_to_trash(self, is_doomed: Callable[[ManifestName], bool]) -> int:
        folder = paths.trash_manifests_folder(new_token(), self.run)
        count = 0
        while doomed := sorted(filter(is_doomed, self._names_in_place()), key=lambda name: name.file):
            # A collector that frees at once may take an empty folder of the trash at any moment; then it is made again.
            with contextlib.suppress(FileNotFoundError):
                make_durable_folder(self.backend, folder)
            count += sum(map_concurrent(self.backend, lambda name: self._is_moved(name, folder), doomed))
            with contextlib.suppress(FileNotFoundError):
                self.backend.sync_folder(folder)
            self.backend.sync_folder(paths.manifests_folder(self.run))
        return count

    def _is_moved(self, name: ManifestName, folder: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self.backend.rename(self.path_of(name), f"{folder}/{name.file}")
            return True
        return False


class DroppedError(NotFoundError):
    """A checkpoint that was listed a moment ago was dropped meanwhile: whoever goes through a list goes on."""


class EmptyRunError(NotFoundError):
    """A run of a store that can be read has no checkpoint."""


def missing_sentence(run: str, seqs: Collection[int]) -> str:
    """Say that checkpoints were committed and that their manifests are gone."""
    shown = ", ".join(str(seq) for seq in sorted(seqs)[-_SHOWN_MAX:])
    more = f" and {len(seqs) - _SHOWN_MAX} more" if len(seqs) > _SHOWN_MAX else ""
    what = "its manifest is gone" if len(seqs) == 1 else "their manifests are gone"
    return f"seq {shown}{more} of run {run!r} {'was' if len(seqs) == 1 else 'were'} committed, and {what}"


def no_checkpoint_error(run: str, root: str) -> EmptyRunError:
    """Return the error for a run without checkpoints."""
    return EmptyRunError(
        f"run {run!r} has no checkpoint", where=root, todo="commit one, or name another run (`ckstore ls` lists them)"
    )
