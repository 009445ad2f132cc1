"""Protects chunks that are quantized where their tensors lie: the host decodes from them the very bytes made there."""

from __future__ import annotations

import numpy as np
import pytest

from ckstore import kernels
from ckstore.kernels import on_numpy
from ckstore.quant import grid as host_grid
from ckstore.quant import lowrank, lowrank_forms
from ckstore.quant.geometry import Grid
from ckstore.quant.grid import Steps
from ckstore.quant.lowrank import Product
from ckstore.quant.moments import quantize_first
from ckstore.quant.second import quantize_second
from ckstore.quant.settings import FirstMomentSettings, Residual, SecondMomentSettings

torch = pytest.importorskip("torch")

from ckstore.kernels import on_gpu  # noqa: E402 - it imports torch
from ckstore.quant import on_device  # noqa: E402 - it imports torch

DTYPES = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16}
SHAPES = [(1, 16, 15), (300, 16, 5), (1000, 33, 32), (70_144, 512, 0), (4099, 100, 1)]
shapes = pytest.mark.parametrize(("count", "row", "phase"), SHAPES)
kinds = pytest.mark.parametrize("kind", DTYPES)
FORMS = (lowrank_forms.CHANGE, lowrank_forms.QUOTIENT, lowrank_forms.ROOT)
SETTINGS = {"near": Residual.near().tensors, "small": Residual.small().tensors}


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    return request.param


