"""Protects what a GPU quantizes: symbols and reconstructions are those of numpy, bit for bit, on every device."""

from __future__ import annotations

import numpy as np
import pytest

from ckstore.kernels import quant_on_numpy as on_numpy

torch = pytest.importorskip("torch")

from ckstore.kernels import on_gpu  # noqa: E402 - it imports torch

DTYPES = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16}
SHAPES = [(1, 16, 15), (300, 16, 5), (1000, 33, 32), (70_000, 512, 0), (4099, 100, 1), (70_144, 512, 0)]
shapes = pytest.mark.parametrize(("count", "row", "phase"), SHAPES)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    return request.param


def heavy(count: int, seed: int, size: float = 1e-3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = (rng.standard_t(3, count) * size).astype(np.float32)
    values[rng.random(count) < 0.05] = 0.0
    values[rng.random(count) < 0.02] *= np.float32(1e-37)
    return values


def factors(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    found = np.exp2(rng.integers(-40, 40, count) / 8).astype(np.float32)
    found[rng.random(count) < 0.05] = 0.0
    return found


def put(values: np.ndarray, device: str) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(device)


def elements(values: np.ndarray, kind: int, device: str) -> torch.Tensor:
    return put(values, device).to(DTYPES[kind])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def row_count(count: int, row: int, phase: int) -> int:
    return -(-(count + phase) // row)


@pytest.mark.parametrize("kind", DTYPES)
@shapes
def test_values_changes_and_quotients_are_those_of_numpy(
    count: int, row: int, phase: int, kind: int, device: str
) -> None:
    plain, base = elements(heavy(count, 1), kind, device), elements(heavy(count, 2), kind, device)
    second = elements(np.abs(heavy(count, 3, 1e-6)), kind, device)
    out = np.empty(count, np.float32)
    for found, call in (
        (on_gpu.float_values(plain), lambda: on_numpy.float_values(bytes_of(plain), out, kind)),
        (on_gpu.float_changes(plain, base), lambda: on_numpy.float_changes(bytes_of(plain), bytes_of(base), out, kind)),
        (
            on_gpu.float_quotients(plain, second, 3.7),
            lambda: on_numpy.float_quotients(bytes_of(plain), bytes_of(second), out, kind, 3.7),
        ),
    ):
        assert bool(found[1]) is call() is True
        assert (found[0].cpu().numpy() == out).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_told(bad: float, device: str) -> None:
    sound, wrong = torch.ones(100, device=device), torch.ones(100, device=device)
    wrong[99] = bad
    assert not on_gpu.float_values(wrong)[1]
    assert not on_gpu.float_changes(sound, wrong)[1]
    assert not on_gpu.float_changes(wrong, wrong)[1]
    assert not on_gpu.float_quotients(wrong, sound, 1.0)[1]
    assert not on_gpu.float_quotients(sound, wrong, 1.0)[1]
    assert not on_gpu.float_quotients(sound, -sound, 1.0)[1]


@shapes
@pytest.mark.parametrize(("bias", "level_max"), [(0.4, 63), (0.5, 1), (-3.25, 127)])
def test_symbols_are_those_of_numpy_and_sums_are_near(
    count: int, row: int, phase: int, bias: float, level_max: int, device: str
) -> None:
    x, rows = heavy(count, 5), row_count(count, row, phase)
    inverses, units, ones = 500 * factors(rows, 6), factors(rows, 7), np.ones(row, np.float32)
    expected, totals = np.empty(count, np.uint8), np.empty(512)
    on_numpy.quantize_values(x, inverses, expected, row, phase, bias, level_max)
    how = (put(inverses, device), row, phase, bias, level_max)
    assert bytes_of(on_gpu.quantize_values(put(x, device), *how)) == expected.tobytes()
    on_numpy.sums_of_levels(x, expected, units, ones, totals, row, phase)
    levels = on_gpu.levels_of(put(x, device), how[0], put(units, device), row, phase, bias, level_max)
    np.testing.assert_allclose(levels.totals.cpu().numpy(), totals, rtol=1e-9, atol=1e-12)
    assert levels.escapes.tolist() == np.flatnonzero(expected == 0).tolist()
    assert bytes_of(levels.symbols) == np.where(expected == 0, 128, expected).astype(np.uint8).tobytes()
    for squared in (False, True):
        above, beside = np.empty(rows), np.empty(row)
        on_numpy.sums_of_values(x, above, beside, row, phase, squared)
        found = on_gpu.sums_of_values(put(x, device), row, phase, squared)
        np.testing.assert_allclose(found[0].cpu().numpy(), above, rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(found[1].cpu().numpy(), beside, rtol=1e-9, atol=1e-15)


@shapes
def test_bins_are_those_of_numpy(count: int, row: int, phase: int, device: str) -> None:
    x, rows, cols = heavy(count, 7), factors(row_count(count, row, phase), 1), factors(row, 2)
    bounds, expected = np.sort(heavy(200, 8)), np.empty(count, np.uint8)
    on_numpy.bin_values(x, rows, cols, bounds, expected, row, phase)
    sides = (put(rows, device), put(cols, device), put(bounds, device))
    assert bytes_of(on_gpu.bin_values(put(x, device), *sides, row, phase)) == expected.tobytes()


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("rule", [0, 1, 2, 3])
@shapes
def test_reconstructions_are_those_of_numpy(
    count: int, row: int, phase: int, rule: int, kind: int, device: str
) -> None:
    symbols = np.random.default_rng(9).integers(0, 256, count, dtype=np.uint8)
    above, beside, book = factors(row_count(count, row, phase), 10), factors(row, 11), heavy(256, 12)
    base = elements(np.abs(heavy(count, 13, 1e-4)), kind, device)
    expected = np.empty(count * (4 if kind == 0 else 2), np.uint8)
    given = bytes_of(base) if rule in (0, 2) else b""
    on_numpy.finish_values(symbols, above, beside, book, given, expected, row, phase, kind, rule, 1e-6)
    parts = [put(side, device) for side in (symbols, above, beside, book)]
    made = on_gpu.finish_values(*parts, base if rule in (0, 2) else None, row, phase, DTYPES[kind], rule, 1e-6)
    assert bytes_of(made) == expected.tobytes()


def test_wrong_sizes_and_numbers_raise_value_error() -> None:
    x, codes, ones, book = torch.zeros(40), torch.zeros(40, dtype=torch.uint8), torch.ones(16), torch.zeros(256)
    rows = torch.ones(3)
    for call in (
        lambda: on_gpu.float_values(torch.zeros(4, dtype=torch.float64)),
        lambda: on_gpu.float_changes(x, x[1:]),
        lambda: on_gpu.float_quotients(x, x, 0.0),
        lambda: on_gpu.quantize_values(x, rows[1:], 16, 0, 0.4, 1),
        lambda: on_gpu.quantize_values(x, rows, 16, 0, 0.4, 128),
        lambda: on_gpu.quantize_values(x, rows, 8, 0, 0.4, 1),
        lambda: on_gpu.finish_values(codes, rows, ones, book, None, 16, 0, torch.float32, 0, 0.0),
        lambda: on_gpu.finish_values(codes, rows, ones, book, x, 16, 0, torch.float32, 1, 0.0),
        lambda: on_gpu.finish_values(codes, rows, ones, book, x[1:], 16, 0, torch.float32, 0, 0.0),
        lambda: on_gpu.finish_values(codes, rows, ones, book, x, 16, 0, torch.float64, 0, 0.0),
        lambda: on_gpu.finish_values(codes, rows, ones, book, x, 16, 0, torch.float32, 4, 0.0),
    ):
        with pytest.raises(ValueError, match=r"."):
            pytest.fail(f"it returned {call()!r}")


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("count", [1, 16_384, 16_385, 70_000])
def test_sums_of_words_are_those_of_numpy(count: int, kind: int, device: str) -> None:
    plain = elements(heavy(count, 5), kind, device)
    width, content = plain.element_size(), bytes_of(plain)
    expected = on_numpy.sums_of_words(content, width)
    assert on_gpu.sums_of_words(plain) == expected
    words = np.frombuffer(content, f"<i{width}").tolist()
    places = range(1, count + 1)
    assert expected[0] == sum(words) % 2**64
    assert expected[1] == sum(word * place for word, place in zip(words, places, strict=True)) % 2**64


@pytest.mark.parametrize("fill", [-(2**31), 2**31 - 1])
def test_sums_of_the_greatest_words_wrap_as_those_of_numpy(fill: int, device: str) -> None:
    words = np.full(1 << 20, fill, np.int32)
    assert on_gpu.sums_of_words(put(words.view(np.float32), device)) == on_numpy.sums_of_words(words, 4)


def test_sums_of_words_tell_flipped_bits_and_exchanged_words_apart(device: str) -> None:
    values = heavy(5000, 7)
    told = {on_gpu.sums_of_words(put(values, device))}
    for bit in range(32):
        flipped = values.copy()
        flipped.view(np.uint32)[1234] ^= np.uint32(1 << bit)
        told.add(on_gpu.sums_of_words(put(flipped, device)))
    exchanged = values.copy()
    exchanged[[3, 4000]] = exchanged[[4000, 3]]
    told.add(on_gpu.sums_of_words(put(exchanged, device)))
    assert len(told) == 34
    with pytest.raises(ValueError, match="2 or 4 bytes"):
        on_numpy.sums_of_words(b"12345678", 8)


def test_moments_that_are_none_and_moments_that_were_raised_are_told(device: str) -> None:
    sound = put(np.array([0.0, 1e-40, 1e-3], np.float32), device)
    assert on_gpu.are_moments(sound, -sound)
    for wrong in (float("nan"), float("inf"), -1e-30):
        second, first = sound.clone(), sound.clone()
        second[1] = wrong
        assert not on_gpu.are_moments(second, sound)
        first[1] = wrong
        assert on_gpu.are_moments(sound, first) is (wrong == -1e-30)
    made = put(np.array([0.0, 1e-38, 1e-3], np.float32), device)
    found = on_gpu.raised(sound, made, 2.0**-128)
    assert found.tolist() == [False, True, False]
    assert on_gpu.sum_of_squares(sound, made, found) == pytest.approx((1e-38 - 1e-40) ** 2)
    assert on_gpu.raised(sound, sound, 2.0**-128) is None


@pytest.mark.parametrize("offset", [0, 2, 3])
def test_bytes_become_elements_wherever_they_begin(offset: int, device: str) -> None:
    values = heavy(100, 9)
    memory = torch.zeros(400 + 16, dtype=torch.uint8, device=device)
    content = memory[offset : offset + 400]
    content.copy_(put(values.view(np.uint8), device))
    found = on_gpu.elements_of(content, "float32")
    assert bytes_of(found) == values.tobytes()
    assert (found.data_ptr() == content.data_ptr()) is (offset % 4 == 0)
    assert on_gpu.uploaded(memoryview(values.tobytes()), found).equal(found)


def test_what_a_training_has_set_up_does_not_change_what_is_computed(device: str) -> None:
    matrix = put(np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32), device)
    expected = matrix @ matrix
    with torch.autocast(device, dtype=torch.bfloat16):
        assert not (matrix @ matrix).float().equal(expected)
        with on_gpu.undisturbed():
            assert (matrix @ matrix).equal(expected)
