"""Protects the link between ranks, in one process: who may join, strangers, large messages, forks, the end."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import struct
import threading
import time

import pytest

from ckstore.errors import MalformedError, RankError, UnsupportedError, UsageError
from ckstore.ranks import handshake, io_loop
from ckstore.ranks import link as link_module
from ckstore.ranks.connection import Connection
from ckstore.ranks.handshake import CLAIM_NBYTES, GREETING_NBYTES
from ckstore.ranks.io_loop import Job, Timing
from ckstore.ranks.link import Link, listen
from ckstore.ranks.messages import TO_RANK_0, Beat, Part, encode_message
from support.forked import fork
from support.link_rank import commit

TOKEN = b"a secret of this job"
QUICK = Timing(join_seconds=5.0, beat_seconds=0.2, silent_seconds=1.5, handshake_seconds=0.5, close_seconds=1.0)


@pytest.fixture
def hub():
    """Return a function that opens the links of some ranks; rank 0 and its port first. They are closed at the end."""
    with contextlib.ExitStack() as stack:

        def opened(world, *, ranks=None, timing=QUICK):
            listener = listen("127.0.0.1", 0)
            port = listener.getsockname()[1]
            links = [Link(Job(0, world, TOKEN), timing, listener=listener)]
            stack.callback(links[0].close)
            for rank in range(1, world) if ranks is None else ranks:
                links.append(joined(rank, world, port, timing=timing))
                stack.callback(links[-1].close)
            return port, links

        yield opened


def joined(rank, world, port, *, token=TOKEN, timing=QUICK):
    return Link(Job(rank, world, token), timing, addresses=[("127.0.0.1", port)])


def in_threads(links, act):
    """Call a function for every link, each in a thread; return the results or exceptions."""
    found = {}

    def run(link):
        try:
            found[link.rank] = act(link)
        except Exception as error:
            found[link.rank] = error

    threads = [threading.Thread(target=run, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[link.rank] for link in links]


def wait_until(is_met, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_closed(end, seconds=5):
    """Whether the other side closes a connection in time."""
    end.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        while end.recv(4096):
            pass
    return True


def test_ranks_commit_and_agree(hub, tmp_path):
    _, links = hub(3)
    for step in range(3):
        finishes = in_threads(links, lambda link, step=step: commit(link, step, tmp_path))
        assert [finish.receipt for finish in finishes] == [b"receipt %d" % (step + 1)] * 3
    assert in_threads(links, lambda link: link.agree("step", b"%d" % link.rank, max)) == [b"2"] * 3


def test_one_rank_commits_alone(tmp_path):
    link = Link(Job(0, 1, b""))
    assert commit(link, 5, tmp_path).receipt == b"receipt 1"
    assert link.agree("step", b"7", max) == b"7"
    link.close()
    link.close()


def test_error_of_a_decision_is_raised_on_all_ranks(hub):
    def refuse(values):
        raise UsageError("there is no such step", where="steps", step=9)

    _, links = hub(2)
    for error in in_threads(links, lambda link: link.agree("restore", b"9", refuse)):
        assert isinstance(error, UsageError)
        assert (str(error), error.step, error.rank) == ("there is no such step: rank 0: steps", 9, 0)


def test_ranks_reply_without_a_call_of_theirs(hub):
    _, links = hub(3)
    for link in links:
        link.reply_to("stop", lambda link=link: bytes([link.rank]), max)
    links[1].ask("stop")
    assert in_threads(links, lambda link: link.answer_to("stop")) == [b"\x02"] * 3


def test_different_values_are_named(hub, tmp_path):
    _, links = hub(2)
    finishes = in_threads(links, lambda link: commit(link, 100, tmp_path, facts={"run": f"run-{link.rank}"}))
    assert {finish.error.kind for finish in finishes} == {"UsageError"}
    text = "the ranks do not commit the same: run is run-0 on rank 0 and run-1 on rank 1"
    assert {finish.error.what for finish in finishes} == {text}


# Who may join


def test_wrong_token_is_refused(hub, caplog):
    port, _ = hub(2, ranks=[])
    with pytest.raises(RankError, match=r"rank 1 could not reach rank 0 within 1 s: 127.0.0.1:\d+ \(.*another token"):
        joined(1, 2, port, token=b"another", timing=QUICK._replace(join_seconds=1.0))
    assert caplog.text.count("not from this job") == 1


@pytest.mark.parametrize(("rank", "world"), [(1, 3), (5, 2)])
def test_other_world_is_refused(hub, rank, world):
    port, _ = hub(2, ranks=[])
    with pytest.raises(UsageError, match=f"rank {rank} of {world} connected to a job of 2 ranks"):
        joined(rank, world, port)


def test_second_process_of_one_rank_is_refused(hub, tmp_path):
    port, links = hub(2)
    with pytest.raises(UsageError, match="rank 1 is connected already"):
        joined(1, 2, port)
    assert all(finish.receipt for finish in in_threads(links, lambda link: commit(link, 1, tmp_path)))


def test_lost_rank_cannot_come_back(hub, tmp_path):
    port, links = hub(2)
    links[1].close()
    finish = commit(links[0], 1, tmp_path)
    assert finish.error.what == "rank 1 has ended or closed its store: the commit of step 1 failed on all ranks"
    with pytest.raises(RankError, match="rank 1 has ended or closed its store, and cannot come back"):
        joined(1, 2, port)


def test_other_version_is_named_on_all_ranks(hub, tmp_path, monkeypatch):
    port, links = hub(3, ranks=[1])
    newer = handshake.new_greeting("2.5.0", version=7)
    monkeypatch.setattr(link_module, "new_greeting", lambda release: newer)
    text = r"rank 2 runs ckstore 2.5.0 \(version 7 of .*\), and rank 0 runs ckstore .* \(version 1\)"
    with pytest.raises(UnsupportedError, match=text):
        joined(2, 3, port)
    for finish in in_threads(links, lambda link: commit(link, 1, tmp_path)):
        assert finish.error.what.startswith("rank 2 runs ckstore 2.5.0 (version 7")
        assert finish.rank == 2


def test_rank_0_of_another_version_is_named(hub, monkeypatch):
    newer = handshake.new_greeting("2.5.0", version=7)
    monkeypatch.setattr(io_loop, "new_greeting", lambda release: newer)
    port, _ = hub(2, ranks=[])
    with pytest.raises(UnsupportedError, match=r"rank 1 runs ckstore .* \(version 1 .* rank 0 runs ckstore 2.5.0"):
        joined(1, 2, port)


def test_losses_are_reported_also_to_those_that_ask_later(hub):
    _, links = hub(3)
    early, late = queue.SimpleQueue(), queue.SimpleQueue()
    links[0].call_when_lost(lambda *loss: early.put(loss))
    links[2].close()
    loss = (2, "has ended or closed its store")
    assert early.get(timeout=5) == loss
    links[0].call_when_lost(lambda *loss: late.put(loss))
    assert late.get(timeout=5) == loss


def test_the_wait_for_a_stopped_rank_0_can_be_ended():
    # It accepts connections, because the kernel does, and says nothing.
    reasons = iter([None, None, RankError("rank 0 has been silent", rank=0)])

    def check():
        if (reason := next(reasons)) is not None:
            raise reason

    begun = time.monotonic()
    patient = QUICK._replace(join_seconds=60.0, handshake_seconds=60.0)
    with listen("127.0.0.1", 0) as silent, pytest.raises(RankError, match="rank 0 has been silent"):
        Link(Job(1, 2, TOKEN), patient, addresses=[silent.getsockname()[:2]], check=check)
    assert time.monotonic() - begun < 10


# Strangers


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(CLAIM_NBYTES), bytes(1 << 16), b"\xff" * (CLAIM_NBYTES - 1)],
    ids=["silent", "http", "zeros", "long", "short"],
)
def test_strangers_are_closed_and_do_no_harm(hub, tmp_path, caplog, sent):
    port, links = hub(2, ranks=[])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
    for end in strangers:
        with contextlib.suppress(ConnectionError):
            end.sendall(sent)
    links.append(joined(1, 2, port))
    assert all(finish.receipt for finish in in_threads(links, lambda link: commit(link, 1, tmp_path)))
    for end in strangers:
        assert is_closed(end)
        end.close()
    links[1].close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_many_silent_strangers_do_not_keep_a_rank_out(hub, tmp_path):
    slow = QUICK._replace(handshake_seconds=30.0)
    port, links = hub(2, ranks=[], timing=slow)
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    links.append(joined(1, 2, port))
    assert all(finish.receipt for finish in in_threads(links, lambda link: commit(link, 1, tmp_path)))
    links[1].close()
    for end in strangers:
        end.close()


def test_replayed_claim_is_refused(hub):
    # A listener in the middle sees one handshake, and repeats it.
    port, _ = hub(2, ranks=[])
    with socket.create_connection(("127.0.0.1", port)) as first:
        theirs = first.recv(GREETING_NBYTES)
        claim = handshake.new_claim(TOKEN, theirs, handshake.new_greeting("1"), 1, 2)
        first.sendall(claim)
        assert handshake.is_answer(TOKEN, theirs, claim, first.recv(handshake.PROOF_NBYTES))
        with socket.create_connection(("127.0.0.1", port)) as second:
            second.sendall(claim)
            assert len(second.recv(GREETING_NBYTES)) == GREETING_NBYTES
            assert second.recv(1) == b""


def test_changed_claims_are_refused():
    ours = handshake.new_greeting("1.0")
    claim = handshake.new_claim(TOKEN, ours, handshake.new_greeting("2.0"), 3, 8)
    assert handshake.check_claim(TOKEN, ours, claim) == (1, "2.0", 3, 8)
    for place in range(CLAIM_NBYTES):
        changed = bytearray(claim)
        changed[place] ^= 1
        assert handshake.check_claim(TOKEN, ours, bytes(changed)) is None
    assert handshake.check_claim(TOKEN, handshake.new_greeting("1.0"), claim) is None
    # A proof of one side is not one of the other.
    assert handshake.answer_to(TOKEN, ours, claim) != claim[-handshake.PROOF_NBYTES :]


# Frames


@pytest.fixture
def pair():
    """Return a connection, and the other end of its socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Connection(ours, "rank 3", TO_RANK_0, 0.0), theirs


