"""The saver's side: it commits what is staged exactly as a synchronous commit would, and reports every error.

It never loads torch, holds the lease for its trainer, and cannot be led astray by what it does not understand.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.config import MIB, Policy
from ckstore.errors import ConflictError, NotFoundError, SaverError
from ckstore.format import layout
from ckstore.saver import messages
from ckstore.saver.arena import STAGED
from ckstore.saver.messages import send
from ckstore.store.lease_record import SaverPurpose
from ckstore.store.processes import process_started
from support.saver_desk import SECONDS_MAX, SOURCE, Desk, Handed, links, noise, restored, until

PLAIN = Policy(compression="none")


# What is committed


def test_state_that_passed_through_the_saver_is_restored_bit_for_bit(desk, address):
    state = {"w": np.random.default_rng(1).standard_normal((300, 500)), "n": [1, (None, "text")], "e": np.zeros((0, 3))}
    receipt = desk.commit(state, 7)
    back = restored(address)
    assert np.array_equal(back["w"], state["w"])
    assert back["n"] == state["n"]
    assert back["e"].shape == (0, 3)
    assert (receipt.step, receipt.seq, receipt.bytes_state) == (7, 0, state["w"].nbytes)
    assert {"plan", "write", "flush", "publish", "verify", "total"} <= receipt.seconds.keys()


def test_saver_writes_what_a_synchronous_commit_writes(desk, address, tmp_path):
    states = [noise(seed, 3 * MIB, 3) | {"seed": seed, "same": np.arange(1000)} for seed in range(3)]
    states[2]["w0"] = states[1]["w0"] + 1
    with ckstore.open(tmp_path / "other") as store:
        by_hand = [store.commit(state, step) for step, state in enumerate(states)]
    receipts = [desk.commit(state, step, parent_ticket=step) for step, state in enumerate(states)]
    for ours, theirs in zip(receipts, by_hand, strict=True):
        assert (ours.bytes_written, ours.chunks_new, ours.chunks_delta, ours.chunks_reused) == (
            theirs.bytes_written,
            theirs.chunks_new,
            theirs.chunks_delta,
            theirs.chunks_reused,
        )
    assert receipts[2].chunks_delta > 0


def test_metrics_tags_and_parents_arrive(desk, address):
    first = desk.begin({"a": np.arange(9)}, 1, metrics={"loss": 0.5}, tags=["best"]).stage().finish()
    first.wait()
    second = desk.begin({"a": np.arange(8)}, 2, parent_ticket=first.number).stage().finish().wait()
    desk.begin({"a": np.arange(7)}, 3, parent=0).stage().finish().wait()
    with ckstore.open(address) as store:
        assert store.tags() == {"best": 0}
        assert store.info("best").metrics == {"loss": 0.5}
        assert [info.parent for info in store.log()] == [0, 0, None]
    assert second.warnings == ()


def test_ticket_whose_parent_failed_has_the_parent_s_parent(desk, address):
    desk.commit({"a": np.arange(9)}, 1)
    given_up = desk.begin({"a": np.arange(8)}, 2, parent=0)
    desk.saver.abort(given_up.number)
    with pytest.raises(SaverError, match="given up by the trainer"):
        given_up.wait()
    desk.commit({"a": np.arange(7)}, 3, parent_ticket=given_up.number)
    with ckstore.open(address) as store:
        assert [(info.step, info.parent) for info in store.log()] == [(3, 0), (1, None)]


def test_tag_that_cannot_be_set_is_a_warning_of_a_durable_checkpoint(desk, address):
    (Path(address) / "tags" / "main").mkdir(parents=True, exist_ok=True)
    (Path(address) / "tags" / "main" / "best").mkdir()
    receipt = desk.commit({"a": np.arange(9)}, 1, tags=["best"])
    assert "tag 'best' was not set" in receipt.warnings[-1]
    (Path(address) / "tags" / "main" / "best").rmdir()
    assert restored(address)["a"].size == 9


def test_training_that_went_back_is_coded_against_where_it_went_back_to(desk):
    # Nothing is known of a base that was followed long ago, so the bound on reading is what forbids to try it.
    policy = Policy(read_amplification_max=100)
    base = np.random.default_rng(0).standard_normal(MIB // 2).astype(np.float32)
    desk.commit({"w": base}, 1, policy=policy)
    other = np.random.default_rng(1).standard_normal(MIB // 2).astype(np.float32)
    desk.commit({"w": other}, 2, parent=0, policy=policy)
    receipt = desk.commit({"w": base * np.float32(1.0000001)}, 3, parent=0, policy=policy)
    assert receipt.chunks_delta == receipt.chunks_new == 1


# The lease


def test_saver_holds_the_lease_for_its_trainer_until_it_is_asked_to_give_it_up(desk, address):
    desk.commit(noise(1), 1)
    path = Path(address) / layout.lease_name("main")
    with ckstore.open(address) as store:
        holder = store._parts.lease.holder()
        assert holder.pid == desk.saver.pid
        assert holder.process_started == process_started(desk.saver.pid)
        purpose = SaverPurpose.of(holder.purpose)
        assert purpose == SaverPurpose(os.getpid(), process_started(os.getpid()), 1)
        with pytest.raises(ConflictError, match=f"the saver of pid {os.getpid()}"):
            store.commit(noise(2), 2)
        assert desk.saver.release_lease()
        assert not path.exists()
        store.commit(noise(2), 2)
    # What others wrote meanwhile is seen.
    receipt = desk.commit(noise(2), 3)
    assert (receipt.seq, receipt.chunks_new) == (2, 0)


def test_purpose_names_the_step_that_is_being_written(desk, address):
    desk.commit(noise(1), 1)
    handed = desk.begin(noise(2), 22).stage(1)
    with ckstore.open(address) as store:
        until(lambda: SaverPurpose.of(store._parts.lease.holder().purpose).step == 22)
    handed.stage().finish().wait()


def test_lease_of_another_process_is_a_conflict_and_no_death(desk, address):
    with ckstore.open(address) as store:
        store.commit(noise(1), 1)
        handed = desk.begin(noise(2), 2).stage().finish()
        with pytest.raises(ConflictError, match=f"pid {os.getpid()} ") as caught:
            handed.wait()
        assert caught.value.pid == os.getpid()
        assert handed.events == ["failed", "free"]
        assert desk.saver.is_alive
    assert desk.commit(noise(2), 3).seq == 1


def test_release_waits_for_what_has_begun(desk):
    handed = desk.begin(noise(1), 1).stage(1)
    released = []
    thread = threading.Thread(target=lambda: released.append(desk.saver.release_lease()))
    thread.start()
    thread.join(0.2)
    assert not released
    handed.stage().finish().wait()
    thread.join(SECONDS_MAX)
    assert released == [True]


# Errors


def test_error_of_a_commit_keeps_its_class_and_the_saver_goes_on(desk, address, caplog):
    desk.commit(noise(1), 1)
    packs = Path(address) / "packs"
    packs.rename(packs.with_name("gone"))
    packs.touch()
    handed = desk.begin(noise(2), 2).stage().finish()
    with caplog.at_level(logging.ERROR, "ckstore"), pytest.raises((ckstore.CkstoreError, OSError)) as caught:
        handed.wait()
    assert not isinstance(caught.value, SaverError)
    assert "the commit of step 2 failed" in caplog.text
    packs.unlink()
    packs.with_name("gone").rename(packs)
    assert desk.commit(noise(2), 2).step == 2


def test_store_that_is_not_there_is_told_with_its_own_class(tmp_path):
    desk = Desk(tmp_path / "none")
    try:
        with pytest.raises(NotFoundError, match="no store here"):
            desk.saver.wait_ready(SECONDS_MAX)
        with pytest.raises(NotFoundError):
            desk.commit(noise(1), 1)
    finally:
        desk.close()


def test_head_that_means_nothing_fails_its_ticket_only(desk):
    handed = desk.begin(noise(1), 1)
    desk.saver.abort(handed.number)
    with pytest.raises(SaverError):
        handed.wait()
    desk.arena.slots[0].start(2, MIB)
    desk.arena.slots[0].view(0, 100)[:] = b"\xff" * 100
    desk.ticket = 2
    bad = Handed(desk, 2, desk.arena.slots[0], None, ())
    desk.saver.begin(2, 0, 0, 100, bad.callbacks())
    with pytest.raises(ckstore.CorruptError, match="cannot be read"):
        bad.wait()
    assert desk.commit(noise(1), 3).seq == 0


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\xff",
        b"\1garbage",
        messages.encode_message(messages.Ready(1)),
        messages.encode_message(messages.Quit()) * 2,
    ],
    ids=["empty", "kind", "garbage", "direction", "twice"],
)
def test_malformed_message_ends_the_connection_loudly(desk, address, caplog, packet):
    desk.commit(noise(1), 1)
    handed = desk.begin(noise(2), 2).stage(1)
    assert handed.began.wait(SECONDS_MAX)
    with caplog.at_level(logging.ERROR, "ckstore"):
        if packet:
            desk.saver._channel.send(packet)
        else:
            send(desk.saver._channel, messages.Begin(1, 0, 0, 1, None, 0))
        with pytest.raises(SaverError):
            handed.wait()
        assert desk.saver.quit(SECONDS_MAX)
    assert "cannot understand its trainer" in caplog.text
    with ckstore.open(address) as store:
        assert store.steps() == [1]


def test_what_was_whole_is_published_although_its_saver_held_back_when_it_heard_nonsense(desk, address):
    desk.commit(noise(0), 0)
    handed = desk.begin(noise(1), 1, hold_ms=600_000).stage()
    handed.slot.state = STAGED
    desk.saver._channel.send(b"\1garbage")
    assert handed.wait().step == 1
    with ckstore.open(address) as store:
        assert store.steps() == [0, 1]


def test_slot_that_is_not_free_is_not_begun_again(desk, caplog):
    handed = desk.begin(noise(1), 1).stage(1)
    assert handed.began.wait(SECONDS_MAX)
    with caplog.at_level(logging.ERROR, "ckstore"):
        desk.begin(noise(2), 2)
        with pytest.raises(SaverError):
            handed.wait()
    assert "not free" in caplog.text


# The process


def test_saver_imports_neither_torch_nor_what_the_trainer_has(desk):
    code = "import sys, ckstore.saver.server; print(sorted({'torch', 'typer', 'rich'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    desk.commit(noise(1), 1)
    # Not the bare word: the whole environment may lie in a folder of that name.
    maps = Path(f"/proc/{desk.saver.pid}/maps").read_text()
    assert not re.search(r"/site-packages/torch/|libtorch|libc10", maps)


def test_saver_starts_in_well_under_a_second(address):
    # Time on the processor, for others may keep it from us.
    desk = Desk(address)
    try:
        assert desk.saver.wait_ready(SECONDS_MAX)
        fields = Path(f"/proc/{desk.saver.pid}/stat").read_text().rsplit(")", 1)[-1].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        assert seconds < 0.9
    finally:
        desk.close()


def test_command_line_holds_no_address(desk, address):
    command = Path(f"/proc/{desk.saver.pid}/cmdline").read_bytes()
    assert b"ckstore.saver" in command
    assert address.encode() not in command


def test_saver_has_three_descriptors_of_ours_and_gives_way(address):
    desk = Desk(address, nice=7)
    try:
        desk.saver.wait_ready(SECONDS_MAX)
        assert os.getpriority(os.PRIO_PROCESS, desk.saver.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 7
        held = links(desk.saver.pid)
        assert sum("ckstore-arena" in link for link in held) == 1
        assert sum("eventfd" in link for link in held) == 1
        assert os.getsid(desk.saver.pid) == desk.saver.pid
        assert Path(f"/proc/{desk.saver.pid}/cwd").readlink() == Path("/")
    finally:
        desk.close()


def test_ctrl_c_is_the_trainer_s_affair(desk):
    desk.saver.wait_ready(SECONDS_MAX)
    os.kill(desk.saver.pid, signal.SIGINT)
    assert desk.commit(noise(1), 1).seq == 0


def test_sigterm_lets_the_saver_finish_what_has_begun_and_then_end(desk, address):
    handed = desk.begin(noise(1), 1).stage(1)
    assert handed.began.wait(SECONDS_MAX)
    os.kill(desk.saver.pid, signal.SIGTERM)
    assert not handed.ended.wait(0.2)
    handed.stage().finish()
    assert handed.wait().seq == 0
    until(lambda: not desk.saver.is_alive, "the end of the saver")
    assert not (Path(address) / layout.lease_name("main")).exists()
    desk.start()
    assert desk.commit(noise(2), 2).seq == 1


def test_sigterm_ends_an_idle_saver(desk, address):
    desk.commit(noise(1), 1)
    os.kill(desk.saver.pid, signal.SIGTERM)
    until(lambda: not desk.saver.is_alive, "the end of the saver")
    assert not (Path(address) / layout.lease_name("main")).exists()


def test_log_records_of_the_saver_reach_the_trainer_s_log(desk, address, caplog):
    desk.commit(noise(1), 1)
    lease = Path(address) / layout.lease_name("main")
    with caplog.at_level(logging.WARNING, "ckstore"):
        lease.write_bytes(b"torn")
        desk.begin(noise(2), 2).stage().finish()
        until(lambda: "unreadable lease" in caplog.text, "the record")
    assert f"saver (pid {desk.saver.pid})" in caplog.text
