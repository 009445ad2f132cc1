"""Protects readers of manifests: one with contradicting parts is neither written nor accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.config import Limits
from ckstore.errors import CkstoreError, CorruptError, MalformedError, UnsupportedError, UsageError
from ckstore.format.header import PREAMBLE_NBYTES, TRAILER_NBYTES, decode_header
from ckstore.format.location import encode_location
from ckstore.format.logical import encode_logical, encode_losses
from ckstore.format.manifest import (
    FrameRef,
    Manifest,
    PackRef,
    build_manifest,
    decode_manifest,
    encode_manifest,
)
from ckstore.format.records import LogicalRecord, decode_stored, encode_inner
from ckstore.format.tensors import ChunkSpec, Piece, StorageSpec, TensorSpec
from ckstore.format.tree import DictNode, ListNode, TensorNode, ValueNode
from ckstore.format.wire import sealed
from ckstore.hashing import NO_BASE, digest_of
from support.forged_manifests import forged, plain_sections
from support.format_samples import OTHER_PACK_ID, PACK_ID, sample_chunk_id, sample_manifest

SAMPLE = sample_manifest()
LOSSES = encode_losses(SAMPLE.losses)


ENCODED = encode_manifest(SAMPLE)


TENSOR = SAMPLE.tensors[0]


STORAGE = SAMPLE.storages[0]


CHUNK = SAMPLE.chunks[0]


PACK, COLD = SAMPLE.packs
FULL, MIDDLE, DEEP = SAMPLE.frames
WRONG_PARTS = {
    "tensor of no storage": {"tensors": (replace(TENSOR, storage=3), *SAMPLE.tensors[1:])},
    "tensor larger than its storage": {"tensors": (replace(TENSOR, shape=(9, 16)), *SAMPLE.tensors[1:])},
    "tensor beyond the end": {"tensors": (replace(TENSOR, offset=4), *SAMPLE.tensors[1:])},
    "tensor before the start": {"tensors": (*SAMPLE.tensors[:2], replace(SAMPLE.tensors[2], offset=64))},
    "wider elements than its storage holds": {"tensors": (replace(TENSOR, dtype="float64"), *SAMPLE.tensors[1:])},
    "more strides than dimensions": {"tensors": (replace(TENSOR, strides=(1,)), *SAMPLE.tensors[1:])},
    "product of dimensions overflows": {"tensors": (replace(TENSOR, shape=(1 << 40, 1 << 40)), *SAMPLE.tensors[1:])},
    "fewer tensors than the tree names": {"tensors": SAMPLE.tensors[:2]},
    "chunks that do not add up": {"storages": (replace(STORAGE, nbytes=511), *SAMPLE.storages[1:])},
    "a piece beyond its chunk": {"storages": (replace(STORAGE, pieces=(Piece(0, 1, 256),)), *SAMPLE.storages[1:])},
    "an empty piece": {"storages": (replace(STORAGE, pieces=(*STORAGE.pieces, Piece(0, 0, 0))), *SAMPLE.storages[1:])},
    "a piece of no chunk": {"storages": (replace(STORAGE, pieces=(Piece(9, 0, 512),)), *SAMPLE.storages[1:])},
    "elements of three bytes": {"storages": (replace(STORAGE, element_width=3), *SAMPLE.storages[1:])},
    "a chunk over the limit": {"chunks": (replace(CHUNK, nbytes=(4 << 20) + 1), SAMPLE.chunks[1])},
    "an empty chunk": {"chunks": (replace(CHUNK, nbytes=0), SAMPLE.chunks[1])},
    "chunk elements of three bytes": {"chunks": (replace(CHUNK, element_width=3), SAMPLE.chunks[1])},
    "a chunk twice": {"chunks": (CHUNK, CHUNK)},
    "a chunk that no storage needs": {"chunks": (*SAMPLE.chunks, ChunkSpec(sample_chunk_id(1), 256, 4, True))},
    "a chunk that no frame holds": {"chunks": (CHUNK, ChunkSpec(sample_chunk_id(8), 256, 4, True))},
    "chunk id zero": {"chunks": (CHUNK, replace(CHUNK, chunk_id=NO_BASE))},
    "a pack twice": {"packs": (PACK, replace(COLD, pack_id=PACK.pack_id))},
    "a pack that no frame needs": {"packs": (PACK, COLD, PackRef(bytes(16), 16_384, bytes(32)))},
    "a pack of odd size": {"packs": (replace(PACK, nbytes=16_383), COLD)},
    "a pack too small": {"packs": (replace(PACK, nbytes=8192), COLD)},
    "a pack over the limit": {"packs": (PACK, replace(COLD, nbytes=1 << 40))},
    "a tier that is a path": {"packs": (PACK, replace(COLD, tier="/etc"))},
    "a tier that is a URL": {"packs": (PACK, replace(COLD, tier="s3://bucket"))},
    "a frame in no pack": {"frames": (replace(FULL, pack=2), MIDDLE, DEEP)},
    "a frame in the superheader": {"frames": (replace(FULL, offset=4032), MIDDLE, DEEP)},
    "a frame not aligned": {"frames": (replace(FULL, offset=4097), MIDDLE, DEEP)},
    "a frame in directory or tail": {"frames": (FULL, MIDDLE, replace(DEEP, offset=8000))},
    "a frame beyond the end": {"frames": (FULL, replace(MIDDLE, offset=1 << 20), DEEP)},
    "frames that overlap": {"frames": (FULL, MIDDLE, replace(DEEP, offset=4096 + 64))},
    "a frame over the chunk limit": {"frames": (FULL, replace(MIDDLE, stored_nbytes=5 << 20), DEEP)},
    "an empty frame": {"frames": (FULL, replace(MIDDLE, stored_nbytes=0), DEEP)},
    "a chunk located twice": {"frames": (FULL, replace(MIDDLE, chunk_id=FULL.chunk_id), DEEP)},
    "a frame nobody needs": {"frames": (*SAMPLE.frames, FrameRef(sample_chunk_id(7), 1, 4096, 64))},
    "its own base": {"frames": (FULL, replace(MIDDLE, base=1), DEEP)},
    "a cycle": {"frames": (FULL, replace(MIDDLE, base=2, depth=3), DEEP)},
    "a base that is not listed": {"frames": (FULL, replace(MIDDLE, base=77), DEEP)},
    "depth of a keyframe": {"frames": (replace(FULL, depth=1), MIDDLE, DEEP)},
    "depth less than its base's": {"frames": (FULL, MIDDLE, replace(DEEP, depth=1))},
}


@pytest.mark.parametrize("changes", WRONG_PARTS.values(), ids=WRONG_PARTS.keys())
def test_parts_that_contradict_each_other_are_refused(changes):
    wrong = replace(SAMPLE, **changes)
    facts = {
        "bytes_state": sum(storage.nbytes for storage in wrong.storages),
        "bytes_stored": sum(frame.stored_nbytes for frame in wrong.frames),
        "tensor_count": len(wrong.tensors),
        "chunk_count": len(wrong.chunks),
        "depth_max": max(frame.depth for frame in wrong.frames),
    }
    encoded = forged(wrong, header=facts)
    with pytest.raises(MalformedError):
        decode_manifest(encoded)


@pytest.mark.parametrize("changes", WRONG_PARTS.values(), ids=WRONG_PARTS.keys())
def test_refused_manifests_are_not_written(changes):
    with pytest.raises(MalformedError):
        encode_manifest(replace(SAMPLE, **changes))


def test_refusals_say_what_is_wrong():
    """Several checks catch some of these. The first one must name the cause."""
    causes = {
        "a base that is not listed": "does not precede it",
        "a cycle": "does not precede it",
        "a chunk that no frame holds": "does not locate",
        "a chunk twice": "lists a chunk twice",
        "a pack twice": "names a pack twice",
    }
    for name, cause in causes.items():
        with pytest.raises(MalformedError, match=cause):
            encode_manifest(_consistent(replace(SAMPLE, **WRONG_PARTS[name])))
    with pytest.raises(MalformedError, match="torn or has trailing bytes"):
        decode_manifest(ENCODED + b"\0")


def _consistent(manifest: Manifest) -> Manifest:
    """Give a manifest the header that matches its parts."""
    record = encode_inner({name: getattr(manifest.header, name) for name in LogicalRecord.__struct_fields__})
    header = replace(
        manifest.header,
        checkpoint_id=digest_of(encode_logical(record, manifest.logical)),
        chunk_count=len(manifest.chunks),
        depth_max=max(frame.depth for frame in manifest.frames),
    )
    return replace(manifest, header=header)


def test_wrong_magic_with_right_checksums_is_refused():
    first = sealed(b"CKMANI\0\2" + ENCODED[8 : PREAMBLE_NBYTES - 8], PREAMBLE_NBYTES)
    with pytest.raises(MalformedError, match="no manifest starts here"):
        decode_header(first + ENCODED[PREAMBLE_NBYTES:])
    body = ENCODED[:-TRAILER_NBYTES] + b"CKMEND\0\2" + ENCODED[8 - TRAILER_NBYTES : -32]
    with pytest.raises(MalformedError, match="trailer"):
        decode_manifest(body + digest_of(body))


@pytest.mark.parametrize(("count", "cause"), [(3, "more pieces"), (1, "without a storage")])
def test_pieces_belong_to_exactly_one_storage(count, cause):
    logical = bytearray(encode_logical(encode_inner({}), SAMPLE.logical))
    storages = len(logical) - len(LOSSES) - 2 * 40 - 3 * 12 - 3 * 16
    assert logical[storages + 8 : storages + 12] == b"\2\0\0\0"
    logical[storages + 8] = count
    # The last storage drops its piece, or keeps it.
    logical[storages + 2 * 16 + 8] = 1
    with pytest.raises(MalformedError, match=cause):
        decode_manifest(forged(logical=bytes(logical)))


def test_limits_come_from_the_store():
    for limits in (Limits(depth_max=1), Limits(chunk_nbytes_max=255), Limits(manifest_nbytes_max=1000)):
        with pytest.raises(MalformedError):
            decode_manifest(ENCODED, limits=limits)
        with pytest.raises(MalformedError):
            encode_manifest(SAMPLE, limits=limits)


def test_reserved_bytes_and_wrong_tiers_are_refused():
    location = encode_location(SAMPLE.packs, SAMPLE.frames, SAMPLE.decisions)
    tiers_nbytes = len(encode_inner(["cold", "local"]))
    for at in (32 + tiers_nbytes + 58, 32 + tiers_nbytes + 60):
        wrong = bytearray(location)
        wrong[at] = 1
        with pytest.raises(MalformedError):
            decode_manifest(forged(location=bytes(wrong)))
    for tiers in (["local", "cold"], ["cold", "cold", "local"], ["cold"], ["cold", "idle", "local"]):
        table = encode_inner(tiers)
        wrong_table = len(table).to_bytes(8, "little") + location[8:32] + table + location[32 + tiers_nbytes :]
        with pytest.raises(MalformedError):
            decode_manifest(forged(location=wrong_table))
    without = encode_location(SAMPLE.packs, SAMPLE.frames)
    for at, value in ((len(location) - 1, None), (len(without), 0xFF), (len(location) - 10, 6), (len(location) - 9, 3)):
        wrong = bytearray(location)
        if value is None:
            del wrong[at]
        else:
            wrong[at] = value
        with pytest.raises(MalformedError):
            decode_manifest(forged(location=bytes(wrong)))
    logical = bytearray(encode_logical(encode_inner({}), SAMPLE.logical))
    logical[-1 - len(LOSSES)] = 1
    with pytest.raises(MalformedError, match="reserved"):
        decode_manifest(forged(logical=bytes(logical)))


@pytest.mark.parametrize("at", range(0, 48, 8))
@pytest.mark.parametrize("value", [0, 1, 5, 1 << 32, (1 << 64) - 1])
def test_wrong_logical_counts_are_refused(at, value):
    logical = bytearray(encode_logical(encode_inner({}), SAMPLE.logical))
    true = int.from_bytes(logical[at : at + 8], "little")
    logical[at : at + 8] = (value if value != true else value + 1).to_bytes(8, "little")
    with pytest.raises(MalformedError):
        decode_manifest(forged(logical=bytes(logical)))


@pytest.mark.parametrize("at", [0, 8, 16, 24])
@pytest.mark.parametrize("value", [0, 1, 1 << 32, (1 << 64) - 1])
def test_wrong_location_counts_are_refused(at, value):
    location = bytearray(encode_location(SAMPLE.packs, SAMPLE.frames, SAMPLE.decisions))
    location[at : at + 8] = value.to_bytes(8, "little")
    with pytest.raises(MalformedError):
        decode_manifest(forged(location=bytes(location)))


def test_too_large_metrics_are_not_written():
    many = {f"metric {number}": 1.0 for number in range(5000)}
    logical = encode_logical(b"", SAMPLE.logical)
    header = replace(SAMPLE.header, metrics=many, checkpoint_id=digest_of(logical))
    with pytest.raises(UsageError, match="metrics"):
        encode_manifest(replace(SAMPLE, header=header))


@st.composite
def manifests(draw):
    chunk_count = draw(st.integers(0, 12))
    widths = draw(st.lists(st.sampled_from((1, 2, 4, 8)), min_size=chunk_count, max_size=chunk_count))
    chunks = [ChunkSpec(sample_chunk_id(number), 64 * width, width, width > 1) for number, width in enumerate(widths)]
    storages = [
        StorageSpec(chunk.nbytes, chunk.element_width, chunk.is_float, (Piece(number, 0, chunk.nbytes),))
        for number, chunk in enumerate(chunks)
    ]
    tensors = [TensorSpec("bytes", "", (storage.nbytes,), (1,), number, 0) for number, storage in enumerate(storages)]
    frames = []
    offsets = [4096, 4096]
    for chunk in chunks:
        base = draw(st.integers(-1, len(frames) - 1))
        pack = draw(st.integers(0, 1))
        depth = 0 if base < 0 else frames[base].depth + 1
        frames.append(FrameRef(chunk.chunk_id, pack, offsets[pack], draw(st.integers(1, 64)), base, depth))
        offsets[pack] += draw(st.sampled_from((256, 512, 1 << 20)))
    packs = [PackRef(PACK_ID, 64 << 20, digest_of(b"0")), PackRef(OTHER_PACK_ID, 64 << 20, digest_of(b"1"), "cold")]
    used = sorted({frame.pack for frame in frames})
    scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(max_size=5) | st.binary()
    values = st.builds(ValueNode, st.text(max_size=8), scalars)
    keys = st.lists(st.text(max_size=4) | st.integers(-(1 << 63), (1 << 63) - 1), max_size=6, unique=True).map(tuple)
    names = draw(keys)
    tree = DictNode("dict", names, tuple(draw(values) for _ in names))
    return build_manifest(
        store_id=draw(st.binary(min_size=16, max_size=16)),
        run="r",
        seq=draw(st.integers(0, 10**18 - 1)),
        step=draw(st.integers(0, 10**18 - 1)),
        generation=draw(st.integers(0, 10**9 - 1)),
        time_ns=draw(st.integers(0, (1 << 63) - 1)),
        parent=draw(st.none() | st.integers(0, 10**18 - 1)),
        metrics=draw(st.dictionaries(st.text(max_size=8), st.floats(), max_size=4)),
        tree=ListNode((tree, *(TensorNode(number) for number in range(len(tensors))))),
        tensors=tensors,
        storages=storages,
        chunks=chunks,
        packs=[packs[pack] for pack in used],
        frames=[replace(frame, pack=used.index(frame.pack)) for frame in frames],
        bytes_written=draw(st.integers(0, 1 << 40)),
        chunks_new=draw(st.integers(0, chunk_count)),
    )


@settings(deadline=None)
@given(manifests())
def test_any_manifest_round_trips(manifest):
    encoded = encode_manifest(manifest)
    found = decode_manifest(encoded, expect=manifest.header.name)
    assert encode_manifest(found) == encoded
    assert replace(found, header=manifest.header) == manifest


def test_record_not_in_shortest_form_is_refused():
    assert decode_stored(b"\x91\x61", list[int]) == [97]
    for longer in (b"\x91\xcc\x61", b"\xdc\x00\x01\x61", b"\x91\xd1\x00\x61"):
        with pytest.raises(MalformedError, match="shortest"):
            decode_stored(longer, list[int])


@settings(deadline=None)
@given(st.data())
def test_any_changed_section_raises_only_our_errors(data):
    """Even with correct digests, the result is a refusal or a consistent manifest."""
    logical, location = plain_sections()
    sections = {"logical": bytearray(logical), "location": bytearray(location)}
    for _ in range(data.draw(st.integers(1, 4))):
        section = sections[data.draw(st.sampled_from(("logical", "location")))]
        section[data.draw(st.integers(0, len(section) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_manifest(forged(**{name: bytes(section) for name, section in sections.items()}))
    except CkstoreError as error:
        assert isinstance(error, (CorruptError, UnsupportedError))  # noqa: PT017 - one of two kinds
        return
    encode_manifest(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"base": "other"},
        {"base": "none"},
        {"base_seq": None},
        {"keyframe_seq": None},
        {"base_seq": 1 << 62},
        {"storages": ()},
    ],
    ids=str,
)
def test_contradicting_choices_are_not_written(changes):
    with pytest.raises(MalformedError):
        encode_manifest(replace(SAMPLE, decisions=replace(SAMPLE.decisions, **changes)))
