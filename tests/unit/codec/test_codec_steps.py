"""Protects the codecs: encoded chunks decode to the same bytes, and no stored payload can harm a decoder.

Round trips of every width and kind of content, sizes promised for weights and noise, and hostile payloads: every
byte changed, and every length.
"""

from __future__ import annotations

import contextlib
import resource
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.codec import chunk_codec as chain
from ckstore.codec.byte_codecs import CONFIG_NBYTES_MAX
from ckstore.codec.chunk_codec import CODECS
from ckstore.config import Compression, Limits
from ckstore.errors import CorruptError, MalformedError, UnsupportedError, UsageError
from ckstore.store.memory_budget import ENCODE

MIB = 1 << 20
COMPRESSIONS: tuple[Compression, ...] = ("none", "fast", "best")


@pytest.fixture(scope="module")
def scratch() -> chain.Scratch:
    return chain.Scratch(MIB)


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


COUNT = 40_000
CONTENTS: dict[str, tuple[int, bool, Callable[[], np.ndarray]]] = {
    "fp32 weights": (4, True, lambda: (random(1).standard_normal(COUNT) * 0.02).astype(np.float32)),
    "fp64 weights": (8, True, lambda: random(2).standard_normal(COUNT)),
    "fp16 weights": (2, True, lambda: random(3).standard_normal(COUNT).astype(np.float16)),
    "bf16 weights": (2, True, lambda: bf16(random(4).standard_normal(COUNT))),
    "fp8 bytes": (1, True, lambda: (random(5).standard_normal(COUNT) * 9).astype(np.int8)),
    "upcast bf16": (4, True, lambda: bf16(random(6).standard_normal(COUNT)).astype(np.uint32) << 16),
    "sparse moments": (4, True, lambda: (random(7).random(COUNT) * (random(8).random(COUNT) < 0.1)).astype("f4")),
    "nan and inf": (4, True, lambda: np.resize(np.array([np.nan, np.inf, -np.inf, -0.0, 1.0], "f4"), COUNT)),
    "token ids": (8, False, lambda: random(9).integers(0, 50_000, COUNT)),
    "positions": (4, False, lambda: np.arange(COUNT, dtype=np.int32)),
    "mostly zeros": (1, True, lambda: (random(15).random(80_000) < 0.1) * random(16).integers(1, 9, 80_000, np.uint8)),
    "flags": (1, False, lambda: random(10).random(COUNT) < 0.03),
    "text": (1, False, lambda: np.resize(np.frombuffer(b"the quick brown fox; ", np.uint8), COUNT)),
    "zeros": (4, True, lambda: np.zeros(COUNT, np.float32)),
    "ones": (2, True, lambda: np.ones(COUNT, np.float16)),
    "pairs alike": (8, True, lambda: np.full(COUNT, 1 + 2j, np.complex64)),
    "noise of 1": (1, False, lambda: random(11).integers(0, 256, COUNT, dtype=np.uint8)),
    "noise of 2": (2, True, lambda: random(12).integers(0, 1 << 16, COUNT, dtype=np.uint16)),
    "noise of 4": (4, True, lambda: random(13).integers(0, 1 << 32, COUNT, dtype=np.uint32)),
    "noise of 8": (8, False, lambda: np.frombuffer(random(14).bytes(8 * COUNT), np.int64)),
}


def content(name: str) -> tuple[int, bool, memoryview]:
    width, is_float, make = CONTENTS[name]
    return width, is_float, memoryview(make().tobytes())


def joined(encoded: chain.Encoded) -> bytes:
    return b"".join(encoded.parts)


def decoded(payload: bytes, encoded: chain.Encoded, nbytes: int, scratch: chain.Scratch) -> bytes:
    destination = bytearray(nbytes)
    chain.decode(
        memoryview(payload),
        encoded.steps,
        width=encoded.width,
        destination=memoryview(destination),
        scratch=scratch,
    )
    return bytes(destination)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", CONTENTS)
