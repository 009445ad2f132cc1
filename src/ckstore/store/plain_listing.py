"""List a plain store quickly, without the modules that read every kind of store.

Importing those modules takes ten times as long as starting Python and reading a small store. ``plain_logs`` serves the
common case: a private folder, every file as this version writes it, no journal, and no checkpoint that was replaced or
pushed. For anything else it returns None, and ``listing.log_of_store`` serves. Tests compare the two on every kind of
store.

Invariants:
- What it returns has the values that ``log_of_store`` returns.
- It never reports damage. A file that is not exactly as expected, or a failed call, makes it return None.
- It imports neither dataclasses, typing, logging, msgspec nor numpy.
"""

from __future__ import annotations

import os
import stat
import struct
from collections import namedtuple

from ckstore.format.wire import xxh3_64

# ``typing`` is not imported. Type checkers take any name TYPE_CHECKING for true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

VERSIONS = (1, 2, 3, 4)
COMPRESSED_VERSION = 4
MAGIC = b"CKMANI\x00\x01"
PREAMBLE = struct.Struct("<8sHHIQQ16sQQQQQQ")
PREAMBLE_NBYTES = 128
SEAL_NBYTES = 8
TRAILER_NBYTES = 72
HEAD_NBYTES_MAX = 64 * 1024
NBYTES_FIRST = 4096
"""First read of a file. Enough for store.json, a tag, and a header with about a hundred metrics."""

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
NAME_LENGTH_MAX = 128
DIGITS_MAX = 18

COUNT_MAX = (1 << 63) - 1
TEXT_LENGTH_MAX = 1024
HEADER_FIELDS = (
    "run", "seq", "step", "generation", "time_ns", "parent", "checkpoint_id", "origin_id", "is_archival", "fidelity",
    "bytes_state", "bytes_stored", "bytes_written", "metrics", "tensor_count", "chunk_count", "chunks_new",
    "chunks_reused", "depth_max",
)  # fmt: skip
STORE_FIELDS = (
    "format_version", "store_id", "created_ns", "hash_name", "chunk_nbytes_max", "pack_nbytes_max",
    "manifest_nbytes_max", "depth_max", "block_nbytes", "mandatory_features", "optional_features",
)  # fmt: skip
TAG_FIELDS = ("seq", "step", "checkpoint_id", "time_ns")
_COUNTS = frozenset(HEADER_FIELDS) - {
    "run", "parent", "checkpoint_id", "origin_id", "is_archival", "fidelity", "metrics",
}  # fmt: skip

PlainInfo = namedtuple("PlainInfo", [
    "step", "seq", "checkpoint_id", "run", "time_ns", "parent", "origin_id", "generation", "is_archival", "fidelity",
    "metrics", "tags", "bytes_state", "bytes_stored", "bytes_written", "tensor_count", "chunk_count", "chunks_new",
    "chunks_reused", "depth_max", "warnings", "tiers", "form",
])  # fmt: skip
"""As ``results.Info``, with the same fields in the same order."""
PlainEntry = namedtuple("PlainEntry", ["seq", "step", "info", "damage", "refused", "points"])
"""As ``listing.Entry``, without damage and points."""
PlainLog = namedtuple("PlainLog", [
    "run", "count", "entries", "damaged_tags", "refused_tags", "missing", "tags", "is_damaged", "is_refused",
])  # fmt: skip
"""As ``listing.RunLog``, without damage."""


class _NotPlainError(Exception):
    """The store has something that the other listing must read."""


def plain_logs(path: str, *, run: str | None = None, limit: int | None = None) -> list[PlainLog] | None:
    """Return the newest entries of one run, or of every run, sorted by name; None if the store is not plain.

    Args:
        path: The folder of the store.
        run: Only this run.
        limit: How many entries of each run; None: all.
    """
    try:
        # It may be the address of a bucket, or a URL.
        _require(":" not in path and "//" not in path)
        mode = os.stat(path).st_mode
        _require(stat.S_ISDIR(mode) and not mode & (stat.S_IWGRP | stat.S_IWOTH))
        store_id = _store_id(f"{path}/store.json")
        _require(not os.path.exists(f"{path}/journals"))
        runs = sorted({*_names(f"{path}/manifests"), *_names(f"{path}/claims")})
        _require(run is None or run in runs)
        return [_log(path, store_id, name, limit) for name in (runs if run is None else [run])]
    except (_NotPlainError, OSError, ValueError, RecursionError):
        return None


def _require(is_plain: bool) -> None:
    if not is_plain:
        raise _NotPlainError


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _names(folder: str) -> list[str]:
    """Return the names of runs or tags in a folder, sorted."""
    names = sorted(_list(folder))
    for name in names:
        _require(name[0] in LETTERS and len(name) <= NAME_LENGTH_MAX and ".." not in name)
        _require(not name.strip(LETTERS + "._-"))
    return names