def put(values: np.ndarray, device: str) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(device)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def integers(rng: np.random.Generator, rank: int, rows: int, cols: int, greatest: int) -> Product:
    left = rng.integers(-greatest, greatest + 1, (rows, rank)).astype(np.int16)
    right = rng.integers(-greatest, greatest + 1, (rank, cols)).astype(np.int16)
    left[rows // 2] = 0
    right[:, cols // 2] = 0
    return Product(left, right, rng.integers(0, 4, rank).astype(np.uint8), np.float32(0.37))


@pytest.mark.parametrize(("rank", "greatest"), [(1, 3), (1, 32_767), (7, 40), (96, 300), (256, 32_767)])
def test_products_of_integers_are_those_of_the_host(rank: int, greatest: int, device: str) -> None:
    product = integers(np.random.default_rng(rank), rank, 70, 45, greatest)
    assert product.is_exact()
    expected = np.empty((70, 45), np.float32)
    lowrank.multiply(product, expected)
    sides = (put(each, device) for each in (product.left, product.right, product.shifts))
    assert bytes_of(on_gpu.multiply_integers(*sides)) == expected.tobytes()


@kinds
@pytest.mark.parametrize("rule", [0, 1, 2])
@shapes
def test_elements_of_products_are_those_of_numpy(
    count: int, row: int, phase: int, rule: int, kind: int, device: str
) -> None:
    rng = np.random.default_rng(count + rule)
    rows = -(-(phase + count) // row)
    product = rng.integers(-900, 900, (rows, row)).astype(np.float32)
    product[rng.random((rows, row)) < 0.1] = 0
    above, beside = (np.exp2(rng.integers(-40, 20, size) / 8).astype(np.float32) for size in (rows, row))
    above[0] = beside[-1] = 0
    plain = rng.standard_normal(count).astype(np.float32) * np.float32(1e-3)
    plain[rng.random(count) < 0.1] *= 0
    base = put(plain if rule == 0 else np.abs(plain), device).to(DTYPES[kind])
    given, sides = (b"", (above, beside)) if rule == 2 else (bytes_of(base), (b"", b""))
    expected = np.empty(count * (4 if kind == 0 else 2), np.uint8)
    greatest = on_numpy.finish_outer(
        product, *sides, given, expected, row, phase, kind, rule, np.float32(1e-3), np.float32(0.31)
    )
    factors = (put(above, device), put(beside, device)) if rule == 2 else (None, None)
    made, u_max = on_gpu.finish_outer(
        *(put(product, device), *factors, None if rule == 2 else base, count, row, phase, DTYPES[kind], rule),
        *(float(np.float32(1e-3)), float(np.float32(0.31))),
    )
    assert bytes_of(made) == expected.tobytes()
    assert float(u_max) == greatest


def trained(count: int, row: int, phase: int, form: str, seed: int) -> np.ndarray:
    """Values that few directions describe, with some noise, as a training makes them."""
    rng = np.random.default_rng(seed)
    rows = -(-(phase + count) // row)
    left, right = rng.standard_normal((rows, 6)), rng.standard_normal((6, row))
    values = (left * np.exp2(-np.arange(6))) @ right * 0.3 + rng.standard_normal((rows, row)) * 0.02
    if form == lowrank_forms.ROOT:
        sides = np.exp(rng.standard_normal((rows, 1))) * np.exp(rng.standard_normal(row))
        values = np.square(sides * np.clip(1 + 0.1 * values, 0.1, None)) * 1e-9
    elif form == lowrank_forms.CHANGE:
        values *= 1e-4
    return values.reshape(-1)[phase : phase + count].astype(np.float32)


@kinds
@pytest.mark.parametrize("policy", SETTINGS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("count", "row", "phase"), [(70_144, 512, 0), (40_000, 100, 7), (9000, 1000, 999)])
def test_hosts_decode_what_a_device_made_of_few_directions(
    form: str, policy: str, kind: int, count: int, row: int, phase: int, device: str
) -> None:
    grid, tensors = Grid(count, row, phase), SETTINGS[policy]
    part = {"change": tensors.weights, "quotient": tensors.first, "root": tensors.second}[form]
    values = trained(count, row, phase, form, 1)
    base = put(np.abs(trained(count, row, phase, "", 2)), device).to(DTYPES[kind])
    if form == lowrank_forms.ROOT:
        base = base[:0]
    outer = on_device.make_outer(form, put(values, device), grid, part.low_rank, limit=1.1)
    assert outer is not None
    made, u_max = on_device.rebuilt_outer(
        outer, None if form == lowrank_forms.ROOT else base, torch.empty(0, dtype=DTYPES[kind], device=device)
    )
    destination = memoryview(bytearray(count * (4 if kind == 0 else 2)))
    read = lowrank_forms.read(memoryview(outer.made.payload), form, count)
    assert lowrank_forms.write(read, form, kind, memoryview(bytes_of(base)), destination) == u_max
    assert bytes_of(made) == bytes(destination)
    # The host would have done no better, and no worse.
    make = {"change": lowrank_forms.make_change, "root": lowrank_forms.make_second}.get(form)
    buffer = memoryview(bytearray(values.tobytes()))
    own = make(buffer, grid, part.low_rank) if make else lowrank_forms.make_quotient(buffer, grid, part.low_rank, 1.1)
    assert own is not None
    assert abs(own.product.rank - outer.made.product.rank) <= 1
    assert len(outer.made.payload) == pytest.approx(len(own.payload), rel=0.03, abs=64)


def decoded(found: on_device.GridOnDevice, grid: Grid, plain: bytes, base: bytes, kind: int, rule: int) -> bytes:
    """What the host makes of symbols, as lossy frames are decoded."""
    made, out = found.made, np.empty(len(plain), np.uint8)
    how = (base, out, grid.row, grid.phase, kind, rule, made.floor)
    kernels.finish_values(found.symbols, made.rows.values(), made.cols.values(), made.table, *how)
    words = np.uint32 if kind == 0 else np.uint16
    out.view(words)[made.escapes] = np.frombuffer(plain, words)[made.escapes]
    return out.tobytes()


@kinds
@pytest.mark.parametrize("unit", ["row", "chunk", "one"])
@shapes
def test_hosts_decode_the_grids_of_weights_that_a_device_made(
    count: int, row: int, phase: int, unit: str, kind: int, device: str
) -> None:
    grid, steps = Grid(count, row, phase), Steps(0.5 if unit != "one" else 1e-4, 0.6, 8, unit)
    rng = np.random.default_rng(count)
    base = put((rng.standard_normal(count) * 0.02).astype(np.float32), device).to(DTYPES[kind])
    plain = (base.float() + put((rng.standard_t(3, count) * 1e-3).astype(np.float32), device)).to(DTYPES[kind])
    changes, is_finite = on_gpu.float_changes(plain, base)
    assert is_finite
    found = on_device.make_grid(changes, grid, steps)
    symbols = memoryview(bytearray(count))
    own = host_grid.quantize_grid(memoryview(bytearray(changes.cpu().numpy().tobytes())), symbols, grid, steps)
    assert (found is None) == (own is None)
    if found is None:
        return
    assert found.symbols.tobytes() == bytes(symbols)
    assert found.made.rows.codes.tobytes() == own.rows.codes.tobytes()
    assert found.made.escapes.tolist() == own.escapes.tolist()
    np.testing.assert_allclose(found.made.table, own.table, rtol=1e-6)
    made = on_device.rebuilt_grid(found, grid, plain, base, is_second=False)
    assert bytes_of(made) == decoded(found, grid, bytes_of(plain), bytes_of(base), kind, 0)
    expected = kernels.measure_values(bytes_of(plain), bytes_of(made), kind)
    np.testing.assert_allclose(on_gpu.measure_values(plain, made).cpu().numpy(), expected, rtol=1e-9)


@kinds
@pytest.mark.parametrize("form", ["grid", "ternary"])
@shapes
def test_hosts_decode_the_moments_that_a_device_made(
    count: int, row: int, phase: int, form: str, kind: int, device: str
) -> None:
    grid, rng = Grid(count, row, phase), np.random.default_rng(count)
    second = put(np.exp(rng.standard_normal(count) - 9).astype(np.float32), device).to(DTYPES[kind])
    first = put((rng.standard_normal(count) * 0.01).astype(np.float32), device).to(DTYPES[kind])
    seconds, _ = on_gpu.float_values(second)
    for settings in (SecondMomentSettings(), SecondMomentSettings(form="log")):
        found = on_device.make_second(seconds, grid, settings)
        symbols = memoryview(bytearray(count))
        own = quantize_second(memoryview(bytearray(seconds.cpu().numpy().tobytes())), symbols, grid, settings)
        assert found is not None
        assert own is not None
        assert found.symbols.tobytes() == bytes(symbols)
        assert found.made.floor == own.floor
        made = on_device.rebuilt_grid(found, grid, second, None, is_second=True)
        assert bytes_of(made) == decoded(found, grid, bytes_of(second), b"", kind, 1)
    firsts = FirstMomentSettings(form=form, step=0.5)
    quotients, _ = on_gpu.float_quotients(first, second, firsts.clip)
    found = on_device.make_first(quotients, grid, firsts)
    symbols = memoryview(bytearray(count))
    own = quantize_first(memoryview(bytearray(quotients.cpu().numpy().tobytes())), symbols, grid, firsts)
    assert found is not None
    assert own is not None
    assert found.symbols.tobytes() == bytes(symbols)
    rebuilt = on_device.rebuilt_grid(found, grid, first, made, is_second=True)
    assert bytes_of(rebuilt) == decoded(found, grid, bytes_of(first), bytes_of(made), kind, 2)


def test_what_cannot_be_quantized_is_left_to_the_host(device: str) -> None:
    grid, near = Grid(4096, 64, 0), SETTINGS["near"]
    zeros, noise = torch.zeros(4096, device=device), put(np.random.default_rng(1).standard_normal(4096), device).float()
    assert on_device.make_grid(zeros, grid, Steps(0.5, 0.6, 8, "row")) is None
    assert on_device.make_second(zeros, grid, near.second) is None
    assert on_device.make_second(-noise.abs(), grid, near.second) is None
    assert on_device.make_outer(lowrank_forms.ROOT, -noise.abs(), grid, near.second.low_rank) is None
    assert on_device.make_outer(lowrank_forms.CHANGE, noise, grid, near.weights.low_rank) is None, "no few directions"
    assert on_device.make_outer(lowrank_forms.CHANGE, noise * 1e-30, grid, near.weights.low_rank) is None
    nothing = on_device.make_outer(lowrank_forms.CHANGE, zeros, grid, near.weights.low_rank)
    assert nothing is not None
    assert nothing.made.product.rank == 0
    made, _ = on_device.rebuilt_outer(nothing, noise, noise)
    assert bytes_of(made) == bytes_of(noise)


def test_wrong_sizes_and_numbers_raise_value_error() -> None:
    p, ones, base = torch.zeros(3, 16), torch.ones(16), torch.ones(40)
    rows, short = torch.ones(3), torch.ones(39)
    for call in (
        lambda: on_gpu.finish_outer(p, None, None, short, 40, 16, 0, torch.float32, 0, 1.0, 1.0),
        lambda: on_gpu.finish_outer(p, None, None, base, 40, 16, 0, torch.float32, 3, 1.0, 1.0),
        lambda: on_gpu.finish_outer(p, None, None, base, 40, 16, 0, torch.float64, 0, 1.0, 1.0),
        lambda: on_gpu.finish_outer(p, rows, ones, base, 40, 16, 0, torch.float32, 0, 1.0, 1.0),
        lambda: on_gpu.finish_outer(p, rows, ones, base, 40, 16, 0, torch.float32, 2, 1.0, 1.0),
        lambda: on_gpu.finish_outer(p, None, None, base, 40, 8, 0, torch.float32, 0, 1.0, 1.0),
        lambda: on_gpu.finish_outer(p[1:], None, None, base, 40, 16, 0, torch.float32, 0, 1.0, 1.0),
        lambda: on_gpu.multiply_integers(p.short(), p.short(), torch.zeros(16, dtype=torch.uint8)),
        lambda: on_gpu.measure_values(base, short),
    ):
        with pytest.raises(ValueError, match=r"."):
            pytest.fail(f"it returned {call()!r}")
