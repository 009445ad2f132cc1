"""Protects commits whose handle was forgotten: what was handed over is carried through, however the program ends."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ckstore
from support.fake_saver import state

SOURCE = str(Path(ckstore.__file__).parent.parent)


def test_a_program_that_forgets_its_store_has_its_last_commit(folder):
    program = f"""
import sys
sys.path.insert(0, {SOURCE!r})
import numpy as np, ckstore
def main():
    store = ckstore.open({str(folder)!r})
    store.commit_async({{"w": np.arange(1 << 20)}}, 7)
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    with ckstore.open(folder) as store:
        assert store.steps() == [7]
        assert np.array_equal(store.restore("latest")["w"], np.arange(1 << 20))


@pytest.mark.parametrize("verb", ["quit", "before quit"])
def test_ctrl_c_in_the_finalizer_of_a_forgotten_handle_leaves_no_saver_behind(savers, folder, monkeypatch, verb):
    def interrupt_once(*_, **__):
        monkeypatch.undo()
        monkeypatch.setattr(sys, "unraisablehook", lambda raised: told.append(raised.exc_type))
        raise KeyboardInterrupt

    told: list[type] = []
    store = ckstore.open(folder)
    store.prewarm(state(0))
    saver = savers[0]
    if verb == "quit":
        monkeypatch.setattr(saver, "quit", interrupt_once)
    else:
        monkeypatch.setattr("ckstore.handover.note_abandoned", interrupt_once)
    del store
    gc.collect()
    assert (saver.calls[-1], saver.is_alive, told) == ("quit", False, [KeyboardInterrupt])