def framed(packet):
    return struct.pack("<I", len(packet)) + packet


def test_frames_arrive_in_pieces_of_any_size(pair):
    connection, theirs = pair
    sent = [Part(1, 0, b"x" * 100), Beat(), Part(2, 0, b"y" * 70_000)]
    content = b"".join(framed(encode_message(message)) for message in sent)
    found = []
    for begin in range(0, len(content), 7):
        theirs.sendall(content[begin : begin + 7])
        found += connection.receive(1.0)
    assert found == sent
    assert connection.heard == 1.0
    theirs.close()
    assert connection.receive(2.0) == []
    assert connection.is_ended


@pytest.mark.parametrize("length", [0, 17 << 10, (1 << 32) - 1])
def test_length_is_checked_before_memory_is_allocated(pair, length):
    connection, theirs = pair
    theirs.sendall(struct.pack("<I", length) + encode_message(Beat()))
    with pytest.raises(MalformedError, match="rank 3 sent"):
        connection.receive(1.0)


def test_peer_that_sends_garbage_is_lost(hub, tmp_path):
    port, links = hub(2, ranks=[])
    with socket.create_connection(("127.0.0.1", port)) as end:
        theirs = end.recv(GREETING_NBYTES)
        end.sendall(handshake.new_claim(TOKEN, theirs, handshake.new_greeting("1"), 1, 2))
        assert len(end.recv(handshake.PROOF_NBYTES)) == handshake.PROOF_NBYTES
        end.sendall(framed(bytes((200, 0))))
        assert is_closed(end)
    finish = commit(links[0], 1, tmp_path)
    assert finish.rank == 1
    assert (
        "rank 1 sent something that this rank cannot read (rank 1 (127.0.0.1) sent a message of kind 200"
        in finish.error.what
    )


