"""Protects appending to a journal: a record is whole and durable on return, and a failed append does no damage."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest

from ckstore.errors import (
    BackendError,
    CapacityError,
    MalformedError,
    UnreachableError,
    UnsupportedError,
    UsageError,
)
from ckstore.format import paths
from ckstore.io import local_append
from ckstore.io.local import LocalBackend
from ckstore.io.memory import MemoryBackend
from ckstore.ops.inspect.doctor import diagnose_store
from ckstore.store.segment_writer import BrokenSegmentError
from support.faults import Fault, FaultyBackend
from support.journals import FOLDER, append, journals_on, make_store, put_entry, steps_of, write


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
    manifests.limits = replace(manifests.limits, manifest_nbytes_max=100)
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


def test_folder_of_journals_is_part_of_a_store(journals, backend):
    write(journals, [1])
    backend.make_folder("elsewhere")
    findings = {each.topic: each.found for each in diagnose_store(backend.root)}
    assert findings["foreign files"] == "elsewhere"


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


@pytest.mark.parametrize(
    ("site", "at"), [("create_append_file", 1), ("rename_new", 1), ("sync_folder", 1), ("sync_folder", 3)]
)
def test_segment_that_cannot_be_made_leaves_the_journal_as_it_was(manifests, backend, site, at):
    name, _ = write(journals_on(manifests), [1])
    faulty = FaultyBackend(backend, Fault(at, errno.ENOSPC, sites=frozenset({site}), for_ever=True))
    with pytest.raises(CapacityError):
        journals_on(manifests, faulty).open_writer(previous=None)
    assert backend.list_names("tmp") == []
    journals = journals_on(manifests)
    assert journals.names() == [name]
    assert steps_of(journals.read(), name) == [1]
