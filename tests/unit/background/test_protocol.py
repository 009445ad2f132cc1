"""Protects messages between trainer and saver: they arrive unchanged or are refused, and errors keep their class."""

from __future__ import annotations

import inspect
import random
import socket

import numpy as np
import pytest

from ckstore import errors
from ckstore.background import protocol
from ckstore.background.protocol import (
    MESSAGE_NBYTES_MAX,
    TO_SAVER,
    TO_TRAINER,
    decode_message,
    encode_message,
    error_of,
    failed_of,
)
from ckstore.background.staged_head import HeadWriter, SampleRow, StorageRow, decode_head
from ckstore.config import Policy
from ckstore.errors import BackendError, CapacityError, CkstoreError, MalformedError, NotFoundError, SaverError
from ckstore.format.error_records import TEXT_NBYTES_MAX, ErrorRecord
from ckstore.format.records import encode_inner
from ckstore.results import Receipt
from ckstore.state.capture import capture

RECEIPT = Receipt(5, 3, "ab" * 32, 100, 50, 4, 1, 2, 1, {"write": 0.5, "total": 1.0}, "uring", ("a warning",))
TO_SAVER_SAMPLES = [
    protocol.Decline(3, 100, ErrorRecord("CapacityError", "it failed", None, None, {})),
    protocol.Lost(3, "closed its connection"),
    protocol.Lost(3, "has lost its saver", 2),
    protocol.Hello(b"/a/store", "main", "auto", 77, "1234", 19, 20),
    protocol.Begin(4, 1, 8192, 300, None, 3),
    protocol.Begin(5, 0, 0, 1, 12, 0, False, 10),
    protocol.Staged(4),
    protocol.Abort(4),
    protocol.Release(1),
    protocol.Forget(),
    protocol.Quit(),
    protocol.Quit(is_parting=True),
    protocol.Hurry(),
    protocol.Warm(2, 12, 1 << 31),
]
TO_TRAINER_SAMPLES = [
    protocol.Ready(99),
    protocol.Began(4),
    protocol.Progress(4, "write", 10, 20),
    protocol.Done(4, RECEIPT),
    protocol.Failed(4, "BackendError", "it failed", None, "try again", {"is_transient": True, "ids": ["a", "b"]}),
    protocol.Retained(4),
    protocol.SlotFree(4),
    protocol.Answer(2),
    protocol.Leaving(),
    protocol.Log(30, "some text"),
]


@pytest.mark.parametrize("message", TO_SAVER_SAMPLES, ids=lambda message: type(message).__name__)
def test_message_of_the_trainer_round_trips(message):
    assert decode_message(encode_message(message), TO_SAVER) == message


@pytest.mark.parametrize("message", TO_TRAINER_SAMPLES, ids=lambda message: type(message).__name__)
def test_message_of_the_saver_round_trips(message):
    arrived = decode_message(encode_message(message), TO_TRAINER)
    assert arrived == message
    assert type(arrived) is type(message)


def test_all_messages_are_tested():
    assert {type(message) for message in TO_SAVER_SAMPLES} == set(TO_SAVER)
    assert {type(message) for message in TO_TRAINER_SAMPLES} == set(TO_TRAINER)


@pytest.mark.parametrize("message", TO_SAVER_SAMPLES, ids=lambda message: type(message).__name__)
def test_message_of_the_wrong_side_is_refused(message):
    with pytest.raises(MalformedError):
        decode_message(encode_message(message), TO_TRAINER)


@pytest.mark.parametrize(
    "message", [*TO_SAVER_SAMPLES, *TO_TRAINER_SAMPLES], ids=lambda message: type(message).__name__
)
def test_message_of_wrong_length_is_refused(message):
    packet = encode_message(message)
    kinds = TO_SAVER if isinstance(message, TO_SAVER) else TO_TRAINER
    for cut in range(len(packet)):
        with pytest.raises(MalformedError):
            decode_message(packet[:cut], kinds)
    with pytest.raises(MalformedError):
        decode_message(packet + b"\0", kinds)


