"""``ckstore doctor`` describes a machine and a store; ``ckstore bench`` measures commits and restores on a disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ckstore
from ckstore.cli import render
from ckstore.cli.parser import AsJson, Shared
from ckstore.cli.render import Column, Table
from ckstore.clock import SYSTEM_CLOCK
from ckstore.errors import NotFoundError

if TYPE_CHECKING:
    from ckstore.api import Store


MEASURE_NBYTES = 64 << 20

_BLOCK_NBYTES = 8 << 20
_TENSORS = 16
_FINDINGS = Table(Column("what", "topic"), Column("found", is_elastic=True), Column("verdict"))


def doctor(
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="A store, or a folder that may become one.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also write 64 MiB to PATH and time it.")] = False,
    as_json: AsJson = False,
    allow_shared_folder: Shared = False,
) -> None:
    """Describe this machine and a store.

    Include the output when you report a problem. Nothing is written unless --measure is given. A finding marked
    "warning" needs your attention.
    """
    # Not at module level: it loads numpy, and `ckstore --help` imports every command's module.
    from ckstore.ops.inspect.doctor import Finding, diagnose_machine, diagnose_store

    findings = diagnose_machine()
    if path is not None:
        findings += diagnose_store(path, allow_shared_folder=allow_shared_folder)
    if measure:
        if path is None:
            raise NotFoundError("--measure needs a PATH", todo="name a folder on the disk to measure")
        seconds = _plain_write(Path(path.removeprefix("file://")), MEASURE_NBYTES)
        found = f"{render.rate(MEASURE_NBYTES, seconds)}: {render.size(MEASURE_NBYTES)} written and synced"
        findings.append(Finding("plain write", found))
    if as_json:
        render.print_json({"path": path, "findings": findings})
        return
    if render.is_terminal():
        for one in findings:
            mark = "" if one.verdict == "ok" else f"[{one.verdict}] "
            render.say(f"{one.topic:<14} {mark}{one.found}")
    else:
        _FINDINGS.print(findings)


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement: its name, its duration, and its bytes on the disk."""

    what: str
    seconds: float
    disk_nbytes: int


def bench(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A folder on the disk to measure; it must exist.")],
    mib: Annotated[int, typer.Option("--size", min=16, max=65536, metavar="MIB", help="MiB of state.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Measure commits and restores on PATH's disk.

    They are compared with a plain write of the same size. The state is similar to that of a training: random weights as
    precise as bfloat16, and float32 optimizer moments. Everything is written to a temporary folder in PATH, which takes
    about four times the size and is removed at the end.
    """
    folder = Path(path.removeprefix("file://"))
    if not folder.is_dir():
        raise NotFoundError("no such folder", where=folder, todo="name a folder on the disk to measure")
    with tempfile.TemporaryDirectory(prefix=".ckstore-bench-", dir=folder) as scratch:
        plain = _plain_write(Path(scratch), mib << 20)
        timings = [Timing("plain write + fsync", plain, mib << 20), *_measure(Path(scratch) / "store", mib << 20)]
    if as_json:
        render.print_json({"path": path, "state_nbytes": mib << 20, "timings": timings})
        return

    def relative(timing: Timing) -> str:
        return f"{plain / max(timing.seconds, 1e-9):.2f}x as fast"

    table = Table(
        Column("what"),
        Column("time", "seconds", render.duration, is_number=True),
        Column("rate of state", lambda timing: render.rate(mib << 20, timing.seconds), is_number=True),
        Column("on disk", "disk_nbytes", render.size, is_number=True),
        Column("vs plain write", relative, is_number=True),
    )
    table.print(timings, title=f"state of {render.size(mib << 20)} in {folder}")


def _plain_write(folder: Path, nbytes: int) -> float:
    """Return the seconds to write and sync random bytes in the folder."""
    block = memoryview(os.urandom(min(_BLOCK_NBYTES, nbytes)))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = SYSTEM_CLOCK.monotonic()
        for _ in range(0, nbytes, len(block)):
            rest = block
            while len(rest):
                rest = rest[os.write(file.fileno(), rest) :]
        os.fsync(file.fileno())
        return SYSTEM_CLOCK.monotonic() - start


def _measure(folder: Path, nbytes: int) -> list[Timing]:
    state, change = _synthetic_state(nbytes)
    timings: list[Timing] = []
    with ckstore.open(folder) as store:
        for what in ("commit, first", "commit, a tenth changed", "commit, all changed"):
            if what != "commit, first":
                change(_TENSORS if what.endswith("all changed") else max(1, _TENSORS // 10))
            receipt = store.commit(state, len(timings))
            timings.append(Timing(what, receipt.seconds["total"], receipt.bytes_written))
        timings += _measure_reading(store, state)
    return timings


def _measure_reading(store: Store, state: Any) -> list[Timing]:
    stored = store.info("latest").bytes_stored
    start = SYSTEM_CLOCK.monotonic()
    store.restore(into=state)
    into = SYSTEM_CLOCK.monotonic()
    store.restore()
    fresh = SYSTEM_CLOCK.monotonic()
    store.verify("read", ref="latest")
    verified = SYSTEM_CLOCK.monotonic()
    return [
        Timing("restore into the state", into - start, stored),
        Timing("restore to new memory", fresh - into, stored),
        Timing("verify --level read", verified - fresh, stored),
    ]


def _synthetic_state(nbytes: int) -> tuple[dict[str, Any], Callable[[int], None]]:
    """Return a state, and a function that changes some of its tensors as a training step would."""
    import numpy as np

    rng = np.random.default_rng(0)
    count = nbytes // 4 // _TENSORS
    tensors = [rng.standard_normal(count, dtype=np.float32) * np.float32(0.02) for _ in range(_TENSORS)]
    for weights in tensors[: _TENSORS // 2]:
        # Keep the upper half of each float32, which is a bfloat16.
        weights.view(np.uint32)[:] &= 0xFFFF0000

    def change(tensor_count: int) -> None:
        for tensor in tensors[:tensor_count]:
            tensor *= np.float32(1.01)

    return {"model": {f"layer{index}": tensor for index, tensor in enumerate(tensors)}, "step": 0}, change
