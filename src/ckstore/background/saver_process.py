"""Start a saver's process, and see another process die: by its pidfd, and by its start time.

Never by the end of a pipe or socket alone: a forked child keeps that open after the process was killed.

What the saver says to its trainer: messages, and the records of its log.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ckstore.background import protocol
from ckstore.background.protocol import Message
from ckstore.clock import SYSTEM_CLOCK
from ckstore.config import EngineName
from ckstore.errors import SaverError
from ckstore.processes import is_running, process_started, start_python

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
) -> protocol.Hello:
    """Return what this process says first to a saver of its own."""
    return protocol.Hello(
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


def death_of(pid: int, code: int, *, is_busy: bool, error_was_raised: bool) -> SaverError:
    """Return the error of a saver that has ended: with or without something left to do, asked by a signal or not."""
    how = "was told by a signal to end" if error_was_raised and code == 0 else how_ended(code)
    return SaverError(
        f"the saver (pid {pid}) {how}" + (" before the commit was acknowledged" if is_busy else ""),
        todo="commit again: that starts a new one; earlier checkpoints are intact",
        pid=pid,
        saver_exit_code=code,
    )


def launch(hello: protocol.Hello, arena: int) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Start the process; return it, this end of the socket to it, and the eventfd that is its bell.

    Raises:
        OSError: It cannot be started; nothing is left behind.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        # Before the process is there: it never waits for its first message.
        protocol.send(ours, hello)
        return spawn(theirs.fileno(), bell, arena), ours, bell
    except BaseException:
        ours.close()
        os.close(bell)
        raise
    finally:
        theirs.close()


def spawn(channel: int, bell: int, arena: int) -> subprocess.Popen[bytes]:
    """Start the process, with this interpreter and the same modules to be found, in a session of its own."""
    return start_python(
        ["-m", "ckstore.background.saver"],
        fds=(channel, bell, arena),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


SHORT_OF_MEMORY = (errno.ENOBUFS, errno.ENOMEM)
"""The system has no memory for a message at this moment; the other end is as it was."""

AGAIN_SECONDS = 0.02
"""Until a message is sent again that there was no memory for."""

LOG_WAIT_MS = 1000
"""How long a log record may wait for a trainer that does not read, before it goes to stderr."""


class Channel:
    """What the saver says; from any thread, and to stderr when the trainer is gone."""

    def __init__(self, end: socket.socket, trainer: Watch) -> None:
        self._end = end
        self._trainer = trainer

    def tell(self, message: Message, *, wait_ms: int | None = None) -> bool:
        """Send a message, waiting for a trainer that does not read; return whether it was sent.

        Args:
            message: What to send.
            wait_ms: How long to wait; 0: not at all; None: as long as the trainer lives.
        """
        tries_left = math.inf if wait_ms is None else wait_ms / (1000 * AGAIN_SECONDS)
        while True:
            try:
                protocol.send(self._end, message)
                return True
            except BlockingIOError:
                if wait_ms == 0 or not self._wait(wait_ms):
                    return False
            except OSError as error:
                tries_left -= 1
                if error.errno not in SHORT_OF_MEMORY or tries_left < 0 or not self._trainer.is_alive:
                    return False
                SYSTEM_CLOCK.sleep(AGAIN_SECONDS)

    def _wait(self, wait_ms: int | None) -> bool:
        poll = select.poll()
        poll.register(self._end, select.POLLOUT)
        if self._trainer.fd >= 0:
            poll.register(self._trainer.fd, select.POLLIN)
        while True:
            ready = poll.poll(self._trainer.timeout_ms if wait_ms is None else wait_ms)
            if any(fd == self._end.fileno() for fd, _ in ready):
                return True
            if wait_ms is not None or not self._trainer.is_alive:
                return False


class LogToTrainer(logging.Handler):
    """Sends log records to the trainer; to stderr where that cannot be."""

    def __init__(self, channel: Channel, level: int) -> None:
        super().__init__(level)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record; never raises."""
        try:
            text = self.format(record)
            if not self._channel.tell(protocol.log_of(record.levelno, text), wait_ms=LOG_WAIT_MS):
                sys.stderr.write(f"ckstore saver (pid {os.getpid()}): {text}\n")
                sys.stderr.flush()
        except Exception:
            # Whoever read stderr may be gone too.
            return
