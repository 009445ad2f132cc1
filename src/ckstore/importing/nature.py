"""What a file is that cannot be a checkpoint: a pointer, a page, an archive, a download that ended early.

Names promise what a file holds; its first bytes, and the last ones of an archive, say what it is.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from ckstore.errors import BackendError, CorruptError, NotFoundError

_HEAD_NBYTES = 1024
_TAR_MAGIC_AT = 257
# The end record of a zip file, and the longest comment that may follow it.
_ZIP_END, _ZIP_END_NBYTES = b"PK\x05\x06", 22 + (1 << 16)
_TEXT_BYTES = frozenset(range(32, 256)) | frozenset(b"\t\n\r")

# The number with which torch.save began before torch 1.6, as it is pickled.
_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

_STARTS = (
    (
        b"version https://git-lfs.github.com/spec/",
        "a Git LFS pointer, not the file",
        "get the file with `git lfs pull`",
    ),
    (b"/annex/objects/", "a git-annex pointer, not the file", "get the file with `git annex get`"),
    (b"../.git/annex/objects/", "a git-annex pointer, not the file", "get the file with `git annex get`"),
    (b"\x1f\x8b", "compressed with gzip", "decompress it first"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "decompress it first"),
    (b"BZh", "compressed with bzip2", "decompress it first"),
    (b"\xfd7zXZ", "compressed with xz", "decompress it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it, and import what was in it"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "load it with the library that wrote it, and save it with torch.save"),
    (b"GGUF", "a GGUF file", "load it with the library that wrote it, and save it with torch.save"),
    (b"\x93NUMPY", "an array of numpy.save", "load it with numpy, and save it with torch.save"),
)


def check_nature(path: Path, kind: str) -> str:
    """Return how a file is read, having checked that it may be a checkpoint: its content counts, not its name.

    Args:
        path: The file.
        kind: What its name says: ``"torch"``, ``"safetensors"`` or ``"json"``; ``"pickle"`` may be what it is.

    Raises:
        CorruptError: It is something else, or ends early; the message says what it is.
        NotFoundError: There is no such file.
        BackendError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD_NBYTES)
            file.seek(max(0, nbytes - _ZIP_END_NBYTES))
            end = file.read(_ZIP_END_NBYTES) if head.startswith(b"PK\x03\x04") else b""
    except FileNotFoundError:
        raise NotFoundError("there is no such file", where=path) from None
    except OSError as problem:
        raise BackendError(f"the file cannot be read ({problem.strerror})", where=path) from None
    found = _what_else(head, nbytes, kind)
    if found is None and end and _ZIP_END not in end:
        found = "a zip archive that ends early", "copy or download it again"
    if found is None and head.startswith(b"PK\x03\x04") and not _is_zip_of_torch(head):
        found = "a zip archive that torch.save did not write", "unpack it, and import what was in it"
    if found is not None:
        raise CorruptError(f"the file is no checkpoint: it is {found[0]}", where=path, todo=found[1])
    if kind == "torch" and _is_safetensors(head, nbytes):
        return "safetensors"
    if kind != "json" and head[:1] == b"\x80":
        return "torch" if _LEGACY_MAGIC in head[:20] else "pickle"
    return "torch" if kind == "safetensors" and end else kind


def _what_else(head: bytes, nbytes: int, kind: str) -> tuple[str, str] | None:
    again = "copy or download it again"
    if nbytes == 0:
        return "empty", again
    for start, what, todo in _STARTS:
        if head.startswith(start):
            return what, todo
    if head.count(0) == len(head) and nbytes >= _HEAD_NBYTES:
        return "zeros only where it begins, as a download that did not finish leaves it", again
    if head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        return "a tar archive", "unpack it, and import what was in it"
    if kind == "json":
        return None
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "an HTML page, such as a server sends in place of a file", again
    if text.startswith((b"<?xml", b"<error")):
        return "an XML document, such as a server sends in place of a file", again
    if all(byte in _TEXT_BYTES for byte in head) and max(head) < 128:
        return f"a text that begins with {head[:40].decode('ascii')!r}", again
    return _truncated_safetensors(head, nbytes) if kind == "safetensors" else None


def _truncated_safetensors(head: bytes, nbytes: int) -> tuple[str, str] | None:
    if nbytes < 8:
        return f"a file of {nbytes} bytes, and a safetensors file has at least 8", "copy or download it again"
    (header_nbytes,) = struct.unpack("<Q", head[:8])
    if head[8:9] == b"{" and header_nbytes > nbytes - 8:
        return "a safetensors file that ends early", "copy or download it again"
    return None


def _is_safetensors(head: bytes, nbytes: int) -> bool:
    if len(head) < 9 or head[8:9] != b"{":
        return False
    return bool(2 <= struct.unpack("<Q", head[:8])[0] <= nbytes - 8)


def _is_zip_of_torch(head: bytes) -> bool:
    """Say whether the first file of an archive is one that torch writes: all lie in one folder."""
    if len(head) < 30:
        return False
    (length,) = struct.unpack("<H", head[26:28])
    name = head[30 : 30 + length]
    return b"/" in name or len(name) > len(head) - 30
