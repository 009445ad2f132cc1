"""Write the golden frames of outer products, once; a change of these files is a change of the format.

    python tests/golden/quant_outer/make_golden.py

The layout of a file is that of ``tests/golden/quant``: width u8, steps u8, 0 u16, lengths of the chunk, the base and
the payload u32 each, the steps, the base and the payload.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1]))

from ckstore.codec.byte_codecs import Scratch  # noqa: E402
from ckstore.config import FirstMomentSettings, LowRank, SecondMomentSettings, WeightSettings  # noqa: E402
from ckstore.hashing import digest_of  # noqa: E402
from ckstore.quant import chunk_codec  # noqa: E402
from ckstore.quant.chunk_codec import ChunkShape, QuantizedChunk  # noqa: E402
from support.trained_chunks import DTYPES, payload_of, room_for, stored  # noqa: E402

HEAD = struct.Struct("<BBHIII")
ROWS, COLS, PHASE = 90, 112, 30
SCRATCH = Scratch(1 << 20)


def directed(seed: int, rank: int = 6) -> np.ndarray:
    rng = np.random.default_rng(seed)
    found = (rng.normal(size=(ROWS, rank)) * np.geomspace(30, 1, rank)) @ rng.normal(size=(rank, COLS))
    return (found / found.std() + 0.02 * rng.normal(size=(ROWS, COLS))).astype(np.float32)


def write(name: str, made: QuantizedChunk, base: memoryview) -> str:
    payload, steps = bytes(payload_of(made)), made.encoded.steps
    head = HEAD.pack(made.encoded.width, len(steps), 0, made.reconstruction.nbytes, base.nbytes, len(payload))
    listed = b"".join(bytes([codec_id, len(config)]) + config for codec_id, config in steps)
    (FOLDER / name).write_bytes(head + listed + bytes(base) + payload)
    return digest_of(bytes(made.reconstruction)).hex()


def main() -> None:
    digests: dict[str, str] = {}
    cut = slice(PHASE, ROWS * COLS - 40)
    for dtype in DTYPES:
        shape = ChunkShape(dtype, COLS, PHASE)
        before = np.random.default_rng(1).normal(size=(ROWS, COLS)).astype(np.float32)
        base = stored(before.reshape(-1)[cut], dtype)
        plain = stored((before + 0.1 * directed(2)).reshape(-1)[cut], dtype)
        low = LowRank(0.02, rank_max=12, error_max=0.9)
        how = {"scratch": SCRATCH, "reconstruction": room_for(plain)}
        change = chunk_codec.encode_weights(plain, base, shape, WeightSettings(low_rank=low), **how)
        digests[f"change-{dtype}.bin"] = write(f"change-{dtype}.bin", change, base)
        roots = np.abs(directed(3)) + np.float32(0.05)
        roots[5] = 0
        second = stored((roots * roots * np.float32(1e-3)).reshape(-1)[cut], dtype)
        how = {"scratch": SCRATCH, "reconstruction": room_for(second)}
        two = chunk_codec.encode_second_moment(second, shape, SecondMomentSettings(low_rank=LowRank(0.1)), **how)
        digests[f"root-{dtype}.bin"] = write(f"root-{dtype}.bin", two, memoryview(b""))
        near = memoryview(bytes(two.reconstruction))
        first = stored((directed(4) * roots * np.float32(3e-2)).reshape(-1)[cut], dtype)
        how = {"scratch": SCRATCH, "reconstruction": room_for(first)}
        settings = FirstMomentSettings(clip=1.5, low_rank=LowRank(0.1, error_max=0.9))
        one = chunk_codec.encode_first_moment(first, second, near, shape, settings, **how)
        digests[f"quotient-{dtype}.bin"] = write(f"quotient-{dtype}.bin", one, near)
    (FOLDER / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main()
