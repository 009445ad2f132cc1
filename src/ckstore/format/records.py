"""Typed, bounded decoding of small records; the only module that imports msgspec.

Two forms. A *file record* is a file of its own that people may want to read (store.json, tags, leases, intents,
config.json): JSON with a kind, a checksum and a body. An *inner record* lies inside a manifest: MessagePack.
Unknown fields, wrong types, trailing bytes and numbers out of range are refused. Unknown fields of leases, intents and
collectors' lists are ignored: whoever cannot read one of a newer ckstore would take its living maker for dead.

Format version and feature flags: who may read, who may write.

The format version is not the package version. A mandatory flag changes what bytes mean, so a reader that does
not know it must refuse; an optional flag may be ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from ckstore.config import is_name
from ckstore.errors import ChecksumError, MalformedError, UnsupportedError, UsageError
from ckstore.format.wire import BLOCK_NBYTES, xxh3_64

FORMAT_VERSION = 3
"""What is written. Version 2 added bases: delta and rounded frames, and the choices of a manifest. Version 3 added
loss: frames of codes, and what a manifest says of them."""

READABLE_VERSIONS = (1, 2, 3)

MANDATORY_FEATURES: dict[str, int] = {}
"""Names in ``store.json`` and bits in packs and manifests; none is defined yet."""

OPTIONAL_FEATURES: dict[str, int] = {}
"""Features that a reader may ignore; none is defined yet."""

_TODO = "upgrade ckstore; do not let this version change the store"
_KNOWN_BITS = sum(MANDATORY_FEATURES.values())


def check_readable(version: int, mandatory_flags: int = 0, *, where: object = None) -> None:
    """Refuse what this reader cannot understand.

    Raises:
        UnsupportedError: The version or a mandatory flag is unknown.
    """
    if version not in READABLE_VERSIONS:
        raise UnsupportedError(f"format version {version} is unknown here", where=where, todo=_TODO, version=version)
    unknown = mandatory_flags & ~_KNOWN_BITS
    if unknown:
        raise UnsupportedError(f"mandatory flags {unknown:#x} are unknown here", where=where, todo=_TODO, flags=unknown)


def check_features(names: Iterable[str], *, where: object = None) -> None:
    """Refuse a mandatory feature, by name, that this reader does not know.

    Raises:
        UnsupportedError: A feature is unknown.
    """
    for name in names:
        if name not in MANDATORY_FEATURES:
            raise UnsupportedError(f"mandatory feature {name!r} is unknown here", where=where, todo=_TODO, feature=name)


RECORD_NBYTES_MAX = 1 << 20

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Hex16 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
Hex32 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
ShortText = Annotated[str, msgspec.Meta(max_length=1024)]
DtypeText = Annotated[str, msgspec.Meta(max_length=1 << 20)]

R = TypeVar("R")


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the records that are files of their own; ``kind`` is on disk."""

    kind: ClassVar[str]
    is_edited_by_people: ClassVar[bool] = False


