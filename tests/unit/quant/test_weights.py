"""Protects quantized weights: bounds that hold, every shape and dtype, and tensors that must be left exact."""

from __future__ import annotations

import numpy as np
import pytest

from ckstore.codec import kernels
from ckstore.codec.byte_codecs import Scratch
from ckstore.codec.kernels import reference
from ckstore.config import WeightSettings
from ckstore.errors import UsageError
from ckstore.quant import chunk_codec
from ckstore.quant.chunk_codec import ChunkShape
from ckstore.quant.payload import read_codes
from support.trained_chunks import DTYPES, decoded, payload_of, quantized_weight, room_for, stored, trained, values_of

SCRATCH = Scratch(1 << 20)


@pytest.mark.parametrize("scale", ["row", "chunk"])
@pytest.mark.parametrize("step", [0.15, 0.5, 1.0, 2.0, 3.0])
def test_errors_and_bits_follow_the_step(step: float, scale: str) -> None:
    state = trained(200, 300)
    made = quantized_weight(state, WeightSettings(step=step, scale=scale, levels_max=127), SCRATCH)
    change = state.weight.astype(float) - state.before
    error = values_of(made.reconstruction) - state.weight.reshape(-1)
    rms = np.sqrt((change**2).mean(axis=1, keepdims=True)) if scale == "row" else np.sqrt((change**2).mean())
    # Within its interval a value is at most a step from the interval's mean, and 5% is for the rounded scale.
    assert (np.abs(error).reshape(200, 300) <= 1.05 * step * rms + 1e-8).all()
    entropy = np.log2(1 / step) + 2.1
    assert 8 * made.encoded.nbytes / change.size < max(entropy, 0.35) + 0.35


def test_errors_are_those_of_the_reconstruction() -> None:
    state = trained(100, 128)
    made = quantized_weight(state, WeightSettings(step=1.0), SCRATCH)
    error = values_of(made.reconstruction).astype(float) - state.weight.reshape(-1)
    change = (state.weight - state.before).astype(float)
    assert made.errors.count == state.weight.size
    assert made.errors.max_abs == np.abs(error).max()
    assert made.errors.sum_sq_error == pytest.approx((error**2).sum())
    assert made.errors.sum_sq_value == pytest.approx((state.weight.astype(float) ** 2).sum())
    assert made.errors.sum_sq_change == pytest.approx((change**2).sum())
    changed = values_of(made.reconstruction) != state.before.reshape(-1)
    assert made.errors.nonzero_count >= np.count_nonzero(changed)
    assert made.errors.nonzero_share == pytest.approx(np.count_nonzero(changed) / changed.size, abs=0.02)
    assert made.errors.rel_rms == pytest.approx(np.sqrt((error**2).sum() / (state.weight.astype(float) ** 2).sum()))
    double = made.errors + made.errors
    assert double.count == 2 * made.errors.count
    assert double.rel_rms_change == pytest.approx(made.errors.rel_rms_change)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 4096), (40, 16), (33, 100), (7, 1000), (3, 5000)])
def test_every_dtype_and_odd_shape_comes_back(rows: int, cols: int, dtype: str) -> None:
    state = trained(rows, cols, seed=rows)
    made = quantized_weight(state, WeightSettings(step=1.0), SCRATCH, dtype)
    plain = values_of(stored(state.weight, dtype), dtype)
    error = np.abs(values_of(made.reconstruction, dtype) - plain)
    # A step of a row's RMS, plus half a unit in the last place of the dtype.
    unit = {"float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
    assert (error <= 50 * 1e-4 + unit * np.abs(plain)).all()


@pytest.mark.parametrize("phase", [0, 1, 17, 99])
def test_chunk_may_begin_and_end_within_a_row(phase: int) -> None:
    whole = trained(300, 100, seed=3)
    count = 20_011
    plain, base = (stored(side.reshape(-1)[phase : phase + count]) for side in (whole.weight, whole.before))
    shape = ChunkShape.of((300, 100), "float32", phase + 500)
    assert shape == ChunkShape("float32", 100, phase)
    how = {"scratch": SCRATCH, "reconstruction": room_for(plain)}
    made = chunk_codec.encode_weights(plain, base, shape, WeightSettings(), **how)
    assert made is not None
    decoded(made, SCRATCH, base)


@pytest.mark.parametrize(
    ("shape", "row"),
    [((10, 512), 512), ((8, 3, 7, 7), 147), ((5000,), 4096), ((), 4096), ((9, 3), 4096), ((2, 100_000), 4096)],
)
def test_row_length_is_the_matrix_row_or_4096(shape: tuple[int, ...], row: int) -> None:
    assert ChunkShape.of(shape, "float32", 5000) == ChunkShape("float32", row, 5000 % row)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["weight", "before"])
