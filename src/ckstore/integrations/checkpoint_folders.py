"""The folders ``checkpoint-N`` of a trainer: each has a pointer and small files, and no tensors.

Each checkpoint carries the small files of its folder, so that a folder can be laid again from the store alone.

Invariants:
- The pointer is the first file in a folder: whatever a crash leaves there is recognized by it.
- Of several checkpoints of one step, the folder stands for the newest.
- Names of files in a checkpoint are not trusted: none is written outside its folder.
- One output directory saves into a run. It has an id in a small file, and each checkpoint carries the id. Checkpoints
  with another id are neither resumed from nor deleted.
- A folder that the framework itself saved is kept until the checkpoint that replaces it is durable.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ckstore.errors import CkstoreError, CorruptError, MalformedError, NotFoundError, UsageError
from ckstore.hashing import new_token
from ckstore.integrations.pointer_store import PointerStore
from ckstore.integrations.pointers import (
    POINTER_NAME,
    address_in,
    entry_of,
    read_pointer,
    refuse_damaged,
    sync_folder,
)

if TYPE_CHECKING:
    from ckstore.format.records import PointerRecord
    from ckstore.results import Info

_log = logging.getLogger("ckstore")

FILES = "files"
"""Key of the small files in a state: path in the folder -> content."""

OUTPUT = "output"
"""Key of the id of the output directory in a state."""

OUTPUT_FILE = ".ckstore-output"
"""File with the id of an output directory."""

_TENSOR_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
"""Endings of files with tensors, or with lists of such files. The state has the tensors already."""

_NAME = re.compile(r"checkpoint-(\d+)")
_ID = re.compile(r"[0-9a-f]{32}")
_REPLACED = ".replaced"
"""Ending of a hidden folder: what the framework saved, until the checkpoint that replaces it is durable."""


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the small files of a folder, by their path in it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != POINTER_NAME and not path.name.endswith(_TENSOR_SUFFIXES)
    }


def clear_folder(folder: Path) -> None:
    """Delete everything in a folder except its pointer."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != POINTER_NAME:
            path.unlink()


