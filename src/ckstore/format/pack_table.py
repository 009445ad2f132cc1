"""The packs that a manifest names, without the rest of it: what a collection has to know of thousands of manifests.

Invariants:
- The digest of the whole file is checked, so that a damaged manifest is found out and never read half.
- Rows of packs and frames are handed out as they lie there: whoever has read a row before need not read it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckstore.config import Limits
from ckstore.errors import ChecksumError, MalformedError
from ckstore.format.header import TRAILER_NBYTES, ManifestHeader, decode_header_section, decode_preamble
from ckstore.format.layout import ManifestName
from ckstore.format.location import FRAME_ROW_NBYTES, PACK_ROW_NBYTES, split_location
from ckstore.ids import DIGEST_NBYTES, digest_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

FRAME_ROW = (
    ("chunk_id", "V32"),
    ("offset", "<u8"),
    ("stored_nbytes", "<u4"),
    ("pack", "<u4"),
    ("base", "<u4"),
    ("depth", "<u4"),
)
"""The row of a frame, as numpy names types."""

_DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class PackTable:
    """A manifest's header, and its tables of packs and frames as they are encoded."""

    header: ManifestHeader
    tiers: list[str]
    pack_rows: bytes
    frame_rows: memoryview
    digest: bytes
    """Of the whole file: another manifest has another one."""

    def rows(self) -> Iterator[bytes]:
        """Yield the encoded row of every pack, by ascending index."""
        for at in range(0, len(self.pack_rows), PACK_ROW_NBYTES):
            yield self.pack_rows[at : at + PACK_ROW_NBYTES]

    @property
    def frame_count(self) -> int:
        """How many frames the manifest locates."""
        return len(self.frame_rows) // FRAME_ROW_NBYTES


def decode_pack_table(
    content: Buffer, *, limits: Limits = _DEFAULT_LIMITS, expect: ManifestName | None = None, where: object = None
) -> PackTable:
    """Read the header and the tables of a whole manifest.

    Raises:
        ChecksumError: It is damaged.
        MalformedError: It is torn, contradicts its name, or exceeds the limits.
        UnsupportedError: An unknown version or mandatory flag.
    """
    view = memoryview(content).cast("B")
    preamble = decode_preamble(view, where=where)
    if len(view) != preamble.file_nbytes or len(view) > limits.manifest_nbytes_max:
        raise MalformedError(f"a manifest of {preamble.file_nbytes} bytes has {len(view)}", where=where)
    digest = bytes(view[-DIGEST_NBYTES:])
    if digest_of(view[:-DIGEST_NBYTES]) != digest:
        raise ChecksumError("the digest of a manifest differs", where=where)
    header = decode_header_section(view, preamble, expect=expect, where=where)
    section = view[preamble.head_nbytes + preamble.logical_nbytes : -TRAILER_NBYTES]
    tiers, pack_rows, frame_rows, _ = split_location(section, version=preamble.version, where=where)
    return PackTable(header, tiers, bytes(pack_rows), frame_rows, digest)
