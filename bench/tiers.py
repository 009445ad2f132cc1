"""Push, pull and restore through a bucket, compared with obstore alone for the same bytes and server.

Usage: ``python -m bench.tiers [--mib 256] [--rounds 3] [--results bench/results]``. It starts a server on the loopback
and prints medians of interleaved rounds. Compare only within one run. The server is the bottleneck, and reads a whole
object for each requested range, so that only ratios between equal requests are meaningful.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import obstore
from obstore.store import from_url

import ckstore
from bench import machine
from bench.measure import Result, Sample, save, show
from support.s3_server import S3Server, s3_server

TENSORS = 8
RANGE = 4 << 20
DONE = ("obstore put", "push", "obstore get", "pull", "obstore ranges", "restore", "restore one tensor")


def timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def with_obstore(address: str, files: list[Path], folder: Path) -> dict[str, float]:
    """Do the same as push, pull and restore with obstore alone: upload parts, write a durable file, read ranges."""
    store = from_url(address, client_options={"allow_http": True})
    up = timed(lambda: [obstore.put(store, path.name, path, use_multipart=True) for path in files])

    def to_disk() -> None:
        for path in files:
            with (folder / "copy").open("wb") as file:
                for piece in obstore.get(store, path.name).stream(min_chunk_size=4 << 20):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())

    def ranges() -> None:
        wanted = [(path.name, at) for path in files for at in range(0, path.stat().st_size - RANGE, RANGE)]
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(lambda each: obstore.get_range(store, each[0], start=each[1], length=RANGE), wanted))

    return {"obstore put": up, "obstore get": timed(to_disk), "obstore ranges": timed(ranges)}


def measure(folder: Path, server: S3Server, mib: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round, by operation."""
    seconds: dict[str, list[float]] = {name: [] for name in DONE}
    for number in range(rounds):
        path = folder / f"store-{number}"
        with ckstore.open(path, policy=ckstore.Policy(compression="none")) as store:
            source = np.random.default_rng(number)
            shape = (mib << 20) // 4 // TENSORS
            tensors = {f"w{index}": source.standard_normal(shape, np.float32) for index in range(TENSORS)}
            store.commit({"model": tensors}, 1)
            files = list(path.glob("packs/*/*.pack"))
            for name, value in with_obstore(server.new_address(), files, folder).items():
                seconds[name].append(value)
            address = server.new_address()
            seconds["push"].append(timed(lambda store=store, address=address: store.push(address, keep_local=0)))
            for file in files:
                file.unlink()
            seconds["restore one tensor"].append(timed(lambda store=store: store.restore(1, only="model.w3")))
            for file in (path / "cache").glob("*/*"):
                file.unlink()
            seconds["restore"].append(timed(lambda store=store: store.restore(1)))
            for file in (path / "cache").glob("*/*"):
                file.unlink()
            seconds["pull"].append(timed(store.pull))
    return seconds


def record_of(seconds: dict[str, list[float]], mib: int) -> Result:
    """Return the results in the format of other cases; ratios compare operations on the same bytes."""
    result = Result("tiers", "s", is_higher_better=False)
    result.setting = {"mib": mib, "rounds": len(seconds["push"]), "server": "moto on the loopback"}
    result.samples = {name: [Sample(value) for value in values] for name, values in seconds.items()}
    for ckstore_coder, theirs in (("push", "obstore put"), ("pull", "obstore get"), ("restore", "obstore ranges")):
        result.add_ratios([ckstore_coder], [theirs])
    return result


def main() -> None:
    """Print the ratios, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=None, help="keep the record in this folder")
    arguments = parser.parse_args()
    with s3_server() as server, tempfile.TemporaryDirectory() as folder:
        os.environ.update(server.environment)
        busy = round(machine.busy_cores(), 2)
        result = record_of(measure(Path(folder), server, arguments.mib, arguments.rounds), arguments.mib)
        result.setting["busy_cores_before"] = busy
        show(result)
        if arguments.results is not None:
            print(save(result, arguments.results, Path(folder)))


if __name__ == "__main__":
    main()
