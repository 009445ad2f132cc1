"""Records and the format version: typed, bounded decoding of small structures. Only this module imports msgspec.

A *file record* is a separate JSON file that users may read, with a kind, a checksum and a body: store.json,
config.json, tags, leases, intents. An *inner record* is MessagePack inside a manifest, or in what ranks send each
other. Unknown fields, wrong types, trailing bytes and numbers out of range are refused. Exceptions are leases, intents
and deletion lists, whose unknown fields are ignored: a process that could not read those of a newer ckstore would take
a live writer for dead.

The format version is independent of the package version. A mandatory flag changes the meaning of bytes, so a reader
that does not know it must refuse the structure. An optional flag may be ignored.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from ckstore.config import is_name
from ckstore.errors import ChecksumError, MalformedError, UnsupportedError, UsageError
from ckstore.format.wire import BLOCK_NBYTES, xxh3_64

FORMAT_VERSION = 4
"""The version that is written. 2 added bases and decisions, 3 lossy frames and losses, 4 compressed manifests."""

READABLE_VERSIONS = (1, 2, 3, 4)

MANDATORY_FEATURES: dict[str, int] = {}
"""Names in ``store.json``, and bits in packs and manifests. Version 4 defines no features."""

OPTIONAL_FEATURES: dict[str, int] = {}
"""Features that a reader may ignore. Version 4 defines no features."""

_TODO = "upgrade ckstore; do not change the store with this version"
_KNOWN_BITS = sum(MANDATORY_FEATURES.values())


def check_readable(version: int, mandatory_flags: int = 0, *, where: object = None) -> None:
    """Check that this version can read a structure.

    Raises:
        UnsupportedError: The version or a mandatory flag is unknown.
    """
    if version not in READABLE_VERSIONS:
        raise UnsupportedError(
            f"this version of ckstore cannot read format version {version}", where=where, todo=_TODO, version=version
        )
    unknown = mandatory_flags & ~_KNOWN_BITS
    if unknown:
        raise UnsupportedError(
            f"this version of ckstore does not know the mandatory flags {unknown:#x}",
            where=where,
            todo=_TODO,
            flags=unknown,
        )


def check_features(names: Iterable[str], *, where: object = None) -> None:
    """Check that this version knows all mandatory features.

    Raises:
        UnsupportedError: A feature is unknown.
    """
    for name in names:
        if name not in MANDATORY_FEATURES:
            raise UnsupportedError(
                f"this version of ckstore does not know the mandatory feature {name!r}",
                where=where,
                todo=_TODO,
                feature=name,
            )


RECORD_NBYTES_MAX = 1 << 20

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Hex16 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
Hex32 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
ShortText = Annotated[str, msgspec.Meta(max_length=1024)]
DtypeText = Annotated[str, msgspec.Meta(max_length=1 << 20)]

R = TypeVar("R")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of file records; ``kind`` is on disk."""

    kind: ClassVar[str]
    is_edited_by_people: ClassVar[bool] = False


