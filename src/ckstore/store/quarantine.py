"""Put damaged manifests and packs aside, where nothing reads them and nobody removes them.

Invariants:
- A file is moved, never copied or removed; a name that is taken in quarantine is left to the file that has it.
- A move is durable when it returns.
"""

from __future__ import annotations

from ckstore.format import layout
from ckstore.format.layout import ManifestName
from ckstore.ids import PackId, new_token
from ckstore.io.backend import Backend
from ckstore.store.trash import make_durable_folder

_AGAIN = "~"
"""Between the name of a file and what is added to it where that name was taken."""


def quarantine_manifest(backend: Backend, name: ManifestName) -> str | None:
    """Move a manifest into quarantine; return where it lies now, or None if it was not there any more."""
    folder = layout.quarantine_manifests_folder(name.run)
    return _move(backend, name.path, folder, name.file)


def quarantine_pack(backend: Backend, path: str, pack_id: PackId) -> str | None:
    """Move a pack into quarantine from where it lies; return where it lies now, or None if it was not there."""
    return _move(backend, path, layout.quarantine_packs_folder(), layout.pack_file(pack_id))


def quarantined_names(backend: Backend, run: str) -> list[ManifestName]:
    """Return the manifests of a run that lie in quarantine, by the names that they had."""
    files = backend.list_names(layout.quarantine_manifests_folder(run))
    names = (layout.parse_manifest_file(run, file.split(_AGAIN)[0]) for file in files)
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
