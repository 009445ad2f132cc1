"""Protects reconstructions: numpy and native quantizer kernels give the same bits, sums included, at any address.

Restoring a lossy checkpoint computes it again on another machine. One different bit makes the checkpoint unreadable.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from ckstore.codec.kernels import reference

on_native = pytest.importorskip("ckstore._native", reason="the extension is not built")

KINDS = {0: "<f4", 1: "<u2", 2: "<f2"}
# Elements, row, phase: one row, none, odd ends, phases in mid-row, rows as long as their limit.
SHAPES = [(0, 16, 3), (1, 16, 15), (7, 16, 0), (16, 16, 0), (300, 16, 5), (1000, 33, 32), (4099, 100, 1)]
SHAPES += [(70_000, 512, 0), (70_001, 513, 300), (66_000, 65_536, 65_000), (50, 4096, 4090)]
shapes = pytest.mark.parametrize(("count", "row", "phase"), SHAPES)
kinds = pytest.mark.parametrize("kind", KINDS)


def stored(values: np.ndarray, kind: int) -> np.ndarray:
    if kind == 1:
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    return values.astype(KINDS[kind])


def heavy(count: int, seed: int, size: float = 1e-3) -> np.ndarray:
    """Return values with heavy tails, with zeros of both signs and subnormal values."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_t(3, count) * size).astype(np.float32)
    values[rng.random(count) < 0.05] = 0.0
    values[rng.random(count) < 0.05] = -0.0
    values[rng.random(count) < 0.02] *= np.float32(1e-37)
    return values