def test_non_finite_values_are_left_exact(bad: float, side: str) -> None:
    state = trained(64, 64)
    getattr(state, side)[63, 63] = bad
    plain, base = stored(state.weight), stored(state.before)
    how = {"scratch": SCRATCH, "reconstruction": room_for(plain)}
    assert chunk_codec.encode_weights(plain, base, ChunkShape("float32", 64), WeightSettings(), **how) is None


def test_changes_that_overflow_are_left_exact() -> None:
    plain, base = stored(np.full(4096, 3e38)), stored(np.full(4096, -3e38))
    how = {"scratch": SCRATCH, "reconstruction": room_for(plain)}
    assert chunk_codec.encode_weights(plain, base, ChunkShape("float32", 64), WeightSettings(), **how) is None


@pytest.mark.parametrize("count", [0, 1, 5])
def test_too_few_elements_are_left_exact(count: int) -> None:
    plain, base = stored(np.ones(count)), stored(np.zeros(count))
    how = {"scratch": SCRATCH, "reconstruction": room_for(plain)}
    assert chunk_codec.encode_weights(plain, base, ChunkShape("float32", 64), WeightSettings(), **how) is None


def test_unchanged_weights_are_left_exact() -> None:
    plain = stored(trained(64, 64).weight)
    how = {"scratch": SCRATCH, "reconstruction": room_for(plain)}
    assert chunk_codec.encode_weights(plain, plain, ChunkShape("float32", 64), WeightSettings(), **how) is None


def test_unchanged_row_stays_bit_for_bit() -> None:
    state = trained(64, 64)
    state.weight[5] = state.before[5]
    for scale in ("row", "chunk"):
        made = quantized_weight(state, WeightSettings(step=0.5, scale=scale), SCRATCH)
        assert (values_of(made.reconstruction).reshape(64, 64)[5] == state.before[5]).all()


def test_outliers_are_stored_exactly() -> None:
    state = trained(256, 256)
    places = np.random.default_rng(8).choice(state.weight.size, 50, replace=False)
    state.weight.reshape(-1)[places] += np.float32(7.0)
    made = quantized_weight(state, WeightSettings(step=0.5, levels_max=15), SCRATCH)
    assert made.errors.escape_count >= 50
    exact = values_of(made.reconstruction) == state.weight.reshape(-1)
    assert exact[places].all()
    assert made.errors.nonzero_count >= made.errors.escape_count


def test_a_chunk_of_outliers_alone_is_left_exact() -> None:
    state = trained(64, 64)
    plain, base = stored(state.weight), stored(state.before)
    how = {"scratch": SCRATCH, "reconstruction": room_for(plain)}
    settings = WeightSettings(step=0.001, levels_max=1)
    assert chunk_codec.encode_weights(plain, base, ChunkShape("float32", 64), settings, **how) is None


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e30])
def test_changes_of_any_size_keep_their_bound(size: float) -> None:
    rng = np.random.default_rng(9)
    base, change = np.zeros(8192, np.float32), (rng.standard_normal(8192) * size).astype(np.float32)
    plain = stored(base + change)
    for scale in ("row", "chunk"):
        how = {"scratch": SCRATCH, "reconstruction": room_for(plain)}
        settings = WeightSettings(step=1.0, scale=scale)
        made = chunk_codec.encode_weights(plain, stored(base), ChunkShape("float32", 64), settings, **how)
        if made is not None:
            decoded(made, SCRATCH, stored(base))
            assert made.errors.max_abs <= 6 * size


