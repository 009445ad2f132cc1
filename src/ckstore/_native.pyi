"""Native twins of ckstore.kernels.on_numpy; every loop runs without the GIL."""

from collections.abc import Sequence

from typing_extensions import Buffer

def split_planes(source: Buffer, planes_out: Buffer, width: int, rotate: bool) -> None:
    """Write the byte planes of ``source`` one after another into ``planes_out``."""

def merge_planes(planes: Sequence[Buffer], destination: Buffer, width: int, rotate: bool) -> None:
    """Write the elements whose byte planes are ``planes``; the inverse of ``split_planes``."""

def split_delta(source: Buffer, base: Buffer, planes_out: Buffer, width: int, ordered: bool) -> None:
    """Write the byte planes of the zigzagged differences of ``source`` and ``base``; floats are ``ordered``."""

def merge_delta(planes: Sequence[Buffer], base: Buffer, destination: Buffer, width: int, ordered: bool) -> None:
    """Write what ``split_delta`` made the planes from; the base may be the very bytes of ``destination``."""

def round_floats(source: Buffer, destination: Buffer, kind: int) -> None:
    """Write fp32 elements as the nearest of half the width: bf16 (kind 1) or fp16 (kind 2), ties to even."""

def is_rounding(source: Buffer, rounded: Buffer, kind: int) -> bool:
    """Return whether ``rounded`` holds what ``round_floats`` makes of ``source``; soon, where it does not."""

def plane_bits(source: Buffer, width: int, rotate: bool) -> list[float]:
    """Return the bits that coding takes for each byte of each plane, as a sample tells; 8 for noise."""

def delta_bits(source: Buffer, base: Buffer, width: int, ordered: bool) -> list[float]:
    """Return what ``plane_bits`` does, of the planes that ``split_delta`` makes."""

def copy_bytes(source: Buffer, destination: Buffer) -> None:
    """Copy all bytes."""

def copy_units(table: Buffer, firsts: Buffer, marks: Buffer, turn: Buffer, bell: int) -> int:
    """Copy the units that no other thread has taken, mark each when its bytes are there, and return how many."""

def launch_copies(function: int, table: Buffer, kind: int, stream: int) -> int:
    """Begin the copy of each row by a function of a device's runtime; return 0, or what one returned that failed."""

def equal_bytes(a: Buffer, b: Buffer) -> bool:
    """Return whether both hold the same bytes; False when their lengths differ."""

def is_constant(source: Buffer) -> bool:
    """Return whether every byte equals the first; True for no bytes."""

def histogram(source: Buffer, counts_out: Buffer) -> None:
    """Write how often each byte value occurs into 256 aligned uint32 of native byte order, modulo 2**32."""

def plane_bound(nbytes: int) -> int:
    """Return the room that ``encode_plane`` wants for a plane of so many bytes."""

def encode_plane(plane: Buffer, out: Buffer) -> int:
    """Code a plane into ``out``, which has ``plane_bound`` bytes, and return how many of them count."""

def decode_plane(payload: Buffer, plane: Buffer) -> bool:
    """Decode exactly ``plane``; return whether the payload held it. Whatever the payload, nothing else is written."""

def encode_sparse(plane: Buffer, out: Buffer) -> int:
    """Code a plane most of whose bytes are the same, as ``encode_plane`` does; return 0 where they are not."""

def decode_sparse(payload: Buffer, plane: Buffer, bitmap: Buffer) -> bool:
    """Decode what ``encode_sparse`` made, as ``decode_plane`` does; ``bitmap`` is memory of an eighth of the plane."""

def encode_plane_by(loops: str, plane: Buffer, out: Buffer) -> int:
    """Do as ``encode_plane`` with one of ``coder_loops`` instead of the fastest."""

def decode_plane_by(loops: str, payload: Buffer, plane: Buffer) -> bool:
    """Do as ``decode_plane`` with one of ``coder_loops`` instead of the fastest."""

def encode_sparse_by(loops: str, plane: Buffer, out: Buffer) -> int:
    """Do as ``encode_sparse`` with one of ``coder_loops`` instead of the fastest."""

def decode_sparse_by(loops: str, payload: Buffer, plane: Buffer, bitmap: Buffer) -> bool:
    """Do as ``decode_sparse`` with one of ``coder_loops`` instead of the fastest."""

def coder_loops() -> list[str]:
    """Return which loops can code planes on this processor: ``avx512``, ``avx2``, ``portable``, the fastest first."""

def float_values(source: Buffer, out: Buffer, kind: int) -> bool:
    """Write the elements as fp32; return whether all are finite."""

def float_changes(source: Buffer, base: Buffer, out: Buffer, kind: int) -> bool:
    """Write the elements less those of the base; return whether all of the three are finite."""

def float_quotients(first: Buffer, second: Buffer, out: Buffer, kind: int, clip: float) -> bool:
    """Write the first moments over the roots of the second, within ``clip``; 0 where the first is."""