def test_round_trip_is_never_larger(name: str, compression: Compression, scratch: chain.Scratch) -> None:
    width, is_float, plain = content(name)
    encoded = chain.encode(plain, width=width, is_float=is_float, compression=compression, scratch=scratch)
    payload = joined(encoded)
    assert len(payload) == encoded.nbytes <= plain.nbytes
    assert all(len(config) <= CONFIG_NBYTES_MAX for _, config in encoded.steps)
    assert decoded(payload, encoded, plain.nbytes, scratch) == bytes(plain)


@pytest.mark.parametrize("compression", ["fast", "best"])
@pytest.mark.parametrize("name", ["noise of 1", "noise of 2", "noise of 4", "noise of 8"])
def test_noise_is_stored_plain_without_a_copy(name: str, compression: Compression, scratch: chain.Scratch) -> None:
    width, is_float, plain = content(name)
    encoded = chain.encode(plain, width=width, is_float=is_float, compression=compression, scratch=scratch)
    assert encoded.steps == ()
    assert [part.obj for part in encoded.parts] == [plain.obj]


def test_none_stores_even_zeros_plain(scratch: chain.Scratch) -> None:
    encoded = chain.encode(memoryview(bytes(4096)), width=4, is_float=True, compression="none", scratch=scratch)
    assert (encoded.steps, encoded.nbytes) == ((), 4096)


@pytest.mark.parametrize(("name", "nbytes"), [("zeros", 4), ("ones", 2), ("pairs alike", 8)])
def test_repeated_element_is_stored_once(name: str, nbytes: int, scratch: chain.Scratch) -> None:
    width, is_float, plain = content(name)
    encoded = chain.encode(plain, width=width, is_float=is_float, compression="fast", scratch=scratch)
    assert encoded.nbytes == nbytes


def test_weights_are_within_half_a_percent_of_entropy(scratch: chain.Scratch) -> None:
    words = (random(20).standard_normal(MIB // 4) * 0.02).astype(np.float32).view(np.uint32)
    rotated = (words << 1) | (words >> 31)
    bits = 0.0
    for plane in range(4):
        shares = np.bincount((rotated >> (8 * plane)) & 0xFF, minlength=256) / words.size
        bits -= float((shares[shares > 0] * np.log2(shares[shares > 0])).sum())
    plain = memoryview(words.tobytes())
    encoded = chain.encode(plain, width=4, is_float=True, compression="fast", scratch=scratch)
    assert encoded.nbytes / plain.nbytes < 1.005 * bits / 32


def test_best_is_not_larger_than_fast(scratch: chain.Scratch) -> None:
    for name in ("flags", "token ids", "text", "sparse moments"):
        width, is_float, plain = content(name)
        fast, best = (
            chain.encode(plain, width=width, is_float=is_float, compression=how, scratch=scratch).nbytes
            for how in COMPRESSIONS[1:]
        )
        assert best <= fast, name


def test_coding_is_deterministic() -> None:
    width, is_float, plain = content("fp32 weights")
    payloads = {
        joined(chain.encode(plain, width=width, is_float=is_float, compression="fast", scratch=chain.Scratch(MIB)))
        for _ in range(3)
    }
    assert len(payloads) == 1


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 5, 7, 8, 9, 16, 63, 65, 4097])
def test_chunks_of_any_length_come_back(nbytes: int, scratch: chain.Scratch) -> None:
    for width in (1, 2, 4, 8):
        for filler in (bytes(nbytes), random(nbytes).bytes(nbytes)):
            for compression in COMPRESSIONS:
                encoded = chain.encode(
                    memoryview(filler), width=width, is_float=True, compression=compression, scratch=scratch
                )
                payload = joined(encoded)
                assert len(payload) <= nbytes
                assert decoded(payload, encoded, nbytes, scratch) == filler


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    width=st.sampled_from([1, 2, 4, 8]),
    count=st.integers(0, 3000),
    symbols=st.integers(1, 256),
    is_float=st.booleans(),
    compression=st.sampled_from(["fast", "best"]),
)
def test_random_alphabets_come_back(
    seed: int, width: int, count: int, symbols: int, is_float: bool, compression: Compression
) -> None:
    scratch = chain.Scratch(1 << 16)
    plain = random(seed).integers(0, symbols, count * width, dtype=np.uint8).tobytes()
    encoded = chain.encode(memoryview(plain), width=width, is_float=is_float, compression=compression, scratch=scratch)
    assert decoded(joined(encoded), encoded, len(plain), scratch) == plain


