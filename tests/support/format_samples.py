"""Small, valid and deterministic structures of every kind: what goldens, fuzzers and tests of parsers start from.

Nothing here is random: the same call gives the same bytes on every machine and in every version that writes this
format version.
"""

from __future__ import annotations

from ckstore.format.frame import FRAME_HEADER_NBYTES, FrameHeader, encode_frame_header, frame_extent
from ckstore.format.location import DERIVED, FULL, RESIDUAL, StorageDecision
from ckstore.format.manifest import ChunkSpec, Decisions, FrameRef, Loss, Manifest, PackRef, build_manifest
from ckstore.format.pack import (
    PACK_ALIGN,
    SUPERHEADER_NBYTES,
    DirectoryEntry,
    encode_directory,
    encode_superheader,
    encode_tail,
)
from ckstore.format.records import (
    ConfigRecord,
    FileRecord,
    HomeRecord,
    IntentRecord,
    LeaseRecord,
    OwnerRecord,
    StoreRecord,
    TaggedPoint,
    TagRecord,
    TierTurns,
)
from ckstore.format.replay_form import HashedStorage, ReplayBase, ReplayForm, in_replay_form
from ckstore.format.tensors import Piece, StorageSpec, TensorSpec
from ckstore.format.tree import ConvertedNode, DictNode, ListNode, TensorNode, TupleNode, ValueNode
from ckstore.format.wire import align_up, xxh3_64
from ckstore.hashing import NO_BASE, ChunkId, PackId, chunk_id_of, digest_of

STORE_ID = bytes(range(16))
PACK_ID = PackId(bytes(range(16, 32)))
OTHER_PACK_ID = PackId(bytes(range(32, 48)))
TIME_NS = 1_750_000_000_000_000_000

CONSTANT_CODEC = (1, b"")
PLANES_CODEC = (2, b"\x01")
DELTA_STEPS = ((5, b"\x01"), (2, b"\x00"))


