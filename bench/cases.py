"""The cases: preparation, participants, and what is timed."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench import (
    cases_async,
    cases_balance,
    cases_codec,
    cases_compare,
    cases_cpu,
    cases_device_copies,
    cases_engine,
    cases_gc,
    cases_gpu,
    cases_history,
    cases_journal,
    cases_loops,
    cases_merge,
    cases_rank_saves,
    cases_reshard,
    cases_stages,
    cases_stall,
    cases_training,
    device,
    histories,
    machine,
    other_tools,
)
from bench.measure import Participant, Result, Sample, interleave
from bench.workbench import Bench, facts_of, gigabytes_per_second, open_store, with_ckstore

VARIANTS = ("none", "fast")
LS_PROGRAM = "import sys; from ckstore.cli.main import main; sys.exit(main())"


def commit_durable(bench: Bench) -> Result:
    """Save a state that is new to the store, until it is durable."""
    result = bench.result("commit_durable", "GB/s", is_higher_better=True)
    state, nbytes, folder = bench.state, histories.nbytes_of(bench.state), bench.folder
    result.unusable |= bench.other_tools.unusable
    buffers = device.Buffers()

    def on_device() -> Sample:
        ways = device.best_write(folder, nbytes, buffers)
        os.sync()
        speeds = {name: gigabytes_per_second(nbytes, seconds) for name, seconds in ways.items()}
        return Sample(max(speeds.values()), {"ways": speeds})

    def by(tool: other_tools.Tool) -> Participant:
        def run() -> Sample:
            place = folder / "tool"
            place.mkdir()
            began = time.perf_counter()
            tool.save(state, place)
            seconds = time.perf_counter() - began
            written = machine.tree_nbytes(place)
            machine.remove_tree(place)
            return Sample(gigabytes_per_second(nbytes, seconds), {"seconds": seconds, "bytes_written": written})

        return run

    def by_ckstore(compression: str) -> Participant:
        def run() -> Sample:
            place = folder / "store"
            began = time.perf_counter()
            with open_store(place, compression) as store:
                opened = time.perf_counter()
                receipt = store.commit(state, 1)
                seconds = time.perf_counter() - opened
            machine.remove_tree(place)
            facts = {"seconds": seconds, "open_seconds": opened - began, **facts_of(receipt)}
            return Sample(gigabytes_per_second(nbytes, seconds), facts)

        return run

    machine.check_space(folder, int(2.5 * nbytes))
    participants: dict[str, Participant] = {"device": on_device}
    participants |= {tool.name: by(tool) for tool in bench.other_tools.usable}
    return with_ckstore(bench, result, participants, {f"ckstore {name}": by_ckstore(name) for name in VARIANTS})


def restore_cold(bench: Bench) -> Result:
    """Load the whole state after dropping the caches, and compare it with what was saved."""
    result = bench.result("restore_cold", "GB/s", is_higher_better=True)
    state, nbytes, folder = bench.state, histories.nbytes_of(bench.state), bench.folder
    result.unusable |= bench.other_tools.unusable
    machine.check_space(folder, int((len(bench.other_tools.usable) + len(VARIANTS) + 2) * nbytes))
    into, buffers = histories.blank_like(state), device.Buffers()
    raw = folder / "device.bin"
    device.write_durably(raw, nbytes, device.by_threads(buffers, 8))

    def on_device() -> Sample:
        machine.make_cold(folder)
        ways = device.best_read(raw, nbytes, buffers)
        speeds = {name: gigabytes_per_second(nbytes, seconds) for name, seconds in ways.items()}
        return Sample(max(speeds.values()), {"ways": speeds})

    def timed(place: Path, load: Callable[[], Any]) -> Participant:
        def run() -> Sample:
            histories.clear(into)
            machine.make_cold(place)
            began = time.perf_counter()
            loaded = load()
            seconds = time.perf_counter() - began
            if not histories.is_same(state, loaded):
                raise AssertionError("what was loaded is not what was saved")
            return Sample(gigabytes_per_second(nbytes, seconds), {"seconds": seconds})

        return run

    participants: dict[str, Participant] = {"device": on_device}
    for tool in bench.other_tools.usable:
        place = folder / f"saved-{tool.name}"
        place.mkdir()
        tool.save(state, place)
        participants[tool.name] = timed(place, partial(tool.load, place, into))
    mine: dict[str, Participant] = {}
    for compression in VARIANTS if bench.has_ckstore is None else ():
        place = folder / f"saved-ckstore-{compression}"
        with open_store(place, compression) as store:
            store.commit(state, 1)

        mine[f"ckstore {compression}"] = timed(place, partial(_restore, place, compression))
        mine[f"ckstore {compression}, into="] = timed(place, partial(_restore, place, compression, into))
    result.notes.append("ckstore's time includes opening the store; rivals that load in place get existing tensors")
    try:
        return with_ckstore(bench, result, participants, mine)
    finally:
        for place in folder.glob("saved-*"):
            machine.remove_tree(place)
        raw.unlink()


def _restore(place: Path, compression: str, into: Any = None) -> Any:
    with open_store(place, compression) as store:
        return store.restore() if into is None else store.restore(into=into)


def peak_memory(bench: Bench) -> Result:
    """Measure the memory that a save, and then a load into the existing state, needs beyond that state."""
    result = Result("peak_memory", "MiB", is_higher_better=False)
    result.setting = {"state_nbytes": histories.nbytes_of(bench.state), "rounds": bench.rounds}
    del bench.state
    result.unusable |= bench.other_tools.unusable
    names = [tool.name for tool in bench.other_tools.usable]
    if bench.has_ckstore is None:
        names += [f"ckstore {name}" for name in VARIANTS]
    else:
        result.unusable["ckstore"] = bench.has_ckstore
    if not bench.is_small:
        bench.training.facts()

    def in_process(name: str) -> Participant:
        command = [sys.executable, "-m", "bench.memory", "--tool", name, "--size", str(bench.nbytes)]
        command += ["--dir", str(bench.folder), "--cache", str(bench.cache)] + (["--small"] if bench.is_small else [])

        def run() -> Sample:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
            found = json.loads(done.stdout.splitlines()[-1])
            return Sample(found["save"], {"load": found["load"]})

        return run

    interleave(result, {name: in_process(name) for name in names}, bench.rounds)
    # One process measured both phases; each becomes a row.
    for name, samples in list(result.samples.items()):
        result.samples[f"{name}: save"] = [Sample(sample.value) for sample in samples]
        result.samples[f"{name}: load"] = [Sample(float(str(sample.facts["load"]))) for sample in samples]
        del result.samples[name]
    result.notes.append("VmHWM of the process beyond its resident size before; the page cache is not counted")
    return result


def commit_unchanged(bench: Bench) -> Result:
    """Commit a state that is already stored: only hashing remains."""
    result = bench.result("commit_unchanged", "GB/s", is_higher_better=True)
    state, nbytes, folder = bench.state, histories.nbytes_of(bench.state), bench.folder
    threads = len(os.sched_getaffinity(0))
    arrays = [tensor.numpy() for _, tensor in histories.tensors_of(state)]

    def hashing() -> Sample:
        return Sample(gigabytes_per_second(nbytes, device.hash_seconds(arrays, threads)))

    participants: dict[str, Participant] = {f"BLAKE3 on {threads} threads": hashing}
    if bench.has_ckstore is not None:
        return with_ckstore(bench, result, participants, {})
    machine.check_space(folder, int(2.5 * nbytes))
    with open_store(folder / "store", "fast") as store:
        steps = itertools.count(1)
        store.commit(state, next(steps))

        def again() -> Sample:
            began = time.perf_counter()
            receipt = store.commit(state, next(steps))
            seconds = time.perf_counter() - began
            return Sample(gigabytes_per_second(nbytes, seconds), {"seconds": seconds, **facts_of(receipt)})

        with_ckstore(bench, result, participants, {"ckstore fast": again})
    machine.remove_tree(folder / "store")
    return result


def _many_commits(bench: Bench, place: Path) -> list[tuple[float, float]]:
    """Commit a small state of which one tensor changes, many times; return seconds and processor seconds of each."""
    state = histories.gpt_state(1_000_000, donors=histories.synthetic_donors())
    changing = next(tensor for _, tensor in histories.tensors_of(state))
    seconds = []
    with open_store(place, "fast") as store:
        for step in range(bench.count):
            changing.add_(1e-3)
            began, used = time.perf_counter(), time.process_time()
            store.commit(state, step, metrics={"loss": 1.0 / (step + 1)})
            seconds.append((time.perf_counter() - began, time.process_time() - used))
    return seconds


def ls_1000(bench: Bench) -> Result:
    """List a store of 1,000 checkpoints in a new process; compare with starting the bare interpreter."""
    result = Result("ls_1000", "s", is_higher_better=False)
    result.setting = {"checkpoints": bench.count, "rounds": bench.rounds}
    if bench.has_ckstore is not None:
        result.unusable["ckstore ls"] = bench.has_ckstore
        return result
    place = bench.folder / "store"
    _many_commits(bench, place)
    # An installed program has cached byte code, so allow the cache even if this shell forbids it.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**inherited, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}

    def timed(*words: str) -> Participant:
        def run() -> Sample:
            began = time.perf_counter()
            command = [sys.executable, *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            seconds = time.perf_counter() - began
            if done.returncode:
                raise RuntimeError(done.stderr.strip()[-200:])
            return Sample(seconds, {"output_lines": done.stdout.count("\n")})

        return run

    participants = {
        "python -c pass": timed("-c", "pass"),
        "ckstore ls": timed("-c", LS_PROGRAM, "ls", str(place)),
        "ckstore ls --json": timed("-c", LS_PROGRAM, "ls", str(place), "--json"),
    }
    interleave(result, participants, bench.rounds)
    machine.remove_tree(place)
    return result


def history_growth(bench: Bench) -> Result:
    """Check whether commits become slower as the history grows."""
    result = Result("history_growth", "ms", is_higher_better=False)
    result.setting = {"checkpoints": bench.count, "state": "1 MB in 294 tensors, one of them changed"}
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
        return result
    place = bench.folder / "store"
    seconds = _many_commits(bench, place)
    part = max(1, min(50, bench.count // 4))
    parts = {"first": seconds[1 : part + 1], "middle": _middle(seconds, part), "last": seconds[-part:]}
    for name, some in parts.items():
        samples = [Sample(1e3 * wall, {"cpu_seconds": used}) for wall, used in some]
        result.samples[f"ckstore, {name} {part} commits"] = samples
    result.setting["bytes_in_store"] = machine.tree_nbytes(place)
    for number, clock in enumerate(("wall", "processor")):
        first, last = (statistics.median(times[number] for times in parts[name]) for name in ("first", "last"))
        result.notes.append(
            f"{clock} time, median of the last {part} commits / of the first {part}: {last / first:.2f}"
        )
    machine.remove_tree(place)
    return result


def _middle(values: list[tuple[float, float]], part: int) -> list[tuple[float, float]]:
    begin = (len(values) - part) // 2
    return values[begin : begin + part]


CASES: dict[str, Callable[[Bench], Result]] = {
    "commit_durable": commit_durable,
    "restore_cold": restore_cold,
    "peak_memory": peak_memory,
    "commit_unchanged": commit_unchanged,
    "ls_1000": ls_1000,
    "history_growth": history_growth,
    **cases_cpu.CASES,
    **cases_history.CASES,
    **cases_journal.CASES,
    **cases_codec.CASES,
    **cases_loops.CASES,
    **cases_engine.CASES,
    **cases_gc.CASES,
    **cases_stall.CASES,
    **cases_training.CASES,
    **cases_gpu.CASES,
    **cases_device_copies.CASES,
    **cases_stages.CASES,
    **cases_async.CASES,
    **cases_balance.CASES,
    **cases_compare.CASES,
    **cases_merge.CASES,
    **cases_rank_saves.CASES,
    **cases_reshard.CASES,
}
