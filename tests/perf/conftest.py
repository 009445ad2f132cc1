"""Small runs of the bench. These tests check that it measures correctly, not how fast anything is."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ckstore
from support.memory_folders import tmp_path as tmp_path

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    # The bench is not part of the package; add the repository root to the path, as `python -m bench.run` does.
    sys.path.append(str(ROOT))

from bench import (  # noqa: E402
    cases_gpu,
    cases_stages,
    cases_stall,
    cases_training,
    load_processes,
    measure,
    minimal_commit,
)
from bench.load_processes import ComputeLoad, MemoryReadLoad  # noqa: E402


@pytest.fixture(autouse=True)
def quick_rounds(monkeypatch):
    """Leave out what only improves the precision of a measurement: torch threads and garbage collection.

    Torch threads spin while they wait for each other, and a collection visits all objects of earlier tests.
    """
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(measure, "gc", SimpleNamespace(collect=lambda: None))


@pytest.fixture
def small_bench(monkeypatch):
    """Make each case run briefly and once, by setting the constants for counts and durations."""
    monkeypatch.setattr(measure.machine, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(cases_stall, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(cases_stages, "STEPS", 1)
    for module, name in (
        (cases_training, "COMMITS"),
        (cases_training, "COMMITS_OF_LONG_STEPS"),
        (cases_training, "QUIET_STEPS"),
        (cases_gpu, "COMMITS"),
        (cases_stall, "RETURNS"),
    ):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(cases_training, "BATCHES", 2)
    brief = [
        partial(ComputeLoad, 0.02),
        partial(MemoryReadLoad, 10**8, 1 << 26),
        partial(MemoryReadLoad, 10**8, 1 << 18),
    ]
    monkeypatch.setattr(cases_training, "LOAD_PROCESSES", dict(zip(cases_training.LOAD_PROCESSES, brief, strict=True)))
    # A saver with low priority would starve while other tests run.
    monkeypatch.setattr(cases_stall, "NICENESSES", (0, 5))
    for module in (cases_stages, cases_stall, minimal_commit, load_processes):
        monkeypatch.setattr(module, "NICENESS", 0)
    monkeypatch.setattr(ckstore, "Policy", partial(ckstore.Policy, saver_nice=0))
    return monkeypatch
