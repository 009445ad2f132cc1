"""Protects the files of a journal: an acknowledged record is found again, and nothing else ends up in a chain."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ckstore.errors import (
    BackendError,
    CapacityError,
    ChecksumError,
    ConflictError,
    MalformedError,
    UnreachableError,
    UnsupportedError,
    UsageError,
)
from ckstore.format import paths
from ckstore.format.journal import SEGMENT_HEADER_NBYTES, Segment, encode_segment
from ckstore.format.paths import SegmentName
from ckstore.format.records import RecordPlace, SegmentRecord, with_changes
from ckstore.format.wire import sealed
from ckstore.io import local_append
from ckstore.io.local import LocalBackend
from ckstore.io.memory import MemoryBackend
from ckstore.store.segment_writer import BrokenSegmentError
from support.faults import Fault, FaultyBackend
from support.journals import FOLDER, append, chain_of, journals_on, make_store, put_entry, steps_of
from support.simfs import SimFS


@pytest.fixture
def backend(tmp_path):
    backend = LocalBackend(tmp_path / "store", engine="pwrite")
    yield backend
    backend.close()


@pytest.fixture
def manifests(backend):
    return make_store(backend)


@pytest.fixture
def journals(manifests):
    return journals_on(manifests)


def write(journals, steps, *, previous=None):
    """Write a segment with a record for each step; return its name and its last record."""
    writer = journals.open_writer(previous=previous)
    for step in steps:
        append(writer, step)
    writer.close()
    return writer.name, writer.last


def damage(backend, name, at, content=b"\xff"):
    with Path(backend.location_of(name.path)).open("r+b") as file:
        file.seek(at)
        file.write(content)


def truncate(backend, name, nbytes):
    os.truncate(backend.location_of(name.path), nbytes)


# Writing


def test_records_are_read_back_in_order(journals):
    name, last = write(journals, [10, 11, 12])
    journal = journals.read()
    assert list(journal.segments) == [name]
    assert steps_of(journal, name) == [10, 11, 12]
    assert journal.tip(name).place == last
    assert [each.head.number for each in journal.records(name).records] == [1, 2, 3]
    assert journal.problems == {}


def test_header_says_order_and_newest_checkpoint(journals, manifests):
    first, _ = write(journals, [1])
    put_entry(manifests, 4)
    put_entry(manifests, 7)
    second, _ = write(journals, [2])
    segments = journals.read().segments
    assert [name.order for name in segments] == [1, 2]
    assert segments[first].facts.after_seq is None
    assert segments[second].facts.after_seq == 7


def test_one_record_of_many_parts_is_written_whole(journals, backend):
    writer = journals.open_writer(previous=None)
    payloads = [bytes([number % 251]) * 70 for number in range(900)]
    append(writer, 5, payloads=payloads)
    append(writer, 6, payloads=())
    assert writer.nbytes == backend.stat(writer.name.path).nbytes
    assert steps_of(journals.read(), writer.name) == [5, 6]
    writer.close()


def test_write_that_the_kernel_cuts_short_is_continued(journals, monkeypatch):
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: real(fd, [memoryview(parts[0])[:37]], offset))
    name, _ = write(journals, [1, 2])
    assert steps_of(journals.read(), name) == [1, 2]


def test_write_without_progress_fails(journals, monkeypatch):
    writer = journals.open_writer(previous=None)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(BackendError, match="EIO"):
        append(writer, 1)
    writer.close()


def test_segment_appears_locked_and_with_its_header(journals, backend, monkeypatch):
    seen = []
    real = LocalBackend.rename_new

    def look(self, source, target):
        assert not backend.list_names(FOLDER)
        real(self, source, target)
        (found,) = journals.read().segments
        seen.append((found.path, backend.is_locked(target)))

    monkeypatch.setattr(LocalBackend, "rename_new", look)
    writer = journals.open_writer(previous=None)
    assert seen == [(writer.name.path, True)]
    writer.close()
    assert not backend.is_locked(writer.name.path)
    assert backend.list_names("tmp") == []


def test_closed_writer_refuses_records(journals):
    writer = journals.open_writer(previous=None)
    writer.close()
    writer.close()
    with pytest.raises(UsageError, match="is closed"):
        append(writer, 1)


def test_body_that_readers_would_refuse_is_not_written(journals, manifests):
    journals._manifests.limits = replace(manifests.limits, manifest_nbytes_max=100)
    writer = journals.open_writer(previous=None)
    with pytest.raises(MalformedError, match="out of range"):
        append(writer, 1, body=os.urandom(101))
    append(writer, 2)
    assert steps_of(journals.read(), writer.name) == [2]
    writer.close()


def test_journal_needs_a_folder():
    manifests = make_store(MemoryBackend())
    with pytest.raises(UnsupportedError, match="needs a store in a folder"):
        journals_on(manifests).open_writer(previous=None)


def test_no_segment_is_made_where_another_store_is(journals, backend):
    backend.rename(paths.STORE_FILE, "elsewhere")
    with pytest.raises(UnreachableError):
        journals.open_writer(previous=None)
    assert backend.list_names(FOLDER) == []


def test_forked_child_neither_writes_nor_keeps_the_lock(journals, backend):
    writer = journals.open_writer(previous=None)
    append(writer, 1)
    gate, answer = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            try:
                append(writer, 2)
            except UsageError:
                code = 0
            os.write(answer[1], b"!")
            os.read(gate[0], 1)
        finally:
            os._exit(code)
    assert os.read(answer[0], 1) == b"!"
    assert backend.is_locked(writer.name.path)
    append(writer, 3)
    writer.close()
    assert not backend.is_locked(writer.name.path), "the child is alive and has closed its copy"
    os.write(gate[1], b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for fd in (*gate, *answer):
        os.close(fd)
    # The child's failed append cuts nothing off: it has no descriptor.
    assert steps_of(journals.read(), writer.name) == [1, 3]


def test_descriptor_is_not_passed_to_programs(journals, monkeypatch):
    made = []
    real = local_append.LocalAppendFile.__init__
    monkeypatch.setattr(
        local_append.LocalAppendFile, "__init__", lambda self, fd, path: (made.append(fd), real(self, fd, path))[1]
    )
    writer = journals.open_writer(previous=None)
    assert [os.get_inheritable(fd) for fd in made] == [False]
    writer.close()


# Failing appends


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, CapacityError), (errno.EIO, BackendError)])
def test_failed_write_leaves_whole_records_and_a_broken_writer(manifests, backend, number, error):
    faulty = FaultyBackend(backend)
    writer = journals_on(manifests, faulty).open_writer(previous=None)
    append(writer, 1)
    nbytes = writer.nbytes
    faulty.fault = Fault(1, number, sites=frozenset({"append.write"}))
    with pytest.raises(error):
        append(writer, 2)
    assert backend.stat(writer.name.path).nbytes == nbytes, "the torn record is cut off"
    assert writer.is_broken
    faulty.fault = None
    with pytest.raises(BrokenSegmentError, match="earlier append") as caught:
        append(writer, 3)
    assert isinstance(caught.value.__cause__, error)
    writer.close()
    assert steps_of(journals_on(manifests).read(), writer.name) == [1]


def test_full_disk_of_the_kernel_is_reported(journals, backend, monkeypatch):
    writer = journals.open_writer(previous=None)
    append(writer, 1)
    real, calls = os.pwritev, []

    def fill(fd, parts, offset):
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "full")
        return real(fd, [memoryview(parts[0])[:50]], offset)

    monkeypatch.setattr(os, "pwritev", fill)
    with pytest.raises(CapacityError, match="disk is full"):
        append(writer, 2)
    writer.close()
    assert writer.nbytes == backend.stat(writer.name.path).nbytes
    assert steps_of(journals.read(), writer.name) == [1]


def test_file_is_never_synced_again_after_a_failed_sync(journals, monkeypatch):
    writer = journals.open_writer(previous=None)
    append(writer, 1)
    calls = []

    def fail(fd):
        calls.append(fd)
        raise OSError(errno.EIO, "medium")

    monkeypatch.setattr(os, "fdatasync", fail)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(BackendError, match="EIO"):
        append(writer, 2)
    with pytest.raises(BrokenSegmentError):
        append(writer, 3)
    writer.close()
    assert len(calls) == 1
    # The record was not acknowledged. A process that reads it from the page cache must not build on it.
    assert steps_of(journals.read(), writer.name) == [1]


def test_file_that_cannot_be_cut_keeps_its_whole_records(manifests, backend, caplog):
    faulty = FaultyBackend(backend)
    writer = journals_on(manifests, faulty).open_writer(previous=None)
    append(writer, 1)
    faulty.fault = Fault(1, sites=frozenset({"append.write", "append.truncate"}), for_ever=True)
    with pytest.raises(BackendError, match="injected"):
        append(writer, 2)
    assert "could not cut the journal" in caplog.text
    writer.close()
    journal = journals_on(manifests).read()
    assert backend.stat(writer.name.path).nbytes > writer.nbytes
    assert steps_of(journal, writer.name) == [1]
    assert journal.problems == {}, "a torn record is no damage"


def test_interrupted_append_breaks_the_writer(journals, monkeypatch):
    writer = journals.open_writer(previous=None)
    append(writer, 1)

    def interrupt(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fdatasync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        append(writer, 2)
    monkeypatch.undo()
    with pytest.raises(BrokenSegmentError):
        append(writer, 3)
    writer.close()
    assert steps_of(journals.read(), writer.name) == [1]


@pytest.mark.parametrize("site", ["create_append_file", "rename_new", "sync_folder"])
def test_segment_that_cannot_be_made_leaves_the_journal_as_it_was(manifests, backend, site):
    name, _ = write(journals_on(manifests), [1])
    faulty = FaultyBackend(backend, Fault(1, errno.ENOSPC, sites=frozenset({site}), for_ever=True))
    with pytest.raises(CapacityError):
        journals_on(manifests, faulty).open_writer(previous=None)
    assert backend.list_names("tmp") == []
    journals = journals_on(manifests)
    assert steps_of(journals.read(), name) == [1]
    assert not any(backend.is_locked(each.path) for each in journals.names())


# Torn and damaged files


def test_file_cut_at_any_byte_has_exactly_its_whole_records(journals, backend):
    name, _ = write(journals, [1, 2, 3])
    ends = [each.offset + each.head.nbytes for each in journals.read().records(name).records]
    near = {end + more for end in ends for more in range(-130, 131)}
    sizes = {*near, *range(SEGMENT_HEADER_NBYTES, ends[-1], 61), SEGMENT_HEADER_NBYTES}
    for nbytes in sorted((each for each in sizes if each <= ends[-1]), reverse=True):
        truncate(backend, name, nbytes)
        journal = journals.read()
        whole = sum(end <= nbytes for end in ends)
        assert len(journal.records(name).records) == whole, nbytes
        assert journal.problems == {}, nbytes
    for nbytes in range(0, SEGMENT_HEADER_NBYTES, 1000):
        truncate(backend, name, nbytes)
        journal = journals.read()
        assert isinstance(journal.problems[name], MalformedError)
        assert journal.segments == {}


def test_damaged_record_in_the_middle_is_reported_and_ends_the_segment(journals, backend, caplog):
    name, _ = write(journals, [1, 2, 3, 4])
    second = journals.read().records(name).records[1]
    damage(backend, name, second.offset + 30)
    journal = journals.read()
    assert steps_of(journal, name) == [1]
    problem = journal.problems[name]
    assert isinstance(problem, ChecksumError)
    assert (problem.number, problem.number_behind) == (2, 3)
    assert "record 2 of a journal is damaged" in caplog.text


def test_damaged_first_record_is_reported(journals, backend):
    name, _ = write(journals, [1, 2])
    damage(backend, name, SEGMENT_HEADER_NBYTES)
    journal = journals.read()
    assert journal.tip(name) is None
    assert journal.problems[name].number == 1


def test_damaged_and_foreign_files_do_not_hide_other_segments(journals, manifests, backend):
    name, _ = write(journals, [1, 2])
    broken, _ = write(journals, [3])
    damage(backend, broken, 100)
    for file in ("notes.txt", "00000001.ckj", f"1.{'0' * 32}.ckj", f"00000009.{'0' * 32}.ckj.tmp"):
        backend.create(f"{FOLDER}/{file}", b"foreign", sync=False)
    backend.make_folder(f"{FOLDER}/more")
    empty = SegmentName("main", 9, bytes(16))
    backend.create(empty.path, b"", sync=False)
    journal = journals.read()
    assert list(journal.segments) == [name]
    assert set(journal.problems) == {broken, empty}
    assert steps_of(journal, name) == [1, 2]
    assert journals.open_writer(previous=None).name.order == 10, "above damaged segments, too"


def put_segment(backend, name, content):
    backend.make_folder(FOLDER)
    backend.create(name.path, content, sync=False)
    return name


def test_segment_of_another_store_is_refused(journals, backend):
    name, _ = write(journals, [1])
    content = backend.read_bytes(name.path, nbytes_max=1 << 20)
    foreign = bytearray(content[:SEGMENT_HEADER_NBYTES])
    foreign[32:48] = bytes(16)
    token = b"\1" * 16
    foreign[48:64] = token
    content = sealed(bytes(foreign[:-8]), SEGMENT_HEADER_NBYTES) + content[SEGMENT_HEADER_NBYTES:]
    other = put_segment(backend, SegmentName("main", name.order, token), content)
    journal = journals.read()
    assert list(journal.segments) == [name]
    assert "belongs to store" in str(journal.problems[other])


def test_segment_under_another_name_is_refused(journals, backend):
    name, _ = write(journals, [1])
    content = backend.read_bytes(name.path, nbytes_max=1 << 20)
    copies = [SegmentName("main", name.order + 1, name.token), SegmentName("main", name.order, bytes(16))]
    for copy in copies:
        put_segment(backend, copy, content)
    journal = journals.read()
    assert list(journal.segments) == [name]
    for copy in copies:
        assert "another name than its header says" in str(journal.problems[copy])


def test_newer_segments_and_records_are_reported(journals, backend):
    name, _ = write(journals, [1, 2])
    newer, _ = write(journals, [3])
    second = journals.read().records(name).records[1]
    for segment, at, nbytes in ((name, second.offset, 128), (newer, 0, SEGMENT_HEADER_NBYTES)):
        content = bytearray(backend.read_bytes(segment.path, nbytes_max=1 << 20)[at : at + nbytes])
        content[8] = 200
        damage(backend, segment, at, sealed(bytes(content[:-8]), nbytes))
    journal = journals.read()
    assert list(journal.segments) == [name]
    assert isinstance(journal.problems[newer], UnsupportedError)
    assert steps_of(journal, name) == [1]
    assert isinstance(journal.problems[name], UnsupportedError)


def test_unreadable_disk_is_an_error_and_not_an_empty_journal(journals, manifests, backend):
    name, _ = write(journals, [1])
    for site in ("read_head", "open_read", "list_names"):
        faulty = FaultyBackend(backend, Fault(1, sites=frozenset({site}), for_ever=True))
        with pytest.raises(BackendError):
            journals_on(manifests, faulty).read().records(name)


def test_segment_that_is_removed_while_it_is_read_is_left_out(journals, backend):
    name, last = write(journals, [1])
    other, _ = write(journals, [2], previous=last)
    journal = journals.read()
    backend.unlink(other.path)
    assert journal.tip(other) is None
    assert journal.tip(name).place == last


# Chains


def test_chain_goes_on_over_segments(journals):
    _, last = write(journals, [1, 2])
    _, last = write(journals, [3], previous=last)
    name, _ = write(journals, [4, 5], previous=last)
    journal = journals.read()
    assert chain_of(journal, journal.tip(name)) == [5, 4, 3, 2, 1]
    assert [each.head.number for each in journal.backwards(journal.tip(name))] == [5, 4, 3, 2, 1]


def test_fork_of_a_chain_continues_the_restored_record(journals):
    first, _ = write(journals, [1, 2, 3])
    middle = journals.read().records(first).records[1]
    fork, _ = write(journals, [30, 31], previous=middle.place)
    journal = journals.read()
    assert chain_of(journal, journal.tip(fork)) == [31, 30, 2, 1]
    assert chain_of(journal, journal.tip(first)) == [3, 2, 1]


def test_two_writers_do_not_disturb_each_other(journals):
    writers = [journals.open_writer(previous=None) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda writer=writer, base=base: [append(writer, base + n) for n in range(20)])
        for writer, base in zip(writers, (100, 200), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal = journals.read()
    assert [steps_of(journal, writer.name) for writer in writers] == [
        [base + n for n in range(20)] for base in (100, 200)
    ]
    for writer in writers:
        writer.close()


def test_segment_without_records_stands_for_the_one_it_continues(journals):
    first, _ = write(journals, [1, 2, 3])
    middle = journals.read().records(first).records[1]
    empty, last = write(journals, [], previous=middle.place)
    journal = journals.read()
    assert last == middle.place
    assert journal.tip(empty).place == middle.place
    alone, last = write(journals, [])
    assert last is None
    assert journals.read().tip(alone) is None


def test_chain_ends_where_a_segment_is_missing(journals, backend):
    first, last = write(journals, [1, 2])
    second, _ = write(journals, [3, 4], previous=last)
    backend.unlink(first.path)
    journal = journals.read()
    assert chain_of(journal, journal.tip(second)) == [4, 3]
    assert journal.find(last) is None


def test_only_the_named_record_is_continued(journals):
    name, last = write(journals, [1, 2])
    journal = journals.read()
    for wrong in (
        with_changes(last, record_id=b"w" * 16),
        with_changes(last, number=1),
        with_changes(last, number=3),
        with_changes(last, number=0),
        with_changes(last, token=b"w" * 16),
    ):
        assert journal.find(wrong) is None
        with pytest.raises(ConflictError, match="is gone"):
            journals.open_writer(previous=wrong)
    assert journals.names() == [name]


def test_continued_record_is_synced_first():
    # A process may have been killed between its write and its sync. What it wrote is in the page cache only.
    disk = SimFS()
    manifests = make_store(disk)
    name, last = write(journals_on(manifests), [1])
    begin = len(disk.log)
    journals_on(manifests).open_writer(previous=last)
    mine = disk._node(name.path)
    kinds = [(op.kind, op.node) for op in disk.log[begin:]]
    assert ("sync data", mine) in kinds
    made = next(index for index, (kind, node) in enumerate(kinds) if kind == "entry" and node != mine)
    assert kinds.index(("sync data", mine)) < made
    begin = len(disk.log)
    journals_on(manifests).open_writer(previous=last, is_durable=True)
    assert ("sync data", mine) not in [(op.kind, op.node) for op in disk.log[begin:]]


def test_segments_of_equal_order_are_ordered_by_token(journals, backend, manifests):
    # Two processes may have listed the folder before either had its segment.
    names = []
    for token in (b"\2" * 16, b"\1" * 16):
        facts = SegmentRecord(run="main", order=5, after_seq=None, time_ns=1, previous=None, first=1, environment={})
        content = encode_segment(Segment(manifests.store_id, token, facts))
        names.append(put_segment(backend, SegmentName("main", 5, token), content))
    assert journals.names() == names[::-1]
    assert list(journals.read().segments) == names[::-1]


def test_impossible_chain_of_segments_ends(journals, backend, manifests):
    # Two headers that name each other cannot be written by accident, and must not hang a reader.
    tokens = (b"\1" * 16, b"\2" * 16)
    for token, other in (tokens, tokens[::-1]):
        place = RecordPlace(token=other, number=4, record_id=b"r" * 16)
        facts = SegmentRecord(run="main", order=5, after_seq=None, time_ns=1, previous=place, first=5, environment={})
        put_segment(backend, SegmentName("main", 5, token), encode_segment(Segment(manifests.store_id, token, facts)))
    journal = journals.read()
    assert [journal.tip(name) for name in journal.segments] == [None, None]


# Waiting


class SteppingClock:
    """A clock that moves when somebody sleeps, and does something then."""

    def __init__(self, on_sleep=lambda clock: None):
        self.seconds = 0.0
        self._on_sleep = on_sleep

    def now_ns(self):
        return int(self.seconds * 1e9)

    def monotonic(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds
        self._on_sleep(self)


def test_reader_waits_until_the_writer_has_ended(journals, manifests):
    writer = journals.open_writer(previous=None)
    append(writer, 1)

    def on_sleep(clock):
        if clock.seconds > 1:
            append(writer, 2)
            writer.close()

    clock = SteppingClock(on_sleep)
    waiting = journals_on(manifests, clock=clock)
    waiting.wait_for_writer(seconds=10)
    assert 1 < clock.seconds < 2
    assert steps_of(waiting.read(), writer.name) == [1, 2]


def test_reader_gives_up_at_its_deadline(journals, manifests):
    writer = journals.open_writer(previous=None)
    clock = SteppingClock()
    with pytest.raises(ConflictError, match="still writes the journal"):
        journals_on(manifests, clock=clock).wait_for_writer(seconds=3)
    assert 3 <= clock.seconds < 3.5
    writer.close()


def test_nothing_is_waited_for_where_nobody_writes(journals, manifests, backend):
    clock = SteppingClock()
    waiting = journals_on(manifests, clock=clock)
    waiting.wait_for_writer(seconds=0)
    old = journals.open_writer(previous=None)
    write(journals, [1])
    waiting.wait_for_writer(seconds=0)
    assert clock.seconds == 0
    old.close()
    assert not backend.is_locked(old.name.path)


def test_file_system_without_locks_has_a_journal_all_the_same(journals, backend, monkeypatch):
    def refuse(fd, how):
        raise OSError(errno.ENOSYS, "no flock")

    monkeypatch.setattr("fcntl.flock", refuse)
    name, _ = write(journals, [1])
    assert not backend.is_locked(name.path)
    journals.wait_for_writer(seconds=0)
    assert steps_of(journals.read(), name) == [1]
