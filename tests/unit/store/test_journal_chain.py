"""Protects the choice of a point and of its keyframes: no acknowledged state is passed over for an older one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ckstore.format.journal import structure_of
from ckstore.store.journal_chain import Entry, entry_of
from support.journals import append, journals_on, make_store, put_entry
from support.simfs import SimFS

DENSE, SPARSE = (structure_of(b"tree", tensors) for tensors in (b"dense", b"sparse"))


class History:
    """A run that is written as trainers do it: points and checkpoints, by one process after another."""

    def __init__(self):
        self.backend = SimFS()
        self.manifests = make_store(self.backend)
        self.journals = journals_on(self.manifests)
        self.entries = []
        self.structures = {}
        self.asked = []
        self.writer = None

    def start(self, previous=None):
        """Another process begins a segment."""
        self.writer = self.journals.open_writer(previous=previous)

    def points(self, *steps, structure=DENSE):
        for step in steps:
            append(self.writer, step, structure=structure)

    def entry(self, step, *, structure=DENSE, **facts):
        """A checkpoint is published."""
        seq = max((each.seq for each in self.entries), default=-1) + 1
        put_entry(self.manifests, seq, step)
        self.entries.append(Entry(seq, step, **facts))
        self.structures[seq] = structure
        return self.entries[-1]

    def keyframe(self, step, **facts):
        """A commit is recorded and published."""
        self.points(step)
        return self.entry(step, **facts)

    def drop(self, *entries):
        for entry in entries:
            self.entries.remove(entry)

    def structure_of(self, entry):
        self.asked.append(entry.seq)
        return self.structures[entry.seq]

    def newest(self):
        found = self.journals.read().newest(self.entries, self.structure_of)
        return found if found is None or isinstance(found, Entry) else found.head.step

    def point(self, step):
        """Return the newest record of a step."""
        journal = self.journals.read()
        return next(
            record
            for name in reversed(journal.segments)
            for record in reversed(journal.records(name).records)
            if record.head.step == step
        )

    def keyframes(self, step):
        found = self.journals.read().keyframes(self.point(step), self.entries, self.structure_of)
        return [(each.entry.seq, [record.head.step for record in each.replayed]) for each in found]


@pytest.fixture
def history():
    return History()


# Keyframes


def test_keyframes_come_nearest_first_with_what_is_replayed(history):
    history.start()
    first = history.keyframe(100)
    history.points(101, 102)
    second = history.keyframe(103)
    history.points(104, 105)
    assert history.keyframes(105) == [(second.seq, [104, 105]), (first.seq, [101, 102, 103, 104, 105])]
    assert history.keyframes(102) == [(first.seq, [101, 102])]
    assert history.keyframes(100) == [(first.seq, [])]


def test_keyframe_has_step_and_structure_of_a_record(history):
    history.start()
    right = history.keyframe(100)
    history.points(101, 102)
    history.entry(101, structure=SPARSE)
    history.entry(999)
    assert history.keyframes(102) == [(right.seq, [101, 102])]
    assert 2 not in history.asked, "no manifest of another step is read"


def test_lossy_checkpoint_is_no_keyframe_and_archival_one_is(history):
    history.start()
    history.points(100, 101, 102)
    archival = history.entry(100, is_archival=True)
    history.entry(101, is_exact=False)
    assert history.keyframes(102) == [(archival.seq, [101, 102])]


def test_unreadable_checkpoint_is_no_keyframe(history):
    history.start()
    first = history.keyframe(100)
    second = history.keyframe(101)
    history.structures[second.seq] = None
    assert history.keyframes(101) == [(first.seq, [101])]


def test_keyframes_are_found_in_earlier_segments(history):
    history.start()
    keyframe = history.keyframe(100)
    history.points(101, 102, 103)
    history.start(history.point(102).place)
    history.points(103, 104)
    assert history.keyframes(104) == [(keyframe.seq, [101, 102, 103, 104])]


def test_own_keyframe_comes_before_one_of_another_branch(history):
    history.start()
    first = history.keyframe(100)
    other = history.keyframe(101)
    history.start(history.point(100).place)
    own = history.keyframe(101)
    history.points(102)
    assert history.keyframes(102) == [(own.seq, [102]), (other.seq, [102]), (first.seq, [101, 102])]


def test_a_checkpoint_made_before_the_record_before_is_of_another_branch(history):
    history.start()
    first = history.keyframe(100)
    history.points(101, 102)
    # The time of a record here is its step.
    history.entry(102, time_ns=100)
    history.start(history.point(100).place)
    history.points(101, 102, 103)
    assert history.keyframes(103) == [(first.seq, [101, 102, 103])]
    published = history.entry(103, time_ns=100)
    assert history.keyframes(103)[0] == (published.seq, [])


# The newest state


def test_newest_of_nothing_is_nothing(history):
    assert history.newest() is None


def test_newest_without_journal_is_the_latest_checkpoint(history):
    history.entry(1)
    latest = history.entry(2)
    history.entry(1, is_archival=True)
    assert history.newest() == latest


def test_point_after_its_keyframe_is_newest(history):
    history.start()
    history.keyframe(100)
    history.points(101, 102)
    assert history.newest() == 102


def test_keyframe_is_taken_instead_of_its_own_record(history):
    history.start()
    history.keyframe(100)
    keyframe = history.keyframe(101)
    assert history.newest() == keyframe


def test_points_without_keyframe_do_not_exist(history):
    history.start()
    history.points(100, 101)
    assert history.newest() is None
    history.entry(100)
    assert history.newest() == 101


def test_keyframe_that_is_published_late_hides_no_points(history):
    history.start()
    history.keyframe(100)
    history.points(101, 102, 103)
    history.entry(101)
    assert history.newest() == 103


def test_checkpoint_of_a_later_process_is_newer_than_points(history):
    history.start()
    history.keyframe(100)
    history.points(101, 102)
    latest = history.entry(150)
    assert history.newest() == latest


def test_points_of_a_later_process_are_newer_than_its_restored_checkpoint(history):
    history.entry(10)
    history.entry(20)
    history.start()
    # It restored step 10, and goes on from there.
    history.keyframe(11)
    history.points(12)
    assert history.newest() == 12


def test_restored_point_is_continued(history):
    history.start()
    history.keyframe(100)
    history.points(101, 102, 103)
    history.start(history.point(101).place)
    assert history.newest() == 101, "a rewind to a point"
    history.points(102)
    assert history.newest() == 102
    assert history.point(102).head.number == 3


def test_new_chain_counts_when_its_keyframe_is_published(history):
    history.start()
    history.keyframe(100)
    history.points(101, 102)
    history.start()
    history.points(50, 51)
    assert history.newest() == 102
    history.entry(50)
    assert history.newest() == 51


def test_lossy_commit_within_a_chain_hides_no_points(history):
    history.start()
    history.keyframe(100)
    history.points(101)
    history.keyframe(102, is_exact=False)
    assert history.newest() == 102, "the point is exact, the checkpoint is not"
    history.points(103)
    assert history.newest() == 103


def test_rewind_to_a_keyframe_is_newer_than_the_points_after_it(history):
    history.start()
    history.keyframe(100)
    history.points(101, 102)
    rewound = history.entry(100, is_rewound=True)
    assert history.newest() == rewound


def test_rewound_checkpoint_is_newer_even_if_its_original_is_gone(history):
    history.start()
    original = history.keyframe(100)
    history.points(101, 102)
    rewound = history.entry(100, is_rewound=True)
    history.drop(original)
    assert history.newest() == rewound


def test_same_step_of_a_later_process_is_newer(history):
    # A process without a journal has restored step 100, and commits step 101 again.
    history.start()
    history.keyframe(100)
    history.keyframe(101)
    history.points(102, 103)
    latest = history.entry(101)
    assert history.newest() == latest


def test_earlier_step_of_a_later_process_is_newer(history):
    history.start()
    history.keyframe(100)
    history.points(101)
    history.keyframe(102)
    history.points(103)
    latest = history.entry(101)
    assert history.newest() == latest


def test_step_that_is_committed_twice_hides_no_points(history):
    history.start()
    history.keyframe(100)
    history.keyframe(100)
    history.points(101, 102)
    assert history.newest() == 102


def test_checkpoints_of_an_abandoned_branch_do_not_count(history):
    history.start()
    history.keyframe(100)
    history.points(101)
    history.keyframe(102)
    history.start(history.point(100).place)
    history.keyframe(101)
    history.points(102, 103)
    assert history.newest() == 103


def test_archival_checkpoint_is_never_newest(history):
    history.start()
    history.keyframe(100)
    history.points(101)
    history.entry(500, is_archival=True)
    assert history.newest() == 101


def test_damaged_end_of_the_newest_segment_leaves_what_is_before_it(history):
    history.start()
    history.keyframe(100)
    history.points(101, 102)
    record = history.point(101)
    node = history.backend._node(record.segment.path)
    history.backend._write(node, record.offset + 40, b"\xff\xff", call="damage")
    journal = history.journals.read()
    found = journal.newest(history.entries, history.structure_of)
    assert isinstance(found, Entry), "the state of the record before it"
    assert found.step == 100
    assert record.segment in journal.problems


def test_segments_newer_than_the_answer_are_read_and_older_ones_are_not(history):
    history.start()
    history.keyframe(100)
    history.start(history.point(100).place)
    history.keyframe(101)
    history.points(102)
    journal = history.journals.read()
    assert journal.newest(history.entries, history.structure_of).head.step == 102
    assert len(journal._records) == 1
    assert history.asked == [1], "each manifest is read once"


def test_entry_tells_rewound_checkpoints_from_demoted_ones():
    header = SimpleNamespace(
        seq=3,
        step=5,
        is_archival=False,
        fidelity="exact",
        origin_id=None,
        generation=0,
        may_be_in_replay_form=False,
        time_ns=9,
    )
    assert entry_of(header) == Entry(3, 5, time_ns=9)

    def changed(**facts):
        return entry_of(SimpleNamespace(**{**vars(header), **facts}))

    assert changed(fidelity="residual", generation=1, origin_id=b"o" * 32) == Entry(3, 5, is_exact=False, time_ns=9)
    assert changed(origin_id=b"o" * 32).is_rewound
    assert changed(origin_id=b"o" * 32, generation=2).is_rewound, "moved to a tier"
    assert changed(origin_id=b"o" * 32, fidelity="residual").is_rewound
    assert not changed(origin_id=b"o" * 32, is_archival=True).is_rewound, "undeleted"
    in_replay_form = changed(origin_id=b"o" * 32, generation=1, may_be_in_replay_form=True)
    assert in_replay_form == Entry(3, 5, is_archival=True, time_ns=9), (
        "it has no bytes, so it is neither rewound nor the latest"
    )
