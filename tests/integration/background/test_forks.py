"""Forked children of a trainer: they inherit what it has in memory, and take no part in its background commits."""

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
    """Run a function in a forked child; return what it returned, once it has ended."""
    _, end = fork(child)
    return end()


def test_forked_child_steps_without_the_guard(quick_saver_store, held):
    trainer = Trainer()
    quick_saver_store.attach(trainer.optimizer)
    pending = quick_saver_store.commit_async(trainer.state(), 1)

    # A guard that waited here would wait for threads that are not here.
    assert exit_code_of(lambda: background_of(quick_saver_store).guard() or 7) == 7
    assert pending.wait_staged(SECONDS_MAX)


def test_forked_child_has_neither_the_memory_nor_the_descriptor_of_an_arena(arena):
    arena.slots[0].reserve(UNIT_NBYTES)
    fd = arena.fd

    def look():
        is_gone = (
            not Path(f"/proc/self/fd/{fd}").exists() and "ckstore-arena" not in Path("/proc/self/maps").read_text()
        )
        # Ends the mappings' owners, which must not unmap what the child has in their place.
        arena.close()
        gc.collect()
        return 7 if is_gone and arena.fd == -1 else 2

    assert exit_code_of(look) == 7
    arena.slots[0].view(0, 2)[:] = b"ok"


def test_forked_child_keeps_the_file_that_has_the_descriptor_of_an_arena_that_could_not_be_made(monkeypatch, tmp_path):
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
    # The error's frames keep the arena alive, and the file gets the lowest number that is free.
    with (tmp_path / "file").open("wb", buffering=0) as file:
        assert [file.fileno()] == made
        assert exit_code_of(lambda: file.write(b"it is open")) == len(b"it is open")
    del caught
