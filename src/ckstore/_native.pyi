"""Compiled versions of the loops in ``ckstore.codec.kernels``; each loop runs without the GIL.

The numpy reference in that package defines what each function computes.
"""

from collections.abc import Sequence

from typing_extensions import Buffer

def split_planes(source: Buffer, planes_out: Buffer, width: int, rotate: bool) -> None:
    """Write the byte planes of ``source`` one after another to ``planes_out``."""

def merge_planes(planes: Sequence[Buffer], destination: Buffer, width: int, rotate: bool) -> None:
    """Write the elements with these byte planes to ``destination``; the inverse of ``split_planes``."""

def split_delta(source: Buffer, base: Buffer, planes_out: Buffer, width: int, ordered: bool) -> None:
    """Write the byte planes of the zigzag-coded differences of ``source`` and ``base``.

    ``ordered`` maps floats to integers first.
    """

def merge_delta(planes: Sequence[Buffer], base: Buffer, destination: Buffer, width: int, ordered: bool) -> None:
    """Write the elements that ``split_delta`` had as its source. ``base`` may be ``destination`` itself."""

def round_floats(source: Buffer, destination: Buffer, kind: int) -> None:
    """Round fp32 elements to bf16 (kind 1) or fp16 (kind 2), ties to even."""

def is_rounding(source: Buffer, rounded: Buffer, kind: int) -> bool:
    """Return True if ``rounded`` is what ``round_floats`` makes of ``source``.

    Stops shortly after the first difference.
    """

def plane_bits(source: Buffer, width: int, rotate: bool) -> list[float]:
    """Return the estimated coded bits per byte of each plane, from a sample; 8.0 for noise."""

def delta_bits(source: Buffer, base: Buffer, width: int, ordered: bool) -> list[float]:
    """Return what ``plane_bits`` does, for the planes of ``split_delta``."""

def copy_bytes(source: Buffer, destination: Buffer) -> None:
    """Copy all bytes."""

def copy_units(table: Buffer, firsts: Buffer, marks: Buffer, turn: Buffer, bell: int) -> int:
    """Copy the units that no other thread has taken, mark each copied one, and return how many were copied."""

def launch_copies(function: int, table: Buffer, kind: int, stream: int) -> int:
    """Start the copy of each row with a function of a device runtime; return 0, or its first error code."""

def equal_bytes(a: Buffer, b: Buffer) -> bool:
    """Return True if both have the same bytes; False if their lengths differ."""

def is_constant(source: Buffer) -> bool:
    """Return True if all bytes are equal, or if there are none."""

def histogram(source: Buffer, counts_out: Buffer) -> None:
    """Write how often each byte value occurs to 256 aligned native uint32, modulo 2**32."""

def plane_bound(nbytes: int) -> int:
    """Return the size of the output buffer that ``encode_plane`` needs for a plane of ``nbytes``."""

def encode_plane(plane: Buffer, out: Buffer) -> int:
    """Encode a plane into ``out``, which has ``plane_bound`` bytes. Return the coded length."""

def decode_plane(payload: Buffer, plane: Buffer) -> bool:
    """Decode into ``plane``. Return False if the payload is invalid. Nothing else is written, whatever the payload."""

def encode_sparse(plane: Buffer, out: Buffer) -> int:
    """Encode a plane in which most bytes are equal, as ``encode_plane`` does. Return 0 if it is not such a plane."""

def decode_sparse(payload: Buffer, plane: Buffer, bitmap: Buffer) -> bool:
    """Decode the output of ``encode_sparse``, as ``decode_plane`` does.

    ``bitmap`` is scratch memory of an eighth of the plane.
    """

def encode_plane_by(loops: str, plane: Buffer, out: Buffer) -> int:
    """Run ``encode_plane`` with one of ``coder_loops`` instead of the fastest."""

def decode_plane_by(loops: str, payload: Buffer, plane: Buffer) -> bool:
    """Run ``decode_plane`` with one of ``coder_loops`` instead of the fastest."""

def encode_sparse_by(loops: str, plane: Buffer, out: Buffer) -> int:
    """Run ``encode_sparse`` with one of ``coder_loops`` instead of the fastest."""

def decode_sparse_by(loops: str, payload: Buffer, plane: Buffer, bitmap: Buffer) -> bool:
    """Run ``decode_sparse`` with one of ``coder_loops`` instead of the fastest."""

def coder_loops() -> list[str]:
    """Return the instruction sets that this processor can code planes with, fastest first: avx512, avx2, portable."""

def float_values(source: Buffer, out: Buffer, kind: int) -> bool:
    """Convert the elements to fp32. Return True if all are finite."""

def float_changes(source: Buffer, base: Buffer, out: Buffer, kind: int) -> bool:
    """Write the differences of the elements and those of the base. Return True if both and the result are finite."""

def float_quotients(first: Buffer, second: Buffer, out: Buffer, kind: int, clip: float) -> bool:
    """Write first moments divided by the roots of second moments, clipped to ``clip``; 0 where the first is 0."""

def sums_of_values(values: Buffer, rows_out: Buffer, cols_out: Buffer, row: int, phase: int, squared: bool) -> None:
    """Write the sums of each row and column as fp64, of squares if ``squared``."""

def quantize_values(
    values: Buffer, inverses: Buffer, out: Buffer, row: int, phase: int, bias: float, level_max: int
) -> None:
    """Write 128 plus or minus the level of each value.

    The level is ``|value| * inverse of its row + bias``, truncated.
    """

