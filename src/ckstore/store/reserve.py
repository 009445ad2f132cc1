"""A reserve of blocks and inodes, deleted first when space must be freed on a full disk.

Deleting needs a little space itself: an intent, a drop mark, a trash folder. On a disk or quota without a single free
block or inode, nothing could be deleted.

Invariants:
- Nothing reads the reserve, and a store without one is complete.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import TypeVar

from ckstore.errors import BackendError, CapacityError, CkstoreError, is_disk_full
from ckstore.format import paths
from ckstore.io.backend import Backend
from ckstore.io.local import LocalBackend

_log = logging.getLogger("ckstore")

FILE_COUNT = 16
"""Inodes. A drop and the collection after it make ten files and folders (tmpfs counts names, too)."""

FILE_NBYTES = 4096

T = TypeVar("T")


def fill_reserve(backend: Backend) -> None:
    """Create missing files of the reserve as far as there is space. Never raises for lack of space."""
    if not isinstance(backend, LocalBackend):
        # A bucket has neither blocks nor inodes.
        return
    with contextlib.suppress(CapacityError, BackendError, FileExistsError, FileNotFoundError):
        names = [f"{paths.RESERVE_FOLDER}/{number:02d}" for number in range(FILE_COUNT)]
        found = {name: backend.stat(name) for name in names}
        incomplete = [name for name, info in found.items() if info is None or info.nbytes < FILE_NBYTES]
        if incomplete:
            backend.make_folder(paths.RESERVE_FOLDER)
        for name in incomplete:
            if found[name] is not None:
                backend.unlink(name)
            _fill(backend, name)


def _fill(backend: Backend, name: str) -> None:
    try:
        # Random bytes, because some file systems do not store zeros.
        backend.create(name, os.urandom(FILE_NBYTES), sync=False)
    except (CapacityError, BackendError):
        # On a full disk the file is incomplete and reserves nothing.
        with contextlib.suppress(BackendError, FileNotFoundError):
            backend.unlink(name)
        raise


def give_up_reserve(backend: Backend) -> bool:
    """Delete the reserve; return whether there was one."""
    names = backend.list_names(paths.RESERVE_FOLDER) if isinstance(backend, LocalBackend) else []
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            backend.unlink(f"{paths.RESERVE_FOLDER}/{name}")
    if names:
        # Some file systems free the space only when the deletion is durable.
        with contextlib.suppress(CkstoreError):
            backend.sync_folder(paths.RESERVE_FOLDER)
    return bool(names)


def with_reserve(backend: Backend, act: Callable[[], T]) -> T:
    """Run an action that frees space. If the disk is full, delete the reserve and run it again.

    ``act`` must be repeatable: the second run finds what the first one has done.

    Raises:
        CapacityError: There is no reserve, or not enough space without it either.
    """
    try:
        return act()
    except CapacityError as error:
        if not is_disk_full(error):
            raise
        if not give_up_reserve(backend):
            raise CapacityError(
                f"{error.what}; deleting needs a little space, too",
                where=error.where,
                todo="remove any file of 64 KiB or more from this disk or quota, then try again",
                **error.facts,
            ) from error
        _log.warning(
            "the disk is full; deleted the reserve in %s to free space", backend.location_of(paths.RESERVE_FOLDER)
        )
    try:
        return act()
    finally:
        fill_reserve(backend)
