"""Protects quantized moments: a second one never vanishes, a first one keeps its direction, bad ones stay exact."""

from __future__ import annotations

import numpy as np
import pytest

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.byte_codecs import Scratch
from ckstore.codec.kernels import reference
from ckstore.config import FirstMomentSettings, SecondMomentSettings
from ckstore.quant import chunk_codec as lossy_forms
from ckstore.quant.chunk_codec import ChunkShape, QuantizedChunk
from support.trained_chunks import DTYPES, decoded, payload_of, room_for, stored, trained, values_of

SCRATCH = Scratch(1 << 20)
RANK1, LOG = SecondMomentSettings(), SecondMomentSettings(form="log", log_step=0.25)


def second(
    values: np.ndarray, settings: SecondMomentSettings, dtype: str = "float32", phase: int = 0
) -> QuantizedChunk | None:
    plain = stored(values, dtype)
    shape, room = ChunkShape(dtype, values.shape[-1], phase), room_for(plain)
    return lossy_forms.encode_second_moment(plain, shape, settings, scratch=SCRATCH, reconstruction=room)


def first(
    m: np.ndarray, v: np.ndarray, made_v: memoryview, settings: FirstMomentSettings, dtype: str = "float32"
) -> QuantizedChunk | None:
    plain, given = stored(m, dtype), stored(v, dtype)
    shape, how = ChunkShape(dtype, m.shape[-1]), {"scratch": SCRATCH, "reconstruction": room_for(plain)}
    return lossy_forms.encode_first_moment(plain, given, made_v, shape, settings, **how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", [RANK1, LOG], ids=["rank1", "log"])
def test_second_moments_stay_positive_and_near(settings: SecondMomentSettings, dtype: str) -> None:
    v = trained(200, 256).second * (1e6 if dtype == "float16" else 1.0)
    made = second(v, settings, dtype)
    assert made is not None
    decoded(made, SCRATCH, None)
    given, became = values_of(stored(v, dtype), dtype), values_of(made.reconstruction, dtype)
    assert (became[given > 0] > 0).all()
    octaves = 0.5 * np.log2(became[given > 0] / given[given > 0])
    assert np.abs(octaves).mean() < (0.5 if settings is RANK1 else 0.1)
    assert 8 * made.encoded.nbytes / v.size < (0.6 if settings is RANK1 else 4.5)
    if settings is LOG and dtype == "float32":
        assert np.abs(octaves).max() < 0.26
    assert made.errors.max_update_ratio == 0.0


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e20])
@pytest.mark.parametrize("settings", [RANK1, LOG], ids=["rank1", "log"])
def test_second_moments_of_any_size_never_vanish(settings: SecondMomentSettings, size: float) -> None:
    v = (trained(64, 128).second / 1e-10 * size).astype(np.float32)
    made = second(v, settings)
    assert made is not None
    became = values_of(decoded(made, SCRATCH, None)).reshape(v.shape)
    assert (became > 0).all()
    assert became.min() >= v.min()
    assert np.abs(np.log2(became / v)).mean() < 1.0


def test_subnormal_second_moments_are_left_exact() -> None:
    assert second(np.full((64, 64), 1e-40, np.float32), RANK1) is None


def test_rows_and_columns_without_gradient_stay_zero() -> None:
    v = trained(64, 128).second
    v[7], v[:, 9], v[3, 4] = 0.0, 0.0, 0.0
    for settings in (RANK1, LOG):
        made = second(v, settings)
        assert made is not None
        became = values_of(decoded(made, SCRATCH, None)).reshape(v.shape)
        assert not became[7].any()
        assert not became[:, 9].any()
        others = np.ones(v.shape, bool)
        others[7], others[:, 9] = False, False
        assert (became[others] > 0).all()


def test_moments_over_seventy_decades_keep_their_floor() -> None:
    rng = np.random.default_rng(2)
    v = np.exp2(rng.uniform(-110, 90, (64, 128))).astype(np.float32)
    for settings in (RANK1, LOG):
        made = second(v, settings)
        if made is not None:
            became = values_of(decoded(made, SCRATCH, None))
            assert became.min() >= v.min()


def test_single_row_uses_a_log_grid() -> None:
    v = trained(1, 4096).second
    made = second(v, RANK1)
    assert made is not None
    became = values_of(decoded(made, SCRATCH, None))
    assert np.abs(0.5 * np.log2(became / v.reshape(-1))).max() <= 0.51


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1e-9])
def test_invalid_second_moments_are_left_exact(bad: float) -> None:
    v = trained(64, 64).second
    v[10, 10] = bad
    assert second(v, RANK1) is None
    assert second(v, LOG) is None
    m = trained(64, 64).first
    assert first(m, v, stored(trained(64, 64).second), FirstMomentSettings()) is None


