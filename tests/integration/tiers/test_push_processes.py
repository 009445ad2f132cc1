"""Protects a store whose pushes and pulls are killed at any request, or run while a trainer commits."""

from __future__ import annotations

import os
import select
import shutil
import signal
import textwrap
from concurrent.futures import Future

import numpy as np
import pytest

import ckstore
from ckstore.io.url import backend_for
from support.prepared_trainers import prepared
from support.push_states import free_local_packs

COUNT = 4
PUSH = "store.push({address!r}, keep_local={keep_local})"
PULL = "store.pull()"
TRAIN = """
for step in range(100, 112):
    store.commit({"w": np.full(20_000, step % 3, np.float32), "step": step}, step)
"""


def state_of(seed):
    source = np.random.default_rng(seed)
    return {"w": source.standard_normal(40_000).astype(np.float32), "shared": np.arange(5_000), "step": seed}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template") / "store"
    with ckstore.open(folder) as store:
        for step in range(COUNT):
            store.commit(state_of(step), step)
    return folder


@pytest.fixture
def start(server):
    """Return two functions: one runs a program on a store in a process and returns its pid, one waits for it."""
    forks = prepared("numpy", "ckstore.commit", "ckstore.tiers.push", "ckstore.tiers.pull", "ckstore.io.remote.backend")

    def act(folder, program, **variables):
        variables = {**server.environment, **variables}
        head = f"import os, numpy as np, ckstore; os.environ.update({variables!r})"
        body = textwrap.indent(program, "    ")
        return forks.start(f"{head}\nwith ckstore.open({str(folder)!r}) as store:\n{body}\n", 1, 2)

    return act, forks.wait


def assert_restores(store):
    for step in range(COUNT):
        got, wanted = store.restore(step), state_of(step)
        assert np.array_equal(got["w"], wanted["w"])
        assert np.array_equal(got["shared"], wanted["shared"])


def run_and_kill(proxy, start, wanted, folder, program):
    """Run a program that is killed at a request; return whether it made that request."""
    begin, wait = start
    begun = Future()

    def kill_it(number, *_request):
        if number != wanted:
            return ""
        process = os.pidfd_open(begun.result())
        signal.pidfd_send_signal(process, signal.SIGKILL)
        # The log is readable once the process has ended.
        select.select([process], [], [])
        os.close(process)
        return "reset"

    proxy.begin(kill_it)
    begun.set_result(begin(folder, program, AWS_ENDPOINT_URL=proxy.endpoint))
    code = wait(begun.result())
    proxy.begin()
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.deep
def test_killed_push_and_pull_lose_nothing(template, tmp_path, proxy, past_proxy, server, start, sample, note):
    killed, numbers = 0, sample.part(range(60), parts=20)
    for number in numbers:
        folder, address = tmp_path / f"store-{number}", server.new_address()
        shutil.copytree(template, folder)
        for program in (PUSH.format(address=address, keep_local=0), PULL):
            killed += run_and_kill(proxy, start, number, folder, program)
            with ckstore.open(folder) as store:
                free_local_packs(store)
                assert_restores(store)
            if program is not PULL:
                with ckstore.open(folder) as store:
                    store.push(address, keep_local=0)
                    free_local_packs(store)
        with ckstore.open(folder) as store:
            store.pull()
            assert_restores(store)
            assert store.verify("decode").is_clean
        shutil.rmtree(folder)
    # A push makes more requests than this; a pull fewer.
    assert killed >= len(numbers) >= (60 if sample.is_whole else 3)
    note(f"pushes and pulls killed at a request: {killed}")


def test_concurrent_pushes_during_commits_lose_nothing(template, tmp_path, address, start):
    folder = tmp_path / "store"
    begin, wait = start
    shutil.copytree(template, folder)
    pushes = [PUSH.format(address=address, keep_local=keep) for keep in (2, 1, 0)]
    pids = [begin(folder, program) for program in (TRAIN, *pushes)]
    assert [wait(pid) for pid in pids] == [0, 0, 0, 0]
    with ckstore.open(folder) as store:
        free_local_packs(store)
        assert_restores(store)
        assert store.steps() == [*range(COUNT), *range(100, 112)]
        for step in range(100, 112):
            assert np.array_equal(store.restore(step)["w"], np.full(20_000, step % 3, np.float32))
        assert store.verify("decode", remote=True).is_clean
    assert backend_for(address).list_names("tmp") == []
