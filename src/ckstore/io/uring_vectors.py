"""Give back what liburing's vectors keep: one export of every memoryview that an ``Iovec`` was made of, for ever.

The binding takes a buffer of the view (``PyObject_GetBuffer``) and never releases it, so that the view, and with it the
memory below, outlives every reference that we know of: all write buffers of every commit, all read buffers of every
restore. What it forgets is done here, once nobody uses the vector any more. Whether this liburing forgets is tried
once; one that does not is left alone.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any


class _Buffer(ctypes.Structure):
    """CPython's ``Py_buffer``, of which the release of a memoryview reads the owner only."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_Buffer),)
_release.restype = None


def leaks_views(make_vector: Any) -> bool:
    """Whether a vector leaves an export, and a reference, of its view behind when it is gone."""
    view = memoryview(bytearray(1))
    before = sys.getrefcount(view)
    vector = make_vector([view])
    del vector
    if sys.getrefcount(view) == before:
        return False
    try:
        view.release()
    except BufferError:
        return sys.getrefcount(view) == before + 1
    return False


def release_leaked_view(view: memoryview) -> None:
    """Release the one export of a view that its vector has left behind, and the view itself; the vector is gone.

    To be called once for each vector, and only where ``leaks_views`` said so.
    """
    _release(ctypes.byref(_Buffer(obj=id(view))))
    view.release()
