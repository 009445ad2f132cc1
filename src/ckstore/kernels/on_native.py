"""The names of on_numpy from the compiled extension, ckstore._native (C++17, nanobind).

Same arguments, same results, bit for bit; see on_numpy for what each loop does. Importing this module
fails with ImportError where the extension was not built.
"""

from __future__ import annotations

from ckstore._native import (
    copy_bytes,
    copy_units,
    decode_plane,
    decode_sparse,
    delta_bits,
    encode_plane,
    encode_sparse,
    equal_bytes,
    histogram,
    is_constant,
    is_rounding,
    merge_delta,
    merge_planes,
    plane_bits,
    plane_bound,
    round_floats,
    split_delta,
    split_planes,
)

__all__ = [
    "copy_bytes",
    "copy_units",
    "decode_plane",
    "decode_sparse",
    "delta_bits",
    "encode_plane",
    "encode_sparse",
    "equal_bytes",
    "histogram",
    "is_constant",
    "is_rounding",
    "merge_delta",
    "merge_planes",
    "plane_bits",
    "plane_bound",
    "round_floats",
    "split_delta",
    "split_planes",
]