def factors(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    found = np.exp2(rng.integers(-40, 40, count) / 8).astype(np.float32)
    found[rng.random(count) < 0.05] = 0.0
    return found


def row_count(count: int, row: int, phase: int) -> int:
    return -(-(count + phase) // row) if count else 0


def same(call, *outs: np.ndarray) -> object:
    """Call both implementations with their own, equally filled outputs, and compare all results."""
    filled = [[np.full_like(out, 7) for out in outs] for _ in range(2)]
    results = [call(loops, *made) for loops, made in zip((reference, on_native), filled, strict=True)]
    assert results[0] == results[1]
    for one, other in zip(*filled, strict=True):
        assert one.tobytes() == other.tobytes()
    for out, made in zip(outs, filled[0], strict=True):
        out[...] = made
    return results[0]


@kinds
@shapes
def test_values_changes_and_quotients_are_the_same(count: int, row: int, phase: int, kind: int) -> None:
    plain, base = stored(heavy(count, 1), kind), stored(heavy(count, 2), kind)
    second = stored(np.abs(heavy(count, 3, 1e-6)), kind)
    out = np.empty(count, np.float32)
    assert same(lambda loops, made: loops.float_values(plain, made, kind), out) is True
    assert same(lambda loops, made: loops.float_changes(plain, base, made, kind), out) is True
    assert same(lambda loops, made: loops.float_quotients(plain, second, made, kind, 3.7), out) is True
    assert (np.abs(out) <= np.float32(3.7)).all()


@kinds
def test_every_16_bit_pattern_has_the_same_value(kind: int) -> None:
    if kind == 0:
        words = np.random.default_rng(5).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
        words[:3] = [1, 0x007FFFFF, 0x80000001]
        plain = words[np.isfinite(words.view(np.float32))]
    else:
        plain = np.arange(1 << 16, dtype="<u2")
        plain = plain[(plain & 0x7C00) != 0x7C00] if kind == 2 else plain[(plain & 0x7F80) != 0x7F80]
    out = np.empty(plain.size, np.float32)
    assert same(lambda loops, made: loops.float_values(plain, made, kind), out) is True
    if kind == 2:
        assert (out == plain.view("<f2").astype(np.float32)).all()


@kinds
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_reported(kind: int, bad: float) -> None:
    for count, place in ((1, 0), (64, 63), (1000, 999), (1000, 17)):
        sound = stored(np.ones(count), kind)
        wrong = sound.copy()
        wrong[place] = stored(np.array([bad]), kind)[0]
        out = np.empty(count, np.float32)
        for loops in (reference, on_native):
            assert loops.float_values(sound, out, kind) is True
            assert loops.float_values(wrong, out, kind) is False
            assert loops.float_changes(sound, wrong, out, kind) is False
            assert loops.float_changes(wrong, sound, out, kind) is False
            assert loops.float_changes(wrong, wrong, out, kind) is False
            assert loops.float_quotients(wrong, sound, out, kind, 1.0) is False
            assert loops.float_quotients(sound, wrong, out, kind, 1.0) is False


@pytest.mark.parametrize("loops", [reference, on_native], ids=["numpy", "native"])
def test_quotients_are_clipped_at_zero_second_moments(loops: ModuleType) -> None:
    first = np.array([0.0, 1.0, -1.0, -0.0, 2.0, 3.0], "<f4")
    second = np.array([0.0, 0.0, -0.0, 1.0, 4.0, 1e-30], "<f4")
    out = np.empty(6, np.float32)
    assert loops.float_quotients(first, second, out, 0, 5.0) is True
    assert out.tolist() == [0.0, 5.0, -5.0, 0.0, 1.0, 5.0]
    assert loops.float_quotients(first, -second - 1, out, 0, 5.0) is False


@shapes
def test_sums_are_the_same_to_the_last_bit(count: int, row: int, phase: int) -> None:
    x, rows = heavy(count, 4), row_count(count, row, phase)
    for squared in (False, True):
        above, beside = np.empty(rows), np.empty(row)
        same(lambda loops, a, b, sq=squared: loops.sums_of_values(x, a, b, row, phase, sq), above, beside)
        terms = x.astype(float) ** (2 if squared else 1)
        assert above.sum() == pytest.approx(terms.sum(), rel=1e-9, abs=1e-12)
        assert beside.sum() == pytest.approx(terms.sum(), rel=1e-9, abs=1e-12)


@shapes
@pytest.mark.parametrize(("bias", "level_max"), [(0.4, 63), (0.5, 1), (-3.25, 127), (0.0, 2)])
def test_symbols_and_their_sums_are_the_same(count: int, row: int, phase: int, bias: float, level_max: int) -> None:
    x, rows = heavy(count, 5), row_count(count, row, phase)
    inverses, symbols = 500 * factors(rows, 6), np.empty(count, np.uint8)
    same(lambda loops, out: loops.quantize_values(x, inverses, out, row, phase, bias, level_max), symbols)
    assert (np.abs(symbols[symbols != 0].astype(int) - 128) <= level_max).all()
    ones, totals = np.ones(row, np.float32), np.empty(512)
    same(lambda loops, out: loops.sums_of_levels(x, symbols, inverses, ones, out, row, phase), totals)
    same(lambda loops, out: loops.sums_of_levels(x, symbols, inverses, factors(row, 2), out, row, phase), totals)
    assert (totals[:256] == np.bincount(symbols, minlength=256)).all()


@shapes
@pytest.mark.parametrize("bound_count", [0, 1, 15, 255])
def test_bins_are_the_same(count: int, row: int, phase: int, bound_count: int) -> None:
    x, rows = heavy(count, 7), row_count(count, row, phase)
    bounds = np.sort(heavy(bound_count, 8))
    if bound_count == 255:
        bounds[100:110] = bounds[100]
        x[: min(count, 255)] = bounds[: min(count, 255)]
    ones, symbols = np.ones(row, np.float32), np.empty(count, np.uint8)
    same(lambda loops, out: loops.bin_values(x, np.ones(rows, np.float32), ones, bounds, out, row, phase), symbols)
    assert (symbols == (bounds[None] <= x[:, None]).sum(axis=1)).all()
    same(lambda loops, out: loops.bin_values(x, factors(rows, 1), factors(row, 2), bounds, out, row, phase), symbols)


@kinds
@shapes
@pytest.mark.parametrize("rule", [0, 1, 2, 3])
@pytest.mark.parametrize("flat", [False, True])
def test_reconstructions_are_the_same(count: int, row: int, phase: int, rule: int, flat: bool, kind: int) -> None:
    rng, rows = np.random.default_rng(9), row_count(count, row, phase)
    symbols = rng.integers(0, 256, count, dtype=np.uint8)
    above, beside = factors(rows, 10), np.ones(row, np.float32) if flat else factors(row, 11)
    book = heavy(256, 12) if rule != 1 else np.abs(heavy(256, 12, 1e-7))
    base = stored(np.abs(heavy(count, 13, 1e-4)), kind)
    given, destination = base if rule in (0, 2) else b"", np.empty(count, KINDS[kind])
    same(
        lambda loops, out: loops.finish_values(symbols, above, beside, book, given, out, row, phase, kind, rule, 1e-6),
        destination,
    )
    if rule == 0:
        # Onto the base, at an odd address.
        for loops in (reference, on_native):
            room = np.full(base.nbytes + 129, 0x5A, np.uint8)
            place = room[65 : 65 + base.nbytes]
            place[:] = base.view(np.uint8)
            loops.finish_values(symbols, above, beside, book, place, place, row, phase, kind, rule, 0.0)
            assert place.tobytes() == destination.tobytes()
            assert (room[:65] == 0x5A).all()
            assert (room[65 + base.nbytes :] == 0x5A).all()
    if rule == 1 and kind == 0 and flat and count:
        assert ((destination >= np.float32(1e-6)) | (destination == 0)).all()


@kinds
@shapes
def test_measures_are_the_same_to_the_last_bit(count: int, row: int, phase: int, kind: int) -> None:
    plain, made = stored(heavy(count, 14), kind), stored(heavy(count, 15), kind)
    greatest, errors, values = same(lambda loops: loops.measure_values(plain, made, kind))
    if kind == 0:
        off = made.astype(float) - plain
        assert greatest == (np.abs(off).max() if count else 0.0)
        assert errors == pytest.approx((off**2).sum(), rel=1e-9)
        assert values == pytest.approx((plain.astype(float) ** 2).sum(), rel=1e-9)


@shapes
def test_streams_are_equal_and_can_be_merged(count: int, row: int, phase: int) -> None:
    rng, rows = np.random.default_rng(16), row_count(count, row, phase)
    symbols = rng.integers(0, 256, count, dtype=np.uint8)
    above, beside = (rng.integers(0, 16, size, dtype=np.uint8) for size in (rows, row))
    for stream_count in (1, 2, 16):
        stream_of = np.sort(rng.integers(0, stream_count, 31, dtype=np.uint8))
        sizes, split, merged = np.empty(16, np.uint64), np.empty(count, np.uint8), np.empty(count, np.uint8)
        counts = np.empty(31 * 256, np.uint32)
        args = (above, beside, stream_of)
        same(lambda loops, out, a=args: loops.stream_sizes(*a, out, count, row, phase), sizes)
        assert sizes.sum() == count
        same(lambda loops, out, a=args: loops.split_streams(symbols, *a, out, row, phase), split)
        same(lambda loops, out, a=args, s=split: loops.merge_streams(s, *a, out, row, phase), merged)
        assert (merged == symbols).all()
        same(lambda loops, out: loops.class_counts(symbols, above, beside, out, row, phase), counts)
        of_stream = np.zeros(16, int)
        np.add.at(of_stream, stream_of, counts.reshape(31, 256).sum(axis=1))
        assert (of_stream == sizes).all()


ALPHABETS = [(2, 8), (3, 5), (4, 4), (5, 3), (6, 3), (7, 2), (16, 2), (17, 1), (256, 1)]


@pytest.mark.parametrize(("alphabet", "most"), ALPHABETS)
def test_packed_symbols_are_equal_and_come_back(alphabet: int, most: int) -> None:
    rng = np.random.default_rng(17)
    for count in (0, 1, 2, 7, 8, 9, 63, 64, 1001):
        for per_byte in range(1, most + 1):
            lowest = int(rng.integers(0, 257 - alphabet))
            symbols = (lowest + rng.integers(0, alphabet, count)).astype(np.uint8)
            packed, back = np.empty(-(-count // per_byte), np.uint8), np.empty(count, np.uint8)
            how = (lowest, alphabet, per_byte)
            same(lambda loops, out, s=symbols, h=how: loops.pack_symbols(s, out, *h), packed)
            assert same(lambda loops, out, p=packed, h=how: loops.unpack_symbols(p, out, *h), back) is True
            assert (back == symbols).all()
            # For any bytes, both report the same.
            noise = rng.integers(0, 256, packed.size, dtype=np.uint8)
            is_valid = same(lambda loops, out, p=noise, h=how: loops.unpack_symbols(p, out, *h), back)
            digits = alphabet**per_byte
            last = alphabet ** (count % per_byte or per_byte)
            assert is_valid is bool((noise < digits).all() and (count == 0 or noise[-1] < last))


@pytest.mark.parametrize("loops", [reference, on_native], ids=["numpy", "native"])
def test_wrong_arguments_raise_value_error(loops: ModuleType) -> None:
    x, codes, book = np.zeros(40, np.float32), np.zeros(40, np.uint8), np.zeros(256, np.float32)
    rows, cols, row_classes, col_classes = np.ones(3, "f4"), np.ones(16, "f4"), np.zeros(3, "u1"), np.zeros(16, "u1")
    streams, out = np.zeros(31, np.uint8), np.zeros(40, np.float32)
    wrong = [
        lambda: loops.float_values(x, out, 3),
        lambda: loops.float_values(x, out, -1),
        lambda: loops.float_values(x, out[:39], 0),
        lambda: loops.float_values(x.tobytes()[:6], out[:1], 0),
        lambda: loops.float_values(x, x.tobytes(), 0),
        lambda: loops.float_changes(x, x[1:], out, 0),
        lambda: loops.float_quotients(x, x, out, 0, 0.0),
        lambda: loops.float_quotients(x, x[1:], out, 0, 1.0),
        lambda: loops.sums_of_values(x, np.zeros(2), np.zeros(16), 16, 0, True),
        lambda: loops.sums_of_values(x, np.zeros(3), np.zeros(15), 16, 0, True),
        lambda: loops.sums_of_values(x, np.zeros(3), np.zeros(8), 8, 0, True),
        lambda: loops.sums_of_values(x, np.zeros(3), np.zeros(16), 16, 16, True),
        lambda: loops.quantize_values(x, rows, codes, 16, 0, 0.4, 0),
        lambda: loops.quantize_values(x, rows, codes, 16, 0, 0.4, 128),
        lambda: loops.quantize_values(x, rows, codes, 16, 0, 1.0, 1),
        lambda: loops.quantize_values(x, rows, codes[1:], 16, 0, 0.4, 1),
        lambda: loops.quantize_values(x, rows[1:], codes, 16, 0, 0.4, 1),
        lambda: loops.bin_values(x, rows, cols, np.array([1, 0], "f4"), codes, 16, 0),
        lambda: loops.bin_values(x, rows, cols, np.zeros(256, "f4"), codes, 16, 0),
        lambda: loops.bin_values(x, rows, cols[1:], x, codes, 16, 0),
        lambda: loops.sums_of_levels(x, codes, rows, cols, np.zeros(511), 16, 0),
        lambda: loops.sums_of_levels(x, codes[1:], rows, cols, np.zeros(512), 16, 0),
        lambda: loops.finish_values(codes, rows, cols, book, b"", out, 16, 0, 0, 0, 0.0),
        lambda: loops.finish_values(codes, rows, cols, book, x, out, 16, 0, 0, 1, 0.0),
        lambda: loops.finish_values(codes, rows, cols, book, x, out, 16, 0, 0, 4, 0.0),
        lambda: loops.finish_values(codes, rows, cols, book[1:], x, out, 16, 0, 0, 0, 0.0),
        lambda: loops.finish_values(codes[1:], rows, cols, book, x, out, 16, 0, 0, 0, 0.0),
        lambda: loops.finish_values(codes, rows[1:], cols, book, x, out, 16, 0, 0, 0, 0.0),
        lambda: loops.measure_values(x, x[1:], 0),
        lambda: loops.class_counts(codes, row_classes, col_classes, np.zeros(31 * 256 - 1, "u4"), 16, 0),
        lambda: loops.class_counts(codes, row_classes + 16, col_classes, np.zeros(31 * 256, "u4"), 16, 0),
        lambda: loops.stream_sizes(row_classes, col_classes, streams[1:], np.zeros(16, "u8"), 40, 16, 0),
        lambda: loops.stream_sizes(row_classes, col_classes, streams + 16, np.zeros(16, "u8"), 40, 16, 0),
        lambda: loops.stream_sizes(row_classes, col_classes, streams, np.zeros(15, "u8"), 40, 16, 0),
        lambda: loops.split_streams(codes, row_classes, col_classes + 16, streams, codes.copy(), 16, 0),
        lambda: loops.merge_streams(codes, row_classes, col_classes, streams, codes[1:].copy(), 16, 0),
        lambda: loops.pack_symbols(codes, np.zeros(20, "u1"), 0, 17, 2),
        lambda: loops.pack_symbols(codes, np.zeros(40, "u1"), 0, 1, 1),
        lambda: loops.pack_symbols(codes, np.zeros(40, "u1"), 1, 256, 1),
        lambda: loops.pack_symbols(codes, np.zeros(40, "u1"), 0, 2, 9),
        lambda: loops.unpack_symbols(codes, np.zeros(81, "u1"), 0, 2, 2),
    ]
    for index, call in enumerate(wrong):
        with pytest.raises(ValueError, match=r"."):
            pytest.fail(f"call {index} returned {call()!r}")
