"""Protects the io_uring engine from bad completions, a full or failing ring, and forks: each request ends once."""

import errno
import gc
import os
import threading
import weakref

import pytest

liburing = pytest.importorskip("liburing")

from ckstore.errors import BackendError, UsageError  # noqa: E402
from ckstore.io.buffers import BufferPool  # noqa: E402
from ckstore.io.direct_io import IoRequest  # noqa: E402
from support.forked import fork  # noqa: E402
from support.suites import move  # noqa: E402

pytestmark = pytest.mark.uring

PAGE = 4096


class Calls:
    """The liburing module, with some calls that fail for a while.

    Args:
        fail: Name of a call -> results that replace those of its next calls; None calls the real function.
        results: Results of the next completions, in place of the kernel's.
    """

    def __init__(self, fail=(), results=()):
        self.fail = {name: list(outcomes) for name, outcomes in dict(fail).items()}
        self.results = list(results)
        self.counts = {}
        self.on_call = {}

    def __getattr__(self, name):
        real = getattr(liburing, name)
        if name == "Cqe":
            return lambda: Completion(real(), self.results)
        if name not in self.fail:
            return real

        def call(*arguments):
            self.counts[name] = self.counts.get(name, 0) + 1
            self.on_call.get(name, int)()
            outcome = self.fail[name].pop(0) if self.fail[name] else None
            if isinstance(outcome, BaseException):
                raise outcome
            return real(*arguments) if outcome is None else outcome()

        return call


class Completion:
    def __init__(self, real, results):
        self.real = real
        self.results = results

    def __getitem__(self, index):
        entry = self.real[index]
        if not self.results:
            return entry
        return AlteredCompletion(entry, self.results.pop(0))


class AlteredCompletion:
    def __init__(self, entry, result):
        self.entry = entry
        self.result = result

    @property
    def user_data(self):
        return self.entry.user_data

    @property
    def res(self):
        if isinstance(self.result, int):
            return min(self.result, self.entry.res)
        if self.result is not None:
            raise self.result
        return self.entry.res


@pytest.fixture
def uring():
    from ckstore.io import uring_engine

    calls_seen = []

    def open_queue(calls=liburing, depth=4, nbytes_max=None):
        # The wrapper replaces the module, and completions pass through it.
        shim = Unwrapping(calls) if calls is not liburing else calls
        patched = uring_engine.UringQueue(depth, nbytes_max=nbytes_max, ring_calls=shim)
        calls_seen.append(patched)
        return patched

    yield open_queue
    for queue in calls_seen:
        queue.close()


class Unwrapping:
    """Unwrap wrapped arguments before the real library gets them."""

    def __init__(self, calls):
        self.calls = calls

    def __getattr__(self, name):
        call = getattr(self.calls, name)
        if name == "io_uring_peek_cqe":
            return lambda ring, cqe: call(ring, cqe.real)
        if name == "io_uring_cqe_seen":
            return lambda ring, entry: call(ring, entry.entry if isinstance(entry, AlteredCompletion) else entry)
        return call


@pytest.fixture
def fd(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    yield fd
    os.close(fd)


@pytest.fixture
def blocks():
    with BufferPool(4 * PAGE, 12) as pool:
        blocks = [pool.acquire() for _ in range(12)]
        for block in blocks:
            block.view[:] = os.urandom(4 * PAGE)
        yield [block.view for block in blocks]


def write_all(queue, fd, blocks):
    return move(queue, [("write", fd, view, index * 4 * PAGE) for index, view in enumerate(blocks)])


def assert_written(fd, blocks, tmp_path):
    assert (tmp_path / "file").read_bytes() == b"".join(blocks)


@pytest.mark.parametrize("short", [0, PAGE, 2 * PAGE + 512, 3 * PAGE])
def test_short_writes_are_continued(uring, fd, blocks, tmp_path, short):
    queue = uring(Calls(results=[short, None, short, None]))
    assert write_all(queue, fd, blocks) == [(4 * PAGE, None)] * 12
    assert_written(fd, blocks, tmp_path)


def test_failing_completion_fails_its_request_only(uring, fd, blocks):
    queue = uring(Calls(results=[None, OSError(errno.EIO, "bad"), None]), depth=1)
    outcomes = write_all(queue, fd, blocks)
    assert [error and error.errno for _, error in outcomes] == [None, errno.EIO] + [None] * 10


@pytest.mark.parametrize("nbytes_max", [1, 4 * PAGE, 10 * PAGE])
def test_ring_obeys_its_byte_limit(uring, fd, blocks, tmp_path, nbytes_max):
    calls = Calls(fail={"io_uring_prep_writev": [], "io_uring_cqe_seen": []})
    seen = []

    def note():
        seen.append((calls.counts["io_uring_prep_writev"] - calls.counts.get("io_uring_cqe_seen", 0)) * 4 * PAGE)

    calls.on_call["io_uring_prep_writev"] = note
    assert write_all(uring(calls, depth=12, nbytes_max=nbytes_max), fd, blocks) == [(4 * PAGE, None)] * 12
    assert_written(fd, blocks, tmp_path)
    assert len(seen) == 12
    assert max(seen) < nbytes_max + 4 * PAGE


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN])
def test_interrupted_completion_is_retried(uring, fd, blocks, tmp_path, number):
    queue = uring(Calls(results=[OSError(number, "again")] * 3))
    assert write_all(queue, fd, blocks) == [(4 * PAGE, None)] * 12
    assert_written(fd, blocks, tmp_path)


