"""Protects the messages between ranks: they arrive unchanged or are refused by name, and have limits."""

from __future__ import annotations

import random

import pytest

from ckstore.errors import MalformedError, RankError, UnsupportedError
from ckstore.format.error_records import ErrorRecord
from ckstore.format.records import encode_inner
from ckstore.ranks import messages
from ckstore.ranks.messages import KINDS, NBYTES_MAX, TO_RANK, TO_RANK_0, decode_message, encode_message

RECORD = ErrorRecord("CapacityError", "the disk is full", "packs/ab", "free some", {"errno": 28, "ranks": ["1", "2"]})
SAMPLES = [
    messages.Begin(1, 100, True, {"run": "main", "store": "ab"}, (b"a" * 32, b"b" * 32)),
    messages.Content(1, b"a" * 32, b"content"),
    messages.Staged(2),
    messages.Part(3, 1, b"part"),
    messages.Abort(3, 100, RECORD),
    messages.Ask("restore", 1, b"5"),
    messages.Wanted(1, (b"a" * 32,)),
    messages.Write(1, None),
    messages.Joining(1, 100),
    messages.Joining(1, 100, "handle 0", 7),
    messages.Awaited(1, 100, 3, "handle 0", 7),
    messages.Left(3, "closed its connection"),
    messages.Left(3, "has lost its saver", 4, "handle 0"),
    messages.SaverLost(4, 3, "handle 0", "has lost its saver"),
    messages.Write(1, b"spans"),
    messages.AllStaged(1),
    messages.More(1, 1, b"more"),
    messages.Done(1, b"receipt"),
    messages.Failed(1, None, RECORD),
    messages.Failed(1, 3, RECORD),
    messages.Asked("restore", 2),
    messages.Agreed("restore", 2, b"5", None, None),
    messages.Agreed("restore", 2, None, 1, RECORD),
    messages.Beat(),
    messages.Bye("rank 2 closed its connection"),
    messages.Welcome(bytes(16)),
    messages.Refused(RECORD),
]
ALL = tuple(KINDS.values())


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_messages_arrive_unchanged(message):
    kinds = TO_RANK if type(message) in TO_RANK else TO_RANK_0
    assert decode_message(encode_message(message), kinds, source="rank 3") == message


def test_every_kind_has_a_sample_a_direction_and_a_limit():
    assert {type(message) for message in SAMPLES} == set(ALL) == {*TO_RANK, *TO_RANK_0} == set(NBYTES_MAX)


def test_numbers_of_kinds_are_fixed():
    # They grow with PROTOCOL_VERSION only: a rank of another version must be able to name what it does not know.
    found = {number: kind.__name__ for number, kind in KINDS.items()}
    first = {1: "Beat", 2: "Bye", 3: "Welcome", 4: "Refused", 16: "Begin", 17: "Content", 18: "Staged", 19: "Part"}
    later = {20: "Abort", 21: "Ask", 32: "Wanted", 33: "Write", 34: "AllStaged", 35: "More", 36: "Done", 37: "Failed"}
    names = {22: "Joining", 23: "Left", 38: "Asked", 39: "Agreed", 40: "Awaited", 41: "SaverLost"}
    assert found == {**first, **later, **names}


def test_unknown_kind_names_rank_and_version():
    with pytest.raises(UnsupportedError, match=r"^rank 3 .* kind 99, which version 1 .* does not have"):
        decode_message(bytes((99,)) + encode_inner([]), TO_RANK_0, source="rank 3")


def test_kind_of_the_other_direction_is_refused():
    with pytest.raises(MalformedError, match="rank 3 sent Done, which"):
        decode_message(encode_message(messages.Done(1, b"")), TO_RANK_0, source="rank 3")


@pytest.mark.parametrize(
    "content", [b"", b"\x12", b"\x12\x91\xff", b"\x12\x92\x01\x01", b"\x12\xa1a", b"\x12\x91\x01\x00"]
)
def test_invalid_content_is_refused(content):
    with pytest.raises(MalformedError, match="rank 3"):
        decode_message(content, TO_RANK_0, source="rank 3")


def test_changed_message_is_refused_or_valid():
    source = random.Random(4)
    for message in SAMPLES:
        packet = encode_message(message)
        for _ in range(200):
            changed = bytearray(packet)
            changed[source.randrange(len(changed))] = source.randrange(256)
            try:
                decode_message(bytes(changed), ALL, source="rank 3")
            except (MalformedError, UnsupportedError):
                continue


def test_too_long_messages_are_neither_sent_nor_read():
    limit = NBYTES_MAX[messages.Ask]
    with pytest.raises(RankError, match="too long"):
        encode_message(messages.Ask("a", 1, bytes(limit)))
    packet = bytes((21,)) + encode_inner(["a", 1, bytes(limit)])
    with pytest.raises(MalformedError, match=f"at most {limit}"):
        decode_message(packet, TO_RANK_0, source="rank 3")
