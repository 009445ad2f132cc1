"""Release the memoryview that an ``Iovec`` of liburing leaks.

The binding gets a buffer from the view (``PyObject_GetBuffer``) and never releases it. Without this module, every
buffer of every commit and restore would stay allocated. ``leaks_views`` tests once whether the installed liburing has
this fault. Separate from ``uring_engine.py`` so that it can be tested where liburing cannot be imported.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any


class _Buffer(ctypes.Structure):
    """CPython's ``Py_buffer``. Releasing a memoryview reads only its ``obj``."""

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
    """Return True if a deleted vector leaves one export of, and one reference to, its view."""
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
    """Release the leaked export of a view, and the view itself.

    REQUIRES: ``leaks_views`` is True, the vector was deleted, and this is the only call for it.
    """
    _release(ctypes.byref(_Buffer(obj=id(view))))
    view.release()
