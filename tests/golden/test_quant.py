"""Protects existing lossy frames: every golden frame gives the same bits with each implementation of the loops."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from ckstore.codec import chunk_codec, kernels
from ckstore.codec.byte_codecs import CodecStep
from ckstore.codec.kernels import reference
from ckstore.hashing import digest_of
from ckstore.quant import chunk_codec as lossy_forms
from ckstore.quant.payload import read_layout

FOLDER = Path(__file__).parent / "quant"
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
def test_golden_lossy_frame_is_reconstructed(name: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        base=memoryview(base) if base else None,
    )
    assert digest_of(destination).hex() == DIGESTS[name]


def test_golden_files_match_their_list() -> None:
    assert {file.name for file in FOLDER.glob("*.bin")} == set(DIGESTS)


def test_goldens_cover_every_step_kind_and_mode() -> None:
    steps_found, modes, stream_counts, escapes = set(), set(), set(), 0
    for name in DIGESTS:
        width, steps, plain_nbytes, _, payload = parsed(name)
        steps_found.add((steps[0][0], steps[0][1][0]))
        is_second = steps[0][0] == lossy_forms.MOMENT2
        layout, _ = read_layout(memoryview(payload), plain_nbytes // width, is_second=is_second)
        sections = [layout.rows, layout.cols, *(stream.section for stream in layout.streams)]
        modes |= {section.mode for section in sections}
        stream_counts.add(len(layout.streams) > 1)
        escapes += layout.escape_count
    assert steps_found == {*((step, kind) for step in (7, 8, 9) for kind in (0, 1, 2)), (10, 0)}
    assert modes >= {0, 1, 2, 3}
    assert stream_counts == {False, True}
    assert escapes
