"""A reserve of blocks and inodes, which whoever makes room on a full disk gives up first.

Freeing takes a little room itself: an intent, a drop mark, a folder of the trash. On a disk or in a quota that is full
to the last block or the last inode, nothing could be freed without it.

Invariants:
- Nobody reads the reserve, and nothing depends on it: a store without one is whole.
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
"""Inodes: a drop and a collection after it make ten files and folders, names counted as tmpfs counts them."""

FILE_NBYTES = 4096

T = TypeVar("T")


def fill_reserve(backend: Backend) -> None:
    """Make the reserve whole, as far as there is room; never raises for want of it."""
    if not isinstance(backend, LocalBackend):
        # A bucket has neither blocks nor inodes.
        return
    with contextlib.suppress(CapacityError, BackendError, FileExistsError, FileNotFoundError):
        names = [f"{paths.RESERVE_FOLDER}/{number:02d}" for number in range(FILE_COUNT)]
        there = {name: backend.stat(name) for name in names}
        wanted = [name for name, info in there.items() if info is None or info.nbytes < FILE_NBYTES]
        if wanted:
            backend.make_folder(paths.RESERVE_FOLDER)
        for name in wanted:
            if there[name] is not None:
                backend.unlink(name)
            _fill(backend, name)


def _fill(backend: Backend, name: str) -> None:
    try:
        # Random, since some file systems store no zeros.
        backend.create(name, os.urandom(FILE_NBYTES), sync=False)
    except (CapacityError, BackendError):
        # A full disk leaves a file that is shorter, and holds no room.
        with contextlib.suppress(BackendError, FileNotFoundError):
            backend.unlink(name)
        raise


def give_up_reserve(backend: Backend) -> bool:
    """Remove the reserve; return whether there was any."""
    names = backend.list_names(paths.RESERVE_FOLDER) if isinstance(backend, LocalBackend) else []
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            backend.unlink(f"{paths.RESERVE_FOLDER}/{name}")
    if names:
        # Some file systems give room back only when that is durable.
        with contextlib.suppress(CkstoreError):
            backend.sync_folder(paths.RESERVE_FOLDER)
    return bool(names)


def with_reserve(backend: Backend, act: Callable[[], T]) -> T:
    """Do what makes room; where the disk is full, once more without the reserve. What was done before is found done.

    Raises:
        CapacityError: There is no room without the reserve either, or there is none.
    """
    try:
        return act()
    except CapacityError as error:
        if not is_disk_full(error):
            raise
        if not give_up_reserve(backend):
            raise CapacityError(
                f"{error.what}, and so there is no room to free anything",
                where=error.where,
                todo="remove any file of 64 KiB or more from this disk or quota, then try again",
                **error.facts,
            ) from error
        _log.warning("the disk is full; the reserve in %s was given up", backend.location_of(paths.RESERVE_FOLDER))
    try:
        return act()
    finally:
        fill_reserve(backend)
