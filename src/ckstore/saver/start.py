"""Begin a saver on the descriptors that it inherits: what comes before it serves."""

from __future__ import annotations

import gc
import logging
import os
import queue
import socket
import sys
import threading

from ckstore.errors import MalformedError
from ckstore.saver import messages
from ckstore.saver.arena import Arena
from ckstore.saver.channel import LogToTrainer
from ckstore.saver.priority import Priority
from ckstore.saver.server import Server

_log = logging.getLogger("ckstore")


def main(fds: list[int]) -> int:
    """Serve on inherited descriptors: socket, bell and arena; return the exit code."""
    channel, bell, arena_fd = fds
    for fd in fds:
        os.set_inheritable(fd, False)
    end = socket.socket(fileno=channel)
    message = messages.receive(end, messages.TO_SAVER)
    if not isinstance(message, messages.Hello):
        raise MalformedError("the trainer did not begin with a hello")
    priority = Priority(message.nice)
    priority.give_way()
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
