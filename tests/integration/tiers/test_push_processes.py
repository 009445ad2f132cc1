"""Protects a store whose pushes run at the same time, beside a trainer, and are killed at any moment."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

import ckstore
from ckstore.format import layout
from ckstore.io.address import backend_for

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


def start(program, *arguments):
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)])


def free_local_packs(store):
    parts = store._parts
    named = set()
    for name in parts.manifests.listing().names:
        named |= {pack.pack_id for pack in parts.manifests.load(name).packs if pack.tier == "local"}
    for folder in layout.pack_folders():
        for file in parts.backend.list_names(folder):
            if layout.parse_pack_file(file) not in named:
                parts.backend.unlink(f"{folder}/{file}")


def assert_restores(store):
    for step in range(COUNT):
        got, wanted = store.restore(step), state_of(step)
        assert np.array_equal(got["w"], wanted["w"])
        assert np.array_equal(got["shared"], wanted["shared"])


def run_and_kill(proxy, wanted, program, *arguments):
    """Run a program that is killed when it makes a request; return whether it got so far."""
    process = start(program, *arguments)

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


def kill_at(numbers, template, tmp_path, server, proxy, tell):
    """Kill a push and a pull at each of these requests, and look at what they leave."""
    killed = 0
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
    assert killed >= len(numbers)
    tell(f"pushes and pulls killed at a request: {killed}")


def test_push_and_pull_survive_sigkill(template, tmp_path, proxy, server, tell):
    kill_at((2, 9, 30), template, tmp_path, server, proxy, tell)


@pytest.mark.slow
def test_push_and_pull_survive_sigkill_at_every_request(template, tmp_path, proxy, server, tell):
    kill_at(range(60), template, tmp_path, server, proxy, tell)


def test_pushes_at_once_beside_a_trainer_lose_nothing(template, tmp_path, address):
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
