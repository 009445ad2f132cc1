"""Protects a store whose pushes and pulls are killed at any request, or run concurrently while a trainer commits."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

import ckstore
from ckstore.io.address import backend_for
from support.push_states import free_local_packs

COUNT = 4
PUSH = "import sys, ckstore; ckstore.open(sys.argv[1]).push(sys.argv[2], keep_local=int(sys.argv[3]))"
PULL = "import sys, ckstore; ckstore.open(sys.argv[1]).pull()"
TRAIN = """
import sys, numpy as np, ckstore
with ckstore.open(sys.argv[1]) as store:
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


def start(program, *arguments, **variables):
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, env={**os.environ, **variables})


def assert_restores(store):
    for step in range(COUNT):
        got, wanted = store.restore(step), state_of(step)
        assert np.array_equal(got["w"], wanted["w"])
        assert np.array_equal(got["shared"], wanted["shared"])


def run_and_kill(proxy, wanted, program, *arguments):
    """Run a program that is killed when it makes a request; return whether it got so far."""
    process = start(program, *arguments, AWS_ENDPOINT_URL=proxy.endpoint)

    def kill_it(number, *_request):
        if number == wanted:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return "reset"
        return ""

    proxy.begin(kill_it)
    process.wait()
    proxy.begin()
    return process.returncode == -signal.SIGKILL


@pytest.mark.deep
def test_push_and_pull_killed_at_any_request_lose_nothing(template, tmp_path, proxy, past_proxy, server, sample, tell):
    killed, numbers = 0, sample.part(range(60), parts=20)
    for number in numbers:
        folder, address = tmp_path / f"store-{number}", server.new_address()
        shutil.copytree(template, folder)
        for program, *arguments in ((PUSH, folder, address, 0), (PULL, folder)):
            killed += run_and_kill(proxy, number, program, *arguments)
            with ckstore.open(folder) as store:
                free_local_packs(store)
                assert_restores(store)
            if program is PUSH:
                with ckstore.open(folder) as store:
                    store.push(address, keep_local=0)
                    free_local_packs(store)
        with ckstore.open(folder) as store:
            store.pull()
            assert_restores(store)
            assert store.verify("decode").is_clean
        shutil.rmtree(folder)
    # A push makes more requests than that; a pull fewer.
    assert killed >= len(numbers) >= (60 if sample.is_whole else 3)
    tell(f"pushes and pulls killed at a request: {killed}")


def test_concurrent_pushes_during_commits_lose_nothing(template, tmp_path, address):
    folder = tmp_path / "store"
    shutil.copytree(template, folder)
    trainer = start(TRAIN, folder)
    pushers = [start(PUSH, folder, address, keep) for keep in (2, 1, 0)]
    assert [process.wait() for process in (trainer, *pushers)] == [0, 0, 0, 0]
    with ckstore.open(folder) as store:
        free_local_packs(store)
        assert_restores(store)
        assert store.steps() == [*range(COUNT), *range(100, 112)]
        for step in range(100, 112):
            assert np.array_equal(store.restore(step)["w"], np.full(20_000, step % 3, np.float32))
        assert store.verify("decode", remote=True).is_clean
    assert backend_for(address).list_names("tmp") == []
