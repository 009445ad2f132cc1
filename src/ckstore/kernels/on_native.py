"""The names of on_numpy from the compiled extension, ckstore._native (C++17, nanobind).

Same arguments, same results, bit for bit; see on_numpy for what each loop does. Importing this module
fails with ImportError where the extension was not built.
"""

from __future__ import annotations

from ckstore._native import (
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
