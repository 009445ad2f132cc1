"""Protects existing payloads: every golden payload is decoded by each implementation of the plane coder."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.kernels import reference
from ckstore.hashing import digest_of

FOLDER = Path(__file__).parent / "codec"
HEAD = struct.Struct("<BBBBI")
DIGESTS = json.loads((FOLDER / "digests.json").read_text())


def parsed(name: str) -> tuple[int, bytes, int, int, memoryview]:
    content = (FOLDER / name).read_bytes()
    codec_id, config_nbytes, width, _, plain_nbytes = HEAD.unpack_from(content)
    payload = HEAD.size + config_nbytes
    return codec_id, content[HEAD.size : payload], width, plain_nbytes, memoryview(content)[payload:]


@pytest.mark.parametrize("implementation", ["chosen", "numpy"])
@pytest.mark.parametrize("name", DIGESTS)
def test_golden_payload_is_decoded(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if implementation == "numpy":
        monkeypatch.setattr(kernels, "decode_plane", reference.decode_plane)
        monkeypatch.setattr(kernels, "decode_sparse", reference.decode_sparse)
    codec_id, config, width, plain_nbytes, payload = parsed(name)
    destination = memoryview(bytearray(plain_nbytes))
    scratch = chunk_codec.Scratch(1 << 20)
    chunk_codec.decode(payload, ((codec_id, config),), width=width, destination=destination, scratch=scratch)
    assert digest_of(destination).hex() == DIGESTS[name]


def test_golden_files_match_their_list() -> None:
    assert {file.name for file in FOLDER.glob("*.bin")} == set(DIGESTS)


def test_goldens_cover_every_plane_coder_mode() -> None:
    modes = set()
    for name in DIGESTS:
        codec_id, _, width, _, payload = parsed(name)
        if codec_id == 2:
            rows = [struct.unpack_from("<BI", payload, 5 * plane) for plane in range(width)]
            modes |= {mode for mode, _ in rows}
    assert modes == {0, 1, 2, 3, 4}
