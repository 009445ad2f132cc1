"""Entry point of a saver: ``python -m ckstore.background.saver SOCKET BELL ARENA [LISTENER]``.

The arguments are the numbers of inherited descriptors. The trainer starts this process in ``client.launch``.
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
"""How long a log record may wait for a full socket before it is written to stderr."""


class LogToTrainer(logging.Handler):
    """Sends log records to the trainer, or writes them to stderr if that fails."""

    def __init__(self, channel: Channel, level: int) -> None:
        super().__init__(level)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record. Never raises."""
        try:
            text = self.format(record)
            if not self._channel.send(protocol.log_of(record.levelno, text), wait_ms=LOG_WAIT_MS):
                sys.stderr.write(f"ckstore saver (pid {os.getpid()}): {text}\n")
                sys.stderr.flush()
        except Exception:
            # stderr may be closed, too.
            return


_log = logging.getLogger("ckstore")


def main(fds: list[int]) -> int:
    """Serve on the inherited descriptors. Return the exit code."""
    channel, bell, arena_fd, *listeners = fds
    for fd in fds:
        os.set_inheritable(fd, False)
    end = socket.socket(fileno=channel)
    message = protocol.receive(end, protocol.TO_SAVER)
    if not isinstance(message, protocol.Hello):
        raise MalformedError("the trainer's first message is not Hello")
    priority = Priority(message.nice)
    priority.use_low_priority()
    listener = socket.socket(fileno=listeners[0]) if listeners else None
    server = Server(end, bell, Arena.attach(arena_fd), message, priority, listener)
    _log.addHandler(LogToTrainer(server.channel, message.log_level))
    _log.setLevel(message.log_level)
    _log.propagate = False
    end_without_threads()
    # Imported objects stay alive. Scanning them for garbage would take milliseconds in the middle of a commit.
    gc.freeze()
    return server.run()


def end_without_threads() -> None:
    """End this process if a started thread cannot run. Python would let the thread that started it wait forever."""
    # This happens when memory is short. Python reports it only to this hook, on a thread that cannot run Python code.
    faults: queue.SimpleQueue[sys.UnraisableHookArgs] = queue.SimpleQueue()

    def watch() -> None:
        while True:
            fault = faults.get()
            if "thread started" in str(fault.err_msg):
                _log.critical("the saver ends: there is no memory to start a thread")
                os._exit(1)
            sys.__unraisablehook__(fault)

    threading.Thread(target=watch, name="ckstore-faults", daemon=True).start()
    sys.unraisablehook = faults.put


if __name__ == "__main__":
    sys.exit(main([int(argument) for argument in sys.argv[1:]]))
