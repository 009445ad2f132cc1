"""The cases of journals store real gradients, compare them with a right floor, and count words that differ."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("zstandard")

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    # The bench is not part of the package; add the repository root to the path, as `python -m bench.run` does.
    sys.path.append(str(ROOT))

from bench import cases_journal, journal_runs, table_cases  # noqa: E402
from bench.workbench import Bench  # noqa: E402


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(cases_journal.machine, "busy_cores", lambda: 0.0)
    threads = torch.get_num_threads()
    yield Bench(tmp_path, tmp_path, 0, 1, is_small=True, count=4, tools=None)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def test_the_floor_takes_bf16_numbers_as_such_and_zero_rows_as_nothing():
    numbers = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    narrow = (numbers.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert cases_journal.floor_nbytes(narrow) < 0.7 * cases_journal.floor_nbytes(numbers)
    sparse = narrow.copy()
    sparse[::2] = 0
    assert cases_journal.floor_nbytes(sparse) == cases_journal.floor_nbytes(np.ascontiguousarray(narrow[1::2]))


def test_each_row_compares_the_journal_with_the_same_gradients(bench, monkeypatch):
    rows = {name: cases_journal.ROWS[name] for name in ("bf16", "fp32", "bf16, MoE, 16 experts")}
    monkeypatch.setattr(cases_journal, "ROWS", rows)
    for name, value in (("HISTORY", 3), ("STEPS", 1), ("WARM_STEPS", 1), ("NEW_WARM_STEPS", 1)):
        monkeypatch.setattr(cases_journal, name, value)
    result = cases_journal.journal_bits(bench)
    assert set(result.unusable) <= {cases_journal.ZIPNN}
    for row in (*rows, cases_journal.LARGE_ROW):
        ways = {way: result.median(f"{row}: {way}") for way in ("journal", "floor", "deltas", cases_journal.ZSTD)}
        assert ways["floor"] < ways["journal"] < ways["deltas"]
        assert ways["floor"] < ways[cases_journal.ZSTD]
    assert result.median("bf16: journal") < 0.6 * result.median("fp32: journal")
    assert result.median("bf16, MoE, 16 experts: journal") < 0.6 * result.median("bf16: journal")
    cells = table_cases.CELLS["journal_bits"][1](result.to_record(bench.folder))
    assert cells["bf16: journal"].endswith("x")


def test_steps_and_restores_are_compared_with_their_floors(bench, monkeypatch):
    monkeypatch.setattr(cases_journal, "COST_STEPS", 1)
    monkeypatch.setattr(cases_journal, "DEPTHS", (1, 2))
    cost = cases_journal.journal_step(bench)
    assert not cost.unusable
    assert sum("times the copy of the gradients" in note for note in cost.notes) == 2
    restore = cases_journal.journal_restore(bench)
    assert not restore.unusable
    assert sum("optimizer steps for each step" in note for note in restore.notes) == 2


def test_words_that_differ_are_counted(bench, monkeypatch):
    monkeypatch.setattr(cases_journal, "REPLAYED", {"SGD": (journal_runs.Kind(optimizer="SGD"), {})})
    monkeypatch.setattr(cases_journal, "ENVIRONMENTS", {"here": {}, "altered": {}})

    def replay(folder, steps, change, *, is_small):
        answers = cases_journal.replay_all(folder, steps, is_small=is_small)
        expected = folder / "SGD" / "expected.npz"
        with np.load(expected) as stored:
            words = [stored[name] for name in stored.files]
        words[0][:3] ^= 1
        np.savez(expected, *words)
        return answers

    monkeypatch.setattr(cases_journal, "_in_child", replay)
    result = cases_journal.journal_replay(bench)
    assert result.median("SGD, here") == 0
    assert result.median("SGD, altered") == 3
