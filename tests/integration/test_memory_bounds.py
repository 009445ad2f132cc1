"""Protects the memory limit of the policy for reading, with any number of threads."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

import ckstore
from ckstore.clock import SYSTEM_CLOCK
from ckstore.config import KIB, MIB, Limits, Policy
from ckstore.io.buffers import BufferPool
from ckstore.ops import verify_packs
from ckstore.restore import reader, restore
from ckstore.store.memory_budget import (
    DECODE,
    DECODE_CHAIN,
    ENCODE,
    ENCODE_DELTA,
    QUANTIZE,
    READ_BUFFERS,
    READ_BUFFERS_MIN,
    WRITE_BLOCK_NBYTES,
    WRITE_BLOCKS_MIN,
    MemoryBudget,
    read_buffer_nbytes,
)
from ckstore.store.store_config import create_store
from support.synthetic_training import AdamRun

CHUNK_NBYTES = 64 * KIB


def fitted(threads, memory_nbytes_max):
    """Return the memory of one thread and of one buffer, and how many of both a policy gets."""
    limits = Limits(4 * MIB)
    policy = replace(Policy(threads=threads), memory_nbytes_max=memory_nbytes_max)
    return DECODE_CHAIN.nbytes(limits), read_buffer_nbytes(limits), *DECODE_CHAIN.fit_reading(policy, limits)


@pytest.mark.parametrize("memory", [64 * MIB, 100 * MIB, Policy().memory_nbytes_max, 1024 * MIB, 8192 * MIB])
def test_threads_and_buffers_fit_into_the_memory(memory):
    last = 0
    for wanted in range(1, 65):
        worker, buffer, threads, buffers = fitted(wanted, memory)
        assert 1 <= threads <= wanted
        assert threads + READ_BUFFERS_MIN <= buffers <= max(READ_BUFFERS, threads + READ_BUFFERS_MIN)
        assert threads * worker + buffers * buffer <= memory
        # Neither a further thread, with its buffer, nor a further buffer would fit, unless there are enough.
        assert threads == wanted or (threads + 1) * (worker + buffer) + READ_BUFFERS_MIN * buffer > memory
        assert buffers >= READ_BUFFERS or threads * worker + (buffers + 1) * buffer > memory
        assert threads >= last
        last = threads


def test_default_policy_uses_most_of_eight_cores():
    _, _, threads, buffers = fitted(8, Policy().memory_nbytes_max)
    assert threads >= 7
    assert buffers >= threads + READ_BUFFERS_MIN


def test_little_memory_allows_one_thread():
    for wanted in range(1, 65):
        assert fitted(wanted, 56 * MIB)[2:] == (1, 8)


@pytest.mark.parametrize("wanted", [1, 8, 64])
def test_too_little_memory_still_allows_one_worker(wanted):
    policy, limits = Policy(threads=wanted), Limits()
    budget = MemoryBudget(0, 2 * policy.memory_nbytes_max // MIB)
    assert budget.fit_threads(policy, limits) == 1
    assert budget.fit_reading(policy, limits) == (1, 1 + READ_BUFFERS_MIN)
    assert budget.fit_writing(policy, limits) == (1, WRITE_BLOCKS_MIN)


@pytest.fixture
def opened(backend):
    """A store of small chunks whose policy asks for more threads than the memory allows."""
    policy = Policy(threads=64, memory_nbytes_max=56 * MIB, compression="none")
    create_store(backend, SYSTEM_CLOCK, Limits(chunk_nbytes_max=CHUNK_NBYTES))
    with ckstore.open(backend, policy=policy) as store:
        store.commit({"w": np.random.default_rng(0).standard_normal(80 * CHUNK_NBYTES // 8)}, 1)
        yield store


@pytest.fixture
def used(monkeypatch):
    """The resources created by reading: sizes of pools, and the names of threads started."""
    pools, names = [], []

    class Pool(BufferPool):
        def __init__(self, block_nbytes, count):
            super().__init__(block_nbytes, count)
            pools.append(self.nbytes)

    for module in (reader, verify_packs):
        monkeypatch.setattr(module, "BufferPool", Pool)
        thread_class = module.threading.Thread

    def start(thread):
        names.append(thread.name)
        begin(thread)

    begin = thread_class.start
    monkeypatch.setattr(thread_class, "start", start)
    return pools, names


def check_bound(used, prefix, thread_nbytes):
    pools, names = used
    threads = sum(name.startswith(prefix) for name in names)
    assert 1 < threads < 64
    assert len(pools) == 1
    assert pools[0] + threads * thread_nbytes <= 56 * MIB


def test_restore_respects_memory_limit(opened, used):
    assert opened.restore(1)["w"].nbytes == 80 * CHUNK_NBYTES
    check_bound(used, "ckstore-decode-", DECODE_CHAIN.nbytes(Limits(CHUNK_NBYTES)))


def test_verify_respects_memory_limit(opened, used):
    assert opened.verify("decode").is_clean
    check_bound(used, "ckstore-verify", DECODE.nbytes(Limits(CHUNK_NBYTES)))


def test_restore_progress_is_incremental(opened, monkeypatch):
    sums, seen = [], []

    def counted(values):
        sums.append(1)
        return sum(values)

    monkeypatch.setattr(restore, "sum", counted, raising=False)
    opened.restore(1, on_progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 20
    assert max(seen) == (80 * CHUNK_NBYTES, 80 * CHUNK_NBYTES)
    assert len(sums) == 1


@pytest.mark.parametrize(("budget", "mib"), [(ENCODE, 66), (ENCODE_DELTA, 74), (QUANTIZE, 122)])
def test_policy_documents_the_least_memory_of_a_commit(budget, mib):
    least = Policy(threads=64, memory_nbytes_max=56 * MIB)
    threads, blocks = budget.fit_writing(least, Limits())
    assert (threads, blocks) == (1, WRITE_BLOCKS_MIN)
    assert -(-(budget.nbytes(Limits()) + blocks * WRITE_BLOCK_NBYTES) // MIB) == mib
    assert f"{mib} MiB" in Policy.__doc__


@pytest.mark.parametrize(
    ("policy", "budget"),
    [
        (Policy(delta=False), ENCODE),
        (Policy(delta=False, compression="best"), ENCODE),
        (Policy(), ENCODE_DELTA),
        (Policy(fidelity=ckstore.Residual.near()), QUANTIZE),
        (Policy(fidelity=ckstore.Residual.near(), verify_encoded=False), QUANTIZE),
    ],
    ids=["encode", "encode best", "delta", "quantize", "quantize privately"],
)
def test_commit_thread_respects_its_budget(tmp_path, policy, budget):
    run, peaks = AdamRun(shape=(1024, 1280)), []
    with ckstore.open(tmp_path, policy=replace(policy, threads=1)) as store:
        for step in range(3):
            state = run.train(1).state()
            tracemalloc.start()
            try:
                store.commit(state, step)
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
    # zstd's contexts, read buffers and write blocks are not traced.
    assert max(peaks) <= budget.nbytes(Limits()) - 8 * MIB
