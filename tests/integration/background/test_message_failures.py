"""Protects messages between trainer and saver if logging fails or the other side does not read.

Messages arrive or the sender gets an error; important messages, such as the request to end, are sent later.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import signal

import pytest

from ckstore.background import protocol
from ckstore.errors import SaverError
from ckstore.results import Receipt
from support.saver_harness import SECONDS_MAX, SaverHarness, noise, until

RECEIPT = Receipt(1, 0, "ab" * 32, 1, 1, 1, 0, 0, 0, {}, "pwrite", ())


def packet(message):
    return repr(protocol.encode_message(message))


def message_sender(*reported):
    """Return a program that sends a message when it gets a ticket, and ends on request."""
    lines = [f"os.write(channel, {packet(each)})" for each in reported]
    return "\n".join(
        [
            "os.read(channel, 1 << 17)",
            "os.read(channel, 1 << 17)",
            *lines,
            f"while os.read(channel, 1 << 17) not in (b'', {packet(protocol.Quit())}):",
            "    pass",
        ]
    )


def test_failing_log_handler_ends_no_commit(altered, address, broken_logging):
    def fail():
        raise RuntimeError("of the user's")

    log = protocol.log_of(logging.ERROR, "something")
    altered.run(message_sender(log, protocol.Began(1), protocol.done_of(1, RECEIPT), protocol.SlotFree(1)))
    harness = SaverHarness(address)
    try:
        with broken_logging():
            in_flight = harness.begin(noise(1), 1, callbacks=lambda given: dataclasses.replace(given, on_began=fail))
            assert in_flight.wait() == RECEIPT
            assert in_flight.events == ["done", "free"]
            assert harness.saver.is_alive
    finally:
        harness.close()


def test_death_of_saver_is_reported_without_logging(altered, address, broken_logging):
    altered.run("time.sleep(600)")
    harness = SaverHarness(address)
    try:
        with broken_logging():
            in_flight = harness.begin(noise(1), 1)
            os.kill(harness.saver.pid, signal.SIGKILL)
            with pytest.raises(SaverError, match="killed by SIGKILL"):
                in_flight.wait()
            assert in_flight.events == ["failed", "free"]
    finally:
        harness.close()


def test_end_request_is_retried_after_memory_shortage(altered, address, monkeypatch):
    altered.run(message_sender())
    harness = SaverHarness(address)
    send, refused = protocol.send, []

    def short(end, message):
        if isinstance(message, protocol.Quit) and len(refused) < 3:
            refused.append(message)
            raise OSError(errno.ENOBUFS, "no buffer space")
        send(end, message)

    try:
        in_flight = harness.begin(noise(1), 1)
        monkeypatch.setattr(protocol, "send", short)
        assert harness.saver.quit(SECONDS_MAX)
        assert len(refused) == 3
        with pytest.raises(SaverError, match="ended with code 0"):
            in_flight.wait()
    finally:
        harness.close()


@pytest.fixture
def unread_harness(altered, address, monkeypatch):
    """A harness whose saver reads nothing, and the list of all messages sent from now on."""
    altered.run("time.sleep(600)")
    harness = SaverHarness(address)
    said, send = [], protocol.send
    monkeypatch.setattr(protocol, "send", lambda end, message: (said.append(message), send(end, message)))
    yield harness, said
    os.kill(harness.saver.pid, signal.SIGKILL)
    until(lambda: not harness.saver.is_alive, "the end of the saver")
    harness.close()


def test_polling_does_not_fill_the_socket(unread_harness):
    harness, said = unread_harness
    in_flight = harness.begin(noise(1), 1)
    del said[:]
    for _ in range(2000):
        assert not harness.saver.wait(in_flight.free, 1e-4, "publish step 1", is_urgent=True)
    assert said == [protocol.Hurry()]


def test_wait_hurries_concurrently_begun_commit(unread_harness, monkeypatch):
    harness, said = unread_harness
    harness.saver.release_retained()
    send = protocol.send

    def meanwhile(end, message):
        send(end, message)
        if isinstance(message, protocol.Hurry) and len(said) == 2:
            harness.saver.release_retained()

    monkeypatch.setattr(protocol, "send", meanwhile)
    for _ in range(3):
        harness.saver.hurry()
    assert [type(each).__name__ for each in said] == ["Forget", "Hurry", "Forget", "Hurry"]