def _read(path: str, nbytes_max: int) -> bytes:
    """Read the beginning of a file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return os.read(descriptor, nbytes_max)
    finally:
        os.close(descriptor)


def _record(path: str, kind: bytes, fields: tuple[str, ...]) -> dict[str, Any]:
    """Return the body of a file record as ``records.encode_record`` writes it."""
    content = _read(path, NBYTES_FIRST)
    head, between, rest = content.partition(b'","body":')
    encoded, end = rest[:-2], rest[-2:]
    _require(len(content) < NBYTES_FIRST and between != b"" and end == b"}\n")
    _require(head == b'{"kind":"%s","xxh3":"%016x' % (kind, xxh3_64(encoded)))
    body = _parsed(encoded.decode())
    _require(tuple(body) == fields)
    return body


def _parsed(body: str) -> dict[str, Any]:
    """Return the values of a JSON object that has one number, plain text or empty list on each line.

    ``json`` is not imported, because that takes as long as everything else that a listing imports.
    """
    first, *lines, last = body.split("\n")
    _require((first, last) == ("{", "}"))
    found: dict[str, Any] = {}
    for line in lines:
        name, between, value = line.removeprefix('  "').partition('": ')
        value = value.removesuffix(",")
        _require(between != "" and name not in found)
        if value == "[]":
            found[name] = []
        elif value.startswith('"'):
            _require(len(value) > 1 and value.endswith('"') and value[1:-1].isalnum() and value.isascii())
            found[name] = value[1:-1]
        else:
            _require(value.isascii() and value.isdigit())
            found[name] = int(value)
    return found


def _store_id(path: str) -> bytes:
    record = _record(path, b"ckstore", STORE_FIELDS)
    version = record["format_version"]
    _require(type(version) is int and version in VERSIONS)
    _require(record["mandatory_features"] == record["optional_features"] == [])
    _require(record["hash_name"] == "blake3" and record["block_nbytes"] == 4096)
    _require(type(record["chunk_nbytes_max"]) is int and 1 << 12 <= record["chunk_nbytes_max"] < 1 << 31)
    _require(type(record["depth_max"]) is int and 0 <= record["depth_max"] < 1 << 16)
    _require(all(_is_count(record[name]) for name in ("created_ns", "pack_nbytes_max", "manifest_nbytes_max")))
    return _bytes_of(record["store_id"], 16)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= COUNT_MAX


def _bytes_of(text: object, nbytes: int) -> bytes:
    """Return the bytes of lower-case hex digits."""
    _require(isinstance(text, str) and len(text) == 2 * nbytes)
    found = bytes.fromhex(str(text))
    _require(found.hex() == text)
    return found


def _log(path: str, store_id: bytes, run: str, limit: int | None) -> PlainLog:
    tags = _tags(f"{path}/tags/{run}")
    names = _manifests(f"{path}/manifests/{run}", f"{path}/claims/{run}")
    entries = []
    for seq in sorted(names, reverse=True)[: limit or None]:
        step, file = names[seq]
        header = _header(f"{path}/manifests/{run}/{file}", store_id)
        _require((header["run"], header["seq"], header["step"]) == (run, seq, step))
        header["checkpoint_id"] = header["checkpoint_id"].hex()
        facts = {"tags": tuple(sorted(tags.get(seq, ()))), "warnings": (), "tiers": ("local",), "form": "whole"}
        entries.append(PlainEntry(seq, step, PlainInfo(**header, **facts), "", "", ()))
    all_tags = tuple(sorted(tag for of_seq in tags.values() for tag in of_seq))
    return PlainLog(run, len(names), tuple(entries), (), (), "", all_tags, False, False)


def _tags(folder: str) -> dict[int, list[str]]:
    """Return the names of tags by seq."""
    found: dict[int, list[str]] = {}
    for name in _names(folder):
        record = _record(f"{folder}/{name}", b"tag", TAG_FIELDS)
        _bytes_of(record["checkpoint_id"], 32)
        _require(all(_is_count(record[field]) for field in ("seq", "step", "time_ns")))
        found.setdefault(record["seq"], []).append(name)
    return found


def _manifests(folder: str, claims_folder: str) -> dict[int, tuple[int, str]]:
    """Return step and file of every checkpoint in place, by seq."""
    # In this order: a commit claims its seq first, and a drop sets its mark before it moves the manifest.
    found = _files(folder)
    claims: dict[str, set[int]] = {"": set(), "dropped": set(), "published": set()}
    for claim in _list(claims_folder):
        seq, _, mark = claim.partition(".")
        if mark.startswith("intent-"):
            _bytes_of(mark.removeprefix("intent-"), 16)
        else:
            _require(mark in claims)
            claims[mark].add(_number(seq, 8))
    if claims[""] - claims["dropped"] - found.keys():
        # A commit did not finish, or a single directory read has missed both names of a file that was renamed.
        found |= _files(folder)
    # If a published checkpoint is not in place, the other listing finds out where it is.
    _require(claims["published"] <= claims["dropped"] | found.keys())
    return {seq: name for seq, name in found.items() if seq not in claims["dropped"]}


def _files(folder: str) -> dict[int, tuple[int, str]]:
    found: dict[int, tuple[int, str]] = {}
    for file in _list(folder):
        _require(file.endswith(".0.ckm"))
        seq, _, step = file.removesuffix(".0.ckm").partition("-")
        _require(_number(seq, 8) not in found)
        found[int(seq)] = _number(step, 12), file
    return found


def _number(digits: str, width: int) -> int:
    """Return a number of at most 18 digits, written with at least ``width`` digits and without further zeros."""
    _require(digits.isascii() and digits.isdigit() and len(digits) <= DIGITS_MAX)
    _require(f"{int(digits):0{width}d}" == digits)
    return int(digits)


def _header(path: str, store_id: bytes) -> dict[str, Any]:
    """Return the header of a manifest that was never replaced."""
    head = _read(path, NBYTES_FIRST)
    _require(len(head) >= PREAMBLE_NBYTES)
    magic, version, reserved, reserved_too, mandatory, _, its_store, *sizes, checksum, plain_nbytes = (
        PREAMBLE.unpack_from(head)
    )
    body_nbytes = PREAMBLE_NBYTES - SEAL_NBYTES
    _require(int.from_bytes(head[body_nbytes:PREAMBLE_NBYTES], "little") == xxh3_64(head[:body_nbytes]))
    _require(magic == MAGIC and version in VERSIONS and its_store == store_id)
    _require(not (reserved or reserved_too or mandatory or any(head[PREAMBLE.size : body_nbytes])))
    _require(plain_nbytes >= sizes[1] if version >= COMPRESSED_VERSION else plain_nbytes == 0)
    head_nbytes = PREAMBLE_NBYTES + sizes[0]
    _require(head_nbytes <= HEAD_NBYTES_MAX and PREAMBLE_NBYTES + sum(sizes[:3]) + TRAILER_NBYTES == sizes[3])
    if head_nbytes > len(head):
        head = _read(path, head_nbytes)
    section = head[PREAMBLE_NBYTES:head_nbytes]
    _require(len(section) == sizes[0] and xxh3_64(section) == checksum)
    header, end = _value(section, 0)
    _require(end == len(section) and isinstance(header, dict) and tuple(header) == HEADER_FIELDS)
    _check_header(header)
    return dict(header)


def _check_header(header: dict[str, Any]) -> None:
    _require(all(_is_count(header[name]) for name in _COUNTS))
    parent, checkpoint_id, metrics = header["parent"], header["checkpoint_id"], header["metrics"]
    _require(parent is None or (type(parent) is int and 0 <= parent < 10**18))
    _require(type(checkpoint_id) is bytes and len(checkpoint_id) == 32 and header["origin_id"] is None)
    _require(type(header["is_archival"]) is bool and header["generation"] == 0)
    _require(type(header["fidelity"]) is str and len(header["fidelity"]) <= TEXT_LENGTH_MAX)
    _require(type(metrics) is dict and all(type(value) is float for value in metrics.values()))
    _require(all(len(name) <= TEXT_LENGTH_MAX for name in metrics))


def _value(content: bytes, at: int) -> tuple[Any, int]:
    """Decode the MessagePack value at an offset; return it, and where the next one begins."""
    _require(at < len(content))
    kind = content[at]
    at += 1
    if kind < 0x80:
        return kind, at
    if kind < 0x90:
        return _map(content, at, kind & 0x0F)
    if 0xA0 <= kind < 0xC0:
        return _text(content, at, kind & 0x1F)
    if kind in _CONSTANTS:
        return _CONSTANTS[kind], at
    if kind == 0xCB:
        return struct.unpack(">d", _bytes(content, at, 8)[0])[0], at + 8
    _require(kind in _SIZED)
    width, decode = _SIZED[kind]
    number = int.from_bytes(_bytes(content, at, width)[0], "big")
    return (number, at + width) if decode is None else decode(content, at + width, number)


def _bytes(content: bytes, at: int, nbytes: int) -> tuple[bytes, int]:
    _require(at + nbytes <= len(content))
    return content[at : at + nbytes], at + nbytes


def _text(content: bytes, at: int, nbytes: int) -> tuple[str, int]:
    encoded, end = _bytes(content, at, nbytes)
    return encoded.decode(), end


def _map(content: bytes, at: int, count: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    for _ in range(count):
        name, at = _value(content, at)
        _require(type(name) is str and name not in found)
        found[name], at = _value(content, at)
    return found, at


_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_SIZED: dict[int, tuple[int, Callable[[bytes, int, int], tuple[Any, int]] | None]] = {
    **{kind: (width, _bytes) for kind, width in ((0xC4, 1), (0xC5, 2), (0xC6, 4))},
    **{kind: (width, None) for kind, width in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8))},
    **{kind: (width, _text) for kind, width in ((0xD9, 1), (0xDA, 2), (0xDB, 4))},
    **{kind: (width, _map) for kind, width in ((0xDE, 2), (0xDF, 4))},
}
"""First byte -> bytes of the length or number that follows, and what decodes the rest (None: it is the number)."""