def test_full_ring_keeps_requests_waiting(uring, fd, blocks, tmp_path):
    calls = Calls(fail={"io_uring_get_sqe": [None, lambda: None, None, lambda: None]})
    assert write_all(uring(calls), fd, blocks) == [(4 * PAGE, None)] * 12
    assert calls.counts["io_uring_get_sqe"] > 12
    assert_written(fd, blocks, tmp_path)


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN, errno.EBUSY])
def test_refused_submission_is_retried(uring, fd, blocks, tmp_path, number):
    calls = Calls(fail={"io_uring_submit": [OSError(number, "again")] * 5})
    assert write_all(uring(calls), fd, blocks) == [(4 * PAGE, None)] * 12
    assert calls.counts["io_uring_submit"] > 5
    assert_written(fd, blocks, tmp_path)


@pytest.mark.parametrize("number", [errno.EBADR, errno.EIO, errno.ENOMEM])
def test_broken_ring_answers_every_request(uring, fd, blocks, number):
    calls = Calls(fail={"io_uring_submit": [None, OSError(number, "broken")]})
    queue = uring(calls, depth=2)
    outcomes = write_all(queue, fd, blocks)
    assert [error and error.errno for _, error in outcomes[:2]] in ([None, None], [None, number])
    assert all(error.errno == number for _, error in outcomes[2:])
    assert move(queue, [("write", fd, blocks[0], 0)])[0][1].errno == number
    queue.close()


def test_lost_completion_is_reported_as_such(uring, fd, blocks, monkeypatch):
    from ckstore.io import uring_engine

    monkeypatch.setattr(uring_engine, "LOST_WAIT_MS", 20)
    # A read of an empty pipe never ends by itself, as if its completion was lost.
    read_fd, write_fd = os.pipe()
    calls = Calls(fail={"io_uring_submit": [None, OSError(errno.EBADR, "lost")]})

    class Vector(liburing.Iovec):
        """A vector whose lifetime can be observed."""

    vectors = []

    def make_vector(views):
        vector = Vector(views)
        vectors.append(weakref.ref(vector))
        return vector

    calls.Iovec = make_vector
    queue = uring(calls, depth=4)
    first, second = [], []
    queue.submit(IoRequest("read", read_fd, blocks[0][:1], 0, lambda moved, error: first.append(error)))
    while not calls.counts.get("io_uring_submit"):
        threading.Event().wait(0.01)
    queue.submit(IoRequest("write", fd, blocks[1], 0, lambda moved, error: second.append(error)))
    queue.close()
    os.close(read_fd)
    os.close(write_fd)
    assert [error.errno for error in first] == [errno.EBADR]
    assert [error.errno for error in second] == [errno.EBADR]
    gc.collect()
    assert vectors[0]() is not None, "the kernel may still use it"


def test_failed_preparation_leaves_a_harmless_entry(uring, fd, blocks, tmp_path):
    calls = Calls(fail={"io_uring_prep_writev": [None, TypeError("no"), None]})
    outcomes = write_all(uring(calls, depth=2), fd, blocks)
    assert [error and error.errno for _, error in outcomes] == [None, errno.EINVAL] + [None] * 10
    content = (tmp_path / "file").read_bytes()
    assert content[8 * PAGE :] == b"".join(blocks[2:])


