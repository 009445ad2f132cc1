"""Run a saver: ``python -m ckstore.verbs.background.saver SOCKET BELL ARENA``, on three inherited descriptors.

The trainer starts it from ``saver_process.py``.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import socket
import sys
import threading

from ckstore.background import protocol
from ckstore.background.arena import Arena
from ckstore.background.protocol import Channel
from ckstore.background.saver.server import Priority, Server
from ckstore.errors import MalformedError

LOG_WAIT_MS = 1000
"""How long a log record may wait for a trainer that does not read, before it goes to stderr."""


class LogToTrainer(logging.Handler):
    """Sends log records to the trainer; to stderr where that cannot be."""

    def __init__(self, channel: Channel, level: int) -> None:
        super().__init__(level)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record; never raises."""
        try:
            text = self.format(record)
            if not self._channel.send(protocol.log_of(record.levelno, text), wait_ms=LOG_WAIT_MS):
                sys.stderr.write(f"ckstore saver (pid {os.getpid()}): {text}\n")
                sys.stderr.flush()
        except Exception:
            # Whoever read stderr may be gone too.
            return


_log = logging.getLogger("ckstore")


def main(fds: list[int]) -> int:
    """Serve on inherited descriptors: socket, bell and arena; return the exit code."""
    channel, bell, arena_fd = fds
    for fd in fds:
        os.set_inheritable(fd, False)
    end = socket.socket(fileno=channel)
    message = protocol.receive(end, protocol.TO_SAVER)
    if not isinstance(message, protocol.Hello):
        raise MalformedError("the trainer did not begin with a hello")
    priority = Priority(message.nice)
    priority.use_low_priority()
    server = Server(end, bell, Arena.attach(arena_fd), message, priority)
    _log.addHandler(LogToTrainer(server.channel, message.log_level))
    _log.setLevel(message.log_level)
    _log.propagate = False
    end_without_threads()
    # What was imported stays: looking through it for garbage took 12 ms in the middle of the second commit.
    gc.freeze()
    return server.run()


def end_without_threads() -> None:
    """End this process when a thread that was started cannot begin: Python lets whoever started it wait for ever."""
    # It happens for want of memory, and is told to this hook only, by a thread that can do no more than call C.
    faults: queue.SimpleQueue[sys.UnraisableHookArgs] = queue.SimpleQueue()

    def watch() -> None:
        while True:
            fault = faults.get()
            if "thread started" in str(fault.err_msg):
                _log.critical("the saver ends: it has no memory for a thread")
                os._exit(1)
            sys.__unraisablehook__(fault)

    threading.Thread(target=watch, name="ckstore-faults", daemon=True).start()
    sys.unraisablehook = faults.put


if __name__ == "__main__":
    sys.exit(main([int(argument) for argument in sys.argv[1:]]))
