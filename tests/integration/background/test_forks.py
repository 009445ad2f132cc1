"""Protects forked children of a trainer: they inherit its memory, but take no part in its background commits."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from ckstore._testing import background_of
from ckstore.background.arena import UNIT_NBYTES, Arena, Slot
from support.guarded_trainer import Trainer
from support.saver_harness import SECONDS_MAX, fork


def exit_code_of(child):
    """Run a function in a forked child; return its result as exit code."""
    _, end = fork(child)
    return end()


def test_forked_child_steps_without_guard(quick_saver_store, held):
    trainer = Trainer()
    quick_saver_store.attach(trainer.optimizer)
    pending = quick_saver_store.commit_async(trainer.state(), 1)

    # A guard in the child would wait for threads that do not exist there.
    assert exit_code_of(lambda: background_of(quick_saver_store).guard() or 7) == 7
    assert pending.wait_staged(SECONDS_MAX)


def test_forked_child_has_no_part_of_the_arena(arena):
    arena.slots[0].reserve(UNIT_NBYTES)
    fd = arena.fd

    def look():
        is_gone = (
            not Path(f"/proc/self/fd/{fd}").exists() and "ckstore-arena" not in Path("/proc/self/maps").read_text()
        )
        # Delete the owners of the mappings; they must not unmap what the child has at these addresses.
        arena.close()
        gc.collect()
        return 7 if is_gone and arena.fd == -1 else 2

    assert exit_code_of(look) == 7
    arena.slots[0].view(0, 2)[:] = b"ok"


def test_forked_child_keeps_reused_descriptor(monkeypatch, tmp_path):
    made, make = [], os.memfd_create

    def note(*given):
        made.append(make(*given))
        return made[-1]

    def interrupted(slot, nbytes):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", note)
        patch.setattr(Slot, "reserve", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            Arena.create(1)
    # The frames of the error keep the arena alive, and the file gets the lowest free descriptor.
    with (tmp_path / "file").open("wb", buffering=0) as file:
        assert [file.fileno()] == made
        assert exit_code_of(lambda: file.write(b"it is open")) == len(b"it is open")
    del caught