class StoreRecord(FileRecord, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``store.json``: written once, when the store is created."""

    kind: ClassVar[str] = "ckstore"

    format_version: Count = FORMAT_VERSION
    store_id: Hex16
    created_ns: Count
    hash_name: ShortText = "blake3"
    chunk_nbytes_max: Count
    pack_nbytes_max: Count
    manifest_nbytes_max: Count
    depth_max: Count
    block_nbytes: Count = BLOCK_NBYTES
    mandatory_features: tuple[ShortText, ...] = ()
    optional_features: tuple[ShortText, ...] = ()


class ConfigRecord(FileRecord, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``config.json``: the settings that users may edit, and the only place with tier addresses."""

    kind: ClassVar[str] = "config"
    is_edited_by_people: ClassVar[bool] = True

    tiers: dict[str, str] = {}
    policy: dict[str, Any] = {}
    retention: dict[str, Any] = {}


class TaggedPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The record of a journal that a tag is on: the token of its segment, its number, and its id."""

    token: Hex16
    number: Count
    record_id: Hex16


class TagRecord(FileRecord, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A tag: a user's name for a checkpoint; or for a point, with ``seq`` and ``checkpoint_id`` of its keyframe."""

    kind: ClassVar[str] = "tag"

    seq: Count
    step: Count
    checkpoint_id: Hex32
    time_ns: Count
    point: TaggedPoint | None = None


class LeaseRecord(FileRecord, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """The process that writes a run. Informs users and other processes; correctness does not depend on it."""

    kind: ClassVar[str] = "lease"

    host: ShortText
    boot_id: ShortText
    pid: Count
    process_started: ShortText
    token: Hex16
    acquired_ns: Count
    heartbeat_ns: Count
    purpose: ShortText = ""


class IntentRecord(FileRecord, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """An intended drop or demotion, and the process that decides it."""

    kind: ClassVar[str] = "intent"

    host: ShortText
    boot_id: ShortText
    pid: Count
    process_started: ShortText
    token: Hex16
    acquired_ns: Count
    heartbeat_ns: Count
    what: ShortText


class DeletionListRecord(FileRecord, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """A deletion list: the packs that a collector will remove from a bucket, and the collector's process."""

    kind: ClassVar[str] = "doomed"

    host: ShortText
    boot_id: ShortText
    pid: Count
    process_started: ShortText
    token: Hex16
    acquired_ns: Count
    packs: tuple[Hex16, ...]


class PointerRecord(FileRecord, frozen=True, forbid_unknown_fields=False, omit_defaults=True, kw_only=True):
    """A pointer: a file outside the store that stands for one checkpoint, where a framework expects a checkpoint."""

    kind: ClassVar[str] = "pointer"

    about: ShortText
    made_by: ShortText
    store: Annotated[str, msgspec.Meta(max_length=8192)]
    store_id: Hex16
    run: ShortText
    step: Count
    after_seq: Count | None
    ahead: Count = 0
    seq: Count | None
    checkpoint_id: Hex32 | None
    previous_seq: Count | None = None
    previous_id: Hex32 | None = None


class TierTurns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tier that a store owns: its id, and its last turns, newest last."""

    tier_id: Hex16
    turns: tuple[Hex16, ...]


class HomeRecord(FileRecord, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``home.json``: the place where a store with tiers was created, by which a copy recognizes that it is a copy."""

    kind: ClassVar[str] = "home"

    home_id: Hex16
    place: str
    tiers: dict[str, TierTurns] = {}


class OwnerRecord(FileRecord, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``owner.json`` of a tier: the store that may change it, and the turn of the last change."""

    kind: ClassVar[str] = "owner"

    home_id: Hex16
    tier_id: Hex16
    turn: Hex16


class HeaderRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The header of a manifest, a MessagePack map; ``header.ManifestHeader`` documents the fields."""

    run: ShortText
    seq: Count
    step: Count
    generation: Count
    time_ns: Count
    parent: Count | None
    checkpoint_id: bytes
    origin_id: bytes | None
    is_archival: bool
    fidelity: ShortText
    bytes_state: Count
    bytes_stored: Count
    bytes_written: Count
    metrics: dict[ShortText, float]
    tensor_count: Count
    chunk_count: Count
    chunks_new: Count
    chunks_reused: Count
    depth_max: Count


class LogicalRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The scalar facts of the logical section."""

    run: ShortText
    seq: Count
    step: Count
    time_ns: Count
    parent: Count | None
    origin_id: bytes | None
    is_archival: bool
    fidelity: ShortText
    metrics: dict[ShortText, float]


class DecisionsRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The decisions for a whole checkpoint; see format/location.py."""

    base: ShortText
    base_seq: Count | None
    keyframe_seq: Count | None
    reason: ShortText


class TensorRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One tensor, a MessagePack array."""

    library: ShortText
    dtype: DtypeText
    shape: tuple[Count, ...]
    strides: tuple[int, ...]
    storage: Count
    offset: Count
    is_parameter: bool
    requires_grad: bool


class LossRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The loss of one storage, a MessagePack array; see format/logical.py."""

    storage: Count
    role: ShortText
    method: ShortText
    bits: float
    max_abs: float
    rms_error: float
    rms_value: float
    kept: float
    hops: Count
    spike: float | None
    numbers: dict[ShortText, float]


class RecordPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A record of a journal: the token of its segment, its number, and its id."""

    token: bytes
    number: Count
    record_id: bytes


class SegmentRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The facts of a journal's segment; docs/FORMAT.md section 14 has the fields."""

    run: ShortText
    order: Count
    after_seq: Count | None
    time_ns: Count
    previous: RecordPlace | None
    first: Count
    environment: dict[ShortText, ShortText]


SpanRow = tuple[Count, Count, Count]
"""Bytes of a blob: the blob, the offset, the length."""


class GradientRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One gradient of a step; see format/points.py."""

    parameter: Count
    dtype: ShortText
    shape: tuple[Count, ...]
    kind: ShortText
    factor: bytes | None
    rows: SpanRow | None
    values: SpanRow
    indices: SpanRow | None
    sparse_dims: Count


class StepRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One step of an optimizer; ``groups`` is an encoded tree."""

    optimizer: Count
    groups: bytes
    gradients: list[GradientRow]


class BlobRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A blob: a concatenation of chunks, each given by its id and its length."""

    element_width: Count
    is_float: bool
    chunks: list[tuple[bytes, Count]]


class OptimizerRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What makes an optimizer again: its class, its arguments as an encoded tree, and indices of tensors."""

    kind: ShortText
    defaults: bytes
    groups: list[list[Count]]
    state: list[dict[ShortText, Count]]


class PointRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a journal's record; see format/points.py."""

    metrics: dict[ShortText, float]
    tree: bytes
    tensors: list[TensorRow]
    storages: bytes
    blobs: list[BlobRow]
    steps: list[StepRow]
    optimizers: list[OptimizerRow] | None


PathKeys = list[str | int | tuple[bytes]]
"""A path: its keys; a key that is neither text nor an integer is an encoded node, in a tuple of its own."""


class UnitRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A unit of many ranks; see ranks/arrays.py. ``shape`` is None for a local storage."""

    path: PathKeys
    nbytes: Count
    element_width: Count
    is_float: bool
    shape: tuple[Count, ...] | None
    cuts: tuple[tuple[Count, ...], ...]
    layout: Count


class LayoutRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """How an array lies on a device mesh; see ranks/arrays.py."""

    mesh_names: tuple[ShortText, ...]
    mesh_shape: tuple[Count, ...]
    mesh_ranks: tuple[Count, ...]
    placements: ShortText


class SkeletonRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a skeleton has besides its tree; see ranks/part.py."""

    tensors: list[TensorRow]
    units: list[UnitRow]
    layouts: list[LayoutRow]
    per_rank: list[PathKeys]
    replicated: list[tuple[PathKeys, float]]


class PartRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The scalars of a part record; see ranks/part.py."""

    attempt: bytes
    skeleton: bytes
    host: ShortText
    bytes_written: Count
    chunks_new: Count
    chunks_delta: Count
    chunks_derived: Count
    chunks_planned: Count
    warnings: list[str]
    decisions: DecisionsRecord | None


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    kind: str
    xxh3: str | None = None
    body: msgspec.Raw


class _StoreHead(msgspec.Struct, frozen=True):
    format_version: Count
    mandatory_features: tuple[str, ...] = ()


F = TypeVar("F", bound=FileRecord)


def encode_record(record: FileRecord) -> bytes:
    """Return a file record as JSON, with an indented body and its checksum."""
    body = msgspec.json.format(msgspec.json.encode(record), indent=2)
    envelope = _Envelope(kind=record.kind, xxh3=f"{xxh3_64(body):016x}", body=msgspec.Raw(body))
    return msgspec.json.encode(envelope) + b"\n"


def with_changes(record: F, **changes: Any) -> F:
    """Return a copy of a file record with some fields changed."""
    return msgspec.structs.replace(record, **changes)


def decode_record(content: bytes, kind: type[F], *, nbytes_max: int = RECORD_NBYTES_MAX, where: object = None) -> F:
    """Decode a file record.

    Raises:
        MalformedError: Not a record of this kind.
        ChecksumError: The body was changed.
        UnsupportedError: The record has a newer format.
    """
    if len(content) > nbytes_max:
        raise MalformedError(f"a {kind.kind} record has more than {nbytes_max} bytes", where=where)
    envelope = _decode_json(content, _Envelope, where)
    if envelope.kind != kind.kind:
        raise MalformedError(f"a record has the kind {envelope.kind[:40]!r} instead of {kind.kind!r}", where=where)
    _check_body(envelope, kind, where)
    body = bytes(envelope.body)
    if issubclass(kind, StoreRecord):
        head = _decode_json(body, _StoreHead, where)
        check_readable(head.format_version, where=where)
        check_features(head.mandatory_features, where=where)
    record = _decode_json(body, kind, where)
    if isinstance(record, StoreRecord):
        _check_store(record, where)
    if isinstance(record, ConfigRecord) and not all(is_name(tier) for tier in record.tiers):
        raise MalformedError("a tier in a config record has an invalid name", where=where)
    return record


def _check_body(envelope: _Envelope, kind: type[FileRecord], where: object) -> None:
    if envelope.xxh3 is None and kind.is_edited_by_people:
        return
    if envelope.xxh3 != f"{xxh3_64(bytes(envelope.body)):016x}":
        todo = "if you edited it, set its xxh3 to null" if kind.is_edited_by_people else None
        raise ChecksumError(f"the checksum of a {kind.kind} record differs", where=where, todo=todo)


def _check_store(record: StoreRecord, where: object) -> None:
    if record.hash_name != "blake3":
        raise UnsupportedError(
            f"this version of ckstore does not know the hash {record.hash_name!r}", where=where, todo="upgrade ckstore"
        )
    if record.block_nbytes != BLOCK_NBYTES:
        raise UnsupportedError(
            f"this version of ckstore does not support blocks of {record.block_nbytes} bytes", where=where
        )
    if not 1 << 12 <= record.chunk_nbytes_max < 1 << 31:
        raise MalformedError("chunk_nbytes_max is out of range", where=where)
    if not record.depth_max < 1 << 16:
        raise MalformedError("depth_max is out of range", where=where)


def _decode_json(content: bytes, kind: type[R], where: object) -> R:
    decoder = _JSON_DECODERS.get(kind) or _made(kind, msgspec.json.Decoder, _JSON_DECODERS)
    try:
        record: R = decoder.decode(content)
    except (msgspec.MsgspecError, RecursionError, ValueError) as problem:
        raise MalformedError(f"a record cannot be read ({problem})", where=where) from None
    return record


_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[Any, Any] = {}
_JSON_DECODERS: dict[Any, Any] = {}
_making = threading.RLock()


def _renew_lock() -> None:
    global _making
    _making = threading.RLock()


# Another thread of the parent may hold it.
os.register_at_fork(after_in_child=_renew_lock)


def _made(kind: Any, form: Callable[[Any], Any], known: dict[Any, Any]) -> Any:
    # msgspec crashes if a thread uses its description of a class while another thread makes that.
    with _making:
        decoder = known[kind] = known.get(kind) or form(kind)
    return decoder


def encode_inner(content: object) -> bytes:
    """Return an inner record, or plain lists, dicts and scalars, as MessagePack.

    Raises:
        UsageError: Something in it cannot be encoded: invalid Unicode, or an int of more than 64 bits.
    """
    try:
        return _ENCODER.encode(content)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise UsageError(f"a record cannot be written ({problem})") from None


def encoded(content: object) -> object:
    """Return encoded content that can be part of an inner record without being encoded again."""
    return msgspec.Raw(encode_inner(content))


def raw(content: bytes) -> object:
    """Return content that ``encoded_items`` has returned, to be part of an inner record."""
    return msgspec.Raw(content)


def encoded_items(content: bytes, *, where: object = None) -> list[bytes]:
    """Return the encoded items of an encoded array, whose own encoding must be canonical.

    Raises:
        MalformedError: It is not an array, or not in its shortest form.
    """
    items = decode_inner(content, list[msgspec.Raw], where=where)
    if _ENCODER.encode(items) != content:
        raise MalformedError("a record does not have its shortest encoding", where=where)
    return [bytes(item) for item in items]


def decode_inner(content: bytes | memoryview, kind: type[R], *, where: object = None) -> R:
    """Decode an inner record; ``kind`` is a record, a builtin, or ``list[record]``.

    Raises:
        MalformedError: Wrong types, unknown fields, trailing or missing bytes.
    """
    decoder = _DECODERS.get(kind) or _made(kind, msgspec.msgpack.Decoder, _DECODERS)
    try:
        found: R = decoder.decode(content)
    except (msgspec.MsgspecError, RecursionError, ValueError) as problem:
        raise MalformedError(f"a record cannot be read ({problem})", where=where) from None
    return found


def decode_stored(content: bytes | memoryview, kind: type[R], *, where: object = None) -> R:
    """Decode an inner record from disk, which must have the canonical encoding.

    Raises:
        MalformedError: As ``decode_inner``, and if the encoding is not canonical. Otherwise a rewrite, such as a
            demotion, would change the identity of unchanged content.
    """
    found = decode_inner(content, kind, where=where)
    if _ENCODER.encode(found) != content:
        raise MalformedError("a record does not have its shortest encoding", where=where)
    return found