def small_payloads(scratch: chain.Scratch) -> list[tuple[str, bytes, chain.Encoded, bytes]]:
    found = []
    recipes: list[tuple[str, Compression]] = [
        ("fp32 weights", "fast"),
        ("sparse moments", "fast"),
        ("upcast bf16", "fast"),
        ("token ids", "fast"),
        ("text", "fast"),
        ("text", "best"),
        ("zeros", "fast"),
    ]
    for name, compression in recipes:
        width, is_float, whole = content(name)
        plain = whole[:2048]
        encoded = chain.encode(plain, width=width, is_float=is_float, compression=compression, scratch=scratch)
        found.append((name, joined(encoded), encoded, bytes(plain)))
    return found


def decodes_or_is_refused(payload: bytes, encoded: chain.Encoded, nbytes: int, scratch: chain.Scratch) -> bool:
    # Guard bytes on both sides show writes outside the destination.
    room = bytearray(b"\x5a" * (nbytes + 32))
    try:
        chain.decode(
            memoryview(payload),
            encoded.steps,
            width=encoded.width,
            destination=memoryview(room)[16 : 16 + nbytes],
            scratch=scratch,
        )
    except CorruptError:
        return False
    finally:
        assert room[:16] == room[-16:] == b"\x5a" * 16
    return True


def test_hostile_payloads_cover_every_codec(scratch: chain.Scratch) -> None:
    made = {encoded.steps[0][0] for _, _, encoded, _ in small_payloads(scratch) if encoded.steps}
    assert made == set(CODECS)


def test_changed_byte_is_refused_or_decodes_within_bounds(scratch: chain.Scratch) -> None:
    for name, payload, encoded, plain in small_payloads(scratch):
        for place in range(len(payload)):
            for change in (0x01, 0x80, 0xFF):
                hostile = bytearray(payload)
                hostile[place] ^= change
                decodes_or_is_refused(bytes(hostile), encoded, len(plain), scratch)
        # The zstd contexts still work after all of that.
        assert decoded(payload, encoded, len(plain), scratch) == plain, name


def test_every_wrong_length_is_refused(scratch: chain.Scratch) -> None:
    for name, payload, encoded, plain in small_payloads(scratch):
        for nbytes in range(len(payload)):
            assert not decodes_or_is_refused(payload[:nbytes], encoded, len(plain), scratch), (name, nbytes)
        assert not decodes_or_is_refused(payload + b"\0", encoded, len(plain), scratch), name
        assert not decodes_or_is_refused(payload + payload, encoded, len(plain), scratch), name


def test_a_destination_of_another_length_is_refused(scratch: chain.Scratch) -> None:
    for name, payload, encoded, plain in small_payloads(scratch):
        if name == "zeros":
            # The one payload that is valid for any number of elements.
            continue
        for nbytes in (0, encoded.width, len(plain) - encoded.width, len(plain) + encoded.width, 3 * len(plain)):
            assert not decodes_or_is_refused(payload, encoded, nbytes, scratch), (name, nbytes)


def test_plain_payload_must_have_the_requested_length(scratch: chain.Scratch) -> None:
    with pytest.raises(MalformedError):
        chain.decode(memoryview(b"abc"), (), width=1, destination=memoryview(bytearray(4)), scratch=scratch)


@pytest.mark.parametrize("claim", [1 << 20, 1 << 31, 1 << 40, (1 << 64) - 3])
def test_zstd_frame_with_large_claim_takes_no_memory(claim: int, scratch: chain.Scratch) -> None:
    bomb = b"\x28\xb5\x2f\xfd\xe0" + claim.to_bytes(8, "little") + b"\x03\0\0a"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for step in ((3, b""), (2, b"\x00")):
        payload = bomb if step[0] == 3 else b"\x02" + len(bomb).to_bytes(4, "little") + bomb
        with pytest.raises(CorruptError):
            chain.decode(
                memoryview(payload), (step,), width=1, destination=memoryview(bytearray(2048)), scratch=scratch
            )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024


