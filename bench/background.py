"""What the cases of commits in the background share: rivals, the copy they are held against, and training loops.

A rival begins a save and returns when its caller may go on and change the state; what it returns waits until the save
is durable, under the same promise for everybody: who does not sync is followed by an fsync of all its files.
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
from bench.rivals import _quiet

PIECE_NBYTES = 4 << 20
Finish = Callable[[], object]


@dataclass(frozen=True)
class Rival:
    """A tool: how it begins to save a state into an empty folder; what that returns waits until it is durable."""

    name: str
    begin: Callable[[State, Path], Finish]


def dcp(*, is_pinned: bool = False) -> Rival:
    """Return torch's distributed checkpointing, whose copies are kept and used again: that is its faster way.

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

    return Rival("DCP async_save", begin)


def torchsnapshot() -> Rival:
    """Return torchsnapshot, which copies to the host before it returns."""
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

    return Rival("torchsnapshot async_take", begin)


def deepcopy_thread() -> Rival:
    """Return what people write themselves: clone everything, and let a thread save it."""

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

    return Rival("clone, then torch.save on a thread", begin)


MAKERS: dict[str, Callable[[], Rival]] = {
    "DCP": dcp,
    "torchsnapshot": torchsnapshot,
    "torch.save": deepcopy_thread,
}


def find(
    trial: State,
    folder: Path,
    names: list[str] | None,
    otherwise: Mapping[str, Callable[[], Rival]] = MappingProxyType({}),
) -> tuple[list[Rival], dict[str, str]]:
    """Return the rivals that work here, with the reasons for the others; some may be made otherwise than by default."""
    found, reasons = [], {}
    for name, make in (MAKERS | dict(otherwise)).items():
        if names is not None and name not in names:
            continue
        place = folder / f"trial-{name}"
        place.mkdir()
        try:
            rival = make()
            rival.begin(trial, place)()
            found.append(rival)
        except Exception as error:
            reasons[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:
            machine.remove_tree(place)
    return found, reasons


class Copies:
    """The memory copy that staging is held against: the same tensors, into one buffer that is used again.

    Two ways, and in each round the faster one counts: numpy on threads, each of which takes the next piece of 4 MiB,
    and torch's own copy, which splits a large tensor among its threads.
    """

    def __init__(self, state: State, threads: int) -> None:
        self._sources = [tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in tensors_of(state)]
        self._buffer = torch.zeros(sum(len(source) for source in self._sources), dtype=torch.uint8)
        # A zeroed buffer is mapped to one page of zeros until it is written to.
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
        """Copy everything, both ways, and return how long each took."""
        return {"numpy on threads": self._by_numpy(), "torch": self._by_torch()}

    def shortest(self) -> float:
        """Copy everything, both ways, and return the seconds of the faster one.

        How fast memory is changes from one second to the next where a host has other guests.
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
        """What is in the buffer."""
        return self._buffer.numpy().tobytes()

    def close(self) -> None:
        """End the threads and let go of the buffer."""
        self._pool.shutdown()
        self._pieces.clear()
        self._targets.clear()


def change(state: State) -> None:
    """Change nearly every element a little, so that the next commit finds nothing that it has stored already."""
    with torch.no_grad():
        for _, tensor in tensors_of(state):
            if tensor.is_floating_point():
                tensor.mul_(1 + 2**-9)


def owner_of(state: State) -> torch.optim.Optimizer:
    """Make the weights of a state parameters, and return an optimizer that owns them and the moments of the state."""
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in state["model"].items()}
    state["model"] = weights
    optimizer = torch.optim.AdamW(weights.values())
    for parameter, moments in zip(weights.values(), state["optimizer"]["state"].values(), strict=True):
        optimizer.state[parameter] = moments
    return optimizer


@dataclass
class Loop:
    """A training loop with real forward and backward passes: a GPT of bytes and its AdamW, in any size.

    Args:
        nbytes: Of weights and moments together.
        tokens: Of one sequence.
        batches: Of one step, which adds up their gradients.
        sequences: Of one batch.
        device: Where it is trained; on a GPU by the fused AdamW, and a step is over when the GPU is done with it.
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
        # Moments exist from here on.
        self.train_one_step()

    def train_one_step(self) -> None:
        """Take one step."""
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
        """What a trainer commits."""
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step}


def count_in_python(is_over: Callable[[], bool]) -> float:
    """Run a loop of pure Python until told otherwise; return rounds of it a second.

    It asks every 64 rounds, about twice a millisecond, so that asking takes no part of it, whatever that costs.
    """
    numbers, total, rounds = list(range(256)), 0, 0
    began = time.perf_counter()
    while True:
        for _ in range(64):
            for number in numbers:
                total += number * number % 7
        rounds += 64
        # Not before the first rounds: what is over by then, on a busy machine, has a speed too.
        if is_over():
            return rounds / (time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class Counted:
    """A loop of pure Python beside one save.

    Args:
        rate: Rounds a second.
        delayed_share: Of its time, for which it could have run and had no processor.
        seconds: What the save took; the loop may have begun later.
    """

    rate: float
    delayed_share: float
    seconds: float


def count_delayed(is_over: Callable[[], bool], began: float) -> Counted:
    """Run the loop until told otherwise, beside what began at that time by ``time.perf_counter``."""
    loop_began, delayed = time.perf_counter(), delay_seconds()
    rate = count_in_python(is_over)
    ended = time.perf_counter()
    return Counted(rate, (delay_seconds() - delayed) / (ended - loop_began), ended - began)


@dataclass(frozen=True, slots=True)
class Beside:
    """A loop of pure Python beside saves.

    Args:
        rate: Rounds a second.
        share: Of the rounds a second of the same loop alone, right before and right after.
        had_processor: Share of the time for which the loop did not wait for a processor.
        seconds: What a save took.
    """

    rate: float
    share: float
    had_processor: float
    seconds: float


def count_beside(count: Callable[[], Counted], *, enough_seconds: float) -> Beside:
    """Run the loop beside saves until so much of it was seen, and alone before and after each of them.

    Args:
        count: Saves once, and runs the loop until that is over.
        enough_seconds: Of loops beside saves.
    """

    def alone() -> float:
        until = time.perf_counter() + enough_seconds / 4
        return count_in_python(lambda: time.perf_counter() >= until)

    found, quiet, total = list[Counted](), [alone()], 0.0
    while total < enough_seconds:
        found.append(count())
        total += found[-1].seconds
        quiet.append(alone())
    rounds = sum(counted.rate * counted.seconds for counted in found)
    beside = [(before + after) / 2 for before, after in itertools.pairwise(quiet)]
    expected = sum(rate * counted.seconds for rate, counted in zip(beside, found, strict=True))
    delayed = sum(counted.delayed_share * counted.seconds for counted in found)
    return Beside(rounds / total, rounds / expected, 1 - delayed / total, total / len(found))


def delay_seconds() -> float:
    """Return for how long the main thread of this process could have run and had no processor."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def cpu_seconds(pid: int) -> float:
    """Return for how long a process has computed, the kernel's work for it included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def usage_of(pid: int) -> Iterator[tuple[str, int]]:
    """Yield what a process has: memory of its own and of files in bytes, descriptors, threads, children."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssFile"):
            yield name, int(value.split()[0]) * 1024
        elif name == "Threads":
            yield name, int(value)
    yield "descriptors", sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    tasks = Path(f"/proc/{pid}/task").iterdir()
    yield "children", sum(len((task / "children").read_text().split()) for task in tasks)
