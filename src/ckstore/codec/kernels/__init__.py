"""The hot loops: from the compiled extension ``ckstore._native`` (C++17, nanobind) if it is built, else from numpy.

Both implementations provide the same names with the same arguments and the same results, bit for bit. The functions
are documented in the numpy modules (``*_reference.py``). Without the extension everything works, but slowly.
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
    from ckstore._native import *

    if not set(_LOOPS) <= set(globals()):
        raise ImportError("the extension was built from older sources")
except ImportError:
    from ckstore.codec.kernels.reference import *

IMPLEMENTATION: dict[str, str] = {
    name: "numpy" if globals()[name].__module__.endswith("reference") else "native" for name in _LOOPS
}
"""The implementation of each function: ``"native"`` or ``"numpy"``."""
