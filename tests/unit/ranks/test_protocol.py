"""Protects what the search of interleavings does not look for: texts, wrong messages, and limits of the protocol."""

from __future__ import annotations

import pytest

from ckstore.format.error_records import ErrorRecord
from ckstore.hashing import digest_of
from ckstore.ranks.actions import Finish, LookUp, Merge, Plan, Send, attempt_id
from ckstore.ranks.member import Member
from ckstore.ranks.messages import (
    Abort,
    Agreed,
    Ask,
    Awaited,
    Begin,
    Content,
    Done,
    Failed,
    Joining,
    Left,
    More,
    Part,
    SaverLost,
    Staged,
    Wanted,
    Write,
)
from ckstore.ranks.protocol import Coordinator

CONTENT = b"what a rank holds"
RECORD = ErrorRecord("CapacityError", "the disk is full", "packs/ab", "free some", {"errno": 28})


def begin(number=1, *, step=100, facts=None, is_async=False):
    return Begin(number, step, is_async, {"run": "main"} if facts is None else facts, (digest_of(CONTENT),))


def failures(actions):
    """Return the ranks that get Failed, and the error."""
    sent = [action for action in actions if isinstance(action, Send) and isinstance(action.message, Failed)]
    assert len({action.message.error.what for action in sent}) == 1
    return [action.rank for action in sent], sent[0].message.error


def joined(world, **options):
    """Return a coordinator whose ranks have begun commit 1, and have sent what they hold."""
    coordinator = Coordinator(world, **options)
    for rank in range(world):
        coordinator.joined(rank)
        actions = coordinator.received(rank, begin(), 0.0)
    assert actions == [Send(0, Wanted(1, (digest_of(CONTENT),)))]
    [plan] = coordinator.received(0, Content(1, digest_of(CONTENT), CONTENT), 0.0)
    assert plan == Plan(1, ((digest_of(CONTENT),),) * world, {digest_of(CONTENT): CONTENT})
    return coordinator


def test_attempt_ids_are_fixed():
    # They are stored: a rank of a restarted job must not find those of another job.
    assert attempt_id(b"token", 1).hex() == "0fdd7bc0e5267242842d541683fc473f"
    assert len({attempt_id(token, number) for token in (b"a", b"b") for number in range(100)}) == 200


def test_many_absent_ranks_are_counted():
    coordinator = Coordinator(100, join_seconds=60.0)
    for rank in range(50):
        coordinator.joined(rank)
    coordinator.received(3, begin(), 10.0)
    assert coordinator.tick(69.9) == []
    ranks, error = failures(coordinator.tick(70.0))
    assert ranks == [3]
    text = "ranks 0, 1, 2, 4, 5, 6, 7, 8 and 91 more did not begin the commit of step 100 within 60 s"
    assert error.what == f"{text}, and 50 ranks never connected, rank 50 first"


def test_late_rank_gets_the_same_error():
    coordinator = Coordinator(2)
    coordinator.received(0, begin(), 0.0)
    _, error = failures(coordinator.tick(60.0))
    assert failures(coordinator.received(1, begin(), 61.0)) == ([1], error)
    assert failures(coordinator.received(1, Abort(1, 100, RECORD), 62.0)) == ([1], error)


def test_rank_that_is_far_behind_is_named():
    coordinator = Coordinator(2)
    for number in range(1, 40):
        coordinator.received(0, Abort(number, 100, RECORD), 0.0)
    ranks, error = failures(coordinator.received(1, begin(1), 0.0))
    assert ranks == [1]
    assert error.what.startswith("rank 1 is behind the other ranks")


def test_too_many_commits_in_flight_are_refused():
    coordinator = Coordinator(2)
    assert coordinator.received(1, begin(1), 0.0) == coordinator.received(1, begin(2), 0.0) == []
    ranks, error = failures(coordinator.received(1, begin(3), 0.0))
    assert (ranks, error.what) == ([1], "rank 1 sent Begin out of turn")