def test_ring_refused_at_start_is_raised(uring):
    with pytest.raises(PermissionError):
        uring(Calls(fail={"io_uring_queue_init": [PermissionError(errno.EPERM, "no")]}))


def test_other_threads_run_while_the_ring_waits(uring):
    queue = uring()
    read_fd, write_fd = os.pipe()
    target = bytearray(1)
    done = threading.Event()
    queue.submit(IoRequest("read", read_fd, memoryview(target), 0, lambda moved, error: done.set()))
    # Only this thread can end the read. If the wait held the GIL, the test would never reach this line.
    for _ in range(20):
        assert not done.wait(0.002)
    os.write(write_fd, b"x")
    assert done.wait(60)
    assert target == b"x"
    os.close(read_fd)
    os.close(write_fd)


def test_buffers_stay_alive_until_reaped(uring):
    queue = uring()
    read_fd, write_fd = os.pipe()
    outcome = []
    # Only the queue holds the buffer. If it was freed, the kernel would write into other memory.
    queue.submit(IoRequest("read", read_fd, memoryview(bytearray(5000)), 0, lambda moved, error: outcome.append(moved)))
    spoiled = [bytes(5000) for _ in range(1000)]
    os.write(write_fd, b"y" * 5000)
    queue.close()
    assert outcome == [5000]
    assert all(each == bytes(5000) for each in spoiled)
    os.close(read_fd)
    os.close(write_fd)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_cannot_use_the_ring(uring, fd, blocks, tmp_path):
    rings, calls = [], Calls()
    calls.Ring = lambda: rings.append(liburing.Ring()) or rings[-1]
    queue = uring(calls)
    (ring,) = rings
    ring_fd = ring.ring_fd
    os.fstat(ring_fd)

    def use_and_close():
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(ring_fd)
        with pytest.raises(UsageError):
            queue.submit(IoRequest("write", fd, blocks[0], 0, print))
        queue.close()

    check = fork(use_and_close)
    assert write_all(queue, fd, blocks) == [(4 * PAGE, None)] * 12
    check()
    assert_written(fd, blocks, tmp_path)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_forked_with_a_held_lock_can_close(uring, fd, blocks, monkeypatch):
    queue, wake, checks = uring(), os.eventfd_write, []

    def fork_first(wake_fd, value):
        # A queue wakes its thread while it holds its lock.
        checks.append(fork(queue.close, seconds_max=20))
        wake(wake_fd, value)

    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd_write", fork_first)
        assert write_all(queue, fd, blocks[:1]) == [(4 * PAGE, None)]
    (check,) = checks
    check()


class ForkingCalls:
    """The liburing module. After a ring is closed, its number is reused for another file, and a child is forked."""

    def __init__(self, path):
        self.path = path
        self.status = None

    def __getattr__(self, name):
        return getattr(liburing, name)

    def io_uring_queue_exit(self, ring):
        number = ring.ring_fd
        liburing.io_uring_queue_exit(ring)
        fd = os.open(self.path, os.O_RDONLY)
        if fd != number:
            os.dup2(fd, number)
            os.close(fd)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.fstat(0)  # A closed ring has descriptor number 0.
                status = 0 if os.fstat(number).st_ino == self.path.stat().st_ino else 2
            finally:
                os._exit(status)
        self.status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(number)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_forked_during_close_closes_no_other_file(uring, tmp_path):
    from ckstore.io import uring_engine

    (tmp_path / "other").write_bytes(b"")
    calls = ForkingCalls(tmp_path / "other")
    queue = uring_engine.UringQueue(4, ring_calls=calls)
    queue.close()
    assert calls.status == 0


def test_failed_wakeup_raises_and_transfers_nothing(uring, fd, blocks, tmp_path, monkeypatch):
    def fail(fd, value):
        raise OSError(errno.EIO, "no")

    others = set(threading.enumerate())
    queue = uring()
    answers = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd_write", fail)
        with pytest.raises(BackendError, match="EIO"):
            queue.submit(IoRequest("write", fd, blocks[0], 0, lambda moved, error: answers.append(error)))
        with pytest.raises(BackendError, match="EIO"):
            queue.close()
    # The caller of a failed request owns its buffer again, so the request must not run later.
    assert write_all(queue, fd, blocks[1:]) == [(4 * PAGE, None)] * 11
    assert answers == []
    queue.close()
    assert set(threading.enumerate()) <= others
