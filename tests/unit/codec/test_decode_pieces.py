"""Protects the look that a commit takes at what it has coded: piece by piece, all of it, and without a second chunk.

What pieces show is what decoding writes, for every form; what decoding refuses is refused; and the memory that pieces
go through stays as small as it was promised, since training pays for what is written beside it.
"""

from __future__ import annotations

import numpy as np
import pytest

from ckstore import forms
from ckstore.errors import CorruptError, MalformedError, UnsupportedError, UsageError
from support.chunk_pairs import COUNT, PAIRS, decoded, pair, weights

MIB = 1 << 20
PIECE_NBYTES = 128 << 10


@pytest.fixture(scope="module")
def scratch() -> forms.Scratch:
    return forms.Scratch(4 * MIB)


def shown(
    payload: bytes, encoded: forms.Encoded, nbytes: int, base: memoryview | None, scratch: forms.Scratch
) -> list[bytes]:
    pieces: list[bytes] = []
    forms.decode_pieces(
        memoryview(payload),
        encoded.steps,
        width=encoded.width,
        room=memoryview(bytearray(nbytes)),
        scratch=scratch,
        watch=lambda piece: pieces.append(bytes(piece)),
        base=base,
    )
    return pieces


@pytest.mark.parametrize("compression", ["fast", "best"])
@pytest.mark.parametrize("has_base", [False, True], ids=["whole", "residual"])
@pytest.mark.parametrize("name", PAIRS)
def test_pieces_put_together_are_what_decoding_writes(
    name: str, has_base: bool, compression: forms.Compression, scratch: forms.Scratch
) -> None:
    width, is_float, plain, base = pair(name)
    how = {"width": width, "is_float": is_float, "compression": compression, "scratch": scratch}
    encoded = forms.encode_delta(plain, base, **how) if has_base else forms.encode(plain, **how)
    assert encoded is not None
    payload, used = b"".join(encoded.parts), base if has_base else None
    pieces = shown(payload, encoded, plain.nbytes, used, scratch)
    assert b"".join(pieces) == bytes(plain) == decoded(payload, encoded, plain.nbytes, used, scratch)


@pytest.mark.parametrize("count", [PIECE_NBYTES // 4, PIECE_NBYTES // 4 + 1, PIECE_NBYTES // 2, PIECE_NBYTES // 2 - 1])
def test_pieces_end_where_the_chunk_ends(count: int, scratch: forms.Scratch) -> None:
    plain = memoryview(weights(count)).cast("B")
    encoded = forms.encode(plain, width=4, is_float=True, compression="fast", scratch=scratch)
    pieces = shown(b"".join(encoded.parts), encoded, plain.nbytes, None, scratch)
    assert [len(piece) for piece in pieces[:-1]] == [PIECE_NBYTES] * (len(pieces) - 1)
    assert b"".join(pieces) == plain


@pytest.mark.parametrize("has_base", [False, True], ids=["whole", "residual"])
def test_pieces_of_planes_take_turns_in_one_small_place(has_base: bool, scratch: forms.Scratch) -> None:
    _, _, plain, base = pair("fp32")
    how = {"width": 4, "is_float": True, "compression": "fast", "scratch": scratch}
    encoded = forms.encode_delta(plain, base, **how) if has_base else forms.encode(plain, **how)
    assert encoded is not None
    room = np.full(plain.nbytes, 0x5A, np.uint8)
    lengths: list[int] = []
    forms.decode_pieces(
        memoryview(b"".join(encoded.parts)),
        encoded.steps,
        width=4,
        room=room.data,
        scratch=scratch,
        watch=lambda piece: lengths.append(len(piece)),
        base=base if has_base else None,
    )
    assert lengths == [PIECE_NBYTES, plain.nbytes - PIECE_NBYTES]
    assert (room[PIECE_NBYTES:] == 0x5A).all()


def test_a_rounding_is_shown_too(scratch: forms.Scratch) -> None:
    base = weights()
    rounded = memoryview(base.astype("f2")).cast("B")
    encoded = forms.encode_rounded(rounded, memoryview(base).cast("B"), scratch=scratch)
    assert encoded is not None
    pieces = shown(b"".join(encoded.parts), encoded, rounded.nbytes, memoryview(base).cast("B"), scratch)
    assert b"".join(pieces) == rounded


def test_what_decoding_refuses_is_refused(scratch: forms.Scratch) -> None:
    _, _, plain, base = pair("fp32")
    encoded = forms.encode_delta(plain, base, width=4, is_float=True, compression="fast", scratch=scratch)
    assert encoded is not None
    payload, nbytes = b"".join(encoded.parts), 4 * COUNT
    for wrong in (None, base[:-4], memoryview(bytes(base) + b"1234")):
        with pytest.raises(MalformedError):
            shown(payload, encoded, nbytes, wrong, scratch)
    with pytest.raises(CorruptError):
        shown(payload[:-1], encoded, nbytes, base, scratch)
    with pytest.raises(UsageError, match="more than the scratch"):
        shown(payload, encoded, 4 * MIB + 4, base, scratch)
    whole = forms.encode(plain, width=4, is_float=True, compression="fast", scratch=scratch)
    payload = b"".join(whole.parts)
    with pytest.raises(MalformedError, match="a base that it does not need"):
        shown(payload, whole, nbytes, base, scratch)
    with pytest.raises(UnsupportedError, match="config of codec planes"):
        shown(payload, forms.Encoded(((2, b"\x02"),), [], 4), nbytes, None, scratch)


def test_one_byte_that_decodes_to_another_one_is_shown_as_it_is(scratch: forms.Scratch) -> None:
    # The two lowest planes of such weights are noise, and are stored as they are.
    plain = memoryview(weights(MIB)).cast("B")
    encoded = forms.encode(plain, width=4, is_float=True, compression="fast", scratch=scratch)
    payload = bytearray(b"".join(encoded.parts))
    payload[20 + 700_000] ^= 0x10
    found = np.frombuffer(b"".join(shown(bytes(payload), encoded, plain.nbytes, None, scratch)), np.uint8)
    assert np.flatnonzero(found != np.frombuffer(plain, np.uint8)).size == 1
