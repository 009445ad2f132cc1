"""Protects readers of lossy frames: each field out of range is refused, and then the base is unchanged."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.byte_codecs import Scratch
from ckstore.config import SecondMomentSettings, WeightSettings
from ckstore.errors import CorruptError, MalformedError, UnsupportedError
from ckstore.quant import chunk_codec as lossy_forms
from ckstore.quant.chunk_codec import ChunkShape
from support.trained_chunks import payload_of, quantized_weight, room_for, stored, trained

SCRATCH = Scratch(1 << 20)
STATE = trained(256, 128, octaves=1.5)
BASE = stored(STATE.before)
COUNT = STATE.weight.size
# row, phase, escapes, floor, exponents, octave bits, first, last, streams, zeros
HEAD = struct.Struct("<IIIfhhBBBBBBH")
GRID, MOMENT2 = ((7, b"\x00"),), ((8, b"\x00"),)


def a_weight(**changes: object) -> bytes:
    return bytes(payload_of(quantized_weight(STATE, WeightSettings(step=1.0, scale="chunk", **changes), SCRATCH)))


def a_moment() -> bytes:
    plain = stored(STATE.second)
    how = {"scratch": SCRATCH, "reconstruction": room_for(plain)}
    made = lossy_forms.encode_second_moment(plain, ChunkShape("float32", 128), SecondMomentSettings(), **how)
    assert made is not None
    return bytes(payload_of(made))


def read(payload: bytes, steps=GRID, *, width: int = 4, base: memoryview | None = BASE) -> bytes:
    """Decode onto the base or into a filled buffer, and check that a refusal changes neither."""
    room = memoryview(bytearray(BASE)) if base is not None else room_for(BASE)
    before = bytes(room)
    onto = None if base is None else room
    try:
        chunk_codec.decode(memoryview(payload), steps, width=width, destination=room, scratch=SCRATCH, base=onto)
    except (CorruptError, UnsupportedError):
        assert room == before, "the base has changed"
        raise
    return bytes(room)


def with_head(payload: bytes, **changes: float) -> bytes:
    names = ["row", "phase", "escapes", "floor", "row_exponent", "col_exponent", "row_bits", "col_bits"]
    names += ["first", "last", "streams", "zero8", "zero16"]
    head = dict(zip(names, HEAD.unpack_from(payload), strict=True))
    return HEAD.pack(*{**head, **changes}.values()) + payload[HEAD.size :]


WEIGHT, MOMENT = a_weight(), a_moment()


def test_sample_payloads_have_streams_and_decode() -> None:
    assert HEAD.unpack_from(WEIGHT)[10] > 1
    read(WEIGHT)
    read(MOMENT, MOMENT2, base=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"row": 0},
        {"row": 15},
        {"row": 65_537},
        {"row": 2**32 - 1},
        {"phase": 128},
        {"phase": 2**32 - 1},
        {"escapes": 1},
        {"escapes": COUNT + 1},
        {"escapes": 2**32 - 1},
        {"floor": 1.0},
        {"floor": -0.0},
        {"floor": float("nan")},
        {"row_exponent": -127},
        {"row_exponent": 113},
        {"col_exponent": 32_767},
        {"row_bits": 1},
        {"row_bits": 5},
        {"col_bits": 255},
        {"first": 200},
        {"last": 255},
        {"last": 0},
        {"streams": 0},
        {"streams": 1},
        {"streams": 17},
        {"zero8": 1},
        {"zero16": 1},
    ],
    ids=str,
)
def test_heads_out_of_range_are_malformed(changes: dict[str, float]) -> None:
    with pytest.raises(MalformedError):
        read(with_head(WEIGHT, **changes))


@pytest.mark.parametrize("floor", [0.0, -1.0, float("nan"), float("inf")])
def test_second_moments_without_a_floor_are_malformed(floor: float) -> None:
    with pytest.raises(MalformedError):
        read(with_head(MOMENT, floor=floor), MOMENT2, base=None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("entry", [0, -1])
def test_codebooks_that_are_not_finite_are_malformed(bad: float, entry: int) -> None:
    entries = HEAD.unpack_from(WEIGHT)[9] + 1
    at = HEAD.size + 4 * (entry % entries)
    with pytest.raises(MalformedError):
        read(WEIGHT[:at] + struct.pack("<f", bad) + WEIGHT[at + 4 :])


def test_every_wrong_length_is_malformed() -> None:
    for cut in [*range(200), *range(200, len(WEIGHT), 97), len(WEIGHT) - 1]:
        with pytest.raises(MalformedError):
            read(WEIGHT[:cut])
    for more in (1, 8, 100):
        with pytest.raises(MalformedError):
            read(WEIGHT + bytes(more))


def one_stream(symbols: bytes, *, escapes: bytes = b"", alphabet: int = 2, per_byte: int = 8, count: int = 0) -> bytes:
    """Return a payload by hand: rows of 16, factors of 1, raw sections."""
    head = HEAD.pack(16, 0, count, 0.0, 0, 0, 4, 4, 128, alphabet - 1, 1, 0, 0)
    book = np.arange(alphabet, dtype="<f4").tobytes()
    sections = struct.pack("<BI", 1, 1) * 2
    stream = struct.pack("<BBBBI", 128, alphabet - 1, per_byte, 0, len(symbols))
    return head + book + sections + stream + b"\x01\x01" + symbols + escapes


def read_small(payload: bytes, count: int) -> np.ndarray:
    room = memoryview(bytearray(4 * count))
    chunk_codec.decode(memoryview(payload), ((10, b"\x00"),), width=4, destination=room, scratch=SCRATCH)
    return np.frombuffer(room, "<f4")


def test_packed_symbols_are_digits_of_their_alphabet() -> None:
    assert read_small(one_stream(b"\x05\x03"), 10).tolist() == [1, 0, 1, 0, 0, 0, 0, 0, 1, 1]
    with pytest.raises(MalformedError):
        read_small(one_stream(b"\x05\x07"), 10)
    assert read_small(one_stream(b"\xf2", alphabet=3, per_byte=5), 5).tolist() == [2, 2, 2, 2, 2]
    for wrong in (b"\xf3", b"\xff"):
        with pytest.raises(MalformedError):
            read_small(one_stream(wrong, alphabet=3, per_byte=5), 5)


@pytest.mark.parametrize(("alphabet", "per_byte"), [(2, 0), (2, 9), (3, 6), (17, 2), (1, 2)])
def test_too_many_symbols_per_byte_are_malformed(alphabet: int, per_byte: int) -> None:
    with pytest.raises(MalformedError):
        read_small(one_stream(b"\x00\x00", alphabet=alphabet, per_byte=per_byte), 10)


def test_a_stream_of_one_symbol_stores_nothing() -> None:
    assert read_small(one_stream(b"", alphabet=1, per_byte=1), 10).tolist() == [0.0] * 10
    with pytest.raises(MalformedError):
        read_small(one_stream(b"\x00", alphabet=1, per_byte=1), 10)


def test_escapes_are_inserted() -> None:
    def payload(places: list[int], words: list[float]) -> bytes:
        escapes = np.array(places, "<u4").tobytes() + np.array(words, "<f4").tobytes()
        return one_stream(b"\x00\x00", escapes=escapes, count=len(places))

    assert read_small(payload([3, 9], [7.0, -8.0]), 10).tolist() == [0, 0, 0, 7, 0, 0, 0, 0, 0, -8]
    assert read_small(payload(list(range(10)), list(range(10))), 10).tolist() == list(range(10))
    for wrong in ([3, 3], [9, 3], [3, 10], [3, 2**32 - 1]):
        with pytest.raises(MalformedError):
            read_small(payload(wrong, [7.0, -8.0]), 10)
    with pytest.raises(MalformedError):
        read_small(payload([3, 9], [7.0]), 10)


def test_wrong_widths_bases_and_chains_are_refused() -> None:
    for wrong in (1, 2, 3, 8):
        with pytest.raises(MalformedError):
            read(WEIGHT, width=wrong)
    with pytest.raises(MalformedError):
        read(WEIGHT, base=None)
    with pytest.raises(MalformedError):
        read(MOMENT, MOMENT2)
    for kind in (1, 2):
        with pytest.raises(MalformedError):
            read(WEIGHT, ((7, bytes([kind])),))
    for steps in (((7, b""),), ((7, b"\x03"),), ((7, b"\x00\x00"),), (*GRID, *GRID), (*GRID, (2, b"\x00"))):
        with pytest.raises(UnsupportedError):
            read(WEIGHT, steps)
        with pytest.raises(UnsupportedError):
            chunk_codec.base_nbytes(steps, 64)
    with pytest.raises(MalformedError):
        chunk_codec.decode(
            memoryview(WEIGHT), GRID, width=4, destination=memoryview(b""), scratch=SCRATCH, base=memoryview(b"")
        )


def test_non_finite_bases_are_harmless() -> None:
    noise = memoryview(bytearray(np.random.default_rng(4).bytes(BASE.nbytes)))
    chunk_codec.decode(memoryview(WEIGHT), GRID, width=4, destination=room_for(BASE), scratch=SCRATCH, base=noise)
    chunk_codec.decode(
        memoryview(WEIGHT), ((9, b"\x00"),), width=4, destination=room_for(BASE), scratch=SCRATCH, base=noise
    )


def test_hostile_lengths_allocate_no_memory() -> None:
    if kernels.IMPLEMENTATION["merge_streams"] != "native":
        pytest.skip("the extension is not built")
    hostile = [with_head(WEIGHT, row=65_536), with_head(WEIGHT, row=16), with_head(WEIGHT, escapes=COUNT)]
    # Zstandard frames, and sections, that claim large sizes.
    at = HEAD.size + 4 * (HEAD.unpack_from(WEIGHT)[9] + 1)
    hostile += [WEIGHT[:at] + struct.pack("<BI", mode, 2**32 - 1) + WEIGHT[at + 5 :] for mode in range(5)]
    with pytest.raises(MalformedError):
        read(hostile[0])
    tracemalloc.start()
    try:
        for payload in hostile:
            with pytest.raises(CorruptError):
                read(payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * BASE.nbytes + (1 << 20)
