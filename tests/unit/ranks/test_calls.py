"""A rank notices that it has called ``commit_async`` where another one called ``commit``, and only then."""

from __future__ import annotations

from ckstore.ranks.calls import Calls
from ckstore.ranks.messages import Awaited, SaverLost

TEXT = "rank 1 called commit_async where rank 0 called commit for step 50"


def test_the_call_may_come_before_or_after_the_other_rank_waits():
    calls = Calls(1, "handle 0")
    calls.begin_background()
    assert calls.await_by(Awaited(1, 50, 0, "handle 0", 0)).what == TEXT
    calls = Calls(1, "handle 0")
    assert calls.await_by(Awaited(1, 50, 0, "handle 0", 0)) is None
    calls.begin_background()
    other, record = calls.take_missed()
    assert (other.number, record.what) == (1, TEXT)
    # That commit has failed.
    calls.begin_background()
    assert calls.take_missed() is None


def test_a_rank_that_is_behind_is_waited_for():
    calls = Calls(1, "handle 0")
    # The other rank has committed twice in the background, and waits in the commit that follows.
    assert calls.await_by(Awaited(1, 50, 0, "handle 0", 2)) is None
    for _ in range(2):
        calls.begin_background()
        assert calls.take_missed() is None
    calls.begin(1)
    # This commit has ended.
    calls.begin_background()
    assert calls.take_missed() is None
    assert calls.await_by(Awaited(2, 60, 0, "handle 0", 3)) is None


def test_a_notice_that_crosses_the_call_is_ignored():
    calls = Calls(1, "handle 0")
    calls.begin(1)
    assert calls.await_by(Awaited(1, 50, 0, "handle 0", 0)) is None
    calls.begin_background()
    assert calls.take_missed() is None


def test_the_loss_of_a_saver_is_reported_also_if_it_came_before_the_first_background_commit():
    calls, reports = Calls(1, "handle 0"), []
    assert calls.note(SaverLost(1, 2, "handle 0", "has lost its saver")) is None
    calls.call_when_saver_lost(lambda *report: reports.append(report))
    calls.note(SaverLost(2, 0, "handle 0", "has lost its saver"))
    assert reports == [(2, "has lost its saver", 1), (0, "has lost its saver", 2)]
