"""The cases cpu_*: processor time of saves and loads, of large states and of many small tensors; and of commands."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import background, histories, machine, processor_time
from bench.measure import Participant, Result, Sample, interleave
from bench.memory import copy_into
from bench.other_tools import Tool
from bench.processor_time import Meter
from bench.workbench import Bench, facts_of, open_store, with_ckstore

VARIANTS = ("none", "fast", "best")
COLUMNS = ("user", "system", "wall")
NOT_COUNTED = "threads of the kernel that write back the page cache or drive the disk are not counted"

MANY_TENSORS = {"10,000 x 1 KiB": (10_000, 1024), "100,000 x 256 B": (100_000, 256)}
MANY_TENSORS_SMALL = {"300 x 1 KiB": (300, 1024), "600 x 256 B": (600, 256)}
"""Name -> number of tensors, and bytes of each."""

MANY_TOOLS = ("safetensors", "DCP", "torch.save")
ASYNC_TOOLS = ("DCP", "torch.save")

SMALL_STORE = 5
"""Checkpoints in the store of ``cpu_start``."""
SHORT_COMMANDS = (("--version",), ("--help",), ("ls",), ("ls", "--json"), ("show",), ("status",))
TYPER_PROGRAM = "import typer\napp = typer.Typer(rich_markup_mode=None)\napp.command()(lambda: None)\napp([])"


def cpu_commit(bench: Bench) -> Result:
    """Measure the processor time of a durable save of a new state, for each GB."""
    result = bench.result("cpu_commit", "processor s/GB", is_higher_better=False)
    result.columns = COLUMNS
    state, gigabytes, folder = bench.state, histories.nbytes_of(bench.state) / 1e9, bench.folder
    result.unusable |= bench.other_tools.unusable
    machine.check_space(folder, int(2.5e9 * gigabytes))
    place = folder / "saved"

    def by(tool: Tool) -> Participant:
        def run() -> Sample:
            place.mkdir()
            meter = Meter()
            with meter.running():
                tool.save(state, place)
            machine.remove_tree(place)
            return meter.sample(gigabytes)

        return run

    def by_ckstore(compression: str) -> Participant:
        def run() -> Sample:
            meter, opening = Meter(), Meter()
            with opening.running():
                store = open_store(place, compression)
            # Closing is counted, because threads that the commit has started may work until then.
            with meter.running(), store:
                receipt = store.commit(state, 1)
            machine.remove_tree(place)
            return meter.sample(gigabytes, open_seconds=opening.seconds, **facts_of(receipt))

        return run

    participants = _floors(processor_time.SAVE_FLOORS, state, {})
    participants |= {tool.name: by(tool) for tool in bench.other_tools.usable}
    _warm_up(bench)
    result.notes += ["ckstore's time includes closing the store, but not creating it", NOT_COUNTED]
    return with_ckstore(bench, result, participants, {f"ckstore {name}": by_ckstore(name) for name in VARIANTS})


def cpu_restore(bench: Bench) -> Result:
    """Measure the processor time of a cold load into existing tensors, for each GB."""
    result = bench.result("cpu_restore", "processor s/GB", is_higher_better=False)
    result.columns = COLUMNS
    state, gigabytes, folder = bench.state, histories.nbytes_of(bench.state) / 1e9, bench.folder
    result.unusable |= bench.other_tools.unusable
    machine.check_space(folder, int((len(bench.other_tools.usable) + len(VARIANTS) + 1) * 1e9 * gigabytes))
    into = histories.blank_like(state)
    participants = _floors(processor_time.LOAD_FLOORS, state, into)
    for tool in bench.other_tools.usable:
        place = folder / f"saved-{tool.name}"
        place.mkdir()
        tool.save(state, place)
        participants[tool.name] = _loading(place, _loader(tool, place, into), state, into, gigabytes)
    mine: dict[str, Participant] = {}
    for compression in VARIANTS if bench.has_ckstore is None else ():
        place = folder / f"saved-{compression}"
        with open_store(place, compression) as store:
            store.commit(state, 1)
        load = partial(_restore, place, compression, into)
        mine[f"ckstore {compression}"] = _loading(place, load, state, into, gigabytes)
    _warm_up(bench)
    result.notes += ["a tool that cannot load in place copies what it loads into the existing tensors", NOT_COUNTED]
    result.notes.append("ckstore's time includes opening and closing the store")
    try:
        return with_ckstore(bench, result, participants, mine)
    finally:
        for place in folder.glob("saved-*"):
            machine.remove_tree(place)


def _floors(floors: dict[str, processor_time.Floor], state: Any, into: Any) -> dict[str, Participant]:
    """Return the floors as participants. What a floor writes into existing tensors is compared afterwards."""
    tensors, places = ([tensor for _, tensor in histories.tensors_of(each)] for each in (state, into))
    gigabytes = histories.nbytes_of(state) / 1e9

    def measuring(floor: processor_time.Floor) -> Participant:
        def run() -> Sample:
            histories.clear(into)
            meter = floor(tensors, places)
            _require_same(state, into or state)
            return meter.sample(gigabytes)

        return run

    return {name: measuring(floor) for name, floor in floors.items()}


def _loader(tool: Tool, place: Path, into: Any) -> Callable[[], object]:
    """Return a function that loads into existing tensors, by a copy if the tool cannot."""
    if tool.is_in_place:
        return partial(tool.load, place, into)
    return lambda: copy_into(into, tool.load(place, into))


def _loading(place: Path, load: Callable[[], object], state: Any, into: Any, amount: float) -> Participant:
    """Return a participant that loads into existing tensors with cold caches, and compares afterwards."""

    def run() -> Sample:
        histories.clear(into)
        machine.make_cold(place)
        meter = Meter()
        with meter.running():
            load()
        _require_same(state, into)
        return meter.sample(amount)

    return run


def _restore(place: Path, compression: str, into: Any) -> Any:
    with open_store(place, compression) as store:
        return store.restore(into=into)


def _require_same(state: Any, loaded: Any) -> None:
    if not histories.is_same(state, loaded):
        raise AssertionError("what was loaded is not what was saved")


def _warm_up(bench: Bench) -> None:
    """Commit and restore a small state, so that imports are not measured. Other tools do this when they are found."""
    if bench.has_ckstore is not None:
        return
    state, place = histories.gpt_state(2_000_000, donors=histories.synthetic_donors()), bench.folder / "warm"
    for compression in VARIANTS:
        with open_store(place, compression) as store:
            store.commit(state, 1)
        _restore(place, compression, state)
        machine.remove_tree(place)


def cpu_many_tensors(bench: Bench) -> Result:
    """Measure the processor time of saves and loads of many small tensors, for each tensor."""
    result = Result("cpu_many_tensors", "processor us/tensor", is_higher_better=False)
    result.columns = (*COLUMNS, "manifest_bytes")
    result.setting = {"rounds": bench.rounds, "values": "all tensors change before every save"}
    result.unusable |= {name: why for name, why in bench.other_tools.unusable.items() if name in MANY_TOOLS}
    participants: dict[str, Participant] = {}
    mine: dict[str, Participant] = {}
    with ExitStack() as stack:
        for name, (count, nbytes) in (MANY_TENSORS_SMALL if bench.is_small else MANY_TENSORS).items():
            many = _ManyTensors(bench.folder / name.replace(" ", "-"), count, nbytes)
            participants |= {f"{name}, {what}": run for what, run in _others(bench, result, many).items()}
            if bench.has_ckstore is None:
                mine |= {f"{name}, {what}": run for what, run in _by_ckstore(stack, many).items()}
        result.notes += ["save and load: until durable, and into existing tensors; return: of an asynchronous save"]
        result.notes += ["ckstore: from the second commit on, with the store open", NOT_COUNTED]
        with_ckstore(bench, result, participants, mine)
    result.ratios = {pair: values for pair, values in result.ratios.items() if _is_same_work(*pair.split(" / "))}
    return result


def _is_same_work(first: str, second: str) -> bool:
    """Return whether two participants do the same with the same state: their names differ after the colon."""
    return first.partition(": ")[0] == second.partition(": ")[0]


class _ManyTensors:
    """A state of many small tensors, existing tensors to load it into, and a folder for the tools."""

    def __init__(self, folder: Path, count: int, nbytes: int) -> None:
        generator = torch.Generator().manual_seed(count)
        names = [f"layers.{number // 8}.experts.{number % 8}.weight" for number in range(count)]
        self.state = _state_of({name: torch.randn(nbytes // 4, generator=generator) for name in names})
        self.saved = copy.deepcopy(self.state)
        """What the other tools load. Unlike ``state``, it never changes."""
        self.into = histories.blank_like(self.state)
        self.folder = folder
        # The unit of the result is a microsecond.
        self.amount = count / 1e6
        self.count = count
        folder.mkdir()

    def change(self) -> None:
        """Change every tensor."""
        for tensor in self.state["model"].values():
            tensor.add_(1e-3)


def _state_of(model: dict[str, torch.Tensor]) -> histories.State:
    return {"model": model, "optimizer": {"param_groups": []}, "step": 0}


def _others(bench: Bench, result: Result, many: _ManyTensors) -> dict[str, Participant]:
    """Return the other tools' saves, loads, and asynchronous saves."""
    found: dict[str, Participant] = {}
    for tool in bench.other_tools.usable:
        if tool.name in MANY_TOOLS:
            found[f"save: {tool.name}"] = partial(_save_many, tool, many)
            found[f"load: {tool.name}"] = partial(_load_many, tool, many)
    trial = _state_of({"trial": torch.zeros(8)})
    names = [name for name in ASYNC_TOOLS if bench.tools is None or name in bench.tools]
    tools, unusable = background.find(trial, many.folder, names)
    result.unusable |= {f"{name}, asynchronous": why for name, why in unusable.items()}
    return found | {f"return: {tool.name}": partial(_begin_many, tool, many) for tool in tools}


