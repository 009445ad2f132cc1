"""Shared parts of the cases about background commits: other tools, the reference copy, and training loops.

``AsyncTool.begin`` starts a save and returns when the caller may change the state again. The function that it returns
waits until the save is durable. If a tool does not sync its files, the bench calls fsync on all of them.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from examples.train_gpt import GPT, Settings
from torch import nn

from bench import machine
from bench.histories import LAYERS, State, tensors_of
from bench.other_tools import _quiet

PIECE_NBYTES = 4 << 20
Finish = Callable[[], object]


@dataclass(frozen=True)
class AsyncTool:
    """A tool with an asynchronous save.

    ``begin`` starts to save a state into an empty folder. The function that it returns waits until the save is durable.
    """

    name: str
    begin: Callable[[State, Path], Finish]


def dcp(*, is_pinned: bool = False) -> AsyncTool:
    """Return torch's distributed checkpointing, with reused staging buffers, which are its faster mode.

    Args:
        is_pinned: Copy from a GPU into pinned memory, without waiting for each tensor.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import async_save

    stager = DefaultStager(StagingOptions(is_pinned, False, False, is_pinned))

    def begin(state: State, folder: Path) -> Finish:
        with _quiet():
            writer = FileSystemWriter(folder / "dcp", sync_files=True, thread_count=2)
            saved: Any = async_save(state, storage_writer=writer, async_stager=stager)

        def finish() -> None:
            getattr(saved, "upload_completion", saved).result()
            machine.sync_tree(folder)

        return finish

    return AsyncTool("DCP async_save", begin)


def torchsnapshot() -> AsyncTool:
    """Return torchsnapshot, which copies to host memory before it returns."""
    with _quiet():
        import torchsnapshot as package

    def begin(state: State, folder: Path) -> Finish:
        with _quiet():
            pending = package.Snapshot.async_take(str(folder / "taken"), {"state": package.StateDict(**state)})

        def finish() -> None:
            with _quiet():
                pending.wait()
            machine.sync_tree(folder)

        return finish

    return AsyncTool("torchsnapshot async_take", begin)


def deepcopy_thread() -> AsyncTool:
    """Return what users write themselves: clone everything, and save it on a thread."""

    def begin(state: State, folder: Path) -> Finish:
        def clone(node: Any) -> Any:
            if isinstance(node, torch.Tensor):
                return node.detach().clone()
            if isinstance(node, dict):
                return {key: clone(child) for key, child in node.items()}
            return [clone(child) for child in node] if isinstance(node, list) else node

        def save() -> None:
            with (folder / "state.pt").open("wb") as stream:
                torch.save(copied, stream)
                stream.flush()
                os.fsync(stream.fileno())
            machine.sync_tree(folder)

        copied = clone(state)
        thread = threading.Thread(target=save)
        thread.start()
        return thread.join

    return AsyncTool("clone, then torch.save on a thread", begin)


MAKERS: dict[str, Callable[[], AsyncTool]] = {
    "DCP": dcp,
    "torchsnapshot": torchsnapshot,
    "torch.save": deepcopy_thread,
}


def find(
    trial: State,
    folder: Path,
    names: list[str] | None,
    otherwise: Mapping[str, Callable[[], AsyncTool]] = MappingProxyType({}),
) -> tuple[list[AsyncTool], dict[str, str]]:
    """Return the tools that work here, and the reason for each one that does not.

    Args:
        trial: A small state that each tool has to save.
        folder: Where to work.
        names: The tools to try; None: all.
        otherwise: Makers that replace the default ones, by name.
    """
    found, reasons = [], {}
    for name, make in (MAKERS | dict(otherwise)).items():
        if names is not None and name not in names:
            continue
        place = folder / f"trial-{name}"
        place.mkdir()
        try:
            tool = make()
            tool.begin(trial, place)()
            found.append(tool)
        except Exception as error:
            reasons[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:
            machine.remove_tree(place)
    return found, reasons


class Copies:
    """Memory copies of a state into one reused buffer; stall times are compared with them.

    There are two ways to copy, and in each round the faster one counts: numpy on several threads, each of which takes
    the next 4 MiB, and torch's own copy, which splits a large tensor among its threads.
    """

    def __init__(self, state: State, threads: int) -> None:
        self._sources = [tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in tensors_of(state)]
        self._buffer = torch.zeros(sum(len(source) for source in self._sources), dtype=torch.uint8)
        # A zeroed buffer maps a single page of zeros until it is written to.
        self._buffer.fill_(1)
        ends = np.cumsum([len(source) for source in self._sources])
        self._targets = [self._buffer[end - len(source) : end] for end, source in zip(ends, self._sources, strict=True)]
        self._pieces = [
            (target.numpy()[begin : begin + PIECE_NBYTES], source.numpy()[begin : begin + PIECE_NBYTES])
            for source, target in zip(self._sources, self._targets, strict=True)
            for begin in range(0, len(source), PIECE_NBYTES)
        ]
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def seconds(self) -> dict[str, float]:
        """Copy everything in both ways; return the seconds of each."""
        return {"numpy on threads": self._by_numpy(), "torch": self._by_torch()}

    def shortest(self) -> float:
        """Copy everything in both ways; return the seconds of the faster one.

        On a shared host the memory speed changes from second to second.
        """
        return min(self.seconds().values())

    def _by_numpy(self) -> float:
        turns = iter(self._pieces)
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    piece = next(turns, None)
                if piece is None:
                    return
                np.copyto(*piece)

        began = time.perf_counter()
        for done in [self._pool.submit(work) for _ in range(self._threads)]:
            done.result()
        return time.perf_counter() - began

    def _by_torch(self) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        began = time.perf_counter()
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)
        seconds = time.perf_counter() - began
        torch.set_num_threads(before)
        return seconds

    @property
    def copied(self) -> bytes:
        """The content of the buffer."""
        return self._buffer.numpy().tobytes()

    def close(self) -> None:
        """Stop the threads and release the buffer."""
        self._pool.shutdown()
        self._pieces.clear()
        self._targets.clear()


