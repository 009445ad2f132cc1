"""Whose the files of a store are, and who may read and write them: the same for each, whoever works on it.

The owner and the group are those of the store's folder; the mode is that of the file that every store begins with. So
what root or a colleague leaves behind can be read, replaced and removed by the trainer.

Invariants:
- A private store (the default) never makes a file that others may read.
- Only what this process has just made is given away: root never changes what lay there before, or under a link.
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
"""How a new store is shared: with its group, or as the umask says."""

SAMPLE_FILE = "store.json"
"""The file that shows the mode. Nothing else is known here of what a store holds."""

_PRIVATE = 0o600
_warned: set[int] = set()


@dataclass(frozen=True, slots=True)
class Ownership:
    """What every new file and folder of a store is given.

    Attributes:
        uid: The owner; used by root only, who alone can give files away.
        gid: The group; used by root only, since the folders of a shared store hand down theirs.
        file_mode: Mode of ordinary files.
    """

    uid: int
    gid: int
    file_mode: int = _PRIVATE

    @property
    def folder_mode(self) -> int:
        """Who may read may list; what a group may write hands down its group to what is made in it."""
        hands_down = stat.S_ISGID if self.file_mode & stat.S_IWGRP else 0
        return self.file_mode | (self.file_mode & 0o444) >> 2 | hands_down

    @property
    def pack_mode(self) -> int:
        """Finished packs are never written again."""
        return self.file_mode & 0o444

    @property
    def is_plain(self) -> bool:
        """Whether what the system gives to new files is right: a private store of this very user."""
        return self.file_mode == _PRIVATE and not self._gives_away

    @property
    def _gives_away(self) -> bool:
        return os.geteuid() == 0 != self.uid

    def give_file(self, fd: int, path: str) -> None:
        """Give a file that this process has just made, and still has open, its owner and mode."""
        if not self.is_plain:
            self._give(fd, path, self.file_mode)

    def give_folder(self, path: str, *, inside: int | None = None) -> None:
        """Give a folder that this process has just made its owner and mode.

        Args:
            path: Where it is.
            inside: Descriptor of the folder that it was made in, so that no link above it is followed.
        """
        if self.is_plain:
            return
        # Who owns the folder above may put something else in its place: then it is neither new nor empty.
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
            self._complain(path, mode, error)

    def _complain(self, path: str, mode: int, error: OSError) -> None:
        if self.uid in _warned:
            return
        _warned.add(self.uid)
        _log.warning(
            "%s and what else this process makes cannot be given to user %d with mode %04o (%s): that user may be "
            "locked out; run as that user",
            path, self.uid, mode, os.strerror(error.errno or 0),
        )  # fmt: skip


def ownership_of(root: str, *, sharing: Sharing | None = None) -> Ownership:
    """Return what files of a store are given.

    Args:
        root: The folder; of one that is not there yet, this user is the owner.
        sharing: For a store that is about to be made.
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
    """Whether a folder that its group may write holds a store that was made to be shared with that group."""
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
    """Return the umask, where possible without setting it: another thread may be making a file."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
