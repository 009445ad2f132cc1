"""One test suite per interface: inherit it in a test class and provide an instance by a fixture.

New backends and engines run the same tests as the existing ones.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ckstore.errors import CkstoreError, MalformedError, UsageError
from ckstore.io.backend import Backend, ReadFile, ReadRequest
from ckstore.io.block_writer import BlockWriter
from ckstore.io.buffers import BufferPool
from ckstore.io.direct_io import Engine, IoQueue, IoRequest

PAGE = 4096
BLOCK = 16 * PAGE


def write_pack(backend: Backend, name: str, pieces: Sequence[bytes], *, align: int = 64) -> bytes:
    """Write pieces as one pack through the stream writer, and return what the file must hold."""
    with BufferPool(BLOCK, 4) as pool:
        writer = BlockWriter(backend.create_pack(name, nbytes_expected=sum(map(len, pieces))), pool)
        wanted = bytearray()
        for piece in pieces:
            place = writer.reserve(len(piece), align=align)
            wanted += bytes(place.offset - len(wanted)) + piece
            writer.fill(place, [memoryview(piece)])
            writer.done(place)
        total_nbytes = writer.finish()
        assert pool.free_count == 4
    return bytes(wanted) + bytes(total_nbytes - len(wanted))


def random_pieces(seed: int, count: int, nbytes_max: int) -> list[bytes]:
    """Return reproducible pieces of all lengths from nothing to ``nbytes_max``."""
    source = random.Random(seed)
    return [source.randbytes(source.choice([0, 1, 63, 64, source.randint(0, nbytes_max)])) for _ in range(count)]


class BackendSuite:
    """What every backend must promise; a subclass has a fixture ``backend`` of an empty one."""

    @pytest.fixture
    def pool(self) -> Iterator[BufferPool]:
        """Buffers for reading; every one must have come back in the end."""
        with BufferPool(BLOCK, 4) as pool:
            yield pool
            assert pool.free_count == pool.count

    def test_created_file_is_read_back(self, backend: Backend) -> None:
        """Content comes back whole, in part, and with its size."""
        backend.create("note", b"0123456789", sync=True)
        assert backend.read_bytes("note", nbytes_max=10) == b"0123456789"
        assert backend.read_head("note", 4) == b"0123"
        assert backend.read_head("note", 400) == b"0123456789"
        found = backend.stat("note")
        assert found is not None
        assert found.nbytes == 10
        assert found.modified_ns > 0

    def test_create_never_replaces(self, backend: Backend) -> None:
        """O_EXCL: the first content stays."""
        backend.create("note", b"first", sync=False)
        with pytest.raises(FileExistsError):
            backend.create("note", b"second", sync=False)
        with pytest.raises(FileExistsError):
            backend.create_pack("note", nbytes_expected=PAGE)
        assert backend.read_bytes("note", nbytes_max=5) == b"first"

    def test_missing_names_say_so(self, backend: Backend) -> None:
        """FileNotFoundError is an ordinary answer, for files and folders."""
        assert backend.stat("gone") is None
        assert backend.stat("gone/deeper") is None
        assert backend.list_names("gone") == []
        for call in (
            lambda: backend.read_bytes("gone", nbytes_max=1),
            lambda: backend.read_head("gone", 1),
            lambda: backend.unlink("gone"),
            lambda: backend.link("gone", "other"),
            lambda: backend.rename("gone", "other"),
            lambda: backend.rename_new("gone", "other"),
            lambda: backend.sync_file("gone"),
            lambda: backend.sync_folder("gone"),
            lambda: backend.remove_folder("gone"),
            lambda: backend.open_read("gone"),
            lambda: backend.create("gone/file", b"", sync=False),
            lambda: backend.create_pack("gone/file", nbytes_expected=0),
        ):
            with pytest.raises(FileNotFoundError):
                call()

    def test_too_large_file_is_refused_before_it_is_believed(self, backend: Backend) -> None:
        """A bound on small files holds."""
        backend.create("note", b"12345", sync=False)
        with pytest.raises(MalformedError):
            backend.read_bytes("note", nbytes_max=4)

    @pytest.mark.parametrize("name", ["/etc/passwd", "../out", "a/../b", "a//b", "a/", ".", "a\0b"])
    def test_names_outside_the_root_are_refused(self, backend: Backend, name: str) -> None:
        """No name leads out of the place, or has two spellings."""
        with pytest.raises(UsageError):
            backend.create(name, b"", sync=False)
        with pytest.raises(UsageError):
            backend.stat(name)

    def test_folders_are_made_with_parents_and_listed_sorted(self, backend: Backend) -> None:
        """``make_folder`` says whether the folder is new; listings hold files and folders."""
        assert backend.make_folder("a/b/c") is True
        assert backend.make_folder("a/b/c") is False
        assert backend.make_folder("a/b") is False
        backend.create("a/z", b"", sync=False)
        backend.create("a/0", b"", sync=False)
        assert backend.list_names("a") == ["0", "b", "z"]
        assert backend.list_names("") == ["a"]
        backend.remove_folder("a/b/c")
        assert backend.list_names("a/b") == []
        with pytest.raises(CkstoreError):
            backend.remove_folder("a")

    def test_link_gives_a_second_name_and_never_replaces(self, backend: Backend) -> None:
        """The publish step rests on this."""
        backend.create("draft", b"new", sync=True)
        backend.create("taken", b"old", sync=True)
        backend.link("draft", "final")
        with pytest.raises(FileExistsError):
            backend.link("draft", "taken")
        backend.unlink("draft")
        assert backend.read_bytes("final", nbytes_max=3) == b"new"
        assert backend.read_bytes("taken", nbytes_max=3) == b"old"

    def test_rename_new_never_replaces_and_rename_does(self, backend: Backend) -> None:
        """The difference between moving to the trash and setting a tag."""
        backend.create("one", b"1", sync=False)
        backend.create("two", b"2", sync=False)
        with pytest.raises(FileExistsError):
            backend.rename_new("one", "two")
        assert backend.read_bytes("two", nbytes_max=1) == b"2"
        backend.rename_new("one", "three")
        assert backend.stat("one") is None
        backend.rename("three", "two")
        assert backend.list_names("") == ["two"]
        assert backend.read_bytes("two", nbytes_max=1) == b"1"

    def test_pack_holds_what_was_placed(self, backend: Backend) -> None:
        """Every byte, at its offset, zeros between, a size that is a multiple of a page."""
        wanted = write_pack(backend, "x.pack", random_pieces(1, 60, 2 * BLOCK))
        file = backend.open_read("x.pack")
        assert file.nbytes == len(wanted)
        assert file.nbytes % PAGE == 0
        assert file.read_at(0, len(wanted) + 1) == wanted
        assert file.read_at(len(wanted), 1) == b""
        file.close()
        file.close()

    def test_finished_pack_takes_no_more(self, backend: Backend) -> None:
        """A late block is refused, and its buffer comes back."""
        sink = backend.create_pack("x.pack", nbytes_expected=PAGE)
        sink.finish(0)
        with BufferPool(PAGE, 1) as pool:
            with pytest.raises(CkstoreError):
                sink.write(pool.acquire(), PAGE, 0)
            assert pool.free_count == 1
        assert backend.stat("x.pack") is not None

    def test_pack_that_was_given_up_leaves_no_name(self, backend: Backend) -> None:
        """What was reserved for it is free again."""
        with BufferPool(BLOCK, 2) as pool:
            writer = BlockWriter(backend.create_pack("x.pack", nbytes_expected=8 * BLOCK), pool)
            place = writer.reserve(BLOCK + 1)
            writer.fill(place, [memoryview(bytes(BLOCK + 1))])
            writer.abandon()
            writer.abandon()
            assert pool.free_count == 2
        assert backend.stat("x.pack") is None

    def test_ranges_come_back_exactly(self, backend: Backend, pool: BufferPool) -> None:
        """Any offset and length, also past the end, each once."""
        wanted = write_pack(backend, "x.pack", random_pieces(2, 40, BLOCK))
        file = backend.open_read("x.pack")
        source = random.Random(3)
        requests = [
            ReadRequest(file, source.randrange(len(wanted) + PAGE), source.randrange(BLOCK - 2 * PAGE), tag)
            for tag in range(60)
        ]
        seen = set()
        for result in backend.read_ranges(requests, pool):
            request = requests[result.tag]
            assert result.view == wanted[request.offset : request.offset + request.nbytes]
            seen.add(result.tag)
            result.release()
        assert seen == set(range(60))
        file.close()

    def test_unaligned_end_of_a_file_is_read(self, backend: Backend, pool: BufferPool) -> None:
        """A file that ends within a page ends there."""
        content = bytes(range(256)) * 33 + b"end"
        backend.create("odd", content, sync=True)
        file = backend.open_read("odd")
        [result] = backend.read_ranges([ReadRequest(file, 100, BLOCK - PAGE, 0)], pool)
        assert result.view == content[100:]
        result.release()
        assert file.read_at(len(content) - 3, 100) == b"end"
        file.close()

    def test_reading_can_stop_early(self, backend: Backend, pool: BufferPool) -> None:
        """Closing the iterator gives back what is in flight."""
        write_pack(backend, "x.pack", [bytes(BLOCK)] * 8)
        file = backend.open_read("x.pack")
        results = backend.read_ranges((ReadRequest(file, i * PAGE, PAGE, i) for i in range(90)), pool)
        next(iter(results)).release()
        results.close()  # type: ignore[attr-defined]
        assert pool.free_count == pool.count
        file.close()

    def test_failing_source_of_requests_loses_no_buffer(self, backend: Backend, pool: BufferPool) -> None:
        """An error of the iterable passes, and everything comes back."""
        write_pack(backend, "x.pack", [bytes(BLOCK)] * 2)
        file = backend.open_read("x.pack")

        def requests() -> Iterator[ReadRequest]:
            yield ReadRequest(file, 0, PAGE, 0)
            raise KeyError("of the caller")

        results = backend.read_ranges(requests(), pool)
        with pytest.raises(KeyError):  # noqa: PT012 - which step raises is the backend's choice
            for result in results:
                result.release()
        file.close()

    def test_range_larger_than_a_buffer_is_refused(self, backend: Backend, pool: BufferPool) -> None:
        """It would wait for ever, or overrun."""
        write_pack(backend, "x.pack", [bytes(BLOCK)] * 2)
        file = backend.open_read("x.pack")
        with pytest.raises(UsageError):
            list(backend.read_ranges([ReadRequest(file, 0, BLOCK + 1, 0)], pool))
        file.close()

    def test_open_file_outlives_its_name(self, backend: Backend, pool: BufferPool) -> None:
        """A reader that has opened its packs is not disturbed by a collector."""
        wanted = write_pack(backend, "x.pack", [b"kept" * 3000])
        file = backend.open_read("x.pack")
        backend.unlink("x.pack")
        [result] = backend.read_ranges([ReadRequest(file, 1, 5000, 0)], pool)
        assert result.view == wanted[1:5001]
        result.release()
        file.close()

    def test_backend_works_again_after_close(self, backend: Backend, pool: BufferPool) -> None:
        """Close releases only rings and threads."""
        write_pack(backend, "x.pack", [b"a" * 5000])
        backend.close()
        write_pack(backend, "y.pack", [b"b" * 5000])
        file: ReadFile = backend.open_read("y.pack")
        [result] = backend.read_ranges([ReadRequest(file, 0, 1, 0)], pool)
        assert bytes(result.view) == b"b"
        result.release()
        file.close()
        backend.close()


class EngineSuite:
    """What every engine must promise; a subclass has a fixture ``engine``."""

    @pytest.fixture
    def queue(self, engine: Engine) -> Iterator[IoQueue]:
        """A queue of depth 3, closed in the end."""
        queue = engine.open_queue(depth=3)
        yield queue
        queue.close()

    def test_many_transfers_end_once_each_with_right_bytes(self, queue: IoQueue, tmp_path: Path) -> None:
        """More requests than depth, in both directions, none lost, none doubled."""
        count = 50
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        with BufferPool(2 * PAGE, count) as pool:
            buffers = [pool.acquire() for _ in range(count)]
            for index, buffer in enumerate(buffers):
                buffer.view[:] = bytes([index]) * (2 * PAGE)
            outcomes = move(queue, [("write", fd, b.view, i * 2 * PAGE) for i, b in enumerate(buffers)])
            assert outcomes == [(2 * PAGE, None)] * count
            for buffer in buffers:
                buffer.view[:] = bytes(2 * PAGE)
            outcomes = move(queue, [("read", fd, b.view, i * 2 * PAGE) for i, b in enumerate(buffers)])
            assert outcomes == [(2 * PAGE, None)] * count
            assert all(b.view == bytes([i]) * (2 * PAGE) for i, b in enumerate(buffers))
        os.close(fd)

    def test_read_past_the_end_is_short(self, queue: IoQueue, tmp_path: Path) -> None:
        """Fewer bytes are no error where a file ends, aligned or not."""
        (tmp_path / "file").write_bytes(b"x" * (PAGE + 10))
        fd = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
        with BufferPool(4 * PAGE, 1) as pool:
            view = pool.acquire().view
            reads = [("read", fd, view, 0), ("read", fd, view, PAGE), ("read", fd, view, 8 * PAGE)]
            assert [move(queue, [each])[0] for each in reads] == [(PAGE + 10, None), (10, None), (0, None)]
        os.close(fd)

    def test_failure_affects_only_its_request(self, queue: IoQueue, tmp_path: Path) -> None:
        """A bad descriptor among good ones."""
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
        with BufferPool(PAGE, 1) as pool:
            view = pool.acquire().view
            outcomes = move(queue, [("write", fd, view, 0), ("write", 1 << 20, view, 0), ("write", fd, view, PAGE)])
        assert [(moved, error and error.errno) for moved, error in outcomes] == [(PAGE, None), (0, 9), (PAGE, None)]
        os.close(fd)

    def test_close_waits_for_everything_submitted(self, engine: Engine, tmp_path: Path) -> None:
        """Nothing is dropped by closing, and nothing is taken afterwards."""
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
        queue = engine.open_queue(depth=2)
        outcomes: list[int] = []
        with BufferPool(PAGE, 1) as pool:
            view = pool.acquire().view
            for index in range(40):
                on_done = lambda moved, error: outcomes.append(moved)  # noqa: E731
                queue.submit(IoRequest("write", fd, view, index * PAGE, on_done))
            queue.close()
            assert outcomes == [PAGE] * 40
            with pytest.raises(UsageError):
                queue.submit(IoRequest("write", fd, view, 0, lambda moved, error: None))
        queue.close()
        os.close(fd)


def move(queue: IoQueue, requests: Sequence[tuple[str, int, memoryview, int]]) -> list[tuple[int, OSError | None]]:
    """Run transfers through a queue and return their outcomes in order."""
    outcomes: list[list[tuple[int, OSError | None]]] = [[] for _ in requests]
    is_done = threading.Semaphore(0)

    def teller(index: int) -> IoRequest:
        def on_done(moved: int, error: OSError | None) -> None:
            outcomes[index].append((moved, error))
            is_done.release()

        kind, fd, view, offset = requests[index]
        return IoRequest("read" if kind == "read" else "write", fd, view, offset, on_done)

    for index in range(len(requests)):
        queue.submit(teller(index))
    for _ in requests:
        assert is_done.acquire(timeout=30), "a transfer never ended"
    assert all(len(each) == 1 for each in outcomes), "a transfer ended twice"
    return [each[0] for each in outcomes]
