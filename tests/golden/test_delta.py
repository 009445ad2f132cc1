"""Protects existing frames with a base: every golden frame is decoded by each implementation of the loops."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.byte_codecs import CodecStep
from ckstore.codec.kernels import reference
from ckstore.hashing import digest_of

FOLDER = Path(__file__).parent / "delta"
HEAD = struct.Struct("<BBHIII")
DIGESTS = json.loads((FOLDER / "digests.json").read_text())


def parsed(name: str) -> tuple[int, tuple[CodecStep, ...], int, bytes, bytes]:
    """Return width, steps, length of the chunk, base and payload."""
    content = (FOLDER / name).read_bytes()
    width, step_count, _, plain_nbytes, base_nbytes, payload_nbytes = HEAD.unpack_from(content)
    at, steps = HEAD.size, []
    for _ in range(step_count):
        codec_id, config_nbytes = content[at : at + 2]
        steps.append((codec_id, content[at + 2 : at + 2 + config_nbytes]))
        at += 2 + config_nbytes
    assert len(content) == at + base_nbytes + payload_nbytes
    return width, tuple(steps), plain_nbytes, content[at : at + base_nbytes], content[at + base_nbytes :]


@pytest.mark.parametrize("implementation", ["chosen", "numpy"])
@pytest.mark.parametrize("name", DIGESTS)
def test_golden_frame_is_decoded(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if implementation == "numpy":
        for loop in kernels.IMPLEMENTATION:
            monkeypatch.setattr(kernels, loop, getattr(reference, loop))
    width, steps, plain_nbytes, base, payload = parsed(name)
    assert chunk_codec.base_nbytes(steps, plain_nbytes) == len(base)
    destination = bytearray(plain_nbytes)
    chunk_codec.decode(
        memoryview(payload),
        steps,
        width=width,
        destination=memoryview(destination),
        scratch=chunk_codec.Scratch(1 << 20),
        base=memoryview(base),
    )
    assert digest_of(destination).hex() == DIGESTS[name]


def test_golden_files_match_their_list() -> None:
    assert {file.name for file in FOLDER.glob("*.bin")} == set(DIGESTS)


def test_goldens_cover_every_chain_and_plane_mode() -> None:
    found, modes = set(), set()
    for name in DIGESTS:
        width, steps, _, _, payload = parsed(name)
        found.add(steps)
        if len(steps) == 2 and steps[1][0] == 2:
            modes |= {struct.unpack_from("<BI", payload, 5 * plane)[0] for plane in range(width)}
    assert found == {
        ((5, b"\0"), (1, b"")),
        ((5, b"\0"), (2, b"\0")),
        ((5, b"\0"), (3, b"")),
        ((5, b"\0"), (4, b"")),
        ((5, b"\1"), (2, b"\0")),
        ((6, b"\1"),),
        ((6, b"\2"),),
    }
    assert modes == {0, 1, 2, 3, 4}
