"""The bench of many ranks counts what is really stored and read, and its ranks save and load the right state."""

from __future__ import annotations

import contextlib
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")
pytest.importorskip("torch.testing._internal.distributed.fake_pg")

import numpy as np
from torch.distributed.tensor import Replicate, Shard

import ckstore

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    # The bench is not part of the package; add the repository root to the path, as `python -m bench.run` does.
    sys.path.append(str(ROOT))

from bench import cases_compare, cases_rank_saves, cases_reshard, rank_group, rank_plans, table_cases  # noqa: E402
from bench.measure import Result  # noqa: E402
from bench.played_ranks import PlayedRanks  # noqa: E402
from bench.rank_group import RankGroup  # noqa: E402
from bench.rank_layouts import RankLayout, Sharded  # noqa: E402
from bench.workbench import Bench  # noqa: E402

ROWS, COLUMNS = 5000, 1024
"""A matrix of 20 MB: five chunks of 4 MiB, that no number of ranks below six divides at their borders."""


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path, tmp_path, 2_000_000, 1, is_small=True, count=4, tools=None)


def matrix_on(world):
    return RankLayout(f"FSDP{world}", world, [Sharded("w", (ROWS, COLUMNS), (Shard(0),), (world,))])


@pytest.mark.parametrize(("before", "after"), [(2, 3), (1, 2)])
def test_planned_share_is_what_a_commit_writes_again(before, after, tmp_path):
    planned = cases_reshard._planned_again((matrix_on(before), matrix_on(after))).value
    ckstore.open(tmp_path / "store").close()
    arrays = {"w": np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32)}
    PlayedRanks(tmp_path / "store", before).commit(arrays, 1)
    receipt = PlayedRanks(tmp_path / "store", after).commit(arrays, 2)
    assert 0.1 < planned < 0.9
    assert receipt.bytes_written / receipt.bytes_state == pytest.approx(planned, rel=0.01)
    with ckstore.open(tmp_path / "store") as store:
        assert np.array_equal(store.restore()["w"], arrays["w"])


def test_every_rank_reads_what_it_needs_and_rarely_more():
    saved, wanted = matrix_on(2), matrix_on(3)
    reads = rank_plans.read_by(rank_plans.manifest_of(saved), wanted)
    assert sum(read.needed for read in reads) == saved.nbytes
    assert all(read.needed <= read.alone <= read.needed + 2 * (4 << 20) for read in reads)
    # What two ranks need is read by one of them, and headers of frames are read, too.
    assert saved.nbytes <= sum(read.together for read in reads) <= saved.nbytes * 1.001 + 3 * 4096
    # Rank 1 of 3 needs parts of both shards; the others of one each.
    assert rank_plans.read_by_dcp(saved, wanted) == (2 * saved.nbytes, saved.nbytes)


def test_layouts_divide_tensors_as_their_names_say():
    layouts = [rank_plans.fsdp(4, 1), rank_plans.tensor_parallel(4, 1), rank_plans.fsdp_and_tensor_parallel(2, 2, 1)]
    placements = [{tensor.name: tensor.placements for tensor in layout.tensors} for layout in layouts]
    assert placements[0]["0.down"] == (Shard(0),)
    assert placements[1]["0.down"] == (Shard(1),)
    assert placements[1]["0.norm1"] == (Replicate(),)
    assert placements[2]["0.down"] == (Shard(0), Shard(1))
    for layout in layouts:
        # Its own check is that every byte is written once.
        assert len(rank_plans.written_by(layout)) == layout.world


@pytest.mark.parametrize("case", ["ranks_reshard", "ranks_identity"])
def test_counting_cases_have_a_sample_for_each_change_and_way(case, bench):
    result = cases_reshard.CASES[case](bench)
    assert not result.unusable
    assert len(result.samples) == (4 if case == "ranks_reshard" else 2)
    assert all(samples[0].value > 0 for samples in result.samples.values())


def test_comparing_case_counts_the_bytes_that_are_hashed_only_to_be_compared(bench):
    result = cases_compare.ranks_compare(bench)
    assert not result.unusable
    compared = {name: result.fact(name, "compared_gb") * 1e9 for name in result.samples}
    alone, full, sampled, none = compared.values()
    # Of four copies one is written, and hashed for that.
    assert full == pytest.approx(3 * result.setting["state_nbytes"], rel=0.001)
    assert 0 < sampled < full / 16
    assert alone == none == 0
    text = table_cases.make_tables([result.to_record(bench.folder)], ["ranks_compare"])
    assert "| 4 ranks: compared in full |" in text
    assert "GB |" in text


