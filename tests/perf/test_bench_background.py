"""The bench of background commits measures correctly: copies are complete, tools save the right state, cases run."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

from bench import (  # noqa: E402
    background,
    cases_async,
    cases_gpu,
    cases_stall,
    cases_training,
    histories,
    work_process,
)
from bench.cases import CASES  # noqa: E402
from bench.load_processes import ComputeLoad, MemoryReadLoad  # noqa: E402
from bench.measure import Result, Sample  # noqa: E402
from bench.minimal_commit import MinimalCommit  # noqa: E402
from bench.workbench import Bench  # noqa: E402

NBYTES = 1_500_000
FACTS = {"held_up_share": 0, "saver_cpu_seconds": 0, "lost_shares": [0], "lost_seconds": [0]}


@pytest.fixture
def state():
    return histories.gpt_state(NBYTES, donors=histories.synthetic_donors())


def bytes_of(state):
    return b"".join(tensor.detach().numpy().tobytes() for _, tensor in histories.tensors_of(state))


@pytest.mark.parametrize("way", ["_by_numpy", "_by_torch"])
def test_reference_copies_are_complete(state, way):
    copies = background.Copies(state, threads=2)
    assert copies.copied != bytes_of(state)
    assert getattr(copies, way)() > 0
    assert copies.copied == bytes_of(state)
    copies.close()


def test_change_alters_nearly_every_element(state):
    before = [tensor.clone() for _, tensor in histories.tensors_of(state)]
    background.change(state)
    pairs = zip(before, (tensor for _, tensor in histories.tensors_of(state)), strict=True)
    changed = [(old != new).float().mean().item() for old, new in pairs]
    assert min(changed) > 0.9


def test_tools_save_the_state_at_return(state, tmp_path):
    found, reasons = background.find(state, tmp_path, None)
    assert {tool.name.split()[0] for tool in found} >= {"DCP", "clone,"}, reasons
    assert list(tmp_path.iterdir()) == []
    wanted = bytes_of(state)
    tool = next(tool for tool in found if tool.name.startswith("clone"))
    finish = tool.begin(state, tmp_path)
    for _, tensor in histories.tensors_of(state):
        tensor.zero_()
    finish()
    assert bytes_of(torch.load(tmp_path / "state.pt", weights_only=True)) == wanted


def test_missing_tool_has_a_reason(state, tmp_path, monkeypatch):
    def missing():
        raise ImportError("not installed")

    monkeypatch.setitem(background.MAKERS, "DCP", missing)
    found, reasons = background.find(state, tmp_path, ["DCP"])
    assert (found, reasons) == ([], {"DCP": "ImportError: not installed"})


def test_training_loop_has_requested_size_and_learns():
    loop = background.Loop(3_000_000, tokens=16)
    nbytes = histories.nbytes_of([loop.model.state_dict(), loop.optimizer.state_dict()])
    assert 2_000_000 < nbytes < 9_000_000
    before = bytes_of(loop.model.state_dict())
    loop.train_one_step()
    assert (loop.step, loop.state["step"]) == (2, 2)
    assert bytes_of(loop.model.state_dict()) != before


def test_peak_memory_of_another_process_is_measured(monkeypatch):
    say, hear = "print(flush=True)", "sys.stdin.readline()"
    program = "\n".join(["import sys", say, hear, "x = bytearray(50_000_000)", say, hear])
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        own_nbytes, looks = cases_async._own_nbytes, []
        before = own_nbytes(other.pid)
        monkeypatch.setattr(cases_async, "_own_nbytes", lambda pid: (looks.append(pid), own_nbytes(pid))[1])

        def grow():
            other.stdin.write(b"\n")
            other.stdin.flush()
            other.stdout.readline()
            seen = len(looks)
            # Either reading may have begun before the growth.
            while len(looks) < seen + 4:
                time.sleep(0.005)

        peaks = cases_async.peaks_while(grow, {"other": other.pid, "me": os.getpid()})
        assert 48_000_000 < peaks["other"] - before < 60_000_000
        assert peaks["me"] > 10_000_000
        other.stdin.write(b"\n")


GROWING = """
import subprocess, sys, threading
print(flush=True)
sys.stdin.readline()
file, is_over = open("/dev/null"), threading.Event()
threading.Thread(target=is_over.wait, daemon=True).start()
child = subprocess.Popen(["sleep", "600"])
print(flush=True)
sys.stdin.readline()
child.kill()
child.wait()
"""


def test_usage_of_process_is_counted():
    # In a separate process, because leftovers of other tests in this process may end at any time.
    with subprocess.Popen([sys.executable, "-c", GROWING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        before = dict(background.usage_of(process.pid))
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        after = dict(background.usage_of(process.pid))
        process.stdin.write(b"\n")
    grown = {name: after[name] - before[name] for name in ("descriptors", "Threads", "children")}
    assert grown == {"descriptors": 1, "Threads": 1, "children": 1}
    assert after["RssAnon"] > 1_000_000


def test_loop_has_speed_if_save_already_ended():
    assert background.run_python_loop(lambda: True) > 0


def test_minimal_commit_copies_all_and_awaits_hashing():
    tensors = [
        torch.arange(5_000_000, dtype=torch.float32),
        torch.tensor(3.0),
        torch.zeros(0),
        torch.ones(7).bfloat16(),
    ]
    with MinimalCommit(tensors) as minimal:
        computed = background.cpu_seconds(minimal.pid)
        for turn in range(20):
            tensors[0] += turn
            assert minimal.begin()() == 0
            wanted = b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
            assert minimal.copied == wanted
            assert minimal.nbytes == len(wanted)
        assert background.cpu_seconds(minimal.pid) > computed
    with pytest.raises(ProcessLookupError):
        os.kill(minimal.pid, 0)


def test_minimal_durable_commit_removes_its_file(tmp_path):
    path = tmp_path / "floor"
    with MinimalCommit([torch.ones(3_000_001)], path=path) as minimal:
        assert minimal.writes_by in ("O_DIRECT", "page cache")
        assert minimal.begin()() == 0
        assert path.read_bytes() == bytes(work_process.make_floats(path.stat().st_size))
        assert minimal.nbytes <= path.stat().st_size < minimal.nbytes + 4096
    assert not path.exists()


def test_minimal_encoding_commit_writes_encoded_size(tmp_path):
    path = tmp_path / "floor"
    with MinimalCommit([torch.ones(3_000_001)], is_coded=True, path=path) as minimal:
        assert minimal.begin()() == 0
        data, code = work_process.make_floats(path.stat().st_size), work_process.coding(4 << 20)
        pieces = [data[begin : begin + (4 << 20)] for begin in range(0, len(data), 4 << 20)]
        left = b"".join(bytes(piece[: -(-code(piece, 0).nbytes // 4096) * 4096]) for piece in pieces)
        assert len(left) < 0.95 * len(data)
        assert path.read_bytes() == left + bytes(len(data) - len(left))


def test_compute_load_takes_requested_time():
    with ComputeLoad(0.3) as load:
        load.begin()()
        before = background.cpu_seconds(load.pid)
        finish = load.begin()
        assert not load.is_over()
        assert finish() == 0
        assert 0.25 <= background.cpu_seconds(load.pid) - before < 1
        assert os.getpriority(os.PRIO_PROCESS, load.pid) == 19
    with pytest.raises(ProcessLookupError):
        os.kill(load.pid, 0)


def test_memory_reads_are_slower_than_cache_reads():
    seconds = []
    for buffer_nbytes in (512 << 20, 256 << 10):
        with MemoryReadLoad(2 << 30, buffer_nbytes) as reading:
            reading.begin()()
            computed = [background.cpu_seconds(reading.pid)]
            for _ in range(3):
                assert reading.begin()() == 0
                computed.append(background.cpu_seconds(reading.pid))
        # The fastest of three, because other programs may be running.
        seconds.append(min(after - before for before, after in itertools.pairwise(computed)))
    assert seconds[0] > seconds[1] > 0


def test_delay_is_measured_only_on_shared_processor():
    # Other processes on the same processor can make both shares equal for a while, so there are several tries.
    tries = (delayed_shares() for _ in range(8))
    assert any(0.2 < with_other < 1 and alone < with_other for with_other, alone in tries)


def delayed_shares():
    """Return how much a loop is delayed by another loop on its processor, and by a sleeping process."""
    allowed = os.sched_getaffinity(0)
    shares = []
    try:
        os.sched_setaffinity(0, {min(allowed)})
        for program in ("while True: pass", "input()"):
            with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as other:
                began = time.perf_counter() - 10
                counted = background.run_loop_during_save(lambda began=began: time.perf_counter() - began > 10.5, began)
                other.kill()
            assert counted.rate > 0
            assert counted.seconds > 10.5
            shares.append(counted.delayed_share)
    finally:
        os.sched_setaffinity(0, allowed)
    return shares


def test_minimal_encoding_commit_takes_longer():
    tensors = [torch.ones(4_000_000)]
    with MinimalCommit(tensors, is_coded=False) as hashing, MinimalCommit(tensors, is_coded=True) as coding:
        computed: list[list[float]] = [[], []]
        for _ in range(21):
            for minimal, seconds in zip((hashing, coding), computed, strict=True):
                before = on_processor_seconds(minimal.pid)
                minimal.begin()()
                seconds.append(on_processor_seconds(minimal.pid) - before)
    # The shortest of alternating runs, without the first ones, because the clock of the machine varies.
    assert min(computed[1][1:]) > 1.5 * min(computed[0][1:])


def on_processor_seconds(pid):
    """Return the processor time of all threads of a process, in nanoseconds; /proc/PID/stat has only ticks."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def test_work_process_data_is_unique_and_compressible():
    data = work_process.make_floats(48 << 20)
    pieces = [data[begin : begin + (4 << 20)] for begin in range(0, len(data), 4 << 20)]
    assert len({bytes(piece) for piece in pieces}) == len(pieces)
    code = work_process.coding(4 << 20)
    assert all(0.5 * len(piece) < code(piece, 0).nbytes < 0.95 * len(piece) for piece in pieces)