@pytest.mark.parametrize(
    "fields",
    [
        [],
        [4],
        [4, 1, 8192, 300, None],
        [4, 1, 8192, 300, None, 3, 0],
        [-1, 1, 8192, 300, None, 3],
        ["4", 1, 2, 3, 4, 5],
    ],
    ids=["none", "one", "one-less", "one-more", "negative", "text"],
)
def test_wrong_fields_are_refused(fields):
    number = encode_message(protocol.Begin(4, 1, 8192, 300, None, 3))[:1]
    with pytest.raises(MalformedError):
        decode_message(number + encode_inner(fields), TO_SAVER)


def test_unknown_kinds_are_refused():
    for number in (len(TO_SAVER) + len(TO_TRAINER), 255):
        with pytest.raises(MalformedError):
            decode_message(bytes((number,)) + encode_inner([]), (*TO_SAVER, *TO_TRAINER))


def test_changed_packet_is_refused_or_valid():
    # The outcome is deterministic, and the only exception is MalformedError: the reader must be able to disconnect.
    source = random.Random(4)
    for message in [*TO_SAVER_SAMPLES, *TO_TRAINER_SAMPLES]:
        packet = bytearray(encode_message(message))
        for _ in range(300):
            changed = bytearray(packet)
            changed[source.randrange(len(changed))] = source.randrange(256)
            try:
                decode_message(bytes(changed), (*TO_SAVER, *TO_TRAINER))
            except MalformedError:
                continue


def test_messages_are_bounded():
    with pytest.raises(SaverError, match="bytes"):
        encode_message(protocol.Log(30, "x" * MESSAGE_NBYTES_MAX))
    assert len(encode_message(protocol.log_of(30, "x" * MESSAGE_NBYTES_MAX))) < 2 * TEXT_NBYTES_MAX


def test_receipts_with_many_warnings_still_fit():
    many = Receipt(5, 3, "ab" * 32, 1, 1, 1, 0, 0, 0, {}, "uring", tuple("é" * 100_000 for _ in range(500)))
    message = protocol.done_of(1, many)
    assert len(encode_message(message)) < MESSAGE_NBYTES_MAX
    assert "488 more" in message.receipt.warnings[-1]
    assert protocol.done_of(1, RECEIPT).receipt == RECEIPT


def test_packets_keep_their_boundaries():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for message in TO_SAVER_SAMPLES:
            protocol.send(ours, message)
        assert [protocol.receive(theirs, TO_SAVER) for _ in TO_SAVER_SAMPLES] == TO_SAVER_SAMPLES
        with pytest.raises(BlockingIOError):
            protocol.receive(theirs, TO_SAVER)
        ours.close()
        assert protocol.receive(theirs, TO_SAVER) is None


def test_send_never_waits_for_a_reader():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send_many():
        for _ in range(100_000):
            protocol.send(ours, protocol.Staged(1))

    with ours, theirs, pytest.raises(BlockingIOError):
        send_many()


ERRORS = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, CkstoreError)
]  # fmt: skip


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_errors_keep_class_message_and_attributes(kind):
    error = kind("it went wrong", where="/a/place", todo="do this", pid=5, pack_id="ab", share=0.5, is_bad=True)
    message = decode_message(encode_message(failed_of(7, error)), TO_TRAINER)
    back = error_of(message)
    assert type(back) is kind
    assert str(back) == str(error)
    assert (back.what, back.where, back.todo, back.exit_code) == (error.what, error.where, error.todo, kind.exit_code)
    assert (back.pid, back.pack_id, back.share, back.is_bad) == (5, "ab", 0.5, True)
    assert message.ticket == 7


def test_transient_errors_stay_transient():
    assert error_of(failed_of(1, BackendError("it failed", is_transient=True))).is_transient is True
    assert error_of(failed_of(1, BackendError("it failed"))).is_transient is False


def test_attributes_of_errors_arrive_as_plain_values():
    error = CapacityError("full", ids=["a", b"b"], big=1 << 80, path=("a", 1), other={"x": 1}, none=None)
    back = error_of(decode_message(encode_message(failed_of(1, error)), TO_TRAINER))
    assert back.ids == ["a", "b'b'"]
    assert back.big == hex(1 << 80)
    assert back.path == ["a", "1"]
    assert back.other == "{'x': 1}"


