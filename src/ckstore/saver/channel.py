"""What the saver says to its trainer: messages, and the records of its log."""

from __future__ import annotations

import errno
import logging
import math
import os
import select
import socket
import sys

from ckstore.clock import SYSTEM_CLOCK
from ckstore.saver import messages
from ckstore.saver.messages import Message
from ckstore.saver.process import Watch

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
                messages.send(self._end, message)
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
            if not self._channel.tell(messages.log_of(record.levelno, text), wait_ms=LOG_WAIT_MS):
                sys.stderr.write(f"ckstore saver (pid {os.getpid()}): {text}\n")
                sys.stderr.flush()
        except Exception:
            # Whoever read stderr may be gone too.
            return