def _save_many(tool: Tool, many: _ManyTensors) -> Sample:
    place, meter = many.folder / "saved", Meter()
    place.mkdir()
    many.change()
    with meter.running():
        tool.save(many.state, place)
    machine.remove_tree(place)
    return meter.sample(many.amount)


def _load_many(tool: Tool, many: _ManyTensors) -> Sample:
    # One save for all rounds: a slow tool needs half a minute for it.
    place, saved = many.folder / f"saved-{tool.name}", many.saved
    if not place.exists():
        place.mkdir()
        tool.save(saved, place)
    return _loading(place, _loader(tool, place, many.into), saved, many.into, many.amount)()


def _begin_many(tool: background.AsyncTool, many: _ManyTensors) -> Sample:
    place, meter = many.folder / "saved", Meter()
    place.mkdir()
    many.change()
    with meter.running():
        finish = tool.begin(many.state, place)
    finish()
    machine.remove_tree(place)
    return meter.sample(many.amount)


def _by_ckstore(stack: ExitStack, many: _ManyTensors) -> dict[str, Participant]:
    """Return ckstore's commit, restore and asynchronous commit, after a first commit of each kind."""
    steps = iter(range(10**9))
    place = many.folder / "store"
    store = stack.enter_context(open_store(place))
    background_store = stack.enter_context(open_store(many.folder / "background"))
    store.commit(many.state, next(steps))
    background_store.commit_async(many.state, next(steps)).result()

    def commit() -> Sample:
        meter, step = Meter(), next(steps)
        many.change()
        with meter.running():
            store.commit(many.state, step)
        newest = max((place / "manifests" / "main").iterdir(), key=lambda path: path.name)
        return meter.sample(many.amount, manifest_bytes=newest.stat().st_size / many.count)

    def restore() -> Sample:
        many.change()
        store.commit(many.state, next(steps))
        return _loading(place, partial(store.restore, into=many.into), many.state, many.into, many.amount)()

    def begin() -> Sample:
        meter, step = Meter(), next(steps)
        many.change()
        with meter.running():
            pending = background_store.commit_async(many.state, step)
        pending.result()
        return meter.sample(many.amount)

    return {"save: ckstore": commit, "load: ckstore": restore, "return: ckstore": begin}


