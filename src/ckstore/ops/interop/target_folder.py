"""Write several files to a folder so that it is loadable at the end, and never in between.

Invariants:
- All files are written to a draft folder in the target, and synced, before anything in the target changes.
- The last file in the list gets its name last. It is the one without which nothing loads.
- A file is replaced only with ``force``. Then old weights are removed before any file gets its name.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckstore.errors import NotFoundError, UsageError
from ckstore.hashing import new_token
from ckstore.io.syscalls import medium_errors
from ckstore.ops.interop.adapters import ADAPTER_CONFIG
from ckstore.ops.interop.export import give_name, sync_folder

WEIGHTS = re.compile(r"(?:model|adapter_model)(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?")
"""Names of files of weights that an export writes."""

_OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")
_DRAFT = re.compile(r"\.ckstore-[0-9a-z]+\.draft")


@dataclass(frozen=True, slots=True)
class TargetFolder:
    """The folder that is written to."""

    folder: Path
    force: bool

    def check(self, names: Sequence[str]) -> None:
        """Refuse a folder in which a file would be replaced without ``force``, or in which others would be loaded."""
        with medium_errors(self.folder, "checking the target folder"):
            if not os.path.lexists(self.folder):
                if not self.folder.absolute().parent.is_dir():
                    raise NotFoundError("no such folder", where=self.folder.parent, todo="create it first")
                return
            if not self.folder.is_dir():
                raise UsageError("the target is not a folder", where=self.folder, todo="name a new folder")
            present = {entry.name for entry in self.folder.iterdir()}
        others = [ADAPTER_CONFIG] if ADAPTER_CONFIG not in names else []
        for name in (*_OTHER_WEIGHTS, *others):
            if name in present:
                raise UsageError(
                    f"the folder contains {name}, which could be loaded instead", where=self.folder,
                    todo="remove it, or name a new folder",
                )  # fmt: skip
        taken = [name for name in names if os.path.lexists(self.folder / name)]
        taken += sorted(name for name in present if WEIGHTS.fullmatch(name))
        if taken and not self.force:
            raise UsageError(
                f"the folder contains {taken[0]} already", where=self.folder,
                todo="name a new folder, or replace the files with --force",
            )  # fmt: skip

    def leftovers(self) -> list[str]:
        """Return a note on each draft that an interrupted export left."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return [
            f"{self.folder / name} is left from an interrupted export, unless one is running now. Remove it."
            for name in sorted(names)
            if _DRAFT.fullmatch(name)
        ]

    @contextlib.contextmanager
    def draft(self) -> Iterator[Path]:
        """Yield a folder to write to. It is removed at the end; so is the target folder if it is new and empty."""
        with medium_errors(self.folder, "writing a folder"):
            is_new = not self.folder.exists()
            draft = self.folder / f".ckstore-{new_token()}.draft"
            try:
                self.folder.mkdir(exist_ok=True)
                draft.mkdir()
            except FileNotFoundError:
                # File systems such as /proc say so.
                raise NotFoundError("no folder can be created here", where=self.folder, todo="name another") from None
            try:
                yield draft
            finally:
                shutil.rmtree(draft, ignore_errors=True)
                if is_new:
                    with contextlib.suppress(OSError):
                        self.folder.rmdir()

    def publish(self, draft: Path, names: Sequence[str]) -> None:
        """Give all files their names; the last name makes the folder loadable."""
        if self.force:
            self._remove_weights(names)
        for name in names:
            if name == names[-1]:
                sync_folder(self.folder)
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            give_name(draft / name, target, force=self.force)
            if target.parent != self.folder:
                sync_folder(target.parent)
        sync_folder(self.folder)
        sync_folder(self.folder.absolute().parent)

    def _remove_weights(self, names: Sequence[str]) -> None:
        """Remove the weights of an earlier export: first what makes the folder loadable."""
        old = {entry for entry in self.folder.iterdir() if WEIGHTS.fullmatch(entry.name)}
        old |= {path for name in names if WEIGHTS.fullmatch(Path(name).name) and (path := self.folder / name).is_file()}
        for path in sorted(old, key=lambda path: ("-of-" in path.name, path)):
            path.unlink()
            sync_folder(path.parent)


def write_synced(path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    """Write a new file, durably, in a folder that is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Make the content of a file durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
