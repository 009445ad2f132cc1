"""The io_uring engine: one thread submits small batches to a ring, polls without the GIL, and reaps completions.

Properties of the liburing binding, and how this module deals with them:
- It never releases the GIL, so the thread waits with poll() on the descriptor of the ring.
- It keeps no reference to buffers and vectors, so a table holds both until their completion was reaped.
- ``cqe.res`` raises if the operation failed, so the request is looked up first and the entry is always marked seen.
- A failed ``prep`` leaves a blank entry in the ring, which is turned into a no-op.
- Vectors leak a reference to their memoryview; see ``buffers.py``.

Invariants:
- One thread creates, uses and closes the ring. Other threads queue requests and wake it.
- The ring is closed only when nothing is in flight.
- After a failure of the ring itself nothing more is submitted, and every request still gets a result.
- ``_LIVE`` lists a ring for forked children from its creation until just before its descriptors are closed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from ckstore.concurrency import Latch
from ckstore.errors import UsageError
from ckstore.io.buffers import leaks_views, release_leaked_view
from ckstore.io.direct_io import IoQueue, IoRequest, Transfer, require_supported_processor
from ckstore.io.syscalls import medium_errors

# Must run before the import, which would crash the process on an unsupported processor.
require_supported_processor()

import liburing  # type: ignore[import-untyped]  # noqa: E402

_BATCH = 4
"""Entries per submission. It is small because the GIL is held during the call."""
LOST_WAIT_MS = 2000
"""How long to wait for completions after the ring has failed. A completion that is missing then is given up."""
_RETRY_MS = 1
_LEAKS_VIEWS = leaks_views(liburing.Iovec)


class UringEngine:
    """Moves blocks through io_uring."""

    name = "uring"

    def open_queue(self, *, depth: int, nbytes_max: int | None = None) -> IoQueue:
        """Open a queue with its own ring and thread.

        Raises:
            OSError: The kernel or a seccomp filter refuses to create a ring.
        """
        return UringQueue(depth, nbytes_max=nbytes_max)


@dataclass(slots=True, eq=False)
class _Flight:
    """A call that the kernel may be executing. Keeps its memory alive."""

    transfer: Transfer
    view: memoryview
    vector: Any

    def end(self) -> None:
        """Release the memory. REQUIRES: The kernel has finished the call or never received it."""
        self.vector = None
        if _LEAKS_VIEWS:
            release_leaked_view(self.view)


class UringQueue:
    """Requests that wait for room in the ring, and those in it.

    Args:
        depth: Maximum number of calls in the ring.
        nbytes_max: No further call is added while the ring holds this many bytes or more; None: no limit.
        ring_calls: The liburing module, or a fake in tests.
    """

    def __init__(self, depth: int, *, nbytes_max: int | None = None, ring_calls: Any = liburing) -> None:
        self._depth = depth
        self._nbytes_max = nbytes_max
        self._in_flight_nbytes = 0
        self._calls = ring_calls
        self._pid = os.getpid()
        self._waiting: deque[Transfer] = deque()
        self._in_flight: dict[int, _Flight] = {}
        self._unsubmitted: deque[int] = deque()
        self._numbers = itertools.count(1)
        self._failure: OSError | None = None
        self._is_closing = False
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ring: Any = None
        self._start_error: OSError | None = None
        started = Latch()
        self._thread = threading.Thread(target=self._work, args=(started,), name="ckstore-uring", daemon=True)
        self._thread.start()
        started.wait()
        if self._start_error is not None:
            self._thread.join()
            os.close(self._wake_fd)
            raise self._start_error

    def submit(self, request: IoRequest) -> None:
        """Queue a transfer for the thread of the ring."""
        if self._pid != os.getpid():
            raise UsageError("a ring cannot be used in a forked process; open the store again there")
        with self._lock:
            if self._is_closing:
                raise UsageError("the queue is closed")
            # Wake first, because waking can raise, and a request that raised must not stay in the queue. The woken
            # thread waits for the lock.
            self._wake()
            self._waiting.append(Transfer(request))

    def close(self) -> None:
        """Wait for everything submitted, then close the ring and end its thread."""
        if self._pid != os.getpid():
            # A thread of the parent may have held the lock during the fork.
            return
        with self._lock:
            if self._is_closing:
                return
            self._wake()
            self._is_closing = True
        self._thread.join()
        os.close(self._wake_fd)

    def _wake(self) -> None:
        with medium_errors("io_uring", "waking the ring's thread"):
            os.eventfd_write(self._wake_fd, 1)

    def _work(self, started: Latch) -> None:
        try:
            ring = self._calls.Ring()
            self._calls.io_uring_queue_init(max(self._depth, 2), ring)
            self._ring = ring
            _LIVE.add(self)
        except OSError as error:
            self._start_error = error
            return
        finally:
            started.set()
        try:
            self._serve()
        except OSError as error:
            self._give_up(error)
        finally:
            # A child forked after the descriptors are closed would close unrelated files with the same numbers.
            _LIVE.discard(self)
            self._calls.io_uring_queue_exit(ring)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._ring.ring_fd, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        while True:
            is_full = self._fill_ring()
            if not self._in_flight and self._is_idle():
                return
            for fd, _ in poll.poll(_RETRY_MS if is_full else None):
                if fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
            self._reap()

    def _is_idle(self) -> bool:
        with self._lock:
            return self._is_closing and not self._waiting

    def _fill_ring(self) -> bool:
        """Move waiting requests into the ring. Return True if the kernel asked to try again (EAGAIN, EBUSY)."""
        while True:
            while self._has_room() and len(self._unsubmitted) < _BATCH:
                with self._lock:
                    transfer = self._waiting.popleft() if self._waiting else None
                if transfer is None:
                    break
                if not self._prepare(transfer):
                    break
            if not self._unsubmitted:
                return False
            try:
                submitted = self._calls.io_uring_submit(self._ring)
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                if error.errno in (errno.EAGAIN, errno.EBUSY):
                    return True
                raise
            for _ in range(min(submitted, len(self._unsubmitted))):
                self._unsubmitted.popleft()
            if submitted == 0:
                return True

    def _has_room(self) -> bool:
        has_byte_room = self._nbytes_max is None or self._in_flight_nbytes < self._nbytes_max
        return len(self._in_flight) < self._depth and has_byte_room

    def _prepare(self, transfer: Transfer) -> bool:
        """Add a call to the ring. Return False and requeue the transfer if the ring has no free entry."""
        request = transfer.request
        start = transfer.start
        view = request.buffer[start:]
        try:
            vector = self._calls.Iovec([view])
        except Exception as error:
            request.on_done(transfer.moved, _as_os_error(error))
            return True
        flight = _Flight(transfer, view, vector)
        del vector
        entry = self._calls.io_uring_get_sqe(self._ring)
        if entry is None:
            flight.end()
            with self._lock:
                self._waiting.appendleft(transfer)
            return False
        prepare = self._calls.io_uring_prep_readv if request.kind == "read" else self._calls.io_uring_prep_writev
        number = next(self._numbers)
        try:
            prepare(entry, request.fd, flight.vector, request.offset + start)
        except Exception as error:
            # The entry is already taken and will be submitted, so it must do nothing.
            self._calls.io_uring_prep_nop(entry)
            entry.user_data = 0
            self._unsubmitted.append(0)
            flight.end()
            request.on_done(transfer.moved, _as_os_error(error))
            return True
        entry.user_data = number
        self._in_flight[number] = flight
        self._in_flight_nbytes += len(view)
        self._unsubmitted.append(number)
        return True

    def _reap(self) -> None:
        """Process all completions."""
        while self._calls.io_uring_cq_ready(self._ring):
            cqe = self._calls.Cqe()
            self._calls.io_uring_peek_cqe(self._ring, cqe)
            completion = cqe[0]
            number = completion.user_data
            result, error = 0, None
            try:
                result = completion.res
            except OSError as raised:
                error = raised
            finally:
                self._calls.io_uring_cqe_seen(self._ring, completion)
            flight = self._in_flight.pop(number, None)
            if flight is not None:
                self._in_flight_nbytes -= len(flight.view)
                flight.end()
                self._complete(flight, result, error)

    def _complete(self, flight: _Flight, result: int, error: OSError | None) -> None:
        transfer = flight.transfer
        if error is not None and error.errno in (errno.EINTR, errno.EAGAIN):
            with self._lock:
                self._waiting.appendleft(transfer)
            return
        try:
            if error is None and not transfer.advance(result):
                with self._lock:
                    self._waiting.appendleft(transfer)
                return
        except OSError as raised:
            error = raised
        transfer.request.on_done(transfer.moved, error)

    def _give_up(self, error: OSError) -> None:
        """Complete every request after the ring has failed. Requests that the kernel received get their own result."""
        for number in self._unsubmitted:
            flight = self._in_flight.pop(number, None)
            if flight is not None:
                flight.transfer.request.on_done(flight.transfer.moved, error)
        self._unsubmitted.clear()
        self._failure = error
        poll = select.poll()
        poll.register(self._ring.ring_fd, select.POLLIN)
        while self._in_flight and poll.poll(LOST_WAIT_MS):
            self._reap()
        # These completions are lost, and the kernel may still use the buffers. EBADR makes the caller discard them.
        lost = OSError(errno.EBADR, os.strerror(errno.EBADR))
        for flight in self._in_flight.values():
            _ABANDONED.append(flight)
            flight.transfer.request.on_done(flight.transfer.moved, lost)
        self._in_flight.clear()
        self._refuse_rest(error)

    def _refuse_rest(self, error: OSError) -> None:
        """Fail waiting and new requests until the queue is closed."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        while True:
            with self._lock:
                waiting, self._waiting = self._waiting, deque()
                is_closing = self._is_closing
            for transfer in waiting:
                transfer.request.on_done(transfer.moved, error)
            if is_closing:
                return
            poll.poll(None)
            os.eventfd_read(self._wake_fd)


_ABANDONED: list[_Flight] = []
"""Calls without a completion. Their memory stays allocated, because the kernel may still use it."""
_LIVE: weakref.WeakSet[UringQueue] = weakref.WeakSet()


def _as_os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else OSError(errno.EINVAL, f"liburing refused the request: {error}")


def _close_inherited() -> None:
    # A forked child must not keep the rings of its parent, and the files they use, open.
    for ring_queue in list(_LIVE):
        for fd in (ring_queue._ring.ring_fd, ring_queue._wake_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
    _LIVE.clear()


os.register_at_fork(after_in_child=_close_inherited)
