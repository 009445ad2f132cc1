"""Protects the release of memory that liburing's vectors keep after a transfer."""

from __future__ import annotations

import gc
import mmap
import sys

import pytest

from ckstore.io.buffers import leaks_views, release_leaked_view


@pytest.mark.uring
def test_view_kept_by_a_vector_is_released():
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
        # It raises while a buffer is exported.
        memory.close()
        del view, whole, memory
    gc.collect()


class LeakingVector:
    """A vector that keeps its views, as in current liburing."""

    def __init__(self, views):
        self.kept = memoryview(views[0])


class ReleasingVector:
    """A vector that does not, as in later versions."""

    def __init__(self, views):
        self.length = len(views[0])


def test_vector_without_views_is_unchanged():
    assert not leaks_views(ReleasingVector)


def test_vector_that_releases_its_view_is_unchanged():
    assert not leaks_views(LeakingVector)