def sums_of_values(values: Buffer, rows_out: Buffer, cols_out: Buffer, row: int, phase: int, squared: bool) -> None:
    """Write the sums of each row and of each column as fp64, of squares if ``squared``."""

def quantize_values(
    values: Buffer, inverses: Buffer, out: Buffer, row: int, phase: int, bias: float, level_max: int
) -> None:
    """Write 128 plus or minus the level of each value: ``|value| * inverse of its row + bias``, cut to an integer."""

def bin_values(values: Buffer, rows: Buffer, cols: Buffer, bounds: Buffer, out: Buffer, row: int, phase: int) -> None:
    """Write how many of the ascending bounds are at most each value times the factors of its row and its column."""

def sums_of_levels(
    values: Buffer, symbols: Buffer, rows: Buffer, cols: Buffer, out: Buffer, row: int, phase: int
) -> None:
    """Write for each of 256 symbols how often it occurs, and the sum of its values times their factors: 512 fp64."""

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
    """Write the elements that symbols stand for."""

def measure_values(source: Buffer, made: Buffer, kind: int) -> tuple[float, float, float]:
    """Return the greatest difference, the sum of its squares and that of the values' squares, in fp64."""

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
    """Write the product of two matrices of fp32, ``rows`` by ``inner`` and ``inner`` by ``cols``."""

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
    """Write the same without instructions that not every processor has."""

def multiply_words(left: Buffer, right: Buffer, out: Buffer, rows: int, inner: int, cols: int) -> None:
    """Write the product of two matrices of int16 as fp32."""

def multiply_words_portably(left: Buffer, right: Buffer, out: Buffer, rows: int, inner: int, cols: int) -> None:
    """Write the same without instructions that not every processor has."""

def products_of_rows(rows: Buffer, out: Buffer, count: int, inner: int) -> None:
    """Write the products of rows of fp32 with each other in fp64: the upper half of their matrix, and 0 below."""

def inverse_root(matrix: Buffer, inverse: Buffer) -> bool:
    """Write the inverse of the lower triangular root of a symmetric matrix of fp64; the matrix is used up."""

def symmetric_eigen(matrix: Buffer, vectors: Buffer, values: Buffer, work: Buffer) -> bool:
    """Write the eigenvectors of a symmetric matrix of fp64 as rows, and their values; the matrix is used up."""

def take_roots(values: Buffer, rows_out: Buffer, cols_out: Buffer, row: int, phase: int) -> tuple[float, float]:
    """Replace values by their roots, and write the sums of these; return the least and the greatest value."""

def subtract_ones(values: Buffer, rows: Buffer, cols: Buffer, row: int, phase: int) -> None:
    """Replace each value by itself times the number of its row, times that of its column, less 1."""

def missed_squares(values: Buffer, product: Buffer, scale: float) -> tuple[float, float]:
    """Return the squares of what ``product * scale`` misses of values, and the values' squares, summed."""

def round_vectors(vectors: Buffer, factors: Buffer, out: Buffer) -> float:
    """Write vectors, each times its factor, as integers of 16 bits; return the greatest magnitude."""

def split_zigzag(words: Buffer, low: Buffer, high: Buffer, sums: Buffer) -> None:
    """Write both bytes of zigzagged words apart, and the sum of the squares of each vector."""

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
    """Write the elements that a product stands for, and return the greatest quotient."""

def class_counts(symbols: Buffer, row_classes: Buffer, col_classes: Buffer, out: Buffer, row: int, phase: int) -> None:
    """Write how often each of 256 symbols occurs under each sum of row and column class: 31 times 256 uint32."""

def stream_sizes(
    row_classes: Buffer, col_classes: Buffer, stream_of: Buffer, out: Buffer, count: int, row: int, phase: int
) -> None:
    """Write how many elements belong to each of 16 streams (uint64): that of the sum of their classes."""

def split_streams(
    symbols: Buffer, row_classes: Buffer, col_classes: Buffer, stream_of: Buffer, out: Buffer, row: int, phase: int
) -> None:
    """Write the symbols of each stream, one stream after another: by rows, in a row by the columns' classes."""

def merge_streams(
    streams: Buffer, row_classes: Buffer, col_classes: Buffer, stream_of: Buffer, out: Buffer, row: int, phase: int
) -> None:
    """Write the symbols whose streams are given; the inverse of ``split_streams``."""

def pack_symbols(symbols: Buffer, out: Buffer, lowest: int, alphabet: int, per_byte: int) -> None:
    """Write ``per_byte`` symbols into each byte: digits to the base ``alphabet``, the first one the lowest."""

def unpack_symbols(packed: Buffer, out: Buffer, lowest: int, alphabet: int, per_byte: int) -> bool:
    """Write the symbols of a packed stream; return whether every byte holds digits, and the last no more than that."""
