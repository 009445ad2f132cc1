"""The saver's side: it commits what is staged exactly as a synchronous commit would, and reports every error.

It holds the lease for its trainer, and cannot be led astray by what it does not understand. What is true of its process
is in ``tests/integration/background/test_saver_process.py``.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore._testing import repository_of
from ckstore.background import protocol
from ckstore.background.arena import STAGED
from ckstore.config import MIB, Policy
from ckstore.errors import ConflictError, CorruptError, MalformedError, NotFoundError, SaverError
from ckstore.format import paths
from ckstore.processes import process_started
from ckstore.store.orphans import SaverPurpose
from support.saver_harness import noise, restored
from support.served_saver import LONG_MS, ServedSaver

# What is committed


def test_state_that_passed_through_the_saver_is_restored_bit_for_bit(served, address):
    state = {"w": np.random.default_rng(1).standard_normal((300, 500)), "n": [1, (None, "text")], "e": np.zeros((0, 3))}
    receipt = served.commit(state, 7)
    back = restored(address)
    assert np.array_equal(back["w"], state["w"])
    assert back["n"] == state["n"]
    assert back["e"].shape == (0, 3)
    assert (receipt.step, receipt.seq, receipt.bytes_state) == (7, 0, state["w"].nbytes)
    assert {"plan", "write", "flush", "publish", "verify", "total"} <= receipt.seconds.keys()


def test_saver_writes_what_a_synchronous_commit_writes(served, address, tmp_path):
    states = [noise(seed, 3 * MIB, 3) | {"seed": seed, "same": np.arange(1000)} for seed in range(3)]
    states[2]["w0"] = states[1]["w0"] + 1
    with ckstore.open(tmp_path / "other") as store:
        by_hand = [store.commit(state, step) for step, state in enumerate(states)]
    receipts = [served.commit(state, step, parent_ticket=step) for step, state in enumerate(states)]
    for ours, theirs in zip(receipts, by_hand, strict=True):
        assert (ours.bytes_written, ours.chunks_new, ours.chunks_delta, ours.chunks_reused) == (
            theirs.bytes_written,
            theirs.chunks_new,
            theirs.chunks_delta,
            theirs.chunks_reused,
        )
    assert receipts[2].chunks_delta > 0


def test_metrics_tags_and_parents_arrive(served, address):
    first = served.begin({"a": np.arange(9)}, 1, metrics={"loss": 0.5}, tags=["best"]).stage().finish()
    first.wait()
    second = served.begin({"a": np.arange(8)}, 2, parent_ticket=first.number).stage().finish().wait()
    served.begin({"a": np.arange(7)}, 3, parent=0).stage().finish().wait()
    with ckstore.open(address) as store:
        assert store.tags() == {"best": 0}
        assert store.info("best").metrics == {"loss": 0.5}
        assert [info.parent for info in store.log()] == [0, 0, None]
    assert second.warnings == ()


def test_ticket_whose_parent_failed_has_the_parent_s_parent(served, address):
    served.commit({"a": np.arange(9)}, 1)
    given_up = served.begin({"a": np.arange(8)}, 2, parent=0).abort()
    with pytest.raises(SaverError, match="given up by the trainer"):
        given_up.wait()
    served.commit({"a": np.arange(7)}, 3, parent_ticket=given_up.number)
    with ckstore.open(address) as store:
        assert [(info.step, info.parent) for info in store.log()] == [(3, 0), (1, None)]


def test_tag_that_cannot_be_set_is_a_warning_of_a_durable_checkpoint(served, address):
    (Path(address) / "tags" / "main").mkdir(parents=True, exist_ok=True)
    (Path(address) / "tags" / "main" / "best").mkdir()
    receipt = served.commit({"a": np.arange(9)}, 1, tags=["best"])
    assert "tag 'best' was not set" in receipt.warnings[-1]
    (Path(address) / "tags" / "main" / "best").rmdir()
    assert restored(address)["a"].size == 9


def test_training_that_went_back_is_coded_against_where_it_went_back_to(served):
    # Nothing is known of a base that was followed long ago, so the bound on reading is what forbids to try it.
    policy = Policy(read_amplification_max=100)
    base = np.random.default_rng(0).standard_normal(MIB // 2).astype(np.float32)
    served.commit({"w": base}, 1, policy=policy)
    other = np.random.default_rng(1).standard_normal(MIB // 2).astype(np.float32)
    served.commit({"w": other}, 2, parent=0, policy=policy)
    receipt = served.commit({"w": base * np.float32(1.0000001)}, 3, parent=0, policy=policy)
    assert receipt.chunks_delta == receipt.chunks_new == 1


# The lease


def test_saver_holds_the_lease_for_its_trainer_until_it_is_asked_to_give_it_up(open_served, address):
    served = open_served(has_trainer=True)
    served.commit(noise(1), 1)
    trainer, path = served.trainer_pid, Path(address) / paths.lease_name("main")
    with ckstore.open(address) as store:
        holder = repository_of(store).lease.holder()
        assert (holder.pid, holder.process_started) == (os.getpid(), process_started(os.getpid()))
        assert SaverPurpose.of(holder.purpose) == SaverPurpose(trainer, process_started(trainer), 1)
        served.release_lease()
        assert not path.exists()
        store.commit(noise(2), 2)
    # What others wrote meanwhile is seen.
    receipt = served.commit(noise(2), 3)
    assert (receipt.seq, receipt.chunks_new) == (2, 0)


def test_purpose_of_the_lease_names_the_step_that_is_being_written(served, address):
    served.commit(noise(1), 1)
    begun = served.begin(noise(2), 22).stage(1)
    # Whoever starts again from then on is to know what it waits for.
    begun.hear(protocol.Began)
    with ckstore.open(address) as store:
        assert SaverPurpose.of(repository_of(store).lease.holder().purpose).step == 22
    begun.stage().finish().wait()


def test_lease_of_another_writer_is_a_conflict_and_no_death(served, address):
    with ckstore.open(address) as store:
        store.commit(noise(1), 1)
        begun = served.begin(noise(2), 2).stage().finish()
        with pytest.raises(ConflictError, match=f"pid {os.getpid()} ") as caught:
            begun.wait()
        assert caught.value.pid == os.getpid()
        assert begun.events == ["Failed", "SlotFree"]
    assert served.commit(noise(2), 3).seq == 1


def test_release_of_the_lease_waits_for_what_has_begun(served, address):
    begun = served.begin(noise(1), 1).stage(1)
    begun.hear(protocol.Began)
    question = served.ask(protocol.Release)
    served.settle()
    assert (Path(address) / paths.lease_name("main")).exists()
    begun.stage().finish().wait()
    served.hear(protocol.Answer, question=question)
    kinds = [type(each) for each in served.heard()]
    assert kinds.index(protocol.Done) < kinds.index(protocol.Answer)


# Errors


def test_error_of_a_commit_keeps_its_class_and_the_saver_goes_on(served, address, caplog):
    served.commit(noise(1), 1)
    packs = Path(address) / "packs"
    packs.rename(packs.with_name("gone"))
    packs.touch()
    begun = served.begin(noise(2), 2).stage().finish()
    with caplog.at_level(logging.ERROR, "ckstore"), pytest.raises((ckstore.CkstoreError, OSError)) as caught:
        begun.wait()
    assert not isinstance(caught.value, SaverError)
    assert "the commit of step 2 failed" in caplog.text
    packs.unlink()
    packs.with_name("gone").rename(packs)
    assert served.commit(noise(2), 2).step == 2


def test_store_that_is_not_there_is_reported_with_its_own_class(tmp_path):
    served = ServedSaver(tmp_path / "none")
    try:
        told = served.hear(protocol.Failed, ticket=0)
        assert told.kind == "NotFoundError"
        assert "no store here" in told.what
        assert served.code() == NotFoundError.exit_code
    finally:
        served.close()


def test_head_that_means_nothing_fails_its_ticket_only(served):
    bad = served.begin_nonsense()
    with pytest.raises(CorruptError, match="cannot be read"):
        bad.wait()
    assert served.commit(noise(1), 3).seq == 0


@pytest.mark.parametrize("reach", ["slot", "ticket"])
def test_head_that_is_not_where_it_should_be_fails_its_ticket_only(served, reach):
    slot = served.arena.slots[0]
    slot.reserve(MIB)
    slot.start(1 if reach == "slot" else 7, MIB)
    served.say(protocol.Begin(1, 0, 0, slot.nbytes + 1 if reach == "slot" else 100, None, 0))
    assert "is not in its slot" in served.hear(protocol.Failed, ticket=1).what
    served.hear(protocol.SlotFree, ticket=1)
    served.ticket = 1
    assert served.commit(noise(1), 3).seq == 0


NONSENSE = {
    "kind": b"\xff",
    "garbage": b"\1garbage",
    "direction": protocol.encode_message(protocol.Ready(1)),
    "twice": protocol.encode_message(protocol.Quit()) * 2,
    "another hello": protocol.encode_message(protocol.Hello(b"a", "main", "auto", 1, "", 0, 0)),
    "a ticket that is not new": protocol.encode_message(protocol.Begin(1, 1, 0, 1, None, 0)),
    "a slot that is not there": protocol.encode_message(protocol.Begin(9, 5, 0, 1, None, 0)),
    "a slot that is not free": protocol.encode_message(protocol.Begin(9, 0, 0, 1, None, 0)),
}


@pytest.mark.parametrize("packet", NONSENSE.values(), ids=NONSENSE)
def test_message_that_means_nothing_ends_the_connection_loudly(served, address, caplog, packet):
    served.commit(noise(1), 1)
    begun = served.begin(noise(2), 2).stage(1)
    begun.hear(protocol.Began)
    with caplog.at_level(logging.ERROR, "ckstore"):
        served.end.send(packet)
        with pytest.raises(SaverError, match="because the trainer died before it was staged"):
            begun.wait()
        assert served.code() == MalformedError.exit_code
    assert "received an invalid message and ends" in caplog.text
    assert not (Path(address) / paths.lease_name("main")).exists()
    with ckstore.open(address) as store:
        assert store.steps() == [1]


def test_state_that_was_whole_is_published_although_its_saver_held_back_when_it_heard_nonsense(served, address):
    served.commit(noise(0), 0)
    begun = served.begin(noise(1), 1, start_delay_ms=LONG_MS).stage()
    begun.slot.state = STAGED
    served.end.send(b"\1garbage")
    assert begun.wait().step == 1
    assert served.code() == MalformedError.exit_code
    with ckstore.open(address) as store:
        assert store.steps() == [0, 1]


# The trainer's death


def test_state_that_is_not_whole_when_the_trainer_dies_is_given_up(open_served, address):
    served = open_served(has_trainer=True)
    begun = served.begin(noise(1), 1).stage(1)
    begun.hear(protocol.Began)
    # Its socket stays open, as it does where a child of it lives on.
    served.kill_trainer()
    with pytest.raises(SaverError, match="the trainer died before it was staged"):
        begun.wait()
    assert served.code() == SaverError.exit_code
    assert restored_steps(address) == []


@pytest.mark.parametrize("is_said", [False, True], ids=["every byte", "every byte, and that it is all"])
def test_state_outlives_its_trainer_only_if_the_trainer_has_said_that_it_is_whole(open_served, address, is_said):
    served = open_served(has_trainer=True)
    begun = served.begin(noise(1), 1).stage()
    begun.hear(protocol.Began)
    if is_said:
        begun.slot.state = STAGED
    served.kill_trainer()
    served.code()
    assert restored_steps(address) == ([1] if is_said else [])


def test_state_does_not_outlive_its_trainer_if_its_slot_is_another_ticket_s(open_served, address):
    served = open_served(has_trainer=True)
    begun = served.begin(noise(1), 1).stage()
    begun.hear(protocol.Began)
    served.arena.slots[0].start(2, MIB)
    served.arena.slots[0].state = STAGED
    served.kill_trainer()
    with pytest.raises(SaverError, match="the trainer died"):
        begun.wait()
    served.code()
    assert restored_steps(address) == []


def restored_steps(address):
    with ckstore.open(address) as store:
        return store.steps()
