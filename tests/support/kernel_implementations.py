"""The twins of the hot loops: each test of one runs with all that there are."""

from __future__ import annotations

import pytest

from ckstore.codec.kernels import reference


def twins() -> list[object]:
    """Return the loops in numpy, and the native ones, or why those are left out."""
    try:
        from ckstore import _native as on_native
    except ImportError:
        native = pytest.param(None, id="native", marks=pytest.mark.skip(reason="the extension is not built"))
    else:
        native = pytest.param(on_native, id="native")
    return [pytest.param(reference, id="numpy"), native]


both = pytest.mark.parametrize("loops", twins())
