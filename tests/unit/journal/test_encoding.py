"""Protects points on their way through a record: everything comes back, and damage or contradictions raise."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from ckstore.config import Limits
from ckstore.errors import ChecksumError, CorruptError, MalformedError
from ckstore.format.frame import FRAME_HEADER_NBYTES, frame_extent
from ckstore.format.journal import (
    NO_RECORD,
    Segment,
    encode_record_head,
    encode_segment,
    frames_nbytes,
    read_body,
    read_heads,
    structure_of,
)
from ckstore.format.logical import row_of
from ckstore.format.points import Blob, Span, check_point, decode_point, encode_point
from ckstore.format.records import SegmentRecord, encode_inner
from ckstore.format.tensors import TensorSpec
from ckstore.format.tree import DictNode, ListNode, TensorNode, ValueNode, encode_tree
from ckstore.format.wire import xxh3_64
from ckstore.journal.blobs import OWN_NBYTES_MIN, BlobReader
from ckstore.journal.encoding import DraftGradient, DraftOptimizer, DraftStep, DraftStorage, PointDraft, PointEncoder
from ckstore.journal.gradients import load_gradient
from support.format_samples import STORE_ID

LIMITS = Limits(chunk_nbytes_max=1 << 16)
SEGMENT = Segment(
    STORE_ID,
    bytes(16),
    SegmentRecord(run="main", order=1, after_seq=None, time_ns=1, previous=None, first=1, environment={}),
)
GROUPS = ListNode((DictNode("dict", ("name",), (ValueNode("str", "first group"),)),))
TREE = DictNode("dict", ("w", "seen", "step"), (TensorNode(0), TensorNode(1), ValueNode("int", 7)))
TENSORS = (
    TensorSpec("torch", "float32", (400, 400), (400, 1), 0, 0, True, True),
    TensorSpec("torch", "int64", (5,), (1,), 1, 0),
)
SEEN = np.arange(5)


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def as_bytes(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def bf16(numbers):
    return (numbers.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


GRADIENTS = [
    ("float32", (400, 400), bf16(normal((400, 400))) * np.float32(0.37), None),
    ("float32", (10, 4), normal((10, 4), 1), None),
    ("bfloat16", (6,), np.arange(6, dtype=np.uint16), None),
    ("float32", (50, 3), normal((4, 3), 2), np.array([[3, 7, 7, 1]])),
    ("float32", (0, 3), np.empty((0, 3), np.float32), None),
    ("float32", (200, 5), np.where(np.arange(200)[:, None] == 9, normal((200, 5), 3), np.float32(0)), None),
]


def draft_and_arrays():
    arrays, gradients = [as_bytes(SEEN)], []
    for number, (dtype, shape, values, indices) in enumerate(GRADIENTS):
        arrays.append(as_bytes(values))
        place = None
        if indices is not None:
            arrays.append(as_bytes(indices))
            place = len(arrays) - 1
        values_place = len(arrays) - 1 - (indices is not None)
        gradients.append(DraftGradient(number, dtype, shape, values_place, place, int(indices is not None)))
    draft = PointDraft(
        metrics={"loss": 0.5},
        tree=encode_tree(TREE),
        tensors=[row_of(tensor) for tensor in TENSORS],
        storages=[
            DraftStorage(640_000, 11, 4, True, "steps", None),
            DraftStorage(40, xxh3_64(as_bytes(SEEN)), 8, False, "blob", 0),
        ],
        steps=[DraftStep(0, encode_tree(GROUPS), gradients)],
        optimizers=[
            DraftOptimizer("torch.optim.adamw.AdamW", encode_tree(GROUPS.children[0]), [[0]], [{"exp_avg": 0}])
        ],
        factors=[],
        environment={},
        arrays=[],
    )
    return draft, arrays


def segment_with(encoded):
    head, front = encode_record_head(
        number=1,
        step=8,
        time_ns=2,
        body=encoded.body,
        frames_nbytes=frames_nbytes([frame.header for frame in encoded.frames]),
        previous=NO_RECORD,
        structure=encoded.structure,
    )
    record = front + b"".join(part for frame in encoded.frames for part in frame.parts)
    return encode_segment(SEGMENT) + record.ljust(head.nbytes, b"\0")


def reader_of(content):
    return lambda offset, nbytes: content[offset : offset + nbytes]


def encoded_point():
    draft, arrays = draft_and_arrays()
    return PointEncoder(LIMITS, "fast").encode(PointDraft.decode(draft.encode()), arrays, thread_count=2)


def point_of(content):
    read = reader_of(content)
    (placed,) = read_heads(read, len(content), SEGMENT, limits=LIMITS)
    point = decode_point(read_body(read, placed), limits=LIMITS)
    return point, BlobReader(read, placed, point.blobs, LIMITS)


def test_a_point_comes_back():
    draft, _ = draft_and_arrays()
    encoded = encoded_point()
    assert encoded.structure == structure_of(draft.tree, encode_inner(draft.tensors))
    point, blobs = point_of(segment_with(encoded))
    assert (point.tree, point.tensors, point.metrics) == (TREE, TENSORS, {"loss": 0.5})
    assert [storage.source for storage in point.storages] == ["steps", "blob"]
    assert np.array_equal(blobs.bytes_of(point.storages[1].span).view(np.int64), SEEN)
    (step,) = point.steps
    assert step.groups == GROUPS
    for stored, (dtype, shape, values, indices) in zip(step.gradients, GRADIENTS, strict=True):
        back = load_gradient(stored, blobs)
        assert (back.dtype, back.shape) == (dtype, shape)
        assert back.values.tobytes() == np.ascontiguousarray(values).tobytes()
        assert (back.indices is None) == (indices is None)
        assert indices is None or np.array_equal(back.indices, indices)
    kinds = [stored.kind for stored in step.gradients]
    assert kinds == ["bf16", "plain", "plain", "coo", "plain", "plain"]
    assert step.gradients[5].values.nbytes == 20, "one row is stored"
    assert point.optimizers[0].kind == "torch.optim.adamw.AdamW"


def test_small_arrays_share_frames_and_long_ones_do_not():
    point, _ = point_of(segment_with(encoded_point()))
    long = [blob for blob in point.blobs if blob.nbytes >= OWN_NBYTES_MIN // 2]
    assert len(long) == 1
    assert len(point.blobs) <= 1 + 6
    assert all(nbytes <= LIMITS.chunk_nbytes_max for blob in point.blobs for _, nbytes in blob.chunks)


def test_factors_are_remembered_for_the_next_point(monkeypatch):
    draft, arrays = draft_and_arrays()
    encoder = PointEncoder(LIMITS, "fast")
    encoder.encode(draft, arrays, thread_count=1)
    monkeypatch.setattr("ckstore.journal.forms.factors_of", lambda *_: [])
    again = decode_point(encoder.encode(draft, arrays, thread_count=1).body)
    assert again.steps[0].gradients[0].kind == "bf16"


def test_a_search_that_found_no_factor_is_not_repeated_for_some_points(monkeypatch):
    draft, arrays = draft_and_arrays()
    encoder, searches = PointEncoder(LIMITS, "fast"), []
    monkeypatch.setattr("ckstore.journal.forms.factors_of", lambda *_: searches.append(1) or [])
    counts = []
    for _ in range(40):
        encoder.encode(draft, arrays, thread_count=1)
        counts.append(len(searches))
        searches.clear()
    assert counts[0] > 0
    assert not any(counts[1:16])
    assert any(counts[16:])
    assert sum(counts) <= 3 * counts[0]


def test_a_damaged_frame_raises_when_its_blob_is_read():
    encoded = encoded_point()
    content = bytearray(segment_with(encoded))
    point, _ = point_of(bytes(content))
    # The last record of a segment is checked whole, so a reader of a record that is not the last one is made by hand.
    (placed,) = read_heads(reader_of(segment_with(encoded)), len(content), SEGMENT, limits=LIMITS)
    frame_begin = placed.offset + placed.head.frames_end - frame_extent(encoded.frames[-1].header.stored_nbytes)
    content[frame_begin + FRAME_HEADER_NBYTES] ^= 1
    read = reader_of(bytes(content))
    blobs = BlobReader(read, placed, point.blobs, LIMITS)
    last = Span(len(point.blobs) - 1, 0, point.blobs[-1].nbytes)
    with pytest.raises(ChecksumError):
        blobs.bytes_of(last)


def test_drafts_that_contradict_themselves_are_refused():
    draft, arrays = draft_and_arrays()
    encoder = PointEncoder(LIMITS, "fast")
    for changed in (
        draft._replace(storages=[draft.storages[0], draft.storages[1]._replace(array=99)]),
        draft._replace(storages=[draft.storages[0], draft.storages[1]._replace(nbytes=48)]),
        draft._replace(steps=[draft.steps[0]._replace(gradients=[DraftGradient(0, "float32", (7,), 1, None)])]),
        draft._replace(storages=draft.storages[:1]),
    ):
        with pytest.raises(MalformedError):
            encoder.encode(changed, arrays, thread_count=1)
    with pytest.raises(MalformedError):
        PointDraft.decode(b"\x93\x01\x02\x03")


def sample():
    return point_of(segment_with(encoded_point()))[0]


def with_gradient(point, index, **changes):
    gradients = list(point.steps[0].gradients)
    gradients[index] = gradients[index]._replace(**changes)
    return replace(point, steps=(point.steps[0]._replace(gradients=tuple(gradients)),))


CONTRADICTIONS = {
    "span beyond its blob": lambda p: with_gradient(p, 0, values=Span(0, 1, 320_000)),
    "span of no blob": lambda p: with_gradient(p, 0, values=Span(77, 0, 320_000)),
    "other length": lambda p: with_gradient(p, 1, shape=(11, 4)),
    "unknown type": lambda p: with_gradient(p, 1, dtype="float33"),
    "narrow, not float32": lambda p: with_gradient(p, 0, dtype="int32"),
    "factor of a plain one": lambda p: with_gradient(p, 1, factor=b"\0\0\0\0"),
    "factor of five bytes": lambda p: with_gradient(p, 0, factor=b"\0" * 5),
    "dense with indices": lambda p: with_gradient(p, 1, indices=Span(0, 0, 8)),
    "sparse without": lambda p: with_gradient(p, 3, indices=None),
    "sparse, other count": lambda p: with_gradient(p, 3, sparse_dims=2),
    "rows of another length": lambda p: with_gradient(p, 5, rows=Span(0, 0, 3)),
    "order of parameters": lambda p: with_gradient(p, 1, parameter=0),
    "groups that are no list": lambda p: replace(p, steps=(p.steps[0]._replace(groups=GROUPS.children[0]),)),
    "tensor in the groups": lambda p: replace(
        p, steps=(p.steps[0]._replace(groups=ListNode((DictNode("dict", ("lr",), (TensorNode(0),)),))),)
    ),
    "chunk over the limit": lambda p: replace(p, blobs=(Blob(4, True, ((b"x" * 32, 1 << 30),)), *p.blobs[1:])),
    "chunk without id": lambda p: replace(p, blobs=(Blob(4, True, ((bytes(32), 8),)), *p.blobs[1:])),
    "blob of no chunks": lambda p: replace(p, blobs=(*p.blobs, Blob(4, True, ()))),
    "element width": lambda p: replace(p, storages=(p.storages[0]._replace(element_width=3), p.storages[1])),
    "optimizer's tensor": lambda p: replace(p, optimizers=(replace(p.optimizers[0], groups=((9,),)),)),
    "optimizer's state": lambda p: replace(p, optimizers=(replace(p.optimizers[0], state=()),)),
    "storage too short": lambda p: replace(p, storages=(p.storages[0]._replace(nbytes=4), p.storages[1])),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_neither_written_nor_read(name):
    point = CONTRADICTIONS[name](sample())
    with pytest.raises(MalformedError):
        check_point(point, limits=LIMITS)
    with pytest.raises(MalformedError):
        encode_point(point, limits=LIMITS)


def test_any_cut_or_changed_body_raises_or_decodes():
    body = encode_point(sample(), limits=LIMITS)
    assert decode_point(body, limits=LIMITS) == sample()
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(body), 300).tolist():
        damaged = bytearray(body)
        damaged[at] ^= 1 << int(rng.integers(8))
        for content in (bytes(damaged), body[:at]):
            with contextlib.suppress(CorruptError):
                decode_point(content, limits=LIMITS)
