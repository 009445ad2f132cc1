"""Write a segment of a journal to another place, or again from several copies of it (docs/FORMAT.md, section 14).

Of two copies of a segment, the shorter is the beginning of the longer one. So a record has the same offset in each copy
that has it.

Invariants:
- A segment gets its name only after every byte of its records was checked.
- A copy is replaced as a whole: readers find the shorter or the longer one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

from ckstore.config import MIB, Limits
from ckstore.errors import CkstoreError, CorruptError, MalformedError
from ckstore.format import paths
from ckstore.format.journal import SEGMENT_HEADER_NBYTES, Segment, check_record, decode_segment, read_heads
from ckstore.format.paths import SegmentName
from ckstore.format.records import RecordPlace
from ckstore.hashing import new_token
from ckstore.io.backend import Backend, Distant, Overwriting, PackSink, ReadFile
from ckstore.io.buffers import BufferPool
from ckstore.store.small_files import make_durable_folder

_BLOCK_NBYTES = 4 * MIB
_BLOCKS = 6


class Piece(NamedTuple):
    """Bytes of a copy of a segment; they are at the same offset in what is written.

    Args:
        file: The copy, open.
        begin: The first byte, a multiple of 4096.
        end: Behind the last byte, a multiple of 4096.
    """

    file: ReadFile
    begin: int
    end: int


def write_segment(
    target: Backend,
    name: SegmentName,
    pieces: Sequence[Piece],
    *,
    check: Callable[[ReadFile], None],
    is_wanted: Callable[[], bool],
    replaces: bool,
) -> bool:
    """Write a segment, durably; return whether it was written.

    Args:
        target: Where to.
        name: Its name.
        pieces: Its bytes, without gaps.
        check: Checks every byte of the draft in a folder. A bucket has no draft: the caller has checked the source.
        is_wanted: Asked at the last moment, because another process may have written a longer copy meanwhile.
        replaces: Replace a copy of this name; else such a copy stays.

    Raises:
        CorruptError: The check has failed. Nothing was changed.
        CapacityError: The place is full.
        BackendError: The place does not respond.
    """
    nbytes = pieces[-1].end
    if isinstance(target, Distant):
        assert isinstance(target, Overwriting), "every bucket replaces objects"
        return _send(target.create_pack_over(name.path, nbytes_expected=nbytes), pieces, is_wanted)
    draft = paths.draft_name(new_token(), "ckj")
    try:
        _send(target.create_pack(draft, nbytes_expected=nbytes), pieces, lambda: True)
        with closing(target.open_read(draft)) as file:
            check(file)
        folder = paths.journal_folder(name.run)
        make_durable_folder(target, folder)
        if not is_wanted():
            return False
        try:
            (target.rename if replaces else target.rename_new)(draft, name.path)
        except FileExistsError:
            return False
        target.sync_folder(folder)
        return True
    finally:
        with contextlib.suppress(FileNotFoundError, CkstoreError):
            target.unlink(draft)


def check_segment(
    file: ReadFile, segment: Segment, tip: RecordPlace | None, *, nbytes: int, limits: Limits, where: str
) -> None:
    """Check every byte of the first ``nbytes`` bytes of a segment.

    Args:
        file: The segment.
        segment: Its header.
        tip: The last record that these bytes must have; the one that the segment continues if they have none.
        nbytes: How many.
        limits: Limits of the store.
        where: The file, for messages.

    Raises:
        CorruptError: A byte is damaged or missing.
        UnsupportedError: A newer ckstore has written a record.
    """
    if decode_segment(file.read_at(0, SEGMENT_HEADER_NBYTES), store_id=segment.store_id, where=where) != segment:
        raise MalformedError("the header is that of another segment", where=where)
    end, record_id = SEGMENT_HEADER_NBYTES, None if segment.facts.previous is None else segment.facts.previous.record_id
    for placed in read_heads(file.read_at, nbytes, segment, limits=limits, where=where):
        check_record(file.read_at, placed, limits=limits, where=where)
        end, record_id = placed.offset + placed.head.nbytes, placed.head.record_id
    if end != nbytes or record_id != (None if tip is None else tip.record_id):
        raise CorruptError("a record is damaged or missing", where=where, offset=end)


def _send(sink: PackSink, pieces: Sequence[Piece], is_wanted: Callable[[], bool]) -> bool:
    try:
        with BufferPool(_BLOCK_NBYTES, _BLOCKS) as pool:
            for file, begin, end in pieces:
                for offset in range(begin, end, _BLOCK_NBYTES):
                    content = file.read_at(offset, min(_BLOCK_NBYTES, end - offset))
                    if len(content) != min(_BLOCK_NBYTES, end - offset):
                        raise MalformedError("a segment has become shorter while it was read", where=file.name)
                    buffer = pool.acquire()
                    buffer.view[: len(content)] = content
                    sink.write(buffer, len(content), offset)
            if not is_wanted():
                return False
            sink.finish(pieces[-1].end)
            return True
    finally:
        sink.close()