def test_minimal_commit_is_over_when_process_is_done():
    with MinimalCommit([torch.ones(1000)]) as minimal:
        os.kill(minimal.pid, signal.SIGSTOP)
        finish = minimal.begin()
        time.sleep(0.05)
        assert not minimal.is_over()
        os.kill(minimal.pid, signal.SIGCONT)
        while not minimal.is_over():
            time.sleep(0.001)
        assert finish() == 0


def test_stalls_are_relative_to_preceding_copy():
    result = Result("stall_blocking", "s", is_higher_better=False)
    stalls = {"copy": [(1.0, None)] * 2, "rival": [(1.2, 1.0), (1.1, 0.5)], "mine": [(0.9, 1.0), (1.2, 1.5)]}
    for name, samples in stalls.items():
        result.samples[name] = [Sample(stall, {"copy_seconds": copied} if copied else {}) for stall, copied in samples]
    result.add_ratios(["mine"], ["copy", "rival"])
    cases_stall.note_stalls(result, ["mine"], ["copy", "rival", "not there"])
    assert result.notes == [
        "mine: 1.03 times the stall of copy; shorter in 1 of 2 rounds",
        "mine: 0.89 times the stall of rival; shorter in 1 of 2 rounds",
        "mine: 0.85 times a copy right before (0.80 to 0.90); less of it than rival in 2 of 2 rounds",
        "rival: 1.70 times a copy right before (1.20 to 2.20)",
    ]


