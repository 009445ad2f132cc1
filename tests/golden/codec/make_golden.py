"""Write the golden payloads of the codecs to this folder; all versions must decode them.

Run it by hand, never from a test: ``python tests/golden/codec/make_golden.py``. An existing file is never replaced. A
file begins with what decoding needs: codec id, length of the config, element width and a zero (u8 each), plain length
(u32), config. The BLAKE3 of the plain bytes is in ``digests.json``.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np

from ckstore.codec import chunk_codec
from ckstore.config import Compression
from ckstore.hashing import digest_of

FOLDER = Path(__file__).parent
HEAD = struct.Struct("<BBBBI")


def contents() -> dict[str, tuple[int, bool, Compression, np.ndarray]]:
    """Return the plain contents by name. They are made from integers only, so that every machine makes the same."""
    count = 70_000
    noise = np.random.Generator(np.random.PCG64(1)).integers(0, 1 << 32, count, dtype=np.uint64)
    # The number of bits set in a random word has a skewed distribution, like exponents.
    skewed = np.array([int(word).bit_count() for word in noise], np.uint64)
    words = ((120 + skewed) << 23 | (noise & 0x807FFFFF)).astype(np.uint32)
    many = ((noise & 0xFF) * (noise >> 24) >> 8).astype(np.uint32)
    return {
        "weights of 4": (4, True, "fast", words),
        "weights of 2": (2, True, "fast", (words >> 16).astype(np.uint16)),
        "many symbols": (4, True, "fast", many << 23),
        "a few weights": (4, True, "fast", words[:3000]),
        "lonely bytes": (1, True, "fast", np.where(noise % 5000 == 0, noise >> 25, 0).astype(np.uint8)),
        "mostly zeros": (1, True, "fast", np.where(noise % 9 == 0, skewed, 0).astype(np.uint8)),
        "counting": (8, False, "fast", np.arange(20_000, dtype=np.uint64)),
        "text": (1, False, "best", np.resize(np.frombuffer(b"the quick brown fox; ", np.uint8), 5000)),
        "zeros": (4, True, "fast", np.zeros(1000, np.uint32)),
    }


def main() -> int:
    """Write the missing files."""
    digests_file = FOLDER / "digests.json"
    digests = json.loads(digests_file.read_text()) if digests_file.exists() else {}
    scratch = chunk_codec.Scratch(1 << 20)
    for name, (width, is_float, compression, elements) in contents().items():
        file = FOLDER / f"{name.replace(' ', '-')}.bin"
        if file.exists():
            print(f"{file.name} exists and stays as it is")
            continue
        plain = memoryview(elements.tobytes())
        encoded = chunk_codec.encode(plain, width=width, is_float=is_float, compression=compression, scratch=scratch)
        ((codec_id, config),) = encoded.steps
        head = HEAD.pack(codec_id, len(config), width, 0, plain.nbytes)
        file.write_bytes(head + config + b"".join(encoded.parts))
        digests[file.name] = digest_of(plain).hex()
    digests_file.write_text(json.dumps(digests, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
