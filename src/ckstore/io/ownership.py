"""Owner and mode of the files of a store.

New files get the owner and group of the store's folder and the mode of ``store.json``, no matter which user creates
them. The trainer can therefore read, replace and remove files that root or a colleague has created.

Invariants:
- In a private store (the default) no file is readable by other users.
- Root changes the owner only of files that this process has just created, never of existing files or through a link.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_log = logging.getLogger("ckstore")

Sharing = Literal["group", "umask"]
"""How a new store is shared: with its group, or as the umask allows."""

SAMPLE_FILE = "store.json"
"""The file whose mode all files of a store get."""

_PRIVATE = 0o600
_warned: set[int] = set()


@dataclass(frozen=True, slots=True)
class Ownership:
    """Owner, group and mode of every new file and folder of a store.

    Attributes:
        uid: The owner. Only root can set it.
        gid: The group. Only root sets it; for other users the folders of a shared store pass on their group (setgid).
        file_mode: Mode of ordinary files.
    """

    uid: int
    gid: int
    file_mode: int = _PRIVATE

    @property
    def folder_mode(self) -> int:
        """File mode plus search permission for readers, plus setgid if the group can write."""
        setgid = stat.S_ISGID if self.file_mode & stat.S_IWGRP else 0
        return self.file_mode | (self.file_mode & 0o444) >> 2 | setgid

    @property
    def pack_mode(self) -> int:
        """Mode of finished packs, which are read-only."""
        return self.file_mode & 0o444

    @property
    def is_plain(self) -> bool:
        """True if new files already have the right owner and mode: a private store of this user."""
        return self.file_mode == _PRIVATE and not self._gives_away

    @property
    def _gives_away(self) -> bool:
        return os.geteuid() == 0 != self.uid

    def give_file(self, fd: int, path: str) -> None:
        """Set owner and mode of a file that this process has just created and still has open."""
        if not self.is_plain:
            self._give(fd, path, self.file_mode)

    def give_folder(self, path: str, *, inside: int | None = None) -> None:
        """Set owner and mode of a folder that this process has just created.

        Args:
            path: Path of the folder.
            inside: Descriptor of the folder above it, so that no link is followed.
        """
        if self.is_plain:
            return
        # The owner of the folder above may have replaced it by another one. That one is not empty or has another owner.
        name = path if inside is None else path.rpartition("/")[2]
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
        try:
            with os.scandir(fd) as entries:
                is_new = os.fstat(fd).st_uid in (os.geteuid(), self.uid) and next(entries, None) is None
            if is_new:
                self._give(fd, path, self.folder_mode)
        finally:
            os.close(fd)

    def _give(self, fd: int, path: str, mode: int) -> None:
        try:
            if self._gives_away:
                os.fchown(fd, self.uid, self.gid)
            if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
                os.fchmod(fd, mode)
        except OSError as error:
            self._warn_once(path, mode, error)

    def _warn_once(self, path: str, mode: int, error: OSError) -> None:
        if self.uid in _warned:
            return
        _warned.add(self.uid)
        _log.warning(
            "files that this process creates (first: %s) cannot be given to user %d with mode %04o (%s), so that user "
            "may be unable to read or remove them; run this process as that user",
            path, self.uid, mode, os.strerror(error.errno or 0),
        )  # fmt: skip


def ownership_of(root: str, *, sharing: Sharing | None = None) -> Ownership:
    """Return owner and mode for the files of a store.

    Args:
        root: The folder. If it does not exist, this user is the owner.
        sharing: How a new store is shared.
    """
    uid, gid, mode = os.geteuid(), os.getegid(), _new_mode(sharing)
    with contextlib.suppress(OSError):
        found = Path(root).stat()
        uid, gid = found.st_uid, found.st_gid
        sample = Path(root, SAMPLE_FILE).lstat()
        if stat.S_ISREG(sample.st_mode):
            mode = sample.st_mode & 0o666 | _PRIVATE
    return Ownership(uid, gid, mode)


def is_shared_on_purpose(root: str) -> bool:
    """Return True if a group-writable folder holds a store that was created with ``shared="group"`` or by the umask."""
    try:
        folder, sample = Path(root).stat(), Path(root, SAMPLE_FILE).lstat()
    except OSError:
        return False
    return (
        not folder.st_mode & stat.S_IWOTH
        and stat.S_ISREG(sample.st_mode)
        and bool(sample.st_mode & stat.S_IWGRP)
        and (folder.st_uid, folder.st_gid) == (sample.st_uid, sample.st_gid)
    )


def _new_mode(sharing: Sharing | None) -> int:
    if sharing is None:
        return _PRIVATE
    by_umask = 0o666 & ~_umask()
    return _PRIVATE | by_umask | (0o060 if sharing == "group" else 0)


def _umask() -> int:
    """Return the umask, if possible without changing it, because another thread may be creating a file."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
