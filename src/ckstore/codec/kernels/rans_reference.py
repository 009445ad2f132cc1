"""The plane coder in numpy: order-0 rANS with 64 lanes; docs/FORMAT.md has the layout.

It specifies the native implementation bit for bit, including which blocks are sampled. The lanes of a step are one
vector operation each. It runs at some MB/s, which is enough for reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

BLOCK_NBYTES = 256 * 1024
RAW, CONST, OWN_TABLE, SAME_TABLE = 0, 1, 2, 3

_HEADER_NBYTES = 4
_LANES = 64
_SCALE_BITS = 12
_SCALE = 1 << _SCALE_BITS
_LOW = 1 << 16
_STATES_NBYTES = 4 * _LANES
_BITMAP_NBYTES = 32
_TABLE_NBYTES_MAX = _BITMAP_NBYTES + 2 * 256
_WORDS_SLACK = 64

_SAMPLED_FROM = 16 * 1024
_SAMPLED_LESS_FROM = 128 * 1024
_SPACING = 2
_SPACING_LESS = 4
_RUN_NBYTES = 64

# Lane l is byte 2 l of a step, lane 32 + l is byte 2 l + 1.
_BYTE_OF_LANE = np.concatenate([np.arange(0, _LANES, 2), np.arange(1, _LANES, 2)])


@dataclass(frozen=True, slots=True)
class Model:
    """Frequencies that sum to 4096, and the first slot of each symbol."""

    freq: Ints
    start: Ints

    @staticmethod
    def of(freq: Ints) -> Model:
        """Return the model with these frequencies."""
        return Model(freq, np.cumsum(freq) - freq)


def bound(nbytes: int) -> int:
    """Return the greatest length that ``encode`` may write."""
    blocks = -(-nbytes // BLOCK_NBYTES)
    last = min(nbytes, BLOCK_NBYTES)
    return nbytes + blocks * _HEADER_NBYTES + last + _TABLE_NBYTES_MAX + _STATES_NBYTES + _WORDS_SLACK


def encode(plane: Bytes, out: Bytes) -> int:
    """Code a plane into ``out``. Return its coded length."""
    previous: Model | None = None
    at = 0
    for begin in range(0, plane.size, BLOCK_NBYTES):
        mode, body, previous = _encode_block(plane[begin : begin + BLOCK_NBYTES], previous)
        block = np.frombuffer((mode | body.size << 8).to_bytes(_HEADER_NBYTES, "little") + body.tobytes(), np.uint8)
        out[at : at + block.size] = block
        at += block.size
    return at


def decode(payload: Bytes, plane: Bytes) -> bool:
    """Decode exactly ``plane``. Return False if the payload is malformed."""
    previous: Model | None = None
    at = 0
    for begin in range(0, plane.size, BLOCK_NBYTES):
        block = plane[begin : begin + BLOCK_NBYTES]
        if payload.size - at < _HEADER_NBYTES:
            return False
        header = int.from_bytes(payload[at : at + _HEADER_NBYTES].tobytes(), "little")
        mode, nbytes = header & 0xFF, header >> 8
        at += _HEADER_NBYTES
        if nbytes > payload.size - at:
            return False
        body = payload[at : at + nbytes]
        at += nbytes
        if (mode == RAW and nbytes == block.size) or (mode == CONST and nbytes == 1):
            block[:] = body
            continue
        if mode == OWN_TABLE:
            previous, table_nbytes = _read_table(body)
            body = body[table_nbytes:]
        elif mode != SAME_TABLE:
            return False
        if previous is None or not _decode_body(body, previous, block):
            return False
    return at == payload.size


def _encode_block(block: Bytes, previous: Model | None) -> tuple[int, Bytes, Model | None]:
    weights = _weigh(block)
    total = int(weights.sum())
    if weights[block[0]] == total:
        return CONST, block[:1], previous
    own = model_of(weights, total)
    table = _table_of(own)
    own_bits = bits_with(own, weights) + (table.size << 11)
    same_bits = None if previous is None or (previous.freq[weights != 0] == 0).any() else bits_with(previous, weights)
    is_same = same_bits is not None and same_bits <= own_bits
    expected = (same_bits if is_same and same_bits is not None else own_bits) >> 11
    # Coding that saves less than one part in fifty is not worth the decoding time.
    worth = block.size - block.size // 50
    if expected + _STATES_NBYTES >= worth:
        return RAW, block, previous
    if is_same and previous is not None:
        body = _encode_body(block, previous)
    else:
        body = np.concatenate([table, _encode_body(block, own)])
    # The sample may not be representative.
    if body.size >= worth:
        return RAW, block, previous
    return (SAME_TABLE, body, previous) if is_same else (OWN_TABLE, body, own)


def count_sample(plane: Bytes, spacing: int) -> Ints:
    """Count the symbols of scattered runs of 64 bytes, one run in ``2 ** spacing``."""
    groups = np.arange(plane.size // (_RUN_NBYTES << spacing), dtype=np.uint32)
    runs = (groups << spacing) + ((groups * np.uint32(0x9E3779B1)) >> (32 - spacing))
    rows = plane[: plane.size // _RUN_NBYTES * _RUN_NBYTES].reshape(-1, _RUN_NBYTES)
    return np.bincount(rows[runs].reshape(-1), minlength=256)


def _weigh(block: Bytes) -> Ints:
    """Return the weights of symbols, for a long block from a sample. Every symbol that occurs has a weight."""
    counts = np.bincount(block, minlength=256)
    if block.size < _SAMPLED_FROM:
        return counts
    spacing = _SPACING if block.size < _SAMPLED_LESS_FROM else _SPACING_LESS
    sampled = count_sample(block, spacing)
    return np.where(sampled != 0, sampled << spacing, counts != 0)


def model_of(weights: Ints, total: int) -> Model:
    """Scale weights to frequencies. Two or more symbols occur."""
    freq = (weights * _SCALE + total // 2) // total
    freq[(weights != 0) & (freq == 0)] = 1
    rest = _SCALE - int(freq.sum())
    while rest != 0:
        largest = int(freq.argmax())
        # No frequency may become 0, and the difference is spread over several symbols.
        change = max(rest, -(int(freq[largest]) // 2))
        freq[largest] += change
        rest -= change
    return Model.of(freq)


@lru_cache(maxsize=1)
def _costs() -> Ints:
    """Return log2(4096 / frequency) in 1/256 bits, rounded up, in integer arithmetic."""
    costs = [0]
    for freq in range(1, _SCALE):
        whole = freq.bit_length() - 1
        mantissa, fraction = freq << (31 - whole), 0
        for _ in range(8):
            mantissa = (mantissa * mantissa) >> 31
            fraction <<= 1
            if mantissa >> 32:
                fraction |= 1
                mantissa >>= 1
        costs.append((_SCALE_BITS << 8) - ((whole << 8) | fraction))
    return np.array(costs, np.int64)


def bits_with(model: Model, weights: Ints) -> int:
    """Return the cost of coding symbols with these weights, in 1/256 bits."""
    return int((weights * _costs()[model.freq]).sum())


def _table_of(model: Model) -> Bytes:
    present = np.packbits(model.freq != 0, bitorder="little")
    return np.concatenate([present, model.freq[model.freq != 0].astype("<u2").view(np.uint8)])


def _read_table(body: Bytes) -> tuple[Model | None, int]:
    if body.size < _BITMAP_NBYTES:
        return None, 0
    present = np.unpackbits(body[:_BITMAP_NBYTES], bitorder="little").astype(bool)
    nbytes = _BITMAP_NBYTES + 2 * int(present.sum())
    if body.size < nbytes:
        return None, 0
    stored = np.frombuffer(body[_BITMAP_NBYTES:nbytes].tobytes(), "<u2").astype(np.int64)
    if (stored == 0).any() or (stored >= _SCALE).any() or stored.sum() != _SCALE:
        return None, 0
    freq = np.zeros(256, np.int64)
    freq[present] = stored
    return Model.of(freq), nbytes


def _encode_body(block: Bytes, model: Model) -> Bytes:
    steps, rest = divmod(block.size, _LANES)
    symbols = block[: steps * _LANES].reshape(steps, _LANES)[:, _BYTE_OF_LANE]
    states = np.full(_LANES, _LOW, np.int64)
    words = []
    for step in range(steps - 1, -1, -1):
        freq, start = model.freq[symbols[step]], model.start[symbols[step]]
        is_full = (states >> 20) >= freq
        # The last lane comes first.
        words.append((states[is_full] & 0xFFFF)[::-1])
        states = np.where(is_full, states >> 16, states)
        quotient, remainder = np.divmod(states, freq)
        states = (quotient << _SCALE_BITS) + remainder + start
    parts = [states.astype("<u4").view(np.uint8), block[block.size - rest :]]
    return np.concatenate([*parts, *(part.astype("<u2").view(np.uint8) for part in words)])


def _decode_body(body: Bytes, model: Model, block: Bytes) -> bool:
    steps, rest = divmod(block.size, _LANES)
    if body.size < _STATES_NBYTES + rest or (body.size - rest) % 2:
        return False
    states = np.frombuffer(body[:_STATES_NBYTES].tobytes(), "<u4").astype(np.int64)
    if (states < _LOW).any():
        return False
    words = np.frombuffer(body[_STATES_NBYTES + rest :].tobytes(), "<u2").astype(np.int64)
    symbol_of = np.repeat(np.arange(256, dtype=np.uint8), model.freq)
    end = words.size
    symbols = np.empty(_LANES, np.uint8)
    for step in range(steps):
        slots = states & (_SCALE - 1)
        found = symbol_of[slots]
        symbols[_BYTE_OF_LANE] = found
        block[step * _LANES : (step + 1) * _LANES] = symbols
        states = model.freq[found] * (states >> _SCALE_BITS) + slots - model.start[found]
        needs = np.flatnonzero(states < _LOW)
        if needs.size > end:
            return False
        states[needs] = states[needs] << 16 | words[end - needs.size : end][::-1]
        end -= needs.size
    block[block.size - rest :] = body[_STATES_NBYTES : _STATES_NBYTES + rest]
    return end == 0 and bool((states == _LOW).all())
