"""Start a saver's process, and see another process die: by its pidfd, and by its start time.

Never by the end of a pipe or socket alone: a forked child keeps that open after the process was killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping
from typing import Any

from ckstore.children import start
from ckstore.config import EngineName
from ckstore.errors import SaverError
from ckstore.saver import messages
from ckstore.store.processes import is_running, process_started

_log = logging.getLogger("ckstore")

POLL_SECONDS = 0.5
"""How often to look where the system has no pidfds."""


class Watch:
    """Watches one process; where ``fd`` is not -1, it becomes readable when the process has died.

    Args:
        pid: The process.
        started: What ``process_started`` said of it; another start time is another process. Empty: not known.
    """

    def __init__(self, pid: int, started: str) -> None:
        self.pid = pid
        self._started = started
        self.fd = -1
        # Refused in some sandboxes; and a process that is gone has none.
        with contextlib.suppress(OSError, AttributeError):
            self.fd = os.pidfd_open(pid)
        # It may be another process's that got the pid meanwhile; once it is the right one's, it stays so.
        self._is_gone = is_running(pid, started) is False

    @property
    def is_alive(self) -> bool:
        """Whether the process lives; one that is stopped does."""
        if self._is_gone:
            return False
        if self.fd < 0:
            return is_running(self.pid, self._started) is not False
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not poll.poll(0)

    @property
    def timeout_ms(self) -> int | None:
        """How long to poll at most before asking ``is_alive``; None: the descriptor tells."""
        return None if self.fd >= 0 else int(POLL_SECONDS * 1000)

    def close(self) -> None:
        """Let go of the descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def how_ended(code: int) -> str:
    """Say how a process ended, from the code that ``subprocess`` gives."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (by hand, or for want of memory)" if -code == signal.SIGKILL else "")


def hello_to(
    address: str, run: str, engine: EngineName, nice: int, retention: Mapping[str, Any], store_id: str = ""
) -> messages.Hello:
    """Return what this process says first to a saver of its own."""
    return messages.Hello(
        address=os.fsencode(address),
        run=run,
        engine=engine,
        trainer_pid=os.getpid(),
        trainer_started=process_started(os.getpid()) or "",
        nice=nice,
        log_level=_log.getEffectiveLevel(),
        retention=json.dumps(dict(retention)),
        store_id=store_id,
    )


def death_of(pid: int, code: int, *, is_busy: bool, was_asked: bool) -> SaverError:
    """Return the error of a saver that has ended: with or without something left to do, asked by a signal or not."""
    how = "was told by a signal to end" if was_asked and code == 0 else how_ended(code)
    return SaverError(
        f"the saver (pid {pid}) {how}" + (" before the commit was acknowledged" if is_busy else ""),
        todo="commit again: that starts a new one; earlier checkpoints are intact",
        pid=pid,
        saver_exit_code=code,
    )


def launch(hello: messages.Hello, arena: int) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Start the process; return it, this end of the socket to it, and the eventfd that is its bell.

    Raises:
        OSError: It cannot be started; nothing is left behind.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        # Before the process is there: it never waits for its first message.
        messages.send(ours, hello)
        return spawn(theirs.fileno(), bell, arena), ours, bell
    except BaseException:
        ours.close()
        os.close(bell)
        raise
    finally:
        theirs.close()


def spawn(channel: int, bell: int, arena: int) -> subprocess.Popen[bytes]:
    """Start the process, with this interpreter and the same modules to be found, in a session of its own."""
    return start(
        ["-m", "ckstore.saver"],
        fds=(channel, bell, arena),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