@pytest.mark.parametrize(("window_log", "is_refused"), [(10, False), (20, False), (24, True), (31, True)])
def test_zstd_frame_with_a_wide_window_is_refused(window_log: int, is_refused: bool, scratch: chain.Scratch) -> None:
    """By hand (RFC 8878): a window, a content size of four bytes, and a block that repeats one byte."""
    block = (2048 << 3 | 1 << 1 | 1 if window_log > 10 else 1024 << 3 | 1 << 1 | 1).to_bytes(3, "little")
    claim = 2048 if window_log > 10 else 1024
    payload = b"\x28\xb5\x2f\xfd\x80" + bytes([(window_log - 10) << 3]) + claim.to_bytes(4, "little") + block + b"a"
    destination = bytearray(claim)
    with pytest.raises(MalformedError, match="window") if is_refused else contextlib.nullcontext():
        chain.decode(memoryview(payload), ((3, b""),), width=1, destination=memoryview(destination), scratch=scratch)
    assert destination == (bytes(claim) if is_refused else b"a" * claim)


@pytest.mark.parametrize(
    "steps",
    [
        ((0, b""),),
        ((5, b""),),
        ((65535, b""),),
        ((2, b""),),
        ((2, b"\x02"),),
        ((2, b"\x01\x00"),),
        ((1, b"\x00"),),
        ((3, b"\x00"),),
        ((4, b"\x00"),),
        ((1, b""), (4, b"")),
    ],
)
def test_payload_of_newer_writer_is_unsupported(steps: tuple[tuple[int, bytes], ...], scratch: chain.Scratch) -> None:
    with pytest.raises(UnsupportedError):
        chain.decode(memoryview(bytes(64)), steps, width=4, destination=memoryview(bytearray(16)), scratch=scratch)


@pytest.mark.parametrize("width", [0, 3, 16, 255])
def test_widths_that_no_element_has_are_refused(width: int, scratch: chain.Scratch) -> None:
    with pytest.raises(UsageError):
        chain.encode(memoryview(bytes(48)), width=width, is_float=True, compression="fast", scratch=scratch)
    for steps in (((1, b""),), ((2, b"\x01"),)):
        with pytest.raises(MalformedError):
            chain.decode(
                memoryview(bytes(48)), steps, width=width, destination=memoryview(bytearray(48)), scratch=scratch
            )


def test_chunks_beyond_the_scratch_are_refused() -> None:
    scratch = chain.Scratch(4096)
    with pytest.raises(UsageError):
        chain.encode(memoryview(bytes(4097)), width=1, is_float=False, compression="none", scratch=scratch)
    with pytest.raises(UsageError):
        chain.decode(memoryview(b"a"), ((1, b""),), width=1, destination=memoryview(bytearray(4097)), scratch=scratch)


def test_coding_obeys_the_scratch_bound() -> None:
    width, is_float, part = content("sparse moments")
    plain = memoryview(bytes(part) * 12)
    destination = memoryview(bytearray(plain.nbytes))
    tracemalloc.start()
    try:
        scratch = chain.Scratch(plain.nbytes)
        for compression in COMPRESSIONS:
            encoded = chain.encode(plain, width=width, is_float=is_float, compression=compression, scratch=scratch)
            payload = memoryview(joined(encoded))
            del encoded.parts[:]
            chain.decode(payload, encoded.steps, width=width, destination=destination, scratch=scratch)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A worker holds four more chunks. Memory of zstd's contexts is not traced.
    most = ENCODE.nbytes(Limits(plain.nbytes)) - 4 * plain.nbytes - 8 * MIB
    # The last payload joined here does not belong to the scratch.
    assert peak <= most + plain.nbytes


def test_each_codec_has_its_own_id_and_name() -> None:
    assert {codec_id: codec.name for codec_id, codec in CODECS.items()} == {
        1: "const",
        2: "planes",
        3: "zstd",
        4: "lz4",
    }
