"""Append records to a segment of a journal.

Invariants:
- ``append`` returns when the record is durable. The next record is begun after that.
- The first failure is final: the file is cut to its last durable record, is not synced again, and refuses further
  records.
- One process appends to a segment, the one that created it. It holds the lock of the file until it closes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckstore.config import Limits
from ckstore.errors import BackendError, CkstoreError, UsageError
from ckstore.format.frame import FRAME_ALIGN
from ckstore.format.journal import (
    NO_RECORD,
    RECORD_HEAD_NBYTES,
    SEGMENT_HEADER_NBYTES,
    RecordHead,
    Segment,
    decode_record_head,
    encode_record_head,
)
from ckstore.format.paths import SegmentName
from ckstore.format.records import RecordPlace
from ckstore.io.backend import AppendFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger("ckstore")


class BrokenSegmentError(BackendError):
    """An earlier append to this segment has failed. The journal can go on in another segment."""


class SegmentWriter:
    """Appends to one segment. Thread-safe. Made by ``Journals.open_writer``.

    Args:
        file: The segment's file, of which the header is durable.
        name: The segment's name.
        segment: Its header.
        limits: Limits of the store.
        where: Path of the file, for messages.
    """

    def __init__(self, file: AppendFile, name: SegmentName, segment: Segment, *, limits: Limits, where: str) -> None:
        self.name = name
        self.segment = segment
        self._file = file
        self._limits = limits
        self._where = where
        self._last = segment.facts.previous
        self._nbytes = SEGMENT_HEADER_NBYTES
        self._failure: BaseException | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Length of the segment up to its last durable record."""
        return self._nbytes

    @property
    def last(self) -> RecordPlace | None:
        """The last durable record of the chain: in this segment, or the one that it continues; None: there is none."""
        return self._last

    @property
    def is_broken(self) -> bool:
        """Whether an append has failed."""
        return self._failure is not None

    def append(self, *, step: int, time_ns: int, body: bytes, structure: bytes, frames: Sequence[Buffer]) -> RecordHead:
        """Append a record. It is durable on return.

        Args:
            step: The trainer's step.
            time_ns: When the point was made, nanoseconds since 1970.
            body: What the record says, plain.
            structure: See ``format.journal.structure_of``.
            frames: The bytes of its frames, in any number of parts, each frame with its padding.

        Raises:
            CapacityError: The disk is full. Earlier records stay, and this segment refuses further ones.
            BackendError: The write or the sync failed. The same holds.
            BrokenSegmentError: An earlier append has failed.
            MalformedError: Readers would refuse the record. Nothing was written.
        """
        with self._lock:
            self._require_usable()
            number, previous = (0, NO_RECORD) if self._last is None else (self._last.number, self._last.record_id)
            frames_nbytes = sum(memoryview(part).nbytes for part in frames)
            assert frames_nbytes % FRAME_ALIGN == 0, "each frame is followed by its padding"
            head, front = encode_record_head(
                number=number + 1,
                step=step,
                time_ns=time_ns,
                body=body,
                frames_nbytes=frames_nbytes,
                previous=previous,
                structure=structure,
            )
            decode_record_head(front[:RECORD_HEAD_NBYTES], limits=self._limits, where=self._where)
            try:
                self._file.write(self._nbytes, [front, *frames, bytes(head.nbytes - head.frames_end)])
                self._file.sync()
                self._nbytes += head.nbytes
                self._last = RecordPlace(token=self.name.token, number=head.number, record_id=head.record_id)
            except BaseException as error:
                self._break(error, self._nbytes)
                raise
            return head

    def close(self) -> None:
        """Close the file and release its lock. Repeated calls do nothing."""
        with self._lock:
            self._is_closed = True
            self._file.close()

    def _require_usable(self) -> None:
        if self._is_closed:
            raise UsageError("the segment of the journal is closed", where=self._where)
        if self._failure is not None:
            raise BrokenSegmentError(
                f"an earlier append to this segment of the journal has failed ({self._failure})",
                where=self._where,
                todo="begin another segment; the records before the failed one are intact",
            ) from self._failure

    def _break(self, error: BaseException, nbytes: int) -> None:
        """Refuse further appends, and remove what the failed one has written: it was not acknowledged."""
        self._failure = error
        try:
            self._file.truncate(nbytes)
        except CkstoreError as failure:
            # Readers recognize a torn record. A whole one that was not acknowledged does no harm.
            _log.warning("could not cut the journal to its last whole record: %s", failure)
