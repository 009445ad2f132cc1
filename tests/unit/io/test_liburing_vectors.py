"""What liburing's vectors keep is given back: memory of finished transfers goes, whatever the binding forgets."""

from __future__ import annotations

import gc
import mmap
import sys

import pytest

from ckstore.io.buffers import leaks_views, release_leaked_view


@pytest.mark.uring
def test_view_that_a_vector_kept_is_let_go():
    import liburing

    if not leaks_views(liburing.Iovec):
        pytest.skip("this liburing keeps nothing")
    for _ in range(100):
        memory = mmap.mmap(-1, 4096)
        whole = memoryview(memory)
        view = whole[:100]
        vector = liburing.Iovec([view])
        del vector
        count = sys.getrefcount(view)
        release_leaked_view(view)
        assert sys.getrefcount(view) == count - 1
        whole.release()
        # It raises while anybody exports it.
        memory.close()
        del view, whole, memory
    gc.collect()


class Keeping:
    """What liburing does."""

    def __init__(self, views):
        self.kept = memoryview(views[0])


class Honest:
    """What it will do."""

    def __init__(self, views):
        self.length = len(views[0])


def test_vector_that_keeps_nothing_is_left_alone():
    assert not leaks_views(Honest)


def test_vector_that_lets_its_view_go_by_itself_is_left_alone():
    assert not leaks_views(Keeping)
