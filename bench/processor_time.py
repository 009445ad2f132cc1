"""Processor time: user and system seconds of this process, and the least work of a save and of a load.

The time of all threads counts, and that of child processes after their end. Threads of the kernel, which write back the
page cache and drive the disk, belong to no process and are not counted.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from blake3 import blake3

from bench.coders import CHUNK_NBYTES
from bench.measure import Sample


class Meter:
    """Adds up the processor time of the sections that run inside ``running``.

    Args:
        is_one_thread: Count only the calling thread; otherwise the process and its children.
    """

    def __init__(self, *, is_one_thread: bool = False) -> None:
        self._is_one_thread = is_one_thread
        self.seconds = self.wall = 0.0
        self._system = 0.0

    @property
    def system(self) -> float:
        """Seconds in the kernel. The kernel samples them, so a short section may show none."""
        return min(self._system, self.seconds)

    @property
    def user(self) -> float:
        """Seconds outside the kernel."""
        return self.seconds - self.system

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens inside."""
        seconds, system, began = *self._read(), time.perf_counter()
        yield
        wall = time.perf_counter() - began
        seconds_after, system_after = self._read()
        self.seconds += seconds_after - seconds
        self._system += system_after - system
        self.wall += wall

    def sample(self, amount: float, **facts: object) -> Sample:
        """Return the seconds for one unit of the amount, and their parts.

        Args:
            amount: The size of the work, in the unit that the result divides by.
            facts: Further facts of the sample.
        """
        parts = {"user": self.user / amount, "system": self.system / amount, "wall": self.wall / amount}
        return Sample(self.seconds / amount, {**parts, **facts})

    def _read(self) -> tuple[float, float]:
        # getrusage does not count what the calling thread has used since the last tick. The clocks do.
        if self._is_one_thread:
            return time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_stime
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        system = resource.getrusage(resource.RUSAGE_SELF).ru_stime + children.ru_stime
        return time.process_time() + children.ru_utime + children.ru_stime, system


Piece = tuple[memoryview, int]
"""Bytes of a chunk, and the bytes of one element."""

Floor = Callable[[list[torch.Tensor], list[torch.Tensor]], Meter]
"""Works on the tensors of a state and on existing tensors of the same shapes."""


def pieces_of(tensors: Iterable[torch.Tensor]) -> Iterator[Piece]:
    """Cut tensors into chunks of 4 MiB."""
    for tensor in tensors:
        plain = tensor.reshape(-1).view(torch.uint8).numpy()
        for begin in range(0, len(plain), CHUNK_NBYTES):
            yield plain[begin : begin + CHUNK_NBYTES].data, tensor.element_size()


def _copy(target: memoryview, source: memoryview) -> None:
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class FastCoder:
    """The coder of compression ``fast``, without a base. A payload is valid until the next one is made."""

    def __init__(self) -> None:
        from ckstore.codec import chunk_codec

        self._codec, self._scratch = chunk_codec, chunk_codec.Scratch(CHUNK_NBYTES)
        self._block = np.ones(2 * CHUNK_NBYTES, np.uint8).data
        self._steps: tuple[tuple[int, bytes], ...] = ()
        self._payload = self._block[:0]

    def encode(self, piece: Piece) -> None:
        """Encode a chunk, and copy the result into a block, as a save must."""
        plain, width = piece
        found = self._codec.encode(plain, width=width, is_float=True, compression="fast", scratch=self._scratch)
        position = 0
        for part in found.parts:
            _copy(self._block[position : position + part.nbytes], part)
            position += part.nbytes
        self._steps, self._payload = found.steps, self._block[:position]

    def decode(self, destination: memoryview, width: int) -> None:
        """Decode the chunk that was encoded last."""
        self._codec.decode(
            self._payload, self._steps, width=width, destination=destination, scratch=self._scratch, base=None
        )


def save_floor(state: list[torch.Tensor], _: list[torch.Tensor], *, copies: bool, hashes: bool) -> Meter:
    """Copy every chunk into one reused block, hash it, or both."""
    meter, block = Meter(is_one_thread=True), np.ones(CHUNK_NBYTES, np.uint8).data
    with meter.running():
        for plain, _width in pieces_of(state):
            if hashes:
                blake3(plain).digest()
            if copies:
                _copy(block[: plain.nbytes], plain)
    return meter


def coded_save_floor(state: list[torch.Tensor], _: list[torch.Tensor]) -> Meter:
    """Hash and encode every chunk, copy what is stored into a reused block, and decode it from there."""
    meter, coder, decoded = Meter(is_one_thread=True), FastCoder(), np.ones(CHUNK_NBYTES, np.uint8).data
    with meter.running():
        for piece in pieces_of(state):
            plain, width = piece
            blake3(plain).digest()
            coder.encode(piece)
            coder.decode(decoded[: plain.nbytes], width)
    return meter


def load_floor(state: list[torch.Tensor], into: list[torch.Tensor]) -> Meter:
    """Copy every chunk to its destination, and hash it there."""
    meter = Meter(is_one_thread=True)
    with meter.running():
        for (plain, _), (place, _) in zip(pieces_of(state), pieces_of(into), strict=True):
            _copy(place, plain)
            blake3(place).digest()
    return meter


def coded_load_floor(state: list[torch.Tensor], into: list[torch.Tensor]) -> Meter:
    """Decode every chunk to its destination, and hash it there. Encoding is not counted."""
    meter, coder = Meter(is_one_thread=True), FastCoder()
    for piece, (place, width) in zip(pieces_of(state), pieces_of(into), strict=True):
        coder.encode(piece)
        with meter.running():
            coder.decode(place, width)
            blake3(place).digest()
    return meter


SAVE_FLOORS: dict[str, Floor] = {
    "floor: copy": partial(save_floor, copies=True, hashes=False),
    "floor: hash": partial(save_floor, copies=False, hashes=True),
    "floor: copy, hash": partial(save_floor, copies=True, hashes=True),
    "floor: copy, hash, encode, decode": coded_save_floor,
}
LOAD_FLOORS: dict[str, Floor] = {"floor: copy, hash": load_floor, "floor: hash, decode": coded_load_floor}
"""What any tool with the same promises has to do, on one thread: each name says which steps."""