@pytest.mark.parametrize(("tools", "count"), [(None, 7), ([], 0), (["one copy, one hash"], 1)])
def test_participants_can_be_selected(tools, count, tmp_path, small_bench):
    small_bench.setattr(cases_training, "_train", lambda *given: Sample(1.0, dict(FACTS)))
    bench = Bench(tmp_path, tmp_path, NBYTES, rounds=1, is_small=True, count=8, tools=tools)
    names = CASES["stall_accumulation"](bench).samples
    assert sum(name.endswith(tuple(cases_training.MINIMAL_COMMITS)) for name in names) == count
    assert len(names) == count + 3


@pytest.mark.parametrize(("over_after", "steps"), [(0, 1), (2, 2), (9, cases_training.STEPS_MAX)])
def test_steps_end_when_commit_is_over(over_after, steps):
    loop = background.Loop(3_000_000, tokens=16)
    begun = loop.step
    assert cases_training._steps_until(loop, lambda: loop.step - begun >= over_after, cases_training.STEPS_MAX) == steps
    assert loop.step - begun == steps


def test_step_of_many_batches_accumulates_gradients(monkeypatch):
    loop = background.Loop(3_000_000, tokens=16, batches=3)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, norm: None)
    steps, forward, batches, begun = [], loop.model.forward, [], loop.step
    monkeypatch.setattr(loop.optimizer, "step", lambda: steps.append(loop.step))
    monkeypatch.setattr(loop.model, "forward", lambda *given: batches.append(given) or forward(*given))
    loop.train_one_step()
    assert (len(batches), steps, loop.step) == (3, [begun], begun + 1)
    added = [parameter.grad.clone() for parameter in loop.model.parameters()]
    loop.optimizer.zero_grad()
    sum(forward(*given) for given in batches).backward()
    for parameter, gradient in zip(loop.model.parameters(), added, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_minimal_commit_reports_dead_process():
    with MinimalCommit([torch.ones(1000)]) as minimal:
        minimal.begin()()
        os.kill(minimal.pid, signal.SIGKILL)
        with pytest.raises((RuntimeError, BrokenPipeError)):
            minimal.begin()()


@pytest.mark.deep(parts=12)
@pytest.mark.parametrize("case", [name for name in CASES if name.startswith(("stall_", "async_"))])
def test_every_background_case_runs(case, tmp_path, small_bench):
    # The GPU cases run the same code on the CPU here.
    small_bench.setattr(cases_gpu, "DEVICE", "cpu")
    small_bench.setattr(cases_gpu, "no_gpu_reason", lambda: "")
    (tmp_path / "work").mkdir()
    tools = ["torch.save", *cases_training.MINIMAL_COMMITS]
    bench = Bench(tmp_path / "work", tmp_path, NBYTES, rounds=1, is_small=True, count=8, tools=tools)
    result = CASES[case](bench)
    assert result.unusable == {}
    assert sum("ckstore" in name or "saver" in name or "commit" in name for name in result.samples) >= 2
    assert all(sample.value > 0 for samples in result.samples.values() for sample in samples)
    assert not any((tmp_path / "work").iterdir())


def test_note_has_share_of_synchronous_commit_waited():
    result = Result("async_wall", "s", is_higher_better=False)
    for name, walls, returns in (("commit", (1.0, 2.0, 4.0), (9, 9, 9)), ("async", (7, 7, 7), (0.5, 0.5, 0.4))):
        pairs = zip(walls, returns, strict=True)
        result.samples[name] = [Sample(wall, {cases_async.RETURNED: returned}) for wall, returned in pairs]
    assert cases_async._share_waited(result, "async", "commit") == 0.25


def test_note_compares_call_and_disk_with_synchronous():
    result = Result("async_wall", "s", is_higher_better=False)
    for name, walls in (("commit none", (1.0, 2.0)), ("commit_async none", (1.5, 1.5)), (cases_async.DISK, (0.9, 0.9))):
        result.samples[name] = [Sample(wall, {cases_async.RETURNED: 0.3}) for wall in walls]
    result.samples["guarded commit_async none"] = result.samples["commit_async none"]
    cases_async._note_walls(result, [("", "none")])
    (note,) = [note for note in result.notes if "the disk alone" in note]
    assert "takes 0.90 times (0.60 to 1.20) as long as a synchronous commit" in note