@pytest.mark.parametrize(
    "message",
    [
        begin(),
        Content(1, digest_of(CONTENT), CONTENT),
        Part(1, 0, b"too early"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_message_out_of_turn_fails_the_commit_and_names_the_rank(message):
    coordinator = joined(3)
    ranks, error = failures(coordinator.received(2, message, 0.0))
    assert ranks == [0, 1, 2]
    assert error.what == f"rank 2 sent {type(message).__name__} out of turn"


def test_content_that_is_not_that_of_the_digest_is_refused():
    coordinator = Coordinator(1)
    coordinator.received(0, begin(), 0.0)
    _, error = failures(coordinator.received(0, Content(1, digest_of(CONTENT), b"other"), 0.0))
    assert error.what == "rank 0 sent Content out of turn"


def test_different_facts_name_values_and_ranks():
    for first, second, text in [
        ({"run": "a"}, {"run": "b"}, "run is a on rank 0 and b on rank 1"),
        ({"run": "a", "policy": "x"}, {"run": "a"}, "policy is x on rank 0 and not set on rank 1"),
    ]:
        coordinator = Coordinator(2)
        coordinator.received(1, begin(facts=second), 0.0)
        ranks, error = failures(coordinator.received(0, begin(facts=first), 0.0))
        assert (ranks, error.kind) == ([0, 1], "UsageError")
        assert error.what == f"the ranks do not commit the same: {text}"
    coordinator = Coordinator(2)
    coordinator.received(0, begin(is_async=True), 0.0)
    _, error = failures(coordinator.received(1, begin(), 0.0))
    assert error.what.endswith("call is commit_async on rank 0 and commit on rank 1")


def test_error_of_a_rank_names_it():
    coordinator = joined(2)
    ranks, error = failures(coordinator.received(1, Abort(1, 100, RECORD), 0.0))
    assert ranks == [0, 1]
    assert error == RECORD._replace(where="rank 1: packs/ab", facts={"errno": 28, "rank": 1})


def test_same_spans_are_sent_once():
    coordinator, member = joined(1), Member(0)
    member.begin(begin())
    [first] = coordinator.planned(1, [b"spans"])
    assert first.message == Write(1, b"spans")
    assert member.received(first.message) == [Write(1, b"spans")]
    [merge] = coordinator.received(0, Part(1, 0, b"part"), 0.0)
    assert merge == Merge(1, 0, {0: b"part"})
    coordinator.merged(1)
    assert coordinator.published(1, b"receipt") == [Send(0, Done(1, b"receipt"))]
    assert member.received(Done(1, b"receipt")) == [Finish(1, b"receipt", None, None)]
    member.begin(begin(2))
    # The content is known, too.
    [plan] = coordinator.received(0, begin(2), 0.0)
    assert plan.contents == {}
    [second] = coordinator.planned(2, [b"spans"])
    assert second.message == Write(2, None)
    assert member.received(second.message) == [Write(2, b"spans")]


def test_answers_of_rank_0_for_ended_commits_are_ignored():
    coordinator = joined(1)
    coordinator.received(0, Abort(1, 100, RECORD), 0.0)
    for late in (
        coordinator.planned(1, [b""]),
        coordinator.merged(1),
        coordinator.more(1, {0: b""}),
        coordinator.published(1, b""),
        coordinator.failed(1, RECORD),
        coordinator.decided("topic", 1, b""),
        coordinator.received(0, Staged(1), 0.0),
    ):
        assert late == []


def test_member_without_rank_0_neither_sends_nor_receives():
    member = Member(1)
    member.begin(begin())
    member.received(Write(1, b"spans"))
    member.part(1, b"part")
    member.ask("step", 1, b"")
    look, answer = member.lost("closed its connection")
    assert look == LookUp(1)
    assert answer.error.what == "rank 0 closed its connection before it answered 'step'"
    assert isinstance(answer, Agreed)
    for ignored in (
        member.received(More(1, 1, b"more")),
        member.received(Done(1, b"receipt")),
        member.staged(1),
        member.contents(1, {b"": b""}),
        member.part(1, b"part"),
        member.abort(1, 100, RECORD),
        member.lost("closed it again"),
    ):
        assert ignored == []
    [finish] = member.not_found(1)
    assert finish.error.what == (
        "rank 0 closed its connection before it acknowledged the commit of step 100, which was not in the store then"
    )
    assert member.found(1, b"receipt") == member.not_found(1) == []


def test_second_ask_is_refused_and_the_first_goes_on():
    coordinator = Coordinator(2)
    coordinator.received(1, Ask("step", 1, b"1"), 0.0)
    [refused] = coordinator.received(1, Ask("step", 1, b"1"), 0.0)
    assert refused.message.error.what == "rank 1 sent Ask out of turn"
    [decide] = coordinator.received(0, Ask("step", 1, b"0"), 0.0)
    assert decide.values == (b"0", b"1")
    answers = coordinator.decided("step", 1, b"1")
    assert answers == [Send(rank, Agreed("step", 1, b"1", None, None)) for rank in range(2)]


def test_content_is_asked_for_again_after_a_plan_that_failed():
    coordinator = joined(2)
    coordinator.failed(1, RECORD)
    for rank in range(2):
        actions = coordinator.received(rank, begin(2), 0.0)
    assert actions == [Send(0, Wanted(2, (digest_of(CONTENT),)))]
    coordinator.received(0, Content(2, digest_of(CONTENT), CONTENT), 0.0)
    coordinator.planned(2, [b"", b""])
    coordinator.received(1, Abort(2, 100, RECORD), 0.0)
    for rank in range(2):
        actions = coordinator.received(rank, begin(3), 0.0)
    assert actions == [Plan(3, ((digest_of(CONTENT),),) * 2, {})]


def test_a_rank_that_has_joined_is_waited_for_while_it_captures():
    coordinator = Coordinator(2, join_seconds=60.0)
    coordinator.joined(1)
    assert coordinator.received(1, Joining(1, 100), 0.0) == []
    assert coordinator.received(0, begin(), 59.0) == []
    assert coordinator.tick(600.0) == []
    [wanted] = coordinator.received(1, begin(), 700.0)
    assert wanted == Send(0, Wanted(1, (digest_of(CONTENT),)))


def test_a_rank_whose_trainer_is_lost_has_little_time_to_join():
    coordinator = Coordinator(3, join_seconds=60.0)
    coordinator.received(0, Joining(1, 100), 0.0)
    coordinator.received(1, Joining(1, 100), 0.0)
    assert coordinator.received(0, Left(2, "closed its connection"), 10.0) == []
    assert coordinator.received(0, Left(2, "is noticed again"), 12.0) == []
    assert coordinator.tick(12.9) == []
    ranks, error = failures(coordinator.tick(13.0))
    assert ranks == [0, 1]
    assert error.what == "rank 2 closed its connection: the commit of step 100 failed on all ranks"
    # Its saver may come later, and gets the same error.
    assert failures(coordinator.received(2, begin(), 13.1)) == ([2], error)
    # It joins no later commit, and nobody waits for that.
    assert coordinator.received(1, Joining(2, 101), 50.0) == []
    assert coordinator.tick(52.9) == []
    assert failures(coordinator.tick(53.0))[0] == [1]


def test_a_rank_that_has_lost_its_saver_may_join_the_next_commit():
    coordinator = Coordinator(2, join_seconds=60.0, after_loss="commit again")
    coordinator.received(0, Joining(1, 100), 0.0)
    assert coordinator.received(0, Left(1, "has lost its saver", 2), 10.0) == []
    assert coordinator.tick(12.9) == []
    ranks, error = failures(coordinator.tick(13.0))
    assert ranks == [0]
    assert error.what == "rank 1 has lost its saver: the commit of step 100 failed on all ranks"
    assert error.todo == "commit again"
    # Its next saver has as much time as any other.
    coordinator.received(0, Joining(3, 101), 20.0)
    assert coordinator.tick(50.0) == []
    # Later reports count.
    coordinator.received(0, Left(1, "has lost its saver again", 4), 50.0)
    coordinator.received(0, Left(1, "an old report", 2), 51.0)
    assert coordinator.tick(52.9) == []
    assert failures(coordinator.tick(53.0))[1].what.startswith("rank 1 has lost its saver again: ")
    # The loss of its trainer counts for good.
    coordinator.received(0, Left(1, "closed its connection"), 60.0)
    coordinator.received(0, Left(1, "has lost its saver", 6), 60.0)
    coordinator.received(0, Joining(7, 102), 70.0)
    assert coordinator.tick(72.9) == []
    assert failures(coordinator.tick(73.0))[1].what.startswith("rank 1 closed its connection: ")


def test_rank_0_passes_on_that_a_trainer_has_lost_its_saver():
    coordinator = Coordinator(3)
    lost = SaverLost(4, 1, "handle 0", "has lost its saver")
    assert coordinator.received(1, Left(1, "has lost its saver", 4, "handle 0"), 0.0) == [Send(0, lost), Send(2, lost)]
    assert Member(2).received(lost) == [lost]
    # No commit of the trainers waits less for this rank.
    coordinator.received(0, Joining(1, 100), 0.0)
    assert coordinator.tick(50.0) == []


def test_a_saver_that_has_joined_outlives_its_trainer():
    coordinator = joined(3)
    for rank in range(3):
        coordinator.received(rank, Left((rank + 1) % 3, "closed its connection"), 0.0)
    assert coordinator.tick(50.0) == []
    assert coordinator.planned(1, [b""] * 3)[0] == Send(0, Write(1, b""))


def test_a_rank_that_has_joined_and_is_lost_fails_the_commit():
    coordinator = Coordinator(3)
    coordinator.received(0, begin(), 0.0)
    coordinator.received(1, Joining(1, 100), 0.0)
    coordinator.received(2, Joining(1, 100), 0.0)
    ranks, error = failures(coordinator.lost(1, "closed its connection"))
    assert ranks == [0, 2]
    assert "rank 1" in error.what


def test_a_commit_that_fails_during_the_capture_ends_once():
    member = Member(1)
    member.join(1, 100)
    [finish] = member.received(Failed(1, 0, RECORD))
    assert isinstance(finish, Finish)
    assert member.begin(begin()) == []
    assert member.abort(1, 100, RECORD) == []
    assert member.begin(begin(2)) == [Send(0, begin(2))]


def test_ranks_that_are_missing_for_a_while_get_a_message_who_has_begun():
    coordinator = Coordinator(3, join_seconds=60.0)
    coordinator.received(1, Joining(1, 100, "handle 0", 4), 0.0)
    assert coordinator.tick(0.9) == []
    assert coordinator.tick(1.0) == [Send(rank, Awaited(1, 100, 1, "handle 0", 4)) for rank in (0, 2)]
    assert coordinator.tick(59.0) == []
    ranks, _ = failures(coordinator.tick(60.0))
    assert ranks == [1]


def test_savers_that_are_missing_get_no_message():
    coordinator = Coordinator(2, join_seconds=60.0)
    coordinator.received(1, Joining(1, 100), 0.0)
    assert coordinator.tick(30.0) == []


def test_ranks_that_called_commit_async_a_different_number_of_times_are_named():
    coordinator = Coordinator(2)
    coordinator.received(1, Joining(1, 100, "handle 0", 4), 0.0)
    ranks, error = failures(coordinator.received(0, Joining(1, 100, "handle 0", 5), 0.0))
    assert (ranks, error.kind, error.facts) == ([0, 1], "UsageError", {"ranks": ["0", "1"], "background_calls": 5})
    assert error.what == "rank 0 called commit_async where rank 1 called commit for step 100"


def test_a_member_ignores_that_others_wait_for_a_commit_that_it_has_begun():
    member = Member(1)
    waiting = Awaited(1, 100, 0, "handle 0", 0)
    assert member.received(waiting) == [waiting]
    member.join(1, 100)
    assert member.received(waiting) == []


def test_a_rank_that_asks_less_often_than_the_others_is_late():
    coordinator = Coordinator(2, join_seconds=60.0)
    coordinator.received(0, Ask("restore", 1, b""), 0.0)
    coordinator.tick(60.0)
    coordinator.received(0, Ask("restore", 2, b""), 61.0)
    [answer] = coordinator.received(1, Ask("restore", 1, b""), 62.0)
    assert answer.message.error.what == "rank 1 is behind the other ranks, for which this call has ended"
    assert answer.message.error.todo == "make the same calls in the same order on every rank"


def test_what_to_do_after_a_loss_is_said_by_both_sides():
    coordinator, member = Coordinator(2, after_loss="commit again"), Member(1, after_loss="commit again")
    coordinator.received(0, begin(), 0.0)
    member.begin(begin())
    member.ask("restore", 1, b"")
    _, error = failures(coordinator.lost(1, "closed its connection"))
    finish, answer = member.lost("closed its connection")
    assert {error.todo, finish.error.todo, answer.error.todo} == {"commit again"}


def test_a_lost_call_is_named():
    coordinator = Coordinator(2)
    coordinator.received(0, Ask("restore", 1, b""), 0.0)
    [answer] = coordinator.lost(1, "closed its connection")
    assert answer.message.error.what == "rank 1 closed its connection: the call 'restore' failed on all ranks"


def test_the_rank_that_was_lost_first_is_named():
    coordinator = Coordinator(4)
    coordinator.lost(3, "closed its connection")
    coordinator.lost(1, "has closed its store")
    _, error = failures(coordinator.received(2, begin(), 0.0))
    assert error.what.startswith("rank 3 closed its connection")
