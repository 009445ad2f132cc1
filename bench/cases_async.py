"""Background commits compared with synchronous ones: time until durable, memory, and a thousand in a row."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np

from bench import background, device, histories, machine
from bench.measure import Participant, Result, Sample, interleave
from bench.workbench import Bench, facts_of, open_store
from ckstore._testing import background_of

LOOKS = 8
"""Commits in a row, and after how many of them memory is measured."""

MIB = 1 << 20
VARIANTS = ("none", "fast")
SAMPLE_SECONDS = 0.004

RETURNED = "return_s"
"""Column: seconds until the call returned."""

DISK = "the disk alone"
"""Participant: write as many bytes as the state has, and make them durable.

It uses one queue depth. A disk may be faster at another one; ``engine_write`` tries several.
"""

_DISK_DEPTH = 8

GUARDED = "guarded commit_async"
WAYS = {"commit_async": "", GUARDED: ", behind a guard,"}
"""Ways to commit in the background, and what the notes call them."""


def async_wall(bench: Bench) -> Result:
    """Commit a state that is almost entirely new until it is durable: in the background, and synchronously."""
    # Without a guard the call returns when everything is copied. With a guard on an optimizer that owns nearly all
    # tensors it returns immediately. Two commits are measured: the first one of a store, when the saver has not yet
    # mapped the memory, and a second one, which may be encoded against the first.
    result = bench.result("async_wall", "s", is_higher_better=False)
    result.columns = (RETURNED,)
    state, nbytes, folder = dict(bench.state), histories.nbytes_of(bench.state), bench.folder
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
        return result
    machine.check_space(folder, int(3.5 * nbytes))
    optimizer = background.owner_of(state)

    def committing(compression: str, way: str, *, is_first: bool) -> Participant:
        def run() -> Sample:
            place, is_async = folder / "store", way != "commit"
            with open_store(place, compression) as store:
                if way == GUARDED:
                    store.attach(optimizer)
                if is_async:
                    store.prewarm(state)
                for step in range(1 if is_first else 2):
                    background.change(state)
                    began = time.perf_counter()
                    pending = store.commit_async(state, step) if is_async else None
                    returned = time.perf_counter() - began
                    receipt = store.commit(state, step) if pending is None else pending.result()
                    seconds = time.perf_counter() - began
            machine.remove_tree(place)
            # A synchronous call returns when the checkpoint is durable.
            return Sample(seconds, {**facts_of(receipt), RETURNED: returned if is_async else seconds})

        return run

    kinds = [(which, name) for name in VARIANTS for which in ("", "later ")]
    participants = {DISK: _writing(nbytes, folder / "disk.bin")} | {
        f"{which}{way} {name}": committing(name, way, is_first=not which)
        for which, name in kinds
        for way in ("commit", *WAYS)
    }
    interleave(result, participants, bench.rounds)
    _note_walls(result, kinds)
    return result


def _writing(nbytes: int, path: Path) -> Participant:
    """Return a participant that writes this many bytes to a new file until they are durable.

    It writes whole pages, because O_DIRECT requires that.
    """
    transfer = device.by_threads(device.Buffers(_DISK_DEPTH), _DISK_DEPTH)

    def run() -> Sample:
        try:
            return Sample(device.write_durably(path, nbytes // mmap.PAGESIZE * mmap.PAGESIZE, transfer))
        finally:
            path.unlink(missing_ok=True)

    return run


def _note_walls(result: Result, kinds: list[tuple[str, str]]) -> None:
    """Note how background commits compare with synchronous ones, and how much of the time a blocking call waits."""
    for which, name in kinds:
        base, what = f"{which}commit {name}", f"{name}, {'a later' if which else 'the first'} commit of a store"
        for way, how in WAYS.items():
            other = f"{which}{way} {name}"
            result.add_ratios([base], [other])
            if rounds := result.ratios.get(f"{base} / {other}"):
                result.notes.append(
                    f"{what}: in the background{how} it takes {_spread(rounds)} as long as a synchronous commit; "
                    f"the call has returned after {_share_waited(result, other, base):.2f} of that one"
                )
        # Encoded data is smaller.
        blocking = f"{which}commit_async {name}"
        if name == "none" and {DISK, base, blocking} <= set(result.samples):
            result.notes.append(
                f"{what}: until the call has returned, and then the disk alone, takes "
                f"{_spread(_one_after_the_other(result, blocking, base))} as long as a synchronous commit"
            )


def _spread(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} times ({min(times):.2f} to {max(times):.2f})"


def _one_after_the_other(result: Result, name: str, base: str) -> list[float]:
    """Return, for each round, call time plus plain disk time, relative to a synchronous commit."""
    triples = zip(_numbers(result, name, RETURNED), result.samples[DISK], result.samples[base], strict=True)
    return [(returned + disk.value) / other.value for returned, disk, other in triples]


def _share_waited(result: Result, name: str, base: str) -> float:
    """Return when the call returned, as a share of the time of a synchronous commit; the median over rounds."""
    pairs = zip(_numbers(result, name, RETURNED), result.samples[base], strict=True)
    return statistics.median(returned / other.value for returned, other in pairs)


def _numbers(result: Result, name: str, fact: str) -> list[float]:
    """Return one fact of each round."""
    return [float(str(sample.facts[fact])) for sample in result.samples[name]]


def async_pages(bench: Bench) -> Result:
    """Allocate the arena and commit through it: with huge pages, and with small pages only."""
    result = bench.result("async_pages", "s", is_higher_better=False)
    result.columns = ("prewarm_s", RETURNED, "huge_share")
    state, place, nbytes = dict(bench.state), bench.folder / "store", histories.nbytes_of(bench.state)
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
        return result
    machine.check_space(bench.folder, int(3.5 * nbytes))
    from ckstore.background.arena import Mapping

    def committing(*, is_huge: bool, is_prewarmed: bool) -> Participant:
        def run() -> Sample:
            small = patch.object(Mapping, "take_huge_pages", lambda *_, **__: None)
            # A virtual machine's host may allocate memory at first use, which takes milliseconds for a huge page. Touch
            # the memory first, so that this is not measured.
            np.ones(nbytes + nbytes // 4, np.uint8)
            with nullcontext() if is_huge else small, open_store(place, "none") as store:
                began = time.perf_counter()
                if is_prewarmed:
                    store.prewarm(state)
                warmed = time.perf_counter()
                background.change(state)
                began_commit = time.perf_counter()
                pending = store.commit_async(state, 0)
                returned = time.perf_counter() - began_commit
                receipt = pending.result()
                seconds = time.perf_counter() - began_commit
                share = _nbytes_huge() / store.arena_nbytes
            machine.remove_tree(place)
            facts = {"prewarm_s": warmed - began if is_prewarmed else 0.0, RETURNED: returned, "huge_share": share}
            return Sample(seconds, {**facts_of(receipt), **facts})

        return run

    kinds = {"": True, " not prewarmed": False}
    participants = {
        f"commit{how}, {pages} pages": committing(is_huge=pages == "huge", is_prewarmed=is_prewarmed)
        for how, is_prewarmed in kinds.items()
        for pages in ("huge", "small")
    }
    interleave(result, participants, bench.rounds)
    for how, is_prewarmed in kinds.items():
        names = [f"commit{how}, {pages} pages" for pages in ("huge", "small")]
        result.add_ratios([names[0]], [names[1]])
        for fact, what in (("prewarm_s", "prewarm takes"), (RETURNED, "the call returns after")):
            if is_prewarmed or fact == RETURNED:
                huge, small = (statistics.median(_numbers(result, name, fact)) for name in names)
                times = f"{huge:.2g} s with huge pages, {small:.2g} s with small ones"
                result.notes.append(f"the first commit{how}: {what} {times}")
        shares = [statistics.median(_numbers(result, name, "huge_share")) for name in names]
        result.notes.append(f"the first commit{how}: {shares[0]:.2f} of the arena are huge pages, and {shares[1]:.2f}")
    return result


def _nbytes_huge() -> int:
    """Return how many bytes of arenas this process has mapped as huge pages."""
    found, is_arena = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_arena = "ckstore-arena" in line
        elif is_arena and line.startswith("ShmemPmdMapped:"):
            found += 1024 * int(line.split()[1])
    return found


def async_memory(bench: Bench) -> Result:
    """Measure the peak memory of trainer and saver beyond state and arena, over three commits."""
    result = Result("async_memory", "MiB", is_higher_better=False)
    result.setting = {"state_nbytes": bench.nbytes, "rounds": bench.rounds}
    result.columns = ("arena", "trainer", "saver")
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
        return result
    if not bench.is_small:
        bench.training.facts()

    def in_process(compression: str) -> Participant:
        command = [sys.executable, "-m", "bench.cases_async", "--compression", compression]
        command += ["--size", str(bench.nbytes), "--dir", str(bench.folder), "--cache", str(bench.cache)]

        def run() -> Sample:
            done = subprocess.run(
                command + (["--small"] if bench.is_small else []), capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
            found = json.loads(done.stdout.splitlines()[-1])
            return Sample(found["trainer"] + found["saver"], found)

        return run

    interleave(result, {f"ckstore {name}": in_process(name) for name in VARIANTS}, bench.rounds)
    result.notes.append(
        "sampled every few ms: anonymous and file-backed pages of both, the trainer's above what it had"
    )
    return result


def async_thousand(bench: Bench) -> Result:
    """Commit a small state many times in the background; check whether trainer or saver grow."""
    result = Result("async_thousand", "ms", is_higher_better=False)
    result.setting = {"checkpoints": bench.count, "state": "1 MB in 294 tensors, one of them changed"}
    if bench.has_ckstore is not None:
        result.unusable["ckstore"] = bench.has_ckstore
        return result
    state = histories.gpt_state(1_000_000, donors=histories.synthetic_donors())
    changing = next(tensor for _, tensor in histories.tensors_of(state))
    place, part, warm = bench.folder / "store", max(1, min(50, bench.count // 4)), bench.count // 4
    seconds: list[tuple[float, float]] = []
    usages: dict[int, dict[str, dict[str, int]]] = {}
    with open_store(place, "fast") as store:
        for step in range(bench.count):
            changing.add_(1e-3)
            began = time.perf_counter()
            pending = store.commit_async(state, step, metrics={"loss": 1.0 / (step + 1)})
            returned = time.perf_counter() - began
            pending.result()
            seconds.append((time.perf_counter() - began, returned))
            end = warm if step <= warm else bench.count - 1
            if end - LOOKS < step <= end:
                sides = {"trainer": os.getpid(), "saver": background_of(store).saver_pid}
                found = {side: dict(background.usage_of(pid)) for side, pid in sides.items()}
                usages[end] = _lowest(usages.get(end), found)
    parts = {"first": seconds[1 : part + 1], "last": seconds[-part:]}
    for name, some in parts.items():
        samples = [Sample(1e3 * wall, {"return_ms": 1e3 * returned}) for wall, returned in some]
        result.samples[f"ckstore, {name} {part} commits"] = samples
    result.columns = ("return_ms",)
    result.notes.append(f"what a process has is the lowest of {LOOKS} looks, after as many commits in a row")
    first, last = (statistics.median(wall for wall, _ in some) for some in parts.values())
    result.notes.append(f"median of the last {part} commits / of the first {part}: {last / first:.2f}")
    before, after = usages[warm], usages[bench.count - 1]
    for side, had in before.items():
        grown = {name: after[side][name] - value for name, value in had.items()}
        memory = (grown.pop("RssAnon") + grown.pop("RssFile")) / MIB
        more = ", ".join(f"{count} {name.lower()}" for name, count in grown.items())
        result.setting[f"{side}_grew_mib"] = round(memory, 1)
        result.notes.append(f"from commit {warm} on the {side} has grown by {memory:.1f} MiB, {more}")
    machine.remove_tree(place)
    return result


def _lowest(usages: dict[str, dict[str, int]] | None, found: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return the lowest of each number, because a short peak is not growth."""
    if usages is None:
        return found
    return {side: {name: min(value, usages[side][name]) for name, value in had.items()} for side, had in found.items()}


