"""Protects the end of a saver whose handle was dropped: Ctrl-C in the finalizer does not leave it running."""

from __future__ import annotations

import gc
import sys

import pytest

import ckstore
from support.fake_saver import state


@pytest.mark.parametrize("verb", ["quit", "before quit"])
def test_ctrl_c_in_finalizer_still_ends_the_saver(savers, folder, monkeypatch, verb):
    def interrupt_once(*_, **__):
        monkeypatch.undo()
        monkeypatch.setattr(sys, "unraisablehook", lambda raised: unraisable.append(raised.exc_type))
        raise KeyboardInterrupt

    unraisable: list[type] = []
    store = ckstore.open(folder)
    store.prewarm(state(0))
    saver = savers[0]
    if verb == "quit":
        monkeypatch.setattr(saver, "quit", interrupt_once)
    else:
        monkeypatch.setattr("ckstore.background.commits.note_abandoned", interrupt_once)
    del store
    gc.collect()
    assert (saver.calls[-1], saver.is_alive, unraisable) == ("quit", False, [KeyboardInterrupt])
