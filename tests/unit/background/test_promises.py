"""A saver of many ranks never waits for its trainer on the thread of its connection to the other savers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from types import SimpleNamespace

import pytest

from ckstore.background import protocol
from ckstore.background.arena import Arena
from ckstore.background.saver.server import Priority, Server


@pytest.fixture
def server(tmp_path):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    arena = Arena.create()
    server = Server(theirs, bell, arena, protocol.hello_to(str(tmp_path), "main", "auto", 0, {}), Priority(0))
    server.ours = ours
    yield server
    for end in (ours, theirs):
        end.close()
    os.close(bell)
    arena.close()


def test_a_promise_does_not_wait_for_a_trainer_that_does_not_read(server):
    with contextlib.suppress(BlockingIOError):
        while True:
            protocol.send(server._socket, protocol.Answer(1))
    ticket = SimpleNamespace(number=1, has_lease=False, may_outlive_trainer=True)
    server._tickets[1] = ticket
    on_link = threading.Thread(target=server._on_lease, args=(ticket,), daemon=True)
    on_link.start()
    on_link.join(5)
    assert not on_link.is_alive()
    sending = threading.Thread(target=server.send_promises, daemon=True)
    sending.start()
    found = []
    while protocol.Began(1) not in found:
        server.ours.settimeout(5)
        found.append(protocol.decode_message(server.ours.recv(1 << 17), protocol.TO_TRAINER))
    sending.join(5)
    assert ticket.has_lease
