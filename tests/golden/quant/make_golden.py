"""Write the golden lossy frames to this folder; all versions must reconstruct them bit for bit.

Run it by hand, never from a test: ``python tests/golden/quant/make_golden.py``. An existing file is never replaced. A
file begins with what decoding needs: element width and number of steps (u8 each), two zeros, lengths of chunk, base and
payload (u32 each). Then follow each step (codec id and length of its config, u8 each, and the config), base and
payload. The BLAKE3 of the chunk, which is the reconstruction, is in ``digests.json``. ``codebook.bin`` and
``grid-of-clusters.bin`` come from an encoder that ckstore no longer has: it is in ``bench/excp.py``.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ckstore.codec.byte_codecs import Scratch
from ckstore.config import FirstMomentSettings, SecondMomentSettings, WeightSettings
from ckstore.hashing import digest_of
from ckstore.quant import chunk_codec
from ckstore.quant.chunk_codec import ChunkShape, QuantizedChunk

FOLDER = Path(__file__).parent
HEAD = struct.Struct("<BBHIII")
ROWS, COLS, PHASE = 180, 100, 37

SCRATCH = Scratch(1 << 20)
Case = tuple[QuantizedChunk, memoryview]


def noise(seed: int, count: int) -> np.ndarray:
    """Return sums of bits, which are nearly normal, made from integers only, so that every machine makes the same."""
    words = np.random.Generator(np.random.PCG64(seed)).integers(0, 1 << 63, count, dtype=np.uint64)
    sums = np.array([int(word).bit_count() for word in words], np.float32) - np.float32(31.5)
    return sums + (words % 1000).astype(np.float32) * np.float32(1 / 1024)


def spread() -> np.ndarray:
    """Return a power of two for each element, by row and column."""
    rows, cols = np.arange(ROWS) % 5 - 2, np.arange(COLS) % 4 - 2
    return np.ldexp(np.float32(1), (rows[:, None] + cols[None]).astype(np.int32)).reshape(-1)


BASE = noise(1, ROWS * COLS) * np.float32(2**-8)
CHANGE = noise(2, ROWS * COLS) * spread() * np.float32(2**-16)
SECOND = (noise(3, ROWS * COLS) * spread() * np.float32(2**-20)) ** 2 + np.float32(2**-60)
FIRST = noise(4, ROWS * COLS) * np.sqrt(SECOND) * np.float32(1 / 16)


def plain_of(values: np.ndarray, dtype: str) -> memoryview:
    """Return the bytes of values in a dtype."""
    if dtype == "bfloat16":
        return memoryview((values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes())
    return memoryview(values.astype("<f4" if dtype == "float32" else "<f2").tobytes())


def weights(dtype: str, settings: WeightSettings, *, outliers: bool = False) -> Case:
    """Return the change of a weight and its base."""
    changed = BASE + CHANGE
    if outliers:
        changed[::999] += np.float32(1)
    plain, base = plain_of(changed, dtype), plain_of(BASE, dtype)
    room, shape = memoryview(bytearray(plain.nbytes)), ChunkShape(dtype, COLS, PHASE)  # type: ignore[arg-type]
    made = chunk_codec.encode_weights(plain, base, shape, settings, scratch=SCRATCH, reconstruction=room)
    assert made is not None
    return made, base


def second(dtype: str, settings: SecondMomentSettings, scale: float = 1.0, rows: int = ROWS) -> Case:
    """Return a second moment."""
    values = SECOND[: rows * COLS] * np.float32(scale)
    values[:COLS] = 0.0
    plain = plain_of(values, dtype)
    room, shape = memoryview(bytearray(plain.nbytes)), ChunkShape(dtype, COLS)  # type: ignore[arg-type]
    made = chunk_codec.encode_second_moment(plain, shape, settings, scratch=SCRATCH, reconstruction=room)
    assert made is not None
    return made, memoryview(b"")


def first(dtype: str, settings: FirstMomentSettings, scale: float = 1.0) -> Case:
    """Return a first moment and its base, the second."""
    base = plain_of(SECOND * np.float32(scale * scale), dtype)
    plain = plain_of(FIRST * np.float32(scale), dtype)
    room, shape = memoryview(bytearray(plain.nbytes)), ChunkShape(dtype, COLS)  # type: ignore[arg-type]
    made = chunk_codec.encode_first_moment(plain, base, base, shape, settings, scratch=SCRATCH, reconstruction=room)
    assert made is not None
    return made, base


CASES: dict[str, Callable[[], Case]] = {
    "grid by rows": lambda: weights("float32", WeightSettings(step=0.5)),
    "grid in streams": lambda: weights("float32", WeightSettings(step=2.0, scale="chunk")),
    "grid with escapes": lambda: weights(
        "float32", WeightSettings(step=1.0, scale="chunk", levels_max=9), outliers=True
    ),
    "grid of bf16": lambda: weights("bfloat16", WeightSettings(step=1.0)),
    "grid of fp16": lambda: weights("float16", WeightSettings(step=1.0)),
    "moment2 rank1": lambda: second("float32", SecondMomentSettings()),
    "moment2 log": lambda: second("float32", SecondMomentSettings("log", 0.25)),
    "moment2 of few rows": lambda: second("float32", SecondMomentSettings(), rows=5),
    "moment2 of bf16": lambda: second("bfloat16", SecondMomentSettings()),
    "moment2 of fp16": lambda: second("float16", SecondMomentSettings(), scale=2.0**20),
    "moment1": lambda: first("float32", FirstMomentSettings(step=0.25)),
    "moment1 ternary": lambda: first("float32", FirstMomentSettings("ternary", step=0.5)),
    "moment1 of bf16": lambda: first("bfloat16", FirstMomentSettings(step=0.25)),
    "moment1 of fp16": lambda: first("float16", FirstMomentSettings(step=0.25), scale=2.0**10),
}


def main() -> int:
    """Write the missing files."""
    digests_file = FOLDER / "digests.json"
    digests = json.loads(digests_file.read_text()) if digests_file.exists() else {}
    for name, case in CASES.items():
        file = FOLDER / f"{name.replace(' ', '-')}.bin"
        if file.exists():
            print(f"{file.name} exists and stays as it is")
            continue
        made, base = case()
        chunk, encoded = made.reconstruction, made.encoded
        head = HEAD.pack(encoded.width, len(encoded.steps), 0, chunk.nbytes, base.nbytes, encoded.nbytes)
        steps = b"".join(bytes([codec_id, len(config)]) + config for codec_id, config in encoded.steps)
        file.write_bytes(head + steps + bytes(base) + b"".join(encoded.parts))
        digests[file.name] = digest_of(chunk).hex()
    digests_file.write_text(json.dumps(digests, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