def cpu_start(bench: Bench) -> Result:
    """Measure the processor time of short commands on a small store, compared with starting the bare interpreter."""
    result = Result("cpu_start", "ms", is_higher_better=False)
    result.setting = {"checkpoints": SMALL_STORE, "rounds": bench.rounds}
    if bench.has_ckstore is not None:
        result.unusable["ckstore ls"] = bench.has_ckstore
        return result
    place = bench.folder / "store"
    with open_store(place) as store:
        for step in range(SMALL_STORE):
            store.commit({"w": torch.full((1000,), float(step))}, step, metrics={"loss": 1 / (step + 1)})
    # An installed program has cached byte code, so allow the cache even if this shell forbids it.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**inherited, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}

    def running(*words: str) -> Participant:
        def run() -> Sample:
            meter = Meter()
            with meter.running():
                done = subprocess.run([sys.executable, *words], capture_output=True, check=False, env=environment)
            if done.returncode:
                raise RuntimeError(done.stderr.decode().strip()[-200:])
            return meter.sample(1e-3)

        return run

    bare = "python -c pass"
    participants = {bare: running("-c", "pass"), "import ckstore": running("-c", "import ckstore")}
    participants["floor: a command without options, with typer"] = running("-c", TYPER_PROGRAM)
    for words in SHORT_COMMANDS:
        path = [str(place)] if words[0] in ("ls", "show", "status") else []
        participants[f"ckstore {' '.join(words)}"] = running("-m", "ckstore", words[0], *path, *words[1:])
    # Compile every module before the first round.
    for run in participants.values():
        with contextlib.suppress(RuntimeError):
            run()
    interleave(result, participants, bench.rounds)
    result.add_ratios([bare], list(participants))
    machine.remove_tree(place)
    return result


CASES: dict[str, Callable[[Bench], Result]] = {
    "cpu_commit": cpu_commit,
    "cpu_restore": cpu_restore,
    "cpu_many_tensors": cpu_many_tensors,
    "cpu_start": cpu_start,
}
