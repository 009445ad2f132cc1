"""Write a pack to a bucket while it is being made: blocks arrive in any order, and leave in that of the file.

Invariants:
- Nothing has the pack's name before ``finish``, and nothing ever has if it is not finished.
- A block is copied before it is given back, so that what is on its way cannot change.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from ckstore.errors import BackendError, UsageError
from ckstore.io.buffers import AlignedBuffer
from ckstore.io.os_calls import PAGE_NBYTES
from ckstore.io.remote import Bucket

_COPIES_NBYTES_MAX = 64 << 20


class _GivenUp(Exception):
    """Ends an upload that is not wanted any more."""


class RemotePackSink:
    """A pack on its way to a bucket, sent by a thread of its own.

    Args:
        bucket: Where it goes.
        name: Its name.
        nbytes_expected: About how long it will be.
    """

    def __init__(self, bucket: Bucket, name: str, *, nbytes_expected: int) -> None:
        self._bucket = bucket
        self._name = name
        self._nbytes_expected = nbytes_expected
        self._arrived: dict[int, bytes] = {}
        self._waiting_nbytes = 0
        self._sent_nbytes = 0
        self._total_nbytes: int | None = None
        self._failure: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The name it will have."""
        return self._name

    def write(self, buffer: AlignedBuffer, nbytes: int, offset: int) -> None:
        """Take a block; the buffer is released when this returns. Raises an earlier failure."""
        assert nbytes % PAGE_NBYTES == 0 == offset % PAGE_NBYTES, "blocks are multiples of 4096"
        try:
            self._check()
            with self._changed:
                # What is next must always be taken: everything else waits for it.
                self._changed.wait_for(
                    lambda: (
                        self._failure is not None
                        or offset == self._sent_nbytes
                        or self._waiting_nbytes < _COPIES_NBYTES_MAX
                    )
                )
            content = bytes(buffer.view[:nbytes])
        finally:
            buffer.release()
        with self._changed:
            self._arrived[offset] = content
            self._waiting_nbytes += nbytes
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._send, name="ckstore-upload", daemon=True)
                self._thread.start()
        self._check()

    def drain(self) -> None:
        """Raise what has failed so far; before the end there is nothing to wait for."""
        self._check()

    def finish(self, nbytes: int) -> None:
        """Send the rest, and make the pack exist; its bytes are durable then.

        Raises:
            CapacityError: The bucket's quota is full.
            BackendError: It was not written.
        """
        self._check()
        with self._changed:
            self._total_nbytes = nbytes
            self._changed.notify_all()
        if self._thread is None:
            assert nbytes == 0, "a pack is as long as what was written"
            self._bucket.put_over(self._name, b"")
        else:
            self._thread.join()
            self._check()
        self._is_closed = True
        self._failure = UsageError("the pack is finished", where=self._bucket.location_of(self._name))

    def close(self) -> None:
        """Give the pack up if it is not finished; repeated calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._changed:
            self._failure = self._failure or UsageError("the pack is closed", where=self._name)
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _send(self) -> None:
        try:
            self._bucket.put_stream(self._name, self._in_order(), nbytes_expected=self._nbytes_expected)
        except _GivenUp:
            return
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _in_order(self) -> Iterator[bytes]:
        """Yield the blocks in order; the last one cut to the true size, so that each waits for the one behind it."""
        held = b""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._failure is not None
                        or self._sent_nbytes in self._arrived
                        or self._total_nbytes is not None
                    )
                )
                if self._failure is not None:
                    raise _GivenUp
                block = self._arrived.pop(self._sent_nbytes, None)
                if block is not None:
                    self._sent_nbytes += len(block)
                    self._waiting_nbytes -= len(block)
                    self._changed.notify_all()
                total = self._total_nbytes
            if block is None:
                assert total is not None, "there is a next block, or an end"
                rest = total - (self._sent_nbytes - len(held))
                if not 0 <= rest <= len(held):
                    raise BackendError("a block of the pack is missing", where=self._bucket.location_of(self._name))
                if rest:
                    yield held[:rest]
                return
            if held:
                yield held
            held = block
