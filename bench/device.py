"""The limits of the machine: durable direct writes, cold direct reads, copies and hashes in memory.

Other numbers of a run are divided by these limits. Each one is measured by the simplest program that reaches it:
aligned blocks of 4 MiB with O_DIRECT, at several depths, with threads and with io_uring where available. The best one
counts.
"""

from __future__ import annotations

import importlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ckstore.io.direct_io import require_supported_processor

BLOCK_NBYTES = 4 << 20
DEPTHS = (4, 8, 16, 32)
Transfer = Callable[[int, int, bool], None]
"""(descriptor, nbytes, is_write): transfer that many bytes, starting at offset 0."""


class Buffers:
    """Reused aligned blocks of random bytes: a device must not see zeros or fresh pages."""

    def __init__(self, count: int = max(DEPTHS)) -> None:
        self._memory = [mmap.mmap(-1, BLOCK_NBYTES) for _ in range(count)]
        for memory in self._memory:
            memory[:] = os.urandom(BLOCK_NBYTES)
        self.views = [memoryview(memory) for memory in self._memory]


def uring_reason() -> str | None:
    """Return why io_uring cannot be used here, or None."""
    try:
        require_supported_processor()
        ring_api: Any = importlib.import_module("liburing")
        ring = ring_api.Ring()
        ring_api.io_uring_queue_init(4, ring)
        ring_api.io_uring_queue_exit(ring)
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def by_threads(buffers: Buffers, depth: int) -> Transfer:
    """Return a transfer by ``depth`` threads, each with one pwritev or preadv in flight."""

    def transfer(descriptor: int, nbytes: int, is_write: bool) -> None:
        move = os.pwritev if is_write else os.preadv

        def lane(number: int) -> None:
            for offset in range(number * BLOCK_NBYTES, nbytes, depth * BLOCK_NBYTES):
                view = buffers.views[number][: min(BLOCK_NBYTES, nbytes - offset)]
                if move(descriptor, [view], offset) != len(view):
                    raise OSError("short transfer")

        with ThreadPoolExecutor(depth) as pool:
            list(pool.map(lane, range(depth)))

    return transfer


def by_uring(buffers: Buffers, depth: int) -> Transfer:
    """Return a transfer by one thread with ``depth`` requests in a ring."""
    ring_api: Any = importlib.import_module("liburing")

    def transfer(descriptor: int, nbytes: int, is_write: bool) -> None:
        prepare = ring_api.io_uring_prep_writev if is_write else ring_api.io_uring_prep_readv
        ring, completions = ring_api.Ring(), ring_api.Cqe()
        ring_api.io_uring_queue_init(depth, ring)
        # The binding keeps no reference to the buffers that the kernel uses: this table does.
        in_flight: dict[int, tuple[Any, memoryview]] = {}
        free, offset = list(range(depth)), 0
        try:
            while offset < nbytes or in_flight:
                while free and offset < nbytes:
                    slot = free.pop()
                    view = buffers.views[slot][: min(BLOCK_NBYTES, nbytes - offset)]
                    vector = ring_api.Iovec([view])
                    request = ring_api.io_uring_get_sqe(ring)
                    prepare(request, descriptor, vector, offset)
                    request.user_data = slot
                    in_flight[slot] = (vector, view)
                    offset += len(view)
                    ring_api.io_uring_submit(ring)
                ring_api.io_uring_wait_cqe(ring, completions)
                done = completions[0]
                slot = done.user_data
                is_short = done.res != len(in_flight.pop(slot)[1])
                ring_api.io_uring_cqe_seen(ring, done)
                if is_short:
                    raise OSError("short transfer")
                free.append(slot)
        finally:
            ring_api.io_uring_queue_exit(ring)

    return transfer


def transfers(buffers: Buffers, depths: Sequence[int] = DEPTHS) -> dict[str, Transfer]:
    """Return every way to transfer blocks on this machine, by name."""
    named = {f"threads x{depth}": by_threads(buffers, depth) for depth in depths}
    if uring_reason() is None:
        named |= {f"uring x{depth}": by_uring(buffers, depth) for depth in depths}
    return named


def _direct_flag(path: Path) -> int:
    """Return O_DIRECT, or 0 where the file system refuses it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return 0
    os.close(descriptor)
    return os.O_DIRECT


def write_durably(path: Path, nbytes: int, transfer: Transfer) -> float:
    """Write a new file of this size, make it durable, and return the seconds taken."""
    flag = _direct_flag(path)
    path.unlink(missing_ok=True)
    began = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        transfer(descriptor, nbytes, True)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    return time.perf_counter() - began


def read_cold(path: Path, nbytes: int, transfer: Transfer) -> float:
    """Read a file past the page cache and return the seconds taken."""
    flag = _direct_flag(path)
    began = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY | flag)
    try:
        transfer(descriptor, nbytes, False)
    finally:
        os.close(descriptor)
    return time.perf_counter() - began


def best_write(folder: Path, nbytes: int, buffers: Buffers, depths: Sequence[int] = DEPTHS) -> dict[str, float]:
    """Return the seconds of a durable write in every way; each file is removed."""
    path, seconds = folder / "device.bin", {}
    for name, transfer in transfers(buffers, depths).items():
        seconds[name] = write_durably(path, nbytes, transfer)
        path.unlink()
    return seconds


def best_read(path: Path, nbytes: int, buffers: Buffers, depths: Sequence[int] = DEPTHS) -> dict[str, float]:
    """Return the seconds of a cold read in every way."""
    return {name: read_cold(path, nbytes, transfer) for name, transfer in transfers(buffers, depths).items()}


def copy_seconds(arrays: Sequence[np.ndarray], threads: int) -> float:
    """Return the seconds to copy all bytes, on several threads, into a reused buffer."""
    views = [array.reshape(-1).view(np.uint8) for array in arrays]
    buffer = np.ones(256 << 20, dtype=np.uint8)
    pieces = [view[begin : begin + BLOCK_NBYTES] for view in views for begin in range(0, len(view), BLOCK_NBYTES)]
    slots = len(buffer) // BLOCK_NBYTES

    def copy(numbered: tuple[int, np.ndarray]) -> None:
        number, piece = numbered
        begin = number % slots * BLOCK_NBYTES
        np.copyto(buffer[begin : begin + len(piece)], piece)

    return _on_threads(copy, pieces, threads)


def hash_seconds(arrays: Sequence[np.ndarray], threads: int) -> float:
    """Return the seconds to compute the BLAKE3 of every 4 MiB of all bytes, on several threads."""
    import blake3

    views = [array.reshape(-1).view(np.uint8) for array in arrays]
    pieces = [view[begin : begin + BLOCK_NBYTES] for view in views for begin in range(0, len(view), BLOCK_NBYTES)]

    def digest(numbered: tuple[int, np.ndarray]) -> None:
        blake3.blake3(numbered[1].data).digest()

    return _on_threads(digest, pieces, threads)


def _on_threads(work: Callable[[tuple[int, np.ndarray]], None], pieces: list[np.ndarray], threads: int) -> float:
    lanes = [list(enumerate(pieces))[number::threads] for number in range(threads)]

    def lane(numbered: list[tuple[int, np.ndarray]]) -> None:
        for item in numbered:
            work(item)

    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(pool.map(lane, lanes))
        return time.perf_counter() - began
