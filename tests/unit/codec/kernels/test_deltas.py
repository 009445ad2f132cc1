"""Protects deltas and roundings: every implementation follows FORMAT.md for every bit pattern.

The definitions are written again here, for single Python integers. Rounding to fp16 is also compared with numpy's.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from ckstore.codec.kernels import reference
from support.kernel_implementations import both

WIDTHS = (1, 2, 4, 8)
COUNTS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 1000, 4097)
GUARD = 64


def edges(nbytes: int) -> np.ndarray:
    """Zeros of both signs, infinities, NaNs, the smallest and the largest value, of every float width."""
    words = [0, 1, 0x7F, 0x80, 0x81, 0xFF, 0x7C00, 0x7C01, 0xFC00, 0xFFFF, 0x7F800000, 0x7F800001, 0xFF800000]
    words += [0x7FC00000, 0x80000000, 0x80000001, 0xFFFFFFFF, 0x7FF0000000000000, 1 << 63, (1 << 64) - 1]
    return np.resize(np.array(words, "<u8").view(np.uint8), nbytes)


def near(source: np.ndarray, width: int) -> np.ndarray:
    """Return elements that differ a little."""
    words = source.view(f"<u{width}")
    return (words + np.random.default_rng(1).integers(0, 5, words.size).astype(words.dtype)).view(np.uint8)


def pairs(nbytes: int, width: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(nbytes)
    noise, other = (rng.integers(0, 256, nbytes, dtype=np.uint8) for _ in range(2))
    return {
        "random": (noise, other),
        "near": (noise, near(noise, width)),
        "edges": (edges(nbytes), np.roll(edges(nbytes), width)),
        "equal": (noise, noise),
    }


def residual_by_definition(word: int, base: int, bits: int, ordered: bool) -> int:
    half, whole = 1 << (bits - 1), 1 << bits
    if ordered:
        word, base = ((x + half if x < half else whole - 1 - x) for x in (word, base))
    difference = (word - base) % whole
    return 2 * difference if difference < half else 2 * (whole - difference) - 1


def planes_by_definition(source: np.ndarray, base: np.ndarray, width: int, ordered: bool) -> bytes:
    words, others = (side.view(f"<u{width}").tolist() for side in (source, base))
    residuals = [residual_by_definition(a, b, 8 * width, ordered) for a, b in zip(words, others, strict=True)]
    return b"".join(bytes((residual >> (8 * plane)) & 0xFF for residual in residuals) for plane in range(width))


@both
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_residuals_match_the_definition(loops: ModuleType, width: int, ordered: bool) -> None:
    for count in COUNTS:
        for name, (source, base) in pairs(count * width, width).items():
            planes = np.full(source.size, 0xAA, np.uint8)
            loops.split_delta(source, base, planes, width, ordered)
            assert planes.tobytes() == planes_by_definition(source, base, width, ordered), (name, count)
            merged = np.full(source.size, 0xAA, np.uint8)
            loops.merge_delta(list(planes.reshape(width, -1)), base, merged, width, ordered)
            assert merged.tobytes() == source.tobytes(), (name, count)


@both
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shift", [0, 1, 7])
def test_base_may_be_overwritten_by_the_result(loops: ModuleType, width: int, ordered: bool, shift: int) -> None:
    for count in (1, 63, 64, 65, 5003):
        source, base = pairs(count * width, width)["random"]
        planes = np.empty(source.size + shift, np.uint8)[shift:]
        loops.split_delta(source, base, planes, width, ordered)
        room = np.full(source.size + 2 * GUARD, 0x5A, np.uint8)
        place = room[GUARD + shift :][: source.size]
        place[:] = base
        loops.merge_delta(list(planes.reshape(width, -1)), place, place, width, ordered)
        assert place.tobytes() == source.tobytes()
        assert (room[: GUARD + shift] == 0x5A).all()
        assert (room[GUARD + shift + source.size :] == 0x5A).all()


@both
@pytest.mark.parametrize("ordered", [False, True])
def test_all_16_bit_residuals_come_back(loops: ModuleType, ordered: bool) -> None:
    source = np.arange(1 << 16, dtype=np.uint16)
    for step in range(0, 1 << 16, 4099):
        base = np.roll(source, step)
        planes, merged = np.empty(2 << 16, np.uint8), np.empty_like(source)
        loops.split_delta(source, base, planes, 2, ordered)
        loops.merge_delta(list(planes.reshape(2, -1)), base, merged, 2, ordered)
        assert (merged == source).all()


@both
def test_close_floats_have_small_residuals(loops: ModuleType) -> None:
    source, base = np.array([-0.0, 1e-45, -1e-45, 2.0], "<f4"), np.array([0.0, -1e-45, 1e-45, 1.9999999], "<f4")
    planes = np.empty(16, np.uint8)
    loops.split_delta(source, base, planes, 4, True)
    assert planes.tolist() == [1, 6, 5, 2] + 12 * [0]


def bf16_by_definition(word: int) -> int:
    if word & 0x7FFFFFFF > 0x7F800000:
        return 0x7FC0
    return (word + 0x7FFF + (word >> 16 & 1)) % (1 << 32) >> 16


def words_to_round() -> np.ndarray:
    """All 16-bit values of both kinds, the midpoints between neighbours, and the neighbours of these midpoints."""
    rng = np.random.default_rng(2)
    sixteen = np.arange(1 << 16, dtype=np.uint32)
    halves = sixteen.astype(np.uint16).view(np.float16)
    exact = halves[np.isfinite(halves)].astype(np.float32).view(np.uint32)
    middles = np.concatenate([sixteen << 16 | 0x8000, exact + 0x1000, exact - 0x1000, exact + (1 << 12) * 3])
    tiny = rng.integers(0, 0x39000000, 1 << 16, dtype=np.uint32)
    some = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    limits = np.array([0x477FEFFF, 0x477FF000, 0x477FE000, 0x33000000, 0x33000001, 0x387FFFFF, 0x38800000], np.uint32)
    found = [sixteen << 16, exact, middles, middles - 1, middles + 1, tiny, some, limits, limits | 1 << 31]
    return np.concatenate(found)


def rounded_by(loops: ModuleType, words: np.ndarray, kind: int) -> np.ndarray:
    rounded = np.full(words.size, 0xAAAA, np.uint16)
    loops.round_floats(words, rounded, kind)
    return rounded


@both
def test_rounding_to_bf16_matches_the_definition(loops: ModuleType) -> None:
    words = words_to_round()
    assert rounded_by(loops, words, 1).tolist() == [bf16_by_definition(word) for word in words.tolist()]


@both
def test_rounding_to_fp16_is_ieee_and_keeps_nan(loops: ModuleType) -> None:
    words = words_to_round()
    with np.errstate(all="ignore"):
        expected = words.view(np.float32).astype(np.float16).view(np.uint16)
    is_nan = np.isnan(words.view(np.float32))
    nan = (words >> 16 & 0x8000) | 0x7E00 | (words >> 13 & 0x3FF)
    assert (rounded_by(loops, words, 2) == np.where(is_nan, nan, expected)).all()


@both
@pytest.mark.parametrize("kind", [1, 2])
def test_only_exact_roundings_are_recognized(loops: ModuleType, kind: int) -> None:
    assert loops.is_rounding(b"", b"", kind) is True
    for count in (1, 63, 64, 65, 4096 + 70, 9000):
        words = np.random.default_rng(count).standard_normal(count).astype(np.float32)
        rounded = rounded_by(loops, words, kind)
        assert loops.is_rounding(words, rounded, kind) is True
        assert loops.is_rounding(words, rounded, 3 - kind) is False
        for place in {0, count // 2, count - 1}:
            rounded[place] ^= 1
            assert loops.is_rounding(words, rounded, kind) is False, (count, place)
            rounded[place] ^= 1


@both
def test_roundings_write_only_their_destination(loops: ModuleType) -> None:
    for kind in (1, 2):
        for count in COUNTS:
            source = np.random.default_rng(count).bytes(4 * count + 1)[1:]
            room = np.full(2 * count + 2 * GUARD, 0x5A, np.uint8)
            loops.round_floats(source, room[GUARD + 1 :][: 2 * count], kind)
            expected = rounded_by(reference, np.frombuffer(source, np.uint32), kind)
            assert room[GUARD + 1 :][: 2 * count].tobytes() == expected.tobytes()
            assert (room[: GUARD + 1] == 0x5A).all()
            assert (room[GUARD + 1 + 2 * count :] == 0x5A).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_estimates_are_equal_in_numpy_and_native(width: int) -> None:
    on_native = pytest.importorskip("ckstore._native")
    rng = np.random.default_rng(width)
    for count in (1, 2, 15, 16, 17, 255, 1000, 16384 // width, 16384 // width + 1, 70_001):
        for source in (
            rng.integers(0, 256, count * width, dtype=np.uint8),
            np.minimum(rng.geometric(0.1, count * width), 255).astype(np.uint8),
            np.full(count * width, 7, np.uint8),
        ):
            base = np.where(rng.random(source.size) < 0.1, source ^ 3, source)
            for flag in (False, True):
                expected = reference.plane_bits(source, width, flag)
                assert on_native.plane_bits(source, width, flag) == expected, count
                assert on_native.delta_bits(source, base, width, flag) == reference.delta_bits(
                    source, base, width, flag
                ), count


@both
def test_estimates_come_close_to_the_entropy(loops: ModuleType) -> None:
    rng = np.random.default_rng(4)
    for p in (0.01, 0.05, 0.3, 0.9, 0.99):
        plane = np.minimum(rng.geometric(p, 1 << 18), 255).astype(np.uint8)
        shares = np.bincount(plane, minlength=256) / plane.size
        entropy = float(-(shares[shares > 0] * np.log2(shares[shares > 0])).sum())
        (bits,) = loops.plane_bits(plane, 1, False)
        assert bits == pytest.approx(entropy, rel=0.03, abs=0.02), p
        assert loops.delta_bits(plane, np.zeros_like(plane), 1, False)[0] == pytest.approx(entropy, rel=0.05, abs=0.02)
    assert loops.plane_bits(rng.bytes(1 << 18), 4, True) == [8.0] * 4
    assert loops.plane_bits(bytes(1 << 18), 4, True) == [0.0] * 4


@both
def test_wrong_sizes_widths_and_kinds_raise_value_error(loops: ModuleType) -> None:
    eight, nine, four = np.zeros(8, np.uint8), np.zeros(9, np.uint8), np.zeros(4, np.uint8)
    frozen, spread = bytes(8), np.zeros(16, np.uint8)[::2]
    wrong = [
        lambda: loops.split_delta(eight, nine, eight.copy(), 2, False),
        lambda: loops.split_delta(eight, eight, nine, 2, False),
        lambda: loops.split_delta(nine, nine, nine.copy(), 2, False),
        lambda: loops.split_delta(eight, eight, frozen, 2, False),
        lambda: loops.split_delta(eight, spread, eight, 2, False),
        lambda: loops.split_delta(eight, eight, eight.copy(), 3, False),
        lambda: loops.merge_delta([four], eight, eight.copy(), 2, False),
        lambda: loops.merge_delta([four, eight], eight, eight.copy(), 2, False),
        lambda: loops.merge_delta([four, four], nine, eight, 2, False),
        lambda: loops.merge_delta([four, four], eight, frozen, 2, False),
        lambda: loops.round_floats(eight, four, 0),
        lambda: loops.round_floats(eight, four, 3),
        lambda: loops.round_floats(eight, eight.copy(), 1),
        lambda: loops.round_floats(nine, four, 1),
        lambda: loops.round_floats(eight, frozen[:4], 1),
        lambda: loops.is_rounding(eight, eight, 1),
        lambda: loops.is_rounding(eight, four, 7),
        lambda: loops.plane_bits(b"", 1, False),
        lambda: loops.plane_bits(nine, 2, False),
        lambda: loops.delta_bits(eight, nine, 1, False),
        lambda: loops.delta_bits(b"", b"", 1, False),
    ]
    for index, call in enumerate(wrong):
        with pytest.raises(ValueError, match=r"buffer|width|length|plane"):
            pytest.fail(f"call {index} returned {call()!r}")
