"""Print the preamble of the golden manifest field by field, as section 7 of docs/FORMAT.md shows it.

Run ``python tests/support/format_example.py`` and paste the output into the document.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "v4" / "format" / "sample.ckm"
PREAMBLE = (
    (8, "magic"),
    (2, "format version"),
    (6, "zero"),
    (8, "mandatory flags"),
    (8, "optional flags"),
    (16, "store id"),
    (8, "length of the header"),
    (8, "length of the logical section"),
    (8, "length of the location section"),
    (8, "length of the file"),
    (8, "xxh3-64 of the header"),
    (8, "plain length of the logical section"),
    (24, "zero"),
    (8, "seal"),
)
"""Length and name of each field."""

_ROW_NBYTES = 16


def lines(content: bytes) -> Iterator[str]:
    """Yield offset, bytes and meaning of each field; numbers are shown in decimal too."""
    offset = 0
    for nbytes, name in PREAMBLE:
        field = content[offset : offset + nbytes]
        is_number = name.startswith(("length", "plain length", "format"))
        meaning = f"{name}: {int.from_bytes(field, 'little')}" if is_number else name
        for row in range(0, nbytes, _ROW_NBYTES):
            text = field[row : row + _ROW_NBYTES].hex(" ")
            yield f"{offset + row:3}  {text:47}  {meaning if row == 0 else ''}".rstrip()
        offset += nbytes


if __name__ == "__main__":
    print("\n".join(lines(GOLDEN.read_bytes())))
