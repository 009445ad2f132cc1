"""Protects what a pending commit reports: "staged" means that it is published even if this process dies."""

from __future__ import annotations

import traceback

import pytest

from ckstore.background.pending import Pending
from ckstore.errors import SaverError
from ckstore.results import Receipt

RECEIPT = Receipt(3, 7, "00" * 32, 1, 1, 1, 0, 0, 0, {}, "pwrite", ())


def test_staged_means_copied_and_lease_held():
    pending = Pending(3)
    pending.note_staged()
    assert (pending.is_staged, pending.wait_staged(0.01)) == (False, False)
    pending.note_began()
    assert (pending.is_staged, pending.wait_staged()) == (True, True)


def test_lease_alone_is_not_staged():
    pending = Pending(3)
    pending.note_began()
    assert (pending.is_staged, pending.wait_staged(0.01)) == (False, False)
    pending.note_staged()
    assert pending.wait_staged() is True


def test_failure_ends_the_wait_unstaged():
    pending = Pending(3)
    pending.note_staged()
    pending.note_failed(SaverError("it could not"))
    assert pending.wait_staged() is False
    with pytest.raises(SaverError, match="it could not"):
        pending.result()


def raise_at_origin():
    raise SaverError("it could not")


def test_repeated_error_keeps_its_origin_only():
    pending = Pending(3)
    with pytest.raises(SaverError) as origin:
        raise_at_origin()
    pending.note_failed(origin.value)
    frames = []
    for _ in range(3):
        with pytest.raises(SaverError) as raised:
            pending.result()
        frames.append([entry.name for entry in traceback.extract_tb(raised.value.__traceback__)])
    assert frames[0] == frames[1] == frames[2]
    assert "raise_at_origin" in frames[2]


def test_durable_implies_staged():
    pending = Pending(3)
    pending.note_done(RECEIPT)
    assert (pending.wait_staged(0), pending.is_staged, pending.is_done) == (True, True, True)
    assert pending.result(0) is RECEIPT


def test_timeout_covers_both_waits():
    pending = Pending(3)
    waited = []

    def wait(event, timeout, doing, *, is_urgent=False):
        waited.append((timeout, doing))
        return event.wait(timeout)

    pending = Pending(3, wait=wait)
    assert pending.wait_staged(0.05) is False
    assert waited[0][0] <= 0.05
    assert waited[1][0] <= 0.01
    assert waited[0][1] == "take the commit of step 3"


def test_events_after_the_end_are_ignored():
    pending = Pending(3)
    pending.note_done(RECEIPT)
    pending.note_failed(SaverError("too late"))
    assert pending.result() is RECEIPT
    assert pending.error_or_none() is None


def test_callback_error_is_logged_and_hides_no_failure(caplog):
    def fail(pending):
        raise RuntimeError("of the user's")

    pending, called = Pending(3), []
    for call in (fail, called.append):
        pending.when_done(call)
    pending.note_failed(SaverError("it could not"))
    pending.when_done(fail)
    assert called == [pending]
    assert caplog.text.count("a callback of the commit of step 3 failed") == 2
    assert "RuntimeError: of the user's" in caplog.text
    with pytest.raises(SaverError, match="it could not"):
        pending.result()


def test_commit_done_after_take_back_is_durable():
    pending = Pending(3)
    assert pending.take_back(SaverError("left out"))
    pending.note_done(RECEIPT)
    assert pending.result() is RECEIPT
    assert (pending.is_skipped, pending.error_or_none()) == (False, None)


def test_reported_failure_is_final():
    pending = Pending(3)
    assert pending.take_back(SaverError("left out"))
    for _ in range(2):
        with pytest.raises(SaverError, match="left out"):
            pending.result()
        pending.note_done(RECEIPT)
    assert pending.is_skipped
