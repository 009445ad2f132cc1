"""A pack being written into a folder: space reserved in large steps, blocks in flight, one sync at the end.

Invariants:
- The file is extended by fallocate before blocks are written into it, so that no write grows it and writes
  run side by side; it is cut to its true size before the sync, never after.
- Only room for what is written is a must: what is reserved ahead shrinks with the room there is.
- The first failure stays: every later call raises it, and the file is never synced again.
- The descriptor is closed only when nothing is in flight and no other thread is finishing the pack.
- A pack that is let go of before it was finished loses its name, so that a full disk has room again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable

from ckstore.config import GIB, MIB
from ckstore.errors import CapacityError, CkstoreError, UsageError
from ckstore.io.buffers import AlignedBuffer
from ckstore.io.engine import IoQueue, IoRequest
from ckstore.io.os_calls import PAGE_NBYTES, fallocate, medium_error, medium_errors, round_down, round_up

STEP_NBYTES_MAX = 16 * GIB
"""No more is reserved at once."""

STEP_NBYTES_MIN = 64 * MIB
"""No less is reserved ahead, once a pack has grown beyond what was expected; where that is no longer free, nothing."""

_STEP_NBYTES_FIRST = MIB
"""What is reserved beyond what was expected: this at first, then twice as much each time, up to the least of later
steps. A pack needs little more than its directory. In memory (tmpfs) room is filled with zeros, and a commit of a few
KiB spent most of its time on what it gave back again."""


class LocalPackSink:
    """Blocks on their way into one file.

    Args:
        fd: Open for writing; the sink owns it.
        name: The name it was created under.
        path: Where that is, for messages.
        queue: What writes blocks.
        unlink: Removes a name: that of a pack that is given up.
        nbytes_expected: About how large the pack will be; that much is reserved at once, up to 16 GiB, or
            less where there is less room: the pack may turn out smaller.
        final_mode: Mode of the finished pack, which nobody writes any more.

    Raises:
        BackendError: Reserving failed for another reason than a lack of room.
    """

    def __init__(
        self,
        fd: int,
        name: str,
        path: str,
        queue: IoQueue,
        unlink: Callable[[str], None],
        *,
        nbytes_expected: int,
        final_mode: int = 0o400,
    ) -> None:
        self._fd = fd
        self._unlink = unlink
        self._name = name
        self._path = path
        self._queue = queue
        self._final_mode = final_mode
        self._expected_nbytes = round_up(nbytes_expected)
        self._reserved_nbytes = 0
        self._step_nbytes_max = STEP_NBYTES_MAX
        self._can_reserve = True
        self._in_flight = 0
        self._failure: CkstoreError | None = None
        self._is_finished = False
        self._is_closed = False
        self._condition = threading.Condition()
        # Apart from the condition, so that completions need not wait for the file system.
        self._reserving = threading.Lock()
        self._step_nbytes = _STEP_NBYTES_FIRST
        if nbytes_expected:
            self._reserve_some(min(self._expected_nbytes, STEP_NBYTES_MAX), nbytes_needed=0)

    @property
    def name(self) -> str:
        """The name it was created under."""
        return self._name

    def write(self, buffer: AlignedBuffer, nbytes: int, offset: int) -> None:
        """Start writing ``buffer[:nbytes]`` at ``offset``; the buffer is released when it is written."""
        assert nbytes % PAGE_NBYTES == 0 == offset % PAGE_NBYTES, "blocks are multiples of 4096"

        def on_done(moved: int, error: OSError | None) -> None:
            if error is None and moved != nbytes:
                error = OSError(errno.EIO, f"{moved} of {nbytes} bytes were written")
            self._finish_one(buffer, error)

        with self._condition:
            self._in_flight += 1
        try:
            self._check()
            self._reserve_for(offset + nbytes)
            self._queue.submit(IoRequest("write", self._fd, buffer.view[:nbytes], offset, on_done))
        except BaseException as error:
            self._finish_one(buffer, None)
            self._fail(error)
            raise

    def drain(self) -> None:
        """Wait until every write is done; raise the first failure."""
        with self._condition:
            self._condition.wait_for(lambda: not self._in_flight)
        self._check()

    def finish(self, nbytes: int) -> None:
        """Drain, cut the file to its true size, make its bytes durable, make it read-only, and close it."""
        with self._condition:
            self._condition.wait_for(lambda: not self._in_flight)
            self._check()
            # A close from another thread waits for this too: the descriptor's number must not become another file's.
            self._in_flight += 1
        try:
            with medium_errors(self._path, "making the pack durable"):
                os.ftruncate(self._fd, nbytes)
                os.fchmod(self._fd, self._final_mode)
                os.fdatasync(self._fd)
            self._is_finished = True
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._count_one_done()
        self.close()

    def close(self) -> None:
        """Wait for what is in flight, ignoring its result, and let go; an unfinished pack is removed."""
        with self._condition:
            self._condition.wait_for(lambda: not self._in_flight)
            if self._is_closed:
                return
            self._is_closed = True
            if self._failure is None:
                self._failure = UsageError("the pack is closed", where=self._path)
        # What close reports was reported by the sync, or is of no interest to who gave up; what cannot be
        # removed is garbage that nobody names.
        with contextlib.suppress(OSError):
            os.close(self._fd)
        if not self._is_finished:
            with contextlib.suppress(OSError, CkstoreError):
                self._unlink(self._name)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        with self._condition:
            if self._failure is None and isinstance(error, CkstoreError):
                self._failure = error
            elif self._failure is None:
                self._failure = CkstoreError("the pack was given up", where=self._path)

    def _finish_one(self, buffer: AlignedBuffer, error: OSError | None) -> None:
        if error is not None:
            self._fail(medium_error(error, where=self._path, what="writing a pack"))
        if error is not None and error.errno == errno.EBADR:
            # The kernel lost count of its completions and may still read the block.
            buffer.discard()
        else:
            buffer.release()
        self._count_one_done()

    def _count_one_done(self) -> None:
        with self._condition:
            self._in_flight -= 1
            self._condition.notify_all()

    def _reserve_for(self, stop: int) -> None:
        with self._reserving:
            missing = stop - self._reserved_nbytes
            if missing <= 0:
                return
            rest = self._expected_nbytes - self._reserved_nbytes
            step = min(max(rest, min(self._step_nbytes, STEP_NBYTES_MIN)), self._step_nbytes_max)
            if rest <= 0:
                self._step_nbytes *= 2
            self._reserve_some(max(missing, step), nbytes_needed=missing)

    def _reserve_some(self, nbytes: int, *, nbytes_needed: int) -> None:
        """Reserve so many bytes, or fewer where there is less room, but never fewer than are needed."""
        while nbytes:
            try:
                return self._reserve(nbytes)
            except CapacityError:
                if nbytes <= nbytes_needed:
                    raise
            # Some file systems keep what they had found; others on this disk may need it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._reserved_nbytes)
            # What did not fit is not tried again: on a nearly full disk every block would pay for it.
            half = round_down(nbytes // 2)
            self._step_nbytes_max = half if half >= STEP_NBYTES_MIN else 0
            nbytes = max(nbytes_needed, self._step_nbytes_max)
        return None

    def _reserve(self, nbytes: int) -> None:
        if self._can_reserve:
            with medium_errors(self._path, "reserving space"):
                self._can_reserve = fallocate(self._fd, self._reserved_nbytes, nbytes)
        self._reserved_nbytes += nbytes