def change(state: State) -> None:
    """Change nearly every element slightly, so that the next commit cannot reuse stored chunks."""
    with torch.no_grad():
        for _, tensor in tensors_of(state):
            if tensor.is_floating_point():
                tensor.mul_(1 + 2**-9)


def owner_of(state: State) -> torch.optim.Optimizer:
    """Turn the weights of a state into parameters; return an optimizer that owns them and the moments."""
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in state["model"].items()}
    state["model"] = weights
    optimizer = torch.optim.AdamW(weights.values())
    for parameter, moments in zip(weights.values(), state["optimizer"]["state"].values(), strict=True):
        optimizer.state[parameter] = moments
    return optimizer


@dataclass
class Loop:
    """A training loop with real forward and backward passes: a byte-level GPT with AdamW, of any size.

    Args:
        nbytes: Bytes of weights and moments together.
        tokens: Tokens of a sequence.
        batches: Batches whose gradients are accumulated for one step.
        sequences: Sequences of a batch.
        device: Where to train. On a GPU the fused AdamW is used, and a step includes the synchronization with the GPU.
    """

    nbytes: int
    tokens: int = 64
    batches: int = 1
    sequences: int = 1
    device: str = "cpu"
    step: int = 0
    model: GPT = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        width = max(64, round((self.nbytes / 12 / 12 / LAYERS) ** 0.5 / 64) * 64)
        settings = Settings(layers=LAYERS, width=width, heads=width // 64, window=self.tokens, dropout=0.0)
        torch.manual_seed(0)
        self.model = GPT(settings).to(self.device)
        is_fused = self.device != "cpu"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, foreach=False, fused=is_fused)
        self._generator = torch.Generator().manual_seed(1)
        # The first step creates the moments.
        self.train_one_step()

    def train_one_step(self) -> None:
        """Do one optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.batches):
            shape = (self.sequences, self.tokens + 1)
            tokens = torch.randint(0, 256, shape, generator=self._generator).to(self.device)
            loss = self.model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.step += 1

    @property
    def state(self) -> dict[str, Any]:
        """The state that a trainer commits."""
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step}


def run_python_loop(is_over: Callable[[], bool]) -> float:
    """Run a loop of pure Python until ``is_over`` returns True; return rounds per second.

    ``is_over`` is called every 64 rounds, about twice a millisecond, so that its cost does not matter.
    """
    numbers, total, rounds = list(range(256)), 0, 0
    began = time.perf_counter()
    while True:
        for _ in range(64):
            for number in numbers:
                total += number * number % 7
        rounds += 64
        # At least 64 rounds are run, so that the speed is defined even if the save has already ended.
        if is_over():
            return rounds / (time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class LoopDuringSave:
    """A loop of pure Python during one save.

    Args:
        rate: Rounds per second.
        delayed_share: Share of its time in which the loop was ready to run but had no processor.
        seconds: Duration of the save; the loop may have started later.
    """

    rate: float
    delayed_share: float
    seconds: float


def run_loop_during_save(is_over: Callable[[], bool], began: float) -> LoopDuringSave:
    """Run the loop until ``is_over``, during a save that began at ``began`` (``time.perf_counter``)."""
    loop_began, delayed = time.perf_counter(), delay_seconds()
    rate = run_python_loop(is_over)
    ended = time.perf_counter()
    return LoopDuringSave(rate, (delay_seconds() - delayed) / (ended - loop_began), ended - began)


@dataclass(frozen=True, slots=True)
class LoopSpeed:
    """Speed of a loop of pure Python during saves.

    Args:
        rate: Rounds per second.
        share: Speed relative to the same loop alone, right before and right after.
        had_processor: Share of the time in which the loop did not wait for a processor.
        seconds: Mean duration of a save.
    """

    rate: float
    share: float
    had_processor: float
    seconds: float


def measure_loop_speed(count: Callable[[], LoopDuringSave], *, enough_seconds: float) -> LoopSpeed:
    """Run the loop during saves for a given total time, and alone before and after each save.

    Args:
        count: Saves once, and runs the loop until the save has ended.
        enough_seconds: Total time of loops during saves.
    """

    def alone() -> float:
        until = time.perf_counter() + enough_seconds / 4
        return run_python_loop(lambda: time.perf_counter() >= until)

    found, quiet, total = list[LoopDuringSave](), [alone()], 0.0
    while total < enough_seconds:
        found.append(count())
        total += found[-1].seconds
        quiet.append(alone())
    rounds = sum(measured.rate * measured.seconds for measured in found)
    quiet_means = [(before + after) / 2 for before, after in itertools.pairwise(quiet)]
    expected = sum(rate * measured.seconds for rate, measured in zip(quiet_means, found, strict=True))
    delayed = sum(measured.delayed_share * measured.seconds for measured in found)
    return LoopSpeed(rounds / total, rounds / expected, 1 - delayed / total, total / len(found))


def delay_seconds() -> float:
    """Return the time in which the main thread of this process was ready to run but had no processor."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, kernel time included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def usage_of(pid: int) -> Iterator[tuple[str, int]]:
    """Yield memory (own and mapped files, in bytes), descriptors, threads and children of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile"):
            yield name, int(value.split()[0]) * 1024
        elif name == "Threads":
            yield name, int(value)
    yield "descriptors", sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    tasks = Path(f"/proc/{pid}/task").iterdir()
    yield "children", sum(len((task / "children").read_text().split()) for task in tasks)
