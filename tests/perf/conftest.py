"""The bench in small: these tests check that it measures what it says, not how fast anything is."""

from __future__ import annotations

from functools import partial

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_of_torch(monkeypatch):
    """Keep torch on one thread: its threads spin while they wait for each other, for seconds on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with monkeypatch.context() as patches:
        patches.setattr(torch, "set_num_threads", lambda count: None)
        yield
    torch.set_num_threads(before)


@pytest.fixture
def small_bench(monkeypatch):
    """Let cases of the bench do each thing once and briefly, by the constants that say how often and how long."""
    from bench import cases_gpu, cases_stages, cases_stall, cases_training, floor, measure, spinning
    from bench.spinning import Reading, Spinning

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
    brief = [partial(Spinning, 0.02), partial(Reading, 10**8, 1 << 26), partial(Reading, 10**8, 1 << 18)]
    monkeypatch.setattr(cases_training, "COMPANIONS", dict(zip(cases_training.COMPANIONS, brief, strict=True)))
    # What gives way to everything else starves where other tests are at work.
    monkeypatch.setattr(cases_stall, "NICENESSES", (0, 5))
    for module in (cases_stages, cases_stall, floor, spinning):
        monkeypatch.setattr(module, "NICENESS", 0)
    return monkeypatch
