"""Protects the stored forms of a chunk: deltas and roundings round-trip, are small, and refuse hostile input.

Round trips of every width and kind of content, sizes promised for training data, missing or wrong bases, and bases
that stay unchanged when decoding onto them fails.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.kernels import reference
from ckstore.config import Compression, Limits
from ckstore.errors import CorruptError, MalformedError, UnsupportedError, UsageError
from ckstore.store.memory_budget import ENCODE
from support.chunk_pairs import (
    COUNT,
    PAIRS,
    decoded,
    pair,
    random,
    trained,
    weights,
)

MIB = 1 << 20
PLANES = ((5, b"\x01"), (2, b"\x00"))


@pytest.fixture(scope="module")
def scratch() -> chunk_codec.Scratch:
    return chunk_codec.Scratch(MIB)


def delta_of(
    plain: memoryview, base: memoryview, scratch: chunk_codec.Scratch, width: int = 4, is_float: bool = True
) -> chunk_codec.Encoded | None:
    return chunk_codec.encode_delta(plain, base, width=width, is_float=is_float, compression="fast", scratch=scratch)


@pytest.mark.parametrize("compression", ["fast", "best"])
@pytest.mark.parametrize("name", PAIRS)
def test_delta_round_trips_and_is_smaller(name: str, compression: Compression, scratch: chunk_codec.Scratch) -> None:
    width, is_float, plain, base = pair(name)
    encoded = chunk_codec.encode_delta(
        plain, base, width=width, is_float=is_float, compression=compression, scratch=scratch
    )
    assert encoded is not None
    payload = b"".join(encoded.parts)
    assert len(payload) == encoded.nbytes < plain.nbytes
    assert chunk_codec.base_nbytes(encoded.steps, plain.nbytes) == base.nbytes
    assert decoded(payload, encoded, plain.nbytes, base, scratch) == bytes(plain)
    onto = memoryview(bytearray(base))
    chunk_codec.decode(memoryview(payload), encoded.steps, width=width, destination=onto, scratch=scratch, base=onto)
    assert onto == plain


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    width=st.sampled_from([1, 2, 4, 8]),
    count=st.integers(1, 3000),
    symbols=st.integers(1, 256),
    is_float=st.booleans(),
    compression=st.sampled_from(["fast", "best"]),
)
def test_any_chunk_comes_back_from_any_base(
    seed: int, width: int, count: int, symbols: int, is_float: bool, compression: Compression
) -> None:
    scratch = chunk_codec.Scratch(1 << 16)
    base = random(seed).bytes(count * width)
    changes = random(seed + 1).integers(0, symbols, count * width, dtype=np.uint8)
    plain = (np.frombuffer(base, np.uint8) ^ changes).tobytes()
    encoded = chunk_codec.encode_delta(
        memoryview(plain), memoryview(base), width=width, is_float=is_float, compression=compression, scratch=scratch
    )
    if encoded is not None:
        payload = b"".join(encoded.parts)
        assert decoded(payload, encoded, len(plain), memoryview(base), scratch) == plain


def test_tiny_rl_update_takes_a_fiftieth(scratch: chunk_codec.Scratch) -> None:
    width, is_float, plain, base = pair("bf16 hardly changed")
    encoded = delta_of(plain, base, scratch, width, is_float)
    assert encoded is not None
    # Without the extension, zstd codes the planes.
    assert encoded.nbytes < plain.nbytes / (120 if kernels.IMPLEMENTATION["encode_plane"] == "native" else 60)


def test_nearly_constant_planes_cost_nearly_nothing(scratch: chunk_codec.Scratch) -> None:
    base = weights(MIB // 4)
    chunk = base.copy()
    chunk[1000] += 1
    encoded = delta_of(memoryview(chunk).cast("B"), memoryview(base).cast("B"), scratch)
    assert encoded is not None
    assert encoded.nbytes < MIB / 500
    same = delta_of(memoryview(base).cast("B"), memoryview(base).cast("B"), scratch)
    assert same is not None
    assert same.nbytes == 24


def test_deltas_are_close_to_their_plane_entropy() -> None:
    scratch = chunk_codec.Scratch(4 * MIB)
    for by in (1e-5, 1e-3):
        base = weights(MIB)
        plain, other = memoryview(trained(base, by)).cast("B"), memoryview(base).cast("B")
        split = np.empty(4 * MIB, np.uint8)
        reference.split_delta(plain, other, split.data, 4, True)
        bits = 0.0
        for plane in split.reshape(4, -1):
            shares = np.bincount(plane, minlength=256) / plane.size
            bits -= float((shares[shares > 0] * np.log2(shares[shares > 0])).sum())
        encoded = delta_of(plain, other, scratch)
        assert encoded is not None
        # Without the extension, zstd codes the planes.
        loss = 1.005 if kernels.IMPLEMENTATION["encode_plane"] == "native" else 1.06
        assert encoded.nbytes / plain.nbytes < loss * bits / 32


def test_useless_delta_is_none(scratch: chunk_codec.Scratch) -> None:
    noise, other = (memoryview(random(seed).bytes(MIB // 2)) for seed in (1, 2))
    for width in (1, 2, 4, 8):
        assert delta_of(noise, other, scratch, width) is None
        assert delta_of(noise[:0], other[:0], scratch, width) is None
    assert delta_of(noise[:3], other[:3], scratch, 2) is None
    assert delta_of(noise[:4], noise[:4], scratch, 4) is None
    weights_bytes = memoryview(weights()).cast("B")
    none = chunk_codec.encode_delta(
        weights_bytes, weights_bytes, width=4, is_float=True, compression="none", scratch=scratch
    )
    assert none is None


@pytest.mark.parametrize(
    ("plain", "base", "width"), [(8, 4, 4), (8, 16, 4), (8, 8, 3), (8, 8, 0), (2 * MIB, 2 * MIB, 4)]
)
def test_wrong_calls_are_usage_errors(plain: int, base: int, width: int, scratch: chunk_codec.Scratch) -> None:
    with pytest.raises(UsageError):
        delta_of(memoryview(bytes(plain)), memoryview(bytes(base)), scratch, width)


def test_a_rounding_costs_one_byte_and_comes_back(scratch: chunk_codec.Scratch) -> None:
    masters = np.concatenate([weights(), np.array([np.nan, -np.inf, 1e-45, 65504, 1e38], "f4")])
    for kind in (1, 2):
        chunk = np.empty(masters.size, np.uint16)
        kernels.round_floats(masters, chunk, kind)
        plain, base = memoryview(chunk.tobytes()), memoryview(masters.tobytes())
        encoded = chunk_codec.encode_rounded(plain, base, scratch=scratch)
        assert encoded is not None
        assert (encoded.steps, encoded.nbytes, encoded.width) == (((6, bytes([kind])),), 1, 2)
        assert chunk_codec.base_nbytes(encoded.steps, plain.nbytes) == base.nbytes
        assert decoded(b"\0", encoded, plain.nbytes, base, scratch) == bytes(plain)
        chunk[-1] ^= 1
        assert chunk_codec.encode_rounded(memoryview(chunk.tobytes()), base, scratch=scratch) is None
    with pytest.raises(UsageError):
        chunk_codec.encode_rounded(memoryview(bytes(MIB + 2)), memoryview(bytes(2 * MIB + 4)), scratch=scratch)


def test_other_chunks_are_not_roundings(scratch: chunk_codec.Scratch) -> None:
    zeros = memoryview(bytes(64))
    assert chunk_codec.encode_rounded(zeros[:0], zeros[:0], scratch=scratch) is None
    assert chunk_codec.encode_rounded(zeros, zeros, scratch=scratch) is None
    assert chunk_codec.encode_rounded(zeros[:3], zeros[:6], scratch=scratch) is None


def test_missing_or_wrong_base_is_malformed(scratch: chunk_codec.Scratch) -> None:
    _, _, plain, base = pair("fp32")
    delta = delta_of(plain, base, scratch)
    assert delta is not None
    payload = b"".join(delta.parts)
    halves = chunk_codec.Encoded(((6, b"\x01"),), [memoryview(b"\0")], 2)
    zeros = memoryview(bytes(4 * COUNT))
    for wrong in (None, base[:-4], base[:0], memoryview(bytes(base) * 2)):
        with pytest.raises(MalformedError):
            decoded(payload, delta, plain.nbytes, wrong, scratch)
        with pytest.raises(MalformedError):
            decoded(b"\0", halves, 2 * COUNT + 2, wrong, scratch)
    full = chunk_codec.encode(zeros, width=4, is_float=True, compression="fast", scratch=scratch)
    with pytest.raises(MalformedError):
        decoded(b"".join(full.parts), full, zeros.nbytes, zeros, scratch)
    for nothing in (memoryview(b""), None):
        with pytest.raises(MalformedError):
            decoded(payload, delta, 0, nothing, scratch)


@pytest.mark.parametrize(
    "steps",
    [
        ((5, b"\x00"),),
        ((5, b"\x00"), (5, b"\x00")),
        ((5, b"\x00"), (6, b"\x01")),
        ((5, b"\x00"), (2, b"\x00"), (3, b"")),
        ((5, b"\x02"), (2, b"\x00")),
        ((5, b""), (2, b"\x00")),
        ((5, b"\x00"), (77, b"")),
        ((6, b"\x00"),),
        ((6, b""),),
        ((6, b"\x01"), (3, b"")),
        ((2, b"\x00"), (5, b"\x00")),
        ((2, b"\x00"), (3, b"")),
        ((7, b""),),
    ],
)
def test_chains_of_newer_writers_are_unsupported(
    steps: tuple[tuple[int, bytes], ...], scratch: chunk_codec.Scratch
) -> None:
    with pytest.raises(UnsupportedError):
        chunk_codec.base_nbytes(steps, 64)
    base = memoryview(bytes(64))
    for given_base in (None, base):
        with pytest.raises(UnsupportedError):
            decoded(b"\0" * 64, chunk_codec.Encoded(steps, [], 4), 64, given_base, scratch)


@pytest.mark.parametrize("config", [b"", b"\x02", b"\x01\x00"])
def test_unknown_config_of_second_step_is_unsupported(config: bytes, scratch: chunk_codec.Scratch) -> None:
    with pytest.raises(UnsupportedError):
        decoded(b"\0" * 64, chunk_codec.Encoded(((5, b"\x00"), (2, config)), [], 4), 64, memoryview(bytes(64)), scratch)


def test_decoding_errors_name_the_reason(scratch: chunk_codec.Scratch) -> None:
    _, _, plain, base = pair("fp32")
    whole = chunk_codec.encode(plain, width=4, is_float=True, compression="fast", scratch=scratch)
    payload = b"".join(whole.parts)
    with pytest.raises(MalformedError, match="a base that it does not need"):
        decoded(payload, whole, plain.nbytes, base, scratch)
    with pytest.raises(UsageError, match="larger than the scratch"):
        decoded(payload, whole, MIB + 4, None, scratch)
    with pytest.raises(UnsupportedError, match="config of codec planes"):
        decoded(payload, chunk_codec.Encoded(((2, b"\x02"),), [], 4), plain.nbytes, None, scratch)


def test_chains_without_a_base_need_none() -> None:
    for steps in ((), ((1, b""),), ((2, b"\x01"),), ((3, b""),), ((4, b""),)):
        assert chunk_codec.base_nbytes(steps, 4096) == 0
    assert chunk_codec.base_nbytes(PLANES, 4096) == 4096


def test_deltas_can_use_any_codec(scratch: chunk_codec.Scratch) -> None:
    base = random(9).integers(0, 1 << 32, 3000, np.uint32)
    plain = base + np.resize(np.array([0, 3, 8, 1], np.uint32), base.size)
    residuals = memoryview((2 * (plain - base)).astype(np.uint32)).cast("B")
    for is_float, compression in ((True, "fast"), (False, "fast"), (False, "best")):
        coded = chunk_codec.encode(residuals, width=4, is_float=is_float, compression=compression, scratch=scratch)
        chained = chunk_codec.Encoded(((5, b"\x00"), *coded.steps), coded.parts, 4)
        payload = b"".join(coded.parts)
        other = memoryview(base.tobytes())
        assert decoded(payload, chained, plain.nbytes, other, scratch) == plain.tobytes(), coded.steps


def test_base_is_unchanged_after_failed_decode(scratch: chunk_codec.Scratch) -> None:
    for name in ("fp32", "bf16 hardly changed", "flags", "nothing changed"):
        width, is_float, plain, base = pair(name)
        encoded = delta_of(plain, base, scratch, width, is_float)
        assert encoded is not None
        payload = b"".join(encoded.parts)
        for cut in (0, 3, len(payload) // 2, len(payload) - 1):
            onto = memoryview(bytearray(base))
            with pytest.raises(CorruptError):
                chunk_codec.decode(
                    memoryview(payload[:cut]),
                    encoded.steps,
                    width=width,
                    destination=onto,
                    scratch=scratch,
                    base=onto,
                )
            assert onto == base, (name, cut)


def test_numpy_reads_what_native_writes(monkeypatch: pytest.MonkeyPatch, scratch: chunk_codec.Scratch) -> None:
    for name in ("fp32", "bf16", "nan and inf", "token ids"):
        width, is_float, plain, base = pair(name)
        encoded = delta_of(plain, base, scratch, width, is_float)
        assert encoded is not None
        payload = b"".join(encoded.parts)
        with monkeypatch.context() as patched:
            for loop in kernels.IMPLEMENTATION:
                patched.setattr(kernels, loop, getattr(reference, loop))
            assert decoded(payload, encoded, plain.nbytes, base, scratch) == bytes(plain)


def test_coding_obeys_the_scratch_bound() -> None:
    base = weights(4 * MIB // 4)
    plain, other = memoryview(trained(base)).cast("B"), memoryview(base).cast("B")
    onto = memoryview(bytearray(other))
    tracemalloc.start()
    try:
        scratch = chunk_codec.Scratch(plain.nbytes)
        encoded = delta_of(plain, other, scratch)
        assert encoded is not None
        payload = memoryview(b"".join(encoded.parts))
        chunk_codec.decode(payload, encoded.steps, width=4, destination=onto, scratch=scratch, base=onto)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert onto == plain
    # A worker holds four more chunks. Memory of zstd's contexts is not traced.
    most = ENCODE.nbytes(Limits(plain.nbytes)) - 4 * plain.nbytes - 8 * MIB
    assert peak <= most + payload.nbytes


def test_coding_is_deterministic() -> None:
    _, _, plain, base = pair("fp32")
    found = set()
    for _ in range(3):
        encoded = delta_of(plain, base, chunk_codec.Scratch(MIB))
        assert encoded is not None
        found.add(b"".join(encoded.parts))
    assert len(found) == 1
