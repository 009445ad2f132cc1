"""A process that repeats one stage of a commit while ``bench.cases_stages`` trains.

It holds chunks of floats, each with a base and with the stored form of both, together larger than any cache. A line on
standard input names the stage to repeat from then on, on one thread, or is ``rest``. The answer to the next line has
the number of chunks and the seconds.
"""

from __future__ import annotations

import argparse
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.work_process import make_floats
from ckstore.codec import chunk_codec, kernels
from ckstore.commit.pipeline import identity_and_checksum
from ckstore.format.wire import new_xxh3
from ckstore.store.memory_budget import WRITE_BLOCK_NBYTES, WRITE_BLOCKS

REST = "rest"
CHUNK_NBYTES = 4 << 20
_PIECE_NBYTES = 512 << 10
_WIDTH = 4

Stage = Callable[[int], object]
"""Called with the number of a chunk."""


@dataclass(frozen=True)
class Stored:
    """A stored chunk."""

    steps: tuple[tuple[int, bytes], ...]
    payload: memoryview


class Chunks:
    """Chunks, and the stages of a commit."""

    def __init__(self, count: int) -> None:
        self.count = count
        held = make_floats(2 * count * CHUNK_NBYTES)
        self._plain = [held[i * CHUNK_NBYTES : (i + 1) * CHUNK_NBYTES] for i in range(count)]
        self._base = [held[i * CHUNK_NBYTES : (i + 1) * CHUNK_NBYTES] for i in range(count, 2 * count)]
        drawn = 1e-5 * np.random.default_rng(1).standard_normal(CHUNK_NBYTES // _WIDTH).astype(np.float32)
        for plain, base in zip(self._plain, self._base, strict=True):
            np.add(np.frombuffer(plain, np.float32), drawn, out=np.frombuffer(base, np.float32))
        self._scratch = chunk_codec.Scratch(CHUNK_NBYTES)
        self._room = memoryview(np.zeros(CHUNK_NBYTES, np.uint8))
        self._blocks = memoryview(np.zeros(WRITE_BLOCK_NBYTES * WRITE_BLOCKS, np.uint8))
        self._whole = [self._stored(self.code(number)) for number in range(count)]
        self._residual = [self._stored(self.code_less_a_base(number)) for number in range(count)]

    def stages(self) -> dict[str, Stage]:
        """Return the stages by name."""
        return {
            "hash": lambda number: identity_and_checksum(self._plain[number], None),
            "code": self.code,
            "code less a base": self.code_less_a_base,
            "copy into blocks": self.copy,
            "decode": lambda number: self._decode(self._whole[number], None),
            "add to a base": lambda number: self._decode(self._residual[number], self._base[number]),
        }

    def code(self, number: int) -> chunk_codec.Encoded:
        """Encode a chunk without a base, as ``fast`` does."""
        plain = self._plain[number]
        return chunk_codec.encode(plain, width=_WIDTH, is_float=True, compression="fast", scratch=self._scratch)

    def code_less_a_base(self, number: int) -> chunk_codec.Encoded:
        """Encode the difference of a chunk from its base."""
        how = {"width": _WIDTH, "is_float": True, "scratch": self._scratch}
        encoded = chunk_codec.encode_delta(self._plain[number], self._base[number], compression="fast", **how)
        assert encoded is not None, "such a difference pays"
        return encoded

    def copy(self, number: int) -> None:
        """Copy the stored form of a chunk into the blocks, in rotation, and decode it there."""
        payload, checksum = self._whole[number].payload, new_xxh3()
        place = number * CHUNK_NBYTES % (len(self._blocks) - CHUNK_NBYTES)
        for begin in range(0, len(payload), _PIECE_NBYTES):
            piece = payload[begin : begin + _PIECE_NBYTES]
            target = self._blocks[place + begin : place + begin + len(piece)]
            kernels.copy_bytes(piece, target)
            checksum.update(target)

    def _stored(self, encoded: chunk_codec.Encoded) -> Stored:
        return Stored(encoded.steps, memoryview(b"".join(encoded.parts)))

    def _decode(self, stored: Stored, base: memoryview | None) -> None:
        chunk_codec.decode(
            stored.payload, stored.steps, width=_WIDTH, destination=self._room, scratch=self._scratch, base=base
        )
        new_xxh3().update(self._room)


def main() -> int:
    """Run the stage that each line of standard input names, until the end of input."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chunks", type=int, required=True)
    chunks = Chunks(parser.parse_args().chunks)
    stages = chunks.stages()
    print("ready", *stages, sep="\t", flush=True)
    word, done, began = REST, 0, time.perf_counter()
    while True:
        if word == REST or select.select([sys.stdin], [], [], 0)[0]:
            line = sys.stdin.readline()
            if not line:
                return 0
            print(done, time.perf_counter() - began, sep="\t", flush=True)
            word, done, began = line.strip(), 0, time.perf_counter()
        else:
            stages[word](done % chunks.count)
            done += 1


if __name__ == "__main__":
    sys.exit(main())
