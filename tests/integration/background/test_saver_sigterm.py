"""Protects commits when a saver gets SIGTERM, which schedulers send to every process of a job."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import time

import numpy as np
import pytest

import ckstore
from ckstore._testing import saver_of
from ckstore.background import protocol
from ckstore.background.staged_head import HeadWriter
from ckstore.config import MIB
from ckstore.errors import SaverError
from ckstore.results import Receipt
from support.saver_harness import SECONDS_MAX, SaverHarness, noise, until

PLAIN = {"compression": "none"}


@pytest.mark.parametrize("on_busy", ["wait", "replace"])
def test_commit_while_saver_is_ending_is_durable(folder, on_busy):
    with ckstore.open(folder, policy=ckstore.Policy(on_busy=on_busy, **PLAIN)) as store:
        for number in range(2):
            first = store.commit_async(noise(number, 48 * MIB), 10 * number + 1)
            os.kill(saver_of(store).pid, signal.SIGTERM)
            second = store.commit_async(noise(number + 10), 10 * number + 2)
            assert [first.result(SECONDS_MAX).step, second.result(SECONDS_MAX).step] == [
                10 * number + 1,
                10 * number + 2,
            ]
    with ckstore.open(folder) as store:
        assert store.steps() == [step for number in range(2) for step in (10 * number + 1, 10 * number + 2)]
        assert np.array_equal(store.restore(12)["w0"], noise(11)["w0"])


def test_commit_right_after_sigterm_is_durable(folder):
    left = []
    with ckstore.open(folder, policy=ckstore.Policy(**PLAIN)) as store:
        for step in range(1, 9):
            store.commit_async({"step": np.full(100, step)}, step).result(SECONDS_MAX)
            saver = saver_of(store)
            left.append(saver.pid)
            # A saver that got the signal earlier may have ended by itself.
            with contextlib.suppress(ProcessLookupError):
                os.kill(saver.pid, signal.SIGTERM)
            time.sleep(0.003 * (step % 4))
        store.commit_async({"step": np.full(100, 9)}, 9).result(SECONDS_MAX)
        assert store.steps() == list(range(1, 10))
        assert len(set(left)) > 1, "those that were asked have ended"


def test_prepared_state_goes_to_a_new_saver(folder, monkeypatch, caplog):
    with ckstore.open(folder, policy=ckstore.Policy(**PLAIN)) as store:
        store.commit_async(noise(1), 1).result(SECONDS_MAX)
        leaving, encode = saver_of(store), HeadWriter.encode

        def encode_slowly(writer, head):
            if leaving.takes_tickets:
                os.kill(leaving.pid, signal.SIGTERM)
                until(lambda: not leaving.takes_tickets, "the word of the saver")
            return encode(writer, head)

        monkeypatch.setattr(HeadWriter, "encode", encode_slowly)
        with caplog.at_level(logging.WARNING, "ckstore"):
            assert store.commit_async(noise(2), 2).result(SECONDS_MAX).step == 2
        assert saver_of(store) is not leaving
        assert f"the saver (pid {leaving.pid}) was asked to end by a signal; starting another saver" in caplog.text
        assert not [record for record in caplog.records if record.levelno > logging.WARNING]
        assert store.steps() == [1, 2]


def test_interrupted_send_may_wait_for_the_saver(folder, monkeypatch):
    send, waited = protocol.send, []
    with ckstore.open(folder, policy=ckstore.Policy(**PLAIN)) as store:
        pending = store.commit_async(noise(1), 1)
        saver = saver_of(store)

        def interrupted_send(end, message):
            if not waited:
                # A signal handler of the user runs in the middle of this call.
                waited.append(message)
                os.kill(saver.pid, signal.SIGTERM)
                assert pending.result(SECONDS_MAX).step == 1
                until(lambda: not saver.takes_tickets, "the word of the saver")
                # The release of the slot is reported after that.
                store.wait()
            send(end, message)

        monkeypatch.setattr(protocol, "send", interrupted_send)
        saver.hurry()
        assert waited
        assert store.commit_async(noise(2), 2).result(SECONDS_MAX).step == 2


# Programs that replace the saver

SPEAKING = """
import select
def say(packet):
    os.write(channel, packet)
def hear(seconds=60):
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return os.read(channel, 1 << 17) if poll.poll(1000 * seconds) else b""
"""


def packet(message):
    return repr(protocol.encode_message(message))


def test_trainer_releases_saver_once(address, altered, tmp_path):
    heard = tmp_path / "heard"
    altered.run(
        SPEAKING
        + f"""
said = [hear(), hear()]
say({packet(protocol.Leaving())})
said.append(hear(0.2))
say({packet(protocol.failed_of(1, SaverError("it failed")))})
said.append(hear())
say({packet(protocol.SlotFree(1))})
say({packet(protocol.Leaving())})
said.append(hear(0.2))
with open({str(heard)!r}, "w") as out:
    out.write(repr(said[2:]))
"""
    )
    harness = SaverHarness(address)
    try:
        in_flight = harness.begin(noise(1), 1)
        with pytest.raises(SaverError, match="it failed"):
            in_flight.wait()
        until(lambda: not harness.saver.is_alive, "the end of the saver")
        # Its handle stays open: nobody should wait for the run.
        assert heard.read_text() == repr([b"", protocol.encode_message(protocol.Quit(is_parting=True)), b""])
    finally:
        harness.close()


def test_messages_of_dead_saver_are_processed(address, altered):
    receipt = Receipt(1, 0, "ab" * 32, 1, 1, 1, 0, 0, 0, {}, "pwrite", ())
    reported = (protocol.Began(1), protocol.done_of(1, receipt), protocol.SlotFree(1))
    # Leave the ticket unread, and wait until it has arrived.
    wait = "hear()\nselect.select([channel], [], [])\n"
    altered.run(SPEAKING + wait + "".join(f"say({packet(each)})\n" for each in reported))
    harness = SaverHarness(address)

    def wait_for_its_death(given):
        def began():
            os.waitid(os.P_PID, harness.saver.pid, os.WEXITED | os.WNOWAIT)
            given.on_began()

        return dataclasses.replace(given, on_began=began)

    try:
        in_flight = harness.begin(noise(1), 1, callbacks=wait_for_its_death)
        assert in_flight.wait() == receipt
        assert in_flight.events == ["began", "done", "free"]
    finally:
        harness.close()
