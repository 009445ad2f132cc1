"""Copy a state into a staging area, a unit at a time, on as many threads as call: the reference in numpy.

The loops whose arguments are addresses: a state lies in hundreds of places, and the threads that copy it, or tell a
device to, must not need the interpreter between two of them.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ckstore.leaves import view_of_memory, writable_view_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

_WORD = np.dtype(np.uint64)
_ONE = np.ones(1, _WORD).tobytes()
_taking = threading.Lock()
_Launch = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
)


def copy_units(table: Buffer, firsts: Buffer, marks: Buffer, turn: Buffer, bell: int) -> int:
    """Copy the units that no other thread has taken, mark each when its bytes are there, and return how many.

    Args:
        table: Rows of three words of 64 bits: source address, destination address, length. The caller keeps both
            sides alive.
        firsts: The first row of each unit, and the number of rows: one word more than there are units.
        marks: One byte for each unit; set to 1 after its bytes.
        turn: One word that all threads of a staging share: the next unit to take. Whoever sets it to the number of
            units, or higher, ends the staging.
        bell: An eventfd to add 1 to after each mark; -1: none.
    """
    rows, starts, taken = _words(table), _words(firsts), _words(turn)
    done = np.asarray(memoryview(marks).cast("B"))
    if starts.size != done.size + 1 or taken.size != 1 or rows.size != 3 * int(starts[-1]):
        raise ValueError("lengths differ")
    if done.flags.writeable is False or taken.flags.writeable is False:
        raise ValueError("not a writable contiguous buffer")
    if (starts[:-1] > starts[1:]).any():
        raise ValueError("units overlap")
    rows = rows.reshape(-1, 3)
    copied = 0
    while (unit := _take(taken, done.size)) is not None:
        for row in range(int(starts[unit]), int(starts[unit + 1])):
            source, destination, nbytes = (int(word) for word in rows[row])
            target = np.asarray(writable_view_of(destination, nbytes, None))
            np.copyto(target, np.asarray(view_of_memory(source, nbytes, None)))
        done[unit] = 1
        if bell >= 0:
            os.write(bell, _ONE)
        copied += 1
    return copied


def launch_copies(function: int, table: Buffer, kind: int, stream: int) -> int:
    """Begin the copy of each row by a function of a device's runtime; the native twin needs no interpreter between two.

    Args:
        function: The address of ``cudaMemcpyAsync``, or of one like it: destination, source, length, kind, stream; it
            returns 0 when it has begun.
        table: Rows of three words of 64 bits: source address, destination address, length. The caller keeps both
            sides alive until the copies are over.
        kind: Passed on: from where to where.
        stream: Passed on: a handle of the runtime.

    Returns:
        0, or what the first call returned that failed; those after it were not made.
    """
    rows = _words(table)
    if rows.size % 3:
        raise ValueError("lengths differ")
    if not function:
        raise ValueError("there is no function at address 0")
    launch = _Launch(function)
    for source, destination, nbytes in rows.reshape(-1, 3).tolist():
        if problem := launch(destination, source, nbytes, kind, stream):
            return int(problem)
    return 0


def _words(buffer: Buffer) -> NDArray[np.uint64]:
    view = memoryview(buffer)
    # Empty buffers have no words to look at.
    return np.frombuffer(view, _WORD) if view.nbytes else np.empty(0, _WORD)


def _take(turn: NDArray[np.uint64], count: int) -> int | None:
    with _taking:
        unit = int(turn[0])
        if unit >= count:
            return None
        turn[0] = unit + 1
        return unit
