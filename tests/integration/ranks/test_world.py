"""Protects how ranks find each other: through a process group of torch, through torchrun, or by an address."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ckstore
from ckstore.errors import RankError, UsageError
from ckstore.ranks import world
from ckstore.ranks.link import listen
from ckstore.ranks.world import Ranks, addresses_of, invite
from support import world_rank
from support.link_rank import commit
from support.thread_ranks import stores_of_ranks

TOKEN = "0123456789abcdef"


@pytest.mark.deep(parts=2)
@pytest.mark.parametrize("how", ["torch", "env"])
def test_ranks_of_torchrun_find_each_other(tmp_path, how):
    pytest.importorskip("torch")
    sources = (Path(ckstore.__file__).parents[1], Path(world_rank.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, sources)), "OMP_NUM_THREADS": "1"}
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    line = [*runner, world_rank.__file__, how, str(tmp_path)]
    ended = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert [one["rank"] for one in found] == [0, 1, 2]
    assert {one["world"] for one in found} == {3}
    assert len({one["address"] for one in found}) == 1
    assert found[0]["address"].startswith("127.0.0.1:")
    assert {one["receipt"] for one in found} == {"receipt 1"}
    assert {one["agreed"] for one in found} == {"2"}
    if how == "torch":
        assert [one["pair"] for one in found] == [[0, 1], [0, 2], [1, 2]]
        assert [one["paired"] for one in found] == ["0", "1", "1"]


def free_port():
    with listen("127.0.0.1", 0) as end:
        return end.getsockname()[1]


def test_ranks_by_address(tmp_path):
    # The first address is not of this job: nobody listens there.
    address = f"127.0.0.1:{free_port()}"
    receipts = {}

    def run(rank):
        ranks = Ranks(rank, 2, address if rank == 0 else f"127.0.0.1:1,{address}", TOKEN, join_seconds=20)
        receipts[rank] = commit(ranks.link(), 1, tmp_path).receipt
        ranks.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert receipts == {0: b"receipt 1", 1: b"receipt 1"}


def test_taken_port_is_named():
    with listen("", 0) as end:
        port = end.getsockname()[1]
        with pytest.raises(RankError, match=rf"rank 0 cannot listen .*: \*:{port}"):
            Ranks(0, 2, f"127.0.0.1:{port}", TOKEN).link()


def test_job_that_is_left_before_it_is_joined_keeps_no_port():
    listener, invitation = invite()
    ranks = Ranks._invited(0, 2, invitation, listener, {})
    ranks.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.port))
    with pytest.raises(UsageError, match=r"this ckstore\.Ranks was closed"):
        ranks.link()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((2, 2, "a:1", TOKEN), "there is no rank 2 of 2"),
        ((-1, 2, "a:1", TOKEN), "there is no rank -1 of 2"),
        (("0", 2, "a:1", TOKEN), "rank is not an int: '0'"),
        ((0, True, "a:1", TOKEN), "world is not an int: True"),
        ((0, 2), "the address of rank 0 of 2 is not given"),
        ((0, 2, "a:1", "short"), "a token has at least 16 characters"),
        ((0, 2, "a", TOKEN), "not an address: 'a'"),
        ((0, 2, "a:1,b:99999", TOKEN), "not an address: 'b:99999'"),
    ],
)
def test_wrong_ranks_are_refused(arguments, text):
    with pytest.raises(UsageError, match=text):
        Ranks(*arguments)


@pytest.mark.parametrize(
    ("options", "text"),
    [({"per_rank": "any"}, "any"), ({"on_divergence": "ignore"}, "ignore"), ({"join_seconds": 0}, "join_seconds is 0")],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        Ranks(0, 1, **options)


def test_addresses():
    assert addresses_of("node17:29600, [fe80::1]:80") == [("node17", 29600), ("fe80::1", 80)]


def test_savers_meet_at_the_hosts_that_were_given(monkeypatch):
    monkeypatch.setattr(world, "_own_hosts", lambda: ["203.0.113.5"])
    for hosts, bound in ((["127.0.0.1"], "127.0.0.1"), (["node17", "fe80::1"], "")):
        bind = []
        monkeypatch.setattr(
            world, "listen", lambda host, port, bind=bind: bind.append(host) or listen("127.0.0.1", port)
        )
        listener, invitation = world.invite(hosts)
        _, address = world.invited(invitation)
        assert [host for host, _ in addresses_of(address)] == hosts
        assert {port for _, port in addresses_of(address)} == {listener.port}
        assert bind == [bound]
        listener.close()


def test_a_job_tells_its_savers_the_hosts_of_its_address(tmp_path):
    with stores_of_ranks(tmp_path / "store", 2) as each:
        doors = each(lambda rank: rank.store._job.saver_door)
    assert {next(host for host, _ in addresses_of(door.job.address)) for door in doors} == {"127.0.0.1"}
    assert {door.job.address.count(",") for door in doors} == {0}


def test_a_single_rank_listens_nowhere_and_commits_in_the_background(tmp_path, monkeypatch):
    monkeypatch.setattr(world, "listen", lambda host, port: pytest.fail("a socket was opened"))
    ranks = Ranks(0, 1)
    with ckstore.open(tmp_path / "store", ranks=ranks) as store:
        assert store.commit({"a": 1}, 1).seq == 0
        assert store.commit_async({"a": 2}, 2).result(60).seq == 1
    ranks.close()


def test_environment_must_be_complete(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="the variable RANK is ''"):
        Ranks.of_env()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="this process was not started by torchrun"):
        Ranks.of_env()
    ranks = Ranks.of_env("node17:29600", TOKEN, on_divergence="raise")
    assert (ranks.rank, ranks.world, ranks.on_divergence) == (1, 2, "raise")


def test_torch_must_be_initialized():
    pytest.importorskip("torch")
    with pytest.raises(UsageError, match=r"torch.distributed is not initialized.*of_env"):
        Ranks.of_torch()
