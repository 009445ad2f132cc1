"""Words between a trainer and a process in the place of its saver, where logging fails or nobody reads.

They arrive, or whoever waits is told; and what must be heard later, such as to end, finds room.
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


def saying(*told):
    """Return a program that says something when it was told of a ticket, and ends when it is told to."""
    lines = [f"os.write(channel, {packet(each)})" for each in told]
    return "\n".join(
        [
            "os.read(channel, 1 << 17)",
            "os.read(channel, 1 << 17)",
            *lines,
            f"while os.read(channel, 1 << 17) not in (b'', {packet(protocol.Quit())}):",
            "    pass",
        ]
    )


def test_log_record_and_callback_that_cannot_be_logged_end_no_commit(altered, address, broken_logging):
    def fail():
        raise RuntimeError("of the user's")

    log = protocol.log_of(logging.ERROR, "something")
    altered.run(saying(log, protocol.Began(1), protocol.done_of(1, RECEIPT), protocol.SlotFree(1)))
    desk = SaverHarness(address)
    try:
        with broken_logging():
            handed = desk.begin(noise(1), 1, callbacks=lambda given: dataclasses.replace(given, on_began=fail))
            assert handed.wait() == RECEIPT
            assert handed.events == ["done", "free"]
            assert desk.saver.is_alive
    finally:
        desk.close()


def test_saver_that_dies_is_told_of_although_nothing_can_be_logged(altered, address, broken_logging):
    altered.run("time.sleep(600)")
    desk = SaverHarness(address)
    try:
        with broken_logging():
            handed = desk.begin(noise(1), 1)
            os.kill(desk.saver.pid, signal.SIGKILL)
            with pytest.raises(SaverError, match="killed by SIGKILL"):
                handed.wait()
            assert handed.events == ["failed", "free"]
    finally:
        desk.close()


def test_saver_is_told_to_end_as_soon_as_there_is_memory_to_say_so(altered, address, monkeypatch):
    altered.run(saying())
    desk = SaverHarness(address)
    send, refused = protocol.send, []

    def short(end, message):
        if isinstance(message, protocol.Quit) and len(refused) < 3:
            refused.append(message)
            raise OSError(errno.ENOBUFS, "no buffer space")
        send(end, message)

    try:
        handed = desk.begin(noise(1), 1)
        monkeypatch.setattr(protocol, "send", short)
        assert desk.saver.quit(SECONDS_MAX)
        assert len(refused) == 3
        with pytest.raises(SaverError, match="ended with code 0"):
            handed.wait()
    finally:
        desk.close()


@pytest.fixture
def deaf(altered, address, monkeypatch):
    """A desk whose saver reads nothing, with all that is said from now on."""
    altered.run("time.sleep(600)")
    desk = SaverHarness(address)
    said, send = [], protocol.send
    monkeypatch.setattr(protocol, "send", lambda end, message: (said.append(message), send(end, message)))
    yield desk, said
    os.kill(desk.saver.pid, signal.SIGKILL)
    until(lambda: not desk.saver.is_alive, "the end of the saver")
    desk.close()


def test_who_polls_does_not_fill_the_ears_of_a_saver_that_does_not_read(deaf):
    desk, said = deaf
    handed = desk.begin(noise(1), 1)
    del said[:]
    for _ in range(2000):
        assert not desk.saver.wait(handed.free, 1e-4, "publish step 1", is_urgent=True)
    assert said == [protocol.Hurry()]


def test_who_waits_hurries_what_another_thread_began_while_it_was_being_said(deaf, monkeypatch):
    desk, said = deaf
    desk.saver.release_retained()
    send = protocol.send

    def meanwhile(end, message):
        send(end, message)
        if isinstance(message, protocol.Hurry) and len(said) == 2:
            desk.saver.release_retained()

    monkeypatch.setattr(protocol, "send", meanwhile)
    for _ in range(3):
        desk.saver.hurry()
    assert [type(each).__name__ for each in said] == ["Forget", "Hurry", "Forget", "Hurry"]
