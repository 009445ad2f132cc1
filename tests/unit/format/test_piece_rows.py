"""Protects the pieces of checkpoints by many ranks: encoded in memory, and the same as tuples in every other way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.config import Limits
from ckstore.errors import MalformedError
from ckstore.format.logical import Logical, check_logical, decode_logical, encode_logical
from ckstore.format.narrowing import pieces_between
from ckstore.format.piece_rows import PACKED_COUNT_MIN, ROW, PieceRows, chunk_starts
from ckstore.format.tensors import ChunkSpec, Piece, StorageSpec
from ckstore.format.tree import ListNode

COUNT = 10_000
CHUNK = ChunkSpec(b"\1" * 32, 100_000, 4, True)
numbers = st.integers(1, 2**32 - 1)
offsets = st.integers(0, 3) | numbers
pieces = st.lists(st.builds(Piece, numbers, offsets, st.integers(1, 60)), max_size=40)


def rows_of(found: list[Piece]) -> PieceRows:
    return PieceRows(b"".join(ROW.pack(*piece) for piece in found))


def logical_of(found) -> Logical:
    return Logical(ListNode(()), (), (StorageSpec(sum(each.nbytes for each in found), 4, True, found),), (CHUNK,))


@given(pieces, st.data())
def test_rows_are_like_a_tuple(found, data):
    rows, plain = rows_of(found), tuple(found)
    assert (tuple(rows), len(rows), hash(rows)) == (plain, len(plain), hash(plain))
    assert rows == plain == rows == rows_of(found)
    assert rows != (*plain, Piece(1, 1, 1))
    assert rows != 5
    begin, end, step = (data.draw(st.integers(-45, 45)) for _ in range(3))
    assert rows[begin:end] == plain[begin:end]
    assert rows[:: step or 1] == plain[:: step or 1]
    assert all(rows[at] == plain[at] for at in range(-len(plain), len(plain)))
    with pytest.raises(IndexError):
        rows[len(plain)]
    total = sum(each.nbytes for each in plain)
    lo, hi = sorted(data.draw(st.tuples(*[st.integers(0, total)] * 2)))
    assert list(pieces_between(rows, lo, hi)) == list(pieces_between(plain, lo, hi))
    assert list(chunk_starts(rows)) == list(chunk_starts(plain))
    assert all(next(pieces_between(plain, at, at + 1))[:2] == (chunk, 0) for at, chunk in chunk_starts(plain))


def test_a_part_of_a_storage_makes_no_other_pieces(monkeypatch):
    rows = rows_of([Piece(0, 0, 10)] * COUNT)
    made = []
    monkeypatch.setattr("ckstore.format.piece_rows.Piece", lambda *fields: made.append(fields) or Piece(*fields))
    assert list(pieces_between(rows, 50_005, 50_025)) == [(0, 5, 5), (0, 0, 10), (0, 0, 5)]
    assert len(made) == 3


@pytest.mark.parametrize("count", [PACKED_COUNT_MIN - 1, PACKED_COUNT_MIN, COUNT])
def test_a_manifest_is_decoded_and_encoded_again(count):
    logical = logical_of(tuple(Piece(0, 4 * at, 4) for at in range(count)))
    encoded = encode_logical(b"", logical)
    _, decoded = decode_logical(memoryview(encoded), limits=Limits())
    assert decoded == logical
    assert isinstance(decoded.storages[0].pieces, PieceRows) == (count >= PACKED_COUNT_MIN)
    assert encode_logical(b"", decoded) == encoded


@pytest.mark.parametrize("wrong", [Piece(1, 0, 4), Piece(0, 99_997, 4), Piece(0, 2**32 - 1, 4), Piece(0, 0, 0)])
def test_wrong_pieces_are_refused(wrong):
    good = [Piece(0, 4 * at, 4) for at in range(200)]
    check_logical(logical_of(rows_of(good)), Limits(), None)
    logical = logical_of(rows_of([*good[:150], wrong, *good[150:]]))
    with pytest.raises(MalformedError, match="reaches beyond its chunk: here"):
        check_logical(logical, Limits(), "here")
    short = replace(logical_of(rows_of(good)), storages=(StorageSpec(801, 4, True, rows_of(good)),))
    with pytest.raises(MalformedError, match="do not add up"):
        check_logical(short, Limits(), None)