@pytest.mark.parametrize("values", [np.zeros((64, 64)), np.zeros((0, 64))])
def test_incompressible_second_moments_are_left_exact(values: np.ndarray) -> None:
    assert second(values, RANK1) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [0.1, 0.5])
def test_first_moments_keep_their_direction(step: float, dtype: str) -> None:
    state = trained(128, 256)
    scale = 1e4 if dtype == "float16" else 1.0
    m, v = state.first * scale, state.second * scale**2
    made_v = second(v, RANK1, dtype)
    assert made_v is not None
    made = first(m, v, made_v.reconstruction, FirstMomentSettings(step=step), dtype)
    assert made is not None
    became = values_of(decoded(made, SCRATCH, made_v.reconstruction), dtype)
    v_became = values_of(made_v.reconstruction, dtype)
    m_given, v_given = (values_of(stored(side, dtype), dtype) for side in (m, v))
    before, after = m_given / np.sqrt(v_given), became / np.sqrt(v_became)
    tolerance = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-2}[dtype]
    assert (np.abs(after - before) <= step * 1.01 + tolerance * np.abs(before)).all()
    assert made.errors.max_update_ratio == pytest.approx(np.abs(after).max(), rel=tolerance + 1e-5)


def test_ternary_first_moments_need_under_1_5_bits() -> None:
    state = trained(256, 256)
    v = stored(state.second)
    made = first(state.first, state.second, v, FirstMomentSettings(form="ternary", step=0.3))
    assert made is not None
    quotients = values_of(decoded(made, SCRATCH, v)) / np.sqrt(state.second.reshape(-1))
    assert np.unique(np.round(quotients, 4)).size == 3
    assert 8 * made.encoded.nbytes / v.nbytes * 4 < 1.6
    kept = np.abs(state.first / np.sqrt(state.second)) > 0.18
    assert made.errors.nonzero_count == pytest.approx(np.count_nonzero(kept), abs=5)


def test_a_dropped_first_moment_is_zeros_without_a_base() -> None:
    state = trained(64, 64)
    made = first(state.first, state.second, stored(state.second), FirstMomentSettings(form="dropped"))
    assert made is not None
    assert not any(made.reconstruction)
    assert chunk_codec.base_nbytes(made.encoded.steps, made.reconstruction.nbytes) == 0
    decoded(made, SCRATCH, None)
    assert made.errors.max_abs == np.abs(state.first).max()
    assert made.errors.nonzero_count == 0
    state.first[0, 0] = np.nan
    assert first(state.first, state.second, stored(state.second), FirstMomentSettings(form="dropped")) is None


def test_quotients_are_clipped_or_dropped() -> None:
    state = trained(64, 64)
    state.second[0, :8] = 0.0
    state.first[0, :4] = 1.0
    state.first[0, 4:8] = 0.0
    made_v = second(state.second, RANK1)
    assert made_v is not None
    settings = FirstMomentSettings(step=0.5, clip=3.0)
    made = first(state.first, state.second, made_v.reconstruction, settings)
    assert made is not None
    quotients = values_of(made.reconstruction) / np.sqrt(values_of(made_v.reconstruction))
    assert np.abs(quotients).max() <= 3.0 * 1.001
    assert made.errors.max_update_ratio <= 3.0 * 1.001
    # Without a second moment there is no direction.
    assert not quotients[:8].any()


def test_zero_first_moments_are_left_exact() -> None:
    v = trained(64, 64).second
    for form in ("grid", "ternary"):
        assert first(np.zeros_like(v), v, stored(v), FirstMomentSettings(form=form)) is None


def test_numpy_and_native_write_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained(64, 300)
    base = stored(state.second)

    def results() -> list[tuple[bytes, bytes, object]]:
        calls = [
            lambda: second(state.second, RANK1),
            lambda: second(state.second, LOG),
            lambda: first(state.first, state.second, base, FirstMomentSettings(step=0.2)),
            lambda: first(state.first, state.second, base, FirstMomentSettings(form="ternary", step=0.2)),
        ]
        found = []
        for call in calls:
            made = call()
            assert made is not None
            found.append((bytes(payload_of(made)), bytes(made.reconstruction), made.errors))
        return found

    expected = results()
    for loop in kernels.IMPLEMENTATION:
        monkeypatch.setattr(kernels, loop, getattr(reference, loop))
    assert results() == expected
