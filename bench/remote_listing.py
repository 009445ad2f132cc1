"""List a long history in a bucket with high latency, and plan its collection.

Usage: ``python -m bench.remote_listing [--count 1000] [--ms 30] [--rounds 3] [--results bench/results]``. It starts
moto on the loopback, and a proxy that delays each request. "one at a time" uses a client without concurrent requests.
moto serves few requests per second; with a real server only the latency counts.
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
from bench.measure import Result, Sample, interleave, save, show
from ckstore.io.remote import client
from ckstore.io.remote.client import RemoteOptions
from ckstore.opening import open_existing
from support.fault_proxy import FaultProxy, fault_proxy
from support.s3_server import s3_server

AT_ONCE = {"": RemoteOptions(), ", one at a time": RemoteOptions(reads_at_once=1)}


def fill(folder: Path, address: str, count: int) -> None:
    """Make a store of this many small checkpoints in a folder, and copy its files to the bucket."""
    with ckstore.open(folder, policy=ckstore.Policy(threads=1)) as store:
        for step in range(count):
            store.commit({"w": np.arange(8) + step}, step, metrics={"loss": 1 / (step + 1)})
    target = from_url(address, client_options={"allow_http": True})
    files = [path for path in folder.rglob("*") if path.is_file() and path.parts[-3] != "tmp"]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda path: obstore.put(target, str(path.relative_to(folder)), path.read_bytes()), files))


def listed(address: str, count: int) -> None:
    with ckstore.open(address, create=False) as store:
        assert len(store.log()) == count


def planned(address: str, count: int) -> None:
    with open_existing(address) as store:
        plan = store.gc(ckstore.Retention(keep_last=10), dry_run=True).plan
        assert len(plan.drops) == count - 10


def measured(act: Callable[[], None], options: RemoteOptions, proxy: FaultProxy, ms: float) -> Sample:
    client.DEFAULT_OPTIONS = options

    def wait(number: int, method: str, path: str) -> str:
        time.sleep(ms / 1e3)
        return ""

    proxy.begin(wait)
    begun = time.perf_counter()
    act()
    return Sample(time.perf_counter() - begun, {"requests": len(proxy.seen)})


def main() -> None:
    """Print seconds and requests, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--ms", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=None, help="keep the record in this folder")
    given = parser.parse_args()
    with s3_server() as server, fault_proxy(server.endpoint) as proxy, tempfile.TemporaryDirectory() as folder:
        os.environ.update(server.environment)
        address = server.new_address()
        fill(Path(folder) / "store", address, given.count)
        os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        result = Result("far", "s", is_higher_better=False, columns=("requests",))
        result.setting = {"checkpoints": given.count, "ms a request": given.ms, "busy": machine.busy_cores()}
        acts = {"log": listed, "gc --dry-run": planned}
        participants = {
            f"{name}{how}": lambda act=act, options=options: measured(
                lambda: act(address, given.count), options, proxy, given.ms
            )
            for name, act in acts.items()
            for how, options in AT_ONCE.items()
        }
        interleave(result, participants, given.rounds)
        for name in acts:
            result.add_ratios([name], [f"{name}, one at a time"])
        show(result)
        if given.results is not None:
            print(save(result, given.results, Path(folder)))


if __name__ == "__main__":
    main()