def sample_plain(number: int, nbytes: int = 256) -> bytes:
    """Return plain bytes that differ for every number."""
    return (digest_of(b"%d" % number) * (nbytes // 32 + 1))[:nbytes]


def sample_chunk_id(number: int) -> ChunkId:
    """Return the address of ``sample_plain(number)``."""
    return chunk_id_of(sample_plain(number))


def sample_frames() -> list[tuple[FrameHeader, bytes]]:
    """Return a plain frame, a coded one, and one with a base, each with its payload."""
    plain = sample_plain(0)
    coded = sample_plain(1)[:100]
    delta = sample_plain(2)[:33]
    drafts = [
        (FrameHeader(sample_chunk_id(0), NO_BASE, 256, len(plain), 4, (), 0), plain),
        (FrameHeader(sample_chunk_id(1), NO_BASE, 256, len(coded), 2, (PLANES_CODEC,), 0), coded),
        (
            FrameHeader(sample_chunk_id(2), sample_chunk_id(0), 256, len(delta), 1, DELTA_STEPS, 0),
            delta,
        ),
    ]
    return [(header.with_checksum(xxh3_64(payload)), payload) for header, payload in drafts]


def sample_pack() -> bytes:
    """Return a whole pack with ``sample_frames``."""
    body = bytearray(encode_superheader(store_id=STORE_ID, pack_id=PACK_ID))
    entries = []
    for header, payload in sample_frames():
        entries.append(DirectoryEntry.of(header, offset=len(body)))
        end = len(body) + frame_extent(len(payload))
        body += encode_frame_header(header) + payload
        body += bytes(end - len(body))
    body += bytes(align_up(len(body), PACK_ALIGN) - len(body))
    directory = encode_directory(entries)
    tail = encode_tail(store_id=STORE_ID, pack_id=PACK_ID, directory=directory, directory_offset=len(body))
    body += directory.encoded
    body += bytes(align_up(len(body), PACK_ALIGN) - len(body))
    return bytes(body) + tail


def sample_manifest() -> Manifest:
    """Return a manifest that uses every kind of node, a shared chunk, a base, a loss, two packs and two tiers."""
    tree = DictNode(
        "dict",
        ("model", "seen", 7),
        (
            DictNode("OrderedDict", ("weight", "bias"), (TensorNode(0), TensorNode(1)), DictNode("dict", (), ())),
            DictNode("defaultdict", ("a",), (ValueNode("int", -1),), None, "int"),
            ListNode(
                (
                    TupleNode((ValueNode("none", None), ValueNode("bool", True), ValueNode("str", "naïve"))),
                    ValueNode("float", b"\0\0\0\0\0\0\xf8\x7f"),
                    ConvertedNode("example.Thing", TensorNode(2)),
                )
            ),
        ),
    )
    return build_manifest(
        store_id=STORE_ID,
        run="main",
        seq=3,
        step=41_000,
        generation=1,
        time_ns=TIME_NS,
        parent=2,
        origin_id=digest_of(b"origin"),
        is_archival=True,
        metrics={"loss": 2.07, "accuracy": float("nan")},
        tree=tree,
        tensors=[
            TensorSpec("torch", "float32", (8, 16), (16, 1), 0, 0, True, True),
            TensorSpec("torch", "bfloat16", (0, 3), (3, 1), 1, 0),
            TensorSpec("numpy", "<i2", (4, 8), (-32, 2), 2, 96),
        ],
        storages=[
            StorageSpec(512, 4, True, (Piece(0, 0, 256), Piece(1, 0, 256))),
            StorageSpec(0, 2, True, ()),
            StorageSpec(128, 2, False, (Piece(2, 64, 128),)),
        ],
        chunks=[
            ChunkSpec(sample_chunk_id(0), 256, 4, True),
            ChunkSpec(sample_chunk_id(2), 256, 4, True),
            ChunkSpec(sample_chunk_id(0), 256, 2, False),
        ],
        packs=[PackRef(PACK_ID, 16_384, digest_of(b"one")), PackRef(OTHER_PACK_ID, 1 << 20, digest_of(b"two"), "cold")],
        frames=[
            FrameRef(sample_chunk_id(0), 0, SUPERHEADER_NBYTES, 256),
            FrameRef(sample_chunk_id(1), 1, 65_536, 100, 0, 1),
            FrameRef(sample_chunk_id(2), 0, SUPERHEADER_NBYTES + 256 + FRAME_HEADER_NBYTES, 33, 1, 2),
        ],
        bytes_written=16_384,
        chunks_new=1,
        decisions=sample_decisions(),
        fidelity="near",
        losses=[sample_loss()],
    )


def sample_loss() -> Loss:
    """Return what the first storage of ``sample_manifest`` lost."""
    numbers = {"step": 0.5, "dead_zone": 0.625}
    return Loss(0, "weight", "grid", 2.25, 0.125, 0.0625, 1.5, 0.25, hops=3, spike=None, numbers=numbers)


def sample_decisions() -> Decisions:
    """Return decisions for the three storages of ``sample_manifest``."""
    return Decisions(
        base="keyframe",
        base_seq=1,
        keyframe_seq=1,
        reason="against the keyframe",
        storages=(
            StorageDecision(RESIDUAL, 26.5, 21.25, 22.0, "keyframe", 2),
            StorageDecision(DERIVED),
            StorageDecision(FULL, 10.5, None, 11.0),
        ),
    )


def sample_records() -> list[FileRecord]:
    """Return one record of each kind."""
    who = {
        "host": "node-1",
        "boot_id": "b",
        "pid": 4711,
        "process_started": "12345",
        "token": "0" * 32,
        "acquired_ns": TIME_NS,
        "heartbeat_ns": TIME_NS + 1,
    }
    return [
        StoreRecord(
            store_id=STORE_ID.hex(),
            created_ns=TIME_NS,
            chunk_nbytes_max=4 << 20,
            pack_nbytes_max=64 << 30,
            manifest_nbytes_max=1 << 30,
            depth_max=64,
        ),
        ConfigRecord(tiers={"cold": "s3://bucket/prefix"}, policy={"compression": "best"}, retention={"keep_last": 3}),
        TagRecord(seq=3, step=41_000, checkpoint_id=digest_of(b"id").hex(), time_ns=TIME_NS),
        LeaseRecord(**who, purpose="commit"),  # type: ignore[arg-type]
        IntentRecord(**who, what="delete seq 3"),  # type: ignore[arg-type]
        HomeRecord(home_id="1" * 32, place="inode 77", tiers={"cold": TierTurns(tier_id="2" * 32, turns=("3" * 32,))}),
        OwnerRecord(home_id="1" * 32, tier_id="2" * 32, turn="3" * 32),
    ]


def sample_tag_on_point() -> TagRecord:
    """Return the record of a tag on a point of a journal."""
    point = TaggedPoint(token="5" * 32, number=18, record_id=digest_of(b"record")[:16].hex())
    return TagRecord(seq=3, step=41_017, checkpoint_id=digest_of(b"id").hex(), time_ns=TIME_NS, point=point)


def sample_replay_form() -> ReplayForm:
    """Return a checkpoint in replay form: tensors of two libraries that share a storage, a scalar, and a long text."""
    text = sample_plain(7, 96)
    names = ("model", "again", "count", "text", "lr")
    children = (
        ListNode((TensorNode(0), TensorNode(1))),
        TensorNode(0),
        TensorNode(2),
        ConvertedNode("ckstore:str", TensorNode(3)),
        ValueNode("float", bytes(8)),
    )
    return ReplayForm(
        base=ReplayBase(2, 40_000, digest_of(b"base")),
        environment={"torch": "2.9.0", "threads": "8"},
        tree=DictNode("dict", names, children),
        tensors=(
            TensorSpec("torch", "bfloat16", (2, 4), (4, 1), 0, 0, is_parameter=True, requires_grad=True),
            TensorSpec("torch", "bfloat16", (4,), (2,), 0, 2),
            TensorSpec("numpy", "<i8", (), (), 1, 0),
            TensorSpec("bytes", "", (96,), (1,), 2, 0),
        ),
        storages=(
            HashedStorage(16, 2, True, digest_of(b"first")),
            HashedStorage(8, 8, False, digest_of(b"second")),
            HashedStorage(96, 1, False, digest_of(text)),
        ),
        values={2: text},
    )


def sample_replay_manifest() -> Manifest:
    """Return the manifest of ``sample_replay_form``."""
    return in_replay_form(sample_manifest(), sample_replay_form())
