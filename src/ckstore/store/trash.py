"""The trash: packs, manifests and segments of journals that were removed, and that can still be brought back.

Invariants:
- A trash folder's name was never used before. So a collector that deletes a file in it deletes the file that it has
  listed.
- A file is brought back by renaming it to a name that must be free. If another process deletes it, the file system
  decides which of the two wins.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckstore.config import is_name
from ckstore.errors import BackendError, is_refused
from ckstore.format import paths
from ckstore.format.paths import ManifestName, SegmentName
from ckstore.hashing import PackId, new_token
from ckstore.io.backend import Backend, Distant, FileInfo
from ckstore.store.small_files import make_durable_folder

_log = logging.getLogger("ckstore")

_ROUNDS = 2
"""Rounds of checks. A pack can escape n rounds only if it is moved there and back n times in between."""


@dataclass(frozen=True, slots=True)
class TrashedPack:
    """A pack in the trash."""

    pack_id: PackId
    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TrashedManifest:
    """A manifest in the trash."""

    name: ManifestName
    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TrashedSegment:
    """A segment of a journal in the trash."""

    name: SegmentName
    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TrashFolder:
    """One folder of the trash, made by one collection or drop.

    Attributes:
        gc_id: Its name.
        made_ns: When it was made; None if the backend does not tell.
        packs: Its packs.
        manifests: Its manifests.
        segments: Its segments of journals.
    """

    gc_id: str
    made_ns: int | None
    packs: tuple[TrashedPack, ...]
    manifests: tuple[TrashedManifest, ...]
    segments: tuple[TrashedSegment, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        packs, manifests = sum(file.nbytes for file in self.packs), sum(file.nbytes for file in self.manifests)
        return packs + manifests + sum(file.nbytes for file in self.segments)

    @property
    def is_empty(self) -> bool:
        """Whether it has no files."""
        return not (self.packs or self.manifests or self.segments)

    def age_ns(self, now_ns: int) -> int | None:
        """Return its age; None if unknown, negative if it was made in the future."""
        return None if self.made_ns is None else now_ns - self.made_ns


class Trash:
    """The trash of a store. Each collection and each drop makes a new folder."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def folders(self) -> list[str]:
        """Return the ids of all trash folders."""
        return [name for name in self._backend.list_names(paths.TRASH_FOLDER) if paths.is_token(name)]

    def contents(self) -> list[TrashFolder]:
        """Return all trash folders and their files, the oldest first. Empty folders are included."""
        if isinstance(self._backend, Distant):
            found = self._bucket_contents(paths.TRASH_FOLDER)
        else:
            found = [self.read_folder(gc_id) for gc_id in self.folders()]
        return sorted(found, key=lambda folder: (folder.made_ns or 0, folder.gc_id))

    def read_folder(self, gc_id: str) -> TrashFolder:
        """Return the files of one folder; none if it does not exist."""
        if isinstance(self._backend, Distant):
            return next(iter(self._bucket_contents(paths.trash_folder(gc_id))), TrashFolder(gc_id, None, (), ()))
        info = self._backend.stat(paths.trash_folder(gc_id))
        made_ns = info.modified_ns or None if info is not None else None
        packs, manifests, segments = self._packs_in(gc_id), self._manifests_in(gc_id), self._segments_in(gc_id)
        return TrashFolder(gc_id, made_ns, tuple(packs), tuple(manifests), tuple(segments))

    def _bucket_contents(self, folder: str) -> list[TrashFolder]:
        """Return the trash folders below a folder of a bucket. A folder is as old as its youngest file."""
        assert isinstance(self._backend, Distant), "a local folder has its own modification time"
        files: dict[str, list[tuple[list[str], str, FileInfo]]] = {}
        for path, info in self._backend.list_deep(folder):
            _, gc_id, *rest = path.split("/")
            if paths.is_token(gc_id):
                files.setdefault(gc_id, []).append((rest, path, info))
        found = []
        for gc_id, entries in sorted(files.items()):
            packs, manifests = [], []
            for rest, path, info in entries:
                pack_id = paths.parse_pack_file(rest[1]) if len(rest) == 2 and rest[0] == "packs" else None
                is_manifest = len(rest) == 3 and rest[0] == "manifests" and is_name(rest[1])
                name = paths.parse_manifest_file(rest[1], rest[2]) if is_manifest else None
                if pack_id is not None:
                    packs.append(TrashedPack(pack_id, path, info.nbytes))
                elif name is not None:
                    manifests.append(TrashedManifest(name, path, info.nbytes))
            made_ns = max(info.modified_ns for _, _, info in entries)
            found.append(TrashFolder(gc_id, made_ns, tuple(packs), tuple(manifests)))
        return found

    def _packs_in(self, gc_id: str) -> Iterator[TrashedPack]:
        folder = paths.trash_packs_folder(gc_id)
        for file in self._backend.list_names(folder):
            pack_id, info = paths.parse_pack_file(file), self._backend.stat(f"{folder}/{file}")
            if pack_id is not None and info is not None:
                yield TrashedPack(pack_id, f"{folder}/{file}", info.nbytes)

    def _manifests_in(self, gc_id: str) -> Iterator[TrashedManifest]:
        above = f"{paths.trash_folder(gc_id)}/manifests"
        for run in filter(is_name, self._backend.list_names(above)):
            for file in self._backend.list_names(f"{above}/{run}"):
                name, info = paths.parse_manifest_file(run, file), self._backend.stat(f"{above}/{run}/{file}")
                if name is not None and info is not None:
                    yield TrashedManifest(name, f"{above}/{run}/{file}", info.nbytes)

    def _segments_in(self, gc_id: str) -> Iterator[TrashedSegment]:
        above = f"{paths.trash_folder(gc_id)}/{paths.JOURNALS_FOLDER}"
        for run in filter(is_name, self._backend.list_names(above)):
            for file in self._backend.list_names(f"{above}/{run}"):
                path = f"{above}/{run}/{file}"
                name, info = paths.parse_segment_file(run, file), self._backend.stat(path)
                if name is not None and info is not None:
                    yield TrashedSegment(name, path, info.nbytes)

    # Moving to the trash and back

    def new_packs_folder(self) -> str:
        """Make a new folder for packs, durably; return its id."""
        gc_id = new_token()
        make_durable_folder(self._backend, paths.trash_packs_folder(gc_id))
        return gc_id

    def move_packs(self, pack_ids: list[PackId], gc_id: str) -> list[PackId]:
        """Move packs to a trash folder, durably; return those that were still in place."""
        folder, moved = paths.trash_packs_folder(gc_id), []
        for pack_id in pack_ids:
            with contextlib.suppress(FileNotFoundError):
                self._backend.rename(paths.pack_name(pack_id), f"{folder}/{paths.pack_file(pack_id)}")
                moved.append(pack_id)
        if moved:
            self._backend.sync_folder(folder)
            for source in sorted({paths.pack_folder(pack_id) for pack_id in moved}):
                self._backend.sync_folder(source)
        return moved

    def move_segments(self, names: Sequence[SegmentName]) -> list[SegmentName]:
        """Move segments of one run's journal to a new trash folder, durably; return those that were still in place."""
        folder, moved = paths.trash_journal_folder(new_token(), names[0].run), []
        make_durable_folder(self._backend, folder)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._backend.rename(name.path, f"{folder}/{name.file}")
                moved.append(name)
        self._backend.sync_folder(folder)
        self._backend.sync_folder(paths.journal_folder(names[0].run))
        return moved

    def find_pack(self, pack_id: PackId) -> Iterator[str]:
        """Yield the paths of a pack in the trash.

        Raises:
            BackendError: This user may not read a folder of the trash, which may contain the pack. All other folders
                were searched before.
        """
        refused: BackendError | None = None
        for gc_id in self.folders():
            name = f"{paths.trash_packs_folder(gc_id)}/{paths.pack_file(pack_id)}"
            try:
                exists = self._backend.stat(name) is not None
            except BackendError as error:
                if not is_refused(error):
                    raise
                refused = error
                continue
            if exists:
                yield name
        if refused is not None:
            raise refused

    def paths_of(self, pack_id: PackId) -> Iterator[str]:
        """Yield the paths where a pack may be, in the order to try them. The caller stops at the first that exists.

        gc moves packs to the trash, and writers and collectors move them back. A pack that moves between two checks is
        found by neither. So it counts as missing only after its place and the trash were checked twice, and its place
        once more. Nothing is moved in a bucket, and each check costs a request, so there the paths are tried once.
        """
        for _ in range(1 if isinstance(self._backend, Distant) else _ROUNDS):
            yield paths.pack_name(pack_id)
            yield from self.find_pack(pack_id)
        yield paths.pack_name(pack_id)

    def rescue_pack(self, pack_id: PackId) -> bool:
        """Move a pack from the trash back into place, durably; return whether the trash had it."""
        has_found = False
        try:
            for name in self.find_pack(pack_id):
                has_found = True
                if self.put_back(name, paths.pack_name(pack_id)):
                    break
        except BackendError as error:
            if not is_refused(error):
                raise
            # The caller sees that the pack is missing and continues without it.
            _log.warning("could not bring pack %s back from the trash: %s", pack_id.hex(), error)
        return has_found

    def put_back(self, path: str, target: str) -> bool:
        """Move a file of the trash back to ``target``, durably; return whether this call did it."""
        is_back = False
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            self._backend.rename_new(path, target)
            is_back = True
        self._backend.sync_folder(target.rsplit("/", 1)[0])
        # A collector may have removed the source folder, which is empty now.
        with contextlib.suppress(FileNotFoundError):
            self._backend.sync_folder(path.rsplit("/", 1)[0])
        return is_back

    # Deleting

    def unlink(self, path: str) -> bool:
        """Delete a file of the trash; return whether it still existed."""
        with contextlib.suppress(FileNotFoundError):
            self._backend.unlink(path)
            return True
        return False

    def sync(self, names: list[str]) -> None:
        """Make the deletion of these files durable."""
        for folder in sorted({name.rsplit("/", 1)[0] for name in names}):
            with contextlib.suppress(FileNotFoundError):
                self._backend.sync_folder(folder)

    def remove_if_empty(self, gc_id: str) -> bool:
        """Remove a folder without files; return whether it is gone."""
        top = paths.trash_folder(gc_id)
        above = [f"{top}/{kind}" for kind in ("manifests", paths.JOURNALS_FOLDER)]
        runs = [f"{folder}/{run}" for folder in above for run in self._backend.list_names(folder)]
        for folder in (*runs, *above, paths.trash_packs_folder(gc_id), top):
            if self._backend.list_names(folder):
                return False
            # Another collector may have removed it, or it may contain a foreign file.
            with contextlib.suppress(FileNotFoundError, BackendError):
                self._backend.remove_folder(folder)
        self._backend.sync_folder(paths.TRASH_FOLDER)
        return True
