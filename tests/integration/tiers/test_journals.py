"""Protects the points of a journal in tiers and mirrors: each comes back with its bits, and no copy is ever torn."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch

import ckstore
from ckstore.errors import ConflictError, CorruptError
from ckstore.io.local import LocalBackend
from ckstore.io.url import backend_for
from ckstore.store import segment_copies
from ckstore.store.journal_chain import Journal
from ckstore.store.journals import Journals
from ckstore.store.listing import log_of_store
from ckstore.store.manifests import Manifests
from ckstore.store.segment_copies import check_segment
from support.journaled_runs import JournaledRun
from support.journals import append, steps_of

STEPS = 8
KEYFRAMES = (1, 6)


def bits(state):
    found = {name: tensor.clone() for name, tensor in state["model"].items()}
    for index, each in state["optimizer"]["state"].items():
        found |= {f"{index}.{name}": value.clone() for name, value in each.items() if value is not None}
    return {name: tensor.numpy().tobytes() for name, tensor in found.items()}


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """A store with a journal of two keyframes, and the bits of each step."""
    place = tmp_path_factory.mktemp("journal") / "store"
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    expected = {}
    with ckstore.open(place) as store:
        store.journal(optimizer, keyframe_every=5)
        for step in range(1, STEPS + 1):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            expected[step] = bits(state)
            store.commit_async({"model": model, "optimizer": optimizer}, step).result()
    return place, expected


@pytest.fixture
def trained(history, folder):
    """A copy of that store for one test, and the bits of each step."""
    shutil.copytree(history[0], folder, dirs_exist_ok=True)
    return history[1]


def assert_points(place, expected, steps=range(1, STEPS + 1)):
    with ckstore.open(place, create=False) as store:
        assert store.steps() == list(steps)
        for step in steps:
            assert bits(store.restore(step)) == expected[step], step
        assert store.verify("decode").is_clean


def test_points_of_a_mirror_are_restored(trained, folder, place):
    with ckstore.open(folder) as store:
        report = store.mirror(place)
        assert report.points_copied == STEPS
        assert report.runs[0].points_copied == STEPS
        assert store.mirror(place).points_copied == 0
    assert_points(place, trained)


def test_a_store_is_made_again_from_its_mirror(trained, folder, place, tmp_path):
    with ckstore.open(folder) as store:
        store.mirror(place)
    shutil.rmtree(folder)
    with ckstore.open(place, create=False) as copy:
        copy.mirror(str(tmp_path / "again"))
    assert_points(tmp_path / "again", trained)


def test_points_follow_their_checkpoint_into_a_tier(trained, folder, place):
    with ckstore.open(folder) as store:
        planned = store.push(place, keep_local=1, dry_run=True)
        report = store.push(place, keep_local=1)
        assert planned.points_copied == report.points_copied > 0
        assert store.gc(now=True).freed_nbytes > 0
    assert_points(folder, trained)
    with ckstore.open(place, create=False) as there:
        steps = there.steps()
        assert steps[:5] == [1, 2, 3, 4, 5]
    assert_points(place, trained, steps)
    with ckstore.open(folder) as store:
        store.push(place, keep_local=0)
        assert store.push(place, keep_local=0).points_copied == 0
    assert_points(place, trained)


def test_a_pull_brings_missing_points(trained, folder, place):
    with ckstore.open(folder) as store:
        store.push(place, keep_local=0)
    shutil.rmtree(folder / "journals")
    with ckstore.open(folder) as store:
        assert store.steps() == list(KEYFRAMES)
        assert store.pull([1], dry_run=True).points_copied >= 5
        report = store.pull()
        assert report.points_copied == STEPS
        assert store.pull().points_copied == 0
    assert_points(folder, trained)


@pytest.fixture
def run(folder):
    made = JournaledRun(folder)
    yield made
    made.stop()
    made.store.close()


def journals_at(run, place):
    manifests = run.repository.manifests
    there = Manifests(backend_for(place), "main", store_id=manifests.store_id, limits=manifests.limits)
    return Journals(there)


def steps_at(run, place):
    """Return the steps of the records in a place, by the order of their segment; each is checked byte by byte."""
    journal = journals_at(run, place).read()
    return {name.order: steps_of(journal, name) for name in journal.segments}


def content_of(run, name):
    return Path(run.repository.backend.location_of(name.path)).read_bytes()


def change(run, name, offset, content):
    with Path(run.repository.backend.location_of(name.path)).open("r+b") as file:
        file.seek(offset)
        file.write(content)


def offsets_of(run, name):
    return [record.offset for record in run.journals.read().records(name).records]


def test_a_growing_segment_is_replaced_as_a_whole(run, place):
    run.start()
    run.keyframe(1)
    run.points(2)
    assert run.store.mirror(place).points_copied == 2
    run.points(3, 4)
    report = run.store.mirror(place, read_back=True)
    assert (report.points_copied, report.packs_copied) == (2, 0)
    assert report.journal_bytes_copied == run.writer.nbytes
    assert steps_at(run, place) == {1: [1, 2, 3, 4]}


def test_a_torn_end_is_not_copied(run, place):
    name, _ = run.segment(1, 2, 3)
    last = offsets_of(run, name)[-1]
    change(run, name, last + 300, b"torn")
    assert run.store.mirror(place).points_copied == 2
    assert steps_at(run, place) == {1: [1, 2]}


def test_damage_is_not_copied_and_does_not_stop_others(run, place):
    damaged, _ = run.segment(1, 2, 3)
    run.segment(4, 5)
    change(run, damaged, offsets_of(run, damaged)[1] + 300, b"damage")
    with pytest.raises(CorruptError, match=f"not copied: 1 segment.*{damaged.file}.*repair") as caught:
        run.store.mirror(place)
    assert caught.value.report.points_copied == 2
    assert steps_at(run, place) == {2: [4, 5]}


def test_a_segment_with_a_damaged_header_is_named(run, place):
    damaged, _ = run.segment(1, 2)
    change(run, damaged, 8, b"x")
    for copy in (run.store.mirror, lambda there: run.store.push(there, keep_local=0)):
        with pytest.raises(CorruptError, match=damaged.file):
            copy(place)


def test_a_longer_copy_stays(run, place):
    """The store was set back, or the last record was never acknowledged."""
    name, _ = run.segment(1, 2, 3)
    run.store.mirror(place)
    begin = offsets_of(run, name)[-1]
    with Path(run.repository.backend.location_of(name.path)).open("r+b") as file:
        file.truncate(begin)
    assert run.store.mirror(place).points_copied == 0
    assert steps_at(run, place) == {1: [1, 2, 3]}


@pytest.mark.parametrize("is_cut", [True, False])
def test_another_file_of_the_name_is_not_replaced(run, place, is_cut):
    name, _ = run.segment(1, 2)
    run.store.mirror(place)
    other = content_of(run, name)[:-1000] if is_cut else b"other".ljust(4096, b"\0")
    there = backend_for(place)
    there.unlink(name.path)
    there.create(name.path, other, sync=True)
    with pytest.raises(ConflictError, match=name.file):
        run.store.mirror(place)
    assert there.read_bytes(name.path, nbytes_max=1 << 20) == other


def test_the_longer_of_two_concurrent_copies_stays(run, place, monkeypatch):
    """Another mirror copies more records while this one writes."""
    run.start()
    run.keyframe(1)
    run.store.mirror(place)
    run.points(2)
    send, done = segment_copies._send, []

    def send_after_the_other(sink, pieces, is_wanted):
        if not done:
            done.append(True)
            run.points(3)
            run.store.mirror(place)
        return send(sink, pieces, is_wanted)

    monkeypatch.setattr(segment_copies, "_send", send_after_the_other)
    assert run.store.mirror(place).points_copied == 0
    assert steps_at(run, place) == {1: [1, 2, 3]}


def test_points_without_a_keyframe_there_are_not_copied(run, place):
    run.segment(1, 2)
    run.segment(3, 4)
    pack = run.store.contents(3).packs[0]
    Path(run.repository.backend.location_of(f"packs/{pack.pack_id[:2]}/{pack.pack_id}.pack")).unlink()
    with pytest.raises(CorruptError):
        run.store.mirror(place)
    assert steps_at(run, place) == {1: [1, 2]}


def test_a_set_back_store_takes_no_points_of_its_former_self(run, place):
    run.segment(1, 2)
    last = run.segment(3, 4)[0]
    run.store.push(place, keep_local=0)
    Path(run.repository.backend.location_of(last.path)).unlink()
    assert run.store.pull().points_copied == 0
    assert [name.order for name in run.segments()] == [1]


def test_collections_remove_segments_with_their_keyframes(run, place):
    run.segment(1, 2)
    run.segment(3, 4)
    run.segment(5, 6)
    run.store.push(place, keep_local=0)
    run.store.delete(1)
    run.store.gc(min_age=0)
    assert [name.order for name in run.segments()] == [2, 3]
    assert run.store.gc_tier(min_age=0).segments == {}, "it can still be brought back"
    run.store.gc(now=True, min_age=0)
    assert run.store.gc_tier().segments == {}, "it is young"
    planned = run.store.gc_tier(min_age=0, dry_run=True).segments
    assert [name.order for name in planned] == [1]
    assert sorted(steps_at(run, place)) == [1, 2, 3]
    assert run.store.gc_tier(min_age=0).segments == planned
    assert steps_at(run, place) == {2: [3, 4], 3: [5, 6]}


def test_a_tier_keeps_segments_that_the_store_needs(run, place):
    """The next push would copy it again."""
    run.segment(1, 2)
    run.start()
    run.keyframe(11)
    run.points(12)
    run.keyframe(13)
    run.stop()
    run.store.push(place, keep_local=1)
    run.store.delete(1)
    run.store.delete(11)
    run.store.gc(now=True, min_age=0)
    assert [name.order for name in run.segments()] == [2]
    assert [name.order for name in run.store.gc_tier(min_age=0).segments] == [1]


def test_a_tier_keeps_segments_that_only_it_has(run, folder, place):
    first, _ = run.segment(1, 2)
    run.segment(3, 4)
    run.store.push(place, keep_local=0)
    Path(run.repository.backend.location_of(first.path)).unlink()
    assert run.store.gc_tier(min_age=0).segments == {}
    assert run.store.pull().points_copied == 2
    assert steps_at(run, folder) == {1: [1, 2], 2: [3, 4]}


def test_verify_reads_journals_in_tiers_on_request(run, place):
    name, _ = run.segment(1, 2)
    run.store.push(place, keep_local=0)
    there = backend_for(place)
    content = bytearray(content_of(run, name))
    content[offsets_of(run, name)[0] + 300] ^= 1
    there.unlink(name.path)
    there.create(name.path, bytes(content), sync=True)
    assert run.store.verify("read").is_clean
    report = run.store.verify("read", remote=True)
    assert [damage.where.startswith(there.location_of(name.path)) for damage in report.damage] == [True]
    assert (report.segment_count, report.point_count) == (2, 4)


def test_checks_of_a_segment_need_few_requests(run, place, monkeypatch):
    """A record has many frames, each with a header of its own."""
    run.start()
    run.keyframe(1)
    append(run.writer, 2, payloads=[bytes([number]) * 50 for number in range(200)], structure=run.structure)
    run.store.mirror(place)
    (name,) = run.segments()
    file = backend_for(place).open_read(name.path)
    counts = []
    read_at = file.read_at
    monkeypatch.setattr(type(file), "read_at", lambda self, *each: counts.append(each) or read_at(*each))
    journal = journals_at(run, place).read()
    check_segment(
        file, journal.segments[name], run.writer.last, nbytes=run.writer.nbytes,
        limits=run.repository.limits, where="there",
    )  # fmt: skip
    file.close()
    assert len(counts) < 10


def test_a_mirror_reads_nothing_that_was_copied_before(run, place, monkeypatch):
    for step in (1, 11, 21):
        run.segment(step, step + 1, previous=run.writer and run.writer.last)
    run.store.mirror(place)
    opened = []
    open_read = LocalBackend.open_read
    monkeypatch.setattr(
        LocalBackend, "open_read", lambda self, name: opened.append((self.root, name)) or open_read(self, name)
    )
    assert run.store.mirror(place).points_copied == 0
    assert [name for root, name in opened if root == place] == []
    # Heads only.
    assert len([name for _, name in opened if name.endswith(".ckj")]) == 3


def test_segments_in_a_bucket_are_read_concurrently(run, address, monkeypatch):
    for step in (1, 11, 21):
        run.segment(step, step + 1)
    run.store.mirror(address)
    together = threading.Barrier(3, timeout=60)
    records = Journal.records

    def records_of_three(self, name):
        if name not in self._records:
            together.wait()
        return records(self, name)

    monkeypatch.setattr(Journal, "records", records_of_three)
    assert [point.step for point in log_of_store(address)[0].entries[0].points] == [22]


def test_training_goes_on_in_a_mirror(trained, folder, tmp_path):
    copy = tmp_path / "copy"
    with ckstore.open(folder) as store:
        store.mirror(str(copy))
    shutil.rmtree(folder)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    with ckstore.open(copy) as store:
        store.journal(optimizer, keyframe_every=5)
        store.restore(into=state)
        assert store.restored.step == STEPS
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = bits({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        assert store.commit_async(state, STEPS + 1).result().point == STEPS + 1
    assert_points(copy, {**trained, STEPS + 1: expected}, range(1, STEPS + 2))
