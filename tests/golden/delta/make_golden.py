"""Write the golden frames that have a base to this folder; all versions must decode them.

Run it by hand, never from a test: ``python tests/golden/delta/make_golden.py``. An existing file is never replaced. A
file begins with what decoding needs: element width and number of steps (u8 each), two zeros, lengths of chunk, base and
payload (u32 each). Then follow each step (codec id and length of its config, u8 each, and the config), base and
payload. The BLAKE3 of the chunk is in ``digests.json``.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.byte_codecs import ConstCodec, Lz4Codec, ZstdCodec, compress_lz4
from ckstore.hashing import digest_of

FOLDER = Path(__file__).parent
HEAD = struct.Struct("<BBHIII")
Case = tuple[int, np.ndarray, np.ndarray, chunk_codec.Encoded]


def words(count: int, width: int, seed: int) -> np.ndarray:
    """Return noise with few different exponents, made from integers only, so that every machine makes the same."""
    noise = np.random.Generator(np.random.PCG64(seed)).integers(0, 1 << 63, count, dtype=np.uint64)
    skewed = np.array([int(word).bit_count() for word in noise], np.uint64)
    return ((120 + skewed) << 23 | (noise & 0x807FFFFF)).astype("<u4").astype(f"<u{max(width, 4)}")


def near(base: np.ndarray, one_in: int, reach: int) -> np.ndarray:
    """Return words of which one in ``one_in`` is slightly different, some across zero."""
    noise = np.random.Generator(np.random.PCG64(3)).integers(0, 1 << 31, base.size, dtype=np.uint64)
    steps = np.where(noise % one_in == 0, (noise >> 8) % (2 * reach + 1), reach).astype(base.dtype)
    return base + steps - base.dtype.type(reach)


def deltas(scratch: chunk_codec.Scratch) -> dict[str, Case]:
    """Return deltas as ckstore writes them."""
    edges = np.resize(np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x80000001], "<u4"), 3000)
    four, two = words(3000, 4, 1), (words(70_000, 4, 2) >> 16).astype("<u2")
    eight = np.arange(2000, dtype="<u8") << 20
    cases: dict[str, tuple[int, bool, np.ndarray, np.ndarray]] = {
        "floats of 4": (4, True, near(four, 1, 3000), four),
        "floats of 2": (2, True, near(two, 2, 40), two),
        "floats of 1": (1, True, near(two.view("<u1")[:70_000], 40, 3), two.view("<u1")[:70_000]),
        "edges of 4": (4, True, np.where(np.arange(3000) % 3 == 0, edges, np.roll(edges, 1)), edges),
        "integers of 8": (8, False, near(eight, 3, 9), eight),
        "nothing changed": (4, True, four, four),
    }
    found = {}
    for name, (width, is_float, chunk, base) in cases.items():
        plain, other = (memoryview(side.tobytes()) for side in (chunk, base))
        encoded = chunk_codec.encode_delta(
            plain, other, width=width, is_float=is_float, compression="fast", scratch=scratch
        )
        assert encoded is not None, name
        # The scratch memory is reused.
        copied = chunk_codec.Encoded(encoded.steps, [memoryview(bytes(part)) for part in encoded.parts], width)
        found[name] = (width, chunk, base, copied)
    return found


def by_hand(scratch: chunk_codec.Scratch) -> dict[str, Case]:
    """Return deltas with codecs that FORMAT.md allows but ckstore does not choose."""
    base = words(500, 4, 4)
    residuals = {
        "residuals in zstd": (ZstdCodec(), base ^ 1, lambda plain: scratch.zstd.compress(plain, "generic")),
        "residuals in lz4": (Lz4Codec(), near(base, 4, 2), compress_lz4),
        "one residual": (ConstCodec(), base + 7, lambda plain: bytes(plain[:4])),
    }
    found = {}
    for name, (codec, chunk, code) in residuals.items():
        difference = (chunk - base).astype("<u4")
        zigzagged = (difference << 1) ^ (0 - (difference >> 31))
        payload = code(memoryview(zigzagged.tobytes()))
        steps = ((chunk_codec.DELTA_ID, chunk_codec.INTEGERS), (codec.codec_id, b""))
        found[name] = (4, chunk, base, chunk_codec.Encoded(steps, [memoryview(payload)], 4))
    return found


def roundings(scratch: chunk_codec.Scratch) -> dict[str, Case]:
    """Return masters and their roundings, including edge cases."""
    edges = np.array([0, 1 << 31, 0x7F800000, 0xFFC00001, 0x477FF000, 0x477FEFFF, 0x33000001, 0x387FFFFF], "<u4")
    masters = np.concatenate([edges, words(500, 4, 5)]).astype("<u4")
    found = {}
    for name, kind in (("rounded to bf16", 1), ("rounded to fp16", 2)):
        chunk = np.empty(masters.size, "<u2")
        kernels.round_floats(masters, chunk, kind)
        plain, base = (memoryview(side.tobytes()) for side in (chunk, masters))
        encoded = chunk_codec.encode_rounded(plain, base, scratch=scratch)
        assert encoded is not None, name
        found[name] = (2, chunk, masters, encoded)
    return found


def main() -> int:
    """Write the missing files."""
    digests_file = FOLDER / "digests.json"
    digests = json.loads(digests_file.read_text()) if digests_file.exists() else {}
    scratch = chunk_codec.Scratch(1 << 20)
    for name, (width, chunk, base, encoded) in {**deltas(scratch), **by_hand(scratch), **roundings(scratch)}.items():
        file = FOLDER / f"{name.replace(' ', '-')}.bin"
        if file.exists():
            print(f"{file.name} exists and stays as it is")
            continue
        head = HEAD.pack(width, len(encoded.steps), 0, chunk.nbytes, base.nbytes, encoded.nbytes)
        steps = b"".join(bytes([codec_id, len(config)]) + config for codec_id, config in encoded.steps)
        file.write_bytes(head + steps + base.tobytes() + b"".join(encoded.parts))
        digests[file.name] = digest_of(chunk.tobytes()).hex()
    digests_file.write_text(json.dumps(digests, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
