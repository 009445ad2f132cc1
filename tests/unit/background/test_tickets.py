"""Protects how tickets end: each is reported once, and a message of one that is not there is not understood."""

from __future__ import annotations

import pytest

from ckstore.background import protocol
from ckstore.background.client import Callbacks, Tickets
from ckstore.errors import MalformedError, SaverError


def test_ticket_that_was_not_given_is_malformed():
    tickets = Tickets()
    with pytest.raises(MalformedError):
        tickets.take(protocol.SlotFree(1))


def test_tickets_of_a_dead_saver_end_and_no_more_are_taken():
    tickets, told = Tickets(), []
    assert tickets.add(1, Callbacks(told.append, told.append, lambda: told.append("free")))
    tickets.end(lambda: SaverError("dead"))
    assert [str(each) for each in told] == ["dead", "free"]
    assert not tickets.add(2, Callbacks(print, print, print))


def test_ticket_whose_slot_is_kept_ends_when_that_is_free():
    tickets, told = Tickets(), []
    note = [lambda *facts, name=name: told.append(name) for name in ("done", "failed", "free", "kept")]
    assert tickets.add(1, Callbacks(*note[:3], on_retained=note[3]))
    tickets.take(protocol.Retained(1))
    tickets.take(protocol.SlotFree(1))
    assert told == ["kept", "free"]
    with pytest.raises(MalformedError, match="reported on an unknown ticket"):
        tickets.take(protocol.Retained(1))


def test_error_of_a_saver_without_memory_says_so():
    failed = protocol.failed_of(1, MemoryError())
    assert "no memory" in str(protocol.error_of(failed))
