"""Choose numpy or native for the hot loops, and say which was chosen.

Every function has one name in every twin and is documented in on_numpy. Without the extension everything
still works, slowly.
"""

from __future__ import annotations

try:
    from ckstore.kernels.on_native import (
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
except ImportError:
    from ckstore.kernels.on_numpy import (
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
from ckstore.kernels.sample_on_numpy import SAMPLE_NBYTES
from ckstore.kernels.sparse_on_numpy import SPARSE_FROM

__all__ = [
    "IMPLEMENTATION",
    "SAMPLE_NBYTES",
    "SPARSE_FROM",
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

_LOOPS = (
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

IMPLEMENTATION: dict[str, str] = {
    loop.__name__: "numpy" if loop.__module__.endswith("on_numpy") else "native" for loop in _LOOPS
}
"""Function name -> ``"native"`` or ``"numpy"``."""
