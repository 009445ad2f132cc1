"""Measure, in a separate process, how much memory a tool needs beyond the state that it saves and loads.

The kernel's high-water mark of the resident size is reset before each phase. The load is that of a restarted trainer: a
state exists, and then gets the stored values. A tool that can only create a new state needs memory for that one too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from bench import histories, machine, other_tools
from bench.workbench import open_store

MIB = 1 << 20


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def peak_of(work: Callable[[], object]) -> float:
    """Return by how many MiB the peak resident size exceeded the size at the start while ``work`` ran."""
    Path("/proc/self/clear_refs").write_text("5\n")
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / MIB


def digests_of(state: object) -> list[int]:
    """Return a checksum of every tensor."""
    return [xxhash.xxh3_64_intdigest(tensor.numpy().data) for _, tensor in histories.tensors_of(state)]


def copy_into(target: Any, source: object) -> None:
    """Do what ``load_state_dict`` does: copy the loaded values into existing tensors."""
    loaded = dict(histories.tensors_of(source))
    for path, tensor in histories.tensors_of(target):
        if loaded[path].data_ptr() != tensor.data_ptr():
            tensor.copy_(loaded[path])


def main() -> int:
    """Measure one tool and print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tool", required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    donors = histories.synthetic_donors() if given.small else histories.trained_donors(given.cache)
    small = histories.gpt_state(2_000_000, donors=histories.synthetic_donors())
    state = histories.gpt_state(given.size, donors=donors)
    before = digests_of(state)
    place = given.dir / "memory"
    place.mkdir()
    save, load = _tool(given.tool)
    # Warm up: imports and thread pools are not measured.
    (given.dir / "memory-warm").mkdir()
    save(small, given.dir / "memory-warm")
    load(given.dir / "memory-warm", small)
    machine.remove_tree(given.dir / "memory-warm")
    try:
        found = {"save": peak_of(lambda: save(state, place))}
        histories.clear(state)
        machine.make_cold(place)
        found["load"] = peak_of(lambda: copy_into(state, load(place, state)))
    finally:
        machine.remove_tree(place)
    if digests_of(state) != before:
        print(f"{given.tool}: what was loaded is not what was saved", file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


def _tool(name: str) -> tuple[Callable[[Any, Path], object], Callable[[Path, Any], Any]]:
    if not name.startswith("ckstore "):
        tool = other_tools.MAKERS[name]()
        return tool.save, tool.load
    compression = name.partition(" ")[2]

    def save(state: Any, folder: Path) -> None:
        with open_store(folder / "store", compression) as store:
            store.commit(state, 1)

    def load(folder: Path, into: Any) -> Any:
        with open_store(folder / "store", compression) as store:
            return store.restore(into=into)

    return save, load


if __name__ == "__main__":
    sys.exit(main())
