"""Protects the saver's server: it commits staged states as a synchronous commit would, and reports every error.

It holds the lease for its trainer, and survives messages that it does not understand. Its process is tested in
``tests/integration/background/test_saver_process.py``.
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

# Commits


def test_saver_commit_restores_bit_for_bit(served, address):
    state = {"w": np.random.default_rng(1).standard_normal((300, 500)), "n": [1, (None, "text")], "e": np.zeros((0, 3))}
    receipt = served.commit(state, 7)
    back = restored(address)
    assert np.array_equal(back["w"], state["w"])
    assert back["n"] == state["n"]
    assert back["e"].shape == (0, 3)
    assert (receipt.step, receipt.seq, receipt.bytes_state) == (7, 0, state["w"].nbytes)
    assert {"plan", "write", "flush", "publish", "verify", "total"} <= receipt.seconds.keys()


def test_saver_writes_the_same_files_as_commit(served, address, tmp_path):
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


def test_metrics_tags_and_parents_are_stored(served, address):
    first = served.begin({"a": np.arange(9)}, 1, metrics={"loss": 0.5}, tags=["best"]).stage().finish()
    first.wait()
    second = served.begin({"a": np.arange(8)}, 2, parent_ticket=first.number).stage().finish().wait()
    served.begin({"a": np.arange(7)}, 3, parent=0).stage().finish().wait()
    with ckstore.open(address) as store:
        assert store.tags() == {"best": 0}
        assert store.info("best").metrics == {"loss": 0.5}
        assert [info.parent for info in store.log()] == [0, 0, None]
    assert second.warnings == ()


def test_failed_parent_is_replaced_by_its_parent(served, address):
    served.commit({"a": np.arange(9)}, 1)
    given_up = served.begin({"a": np.arange(8)}, 2, parent=0).abort()
    with pytest.raises(SaverError, match="given up by the trainer"):
        given_up.wait()
    served.commit({"a": np.arange(7)}, 3, parent_ticket=given_up.number)
    with ckstore.open(address) as store:
        assert [(info.step, info.parent) for info in store.log()] == [(3, 0), (1, None)]


def test_failed_tag_is_a_warning(served, address):
    (Path(address) / "tags" / "main").mkdir(parents=True, exist_ok=True)
    (Path(address) / "tags" / "main" / "best").mkdir()
    receipt = served.commit({"a": np.arange(9)}, 1, tags=["best"])
    assert "tag 'best' was not set" in receipt.warnings[-1]
    (Path(address) / "tags" / "main" / "best").rmdir()
    assert restored(address)["a"].size == 9


def test_commit_after_rollback_uses_the_restored_base(served):
    # An old base is no longer known, so the bound on reading forbids to try it.
    policy = Policy(read_amplification_max=100)
    base = np.random.default_rng(0).standard_normal(MIB // 2).astype(np.float32)
    served.commit({"w": base}, 1, policy=policy)
    other = np.random.default_rng(1).standard_normal(MIB // 2).astype(np.float32)
    served.commit({"w": other}, 2, parent=0, policy=policy)
    receipt = served.commit({"w": base * np.float32(1.0000001)}, 3, parent=0, policy=policy)
    assert receipt.chunks_delta == receipt.chunks_new == 1


# The lease


def test_saver_holds_the_lease_until_release(open_served, address):
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
    # Commits that others published meanwhile are read.
    receipt = served.commit(noise(2), 3)
    assert (receipt.seq, receipt.chunks_new) == (2, 0)


def test_lease_names_the_step_being_written(served, address):
    served.commit(noise(1), 1)
    begun = served.begin(noise(2), 22).stage(1)
    # A trainer that restarts from then on must know which step it waits for.
    begun.hear(protocol.Began)
    with ckstore.open(address) as store:
        assert SaverPurpose.of(repository_of(store).lease.holder().purpose).step == 22
    begun.stage().finish().wait()


def test_lease_of_another_writer_is_a_conflict(served, address):
    with ckstore.open(address) as store:
        store.commit(noise(1), 1)
        begun = served.begin(noise(2), 2).stage().finish()
        with pytest.raises(ConflictError, match=f"pid {os.getpid()} ") as caught:
            begun.wait()
        assert caught.value.pid == os.getpid()
        assert begun.events == ["Failed", "SlotFree"]
    assert served.commit(noise(2), 3).seq == 1


def test_release_waits_for_begun_tickets(served, address):
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


def test_commit_error_keeps_its_class(served, address, caplog):
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


def test_missing_store_is_reported_as_not_found(tmp_path):
    served = ServedSaver(tmp_path / "none")
    try:
        failed = served.hear(protocol.Failed, ticket=0)
        assert failed.kind == "NotFoundError"
        assert "no store here" in failed.what
        assert served.code() == NotFoundError.exit_code
    finally:
        served.close()


def test_malformed_head_fails_its_ticket_only(served):
    bad = served.begin_nonsense()
    with pytest.raises(CorruptError, match="cannot be read"):
        bad.wait()
    assert served.commit(noise(1), 3).seq == 0


@pytest.mark.parametrize("reach", ["slot", "ticket"])
def test_misplaced_head_fails_its_ticket_only(served, reach):
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
def test_malformed_message_ends_the_connection(served, address, caplog, packet):
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


def test_staged_state_is_published_after_malformed_message(served, address):
    served.commit(noise(0), 0)
    begun = served.begin(noise(1), 1, start_delay_ms=LONG_MS).stage()
    begun.slot.state = STAGED
    served.end.send(b"\1garbage")
    assert begun.wait().step == 1
    assert served.code() == MalformedError.exit_code
    with ckstore.open(address) as store:
        assert store.steps() == [0, 1]


# The trainer's death


def test_partial_state_of_dead_trainer_is_dropped(open_served, address):
    served = open_served(has_trainer=True)
    begun = served.begin(noise(1), 1).stage(1)
    begun.hear(protocol.Began)
    # The socket stays open, as it does when a child of the trainer survives.
    served.kill_trainer()
    with pytest.raises(SaverError, match="the trainer died before it was staged"):
        begun.wait()
    assert served.code() == SaverError.exit_code
    assert restored_steps(address) == []


@pytest.mark.parametrize("is_said", [False, True], ids=["every byte", "every byte, and that it is all"])
def test_state_survives_its_trainer_only_if_staged(open_served, address, is_said):
    served = open_served(has_trainer=True)
    begun = served.begin(noise(1), 1).stage()
    begun.hear(protocol.Began)
    if is_said:
        begun.slot.state = STAGED
    served.kill_trainer()
    served.code()
    assert restored_steps(address) == ([1] if is_said else [])


def test_state_in_a_reused_slot_is_dropped(open_served, address):
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
