"""How long training on a GPU waits for a background commit, and how much slower it is meanwhile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench import background, cases_training, histories, machine
from bench.cases_stall import VARIANTS, blocked_by, if_possible, note_stalls
from bench.measure import Participant, Result, Sample, interleave, log
from bench.workbench import Bench, facts_of, open_store

DEVICE = "cuda"
TOKENS, SEQUENCES, BATCHES = 1024, 8, 3
"""Tokens of a sequence, sequences of a batch, and batches of a step.

On an H100 a step then takes some tenths of a second, and a commit takes longer.
"""

COMMITS = 3
"""Commits of each participant in a round."""

STEPS_MAX = 60
"""Steps during one commit. If the commit has not ended by then, training waits for it, and the wait counts."""

COPY = "a copy into pinned memory"


def stall_gpu_blocking(bench: Bench) -> Result:
    """Wait until a state on a GPU may be changed again, without a guard; compare with a copy into pinned memory."""
    result = Result("stall_gpu_blocking", "s", is_higher_better=False)
    if not _is_there(result):
        return result
    loop, folder = _loop(bench), bench.folder
    # Plain dictionaries: a module adds attributes to its own, which are not part of the state.
    state = {"model": dict(loop.model.state_dict()), "optimizer": loop.optimizer.state_dict(), "step": 1}
    nbytes = histories.nbytes_of(state)
    result.setting = {"state_nbytes": nbytes, "rounds": bench.rounds, "gpu": _gpu_name()}
    result.columns = ("durable_seconds", "copy_seconds")
    machine.check_space(folder, int(2.5 * nbytes))
    found, reasons = _other_tools(state, folder, bench.tools)
    result.unusable |= reasons
    copies = _Copies(state)

    def by_ckstore(compression: str, *, is_async: bool) -> Participant:
        def run() -> Sample:
            background.change(state)
            place = folder / "store"
            with open_store(place, compression) as store:
                if is_async:
                    store.prewarm(state)
                copied = copies.seconds()
                began = time.perf_counter()
                if is_async:
                    pending = store.commit_async(state, 1)
                    stall = time.perf_counter() - began
                    receipt = pending.result()
                else:
                    receipt = store.commit(state, 1)
                durable = time.perf_counter() - began
            machine.remove_tree(place)
            facts = {"durable_seconds": durable, "copy_seconds": copied, **facts_of(receipt)}
            return Sample(stall if is_async else durable, facts)

        return run

    participants: dict[str, Participant] = {COPY: lambda: Sample(copies.seconds())}
    participants |= {tool.name: blocked_by(tool, state, folder, copies.seconds) for tool in found}
    mine = {f"ckstore {name}": by_ckstore(name, is_async=True) for name in VARIANTS}
    waiting = {f"ckstore {name}, commit": by_ckstore(name, is_async=False) for name in VARIANTS}
    interleave(result, participants | if_possible(bench, result, {**mine, **waiting}), bench.rounds)
    result.add_ratios(list(mine), list(participants))
    note_stalls(result, list(mine), list(participants))
    _note_walls(result)
    return result


def stall_gpu_guarded(bench: Bench) -> Result:
    """Train on a GPU with the fused optimizer guarded, commit in the background, and measure the slowdown."""
    result = Result("stall_gpu_guarded", "s a step", is_higher_better=False)
    if not _is_there(result):
        return result
    plan = {torch.get_num_threads(): (*VARIANTS, cases_training.NOTHING)}
    found = cases_training.compare(
        bench, result.case, plan, _loop(bench), commits=COMMITS, steps_max=3 if bench.is_small else STEPS_MAX
    )
    found.setting["gpu"] = _gpu_name()
    return found


def no_gpu_reason() -> str:
    """Return why nothing can be measured on a GPU, or None."""
    return "" if torch.cuda.is_available() else "there is no CUDA GPU here"


def _is_there(result: Result) -> bool:
    """Return whether there is a GPU; if not, report why, here and in the result."""
    reason = no_gpu_reason()
    if reason:
        log(f"  {result.case} is left out: {reason}")
        result.unusable["GPU"] = reason
    return not reason


def _loop(bench: Bench) -> background.Loop:
    if bench.is_small:
        return background.Loop(bench.nbytes, tokens=16, device=DEVICE)
    return background.Loop(bench.nbytes, tokens=TOKENS, sequences=SEQUENCES, batches=BATCHES, device=DEVICE)


def _gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else DEVICE


def _other_tools(
    state: histories.State, folder: Path, names: list[str] | None
) -> tuple[list[background.AsyncTool], dict[str, str]]:
    """Return the tools that work here. Each has saved the state once, so that its reusable buffers exist."""
    return background.find(state, folder, names, {"DCP": lambda: background.dcp(is_pinned=torch.cuda.is_available())})


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class _Copies:
    """A copy of a state into one reused pinned buffer; stall times are compared with it."""

    def __init__(self, state: histories.State) -> None:
        sources = [tensor.detach().reshape(-1) for _, tensor in histories.tensors_of(state)]
        self._sources = [source.view(torch.uint8) for source in sources]
        lengths = [len(source) for source in self._sources]
        self._buffer = torch.zeros(sum(lengths), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._buffer.fill_(1)
        self._targets = self._buffer.split(lengths)

    def seconds(self) -> float:
        """Copy everything, and return the seconds."""
        _wait_for_device()
        began = time.perf_counter()
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source, non_blocking=True)
        _wait_for_device()
        return time.perf_counter() - began


def _note_walls(result: Result) -> None:
    """Note how much longer a background commit takes than a synchronous one of the same round."""
    for name in VARIANTS:
        one, other = result.samples.get(f"ckstore {name}"), result.samples.get(f"ckstore {name}, commit")
        if one and other:
            walls = [float(str(sample.facts["durable_seconds"])) for sample in one]
            times = [wall / sample.value for wall, sample in zip(walls, other, strict=True)]
            result.notes.append(
                f"{name}: in the background it takes {statistics.median(times):.2f} times ({min(times):.2f} to "
                f"{max(times):.2f}) as long until durable as a synchronous commit"
            )
    result.notes.append("every tool has saved before; its buffers are used again where it can do that")


CASES: dict[str, Callable[[Bench], Result]] = {
    "stall_gpu_blocking": stall_gpu_blocking,
    "stall_gpu_guarded": stall_gpu_guarded,
}
