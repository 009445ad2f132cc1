"""Pointers: files outside the store that stand for one checkpoint, where a framework expects its own.

``docs/FORMAT.md``, section 4, defines their content and which checkpoint they name.

Invariants:
- A pointer appears whole: it is written as a draft, synced, and renamed into place.
- A pointer never silently names another checkpoint: the id of the store and of the checkpoint are compared.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ckstore.errors import ChecksumError, ConflictError, CorruptError, MalformedError, NotFoundError, UsageError
from ckstore.format.records import PointerRecord, decode_record, encode_record, with_changes
from ckstore.hashing import new_token
from ckstore.opening import open as open_store

if TYPE_CHECKING:
    from ckstore.api import Store
    from ckstore.results import Info

_log = logging.getLogger("ckstore")

POINTER_NAME = "ckstore.json"
"""Name of the pointer inside a folder that stands for a checkpoint."""

_NBYTES_MAX = 1 << 16


def write_pointer(path: Path, record: PointerRecord) -> None:
    """Write or replace a pointer. It survives a power failure when this returns.

    Args:
        path: The file.
        record: Its content. The ``store`` of it must be valid seen from this path; see ``address_from``.
    """
    draft = path.with_name(f".{path.name}.{new_token()}.draft")
    try:
        with draft.open("xb") as file:
            file.write(encode_record(record))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def pointer_file(path: str | os.PathLike[str]) -> Path:
    """Return the file of a pointer, given the file or its folder."""
    given = Path(path)
    return given / POINTER_NAME if given.is_dir() else given


def is_pointer(path: str | os.PathLike[str]) -> bool:
    """Say whether a file, or a folder with such a file, is a pointer. False for everything else, readable or not."""
    try:
        read_pointer(path)
    except (OSError, NotFoundError, CorruptError):
        return False
    return True


def refuse_damaged(path: str | os.PathLike[str]) -> None:
    """Raise if a file, or a folder with such a file, is a damaged pointer. Call it before another library reads it.

    Raises:
        CorruptError: It is.
    """
    try:
        read_pointer(path)
    except (OSError, NotFoundError):
        return
    except MalformedError:
        # Another file may belong to another program.
        if pointer_file(path).name == POINTER_NAME:
            raise


def read_pointer(path: str | os.PathLike[str]) -> PointerRecord:
    """Read a pointer.

    Args:
        path: The file, or a folder with ``ckstore.json``.

    Raises:
        NotFoundError: There is no such file.
        MalformedError: It is not a pointer.
        ChecksumError: It was changed. The message says what to do.
    """
    file = pointer_file(path)
    try:
        with file.open("rb") as opened:
            content = opened.read(_NBYTES_MAX + 1)
    except FileNotFoundError:
        raise NotFoundError("there is no pointer to a checkpoint", where=file) from None
    try:
        return decode_record(content, PointerRecord, nbytes_max=_NBYTES_MAX, where=file)
    except CorruptError as error:
        if isinstance(error, ChecksumError) or file.name == POINTER_NAME:
            raise type(error)(error.what, where=file, todo="delete it; the checkpoint stays in the store") from None
        raise


def address_from(folder: Path, store: str) -> str:
    """Return the address of a store as a pointer in a folder states it.

    Relative if both have a common parent below the root, so that they can be moved together.
    """
    if "://" in store:
        return store
    folder, place = folder.resolve(), Path(store).resolve()
    return os.path.relpath(place, folder) if Path(os.path.commonpath((folder, place))) != Path("/") else str(place)


def address_in(record: PointerRecord, path: str | os.PathLike[str]) -> str:
    """Return the path or URL of the store that a pointer names."""
    if "://" in record.store:
        return record.store
    # A link to a pointer may be in another folder.
    return str((pointer_file(path).resolve().parent / record.store).resolve())


def entry_of(store: Store, record: PointerRecord, *, where: object) -> Info:
    """Return the checkpoint that a pointer names.

    Args:
        store: The store, opened at the pointer's run.
        record: The pointer.
        where: The path of the pointer, for errors.

    Raises:
        ConflictError: The pointer belongs to another store, or its seq is another checkpoint.
        NotFoundError: The checkpoint is gone, or never became durable. Names the newest one there is.
    """
    if store.store_id != record.store_id:
        raise ConflictError(
            "the pointer belongs to another store",
            where=where,
            todo=f"its id is {record.store_id}; move that store here",
        )
    if record.seq is not None:
        found = _entry_of_seq(store, record, where)
    else:
        after = -1 if record.after_seq is None else record.after_seq
        later = sorted((info for info in store.log() if info.step == record.step and info.seq > after), key=_seq_of)
        found = later[record.ahead] if record.ahead < len(later) else _previous_entry(store, record, where)
    if found is None:
        raise _missing(store, record, where)
    return found


def _seq_of(info: Info) -> int:
    return info.seq


def _previous_entry(store: Store, record: PointerRecord, where: object) -> Info | None:
    """Return the checkpoint that the pointer named before its last commit, which never became durable."""
    if record.previous_seq is None:
        return None
    previous = with_changes(record, seq=record.previous_seq, checkpoint_id=record.previous_id)
    found = _entry_of_seq(store, previous, where)
    if found is not None:
        _log.warning(
            "%s: the checkpoint of step %d did not become durable before its process ended; step %d is used, which it "
            "was to replace",
            where,
            record.step,
            found.step,
        )
    return found


def _entry_of_seq(store: Store, record: PointerRecord, where: object) -> Info | None:
    try:
        info = store.info(f"seq:{record.seq}")
    except NotFoundError:
        same = (each for each in store.log() if record.checkpoint_id in (each.checkpoint_id, each.origin_id))
        return next(same, None)
    if record.checkpoint_id not in (info.checkpoint_id, info.origin_id):
        raise ConflictError(
            f"seq {record.seq} of run {record.run} is not the checkpoint that the pointer names",
            where=where,
            todo="the store was replaced by an older copy; choose a checkpoint from `ckstore ls`",
        )
    return info


def _missing(store: Store, record: PointerRecord, where: object) -> NotFoundError:
    newest = store.latest()
    there = "run is empty" if newest is None else f"newest checkpoint is step {newest.step} (seq {newest.seq})"
    if record.seq is None:
        what = f"the checkpoint of step {record.step} did not become durable before its process ended"
        todo = "resume from the newest checkpoint"
    else:
        what = f"the checkpoint of this pointer (step {record.step}, seq {record.seq}) is not in the store any more"
        todo = "`ckstore undelete` brings it back while the trash holds it; or resume from the newest checkpoint"
    return NotFoundError(f"{what}; the {there}", where=where, todo=todo, newest=newest)


def follow_pointer(path: str | os.PathLike[str]) -> tuple[str, str, str]:
    """Return the checkpoint that a pointer names: address of its store, run, and reference.

    Args:
        path: The pointer, or a folder with ``ckstore.json``.

    Raises:
        NotFoundError: There is no pointer or store, or the checkpoint is gone.
        MalformedError: The file is not a pointer.
        ConflictError: The pointer belongs to another store.
    """
    record = read_pointer(path)
    address = address_in(record, path)
    with open_store(address, run=record.run, create=False) as store:
        return address, record.run, f"seq:{entry_of(store, record, where=path).seq}"


def require_local(path: str | os.PathLike[str]) -> Path:
    """Return a path; refuse URLs.

    Raises:
        UsageError: It is a URL. Pointers are local files.
    """
    if "://" in os.fspath(path):
        raise UsageError(
            "the framework saves to a URL, and pointers are local files",
            where=os.fspath(path),
            todo="save to a local folder, and put the store in the bucket",
        )
    return Path(path)
