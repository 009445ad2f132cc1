"""Manifests with correct checksums and digests around any content, for tests of what readers refuse."""

from __future__ import annotations

from ckstore.format.header import PREAMBLE_NBYTES, TRAILER_NBYTES, Preamble, encode_preamble
from ckstore.format.location import encode_location, stored_location
from ckstore.format.logical import encode_logical
from ckstore.format.manifest import TRAILER_MAGIC, Manifest
from ckstore.format.records import FORMAT_VERSION, HeaderRecord, LogicalRecord, encode_inner
from ckstore.format.wire import xxh3_64
from ckstore.format.zstd import stored_section
from ckstore.hashing import digest_of
from support.format_samples import sample_manifest

SAMPLE = sample_manifest()


def plain_sections(manifest: Manifest = SAMPLE, record: dict | None = None) -> tuple[bytes, bytes]:
    """Return the plain logical and location section of a manifest, the first with changed scalars."""
    scalars = {name: getattr(manifest.header, name) for name in LogicalRecord.__struct_fields__}
    logical = encode_logical(encode_inner(scalars | (record or {})), manifest.logical)
    return logical, encode_location(manifest.packs, manifest.frames, manifest.decisions)


def forged(
    manifest: Manifest = SAMPLE,
    *,
    logical: bytes | None = None,
    location: bytes | None = None,
    stored: dict | None = None,
    record: dict | None = None,
    header: dict | None = None,
    preamble: dict | None = None,
    trailer: dict | None = None,
) -> bytes:
    """Return a manifest with any content.

    Args:
        manifest: Where everything that is not given comes from.
        logical: The plain logical section; compressed where a writer would.
        location: The plain location section; stored plain, because its lengths may be wrong.
        stored: The bytes of a section in the file, by ``"logical"`` or ``"location"``.
        record: Changed scalars of the logical section.
        header: Changed fields of the header.
        preamble: Changed fields of the preamble.
        trailer: Changed lengths of the trailer.
    """
    true_logical, true_location = plain_sections(manifest, record)
    logical = true_logical if logical is None else logical
    sections = {
        "logical": bytes(stored_section(memoryview(logical))),
        "location": stored_location(true_location) if location is None else location,
    } | (stored or {})
    facts = {name: getattr(manifest.header, name) for name in HeaderRecord.__struct_fields__}
    head = encode_inner(facts | {"checkpoint_id": digest_of(logical)} | (header or {}))
    lengths = {"header_nbytes": len(head)} | {f"{name}_nbytes": len(content) for name, content in sections.items()}
    lengths["file_nbytes"] = PREAMBLE_NBYTES + sum(lengths.values()) + TRAILER_NBYTES
    first = {"version": FORMAT_VERSION, "store_id": manifest.store_id, "header_xxh3": xxh3_64(head)}
    first |= {"mandatory_flags": 0, "optional_flags": 0, "logical_plain_nbytes": len(logical)}
    body = encode_preamble(Preamble(**(first | lengths | (preamble or {})))) + head + b"".join(sections.values())
    body += TRAILER_MAGIC + b"".join(value.to_bytes(8, "little") for value in (lengths | (trailer or {})).values())
    return body + digest_of(body)
