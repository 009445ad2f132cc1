"""Protects the loop that launches device copies: each row once, in order, until one is refused."""

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


def recording_function(answers=()):
    """Return a list of calls, and a function like ``cudaMemcpyAsync`` that records them and returns these answers."""
    calls, left = [], list(answers)

    def launch(destination, source, nbytes, kind, stream):
        calls.append((source, destination, nbytes, kind, stream))
        return left.pop(0) if left else 0

    return calls, Launch(launch)


def address_of(function):
    return ctypes.cast(function, ctypes.c_void_p).value


@both
def test_each_row_is_launched_once_in_order(loops):
    calls, function = recording_function()
    assert loops.launch_copies(address_of(function), TABLE.data, 2, (1 << 46) + 3) == 0
    assert calls == [(*(int(word) for word in row), 2, (1 << 46) + 3) for row in TABLE]


@both
def test_launching_stops_at_a_refused_row(loops):
    calls, function = recording_function([0, 719])
    assert loops.launch_copies(address_of(function), TABLE.data, 2, 0) == 719
    assert len(calls) == 2


@both
def test_empty_table_launches_nothing(loops):
    calls, function = recording_function()
    assert loops.launch_copies(address_of(function), TABLE[:0].data, 2, 0) == 0
    assert calls == []


@both
def test_wrong_tables_and_null_function_are_refused(loops):
    calls, function = recording_function()
    with pytest.raises(ValueError, match="lengths differ"):
        loops.launch_copies(address_of(function), TABLE.reshape(-1)[:4].data, 2, 0)
    with pytest.raises(ValueError, match="no function at address 0"):
        loops.launch_copies(0, TABLE.data, 2, 0)
    assert calls == []


@both
def test_gil_is_released_while_launching(loops):
    """A device without space for more copies makes the caller wait, in C."""
    # usleep takes microseconds as its first argument, where a copy has its destination, and returns 0.
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
    # Of 120 ticks. One may come between two rows, and at either end.
    assert meanwhile > 20