def test_errors_do_not_accumulate_along_a_chain() -> None:
    rng = np.random.default_rng(10)
    exact = (rng.standard_normal((128, 256)) * 0.02).astype(np.float32)
    base, errors = stored(exact), []
    for _ in range(12):
        exact = (exact + rng.standard_normal(exact.shape) * 1e-4).astype(np.float32)
        plain = stored(exact)
        how = {"scratch": SCRATCH, "reconstruction": room_for(plain)}
        made = chunk_codec.encode_weights(plain, base, ChunkShape("float32", 256), WeightSettings(step=1.0), **how)
        assert made is not None
        errors.append(np.sqrt(made.errors.sum_sq_error / made.errors.count))
        base = made.reconstruction
    assert errors[-1] < 1.3 * errors[1]


def test_contexts_save_bits_for_differing_rows() -> None:
    rng = np.random.default_rng(11)
    spread = np.exp2(rng.normal(0, 1.0, (512, 1)) + rng.normal(0, 0.7, (1, 512)))
    base = np.zeros((512, 512), np.float32)
    change = (rng.standard_normal((512, 512)) * spread * 1e-4).astype(np.float32)
    plain = stored(change)
    how = {"scratch": SCRATCH, "reconstruction": room_for(plain)}
    settings = WeightSettings(step=2.0, scale="chunk")
    made = chunk_codec.encode_weights(plain, stored(base), ChunkShape("float32", 512), settings, **how)
    assert made is not None
    payload = payload_of(made)
    codes = read_codes(payload, change.size, width=4, is_second=False, scratch=SCRATCH)
    shares = np.bincount(np.frombuffer(codes.symbols, np.uint8)) / change.size
    entropy = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum()
    assert 8 * payload.nbytes / change.size < 0.9 * entropy


def test_numpy_and_native_write_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained(64, 300)
    for settings in (WeightSettings(step=0.5), WeightSettings(step=2.0, scale="chunk")):
        with monkeypatch.context() as patch:
            made = quantized_weight(state, settings, SCRATCH)
            payload, reconstruction = bytes(payload_of(made)), bytes(made.reconstruction)
            for loop in kernels.IMPLEMENTATION:
                patch.setattr(kernels, loop, getattr(reference, loop))
            again = quantized_weight(state, settings, SCRATCH)
            assert bytes(payload_of(again)) == payload
            assert again.reconstruction == reconstruction
            assert again.errors == made.errors


def test_flush_to_zero_mode_changes_no_bits() -> None:
    torch = pytest.importorskip("torch")
    if kernels.IMPLEMENTATION["finish_values"] != "native":
        pytest.skip("the extension is not built")
    state = trained(64, 64)
    tiny = type(state)(*(side * np.float32(1e-35) for side in (state.before, state.weight, state.first, state.second)))
    made = quantized_weight(tiny, WeightSettings(step=0.5), SCRATCH)
    payload, base = payload_of(made), stored(tiny.before)
    assert (np.abs(values_of(base)) < 1e-38).any()
    assert torch.set_flush_denormal(True)
    try:
        destination = room_for(base)
        chunk_codec.decode(payload, made.encoded.steps, width=4, destination=destination, scratch=SCRATCH, base=base)
    finally:
        torch.set_flush_denormal(False)
    assert destination == made.reconstruction


def test_wrong_calls_are_refused() -> None:
    plain = stored(np.ones(64))
    how = {"scratch": SCRATCH, "reconstruction": room_for(plain)}
    shape = ChunkShape("float32", 64)
    with pytest.raises(UsageError, match="equally many elements"):
        chunk_codec.encode_weights(plain, plain[4:], shape, WeightSettings(), **how)
    with pytest.raises(UsageError, match="equally many elements"):
        chunk_codec.encode_weights(
            plain[2:], plain[2:], shape, WeightSettings(), scratch=SCRATCH, reconstruction=plain[2:]
        )
    with pytest.raises(UsageError, match="scratch"):
        chunk_codec.encode_weights(plain, plain, shape, WeightSettings(), scratch=Scratch(128), reconstruction=plain)
    for wrong in (
        ("float64", 64, 0),
        ("float32", 15, 0),
        ("float32", 65_537, 0),
        ("float32", 64, 64),
        ("float32", 64, -1),
    ):
        with pytest.raises(UsageError):
            ChunkShape(*wrong)