class StoreRecord(FileRecord, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``store.json``: written once, when the store is made."""

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
    """``config.json``: what a person may change; tiers are named here and nowhere else."""

    kind: ClassVar[str] = "config"
    is_edited_by_people: ClassVar[bool] = True

    tiers: dict[str, str] = {}
    policy: dict[str, Any] = {}
    retention: dict[str, Any] = {}


class TagRecord(FileRecord, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A name that a person gave to a checkpoint."""

    kind: ClassVar[str] = "tag"

    seq: Count
    step: Count
    checkpoint_id: Hex32
    time_ns: Count


class LeaseRecord(FileRecord, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """Who writes a run now: for people, not for safety."""

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
    """A drop or demotion that is about to be decided, and who decides it."""

    kind: ClassVar[str] = "intent"

    host: ShortText
    boot_id: ShortText
    pid: Count
    process_started: ShortText
    token: Hex16
    acquired_ns: Count
    heartbeat_ns: Count
    what: ShortText


class DoomedRecord(FileRecord, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """What a collector is about to remove where nothing can be renamed, and who it is."""

    kind: ClassVar[str] = "doomed"

    host: ShortText
    boot_id: ShortText
    pid: Count
    process_started: ShortText
    token: Hex16
    acquired_ns: Count
    packs: tuple[Hex16, ...]


class TierTurns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a store knows of a tier that it owns: its identity, and the last turns, the newest at the end."""

    tier_id: Hex16
    turns: tuple[Hex16, ...]


class HomeRecord(FileRecord, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``home.json``: where a store that has tiers was made, by which a copy of it knows that it is one."""

    kind: ClassVar[str] = "home"

    home_id: Hex16
    place: str
    tiers: dict[str, TierTurns] = {}


class OwnerRecord(FileRecord, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``owner.json`` of a tier: the store that may change it, and the last turn of a change."""

    kind: ClassVar[str] = "owner"

    home_id: Hex16
    tier_id: Hex16
    turn: Hex16


class HeaderRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The header of a manifest, as MessagePack map; see ``header.ManifestHeader`` for the meaning."""

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


class ChoicesRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a commit decided for the whole state; see format/choices.py."""

    base: ShortText
    base_seq: Count | None
    keyframe_seq: Count | None
    reason: ShortText


class TensorRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One tensor, as MessagePack array."""

    library: ShortText
    dtype: DtypeText
    shape: tuple[Count, ...]
    strides: tuple[int, ...]
    storage: Count
    offset: Count
    is_parameter: bool
    requires_grad: bool


class LossRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What one storage lost, as MessagePack array; see format/losses.py."""

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


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    kind: str
    xxh3: str | None = None
    body: msgspec.Raw


class _StoreHead(msgspec.Struct, frozen=True):
    format_version: Count
    mandatory_features: tuple[str, ...] = ()


F = TypeVar("F", bound=FileRecord)


def encode_record(record: FileRecord) -> bytes:
    """Return a file record as indented JSON, with the checksum of its body."""
    body = msgspec.json.format(msgspec.json.encode(record), indent=2)
    envelope = _Envelope(kind=record.kind, xxh3=f"{xxh3_64(body):016x}", body=msgspec.Raw(body))
    return msgspec.json.encode(envelope) + b"\n"


def with_changes(record: F, **changes: Any) -> F:
    """Return a copy of a file record with other values of some fields."""
    return msgspec.structs.replace(record, **changes)


def decode_record(content: bytes, kind: type[F], *, nbytes_max: int = RECORD_NBYTES_MAX, where: object = None) -> F:
    """Read a file record.

    Raises:
        MalformedError: Not a record of this kind.
        ChecksumError: The body is not the one that was written.
        UnsupportedError: The record announces a newer format.
    """
    if len(content) > nbytes_max:
        raise MalformedError(f"a {kind.kind} record has more than {nbytes_max} bytes", where=where)
    envelope = _decode_json(content, _Envelope, where)
    if envelope.kind != kind.kind:
        raise MalformedError(f"a record of kind {envelope.kind[:40]!r} lies where {kind.kind!r} belongs", where=where)
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
        raise MalformedError("a tier in a config record has no valid name", where=where)
    return record


def _check_body(envelope: _Envelope, kind: type[FileRecord], where: object) -> None:
    if envelope.xxh3 is None and kind.is_edited_by_people:
        return
    if envelope.xxh3 != f"{xxh3_64(bytes(envelope.body)):016x}":
        todo = "after editing it by hand, set its xxh3 to null" if kind.is_edited_by_people else None
        raise ChecksumError(f"the checksum of a {kind.kind} record differs", where=where, todo=todo)


def _check_store(record: StoreRecord, where: object) -> None:
    if record.hash_name != "blake3":
        raise UnsupportedError(f"hash {record.hash_name!r} is unknown here", where=where, todo="upgrade ckstore")
    if record.block_nbytes != BLOCK_NBYTES:
        raise UnsupportedError(f"blocks of {record.block_nbytes} bytes are unknown here", where=where)
    if not 1 << 12 <= record.chunk_nbytes_max < 1 << 31:
        raise MalformedError("chunk_nbytes_max lies out of range", where=where)
    if not record.depth_max < 1 << 16:
        raise MalformedError("depth_max lies out of range", where=where)


def _decode_json(content: bytes, kind: type[R], where: object) -> R:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError) as problem:
        raise MalformedError(f"a record cannot be read ({problem})", where=where) from None


_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode_inner(content: object) -> bytes:
    """Return an inner record, or plain lists, dicts and scalars, as MessagePack.

    Raises:
        UsageError: Something in it has no form on disk: text that is no Unicode, a number beyond 64 bits.
    """
    try:
        return _ENCODER.encode(content)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise UsageError(f"a record cannot be written ({problem})") from None


def encoded(content: object) -> object:
    """Return what can stand in an inner record for the content, and is not encoded again; see ``encode_inner``."""
    return msgspec.Raw(encode_inner(content))


def decode_inner(content: bytes | memoryview, kind: type[R], *, where: object = None) -> R:
    """Read an inner record; ``kind`` is a record, a builtin, or ``list[record]``.

    Raises:
        MalformedError: Other types, unknown fields, trailing or missing bytes.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    try:
        found: R = decoder.decode(content)
    except (msgspec.MsgspecError, RecursionError, ValueError) as problem:
        raise MalformedError(f"a record cannot be read ({problem})", where=where) from None
    return found


def decode_stored(content: bytes | memoryview, kind: type[R], *, where: object = None) -> R:
    """Read an inner record that lies on disk, in the one form that it has there.

    Raises:
        MalformedError: As ``decode_inner``, and for bytes that another writer would not make again: what is written
            anew, when it is demoted say, would have another identity although nothing in it is different.
    """
    found = decode_inner(content, kind, where=where)
    if _ENCODER.encode(found) != content:
        raise MalformedError("a record is not in its shortest form", where=where)
    return found
