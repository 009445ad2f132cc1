"""Protects states stored as few outer products: close, small, equal bits when read, and a grid for all others."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.byte_codecs import Scratch
from ckstore.codec.kernels import lowrank_reference, reference
from ckstore.config import FirstMomentSettings, LowRank, SecondMomentSettings, WeightSettings
from ckstore.errors import CorruptError
from ckstore.hashing import digest_of
from ckstore.quant import chunk_codec as lossy_forms
from ckstore.quant import lowrank, lowrank_payload
from ckstore.quant.chunk_codec import ChunkShape, QuantizedChunk
from support.trained_chunks import DTYPES, payload_of, room_for, stored, values_of

SCRATCH = Scratch(1 << 20)
ROWS, COLS = 96, 160
WEIGHTS = WeightSettings(step=1.0, low_rank=LowRank(0.5, error_max=0.3))
FIRST = FirstMomentSettings(step=0.5, low_rank=LowRank(0.05, error_max=0.3))
SECOND = SecondMomentSettings(low_rank=LowRank(0.1, error_max=1.0))
CHANGE, QUOTIENT, ROOT = 11, 12, 13


def directed(seed: int, rank: int = 5, noise: float = 0.02) -> np.ndarray:
    """A matrix of a few outer products and a little noise, with an RMS of about one."""
    rng = np.random.default_rng(seed)
    sizes = np.linspace(1.0, 0.3, rank)
    found = (rng.normal(size=(ROWS, rank)) * sizes) @ rng.normal(size=(rank, COLS))
    return (found / found.std() + noise * rng.normal(size=(ROWS, COLS))).astype(np.float32)


def shape(dtype: str = "float32", phase: int = 0) -> ChunkShape:
    return ChunkShape(dtype, COLS, phase)


def weight(
    change: np.ndarray, settings=WEIGHTS, dtype="float32", cut: slice = slice(None)
) -> tuple[QuantizedChunk, bytes]:
    base = np.random.default_rng(3).normal(size=change.shape).astype(np.float32)
    plain, given = stored((base + change).reshape(-1)[cut], dtype), stored(base.reshape(-1)[cut], dtype)
    where = shape(dtype, (cut.start or 0) % COLS)
    made = lossy_forms.encode_weights(plain, given, where, settings, scratch=SCRATCH, reconstruction=room_for(plain))
    assert made is not None
    return made, bytes(given)


def moments(first: np.ndarray, second: np.ndarray, clip: float = 8.0) -> tuple[QuantizedChunk, QuantizedChunk]:
    one, two = stored(first), stored(second)
    made2 = lossy_forms.encode_second_moment(two, shape(), SECOND, scratch=SCRATCH, reconstruction=room_for(two))
    assert made2 is not None
    settings = FirstMomentSettings(step=0.5, clip=clip, low_rank=FIRST.low_rank)
    near = made2.reconstruction
    made2 = QuantizedChunk(_kept(made2), near, made2.errors)
    made1 = lossy_forms.encode_first_moment(
        one, two, near, shape(), settings, scratch=SCRATCH, reconstruction=room_for(one)
    )
    assert made1 is not None
    return made1, made2


def _kept(made: QuantizedChunk):
    steps, width = made.encoded.steps, made.encoded.width
    return chunk_codec.Encoded(steps, [memoryview(bytes(payload_of(made)))], width)


def decoded(made: QuantizedChunk, base: bytes | memoryview | None) -> bytes:
    out = room_for(made.reconstruction)
    needed = lossy_forms.base_nbytes_of(made.encoded.steps, out.nbytes)
    given = memoryview(bytes(base)) if needed and base is not None else None
    how = {"width": made.encoded.width, "destination": out, "scratch": SCRATCH, "base": given}
    chunk_codec.decode(payload_of(made), made.encoded.steps, **how)
    return bytes(out)


def test_few_directions_are_close_and_small() -> None:
    made, base = weight(1e-3 * directed(1))
    assert made.encoded.steps[0][0] == CHANGE
    assert decoded(made, base) == made.reconstruction
    assert made.errors.rel_rms_change < 0.2
    grid, _ = weight(1e-3 * directed(1), WeightSettings(step=1.0))
    assert grid.errors.rel_rms_change > made.errors.rel_rms_change
    assert payload_of(made).nbytes * 2 < payload_of(grid).nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [slice(None), slice(37, None), slice(37, -11), slice(160, -160)])
def test_reader_gets_the_committed_bits(dtype: str, cut: slice) -> None:
    made, base = weight(0.1 * directed(2), dtype=dtype, cut=cut)
    assert made.encoded.steps[0][0] == CHANGE
    assert decoded(made, base) == made.reconstruction
    first, second = moments(directed(4) * 1e-5, directed(5) ** 2 * 1e-8)
    assert (first.encoded.steps[0][0], second.encoded.steps[0][0]) == (QUOTIENT, ROOT)
    assert decoded(first, second.reconstruction) == first.reconstruction
    assert decoded(second, None) == second.reconstruction


def test_a_reader_without_the_extension_gets_the_same_bits(monkeypatch) -> None:
    made, base = weight(1e-3 * directed(6))
    payload, expected = bytes(payload_of(made)), bytes(made.reconstruction)
    first, second = moments(directed(4) * 1e-5, directed(5) ** 2 * 1e-8)
    for name in ("multiply_floats", "multiply_words", "finish_outer"):
        monkeypatch.setattr(kernels, name, getattr(lowrank_reference, name))
    out = room_for(made.reconstruction)
    given = memoryview(base)
    chunk_codec.decode(memoryview(payload), made.encoded.steps, width=4, destination=out, scratch=SCRATCH, base=given)
    assert out == expected
    assert decoded(first, second.reconstruction) == first.reconstruction
    assert decoded(second, None) == second.reconstruction


def test_noise_uses_the_grid() -> None:
    noise = np.random.default_rng(7).normal(size=(ROWS, COLS)).astype(np.float32)
    settings = WeightSettings(step=1.0, low_rank=LowRank(0.5, rank_max=8, error_max=0.3))
    made, base = weight(1e-3 * noise, settings)
    assert made.encoded.steps[0][0] == 7
    assert decoded(made, base) == made.reconstruction


def test_unchanged_tensor_has_no_direction() -> None:
    made, base = weight(np.zeros((ROWS, COLS), np.float32))
    assert bytes(made.reconstruction) == base == decoded(made, base)
    assert payload_of(made).nbytes < 32
    assert made.errors.nonzero_count == 0


def test_changes_with_vanishing_squares_use_the_grid() -> None:
    change = directed(1) * np.float32(1e-30)
    plain, base = stored(change), stored(np.zeros_like(change))
    how = {"scratch": SCRATCH, "reconstruction": room_for(plain)}
    made = lossy_forms.encode_weights(plain, base, shape(), WEIGHTS, **how)
    assert made is None or made.encoded.steps[0][0] == 7


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_are_left_exact(bad: float) -> None:
    change = directed(8)
    change[3, 4] = bad
    base = stored(np.zeros_like(change))
    plain = stored(change)
    how = {"scratch": SCRATCH, "reconstruction": room_for(plain)}
    assert lossy_forms.encode_weights(plain, base, shape(), WEIGHTS, **how) is None


def test_second_moments_keep_their_zeros_and_signs() -> None:
    second = directed(9) ** 2 * np.float32(1e-30)
    second[7] = 0
    second[:, 11] = 0
    second[20, 30] = 0
    _, made = moments(np.zeros_like(second), second)
    near = values_of(made.reconstruction).reshape(second.shape)
    assert made.encoded.steps[0][0] == ROOT
    assert (near[second > 0] > 0).all()
    assert not near[7].any()
    assert not near[:, 11].any()
    middle = np.median(np.sqrt(near[second > 0] / second[second > 0]))
    assert 0.7 < middle < 1.4


@pytest.mark.parametrize("phase", [0, 37])
def test_two_byte_second_moments_never_vanish(phase: int) -> None:
    sizes = 1e-6 * directed(9) ** 2
    sizes[7] = 0
    second = stored(sizes.astype(np.float32).reshape(-1)[phase:], "float16")
    how = {"scratch": SCRATCH, "reconstruction": room_for(second)}
    made = lossy_forms.encode_second_moment(second, shape("float16", phase), SECOND, **how)
    assert made is not None
    given, near = values_of(second, "float16"), values_of(made.reconstruction, "float16")
    assert (near[given > 0] > 0).all()


@pytest.mark.parametrize("one", [1e-6, 2.0**110, -1e-9], ids=["sound", "huge", "negative"])
def test_grid_gets_the_unchanged_values(one: float) -> None:
    sizes = (1e-6 * directed(9) ** 2).astype(np.float32)
    sizes[60, 70] = one
    plain = stored(sizes)
    stored_as = []
    for settings in (SecondMomentSettings(low_rank=LowRank(0.1, error_max=1e-4)), SecondMomentSettings()):
        room = room_for(plain)
        made = lossy_forms.encode_second_moment(plain, shape(), settings, scratch=SCRATCH, reconstruction=room)
        assert (made is not None) == (one == 1e-6)
        stored_as.append(None if made is None else (made.encoded.steps, bytes(payload_of(made)), bytes(room)))
    assert stored_as[0] == stored_as[1]


def test_quotients_are_clipped_and_counted() -> None:
    second = np.full((ROWS, COLS), 1e-8, np.float32)
    first = directed(10) * 1e-4
    made, _ = moments(first, second, clip=0.5)
    near = values_of(made.reconstruction) / np.sqrt(values_of(moments(first, second)[1].reconstruction))
    assert float(np.abs(near).max()) <= 0.5 * (1 + 1e-6)
    assert made.errors.max_update_ratio == pytest.approx(0.5)


def test_errors_do_not_accumulate_along_a_chain() -> None:
    rng = np.random.default_rng(11)
    truth = rng.normal(size=(ROWS, COLS)).astype(np.float32)
    base, errors = truth.copy(), []
    for seed in range(20, 60):
        truth = truth + 1e-3 * directed(seed, noise=0.1)
        plain = stored(truth)
        made = lossy_forms.encode_weights(
            plain, stored(base), shape(), WEIGHTS, scratch=SCRATCH, reconstruction=room_for(plain)
        )
        assert made is not None
        base = values_of(made.reconstruction).reshape(truth.shape).copy()
        errors.append(float(np.sqrt(np.mean((base - truth) ** 2))))
    # Parts that no direction covers accumulate up to half a step, and no further.
    assert errors[0] < errors[9]
    assert max(errors) < 0.5 * 0.5e-3
    assert max(errors[30:]) < 1.1 * max(errors[20:30])


def test_products_round_trip() -> None:
    for step in (0.001, 0.05, 1.0, 50.0):
        found = lowrank.fit(directed(12), step, 64)
        assert found is not None
        again = lowrank_payload.unpack(memoryview(lowrank_payload.pack(found)), ROWS, COLS)
        for name in ("left", "right", "shifts", "scale"):
            assert np.array_equal(getattr(found, name), getattr(again, name))
        assert again.is_exact()


def test_sums_beyond_float32_are_exact_in_float64() -> None:
    rng = np.random.default_rng(13)
    left, right = rng.integers(-30_000, 30_000, (8, 6)), rng.integers(-30_000, 30_000, (6, 16))
    shifts = np.arange(6, dtype=np.uint8) * 2
    product = lowrank.Product(left.astype(np.int16), right.astype(np.int16), shifts, np.float32(1))
    out = np.empty((8, 16), np.float32)
    lowrank.multiply(product, out)
    whole = (left * (1 << shifts.astype(np.int64))) @ right
    assert product.is_exact()
    assert np.array_equal(out, whole.astype(np.float32))


@pytest.fixture(scope="module")
def payloads() -> list[tuple[bytes, tuple, bytes | None]]:
    made, base = weight(1e-3 * directed(14))
    first, second = moments(directed(4) * 1e-5, directed(5) ** 2 * 1e-8)
    found = [(bytes(payload_of(made)), made.encoded.steps, base)]
    found.append((bytes(payload_of(first)), first.encoded.steps, bytes(second.reconstruction)))
    return [*found, (bytes(payload_of(second)), second.encoded.steps, None)]


def refused(payload: bytes, steps: tuple, base: bytes | None) -> bool:
    """Return whether a payload is refused. A refused payload must write nothing."""
    out = memoryview(bytearray(b"\xa5" * (4 * ROWS * COLS)))
    given = None if base is None else memoryview(base)
    try:
        chunk_codec.decode(memoryview(payload), steps, width=4, destination=out, scratch=SCRATCH, base=given)
    except CorruptError:
        assert bytes(out) == b"\xa5" * out.nbytes
        return True
    return False


@pytest.mark.parametrize("which", [0, 1, 2])
def test_payload_of_wrong_length_is_refused(payloads, which: int) -> None:
    payload, steps, base = payloads[which]
    assert not refused(payload, steps, base)
    for length in (*range(40), len(payload) // 2, len(payload) - 1):
        assert refused(payload[:length], steps, base), length
    assert refused(payload + b"\x00", steps, base)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_damaged_payload_is_refused_or_decodes(payloads, which: int) -> None:
    payload, steps, base = payloads[which]
    rng = np.random.default_rng(which)
    outcomes = []
    for _ in range(300):
        damaged = bytearray(payload)
        damaged[int(rng.integers(min(len(payload), 400)))] ^= 1 << int(rng.integers(8))
        outcomes.append(refused(bytes(damaged), steps, base))
    assert any(outcomes)


@pytest.mark.parametrize(
    ("at", "what"),
    [(8, struct.pack("<H", 97)), (10, b"\x21"), (11, b"\x01"), (12, b"\0\0\0\0"), (12, struct.pack("<f", np.inf))],
)
def test_invalid_rank_group_or_scale_is_refused(payloads, at: int, what: bytes) -> None:
    payload, steps, base = payloads[0]
    assert refused(payload[:at] + what + payload[at + len(what) :], steps, base)


GOLDEN = Path(__file__).parents[2] / "golden" / "quant_outer"
DIGESTS = json.loads((GOLDEN / "digests.json").read_text())
GOLDEN_HEAD = struct.Struct("<BBHIII")


@pytest.mark.parametrize("twin", ["chosen", "numpy"])
@pytest.mark.parametrize("name", DIGESTS)
def test_golden_frames_are_reconstructed(name: str, twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if twin == "numpy":
        for loop in kernels.IMPLEMENTATION:
            monkeypatch.setattr(kernels, loop, getattr(reference, loop))
    content = (GOLDEN / name).read_bytes()
    width, step_count, _, plain_nbytes, base_nbytes, payload_nbytes = GOLDEN_HEAD.unpack_from(content)
    codec_id, config_nbytes, kind = content[GOLDEN_HEAD.size : GOLDEN_HEAD.size + 3]
    assert (step_count, config_nbytes) == (1, 1)
    at, steps = GOLDEN_HEAD.size + 3, ((codec_id, bytes([kind])),)
    assert codec_id == {"change": CHANGE, "quotient": QUOTIENT, "root": ROOT}[name.split("-")[0]]
    assert chunk_codec.base_nbytes(steps, plain_nbytes) == base_nbytes == (0 if codec_id == ROOT else plain_nbytes)
    assert len(content) == at + base_nbytes + payload_nbytes
    out, base = memoryview(bytearray(plain_nbytes)), memoryview(content[at : at + base_nbytes])
    how = {"width": width, "destination": out, "scratch": SCRATCH, "base": base if base_nbytes else None}
    chunk_codec.decode(memoryview(content[at + base_nbytes :]), steps, **how)
    assert digest_of(bytes(out)).hex() == DIGESTS[name]


def test_golden_files_are_listed_and_complete() -> None:
    assert {file.name for file in GOLDEN.glob("*.bin")} == set(DIGESTS)
    assert len(DIGESTS) == 3 * len(DTYPES)
