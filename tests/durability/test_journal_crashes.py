"""Protects a journal against power cuts, SIGKILL and failing calls: no acknowledged record is lost, none is made up.

Every state that a power cut can leave of the recorded writes and syncs is read. The records of each segment are a
prefix of those that were appended, and every acknowledged record is there, with its whole chain. Each negative control
leaves out one sync and must fail.
"""

from __future__ import annotations

import errno
import os
import random
import signal

import pytest

from ckstore.errors import CkstoreError
from ckstore.format.journal import check_record
from ckstore.io.local import LocalBackend
from ckstore.store.journals import Journals
from support.crash_states import CheckedStates, crash_states
from support.faults import WRITE_ERRNOS, Fault, FaultyBackend, SyncSkippingBackend
from support.journals import append, chain_of, journals_on, make_store, manifests_on
from support.simfs import SimAppendFile, SimFS

SEED = 41
PAYLOADS = (bytes(range(256)) * 6, b"z" * 700)

pytestmark = [pytest.mark.usefixtures("quiet_log"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def disk():
    return SimFS()


@pytest.fixture
def manifests(disk):
    return make_store(disk)


class Run:
    """What a run has appended, in order, and what of it was acknowledged."""

    def __init__(self, appended=(), note=lambda place: None):
        self.appended = dict(appended)
        self.acknowledged = []
        self._note = note

    def open(self, journals, previous=None, **options):
        return journals.open_writer(previous=previous, **options)

    def append(self, writer, step):
        steps = self.appended.setdefault(writer.name, [])
        steps.append(step)
        append(writer, step, payloads=PAYLOADS)
        self.acknowledged.append(writer.last)
        self._note(writer.last)

    def check(self, journals, acknowledged):
        """Read the journal as the next process does, and compare it with what was appended."""
        journal = journals.read()
        for name in journal.segments:
            found = [record.head.step for record in journal.records(name).records]
            assert found == self.appended.get(name, [])[: len(found)], f"{name.file}: {found}"
            file = journal.open_segment(name)
            for record in journal.records(name).records:
                check_record(file.read_at, record.placed)
        for place in acknowledged:
            record = journal.find(place)
            assert record is not None, f"record {place.number} was acknowledged"
            assert len(chain_of(journal, record)) == place.number, "its whole chain"
        return journal


def losses(disk, manifests, run, *, samples=60, stop_at=None):
    """Check the states of the recorded disk, up to a number of losses; return how many, and the losses in words."""
    found, checked = [], CheckedStates()
    for state in crash_states(disk, seed=SEED, samples=samples):
        if not checked.is_new(state):
            continue
        journals = Journals(manifests_on(manifests, state.disk))
        try:
            journal = run.check(journals, state.marks)
            names = list(journal.segments)
            tip = journal.tip(names[-1]) if names else None
            # The next process goes on, whatever it found.
            later = Run(run.appended)
            later.append(later.open(journals, None if tip is None else tip.place), 999)
            later.check(journals, [*state.marks, *later.acknowledged])
        except (CkstoreError, AssertionError, LookupError) as error:
            found.append(f"cut after {state.point} of {len(disk.log)} steps, {state.label}: {error!r}")
            if len(found) == stop_at:
                break
    return len(checked), found


def write_two_processes(backend, manifests, run):
    """One process writes a chain, another one restores its second record and continues it."""
    journals = journals_on(manifests, backend)
    first = run.open(journals)
    for step in (1, 2, 3):
        run.append(first, step)
    middle = run.acknowledged[1]
    first.close()
    second = run.open(journals, middle)
    for step in (3, 4):
        run.append(second, step)
    third = run.open(journals, second.last, is_durable=True)
    run.append(third, 5)


def recorded(disk, manifests, wrap=lambda disk: disk, write=write_two_processes):
    disk = disk.settled()
    run = Run(note=disk.note)
    write(wrap(disk), manifests_on(manifests, disk), run)
    return disk, run


def test_power_cut_loses_no_acknowledged_record(disk, manifests, note):
    disk, run = recorded(disk, manifests)
    count, found = losses(disk, manifests, run)
    note(f"power cuts of a journal: seed {SEED}, {len(disk.log)} steps, {count} different disks")
    assert found == []
    assert count > 500


@pytest.mark.parametrize("skipped", ["append data", "folder journals", "folder "])
def test_power_cut_finds_a_missing_sync(disk, manifests, skipped):
    disk, run = recorded(disk, manifests, lambda disk: SyncSkippingBackend(disk, [skipped]))
    _, found = losses(disk, manifests, run, samples=5, stop_at=1)
    assert found


def test_records_that_share_a_block_can_be_lost(disk, manifests, monkeypatch):
    # Appending the next record rewrites the block in which the last one ends, and a power cut may damage it.
    monkeypatch.setattr("ckstore.format.journal.RECORD_ALIGN", 64)
    disk, run = recorded(disk, manifests)
    _, found = losses(disk, manifests, run, samples=100, stop_at=1)
    assert any("was acknowledged" in line for line in found)


class Killed(BaseException):
    """The process is killed here."""


def write_after_a_kill(backend, manifests, run):
    """A process is killed between a write and its sync; the next one finds that record, restores and continues it."""
    journals = journals_on(manifests, backend)
    writer = run.open(journals)
    run.append(writer, 1)
    with pytest.MonkeyPatch.context() as patch:

        def die(self, *nothing):
            raise Killed

        patch.setattr(SimAppendFile, "sync", die)
        patch.setattr("ckstore.store.segment_writer.SegmentWriter._break", lambda *nothing: None)
        with pytest.raises(Killed):
            run.append(writer, 2)
    journal = journals.read()
    tip = journal.tip(writer.name)
    assert tip.head.step == 2, "the record is in the page cache"
    second = run.open(journals, tip.place)
    run.append(second, 3)


def test_record_that_was_never_synced_can_be_continued(disk, manifests):
    disk, run = recorded(disk, manifests, write=write_after_a_kill)
    _, found = losses(disk, manifests, run, samples=20)
    assert found == []


def test_continuing_a_record_without_a_sync_would_lose_records(disk, manifests):
    disk, run = recorded(disk, manifests, lambda disk: SyncSkippingBackend(disk, ["file data"]), write_after_a_kill)
    _, found = losses(disk, manifests, run, samples=5, stop_at=1)
    assert found


@pytest.mark.parametrize("number", WRITE_ERRNOS)
def test_failing_call_loses_no_acknowledged_record(disk, manifests, number):
    """Each call in turn fails, a power cut follows, and the next process goes on."""
    at, failed = 0, 0
    while True:
        at += 1
        own = disk.settled()
        run = Run(note=own.note)
        backend = FaultyBackend(own, Fault(at, number))
        try:
            write_two_processes(backend, manifests_on(manifests, own), run)
        except CkstoreError:
            failed += 1
        if not backend.disturbed:
            break
        run.check(Journals(manifests_on(manifests, own)), run.acknowledged)
        for state in crash_states(own, seed=SEED, samples=2, points={len(own.log)}):
            journals = Journals(manifests_on(manifests, state.disk))
            run.check(journals, state.marks)
            if state.label == "all names, bytes kept":
                write_two_processes(state.disk, manifests_on(manifests, state.disk), run)
                run.check(journals, run.acknowledged)
    assert failed > 20


def test_file_is_not_synced_after_its_sync_has_failed(disk, manifests):
    own = disk.settled()
    backend = FaultyBackend(own, Fault(2, errno.EIO, sites=frozenset({"append.sync"})))
    run = Run(note=own.note)
    writer = run.open(journals_on(manifests_on(manifests, own), backend))
    run.append(writer, 1)
    for step in (2, 3):
        with pytest.raises(CkstoreError):
            run.append(writer, step)
    lost = next(index for index, op in enumerate(own.log) if op.kind == "lose data")
    assert [op.kind for op in own.log[lost:] if op.node == own.log[lost].node] == ["lose data", "cut"]
    _, found = losses(own, manifests, run, samples=20)
    assert found == []


def test_killed_writer_loses_no_acknowledged_record(tmp_path, note):
    """A child appends to a real folder and is killed while it writes."""
    rng = random.Random(SEED)
    backend = LocalBackend(tmp_path / "store", engine="pwrite")
    manifests = make_store(backend)
    journals, previous, acknowledged, torn = journals_on(manifests), None, [], 0
    for _ in range(12):
        reader, sender = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                writer = journals.open_writer(previous=previous)
                payload = random.Random(os.getpid()).randbytes(300_000)
                for step in range(10_000):
                    append(writer, step, payloads=(payload,))
                    os.write(sender, f"{writer.last.number} {writer.last.record_id.hex()}\n".encode())
            finally:
                os._exit(1)
        os.close(sender)
        with os.fdopen(reader, "rb") as lines:
            answers = [lines.readline() for _ in range(rng.randint(1, 8))]
            os.kill(pid, signal.SIGKILL)
            answers += lines.readlines()
        os.waitpid(pid, 0)
        journals.wait_for_writer(seconds=10)
        journal = journals.read()
        assert journal.problems == {}
        name = list(journal.segments)[-1]
        found = {(record.head.number, record.head.record_id.hex()) for record in journal.records(name).records}
        acknowledged = [tuple(line.decode().split()) for line in answers if line.endswith(b"\n")]
        assert acknowledged
        for number, record_id in acknowledged:
            assert (int(number), record_id) in found
        torn += journal.records(name).nbytes > journal.records(name).end
        tip = journal.tip(name)
        assert len(chain_of(journal, tip)) == tip.head.number
        previous = tip.place
    note(f"killed writers of a journal: 12, of which {torn} left a torn record")
    backend.close()
