"""Protects tickets: each is completed exactly once, and a message for an unknown ticket is malformed."""

from __future__ import annotations

import pytest

from ckstore.background import protocol
from ckstore.background.tickets import Callbacks, Tickets
from ckstore.errors import MalformedError, SaverError


def test_unknown_ticket_is_malformed():
    tickets = Tickets()
    with pytest.raises(MalformedError):
        tickets.take(protocol.SlotFree(1))


def test_dead_saver_ends_tickets_and_takes_no_more():
    tickets, events = Tickets(), []
    assert tickets.add(1, Callbacks(events.append, events.append, lambda: events.append("free")))
    tickets.end(lambda: SaverError("dead"))
    assert [str(each) for each in events] == ["dead", "free"]
    assert not tickets.add(2, Callbacks(print, print, print))


def test_ticket_with_kept_slot_ends_when_it_is_free():
    tickets, events = Tickets(), []
    note = [lambda *facts, name=name: events.append(name) for name in ("done", "failed", "free", "kept")]
    assert tickets.add(1, Callbacks(*note[:3], on_retained=note[3]))
    tickets.take(protocol.Retained(1))
    tickets.take(protocol.SlotFree(1))
    assert events == ["kept", "free"]
    with pytest.raises(MalformedError, match="reported on an unknown ticket"):
        tickets.take(protocol.Retained(1))


def test_memory_error_of_saver_is_named():
    failed = protocol.failed_of(1, MemoryError())
    assert "no memory" in str(protocol.error_of(failed))
