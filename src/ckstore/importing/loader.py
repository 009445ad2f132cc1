"""The parent's end of loading: start the child, give it jobs, and outlive whatever it meets.

Invariants:
- A child that crashes, is killed, or is silent for too long is an error of the file it was loading; the next file gets
  a new one.
- The parent maps nothing of what a child hands back, and believes none of it unchecked.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ckstore import errors
from ckstore.children import start
from ckstore.errors import BackendError, CkstoreError, CorruptError, MalformedError, UnsupportedError
from ckstore.format.records import decode_inner, encode_inner
from ckstore.importing.child import MESSAGE_NBYTES_MAX
from ckstore.importing.parcel import Answer, Job, read_parcel
from ckstore.importing.storable import Loaded
from ckstore.importing.storages import OpenFile

START_SECONDS = 120.0
"""For Python and torch to start, and for the smallest file."""

NBYTES_PER_SECOND_MIN = 4 << 20
"""What loads more slowly than this is taken to hang."""


class Loader:
    """Loads parts of foreign checkpoints in a child process; a context manager.

    Args:
        patience_seconds: How long a child may be silent, beyond what the length of its file explains.
    """

    def __init__(self, patience_seconds: float = START_SECONDS) -> None:
        self.patience_seconds = patience_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(
        self, kind: str, path: Path, nbytes: int, *, key: str = "", skip: Sequence[str] = (), is_peek: bool = False
    ) -> Loaded:
        """Return the state in a file, or with ``is_peek`` its plain values only.

        Args:
            kind: ``"torch"``, ``"pickle"`` or ``"dcp"``.
            path: The file, or the folder.
            nbytes: How long it is, all files of a folder together.
            key: The key that it gets in the state; empty: it is the whole state.
            skip: Globs over dotted paths of leaves that are left out.
            is_peek: Read no tensor.

        Raises:
            UnsupportedError: It holds objects that only code can make, or torch is missing or too old.
            CorruptError: It cannot be read, or loading it ended the child.
            CapacityError: Loading it takes far more memory than it is long.
        """
        memory = OpenFile(_memory_file(), str(path))
        try:
            answer = self._ask(Job(kind, os.fsencode(path), is_peek, nbytes, key, list(skip)), memory, path)
            if answer.error is not None:
                raise _error_of(answer.error)
            return read_parcel(memory, answer)
        except BaseException:
            memory.close()
            raise

    @property
    def child_pid(self) -> int | None:
        """The process of the child; None: none was started, or the last one has ended."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the child; repeated calls do nothing."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        process, self._process = self._process, None
        if process is not None:
            # It loads what nobody waits for any more; there is nothing for it to finish.
            process.kill()
            process.wait()

    def _ask(self, job: Job, memory: OpenFile, path: Path) -> Answer:
        channel = self._started()
        seconds = self.patience_seconds + job.nbytes_max / NBYTES_PER_SECOND_MIN
        try:
            socket.send_fds(channel, [encode_inner(job)], [memory.fileno])
            poll = select.poll()
            poll.register(channel, select.POLLIN)
            if not poll.poll(seconds * 1000):
                raise _ended(path, f"was silent for {seconds:.0f} seconds, and was killed")
            answer = channel.recv(MESSAGE_NBYTES_MAX)
        except OSError:
            answer = b""
        except BaseException:
            self.close()
            raise
        if not answer:
            raise _ended(path, self._how_it_ended())
        return decode_inner(answer, Answer, where=path)

    def _how_it_ended(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        self.close()
        if code is None:
            return "closed its end of the channel"
        if code >= 0:
            return f"ended with code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def _started(self) -> socket.socket:
        if self._channel is not None:
            return self._channel
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = start(
                    ["-m", "ckstore.importing"],
                    fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as problem:
                ours.close()
                raise BackendError(f"the process that loads files cannot be started ({problem})") from None
        self._channel = ours
        return ours


def _memory_file() -> int:
    try:
        return os.memfd_create("ckstore-import", os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        raise UnsupportedError("this system has no files of memory", todo="import on a Linux machine") from None


def _ended(path: Path, how: str) -> CkstoreError:
    return CorruptError(
        f"the process that loaded the file {how}", where=path,
        todo="it is damaged, was made to harm, or is too large for this machine's memory; --exclude leaves it out",
    )  # fmt: skip


_KINDS: dict[str, type[CkstoreError]] = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CkstoreError) and kind is not CkstoreError
}


def _error_of(told: tuple[str, str, str | None, str | None]) -> CkstoreError:
    code, what, where, todo = told
    kind = _KINDS.get(code)
    if kind is None:
        raise MalformedError("the loading process told of an unknown error", where=repr(code)[:80])
    return kind(what, where=where, todo=todo)