class CheckpointFolders:
    """The folders of checkpoints in an output directory, and the run of a store that they point to.

    Args:
        output_dir: Where the folders are.
        pointers: The store.
    """

    def __init__(self, output_dir: Path, pointers: PointerStore) -> None:
        self._output_dir = output_dir
        self._pointers = pointers
        self._output: str | None = None
        self._earlier_steps: set[int] = set()
        self._unsettled: list[Path] = []

    def all(self) -> list[Path]:
        """Return the folders, in the order of their steps."""
        paths = self._output_dir.iterdir() if self._output_dir.is_dir() else ()
        found = [(int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
        return [path for _, path in sorted(found)]

    def of_step(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self._output_dir / f"checkpoint-{step}"

    # Save

    def claim(self, *, adopts: bool = False) -> None:
        """Make sure that no other output directory saves into the run.

        Args:
            adopts: A directory without an id takes over the id of the newest checkpoint. One that has the store in it
                does so in any case.

        Raises:
            UsageError: The newest checkpoint is of another output directory.
        """
        own, newest = self._read_id(), self._newest_id()
        if own is None and (adopts or Path(self._pointers.address).is_relative_to(self._output_dir.absolute())):
            own = newest
        if newest not in (None, own):
            raise UsageError(
                f"run {self._pointers.run} has checkpoints of another output directory: its id is {newest}, "
                f"the id of {self._output_dir} is {own or 'not set'}",
                where=self._pointers.address,
                todo="give attach a run of its own, such as run='second', or another store; or, to continue that run "
                f"in this directory, delete {OUTPUT_FILE} in it, if it exists, and resume from 'latest'",
            )
        self._output = own or new_token()
        self._earlier_steps = {info.step for info in self._entries()}

    def begin(self, step: int) -> None:
        """Prepare the folder of a save: it has a pointer that says so, and nothing else.

        Raises:
            UsageError: Another output directory saves into the run.
            CkstoreError: An earlier commit failed.
        """
        if self._output is None:
            self.claim()
        self._output_dir.mkdir(parents=True, exist_ok=True)
        if self._read_id() != self._output:
            self._write_id(str(self._output))
        folder = self.of_step(step)
        if _is_native(folder):
            shutil.rmtree(_replaced(folder), ignore_errors=True)
            folder.rename(_replaced(folder))
        folder.mkdir(exist_ok=True)
        try:
            self._pointers.announce(step, folder / POINTER_NAME)
        except BaseException:
            _put_back(folder)
            raise
        clear_folder(folder)

    def save(self, state: Mapping[str, Any], step: int, metrics: Mapping[str, float]) -> None:
        """Commit a state with the small files of its folder, after ``begin``.

        Raises:
            CkstoreError: As ``PointerStore.save``.
        """
        folder = self.of_step(step)
        whole = {**state, FILES: read_files(folder), OUTPUT: self._output}
        self._pointers.save(whole, step, folder / POINTER_NAME, metrics=metrics)
        self._unsettled.append(folder)

    def abandon(self, step: int) -> None:
        """Remove the folder of a save that has failed, and put back what it was to replace."""
        folder = self.of_step(step)
        if folder not in self._unsettled:
            _discard(folder)

    def settle(self) -> None:
        """Remove the folders of saves that became no checkpoint, and what durable checkpoints have replaced."""
        is_durable = self._pointers.is_settled
        for folder in list(self._unsettled):
            if not (folder / POINTER_NAME).exists():
                _discard(folder)
            elif is_durable:
                shutil.rmtree(_replaced(folder), ignore_errors=True)
                self._delete_earlier(folder)
            else:
                continue
            self._unsettled.remove(folder)

    @contextlib.contextmanager
    def mirrored(self) -> Iterator[None]:
        """Delete the checkpoints whose folders are removed inside this context. Everything must be durable."""
        before = [(folder, record) for folder in self.all() if (record := _record_in(folder)) is not None]
        yield
        removed = [(folder, record) for folder, record in before if not folder.exists()]
        self._pointers.delete_entries(
            [(folder, record) for folder, record in removed if self._is_foreign(record) or self._is_of_here(record.seq)]
        )

    def _read_id(self) -> str | None:
        try:
            found = (self._output_dir / OUTPUT_FILE).read_text(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found if _ID.fullmatch(found) else None

    def _write_id(self, own: str) -> None:
        draft = self._output_dir / f"{OUTPUT_FILE}.{new_token()}.draft"
        with draft.open("x") as file:
            file.write(f"{own}\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._output_dir / OUTPUT_FILE)
        sync_folder(self._output_dir)

    def _newest_id(self) -> str | None:
        """Return the id of the newest checkpoint that has one."""
        # Waits for the saver of a trainer that was killed.
        self._pointers.newest()
        return next((found for info in self._entries() if (found := self._id_of(info.seq)) is not None), None)

    def _id_of(self, seq: int | None) -> str | None:
        """Return the id of the output directory that a checkpoint was saved in; None: it cannot be read."""
        try:
            found = self._pointers.store.restore(f"seq:{seq}", only=OUTPUT)[OUTPUT]
        except (NotFoundError, CorruptError):
            return None
        return found if isinstance(found, str) and _ID.fullmatch(found) else None

    def _is_of_here(self, seq: int | None) -> bool:
        """Say whether a checkpoint that a pointer in this directory names was saved in it, as far as it is known."""
        return self._id_of(seq) in (None, self._output or self._read_id())

    # Resume

    def to_resume(self, wanted: bool | str | os.PathLike[str]) -> Path:
        """Return the folder that training resumes from. It is laid again where something of it is missing.

        Args:
            wanted: True: the newest durable checkpoint. A path: of a ``checkpoint-N``, here or elsewhere. Otherwise a
                reference, such as ``"seq:7"``.

        Raises:
            ValueError: There is nothing to resume from, in the words of transformers.
            NotFoundError: There is no such checkpoint.
            UsageError: The checkpoint was not made from such a folder, or another output directory saves into the run.
        """
        path = None if isinstance(wanted, bool) else Path(wanted)
        is_here = path is None or path.parent.resolve() == self._output_dir.resolve()
        is_reference = path is not None and not path.is_dir() and not is_here
        self.claim(adopts=is_reference or (is_here and not any(_is_native(folder) for folder in self.all())))
        if self._pointers.exists():
            self._remove_unfinished()
        self._finish_replacing()
        if path is None:
            return self._newest()
        refuse_damaged(path)
        if path.is_dir():
            record = _record_in(path)
            if record is None or self._is_foreign(record):
                return path
        match = _NAME.fullmatch(path.name)
        if path.is_dir() or (match and is_here):
            return self._by_path(path, int(match[1]) if match else None)
        if not self._pointers.exists():
            raise ValueError(f"Can't find a valid checkpoint at {path}, and there is no store {self._pointers.address}")
        info = self._pointers.store.info(os.fspath(path))
        if not self._lay(self.of_step(info.step), info):
            raise UsageError(
                f"step {info.step} (seq {info.seq}) was not saved by a trainer",
                where=self._pointers.address,
                todo="load it with ckstore.open(...).restore(...)",
            )
        return self.of_step(info.step)

    def _is_foreign(self, record: PointerRecord) -> bool:
        """Say whether a pointer belongs to another store or run. Then its checkpoint is loaded from there."""
        pointers = self._pointers
        return record.run != pointers.run or not pointers.exists() or record.store_id != pointers.store.store_id

    def _by_path(self, path: Path, step: int | None) -> Path:
        """Return a folder of this run, or the newest if there is no checkpoint for it."""
        wanted = self._seq_in(path)
        for info in self._entries():
            is_wanted = info.seq == wanted if path.is_dir() else info.step == step and self._is_of_here(info.seq)
            if is_wanted and self._lay(path, info):
                return path
        newest = self._newest()
        _log.warning("there is no checkpoint for %s any more: training resumes from %s", path, newest)
        return newest

    def _newest(self) -> Path:
        """Lay the folders that are missing, so that the trainer's rule of rotation sees every checkpoint."""
        self._require_stores()
        found: Path | None = None
        done: set[int] = set()
        named = {self._seq_in(folder) for folder in self.all()}
        for info in self._entries():
            folder = self.of_step(info.step)
            if not self._is_of_here(info.seq):
                continue
            if info.step in done:
                if info.seq in named or self._id_of(info.seq) is not None:
                    self._delete_replaced(info)
            elif (found is not None and self._is_settled_at(folder, info)) or self._lay(folder, info):
                done.add(info.step)
                found = found or folder
        if found is not None:
            return found
        others = [folder for folder in self.all() if _is_native(folder)]
        if not others:
            raise ValueError(f"No valid checkpoint found in output directory ({self._output_dir})")
        return others[-1]

    def _require_stores(self) -> None:
        """Refuse to resume without the store of a pointer: its checkpoints may be newer than all others."""
        for folder in self.all():
            record = _record_in(folder)
            if record is None:
                if not self._pointers.exists():
                    refuse_damaged(folder)
                continue
            address = address_in(record, folder)
            if self._is_foreign(record) and not PointerStore(address, run=record.run, made_by="").exists():
                raise NotFoundError(
                    f"there is no store {address}, which {folder / POINTER_NAME} points to",
                    todo="mount its disk, or move the store there; or give attach the place where it is now. To resume "
                    "without it, give the path of another checkpoint",
                )

    def _delete_replaced(self, info: Info) -> None:
        """Delete a checkpoint that a newer one of the same step has replaced; a crash came before that."""
        if not info.tags and self._files_of(info) is not None:
            _log.info("step %d (seq %d) is deleted: a newer checkpoint has replaced it", info.step, info.seq)
            self._pointers.store.delete(f"seq:{info.seq}")

    def _delete_earlier(self, folder: Path) -> None:
        """Delete what processes before this one have saved for a folder, now that its checkpoint is durable.

        The pointer that this process has replaced knows only the last of them: a process that is killed deletes none.
        """
        record = _record_in(folder)
        if record is None or record.seq is None or record.step not in self._earlier_steps:
            return
        self._earlier_steps.remove(record.step)
        for info in self._entries():
            if info.step == record.step and info.seq < record.seq and self._id_of(info.seq) == self._output:
                self._delete_replaced(info)

    def _files_of(self, info: Info) -> Mapping[str, bytes] | None:
        """Return the small files of a checkpoint; None: it was not made from a folder."""
        try:
            files: Mapping[str, bytes] = self._pointers.store.restore(f"seq:{info.seq}", only=f"{FILES}.*")[FILES]
        except NotFoundError:
            return None
        return files

    def _entries(self) -> list[Info]:
        """Return the checkpoints of the run, newest first."""
        if not self._pointers.exists():
            return []
        return [info for info in self._pointers.store.log() if not info.is_archival]

    def _seq_in(self, folder: Path) -> int | None:
        """Return the seq of the checkpoint in this run that a folder stands for; None: it stands for none."""
        record = _record_in(folder)
        if record is None or self._is_foreign(record):
            return None
        try:
            return entry_of(self._pointers.store, record, where=folder).seq
        except CkstoreError:
            return None

    def _is_settled_at(self, folder: Path, info: Info) -> bool:
        """Say whether a folder has a pointer that names this checkpoint by its seq."""
        record = _record_in(folder)
        return record is not None and not self._is_foreign(record) and record.seq == info.seq

    def _lay(self, folder: Path, info: Info) -> bool:
        """Make a folder stand for a checkpoint; False: the checkpoint was not made from a folder."""
        files = self._files_of(info)
        if files is None:
            return False
        places = {folder.joinpath(*_checked(name).parts): content for name, content in files.items()}
        folder.mkdir(parents=True, exist_ok=True)
        is_changed = False
        if not self._is_settled_at(folder, info):
            self._pointers.point(folder / POINTER_NAME, info)
            is_changed = True
        for place, content in places.items():
            if not place.is_file() or place.read_bytes() != content:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content)
                is_changed = True
        if is_changed:
            # Trainers sort folders by this time.
            os.utime(folder, ns=(info.time_ns, info.time_ns))
        return True

    def _remove_unfinished(self) -> None:
        """Remove the folders of checkpoints that never became durable, because their process ended before."""
        for folder in self.all():
            record = _record_in(folder)
            if record is not None:
                is_unfinished = record.seq is None and not self._is_foreign(record) and self._seq_in(folder) is None
            else:
                is_unfinished = not any(folder.iterdir())
                if (folder / POINTER_NAME).exists():
                    _log.warning("%s is damaged or was edited: training goes by the store", folder / POINTER_NAME)
            if is_unfinished:
                _log.warning("%s is removed: its checkpoint did not become durable before its process ended", folder)
                shutil.rmtree(folder)

    def _finish_replacing(self) -> None:
        """Put back what a save was to replace when a crash came before it was durable; delete it otherwise."""
        for kept in self._output_dir.glob(f".checkpoint-*{_REPLACED}"):
            folder = kept.with_name(kept.name.removeprefix(".").removesuffix(_REPLACED))
            if self._seq_in(folder) is not None:
                shutil.rmtree(kept, ignore_errors=True)
            else:
                _put_back(folder)


def _record_in(folder: Path) -> PointerRecord | None:
    """Return the pointer in a folder; None: there is none, or it is damaged."""
    try:
        return read_pointer(folder)
    except (OSError, NotFoundError, CorruptError):
        return None


def _is_native(folder: Path) -> bool:
    """Say whether the framework itself has saved this folder."""
    return folder.is_dir() and not (folder / POINTER_NAME).exists() and any(folder.iterdir())


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{_REPLACED}")


def _put_back(folder: Path) -> None:
    """Put back what a save was to replace, if its place is empty."""
    if _replaced(folder).is_dir():
        with contextlib.suppress(OSError):
            # This replaces an empty folder only.
            _replaced(folder).rename(folder)


def _discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _put_back(folder)


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or path.name == POINTER_NAME or "\0" in name:
        raise MalformedError("a file of the checkpoint has a name that leads out of its folder", where=repr(name))
    return path
