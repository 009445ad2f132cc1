"""Protects the ExCP baseline in ckstore's frames: it prunes and clusters as published."""

from __future__ import annotations

import numpy as np
import pytest
from bench import excp, resume_baselines
from bench.excp import Pruning, clusters_of

from ckstore.codec.byte_codecs import Scratch
from ckstore.quant.chunk_codec import ChunkShape
from support.trained_chunks import decoded, room_for, stored, trained, values_of

SCRATCH = Scratch(1 << 20)


def assigned(values: np.ndarray, count: int, threshold: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    clusters = clusters_of(values.astype(np.float32), threshold, count)
    symbols = np.searchsorted(clusters.bounds, values.astype(np.float32), side="right")
    return symbols, clusters.codebook[symbols]


def test_clusters_of_normal_values_are_near_optimal() -> None:
    values = np.random.default_rng(1).standard_normal(100_000)
    for count, best in ((4, 0.1175), (8, 0.0345), (16, 0.0095)):
        _, made = assigned(values, count)
        # Lloyd's own values for this distribution; the symbol of zero does not reduce the number of centroids.
        assert ((made - values) ** 2).mean() == pytest.approx(best, rel=0.08)


def test_clusters_prune_only_within_threshold() -> None:
    values = np.random.default_rng(2).standard_normal(10_000).astype(np.float32)
    for threshold in (0.0, 0.5, np.float32(values[17])):
        symbols, made = assigned(values, 15, abs(float(threshold)))
        assert ((made == 0) == (np.abs(values) <= abs(threshold))).all()
        assert np.unique(symbols).size <= 16


@pytest.mark.parametrize(
    "values", [[], [0.0], [1.0], [-1.0, 2.0], [3.0] * 10, [-3e38, 3e38], [1e-45, -1e-45, 0.0], [5.0, 5.0, -1.0]]
)
def test_few_values_are_their_own_clusters(values: list[float]) -> None:
    given = np.array(values, np.float32)
    _, made = assigned(given, 15)
    assert made.tolist() == pytest.approx(given.tolist(), rel=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_values_of_one_sign_get_all_clusters(sign: int) -> None:
    values = sign * np.random.default_rng(3).lognormal(0, 2, 10_000)
    symbols, made = assigned(values, 15)
    assert np.unique(symbols).size == 15
    assert (np.sign(made) == sign).all()


def test_large_moments_of_changed_weights_are_kept() -> None:
    state = trained(200, 200)
    plain, base, m, v = (stored(side) for side in (state.weight, state.before, state.first, state.second))
    shape, pruning = ChunkShape("float32", 200), Pruning(1e9, beta=1.0)
    made = excp.encode_weights(plain, base, shape, pruning, scratch=SCRATCH, reconstruction=room_for(plain))
    assert made is not None
    became = values_of(decoded(made, SCRATCH, base)).reshape(200, 200)
    change = state.weight - state.before
    threshold = 2.5 * np.median(np.abs(change))
    assert ((became != state.before) == (np.abs(change) > threshold))[np.abs(change) > 1e-9].mean() > 0.999
    assert np.unique((became - state.before)[became != state.before].round(9)).size > 10
    keep = pruning.kept_moments(state.first, became != state.before)
    expected = (became != state.before) & (np.abs(state.first) > np.abs(state.first).mean(dtype=float))
    assert (keep == expected).all()
    for part in (m, v):
        how = {"scratch": SCRATCH, "reconstruction": room_for(part)}
        moment = excp.encode_moment(part, keep.reshape(-1), shape, pruning, **how)
        assert moment is not None
        found = values_of(decoded(moment, SCRATCH, None)).reshape(200, 200)
        assert not found[~expected].any()
        assert np.unique(found).size <= 16
        assert moment.errors.nonzero_count == np.count_nonzero(found)
        given = values_of(part).reshape(200, 200)
        assert np.corrcoef(found[expected], given[expected])[0, 1] > 0.95


def test_threshold_depends_on_second_moment() -> None:
    state = trained(100, 100)
    plain, base = stored(state.weight), stored(state.before)
    kept = []
    for mean in (None, 1e-4, 1e-12):
        made = excp.encode_weights(
            *(plain, base, ChunkShape("float32", 100), Pruning(alpha=5e-3)),
            scratch=SCRATCH,
            reconstruction=room_for(plain),
            second_mean=mean,
        )
        assert made is not None
        kept.append(made.errors.nonzero_share)
    assert kept[0] == kept[2] < kept[1]


def test_fully_pruned_moments_are_zeros() -> None:
    v = stored(trained(64, 64).second)
    how = {"scratch": SCRATCH, "reconstruction": room_for(v)}
    made = excp.encode_moment(v, np.zeros(64 * 64, bool), ChunkShape("float32", 64), Pruning(), **how)
    assert made is not None
    assert not any(decoded(made, SCRATCH, None))


def test_frames_match_reference_implementation(monkeypatch) -> None:
    monkeypatch.setattr(resume_baselines, "CHUNK_NELEMENTS", 20_000)
    sides = trained(200, 200)
    state = {"w/a": sides.weight, "m/a": sides.first, "v/a": sides.second, "w/b": sides.weight[0]}
    state |= {"m/b": sides.first[0], "v/b": sides.second[0]}
    before = {**state, "w/a": sides.before}
    made, bits = resume_baselines.ExcpInFrames(Pruning(1e9))(state, before)
    again, ideal = resume_baselines.Excp()(state, before)
    for path in ("w/a", "m/a", "v/a"):
        error, expected = (np.square(each[path] - state[path]).sum() for each in (made, again))
        assert error == pytest.approx(expected, rel=0.1), path
    assert np.array_equal(made["w/b"], state["w/b"])
    assert bits["exact"] == ideal["exact"] > 0
    assert 0.5 * ideal["w"] < bits["w"] < 2 * ideal["w"]
