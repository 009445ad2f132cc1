"""Check that a place still holds the store that was opened there.

A handle keeps a path, and what a path leads to may change: a link is turned to another folder, a folder is removed and
made anew, a file system is mounted over it or taken away. ``store.json`` carries the random identity of a store, so
reading it again at the moment that counts tells one store from every other.
"""

from __future__ import annotations

from ckstore.errors import ConflictError, UnreachableError
from ckstore.format import paths
from ckstore.format.records import RECORD_NBYTES_MAX, StoreRecord, decode_record
from ckstore.io.backend import Backend


def store_id_at(backend: Backend) -> bytes | None:
    """Return the identity of the store at a place; None where there is no ``store.json``.

    Raises:
        CorruptError: ``store.json`` is damaged.
        BackendError: The place does not answer.
    """
    try:
        content = backend.read_bytes(paths.STORE_FILE, nbytes_max=RECORD_NBYTES_MAX)
    except FileNotFoundError:
        return None
    where = backend.location_of(paths.STORE_FILE)
    return bytes.fromhex(decode_record(content, StoreRecord, where=where).store_id)


def require_same_store(backend: Backend, store_id: bytes) -> None:
    """Check that the store that was opened is still at its place.

    Raises:
        ConflictError: Another store is there now.
        UnreachableError: No store is there now.
        CorruptError: ``store.json`` is damaged.
        BackendError: The place does not answer.
    """
    found = store_id_at(backend)
    if found == store_id:
        return
    if found is None:
        raise UnreachableError(
            f"store {store_id.hex()[:8]} was opened here, and its store.json is gone",
            where=backend.root,
            todo="check whether the file system is mounted and whether the folder was moved; then open the store again",
        )
    raise ConflictError(
        f"store {store_id.hex()[:8]} was opened here, and another store ({found.hex()[:8]}) has taken its place",
        where=backend.root,
        todo="check links and mounts on the way to this folder, then open the store again",
    )
