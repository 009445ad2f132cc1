"""Protects the files of a journal: an acknowledged record is found again, and nothing else ends up in a chain."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

import ckstore
from ckstore._testing import repository_of
from ckstore.errors import (
    BackendError,
    ChecksumError,
    ConflictError,
    MalformedError,
    UnsupportedError,
)
from ckstore.format.journal import SEGMENT_HEADER_NBYTES, Segment, encode_segment, structure_of
from ckstore.format.logical import row_of
from ckstore.format.paths import SegmentName
from ckstore.format.records import RecordPlace, SegmentRecord, encode_inner, with_changes
from ckstore.format.tree import encode_tree
from ckstore.format.wire import sealed
from ckstore.io.local import LocalBackend
from ckstore.state.capture import capture, loaded_adapters
from ckstore.store.journal_chain import entry_of
from ckstore.store.journals import structures_of
from ckstore.store.refs import headers_newest_first
from support.faults import Fault, FaultyBackend
from support.journals import FOLDER, append, chain_of, journals_on, make_store, steps_of, write
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


def damage(backend, name, at, content=b"\xff"):
    with Path(backend.location_of(name.path)).open("r+b") as file:
        file.seek(at)
        file.write(content)


def truncate(backend, name, nbytes):
    os.truncate(backend.location_of(name.path), nbytes)


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


# Checkpoints


@pytest.fixture
def committed(backend):
    """A run in which a state was committed by the trainer and by its saver; its manifests, and the captured state."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
    tied = [model[0].weight, model[0].weight[1:]]
    state = {"model": model, "optimizer": optimizer, "random": torch.get_rng_state(), "tied": tied, "step": 7}
    with ckstore.open(backend) as store:
        store.commit(state, 7)
        store.commit_async(state, 8)
        store.wait()
        yield repository_of(store).manifests, capture(state, loaded_adapters())


def test_checkpoint_has_the_structure_of_its_state(committed):
    manifests, captured = committed
    rows = [row_of(tensor) for tensor in captured.tensors]
    wanted = structure_of(encode_tree(captured.tree), encode_inner(rows))
    headers = headers_newest_first(manifests)
    assert [header.step for header in headers] == [8, 7]
    assert [structures_of(manifests)(entry_of(header)) for header in headers] == [wanted, wanted]


def test_damaged_or_dropped_checkpoint_has_no_structure(committed, backend, caplog):
    manifests, _ = committed
    newest, older = (entry_of(header) for header in headers_newest_first(manifests))
    damage(backend, manifests.listing().names[-1], 600)
    backend.unlink(manifests.listing().names[0].path)
    assert structures_of(manifests)(newest) is None
    assert "is no keyframe" in caplog.text
    assert structures_of(manifests)(older) is None


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
