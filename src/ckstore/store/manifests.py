"""The manifests of one run: claim a seq, publish, replace, withdraw, drop, list, load and quarantine.

Invariants:
- Publishing is the only commit point. A manifest is written once, under a name that no other commit can take, because
  its seq was claimed first. Nothing is overwritten.
- Replacing a checkpoint means publishing its next generation under a new name.
- A drop mark is never removed.
- A visible manifest may be unacknowledged. Readers check its packs before they trust it.
- Quarantine moves damaged files; it never copies or deletes them. A move is durable when it returns.
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
from ckstore.format.paths import ManifestName, SegmentName
from ckstore.hashing import PackId, new_token
from ckstore.io.backend import Backend, Distant, map_concurrent
from ckstore.store.chunk_index import LOCAL_TIER
from ckstore.store.small_files import make_durable_folder
from ckstore.store.store_config import require_same_store
from ckstore.store.tags import intent_removed_error, require_intent
from ckstore.store.trash import Trash

if TYPE_CHECKING:
    from ckstore.format.manifest import Manifest


_log = logging.getLogger("ckstore")

_SHOWN_MAX = 8
"""Most seqs that a message lists."""

HEADER_READ_NBYTES = 4096
"""First read of a header. Enough for about a hundred metrics."""

TIERS_NBYTES = 4096
"""Read for the names of tiers. There are few."""

_TAKEN_SEPARATOR = "~"
"""Separates a file's name from the token that is added if the name is taken in quarantine."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a run at one moment.

    Attributes:
        names: The highest generation in place of every seq without a drop mark, by ascending seq.
        lower: Superseded generations.
        dropped: The seqs with a drop mark.
        claimed_max: The highest claimed seq; -1 if there is none.
        missing: Seqs with a mark that they were published, whose manifest is neither in place nor in the trash nor in
            quarantine.
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
        """List the run's folders. If a claimed seq shows no manifest, list twice.

        A single directory read may miss both names of a file that is renamed meanwhile.
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
        """Return those of these published seqs that are in no folder. Each may have been moved or dropped meanwhile."""
        if not seqs:
            return frozenset()
        trashed = {
            m.name.seq for folder in Trash(self.backend).contents() for m in folder.manifests if m.name.run == self.run
        }
        quarantined = {name.seq for name in quarantined_names(self.backend, self.run)}
        # The marks are read last: a drop sets its mark before it moves the manifest.
        in_place = {name.seq for name in self._names_in_place()}
        return frozenset(seqs - trashed - quarantined - in_place - self._marks()["dropped"])

    def _names_in_place(self) -> set[ManifestName]:
        files = self.backend.list_names(paths.manifests_folder(self.run))
        parsed = (paths.parse_manifest_file(self.run, file) for file in files)
        return {name for name in parsed if name is not None}

    def path_of(self, name: ManifestName) -> str:
        """Return the path of a manifest in the store."""
        return name.path

    def header(self, name: ManifestName) -> ManifestHeader:
        """Read only the header of a manifest.

        Raises:
            FileNotFoundError: It was moved or replaced meanwhile; list again.
            CorruptError: Its bytes are not what was written.
            UnsupportedError: A newer ckstore wrote it.
        """
        path = self.path_of(name)
        where = self.backend.location_of(path)
        head = self.backend.read_head(path, HEADER_READ_NBYTES)
        needed = header_nbytes_needed(head, where=where)
        if needed > len(head):
            head = self.backend.read_head(path, needed)
        header = decode_header(head, expect=name, where=where)
        self._check_store(header, where)
        return header

    def tiers(self, header: ManifestHeader) -> tuple[str, ...]:
        """Return the names of the tiers that contain packs of a checkpoint; reads a few bytes of its manifest.

        A checkpoint that was never moved or published again is local, and its manifest is not read.
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
        """Read and check a whole manifest. Raises as ``header`` does."""
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
        """Whether a manifest of this seq is in place, of any generation."""
        return any(name.seq == seq for name in self._names_in_place())

    # Writing

    def make_folders(self) -> None:
        """Make the run's folders durable. Existing ones are synced once: another process may not have done it."""
        if self._has_folders and isinstance(self.backend, Distant):
            return
        for folder in (paths.manifests_folder(self.run), paths.claims_folder(self.run), paths.tags_folder(self.run)):
            if self.backend.make_folder(folder) or not self._has_folders:
                self.backend.sync_folder(folder.rsplit("/", 1)[0])
        self._has_folders = True

    def claim(self, seq_first: int) -> int:
        """Take the lowest free seq from ``seq_first`` upward. Once this returns, no other commit gets it.

        Raises:
            ConflictError: Another store is at this path now.
            UnreachableError: No store is at this path now.
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
        """Claim those of these seqs that are free, so that no commit takes them; durable on return."""
        for seq in seqs:
            with contextlib.suppress(FileExistsError):
                self.backend.create(paths.claim_name(self.run, seq), b"", sync=False)
        self.backend.sync_folder(paths.claims_folder(self.run))

    def publish(self, manifest: Manifest) -> ManifestName:
        """Make a checkpoint visible, durably.

        Raises:
            ConflictError: The name has other bytes: another writer did not claim the seq, or replaced the checkpoint
                first. Or another store is at this path now.
            UnreachableError: No store is at this path now.
            CapacityError: The disk is full. Nothing was published.
        """
        from ckstore.format.manifest import decode_manifest, encode_manifest

        header = manifest.header
        name = ManifestName(self.run, header.seq, header.step, header.generation)
        encoded = encode_manifest(manifest, limits=self.limits)
        # Check that readers accept the manifest before it is published.
        decode_manifest(encoded, limits=self.limits, expect=name, written=manifest)
        return self.publish_encoded(name, encoded)

    def publish_encoded(self, name: ManifestName, encoded: bytes) -> ManifestName:
        """Make a checkpoint visible, durably, whose manifest has been encoded and checked. Raises as ``publish``."""
        draft = paths.draft_name(new_token())
        target = self.path_of(name)
        require_same_store(self.backend, self.store_id)
        self.backend.create(draft, encoded, sync=True)
        try:
            # A rename would silently replace another writer's manifest.
            self.backend.link(draft, target)
        except FileNotFoundError:
            raise ConflictError(
                "the draft of a manifest was removed before it was published",
                where=self.backend.location_of(draft),
                todo="commit again; gc deletes old drafts, so this process was probably stopped for long",
            ) from None
        except FileExistsError:
            # A first attempt may have been interrupted after the link. Then the name is ours.
            if self.backend.read_bytes(target, nbytes_max=self.limits.manifest_nbytes_max) != encoded:
                raise ConflictError(
                    "another writer has published a manifest under this name",
                    where=self.backend.location_of(target),
                    todo="commit again; `ckstore ls` shows what is there",
                ) from None
        self.backend.sync_folder(paths.manifests_folder(self.run))
        try:
            # Checked before and after the link: if the folder was exchanged in between, one of the checks fails.
            self._require_same_store()
        except ConflictError:
            self._withdraw_from_other_store(name, encoded)
            raise
        self._remove_draft(draft)
        return name

    def _withdraw_from_other_store(self, name: ManifestName, encoded: bytes) -> None:
        """Withdraw a manifest that was linked into another store, which is at this path now.

        Called only if that is certain. If it is unknown which store this is, the manifest stays, whole but
        unacknowledged, as after a failed sync of its folder: others may already rely on it.
        """
        with contextlib.suppress(OSError, CkstoreError):
            # Only if the bytes are ours. The name may be a manifest of that other store.
            if self.backend.read_bytes(self.path_of(name), nbytes_max=self.limits.manifest_nbytes_max) == encoded:
                self.withdraw(name)

    def _require_same_store(self) -> None:
        """Check a folder. A bucket cannot be exchanged by a mount, so ``publish`` checks it only once."""
        if not isinstance(self.backend, Distant):
            require_same_store(self.backend, self.store_id)

    def _remove_draft(self, draft: str) -> None:
        try:
            self.backend.unlink(draft)
        except (OSError, CorruptError) as error:
            _log.debug("could not remove draft %s; gc will: %s", draft, error)

    def withdraw(self, name: ManifestName) -> None:
        """Undo an unacknowledged publish: move the manifest to ``tmp``, durably."""
        with contextlib.suppress(FileNotFoundError):
            self.backend.rename(self.path_of(name), paths.draft_name(new_token()))
        self.backend.sync_folder(paths.manifests_folder(self.run))
        self.backend.sync_folder(paths.TMP_FOLDER)

    def note_published(self, seq: int) -> None:
        """Leave a mark that a checkpoint was acknowledged. If its manifest is lost later, the mark shows it.

        The mark is not synced, and a failure is only logged: nothing else depends on it.
        """
        try:
            self.backend.create(paths.published_mark_name(self.run, seq), b"", sync=False)
        except (OSError, CkstoreError) as error:
            _log.debug("could not mark seq %d as published: %s", seq, error)

    def accept_missing(self) -> frozenset[int]:
        """Remove the published marks of checkpoints whose manifests are missing, durably; return their seqs."""
        missing = self.listing().missing
        for seq in sorted(missing):
            with contextlib.suppress(FileNotFoundError):
                self.backend.unlink(paths.published_mark_name(self.run, seq))
        if missing:
            self.backend.sync_folder(paths.claims_folder(self.run))
        return missing

    def mark_dropped(self, intents: Mapping[int, str]) -> None:
        """Create drop marks, in any order. They are permanent: all generations of these seqs will be removed.

        Args:
            intents: For each seq the path of this process's intent on it.

        Raises:
            ConflictError: A collection has removed an intent, so there may be a tag. Or another store is at this path
                now.
            UnreachableError: No store is at this path now.
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
                    # The link fails if the intent is gone. So it is removed before or after this, not in between.
                    self.backend.link(intent, name)
                except FileNotFoundError:
                    raise intent_removed_error(self.backend, intent) from None

        for _ in map_concurrent(self.backend, mark, intents):
            pass
        self.backend.sync_folder(paths.claims_folder(self.run))

    def is_marked(self, seq: int) -> bool:
        """Whether a seq has a drop mark."""
        return self.backend.stat(paths.drop_mark_name(self.run, seq)) is not None

    def move_to_trash(self, seqs: frozenset[int]) -> int:
        """Move all generations of marked seqs into a new trash folder until none is left; return how many."""
        return self._move_to_trash(lambda name: name.seq in seqs)

    def move_lower_to_trash(self, name: ManifestName) -> int:
        """Move the generations below this one to the trash; return how many.

        The caller has checked that every pack of this generation is in place. The generation's name is synced first:
        the process that linked it may have died before its own sync.
        """
        self.backend.sync_folder(paths.manifests_folder(self.run))
        return self._move_to_trash(lambda other: other.seq == name.seq and other.generation < name.generation)

    def _move_to_trash(self, is_selected: Callable[[ManifestName], bool]) -> int:
        folder = paths.trash_manifests_folder(new_token(), self.run)
        count = 0
        while selected := sorted(filter(is_selected, self._names_in_place()), key=lambda name: name.file):
            # A collector that deletes immediately may remove the empty trash folder at any moment. Then make it again.
            with contextlib.suppress(FileNotFoundError):
                make_durable_folder(self.backend, folder)
            count += sum(map_concurrent(self.backend, lambda name: self._try_move(name, folder), selected))
            with contextlib.suppress(FileNotFoundError):
                self.backend.sync_folder(folder)
            self.backend.sync_folder(paths.manifests_folder(self.run))
        return count

    def _try_move(self, name: ManifestName, folder: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self.backend.rename(self.path_of(name), f"{folder}/{name.file}")
            return True
        return False


class DroppedError(NotFoundError):
    """A listed checkpoint was dropped meanwhile. Code that walks a list skips it."""


class EmptyRunError(NotFoundError):
    """A readable run has no checkpoint."""


def missing_sentence(run: str, seqs: Collection[int]) -> str:
    """Return a sentence: these checkpoints were committed, but their manifests are missing."""
    shown = ", ".join(str(seq) for seq in sorted(seqs)[-_SHOWN_MAX:])
    more = f" and {len(seqs) - _SHOWN_MAX} more" if len(seqs) > _SHOWN_MAX else ""
    what = "its manifest is missing" if len(seqs) == 1 else "their manifests are missing"
    return f"seq {shown}{more} of run {run!r} {'was' if len(seqs) == 1 else 'were'} committed, but {what}"


def no_checkpoint_error(run: str, root: str) -> EmptyRunError:
    """Return the error for a run without checkpoints."""
    return EmptyRunError(
        f"run {run!r} has no checkpoint", where=root, todo="commit one, or choose another run (`ckstore ls` lists them)"
    )


# Quarantine


def quarantine_manifest(backend: Backend, name: ManifestName) -> str | None:
    """Move a manifest into quarantine; return its new path, or None if it was already gone."""
    folder = paths.quarantine_manifests_folder(name.run)
    return _quarantine(backend, name.path, folder, name.file)


def quarantine_pack(backend: Backend, path: str, pack_id: PackId) -> str | None:
    """Move a pack into quarantine; return its new path, or None if it was already gone."""
    return _quarantine(backend, path, paths.quarantine_packs_folder(), paths.pack_file(pack_id))


def quarantine_segment(backend: Backend, name: SegmentName) -> None:
    """Give a segment of a journal a second name in quarantine. It stays in place until it is replaced."""
    folder = paths.quarantine_journal_folder(name.run)
    make_durable_folder(backend, folder)
    try:
        backend.link(name.path, f"{folder}/{name.file}")
    except FileExistsError:
        # It was quarantined before, perhaps with other bytes.
        backend.link(name.path, f"{folder}/{name.file}{_TAKEN_SEPARATOR}{new_token()}")
    backend.sync_folder(folder)


def quarantined_names(backend: Backend, run: str) -> list[ManifestName]:
    """Return the manifests of a run that are in quarantine, by their original names."""
    files = backend.list_names(paths.quarantine_manifests_folder(run))
    names = (paths.parse_manifest_file(run, file.split(_TAKEN_SEPARATOR)[0]) for file in files)
    return [name for name in names if name is not None]


def _quarantine(backend: Backend, path: str, folder: str, file: str) -> str | None:
    make_durable_folder(backend, folder)
    target = f"{folder}/{file}"
    try:
        try:
            backend.rename_new(path, target)
        except FileExistsError:
            # A file of this name was quarantined before, perhaps with other bytes.
            target = f"{target}{_TAKEN_SEPARATOR}{new_token()}"
            backend.rename_new(path, target)
    except FileNotFoundError:
        return None
    backend.sync_folder(folder)
    backend.sync_folder(path.rsplit("/", 1)[0])
    return target