def test_large_contents_arrive_while_heartbeats_go_on(hub):
    # Longer than the buffers of the sockets, so that it is sent in many pieces.
    _, links = hub(2)
    value = bytes(200_000)
    for _ in range(3):
        found = in_threads(links, lambda link: link.agree("large", value, lambda values: values[1]))
        assert found == [value] * 2


def test_quiet_links_stay_open(hub, tmp_path):
    _, links = hub(2)
    begun = time.monotonic()
    while time.monotonic() - begun < 2 * QUICK.silent_seconds:
        time.sleep(0.1)
    assert all(finish.receipt for finish in in_threads(links, lambda link: commit(link, 1, tmp_path)))


def test_a_connection_that_is_lost_between_commits_is_logged_once_and_answered_quickly(hub, tmp_path, caplog):
    _, links = hub(3)
    (peer,) = links[1]._loop._peers.values()
    peer.end.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: len(caplog.records) == 2)
    found = sorted(record.getMessage() for record in caplog.records)
    assert [text.partition(": ")[0] for text in found] == [
        "rank 0 closed its connection",
        "rank 1 closed its connection",
    ]
    assert {text.partition(": ")[2] for text in found} == {
        "commits fail from now on. Start the job again; it continues from the newest checkpoint"
    }
    begun = time.monotonic()
    for finish in in_threads(links, lambda link: commit(link, 1, tmp_path)):
        assert "closed its connection" in finish.error.what
        assert finish.error.todo.startswith("start the job again")
    for error in in_threads(links, lambda link: link.agree("restore", b"", max)):
        assert isinstance(error, RankError)
    assert time.monotonic() - begun < QUICK.silent_seconds
    assert len(caplog.records) == 2


