"""Protects the memory bound of the saver: the arena and 256 MiB, for any size of the state."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ckstore
from ckstore.config import MIB

SOURCE = Path(ckstore.__file__).parent.parent

STATE_NBYTES = 512 * MIB
BOUND_NBYTES = 256 * MIB

PROGRAM = f"""
import json, os, sys, threading, time
from pathlib import Path
sys.path.insert(0, {str(SOURCE)!r})
import numpy as np
import ckstore
from ckstore._testing import saver_of

folder, compression = sys.argv[1:]


def memory(pid):
    rollup = dict(line.split(":") for line in Path(f"/proc/{{pid}}/smaps_rollup").read_text().splitlines()[1:])
    # What it shares is the arena; what it shares with other programs of this interpreter counts in parts.
    return (int(rollup["Pss"].split()[0]) - int(rollup["Pss_Shmem"].split()[0])) << 10


source = np.random.default_rng(0)
state = {{f"w{{index}}": source.standard_normal(8 << 20, np.float32) for index in range(8)}}
state |= {{f"v{{index}}": np.square(state[f"w{{index}}"]) for index in range(8)}}
assert sum(array.nbytes for array in state.values()) == {STATE_NBYTES}
policy = ckstore.Policy(compression=compression, saver_nice=0)
most, over, seconds = [0], threading.Event(), []
with ckstore.open(folder, policy=policy) as store:
    store.prewarm(state)
    pid = saver_of(store).pid

    def watch():
        while not over.wait(0.005):
            most[0] = max(most[0], memory(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    for step in range(3):
        # A commit of everything, and two of differences to it.
        begun = time.perf_counter()
        store.commit_async(state, step).result()
        seconds.append(time.perf_counter() - begun)
        for array in state.values():
            array *= np.float32(1.0001)
    over.set()
    thread.join()
    arena = store.arena_nbytes
print(json.dumps([most[0], arena, seconds]))
"""


@pytest.mark.deep(parts=8)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("compression", ["none", "fast"])
def test_saver_needs_at_most_arena_and_256_mib(fast_folder, note, compression):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(fast_folder / "store"), compression],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    most, arena, _ = json.loads(done.stdout)
    note(f"saver of a state of 512 MiB ({compression}): {most / MIB:.0f} MiB beyond an arena of {arena / MIB:.0f} MiB")
    assert STATE_NBYTES <= arena <= STATE_NBYTES * 17 / 16
    assert 16 * MIB < most <= BOUND_NBYTES
