"""Ctrl-C from another thread: sent until the main thread has heard of it, wherever that is waiting."""

from __future__ import annotations

import contextlib
import signal
import threading


class CtrlC:
    """Raises KeyboardInterrupt in the main thread, once."""

    def __init__(self):
        self.heard = threading.Event()

    def send(self):
        """Interrupt the main thread; return when it was."""
        # A signal right before a thread begins to sleep does not wake it: Python checks signals between instructions.
        while not self.heard.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            self.heard.wait(0.05)

    def hear(self, number, frame):
        """Take a signal: raise what Ctrl-C raises, the first time."""
        if not self.heard.is_set():
            self.heard.set()
            raise KeyboardInterrupt


@contextlib.contextmanager
def ctrl_c():
    """Let Ctrl-C be sent inside of this."""
    made = CtrlC()
    before = signal.signal(signal.SIGINT, made.hear)
    try:
        yield made
    finally:
        # Stop a thread that is still sending.
        made.heard.set()
        signal.signal(signal.SIGINT, before)