def peaks_while(work: Callable[[], object], pids: dict[str, int]) -> dict[str, int]:
    """Return the peak of own and of file-mapped memory of each process while ``work`` ran, in bytes."""
    highest = dict.fromkeys(pids, 0)
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(SAMPLE_SECONDS):
            for name, pid in pids.items():
                highest[name] = max(highest[name], _own_nbytes(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        is_over.set()
        watcher.join()
    return highest


def _own_nbytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile") if name in fields)


def main() -> int:
    """Measure one compression in this process, the trainer, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--compression", required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    donors = histories.synthetic_donors() if given.small else histories.trained_donors(given.cache)
    state = histories.gpt_state(given.size, donors=donors)
    before = _own_nbytes(os.getpid())
    place = given.dir / "memory"
    try:
        with open_store(place, given.compression) as store:
            store.prewarm(state)

            def commit() -> None:
                for step in range(3):
                    background.change(state)
                    store.commit_async(state, step).result()

            peaks = peaks_while(commit, {"trainer": os.getpid(), "saver": background_of(store).saver_pid})
            found = {"trainer": (peaks["trainer"] - before) / MIB, "saver": peaks["saver"] / MIB}
            found["arena"] = store.arena_nbytes / MIB
    finally:
        machine.remove_tree(place)
    print(json.dumps(found))
    return 0


CASES: dict[str, Callable[[Bench], Result]] = {
    "async_wall": async_wall,
    "async_pages": async_pages,
    "async_memory": async_memory,
    "async_thousand": async_thousand,
}

if __name__ == "__main__":
    sys.exit(main())
