"""Choose numpy or native for the hot loops, and say which was chosen.

Every function has one name in every twin and is documented in on_numpy. Without the extension everything
still works, slowly.
"""

from __future__ import annotations

from ckstore.codec.kernels.bytes_reference import SAMPLE_NBYTES, SPARSE_FROM

__all__ = [
    "IMPLEMENTATION",
    "SAMPLE_NBYTES",
    "SPARSE_FROM",
    "bin_values",
    "class_counts",
    "copy_bytes",
    "copy_units",
    "decode_plane",
    "decode_sparse",
    "delta_bits",
    "encode_plane",
    "encode_sparse",
    "equal_bytes",
    "finish_outer",
    "finish_values",
    "float_changes",
    "float_quotients",
    "float_values",
    "histogram",
    "inverse_root",
    "is_constant",
    "is_rounding",
    "launch_copies",
    "measure_values",
    "merge_delta",
    "merge_planes",
    "merge_streams",
    "missed_squares",
    "multiply_floats",
    "multiply_words",
    "pack_symbols",
    "plane_bits",
    "plane_bound",
    "products_of_rows",
    "quantize_values",
    "round_floats",
    "round_vectors",
    "split_delta",
    "split_planes",
    "split_streams",
    "split_zigzag",
    "stream_sizes",
    "subtract_ones",
    "sums_of_levels",
    "sums_of_values",
    "symmetric_eigen",
    "take_roots",
    "unpack_symbols",
]

_LOOPS = [name for name in __all__ if name.islower()]

try:
    from ckstore.codec.kernels.native import *

    if not set(_LOOPS) <= set(globals()):
        raise ImportError("the extension was built from older sources")
except ImportError:
    from ckstore.codec.kernels.reference import *

IMPLEMENTATION: dict[str, str] = {
    name: "numpy" if globals()[name].__module__.endswith("reference") else "native" for name in _LOOPS
}
"""Function name -> ``"native"`` or ``"numpy"``."""
