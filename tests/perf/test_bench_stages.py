"""Protects the measurement of single stages of a commit: each stage does what its name says."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

from bench import background, cases_stages, stage_process
from bench.cases import CASES
from bench.measure import Sample
from bench.workbench import Bench

from ckstore.format.wire import xxh3_64


@pytest.fixture(scope="module")
def chunks() -> stage_process.Chunks:
    return stage_process.Chunks(2)


def test_chunks_differ_from_bases_and_compress(chunks):
    for plain, base, whole, residual in zip(chunks._plain, chunks._base, chunks._whole, chunks._residual, strict=True):
        assert plain != base
        assert len(residual.payload) < len(whole.payload) < stage_process.CHUNK_NBYTES


@pytest.mark.parametrize("what", ["decode", "add to a base"])
def test_decoding_stage_reads_whole_chunk(what, chunks, monkeypatch):
    seen = []

    class Checksum:
        def update(self, piece):
            seen.append(bytes(piece))

    monkeypatch.setattr(stage_process, "new_xxh3", Checksum)
    chunks.stages()[what](1)
    assert [xxh3_64(each) for each in seen] == [xxh3_64(chunks._plain[1])]


def test_copies_rotate_through_blocks(chunks):
    chunks._blocks[:] = bytes(len(chunks._blocks))
    for number in (0, 1):
        chunks.stages()["copy into blocks"](number)
        payload = chunks._whole[number].payload
        begin = number * stage_process.CHUNK_NBYTES
        assert chunks._blocks[begin : begin + len(payload)] == payload


def test_helper_reports_chunks_and_has_low_priority():
    with cases_stages._helper(1) as helper:
        assert helper.stages == list(stage_process.Chunks(1).stages())
        assert os.getpriority(os.PRIO_PROCESS, helper._process.pid) == cases_stages.NICENESS
        assert helper.do("hash")[0] == 0
        # Longer than what is asserted: the helper begins to count a little later.
        time.sleep(0.3)
        chunks, seconds = helper.do(stage_process.REST)
        assert chunks > 0
        assert seconds >= 0.2
        assert helper.do(stage_process.REST)[0] == 0


def test_step_is_compared_with_neighbors(monkeypatch):
    class Helper:
        def do(self, stage):
            return (0, 0.0) if stage == "hash" else (500, 2.0)

    seconds = iter([1.0, 1.2, 1.0, 1.5, 2.0, 1.0, 1.0])
    monkeypatch.setattr(cases_stages, "_step_seconds", lambda loop: next(seconds))
    sample = cases_stages._lost(background.Loop(3_000_000, tokens=16), Helper(), "hash")
    assert isinstance(sample, Sample)
    assert np.allclose(sample.facts["lost"], [0.2, 0.0, 1.0 / 1.5 - 1])
    assert sample.value == 0.0
    assert sample.facts["ms_a_chunk"] == pytest.approx(4.0)


@pytest.mark.deep(parts=4)
@pytest.mark.parametrize("tools", [None, ["hash", "DCP"]], ids=["all stages", "a chosen stage"])
def test_case_measures_selected_stages(tools, tmp_path, small_bench):
    bench = Bench(tmp_path, tmp_path, 2_000_000, rounds=1, is_small=True, count=8, tools=tools)
    result = CASES["stages_beside"](bench)
    assert result.unusable == {}
    assert list(result.samples) == ["nothing", *(["hash"] if tools else stage_process.Chunks(1).stages())]
    assert all("ms_a_chunk" in samples[0].facts for name, samples in result.samples.items() if name != "nothing")
