"""Choose numpy or native for the hot loops, and say which was chosen.

Every function has one name in every twin and is documented in on_numpy. Without the extension everything
still works, slowly.
"""

from __future__ import annotations

try:
    from ckstore.kernels.on_native import (
        copy_bytes,
        decode_plane,
        encode_plane,
        equal_bytes,
        histogram,
        is_constant,
        merge_planes,
        plane_bound,
        planes_equal,
        split_planes,
    )
except ImportError:
    from ckstore.kernels.on_numpy import (
        copy_bytes,
        decode_plane,
        encode_plane,
        equal_bytes,
        histogram,
        is_constant,
        merge_planes,
        plane_bound,
        planes_equal,
        split_planes,
    )

__all__ = [
    "IMPLEMENTATION",
    "copy_bytes",
    "decode_plane",
    "encode_plane",
    "equal_bytes",
    "histogram",
    "is_constant",
    "merge_planes",
    "plane_bound",
    "planes_equal",
    "split_planes",
]

_LOOPS = (
    copy_bytes,
    decode_plane,
    encode_plane,
    equal_bytes,
    histogram,
    is_constant,
    merge_planes,
    plane_bound,
    planes_equal,
    split_planes,
)

IMPLEMENTATION: dict[str, str] = {
    loop.__name__: "numpy" if loop.__module__.endswith("on_numpy") else "native" for loop in _LOOPS
}
"""Function name -> ``"native"`` or ``"numpy"``."""