def bin_values(values: Buffer, rows: Buffer, cols: Buffer, bounds: Buffer, out: Buffer, row: int, phase: int) -> None:
    """Write how many of the ascending bounds each value, times its row and column factors, reaches."""

def sums_of_levels(
    values: Buffer, symbols: Buffer, rows: Buffer, cols: Buffer, out: Buffer, row: int, phase: int
) -> None:
    """Write the number of each of 256 symbols, and the sum of its values times their factors: 512 fp64."""

def finish_values(
    symbols: Buffer,
    rows: Buffer,
    cols: Buffer,
    codebook: Buffer,
    base: Buffer,
    destination: Buffer,
    row: int,
    phase: int,
    kind: int,
    rule: int,
    floor: float,
) -> None:
    """Write the elements that the symbols encode."""

def measure_values(source: Buffer, made: Buffer, kind: int) -> tuple[float, float, float]:
    """Return the largest difference, the sum of squared differences and the sum of squared values, in fp64."""

def multiply_floats(
    left: Buffer,
    right: Buffer,
    out: Buffer,
    rows: int,
    inner: int,
    cols: int,
    right_is_turned: bool = False,
    out_is_turned: bool = False,
    rounds: bool = False,
) -> None:
    """Write the product of two fp32 matrices, ``rows`` by ``inner`` and ``inner`` by ``cols``."""

def multiply_floats_portably(
    left: Buffer,
    right: Buffer,
    out: Buffer,
    rows: int,
    inner: int,
    cols: int,
    right_is_turned: bool = False,
    out_is_turned: bool = False,
    rounds: bool = False,
) -> None:
    """Run ``multiply_floats`` with instructions that every processor has."""

def multiply_words(left: Buffer, right: Buffer, out: Buffer, rows: int, inner: int, cols: int) -> None:
    """Write the product of two int16 matrices as fp32."""

def multiply_words_portably(left: Buffer, right: Buffer, out: Buffer, rows: int, inner: int, cols: int) -> None:
    """Run ``multiply_words`` with instructions that every processor has."""

def products_of_rows(rows: Buffer, out: Buffer, count: int, inner: int) -> None:
    """Write the products of fp32 rows with each other in fp64: the upper half of a matrix, and 0 below."""

def inverse_root(matrix: Buffer, inverse: Buffer) -> bool:
    """Write the inverse of the lower Cholesky factor of a symmetric fp64 matrix. Overwrites the matrix."""

def symmetric_eigen(matrix: Buffer, vectors: Buffer, values: Buffer, work: Buffer) -> bool:
    """Write the eigenvectors of a symmetric fp64 matrix as rows, and its eigenvalues. Overwrites the matrix."""

def take_roots(values: Buffer, rows_out: Buffer, cols_out: Buffer, row: int, phase: int) -> tuple[float, float]:
    """Replace values by their square roots, and write their row and column sums.

    Return the smallest and largest value.
    """

def subtract_ones(values: Buffer, rows: Buffer, cols: Buffer, row: int, phase: int) -> None:
    """Replace each value by its product with its row and column factor, minus 1."""

def missed_squares(values: Buffer, product: Buffer, scale: float) -> tuple[float, float]:
    """Return the sums of ``(values - product * scale)`` squared and of ``values`` squared."""

def round_vectors(vectors: Buffer, factors: Buffer, out: Buffer) -> float:
    """Write vectors, each times its factor, as int16. Return the largest magnitude."""

def split_zigzag(words: Buffer, low: Buffer, high: Buffer, sums: Buffer) -> None:
    """Write the low and high bytes of zigzag-coded words separately, and the sum of squares of each vector."""

def finish_outer(
    product: Buffer,
    rows: Buffer,
    cols: Buffer,
    base: Buffer,
    destination: Buffer,
    row: int,
    phase: int,
    kind: int,
    rule: int,
    scale: float,
    limit: float,
) -> float:
    """Write the elements that a product encodes. Return the largest quotient."""

def class_counts(symbols: Buffer, row_classes: Buffer, col_classes: Buffer, out: Buffer, row: int, phase: int) -> None:
    """Write how often each of 256 symbols occurs for each sum of row and column class: 31 times 256 uint32."""

def stream_sizes(
    row_classes: Buffer, col_classes: Buffer, stream_of: Buffer, out: Buffer, count: int, row: int, phase: int
) -> None:
    """Write the number of elements in each of 16 streams (uint64).

    The stream of an element is that of the sum of its classes.
    """

def split_streams(
    symbols: Buffer, row_classes: Buffer, col_classes: Buffer, stream_of: Buffer, out: Buffer, row: int, phase: int
) -> None:
    """Write the symbols of each stream, one stream after another: by rows, and within a row by column class."""

def merge_streams(
    streams: Buffer, row_classes: Buffer, col_classes: Buffer, stream_of: Buffer, out: Buffer, row: int, phase: int
) -> None:
    """Write the symbols of the given streams; the inverse of ``split_streams``."""

def pack_symbols(symbols: Buffer, out: Buffer, lowest: int, alphabet: int, per_byte: int) -> None:
    """Write ``per_byte`` symbols into each byte, as digits to the base ``alphabet``, the lowest digit first."""

def unpack_symbols(packed: Buffer, out: Buffer, lowest: int, alphabet: int, per_byte: int) -> bool:
    """Write the symbols of a packed stream. Return True if every byte is valid and the last one has no extra digits."""
