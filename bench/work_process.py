"""A process that does one part of a commit's work during training; ``bench.minimal_commit`` starts it.

It has its own memory, in shared pages like those of an arena. For each input line it processes all of this memory once,
piece by piece, on one thread, and prints the number of bytes. It always hashes; it encodes and writes if asked to. With
both, it writes as many bytes of each piece as encoding would leave.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

if TYPE_CHECKING:
    from ckstore.codec.chunk_codec import Encoded

Work = Callable[[memoryview, int], object]
"""Called with a piece and its offset."""

_DRAWN = 1 << 22
"""Random floats that are drawn; the rest repeats them, each repetition with another factor."""


def make_floats(nbytes: int) -> memoryview:
    """Return floats of plausible magnitudes, in whole pages, because O_DIRECT requires that."""
    memory = mmap.mmap(-1, nbytes)
    floats = np.frombuffer(memory, np.float32, nbytes // 4)
    drawn = (0.02 * np.random.default_rng(0).standard_normal(_DRAWN)).astype(np.float32)
    for number, begin in enumerate(range(0, len(floats), _DRAWN)):
        part = floats[begin : begin + _DRAWN]
        np.multiply(drawn[: len(part)], np.float32(1 + 2**-9) ** number, out=part)
    return memoryview(memory)


def hashing() -> Work:
    """Return a function that hashes a piece."""
    return lambda piece, begin: blake3(piece).digest()


def coding(piece_nbytes: int) -> Callable[[memoryview, int], Encoded]:
    """Return a function that encodes a piece as ``fast`` does, without a base."""
    from ckstore.codec import chunk_codec

    scratch = chunk_codec.Scratch(piece_nbytes)
    return lambda piece, begin: chunk_codec.encode(piece, width=4, is_float=True, compression="fast", scratch=scratch)


def writing(descriptor: int) -> Work:
    """Return a function that writes a piece at its offset."""

    def write(piece: memoryview, begin: int) -> None:
        while piece:
            written = os.pwrite(descriptor, piece, begin)
            piece, begin = piece[written:], begin + written

    return write


def open_direct(path: Path, nbytes: int) -> tuple[int, str]:
    """Make a file of this size and open it, with O_DIRECT where possible; return the descriptor and the mode."""
    flags = os.O_WRONLY | os.O_CREAT
    try:
        descriptor, how = os.open(path, flags | os.O_DIRECT, 0o600), "O_DIRECT"
    except OSError:
        descriptor, how = os.open(path, flags, 0o600), "page cache"
    os.posix_fallocate(descriptor, 0, nbytes)
    return descriptor, how


def main() -> int:
    """Process everything once for each line of standard input, until the end of input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--piece", type=int, required=True)
    parser.add_argument("--code", action="store_true")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    held, hash_piece = make_floats(given.nbytes), hashing()
    code = coding(given.piece) if given.code else None
    descriptor, how = -1, "not at all"
    if given.write is not None:
        descriptor, how = open_direct(given.write, given.nbytes)
    write = writing(descriptor)
    print(how, flush=True)
    for _ in sys.stdin:
        seen = position = 0
        for begin in range(0, given.nbytes, given.piece):
            piece = held[begin : begin + given.piece]
            hash_piece(piece, begin)
            # Whole pages, because O_DIRECT requires that.
            stored = len(piece) if code is None else -(-code(piece, begin).nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if descriptor >= 0:
                write(piece[:stored], position)
            seen, position = seen + len(piece), position + stored
        if descriptor >= 0:
            os.fdatasync(descriptor)
        print(seen, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