def durable_saves_and_loads(name, bench, monkeypatch):
    monkeypatch.setattr(cases_rank_saves, "HSDP", (2, 1))
    monkeypatch.setattr(cases_rank_saves, "MORE", (2,))
    monkeypatch.setattr(cases_rank_saves, "FEWER", (1,))
    result = cases_rank_saves.CASES[name](bench)
    assert set(result.unusable) <= {"torch_checkpointing"}
    assert {who.rpartition(": ")[2] for who in result.samples} >= {"DCP", "ckstore none", "ckstore fast"}
    for samples in result.samples.values():
        assert samples[0].facts["processor"] > 0
        # Replicas are written once; metadata is a large part of a small state.
        assert samples[0].facts.get("bytes_per_unique", 1.0) < 1.5


def saves_in_the_background(name, bench, monkeypatch):
    monkeypatch.setattr(cases_rank_saves, "FSDP", (2,))
    result = cases_rank_saves.CASES[name](bench)
    assert not result.unusable
    assert len(result.samples) == 6
    assert all(samples[0].value <= samples[0].facts["durable"] for samples in result.samples.values())
    assert sum("times the stall of one rank" in note for note in result.notes) == 2


def operations_of_one_rank(name, bench, monkeypatch):
    # A saver with low priority would starve while other tests run.
    monkeypatch.setattr(ckstore, "Policy", partial(ckstore.Policy, saver_nice=0))
    monkeypatch.setattr(cases_rank_saves, "VARIANTS", ("fast",))
    result = cases_rank_saves.CASES[name](bench)
    assert not result.unusable
    assert len(result.samples) == 6
    assert len(result.ratios) == len(result.notes) - len([note for note in result.notes if "not alone" in note]) == 3


RUNS = {
    "ranks_save": durable_saves_and_loads,
    "ranks_restore": durable_saves_and_loads,
    "ranks_async": saves_in_the_background,
    "ranks_one": operations_of_one_rank,
}


@pytest.mark.deep(parts=16)
@pytest.mark.parametrize("name", RUNS)
def test_case_has_its_samples_and_leaves_no_process(name, bench, monkeypatch):
    # All processes of the case inherit it.
    monkeypatch.setenv(MARK, str(bench.folder))
    RUNS[name](name, bench, monkeypatch)
    deadline = time.monotonic() + 30
    while left := marked_processes(f"{MARK}={bench.folder}"):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_every_case_with_processes_is_run():
    assert RUNS.keys() == cases_rank_saves.CASES.keys()


MARK = "CKSTORE_TEST_OF_THE_BENCH"


def marked_processes(mark):
    """Return the command lines of processes whose environment has a variable: the variable and its value as text."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


FAILING_RANK = """
import json, os, sys

for line in sys.stdin:
    is_failing = json.loads(line)["do"] == "fail"
    print(json.dumps({"error": "no such place"} if is_failing else {"facts": {"pid": os.getpid()}}), flush=True)
"""


def test_ranks_start_again_after_one_that_failed(bench, monkeypatch):
    monkeypatch.setattr(rank_group, "PROGRAM", ("-c", FAILING_RANK))
    with RankGroup(bench, (2, 1)) as ranks:
        first = [facts["pid"] for facts in ranks.call("make")]
        with pytest.raises(RuntimeError, match=r"rank [01]: no such place"):
            ranks.call("fail")
        second = [facts["pid"] for facts in ranks.call("make")]
    assert len({*first, *second}) == 4


@pytest.mark.deep(parts=16)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_that_cannot_load_start_again(bench, world):
    with RankGroup(bench, (world,)) as ranks:
        with pytest.raises(RuntimeError, match="CheckpointException"):
            ranks.call("load_dcp", place=str(bench.folder / "no_such_place"))
        assert ranks.call("make")[0]["nbytes"] > 0


def test_tables_show_bytes_and_waits():
    record = {
        "case": "ranks_save",
        "date": "20260101T000000Z",
        "unit": "s",
        "setting": {},
        "machine": {"processor": "P", "cores": 2},
        "participants": {"DCP": {"median": 2.0, "samples": [{"value": 2.0, "bytes_per_unique": 1.016}]}},
        "not_available": {},
    }
    assert "| DCP | 2; 1.016 |" in table_cases.make_tables([record], ["ranks_save"])
    samples = {"median": 0.1, "samples": [{"value": 0.1, "step_wait": 0.5}]}
    record |= {"case": "ranks_async", "participants": {"ckstore guarded, 4 ranks": samples, "DCP": samples}}
    text = table_cases.make_tables([record], ["ranks_async"])
    assert "| ckstore guarded, 4 ranks | 0.1; 0.5 at the step |" in text
    assert "| DCP | 0.1 |" in text


def test_a_participant_that_fails_is_recorded(bench):
    result = Result("ranks_save", "s", is_higher_better=False)

    def fail():
        raise RuntimeError("rank 1: no space")

    cases_rank_saves._run(bench, result, {"DCP": fail}, {}, bench.folder / "saved")
    assert result.unusable == {"DCP": "RuntimeError: rank 1: no space"}
    assert not result.samples
