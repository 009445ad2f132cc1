"""Folders that show files late, as network file systems do."""

from __future__ import annotations

import time

from ckstore.io.local import LocalBackend


class LateFolder(LocalBackend):
    """A folder that shows the files of other hosts late, as NFS does.

    Args:
        root: The folder.
        seconds: How late.
    """

    def __init__(self, root, seconds):
        super().__init__(root)
        self.seconds = seconds

    def _is_shown(self, name):
        info = super().stat(name)
        return info is not None and time.time() - info.modified_ns / 1e9 >= self.seconds

    def list_names(self, folder):
        return [name for name in super().list_names(folder) if self._is_shown(f"{folder}/{name}")]

    def read_bytes(self, name, *, nbytes_max):
        if not self._is_shown(name):
            raise FileNotFoundError(name)
        return super().read_bytes(name, nbytes_max=nbytes_max)