def test_long_errors_and_invalid_text_arrive():
    error = NotFoundError(
        "x" * 1_000_000, where="/caf\udce9", todo="\ud800", **{f"fact{i}": "y" * 9999 for i in range(99)}
    )
    packet = encode_message(failed_of(1, error))
    assert len(packet) <= MESSAGE_NBYTES_MAX
    assert isinstance(error_of(decode_message(packet, TO_TRAINER)), NotFoundError)


def test_system_errors_keep_their_class():
    back = error_of(failed_of(1, OSError(28, "No space left on device")))
    assert isinstance(back, OSError)
    assert (back.errno, back.strerror) == (28, "No space left on device")
    assert isinstance(error_of(failed_of(1, FileNotFoundError(2, "gone"))), FileNotFoundError)
    assert isinstance(error_of(failed_of(1, MemoryError("out of memory"))), MemoryError)


@pytest.mark.parametrize(
    "error", [AssertionError("a chunk"), KeyError("x"), SystemExit(1), OSError("no number")], ids=repr
)
def test_internal_errors_become_saver_errors(error):
    back = error_of(failed_of(1, error))
    assert isinstance(back, SaverError)
    assert type(error).__name__ in str(back)


@pytest.mark.parametrize("name", ["annotations", "ClassVar", "_message", "Any", "nonsense", "CkstoreErrors"])
def test_unknown_error_name_becomes_saver_error(name):
    assert type(error_of(protocol.Failed(1, name, "it failed", None, None, {}))) is SaverError


# Heads

STATE = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "b": np.zeros(0),
    "n": [1, None, "text"],
    "x": b"y" * 70000,
}


def head_of(**changes):
    captured = capture(STATE)
    places = [4096 * index for index in range(len(captured.storages))]
    facts = {"step": 5, "metrics": {"loss": 0.5}, "tags": ["best"], "policy": Policy(compression="none", threads=2)}
    return captured, HeadWriter().head_of(captured, places, **{**facts, **changes})


def test_head_holds_all_options_of_a_commit():
    captured, head = head_of(samples=[SampleRow(0, 0, 8, 0, 100, 8)])
    back = decode_head(HeadWriter().encode(head), slot_nbytes=1 << 20)
    assert back.tree == captured.tree
    assert back.tensors == captured.tensors
    assert [(row.nbytes, row.element_width, row.is_float) for row in back.storages] == [
        (storage.nbytes, storage.element_width, storage.is_float) for storage in captured.storages
    ]
    assert (back.step, back.metrics, back.tags, back.policy) == (5, {"loss": 0.5}, ["best"], head.policy)
    assert back.samples == [SampleRow(0, 0, 8, 0, 100, 8)]
    assert back.structure == captured.structure.number > 0


def test_head_beyond_its_slot_is_refused():
    _, head = head_of()
    end = max(row.place + row.nbytes for row in head.storages)
    assert decode_head(HeadWriter().encode(head), slot_nbytes=end)
    with pytest.raises(MalformedError, match="beyond the slot"):
        decode_head(HeadWriter().encode(head), slot_nbytes=end - 1)


@pytest.mark.parametrize(
    "row",
    [
        SampleRow(9, 0, 8, 0, 100, 8),
        SampleRow(0, 0, 1 << 40, 0, 100, 8),
        SampleRow(0, 0, 8, 0, 1 << 40, 8),
        SampleRow(0, 0, 8, 0, 100, 4),
    ],
    ids=["no-storage", "beyond-storage", "beyond-slot", "shorter"],
)
def test_samples_out_of_range_are_refused(row):
    _, head = head_of(samples=[row])
    with pytest.raises(MalformedError):
        decode_head(HeadWriter().encode(head), slot_nbytes=1 << 20)


def test_heads_with_impossible_policies_are_refused():
    content = HeadWriter().encode(head_of()[1])
    assert b"none" in content
    with pytest.raises(MalformedError):
        decode_head(content.replace(b"\xa4none", b"\xa4nope"), slot_nbytes=1 << 20)


def test_damaged_head_is_refused_or_valid():
    content = HeadWriter().encode(head_of()[1])
    source = random.Random(5)
    for _ in range(2000):
        changed = bytearray(content)
        changed[source.randrange(len(changed))] = source.randrange(256)
        try:
            decode_head(bytes(changed), slot_nbytes=1 << 20)
        except MalformedError:
            continue


def test_storage_rows_are_plain():
    assert StorageRow(1, 2, 4, True) == (1, 2, 4, True)
