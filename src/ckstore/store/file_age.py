"""How old a file is, by the clock of the place where it lies: that of this machine may be wrong, or have jumped."""

from __future__ import annotations

import contextlib

from ckstore.clock import Clock
from ckstore.errors import CkstoreError
from ckstore.format import paths
from ckstore.hashing import new_token
from ckstore.io.backend import Backend, Distant, FileInfo

MAKER_AGE_SECONDS_MAX = 6 * 3600.0
"""What says that its maker is at work counts no longer than this, wherever that maker ran."""


def is_older(backend: Backend, clock: Clock, info: FileInfo, seconds: float) -> bool:
    """Whether a file is older, by the clock here and by that of the place; False where the place does not say."""
    if (clock.now_ns() - info.modified_ns) / 1e9 <= seconds:
        return False
    there_ns = _now_there_ns(backend)
    return there_ns is not None and (there_ns - info.modified_ns) / 1e9 > seconds


def _now_there_ns(backend: Backend) -> int | None:
    """Return what a place takes for now: the time that it gives to a new file; None where it takes none."""
    # What lies in ``tmp`` of a bucket lies in this process's memory, and has its time.
    name = f"{paths.trash_folder(new_token())}/clock" if isinstance(backend, Distant) else paths.draft_name(new_token())
    try:
        backend.create(name, b"now", sync=False)
        try:
            info = backend.stat(name)
        finally:
            with contextlib.suppress(CkstoreError, FileNotFoundError):
                backend.unlink(name)
    except (CkstoreError, OSError):
        return None
    return None if info is None else info.modified_ns