def test_a_rank_that_closes_its_store_is_not_logged(hub, caplog):
    _, links = hub(2)
    links[1].close()
    wait_until(lambda: links[0].is_broken)
    assert not caplog.records


# Forks and the end


def test_forked_child_neither_uses_nor_keeps_the_connections(hub, tmp_path):
    _, links = hub(2)

    def child():
        for link in links:
            with pytest.raises(UsageError, match="forked child"):
                link.next_number()
        # Until the parent has finished: a child that kept the sockets open would hide the end of rank 1.
        time.sleep(2)

    check = fork(child)
    links[1]._loop._timing = links[1]._loop._timing._replace(close_seconds=0.0)
    links[1].close()
    begun = time.monotonic()
    finish = commit(links[0], 1, tmp_path)
    assert finish.rank == 1
    assert time.monotonic() - begun < QUICK.silent_seconds
    check()


def test_closed_link_answers(hub, tmp_path):
    _, links = hub(2)
    for link in links:
        link.close()
        finish = commit(link, 1, tmp_path)
        assert "closed its store before it acknowledged" in finish.error.what
        with pytest.raises(RankError, match="closed its store before it answered"):
            link.agree("step", b"", max)


def test_unused_link_ends_its_thread():
    link = Link(Job(0, 1, b""), QUICK)
    thread = link.thread
    del link
    thread.join(10)
    assert not thread.is_alive()


def test_failure_of_the_thread_answers_everybody(hub, tmp_path, monkeypatch, caplog):
    _, links = hub(2)
    monkeypatch.setattr(links[0]._loop, "_check_time", lambda now: 1 / 0)
    links[0].thread.join(10)
    finishes = in_threads(links, lambda link: commit(link, 1, tmp_path))
    assert all(finish.receipt is None for finish in finishes)
    assert "the connection between ranks failed" in caplog.text
