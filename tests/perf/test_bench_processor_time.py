"""Protects the cases cpu_*: what is counted, the floors, every participant of a small run, and the tables."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from bench import cases_cpu, histories, processor_time, table, table_cases
from bench.processor_time import LOAD_FLOORS, SAVE_FLOORS, Meter
from bench.workbench import Bench

from ckstore.errors import CkstoreError

BUSY_SECONDS = 0.2


def be_busy(seconds=BUSY_SECONDS):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def bench_of(folder, tools=()):
    return Bench(folder, folder, 3_000_000, 1, True, 2, list(tools))


def test_meter_counts_this_thread():
    meter = Meter()
    be_busy()
    with meter.running():
        be_busy()
    assert BUSY_SECONDS * 0.9 < meter.seconds < meter.wall + 0.1
    sample = meter.sample(2.0, fact=3)
    assert sample.value == pytest.approx(meter.seconds / 2)
    assert sample.facts["user"] + sample.facts["system"] == pytest.approx(sample.value)
    assert sample.facts["fact"] == 3


def test_meter_does_not_count_sleep():
    meter = Meter()
    with meter.running():
        time.sleep(BUSY_SECONDS)
    assert meter.seconds < BUSY_SECONDS / 2
    assert meter.wall >= BUSY_SECONDS


@pytest.mark.parametrize("is_one_thread", [False, True])
def test_meter_counts_other_threads_or_only_its_own(is_one_thread):
    meter = Meter(is_one_thread=is_one_thread)
    with meter.running():
        thread = threading.Thread(target=be_busy)
        thread.start()
        thread.join()
    assert (meter.seconds > BUSY_SECONDS * 0.9) != is_one_thread


def test_meter_counts_ended_child():
    program = f"import time\nwhile time.process_time() < {BUSY_SECONDS}: pass"
    meter = Meter()
    with meter.running():
        subprocess.run([sys.executable, "-S", "-c", program], check=True)
    assert meter.seconds > BUSY_SECONDS * 0.9


def test_pieces_cover_every_byte_once():
    tensors = [torch.arange(1_500_000, dtype=torch.int32), torch.tensor(7.0), torch.empty(0)]
    pieces = list(processor_time.pieces_of(tensors))
    assert [(len(plain), width) for plain, width in pieces] == [(4 << 20, 4), (6_000_000 - (4 << 20), 4), (4, 4)]
    assert b"".join(plain for plain, _ in pieces) == b"".join(tensor.numpy().tobytes() for tensor in tensors)


@pytest.mark.parametrize("name", [*SAVE_FLOORS, *LOAD_FLOORS])
def test_floor_takes_time_and_keeps_the_state(name):
    state = [torch.randn(1_100_000), torch.randn(3)]
    before, into = [tensor.clone() for tensor in state], [torch.zeros_like(tensor) for tensor in state]
    for floors in (SAVE_FLOORS, LOAD_FLOORS):
        if name in floors:
            assert floors[name](state, into).seconds > 0
            assert histories.is_same(state, before)
    if name in LOAD_FLOORS:
        assert histories.is_same(state, into)


def test_coded_floor_decodes_what_it_encoded():
    coder, values = processor_time.FastCoder(), torch.randn(1_000_000)
    ((plain, width),) = processor_time.pieces_of([values])
    coder.encode((plain, width))
    decoded = memoryview(bytearray(plain.nbytes))
    coder.decode(decoded, width)
    assert decoded == plain
    assert len(coder._payload) < plain.nbytes


@pytest.mark.parametrize(("case", "floors"), [("cpu_commit", SAVE_FLOORS), ("cpu_restore", LOAD_FLOORS)])
def test_large_cases_measure_every_participant(case, floors, tmp_path, small_bench):
    result = cases_cpu.CASES[case](bench_of(tmp_path, ["torch.save"]))
    assert list(result.samples) == [*floors, "torch.save", "ckstore none", "ckstore fast", "ckstore best"]
    assert not result.unusable
    assert all(sample.value > 0 for samples in result.samples.values() for sample in samples)
    assert "ckstore fast / torch.save" in result.ratios
    assert not list(tmp_path.iterdir())


def test_load_of_other_values_is_refused(tmp_path, small_bench):
    small_bench.setattr(cases_cpu, "_restore", lambda place, compression, into: into)
    result = cases_cpu.cpu_restore(bench_of(tmp_path))
    reason = "AssertionError: what was loaded is not what was saved"
    assert result.unusable == {f"ckstore {name}": reason for name in ("none", "fast", "best")}


def test_many_tensors_are_measured(tmp_path, small_bench):
    small_bench.setattr(cases_cpu, "MANY_TENSORS_SMALL", {"20 x 64 B": (20, 64)})
    result = cases_cpu.cpu_many_tensors(bench_of(tmp_path, ["torch.save"]))
    works = ("save: ", "load: ", "return: ")
    tools = ("torch.save", "torch.save", "clone, then torch.save on a thread")
    expected = [f"20 x 64 B, {work}{tool}" for work, tool in zip(works, tools, strict=True)]
    mine = [f"20 x 64 B, {work}ckstore" for work in works]
    assert list(result.samples) == expected + mine
    assert not result.unusable
    assert result.samples["20 x 64 B, save: ckstore"][0].facts["manifest_bytes"] > 1
    # A save is compared with saves only.
    assert list(result.ratios) == [f"{first} / {second}" for first, second in zip(mine, expected, strict=True)]


def test_many_tensors_without_ckstore_shows_reason(tmp_path, small_bench):
    def fail(*_, **__):
        raise CkstoreError("no store here")

    small_bench.setattr("bench.workbench.open_store", fail)
    small_bench.setattr(cases_cpu, "MANY_TENSORS_SMALL", {"20 x 64 B": (20, 64)})
    result = cases_cpu.cpu_many_tensors(bench_of(tmp_path, ["torch.save"]))
    assert list(result.unusable) == ["ckstore"]
    assert len(result.samples) == 3


def test_short_commands_are_measured(tmp_path, small_bench):
    small_bench.setattr(cases_cpu, "SHORT_COMMANDS", (("ls",), ("ls", "--json"), ("show",)))
    # One of three samples may be disturbed by other tests.
    result = cases_cpu.cpu_start(replace(bench_of(tmp_path), rounds=3))
    assert not result.unusable
    assert {"python -c pass", "import ckstore", "ckstore ls", "ckstore ls --json"} < result.samples.keys()
    assert result.median("python -c pass") < result.median("ckstore ls") < result.median("ckstore show")
    assert not list(tmp_path.iterdir())


def test_command_that_fails_is_reported(tmp_path, small_bench):
    small_bench.setattr(cases_cpu, "SHORT_COMMANDS", (("no-such-command",),))
    result = cases_cpu.cpu_start(bench_of(tmp_path))
    assert "no-such-command" in result.unusable["ckstore no-such-command"]
    assert "python -c pass" in result.samples


def record_of(case, **participants):
    samples = {
        name: {"median": values[0], "samples": [{"value": values[0], **dict(values[1:])}]}
        for name, values in participants.items()
    }
    machine = {"processor": "P", "cores": 2, "file_system": "ext4", "system": "Linux 6"}
    setting = {"busy_cores_before": 0.0, "state_nbytes": 2e9, "tensors": 294}
    record = {"case": case, "date": "20260101T0", "unit": "s", "machine": machine, "setting": setting, "notes": []}
    return record | {"participants": samples, "not_available": {}, "ratios": {}}


def test_readme_table_shows_processor_time_and_floors():
    saves = {"ckstore none": (0.5,), "DCP": (0.75,), "floor: copy, hash": (0.21,)}
    loads = {"ckstore none": (0.4,), "floor: copy, hash": (0.31,), "floor: hash, decode": (0.42,)}
    many = {"10,000 x 1 KiB, save: ckstore": (28.4,), "10,000 x 1 KiB, load: ckstore": (25.2,)}
    records = {
        "commit_durable": record_of("commit_durable", **{"device": (9.0,), "ckstore none": (2.5,), "DCP": (1.0,)}),
        "cpu_commit": record_of("cpu_commit", **saves, **{"floor: copy, hash, encode, decode": (0.91,)}),
        "cpu_restore": record_of("cpu_restore", **loads),
        "cpu_many_tensors": record_of("cpu_many_tensors", **many),
    }
    text = table.make_table(records)
    assert "| **ckstore**, compression none | 2.50 |  |  |  | 0.50 / 0.40 |" in text
    assert "| DCP | 1.00 |  |  |  | 0.75 /  |" in text
    assert "the least possible: copy and hash 0.21 / 0.31, with the coder of `fast` 0.91 / 0.42." in text
    assert "10,000 tensors of 1 KiB, save / load: 28 / 25 processor us a tensor." in text
    del records["cpu_restore"], records["cpu_many_tensors"]
    assert "least possible" not in table.make_table(records)
    assert "processor us" not in table.make_table(records)


def test_table_of_many_tensors_shows_bytes_of_manifest():
    many = {"5 x 1 KiB, save: DCP": (300.0,), "5 x 1 KiB, save: ckstore": (28.0, ("manifest_bytes", 12.25))}
    text = table_cases.make_tables([record_of("cpu_many_tensors", **many)], ["cpu_many_tensors"])
    assert "| 5 x 1 KiB, save: ckstore | 28 |" in text
    assert "| 5 x 1 KiB, ckstore's manifest | 12.2 bytes |" in text
