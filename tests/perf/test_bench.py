"""The bench reports what it ran: cases, statistics, entropies, round trips, and the trained run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    # The bench is not part of the package; add the repository root to the path, as `python -m bench.run` does.
    sys.path.append(str(ROOT))

from bench import (  # noqa: E402
    cases_gpu,
    ckstore_coder,
    coders,
    entropy,
    histories,
    measure,
    peers,
    run,
    table,
    table_coding,
    training,
)
from bench.cases import CASES  # noqa: E402
from bench.measure import Result, Sample  # noqa: E402
from examples.train_gpt import Settings  # noqa: E402

EDGES = [0, 1 << 31, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0xFFFFFFFF, 0x3F800000]


def words(seed: int, count: int = 40_000) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32).view(np.uint32)


def pair(width: int) -> coders.Piece:
    older, steps = words(1), np.random.default_rng(2).integers(-300, 300, 40_000).astype(np.uint32)
    newer = older + steps
    if width == 2:
        older, newer = ((values >> np.uint32(16)).astype(np.uint16) for values in (older, newer))
    return coders.Piece("model/w", "model", newer, older)


def test_every_case_has_docstring_and_documentation():
    document = (ROOT / "docs" / "BENCH.md").read_text()
    for name, case in CASES.items():
        assert (case.__doc__ or "").endswith("."), name
        parts = name.split("_")
        patterns = [name, *("_".join(parts[:length]) + "_*" for length in range(1, len(parts)))]
        assert any(f"`{pattern}`" in document for pattern in patterns), f"{name} is not in docs/BENCH.md"


def test_case_patterns_select_once_and_refuse_unknown():
    assert run.names_of_cases(None) == list(CASES)
    assert run.names_of_cases("codec_full_*,codec_full_fp32") == ["codec_full_fp32", "codec_full_bf16"]
    with pytest.raises(LookupError, match="codec_of_nobody"):
        run.names_of_cases("codec_of_nobody")


@pytest.mark.parametrize(("is_higher_better", "expected"), [(True, [2.0, 1.5]), (False, [0.5, 2 / 3])])
def test_ratio_is_within_round_and_above_one_is_better(is_higher_better, expected):
    result = Result("case", "GB/s", is_higher_better)
    result.samples = {"mine": [Sample(4.0), Sample(3.0)], "theirs": [Sample(2.0), Sample(2.0)]}
    result.add_ratios(["mine"], ["theirs", "absent", "mine"])
    assert result.ratios == {"mine / theirs": pytest.approx(expected)}


def test_rounds_rotate_and_record_failures(monkeypatch):
    monkeypatch.setattr(measure.machine, "busy_cores", lambda: 0.0)
    order = []

    def participant(name):
        def work():
            order.append(name)
            if name == "broken" and len(order) > 3:
                raise ValueError("no longer")
            return Sample(float(len(order)), {"ratio": 2.0})

        return work

    result = measure.interleave(
        Result("case", "s", is_higher_better=False), {name: participant(name) for name in ("a", "broken", "b")}, 3
    )
    assert order == ["a", "broken", "b", "broken", "b", "a", "b", "a"]
    assert list(result.samples) == ["a", "b"]
    assert result.unusable == {"broken": "ValueError: no longer"}
    assert result.median("a") == 6.0
    assert result.fact("a", "ratio") == 2.0
    assert result.fact("a", "absent") is None


@pytest.mark.parametrize("dtype", [np.uint32, np.uint16])
def test_differences_are_exact_for_every_pattern(dtype):
    shift = dtype(32 - dtype(0).itemsize * 8) if dtype is np.uint16 else dtype(0)
    new = np.concatenate([np.array(EDGES, np.uint32), words(3)])
    old = np.concatenate([np.array(EDGES[::-1], np.uint32), words(4)])
    if dtype is np.uint16:
        new, old = ((values >> np.uint32(shift)).astype(dtype) for values in (new, old))
    found = entropy.differences(new, old)
    steps = (found >> dtype(1)) ^ (dtype(0) - (found & dtype(1)))
    assert np.array_equal(entropy.out_of_order(steps + entropy.in_order(old)), new)


def test_order_of_patterns_is_the_order_of_floats():
    values = np.sort(words(5).view(np.float32))
    numbers = entropy.in_order(values.view(np.uint32)).astype(np.int64)
    assert np.all(np.diff(numbers)[np.diff(values) > 0] > 0)


def test_plane_bits_of_known_planes():
    assert entropy.plane_bits(np.full(100, 7, np.uint32)) == 0.0
    assert entropy.plane_bits(np.arange(1 << 16, dtype=np.uint16)) == pytest.approx(16.0)
    assert entropy.plane_bits(np.array([0, 1, 2, 3] * 50, np.uint32)) == pytest.approx(2.0)
    assert entropy.plane_bits(np.array([], np.uint32)) == 0.0


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("with_base", [False, True])
def test_coder_round_trip(width, with_base):
    piece = pair(width)
    if not with_base:
        piece = coders.Piece(piece.path, piece.role, piece.words)
    arena = ckstore_coder.Arena(piece.words.nbytes)
    for coder in (ckstore_coder.memcpy(arena), ckstore_coder.ckstore(arena), peers.bitx(), peers.zstd(3)):
        before = piece.words.copy()
        timing = coders.measure(coder, [piece, piece], [coder.form_for(piece)] * 2)
        assert timing.plain_nbytes == 2 * piece.words.nbytes
        assert timing.by_role == {"model": [timing.plain_nbytes, timing.stored_nbytes]}
        assert np.array_equal(piece.words, before)
        if coder.name == "ckstore":
            assert timing.stored_nbytes / 2 < piece.bound * 1.05 + 1024
            assert timing.facts()["ratio"] == pytest.approx(timing.plain_nbytes / timing.stored_nbytes)


def test_coder_that_loses_a_bit_is_detected():
    def decode(stored, base, destination):
        destination[:] = stored
        destination[7] ^= 1
        return destination

    broken = coders.Coder("broken", coders.Form(lambda given, base: given.copy(), decode))
    piece = coders.Piece("model/w", "model", words(6))
    with pytest.raises(AssertionError, match="broken brings back other values of model/w"):
        coders.measure(broken, [piece], [broken.form_for(piece)])


def test_small_tensors_of_a_role_are_joined():
    large = np.zeros(1 << 15, np.float32)
    arrays = {"model/a": large, "model/b": large[:10], "exp_avg/b": large[:10], "model/c": large[:5]}
    pieces = coders.pieces_of(arrays, arrays)
    assert [(piece.role, piece.words.size) for piece in pieces] == [("model", 1 << 15), ("model", 15), ("exp_avg", 10)]
    assert all(piece.base is not None and piece.base.size == piece.words.size for piece in pieces)


def test_trained_run_is_reproducible(tmp_path):
    settings = Settings(layers=1, width=32, heads=2, window=16, batch=1, dropout=0.0, noise=0.0, corpus_nbytes=100_000)
    plan = training.Plan("run", settings, first=2, gap=2, count=2, pair_gaps=(1,))
    lines: list[str] = []
    first = training.ensure(tmp_path / "a", plan, log=lines.append)
    again = training.ensure(tmp_path / "b", plan, log=lines.append)
    assert plan.kept == [2, 3, 4]
    for step in plan.kept:
        left, right = first.step(step), again.step(step)
        assert left.keys() == right.keys()
        assert all(np.array_equal(left[path], right[path]) for path in left)
    assert not np.array_equal(first.step(2)["model/wpe.weight"], first.step(3)["model/wpe.weight"])
    lines.clear()
    assert training.ensure(tmp_path / "a", plan, log=lines.append) == first
    assert lines == []
    bases = [{path: state[path] for path in first.rl()[0]} for state in first.lora()]
    assert all(np.array_equal(bases[0][path], base[path]) for base in bases for path in base)
    state = histories.state_of(histories.mixed(first.step(2)), 2)
    master = state["optimizer"]["state"][0]["master"]
    assert state["model"]["wte.weight"].equal(master.to(state["model"]["wte.weight"].dtype))


def test_tables_show_sizes_speeds_and_missing_tools():
    def row(speed, **facts):
        return {"median": speed, "samples": [{"value": speed, **facts}]}

    codec = {
        "setting": {"bound_ratio": 1.22},
        "participants": {
            "zipnn: encode": row(0.5, ratio=1.21),
            "zipnn: decode": row(1.7, ratio=1.21),
            "ckstore: encode": row(4.0, ratio=1.2149),
            "ckstore: decode": row(6.0, ratio=1.2149),
        },
        "not_available": {"openzl": "ImportError: no"},
        "ratios": {},
    }
    history = {
        "setting": {"checkpoints": 20},
        "participants": {"ckstore": row(0.781, later=0.78), "z4ai": row(0.79, later=0.785, bounded=0.8)},
        "not_available": {},
        "ratios": {},
    }
    lines = table_coding.tables({"codec_full_fp32": codec, "history_fp32": history, "history_rl": history})
    assert "| **ckstore** | 1.215 · 4.00 / 6.00 |" in lines
    assert lines.index("| **ckstore** | 1.215 · 4.00 / 6.00 |") < lines.index("| zipnn | 1.210 · 0.50 / 1.70 |")
    assert "| openzl | not available: ImportError: no |" in lines
    assert "| z4ai | 79.0% (80.0%) | 78.50% |" in lines
    assert table_coding.tables({}) == []


def record_of(case, processor, *, busy=0.0, **medians):
    machine = {"processor": processor, "cores": 2, "file_system": "ext4", "system": "Linux 6"}
    participants = {name.replace("_", " "): {"median": value} for name, value in medians.items()}
    setting = {"busy_cores_before": busy, "state_nbytes": 2e9, "tensors": 294}
    return {"case": case, "machine": machine, "participants": participants, "setting": setting, "not_available": {}}


def test_table_names_machines_and_disturbed_records():
    records = {
        "commit_durable": record_of("commit_durable", "old", device=3.0, ckstore_none=2.5, DCP=1.0),
        "stall_blocking": record_of("stall_blocking", "new", busy=1.5, ckstore_none=0.1)
        | {"not_available": {"X": "no"}},
        "gc_plan": record_of("gc_plan", "new", busy=0.5) | {"not_available": {"Y": "no"}},
    }
    lines = table.make_table(records)
    assert "| **ckstore**, compression none | 2.50 |  | 0.10 |  |" in lines
    assert "| X | not available: no | | | |" in lines
    assert "| Y |" not in lines
    assert "commit_durable: old, 2 cores, ext4, Linux 6. stall_blocking: new, 2 cores, ext4, Linux 6." in lines
    assert "Disturbed by other programs, do not quote: stall_blocking." in lines
    assert table.make_table({}).count("No measurements yet") == 1


@pytest.mark.parametrize("case", ["stall_gpu_blocking", "stall_gpu_guarded"])
def test_gpu_case_without_gpu_is_skipped_with_reason(case, monkeypatch, capsys):
    bench = SimpleNamespace(rounds=1, nbytes=1)
    monkeypatch.setattr(cases_gpu, "no_gpu_reason", lambda: "there is no CUDA GPU here")
    result = CASES[case](bench)
    assert result.unusable == {"GPU": "there is no CUDA GPU here"}
    assert not result.samples
    assert f"{case} is left out: there is no CUDA GPU here" in capsys.readouterr().err
