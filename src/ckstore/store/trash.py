"""Moved away but recoverable: packs and manifests that gc or a drop has put into the trash."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ckstore.format import layout
from ckstore.ids import PackId
from ckstore.io.backend import Backend


class Trash:
    """The trash folders of a store; each gc run and each drop has a fresh one."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def folders(self) -> list[str]:
        """Return the ids of all trash folders."""
        return [name for name in self._backend.list_names(layout.TRASH_FOLDER) if layout.is_token(name)]

    def find_pack(self, pack_id: PackId) -> Iterator[str]:
        """Yield the names under which a pack lies in the trash."""
        for gc_id in self.folders():
            name = f"{layout.trash_packs_folder(gc_id)}/{layout.pack_file(pack_id)}"
            if self._backend.stat(name) is not None:
                yield name

    def rescue_pack(self, pack_id: PackId) -> bool:
        """Rename a pack back into its place, durably; return whether one was found."""
        target = layout.pack_name(pack_id)
        for name in self.find_pack(pack_id):
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                self._backend.rename_new(name, target)
            self._backend.sync_folder(layout.pack_folder(pack_id))
            self._backend.sync_folder(name.rsplit("/", 1)[0])
            return True
        return False
