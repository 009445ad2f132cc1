"""A segment of a journal with fixed bytes: a keyframe's record, and a point with gradients of every kind."""

from __future__ import annotations

import numpy as np

from ckstore.format.frame import FrameHeader, encode_frame_header
from ckstore.format.journal import Segment, encode_record_head, encode_segment, frames_nbytes
from ckstore.format.points import Blob, Gradient, OptimizerFacts, Point, PointStorage, Span, Step, encode_point
from ckstore.format.records import RecordPlace, SegmentRecord
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import DictNode, ListNode, TensorNode, ValueNode
from ckstore.format.wire import xxh3_64
from ckstore.hashing import NO_BASE, chunk_id_of, digest_of
from support.format_samples import STORE_ID, TIME_NS, sample_plain

TOKEN = bytes(range(16))
PREVIOUS = RecordPlace(token=bytes(range(16, 32)), number=18, record_id=digest_of(b"record")[:16])
SEGMENT = Segment(
    STORE_ID,
    TOKEN,
    SegmentRecord(
        run="main",
        order=3,
        after_seq=7,
        time_ns=TIME_NS,
        previous=PREVIOUS,
        first=19,
        environment={"torch": "2.13.0", "threads": "8"},
    ),
)
BLOBS = (sample_plain(1, 96), sample_plain(2, 40))

_TREE = DictNode("dict", ("w", "m", "lr", "seen"), tuple(map(TensorNode, range(4))))
_TENSORS = (
    TensorSpec("torch", "float32", (4, 4), (4, 1), 0, 0, is_parameter=True, requires_grad=True),
    TensorSpec("torch", "float32", (4, 4), (4, 1), 1, 0),
    TensorSpec("torch", "float32", (), (), 2, 0),
    TensorSpec("torch", "int64", (5,), (1,), 3, 0),
)
_GROUPS = ListNode((DictNode("dict", ("lr",), (ValueNode("float", np.float64(0.1).tobytes()),)),))


def sample_points() -> tuple[Point, Point]:
    """Return the record of a keyframe, and that of a point after it."""
    facts = OptimizerFacts(
        kind="torch.optim.sgd.SGD",
        defaults=DictNode("dict", ("lr",), (TensorNode(2),)),
        groups=((0,),),
        state=({"momentum_buffer": 1},),
    )
    made = (
        PointStorage(64, xxh3_64(b"w"), 4, True, "steps", None),
        PointStorage(64, xxh3_64(b"m"), 4, True, "steps", None, is_word_sum=True),
    )
    rest = (
        PointStorage(4, xxh3_64(b"lr"), 4, True, "before", None),
        PointStorage(40, xxh3_64(b"seen"), 8, False, "before", None, is_word_sum=True),
    )
    first = Point({"loss": 2.5}, _TREE, _TENSORS, (*made, *rest), (), (), (facts,))
    changed = PointStorage(40, xxh3_64(BLOBS[1]), 8, False, "blob", Span(1, 0, 40))
    factor = np.float32(0.25).tobytes()
    gradients = (
        Gradient(0, "float32", (4,), "plain", None, None, Span(0, 0, 16), None),
        Gradient(1, "float32", (4, 2), "bf16", factor, Span(0, 16, 1), Span(0, 17, 8), None),
        Gradient(2, "float32", (4,), "fp16", None, None, Span(0, 25, 8), None),
        Gradient(3, "float32", (9, 2), "coo", None, None, Span(0, 33, 16), Span(0, 49, 16), 1),
    )
    blobs = tuple(
        Blob(width, is_float, ((chunk_id_of(plain), len(plain)),))
        for plain, width, is_float in zip(BLOBS, (1, 8), (False, False), strict=True)
    )
    second = Point({}, _TREE, _TENSORS, (*made, rest[0], changed), blobs, (Step(0, _GROUPS, gradients),), None)
    return first, second


def sample_segment() -> bytes:
    """Return the bytes of the segment."""
    content, previous = encode_segment(SEGMENT), PREVIOUS.record_id
    for number, (point, payloads) in enumerate(zip(sample_points(), ((), BLOBS), strict=True), SEGMENT.facts.first):
        frames = [_frame_of(payload) for payload in payloads]
        head, front = encode_record_head(
            number=number,
            step=1200 + number,
            time_ns=TIME_NS + number,
            body=encode_point(point),
            frames_nbytes=frames_nbytes([header for header, _ in frames]),
            previous=previous,
            structure=digest_of(b"structure")[:16],
        )
        content += (front + b"".join(each for _, each in frames)).ljust(head.nbytes, b"\0")
        previous = head.record_id
    return content


def _frame_of(payload: bytes) -> tuple[FrameHeader, bytes]:
    header = FrameHeader(chunk_id_of(payload), NO_BASE, len(payload), len(payload), 1, (), xxh3_64(payload))
    content = encode_frame_header(header) + payload
    return header, content.ljust(-(-len(content) // 64) * 64, b"\0")
