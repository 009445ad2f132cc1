"""Protects the loop that tells a device of copies: each row once, in order, until one is refused."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest

from support.kernel_implementations import both

Launch = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
)
TABLE = np.array([[1 << 47, 4096, 1], [8, (1 << 47) + 64, 1 << 40], [24, 32, 7]], np.uint64)


def noting(answers=()):
    """Return what a function like ``cudaMemcpyAsync`` is called with, and it; it gives these answers first."""
    told, left = [], list(answers)

    def launch(destination, source, nbytes, kind, stream):
        told.append((source, destination, nbytes, kind, stream))
        return left.pop(0) if left else 0

    return told, Launch(launch)


def address_of(function):
    return ctypes.cast(function, ctypes.c_void_p).value


@both
def test_each_row_is_told_once_in_order_with_all_its_words(loops):
    told, function = noting()
    assert loops.launch_copies(address_of(function), TABLE.data, 2, (1 << 46) + 3) == 0
    assert told == [(*(int(word) for word in row), 2, (1 << 46) + 3) for row in TABLE]


@both
def test_nothing_is_told_after_a_row_that_was_refused(loops):
    told, function = noting([0, 719])
    assert loops.launch_copies(address_of(function), TABLE.data, 2, 0) == 719
    assert len(told) == 2


@both
def test_no_row_is_nothing_to_tell(loops):
    told, function = noting()
    assert loops.launch_copies(address_of(function), TABLE[:0].data, 2, 0) == 0
    assert told == []


@both
def test_tables_that_do_not_fit_and_no_function_are_refused(loops):
    told, function = noting()
    with pytest.raises(ValueError, match="lengths differ"):
        loops.launch_copies(address_of(function), TABLE.reshape(-1)[:4].data, 2, 0)
    with pytest.raises(ValueError, match="no function at address 0"):
        loops.launch_copies(0, TABLE.data, 2, 0)
    assert told == []


@both
def test_other_threads_run_python_while_rows_are_told(loops):
    """A device that has no room for more copies has the caller wait, in C."""
    # It takes microseconds, where a destination is, and returns 0.
    function = ctypes.CDLL(None).usleep
    table = np.array([[0, 200_000, 0]] * 3, np.uint64)
    ticks, is_over = [], threading.Event()

    def tick():
        while not is_over.wait(0.005):
            ticks.append(1)

    other = threading.Thread(target=tick)
    other.start()
    while not ticks:
        time.sleep(0.001)
    before = len(ticks)
    assert loops.launch_copies(address_of(function), table.data, 2, 0) == 0
    meanwhile = len(ticks) - before
    is_over.set()
    other.join()
    # Of 120; one may come between two rows, and at either end.
    assert meanwhile > 20
