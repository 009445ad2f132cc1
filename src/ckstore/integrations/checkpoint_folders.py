"""The folders ``checkpoint-N`` of a trainer: each has a pointer and small files, and no tensors.

Each checkpoint carries the small files of its folder, so that a folder can be laid again from the store alone.

Invariants:
- The pointer is the first file in a folder: whatever a crash leaves there is recognized by it.
- Of several checkpoints of one step, the folder stands for the newest.
- Names of files in a checkpoint are not trusted: none is written outside its folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ckstore.errors import CkstoreError, MalformedError, NotFoundError, UsageError
from ckstore.integrations.pointers import POINTER_NAME, entry_of, is_pointer, read_pointer, refuse_damaged

if TYPE_CHECKING:
    from ckstore.integrations.pointer_store import PointerStore
    from ckstore.results import Info

_log = logging.getLogger("ckstore")

FILES = "files"
"""Key of the small files in a state: path in the folder -> content."""

_TENSOR_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
"""Endings of files with tensors, or with lists of such files. The state has the tensors already."""

_NAME = re.compile(r"checkpoint-(\d+)")


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

    def all(self) -> list[Path]:
        """Return the folders, in the order of their steps."""
        paths = self._output_dir.iterdir() if self._output_dir.is_dir() else ()
        found = [(int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
        return [path for _, path in sorted(found)]

    def of_step(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self._output_dir / f"checkpoint-{step}"

    @contextlib.contextmanager
    def mirrored(self) -> Iterator[None]:
        """Delete the checkpoints whose folders are removed inside this context. Everything must be durable."""
        before = [(folder, read_pointer(folder)) for folder in self.all() if is_pointer(folder)]
        yield
        self._pointers.delete_entries([(folder, record) for folder, record in before if not folder.exists()])

    def to_resume(self, wanted: bool | str | os.PathLike[str]) -> Path:
        """Return the folder that training resumes from. It is laid again where something of it is missing.

        Args:
            wanted: True: the newest durable checkpoint. A path: of a ``checkpoint-N``, here or elsewhere. Otherwise a
                reference, such as ``"seq:7"``.

        Raises:
            ValueError: There is nothing to resume from, in the words of transformers.
            NotFoundError: There is no such checkpoint.
            UsageError: The checkpoint was not made from such a folder.
        """
        if self._pointers.exists():
            # Waits for the saver of a trainer that was killed.
            self._pointers.newest()
            self._remove_unfinished()
        if isinstance(wanted, bool):
            return self._newest()
        path = Path(wanted)
        match = _NAME.fullmatch(path.name)
        refuse_damaged(path)
        if path.is_dir() and (not is_pointer(path) or self._is_foreign(path)):
            return path
        if path.is_dir() or (match and path.parent.resolve() == self._output_dir.resolve()):
            return self._by_path(path, int(match[1]) if match else None)
        if not self._pointers.exists():
            raise ValueError(f"Can't find a valid checkpoint at {path}, and there is no store {self._pointers.address}")
        info = self._pointers.store.info(os.fspath(wanted))
        if not self._lay(self.of_step(info.step), info):
            raise UsageError(
                f"step {info.step} (seq {info.seq}) was not saved by a trainer",
                where=self._pointers.address,
                todo="load it with ckstore.open(...).restore(...)",
            )
        return self.of_step(info.step)

    def _is_foreign(self, folder: Path) -> bool:
        """Say whether a pointer belongs to another store or run. Then its checkpoint is loaded from there."""
        record, pointers = read_pointer(folder), self._pointers
        return record.run != pointers.run or not pointers.exists() or record.store_id != pointers.store.store_id

    def _by_path(self, path: Path, step: int | None) -> Path:
        """Return a folder of this run, or the newest if there is no checkpoint for it."""
        wanted = self._seq_in(path)
        for info in self._entries():
            if (info.seq == wanted if path.is_dir() else info.step == step) and self._lay(path, info):
                return path
        newest = self._newest()
        _log.warning("there is no checkpoint for %s any more: training resumes from %s", path, newest)
        return newest

    def _newest(self) -> Path:
        """Lay the folders that are missing, so that the trainer's rule of rotation sees every checkpoint."""
        found: Path | None = None
        done: set[int] = set()
        for info in self._entries():
            folder = self.of_step(info.step)
            if info.step in done:
                self._delete_replaced(info)
            elif (found is not None and self._is_settled_at(folder, info)) or self._lay(folder, info):
                done.add(info.step)
                found = found or folder
        if found is not None:
            return found
        others = [folder for folder in self.all() if not is_pointer(folder)]
        if not others:
            raise ValueError(f"No valid checkpoint found in output directory ({self._output_dir})")
        refuse_damaged(others[-1])
        return others[-1]

    def _delete_replaced(self, info: Info) -> None:
        """Delete a checkpoint that a newer one of the same step has replaced; a crash came before that."""
        if not info.tags and self._files_of(info) is not None:
            _log.info("step %d (seq %d) is deleted: a newer checkpoint has replaced it", info.step, info.seq)
            self._pointers.store.delete(f"seq:{info.seq}")

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
        if not is_pointer(folder) or self._is_foreign(folder):
            return None
        try:
            return entry_of(self._pointers.store, read_pointer(folder), where=folder).seq
        except CkstoreError:
            return None

    def _is_settled_at(self, folder: Path, info: Info) -> bool:
        """Say whether a folder has a pointer that names this checkpoint by its seq."""
        return is_pointer(folder) and not self._is_foreign(folder) and read_pointer(folder).seq == info.seq

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
            if is_pointer(folder):
                is_unfinished = (
                    read_pointer(folder).seq is None and not self._is_foreign(folder) and self._seq_in(folder) is None
                )
            else:
                is_unfinished = not any(folder.iterdir())
            if is_unfinished:
                _log.warning("%s is removed: its checkpoint did not become durable before its process ended", folder)
                shutil.rmtree(folder)


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or path.name == POINTER_NAME or "\0" in name:
        raise MalformedError("a file of the checkpoint has a name that leads out of its folder", where=repr(name))
    return path
