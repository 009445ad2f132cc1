"""The cases engine_*: the throughput of each I/O engine alone, compared with the simplest programs."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial

from bench import device, machine
from bench.measure import Participant, Result, Sample
from bench.workbench import Bench, gigabytes_per_second, with_ckstore

ENGINES = ("uring", "pwrite")


def by_engine(buffers: device.Buffers, name: str, folder: str, *, is_write: bool) -> device.Transfer:
    """Return a transfer through one of ckstore's engines, with as many blocks in flight as a store uses."""
    from ckstore.io.direct_io import IoRequest
    from ckstore.io.engine_choice import choose_engine
    from ckstore.io.local import READ_DEPTH, WRITE_DEPTH

    engine, _ = choose_engine("uring" if name == "uring" else "pwrite", folder)
    depth = (WRITE_DEPTH if is_write else READ_DEPTH)[engine.name]

    def transfer(descriptor: int, nbytes: int, is_write: bool) -> None:
        free: queue.SimpleQueue[tuple[int, OSError | None]] = queue.SimpleQueue()
        slots = min(2 * depth, len(buffers.views))
        for slot in range(slots):
            free.put((slot, None))
        io_queue = engine.open_queue(depth=depth)

        def next_free() -> int:
            slot, error = free.get()
            if error is not None:
                raise error
            return slot

        try:
            for offset in range(0, nbytes, device.BLOCK_NBYTES):
                slot = next_free()
                view = buffers.views[slot][: min(device.BLOCK_NBYTES, nbytes - offset)]

                def on_done(moved: int, error: OSError | None, slot: int = slot, wanted: int = len(view)) -> None:
                    free.put((slot, OSError("short transfer") if error is None and moved != wanted else error))

                io_queue.submit(IoRequest("write" if is_write else "read", descriptor, view, offset, on_done))
            for _ in range(slots):
                next_free()
        finally:
            io_queue.close()

    return transfer


def engine_write(bench: Bench) -> Result:
    """Write aligned blocks through each engine until they are durable."""
    return _moved(bench, "engine_write", is_write=True)


def engine_read(bench: Bench) -> Result:
    """Read aligned blocks through each engine, with cold caches."""
    return _moved(bench, "engine_read", is_write=False)


def _moved(bench: Bench, name: str, *, is_write: bool) -> Result:
    result = Result(name, "GB/s", is_higher_better=True)
    # Whole pages, because O_DIRECT requires that.
    nbytes, folder, buffers = bench.nbytes // 4096 * 4096, bench.folder, device.Buffers()
    result.setting = {"nbytes": nbytes, "block_nbytes": device.BLOCK_NBYTES, "rounds": bench.rounds}
    machine.check_space(folder, 2 * nbytes)
    path = folder / "device.bin"
    if not is_write:
        device.write_durably(path, nbytes, device.by_threads(buffers, 8))

    def by(ways: Callable[[], dict[str, float]]) -> Participant:
        def run() -> Sample:
            machine.make_cold(folder)
            speeds = {way: gigabytes_per_second(nbytes, seconds) for way, seconds in ways().items()}
            return Sample(max(speeds.values()), {"ways": speeds})

        return run

    def on_device() -> dict[str, float]:
        return device.best_write(folder, nbytes, buffers) if is_write else device.best_read(path, nbytes, buffers)

    def on_engine(engine: str) -> dict[str, float]:
        transfer = by_engine(buffers, engine, str(folder), is_write=is_write)
        if not is_write:
            return {engine: device.read_cold(path, nbytes, transfer)}
        seconds = device.write_durably(path, nbytes, transfer)
        path.unlink()
        return {engine: seconds}

    mine = {f"ckstore {engine}": by(partial(on_engine, engine)) for engine in ENGINES}
    return with_ckstore(bench, result, {"device": by(on_device)}, mine)


CASES: dict[str, Callable[[Bench], Result]] = {"engine_write": engine_write, "engine_read": engine_read}
